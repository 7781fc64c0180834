"""Which layout does each tensor get when a checkpoint is resharded? From a plan, from one text, or the one it has.

One layout for all tensors has to define what happens to those it does not fit:

1. A tensor without the dim that an axis splits is replicated along that axis.
2. A tensor that still does not fit (sizes or groups that do not add up to its length, another grid, other pieces) is
   replicated on all ranks of the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Index, stored_layout
from shardwise.geometry import (
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
    parse_placements,
    parse_spec,
)

AXIS = "ranks"


class LayoutPlan(Protocol):
    """The interface of a plan by pattern, such as `shardwise.nn.ModelPlan`."""

    def specs_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, ShardingSpec]:
        """The spec of every tensor, by name."""


@dataclass(frozen=True)
class ChosenLayouts:
    """The layout of every tensor, and the names of those that one layout for all did not fit."""

    layouts: Mapping[str, Layout]
    unfit: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for layout in set(self.layouts.values()) for rank in layout.ranks}))


def choose_layouts(
    index: Index, plan: LayoutPlan | None, layout: ShardingSpec | str | None, ranks: int | None
) -> ChosenLayouts:
    """The layouts that the arguments ask for, checked against all tensors of a checkpoint."""
    shapes = {name: entry.shape for name, entry in index.tensors.items()}
    if plan is not None and layout is not None:
        raise CheckpointError("both a plan and a layout were passed; pass one of them")
    if plan is not None:
        chosen = ChosenLayouts({name: spec.layout(shapes[name]) for name, spec in plan.specs_of(shapes).items()})
    elif layout is not None:
        chosen = fit_layouts(spec_for(layout, ranks), shapes)
        if shapes and len(chosen.unfit) == len(shapes):
            longest = max(shapes.values(), key=len)
            raise CheckpointError(
                f"the layout {layout} fits none of the {len(shapes)} tensors, which have up to {len(longest)} dims, as "
                f"in {list(longest)}; choose another one"
            )
    elif ranks is not None:
        raise CheckpointError(f"{ranks} ranks, but no layout for them; pass one such as 'S(0)'")
    else:
        return ChosenLayouts({name: stored_layout(entry) for name, entry in index.tensors.items()})
    if ranks is not None and chosen.layouts and len(chosen.ranks) != ranks:
        raise CheckpointError(
            f"{ranks} ranks were requested, but the {'plan' if layout is None else f'layout {layout}'} covers "
            f"{len(chosen.ranks)}; omit the number of ranks, or make both agree"
        )
    return chosen


def spec_for(layout: ShardingSpec | str, ranks: int | None) -> ShardingSpec:
    """The spec of a layout's text: a rule of the notation, or one placement for a number of ranks.

    >>> spec_for("S(0)", 4), spec_for("on dp=2,tp=2: R, S(1)", None)
    (MeshSpec(ranks=4, (Shard(0),)), MeshSpec(dp=2,tp=2, (Replicate(), Shard(1))))
    """
    if isinstance(layout, ShardingSpec):
        spec = layout
    elif layout.lstrip().startswith(("on ", "as ", "@")):
        spec = parse_spec(layout)
    else:
        placements = parse_placements(layout)
        if ranks is None or len(placements) != 1:
            raise CheckpointError(
                f"the layout {layout!r} does not say which ranks it is for; pass the number of ranks with a single "
                "placement, or write the mesh, as in 'on dp=2,tp=4: R, S(0)'"
            )
        spec = MeshSpec(Mesh.of(**{AXIS: ranks}), placements)
    if spec.reduction() is not None:
        raise CheckpointError(f"the layout {layout} leaves a reduction pending; a checkpoint stores reduced tensors")
    return spec


def fit_layouts(spec: ShardingSpec, shapes: Mapping[str, tuple[int, ...]]) -> ChosenLayouts:
    """One spec for all tensors; those that it does not fit are replicated, as the module docstring says."""
    known: dict[tuple[int, ...], tuple[Layout, bool]] = {}
    for shape in shapes.values():
        if shape not in known:
            known[shape] = _fit_layout(spec, shape)
    unfit = tuple(name for name, shape in shapes.items() if not known[shape][1])
    return ChosenLayouts({name: known[shape][0] for name, shape in shapes.items()}, unfit)


def _fit_layout(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[Layout, bool]:
    try:
        return spec.layout(shape), True
    except LayoutError:
        if isinstance(spec, MeshSpec):
            kept = [_drop_missing_dim(p, len(shape)) for p in spec.placements]
            return _layout_or_copies(
                MeshSpec(spec.mesh, kept, spec.order), shape, spec.mesh.ranks.reshape(-1).tolist()
            ), False
        return _replicated_layout(_ranks_of(spec), shape), False


def _layout_or_copies(spec: MeshSpec, shape: tuple[int, ...], ranks: Iterable[int]) -> Layout:
    try:
        return spec.layout(shape)
    except LayoutError:
        return _replicated_layout(ranks, shape)


def _drop_missing_dim(placement: Placement, ndim: int) -> Placement:
    missing = isinstance(placement, Shard) and not -ndim <= placement.dim < ndim
    assert not isinstance(placement, Partial), "specs with a pending reduction are refused before"
    return Replicate() if missing else placement


def _replicated_layout(ranks: Iterable[int], shape: tuple[int, ...]) -> Layout:
    return MeshSpec(Mesh((AXIS,), list(ranks)), (Replicate(),)).layout(shape)


def _ranks_of(spec: ShardingSpec) -> list[int]:
    """The ranks of a chunk, grid or enumerable spec."""
    ranks = getattr(spec, "ranks", None)
    if ranks is None:
        raise CheckpointError(f"the layout {spec!r} fits only some tensors; pass a plan that says which")
    return [int(rank) for rank in np.unique(np.asarray(ranks))]
