"""Embeddings of plain ids in a sharded table: each rank brings its own ids and gets its own result.

Ids are made distinct, the rows that are wanted are fetched from the ranks that hold them (`fetch`), and torch's own
function runs on those rows. So every mode and option means what it means for a plain table, for tables cut in rows, in
columns, in blocks, or whole on some rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm
from shardwise.nn.bands import check_table, distinct
from shardwise.nn.fetch import ask, fetched
from shardwise.nn.reading import is_local_batch, otherwise
from shardwise.ops.watch import forbid
from shardwise.tensor.dispatch import UnsupportedOpError, handler
from shardwise.tensor.moves import everywhere
from shardwise.tensor.sharded_tensor import ShardedTensor

Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_embed, _bag = otherwise(F.embedding), otherwise(F.embedding_bag)


@handler(F.embedding)
def _embedding(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _of_local_ids(*args, **kwargs) if _is_local(*args, **kwargs) else _embed(types, args, kwargs, comm)


@handler(F.embedding_bag)
def _embedding_bag(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _bags_of_local_ids(*args, **kwargs) if _is_local(*args, **kwargs) else _bag(types, args, kwargs, comm)


def _is_local(input: Any, weight: Any, offsets: Any = None, *rest: Any, **named: Any) -> bool:
    return is_local_batch((input, offsets, named.get("per_sample_weights")), (weight,))


def _of_local_ids(
    input: Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    options = _Options("embedding", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    rows, places, padding = _looked_up(input, weight, options, None)
    return F.embedding(places, rows, padding_idx=padding)


def _bags_of_local_ids(
    input: Tensor,
    weight: ShardedTensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    options = _Options("embedding_bag", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    problem = _bag_problem(input, offsets, mode, per_sample_weights, include_last_offset)
    rows, places, padding = _looked_up(input, weight, options, problem)
    return F.embedding_bag(
        places,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )


@dataclass(frozen=True, slots=True)
class _Options:
    """What both functions take besides ids and table."""

    name: str
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def check(self, weight: ShardedTensor) -> None:
        """Raise if a lookup cannot do what is asked; the same on every rank, since no values are looked at."""
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


def _looked_up(
    ids: Tensor, weight: ShardedTensor, options: _Options, problem: str | None
) -> tuple[Tensor, Tensor, int | None]:
    """The distinct rows that ids name, the ids as places among them, and the place of the padding."""
    options.check(weight)
    layout, comm = weight._layout, weight._comm
    forbid(options.name, layout, everywhere(layout.shape, comm.ranks))
    problem = problem or _id_problem(ids, layout.shape[0])
    found, places = distinct((ids if problem is None else ids.new_zeros(0)).reshape(-1).to(torch.int64))
    recorded = torch.is_grad_enabled() and weight.requires_grad
    wanted = {"max_norm": options.max_norm, "norm_type": options.norm_type, "dtype": str(weight.dtype)}
    all_replicas = recorded or options.max_norm is not None
    request = ask(layout, comm, found, everyone=all_replicas, fields=wanted, label=options.name, problem=problem)
    held = weight._on_tape()
    if options.max_norm is not None:
        with torch.no_grad():
            request.renorm(weight._locals, options.max_norm, float(options.norm_type), held[0])
    rows = fetched(request, held)
    return rows, places.reshape(ids.shape), _place_of(options.padding_idx, found, layout.shape[0])


def _place_of(padding: int | None, found: Tensor, rows: int) -> int | None:
    """Where the padding stands among distinct ids; None if it is not there."""
    if padding is None:
        return None
    wanted = padding % rows
    place = int(torch.searchsorted(found, wanted))
    return place if place < len(found) and int(found[place]) == wanted else None


def _id_problem(ids: Tensor, rows: int) -> str | None:
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids are int32 or int64, got {ids.dtype}"
    if not ids.numel():
        return None
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= rows:
        return f"Index out of range in Input: ids from {low} to {high}, and the table has {rows} rows"
    return None


def _bag_problem(
    ids: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, include_last_offset: bool
) -> str | None:
    """Why these bags cannot be computed, or None."""
    if mode not in ("sum", "mean", "max"):
        return f"mode '{mode}' is not supported; it is sum, mean or max"
    if ids.dim() not in (1, 2):
        return f"Input has {ids.dim()} dims; bags are the rows of 2 dims, or runs of 1 dim given by offsets"
    if ids.dim() == 2 and offsets is not None:
        return "Input dimension needs to be exactly 1 dim where offsets are given"
    if ids.dim() == 1 and offsets is None:
        return "offsets is required for 1D input"
    if include_last_offset and offsets is None:
        return 'offsets is required for flag "include_last_offset"!'
    if offsets is not None and len(offsets) and int(offsets[0]) != 0:
        return f"the first offset is {int(offsets[0])}; it must be 0"
    if offsets is not None and include_last_offset and (not len(offsets) or int(offsets[-1]) != len(ids)):
        return f'the last of the offsets is the number of ids, {len(ids)}, when the flag "include_last_offset" is on'
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights size {tuple(weights.shape)} not equal to input size {tuple(ids.shape)}"
    if weights is not None and mode != "sum":
        return f"per_sample_weights needs mode 'sum', got mode '{mode}'"
    return None
