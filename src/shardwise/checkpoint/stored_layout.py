"""The layout a tensor was saved with, from the index, with a bound on how much a few numbers may blow up to."""

from __future__ import annotations

from typing import Any

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import TensorEntry
from shardwise.geometry import Box, EnumerableSpec, Layout, LayoutError, Piece
from shardwise.geometry.serialize import layout_from_json

_MAX_CUTS = 1 << 22


def stored_layout(entry: TensorEntry) -> Layout:
    """The layout of a stored tensor; without a spec it lies whole on rank 0."""
    spec = entry.cut.spec
    if spec is None:
        return EnumerableSpec([Piece(Box.whole(entry.shape), 0)]).layout(entry.shape)
    try:
        _check_size(spec, entry.shape)
        return layout_from_json({"shape": list(entry.shape), "spec": spec})
    except (LayoutError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"tensor {entry.name!r}: its layout in the index is damaged: {error}") from error


def _check_size(spec: Any, shape: tuple[int, ...]) -> None:
    """Block-cyclic shards have as many cuts as the dim has blocks, whatever the length of the index."""
    for placement in spec.get("placements") or ():
        block = placement.get("block")
        if block is not None and shape[placement["dim"]] // max(1, block) > _MAX_CUTS:
            raise CheckpointError(f"blocks of {block} make more than {_MAX_CUTS} cuts")
    for split in spec.get("splits") or ():
        if isinstance(split, int) and split > _MAX_CUTS:
            raise CheckpointError(f"more than {_MAX_CUTS} cuts of one dim")
