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
class TraceVerdict:
    """What all ranks do now: use their graphs, trace again (as a step, or with these answers), or run without."""

    problem: str | None = None
    as_step: bool = False
    answers: Answers | None = None

    @property
    def is_final(self) -> bool:
        """Whether no rank traces again."""
        return self.problem is not None or (not self.as_step and self.answers is None)


def compare_traces(comm: Comm, own: TraceReport, answers: Answers) -> TraceVerdict:
    """Compare the traces of all ranks, where this one was made with some answers; the same verdict on every rank."""
    told = [TraceReport.decode(data) for data in comm.all_gather_bytes(own.encode(), label=LABEL)]
    known = _common_answers(told)
    if not all(_was_used(answers, i, entry, told) for i, entry in enumerate(known)):
        return TraceVerdict(answers=known)  # what else is different may follow from what was assumed
    if any(report.calls_backward for report in told):
        return TraceVerdict(as_step=True)
    by_rank = dict(zip(comm.ranks, told, strict=True))
    problems = {rank: report.problem for rank, report in by_rank.items() if report.problem is not None}
    if problems:
        return TraceVerdict(problem=fold_texts(problems))
    labels = [[label for label, _ in report.asked] for report in told]
    if any(found != labels[0] for found in labels):
        return TraceVerdict(problem=f"the ranks ask each other different things: {_first_difference(labels)}")
    moves = [report.moves for report in told]
    if any(list(found) != list(moves[0]) for found in moves):
        return TraceVerdict(problem=f"the ranks make different moves: {_first_difference(moves)}")
    return TraceVerdict()


def _common_answers(told: Sequence[TraceReport]) -> list[tuple[str, Sequence[bytes]]]:
    """The answers of all ranks, up to the first question that not all of them asked."""
    found: list[tuple[str, Sequence[bytes]]] = []
    for entries in zip(*(report.asked for report in told), strict=False):
        if len({label for label, _ in entries}) > 1:
            break
        found.append((entries[0][0], [data for _, data in entries]))
    return found


def _was_used(answers: Answers, index: int, entry: tuple[str, Sequence[bytes]], told: Sequence[TraceReport]) -> bool:
    """Whether all ranks went by the true answers to a question: those that were passed, or the same on all."""
    if index < len(answers):
        return list(answers[index][1]) == list(entry[1])
    return len({report.asked[index][1] for report in told}) == 1


def _first_difference(by_rank: Sequence[Sequence[Any]]) -> str:
    longest = max(map(len, by_rank))
    for i in range(longest):
        found = [row[i] if i < len(row) else "nothing" for row in by_rank]
        if len(set(found)) > 1:
            return " and ".join(repr(text) for text in dict.fromkeys(found))
    return "their order"
