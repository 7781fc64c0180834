"""Optimizers that need whole matrices (Muon, Shampoo, SOAP): each matrix is computed on one rank, its owner.

1. Owners are chosen by cost: the most expensive matrix first, to the rank that has least to do so far. Every rank
   chooses the same. An owner is not a placement: the layouts of parameters stay as they are.
2. What is elementwise (momentum, weight decay) is done on the parts that each rank has, and its state is laid out as
   the parameter is.
3. Matrices travel in rounds. In a round every rank gets about as much as the largest matrix is, all of it in one
   exchange, and computes; the results travel back in the exchange of the next round. So a rank has one matrix on its
   way in and one on its way out, besides what it had.

Each byte travels once there and once back: 2 (r - 1) / r of the parameters, on r ranks together; gathering them on all
ranks takes r - 1 times the parameters, and r times the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

from shardwise._text import count_of, public
from shardwise.comm import Comm
from shardwise.geometry import Box, EnumerableSpec, Layout, Piece
from shardwise.tensor import ShardedTensor, redistribute_many, wrap

Group: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Tensor]
Name = TypeVar("Name", str, tuple[int, int])
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch.optim.Muon


@public
def deal_owners(costs: Mapping[Name, float], ranks: Sequence[int]) -> dict[Name, int]:
    """A rank for each name: the largest cost first, to the rank with the least so far; ties by name, then by rank.

    >>> deal_owners({"a": 3, "b": 2, "c": 2, "d": 1}, ranks=(0, 1))
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    heap = [(0.0, place) for place in range(len(ranks))]
    heapify(heap)
    owners = {}
    for name, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        load, place = heappop(heap)
        owners[name] = ranks[place]
        heappush(heap, (load + cost, place))
    return owners


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter, its matrices as boxes of it, and the rank that computes each."""

    parameter: Tensor
    group: Group
    boxes: tuple[Box, ...]
    owners: tuple[int, ...]

    @cached_property
    def layout(self) -> Layout:
        """Each matrix whole on its owner."""
        pieces = [Piece(box, rank) for box, rank in zip(self.boxes, self.owners, strict=True)]
        return EnumerableSpec(pieces).layout(tuple(self.parameter.shape))

    def boxes_of(self, rank: int) -> list[int]:
        """The numbers of the matrices that a rank computes, in the order of its local tensors."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]


class OwnerOptimizer(optim.Optimizer):
    """An optimizer whose update is a function of whole matrices; a subclass says which, and which state it has.

    - `update_matrix(matrix, state, group)`: the update of one matrix, on its owner. `state` has what `matrix_state`
      declares, by name: tensors of the shapes it returns, zeros at first, to be changed in place.
    - `gradient(grad, state, group)`: what travels to the owner, elementwise, of a part of the gradient. `state` has the
      tensors that `sharded_state` names: zeros at first, of the shape and layout of the parameter.
    - `apply(parameter, update, group, shape)`: what is done with a part of the update; `shape` is that of a matrix.

    Parameters are plain or sharded tensors of two dims. The group option `stacked=True` takes parameters of three dims
    as stacks of matrices (experts), `fused=(n, m)` those of two dims as matrices of n and m rows, one below the other
    (a fused QKV weight). All states are saved and loaded as those of torch's optimizers, by any layout and world.

    >>> class Signs(OwnerOptimizer):
    ...     def update_matrix(self, matrix, state, group):
    ...         return matrix.sign()
    >>> weight = torch.nn.Parameter(torch.tensor([[2.0, -1.0]]))
    >>> optimizer = Signs([weight], {"lr": 0.5})
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [[1.5, -0.5]]
    """

    sharded_state: tuple[str, ...] = ()

    def __init__(
        self, params: ParamsT, defaults: Mapping[str, Any] | None = None, *, max_buffer_bytes: int | None = None
    ) -> None:
        if isinstance(params, Mapping):
            params = list(params.items())
        self.max_buffer_bytes = max_buffer_bytes
        super().__init__(params, {"stacked": False, "fused": None, **(defaults or {})})

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own; other parameters than matrices are refused."""
        super().add_param_group(param_group)
        try:
            self._check_matrices(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_matrices(self, group: Group) -> None:
        kind, wanted = type(self).__name__, 3 if group["stacked"] else 2
        names = group.get("param_names") or [f"number {i}" for i in range(len(group["params"]))]
        wrong = [(n, p) for n, p in zip(names, group["params"], strict=True) if p.ndim != wanted or p.is_complex()]
        if wrong:
            name, other = wrong[0]
            what = "stacks of real matrices, tensors of 3 dims" if group["stacked"] else "real matrices"
            raise ValueError(
                f"{kind} updates {what}, and {len(wrong)} of {count_of(len(group['params']), 'parameter')} are others, "
                f"such as {name} of shape {tuple(other.shape)}; pass those to torch.optim.AdamW beside it: "
                f"{kind}([p for p in model.parameters() if p.ndim == {wanted}]), AdamW([p for p in model.parameters() "
                f"if p.ndim != {wanted}])"
            )
        if group["fused"] is not None:
            rows = sum(group["fused"])
            odd = next(((n, p) for n, p in zip(names, group["params"], strict=True) if p.shape[0] != rows), None)
            if group["stacked"] or odd is not None:
                given = "stacked=True as well" if odd is None else f"{odd[0]} of shape {tuple(odd[1].shape)}"
                raise ValueError(
                    f"{kind}: fused={tuple(group['fused'])} are matrices of {rows} rows together, got {given}; pass "
                    "such parameters in a group of their own"
                )

    def update_matrix(self, matrix: Tensor, state: State, group: Group) -> Tensor:
        """The update of one matrix, on its owner."""
        raise NotImplementedError

    def gradient(self, grad: Tensor, state: State, group: Group) -> Tensor:
        """What travels to the owner, elementwise."""
        return grad

    def matrix_state(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """The names and shapes of what the owner keeps for a matrix."""
        return {}

    def apply(self, parameter: Tensor, update: Tensor, group: Group, shape: tuple[int, ...]) -> None:
        """Change a part of a parameter by the same part of its update: weight decay, then a step of the rate `lr`."""
        lr = float(group["lr"])
        if decay := group.get("weight_decay", 0.0):
            parameter.mul_(1 - lr * decay)
        parameter.add_(update, alpha=-lr)

    def cost(self, rows: int, columns: int, group: Group) -> float:
        """How long a matrix takes its owner, in any unit."""
        return rows * columns * min(rows, columns)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, on all ranks; return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owned: dict[Comm, list[OwnedParameter]] = {}
        for work in self._deal():
            if work.parameter.grad is None or not work.parameter.numel():
                continue
            if isinstance(work.parameter, ShardedTensor):
                owned.setdefault(work.parameter.comm, []).append(work)
            else:
                self._step_alone(work)
        for comm, works in owned.items():
            self._step_together(comm, works)
        return loss

    def _deal(self) -> list[OwnedParameter]:
        """All parameters and who computes their matrices; kept, so that layouts and what is planned for them last."""
        all_ = [(p, group) for group in self.param_groups for p in group["params"]]
        key = [
            (p, p.sharding if isinstance(p, ShardedTensor) else None, group["stacked"], group["fused"])
            for p, group in all_
        ]
        known = self.__dict__.get("_dealt")
        if (
            known is None
            or len(known[0]) != len(key)
            or any(a[0] is not b[0] or a[1:] != b[1:] for a, b in zip(known[0], key, strict=True))
        ):
            known = self.__dict__["_dealt"] = key, self._deal_anew(all_)
        works: list[OwnedParameter] = known[1]
        return works

    def _deal_anew(self, all_: Sequence[tuple[Tensor, Group]]) -> list[OwnedParameter]:
        boxes = [tuple(_matrices(p, group)) for p, group in all_]
        costs: dict[tuple[Comm, tuple[int, ...]], dict[tuple[int, int], float]] = {}
        for number, (p, group) in enumerate(all_):
            if isinstance(p, ShardedTensor):
                own = costs.setdefault((p.comm, p.sharding.ranks), {})
                own |= {
                    (number, b): self.cost(box.sizes[-2], box.sizes[-1], group) for b, box in enumerate(boxes[number])
                }
        owners: dict[tuple[int, int], int] = {}
        for (_, ranks), own in costs.items():
            owners |= deal_owners(own, ranks)
        return [
            OwnedParameter(
                p, group, boxes[number], tuple(owners.get((number, b), 0) for b in range(len(boxes[number])))
            )
            for number, (p, group) in enumerate(all_)
        ]

    def _step_alone(self, work: OwnedParameter) -> None:
        """The same for a plain parameter, which every rank that has it updates by itself."""
        parameter, group, state = work.parameter, work.group, self.state[work.parameter]
        assert parameter.grad is not None
        for name in self.sharded_state:
            state.setdefault(name, torch.zeros_like(parameter.grad))
        whole = self.gradient(parameter.grad, state, group)
        for number, box in enumerate(work.boxes):
            place = _place_of(box)
            own: State = {}
            for name, shape in self.matrix_state(*box.sizes[-2:]).items():
                key = _state_name(name, number, work)
                own[name] = state.setdefault(key, torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
            update = self.update_matrix(whole[place].reshape(box.sizes[-2:]), own, group)
            shape = box.sizes[-2:]
            self.apply(parameter[place], update.reshape(box.sizes), group, shape)

    def _step_together(self, comm: Comm, works: Sequence[OwnedParameter]) -> None:
        """The updates of one comm's parameters, in rounds."""
        back: list[tuple[OwnedParameter, ShardedTensor]] = []
        for members in [*_rounds(works), []]:
            states = [self._matrix_states(work) for work in members]
            away = [
                (key, held, target)
                for work, own in zip(members, states, strict=True)
                for key, held in own.items()
                if (target := self._state_layout(work, key, tuple(held.shape))) != held.sharding
            ]  # state that was loaded in another layout, or whose owner is another one now
            sources = [*map(self._start, members), *(update for _, update in back), *(held for _, held, _ in away)]
            targets = [*(w.layout for w in members), *(_sharded(w).sharding for w, _ in back), *(h for _, _, h in away)]
            if not sources:
                continue
            moved = redistribute_many(sources, targets, max_buffer_bytes=self.max_buffer_bytes)
            for (work, _), update in zip(back, moved[len(members) :], strict=False):
                for part, own_update in zip(_sharded(work).local_parts, update.local_parts, strict=True):
                    self.apply(part, own_update, work.group, work.boxes[0].sizes[-2:])
            on_owner = {id(held): new for (_, held, _), new in zip(away, moved[len(moved) - len(away) :], strict=True)}
            back = []
            for work, whole, own in zip(members, moved, states, strict=False):
                held_now = {key: on_owner.get(id(held), held) for key, held in own.items()}
                self.state[work.parameter].update(held_now)
                back.append((work, self._compute(work, whole, held_now)))

    def _start(self, work: OwnedParameter) -> ShardedTensor:
        """What travels to the owners, made of this rank's parts."""
        parameter, state = _sharded(work), self.state[work.parameter]
        grad = parameter.grad
        assert isinstance(grad, ShardedTensor)
        if grad.sharding != parameter.sharding:
            grad = grad.redistribute(parameter.sharding)
        for name in self.sharded_state:
            if name not in state:
                parts = tuple(torch.zeros_like(part) for part in grad.local_parts)
                state[name] = wrap(parameter.sharding, parts, parameter.comm, dtype=grad.dtype, device=grad.device)
        made = tuple(
            self.gradient(part, {name: state[name].local_parts[slot] for name in self.sharded_state}, work.group)
            for slot, part in enumerate(grad.local_parts)
        )
        probe = made[0] if made else self.gradient(*self._probe(grad), work.group)
        return wrap(parameter.sharding, made, parameter.comm, dtype=probe.dtype, device=parameter.device)

    def _probe(self, grad: ShardedTensor) -> tuple[Tensor, State]:
        """A part without elements: a rank that holds nothing knows by it which dtype travels."""
        nothing = torch.zeros(0, dtype=grad.dtype, device=grad.device)
        return nothing, {name: nothing.clone() for name in self.sharded_state}

    def _matrix_states(self, work: OwnedParameter) -> dict[str, ShardedTensor]:
        """The state of the owners, wherever it is now, by key."""
        parameter, state = _sharded(work), self.state[work.parameter]
        found: dict[str, ShardedTensor] = {}
        for number, box in enumerate(work.boxes):
            for name, shape in self.matrix_state(*box.sizes[-2:]).items():
                key = _state_name(name, number, work)
                if key not in state:
                    layout = self._state_layout(work, key, shape)
                    options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
                    parts = tuple(torch.zeros(s, **options) for s in layout.local_shapes(parameter.comm.rank))
                    state[key] = wrap(layout, parts, parameter.comm, **options)
                found[key] = state[key]
        return found

    def _state_layout(self, work: OwnedParameter, key: str, shape: tuple[int, ...]) -> Layout:
        number = int(key.rpartition(".")[2]) if len(work.boxes) > 1 else 0
        return EnumerableSpec([Piece(Box.whole(shape), work.owners[number])]).layout(shape)

    def _compute(self, work: OwnedParameter, whole: ShardedTensor, held: Mapping[str, ShardedTensor]) -> ShardedTensor:
        """The updates of the matrices that this rank owns, where they are whole."""
        rank, made = whole.comm.rank, []
        for slot, number in enumerate(work.boxes_of(rank)):
            shape = work.boxes[number].sizes[-2:]
            names = {name: _state_name(name, number, work) for name in self.matrix_state(*shape)}
            own = {name: held[key].local_parts[0] for name, key in names.items()}
            matrix = whole.local_parts[slot]
            made.append(self.update_matrix(matrix.reshape(shape), own, work.group).reshape(matrix.shape).contiguous())
        dtype = self.update_dtype(whole.dtype, work.group)
        wrong = next((m.dtype for m in made if m.dtype != dtype), None)
        if wrong is not None:
            raise TypeError(
                f"{type(self).__name__}.update_matrix returned {wrong} and update_dtype says {dtype}: ranks without a "
                "matrix know the type by it; return that type, or override update_dtype"
            )
        return wrap(work.layout, tuple(made), whole.comm, dtype=dtype, device=whole.device)

    def update_dtype(self, dtype: torch.dtype, group: Group) -> torch.dtype:
        """The element type of updates of matrices of this one."""
        return dtype


def _sharded(work: OwnedParameter) -> ShardedTensor:
    assert isinstance(work.parameter, ShardedTensor)
    return work.parameter


def _matrices(parameter: Tensor, group: Group) -> Iterable[Box]:
    """The matrices of a parameter, as boxes."""
    shape = tuple(parameter.shape)
    if group["stacked"]:
        return (Box((i, 0, 0), (1, *shape[1:])) for i in range(shape[0]) if parameter.numel())
    rows, first = [], 0
    for count in group["fused"] or shape[:1]:
        rows.append(Box((first, 0), (count, shape[1])))
        first += count
    return (box for box in rows if math.prod(box.sizes))


def _place_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))


def _state_name(name: str, number: int, work: OwnedParameter) -> str:
    """The key of an owner's state: numbered where a parameter is several matrices."""
    return name if len(work.boxes) == 1 else f"{name}.{number}"


def _rounds(works: Sequence[OwnedParameter]) -> list[list[OwnedParameter]]:
    """Parameters in rounds, in each of which no rank gets more than the largest single one brings to a rank."""
    brought = []
    for work in works:
        by_rank: dict[int, int] = {}
        for box, rank in zip(work.boxes, work.owners, strict=True):
            by_rank[rank] = by_rank.get(rank, 0) + math.prod(box.sizes)
        brought.append(by_rank)
    room = max((n for by_rank in brought for n in by_rank.values()), default=0)
    order = sorted(range(len(works)), key=lambda i: (-sum(brought[i].values()), i))
    rounds: list[tuple[list[OwnedParameter], dict[int, int]]] = []
    for i in order:
        fits = (r for r in rounds if all(r[1].get(rank, 0) + n <= room for rank, n in brought[i].items()))
        members, loads = next(fits, ([], {}))
        if not members:
            rounds.append((members, loads))
        members.append(works[i])
        for rank, n in brought[i].items():
            loads[rank] = loads.get(rank, 0) + n
    return [members for members, _ in rounds]


class Muon(OwnerOptimizer):
    """torch.optim.Muon, with each matrix orthogonalised on one rank; the options are torch's.

    The results are those of `torch.optim.Muon` on whole matrices, bit for bit where gradients are. `ns_dtype` is the
    type of the Newton-Schulz iteration; in the default, bfloat16, matrices travel in two bytes an element.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = Muon([weight], lr=0.5, weight_decay=0.0)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.shape, list(optimizer.state[weight])
    (torch.Size([2, 2]), ['momentum_buffer'])
    """

    sharded_state = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        max_buffer_bytes: int | None = None,
    ) -> None:
        if min(float(lr), weight_decay, momentum) < 0 or not 0 <= ns_steps < 100 or len(ns_coefficients) != 3:
            raise ValueError(
                f"Muon(lr={lr}, weight_decay={weight_decay}, momentum={momentum}, ns_steps={ns_steps}, "
                f"ns_coefficients={ns_coefficients}): rates are 0 or more, steps below 100, coefficients 3"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: pass 'original', 'match_rms_adamw' or None")
        self.ns_dtype = ns_dtype
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, options, max_buffer_bytes=max_buffer_bytes)

    def gradient(self, grad: Tensor, state: State, group: Group) -> Tensor:
        """Momentum, and Nesterov's: on parts, before they travel."""
        average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
        return update.to(self.ns_dtype) if self.ns_dtype.itemsize < update.dtype.itemsize else update

    def update_matrix(self, matrix: Tensor, state: State, group: Group) -> Tensor:
        """The nearest semi-orthogonal matrix, roughly."""
        made = _orthogonalise(matrix.to(self.ns_dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
        return made * _rate_factor(matrix.shape, group) if group["fused"] else made

    def update_dtype(self, dtype: torch.dtype, group: Group) -> torch.dtype:
        """That of the iteration."""
        return self.ns_dtype

    def apply(self, parameter: Tensor, update: Tensor, group: Group, shape: tuple[int, ...]) -> None:
        """Weight decay, then a step; the rate is adjusted to the shape of the matrix."""
        lr = float(group["lr"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-lr * (1.0 if group["fused"] else _rate_factor(shape, group)))

    def cost(self, rows: int, columns: int, group: Group) -> float:
        """The multiplications of the iteration."""
        short, long = sorted((rows, columns))
        return float(group["ns_steps"] * (4 * short**2 * long + 2 * short**3) + rows * columns)


def _rate_factor(shape: Sequence[int], group: Group) -> float:
    """By how much the rate of a matrix is larger than `lr`."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Drive the singular values of a matrix towards 1 by a polynomial of degree 5, applied several times.

    >>> _orthogonalise(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), (2.0, -1.5, 0.5), 12, 1e-7).round(decimals=3).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    first, third, fifth = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)  # the largest singular value is at most 1
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x
