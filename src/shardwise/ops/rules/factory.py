"""Tensors made after others: zeros_like, new_zeros, rand_like, and copies of values into a tensor.

Operators that draw random numbers: dropout, bernoulli, randint_like. What they draw does not depend on the layout.

They go through the streams of sharded tensors, never through a rank's own generator, so replicas stay equal.

Conversions and copies that torch's functions are broken down into; recorded on the local tensors' tape.

The value of a tensor of one element: a Python number, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, autograd_on_locals
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Replicate, Shard
from shardwise.ops.engine.dispatcher import call_op
from shardwise.ops.engine.placement_cost import mesh_view
from shardwise.ops.engine.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.engine.two_step import redistribute_to
from shardwise.ops.rules.pointwise import pointwise_strategies
from shardwise.ops.rules.view import pending_kinds
from shardwise.tensor.creation import empty_like, rand_like, randn_like
from shardwise.tensor.dispatch import UnsupportedOpError, register_handler
from shardwise.tensor.inplace import draw_into, mark_copied
from shardwise.tensor.move import replicated_layout
from shardwise.tensor.random.distributions import bernoulli, integers
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@register_sharding(
    [
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
    ]
)
def like_rule(x: TensorMeta, *args: Any, **kwargs: Any) -> list[Any]:
    """As the tensor is cut; one value everywhere has no pending form, so a pending tensor yields a replicated one."""
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
def untagged_pointwise_rule(*args: Any, **kwargs: Any) -> list[Any]:
    """Pointwise operators that torch does not tag as such."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    found = pointwise_strategies(metas)
    return found + [Strategy((p,), (p,) * len(metas)) for p in pending_kinds(*metas) if _is_copy(args)]


def _is_copy(args: Sequence[Any]) -> bool:
    """Whether the call only copies: one tensor to another of the same shape, or one tensor alone."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    return len({m.shape for m in metas}) == 1 and not any(m.dtype == torch.bool for m in metas) and len(metas) < 3


def _draw_like(draw: Callable[..., ShardedTensor]) -> Callable[..., ShardedTensor]:
    def implementation(
        types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm
    ) -> ShardedTensor:
        known = {k: v for k, v in kwargs.items() if k in ("dtype", "device", "pin_memory") and v is not None}
        return draw(args[0], **known)

    return implementation


register_handler(aten.rand_like.default)(_draw_like(rand_like))
register_handler(aten.randn_like.default)(_draw_like(randn_like))


def new_layout(tensor: ShardedTensor, size: Sequence[int]) -> Layout:
    """The layout of a new tensor that is made from another: as that one if the shape is the same, else everywhere."""
    spec = mesh_view(tensor.sharding)
    if spec is None:
        raise UnsupportedOpError(
            f"a new tensor of shape {list(size)} made from one in irregular pieces ({tensor.sharding.spec!r}) has no "
            "mesh; make it with shardwise.zeros(spec, size) and the like"
        )
    same = tuple(size) == tensor.sharding.shape and tensor.sharding.pending is None
    placements = spec.placements if same else (Replicate(),) * spec.mesh.ndim
    return MeshSpec(spec.mesh, placements, spec.order).layout(size)


def _register_new(op: Any) -> None:
    """Make the local part by the operator itself, with the local size."""

    @register_handler(op)
    def new(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> ShardedTensor:
        tensor, size, *rest = args
        layout = new_layout(tensor, tuple(size))
        return wrap(layout, (op(tensor.local_parts[0], layout.local_shapes(comm.rank)[0], *rest, **kwargs),), comm)


for _op in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default):
    _register_new(_op)


Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def draw_noise_like(tensor: ShardedTensor, probability: float, dtype: torch.dtype) -> ShardedTensor:
    """Ones with a probability, else zeros; replicated where the tensor is a pending sum."""
    made: ShardedTensor = call_op(aten.empty_like.default, (ShardedTensor,), (tensor,), {"dtype": dtype})
    return draw_into(made, lambda: bernoulli(probability), label="dropout", fields={"p": probability})


@register_handler(aten.native_dropout.default)
def _native_dropout(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    tensor, p, train = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("train", True)
    keep = 1.0 if train is False else 1.0 - p
    kept = draw_noise_like(tensor, keep, torch.bool)
    scaled = call_op(aten.mul.Tensor, types, (tensor, 0.0 if keep == 0 else 1.0 / keep), {})
    return call_op(aten.mul.Tensor, types, (scaled, kept), {}), kept


@register_handler(aten.bernoulli.default)
def _bernoulli_values(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    """Ones with the probabilities that the tensor holds."""
    tensor: ShardedTensor = args[0]
    drawn = rand_like(tensor.detach(), generator=kwargs.get("generator"))
    return call_op(aten.lt.Tensor, types, (drawn, tensor.detach()), {}).to(tensor.dtype)


@register_handler(aten.bernoulli.p)
def _bernoulli_p(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    made = empty_like(args[0])
    p = args[1]
    return draw_into(made, lambda: bernoulli(p), label="bernoulli", fields={"p": p}, generator=kwargs.get("generator"))


@register_handler(aten.randint_like.default, aten.randint_like.low_dtype)
def _randint_like(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    low, high = (0, args[1]) if len(args) == 2 else (args[1], args[2])
    made = empty_like(args[0], dtype=kwargs.get("dtype"))
    return draw_into(
        made, lambda: integers(low, high, made.dtype), label="randint_like", fields={"low": low, "high": high}
    )


_CONVERT = aten._to_copy.default
_NAMES = ("dtype", "device", "non_blocking", "memory_format")


@register_sharding([_CONVERT, aten.alias.default])
def _same_shape_rule(x: TensorMeta, **_: Any) -> list[Strategy]:
    whole = Strategy((Replicate(),), (Replicate(),))
    return [whole, *(Strategy((Shard(d),), (Shard(d),)) for d in range(x.ndim))]


def _register_eager(op: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Conjugated or negated now, not when it is read: local tensors are moved as they are in memory.

    The result is marked, since torch's own would share memory.
    """

    @register_sharding(op)
    def rule(x: TensorMeta) -> list[Strategy]:
        return [Strategy(s.outputs, s.inputs, lambda view, tensor: function(tensor)) for s in _same_shape_rule(x)]

    @register_handler(op)
    def at_once(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        if mesh_view(args[0].sharding) is None:
            return NotImplemented
        return mark_copied(call_op(op, types, args, kwargs), "a conjugate or negative")


_register_eager(aten._conj.default, torch.conj_physical)
_register_eager(aten._neg_view.default, torch.neg)


@register_handler(aten._linalg_check_errors.default)
def _check_errors(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> None:
    """Every rank sees the verdicts of all, so that all raise or none."""
    verdicts: ShardedTensor = args[0]
    with autograd_on_locals():
        aten._linalg_check_errors.default(verdicts.detach().full(), *args[1:], **kwargs)


@register_handler(_CONVERT)
def _convert_handler(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Pending sums, irregular pieces and other devices, piece by piece; anything else by the rule."""
    tensor: ShardedTensor = args[0]
    device = kwargs.get("device")
    regular = mesh_view(tensor.sharding) is not None and tensor.sharding.pending is None
    if regular and (device is None or torch.device(device) == tensor.device):
        return NotImplemented
    known = {k: v for k, v in kwargs.items() if k in _NAMES and v is not None}
    with autograd_on_locals():
        return tensor.to(**known, copy=True)


@register_handler(aten._local_scalar_dense.default)
def _item(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """What `item()`, `float()` and `bool()` ask for; pending sums are added up, and every rank gets the value."""
    tensor: ShardedTensor = args[0].detach()
    return redistribute_to(tensor, replicated_layout(tuple(tensor.shape), comm.ranks), "item").local_parts[0].item()
