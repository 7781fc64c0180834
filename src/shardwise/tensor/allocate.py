"""Local tensors for a layout."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import Layout


def local_device(layout: Layout, rank: int, slot: int, comm: Comm) -> torch.device:
    """The device a layout names for a local tensor, else the comm's."""
    devices = layout.table.devices
    if devices is None:
        return comm.device
    rows = layout.rows_of(rank)
    named = devices[int(rows[layout.table.slots[rows] == slot][0])]
    return comm.device if named is None else torch.device(named)


def allocate(
    layout: Layout,
    comm: Comm,
    dtype: torch.dtype,
    *,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
) -> tuple[Tensor, ...]:
    """Uninitialised local tensors of this rank."""
    shapes = layout.local_shapes(comm.rank)
    places = [
        torch.device(device) if device is not None else local_device(layout, comm.rank, i, comm)
        for i in range(len(shapes))
    ]
    return tuple(
        torch.empty(shape, dtype=dtype, device=place, pin_memory=pin_memory)
        for shape, place in zip(shapes, places, strict=True)
    )
