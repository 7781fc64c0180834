"""Private names of torch for tracing and compiling, each with the reason; the rest of them are in `_torch`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Event, Thread, get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import private_name, proxy_mode

_set_hooks_tracing = private_name("_C._autograd._saved_tensors_hooks_set_tracing")


# Which code dynamo leaves alone; in C, so that dynamo itself is not loaded.
_eval_frame: Any = private_name("_C._dynamo.eval_frame")


_CompileContext: Any = private_name("_guards.CompileContext")


def is_dynamo_at_work() -> bool:
    """Whether dynamo follows a function now; `torch.compiler.is_compiling` does not say so in torch 2.11."""
    return _CompileContext.try_get() is not None


def is_called_by_compiled_code() -> bool:
    """Whether what `torch.compile` returned for a function is being called, by the stack: dynamo does not say so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals["__name__"] == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


@contextmanager
def saved_tensors_hooks_in_traces() -> Iterator[None]:
    """Let hooks of tensors that are saved for the backward pass run in a trace, where torch leaves them out."""
    before = _set_hooks_tracing(False)
    try:
        yield
    finally:
        _set_hooks_tracing(before)


def last_traced_node() -> Any:
    """The node of the graph that is being traced which was made last, or None where nothing is traced."""
    mode = proxy_mode()
    return None if mode is None else mode.tracer.graph._root.prev


def trace_joint_graph(
    module: torch.nn.Module,
    inputs: Sequence[Tensor],
    *,
    forward: Any,
    backward: Any,
    inference: Any,
    partitioned: Any,
    decompositions: Mapping[Any, Any],
    computed_again: Any = lambda joint: (),
) -> Any:
    """Trace a module over flat tensors, forward with backward, without values; returns the function of its graphs.

    `partitioned(forward graph, backward graph)` is called where there is a backward pass, `computed_again(joint graph)`
    before: it returns the nodes whose results the backward pass computes again. What traces is loaded here,
    on first use, as loading takes long.
    """
    keep_missing_device_guard()
    trace = private_name("_functorch.aot_autograd.aot_module_simplified")
    split = private_name("_functorch.partitioners.min_cut_rematerialization_partition")

    def partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
        for node in computed_again(joint):
            if "recompute" not in node.meta:
                compute_again(node, 0)
        graphs: tuple[Any, Any] = split(joint, joint_inputs, **options)
        partitioned(*graphs)
        return graphs

    return trace(
        module,
        list(inputs),
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(decompositions),
        keep_inference_input_mutations=True,
    )


@cache
def keep_missing_device_guard() -> None:
    """Let a thread that never ends be the first to trace, where torch is built for CUDA and there is no GPU.

    Torch then makes a guard in memory of the thread that traces first, and looks at it in all later traces: it crashes
    if that thread has ended, as threads of ranks do.
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if make is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    made, never = Event(), Event()

    def stay() -> None:
        make()
        made.set()
        never.wait()

    Thread(target=stay, name="shardwise-device-guard", daemon=True).start()
    made.wait()


@contextmanager
def calling_before_backward(notice: Callable[[], None]) -> Iterator[None]:
    """Call a function before each `backward()`, on every thread."""
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        notice()
        original(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


def compute_again(node: Any, region: int) -> None:
    """Let the backward pass compute a node of a joint graph again; what one region gets from another is kept."""
    node.meta |= {"recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": region}


def inductor_compiler() -> Any:
    """Return what compiles one graph by inductor; loaded on first use, as loading takes long."""
    return _load_quietly("_inductor.compile_fx.compile_fx_inner")


def _load_quietly(path: str) -> Any:
    """Load a module of torch that warns of its own deprecated parts when it is loaded."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # torch 2.15 warns of TorchScript by the latter
            warnings.simplefilter("ignore", category)
        return private_name(path)


def inductor_decompositions() -> Mapping[Any, Any]:
    """Return the operators that inductor wants broken down."""
    found: Mapping[Any, Any] = _load_quietly("_inductor.decomposition.select_decomp_table")()
    return found


def named_backend(name: str) -> Any:
    """Return a backend of `torch.compile` by name; the public functions list their names only."""
    return _load_quietly("_dynamo.backends.registry.lookup_backend")(name)


class _TracingThread:
    """True on the thread that made it: ranks that are threads run programs while one of them traces."""

    def __init__(self) -> None:
        self._thread = get_ident()

    def __bool__(self) -> bool:
        return get_ident() == self._thread

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__


@contextmanager
def compiling_flag() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true on this thread: code that looks at values leaves that out then."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, _TracingThread()  # type: ignore[assignment]  # tested as a condition
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def no_record_function() -> Iterator[None]:
    """Make `record_function`, which optimizers enter, do nothing: it is an operator that graphs cannot hold."""
    profiler = torch.autograd.profiler
    before, profiler.record_function = profiler.record_function, _NoRecord  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        profiler.record_function = before  # type: ignore[misc]


class _NoRecord(nullcontext[None]):
    """Stands for `record_function`."""


_operators: Any = torch.library.Library("shardwise", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch


def define_operator(schema: str, kernel: Any, fake: Any) -> None:
    """Define an operator of the namespace `shardwise`, by its code and by what it returns for tensors without data."""
    name = schema.partition("(")[0]
    _operators.define(schema)
    _operators.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{name}", fake, lib=_operators)


def skip_package(name: str) -> None:
    """Let dynamo, which is loaded, not follow calls into the functions of a package."""
    private_name("_dynamo.trace_rules.add")(name)


def skip_recursively(code: CodeType) -> None:
    """Let dynamo leave alone a function that is called between graphs, and all that it calls."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
