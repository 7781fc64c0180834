"""torch's functions that make a ShardedTensor: of one value, of random values, of local shards, of a whole tensor.

Random values are drawn for each local shard from this rank's default generator, as torch does; those of the native
functions do not depend on the layout.

Operators that programs define by what they do to this rank's shards, or to its only local tensor.

The result has the layout of the first argument, unless the program's own function returns another one. What comes
before the operator: a check that may raise, and a test that may end the call with the argument as its result.

torch's functions on modules, and its optimizer: the native ones with torch's meaning.

1. Parameters are tensors of torch's class, and take gradients even if they were frozen before they were sharded.
2. The parameter groups of an optimizer have the local tensors: programs clip, scale and read their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise import nn as native
from shardwise.comm import DisagreementError, agree, gather_values
from shardwise.comm.current import GroupOrComm
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
from shardwise.geometry import ShardingSpec
from shardwise.nn.optimizer import register_state_dict_functions
from shardwise.nn.plan import ShardingPlan
from shardwise.tensor.creation import takes_options_of
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
