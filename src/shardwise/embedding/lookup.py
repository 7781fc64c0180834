"""Embeddings of plain ids in a sharded table: each rank passes its own ids and gets its own result.

1. `embedding` fetches the rows that ids name from the ranks that hold them (`fetch`).
2. `embedding_bag` has sums and means of bags made where the rows are held (`pool`) if so fewer bytes travel. Else, and
   for maxima, limited norms and weights that get gradients, it fetches the rows and calls torch's own function on them.

So every mode and option means what it means for a plain table, for tables split by rows, columns or blocks, or whole
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
from shardwise.embedding.fetch import RowExpansion, fetch_rows, index_tensor, request_rows
from shardwise.embedding.local_batch import default_implementation, is_local_batch
from shardwise.embedding.lookup_call import LookupCall
from shardwise.embedding.options import BagArguments, LookupOptions, copy_ids_to_host, id_problem
from shardwise.embedding.pool import LocalBags, pool_bags, request_bag_sums
from shardwise.embedding.slabs import RowNumbers
from shardwise.tensor.dispatch import register_function
from shardwise.tensor.sharded_tensor import ShardedTensor

Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_embed, _bag = default_implementation(F.embedding), default_implementation(F.embedding_bag)


@register_function(F.embedding)
def _embedding(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _embed_local_ids(*args, **kwargs) if _is_local_lookup(*args, **kwargs) else _embed(types, args, kwargs, comm)


@register_function(F.embedding_bag)
def _embedding_bag(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _embed_local_bags(*args, **kwargs) if _is_local_lookup(*args, **kwargs) else _bag(types, args, kwargs, comm)


def _is_local_lookup(input: Any, weight: Any, offsets: Any = None, *rest: Any, **named: Any) -> bool:
    return is_local_batch((input, offsets, named.get("per_sample_weights")), (weight,))


def _embed_local_ids(
    input: Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    options = LookupOptions("embedding", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    call = options.call(weight)
    problem = id_problem(input, weight.shape[0])
    ids = copy_ids_to_host(input, call, problem)
    request = request_rows(call, ids, problem)
    held = options.apply_max_norm(weight, request)
    places, order = (
        None if i is None else index_tensor(i, held[0]) for i in (request.query.places, request.query.order)
    )
    padding = options.is_padding(ids, weight.shape[0])
    dropped = None if padding is None else torch.from_numpy(padding).to(held[0].device)
    rows = fetch_rows(request, RowExpansion(request.query.size, places, order, dropped), held)
    return rows.view(*input.shape, weight.shape[1])


def _embed_local_bags(
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
    options = LookupOptions("embedding_bag", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    call = options.call(weight, mode=mode)
    given = BagArguments(input, offsets, mode, per_sample_weights, include_last_offset)
    problem = given.problem(weight)
    ids = copy_ids_to_host(input, call, problem)
    result = None
    if mode != "max" and max_norm is None:
        result = _sum_bags_at_holders(call, weight, options, ids, given, problem)
    return result if result is not None else _embed_fetched_bags(call, weight, options, ids, given, problem)


def _sum_bags_at_holders(
    call: LookupCall,
    weight: ShardedTensor,
    options: LookupOptions,
    ids: RowNumbers,
    given: BagArguments,
    problem: str | None,
) -> Tensor | None:
    """The bags, summed where their rows are held, or None if fewer bytes travel otherwise."""
    lengths = given.lengths() if problem is None else np.zeros(0, np.int64)
    of, samples = np.repeat(np.arange(len(lengths)), lengths), given.per_sample_weights
    scales = None if samples is None or problem else samples.detach().reshape(-1).cpu()
    padding = options.is_padding(ids, weight.shape[0])
    if padding is not None:
        kept = np.flatnonzero(~padding)
        ids, of, scales = ids[kept], of[kept], None if scales is None else scales[torch.from_numpy(kept)]
    bags, held = LocalBags(ids, of, len(lengths), scales), weight._tape_tensors()
    recorded = samples is not None and torch.is_grad_enabled() and samples.requires_grad
    pooling = request_bag_sums(call, bags, held[0], possible=not recorded, problem=problem)
    if pooling is None:
        return None
    sums = pool_bags(pooling, held)
    return (
        sums / index_tensor(bags.lengths().clip(min=1), sums).to(sums.dtype).unsqueeze(1)
        if given.mode == "mean"
        else sums
    )


def _embed_fetched_bags(
    call: LookupCall,
    weight: ShardedTensor,
    options: LookupOptions,
    ids: RowNumbers,
    given: BagArguments,
    problem: str | None,
) -> Tensor:
    """The bags, by torch's own function on the rows that they name."""
    request = request_rows(call, ids, problem)
    held = options.apply_max_norm(weight, request)
    rows = fetch_rows(request, RowExpansion(request.query.size), held)
    at = np.arange(len(ids)) if request.query.places is None else request.query.places
    padding, place = options.is_padding(ids, weight.shape[0]), None
    if padding is not None:  # it is one row, also where ids were not made distinct
        place = int(at[padding][0])
        at = np.where(padding, place, at)
    return F.embedding_bag(
        index_tensor(at, rows).reshape(given.input.shape),
        rows,
        None if given.offsets is None else given.offsets.to(torch.int64),
        mode=given.mode,
        per_sample_weights=given.per_sample_weights,
        include_last_offset=given.include_last_offset,
        padding_idx=place,
    )
