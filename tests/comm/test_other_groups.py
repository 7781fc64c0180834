"""Process groups of torch for tests and dry runs: ranks that do not exist, ranks in threads, groups without names."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import CommError, Mesh, ModelPlan, shard_module
from shardwise.compat import _shard as torchs
from tests.device import DEVICE

with warnings.catch_warnings(action="ignore"):  # torch's own, of the devices of its stub
    from torch.testing._internal.distributed.distributed_utils import with_dist

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the groups are of host memory")
RANKS = 4


@pytest.fixture
def fake() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake")
def test_a_model_without_values_is_sharded_among_ranks_that_do_not_exist() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = ModelPlan(Mesh.of(tp=RANKS), {"0.*": "S(0)", "2.weight": "S(1)"})
    assert "94.7 % of the bytes" in str(shardwise.describe_plan(plan, model))
    shard_module(model, plan)
    sharded = {n: p for n, p in model.named_parameters() if isinstance(p, shardwise.ShardedTensor)}
    local = {n: tuple(p.local_tensor().shape) for n, p in sharded.items()}
    assert local == {"0.weight": (2, 4), "0.bias": (2,), "2.weight": (4, 2), "2.bias": (4,)}
    x = shardwise.zeros("f32[8,4] on tp=4: S(0)", device="meta")
    assert x.redistribute("R").local_tensor().shape == (8, 4)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.full(),
        lambda x: x.redistribute("R"),
        lambda x: x.sum().item(),
        lambda x: shardwise.shard(torch.ones(8, 4), Mesh.of(tp=RANKS), "S(0)"),
        lambda x: shard_module(nn.Linear(4, 8), ModelPlan(Mesh.of(tp=RANKS), {"weight": "S(0)"})),
    ],
)
def test_values_of_ranks_that_do_not_exist_are_an_error(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(
        CommError, match="torch's fake one, whose other 3 ranks do not exist, so no values can be moved"
    ):
        ask(shardwise.zeros("f32[8,4] on tp=4: S(0)"))


def test_metadata_alone_needs_no_name_of_a_group() -> None:
    """torch's checkpoint tests describe tensors of several ranks in one process, whose group is a stub."""
    with with_dist(1, RANKS):
        pieces = [torchs.metadata.ShardMetadata([8 * r], [8], f"rank:{r}/cpu") for r in range(RANKS)]
        whole = torchs.sharded_tensor.ShardedTensorMetadata(
            pieces, torch.Size([8 * RANKS]), torchs.sharded_tensor.TensorProperties.create_from_tensor(torch.empty(1))
        )
        own = [torchs.sharded_tensor.Shard(torch.rand(8), pieces[1])]
        made = torchs.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(own, whole)
        assert made.metadata().size == (8 * RANKS,) and made.local_shards() == own


@pytest.fixture
def threads() -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """Run a function on ranks that are threads, as torch's multi-threaded tests do."""
    c10d: Any = torch._C._distributed_c10d
    c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]
    store, results, errors = dist.HashStore(), {}, []

    def call(fn: Callable[[int], Any]) -> list[Any]:
        def run(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
                results[rank] = fn(rank)
                dist.destroy_process_group()
            except BaseException as error:
                errors.append(error)

        started = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(60)
        assert not errors, errors
        assert len(results) == RANKS, "a rank did not end"
        return [results[rank] for rank in range(RANKS)]

    yield call
    multi_threaded_pg._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
    c10d._set_thread_isolation_mode(False)


def test_ranks_may_be_threads_of_torch_s_multi_threaded_tests(
    threads: Callable[[Callable[[int], Any]], list[Any]],
) -> None:
    def body(rank: int) -> tuple[float, float, float | None]:
        spec = torchs.sharding_spec.ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(RANKS)])
        table = torchs.sharded_tensor.ones(spec, 10, 3)
        out = torch.zeros(10, 3) if rank == 0 else None
        table.gather(0, out)
        x = shardwise.shard(torch.arange(8.0), Mesh.of(tp=RANKS), "S(0)")
        half = dist.new_group([0, 1])
        of_half = None
        if rank < 2:
            pair = torchs.sharding_spec.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            of_half = torchs.sharded_tensor.ones(pair, 6, process_group=half).sum().item()
        return x.sum().item(), 0.0 if out is None else out.sum().item(), of_half

    assert threads(body) == [(28.0, 30.0, 6.0), (28.0, 0.0, 6.0), (28.0, 0.0, None), (28.0, 0.0, None)]


def gloo_threads() -> int:
    names = (Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task"))
    return sum("gloo" in name.read_text() for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_group_that_torch_has_destroyed_leaves_no_threads() -> None:
    before = gloo_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = shardwise.full("on x=1: S(0)", (4,), 1.0)
    assert float((x + x).sum().full()) == 8.0
    comm, kept = x.comm, shardwise.comm.ProcessGroupComm.of(dist.new_group([0]))
    kept.barrier(label="connect")
    unused = shardwise.comm.ProcessGroupComm(device="cpu")
    assert gloo_threads() > before
    dist.destroy_process_group()
    assert gloo_threads() == before  # one that lets go of a tensor while Python ends would abort the program
    assert comm.process_group is None and kept.process_group is None
    assert (x + x).local_tensor().tolist() == [2.0] * 4
    for other in (comm, unused):
        with pytest.raises(CommError, match=r"group was destroyed by destroy_process_group"):
            other.barrier(label="barrier")
