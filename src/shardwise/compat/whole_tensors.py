"""torch 1.13's tensors of which every rank has the whole: addends that are still to be reduced, and equal values.

1. `_PartialTensor` is a sharded tensor on one axis with the placement `Partial`: what is computed with it follows the
   rules of that placement, and `reshard` is the move of the reduced values to chunks.
2. `ReplicatedTensor` is a plain tensor with a process group. Beside sharded tensors it is a replicated one; a function
   of nothing but ReplicatedTensors gives one; with all else it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import get_default_nowrap_functions

from shardwise._torch import DisableTorchFunctionSubclass, pytree
from shardwise.comm import agree
from shardwise.comm.current import GroupOrComm, get_current_process_group, resolve_comm
from shardwise.compat.custom_ops import function_name
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import Mesh, MeshSpec, Partial, ShardingSpec
from shardwise.ops.implicit_replication import replicate
from shardwise.tensor.dispatch import sharded_leaves
from shardwise.tensor.sharded_tensor import wrap

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}
_JOINS = (torch.cat, torch.concat, torch.concatenate)


class TorchPartialTensor(TorchShardedTensor):
    """torch's `_PartialTensor`: each rank has an addend of the whole, and their reduction is pending.

    >>> x = TorchPartialTensor(torch.ones(2, 3), reduce_op=dist.ReduceOp.MAX)
    >>> x.transpose(0, 1).reshard(ChunkShardingSpec(0, ["rank:0/cpu"])).size()
    torch.Size([3, 2])
    """

    @staticmethod
    def __new__(
        cls: type[TorchPartialTensor],
        local_shard: Tensor,
        process_group: GroupOrComm | None = None,
        reduce_op: Any = dist.ReduceOp.SUM,
    ) -> TorchPartialTensor:
        if reduce_op not in _NAMES:
            raise ValueError(f"reduce_op needs to be a member of distributed_c10d.ReduceOp, got {reduce_op!r}")
        comm = cls._resolve_comm(process_group)
        spec = MeshSpec(Mesh(("all",), comm.ranks), (Partial(_NAMES[reduce_op]),))
        made: Any = wrap(spec.layout(tuple(local_shard.shape)), (local_shard,), comm, cls=cls)
        tensor: TorchPartialTensor = made
        return tensor

    @property
    def _local_shard(self) -> Tensor:
        return self.local_tensor()

    @property
    def _reduce_op(self) -> Any:
        return next(op for op, name in _NAMES.items() if Partial(name) in (self.placements or ()))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # as the native one
        return f"PartialTensor({self.sharding!r})"

    def reshard(self, resharding_spec: ShardingSpec) -> Any:
        """The reduced values in chunks, as a new ShardedTensor: one reduce-scatter; gradients pass."""
        if not isinstance(resharding_spec, ChunkShardingSpec):
            raise NotImplementedError(
                f"Only ChunkShardingSpec supported for reshard. Got {type(resharding_spec).__name__}; redistribute() "
                "takes any"
            )
        if self.is_complex():
            raise NotImplementedError(
                f"Only real partial tensor supported for reshard. This one is of {self.dtype}; redistribute() takes any"
            )
        made = self.redistribute(resharding_spec, label="reshard")
        made._sharding_spec = resharding_spec
        return made

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """As of any sharded tensor; what is reduced is one of them."""
        return _name_class(super().redistribute(*args, **kwargs))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _JOINS:
            return _join(func, *args, **(kwargs or {}))
        return pytree.tree_map(_name_class, TorchShardedTensor.__torch_function__(func, types, args, kwargs))


def _name_class(value: Any) -> Any:
    """A tensor of torch's classes as one of that which its layout says."""
    if type(value) in (TorchShardedTensor, TorchPartialTensor):
        spec = value.sharding.spec
        pending = isinstance(spec, MeshSpec) and spec.mesh.ndim == 1 and isinstance(spec.placements[0], Partial)
        value.__class__ = TorchPartialTensor if pending else TorchShardedTensor
    return value


def _join(func: Callable[..., Any], tensors: Sequence[Any], *dim: int, **options: Any) -> TorchPartialTensor:
    """The addends put together, each rank its own; what torch refuses is refused in its words."""
    if not all(isinstance(tensor, TorchPartialTensor) for tensor in tensors):
        given = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise RuntimeError(f"All inputs need to be an instance of _PartialTensor, got {given}")
    names = sorted({str(tensor._reduce_op) for tensor in tensors})
    if len(names) > 1:
        raise RuntimeError(f"All _PartialTensor reduce_ops need to be the same, found: {' and '.join(names)}")
    if "out" in options:
        raise RuntimeError('"out" kwarg is not supported!')
    first = tensors[0]
    joined = func([tensor._local_shard for tensor in tensors], *dim, **options)
    return TorchPartialTensor(joined, first._process_group or first.comm, first._reduce_op)


class ReplicatedTensor(Tensor):
    """A tensor that has the same values on every rank of a process group.

    >>> one = ReplicatedTensor(torch.ones(2))
    >>> type(one * one).__name__, type(one + torch.ones(2)).__name__, type(one + 2).__name__
    ('ReplicatedTensor', 'Tensor', 'Tensor')
    """

    process_group: Any

    @staticmethod
    def __new__(
        cls: type[ReplicatedTensor], data: Tensor | None = None, process_group: GroupOrComm | None = None
    ) -> ReplicatedTensor:
        plain = torch.empty(0) if data is None else data
        made = plain.detach().as_subclass(cls)
        made.process_group = TorchShardedTensor._normalize_pg(process_group)
        made.requires_grad_(plain.requires_grad)
        return made

    def __init__(self, data: Tensor | None = None, process_group: GroupOrComm | None = None) -> None:
        """All is done in `__new__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            made = type(self)(_plain(self).detach().clone(), self.process_group)
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        found: Self = memo[id(self)]
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"ReplicatedTensor({_plain(self)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self), _plain(self).detach(), self.requires_grad)

    def validate(self) -> bool:
        """Compare the values of all ranks: True, or a ValueError on each of them."""
        comm, plain = resolve_comm(self.process_group), _plain(self).detach()
        agree(comm, {"shape": tuple(plain.shape), "dtype": plain.dtype}, label="ReplicatedTensor.validate")
        held = comm.all_gather(plain.contiguous(), label="ReplicatedTensor.validate")
        for rank, one in zip(comm.ranks, held, strict=True):
            other = next((r for r, t in zip(comm.ranks, held, strict=True) if not torch.allclose(one, t)), None)
            if other is not None:
                raise ValueError(f"ReplicatedTensor have different values on rank {rank} and {other}")
        return True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        sharded = next(sharded_leaves(args, kwargs), None)
        if sharded is not None:
            put: Callable[[Any], Any] = lambda tensor: replicate(_plain(tensor), sharded)  # noqa: E731  # of one call
            args, kwargs = pytree.tree_map_only(ReplicatedTensor, put, (args, kwargs))
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        groups = [leaf.process_group for leaf in given if isinstance(leaf, ReplicatedTensor)]
        if any(group is not groups[0] for group in groups):
            raise RuntimeError(
                f"ReplicatedTensor operands must be in the same process group in torch function '{function_name(func)}'"
                ", but found at least two ReplicatedTensor operands in different process groups! "
                "Make both with the same process_group="
            )
        with DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
            wraps = len(groups) == len(given) and func not in get_default_nowrap_functions()
            if wraps and isinstance(made, Tensor) and not isinstance(made, ReplicatedTensor):
                made = made.as_subclass(ReplicatedTensor)
                made.process_group = groups[0]
        return made


def _plain(tensor: ReplicatedTensor) -> Tensor:
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _rebuild(cls: type[ReplicatedTensor], data: Tensor, requires_grad: bool) -> ReplicatedTensor:
    made = cls(data, get_current_process_group())
    made.requires_grad_(requires_grad)
    return made


TorchPartialTensor.__name__ = "_PartialTensor"  # programs print and compare the names of classes
torch.serialization.add_safe_globals([ReplicatedTensor, _rebuild])
