"""Parameters that have no values yet: only the local parts are allocated, then filled alike for every layout.

Values come from the user's `init(model)` (a checkpoint, say) or from `reset_parameters` of the modules that own the
parameters. torch's random fills produce the same values in every layout, so rank 0 never needs the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.compat.specs import shard_tensor
from shardwise.embedding.slabs import owned_rows
from shardwise.geometry import ShardingSpec
from shardwise.tensor.comms import GroupOrComm
from shardwise.tensor.creation import empty
from shardwise.tensor.sharded_tensor import ShardedTensor

Initialiser: TypeAlias = Callable[[nn.Module], object]
RESET_METHODS = ("reset_parameters", "_reset_parameters")


def shard_or_allocate(
    tensor: Tensor, spec: ShardingSpec, src_rank: int, process_group: GroupOrComm | None
) -> ShardedTensor:
    """A tensor laid out by a spec: the values of the source rank, or none for a tensor on the meta device."""
    if tensor.is_meta:
        return empty(spec, *tensor.shape, dtype=tensor.dtype, process_group=process_group)
    sharded: ShardedTensor = shard_tensor(tensor, spec, src_rank, process_group)
    return sharded


def owners_of_meta(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that own tensors on the meta device, by path."""
    return {path: part for path, part in module.named_modules() if _meta_names(part)}


def _meta_names(part: nn.Module) -> list[str]:
    tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    return [name for name, tensor in tensors if tensor.is_meta]


def check_initialisers(owners: dict[str, nn.Module], init: Initialiser | None) -> None:
    """Raise unless all that has no values can get some."""
    if init is not None:
        return
    silent = [
        f"{path or type(part).__name__} ({', '.join(_meta_names(part))})"
        for path, part in owners.items()
        if not any(hasattr(part, reset) for reset in RESET_METHODS)
    ]
    if silent:
        raise ValueError(
            f"{'; '.join(silent)}: tensors on the meta device whose modules have no reset_parameters(); "
            "pass init=, a function that fills the model"
        )


def initialise(module: nn.Module, owners: dict[str, nn.Module], init: Initialiser | None) -> None:
    """Give values to what was allocated without."""
    if init is not None:
        if owners:
            init(module)
        return
    for part in owners.values():
        padding = getattr(part, "padding_idx", None)
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and padding is not None:
            _reset_table(part, padding)
        else:
            next(getattr(part, reset) for reset in RESET_METHODS if hasattr(part, reset))()


def _reset_table(part: nn.Embedding | nn.EmbeddingBag, padding: int) -> None:
    """As torch does: normal values, and zeros for the padding."""
    nn.init.normal_(part.weight)
    weight = part.weight
    if not isinstance(weight, ShardedTensor):
        with torch.no_grad():
            weight[padding].fill_(0)
        return
    for band in owned_rows(weight.sharding, weight.comm.rank, None).slabs:
        local = weight.local_parts[band.slot].detach()
        _, rows = band.runs.find(np.array([padding % weight.shape[0]]))
        band.take_columns(local)[rows.tolist()] = 0
