"""Which transports work between two processes of this host? Each is tried by two ranks, with a time-out.

1. Every probe is a function that both ranks run. It returns what it measured, or why it failed; it ends with a barrier,
   so that no rank ends while the other one still reads its memory.
2. A rank that hangs or dies is stopped by the world that started it, and the probe counts as failed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.launch import LocalWorld
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import CommError
from shardwise.comm.transports import remote_memory
from shardwise.comm.transports.device_memory import CudaMemory

PROBE_BYTES = 1 << 24
TIMEOUT_SECONDS = 20.0
_CAP_SYS_PTRACE = 19
LIMIT_SECONDS = 90.0  # of one probe, with the start of its ranks


@dataclass(frozen=True)
class ProbeResult:
    """How a probe ended: bytes per second where it was measured, or why it failed.

    >>> ProbeResult("sockets", bytes_per_second=2e9).works, ProbeResult("nccl", problem="no answer").works
    (True, False)
    """

    name: str
    bytes_per_second: float | None = None
    problem: str | None = None

    @property
    def works(self) -> bool:
        """Whether it worked on both ranks."""
        return self.problem is None


def probe_transports(gpus: int) -> list[ProbeResult]:
    """Try all transports that two ranks of this host can have, with `gpus` GPUs; starts two processes."""
    probes: dict[str, Callable[[], tuple[float | None, str]]] = {"sockets": try_sockets, "memory": try_memory}
    probes |= {"cuda ipc": try_cuda_ipc} if gpus else {}
    probes |= {"nccl": try_nccl} if gpus > 1 and dist.is_nccl_available() else {}
    with LocalWorld(2, timeout=TIMEOUT_SECONDS) as world:
        return [_run_probe(world, name, probe) for name, probe in probes.items()]


def _run_probe(world: LocalWorld, name: str, probe: Callable[[], tuple[float | None, str]]) -> ProbeResult:
    rates, problems = [], []
    for outcome in world.outcomes(probe, limit=LIMIT_SECONDS):
        rate, problem = outcome.value if outcome.error is None else (None, _first_line(outcome.error))
        rates += [rate] if rate is not None else []
        problems += [f"rank {outcome.rank}: {problem}"] if problem else []
    return ProbeResult(name, min(rates, default=None), problems[0] if problems else None)


def _attempt(comm: ProcessGroupComm, run: Callable[[], float | None]) -> tuple[float | None, str]:
    """What one rank found; all ranks leave together."""
    try:
        found: tuple[float | None, str] = run(), ""
    except Exception as error:
        found = None, _first_line(error)
    try:
        comm.barrier(label="probe")
    except CommError:
        if not found[1]:
            raise
    return found  # why this rank failed says more than that the other one has not come


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _socket_comm() -> ProcessGroupComm:
    return ProcessGroupComm(timeout=TIMEOUT_SECONDS, shared_memory=False)


def try_sockets() -> tuple[float | None, str]:
    """Exchange some bytes over the sockets of gloo; run by both ranks."""
    comm = _socket_comm()
    comm.barrier(label="probe")

    def run() -> float:
        other = 1 - comm.rank
        mine = torch.full((PROBE_BYTES,), comm.rank, dtype=torch.uint8, device="cpu")
        theirs = torch.empty_like(mine)
        rate = _measure(lambda: comm.exchange({other: [mine]}, {other: [theirs]}, label="probe").wait())
        return _check_bytes(theirs, other, rate)

    return _attempt(comm, run)


def try_memory() -> tuple[float | None, str]:
    """Read the other process's memory; run by both ranks."""
    comm = _socket_comm()
    mine = torch.full((PROBE_BYTES,), comm.rank, dtype=torch.uint8, device="cpu")
    cards = comm.all_gather_bytes(json.dumps([os.getpid(), mine.data_ptr()]).encode(), label="probe")
    pid, address = json.loads(cards[1 - comm.rank])
    remote_memory.allow_readers([pid])
    comm.barrier(label="probe")

    def run() -> float:
        if not remote_memory.is_supported():
            raise OSError("this system has no process_vm_readv")
        theirs = torch.empty_like(mine)
        here, there = (theirs.data_ptr(), PROBE_BYTES), (address, PROBE_BYTES)
        rate = _measure(lambda: remote_memory.read_memory(pid, [there], [here]))
        return _check_bytes(theirs, 1 - comm.rank, rate)

    found = _attempt(comm, run)
    remote_memory.allow_readers([])
    return found


def _measure(move: Callable[[], object]) -> float:
    """Bytes per second, the best of a few: the first one touches fresh memory."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        move()
        times.append(time.perf_counter() - start)
    return PROBE_BYTES / min(times)


def _check_bytes(received: Tensor, expected: int, rate: float) -> float:
    if not bool((received == expected).all()):
        raise ValueError("other bytes arrived than were sent")
    return rate


def try_cuda_ipc() -> tuple[float | None, str]:
    """Read the other process's device memory through CUDA's IPC, with a GPU each or on the only one; run by both."""
    comm = _socket_comm()
    shared: list[Tensor] = []
    try:
        device = torch.device("cuda", comm.rank % max(1, torch.cuda.device_count()))
        shared.append(torch.full((PROBE_BYTES,), comm.rank, dtype=torch.uint8, device=device))
        torch.cuda.synchronize(device)
        card = _describe_device_memory(shared[0])
    except Exception as error:
        card = {"problem": _first_line(error)}
    cards = [json.loads(told) for told in comm.all_gather_bytes(json.dumps(card).encode(), label="probe")]

    def run() -> float:
        problem = next((card["problem"] for card in cards if "problem" in card), None)
        if problem is not None:
            raise RuntimeError(problem)
        theirs, mine = cards[1 - comm.rank], shared[0]
        memory = CudaMemory(mine.device)
        segment = memory.open(bytes.fromhex(theirs["handle"]), theirs["size"])
        received = torch.empty_like(mine)

        def read() -> None:
            received.copy_(segment[theirs["at"] : theirs["at"] + PROBE_BYTES])
            torch.cuda.synchronize(mine.device)

        rate = _measure(read)
        memory.close(segment)
        return _check_bytes(received, 1 - comm.rank, rate)

    return _attempt(comm, run)


def _describe_device_memory(tensor: Tensor) -> dict[str, Any]:
    memory = CudaMemory(tensor.device)
    segment = memory.find_segment(tensor.data_ptr())
    if segment is None:
        raise RuntimeError("the memory of this process has no handle for others")
    at = tensor.data_ptr() - segment.start
    return {"handle": memory.export(segment).hex(), "size": segment.size, "at": at}


def try_nccl() -> tuple[float | None, str]:
    """Sum a tensor over two GPUs with nccl; run by both ranks."""
    comm = _socket_comm()

    def run() -> None:
        device = torch.device("cuda", comm.rank)
        torch.cuda.set_device(device)
        group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_SECONDS), backend="nccl")
        total = torch.ones(4, device=device)
        dist.all_reduce(total, group=group)
        if total.tolist() != [2.0] * 4:
            raise ValueError(f"the sum of ones over two ranks is {total.tolist()}")

    return _attempt(comm, run)


def read_memory_limits() -> tuple[int | None, bool]:
    """What the kernel says about reading memory: Yama's ptrace_scope (None without Yama), and CAP_SYS_PTRACE."""
    scope, status = Path("/proc/sys/kernel/yama/ptrace_scope"), Path("/proc/self/status")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(), re.M) if status.exists() else None
    return (
        int(scope.read_text()) if scope.exists() else None,
        capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1),
    )
