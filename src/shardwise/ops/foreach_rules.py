"""Operators on lists of tensors: `_foreach_*`, fused optimizers, and the unscaling of gradients.

Each position of the lists has its own layout, that of the first list's tensor; other tensors of the position are
aligned to it. Then the operator runs once, on the lists of all local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import MeshSpec, Replicate
from shardwise.ops.engine import call_op
from shardwise.ops.local_tape import recording
from shardwise.ops.mixed import MixedTensorsError
from shardwise.ops.placing import mesh_view
from shardwise.ops.schema import written_slots
from shardwise.tensor.dispatch import UnsupportedOpError, handler
from shardwise.tensor.inplace import check_writable
from shardwise.tensor.moves import everywhere, moved
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

aten = torch.ops.aten

# Through these a pending sum stays pending: they are linear in the lists, taken together.
LINEAR = {"aten::_foreach_neg", "aten::_foreach_zero_", "aten::_foreach_clone", "aten::_foreach_copy_"}
LINEAR_IN_FIRST = {f"aten::_foreach_{name}{end}" for name in ("mul", "div") for end in ("", "_")}
LINEAR_TOGETHER = {f"aten::_foreach_{name}{end}" for name in ("add", "sub") for end in ("", "_")}
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def run_on_lists(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the local tensors of lists; each output has the layout of the first list's tensor."""
    lead = next(value for value in (*args, *kwargs.values()) if _is_list(value))
    if written_slots(op):
        _check_writable(lead)
    _check_pending(op, lead, args)
    counts = [len(t._locals) if isinstance(t, ShardedTensor) else 1 for t in lead]
    local_args = [_local(op, value, lead, counts) for value in args]
    local_kwargs = {name: _local(op, value, lead, counts) for name, value in kwargs.items()}
    with recording():
        result = op(*local_args, **local_kwargs) if sum(counts) else []
    if written_slots(op):
        for tensor in lead:
            tensor.__dict__.pop("_varied", None)
        return None
    return _regrouped(result, lead, counts)


def _check_writable(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor):
            check_writable(tensor)


def _regrouped(result: Sequence[Tensor], lead: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Local results put together again."""
    found: list[Tensor] = []
    position = 0
    for tensor, count in zip(lead, counts, strict=True):
        own = tuple(result[position : position + count])
        position += count
        sharded = isinstance(tensor, ShardedTensor)
        found.append(wrap(tensor._layout, own, tensor._comm, dtype=tensor.dtype) if sharded else own[0])  # type: ignore[attr-defined]
    return found


def _local(op: Any, value: Any, lead: Sequence[Tensor], counts: Sequence[int]) -> Any:
    """An argument with local tensors: lists follow the first list, one tensor is wanted whole."""
    if isinstance(value, ShardedTensor):
        return _whole(op, value)
    if not isinstance(value, list | tuple) or len(value) != len(lead):
        return value
    if not _is_list(value):
        return [v for v, count in zip(value, counts, strict=True) for _ in range(count)]
    return [t for one, first, n in zip(value, lead, counts, strict=True) for t in _aligned(op, one, first, n)]


def _whole(op: Any, tensor: ShardedTensor) -> Tensor:
    """The value of a tensor that all lists are combined with; every rank needs it."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise UnsupportedOpError(f"{op}: no gradient passes to the one tensor beside lists; use a loop over the lists")
    spec = mesh_view(tensor._layout)
    target = everywhere(tuple(tensor.shape), tensor._comm.ranks)
    if spec is not None:
        target = MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim).layout(tensor._layout.shape)
    return moved(tensor, target, str(op))[0][0]


def _aligned(op: Any, tensor: Tensor, first: Tensor, count: int) -> Sequence[Tensor]:
    """A tensor's local tensors in the layout of the first list's tensor."""
    if not isinstance(first, ShardedTensor):
        if isinstance(tensor, ShardedTensor):
            raise MixedTensorsError(f"{op}: a ShardedTensor stands beside a plain tensor in the first list")
        return [tensor]
    if not isinstance(tensor, ShardedTensor) or tensor.shape != first.shape:
        if tensor.numel() == 1:
            return [_whole(op, tensor) if isinstance(tensor, ShardedTensor) else tensor] * count
        raise MixedTensorsError(
            f"{op}: a {type(tensor).__name__} of shape {tuple(tensor.shape)} stands beside a ShardedTensor of shape "
            f"{tuple(first.shape)}; shard it alike"
        )
    return moved(tensor, first._layout, str(op))[0]


def _check_pending(op: Any, lead: Sequence[Tensor], args: Sequence[Any]) -> None:
    """Raise if a tensor of the first list is a pending sum and the operator is not linear."""
    pending = [t for t in lead if isinstance(t, ShardedTensor) and t._layout.pending is not None]
    name, lists = op._schema.name, sum(_is_list(a) for a in args)
    together = (
        name in LINEAR_TOGETHER and lists == 2 and all(_same_layouts(*pair) for pair in zip(*args[:2], strict=True))
    )
    linear = name in LINEAR or together or (name in LINEAR_IN_FIRST and lists == 1)
    if pending and not (linear and all(_is_sum(t) for t in pending)):
        raise UnsupportedOpError(
            f"{op} on a tensor with a pending {pending[0]._layout.pending}: redistribute it to Shard or Replicate first"
        )


def _same_layouts(one: Any, other: Any) -> bool:
    return getattr(one, "_layout", None) == getattr(other, "_layout", None)


def _is_sum(tensor: ShardedTensor) -> bool:
    return tensor._layout.pending is not None and tensor._layout.pending.op == "sum"


def _register_lists(op: Any) -> None:
    @handler(op)
    def on_lists(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        return run_on_lists(op, args, kwargs)


def _register_each(op: Any, single: Any, place: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Answer an operator on a list by one on each of its tensors."""

    @handler(op)
    def on_each(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        rest = place(args[1:])
        return [
            call_op(single, types, (t, *rest), kwargs) if isinstance(t, ShardedTensor) else single(t, *rest, **kwargs)
            for t in args[0]
        ]


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


REDUCING = {"_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm"}
for _name in sorted({s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas()}):
    if (_name.startswith("_foreach_") and _name not in REDUCING) or _name in FUSED:
        for _op in _overloads(_name):
            _register_lists(_op)
_register_each(aten._foreach_max.default, aten.max.default, lambda rest: ())


@handler(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> None:
    """Multiply gradients by a plain scale; `found_inf`, plain as well, is set on every rank if it is on one."""
    grads, found_inf, inverse = args
    local = [t for grad in grads for t in (grad._locals if isinstance(grad, ShardedTensor) else (grad,))]
    if local:
        aten._amp_foreach_non_finite_check_and_unscale_.default(local, found_inf, inverse)
    for one in dict.fromkeys(grad._comm for grad in grads if isinstance(grad, ShardedTensor)):
        one.all_reduce(found_inf, "max", label="found_inf").wait()
