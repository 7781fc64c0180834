"""How is an operator computed on ShardedTensors?

1. An operator that has steps is computed by them. One without a rule that torch writes as other operators is broken
   down into those.
2. Take the call apart; look up what was decided for the same operator, layouts and other arguments.
3. Nothing known: decide (`decide.py`), from the answer of the operator's rule.
4. Move inputs that have another layout, pass varying ones through `vary`, and call the operator on the local tensors.
5. The outputs' layouts follow from the strategies; the local results are checked against them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, decompose, is_composite
from shardwise.comm import Comm
from shardwise.geometry import Layout, LayoutError, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.engine.choice.choose import cut_like
from shardwise.ops.engine.choice.decide import Decision, decide, first_positions, written_indices
from shardwise.ops.engine.choice.placement_cost import mesh_spec
from shardwise.ops.engine.explain import LogEntry, is_explaining_or_forbidding, layout_brief, record_entry
from shardwise.ops.engine.fallbacks import fall_back, find_fallback, finish_out
from shardwise.ops.engine.gathers.gather_again import copy_mark, free_after_forward
from shardwise.ops.engine.irregular import compute_on_pieces, is_in_pieces, retry_on_mesh
from shardwise.ops.engine.known_calls.recording import is_function_recorded, note_entry, note_operator, note_special
from shardwise.ops.engine.local_view import LocalView
from shardwise.ops.engine.mixed import (
    convert_plain_tensors,
    describe_on_one_mesh,
    is_placeholder,
    needs_one_mesh,
    refuse_lost_gradients,
)
from shardwise.ops.engine.outside import compute_outside, is_outside, refuse_unknown_shapes
from shardwise.ops.engine.registry import Steps, find_rule
from shardwise.ops.engine.schema import (
    OperatorCall,
    has_tag,
    is_pointwise,
    key_without_numbers,
    name_of,
    split_call,
    written_slots,
)
from shardwise.ops.engine.strides import note_strides
from shardwise.ops.engine.summed import is_summed
from shardwise.ops.engine.two_step import redistribute_to
from shardwise.ops.engine.vary import move_input, vary_along
from shardwise.ops.engine.write_back import allow_writes
from shardwise.tensor import caches
from shardwise.tensor.copied_views import CopiedView, followed_writes
from shardwise.tensor.dispatch import UnsupportedOpError, sharded_leaves
from shardwise.tensor.inplace import check_writable, count_write, gives_views, mark_moved_views, note_copies
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.moving.autograd import is_differentiated
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.user_line import user_line

_decisions: dict[Hashable, tuple[Decision | Steps, tuple[Layout, ...]]] = caches.clear_on_change({})
_MAX_DECISIONS = 16384


def call_op(op: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on ShardedTensors."""
    note_entry(op)
    given = list(sharded_leaves(args, kwargs))
    copies = [tensor._copied_from for tensor in given if tensor._copied_from is not None]
    for copy in copies:
        copy.check()
    if written_slots(op):
        result = _compute_and_follow(op, given, args, kwargs, copies)
    else:
        result = _compute(op, given, args, kwargs)
    if gives_views(op):
        note_copies(given, result)
        allow_writes(op, given, args, kwargs, result)
    note_strides(op, given, args, kwargs, result)
    return result


def _compute_and_follow(
    op: Any, given: list[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any], copies: Sequence[CopiedView]
) -> Any:
    """Compute an operator that writes; copies that it wrote to are written to what they were taken from."""
    with followed_writes():
        result = _compute(op, given, args, kwargs)
    written = [kwargs.get(name) for name in written_slots(op)] + list(args[:1])
    for tensor in given:
        if any(tensor is w for w in written):
            count_write(tensor)
    for copy in copies:
        copy.write_back()
    return result


def _compute(op: Any, given: list[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rule = find_rule(op)
    refuse_unknown_shapes(op, given)
    unknown = rule is None and not is_pointwise(op)
    if is_outside(op, given) and not (unknown and is_composite(op)):
        return compute_outside(call_op, op, args, kwargs)
    if isinstance(rule, Steps):
        return _run_own_steps(op, rule, args, kwargs)
    if unknown and is_composite(op):
        return finish_out(op, kwargs, decompose(op, args, kwargs))
    call = split_call(op, args, kwargs)
    written = sorted(written_indices(call))
    refuse_lost_gradients(call, written)
    if any(is_placeholder(call.tensors[i]) for i in written) and (way := find_fallback(op)) is not None:
        return fall_back(op, way, args, kwargs)
    tensors = describe_on_one_mesh(convert_plain_tensors(call), written)
    irregular = any(is_in_pieces(t) for t in tensors)
    if unknown and not irregular and (way := find_fallback(op)) is not None:
        return fall_back(op, way, args, kwargs)
    for index in written:
        check_writable(tensors[index])
    if irregular:
        return compute_on_pieces(call, tensors, written)
    return _run_call(call, tensors)


def _run_own_steps(op: Any, rule: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the steps of an operator; what they refuse of tensors in irregular pieces is done on a mesh."""
    try:
        return _run_steps(rule, *_on_one_mesh(op, args, kwargs))
    except UnsupportedOpError as error:
        return retry_on_mesh(split_call(op, args, kwargs), error)


def _on_one_mesh(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of steps with all tensors on one mesh, where their layouts can be described so."""
    if not needs_one_mesh(sharded_leaves(args, kwargs)):
        return args, kwargs
    call = split_call(op, args, kwargs)
    own = [i for i, t in enumerate(call.tensors) if isinstance(t, ShardedTensor)]
    written = {own.index(i) for i in written_indices(call) if i in own}
    made = describe_on_one_mesh([t for t in call.tensors if isinstance(t, ShardedTensor)], written)
    return call.fill_slots([made[own.index(i)] if i in own else t for i, t in enumerate(call.tensors)])


def _run_steps(steps: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = steps.run(*args, **kwargs)
    if steps.in_place:
        note_operator(plain=True, wanted=[(args[0], args[0].sharding)], written=[args[0]])
    else:
        note_special()
    return result


def _run_call(call: OperatorCall, tensors: Sequence[ShardedTensor]) -> Any:
    """Compute a call by what was decided for it; a call that fails leaves nothing behind."""
    recorded = tuple(map(is_differentiated, tensors))
    pointwise = find_rule(call.op) is None and is_pointwise(call.op)  # numbers of optimizers change at every step
    called = key_without_numbers(call) if pointwise else call.key
    kinds = tuple((id(t.sharding), t.dtype, is_summed(t)) for t in tensors)
    key = (called, kinds, first_positions(tensors), recorded, tensors[0].device)
    known = _decisions.get(key)
    decision = decide(call, tensors, recorded) if known is None else known[0]
    if isinstance(decision, Steps):
        result = _run_steps(decision, *call.fill_slots(tensors))
    else:
        result = _run_decision(call, tensors, tensors[0].comm, decision)
    if known is None and not any(t.sharding.depends_on_data for t in tensors):
        if len(_decisions) > _MAX_DECISIONS:
            _decisions.clear()
        _decisions[key] = decision, tuple(t.sharding for t in tensors)  # keys hold identities: layouts stay alive
    return result


def _run_decision(call: OperatorCall, tensors: Sequence[ShardedTensor], comm: Comm, decision: Decision) -> Any:
    name = name_of(call.op)
    aligned = _align_all(tensors, decision.inputs, name)
    values = [
        vary_along(t, t.sharding, axes) if axes else t.local_parts[0]
        for t, axes in zip(aligned, decision.vary, strict=True)
    ]
    args, kwargs = call.fill_slots(values)
    local, finish = decision.local, decision.finish
    with free_after_forward(aligned):
        if local is None:
            result = call.op(*args, **kwargs)
        else:
            shapes = tuple(tuple(t.shape) for t in tensors)
            result = local(LocalView(comm.rank, decision.inputs, shapes), *args, **kwargs)
    if is_function_recorded():
        _note_run(call, tensors, decision, local is None and finish is None and not decision.homes)
    outputs = _wrap_results(call, tensors, comm, decision, result)
    if decision.homes:
        outputs = _bring_home(outputs, decision, name)
    mark_moved_views(call.op, tensors, aligned, outputs)
    if call.op is aten._to_copy.default:
        copy_mark(tensors[0], outputs)
    if is_explaining_or_forbidding():
        _record_call(name, decision, outputs)
    return outputs if finish is None else finish(outputs)


def _note_run(call: OperatorCall, tensors: Sequence[ShardedTensor], decision: Decision, own: bool) -> None:
    """Tell who watches how the operator ran: with its own arguments or by a strategy's function, and on what."""
    given = all(isinstance(t, ShardedTensor) or t.ndim == 0 for t in call.tensors) and not _is_data_dependent(call)
    turned = has_tag(call.op, torch.Tag.inplace_view)  # these change what the wrapper says of itself
    wanted = list(zip(tensors, decision.inputs, strict=True))
    copied = gives_views(call.op) and any(t.sharding is not w for t, w in wanted)  # then the results are marked
    written = [tensors[i] for i in sorted(written_indices(call))]
    note_operator(given and own and not turned and not copied, wanted, written, name_of(call.op))


def _is_data_dependent(call: OperatorCall) -> bool:
    """Whether the shapes of the results depend on values, so that nothing about them may be remembered.

    Torch tags such operators. Indexing is one of them, but only by a mask.
    """
    if not any(has_tag(call.op, tag) for tag in _DATA_DEPENDENT):
        return False
    masks = any(t.dtype in (torch.bool, torch.uint8) for t in call.tensors[1:])
    return masks or call.op is not torch.ops.aten.index.Tensor


_DATA_DEPENDENT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _align_all(tensors: Sequence[ShardedTensor], wanted: Sequence[Layout], name: str) -> list[ShardedTensor]:
    """The tensors in the layouts wanted; one that appears twice and is needed alike is moved once."""
    made: dict[tuple[int, int], ShardedTensor] = {}
    for tensor, layout in zip(tensors, wanted, strict=True):
        key = (id(tensor), id(layout))
        if key not in made:
            made[key] = _align_input(tensor, layout, name)
    return [made[id(tensor), id(layout)] for tensor, layout in zip(tensors, wanted, strict=True)]


def _align_input(tensor: ShardedTensor, wanted: Layout, name: str) -> ShardedTensor:
    if tensor.sharding is wanted:
        return tensor
    if tensor.sharding == wanted:
        return wrap(wanted, tensor.local_parts, tensor.comm, dtype=tensor.dtype, anchor=tensor._anchor)
    return move_input(tensor, wanted, name)


def _record_call(name: str, decision: Decision, outputs: Any) -> None:
    flat = outputs if isinstance(outputs, list | tuple) else [outputs]
    given = tuple(layout_brief(o.sharding) for o in flat if isinstance(o, ShardedTensor))
    record_entry(LogEntry(name, tuple(layout_brief(layout) for layout in decision.inputs), given, 0, user_line()))


def _wrap_results(
    call: OperatorCall, tensors: Sequence[ShardedTensor], comm: Comm, decision: Decision, result: Any
) -> Any:
    """The local results as ShardedTensors; a tensor that was written to is returned itself."""
    written = written_indices(call)
    if written:
        for index in written:
            tensors[index].__dict__.pop("_varied", None)
        kept = [tensors[i] for i in sorted(written)]
        if not call.op._schema.returns:  # type: ignore[attr-defined]  # operators have one
            return None
        return kept[0] if len(kept) == 1 else (None if result is None else tuple(kept))
    flat = list(result) if isinstance(result, list | tuple) else [result]
    layouts = decision.outputs
    if layouts is None:
        _check_count(call, decision, flat)
        layouts = tuple(_output_layout(call, decision, i, value) for i, value in enumerate(flat))
    _check_results(call, layouts, flat, comm.rank)
    if decision.outputs is None and not _is_data_dependent(call):
        decision.outputs = layouts
    wrapped = [
        value if layout is None else wrap(layout, (value,), comm) for value, layout in zip(flat, layouts, strict=True)
    ]
    if isinstance(result, list | tuple):
        return type(result)(wrapped) if type(result) in (list, tuple) else tuple(wrapped)
    return wrapped[0]


def _bring_home(outputs: Any, decision: Decision, name: str) -> Any:
    """The pending results where they belong: split as an input was that was taken apart."""
    if isinstance(outputs, list | tuple):
        return type(outputs)(_bring_result_home(o, i, decision, name) for i, o in enumerate(outputs))
    return _bring_result_home(outputs, 0, decision, name)


def _bring_result_home(output: Any, index: int, decision: Decision, name: str) -> Any:
    if not isinstance(output, ShardedTensor) or not isinstance(output.sharding.spec, MeshSpec):
        return output
    spec, shape = output.sharding.spec, output.sharding.shape
    placements = list(spec.placements)
    for axis, home in enumerate(decision.homes):
        if home is not None and isinstance(placements[axis], Partial):
            strategy, cut = home
            placement = strategy.outputs[min(index, len(strategy.outputs) - 1)]
            placements[axis] = cut_like(placement, cut, shape) or Replicate()
    try:
        layout = mesh_spec(spec.mesh, tuple(placements), spec.order).layout(shape)
    except LayoutError:  # lengths that fit a whole dim, where another axis cuts it too
        plain = [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]
        layout = mesh_spec(spec.mesh, tuple(plain), spec.order).layout(shape)
    return redistribute_to(output, layout, name)


def _check_count(call: OperatorCall, decision: Decision, values: Sequence[Any]) -> None:
    """Raise if a strategy speaks of more outputs than a user's operator has; ours serve variants with fewer."""
    most = max((len(s.outputs) for s in decision.chosen), default=0)
    if most > len(values) and not str(call.op).startswith("aten."):
        raise LayoutError(f"the rule of {call.op} returns {most} output placements, but it has {len(values)} outputs")


def _check_results(call: OperatorCall, layouts: Sequence[Layout | None], values: Sequence[Any], rank: int) -> None:
    """Raise if a local result does not have the shape that the strategies say: then the rule is wrong."""
    for number, (layout, value) in enumerate(zip(layouts, values, strict=True)):
        if layout is not None and layout.local_shapes(rank) != (tuple(value.shape),):
            raise LayoutError(
                f"the rule of {call.op} says output {number} is {format_layout_text(layout)}, so rank {rank} should "
                f"have {layout.local_shapes(rank)[0]}, but its local result is {tuple(value.shape)}; the rule is wrong"
            )


def _output_layout(call: OperatorCall, decision: Decision, index: int, value: Any) -> Layout | None:
    """The layout of an output: local lengths where a dim is whole, the cut's length where it is sharded."""
    if not isinstance(value, Tensor):
        return None
    if value.layout != torch.strided:
        raise UnsupportedOpError(f"{call.op} returns a {value.layout} tensor; ShardedTensors are always torch.strided")
    given = [s.outputs[min(index, len(s.outputs) - 1)] for s in decision.chosen]
    shape = list(value.shape)
    for placement, lead in zip(given, decision.cuts, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim % max(1, len(shape))
            given_length = None if placement.owners is None else len(placement.owners)
            shape[dim] = given_length or sum(placement.sizes or placement.groups or (lead[1] if lead else -1,))
    placements = [
        cut_like(_drop_single_group(p) or Replicate(), lead, shape) or Replicate()
        for p, lead in zip(given, decision.cuts, strict=True)
    ]
    for axis, ranks in enumerate(decision.mesh.shape):
        if ranks == 1 and isinstance(placements[axis], Partial):
            placements[axis] = Replicate()
    if -1 in shape:
        raise LayoutError(
            f"the rule of {call.op} shards an output along a dim that no input is sharded along; specify its sizes"
        )
    return mesh_spec(decision.mesh, tuple(placements), decision.order).layout(shape)


def _drop_single_group(placement: Placement | None) -> Placement | None:
    """A Shard of one group is a plain one: rules write it to say how long the dim of an output is."""
    one = isinstance(placement, Shard) and placement.groups is not None and len(placement.groups) == 1
    return Shard(placement.dim) if isinstance(placement, Shard) and one else placement
