"""Plain tensors beside sharded ones: numbers and 0-dim tensors are replicated values, others are an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from shardwise.geometry import Layout, Mesh, MeshSpec, Replicate
from shardwise.ops.placing import mesh_view
from shardwise.ops.schema import Call
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_plain_is_replicated: ContextVar[bool] = ContextVar("shardwise_plain_as_replicated", default=False)


class MixedTensorsError(RuntimeError):
    """A plain tensor met a ShardedTensor, and nothing says how it is to be read."""


@contextmanager
def plain_as_replicated() -> Iterator[None]:
    """Read plain tensors beside sharded ones as replicated: every rank holds the same values."""
    token = _plain_is_replicated.set(True)
    try:
        yield
    finally:
        _plain_is_replicated.reset(token)


def replicate(tensor: Tensor, like: ShardedTensor) -> ShardedTensor:
    """A plain tensor that every rank holds, as a ShardedTensor on the mesh of another; nothing is sent or copied."""
    return wrap(_replicated(tuple(tensor.shape), _mesh_of(like)), (tensor,), like._comm)


def _mesh_of(tensor: ShardedTensor) -> Mesh:
    view = mesh_view(tensor._layout)
    return view.mesh if view is not None else Mesh(("all",), tensor._comm.ranks)


def _replicated(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    return MeshSpec(mesh, (Replicate(),) * mesh.ndim).layout(shape)


def as_sharded(call: Call) -> list[ShardedTensor]:
    """All tensors of a call as ShardedTensors; plain ones that are not 0-dim are refused unless read as replicated."""
    first = next(t for t in call.tensors if isinstance(t, ShardedTensor))
    found = []
    for number, tensor in enumerate(call.tensors):
        if isinstance(tensor, ShardedTensor):
            found.append(tensor)
        elif tensor.ndim == 0 or _plain_is_replicated.get():
            found.append(replicate(tensor, first))
        else:
            raise MixedTensorsError(
                f"{call.op} got a plain tensor of shape {tuple(tensor.shape)} as tensor argument {number} beside a "
                "ShardedTensor; if every rank holds the same values pass shardwise.replicate(t, like), or use "
                "`with shardwise.plain_as_replicated():`"
            )
    return found
