"""What do the moves of a step cost one rank? Bytes by mesh axis and by parameter, and seconds by a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.geometry import Mesh, shorten_layout
from shardwise.planner.figures import StepMove
from shardwise.planner.meter import MeteredMove
from shardwise.tensor.moving.move_operator import MoveRecord
from shardwise.transfer import Topology, Transfer, plan_transfer


@dataclass(frozen=True)
class MovePrice:
    """One move on one rank."""

    received_bytes: int
    sent_bytes: int
    by_axis: Mapping[str, int]
    seconds: float


class PricedMoves:
    """The moves of a step, priced for one rank of a mesh; a move that is made again is planned once."""

    def __init__(self, moves: Sequence[MeteredMove], mesh: Mesh, rank: int, topology: Topology) -> None:
        self._moves, self._mesh, self._rank, self._topology = moves, mesh, rank, topology
        records = {id(move.record): move.record for move in moves}
        self._prices = {key: self._price(record) for key, record in records.items()}

    def _price(self, record: MoveRecord) -> MovePrice:
        itemsize = record.dtype.itemsize
        transfer = plan_transfer(record.src, record.dst, itemsize=itemsize, topology=self._topology, rank=self._rank)
        received, sent = (t.get(self._rank, 0) for t in (transfer.received_bytes, transfer.sent_bytes))
        by_axis = received_by_axis(transfer, self._mesh, self._rank)
        return MovePrice(received, sent, by_axis, transfer.estimate(self._topology))

    @cached_property
    def listed(self) -> tuple[StepMove, ...]:
        """Each kind of move that sends or receives something, most bytes in a step first."""
        kinds = Counter((id(m.record), m.backward, m.parameter is not None) for m in self._moves)
        records = {id(m.record): m.record for m in self._moves}
        made = [self._describe(records[key], backward, own, n) for (key, backward, own), n in kinds.items()]
        moved = [m for m in made if m.received_bytes or m.sent_bytes]
        return tuple(sorted(moved, key=lambda m: -m.received_bytes * m.count))

    def _describe(self, record: MoveRecord, backward: bool, own: bool, count: int) -> StepMove:
        price = self._prices[id(record)]
        src, dst = (shorten_layout(layout, str(record.dtype)) for layout in (record.src, record.dst))
        figures = (count, price.received_bytes, price.sent_bytes, price.seconds, tuple(price.by_axis))
        return StepMove(record.label, backward, own, src, dst, *figures)

    @property
    def by_axis(self) -> dict[str, int]:
        """The bytes received in a step, by axis of the mesh."""
        total: Counter[str] = Counter()
        for move in self._moves:
            total.update(self._prices[id(move.record)].by_axis)
        order = {axis: i for i, axis in enumerate(self._mesh.axes)}
        return dict(sorted(total.items(), key=lambda item: (item[0].count(","), order.get(item[0], 0))))

    @property
    def by_parameter(self) -> Counter[str]:
        """The bytes received in a step to gather each parameter and to reduce its gradient."""
        total: Counter[str] = Counter()
        for move in self._moves:
            if move.parameter is not None:
                total[move.parameter] += self._prices[id(move.record)].received_bytes
        return total

    @property
    def seconds(self) -> float:
        return sum(self._prices[id(move.record)].seconds for move in self._moves)

    @property
    def largest_bytes(self) -> int:
        """What the largest move receives: moves are made one at a time, through buffers of at most this size."""
        return max((price.received_bytes for price in self._prices.values()), default=0)


def received_by_axis(transfer: Transfer, mesh: Mesh, rank: int) -> dict[str, int]:
    """The bytes that a rank receives, by the axes along which the sender has another coordinate.

    >>> from shardwise.geometry import MeshSpec, Replicate, Shard
    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> src, dst = (MeshSpec(mesh, p).layout((4, 4)) for p in ((Shard(0), Shard(1)), (Replicate(), Replicate())))
    >>> received_by_axis(plan_transfer(src, dst, itemsize=4, rank=0), mesh, 0)
    {'tp': 16, 'dp': 16, 'dp,tp': 16}
    """
    edges = [(s, n) for (s, d), n in transfer.bytes_by_edge.items() if d == rank]
    found: Counter[str] = Counter()
    if edges:
        place = {int(r): i for i, r in enumerate(mesh.ranks.reshape(-1))}
        own = np.array(np.unravel_index(place[rank], mesh.shape))
        theirs = np.array(np.unravel_index([place[s] for s, _ in edges], mesh.shape)).T
        for differs, (_, nbytes) in zip(theirs != own, edges, strict=True):
            found[",".join(a for a, other in zip(mesh.axes, differs, strict=True) if other)] += nbytes
    return dict(found)
