"""Which tensors does a program use besides its arguments? Those of its modules and optimizers.

1. Modules, optimizers and ShardedTensors are found in what is compiled (see `admission`).
2. ShardedTensors keep their identity: for a trace other local tensors are put in them. Plain tensors are replaced in
   the dicts and lists that hold them.
3. Afterwards everything is as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise._torch import has_accumulate_hooks
from shardwise.comm import Comm
from shardwise.comm.stand_in import CommTrace, NotTraceableError
from shardwise.tensor.autograd_mixin import SumOfCopies
from shardwise.tensor.sharded_tensor import ShardedTensor

Container: TypeAlias = MutableMapping[Any, Any] | MutableSequence[Any]
NOT_AGAIN = "which a graph would not do again"
CACHED = ("_varied", "_known_gradient", "_shards", "_described")  # what a ShardedTensor remembers of its local tensors


@dataclass(eq=False)
class PlainSlot:
    """A plain tensor of the program's state, and all places that hold it."""

    tensor: Tensor
    places: list[tuple[Container, Any]] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Let all places hold another tensor."""
        for container, key in self.places:
            container[key] = tensor

    def has_put(self, tensor: Tensor) -> bool:
        """Whether all places still hold a tensor."""
        return all(container[key] is tensor for container, key in self.places)


@dataclass(eq=False)
class ProgramState:
    """The modules and optimizers of a program, and their tensors, each once."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    sharded: list[ShardedTensor] = field(default_factory=list)
    plain: list[PlainSlot] = field(default_factory=list)

    @property
    def comm(self) -> Comm | None:
        """The comm of the state's tensors."""
        return self.sharded[0].comm if self.sharded else None

    def known(self) -> list[object]:
        """The modules, optimizers and tensors."""
        return [*self.modules, *self.optimizers, *self.sharded, *(slot.tensor for slot in self.plain)]

    def rated_groups(self) -> list[dict[str, Any]]:
        """The groups of optimizers whose learning rate, a number, can be an input of the graph."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups if takes_rate(optimizer)]
        return list(filter(has_number_rate, groups))

    def local_tensors(self) -> list[Tensor]:
        """This rank's tensors of the state, in one order."""
        found = [local for tensor in self.sharded for local in tensor.local_parts]
        return found + [slot.tensor for slot in self.plain]


def has_number_rate(group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a group is a number; one that is a tensor is part of the state."""
    return isinstance(group.get("lr"), float | int)


def takes_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer computes with a learning rate that is a tensor, without reading its value."""
    return isinstance(optimizer, torch.optim.SGD) or all("capturable" in group for group in optimizer.param_groups)


def collect_state(roots: Sequence[object]) -> ProgramState:
    """The state in some modules, optimizers and ShardedTensors."""
    modules = list(dict.fromkeys(m for root in roots if isinstance(root, nn.Module) for m in root.modules()))
    optimizers = list(dict.fromkeys(root for root in roots if isinstance(root, torch.optim.Optimizer)))
    state = ProgramState(modules, optimizers)
    for container, key, tensor in (*_module_places(modules), *_optimizer_places(optimizers)):
        _add_tensor(state, container, key, tensor)
    for root in roots:
        if isinstance(root, ShardedTensor):
            _add_tensor(state, [], 0, root)
    return state


def _module_places(modules: Iterable[nn.Module]) -> Iterator[tuple[Container, Any, Tensor]]:
    for module in modules:
        for held in (module._parameters, module._buffers):
            yield from ((held, name, tensor) for name, tensor in held.items() if tensor is not None)


def _optimizer_places(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Container, Any, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from ((group["params"], i, tensor) for i, tensor in enumerate(group["params"]))
            yield from ((group, name, value) for name, value in group.items() if isinstance(value, Tensor))
        for held in optimizer.state.values():
            yield from ((held, name, value) for name, value in held.items() if isinstance(value, Tensor))


def _add_tensor(state: ProgramState, container: Container, key: Any, tensor: Tensor) -> None:
    if isinstance(tensor, ShardedTensor):
        if not any(tensor is known for known in state.sharded):
            state.sharded.append(tensor)
        return
    slot = next((slot for slot in state.plain if slot.tensor is tensor), None)
    if slot is None:
        slot = PlainSlot(tensor)
        state.plain.append(slot)
    slot.places.append((container, key))


@contextmanager
def swap_tensors(state: ProgramState, tensors: Sequence[Tensor], trace: CommTrace) -> Iterator[None]:
    """Let the state have other local tensors, those of a trace, inside a `with` block."""
    given = iter(tensors)
    before = [(t.local_parts, t.comm, {k: t.__dict__.pop(k) for k in CACHED if k in t.__dict__}) for t in state.sharded]
    try:
        for tensor, (parts, comm, _) in zip(state.sharded, before, strict=True):
            tensor.local_parts = tuple(next(given) for _ in parts)
            tensor.comm = trace.twin_of(comm)
        for slot in state.plain:
            _replace_plain(state, slot, slot.tensor, next(given))
        put = [slot.places[0][0][slot.places[0][1]] for slot in state.plain]
        yield
        if not all(slot.has_put(tensor) for slot, tensor in zip(state.plain, put, strict=True)):
            raise NotTraceableError(f"it sets a plain parameter, buffer or state of an optimizer, {NOT_AGAIN}")
    finally:
        for tensor, (parts, comm, cached) in zip(state.sharded, before, strict=True):
            for name in CACHED:
                tensor.__dict__.pop(name, None)
            tensor.local_parts, tensor.comm = parts, comm
            tensor.__dict__.update(cached)
        for slot in state.plain:
            _replace_plain(state, slot, slot.places[0][0][slot.places[0][1]], slot.tensor)


@contextmanager
def computing_with_tensors(state: ProgramState, rates: Sequence[Tensor]) -> Iterator[None]:
    """Let optimizers compute with steps and learning rates that are tensors, as they do for CUDA graphs."""
    wanted: list[tuple[dict[str, Any], dict[str, Any]]] = []
    rate = iter(rates)
    for optimizer in filter(takes_rate, state.optimizers):
        for group in optimizer.param_groups:
            # Fused kernels do not take a learning rate that is a tensor without values; compilers fuse as well.
            options: dict[str, Any] = {"capturable": True} if "capturable" in group else {"foreach": True}
            if "fused" in group:
                options["fused"] = None
            if has_number_rate(group):
                options["lr"] = next(rate)
            wanted.append((group, options))
    before = [{name: group[name] for name in options} for group, options in wanted]
    try:
        for group, options in wanted:
            group.update(options)
        yield
    finally:
        for (group, _), options in zip(wanted, before, strict=True):
            group.update(options)


def _replace_plain(state: ProgramState, slot: PlainSlot, old: Tensor, new: Tensor) -> None:
    """Put another tensor in the places of a plain one; optimizers find a parameter's state by the parameter."""
    slot.put(new)
    for optimizer in state.optimizers:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks for its gradient besides the sum of copies, which a graph has too."""
    others = [hook for hook in (tensor._backward_hooks or {}).values() if not isinstance(hook, SumOfCopies)]
    return bool(others) or has_accumulate_hooks(tensor)


def check_traceable(state: ProgramState, in_step: bool) -> None:
    """Raise if something about the state cannot be part of a graph."""
    for tensor in state.sharded:
        if not tensor.local_parts:
            raise NotTraceableError(f"rank {tensor.comm.rank} has no part of a tensor of the program: {tensor!r}")
    if in_step and any(_has_hooks(t) for t in state.local_tensors()):
        raise NotTraceableError("parameters have hooks for their gradients, which a whole training step would not call")
