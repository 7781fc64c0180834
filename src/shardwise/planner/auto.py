"""The best plan for a model, a mesh and a memory limit, with a proof of how good it is.

1. The step is traced whole (`graph`), its problem is built (`candidates`) and solved (`program`).
2. A solution is carried out as an ordinary plan: patterns of parameters, an input plan, which parameters are freed.
   The engine chooses by itself where activations are. So the plan is rehearsed, and what modules return is compared
   with the solution; where it differs, `activations` say so, and the plan is rehearsed again.
3. The best solution for each placement of the inputs is carried out. The plan of the shortest rehearsed step that fits
   in memory is returned. Its figures are those of the rehearsal; bound and gap are about the linear objective.
4. Where the rehearsed peak is over the limit, the limit of the problem is lowered by as much, and it is solved again.
5. Where memory costs time, all blocks are computed again in the backward pass, then fewer and fewer of them, and the
   fastest plan that fits counts.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise._torch import pytree
from shardwise.geometry import Mesh, Partial, Placement, Replicate, Shard, format_placement
from shardwise.geometry.mesh import to_mesh
from shardwise.geometry.notation import DType, find_dtype
from shardwise.hf.plans import fold_patterns
from shardwise.hf.plans import plan as usual_plan
from shardwise.nn.plan import REPLICATED, ModelPlan, PlanError, match_patterns, read_mesh
from shardwise.nn.shard_module import find_blocks
from shardwise.planner.candidates import (
    FREED,
    INPUTS,
    KEPT,
    NARROW,
    Costs,
    Pins,
    Prices,
    Space,
    SpaceBuilder,
    write_placements,
)
from shardwise.planner.estimate import (
    Estimate,
    OptimizerState,
    check_float,
    estimate,
    find_device,
    find_fullest_rank,
    find_optimizer,
)
from shardwise.planner.graph import Graph, Placements, trace
from shardwise.planner.program import (
    Infeasible,
    PlanProblem,
    Solution,
    Unsolved,
    find_least_memory,
    solve,
    without,
)
from shardwise.planner.rehearsal import Inputs, Loss, make_inputs, rehearse
from shardwise.transfer import Topology
from shardwise.transfer.cost import Device
from shardwise.transfer.transfer import format_bytes

HOPELESS = 3  # times as long as the best
ROUNDS = 3  # of comparing what the engine does with a solution
TIGHTER = 3  # of solving again with less memory
HIDING = (0.6, 0.3)  # the shares of all work that sums of gradients, and of a reader's that gathers, hide behind
ROLES = ("dp", "fsdp", "tp")
SMALL_GRAPH = 40  # operators of a model whose plans are tried one by one as well
USUAL_SHARE = 0.3  # of the time limit, for usual plans


@dataclass(frozen=True)
class Certificate:
    """How good a plan is: `cost` of the solution, and a `bound` below the cost of all others, in `unit`.

    `covers`: what the bound is about, all plans, or those in which equal blocks are laid out alike.

    >>> print(Certificate(0.005, 0.004, "seconds", "all plans", 1.5))
    objective 5 ms, no plan is below 4 ms (gap 25 %), of all plans; found in 1.5 s
    """

    cost: float
    bound: float
    unit: str
    covers: str
    seconds: float

    @property
    def gap(self) -> float:
        """How much less another solution might cost, as a share of the bound."""
        return max(0.0, self.cost - self.bound) / self.bound if self.bound > 0 else 0.0

    def __str__(self) -> str:
        scaled = (lambda x: f"{1000 * x:.4g} ms") if self.unit == "seconds" else format_bytes_of
        return (
            f"objective {scaled(self.cost)}, no plan is below {scaled(self.bound)} (gap {100 * self.gap:.2g} %), of "
            f"{self.covers}; found in {self.seconds:.1f} s"
        )


def format_bytes_of(count: float) -> str:
    """A number of bytes that may be a fraction."""
    return format_bytes(round(count))


@dataclass(frozen=True, eq=False)
class Finding:
    """What a search found beside the plan: its proof, its estimate, the other plans that were rehearsed.

    `others`: input plan, seconds of a step and peak of each plan that was carried out, the best first. `again`: the
    blocks that are computed again in the backward pass. `row_limit`: the memory that the problem was solved with, if it
    counted.
    """

    certificate: Certificate
    estimate: Estimate
    others: tuple[tuple[str, float, int], ...]
    space: Space = field(repr=False)
    problem: PlanProblem = field(repr=False)
    solution: Solution = field(repr=False)
    row_limit: float | None
    again: tuple[str, ...]


@dataclass(frozen=True)
class FoundPlan(ModelPlan):
    """A plan that `AutoPlanner` found: a `ModelPlan`, and how it was found.

    >>> import torch
    >>> plan = AutoPlanner("tp=2", device="h100").plan(nn.Linear(8, 8), (torch.ones(4, 8),))
    >>> plan.finding.certificate.gap
    0.0
    """

    finding: Finding = field(default=None, compare=False, repr=False)  # type: ignore[assignment]  # always given

    def explain(self, name: str | None = None) -> str:
        """Why a parameter is where it is, and what the second best would cost; without a name all of them."""
        return explain_plan(self, name)


class _Carried(NamedTuple):
    """A plan that carries out a solution, and its estimate."""

    plan: ModelPlan
    estimate: Estimate
    solution: Solution | None
    problem: PlanProblem
    limit: float | None


@dataclass(frozen=True)
class AutoPlanner:
    """Finds the plan with the shortest step that fits in memory.

    - `mesh`: a Mesh, or its text, as "dp=2,tp=4".
    - `memory_limit`: bytes of a rank, as a number or as "40GiB"; None: those of the device.
    - `topology`: hosts and links, see `shardwise topology`; `device`, `optimizer`, `dtype`, `compute_dtype` and
      `compiled` as for `estimate`.
    - `again`: blocks are computed again in the backward pass (`recompute` of the plan): True: all; False: none; None:
      as many as make the step shortest, which are none where everything fits.
    - `gather_dtype`: a dtype such as "bfloat16" in which parameters may be gathered and used, or patterns to dtypes.
    - `objective`: "seconds", or "bytes" that are received.
    - `fix`, `allow`, `forbid`: patterns of parameters, of modules (what they return) or "inputs", with placements; for
      `allow` and `forbid` lists of them. `units`: by pattern of parameters a dim and a length that is never cut.
    - `time_limit`: seconds for the search; then the best that was found is taken, and its gap is known.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> plan = AutoPlanner("tp=2", fix={"inputs": "replicated"}).plan(model, (torch.ones(8, 64),))
    >>> plan.mesh, plan.finding.estimate.fits
    (Mesh(tp=2), True)
    """

    mesh: Mesh | str
    memory_limit: int | str | None = None
    topology: Topology | None = None
    device: str | Device = "h100"
    optimizer: str | OptimizerState = "adamw"
    dtype: str | None = None
    compute_dtype: str | None = None
    objective: str = "seconds"
    fix: Mapping[str, str] = field(default_factory=dict)
    allow: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forbid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    units: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    again: bool | None = None
    gather_dtype: str | Mapping[str, str] | None = None
    compiled: bool = False
    time_limit: float = 30.0

    def __post_init__(self) -> None:
        if self.objective not in ("seconds", "bytes"):
            raise PlanError(f"the objective is 'seconds' or 'bytes', got {self.objective!r}")
        mesh = read_mesh(self.mesh) if isinstance(self.mesh, str) else to_mesh(self.mesh)
        object.__setattr__(self, "mesh", mesh)
        self._check(mesh)

    def _check(self, mesh: Mesh) -> None:
        given: dict[str, Any] = vars(self)
        limit, again, seconds, topology = (given[n] for n in ("memory_limit", "again", "time_limit", "topology"))
        size = parse_size(limit) if isinstance(limit, str) else 1 if limit is None else limit
        if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
            raise PlanError(
                f"memory_limit is a number of bytes above 0, a text such as '40GiB', or None; got {limit!r}"
            )
        if again not in (True, False, None):
            raise PlanError(f"again is True, False or None; got {again!r}")
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise PlanError(f"time_limit is a number of seconds above 0; got {seconds!r}")
        if not isinstance(topology, Topology | None):
            raise PlanError(f"topology is a Topology, such as Topology(ranks_per_host=8); got {topology!r}")
        find_device(self.device), find_optimizer(self.optimizer)
        dtypes = self.gather_dtype.values() if isinstance(self.gather_dtype, Mapping) else [self.gather_dtype]
        check_float(dtype=self.dtype, compute_dtype=self.compute_dtype)
        for dtype in dtypes:
            check_float(gather_dtype=dtype)
        Pins(self.fix, self.allow, self.forbid, self.units).read(mesh)

    def plan(
        self,
        model: nn.Module,
        inputs: Inputs | None = None,
        *,
        batch: int | None = None,
        sequence: int = 4096,
        loss: Loss | None = None,
    ) -> FoundPlan:
        """The plan of a model. `inputs` are the arguments of one forward pass of all ranks together.

        Without them `batch` sequences of a length are taken, of all ranks together; None: one for each rank.
        """
        _check_given(model, inputs, batch, sequence)
        search = Search(self, model, inputs, batch, sequence, loss)
        blocks = tuple(find_blocks(model))
        if self.again and not blocks:
            raise PlanError(
                f"again=True: {type(model).__name__} has no list of blocks (nn.ModuleList) to compute again"
            )
        if self.again is not None:
            return search.run(blocks if self.again else ())
        found: FoundPlan | None = None
        with suppress(*[DoesNotFit][: len(blocks)]):
            found = search.run(())
        return found if found is not None and not search.limit_counts(found) else search.run_with_some(blocks, found)


class DoesNotFit(PlanError):
    """No plan fits in memory."""


class Search:
    """One search: a model, its inputs, and what has been traced and solved of it."""

    def __init__(
        self,
        planner: AutoPlanner,
        model: nn.Module,
        inputs: Inputs | None,
        batch: int | None,
        sequence: int,
        loss: Loss | None,
    ) -> None:
        assert isinstance(planner.mesh, Mesh)
        self.planner, self.model, self.mesh, self.loss, self.sequence = planner, model, planner.mesh, loss, sequence
        self.topology = planner.topology or Topology(ranks_per_host=8)
        self.device = find_device(planner.device)
        limit = planner.memory_limit
        self.limit = parse_size(limit) if isinstance(limit, str) else int(limit or self.device.memory_bytes)
        self.device = replace(self.device, memory_bytes=self.limit)
        self.inputs = make_inputs(model, batch or self.mesh.size, sequence) if inputs is None else inputs
        named = planner.compute_dtype or planner.dtype
        self.computed = None if named is None else find_dtype(named)
        self.started = time.monotonic()
        self.tightened: dict[tuple[str, ...], float] = {}
        self._best = math.inf  # of all that was rehearsed, whether it fits or not
        self.names = dict(model.named_parameters())
        self.narrow = _find_narrow(self.names, planner.gather_dtype, planner.compute_dtype or planner.dtype)
        self.pins = Pins(planner.fix, planner.allow, planner.forbid, planner.units)
        modules = [name for name, _ in model.named_modules() if name]
        self.pins.check([INPUTS, *self.names, *modules])

    @cached_property
    def graph(self) -> Graph:
        return trace(self.model, self.inputs, self.mesh, self.computed, self.loss)

    @cached_property
    def prices(self) -> Prices:
        eager = None if self.planner.compiled else self.device
        return Prices(self.mesh, self.topology, self.planner.objective, eager)

    def build(self, again: Sequence[str], pins: Pins, *, tied: bool = True) -> Space:
        """The problem, under some pins."""
        wanted = None if self.planner.dtype is None else find_dtype(self.planner.dtype)
        dtypes = {
            name: wanted if wanted is not None and p.is_floating_point() else find_dtype(str(p.dtype))
            for name, p in self.names.items()
        }
        hidden = self.device.overlap if self.planner.objective == "seconds" else 0.0
        hiding = hidden * HIDING[0], hidden * HIDING[1]
        optimizer = find_optimizer(self.planner.optimizer)
        narrow = {name: d.itemsize for name, d in self.narrow.items()}
        given = (self.device, optimizer, dtypes, self.prices, hiding, frozenset(again), self.planner.compiled, narrow)
        costs = Costs(*given)
        shapes = {name: tuple(p.shape) for name, p in self.names.items()}
        return SpaceBuilder(self.graph, shapes, pins, costs, tied).build()

    def run(self, again: tuple[str, ...]) -> FoundPlan:
        """The best plan in which these blocks are computed again in the backward pass."""
        space = self.build(again, self.pins)
        carried = self._carry_out_usual(space, again)
        for problem in self._variants(space):
            best = min((self._measure(c.estimate) for c in carried if self._fits(c)), default=math.inf)
            with suppress(Infeasible, Unsolved):
                carried += self._solve_and_carry_out(space, problem, again, below=best)
        fitting = [c for c in carried if self._fits(c)]
        if not fitting:
            carried += self._carry_out_smallest(space, again)
            fitting = [c for c in carried if self._fits(c)]
        if not fitting:
            self._refuse(again, carried)
        chosen = min(fitting, key=lambda c: (self._measure(c.estimate), len(str(c.plan))))
        if len(space.graph.nodes) <= SMALL_GRAPH:
            fastest = min(carried, key=lambda c: self._measure(c.estimate))
            chosen = chosen if self._fits(fastest) else self._try_neighbours(space, fastest, chosen)
            chosen = self._try_neighbours(space, chosen, chosen)
            carried.append(chosen)
        self._best = min(self._best, *(self._measure(c.estimate) for c in carried))
        return self._finish(space, chosen, carried, again)

    def limit_counts(self, found: FoundPlan) -> bool:
        """Whether the best plan without a limit of memory is better than one that was found."""
        return found.finding.row_limit is not None or self._measure(found.finding.estimate) > self._best

    def run_with_some(self, blocks: tuple[str, ...], found: FoundPlan | None) -> FoundPlan:
        """The best plan in which some blocks are computed again: all, a half and so on, then numbers near the best.

        `found`: the best plan in which none is; None where none fits. The first blocks of each list are taken.
        """
        lists: dict[str, list[str]] = {}
        for block in blocks:
            lists.setdefault(block.rpartition(".")[0], []).append(block)
        longest = max(map(len, lists.values()), default=0)
        tried, best, number = {0}, 0, longest
        while number not in tried and (found is None or self._left() > 0):
            tried.add(number)
            some = tuple(b for own in lists.values() for b in own[: math.ceil(len(own) * number / longest)])
            with suppress(*([] if found is None else [DoesNotFit])):
                made = self.run(some)
                if found is None or self._measure(made.finding.estimate) < self._measure(found.finding.estimate):
                    found, best = made, number
            number //= 2
            if number in tried:  # between the best one and the next that is smaller
                number = (best + max((n for n in tried if n < best), default=best)) // 2
        assert found is not None
        return found

    def _fits(self, carried: _Carried) -> bool:
        return carried.estimate.peak_bytes <= self.limit

    def _measure(self, found: Estimate) -> float:
        return found.step_seconds if self.planner.objective == "seconds" else float(found.traffic_bytes)

    def _try_neighbours(self, space: Space, start: _Carried, best: _Carried) -> _Carried:
        """A plan that fits and is better than the best one, with one parameter after the other elsewhere; or the best.

        Equal parameters of all blocks go together. In small models a single decision counts, and what operators choose
        by themselves is no part of the program.
        """
        specs = {name: spec.placements for name, spec in start.plan.specs(self.model).items()}
        members: dict[str, list[str]] = {}
        for name, own in space.classes.parameters.items():
            members.setdefault(own, []).append(name)
        for own, names in members.items():
            for placements in space.layouts[own]:
                tried = specs | dict.fromkeys(names, placements)
                texts = {n: write_placements(p, self.mesh) for n, p in tried.items()}
                cut = fold_patterns({n: t for n, t in texts.items() if t != REPLICATED}, list(self.names))
                plan = replace(start.plan, parameters=cut)
                if tried == specs or not self._keeps_pins(space, plan, {}):
                    continue
                with suppress(PlanError, ValueError, NotImplementedError, UserWarning):
                    found, returned = self.rehearse(plan)
                    one = _Carried(plan, found, None, self._fix_layouts(space, plan), None)
                    better = self._measure(found) < self._measure(best.estimate)
                    if better and self._fits(one) and self._keeps_pins(space, plan, returned):
                        best, specs = one, tried if self._fits(start) else specs
        return best

    def _variants(self, space: Space) -> Iterator[PlanProblem]:
        """The problem with the inputs in each of their placements."""
        count = len(space.input_layouts)
        for taken in range(count):
            yield without(space.problem, space.inputs, [k for k in range(count) if k != taken])

    def _solve_and_carry_out(
        self, space: Space, problem: PlanProblem, again: tuple[str, ...], below: float = math.inf
    ) -> list[_Carried]:
        """The plans of a problem's solution; solved again with less memory while the rehearsed peak is over the limit.

        None where no solution costs less than `below`, which a plan takes that is known.
        """
        limit = self.tightened.get(again)
        found: list[_Carried] = []
        for _ in range(TIGHTER):
            if self._left() <= 0 and below < math.inf:
                break
            solution = solve(problem, memory_limit=limit, time_limit=max(5.0, self._left() / 4))
            if solution.cost >= below:
                break
            made = self.carry_out(space, problem, solution, limit, again, below)
            found += made
            least = min(c.estimate.peak_bytes for c in made)
            if least <= self.limit:
                break
            aim = solution.memory * self.limit / least
            limit = self.tightened[again] = min(aim, 0.97 * limit) if limit is not None else aim
        return found

    def _left(self) -> float:
        """The seconds that are left for this search."""
        return self.planner.time_limit - (time.monotonic() - self.started)

    def carry_out(
        self,
        space: Space,
        problem: PlanProblem,
        solution: Solution,
        limit: float | None,
        again: tuple[str, ...],
        below: float = math.inf,
    ) -> list[_Carried]:
        """Plans whose rehearsals come nearer and nearer to a solution, those of the least time first.

        One that takes several times as long as `below`, which a plan takes that is known, is left as it is.
        """
        base, wanted = self.write_plan(space, solution, again), self._wanted_outputs(space, solution)
        made: list[_Carried] = []
        every = fold_patterns({n: d.torch_name for n, d in self.narrow.items()}, list(self.names)) or None
        for dtypes in [base.gather_dtype, every, None] if base.gather_dtype else [None]:
            base = replace(base, gather_dtype=dtypes)  # what reads the results of a narrow module has to be so, too
            pinned: dict[str, dict[str, Placement]] = {}
            for _ in range(ROUNDS):
                plan = replace(base, activations=self._fold_activations(pinned) or None)
                try:
                    found, returned = self.rehearse(plan)
                except (PlanError, ValueError, UserWarning):
                    break
                made.append(_Carried(plan, found, solution, problem, limit))
                if self._measure(found) > HOPELESS * below or not self._pin_differences(wanted, returned, pinned):
                    break
            if made:
                break
        else:
            raise Infeasible
        if min(self._measure(c.estimate) for c in made) <= HOPELESS * below:
            made += self._free_parameters(made)
        return sorted(made, key=lambda c: self._measure(c.estimate))

    def _free_parameters(self, made: Sequence[_Carried]) -> list[_Carried]:
        """The smallest of these plans where none fits, with all gathered parameters freed after the forward pass."""
        smallest = min(made, key=lambda c: c.estimate.peak_bytes)
        if self._fits(smallest) or smallest.plan.reshard_after_forward is True or not smallest.plan.parameters:
            return []
        freed = replace(smallest.plan, reshard_after_forward=True)
        with suppress(PlanError, ValueError, UserWarning):
            return [smallest._replace(plan=freed, estimate=self.rehearse(freed)[0])]
        return []

    def _carry_out_usual(self, space: Space, again: tuple[str, ...]) -> list[_Carried]:
        """The plans that people write by hand, the plainest first: the answer is never worse than these."""
        made: list[_Carried] = []
        for write in self._usual_plans(space):
            if made and self._left() < self.planner.time_limit * (1 - USUAL_SHARE):
                break
            with suppress(PlanError, ValueError, NotImplementedError, UserWarning):
                plan = replace(write(), recompute=self._fold_blocks(again))
                even = self._cut_evenly(space, plan)
                for each in (plan, even) if even is not plan else (plan,):
                    estimate, returned = self.rehearse(each)
                    if self._keeps_pins(space, each, returned):
                        problem = space.problem
                        with suppress(PlanError):  # layouts that are no candidates, as uneven ones
                            problem = self._fix_layouts(space, each)
                        one = _Carried(each, estimate, None, problem, None)
                        made += [one, *self._free_parameters([one])]
        return made

    def _keeps_pins(self, space: Space, plan: ModelPlan, returned: Mapping[str, Placements]) -> bool:
        """Whether a plan by hand leaves what is pinned as it is; `returned`: where modules return their results."""
        given = {name: spec.placements for name, spec in plan.specs(self.model).items()}
        inputs = plan.input_placements or plan.replicated.placements
        return all(
            self.pins.allows(name, self.mesh)(placements)
            for name, placements in (*given.items(), *returned.items(), (INPUTS, inputs))
        ) and all(p in space.layouts[space.classes.parameters[n]] for n, p in given.items() if self.pins.has_units(n))

    def _usual_plans(self, space: Space) -> Iterator[Callable[[], ModelPlan]]:
        """Data parallelism along all axes, then each role for each axis; made when they are called."""
        for inputs in space.input_layouts:
            if all(p == Shard(0) for p in inputs):
                yield partial(ModelPlan, self.mesh, {}, input_plan=write_placements(inputs, self.mesh))
        every = itertools.product((*ROLES, ""), repeat=self.mesh.ndim)
        for roles in sorted(every, key=lambda roles: roles.count("")):
            named = [role for role in roles if role]
            if len(set(named)) == len(named):
                yield partial(self._write_usual, roles)

    def _write_usual(self, roles: Sequence[str]) -> ModelPlan:
        """The plan that `shardwise.hf.plan` makes where the axes have these names; those without one do nothing."""
        used = [axis for axis, role in enumerate(roles) if role]
        if not used:
            return ModelPlan(self.mesh, {}, input_plan=REPLICATED)
        renamed = Mesh.of(**{roles[axis]: self.mesh.shape[axis] for axis in used})
        given = self.inputs
        if not isinstance(given, Mapping):
            given = inspect.signature(self.model.forward).bind(*given).arguments
        made = usual_plan(self.model, renamed, given)
        names = {roles[axis]: self.mesh.axes[axis] for axis in used}

        def rename(text: str) -> str:
            return re.sub(r"\b(dp|fsdp|tp):", lambda m: f"{names[m[1]]}:", text)

        inputs = REPLICATED if made.input_plan is None else made.input_plan
        return ModelPlan(
            self.mesh,
            {pattern: rename(text) for pattern, text in made.parameters.items()},
            lengths=made.lengths,
            input_plan=rename(inputs) if isinstance(inputs, str) else {k: rename(v) for k, v in inputs.items()},
            activations=rename(made.activations) if isinstance(made.activations, str) else None,
        )

    def _cut_evenly(self, space: Space, plan: ModelPlan) -> ModelPlan:
        """The plan with parameters left whole that it cuts in no way of the problem, such as 4 heads over 8 ranks."""
        specs = {
            name: spec.placements
            for name, spec in plan.specs(self.model).items()
            if any(not isinstance(p, Replicate) for p in spec.placements)
        }
        known = {name: p for name, p in specs.items() if p in space.layouts[space.classes.parameters[name]]}
        if len(known) == len(specs):
            return plan
        cut = {name: write_placements(p, self.mesh) for name, p in known.items()}
        return replace(plan, parameters=fold_patterns(cut, list(self.names)))

    def _fix_layouts(self, space: Space, plan: ModelPlan) -> PlanProblem:
        """The problem in which parameters and inputs are as in a plan; PlanError where it has none of those."""
        problem, specs = space.problem, plan.specs(self.model)
        wanted = {space.parameters[own]: (space.layouts[own], specs[own].placements) for own in space.parameters}
        wanted[space.inputs] = space.input_layouts, plan.input_placements or ()
        for choice, (layouts, placements) in wanted.items():
            if placements not in layouts:
                raise PlanError(f"{problem.choices[choice].name}: {placements} is no candidate")
            taken = layouts.index(placements)
            problem = without(problem, choice, [k for k in range(len(layouts)) if k != taken])
        return problem

    def rehearse(self, plan: ModelPlan) -> tuple[Estimate, Mapping[str, Placements]]:
        """The estimate of a plan, and where its modules return their results."""
        planner, rank = self.planner, find_fullest_rank(self.model, plan, self.planner.dtype)
        parts = plan.input_placements or plan.replicated.placements
        inputs = split_inputs(self.inputs, parts, self.mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of plans that are only tried
            warnings.filterwarnings("error", message=".*the plan's `activations` keep a parameter where it is")
            rehearsal = rehearse(self.model, plan, inputs, rank, self.computed, self.loss)
        batch = math.prod(n for p, n in zip(parts, self.mesh.shape, strict=True) if p == Shard(0))
        rows = [t.shape[0] for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim]
        found = estimate(
            self.model,
            plan,
            batch=rows[0] if rows else max(1, self.mesh.size // batch),
            sequence=self.sequence,
            optimizer=planner.optimizer,
            dtype=planner.dtype,
            compute_dtype=planner.compute_dtype,
            topology=self.topology,
            device=self.device,
            inputs=inputs,
            compiled=planner.compiled,
            rehearsal=rehearsal,
        )
        return found, rehearsal.returned

    def write_plan(self, space: Space, solution: Solution, again: tuple[str, ...] = ()) -> ModelPlan:
        """A solution as patterns of parameters, an input plan, and what is freed after the forward pass."""
        by_id: dict[int, str] = {}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in self.names.items():
            own = space.classes.parameters[name]
            placements = space.layouts[own][solution.taken[space.parameters[own]]]
            by_id[id(tensor)] = write_placements(placements, self.mesh)
        texts = {name: text for name, t in every.items() if (text := by_id[id(t)]) != "replicated"}
        freed, narrow = dict[str, str](), dict[str, str]()
        gathered = False
        for number, moves in zip(space.graph.parameters.values(), space.graph.parameters, strict=True):
            ways = {m.name for m in solution.moves[space.flow_of[number]]} if number in space.flow_of else set()
            gathered = gathered or any(way.startswith((FREED, KEPT)) for way in ways)
            freed |= {moves: FREED} if any(way.startswith(FREED) for way in ways) else {}
            if any(way.endswith(NARROW) for way in ways):
                narrow |= {each: self.narrow[moves].torch_name for each in self._siblings(moves)}
        reshard: bool | list[str] | None = None
        if gathered:
            reshard = list(fold_patterns(freed, list(every))) if freed else False
        return ModelPlan(
            self.mesh,
            fold_patterns(texts, list(every)),
            input_plan=write_placements(space.input_layouts[solution.taken[space.inputs]], self.mesh),
            reshard_after_forward=reshard,
            gather_dtype=fold_patterns(narrow, list(every)) or None,
            recompute=self._fold_blocks(again),
        )

    def _siblings(self, name: str) -> list[str]:
        """The parameters of a parameter's module that may be gathered in a narrower dtype: a module has one dtype."""
        path = name.rpartition(".")[0]
        return [other for other in self.narrow if other.rpartition(".")[0] == path]

    def _fold_blocks(self, again: Sequence[str]) -> list[str] | None:
        """Blocks that are computed again, as patterns; with numbers of layers as a range."""
        lists: dict[str, list[str]] = {}
        for block in again:
            path, _, child = block.rpartition(".")
            lists.setdefault(path, []).append(child)
        found = []
        for path, children in lists.items():
            everyone = [name for name, _ in self.model.get_submodule(path).named_children()]
            ends = (children[0], children[-1])
            some = f"{{{ends[0]}-{ends[1]}}}" if len(children) > 2 else "{" + ",".join(children) + "}"
            last = "*" if children == everyone else some if len(children) > 1 else children[0]
            found.append(f"{path}.{last}" if path else last)
        return found or None

    def _wanted_outputs(self, space: Space, solution: Solution) -> dict[str, Placements]:
        """Where a solution has what each module returns: as all of its readers want it, or as it is made."""
        found: dict[str, Placements] = {}
        taken: set[int] = set()
        for module, number in space.graph.returned.items():
            if number in space.flow_of and number not in taken and module:
                taken.add(number)
                flow = space.flow_of[number]
                origin, moves = space.flows[flow], solution.moves[flow]
                wanted = {origin.wanted[m.wanted][0] for m in moves}
                made = {origin.made[m.made] for m in moves}
                if len(wanted) == 1:
                    found[module] = wanted.pop()
                elif len(made) == 1:
                    found[module] = made.pop()
        return found

    def _pin_differences(
        self,
        wanted: Mapping[str, Placements],
        returned: Mapping[str, Placements],
        pinned: dict[str, dict[str, Placement]],
    ) -> bool:
        """Pin what modules return where it is not what is wanted; whether anything new was pinned."""
        changed = False
        for module, placements in wanted.items():
            for axis, want, have in zip(self.mesh.axes, placements, returned.get(module, ()), strict=False):
                if want != have and not isinstance(want, Partial) and pinned.get(module, {}).get(axis) != want:
                    pinned.setdefault(module, {})[axis] = want
                    changed = True
        return changed

    def _fold_activations(self, pinned: Mapping[str, Mapping[str, Placement]]) -> dict[str, str]:
        texts = {
            module: ", ".join(f"{axis}: {format_placement(p)}" for axis, p in by_axis.items())
            for module, by_axis in pinned.items()
        }
        return fold_patterns(texts, [name for name, _ in self.model.named_modules() if name])

    def _carry_out_smallest(self, space: Space, again: tuple[str, ...]) -> list[_Carried]:
        """The plans of the solutions of least memory, with each placement of the inputs.

        Such a solution costs whatever it costs, and operators do not follow it: what a plan of it costs is found anew.
        """
        made: list[_Carried] = []
        for problem in self._variants(space):
            with suppress(Infeasible, Unsolved):
                solution = find_least_memory(problem, max(5.0, self._left() / 4))
                if solution is not None:
                    for each in self.carry_out(space, problem, solution, solution.memory, again):
                        made.append(each._replace(solution=None, problem=self._fix_layouts(space, each.plan)))
        return made

    def _refuse(self, again: tuple[str, ...], carried: Sequence[_Carried]) -> None:
        """Say by how much the memory is too little, and which pins need it."""
        least = min((c.estimate.peak_bytes for c in carried), default=None)
        lines = [f"no plan of {type(self.model).__name__} on {self.mesh} fits in {format_bytes(self.limit)} a rank"]
        if least is None:
            lines.append("no plan can be carried out with what is pinned")
        else:
            lines.append(f"memory: the smallest needs {format_bytes(least)}, {format_bytes(least - self.limit)} more")
        for pattern in self.pins.patterns:
            with suppress(PlanError):
                found = self._carry_out_smallest(self.build(again, self.pins.without(pattern)), again)
                if any(map(self._fits, found)):
                    lines.append(f"without the pin of {pattern!r} it fits")
        if self.planner.again is False and find_blocks(self.model):
            lines.append("blocks that are computed again in the backward pass (again=None) need less")
        raise DoesNotFit("; ".join(lines))

    def _finish(self, space: Space, chosen: _Carried, carried: Sequence[_Carried], again: tuple[str, ...]) -> FoundPlan:
        solution = chosen.solution or solve(chosen.problem, time_limit=max(5.0, self._left()))
        bound, covers = self._prove(space, chosen, again)
        covers += " in which these blocks are computed again" if again else ""
        spent = time.monotonic() - self.started
        certificate = Certificate(solution.cost, bound, self.planner.objective, covers, spent)
        others = sorted(
            ((str(c.plan.input_plan), c.estimate.step_seconds, c.estimate.peak_bytes) for c in carried),
            key=lambda row: row[1],
        )
        found = (space, space.problem, solution, chosen.limit, again)
        finding = Finding(certificate, chosen.estimate, tuple(others), *found)
        plan = chosen.plan
        return FoundPlan(
            plan.mesh,
            plan.parameters,
            input_plan=plan.input_plan,
            reshard_after_forward=plan.reshard_after_forward,
            activations=plan.activations,
            gather_dtype=plan.gather_dtype,
            recompute=plan.recompute,
            lengths=plan.lengths,
            finding=finding,
        )

    def _prove(self, space: Space, chosen: _Carried, again: tuple[str, ...]) -> tuple[float, str]:
        """A bound below all solutions: that of the problem in which equal blocks may differ, if there is time."""
        limit, left = chosen.limit if chosen.solution is not None else None, max(5.0, self._left())
        if len(set(space.classes.nodes)) < len(space.classes.nodes):
            with suppress(PlanError, Infeasible):
                loose = self.build(again, self.pins, tied=False)
                return solve(loose.problem, memory_limit=limit, time_limit=left, relaxed=True).bound, "all plans"
        tied = solve(space.problem, memory_limit=limit, time_limit=left, relaxed=True)
        is_all = len(set(space.classes.nodes)) == len(space.classes.nodes)
        return tied.bound, "all plans" if is_all else "plans with equal blocks alike"


def split_inputs(inputs: Inputs, placements: Placements, mesh: Mesh) -> Inputs:
    """The arguments of one rank, of those of all ranks together.

    >>> import torch
    >>> from shardwise.geometry import Replicate
    >>> split_inputs((torch.ones(8, 2),), (Shard(0), Replicate()), Mesh.of(dp=4, tp=2))[0].shape
    torch.Size([2, 2])
    """
    parts = math.prod(n for p, n in zip(placements, mesh.shape, strict=True) if p == Shard(0))
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim]
    batch = tensors[0].shape[0] if tensors else 0

    def take(tensor: Tensor) -> Tensor:
        return tensor[: batch // parts] if tensor.ndim and tensor.shape[0] == batch else tensor

    made: Inputs = pytree.tree_map_only(Tensor, take, inputs)
    return made


def _check_given(model: Any, inputs: Any, batch: int | None, sequence: int) -> None:
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise PlanError(f"a plan lays out the parameters of a module; {type(model).__name__} has none")
    if isinstance(inputs, Tensor):
        raise PlanError(
            "inputs are the arguments of a forward pass, as a tuple or a dict; got a tensor of shape "
            f"{tuple(inputs.shape)}: pass (x,)"
        )
    if (batch is not None and batch < 1) or sequence < 1:
        raise PlanError(f"batch and sequence are at least 1; got {batch} and {sequence}")


def _find_narrow(
    parameters: Mapping[str, Tensor], given: str | Mapping[str, str] | None, used: str | None
) -> dict[str, DType]:
    """The dtypes with fewer bytes in which parameters may be gathered, by name."""
    floating = [name for name, p in parameters.items() if p.is_floating_point()]
    if given is None:
        return {}
    patterns = match_patterns(given, floating) if isinstance(given, Mapping) else dict.fromkeys(floating, "")
    named = {name: find_dtype(given[p] if isinstance(given, Mapping) else given) for name, p in patterns.items()}
    own = {name: find_dtype(used or str(parameters[name].dtype)) for name in named}
    return {name: dtype for name, dtype in named.items() if dtype.itemsize < own[name].itemsize}


def parse_size(text: str) -> int:
    """A number of bytes from a text with a unit.

    >>> parse_size("64MB"), parse_size("1.5 GiB")
    (64000000, 1610612736)
    """
    number = text.strip().rstrip("BbiI").rstrip("KMGTkmgt").strip()
    unit = text.strip()[len(number) :].strip().upper()
    powers = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    base = 1024 if unit.endswith("IB") else 1000
    try:
        return int(float(number) * base ** powers[unit.removesuffix("IB").removesuffix("B")])
    except (KeyError, ValueError, OverflowError):
        raise PlanError(f"{text!r} is not a number of bytes; write for example 64MB or 40GiB") from None


def explain_plan(plan: FoundPlan, name: str | None = None) -> str:
    """Why parameters are where they are: what the second best placement of each would cost, and whether memory binds.

    `name`: a parameter, or a pattern of them; None: all.

    >>> import torch
    >>> planner = AutoPlanner("tp=2", fix={"inputs": "tp: S(0)", "weight": "tp: S(0)"})
    >>> plan = planner.plan(nn.Linear(8, 8, bias=False), (torch.ones(4, 8),))
    >>> print(explain_plan(plan, "weight"))
    weight: tp: S(0); no other is possible
    memory does not bind: ... of 80.0 GB
    """
    finding = plan.finding
    space, taken = finding.space, finding.solution.taken
    members: dict[str, list[str]] = {}
    for each, own in space.classes.parameters.items():
        members.setdefault(own, []).append(each)
    known = list(space.classes.parameters)
    asked = set(known if name is None else match_patterns([name], known))
    lines = []
    for own, names in members.items():
        if asked & set(names):
            choice, layouts = space.parameters[own], space.layouts[own]
            text = next(iter(fold_patterns(dict.fromkeys(names, ""), known)))
            lines.append(
                f"{text}: {write_placements(layouts[taken[choice]], plan.mesh)}; {_explain_next(finding, own)}"
            )
    return "\n".join([*lines, _explain_memory(finding)])


def _explain_next(finding: Finding, own: str) -> str:
    """What another placement of a parameter costs where all others stay, and where most of that comes from."""
    space, solution, mesh = finding.space, finding.solution, finding.space.graph.mesh
    choice, problem = space.parameters[own], finding.problem
    for each in (*space.parameters.values(), space.inputs):
        count, taken = len(problem.choices[each].costs), solution.taken[each]
        problem = without(problem, each, [k for k in range(count) if (k == taken) == (each == choice)])
    try:
        other = solve(problem, memory_limit=finding.row_limit)
    except Infeasible:
        return "no other is possible" + ("" if finding.row_limit is None else " within the memory")
    more = _format_cost(other.cost - solution.cost, finding.certificate.unit)
    text = f"the next best is {write_placements(space.layouts[own][other.taken[choice]], mesh)}, {more}"
    rises = []
    for flow, before, after in zip(finding.problem.flows, solution.moves, other.moves, strict=True):
        cost = (sum(m.whole_cost for m in after) - sum(m.whole_cost for m in before)) * flow.times
        rises.append((cost, flow.name))
    cost, name = max(rises, default=(0.0, ""))
    return text + (f" ({_format_cost(cost, finding.certificate.unit)} to move {name})" if cost > 0 else "")


def _format_cost(cost: float, unit: str) -> str:
    sign = "+" if cost >= 0 else "-"
    return sign + (f"{1000 * abs(cost):.3g} ms" if unit == "seconds" else format_bytes(round(abs(cost))))


def _explain_memory(finding: Finding) -> str:
    held, limit = finding.estimate.peak_bytes, finding.estimate.device.memory_bytes
    of = f"{format_bytes(held)} of {format_bytes(limit)}"
    if finding.row_limit is None:
        return f"memory does not bind: {of}"
    free = solve(finding.problem, relaxed=True)
    gain = _format_cost(max(0.0, finding.solution.cost - free.cost), finding.certificate.unit)
    return f"memory binds: {of}; without the limit {gain.replace('+', '-')}"
