"""The calls of torch.distributed that changed between versions or are private, in one place."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import Store


def all_gather_single(out: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of equal flat tensors under the name this version does not deprecate."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(out, tensor, group=group, async_op=True)
    return work


def reduce_scatter_single(out: Tensor, tensor: Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of equal flat runs under the name this version does not deprecate."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(out, tensor, op=op, group=group, async_op=True)
    return work


def default_store() -> Store | None:
    """Return the key-value store of the default group, if there is one."""
    try:
        return c10d._get_default_store()
    except (RuntimeError, ValueError):
        return None


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    pairs = (entry.split(":") for entry in str(config).split(",") if ":" in entry)
    return {device: backend for device, backend in pairs}


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name of a group, the same on all its ranks."""
    return str(group.group_name)
