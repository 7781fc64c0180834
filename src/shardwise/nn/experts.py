"""Experts of a mixture as one layer of stacked weights, and which rank has which of them.

Which rank has which expert follows from the load (`rebalance_experts`), and may change between steps.

1. Loads are assigned to the ranks, the largest first; with `copies`, hot experts are on several ranks. The shares are
   given to the ranks so that most experts stay where they are. Parameters, gradients and the state of optimizers move
   in one exchange: an expert as `S(0) owners(...)` of the axis says, a copy as a box that several ranks have.
2. A layer numbers experts by the ranks that have them (`ExpertPlacement`), copies by themselves. The tokens of an
   expert go to its copies in turn; so each routes and multiplies as without copies.
3. Gradients of copies are addends: they are added up on all ranks that have the expert, in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise._cache import cache_by_identity
from shardwise._torch import aten
from shardwise.comm import Comm, agree
from shardwise.geometry import (
    Box,
    EnumerableSpec,
    Layout,
    Mesh,
    MeshSpec,
    Piece,
    Placement,
    Replicate,
    RowOwners,
    Shard,
    format_placement,
)
from shardwise.geometry.placements import chunk_sizes
from shardwise.nn.optimizer import move_parameters
from shardwise.nn.plan import ModelPlan, PlanError, match_patterns
from shardwise.nn.routing import RowSwap, route_tokens
from shardwise.ops.explain import explain
from shardwise.ops.unshard import copy_mark
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.transfer.transfer import format_bytes


class GroupedExperts(nn.Module):
    """Gated MLPs, one for each expert: `down(activation(gate(x)) * up(x))`, computed by grouped products.

    `forward(x, expert_ids, weights)` takes tokens of any leading shape, and for each of them the numbers of its experts
    and their weights. `capacity_factor`: an expert takes so many times its even share of the batch; None: all it gets.

    >>> experts = GroupedExperts(num_experts=4, width=8, hidden=16)
    >>> y = experts(torch.ones(2, 3, 8), torch.tensor([[0, 3]]).expand(6, 2), torch.full((6, 2), 0.5))
    >>> tuple(y.shape), tuple(experts.gate_up.shape), tuple(experts.down.shape)
    ((2, 3, 8), (4, 32, 8), (4, 8, 16))
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        axis: str | None = "ep",
        capacity_factor: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor}: pass a positive number, or None for no limit")
        self.num_experts, self.axis, self.capacity_factor = num_experts, axis, capacity_factor
        self.activation = activation
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform values, as those of `nn.Linear`."""
        for weight in (self.gate_up, self.down):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        tokens, capacity = x.reshape(-1, x.shape[-1]), self._capacity(expert_ids)
        placed, gate_up, down, sizes, count = self._placement(), self.gate_up, self.down, None, self.num_experts
        if placed is not None and isinstance(expert_ids, ShardedTensor):
            expert_ids, sizes, count = placed.renumber(expert_ids), placed.sizes, sum(placed.sizes)
            gate_up, down = placed.take("gate_up", gate_up), placed.take("down", down)  # type: ignore[assignment]  # no leaves
        route = route_tokens(tokens, expert_ids, count, axis=self.axis, capacity=capacity, sizes=sizes)
        gate, up = self._multiply(route.rows, gate_up, route.offsets).chunk(2, dim=-1)
        outputs = self._multiply(self.activation(gate) * up, down, route.offsets)
        return route.combine(outputs, weights).reshape(x.shape)

    def _placement(self) -> ExpertPlacement | None:
        """Where the experts are, if not in equal runs."""
        stored: ExpertPlacement | None = self.__dict__.get(PLACEMENT)
        if stored is None and isinstance(self.gate_up, ShardedTensor) and self.axis is not None:
            stored = read_placement(self.gate_up.sharding, self.axis)
        return stored if stored is not None and not stored.is_plain else None

    def _multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        product: Tensor = aten._grouped_mm.default(rows, weight.transpose(-2, -1), offsets)
        return product

    def _capacity(self, expert_ids: Tensor) -> int | None:
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * expert_ids.numel() / self.num_experts))

    def extra_repr(self) -> str:
        experts, width, hidden = self.down.shape
        return f"num_experts={experts}, width={width}, hidden={hidden}, axis={self.axis!r}"


PLACEMENT = "_expert_placement"  # of a module: where its experts are, where layouts do not say it


@dataclass(frozen=True)
class ExpertPlacement:
    """Which places along an axis have each expert; experts are numbered again by the places that have them.

    >>> from shardwise.geometry import Mesh
    >>> placed = ExpertPlacement(Mesh.of(ep=2), "ep", ((1,), (0, 1), (0,)))
    >>> placed.sizes, placed.slots
    ((2, 2), ((1, 0), (2, 0), (0, 1), (1, 1)))
    """

    mesh: Mesh
    axis: str
    holders: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[str, tuple[Placement, ...]], ...] = ()  # of stacks by name, on the mesh

    @cached_property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """Expert and place of each number."""
        pairs = [(expert, place) for expert, places in enumerate(self.holders) for place in places]
        return tuple(sorted(pairs, key=lambda pair: (pair[1], pair[0])))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many experts each place has."""
        counts = Counter(place for _, place in self.slots)
        return tuple(counts[place] for place in range(self.mesh.axis_size(self.axis)))

    @property
    def is_plain(self) -> bool:
        """Whether the experts are in the runs of `torch.chunk`."""
        runs = tuple((place,) for place, n in enumerate(self._chunks) for _ in range(n))
        return self.holders == runs

    @property
    def _chunks(self) -> tuple[int, ...]:
        return chunk_sizes(len(self.holders), self.mesh.axis_size(self.axis))

    @property
    def has_copies(self) -> bool:
        """Whether an expert is on several places."""
        return any(len(places) > 1 for places in self.holders)

    def layout(self, now: Layout) -> Layout:
        """The layout of a stack of experts that is cut along the axis by dim 0, with the experts as they are here."""
        spec = now.spec
        assert isinstance(spec, MeshSpec)
        placements, at = list(spec.placements), spec.mesh.axes.index(self.axis)
        if not self.has_copies:
            owners = RowOwners([places[0] for places in self.holders])
            placements[at] = Shard(0) if self.is_plain else Shard(0, owners=owners)
            return MeshSpec(spec.mesh, placements, spec.order).layout(now.shape)
        pieces = []
        for rank in spec.mesh.ranks.reshape(-1).tolist():
            own, boxes = self.experts_at(spec.mesh.coordinates(rank)[self.axis]), boxes_of_expert(now, rank)
            pieces += [Piece(Box((e, *b.offsets[1:]), (1, *b.sizes[1:])), rank) for e in own for b in boxes]
        return EnumerableSpec(pieces, replicated=True).layout(now.shape)

    def experts_at(self, place: int) -> list[int]:
        """The experts that a place has, in order."""
        return [expert for expert, at in self.slots if at == place]

    def renumber(self, ids: ShardedTensor) -> ShardedTensor:
        """The numbers in `slots` of experts, the copies of an expert in turn."""
        numbers: list[list[int]] = [[] for _ in self.holders]
        for number, (expert, _) in enumerate(self.slots):
            numbers[expert].append(number)
        most = max(map(len, numbers))
        local = ids.local_parts[0]
        table = torch.tensor([[own[i % len(own)] for i in range(most)] for own in numbers], device=local.device)
        counts = torch.tensor([len(own) for own in numbers], device=local.device)
        known = local.clamp(0, len(numbers) - 1)
        turn = torch.arange(local.numel(), device=local.device).view(local.shape) % counts[known]
        found = torch.where(known == local, table[known, turn], local + most * len(numbers) * (local >= 0))
        return wrap(ids.sharding, (found,), ids.comm)

    def take(self, name: str, parameter: Tensor) -> ShardedTensor:
        """The stack of experts by their numbers in `slots`; nothing is sent. Gradients of copies are added up."""
        assert isinstance(parameter, ShardedTensor)
        spec = parameter.sharding.spec
        placements = list(spec.placements if isinstance(spec, MeshSpec) else dict(self.cuts)[name])
        placements[self.mesh.axes.index(self.axis)] = Shard(0, sizes=self.sizes)
        layout = MeshSpec(self.mesh, placements).layout((len(self.slots), *parameter.shape[1:]))
        if not self.has_copies:
            return wrap(layout, parameter.local_parts, parameter.comm)
        boxes = boxes_of_expert(_layout_on_mesh(self, name, parameter), parameter.comm.rank)
        dim = next((d for d in range(1, parameter.ndim) if len({box.offsets[d] for box in boxes}) > 1), 1)
        cut = dim, [box.sizes[dim] for box in boxes]
        local: Tensor = _StackCopies.apply(self, layout, parameter.comm, cut, *parameter.local_parts)  # type: ignore[no-untyped-call]  # untyped in torch
        return wrap(layout, (local,), parameter.comm)

    def add_up(self, gradient: Tensor, comm: Comm, layout: Layout) -> list[Tensor]:
        """The gradients of this rank's experts, those of copies added up in the order of places."""
        here = self.mesh.coordinates(comm.rank)[self.axis]
        own = self.experts_at(here)
        group = next(g for g in self.mesh.groups(self.axis) if comm.rank in g)
        shared = {p: [e for e in own if p in self.holders[e]] for p in range(len(group)) if p != here}
        counts = {rank: len(shared.get(place, ())) for place, rank in enumerate(group)}
        sent = [own.index(expert) for experts in shared.values() for expert in experts]
        row_bytes = gradient[:1].numel() * gradient.dtype.itemsize
        moved = row_bytes * sum(len(p) * (len(p) - 1) for p in self.holders) * (self.mesh.size // len(group))
        swap = RowSwap(comm, counts, dict(counts), layout, layout, moved, "gradients of copied experts")
        rows = gradient.new_empty((0, *gradient.shape[1:])) if not sent else gradient[sent]
        received = iter(swap.run(rows))
        found = {(expert, place): next(received) for place, experts in shared.items() for expert in experts}
        found |= {(expert, here): gradient[number] for number, expert in enumerate(own)}
        return [sum_in_order([found[expert, place] for place in self.holders[expert]])[None] for expert in own]


def sum_in_order(addends: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, the same bits wherever it is computed."""
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


class _StackCopies(torch.autograd.Function):
    """The local experts of a rank as one stack; `cut` has the dim and the lengths of the parts of each expert."""

    @staticmethod
    def forward(
        ctx: Any, placed: ExpertPlacement, layout: Layout, comm: Comm, cut: tuple[int, list[int]], *parts: Tensor
    ) -> Tensor:
        ctx.placed, ctx.layout, ctx.comm, ctx.cut = placed, layout, comm, cut
        each = len(cut[1])
        return torch.cat([torch.cat(parts[i : i + each], cut[0]) for i in range(0, len(parts), each)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        dim, lengths = ctx.cut
        summed = ctx.placed.add_up(gradient, ctx.comm, ctx.layout)
        return (None, None, None, None, *(part for each in summed for part in each.split(lengths, dim)))


def boxes_of_expert(stack: Layout, rank: int) -> list[Box]:
    """What a rank has of its first expert, of a stack in runs on a mesh: several boxes if other axes cut groups.

    >>> from shardwise.geometry import Mesh
    >>> columns = Shard(1, groups=(4, 4))
    >>> [box.offsets for box in boxes_of_expert(MeshSpec(Mesh.of(ep=1, tp=2), (Shard(0), columns)).layout((2, 8)), 1)]
    [(0, 2), (0, 6)]
    """
    boxes = [piece.box for piece in stack.pieces_of(rank)]
    return [box for box in boxes if box.offsets[0] == boxes[0].offsets[0]]


def read_placement(layout: Layout, axis: str) -> ExpertPlacement | None:
    """Which places along an axis have each row of a stack of experts that is cut along it by dim 0; None if it is not.

    >>> from shardwise.geometry import Mesh
    >>> read_placement(MeshSpec(Mesh.of(ep=2), (Shard(0),)).layout((3, 2)), "ep").holders
    ((0,), (0,), (1,))
    """
    spec = layout.spec
    if not isinstance(spec, MeshSpec) or axis not in spec.mesh.axes:
        return None
    placement = spec.placements[spec.mesh.axes.index(axis)]
    if not placement.is_shard(0):
        return None
    whole = tuple(p if a == axis else Replicate() for a, p in zip(spec.mesh.axes, spec.placements, strict=True))
    return _read_holders(MeshSpec(spec.mesh, whole).layout(layout.shape[:1]), spec.mesh, axis)


@cache_by_identity
def _read_holders(rows: Layout, mesh: Mesh, axis: str) -> ExpertPlacement:
    holders: list[set[int]] = [set() for _ in range(rows.shape[0])]
    for piece in rows.pieces:
        place = mesh.coordinates(piece.rank)[axis]
        for expert in range(piece.box.offsets[0], piece.box.offsets[0] + piece.box.sizes[0]):
            holders[expert].add(place)
    return ExpertPlacement(mesh, axis, tuple(tuple(sorted(places)) for places in holders))


@dataclass(frozen=True)
class ExpertBalance:
    """What `rebalance_experts` did: the load of the fullest rank over the mean before and after, and what moved.

    >>> print(ExpertBalance({"layers.0.experts": (2.5, 1.0)}, 4096))
    layers.0.experts  load of the fullest rank / mean: 2.50 -> 1.00
    4.1 kB moved
    """

    ratios: Mapping[str, tuple[float, float]]
    moved_bytes: int

    def __str__(self) -> str:
        width = max((len(name or "the model") for name in self.ratios), default=0)
        lines = [
            f"{name or 'the model':<{width}}  load of the fullest rank / mean: {a:.2f} -> {b:.2f}"
            for name, (a, b) in self.ratios.items()
        ]
        return "\n".join([*lines, f"{format_bytes(self.moved_bytes)} moved"])


def deal_experts(load: Sequence[float], now: ExpertPlacement, copies: int = 0) -> ExpertPlacement:
    """A placement of experts by their load: each place has about as many, and as few as possible change places.

    `copies`: how many experts are on one place more; the load of an expert is shared by those that have it.

    >>> from shardwise.geometry import Mesh
    >>> now = ExpertPlacement(Mesh.of(ep=2), "ep", ((0,), (0,), (1,), (1,)))
    >>> deal_experts([9, 8, 1, 2], now).holders, deal_experts([9, 1, 1, 1], now, copies=2).holders
    (((0,), (1,), (0,), (1,)), ((0, 1), (0, 1), (0,), (1,)))
    """
    places = now.mesh.axis_size(now.axis)
    numbers = [1] * len(load)
    for _ in range(copies):
        hot = max((e for e in range(len(load)) if numbers[e] < places), key=lambda e: (load[e] / numbers[e], -e))
        numbers[hot] += 1
    room, bins = -(-sum(numbers) // places), [set[int]() for _ in range(places)]
    sums = [0.0] * places
    for expert in sorted(range(len(load)), key=lambda e: (-load[e] / numbers[e], e)):
        for _ in range(numbers[expert]):
            free = [b for b in range(places) if expert not in bins[b]]
            chosen = min(free, key=lambda b: (len(bins[b]) >= room, sums[b], b))
            bins[chosen].add(expert)
            sums[chosen] += load[expert] / numbers[expert]
    held = [{e for e, p in enumerate(now.holders) if place in p} for place in range(places)]
    matched = match_bins([[len(held[place] & each) for place in range(places)] for each in bins])
    holders = tuple(
        tuple(sorted(matched[b] for b in range(places) if expert in bins[b])) for expert in range(len(load))
    )
    found = replace(now, holders=holders)
    same = list(map(len, holders)) == list(map(len, now.holders)) and max(now.sizes) <= room
    return now if same and max(load_of_places(load, now)) <= max(load_of_places(load, found)) else found


def load_of_places(load: Sequence[float], placed: ExpertPlacement) -> list[float]:
    """The load of each place, that of copies shared.

    >>> from shardwise.geometry import Mesh
    >>> load_of_places([4, 2], ExpertPlacement(Mesh.of(ep=2), "ep", ((0, 1), (1,))))
    [2.0, 4.0]
    """
    sums = [0.0] * placed.mesh.axis_size(placed.axis)
    for expert, place in placed.slots:
        sums[place] += load[expert] / len(placed.holders[expert])
    return sums


def match_bins(gains: Sequence[Sequence[int]]) -> list[int]:
    """A column for each row, each once, with the largest sum of gains (the Hungarian method).

    >>> match_bins([[3, 2], [2, 0]])
    [1, 0]
    """
    count = len(gains)
    of_row, of_column = [0.0] * (count + 1), [0.0] * (count + 1)
    row_at = [0] * (count + 1)
    for row in range(1, count + 1):
        row_at[0], column = row, 0
        least, came, used = [math.inf] * (count + 1), [0] * (count + 1), [False] * (count + 1)
        while row_at[column]:
            used[column] = True
            for other in (c for c in range(1, count + 1) if not used[c]):
                cost = -gains[row_at[column] - 1][other - 1] - of_row[row_at[column]] - of_column[other]
                if cost < least[other]:
                    least[other], came[other] = cost, column
            following = min((c for c in range(1, count + 1) if not used[c]), key=lambda c: (least[c], c))
            step = least[following]
            for other in range(count + 1):
                if used[other]:
                    of_row[row_at[other]] += step
                    of_column[other] -= step
                else:
                    least[other] -= step
            column = following
        while column:
            row_at[column], column = row_at[came[column]], came[column]
    return [column for _, column in sorted((row_at[c], c - 1) for c in range(1, count + 1))]


ExpertLoads: TypeAlias = "Tensor | Sequence[float]"  # a number for each expert


def rebalance_experts(
    model: nn.Module, load: ExpertLoads | Mapping[str, ExpertLoads], *, copies: int = 0, axis: str = "ep"
) -> ExpertBalance:
    """Move the experts of a sharded model so that all ranks along an axis have about the same load; on every rank.

    `load`: a number for each expert, such as the tokens that it had since the last time (`TokenRoute.counts`), the same
    on every rank; or a mapping from patterns of modules to them. Every module with stacks of so many experts, cut along
    `axis` by dim 0, is balanced. Results stay what they were; gradients and the state of optimizers move along.
    `copies`: so many hot experts more are on several ranks (`GroupedExperts` only); the next call may take them away.

    >>> from shardwise import Mesh, ModelPlan, run_local, shard_module
    >>> def body(comm):
    ...     plan = ModelPlan(Mesh.of(ep=2), {"*": "S(0)"}, input_plan="ep: S(0)")
    ...     experts = shard_module(GroupedExperts(4, width=8, hidden=16), plan)
    ...     return rebalance_experts(experts, load=[9, 8, 1, 2])
    >>> print(run_local(body, 2)[0])
    the model  load of the fullest rank / mean: 1.70 -> 1.00
    3.1 kB moved
    """
    stacks = _find_stacks(model, axis)
    loads = _read_loads(load, stacks)
    wanted, ratios = dict[str, ExpertPlacement](), dict[str, tuple[float, float]]()
    for path, numbers in loads.items():
        now, part = stacks[path][0], model.get_submodule(path)
        if copies and not (isinstance(part, GroupedExperts) and part.capacity_factor is None):
            raise PlanError(
                f"rebalance_experts: copies of experts need GroupedExperts without a capacity_factor, and {path!r} is "
                f"{type(part).__name__}; without copies= experts of any module move"
            )
        if copies > len(numbers) * (now.mesh.axis_size(axis) - 1):
            raise PlanError(f"rebalance_experts: {copies} copies of {len(numbers)} experts on {now.mesh}")
        wanted[path] = deal_experts(numbers, now, copies)
        mean = sum(numbers) / now.mesh.axis_size(axis)
        before, after = (max(load_of_places(numbers, p)) / mean if mean else 1.0 for p in (now, wanted[path]))
        ratios[path] = before, after
    comm = next(p.comm for path in loads for p in stacks[path][1].values())
    agree(comm, {path: str(p.holders) for path, p in wanted.items()}, label="rebalance_experts", what="loads")
    jobs = [(path, name, p) for path in wanted for name, p in stacks[path][1].items()]
    layouts = [wanted[path].layout(_layout_on_mesh(stacks[path][0], name, p)) for path, name, p in jobs]
    changed = [i for i, (_, _, p) in enumerate(jobs) if p.sharding != layouts[i]]
    with explain() as log:
        made = move_parameters([jobs[i][2] for i in changed], [layouts[i] for i in changed]) if changed else []
    for path, placed in wanted.items():
        cuts = tuple((name, _placements_of(stacks[path][0], name, p)) for name, p in stacks[path][1].items())
        model.get_submodule(path).__dict__[PLACEMENT] = replace(placed, cuts=cuts)
    for i, parameter in zip(changed, made, strict=True):
        path, name, old = jobs[i]
        copy_mark(old, parameter)
        model.get_submodule(path).register_parameter(name, parameter)
    return ExpertBalance(ratios, sum(entry.moved_bytes for entry in log.entries))


def place_experts(
    model: nn.Module,
    plan: ModelPlan,
    load: ExpertLoads | Mapping[str, ExpertLoads],
    *,
    axis: str = "ep",
    present: ModelPlan | None = None,
) -> ModelPlan:
    """The plan in which experts are dealt to the ranks of an axis by their load, as `rebalance_experts` deals them.

    `present`: the plan that the model has now, from which as few experts as possible move; None: runs of equal length.

    >>> from shardwise import Mesh, ModelPlan
    >>> plan = ModelPlan(Mesh.of(ep=2), {"*": "S(0)"}, input_plan="ep: S(0)")
    >>> place_experts(GroupedExperts(4, width=8, hidden=16), plan, [9, 8, 1, 2]).parameters["down"]
    'ep: S(0) owners(0,1,0,1)'
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    stacks: dict[str, tuple[ExpertPlacement, dict[str, MeshSpec]]] = {}
    known = {} if present is None else present.specs(model)
    for name, spec in plan.specs(model).items():
        path, _, own = name.rpartition(".")
        rows = tuple(tensors[name].shape)
        placed = read_placement(spec.layout(rows), axis) if len(rows) > 1 else None
        if placed is not None and (path not in stacks or len(stacks[path][0].holders) == len(placed.holders)):
            now = read_placement(known[name].layout(rows), axis) if name in known else None
            same = now is not None and now.mesh.axis_size(axis) == placed.mesh.axis_size(axis)
            stacks.setdefault(path, (now if now is not None and same else placed, {}))[1][own] = spec
    texts: dict[str, str] = {}
    for path, numbers in _read_loads(load, stacks).items():
        wanted = deal_experts(numbers, stacks[path][0])
        for own, spec in stacks[path][1].items():
            name = f"{path}.{own}" if path else own
            layout = wanted.layout(spec.layout(tuple(tensors[name].shape)))
            assert isinstance(layout.spec, MeshSpec)
            named = zip(spec.mesh.axes, layout.spec.placements, strict=True)
            texts[name] = ", ".join(f"{a}: {format_placement(p)}" for a, p in named if not isinstance(p, Replicate))
    patterns = match_patterns(plan.parameters, list(tensors))
    split = {patterns[name] for name in texts}
    rest = {name: plan.parameters[pattern] for name, pattern in patterns.items() if pattern in split}
    kept = {pattern: text for pattern, text in plan.parameters.items() if pattern not in split}
    return replace(plan, parameters={**kept, **rest, **texts})


Stacks: TypeAlias = dict[str, tuple[ExpertPlacement, dict[str, ShardedTensor]]]


def _find_stacks(model: nn.Module, axis: str) -> Stacks:
    """The modules with stacks of experts, where the experts are now, and the stacks by name."""
    found: Stacks = {}
    for path, part in model.named_modules():
        stored: ExpertPlacement | None = part.__dict__.get(PLACEMENT)
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, ShardedTensor) or parameter.ndim < 2:
                continue
            known = stored if stored is not None and name in dict(stored.cuts) else None
            placed = known or read_placement(parameter.sharding, axis)
            if placed is not None and (path not in found or found[path][0].holders == placed.holders):
                found.setdefault(path, (placed, {}))[1][name] = parameter
    return found


def _read_loads(load: Any, stacks: Mapping[str, tuple[ExpertPlacement, Any]]) -> dict[str, list[float]]:
    """The load of the experts of each module."""
    by_path: Mapping[str, Any] = load if isinstance(load, Mapping) else {}
    names = match_patterns(by_path, list(stacks), "module with experts")
    found = {}
    for path, (placed, _) in stacks.items():
        if path in names or not by_path:
            given = by_path[names[path]] if by_path else load
            numbers = [float(n) for n in (given.tolist() if isinstance(given, Tensor) else given)]
            if len(numbers) == len(placed.holders):
                found[path] = numbers
            elif by_path:
                raise PlanError(f"rebalance_experts: {path} has {len(placed.holders)} experts, and load {len(numbers)}")
    if not found:
        raise PlanError(
            "rebalance_experts: no module has stacks of so many experts that are cut along the axis by dim 0; stacks: "
            + (", ".join(f"{path or 'the model'} of {len(p.holders)}" for path, (p, _) in stacks.items()) or "none")
        )
    if any(not math.isfinite(n) or n < 0 for numbers in found.values() for n in numbers):
        raise PlanError("rebalance_experts: loads are numbers from 0")
    return found


def _placements_of(placed: ExpertPlacement, name: str, parameter: ShardedTensor) -> tuple[Placement, ...]:
    spec = parameter.sharding.spec
    return spec.placements if isinstance(spec, MeshSpec) else dict(placed.cuts)[name]


def _layout_on_mesh(placed: ExpertPlacement, name: str, parameter: ShardedTensor) -> Layout:
    """The layout of a stack on the mesh with runs of experts, whatever boxes it is in."""
    placements = list(_placements_of(placed, name, parameter))
    placements[placed.mesh.axes.index(placed.axis)] = Shard(0)
    return MeshSpec(placed.mesh, placements).layout(tuple(parameter.shape))
