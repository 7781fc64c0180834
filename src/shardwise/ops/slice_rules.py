"""Slices, rows and triangles. A sharded dim is sliced where it lies: each rank keeps its part of the slice.

A row of a sharded dim is held by one rank; the others hold zeros, so the row is a pending sum. Slices share memory with
the tensor, so that what is written to them is written to it; a row of a sharded dim does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import MeshSpec, Placement, Replicate, Shard
from shardwise.geometry.splits import bounds
from shardwise.ops.cuts import Level, NoViewError, axes_of, dim_patterns, express
from shardwise.ops.engine import call_op
from shardwise.ops.index_rules import nothing_like, sum_kind
from shardwise.ops.local_tape import recording
from shardwise.ops.placing import mesh_view
from shardwise.ops.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.view_rules import pending_kinds, renumbered
from shardwise.tensor.dispatch import handler
from shardwise.tensor.moves import moved
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

aten = torch.ops.aten


@register_sharding(aten.slice.Tensor)
def slice_rule(
    x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> list[Any]:
    at = dim % x.ndim
    whole = slice(start, end, step).indices(x.shape[at]) == (0, x.shape[at], 1)
    return renumbered(x, [d if whole or d != at else None for d in range(x.ndim)])


@handler(aten.slice.Tensor)
def _slice(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    given = {**dict(zip(("self", "dim", "start", "end", "step"), args, strict=False)), **kwargs}
    tensor: ShardedTensor = given["self"]
    dim, step = given.get("dim", 0) % tensor.ndim, given.get("step", 1)
    rows = range(*slice(given.get("start"), given.get("end"), step).indices(tensor.shape[dim]))
    spec = mesh_view(tensor._layout)
    if spec is None or not axes_of(spec, dim) or len(rows) == tensor.shape[dim]:
        return NotImplemented
    return sliced(tensor, spec, dim, rows)


def sliced(tensor: ShardedTensor, spec: MeshSpec, dim: int, rows: range) -> ShardedTensor:
    """Rows of a sharded dim, each where it lies; inner axes are replicated first if they would be cut differently."""
    by_groups = _whole_groups(spec, dim, rows)
    if by_groups is not None:
        return _cut_out(tensor, spec, {axes_of(spec, dim)[0]: by_groups}, dim, rows)
    axes = axes_of(spec, dim)
    try:
        return _cut_out(tensor, spec, _slice_cuts(spec, dim, tensor.shape[dim], rows), dim, rows)
    except NoViewError:
        placements = list(spec.placements)
        placements[axes[-1]] = Replicate()
        target = MeshSpec(spec.mesh, placements, spec.order).layout(tensor._layout.shape)
        locals_, anchor = moved(tensor, target, "slice")
        simpler = wrap(target, locals_, tensor._comm, anchor=anchor)
        return sliced(simpler, MeshSpec(spec.mesh, placements, spec.order), dim, rows)


def _whole_groups(spec: MeshSpec, dim: int, rows: range) -> Shard | None:
    """How the result is cut if the dim is cut in groups by one axis and the rows are whole groups."""
    axes = axes_of(spec, dim)
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
    patterns = dim_patterns(spec, dim, length)
    if not axes_of(spec, dim):
        return {}
    if len(patterns) != 1 or patterns[0].period != length:
        raise NoViewError("the dim is cut in blocks or groups")
    return {v.axis: express(dim, v.sizes) for v in _kept(patterns[0].levels, rows)}


def _kept(levels: Sequence[Level], rows: range) -> list[Level]:
    """The sizes of nested cuts, counting only these rows."""
    lengths = [s for sizes in levels[-1].sizes for s in sizes]
    edges = bounds(lengths)
    counts = [len(_inside(rows, low, low + n)) for low, n in zip(edges, lengths, strict=False)]
    found = []
    for level in reversed(levels):
        width = len(level.sizes[0])
        sizes = tuple(tuple(counts[i : i + width]) for i in range(0, len(counts), width))
        found.append(Level(level.axis, sizes))
        counts = [sum(s) for s in sizes]
    return found[::-1]


def _inside(rows: range, low: int, high: int) -> range:
    """Those of the rows that lie between `low` and `high`.

    >>> _inside(range(1, 10, 3), 2, 8)
    range(4, 10, 3)
    """
    first = max(0, -(-(low - rows.start) // rows.step))
    last = max(first, -(-(high - rows.start) // rows.step))
    return rows[first:last]


def _cut_out(
    tensor: ShardedTensor, spec: MeshSpec, cuts: dict[int, Placement] | dict[int, Shard], dim: int, rows: range
) -> ShardedTensor:
    placements = [cuts.get(axis, p) for axis, p in enumerate(spec.placements)]
    shape = [len(rows) if d == dim else n for d, n in enumerate(tensor._layout.shape)]
    layout = MeshSpec(spec.mesh, placements, spec.order).layout(shape)
    begin, count = _local_rows(tensor, dim, rows)
    with recording():
        local = aten.slice.Tensor(tensor._locals[0], dim, begin, begin + max(0, (count - 1) * rows.step + 1), rows.step)
        local = local if count else tensor._locals[0].narrow(dim, 0, 0)
    return wrap(layout, (local,), tensor._comm)


def _local_rows(tensor: ShardedTensor, dim: int, rows: range) -> tuple[int, int]:
    """Where in the local tensor the rows begin, and how many there are."""
    layout = tensor._layout
    own = layout.table.take(layout.rows_of(tensor._comm.rank))
    runs = {
        (int(o), int(s), int(at))
        for o, s, at in zip(*(c[:, dim] for c in (own.offsets, own.sizes, own.local_offsets)), strict=True)
    }
    found = [(at + part.start - o, len(part)) for o, s, at in runs if (part := _inside(rows, o, o + s))]
    return (min(b for b, _ in found), sum(n for _, n in found)) if found else (0, 0)


@register_sharding(aten.select.int)
def select(x: TensorMeta, dim: int, index: int) -> list[Any]:
    at = dim % x.ndim
    if not -x.shape[at] <= index < x.shape[at]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {at}")
    new = [None if d == at else d - (d > at) for d in range(x.ndim)]
    return [*renumbered(x, new), Strategy((sum_kind(x),), (Shard(at),), _select_here)]


def _select_here(view: Any, x: Tensor, dim: int, index: int) -> Tensor:
    at = dim % x.ndim
    layout = view.layouts[0]
    own = layout.table.take(layout.rows_of(view.rank))
    row = index % layout.shape[at]
    for start, size, place in zip(own.offsets[:, at], own.sizes[:, at], own.local_offsets[:, at], strict=True):
        if start <= row < start + size:
            return x.select(at, int(place + row - start))
    return nothing_like(x, [n for d, n in enumerate(x.shape) if d != at])


def _pieces(tensor: ShardedTensor, dim: int, sizes: Sequence[int]) -> Any:
    """The tensor cut in pieces along a dim, or NotImplemented if that dim is whole on every rank."""
    spec = mesh_view(tensor._layout)
    if spec is None or not axes_of(spec, dim) or sum(sizes) != tensor.shape[dim]:
        return NotImplemented
    edges = bounds(sizes)
    return [sliced(tensor, spec, dim, range(a, a + n)) for a, n in zip(edges, sizes, strict=False)]


@register_sharding([aten.split.Tensor, aten.split_with_sizes.default])
def split(x: TensorMeta, size: int | Sequence[int], dim: int = 0) -> list[Any]:
    return renumbered(x, [None if d == dim % x.ndim else d for d in range(x.ndim)])


@handler(aten.split.Tensor, aten.split_with_sizes.default)
def _split(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    tensor, given, dim = args[0], args[1], (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].ndim
    length = tensor.shape[dim]
    if isinstance(given, int):
        given = [min(given, length - at) for at in range(0, max(length, 1), max(given, 1))]
    return _pieces(tensor, dim, given)


@register_sharding(aten.unbind.int)
def unbind(x: TensorMeta, dim: int = 0) -> list[Any]:
    at = dim % x.ndim
    return renumbered(x, [None if d == at else d - (d > at) for d in range(x.ndim)])


@handler(aten.unbind.int)
def _unbind(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    tensor, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].ndim
    spec = mesh_view(tensor._layout)
    if spec is None or not axes_of(spec, dim):
        return NotImplemented
    return [call_op(aten.select.int, types, (tensor, dim, row), {}) for row in range(tensor.shape[dim])]


def _triangle(op: Any) -> Callable[..., list[Strategy]]:
    def rule(x: TensorMeta, diagonal: int = 0) -> list[Strategy]:
        def local(view: Any, x: Tensor, diagonal: int = 0) -> Tensor:
            first_row, first_column = (view.interval(0, x.ndim + d)[0] for d in (-2, -1))
            result: Tensor = op(x, diagonal + first_row - first_column)
            return result

        found = [Strategy((Replicate(),), (Replicate(),)), *(Strategy((p,), (p,)) for p in pending_kinds(x))]
        return found + [Strategy((Shard(d),), (Shard(d),), local if d >= x.ndim - 2 else None) for d in range(x.ndim)]

    return rule


for _op in (aten.tril.default, aten.triu.default, aten.tril_.default, aten.triu_.default):
    register_sharding(_op)(_triangle(_op))
