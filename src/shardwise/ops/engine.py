"""How is an operator computed on ShardedTensors? `compute` is the pipeline; each rank passes through all of it.

1. Normalise the call: tensors are separated from other arguments. A copied view that is out of date is refused.
2. Take part (`non_participating.py`): a rank outside of the tensors' mesh goes on with stand-ins, with layouts and
   dtypes and no values. From here to 6 the code is the same on every rank, and everything is decided by layouts.
3. Propagate: an operator with steps is computed by them. One without a rule is what torch makes of it, or one of
   the fallbacks below. Plain tensors become replicated ones, and all tensors are described on one mesh
   (`implicit_replication.py`). Irregular tensors are computed piece by piece, or put on a mesh (`irregular.py`).
   For all others look up what was decided for the same operator, layouts and other arguments; nothing known: ask the
   rule, and choose (`propagation.py`).
4. Align the inputs: move those that have another layout, pass varying ones through `vary` (`unshard.py`).
5. Run the operator on the local tensors.
6. Check the shapes of the results against the layouts that follow from the strategies, and wrap them.
7. Finish: results of stand-ins become tensors without data. What was written to copied views is written back; which
   results are copied views, and their strides, is noted.

Fallbacks are operators that others make up, each computed by its own rule:

- One that writes to its first argument, or to `out=`, is the one that does not, and a copy into the argument. So is one
  with a rule, where what it writes to would have to be moved: a pending sum, a dim that has to be whole. The copy moves
  the result into the layout of the argument, which keeps it.
- A copy of a view is the view, copied.
- What torch itself writes as other operators (its table of decompositions) is computed so. Intermediate plain tensors
  are the same on every rank, and are read as replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_tensor

from shardwise._cache import Cache, cached
from shardwise._torch import (
    aten,
    decompose,
    decomposition_table,
    is_any_autocast_enabled,
    is_composite,
    pytree,
    track_views,
)
from shardwise.comm import Comm, CommError
from shardwise.geometry import Layout, LayoutError, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.dispatch_cache import is_function_recorded, note_entry, note_operator, note_special
from shardwise.ops.explain import LogEntry, is_explaining_or_forbidding, layout_brief, record_entry, show_call
from shardwise.ops.implicit_replication import (
    MixedTensorsError,
    convert_plain_tensors,
    describe_given,
    describe_on_one_mesh,
    is_placeholder,
    join_rank_sets,
    plain_as_replicated,
    reads_plain_as_replicated,
    refuse_lost_gradients,
    replicate_made,
)
from shardwise.ops.irregular import is_irregular, mark_views_of_moved, put_on_mesh, run_on_pieces
from shardwise.ops.non_participating import (
    computes_apart,
    count_versions,
    leave,
    refuse_unknown_shapes,
    run_without_data,
    show_to_hooks,
    stands_in,
    take_part,
)
from shardwise.ops.propagation import (
    Decision,
    WrittenMoveError,
    active_preferences,
    cut_like,
    decide,
    first_positions,
    preferred_strategy,
)
from shardwise.ops.rule import (
    OperatorCall,
    Steps,
    check_dims,
    find_functional,
    find_rule,
    has_tag,
    is_pointwise,
    key_without_numbers,
    name_of,
    rule_takes_copies,
    split_call,
    written_slots,
)
from shardwise.ops.unshard import copy_mark, free_after_forward, is_summed, keep_pins, move_input, vary_along
from shardwise.ops.views import LocalView, allow_writes, mesh_spec, note_strides, redistribute_to, shape_tuple
from shardwise.tensor.autograd_mixin import allow_writes_to_copies
from shardwise.tensor.dispatch import UnsupportedOpError, enter_operator, sharded_leaves
from shardwise.tensor.move import format_layout_text, has_copies, is_differentiated, move_to
from shardwise.tensor.recorder import user_line
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import (
    check_elements_apart,
    check_writable,
    count_write,
    gives_views,
    mark_moved_views,
    note_copies,
)

Fallback = Callable[..., Any]
_INDEXING = frozenset([aten.index.Tensor])
_REFUSED = frozenset(["set_"])  # lets one tensor share the memory of another
_decisions: Cache[Hashable, tuple[Decision | Steps, tuple[Layout, ...]]] = Cache(16384, on_change=True)


def call_operator(
    cls: type | None, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Compute an operator on ShardedTensors, recorded on the tape: `ShardedTensor.__torch_dispatch__`."""
    return enter_operator(compute, func, args, kwargs or {})


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute another operator from inside of one."""
    return enter_operator(compute, op, args, kwargs)


def compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on ShardedTensors, in the layers of torch that the caller has entered."""
    note_entry(op)
    call = split_call(op, args, kwargs)
    if op in _INDEXING and reads_plain_as_replicated():
        call = _read_plain_masks(call)
    given = [t for t in call.tensors if isinstance(t, ShardedTensor)]
    for tensor in given:
        if tensor._copied_from is not None:
            tensor._copied_from.check()
        if tensor._dense_strides is not None and written_slots(op):
            _refuse_shared_elements(call)
    refuse_unknown_shapes(op, given)
    way: Steps | None = None
    if len(given) > 1 and not computes_apart(op):
        held = call
        if irregular := any(map(is_irregular, given)):
            held = describe_given(call)
            irregular = any(isinstance(t, ShardedTensor) and is_irregular(t) for t in held.tensors)
        joined = held if irregular else join_rank_sets(held)
        way = find_writing_fallback(op) if joined is None else None
        if joined is not call:
            note_special()
        call = held if joined is None else joined
    here = take_part(call) if way is None else call
    versions = count_versions(here) if here is not call else ()
    hooks = show_to_hooks(given[0].device) if here is not call else nullcontext()
    with allow_writes_to_copies() if written_slots(op) else nullcontext(), hooks:
        result = propagate(here)() if way is None else _run_steps(way, call)
    if here is not call:
        result = leave(call, here, versions, result)
    return _finish(call, given, result)


_WRITE_ALIKE = {  # elements that share memory get one value, or torch lets them be
    torch.ops.aten.fill_,
    torch.ops.aten.zero_,
    torch.ops.aten.masked_fill_,
    torch.ops.aten.index_put_,
    torch.ops.aten.index_fill_,
    torch.ops.aten.fill_diagonal_,
    torch.ops.aten.triu_,
    torch.ops.aten.tril_,
}


def _refuse_shared_elements(call: OperatorCall) -> None:
    """Raise where torch does, and on ranks that have nothing as well: several elements written to share memory."""
    op: Any = call.op
    if op.overloadpacket not in _WRITE_ALIKE and not has_tag(op, torch.Tag.inplace_view):
        for index in call.written:
            check_elements_apart(call.tensors[index], name_of(op))


def _read_plain_masks(call: OperatorCall) -> OperatorCall:
    """Indexing by plain masks as indexing by numbers: every rank has the mask, so the shape depends on no values."""
    if not any(_is_mask(t) for t in call.tensors):
        return call
    args, kwargs = call.arguments
    indices: list[Any] = []
    for one in args[1]:
        indices += one.nonzero().unbind(1) if _is_mask(one) else [one]
    return split_call(call.op, (args[0], indices, *args[2:]), kwargs)


def _is_mask(tensor: Any) -> bool:
    plain = isinstance(tensor, Tensor) and not isinstance(tensor, ShardedTensor)
    return plain and tensor.ndim > 0 and tensor.dtype in (torch.bool, torch.uint8)


def propagate(call: OperatorCall) -> Callable[[], Any]:
    """How a call is computed. It is decided by layouts and metadata, the same on every rank."""
    op, rule, tensors = call.op, find_rule(call.op), call.tensors
    pointwise = rule is None and is_pointwise(op)
    if not pointwise:
        check_dims(call)
    if rule is not None and not rule_takes_copies(rule) and any(map(_has_copies, tensors)):
        return partial(_run_without_copies, call)
    if isinstance(rule, Steps):
        return partial(_run_own_steps, call, rule)
    unknown = rule is None and not pointwise
    if unknown and is_composite(op):
        return partial(_decompose, call)
    written = call.written
    refuse_lost_gradients(call, written)
    apart = any(is_placeholder(tensors[i]) for i in written) or (pointwise and written and _out_is_resized(call))
    if apart and (fallback := find_fallback(op)) is not None:
        return partial(_fall_back, call, fallback)
    held = call.with_tensors(describe_on_one_mesh(convert_plain_tensors(call), written))
    irregular = any(is_irregular(t) for t in held.tensors)  # type: ignore[arg-type]  # all are sharded now
    if unknown and not irregular and (fallback := find_fallback(op)) is not None:
        return partial(_fall_back, call, fallback)
    for index in written:
        check_writable(held.tensors[index])  # type: ignore[arg-type]  # all are sharded now
    return partial(_run_irregular if irregular else _run_strategies, held)


def _out_is_resized(call: OperatorCall) -> bool:
    """Whether a sharded `out=` of a pointwise operator has another shape than the result; a plain one is refused."""
    if not _out_names(call.op):
        return False
    given = [tuple(t.shape) for i, t in enumerate(call.tensors) if i not in call.written]
    shape = torch.broadcast_shapes(*given)  # type: ignore[no-untyped-call]  # untyped in torch
    targets = [call.tensors[i] for i in call.written]
    return any(isinstance(t, ShardedTensor) and tuple(t.shape) != tuple(shape) for t in targets)


def _has_copies(tensor: Tensor) -> bool:
    return isinstance(tensor, ShardedTensor) and has_copies(tensor.sharding)


def _run_without_copies(call: OperatorCall) -> Any:
    """Compute a call of a rule that knows of no copies: ranks that have copies share them; most often nothing moves."""
    note_special()
    if any(_has_copies(call.tensors[i]) for i in call.written):
        steps = find_writing_fallback(call.op)
        if steps is None:
            listed = ", ".join(format_layout_text(t.sharding) for t in call.tensors if isinstance(t, ShardedTensor))
            raise UnsupportedOpError(
                f"{call.op} of {listed} writes to a tensor with copies, and has no rule for them; use the operator "
                "that returns a new tensor, or redistribute to a layout without 'each'"
            )
        return _run_steps(steps, call)
    name = name_of(call.op)
    moved = call.with_tensors([_drop_copies(t, name) if _has_copies(t) else t for t in call.tensors])
    args, kwargs = moved.arguments
    return mark_views_of_moved(call, moved, _call(call.op, *args, **kwargs))


def _drop_copies(tensor: Any, name: str) -> ShardedTensor:
    spec = tensor.sharding.spec
    placements = [p.without_copies() if isinstance(p, Shard) else p for p in spec.placements]
    layout = mesh_spec(spec.mesh, tuple(placements), spec.order).layout(tuple(tensor.shape))
    locals_, anchor = move_to(tensor, layout, name)
    return wrap(layout, locals_, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=anchor)


def _finish(call: OperatorCall, given: Sequence[ShardedTensor], result: Any) -> Any:
    """Write copied views back that were written to; note of results which of them are copies, and their strides."""
    op = call.op
    if written_slots(op):
        for index in () if has_tag(op, torch.Tag.inplace_view) else call.written:  # these leave all values as they are
            if isinstance(tensor := call.tensors[index], ShardedTensor):
                count_write(tensor)
        for tensor in given:
            if tensor._copied_from is not None:
                tensor._copied_from.write_back()
    if gives_views(op) and not computes_apart(op):  # those that were, were noted: `to` returns no view most often
        note_copies(op, given, result)
        allow_writes(call, given, result)
        if given[0]._pinned_axes:
            keep_pins(given[0], result)
    note_strides(call, given, result)
    return result


def _decompose(call: OperatorCall) -> Any:
    """Compute an operator without a rule by those that torch makes of it."""
    args, kwargs = call.arguments
    result = finish_out(call.op, kwargs, decompose(call.op, args, kwargs))
    if not all(isinstance(t, ShardedTensor) for t in call.tensors):
        return result
    like: Any = call.tensors[0]
    return pytree.tree_map_only(
        Tensor, lambda t: t if isinstance(t, ShardedTensor) else replicate_made(t, like), result
    )


def _fall_back(call: OperatorCall, fallback: Fallback) -> Any:
    args, kwargs = call.arguments
    return fall_back(call.op, fallback, args, kwargs)


def _run_own_steps(call: OperatorCall, steps: Steps) -> Any:
    """Run the steps of an operator; what they refuse of irregular tensors is done on a mesh."""
    given = [t for t in call.tensors if isinstance(t, ShardedTensor)]
    try:
        return _run_steps(steps, describe_given(call))
    except UnsupportedOpError:
        if len(given) < len(call.tensors) or not any(map(is_irregular, given)) or written_slots(call.op):
            raise
    return _run_on_mesh(call)


def _run_steps(steps: Steps, call: OperatorCall) -> Any:
    args, kwargs = call.arguments
    with track_views(True) if gives_views(call.op) and torch.is_grad_enabled() else nullcontext():
        result = steps.run(*args, **kwargs)
    if is_explaining_or_forbidding():
        show_call(call, [t for t in call.tensors if isinstance(t, ShardedTensor)], result)
    if steps.in_place:
        note_operator(plain=True, wanted=[(args[0], args[0].sharding)], written=[args[0]])
    else:
        note_special()
    return result


def _run_irregular(call: OperatorCall) -> Any:
    """Compute a call of irregular tensors: on their pieces, or on a mesh; what is written to stays where it is."""
    note_special()
    try:
        result = run_on_pieces(call)
    except WrittenMoveError as error:
        return _run_steps(_without_writing(call.op, error), call)
    if result is not NotImplemented:
        return result
    steps = find_writing_fallback(call.op) if call.written else None  # `out=` may get another shape: no copy of it can
    return _run_on_mesh(call) if steps is None else _run_steps(steps, call)


def _run_on_mesh(call: OperatorCall) -> Any:
    note_special()
    moved = put_on_mesh(call)
    args, kwargs = moved.arguments
    return mark_views_of_moved(call, moved, _call(call.op, *args, **kwargs))


def _without_writing(op: Any, error: WrittenMoveError) -> Steps:
    """How an operator is computed if what it writes to would have to be moved; else raises what was raised."""
    steps = find_writing_fallback(op)
    if steps is None:
        raise UnsupportedOpError(*error.args) from None
    return steps


def _run_strategies(call: OperatorCall) -> Any:
    """Compute a call by what was decided for it; a call that fails leaves nothing behind."""
    tensors: Sequence[Any] = call.tensors
    recorded = tuple(map(is_differentiated, tensors))
    pointwise = find_rule(call.op) is None and is_pointwise(call.op)  # numbers of optimizers change at every step
    called = key_without_numbers(call) if pointwise else call.key
    kinds = tuple((id(t.sharding), t.dtype, is_summed(t), t._pinned_axes) for t in tensors)
    modes = is_any_autocast_enabled(), preferred_strategy.get() if active_preferences[0] else None
    key = (called, kinds, first_positions(tensors), recorded, tensors[0].device, modes)
    known = _decisions.get(key)
    try:
        decision = decide(call, tensors, recorded) if known is None else known[0]
    except WrittenMoveError as error:
        decision = _without_writing(call.op, error)
    if isinstance(decision, Steps):
        gathers = not decision.takes_copies and any(map(_has_copies, tensors))
        result = _run_without_copies(call) if gathers else _run_steps(decision, call)
    else:
        result = _run_decision(call, tensors, tensors[0].comm, decision)
    if known is None and not any(t.sharding.depends_on_data for t in tensors):
        _decisions.put(key, (decision, tuple(t.sharding for t in tensors)))  # keys hold identities: layouts stay alive
    return result


def _run_decision(call: OperatorCall, tensors: Sequence[ShardedTensor], comm: Comm, decision: Decision) -> Any:
    name = name_of(call.op)
    aligned = _align_all(tensors, decision.inputs, name)
    values = [
        vary_along(t, t.sharding, axes) if axes else t.local_parts[0]
        for t, axes in zip(aligned, decision.vary, strict=True)
    ]
    local, finish = decision.local, decision.finish
    operator = call.op
    if local is not None:
        operator = partial(local, LocalView(comm, decision.inputs, tuple(map(shape_tuple, tensors))))

    def run(values: Sequence[Tensor]) -> Any:
        args, kwargs = call.fill_slots(values)
        return operator(*args, **kwargs)

    with free_after_forward(aligned):
        result = run_without_data(call, values, run) if stands_in(comm) else run(values)
    if is_function_recorded():
        named = decision.name  # then another strategy may be preferred at the next call
        own = local is None and finish is None and not decision.result_targets and not named
        _note_run(call, tensors, decision, own)
    outputs = _wrap_results(call, tensors, comm, decision, result)
    if decision.result_targets:
        outputs = _move_to_result_targets(outputs, decision, name)
    mark_moved_views(call.op, tensors, aligned, outputs)
    if call.op is aten._to_copy.default:
        copy_mark(tensors[0], outputs)
    if is_explaining_or_forbidding():
        _record_call(f"{name} ({decision.name})" if decision.name else name, decision, outputs)
        show_call(call, tensors, outputs)
    return outputs if finish is None else finish(outputs)


def _note_run(call: OperatorCall, tensors: Sequence[ShardedTensor], decision: Decision, own: bool) -> None:
    """Tell who watches how the operator ran: with its own arguments or by a strategy's function, and on what."""
    given = all(isinstance(t, ShardedTensor) or t.ndim == 0 for t in call.tensors) and not _is_data_dependent(call)
    turned = has_tag(call.op, torch.Tag.inplace_view)  # these change what the wrapper says of itself
    wanted = list(zip(tensors, decision.inputs, strict=True))
    copied = gives_views(call.op) and any(t.sharding is not w for t, w in wanted)  # then the results are marked
    written = [tensors[i] for i in call.written]
    arguments = (*call.args, *call.kwargs.values())
    note_operator(given and own and not turned and not copied, wanted, written, name_of(call.op), arguments)


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
    pinned = any(t._pinned_axes for t in tensors)
    for tensor, layout in zip(tensors, wanted, strict=True):
        key = (id(tensor), id(layout))
        if key not in made:
            made[key] = _align_input(tensor, layout, name, pinned and not tensor._pinned_axes)
    return [made[id(tensor), id(layout)] for tensor, layout in zip(tensors, wanted, strict=True)]


def _align_input(tensor: ShardedTensor, wanted: Layout, name: str, beside_pinned: bool) -> ShardedTensor:
    if tensor.sharding is wanted:
        return tensor
    if tensor.sharding.is_used_as(wanted):
        return wrap(wanted, tensor.local_parts, tensor.comm, dtype=tensor.dtype, anchor=tensor._anchor)
    return move_input(tensor, wanted, name, beside_pinned=beside_pinned)


def _record_call(name: str, decision: Decision, outputs: Any) -> None:
    flat = outputs if isinstance(outputs, list | tuple) else [outputs]
    given = tuple(layout_brief(o.sharding) for o in flat if isinstance(o, ShardedTensor))
    record_entry(LogEntry(name, tuple(layout_brief(layout) for layout in decision.inputs), given, 0, user_line()))


def _wrap_results(
    call: OperatorCall, tensors: Sequence[ShardedTensor], comm: Comm, decision: Decision, result: Any
) -> Any:
    """The local results as ShardedTensors; a tensor that was written to is returned itself."""
    written = call.written
    if written:
        for index in written:
            tensors[index].__dict__.pop("_varied", None)
        kept = [tensors[i] for i in written]
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


def _move_to_result_targets(outputs: Any, decision: Decision, name: str) -> Any:
    """The pending results where they belong: split as an input was that was taken apart."""
    if isinstance(outputs, list | tuple):
        return type(outputs)(_move_to_result_target(o, i, decision, name) for i, o in enumerate(outputs))
    return _move_to_result_target(outputs, 0, decision, name)


def _move_to_result_target(output: Any, index: int, decision: Decision, name: str) -> Any:
    if not isinstance(output, ShardedTensor) or not isinstance(output.sharding.spec, MeshSpec):
        return output
    spec, shape = output.sharding.spec, output.sharding.shape
    placements = list(spec.placements)
    for axis, result_target in enumerate(decision.result_targets):
        if result_target is not None and isinstance(placements[axis], Partial):
            strategy, cut = result_target
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
    """A Shard of one group is one without: rules write it to say how long the dim of an output is."""
    one = isinstance(placement, Shard) and placement.groups is not None and len(placement.groups) == 1
    return replace(placement, groups=None) if isinstance(placement, Shard) and one else placement


@cached()
def find_fallback(op: Any) -> Fallback | None:
    """How an operator without a rule is computed by others, or None."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return None
    if any(a.is_out for a in schema.arguments):
        return _make_out_variant(op)
    space, _, name = schema.name.partition("::")
    if space != "aten" or name in _REFUSED:
        return None
    overload = schema.overload_name or "default"
    if name.endswith("_") and written_slots(op):
        return _make_in_place(op, find_functional(op))
    if name.endswith("_copy"):
        return _make_view_copy(_find_overload(name[: -len("_copy")], overload)) or decomposition_table.get(op)
    way: Fallback | None = decomposition_table.get(op)
    return way


def _writes_what_it_returns(op: Any) -> bool:
    """Whether an operator writes its result to its first argument or to `out=`, and nothing else."""
    schema, written = op._schema, written_slots(op)
    return bool(written) and (any(a.is_out for a in schema.arguments) or schema.name.endswith("_"))


@cached()
def find_writing_fallback(op: Any) -> Steps | None:
    """How an operator is computed if what it writes to would have to be moved: without writing, then by a copy."""
    way = find_fallback(op) if op is not aten.copy_.default and _writes_what_it_returns(op) else None
    if way is None:
        return None
    return Steps(lambda *args, **kwargs: fall_back(op, way, args, kwargs))


def fall_back(op: Any, way: Fallback, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator by others; what they cannot do is refused in the operator's name."""
    note_operator(plain=True)  # one more than those that follow: a shortcut is compared with them before it is used
    try:
        with plain_as_replicated():
            return way(*args, **kwargs)
    except (CommError, UnsupportedOpError, MixedTensorsError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        raise UnsupportedOpError(
            f"{op} is computed by other operators, and these do not fit its tensors ({error}); write a rule for these "
            f"layouts with @shardwise.register_sharding({op}), or compute on local_tensor()"
        ) from error


def finish_out(op: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Write a result to `out=` where torch has not: some of its composite operators do not write to subclasses."""
    names = _out_names(op)
    targets = [kwargs[name] for name in names]
    found = list(result) if isinstance(result, list | tuple) else [result]
    if not names or all(t is f for t, f in zip(targets, found, strict=False)):
        return result
    with plain_as_replicated():
        written = _write_results(targets, found)
    return written[0] if len(names) == 1 else tuple(written)


@cached()
def _out_names(op: Any) -> tuple[str, ...]:
    return tuple(a.name for a in op._schema.arguments if a.is_out)


def _find_overload(name: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.aten, name, None), overload, None)


def _make_in_place(op: Any, functional: Any) -> Fallback | None:
    """Compute without writing, then copy into the first argument."""
    if functional is None:
        return None
    names = [a.name for a in op._schema.arguments]
    same = [a.name for a in functional._schema.arguments] == names

    def way(target: Any, *args: Any, **kwargs: Any) -> Any:
        given = (_copy_if_recorded(target, args, kwargs), *args)
        if not same:  # polygamma takes the tensor second, and as a method first
            given, kwargs = (), dict(zip(names, given, strict=False)) | kwargs
        return _write_results(target, _call(functional, *given, **kwargs))

    return way


def _copy_if_recorded(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor that is computed from and then written to: what the backward pass needs of it must stay."""
    if not torch.is_grad_enabled() or not isinstance(target, ShardedTensor):
        return target
    given = (t for t in pytree.tree_iter((target, args, kwargs)) if isinstance(t, Tensor))
    return _copy_view(target) if any(t.requires_grad for t in given) else target


def _make_out_variant(op: Any) -> Fallback | None:
    """Compute without `out=`, then copy into what was passed."""
    names, functional = _out_names(op), _find_without_out(op)
    if functional is None:
        return None
    options = {a.name for a in functional._schema.arguments} - {a.name for a in op._schema.arguments}

    def way(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in names]
        tensors = [t for t in pytree.tree_leaves((args, kwargs, given)) if is_tensor(t)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ValueError("no gradient passes through out=; leave it out, or compute under torch.no_grad()")
        # Numbers alone (eye, arange) make a plain tensor, the same on every rank.
        of_numbers = len(tensors) == len(given) and torch.Tag.nondeterministic_seeded not in functional.tags
        if not of_numbers and next(sharded_leaves(args, kwargs), None) is None:
            raise ValueError("only out= is a ShardedTensor; if every rank has the same values pass replicate(t)")
        if options:  # of a tensor that is made
            kwargs |= {"dtype": given[0].dtype, "device": given[0].device}
        found = functional(*args, **kwargs) if of_numbers else _call(functional, *args, **kwargs)
        written = _write_results(given if len(given) > 1 else given[0], found)
        return (tuple(written) if len(given) > 1 else written) if op._schema.returns else None

    return way


_CREATION = {"dtype", "layout", "device", "pin_memory"}


def _find_without_out(op: Any) -> Any:
    """The overload that takes the same arguments except `out=`, or None; it may have options of new tensors besides."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    names = {name for name, _ in wanted}
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        arguments = [a for a in other._schema.arguments if a.name in names or a.name not in _CREATION]
        if [(a.name, str(a.type)) for a in arguments] == wanted:
            return other
    return None


def _write_results(targets: Any, found: Any) -> Any:
    """Write one result, or several; nothing is written unless all fit."""
    several = isinstance(targets, list | tuple)
    pairs = list(zip(targets, found, strict=True)) if several else [(targets, found)]
    for target, value in pairs:
        _check_fit(target, value)
    written = [_write_result(target, value) for target, value in pairs]
    return written if several else written[0]


def _check_fit(target: Tensor, found: Tensor) -> None:
    if tuple(found.shape) != tuple(target.shape) and target.numel() not in (0, found.numel()):
        raise ValueError(f"a result of shape {tuple(found.shape)} does not fit in {tuple(target.shape)}")
    if not torch.can_cast(found.dtype, target.dtype):
        raise ValueError(f"a result of {found.dtype} cannot be written to {target.dtype}")


def _write_result(target: Tensor, found: ShardedTensor) -> Tensor:
    """Write a result in the layout of the target; one that has room for it takes its shape, as torch's `out=` does."""
    if is_placeholder(target):
        return target.resize_(tuple(found.shape)).copy_(found.full())
    if tuple(found.shape) != tuple(target.shape):
        _call(aten.resize_.default, target, tuple(found.shape))
    _call(aten.copy_.default, target, found)
    return target


def _make_view_copy(view: Any) -> Fallback | None:
    """Take the view, then copy it."""
    if view is None:
        return None

    def way(*args: Any, **kwargs: Any) -> Any:
        seen = _call(view, *args, **kwargs)
        return [_copy_view(v) for v in seen] if isinstance(seen, list | tuple) else _copy_view(seen)

    return way


def _copy_view(tensor: Tensor) -> Any:
    return _call(aten.clone.default, tensor)
