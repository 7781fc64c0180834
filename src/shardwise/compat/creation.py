"""torch's functions that make a ShardedTensor: of one value, of random values, of local shards, of a whole tensor.

Random values are drawn for each local shard from this rank's default generator, as torch does; those of the native
functions do not depend on the layout.

Operators that programs define by what they do to this rank's shards, or to its only local tensor.

The result has the layout of the first argument, unless the program's own function returns another one. What comes
before the operator: a check that may raise, and a test that may end the call with the argument as its result.

torch's functions on modules, and its optimizer: the native ones with torch's meaning.

1. Parameters are tensors of torch's class, and take gradients even if they were frozen before they were sharded.
2. The parameter groups of an optimizer have the local tensors: programs clip, scale and read their gradients.

torch 1.13's tensors of which every rank has the whole: addends that are still to be reduced, and equal values.

1. `_PartialTensor` is a sharded tensor on one axis with the placement `Partial`: what is computed with it follows the
   rules of that placement, and `reshard` is the move of the reduced values to chunks.
2. `ReplicatedTensor` is a plain tensor with a process group. Beside sharded tensors it is a replicated one; a function
   of nothing but ReplicatedTensors gives one; with all else it is a plain tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions

from shardwise import nn as native
from shardwise._torch import DisableTorchFunctionSubclass, pytree
from shardwise.comm import DisagreementError, agree, gather_values
from shardwise.comm.current import GroupOrComm, get_current_process_group, resolve_comm
from shardwise.compat.custom_ops import (
    Op,
    check_op_arguments,
    custom_sharding_spec_op,
    function_name,
    set_tensor_type,
    sharded_op_impl,
)
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.compat.specs import ChunkShardingSpec, PlacementShardingSpec, scatter
from shardwise.geometry import Mesh, MeshSpec, Partial, ShardingSpec
from shardwise.nn.optimizer import register_state_dict_functions
from shardwise.nn.plan import ShardingPlan
from shardwise.ops.implicit_replication import replicate
from shardwise.tensor.creation import takes_options_of
from shardwise.tensor.dispatch import sharded_leaves
from shardwise.tensor.sharded_tensor import wrap
from shardwise.tensor.shards import Shard


@takes_options_of(TorchShardedTensor.__new__)
def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor whose values are not set; options as of `ShardedTensor`.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> empty(ChunkShardingSpec(0, ["rank:0/cpu"]), 3, 2).local_tensor().shape
    torch.Size([3, 2])
    """
    return TorchShardedTensor(sharding_spec, *size, **options)


@takes_options_of(TorchShardedTensor.__new__)
def full(sharding_spec: ShardingSpec, size: Any, fill_value: complex, **options: Any) -> TorchShardedTensor:
    """A tensor filled with one value; the dtype is the default one unless it is passed.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> full(ChunkShardingSpec(0, ["rank:0/cpu"]), (2,), 7).local_tensor()
    tensor([7., 7.])
    """
    tensor = empty(sharding_spec, *(size if isinstance(size, Sequence) else (size,)), **options)
    nn.init.constant_(tensor, fill_value)  # type: ignore[arg-type]  # complex is taken as well
    return tensor


@takes_options_of(TorchShardedTensor.__new__)
def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of zeros; options as of `ShardedTensor`."""
    return full(sharding_spec, size, 0, **options)


@takes_options_of(TorchShardedTensor.__new__)
def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of ones; options as of `ShardedTensor`."""
    return full(sharding_spec, size, 1, **options)


@takes_options_of(TorchShardedTensor.__new__)
def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of uniform random numbers in [0, 1), drawn for each local shard from this rank's generator."""
    tensor = empty(sharding_spec, *size, **options)
    nn.init.uniform_(tensor)
    return tensor


@takes_options_of(TorchShardedTensor.__new__)
def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of normal random numbers, drawn for each local shard from this rank's generator."""
    tensor = empty(sharding_spec, *size, **options)
    nn.init.normal_(tensor)
    return tensor


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: GroupOrComm | None = None, init_rrefs: bool = False
) -> TorchShardedTensor:
    """The tensor that all ranks' local shards make together; the ranks exchange theirs in one small message."""
    return TorchShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: GroupOrComm | None = None
) -> Any:
    """Return the tensor of `src_rank`, counted in the group, laid out by a spec, which a user's `shard` may implement.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> shard_tensor(torch.arange(4), ChunkShardingSpec(0, ["rank:0/cpu"])).full()
    tensor([0, 1, 2, 3])
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"input tensor is not a contiguous Tensor: shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
            "call contiguous() on it first"
        )
    check_same_request(src_rank, sharding_spec, process_group)
    if isinstance(sharding_spec, PlacementShardingSpec) and sharding_spec.shards_itself:
        return sharding_spec.shard(tensor, src_rank=src_rank, process_group=process_group)
    return scatter(tensor, sharding_spec, src_rank, process_group, TorchShardedTensor)


def check_same_request(src_rank: int, spec: ShardingSpec, process_group: GroupOrComm | None) -> None:
    """Raise on every rank, in torch's words, if ranks name different sources or specs."""
    comm = TorchShardedTensor._resolve_comm(process_group)
    own = {"src_rank": str(src_rank), "sharding_spec": str(spec)}
    try:
        agree(comm, own, label="_shard_tensor")
    except DisagreementError as error:
        given = gather_values(comm, own, label="_shard_tensor")
        name, rank = next((n, r) for n in own for r, other in given.items() if other[n] != own[n])
        theirs = given[rank][name]
        raise ValueError(
            f"{name}={own[name]} on rank: {comm.rank} does not match with {name}={theirs} on rank: {rank}; {error}"
        ) from error


Check: TypeAlias = Callable[..., Any]


def check_before(op: Op, early_stop_func: Check | None, extra_check: Check | None) -> Callable[[Op], Op]:
    """Decorate an implementation of an operator: its arguments are checked, then it may end early.

    >>> check_before(abs, None, None)(lambda types, args, kwargs, pg: args)(())
    Traceback (most recent call last):
    ...
    ValueError: No input for 'abs'! Pass at least one ShardedTensor
    """

    def decorate(implementation: Op) -> Op:
        @functools.wraps(implementation)
        def checked(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
            check_op_arguments(op, args, kwargs)
            kwargs = kwargs or {}
            if extra_check is not None:
                extra_check(*args, **kwargs)
            if early_stop_func is not None and early_stop_func(*args, **kwargs):
                return args[0]
            return implementation(types, args, kwargs, pg)

        return checked

    return decorate


def register_on_local_shards(
    op: Op,
    early_stop_func: Check | None = None,
    extra_check: Check | None = None,
    customized_func: Check | None = None,
) -> None:
    """Compute an operator on each local shard; `customized_func(args, kwargs, pg)` returns shards and metadata."""

    @sharded_op_impl(op)
    @check_before(op, early_stop_func, extra_check)
    def on_local_shards(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        tensor, rest = args[0], args[1:]
        if customized_func is not None:
            shards, metadata = customized_func(args, kwargs, pg)
        else:
            shards = [Shard(op(s.tensor, *rest, **kwargs), s.metadata) for s in tensor.local_shards()]
            metadata = tensor.metadata()
        return TorchShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=pg, init_rrefs=tensor._init_rrefs, sharding_spec=tensor.sharding_spec()
        )


def register_on_local_tensor(
    op: Op,
    early_stop_func: Check | None = None,
    extra_check: Check | None = None,
    customized_func: Check | None = None,
) -> None:
    """Compute an operator on the only local tensor of a tensor in chunks.

    `customized_func(args, kwargs, pg)` returns the local tensor, the spec and the size of the result.
    """

    @custom_sharding_spec_op(ChunkShardingSpec, op)
    @check_before(op, early_stop_func, extra_check)
    def on_local_tensor(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        tensor, rest = args[0], args[1:]
        if len(tensor.local_shards()) != 1:
            raise TypeError(
                f"torch function '{function_name(op)}' is only supported for single local tensor! This rank has "
                f"{len(tensor.local_shards())} shards of {tensor.sharding_spec()}"
            )
        spec, size = tensor.sharding_spec(), tensor.size()
        if customized_func is not None:
            local, spec, size = customized_func(args, kwargs, pg)
        else:
            local = op(tensor.local_tensor(), *rest, **kwargs)
        return TorchShardedTensor._init_from_local_tensor(
            local.contiguous(), spec, size, process_group=pg, init_rrefs=tensor._init_rrefs
        )


def check_chunk_spec(spec: object, op: Op) -> None:
    """Raise unless a spec is a ChunkShardingSpec."""
    if not isinstance(spec, ChunkShardingSpec):
        raise NotImplementedError(
            f"Only ChunkShardingSpec supported for '{function_name(op)}', got {type(spec).__name__}"
        )


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
) -> None:
    """Replace a parameter of a module by a ShardedTensor that holds the values of `src_rank`.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> layer = nn.Linear(4, 2)
    >>> shard_parameter(layer, "weight", ChunkShardingSpec(0, ["rank:0/cpu"]))
    >>> type(layer.weight).__name__
    'ShardedTensor'
    """
    tensor = getattr(module, param_name, None)
    if isinstance(tensor, Tensor) and tensor.is_contiguous():  # what else may be wrong is found on every rank
        check_same_request(src_rank, sharding_spec, process_group)
    comm = TorchShardedTensor._resolve_comm(process_group)
    native.shard_parameter(module, param_name, sharding_spec, src_rank, comm)
    _unfreeze(set_tensor_type(getattr(module, param_name), TorchShardedTensor))
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]  # untyped in torch


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Let torch's functions of state dicts, which may be loaded by now, gather the parameters as torch's own."""
    register_state_dict_functions()


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
    **options: Any,
) -> None:
    """Shard a model in place as a plan says; called on every rank. Options as of `shardwise.shard_module`."""
    # A ModelPlan, which is taken as well, has none; its mesh says which group is meant.
    named: dict[str, Any] | None = getattr(plan, "plan", None)
    group = process_group if named is None else TorchShardedTensor._resolve_comm(process_group)
    native.shard_module(module, plan, src_rank, group, **options)
    for tensor in (*module.parameters(), *module.buffers()):
        set_tensor_type(tensor, TorchShardedTensor)
    for name, spec in (named or {}).items():
        if isinstance(spec, ShardingSpec):
            _unfreeze(module.get_parameter(name))


def _unfreeze(parameter: Tensor) -> None:
    """As torch, whose sharded parameters are made by `nn.Parameter(tensor)`."""
    if parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_()


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Make a module reshard its sharded output in place; other outputs pass.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> reshard_output(nn.ReLU(), ChunkShardingSpec(0, ["rank:0/cpu"]))
    ReLU()
    """

    def hook(_module: nn.Module, _input: Any, output: Any) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, TorchShardedTensor) else output

    module.register_forward_hook(hook)
    return module


class TorchShardedOptimizer(native.ShardedOptimizer):
    """torch's `ShardedOptimizer`: its parameter groups are those of the optimizer on the local tensors.

    >>> import torch
    >>> optimizer = TorchShardedOptimizer({"weight": nn.Parameter(torch.ones(2))}, torch.optim.SGD, lr=0.5)
    >>> optimizer.param_groups is optimizer._optim.param_groups
    True
    """

    def _share(self) -> None:
        super()._share()
        self.param_groups = self._optim.param_groups


TorchShardedOptimizer.__name__ = "ShardedOptimizer"  # programs print and compare the names of classes


_REDUCTIONS = {
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
        if reduce_op not in _REDUCTIONS:
            raise ValueError(f"reduce_op needs to be a member of distributed_c10d.ReduceOp, got {reduce_op!r}")
        comm = cls._resolve_comm(process_group)
        spec = MeshSpec(Mesh(("all",), comm.ranks), (Partial(_REDUCTIONS[reduce_op]),))
        made: Any = wrap(spec.layout(tuple(local_shard.shape)), (local_shard,), comm, cls=cls)
        tensor: TorchPartialTensor = made
        return tensor

    @property
    def _local_shard(self) -> Tensor:
        return self.local_tensor()

    @property
    def _reduce_op(self) -> Any:
        return next(op for op, name in _REDUCTIONS.items() if Partial(name) in (self.placements or ()))

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
        plain = torch.empty(0, device=torch.get_default_device()) if data is None else data
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
