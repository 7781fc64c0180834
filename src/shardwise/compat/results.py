"""Results of native functions, as tensors of torch's class and of its specs, whose attributes programs read."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import Layout, MeshSpec, Shard
from shardwise.tensor.sharded_tensor import ShardedTensor

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
