"""What both lookups take besides ids and table: the options, their checks, and the collective call they make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.nn.asking import Call
from shardwise.nn.bands import BoolArray, Numbers, check_table
from shardwise.nn.fetch import Request
from shardwise.ops.watch import forbid, is_watched
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.moves import everywhere
from shardwise.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a lookup, in torch's words."""

    name: str
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def call(self, weight: ShardedTensor, **fields: object) -> Call:
        """The collective call, after all checks that come out the same on every rank."""
        self._check(weight)
        layout, comm = weight._layout, weight._comm
        if is_watched():
            forbid(self.name, layout, everywhere(layout.shape, comm.ranks))
        recorded = torch.is_grad_enabled() and weight.requires_grad
        wanted = {"max_norm": self.max_norm, "norm_type": self.norm_type, "dtype": str(weight.dtype), **fields}
        return Call(layout, comm, recorded or self.max_norm is not None, self.name, wanted)

    def _check(self, weight: ShardedTensor) -> None:
        """Raise if a lookup cannot do what is asked; no values are looked at."""
        check_table(weight.shape)
        if self.scale_grad_by_freq or self.sparse:
            flag = "scale_grad_by_freq" if self.scale_grad_by_freq else "sparse"
            raise RuntimeError(f'{self.name} of a sharded table with flag on "{flag}" not supported! Turn it off')
        if self.max_norm is not None and self.max_norm <= 0.0:
            raise ValueError(f'"max_norm" must be larger than zero! It is {self.max_norm}')
        if weight._layout.pending is not None:
            raise UnsupportedOpError(f"{self.name}: a reduction of the table is pending; redistribute it first")
        rows, padding = weight.shape[0], self.padding_idx
        if padding is not None and not -rows <= padding < rows:
            raise ValueError(f"padding_idx {padding} is outside of the table's {rows} rows")

    def limited(self, weight: ShardedTensor, request: Request) -> tuple[Tensor, ...]:
        """What this rank holds, on the tape, after rows that are wanted were scaled down to `max_norm`."""
        held: tuple[Tensor, ...] = weight._on_tape()
        if self.max_norm is not None:
            with torch.no_grad():
                request.renorm(weight._locals, self.max_norm, float(self.norm_type), held[0])
        return held

    def is_padding(self, ids: Numbers, rows: int) -> BoolArray | None:
        """Which of some ids are padding; None if none is."""
        if self.padding_idx is None:
            return None
        found = ids == self.padding_idx % rows
        return found if found.any() else None


def host_ids(ids: Tensor, call: Call, problem: str | None) -> Numbers:
    """Flat ids as short numbers in host memory; none where something is wrong with them."""
    if problem is not None:
        return np.zeros(0, call.number)
    flat: Numbers = ids.detach().reshape(-1).cpu().numpy().astype(call.number)
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
