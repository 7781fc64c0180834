"""A tensor of a state as a checkpoint sees it: a layout, a dtype and this rank's local tensors, whatever its class."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError
from shardwise.comm import Comm
from shardwise.geometry import DType, Layout, find_dtype
from shardwise.ops.dtensor_layouts import TENSOR_MODULE, spec_of
from shardwise.tensor import ShardedTensor
from shardwise.tensor.moves import everywhere


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A tensor of the state. `plain`: no sharded tensor; all ranks that have it hold the same values."""

    name: str
    layout: Layout
    dtype: DType
    locals: tuple[Tensor, ...]
    plain: bool
    tensor: Tensor


def leaf_of(name: str, tensor: Tensor, comm: Comm) -> Leaf:
    """A tensor of any known class as a leaf."""
    if isinstance(tensor, ShardedTensor):
        layout, held, plain = tensor._layout, tensor._locals, False
    elif is_dtensor(tensor):
        layout, held, plain = *_dtensor_parts(tensor, comm), False
    else:
        _check_plain(name, tensor)
        layout, held, plain = everywhere(tuple(tensor.shape), comm.ranks), (tensor,), True
    if layout.ranks != comm.ranks and (outside := sorted(set(layout.ranks) - set(comm.ranks))):
        raise CheckpointError(
            f"{name}: it lies on ranks {outside[:8]}, which are not among the comm's ranks {list(comm.ranks)[:8]}; "
            "give a comm that holds all of them"
        )
    values = tuple(t.detach() if t.requires_grad else t for t in held)
    return Leaf(name, layout, dtype_of(tensor.dtype), values, plain, tensor)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is torch's DTensor; torch's module is not loaded to find out."""
    module = sys.modules.get(TENSOR_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def _dtensor_parts(tensor: Tensor, comm: Comm) -> tuple[Layout, tuple[Tensor, ...]]:
    spec = tensor._spec  # type: ignore[attr-defined]  # only DTensors come here
    ours = spec_of(spec.mesh, spec.placements, tensor.shape, getattr(spec, "shard_order", None))
    layout = ours.layout(tuple(tensor.shape))
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # only DTensors come here
    return layout, (local,) if comm.rank in layout.ranks else ()


def _check_plain(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(f"{name}: a tensor that is {kind} is not stored; make it a dense one first")


@cache
def dtype_of(dtype: torch.dtype) -> DType:
    """An element type as the pure layers know it.

    >>> dtype_of(torch.bfloat16).name
    'bf16'
    """
    return find_dtype(str(dtype))


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """An element type as torch knows it."""
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found
