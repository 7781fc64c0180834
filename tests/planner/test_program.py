"""Are solutions the cheapest ones? Compared with all assignments of small problems."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwise.planner import program
from shardwise.planner.program import (
    Exclusion,
    Flow,
    FlowMove,
    Infeasible,
    PlanChoice,
    PlanProblem,
    every_assignment,
    find_least_memory,
    solve,
    without,
)


def make_problem(seed: int) -> PlanProblem:
    """Up to six choices of up to four candidates, flows with one reader or several, some moves that do not exist."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(2, 6))]
    choices = [
        PlanChoice(
            f"c{i}",
            draw.randint(1, 3),
            tuple(float(draw.randint(0, 9)) for _ in range(n)),
            tuple(float(draw.randint(0, 9)) for _ in range(n)),
        )
        for i, n in enumerate(sizes)
    ]
    flows = []
    for maker in range(len(sizes) - 1):
        later = range(maker + 1, len(sizes))
        readers = draw.sample(later, draw.randint(1, min(3, len(later))))
        made = tuple(draw.randint(0, 2) for _ in range(sizes[maker]))
        wanted = tuple((r, tuple(draw.randint(0, 2) for _ in range(sizes[r]))) for r in readers)
        moves = tuple(
            FlowMove(a, b, 0.0 if a == b else float(draw.randint(1, 9)))
            for a, b in itertools.product(range(3), range(3))
            if a == b or draw.random() < 0.8
        )
        flows.append(Flow(f"t{maker}", draw.randint(1, 3), maker, made, wanted, moves))
    exclusions = [
        Exclusion(i, (0,), j, (draw.randrange(sizes[j]),))
        for i, j in itertools.combinations(range(len(sizes)), 2)
        if draw.random() < 0.1
    ]
    return PlanProblem(tuple(choices), tuple(flows), tuple(exclusions))


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_equals_every_assignment(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "GAP", 0.0)
    for seed in range(first, first + 20):
        problem = make_problem(seed)
        costs = dict(every_assignment(problem))
        if not costs:
            with pytest.raises(Infeasible):
                solve(problem)
            continue
        found = solve(problem)
        assert found.cost == pytest.approx(min(costs.values()), abs=1e-6), seed
        assert costs[found.taken] == pytest.approx(found.cost, abs=1e-6)
        assert found.bound == pytest.approx(found.cost, abs=1e-4)
        assert solve(problem, relaxed=True).bound <= found.cost + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_memory_limit_equals_every_assignment_that_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "GAP", 0.0)
    problem = make_problem(seed)

    def memory(taken: tuple[int, ...]) -> float:
        return sum(c.memory[k] * c.times for c, k in zip(problem.choices, taken, strict=True))

    every = {taken: (cost, memory(taken)) for taken, cost in every_assignment(problem)}
    if not every:
        assert find_least_memory(problem) is None
        return
    least = min(held for _, held in every.values())
    smallest = find_least_memory(problem)
    assert smallest is not None
    assert smallest.memory == pytest.approx(least, abs=1e-4)
    limit = least + 3
    found = solve(problem, memory_limit=limit)
    assert found.cost == pytest.approx(min(cost for cost, held in every.values() if held <= limit), abs=1e-6)
    with pytest.raises(Infeasible):
        solve(problem, memory_limit=least - 1)


def test_what_is_taken_away_is_not_taken() -> None:
    problem = make_problem(3)
    best = solve(problem).taken
    place = next(i for i, choice in enumerate(problem.choices) if len(choice.costs) > 1)
    changed = without(problem, place, [best[place]])
    assert solve(changed).taken[place] != best[place]
    assert solve(changed).cost == pytest.approx(min(dict(every_assignment(changed)).values()), rel=program.GAP + 1e-6)


def test_moves_hide_as_far_as_there_is_work() -> None:
    """Not about: a sum of 4 s beside work of 10 s of which half hides it, and a gather of 4 s ahead of a reader."""
    work = PlanChoice("work", 1, (10.0,), (0.0,)), PlanChoice("reader", 1, (2.0,), (0.0,))
    beside = Flow("t", 1, 0, (0,), ((1, (0,)),), (FlowMove(0, 0, 0.0, beside=4.0),))
    share = program.HIDDEN_SHARE * 4
    assert solve(PlanProblem(work, (beside,), hiding=0.5)).cost == pytest.approx(12 + share)
    assert solve(PlanProblem(work, (beside,), hiding=0.1)).cost == pytest.approx(12 + share + 3.8 - 1.2)
    ahead = beside._replace(moves=(FlowMove(0, 0, 0.0, ahead=4.0),))
    assert solve(PlanProblem(work, (ahead,), hiding=1.0, hiding_ahead=0.5)).cost == pytest.approx(
        12 + share + 3.8 - 1.0
    )
