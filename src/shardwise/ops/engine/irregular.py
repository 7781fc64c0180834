"""Reductions of whole tensors in irregular pieces.

The order of elements does not matter to them. So what a rank has is one run of a 1-D tensor, cut unevenly, and that
is reduced as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise._torch import aten
from shardwise.geometry import EnumerableSpec, Layout, Mesh, MeshSpec, Shard
from shardwise.ops.engine.schema import OperatorCall
from shardwise.ops.engine.two_step import all_dims, arguments_by_name, redistribute_to
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

WHOLE_REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.mean.default,
    aten.mean.dim,
    aten.prod.default,
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.all.default,
    aten.any.default,
    aten.count_nonzero.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
}


def reduce_pieces(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> Any:
    """The reduction of a whole tensor in irregular pieces, or NotImplemented for anything else."""
    if call.op not in WHOLE_REDUCTIONS or len(tensors) != 1:
        return NotImplemented
    given = arguments_by_name(call.op, call.args, call.kwargs)
    ndim = tensors[0].ndim
    if given.get("keepdim") or all_dims(given.get("dim"), ndim) != tuple(range(ndim)):
        return NotImplemented
    rest = {name: value for name, value in given.items() if name not in ("self", "dim")}
    if given.get("dim") is not None:
        rest["dim"] = [0]
    return call.op(flatten_pieces(tensors[0]), **rest)


def flatten_pieces(tensor: ShardedTensor) -> ShardedTensor:
    """All elements, each once, as a 1-D tensor of which every rank has one run; their order is that of the pieces."""
    once = redistribute_to(tensor, drop_replicas(tensor.sharding), "reduction")
    counts = once.sharding.elements_per_rank()
    ranks = tensor.comm.ranks
    cut = Shard(0, sizes=tuple(counts.get(rank, 0) for rank in ranks))
    layout = MeshSpec(Mesh(("pieces",), ranks), (cut,)).layout((sum(counts.values()),))
    local = torch.cat([piece.reshape(-1) for piece in once._tape_tensors()])
    return wrap(layout, (local,), tensor.comm)


@cache_by_identity
def drop_replicas(layout: Layout) -> Layout:
    """The layout with one copy of each piece."""
    first = np.unique(layout.table.cells, return_index=True)[1]
    if len(first) == len(layout.table):
        return layout
    return EnumerableSpec(layout.table.take(np.sort(first)).pieces()).layout(layout.shape)
