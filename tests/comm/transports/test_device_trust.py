"""What comms promise holds for ranks that read each other's device memory: late ranks, calls that differ, killed ranks.

Files that processes map stand in for device memory; everything else is real: engine, messages, processes, signals. On a
GPU `test_comm_trust.py` is the same with its memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import CommError, ProcessGroupComm
from shardwise.comm.transports import device_memory
from shardwise.comm.transports.backends import GlooEngine
from shardwise.comm.transports.device_memory import OpenedSegments, SharedSegments, connect_devices
from tests.comm.test_trust import CALLS, LARGE, LATER, MOVES, SENT, TIMEOUT
from tests.fake_device import CPU, HostEvents, SharedFileDevice, on_device, open_fake_entry
from tests.killing import die_with_a_living_child
from tests.world import PATIENT, SOON, Ranks, announce, shorten_timeout, wait_for, world_fixture

world = world_fixture(2)


class CopyingSegments(SharedSegments):
    """Lends copies of tensors that are not on the stand-in, as a device does with memory that others cannot open."""

    def _place(self, tensor: Tensor, seen: Any) -> Any:
        if tensor.numel() and self._memory.find_segment(tensor.data_ptr()) is None:
            tensor = on_device(self._memory, tensor)  # type: ignore[arg-type]  # the memory of this test
        return super()._place(tensor, seen)


def comm_for(folder: str, timeout: float = TIMEOUT) -> tuple[ProcessGroupComm, SharedFileDevice]:
    """A comm whose ranks have connected by the device engine."""
    dist.barrier()
    comm = ProcessGroupComm(timeout=PATIENT)
    device = SharedFileDevice(Path(folder))
    entry, info = open_fake_entry(device, HostEvents())
    object.__setattr__(entry, "shared", CopyingSegments(device))
    device_memory._open_entry = lambda _: (entry, info)
    device_memory.opened_segments = lambda _: OpenedSegments(device)
    gloo = GlooEngine(comm.process_group, comm.rank, comm.ranks, PATIENT)
    engine = connect_devices(gloo, comm.rank, comm.ranks, CPU, PATIENT, wanted=True)
    assert engine is not None
    comm._use_engine(engine)
    comm.barrier(label="set up")
    shorten_timeout(comm, timeout)
    return comm, device


def come_late(folder: str, name: str, first: int) -> str:
    """Rank `first` gives up and writes to what it sent; the other comes after that. How the call ended on this rank."""
    comm, device = comm_for(folder, SOON)
    mine = on_device(device, torch.full((LARGE,), SENT if comm.rank == 0 else 0.0))
    into = on_device(device, torch.zeros(LARGE))
    gave_up, came = (f"late {name} {first}: {event}" for event in ("gave up", "came"))
    if comm.rank != first:
        wait_for(gave_up)
    try:
        MOVES[name](comm, mine, into)
    except CommError:
        mine.fill_(LATER)
        into.fill_(LATER)
        if comm.rank == first:
            announce(gave_up)
            wait_for(came)
        return "CommError"
    finally:
        if comm.rank != first:
            announce(came)
    return "right" if bool((into == SENT).all()) or comm.rank == 0 else f"read {sorted(set(into.tolist()))}"


@pytest.mark.parametrize(("name", "first"), [("exchange", 0), ("all_reduce", 1), ("broadcast", 0)])
def test_a_late_rank_fails_or_gets_what_was_sent(world: Ranks, tmp_path: Path, name: str, first: int) -> None:
    found = world.run(come_late, str(tmp_path), name, first)
    assert found[first] == "CommError" and found[1 - first] in ("CommError", "right")


def make_other_calls(folder: str, name: str, count: int) -> str:
    comm, _ = comm_for(folder)
    try:
        CALLS[name](comm, comm.rank == 1, count).wait()
        comm.barrier(label="after")
    except CommError as error:
        return f"{error} {error.ranks}"
    return "done"


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_fail_on_every_rank(world: Ranks, tmp_path: Path, name: str) -> None:
    texts = world.run(make_other_calls, str(tmp_path), name, 900)
    for text in texts:
        assert "the ranks made different calls" in text and "()" not in text, texts


def sum_without_the_dead(folder: str) -> str:
    comm, _ = comm_for(folder, timeout=200)
    return die_with_a_living_child(comm, LARGE)


def test_a_killed_rank_whose_child_lives_is_seen(world: Ranks, tmp_path: Path) -> None:
    """Long before the time-out of its comm: the limit of the call is shorter."""
    survivor, killed = world.outcomes(sum_without_the_dead, str(tmp_path), limit=100)
    assert "'w': rank 1 did not take part" in str(survivor.value)
    assert "rank 1 ended with exit code -9" in str(killed.error)
