"""Operators on lists of tensors: `_foreach_*`, fused optimizers, and the unscaling of gradients.

Each position of the lists has its own layout, that of the first list's tensor; other tensors of the position are
aligned to it. Then the operator runs once, on the lists of all local tensors.

Norms of a list of tensors, which gradient clipping needs, take one exchange of one number per tensor and rank:

1. Each rank takes the norms of its local tensors. Tensors that the same axes cut make one group.
2. The rows of a group, one for each rank along these axes, are gathered.
3. The norm of a tensor is the norm of its ranks' norms.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, list_operators_on_lists
from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard
from shardwise.ops.implicit_replication import MixedTensorsError
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, written_slots
from shardwise.ops.views import cutting_axes, mesh_spec_of, mesh_view
from shardwise.tensor.autograd_mixin import tape_tensors
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import is_differentiated, move_to, replicated_layout, tape_inputs
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import check_writable, note_write_without_data

# Through these a pending sum stays pending: they are linear in the lists, taken together.
LINEAR = {"aten::_foreach_neg", "aten::_foreach_zero_", "aten::_foreach_clone", "aten::_foreach_copy_"}
LINEAR_IN_FIRST = {f"aten::_foreach_{name}{end}" for name in ("mul", "div") for end in ("", "_")}
LINEAR_TOGETHER = {f"aten::_foreach_{name}{end}" for name in ("add", "sub") for end in ("", "_")}
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def run_on_lists(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the local tensors of lists; each output has the layout of the first list's tensor.

    A rank that has nothing of a tensor computes with its anchor: so dtypes, the tape and refusals are those of others.
    """
    lead = next(value for value in (*args, *kwargs.values()) if _is_list(value))
    if written_slots(op):
        _check_writable(lead)
    _check_pending(op, lead, args)
    own = [tape_tensors(t) for t in lead]
    local_args = [_to_local_argument(op, value, lead, own) for value in args]
    local_kwargs = {name: _to_local_argument(op, value, lead, own) for name, value in kwargs.items()}
    result = op(*local_args, **local_kwargs)
    if written_slots(op):
        for tensor, parts in zip(lead, own, strict=True):
            tensor.__dict__.pop("_varied", None)
            if isinstance(tensor, ShardedTensor) and not tensor.local_parts:
                note_write_without_data(tensor, parts[0])
        return None
    return _regroup(result, lead, own)


def _check_writable(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor):
            check_writable(tensor)


def _regroup(result: Sequence[Tensor], lead: Sequence[Tensor], own: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Local results put together again."""
    left, found = iter(result), list[Tensor]()
    for tensor, before in zip(lead, own, strict=True):
        parts = tuple(islice(left, len(before)))
        if not isinstance(tensor, ShardedTensor):
            found.append(parts[0])
        elif tensor.local_parts:
            found.append(wrap(tensor.sharding, parts, tensor.comm))
        else:
            dtype, device = parts[0].dtype, tensor.device
            found.append(wrap(tensor.sharding, (), tensor.comm, dtype=dtype, device=device, anchor=parts[0]))
    return found


def _to_local_argument(op: Any, value: Any, lead: Sequence[Tensor], own: Sequence[Sequence[Tensor]]) -> Any:
    """An argument with local tensors: lists follow the first list, one tensor is wanted whole."""
    if isinstance(value, ShardedTensor):
        return _gather_whole(op, value)
    if not isinstance(value, list | tuple) or len(value) != len(lead):
        return value
    if value is lead:
        return [part for parts in own for part in parts]
    if not _is_list(value):
        return [v for v, parts in zip(value, own, strict=True) for _ in parts]
    return [t for one, first, p in zip(value, lead, own, strict=True) for t in _align_to_list(op, one, first, len(p))]


def _gather_whole(op: Any, tensor: ShardedTensor) -> Tensor:
    """The value of a tensor that all lists are combined with; every rank needs it."""
    if is_differentiated(tensor):
        raise UnsupportedOpError(f"{op}: no gradient passes to the one tensor beside lists; use a loop over the lists")
    spec = mesh_view(tensor.sharding)
    target = replicated_layout(tuple(tensor.shape), tensor.comm.ranks)
    if spec is not None:
        target = MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim).layout(tensor.sharding.shape)
    return move_to(tensor, target, str(op))[0][0]


def _align_to_list(op: Any, tensor: Tensor, first: Tensor, count: int) -> Sequence[Tensor]:
    """A tensor's local tensors in the layout of the first list's tensor."""
    if not isinstance(first, ShardedTensor):
        if isinstance(tensor, ShardedTensor):
            raise MixedTensorsError(f"{op}: a ShardedTensor is mixed with a plain tensor in the first list")
        return [tensor]
    if not isinstance(tensor, ShardedTensor) or tensor.shape != first.shape:
        if tensor.numel() == 1:
            return [_gather_whole(op, tensor) if isinstance(tensor, ShardedTensor) else tensor] * count
        raise MixedTensorsError(
            f"{op}: a {type(tensor).__name__} of shape {tuple(tensor.shape)} is mixed with a ShardedTensor of shape "
            f"{tuple(first.shape)}; shard both alike"
        )
    return tape_inputs(*move_to(tensor, first.sharding, str(op)), tensor.dtype, tensor.device)


def _check_pending(op: Any, lead: Sequence[Tensor], args: Sequence[Any]) -> None:
    """Raise if a tensor of the first list is a pending sum and the operator is not linear."""
    pending = [t for t in lead if isinstance(t, ShardedTensor) and t.sharding.pending is not None]
    name, lists = op._schema.name, sum(_is_list(a) for a in args)
    together = (
        name in LINEAR_TOGETHER
        and lists == 2
        and all(_have_same_layouts(*pair) for pair in zip(*args[:2], strict=True))
    )
    scaled = name in LINEAR_IN_FIRST and lists == 1 and _scales_addends(name, args[1:])
    linear = name in LINEAR or together or scaled
    if pending and not (linear and all(_is_sum(t) for t in pending)):
        raise UnsupportedOpError(
            f"{op} on a tensor with a pending {pending[0].sharding.pending}: redistribute it to Shard or "
            "Replicate first"
        )


def _scales_addends(name: str, factors: Sequence[Any]) -> bool:
    """Whether addends may be scaled one by one: by numbers that make neither zeros nor infinities of them."""
    given = [n for value in factors for n in (value if isinstance(value, list | tuple) else [value])]
    if any(isinstance(n, Tensor) for n in given):
        return "mul" in name
    return all(isinstance(n, int | float | complex) and cmath.isfinite(n) and n != 0 for n in given)


def _have_same_layouts(one: Any, other: Any) -> bool:
    return getattr(one, "sharding", None) == getattr(other, "sharding", None)


def _is_sum(tensor: ShardedTensor) -> bool:
    return tensor.sharding.pending is not None and tensor.sharding.pending.op == "sum"


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


REDUCING = {"_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm"}
for _name in list_operators_on_lists():
    if (_name.startswith("_foreach_") and _name not in REDUCING) or _name in FUSED:
        for _op in _overloads(_name):
            register_sharding(_op, Steps(partial(run_on_lists, _op), takes_copies=True))


def _max_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [aten.max.default(t) for t in tensors]


def _put_all_on_tape(results: Sequence[Tensor]) -> list[Tensor]:
    """Results of one operator of torch: if one of them requires grad, all do."""
    taped = next((t for t in results if t.requires_grad), None)
    if taped is None:
        return list(results)
    nothing = tape_tensors(taped)[0].flatten()[:0].sum()
    return [t if t.requires_grad else _add_locally(t, nothing) for t in results]


def _add_locally(tensor: Any, number: Tensor) -> Tensor:
    if not isinstance(tensor, ShardedTensor):
        return tensor + number.to(tensor.dtype)  # type: ignore[no-any-return]
    parts = tuple(part + number.to(part.dtype) for part in tensor.local_parts)
    anchor = None if parts else number.to(tensor.dtype)
    return wrap(tensor.sharding, parts, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=anchor)


register_sharding(aten._foreach_max.default, Steps(_max_of_each))


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by a plain scale; `found_inf`, plain as well, is set on every rank if it is on one."""
    local = [t for grad in grads for t in (grad.local_parts if isinstance(grad, ShardedTensor) else (grad,))]
    if local:
        aten._amp_foreach_non_finite_check_and_unscale_.default(local, found_inf, inverse)
    for one in dict.fromkeys(grad.comm for grad in grads if isinstance(grad, ShardedTensor)):
        one.all_reduce(found_inf, "max", label="found_inf").wait()


register_sharding(aten._amp_foreach_non_finite_check_and_unscale_.default, Steps(_unscale))

NAME = "norms of a list"


def _compute_norms(tensors: Sequence[Any], order: float = 2, dtype: Any = None) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = _norm_group_key(tensor, order)
        if key is None:
            found[index] = aten.linalg_vector_norm.default(tensor, order, dtype=dtype)
        else:
            groups.setdefault(key, []).append(index)
    for (mesh, axes, *_), members in groups.items():
        found |= zip(
            members, _compute_group_norms([tensors[i] for i in members], order, dtype, mesh, axes), strict=True
        )
    return _put_all_on_tape([found[i] for i in range(len(tensors))])


register_sharding(aten._foreach_norm.Scalar, Steps(_compute_norms))


def _norm_group_key(tensor: Any, order: float) -> Any:
    """What tensors must have in common to be taken together; None for one that is taken alone."""
    if not isinstance(tensor, ShardedTensor) or not order > 0:
        return None
    if math.isinf(order) and is_differentiated(tensor):  # ties share gradients over ranks
        return None
    spec = mesh_spec_of(tensor)
    if spec is None or tensor.sharding.pending is not None or spec.mesh.ranks.size < tensor.comm.world_size:
        return None  # ranks outside of the mesh take part without data, in operators of one tensor
    return spec.mesh, cutting_axes(tensor.sharding, range(tensor.ndim)), tensor.dtype, tensor.device, tensor.comm


def _compute_group_norms(
    tensors: Sequence[ShardedTensor], order: float, dtype: Any, mesh: Mesh, axes: tuple[int, ...]
) -> list[ShardedTensor]:
    comm = tensors[0].comm
    ranks = math.prod(mesh.shape[a] for a in axes)
    rows = MeshSpec(mesh, [Shard(0) if a in axes else Replicate() for a in range(mesh.ndim)])
    whole = MeshSpec(mesh, (Replicate(),) * mesh.ndim)
    norms = torch.stack([_local_norm(t.local_parts[0], order, dtype) for t in tensors])
    if axes:
        row = wrap(rows.layout((ranks, len(tensors))), (norms.unsqueeze(0),), comm)
        norms = torch.linalg.vector_norm(move_to(row, whole.layout((ranks, len(tensors))), NAME)[0][0], order, 0)
    return [wrap(whole.layout(()), (norm,), comm) for norm in norms.unbind()]


def _local_norm(local: Tensor, order: float, dtype: Any) -> Tensor:
    """The norm of a local tensor; of none of the elements it is 0, also where torch has no answer."""
    if local.numel() == 0 and order == math.inf:
        return local.sum(dtype=dtype).abs()
    norm: Tensor = torch.linalg.vector_norm(local, order, dtype=dtype)
    return norm
