"""The cheapest choices of a problem, as an integer program, with a bound that proves how good they are.

A problem has choices (operators, parameters: one candidate each) and flows (tensors that pass from the choice that
makes them to those that read them). A candidate says in which layouts its tensors are made and wanted. A flow is moved
once into each layout that some reader wants: the engine moves a tensor once, however many operators read the result.

- `x[c, k]` is 1 where choice c takes candidate k; one for each c.
- `z[f, b]` is at least the sum of x over the candidates of each reader that want layout b.
- `y[f, m]` is 1 where move m (from a layout that is made to one that is wanted, and how) is made: those into b sum to
  `z[f, b]`, and those from a are at most the x that make a.
- The cost is that of the candidates and of the moves, times how often they appear. What may hide behind computing
  counts by a small share, and as a whole only as far as it takes longer than what hides it: parameters that are
  gathered ahead are hidden by their readers, sums of gradients by all that is computed.
- Memory is linear in x and y, and has a limit.

The relaxation, in which x may be a fraction, is a lower bound; where it is integral it is the answer. Else the best
whole solution of the candidates that it takes in part is mostly as good, and found at once. HiGHS solves all of them
(`scipy.optimize.milp`), with one thread, so that the answer is the same at each run.
"""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.nn.plan import PlanError

HIDDEN_SHARE = 0.05  # of the time of a move that may be hidden: among plans that hide all, those that move less win
INTEGRAL = 1e-6
GAP = 5e-3  # a solution this near to the bound is good enough
Floats = NDArray[np.float64]


class PlanChoice(NamedTuple):
    """Something of which one candidate is taken: its name, how often it appears, costs and memory by candidate."""

    name: str
    times: int
    costs: tuple[float, ...]
    memory: tuple[float, ...]


class FlowMove(NamedTuple):
    """A way from a layout that is made to one that is wanted, both by number, and what it costs.

    `ahead` may hide behind what its readers compute, and `beside` behind what all choices do.
    """

    made: int
    wanted: int
    cost: float
    memory: float = 0.0
    ahead: float = 0.0
    beside: float = 0.0
    name: str = ""

    @property
    def whole_cost(self) -> float:
        """With nothing hidden."""
        return self.cost + self.ahead + self.beside


class Flow(NamedTuple):
    """A tensor: its maker and the number of the layout by its candidate, its readers likewise, and the moves."""

    name: str
    times: int
    maker: int
    made: tuple[int, ...]
    readers: tuple[tuple[int, tuple[int, ...]], ...]
    moves: tuple[FlowMove, ...]


class Exclusion(NamedTuple):
    """Two sets of candidates of two choices, not both of which may be taken."""

    one: int
    candidates: tuple[int, ...]
    other: int
    others: tuple[int, ...]


@dataclass(frozen=True)
class PlanProblem:
    """Choices and flows; `hiding` is the share of the choices' cost behind which sums of gradients may hide.

    `hiding_ahead`: the share of a reader's cost behind which what is gathered for it may hide.

    >>> two = PlanChoice("a", 1, (0.0, 0.0), (4.0, 1.0)), PlanChoice("b", 1, (1.0, 3.0), (0.0, 0.0))
    >>> flow = Flow("t", 1, 0, (0, 1), ((1, (0, 1)),), (FlowMove(0, 0, 0), FlowMove(1, 1, 0), FlowMove(1, 0, 5)))
    >>> found = solve(PlanProblem(two, (flow,)))
    >>> found.taken, found.cost, found.gap
    ((0, 0), 1.0, 0.0)
    >>> solve(PlanProblem(two, (flow,)), memory_limit=2).taken
    (1, 1)
    """

    choices: tuple[PlanChoice, ...]
    flows: tuple[Flow, ...]
    exclusions: tuple[Exclusion, ...] = ()
    fixed_memory: float = 0.0
    hiding: float = 0.0
    hiding_ahead: float = 0.0


@dataclass(frozen=True)
class Solution:
    """What was found: the candidate of each choice, the moves that are made, the cost, and a bound below all costs.

    `proven`: nothing is cheaper, by the solver; else `gap` says how much cheaper something might be.
    """

    taken: tuple[int, ...]
    moves: tuple[tuple[FlowMove, ...], ...]
    cost: float
    bound: float
    memory: float
    seconds: float
    relaxed: bool = False

    @property
    def gap(self) -> float:
        """How much cheaper something might be, as a share of the bound."""
        return max(0.0, self.cost - self.bound) / max(abs(self.bound), 1e-30) if self.cost > self.bound + 1e-15 else 0.0


class Infeasible(Exception):
    """No choices are possible, or none within the memory limit; `find_least_memory` says how much they need."""


class Unsolved(PlanError):
    """The time was over before anything was found."""


def import_solver() -> ModuleType:
    """scipy.optimize, or an error that says how to get it."""
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise PlanError(
            "the planner solves integer programs with scipy, which is not installed; install shardwise[plan], or use "
            "shardwise.hf.plan or BalancedPlanner, which need none"
        ) from error


class _Columns:
    """Where the variables of a problem are, and the rows of its constraints."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        counts = [len(choice.costs) for choice in problem.choices]
        self.first = [0, *itertools.accumulate(counts)]
        self.width = self.first[-1]
        self.rows: list[tuple[NDArray[np.int64], Floats]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        for place, count in zip(self.first, counts, strict=False):
            self.add_row(range(place, place + count), np.ones(count), 1, 1)
        self.first_move: list[int] = []
        for flow in problem.flows:
            self._add_flow(flow)
        for one, candidates, other, others in problem.exclusions:
            used = [*(self.first[one] + k for k in candidates), *(self.first[other] + k for k in others)]
            self.add_row(used, np.ones(len(used)), 0, 1)
        self.late = self.width  # what is not hidden: of all sums, then of each flow that is gathered ahead
        self.gathered = [i for i, flow in enumerate(problem.flows) if any(m.ahead for m in flow.moves)]
        self.width += 1 + len(self.gathered)

    def add_row(self, columns: Sequence[int], factors: Any, low: float, high: float) -> None:
        self.rows.append((np.asarray(columns, np.int64), np.asarray(factors, np.float64)))
        self.low.append(low)
        self.high.append(high)

    def _add_flow(self, flow: Flow) -> None:
        """z by layout unless there is one reader, then y by move."""
        moves, start = flow.moves, self.width
        self.first_move.append(start)
        self.width += len(moves)
        makes = _group(flow.made, self.first[flow.maker])
        wants = [_group(wanted, self.first[reader]) for reader, wanted in flow.readers]
        into: dict[int, list[int]] = {}
        from_to: dict[tuple[int, int], list[int]] = {}
        for number, move in enumerate(moves):
            into.setdefault(move.wanted, []).append(start + number)
            from_to.setdefault((move.made, move.wanted), []).append(start + number)
        for wanted, columns in into.items():
            for by_layout in wants:
                if found := by_layout.get(wanted):
                    same = math.inf if len(wants) > 1 else 0.0
                    self.add_row([*columns, *found], [*[1.0] * len(columns), *[-1.0] * len(found)], 0, same)
        for by_layout in wants:
            for wanted, found in by_layout.items():
                if wanted not in into:
                    self.add_row(found, np.ones(len(found)), 0, 0)  # nothing leads there
        if len(wants) == 1:  # all that is made goes to the only reader
            out: dict[int, list[int]] = {}
            for (made, _), columns in from_to.items():
                out.setdefault(made, []).extend(columns)
            for made in {*makes, *out}:
                columns, found = out.get(made, []), makes.get(made, [])
                self.add_row([*columns, *found], [*[1.0] * len(columns), *[-1.0] * len(found)], 0, 0)
            return
        for (made, _), columns in from_to.items():
            found = makes.get(made, [])
            self.add_row([*columns, *found], [*[1.0] * len(columns), *[-1.0] * len(found)], -math.inf, 0)

    def costs(self) -> Floats:
        found = np.zeros(self.width)
        for choice, place in zip(self.problem.choices, self.first, strict=False):
            found[place : place + len(choice.costs)] = np.asarray(choice.costs) * choice.times
        for flow, place in zip(self.problem.flows, self.first_move, strict=True):
            shares = [m.cost + HIDDEN_SHARE * (m.ahead + m.beside) for m in flow.moves]
            found[place : place + len(shares)] = np.asarray(shares) * flow.times
        found[self.late] = 1.0
        found[self.late + 1 :] = [self.problem.flows[number].times for number in self.gathered]
        return found

    def memory(self) -> Floats:
        found = np.zeros(self.width)
        for choice, place in zip(self.problem.choices, self.first, strict=False):
            found[place : place + len(choice.memory)] = np.asarray(choice.memory) * choice.times
        for flow, place in zip(self.problem.flows, self.first_move, strict=True):
            found[place : place + len(flow.moves)] = np.asarray([m.memory for m in flow.moves]) * flow.times
        return found

    def hide_moves(self) -> None:
        """What is not hidden is at least what may hide, without the computing behind which it does."""
        problem, rest = self.problem, 1 - HIDDEN_SHARE
        row = np.zeros(self.width)
        row[self.late] = 1.0
        for number, choice in enumerate(problem.choices):
            self._add_work(row, number, problem.hiding * choice.times)
        for flow, place in zip(problem.flows, self.first_move, strict=True):
            row[place : place + len(flow.moves)] -= np.asarray([m.beside * rest for m in flow.moves]) * flow.times
        self._add_late(row)
        for late, number in enumerate(self.gathered, start=self.late + 1):
            flow, place = problem.flows[number], self.first_move[number]
            row = np.zeros(self.width)
            row[late] = 1.0
            row[place : place + len(flow.moves)] -= np.asarray([m.ahead * rest for m in flow.moves])
            for reader in {reader for reader, _ in flow.readers}:
                self._add_work(row, reader, problem.hiding_ahead)
            self._add_late(row)

    def _add_work(self, row: Floats, number: int, share: float) -> None:
        own = np.nan_to_num(np.asarray(self.problem.choices[number].costs), posinf=0.0)
        row[self.first[number] : self.first[number] + len(own)] += own * share

    def _add_late(self, row: Floats) -> None:
        used = np.flatnonzero(row)
        self.add_row(list(used), row[used], 0, math.inf)


def _group(layouts: Sequence[int], first: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, layout in enumerate(layouts):
        found.setdefault(layout, []).append(first + number)
    return found


def solve(
    problem: PlanProblem, *, memory_limit: float | None = None, time_limit: float = 60.0, relaxed: bool = False
) -> Solution:
    """The cheapest candidates; `relaxed`: only the bound, in which candidates may be taken in part."""
    started = time.monotonic()
    columns = _Columns(problem)
    columns.hide_moves()
    costs, memory = columns.costs(), columns.memory()
    if memory_limit is not None:
        used = np.flatnonzero(memory)
        scale = max(1.0, float(memory.max(initial=1.0)))
        room = (memory_limit - problem.fixed_memory) / scale
        columns.add_row(list(used), memory[used] / scale, -math.inf, room)
    found = _minimise(columns, costs, time_limit, whole=False)
    if found is None:
        raise Infeasible
    bound, values = found.bound, found.values
    x = values[: columns.first[-1]]
    if not relaxed and np.abs(x - np.round(x)).max(initial=0) > INTEGRAL:
        left = max(1.0, time_limit - (time.monotonic() - started))
        rounded = _round(columns, costs, found, left)
        if rounded is None:
            whole = _minimise(columns, costs, left, whole=True)
            if whole is None:
                raise Infeasible
            rounded, bound = whole.values, max(bound, whole.bound)
        values = rounded
    spent = time.monotonic() - started
    return _read(columns, values, bound, costs, memory, spent, relaxed)


def _round(columns: _Columns, costs: Floats, relaxed: _Found, time_limit: float) -> Floats | None:
    """The best solution among the candidates that the relaxed one takes in part, if it is near enough to the bound."""
    parts = np.ones(columns.width, bool)
    parts[: columns.first[-1]] = relaxed.values[: columns.first[-1]] > INTEGRAL
    try:
        found = _minimise(columns, np.where(parts, costs, math.inf), time_limit, whole=True)
    except Unsolved:
        return None
    if found is None or float(np.where(found.values > 0, costs, 0.0) @ found.values) > relaxed.bound * (1 + GAP):
        return None
    return found.values


def find_least_memory(problem: PlanProblem, time_limit: float = 60.0) -> Solution | None:
    """The solution of least memory, or None if nothing is possible at all; among several the cheaper one."""
    started = time.monotonic()
    columns = _Columns(problem)
    columns.hide_moves()
    costs, memory = columns.costs(), columns.memory()
    usual = np.where(np.isinf(costs), 0.0, costs)
    both = memory / max(1.0, memory.max(initial=1.0)) + 1e-6 * usual / max(1e-30, float(usual.max(initial=0)))
    found = _minimise(columns, np.where(np.isinf(costs), math.inf, both), time_limit, whole=True)
    if found is None:
        return None
    return _read(columns, found.values, -math.inf, costs, memory, time.monotonic() - started, False)


class _Found(NamedTuple):
    values: Floats
    bound: float


def _minimise(columns: _Columns, costs: Floats, time_limit: float, *, whole: bool) -> _Found | None:
    """The variables of least cost, or None if there are none; fractions unless `whole`."""
    solver, sparse = import_solver(), importlib.import_module("scipy.sparse")
    lengths = [len(row) for row, _ in columns.rows]
    matrix = sparse.csr_array(
        (
            np.concatenate([factors for _, factors in columns.rows]),
            np.concatenate([row for row, _ in columns.rows]),
            np.concatenate([[0], np.cumsum(lengths)]),
        ),
        shape=(len(lengths), columns.width),
    )
    kinds = np.zeros(columns.width)
    if whole:
        kinds[: columns.first[-1]] = 1
    high = np.where(np.isinf(costs), 0.0, 1.0)  # what costs without end is not taken
    high[columns.late :], costs = math.inf, np.where(np.isinf(costs), 0.0, costs)
    scale = 1 / max(float(np.abs(costs).max(initial=0)), 1e-30)
    result = solver.milp(
        costs * scale,
        constraints=solver.LinearConstraint(matrix, np.asarray(columns.low), np.asarray(columns.high)),
        integrality=kinds,
        bounds=solver.Bounds(0, high),
        options={"time_limit": max(0.1, time_limit), "mip_rel_gap": GAP},
    )
    if result.x is None:
        if result.status == 1:
            raise Unsolved(
                f"the solver found nothing within {time_limit:.3g} s; pass a larger time_limit, or fix parameters by "
                "patterns"
            )
        return None
    bound = getattr(result, "mip_dual_bound", None)
    return _Found(result.x, (result.fun if bound is None else float(bound)) / scale)


def _read(
    columns: _Columns, values: Floats, bound: float, costs: Floats, memory: Floats, seconds: float, relaxed: bool
) -> Solution:
    problem = columns.problem
    taken = tuple(
        int(values[place : place + len(choice.costs)].argmax())
        for choice, place in zip(problem.choices, columns.first, strict=False)
    )
    moves = tuple(
        tuple(m for m, share in zip(flow.moves, values[place : place + len(flow.moves)], strict=True) if share > 0.5)
        for flow, place in zip(problem.flows, columns.first_move, strict=True)
    )
    cost = float(np.where(values > 0, costs, 0.0) @ values)
    held = float(memory @ values) + problem.fixed_memory
    return Solution(taken, moves, cost, min(bound, cost), held, seconds, relaxed)


def without(problem: PlanProblem, choice: int, candidates: Sequence[int]) -> PlanProblem:
    """The same problem in which a choice may not take some candidates."""
    found = problem.choices[choice]
    costs = tuple(math.inf if k in set(candidates) else c for k, c in enumerate(found.costs))
    changed = list(problem.choices)
    changed[choice] = found._replace(costs=costs)
    return replace(problem, choices=tuple(changed))


def every_assignment(problem: PlanProblem) -> Iterator[tuple[tuple[int, ...], float]]:
    """All choices of a small problem with their costs, one after the other: what `solve` is compared with."""
    for taken in itertools.product(*(range(len(choice.costs)) for choice in problem.choices)):
        pairs = ((taken[e.one] in e.candidates, taken[e.other] in e.others) for e in problem.exclusions)
        if any(map(all, pairs)):
            continue
        cost = sum(c.costs[k] * c.times for c, k in zip(problem.choices, taken, strict=True))
        for flow in problem.flows:
            made = flow.made[taken[flow.maker]]
            for wanted in {layouts[taken[reader]] for reader, layouts in flow.readers}:
                ways = [m.whole_cost for m in flow.moves if (m.made, m.wanted) == (made, wanted)]
                cost += min(ways, default=math.inf) * flow.times
        if cost < math.inf:
            yield taken, cost
