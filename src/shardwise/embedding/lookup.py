"""Embeddings of plain ids in a sharded table: each rank brings its own ids and gets its own result.

1. `embedding` fetches the rows that ids name from the ranks that hold them (`fetch`).
2. `embedding_bag` has sums and means of bags made where the rows are held (`pool`) if so fewer bytes travel. Else, and
   for maxima, limited norms and weights that get gradients, it fetches the rows and calls torch's own function on them.

So every mode and option means what it means for a plain table, for tables cut in rows, in columns, in blocks, or whole
on some rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm
from shardwise.embedding.fetch import Spread, ask_for, fetched, index
from shardwise.embedding.local_batch import is_local_batch, otherwise
from shardwise.embedding.lookup_call import Call
from shardwise.embedding.options import BagArguments, Options, host_ids, id_problem
from shardwise.embedding.pool import Bags, ask_for_sums, pooled
from shardwise.embedding.slabs import Numbers
from shardwise.tensor.dispatch import register_handler
from shardwise.tensor.sharded_tensor import ShardedTensor

Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_embed, _bag = otherwise(F.embedding), otherwise(F.embedding_bag)


@register_handler(F.embedding)
def _embedding(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _of_local_ids(*args, **kwargs) if _is_local(*args, **kwargs) else _embed(types, args, kwargs, comm)


@register_handler(F.embedding_bag)
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
    options = Options("embedding", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    call = options.call(weight)
    problem = id_problem(input, weight.shape[0])
    ids = host_ids(input, call, problem)
    request = ask_for(call, ids, problem)
    held = options.limited(weight, request)
    places, order = (None if i is None else index(i, held[0]) for i in (request.query.places, request.query.order))
    padding = options.is_padding(ids, weight.shape[0])
    dropped = None if padding is None else torch.from_numpy(padding).to(held[0].device)
    rows = fetched(request, Spread(request.query.size, places, order, dropped), held)
    return rows.view(*input.shape, weight.shape[1])


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
    options = Options("embedding_bag", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    call = options.call(weight, mode=mode)
    given = BagArguments(input, offsets, mode, per_sample_weights, include_last_offset)
    problem = given.problem(weight)
    ids = host_ids(input, call, problem)
    result = None
    if mode != "max" and max_norm is None:
        result = _sums(call, weight, options, ids, given, problem)
    return result if result is not None else _of_fetched_rows(call, weight, options, ids, given, problem)


def _sums(
    call: Call, weight: ShardedTensor, options: Options, ids: Numbers, given: BagArguments, problem: str | None
) -> Tensor | None:
    """The bags, summed where their rows are held, or None if fewer bytes travel otherwise."""
    lengths = given.lengths() if problem is None else np.zeros(0, np.int64)
    of, samples = np.repeat(np.arange(len(lengths)), lengths), given.per_sample_weights
    scales = None if samples is None or problem else samples.detach().reshape(-1).cpu()
    padding = options.is_padding(ids, weight.shape[0])
    if padding is not None:
        kept = np.flatnonzero(~padding)
        ids, of, scales = ids[kept], of[kept], None if scales is None else scales[torch.from_numpy(kept)]
    bags, held = Bags(ids, of, len(lengths), scales), weight._tape_tensors()
    recorded = samples is not None and torch.is_grad_enabled() and samples.requires_grad
    pooling = ask_for_sums(call, bags, held[0], possible=not recorded, problem=problem)
    if pooling is None:
        return None
    sums = pooled(pooling, held)
    return sums / index(bags.lengths().clip(min=1), sums).to(sums.dtype).unsqueeze(1) if given.mode == "mean" else sums


def _of_fetched_rows(
    call: Call, weight: ShardedTensor, options: Options, ids: Numbers, given: BagArguments, problem: str | None
) -> Tensor:
    """The bags, by torch's own function on the rows that they name."""
    request = ask_for(call, ids, problem)
    held = options.limited(weight, request)
    rows = fetched(request, Spread(request.query.size), held)
    at = np.arange(len(ids)) if request.query.places is None else request.query.places
    padding, place = options.is_padding(ids, weight.shape[0]), None
    if padding is not None:  # it is one row, also where ids were not made distinct
        place = int(at[padding][0])
        at = np.where(padding, place, at)
    return F.embedding_bag(
        index(at, rows).reshape(given.input.shape),
        rows,
        None if given.offsets is None else given.offsets.to(torch.int64),
        mode=given.mode,
        per_sample_weights=given.per_sample_weights,
        include_last_offset=given.include_last_offset,
        padding_idx=place,
    )
