"""Do processes with two device transports move the right bytes by either, and stay in step when they disagree?

Files that processes map stand in for device memory, and gloo for nccl; the set-up between the ranks is the real one.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import DisagreementError, ProcessGroupComm
from shardwise.comm.transports import device_connect
from shardwise.comm.transports.device_choice import DeviceChoiceEngine, choose_device_engine
from shardwise.comm.transports.device_memory import OpenedSegments
from shardwise.comm.transports.gloo import GlooEngine
from shardwise.comm.transports.nccl import NativeEngine
from shardwise.geometry import ChunkSpec, Layout
from shardwise.tensor import wrap
from shardwise.transfer import Link
from shardwise.transfer.device_cost import DeviceRates
from tests.fake_device import CPU, HostEvents, SharedFileDevice, on_device, open_fake_entry
from tests.moving import local_parts, values
from tests.ranks.world import Ranks, world_fixture

TIMEOUT = 20.0
RATES = DeviceRates(Link(0.0, 1.0), Link(1024, 2.0), Link(0.0, 1e9))  # up to 2048 bytes are read
world = world_fixture(2, timeout=TIMEOUT)


class CountingNative(NativeEngine):
    """Counts the exchanges that go by it."""

    used: Counter[str]

    def exchange(self, *args: Any, **kwargs: Any) -> Any:
        self.used["exchange"] += 1
        return super().exchange(*args, **kwargs)


def connect(folder: str) -> tuple[ProcessGroupComm, SharedFileDevice, CountingNative]:
    dist.barrier()
    comm = ProcessGroupComm(timeout=TIMEOUT, shared_memory=False)
    device = SharedFileDevice(Path(folder))
    entry: Any = open_fake_entry(device, HostEvents(), gpu=f"GPU-{comm.rank}")
    device_connect._open_entry = lambda _: entry
    device_connect.opened_segments = lambda _: OpenedSegments(device)
    host = GlooEngine(comm.process_group, comm.rank, comm.ranks, TIMEOUT)
    native = CountingNative(comm.process_group, comm.rank, comm.ranks, CPU, host)
    native.used = Counter()
    engine = choose_device_engine(native, host, comm.rank, comm.ranks, TIMEOUT, "auto")
    assert isinstance(engine, DeviceChoiceEngine)
    engine.rates = RATES
    comm._engine = engine
    return comm, device, native


def move_either_way(folder: str) -> list[tuple[bool, int]]:
    """For each size: whether what arrived is right, and how many exchanges went by the stand-in for nccl so far."""
    comm, device, native = connect(folder)
    found = []
    for size in (8, 40, 8, 48):  # 128, 3200, 128 and 4608 bytes leave each rank
        rows, columns = (ChunkSpec(dim, 2).layout((size, size)) for dim in (0, 1))
        whole = values((size, size), torch.float64)
        parts = tuple(on_device(device, part) for part in local_parts(rows, comm.rank, whole))
        moved = wrap(rows, parts, comm, dtype=whole.dtype).redistribute(columns)
        right = all(
            torch.equal(a, b)
            for a, b in zip(moved.local_tensors(), local_parts(columns, comm.rank, whole), strict=True)
        )
        found.append((right, native.used["exchange"]))
    return found


def test_moves_go_by_the_faster_transport(world: Ranks, tmp_path: Path) -> None:
    assert world.run(move_either_way, str(tmp_path)) == [[(True, 0), (True, 1), (True, 1), (True, 2)]] * 2


def disagree(folder: str, size: int) -> tuple[str, list[bool]]:
    """Rank 1 asks for another layout than rank 0; then both ask for the same."""
    comm, device, _ = connect(folder)
    rows, columns, turned = (
        spec.layout((size, size)) for spec in (ChunkSpec(0, 2), ChunkSpec(1, 2), ChunkSpec(0, (1, 0)))
    )
    whole = values((size, size), torch.float64)

    def hold(layout: Layout) -> Any:
        return wrap(
            layout, tuple(on_device(device, p) for p in local_parts(layout, comm.rank, whole)), comm, dtype=whole.dtype
        )

    try:
        hold(rows).redistribute(turned if comm.rank else columns)
        text = "no error"
    except DisagreementError as error:
        text = str(error)
    moved = [hold(rows).redistribute(dst) for dst in (columns, turned)]
    return text, [
        torch.equal(a.local_tensors()[0], local_parts(dst, comm.rank, whole)[0])
        for a, dst in zip(moved, (columns, turned), strict=True)
    ]


def test_ranks_that_disagree_stay_in_step(world: Ranks, tmp_path: Path) -> None:
    for size in (8, 40):  # read, and by the stand-in for nccl
        for text, right in world.run(disagree, str(tmp_path), size):
            assert "the ranks pass different arguments: to is" in text
            assert right == [True, True]
