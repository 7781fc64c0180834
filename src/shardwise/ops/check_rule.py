"""Is a rule correct? Each of its strategies is run and compared with the whole computation.

1. Draw inputs; compute the whole result and, where there are any, the gradients, in double precision.
2. Ask the rule for strategies with the inputs in every layout that it or discovery knows.
3. Carry each of them out by the engine, on worlds of 2 and 3 ranks in this process, with even and uneven cuts, and
   compare results and gradients; then on the edge values of discovery (other scales, zeros, ties, infinities).
4. What discovery finds and the rule does not offer is missing: slower than need be, not wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise._progress import Progress
from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.discovery import (
    COARSE,
    TOLERANCE,
    UNDECIDED,
    InputPlacements,
    Trial,
    draw_addends,
    draw_edge_trials,
    draw_trials,
    find_strategies,
    largest_size,
    line_up_placements,
    make_runnable,
    part_sizes,
    run_call,
    written_tensors,
)
from shardwise.ops.engine import compute
from shardwise.ops.propagation import same_kind
from shardwise.ops.registration import OperatorLike, format_strategy
from shardwise.ops.rule import (
    OperatorCall,
    Rule,
    Steps,
    Strategy,
    TensorMeta,
    ask_rule,
    find_rule,
    is_pointwise,
    resolve_op,
    set_rule,
    split_call,
)
from shardwise.ops.rules.pointwise import pointwise_rule
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

DIFFERENTIABLE = ("sum", "avg")  # pending reductions through which gradients pass
RUN_TIMEOUT = 30.0  # seconds; a wrong rule may leave ranks waiting for each other


@dataclass(frozen=True, slots=True)
class StrategyCase:
    """A call, its inputs and whole results, what results are weighed with in a loss, and the loss's gradients."""

    call: OperatorCall
    trial: Trial
    weights: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...] | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.trial.inputs

    @property
    def results(self) -> tuple[Any, ...]:
        return self.trial.results

    def loss(self, results: Sequence[Any]) -> Tensor | None:
        """A number that depends on every element of every result; None if nothing is differentiable."""
        terms = [
            torch.view_as_real(r * w).sum() if r.is_complex() else (r * w).sum()
            for r, w in zip(results, self.weights, strict=True)
            if w is not None and r.requires_grad
        ]
        return sum(terms[1:], terms[0]) if terms else None


@dataclass(frozen=True, slots=True)
class Deviation:
    """What differs from the whole computation: its name, the largest difference and where that is."""

    name: str
    error: float
    where: tuple[int, ...]

    def __str__(self) -> str:
        if self.error != self.error or self.error == float("inf"):
            return f"{self.name} is not comparable at {self.where}"
        return f"{self.name} is off by {self.error:.3g} at {self.where}"


@dataclass(frozen=True, slots=True)
class _Probe:
    """An operator under a name of its own, so that the engine knows one strategy for it and no other."""

    op: Any
    key: Hashable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    @property
    def _schema(self) -> Any:
        return self.op._schema

    @property
    def tags(self) -> Any:
        return self.op.tags

    def __str__(self) -> str:
        return str(self.op)


def make_specs(layout: Sequence[Placement], tensors: Sequence[Tensor], ranks: int, cut: str) -> list[MeshSpec] | None:
    """Specs on a mesh of one axis that cut the tensors evenly, unevenly, or leave a rank empty; None if one cannot."""
    mesh = Mesh.of(axis=ranks)
    specs = []
    for placement, tensor in zip(layout, tensors, strict=True):
        placed: Placement | None = placement
        if isinstance(placement, Shard):
            if not tensor.ndim:
                return None
            placed = _cut_shard(placement.dim, tensor.shape[placement.dim], ranks, cut)
        if placed is None:
            return None
        specs.append(MeshSpec(mesh, (placed,)))
    return specs


def _cut_shard(dim: int, length: int, ranks: int, cut: str) -> Shard | None:
    if cut == "empty":
        return Shard(dim, (0, length, *[0] * (ranks - 2)))
    sizes = part_sizes(length, ranks, cut == "uneven")
    if sizes is None:
        return None
    return Shard(dim, sizes) if cut == "uneven" else Shard(dim)


def run_strategy(
    cases: Sequence[StrategyCase], strategy: Strategy, specs: Sequence[MeshSpec], ranks: int
) -> list[Deviation]:
    """What differs when the strategy runs with the inputs laid out like this: outputs first, then by size."""
    call = cases[0].call
    probe = _Probe(call.op, (strategy.outputs, strategy.inputs, strategy.local, tuple(specs)))
    lined = replace(strategy, inputs=tuple(line_up_placements(call, strategy.inputs)))
    placed = (*strategy.outputs, *strategy.inputs)
    if any(isinstance(p, Partial) and p.op not in DIFFERENTIABLE for p in placed):
        cases = [replace(case, gradients=None) for case in cases]
    set_rule(probe, lambda *args, **kwargs: [lined])
    try:
        found = run_local(_run_cases_on_rank, ranks, probe, cases, tuple(specs), timeout=RUN_TIMEOUT)
    finally:
        set_rule(probe, None)
    return sorted((d for one in found for d in one), key=lambda d: (not d.name.startswith("output"), -d.error))


def _run_cases_on_rank(
    comm: Comm, probe: _Probe, cases: Sequence[StrategyCase], specs: Sequence[MeshSpec]
) -> list[Deviation]:
    return [d for case in cases for d in _run_case_on_rank(comm, probe, case, specs)]


def _run_case_on_rank(comm: Comm, probe: _Probe, case: StrategyCase, specs: Sequence[MeshSpec]) -> list[Deviation]:
    held = [
        _make_leaf(t, s, comm, case.gradients is not None, seed, case.trial)
        for seed, (t, s) in enumerate(zip(case.inputs, specs, strict=True))
    ]
    args, kwargs = case.call.fill_slots(held)
    result = compute(probe, args, kwargs)
    flat = list(result) if isinstance(result, list | tuple) else [] if result is None else [result]
    flat += [held[i] for i in written_tensors(case.call)]
    whole = [r.full() if isinstance(r, ShardedTensor) else r for r in flat]
    scale, on = case.trial.scale, f" on {case.trial.name}" if case.trial.name else ""
    if scale is not None and any(isinstance(p, Partial) for s in specs for p in s.placements):
        parts = [part for r in flat if isinstance(r, ShardedTensor) for part in r.local_parts]
        scale = max(scale, case.trial.addends, *(largest_size(part) for part in parts))  # large parts that cancel out
    found = [
        _measure_deviation(f"output {i}{on}", a, b, scale)
        for i, (a, b) in enumerate(zip(whole, case.results, strict=True))
        if not case.trial.rounds or (isinstance(b, Tensor) and (b.is_floating_point() or b.is_complex()))
    ]
    found += _measure_gradient_deviations(case, held, whole)
    return [d for d in found if d is not None]


def _make_leaf(value: Tensor, spec: MeshSpec, comm: Comm, grad: bool, seed: int, trial: Trial) -> ShardedTensor:
    """A ShardedTensor that makes up a value, with a leaf of its own on the tape."""
    (placement,) = spec.placements
    local = value
    if isinstance(placement, Shard):
        sizes = placement.sizes or tuple(chunk_sizes(value.shape[placement.dim], comm.world_size))
        local = value.narrow(placement.dim, sum(sizes[: comm.rank]), sizes[comm.rank])
    elif isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(seed)
        local = draw_addends(value, placement.op, comm.world_size, generator, trial.addends, trial.spread)[comm.rank]
    local = local.detach().clone(memory_format=torch.contiguous_format)
    local.requires_grad_(grad and (local.is_floating_point() or local.is_complex()))
    return wrap(spec.layout(tuple(value.shape)), (local,), comm)


def _measure_gradient_deviations(
    case: StrategyCase, held: Sequence[ShardedTensor], whole: Sequence[Any]
) -> list[Deviation | None]:
    if case.gradients is None:
        return []
    loss = case.loss(whole)
    if loss is None:
        return [Deviation("the tape of the results", float("inf"), ())]
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    found = []
    for number, (tensor, expected) in enumerate(zip(held, case.gradients, strict=True)):
        if not tensor.requires_grad:
            continue
        for local in tensor.local_parts:
            local.grad = torch.zeros_like(local) if local.grad is None else local.grad
        gradient = tensor.grad
        assert gradient is not None
        wanted = torch.zeros_like(case.inputs[number]) if expected is None else expected
        found.append(_measure_deviation(f"the gradient of tensor {number}", gradient.full(), wanted))
    return found


def _measure_deviation(name: str, found: Any, expected: Any, scale: float | None = None) -> Deviation | None:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return (
            None
            if isinstance(found, Tensor) == isinstance(expected, Tensor) and found == expected
            else Deviation(name, float("inf"), ())
        )
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return Deviation(f"{name} of shape {tuple(found.shape)} and {found.dtype}", float("inf"), ())
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = found.detach().to(wide), expected.detach().to(wide)
    gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
    limit = TOLERANCE.get(expected.dtype, COARSE) if expected.is_floating_point() or expected.is_complex() else 0.0
    size = torch.nan_to_num(other.abs(), 0.0, 0.0, 0.0)
    slack = 1.0 if scale is None else max(scale, float(size.max()) if size.numel() else 0.0, 1e-7)
    too_far = ~(gap <= limit * (slack + size))
    if not bool(too_far.any()):
        return None
    flat = torch.nan_to_num(torch.where(too_far, gap, 0.0), float("inf")).reshape(-1)
    worst = flat.argmax()
    where = tuple(int(i) for i in torch.unravel_index(worst, expected.shape)) if expected.ndim else ()
    return Deviation(name, float(flat[worst]), where)


WORLDS = (2, 3)


@dataclass(frozen=True, slots=True)
class WrongStrategy:
    """A strategy of a rule that does not reproduce the whole result: on how many ranks, split how, and what is off."""

    strategy: Strategy
    ranks: int
    cut: str
    problem: str
    error: float | None = None

    def __str__(self) -> str:
        return f"{format_strategy(self.strategy)} on {self.ranks} ranks, {self.cut} cuts: {self.problem}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found: wrong strategies, missing ones, and those that were run."""

    op: Any
    shapes: tuple[tuple[int, ...], ...]
    strategies: tuple[Strategy, ...]
    wrong: tuple[WrongStrategy, ...]
    missing: tuple[Strategy, ...]
    gradients: bool

    @property
    def ok(self) -> bool:
        """Whether no strategy is wrong."""
        return not self.wrong

    def __str__(self) -> str:
        what = "values and gradients" if self.gradients else "values"
        shapes = ", ".join(map(str, self.shapes))
        lines = [f"{self.op} on {shapes}: {len(self.strategies)} strategies checked, {what}"]
        lines += [f"  wrong: {w}" for w in self.wrong]
        lines += [f"  missing: {format_strategy(s)}" for s in self.missing]
        return "\n".join(
            lines if self.wrong or self.missing else [*lines, "  all right", f"  not decided: {UNDECIDED}"]
        )


def check_sharding(
    op: OperatorLike,
    *sample_args: Any,
    find_missing: bool = True,
    empty: bool = False,
    progress: Progress = None,
    **sample_kwargs: Any,
) -> CheckReport:
    """Verify the registered rule of an operator against the operator itself, gradients included.

    `empty`: cuts that leave ranks with nothing are checked as well. `find_missing=False` skips discovery. Samples on a
    device are copied to host memory, unless the operator does not run there. `progress`: as of `discover_sharding`.

    >>> print(check_sharding(torch.ops.aten.mm.default, torch.zeros(4, 6), torch.zeros(6, 5)))
    aten.mm.default on (4, 6), (6, 5): 6 strategies checked, values and gradients
      all right
      not decided: what differs by less than 1e-9 of the largest value, and values or lengths of other kinds than ...
    """
    op = resolve_op(op)
    rule = require_rule(op)
    call = make_runnable(split_call(op, sample_args, sample_kwargs))
    source, trials = draw_trials(call)
    found = find_strategies(call, progress).strategies if find_missing else ()
    case = _make_case(call, trials[0])
    check = _RuleCheck([case], rule)
    for ranks in WORLDS:
        for cut in ("even", "uneven", "empty")[: 3 if empty else 2]:
            check.all_layouts(ranks, cut, [s.inputs for s in found])
    edges = [StrategyCase(call, t, (None,) * len(t.results), None) for t in draw_edge_trials(call, source)[0]]
    for cases in ([c for c in edges if not c.trial.rounds], [c for c in edges if c.trial.rounds]):
        if not cases:
            continue
        on_edges = _RuleCheck(cases, rule)
        on_edges.all_layouts(2, "uneven", [s.inputs for s in found])
        known = {(w.strategy.inputs, w.strategy.outputs) for w in check.wrong}
        check.wrong += [w for w in on_edges.wrong if (w.strategy.inputs, w.strategy.outputs) not in known]
    missing = tuple(s for s in found if not any(_same_inputs(s.inputs, k.inputs) for k in check.offered))
    shapes = tuple(tuple(t.shape) for t in call.tensors)
    return CheckReport(
        op, shapes, tuple(check.offered), _worst_of_each(check.wrong), missing, case.gradients is not None
    )


def require_rule(op: Any) -> Rule:
    """The rule that the engine would ask."""
    rule = find_rule(op)
    if isinstance(rule, Steps):
        raise ValueError(f"{op} is computed in steps and has no strategies to check")
    if rule is not None:
        return rule
    if is_pointwise(op):
        return lambda *args, **kwargs: _ask_pointwise_rule(op, [*args, *kwargs.values()])
    raise ValueError(f"{op} has no rule; register one with @shardwise.register_sharding({op}), or discover one")


def _ask_pointwise_rule(op: Any, arguments: Sequence[Any]) -> list[Strategy]:
    return pointwise_rule(op, _list_metas(arguments), arguments) or []


def _list_metas(values: Sequence[Any]) -> list[TensorMeta]:
    flat = [m for v in values for m in (v if isinstance(v, list | tuple) else [v])]
    return [m for m in flat if isinstance(m, TensorMeta)]


@dataclass(slots=True)
class _RuleCheck:
    """The strategies that a rule offered for some layout, and those found wrong, during a check."""

    cases: Sequence[StrategyCase]
    rule: Rule
    offered: list[Strategy] = field(default_factory=list)
    wrong: list[WrongStrategy] = field(default_factory=list)

    def all_layouts(self, ranks: int, cut: str, known: Sequence[tuple[Placement | None, ...]]) -> None:
        """Query and run the rule for the known layouts and for those it requests itself."""
        tensors = self.cases[0].inputs
        waiting: list[InputPlacements] = [(Replicate(),) * len(tensors)]
        waiting += [_normalise_placements(layout, tensors) for layout in known]
        seen: set[InputPlacements] = set()
        while waiting:
            layout = waiting.pop(0)
            if layout in seen:
                continue
            seen.add(layout)
            specs = make_specs(layout, tensors, ranks, cut)
            if specs is None:
                continue
            strategies = self._ask_rule(specs)
            waiting += [_normalise_placements(s.inputs, tensors) for s in strategies]
            self._run_and_note(
                [s for s in strategies if _same_inputs(_normalise_placements(s.inputs, tensors), layout)],
                specs,
                ranks,
                cut,
            )

    def _ask_rule(self, specs: Sequence[MeshSpec]) -> list[Strategy]:
        call, tensors = self.cases[0].call, self.cases[0].inputs
        metas = [
            TensorMeta(tuple(t.shape), t.dtype, s.layout(tuple(t.shape)), s.placements)
            for t, s in zip(tensors, specs, strict=True)
        ]
        try:
            answer = ask_rule(self.rule, call.fill_slots(metas), (call.args, dict(call.kwargs)), len(metas))
        except UnsupportedOpError:
            return []
        return [] if isinstance(answer, Steps) else answer

    def _run_and_note(self, strategies: Sequence[Strategy], specs: Sequence[MeshSpec], ranks: int, cut: str) -> None:
        for strategy in strategies:
            if not any(_same_inputs(strategy.inputs, k.inputs) and strategy.outputs == k.outputs for k in self.offered):
                self.offered.append(strategy)
            layout = _normalise_placements(strategy.inputs, self.cases[0].inputs)
            fitting = [case for case in self.cases if case.trial.fits(layout, uneven=True)]
            if not fitting:
                continue
            try:
                deviations: Sequence[Deviation] = run_strategy(fitting, strategy, specs, ranks)
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError) as error:
                text = str(error).partition("\n")[0]
                self.wrong.append(WrongStrategy(strategy, ranks, cut, f"{type(error).__name__}: {text}"))
                continue
            self.wrong += [WrongStrategy(strategy, ranks, cut, str(d), d.error) for d in deviations[:1]]


def _normalise_placements(layout: Sequence[Placement | None], tensors: Sequence[Tensor]) -> InputPlacements:
    """Placements without lengths of their own, dims counted from the front."""
    return tuple(
        Shard(p.dim % max(1, t.ndim)) if isinstance(p, Shard) else (p or Replicate())
        for p, t in zip(layout, tensors, strict=True)
    )


def _same_inputs(one: Sequence[Placement | None], other: Sequence[Placement | None]) -> bool:
    return all(same_kind(a or Replicate(), b or Replicate()) for a, b in zip(one, other, strict=True))


def _worst_of_each(wrong: Sequence[WrongStrategy]) -> tuple[WrongStrategy, ...]:
    """One finding for each strategy: the one with the largest error."""
    kept: dict[Any, WrongStrategy] = {}
    for one in wrong:
        key = (one.strategy.inputs, one.strategy.outputs)
        before = kept.get(key)
        if before is None or (one.error or 0) > (before.error or 0):
            kept[key] = one
    return tuple(kept.values())


def _make_case(call: OperatorCall, trial: Trial) -> StrategyCase:
    """The whole results and gradients that strategies are held against."""
    differentiable = [t.is_floating_point() or t.is_complex() for t in trial.inputs]
    generator = torch.Generator().manual_seed(1)
    weights = [_draw_weight(r, generator) if isinstance(r, Tensor) else None for r in trial.results]
    plain = StrategyCase(call, trial, tuple(weights), None)
    if written_tensors(call) or not any(differentiable):
        return plain
    leaves = [t.clone().requires_grad_(d) for t, d in zip(trial.inputs, differentiable, strict=True)]
    return _add_gradients(plain, leaves, lambda: run_call(call, leaves))


def _draw_weight(result: Tensor, generator: torch.Generator) -> Tensor | None:
    if not (result.is_floating_point() or result.is_complex()):
        return None
    return torch.randn(result.shape, dtype=torch.float64, generator=generator, device="cpu").to(result)


def _add_gradients(case: StrategyCase, leaves: Sequence[Tensor], compute: Callable[[], list[Any]]) -> StrategyCase:
    """The case with gradients, if the operator has any: one without a backward formula says so by a warning."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*autograd kernel was not registered.*", UserWarning)
            loss = case.loss(compute())
            if loss is None:
                return case
            used = [t for t in leaves if t.requires_grad]
            grads = iter(torch.autograd.grad(loss, used, allow_unused=True))
    except (RuntimeError, NotImplementedError, UserWarning):
        return case
    found = tuple(next(grads) if t.requires_grad else None for t in leaves)
    return replace(case, gradients=found)
