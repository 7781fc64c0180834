"""The problem of a graph: what each operator and each parameter may do on a mesh, what that takes, what moves cost.

1. A candidate of an operator is one strategy for each axis. It takes what the device needs for its share of the work,
   forward and backward, and the moves that it makes by itself.
2. A candidate of a parameter is a placement for each axis: whole, or split along a dim that is long enough. Inputs are
   whole or split along the batch, all alike.
3. A tensor that is wanted elsewhere is moved, and its gradient is moved back: that of a tensor that is whole where its
   reader is split is summed. Both are planned and priced as `plan_transfer` does for the running program.
4. Parameters that are gathered are kept for the backward pass, which takes memory, or freed and gathered again; where
   the user allows it, they are gathered in a narrower dtype.
5. Blocks that are computed again keep their inputs only. Where some of equal blocks are, each has its share of that.
6. Pins: patterns of parameters, "inputs" or modules, with the placements that are allowed, or not.

Prices depend on how dims are cut, and not on their names: a move is planned once for all that are alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from shardwise.geometry import Layout, LayoutError, Mesh, Partial, Placement, Replicate, Shard, format_placement
from shardwise.geometry.notation import DType, read_placements
from shardwise.nn.plan import REPLICATED, PlanError, match_patterns
from shardwise.ops.propagation import largest_share
from shardwise.ops.unshard import LEAST_BYTES
from shardwise.ops.views import mesh_spec
from shardwise.planner.estimate import OptimizerState
from shardwise.planner.graph import (
    CONSTANT,
    INPUT,
    PARAMETER,
    AxisStrategy,
    Classes,
    Graph,
    GraphValue,
    Node,
    Placements,
    find_classes,
    nodes_of_blocks,
)
from shardwise.planner.program import Exclusion, Flow, FlowMove, PlanChoice, PlanProblem
from shardwise.transfer import Topology, plan_transfer
from shardwise.transfer.cost import Device, node_seconds

Wanted: TypeAlias = tuple[Placements, tuple[bool, ...]]
"""Placements in which a tensor is wanted, and along which axes its reader is split where it is whole."""
MOST_CANDIDATES = 1500
SMALL = 64  # elements of a result that every rank may compute
UNEVEN = 16  # a dim that its ranks do not divide is split if it has this many times as many elements
INPUTS = "inputs"
BACKWARD_PRODUCTS, BACKWARD_BYTES = 2.0, 1.5  # of the backward pass, for one of the forward pass
KEPT, FREED, NARROW = "kept", "freed", ", narrow"


class Candidate(NamedTuple):
    """What an operator may do on the whole mesh: where it wants its tensors, where its results are."""

    inputs: tuple[Wanted, ...]
    outputs: tuple[Placements, ...]
    strategies: tuple[AxisStrategy, ...]


def fits(shape: Sequence[int], placements: Placements, mesh: Mesh) -> bool:
    """Whether every cut of a tensor gives all ranks about as much.

    >>> mesh = Mesh.of(dp=2, tp=4)
    >>> [fits((6, 8), (Shard(0), p), mesh) for p in (Replicate(), Shard(0), Shard(1))]
    [True, False, True]
    """
    parts: dict[int, int] = {}
    for placement, ranks in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(shape):
                return False
            parts[placement.dim] = parts.get(placement.dim, 1) * ranks
    return all(shape[d] and (shape[d] % n == 0 or shape[d] >= UNEVEN * n) for d, n in parts.items())


def local_share(shape: Sequence[int], placements: Placements, mesh: Mesh) -> float:
    """The part of a tensor that the fullest rank has.

    >>> local_share((4, 4), (Shard(0), Replicate()), Mesh.of(dp=2, tp=2))
    0.5
    """
    parts = 1.0
    for placement, ranks in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts *= largest_share(placement, shape, ranks) / ranks
    return parts


class Prices:
    """Seconds, or bytes that a rank receives, of moves on a mesh; a move like another one is planned once.

    `eager_on`: the device of an eager step, on which moves take what was measured for each kind.
    """

    def __init__(self, mesh: Mesh, topology: Topology, objective: str, eager_on: Device | None = None) -> None:
        self.mesh, self.topology, self.objective = mesh, topology, objective
        self._measured = eager_on if eager_on is not None and eager_on.eager_moves and objective == "seconds" else None
        self._empty = topology.without_bytes()
        self._known: dict[Any, tuple[float, float]] = {}
        self._asked: dict[Any, tuple[float, float]] = {}

    def move(
        self, shape: tuple[int, ...], itemsize: int, src: Placements, dst: Placements, kind: str = "activation"
    ) -> float:
        """What it takes to have a tensor elsewhere; `kind`: one of `MOVE_KINDS`.

        >>> prices = Prices(Mesh.of(tp=2), Topology(ranks_per_host=8), "bytes")
        >>> prices.move((8, 8), 4, (Shard(0),), (Replicate(),)), prices.move((8, 8), 4, (Replicate(),), (Shard(1),))
        (128.0, 0.0)
        """
        asked = shape, itemsize, src, dst
        known = self._asked.get(asked)
        if known is None:
            known = self._asked[asked] = self._find(tuple(shape), itemsize, src, dst)
        return self._measured.move_seconds(kind, *known) if self._measured is not None and known[0] else known[0]

    def _find(self, shape: tuple[int, ...], itemsize: int, src: Placements, dst: Placements) -> tuple[float, float]:
        if all(a == b or isinstance(a, Replicate) for a, b in zip(src, dst, strict=True)):
            return 0.0, 0.0
        key, whole = self._rename_dims(shape, src, dst)
        width = max(1, round(math.prod(shape) / max(1, math.prod(whole)) * itemsize))
        known = self._known.get((key, whole, width))
        if known is None:
            known = self._known[key, whole, width] = self._plan(key, whole, width, itemsize)
        return known

    def _rename_dims(
        self, shape: Sequence[int], src: Placements, dst: Placements
    ) -> tuple[tuple[Placements, Placements], tuple[int, ...]]:
        """The same move of a tensor that has the dims that are cut only, in the order in which they appear."""
        numbers: dict[int, int] = {}

        def rename(placement: Placement) -> Placement:
            if isinstance(placement, Shard):
                return Shard(numbers.setdefault(placement.dim, len(numbers)))
            return placement

        key = tuple(map(rename, src)), tuple(map(rename, dst))
        ranks = self.mesh.size
        lengths = (shape[d] for d in numbers)
        return key, tuple(ranks if self._is_even(n) else n for n in lengths)

    def _is_even(self, length: int) -> bool:
        return all(length % ranks == 0 for ranks in self.mesh.shape) or length % self.mesh.size == 0

    def _plan(
        self, key: tuple[Placements, Placements], shape: tuple[int, ...], width: int, itemsize: int
    ) -> tuple[float, float]:
        src, dst = (mesh_spec(self.mesh, p, self.mesh.axes).layout(shape or (1,)) for p in key)
        return self.of_layouts(src, dst, width, itemsize)

    def of_layouts(self, src: Layout, dst: Layout, width: int, itemsize: int) -> tuple[float, float]:
        """The same for two layouts, and what it would take without bytes, where that counts.

        `width`: bytes of an element, of which `itemsize` are added at once.
        """
        transfer = plan_transfer(src, dst, itemsize=width, topology=self.topology)
        if self.objective == "bytes":
            return transfer.moved_bytes / self.mesh.size, 0.0
        seconds = transfer.estimate(self.topology, wider={8: 1, 4: 1, 2: 2, 1: 4}.get(itemsize, 0))
        return seconds, 0.0 if self._measured is None else min(seconds, transfer.estimate(self._empty))


@dataclass(frozen=True)
class Pins:
    """What a user has decided: by pattern, the placements that are fixed, allowed, or forbidden; units by pattern.

    Patterns are those of parameters, of modules (what they return), or "inputs". `units`: dim and length of what is
    never cut, as heads.
    """

    fix: Mapping[str, str] = field(default_factory=dict)
    allow: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forbid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    units: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def read(self, mesh: Mesh) -> None:
        """Raise for pins of another form, and for placements that a mesh does not have."""
        named: dict[str, Any] = vars(self)
        for word, given in named.items():
            if not isinstance(given, Mapping):
                raise PlanError(f"{word} maps patterns to what is pinned, as in {{'*.weight': ...}}; got {given!r}")
        texts = list(self.fix.items())
        for word in ("allow", "forbid"):
            for pattern, several in named[word].items():
                if isinstance(several, str):
                    raise PlanError(
                        f"{word} {pattern!r} has a list of placements, as in [{several!r}]; got {several!r}"
                    )
                texts += [(pattern, text) for text in several]
        for pattern, text in texts:
            try:
                read_pin(text, mesh)
            except (LayoutError, TypeError) as error:
                raise PlanError(f"the pin of {pattern!r} to {text!r}: {error}") from None
        for pattern, unit in named["units"].items():
            if not isinstance(unit, Sequence) or len(unit) != 2 or unit[0] < 0 or unit[1] < 1:
                raise PlanError(f"units {pattern!r} is a dim and a length of at least 1, as in (0, 128); got {unit!r}")

    def allows(self, name: str, mesh: Mesh) -> Callable[[Placements], bool]:
        """Whether the placements of something are possible.

        >>> allowed = Pins(fix={"*.weight": "tp: S(0)"}).allows("up.weight", Mesh.of(dp=2, tp=2))
        >>> allowed((Replicate(), Shard(0))), allowed((Replicate(), Replicate()))
        (True, False)
        """
        fixed = [read_pin(t, mesh) for p, t in self.fix.items() if _matches(p, name)]
        allowed = [[read_pin(t, mesh) for t in texts] for p, texts in self.allow.items() if _matches(p, name)]
        refused = [read_pin(t, mesh) for p, texts in self.forbid.items() if _matches(p, name) for t in texts]

        def is_allowed(placements: Placements) -> bool:
            inside = all(placements == f for f in fixed) and all(placements in a for a in allowed)
            return inside and placements not in refused

        return is_allowed

    def has_units(self, name: str) -> bool:
        """Whether a parameter has lengths that are never cut."""
        return any(_matches(pattern, name) for pattern in self.units)

    def check(self, names: Sequence[str]) -> None:
        """Raise for patterns that name nothing."""
        for given in (self.fix, self.allow, self.forbid, self.units):
            for pattern in given:
                match_patterns([pattern], names, "parameter or module")

    def describe(self, *names: str) -> str:
        """What is pinned of something, in words.

        >>> Pins(fix={"*.weight": "S(0)"}, forbid={"up.*": ["R"]}).describe("up.weight")
        "'*.weight' is fixed to S(0), 'up.*' is forbidden R"
        """
        texts = [f"{p!r} is fixed to {t}" for p, t in self.fix.items() if _matches(p, *names)]
        for word, given in (("allowed", self.allow), ("forbidden", self.forbid)):
            texts += [f"{p!r} is {word} {' or '.join(some)}" for p, some in given.items() if _matches(p, *names)]
        return ", ".join(texts) or "nothing is pinned"

    @property
    def patterns(self) -> list[str]:
        return [p for given in (self.fix, self.allow, self.forbid) for p in given]

    def without(self, pattern: str) -> Pins:
        """The same without what a pattern pins."""
        fix = {p: v for p, v in self.fix.items() if p != pattern}
        allow, forbid = ({p: v for p, v in g.items() if p != pattern} for g in (self.allow, self.forbid))
        return Pins(fix, allow, forbid, self.units)


def read_pin(text: str, mesh: Mesh) -> Placements:
    """The placements of a pin: one for each axis, or by axis; "replicated" for whole.

    >>> read_pin("tp: S(0)", Mesh.of(dp=2, tp=2)), read_pin("replicated", Mesh.of(tp=2))
    ((Replicate(), Shard(0)), (Replicate(),))
    """
    return (Replicate(),) * mesh.ndim if text in (REPLICATED, "R") else tuple(read_placements(text, mesh))


def _matches(pattern: str, *names: str) -> bool:
    try:
        return bool(match_patterns([pattern], names))
    except PlanError:
        return False


@dataclass(frozen=True)
class Costs:
    """What decides between candidates: the device, the optimizer, prices of moves, what may hide.

    `recompute`: the blocks that are computed again; `narrow`: bytes of an element in which parameters may be gathered.
    """

    device: Device
    optimizer: OptimizerState
    dtypes: Mapping[str, DType]
    prices: Prices
    hiding: tuple[float, float]
    recompute: frozenset[str] = frozenset()
    compiled: bool = False
    narrow: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Space:
    """The problem of a graph, and what its numbers mean: the candidates of operators, parameters and inputs."""

    graph: Graph
    classes: Classes
    problem: PlanProblem
    nodes: dict[int, int]
    candidates: dict[int, tuple[Candidate, ...]]
    parameters: dict[str, int]
    layouts: dict[str, tuple[Placements, ...]]
    inputs: int
    input_layouts: tuple[Placements, ...]
    flows: tuple[FlowOrigin, ...]
    flow_of: Mapping[int, int]


class FlowOrigin(NamedTuple):
    """What a flow of the problem is: one of its values, and the layouts behind its numbers."""

    value: GraphValue
    made: tuple[Placements, ...]
    wanted: tuple[Wanted, ...]


class _FlowUse(NamedTuple):
    """How a flow is used: the share of its readers that is computed again, and what is held of it for the others.

    `enters`: it is read in a block that does not make it; `itemsize`: bytes of an element in which it may be gathered.
    """

    again: float
    kept: float
    enters: bool
    itemsize: int


class SpaceBuilder:
    """Builds the problem of a graph, step by step."""

    def __init__(self, graph: Graph, names: Mapping[str, Sequence[int]], pins: Pins, costs: Costs, tied: bool) -> None:
        self.graph, self.pins, self.costs, self.mesh = graph, pins, costs, graph.mesh
        self.shapes = {name: tuple(shape) for name, shape in names.items()}
        self.classes = find_classes(graph, list(names), tied=tied)
        self.alike = self.classes if tied else find_classes(graph, list(names))
        self._block_of = {n: block for block, members in nodes_of_blocks(graph).items() for n in members}
        self._made: dict[
            tuple[int, str, float], tuple[tuple[Candidate, ...], tuple[float, ...], tuple[float, ...]]
        ] = {}
        self._moves: dict[Any, tuple[FlowMove, ...]] = {}
        self.choices: list[PlanChoice] = []
        self.candidates: dict[int, tuple[Candidate, ...]] = {}
        self.nodes: dict[int, int] = {}
        self.parameters: dict[str, int] = {}
        self.layouts: dict[str, tuple[Placements, ...]] = {}
        self.input_layouts: tuple[Placements, ...] = ()
        self.flow_of: dict[int, int] = {}

    def build(self) -> Space:
        """The problem, with candidates of parameters, inputs and operators, and the flows between them."""
        self._add_parameters()
        inputs = self._add_inputs()
        for number, own in enumerate(self.classes.nodes):
            if own == number and self.graph.nodes[number].outputs:
                self._add_node(number, sum(1 for c in self.classes.nodes if c == number))
        flows, origins = self._find_flows(inputs)
        held = float(self.graph.buffer_bytes)
        problem = PlanProblem(
            tuple(self.choices), flows, tuple(self._find_exclusions(inputs)), held, *self.costs.hiding
        )
        named = (self.nodes, self.candidates, self.parameters, self.layouts, inputs, self.input_layouts)
        return Space(self.graph, self.classes, problem, *named, origins, self.flow_of)

    def _add_parameters(self) -> None:
        members: dict[str, list[str]] = {}
        for name, own in self.classes.parameters.items():
            members.setdefault(own, []).append(name)
        for own, names in members.items():
            shape = self.shapes[own]
            axes: list[list[Placement]] = [
                [Replicate(), *(Shard(d) for d in range(len(shape) if n > 1 else 0))] for n in self.mesh.shape
            ]
            rules = [self.pins.allows(name, self.mesh) for name in names]
            found = [
                p
                for p in itertools.product(*axes)
                if fits(shape, p, self.mesh) and all(rule(p) for rule in rules) and not self._cuts_units(own, p)
            ]
            found = found or self._pinned_layouts(own, rules)
            dtype = self.costs.dtypes[own]
            whole = math.prod(shape)
            trained = own not in self.graph.parameters or self.graph.values[self.graph.parameters[own]].differentiated
            each = dtype.itemsize * (2 if trained else 1) * whole
            each += self.costs.optimizer.bytes_for(whole, dtype) if trained else 0
            memory = tuple(each * local_share(shape, p, self.mesh) for p in found)
            self.parameters[own] = len(self.choices)
            self.layouts[own] = tuple(found)
            self.choices.append(PlanChoice(own, len(names), (0.0,) * len(found), memory))

    def _pinned_layouts(self, name: str, rules: Sequence[Callable[[Placements], bool]]) -> list[Placements]:
        """Placements that a user asks for and that would not be tried otherwise, as uneven ones."""
        texts = [t for p, t in self.pins.fix.items() if _matches(p, name)]
        texts += [t for p, some in self.pins.allow.items() if _matches(p, name) for t in some]
        asked, dims = [read_pin(t, self.mesh) for t in texts], len(self.shapes[name])
        for text, placements in zip(texts, asked, strict=True):
            if any(isinstance(p, Partial) or (isinstance(p, Shard) and p.dim >= dims) for p in placements):
                raise PlanError(
                    f"{name} of shape {self.shapes[name]} is pinned to {text}; a parameter is whole (R) or split along "
                    f"one of its {dims} dims, as S({max(0, dims - 1)})"
                )
        found = [p for p in asked if all(rule(p) for rule in rules)]
        if not found:
            raise PlanError(
                f"{name} of shape {self.shapes[name]}: no placement on {self.mesh} is left: {self.pins.describe(name)}"
            )
        return found

    def _cuts_units(self, name: str, placements: Placements) -> bool:
        """Whether a unit that the user has named would be cut apart."""
        for pattern, (dim, length) in self.pins.units.items():
            if _matches(pattern, name):
                if dim >= len(self.shapes[name]):
                    raise PlanError(f"units {pattern!r}: {name} of shape {self.shapes[name]} has no dim {dim}")
                cut = [n for p, n in zip(placements, self.mesh.shape, strict=True) if p == Shard(dim)]
                if math.prod(cut) > 1 and (self.shapes[name][dim] // length) % math.prod(cut):
                    return True
        return False

    def _add_inputs(self) -> int:
        values = [v for v in self.graph.values if v.source == INPUT and v.shape]
        batch = values[0].shape[0] if values else 1
        allowed = self.pins.allows(INPUTS, self.mesh)
        found = []
        ways: list[Placement] = [Shard(0), Replicate(), Shard(1)]  # most rows first: they are tried first
        for placements in itertools.product(ways, repeat=self.mesh.ndim):
            parts = math.prod(n for p, n in zip(placements, self.mesh.shape, strict=True) if p == Shard(0))
            rows = all(fits(v.shape, placements, self.mesh) for v in values if v.shape[0] == batch)
            explicit = Shard(1) not in placements or any(_matches(p, INPUTS) for p in self.pins.patterns)
            if batch % parts == 0 and rows and explicit and allowed(placements):
                found.append(placements)
        if not found:
            raise PlanError(
                f"inputs of {batch} rows on {self.mesh}: no placement is left: {self.pins.describe(INPUTS)}; S(0) "
                "takes a multiple of the ranks that split the rows"
            )
        self.input_layouts = tuple(found)
        self.choices.append(PlanChoice(INPUTS, 1, (0.0,) * len(found), (0.0,) * len(found)))
        return len(self.choices) - 1

    def _add_node(self, number: int, count: int) -> None:
        node, modules = self.graph.nodes[number], self._modules_of[number]
        pinned = self.pins.describe(*modules) if self.pins.patterns and self._is_last(node) else ""
        key = self.alike.nodes[number], pinned, self._again[number]
        if key not in self._made:
            own = tuple(self._combine(node, [self.pins.allows(module, self.mesh) for module in modules]))
            costs = tuple(self._node_cost(node, c, self._again[number]) for c in own)
            left = self._kept_share(self._again[number], count)
            self._made[key] = own, costs, tuple(left * self._node_memory(node, c) for c in own)
        found, costs, memory = self._made[key]
        if not found:
            raise PlanError(
                f"{node.call.op} in {node.module or 'the model'} has no strategy on {self.mesh} that is left: "
                f"{pinned or 'nothing is pinned'}"
            )
        self.nodes[number] = len(self.choices)
        self.candidates[number] = found
        self.choices.append(PlanChoice(f"{node.module}: {node.call.op}", count, costs, memory))

    @cached_property
    def _again(self) -> dict[int, float]:
        """Of the nodes that are decided together, by the number of the first, the share that is computed again."""
        found: dict[int, list[bool]] = {}
        for number, own in enumerate(self.classes.nodes):
            found.setdefault(own, []).append(self._block_of.get(number) in self.costs.recompute)
        return {own: sum(each) / len(each) for own, each in found.items()}

    def _kept_share(self, again: float, count: int) -> float:
        """What is held for the backward pass: of the blocks that are computed again, one at a time."""
        return min(1.0, 1 - again + 1 / count) if again else 1.0

    @cached_property
    def _modules_of(self) -> dict[int, tuple[str, ...]]:
        """The modules of the nodes that are decided together, by the number of the first one."""
        found: dict[int, dict[str, None]] = {}
        for number, own in enumerate(self.classes.nodes):
            if module := self.graph.nodes[number].module:
                found.setdefault(own, {})[module] = None
        return {own: tuple(found.get(own, ())) for own in self.classes.nodes}

    def _combine(self, node: Node, rules: Sequence[Callable[[Placements], bool]]) -> list[Candidate]:
        """One strategy for each axis, where all tensors can be cut so; `rules` of what its module returns."""
        shapes = [self.graph.values[v].shape for v in node.inputs]
        results = [self.graph.values[v].shape for v in node.outputs]
        differentiated = [self.graph.values[v].differentiated for v in node.inputs]
        found: dict[tuple[Any, Any], Candidate] = {}
        sets = [list(s) if n > 1 else list(s[:1]) for s, n in zip(node.strategies, self.mesh.shape, strict=True)]
        if math.prod(len(s) for s in sets) > MOST_CANDIDATES:  # pending inputs first
            sets = [[s for s in own if not any(isinstance(p, Partial) for p in s.inputs)] for own in sets]
        is_last = self._is_last(node)
        for chosen in itertools.product(*sets):
            inputs = [tuple(s.inputs[i] for s in chosen) for i in range(len(shapes))]
            outputs = tuple(tuple(_output(s, i) for s in chosen) for i in range(len(results)))
            cut = all(fits(shape, p, self.mesh) for shape, p in zip(shapes, inputs, strict=True))
            if not cut or not all(fits(shape, p, self.mesh) for shape, p in zip(results, outputs, strict=True)):
                continue
            if any(isinstance(p, Partial) and p != Partial("sum") for ps in (*inputs, *outputs) for p in ps):
                continue
            if is_last and not all(rule(outputs[0]) for rule in rules):
                continue
            splits = [is_split(s) and n > 1 for s, n in zip(chosen, self.mesh.shape, strict=True)]
            wanted = tuple(
                (p, tuple(d and split and isinstance(q, Replicate) for q, split in zip(p, splits, strict=True)))
                for p, d in zip(inputs, differentiated, strict=True)
            )
            made = Candidate(wanted, outputs, chosen)
            known = found.get((wanted, outputs))
            if known is None or _move_count(made) < _move_count(known):
                found[wanted, outputs] = made
        return list(found.values())

    @cached_property
    def _last_nodes(self) -> set[int]:
        """The values that a module returns: of the last operator that ran in it."""
        last = {node.module: node.outputs[:1] for node in self.graph.nodes if node.outputs}
        return {number for outputs in last.values() for number in outputs}

    def _is_last(self, node: Node) -> bool:
        return bool(node.outputs) and node.outputs[0] in self._last_nodes

    def _node_cost(self, node: Node, candidate: Candidate, again: float) -> float:
        prices, axes = self.costs.prices, candidate.strategies
        parts = math.prod(n for s, n in zip(axes, self.mesh.shape, strict=True) if is_split(s))
        moving = 0.0
        for strategy, ranks in zip(axes, self.mesh.shape, strict=True):
            others = parts // (ranks if is_split(strategy) else 1)
            for move in strategy.moves:
                width = max(1, round(move.dtype.itemsize / others))
                moving += (2 + again) * prices.of_layouts(move.src, move.dst, width, move.dtype.itemsize)[0]
        if prices.objective == "bytes":
            return moving
        return moving + self._computing(node, candidate, parts, again)

    def _computing(self, node: Node, candidate: Candidate, parts: int, again: float) -> float:
        """Seconds of a node's operators on one rank: forward, backward where there is one, and forward again."""
        device = self.costs.device
        back = any(self.graph.values[v].differentiated for v in node.outputs)
        tensors = [*zip(node.inputs, (p for p, _ in candidate.inputs), strict=True)]
        tensors += [*zip(node.outputs, candidate.outputs, strict=True)]
        local = 0.0
        for number, placements in tensors:
            value = self.graph.values[number]
            local += value.nbytes * local_share(value.shape, placements, self.mesh)
        total = 0.0
        for operator in node.operators:
            nbytes = (
                min(operator.nbytes, max(local, operator.nbytes / parts)) if operator.flops else operator.nbytes / parts
            )
            times = 1.0 + back * (BACKWARD_PRODUCTS if operator.flops else BACKWARD_BYTES) + again
            shape = _local_product(operator.shape, candidate, self.mesh)
            seconds = node_seconds(
                device, flops=operator.flops / parts, nbytes=nbytes, shape=shape, dtype=operator.dtype
            )
            between = device.eager_call * (not device.asynchronous and not self.costs.compiled)
            total += times * (seconds + between)  # an accelerator computes while Python goes on
        return total

    def _node_memory(self, node: Node, candidate: Candidate) -> float:
        parts = math.prod(n for s, n in zip(candidate.strategies, self.mesh.shape, strict=True) if is_split(s))
        held = node.kept_bytes / parts
        for number, placements in zip(node.outputs, candidate.outputs, strict=True):
            value = self.graph.values[number]
            if value.kept and number not in self._read:
                held += value.nbytes * local_share(value.shape, placements, self.mesh)
        return held

    def _find_exclusions(self, inputs: int) -> Iterator[Exclusion]:
        """No work is repeated along an axis that splits the inputs: the engine keeps rows split that are."""
        for number, choice in self.nodes.items():
            values = [self.graph.values[v] for v in self.graph.nodes[number].outputs]
            if not any(v.differentiated and math.prod(v.shape) > SMALL for v in values):
                continue
            for axis in range(self.mesh.ndim):
                repeated = [k for k, c in enumerate(self.candidates[number]) if not is_split(c.strategies[axis])]
                split = [k for k, p in enumerate(self.input_layouts) if isinstance(p[axis], Shard)]
                if repeated and split and len(repeated) < len(self.candidates[number]):
                    yield Exclusion(choice, tuple(repeated), inputs, tuple(split))

    @cached_property
    def _read(self) -> set[int]:
        return {number for node in self.graph.nodes for number in node.inputs}

    def _find_flows(self, inputs: int) -> tuple[tuple[Flow, ...], tuple[FlowOrigin, ...]]:
        readers: dict[int, set[tuple[int, int]]] = {}
        makers: dict[int, tuple[int, int]] = {}
        for number, node in enumerate(self.graph.nodes):
            own = self.classes.nodes[number]
            if own in self.nodes:
                for place, read in enumerate(node.inputs):
                    readers.setdefault(read, set()).add((own, place))
                for place, result in enumerate(node.outputs):
                    makers[result] = own, place
        counted: dict[Any, tuple[GraphValue, int]] = {}
        keys: dict[int, Any] = {}
        for value in self.graph.values:
            if value.source == CONSTANT or value.number not in readers:
                continue
            origin: Any = makers.get(value.number)
            if value.source == PARAMETER:
                origin = self.classes.parameters[value.name]
            elif value.source == INPUT:
                origin = value.number
            key = keys[value.number] = origin, value.kept, frozenset(readers[value.number])
            first, count = counted.get(key, (value, 0))
            counted[key] = first, count + 1
        numbers = {key: i for i, key in enumerate(counted)}
        self.flow_of = {number: numbers[key] for number, key in keys.items()}
        flows, origins = [], []
        for (origin, _, reading), (value, count) in counted.items():
            flow, meaning = self._make_flow(value, count, origin, sorted(reading), inputs)
            flows.append(flow)
            origins.append(meaning)
        return tuple(flows), tuple(origins)

    def _make_flow(
        self, value: GraphValue, count: int, origin: Any, reading: Sequence[tuple[int, int]], inputs: int
    ) -> tuple[Flow, FlowOrigin]:
        if value.source == PARAMETER:
            maker, by_candidate = self.parameters[origin], self.layouts[origin]
        elif value.source == INPUT:
            maker, by_candidate = inputs, tuple(self._place_input(value, p) for p in self.input_layouts)
        else:
            own, place = origin
            maker, by_candidate = self.nodes[own], tuple(c.outputs[place] for c in self.candidates[own])
        made = list(dict.fromkeys(by_candidate))
        wishes = [[c.inputs[place] for c in self.candidates[own]] for own, place in reading]
        wanted = list(dict.fromkeys(w for several in wishes for w in several))
        shared = max((self._again[own] for own, _ in reading), default=0.0)
        narrow = self.costs.narrow.get(value.name, value.itemsize) if value.source == PARAMETER else value.itemsize
        use = _FlowUse(shared, self._kept_share(shared, count), self._enters_block(value.number), narrow)
        named = (value.source, value.shape, value.itemsize, value.differentiated, value.kept)
        key = (*named, use, tuple(made), tuple(wanted))
        if key not in self._moves:
            self._moves[key] = tuple(
                move
                for a, src in enumerate(made)
                for b, (dst, varying) in enumerate(wanted)
                for move in self._find_moves(value, use, a, src, b, dst, varying)
            )
        moves = self._moves[key]
        taken = tuple(made.index(p) for p in by_candidate)
        numbers = {w: i for i, w in enumerate(wanted)}
        readers = tuple(
            (self.nodes[own], tuple(numbers[w] for w in several))
            for (own, _), several in zip(reading, wishes, strict=True)
        )
        flow = Flow(value.name or INPUTS, count, maker, taken, readers, moves)
        return flow, FlowOrigin(value, tuple(made), tuple(wanted))

    def _place_input(self, value: GraphValue, placements: Placements) -> Placements:
        """What an input plan means for one tensor: those without the dim are whole."""
        return tuple(
            Replicate()
            if isinstance(p, Shard) and (p.dim >= len(value.shape) or (p.dim and len(value.shape) > 3))
            else p
            for p in placements
        )

    @cached_property
    def _readers(self) -> dict[int, set[str | None]]:
        """The blocks in which each value is read, by its number."""
        found: dict[int, set[str | None]] = {}
        for number, node in enumerate(self.graph.nodes):
            for read in node.inputs:
                found.setdefault(read, set()).add(self._block_of.get(number))
        return found

    @cached_property
    def _makers(self) -> dict[int, str | None]:
        """The block in which each value is made, by its number."""
        return {v: self._block_of.get(n) for n, node in enumerate(self.graph.nodes) for v in node.outputs}

    def _enters_block(self, number: int) -> bool:
        """Whether a value is read in another block than that in which it is made."""
        return bool(self._readers.get(number, set()) - {None, self._makers.get(number)})

    def _find_moves(
        self,
        value: GraphValue,
        use: _FlowUse,
        a: int,
        src: Placements,
        b: int,
        dst: Placements,
        varying: tuple[bool, ...],
    ) -> list[FlowMove]:
        """The ways from one layout to another; none where the reader wants parts as addends.

        What is whole becomes addends for nothing: all ranks but one have zeros. Numbers of tokens stay split: a table
        is looked up where they are.
        """
        tokens = value.source == INPUT and not value.floating
        if tokens and any(isinstance(p, Shard) and p != q for p, q in zip(src, dst, strict=True)):
            return []
        if any(isinstance(q, Partial) and isinstance(p, Shard) for p, q in zip(src, dst, strict=True)):
            return []
        prices, shape, itemsize = self.costs.prices, value.shape, value.itemsize
        is_parameter = value.source == PARAMETER
        there = prices.move(shape, itemsize, src, dst, "gather" if is_parameter else "activation")
        back = 0.0
        if value.differentiated:
            gradient: Placements = tuple(
                q if isinstance(q, Shard) else Partial("sum") if v else Replicate()
                for q, v in zip(dst, varying, strict=True)
            )
            target: Placements = tuple(p if isinstance(p, Shard) else Replicate() for p in src)
            back = prices.move(shape, itemsize, gradient, target, "gradient" if is_parameter else "activation")
        held = value.nbytes * local_share(shape, dst, self.mesh)
        if not is_parameter:
            kept = held * use.kept if value.kept else 0.0
            if use.enters and value.floating:  # the inputs of blocks that are computed again, as they are made
                kept += use.again * value.nbytes * local_share(shape, src, self.mesh)
            return [FlowMove(a, b, (1 + use.again) * there + back, kept)]
        ways = self._ways_to_gather(value, use, FlowMove(a, b, 0.0, held * use.kept), there, back)
        if not there:
            return [ways[0]._replace(memory=0.0, name="")]
        if use.itemsize < itemsize:  # gradients that travel so are added up in 32 bits
            there, back = (x * use.itemsize / itemsize if prices.objective == "bytes" else x for x in (there, back))
            if prices.objective == "seconds":
                there = prices.move(shape, use.itemsize, src, dst, "gather")
                back = prices.move(shape, use.itemsize, gradient, target, "gradient") if value.differentiated else 0.0
            fewer = FlowMove(a, b, 0.0, held * use.kept * use.itemsize / itemsize)
            ways += [w._replace(name=w.name + NARROW) for w in self._ways_to_gather(value, use, fewer, there, back)]
        return ways if use.again < 1 else [way for way in ways if way.name.startswith(FREED)]

    def _ways_to_gather(
        self, value: GraphValue, use: _FlowUse, whole: FlowMove, there: float, back: float
    ) -> list[FlowMove]:
        """A parameter is kept for the backward pass, or freed; blocks that are computed again gather it again."""
        again = 1 + use.again
        if self.costs.prices.objective == "bytes":
            kept = whole._replace(cost=again * there + back, name=KEPT)
            return [kept, whole._replace(cost=2 * there + back, memory=0.0, name=FREED)]
        kept, freed = whole._replace(name=KEPT), whole._replace(memory=0.0, name=FREED)
        if self.costs.compiled or value.nbytes >= LEAST_BYTES:
            beside = back if there or self.costs.compiled else 0.0  # eagerly, only what is gathered is summed later
            kept, freed = (way._replace(cost=back - beside, beside=beside) for way in (kept, freed))
            return [kept._replace(ahead=again * there), freed._replace(ahead=2 * there)]
        return [kept._replace(cost=again * there + back), freed._replace(cost=2 * there + back)]


def _output(strategy: AxisStrategy, number: int) -> Placement:
    return strategy.outputs[min(number, len(strategy.outputs) - 1)] if strategy.outputs else Replicate()


def is_split(strategy: AxisStrategy) -> bool:
    """Whether each rank of the axis does a part of the work."""
    return any(isinstance(p, Shard | Partial) for p in (*strategy.inputs, *strategy.outputs))


def _move_count(candidate: Candidate) -> int:
    return sum(len(s.moves) for s in candidate.strategies)


def _local_product(
    shape: tuple[float, float, float] | None, candidate: Candidate, mesh: Mesh
) -> tuple[float, float, float] | None:
    """The rows, columns and terms of a product that a rank computes."""
    if shape is None:
        return None
    rows, columns, terms = shape
    for strategy, ranks in zip(candidate.strategies, mesh.shape, strict=True):
        out = _output(strategy, 0)
        if isinstance(out, Partial):
            terms /= ranks
        elif isinstance(out, Shard) and any(isinstance(p, Replicate) for p in strategy.inputs[:1]):
            columns /= ranks
        elif isinstance(out, Shard):
            rows /= ranks
    return rows, columns, terms


def write_placements(placements: Placements, mesh: Mesh) -> str:
    """Placements by axis, without those that are whole.

    >>> write_placements((Replicate(), Shard(1)), Mesh.of(dp=2, tp=2))
    'tp: S(1)'
    """
    texts = [
        f"{axis}: {format_placement(p)}"
        for axis, p in zip(mesh.axes, placements, strict=True)
        if not isinstance(p, Replicate)
    ]
    return ", ".join(texts) or "replicated"
