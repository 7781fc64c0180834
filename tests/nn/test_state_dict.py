"""Sharded tensors as attributes of modules: their keys in a state dict, and the way back."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed._shard.sharded_tensor as torch_shards
import torch.distributed._shard.sharded_tensor.api as torch_tensors
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.comm import Comm, run_local
from shardwise.compat.sharded_tensor import pre_load_state_dict_hook, state_dict_hook
from shardwise.geometry import ChunkSpec
from shardwise.tensor.sharded_tensor import ShardedTensor

TWO_EACH = ChunkSpec(0, ranks=(0, 1, 0, 1))


class Leaf(nn.Module):
    """Two sharded attributes, one plain parameter."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.rows = None if fill is None else made(ChunkSpec(0, ranks=2), fill)
        self.pairs = None if fill is None else made(TWO_EACH, 10 * fill)


class Tree(nn.Module):
    """A sharded attribute of its own, and modules below that have some."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.own = None if fill is None else made(ChunkSpec(0, ranks=2), 100 * fill)
        self.left = Leaf(fill)
        self.deep = nn.Sequential(nn.Linear(2, 2), Leaf(fill))


KEYS = ["own", "left.rows", "left.pairs", "deep.1.rows", "deep.1.pairs"]
ALL_KEYS = {*KEYS, "left.bias", "deep.0.weight", "deep.0.bias", "deep.1.bias"}


def made(spec: ChunkSpec, fill: float) -> ShardedTensor:
    tensor = ShardedTensor(spec, 4, 2)
    for local in tensor.local_tensors():
        local.fill_(fill)
    return tensor


def hooked(module: nn.Module, *on: nn.Module) -> Any:
    targets: tuple[Any, ...] = on or (module,)
    for target in targets:
        target._register_state_dict_hook(state_dict_hook)
        target.register_load_state_dict_pre_hook(pre_load_state_dict_hook)
    return module


def values(module: nn.Module) -> list[list[float]]:
    """The local values of every sharded attribute, in the order of KEYS; each local tensor holds one value."""
    found = [attribute(module, key) for key in KEYS]
    assert all(bool((t == t[0, 0]).all()) for tensor in found for t in tensor.local_tensors())
    return [[float(t[0, 0]) for t in tensor.local_tensors()] for tensor in found]


def attribute(module: nn.Module, key: str) -> ShardedTensor:
    path, _, name = key.rpartition(".")
    tensor = getattr(module.get_submodule(path), name)
    assert isinstance(tensor, ShardedTensor), key
    return tensor


EXPECTED = [[100.0], [1.0], [10.0, 10.0], [1.0], [10.0, 10.0]]


def test_keys_of_a_root_module_and_of_those_below() -> None:
    def body(comm: Comm) -> set[str]:
        module = hooked(Tree(1.0))
        state = module.state_dict()
        assert state["left.rows"] is module.left.rows
        return set(state)

    assert run_local(body, 2) == [ALL_KEYS] * 2


def test_a_prefix_is_kept_without_a_second_dot() -> None:
    def body(comm: Comm) -> set[str]:
        return set(hooked(Tree(1.0)).state_dict(prefix="model."))

    assert run_local(body, 2) == [{f"model.{key}" for key in ALL_KEYS}] * 2


def test_torchs_own_hook_adds_a_dot_below_the_root() -> None:
    """A hook of torch's on a module below the root, which it reaches with a prefix."""
    spec = EnumerableShardingSpec([ShardMetadata([0], [2], "rank:0/cpu")])
    properties = {"dtype": torch.float32, "layout": torch.strided, "pin_memory": False, "requires_grad": False}
    module: Any = nn.ModuleDict({"left": nn.Module()})
    module["left"].rows = torch_tensors.ShardedTensorBase.__new__(torch_tensors.ShardedTensor, spec, 2, **properties)
    module["left"]._register_state_dict_hook(torch_shards.state_dict_hook)
    assert list(module.state_dict()) == ["left..rows"]
    ours: Any = nn.ModuleDict({"left": nn.Module()})
    ours["left"].rows = ShardedTensor(ChunkSpec(0, ranks=1), 2)
    ours["left"]._register_state_dict_hook(state_dict_hook)
    assert list(ours.state_dict()) == ["left.rows"]


def test_hooks_on_modules_below_give_the_same_keys() -> None:
    def body(comm: Comm) -> tuple[set[str], list[list[float]]]:
        source, target = Tree(1.0), Tree()
        for module in (source, target):
            hooked(module, module, module.left, module.deep[1])
        state = source.state_dict()
        target.load_state_dict(state)
        return set(state), values(target)

    assert run_local(body, 2) == [(ALL_KEYS, EXPECTED)] * 2


@pytest.mark.parametrize("strict", [True, False])
def test_loading_sets_the_attributes_and_leaves_no_key_over(strict: bool) -> None:
    def body(comm: Comm) -> list[list[float]]:
        state = hooked(Tree(1.0)).state_dict()
        target = hooked(Tree(7.0))
        result = target.load_state_dict(state, strict=strict)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert set(state) == ALL_KEYS
        assert target.left.rows is state["left.rows"]
        return values(target)

    assert run_local(body, 2) == [EXPECTED] * 2


def test_through_torch_save_and_load() -> None:
    def body(comm: Comm) -> list[list[float]]:
        file = io.BytesIO()
        torch.save(hooked(Tree(1.0)).state_dict(), file)
        file.seek(0)
        target = hooked(Tree())
        target.load_state_dict(torch.load(file, weights_only=False))
        return values(target)

    assert run_local(body, 2) == [EXPECTED] * 2


def test_a_module_that_stands_twice_has_both_keys() -> None:
    def body(comm: Comm) -> set[str]:
        module = nn.Module()
        module.one = module.two = Leaf(1.0)
        state = hooked(module).state_dict()
        target = nn.Module()
        target.one = target.two = Leaf()
        hooked(target).load_state_dict(state)
        assert isinstance(target.one.rows, ShardedTensor)
        return set(state)

    both = {f"{name}.{key}" for name in ("one", "two") for key in ("bias", "rows", "pairs")}
    assert run_local(body, 2) == [both] * 2


def test_a_plain_tensor_does_not_take_a_sharded_attributes_place() -> None:
    def body(comm: Comm) -> str:
        target = hooked(Leaf(1.0))
        state = {"bias": torch.ones(2), "rows": torch.ones(4, 2)}
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "rows"'):
            target.load_state_dict(state)
        return type(target.rows).__name__

    assert run_local(body, 2) == ["ShardedTensor"] * 2


def test_modules_without_sharded_tensors_are_as_they_were() -> None:
    module = hooked(nn.Linear(2, 2))
    assert set(module.state_dict()) == {"weight", "bias"}
    module.load_state_dict(nn.Linear(2, 2).state_dict())
