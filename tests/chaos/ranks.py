"""Do ranks that die, hang, resume, raise, or call something else ever fool the others?

`python -m tests.chaos.ranks --faults 500` runs small worlds of 2 to 4 processes, each with a random program of moves,
reductions, broadcasts and saves, and one fault at a random point of it. Worlds are forked from one process that has
imported everything; ranks with a GPU start as new processes, since CUDA cannot be used in forks. Everything follows
from the seed, apart from the instant at which a signal arrives.

What is counted: ranks that hang beyond the time-out and 5 s, ranks that return normally with wrong data, errors that do
not name a rank, and the longest time that a call took to fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise
from shardwise import CheckpointError, ChunkSpec
from shardwise.comm import CommError, DisagreementError, ProcessGroupComm
from shardwise.comm.current import use_comm
from shardwise.comm.faults import report_exception
from tests.device import DEVICE
from tests.moving import local_parts, same_bytes
from tests.world import set_up_comm

GRACE = 5.0
FEW_LINES = 40  # torch prints a trace of 17 when the store's host dies in the middle of a call
SIGNALS = ("kill", "stop", "pause", "resume late")
CALLS = ("raise", "exit", "drop", "skip", "label", "dtype", "size", "reduction")
FAULTS = SIGNALS + CALLS
ERRORS = (CommError, DisagreementError, CheckpointError, ValueError)
Operation = tuple[str, int, int, bool]  # kind, number, a random number, whether it is large


class WrongDataError(Exception):
    """A call returned normally, and its result is not what was sent."""


@dataclass(frozen=True)
class RankCase:
    """One world, its program and its fault; `delay` is the time from the start of the operation to the signal."""

    seed: int
    ranks: int
    shared: bool
    hosted: bool
    fault: str
    victim: int
    at: int
    delay: float
    program: tuple[Operation, ...]


def draw_case(seed: int) -> RankCase:
    """The case of a seed."""
    chance = random.Random(seed)
    ranks, fault = chance.randint(2, 4), FAULTS[seed % len(FAULTS)]
    kinds = ("move", "limited", "reduce", "broadcast", "gather", "scatter", "save")
    program = [(chance.choice(kinds), k, chance.randrange(1000), chance.random() < 0.5) for k in range(6)]
    at = chance.randrange(len(program))
    if fault in ("label", "dtype", "size", "reduction", "drop"):
        kind = "limited" if fault == "drop" else "reduce" if fault == "reduction" else chance.choice(kinds[2:5])
        program[at] = (kind, *program[at][1:])
    delay = chance.choice((0.0, 0.0005, 0.002, 0.005, 0.02))
    return RankCase(
        seed,
        ranks,
        chance.random() < 0.5,
        chance.random() < 0.5,
        fault,
        chance.randrange(ranks),
        at,
        delay,
        tuple(program),
    )


class Program:
    """What one rank does; every operation checks its own result."""

    def __init__(self, case: RankCase, comm: ProcessGroupComm, folder: Path) -> None:
        self.case, self.comm, self.folder = case, comm, folder
        self.used: list[Tensor] = []

    def run(self, operation: Operation, fault: str | None = None) -> None:
        """One operation, or what the victim makes of it."""
        if fault == "raise":
            raise RuntimeError("a rank's own exception")
        if fault == "exit":
            os._exit(0)
        if fault == "skip":
            return
        kind, number, chance, large = operation
        call: Callable[..., None] = getattr(self, kind)
        call(number, chance, large, fault)

    def spec(self, chance: int) -> Any:
        ranks = self.comm.ranks
        turned = ranks[chance % len(ranks) :] + ranks[: chance % len(ranks)]
        return ChunkSpec(chance % 2, turned)

    def values(self, number: int, large: bool) -> Tensor:
        shape = (1024, 257) if large else (24, 10)
        return torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + 7 * number

    def source(self, number: int, chance: int, large: bool) -> tuple[Any, Tensor]:
        whole = self.values(number, large)
        layout = self.spec(chance).layout(whole.shape)
        parts = local_parts(layout, self.comm.rank, whole)
        self.used += parts
        return shardwise.from_local(parts, layout, comm=self.comm), whole

    def expect(self, moved: Any, whole: Tensor) -> None:
        wanted = local_parts(moved.sharding, self.comm.rank, whole)
        if not all(map(same_bytes, moved.local_tensors(), wanted)):
            raise WrongDataError("a move")

    def move(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x, whole = self.source(number, chance, large)
        self.expect(x.redistribute(self.spec(chance // 7 + 1)), whole)

    def limited(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x, whole = self.source(number, chance, large)
        handle = x.redistribute(self.spec(chance + 1), async_op=True, max_buffer_bytes=whole.nbytes // 4)
        if fault != "drop":
            self.expect(handle.wait(), whole)

    def tensor(self, number: int, large: bool, fault: str | None) -> Tensor:
        length = (200_000 if large else 30) + (3 if fault == "size" else 0)
        dtype = torch.int32 if fault == "dtype" else torch.float32
        made = torch.full((length,), self.comm.rank + number, dtype=dtype)
        self.used.append(made)
        return made

    def reduce(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x = self.tensor(number, large, fault)
        op: Any = "max" if fault == "reduction" else "sum"
        self.comm.all_reduce(x, op, label="other" if fault == "label" else f"reduce {number}").wait()
        self.expect_all(x, sum(rank + number for rank in self.comm.ranks))

    def broadcast(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x, src = self.tensor(number, large, fault), chance % len(self.comm.ranks)
        self.comm.broadcast(x, src, label="other" if fault == "label" else f"broadcast {number}").wait()
        self.expect_all(x, src + number)

    def gather(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x = self.tensor(number, large, fault)
        parts = self.comm.all_gather(x, label="other" if fault == "label" else f"gather {number}")
        for rank, part in zip(self.comm.ranks, parts, strict=True):
            self.expect_all(part, rank + number)

    def scatter(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x = self.tensor(number, large, fault)
        out = x.new_empty(len(x))
        self.comm.reduce_scatter_into(out, x.repeat(len(self.comm.ranks)), label=f"scatter {number}").wait()
        self.expect_all(out, sum(rank + number for rank in self.comm.ranks))

    def save(self, number: int, chance: int, large: bool, fault: str | None) -> None:
        x, whole = self.source(number, chance, large)
        shardwise.save({"x": x, "number": number}, self.folder / "c")
        with shardwise.open(self.folder / "c") as opened:
            if opened.values()["number"] == number and not torch.equal(opened["x"].read().to(whole.device), whole):
                raise WrongDataError("a save")

    def expect_all(self, x: Tensor, value: float) -> None:
        if not bool((x == value).all()):
            raise WrongDataError(f"{x[0].item()} in place of {value}")

    def spoil(self) -> None:
        """Go on after a failure as a program would: memory that was lent gets other values."""
        for tensor in self.used:
            tensor.fill_(-1)


def run_rank(case: RankCase, rank: int, store: Any, folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
    """One rank of a case, in a process of its own; it reports what became of it."""
    timeout = float(os.environ["CHAOS_TIMEOUT"])
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=limit)
    comm = set_up_comm(timeout, shared=case.shared)
    program = Program(case, comm, folder)
    last, began = ("barrier", -1, 0, False), time.monotonic()
    try:
        with use_comm(comm):
            for place, operation in enumerate(case.program):
                last, began = operation, time.monotonic()
                mine = rank == case.victim and place == case.at
                if mine:
                    say({"event": "begin"})
                program.run(operation, case.fault if mine and case.fault in CALLS else None)
            last, began = ("barrier", -1, 0, False), time.monotonic()
            comm.barrier(label="end")
        say({"event": "done"})
    except WrongDataError as error:
        say({"event": "wrong", "text": str(error), "operation": last})
    except ERRORS as error:
        program.spoil()
        seconds = time.monotonic() - began
        say({"event": "failed", "text": str(error), "operation": last, "seconds": seconds})
        time.sleep(timeout + 2 if case.fault == "resume late" else 0.5)
    except RuntimeError as error:
        report_exception(rank, error)
        say({"event": "raised", "text": str(error)})


def fork_rank(case: RankCase, rank: int, listener: socket.socket, folder: Path, out: int) -> int:
    """Start a rank; its messages go to the descriptor `out`, one line of JSON each."""
    child = os.fork()
    if child:
        return child
    try:
        trace = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(trace, 2)
        if DEVICE == "cuda":
            start_again(case, rank, listener, folder, out)
        serve_rank(case, rank, listener, folder, out)
    finally:
        os._exit(0)


def start_again(case: RankCase, rank: int, listener: socket.socket, folder: Path, out: int) -> None:
    """Become a new process that serves this rank."""
    for descriptor in (listener.fileno(), out):
        os.set_inheritable(descriptor, True)
    given = [case.seed, rank, listener.fileno(), folder, out]
    command = [sys.executable, "-W", "ignore", "-m", "tests.chaos.ranks", "--rank", *map(str, given)]
    os.execv(sys.executable, command)


def serve_rank(case: RankCase, rank: int, listener: socket.socket, folder: Path, out: int) -> None:
    try:
        port = listener.getsockname()[1]
        store: Any = dist.FileStore(str(folder / "store"), case.ranks)
        if case.hosted:
            served = {"is_master": True, "master_listen_fd": os.dup(listener.fileno())} if rank == 0 else {}
            store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, use_libuv=True, **served)
        listener.close()  # a port that others keep open would hide that its host has died
        run_rank(case, rank, store, folder, lambda message: write_line(out, message))
    except BaseException as error:
        write_line(out, {"event": "crashed", "text": f"{type(error).__name__}: {error}"})
    os._exit(0)


def write_line(out: int, message: dict[str, Any]) -> None:
    os.write(out, json.dumps(message).encode() + b"\n")


def run_case(case: RankCase, timeout: float) -> list[dict[str, Any] | None]:
    """Run a case; how each rank ended: its last message, None if it neither ended nor reported in time."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-chaos-"))
    listener = socket.create_server(("127.0.0.1", 0))
    pipes = [os.pipe() for _ in range(case.ranks)]
    children = [fork_rank(case, rank, listener, folder, pipes[rank][1]) for rank in range(case.ranks)]
    for _, out in pipes:
        os.close(out)
    listener.close()
    try:
        found = watch_ranks(case, children, [pipe for pipe, _ in pipes], timeout)
        for rank, message in enumerate(found):
            if message is not None:
                message["lines"] = len((folder / f"stderr-{rank}").read_text().splitlines())
        return found
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for pipe, _ in pipes:
            os.close(pipe)
        shutil.rmtree(folder, ignore_errors=True)


def watch_ranks(case: RankCase, children: list[int], pipes: list[int], timeout: float) -> list[dict[str, Any] | None]:
    """Send the signals of the case, and read messages until all ranks have ended that can."""
    found: list[dict[str, Any] | None] = [None] * case.ranks
    waiting = dict(zip(pipes, range(case.ranks), strict=True))
    deadline = time.monotonic() + 120  # of the start
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(list(waiting), [], [], 0.5)
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            if not data:
                rank = waiting.pop(pipe)
                found[rank] = found[rank] or {"event": "crashed", "text": "the process ended without a word"}
                continue
            for line in data.splitlines():
                message = json.loads(line)
                if message["event"] == "begin":
                    send_signals(case, children[case.victim], timeout)
                    deadline = time.monotonic() + 4 * timeout + 2 * GRACE
                else:
                    found[waiting[pipe]] = message
        if case.fault == "stop" and all(found[rank] for rank in waiting.values() if rank != case.victim):
            break
    return found


def send_signals(case: RankCase, victim: int, timeout: float) -> None:
    if case.fault not in SIGNALS:
        return
    time.sleep(case.delay)
    os.kill(victim, signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)
    if case.fault == "pause":
        time.sleep(min(1.0, timeout / 4))
    if case.fault == "resume late":
        time.sleep(timeout + 1.5)
    if case.fault in ("pause", "resume late"):
        os.kill(victim, signal.SIGCONT)


def judge(case: RankCase, found: list[dict[str, Any] | None], timeout: float) -> Counter[str]:
    """Count what went wrong in a case, and how its ranks ended."""
    counts: Counter[str] = Counter(cases=1)
    for rank, message in enumerate(found):
        event = "silent" if message is None else message["event"]
        counts[event] += rank != case.victim
        if rank == case.victim and case.fault in ("kill", "stop", "exit", "raise"):
            continue
        text = "" if message is None else message.get("text", "")
        counts["hangs"] += message is None
        counts["wrong data"] += event == "wrong"
        counts["crashes"] += event in ("crashed", "raised")
        counts["floods of text"] += message is not None and message.get("lines", 0) > FEW_LINES
        if event == "failed":
            assert message is not None
            counts["unnamed"] += not re.search(r"\branks? \d", text)
            counts["late"] += message["seconds"] > timeout + GRACE and case.fault != "resume late"
            counts["false alarms"] += case.fault == "pause"
        same_call = case.fault in ("label", "dtype", "size", "reduction") and event == "done"
        counts["taken for the same call"] += same_call
    return counts


BAD = ("hangs", "wrong data", "unnamed", "late", "false alarms", "crashes", "floods of text", "taken for the same call")


def run_faults(seeds: list[int], timeout: float, side_by_side: int = 1) -> tuple[Counter[str], float]:
    """All cases of these seeds, some side by side in forks of this process: counts, and the slowest failure."""
    os.environ["CHAOS_TIMEOUT"] = str(timeout)
    pipes = []
    for lane in range(side_by_side):
        read, write = os.pipe()
        if os.fork() == 0:
            for seed in seeds[lane::side_by_side]:
                case = draw_case(seed)
                found = run_case(case, timeout)
                counts = judge(case, found, timeout)
                failed = [m for r, m in enumerate(found) if m and m["event"] == "failed" and r != case.victim]
                slowest = max((m["seconds"] for m in failed), default=0.0)
                bad = {name: counts[name] for name in BAD if counts[name]}
                write_line(write, {"counts": counts, "slowest": slowest})
                if bad:
                    print(f"{bad}: {case}\n  {found}", file=sys.stderr, flush=True)
            os._exit(0)
        os.close(write)
        pipes.append(read)
    total: Counter[str] = Counter(dict.fromkeys(BAD, 0))
    slowest = 0.0
    for read in pipes:
        with os.fdopen(read) as lines:
            for line in lines:
                message = json.loads(line)
                total.update(message["counts"])
                slowest = max(slowest, message["slowest"])
        os.wait()
    return total, slowest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--rank", nargs=5, help="serve a rank: seed, rank, listener's descriptor, folder, descriptor")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank:
        seed, rank, listening, folder, out = given.rank
        serve_rank(draw_case(int(seed)), int(rank), socket.socket(fileno=int(listening)), Path(folder), int(out))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = time.monotonic()
    seeds = list(range(given.seed, given.seed + given.faults))
    counts, slowest = run_faults(seeds, given.timeout, given.lanes)
    failures = f"slowest failure {slowest:.1f} s at a time-out of {given.timeout:g} s"
    print(f"rank faults: {dict(counts)}, {failures}, {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(any(counts[name] for name in BAD) or counts["cases"] != given.faults)


if __name__ == "__main__":
    main()
