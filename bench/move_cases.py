"""What is moved: each case as the layouts it starts from and ends in, and what the others call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    Layout,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
)

RANKS = 4
Shape = tuple[int, int]


@dataclass(frozen=True)
class MoveCase:
    """A move. `verb` is what does it; `raw` names a raw collective; `grid` is the mesh of DTensor, None if it refuses.

    `reshard` says whether torch's ShardedTensor does it with that method.
    """

    name: str
    src: Callable[[Shape], ShardingSpec]
    dst: Callable[[Shape], ShardingSpec]
    raw: str
    grid: tuple[int, ...] | None = None
    reshard: bool = False
    verb: str = "redistribute"

    def layouts(self, shape: Shape) -> tuple[Layout, Layout]:
        """Where the tensor is, before and after."""
        return self.src(shape).layout(shape), self.dst(shape).layout(shape)


def _line(placement: Placement) -> Callable[[Shape], ShardingSpec]:
    return lambda shape: MeshSpec(Mesh.of(x=RANKS), (placement,))


def _square(*placements: Placement) -> Callable[[Shape], ShardingSpec]:
    return lambda shape: MeshSpec(Mesh.of(x=2, y=RANKS // 2), placements)


def _on_first(shape: Shape) -> ShardingSpec:
    return EnumerableSpec([Piece(Box.whole(shape), 0)])


def _swap_first_ranks(shape: Shape) -> ShardingSpec:
    return ChunkSpec(0, (1, 0, 2, 3))


_rows = _line(Shard(0))
_sum = _line(Partial("sum"))

CASES = (
    MoveCase("Shard(0) -> Shard(1)", _rows, _line(Shard(1)), "all_to_all", (4,), reshard=True),
    MoveCase(
        "[S0, S1] -> [S1, S0], 2 x 2", _square(Shard(0), Shard(1)), _square(Shard(1), Shard(0)), "swap 1 2", (2, 2)
    ),
    MoveCase(
        "[S0, R] -> [R, S0], 2 x 2", _square(Shard(0), Replicate()), _square(Replicate(), Shard(0)), "swap 1 2", (2, 2)
    ),
    MoveCase("Shard(0) -> Replicate", _rows, _line(Replicate()), "all_gather", (4,)),
    MoveCase("Partial -> Shard(0)", _sum, _rows, "exchange_and_sum", (4,)),
    MoveCase("Partial -> Replicate", _sum, _line(Replicate()), "all_reduce", (4,)),
    MoveCase("Shard(0), ranks 0 and 1 swapped", _rows, _swap_first_ranks, "swap 0 1", reshard=True),
    MoveCase("gather to rank 0", _rows, _on_first, "gather", (4,), verb="gather"),
    MoveCase("scatter from rank 0", _on_first, _rows, "scatter", (4,), verb="shard"),
)


def whole(shape: Shape) -> Tensor:
    """The global tensor: whole numbers, so that sums are exact."""
    return torch.arange(shape[0] * shape[1]).remainder_(1021).to(torch.float32).view(shape)


def local_parts(layout: Layout, values: Tensor, rank: int) -> tuple[Tensor, ...]:
    """What a rank holds of a tensor; a pending sum's addend on rank r is the tensor + r."""
    parts = tuple(values[piece.box.slices].clone() for piece in layout.pieces_of(rank))
    return tuple(part + rank for part in parts) if layout.pending is not None else parts


def expected_parts(src: Layout, dst: Layout, values: Tensor, rank: int) -> tuple[Tensor, ...]:
    """What a rank must hold after the move."""
    total = values if src.pending is None else RANKS * values + sum(range(RANKS))
    return tuple(total[piece.box.slices] for piece in dst.pieces_of(rank))
