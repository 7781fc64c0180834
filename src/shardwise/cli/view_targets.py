"""What can be looked at? Each target knows its facts, and answers the questions of the page with new ones.

A question changes numbers or texts in the notation. It never names a file: what is in files was opened before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.cli.checkpoints import OpenedCheckpoint
from shardwise.cli.model import read_topology
from shardwise.cli.output import parse_bytes
from shardwise.cli.plan import plan_between
from shardwise.geometry import parse_layout
from shardwise.page.checkpoint_facts import checkpoint_facts, tensor_facts
from shardwise.page.layout_facts import layout_facts
from shardwise.page.move_facts import MoveQuestion, move_facts
from shardwise.page.step_facts import step_facts


class PageTarget(Protocol):
    """Something that the page shows."""

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        """What the page shows first; `written`: in a file, which cannot ask for more."""

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What it shows after a person changed something."""


@dataclass(frozen=True)
class LayoutTarget:
    """A layout in the notation."""

    notation: str
    ranks_per_host: int = 8

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return layout_facts(parse_layout(self.notation), self.ranks_per_host)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Another layout: `notation`, `ranks_per_host`.

        >>> LayoutTarget("f32[8] on tp=2: S(0)").answer({"notation": "f32[8] on tp=4: S(0)"})["ranks"]["count"]
        4
        """
        size = int(question.get("ranks_per_host") or self.ranks_per_host)
        return LayoutTarget(str(question.get("notation", self.notation)), size).facts()


@dataclass(frozen=True)
class MoveTarget:
    """The transfer between two layouts in the notation."""

    source: str
    target: str
    topology: str = "8"
    buffer: str = ""

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return self._facts(MoveQuestion(written=written))

    def _facts(self, question: MoveQuestion) -> dict[str, Any]:
        source = parse_layout(self.source)
        target = parse_layout(self.target, like=source)
        topology = read_topology(self.topology)
        limit = parse_bytes(self.buffer) if self.buffer else None
        return move_facts(source, target, plan_between(source, target, topology, limit), topology, question)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Another transfer, or other ranks of it: `source`, `target`, `topology`, `buffer`, and the windows."""
        given = MoveTarget(
            str(question.get("source", self.source)),
            str(question.get("target", self.target)),
            str(question.get("topology", self.topology)),
            str(question.get("buffer", self.buffer)),
        )
        senders, receivers = (_read_window(question.get(name)) for name in ("senders", "receivers"))
        return given._facts(MoveQuestion(senders, receivers, int(question.get("animated", 0))))


@dataclass(frozen=True)
class CheckpointTarget:
    """A checkpoint that is open."""

    opened: OpenedCheckpoint

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return checkpoint_facts(self.opened.path, self.opened.store)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The layout of one tensor, by its number: `tensor`."""
        return {"picture": tensor_facts(self.opened.store, int(question["tensor"]))}


@dataclass(frozen=True)
class StepTarget:
    """A recorded step."""

    title: str
    trace: Mapping[str, Any]

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return step_facts(self.title, self.trace)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The same step: there is nothing to change about what was recorded."""
        return self.facts()


def split_move(text: str) -> tuple[str, str] | None:
    """The two layouts of `A -> B`, or None.

    >>> split_move("f32[8] on tp=2: S(0) -> on tp=2: R")
    ('f32[8] on tp=2: S(0)', 'on tp=2: R')
    """
    before, arrow, after = text.partition("->")
    return (before.strip(), after.strip()) if arrow else None


def _read_window(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))
