"""What is the smallest program that still fails? Parts are left out or made simpler while the failure stays.

Rounds go first, then statements from the last to the first, then aliases and the backward pass; then layouts become
simpler, lengths shorter and ranks fewer. It starts again until nothing more can be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.testing.fuzz.program import Input, Program

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


def _simpler_inputs(item: Input) -> Iterator[Input]:
    if item.requires_grad:
        yield replace(item, requires_grad=False)
    if item.fill in ("normal", "positive", "constant"):
        yield replace(item, fill="integers")
    if item.spec.startswith("on "):
        mesh, _, placements = item.spec.partition(": ")
        axes = re.sub(r"(sizes|groups)\([^)]*\)|block\(\d\)", "", placements).replace(" ,", ",").strip()
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
    spec = re.sub(r" (sizes|groups)\([^)]*\)", "", item.spec)
    if spec.startswith("as pieces"):
        return item
    return replace(item, shape=tuple(to if n == length else n for n in item.shape), spec=spec)
