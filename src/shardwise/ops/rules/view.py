"""Views: the same elements under other indices. A cut is carried over; where it cannot be, the tensor is moved first.

Transposition and the like renumber dims, which is a rule. A reshape has arguments of its own for each rank, so
it works out the layout of the whole result and reshapes the local tensor to what this rank holds of it.

Operators that speak of strides, and views in place: the tensor itself gets another shape.

1. `unsqueeze_`, `squeeze_`, `transpose_`, `t_`: the view is taken by its own rule, and the tensor becomes it.
2. `as_strided` and the like count elements of memory. A ShardedTensor is read as if the whole were contiguous, which is
   what its `stride()` says; that is the memory of a replicated tensor, so others are gathered first. Of transposed
   dims the memory is in another order, which is gathered. Of a slice torch would read other elements: all ranks refuse.
3. `resize_`: another shape for as many elements, or any shape for a tensor that has none.

Joining and repeating: cat, stack, repeat, pad, diagonals.

Tensors that are cut alike along the dim they are joined along keep their cuts: the result is cut in groups, one for
each tensor. Nothing is moved.

Rows that values decide about: which rank has which row after a tensor is indexed along a sharded dim.

Each rank keeps the rows that it has already, under their new numbers: nothing moves, and every row of the result has an
owner. So tokens that are sorted by expert stay where they are until experts ask for them (see `grouped.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise._torch import aten
from shardwise.comm import any_rank
from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, RowOwners, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.dispatch_cache import note_special
from shardwise.ops.engine import compute
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, ignores_lengths, takes_copies
from shardwise.ops.views import (
    NoViewError,
    cutting_axes,
    mesh_spec_of,
    mesh_view,
    recut_for_view,
    redistribute_to,
    replace_placements,
    shape_tuple,
    view_spec,
)
from shardwise.tensor.autograd_mixin import can_view, copy_if_shared
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text, move_to
from shardwise.tensor.parts import held_rows
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import check_writable, mark_copied, turn_into


def axis_owners(layout: Layout, dim: int) -> dict[int, IntArray]:
    """For each axis that cuts a dim: the place along it of the ranks that have each row."""
    spec = mesh_view(layout)
    assert spec is not None
    axes = cutting_axes(layout, (dim,))
    found = {axis: np.zeros(layout.shape[dim], np.int64) for axis in axes}
    for place in np.ndindex(*(n if a in axes else 1 for a, n in enumerate(spec.mesh.shape))):
        rows = held_rows(layout, int(spec.mesh.ranks[place]), dim)
        for axis in axes:
            found[axis][rows] = place[axis]
    return found


def with_owners(spec: MeshSpec, owners: dict[int, IntArray], dim: int = 0) -> MeshSpec:
    """The spec with the rows of a dim given to owners along some axes."""
    placements: list[Placement] = list(spec.placements)
    for axis, ranks in owners.items():
        placements[axis] = Shard(dim, owners=RowOwners(ranks))
    return MeshSpec(spec.mesh, placements, spec.order)


def keeps_rows(x: TensorMeta, index: TensorMeta) -> bool:
    """Whether the result of indexing dim 0 has owners for its rows: it is as long as the tensor, or longer.

    A few rows of a long table are a pending sum instead: that can be remembered, and costs little to add up.
    """
    if x.ndim == 0 or index.ndim != 1 or index.dtype in (torch.bool, torch.uint8) or not cutting_axes(x.layout, (0,)):
        return False
    whole = all(isinstance(p, Replicate) for p in index.placements)
    return whole and (index.shape[0] >= max(x.shape[0], 1) or x.layout.depends_on_data)


def take_rows(x: ShardedTensor, rows: IntArray) -> ShardedTensor:
    """The rows of these numbers, each where it is; all ranks pass the same numbers."""
    spec, rank = mesh_spec_of(x), x.comm.rank
    assert spec is not None
    owners = {axis: ranks[rows] for axis, ranks in axis_owners(x.sharding, 0).items()}
    layout = with_owners(spec, owners).layout((len(rows), *x.shape[1:]))
    places = np.zeros(x.shape[0], np.int64)
    own = held_rows(x.sharding, rank, 0)
    places[own] = np.arange(len(own))
    wanted = places[rows[held_rows(layout, rank, 0)]]
    local = x.local_parts[0]
    return wrap(layout, (local.index_select(0, torch.from_numpy(wanted).to(local.device)),), x.comm)


def index_rows(x: ShardedTensor, indices: Any) -> ShardedTensor:
    """`x[index]` along dim 0, by `take_rows`; numbers out of range are refused on every rank."""
    if _leaves_out_ranks(x):
        return aten.index.Tensor(_make_whole(x), indices)  # type: ignore[no-any-return]  # untyped in torch
    index: Tensor = indices[0].local_parts[0]
    return take_rows(x, _checked_rows(index, x.shape[0], negative=True))


def select_rows(x: ShardedTensor, dim: int, index: ShardedTensor) -> ShardedTensor:
    """`x.index_select(0, index)`, by `take_rows`."""
    if _leaves_out_ranks(x):
        return aten.index_select.default(_make_whole(x), dim, index)  # type: ignore[no-any-return]  # untyped in torch
    return take_rows(x, _checked_rows(index.local_parts[0], x.shape[0], negative=False))


def _leaves_out_ranks(x: ShardedTensor) -> bool:
    """Whether some ranks are outside of the mesh: they do not have the index, so they could not know the owners."""
    spec = mesh_spec_of(x)
    return spec is not None and spec.mesh.ranks.size < x.comm.world_size


def _make_whole(x: ShardedTensor) -> ShardedTensor:
    spec = mesh_spec_of(x)
    assert spec is not None
    return redistribute_to(x, MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim).layout(tuple(x.shape)), "index")


def _checked_rows(index: Tensor, length: int, *, negative: bool) -> IntArray:
    rows: IntArray = index.detach().cpu().numpy().astype(np.int64)
    outside = (rows >= length) | (rows < (-length if negative else 0))
    if outside.any():
        raise IndexError(f"index {int(rows[outside][0])} is out of bounds for dim 0 of length {length}")
    return np.where(rows < 0, rows + length, rows)


def settle_rows(tensor: ShardedTensor, rows_out: int) -> ShardedTensor:
    """A tensor whose dim 0 has owners in a form that can be viewed with `rows_out` rows in front.

    Rows that are merged into one may be on several ranks. Where as many are merged as an axis has ranks, or more, the
    rows stay and become a pending sum, with zeros for what others have. Otherwise fewer bytes are sent if each row goes
    to its place in an even split.
    """
    spec = mesh_spec_of(tensor)
    assert spec is not None
    length = tensor.shape[0]
    merged = length // rows_out if rows_out and length % rows_out == 0 else length
    for axis in cutting_axes(tensor.sharding, (0,)):
        now, ranks = spec.placements[axis], spec.mesh.shape[axis]
        if not isinstance(now, Shard) or now.owners is None:
            continue
        if merged < ranks:
            sizes = tuple(n * merged for n in chunk_sizes(rows_out, ranks))
            even = replace_placements(spec, (axis,), Shard(0, sizes=sizes))
            tensor = redistribute_to(tensor, even.layout(shape_tuple(tensor)), "view")
        else:
            tensor = _add_up_later(tensor, spec, axis)
        spec = mesh_spec_of(tensor)
        assert spec is not None
    return tensor


def _add_up_later(tensor: ShardedTensor, spec: MeshSpec, axis: int) -> ShardedTensor:
    """The tensor as a pending sum along an axis whose ranks own its rows."""
    pending = Partial("max" if tensor.dtype == torch.bool else "sum")
    layout = replace_placements(spec, (axis,), pending).layout(shape_tuple(tensor))
    rank, local = tensor.comm.rank, tensor.local_parts[0]
    places = np.zeros(tensor.shape[0], np.int64)
    rows = held_rows(layout, rank, 0)
    places[rows] = np.arange(len(rows))
    own = torch.from_numpy(places[held_rows(tensor.sharding, rank, 0)]).to(local.device)
    filled = local.new_zeros((len(rows), *local.shape[1:])).index_copy(0, own, local)
    return wrap(layout, (filled,), tensor.comm)


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
@takes_copies
def t(x: TensorMeta) -> list[Any]:
    return renumber_dims(x, list(reversed(range(x.ndim))))


@register_sharding([aten.transpose.int])
@ignores_lengths
@takes_copies
def transpose(x: TensorMeta, one: int, other: int) -> list[Any]:
    new = list(range(x.ndim))
    if new:
        new[one], new[other] = new[other], new[one]
    return renumber_dims(x, new)


@register_sharding(aten.permute.default)
@ignores_lengths
@takes_copies
def permute(x: TensorMeta, dims: Sequence[int]) -> list[Any]:
    order = [d % x.ndim for d in dims]
    return renumber_dims(x, [order.index(d) for d in range(x.ndim)])


@register_sharding(aten.unsqueeze.default)
@takes_copies
def unsqueeze(x: TensorMeta, dim: int) -> list[Any]:
    at = dim % (x.ndim + 1)
    return renumber_dims(x, [d + (d >= at) for d in range(x.ndim)])


@register_sharding([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims])
@takes_copies
def squeeze(x: TensorMeta, dims: int | Sequence[int] | None = None) -> list[Any]:
    asked = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % x.ndim for d in asked if x.shape[d] == 1}) if x.ndim else []
    new = [None if d in gone else d - sum(g < d for g in gone) for d in range(x.ndim)]
    return renumber_dims(x, new, lambda view, tensor, *rest: tensor.squeeze(gone))


@register_sharding(aten.expand.default)
@takes_copies
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
    return [replace(s, local_if_empty=_view_empty_as_real) for s in renumber_dims(x, list(range(x.ndim)))]


def _view_empty_as_real(view: Any, x: Tensor) -> Tensor:
    """A gradient without elements may have any strides, and torch's backward takes it for a contiguous one."""
    made = aten.view_as_real.default(x)
    if x.numel() == 0 and made.requires_grad:
        made.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))
    return made  # type: ignore[no-any-return]  # untyped in torch


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
        layout = _view_layout(tensor.sharding, tuple(size))
    except NoViewError:
        shape = resolve_size(tensor.sharding.shape, size)
        recut = _move_for_view(tensor, shape)
        if recut.sharding.is_used_as(tensor.sharding):  # the same pieces in other words: the memory is the tensor's own
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
    Steps(reshape_sharded, takes_copies=True),
)


@cache_by_identity
def _view_layout(layout: Layout, size: tuple[int, ...]) -> Layout:
    return _carry_view_layout(layout, resolve_size(layout.shape, size))


def resolve_size(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The size with its -1 filled in.

    >>> resolve_size((4, 6), (-1, 8))
    (3, 8)
    """
    numel, known = math.prod(shape), math.prod(s for s in size if s != -1)
    filled = tuple(numel // max(1, known) if s == -1 else s for s in size)
    if known == 0 and list(size).count(-1) == 1:
        raise RuntimeError(
            f"cannot reshape tensor of {numel} elements into shape {list(size)}: the -1 may be any length; name it"
        )
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


_VIEWS = {
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.as_strided_.default: aten.as_strided.default,
}


def _view_in_place(view: Any, tensor: ShardedTensor, *args: Any) -> ShardedTensor:
    return turn_into(tensor, compute(view, (tensor, *args), {}))  # torch's way there is closed in inference mode


for _op, _view in _VIEWS.items():
    register_sharding(_op, Steps(partial(_view_in_place, _view), takes_copies=True))


def _memory_order(tensor: ShardedTensor) -> tuple[int, ...] | None:
    """The order of dims in which a tensor with transposed dims is contiguous; None where it is anyway, or never.

    Only an order in which each step is as long as everything inside of it leaves no gaps: (2, 8) steps of (1, 2).
    """
    strides, shape = tensor._dense_strides, tensor.shape
    if strides is None:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    inside = [math.prod(shape[dim] for dim in order[i + 1 :]) for i in range(len(order))]
    dense = all(shape[dim] == 1 or strides[dim] == step for dim, step in zip(order, inside, strict=True))
    return order if dense and tensor.numel() else None


def _replicate_memory(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """The tensor whole on every rank, in contiguous memory of its own."""
    spec = _check_memory(tensor, name)
    layout = MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim).layout(tuple(tensor.shape))
    return redistribute_to(tensor, layout, name)


def _check_memory(tensor: ShardedTensor, name: str) -> MeshSpec:
    """Raise on every rank unless the memory of each is contiguous and all of it is this tensor's."""
    spec = mesh_view(tensor.sharding)
    if spec is None or spec.mesh.ranks.size < tensor.comm.world_size:
        raise UnsupportedOpError(
            f"{name} of {format_layout_text(tensor.sharding)}: the layout has no mesh of all {tensor.comm.world_size} "
            "ranks, which ask each other about their memory; redistribute to one"
        )
    shared = not all(map(_is_all_of_its_memory, tensor.local_parts))
    if tensor._dense_strides is not None or any_rank(tensor.comm, shared, label=name):
        raise UnsupportedOpError(
            f"{name} of {format_layout_text(tensor.sharding)} reads a ShardedTensor as contiguous memory, and this is "
            "a slice, a transposed view or the like; use contiguous() or clone() first, or a view that names dims"
        )
    return spec


def _is_all_of_its_memory(local: Tensor) -> bool:
    size = local.untyped_storage().nbytes()
    return local.is_contiguous() and local.storage_offset() == 0 and size == local.numel() * local.element_size()


def _call_on_memory(op: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """Compute on the whole tensor's memory; other tensors are wanted whole as well."""
    order = None if op is aten.as_strided_scatter.default else _memory_order(tensor)
    if order is not None:
        tensor = compute(aten.permute.default, (tensor, order), {})
    whole = _replicate_memory(tensor, str(op))
    values = [_whole_local(a, whole, str(op)) if isinstance(a, ShardedTensor) else a for a in args]
    result = op(whole.local_parts[0], *values, **kwargs)
    spec = whole.sharding.spec
    made = wrap(spec.layout(tuple(result.shape)), (result,), tensor.comm)
    is_copy = op is aten.as_strided.default and whole.sharding != tensor.sharding
    return mark_copied(made, f"what {op} returned, after its input had to be moved,") if is_copy else made


def _whole_local(tensor: ShardedTensor, like: ShardedTensor, name: str) -> Tensor:
    return redistribute_to(tensor, like.sharding.spec.layout(tuple(tensor.shape)), name).local_parts[0]


for _op in (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default):
    register_sharding(_op, Steps(partial(_call_on_memory, _op)))


def _resize(tensor: ShardedTensor, size: Sequence[int], *, memory_format: object = None) -> ShardedTensor:
    check_writable(tensor)
    if tuple(size) == tuple(tensor.shape):
        return tensor
    if tensor.requires_grad:
        raise UnsupportedOpError("a tensor that requires grad cannot be resized; use reshape()")
    if tensor.numel() == 0:
        return turn_into(tensor, _make_empty(tensor, size))
    if math.prod(size) != tensor.numel():
        raise UnsupportedOpError(
            f"resize_ of {format_layout_text(tensor.sharding)} to {list(size)}: {tensor.numel()} elements become "
            f"{math.prod(size)}, and only ranks that have the last ones could drop or add some; make a new tensor"
        )
    _check_memory(tensor, "resize_")
    return turn_into(tensor, reshape_sharded(tensor, size))


def _make_empty(tensor: ShardedTensor, size: Sequence[int]) -> ShardedTensor:
    made: Any = aten.new_empty.default(tensor, tuple(size))
    assert isinstance(made, ShardedTensor)
    return made


register_sharding(aten.resize_.default, Steps(_resize))
register_sharding(
    aten.resize_as_.default, Steps(lambda tensor, like, **options: _resize(tensor, tuple(like.shape), **options))
)


@register_sharding(aten.cat.default)
@takes_copies
def cat(tensors: Sequence[TensorMeta], dim: int = 0) -> list[Any]:
    ndim = max(t.ndim for t in tensors)
    at = dim % max(1, ndim)
    found = [_same_cut_strategy(Replicate(), Replicate(), len(tensors))]
    if any(t.ndim != ndim for t in tensors):
        return found + _strategies_beside_nothing(tensors, ndim)
    found += [_same_cut_strategy(Shard(d), Shard(d), len(tensors)) for d in range(ndim) if d != at]
    found += [_same_cut_strategy(p, p, len(tensors)) for p in _joint_pending_kinds(tensors)]
    cuts = {p for t in tensors for p in t.placements if isinstance(p, Shard) and p.dim == at}
    if cuts and all(p.is_even for p in cuts):
        cut, lengths = max(cuts, key=lambda p: p.unit or 1), tuple(t.shape[at] for t in tensors)
        if any(n % (cut.unit or 1) for n in lengths):
            cut = Shard(at)
        same = cuts == {cut}  # else each is cut so, and a plain cut does not mean: as it is cut now
        given = tuple(cut if same else replace(cut, groups=(n,)) for n in lengths)
        found.append(Strategy((replace(cut, groups=lengths),), given, local_if_empty=_cat_empty))
    return found


def _cat_empty(view: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Torch's cat skips tensors of shape (0,), and their gradients are on no tape: they are joined as columns."""
    if tensors[0].ndim > 1:
        return aten.cat.default(tensors, dim)  # type: ignore[no-any-return]  # untyped in torch
    return torch.cat([t.unsqueeze(1) for t in tensors]).squeeze(1)


def _strategies_beside_nothing(tensors: Sequence[TensorMeta], ndim: int) -> list[Strategy]:
    """One tensor beside tensors of shape (0,), which torch skips: it is cut as it is (a cache that is still empty)."""
    full = [t for t in tensors if t.shape != (0,)]
    if len(full) != 1:
        return []
    cuts: list[Placement] = [Shard(d) for d in range(ndim)]
    return [Strategy((p,), tuple(p if t is full[0] else Replicate() for t in tensors)) for p in cuts]


def _joint_pending_kinds(tensors: Sequence[TensorMeta]) -> list[Partial]:
    """The pending reductions in which tensors are joined: each can be put in such a form, with its gradient."""
    if len({t.dtype for t in tensors}) > 1:
        return []
    taped = any(t.requires_grad for t in tensors)
    return [p for p in pending_kinds(*tensors) if not taped or p.op in ("sum", "avg")]


def _same_cut_strategy(out: Placement, given: Placement, count: int) -> Strategy:
    return Strategy((out,), (given,) * count)


@register_sharding(aten.stack.default)
@takes_copies
def stack(tensors: Sequence[TensorMeta], dim: int = 0) -> list[Any]:
    ndim = tensors[0].ndim
    at = dim % (ndim + 1)
    found = [_same_cut_strategy(Replicate(), Replicate(), len(tensors))]
    found += [_same_cut_strategy(Shard(d + (d >= at)), Shard(d), len(tensors)) for d in range(ndim)]
    return found + [_same_cut_strategy(p, p, len(tensors)) for p in _joint_pending_kinds(tensors)]


@register_sharding(aten.repeat.default)
def repeat(x: TensorMeta, repeats: Sequence[int]) -> list[Any]:
    added = len(repeats) - x.ndim
    return renumber_dims(x, [d + added if repeats[d + added] == 1 else None for d in range(x.ndim)])


@register_sharding(aten.constant_pad_nd.default)
def pad(x: TensorMeta, pad: Sequence[int], value: float = 0) -> list[Any]:
    first = x.ndim - len(pad) // 2
    grown = {x.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}
    found = renumber_dims(x, [None if d in grown else d for d in range(x.ndim)])
    return found if value == 0 or first == x.ndim else [s for s in found if not isinstance(s.inputs[0], Partial)]


@register_sharding(aten.diagonal_scatter.default)
def diagonal_scatter(x: TensorMeta, src: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Any]:
    """The two dims of the diagonal are whole; the others are the first dims of what is written."""
    rest = [d for d in range(x.ndim) if d not in (dim1 % x.ndim, dim2 % x.ndim)]
    return [
        Strategy((Replicate(),), (Replicate(), Replicate())),
        *(Strategy((Shard(d),), (Shard(d), Shard(own))) for own, d in enumerate(rest)),
    ]


@register_sharding(aten.diagonal.default)
def diagonal(x: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Any]:
    gone = {dim1 % x.ndim, dim2 % x.ndim}
    rest = [d for d in range(x.ndim) if d not in gone]
    return renumber_dims(x, [rest.index(d) if d in rest else None for d in range(x.ndim)])
