"""Who sends how many tokens to whom? All of it follows from one table: how many tokens of each part each expert gets.

A *part* is what the ranks with the same places along the token axes have of the batch; parts are numbered in the order
of tokens. At the experts, rows are sorted by expert and then by part. Everything here is NumPy, without communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.geometry import Mesh, MeshSpec, Placement, RowOwners, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import bounds, chunk_sizes


@dataclass(frozen=True, eq=False, slots=True)
class RoutePlan:
    """How tokens go to experts on a mesh: `counts[part, expert]`, the axes that split tokens, the one of experts."""

    mesh: Mesh
    token_axes: tuple[int, ...]
    expert_axis: int | None
    counts: IntArray

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[1])

    @property
    def totals(self) -> tuple[int, ...]:
        """The rows of each expert."""
        return tuple(self.counts.sum(0).tolist())

    def part_of(self, rank: int) -> int:
        """The part of the batch that a rank has."""
        place = np.argwhere(self.mesh.ranks == rank)[0]
        number = 0
        for axis in self.token_axes:
            number = number * self.mesh.shape[axis] + int(place[axis])
        return number

    def peers_of(self, rank: int) -> list[int]:
        """The ranks along the axis of experts that a rank exchanges tokens with, in order."""
        if self.expert_axis is None:
            return [rank]
        place = [int(p) for p in np.argwhere(self.mesh.ranks == rank)[0]]
        return [
            int(self.mesh.ranks[(*place[: self.expert_axis], i, *place[self.expert_axis + 1 :])])
            for i in range(self.mesh.shape[self.expert_axis])
        ]

    def experts_of(self, rank: int) -> slice:
        """The experts that a rank has."""
        if self.expert_axis is None:
            return slice(0, self.num_experts)
        edges = bounds(chunk_sizes(self.num_experts, self.mesh.shape[self.expert_axis]))
        place = int(np.argwhere(self.mesh.ranks == rank)[0][self.expert_axis])
        return slice(edges[place], edges[place + 1])

    def sends(self, rank: int) -> dict[int, int]:
        """How many rows a rank sends to each peer."""
        own = self.counts[self.part_of(rank)]
        return {peer: int(own[self.experts_of(peer)].sum()) for peer in self.peers_of(rank)}

    def receives(self, rank: int) -> dict[int, int]:
        """How many rows a rank gets from each peer."""
        experts = self.experts_of(rank)
        return {peer: int(self.counts[self.part_of(peer), experts].sum()) for peer in self.peers_of(rank)}

    def arrival_order(self, rank: int) -> IntArray:
        """What arrives is sorted by peer, then by expert: the numbers of its rows sorted by expert, then by peer."""
        experts = self.experts_of(rank)
        lengths = np.stack([self.counts[self.part_of(peer), experts] for peer in self.peers_of(rank)])
        starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
        wanted, first = lengths.T.reshape(-1), starts.T.reshape(-1)
        return np.repeat(first - (np.cumsum(wanted) - wanted), wanted) + np.arange(wanted.sum())

    def place_rows(self, spec: MeshSpec) -> MeshSpec:
        """The spec with the rows of experts in place of tokens, along the axes that split them."""
        placements: list[Placement] = list(spec.placements)
        parts = np.indices([self.mesh.shape[a] for a in self.token_axes]).reshape(
            len(self.token_axes), len(self.counts)
        )
        for number, axis in enumerate(self.token_axes):
            owners = RowOwners.from_runs(np.tile(parts[number], self.num_experts), self.counts.T.reshape(-1))
            placements[axis] = Shard(0, owners=owners)
        if self.expert_axis is not None:
            holders = np.repeat(np.arange(self.mesh.shape[self.expert_axis]), self._experts_by_place())
            placements[self.expert_axis] = Shard(0, owners=RowOwners.from_runs(holders, self.counts.sum(0)))
        return MeshSpec(spec.mesh, placements)

    def _experts_by_place(self) -> tuple[int, ...]:
        assert self.expert_axis is not None
        return chunk_sizes(self.num_experts, self.mesh.shape[self.expert_axis])

    @property
    def moved_rows(self) -> int:
        """The rows that change ranks, of one copy of the batch."""
        if self.expert_axis is None:
            return 0
        parts = np.indices([self.mesh.shape[a] for a in self.token_axes]).reshape(
            len(self.token_axes), len(self.counts)
        )
        here = parts[self.token_axes.index(self.expert_axis)]
        there = np.repeat(np.arange(self.mesh.shape[self.expert_axis]), self._experts_by_place())
        return int(self.counts[here[:, None] != there[None, :]].sum())


def limit_counts(counts: IntArray, capacity: int | None) -> IntArray:
    """The rows of each part that experts take if each takes at most so many, those of the first parts first.

    >>> limit_counts(np.array([[3, 0], [2, 1]]), 4).tolist()
    [[3, 0], [1, 1]]
    """
    if capacity is None:
        return counts
    before = np.cumsum(counts, 0) - counts
    taken: IntArray = np.clip(capacity - before, 0, counts)
    return taken


def first_choices(counts: IntArray, kept: IntArray) -> IntArray:
    """Which of a part's choices, sorted by expert, experts take: the first ones of each.

    >>> first_choices(np.array([3, 2]), np.array([1, 2])).tolist()
    [0, 3, 4]
    """
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.flatnonzero(place < np.repeat(kept, counts))
