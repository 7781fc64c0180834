"""Tensors made after others: zeros_like, new_zeros, rand_like, and copies of values into a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Replicate, Shard
from shardwise.ops.placing import mesh_view
from shardwise.ops.pointwise import pointwise_strategies
from shardwise.ops.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.view_rules import pending_kinds
from shardwise.tensor.creation import rand_like, randn_like
from shardwise.tensor.dispatch import UnsupportedOpError, handler
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

aten = torch.ops.aten


@register_sharding(
    [
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
    ]
)
def like(x: TensorMeta, *args: Any, **kwargs: Any) -> list[Any]:
    """As the tensor is cut; one value everywhere has no pending form, so a pending tensor gives a replicated one."""
    found = [Strategy((Replicate(),), (Replicate(),))]
    found += [Strategy((Shard(d),), (Shard(d),)) for d in range(x.ndim)]
    return found + [Strategy((Replicate(),), (p,)) for p in pending_kinds(x)]


@register_sharding(
    [
        aten.copy_.default,
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.lift_fresh.default,
    ]
)
def pointwise_untagged(*args: Any, **kwargs: Any) -> list[Any]:
    """Pointwise operators that torch does not tag as such."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    found = pointwise_strategies(metas)
    return found + [Strategy((p,), (p,) * len(metas)) for p in pending_kinds(*metas) if _is_copy(args)]


def _is_copy(args: Sequence[Any]) -> bool:
    """Whether the call only copies: one tensor to another of the same shape, or one tensor alone."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    return len({m.shape for m in metas}) == 1 and not any(m.dtype == torch.bool for m in metas) and len(metas) < 3


def _drawn_like(draw: Callable[..., ShardedTensor]) -> Callable[..., ShardedTensor]:
    def implementation(
        types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm
    ) -> ShardedTensor:
        known = {k: v for k, v in kwargs.items() if k in ("dtype", "device", "pin_memory") and v is not None}
        return draw(args[0], **known)

    return implementation


handler(aten.rand_like.default)(_drawn_like(rand_like))
handler(aten.randn_like.default)(_drawn_like(randn_like))


def new_layout(tensor: ShardedTensor, size: Sequence[int]) -> Layout:
    """Where a new tensor lies that is made from another: as that one if the shape is the same, else everywhere."""
    spec = mesh_view(tensor._layout)
    if spec is None:
        raise UnsupportedOpError(
            f"a new tensor of shape {list(size)} made from one in irregular pieces ({tensor._layout.spec!r}) has no "
            "mesh; make it with shardwise.zeros(spec, size) and the like"
        )
    same = tuple(size) == tensor._layout.shape and tensor._layout.pending is None
    placements = spec.placements if same else (Replicate(),) * spec.mesh.ndim
    return MeshSpec(spec.mesh, placements, spec.order).layout(size)


def _register_new(op: Any) -> None:
    """Make the local part by the operator itself, with the local size."""

    @handler(op)
    def new(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> ShardedTensor:
        tensor, size, *rest = args
        layout = new_layout(tensor, tuple(size))
        return wrap(layout, (op(tensor._locals[0], layout.local_shapes(comm.rank)[0], *rest, **kwargs),), comm)


for _op in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default):
    _register_new(_op)
