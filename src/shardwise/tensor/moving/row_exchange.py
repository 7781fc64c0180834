"""How do rows move that have owners? By an uneven all-to-all whose sizes follow from the owners of both layouts.

Values decided who has which row (tokens that go to experts, say), so that a plan box by box would be as long as the
tensor and of use only once. Here every rank works out with arrays:

1. which axes change: along those, rows are sharded in one layout or in both, and nothing else changes;
2. for each rank that it sends to, which of its local rows that rank wants, in the order in which it wants them;
3. for each rank that it receives from, where these rows go.

Senders and receivers work from the same two layouts, so no sizes are exchanged. The gradient makes the reverse move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Replicate, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.moving.parts import find_moved_bytes
from shardwise.tensor.recorder import observed_exchange

_MAX_KEPT_ROWS = 1 << 16  # of a layout that is used again and again; rows of longer dims are worked out each time


@dataclass(frozen=True, eq=False, slots=True)
class RowExchange:
    """A move of rows along one dim: local rows for each rank that gets some, and places of what comes from each."""

    src: Layout
    dst: Layout
    itemsize: int
    dim: int
    sends: dict[int, IntArray]
    receives: dict[int, IntArray]
    is_local: bool

    @property
    def moved_bytes(self) -> int:
        """The bytes that all ranks send together."""
        return 0 if self.is_local else find_moved_bytes(self.src, self.dst, self.itemsize)


def held_rows(layout: Layout, rank: int, dim: int) -> IntArray:
    """The numbers of the rows of a dim that a rank has, in the order of its local tensor."""
    if layout.shape[dim] > _MAX_KEPT_ROWS and not layout.depends_on_data:
        return _find_held_rows(layout, rank, dim)
    known = _known_rows(layout)
    if (rank, dim) not in known:
        known[rank, dim] = _find_held_rows(layout, rank, dim)
    return known[rank, dim]


@cache_by_identity
def _known_rows(layout: Layout) -> dict[tuple[int, int], IntArray]:
    """The rows of ranks and dims, as far as they were asked for."""
    return {}


def _find_held_rows(layout: Layout, rank: int, dim: int) -> IntArray:
    rows = layout.rows_of(rank)
    at, starts, lengths = (t[rows, dim] for t in (layout.table.local_offsets, layout.table.offsets, layout.table.sizes))
    filled = np.flatnonzero(lengths)
    first = filled[np.unique(at[filled], return_index=True)[1]]  # cells that differ in other dims have the same rows
    starts, lengths = starts[first], lengths[first]
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return shift + np.arange(len(shift))


def plan_row_exchange(src: Layout, dst: Layout, itemsize: int, rank: int) -> RowExchange | None:
    """How a rank takes part in a move, or None where more than the owners of rows of one dim changes."""
    before, after = _mesh_specs(src, dst)
    if before is None or after is None:
        return None
    changed = [a for a, (p, q) in enumerate(zip(before.placements, after.placements, strict=True)) if p != q]
    pairs = [(before.placements[a], after.placements[a]) for a in changed]
    dims = {p.dim for pair in pairs for p in pair if isinstance(p, Shard)}
    if len(dims) != 1 or any(not isinstance(p, Shard | Replicate) for pair in pairs for p in pair):
        return None
    dim = dims.pop()
    if not _keeps_other_cuts(before, changed, dim) or not _keeps_other_cuts(after, changed, dim):
        return None
    cut = [a for a in changed if isinstance(before.placements[a], Shard)]
    receivers = _ranks_along(before, rank, changed)
    sends, receives = {}, {}
    wanted, places = held_rows(dst, rank, dim), _places_of(held_rows(src, rank, dim), src.shape[dim])
    for peer in receivers:
        if rank in _ranks_along(before, peer, cut):
            at = places[held_rows(dst, peer, dim)]
            sends[peer] = at[at >= 0]
    for peer in _ranks_along(before, rank, cut):
        receives[peer] = np.flatnonzero(_places_of(held_rows(src, peer, dim), src.shape[dim])[wanted] >= 0)
    return RowExchange(src, dst, itemsize, dim, sends, receives, not cut)


def _mesh_specs(src: Layout, dst: Layout) -> tuple[MeshSpec | None, MeshSpec | None]:
    if not isinstance(src.spec, MeshSpec) or not isinstance(dst.spec, MeshSpec) or src.spec.mesh != dst.spec.mesh:
        return None, None
    return src.spec.resolved(src.shape), dst.spec.resolved(dst.shape)


def _keeps_other_cuts(spec: MeshSpec, changed: Sequence[int], dim: int) -> bool:
    """Whether what other axes make of the dim does not depend on the axes that change."""
    order = [spec.mesh.axis_index(name) for name in spec.order]
    first = min(order.index(a) for a in changed)
    for axis, placement in enumerate(spec.placements):
        cuts = axis not in changed and isinstance(placement, Shard) and placement.dim == dim
        if cuts and order.index(axis) > first and placement.owners is None:  # type: ignore[union-attr]  # it is a Shard
            return False
    return True


def _ranks_along(spec: MeshSpec, rank: int, axes: Sequence[int]) -> list[int]:
    """The ranks that differ from one at most in their places along some axes."""
    at = np.argwhere(spec.mesh.ranks == rank)[0]
    index = tuple(slice(None) if a in axes else int(at[a]) for a in range(spec.mesh.ndim))
    return [int(r) for r in np.asarray(spec.mesh.ranks[index]).reshape(-1)]


def _places_of(rows: IntArray, length: int) -> IntArray:
    """For each row of the dim its place among some rows, -1 for others."""
    places = np.full(length, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return places


def exchange_rows(plan: RowExchange, local: Tensor, comm: Comm, label: str) -> Tensor:
    """Carry out a move of rows on this rank."""
    shape = plan.dst.local_shapes(comm.rank)[0]
    result = local.new_empty(shape)
    own = comm.rank
    if own in plan.sends:
        _put_rows(result, plan.dim, plan.receives[own], _take_rows(local, plan.dim, plan.sends[own]))
    if plan.is_local:
        return result
    sends = {r: [_take_rows(local, plan.dim, at)] for r, at in plan.sends.items() if r != own and len(at)}
    receives = {r: at for r, at in plan.receives.items() if r != own and len(at)}
    buffers = {r: _receive_into(result, plan.dim, at) for r, at in receives.items()}
    into = {r: [buffer] for r, buffer in buffers.items()}
    with observed_exchange(comm, label, sends, into):
        comm.exchange(sends, into, label=label).wait()
    for peer, at in receives.items():
        if not _is_run(at, plan.dim):
            _put_rows(result, plan.dim, at, buffers[peer])
    return result


def _is_run(at: IntArray, dim: int) -> bool:
    """Whether rows are adjacent in the memory of a tensor."""
    return dim == 0 and len(at) > 0 and int(at[-1] - at[0]) == len(at) - 1


def _take_rows(tensor: Tensor, dim: int, at: IntArray) -> Tensor:
    if _is_run(at, dim):
        return tensor[int(at[0]) : int(at[-1]) + 1].contiguous()
    return tensor.index_select(dim, torch.from_numpy(at).to(tensor.device))


def _receive_into(result: Tensor, dim: int, at: IntArray) -> Tensor:
    """Where rows arrive: in their place if they are one run of memory, else in a buffer."""
    if _is_run(at, dim):
        return result[int(at[0]) : int(at[-1]) + 1]
    shape = [len(at) if d == dim else n for d, n in enumerate(result.shape)]
    return result.new_empty(shape)


def _put_rows(result: Tensor, dim: int, at: IntArray, rows: Tensor) -> None:
    if _is_run(at, dim):
        result[int(at[0]) : int(at[-1]) + 1] = rows
    else:
        result.index_copy_(dim, torch.from_numpy(at).to(result.device), rows)
