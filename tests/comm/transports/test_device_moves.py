"""Do processes that read each other's device memory move the right bytes, again and again?

Files that processes map stand in for device memory. Results, which torch makes in other memory, are copied there and
back, as on a GPU whose memory cannot be opened.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import CommError, DisagreementError, ProcessGroupComm
from shardwise.comm.transports import device_memory
from shardwise.comm.transports.backends import GlooEngine, NativeEngine
from shardwise.comm.transports.device_memory import OpenedSegments, SharedSegments
from shardwise.geometry import Layout, Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.tensor import ShardedTensor, wrap
from tests.fake_device import CPU, HostEvents, SharedFileDevice, on_device, open_fake_entry
from tests.moving import values
from tests.world import Ranks, world_fixture

TIMEOUT = 20.0
RANKS = 3
KINDS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial("sum"))
world = world_fixture(RANKS, timeout=TIMEOUT)


class CopyingSegments(SharedSegments):
    """Copies to the stand-in what is not on it."""

    device: SharedFileDevice

    def _place(self, tensor: Tensor, seen: Any) -> Any:
        found = tensor.numel() == 0 or self.device.find_segment(tensor.data_ptr()) is not None
        return super()._place(tensor if found else on_device(self.device, tensor), seen)


def connect(folder: str, *, native: bool = False) -> tuple[ProcessGroupComm, SharedFileDevice]:
    """A comm whose ranks read the stand-in, or that takes gloo for nccl."""
    dist.barrier()
    comm = ProcessGroupComm(timeout=TIMEOUT, shared_memory=False)
    device = SharedFileDevice(Path(mkdtemp(dir=folder)))
    entry, info = open_fake_entry(device, HostEvents())
    entry.shared.__class__ = CopyingSegments
    entry.shared.device = device  # type: ignore[attr-defined]  # of the other class
    device_memory._open_entry = lambda _: (entry, info)  # type: ignore[assignment]
    device_memory.opened_segments = lambda _: OpenedSegments(device)
    host = GlooEngine(comm.process_group, comm.rank, comm.ranks, TIMEOUT)
    if native:
        comm._use_engine(NativeEngine(comm.process_group, comm.rank, comm.ranks, CPU, host))
        return comm, device
    engine = device_memory.connect_devices(host, comm.rank, comm.ranks, CPU, TIMEOUT, wanted=True)
    assert engine is not None
    comm._use_engine(engine)
    return comm, device


def layout(kind: Placement, shape: tuple[int, ...] = (6, 9)) -> Layout:
    return MeshSpec(Mesh.of(x=RANKS), (kind,)).layout(shape)


def parts(kind: Placement, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a tensor; of a pending sum it is an addend."""
    if isinstance(kind, Shard):
        return whole.chunk(RANKS, kind.dim)[rank].contiguous()
    return whole / 2**rank if isinstance(kind, Partial) else whole.clone()


def hold(comm: Any, device: SharedFileDevice, kind: Placement, whole: Tensor) -> ShardedTensor:
    held = on_device(device, parts(kind, whole, comm.rank))
    return wrap(layout(kind, tuple(whole.shape)), (held,), comm, dtype=whole.dtype)


def result(src: Placement, dst: Placement, whole: Tensor, rank: int) -> Tensor:
    terms = [parts(src, whole, r) for r in range(RANKS)] if isinstance(src, Partial) else [whole]
    return parts(dst, sum(terms[1:], terms[0]), rank)


PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b and not isinstance(b, Partial)]


def move_all_pairs(folder: str) -> list[str]:
    """Moves of all kinds in turn, each three times, on two comms of the same ranks; which of them gave wrong values."""
    comms = [connect(folder) for _ in range(2)]
    wrong = []
    held = [[hold(c, d, a, values((6, 9), torch.float32) + n) for a, _ in PAIRS] for n, (c, d) in enumerate(comms)]
    for turn in range(3):
        for i, (a, b) in enumerate(PAIRS):
            for n, (comm, _) in enumerate(comms):
                found = held[n][i].redistribute(layout(b)).local_tensor()
                if not torch.equal(found, result(a, b, values((6, 9), torch.float32) + n, comm.rank)):
                    wrong.append(f"turn {turn}, comm {n}: {a} -> {b}")
    return wrong


def test_moves_of_all_kinds_again_and_again_on_two_comms(world: Ranks, tmp_path: Path) -> None:
    assert world.run(move_all_pairs, str(tmp_path)) == [[]] * RANKS


def start_many(folder: str) -> list[bool]:
    """Moves of different kinds that are started before the first is waited for, in another order on each rank."""
    comm, device = connect(folder)
    whole = values((6, 9), torch.float32)
    found = []
    for _ in range(2):
        handles = [hold(comm, device, a, whole).redistribute(layout(b), async_op=True) for a, b in PAIRS]
        order = range(len(PAIRS)) if comm.rank else reversed(range(len(PAIRS)))
        moved = {i: handles[i].wait().local_tensor() for i in order}
        found += [torch.equal(moved[i], result(a, b, whole, comm.rank)) for i, (a, b) in enumerate(PAIRS)]
    return found


def test_moves_that_are_started_together(world: Ranks, tmp_path: Path) -> None:
    assert world.run(start_many, str(tmp_path)) == [[True] * 2 * len(PAIRS)] * RANKS


def write_between_moves(folder: str) -> list[bool]:
    """A source that is overwritten, and others in new memory, between moves of one kind."""
    comm, device = connect(folder)
    whole, found = values((6, 9), torch.float32), []
    tensor = hold(comm, device, Partial("sum"), whole)
    for turn in range(4):
        tensor.local_parts[0].copy_(parts(Partial("sum"), whole + turn, comm.rank))
        moved = tensor.redistribute(layout(Replicate())).local_tensor()
        found.append(torch.equal(moved, result(Partial("sum"), Replicate(), whole + turn, comm.rank)))
        fresh = hold(comm, device, Shard(0), whole * turn)
        found.append(torch.equal(fresh.redistribute(layout(Replicate())).local_tensor(), whole * turn))
    return found


def test_sources_change_between_moves(world: Ranks, tmp_path: Path) -> None:
    assert world.run(write_between_moves, str(tmp_path)) == [[True] * 8] * RANKS


def disagree(folder: str, native: bool) -> tuple[list[str], bool]:
    """The last rank asks for another result of a sum, before and after all have asked for the same one."""
    comm, device = connect(folder, native=native)
    whole, texts, right = values((6, 9), torch.float32), [], True
    tensor = hold(comm, device, Partial("sum"), whole)
    for _ in range(2):
        try:
            tensor.redistribute(layout(Shard(0) if comm.rank == RANKS - 1 else Replicate()))
        except DisagreementError as error:
            texts.append(str(error))
        for kind in (Shard(0), Replicate()):
            wanted = result(Partial("sum"), kind, whole, comm.rank)
            right = right and torch.equal(tensor.redistribute(layout(kind)).local_tensor(), wanted)
    return texts, right


@pytest.mark.parametrize("native", [False, True])
def test_ranks_that_disagree_on_a_sum_stay_in_step(world: Ranks, tmp_path: Path, native: bool) -> None:
    for texts, right in world.run(disagree, str(tmp_path), native):
        assert len(texts) == 2 and right
        assert all("the ranks pass different arguments: to is" in text and "on rank 2" in text for text in texts)


def limit_buffers(folder: str) -> tuple[list[str], bool]:
    """Limits that are wrong, or too small for anything, are errors of all ranks; a small one is kept to."""
    comm, device = connect(folder)
    whole, texts = values((6, 9), torch.float32), []
    tensor = hold(comm, device, Partial("sum"), whole)
    for limit in (-1, 1 if comm.rank else 2):
        try:
            tensor.redistribute(layout(Replicate()), max_buffer_bytes=limit)
        except ValueError as error:
            texts.append(str(error))
    moved = tensor.redistribute(layout(Replicate()), max_buffer_bytes=1000).local_tensor()
    return texts, torch.equal(moved, result(Partial("sum"), Replicate(), whole, comm.rank))


def test_limits_of_buffers_of_a_sum(world: Ranks, tmp_path: Path) -> None:
    for (wrong, different), right in world.run(limit_buffers, str(tmp_path)):
        assert "max_buffer_bytes is a positive number of bytes or None, got -1" in wrong
        assert "max_buffer_bytes is 2 on rank 0 and 1 on ranks 1, 2" in different
        assert right


def die_after_moves(folder: str, victim: int) -> Any:
    comm, device = connect(folder)
    tensor = hold(comm, device, Shard(0), values((6, 9), torch.float32))
    for _ in range(3):
        tensor.redistribute(layout(Shard(1)))
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        tensor.redistribute(layout(Shard(1)))
    except CommError as error:
        return str(error), error.ranks
    return "no error"


def test_rank_that_is_killed_between_warm_moves_is_named(world: Ranks, tmp_path: Path) -> None:
    for outcome in world.outcomes(die_after_moves, str(tmp_path), 0)[1:]:
        text, blamed = outcome.value
        assert blamed == (0,) and "rank 0 did not take part" in text
    world.restart()
