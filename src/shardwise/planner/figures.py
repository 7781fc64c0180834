"""The figures of an estimate: values that can be printed, compared, and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.planner.hardware import Device


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
    - `compute_seconds`, `communication_seconds`: of a step, one after the other in `step_seconds`.
    - `rows`: one for each parameter; `moves`: what is moved, most bytes first.
    - `tokens`: of all ranks' batches together.

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
    compute_seconds: float
    communication_seconds: float

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
    def step_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of the device."""
        return self.peak_bytes <= self.device.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data: every field and every figure of this class."""
        names = ("mesh", "elements", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "traffic_bytes")
        figures = {name: getattr(self, name) for name in (*names, "step_seconds", "fits")}
        return {**asdict(self), **figures}
