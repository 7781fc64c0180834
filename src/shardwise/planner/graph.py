"""What does a model compute, and in which layouts could each part of it be? Nodes, values, and their candidates.

1. A step runs once without values, with everything replicated, on one rank of the mesh. The engine shows each operator
   that it computes by strategies: so nodes are what the engine will decide about in training, rules that were
   registered or discovered among them. Operators below are counted (`StepMeter`), and so is what autograd keeps.
2. A node's candidates are its rule's answer, one strategy for each axis. A parameter's are all splits of its dims that
   are even enough; inputs are split along the batch, along their dim 1, or whole.
3. Blocks of a list of modules that compute the same are one class: its nodes and parameters are decided once. A value
   is one class with the values of other blocks that have the same producer and the same consumers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise._torch import pytree, storage_identity
from shardwise.comm import Comm
from shardwise.geometry import Layout, LayoutError, Mesh, Partial, Placement, Replicate, Shard
from shardwise.geometry.notation import DType
from shardwise.nn.plan import REPLICATED, ModelPlan, PlanError
from shardwise.nn.shard_module import find_blocks, shard_by_patterns
from shardwise.nn.stages import NoValues
from shardwise.ops.explain import watch_calls
from shardwise.ops.implicit_replication import plain_as_replicated
from shardwise.ops.propagation import ask_for_strategies
from shardwise.ops.rule import OperatorCall, Steps, find_rule
from shardwise.ops.views import mesh_spec, mesh_view
from shardwise.planner.rehearsal import (
    Inputs,
    Loss,
    MeteredOperator,
    StepMeter,
    copy_to_meta,
    inputs_on_meta,
    note_modules,
    silent_comm,
    step_without_values,
    sum_of_outputs,
)
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import Move, is_differentiated
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Placements: TypeAlias = tuple[Placement, ...]
"""One placement for each axis of the mesh."""
PARAMETER, INPUT, CONSTANT, RESULT = "parameter", "input", "constant", "result"
MOST_CANDIDATES = 400  # of a node
UNEVEN = 16  # a dim that is not divided by its ranks is split if it has this many times as many elements


@dataclass(frozen=True)
class GraphValue:
    """A tensor of the step: where it comes from, how large it is, whether a gradient flows back to it.

    `source`: one of "parameter", "input", "constant" and "result"; `name` that of the parameter, or of the module
    that made it. `kept`: it is held for the backward pass.
    """

    number: int
    source: str
    name: str
    shape: tuple[int, ...]
    itemsize: int
    differentiated: bool
    kept: bool = False
    floating: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Node:
    """An operator of the step: the numbers of its values, its strategies by axis, and what it computes when whole.

    `kept_bytes`: what is held for the backward pass of what it computes on the way.
    """

    call: OperatorCall
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    strategies: tuple[tuple[AxisStrategy, ...], ...]
    operators: tuple[MeteredOperator, ...]
    kept_bytes: int = 0


@dataclass(frozen=True)
class Graph:
    """A step of a model, traced whole: nodes in their order, and values by number; `returned` by each module."""

    mesh: Mesh
    nodes: tuple[Node, ...]
    values: tuple[GraphValue, ...]
    blocks: tuple[str, ...]
    parameters: Mapping[str, int]
    returned: Mapping[str, int]
    buffer_bytes: int = 0


class _Tracer:
    """Collects what `watch_calls` shows."""

    def __init__(self, mesh: Mesh, meter: StepMeter) -> None:
        self.mesh, self.meter = mesh, meter
        self.nodes: list[Node] = []
        self.values: list[GraphValue] = []
        self.keep_alive: list[Any] = []
        self._by_tensor: dict[int, int] = {}
        self._by_storage: dict[tuple[int, tuple[int, ...]], int] = {}
        self._storages: dict[int, int] = {}
        self._seen_operators = 0
        self._is_asking = False
        self._kept: dict[int, tuple[int, int]] = {}
        self._strategies: dict[Hashable, tuple[tuple[AxisStrategy, ...], ...]] = {}

    def add(self, source: str, name: str, tensor: Tensor, differentiated: bool) -> int:
        """A new value for a tensor."""
        number = len(self.values)
        found = GraphValue(number, source, name, tuple(tensor.shape), tensor.dtype.itemsize, differentiated)
        found = replace(found, floating=tensor.is_floating_point())
        self.values.append(found)
        self.keep_alive.append(tensor)
        self._by_tensor[id(tensor)] = number
        for local in tensor.local_parts if isinstance(tensor, ShardedTensor) else (tensor,):
            key = storage_identity(local.untyped_storage())
            self._by_storage[key, tuple(tensor.shape)] = number
            self._storages[number] = key
        return number

    def find(self, tensor: ShardedTensor) -> int:
        """The value of a tensor; one that nothing of the step has made is a constant."""
        known = self._by_tensor.get(id(tensor))
        if known is None:
            key = storage_identity(tensor.local_parts[0].untyped_storage()), tuple(tensor.shape)
            known = self._by_storage.get(key)
        return self.add(CONSTANT, "", tensor, False) if known is None else known

    def see(self, call: OperatorCall, tensors: Sequence[ShardedTensor], results: Any) -> None:
        """Note one operator."""
        if self._is_asking:
            return
        inputs = tuple(map(self.find, tensors))
        self.keep_alive += [*tensors, results]
        recorded = tuple(map(is_differentiated, tensors))
        made = [t for t in pytree.tree_leaves(results) if isinstance(t, ShardedTensor)]
        if made and all(id(t) in self._by_tensor for t in made) and not call.written:
            return  # steps of which each was shown
        module = self.meter.modules[-1]
        outputs = tuple(self.add(RESULT, module, t, is_differentiated(t)) for t in made)
        operators = tuple(self.meter.operators[self._seen_operators :])
        strategies = self._strategies_of(call, tensors, recorded)
        self._seen_operators = len(self.meter.operators)
        self.nodes.append(Node(call, module, inputs, outputs, strategies, operators))

    def _strategies_of(
        self, call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: tuple[bool, ...]
    ) -> tuple[tuple[AxisStrategy, ...], ...]:
        """What may be done along each axis; an operator that was seen before is not asked again."""
        key = call.key, tuple((t.sharding.shape, t.dtype) for t in tensors), recorded
        known = self._strategies.get(key)
        if known is None:
            self._is_asking = True
            try:
                axes = range(self.mesh.ndim)
                known = tuple(tuple(find_strategies(call, tensors, recorded, self.mesh, a)) for a in axes)
                self._strategies[key] = known
            finally:
                self._is_asking = False
        return known

    def keeping(self) -> AbstractContextManager[Any]:
        """Note what autograd holds for the backward pass, and during which operator."""

        def keep(tensor: Tensor) -> Tensor:
            key = storage_identity(tensor.untyped_storage())
            if not self._is_asking and key not in self._kept:
                self._kept[key] = len(self.nodes), tensor.untyped_storage().nbytes()
                self.keep_alive.append(tensor)
            return tensor

        return saved_tensors_hooks(keep, lambda tensor: tensor)

    def mark_kept(self) -> None:
        """Of the values that share memory, the one that is read by something that computes is held.

        What is no value was made on the way by an operator.
        """
        readers = {number for node in self.nodes if node.operators for number in node.inputs}
        groups: dict[int, list[int]] = {}
        for number, key in self._storages.items():
            groups.setdefault(key, []).append(number)
        for key, (place, nbytes) in self._kept.items():
            if numbers := groups.get(key):
                first = next((n for n in numbers if n in readers), numbers[0])
                if self.values[first].source == RESULT:
                    self.values[first] = replace(self.values[first], kept=True)
            elif place < len(self.nodes):
                node = self.nodes[place]
                self.nodes[place] = replace(node, kept_bytes=node.kept_bytes + nbytes)


def trace(model: nn.Module, inputs: Inputs, mesh: Mesh, computed: DType | None, loss: Loss | None = None) -> Graph:
    """The step of a model with everything whole: `inputs` are those of all ranks together.

    >>> graph = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(2, 4),), Mesh.of(tp=2), None)
    >>> [node.module for node in graph.nodes], sorted(graph.parameters)
    (['0', '1', ''], ['0.bias', '0.weight'])
    """
    dtype: torch.dtype | None = None if computed is None else getattr(torch, computed.torch_name)
    twin, given = copy_to_meta(model, dtype), inputs_on_meta(inputs, dtype)
    ranks = tuple(sorted(mesh.ranks.reshape(-1).tolist()))
    comm, meter = silent_comm(ranks[0], ranks), StepMeter()
    tracer, returned = _Tracer(mesh, meter), dict[str, int]()
    with step_without_values(comm):
        shard_by_patterns(twin, ModelPlan(mesh, {}, input_plan=REPLICATED), 0, comm)
        parameters = {name: tracer.add(PARAMETER, name, p, p.requires_grad) for name, p in twin.named_parameters()}
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor):
                tracer.add(INPUT, "", leaf, False)
        with torch.device("meta"), NoValues(), meter, watch_calls(tracer.see), tracer.keeping():
            try:
                with note_modules(twin, meter.modules, lambda name, t: returned.update({name: tracer.find(t)})):
                    outputs = twin(**given) if isinstance(given, Mapping) else twin(*given)
                (loss or sum_of_outputs)(outputs)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
                raise PlanError(
                    f"a step of {type(model).__name__} cannot be run without values: {type(error).__name__}: {error}; "
                    "pass inputs= (the arguments of one forward pass of all ranks together), or loss="
                ) from error
    tracer.mark_kept()
    held = sum(b.numel() * b.element_size() for b in twin.buffers())
    blocks = tuple(find_blocks(model))
    return Graph(mesh, tuple(tracer.nodes), tuple(tracer.values), blocks, parameters, returned, held)


class AxisStrategy(NamedTuple):
    """What a node may do along one axis: placements of its tensors and results, and moves that it makes by itself."""

    inputs: Placements
    outputs: Placements
    moves: tuple[Move, ...] = ()


class _Tensor(NamedTuple):
    """What a rule is asked about, without memory."""

    sharding: Layout
    dtype: torch.dtype


def find_strategies(
    call: OperatorCall, tensors: Sequence[ShardedTensor], recorded: Sequence[bool], mesh: Mesh, axis: int
) -> list[AxisStrategy]:
    """The strategies of a call along an axis: those for whole tensors, and those for tensors split along a dim.

    Rules may look at how tensors are laid out now. One that answers with steps is tried, and its moves are noted.
    """
    guesses: list[Placements] = [(Replicate(),) * len(tensors)]
    for dim in range(max((t.ndim for t in tensors), default=0)):
        ranks = mesh.shape[axis]
        fits = [t.ndim > dim and t.shape[dim] % ranks == 0 and t.shape[dim] > 0 for t in tensors]
        guesses += [tuple(Shard(dim) if fit else Replicate() for fit in fits)] if any(fits) else []
        guesses += [(Shard(dim), *guesses[0][1:])] if fits[0] and sum(fits) > 1 else []
    floats = [t.dtype.is_floating_point for t in tensors]
    guesses += [tuple(Partial("sum") if each else Replicate() for each in floats)] if any(floats) else []
    found: dict[tuple[Placements, Placements], AxisStrategy] = {}
    for guess in guesses:
        for one in _ask_along(call, tensors, recorded, mesh, axis, guess):
            found.setdefault((one.inputs, one.outputs), one)
    return list(found.values())


def _ask_along(
    call: OperatorCall,
    tensors: Sequence[ShardedTensor],
    recorded: Sequence[bool],
    mesh: Mesh,
    axis: int,
    guess: Placements,
) -> Iterator[AxisStrategy]:
    """The rule's strategies where the tensors are so; strategies with a price of their own are not among them."""
    specs = [
        mesh_spec(mesh, tuple(p if a == axis else Replicate() for a in range(mesh.ndim)), mesh.axes) for p in guess
    ]
    with suppress(LayoutError, ValueError, NotImplementedError, UnsupportedOpError):
        given = [_Tensor(s.layout(tuple(t.shape)), t.dtype) for s, t in zip(specs, tensors, strict=True)]
        if not isinstance(find_rule(call.op), Steps):
            answer = ask_for_strategies(call, given, recorded, specs)  # type: ignore[arg-type]  # all that is read
            if not isinstance(answer, Steps):
                for s in answer:
                    if (s.axes is None or axis in s.axes) and s.cost is None and s.finish is None:
                        yield AxisStrategy(_without_lengths(s.inputs), _without_lengths(s.outputs))
                return
        made, moves = _try_steps(call, given, tensors[0].comm)
        outputs = [spec.placements[axis] for t in made if (spec := mesh_view(t.sharding)) is not None]
        if len(outputs) == len(made):
            yield AxisStrategy(guess, _without_lengths(outputs), moves)


def _without_lengths(placements: Sequence[Placement | None]) -> Placements:
    """Splits are even here; what is not said is whole."""
    return tuple(Shard(p.dim) if isinstance(p, Shard) else p or Replicate() for p in placements)


def _try_steps(
    call: OperatorCall, given: Sequence[_Tensor], comm: Comm
) -> tuple[list[ShardedTensor], tuple[Move, ...]]:
    """The results of an operator on such tensors, and the moves that it makes."""
    made = [
        wrap(t.sharding, (torch.empty(t.sharding.local_shapes(comm.rank)[0], dtype=t.dtype, device="meta"),), comm)
        for t in given
    ]
    args, kwargs = call.fill_slots(made)
    try:
        with StepMeter() as meter, plain_as_replicated(), torch.no_grad():
            results = call.op(*args, **kwargs)
    except RuntimeError as error:
        raise ValueError("not for such tensors") from error
    moves = tuple(m.record for m in meter.moves if m.record.src != m.record.dst)
    return [t for t in pytree.tree_leaves(results) if isinstance(t, ShardedTensor)], moves


@dataclass(frozen=True)
class Classes:
    """What is decided together: the class of each node and each parameter, by number and by name.

    Classes are named by their first member: equal blocks have their nodes and parameters in common.
    """

    nodes: tuple[int, ...]
    parameters: Mapping[str, str]


def find_classes(graph: Graph, names: Sequence[str], *, tied: bool = True) -> Classes:
    """The classes of nodes, and of all parameters of a model by name; not `tied`: each is its own.

    >>> blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = blocks
    ...     def forward(self, x):
    ...         for block in self.blocks:
    ...             x = block(x)
    ...         return x
    >>> graph = trace(Net(), (torch.ones(2, 4),), Mesh.of(tp=2), None)
    >>> find_classes(graph, list(graph.parameters)).nodes
    (0, 1, 1, 3)
    """
    nodes, parameters = list(range(len(graph.nodes))), {name: name for name in names}
    blocks = nodes_of_blocks(graph) if tied else {}
    first: dict[Hashable, str] = {}
    for block, members in blocks.items():
        own = {name.removeprefix(f"{block}."): name for name in names if name.startswith(f"{block}.")}
        twin = first.setdefault(_sign_block(graph, block, members, own), block)
        for number, other in zip(members, blocks[twin], strict=True):
            nodes[number] = other
        parameters |= {name: f"{twin}.{relative}" for relative, name in own.items()}
    return Classes(tuple(nodes), parameters)


def nodes_of_blocks(graph: Graph) -> dict[str, list[int]]:
    """The nodes that run in each block, by number."""
    found: dict[str, list[int]] = {block: [] for block in graph.blocks}
    for number, node in enumerate(graph.nodes):
        parts = node.module.split(".")
        for depth in range(1, len(parts) + 1):
            if (path := ".".join(parts[:depth])) in found:
                found[path].append(number)
                break
    return found


def _sign_block(graph: Graph, block: str, members: Sequence[int], own: Mapping[str, str]) -> Hashable:
    """What equal blocks have in common: operators, their arguments and shapes, and where their tensors come from."""
    produced = {v: (place, i) for place, n in enumerate(members) for i, v in enumerate(graph.nodes[n].outputs)}
    outside: dict[int, int] = {}
    shapes = {
        name: graph.values[graph.parameters[full]].shape for name, full in own.items() if full in graph.parameters
    }
    signs: list[Hashable] = [block.rpartition(".")[0], tuple(sorted(shapes.items()))]
    for number in members:
        node = graph.nodes[number]
        origins: list[Hashable] = []
        for value in map(graph.values.__getitem__, node.inputs):
            if value.number in produced:
                origins.append(produced[value.number])
            elif value.source == PARAMETER and value.name.startswith(f"{block}."):
                origins.append(value.name.removeprefix(f"{block}."))
            elif value.source == PARAMETER:
                origins.append(("of another module", value.name))
            else:
                origins.append((value.differentiated, outside.setdefault(value.number, len(outside)), value.shape))
        made = tuple(graph.values[v].shape for v in node.outputs)
        signs.append((node.module.removeprefix(block), node.call.key, tuple(origins), made))
    return tuple(signs)
