"""Grouped products: the rows of a tensor, sorted by expert, times the weights of their experts.

`offs` has for each expert where its rows end. Along one axis

- rows may be sharded: each rank multiplies the rows it has, and finds where experts end among them;
- columns of the weights may be, and what is summed over, which leaves a pending sum;
- experts may be: each row goes to the rank of its expert, by an uneven all-to-all, and the result stays there. Where
  every rank has all rows, it takes those of its experts and nothing is sent.

Where a row goes depends on values, so what follows from it is never remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.ops.engine import compute
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta
from shardwise.ops.rules.index import zeros_on_tape
from shardwise.ops.rules.matmul import product_strategies
from shardwise.ops.rules.view import axis_owners, with_owners
from shardwise.ops.views import (
    LocalView,
    cutting_axes,
    gather_dims,
    mesh_spec_of,
    redistribute_to,
    resolve_partial,
    shape_tuple,
)
from shardwise.tensor.parts import held_rows
from shardwise.tensor.sharded_tensor import ShardedTensor

_ALIGNMENT = 16  # bytes: torch's kernels take matrices whose rows begin at multiples of it
R: Placement = Replicate()
SUM = Partial("sum")

_library = torch.library.Library("shardwise", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch
_SCHEMA = "_grouped_mm_at_experts(Tensor x, Tensor w, Tensor offs, ScalarType? out_dtype=None) -> Tensor"
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]  # untyped in torch


@torch.library.impl(_library, "_grouped_mm_at_experts", "CompositeImplicitAutograd")
def _multiply_all(x: Tensor, w: Tensor, offs: Tensor, out_dtype: Any = None) -> Tensor:
    """The same product under a name of its own: its rule knows that rows are on the ranks of their experts."""
    if x.is_meta:  # torch's own function for shapes takes fewer dtypes than its kernels do
        return x.new_empty((x.shape[0], w.shape[2]), dtype=out_dtype)
    product: Tensor = aten._grouped_mm.default(x, w, offs, None, out_dtype)
    return product


_at_experts = torch.ops.shardwise._grouped_mm_at_experts.default


@register_sharding(aten._grouped_mm.default)
def grouped_mm(
    x: TensorMeta, w: TensorMeta, offs: TensorMeta | None = None, bias: TensorMeta | None = None, out_dtype: Any = None
) -> list[Strategy] | Steps:
    if bias is not None:
        return [Strategy((R,), (R, R, *([R] if offs is not None else []), R))]
    if offs is None:
        return product_strategies("emk,ekn->emn", [x, w])
    if (x.ndim, w.ndim) == (2, 3):
        return Steps(_move_rows_to_experts) if cutting_axes(w.layout, (0,)) else _row_strategies()
    return _sum_strategies() if w.ndim == 2 and x.ndim == 2 else _column_strategies()


def _row_strategies() -> list[Strategy]:
    """(rows, k) times (experts, k, n): rows, columns, sums; values that are still to be added up stay so."""
    return [
        Strategy((R,), (R, R, R)),
        Strategy((Shard(0),), (Shard(0), R, R), _multiply_own_rows),
        Strategy((Shard(1),), (R, Shard(2), R), _multiply_own_rows),
        Strategy((SUM,), (Shard(1), Shard(1), R), _multiply_own_rows),
        Strategy((SUM,), (SUM, R, R)),
        Strategy((SUM,), (R, SUM, R)),
    ]


def _sum_strategies() -> list[Strategy]:
    """(m, rows) times (rows, n) gives (experts, m, n): the gradient of weights. Sharded rows leave a pending sum."""
    return [
        Strategy((R,), (R, R, R)),
        Strategy((Shard(1),), (Shard(0), R, R), _sum_own_rows),
        Strategy((Shard(2),), (R, Shard(1), R), _sum_own_rows),
        Strategy((SUM,), (Shard(1), Shard(0), R), _sum_own_rows),
        Strategy((SUM,), (SUM, R, R)),
        Strategy((SUM,), (R, SUM, R)),
    ]


def _column_strategies() -> list[Strategy]:
    """(experts, m, k) times (k, rows) gives (m, rows)."""
    return [
        Strategy((R,), (R, R, R)),
        Strategy((Shard(0),), (Shard(1), R, R), _multiply_own_columns),
        Strategy((SUM,), (Shard(2), Shard(0), R), _multiply_own_columns),
        Strategy((Shard(1),), (R, Shard(1), R), _multiply_own_columns),
        Strategy((SUM,), (SUM, R, R)),
        Strategy((SUM,), (R, SUM, R)),
    ]


@register_sharding(_at_experts)
def grouped_mm_at_experts(x: TensorMeta, w: TensorMeta, offs: TensorMeta, out_dtype: Any = None) -> list[Strategy]:
    """Along axes that cut experts the rows are there already; along others as everywhere."""
    placed = [(a, x.placements[a], w.placements[a]) for a in cutting_axes(w.layout, (0,))]
    own = [Strategy((rows,), (rows, experts, R), _multiply_own_rows, axes=(a,)) for a, rows, experts in placed]
    return own + [Strategy(s.outputs, s.inputs, _multiply_own_rows) for s in _row_strategies()]


def _move_rows_to_experts(
    x: ShardedTensor, w: ShardedTensor, offs: ShardedTensor, bias: None = None, out_dtype: Any = None
) -> Any:
    spec = mesh_spec_of(x)
    assert spec is not None
    offs = resolve_partial(gather_dims(offs, (0,), "grouped_mm"), "grouped_mm")
    experts = find_expert_of_rows(offs.local_parts[0], x.shape[0])
    owners = {axis: ranks[experts] for axis, ranks in axis_owners(w.sharding, 0).items()}
    staying = {axis: ranks for axis, ranks in axis_owners(x.sharding, 0).items() if axis not in owners}
    placed = with_owners(spec, {**staying, **owners})
    moved = redistribute_to(x, placed.layout(shape_tuple(x)), "grouped_mm")
    return compute(_at_experts, (moved, w, offs), {"out_dtype": out_dtype})


def find_expert_of_rows(offs: Tensor, rows: int) -> IntArray:
    """The expert of each row; rows after the last expert's end, which no product reads, count as that expert's.

    >>> find_expert_of_rows(torch.tensor([1, 1, 3]), 4).tolist()
    [0, 2, 2, 2]
    """
    ends: IntArray = offs.detach().cpu().numpy().astype(np.int64)
    return np.minimum(np.searchsorted(ends, np.arange(rows), side="right"), len(ends) - 1)


# On local tensors


def _own_ends(view: LocalView, offs: Tensor, rows_at: tuple[int, int], experts_at: tuple[int, int] | None) -> Tensor:
    """Where this rank's experts end among its rows; tensor number and dim of both, None where experts are whole."""
    rows = _held_on_device(view, rows_at, offs)
    if experts_at is not None:
        offs = offs[_held_on_device(view, experts_at, offs)]
    return torch.searchsorted(rows, offs.to(rows.dtype)).to(torch.int32)


def _held_on_device(view: LocalView, at: tuple[int, int], like: Tensor) -> Tensor:
    return torch.from_numpy(held_rows(view.layouts[at[0]], view.rank, at[1])).to(like.device)


def _multiply_own_rows(
    view: LocalView, x: Tensor, w: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None
) -> Tensor:
    ends = _own_ends(view, offs, (0, 0), (1, 0))
    return multiply_groups(x, w, ends, out_dtype)


def _sum_own_rows(
    view: LocalView, x: Tensor, w: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None
) -> Tensor:
    ends = _own_ends(view, offs, (1, 0), None)
    if _fits_kernel(x, w):
        return _multiply_all(x, w, ends, out_dtype)
    bounds = [0, *ends.tolist()]
    parts = [x[:, a:b] @ w[a:b] for a, b in pairwise(bounds)]
    return torch.stack(parts).to(out_dtype or x.dtype)


def _multiply_own_columns(
    view: LocalView, x: Tensor, w: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None
) -> Tensor:
    ends = _own_ends(view, offs, (1, 1), None)
    if _fits_kernel(x, w):
        return _multiply_all(x, w, ends, out_dtype)
    bounds = [0, *ends.tolist()]
    parts = [x[e] @ w[:, a:b] for e, (a, b) in enumerate(pairwise(bounds))]
    return torch.cat(parts, 1).to(out_dtype or x.dtype)


def multiply_groups(x: Tensor, w: Tensor, ends: Tensor, out_dtype: Any = None) -> Tensor:
    """The grouped product of plain tensors; expert by expert where torch's kernel does not take their shapes."""
    if _fits_kernel(x, w):
        return _multiply_all(x, w, ends, out_dtype)
    bounds = [0, *ends.tolist()]
    parts = [x[a:b] @ w[e] for e, (a, b) in enumerate(pairwise(bounds))]
    rest = x[bounds[-1] :].sum(1, keepdim=True) * 0  # on the tape, as rows of experts are
    parts.append(rest.expand(-1, w.shape[2]) + zeros_on_tape(w, ()))
    return torch.cat(parts).to(out_dtype or x.dtype)


def _fits_kernel(*matrices: Tensor) -> bool:
    """Whether torch's kernel takes these: something in them, and rows that begin at multiples of 16 bytes."""
    return all(m.numel() > 0 and _is_aligned(m) for m in matrices)


def _is_aligned(matrix: Tensor) -> bool:
    rows, columns = matrix.stride()[-2:]
    line = rows if columns == 1 else columns
    outer: Sequence[int] = matrix.stride()[:-2]
    return 1 in (rows, columns) and all(s * matrix.element_size() % _ALIGNMENT == 0 for s in (line, *outer))


# With scales: a number for each row of `x`, and one for each column of each expert's weights


@register_sharding(aten._scaled_grouped_mm.default)
def scaled_grouped_mm(
    x: TensorMeta,
    w: TensorMeta,
    scale_a: TensorMeta,
    scale_b: TensorMeta,
    offs: TensorMeta | None = None,
    bias: TensorMeta | None = None,
    scale_result: TensorMeta | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> list[Strategy]:
    more = [R for m in (offs, bias, scale_result) if m is not None]
    found = [Strategy((R,), (R, R, R, R, *more))]
    if offs is None or len(more) > 1 or (x.ndim, w.ndim) != (2, 3) or scale_b.ndim != 2:
        return found
    found.append(Strategy((Shard(0),), (Shard(0), R, Shard(0), R, R), _scaled_own_rows))
    found.append(Strategy((Shard(1),), (R, Shard(2), R, Shard(1), R)))
    return [*found, Strategy((SUM,), (Shard(1), Shard(1), R, R, R))]


def _scaled_own_rows(
    view: LocalView, x: Tensor, w: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, *rest: Any, **named: Any
) -> Tensor:
    ends = _own_ends(view, offs, (0, 0), None)
    product: Tensor = aten._scaled_grouped_mm.default(x, w, scale_a, scale_b, ends, *rest, **named)
    return product
