"""Run many programs, count what ran and what was refused, and shrink what failed to one script for each cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from shardwise.testing.fuzz.generate import random_program
from shardwise.testing.fuzz.isolate import ProcessRanks, run_isolated
from shardwise.testing.fuzz.program import Program, script
from shardwise.testing.fuzz.run import Verdict
from shardwise.testing.fuzz.shrink import shrink

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


def run_seeds(seeds: Iterable[int], processes: bool = False, tell: Callable[[str], None] = print) -> Tally:
    """Run the programs of all seeds; each new cause of failure is shrunk and told."""
    tally = Tally()
    with ProcessRanks() as ranks:
        for batch in _batches(seeds):
            programs = [random_program(seed) for seed in batch]
            verdicts = map(ranks.run, programs) if processes else run_isolated(programs)
            for seed, program, verdict in zip(batch, programs, verdicts, strict=True):
                tally.count(verdict)
                if verdict.failed:
                    tally.failures += 1
                    if Finding(seed, program, verdict).cause not in tally.findings:  # what is known is not shrunk again
                        _add(tally, _minimise(seed, program, verdict, ranks if processes else None), tell)
    return tally


def _batches(seeds: Iterable[int]) -> Iterator[list[int]]:
    numbers = iter(seeds)
    while batch := list(islice(numbers, BATCH)):
        yield batch


def _add(tally: Tally, finding: Finding, tell: Callable[[str], None]) -> None:
    if finding.cause not in tally.findings:
        tally.findings[finding.cause] = finding
        tell(str(finding))


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
