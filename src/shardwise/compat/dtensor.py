"""torch's DTensor: to it and back without a copy, its functions where there is no rule here, its `register_sharding`.

Gradients pass through: a ShardedTensor made from a DTensor hands its gradients on to it, and vice versa, since
in both a sharded tensor gets a sharded gradient and all else a replicated one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardwise._text import public
from shardwise._torch import pytree
from shardwise.comm.current import find_device_mesh
from shardwise.geometry import LayoutError, MeshSpec
from shardwise.geometry.mesh import to_mesh
from shardwise.ops.dispatch_cache import call_fast_path
from shardwise.ops.dtensor_rules import TorchRule, torch_placements
from shardwise.ops.engine import call_operator
from shardwise.ops.explain import LogEntry, check_may_communicate, layout_brief, record_entry
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Rule
from shardwise.ops.views import mesh_view
from shardwise.tensor.dispatch import UnsupportedOpError, bind_dispatch, enter_function, sharded_leaves
from shardwise.tensor.functions import TENSOR_MODULE, from_dtensor
from shardwise.tensor.move import describe_tensor
from shardwise.tensor.recorder import user_line
from shardwise.tensor.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_falls_back: ContextVar[bool] = ContextVar("shardwise_dtensor_fallback", default=False)
_blocks = [0]


@public
def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """A ShardedTensor as a DTensor over the same memory.

    Without `device_mesh` the one that the tensor came from is used, else one is made; making one creates process
    groups, so every rank of the world must call this. Layouts that DTensor cannot express (explicit sizes,
    groups, blocks, pieces without a mesh) are refused with the reason.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> import torch, shardwise
    >>> x = shardwise.shard(torch.ones(4), shardwise.Mesh.of(tp=1), [shardwise.Shard(0)])
    >>> to_dtensor(x).placements
    (Shard(dim=0),)
    >>> dist.destroy_process_group()
    """
    view = mesh_view(tensor.sharding)
    shape = tuple(tensor.shape)
    if view is None or len(tensor.local_parts) > 1:
        raise LayoutError(
            f"{describe_tensor(tensor.dtype, tensor.sharding)} has no counterpart in DTensor, which needs a mesh "
            "and one local "
            "tensor on each rank; redistribute to a mesh layout"
        )
    words = importlib.import_module(TENSOR_MODULE)
    placements = torch_placements(view, shape)
    if device_mesh is None:
        mesh = find_device_mesh(view.mesh, tensor.device.type, tensor.comm)
    else:
        mesh = _check_device_mesh(device_mesh, view)
    local = tensor.local_parts[0] if tensor.local_parts else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    made: DTensor = words.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return made


def _check_device_mesh(device_mesh: DeviceMesh, view: MeshSpec) -> DeviceMesh:
    given = to_mesh(device_mesh)
    if given.shape != view.mesh.shape or given.ranks.tolist() != view.mesh.ranks.tolist():
        raise LayoutError(f"the tensor is on the mesh {view.mesh}, the device mesh passed is {given}; redistribute it")
    return device_mesh


@contextmanager
def dtensor_fallback() -> Iterator[None]:
    """Run functions that have no rule here on DTensor, where it has one, inside a `with` block.

    Each such call shows in `explain()` as run on DTensor. What DTensor moves is not counted there, and is refused
    inside `no_communication()`.

    >>> import torch, shardwise
    >>> with dtensor_fallback():
    ...     (shardwise.shard(torch.ones(4), shardwise.ChunkSpec(0, ranks=1)) * 2).full().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    token = _falls_back.set(True)
    _blocks[0] += 1
    bind_dispatch(ShardedTensor, function=_enter_with_fallback, operator=call_operator)
    try:
        yield
    finally:
        _blocks[0] -= 1
        if _blocks[0] == 0:
            bind_dispatch(ShardedTensor, function=call_fast_path, operator=call_operator)
        _falls_back.reset(token)


def _enter_with_fallback(
    cls: type,
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    return enter_function(_call_or_fall_back, func, types, args, kwargs or {})


def _call_or_fall_back(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return call_fast_path(None, func, types, args, kwargs)
    except UnsupportedOpError as error:
        if not _falls_back.get() or not dist.is_initialized():
            raise
        return _run_on_dtensor(func, args, kwargs, error)


def _run_on_dtensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: Exception) -> Any:
    """The function on DTensors, its results as ShardedTensors; the reason is raised if DTensor cannot do it either."""
    name = getattr(func, "__name__", str(func))
    sharded = list(sharded_leaves(args, kwargs))
    for tensor in sharded:
        check_may_communicate(f"{name} on DTensor", tensor.sharding, tensor.sharding)
    given = {id(t): to_dtensor(t) for t in sharded}
    inner_args, inner_kwargs = pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), (args, kwargs))
    try:
        result = func(*inner_args, **inner_kwargs)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        raise UnsupportedOpError(f"{reason}; on DTensor: {str(error).partition(chr(10))[0]}") from error
    back = {id(made): tensor for tensor, made in zip(sharded, given.values(), strict=False)}
    kind = importlib.import_module(TENSOR_MODULE).DTensor
    comm = sharded[0].comm
    outputs = pytree.tree_map(
        lambda leaf: back.get(id(leaf)) or from_dtensor(leaf, comm) if isinstance(leaf, kind) else leaf, result
    )
    _record_dtensor_call(name, sharded, list(sharded_leaves((outputs,), {})))
    return outputs


def _record_dtensor_call(name: str, inputs: Sequence[ShardedTensor], outputs: Sequence[ShardedTensor]) -> None:
    shown = tuple(layout_brief(t.sharding) for t in inputs), tuple(layout_brief(t.sharding) for t in outputs)
    record_entry(LogEntry(f"{name} (run on DTensor)", *shown, 0, user_line()))


T = TypeVar("T", bound=Rule)


def register_torch_sharding(op: Any) -> Callable[[T], T]:
    """Do what torch's own `register_sharding` does, for DTensor and for ShardedTensor.

    A built-in rule is replaced, and rules are shown what torch documents: a `DTensorSpec` for each tensor.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> from shardwise import remove_sharding
    >>> @torch.library.custom_op("example::fourfold", mutates_args=())
    ... def fourfold(x: torch.Tensor) -> torch.Tensor:
    ...     return 4 * x
    >>> @register_torch_sharding(torch.ops.example.fourfold.default)
    ... def rule(x):
    ...     return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
    >>> remove_sharding(torch.ops.example.fourfold.default)
    """

    def decorator(rule: T) -> T:
        register_sharding(op, TorchRule(rule), override=True, dtensor=True)
        return rule

    return decorator
