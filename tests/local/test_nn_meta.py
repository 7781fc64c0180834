"""Is a model on the meta device filled part by part: never whole on any rank, and from a checkpoint of any layout?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.comm import Comm, run_local
from shardwise.geometry import Box, ChunkSpec, EnumerableSpec, Mesh, Piece, ShardingSpec
from shardwise.nn import ModelPlan, ShardingPlan, shard_module
from shardwise.tensor import ShardedTensor

RANKS, WIDTH = 4, 512
WHOLE = WIDTH * WIDTH * 4


class Largest(TorchDispatchMode):
    """Notes the most bytes of any tensor with memory that an operator of this thread gives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        held = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and not t.is_meta]
        self.bytes = max([self.bytes, *(t.nbytes for t in held if not isinstance(t, ShardedTensor))])
        return result


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Embedding(WIDTH, WIDTH, padding_idx=0))


def plans(name: str) -> ModelPlan | ShardingPlan:
    if name in ("rows", "columns"):
        return ModelPlan(Mesh.of(x=RANKS), {"**": "S(0)" if name == "rows" else "S(1)"}, input_plan="replicated")
    strips = EnumerableSpec([Piece(Box((0, WIDTH // 4 * i), (WIDTH, WIDTH // 4)), 3 - i) for i in range(4)])
    specs: dict[str, ShardingSpec] = {"0.weight": strips, "1.weight": ChunkSpec(0, (2, 0, 3, 1))}
    return ShardingPlan({**specs})


@pytest.mark.parametrize("name", ["rows", "columns", "irregular"])
def test_no_rank_ever_holds_a_whole_parameter(name: str) -> None:
    def body(comm: Comm) -> tuple[int, int]:
        net = layers()
        with Largest() as largest:
            shard_module(net, plans(name))
        return largest.bytes, max(t.local_tensor().nbytes for t in net.parameters() if isinstance(t, ShardedTensor))

    for largest, held in run_local(body, RANKS):
        assert held == WHOLE // RANKS
        assert held <= largest < WHOLE, "something was allocated, and nothing as large as a parameter"


def test_a_checkpoint_of_other_ranks_fills_a_model_without_values(tmp_path: Path) -> None:
    def saved(comm: Comm) -> dict[str, Tensor]:
        net = layers()
        shard_module(net, ModelPlan(Mesh.of(x=2), {"0.weight": "S(0)"}, input_plan="replicated"))
        shardwise.save(net.state_dict(), tmp_path / "model")
        return {name: tensor.full() for name, tensor in net.state_dict().items()}

    expected = run_local(saved, 2)[0]

    def body(comm: Comm) -> tuple[bool, int]:
        net = layers()
        with Largest() as largest:
            shard_module(
                net, plans("columns"), init=lambda model: shardwise.load(model.state_dict(), tmp_path / "model")
            )
        seen = largest.bytes
        found = {name: tensor.full() for name, tensor in net.state_dict().items()}
        return all(torch.equal(found[name], value) for name, value in expected.items()), seen

    for same, largest in run_local(body, RANKS):
        assert same and largest < WHOLE


def test_a_model_with_values_is_not_initialised_again() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    shard_module(layer, ShardingPlan({"weight": ChunkSpec(0, 1)}), init=lambda model: pytest.fail("it has its values"))
    assert isinstance(layer.weight, ShardedTensor) and torch.equal(layer.weight.full(), before)
