"""What a ShardedTensor answers from its local tensors: shape and dtype, memory, gradients.

1. `AttributesMixin`: shape, dtype and device, without a detour through torch's function protocol. Models ask for them
   at every step; from the layout and the local tensors the answer takes a tenth of the time.
2. `LocalMemoryMixin`: a ShardedTensor has no memory of its own. torch's versions of these methods would read or share
   the wrapper's missing storage, which ends the process.
3. `AutogradMixin`: gradients. The local tensors are on the tape, the wrapper never is.

Torch's names for what a ShardedTensor has and does, with the meaning that DTensor gives them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, is_grad_enabled

from shardwise._torch import DisableTorchFunctionSubclass, is_dual_level
from shardwise.comm import Comm, agree
from shardwise.comm.current import find_device_mesh
from shardwise.geometry import Layout, LayoutError, MeshSpec, Placement, Replicate
from shardwise.tensor.dispatch import find_wrapper, is_called_by_fully_shard, on_local_tensors, refuse_wrapper
from shardwise.tensor.move import (
    NO_TANGENT,
    Move,
    dual_layout,
    format_layout_text,
    gradient_of_addends,
    gradient_of_whole,
    replicated_layout,
    tape_inputs,
    with_moved_gradient,
)
from shardwise.tensor.views import CopiedView, Strides, copy_strides, has_format, make_stand_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class AttributesMixin(Tensor):
    """What ShardedTensor reports about itself. A rank without local tensors asks the wrapper."""

    sharding: Layout
    local_parts: tuple[Tensor, ...]
    _dense_strides: Strides | None
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
        return self.local_parts[0].dtype if self.local_parts else super().dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # answered from the local tensors
        """The device of this rank's local tensors."""
        return self.local_parts[0].device if self.local_parts else super().device

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


class LocalMemoryMixin(AttributesMixin):
    """What ShardedTensor does with the memory of its local tensors."""

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
            return self._only_gradient(self.local_parts[0].grad)
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
        self._check_gradient(value)
        assert isinstance(value, AutogradMixin)
        if self._anchor is not None:
            self._anchor.grad = torch.zeros_like(self._anchor)
        for tensor, grad in zip(self.local_parts, value.local_parts, strict=True):
            tensor.grad = grad if self._divisor == 1 else grad / self._divisor

    def _only_gradient(self, grad: Tensor | None) -> Self | None:
        """The gradient of one local tensor, the same object until it changes: optimizers ask for it again and again."""
        if grad is None:
            return None
        known: Self | None = self.__dict__.get("_known_gradient")
        if known is None or known.local_parts[0] is not grad or known.sharding is not self.sharding:
            known = self.__dict__["_known_gradient"] = self._like(self.sharding, (grad,))
        return known

    def _gradient(self, grads: tuple[Tensor, ...]) -> Self:
        """The gradients of the tensors on the tape put together."""
        whole = gradient_of_whole(self.sharding, grads, self.comm) if self.local_parts else ()
        return self._like(
            dual_layout(self.sharding), tuple(g * self._divisor for g in whole) if self._divisor > 1 else whole
        )

    @property
    def _divisor(self) -> int:
        """What the gradient of a local tensor is divided by, compared with that of the value: pending averages are."""
        return self.sharding.pending.divisor if self.sharding.pending else 1

    def _check_gradient(self, value: Tensor) -> None:
        if not isinstance(value, AutogradMixin) or value.sharding != dual_layout(self.sharding):
            found = format_layout_text(value.sharding) if isinstance(value, AutogradMixin) else type(value).__name__
            raise ValueError(
                f"the gradient has the layout {format_layout_text(dual_layout(self.sharding))}, got {found}; "
                "redistribute it"
            )

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
        held = gradient.redistribute(dual_layout(self.sharding), label="backward").local_parts
        if not self.local_parts:
            return tuple(torch.zeros_like(t) for t in self._tape_tensors())
        own = gradient_of_addends(self.sharding, held, self.comm)
        return own if divisor == 1 else tuple(t / divisor for t in own)

    def register_hook(self, hook: Callable[[Self], Self | None]) -> Any:
        """Call `hook(grad)` when the gradient is computed; what it returns takes the gradient's place."""

        alike, has_parts = self._like(self.sharding, ()), bool(self.local_parts)  # a hook that had `self` were a cycle

        def on_local(grad: Tensor) -> Tensor | None:
            scaled = grad if alike._divisor == 1 else grad * alike._divisor
            changed = hook(alike._like(dual_layout(alike.sharding), (scaled,) if has_parts else ()))
            if changed is not None:
                alike._check_gradient(changed)
            if changed is None or not has_parts:
                return None
            return changed.local_parts[0] if alike._divisor == 1 else changed.local_parts[0] / alike._divisor

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
        tape = self._tape_tensors()
        if len(tape) != 1:
            raise NotImplementedError(
                f"{name} needs one local tensor on each rank, this one has {len(tape)}; use local_tensors()"
            )
        return tape[0]

    def retain_grad(self) -> None:
        """Keep the gradient although this is not a leaf."""
        for tensor in self._tape_tensors():
            tensor.retain_grad()

    def detach(self) -> Self:
        """The same values off the tape; the local tensors share their memory."""
        made = self._like(self.sharding, tuple(t.detach() for t in self.local_parts))
        if self._dense_strides is not None or self._copied_from is not None:
            made._dense_strides, made._copied_from = self._dense_strides, self._copied_from
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
        """What each mesh axis does, or None for layouts without a mesh."""
        spec = self.sharding.spec
        return spec.placements if isinstance(spec, MeshSpec) else None

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's DeviceMesh of this tensor's ranks; `sharding.spec.mesh` is ours, which needs no process group.

        The one that the tensor came from, else one is made: then every rank of the world has to ask.
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
        """The whole tensor on every rank, as `full()`; `grad_placements` as for `to_local`."""
        if grad_placements is None:
            whole: Tensor = self.full()
            return whole
        mesh = self._mesh_spec("grad_placements").mesh
        spread = self.redistribute(MeshSpec(mesh, (Replicate(),) * mesh.ndim), label="full_tensor")
        local: Tensor = spread.to_local(grad_placements=grad_placements)
        return local.clone() if any(local is own for own in self.local_parts) else local
