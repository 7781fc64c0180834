"""Who compiles the graphs: inductor, another backend of torch by name, or a function of the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

from shardwise._torch_graphs import inductor_compiler, inductor_decompositions, named_backend

Backend: TypeAlias = str | Callable[..., Any]
AS_TRACED = ("eager", "aot_eager")
compile_lock = threading.RLock()  # torch's tracers and compilers are not made for several threads at once


class LazyGraph:
    """A graph that is compiled when it is first called: all ranks have agreed on it by then."""

    _boxed_call = True

    def __init__(self, graph: GraphModule, inputs: Sequence[Any], backend: Backend, *, backward: bool) -> None:
        self._graph, self._inputs, self._backend, self._backward = graph, list(inputs), backend, backward
        self._run: Callable[[list[Any]], Any] | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self._run is None:
            with compile_lock:
                self._run = _compile_graph(self._graph, self._inputs, self._backend, self._backward)
            self._inputs = []
        return self._run(args)


def _compile_graph(graph: GraphModule, inputs: list[Any], backend: Backend, backward: bool) -> Callable[..., Any]:
    """The compiled graph as a function of one list, which it may empty."""
    if backend in AS_TRACED:
        return _take_list(graph.forward)
    if backend == "inductor":
        return inductor_compiler()(graph, inputs, is_backward=backward)  # type: ignore[no-any-return]  # untyped in torch
    compiler = named_backend(backend) if isinstance(backend, str) else backend
    return _take_list(compiler(graph, inputs))


def _take_list(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    if getattr(function, "_boxed_call", False):
        return function

    def run(args: list[Any]) -> Any:
        given = tuple(args)
        args.clear()
        return function(*given)

    return run


def decompositions_for(backend: Backend) -> dict[Any, Any]:
    """The operators that are broken down before a backend sees the graph."""
    return dict(inductor_decompositions()) if backend == "inductor" else {}


def check_backend(backend: Backend) -> None:
    """Raise unless this is a backend."""
    if callable(backend) or backend in AS_TRACED or backend == "inductor":
        return
    if not isinstance(backend, str):
        raise TypeError(f"backend is a name or a function of a graph and inputs, got {type(backend).__name__}")
    known = torch.compiler.list_backends()
    if backend not in known:
        raise ValueError(f"there is no backend {backend!r}; torch has {', '.join(sorted(known))}")
