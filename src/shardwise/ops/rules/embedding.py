"""Embeddings: tables split by rows (each rank looks up what it holds) or by columns; ids split in any way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import aten
from shardwise.comm import Comm, gather_values
from shardwise.geometry import MeshSpec, Partial, Replicate, Shard
from shardwise.ops.implicit_replication import convert_plain_tensors, plain_as_replicated, register_plain_maker
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, split_call
from shardwise.ops.rules.index import check_range, find_local_entries, locate_in_runs
from shardwise.ops.rules.view import pending_kinds
from shardwise.ops.views import fill_empty, find_runs, mesh_view, redistribute_to, resolve_partial
from shardwise.tensor.dispatch import UnsupportedOpError, register_function, run_function
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import check_writable

SUM, MEAN, MAX = 0, 1, 2

register_plain_maker(F.embedding_bag)


@register_function(F.one_hot)
def _one_hot(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Ranks agree on whether all classes are in range, as torch checks it where no device has to be waited for."""
    given = dict(zip(("tensor", "num_classes"), args, strict=False)) | kwargs
    index, classes = resolve_partial(given["tensor"], "one_hot"), given.get("num_classes", -1)
    own = [t for t in index.local_parts if t.numel()] if index.device.type == "cpu" else []
    low, high = min((int(t.min()) for t in own), default=0), max((int(t.max()) for t in own), default=0)
    problem = "non-negative" if low < 0 else "smaller than num_classes" if 0 <= classes <= high else ""
    whole = all(isinstance(p, Replicate) for p in index.placements or ())
    alone = whole and bool(index.placements)
    found = [problem] if alone else gather_values(comm, problem, label="one_hot").values()
    if any(found):
        raise RuntimeError(f"Class values must be {max(found)}.")
    with plain_as_replicated():
        return run_function(F.one_hot, (index, classes), {})


@register_sharding(aten.embedding.default)
def embedding(
    weight: TensorMeta,
    ids: TensorMeta,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[Any]:
    found = [Strategy((Replicate(),), (Replicate(), Replicate()))]
    whole = tuple(axis for axis, p in enumerate(ids.placements) if not isinstance(p, Shard))  # rows stay split
    found.append(Strategy((Shard(ids.ndim),), (Shard(1), Replicate()), axes=whole))
    found += [Strategy((p,), (p, Replicate())) for p in pending_kinds(weight)]
    if not scale_grad_by_freq:  # frequencies are counted over all ids and rows
        found += [Strategy((Shard(d),), (Replicate(), Shard(d))) for d in range(ids.ndim)]
        found.append(Strategy((Partial("sum"),), (Shard(0), Replicate()), _look_up_local_rows))
    return [replace(s, local_if_empty=_look_up_if_in_range) for s in found]


def _look_up_if_in_range(view: Any, weight: Tensor, ids: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Torch looks at no id where rows have no columns, and all ranks must find the same mistakes."""
    check_range(ids, 0, view.shapes[0][0], 0)
    return _look_up(weight, ids, *rest, **named)


def _look_up_local_rows(
    view: Any, weight: Tensor, ids: Tensor, padding_idx: int = -1, *rest: Any, **named: Any
) -> Tensor:
    """Look up the rows that this rank holds, zeros for the others."""
    here, at = find_local_entries(view, 0, 0, ids)
    places = (padding_idx - start + at for start, stop, at in view.runs(0, 0) if start <= padding_idx < stop)
    padding = next(places, -1)
    values = _look_up(weight, at, padding, *rest, **named)
    return torch.where(here.unsqueeze(-1), values, torch.zeros((), dtype=values.dtype, device=values.device))


def _look_up(weight: Tensor, ids: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Look up in a table with a row and a column at least, and one id at least.

    A table without rows cannot be looked up in, and one without columns only in host memory: kernels for GPUs, those
    of the backward pass above all, read and write elements that are not there, or fail without ids.
    """
    if weight.numel() and ids.numel():
        return aten.embedding.default(weight, ids, *rest, **named)  # type: ignore[no-any-return]  # untyped in torch
    found = aten.embedding.default(fill_empty(weight), fill_empty(ids), *rest, **named)
    cut: Tensor = found[tuple(map(slice, (*ids.shape, weight.shape[1])))]
    return cut


def _scale_long_rows(weight: ShardedTensor, ids: Tensor, max_norm: float, norm_type: float) -> ShardedTensor:
    """Scale the rows that are looked up and are longer than `max_norm`, in place; each rank those it has."""
    ids, _ = convert_plain_tensors(split_call(aten.embedding_renorm_.default, (ids, weight), {}))
    spec = mesh_view(weight.sharding)
    leaves_out = spec is not None and spec.mesh.ranks.size < weight.comm.world_size  # these would not know the rows
    if spec is None or leaves_out or weight.sharding.pending is not None:
        raise UnsupportedOpError(
            f"embedding_renorm_ of {format_layout_text(weight.sharding)}: redistribute the table to Shard or Replicate "
            "on a mesh of all ranks"
        )
    check_writable(weight)
    whole = MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim)
    held = redistribute_to(ids, whole.layout(tuple(ids.shape)), "embedding_renorm")
    rows: Tensor = held.local_parts[0].unique()  # type: ignore[no-untyped-call]  # untyped in torch
    index = wrap(whole.layout(tuple(rows.shape)), (rows,), weight.comm)
    with torch.no_grad():
        picked: Any = aten.index_select.default(weight.detach(), 0, index)
        norms = redistribute_to(picked.norm(norm_type, 1), whole.layout(tuple(rows.shape)), "embedding_renorm")
        length = norms.local_parts[0]
        scale = torch.where(length > max_norm, max_norm / (length + 1e-7), 1.0)
        here, at = locate_in_runs(find_runs(weight.sharding, weight.comm.rank, 0), rows)
        local = weight.local_parts[0].detach()
        local[at[here]] = local[at[here]] * scale[here].unsqueeze(1)
    return weight


register_sharding(aten.embedding_renorm_.default, Steps(_scale_long_rows))


@register_sharding([aten._embedding_bag.default, aten._embedding_bag_forward_only.default])
def embedding_bag(
    weight: TensorMeta,
    ids: TensorMeta,
    offsets: TensorMeta,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    weights: TensorMeta | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> list[Any]:
    """Bags of a table cut in columns; of one cut in rows where the rows of a bag are added up or averaged."""
    whole = (Replicate(),) * (2 if weights is None else 3)
    found = [Strategy((Replicate(),) * 4, (Replicate(), *whole), _sum_bags)]
    last = Shard(1) if mode == MAX else Replicate()
    found.append(Strategy((Shard(1), Replicate(), Replicate(), last), (Shard(1), *whole), _sum_bags))
    if mode != MAX and padding_idx < 0 and not scale_grad_by_freq:
        outputs = (Partial("sum"), Replicate(), Replicate(), Replicate())
        found.append(Strategy(outputs, (Shard(0), *whole), _sum_bags))
    return found


def _sum_bags(view: Any, *args: Any, **kwargs: Any) -> Any:
    """Bags of the rows that this rank holds, on the tape: torch asks for the variant without gradients."""
    if view.runs(0, 0) != ((0, view.shapes[0][0], 0),):
        return _sum_local_bags(view, *args, **kwargs)
    return _make_bags(*args, **kwargs)


def _make_bags(weight: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
    bags, *lists, largest = aten._embedding_bag.default(fill_empty(weight), *rest, **named)
    if weight.shape[1] == 0:  # the places of the largest are one for each element, else one for each bag
        bags, largest = bags[:, :0], largest[:, :0] if largest.ndim == 2 else largest
    return bags, *lists, largest


def _sum_local_bags(
    view: Any,
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, ...]:
    """Add up the rows that this rank holds; an average is divided by the length of the whole bag.

    What another rank holds is looked up in the first row, as padding: 0 times a row that is infinite would be nan. What
    belongs to the first row is added by itself.
    """
    here, at = find_local_entries(view, 0, 0, ids)
    kept = torch.ones_like(at, dtype=weight.dtype) if weights is None else weights
    at = torch.where(here, at, 0)
    bags, *rest = _make_bags(weight, at, offsets, False, SUM, False, kept, include_last_offset, 0)
    first = here & (at == 0)
    numbers = torch.bucketize(torch.arange(at.numel(), device=at.device), offsets, right=True) - 1
    factor = torch.where(first, kept, 0).new_zeros(bags.shape[0]).index_add(0, numbers, torch.where(first, kept, 0))
    found = torch.zeros_like(factor, dtype=at.dtype).index_add(0, numbers, first.to(at.dtype)) > 0
    row = fill_empty(weight)[0, : bags.shape[1]]
    bags = bags + torch.where(found.unsqueeze(1), factor.unsqueeze(1) * row, 0)
    if mode == MEAN:
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([ids.numel()])])
        starts = offsets[:-1] if include_last_offset else offsets
        bags = bags / (ends - starts).clamp(min=1).unsqueeze(-1).to(bags.dtype)
    return bags, *rest
