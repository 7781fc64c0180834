"""Our chunk arithmetic is torch.chunk's, also when there are more chunks than rows."""

import pytest
import torch

from shardwise.geometry import ChunkSpec, Mesh, MeshSpec, Shard
from shardwise.geometry.placements import chunk_sizes


@pytest.mark.parametrize("count", range(1, 12))
def test_sizes(count: int) -> None:
    for length in range(40):
        given = [len(part) for part in torch.arange(length).chunk(count)]
        if length == 0:
            given = [0] * count
        assert chunk_sizes(length, count) == (*given, *[0] * (count - len(given)))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_pieces(dim: int, count: int) -> None:
    values = torch.arange(6 * 5).reshape(6, 5)
    chunks = values.chunk(count, dim)
    mesh_spec = MeshSpec(Mesh.of(tp=count), (Shard(dim),))
    for spec in (ChunkSpec(dim, count), mesh_spec):
        pieces = spec.layout((6, 5)).pieces
        filled = [piece for piece in pieces if piece.box.numel]
        assert [piece.rank for piece in filled] == list(range(len(chunks)))
        for piece, chunk in zip(filled, chunks, strict=True):
            assert torch.equal(values[piece.box.slices], chunk)
