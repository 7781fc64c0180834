"""One strategy of a rule, run by the engine on all ranks of a small world in this process."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh, MeshSpec, Partial, Placement, Shard
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.discovery.search import line_up_placements
from shardwise.ops.discovery.trial import COARSE, TOLERANCE, draw_addends, part_sizes, written_tensors
from shardwise.ops.engine.dispatcher import call_op
from shardwise.ops.engine.registry import Strategy, set_rule
from shardwise.ops.engine.schema import OperatorCall
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

DIFFERENTIABLE = ("sum", "avg")  # pending reductions through which gradients pass
RUN_TIMEOUT = 30.0  # seconds; a wrong rule may leave ranks waiting for each other


@dataclass(frozen=True, slots=True)
class StrategyCase:
    """A call, its inputs, its whole results, what results are weighed with in a loss, and the loss's gradients."""

    call: OperatorCall
    inputs: tuple[Tensor, ...]
    results: tuple[Any, ...]
    weights: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...] | None

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


def run_strategy(case: StrategyCase, strategy: Strategy, specs: Sequence[MeshSpec], ranks: int) -> list[Deviation]:
    """What differs when the strategy runs with the inputs laid out like this: outputs first, then by size."""
    probe = _Probe(case.call.op, (strategy.outputs, strategy.inputs, strategy.local, tuple(specs)))
    lined = replace(strategy, inputs=tuple(line_up_placements(case.call, strategy.inputs)))
    placed = (*strategy.outputs, *strategy.inputs)
    if any(isinstance(p, Partial) and p.op not in DIFFERENTIABLE for p in placed):
        case = replace(case, gradients=None)
    set_rule(probe, lambda *args, **kwargs: [lined])
    try:
        found = run_local(_run_case_on_rank, ranks, probe, case, tuple(specs), timeout=RUN_TIMEOUT)
    finally:
        set_rule(probe, None)
    return sorted((d for one in found for d in one), key=lambda d: (not d.name.startswith("output"), -d.error))


def _run_case_on_rank(comm: Comm, probe: _Probe, case: StrategyCase, specs: Sequence[MeshSpec]) -> list[Deviation]:
    held = [
        _make_leaf(t, s, comm, case.gradients is not None, seed)
        for seed, (t, s) in enumerate(zip(case.inputs, specs, strict=True))
    ]
    args, kwargs = case.call.fill_slots(held)
    result = call_op(probe, (), args, kwargs)
    flat = list(result) if isinstance(result, list | tuple) else [] if result is None else [result]
    flat += [held[i] for i in written_tensors(case.call)]
    whole = [r.full() if isinstance(r, ShardedTensor) else r for r in flat]
    found = [_measure_deviation(f"output {i}", a, b) for i, (a, b) in enumerate(zip(whole, case.results, strict=True))]
    found += _measure_gradient_deviations(case, held, whole)
    return [d for d in found if d is not None]


def _make_leaf(value: Tensor, spec: MeshSpec, comm: Comm, grad: bool, seed: int) -> ShardedTensor:
    """A ShardedTensor that makes up a value, with a leaf of its own on the tape."""
    (placement,) = spec.placements
    local = value
    if isinstance(placement, Shard):
        sizes = placement.sizes or tuple(chunk_sizes(value.shape[placement.dim], comm.world_size))
        local = value.narrow(placement.dim, sum(sizes[: comm.rank]), sizes[comm.rank])
    elif isinstance(placement, Partial):
        local = draw_addends(value, placement.op, comm.world_size, torch.Generator().manual_seed(seed))[comm.rank]
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


def _measure_deviation(name: str, found: Any, expected: Any) -> Deviation | None:
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
    too_far = ~(gap <= limit * (1 + torch.nan_to_num(other.abs(), 0.0, 0.0, 0.0)))
    if not bool(too_far.any()):
        return None
    flat = torch.nan_to_num(torch.where(too_far, gap, 0.0), float("inf")).reshape(-1)
    worst = flat.argmax()
    where = tuple(int(i) for i in torch.unravel_index(worst, expected.shape)) if expected.ndim else ()
    return Deviation(name, float(flat[worst]), where)
