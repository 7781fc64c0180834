"""What does a training step of a model need under a plan, on each rank? Memory, traffic, time; nothing is allocated.

1. Parameters, gradients and the state of the optimizer follow from the layouts of the plan: those of the fullest rank.
2. Activations, the peak, the moves and the operations come from a rehearsal of the step on that rank, on the meta
   device (see `rehearsal`), so that operators choose their layouts as they do in training. From shapes alone there are
   no activations, and the traffic is that of gradients.
3. A move is priced by the links of a topology, as `shardwise plan` prices it, and operators by the device. A timeline
   lays them out one after the other, with the overlap that training has: eager, parameters gathered ahead and gradients
   summed beside the backward pass; compiled, the schedule of `shardwise.compile`, where small moves travel together.

What do the moves of a step cost one rank? Bytes by mesh axis and by parameter, and seconds by a topology: those of the
whole move, as all ranks make it.

What does a device have, and what does an optimizer keep? Two small tables, and values of your own.

An estimate in text, one plan or two side by side.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from shardwise._cache import cached
from shardwise._text import public
from shardwise.compiler.schedule import GraphMove, Timeline
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Shard, parse_layout, shorten_layout
from shardwise.geometry.notation import DType, find_dtype
from shardwise.hf.plans import find_key_heads
from shardwise.nn.plan import ModelPlan, PlanError
from shardwise.nn.plan_costs import gradient_bytes_by_axis
from shardwise.nn.plan_files import plan_from_data
from shardwise.ops.unshard import LEAST_BYTES, MOVED_GRADIENT, may_go_beside
from shardwise.planner.rehearsal import (
    Inputs,
    Loss,
    MeteredMove,
    MeteredOperator,
    Rehearsal,
    count_tokens,
    make_inputs,
    rehearse,
)
from shardwise.tensor.move import DEFAULT_BUFFER_BYTES, Move
from shardwise.transfer import Topology, Transfer, plan_transfer
from shardwise.transfer.cost import DEVICES, Device, node_seconds
from shardwise.transfer.transfer import EACH_ON_ITS_OWN, format_bytes, plan_state


def find_device(device: str | Device) -> Device:
    """A device by name, or the one that is passed."""
    if isinstance(device, Device):
        return device
    if device.lower() not in DEVICES:
        raise PlanError(
            f"the device {device!r} is not known; known are {', '.join(DEVICES)}; pass Device(name, memory_bytes, "
            "flops) for another one"
        )
    return DEVICES[device.lower()]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps for each element: tensors of the parameter's dtype, and further bytes.

    >>> from shardwise.geometry.notation import find_dtype
    >>> OptimizerState(tensors=2).bytes_for(10, find_dtype("f32"))
    80
    """

    tensors: int
    more_bytes: int = 0

    def bytes_for(self, elements: int, dtype: DType) -> int:
        return elements * (self.tensors * dtype.itemsize + self.more_bytes)


OPTIMIZERS = {
    "none": OptimizerState(0),
    "sgd": OptimizerState(0),
    "momentum": OptimizerState(1),
    "adagrad": OptimizerState(1),
    "rmsprop": OptimizerState(1),
    "lion": OptimizerState(1),
    "muon": OptimizerState(1),
    "adam": OptimizerState(2),
    "adamw": OptimizerState(2),
    "adamw8bit": OptimizerState(0, 2),
    "adamw-fp32": OptimizerState(0, 12),  # both moments and a copy of the parameters in 32 bits
}


def find_optimizer(name: str | OptimizerState) -> OptimizerState:
    """What an optimizer keeps, by its name.

    >>> from shardwise.geometry.notation import find_dtype
    >>> find_optimizer("adamw").bytes_for(10, find_dtype("bf16"))
    40
    """
    if isinstance(name, OptimizerState):
        return name
    if name.lower() not in OPTIMIZERS:
        raise PlanError(
            f"the optimizer {name!r} is not known; known are {', '.join(OPTIMIZERS)}; pass OptimizerState(tensors, "
            "more_bytes) for another one"
        )
    return OPTIMIZERS[name.lower()]


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: what a rank holds of it, and what it receives for it in a step.

    - `module`: the path of the module that owns it; `layout`: in the notation, with dtype and shape.
    - `rank_bytes`, `gradient_bytes`, `optimizer_bytes`: memory on the fullest rank.
    - `traffic_bytes`: received by that rank to gather the parameter and to reduce its gradient, in one step.

    >>> from shardwise import Mesh, ModelPlan
    >>> from shardwise.planner import estimate
    >>> found = estimate({"w": (8, 4)}, ModelPlan(Mesh.of(tp=2), {"w": "S(0)"}), dtype="f32")
    >>> found.rows[0].layout, found.rows[0].rank_bytes
    ('f32[8,4] on tp=2: S(0)', 64)
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    rank_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    traffic_bytes: int


@dataclass(frozen=True)
class StepMove:
    """A move between two layouts that a step makes `count` times; the figures are those of one time, on one rank.

    `label` is the operator that asks for it, `src` and `dst` are in the notation, `axes` the mesh axes along which it
    communicates ("tp", or "dp,tp" for bytes between ranks that differ in both), `parameters` whether it gathers
    parameters or reduces their gradients.

    >>> from torch import nn
    >>> from shardwise import Mesh, ModelPlan
    >>> from shardwise.planner import estimate
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    >>> found = estimate(model, ModelPlan(Mesh.of(dp=2), {}, input_plan="dp: S(0)"), batch=2, sequence=4)
    >>> {move.axes for move in found.moves}
    {('dp',)}
    """

    label: str
    backward: bool
    parameters: bool
    src: str
    dst: str
    count: int
    received_bytes: int
    sent_bytes: int
    seconds: float
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """What one training step needs on the fullest rank; made by `estimate`.

    - `parameter_bytes`, `gradient_bytes`, `optimizer_bytes`, `buffer_bytes`: memory that is held.
    - `activation_bytes`: held for the backward pass when the forward pass ends, or None if it is not known.
    - `peak_bytes`: the most that is held at once, with the state of the optimizer and the buffers of moves.
    - `traffic`: bytes that the rank receives in a step, by mesh axis; "dp,tp" are bytes between ranks that differ in
      both coordinates.
    - `compute_seconds`, `communication_seconds`: of a step, each for itself; `step_seconds`: together, where
      `exposed_seconds` of the moves are not hidden by computation. `compiled`: by the schedule of a compiled step.
    - `rows`: one for each parameter; `moves`: what is moved, what takes longest first; `activations`: bytes that are
      held for the backward pass, by module.
    - `tokens`: of all ranks' batches together. `flops` of this rank; `model_flops` without what is computed again.
    - `notes`: what to know about the plan.

    >>> from shardwise import Mesh, ModelPlan
    >>> from shardwise.planner import estimate
    >>> found = estimate({"w": (8, 4)}, ModelPlan(Mesh.of(tp=2), {"w": "S(0)"}), dtype="f32")
    >>> found.parameter_bytes, found.optimizer_bytes, found.fits
    (64, 128, True)
    """

    plan: Mapping[str, Any]
    ranks: int
    rank: int
    batch: int
    sequence: int
    optimizer: str
    device: Device
    ranks_per_host: int | None
    rows: tuple[ParameterRow, ...]
    moves: tuple[StepMove, ...]
    traffic: Mapping[str, int]
    buffer_bytes: int
    activation_bytes: int | None
    peak_bytes: int
    tokens: int
    flops: int
    model_flops: int
    dtype: str
    compiled: bool
    compute_seconds: float
    communication_seconds: float
    step_seconds: float
    activations: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def sequences(self) -> int:
        """The sequences of all ranks' batches together."""
        return self.batch * count_batches(plan_from_data(dict(self.plan), "plan"))

    @property
    def exposed_seconds(self) -> float:
        """The part of the step in which nothing is computed."""
        return max(0.0, self.step_seconds - self.compute_seconds)

    @property
    def utilisation(self) -> float:
        """The share of the device's peak that the step reaches (MFU): nothing that is computed again is counted."""
        peak = self.device.flops / max(1.0, find_dtype(self.dtype).itemsize / 2)
        return self.model_flops / (self.step_seconds * peak) if self.step_seconds else 0.0

    @property
    def mesh(self) -> str:
        """The mesh in the notation."""
        return str(self.plan["mesh"])

    @property
    def elements(self) -> int:
        """The parameters of the whole model."""
        total = 0
        for row in self.rows:
            count = 1
            for length in row.shape:
                count *= length
            total += count
        return total

    @property
    def parameter_bytes(self) -> int:
        return sum(row.rank_bytes for row in self.rows)

    @property
    def gradient_bytes(self) -> int:
        return sum(row.gradient_bytes for row in self.rows)

    @property
    def optimizer_bytes(self) -> int:
        return sum(row.optimizer_bytes for row in self.rows)

    @property
    def traffic_bytes(self) -> int:
        """The bytes that the rank receives in a step."""
        return sum(self.traffic.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the device."""
        return self.peak_bytes <= self.device.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data: every field and every figure of this class."""
        names = ("mesh", "elements", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "traffic_bytes")
        figures = {name: getattr(self, name) for name in (*names, "fits")}
        figures |= {"exposed_seconds": self.exposed_seconds, "utilisation": self.utilisation}
        return {**asdict(self), **figures}


@dataclass(frozen=True)
class MovePrice:
    """One move on one rank; `latency` is what it would take without any bytes."""

    received_bytes: int
    sent_bytes: int
    by_axis: Mapping[str, int]
    seconds: float
    latency: float


@cached()
def price_move(src: Layout, dst: Layout, itemsize: int, mesh: Mesh, rank: int, topology: Topology) -> MovePrice:
    """What a move costs one rank; searches ask for the same ones again and again.

    >>> src, dst = (parse_layout(f"f32[8] on tp=2: {text}").layout for text in ("S(0)", "R"))
    >>> price_move(src, dst, 4, Mesh.of(tp=2), 0, Topology(ranks_per_host=8)).by_axis
    {'tp': 16}
    """
    transfer = plan_transfer(src, dst, itemsize=itemsize, topology=topology, rank=rank)
    received, sent = (t.get(rank, 0) for t in (transfer.received_bytes, transfer.sent_bytes))
    by_axis = received_by_axis(transfer, mesh, rank)
    return MovePrice(received, sent, by_axis, *move_seconds(src, dst, itemsize, topology))


class PricedMoves:
    """The moves of a step, priced for one rank of a mesh; a move that is made again is planned once."""

    def __init__(self, moves: Sequence[MeteredMove], mesh: Mesh, rank: int, topology: Topology) -> None:
        self._moves, self._mesh = moves, mesh
        records = {id(move.record): move.record for move in moves}
        self._prices = {
            key: price_move(r.src, r.dst, r.dtype.itemsize, mesh, rank, topology) for key, r in records.items()
        }

    def price(self, move: MeteredMove) -> MovePrice:
        """What one of the moves costs."""
        return self._prices[id(move.record)]

    @cached_property
    def sent(self) -> tuple[MeteredMove, ...]:
        """The moves that send or receive something."""
        return tuple(m for m in self._moves if (p := self.price(m)).received_bytes or p.sent_bytes)

    @cached_property
    def listed(self) -> tuple[StepMove, ...]:
        """Each kind of move that sends or receives something, what takes longest in a step first."""
        kinds = Counter((id(m.record), m.backward, m.parameter is not None) for m in self._moves)
        records = {id(m.record): m.record for m in self._moves}
        made = [self._describe(records[key], backward, own, n) for (key, backward, own), n in kinds.items()]
        moved = [m for m in made if m.received_bytes or m.sent_bytes]
        return tuple(sorted(moved, key=lambda m: (-m.seconds * m.count, -m.received_bytes * m.count)))

    def _describe(self, record: Move, backward: bool, own: bool, count: int) -> StepMove:
        price = self._prices[id(record)]
        src, dst = (shorten_layout(layout, str(record.dtype)) for layout in (record.src, record.dst))
        figures = (count, price.received_bytes, price.sent_bytes, price.seconds, tuple(price.by_axis))
        return StepMove(record.label, backward, own, src, dst, *figures)

    @property
    def by_axis(self) -> dict[str, int]:
        """The bytes received in a step, by axis of the mesh."""
        total: Counter[str] = Counter()
        for move in self._moves:
            total.update(self._prices[id(move.record)].by_axis)
        order = {axis: i for i, axis in enumerate(self._mesh.axes)}
        return dict(sorted(total.items(), key=lambda item: (item[0].count(","), order.get(item[0], 0))))

    @property
    def by_parameter(self) -> Counter[str]:
        """The bytes received in a step to gather each parameter and to reduce its gradient."""
        total: Counter[str] = Counter()
        for move in self._moves:
            if move.parameter is not None:
                total[move.parameter] += self._prices[id(move.record)].received_bytes
        return total

    @property
    def largest_bytes(self) -> int:
        """What the largest move receives: moves are made one at a time, through buffers of at most this size."""
        return max((price.received_bytes for price in self._prices.values()), default=0)


@cached()
def move_seconds(src: Layout, dst: Layout, itemsize: int, topology: Topology) -> tuple[float, float]:
    """Seconds of a move as all ranks make it, and how many of them it would take without any bytes.

    >>> src, dst = (parse_layout(f"bf16[4096,4096] on tp=8: {text}").layout for text in ("S(0)", "R"))
    >>> [round(1e6 * seconds) for seconds in move_seconds(src, dst, 2, Topology(ranks_per_host=8))]
    [124, 26]
    """
    transfer = plan_transfer(src, dst, itemsize=itemsize, topology=topology)
    seconds = transfer.estimate(topology)
    return seconds, min(seconds, transfer.estimate(topology.without_bytes()))


def received_by_axis(transfer: Transfer, mesh: Mesh, rank: int) -> dict[str, int]:
    """The bytes that a rank receives, by the axes along which the sender has another coordinate.

    >>> from shardwise.geometry import MeshSpec, Replicate, Shard
    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> src, dst = (MeshSpec(mesh, p).layout((4, 4)) for p in ((Shard(0), Shard(1)), (Replicate(), Replicate())))
    >>> received_by_axis(plan_transfer(src, dst, itemsize=4, rank=0), mesh, 0)
    {'tp': 16, 'dp': 16, 'dp,tp': 16}
    """
    edges = [(s, n) for (s, d), n in transfer.bytes_by_edge.items() if d == rank]
    found: Counter[str] = Counter()
    if edges:
        place = {int(r): i for i, r in enumerate(mesh.ranks.reshape(-1))}
        own = np.array(np.unravel_index(place[rank], mesh.shape))
        theirs = np.array(np.unravel_index([place[s] for s, _ in edges], mesh.shape)).T
        for differs, (_, nbytes) in zip(theirs != own, edges, strict=True):
            found[",".join(a for a, other in zip(mesh.axes, differs, strict=True) if other)] += nbytes
    return dict(found)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of its operators and its moves each for themselves."""

    step: float
    compute: float
    communication: float


def lay_out_eager(rehearsal: Rehearsal, moves: PricedMoves, device: Device) -> StepTime:
    """The time of a step as Python runs it.

    Python dispatches operators, and an accelerator computes behind it. Moves travel one after the other. A move holds
    up what follows, with two exceptions: parameters are gathered while the operator before is computed, and the sums of
    their gradients end with the backward pass (`may_go_beside`). What goes on beside takes time of its own from the
    computation, where the device has no `overlap`.
    """
    sent, prices = moves.sent, [moves.price(m) for m in moves.sent]
    spans = [device.move_seconds(m.kind, p.seconds, p.latency) for m, p in zip(sent, prices, strict=True)]
    large = [
        m.parameter is not None and max(p.received_bytes, p.sent_bytes) >= LEAST_BYTES
        for m, p in zip(sent, prices, strict=True)
    ]
    beside = [
        big and m.record.label.startswith(MOVED_GRADIENT) and may_go_beside(m.record)
        for m, big in zip(sent, large, strict=True)
    ]
    ahead = [number for number, m in enumerate(sent) if large[number] and m.gathers]
    following = {a: b for a, b in itertools.pairwise(ahead) if sent[a].backward is sent[b].backward}
    python = computed = port = computing = 0.0
    ends: dict[int, float] = {}
    number = 0
    for place in range(len(rehearsal.operators) + 1):
        while number < len(sent) and sent[number].place <= place:
            now = max(computed, python)
            if number not in ends:
                ends[number] = port = max(port, now) + spans[number]
            if beside[number]:
                computed += (1 - device.overlap) * spans[number]
            else:
                computed = max(computed, ends[number])
                python = python if device.asynchronous else computed
            if number in following:
                seconds = spans[following[number]]
                ends[following[number]] = port = max(port, computed) + seconds
                computed += (1 - device.overlap) * seconds
            number += 1
        if place < len(rehearsal.operators):
            seconds = _operator_seconds(rehearsal.operators[place], device)
            python = (python if device.asynchronous else max(python, computed)) + device.eager_call
            computed = max(computed, python) + seconds
            computing += seconds + (0 if device.asynchronous else device.eager_call)
    return StepTime(max(computed, port), computing, sum(spans))


def lay_out_compiled(rehearsal: Rehearsal, moves: PricedMoves, device: Device, limit: int) -> StepTime:
    """The time of a compiled step: the starts and waits that `shardwise.compile` writes into its graph."""
    sent, prices = moves.sent, {number: moves.price(m) for number, m in enumerate(moves.sent)}
    found = [GraphMove(n, m.record, m.ready, m.use) for n, m in enumerate(sent)]
    timeline = Timeline(sorted(found, key=lambda m: (m.use, m.ready, m.node)), limit)
    clock = port = computing = moving = 0.0
    ends: dict[int, float] = {}
    for number in range(len(rehearsal.operators) + 1):
        for kind, group in timeline.events_before(number, at_start=number == 0):
            if kind == "start":
                own = [prices[m.node] for m in group]
                together = max(p.latency for p in own) + sum(p.seconds - p.latency for p in own)
                moving += together
                port = max(port, clock) + together
                ends |= dict.fromkeys((m.node for m in group), port)
                clock += (1 - device.overlap) * together
            else:
                clock = max([clock, *(ends[m.node] for m in group)])
        if number < len(rehearsal.operators):
            seconds = _operator_seconds(rehearsal.operators[number], device)
            clock += seconds
            computing += seconds
    return StepTime(max(clock, port), computing, moving)


def _operator_seconds(operator: MeteredOperator, device: Device) -> float:
    return node_seconds(
        device, flops=operator.flops, nbytes=operator.nbytes, shape=operator.shape, dtype=operator.dtype
    )


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class PlannedParameter(NamedTuple):
    """A parameter with its layout, and whether it is trained."""

    name: str
    dtype: DType
    layout: Layout
    trained: bool


@public
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
    again: bool | Sequence[str] = False,
    compiled: bool = False,
    rehearsal: Rehearsal | None = None,
) -> Estimate:
    """Estimate one training step of a model under a plan, for any number of ranks, without a process group.

    - `model`: a module, on the meta device or not; or the shapes of its parameters by name.
    - `batch`, `sequence`: what each rank passes to the model; or `inputs`, the arguments of its forward pass, as a
      tuple or a dict. `loss(outputs)` makes the loss.
    - `optimizer`: one of `OPTIMIZERS`, or an `OptimizerState`; `dtype`: of the parameters, None as the model has them.
    - `compute_dtype`: what operators compute in, where parameters are cast first, as autocast does.
    - `topology`: hosts and links; `device`: one of `DEVICES`, or a `Device`.
    - `again`: modules that are computed again in the backward pass, by patterns, or True; else the plan's `recompute`.
    - `compiled`: the time under `shardwise.compile`; `rehearsal`: what `rehearse` returned, if that is known.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {"0.weight": "tp: S(0)", "1.weight": "tp: S(1)"}, input_plan="dp: S(0)")
    >>> net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))
    >>> found = estimate(net, plan, batch=2, sequence=16)
    >>> found.parameter_bytes, found.optimizer_bytes, found.activation_bytes, dict(found.traffic)
    (65536, 131072, 24580, {'dp': 65536})
    """
    state, placed = find_optimizer(optimizer), find_device(device)
    check_float(dtype=dtype, compute_dtype=compute_dtype)
    links = topology or Topology(ranks_per_host=8)
    parameters = _find_parameters(model, plan, dtype)
    rank = _find_fullest_rank(plan, parameters)
    computed = find_dtype(named) if (named := compute_dtype or dtype) is not None else None
    tokens = batch * sequence
    if isinstance(model, nn.Module):
        given = make_inputs(model, batch, sequence) if inputs is None else inputs
        tokens = count_tokens(given)
        if rehearsal is None:
            rehearsal = rehearse(model, plan, given, rank, computed, loss, again=again)
    moves = PricedMoves(() if rehearsal is None else rehearsal.moves, plan.mesh, rank, links)
    traffic = moves.by_parameter if rehearsal is not None else _gradient_traffic(plan, parameters, rank)
    rows = tuple(_make_row(p, rank, state, traffic[p.name]) for p in parameters)
    widest = computed or max((p.dtype for p in parameters), key=lambda d: d.itemsize, default=find_dtype("f32"))
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
        peak_bytes=_find_peak(rehearsal, rows, moves.largest_bytes),
        tokens=tokens * count_batches(plan),
        dtype=widest.name,
        compiled=compiled,
        notes=_find_notes(model, plan) if isinstance(model, nn.Module) else (),
        **_step_figures(rehearsal, moves, placed, compiled),
    )


def _step_figures(rehearsal: Rehearsal | None, moves: PricedMoves, device: Device, compiled: bool) -> dict[str, Any]:
    """What a rehearsal says; without one no activations are known, and no time."""
    found = rehearsal or Rehearsal(0, 0, 0, 0, 0, (), (), {}, 0, {})
    time = StepTime(0.0, 0.0, 0.0)
    if rehearsal is not None and compiled:
        time = lay_out_compiled(found, moves, device, device.memory_bytes // 16)
    elif rehearsal is not None:
        time = lay_out_eager(found, moves, device)
    return {
        "buffer_bytes": found.buffer_bytes,
        "activation_bytes": None if rehearsal is None else found.activation_bytes,
        "flops": found.flops,
        "model_flops": min(found.flops, 3 * found.forward_flops),
        "compute_seconds": time.compute,
        "communication_seconds": time.communication,
        "step_seconds": time.step,
        "activations": found.activations,
    }


def check_float(**named: str | None) -> None:
    """Raise for dtypes that cannot be trained in, by the names of the arguments."""
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


def find_fullest_rank(model: nn.Module, plan: ModelPlan, dtype: str | None = None) -> int:
    """The first rank with the most bytes of parameters.

    >>> plan = ModelPlan(Mesh.of(tp=2), {"weight": "S(0) sizes(1,3)"})
    >>> find_fullest_rank(nn.Linear(2, 4), plan)
    1
    """
    return _find_fullest_rank(plan, _find_parameters(model, plan, dtype))


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


def _find_notes(model: nn.Module, plan: ModelPlan) -> tuple[str, ...]:
    """Heads of keys and values that are fewer than the ranks that split the queries: they stay whole."""
    specs = plan.specs(model)
    notes = []
    for name, (own, heads) in find_key_heads(model).items():
        queries = specs.get(own)
        for axis, size in zip(plan.mesh.axes, plan.mesh.shape, strict=True):
            number = plan.mesh.axes.index(axis)
            split = queries is not None and queries.placements[number] == Shard(0)
            if split and heads % size and not isinstance(specs[name].placements[number], Shard):
                notes.append(
                    f"{name}: {heads} heads of keys and values on {axis}={size} are not divided, so every rank has "
                    f"all of them, and what follows from them may be whole; use {axis}={math.gcd(heads, size)}"
                )
    return tuple(dict.fromkeys(_fold_path(note) for note in notes))


def _fold_path(note: str) -> str:
    """A note about a parameter of a layer as one about those of all layers."""
    name, colon, text = note.partition(":")
    return _NUMBER.sub("*", name) + colon + text


def batch_for(plan: ModelPlan, sequences: int) -> int:
    """The sequences that each rank passes to the model, of a batch of all ranks together.

    >>> batch_for(ModelPlan(Mesh.of(dp=4, tp=2), {}, input_plan="dp: S(0)"), 32)
    8
    """
    count = count_batches(plan)
    if sequences % count:
        raise PlanError(
            f"{sequences} sequences in all are not divided by the {count} batches of the plan on {plan.mesh}; use a "
            f"multiple of {count}"
        )
    return sequences // count


def count_batches(plan: ModelPlan) -> int:
    """How many different batches the ranks pass in: all along axes that cut the batch."""
    if plan.input_placements is None:
        return math.prod(plan.mesh.shape)
    sizes = zip(plan.input_placements, plan.mesh.shape, strict=True)
    return math.prod(size for placed, size in sizes if placed.is_shard(0))


SHOWN = 12
_NUMBER = re.compile(r"\b\d+\b")


def memory_rows(found: Estimate) -> list[tuple[str, int | None]]:
    """The parts of a rank's memory by name, in bytes; None where it is not known."""
    return [
        ("parameters", found.parameter_bytes),
        ("gradients", found.gradient_bytes),
        ("optimizer state", found.optimizer_bytes),
        ("buffers", found.buffer_bytes),
        ("activations", found.activation_bytes),
        ("peak", found.peak_bytes),
    ]


def summary_rows(plans: Sequence[Estimate]) -> list[tuple[str, ...]]:
    """The figures of one or several estimates, one row for each figure."""
    rows: list[tuple[str, ...]] = [("mesh", *(p.mesh for p in plans)), ("ranks", *(f"{p.ranks:,}" for p in plans))]
    for number, (name, _) in enumerate(memory_rows(plans[0])):
        amounts = [memory_rows(plan)[number][1] for plan in plans]
        rows.append((name, *("unknown" if a is None else format_bytes(a) for a in amounts)))
    rows.append(("memory", *map(_memory_text, plans)))
    for axis in dict.fromkeys(axis for plan in plans for axis in plan.traffic):
        rows.append((f"traffic {axis}", *(format_bytes(plan.traffic.get(axis, 0)) for plan in plans)))
    texts: list[tuple[str, Callable[[Estimate], str]]] = [
        ("compute", lambda p: _seconds_text(p.compute_seconds)),
        ("communication", lambda p: f"{_seconds_text(p.communication_seconds)}, {_exposed_text(p)}"),
        ("step", lambda p: _seconds_text(p.step_seconds) + (", compiled" if p.compiled else "")),
        ("tokens per step", lambda p: f"{p.tokens:,}"),
        ("tokens per second", lambda p: f"{p.tokens / p.step_seconds:,.0f}" if p.step_seconds else "unknown"),
        ("MFU", lambda p: f"{100 * p.utilisation:.1f} % of {p.device.name}" if p.step_seconds else "unknown"),
    ]
    return [*rows, *((name, *map(read, plans)) for name, read in texts)]


def _exposed_text(plan: Estimate) -> str:
    return f"{_seconds_text(plan.exposed_seconds)} exposed"


def _memory_text(plan: Estimate) -> str:
    room = plan.device.memory_bytes - plan.peak_bytes
    of = f"{format_bytes(plan.device.memory_bytes)} of {plan.device.name}"
    return f"{of}: fits, {format_bytes(room)} free" if plan.fits else f"{of}: {format_bytes(-room)} too little"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def parameter_rows(found: Estimate) -> list[tuple[str, ...]]:
    """One row for each parameter, equal layers folded to one."""
    return [
        (
            row.name,
            str(count),
            row.layout,
            format_bytes(row.rank_bytes * count),
            format_bytes((row.gradient_bytes + row.optimizer_bytes) * count),
            format_bytes(row.traffic_bytes * count) if row.traffic_bytes else "-",
        )
        for row, count in fold_rows(found.rows)
    ]


PARAMETER_HEAD = ("parameter", "count", "layout", "memory", "training memory", "traffic")
ACTIVATION_HEAD = ("activations of", "count", "memory")
MOVE_HEAD = ("move of a step", "count", "from", "to", "received", "axes", "time")


def fold_rows(rows: Sequence[ParameterRow]) -> list[tuple[ParameterRow, int]]:
    """Rows whose names differ in numbers only, and nothing else, as one: 'blocks.{0-79}.up.weight'."""
    groups: dict[tuple[object, ...], list[ParameterRow]] = {}
    for row in rows:
        key = replace(row, name=_NUMBER.sub("#", row.name), module="")
        groups.setdefault((key,), []).append(row)
    return [(replace(group[0], name=_fold_names([r.name for r in group])), len(group)) for group in groups.values()]


def _fold_names(names: Sequence[str]) -> str:
    """One name for names that differ in numbers only.

    >>> _fold_names(["b.0.up", "b.1.up", "b.7.up"])
    'b.{0-7}.up'
    """
    numbers = list(zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True))
    texts = iter(str(n[0]) if min(n) == max(n) else f"{{{min(n)}-{max(n)}}}" for n in numbers)
    return _NUMBER.sub(lambda _: next(texts), names[0])


def activation_rows(found: Estimate) -> list[tuple[str, ...]]:
    """What is held for the backward pass by module, most first; equal ones of equal layers folded to one."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, nbytes in found.activations.items():
        groups.setdefault((_NUMBER.sub("#", name), nbytes), []).append(name or "(outside of modules)")
    ordered = sorted(groups.items(), key=lambda item: -item[0][1] * len(item[1]))
    rows = [(_fold_names(names), str(len(names)), format_bytes(n * len(names))) for (_, n), names in ordered]
    return _and_more(rows, lambda left: f"{format_bytes(sum(n * len(names) for (_, n), names in ordered[-left:]))}")


def _and_more(rows: Sequence[tuple[str, ...]], sum_up: Callable[[int], str]) -> list[tuple[str, ...]]:
    """The first rows, and one for the others."""
    left = len(rows) - SHOWN
    if left <= 1:
        return list(rows)
    return [*rows[:SHOWN], (f"and {left} more", *[""] * (len(rows[0]) - 2), sum_up(left))]


def move_rows(found: Estimate) -> list[tuple[str, ...]]:
    """The moves that take longest in a step, and how long the others take."""
    rows = [
        (
            move.label,
            str(move.count),
            move.src,
            move.dst.partition(": ")[2] or move.dst,
            format_bytes(move.received_bytes * move.count),
            "+".join(move.axes),
            _seconds_text(move.seconds * move.count),
        )
        for move in found.moves
    ]
    return _and_more(rows, lambda left: _seconds_text(sum(m.seconds * m.count for m in found.moves[-left:])))


def resharding_bytes(one: Estimate, other: Estimate) -> int | None:
    """The bytes that all ranks send together to turn the parameters of one plan into those of the other.

    None where the plans are for other parameters, or a layout is too long to be written.
    """
    layouts = {row.name: row.layout for row in other.rows}
    if {row.name for row in one.rows} != set(layouts):
        return None
    try:
        pairs = [(parse_layout(row.layout), parse_layout(layouts[row.name])) for row in one.rows]
    except LayoutError:
        return None
    return plan_state(((a.layout, b.layout, a.itemsize) for a, b in pairs), EACH_ON_ITS_OWN).moved_bytes
