"""Programs in processes of their own: nothing remembered from one run reaches the next, and a crash ends one only.

Children are forked from a server that has loaded everything and run nothing. A child runs programs one after the other
and reports each; one that is silent for too long is killed, and the programs left over get a new child.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from shardwise import CommError
from shardwise.comm import LocalWorld
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.run import APART, ERROR, LIMIT, Verdict, run_on_process, run_on_threads, worst

GRACE = 60.0  # beyond the limit of one collective: a busy machine is slow, not stuck
_PRELOAD = ["shardwise.testing.fuzz", "sympy", "torch._dynamo"]  # the last two are what torch loads at a first call


def run_isolated(programs: Sequence[Program], limit: float = LIMIT) -> Iterator[Verdict]:
    """Run programs one after the other in a new process, ranks as its threads; yield the verdict of each.

    In a script, call it under `if __name__ == "__main__"`: the new process imports the script.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    left = list(programs)
    while left:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_serve, args=([p.to_json() for p in left], limit, theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            while left:
                verdict = _receive(ours, limit + GRACE)
                left.pop(0)
                if verdict is None:
                    child.kill()
                    child.join()
                    yield _silent(child.exitcode, limit + GRACE)
                    break
                yield verdict
        finally:
            child.kill()
            child.join()
            ours.close()


def _receive(pipe: Connection, limit: float) -> Verdict | None:
    try:
        return pipe.recv() if pipe.poll(limit) else None
    except (EOFError, OSError):
        return None


def _silent(code: int | None, limit: float) -> Verdict:
    if code == -9:  # by us
        return Verdict(APART, f"did not end within {limit:g} s")
    return Verdict(ERROR, f"the process ended with exit code {code}")


def _serve(texts: list[str], limit: float, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for text in texts:
        pipe.send(run_on_threads(Program.from_json(text), limit))


class ProcessRanks:
    """Worlds of spawned ranks, one for each number of ranks, that run programs; a world that breaks starts again."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._worlds: dict[int, LocalWorld] = {}

    def __enter__(self) -> ProcessRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for world in self._worlds.values():
            world.close()

    def run(self, program: Program) -> Verdict:
        """Run a program on as many processes as it has ranks."""
        if program.ranks not in self._worlds:
            self._worlds[program.ranks] = LocalWorld(program.ranks, timeout=self._limit)
        world = self._worlds[program.ranks]
        try:
            return worst(world.run(_on_process, program.to_json(), limit=self._limit + GRACE))
        except CommError as error:
            world.close()
            return Verdict(APART, str(error).splitlines()[0])

    def run_afresh(self, program: Program) -> Verdict:
        """Run a program on ranks that have run nothing before."""
        if program.ranks in self._worlds:
            self._worlds[program.ranks].close()
        return self.run(program)


def _on_process(text: str) -> Verdict:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return run_on_process(Program.from_json(text))
