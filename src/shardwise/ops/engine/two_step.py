"""What computations over sharded dims need: which axes split a dim, pending values reduced, one row for each rank.

A reduction over a sharded dim that is not a plain sum or maximum takes two steps: each rank reduces what it has
to one row, the rows (one for each rank along the dim) are gathered, and the small result is reduced again.
Gradients follow from the tape: gathering rows is a move, and its backward sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.explain import check_may_communicate
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.move import move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

DimRun: TypeAlias = tuple[int, int, int]


def all_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument means: None is all.

    >>> all_dims(None, 2), all_dims((-1,), 3), all_dims([], 1)
    ((0, 1), (2,), (0,))
    """
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(ndim))
    return tuple(sorted({d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)})) if ndim else ()


def arguments_by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator's call by name, defaults filled in.

    >>> arguments_by_name(torch.ops.aten.argmax.default, (None, 1), {})
    {'self': None, 'dim': 1, 'keepdim': False}
    """
    declared = op._schema.arguments
    defaults = {a.name: a.default_value for a in declared}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def mesh_spec_of(tensor: ShardedTensor) -> MeshSpec | None:
    """The tensor's placements on a mesh, or None for irregular layouts."""
    return mesh_view(tensor.sharding)


def cutting_axes(layout: Layout, dims: Iterable[int]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that cut one of these dims."""
    spec, wanted = mesh_view(layout), set(dims)
    if spec is None:
        return ()
    return tuple(
        axis
        for axis, placement in enumerate(spec.placements)
        if isinstance(placement, Shard) and placement.dim in wanted and spec.mesh.shape[axis] > 1
    )


def replace_placements(spec: MeshSpec, axes: Iterable[int], placement: Placement) -> MeshSpec:
    """The spec with another placement along some axes."""
    chosen = set(axes)
    return MeshSpec(spec.mesh, [placement if a in chosen else p for a, p in enumerate(spec.placements)], spec.order)


def redistribute_to(tensor: ShardedTensor, layout: Layout, name: str) -> ShardedTensor:
    """The tensor in another layout; all ranks come here with the same layouts, so they need not agree first."""
    if tensor.sharding == layout:
        return tensor
    check_may_communicate(name, tensor.sharding, layout)
    locals_, anchor = move_to(tensor, layout, name)
    return wrap(layout, locals_, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=anchor)


def resolve_partial(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """The tensor with its pending reductions resolved: replicated along those axes."""
    spec = mesh_spec_of(tensor)
    if spec is None:
        return tensor
    pending = [a for a, p in enumerate(spec.placements) if isinstance(p, Partial)]
    return (
        redistribute_to(tensor, replace_placements(spec, pending, Replicate()).layout(shape_tuple(tensor)), name)
        if pending
        else tensor
    )


def gather_dims(tensor: ShardedTensor, dims: Iterable[int], name: str) -> ShardedTensor:
    """The tensor with these dims whole on every rank."""
    spec = mesh_spec_of(tensor)
    assert spec is not None
    whole = replace_placements(spec, cutting_axes(tensor.sharding, dims), Replicate())
    return redistribute_to(tensor, whole.layout(shape_tuple(tensor)), name)


def shape_tuple(tensor: ShardedTensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def gather_rank_rows(
    tensor: ShardedTensor, dims: Sequence[int], reduce: Callable[[Tensor], Tensor], name: str
) -> ShardedTensor:
    """Reduce each rank's part along some dims to one row; the rows of all ranks, together on every rank.

    `reduce` keeps the dims, with length 1. The result's dims have one row for each rank along them.
    """
    spec = mesh_spec_of(tensor)
    assert spec is not None and tensor.sharding.pending is None
    axes = cutting_axes(tensor.sharding, dims)
    shape = list(tensor.shape)
    for dim in dims:
        shape[dim] = math.prod(spec.mesh.shape[a] for a in cutting_axes(tensor.sharding, (dim,)))
    rows = [
        Shard(p.dim) if a in axes and isinstance(p, Shard) else _whole_placement(p, dims)
        for a, p in _numbered_placements(spec)
    ]
    local = reduce(tensor.local_parts[0])
    layout = MeshSpec(spec.mesh, rows, spec.order).layout(shape)
    return gather_dims(wrap(layout, (local,), tensor.comm), dims, name)


def _numbered_placements(spec: MeshSpec) -> Iterable[tuple[int, Placement]]:
    return enumerate(spec.placements)


def _whole_placement(placement: Placement, dims: Sequence[int]) -> Placement:
    """Placements of dims that are reduced on an axis of one rank say nothing about the result."""
    return Replicate() if isinstance(placement, Shard) and placement.dim in dims else placement


@cache_by_identity
def _known_runs(layout: Layout) -> dict[tuple[int, int], tuple[DimRun, ...]]:
    """The runs of ranks and dims, as far as they were asked for."""
    return {}


def find_runs(layout: Layout, rank: int, dim: int) -> tuple[DimRun, ...]:
    """The runs of a dim that a rank has, in the order of its local tensor: start, stop, and where it begins there.

    >>> from shardwise.geometry import Mesh
    >>> layout = MeshSpec(Mesh.of(tp=2), [Shard(0, block=2)]).layout((8,))
    >>> find_runs(layout, 1, 0)
    ((2, 4, 0), (6, 8, 2))
    """
    known = _known_runs(layout)
    if (rank, dim) not in known:
        own = layout.table.take(layout.rows_of(rank))
        columns = (own.local_offsets[:, dim].tolist(), own.offsets[:, dim].tolist(), own.sizes[:, dim].tolist())
        runs = [(start, start + size, at) for at, start, size in sorted(set(zip(*columns, strict=True)))]
        known[rank, dim] = tuple(r for r in runs if r[0] < r[1]) or tuple(runs[:1])
    return known[rank, dim]


def is_in_one_run(layout: Layout, dim: int) -> bool:
    """Whether each rank has one run of a dim."""
    return all(len(find_runs(layout, rank, dim)) == 1 for rank in layout.ranks)


def global_rows(layout: Layout, rank: int, dim: int, device: torch.device) -> Tensor:
    """For each local row of a dim its global number, also where a rank holds several runs of the dim."""
    rows = [row for start, stop, _ in find_runs(layout, rank, dim) for row in range(start, stop)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def empty_result_like(x: Tensor, *others: Tensor | None) -> Tensor:
    """The result of a rank without elements: as `x`, and on the tape of everything that the other ranks compute from.

    Every rank's backward pass has to meet the same moves.
    """
    assert x.numel() == 0
    return sum((t.sum() for t in others if t is not None), start=x * 1)
