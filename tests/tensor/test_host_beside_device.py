"""Host tensors among ranks whose comm is for a device stay on the host, on every rank, and move as others do.

`make test-gpu` and `make test-device` run this on a device; on the CPU alone there is nothing to mix.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Partial, ones, run_local
from shardwise.comm import LocalComm, ProcessGroupComm
from shardwise.comm.protocol import Combine, TensorsByRank, Work
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.tensor import from_local, shard
from tests.device import PLACE
from tests.moving import LendingCountingComm

WHOLE = torch.arange(12.0, device="cpu")
RANKS = 3


class DeviceLendingComm(LendingCountingComm):
    """Ranks read what others lend in device memory, wherever it was before, as over CUDA's IPC."""

    def exchange(self, *edges: TensorsByRank, label: str, combine: Combine | None = None, **more: Any) -> Work:
        def combine_from_device(arrived: TensorsByRank) -> None:
            assert combine is not None
            combine({rank: [t.to(PLACE) for t in tensors] for rank, tensors in arrived.items()})

        own = None if combine is None else combine_from_device
        return super().exchange(*edges, label=label, combine=own, **more)


@pytest.mark.parametrize("src_rank", [0, 1, None])
def test_a_host_tensor_is_laid_out_on_the_host_of_every_rank(src_rank: int | None) -> None:
    def body(comm: Comm) -> tuple[str, str, Tensor]:
        leaf = WHOLE.clone().requires_grad_()
        x = shard(leaf if src_rank in (None, comm.rank) else None, ChunkSpec(0, RANKS), src_rank)
        (x * 2).full().sum().backward()
        at = "" if leaf.grad is None else str(leaf.grad.device)
        return x.device.type, at, x.detach().full()

    for rank, (device, of_gradient, whole) in enumerate(run_local(body, RANKS)):
        assert device == "cpu" and torch.equal(whole, WHOLE)
        assert of_gradient == ("cpu" if src_rank in (None, rank) else "")


def test_ranks_without_parts_receive_on_the_host() -> None:
    def body(comm: Comm) -> list[Tensor]:
        x = shard(WHOLE, ChunkSpec(0, ranks=(0,)), None)
        made = ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 12)
        assert x.device.type == made.device.type == "cpu"
        return [*x.redistribute(ChunkSpec(0, RANKS)).local_parts, (x + made).full()]

    for part, whole in run_local(body, RANKS):
        assert part.device.type == whole.device.type == "cpu" and torch.equal(whole, WHOLE + 1)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_addends_on_the_host_are_reduced_there(op: str) -> None:
    def body(comm: Comm) -> list[Tensor]:
        lending = DeviceLendingComm(comm)
        pending = MeshSpec(Mesh.of(x=RANKS), (Partial(op),))
        x = from_local(WHOLE * (comm.rank + 1), pending, (12,), comm=lending)
        rows = x.redistribute(ChunkSpec(0, ranks=(0, 2)))
        return [*rows.local_parts, x.full()]

    for found in run_local(body, RANKS):
        assert all(t.device.type == "cpu" for t in found)
        assert torch.equal(found[-1], WHOLE * (6 if op == "sum" else 3))


def test_the_device_of_a_comm_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on "cuda" are on the current GPU, by its number; a device without one differs from it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert LocalComm.alone("cuda").device == torch.device("cuda:1")
    assert LocalComm.alone("cuda:3").device == torch.device("cuda:3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert ProcessGroupComm(device="cuda").device == torch.device("cuda:1")
        assert ProcessGroupComm(device="cpu").device == torch.device("cpu")
    finally:
        dist.destroy_process_group()
