"""How does a program become graphs? It runs once on local tensors without data, and torch notes the operators.

1. The program is seen as a function of a flat list of this rank's tensors: those of its modules and optimizers, the
   gradients that they have, those of its arguments, learning rates, and the random streams that it draws from.
2. torch traces that function: operators on local tensors, moves as `shardwise::move`, writes in place turned into
   values. The tape is on local tensors, so the backward pass is traced with the forward pass.
3. A function that calls backward itself, as a training step does, is traced without a tape outside: its parameters
   require grad inside the graph only, and the gradients that it leaves are results.
4. What the program returned is described, to be wrapped again around the results of each call.

Who compiles the graphs: inductor, another backend of torch by name, or a function of the user's.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from shardwise._torch import (
    calling_before_backward,
    compiling_flag,
    inductor_compiler,
    inductor_decompositions,
    named_backend,
    no_record_function,
    saved_tensors_hooks_in_traces,
    trace_joint_graph,
)
from shardwise._tree import flatten_nest, unflatten_nest
from shardwise.comm import Comm, use_comm
from shardwise.comm.stand_in import CommTrace, NotTraceableError, note_backward, trace_comms
from shardwise.compiler.guards import mode_key, own_attributes
from shardwise.compiler.schedule import find_gathers_made_again
from shardwise.compiler.state import NOT_AGAIN, ProgramState, computing_with_tensors, swap_tensors
from shardwise.geometry import Layout
from shardwise.ops.implicit_replication import copy_mesh_note
from shardwise.tensor.autograd_mixin import SumOfCopies
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.random import DrawTrace, trace_draws
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import share_memory

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


@dataclass(frozen=True, slots=True)
class ShardedLeaf:
    """A ShardedTensor among arguments or results: its layout and how many local tensors follow each other."""

    layout: Layout
    count: int
    kind: type[ShardedTensor]
    dtype: torch.dtype
    device: torch.device


PLAIN = "a plain tensor"


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument or result that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class SameAsState:
    """A result that is a tensor of the state itself."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class SameAsArgument:
    """A result that is a tensor among the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class SameAsResult:
    """A result that is an earlier one."""

    index: int


class _Hole:
    """The place of a tensor in an object that a program returns."""


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """A result that is an object with tensors inside, such as a cache: the object without them, and what they are."""

    template: Any
    holes: tuple[_Hole, ...]
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class TracedArguments:
    """The arguments of a call: how they are nested, and what each leaf is."""

    structure: Any
    leaves: tuple[Any, ...]

    def rebuild(
        self, tensors: Iterator[Tensor], comm: Comm, given: Sequence[Any], known: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        """The arguments and keyword arguments that were passed, around other local tensors.

        A tensor that is passed twice is one tensor there as well; one of the state, which is known, is itself.
        """
        made = {id(tensor): tensor for tensor in known}
        values: list[Any] = []
        for leaf, source in zip(self.leaves, given, strict=True):
            value = _rebuild_leaf(leaf, tensors, comm)
            if isinstance(value, ShardedTensor):
                copy_mesh_note(source, value)
            values.append(made.setdefault(id(source), value) if isinstance(source, Tensor) else value)
        if self.structure is None:
            return tuple(values), {}
        args, kwargs = unflatten_nest(values, self.structure)
        return args, kwargs


def describe_leaf(value: Any) -> Any:
    """What a leaf of arguments or results is."""
    if isinstance(value, ShardedTensor):
        return ShardedLeaf(value.sharding, len(value.local_parts), type(value), value.dtype, value.device)
    return PLAIN if isinstance(value, Tensor) else Constant(value)


def _find_tensors(value: Any, seen: dict[int, object]) -> Iterator[Tensor]:
    """The tensors in an object, in its attributes and in lists, tuples and dicts of them, each once."""
    if id(value) in seen or isinstance(value, type | FunctionType | ModuleType | nn.Module):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from _find_tensors(part, seen)


def _empty_object(value: Any, tensors: Sequence[Tensor]) -> tuple[Any, tuple[_Hole, ...]]:
    """A copy of an object with holes in the places of its tensors."""
    holes = tuple(_Hole() for _ in tensors)
    try:
        return copy.deepcopy(value, {id(t): hole for t, hole in zip(tensors, holes, strict=True)}), holes
    except Exception as error:  # whatever an object does that is copied
        raise NotTraceableError(f"it returns a {type(value).__name__}, which cannot be copied: {error}") from error


def _check_returned_copy(value: ShardedTensor, flat: Sequence[Tensor]) -> None:
    """Raise if a result was copied where torch returns a view, and this has to be known after the call.

    What it was copied from was written to since, or belongs to the caller, who may write to it.
    """
    view = value._copied_from
    try:
        if view is not None:
            view.check()
    except UnsupportedOpError as error:
        raise NotTraceableError(f"it returns a result of which this is known: {error}") from None
    while view is not None:
        if share_memory(view.sources, flat):
            raise NotTraceableError(f"it returns {view.name}, a copy of a view of an argument or of its state")
        view = view.behind


def locals_of(leaves: Sequence[Any]) -> list[Tensor]:
    """This rank's tensors of the leaves of arguments or results, in order."""
    found: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            found += leaf.local_parts
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def _rebuild_leaf(
    leaf: Any, tensors: Iterator[Tensor], comm: Comm, given: Sequence[Any] = (), results: Sequence[Any] = ()
) -> Any:
    if isinstance(leaf, SameAsArgument | SameAsResult):
        return (given if isinstance(leaf, SameAsArgument) else results)[leaf.index]
    if isinstance(leaf, ShardedLeaf):
        parts = tuple(next(tensors) for _ in range(leaf.count))
        return wrap(leaf.layout, parts, comm, cls=leaf.kind, dtype=leaf.dtype, device=leaf.device)
    if isinstance(leaf, Constant):
        return leaf.value
    if isinstance(leaf, ObjectLeaf):
        made = [_rebuild_leaf(part, tensors, comm, given, results) for part in leaf.leaves]
        return copy.deepcopy(leaf.template, {id(h): value for h, value in zip(leaf.holes, made, strict=True)})
    return leaf.tensor if isinstance(leaf, SameAsState) else next(tensors)


@dataclass
class TracedResult:
    """What a traced program returned, and what it left behind: found while it ran."""

    structure: Any = None
    leaves: tuple[Any, ...] = ()
    gradients: tuple[str, ...] = ()  # of each tensor of the state: "none", "kept" as it was or written to, or "new"
    writes: set[int] = field(default_factory=set)  # the places of the flat tensors that are written to
    sources: list[frozenset[int]] = field(default_factory=list)  # of each result: the flat tensors that it depends on
    draws: DrawTrace = field(default_factory=DrawTrace)
    graphs: dict[str, GraphModule] = field(default_factory=dict)

    def rebuild(self, tensors: Iterator[Tensor], comm: Comm, given: Sequence[Any]) -> Any:
        """The results of a call with these arguments."""
        values: list[Any] = []
        for leaf in self.leaves:
            values.append(_rebuild_leaf(leaf, tensors, comm, given, values))
        return values[0] if self.structure is None else unflatten_nest(values, self.structure)


def _check_arguments(before: tuple[list[Any], Any], now: tuple[list[Any], Any]) -> None:
    """Raise if a program has changed a list, dict or object among its arguments."""
    if len(before[0]) != len(now[0]) or before[1] != now[1] or not all(map(is_, before[0], now[0])):
        raise NotTraceableError(f"it changes a list, a dict or an object among its arguments, {NOT_AGAIN}")


def _copy_attributes(real: Tensor, traced: Tensor) -> None:
    """Let a tensor of a trace have what a program has set on the real one, and be a parameter if that is one."""
    vars(traced).update(own_attributes(vars(real)))
    if isinstance(real, nn.Parameter):
        traced._is_param = True  # what torch asks


class BackwardInside(Exception):
    """The program calls backward itself: it has to be traced as a whole step."""


@dataclass
class FlatProgram:
    """A program as a function of a flat list of local tensors."""

    function: Callable[..., Any]
    state: ProgramState
    arguments: TracedArguments
    given: Sequence[Any]
    comm: Comm
    trace: CommTrace
    in_step: bool
    has_gradient: Sequence[bool]
    check: Callable[[], None]  # raises where the trace has to end, though the program may have caught that
    check_effects: Callable[[], None]  # puts back what a run has set, and raises: another run may set it as it was
    result: TracedResult = field(default_factory=TracedResult)
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)

    def run(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Run the program on these tensors; describe its results."""
        self.check()
        versions = [t._version for t in flat]
        count = len(self.has_gradient)
        own = [self._enter_step(t, r) for t, r in zip(flat, self.state.local_tensors(), strict=False)]
        for tensor, real in zip(own, self.state.local_tensors(), strict=True):
            _copy_attributes(real, tensor)
        rest = iter(flat[count:])
        for tensor, has_gradient in zip(own, self.has_gradient, strict=True):
            if has_gradient:
                tensor.grad = next(rest)
        given = [t.grad for t in own] if self.in_step else []
        *tensors, streams = rest
        cut = len(tensors) - len(self.state.rated_groups())
        tensors, rates = tensors[:cut], tensors[cut:]
        self.trace.start()
        with ExitStack() as stack:
            stack.enter_context(swap_tensors(self.state, own, self.trace))
            stack.enter_context(trace_comms(self.trace))
            twin = self.trace.twin_of(self.comm)
            stack.enter_context(use_comm(twin))
            stack.enter_context(computing_with_tensors(self.state, rates))
            self.result.draws = stack.enter_context(trace_draws(streams))
            args, kwargs = self.arguments.rebuild(iter(tensors), twin, self.given, self.state.sharded)
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            if self.in_step:  # checkpointed code is computed again inside the graph
                stack.enter_context(saved_tensors_hooks_in_traces())
            before = flatten_nest((args, kwargs))
            for value, source in zip(before[0], self.given, strict=True):
                if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
                    _copy_attributes(source, value)
            seen = [t for t in (*before[0], *own, *self.state.sharded) if isinstance(t, Tensor)]
            attributes = [own_attributes(vars(t)) for t in seen]
            modes = mode_key()
            returned = self.function(*args, **kwargs)
            self.check()
            if mode_key() != modes:
                raise NotTraceableError(f"it sets a mode of torch, {NOT_AGAIN}")
            _check_arguments(before, flatten_nest((args, kwargs)))
            if any(old.keys() != own_attributes(vars(t)).keys() for t, old in zip(seen, attributes, strict=True)):
                raise NotTraceableError(f"it sets an attribute of a tensor, {NOT_AGAIN}")
            outputs = self._describe(returned, flat, before[0])
        self.check_effects()
        self.result.writes |= {i for i, (t, v) in enumerate(zip(flat, versions, strict=True)) if t._version != v}
        if not self.in_step and not self.result.sources:
            self.result.sources = [_find_sources(output, flat) for output in outputs]
        return (*outputs, *self._collect_gradients(own, given))

    def _enter_step(self, tensor: Tensor, real: Tensor) -> Tensor:
        if not self.in_step or not real.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        if (summed := SumOfCopies.find(real)) is not None:
            leaf.register_hook(summed)  # type: ignore[no-untyped-call]  # untyped in torch
        return leaf

    def _describe(self, returned: Any, flat: Sequence[Tensor], passed: Sequence[Any]) -> list[Tensor]:
        values, structure = flatten_nest(returned)
        known: dict[int, Any] = {id(t): SameAsState(t) for t in self.state.sharded}
        for i, value in enumerate(passed):
            if isinstance(value, Tensor):
                known.setdefault(id(value), SameAsArgument(i))
        leaves: list[Any] = []
        given: list[Any] = []  # the tensors that the graph returns

        def describe(value: Any) -> Any:
            if id(value) in known:
                return known[id(value)]
            if isinstance(value, ShardedTensor):
                _check_returned_copy(value, flat)
            given.append(value)
            return describe_leaf(value)

        for value in values:
            tensors = [] if isinstance(value, Tensor) else list(_find_tensors(value, {}))
            inside = tuple(map(describe, tensors))
            leaves.append(ObjectLeaf(*_empty_object(value, tensors), inside) if tensors else describe(value))
            if isinstance(value, Tensor):
                known.setdefault(id(value), SameAsResult(len(leaves) - 1))
        self.result.leaves = tuple(leaves)
        self.result.structure = None if isinstance(returned, Tensor) else structure
        found = locals_of(given)
        if any(isinstance(v, ShardedTensor) and not v.local_parts for v in given):
            raise NotTraceableError("a result has no part on some ranks")
        return [t.detach() for t in found] if self.in_step else found

    def _collect_gradients(self, own: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients that are new; those that were there and are written to come back by themselves."""
        if not self.in_step:
            if any(t.grad is not None for t in own if t.is_leaf):
                raise BackwardInside
            return []
        kinds, found = [], []
        for tensor, before in zip(own, given, strict=True):
            if tensor.grad is None:
                kinds.append("none")
            elif tensor.grad is before:
                kinds.append("kept")
            else:
                kinds.append("new")
                found.append(tensor.grad)
        self.result.gradients = tuple(kinds)
        return found


def _find_sources(output: Tensor, flat: Sequence[Tensor]) -> frozenset[int]:
    """The places of the tensors from which autograd has computed another one."""
    places = {id(t): i for i, t in enumerate(flat)}
    nodes = {t.grad_fn: i for i, t in enumerate(flat) if t.grad_fn is not None}
    found, seen, queue = set[int](), set[Any](), [output.grad_fn]
    if id(output) in places:
        found.add(places[id(output)])
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in nodes:
            found.add(nodes[node])
        elif id(variable := getattr(node, "variable", None)) in places:
            found.add(places[id(variable)])
        queue += [following for following, _ in node.next_functions]
    return frozenset(found)


def leave_out_gradients(outputs: Sequence[Tensor], flat: Sequence[Tensor], sources: Sequence[frozenset[int]]) -> None:
    """Let inputs have no gradient where no result that depends on them is used; the graph computes zeros for them."""
    used = [(output, places) for output, places in zip(outputs, sources, strict=False) if output.requires_grad]
    if len({places for _, places in used}) < 2:
        return
    reached: set[int] = set()
    for output, places in used:
        note = partial(_note_used, reached, places)
        output.register_hook(note)  # type: ignore[no-untyped-call]  # untyped in torch
    nodes = {_graph_node(output.grad_fn) for output, _ in used} - {None}
    index = {_node_of(t): i for i, t in enumerate(flat) if t.requires_grad}

    def leave_out(node: Any) -> Callable[..., Any]:
        inputs = [index.get(edge) for edge in node.next_functions]

        def hook(gradients: Any, _: Any) -> Any:
            kept = tuple(g if i is None or i in reached else None for g, i in zip(gradients, inputs, strict=True))
            reached.clear()
            return kept

        return hook

    for node in nodes:
        node.register_hook(leave_out(node))


def _note_used(reached: set[int], places: frozenset[int], gradient: Tensor | None) -> None:
    if gradient is not None:
        reached |= places


def _node_of(tensor: Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _graph_node(node: Any) -> Any:
    """The node of a compiled graph behind views of its results, or None."""
    while node is not None and "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node


class _FlatModule(nn.Module):
    """The flat function as the module that torch's tracer takes."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._run_flat = run

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        return self._run_flat(*flat)


def trace_program(
    program: FlatProgram, flat: Sequence[Tensor], backend: Backend, prepare: Callable[[GraphModule, str], None]
) -> Callable[..., Sequence[Tensor]]:
    """Trace a program and return the function of flat tensors that runs its graphs; `prepare` may change them."""

    def compiler(kind: str) -> Callable[[GraphModule, Sequence[Any]], LazyGraph]:
        def compile_later(graph: GraphModule, inputs: Sequence[Any]) -> LazyGraph:
            if kind == "step":
                program.result.graphs[kind] = graph
                prepare(graph, kind)
            return LazyGraph(graph, inputs, backend, backward=kind == "backward")

        return compile_later

    def keep_graphs(forward: GraphModule, backward: GraphModule) -> None:
        for kind, graph in (("forward", forward), ("backward", backward)):
            program.result.graphs[kind] = graph
            prepare(graph, kind)

    program.trace.in_step = program.in_step
    with compiling_flag(), no_record_function(), calling_before_backward(note_backward):
        traced: Callable[..., Sequence[Tensor]] = trace_joint_graph(
            _FlatModule(program.run),
            flat,
            forward=compiler("forward"),
            backward=compiler("backward"),
            inference=compiler("step"),
            partitioned=keep_graphs,
            decompositions=decompositions_for(backend),
            computed_again=find_gathers_made_again,
        )
        return traced
