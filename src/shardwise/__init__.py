"""Shardwise: describe, compute on and move sharded tensors.

Importing this package is light: names that need torch are loaded on first use.
"""

from shardwise._version import __version__
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    NotationError,
    Partial,
    Piece,
    Placement,
    Reduction,
    Replicate,
    Shard,
    ShardingSpec,
    infer_spec,
    layout_from_json,
    layout_to_json,
)
from shardwise.transfer import Link, Topology, Transfer, plan_transfer, transfer_from_json

__all__ = [
    "Box",
    "ChunkSpec",
    "EnumerableSpec",
    "GridSpec",
    "Layout",
    "LayoutError",
    "Link",
    "Mesh",
    "MeshSpec",
    "NotationError",
    "Partial",
    "Piece",
    "Placement",
    "Reduction",
    "Replicate",
    "Shard",
    "ShardingSpec",
    "Topology",
    "Transfer",
    "__version__",
    "infer_spec",
    "layout_from_json",
    "layout_to_json",
    "plan_transfer",
    "transfer_from_json",
]
