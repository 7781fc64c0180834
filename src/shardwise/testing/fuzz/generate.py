"""A random program from a seed: statements are drawn one by one and kept if torch runs them on whole tensors.

1. The first tensor of a statement is an earlier result, an input, or a new input.
2. The others have a shape that fits: again an earlier tensor or a new input, in a layout of its own.
3. The rounds follow: data, other data, inputs that are one tensor, and perhaps another mode, in any order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from shardwise.testing.fuzz.draft import Draft, name_dtype
from shardwise.testing.fuzz.fields import FIELDS, Picked
from shardwise.testing.fuzz.layouts import random_world
from shardwise.testing.fuzz.operators import OPERATORS, Operator
from shardwise.testing.fuzz.program import Program, Round, Statement
from shardwise.testing.fuzz.run import execute

DTYPES = ("float64",) * 9 + ("float32",) * 4 + ("complex128",) * 2 + ("int64",) * 2 + ("bfloat16", "bool")
LARGEST, MOST_DIMS, MOST_EXACT = 600, 4, 2.0**20
_FIELD = re.compile(r"\{(\w+)\}")


class NoFitError(Exception):
    """A template that does not fit the tensors at hand: another one is drawn."""


def random_program(seed: int) -> Program:
    """The program of a seed; the same for the same seed.

    Statements are tried in host memory: on a GPU an index out of range ends the process's use of it.

    >>> random_program(5) == random_program(5)
    True
    """
    with torch.device("cpu"):
        return _draw_program(Random(seed))


def _draw_program(rng: Random) -> Program:
    mode = rng.choice(("grad",) * 8 + ("no_grad", "inference", "autocast"))
    dtype = "float32" if mode == "autocast" else rng.choice(DTYPES)
    draft = Draft(rng, random_world(rng), dtype, mode)
    wanted = rng.randint(3, 10)
    for _ in range(wanted * 12):
        if len(draft.steps) == wanted:
            break
        _extend(draft, rng.choice(OPERATORS))
    program = Program(draft.world.ranks, tuple(draft.inputs), tuple(draft.steps), (), rng.random() < 0.8)
    return replace(program, rounds=_rounds(draft)).without_unused()


def _extend(draft: Draft, operator: Operator) -> None:
    """Add a statement; nothing changes if it does not fit."""
    kept = (list(draft.inputs), dict(draft.names), set(draft.inexact))
    before = {name: value.detach().clone() for name, value in draft.tensors.items()}
    try:
        step = _statement(draft, operator)
        execute(step, draft.names)
        _check_results(draft, step, operator)
    except Exception:  # torch refuses in many ways; a template that does not fit is no matter
        draft.inputs, draft.names, draft.inexact = kept
        for name, value in before.items():
            if name in draft.names and not torch.equal(draft.names[name], value):
                with torch.no_grad():
                    draft.names[name].copy_(value)
        return
    draft.steps.append(step)


def _statement(draft: Draft, operator: Operator) -> Statement:
    picked = Picked(draft, draft.first(operator))
    free = sum(len(step.targets) for step in draft.steps)
    texts = {"t": f"v{free}", "u": f"v{free + 1}"}
    statement = operator.statement
    for name in dict.fromkeys(_FIELD.findall(statement)):
        if name not in texts:
            texts[name] = FIELDS[name](picked)
    return Statement(operator.name, statement.format(**texts))


def _check_results(draft: Draft, step: Statement, operator: Operator) -> None:
    """Refuse results that are too large; note which tensors are no longer exact."""
    rounded = not operator.keeps or any(name in draft.inexact for name in step.reads)
    if operator.needs and any(name in draft.inexact for name in step.reads):
        raise NoFitError("a rounded number could end on either side of a jump")
    changed = step.reads if operator.writes else step.targets
    for name in changed:
        value = draft.names[name]
        if not isinstance(value, Tensor):
            continue
        if value.numel() > LARGEST or value.ndim > MOST_DIMS:
            raise NoFitError("too large")
        size = _largest(value)
        if not size < MOST_EXACT and not (operator.needs and draft.rng.random() < 0.2):
            raise NoFitError("too large a number, or none")
        if rounded or name_dtype(value) == "bfloat16":
            draft.inexact.add(name)
    if operator.writes and rounded:
        draft.inexact |= {name for name, tensor in draft.tensors.items() if _shares(tensor, changed, draft)}


def _shares(tensor: Tensor, changed: tuple[str, ...], draft: Draft) -> bool:
    """Whether a tensor is a view of one that was written to."""
    places = {draft.names[n].untyped_storage().data_ptr() for n in changed if isinstance(draft.names[n], Tensor)}
    return tensor.untyped_storage().data_ptr() in places


def _largest(value: Tensor) -> float:
    if value.dtype == torch.bool or value.numel() == 0:
        return 0.0
    return float(value.detach().abs().max())


def _rounds(draft: Draft) -> tuple[Round, ...]:
    rng = draft.rng
    rounds = [Round(0, (), draft.mode), Round(1, (), draft.mode)]
    pairs = [
        (other.name, one.name)
        for number, one in enumerate(draft.inputs)
        for other in draft.inputs[number + 1 :]
        if (one.shape, one.dtype) == (other.shape, other.dtype) and "index" not in one.fill + other.fill
    ]
    if pairs:
        rounds.append(Round(2, (rng.choice(pairs),), draft.mode))
    if draft.mode != "grad":
        rounds.append(Round(3))
    elif rng.random() < 0.15:
        rounds.append(Round(3, (), rng.choice(("no_grad", "inference"))))
    if rng.random() < 0.4:
        rng.shuffle(rounds)
    return tuple(rounds)
