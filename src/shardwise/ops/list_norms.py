"""The norms of a list of tensors, as gradient clipping asks for them: one exchange of one number per tensor and rank.

1. Each rank takes the norms of its local tensors. Tensors that the same axes cut make one group.
2. The rows of a group, one for each rank along these axes, are brought together.
3. The norm of a tensor is the norm of its ranks' norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard
from shardwise.ops.local_tape import recording
from shardwise.ops.settle import axes_of, named, spec_of
from shardwise.tensor.dispatch import handler
from shardwise.tensor.moves import moved
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

aten = torch.ops.aten
NAME = "norms of a list"


@handler(aten._foreach_norm.Scalar)
def _norms(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> list[Tensor]:
    given = named(aten._foreach_norm.Scalar, args, kwargs)
    tensors, order, dtype = given["self"], given["ord"], given["dtype"]
    found: dict[int, Tensor] = {}
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = _group(tensor, order)
        if key is None:
            found[index] = aten.linalg_vector_norm.default(tensor, order, dtype=dtype)
        else:
            groups.setdefault(key, []).append(index)
    for (mesh, axes, *_), members in groups.items():
        found |= zip(members, _group_norms([tensors[i] for i in members], order, dtype, mesh, axes), strict=True)
    return [found[i] for i in range(len(tensors))]


def _group(tensor: Any, order: float) -> Any:
    """What tensors must have in common to be taken together; None for one that is taken alone."""
    if not isinstance(tensor, ShardedTensor) or not order > 0 or len(tensor._locals) != 1:
        return None
    spec = spec_of(tensor)
    if spec is None or tensor._layout.pending is not None:
        return None
    return spec.mesh, axes_of(tensor, range(tensor.ndim)), tensor.dtype, tensor.device, tensor._comm


def _group_norms(
    tensors: Sequence[ShardedTensor], order: float, dtype: Any, mesh: Mesh, axes: tuple[int, ...]
) -> list[ShardedTensor]:
    comm = tensors[0]._comm
    ranks = math.prod(mesh.shape[a] for a in axes)
    rows = MeshSpec(mesh, [Shard(0) if a in axes else Replicate() for a in range(mesh.ndim)])
    whole = MeshSpec(mesh, (Replicate(),) * mesh.ndim)
    with recording():
        own = torch.stack([_norm(t._locals[0], order, dtype) for t in tensors])
        if not axes:
            norms = own
        else:
            row = wrap(rows.layout((ranks, len(tensors))), (own.unsqueeze(0),), comm)
            norms = torch.linalg.vector_norm(moved(row, whole.layout((ranks, len(tensors))), NAME)[0][0], order, 0)
        return [wrap(whole.layout(()), (norm,), comm) for norm in norms.unbind()]


def _norm(local: Tensor, order: float, dtype: Any) -> Tensor:
    """The norm of a local tensor; of none of the elements it is 0, also where torch has no answer."""
    if local.numel() == 0 and order == math.inf:
        return local.sum(dtype=dtype).abs()
    norm: Tensor = torch.linalg.vector_norm(local, order, dtype=dtype)
    return norm
