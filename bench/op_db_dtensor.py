"""The calls of docs/op_db.md on torch's DTensor: two gloo processes that take each call together.

1. A process runs the calls of some operators, tells how each ended, and waits until the other has ended it as well: a
   rank that raises alone must not meet the other one in the next call's collectives.
2. Where one of them does not end a call in time, or its process ends, the world is stopped. The operator counts one
   unclear call more, its other calls are left out, and the next operators go on in a new world.
"""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from bench.op_db_calls import (
    RANKS,
    UNCLEAR,
    WITHOUT_SUMS,
    WRONG,
    Ending,
    Place,
    addend,
    calls,
    end,
    layouts_of,
    name_of,
)
from bench.op_samples import operators

STALLED = 15.0  # seconds without a word: a call takes milliseconds, the start of a world some seconds


def run_dtensors(numbers: Sequence[int], samples: int) -> list[Ending]:
    """How the calls of some operators end on DTensors."""
    found: list[Ending] = []
    left = list(numbers)
    while left:
        ended, problem = 0, None
        for ending in _run_in_a_world(left, samples):
            if isinstance(ending, Ending):
                found.append(ending)
            elif ending is None:
                ended += 1
            else:
                problem = ending
        left = left[ended:]
        if problem is not None and left:
            found.append(Ending(name_of(operators()[left[0]]), "", "call", "", UNCLEAR, problem))
            left = left[1:]
    return found


def _run_in_a_world(numbers: Sequence[int], samples: int) -> Iterator[Ending | str | None]:
    """The endings of calls; None after each operator; last a text, if the world had to be stopped."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        ranks = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            task = (rank, str(Path(folder) / "store"), list(numbers), samples, there)
            ranks.append(context.Process(target=_serve_rank, args=task, daemon=True))
            ranks[-1].start()
            there.close()
            pipes.append(here)
        try:
            yield from _collect(pipes, len(numbers))
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(pipes: Sequence[Connection], operators_left: int) -> Iterator[Ending | str | None]:
    while operators_left:
        if not all(pipe.poll(STALLED) for pipe in pipes):
            yield f"no end within {STALLED:g} s"
            return
        try:
            endings = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(None)
        except (EOFError, OSError):
            yield "a process ended"
            return
        operators_left -= endings[0] is None
        yield _join(endings)


def _join(endings: Sequence[Ending | None]) -> Ending | None:
    """One ending of both ranks: the worse one; ranks that end differently are wrong together."""
    first = endings[0]
    if first is None or len({e.kind for e in endings if e is not None}) == 1:
        return first
    text = " / ".join(f"{e.kind}: {e.text}" for e in endings if e is not None)
    return Ending(first.operator, first.dtype, first.form, first.layout, WRONG, text)


def _serve_rank(rank: int, store: str, numbers: Sequence[int], samples: int, pipe: Connection) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place = dist.FileStore(store, RANKS)  # type: ignore[attr-defined]  # torch does not list it
    dist.init_process_group("gloo", store=place, rank=rank, world_size=RANKS, timeout=timedelta(seconds=2 * STALLED))
    for number in numbers:
        for call, wanted in calls(operators()[number], samples):
            for layout in (name for name in layouts_of(call) if name != "uneven"):
                pipe.send(end(call, wanted, layout, _place_as(layout), _full))
                pipe.recv()
        pipe.send(None)
        pipe.recv()


@cache
def _device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _place_as(layout: str) -> Place:
    mesh = _device_mesh()
    rank = mesh.get_local_rank()

    def place(tensor: Tensor) -> Tensor:
        pending = layout == "P" and tensor.dtype not in WITHOUT_SUMS
        whole = tensor.ndim == 0 or layout in ("R", "P")
        dim = 0 if layout == "S(0)" else tensor.ndim - 1
        placement = Partial() if pending else Replicate() if whole else Shard(dim)
        part = addend(tensor, rank) if pending else tensor if whole else _chunk(tensor, dim, rank)
        stride = tensor.contiguous().stride()
        laid = DTensor.from_local(part.clone(), mesh, [placement], run_check=False, shape=tensor.shape, stride=stride)
        return laid.detach()

    return place


def _chunk(tensor: Tensor, dim: int, rank: int) -> Tensor:
    chunks = tensor.chunk(RANKS, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
