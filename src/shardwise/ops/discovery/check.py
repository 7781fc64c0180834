"""Is a rule correct? Each of its strategies is run and compared with the whole computation.

1. Draw inputs; compute the whole result and, where there are any, the gradients, in double precision.
2. Ask the rule for strategies with the inputs in every layout that it or discovery knows.
3. Carry each of them out by the engine, on worlds of 2 and 3 ranks in this process, with even and uneven cuts, and
   compare results and gradients.
4. What discovery finds and the rule does not offer is missing: slower than need be, not wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import MeshSpec, Placement, Replicate, Shard
from shardwise.ops.discovery.auto_rule import format_strategy
from shardwise.ops.discovery.run_strategy import Deviation, StrategyCase, make_specs, run_strategy
from shardwise.ops.discovery.search import InputPlacements, Trial, draw_trials, find_strategies, make_runnable
from shardwise.ops.discovery.trial import run_call, written_tensors
from shardwise.ops.engine.choice.placement_cost import same_kind
from shardwise.ops.engine.registry import Rule, Steps, Strategy, TensorMeta, ask_rule, find_rule
from shardwise.ops.engine.schema import OperatorCall, is_pointwise, resolve_op, split_call
from shardwise.ops.rules.pointwise import pointwise_rule
from shardwise.tensor.dispatch import UnsupportedOpError

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
        return "\n".join(lines if self.wrong or self.missing else [*lines, "  all right"])


def check_sharding(
    op: Any, *sample_args: Any, find_missing: bool = True, empty: bool = False, **sample_kwargs: Any
) -> CheckReport:
    """Verify the registered rule of an operator against the operator itself, gradients included.

    `empty`: cuts that leave ranks with nothing are checked as well. `find_missing=False` skips discovery. Samples on a
    device are copied to host memory, unless the operator does not run there.

    >>> print(check_sharding(torch.ops.aten.mm.default, torch.zeros(4, 6), torch.zeros(6, 5)))
    aten.mm.default on (4, 6), (6, 5): 6 strategies checked, values and gradients
      all right
    """
    op = resolve_op(op)
    rule = require_rule(op)
    call = make_runnable(split_call(op, sample_args, sample_kwargs))
    _, trials = draw_trials(call)
    found = find_strategies(call).strategies if find_missing else ()
    case = _make_case(call, trials[0])
    check = _RuleCheck(case, rule)
    for ranks in WORLDS:
        for cut in ("even", "uneven", "empty")[: 3 if empty else 2]:
            check.all_layouts(ranks, cut, [s.inputs for s in found])
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

    case: StrategyCase
    rule: Rule
    offered: list[Strategy] = field(default_factory=list)
    wrong: list[WrongStrategy] = field(default_factory=list)

    def all_layouts(self, ranks: int, cut: str, known: Sequence[tuple[Placement | None, ...]]) -> None:
        """Query and run the rule for the known layouts and for those it requests itself."""
        tensors = self.case.inputs
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
        call, tensors = self.case.call, self.case.inputs
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
            try:
                deviations: Sequence[Deviation] = run_strategy(self.case, strategy, specs, ranks)
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
    plain = StrategyCase(call, trial.inputs, trial.results, tuple(weights), None)
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
    return StrategyCase(case.call, case.inputs, case.results, case.weights, found)
