"""Communication beside computation: parameters that are gathered ahead, gradients that are summed later.

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
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import (
    backward_pass_number,
    count_running_calls,
    is_dual_level,
    on_backward_end,
    only_accumulates,
)
from shardwise.comm.traced import is_tracing
from shardwise.ops.engine.gathers.gather_order import (
    LEAST_BYTES,
    GatherOrder,
    ParameterGather,
    StartedGather,
)
from shardwise.tensor.moving.autograd import LayoutMove
from shardwise.tensor.moving.execute import RunningMoves, start_transfers
from shardwise.tensor.moving.parts import find_whole_collective
from shardwise.tensor.moving.reductions import rescale


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


class _PendingSum:
    """A gradient that is being summed over ranks for a leaf of the tape."""

    def __init__(self, leaf: Tensor, link: LayoutMove, grad: Tensor) -> None:
        self.nbytes = grad.nbytes
        self._leaf, self._scale = leaf, link.scale
        job = link.record().make_job((grad,))
        self._running: RunningMoves = start_transfers([[job]], link.comm, link.label, least=0)

    def wait(self) -> Tensor:
        """The sum."""
        ((total,),) = self._running.wait()
        rescale(total, self._scale)
        return total

    def accumulate(self) -> None:
        """Add the sum to the gradient of the leaf."""
        total = self.wait()
        if self._leaf.grad is None:
            self._leaf.grad = total
        else:
            with torch.no_grad():
                self._leaf.grad += total


class ParameterPrefetcher:
    """What the passes of a model gather ahead and sum later, on one rank; `limit`: bytes of each, None: by itself."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._forward: dict[tuple[bool, bool], GatherOrder] = {}
        self._backward = GatherOrder(limit)
        self._pass: GatherOrder | None = None
        self._sums: dict[int, deque[_PendingSum]] = {}  # by the number of the backward pass that waits for them
        self._largest_sum = 0

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
        self._pass = self._forward.setdefault((training, torch.is_grad_enabled()), GatherOrder(self._limit))
        self._pass.begin()

    def end_forward(self) -> None:
        """It ends."""
        if self._pass is not None and backward_pass_number() == -1:
            self._pass.end()
            self._pass = None

    def ask(self, gather: ParameterGather) -> StartedGather | None:
        """The gather if it was started ahead; None if the caller has to make it."""
        if is_tracing() or is_dual_level():
            return None
        found = self._pass if backward_pass_number() == -1 else self._enter_backward()
        return None if found is None else found.ask(gather)

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
                self._backward.begin()
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

    def sum_later(self, edges: Sequence[tuple[Any, int]], link: LayoutMove, grad: Tensor) -> bool:
        """Start summing a gradient for the leaf behind a node's only edge; whether that is possible."""
        nodes = [node for node, _ in edges if node is not None]
        leaf = getattr(nodes[0], "variable", None) if len(nodes) == 1 else None
        if leaf is None or torch.is_grad_enabled() or is_tracing() or is_dual_level() or link.changes_nothing:
            return False
        if grad.is_meta:
            return False  # nothing is sent: what counts is that the move is seen, as in a rehearsal of the planner
        if not only_accumulates(nodes[0], leaf):
            return False
        if find_whole_collective(link.record().make_plan(), link.comm.ranks, link.dtype) == "all_reduce":
            return False  # it may use a collective of the group, beside those that the program itself makes
        self._enter_backward()
        pending = self._sums[backward_pass_number()]
        if grad.nbytes < LEAST_BYTES and not pending and self._limit is None:
            return False
        self._largest_sum = max(self._largest_sum, grad.nbytes)
        room = self._largest_sum + self._largest_sum // 4 if self._limit is None else self._limit
        while pending and sum(one.nbytes for one in pending) + grad.nbytes > room:
            pending.popleft().accumulate()
        pending.append(_PendingSum(leaf, link, grad))
        return True
