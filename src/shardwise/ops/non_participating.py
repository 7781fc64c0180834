"""Operators on a rank of the comm that is outside of the tensors' mesh: it takes part without data.

1. Such a rank computes as the mesh's first rank would, on meta tensors and with a comm that sends nothing. What comes
   out has the layouts and dtypes of the results, and whatever the layouts do not allow is refused here as it is there.
2. The results on this rank are ShardedTensors without local tensors. Their anchors are on the tape behind the meta
   tensors, so that the backward pass meets the same moves as on the mesh's ranks.
3. Operators that ask all ranks of the comm, for a value or a seed, run as they are: they need no local tensors.
4. Where shapes depend on values there is nothing to compute them from: refused on every rank, from the layouts alone.
5. Hooks of users that see what is saved for the backward pass (`save_on_cpu`, checkpointed code) get tensors on the
   device, which have one element in memory and no values of use.

Apart from the exchanges of the comm, nothing here waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise._cache import cached
from shardwise._torch import aten, is_composite, is_inference_wrapper, pytree, run_as_leaf, saved_tensors_hook_pair
from shardwise.comm import Comm
from shardwise.comm.stand_in import StandInComm
from shardwise.geometry import MeshSpec
from shardwise.ops.dispatch_cache import note_special
from shardwise.ops.implicit_replication import copy_mesh_note
from shardwise.ops.irregular import is_irregular
from shardwise.ops.rule import OperatorCall, Steps, find_rule, has_tag, is_pointwise
from shardwise.ops.unshard import copy_sum_note
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import MEMORY_NOTES, find_base, note_write_without_data, turn_into, writes_without_data

_ASK_ALL_RANKS = {
    aten._local_scalar_dense.default,
    aten._linalg_check_errors.default,
    aten.detach.default,
    aten.equal.default,
}
_STAND_IN = "_stand_in"
_GRADIENTS_OF_VALUES = {
    aten.index_fill.int_Tensor,
    aten.index_fill_.int_Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten.index_reduce.default,
    aten.index_reduce_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
}


def _join_without_data(rank: int, real: Comm) -> StandInComm:
    """The comm of a rank that computes as another would: it takes part in exchanges, and sends and receives nothing."""

    def refuse(label: str) -> Exception:
        return UnsupportedOpError(
            f"'{label}' asks all ranks of the comm, and rank {real.rank} is outside of the tensors' mesh; "
            "redistribute to a mesh of all ranks"
        )

    return StandInComm(rank, real.ranks, torch.device("meta"), refuse=refuse, real=real, joins=True)


class _Replace(torch.autograd.Function):
    """In place of a tensor another one that has no values of use, on its tape: on meta, an anchor, or one in memory."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        ctx.set_materialize_grads(False)  # no gradient stays none, as on the other rank
        ctx.replaced = tuple(tensor.shape), tensor.dtype, tensor.device
        return torch.full(shape, dtype.is_floating_point or dtype.is_complex, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return None, None, None, None
        return _replace(grads[0], *ctx.replaced), None, None, None


def _replace(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    made: Tensor = _Replace.apply(tensor, shape, dtype, device)  # type: ignore[no-untyped-call]  # untyped in torch
    return made


def stands_in(comm: Comm) -> bool:
    """Whether this rank takes part without data."""
    return isinstance(comm, StandInComm) and comm.joins


def run_without_data(call: OperatorCall, values: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Any]) -> Any:
    """Run an operator on the local tensors of stand-ins, as `run` does; where torch cannot on meta, on some in memory.

    That is where gradients look at values. It gets ones, zeros for whole numbers and no mask; they count for nothing.
    """
    if call.op not in _GRADIENTS_OF_VALUES:
        try:
            return run(values)
        except (NotImplementedError, TypeError):
            pass
    found = run([_replace(t, tuple(t.shape), t.dtype, "cpu") for t in values])
    given = pytree.tree_map_only(Tensor, _without_values, found)
    if not call.written:
        return given
    listed = given if isinstance(given, list | tuple) else (given,)
    kept = [values[i].copy_(t) for i, t in zip(call.written, listed, strict=True)]
    return kept if isinstance(given, list | tuple) else kept[0]


def _without_values(made: Tensor) -> Tensor:
    """A result on meta; one that is not strided is refused later, as on other ranks."""
    return _replace(made, tuple(made.shape), made.dtype, "meta") if made.layout == torch.strided else made


@cached()
def _takes_lists(op: Any) -> bool:
    name: str = op._schema.name.removeprefix("aten::")
    return name.startswith(("_foreach_", "_fused_"))


def _leaves_out_this_rank(tensor: ShardedTensor) -> bool:
    if tensor.local_parts:
        return False
    spec = tensor.sharding.spec
    return isinstance(spec, MeshSpec) and tensor.comm.rank not in spec.mesh.ranks


def refuse_unknown_shapes(op: Any, tensors: Sequence[ShardedTensor]) -> None:
    """Raise where shapes depend on values and a tensor's mesh leaves out ranks: those could not know the shapes."""
    if not has_tag(op, torch.Tag.dynamic_output_shape) or _is_index_without_mask(op, tensors):
        return
    for tensor in tensors:
        spec = tensor.sharding.spec
        if isinstance(spec, MeshSpec) and spec.mesh.ranks.size < tensor.comm.world_size:
            raise UnsupportedOpError(
                f"{op} of {format_layout_text(tensor.sharding)}: the shape of the result depends on values, and "
                f"the mesh has {spec.mesh.ranks.size} of the comm's {tensor.comm.world_size} ranks: the others would "
                "not know it; redistribute to a mesh of all ranks, or compute in a comm of the mesh's ranks"
            )


def _is_index_without_mask(op: Any, tensors: Sequence[ShardedTensor]) -> bool:
    return op is aten.index.Tensor and not any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])


def computes_apart(op: Any) -> bool:
    """Whether an operator takes each tensor of a list by itself, or is broken down into others by torch."""
    rule = find_rule(op)
    if isinstance(rule, Steps):
        return _takes_lists(op)
    return rule is None and not is_pointwise(op) and is_composite(op)


def take_part(call: OperatorCall) -> OperatorCall:
    """The call as this rank computes it: the call itself, or one of stand-ins where this rank is outside of the mesh.

    Exceptions run as they are: operators that ask all ranks, draw by a seed that all agree on, or compute each tensor
    of a list by itself; irregular tensors, which all ranks compute; and what torch breaks down into other operators,
    each of which comes here.
    """
    given: list[ShardedTensor] = [t for t in call.tensors if isinstance(t, ShardedTensor)]
    left_out = [t for t in given if _leaves_out_this_rank(t)]
    op = call.op
    if not left_out or op in _ASK_ALL_RANKS or any(map(is_irregular, given)) or computes_apart(op):
        return call
    if isinstance(find_rule(op), Steps) and has_tag(op, torch.Tag.nondeterministic_seeded):
        return call
    note_special()
    spec = left_out[0].sharding.spec
    assert isinstance(spec, MeshSpec)
    comm = _join_without_data(int(spec.mesh.ranks.flat[0]), left_out[0].comm)
    twins = {id(t): _stand_in_for(t, comm) for t in given}
    joins = op in (aten.stack.default, aten.cat.default)  # the only ones where a number is an element like others
    plain = [t if t.ndim == 0 and not joins else t.to("meta") for t in call.tensors if id(t) not in twins]
    rest = iter(plain)
    return call.with_tensors([twins[id(t)] if id(t) in twins else next(rest) for t in call.tensors])


def leave(call: OperatorCall, here: OperatorCall, versions: Sequence[int], result: Any) -> Any:
    """The results of a call of stand-ins as tensors without data; what was written to stand-ins is noted of tensors.

    `versions`: how often each stand-in had been written to before (`count_versions`).
    """
    left_out = next(t for t in call.tensors if isinstance(t, ShardedTensor) and _leaves_out_this_rank(t))
    own: dict[int, ShardedTensor] = {}
    for tensor, twin, before in zip(call.tensors, here.tensors, versions, strict=True):
        if not isinstance(tensor, ShardedTensor) or not isinstance(twin, ShardedTensor) or id(twin) in own:
            continue
        own[id(twin)] = tensor
        if twin.sharding is not tensor.sharding:
            turn_into(tensor, _wrap_without_data(twin, left_out))
        elif _version_of(twin) != before:
            _note_written(tensor, twin)
    return pytree.tree_map_only(
        ShardedTensor, lambda t: own[id(t)] if id(t) in own else _wrap_without_data(t, left_out), result
    )


def show_to_hooks(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which hooks of users get a tensor on the device for each stand-in that is saved."""
    hooks = saved_tensors_hook_pair()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def pack_stand_in(tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return None, pack(tensor)
        shown = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        return (tuple(tensor.shape), tensor.stride(), tensor.dtype), pack(shown)

    def unpack_stand_in(saved: Any) -> Tensor:
        form, packed = saved
        found = unpack(packed)
        return found if form is None else torch.empty_strided(*form[:2], dtype=form[2], device="meta")

    pack_stand_in.before = getattr(pack, "before", pack)  # type: ignore[attr-defined]  # sums that are kept look for it
    return torch.autograd.graph.saved_tensors_hooks(pack_stand_in, unpack_stand_in)


def count_versions(here: OperatorCall) -> list[int]:
    """How often each tensor of a call of stand-ins was written to."""
    return [_version_of(t) if isinstance(t, ShardedTensor) else 0 for t in here.tensors]


def _version_of(twin: ShardedTensor) -> int:
    """How often a stand-in was written to; tensors of inference mode do not count it, and are on no tape."""
    counted = [t for t in twin.local_parts if not t.is_inference()]
    return counted[0]._version if counted else 0


def _stand_in_for(tensor: ShardedTensor, comm: StandInComm) -> ShardedTensor:
    """The tensor as the other rank has it, without values; one object as long as the memory is not written to."""
    known: tuple[Tensor | None, bool, int, int, ShardedTensor] | None = tensor.__dict__.get(_STAND_IN)
    anchor = tensor._anchor
    written = 0 if anchor is None or anchor.is_inference() else anchor._version
    now = anchor, tensor.requires_grad, written, writes_without_data(tensor)
    if known is not None and known[-1].sharding is tensor.sharding and known[0] is anchor and known[1:4] == now[1:]:
        known[-1]._dense_strides = tensor._dense_strides
        return known[-1]
    made = wrap(tensor.sharding, tuple(_make_locals(tensor, comm.rank)), comm, dtype=tensor.dtype)
    made._dense_strides = tensor._dense_strides
    copy_mesh_note(tensor, made)
    if known is not None:
        copy_sum_note(known[-1], made)
    for local in made.local_parts:
        local.untyped_storage().__dict__.update(tensor.__dict__.get(MEMORY_NOTES, {}))
    tensor.__dict__[_STAND_IN] = (*now, made)
    return made


def _make_locals(tensor: ShardedTensor, rank: int) -> list[Tensor]:
    """Local tensors without values: of inference mode where those of the other rank are."""
    shapes = tensor.sharding.local_shapes(rank)
    if not tensor.requires_grad:
        with torch.inference_mode(is_inference_wrapper(find_base(tensor))):
            return [torch.empty(shape, dtype=tensor.dtype, device="meta") for shape in shapes]
    taped = tensor._tape_tensors()[0]
    with torch.enable_grad():
        made = [_replace(taped, shape, taped.dtype, "meta") for shape in shapes]
    if taped.is_leaf:  # the other rank has leaves there, whose hooks may exchange
        for local in made:
            run_as_leaf(local)
    return made


def _wrap_without_data(twin: ShardedTensor, left_out: ShardedTensor) -> ShardedTensor:
    """The result on this rank; notes about its memory go with it, so that writing to it is refused as elsewhere."""
    anchor = _anchor_of(twin, left_out.device)
    made = wrap(twin.sharding, (), left_out.comm, dtype=twin.dtype, device=left_out.device, anchor=anchor)
    made._dense_strides = twin._dense_strides
    made.__dict__[MEMORY_NOTES] = dict(twin.local_parts[0].untyped_storage().__dict__) if twin.local_parts else {}
    return made


def _note_written(tensor: ShardedTensor, twin: ShardedTensor) -> None:
    """Put a tensor that was written to on the tape, if that is recorded; torch itself refuses that for a leaf."""
    if not torch.is_grad_enabled():
        return
    if tensor._anchor is not None and tensor.requires_grad and tensor.is_leaf:
        tensor._anchor.zero_()
    tensor._anchor = None
    note_write_without_data(tensor, _anchor_of(twin, tensor.device))


def _anchor_of(twin: ShardedTensor, device: torch.device) -> Tensor | None:
    if not twin.requires_grad:
        return None
    with torch.enable_grad():
        return _replace(twin.local_parts[0], (0,), twin.dtype, device)
