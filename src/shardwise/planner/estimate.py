"""What does a training step of a model need under a plan, on each rank? Memory, traffic, time; nothing is allocated.

1. Parameters, gradients and the state of the optimizer follow from the layouts of the plan: those of the fullest rank.
2. Activations, the peak, the moves and the operations come from a rehearsal of the step on that rank, on the meta
   device (see `rehearsal`), so that operators choose their layouts as they do in training. From shapes alone there are
   no activations, and the traffic is that of gradients.
3. A move is priced by the links of a topology, as `shardwise plan` prices it; operations by the device. Moves and
   operations are taken one after the other: what overlaps makes a step faster than the estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from shardwise.geometry import Layout, MeshSpec, Shard, shorten_layout
from shardwise.geometry.dtypes import DType, find_dtype
from shardwise.nn.model_plan import ModelPlan
from shardwise.nn.patterns import PlanError
from shardwise.nn.plan_table import gradient_bytes_by_axis
from shardwise.planner.example_inputs import count_tokens, make_inputs
from shardwise.planner.figures import Estimate, ParameterRow
from shardwise.planner.hardware import Device, OptimizerState, find_device, find_optimizer
from shardwise.planner.pricing import PricedMoves
from shardwise.planner.rehearsal import Inputs, Loss, Rehearsal, rehearse
from shardwise.tensor.move import DEFAULT_BUFFER_BYTES
from shardwise.transfer import Topology

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class PlannedParameter(NamedTuple):
    """A parameter with its layout, and whether it is trained."""

    name: str
    dtype: DType
    layout: Layout
    trained: bool


def estimate(
    model: nn.Module | Shapes,
    plan: ModelPlan,
    *,
    batch: int = 8,
    sequence: int = 4096,
    optimizer: str | OptimizerState = "adamw",
    dtype: str | None = None,
    compute_dtype: str | None = None,
    topology: Topology | None = None,
    device: str | Device = "h100",
    inputs: Inputs | None = None,
    loss: Loss | None = None,
) -> Estimate:
    """Estimate one training step of a model under a plan, for any number of ranks, without a process group.

    - `model`: a module, on the meta device or not; or the shapes of its parameters by name.
    - `batch`, `sequence`: the sequences that each rank passes to the model, and their length. `inputs` has the
      arguments of the forward pass on a rank instead, as a tuple or a dict; `loss(outputs)` makes the loss.
    - `optimizer`: one of `OPTIMIZERS`, or an `OptimizerState`.
    - `dtype`: of the parameters, as in the notation ("bf16"); None: as the model has them.
    - `compute_dtype`: what operators compute in, where parameters are cast first, as autocast does.
    - `topology`: ranks per host and links; `device`: one of `DEVICES`, or a `Device`.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {"0.weight": "tp: S(0)", "1.weight": "tp: S(1)"}, input_plan="dp: S(0)")
    >>> net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))
    >>> found = estimate(net, plan, batch=2, sequence=16)
    >>> found.parameter_bytes, found.optimizer_bytes, found.activation_bytes, dict(found.traffic)
    (65536, 131072, 24580, {'dp': 65536})
    """
    state, placed = find_optimizer(optimizer), find_device(device)
    _check_float(dtype=dtype, compute_dtype=compute_dtype)
    links = topology or Topology(ranks_per_host=8)
    parameters = _find_parameters(model, plan, dtype)
    rank = _find_fullest_rank(plan, parameters)
    named = compute_dtype or dtype
    computed = None if named is None else find_dtype(named)
    rehearsal, tokens = None, batch * sequence
    if isinstance(model, nn.Module):
        given = make_inputs(model, batch, sequence) if inputs is None else inputs
        tokens = count_tokens(given)
        rehearsal = rehearse(model, plan, given, rank, None if computed is None else _torch_dtype(computed), loss)
    moves = PricedMoves(() if rehearsal is None else rehearsal.moves, plan.mesh, rank, links)
    traffic = moves.by_parameter if rehearsal is not None else _gradient_traffic(plan, parameters, rank)
    rows = tuple(_make_row(p, rank, state, traffic[p.name]) for p in parameters)
    widest = computed or max((p.dtype for p in parameters), key=lambda d: d.itemsize, default=find_dtype("f32"))
    flops = 0 if rehearsal is None else rehearsal.flops
    return Estimate(
        plan=plan.to_data(),
        ranks=math.prod(plan.mesh.shape),
        rank=rank,
        batch=batch,
        sequence=sequence,
        optimizer=optimizer if isinstance(optimizer, str) else repr(optimizer),
        device=placed,
        ranks_per_host=links.ranks_per_host,
        rows=rows,
        moves=moves.listed,
        traffic=moves.by_axis if rehearsal is not None else _traffic_by_axis(plan, parameters, rank),
        buffer_bytes=0 if rehearsal is None else rehearsal.buffer_bytes,
        activation_bytes=None if rehearsal is None else rehearsal.activation_bytes,
        peak_bytes=_find_peak(rehearsal, rows, moves.largest_bytes),
        tokens=tokens * _count_batches(plan),
        flops=flops,
        compute_seconds=placed.seconds(flops, widest),
        communication_seconds=moves.seconds,
    )


def _check_float(**named: str | None) -> None:
    for name, text in named.items():
        if text is not None and not _torch_dtype(find_dtype(text)).is_floating_point:
            raise PlanError(f"{name} is {text!r}, which cannot be trained in; pass a dtype of floats, such as bf16")


def _torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def _find_parameters(model: nn.Module | Shapes, plan: ModelPlan, dtype: str | None) -> list[PlannedParameter]:
    wanted = None if dtype is None else find_dtype(dtype)
    if not isinstance(model, nn.Module):
        specs = plan.specs_of(model)
        known = wanted or find_dtype("f32")
        return [PlannedParameter(n, known, specs[n].layout(tuple(shape)), True) for n, shape in model.items()]
    found = []
    for name, tensor, layout in plan.layouts(model):
        own = find_dtype(str(tensor.dtype))
        cast = wanted if wanted is not None and tensor.is_floating_point() else own
        found.append(PlannedParameter(name, cast, layout, tensor.requires_grad))
    return found


def _find_fullest_rank(plan: ModelPlan, parameters: Sequence[PlannedParameter]) -> int:
    """The first rank with the most bytes of parameters; equal layouts are looked at once."""
    totals: Counter[int] = Counter(dict.fromkeys(sorted(plan.mesh.ranks.reshape(-1).tolist()), 0))
    kinds = Counter((id(p.layout), p.dtype) for p in parameters)
    layouts = {id(p.layout): p.layout for p in parameters}
    ranks = np.array(list(totals))
    amounts = np.zeros(len(ranks), np.int64)
    for (key, dtype), count in kinds.items():
        held = layouts[key].elements_per_rank()
        amounts += np.array([held.get(r, 0) for r in totals], np.int64) * dtype.itemsize * count
    return int(ranks[int(amounts.argmax())])


def _make_row(parameter: PlannedParameter, rank: int, state: OptimizerState, traffic: int) -> ParameterRow:
    name, dtype, layout, trained = parameter
    elements = sum(math.prod(shape) for shape in layout.local_shapes(rank))
    held = elements * dtype.itemsize
    return ParameterRow(
        name,
        name.rpartition(".")[0],
        layout.shape,
        dtype.name,
        shorten_layout(layout, dtype.name),
        held,
        held if trained else 0,
        state.bytes_for(elements, dtype) if trained else 0,
        traffic,
    )


def _gradient_traffic(plan: ModelPlan, parameters: Sequence[PlannedParameter], rank: int) -> Counter[str]:
    """What gradients alone receive, where no step was rehearsed."""
    return Counter({p.name: sum(_gradient_bytes(plan, p, rank).values()) for p in parameters})


def _traffic_by_axis(plan: ModelPlan, parameters: Sequence[PlannedParameter], rank: int) -> dict[str, int]:
    total: Counter[str] = Counter()
    for parameter in parameters:
        total.update(_gradient_bytes(plan, parameter, rank))
    return dict(total)


def _gradient_bytes(plan: ModelPlan, parameter: PlannedParameter, rank: int) -> dict[str, int]:
    spec = parameter.layout.spec
    assert isinstance(spec, MeshSpec)
    held = sum(math.prod(shape) for shape in parameter.layout.local_shapes(rank)) * parameter.dtype.itemsize
    return {axis: round(count) for axis, count in gradient_bytes_by_axis(plan, spec, held)}


def _find_peak(rehearsal: Rehearsal | None, rows: Sequence[ParameterRow], largest_move: int) -> int:
    """The most bytes at once: those of the rehearsed step, the state of the optimizer, and the buffers of a move.

    Parameters that are cast for each operator are held in both dtypes.
    """
    parameters, gradients = sum(row.rank_bytes for row in rows), sum(row.gradient_bytes for row in rows)
    state = sum(row.optimizer_bytes for row in rows)
    if rehearsal is None:
        return parameters + gradients + state
    cast = 0 if rehearsal.parameter_bytes == parameters else parameters + gradients
    return rehearsal.peak_bytes + state + cast + min(largest_move, DEFAULT_BUFFER_BYTES)


def _count_batches(plan: ModelPlan) -> int:
    """How many different batches the ranks pass in: all along axes that cut the batch."""
    if plan.input_placements is None:
        return math.prod(plan.mesh.shape)
    sizes = zip(plan.input_placements, plan.mesh.shape, strict=True)
    return math.prod(size for placed, size in sizes if isinstance(placed, Shard))
