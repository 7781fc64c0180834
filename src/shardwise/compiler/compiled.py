"""`shardwise.compile`: a program on ShardedTensors as graphs of local tensors and moves, one for each kind of inputs.

1. A call of a known kind passes this rank's local tensors to the graphs and wraps the results. Nothing of the
   operators' rules runs, and ranks ask each other nothing, unless plain inputs are parts of a batch.
2. The first call of a kind traces. Then the ranks compare what they traced, in one exchange, and all use their graphs,
   or none does: a program that cannot be traced runs as it is, with one warning that says why.

Did all ranks trace the same program? One exchange after a trace, before any graph runs.

`torch.compile` of a sharded module is `shardwise.compile` of it.

1. `torch.compile(model)` returns torch's own wrapper of the model, a module with its parameters and methods. Where the
   model has sharded parameters, the wrapper's forward is what `shardwise.compile` returns; dynamo sees none of it.
2. `model.compile()` passes the module's own call, which is compiled in the same way.
3. Everything else goes to torch as before.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import update_wrapper, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from shardwise._text import count_of, package_logger
from shardwise._torch import is_dispatch_mode_on, is_dual_level, is_function_mode_on, load_tracer, pytree
from shardwise._tree import unflatten_nest
from shardwise.comm import Comm, CommError, fold_texts, gather_raw, gather_values
from shardwise.comm.current import resolve_comm
from shardwise.comm.stand_in import CommTrace, NotTraceableError, is_tracing
from shardwise.compiler.admission import NOT_YET, PLAIN_TENSOR, Admission, NewState, Refusal, predict_state
from shardwise.compiler.guards import (
    FIRST_STATE,
    KindGuard,
    MemoryWatch,
    SideEffects,
    argument_key,
    describe_call,
    describe_unfit,
    explain_difference,
    mode_key,
    split_arguments,
)
from shardwise.compiler.replay import (
    DEFAULT,
    RECORDERS,
    REDUCE_OVERHEAD,
    GraphInputs,
    Replay,
    check_mode,
    put_rates,
)
from shardwise.compiler.schedule import Schedule, schedule_moves
from shardwise.compiler.state import NOT_AGAIN, ProgramState, check_traceable, collect_state
from shardwise.compiler.tracing import (
    Backend,
    BackwardInside,
    FlatProgram,
    TracedArguments,
    TracedResult,
    check_backend,
    compile_lock,
    describe_leaf,
    leave_out_gradients,
    locals_of,
    trace_program,
)
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.random import keep_streams, take_streams
from shardwise.tensor.recorder import find_recorder, recorders, user_line
from shardwise.tensor.sharded_tensor import ShardedTensor

Answers = Sequence[tuple[str, Sequence[bytes]]]
LABEL = "compile"


@dataclass(frozen=True)
class TraceReport:
    """What a rank says about its trace: why it failed, or what it asked and which moves its graphs have, in order."""

    problem: str | None
    calls_backward: bool
    asked: Sequence[tuple[str, bytes]]
    moves: Sequence[str]

    def to_json(self) -> list[Any]:
        """The report for the other ranks."""
        asked = [[label, base64.b64encode(data).decode()] for label, data in self.asked]
        return [self.problem, self.calls_backward, asked, list(self.moves)]

    @staticmethod
    def from_json(value: list[Any]) -> TraceReport:
        """The report that another rank has sent."""
        problem, calls_backward, asked, moves = value
        return TraceReport(problem, calls_backward, [(n, base64.b64decode(text)) for n, text in asked], moves)


@dataclass(frozen=True)
class TraceVerdict:
    """What all ranks do now: use their graphs, trace again (as a step, or with these answers), or run without."""

    problem: str | None = None
    as_step: bool = False
    answers: Answers | None = None

    @property
    def is_final(self) -> bool:
        """Whether no rank traces again."""
        return self.problem is not None or (not self.as_step and self.answers is None)


def compare_traces(comm: Comm, own: TraceReport, answers: Answers) -> TraceVerdict:
    """Compare the traces of all ranks, where this one was made with some answers; the same verdict on every rank."""
    by_rank = {r: TraceReport.from_json(v) for r, v in gather_values(comm, own.to_json(), label=LABEL).items()}
    reports = list(by_rank.values())
    known = _common_answers(reports)
    if not all(_was_used(answers, i, entry, reports) for i, entry in enumerate(known)):
        return TraceVerdict(answers=known)  # what else is different may follow from what was assumed
    if any(report.calls_backward for report in reports):
        return TraceVerdict(as_step=True)
    problems = {rank: report.problem for rank, report in by_rank.items() if report.problem is not None}
    if problems:
        return TraceVerdict(problem=fold_texts(problems))
    labels = [[label for label, _ in report.asked] for report in reports]
    if any(found != labels[0] for found in labels):
        return TraceVerdict(problem=f"the ranks ask each other different things: {_first_difference(labels)}")
    moves = [report.moves for report in reports]
    if any(list(found) != list(moves[0]) for found in moves):
        return TraceVerdict(problem=f"the ranks make different moves: {_first_difference(moves)}")
    return TraceVerdict()


def _common_answers(reports: Sequence[TraceReport]) -> list[tuple[str, Sequence[bytes]]]:
    """The answers of all ranks, up to the first question that not all of them asked."""
    found: list[tuple[str, Sequence[bytes]]] = []
    for entries in zip(*(report.asked for report in reports), strict=False):
        if len({label for label, _ in entries}) > 1:
            break
        found.append((entries[0][0], [data for _, data in entries]))
    return found


def _was_used(answers: Answers, index: int, entry: tuple[str, Sequence[bytes]], reports: Sequence[TraceReport]) -> bool:
    """Whether all ranks went by the true answers to a question: those that were passed, or the same on all."""
    if index < len(answers):
        return list(answers[index][1]) == list(entry[1])
    return len({report.asked[index][1] for report in reports}) == 1


def _first_difference(by_rank: Sequence[Sequence[Any]]) -> str:
    longest = max(map(len, by_rank))
    for i in range(longest):
        found = [row[i] if i < len(row) else "nothing" for row in by_rank]
        if len(set(found)) > 1:
            return " and ".join(repr(text) for text in dict.fromkeys(found))
    return "their order"


MAX_KINDS, MAX_ATTEMPTS, MAX_POSTPONED, MAX_ROOTS = 16, 8, 3, 64
_log = package_logger(__name__)
DEFAULT_MEMORY_LIMIT = 256 << 20


@dataclass
class Kind:
    """One kind of inputs: its guard, its graphs, and what they return. Without graphs it runs as it is."""

    facts: dict[str, str]
    reason: str
    guard: KindGuard
    in_step: bool
    run: Callable[..., Sequence[Tensor]] | None = None
    result: TracedResult = field(default_factory=TracedResult)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    problem: str | None = None
    calls: int = 0
    replay: Replay | None = None


class CompiledProgram:
    """What `shardwise.compile` returns: called as the program itself; `explain()` says what was traced and why.

    >>> import shardwise
    >>> double = shardwise.compile(lambda x: x * 2, backend="eager")
    >>> double(shardwise.shard(torch.ones(2), shardwise.ChunkSpec(0, ranks=1))).full().tolist()
    [2.0, 2.0]
    """

    def __init__(
        self,
        target: Callable[..., Any],
        backend: Backend,
        uses: Sequence[object],
        memory_limit: int,
        mode: str = DEFAULT,
    ) -> None:
        self._target, self._backend, self._uses, self._limit = target, backend, uses, memory_limit
        self._mode, self._rates = mode, list[tuple[float, Tensor]]()
        self._function = target.forward if isinstance(target, nn.Module) else target
        self._state: ProgramState | None = None
        self._kinds: dict[Any, list[Kind]] = {}
        self._order: list[Kind] = []
        self._asks_ranks = True
        self._in_step = False
        self._has_stepped = False
        self._warned = False
        self._postponed = 0
        self._extra: list[weakref.ref[Any]] = []  # state that was found while the program was traced
        update_wrapper(self, self._function)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledProgram:
        """A copy of a compiled module, which is traced again."""
        target, uses = copy.deepcopy((self._target, self._uses), memo)
        return CompiledProgram(target, self._backend, uses, self._limit, self._mode)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledProgram, (self._target, self._backend, self._uses, self._limit, self._mode)

    def __getattr__(self, name: str) -> Any:
        """The attributes of a module that was compiled: `parameters()`, `train()` and others."""
        if name.startswith("_") and not isinstance(self.__dict__.get("_target"), nn.Module):
            raise AttributeError(name)
        return getattr(self.__dict__["_target"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dispatch_mode_on() or is_function_mode_on() or is_dual_level() or is_tracing():
            return self._target(*args, **kwargs)
        leaves, structure = split_arguments(args, kwargs)
        if (unfit := describe_unfit(leaves)) is not None:
            self._warn(unfit)
            return self._target(*args, **kwargs)
        state = self._known_state()
        key = self._make_key(state, leaves, structure, (args, kwargs))
        flat = self._flat_tensors(state, leaves)
        kind = next((k for k in self._kinds.get(key, ()) if k.guard.holds(flat)), None)
        if kind is None:
            if self._makes_optimizer_state() or self._has_enough_kinds():
                return self._target(*args, **kwargs)
            kind = self._trace_kind(leaves, structure, (args, kwargs))
            flat = self._flat_tensors(self._known_state(), leaves)
        kind.calls += 1
        if kind.run is not None:
            return self._run_kind(kind, flat, leaves)
        result = self._target(*args, **kwargs)
        if kind.problem is not None:
            self._warn(kind.problem)  # not before: what is wrong with the program itself is raised above, and said once
        return result

    # Kinds of calls

    def _known_state(self) -> ProgramState:
        if self._state is None:
            self._state = self._collect_state()
            self._in_step = bool(self._state.optimizers)
        return self._state

    def _collect_state(self) -> ProgramState:
        extra = [found for reference in self._extra if (found := reference()) is not None]
        return collect_state([*predict_state(self._target, self._uses), *extra])

    def _refresh_state(self) -> ProgramState:
        """The state as it is now; kinds that were traced for other tensors are dropped."""
        before, self._state = self._known_state(), self._collect_state()
        if [*map(id, before.sharded), *(id(s.tensor) for s in before.plain)] == [
            *map(id, self._state.sharded),
            *(id(s.tensor) for s in self._state.plain),
        ]:
            self._state = before
        else:
            self._kinds.clear()
        return self._state

    def _makes_optimizer_state(self) -> bool:
        """Whether this call is the first of an optimizer, which makes its state: it runs without a graph."""
        if self._has_stepped or not self._known_state().optimizers:
            return False
        self._has_stepped = True
        return not all(optimizer.state for optimizer in self._known_state().optimizers)

    def _has_enough_kinds(self) -> bool:
        if len(self._order) < MAX_KINDS:
            return False
        self._warn(f"it was traced for {MAX_KINDS} kinds of inputs already")
        return True

    def _make_key(self, state: ProgramState, leaves: Sequence[Any], structure: Any, nest: Any) -> Any:
        gradients = self._has_gradients(state) if self._in_step else ()
        key = mode_key(), argument_key(leaves, structure, nest), gradients
        comm = self._comm_of(state, leaves)
        if comm.world_size == 1 or not self._asks_ranks:
            return key
        plain = [
            (tuple(t.shape), t.dtype) for t in leaves if isinstance(t, Tensor) and not isinstance(t, ShardedTensor)
        ]
        if not plain:
            return key
        digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
        return *key, tuple(gather_raw(comm, digest, label="compile").values())

    def _has_gradients(self, state: ProgramState) -> tuple[bool, ...]:
        return tuple(t.grad is not None for t in state.local_tensors())

    def _flat_tensors(self, state: ProgramState, leaves: Sequence[Any]) -> list[Tensor]:
        own = state.local_tensors()
        gradients = [t.grad for t in own if t.grad is not None] if self._in_step else []
        return [*own, *gradients, *locals_of(leaves)]

    def _comm_of(self, state: ProgramState, leaves: Sequence[Any]) -> Comm:
        if state.comm is not None:
            return state.comm
        found = next((leaf for leaf in leaves if isinstance(leaf, ShardedTensor)), None)
        return resolve_comm() if found is None else found.comm

    # Tracing

    def _trace_kind(self, leaves: Sequence[Any], structure: Any, nest: Any) -> Kind:
        """Trace a kind of call on all ranks, or find out that it runs without a graph."""
        state = self._refresh_state()
        comm = self._comm_of(state, leaves)
        answers: Answers = ()
        for _ in range(MAX_ATTEMPTS):
            while (traced := self._trace_once(state, comm, leaves, structure, answers)) is None:
                state = self._refresh_state()
                self._in_step |= bool(state.optimizers)
            kind, report = traced
            try:
                verdict = compare_traces(comm, report, answers)
            except CommError as error:
                if self._order:  # others may run graphs that this rank cannot run
                    error.args = (f"{error}; rank {comm.rank} traces again, since {kind.reason}", *error.args[1:])
                raise
            if verdict.is_final:
                break
            self._in_step |= verdict.as_step
            answers = verdict.answers or answers
        problem = verdict.problem if verdict.is_final else f"the ranks' answers changed in {MAX_ATTEMPTS} traces"
        asks = any(label == "inputs" for label, _ in report.asked)
        self._asks_ranks = asks or (self._asks_ranks and bool(self._order))
        name = getattr(self._function, "__qualname__", type(self._target).__name__)
        _log.info("%s is traced (%s): %s", name, kind.reason, problem or "it runs as graphs")
        if problem is not None and (FIRST_STATE in problem or (NOT_YET in problem and self._postponed < MAX_POSTPONED)):
            kind.run = None  # for this call only: the next one finds the optimizer's state, or a cache that is filled
            self._postponed += NOT_YET in problem
            return kind
        if problem is not None:
            self._give_up(kind, problem)
        self._kinds.setdefault(self._make_key(state, leaves, structure, nest), []).insert(0, kind)
        self._order.append(kind)
        return kind

    def _trace_once(
        self, state: ProgramState, comm: Comm, leaves: Sequence[Any], structure: Any, answers: Answers
    ) -> tuple[Kind, TraceReport] | None:
        """Trace with this state; None if the program uses state that was not known, which is known now."""
        flat = self._flat_tensors(state, leaves)
        layouts = [leaf.sharding for leaf in leaves if isinstance(leaf, ShardedTensor)]
        guard = KindGuard(state, flat, layouts, in_step=self._in_step)
        gradients = self._has_gradients(state) if self._in_step else ()
        facts = describe_call(leaves, state, gradients)
        kind = Kind(facts, "", guard, self._in_step)
        trace = CommTrace(answers)
        problem, calls_backward, admission = None, False, None
        with compile_lock, keep_streams(comm):
            try:
                admission = Admission(state.modules, state.known())
                guard.reads = admission.reads
                self._admit_arguments(admission, leaves, structure)
                # In a copy of the context: modules that are traced do not close what they opened where they fail.
                copy_context().run(self._trace_graphs, kind, admission, state, comm, leaves, structure, trace)
            except BackwardInside:
                calls_backward = True
            except NewState:
                assert admission is not None
                self._extra += [weakref.ref(found) for found in admission.found]
                if len(self._extra) <= MAX_ROOTS:
                    return None
                problem = f"it uses more than {MAX_ROOTS} modules and tensors that are made anew for each call"
            except Refusal as refusal:
                problem, guard.always = str(refusal), NOT_YET not in str(refusal)
            except Exception as error:  # whatever stops a trace: the program runs without a graph, or raises it there
                problem = _describe_error(error)
                calls_backward = trace.backward_calls > 0 and not self._in_step
        guard.asks_gradients = admission is not None and admission.mentions("grad")
        if guard.asks_gradients and guard.argument_has_gradient(flat) and not self._in_step:
            problem = problem or "it may read the gradient that a tensor has"
        kind.facts |= guard.reads.facts()
        kind.reason = self._explain_trace(kind)
        moves = [text for name in sorted(kind.schedules) for text in (name, *kind.schedules[name].events)]
        return kind, TraceReport(problem, calls_backward, trace.asked, moves)

    def _explain_trace(self, kind: Kind) -> str:
        """Why a call was traced: what is different about it, or about what the program reads."""
        if not self._order:
            return "the first call"
        last = self._order[-1]
        return (
            explain_difference(kind.facts, last.facts) or last.guard.difference() or "the memory of a tensor is shared"
        )

    def _admit_arguments(self, admission: Admission, leaves: Sequence[Any], structure: Any) -> None:
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                admission.admit(leaf, f"argument {number}")
        if structure is not None:
            admission.admit_classes(unflatten_nest(leaves, structure))
        admission.admit_target(self._target)

    def _trace_graphs(
        self,
        kind: Kind,
        admission: Admission,
        state: ProgramState,
        comm: Comm,
        leaves: Sequence[Any],
        structure: Any,
        trace: CommTrace,
    ) -> None:
        check_traceable(state, self._in_step)
        if self._in_step and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise NotTraceableError("a whole step has an argument that requires grad; let the function use it by name")
        taped = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and any(set(comm.ranks) - set(leaf.sharding.ranks) for leaf in taped):
            raise NotTraceableError("an argument that requires grad has no part on some ranks")
        arguments = TracedArguments(structure, tuple(describe_leaf(leaf) for leaf in leaves))
        gradients = self._has_gradients(state) if self._in_step else [False] * len(state.local_tensors())
        effects = SideEffects(state)

        def check_effects() -> None:
            changed = admission.reads.undo(), effects.undo()
            if any(changed):
                _raise_effect(*changed)

        checks = admission.check, check_effects
        program = FlatProgram(
            self._target, state, arguments, leaves, comm, trace, self._in_step, gradients, *checks, kind.result
        )

        def prepare(graph: GraphModule, name: str) -> None:
            kind.schedules[name] = schedule_moves(graph, self._limit)

        real = self._flat_tensors(state, leaves)
        flat = [t.detach() if self._in_step else t for t in real]
        load_tracer()  # before frames are looked at
        try:
            with admission.watching(), torch.autograd.set_multithreading_enabled(False):
                given = [*flat, *self._learning_rates(state), _NO_STREAMS]
                kind.run = trace_program(program, given, self._backend, prepare)
        except BaseException as error:
            changed = admission.reads.undo(), effects.undo()
            if any(changed) and not isinstance(error, BackwardInside | NewState | Refusal):
                _raise_effect(*changed)
            raise
        check_effects()
        kind.guard.memory = MemoryWatch(real, frozenset(kind.result.writes))
        shared = kind.guard.memory.find(real)
        if shared is not None:
            kind.guard.shares_memory = True
            raise NotTraceableError("it writes to a tensor whose memory another argument or parameter shares")
        if self._mode == REDUCE_OVERHEAD:
            graphs, own = kind.result.graphs, len(state.local_tensors())
            inputs = GraphInputs.of(graphs.get("step"), own, len(flat), len(given), kind.result.writes)
            kind.run = kind.replay = Replay(kind.run, graphs, inputs, comm, bool(kind.result.draws.requests))

    def _give_up(self, kind: Kind, problem: str) -> None:
        kind.run, kind.problem = None, problem
        kind.guard.always |= NOT_AGAIN in problem

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            name = getattr(self._function, "__qualname__", type(self._target).__name__)
            warnings.warn(f"shardwise.compile: {name} runs without a graph: {problem}", stacklevel=3)

    # Running

    def _run_kind(self, kind: Kind, flat: list[Tensor], leaves: Sequence[Any]) -> Any:
        assert self._state is not None
        recorder = find_recorder(self._comm_of(self._state, ())) if recorders else None
        begin = time.monotonic_ns()
        result = self._run_graphs(kind, flat, leaves)
        if recorder is not None:
            name = getattr(self._function, "__name__", type(self._target).__name__)
            recorder.add_operator(f"compiled {name}", begin, {"line": user_line(), "pass": "forward"})
        return result

    def _run_graphs(self, kind: Kind, flat: list[Tensor], leaves: Sequence[Any]) -> Any:
        assert kind.run is not None and self._state is not None
        draws = kind.result.draws.requests
        rows = take_streams(draws) if draws else _NO_STREAMS
        rates = self._learning_rates(self._state)
        if not kind.in_step:
            found = kind.run(*flat, *rates, rows)
            if len(kind.result.sources) > 1 and torch.is_grad_enabled():
                leave_out_gradients(found, flat, kind.result.sources)
            return kind.result.rebuild(iter(found), self._comm_of(self._state, ()), leaves)
        with torch.no_grad():
            outputs = iter(kind.run(*flat, *rates, rows))
        result = kind.result.rebuild(outputs, self._comm_of(self._state, ()), leaves)
        for tensor, gradient in zip(self._state.local_tensors(), kind.result.gradients, strict=True):
            if gradient != "kept":
                tensor.grad = next(outputs) if gradient == "new" else None
        return result

    def _learning_rates(self, state: ProgramState) -> list[Tensor]:
        """The learning rates of the optimizers' groups, inputs of the graph: schedulers change them.

        Each is a tensor without dims: that is what compilers take as a number in a kernel of a GPU. Other tensors in
        host memory would be taken as memory of the GPU. Graphs that are recorded read them from device memory.
        """
        rates = [group["lr"] for group in state.rated_groups()]
        device = next((t.device for t in state.local_tensors() if t.device.type in RECORDERS), None)
        if self._mode == REDUCE_OVERHEAD and device is not None:
            return put_rates(rates, device, self._rates)
        return [torch.tensor(rate, dtype=torch.float64, device="cpu") for rate in rates]

    def explain(self) -> str:
        """What was traced, why, and when the moves of each graph start and end."""
        name = getattr(self._function, "__qualname__", type(self._target).__name__)
        lines = [f"{name}: {count_of(len(self._order), 'kind')} of inputs"]
        for number, kind in enumerate(self._order):
            lines.append(f"kind {number}, {count_of(kind.calls, 'call')}, traced because: {kind.reason}")
            if kind.problem is not None:
                lines.append(f"  runs without a graph: {kind.problem}")
            elif kind.replay is not None:
                lines.append(f"  {kind.replay.describe()}")
            for graph, schedule in kind.schedules.items():
                lines.append(f"  {graph}: {schedule.summary}")
                lines += [f"    {line}" for line in schedule.lines]
        return "\n".join(lines)


_NO_STREAMS = torch.empty(0, 2, dtype=torch.int64, device="cpu")


def _raise_effect(*changed: str | None) -> None:
    found = next(text for text in changed if text is not None)
    raise NotTraceableError(f"it sets {found}, {NOT_YET if found.startswith('the cache of') else NOT_AGAIN}")


def _describe_error(error: BaseException) -> str:
    """What stopped a trace, and the last line of the user's code on the way there."""
    first = (str(error).strip().splitlines() or [""])[0]
    if "convert all Tensors to FakeTensors" in first:
        return PLAIN_TENSOR
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    place = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {first}{place}"


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def compile(
    program: Callable[..., Any],
    *,
    backend: Backend = "inductor",
    mode: str | None = None,
    uses: Sequence[object] = (),
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
) -> CompiledProgram:
    """Compile a module, a function, or a whole training step on ShardedTensors.

    >>> import shardwise
    >>> step = shardwise.compile(lambda x: (x * 2).sum(), backend="eager")
    >>> step(shardwise.shard(torch.ones(4), shardwise.ChunkSpec(0, ranks=1))).item()
    8.0
    """
    if not callable(program):
        raise TypeError(f"compile takes a module or a function, got {type(program).__name__}")
    check_backend(backend)
    return CompiledProgram(program, backend, uses, memory_limit, check_mode(mode))


def route_torch_compile() -> None:
    """Let `torch.compile` hand sharded modules over, from now on."""
    original: Any = torch.compile
    if hasattr(original, "_routes_sharded_modules"):
        return

    @wraps(original)
    def torch_compile(model: Any = None, **options: Any) -> Any:
        module = model if isinstance(model, nn.Module) else _module_of_call(model)
        if module is None or options.get("disable", False) or not _is_sharded(module):
            plain = original(model, **options)
            whole = options.get("fullgraph", False) and not isinstance(model, nn.Module) and model is not None
            return _refuse_sharded_arguments(plain) if whole else plain
        program = _compile_sharded(model, **options)
        if module is not model:
            return program
        wrapper = original(model, **options)
        wrapper.forward = program
        wrapper.__dict__["__deepcopy__"] = lambda memo: torch_compile(copy.deepcopy(model, memo), **options)
        return wrapper

    torch_compile._routes_sharded_modules = True  # type: ignore[attr-defined]  # a mark of this function
    torch.compile = torch_compile


def _refuse_sharded_arguments(compiled: Any) -> Any:
    """A function compiled into one graph by torch, which says what to call instead where it gets ShardedTensors."""

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, ShardedTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            raise UnsupportedOpError(
                f"torch.compile(fullgraph=True) of {getattr(compiled, '__name__', 'a function')} got ShardedTensors, "
                "which torch takes into no graph: use shardwise.compile; an optimizer that compiles its step (those of "
                "torchao) goes into shardwise.nn.ShardedOptimizer(dict(model.named_parameters()), kind, ...)"
            )
        return compiled(*args, **kwargs)

    return call


def _module_of_call(function: Any) -> nn.Module | None:
    """The module whose own call this is, as `nn.Module.compile` passes it."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) and function.__name__ == "_call_impl" else None


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, ShardedTensor) for parameter in module.parameters())


def _compile_sharded(
    program: Callable[..., Any], *, backend: Any = "inductor", mode: Any = None, **without_meaning_here: Any
) -> CompiledProgram:
    return compile(program, backend=backend, mode=mode if mode == REDUCE_OVERHEAD else DEFAULT)
