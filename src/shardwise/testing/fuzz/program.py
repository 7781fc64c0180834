"""What is a random program? Inputs with layouts, statements in Python, and rounds that run them again on other data.

A program is a frozen value: it can be compared, written as JSON and read back, and printed as a script of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

MODES = ("grad", "no_grad", "inference", "autocast")
_NAME = re.compile(r"\b[av]\d+\b")


@dataclass(frozen=True)
class Input:
    """A tensor that goes in: where its parts are (in the notation of layouts), and how it is filled.

    `fill` is "integers", "normal", "positive", "constant" or "index:n" (numbers from 0 to n - 1).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: str
    fill: str = "integers"
    requires_grad: bool = False


@dataclass(frozen=True)
class Statement:
    """One statement, such as `v0 = torch.add(a0, a1)`, and the operator that it is counted under."""

    operator: str
    code: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The names that the statement assigns; none if it writes to a tensor in place.

        >>> Statement("sort", "v0, v1 = torch.sort(a0, 1)").targets
        ('v0', 'v1')
        """
        left, equals, _ = self.code.partition(" = ")
        return tuple(left.split(", ")) if equals and re.fullmatch(r"v\d+(, v\d+)*", left) else ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of tensors that the statement uses.

        >>> Statement("add_", "a1.add_(v0)").reads
        ('a1', 'v0')
        """
        code = self.code.partition(" = ")[2] if self.targets else self.code
        return tuple(dict.fromkeys(_NAME.findall(code)))


@dataclass(frozen=True)
class Round:
    """One run of all statements: the seed of the data, the inputs that are one and the same tensor, a mode of torch."""

    seed: int
    aliases: tuple[tuple[str, str], ...] = ()
    mode: str = "grad"


@dataclass(frozen=True)
class Program:
    """Statements over laid out tensors, run once for each round, in order, in one process or group of processes.

    >>> rows = Input("a0", "float64", (3, 2), "on tp=2: S(0)")
    >>> program = Program(2, (rows,), (Statement("sum", "v0 = a0.sum()"),), (Round(0),))
    >>> Program.from_json(program.to_json()) == program
    True
    """

    ranks: int
    inputs: tuple[Input, ...]
    steps: tuple[Statement, ...]
    rounds: tuple[Round, ...]
    backward: bool = False

    def to_json(self) -> str:
        """This program as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(
            data["ranks"],
            tuple(Input(**{**item, "shape": tuple(item["shape"])}) for item in data["inputs"]),
            tuple(Statement(**item) for item in data["steps"]),
            tuple(Round(item["seed"], _pairs(item["aliases"]), item["mode"]) for item in data["rounds"]),
            data["backward"],
        )

    def without_unused(self) -> Program:
        """This program without inputs that no statement uses."""
        used = {name for step in self.steps for name in step.reads}
        rounds = tuple(
            replace(r, aliases=tuple((one, other) for one, other in r.aliases if {one, other} <= used))
            for r in self.rounds
        )
        return replace(self, inputs=tuple(i for i in self.inputs if i.name in used), rounds=rounds)

    def __str__(self) -> str:
        return script(self)


def _pairs(items: Sequence[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((one, other) for one, other in items)


def script(program: Program, preamble: str = "") -> str:
    """A script that runs a program and ends with an error if the ranks do not agree with whole tensors.

    `preamble` is put before the program: what it needs to be registered or imported.
    """
    lines = [
        '"""A random program: what does it give on ShardedTensors, and what on whole tensors?"""',
        "",
        "import sys",
        "",
        "from shardwise.testing.fuzz import Input, Program, Round, Statement, run_on_threads",
        *preamble.splitlines(),
        "",
        "program = Program(",
        f"    ranks={program.ranks},",
        "    inputs=(",
        *(f"        {item!r}," for item in program.inputs),
        "    ),",
        "    steps=(",
        *(f"        {step!r}," for step in program.steps),
        "    ),",
        "    rounds=(",
        *(f"        {item!r}," for item in program.rounds),
        "    ),",
        f"    backward={program.backward},",
        ")",
        "verdict = run_on_threads(program)",
        "print(verdict)",
        "sys.exit(verdict.failed)",
        "",
    ]
    return "\n".join(lines)
