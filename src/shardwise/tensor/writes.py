"""Writing values into a ShardedTensor in place: the local tensors keep their memory, and autograd sees the change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._cache import cached
from shardwise._torch import aten, is_dispatch_mode_on, set_wrapper_shape, storage_identity
from shardwise.comm import DisagreementError
from shardwise.geometry import Layout, LayoutError
from shardwise.tensor.autograd_mixin import CopiedView, count_inference_write, is_written_back
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text, tape_inputs
from shardwise.tensor.random import (
    Distribution,
    StreamRequest,
    check_not_pending,
    draw_in_trace,
    fill_locals,
    next_stream,
)
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_COPIED_BY = "shardwise_copied_by"
WITNESS, _VIEW_OF, _VIEWS = "_witness", "_view_of", "_views"
MEMORY_NOTES = "_memory_notes"  # what a rank outside of the mesh knows of the memory of others


def draw_into(
    tensor: ShardedTensor,
    values: Callable[[], Distribution],
    *,
    label: str,
    fields: Mapping[str, object] | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> ShardedTensor:
    """Overwrite a tensor with the next random values, which its layout has no influence on.

    A mistake in the arguments is raised as it is on the rank that made it, and with its number on the others.
    """
    asked = {"layout": format_layout_text(tensor.sharding), "dtype": tensor.dtype, **(fields or {})}
    distribution, problem = None, None
    try:
        check_writable(tensor)
        check_elements_apart(tensor, label)
        check_not_pending(tensor.sharding, label)
        distribution = values()
    except (ValueError, RuntimeError) as error:
        problem = error
    if distribution is not None:
        request = StreamRequest(tensor.comm, asked, label, generator, seed)
        if is_dispatch_mode_on() and draw_in_trace(tensor.sharding, tensor.local_parts, distribution, request):
            return tensor
    try:
        stream = next_stream(tensor.comm, fields=asked, label=label, generator=generator, seed=seed, problem=problem)
    except DisagreementError:
        if problem is not None:
            raise problem from None
        raise
    assert distribution is not None
    fill_locals(tensor.sharding, tensor.comm.rank, tensor.local_parts, stream, distribution)
    count_write(tensor)
    return tensor


def mark_copied(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """Note that a tensor, which torch would return as a view, shares no memory with what it was taken from.

    The note is kept with the memory, so that it holds for views of this tensor as well, however they are made.
    """
    for local in tensor.local_parts:
        local.untyped_storage().__dict__[_COPIED_BY] = name
    return tensor


def mark_moved_views(
    op: Any, given: Sequence[ShardedTensor], taken: Sequence[ShardedTensor], outputs: ShardedTensor | Sequence[Any]
) -> None:
    """Mark what an operator returned as views, if tensors were moved before it ran."""
    if gives_views(op) and any(t.local_parts[0] is not g.local_parts[0] for g, t in zip(given, taken, strict=True)):
        for output in [outputs] if isinstance(outputs, ShardedTensor) else outputs:
            mark_copied(output, f"what {op} returned, after its input had to be moved,")


def _find_witness(tensor: ShardedTensor) -> Tensor:
    """A tensor that counts the writes to one without data on this rank, and to its views."""
    if WITNESS not in tensor.__dict__:
        with torch.inference_mode(False):
            tensor.__dict__[WITNESS] = torch.empty(0, device="cpu")
    witness: Tensor = tensor.__dict__[WITNESS]
    return witness


def count_write(tensor: ShardedTensor) -> None:
    """Count a write where no version of a local tensor does: on a rank without data, or in inference mode."""
    if not tensor.local_parts and WITNESS in tensor.__dict__:
        tensor.__dict__[WITNESS].zero_()
    for local in tensor.local_parts:
        count_inference_write(local)


def writes_without_data(tensor: ShardedTensor) -> int:
    """How often a tensor without data was written to since a view was taken, or its views were."""
    return tensor.__dict__[WITNESS]._version if WITNESS in tensor.__dict__ else 0


def note_write_without_data(tensor: ShardedTensor, anchor: Tensor | None) -> None:
    """Put what was written to a tensor on its tape, and on that of all tensors in its memory, on a rank without data.

    Otherwise this rank would not meet the moves of others in the backward pass.
    """
    if anchor is None or not anchor.requires_grad or not torch.is_grad_enabled():
        return
    base = find_base(tensor)
    views = (view() for view in base.__dict__.get(_VIEWS, ()))
    own = base._anchor
    whole = anchor if own is None or not own.requires_grad else (own + anchor).to(own.dtype)
    for one in (tensor, base, *views):  # with data each of them would be a view of what was written to
        if one is not None:
            one._anchor = whole


def find_base(tensor: ShardedTensor) -> ShardedTensor:
    """The tensor that this one is a view of, on a rank without data, where no memory tells; or itself."""
    while (base := tensor.__dict__.get(_VIEW_OF)) is not None:
        tensor = base
    return tensor


def _note_view(view: ShardedTensor, source: ShardedTensor, *, is_detached: bool) -> None:
    """Note what memory a result without data shares: writes to it count for both, and have gradients for both."""
    view.__dict__[WITNESS] = _find_witness(source)
    base = find_base(source)
    if not is_detached and base is not view:  # an operator may return what it got
        view.__dict__[_VIEW_OF] = base
        held = [ref for ref in base.__dict__.get(_VIEWS, ()) if ref() is not None]
        base.__dict__[_VIEWS] = [*held, weakref.ref(view)]


def copy_values(target: ShardedTensor, values: Sequence[Tensor], anchor: Tensor | None) -> None:
    """Copy a rank's part of the values into a tensor; a rank without data records the same."""
    written = target._tape_tensors()
    taken = tape_inputs(values, anchor, target.dtype, target.device)
    for local, one in zip(written, taken, strict=True):
        local.copy_(one)
    if not target.local_parts and written[0].requires_grad and torch.is_grad_enabled():
        target._anchor = None
        note_write_without_data(target, written[0])


def note_copies(op: Any, given: Sequence[ShardedTensor], result: Any) -> None:
    """Note for results that torch would return as views, and that were copied, what they were taken from."""
    before = next((t._copied_from for t in given if t._copied_from is not None), None)
    sources = [local for t in given for local in t.local_parts or (_find_witness(t),)]
    for output in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(output, ShardedTensor):
            continue
        if (name := _name_of_copy(output)) is None:
            if not output.local_parts:
                _note_view(output, given[0], is_detached=op is aten.detach.default)
            continue
        output._fingerprint = None
        if before is not None and share_memory(output.local_parts, sources):
            output._copied_from = before
        elif output._copied_from is None or not share_memory(output._copied_from.sources, sources):
            output._copied_from = CopiedView.of(
                name, sources, before
            )  # else an operator inside of this one has noted it


def share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether one of some tensors is in the memory of one of the others."""
    held = {storage_identity(t.untyped_storage()) for t in others}
    return any(storage_identity(t.untyped_storage()) in held for t in some)


@cached()
def gives_views(op: Any) -> bool:
    """Whether an operator's results share memory with an argument that it does not write to.

    >>> gives_views(torch.ops.aten.squeeze.dim), gives_views(torch.ops.aten.add_.Tensor)
    (True, False)
    """
    schema = getattr(op, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def share(tensor: ShardedTensor) -> ShardedTensor:
    """Another tensor in the same memory: it stays as it is if this one is turned into a view of itself."""
    made = wrap(
        tensor.sharding,
        tensor.local_parts,
        tensor.comm,
        dtype=tensor.dtype,
        device=tensor.device,
        anchor=tensor._anchor,
    )
    made._dense_strides, made._copied_from = tensor._dense_strides, tensor._copied_from
    made._pinned_axes = tensor._pinned_axes
    if not tensor.local_parts:
        made.__dict__[MEMORY_NOTES] = tensor.__dict__.get(MEMORY_NOTES, {})
        _note_view(made, tensor, is_detached=False)
    return made


def turn_into(tensor: ShardedTensor, view: ShardedTensor) -> ShardedTensor:
    """Let a tensor become a view of itself, as `x.unsqueeze_(0)` does: another shape, and the layout that goes with it.

    A leaf that requires grad stays as it is: torch refuses it as well.
    """
    if tensor.requires_grad and (tensor.is_leaf or not torch.is_grad_enabled()):
        raise UnsupportedOpError(
            f"a tensor that requires grad is given the shape {tuple(view.shape)} in place, as a leaf or outside of the "
            "tape, and its gradient would be lost; use the view that is not in place"
        )
    set_wrapper_shape(tensor, view)
    tensor.sharding, tensor.local_parts, tensor._anchor = view.sharding, view.local_parts, view._anchor
    tensor._dense_strides, tensor._copied_from = view._dense_strides, view._copied_from
    tensor._forget()
    return tensor


def _name_of_copy(tensor: ShardedTensor) -> str | None:
    for local in tensor.local_parts:  # each optimizer's step asks for each parameter: no calls of functions
        found: str | None = local.untyped_storage().__dict__.get(_COPIED_BY)
        if found is not None:
            return found
    known: str | None = tensor.__dict__.get(MEMORY_NOTES, {}).get(_COPIED_BY)
    return known


def is_writable(tensor: ShardedTensor) -> bool:
    """Whether what is written to a tensor is seen wherever torch would show it."""
    return _name_of_copy(tensor) is None


def check_writable(tensor: ShardedTensor) -> None:
    """Raise if what is written to a tensor would be lost: it should be a view, but had to be copied."""
    name = _name_of_copy(tensor)
    if name is not None and not is_written_back(tensor._copied_from):
        raise UnsupportedOpError(
            f"{name} was copied to {format_layout_text(tensor.sharding)} and shares no memory with the tensor it "
            "was taken from, "
            "so what is written to it would be lost; write x[key] = value, use a slice x[i:i+1], or clone() it first"
        )


def check_elements_apart(tensor: Tensor, name: str) -> None:
    """Raise if several elements of a tensor that is written to are one in memory, as those of an expanded tensor."""
    strides = tensor._dense_strides if isinstance(tensor, ShardedTensor) else None
    for dim, (stride, length) in enumerate(zip(strides or (), tensor.shape, strict=False)):
        if stride == 0 and length > 1 and 0 not in tensor.shape:
            raise UnsupportedOpError(
                f"{name} writes to a tensor of shape {tuple(tensor.shape)} that was expanded: the {length} elements "
                f"along dim {dim} share memory; clone() it first"
            )


def fill_with(tensor: ShardedTensor, value: complex | Tensor) -> ShardedTensor:
    """Overwrite a tensor with one value."""
    check_writable(tensor)
    check_fill(tensor.sharding, value)
    for local in tensor._tape_tensors():  # a rank without data records the same
        local.fill_(value)
    count_write(tensor)
    return tensor


def check_fill(layout: Layout, value: complex | Tensor) -> None:
    """Raise unless local tensors that hold the value reduce to it.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial
    >>> check_fill(MeshSpec(Mesh.of(dp=2), (Partial("max"),)).layout((3,)), 4)
    >>> check_fill(MeshSpec(Mesh.of(dp=2), (Partial("sum"),)).layout((3,)), 4)
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: filling a tensor with a pending sum of 2 addends with 4 would make it 8; ...
    """
    pending = layout.pending
    if pending is None or pending.op in ("min", "max"):
        return
    addends = int(layout.table.addends.max(initial=0)) + 1
    result = value**addends if pending.op == "product" else value * addends / pending.divisor
    if bool(result != value):
        raise LayoutError(
            f"filling a tensor with a pending {pending} of {addends} addends with {value} would make it {result:g}; "
            "redistribute it first, or use Shard or Replicate instead of Partial"
        )
