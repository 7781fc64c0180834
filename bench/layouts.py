"""Section "layouts": how long does it take to check that pieces cover a tensor exactly once?

torch asks two functions: `validate_non_overlapping_shards_metadata` for overlaps, `check_tensor` for bounds and volume.
Ours is the making of a layout, which does all of it and keeps a table of the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import check_tensor, validate_non_overlapping_shards_metadata

from bench.report import Cell, Figures
from bench.timing import Contender, medians
from shardwise.geometry import Box, EnumerableSpec, Layout, Piece

Array = npt.NDArray[np.int64]
RANKS = 64


@dataclass(frozen=True)
class LayoutBenchSizes:
    """Pieces in the grid, ribbons, runs of each."""

    grid: int = 100_000
    ribbons: int = 10_000
    repeats: int = 3


TINY = LayoutBenchSizes(grid=100, ribbons=50, repeats=1)


@dataclass(frozen=True)
class Pieces:
    """The boxes of a tensor in three forms: columns, our pieces, torch's metadata."""

    name: str
    shape: tuple[int, ...]
    offsets: Array
    sizes: Array

    @property
    def ranks(self) -> Array:
        """Ranks in turn."""
        return np.arange(len(self.offsets)) % RANKS

    def contenders(self) -> list[Contender]:
        """The ways to check these pieces; making the objects is not timed, making the layout is."""
        pairs = list(zip(self.offsets.tolist(), self.sizes.tolist(), strict=True))
        ranks = self.ranks
        pieces = [Piece(Box(tuple(o), tuple(s)), int(r)) for (o, s), r in zip(pairs, ranks, strict=True)]
        shards = [ShardMetadata(o, s, f"rank:{r}/cpu") for (o, s), r in zip(pairs, ranks, strict=True)]
        return [
            Contender("from columns", lambda _: self._layout()),
            Contender("from Piece objects", lambda _: EnumerableSpec(pieces).layout(self.shape)),
            Contender("torch", lambda _: _torch_check(shards, self.shape)),
        ]

    def _layout(self) -> Layout:
        return EnumerableSpec.from_arrays(self.offsets, self.sizes, self.ranks).layout(self.shape)


def _torch_check(shards: list[ShardMetadata], shape: tuple[int, ...]) -> None:
    check: Any = validate_non_overlapping_shards_metadata
    check(shards)
    check_tensor(shards, shape)


def grid(count: int) -> Pieces:
    """A square grid of about `count` cells of 8 x 8, row by row."""
    side = max(1, int(count**0.5))
    rows = -(-count // side)
    corners = np.stack(np.meshgrid(np.arange(rows), np.arange(side), indexing="ij"), axis=-1).reshape(-1, 2) * 8
    return Pieces(f"grid of {len(corners):,} cells", (rows * 8, side * 8), corners, np.full_like(corners, 8))


def ribbons(count: int) -> Pieces:
    """Columns of width 2 over the whole height."""
    offsets = np.stack([np.zeros(count, np.int64), np.arange(count) * 2], axis=1)
    sizes = np.broadcast_to(np.array([1024, 2]), (count, 2)).copy()
    return Pieces(f"{count:,} column ribbons", (1024, 2 * count), offsets, sizes)


def cut_ribbons(count: int) -> Pieces:
    """Columns of width 2, each cut once, near the top."""
    whole = ribbons(count // 2)
    upper, lower = whole.sizes.copy(), whole.sizes.copy()
    upper[:, 0], lower[:, 0] = 8, 1024 - 8
    below = whole.offsets + np.array([8, 0])
    offsets, sizes = np.concatenate([whole.offsets, below]), np.concatenate([upper, lower])
    return Pieces(f"{len(offsets):,} pieces of ribbons cut once", whole.shape, offsets, sizes)


def run(sizes: LayoutBenchSizes) -> list[Figures]:
    """Time all contenders on all tensors."""
    rows: list[list[Cell]] = []
    for pieces in (grid(sizes.grid), ribbons(sizes.ribbons), cut_ribbons(sizes.ribbons)):
        times = medians(pieces.contenders(), sizes.repeats)
        columns, objects, peer = (times[name] for name in ("from columns", "from Piece objects", "torch"))
        rows.append([pieces.name, columns * 1e3, objects * 1e3, peer * 1e3, peer / columns, peer / objects])
    return [
        Figures(
            "Validation of pieces, ms (medians, interleaved)",
            ["pieces", "from columns", "from Piece objects", "torch", "torch / columns", "torch / objects"],
            rows,
            ["torch: validate_non_overlapping_shards_metadata and check_tensor."],
        )
    ]
