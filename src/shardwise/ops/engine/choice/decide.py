"""What is decided for an operator call: in which layouts its tensors are wanted, and by which strategies it runs.

1. Ask the operator's rule. It returns steps, or strategies, of which one is chosen for each mesh axis.
2. Work out the layouts in which the inputs are wanted, and which replicated inputs vary.

A choice that moves nothing moves nothing at any length of the dims. So it is shared between shapes, if the rule asks
about lengths only whether they are equal, 0 or 1 (`ignores_lengths`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._log import package_logger
from shardwise._torch import no_dispatch_modes
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Partial, Replicate, Shard, format_placement
from shardwise.ops.engine.choice.choose import (
    Choice,
    Operand,
    choose_strategies,
    cut_lengths_differ,
    drop_lengths,
    input_placements,
    leading_cuts,
    split_order,
)
from shardwise.ops.engine.choice.placement_cost import mesh_spec, mesh_view
from shardwise.ops.engine.fallbacks import find_writing_fallback
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta, ask_rule, find_rule, rule_ignores_lengths
from shardwise.ops.engine.schema import OperatorCall, Slot, is_pointwise, is_pure, written_slots
from shardwise.ops.engine.summed import is_summed
from shardwise.ops.rules.pointwise import pointwise_rule
from shardwise.tensor import caches
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.inplace import gives_views
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor

_log = package_logger(__name__)


@dataclass(slots=True)
class Decision:
    """What was decided for a call: wanted layouts, varying axes, strategies; output layouts once they are known.

    `homes`: along an axis, the strategy to whose results the pending ones are brought, and how that cuts its dim.
    """

    inputs: tuple[Layout, ...]
    vary: tuple[tuple[int, ...], ...]
    chosen: tuple[Strategy, ...]
    cuts: tuple[tuple[Shard, int] | None, ...]
    order: tuple[str, ...]
    mesh: Mesh
    local: Callable[..., Any] | None
    finish: Callable[[Any], Any] | None
    homes: tuple[tuple[Strategy, tuple[Shard, int] | None] | None, ...] = ()
    outputs: tuple[Layout | None, ...] | None = None


def first_positions(tensors: Sequence[ShardedTensor]) -> tuple[int, ...] | None:
    """For each tensor its first place in the call; None where no tensor appears twice."""
    if len(tensors) == 1:
        return None
    numbers = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    return None if len(numbers) == len(tensors) else tuple(numbers[id(t)] for t in tensors)


def decide(call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: Sequence[bool]) -> Decision | Steps:
    """What a call does; `recorded` says which tensors are differentiated."""
    specs = [view for t in tensors if (view := mesh_view(t.sharding)) is not None]
    mesh = _common_mesh(call, tensors, specs)
    operands = _make_operands(call, tensors, specs)
    choice = _choose(call, tensors, recorded, specs, operands, mesh)
    if isinstance(choice, Steps):
        return choice
    chosen = choice.strategies
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
            if (way := find_writing_fallback(call.op)) is not None:
                return way
            raise UnsupportedOpError(
                f"{_describe_call(call, tensors)}: the tensor that is written to cannot be moved; redistribute "
                "the others"
            )
    _log.debug("%s: %s of %s", call.op, chosen, wanted)
    vary = tuple(_find_varying_axes(i, chosen, mesh) for i in range(len(tensors)))
    local, finish = _find_local(chosen, wanted), next((s.finish for s in chosen if s.finish is not None), None)
    return Decision(wanted, vary, chosen, tuple(cuts), order, mesh, local, finish, _find_homes(choice, operands))


def _find_homes(
    choice: Choice, operands: Sequence[Operand]
) -> tuple[tuple[Strategy, tuple[Shard, int] | None] | None, ...]:
    if not any(choice.homes):
        return ()
    kept = [home or strategy for home, strategy in zip(choice.homes, choice.strategies, strict=True)]
    cuts = leading_cuts(kept, operands)
    return tuple(None if home is None else (home, cut) for home, cut in zip(choice.homes, cuts, strict=True))


_MAX_CHOICES = 16384
_choices: dict[Hashable, Choice] = caches.clear_on_change({})


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
    strategies = _ask_for_strategies(call, tensors, recorded, specs)
    if isinstance(strategies, Steps):
        return strategies
    chosen = choose_strategies(strategies, operands, mesh, lambda: _find_result_sizes(call, tensors))
    if chosen is None:
        if (way := find_writing_fallback(call.op)) is not None:
            return way
        raise UnsupportedOpError(
            f"{_describe_call(call, tensors)}: no strategy of its rule fits. {_describe_accepted(strategies, operands)}"
        )
    if key is not None and chosen.is_free:
        if len(_choices) >= _MAX_CHOICES:
            _choices.clear()
        _choices[key] = chosen
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
    return call.key, tuple(specs), dtypes, tuple(recorded), lengths, first_positions(tensors)


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
    return own if own == wanted and isinstance(own.spec, MeshSpec) and own.spec.mesh == operand.spec.mesh else wanted


def _check_shapes(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> None:
    """Let the operator itself refuse shapes that do not fit: local parts of them might fit by chance."""
    with contextlib.suppress(NotImplementedError):
        _compute_shapes(call, tensors)


def _find_result_sizes(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> list[int]:
    """The bytes of each result; those of the largest tensor where the operator does not compute shapes alone."""
    try:
        made = _compute_shapes(call, tensors)
    except Exception:  # an estimate: what is wrong with a call is found where it is made
        return [max(t.numel() * t.dtype.itemsize for t in tensors)]
    results = made if isinstance(made, list | tuple) else [made]
    return [t.numel() * t.dtype.itemsize if isinstance(t, torch.Tensor) else 0 for t in results]


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
    written = written_indices(call)
    first = first_positions(tensors) or range(len(tensors))
    sums = not gives_views(call.op)  # a view is one of the tensor itself, not of its sum
    return [
        Operand(s, t.sharding.shape, t.sharding.numel * t.dtype.itemsize, i in written, first[i], sums and is_summed(t))
        for i, (t, s) in enumerate(zip(tensors, specs, strict=True))
    ]


def written_indices(call: OperatorCall) -> set[int]:
    """The numbers of the tensors that the operator writes to."""
    names = written_slots(call.op)
    if not names:
        return set()
    schema = call.op._schema  # type: ignore[attr-defined]  # operators have one
    by_name = dict(zip([a.name for a in schema.arguments], call.args, strict=False)) | dict(call.kwargs)
    found: set[int] = set()
    for name in names:
        value = by_name.get(name)
        found |= {v.index for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Slot)}
    return found


def _ask_for_strategies(
    call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: Sequence[bool], specs: Sequence[MeshSpec]
) -> list[Strategy] | Steps:
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
    empty = any(0 in p for w in wanted for rank in w.ranks for p in w.local_shapes(rank))
    return if_empty if empty else None


def _find_varying_axes(index: int, chosen: Sequence[Strategy], mesh: Mesh) -> tuple[int, ...]:
    """The axes of several ranks along which this tensor is replicated while something else is not."""
    axes = []
    for axis, strategy in enumerate(chosen):
        differs = any(isinstance(p, Shard | Partial) for p in (*strategy.inputs, *strategy.outputs))
        if isinstance(strategy.inputs[index], Replicate) and differs and mesh.shape[axis] > 1:
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
