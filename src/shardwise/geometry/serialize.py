"""Layouts to and from plain JSON."""

from __future__ import annotations

from typing import Any

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.placements import Partial, Placement, Replicate, RowOwners, Shard
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A layout as plain data; a spec of a user's own class is written as its pieces.

    >>> layout_to_json(ChunkSpec(0, 2).layout((4,)))
    {'shape': [4], 'spec': {'kind': 'chunk', 'dim': 0, 'ranks': [0, 1]}}
    """
    spec = layout.spec.to_json()
    if spec is None:
        spec = EnumerableSpec(layout.pieces).to_json()
    return {"shape": list(layout.shape), "spec": spec}


def layout_from_json(data: dict[str, Any]) -> Layout:
    """The layout that `layout_to_json` wrote, checked again.

    >>> layout_from_json({"shape": [4], "spec": {"kind": "chunk", "dim": 0, "ranks": [0, 1]}}).local_shapes(1)
    ((2,),)
    """
    try:
        return spec_from_json(data["spec"]).layout(data["shape"])
    except (KeyError, TypeError, IndexError) as error:
        raise LayoutError(f"this is not a layout in JSON: {type(error).__name__}: {error}") from error


def spec_from_json(data: dict[str, Any]) -> ShardingSpec:
    """The spec that a spec's `to_json` wrote."""
    kind = data["kind"]
    if kind == "chunk":
        return ChunkSpec(data["dim"], data["ranks"], data.get("devices"))
    if kind == "grid":
        return GridSpec(data["splits"], data["ranks"])
    if kind == "mesh":
        placements = [placement_from_json(p) for p in data["placements"]]
        return MeshSpec(Mesh.from_json(data["mesh"]), placements, data.get("order"))
    if kind == "enumerable":
        devices = data.get("devices") or [None] * len(data["pieces"])
        pieces = [Piece(Box(tuple(o), tuple(s)), r, d) for (r, o, s), d in zip(data["pieces"], devices, strict=True)]
        return EnumerableSpec(pieces, data.get("replicated", False))
    raise LayoutError(f"unknown kind of spec {kind!r}; known: chunk, grid, mesh, enumerable")


def placement_from_json(data: dict[str, Any]) -> Placement:
    """The placement that `placement_to_json` wrote."""
    kind = data["kind"]
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial(data["op"])
    if kind == "shard":
        owners = None if data.get("owners") is None else RowOwners(data["owners"])
        return Shard(data["dim"], data.get("sizes"), data.get("groups"), data.get("block"), owners)
    raise LayoutError(f"unknown kind of placement {kind!r}; known: replicate, partial, shard")
