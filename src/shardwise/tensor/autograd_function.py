"""How does a `torch.autograd.Function` apply to ShardedTensors, which are not on the tape?

1. Its forward runs on the ShardedTensors, unrecorded. Then one node over the local tensors of all arguments is put on
   the tape. The node's backward puts local gradients together to ShardedTensors, calls the Function's own backward, and
   takes the results apart again. What the Function saves is saved as local tensors, by torch, so that hooks see it.
2. Torch calls `Function.apply` without asking the types of its arguments. So `torch.autograd.Function` gets an `apply`
   that asks, for the Functions of all programs and libraries; `register_autograd_function` gives one to a Function of
   torch itself. Those for hooks of modules and for activation checkpointing are registered.
3. Checkpointed code that is computed again gets its arguments from saved tensors: also from local ones.

Forward-mode differentiation: the tangents of a ShardedTensor are those of its local tensors.

1. `make_dual` gives each local tensor its part of the tangent, which is moved to the layout of the value first.
2. While dual numbers are in use, functions take no shortcut, rules choose as they do for tensors that are
   differentiated, and moves carry tangents (`autograd.py`).
3. `unpack_dual` puts the tangents together. Ranks agree on whether there are any.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise._cache import cached
from shardwise._text import public
from shardwise._torch import (
    BackwardHookFunction,
    CheckpointFunction,
    forward_ad,
    is_batched_tensor,
    is_tracing,
    make_dual_function,
    replace_checkpoint_generator,
    unpack_dual_function,
)
from shardwise._tree import map_nest
from shardwise.comm import Comm
from shardwise.comm.stand_in import compute_region_again, splits_backward
from shardwise.geometry import Layout, MeshSpec, Replicate
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.move import (
    any_rank_has_tangents,
    dual_layout,
    gradient_of_addends,
    gradient_of_whole,
    move_to,
    replicated_layout,
)
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

F = TypeVar("F", bound=type[torch.autograd.Function])


@dataclass(frozen=True, slots=True)
class _Frame:
    """What remains of a ShardedTensor without its data: how many tensors it has on the tape, and how to use them."""

    layout: Layout
    comm: Comm
    dtype: torch.dtype
    device: torch.device
    kind: type[ShardedTensor]

    @staticmethod
    def of(tensor: ShardedTensor) -> _Frame:
        return _Frame(tensor.sharding, tensor.comm, tensor.dtype, tensor.device, type(tensor))

    @property
    def parts(self) -> int:
        return len(self.layout.local_shapes(self.comm.rank))

    @property
    def divisor(self) -> int:
        return self.layout.pending.divisor if self.layout.pending else 1

    def fill(self, tape: Sequence[Tensor]) -> ShardedTensor:
        """The tensor again, over tensors that are on the tape; on a rank without data that is its anchor."""
        held = tuple(tape) if self.parts else ()
        anchor = None if held or not tape[0].requires_grad else tape[0]
        made = (self.layout, held, self.comm)
        return wrap(*made, dtype=self.dtype, device=self.device, anchor=anchor, cls=self.kind)

    def join_gradients(self, grads: Sequence[Tensor | None]) -> ShardedTensor | None:
        """The gradient of the value, from those of the tensors on the tape."""
        if all(g is None for g in grads):
            return None
        shapes = self.layout.local_shapes(self.comm.rank)
        zeros = (torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        known = tuple(zero if g is None else g for g, zero in zip(grads, zeros, strict=False))
        whole = gradient_of_whole(self.layout, known, self.comm) if known else ()
        scaled = whole if self.divisor == 1 else tuple(g * self.divisor for g in whole)
        return wrap(dual_layout(self.layout), scaled, self.comm, dtype=self.dtype, device=self.device, cls=self.kind)

    def split_gradient(self, gradient: Any) -> tuple[Tensor | None, ...]:
        """The reverse; a gradient in another layout is moved, a plain one is the same on every rank."""
        if gradient is None:
            return (None,) * max(1, self.parts)
        if not isinstance(gradient, ShardedTensor):
            gradient = wrap(replicated_layout(self.layout.shape, self.comm.ranks), (gradient,), self.comm)
        wanted = dual_layout(self.layout)
        if gradient.sharding != wanted:
            gradient = gradient.redistribute(wanted, label="gradient of an autograd function")
        if not self.parts:
            return (torch.zeros(0, dtype=self.dtype, device=self.device),)
        own = gradient_of_addends(self.layout, gradient.local_parts, self.comm)
        return own if self.divisor == 1 else tuple(g / self.divisor for g in own)


class _Flattened:
    """Values taken apart: the tensors on the tape of all of them, and what is needed to put the values together."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.frames = [_Frame.of(v) if isinstance(v, ShardedTensor) else None for v in values]
        self.counts = [_count_on_tape(v) for v in values]

    def values(self, tape: Sequence[Any]) -> list[Any]:
        """The values over these tensors; None for those that are not tensors."""
        return [
            taken[0] if taken and frame is None else frame.fill(taken) if frame is not None else None
            for frame, taken in self._take(tape)
        ]

    def join_gradients(self, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """One gradient for each value."""
        return tuple(
            frame.join_gradients(taken) if frame is not None else (taken[0] if taken else None)
            for frame, taken in self._take(grads)
        )

    def split_gradients(self, gradients: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors on the tape, from one for each value."""
        found: list[Tensor | None] = []
        for frame, count, gradient in zip(self.frames, self.counts, gradients, strict=True):
            if frame is not None:
                found += frame.split_gradient(gradient)
            elif count:
                found.append(gradient.full() if isinstance(gradient, ShardedTensor) else gradient)
        return tuple(found)

    def _take(self, tape: Sequence[Any]) -> list[tuple[_Frame | None, list[Any]]]:
        rest = iter(tape)
        return [(frame, list(islice(rest, count))) for frame, count in zip(self.frames, self.counts, strict=True)]


def _count_on_tape(value: Any) -> int:
    if isinstance(value, ShardedTensor):
        return max(1, len(value.local_parts))
    return int(isinstance(value, Tensor))


def _tape_of(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found += value._tape_tensors() if isinstance(value, ShardedTensor) else (value,)
    return found


class FunctionContext:
    """The `ctx` of a Function's forward and backward."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self._materialize, self._constant = True, set[int]()
        self._written: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for the backward pass."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Whether missing gradients are passed as zeros."""
        self._materialize = value

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Say which outputs have no gradient."""
        self._constant |= set(map(id, outputs))

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Say which arguments were written to; they are among the outputs."""
        self._written = tensors


@dataclass(slots=True)
class _FunctionCall:
    """One call of a Function: what it was applied to, what it returned, what it saved, all without data."""

    function: Any
    context: FunctionContext
    inputs: _Flattened
    outputs: _Flattened
    saved: _Flattened
    several: bool
    tape: list[Tensor] | None
    constant: list[Tensor] | None
    written: list[Tensor] | None
    kept: list[Tensor] | None


class FunctionNode:
    """What `grad_fn` is of the result of a Function: its hooks take and return gradients of whole tensors."""

    def __init__(self, local: Any, call: _FunctionCall) -> None:
        self.local, self._call = local, call

    def name(self) -> str:
        """The name of the node."""
        return str(self.local.name())

    @property
    def next_functions(self) -> Any:
        """The nodes of this rank's tape from which the arguments came."""
        return self.local.next_functions

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Call `hook(grad_inputs, grad_outputs)` when the node has run; what it returns replaces the former."""
        inputs, outputs = self._call.inputs, self._call.outputs
        tensors = [i for i, count in enumerate(inputs.counts) if count]

        def on_locals(grad_inputs: Any, grad_outputs: Any) -> Any:
            given = inputs.join_gradients(grad_inputs)
            changed = hook(tuple(given[i] for i in tensors), outputs.join_gradients(grad_outputs))
            if changed is None:
                return None
            by_number = dict(zip(tensors, changed, strict=True))
            return inputs.split_gradients([by_number.get(i) for i in range(len(given))])

        return self.local.register_hook(on_locals)


class _LocalNode(torch.autograd.Function):
    """The node on this rank's tape."""

    @staticmethod
    def forward(ctx: Any, call: _FunctionCall, *tape: Tensor) -> tuple[Tensor, ...]:
        assert call.tape is not None and call.constant is not None
        assert call.written is not None and call.kept is not None
        ctx.call, results = call, tuple(call.tape)
        ctx.save_for_backward(*call.kept)
        ctx.set_materialize_grads(call.context._materialize)
        ctx.mark_non_differentiable(*call.constant)
        ctx.mark_dirty(*call.written)
        call.tape = call.constant = call.written = call.kept = None  # else the node would keep its own results alive
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _FunctionCall = ctx.call
        call.context.saved_tensors = tuple(call.saved.values(ctx.saved_tensors))
        gradients = call.outputs.join_gradients(grads)
        try:
            found = call.function.backward(call.context, *gradients)
        except UnsupportedOpError as error:
            _warn_of_gathering(call.function, "backward", str(error))
            kept = dict(vars(call.context))
            vars(call.context).update({name: map_nest(_take_whole, value) for name, value in kept.items()})
            found = call.function.backward(call.context, *map(_take_whole, gradients))
            vars(call.context).update(kept)  # the graph may be kept for another pass
        finally:
            call.context.saved_tensors = ()
        listed = found if isinstance(found, tuple | list) else (found,)
        return None, *call.inputs.split_gradients(listed)


@cached()
def _local_node_of(function: Any) -> Any:
    """The class of the node, under the Function's name: torch asks nodes for it."""
    return type(function.__name__, (_LocalNode,), {})


def apply_to_sharded(function: Any, args: Sequence[Any], original: Callable[..., Any]) -> Any:
    """What `function.apply(*args)` means for ShardedTensors: on them where its forward can, else on whole tensors."""
    before = _count_versions(_tape_of(args))
    try:
        return _apply_in_parts(function, args)
    except UnsupportedOpError as error:  # no rule, or a plain tensor that the forward made beside sharded ones
        if before != _count_versions(_tape_of(args)):
            raise UnsupportedOpError(f"{_WRITES}; {error}") from None
        reason = str(error)
    _warn_of_gathering(function, "forward", reason)
    first = next(a for a in args if isinstance(a, ShardedTensor))
    whole = list(map(_take_whole, args))
    versions = [a._version if isinstance(a, Tensor) else 0 for a in whole]
    results = original(*whole)
    if versions != [a._version if isinstance(a, Tensor) else 0 for a in whole]:
        raise UnsupportedOpError(_WRITES)

    def replicate_on_mesh(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
            return value
        spec = first.sharding.spec
        if isinstance(spec, MeshSpec) and set(spec.mesh.ranks.reshape(-1).tolist()) == set(first.comm.ranks):
            layout = MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim).layout(tuple(value.shape))
        else:
            layout = replicated_layout(tuple(value.shape), first.comm.ranks)
        return wrap(layout, (value,), first.comm)

    return map_nest(replicate_on_mesh, results)


def _count_versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors]


def _warn_of_gathering(function: Any, part: str, reason: str) -> None:
    if _WARNED not in vars(function):
        setattr(function, _WARNED, True)
        warnings.warn(
            f"the {part} of {function.__name__} does not take ShardedTensors: they are gathered, and every rank "
            f"computes the whole: {reason}",
            stacklevel=4,
        )


def _take_whole(value: Any) -> Any:
    return value.full() if isinstance(value, ShardedTensor) else value


def _apply_in_parts(function: Any, args: Sequence[Any]) -> Any:
    """The Function on the ShardedTensors themselves, and one node for its backward."""
    taken = [_tape_of([a]) for a in args]
    needed = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
    context = FunctionContext(needed)
    recorded = torch.is_grad_enabled() and any(needed)
    with torch.no_grad():
        results = _run_forward(function, context, args)
    written = [(a, held) for a, held in zip(args, taken, strict=True) if any(a is w for w in context._written)]
    for tensor, held in written:
        if isinstance(tensor, ShardedTensor):
            tensor.__dict__.pop("_varied", None)
            tensor._anchor = tensor._anchor if tensor.local_parts or not recorded else held[0]
    if not recorded:
        return results
    several = isinstance(results, tuple | list)
    listed = list(results) if several else [results]
    kept = [t for t in context.saved_tensors if isinstance(t, Tensor)]
    call = _FunctionCall(
        function,
        context,
        _Flattened(args),
        _Flattened(listed),
        _Flattened(context.saved_tensors),
        several,
        _tape_of(listed),
        _tape_of([r for r in listed if id(r) in context._constant]),
        [t for _, held in written for t in held],
        _tape_of(kept),
    )
    context.saved_tensors = ()
    outputs = _local_node_of(function).apply(call, *(t for held in taken for t in held))
    return _wrap_outputs(call, listed, outputs, [tensor for tensor, _ in written])


def _run_forward(function: Any, context: FunctionContext, args: Sequence[Any]) -> Any:
    if function.setup_context is torch.autograd.Function.setup_context:
        return function.forward(context, *args)
    results = function.forward(*args)
    function.setup_context(context, tuple(args), results)
    return results


def _wrap_outputs(
    call: _FunctionCall, given: Sequence[Any], outputs: Sequence[Tensor], written: Sequence[Tensor]
) -> Any:
    """The results on the tape; a tensor that was written to is returned itself."""
    node = next((t.grad_fn for t in outputs if t.grad_fn is not None), None)
    made = [
        v if isinstance(g, Tensor) and not any(g is w for w in written) else g
        for v, g in zip(call.outputs.values(outputs), given, strict=True)
    ]
    for value in made:
        if isinstance(value, ShardedTensor) and value.requires_grad:
            value.__dict__["_function_node"] = FunctionNode(node, call)
    return tuple(made) if call.several else made[0]


_WRITES = (
    "a torch.autograd.Function that writes to a ShardedTensor uses operators of ShardedTensors only, and calls "
    "ctx.mark_dirty; return a new tensor instead"
)
_TAKES_SHARDED, _WARNED = "_takes_sharded_tensors", "_warned_of_gathering"


_NO_LOCAL_TENSOR = (
    "DTensor.from_local got a ShardedTensor, which is not a local tensor: use shardwise.compat.to_dtensor(t); torch's "
    "context_parallel does this inside of attention: leave it out, since attention here takes rows that are split over "
    "ranks, as by ModelPlan(mesh, ..., input_plan='cp: S(1)')"
)
_NOT_ADAPTED = ("torch", "functorch", "shardwise")  # they know what they are given


def _let_all_functions_take_sharded() -> None:
    """Give `torch.autograd.Function` an `apply` that asks for ShardedTensors."""
    defined = vars(torch.autograd.Function)["apply"]
    original = getattr(defined, "__func__", defined)  # torch 2.15 defines it in C, as a function of the class

    @wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(a, ShardedTensor) for a in args) or cls.__module__.partition(".")[0] in _NOT_ADAPTED:
            if cls.__name__ == "_FromTorchTensor" and isinstance(args[0], ShardedTensor):
                raise TypeError(_NO_LOCAL_TENSOR)
            return original(cls, *args, **kwargs)
        return apply_to_sharded(cls, args, partial(original, cls))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]


_let_all_functions_take_sharded()


@public
def register_autograd_function(function: F) -> F:
    """Let a `torch.autograd.Function` of torch itself take ShardedTensors; every other one does. Also a decorator.

    Its forward and backward then get ShardedTensors wherever `apply` was given them. One whose forward uses operators
    that ShardedTensors do not have (memory addresses, kernels without a rule) gets whole tensors, with one warning.

    >>> from shardwise import Mesh, MeshSpec, Shard, run_local, shard
    >>> @register_autograd_function
    ... class Reverse(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 1
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         return -grad
    >>> def body(comm):
    ...     x = shard(torch.ones(2), MeshSpec(Mesh.of(tp=2), [Shard(0)])).requires_grad_()
    ...     Reverse.apply(x).sum().backward()
    ...     return x.grad.full().tolist()
    >>> run_local(body, 2)[0]
    [-1.0, -1.0]
    """
    original: Any = function.apply
    if _TAKES_SHARDED in vars(function):
        return function

    @wraps(original)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(a, ShardedTensor) for a in args):
            return original(*args, **kwargs)
        return apply_to_sharded(function, args, original)

    function.apply = apply  # type: ignore[method-assign]  # torch finds it by this name
    setattr(function, _TAKES_SHARDED, True)
    return function


for _function in (BackwardHookFunction, CheckpointFunction):
    register_autograd_function(_function)


def _flatten_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpointing without re-entrance that saves local tensors in place of ShardedTensors among its arguments."""

    def start(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Any) -> Any:
        if splits_backward():
            return compute_region_again()
        names, values = list(kwargs), [*args, *kwargs.values()]
        if not any(isinstance(v, ShardedTensor) for v in values):
            return original(function, args, kwargs, options)
        plan = _Flattened(values)

        def run(*flat: Any) -> Any:
            tape, others = flat[: sum(plan.counts)], iter(flat[sum(plan.counts) :])
            found = [v if n else next(others) for v, n in zip(plan.values(tape), plan.counts, strict=True)]
            return function(*found[: len(args)], **dict(zip(names, found[len(args) :], strict=True)))

        flat = (*_tape_of(values), *(v for v in values if not isinstance(v, Tensor)))
        return original(run, flat, {}, options)

    return start


replace_checkpoint_generator(_flatten_checkpoint)


@register_function(make_dual_function)
def _make_dual(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    value, tangent = args
    if is_tracing() or is_batched_tensor(value) or is_batched_tensor(tangent):
        raise UnsupportedOpError(
            "torch.func.jacfwd, hessian, linearize and vmap of forward mode are not supported for ShardedTensors; call "
            "torch.func.jvp for one tangent after the other, torch.autograd.functional.hessian for second gradients"
        )
    if not isinstance(value, ShardedTensor):
        raise UnsupportedOpError("the tangent of a plain tensor cannot be a ShardedTensor; pass tangent.full()")
    if tuple(value.shape) != tuple(tangent.shape):
        raise ValueError(
            f"a tangent has the shape of its value: {tuple(value.shape)}, got {tuple(tangent.shape)}; expand it first"
        )
    dual_layout(value.sharding)  # raises for a pending maximum, which has no tangent
    if not isinstance(tangent, ShardedTensor):
        tangent = wrap(replicated_layout(tuple(tangent.shape), comm.ranks), (tangent,), comm)
    parts = [forward_ad.unpack_dual(t).primal for t in move_to(tangent, value.sharding, "tangent")[0]]
    duals = tuple(map(forward_ad.make_dual, value.local_parts, parts))
    return value._like(value.sharding, duals, value._anchor)


@register_function(unpack_dual_function)
def _unpack_dual(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    (tensor,) = args
    pairs = [forward_ad.unpack_dual(t) for t in tensor.local_parts]
    value = tensor._like(tensor.sharding, tuple(primal for primal, _ in pairs), tensor._anchor)
    if not any_rank_has_tangents(tensor.local_parts, comm, "unpack_dual"):
        return value, None
    parts = tuple(torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs)
    return value, tensor._like(tensor.sharding, parts)
