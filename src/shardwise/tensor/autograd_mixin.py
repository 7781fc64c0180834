"""What a ShardedTensor answers from its local tensors: shape and dtype, memory, gradients.

1. `AttributesMixin`: shape, dtype and device, without a detour through torch's function protocol. Models ask for them
   at every step; from the layout and the local tensors the answer takes a tenth of the time.
2. `LocalMemoryMixin`: a ShardedTensor has no memory of its own. torch's versions of these methods would read or share
   the wrapper's missing storage, which ends the process.
3. `AutogradMixin`: gradients. The local tensors are on the tape, the wrapper never is.
4. `TorchNamesMixin`: torch's names for what a ShardedTensor has and does, with the meaning that DTensor gives them.
5. `CopiedView`: a view that had to be copied is what a view would be until the tensor it was taken from is written to.
   What is written to the copy is written to that tensor as well, where the engine knows how (`ops/views.py`).
6. Strides: by those of the whole tensor `contiguous()` and `reshape()` copy exactly where torch copies. A local tensor
   cannot answer this: some columns of the whole may be all that a rank has, and contiguous there. So a tensor that
   would not be contiguous as a whole has a note (`_dense_strides`), the same on every rank; one without is read as
   contiguous.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, is_grad_enabled

from shardwise._cache import cache_by_identity
from shardwise._torch import DisableTorchFunctionSubclass, is_dual_level, no_dispatch_modes, storage_identity
from shardwise.comm import Comm, agree
from shardwise.comm.current import find_device_mesh
from shardwise.geometry import Layout, LayoutError, MeshSpec, Placement, Replicate, Shard
from shardwise.tensor.dispatch import (
    UnsupportedOpError,
    find_wrapper,
    is_called_by_fully_shard,
    on_local_tensors,
    refuse_wrapper,
)
from shardwise.tensor.move import (
    NO_TANGENT,
    Move,
    dual_layout,
    format_layout_text,
    gradient_of_addends,
    gradient_of_whole,
    has_copies,
    replicated_layout,
    tape_inputs,
    with_moved_gradient,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Versions = tuple[int, ...]


_WRITES = "shardwise_writes"


def _count_writes(tensors: Sequence[Tensor]) -> Versions:
    return tuple(t.untyped_storage().__dict__.get(_WRITES, 0) if t.is_inference() else t._version for t in tensors)


def count_inference_write(local: Tensor) -> None:
    """Count a write to a local tensor of inference mode, for which torch keeps no version."""
    if local.is_inference():
        notes = local.untyped_storage().__dict__
        notes[_WRITES] = notes.get(_WRITES, 0) + 1


@dataclass(slots=True, eq=False)
class CopiedView:
    """What a copy was taken from, and how often that had been written to then.

    Local tensors share their count of writes with all their views and with what they are detached from. They are kept
    as long as the copy is, as torch keeps the memory of a view's base. `behind` is what the source was copied from.
    `write` writes the copy, whose local tensors are `parts`, to the source; `siblings` were taken with it and do not
    overlap.
    """

    name: str
    sources: tuple[Tensor, ...]
    versions: Versions
    behind: CopiedView | None = None
    write: Callable[[], None] | None = None
    parts: tuple[Tensor, ...] = ()
    written: Versions = ()
    siblings: tuple[CopiedView, ...] = ()

    @classmethod
    def of(cls, name: str, sources: Sequence[Tensor], behind: CopiedView | None = None) -> CopiedView:
        counted = tuple(local.detach() for local in sources)
        return cls(name, counted, _count_writes(counted), behind)

    def allow_writes(self, parts: tuple[Tensor, ...], write: Callable[[], None]) -> None:
        """Let what is written to these local tensors be written to the source by a function."""
        self.parts, self.written, self.write = parts, _count_writes(parts), write

    def check(self) -> None:
        """Raise if the copy is out of date."""
        if self.behind is not None:
            self.behind.check()
        if self.versions != _count_writes(self.sources):
            raise UnsupportedOpError(
                f"{self.name} was copied and shares no memory with the tensor it was taken from, which was written to "
                "since, so it is out of date; take it again, or clone() it at once if the old values are meant"
            )

    def write_back(self) -> None:
        """Write the copy to its source, if it was written to."""
        if self.write is None or self.written == _count_writes(self.parts):
            return
        fresh = [view for view in (self, *self.siblings) if view.versions == _count_writes(view.sources)]
        self.write()
        self.written = _count_writes(self.parts)
        for view in fresh:
            view.versions = _count_writes(view.sources)


class _WritesToCopies(threading.local):
    on: bool = False


_writes_to_copies = _WritesToCopies()


@contextmanager
def allow_writes_to_copies() -> Iterator[None]:
    """A context after which the caller writes copies back that were written to in it."""
    before, _writes_to_copies.on = _writes_to_copies.on, True
    try:
        yield
    finally:
        _writes_to_copies.on = before


def is_written_back(view: CopiedView | None) -> bool:
    """Whether a write to a copy, made now, will be written to its source."""
    return _writes_to_copies.on and view is not None and view.write is not None


Strides = tuple[int, ...]


def make_stand_in(shape: Sequence[int], strides: Strides | None, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that has the shape and strides of a whole tensor; None stands for contiguous."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


def has_format(
    shape: Sequence[int], strides: Strides | None, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Whether a whole tensor with these strides is contiguous, in the sense of a memory format.

    >>> has_format((2, 3), None), has_format((2, 3), (1, 2)), has_format((2, 3), (9, 1))
    (True, False, False)
    """
    if strides is None and memory_format is torch.contiguous_format:
        return True
    with no_dispatch_modes():
        return make_stand_in(shape, strides, torch.uint8).is_contiguous(memory_format=memory_format)


def find_strides(made: Tensor) -> Strides | None:
    """The note for a whole tensor of which this is the stand-in."""
    return None if made.is_contiguous() else tuple(made.stride())


def copy_strides(shape: Sequence[int], strides: Strides | None, memory_format: torch.memory_format) -> Strides | None:
    """The note for a copy, in a memory format, of a whole tensor with these strides."""
    with no_dispatch_modes():
        return find_strides(make_stand_in(shape, strides, torch.uint8).clone(memory_format=memory_format))


def can_view(shape: Sequence[int], strides: Strides | None, size: Sequence[int]) -> bool:
    """Whether torch views a whole tensor with these strides in another shape, instead of copying it.

    >>> can_view((2, 3), (1, 2), (6,)), can_view((2, 3), (9, 1), (2, 1, 3))
    (False, True)
    """
    if strides is None:
        return True
    try:
        with no_dispatch_modes():
            make_stand_in(shape, strides, torch.uint8).view(tuple(size))
    except RuntimeError:
        return False
    return True


def copy_if_shared(local: Tensor, source: Tensor) -> Tensor:
    """A tensor that shares no memory with another."""
    shared = storage_identity(local.untyped_storage()) == storage_identity(source.untyped_storage())
    return local.clone() if shared else local


class AttributesMixin(Tensor):
    """What ShardedTensor reports about itself. A rank without local tensors asks the wrapper."""

    sharding: Layout
    local_parts: tuple[Tensor, ...]
    _dense_strides: Strides | None
    _pinned_axes: frozenset[str]
    _copied_from: CopiedView | None

    if TYPE_CHECKING:  # what ShardedTensor, the only class that mixes these in, has

        def _like(self, layout: Layout, locals_: tuple[Tensor, ...], anchor: Tensor | None = None) -> Self: ...
        def _forget(self) -> None: ...
        def redistribute(self, target: Any, *, label: str = "redistribute") -> Any: ...
        def full(self) -> Tensor: ...

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # answered from the layout
        """The global shape."""
        return torch.Size(self.sharding.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]  # answered from the layout
        """The number of dims."""
        return len(self.sharding.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # answered from the local tensors
        """The type of the elements."""
        if self.local_parts:
            return self.local_parts[0].dtype
        with DisableTorchFunctionSubclass():  # which would ask for the dtype again
            return super().dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # answered from the local tensors
        """The device of this rank's local tensors."""
        return self.local_parts[0].device if self.local_parts else self._wrapper_device()

    def _wrapper_device(self) -> torch.device:
        """The device by which torch's layers (autocast) go: that of the ranks that have local tensors."""
        with DisableTorchFunctionSubclass():  # which would ask for the device again
            return super().device

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]  # never
        """Whether only some elements are stored: never."""
        return False

    def dim(self) -> int:
        """The number of dims."""
        return len(self.sharding.shape)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the length of one dim."""
        return torch.Size(self.sharding.shape) if dim is None else self.sharding.shape[dim]

    def numel(self) -> int:
        """The number of elements of the whole."""
        return self.sharding.numel


class MemoryOfWhole(torch.UntypedStorage):
    """The storage of a ShardedTensor: as long as the whole, and on no rank."""

    def data_ptr(self) -> int:
        """Refuse what writers of files ask for (safetensors, accelerate): they would write what is not there."""
        raise RuntimeError(
            "the whole of a ShardedTensor is in the memory of no rank, so it has no address, which safetensors and "
            "others that write files ask for; on every rank, call shardwise.save(state, path), "
            "model.save_pretrained(path) or save_state of shardwise.hf.ShardedAccelerator, or write x.full() on one"
        )


class LocalMemoryMixin(AttributesMixin):
    """What ShardedTensor does with the memory of its local tensors."""

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage that says how long the whole is, and has no address."""
        storage = super().untyped_storage()
        storage.__class__ = MemoryOfWhole
        return storage

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the local tensors are in pinned memory."""
        return bool(self.local_parts) and all(t.is_pinned() for t in self.local_parts)

    def pin_memory(self, device: Any = None) -> Self:
        """This tensor with its local tensors in pinned memory; itself if they are there already."""
        if not self.local_parts or self.is_pinned():
            return self
        return self._like(self.sharding, tuple(t.pin_memory() for t in self.local_parts))

    def _typed_storage(self) -> Any:
        """Refuse what FSDP of torch asks for: no rank has the memory of the whole."""
        name = find_wrapper()
        if name is not None:
            raise refuse_wrapper(name)
        return super()._typed_storage()  # type: ignore[no-untyped-call]  # untyped in torch

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the whole would be; to fully_shard of torch, which asks first, what to write instead of it."""
        if is_called_by_fully_shard():
            raise refuse_wrapper("fully_shard")
        return has_format(self.sharding.shape, self._dense_strides, memory_format)

    def stride(self, dim: int | None = None) -> Any:
        """The strides that the whole would have, or that of one dim."""
        found = self._dense_strides or make_stand_in(self.sharding.shape, None, self.dtype).stride()
        return found if dim is None else found[dim]

    def is_shared(self) -> bool:
        """Whether the local tensors are in memory that can be shared with other processes."""
        return bool(self.local_parts) and all(t.is_shared() for t in self.local_parts)  # type: ignore[no-untyped-call]  # untyped in torch

    def share_memory_(self) -> Self:
        """Move the local tensors to shared memory, in place."""
        for tensor in self.local_parts:
            tensor.share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def apply_(self, callable: Callable[[Any], Any]) -> Self:
        """Replace each element by what a Python function makes of it, in place; slow, as torch's is."""
        if self.sharding.pending is not None:
            raise ValueError(
                f"apply_ changes values, and this tensor stores addends of a pending {self.sharding.pending}; "
                "redistribute to Shard or Replicate first"
            )
        with torch.no_grad():
            for tensor in self.local_parts:
                tensor.apply_(callable)
        return self


class SumOfCopies:
    """A hook of a leaf that sums the gradients of copies: once in a backward pass, whatever the leaf was used for.

    Each rank computes with its own copy, so what it computes is an addend. Those of activations are never summed.
    """

    __torch_unserializable__ = True  # a local tensor is saved without it, and torch does not warn

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self.layout, self.comm = layout, comm

    @staticmethod
    def find(tensor: Tensor) -> SumOfCopies | None:
        """That of a local tensor, if it has one."""
        return next((h for h in (tensor._backward_hooks or {}).values() if isinstance(h, SumOfCopies)), None)

    @staticmethod
    def follow(tensor: Tensor, layout: Layout, comm: Comm) -> None:
        """Let the gradient of a leaf be that of its layout, which may be another one than before."""
        known = SumOfCopies.find(tensor)
        if known is not None:
            known.layout, known.comm = layout, comm
        elif has_copies(layout) and layout.pending is None:
            tensor.register_hook(SumOfCopies(layout, comm))  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, grad: Tensor) -> Tensor:
        layout, label = _spread_replicas(self.layout), "gradient of copies"
        move = Move.of(dual_layout(layout), layout, self.comm, grad.dtype, label, limit=None)
        given = grad.contiguous()
        held = given.reshape(move.in_shapes[0]) if move.in_shapes else given
        return move.run_gradients((held,))[0].reshape(grad.shape)


@cache_by_identity
def _spread_replicas(layout: Layout) -> Layout:
    """The layout with a dim for each axis of replicas, which it splits: each sums its copies by itself, and as much is
    sent as if there were no others."""
    spec = layout.spec
    assert isinstance(spec, MeshSpec)
    placements = list(spec.resolved(layout.shape).placements)
    axes = [a for a, p in enumerate(placements) if isinstance(p, Replicate)]
    spread = [p.along(p.dim + len(axes)) if isinstance(p, Shard) else p for p in placements]
    for dim, axis in enumerate(axes):
        spread[axis] = Shard(dim)
    shape = (*(spec.mesh.shape[a] for a in axes), *layout.shape)
    return MeshSpec(spec.mesh, spread, spec.order).layout(shape)


class AutogradMixin(AttributesMixin):
    """What ShardedTensor says about gradients. The wrapper itself is never on the tape."""

    sharding: Layout
    local_parts: tuple[Tensor, ...]
    comm: Comm
    _anchor: Tensor | None

    def _tape_tensors(self) -> tuple[Tensor, ...]:
        return self.local_parts or tape_inputs(self.local_parts, self._anchor, self.dtype, self.device)

    @property
    def requires_grad(self) -> bool:
        """Whether operations on this tensor are recorded."""
        return any(t.requires_grad for t in self._tape_tensors())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Record operations on this tensor, or stop doing so; in place."""
        if not self.local_parts and requires_grad and self._anchor is None:
            self._anchor = torch.empty(0, dtype=self.dtype, device=self.device)
        for tensor in self._tape_tensors():
            if tensor.requires_grad != requires_grad:  # torch.func refuses even what changes nothing
                tensor.requires_grad_(requires_grad)
            if requires_grad and tensor.is_leaf:
                SumOfCopies.follow(tensor, self.sharding, self.comm)
        self._forget()
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]  # answered from the local tensors
        """Whether this tensor was not computed from others on the tape."""
        return all(t.is_leaf for t in self._tape_tensors())

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]  # answered from the local tensors
        """The tape's node of the first local tensor; of a result of a `torch.autograd.Function`, that of the whole."""
        found, whole = self._tape_tensors()[0].grad_fn, self.__dict__.get("_function_node")
        return found if whole is None or whole.local is not found else whole

    @property
    def grad(self) -> Self | None:
        """The gradient of the value, in the dual layout, or None.

        A pending sum or average has a replicated gradient: that of the value to which its addends reduce.
        """
        if len(self.local_parts) == 1 and self.sharding.pending is None:
            own = self.local_parts[0]
            if self.sharding.spec.of_addends() is None or SumOfCopies.find(own) is not None:
                if (grad := own.grad) is None:
                    return None
                known: Self | None = self.__dict__.get("_known_gradient")  # optimizers ask for it again and again
                if known is None or known.local_parts[0] is not grad or known.sharding is not self.sharding:
                    known = self.__dict__["_known_gradient"] = self._like(self.sharding, (grad,))
                return known
        grads = tuple(t.grad for t in self._tape_tensors())
        if any(g is None for g in grads):
            return None
        return self._gradient(tuple(g for g in grads if g is not None))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.__dict__.pop("_known_gradient", None)
            for tensor in self._tape_tensors():
                tensor.grad = None
            return
        self._check_gradient(value, self._gradient_layout)
        assert isinstance(value, AutogradMixin)
        if self._anchor is not None:
            self._anchor.grad = torch.zeros_like(self._anchor)
        for tensor, grad in zip(self.local_parts, value.local_parts, strict=True):
            tensor.grad = grad if self._divisor == 1 else grad / self._divisor

    def _gradient(self, grads: tuple[Tensor, ...]) -> Self:
        """The gradients of the tensors on the tape put together."""
        whole = gradient_of_whole(self.sharding, grads, self.comm)
        scaled = tuple(g * self._divisor for g in whole) if self._divisor > 1 else whole
        return self._from_tape(self._gradient_layout, scaled, bool(self.local_parts))

    @property
    def _gradient_layout(self) -> Layout:
        """That of the gradient as it is shown: the copies of a leaf have equal ones, since they were summed."""
        if SumOfCopies.find(self._tape_tensors()[0]) is not None:
            return self.sharding
        return dual_layout(self.sharding)

    def _from_tape(self, layout: Layout, taped: tuple[Tensor, ...], has_parts: bool) -> Self:
        """A tensor like this one from what represents it on this rank's tape: local tensors, or an anchor."""
        return self._like(layout, taped) if has_parts else self._like(layout, (), taped[0])

    @property
    def _divisor(self) -> int:
        """What the gradient of a local tensor is divided by, compared with that of the value: pending averages are."""
        return self.sharding.pending.divisor if self.sharding.pending else 1

    def _check_gradient(self, value: Tensor, layout: Layout) -> None:
        if not isinstance(value, AutogradMixin) or value.sharding != layout:
            found = format_layout_text(value.sharding) if isinstance(value, AutogradMixin) else type(value).__name__
            wanted = format_layout_text(layout)
            advice = "redistribute it" if isinstance(value, AutogradMixin) else f"pass shard(t, '{wanted}')"
            raise ValueError(f"the gradient has the layout {wanted}, got {found}; {advice}")

    @property
    def data(self) -> Self:
        """The same values off the tape; assigning another ShardedTensor sets its values and its layout."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, AutogradMixin):
            raise TypeError(
                f"the data of a ShardedTensor is a ShardedTensor, got {type(value).__name__}; use shard(t, spec) or "
                "copy_(t)"
            )
        keep = self.requires_grad
        if keep and not self.is_leaf:
            moved: Self = value.redistribute(self.sharding, label="data")  # the tape knows the local tensors' shapes
            value = moved
        if len(self.local_parts) == len(value.local_parts):
            for own, new in zip(self.local_parts, value.local_parts, strict=True):
                own.data = new.detach()  # the very tensor stays: optimizers and hooks know it
        else:
            self.local_parts, self._anchor = tuple(t.detach() for t in value.local_parts), None
        with DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape and dtype that torch's own code sees
        self.sharding, self._dense_strides = value.sharding, value._dense_strides
        self.__dict__.pop("_varied", None)
        self._forget()
        self.requires_grad_(keep)

    def set_(self, source: Tensor, *memory: Any) -> Self:  # type: ignore[override]  # torch has several forms
        """The values, memory and layout of another ShardedTensor: how parametrizations of modules put a parameter."""
        if memory:
            raise TypeError("set_ of a ShardedTensor takes another ShardedTensor, and no offset, size or strides")
        self.data = source.detach()
        return self

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Compute gradients; every rank calls it. `gradient` may be left out for a tensor of one element."""
        given = (inputs,) if isinstance(inputs, Tensor) else inputs
        leaves = None if given is None else [t for one in given for t in tape_tensors(one)]
        torch.autograd.backward(self._tape_tensors(), self._seed(gradient), retain_graph, create_graph, inputs=leaves)

    def _seed(self, gradient: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients of the local tensors that a gradient of the whole means."""
        divisor = self._divisor
        if gradient is None:
            if self.numel() != 1:
                raise RuntimeError(
                    f"grad can be implicitly created only for scalar outputs; this has shape {tuple(self.shape)}"
                )
            return tuple(torch.full_like(t, 1.0 / divisor) for t in self._tape_tensors())
        if not isinstance(gradient, AutogradMixin):
            gradient = self._like(replicated_layout(tuple(self.shape), self.comm.ranks), (gradient,))
        held = gradient.redistribute(dual_layout(self.sharding), label="backward")
        own = gradient_of_addends(self.sharding, held._tape_tensors(), self.comm)
        return own if divisor == 1 else tuple(t / divisor for t in own)

    def register_hook(self, hook: Callable[[Self], Self | None]) -> Any:
        """Call `hook(grad)` when the gradient is computed; what it returns takes the gradient's place."""

        alike, has_parts = self._like(self.sharding, ()), bool(self.local_parts)  # a hook that had `self` were a cycle
        layout = self._gradient_layout

        def on_local(grad: Tensor | None) -> Tensor | None:
            if grad is None:  # as torch gives it where second derivatives are zero
                changed = cast(Callable[[None], Self | None], hook)(None)
            else:
                scaled = grad if alike._divisor == 1 else grad * alike._divisor
                changed = hook(alike._from_tape(layout, (scaled,), has_parts))
            if changed is None:
                return None
            alike._check_gradient(changed, layout)
            own = changed._tape_tensors()[0]
            return own if alike._divisor == 1 else own / alike._divisor

        return self._only_one_on_tape("register_hook").register_hook(on_local)  # type: ignore[no-untyped-call]  # untyped in torch

    def register_post_accumulate_grad_hook(self, hook: Callable[[Self], None]) -> Any:
        """Call `hook(self)` when the gradient of this leaf has been added up."""
        one = self._only_one_on_tape("register_post_accumulate_grad_hook")
        held = weakref.ref(self)  # a hook that had `self` were a cycle

        def on_local(_: Tensor) -> None:
            if (found := held()) is not None:
                hook(found)

        return one.register_post_accumulate_grad_hook(on_local)  # type: ignore[no-untyped-call]  # untyped in torch

    def _only_one_on_tape(self, name: str) -> Tensor:
        table = self.sharding.table
        if int(table.slots.max(initial=0)) > 0:
            rank = int(table.ranks[table.slots.argmax()])
            where = f"rank {rank} has {len(self.sharding.local_shapes(rank))}"
            raise NotImplementedError(f"{name} needs one local tensor on each rank, and {where}; use local_tensors()")
        return self._tape_tensors()[0]

    def retain_grad(self) -> None:
        """Keep the gradient although this is not a leaf."""
        for tensor in self._tape_tensors():
            tensor.retain_grad()

    def detach(self) -> Self:
        """The same values off the tape; the local tensors share their memory."""
        made = self._like(self.sharding, tuple(t.detach() for t in self.local_parts))
        if self._dense_strides is not None or self._copied_from is not None:
            made._dense_strides, made._copied_from = self._dense_strides, self._copied_from
        if self._pinned_axes:
            made._pinned_axes = self._pinned_axes
        if is_dual_level():
            made.__dict__[NO_TANGENT] = True
        return made

    def _note_copied_strides(self, strides: Strides | None, memory_format: torch.memory_format) -> None:
        """Note which strides the whole would have as a copy, in a memory format, of a tensor with these strides."""
        if strides is not None or memory_format not in (torch.preserve_format, torch.contiguous_format):
            self._dense_strides = copy_strides(self.sharding.shape, strides, memory_format)

    def detach_(self) -> Self:
        """Take this tensor off the tape, in place; the local tensors share their memory with those before."""
        self.local_parts, self._anchor = tuple(t.detach() for t in self.local_parts), None
        self.__dict__.pop("_varied", None)
        self._forget()
        return self

    @on_local_tensors
    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Self:  # type: ignore[override]  # ours
        """A copy; differentiable."""
        if self._copied_from is not None:
            self._copied_from.check()
        anchor = None if self._anchor is None else self._anchor.clone()
        copies = tuple(t.clone(memory_format=memory_format) for t in self.local_parts)
        made = self._like(self.sharding, copies, anchor)
        made._note_copied_strides(self._dense_strides, memory_format)
        return made


def tape_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that represent a tensor on this rank's tape: a plain one represents itself."""
    return tensor._tape_tensors() if isinstance(tensor, AutogradMixin) else (tensor,)


class TorchNamesMixin(AttributesMixin):
    """`placements`, `device_mesh`, `to_local` and `full_tensor`."""

    comm: Comm
    _anchor: Tensor | None

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """What each mesh axis does, or None for layouts without a mesh.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.ones(4), "on dp=1,tp=2: R, S(0)").placements, 2)[0]
        (Replicate(), Shard(0))
        """
        spec = self.sharding.spec
        return spec.placements if isinstance(spec, MeshSpec) else None

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's DeviceMesh of this tensor's ranks; `sharding.spec.mesh` is ours, which needs no process group.

        The one that the tensor came from, else one is made: then every rank of the world has to ask.

        >>> import torch.distributed as dist
        >>> from shardwise import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard(torch.ones(4), "tp: S(0)").device_mesh.mesh_dim_names
        ('tp',)
        >>> dist.destroy_process_group()
        """
        return find_device_mesh(self._mesh_spec("device_mesh").mesh, self.device.type, self.comm)

    def _mesh_spec(self, name: str) -> MeshSpec:
        spec = self.sharding.spec
        if not isinstance(spec, MeshSpec):
            raise LayoutError(
                f"{name} needs a mesh, and this tensor is laid out by {spec!r}; redistribute it to a MeshSpec first"
            )
        return spec

    @on_local_tensors
    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's local tensor, on the tape; a tensor without elements where the rank has none.

        Gradients that reach it are read as those of this layout (the whole gradient of a replicated tensor, and of a
        pending sum). If each rank computes something else with it, they are in another one: `grad_placements` names it,
        as in `to_local(grad_placements=[Partial()])` for addends. `local_tensors()` returns several.

        >>> import torch
        >>> from shardwise.comm import run_local
        >>> from shardwise.geometry import Mesh, Partial
        >>> from shardwise.tensor import shard
        >>> def body(comm):
        ...     x = shard(torch.ones(2), MeshSpec(Mesh.of(dp=2), (Replicate(),))).requires_grad_()
        ...     (x.to_local(grad_placements=[Partial()]) * (comm.rank + 1)).sum().backward()
        ...     return x.grad.full().tolist()
        >>> run_local(body, 2)[0]
        [3.0, 3.0]
        """
        if len(self.local_parts) > 1:
            raise NotImplementedError(
                f"to_local() is for one local tensor, and rank {self.comm.rank} has {len(self.local_parts)}; use "
                "local_tensors() or local_shards()"
            )
        local = tape_inputs(self.local_parts, self._anchor, self.dtype, self.device)[0]
        if grad_placements is None:
            return local
        layout = MeshSpec(self._mesh_spec("grad_placements").mesh, grad_placements).layout(self.sharding.shape)
        agree(self.comm, {"grad_placements": format_layout_text(layout)}, label="to_local")
        dual = dual_layout(self.sharding)
        if layout == dual or not is_grad_enabled() or not local.requires_grad:
            return local
        return with_moved_gradient(
            Move.of(layout, dual, self.comm, self.dtype, "gradient of to_local", limit=None), local
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor on every rank, as `full()`; `grad_placements` as for `to_local`.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.arange(4), "tp: S(0)").full_tensor(), 2)[1]
        tensor([0, 1, 2, 3])
        """
        if grad_placements is None:
            whole: Tensor = self.full()
            return whole
        mesh = self._mesh_spec("grad_placements").mesh
        spread = self.redistribute(MeshSpec(mesh, (Replicate(),) * mesh.ndim), label="full_tensor")
        local: Tensor = spread.to_local(grad_placements=grad_placements)
        return local.clone() if any(local is own for own in self.local_parts) else local
