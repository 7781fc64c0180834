"""Which code answers a torch function that receives a ShardedTensor?

1. A user's own override: for every sharded tensor, for tensors laid out by a class of spec (or one derived from it), or
   as a default. `shardwise.compat.custom_ops` has the decorators that register them.
2. The table of functions below. It is for functions that are not operators: those of `torch.nn.init`,
   `torch.autograd.grad`, functions that read plain tensors in a way of their own. One that returns NotImplemented
   leaves the call to torch.
3. Otherwise torch breaks the function down into operators (`run_function`), and the engine computes each of them by
   its rule (`ops/engine.py`). What has none is an error that names it; nothing is gathered silently.

Torch is entered below its autograd layer, since the wrapper is not on the tape, and above autocast and other layers.
The code of an operator then runs in the layers that the caller had: so its local tensors are recorded.

What is wrong when torch's data parallel wrappers (DDP, FSDP, fully_shard) are put around a sharded model?

They flatten, cut and broadcast parameters by rank, which no ShardedTensor allows. Some call of theirs is refused, and
that error names a detail of torch. Here the caller is recognised by its stack, on the way of an error only.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from shardwise._cache import clear_on_change
from shardwise._text import is_raised_here, shorten_traceback
from shardwise._torch import (
    DisableTorchFunctionSubclass,
    DispatchKeys,
    OpOverload,
    autograd_on_locals,
    below_autograd,
    beside_func_transforms,
    current_dispatch_keys,
    forward_ad,
    is_dispatch_mode_on,
    is_forward_grad_enabled,
    proxy_mode,
    pytree,
)
from shardwise.comm import Comm, DisagreementError
from shardwise.comm.stand_in import is_tracing
from shardwise.geometry import Layout, LayoutError
from shardwise.tensor.recorder import remember_debug_modes

_WRAPPERS = {
    "torch.distributed.fsdp._fully_shard": "fully_shard",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed._composable.replicate": "replicate",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.nn.parallel": "DataParallel",
}


class WrapperError(DisagreementError):
    """A data parallel wrapper of torch is around a model whose parameters are ShardedTensors."""


def find_wrapper() -> str | None:
    """The wrapper of torch that is on the stack, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")):
            return next((name for start, name in _WRAPPERS.items() if module.startswith(start)), None)
        frame = frame.f_back
    return None


def is_called_by_fully_shard() -> bool:
    """Whether the caller's caller is torch's fully_shard, which would cut replicated parameters without an error."""
    module: str = sys._getframe(2).f_globals.get("__name__", "")
    return module.startswith("torch.distributed.fsdp._fully_shard")


def explain_wrapper(error: Exception) -> None:
    """Raise in place of an error what is wrong and what to write instead, if a wrapper of torch caused it."""
    name = None if isinstance(error, WrapperError) else find_wrapper()
    if name is not None:
        raise refuse_wrapper(name) from error


def refuse_wrapper(name: str) -> WrapperError:
    """The error that says what to write instead of a wrapper."""
    return WrapperError(
        f"{name} cannot wrap a model whose parameters are ShardedTensors: shardwise does its part. For data parallel "
        "training give the plan a mesh with an axis for the data, ModelPlan(Mesh.of(dp=2, tp=2), {...}, "
        "input_plan='dp: S(0)'): each rank passes its own part of the batch, and gradients are summed over 'dp'. To "
        "shard parameters over the data axis as well, as FSDP does, add 'dp: S(0)' to their patterns"
    )


M = TypeVar("M", bound=Callable[..., Any])
Override: TypeAlias = Callable[[Any, Any, Any, Any], Any]
EVERY, DEFAULT = "every spec", "no other override"  # the two keys that are not classes of specs

_overrides: dict[Callable[..., Any], dict[object, Override]] = {}


def set_override(func: Callable[..., Any], scope: object, override: Override) -> None:
    """Register an override of a torch function for EVERY tensor, for a class of specs, or as DEFAULT."""
    _overrides.setdefault(func, {})[scope] = override
    clear_on_change()


def find_override(func: Callable[..., Any], *scopes: object) -> Override | None:
    """Return the override of a torch function for the first of these scopes that has one, or None."""
    known = _overrides.get(func)
    return None if known is None else next((known[scope] for scope in scopes if scope in known), None)


def override_for(func: Callable[..., Any], spec: object) -> Override | None:
    """Return the override of a torch function that counts for tensors of a spec: the nearest class of it, bases too."""
    return None if func not in _overrides else find_override(func, EVERY, *type(spec).__mro__, DEFAULT)


@contextmanager
def overrides_scope() -> Iterator[None]:
    """Undo at the end of a `with` block all registrations made inside it.

    The table belongs to the process: around `run_local`, not inside it.
    """
    before = {func: dict(known) for func, known in _overrides.items()}
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
        clear_on_change()


Implementation: TypeAlias = Callable[[Sequence[type], tuple[Any, ...], dict[str, Any], Comm], Any]
F = TypeVar("F", bound=Implementation)

_READ_A_NUMBER = (Tensor.__index__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__bool__)
_NO_DATA = "data is not allocated"
_functions: dict[Callable[..., Any], Implementation] = {}
_functions_with_out: dict[Callable[..., Any], Implementation] = {}


class UnsupportedOpError(RuntimeError):
    """A function or operator that has no implementation for these layouts."""


def register_function(*functions: Callable[..., Any], out: bool = False) -> Callable[[F], F]:
    """Register an implementation `impl(types, args, kwargs, comm)` of torch functions that are not operators.

    Without `out` it is not asked where `out=` is passed: writing to an existing tensor is an operator's.
    """
    for function in functions:
        if isinstance(function, OpOverload):
            raise TypeError(f"{function} is an operator: register a rule with shardwise.register_sharding")

    def register(implementation: F) -> F:
        for function in functions:
            _functions[function] = implementation
            if out:
                _functions_with_out[function] = implementation
        return implementation

    return register


def find_function(function: Callable[..., Any]) -> Implementation | None:
    """The implementation that is registered for a torch function, or None."""
    return _functions.get(function)


def registered_functions() -> tuple[Callable[..., Any], ...]:
    """All torch functions that have an implementation of their own."""
    return tuple(_functions)


def sharded_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The ShardedTensors among arguments, in order."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if isinstance(getattr(value, "sharding", None), Layout):
                yield value
        elif isinstance(value, list | tuple | dict):
            yield from (v for v in pytree.tree_iter(value) if isinstance(getattr(v, "sharding", None), Layout))


def call_function(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer a torch function."""
    first = next(sharded_leaves(args, kwargs), None)
    if first is not None:
        own = override_for(func, first.sharding.spec)
        if own is not None:
            return own(types, args, kwargs, first.comm.process_group or first.comm)
        known = (_functions_with_out if "out" in kwargs else _functions).get(func)
        answer = NotImplemented if known is None else known(types, args, kwargs, first.comm)
        if answer is not NotImplemented:
            return answer
    try:
        return run_function(func, args, kwargs)
    except RuntimeError as error:
        if _NO_DATA not in str(error):
            raise
        if func in _READ_A_NUMBER:  # for `torch.tensor([x, 1])`, which reads its numbers below all operators
            return func(args[0]._gather_values())
        raise UnsupportedOpError(
            f"{getattr(func, '__name__', func)} reads the values of a ShardedTensor before it computes, and no rank "
            "has them all; pass tensor.full() for arguments that are indices or sizes"
        ) from error


def refuse_operator(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer an operator where nothing is bound to compute it."""
    layouts = ", ".join(repr(leaf.sharding.spec) for leaf in sharded_leaves(args, kwargs))
    raise UnsupportedOpError(
        f"torch function '{op}' is not supported for ShardedTensor with {layouts}; compute on local_tensor(), or "
        "register an implementation with shardwise.compat.custom_sharded_op_impl(function)"
    )


class _ThreadState(threading.local):
    """The layers of torch in which the operators of the function that this thread runs are computed, and whether the
    caller passed plain tensors that are more than numbers."""

    keys: DispatchKeys | None = None
    plain_passed: bool = False


_state = _ThreadState()


def bind_dispatch(tensor_class: Any, *, function: Callable[..., Any], operator: Callable[..., Any]) -> None:
    """Let functions and operators of a class be answered by these, which get the class, as torch passes it, first.

    `shardwise.ops` is built on ShardedTensor and binds itself to it: a class that called it would need it first.
    """
    tensor_class.__torch_function__ = classmethod(function)
    tensor_class.__torch_dispatch__ = classmethod(operator)


def enter_function(
    answer: Callable[..., Any],
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *known: Any,
) -> Any:
    """Answer a torch function by `answer`, which also gets what is known; where tensors have tangents, the long way."""
    if forward_ad._current_level >= 0:
        with beside_func_transforms(current_dispatch_keys()):
            return call_function(func, types, args, kwargs)
    if not is_forward_grad_enabled():
        _refuse_without_tape(func, args, kwargs)
    try:
        return answer(func, types, args, kwargs, *known)
    except Exception as error:
        if isinstance(error, DisagreementError | LayoutError | UnsupportedOpError):
            explain_wrapper(error)
        outermost = _state.keys is None
        recorded = proxy_mode() is not None or str(error) == "Unable to cast NotImplemented to Tensor"  # a fake one
        if recorded and not is_tracing() and not isinstance(error, UnsupportedOpError):
            raise UnsupportedOpError(RECORDS_ONE_RANK) from error
        error = (_error_of_whole(func, args, kwargs, error) if outermost else None) or error
        raise shorten_traceback(error, outermost=outermost) from error.__cause__


RECORDS_ONE_RANK = (
    "torch.export, torch.jit.trace and make_fx record the operators of one rank, without what ranks send each "
    "other; use shardwise.compile(model), or export an unsharded copy with the values of "
    "`{name: p.full() for name, p in model.state_dict().items()}`"
)
_REDUCTION = re.compile(r"a and b must have same reduction dim, but got \[(.*)\] X \[(.*)\]\.")
_META_TYPE = re.compile(r"Meta(\w+)Type")
_OURS = str(Path(__file__).parents[1])
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
# exactly these: their children are ours
_OF_ARGUMENTS = (IndexError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError)


def _error_of_whole(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception | None:
    """What torch says of the whole tensors, where a kernel raised because of the shapes of local ones.

    The function is called on tensors without memory. An error that has nothing to do with shapes stays as it is, and is
    no answer; but where our code stumbled over an argument, what torch says of it is the error. Errors of a backward
    pass are of its graph, which the tensors without memory lack.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if type(error) not in _OF_ARGUMENTS or last is None or func in _GRADIENTS or is_raised_here(error):
        return None  # what we raise says what the whole tensors are
    ours = last.tb_frame.f_code.co_filename.startswith(_OURS)
    if not ours and not any(c.isdigit() for c in str(error)):
        return None

    def without_memory(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value

    try:
        with torch.no_grad(), torch.device("meta"):
            func(*pytree.tree_map(without_memory, args), **pytree.tree_map(without_memory, kwargs))
    except Exception as found:
        text = _META_TYPE.sub(r"torch.\1Tensor", _REDUCTION.sub(_matrix_shapes, str(found)))
        fits = type(found) in _OF_ARGUMENTS if ours else type(found) is type(error) and any(map(str.isdigit, text))
        if fits and "meta" not in text.lower():
            return type(found)(text).with_traceback(error.__traceback__)
    return None


def _matrix_shapes(found: re.Match[str]) -> str:
    left, right = (found[i].replace(", ", "x") for i in (1, 2))
    return f"mat1 and mat2 shapes cannot be multiplied ({left} and {right})"


def _refuse_without_tape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise inside the forward of a `torch.autograd.Function`, where gradients of ShardedTensors would be lost.

    Torch records such a Function for wrappers that are on its tape; ours are not. Apart from inference mode, only there
    is forward-mode differentiation turned off.
    """
    if torch.is_inference_mode_enabled() or not any(t.requires_grad for t in sharded_leaves(args, kwargs)):
        return
    raise UnsupportedOpError(
        f"{getattr(func, '__name__', func)} of a ShardedTensor that requires grad, inside the forward of a "
        "torch.autograd.Function: its gradient would be lost. Register the Function with "
        "shardwise.register_autograd_function, or make it a torch.library operator"
    )


def run_function(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Let torch break a function of ShardedTensors down into operators, each of which comes to `__torch_dispatch__`."""
    plain = list(plain_leaves(args, kwargs))
    before = _state.keys, _state.plain_passed
    _state.keys, _state.plain_passed = current_dispatch_keys(), any(v.ndim for v in plain)
    try:
        modes = remember_debug_modes() if is_dispatch_mode_on() else nullcontext()
        with modes, _layer_of_entry(plain), DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    finally:
        _state.keys, _state.plain_passed = before


def plain_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among arguments that are not sharded."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if not isinstance(getattr(value, "sharding", None), Layout):
                yield value
        elif not isinstance(value, int | float | str | None):
            for leaf in pytree.tree_iter(value):
                if isinstance(leaf, Tensor) and not isinstance(getattr(leaf, "sharding", None), Layout):
                    yield leaf


def is_plain_passed() -> bool:
    """Whether the caller of the function that this thread runs passed plain tensors; else torch made all there are."""
    return _state.plain_passed


def _layer_of_entry(plain: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Where a function enters torch: below autograd, unless it may compute with a plain tensor that is differentiated.

    A function that is written in Python computes with its plain arguments too, and these are on torch's own tape.
    """
    return nullcontext() if any(v.requires_grad for v in plain) else below_autograd()


def on_local_tensors(method: M) -> M:
    """Decorate a method of ShardedTensor that computes with the local tensors: they are always recorded.

    Inside of a function that torch breaks down, recording is off for everything but operators on ShardedTensors. Inside
    of `torch.func.jvp` local tensors have tangents of their own, and torch's transform is passed by.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            with beside_func_transforms(_state.keys or current_dispatch_keys()):
                return method(self, *args, **kwargs)
        try:
            if _state.keys is None:
                return method(self, *args, **kwargs)
            with autograd_on_locals(_state.keys):
                return method(self, *args, **kwargs)
        except Exception as error:
            raise shorten_traceback(error) from error.__cause__

    return cast(M, run)


def enter_operator(answer: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer an operator that a torch function was broken down into; what computes it is recorded on the tape.

    This is the one place where an operator's code is entered. Rules and steps need no guard of their own.
    """
    before = _state.keys
    if before is None and forward_ad._current_level >= 0:  # not through a torch function: so through a transform
        raise UnsupportedOpError(
            f"{op} of a ShardedTensor inside of torch.func.jvp and another transform of torch.func: its tangent "
            "would be lost; use torch.autograd.grad inside of torch.func.jvp"
        )
    _state.keys = keys = (before or current_dispatch_keys()).below(op)
    try:
        with autograd_on_locals(keys):
            return answer(op, args, kwargs)
    except Exception as error:
        if isinstance(error, DisagreementError | LayoutError | UnsupportedOpError):
            explain_wrapper(error)
        raise shorten_traceback(error, outermost=False) from error.__cause__
    finally:
        _state.keys = before
