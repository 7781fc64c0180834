"""Operators that speak of strides, and views in place: the tensor itself gets another shape.

1. `unsqueeze_`, `squeeze_`, `transpose_`, `t_`: the view is taken by its own rule, and the tensor becomes it.
2. `as_strided` and the like count elements of memory. A ShardedTensor is read as if the whole were contiguous, which is
   what its `stride()` says; that is the memory of a replicated tensor, so others are gathered first. Where a rank's
   memory says otherwise (a slice, a transposed view) torch would read other elements: all ranks refuse.
3. `resize_`: another shape for as many elements, or any shape for a tensor that has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import MeshSpec, Replicate
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.registry import Steps
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import redistribute_to
from shardwise.ops.rules.view import reshape_sharded
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.inplace import check_writable, mark_copied, turn_into
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

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
    return turn_into(tensor, view(tensor, *args))


for _op, _view in _VIEWS.items():
    register_sharding(_op, Steps(partial(_view_in_place, _view)))


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
    verdict = b"1" if all(map(_is_all_of_its_memory, tensor.local_parts)) else b"0"
    if tensor._dense_strides is not None or b"0" in tensor.comm.all_gather_bytes(verdict, label=name):
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
