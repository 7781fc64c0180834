"""Which strategy on which axis? The cheapest by bytes moved; ties go to the one listed first.

Axes are decided one after the other, each by the sum of what its inputs' changes of placement cost. All ranks decide
from layouts alone, so they decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry import Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.engine.choice.placement_cost import change_cost, same_kind
from shardwise.ops.engine.registry import Strategy


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a call, seen on the call's mesh; `first` is where the call has the same tensor for the first time."""

    spec: MeshSpec
    shape: tuple[int, ...]
    nbytes: int
    written: bool
    first: int


def choose_strategies(strategies: Sequence[Strategy], operands: Sequence[Operand], mesh: Mesh) -> list[Strategy] | None:
    """One strategy for each axis, or None if an axis has no possible one.

    What a change along one axis moves depends on what the others do to the tensor: those before it are decided.
    """
    chosen: list[Strategy] = []
    placed = [list(operand.spec.placements) for operand in operands]
    for axis in range(mesh.ndim):
        sizes = [_bytes_along(o, p, axis) for o, p in zip(operands, placed, strict=True)]
        best: tuple[float, Strategy] | None = None
        for strategy in strategies:
            cost = _strategy_cost(strategy, operands, sizes, axis, mesh.shape[axis])
            if cost is not None and (best is None or cost < best[0]):
                best = (cost, strategy)
        if best is None:
            return None
        chosen.append(best[1])
        for own, then in zip(placed, best[1].inputs, strict=True):
            own[axis] = then or Replicate()
    return chosen


def is_free(chosen: Sequence[Strategy], operands: Sequence[Operand], mesh: Mesh) -> bool:
    """Whether nothing is changed for the strategies chosen: every other one costs something, at all lengths."""
    sizes = [float(operand.nbytes) for operand in operands]
    return all(_strategy_cost(s, operands, sizes, axis, mesh.shape[axis]) == 0.0 for axis, s in enumerate(chosen))


def _strategy_cost(
    strategy: Strategy, operands: Sequence[Operand], sizes: Sequence[float], axis: int, ranks: int
) -> float | None:
    """What the inputs' changes cost; a tensor that appears twice and is needed alike moves once."""
    if strategy.axes is not None and axis not in strategy.axes:
        return None
    total = 0.0
    paid = set()
    for operand, size, then in zip(operands, sizes, strategy.inputs, strict=True):
        now = operand.spec.placements[axis]
        if then is None or (isinstance(then, Shard) and not 0 <= then.dim < len(operand.shape)):
            return None
        if operand.written and not _keeps_placement(now, then):
            return None
        if (operand.first, then) not in paid:
            paid.add((operand.first, then))
            total += change_cost(now, then, size, ranks)
            if strategy.result_bytes and isinstance(now, Shard) and isinstance(then, Replicate):
                total += _price_result(strategy, size / max(1, operand.nbytes), ranks)
            elif _gives_up_shards(strategy, now, then):
                total += change_cost(Partial("sum"), Replicate(), size, ranks)
    return total


def _gives_up_shards(strategy: Strategy, now: Placement, then: Placement) -> bool:
    """Whether a tensor is split along another dim for a sum that is left pending, as rows of a batch along columns.

    That moves little by itself, but every rank then has an addend of the whole result, which has to be summed: it
    counts as if the tensor were.
    """
    moved = isinstance(now, Shard) and isinstance(then, Shard) and now.dim != then.dim
    return moved and any(isinstance(p, Partial) for p in strategy.outputs)


def _price_result(strategy: Strategy, share: float, ranks: int) -> float:
    """What a large result costs that is no longer sharded as an input was, which is gathered for it.

    To gather the numbers of tokens is cheap, but then every rank computes with the rows of all of them, or of parts of
    all, and the operators that follow move them. So the result counts as if it were summed.
    """
    return 2 * strategy.result_bytes * share * (ranks - 1) / ranks


def _bytes_along(operand: Operand, placed: Sequence[Placement], axis: int) -> float:
    """The bytes that a group of ranks along an axis has together: other axes may split the tensor.

    So a weight is weighed against the rows of one data-parallel group, and not against the batch of all groups.
    """
    sizes = zip(placed, operand.spec.mesh.shape, strict=True)
    return operand.nbytes / math.prod(n for i, (p, n) in enumerate(sizes) if i != axis and isinstance(p, Shard))


def _keeps_placement(now: Placement, then: Placement) -> bool:
    return same_kind(now, then)


def cut_lengths_differ(chosen: Sequence[Strategy], operands: Sequence[Operand]) -> bool:
    """Whether an axis cuts dims of different lengths: for some operators a sign of shapes that do not fit."""
    for strategy in chosen:
        lengths = {
            operand.shape[p.dim] for operand, p in zip(operands, strategy.inputs, strict=True) if isinstance(p, Shard)
        }
        if len(lengths) > 1:
            return True
    return False


def leading_cuts(chosen: Sequence[Strategy], operands: Sequence[Operand]) -> list[tuple[Shard, int] | None]:
    """For each axis how its dim is cut and the length of that dim.

    It is cut as in the largest tensor that is cut there already; where none is, as `torch.chunk` cuts.
    """
    found: list[tuple[Shard, int] | None] = []
    for axis, strategy in enumerate(chosen):
        best: tuple[int, Shard, int] | None = None
        for operand, then in zip(operands, strategy.inputs, strict=True):
            now = operand.spec.placements[axis]
            if not isinstance(then, Shard):
                continue
            cut_already = isinstance(now, Shard) and now.dim == then.dim
            weight = operand.nbytes + (1 << 61 if cut_already else 0) + (1 << 62 if operand.written else 0)
            if best is None or weight > best[0]:
                best = (weight, now if isinstance(now, Shard) and cut_already else then, operand.shape[then.dim])
        found.append(None if best is None else (best[1], best[2]))
    return found


def drop_lengths(cuts: Sequence[tuple[Shard, int] | None]) -> list[tuple[Shard, int] | None]:
    """The same dims, cut as `torch.chunk` cuts.

    >>> drop_lengths([(Shard(1, sizes=(5, 1)), 6), None])
    [(Shard(1), 6), None]
    """
    return [None if lead is None else (Shard(lead[0].dim), lead[1]) for lead in cuts]


def cut_like(placement: Placement | None, lead: tuple[Shard, int] | None, shape: Sequence[int]) -> Placement | None:
    """A Shard cut as the lead is, if its dim has the lead's length; anything else as it is."""
    if not isinstance(placement, Shard) or not placement.is_plain or lead is None:
        return placement
    cut, length = lead
    if not 0 <= placement.dim < len(shape) or shape[placement.dim] != length:
        return placement
    return cut.along(placement.dim)


def split_order(operands: Sequence[Operand], mesh: Mesh) -> tuple[str, ...]:
    """The order in which axes split a dim: that of the largest tensor with an order of its own."""
    own = [o for o in operands if not o.spec.splits_in_mesh_order]
    return max(own, key=lambda o: o.nbytes).spec.order if own else mesh.axes


def input_placements(
    operand: Operand, index: int, chosen: Sequence[Strategy], cuts: Sequence[tuple[Shard, int] | None]
) -> tuple[Placement, ...]:
    """The placements in which the strategies want one tensor."""
    placements = [cut_like(s.inputs[index], cut, operand.shape) for s, cut in zip(chosen, cuts, strict=True)]
    wanted = tuple(p for p in placements if p is not None)
    assert len(wanted) == len(placements)
    return wanted
