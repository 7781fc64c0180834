"""Run many programs, count what ran and what was refused, and shrink what failed to one script for each cause.

Programs run in processes of their own: nothing remembered from one run reaches the next, and a crash ends one only.
Children are forked from a server that has loaded everything and run nothing. A child runs programs one after the other
and reports each; one that is silent for too long is killed, and the programs left over get a new child.
"""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from shardwise import CommError
from shardwise.comm import LocalWorld
from tools.fuzz.generate import random_program
from tools.fuzz.program import Program, script, shrink
from tools.fuzz.run import APART, ERROR, LIMIT, Verdict, run_on_process, run_on_threads, worst

GRACE = 60.0  # beyond the limit of one collective: a busy machine is slow, not stuck
_PRELOAD = ["tools.fuzz", "sympy", "torch._dynamo"]  # the last two are what torch loads at a first call


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


BATCH = 25
TRIES_ON_PROCESSES = 25  # starting ranks costs seconds


@dataclass(frozen=True)
class Finding:
    """A failure: the seed of its program, the smallest program that fails alike, and how that one ends."""

    seed: int
    program: Program
    verdict: Verdict
    alone: bool = True

    @property
    def cause(self) -> tuple[str, str]:
        """What tells one cause from another: the error without names and numbers, else the operator that is wrong."""
        error = re.search(r"\w+Error: [^']*", self.verdict.text)
        text = re.sub(r"\b(aten|prims)\.[\w.]+|\[[^]]*\]|\(.*?\)|\d+", "", error[0])[:45] if error else ""
        return self.verdict.kind, text or self.program.steps[-1].operator

    def __str__(self) -> str:
        note = "" if self.alone else "\n(only after other programs in the same process; not shrunk)"
        return f"seed {self.seed}: {self.verdict}{note}\n\n{script(self.program)}"


@dataclass
class Tally:
    """What a run of many programs found."""

    programs: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def count(self, verdict: Verdict) -> None:
        """Add one program's verdict."""
        self.programs += 1
        self.ran.update(verdict.ran)
        for operator, reason in verdict.refused:
            self.refused[operator] += 1
            self.reasons.setdefault(operator, reason)

    def lines(self, most: int = 20) -> list[str]:
        """A summary: numbers first, then the operators that were refused most often, with one reason each."""
        ran, refused = sum(self.ran.values()), sum(self.refused.values())
        head = (
            f"{self.programs} programs, {ran} statements ran, {refused} were refused "
            f"({100 * refused / max(1, ran + refused):.1f} %), {self.failures} programs failed "
            f"({len(self.findings)} causes)"
        )
        rows = [
            f"  {count:4d} of {count + self.ran[name]:4d}  {name}: {self.reasons[name].splitlines()[0][:160]}"
            for name, count in self.refused.most_common(most)
        ]
        return [head, "refused:", *rows] if rows else [head]


def run_seeds(
    seeds: Iterable[int],
    processes: bool = False,
    report: Callable[[str], None] = print,
    *,
    empty_ranks: bool = False,
    compiled: bool = False,
) -> Tally:
    """Run the programs of all seeds; each new cause of failure is shrunk and reported."""
    tally = Tally()
    with ProcessRanks() as ranks:
        for batch in _batches(seeds):
            programs = [replace(random_program(seed, empty_ranks), compiled=compiled) for seed in batch]
            verdicts = map(ranks.run, programs) if processes else run_isolated(programs)
            for seed, program, verdict in zip(batch, programs, verdicts, strict=True):
                tally.count(verdict)
                if verdict.failed:
                    tally.failures += 1
                    if Finding(seed, program, verdict).cause not in tally.findings:  # what is known is not shrunk again
                        _add(tally, _minimise(seed, program, verdict, ranks if processes else None), report)
    return tally


def _batches(seeds: Iterable[int]) -> Iterator[list[int]]:
    numbers = iter(seeds)
    while batch := list(islice(numbers, BATCH)):
        yield batch


def _add(tally: Tally, finding: Finding, report: Callable[[str], None]) -> None:
    if finding.cause not in tally.findings:
        tally.findings[finding.cause] = finding
        report(str(finding))


def _minimise(seed: int, program: Program, verdict: Verdict, ranks: ProcessRanks | None) -> Finding:
    """The smallest program that fails in the same manner, each try in a process that has run nothing."""

    def alone(candidate: Program) -> Verdict:
        found = next(run_isolated([candidate]))
        return found if found.failed or ranks is None else ranks.run_afresh(candidate)

    found = alone(program)
    if not found.failed:
        return Finding(seed, program, verdict, alone=False)
    on_threads = ranks is None or next(run_isolated([program])).failed
    fails_alike = _alike(found, on_threads, ranks)
    smallest = shrink(program, fails_alike) if on_threads else shrink(program, fails_alike, TRIES_ON_PROCESSES)
    return Finding(seed, smallest, alone(smallest))


def _alike(wanted: Verdict, on_threads: bool, ranks: ProcessRanks | None) -> Callable[[Program], bool]:
    def fails(candidate: Program) -> bool:
        found = next(run_isolated([candidate])) if on_threads or ranks is None else ranks.run_afresh(candidate)
        return found.kind == wanted.kind

    return fails
