"""Did all ranks trace the same program? One exchange after a trace, before any graph runs."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.comm import Comm, fold_texts

Answers = Sequence[tuple[str, Sequence[bytes]]]
LABEL = "compile"


@dataclass(frozen=True)
class TraceReport:
    """What a rank says about its trace: why it failed, or what it asked and which moves its graphs have, in order."""

    problem: str | None
    calls_backward: bool
    asked: Sequence[tuple[str, bytes]]
    moves: Sequence[str]

    def encode(self) -> bytes:
        """The report as bytes."""
        asked = [[label, base64.b64encode(data).decode()] for label, data in self.asked]
        return json.dumps([self.problem, self.calls_backward, asked, list(self.moves)]).encode()

    @staticmethod
    def decode(data: bytes) -> TraceReport:
        """The report that another rank has sent."""
        problem, calls_backward, asked, moves = json.loads(data)
        return TraceReport(problem, calls_backward, [(n, base64.b64decode(text)) for n, text in asked], moves)


@dataclass(frozen=True)
class Verdict:
    """What all ranks do now: use their graphs, trace again (as a step, or with these answers), or run without."""

    problem: str | None = None
    as_step: bool = False
    answers: Answers | None = None

    @property
    def is_final(self) -> bool:
        """Whether no rank traces again."""
        return self.problem is not None or (not self.as_step and self.answers is None)


def compare_traces(comm: Comm, own: TraceReport, answers: Answers) -> Verdict:
    """Compare the traces of all ranks, where this one was made with some answers; the same verdict on every rank."""
    told = [TraceReport.decode(data) for data in comm.all_gather_bytes(own.encode(), label=LABEL)]
    by_rank = dict(zip(comm.ranks, told, strict=True))
    if any(report.calls_backward for report in told):
        return Verdict(as_step=True)
    problems = {rank: report.problem for rank, report in by_rank.items() if report.problem is not None}
    if problems:
        return Verdict(problem=fold_texts(problems))
    labels = [[label for label, _ in report.asked] for report in told]
    if any(found != labels[0] for found in labels):
        return Verdict(problem=f"the ranks ask each other different things: {_first_difference(labels)}")
    if any(len(set(found)) > 1 for found in zip(*[report.moves for report in told], strict=False)) or _differ(told):
        return Verdict(problem=f"the ranks make different moves: {_first_difference([r.moves for r in told])}")
    found = [(label, [report.asked[i][1] for report in told]) for i, label in enumerate(labels[0])]
    if all(_was_used(answers, i, entry, comm.world_size, own) for i, entry in enumerate(found)):
        return Verdict()
    return Verdict(answers=found)


def _differ(told: Sequence[TraceReport]) -> bool:
    return len({len(report.moves) for report in told}) > 1


def _was_used(answers: Answers, index: int, entry: tuple[str, Sequence[bytes]], count: int, own: TraceReport) -> bool:
    """Whether a trace went by the true answers to a question."""
    used = answers[index][1] if index < len(answers) else [own.asked[index][1]] * count
    return list(used) == list(entry[1])


def _first_difference(by_rank: Sequence[Sequence[Any]]) -> str:
    longest = max(map(len, by_rank))
    for i in range(longest):
        found = [row[i] if i < len(row) else "nothing" for row in by_rank]
        if len(set(found)) > 1:
            return " and ".join(repr(text) for text in dict.fromkeys(found))
    return "their order"
