"""Parameters that are gathered for an operator, freed after it, and gathered again in the backward pass.

1. A parameter that is marked (`reshard_after_forward` of a plan) is sharded; an operator gets it whole. Torch would
   keep the whole one for the backward pass: of all layers, so that each rank needs the memory of the whole model.
2. So what the operator saves of it is replaced, while the operator runs, by a note of the move and of the view that was
   saved. The backward pass makes the move again when it needs the values. Every rank's backward pass meets the same
   notes in the same order, as it meets the same moves.
3. What is cast from a marked parameter, as autocast does, is marked as well: it is cast first, and then gathered.
4. In checkpointed code nothing is saved anyway. In a traced program moves are marked by their label, and the graph of
   the backward pass makes them again.

In which order does a pass through a model gather parameters, and which gathers start ahead?

1. The first pass notes which parameters each operator gathers. The next pass follows these notes: when an operator
   gets its parameters, those of the next ones are already travelling, as many bytes ahead as the operator with most
   parameters needs (`prefetch_bytes` of a plan says another number).
2. Every rank makes the same notes, as it meets the same operators in the same order. So all ranks start the same
   moves in the same order, however far each of them has computed.
3. A pass that differs from the notes gathers from there on as without them; what was started is dropped. So is what
   was gathered of a parameter that was changed in the meantime. The notes of this pass are those for the next one.

Communication beside computation: parameters that are gathered ahead, gradients that are summed later.

1. A pass is the forward pass of a whole model, or a backward pass. In each, gathers start ahead (`gather_order`).
   Nothing starts ahead across their ends: between them an optimizer may change parameters.
2. The sum of a gathered parameter's gradient goes on beside the backward pass of earlier layers. It ends when the next
   one begins, or when the backward pass ends, and is then added to the parameter's `grad`.
   A backward pass inside of another one, as checkpointed code with re-entrance has it, follows the order of the outer
   one, and adds its own sums when it ends.
3. That is possible only where nobody else waits for the gradient. With hooks of the parameter, in
   `torch.autograd.grad` and with `create_graph=True` it is summed at once. All ranks make the same moves in the same
   order in either case.
4. What a pass that raised left behind is dropped when the next one begins.
5. Where the program's own threads need all cores, what travels beside them takes longer than it saves. So some of the
   first steps are made without overlap, ranks tell each other how long both kinds took, and go on with the faster one.

Replicated values in varying computations: identity forward, one reduction backward.

Where an operation differs from rank to rank along an axis, the gradients that its replicated inputs get are addends.
`vary` passes such a tensor on and sums its gradients over the axis in the backward pass. It is done once for a tensor
and its axes, however often the tensor is used; once more after the local tensor was changed in place, as an optimizer
that works on local tensors does, or was given other memory.

A tensor that was moved to be replicated, as a sharded parameter is gathered, and then varies, is one node on the tape:
its gradients are summed and cut by one move, which takes half the bytes of a sum everywhere that is cut afterwards.

A pending sum that several operators use is summed once, and what several pinned parameters multiply is gathered once.

A norm written as operators squares its input and scales it: both need the sum. The first operator that has a tensor
summed leaves the sum with the tensor; for those that come later it is there, and taking it costs nothing. Once more
after the local tensor was changed in place or got other memory, and in another mode: what was made without a tape is
no part of one. Tensors of inference mode do not count their changes, so nothing is left with them.

So it is with a tensor that is gathered for parameters that are pinned (q, k and v of a block whose activations are
split along the sequence): it is one node on the tape, so its gradients are added up before they are summed over ranks.
What was gathered is freed with the tensor, or when another one is gathered for pinned parameters.

Checkpointed code that is computed again must do what it did before, so it finds nothing that was not made in the same
run of it: neither what is from before nor its own of the first time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._cache import cache_by_identity
from shardwise._torch import (
    backward_pass_number,
    count_running_calls,
    has_saved_tensors_hooks,
    is_dispatch_mode_on,
    is_dual_level,
    is_transformed_tensor,
    on_backward_end,
    only_accumulates,
    saved_tensors_hook,
    storage_identity,
)
from shardwise.comm import Comm, gather_values
from shardwise.comm.stand_in import is_tracing, real_comm
from shardwise.geometry import Layout, MeshSpec, Partial
from shardwise.tensor.execute import start_moves
from shardwise.tensor.move import AGAIN, Move, Started, dual_layout, move_to, with_moved_gradient
from shardwise.tensor.recorder import notify_watchers
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

LEAST_BYTES = 1 << 18  # of an operator's parameters: fewer are gathered in less time than another thread takes to begin
_CAST_FROM = "_cast_from"


def note_cast(parameter: ShardedTensor, cast: ShardedTensor) -> None:
    """Note from which parameter a tensor was cast."""
    origin = find_parameter(parameter)
    if origin is not None:
        cast.__dict__[_CAST_FROM] = origin


def find_parameter(tensor: ShardedTensor) -> ShardedTensor | None:
    """The parameter that a tensor is, or was cast from; None for anything else."""
    found: ShardedTensor | None = tensor.__dict__.get(_CAST_FROM)
    return found if found is not None else tensor if isinstance(tensor, nn.Parameter) else None


def is_cast(tensor: ShardedTensor) -> bool:
    """Whether a tensor was cast from a parameter."""
    return _CAST_FROM in tensor.__dict__


@dataclass(frozen=True, eq=False, slots=True)
class ParameterGather:
    """A move of a parameter to the layout in which an operator wants it, in its own dtype or in another one."""

    parameter: ShardedTensor
    dtype: torch.dtype
    layout: Layout
    label: str

    def is_same(self, other: ParameterGather) -> bool:
        """Whether it is the same move of the same parameter."""
        same = self.parameter is other.parameter and self.dtype == other.dtype
        return same and self.layout is other.layout and self.label == other.label

    @property
    def nbytes(self) -> int:
        """The bytes of the whole parameter."""
        return prod(self.layout.shape) * self.dtype.itemsize

    def read_state(self) -> tuple[tuple[int, int, int], ...]:
        """What changes if the parameter does."""
        return tuple((id(t), t.data_ptr(), t._version) for t in self.parameter.local_parts)

    @property
    def move(self) -> Move:
        """The move itself."""
        return Move.of(self.parameter.sharding, self.layout, self.parameter.comm, self.dtype, self.label)


class PassMemory:
    """Memory in host memory for what one pass gathers: that of one parameter is used again for a later one.

    A tensor that is made here has a storage of its own, which refers to an array over the buffer. The array is freed
    with the storage, and then the buffer is free: none that a tape, a view or another thread still has. Free buffers
    of which none has the size that is wanted are dropped, so there are never more than were in use at once.
    """

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque()  # appended to by any thread

    def allocate(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without values, as of `torch.empty`."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES or device.type != "cpu" or is_dispatch_mode_on():
            return torch.empty(shape, dtype=dtype, device=device)
        free = [self._free.popleft() for _ in range(len(self._free))]
        found = next((i for i, buffer in enumerate(free) if buffer.nbytes == nbytes), None)
        if found is None:
            free.clear()
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            buffer = free.pop(found)
            self._free.extend(free)
        array = buffer.numpy()
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return torch.empty(0, dtype=dtype, device=device).set_(torch.from_numpy(array).untyped_storage()).resize_(shape)


class StartedOperator:
    """The gathers of one operator, started together, with results in memory of the pass."""

    def __init__(self, gathers: list[ParameterGather], memory: PassMemory) -> None:
        self.nbytes = sum(g.nbytes for g in gathers)
        self._gathers = gathers
        self._states = [g.read_state() for g in gathers]
        sources = [[t.detach().to(g.dtype) for t in g.parameter.local_parts] for g in gathers]
        moves, label = [g.move for g in gathers], f"{gathers[0].label}, ahead"
        self._running = start_moves(moves, sources, label, least=0, allocate=memory.allocate)

    def is_current(self, number: int) -> bool:
        """Whether a parameter is what it was when it was gathered."""
        return self._states[number] == self._gathers[number].read_state()

    def take(self, number: int) -> tuple[Tensor, ...] | None:
        """The results of one gather, the first time."""
        result = self._running.take(number)
        if result is not None:
            notify_watchers(self._gathers[number].move)
        return result

    def finish(self) -> None:
        """Wait for all of them."""
        self._running.wait()


class GatherOrder:
    """The gathers of one kind of pass, operator by operator: those of the last time and of this time."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._last: list[list[ParameterGather]] = []
        self._now: list[list[ParameterGather]] = []
        self._follows = self._within = False
        self._next = self._room = 0
        self._ahead: deque[StartedOperator] = deque()
        self._present: StartedOperator | None = None
        self._memory = PassMemory()

    def begin(self, overlaps: bool) -> None:
        """A pass begins; `overlaps`: whether gathers may start ahead."""
        self.end()
        self._last, self._now = self._now, []
        self._within, self._next = False, 0
        most = max((sum(g.nbytes for g in gathers) for gathers in self._last), default=0)
        self._room = most + most // 4 if self._limit is None else self._limit
        self._follows = overlaps and (most >= LEAST_BYTES if self._limit is None else self._limit > 0 and most > 0)

    def end(self) -> None:
        """A pass ends, or does not follow the last one any more: what was started is dropped."""
        self._follows, self._present, self._memory = False, None, PassMemory()
        while self._ahead:
            self._ahead.popleft().finish()

    def end_operator(self) -> None:
        """The next gather is that of another operator."""
        self._within, self._present = False, None

    def find_comm(self) -> Comm | None:
        """The comm of all gathers of the last pass, if they have one and it moves beside computation."""
        comms = {id(g.parameter.comm): g.parameter.comm for gathers in self._now for g in gathers}
        if len(comms) != 1 or sum(g.nbytes for gathers in self._now for g in gathers) < LEAST_BYTES:
            return None
        (comm,) = comms.values()
        return comm if comm.capabilities.background and comm.world_size > 1 else None

    def is_last(self, gather: ParameterGather) -> bool:
        """Whether this was the last gather of the last pass."""
        return bool(self._last) and any(gather.is_same(g) for g in self._last[-1])

    def ask(self, gather: ParameterGather, sources: Sequence[Tensor]) -> Started | None:
        """The gather of these local tensors, started before, or made when it is called; None if the caller has to.

        Starts those that come next.
        """
        started = self._find_started(gather)
        if started is not None or is_dispatch_mode_on():
            return started
        return lambda: gather.move.execute(sources, self._memory.allocate)

    def _find_started(self, gather: ParameterGather) -> Started | None:
        if not self._within:
            self._now.append([])
            self._within = True
        self._now[-1].append(gather)
        if not self._follows:
            return None
        operator, number = len(self._now) - 1, len(self._now[-1]) - 1
        wanted = self._last[operator] if operator < len(self._last) else []
        if number >= len(wanted) or not wanted[number].is_same(gather):
            self.end()
            return None
        if number == 0:
            self._start_next(operator)
            self._present = self._ahead.popleft()
            self._start_next(operator)
        assert self._present is not None
        if not self._present.is_current(number):
            self.end()
            return None
        return partial(self._present.take, number)

    def _start_next(self, operator: int) -> None:
        """Start the gathers of this operator, if they are not, and of as many later ones as there is room for."""
        travelling = sum(started.nbytes for started in self._ahead)
        while self._next < len(self._last):
            gathers = self._last[self._next]
            travelling += sum(g.nbytes for g in gathers)
            if self._next > operator and travelling > self._room:
                return
            self._ahead.append(StartedOperator(gathers, self._memory))
            self._next += 1
            if self._next == operator + 1:
                return  # the next ones count from when this one is not ahead any more


def _nothing() -> None:
    return None


class _ActivePasses(threading.local):
    def __init__(self) -> None:
        self.forward: list[tuple[weakref.ref[nn.Module], ParameterPrefetcher]] = []
        self.backward: Callable[[], ParameterPrefetcher | None] = _nothing  # weak: a pass that raised leaves it behind


_active = _ActivePasses()
_prefetchers: weakref.WeakKeyDictionary[nn.Module, ParameterPrefetcher] = weakref.WeakKeyDictionary()


def register_prefetch(model: nn.Module, limit: int | None) -> None:
    """Gather parameters of a model ahead: at most `limit` bytes (None: as many as the largest operator needs)."""
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    if limit == 0 or (limit is None and max(sizes, default=0) < LEAST_BYTES):
        return
    model.register_forward_pre_hook(partial(begin_pass, limit=limit))
    model.register_forward_hook(end_pass, always_call=True)


def begin_pass(module: nn.Module, _args: Any, limit: int | None = None) -> None:
    """A hook before the forward pass of a model; `limit`: how many bytes are gathered ahead."""
    if is_tracing():
        return
    found = _prefetchers.get(module)
    if found is None:
        found = _prefetchers[module] = ParameterPrefetcher(limit)
    while _active.forward and count_running_calls(outer := _active.forward[-1][0]()) <= (outer is module):
        _active.forward.pop()  # its call was interrupted, as by Ctrl-C
    _active.forward.append((weakref.ref(module), found))
    found.begin_forward(module.training)


def end_pass(module: nn.Module, _args: Any, _output: Any) -> None:
    """A hook after the forward pass of a model, also one that raised."""
    found = _prefetchers.get(module)
    if any(running is found for _, running in _active.forward) and found is not None:
        while _active.forward.pop()[1] is not found:
            pass
        found.end_forward()


def current_prefetcher() -> ParameterPrefetcher | None:
    """That of the model whose pass this thread runs."""
    return _active.forward[-1][1] if _active.forward else _active.backward()


def end_operator() -> None:
    """An operator has what it needs: what is gathered next is for another one."""
    found = current_prefetcher()
    if found is not None:
        found.end_operator()


MOVED_GRADIENT = "gradient of a moved tensor"


def may_go_beside(move: Move) -> bool:
    """Whether a sum of gradients may be made beside the backward pass: no collective of the group may.

    It would be beside those that the program itself makes.
    """
    return move.collective is None or move.collective.kind != "all_reduce"


class _PendingSum:
    """A gradient that is being summed over ranks for a leaf of the tape."""

    def __init__(self, leaf: Tensor, move: Move, grad: Tensor) -> None:
        self.nbytes = grad.nbytes
        self._leaf = leaf
        notify_watchers(move)
        self._running = start_moves([move], [(grad,)], least=0)

    def wait(self) -> Tensor:
        """The sum."""
        ((total,),) = self._running.wait()
        return total

    def accumulate(self) -> None:
        """Add the sum to the gradient of the leaf."""
        total = self.wait()
        if self._leaf.grad is None:
            self._leaf.grad = total
        else:
            with torch.no_grad():
                self._leaf.grad += total


_WARM_UP = 2  # steps: in the first one the order is noted
_TURNS = 4  # steps, with overlap and without


class OverlapTrial:
    """Whether overlap wins: by the times of a few steps with and without it, on which the ranks of a comm agree."""

    def __init__(self) -> None:
        self.overlaps = True
        self._steps = 0
        self._began: float | None = None
        self._least = {True: float("inf"), False: float("inf")}

    @property
    def is_over(self) -> bool:
        """Whether it is decided."""
        return self._steps > _WARM_UP + _TURNS

    def begin(self, comm: Comm | None) -> None:
        """A training step begins; `comm`: that of the gathers of the step before, the same on all of its ranks."""
        self._began = None
        turn, self._steps = self._steps - _WARM_UP, self._steps + 1
        if turn < 0:
            return
        self.overlaps = comm is None or turn % 2 == 0
        if comm is not None and turn < _TURNS:
            self._began = time.perf_counter()
        elif comm is not None:
            said = gather_values(real_comm(comm), [self._least[True], self._least[False]], label="overlap")
            with_overlap, without = (max(times[i] for times in said.values()) for i in (0, 1))
            self.overlaps = with_overlap <= without

    def end(self) -> None:
        """The backward pass of a step has ended."""
        if self._began is not None:
            self._least[self.overlaps] = min(self._least[self.overlaps], time.perf_counter() - self._began)
            self._began = None


class ParameterPrefetcher:
    """What the passes of a model gather ahead and sum later, on one rank; `limit`: bytes of each, None: by itself."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._forward: dict[tuple[bool, bool], GatherOrder] = {}
        self._backward = GatherOrder(limit)
        self._pass: GatherOrder | None = None
        self._sums: dict[int, deque[_PendingSum]] = {}  # by the number of the backward pass that waits for them
        self._largest_sum = 0
        self._trial = OverlapTrial()

    def begin_forward(self, training: bool) -> None:
        """A forward pass of the model begins; one that is part of a backward pass belongs to that."""
        if backward_pass_number() != -1:
            return
        _active.backward = _nothing
        for left in self._sums.values():
            for pending in left:
                pending.wait()
        self._sums.clear()
        self._backward.end()
        trains = training and torch.is_grad_enabled() and not is_tracing()
        self._pass = self._forward.setdefault((training, torch.is_grad_enabled()), GatherOrder(self._limit))
        if trains and self._limit is None and not self._trial.is_over:
            self._trial.begin(self._pass.find_comm())
        self._pass.begin(self._trial.overlaps)

    def end_forward(self) -> None:
        """It ends."""
        if self._pass is not None and backward_pass_number() == -1:
            self._pass.end()
            self._pass = None

    def ask(self, gather: ParameterGather, sources: Sequence[Tensor]) -> Started | None:
        """See `GatherOrder.ask`."""
        if is_tracing() or is_dual_level():
            return None
        found = self._pass if backward_pass_number() == -1 else self._enter_backward()
        return None if found is None else found.ask(gather, sources)

    def end_operator(self) -> None:
        """See `GatherOrder.end_operator`."""
        found = self._pass if backward_pass_number() == -1 else self._backward
        if found is not None:
            found.end_operator()

    def is_kept(self, gather: ParameterGather) -> bool:
        """Whether the backward pass needs a parameter again as soon as the forward pass has ended."""
        return self._pass is not None and self._pass.is_last(gather)

    def _enter_backward(self) -> GatherOrder:
        number = backward_pass_number()
        if number not in self._sums:
            if not self._sums:
                self._backward.begin(self._trial.overlaps)
            self._sums[number] = deque()
            on_backward_end(partial(self._end_backward, number))
        _active.backward = weakref.ref(self)
        return self._backward

    def _end_backward(self, number: int) -> None:
        left = self._sums.pop(number, ())
        if not self._sums:
            _active.backward = _nothing
            self._backward.end()
        for pending in left:
            pending.accumulate()
        if not self._sums:
            self._trial.end()

    def sum_later(self, edges: Sequence[tuple[Any, int]], move: Move, grad: Tensor) -> bool:
        """Start summing a gradient for the leaf behind a node's only edge; whether that is possible."""
        nodes = [node for node, _ in edges if node is not None]
        leaf = getattr(nodes[0], "variable", None) if len(nodes) == 1 else None
        if leaf is None or torch.is_grad_enabled() or is_tracing() or is_dual_level() or move.changes_nothing:
            return False
        if grad.is_meta:
            return False  # nothing is sent: what counts is that the move is seen, as in a rehearsal of the planner
        if not only_accumulates(nodes[0], leaf):
            return False
        if not may_go_beside(move):
            return False
        self._enter_backward()
        if not self._trial.overlaps:
            return False
        pending = self._sums[backward_pass_number()]
        if grad.nbytes < LEAST_BYTES and not pending and self._limit is None:
            return False
        self._largest_sum = max(self._largest_sum, grad.nbytes)
        room = self._largest_sum + self._largest_sum // 4 if self._limit is None else self._limit
        while pending and sum(one.nbytes for one in pending) + grad.nbytes > room:
            pending.popleft().accumulate()
        pending.append(_PendingSum(leaf, move, grad))
        return True


_MARK, _NOTE = "reshard_after_forward", "_gathered_from"
ALWAYS, AUTOMATIC = "always", "automatic"


def mark_for_resharding(tensor: ShardedTensor, kind: str = ALWAYS) -> None:
    """Free what is gathered of a parameter after each operator of the forward pass.

    `AUTOMATIC`: but not after the last one, as the backward pass begins with it.
    """
    tensor.__dict__[_MARK] = kind


def pin_parameter(tensor: ShardedTensor, axes: Iterable[str]) -> None:
    """Keep a parameter where it is along some axes: operators move the other tensors to it."""
    tensor._pinned_axes = frozenset(axes)
    tensor._fingerprint = None


def keep_pins(source: ShardedTensor, results: Any) -> None:
    """Pin views and casts of a tensor that is pinned."""
    for made in results if isinstance(results, list | tuple) else (results,):
        if isinstance(made, ShardedTensor):
            pin_parameter(made, source._pinned_axes)


def copy_mark(source: ShardedTensor, target: Any) -> None:
    """Mark what was cast from a parameter as the parameter is marked."""
    if isinstance(target, ShardedTensor):
        note_cast(source, target)
        if source._pinned_axes:
            keep_pins(source, target)
        if _MARK in source.__dict__:
            target.__dict__[_MARK] = source.__dict__[_MARK]


def find_gather(source: ShardedTensor, layout: Layout, label: str) -> ParameterGather | None:
    """The move of a parameter, or of what was cast from one; None for anything else."""
    parameter = find_parameter(source)
    if parameter is None or layout.depends_on_data or source.sharding.depends_on_data:
        return None
    if len(source.sharding.ranks) != source.comm.world_size:
        return None  # a rank without a part has nothing to ask for, and all ranks must start the same moves
    if any(part.is_inference() for part in parameter.local_parts):
        return None  # whether they were changed in the meantime is not to be seen
    return ParameterGather(parameter, source.dtype, layout, label)


@dataclass(frozen=True, eq=False, slots=True)
class GatherNote:
    """From which local tensors of a parameter a whole one was made, and how."""

    gather: ParameterGather
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    memory: int
    prefetcher: ParameterPrefetcher | None

    def gather_again(self) -> Tensor:
        """The whole tensor, made again."""
        if tuple(t._version for t in self.sources) != self.versions:
            raise RuntimeError(
                "a parameter that is needed for the backward pass was changed in place after the forward pass; call "
                "backward before the optimizer's step"
            )
        gather = replace(self.gather, label=f"{self.gather.label}{AGAIN}")
        started, sources = None, [t.detach().to(gather.dtype) for t in self.sources]
        if self.prefetcher is not None and all(map(is_, self.sources, gather.parameter.local_parts)):
            started = self.prefetcher.ask(gather, sources)
            self.prefetcher.end_operator()
        with torch.no_grad():
            return gather.move.run(sources, started)[0]


@dataclass(frozen=True, eq=False, slots=True)
class SavedView:
    """What an operator saved of a gathered tensor."""

    note: GatherNote
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def note_gather(moved: ShardedTensor, source: ShardedTensor, gather: ParameterGather) -> None:
    """Note how a tensor was gathered, if its source is marked."""
    mark, prefetcher = source.__dict__.get(_MARK), current_prefetcher()
    if mark is None or not moved.local_parts:
        return
    if mark == AUTOMATIC and prefetcher is not None and prefetcher.is_kept(gather):
        return
    sources = gather.parameter.local_parts
    versions = tuple(t._version for t in sources)
    memory = storage_identity(moved.local_parts[0].untyped_storage())
    moved.__dict__[_NOTE] = GatherNote(gather, sources, versions, memory, prefetcher)


def label_again(source: ShardedTensor, label: str) -> str:
    """The label of a move that the backward pass makes again."""
    return f"{label}{AGAIN}" if _MARK in source.__dict__ else label


def free_after_forward(tensors: Sequence[ShardedTensor]) -> AbstractContextManager[Any]:
    """A context in which an operator, which has its inputs now, saves notes in place of gathered parameters."""
    end_operator()
    notes = [t.__dict__[_NOTE] for t in tensors if _NOTE in t.__dict__]
    if not notes or not torch.is_grad_enabled() or is_tracing() or has_saved_tensors_hooks():
        return nullcontext()
    by_memory = {note.memory: note for note in notes}

    def pack(tensor: Tensor) -> Any:
        note = by_memory.get(storage_identity(tensor.untyped_storage()))
        if note is None:
            return tensor
        return SavedView(note, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, SavedView):
        return saved  # type: ignore[no-any-return]  # a tensor
    return saved.note.gather_again().as_strided(saved.size, saved.stride, saved.offset)


_SUMMED, _GATHERED = "_summed", "_gathered"


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """The local tensors after a move, from which ones and in which mode; `varied` is what `vary` keeps of them.

    Not a ShardedTensor, which would keep the one that was moved alive, and be kept by it.
    """

    sources: tuple[Tensor, ...]
    modes: tuple[Any, ...]
    hook: weakref.ref[Any] | None
    state: tuple[Any, ...]
    layout: Layout
    parts: tuple[Tensor, ...]
    anchor: Tensor | None
    varied: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def keep(tensor: ShardedTensor, moved: ShardedTensor, name: str) -> None:
        """Leave the result of a move with a tensor."""
        hook = None if (found := saved_tensors_hook()) is None else weakref.ref(found)
        modes, state = _modes(tensor), _state(tensor)
        kept = _Moved(tensor.local_parts, modes, hook, state, moved.sharding, moved.local_parts, moved._anchor)
        moved.__dict__["_varied"] = kept.varied
        tensor.__dict__[name] = kept

    def is_in_mode(self, tensor: ShardedTensor) -> bool:
        """Whether it was made in these modes: alike on all ranks, which make the same calls."""
        return self.modes == _modes(tensor) and _dereference(self.hook) is saved_tensors_hook()

    def take(self, tensor: ShardedTensor) -> ShardedTensor | None:
        """The result as a tensor, unless what it was moved from has changed."""
        same = all(a is b for a, b in zip(self.sources, tensor.local_parts, strict=True))
        if not same or self.state != _state(tensor):
            return None
        found = wrap(self.layout, self.parts, tensor.comm, dtype=tensor.dtype, anchor=self.anchor)
        found.__dict__["_varied"] = self.varied
        return found


def is_summed(tensor: ShardedTensor) -> bool:
    """Whether a pending tensor's sum was left with it in these modes."""
    known: _Moved | None = tensor.__dict__.get(_SUMMED)
    return known is not None and known.is_in_mode(tensor)


def has_kept_sum(tensor: ShardedTensor) -> bool:
    """Whether a sum was left with a pending tensor, in whatever mode."""
    return _SUMMED in tensor.__dict__


def find_sum(tensor: ShardedTensor, wanted: Layout) -> ShardedTensor | None:
    """The sum of a pending tensor that an earlier operator made, if this one wants nothing pending; or None."""
    if wanted.pending is not None or is_dual_level() or not is_summed(tensor):
        return None
    known: _Moved = tensor.__dict__[_SUMMED]
    return known.take(tensor)


def keep_sum(tensor: ShardedTensor, summed: ShardedTensor) -> None:
    """Leave the sum of a pending tensor with it, if it is otherwise where the tensor is."""
    if is_dual_level() or _has_uncounted(tensor) or summed.sharding != _sum_layout(tensor.sharding):
        return
    _Moved.keep(tensor, summed, _SUMMED)
    tensor._fingerprint = None  # another one says that it is summed


def copy_sum_note(tensor: ShardedTensor, made: ShardedTensor) -> None:
    """Note of another object for a tensor that its sum was made: strategies differ by it, current or not."""
    if _SUMMED in tensor.__dict__:
        made.__dict__[_SUMMED] = tensor.__dict__[_SUMMED]


class _LastGathered(threading.local):
    """The tensor with which this thread has left a gathered one."""

    source: Callable[[], ShardedTensor | None] = staticmethod(lambda: None)


_last_gathered = _LastGathered()


def _find_gathered(tensor: ShardedTensor, wanted: Layout) -> ShardedTensor | None:
    """What an earlier operator gathered of a tensor for pinned parameters, in the layout wanted; or None."""
    known: _Moved | None = tensor.__dict__.get(_GATHERED)
    if known is None or is_dual_level() or not known.layout.is_used_as(wanted) or not known.is_in_mode(tensor):
        return None
    found = known.take(tensor)
    if found is not None:
        found.__dict__[_SOURCE] = tensor
    return found


def _keep_gathered(tensor: ShardedTensor, gathered: ShardedTensor) -> None:
    """Leave with a tensor what was gathered of it, in place of what was left with another one before."""
    before = _last_gathered.source()
    if before is not None:
        before.__dict__.pop(_GATHERED, None)
    if not is_dual_level() and not _has_uncounted(tensor):
        _Moved.keep(tensor, gathered, _GATHERED)
        _last_gathered.source = weakref.ref(tensor)


def _has_uncounted(tensor: ShardedTensor) -> bool:
    return any(t.is_inference() for t in tensor.local_parts)


def _modes(tensor: ShardedTensor) -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled() and tensor.requires_grad, torch.is_inference_mode_enabled(), is_tracing()


def _dereference(hook: weakref.ref[Any] | None) -> Any:
    """The hook, or None if there was none; one that is gone equals no other."""
    return None if hook is None else hook() or hook


def _state(tensor: ShardedTensor) -> tuple[Any, ...]:
    """What else has to be as it was: versions and memory of the local tensors."""
    traced = is_tracing()  # then nothing is put in place of a tensor's memory
    return tuple((t._version, 0 if traced else storage_identity(t.untyped_storage())) for t in tensor.local_parts)


@cache_by_identity
def _sum_layout(layout: Layout) -> Layout | None:
    """The layout with nothing pending that is otherwise the same."""
    spec = layout.spec
    if not isinstance(spec, MeshSpec):
        return None
    placements = [p.dual for p in spec.placements]
    return MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)


_SOURCE = "_moved_from"


class _MoveAndVary(torch.autograd.Function):
    """From the tensors before a move to its result; gradients are summed and moved back at once."""

    @staticmethod
    def forward(ctx: Any, back: Move, moved: Tensor, *sources: Tensor) -> Tensor:
        ctx.back, ctx.prefetcher = back, current_prefetcher()
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        if ctx.prefetcher is not None and ctx.prefetcher.sum_later(ctx.next_functions, ctx.back, grad):
            return None, None, *(None for _ in ctx.next_functions[1:])
        return None, None, *ctx.back.run_gradients((grad,))


def move_input(tensor: ShardedTensor, layout: Layout, label: str, *, beside_pinned: bool = False) -> ShardedTensor:
    """A tensor in the layout in which an operator wants it; from which one it was moved is noted.

    `beside_pinned`: another tensor of the operator is pinned, so others that are pinned will want it so, too.
    """
    pending = tensor.sharding.pending is not None
    if pending and (summed := find_sum(tensor, layout)) is not None:
        return summed if summed.sharding.is_used_as(layout) else move_input(summed, layout, label)
    if beside_pinned and (gathered := _find_gathered(tensor, layout)) is not None:
        return gathered
    traced = is_tracing()
    gather = None if traced else find_gather(tensor, layout, label)
    prefetcher = None if gather is None else current_prefetcher()
    started = None if gather is None or prefetcher is None else prefetcher.ask(gather, tensor.local_parts)
    label = label_again(tensor, label) if traced else label
    locals_, anchor = move_to(tensor, layout, label, started=started)
    moved = wrap(layout, locals_, tensor.comm, dtype=tensor.dtype, anchor=anchor)
    moved.__dict__[_SOURCE] = tensor
    if gather is not None:
        note_gather(moved, tensor, gather)
    if pending:
        keep_sum(tensor, moved)
    elif beside_pinned and gather is None:
        _keep_gathered(tensor, moved)
    return moved


def vary_along(tensor: ShardedTensor, layout: Layout, axes: Sequence[int]) -> Tensor:
    """The local tensor of a tensor that is replicated along these axes, its gradient summed over them."""
    local = tensor.local_parts[0]
    if not axes or not local.requires_grad or not torch.is_grad_enabled():
        return local
    cache: dict[tuple[int, ...], tuple[Tensor, tuple[int, int], Tensor]] = tensor.__dict__.setdefault("_varied", {})
    key = tuple(axes)
    known = cache.get(key)
    hidden = is_tracing() or is_transformed_tensor(local)
    state = local._version, 0 if hidden else storage_identity(local.untyped_storage())  # `data` may be replaced
    if known is None or known[0] is not local or known[1] != state:
        out = _record_varying(tensor, local, layout, key)
        known = cache[key] = (local, state, out)
    return known[2]


def _record_varying(tensor: ShardedTensor, local: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    src, dst, addends = _pending_layout(layout, axes), dual_layout(layout), layout.pending is not None
    source: ShardedTensor | None = tensor.__dict__.get(_SOURCE)
    before, comm, dtype = tensor if source is None else source, tensor.comm, tensor.dtype
    if is_dual_level() or before.sharding.pending is not None or (source is None and not is_cast(tensor)):
        return with_moved_gradient(Move.of(src, dst, comm, dtype, "gradient of a replicated tensor", limit=None), local)
    label, scale, out_dtype, forward = "gradient of a replicated tensor", (1, 1), None, None
    if source is not None:
        forward = Move.of(source.sharding, layout, comm, dtype, "parameter", limit=None)
        # Of its own label: between the same layouts, the gradient of what is no addend moves back in another manner.
        label = f"{MOVED_GRADIENT}, of addends" if addends else MOVED_GRADIENT
        scale, dst = forward.dual.scale, forward.dual.dst
    if is_cast(before) and (parameter := find_parameter(before)) is not None:  # the cast is part of the move
        before, out_dtype = parameter, parameter.dtype
    move = Move.of(src, dst, comm, dtype, label, limit=None, scale=scale, out_dtype=out_dtype)
    if forward is not None and addends:
        move.__dict__["dual"] = forward  # what comes back to the gradient of addends are addends
    return _MoveAndVary.apply(move, local.detach(), *before._tape_tensors())  # type: ignore[no-untyped-call, no-any-return]


@cache_by_identity
def _pending_layout(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout of local gradients that are pending along axes."""
    gradient = dual_layout(layout)
    spec = gradient.spec
    assert isinstance(spec, MeshSpec)
    pending = [Partial("sum") if a in axes else p for a, p in enumerate(spec.placements)]
    return MeshSpec(spec.mesh, pending, spec.order).layout(gradient.shape)
