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


class Waves(nn.Module):
    """Rotary frequencies, as models have them: a buffer that no checkpoint stores, and one that it does."""

    def __init__(self, width: int, base: float = 100.0) -> None:
        super().__init__()
        self.width, self.base = width, base
        self.register_buffer("rates", base ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Silent(nn.Module):
    """Its constructor takes what it does not keep; the default may not be what it was made with."""

    def __init__(self, length: int, turn: float = 1.0) -> None:
        super().__init__()
        self.length = length
        self.register_buffer("turns", torch.full((length,), turn), persistent=False)
        self.weight = nn.Parameter(torch.ones(length))


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = build()
        return made


PAIR_PLAN = ModelPlan(Mesh.of(x=2), {"**.weight": "S(0)"}, input_plan="replicated")


def test_buffers_that_no_checkpoint_has_are_made_by_the_constructor(tmp_path: Path) -> None:
    dense = nn.Sequential(Waves(8, base=3.0))
    dense[0].scale += 5
    with torch.device("cpu"):
        made_on_host = Waves(8, base=3.0)
    shardwise.save(dense.state_dict(), tmp_path / "model")

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        net = on_meta(lambda: nn.Sequential(Waves(8, base=3.0)))
        shard_module(net, PAIR_PLAN, init=lambda m: shardwise.load(m.state_dict(), tmp_path / "model"))
        return net[0].rates.full(), net[0].scale.full()

    for rates, scale in run_local(body, 2):
        assert torch.equal(rates.cpu(), made_on_host.rates) and scale.item() == 7


def test_buffers_are_made_without_init_and_what_is_missing_in_a_checkpoint_too(tmp_path: Path) -> None:
    def body(comm: Comm) -> tuple[float, float]:
        net = on_meta(lambda: nn.Sequential(Waves(4)))
        shard_module(net, PAIR_PLAN)
        other = on_meta(lambda: nn.Sequential(Waves(4)))
        weights = {"0.weight": torch.zeros(4)}
        shardwise.save(weights, tmp_path / "weights")
        shard_module(
            other, PAIR_PLAN, init=lambda m: shardwise.load(m.state_dict(), tmp_path / "weights", strict=False)
        )
        return net[0].scale.item(), other[0].scale.item()

    assert run_local(body, 2) == [(2.0, 2.0)] * 2


def test_what_nothing_fills_is_an_error_that_names_it_on_every_rank() -> None:
    def body(comm: Comm) -> tuple[str, str]:
        net = on_meta(lambda: nn.Sequential(Silent(4, 2.0), nn.Linear(2, 2)))
        with pytest.raises(ValueError) as unknown:
            shard_module(net, PAIR_PLAN)
        with pytest.raises(ValueError) as left:
            shard_module(net, PAIR_PLAN, init=lambda m: nn.init.zeros_(m[0].weight))
        return str(unknown.value), str(left.value)

    for texts in run_local(body, 2):
        unknown, left = (text.removeprefix("'shard_module': ") for text in texts)
        assert unknown.startswith("0 (weight, turns): tensors on the meta device whose modules have no reset")
        assert left.startswith("1.weight, 1.bias, 0.turns: 3 tensors came from the meta device and have no values")


def test_what_one_rank_alone_fills_is_an_error_on_every_rank() -> None:
    def fill(model: nn.Module) -> None:
        for parameter in model.parameters():
            if isinstance(parameter, ShardedTensor) and parameter.comm.rank == 0:
                parameter.local_tensor().detach().zero_()

    def body(comm: Comm) -> str:
        net = on_meta(lambda: nn.Linear(2, 2))
        with pytest.raises(ValueError) as caught:
            shard_module(net, PAIR_PLAN, init=fill)
        return str(caught.value)

    assert all("weight, bias: 2 tensors came from the meta device" in text for text in run_local(body, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_that_is_stored_once_loads_as_one(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    shardwise.save({"embed.weight": whole}, tmp_path / "model")

    def body(comm: Comm) -> tuple[bool, bool, str]:
        net = on_meta(Tied)
        plan = ModelPlan(Mesh.of(x=2), {"embed.weight": "S(0)"}, input_plan="replicated")
        shard_module(net, plan, init=lambda m: shardwise.load(m.state_dict(), tmp_path / "model"))
        apart = {"embed.weight": torch.zeros(6, 4), "head.weight": torch.zeros(6, 4)}
        with pytest.raises(shardwise.CheckpointError) as caught:
            shardwise.load(apart, tmp_path / "model")
        return net.head.weight is net.embed.weight, torch.equal(net.head.weight.full(), whole), str(caught.value)

    for one, same, text in run_local(body, 2):
        assert one and same and "head.weight is missing from it" in text
