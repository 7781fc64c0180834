"""What is a random program, and what is the smallest one that still fails?

A program has inputs with layouts, statements in Python, and rounds that run them again on other data. It is a frozen
value: it can be compared, written as JSON and read back, and printed as a script of its own.

Shrinking leaves parts out or makes them simpler while the failure stays: rounds first, then statements from the last to
the first, then aliases and the backward pass; then layouts become simpler, lengths shorter and ranks fewer. It starts
again until nothing more can be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
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

    With `backward` the gradients of the inputs are compared, with `twice` those of the gradients' squares as well; with
    `compiled` also what `shardwise.compile` makes of all statements as one function, cold and warm.

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
    twice: bool = False
    compiled: bool = False

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
            data["twice"],
            data.get("compiled", False),
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
        '"""A random program: what does it give on ShardedTensors, and what on whole tensors?',
        "",
        "Run it in the source tree with PYTHONPATH=., where tools.fuzz is.",
        '"""',
        "",
        "import sys",
        "",
        "from tools.fuzz import Input, Program, Round, Statement, run_on_threads",
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
        f"    twice={program.twice},",
        f"    compiled={program.compiled},",
        ")",
        "verdict = run_on_threads(program)",
        "print(verdict)",
        "sys.exit(verdict.failed)",
        "",
    ]
    return "\n".join(lines)


MOST_TRIES = 300


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = MOST_TRIES) -> Program:
    """The smallest program found for which `fails` is true; `fails` is called at most `tries` times."""
    left = tries
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if left == 0:
                return program
            left -= 1
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are one step simpler, the largest steps first."""
    seen = {program}
    for found in _simpler(program):
        fitting = found.without_unused()
        if fitting not in seen and fitting.steps and fitting.rounds:
            seen.add(fitting)
            yield fitting


def _simpler(program: Program) -> Iterator[Program]:
    for number in range(len(program.rounds)):
        yield replace(program, rounds=program.rounds[:number] + program.rounds[number + 1 :])
    for number in reversed(range(len(program.steps))):
        yield _without_step(program, number)
    if program.compiled:
        yield replace(program, compiled=False)
    if program.twice:
        yield replace(program, twice=False)
    if program.backward:
        yield replace(program, backward=False)
    yield from _simpler_rounds(program)
    for number, item in enumerate(program.inputs):
        for simpler in _simpler_inputs(item):
            inputs = (*program.inputs[:number], simpler, *program.inputs[number + 1 :])
            yield replace(program, inputs=inputs)
    yield from _shorter(program)


def _without_step(program: Program, number: int) -> Program:
    """Leave out a statement and those that need its results."""
    missing = set(program.steps[number].targets)
    steps = list(program.steps[:number])
    for step in program.steps[number + 1 :]:
        if missing.intersection(step.reads):
            missing |= set(step.targets)
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def _simpler_rounds(program: Program) -> Iterator[Program]:
    for number, item in enumerate(program.rounds):
        for simpler in (replace(item, aliases=()), replace(item, mode="grad"), replace(item, seed=0)):
            yield replace(program, rounds=(*program.rounds[:number], simpler, *program.rounds[number + 1 :]))


_RULES = r" (sizes|groups|unit|block)\([^)]*\)| each \d"  # by which a dim is cut


def _simpler_inputs(item: Input) -> Iterator[Input]:
    if item.requires_grad:
        yield replace(item, requires_grad=False)
    if item.fill in ("normal", "positive", "constant"):
        yield replace(item, fill="integers")
    if item.spec.startswith("on "):
        mesh, _, placements = item.spec.partition(": ")
        axes = re.sub(_RULES, "", placements).strip()
        if axes != placements:
            yield replace(item, spec=f"{mesh}: {axes}")
        parts = re.split(r", (?=[RSP])", placements)
        for number, part in enumerate(parts):
            for simple in ("R", "S(0)"):
                if part not in ("R", simple):
                    yield replace(item, spec=f"{mesh}: " + ", ".join([*parts[:number], simple, *parts[number + 1 :]]))
    elif item.spec.startswith("as ") and item.shape:
        ranks = sorted(set(re.findall(r"(?:pieces|over|,) ?(\d)(?=\[|,|$)", item.spec)))
        if item.spec != f"as chunk(0) over {','.join(ranks)}":
            yield replace(item, spec=f"as chunk(0) over {','.join(ranks)}")


def _shorter(program: Program) -> Iterator[Program]:
    """Every dim of some length becomes shorter; uneven sizes give way to chunks, for they would not add up."""
    for length in sorted({n for item in program.inputs for n in item.shape if n > 2}, reverse=True):
        for to in dict.fromkeys((2, length - 1)):
            yield replace(program, inputs=tuple(_shortened(item, length, to) for item in program.inputs))


def _shortened(item: Input, length: int, to: int) -> Input:
    if length not in item.shape:
        return item
    spec = re.sub(_RULES, "", item.spec)
    if spec.startswith("as pieces"):
        return item
    return replace(item, shape=tuple(to if n == length else n for n in item.shape), spec=spec)
