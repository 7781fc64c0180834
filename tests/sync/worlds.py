"""Two worlds of threads that run at the same time, and tensors whose values say where they belong."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import shardwise
from shardwise.comm import Comm, LocalComm
from tests.device import DEVICE

TOKEN = "a-token-of-the-tests"
LIMIT = 120.0


def alone() -> Comm:
    """The comm of a world of one rank."""
    return LocalComm.alone()


def free_address() -> str:
    """An address on the loopback interface where nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run_worlds(*worlds: tuple[Callable[..., Any], int]) -> list[list[Any]]:
    """Run several worlds at once, each a function of its comm and its number of ranks; the first error is raised."""

    def start() -> None:
        if DEVICE != "cpu":
            torch.set_default_device(DEVICE)  # of this thread

    with ThreadPoolExecutor(len(worlds), initializer=start) as pool:
        jobs = [pool.submit(shardwise.run_local, fn, size, timeout=LIMIT) for fn, size in worlds]
        return [job.result(LIMIT) for job in jobs]


def whole(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that differ at every index and by seed, small enough to be exact in every float type used here."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 7 + seed * 3) % 251).to(dtype).reshape(tuple(shape))


def laid_out(value: Tensor, spec: str, comm: Comm) -> Tensor:
    """A tensor in a layout, every rank taking its part of a value that all know; "plain": the value itself."""
    return value.clone() if spec == "plain" else shardwise.shard(value, spec, src_rank=None)


def gathered(x: Tensor) -> Tensor:
    """The whole value."""
    return x.full() if isinstance(x, shardwise.ShardedTensor) else x


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """The local tensors of this rank."""
    return x.local_parts if isinstance(x, shardwise.ShardedTensor) else (x,)
