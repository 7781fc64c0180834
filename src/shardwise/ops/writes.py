"""Which strides would the results of an operator have as whole tensors? See `tensor/views.py`.

Torch answers: it runs the operator once for each kind of call on tensors without memory. Views are asked for, and what
keeps the strides of its arguments, pointwise operators and copies, where these are not contiguous.

Where is what is written to a copied view written as well? In the tensor that it was taken from.

A row of a sharded dim, a slice of a dim cut in blocks or a view in another cut is a copy, where torch returns a view.
Each operator that takes such a view has one that puts values in its place, by which `x[2] += 1` reaches `x`. Where a
mesh leaves out ranks, writes stay refused: those ranks have no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._cache import Cache
from shardwise._torch import aten, no_dispatch_modes
from shardwise.comm import Comm
from shardwise.geometry import Layout
from shardwise.ops.call import OperatorCall, is_pointwise, written_slots
from shardwise.ops.placement_cost import mesh_view
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.views import Strides, find_strides, make_stand_in
from shardwise.tensor.writes import gives_views

_KEEP_CONTIGUOUS = {
    aten.view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.detach.default,
    aten.alias.default,
}
_GIVE_PERMUTED = {aten.einsum.default}  # the product is a view of a batch of matrix products
_COPIES = {aten.clone.default, aten._to_copy.default}
_known: Cache[Hashable, tuple[Strides | None, ...]] = Cache(16384, on_change=True)


def note_strides(call: OperatorCall, given: Sequence[ShardedTensor], result: Any) -> None:
    """Note on the results of a call which strides they would have as whole tensors, unless contiguous ones."""
    op, args = call.op, call.args
    if all(t._dense_strides is None for t in given):
        keeps = op in _KEEP_CONTIGUOUS or not (gives_views(op) or op in _GIVE_PERMUTED)
        if keeps or _cuts_first_dim(op, args):
            return
    elif not (gives_views(op) or op in _COPIES | _GIVE_PERMUTED or is_pointwise(op)) or written_slots(op):
        return
    outputs = result if isinstance(result, list | tuple) else (result,)
    for output, strides in zip(outputs, _ask_torch(call), strict=False):
        if strides is not None and isinstance(output, ShardedTensor):
            output._dense_strides, output._fingerprint = strides, None


def _cuts_first_dim(op: Any, args: Sequence[Any]) -> bool:
    """Whether consecutive rows are taken, which are contiguous."""
    return op is aten.slice.Tensor and (len(args) < 2 or args[1] == 0) and len(args) < 5


def _ask_torch(call: OperatorCall) -> tuple[Strides | None, ...]:
    """The strides of all results."""
    kinds = tuple((tuple(t.shape), _strides_of(t), t.dtype) for t in call.tensors)
    key = (call.key, kinds)
    found = _known.get(key)
    return _known.put(key, _run_without_memory(call, kinds)) if found is None else found


def _strides_of(tensor: Tensor) -> Strides | None:
    return tensor._dense_strides if isinstance(tensor, ShardedTensor) else find_strides(tensor)


def _run_without_memory(
    call: OperatorCall, kinds: Sequence[tuple[tuple[int, ...], Strides | None, torch.dtype]]
) -> tuple[Strides | None, ...]:
    """What torch returns has these strides; what it refuses to view it copies, and copies are contiguous."""
    with no_dispatch_modes(), torch.no_grad():
        args, kwargs = call.fill_slots([make_stand_in(*kind) for kind in kinds])
        try:
            result = call.op(*args, **{**kwargs, **({"device": "meta"} if kwargs.get("device") is not None else {})})
        except (RuntimeError, NotImplementedError, TypeError):
            return ()
        outputs = result if isinstance(result, list | tuple) else (result,)
        return tuple(find_strides(o) if isinstance(o, Tensor) else None for o in outputs)


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


def allow_writes(call: OperatorCall, given: Sequence[ShardedTensor], result: Any) -> None:
    """Let writes to what a call returned as a copy be written to the tensor it was taken from."""
    op, args, kwargs = call.op, call.args, call.kwargs
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
