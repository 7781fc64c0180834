"""Which strategy on which axis? Layouts say where a result is, bytes say how it gets there.

1. Along an axis where a strategy takes every tensor as it is, that one is taken: the layouts say what the user wants.
2. Elsewhere a strategy's price is what a rank receives because of it in a training step, of which half is counted, the
   way there or the way back of the gradients: for each input that changes (`change_cost`), and for each result until it
   is where it belongs (`result_cost`). A result that is left pending has to be summed; one that is split otherwise than
   the inputs were has to be split again. The rank with the largest part counts: a dim that is shorter than the axis
   leaves ranks idle, and the others receive more.
3. What a change along one axis moves depends on what the others do to the tensor. So the axes are decided one after
   the other until nothing changes any more: their order in the mesh does not count.
4. Rows that are split stay split: a pending result for which an input was taken apart is brought to where the result
   of the strategy that keeps this input is, its target.
5. What is pinned along an axis is not moved along it, whatever the bytes say: parameters of plans with `activations`.
   By bytes alone a weight is gathered as soon as there are more tokens than rows. Where no strategy is left without
   moving it, bytes decide, with a warning.

All ranks decide from layouts alone, so they decide the same. Ties go to the strategy listed first.

What is decided for an operator call: in which layouts its tensors are wanted, and by which strategies it runs.

1. Ask the operator's rule. It returns steps, or strategies, of which one is chosen for each mesh axis.
2. Work out the layouts in which the inputs are wanted, and which replicated inputs vary.

A choice that moves nothing moves nothing at any length of the dims. So it is shared between shapes, if the rule asks
about lengths only whether they are equal, 0 or 1 (`ignores_lengths`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from shardwise._cache import Cache
from shardwise._text import package_logger
from shardwise._torch import is_any_autocast_enabled, no_dispatch_modes, track_views
from shardwise.geometry import (
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    format_placement,
)
from shardwise.ops.rule import (
    OperatorCall,
    Steps,
    Strategy,
    TensorMeta,
    ask_rule,
    find_rule,
    is_pointwise,
    is_pure,
    rule_ignores_lengths,
)
from shardwise.ops.rules.pointwise import pointwise_rule
from shardwise.ops.unshard import is_summed
from shardwise.ops.views import LocalView, mesh_spec, mesh_view
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.writes import gives_views

preferred_strategy: ContextVar[str | None] = ContextVar("shardwise_preferred_strategy", default=None)
active_preferences = [0]  # of all threads; at 0 nobody asks for the variable


class prefer_strategies:  # used in `with`
    """Choose strategies of this name wherever an operator has them, whatever they cost; None: by cost.

    No generator, as one that a traced module leaves open would be closed later, in the context of something else.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = preferred_strategy.set(self._name)
        active_preferences[0] += 1

    def __exit__(self, *error: object) -> None:
        active_preferences[0] -= 1
        preferred_strategy.reset(self._token)


def same_kind(one: Placement, other: Placement) -> bool:
    """Whether two placements agree up to how a Shard is cut."""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim == other.dim
    return one == other


def change_cost(now: Placement, then: Placement, nbytes: float, ranks: int) -> float:
    """The bytes that a rank receives when one axis of `ranks` ranks changes what it does to a tensor of `nbytes` bytes.

    One direction is counted, and the gradients take as much on their way back: what is gathered forward is summed and
    scattered backward. A sum takes both at once, wherever it goes: what is saved by scattering it is paid when the
    gradients are gathered. A change that moves nothing costs a fraction of a byte, so of two free strategies the one
    without changes wins, and a sum stays pending where it may.
    """
    share = nbytes * (ranks - 1) / ranks
    if same_kind(now, then):
        recut = isinstance(then, Shard) and not then.is_plain and then != now  # a plain Shard means: as it is cut
        return 0.5 + share / ranks if recut else 0.0
    if isinstance(now, Partial):
        return share + (1.5 if isinstance(then, Shard) else 1.0)
    if isinstance(then, Partial):
        return 2.0 if isinstance(now, Shard) else 0.5
    if isinstance(now, Replicate):
        return 0.25
    return 0.5 + (share if isinstance(then, Replicate) else share / ranks)


def largest_share(placement: Placement | None, shape: Sequence[int], ranks: int) -> float:
    """How much larger the largest part of a tensor is than an equal part for each of `ranks` ranks.

    >>> largest_share(Shard(0), (1, 8), 4), largest_share(Shard(1), (1, 8), 4), largest_share(Replicate(), (1, 8), 4)
    (4.0, 1.0, 1.0)
    """
    if not isinstance(placement, Shard) or not 0 <= placement.dim < len(shape) or shape[placement.dim] == 0:
        return 1.0
    length = shape[placement.dim]
    return ranks * max(placement.sizes or (-(-length // ranks),)) / length


def result_cost(
    result: Placement | None, kept: Sequence[Placement | None], split: bool, nbytes: float, ranks: int
) -> float:
    """The bytes that a rank receives until a result of `nbytes` bytes is where it belongs, counted as by `change_cost`.

    `kept` are the splits of results for which an input stays as it is split; `split`: an input is split.
    A pending result is summed. One that every rank has, though the inputs were split, counts as much: all that follows
    is computed by every rank.
    """
    share = nbytes * (ranks - 1) / ranks
    if isinstance(result, Partial):
        return share
    if not split or result is None or any(p is not None and same_kind(result, p) for p in kept):
        return 0.0
    return share / ranks if kept and isinstance(result, Shard) else share


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a call, seen on the call's mesh; `first` is where the call has the same tensor for the first time.

    `summed`: it is pending, and its sum was made before. `pinned`: the axes along which it is not moved.
    """

    spec: MeshSpec
    shape: tuple[int, ...]
    nbytes: int
    written: bool
    first: int
    summed: bool = False
    pinned: frozenset[int] = frozenset()

    def price_change(self, axis: int, then: Placement, nbytes: float) -> float:
        """What it costs to have the tensor in another placement along an axis."""
        now = self.spec.placements[axis]
        if axis in self.pinned and not same_kind(now, then):
            return math.inf
        if self.summed and isinstance(now, Partial) and not isinstance(then, Partial):
            now = Replicate()
        ranks = self.spec.mesh.shape[axis]
        if isinstance(now, Shard) and now.each is not None and now.is_on_all(ranks) and not same_kind(now, then):
            now = Replicate()
        return change_cost(now, then, nbytes, ranks)


ResultSize: TypeAlias = tuple[tuple[int, ...], int]
"""The shape and the bytes of a result."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy for each axis.

    `result_targets`: along an axis, the strategy to whose result the pending one is moved.
    `is_free`: nothing changes and nothing is pending, so the same would be chosen at all lengths.
    `moves_pinned`: a tensor that is pinned has to be moved.
    """

    strategies: tuple[Strategy, ...]
    result_targets: tuple[Strategy | None, ...]
    is_free: bool = False
    moves_pinned: bool = False


def choose_strategies(
    strategies: Sequence[Strategy],
    operands: Sequence[Operand],
    mesh: Mesh,
    find_results: Callable[[], Sequence[ResultSize]],
) -> Choice | None:
    """One strategy for each axis, or None if an axis has no possible one; results are measured where that counts."""
    free = [_find_free_strategy(strategies, operands, axis) for axis in range(mesh.ndim)]
    taken = [s for s in free if s is not None]
    if len(taken) == mesh.ndim:
        return Choice(tuple(taken), (None,) * mesh.ndim, is_free=True)
    results = () if any(o.written for o in operands) else find_results()  # what is written to stays where it is
    prices = _AxisPrices(strategies, operands, mesh, results, list(free))
    undecided = [axis for axis, strategy in enumerate(free) if strategy is None]
    for _ in range(len(undecided) + 1):
        before = list(prices.chosen)
        for axis in undecided:
            prices.chosen[axis] = prices.find_cheapest(axis)
        if prices.chosen == before or len(undecided) == 1:
            break
    if any(prices.moves_pinned(axis) for axis in undecided):
        loose = choose_strategies(strategies, [replace(o, pinned=frozenset()) for o in operands], mesh, lambda: results)
        return None if loose is None else replace(loose, moves_pinned=True)
    chosen = [s for s in prices.chosen if s is not None]
    if len(chosen) < mesh.ndim:
        return None
    result_targets = tuple(None if free[a] else prices.find_result_target(a, s) for a, s in enumerate(chosen))
    return Choice(tuple(chosen), result_targets)


def _find_free_strategy(strategies: Sequence[Strategy], operands: Sequence[Operand], axis: int) -> Strategy | None:
    """The strategy that takes all tensors as they are, if none of them is pending."""
    now = [o.spec.placements[axis] for o in operands]
    if any(isinstance(p, Partial) for p in now):
        return None
    copied = False
    for placement in now:  # no call for each: this is asked of every operator
        copied = copied or (placement.__class__ is Shard and placement.each is not None)
    for strategy in strategies:
        costs = (
            o.price_change(axis, then, 0) if then is not None and _is_possible(o, p, then) else 1
            for o, p, then in zip(operands, now, strategy.inputs, strict=True)
        )
        if copied and not _keeps_copies(strategy):
            continue
        if _is_for(strategy, axis) and strategy.cost is None and not any(costs):
            return strategy
    return None


def _keeps_copies(strategy: Strategy) -> bool:
    """Whether ranks that have the same parts get the same results: what they leave pending would count twice."""
    return all(isinstance(p, Shard) for p in strategy.outputs)


def _is_for(strategy: Strategy, axis: int) -> bool:
    return strategy.axes is None or axis in strategy.axes


def _is_possible(operand: Operand, now: Placement, then: Placement | None) -> bool:
    """Whether a tensor has such a dim; what is written to is not moved."""
    if then is None or (isinstance(then, Shard) and not 0 <= then.dim < len(operand.shape)):
        return False
    return not operand.written or same_kind(now, then)


@dataclass
class _AxisPrices:
    """What strategies cost along one axis, where those in `chosen` are taken along the others."""

    strategies: Sequence[Strategy]
    operands: Sequence[Operand]
    mesh: Mesh
    results: Sequence[ResultSize]
    chosen: list[Strategy | None]

    def find_cheapest(self, axis: int) -> Strategy | None:
        prices = ((self._price(s, axis), i) for i, s in enumerate(self.strategies) if _is_for(s, axis))
        possible = [(price, i) for price, i in prices if price is not None]
        name = preferred_strategy.get() if active_preferences[0] else None
        if name is not None:
            possible = [(price, i) for price, i in possible if self.strategies[i].name == name] or possible
        return self.strategies[min(possible)[1]] if possible else None

    def moves_pinned(self, axis: int) -> bool:
        """Whether the strategy that was chosen along an axis moves a tensor that is pinned along it."""
        strategy = self.chosen[axis]
        return strategy is not None and any(
            then is not None and axis in o.pinned and not same_kind(o.spec.placements[axis], then)
            for o, then in zip(self.operands, strategy.inputs, strict=True)
        )

    def find_result_target(self, axis: int, strategy: Strategy) -> Strategy | None:
        """The strategy whose results are where this one's pending results are brought; None: they stay pending."""
        pending = any(isinstance(p, Partial) for p in strategy.outputs)
        result_targets = self._result_targets(axis) if pending and strategy.finish is None and self.results else []
        return result_targets[0] if result_targets else None

    def _price(self, strategy: Strategy, axis: int) -> float | None:
        """What its inputs and results cost; a tensor that appears twice and is needed alike moves once."""
        total, ranks = 0.0, self.mesh.shape[axis]
        paid = set()
        for index, (operand, then) in enumerate(zip(self.operands, strategy.inputs, strict=True)):
            now = operand.spec.placements[axis]
            if then is None or not _is_possible(operand, now, then):
                return None
            if (operand.first, then) not in paid:
                paid.add((operand.first, then))
                nbytes = self._input_bytes(index, axis) * largest_share(then, operand.shape, ranks)
                total += operand.price_change(axis, then, nbytes)
        if strategy.cost is not None:
            total += strategy.cost(axis) / self._result_parts(0, axis)
        result_targets = self._result_targets(axis)
        split = any(isinstance(o.spec.placements[axis], Shard) for o in self.operands)
        for number, (shape, size) in enumerate(self.results):
            kept_splits, made = [_output(target, number) for target in result_targets], _output(strategy, number)
            along = size / self._result_parts(number, axis) * largest_share(made, shape, ranks)
            total += result_cost(made, kept_splits, split, along, ranks)
        return total

    def _result_targets(self, axis: int) -> list[Strategy]:
        """The strategies that keep a split tensor as it is and split their results: along the same dim, if there are
        such, as the rows of a batch; else along any."""
        found, along_same = [], []
        for strategy in self.strategies if self.mesh.shape[axis] > 1 else ():
            out = _output(strategy, 0)
            if not isinstance(out, Shard) or not _is_for(strategy, axis):
                continue
            kept = [
                o.spec.placements[axis]
                for o, then in zip(self.operands, strategy.inputs, strict=True)
                if then is not None and isinstance(then, Shard) and same_kind(o.spec.placements[axis], then)
            ]
            if kept:
                found.append(strategy)
            if any(same_kind(p, Shard(out.dim)) for p in kept):
                along_same.append(strategy)
        return along_same or found

    def _input_bytes(self, index: int, axis: int) -> float:
        """The bytes that a group of ranks along an axis has together of a tensor: other axes may split it.

        So a weight is weighed against the rows of one data-parallel group, and not against the batch of all groups.
        """
        operand = self.operands[index]
        others = [
            operand.spec.placements[a] if s is None else s.inputs[index] for a, s in enumerate(self.chosen) if a != axis
        ]
        return operand.nbytes / self._parts(others, axis)

    def _result_parts(self, number: int, axis: int) -> int:
        """How often the other axes split a result; along one that is not decided, as they split an input."""
        others: list[Placement | None] = []
        for other, strategy in enumerate(self.chosen):
            if other != axis:
                now = [o.spec.placements[other] for o in self.operands]
                split = next((p for p in now if isinstance(p, Shard)), None)
                others.append(split if strategy is None else _output(strategy, number))
        return self._parts(others, axis)

    def _parts(self, others: Sequence[Placement | None], axis: int) -> int:
        counts = [n for a, n in enumerate(self.mesh.shape) if a != axis]
        return math.prod(n for p, n in zip(others, counts, strict=True) if isinstance(p, Shard))


def _output(strategy: Strategy, number: int) -> Placement | None:
    return strategy.outputs[min(number, len(strategy.outputs) - 1)] if strategy.outputs else None


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

    It is cut as in the largest tensor that is cut there already, one that is pinned before others, and one without
    copies before one that has them; where none is, as `torch.chunk` cuts.
    """
    found: list[tuple[Shard, int] | None] = []
    for axis, strategy in enumerate(chosen):
        best: tuple[int, Shard, int] | None = None
        for operand, then in zip(operands, strategy.inputs, strict=True):
            now = operand.spec.placements[axis]
            if not isinstance(then, Shard):
                continue
            cut = now if isinstance(now, Shard) and now.dim == then.dim else None
            kept = cut
            if cut is not None and cut.each is not None and not _keeps_copies(strategy):
                kept = cut.without_copies()
            weight = operand.nbytes + (1 << 62 if operand.written else 0)
            if cut is not None:
                weight += (1 << 60 if cut.each is None else 1 << 59) + (1 << 61 if axis in operand.pinned else 0)
            if best is None or weight > best[0]:
                best = (weight, kept or then, operand.shape[then.dim])
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


_log = package_logger(__name__)


class WrittenMoveError(UnsupportedOpError):
    """What a call writes to would have to be moved, or no strategy fits: the engine computes it without writing."""


@dataclass(slots=True)
class Decision:
    """What was decided for a call: wanted layouts, varying axes, strategies; output layouts once they are known.

    `result_targets`: along an axis, the strategy to whose results pending ones are moved, and how that cuts its dim.
    `name`: those of the strategies that have one.
    """

    inputs: tuple[Layout, ...]
    vary: tuple[tuple[int, ...], ...]
    chosen: tuple[Strategy, ...]
    cuts: tuple[tuple[Shard, int] | None, ...]
    order: tuple[str, ...]
    mesh: Mesh
    local: Callable[..., Any] | None
    finish: Callable[[Any], Any] | None
    result_targets: tuple[tuple[Strategy, tuple[Shard, int] | None] | None, ...] = ()
    outputs: tuple[Layout | None, ...] | None = None
    name: str = ""


def first_positions(tensors: Sequence[ShardedTensor]) -> tuple[int, ...] | None:
    """For each tensor its first place in the call; None where no tensor appears twice."""
    if len(tensors) == 1:
        return None
    numbers = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    return None if len(numbers) == len(tensors) else tuple([numbers[id(t)] for t in tensors])


def decide(call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: Sequence[bool]) -> Decision | Steps:
    """What a call does; `recorded` says which tensors are differentiated."""
    specs = [view for t in tensors if (view := mesh_view(t.sharding)) is not None]
    mesh = _common_mesh(call, tensors, specs)
    operands = _make_operands(call, tensors, specs)
    choice = _choose(call, tensors, recorded, specs, operands, mesh)
    if isinstance(choice, Steps):
        return choice
    chosen = choice.strategies
    if choice.moves_pinned:
        warnings.warn(
            f"{_describe_call(call, tensors)}: the plan's `activations` keep a parameter where it is, and no strategy "
            "of this operator does, so it is moved at each call; leave the axis out of the parameter's pattern, or "
            "out of `activations`",
            stacklevel=2,
        )
    if cut_lengths_differ(chosen, operands):
        _check_shapes(call, tensors)
    cuts, order = leading_cuts(chosen, operands), split_order(operands, mesh)
    try:
        wanted = _wanted_layouts(tensors, operands, chosen, cuts, order)
    except LayoutError:  # lengths that fit a whole dim, where another axis cuts it first
        cuts = drop_lengths(cuts)
        wanted = _wanted_layouts(tensors, operands, chosen, cuts, order)
    for tensor, layout, operand in zip(tensors, wanted, operands, strict=True):
        if operand.written and tensor.sharding != layout:
            raise WrittenMoveError(
                f"{_describe_call(call, tensors)}: the tensor that is written to cannot be moved; redistribute "
                "the others"
            )
    _log.debug("%s: %s of %s", call.op, chosen, wanted)
    vary = tuple(_find_varying_axes(layout, chosen, mesh) for layout in wanted)
    local, finish = _find_local(chosen, wanted), next((s.finish for s in chosen if s.finish is not None), None)
    if gives_views(call.op) and any(recorded) and _some_rank_has_nothing(wanted):
        local = partial(_make_tracked_view, call.op, local)
    targets, name = _find_result_targets(choice, operands), ""
    for strategy in chosen:
        if strategy.name and strategy.name not in name:
            name += f", {strategy.name}" if name else strategy.name
    return Decision(wanted, vary, chosen, tuple(cuts), order, mesh, local, finish, targets, None, name)


def _find_result_targets(
    choice: Choice, operands: Sequence[Operand]
) -> tuple[tuple[Strategy, tuple[Shard, int] | None] | None, ...]:
    if not any(choice.result_targets):
        return ()
    kept = [target or strategy for target, strategy in zip(choice.result_targets, choice.strategies, strict=True)]
    cuts = leading_cuts(kept, operands)
    return tuple(
        None if target is None else (target, cut) for target, cut in zip(choice.result_targets, cuts, strict=True)
    )


_choices: Cache[Hashable, Choice] = Cache(16384, on_change=True)


def _choose(
    call: OperatorCall,
    tensors: Sequence[ShardedTensor],
    recorded: Sequence[bool],
    specs: Sequence[MeshSpec],
    operands: Sequence[Operand],
    mesh: Mesh,
) -> Choice | Steps:
    """The strategies of a call, one for each axis, or the steps by which it is computed."""
    key = _choice_key(call, tensors, recorded, specs)
    known = None if key is None else _choices.get(key)
    if known is not None:
        return known
    strategies = ask_for_strategies(call, tensors, recorded, specs)
    if isinstance(strategies, Steps):
        return strategies
    chosen = choose_strategies(strategies, operands, mesh, lambda: _find_results(call, tensors))
    if chosen is None:
        raise WrittenMoveError(
            f"{_describe_call(call, tensors)}: no strategy of its rule fits. {_describe_accepted(strategies, operands)}"
        )
    if key is not None and chosen.is_free:
        _choices.put(key, chosen)
    return chosen


def _choice_key(
    call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: Sequence[bool], specs: Sequence[MeshSpec]
) -> Hashable:
    """All that a choice depends on apart from lengths, of which only those count that are equal, 0 or 1.

    None where the rule asks for more, or a layout depends on data.
    """
    rule = find_rule(call.op)
    shared = is_pointwise(call.op) if rule is None else rule_ignores_lengths(rule)
    if not shared or any(t.sharding.depends_on_data for t in tensors):
        return None
    names = {0: 0, 1: 1}
    lengths = tuple(tuple(names.setdefault(n, len(names)) for n in t.sharding.shape) for t in tensors)
    dtypes = tuple(t.dtype for t in tensors)
    return call.key, tuple(specs), dtypes, tuple(recorded), lengths, first_positions(tensors), is_any_autocast_enabled()


def _wanted_layouts(
    tensors: Sequence[ShardedTensor],
    operands: Sequence[Operand],
    chosen: Sequence[Strategy],
    cuts: Sequence[tuple[Shard, int] | None],
    order: tuple[str, ...],
) -> tuple[Layout, ...]:
    return tuple(
        _wanted_layout(t, i, o, chosen, cuts, order) for i, (t, o) in enumerate(zip(tensors, operands, strict=True))
    )


def _wanted_layout(
    tensor: ShardedTensor,
    index: int,
    operand: Operand,
    chosen: Sequence[Strategy],
    cuts: Sequence[tuple[Shard, int] | None],
    order: tuple[str, ...],
) -> Layout:
    """The wanted layout; the tensor's own object where it means the same on the same mesh."""
    own = tensor.sharding
    placements = input_placements(operand, index, chosen, cuts)
    if own.spec is operand.spec and placements == operand.spec.placements and order == operand.spec.order:
        return own
    wanted = mesh_spec(operand.spec.mesh, placements, order).layout(operand.shape)
    same = own == wanted if operand.written else own.is_used_as(wanted)
    return own if same and isinstance(own.spec, MeshSpec) and own.spec.mesh == operand.spec.mesh else wanted


def _check_shapes(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> None:
    """Let the operator itself refuse shapes that do not fit: local parts of them might fit by chance."""
    with contextlib.suppress(NotImplementedError):
        _compute_shapes(call, tensors)


def _find_results(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> list[ResultSize]:
    """The size of each result; that of the largest tensor where the operator does not compute shapes alone."""
    try:
        made = _compute_shapes(call, tensors)
    except Exception:  # an estimate: what is wrong with a call is found where it is made
        return [max(((tuple(t.shape), t.nbytes) for t in tensors), key=lambda size: size[1])]
    results = made if isinstance(made, list | tuple) else [made]
    return [(tuple(t.shape), t.nbytes) if isinstance(t, torch.Tensor) else ((), 0) for t in results]


def _compute_shapes(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> Any:
    with torch.no_grad(), no_dispatch_modes():
        values = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
        args, kwargs = call.fill_slots(values)
        return call.op(*args, **kwargs)


def _common_mesh(call: OperatorCall, tensors: Sequence[ShardedTensor], specs: Sequence[MeshSpec]) -> Mesh:
    meshes = {s.mesh for s in specs}
    if len(meshes) > 1:
        raise UnsupportedOpError(
            f"{_describe_call(call, tensors)}: the tensors are on different meshes: "
            f"{', '.join(sorted(map(str, meshes)))}; "
            "redistribute them to one mesh"
        )
    return meshes.pop()


def _make_operands(call: OperatorCall, tensors: Sequence[ShardedTensor], specs: Sequence[MeshSpec]) -> list[Operand]:
    written = call.written
    first = first_positions(tensors) or range(len(tensors))
    sums = not gives_views(call.op)  # a view is one of the tensor itself, not of its sum
    return [
        Operand(
            s,
            t.sharding.shape,
            t.sharding.numel * t.dtype.itemsize,
            i in written,
            first[i],
            sums and is_summed(t),
            frozenset(s.mesh.axes.index(a) for a in t._pinned_axes if a in s.mesh.axes),
        )
        for i, (t, s) in enumerate(zip(tensors, specs, strict=True))
    ]


def ask_for_strategies(
    call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: Sequence[bool], specs: Sequence[MeshSpec]
) -> list[Strategy] | Steps:
    """The answer of a call's rule; an operator of torch's own without one is computed whole on every rank."""
    rule = find_rule(call.op)
    metas = [
        TensorMeta(t.sharding.shape, t.dtype, t.sharding, s.placements, is_recorded)
        for t, s, is_recorded in zip(tensors, specs, recorded, strict=True)
    ]
    if rule is None:
        strategies = pointwise_rule(call.op, metas, (*call.args, *call.kwargs.values()))
        if strategies is None and str(call.op).startswith("c10d."):
            raise UnsupportedOpError(
                f"{_describe_call(call, tensors)}: the collectives of torch.distributed take plain tensors; pass "
                "x.local_tensor(), or move the tensor with x.redistribute(...)"
            )
        if strategies is None and is_pure(call.op):
            _log.info("%s has no rule: it is computed whole on every rank", call.op)
            return [Strategy((Replicate(),), (Replicate(),) * len(metas))]
        if strategies is None:
            raise UnsupportedOpError(
                f"{_describe_call(call, tensors)}: no rule. Write one with @shardwise.register_sharding({call.op}), "
                "find one with shardwise.discover_sharding, or compute on local_tensor()"
            )
        return strategies
    assert not isinstance(rule, Steps)
    return ask_rule(rule, call.fill_slots(metas), (call.args, dict(call.kwargs)), len(tensors))


def _find_local(chosen: Sequence[Strategy], wanted: Sequence[Layout]) -> Callable[..., Any] | None:
    """The function that computes the local results in place of the operator: the same one on every rank."""
    own = next((s.local for s in chosen if s.local is not None), None)
    if_empty = next((s.local_if_empty for s in chosen if s.local_if_empty is not None), None)
    if own is not None or if_empty is None:
        return own
    return if_empty if _some_rank_has_nothing(wanted) else None


def _some_rank_has_nothing(layouts: Sequence[Layout]) -> bool:
    return any(0 in p for layout in layouts for rank in layout.ranks for p in layout.local_shapes(rank))


def _make_tracked_view(op: Any, local: Callable[..., Any] | None, view: LocalView, *args: Any, **kwargs: Any) -> Any:
    """A view that may be written to: what is computed of it then has second gradients where it has no elements, too."""
    with track_views(True):
        return op(*args, **kwargs) if local is None else local(view, *args, **kwargs)


def _find_varying_axes(layout: Layout, chosen: Sequence[Strategy], mesh: Mesh) -> tuple[int, ...]:
    """The axes of several ranks along which a tensor is replicated while something else is not.

    By the layout that it is taken in: one without elements may be split where the strategy says replicated.
    """
    spec = mesh_view(layout)
    assert spec is not None
    axes = []
    for axis, (strategy, placement) in enumerate(zip(chosen, spec.placements, strict=True)):
        differs = any(isinstance(p, Shard | Partial) for p in (*strategy.inputs, *strategy.outputs))
        if isinstance(placement, Replicate) and differs and mesh.shape[axis] > 1:
            axes.append(axis)
    return tuple(axes)


def _describe_accepted(strategies: Sequence[Strategy], operands: Sequence[Operand]) -> str:
    """What to do where no strategy fits."""
    ways = [", ".join("-" if p is None else format_placement(p) for p in s.inputs) for s in strategies]
    fix = "Redistribute the tensors first"
    if any(o.written for o in operands):
        fix += ", or use the operator that does not write to its argument"
    return f"{fix}; on each axis the rule accepts {' | '.join(dict.fromkeys(ways)) or 'nothing'}"


def _describe_call(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> str:
    return f"{call.op} of {', '.join(f'{t.dtype}{format_layout_text(t.sharding)}' for t in tensors)}"
