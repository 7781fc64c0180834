"""Embedding tables by rows, by columns and placed by hand; every rank looks up its own ids.

python examples/gallery/embeddings.py
"""

import copy

import torch
from torch import Tensor, nn

import shardwise
from shardwise import Box, ChunkSpec, EnumerableSpec, Piece, ShardedTensor, run_local
from shardwise.nn import ShardingPlan, shard_module

RANKS, WIDTH = 3, 8
ROWS = {"user": 90, "item": 40, "city": 10}
PLAN = ShardingPlan(
    {
        "user.weight": ChunkSpec(0, RANKS),  # rows over all ranks
        "item.weight": ChunkSpec(1, RANKS),  # columns over all ranks, 3 + 3 + 2
        "city.weight": EnumerableSpec([Piece(Box((0, 0), (10, WIDTH)), 2)]),  # whole, on the last rank
    }
)


class Tables(nn.Module):
    """Bags of ids from three tables, summed."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            self.add_module(name, nn.EmbeddingBag(rows, WIDTH, mode="sum"))

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.get_submodule(name)(given) for name, given in ids.items()]).sum(0)


def draw_ids(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randint(rows, (4, 5), generator=generator) for name, rows in ROWS.items()}


def main() -> None:
    torch.manual_seed(0)
    dense = Tables()
    expected = [dense(draw_ids(rank)) for rank in range(RANKS)]

    def body(comm: shardwise.Comm) -> tuple[bool, list[str]]:
        model = copy.deepcopy(dense)
        shard_module(model, PLAN)
        found = model(draw_ids(comm.rank))
        tables = [(name, p) for name, p in model.named_parameters() if isinstance(p, ShardedTensor)]
        held = [f"{name}: {[tuple(t.shape) for t in p.local_tensors()]}" for name, p in tables]
        return torch.allclose(found, expected[comm.rank], atol=1e-6), held

    results = run_local(body, RANKS)
    for rank, (_, held) in enumerate(results):
        print(f"rank {rank}  {'  '.join(held)}")
    print("equal:", all(same for same, _ in results))


if __name__ == "__main__":
    main()
