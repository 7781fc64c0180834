"""What does a plan cost? A table of names, shapes, layouts, memory on a rank, and bytes that a training step moves.

The figures for communication are estimates from the plan alone, in bytes that the busiest rank receives:

- *gradient traffic*, for each step. An axis that cuts the batch and replicates a parameter sums its gradients: twice
  its bytes. One that cuts both gathers the parameter as well, unless an operator finds something that moves less.
- *traffic per row*, for each row (token) of a layer's input. A weight cut along its inputs leaves sums of its outputs
  pending in the forward pass, one cut along its outputs those of its inputs in the backward pass; a table cut in rows,
  rows. Layers that read the same input (queries, keys and values) share its sum, which counts for each of them here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from shardwise._text import draw_html
from shardwise.geometry import Layout, MeshSpec, Placement, Replicate, Shard
from shardwise.geometry.notation import format_placement
from shardwise.nn.plan import ModelPlan, owners_of
from shardwise.transfer.transfer import format_bytes

HEAD = ("parameter", "count", "shape", "layout", "memory", "gradient traffic", "traffic per row")
_NUMBER = re.compile(r"\b\d+\b")


@dataclass(frozen=True)
class PlanRow:
    """One parameter; `count` of them in a table where equal layers are one row."""

    name: str
    shape: tuple[int, ...]
    layout: str
    elements: int
    rank_bytes: int
    gradient_bytes: int
    row_bytes: int
    count: int = 1

    @property
    def costs(self) -> tuple[object, ...]:
        """All that must be equal for two parameters to share a row."""
        return (*self.__dict__.values(),)[1:-1]


@dataclass(frozen=True)
class PlanTable:
    """The rows of a plan for one model; prints as a table in which equal layers are one row.

    >>> from shardwise.geometry import Mesh
    >>> table = describe_plan(ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"}), nn.Linear(4, 8))
    >>> table.elements, table.rank_bytes
    (40, 96)
    """

    mesh: str
    rows: tuple[PlanRow, ...]

    @property
    def elements(self) -> int:
        """The parameters of the model."""
        return sum(row.elements for row in self.rows)

    @property
    def rank_bytes(self) -> int:
        """The bytes of parameters on the fullest rank."""
        return sum(row.rank_bytes for row in self.rows)

    @property
    def gradient_bytes(self) -> int:
        """The bytes that the busiest rank receives for gradients in a step."""
        return sum(row.gradient_bytes for row in self.rows)

    @property
    def row_bytes(self) -> int:
        """The bytes that the busiest rank receives for activations, for each row of the layers' inputs."""
        return sum(row.row_bytes for row in self.rows)

    def folded(self) -> tuple[PlanRow, ...]:
        """The rows with equal layers folded: 'blocks.{0-79}.up.weight'."""
        groups: dict[tuple[object, ...], list[PlanRow]] = {}
        for row in self.rows:
            groups.setdefault((_NUMBER.sub("#", row.name), row.costs), []).append(row)
        return tuple(_fold_plan_rows(rows) for rows in groups.values())

    def _table(self) -> list[tuple[str, ...]]:
        total = (f"all on {self.mesh}", f"{len(self.rows):,}", f"{self.elements:,}", "")
        sizes = map(format_bytes, (self.rank_bytes, self.gradient_bytes, self.row_bytes))
        return [*map(_format_plan_row, self.folded()), (*total, *sizes)]

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return draw_html("table_html", f"plan on {self.mesh}", HEAD, self._table())

    def __str__(self) -> str:
        lines = [HEAD, *self._table()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _format_plan_row(row: PlanRow) -> tuple[str, ...]:
    sizes = (row.rank_bytes, row.gradient_bytes, row.row_bytes)
    shape = "x".join(map(str, row.shape)) or "scalar"
    return (row.name, f"{row.count:,}", shape, row.layout, *(format_bytes(b * row.count) if b else "-" for b in sizes))


def _fold_plan_rows(rows: list[PlanRow]) -> PlanRow:
    """One row for parameters whose names differ in numbers only."""
    if len(rows) == 1:
        return rows[0]
    numbers = list(zip(*(map(int, _NUMBER.findall(row.name)) for row in rows), strict=True))
    texts = iter(str(n[0]) if min(n) == max(n) else f"{{{min(n)}-{max(n)}}}" for n in numbers)
    return replace(rows[0], name=_NUMBER.sub(lambda _: next(texts), rows[0].name), count=len(rows))


def describe_plan(plan: ModelPlan, module: nn.Module) -> PlanTable:
    """What a plan does to a model, which may be on the meta device; needs no process group.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {"*.weight": "tp: S(0)"}, input_plan="dp: S(0)")
    >>> print(describe_plan(plan, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8, bias=False))))
    parameter         count  shape  layout   memory  gradient traffic  traffic per row
    0.weight          1      8x4    R, S(0)  64 B    64 B              16 B
    0.bias            1      8      R, R     32 B    32 B              -
    1.weight          1      8x8    R, S(0)  128 B   128 B             32 B
    all on dp=2,tp=2  3      104             224 B   224 B             48 B
    """
    owners = owners_of(module)
    rows = (
        _make_plan_row(plan, name, owners[id(tensor)], layout, tensor.dtype.itemsize)
        for name, tensor, layout in plan.layouts(module)
    )
    return PlanTable(str(plan.mesh), tuple(rows))


def _make_plan_row(plan: ModelPlan, name: str, owners: list[nn.Module], layout: Layout, itemsize: int) -> PlanRow:
    spec = layout.spec
    assert isinstance(spec, MeshSpec)
    held = _most_elements(layout) * itemsize
    return PlanRow(
        name,
        layout.shape,
        ", ".join(map(format_placement, spec.placements)),
        layout.numel,
        held,
        round(sum(count for _, count in gradient_bytes_by_axis(plan, spec, held))),
        round(sum(b for owner in owners for b in _row_bytes(plan, spec, owner, layout.shape)) * itemsize),
    )


def _most_elements(layout: Layout) -> int:
    return max(layout.elements_per_rank().values())


def _iterate_axes(plan: ModelPlan, spec: MeshSpec) -> Iterator[tuple[Placement, Placement, float]]:
    """For each axis: what it does to inputs, what it does to the parameter, and the share that other ranks hold."""
    inputs = plan.input_placements or (Replicate(),) * spec.mesh.ndim
    for given, placed, size in zip(inputs, spec.placements, spec.mesh.shape, strict=True):
        yield given, placed, (size - 1) / size


def gradient_bytes_by_axis(plan: ModelPlan, spec: MeshSpec, held: int) -> Iterator[tuple[str, float]]:
    """The bytes that a rank receives along each axis for the gradient of a parameter of which it holds `held` bytes."""
    axes = zip(spec.mesh.axes, _iterate_axes(plan, spec), spec.mesh.shape, strict=True)
    for axis, (given, placed, share), size in axes:
        if isinstance(given, Shard):
            yield axis, share * held * (3 * size if isinstance(placed, Shard) else 2)


def _row_bytes(plan: ModelPlan, spec: MeshSpec, owner: nn.Module, shape: tuple[int, ...]) -> Iterator[float]:
    """The elements that a rank receives for one row of the layer's input."""
    for given, placed, share in _iterate_axes(plan, spec):
        if not isinstance(placed, Shard) or isinstance(given, Shard) or len(shape) != 2:
            continue
        dim = placed.dim % 2
        if isinstance(owner, nn.Linear) or (isinstance(owner, nn.Embedding | nn.EmbeddingBag) and dim == 0):
            yield 2 * share * (shape[1] if dim == 0 else shape[0])
