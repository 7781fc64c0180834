"""Indexing by tensors: index, gather, scatter, index_put and the like.

Dims that are not indexed may be sharded freely, and so may the indices. Where an indexed dim is sharded, each rank
looks up what it holds and leaves zeros for the rest: the result is a pending sum. Writing is the reverse: each rank
writes what falls into its rows.

Slices, rows and triangles. A sharded dim is sliced in place: each rank keeps its part of the slice.

A row of a sharded dim is held by one rank; the others hold zeros, so the row is a pending sum. Slices share memory with
the tensor, so that what is written to them is written to it; a row of a sharded dim does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise._torch import assert_async, aten, pytree
from shardwise.comm import Comm
from shardwise.comm.stand_in import is_tracing
from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.geometry.placements import bounds
from shardwise.ops.engine import compute
from shardwise.ops.implicit_replication import reads_plain_as_replicated, run_plain_maker
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, takes_copies
from shardwise.ops.rules.view import index_rows, keeps_rows, pending_kinds, renumber_dims, select_rows
from shardwise.ops.views import (
    DimRun,
    Level,
    NoViewError,
    dim_patterns,
    express_shard,
    is_in_one_run,
    mesh_view,
    redistribute_to,
    resolve_partial,
    split_axes,
)
from shardwise.tensor.dispatch import register_function, run_function
from shardwise.tensor.move import move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import mark_copied, share_memory

Indices = Sequence[TensorMeta | None]


def find_local_entries(
    view: Any, tensor: int, dim: int, index: Tensor, *, from_end: bool = False
) -> tuple[Tensor, Tensor]:
    """Which entries of an index are in this rank's rows of a dim, and where there; 0 for the others.

    `from_end`: negative entries count from the end. Entries that no rank holds are refused, as torch does.
    """
    length = view.shapes[tensor][dim]
    check_range(index, -length if from_end else 0, length, dim)
    whole = torch.where(index < 0, index + length, index) if from_end else index
    return locate_in_runs(view.runs(tensor, dim), whole)


def locate_in_runs(runs: Sequence[DimRun], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which global rows are in these runs, and where in the local tensor; 0 for the others.

    >>> locate_in_runs([(2, 4, 0), (6, 8, 2)], torch.tensor([0, 3, 7]))
    (tensor([False,  True,  True]), tensor([0, 1, 3]))
    """
    here, at = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
    for start, stop, first in runs:
        inside = (rows >= start) & (rows < stop)
        here, at = here | inside, torch.where(inside, rows - start + first, at)
    return here, at


def check_range(index: Tensor, low: int, high: int, dim: int) -> None:
    """Raise for entries outside a dim; a device, or a graph that is traced, raises by itself when it computes."""
    outside = (index < low) | (index >= high)
    if index.device.type != "cpu" or is_tracing():
        assert_async(~outside.any(), f"an index is out of bounds for dim {dim} of length {high}")
    elif bool(outside.any()):
        wrong = int(index[outside][0])
        raise IndexError(f"index {wrong} is out of bounds for dim {dim} of length {high}")


def zeros_on_tape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape that are on the tape if the tensor is: a rank without rows still takes part in the backward."""
    return tensor.new_zeros(list(shape)) + tensor.flatten()[:0].sum().to(tensor.dtype)


def sum_kind(meta: TensorMeta) -> Partial:
    """The reduction that puts values together of which all ranks but one hold zeros."""
    return Partial("max" if meta.dtype == torch.bool else "sum")


def _indexed_dims(indices: Indices) -> tuple[list[int], int, bool]:
    """The dims that are indexed, how many dims the indices have together, and whether they are adjacent."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    width = max(i.ndim for i in indices if i is not None)
    return dims, width, dims[-1] - dims[0] == len(dims) - 1


def _new_dims(ndim: int, indices: Indices) -> tuple[list[int | None], int]:
    """The numbers of the dims in the result, None for indexed ones; and where the dims of the indices begin."""
    dims, width, together = _indexed_dims(indices)
    start = dims[0] if together else 0
    rest = [d for d in range(ndim) if d not in dims]
    new: list[int | None] = [None] * ndim
    for number, dim in enumerate(rest):
        new[dim] = number if number < start else number + width
    return new, start


@register_sharding(aten.index.Tensor)
def index(x: TensorMeta, indices: Indices) -> list[Any] | Steps:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and indices[0] is not None and keeps_rows(x, given[0]):
        return Steps(index_rows)
    whole: tuple[Placement, ...] = (Replicate(),) * len(given)
    new, start = _new_dims(x.ndim, indices) if given else (list(range(x.ndim)), 0)
    found = [Strategy(s.outputs, (*s.inputs, *whole), local_if_empty=_index_if_in_range) for s in renumber_dims(x, new)]
    if any(i.dtype == torch.bool for i in given):
        return [Strategy(found[0].outputs, found[0].inputs)]
    width = max((i.ndim for i in given), default=0)
    for dim in range(width):
        cut = [_broadcast_placement(i, dim, width) for i in given]
        if any(isinstance(p, Shard) for p in cut):
            found.append(Strategy((Shard(start + dim),), (Replicate(), *cut)))
    rows = [d for d, i in enumerate(indices) if i is not None]
    return found + [Strategy((sum_kind(x),), (Shard(d), *whole), _index_local) for d in rows]


def _index_if_in_range(view: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Torch looks at no index where there is nothing to return, and all ranks must find the same mistakes."""
    for dim, one in enumerate(indices):
        if one is not None:
            check_range(one, -view.shapes[0][dim], view.shapes[0][dim], dim)
    return aten.index.Tensor(x, indices)


def _broadcast_placement(i: TensorMeta, dim: int, width: int) -> Placement:
    own = dim - (width - i.ndim)
    return Shard(own) if own >= 0 and i.shape[own] != 1 else Replicate()


def _index_local(view: Any, x: Tensor, indices: Sequence[Tensor | None], *, from_end: bool = True) -> Tensor:
    """Look up what this rank holds along all indexed dims, zeros elsewhere."""
    hits: list[Tensor] = []
    moved: list[Tensor | None] = []
    for dim, one in enumerate(indices):
        if one is None:
            moved.append(None)
            continue
        here, at = find_local_entries(view, 0, dim, one.to(x.device), from_end=from_end)
        hits.append(here)
        moved.append(at)
    new, start = _new_dims(x.ndim, indices)  # type: ignore[arg-type]  # tensors have ndim as well
    here = _all_hits(hits)
    if any(x.shape[d] == 0 for d, i in enumerate(indices) if i is not None):
        rest = [x.shape[d] for d in sorted((d for d in range(x.ndim) if new[d] is not None), key=lambda d: new[d] or 0)]
        return zeros_on_tape(x, [*rest[:start], *here.shape, *rest[start:]])
    values = aten.index.Tensor(x, moved)
    mask = here.reshape([1] * start + list(here.shape) + [1] * (values.ndim - start - here.ndim))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


@register_sharding(aten.index_select.default)
def index_select(x: TensorMeta, dim: int, index: TensorMeta) -> list[Any] | Steps:
    at = dim % max(1, x.ndim)
    if at == 0 and keeps_rows(x, index):
        return Steps(select_rows)
    found = [
        Strategy(s.outputs, (*s.inputs, Replicate()), local_if_empty=_select_if_in_range)
        for s in renumber_dims(x, _dims_except(x, at))
    ]
    if x.ndim == 0 or index.ndim == 0:
        return found
    found.append(Strategy((Shard(at),), (Replicate(), Shard(0))))

    def local(view: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        return _index_local(view, x, [None] * at + [index], from_end=False)

    return [*found, Strategy((sum_kind(x),), (Shard(at), Replicate()), local)]


def _select_if_in_range(view: Any, x: Tensor, dim: int, index: Tensor) -> Any:
    check_range(index, 0, (view.shapes[0] or (1,))[dim], dim)
    return aten.index_select.default(x, dim, index)


def _dims_except(x: TensorMeta, *dims: int) -> list[int | None]:
    return [None if d in dims else d for d in range(x.ndim)]


@register_sharding(aten.gather.default)
def gather(x: TensorMeta, dim: int, index: TensorMeta, *, sparse_grad: bool = False) -> list[Any]:
    whole = [Strategy((Replicate(),), (Replicate(), Replicate()))]
    if not x.ndim or not index.ndim:
        return whole
    at = dim % x.ndim
    alike = [d for d in range(x.ndim) if d != at and x.shape[d] == index.shape[d]]
    found = whole + [Strategy((Shard(d),), (Shard(d), Shard(d)), local_if_empty=_gather_if_in_range) for d in alike]
    found.append(Strategy((Shard(at),), (Replicate(), Shard(at))))
    found.append(Strategy((sum_kind(x),), (Shard(at), Replicate()), _gather_local))
    return found + [Strategy((p,), (p, Replicate())) for p in pending_kinds(x)]


def _gather_if_in_range(view: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    check_range(index, 0, view.shapes[0][dim], dim)
    return aten.gather.default(x, dim, index, sparse_grad=sparse_grad)


def _gather_local(view: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    here, at = find_local_entries(view, 0, dim % x.ndim, index)
    if x.shape[dim] == 0:
        return zeros_on_tape(x, index.shape)
    values = aten.gather.default(x, dim, at)
    return torch.where(here, values, torch.zeros((), dtype=values.dtype, device=values.device))


@register_sharding(
    [
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter_.src,
        aten.scatter_.value,
        aten.scatter_.reduce,
        aten.scatter_reduce.two,
        aten.scatter_reduce_.two,
    ]
)
def scatter(x: TensorMeta, dim: int, index: TensorMeta, src: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
    """All tensors cut alike along a dim that is not scattered along, if they have the same length there."""
    metas = [m for m in (x, index, src) if isinstance(m, TensorMeta)]
    found = [Strategy((Replicate(),), (Replicate(),) * len(metas))]
    for d in range(x.ndim):
        if d != dim % x.ndim and len({m.shape[d] for m in metas}) == 1:
            found.append(Strategy((Shard(d),), (Shard(d),) * len(metas)))
    return found


@register_sharding([aten.scatter_add.default, aten.scatter_add_.default])
def scatter_add(x: TensorMeta, dim: int, index: TensorMeta, src: TensorMeta) -> list[Any]:
    found = scatter(x, dim, index, src)
    if x.dtype == torch.bool:  # adds as `or`, which is not a sum
        return found
    partial = Partial("sum")
    found.append(Strategy((partial,), (partial, Replicate(), partial)))
    if x.ndim and index.ndim:
        at = dim % x.ndim
        if index.shape[at] == src.shape[at]:
            found.append(Strategy((partial,), (partial, Shard(at), Shard(at))))
    return found


@register_sharding(aten.index_put.default)
def index_put(x: TensorMeta, indices: Indices, values: TensorMeta, accumulate: bool = False) -> list[Any] | Steps:
    return _put_strategies(aten.index_put.default, x, indices, values, accumulate)


@register_sharding(aten.index_put_.default)
def index_put_(x: TensorMeta, indices: Indices, values: TensorMeta, accumulate: bool = False) -> list[Any] | Steps:
    return _put_strategies(aten.index_put_.default, x, indices, values, accumulate)


def _put_strategies(
    op: Any, x: TensorMeta, indices: Indices, values: TensorMeta, accumulate: bool
) -> list[Strategy] | Steps:
    given = [i for i in indices if i is not None]
    whole: tuple[Placement, ...] = (Replicate(),) * len(given)
    found = [Strategy((Replicate(),), (Replicate(), *whole, Replicate()))]
    if any(i.dtype == torch.bool for i in given):
        if len(indices) > 1:
            return found
        masked = _masked_strategies(x, given[0], values)
        if not masked and given[0].dtype == torch.bool and _is_cut(x):
            return Steps(partial(_put_where, op))
        return found + masked
    new, _ = _new_dims(x.ndim, indices)
    dims, width, _ = _indexed_dims(indices)
    missing = width + x.ndim - len(dims) - values.ndim
    for old, dim in enumerate(new):
        if dim is not None:
            own = dim - missing
            cut: Placement = Shard(own) if own >= 0 and values.shape[own] != 1 else Replicate()
            found.append(Strategy((Shard(old),), (Shard(old), *whole, cut)))
    if dims == list(range(len(dims))):
        found += [Strategy((Shard(d),), (Shard(d), *whole, Replicate()), _put_local(op)) for d in dims]
    if accumulate:
        found.append(Strategy((Partial("sum"),), (Partial("sum"), *whole, Partial("sum"))))
    return found


def _masked_strategies(x: TensorMeta, mask: TensorMeta, values: TensorMeta) -> list[Strategy]:
    """Where the same values are written wherever a mask says, each rank writes into what it holds."""
    inner = x.ndim - mask.ndim
    if mask.dtype != torch.bool or values.ndim > inner:
        return []
    found = [Strategy((Shard(d),), (Shard(d), Shard(d), Replicate())) for d in range(mask.ndim)]
    for dim in range(mask.ndim, x.ndim):
        own = dim - x.ndim + values.ndim
        cut: Placement = Shard(own) if own >= 0 and values.shape[own] != 1 else Replicate()
        found.append(Strategy((Shard(dim),), (Shard(dim), Replicate(), cut)))
    return found


def _is_cut(x: TensorMeta) -> bool:
    return any(isinstance(p, Shard) for p in x.placements) and not any(isinstance(p, Partial) for p in x.placements)


def _put_where(op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """One value for each place that a mask says, in the order of places: they are put in place on a whole tensor."""
    mask, view = indices[0].to(x.device), mesh_view(x.sharding)
    assert view is not None
    whole = MeshSpec(view.mesh, (Replicate(),) * view.mesh.ndim)
    held = [redistribute_to(t, whole.layout(tuple(t.shape)), "index_put") for t in (mask, values)]
    empty = wrap(whole.layout(tuple(x.shape)), (x.local_parts[0].new_zeros(x.shape),), x.comm)
    filled: Any = aten.index_put.default(empty, [held[0]], held[1])
    inner = mask.reshape(tuple(mask.shape) + (1,) * (x.ndim - mask.ndim)) if x.ndim > mask.ndim else mask
    result = torch.where(inner, x + filled if accumulate else filled, x)
    return aten.copy_.default(x, result) if op is aten.index_put_.default else result


def _put_local(op: Any) -> Any:
    """A local function that writes the values whose places this rank holds.

    As in torch, the indices and a single value may be in host memory where the tensor is not.
    """

    def local(view: Any, x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
        found = [find_local_entries(view, 0, dim, one.to(x.device), from_end=True) for dim, one in enumerate(indices)]
        here = _all_hits(hit for hit, _ in found)
        places = [at.expand(here.shape) for _, at in found]
        value = values.to(x.device) if values.ndim == 0 else values
        kept = value.expand([*here.shape, *x.shape[len(indices) :]])
        if not x.is_meta:  # of a rank outside of the mesh, which has no values to choose from
            places, kept = [at[here] for at in places], kept[here]
        written: Tensor = op(x, places, kept, accumulate)
        return written

    return local


def _all_hits(hits: Iterable[Tensor]) -> Tensor:
    """Where all hold, after broadcasting."""
    return torch.stack(torch.broadcast_tensors(*hits)).all(0)  # type: ignore[no-untyped-call]  # untyped in torch


@register_sharding([aten.masked_select.default, aten.nonzero.default])
def data_dependent(*args: Any, **kwargs: Any) -> list[Any]:
    """The size of the result depends on all values."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    return [Strategy((Replicate(),), (Replicate(),) * len(metas))]


@register_sharding(aten.slice.Tensor)
@takes_copies
def slice_rule(
    x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> list[Strategy] | Steps:
    at = dim % x.ndim
    if _is_split(x, at):
        return Steps(_slice_split_dim, takes_copies=True)
    whole = slice(start, end, step).indices(x.shape[at]) == (0, x.shape[at], 1)
    return renumber_dims(x, [d if whole or d != at else None for d in range(x.ndim)])


def _is_split(x: TensorMeta, dim: int) -> bool:
    spec = mesh_view(x.layout)
    return spec is not None and bool(split_axes(spec, dim))


def _slice_split_dim(
    tensor: ShardedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ShardedTensor:
    dim %= tensor.ndim
    return slice_rows(tensor, dim, range(*slice(start, end, step).indices(tensor.shape[dim])))


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How a slice is taken: the layout of the result and this rank's rows; or the layout to move to first."""

    result: Layout | None
    rows: tuple[int, int, int] = (0, 0, 1)
    through: Layout | None = None


def slice_rows(tensor: ShardedTensor, dim: int, rows: range) -> ShardedTensor:
    """Rows of a dim, each in place; inner axes are replicated first if they would be cut differently."""
    cut = _plan_slice(tensor.sharding, dim, rows, tensor.comm.rank)
    if cut.result is None:
        assert cut.through is not None
        locals_, anchor = move_to(tensor, cut.through, "slice")
        part = slice_rows(wrap(cut.through, locals_, tensor.comm, anchor=anchor), dim, rows)
        is_copy = not cut.through.is_used_as(tensor.sharding)  # else the same pieces in other words
        return mark_copied(part, "a slice of a dim that had to be gathered") if is_copy else part
    local = aten.slice.Tensor(tensor.local_parts[0], dim, *cut.rows)
    return wrap(cut.result, (local,), tensor.comm)


@cache_by_identity
def _plan_slice(layout: Layout, dim: int, rows: range, rank: int) -> SlicePlan:
    spec = mesh_view(layout)
    assert spec is not None
    axes = split_axes(spec, dim)
    by_groups = _cut_whole_groups(spec, dim, rows)
    try:
        cuts = {axes[0]: by_groups} if by_groups else _slice_cuts(spec, dim, layout.shape[dim], rows)
    except NoViewError:
        whole = [Replicate() if axis == axes[-1] else p for axis, p in enumerate(spec.placements)]
        return SlicePlan(None, through=MeshSpec(spec.mesh, whole, spec.order).layout(layout.shape))
    placements = [cuts.get(axis, p) for axis, p in enumerate(spec.placements)]
    shape = [len(rows) if d == dim else n for d, n in enumerate(layout.shape)]
    return SlicePlan(MeshSpec(spec.mesh, placements, spec.order).layout(shape), _local_rows(layout, dim, rows, rank))


def _cut_whole_groups(spec: MeshSpec, dim: int, rows: range) -> Shard | None:
    """How the result is cut if the dim is cut in groups by one axis and the rows are whole groups."""
    axes = split_axes(spec, dim)
    shard = spec.placements[axes[0]] if len(axes) == 1 else None
    if not isinstance(shard, Shard) or shard.groups is None or rows.step != 1:
        return None
    edges = bounds(shard.groups)
    if rows.start not in edges or rows.stop not in edges:
        return None
    taken = slice(edges.index(rows.start), len(edges) - 1 - edges[::-1].index(rows.stop))
    groups, each = shard.groups[taken], None if shard.each is None else shard.each[taken]
    return replace(
        shard, groups=groups if len(groups) > 1 else None, each=each, addends=shard.addends and each is not None
    )


def _slice_cuts(spec: MeshSpec, dim: int, length: int, rows: range) -> dict[int, Placement]:
    """For each axis that splits the dim, how it splits the rows that are kept."""
    axes = split_axes(spec, dim)
    if not axes or len(rows) == length:
        return {axis: spec.placements[axis] for axis in axes}
    patterns = dim_patterns(spec, dim, length)
    if len(patterns) != 1 or patterns[0].period != length:
        raise NoViewError("the dim is cut in blocks or groups")
    return {v.axis: express_shard(dim, v.sizes, zigzag=v.zigzag) for v in _keep_rows(patterns[0].levels, rows)}


def _keep_rows(levels: Sequence[Level], rows: range) -> list[Level]:
    """The sizes of nested cuts, counting only these rows."""
    lengths = [s for sizes in levels[-1].sizes for s in sizes]
    edges = bounds(lengths)
    counts = [len(_rows_between(rows, low, low + n)) for low, n in zip(edges, lengths, strict=False)]
    found = []
    for level in reversed(levels):
        width = len(level.sizes[0])
        sizes = tuple(tuple(counts[i : i + width]) for i in range(0, len(counts), width))
        found.append(replace(level, sizes=sizes))
        counts = [sum(s) for s in sizes]
    return found[::-1]


def _rows_between(rows: range, low: int, high: int) -> range:
    """The rows between `low` and `high`.

    >>> _rows_between(range(1, 10, 3), 2, 8)
    range(4, 10, 3)
    """
    first = max(0, -(-(low - rows.start) // rows.step))
    last = max(first, -(-(high - rows.start) // rows.step))
    return rows[first:last]


def _local_rows(layout: Layout, dim: int, rows: range, rank: int) -> tuple[int, int, int]:
    """The slice of the local tensor that holds this rank's part of the rows: start, end and step."""
    own = layout.table.take(layout.rows_of(rank))
    columns = (own.offsets[:, dim].tolist(), own.sizes[:, dim].tolist(), own.local_offsets[:, dim].tolist())
    runs = set(zip(*columns, strict=True))
    found = [(at + part.start - o, len(part)) for o, s, at in runs if (part := _rows_between(rows, o, o + s))]
    if not found:
        return 0, 0, 1
    begin, count = min(start for start, _ in found), sum(n for _, n in found)
    return begin, begin + (count - 1) * rows.step + 1, rows.step


@register_sharding(aten.select.int)
def select(x: TensorMeta, dim: int, index: int) -> list[Any]:
    at = dim % x.ndim
    if not -x.shape[at] <= index < x.shape[at]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {at}")
    new = [None if d == at else d - (d > at) for d in range(x.ndim)]
    return [*renumber_dims(x, new), Strategy((sum_kind(x),), (Shard(at),), _select_local, finish=_mark_row)]


def _mark_row(row: ShardedTensor) -> ShardedTensor:
    """A row of a sharded dim is marked, since it shares no memory."""
    return mark_copied(row, "a row of a sharded dim")


def _select_local(view: Any, x: Tensor, dim: int, index: int) -> Tensor:
    at = dim % x.ndim
    layout = view.layouts[0]
    own = layout.table.take(layout.rows_of(view.rank))
    row = index % layout.shape[at]
    for start, size, place in zip(own.offsets[:, at], own.sizes[:, at], own.local_offsets[:, at], strict=True):
        if start <= row < start + size:
            return x.select(at, int(place + row - start)).clone()
    return zeros_on_tape(x, [n for d, n in enumerate(x.shape) if d != at])


@register_sharding([aten.split.Tensor, aten.split_with_sizes.default])
@takes_copies
def split(x: TensorMeta, size: int | Sequence[int], dim: int = 0) -> list[Strategy] | Steps:
    at = dim % x.ndim
    if _is_split(x, at) and sum(_split_sizes(size, x.shape[at])) == x.shape[at]:
        return Steps(_split_split_dim, takes_copies=True)
    return renumber_dims(x, [None if d == at else d for d in range(x.ndim)])


@register_sharding([aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default])
@takes_copies
def unsafe_split(x: TensorMeta, size: int | Sequence[int], dim: int = 0) -> list[Strategy] | Steps:
    """Parts that may be written to: nothing is pending, and each has memory of its own where a sharded dim is split."""
    found = split(x, size, dim)
    if isinstance(found, Steps):
        return Steps(_split_and_copy, takes_copies=True)
    return [s for s in found if not isinstance(s.inputs[0], Partial)]


def _split_and_copy(tensor: ShardedTensor, size: int | Sequence[int], dim: int = 0) -> list[ShardedTensor]:
    whole = resolve_partial(tensor, "split")
    return [part.clone() for part in _split_split_dim(whole, size, dim)]


def _split_sizes(size: int | Sequence[int], length: int) -> Sequence[int]:
    if not isinstance(size, int):
        return size
    return [min(size, length - at) for at in range(0, max(length, 1), max(size, 1))]


def _split_split_dim(tensor: ShardedTensor, size: int | Sequence[int], dim: int = 0) -> list[ShardedTensor]:
    dim %= tensor.ndim
    sizes = _split_sizes(size, tensor.shape[dim])
    return [slice_rows(tensor, dim, range(a, a + n)) for a, n in zip(bounds(sizes), sizes, strict=False)]


@register_sharding(aten.unbind.int)
def unbind(x: TensorMeta, dim: int = 0) -> list[Strategy] | Steps:
    at = dim % x.ndim
    if _is_split(x, at):
        return Steps(_unbind_split_dim)
    return renumber_dims(x, [None if d == at else d - (d > at) for d in range(x.ndim)])


def _unbind_split_dim(tensor: ShardedTensor, dim: int = 0) -> list[Any]:
    """Rows by the engine directly: torch's layer of views takes a row for a view already, and allows no second one."""
    return [compute(aten.select.int, (tensor, dim, row), {}) for row in range(tensor.shape[dim])]


def _triangle_rule(op: Any) -> Callable[..., list[Strategy]]:
    def rule(x: TensorMeta, diagonal: int = 0) -> list[Strategy]:
        def local(view: Any, x: Tensor, diagonal: int = 0) -> Tensor:
            first_row, first_column = (view.interval(0, x.ndim + d)[0] for d in (-2, -1))
            result: Tensor = op(x, diagonal + first_row - first_column)
            return result

        found = [Strategy((Replicate(),), (Replicate(),)), *(Strategy((p,), (p,)) for p in pending_kinds(x))]
        plain = [d for d in range(x.ndim) if d < x.ndim - 2 or is_in_one_run(x.layout, d)]
        return found + [Strategy((Shard(d),), (Shard(d),), local if d >= x.ndim - 2 else None) for d in plain]

    return rule


for _op in (aten.tril.default, aten.triu.default, aten.tril_.default, aten.triu_.default):
    register_sharding(_op)(_triangle_rule(_op))


@register_function(Tensor.__getitem__)
def _get_item(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Lists of numbers become tensors, which torch makes."""
    return run_plain_maker(Tensor.__getitem__, (args[0], _join_numbers(args[1])), kwargs)


def _join_numbers(key: Any) -> Any:
    """A key with one tensor for each list of ShardedTensors, of which torch would read the values."""
    return tuple(_stack_numbers(k) if isinstance(k, list | tuple) else k for k in key) if type(key) is tuple else key


def _stack_numbers(listed: Any) -> Any:
    held = [leaf for leaf in pytree.tree_leaves(listed) if isinstance(leaf, ShardedTensor)]
    if not held:
        return listed
    parts = [_stack_numbers(k) if isinstance(k, list | tuple) else k for k in listed]
    return torch.stack([k if isinstance(k, Tensor) else torch.tensor(k, device=held[0].device) for k in parts])


@register_function(torch.tensor_split, Tensor.tensor_split)
def _split_at(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Places to split at that are a ShardedTensor become numbers on every rank; torch takes them as a plain tensor."""

    def read(value: Any) -> Any:
        return value.detach().full() if isinstance(value, ShardedTensor) else value

    first = "input" if "input" in kwargs else "self"
    numbers = {name: value if name == first else read(value) for name, value in kwargs.items()}
    return run_function(torch.tensor_split, (*args[:1], *map(read, args[1:])), numbers)


@register_function(Tensor.__setitem__)
def _set_item(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> None:
    """Write into rows and slices in place. A row is taken as a slice of length 1, which shares memory."""
    tensor, key, value = args[0], _join_numbers(args[1]), args[2]
    if not isinstance(tensor, ShardedTensor) and reads_plain_as_replicated():
        # Made by the program itself, with a tape of its own: what is written are the whole values, of which it knows.
        whole = pytree.tree_map_only(ShardedTensor, lambda t: t.full(), (key, value))
        tensor[whole[0]] = whole[1]
        return None
    keys = key if isinstance(key, tuple) else (key,)
    simple = all(isinstance(k, int | slice) or k is None or k is Ellipsis for k in keys)
    if not isinstance(tensor, ShardedTensor) or not simple or any(isinstance(k, bool) for k in keys):
        run_plain_maker(Tensor.__setitem__, (tensor, key, value), {})
        return None
    part: Any = tensor[tuple(_to_slice(k) for k in keys)]
    if not isinstance(value, Tensor) or (value.ndim == 0 and not isinstance(value, ShardedTensor)):
        part.fill_(value)
        return None
    if isinstance(value, ShardedTensor) and share_memory(value.local_parts, part.local_parts):
        value = value.clone()  # as in x[i] += 1, where it is the very row, which torch would take for an overlap
    rows = _row_dims(keys, tensor.ndim)
    lacking = [n for d, n in enumerate(part.shape) if d not in rows]
    part.copy_(_insert_rows(value.expand(lacking), rows))
    return None


def _to_slice(key: Any) -> Any:
    return slice(key, key + 1 or None) if isinstance(key, int) else key


def _row_dims(keys: Sequence[Any], ndim: int) -> list[int]:
    """The dims of the result that are indexed by a number."""
    given = sum(isinstance(k, int | slice) for k in keys)
    places: list[int] = []
    dim = 0
    for key in keys:
        if key is Ellipsis:
            dim += ndim - given
        else:
            places += [dim] if isinstance(key, int) else []
            dim += 1
    return places


def _insert_rows(value: Tensor, rows: Sequence[int]) -> Tensor:
    for dim in rows:
        value = value.unsqueeze(dim)
    return value
