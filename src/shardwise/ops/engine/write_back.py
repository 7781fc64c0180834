"""Where is what is written to a copied view written as well? In the tensor that it was taken from.

A row of a sharded dim, a slice of a dim cut in blocks or a view in another cut is a copy, where torch returns a view.
Each operator that takes such a view has one that puts values in its place, by which `x[2] += 1` reaches `x`. Where a
mesh leaves out ranks, writes stay refused: those ranks have no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardwise._torch import aten
from shardwise.comm import Comm
from shardwise.geometry import Layout
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Scatter = Callable[..., Any]


def _reshape_back(base: ShardedTensor, value: ShardedTensor, *size: Any) -> Any:
    return aten.reshape.default(value, tuple(base.shape))


def _permute_back(base: ShardedTensor, value: ShardedTensor, dims: Sequence[int]) -> Any:
    order = [d % base.ndim for d in dims]
    return aten.permute.default(value, [order.index(d) for d in range(base.ndim)])


_SCATTERS: dict[Any, Scatter] = {
    aten.alias.default: lambda base, value: value,  # `x[:]`, a slice of all rows
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.view.default: _reshape_back,
    aten.reshape.default: _reshape_back,
    aten.unsqueeze.default: _reshape_back,
    aten.squeeze.default: _reshape_back,
    aten.squeeze.dim: _reshape_back,
    aten.squeeze.dims: _reshape_back,
    aten.t.default: lambda base, value: aten.t.default(value),
    aten.transpose.int: lambda base, value, one, other: aten.transpose.int(value, one, other),
    aten.permute.default: _permute_back,
}


def allow_writes(
    op: Any, given: Sequence[ShardedTensor], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Let writes to what an operator returned as a copy be written to the tensor it was taken from."""
    if len(given) != 1:
        return
    if op is aten.unbind.int:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        for row, output in enumerate(result):
            _allow_writes_to(given[0], output, aten.select_scatter.default, (dim, row), {})
    elif op in _SCATTERS:
        _allow_writes_to(given[0], result, _SCATTERS[op], args[1:], kwargs)
    if isinstance(result, list | tuple):
        views = [o._copied_from for o in result if isinstance(o, ShardedTensor) and o._copied_from is not None]
        for view in views:
            view.siblings = tuple(v for v in views if v is not view)


def _allow_writes_to(
    base: ShardedTensor, copy: ShardedTensor, scatter: Scatter, rest: Sequence[Any], options: Mapping[str, Any]
) -> None:
    view, parts = copy._copied_from, copy.local_parts
    spec = mesh_view(base.sharding)
    reaches_all = spec is None or spec.mesh.ranks.size == base.comm.world_size
    if view is None or view is base._copied_from or view.write is not None or not reaches_all:
        return

    def put(x: ShardedTensor, value: ShardedTensor) -> Any:
        return scatter(x, value, *rest, **options)

    view.allow_writes(parts, partial(_write_copy, base, copy.sharding, parts, put, base.comm))


def _write_copy(base: ShardedTensor, layout: Layout, parts: tuple[Tensor, ...], put: Scatter, comm: Comm) -> None:
    aten.copy_.default(base, put(base, wrap(layout, parts, comm)))
