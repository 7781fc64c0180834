"""Rows that values decide about: which rank has which row after a tensor is indexed along a sharded dim.

Each rank keeps the rows that it has already, under their new numbers: nothing moves, and every row of the result has an
owner. So tokens that are sorted by expert stay where they are until experts ask for them (see `grouped.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, RowOwners, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.registry import TensorMeta
from shardwise.ops.engine.two_step import (
    cutting_axes,
    mesh_spec_of,
    redistribute_to,
    replace_placements,
    shape_tuple,
)
from shardwise.tensor.moving.row_exchange import held_rows
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


def axis_owners(layout: Layout, dim: int) -> dict[int, IntArray]:
    """For each axis that cuts a dim: the place along it of the ranks that have each row."""
    spec = mesh_view(layout)
    assert spec is not None
    axes = cutting_axes(layout, (dim,))
    found = {axis: np.zeros(layout.shape[dim], np.int64) for axis in axes}
    for place in np.ndindex(*(n if a in axes else 1 for a, n in enumerate(spec.mesh.shape))):
        rows = held_rows(layout, int(spec.mesh.ranks[place]), dim)
        for axis in axes:
            found[axis][rows] = place[axis]
    return found


def with_owners(spec: MeshSpec, owners: dict[int, IntArray], dim: int = 0) -> MeshSpec:
    """The spec with the rows of a dim given to owners along some axes."""
    placements: list[Placement] = list(spec.placements)
    for axis, ranks in owners.items():
        placements[axis] = Shard(dim, owners=RowOwners(ranks))
    return MeshSpec(spec.mesh, placements, spec.order)


def keeps_rows(x: TensorMeta, index: TensorMeta) -> bool:
    """Whether the result of indexing dim 0 has owners for its rows: it is as long as the tensor, or longer.

    A few rows of a long table are a pending sum instead: that can be remembered, and costs little to add up.
    """
    if x.ndim == 0 or index.ndim != 1 or index.dtype in (torch.bool, torch.uint8) or not cutting_axes(x.layout, (0,)):
        return False
    whole = all(isinstance(p, Replicate) for p in index.placements)
    return whole and (index.shape[0] >= max(x.shape[0], 1) or x.layout.depends_on_data)


def take_rows(x: ShardedTensor, rows: IntArray) -> ShardedTensor:
    """The rows of these numbers, each where it is; all ranks pass the same numbers."""
    spec, rank = mesh_spec_of(x), x.comm.rank
    assert spec is not None
    owners = {axis: ranks[rows] for axis, ranks in axis_owners(x.sharding, 0).items()}
    layout = with_owners(spec, owners).layout((len(rows), *x.shape[1:]))
    places = np.zeros(x.shape[0], np.int64)
    own = held_rows(x.sharding, rank, 0)
    places[own] = np.arange(len(own))
    wanted = places[rows[held_rows(layout, rank, 0)]]
    local = x.local_parts[0]
    return wrap(layout, (local.index_select(0, torch.from_numpy(wanted).to(local.device)),), x.comm)


def index_rows(x: ShardedTensor, indices: Any) -> ShardedTensor:
    """`x[index]` along dim 0, by `take_rows`; numbers out of range are refused on every rank."""
    index: Tensor = indices[0].local_parts[0]
    return take_rows(x, _checked_rows(index, x.shape[0], negative=True))


def select_rows(x: ShardedTensor, dim: int, index: ShardedTensor) -> ShardedTensor:
    """`x.index_select(0, index)`, by `take_rows`."""
    return take_rows(x, _checked_rows(index.local_parts[0], x.shape[0], negative=False))


def _checked_rows(index: Tensor, length: int, *, negative: bool) -> IntArray:
    rows: IntArray = index.detach().cpu().numpy().astype(np.int64)
    outside = (rows >= length) | (rows < (-length if negative else 0))
    if outside.any():
        raise IndexError(f"index {int(rows[outside][0])} is out of bounds for dim 0 of length {length}")
    return np.where(rows < 0, rows + length, rows)


def settle_rows(tensor: ShardedTensor, rows_out: int) -> ShardedTensor:
    """A tensor whose dim 0 has owners in a form that can be viewed with `rows_out` rows in front.

    Rows that are merged into one may be on several ranks. Where as many are merged as an axis has ranks, or more, the
    rows stay and become a pending sum, with zeros for what others have. Otherwise fewer bytes are sent if each row goes
    to its place in an even split.
    """
    spec = mesh_spec_of(tensor)
    assert spec is not None
    length = tensor.shape[0]
    merged = length // rows_out if rows_out and length % rows_out == 0 else length
    for axis in cutting_axes(tensor.sharding, (0,)):
        now, ranks = spec.placements[axis], spec.mesh.shape[axis]
        if not isinstance(now, Shard) or now.owners is None:
            continue
        if merged < ranks:
            sizes = tuple(n * merged for n in chunk_sizes(rows_out, ranks))
            even = replace_placements(spec, (axis,), Shard(0, sizes=sizes))
            tensor = redistribute_to(tensor, even.layout(shape_tuple(tensor)), "view")
        else:
            tensor = _add_up_later(tensor, spec, axis)
        spec = mesh_spec_of(tensor)
        assert spec is not None
    return tensor


def _add_up_later(tensor: ShardedTensor, spec: MeshSpec, axis: int) -> ShardedTensor:
    """The tensor as a pending sum along an axis whose ranks own its rows."""
    pending = Partial("max" if tensor.dtype == torch.bool else "sum")
    layout = replace_placements(spec, (axis,), pending).layout(shape_tuple(tensor))
    rank, local = tensor.comm.rank, tensor.local_parts[0]
    places = np.zeros(tensor.shape[0], np.int64)
    rows = held_rows(layout, rank, 0)
    places[rows] = np.arange(len(rows))
    own = torch.from_numpy(places[held_rows(tensor.sharding, rank, 0)]).to(local.device)
    filled = local.new_zeros((len(rows), *local.shape[1:])).index_copy(0, own, local)
    return wrap(layout, (filled,), tensor.comm)
