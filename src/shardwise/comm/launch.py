"""Start local ranks as processes and run functions on them.

1. The parent hosts the store through which ranks find each other, so that no rank's death takes it away.
2. Ranks are spawned (never forked), talk over the loopback interface, and end when the parent ends.
3. Whatever happens, they are stopped: asked to end, then terminated, then killed. Ctrl-C reaches the parent alone,
   which stops them; ranks of a terminal would else each print where they were.

Which transports work between two processes of this host? Each is tried by two ranks, with a time-out.

1. Every probe is a function that both ranks run. It returns what it measured, or why it failed; it ends with a barrier,
   so that no rank ends while the other one still reads its memory.
2. A rank that hangs or dies is stopped by the world that started it, and the probe counts as failed.

One spawned rank: joins the world, then runs the functions its parent sends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._text import shorten_traceback
from shardwise._torch import TCPStore
from shardwise.comm.agree import gather_values
from shardwise.comm.current import RankBody, given_world, read_ranks, use_comm
from shardwise.comm.faults import report_exception
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import DEFAULT_TIMEOUT, CommError
from shardwise.comm.transports import host_memory as remote_memory
from shardwise.comm.transports.device_memory import CudaMemory

T = TypeVar("T")
_STOP_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_IMPORTED_AGAIN = 117  # the exit code of a rank whose program starts ranks when it is imported
_AFTERMATH = 10.0  # how long the other ranks have to report how they ended, once one has failed


def launch(
    fn: Callable[..., T],
    world_size: int = 4,
    *args: Any,
    nprocs: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    device: str | None = None,
) -> list[T]:
    """Run `fn(*args)` on `world_size` ranks that are new local processes; return their results in rank order.

    Inside, torch.distributed is initialised and `default_comm()` is the world; a function whose first parameter is
    `comm` is passed it, as by `run_local`. `nprocs` is another name for `world_size`. `fn` must be importable (a
    function of a module, and in a script started under `if __name__ == "__main__"`). If a rank raises, the others are
    stopped and its exception is raised here with a note that has its rank and traceback.

    With `device="cuda"` each rank's comm is for its GPU, which ranks share where there are more of them.
    Under torchrun the world already exists: `fn` runs in this process only and the list has its one result.

    >>> launch(os.cpu_count, 2)  # doctest: +SKIP
    [8, 8]
    """
    body, world_size = read_ranks("launch", fn, world_size if nprocs is None else nprocs, args)
    if given_world() is not None:
        _warn_of_other_size(world_size)
        return [_run_in_given_world(body, args, timeout, _check_device(device))]
    with LocalWorld(world_size, timeout=timeout, device=device) as world:
        return results_of(world.outcomes(body, *args, last=True))


def _warn_of_other_size(nprocs: int) -> None:
    """Say that no ranks are started, where nothing but the variables can have been meant to start them."""
    rank, size = given_world() or (0, 1)
    if size != nprocs and "TORCHELASTIC_RUN_ID" not in os.environ:
        warnings.warn(
            f"launch with {nprocs} processes starts none: RANK={rank} and WORLD_SIZE={size} are set, so this process "
            "is taken for one of a world that exists; remove these variables to start ranks",
            stacklevel=3,
        )


def _check_device(device: str | None) -> str | None:
    """Refuse a device that no rank could use before any rank is started."""
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch {torch.__version__} sees no GPU here; leave device out for the CPU")
    return device


def _run_in_given_world(fn: Callable[..., T], args: tuple[Any, ...], timeout: float, device: str | None) -> T:
    if dist.is_initialized():
        return _run_on_device(fn, args, timeout, device)
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # nccl takes one rank per GPU; ranks that share one exchange through gloo.
    own_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus and own_gpu else "gloo")
    try:
        return _run_on_device(fn, args, timeout, device)
    finally:
        dist.destroy_process_group()


def _run_on_device(fn: Callable[..., T], args: tuple[Any, ...], timeout: float, device: str | None) -> T:
    if device is None:
        return fn(*args)
    with use_comm(ProcessGroupComm.of(timeout=timeout, device=device)):
        return fn(*args)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended a task: with a value or with an error.

    >>> Outcome(1, error=ValueError("rank 1 has no data")).error is None
    False
    """

    rank: int
    value: Any = None
    error: BaseException | None = None


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """Return the values, or raise the error that came first in cause: what the others report follows from it."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return [outcome.value for outcome in outcomes]
    first = min(failed, key=lambda outcome: isinstance(outcome.error, CommError))
    assert first.error is not None
    raise first.error


class LocalWorld:
    """A world of spawned gloo ranks that stays up between calls; it starts at the first call.

    With `device="cuda"` each rank's comm is for its GPU, which ranks share where there are more of them.

    with LocalWorld(4) as world:
        world.run(fn, 1)
        world.run(fn, 2)

    >>> with LocalWorld(2) as world:  # doctest: +SKIP
    ...     world.run(os.cpu_count)
    [8, 8]
    """

    # New interpreters: a copy of this process would lack its threads.
    _context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")

    def __init__(self, nprocs: int = 4, *, timeout: float = DEFAULT_TIMEOUT, device: str | None = None) -> None:
        if nprocs < 1:
            raise ValueError(f"a world of {nprocs} processes: pass at least 1")
        self._size, self._timeout, self._device = nprocs, timeout, _check_device(device)
        self._address = LOOPBACK
        self._prepare: Callable[[int], None] | None = None
        self._store: TCPStore | None = None
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def run(self, fn: Callable[..., T], *args: Any, limit: float | None = None) -> list[T]:
        """Call `fn(*args)` on every rank and return the results in rank order, within `limit` seconds if given."""
        return results_of(self.outcomes(fn, *args, limit=limit))

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, limit: float | None = None, last: bool = False
    ) -> list[Outcome]:
        """Call `fn(*args)` on every rank and return how each ended; a world that lost a rank is restarted next time."""
        task = _pickle_task(WorkerTask(fn, args, last))
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            _send_to_worker(pipe, task)
        outcomes = self._collect(limit)
        if len(outcomes) < self._size or any(_is_lost(outcome) for outcome in outcomes.values()):
            self._stop()
        missing = CommError("stopped: it had not ended when its world was shut down")
        return [outcomes.get(rank, Outcome(rank, error=missing)) for rank in range(self._size)]

    def close(self) -> None:
        """End all ranks."""
        for _, pipe in self._ranks:
            _send_to_worker(pipe, pickle.dumps(None))
        deadline = time.monotonic() + _STOP_GRACE_SECONDS
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self._stop()

    def _start(self) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # Python asks the same, at more length
            _exit_now(_IMPORTED_AGAIN)
        self._store = self._open_store()
        world = WorldConfig(self._size, self._address, self._store.port, self._timeout, self._device, self._prepare)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        with _hold_interrupts():
            for rank in range(self._size):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=worker_main, args=(rank, world, theirs), name=f"rank {rank}")
                process.start()
                theirs.close()
                self._ranks.append((process, ours))

    def _open_store(self) -> TCPStore:
        return host_store(self._address)

    def _collect(self, limit: float | None) -> dict[int, Outcome]:
        """Gather replies until all have come, the limit is over, or the grace after a first failure is."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit if limit is not None else None
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            left = _LOOK_SECONDS if deadline is None else max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
            # a child that a rank forked keeps its pipe open, so the processes are looked at as well
            ready = wait(list(waiting), left) or [
                p for p, r in waiting.items() if self._ranks[r][0].exitcode is not None
            ]
            if not ready and deadline is not None and time.monotonic() >= deadline:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcomes[rank] = self._outcome(rank, pipe)
                if outcomes[rank].error is not None:
                    grace = time.monotonic() + _AFTERMATH + (self._timeout if _is_lost(outcomes[rank]) else 0.0)
                    deadline = min(deadline or grace, grace)
        return outcomes

    def _outcome(self, rank: int, pipe: Connection) -> Outcome:
        try:
            if not pipe.poll():
                raise EOFError  # its process has ended, and what it forked says nothing
            reply: WorkerReply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._ranks[rank][0]
            process.join(_STOP_GRACE_SECONDS)
            return Outcome(rank, error=_dead_rank_error(rank, process.exitcode))
        if reply.error is not None:
            reply.error.add_note(f"on rank {rank} of {self._size}:\n{reply.trace}")
        return Outcome(rank, reply.value, reply.error)

    def _stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.terminate()
        deadline = time.monotonic() + _STOP_GRACE_SECONDS
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        self._ranks, self._store = [], None


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back from this thread, and for good from the processes that it starts meanwhile."""
    resource_tracker.ensure_running()  # it would let Ctrl-C through again when it starts with the first process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def host_store(address: str) -> TCPStore:
    """A store that listens on one address alone; torch's own socket would listen on all of them."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


class DeadRankError(CommError):
    """A rank's process ended without a reply."""


def _dead_rank_error(rank: int, code: int | None) -> CommError:
    if code == _IMPORTED_AGAIN:
        problem = "each rank is a new process that imports the program, and the program starts ranks as it is imported"
        return DeadRankError(f'{problem}; put the call of launch under `if __name__ == "__main__":`', (rank,))
    return DeadRankError(f"rank {rank} ended with exit code {code} and without a result", (rank,))


def _is_lost(outcome: Outcome) -> bool:
    return isinstance(outcome.error, DeadRankError)


def _send_to_worker(pipe: Connection, data: bytes) -> None:
    try:
        pipe.send_bytes(data)
    except OSError:
        return  # the rank has ended already


def _pickle_task(task: WorkerTask) -> bytes:
    try:
        return pickle.dumps(task)
    except Exception as problem:
        fn = task.fn.fn if isinstance(task.fn, RankBody) else task.fn
        raise ValueError(
            f"{getattr(fn, '__qualname__', fn)} or its arguments cannot be sent to another process ({problem}); "
            "use a function defined at the top of a module"
        ) from None


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


def probe_transports(gpus: int) -> Iterator[ProbeResult]:
    """Try all transports that two ranks of this host can have, with `gpus` GPUs, one by one; starts two processes."""
    probes: dict[str, Callable[[], tuple[float | None, str]]] = {"sockets": try_sockets, "memory": try_memory}
    probes |= {"cuda ipc": try_cuda_ipc} if gpus else {}
    probes |= {"nccl": try_nccl} if gpus > 1 and dist.is_nccl_available() else {}
    with LocalWorld(2, timeout=TIMEOUT_SECONDS) as world:
        for name, probe in probes.items():
            yield _run_probe(world, name, probe)


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
    infos = gather_values(comm, [os.getpid(), mine.data_ptr()], label="probe")
    pid, address = infos[1 - comm.rank]
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
        info = _describe_device_memory(shared[0])
    except Exception as error:
        info = {"problem": _first_line(error)}
    infos = gather_values(comm, info, label="probe")

    def run() -> float:
        problem = next((info["problem"] for info in infos.values() if "problem" in info), None)
        if problem is not None:
            raise RuntimeError(problem)
        theirs, mine = infos[1 - comm.rank], shared[0]
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
        reply = WorkerReply(error=error, trace="".join(traceback.format_exception(shorten_traceback(error))))
    if last and reply.error is not None:
        report_exception(rank, reply.error)
    pipe.send_bytes(_pickle_reply(reply))
    if last and reply.error is not None:
        _exit_now()
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
        _exit_now()


def _exit_now(code: int = 1) -> None:
    """Exit at once: the other ranks see the closed connections."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
