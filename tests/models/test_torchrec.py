"""TorchRec's DistributedModelParallel with `install()`: its state is in tensors of shardwise, saved and loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise
from tests.world import Ranks, world_fixture

try:
    with warnings.catch_warnings(action="ignore"):
        import torchrec
except (ImportError, OSError) as error:  # fbgemm of another device
    pytest.skip(f"torchrec cannot be imported: {str(error)[:80]}: make test-models", allow_module_level=True)

world = world_fixture(2, timeout=60.0)
ROWS, WIDTH = 16, 8
STARTS, VALUES = torch.tensor([0, 2, 3, 5, 6]), torch.tensor([1, 9, 15, 4, 4, 8])


def build() -> Any:
    torch.manual_seed(0)
    table = torchrec.EmbeddingBagConfig(ROWS, WIDTH, name="t", feature_names=["f"])
    return torchrec.EmbeddingBagCollection(device=torch.device("cpu"), tables=[table])


class Ranking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = build()
        self.top = nn.Linear(WIDTH, 1)

    def forward(self, features: Any) -> Tensor:
        made: Tensor = self.top(self.tables(features)["f"])
        return made


def features(first: int, last: int) -> Any:
    """Some of the four bags of ids."""
    kinds = torchrec.sparse.jagged_tensor.KeyedJaggedTensor
    lengths = STARTS.diff()[first:last]
    return kinds.from_lengths_sync(keys=["f"], values=VALUES[STARTS[first] : STARTS[last]], lengths=lengths)


def run_rank(kind: str, folder: Path) -> tuple[Any, ...]:
    import shardwise.compat

    shardwise.compat.install()
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    rank = torch.distributed.get_rank()
    model, sharder = Ranking(), EmbeddingBagCollectionSharder()
    how = sharding_plan.row_wise() if kind == "row_wise" else sharding_plan.table_wise(rank=1)
    tables = sharding_plan.construct_module_sharding_plan(
        model.tables, {"t": how}, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    spread = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"tables": tables}), sharders=[sharder]
    )
    made = spread(features(2 * rank, 2 * rank + 2))
    made.sum().backward()
    table = next(t for n, t in spread.state_dict().items() if "t.weight" in n)
    whole = torch.empty(ROWS, WIDTH) if rank == 0 else None
    table.gather(0, whole)
    shardwise.save({"table": table}, folder / kind)
    return made.detach(), type(table).__module__, whole, model.top


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_its_tables_are_sharded_tensors_of_shardwise(world: Ranks, kind: str, tmp_path: Path) -> None:
    results = world.run(run_rank, kind, tmp_path)
    table, top = results[0][2:]
    expected = top(nn.functional.embedding_bag(VALUES, table, STARTS[:-1], mode="sum")).detach()
    assert_close(torch.cat([result[0] for result in results]), expected)
    assert all(result[1].startswith("shardwise.") for result in results)
    with shardwise.open(tmp_path / kind) as stored:
        assert torch.equal(stored["table"].read(), table)
