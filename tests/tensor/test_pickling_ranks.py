"""Between real processes: sharded tensors through pickle, on the default group and a sub-group, and RPC references."""

from __future__ import annotations

import gc
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.comm import default_comm
from shardwise.comm.current import get_current_process_group, load_with_process_group, resolve_comm
from shardwise.compat import sharded_tensor as rrefs
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import ChunkSpec
from tests.device import DEVICE, PLACE, STANDIN
from tests.world import Ranks, on_host, world_fixture

world = world_fixture(2)
ROWS = ChunkSpec(0, ranks=2)
RPC_SECONDS = 60.0


def numbered(*size: int, **options: Any) -> TorchShardedTensor:
    tensor = TorchShardedTensor(ROWS, *size, **options)
    tensor.local_tensor().detach().fill_(dist.get_rank() + 1.0)
    return tensor


def save(folder: str, group: dist.ProcessGroup | None = None) -> None:
    torch.save({"weight": numbered(5, 2, process_group=group)}, Path(folder) / f"rank{dist.get_rank()}.pt")


def load(folder: str, rank: int) -> TorchShardedTensor:
    loaded = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False)["weight"]
    assert isinstance(loaded, TorchShardedTensor)
    return loaded


def save_and_load(folder: str) -> tuple[list[list[float]], bool]:
    save(folder)
    tensor = load(folder, dist.get_rank())
    return tensor.local_tensor().tolist(), tensor._process_group is dist.group.WORLD


def test_torch_save_and_load_on_the_same_rank(world: Ranks, tmp_path: Path) -> None:
    rows = [[[1.0, 1.0]] * 3, [[2.0, 2.0]] * 2]
    assert world.run(save_and_load, str(tmp_path)) == [(rows[0], True), (rows[1], True)]


def load_the_others(folder: str) -> str:
    save(folder)
    default_comm().barrier(label="both are written")
    with pytest.raises(RuntimeError) as caught:
        load(folder, 1 - dist.get_rank())
    return str(caught.value)


def test_another_ranks_part_is_refused(world: Ranks, tmp_path: Path) -> None:
    first, second = world.run(load_the_others, str(tmp_path))
    assert first.startswith("Local rank at save time was 1, but at load time was 0; ")
    assert second.startswith("Local rank at save time was 0, but at load time was 1; ")
    assert first.endswith("read it with shardwise.load, which reshards")


def edit_the_saved_world(change: dict[str, int]) -> str:
    """Load a tensor whose state says that it was written elsewhere."""
    tensor = numbered(4)
    shards, metadata, group, spec, init_rrefs = tensor.__getstate__()
    for name, value in change.items():
        setattr(group, name, value)
    with pytest.raises(RuntimeError) as caught:
        tensor.__setstate__((shards, metadata, group, spec, init_rrefs))
    return str(caught.value).partition(";")[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("global_rank", "Global rank at save time was 7, but at load time was "),
        ("local_world_size", "Local world size at save time was 7, but at load time was 2"),
        ("global_world_size", "Global world size at save time was 7, but at load time was 2"),
    ],
)
def test_another_world_is_refused(world: Ranks, name: str, text: str) -> None:
    for found in world.run(edit_the_saved_world, {name: 7}):
        assert found.startswith(text)


def load_on_a_group_of_one(folder: str) -> list[str]:
    """Each rank saves a tensor of its own group of one, and needs that group to load it."""
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor = TorchShardedTensor(ChunkSpec(0, ranks=[dist.get_rank()]), 3, process_group=own)
    data = pickle.dumps(tensor)
    with load_with_process_group(own) as group:
        again = pickle.loads(data)
        assert group is own and get_current_process_group() is own and resolve_comm().process_group is own
    assert get_current_process_group() is dist.group.WORLD
    assert again._process_group is own and again.local_tensor().equal(tensor.local_tensor())
    with pytest.raises(RuntimeError) as caught:
        pickle.loads(data)
    return [again.sharding_spec().__class__.__name__, str(caught.value).partition(";")[0]]


def test_load_with_process_group_restores_a_sub_group(world: Ranks, tmp_path: Path) -> None:
    found = world.run(load_on_a_group_of_one, str(tmp_path))
    assert [text for _, text in found] == [
        "Local world size at save time was 1, but at load time was 2",
        "Local rank at save time was 0, but at load time was 1",
    ]


def save_a_parameter() -> bytes:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(numbered(4, 2))
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def test_without_a_world_the_error_says_what_to_set_up(world: Ranks) -> None:
    data = world.run(save_a_parameter)[1]
    with pytest.raises(RuntimeError, match=r"Need to initialize default process group .* rank 1 of a world of 2"):
        torch.load(io.BytesIO(data), weights_only=False)


# Remote references. The ranks join one RPC world, over the loopback interface, at the first test that needs it.


def make_with_rrefs() -> str:
    before = set(rrefs._sharded_tensor_map)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        TorchShardedTensor(ROWS, 4, init_rrefs=True)
    assert set(rrefs._sharded_tensor_map) == before
    return f"{caught.type.__name__}: {caught.value}"


def test_references_need_rpc(world: Ranks) -> None:
    for text in world.run(make_with_rrefs):
        assert text.startswith(
            "RuntimeError: RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc"
        )
        assert text.endswith("it is not on ranks 0, 1")


def join_rpc(meeting_point: str) -> str:
    """Start RPC; return why it cannot be."""
    if not rpc.is_available():
        return "this build of torch has no torch.distributed.rpc"
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rank = dist.get_rank()
    options: Any = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}", rpc_timeout=RPC_SECONDS)
    if DEVICE == "cuda":
        options.set_device_map(f"worker{1 - rank}", {torch.device(PLACE): torch.device(PLACE)})
    start: Any = rpc.init_rpc
    try:
        start(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    except RuntimeError as error:
        return f"torch.distributed.rpc does not start here: {error}"
    return ""


def leave_rpc() -> None:
    gc.collect()
    rpc.shutdown(timeout=RPC_SECONDS)


@pytest.fixture(scope="module")
def rpc_world(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    reasons = world.run(join_rpc, str(tmp_path_factory.mktemp("rpc") / "meet"))
    if any(reasons):
        pytest.skip(next(filter(None, reasons)))
    yield world
    world.run(leave_rpc)


def fetch_the_others_shards() -> dict[int, list[tuple[list[int], list[list[float]]]]]:
    with on_host() if DEVICE == STANDIN else nullcontext():  # RPC sends tensors of the host and of GPUs
        tensor = numbered(5, 2, init_rrefs=True)
        fetched = {rank: [ref.to_here() for ref in refs] for rank, refs in tensor.remote_shards().items()}
        default_comm().barrier(label="all shards are fetched")
    return {r: [(s.metadata.shard_offsets, s.tensor.tolist()) for s in shards] for r, shards in fetched.items()}


def test_each_rank_reaches_the_others_shards(rpc_world: Ranks) -> None:
    first, second = rpc_world.run(fetch_the_others_shards)
    assert first == {1: [([3, 0], [[2.0, 2.0]] * 2)]}
    assert second == {0: [([0, 0], [[1.0, 1.0]] * 3)]}


def reload_with_references() -> tuple[list[int], list[int], int]:
    tensor = numbered(4, init_rrefs=True)
    again = pickle.loads(pickle.dumps(tensor))
    found = sorted(again.remote_shards()), sorted(tensor.remote_shards())
    before = len(rrefs._sharded_tensor_map)
    del tensor, again
    gc.collect()
    return *found, before - len(rrefs._sharded_tensor_map)


def test_a_loaded_tensor_has_references_too_and_numbers_are_freed(rpc_world: Ranks) -> None:
    assert rpc_world.run(reload_with_references) == [([1], [1], 2), ([0], [0], 2)]


def hold_nothing_on_rank_0() -> tuple[int, dict[int, int]]:
    tensor = TorchShardedTensor(ChunkSpec(0, ranks=(1, 1)), 4, init_rrefs=True)
    return len(tensor.local_shards()), {rank: len(refs) for rank, refs in tensor.remote_shards().items()}


def test_a_rank_without_shards_sends_no_references(rpc_world: Ranks) -> None:
    assert rpc_world.run(hold_nothing_on_rank_0) == [(0, {1: 2}), (2, {})]


def hold_alone() -> dict[int, list[Any]]:
    alone = default_comm().subset([dist.get_rank()])
    tensor = TorchShardedTensor(ChunkSpec(0, ranks=[dist.get_rank()]), 4, process_group=alone, init_rrefs=True)
    return tensor.remote_shards()


def test_references_stay_in_the_tensors_group(rpc_world: Ranks) -> None:
    assert rpc_world.run(hold_alone) == [{}, {}]


def place_by_worker_name() -> tuple[list[int], str]:
    spec = ChunkShardingSpec(0, ["worker1/cpu", "worker0/cpu"])
    shard = TorchShardedTensor(spec, 4, 2, init_rrefs=True).local_shards()[0]
    return shard.metadata.shard_offsets, str(shard.metadata.placement)


def test_placements_name_workers(rpc_world: Ranks) -> None:
    assert rpc_world.run(place_by_worker_name) == [([2, 0], "worker0/cpu"), ([0, 0], "worker1/cpu")]


def make_as_rpc_rank(other: int) -> str:
    """Let rank 1 alone believe that it has this rank in the RPC world."""
    rank = rrefs._rpc_rank() if dist.get_rank() == 0 else other
    with patch.object(rrefs, "_rpc_rank", return_value=rank):
        return make_with_rrefs()


def test_a_wrong_rpc_rank_on_one_rank_is_raised_on_all(rpc_world: Ranks) -> None:
    for text in rpc_world.run(make_as_rpc_rank, 5):
        assert text.startswith("ValueError: Default ProcessGroup and RPC ranks must be the same for ShardedTensor, ")
        assert "found process group rank: 1 and RPC rank: 5" in text


def test_missing_rpc_on_one_rank_is_raised_on_all(rpc_world: Ranks) -> None:
    for text in rpc_world.run(make_as_rpc_rank, -1):
        assert text.startswith("RuntimeError: RPC Framework needs to be initialized")
        assert text.endswith("it is not on rank 1")


def test_references_that_were_not_asked_for() -> None:
    tensor = TorchShardedTensor(ChunkSpec(0, ranks=1), 4)
    with pytest.raises(RuntimeError, match="created with init_rrefs=False, no RRefs to remote shards available"):
        tensor.remote_shards()


def test_references_for_a_tensor_that_is_gone() -> None:
    with pytest.raises(RuntimeError, match="Could not find sharded_tensor_id: 99 in map"):
        rrefs.register_remote_shards(99, [], 1)
