"""Tensors made after others, random values, conversions and copies, and the value of one element.

1. `zeros_like`, `new_zeros`, `rand_like`: tensors made after others, in their layout.
2. `dropout`, `bernoulli`, `randint_like`: random numbers come from the streams of sharded tensors, never from a rank's
   own generator, so that they do not depend on the layout and replicas stay equal.
3. Conversions and copies that torch's functions are broken down into.
4. `item()`: a Python number, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.comm import Comm
from shardwise.geometry import Layout, LayoutError, MeshSpec, Replicate, Shard
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.mixed import replicate
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import redistribute_to, resolve_partial
from shardwise.ops.rules.pointwise import pointwise_strategies
from shardwise.ops.rules.view import pending_kinds
from shardwise.tensor.creation import empty_like, rand_like, randn_like
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.inplace import check_writable, draw_into, mark_copied
from shardwise.tensor.move import replicated_layout
from shardwise.tensor.moving.reductions import check_conversion
from shardwise.tensor.random.distributions import bernoulli, integers
from shardwise.tensor.random.init import draw_bernoulli, draw_integers, draw_normal, draw_uniform, fill_value
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
    return found + [Strategy((p,), (p,)) for p in pending_kinds(*metas) if len(metas) == 1]


@register_sharding(aten.copy_.default)
def copy_into(x: TensorMeta, source: TensorMeta, non_blocking: bool = False) -> list[Strategy] | Steps:
    """As pointwise operators; what is pending is copied as addends, which must be of the right dtype and shape."""
    pending = pending_kinds(x, source)
    if pending and (x.dtype != source.dtype or x.shape != source.shape):
        return Steps(_copy_converted)
    return pointwise_strategies([x, source]) + [Strategy((p,), (p, p)) for p in pending]


def _copy_converted(target: ShardedTensor, source: Any, non_blocking: bool = False) -> ShardedTensor:
    """Copy values of another dtype or shape; they are converted before they become addends."""
    if source.dtype != target.dtype:
        source = convert_parts(source, dtype=target.dtype)
    if source.shape != target.shape:
        source = source.expand(tuple(target.shape))
    copied: ShardedTensor = aten.copy_.default(target, source, non_blocking)
    return copied


def _draw_like(draw: Callable[..., ShardedTensor], tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    known = {k: v for k, v in options.items() if k in ("dtype", "device", "pin_memory") and v is not None}
    return draw(tensor, **known)


register_sharding(aten.rand_like.default, Steps(partial(_draw_like, rand_like)))
register_sharding(aten.randn_like.default, Steps(partial(_draw_like, randn_like)))


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


def _make_new(op: Any, tensor: ShardedTensor, size: Sequence[int], *rest: Any, **options: Any) -> ShardedTensor:
    """Make the local part by the operator itself, with the local size."""
    layout, comm = new_layout(tensor, tuple(size)), tensor.comm
    if not tensor.local_parts:
        sample = op(torch.empty(0, dtype=tensor.dtype, device=tensor.device), (0,), *rest, **options)
        return wrap(layout, (), comm, dtype=sample.dtype, device=sample.device)
    return wrap(layout, (op(tensor.local_parts[0], layout.local_shapes(comm.rank)[0], *rest, **options),), comm)


for _op in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default):
    register_sharding(_op, Steps(partial(_make_new, _op)))


@register_function(Tensor.new)
def _new_like(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """`x.new(size)`, by which torch's distributions make what they draw into; other forms are left to torch."""
    tensor, *sizes = args
    numbers = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    if kwargs or not sizes or not all(isinstance(n, int) for n in numbers):
        return NotImplemented
    return tensor.new_empty(numbers)


def _fill(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    """Overwrite a tensor with one value; a pending reduction gets addends that make it up."""
    if isinstance(value, ShardedTensor):
        return _copy_converted(tensor, value)
    try:
        return fill_value(tensor, value)
    except LayoutError:
        check_writable(tensor)
        filled: Any = aten.new_full.default(tensor, tuple(tensor.shape), value)
        written: ShardedTensor = aten.copy_.default(tensor, filled)
        return written


def draw_noise_like(tensor: ShardedTensor, probability: float, dtype: torch.dtype) -> ShardedTensor:
    """Ones with a probability, else zeros; replicated where the tensor is a pending sum."""
    made: Any = aten.empty_like.default(tensor, dtype=dtype)
    return draw_into(made, lambda: bernoulli(probability), label="dropout", fields={"p": probability})


def _drop(tensor: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    keep = 1.0 if train is False else 1.0 - p
    kept: Any = draw_noise_like(tensor, keep, torch.bool)
    return tensor * (0.0 if keep == 0 else 1.0 / keep) * kept, kept


def _draw_bernoulli_like(tensor: ShardedTensor, p: float, *, generator: Any = None) -> ShardedTensor:
    made = empty_like(tensor)
    return draw_into(made, lambda: bernoulli(p), label="bernoulli", fields={"p": p}, generator=generator)


def _draw_integers_like(
    tensor: ShardedTensor,
    low: int,
    high: int,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> ShardedTensor:
    made, fields = empty_like(tensor, dtype=dtype), {"low": low, "high": high}
    return draw_into(
        made, lambda: integers(low, high, made.dtype), label="randint_like", fields=fields, generator=generator
    )


def _draw_integers_below(tensor: ShardedTensor, high: int, **options: Any) -> ShardedTensor:
    return _draw_integers_like(tensor, 0, high, **options)


register_sharding(aten.native_dropout.default, Steps(_drop))
register_sharding(aten.bernoulli.p, Steps(_draw_bernoulli_like))
for _name in ("default", "generator", "low_dtype", "low_generator_dtype"):
    if _name in aten.randint_like.overloads():  # older torch takes no generator
        _draw = _draw_integers_like if _name.startswith("low") else _draw_integers_below
        register_sharding(getattr(aten.randint_like, _name), Steps(_draw))

# Values written in place
register_sharding(aten.uniform_.default, Steps(draw_uniform))
register_sharding(aten.normal_.default, Steps(draw_normal))
register_sharding(aten.bernoulli_.float, Steps(draw_bernoulli))
register_sharding([getattr(aten.random_, name) for name in ("default", "to", "from")], Steps(draw_integers))
register_sharding([aten.fill_.Scalar, aten.fill_.Tensor], Steps(_fill))


def _fill_diagonal(tensor: ShardedTensor, fill_value: float, wrap: bool = False) -> ShardedTensor:
    """Write one value along the diagonal, whose places follow from the shape."""
    places = torch.zeros(tuple(tensor.shape), dtype=torch.bool, device=tensor.device).fill_diagonal_(True, wrap)
    written: ShardedTensor = aten.masked_fill_.Scalar(tensor, replicate(places, tensor), fill_value)
    return written


register_sharding(aten.fill_diagonal_.default, Steps(_fill_diagonal))
register_sharding(aten.zero_.default, Steps(lambda tensor: fill_value(tensor, 0), in_place=True))


# Copies and conversions


def _same_shape_strategies(x: TensorMeta) -> list[Strategy]:
    whole = Strategy((Replicate(),), (Replicate(),))
    return [whole, *(Strategy((Shard(d),), (Shard(d),)) for d in range(x.ndim))]


@register_sharding(aten.alias.default)
def alias(x: TensorMeta) -> list[Strategy]:
    return _same_shape_strategies(x) + [Strategy((p,), (p,)) for p in pending_kinds(x)]


@register_sharding(aten._to_copy.default)
def convert(x: TensorMeta, *, device: Any = None, **_: Any) -> list[Strategy] | Steps:
    """By parts where a sum is pending or the device may change; anything else as any operator of one tensor."""
    return _same_shape_strategies(x) if x.layout.pending is None and device is None else Steps(convert_parts)


def convert_parts(tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    """The tensor with its local parts converted, whatever its layout; reduced first where parts are not enough."""
    names = ("dtype", "device", "non_blocking", "memory_format")
    try:
        check_conversion(tensor.sharding.pending, tensor.dtype, options.get("dtype") or tensor.dtype)
    except ValueError:
        tensor = resolve_partial(tensor, "conversion")
    return tensor.to(**{k: v for k, v in options.items() if k in names and v is not None}, copy=True)


def _register_eager(op: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Conjugated or negated now, not when it is read: local tensors are moved as they are in memory.

    The result is marked, since torch's own would share memory.
    """

    def local(view: Any, tensor: Tensor) -> Tensor:
        return function(tensor)

    def mark(result: ShardedTensor) -> ShardedTensor:
        return mark_copied(result, "a conjugate or negative")

    @register_sharding(op)
    def rule(x: TensorMeta) -> list[Strategy]:
        return [Strategy(s.outputs, s.inputs, local, finish=mark) for s in _same_shape_strategies(x)]


_register_eager(aten._conj.default, torch.conj_physical)
_register_eager(aten._neg_view.default, torch.neg)


def _detach(tensor: ShardedTensor) -> ShardedTensor:
    return tensor.detach()


def _check_errors(verdicts: ShardedTensor, *args: Any, **kwargs: Any) -> None:
    """Every rank sees the verdicts of all, so that all raise or none."""
    aten._linalg_check_errors.default(verdicts.detach().full(), *args, **kwargs)


def _item(tensor: ShardedTensor) -> Any:
    """What `item()`, `float()` and `bool()` ask for; pending sums are added up, and every rank gets the value."""
    whole = replicated_layout(tuple(tensor.shape), tensor.comm.ranks)
    return redistribute_to(tensor.detach(), whole, "item").local_parts[0].item()


register_sharding(aten.detach.default, Steps(_detach))
register_sharding(aten._linalg_check_errors.default, Steps(_check_errors))
register_sharding(aten._local_scalar_dense.default, Steps(_item))
