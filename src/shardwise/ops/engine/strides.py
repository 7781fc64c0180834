"""Which strides would the results of an operator have as whole tensors? See `tensor/dense_strides.py`.

Torch answers: it runs the operator once for each kind of call on tensors without memory. Views are asked for, and what
keeps the strides of its arguments, pointwise operators and copies, where these are not contiguous.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, no_dispatch_modes
from shardwise.ops.engine.schema import OperatorCall, is_pointwise, split_call, written_slots
from shardwise.tensor import caches
from shardwise.tensor.dense_strides import Strides, find_strides, make_stand_in
from shardwise.tensor.inplace import gives_views
from shardwise.tensor.sharded_tensor import ShardedTensor

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
_MAX_KNOWN = 16384
_known: dict[Hashable, tuple[Strides | None, ...]] = caches.clear_on_change({})


def note_strides(
    op: Any, given: Sequence[ShardedTensor], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Note on the results of an operator which strides they would have as whole tensors, unless contiguous ones."""
    if all(t._dense_strides is None for t in given):
        keeps = op in _KEEP_CONTIGUOUS or not (gives_views(op) or op in _GIVE_PERMUTED)
        if keeps or _cuts_first_dim(op, args):
            return
    elif not (gives_views(op) or op in _COPIES | _GIVE_PERMUTED or is_pointwise(op)) or written_slots(op):
        return
    outputs = result if isinstance(result, list | tuple) else (result,)
    for output, strides in zip(outputs, _ask_torch(split_call(op, args, kwargs)), strict=False):
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
    if found is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        found = _known[key] = _run_without_memory(call, kinds)
    return found


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
