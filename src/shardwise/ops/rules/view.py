"""Views: the same elements under other indices. A cut is carried over; where it cannot be, the tensor is moved first.

Transposition and the like renumber dims, which is a rule. A reshape has arguments of its own for each rank, so
it works out the layout of the whole result and reshapes the local tensor to what this rank holds of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.known_calls.recording import note_special
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta, ignores_lengths
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.view_recut import recut_for_view
from shardwise.ops.engine.view_sharding import NoViewError, view_spec
from shardwise.ops.rules.row_owners import settle_rows
from shardwise.tensor.dense_strides import can_view, copy_if_shared
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.inplace import mark_copied
from shardwise.tensor.move import format_layout_text, move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_MAX_VIEWS = 8192
_views: dict[tuple[int, tuple[int, ...]], tuple[Layout, Layout]] = {}


def pending_kinds(*metas: TensorMeta) -> list[Partial]:
    """The kinds of pending reductions among placements, in a fixed order."""
    return [Partial(op) for op in sorted({p.op for m in metas for p in m.placements if isinstance(p, Partial)})]


def renumber_dims(x: TensorMeta, new_dim: Sequence[int | None], local: Any = None) -> list[Strategy]:
    """Strategies of an operator that renumbers dims; None for a dim that cannot stay sharded."""
    moves: list[tuple[Placement, Placement]] = [(Replicate(), Replicate())]
    moves += [(Shard(new), Shard(old)) for old, new in enumerate(new_dim) if new is not None]
    moves += [(p, p) for p in pending_kinds(x)]
    return [Strategy((out,), (given,), local) for out, given in moves]


@register_sharding(aten.t.default)
@ignores_lengths
def t(x: TensorMeta) -> list[Any]:
    return renumber_dims(x, list(reversed(range(x.ndim))))


@register_sharding([aten.transpose.int])
@ignores_lengths
def transpose(x: TensorMeta, one: int, other: int) -> list[Any]:
    new = list(range(x.ndim))
    if new:
        new[one], new[other] = new[other], new[one]
    return renumber_dims(x, new)


@register_sharding(aten.permute.default)
@ignores_lengths
def permute(x: TensorMeta, dims: Sequence[int]) -> list[Any]:
    order = [d % x.ndim for d in dims]
    return renumber_dims(x, [order.index(d) for d in range(x.ndim)])


@register_sharding(aten.unsqueeze.default)
def unsqueeze(x: TensorMeta, dim: int) -> list[Any]:
    at = dim % (x.ndim + 1)
    return renumber_dims(x, [d + (d >= at) for d in range(x.ndim)])


@register_sharding([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims])
def squeeze(x: TensorMeta, dims: int | Sequence[int] | None = None) -> list[Any]:
    asked = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % x.ndim for d in asked if x.shape[d] == 1}) if x.ndim else []
    new = [None if d in gone else d - sum(g < d for g in gone) for d in range(x.ndim)]
    return renumber_dims(x, new, lambda view, tensor, *rest: tensor.squeeze(gone))


@register_sharding(aten.expand.default)
def expand(x: TensorMeta, size: Sequence[int], *, implicit: bool = False) -> list[Any]:
    added = len(size) - x.ndim
    kept = [wanted in (-1, own) and own != 1 for own, wanted in zip(x.shape, size[added:], strict=True)]

    def local(view: Any, tensor: Tensor, size: Sequence[int], **options: Any) -> Tensor:
        return tensor.expand([*size[:added], *(-1 if k else s for k, s in zip(kept, size[added:], strict=True))])

    return renumber_dims(x, [d + added if k else None for d, k in enumerate(kept)], local)


@register_sharding([aten.flip.default])
def flip(x: TensorMeta, dims: Sequence[int]) -> list[Any]:
    turned = {d % x.ndim for d in dims}
    return renumber_dims(x, [None if d in turned else d for d in range(x.ndim)])


@register_sharding([aten.roll.default])
def roll(x: TensorMeta, shifts: Sequence[int], dims: Sequence[int] = ()) -> list[Any]:
    turned = {d % x.ndim for d in dims} if dims else set(range(x.ndim))
    return renumber_dims(x, [None if d in turned else d for d in range(x.ndim)])


@register_sharding([aten.unfold.default])
def unfold(x: TensorMeta, dim: int, size: int, step: int) -> list[Any]:
    return renumber_dims(x, [None if d == dim % max(1, x.ndim) else d for d in range(x.ndim)])


@register_sharding([aten.view_as_real.default])
def view_as_real(x: TensorMeta) -> list[Any]:
    return renumber_dims(x, list(range(x.ndim)))


@register_sharding([aten.view_as_complex.default])
def view_as_complex(x: TensorMeta) -> list[Any]:
    """The extreme of pairs of numbers is not that of complex ones, which have none."""
    found = renumber_dims(x, [*range(x.ndim - 1), None])
    return [s for s in found if not isinstance(p := s.inputs[0], Partial) or p.op in ("sum", "avg")]


@register_sharding([aten.view.dtype])
def view_as_dtype(x: TensorMeta, dtype: torch.dtype) -> list[Any]:
    """The bytes under another name; where elements get longer or shorter the last dim stays whole."""
    kept = list(range(x.ndim if dtype.itemsize == x.dtype.itemsize else x.ndim - 1))
    return [s for s in renumber_dims(x, [d if d in kept else None for d in range(x.ndim)]) if not _is_pending(s)]


def _is_pending(strategy: Strategy) -> bool:
    return isinstance(strategy.inputs[0], Partial)


def reshape_sharded(tensor: ShardedTensor, size: Sequence[int], stride: object = None) -> ShardedTensor:
    """The tensor in another shape, in place; local tensors have strides of their own.

    Where the cuts cannot be carried over it is moved first to a layout whose cuts can: then the result is a copy.
    """
    try:
        layout = _cached_view_layout(tensor.sharding, tuple(size))
    except NoViewError:
        shape = resolve_size(tensor.sharding.shape, size)
        recut = _move_for_view(tensor, shape)
        if recut.sharding == tensor.sharding:  # the same pieces in other words: the memory is the tensor's own
            recut._dense_strides = tensor._dense_strides
            return reshape_sharded(recut, size)
        moved = reshape_sharded(recut, size)
        if not can_view(tensor.sharding.shape, tensor._dense_strides, shape):
            return moved  # a copy in torch as well
        return mark_copied(moved, "a view, before which its input had to be moved,")
    if not tensor.local_parts:
        return wrap(layout, (), tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=tensor._anchor)
    local = tensor.local_parts[0].reshape(layout.local_shapes(tensor.comm.rank)[0])
    if not can_view(tensor.sharding.shape, tensor._dense_strides, resolve_size(tensor.sharding.shape, size)):
        local = copy_if_shared(local, tensor.local_parts[0])
    return wrap(layout, (local,), tensor.comm)


def _move_for_view(tensor: ShardedTensor, size: tuple[int, ...]) -> ShardedTensor:
    settled = settle_rows(tensor, size[0] if size else 1) if tensor.sharding.depends_on_data else tensor
    if settled is not tensor:
        return settled
    spec = mesh_view(tensor.sharding)
    assert spec is not None
    layout = recut_for_view(spec, tensor.sharding.shape, size).layout(tensor.sharding.shape)
    note_special()  # the move is one more step than a reshape of local tensors, which is what would be remembered
    locals_, anchor = move_to(tensor, layout, "view")
    return wrap(layout, locals_, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=anchor)


register_sharding(
    [aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default],
    Steps(reshape_sharded),
)


def _cached_view_layout(layout: Layout, size: tuple[int, ...]) -> Layout:
    if layout.depends_on_data:
        return _carry_view_layout(layout, resolve_size(layout.shape, size))
    known = _views.get((id(layout), size))
    if known is None:
        if len(_views) >= _MAX_VIEWS:
            _views.clear()
        known = _views[(id(layout), size)] = (layout, _carry_view_layout(layout, resolve_size(layout.shape, size)))
    return known[1]


def resolve_size(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The size with its -1 filled in.

    >>> resolve_size((4, 6), (-1, 8))
    (3, 8)
    """
    numel, known = math.prod(shape), math.prod(s for s in size if s != -1)
    filled = tuple(numel // max(1, known) if s == -1 else s for s in size)
    if math.prod(filled) != numel or list(size).count(-1) > 1:
        raise RuntimeError(f"shape {list(size)} is invalid for a tensor of shape {list(shape)} with {numel} elements")
    return filled


def _carry_view_layout(layout: Layout, size: tuple[int, ...]) -> Layout:
    spec = mesh_view(layout)
    if spec is None:
        raise _view_error(layout, size, "its pieces are irregular")
    if 0 in size:
        cut = [p if not isinstance(p, Shard) else Replicate() for p in spec.placements]
        return MeshSpec(spec.mesh, cut).layout(size)
    try:
        return view_spec(spec, layout.shape, size).layout(size)
    except NoViewError:
        alone = MeshSpec(spec.mesh, _drop_single_axes(spec), spec.order)
        if alone != spec:
            return _carry_view_layout(alone.layout(layout.shape), size)
        raise


def _drop_single_axes(spec: MeshSpec) -> list[Placement]:
    """The placements with Replicate, which means the same, for axes of one rank."""
    return [Replicate() if n == 1 else p for p, n in zip(spec.placements, spec.mesh.shape, strict=True)]


def _view_error(layout: Layout, size: Sequence[int], why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"view of {format_layout_text(layout)} as {list(size)}: {why}; redistribute first, so that the dims that "
        "are merged "
        "or split are whole or cut at multiples of the inner lengths"
    )
