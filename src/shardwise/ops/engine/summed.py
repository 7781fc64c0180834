"""A pending sum that several operators use is summed once.

A norm written as operators squares its input and scales it: both need the sum. The first operator that has a tensor
summed leaves the sum with the tensor; for those that come later it is there, and taking it costs nothing. Once more
after the local tensor was changed in place or got other memory, and in another mode: what was made without a tape is
no part of one. Tensors of inference mode do not count their changes, so nothing is left with them.

Checkpointed code that is computed again must do what it did before, so it finds no sum that was not made in the same
run of it: neither one from before nor its own of the first time.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import is_dual_level, saved_tensors_hook, storage_identity
from shardwise.comm.traced import is_tracing
from shardwise.geometry import Layout, MeshSpec, Partial, Replicate
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_SUMMED = "_summed"


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """The summed local tensors, from which addends and in which mode; `varied` is what `vary` keeps of them.

    Not a ShardedTensor, which would keep the pending one alive, and be kept by it.
    """

    addends: tuple[Tensor, ...]
    modes: tuple[Any, ...]
    hook: weakref.ref[Any] | None
    state: tuple[Any, ...]
    layout: Layout
    parts: tuple[Tensor, ...]
    anchor: Tensor | None
    varied: dict[Any, Any] = field(default_factory=dict)


def is_summed(tensor: ShardedTensor) -> bool:
    """Whether a pending tensor's sum was left with it in these modes: alike on all ranks, which make the same calls."""
    known: _Sum | None = tensor.__dict__.get(_SUMMED)
    return known is not None and known.modes == _modes(tensor) and _dereference(known.hook) is saved_tensors_hook()


def has_kept_sum(tensor: ShardedTensor) -> bool:
    """Whether a sum was left with a pending tensor, in whatever mode."""
    return _SUMMED in tensor.__dict__


def find_sum(tensor: ShardedTensor, wanted: Layout) -> ShardedTensor | None:
    """The sum of a pending tensor that an earlier operator made, if this one wants nothing pending; or None."""
    if wanted.pending is not None or is_dual_level() or not is_summed(tensor):
        return None
    known: _Sum = tensor.__dict__[_SUMMED]
    if known.state != _state(tensor) or any(a is not b for a, b in zip(known.addends, tensor.local_parts, strict=True)):
        return None
    found = wrap(known.layout, known.parts, tensor.comm, dtype=tensor.dtype, anchor=known.anchor)
    found.__dict__["_varied"] = known.varied
    return found


def keep_sum(tensor: ShardedTensor, summed: ShardedTensor) -> None:
    """Leave the sum of a pending tensor with it, if it is otherwise where the tensor is."""
    uncounted = any(t.is_inference() for t in tensor.local_parts)
    if uncounted or is_dual_level() or summed.sharding != _sum_layout(tensor.sharding):
        return
    hook = saved_tensors_hook()
    kept = _Sum(
        tensor.local_parts,
        _modes(tensor),
        None if hook is None else weakref.ref(hook),
        _state(tensor),
        summed.sharding,
        summed.local_parts,
        summed._anchor,
    )
    summed.__dict__["_varied"] = kept.varied
    tensor.__dict__[_SUMMED] = kept
    tensor._fingerprint = None  # another one says that it is summed


def _modes(tensor: ShardedTensor) -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled() and tensor.requires_grad, torch.is_inference_mode_enabled(), is_tracing()


def _dereference(hook: weakref.ref[Any] | None) -> Any:
    """The hook, or None if there was none; one that is gone equals no other."""
    return None if hook is None else hook() or hook


def _state(tensor: ShardedTensor) -> tuple[Any, ...]:
    """What else has to be as it was: versions and memory of the local tensors."""
    if is_tracing():
        return ()
    return tuple((t._version, storage_identity(t.untyped_storage())) for t in tensor.local_parts)


@cache_by_identity
def _sum_layout(layout: Layout) -> Layout | None:
    """The layout with nothing pending that is otherwise the same."""
    spec = layout.spec
    if not isinstance(spec, MeshSpec):
        return None
    placements = [Replicate() if isinstance(p, Partial) else p for p in spec.placements]
    return MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)
