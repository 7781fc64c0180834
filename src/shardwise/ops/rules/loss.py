"""Losses: pointwise ones with their reduction, and the likelihood of classes whose scores may be sharded.

A mean is this rank's sum over the global number of elements, so uneven sizes work. Where the classes are sharded
each rank looks up the targets that it holds; the rest come from the others as a pending sum, and nothing is gathered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import assert_async, aten, decomposition_table, reduction_number
from shardwise.comm import Comm
from shardwise.comm.stand_in import is_tracing
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta
from shardwise.ops.rules.index import locate_in_runs
from shardwise.ops.rules.pointwise import pointwise_strategies
from shardwise.ops.views import LocalView, arguments_by_name, cutting_axes, resolve_partial
from shardwise.tensor.dispatch import register_function
from shardwise.tensor.move import replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor

NONE, MEAN, SUM = 0, 1, 2


# Losses of pairs of elements


def _mean_loss_part(op: Any, view: LocalView, *args: Any, **kwargs: Any) -> Tensor:
    """This rank's share of a mean loss: its sum over the global number of elements."""
    bound = arguments_by_name(op, args, kwargs)
    bound["reduction"] = SUM
    summed: Tensor = op(**bound)
    whole: tuple[int, ...] = torch.broadcast_shapes(*view.shapes)  # type: ignore[no-untyped-call]  # untyped in torch
    return summed / math.prod(whole)


def _register_pointwise_loss(op: Any) -> None:
    """Register the rule of a loss that compares elements and reduces."""

    def rule(*args: Any, **kwargs: Any) -> list[Strategy]:
        bound = arguments_by_name(op, args, kwargs)
        metas = [value for value in bound.values() if isinstance(value, TensorMeta)]
        found = pointwise_strategies(metas)
        if bound["reduction"] == NONE:
            return found
        local = partial(_mean_loss_part, op) if bound["reduction"] == MEAN else None
        return [found[0], *(Strategy((Partial("sum"),), s.inputs, local) for s in found[1:])]

    register_sharding(op)(rule)


for _op in (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
):
    _register_pointwise_loss(_op)


def _register_loss_gradient(op: Any) -> None:
    """Register the rule of the gradient of such a loss: of a mean it is that of a sum over the number of elements."""

    def rule(*args: Any, **kwargs: Any) -> list[Strategy]:
        bound = arguments_by_name(op, args, kwargs)
        found = pointwise_strategies([value for value in bound.values() if isinstance(value, TensorMeta)])
        if bound["reduction"] != MEAN:
            return found
        local = partial(_mean_loss_part, op)
        return [found[0], *(Strategy(s.outputs, s.inputs, local) for s in found[1:])]

    register_sharding(op)(rule)


for _op in (
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
):
    _register_loss_gradient(_op)


# Losses of rows of scores: the classes are whole


def _register_row_loss(op: Any) -> None:
    """Register the rule of a loss that compares the scores of a row: rows may be sharded."""
    local = partial(_row_loss_part, op)

    def rule(*args: Any, **kwargs: Any) -> list[Strategy]:
        bound = arguments_by_name(op, args, kwargs)
        metas = [value for value in bound.values() if isinstance(value, TensorMeta)]
        found = [Strategy((Replicate(),), (Replicate(),) * len(metas), local)]
        if bound["self"].ndim < 2:
            return found
        loss: Placement = Shard(0) if bound["reduction"] == NONE else Partial("sum")
        return [*found, Strategy((loss, Shard(0)), (Shard(0), Shard(0), *(Replicate() for _ in metas[2:])), local)]

    register_sharding(op)(rule)


def _row_loss_part(op: Any, view: LocalView, *args: Any, **kwargs: Any) -> Any:
    """This rank's share: of a mean its sum over the number of all rows.

    The operator's backward pass takes no tensors without values; there the decomposition has the same shapes.
    """
    bound = arguments_by_name(op, args, kwargs)
    compute = decomposition_table[op] if bound["self"].is_meta else op
    if bound["reduction"] != MEAN:
        return compute(*bound.values())
    summed, shape = compute(*{**bound, "reduction": SUM}.values()), view.shapes[0]
    rows = shape[0] if len(shape) > 1 else 1
    return (summed[0] / rows, *summed[1:]) if isinstance(summed, tuple) else summed / rows


for _op in (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default):
    _register_row_loss(_op)


# The likelihood of classes


def _class_dim(scores: Any) -> int:
    return 1 if scores.ndim > 1 else 0


def _nll_rule(scores: TensorMeta, target: TensorMeta, weight: Any, reduction: int, ignore_index: int) -> list[Strategy]:
    """Strategies of the loss and of the total weight, for `reduction` none or sum."""
    classes = _class_dim(scores)

    def way(loss: Placement, total: Placement, *inputs: Placement) -> Strategy:
        return Strategy((loss, total), inputs if weight is not None else inputs[:2], _nll_part)

    found = [way(Replicate(), Replicate(), Replicate(), Replicate(), Replicate())]
    pending = Partial("sum")
    for dim in (d for d in range(scores.ndim) if d != classes):
        own = dim if dim < classes else dim - 1
        found.append(way(Shard(own) if reduction == NONE else pending, pending, Shard(dim), Shard(own), Replicate()))
    return [*found, way(pending, pending, Shard(classes), Replicate(), Shard(0))]


def _nll_part(
    view: LocalView, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss of the targets that this rank holds, zero for others, and the weight of those."""
    classes = _class_dim(scores)
    _check_targets(target, view.shapes[0][classes], ignore_index)
    here, at = locate_in_runs(view.runs(0, classes), target)
    counted = here & (target != ignore_index)
    place = torch.where(counted, at, 0)
    if scores.shape[classes] == 0:
        nothing = scores.sum(classes)
        return (nothing if reduction == NONE else nothing.sum()), nothing.detach().sum()
    picked = scores.gather(classes, place.unsqueeze(classes)).squeeze(classes)
    factor = counted.to(scores.dtype) if weight is None else torch.where(counted, weight.take(place), 0)
    loss = -torch.where(counted, picked * factor, 0)
    return (loss, factor.new_zeros(())) if reduction == NONE else (loss.sum(), factor.sum().detach())


def _check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise for targets that are not a class; a device, or a graph that is traced, raises when it computes."""
    if not target.numel():
        return
    outside = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if target.device.type != "cpu" or is_tracing():
        assert_async(~outside.any(), f"a target is out of bounds: the classes are 0 to {classes - 1}")
    elif len(wrong := target[outside]):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds: the classes are 0 to {classes - 1}")


@register_sharding([aten.nll_loss_forward.default, aten.nll_loss2d_forward.default])
def nll_loss(
    scores: TensorMeta, target: TensorMeta, weight: Any, reduction: int, ignore_index: int
) -> list[Strategy] | Steps:
    return Steps(_mean_nll) if reduction == MEAN else _nll_rule(scores, target, weight, reduction, ignore_index)


@register_sharding([aten.nll_loss_backward.default, aten.nll_loss2d_backward.default])
def nll_gradient(
    grad: TensorMeta, scores: TensorMeta, target: TensorMeta, weight: Any, reduction: int, ignored: int, total: Any
) -> list[Strategy]:
    """The rows of a batch may be sharded: a mean is divided by the weight of all of it, which is passed."""
    rest = (Replicate(),) * (1 if weight is None else 2)
    found = [Strategy((Replicate(),), (Replicate(),) * (3 + len(rest)))]
    if scores.ndim > 1:
        rows = Shard(0) if grad.ndim else Replicate()
        found.append(Strategy((Shard(0),), (rows, Shard(0), Shard(0), *rest)))
    return found


def _is_on_every_rank(tensor: ShardedTensor) -> bool:
    return tensor.sharding == replicated_layout(tuple(tensor.shape), tensor.comm.ranks)


def _mean_nll(scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    """A mean is a sum over the weight of all targets, which the ranks add up first."""
    if isinstance(target, ShardedTensor) and _is_on_every_rank(target):
        _check_targets(target.local_parts[0], scores.shape[_class_dim(scores)], ignore_index)
    op = aten.nll_loss_forward.default if scores.ndim <= 2 else aten.nll_loss2d_forward.default
    loss, total = op(scores, target, weight, SUM, ignore_index)
    total = resolve_partial(total, "nll_loss")
    return loss / total, total


# Smooth labels over sharded classes


@register_function(F.cross_entropy)
def _cross_entropy(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """torch writes into a sum over the classes, which is pending where they are sharded; here it is added up first."""
    given = _signature.bind(*args, **kwargs)
    given.apply_defaults()
    x, target, smoothing = (given.arguments[name] for name in ("input", "target", "label_smoothing"))
    sharded = isinstance(x, ShardedTensor) and isinstance(target, ShardedTensor)
    if not sharded or smoothing == 0 or target.is_floating_point():
        return NotImplemented
    weight = given.arguments["weight"]
    if not _is_split_or_partial(x, _class_dim(x)) and not (
        isinstance(weight, ShardedTensor) and _is_split_or_partial(weight, 0)
    ):
        return NotImplemented
    reduction = reduction_number(given.arguments["reduction"])
    return _smooth_labels(x, target, weight, given.arguments["ignore_index"], smoothing, reduction)


_signature = inspect.signature(F.cross_entropy)


def _is_split_or_partial(tensor: ShardedTensor, dim: int) -> bool:
    """Whether ranks hold different classes, or addends."""
    return bool(cutting_axes(tensor.sharding, (dim,))) or tensor.sharding.pending is not None


def _smooth_labels(x: Any, target: Any, weight: Any, ignore_index: int, smoothing: float, reduction: int) -> Any:
    """(1 - smoothing) of the target's loss, and the rest spread over all classes; autocast computes it in float32."""
    if torch.is_autocast_enabled(x._wrapper_device().type) and x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    classes, count = _class_dim(x), x.shape[_class_dim(x)]
    logs: Any = F.log_softmax(x, classes)
    op = aten.nll_loss_forward.default if x.ndim <= 2 else aten.nll_loss2d_forward.default
    loss, total = op(logs, target, weight, NONE if reduction == NONE else SUM, ignore_index)
    weighted = logs if weight is None else logs * weight.reshape([-1 if d == classes else 1 for d in range(x.ndim)])
    spread = resolve_partial(-weighted.sum(classes), "cross_entropy") * (target != ignore_index)
    if reduction != NONE:
        spread = spread.sum()
    share = smoothing / count if count else math.inf  # torch, too, divides by no classes
    mixed = (1 - smoothing) * resolve_partial(loss, "cross_entropy") + share * resolve_partial(spread, "cross_entropy")
    return mixed / resolve_partial(total, "cross_entropy") if reduction == MEAN else mixed
