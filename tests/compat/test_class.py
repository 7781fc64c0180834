"""Tensors of the namespace keep their class through functions, shortcuts and copies; native ones stay native."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm import Comm, run_local
from shardwise.compat._shard import sharded_tensor
from shardwise.compat._shard.sharding_spec import ChunkShardingSpec
from shardwise.ops import dispatch_cache as fast_path
from shardwise.ops import dispatch_cache as recording
from tests.device import PLACE

ROWS = ChunkShardingSpec(0, [f"rank:0/{PLACE}", f"rank:1/{PLACE}"])
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * 2,
    "matmul": lambda x: x @ x.t(),
    "sum": lambda x: x.sum(0),
    "in place": lambda x: x.clone().add_(1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "max": lambda x: x.max(1).values,
    "redistribute": lambda x: x.redistribute(ChunkShardingSpec(1, [f"rank:1/{PLACE}", f"rank:0/{PLACE}"])),
    "to": lambda x: x.to(torch.float64),
    "detach": lambda x: x.detach(),
    "deepcopy": copy.deepcopy,
    "zeros_like": torch.zeros_like,
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_have_the_class_of_their_input(name: str) -> None:
    def body(comm: Comm) -> list[type]:
        theirs, ours = sharded_tensor.ones(ROWS, 4, 6), shardwise.ones(ROWS, 4, 6)
        return [type(FUNCTIONS[name](x)) for _ in range(2) for x in (theirs, ours)]

    for kinds in run_local(body, 2):
        assert kinds == [sharded_tensor.ShardedTensor, shardwise.ShardedTensor] * 2


def test_a_native_tensor_beside_one_of_the_namespace_gives_one_of_the_namespace() -> None:
    def body(comm: Comm) -> list[type]:
        theirs, ours = sharded_tensor.ones(ROWS, 4, 6), shardwise.ones(ROWS, 4, 6)
        return [type(theirs + ours), type(ours + theirs)]

    assert run_local(body, 2) == [[sharded_tensor.ShardedTensor] * 2] * 2


def test_gradients_have_the_class_of_their_tensor() -> None:
    def body(comm: Comm) -> tuple[type, list[Any]]:
        x = sharded_tensor.ones(ROWS, 4, 2, requires_grad=True)
        (x * 3).sum().backward()
        assert x.grad is not None
        return type(x.grad), x.grad.local_tensor().tolist()

    assert run_local(body, 2) == [(sharded_tensor.ShardedTensor, [[3.0, 3.0]] * 2)] * 2


def test_tensors_of_the_namespace_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Comm) -> list[Any]:
        return list((sharded_tensor.ones(ROWS, 4, 6) * 2).local_tensor().unique().tolist())

    for _ in range(3):
        run_local(body, 2)
    for module in (fast_path, recording):
        monkeypatch.setattr(module, "call_function", None)  # the long way would fail
    assert run_local(body, 2) == [[2.0]] * 2
    with pytest.raises(TypeError):
        run_local(lambda comm: sharded_tensor.ones(ROWS, 4, 7) * 2, 2)


def test_random_values_of_both_kinds_stay_apart() -> None:
    def body(comm: Comm) -> list[bool]:
        theirs, ours = sharded_tensor.zeros(ROWS, 4, 6), shardwise.zeros(ROWS, 4, 6)
        same = False
        for turn in range(comm.world_size):  # threads share torch's generator, so they draw one after another
            if turn == comm.rank:
                torch.manual_seed(comm.rank)
                drawn = torch.rand_like(theirs).local_tensor()
                torch.manual_seed(comm.rank)
                same = torch.equal(drawn, torch.rand(2, 6, device=drawn.device))
            comm.barrier(label="this rank has drawn")
        native = shardwise.rand_like(ours, seed=5).full()
        return [
            same,
            torch.equal(native, shardwise.rand(ChunkShardingSpec(1, [f"rank:0/{PLACE}"]), 4, 6, seed=5).full()),
        ]

    assert run_local(body, 2) == [[True, True]] * 2
