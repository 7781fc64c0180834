"""Which torch functions mean something else on torch's ShardedTensor than on the native one?

1. Random values: each local shard is filled from this rank's generator, as the same call on a local tensor would.
2. `torch.equal` and `torch.allclose`: two tensors of one process group, compared shard by shard, metadata included.
3. Lookups: plain ids are this rank's own, and the result is for them.

A user's own implementation (`custom_sharded_op_impl`) comes before these. In every function, all tensors belong to one
process group.

Results of native functions, as tensors of torch's class and of its specs, whose attributes programs read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm import any_rank
from shardwise.compat.custom_ops import check_op_arguments
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import Layout, MeshSpec, Shard
from shardwise.nn.lookup import plain_as_local_batch
from shardwise.tensor.dispatch import override_for, sharded_leaves
from shardwise.tensor.sharded_tensor import ShardedTensor

Meaning: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def call_torch_meaning(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what torch's meaning of a function gives; NotImplemented where the native one is the same."""
    tensors = list(sharded_leaves(args, kwargs))
    if len(tensors) > 1:
        check_op_arguments(func, tensors)
    own = _MEANINGS.get(func)
    if own is None or override_for(func, tensors[0].sharding.spec) is not None:
        return NotImplemented
    return own(func, args, kwargs)


def _fill_each_shard(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch.nn.init on every local shard."""
    tensor = args[0] if args else kwargs.pop("tensor")
    for name, value in kwargs.items():
        if value is None and name != "generator":
            raise ValueError(f"param: {name} shouldn't be None!")
    for shard in tensor.local_shards():
        func(shard.tensor, *args[1:], **kwargs)
    return tensor


def _draw_each_shard(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch.rand_like or torch.randn_like on every local shard."""
    tensor = args[0] if args else kwargs.pop("input")
    made: Any = torch.empty_like(tensor, **kwargs)
    with torch.no_grad():
        for new, local in zip(made.local_parts, tensor.local_parts, strict=True):
            new.copy_(func(local, dtype=new.dtype, device=new.device))
    return made


def _compare_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare metadata and local shards; all ranks get the same answer."""
    one, other = (*args, *(kwargs.pop(name) for name in ("input", "other") if name in kwargs))[:2]
    if not (isinstance(one, ShardedTensor) and isinstance(other, ShardedTensor)):
        raise TypeError(f"Both arguments to torch.{func.__name__} need to be of type ShardedTensor")
    if not one.comm.ranks:  # of a group of which this rank is not a member
        return not other.comm.ranks
    same = one.metadata() == other.metadata() and len(one.local_parts) == len(other.local_parts)
    options = (*args[2:],)
    same = same and all(
        func(mine, theirs, *options, **kwargs) for mine, theirs in zip(one.local_parts, other.local_parts, strict=True)
    )
    return not any_rank(one.comm, not same, label=func.__name__)


def _look_up_own_ids(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with plain_as_local_batch():
        return ShardedTensor.__torch_function__(func, (), args, kwargs)


def _make_contiguous(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor that is contiguous is its own result."""
    plain = len(args) == 1 and not kwargs and all(part.is_contiguous() for part in args[0].local_parts)
    return args[0] if plain else NotImplemented


def _convert_like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dtype of another tensor; the spec, which may be of a user's class, is kept."""
    known = len(args) == 2 and not kwargs and isinstance(args[0], ShardedTensor) and isinstance(args[1], Tensor)
    return args[0].to(args[1].dtype) if known else NotImplemented


_MEANINGS: dict[Callable[..., Any], Meaning] = {
    nn.init.uniform_: _fill_each_shard,
    nn.init.normal_: _fill_each_shard,
    nn.init.kaiming_uniform_: _fill_each_shard,
    nn.init.constant_: _fill_each_shard,
    torch.rand_like: _draw_each_shard,
    torch.randn_like: _draw_each_shard,
    torch.equal: _compare_shards,
    torch.allclose: _compare_shards,
    Tensor.equal: _compare_shards,
    Tensor.allclose: _compare_shards,
    Tensor.contiguous: _make_contiguous,
    Tensor.type_as: _convert_like,
    F.embedding: _look_up_own_ids,
    F.embedding_bag: _look_up_own_ids,
}


# By the identity of layouts, which equal ones of other specs do not share; each is kept alive beside its answer.
_chunk_layouts: dict[tuple[int, torch.device], tuple[Layout, Layout]] = {}
_MAX_CHUNK_LAYOUTS = 8192


def set_tensor_type(value: Any, cls: type[ShardedTensor]) -> Any:
    """Make a native ShardedTensor one of a class with torch's meaning, in place; anything else passes."""
    if type(value) is ShardedTensor:
        value.__class__ = cls
        value.sharding = _layout_of_chunks(value.sharding, value.device)
    return value


def _layout_of_chunks(layout: Layout, device: torch.device) -> Layout:
    """The same layout by a ChunkShardingSpec, whose `dim` and `placements` programs read; unchanged if it has none."""
    known = _chunk_layouts.get((id(layout), device))
    if known is None:
        if len(_chunk_layouts) >= _MAX_CHUNK_LAYOUTS:
            _chunk_layouts.clear()
        known = _chunk_layouts[id(layout), device] = (layout, _find_chunks(layout, device))
    return known[1]


def _find_chunks(layout: Layout, device: torch.device) -> Layout:
    spec = layout.spec
    if not isinstance(spec, MeshSpec) or spec.mesh.ndim != 1 or not isinstance(spec.placements[0], Shard):
        return layout
    placements = [f"rank:{rank}/{device}" for rank in spec.mesh.ranks.tolist()]
    same = ChunkShardingSpec(spec.placements[0].dim, list(placements)).layout(layout.shape)
    return same if same == layout else layout
