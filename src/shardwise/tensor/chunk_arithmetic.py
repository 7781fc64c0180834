"""How `torch.chunk` cuts a dim, by torch's function names."""

from __future__ import annotations

from shardwise.geometry import LayoutError
from shardwise.tensor.placement_specs import ChunkShardingSpec
from shardwise.tensor.remote_devices import rank_of


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the length of all chunks but the last ones.

    >>> get_split_size(10, 4)
    3
    """
    return -(-dim_size // chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the length of chunk `idx`.

    >>> [get_chunked_dim_size(10, 3, i) for i in range(5)]
    [3, 3, 3, 1, 0]
    """
    return max(0, min(split_size, dim_size - split_size * idx))


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Return where the chunk of a rank starts and how long it is.

    >>> get_chunk_sharding_params(5, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), rank=0)
    (3, 2)
    """
    ranks = [rank_of(placement) for placement in spec.remote_devices]
    if rank not in ranks:
        raise LayoutError(f"rank {rank} is not among the placements' ranks {ranks}; it has no chunk")
    split, index = get_split_size(sharding_dim_size, world_size), ranks.index(rank)
    return min(split * index, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, index)
