"""Operators on tensors in irregular pieces: boxes, or several chunks on a rank.

1. A reduction of the whole tensor: the order of elements does not matter to it. So what a rank has is one run of a 1-D
   tensor, cut unevenly, and that is reduced as any other.
2. A pointwise operator takes the layout of one tensor: of the one that is written to, else of the largest. Tensors of
   the same shape are moved there; what is pending is reduced by that. Others broadcast: they are wanted whole on every
   rank and vary, so that their gradients are summed, each element's once however many replicas there are.
3. The operator runs on each local tensor, and the shapes of the results are compared with the layout.
4. For everything else the tensors are put on a mesh: where chunks are one for each of some ranks nothing moves, and the
   mesh is that of these ranks. Otherwise they are cut along their longest dim over all ranks of the comm.
5. A tensor that is written to is never moved: such operators are computed without writing, and the result copied.
   A view of tensors that had to be moved is a copy (`tensor/autograd_mixin.py`).

All of this is decided from shapes and layouts, so all ranks decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise._torch import aten
from shardwise.geometry import (
    Box,
    EnumerableSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Replicate,
    Shard,
)
from shardwise.ops.propagation import WrittenMoveError
from shardwise.ops.rule import OperatorCall, is_pointwise
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import all_dims, arguments_by_name, mesh_view, redistribute_to
from shardwise.tensor.move import format_layout_text, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import copy_values, gives_views, mark_copied, note_write_without_data

WHOLE_REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.mean.default,
    aten.mean.dim,
    aten.prod.default,
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.all.default,
    aten.any.default,
    aten.count_nonzero.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
}


def is_irregular(tensor: ShardedTensor) -> bool:
    """Whether a tensor is computed piece by piece: its layout has no mesh, or names none and leaves out some ranks.

    All ranks of the comm take part in its operators, also those that have nothing of it.
    """
    layout = tensor.sharding
    if mesh_view(layout) is None:
        return True
    return not isinstance(layout.spec, MeshSpec) and len(layout.ranks) < len(tensor.comm.ranks)


def run_on_pieces(call: OperatorCall) -> Any:
    """Compute a call in which a tensor is irregular; NotImplemented where its tensors have to be put on a mesh."""
    tensors: Sequence[Any] = call.tensors
    written = call.written
    reduced = _reduce_pieces(call)
    if reduced is not NotImplemented:
        return reduced
    lead = tensors[written[0]] if written else max(tensors, key=lambda t: (t.numel(), is_irregular(t)))
    shape = _broadcast_shape(call, lead)
    if shape is None:
        if not any(is_irregular(tensors[i]) for i in written):
            return NotImplemented
        if call.op is aten.copy_.default:
            return _copy_into_pieces(*tensors)
        odd = next(tensors[i] for i in written if is_irregular(tensors[i])).sharding
        raise WrittenMoveError(
            f"{call.op} writes to {format_layout_text(odd)}: tensors in irregular pieces ({odd.spec!r}) are "
            "written to by pointwise operators and copies only; use the operator that does not write, or redistribute "
            "to a mesh layout first"
        )
    if not is_irregular(lead):
        args, kwargs = call.fill_slots([_place_on_mesh(t, lead, str(call.op)) for t in tensors])
        return call.op(*args, **kwargs)
    layout = _prepend_dims(lead.sharding, len(shape))
    held = [_cut_into_pieces(t, lead, layout, str(call.op)) for t in tensors]
    results = []
    for slot in range(len(held[0])):
        args, kwargs = call.fill_slots([pieces[slot] for pieces in held])
        results.append(call.op(*args, **kwargs))
    if written:
        return _note_written(tensors[written[0]], results)
    if isinstance(results[0], list | tuple):
        return tuple(_wrap_pieces(call, layout, [r[i] for r in results], lead) for i in range(len(results[0])))
    return _wrap_pieces(call, layout, results, lead)


def _broadcast_shape(call: OperatorCall, lead: ShardedTensor) -> tuple[int, ...] | None:
    """The shape of the results if it is the lead's, with dims of length 1 in front; None for other operators."""
    if not is_pointwise(call.op):
        return None
    shape = tuple(torch.broadcast_shapes(*(tuple(t.shape) for t in call.tensors)))  # type: ignore[no-untyped-call]
    own = tuple(lead.shape)
    return shape if shape == (1,) * (len(shape) - len(own)) + own else None


def _copy_into_pieces(target: ShardedTensor, source: ShardedTensor) -> ShardedTensor:
    held = source if source.shape == target.shape else aten.expand.default(source, tuple(target.shape))
    moved = redistribute_to(held, target.sharding, "copy_")
    copy_values(target, moved.local_parts, moved._anchor)
    target.__dict__.pop("_varied", None)
    return target


def put_on_mesh(call: OperatorCall) -> OperatorCall:
    """The same call of tensors on one mesh; they are moved unless one mesh has them already."""
    tensors: Sequence[Any] = call.tensors
    views = [mesh_view(t.sharding) for t in tensors]
    shapes_known = torch.Tag.dynamic_output_shape not in getattr(call.op, "tags", ())
    if shapes_known and all(v is not None and v.mesh == views[0].mesh for v in views):  # type: ignore[union-attr]
        return call.with_tensors([_show_mesh(t, v) for t, v in zip(tensors, views, strict=True)])
    return call.with_tensors([_cut_over_ranks(t, str(call.op)) if is_irregular(t) else t for t in tensors])


def mark_views_of_moved(call: OperatorCall, moved: OperatorCall, result: Any) -> Any:
    """The results of a call whose tensors were put on a mesh: what should be a view of a moved one is marked a copy."""
    pairs: Any = zip(call.tensors, moved.tensors, strict=True)
    if gives_views(call.op) and not all(m.sharding.is_used_as(t.sharding) for t, m in pairs):
        for output in [result] if isinstance(result, ShardedTensor) else result:
            mark_copied(output, "a view of a tensor in irregular pieces")
    return result


def _show_mesh(tensor: ShardedTensor, spec: Any) -> ShardedTensor:
    if tensor.sharding.spec == spec:  # it may be written to, which has to reach this very tensor
        return tensor
    layout = spec.layout(tuple(tensor.shape))
    return wrap(
        layout, tensor.local_parts, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=tensor._anchor
    )


def _cut_over_ranks(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """The tensor cut along its longest dim over all ranks of the comm."""
    placement = Shard(max(range(tensor.ndim), key=lambda d: tensor.shape[d])) if tensor.ndim else Replicate()
    return _move_to_mesh(tensor, MeshSpec(Mesh(("all",), tensor.comm.ranks), (placement,)), name)


def _move_to_mesh(tensor: ShardedTensor, spec: MeshSpec, name: str) -> ShardedTensor:
    """The tensor in the layout of a spec, which names a mesh; where it has this layout, it is described so."""
    layout = spec.layout(tuple(tensor.shape))
    moved = redistribute_to(tensor, layout, name)
    return moved if isinstance(moved.sharding.spec, MeshSpec) else _show_mesh(moved, spec)


def _place_on_mesh(tensor: ShardedTensor, lead: ShardedTensor, name: str) -> ShardedTensor:
    """A tensor in irregular pieces on the mesh of the lead: cut as the lead, or whole where it broadcasts."""
    if not is_irregular(tensor):
        return tensor
    spec = mesh_view(lead.sharding)
    assert spec is not None
    same = tensor.shape == lead.shape
    placements = [Replicate() if isinstance(p, Partial) or not same else p for p in spec.placements]
    return _move_to_mesh(tensor, MeshSpec(spec.mesh, placements, spec.order), name)


@cache_by_identity
def _prepend_dims(layout: Layout, ndim: int) -> Layout:
    """The layout with dims of length 1 in front."""
    more = ndim - layout.ndim
    if not more:
        return layout
    pieces = [
        Piece(Box((0,) * more + p.box.offsets, (1,) * more + p.box.sizes), p.rank, p.device) for p in layout.pieces
    ]
    return EnumerableSpec(pieces, replicated=True).layout((1,) * more + layout.shape)


def _cut_into_pieces(tensor: ShardedTensor, lead: ShardedTensor, layout: Layout, name: str) -> Sequence[Tensor]:
    """What each local tensor of the lead is computed with; a rank without any has one tensor without elements."""
    if tensor.shape == lead.shape:
        parts = redistribute_to(tensor, lead.sharding, name)._tape_tensors()
        if not lead.local_parts:
            return [_make_empty_stand_in(tensor, parts[0])]
        more = (1,) * (layout.ndim - lead.ndim)
        return [part.reshape(more + tuple(part.shape)) for part in parts] if more else parts
    return _cut_whole(tensor, layout, name)


def _make_empty_stand_in(tensor: ShardedTensor, held: Tensor) -> Tensor:
    """What a rank without pieces computes with: a tensor without elements, on the tape.

    One without dims has an element nevertheless, since numbers count less in the dtype of a result.
    """
    return _as_anchor(held) if tensor.ndim else (_as_anchor(held).sum(dtype=held.dtype) + 1).to(held.dtype)


def _as_anchor(held: Tensor) -> Tensor:
    """A tensor without elements on the tape of another: itself if it has none."""
    return held if held.shape == (0,) else held.reshape(-1)[:0]


def _cut_whole(tensor: ShardedTensor, layout: Layout, name: str) -> Sequence[Tensor]:
    """The elements that broadcast with each of this rank's pieces, from a tensor that is wanted whole everywhere."""
    ranks, rank = tensor.comm.ranks, tensor.comm.rank
    target = replicated_layout(tuple(tensor.shape), ranks)
    whole = redistribute_to(tensor, target, name)
    value = vary_along(whole, target, (0,) if len(ranks) > 1 else ())
    rows = layout.rows_of(rank)
    if not len(rows):
        return [_make_empty_stand_in(tensor, value)]
    found = [_cut_box(value, piece.box) for piece in layout.pieces_of(rank)]
    if value.requires_grad:
        for part, is_first in zip(found, np.isin(rows, _first_copies(layout)), strict=True):
            if not is_first:
                part.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]  # untyped in torch
    return found


def _cut_box(value: Tensor, box: Box) -> Tensor:
    """A new view of the part of a whole tensor that broadcasts with a box."""
    first = box.ndim - value.ndim
    cuts = zip(value.shape, box.offsets[first:], box.ends[first:], strict=True)
    return value.view_as(value)[tuple(slice(a, b) if n > 1 else slice(None) for n, a, b in cuts)]


def _note_written(tensor: ShardedTensor, results: Sequence[Tensor]) -> ShardedTensor:
    """A tensor whose local tensors were written to; where there are none, what was written is on the tape."""
    tensor.__dict__.pop("_varied", None)
    if not tensor.local_parts and results[0].requires_grad and torch.is_grad_enabled():
        tensor._anchor = None  # what is written depends on it
        note_write_without_data(tensor, _as_anchor(results[0]))
    return tensor


def _wrap_pieces(call: OperatorCall, layout: Layout, results: Sequence[Tensor], lead: ShardedTensor) -> ShardedTensor:
    comm, one = lead.comm, results[0]
    shapes = layout.local_shapes(comm.rank)
    if not shapes:
        anchor = _as_anchor(one) if one.requires_grad else None
        return wrap(layout, (), comm, dtype=one.dtype, device=lead.device, anchor=anchor)
    if shapes != tuple(tuple(r.shape) for r in results):
        raise LayoutError(
            f"{call.op} on the local tensors of rank {comm.rank} returned {[tuple(r.shape) for r in results]}, where "
            f"{format_layout_text(layout)} has {list(shapes)}; please report this program, with its layouts"
        )
    return wrap(layout, tuple(results), comm)


def _reduce_pieces(call: OperatorCall) -> Any:
    """The reduction of a whole tensor in irregular pieces, or NotImplemented for anything else."""
    tensors: Sequence[Any] = call.tensors
    if call.op not in WHOLE_REDUCTIONS or len(tensors) != 1 or not tensors[0].ndim:
        return NotImplemented
    given = arguments_by_name(call.op, call.args, call.kwargs)
    ndim = tensors[0].ndim
    if all_dims(given.get("dim"), ndim) != tuple(range(ndim)):
        return NotImplemented
    rest = {name: value for name, value in given.items() if name not in ("self", "dim", "keepdim")}
    if "dim" in given:
        dim = given["dim"]
        rest["dim"] = dim if dim is None else 0 if isinstance(dim, int) else [0]
    found = call.op(flatten_pieces(tensors[0]), **rest)
    if not given.get("keepdim"):
        return found
    kept = [one.reshape((1,) * ndim) for one in (found if isinstance(found, tuple) else (found,))]
    return tuple(kept) if isinstance(found, tuple) else kept[0]


def flatten_pieces(tensor: ShardedTensor) -> ShardedTensor:
    """All elements, each once, as a 1-D tensor of which every rank has one run; their order is that of the pieces."""
    once = redistribute_to(tensor, drop_replicas(tensor.sharding), "reduction")
    counts = once.sharding.elements_per_rank()
    ranks = tensor.comm.ranks
    cut = Shard(0, sizes=tuple(counts.get(rank, 0) for rank in ranks))
    layout = MeshSpec(Mesh(("pieces",), ranks), (cut,)).layout((sum(counts.values()),))
    # As columns: of empty 1-D tensors the gradient of cat is not on the tape.
    local = torch.cat([piece.reshape(piece.numel(), 1) for piece in once._tape_tensors()]).view(-1)
    return wrap(layout, (local,), tensor.comm)


@cache_by_identity
def drop_replicas(layout: Layout) -> Layout:
    """The layout with one copy of each piece."""
    first = _first_copies(layout)
    if len(first) == len(layout.table):
        return layout
    return EnumerableSpec(layout.table.take(first).pieces()).layout(layout.shape)


def _first_copies(layout: Layout) -> Any:
    """The rows of the table that have the first copy of each piece, ascending."""
    return np.sort(np.unique(layout.table.cells, return_index=True)[1])
