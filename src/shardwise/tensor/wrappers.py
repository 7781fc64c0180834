"""What is wrong when torch's data parallel wrappers (DDP, FSDP, fully_shard) are put around a sharded model?

They flatten, cut and broadcast parameters by rank, which no ShardedTensor allows. Some call of theirs is refused, and
that error names a detail of torch. Here the caller is recognised by its stack, on the way of an error only.
"""

from __future__ import annotations

import sys
from types import FrameType

from shardwise.comm import DisagreementError

_WRAPPERS = {
    "torch.distributed.fsdp._fully_shard": "fully_shard",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed._composable.replicate": "replicate",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.nn.parallel": "DataParallel",
}


class WrapperError(DisagreementError):
    """A data parallel wrapper of torch is around a model whose parameters are ShardedTensors."""


def find_wrapper() -> str | None:
    """The wrapper of torch that is on the stack, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")):
            return next((name for start, name in _WRAPPERS.items() if module.startswith(start)), None)
        frame = frame.f_back
    return None


def is_called_by_fully_shard() -> bool:
    """Whether the caller's caller is torch's fully_shard, which would cut replicated parameters without an error."""
    module: str = sys._getframe(2).f_globals.get("__name__", "")
    return module.startswith("torch.distributed.fsdp._fully_shard")


def explain_wrapper(error: Exception) -> None:
    """Raise in place of an error what is wrong and what to write instead, if a wrapper of torch caused it."""
    name = None if isinstance(error, WrapperError) else find_wrapper()
    if name is not None:
        raise refuse_wrapper(name) from error


def refuse_wrapper(name: str) -> WrapperError:
    """The error that says what to write instead of a wrapper."""
    return WrapperError(
        f"{name} cannot wrap a model whose parameters are ShardedTensors: shardwise does its part. For data parallel "
        "training give the plan a mesh with an axis for the data, ModelPlan(Mesh.of(dp=2, tp=2), {...}, "
        "input_plan='dp: S(0)'): each rank passes its own part of the batch, and gradients are summed over 'dp'. To "
        "shard parameters over the data axis as well, as FSDP does, add 'dp: S(0)' to their patterns"
    )
