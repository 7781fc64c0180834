"""Indexing by tensors: index, gather, scatter, index_put and the like.

Dims that are not indexed may be sharded freely, and so may the indices. Where an indexed dim is sharded, each rank
looks up what it holds and leaves zeros for the rest: the result is a pending sum. Writing is the reverse: each rank
writes what falls into its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import assert_async, aten
from shardwise.comm.traced import is_tracing
from shardwise.geometry import MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import DimRun, redistribute_to
from shardwise.ops.rules.row_owners import index_rows, keeps_rows, select_rows
from shardwise.ops.rules.view import pending_kinds, renumber_dims
from shardwise.tensor.sharded_tensor import wrap

Indices = Sequence[TensorMeta | None]


def find_local_entries(
    view: Any, tensor: int, dim: int, index: Tensor, *, from_end: bool = False
) -> tuple[Tensor, Tensor]:
    """Which entries of an index are in this rank's rows of a dim, and where there; 0 for the others.

    `from_end`: negative entries count from the end. Entries that no rank holds are refused, as torch does.
    """
    length = view.shapes[tensor][dim]
    check_range(index, -length if from_end else 0, length, dim)
    whole = torch.where(index < 0, index + length, index) if from_end else index
    return locate_in_runs(view.runs(tensor, dim), whole)


def locate_in_runs(runs: Sequence[DimRun], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which global rows are in these runs, and where in the local tensor; 0 for the others.

    >>> locate_in_runs([(2, 4, 0), (6, 8, 2)], torch.tensor([0, 3, 7]))
    (tensor([False,  True,  True]), tensor([0, 1, 3]))
    """
    here, at = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
    for start, stop, first in runs:
        inside = (rows >= start) & (rows < stop)
        here, at = here | inside, torch.where(inside, rows - start + first, at)
    return here, at


def check_range(index: Tensor, low: int, high: int, dim: int) -> None:
    """Raise for entries outside a dim; a device, or a graph that is traced, raises by itself when it computes."""
    outside = (index < low) | (index >= high)
    if index.device.type != "cpu" or is_tracing():
        assert_async(~outside.any(), f"an index is out of bounds for dim {dim} of length {high}")
    elif bool(outside.any()):
        wrong = int(index[outside][0])
        raise IndexError(f"index {wrong} is out of bounds for dim {dim} of length {high}")


def zeros_on_tape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of a shape that are on the tape if the tensor is: a rank without rows still takes part in the backward."""
    return tensor.new_zeros(list(shape)) + tensor.flatten()[:0].sum().to(tensor.dtype)


def sum_kind(meta: TensorMeta) -> Partial:
    """The reduction that puts values together of which all ranks but one hold zeros."""
    return Partial("max" if meta.dtype == torch.bool else "sum")


def _indexed_dims(indices: Indices) -> tuple[list[int], int, bool]:
    """The dims that are indexed, how many dims the indices have together, and whether they are adjacent."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    width = max(i.ndim for i in indices if i is not None)
    return dims, width, dims[-1] - dims[0] == len(dims) - 1


def _new_dims(ndim: int, indices: Indices) -> tuple[list[int | None], int]:
    """The numbers of the dims in the result, None for indexed ones; and where the dims of the indices begin."""
    dims, width, together = _indexed_dims(indices)
    start = dims[0] if together else 0
    rest = [d for d in range(ndim) if d not in dims]
    new: list[int | None] = [None] * ndim
    for number, dim in enumerate(rest):
        new[dim] = number if number < start else number + width
    return new, start


@register_sharding(aten.index.Tensor)
def index(x: TensorMeta, indices: Indices) -> list[Any] | Steps:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and indices[0] is not None and keeps_rows(x, given[0]):
        return Steps(index_rows)
    whole: tuple[Placement, ...] = (Replicate(),) * len(given)
    new, start = _new_dims(x.ndim, indices) if given else (list(range(x.ndim)), 0)
    found = [Strategy(s.outputs, (*s.inputs, *whole), local_if_empty=_index_if_in_range) for s in renumber_dims(x, new)]
    if any(i.dtype == torch.bool for i in given):
        return [Strategy(found[0].outputs, found[0].inputs)]
    width = max((i.ndim for i in given), default=0)
    for dim in range(width):
        cut = [_broadcast_placement(i, dim, width) for i in given]
        if any(isinstance(p, Shard) for p in cut):
            found.append(Strategy((Shard(start + dim),), (Replicate(), *cut)))
    rows = [d for d, i in enumerate(indices) if i is not None]
    return found + [Strategy((sum_kind(x),), (Shard(d), *whole), _index_local) for d in rows]


def _index_if_in_range(view: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Torch looks at no index where there is nothing to return, and all ranks must find the same mistakes."""
    for dim, one in enumerate(indices):
        if one is not None:
            check_range(one, -view.shapes[0][dim], view.shapes[0][dim], dim)
    return aten.index.Tensor(x, indices)


def _broadcast_placement(i: TensorMeta, dim: int, width: int) -> Placement:
    own = dim - (width - i.ndim)
    return Shard(own) if own >= 0 and i.shape[own] != 1 else Replicate()


def _index_local(view: Any, x: Tensor, indices: Sequence[Tensor | None], *, from_end: bool = True) -> Tensor:
    """Look up what this rank holds along all indexed dims, zeros elsewhere."""
    hits: list[Tensor] = []
    moved: list[Tensor | None] = []
    for dim, one in enumerate(indices):
        if one is None:
            moved.append(None)
            continue
        here, at = find_local_entries(view, 0, dim, one.to(x.device), from_end=from_end)
        hits.append(here)
        moved.append(at)
    new, start = _new_dims(x.ndim, indices)  # type: ignore[arg-type]  # tensors have ndim as well
    here = _all_hits(hits)
    if any(x.shape[d] == 0 for d, i in enumerate(indices) if i is not None):
        rest = [x.shape[d] for d in sorted((d for d in range(x.ndim) if new[d] is not None), key=lambda d: new[d] or 0)]
        return zeros_on_tape(x, [*rest[:start], *here.shape, *rest[start:]])
    values = aten.index.Tensor(x, moved)
    mask = here.reshape([1] * start + list(here.shape) + [1] * (values.ndim - start - here.ndim))
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


@register_sharding(aten.index_select.default)
def index_select(x: TensorMeta, dim: int, index: TensorMeta) -> list[Any] | Steps:
    at = dim % max(1, x.ndim)
    if at == 0 and keeps_rows(x, index):
        return Steps(select_rows)
    found = [
        Strategy(s.outputs, (*s.inputs, Replicate()), local_if_empty=_select_if_in_range)
        for s in renumber_dims(x, _dims_except(x, at))
    ]
    if x.ndim == 0 or index.ndim == 0:
        return found
    found.append(Strategy((Shard(at),), (Replicate(), Shard(0))))

    def local(view: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        return _index_local(view, x, [None] * at + [index], from_end=False)

    return [*found, Strategy((sum_kind(x),), (Shard(at), Replicate()), local)]


def _select_if_in_range(view: Any, x: Tensor, dim: int, index: Tensor) -> Any:
    check_range(index, 0, (view.shapes[0] or (1,))[dim], dim)
    return aten.index_select.default(x, dim, index)


def _dims_except(x: TensorMeta, *dims: int) -> list[int | None]:
    return [None if d in dims else d for d in range(x.ndim)]


@register_sharding(aten.gather.default)
def gather(x: TensorMeta, dim: int, index: TensorMeta, *, sparse_grad: bool = False) -> list[Any]:
    whole = [Strategy((Replicate(),), (Replicate(), Replicate()))]
    if not x.ndim or not index.ndim:
        return whole
    at = dim % x.ndim
    alike = [d for d in range(x.ndim) if d != at and x.shape[d] == index.shape[d]]
    found = whole + [Strategy((Shard(d),), (Shard(d), Shard(d)), local_if_empty=_gather_if_in_range) for d in alike]
    found.append(Strategy((Shard(at),), (Replicate(), Shard(at))))
    found.append(Strategy((sum_kind(x),), (Shard(at), Replicate()), _gather_local))
    return found + [Strategy((p,), (p, Replicate())) for p in pending_kinds(x)]


def _gather_if_in_range(view: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    check_range(index, 0, view.shapes[0][dim], dim)
    return aten.gather.default(x, dim, index, sparse_grad=sparse_grad)


def _gather_local(view: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    here, at = find_local_entries(view, 0, dim % x.ndim, index)
    if x.shape[dim] == 0:
        return zeros_on_tape(x, index.shape)
    values = aten.gather.default(x, dim, at)
    return torch.where(here, values, torch.zeros((), dtype=values.dtype, device=values.device))


@register_sharding(
    [
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter_.src,
        aten.scatter_.value,
        aten.scatter_.reduce,
        aten.scatter_reduce.two,
        aten.scatter_reduce_.two,
    ]
)
def scatter(x: TensorMeta, dim: int, index: TensorMeta, src: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
    """All tensors cut alike along a dim that is not scattered along, if they have the same length there."""
    metas = [m for m in (x, index, src) if isinstance(m, TensorMeta)]
    found = [Strategy((Replicate(),), (Replicate(),) * len(metas))]
    for d in range(x.ndim):
        if d != dim % x.ndim and len({m.shape[d] for m in metas}) == 1:
            found.append(Strategy((Shard(d),), (Shard(d),) * len(metas)))
    return found


@register_sharding([aten.scatter_add.default, aten.scatter_add_.default])
def scatter_add(x: TensorMeta, dim: int, index: TensorMeta, src: TensorMeta) -> list[Any]:
    found = scatter(x, dim, index, src)
    if x.dtype == torch.bool:  # adds as `or`, which is no sum
        return found
    partial = Partial("sum")
    found.append(Strategy((partial,), (partial, Replicate(), partial)))
    if x.ndim and index.ndim:
        at = dim % x.ndim
        if index.shape[at] == src.shape[at]:
            found.append(Strategy((partial,), (partial, Shard(at), Shard(at))))
    return found


@register_sharding(aten.index_put.default)
def index_put(x: TensorMeta, indices: Indices, values: TensorMeta, accumulate: bool = False) -> list[Any] | Steps:
    return _put_strategies(aten.index_put.default, x, indices, values, accumulate)


@register_sharding(aten.index_put_.default)
def index_put_(x: TensorMeta, indices: Indices, values: TensorMeta, accumulate: bool = False) -> list[Any] | Steps:
    return _put_strategies(aten.index_put_.default, x, indices, values, accumulate)


def _put_strategies(
    op: Any, x: TensorMeta, indices: Indices, values: TensorMeta, accumulate: bool
) -> list[Strategy] | Steps:
    given = [i for i in indices if i is not None]
    whole: tuple[Placement, ...] = (Replicate(),) * len(given)
    found = [Strategy((Replicate(),), (Replicate(), *whole, Replicate()))]
    if any(i.dtype == torch.bool for i in given):
        if len(indices) > 1:
            return found
        masked = _masked_strategies(x, given[0], values)
        if not masked and given[0].dtype == torch.bool and _is_cut(x):
            return Steps(partial(_put_where, op))
        return found + masked
    new, _ = _new_dims(x.ndim, indices)
    dims, width, _ = _indexed_dims(indices)
    missing = width + x.ndim - len(dims) - values.ndim
    for old, dim in enumerate(new):
        if dim is not None:
            own = dim - missing
            cut: Placement = Shard(own) if own >= 0 and values.shape[own] != 1 else Replicate()
            found.append(Strategy((Shard(old),), (Shard(old), *whole, cut)))
    if dims == list(range(len(dims))):
        found += [Strategy((Shard(d),), (Shard(d), *whole, Replicate()), _put_local(op)) for d in dims]
    if accumulate:
        found.append(Strategy((Partial("sum"),), (Partial("sum"), *whole, Partial("sum"))))
    return found


def _masked_strategies(x: TensorMeta, mask: TensorMeta, values: TensorMeta) -> list[Strategy]:
    """Where the same values are written wherever a mask says, each rank writes into what it holds."""
    inner = x.ndim - mask.ndim
    if mask.dtype != torch.bool or values.ndim > inner:
        return []
    found = [Strategy((Shard(d),), (Shard(d), Shard(d), Replicate())) for d in range(mask.ndim)]
    for dim in range(mask.ndim, x.ndim):
        own = dim - x.ndim + values.ndim
        cut: Placement = Shard(own) if own >= 0 and values.shape[own] != 1 else Replicate()
        found.append(Strategy((Shard(dim),), (Shard(dim), Replicate(), cut)))
    return found


def _is_cut(x: TensorMeta) -> bool:
    return any(isinstance(p, Shard) for p in x.placements) and not any(isinstance(p, Partial) for p in x.placements)


def _put_where(op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """One value for each place that a mask says, in the order of places: they are put in place on a whole tensor."""
    mask, view = indices[0].to(x.device), mesh_view(x.sharding)
    assert view is not None
    whole = MeshSpec(view.mesh, (Replicate(),) * view.mesh.ndim)
    held = [redistribute_to(t, whole.layout(tuple(t.shape)), "index_put") for t in (mask, values)]
    empty = wrap(whole.layout(tuple(x.shape)), (x.local_parts[0].new_zeros(x.shape),), x.comm)
    filled: Any = aten.index_put.default(empty, [held[0]], held[1])
    inner = mask.reshape(tuple(mask.shape) + (1,) * (x.ndim - mask.ndim)) if x.ndim > mask.ndim else mask
    result = torch.where(inner, x + filled if accumulate else filled, x)
    return aten.copy_.default(x, result) if op is aten.index_put_.default else result


def _put_local(op: Any) -> Any:
    """A local function that writes the values whose places this rank holds.

    As in torch, the indices and a single value may be in host memory where the tensor is not.
    """

    def local(view: Any, x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
        found = [find_local_entries(view, 0, dim, one.to(x.device), from_end=True) for dim, one in enumerate(indices)]
        here = _all_hits(hit for hit, _ in found)
        places = [at.expand(here.shape) for _, at in found]
        value = values.to(x.device) if values.ndim == 0 else values
        kept = value.expand([*here.shape, *x.shape[len(indices) :]])
        if not x.is_meta:  # of a rank outside of the mesh, which has no values to choose from
            places, kept = [at[here] for at in places], kept[here]
        written: Tensor = op(x, places, kept, accumulate)
        return written

    return local


def _all_hits(hits: Iterable[Tensor]) -> Tensor:
    """Where all hold, after broadcasting."""
    return torch.stack(torch.broadcast_tensors(*hits)).all(0)  # type: ignore[no-untyped-call]  # untyped in torch


@register_sharding([aten.masked_select.default, aten.nonzero.default])
def data_dependent(*args: Any, **kwargs: Any) -> list[Any]:
    """The size of the result depends on all values."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    return [Strategy((Replicate(),), (Replicate(),) * len(metas))]
