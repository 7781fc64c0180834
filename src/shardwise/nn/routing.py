"""Experts of a mixture: tokens are brought to the ranks that have their experts, and answers are brought back.

The layer is an ordinary module. Sharded by a plan such as `{"**.experts.*": "ep: S(0)"}` each rank has some of the
experts; a tp axis may split their inner dim besides, as in `"ep: S(0), tp: S(1) groups(i,i)"`. Tokens reach their
experts and answers come back by two uneven all-to-alls:

1. Each rank counts its tokens for each expert. The counts of all ranks are exchanged: the sizes of all messages and the
   places of all rows follow from them (`RoutePlan`, in NumPy and without communication). A *part* is what the ranks
   with the same places along the token axes have of the batch; parts are numbered in the order of tokens.
2. A rank sends its tokens, sorted by expert, to the ranks that have the experts. What arrives is sorted by expert, then
   by part. So the rows of all ranks together are sorted by expert, and grouped products take them as they are.
3. `combine` goes the reverse way, weighs the answers of a token's experts and adds them up.

With a capacity an expert takes its first tokens, in the order of the whole batch, and the others pass it by: the result
does not depend on how tokens are laid out. The gradient of an exchange is the reverse exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.comm import Comm, DisagreementError, gather_raw
from shardwise.geometry import (
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Placement,
    Replicate,
    RowOwners,
    Shard,
)
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import bounds, chunk_sizes
from shardwise.ops.explain import check_may_communicate
from shardwise.ops.implicit_replication import replicate
from shardwise.ops.views import mesh_view, redistribute_to
from shardwise.tensor.execute import exchange_blocks
from shardwise.tensor.recorder import notify_watchers
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@dataclass(frozen=True, eq=False, slots=True)
class RoutePlan:
    """How tokens go to experts on a mesh: `counts[part, expert]`, the axes that split tokens, the one of experts."""

    mesh: Mesh
    token_axes: tuple[int, ...]
    expert_axis: int | None
    counts: IntArray
    sizes: tuple[int, ...]  # how many experts each place along the axis of experts has

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
        edges = bounds(self.sizes)
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
            holders = np.repeat(np.arange(len(self.sizes)), self.sizes)
            placements[self.expert_axis] = Shard(0, owners=RowOwners.from_runs(holders, self.counts.sum(0)))
        return MeshSpec(spec.mesh, placements)

    @property
    def moved_rows(self) -> int:
        """The rows that change ranks, of one copy of the batch."""
        if self.expert_axis is None:
            return 0
        parts = np.indices([self.mesh.shape[a] for a in self.token_axes]).reshape(
            len(self.token_axes), len(self.counts)
        )
        here = parts[self.token_axes.index(self.expert_axis)]
        there = np.repeat(np.arange(len(self.sizes)), self.sizes)
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


@dataclass(frozen=True, eq=False, slots=True)
class RowSwap:
    """An uneven all-to-all of rows: how many this rank sends to each rank, in this order, and gets from each.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import Mesh, MeshSpec, Shard
    >>> layout = MeshSpec(Mesh.of(ep=2), [Shard(0)]).layout((4, 1))
    >>> def body(comm):  # rank 0 keeps one row and sends two; rank 1 keeps its only one
    ...     counts = [{0: 1, 1: 2}, {0: 0, 1: 1}]
    ...     receives = {rank: counts[rank][comm.rank] for rank in (0, 1)}
    ...     swap = RowSwap(comm, counts[comm.rank], receives, layout, layout, 0, "swap")
    ...     return swap.run(torch.arange(3.0) if comm.rank == 0 else torch.tensor([9.0])).tolist()
    >>> run_local(body, 2)
    [[0.0], [1.0, 2.0, 9.0]]
    """

    comm: Comm
    sends: dict[int, int]
    receives: dict[int, int]
    src: Layout
    dst: Layout
    moved_bytes: int
    label: str
    count_far_bytes: Callable[[], int] = int

    @property
    def bytes_between_hosts(self) -> int:
        """The part of the bytes that passes between hosts."""
        return self.count_far_bytes()

    def reverse(self) -> RowSwap:
        """The exchange by which all rows go back."""
        return replace(self, sends=self.receives, receives=self.sends, src=self.dst, dst=self.src)

    def run(self, rows: Tensor) -> Tensor:
        """The rows that this rank gets; all ranks of the comm call it."""
        notify_watchers(self)
        result = rows.new_empty(sum(self.receives.values()), *rows.shape[1:])
        exchange_blocks(
            self.comm, _split_rows(rows.contiguous(), self.sends), _split_rows(result, self.receives), self.label
        )
        return result


def _count_far_bytes(plan: RoutePlan, comm: Comm, row_bytes: int) -> int:
    """The bytes of rows that ranks send to other hosts, of all ranks together."""
    topology = comm.find_topology()
    if topology is None:
        return 0
    host = dict(zip(comm.ranks, topology.host_of(np.array(comm.ranks)).tolist(), strict=True))
    ranks = plan.mesh.ranks.flatten().tolist()
    return row_bytes * sum(n for r in ranks for to, n in plan.sends(r).items() if host[to] != host[r])


def _split_rows(rows: Tensor, sizes: dict[int, int]) -> dict[int, list[Tensor]]:
    parts = torch.split_with_sizes(rows, list(sizes.values()))
    return {rank: [part] for rank, part in zip(sizes, parts, strict=True) if len(part)}


class _SwapRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, swap: RowSwap, rows: Tensor) -> Tensor:
        ctx.swap = swap
        return swap.run(rows.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, swap_rows(ctx.swap.reverse(), grads[0])


def swap_rows(swap: RowSwap, rows: Tensor) -> Tensor:
    """An uneven all-to-all of this rank's rows; differentiable, also twice.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import Mesh, MeshSpec, Shard
    >>> layout = MeshSpec(Mesh.of(ep=2), [Shard(0)]).layout((2, 1))
    >>> def body(comm):  # the two ranks exchange their only rows
    ...     counts = {comm.rank: 0, 1 - comm.rank: 1}
    ...     order = {rank: counts[rank] for rank in (0, 1)}
    ...     return swap_rows(RowSwap(comm, order, order, layout, layout, 0, "swap"), torch.tensor([comm.rank])).tolist()
    >>> run_local(body, 2)
    [[1], [0]]
    """
    moved: Tensor = _SwapRows.apply(swap, rows)  # type: ignore[no-untyped-call]  # untyped in torch
    return moved


@dataclass(frozen=True, eq=False, slots=True)
class _ReturnRoute:
    """How outputs go back over ranks: specs of rows and tokens, the order in which rows arrived, and the exchange."""

    rows: MeshSpec
    tokens: MeshSpec
    token_axes: tuple[int, ...]
    arrival: Tensor
    swap: RowSwap

    def placed_as(self, other: MeshSpec, spec: MeshSpec) -> MeshSpec:
        """A spec with the placements of rows or of tokens along the axes that split these."""
        pairs = enumerate(zip(spec.placements, other.placements, strict=True))
        return MeshSpec(spec.mesh, [q if a in self.token_axes else p for a, (p, q) in pairs])


@dataclass(frozen=True, eq=False, slots=True)
class TokenRoute:
    """Tokens at their experts: `rows` are sorted by expert, those of expert e end at `offsets[e]`.

    A token has a row for each of its experts. `counts` says how many rows each expert has in the whole batch.

    >>> route = route_tokens(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]), num_experts=2)
    >>> route.rows.flatten().tolist(), route.counts
    ([2.0, 1.0], (1, 1))
    """

    rows: Tensor
    offsets: Tensor
    counts: tuple[int, ...]
    _choices: Tensor
    _shape: tuple[int, int]
    _back: _ReturnRoute | None

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """The experts' outputs for `rows`, back at the tokens: for each token the weighed sum over its experts.

        `weights` has a number for each token and choice, as the expert ids have. Choices that an expert had no room for
        count as zeros.
        """
        if outputs.shape[0] != self.rows.shape[0] or tuple(weights.shape) != self._shape:
            raise ValueError(
                f"combine takes {self.rows.shape[0]} rows and weights of shape {self._shape}, got "
                f"{outputs.shape[0]} rows and {tuple(weights.shape)}"
            )
        chosen = self._spread(outputs, self._shape[0]) if self._back is None else self._bring_back(outputs, self._back)
        weighed: Tensor = (chosen * weights.unsqueeze(-1)).sum(1)
        return weighed

    def _spread(self, rows: Tensor, tokens: int) -> Tensor:
        """A line for each choice of each token; zeros for those that were left out."""
        lines = rows.new_zeros(tokens * self._shape[1], *rows.shape[1:]).index_copy(0, self._choices, rows)
        return lines.view(tokens, self._shape[1], *rows.shape[1:])

    def _bring_back(self, outputs: Tensor, back: _ReturnRoute) -> Tensor:
        spec = mesh_view(outputs.sharding) if isinstance(outputs, ShardedTensor) else None
        if spec is None or not isinstance(outputs, ShardedTensor):
            raise TypeError(
                "combine got a plain tensor for tokens that are sharded; pass what was computed from `rows`"
            )
        layout = back.placed_as(back.rows, spec).layout(tuple(outputs.shape))
        local = redistribute_to(outputs, layout, "combine").local_parts[0].index_select(0, back.arrival)
        kept = [p.along(p.dim + 1) if isinstance(p, Shard) and p.dim else p for p in spec.placements]
        tokens = back.placed_as(back.tokens, MeshSpec(spec.mesh, kept)).layout((*self._shape, *outputs.shape[1:]))
        returned = swap_rows(back.swap.reverse(), local)
        return wrap(tokens, (self._spread(returned, tokens.local_shapes(outputs.comm.rank)[0][0]),), outputs.comm)


def route_tokens(
    x: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    *,
    axis: str | None = "ep",
    capacity: int | None = None,
    sizes: Sequence[int] | None = None,
) -> TokenRoute:
    """Bring each token to the ranks of its experts; called on every rank.

    `x` has a row for each token, `expert_ids` the numbers of its experts, a column for each choice. Experts are split
    along `axis` as `torch.chunk` splits them, or in `sizes`; where the mesh has no such axis every rank has all of
    them. An expert takes the first `capacity` tokens of the whole batch, or all. Plain tensors are routed too, without
    communication, so that a model is written once.

    >>> route = route_tokens(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1], [0], [1]]), num_experts=2)
    >>> route.rows.flatten().tolist(), route.offsets.tolist()
    ([2.0, 1.0, 3.0], [1, 3])
    >>> route.combine(route.rows * 10, torch.ones(3, 1)).flatten().tolist()
    [10.0, 20.0, 30.0]
    """
    for name, given in (("tokens", x), ("expert ids", expert_ids)):
        if not isinstance(given, Tensor):
            raise TypeError(
                f"route_tokens takes {name} as a tensor, got {type(given).__name__}: pass torch.as_tensor(...)"
            )
    if x.ndim != 2 or expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"route_tokens takes tokens of shape (tokens, width) and expert ids of shape (tokens, choices), got "
            f"{tuple(x.shape)} and {tuple(expert_ids.shape)}"
        )
    if num_experts < 1 or (capacity is not None and capacity < 1):
        raise ValueError(f"num_experts={num_experts} and capacity={capacity}: pass positive numbers, or capacity=None")
    if isinstance(x, ShardedTensor):
        return _route_over_ranks(x, expert_ids, num_experts, axis, capacity, sizes)
    counts, problem = _count_experts(expert_ids, num_experts)
    if problem:
        raise IndexError(problem)
    kept = limit_counts(counts[None], capacity)[0]
    choices = _sort_choices(expert_ids, counts, kept)
    offsets = torch.tensor(list(accumulate(kept.tolist())), dtype=torch.int32, device=x.device)
    shape = (x.shape[0], expert_ids.shape[1])
    return TokenRoute(x[choices // shape[1]], offsets, tuple(kept.tolist()), choices, shape, None)


def _count_experts(ids: Tensor, num_experts: int) -> tuple[IntArray, str]:
    """The choices of each expert, and what is wrong with the ids."""
    flat = ids.detach().reshape(-1)
    low, high = (int(flat.min()), int(flat.max())) if flat.numel() else (0, 0)
    if low < 0 or high >= num_experts:
        wrong = low if low < 0 else high
        return np.zeros(num_experts, np.int64), f"expert id {wrong} is out of range for {num_experts} experts"
    return torch.bincount(flat, minlength=num_experts).cpu().numpy().astype(np.int64), ""


def _sort_choices(ids: Tensor, counts: IntArray, kept: IntArray) -> Tensor:
    """The numbers of choices in order of experts, without those that experts do not take."""
    order = ids.detach().reshape(-1).argsort(stable=True)
    if (kept == counts).all():
        return order
    return order[torch.from_numpy(first_choices(counts, kept)).to(order.device)]


def _route_over_ranks(
    x: ShardedTensor,
    expert_ids: Tensor,
    num_experts: int,
    axis: str | None,
    capacity: int | None,
    sizes: Sequence[int] | None,
) -> TokenRoute:
    spec, comm = _checked_spec(x, expert_ids), x.comm
    expert_axis = spec.mesh.axes.index(axis) if axis in spec.mesh.axes else None
    places = 1 if expert_axis is None else spec.mesh.shape[expert_axis]
    sizes = tuple(sizes or chunk_sizes(num_experts, places))
    if len(sizes) != places or sum(sizes) != num_experts:
        raise ValueError(f"route_tokens: sizes {sizes} for {num_experts} experts on {places} ranks along {axis!r}")
    tokens = _token_spec(spec, expert_axis)
    token_axes = tuple(a for a, p in enumerate(tokens.placements) if isinstance(p, Shard))
    x = redistribute_to(x, tokens.layout(tuple(x.shape)), "route_tokens")
    assert isinstance(expert_ids, ShardedTensor)
    ids = redistribute_to(expert_ids, tokens.layout(tuple(expert_ids.shape)), "route_tokens").local_parts[0]
    check_may_communicate("route_tokens", x.sharding, x.sharding)
    counts = _gather_counts(ids, num_experts, tokens, token_axes, comm)
    plan = RoutePlan(spec.mesh, token_axes, expert_axis, limit_counts(counts, capacity), sizes)
    part = plan.part_of(comm.rank)
    choices = _sort_choices(ids, counts[part], plan.counts[part])
    return _send_tokens(x, plan, tokens, choices, expert_ids.shape[1])


def _send_tokens(x: ShardedTensor, plan: RoutePlan, tokens: MeshSpec, choices: Tensor, top_k: int) -> TokenRoute:
    rank, rows = x.comm.rank, plan.place_rows(tokens)
    layout = rows.layout((sum(plan.totals), *x.shape[1:]))
    copies = plan.mesh.size // len(plan.counts)
    moved = plan.moved_rows * copies * x.dtype.itemsize * x.shape[1]
    far = partial(_count_far_bytes, plan, x.comm, x.dtype.itemsize * x.shape[1])
    swap = RowSwap(x.comm, plan.sends(rank), plan.receives(rank), x.sharding, layout, moved, "route_tokens", far)
    arrived = swap_rows(swap, x.local_parts[0].index_select(0, choices // top_k))
    order = plan.arrival_order(rank)
    by_expert, arrival = (torch.from_numpy(a).to(arrived.device) for a in (order, np.argsort(order)))
    offsets = torch.tensor(list(accumulate(plan.totals)), dtype=torch.int32, device=arrived.device)
    return TokenRoute(
        wrap(layout, (arrived.index_select(0, by_expert),), x.comm),
        replicate(offsets, x),
        plan.totals,
        choices,
        (x.shape[0], top_k),
        _ReturnRoute(rows, tokens, plan.token_axes, arrival, swap),
    )


def _checked_spec(x: ShardedTensor, expert_ids: Tensor) -> MeshSpec:
    spec = mesh_view(x.sharding)
    if spec is None or spec.mesh.size != x.comm.world_size:
        raise LayoutError("route_tokens takes tokens that are laid out on a mesh of all ranks of their comm")
    if not isinstance(expert_ids, ShardedTensor):
        raise TypeError(
            "route_tokens got plain expert ids for tokens that are sharded; if every rank has the same ones pass "
            "shardwise.replicate(expert_ids, x)"
        )
    return spec


def _token_spec(spec: MeshSpec, expert_axis: int | None) -> MeshSpec:
    """Where tokens are sent from: split in runs along the axis of experts, and wherever they are split already."""
    placements: list[Placement] = []
    for axis, now in enumerate(spec.placements):
        if isinstance(now, Shard) and now.dim == 0:
            placements.append(now if now.is_in_runs and spec.splits_in_mesh_order else Shard(0))
        else:
            placements.append(Shard(0) if axis == expert_axis else Replicate())
    return MeshSpec(spec.mesh, placements)


def _gather_counts(
    ids: Tensor, num_experts: int, tokens: MeshSpec, token_axes: tuple[int, ...], comm: Comm
) -> IntArray:
    """The choices of each expert by part of the batch; a wrong id on one rank raises on all."""
    counts, problem = _count_experts(ids, num_experts)
    by_rank = gather_raw(comm, counts.tobytes() + problem.encode(), label="route_tokens: counts")
    width = counts.nbytes
    wrong = [f"rank {rank}: {data[width:].decode()}" for rank, data in by_rank.items() if len(data) > width]
    if wrong:
        raise DisagreementError(f"route_tokens: {'; '.join(wrong)}; every rank passes ids from 0 to {num_experts - 1}")
    if any(len(data) != width for data in by_rank.values()):
        numbers = sorted({len(data) // 8 for data in by_rank.values()})
        raise DisagreementError(f"route_tokens: ranks pass num_experts {numbers}; pass the same number on every rank")
    index = tuple(slice(None) if a in token_axes else 0 for a in range(tokens.mesh.ndim))
    firsts = np.asarray(tokens.mesh.ranks[index]).reshape(-1).tolist()
    return np.stack([np.frombuffer(by_rank[int(rank)], np.int64) for rank in firsts])
