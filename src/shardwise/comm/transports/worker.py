"""One spawned rank: joins the world, then runs the functions its parent sends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch import TCPStore
from shardwise.comm.current import use_comm
from shardwise.comm.faults import report_exception
from shardwise.comm.process_group import ProcessGroupComm

LOOPBACK = "127.0.0.1"
_SLOW_START = 60.0  # ranks on a busy machine begin seconds apart, however short the time-out of later collectives


@dataclass(frozen=True)
class WorldConfig:
    """What a spawned rank needs to know to join: where the store is, and what to do first."""

    size: int
    address: str
    port: int
    timeout: float
    device: str | None = None
    prepare: Callable[[int], None] | None = None


@dataclass(frozen=True)
class WorkerTask:
    """A function to run; after the last one the process ends, and at once if it raised."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    last: bool


@dataclass(frozen=True)
class WorkerReply:
    """What a rank's function returned or raised."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def worker_main(rank: int, world: WorldConfig, pipe: Connection) -> None:
    """Serve tasks until there are no more."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    if world.prepare is not None:
        world.prepare(rank)
    store = TCPStore(world.address, world.port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=max(world.timeout, _SLOW_START))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=limit)
    if world.device is not None and torch.device(world.device).type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with use_comm(ProcessGroupComm.of(timeout=world.timeout, device=world.device)):
        while _serve(rank, pipe):
            pass
    dist.destroy_process_group()


def _serve(rank: int, pipe: Connection) -> bool:
    """Run one task and reply; return whether to continue."""
    try:
        data = pipe.recv_bytes()
    except EOFError:
        return False
    last = False
    try:
        task: WorkerTask | None = pickle.loads(data)
        if task is None:
            return False
        last = task.last
        reply = WorkerReply(task.fn(*task.args))
    except BaseException as error:
        reply = WorkerReply(error=error, trace=traceback.format_exc())
    if last and reply.error is not None:
        report_exception(rank, reply.error)
    pipe.send_bytes(_pickle_reply(reply))
    if last and reply.error is not None:
        _exit_now(1)
    return not last


def _pickle_reply(reply: WorkerReply) -> bytes:
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)
        return data
    except Exception as problem:
        if reply.error is None:
            text = f"the result of type {type(reply.value).__name__} cannot be pickled: {problem}"
            return pickle.dumps(WorkerReply(error=TypeError(text), trace=""))
        stand_in = RuntimeError(f"{type(reply.error).__name__}: {reply.error}")
        return pickle.dumps(WorkerReply(error=stand_in, trace=reply.trace))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        _exit_now(1)


def _exit_now(code: int) -> None:
    """Exit at once: the other ranks see the closed connections."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
