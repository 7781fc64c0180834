"""Slices, rows and triangles. A sharded dim is sliced in place: each rank keeps its part of the slice.

A row of a sharded dim is held by one rank; the others hold zeros, so the row is a pending sum. Slices share memory with
the tensor, so that what is written to them is written to it; a row of a sharded dim does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.geometry.placements import bounds
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.dispatcher import call_op
from shardwise.ops.engine.mixed import register_plain_maker, run_plain_maker
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import is_in_one_run, resolve_partial
from shardwise.ops.engine.view_sharding import Level, NoViewError, dim_patterns, express_shard, split_axes
from shardwise.ops.rules.index import sum_kind, zeros_on_tape
from shardwise.ops.rules.view import pending_kinds, renumber_dims
from shardwise.tensor.dispatch import register_function, run_function
from shardwise.tensor.inplace import mark_copied, share_memory
from shardwise.tensor.move import move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@register_sharding(aten.slice.Tensor)
def slice_rule(
    x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> list[Strategy] | Steps:
    at = dim % x.ndim
    if _is_split(x, at):
        return Steps(_slice_split_dim)
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

    source: Layout
    result: Layout | None
    rows: tuple[int, int, int] = (0, 0, 1)
    through: Layout | None = None


_MAX_SLICE_PLANS = 8192
_slice_plans: dict[tuple[int, int, range, int], SlicePlan] = {}


def slice_rows(tensor: ShardedTensor, dim: int, rows: range) -> ShardedTensor:
    """Rows of a dim, each in place; inner axes are replicated first if they would be cut differently."""
    key = (id(tensor.sharding), dim, rows, tensor.comm.rank)
    cut = _slice_plans.get(key)
    if cut is None:
        if len(_slice_plans) >= _MAX_SLICE_PLANS:
            _slice_plans.clear()
        cut = _slice_plans[key] = _plan_slice(tensor.sharding, dim, rows, tensor.comm.rank)
    if cut.result is None:
        assert cut.through is not None
        locals_, anchor = move_to(tensor, cut.through, "slice")
        part = slice_rows(wrap(cut.through, locals_, tensor.comm, anchor=anchor), dim, rows)
        is_copy = cut.through != tensor.sharding  # else the same pieces in other words
        return mark_copied(part, "a slice of a dim that had to be gathered") if is_copy else part
    local = aten.slice.Tensor(tensor.local_parts[0], dim, *cut.rows)
    return wrap(cut.result, (local,), tensor.comm)


def _plan_slice(layout: Layout, dim: int, rows: range, rank: int) -> SlicePlan:
    spec = mesh_view(layout)
    assert spec is not None
    axes = split_axes(spec, dim)
    by_groups = _cut_whole_groups(spec, dim, rows)
    try:
        cuts = {axes[0]: by_groups} if by_groups else _slice_cuts(spec, dim, layout.shape[dim], rows)
    except NoViewError:
        whole = [Replicate() if axis == axes[-1] else p for axis, p in enumerate(spec.placements)]
        return SlicePlan(layout, None, through=MeshSpec(spec.mesh, whole, spec.order).layout(layout.shape))
    placements = [cuts.get(axis, p) for axis, p in enumerate(spec.placements)]
    shape = [len(rows) if d == dim else n for d, n in enumerate(layout.shape)]
    return SlicePlan(
        layout, MeshSpec(spec.mesh, placements, spec.order).layout(shape), _local_rows(layout, dim, rows, rank)
    )


def _cut_whole_groups(spec: MeshSpec, dim: int, rows: range) -> Shard | None:
    """How the result is cut if the dim is cut in groups by one axis and the rows are whole groups."""
    axes = split_axes(spec, dim)
    shard = spec.placements[axes[0]] if len(axes) == 1 else None
    if not isinstance(shard, Shard) or shard.groups is None or rows.step != 1:
        return None
    edges = bounds(shard.groups)
    if rows.start not in edges or rows.stop not in edges:
        return None
    groups = shard.groups[edges.index(rows.start) : len(edges) - 1 - edges[::-1].index(rows.stop)]
    return Shard(dim) if len(groups) < 2 else Shard(dim, groups=groups)


def _slice_cuts(spec: MeshSpec, dim: int, length: int, rows: range) -> dict[int, Placement]:
    """For each axis that splits the dim, how it splits the rows that are kept."""
    axes = split_axes(spec, dim)
    if not axes or len(rows) == length:
        return {axis: spec.placements[axis] for axis in axes}
    patterns = dim_patterns(spec, dim, length)
    if len(patterns) != 1 or patterns[0].period != length:
        raise NoViewError("the dim is cut in blocks or groups")
    return {v.axis: express_shard(dim, v.sizes) for v in _keep_rows(patterns[0].levels, rows)}


def _keep_rows(levels: Sequence[Level], rows: range) -> list[Level]:
    """The sizes of nested cuts, counting only these rows."""
    lengths = [s for sizes in levels[-1].sizes for s in sizes]
    edges = bounds(lengths)
    counts = [len(_rows_between(rows, low, low + n)) for low, n in zip(edges, lengths, strict=False)]
    found = []
    for level in reversed(levels):
        width = len(level.sizes[0])
        sizes = tuple(tuple(counts[i : i + width]) for i in range(0, len(counts), width))
        found.append(Level(level.axis, sizes))
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
def split(x: TensorMeta, size: int | Sequence[int], dim: int = 0) -> list[Strategy] | Steps:
    at = dim % x.ndim
    if _is_split(x, at) and sum(_split_sizes(size, x.shape[at])) == x.shape[at]:
        return Steps(_split_split_dim)
    return renumber_dims(x, [None if d == at else d for d in range(x.ndim)])


@register_sharding([aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default])
def unsafe_split(x: TensorMeta, size: int | Sequence[int], dim: int = 0) -> list[Strategy] | Steps:
    """Parts that may be written to: nothing is pending, and each has memory of its own where a sharded dim is split."""
    found = split(x, size, dim)
    if isinstance(found, Steps):
        return Steps(_split_and_copy)
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
    return [call_op(aten.select.int, (), (tensor, dim, row), {}) for row in range(tensor.shape[dim])]


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


register_plain_maker(Tensor.__getitem__)  # lists of numbers become tensors


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
    tensor, key, value = args
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
