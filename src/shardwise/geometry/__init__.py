"""L0: what is where. Boxes, meshes, placements, specs and layouts; never imports torch."""

from shardwise.geometry.box import Box, LayoutError, NotationError, Piece
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.notation import (
    DTYPES,
    DType,
    TensorType,
    find_dtype,
    format_layout,
    format_placement,
    format_rule,
    parse_layout,
    parse_placements,
    parse_ranks,
    parse_spec,
    shorten_layout,
)
from shardwise.geometry.placements import Partial, Placement, Reduction, Replicate, RowOwners, Shard
from shardwise.geometry.serialize import infer_spec, layout_from_json, layout_to_json
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec

__all__ = [
    "DTYPES",
    "Box",
    "ChunkSpec",
    "DType",
    "EnumerableSpec",
    "GridSpec",
    "Layout",
    "LayoutError",
    "Mesh",
    "MeshSpec",
    "NotationError",
    "Partial",
    "Piece",
    "Placement",
    "Reduction",
    "Replicate",
    "RowOwners",
    "Shard",
    "ShardingSpec",
    "TensorType",
    "find_dtype",
    "format_layout",
    "format_placement",
    "format_rule",
    "infer_spec",
    "layout_from_json",
    "layout_to_json",
    "parse_layout",
    "parse_placements",
    "parse_ranks",
    "parse_spec",
    "shorten_layout",
]
