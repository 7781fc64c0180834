"""Scaled dot product attention: batch and heads sharded alike, or rows of the queries, or columns of the values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import aten, pytree
from shardwise.geometry import Placement, Replicate, Shard
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta
from shardwise.ops.views import mesh_view, put_on_tape
from shardwise.tensor.dispatch import UnsupportedOpError

Mask = TensorMeta | None


@register_sharding(aten.scaled_dot_product_attention.default)
def attention(
    q: TensorMeta,
    k: TensorMeta,
    v: TensorMeta,
    mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> list[Strategy] | Steps:
    if dropout_p:
        return Steps(_attend_with_dropout)
    ndim = q.ndim
    if len({ndim, k.ndim, v.ndim}) > 1:
        return [_attention_strategy(Replicate(), (Replicate(),) * 3, mask, None, ndim)]
    found = _attention_batch_strategies(q, k, v, mask, enable_gqa)
    rows, columns = ndim - 2, ndim - 1
    local = _attend_causal_rows if is_causal else None
    found.append(_attention_strategy(Shard(rows), (Shard(rows), Replicate(), Replicate()), mask, rows, ndim, local))
    found.append(_attention_strategy(Shard(columns), (Replicate(), Replicate(), Shard(columns)), mask, None, ndim))
    return [replace(s, local_if_empty=_attend_if_any) for s in found]


def _attend_if_any(
    view: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor:
    """Attention of any rows of the queries, and nothing where there is nothing.

    Kernels of some releases of torch end the process on tensors without heads, rows or columns.
    """
    if not (q.numel() and v.numel()):
        biases = [mask] if mask is not None and mask.is_floating_point() else []
        return put_on_tape(q.new_zeros((*q.shape[:-1], v.shape[-1])), q, k, v, *biases)
    if is_causal:
        return _attend_causal_rows(view, q, k, v, **named)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, **named)


def _attention_batch_strategies(
    q: TensorMeta, k: TensorMeta, v: TensorMeta, mask: Mask, grouped: bool
) -> list[Strategy]:
    """All replicated, and each dim before the last two sharded."""
    found = [_attention_strategy(Replicate(), (Replicate(),) * 3, mask, None, q.ndim)]
    for dim in range(q.ndim - 2):
        if q.shape[dim] == k.shape[dim] == v.shape[dim]:
            found.append(_attention_strategy(Shard(dim), (Shard(dim),) * 3, mask, dim, q.ndim))
        elif grouped and dim == q.ndim - 3 and (axes := _axes_of_groups(q, k)):
            # The result has the heads of the queries, however large the keys are: one group of that many.
            heads = Shard(dim, groups=(q.shape[dim],))
            found.append(replace(_attention_strategy(heads, (Shard(dim),) * 3, mask, dim, q.ndim), axes=axes))
    return found


def _axes_of_groups(q: TensorMeta, k: TensorMeta) -> tuple[int, ...]:
    """The axes along which heads of queries that share a key stay together: all together split the keys evenly.

    All axes of the mesh, or else those that split the heads of the queries now.
    """
    spec = mesh_view(q.layout)
    dim = q.ndim - 3
    plain = all(not (isinstance(p, Shard) and p.dim == dim and p != Shard(dim)) for p in (*q.placements, *k.placements))
    if not plain or spec is None:
        return ()
    splitting = tuple(a for a, p in enumerate(q.placements) if p == Shard(dim))
    for axes in (tuple(range(spec.mesh.ndim)), splitting):
        if k.shape[dim] % math.prod(spec.mesh.shape[a] for a in axes) == 0:
            return axes
    return ()


def _attention_strategy(
    out: Placement, inputs: tuple[Placement, ...], mask: Mask, dim: int | None, ndim: int, local: Any = None
) -> Strategy:
    """A strategy whose mask is cut along `dim` of the result, where it has that dim."""
    if mask is None:
        return Strategy((out,), inputs, local)
    own = -1 if dim is None else dim - (ndim - mask.ndim)
    cut: Placement = Shard(own) if own >= 0 and mask.shape[own] != 1 else Replicate()
    return Strategy((out,), (*inputs, cut), local)


def _attend_causal_rows(
    view: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *rest: Any, **named: Any
) -> Tensor:
    """Causal attention of some rows of the queries: the mask starts at the first of them."""
    first, last = view.interval(0, q.ndim - 2)
    rows = torch.arange(first, last, device=q.device).unsqueeze(1)
    allowed = torch.arange(k.shape[-2], device=q.device).unsqueeze(0) <= rows
    options = {name: value for name, value in named.items() if name in ("scale", "enable_gqa")}
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, **options)


def _attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention step by step, so that the dropped weights do not depend on the layout."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        raise UnsupportedOpError("attention with dropout takes as many heads of keys as of queries; repeat the keys")
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril().logical_not(), float("-inf"))
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf")) if masked else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def _register_fused_attention(op: Any) -> None:
    """Register the rule of a kernel that torch picks: batch or heads sharded."""

    def attend_if_any(view: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.numel() and v.numel():
            return op(q, k, v, *args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), ((q, k, v, *args), kwargs))
        made = pytree.tree_map_only(Tensor, lambda t: torch.zeros_like(t, device=q.device), op(*args, **kwargs))
        return (put_on_tape(made[0], q, k, v), *made[1:])

    @register_sharding(op)
    def fused_attention(q: TensorMeta, k: TensorMeta, v: TensorMeta, *args: Any, **kwargs: Any) -> list[Any]:
        """The second output has a row for each query; further ones are no part of the result."""
        mask = next((a for a in (*args, *kwargs.values()) if isinstance(a, TensorMeta)), None)
        dropout_p = next((a for a in args if isinstance(a, float)), kwargs.get("dropout_p", 0.0))
        if dropout_p:
            raise UnsupportedOpError(
                "attention with dropout draws random numbers; call torch.nn.functional.scaled_dot_product_attention, "
                "which draws the same ones for every layout"
            )
        replicated, *cut = _attention_batch_strategies(q, k, v, mask, grouped=False)
        two = [Strategy((s.outputs[0], s.outputs[0], *(Replicate(),) * 7), s.inputs) for s in cut]
        found = [Strategy((Replicate(),) * 9, replicated.inputs), *two]
        return [replace(s, local_if_empty=attend_if_any) for s in found]


for _op in (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
):
    _register_fused_attention(_op)
