"""What a shortcut depends on of a tensor, as one object: layout, dtype, device, strides, and whether it is summed.

A key of a few objects that are compared by identity is made and found faster than one of all that they stand for. A
tensor keeps its fingerprint from its first use on, and a result gets that of its shortcut. Whatever replaces the layout
or the local tensors of a tensor drops it (`ShardedTensor._forget`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from shardwise._torch import make_wrapper_subclass
from shardwise.geometry import Layout
from shardwise.ops.engine.summed import has_kept_sum, is_summed
from shardwise.tensor.sharded_tensor import ShardedTensor


class _LocalShapes(dict[int, tuple[int, ...] | None]):
    """The shape of each rank's only local tensor, as far as it was asked for; None where a rank has not exactly one."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, rank: int) -> tuple[int, ...] | None:
        shapes = self._layout.local_shapes(rank)
        found = self[rank] = shapes[0] if len(shapes) == 1 else None
        return found


class Fingerprint:
    """A layout, a dtype, a device, strides unless contiguous; `make_wrapper` makes the outside of such a tensor."""

    __slots__ = ("dtype", "layout", "local_shapes", "make_wrapper", "strides")

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None
    ) -> None:
        self.layout, self.dtype, self.strides = layout, dtype, strides
        self.local_shapes = _LocalShapes(layout)
        self.make_wrapper: Callable[[], ShardedTensor] = partial(
            make_wrapper_subclass, ShardedTensor, layout.shape, dtype=dtype, device=device
        )


_MAX_FINGERPRINTS = 16384
_fingerprints: dict[tuple[int, torch.dtype, torch.device, tuple[int, ...] | None, bool], Fingerprint] = {}


def get_fingerprint(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
    summed: bool = False,
) -> Fingerprint:
    """The fingerprint of such tensors, the same object each time: it keeps the layout, and so its identity, alive."""
    key = (id(layout), dtype, device, strides, summed)
    found = _fingerprints.get(key)
    if found is None:
        if len(_fingerprints) >= _MAX_FINGERPRINTS:
            _fingerprints.clear()
        found = _fingerprints[key] = Fingerprint(layout, dtype, device, strides)
    return found


def find_fingerprint(tensor: ShardedTensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None where it has no shortcuts: other than one local tensor, a copy of what torch
    returns as a view, or a layout that depends on data."""
    parts = tensor.local_parts
    if len(parts) != 1 or tensor._copied_from is not None or tensor.sharding.depends_on_data:
        return None
    found = get_fingerprint(tensor.sharding, parts[0].dtype, parts[0].device, tensor._dense_strides, is_summed(tensor))
    # Whether a kept sum counts depends on modes; the local tensors of subclasses may be replaced by assigning a shard.
    if type(tensor) is ShardedTensor and not has_kept_sum(tensor):
        tensor._fingerprint = found
    return found
