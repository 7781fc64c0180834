"""What lookups take besides ids and table: the options, their checks, and the collective call they make.

`embedding_bag` also takes what makes bags of ids: it is checked, and the length of each bag worked out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.embedding.fetch import RowRequest
from shardwise.embedding.lookup_call import LookupCall
from shardwise.embedding.slabs import BoolArray, RowNumbers, check_table_shape
from shardwise.ops.engine.explain import check_may_communicate, is_explaining_or_forbidding
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """The options of a lookup, in torch's words."""

    name: str
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def call(self, weight: ShardedTensor, **fields: object) -> LookupCall:
        """The collective call, after all checks that come out the same on every rank."""
        self._check(weight)
        layout, comm = weight.sharding, weight.comm
        if is_explaining_or_forbidding():
            check_may_communicate(self.name, layout, replicated_layout(layout.shape, comm.ranks))
        recorded = torch.is_grad_enabled() and weight.requires_grad
        wanted = {"max_norm": self.max_norm, "norm_type": self.norm_type, "dtype": str(weight.dtype), **fields}
        return LookupCall(layout, comm, recorded or self.max_norm is not None, self.name, wanted)

    def _check(self, weight: ShardedTensor) -> None:
        """Raise if a lookup does not support the request; no values are read."""
        check_table_shape(weight.shape)
        if self.scale_grad_by_freq or self.sparse:
            flag = "scale_grad_by_freq" if self.scale_grad_by_freq else "sparse"
            raise RuntimeError(f'{self.name} of a sharded table with flag on "{flag}" not supported! Turn it off')
        if self.max_norm is not None and self.max_norm <= 0.0:
            raise ValueError(f'"max_norm" must be larger than zero! It is {self.max_norm}')
        if weight.sharding.pending is not None:
            raise UnsupportedOpError(f"{self.name}: a reduction of the table is pending; redistribute it first")
        rows, padding = weight.shape[0], self.padding_idx
        if padding is not None and not -rows <= padding < rows:
            raise ValueError(f"padding_idx {padding} is outside of the table's {rows} rows")

    def apply_max_norm(self, weight: ShardedTensor, request: RowRequest) -> tuple[Tensor, ...]:
        """What this rank holds, on the tape, after rows that are wanted were scaled down to `max_norm`."""
        held: tuple[Tensor, ...] = weight._tape_tensors()
        if self.max_norm is not None:
            with torch.no_grad():
                request.renorm(weight.local_parts, self.max_norm, float(self.norm_type), held[0])
        return held

    def is_padding(self, ids: RowNumbers, rows: int) -> BoolArray | None:
        """Which of some ids are padding; None if none is."""
        if self.padding_idx is None:
            return None
        found = ids == self.padding_idx % rows
        return found if found.any() else None


def copy_ids_to_host(ids: Tensor, call: LookupCall, problem: str | None) -> RowNumbers:
    """Flat ids as short numbers in host memory; none where something is wrong with them."""
    if problem is not None:
        return np.zeros(0, call.number)
    flat: RowNumbers = ids.detach().reshape(-1).cpu().numpy().astype(call.number)
    return flat


def id_problem(ids: Tensor, rows: int) -> str | None:
    """Why these ids cannot be looked up, or None."""
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids are int32 or int64, got {ids.dtype}"
    if not ids.numel():
        return None
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= rows:
        return f"Index out of range in Input: ids from {low} to {high}, and the table has {rows} rows"
    return None


BAG_MODES = ("sum", "mean", "max")


@dataclass(frozen=True, eq=False, slots=True)
class BagArguments:
    """One rank's bags, in torch's words."""

    input: Tensor
    offsets: Tensor | None
    mode: str
    per_sample_weights: Tensor | None
    include_last_offset: bool

    def lengths(self) -> RowNumbers:
        """How many ids each bag has.

        >>> BagArguments(torch.zeros(5), torch.tensor([0, 0, 2]), "sum", None, False).lengths()
        array([0, 2, 3])
        """
        if self.offsets is None:
            return np.full(self.input.shape[0], self.input.shape[1])
        starts: RowNumbers = self.offsets.detach().cpu().numpy()
        return np.diff(starts) if self.include_last_offset else np.diff(starts, append=len(self.input))

    def problem(self, table: ShardedTensor) -> str | None:
        """Why these bags cannot be computed, or None."""
        found = self._mode_problem() or self._shape_problem() or self._weight_problem(table.dtype)
        if found is None and self.offsets is not None:
            found = _offset_problem(self.offsets, len(self.input), self.include_last_offset)
        return found or id_problem(self.input, table.shape[0])

    def _mode_problem(self) -> str | None:
        if self.mode not in BAG_MODES:
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
            return f"per_sample_weights are {weights.dtype} and the table is {dtype}; use the same dtype"
        return None


def _offset_problem(offsets: Tensor, ids: int, include_last_offset: bool) -> str | None:
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        return f"offsets have 1 dim and are int32 or int64, got {offsets.dim()} dims of {offsets.dtype}"
    starts = offsets.detach().cpu().numpy()
    if include_last_offset and (not len(starts) or starts[-1] != ids):
        return f'the last of the offsets is the number of ids, {ids}, when the flag "include_last_offset" is on'
    if ids and not len(starts):
        return f"there are {ids} ids and no offsets; pass at least the offset 0"
    if len(starts) and starts[0] != 0:
        return f"the first offset is {starts[0]}; it must be 0"
    if len(starts) and (starts[-1] > ids or (starts[1:] < starts[:-1]).any()):
        return f"offsets ascend from 0 to at most {ids}, the number of ids; these end at {starts[-1]}"
    return None
