"""What is assigned to a tensor's shards takes effect, or is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

from shardwise import compat
from shardwise.comm import Comm, run_local
from shardwise.geometry import Box, ChunkSpec, EnumerableSpec, Mesh, MeshSpec, Partial, Piece
from shardwise.geometry import Shard as Cut
from shardwise.tensor import shard
from shardwise.tensor.shards import Shard

WHOLE = torch.arange(24.0).reshape(6, 4)


def assign(comm: Comm) -> list[Any]:
    thirds = EnumerableSpec([Piece(Box((2 * i, 0), (2, 4)), i % 2) for i in range(3)])
    x = shard(WHOLE, thirds)
    shards = x.local_shards()
    for one in shards:
        one.tensor = one.tensor + 100
    for one in shards:
        one.tensor[0, 0] = -1.0  # written to the new memory, which is the tensor's own
    assert x.local_shards() is shards
    assert all(s.tensor is t for s, t in zip(shards, x.local_tensors(), strict=True))
    return list(x.full().tolist())


def test_a_tensor_assigned_to_a_shard_becomes_the_local_tensor() -> None:
    wanted = WHOLE + 100
    wanted[0::2, 0] = -1.0
    assert run_local(assign, 3) == [wanted.tolist()] * 3


def assign_what_does_not_fit(comm: Comm) -> list[str]:
    chunks = shard(WHOLE, ChunkSpec(0, 2))
    fused = shard(WHOLE, MeshSpec(Mesh.of(tp=2), (Cut(0, groups=(4, 2)),)))
    errors = []
    for tensor, new in ((chunks, torch.zeros(4, 3)), (chunks, torch.zeros(3, 4).double()), (fused, torch.zeros(2, 4))):
        with pytest.raises(ValueError) as caught:
            tensor.local_shards()[0].tensor = new
        errors.append(str(caught.value))
    assert torch.equal(chunks.full(), WHOLE) and torch.equal(fused.full(), WHOLE)
    return errors


def test_a_tensor_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    for shape, dtype, part in run_local(assign_what_does_not_fit, 2):
        assert shape.startswith("a shard of shape (3, 4) and torch.float32 cannot take a tensor of shape (4, 3) and")
        assert "torch.float64; convert it first" in dtype
        assert "part of a local tensor of shape (3, 4)" in part and "shard.tensor.copy_(new)" in part


def assign_to_a_shard_of_the_past(comm: Comm) -> Any:
    x = shard(WHOLE, ChunkSpec(0, 2))
    before = x.local_shards()[0]
    x.reshard(ChunkSpec(0, (1, 0)))
    before.tensor = torch.zeros(3, 4)
    return torch.equal(x.full(), WHOLE)


def test_a_shard_of_before_a_reshard_is_its_own() -> None:
    assert run_local(assign_to_a_shard_of_the_past, 2) == [True, True]


def copies_of_a_shard(comm: Comm) -> list[float]:
    x = shard(WHOLE, ChunkSpec(0, 2))
    one = x.local_shards()[0]
    for other in (copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))):
        assert isinstance(other, Shard) and other.metadata == one.metadata and torch.equal(other.tensor, one.tensor)
        other.tensor = torch.zeros(1)  # belongs to nobody
    return list(x.full().tolist())


def test_copies_of_a_shard_are_not_tied_to_the_tensor() -> None:
    assert run_local(copies_of_a_shard, 2) == [WHOLE.tolist()] * 2


def offload(comm: Comm) -> Any:
    state = {"weight": shard(WHOLE, ChunkSpec(0, 2))}
    kept = _create_cpu_state_dict(state, share_memory=True)
    _copy_state_dict(state, kept)
    moved = kept["weight"]
    return moved.local_tensor().is_shared(), torch.equal(moved.full(), WHOLE.cpu())


def test_torchs_cpu_offload_fills_the_tensor() -> None:
    with compat.install():
        assert run_local(offload, 2) == [(True, True)] * 2


# The memory of local tensors


def use_memory(comm: Comm) -> Any:
    x = shard(WHOLE.cpu(), ChunkSpec(0, 2))  # torch's apply_ knows the host alone
    before = x.is_shared()
    assert x.share_memory_() is x
    x.apply_(lambda value: value + 1)
    return before, x.is_shared(), torch.equal(x.full(), WHOLE.cpu() + 1)


def test_memory_is_shared_and_changed_where_it_is() -> None:
    assert run_local(use_memory, 2) == [(False, True, True)] * 2


def apply_to_addends(comm: Comm) -> str:
    x = shard(WHOLE, MeshSpec(Mesh.of(dp=2), (Partial("sum"),)), src_rank=None)
    with pytest.raises(ValueError) as caught:
        x.apply_(lambda value: value * value)
    return str(caught.value)


def test_a_function_of_values_is_not_applied_to_addends() -> None:
    assert all("addends of a pending sum; redistribute" in text for text in run_local(apply_to_addends, 2))
