"""The arguments that make bags of ids: what is wrong with them, and how long each bag is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.nn.bands import Numbers
from shardwise.nn.lookup_options import id_problem
from shardwise.tensor.sharded_tensor import ShardedTensor

MODES = ("sum", "mean", "max")


@dataclass(frozen=True, eq=False, slots=True)
class BagArguments:
    """One rank's bags, in torch's words."""

    input: Tensor
    offsets: Tensor | None
    mode: str
    per_sample_weights: Tensor | None
    include_last_offset: bool

    def lengths(self) -> Numbers:
        """How many ids each bag has.

        >>> BagArguments(torch.zeros(5), torch.tensor([0, 0, 2]), "sum", None, False).lengths()
        array([0, 2, 3])
        """
        if self.offsets is None:
            return np.full(self.input.shape[0], self.input.shape[1])
        starts: Numbers = self.offsets.detach().cpu().numpy()
        return np.diff(starts) if self.include_last_offset else np.diff(starts, append=len(self.input))

    def problem(self, table: ShardedTensor) -> str | None:
        """Why these bags cannot be computed, or None."""
        found = self._mode_problem() or self._shape_problem() or self._weight_problem(table.dtype)
        if found is None and self.offsets is not None:
            found = _offset_problem(self.offsets, len(self.input), self.include_last_offset)
        return found or id_problem(self.input, table.shape[0])

    def _mode_problem(self) -> str | None:
        if self.mode not in MODES:
            return f"mode '{self.mode}' is not supported; it is sum, mean or max"
        if self.per_sample_weights is not None and self.mode != "sum":
            return f"per_sample_weights needs mode 'sum', got mode '{self.mode}'"
        return None

    def _shape_problem(self) -> str | None:
        dims = self.input.dim()
        if dims not in (1, 2):
            return f"Input has {dims} dims; bags are the rows of 2 dims, or runs of 1 dim given by offsets"
        if dims == 2 and self.offsets is not None:
            return "Input dimension needs to be exactly 1 dim where offsets are given"
        if dims == 1 and self.offsets is None:
            return "offsets is required for 1D input"
        if self.include_last_offset and self.offsets is None:
            return 'offsets is required for flag "include_last_offset"!'
        return None

    def _weight_problem(self, dtype: torch.dtype) -> str | None:
        weights = self.per_sample_weights
        if weights is None:
            return None
        if weights.shape != self.input.shape:
            size, wanted = tuple(weights.shape), tuple(self.input.shape)
            return f"per_sample_weights size {size} not equal to input size {wanted}"
        if weights.dtype != dtype:
            return f"per_sample_weights are {weights.dtype} and the table is {dtype}; give the same dtype"
        return None


def _offset_problem(offsets: Tensor, ids: int, include_last_offset: bool) -> str | None:
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        return f"offsets have 1 dim and are int32 or int64, got {offsets.dim()} dims of {offsets.dtype}"
    starts = offsets.detach().cpu().numpy()
    if include_last_offset and (not len(starts) or starts[-1] != ids):
        return f'the last of the offsets is the number of ids, {ids}, when the flag "include_last_offset" is on'
    if ids and not len(starts):
        return f"there are {ids} ids and no offsets; give at least the offset 0"
    if len(starts) and starts[0] != 0:
        return f"the first offset is {starts[0]}; it must be 0"
    if len(starts) and (starts[-1] > ids or (starts[1:] < starts[:-1]).any()):
        return f"offsets ascend from 0 to at most {ids}, the number of ids; these end at {starts[-1]}"
    return None
