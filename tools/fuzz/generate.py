"""A random program from a seed: statements are drawn one by one and kept if torch runs them on whole tensors.

1. A program has one mesh. Most inputs are laid out on it: chunks, uneven sizes, groups, blocks, replicas, pending
   reductions. Some programs use pieces instead: boxes cut at random, any number of them on a rank.
2. The first tensor of a statement is an earlier result, an input, or a new input.
3. The other fields of its template are filled to fit: an earlier tensor or a new input, in a layout of its own.
4. The rounds follow: data, other data, inputs that are one tensor, and perhaps another mode, in any order.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from shardwise import LayoutError, parse_spec
from tools.fuzz.operators import EMPTY_RANK_OPERATORS, OPERATORS, Operator
from tools.fuzz.program import Input, Program, Round, Statement
from tools.fuzz.run import execute
from tools.fuzz.values import fill

# Notation and the number of ranks of the world.
MESHES = (
    ("tp=2", 2),
    ("tp=2", 2),
    ("tp=2 @ 1,0", 2),
    ("tp=3", 3),
    ("tp=3 @ 2,0,1", 3),
    ("dp=2,tp=2", 4),
    ("dp=2,tp=2", 4),
)
PARTIAL_MESH = ("tp=2 @ 0,2", 3)
# With ranks that hold nothing of some inputs: the number of ranks, a mesh, how often an input is in pieces, and the
# ranks that pieces are on.
EMPTY_WORLDS = (
    (3, "tp=2 @ 0,2", 0.0, (0, 2)),
    (3, "tp=2 @ 2,1", 0.0, (1, 2)),
    (2, "tp=1 @ 1", 0.0, (1,)),
    (3, "tp=2 @ 0,2", 0.3, (0, 2)),
    (3, "tp=3", 1.0, (0, 2)),
    (3, "tp=3", 1.0, (1,)),
    (3, "tp=3", 0.5, (0, 2)),
    (2, "tp=2", 0.5, (1,)),
)
REDUCTIONS = {
    "float": ("sum", "sum", "sum", "avg", "min", "max", "product"),
    "complex": ("sum", "sum", "avg"),
    "int": ("sum", "sum", "min", "max"),
    "bool": ("max", "min"),
}


@dataclass(frozen=True)
class World:
    """The ranks of a program, its mesh in notation, and how often an input is laid out in pieces instead.

    `owners` are the ranks that pieces are on, None for all.
    """

    ranks: int
    mesh: str
    pieces: float
    owners: tuple[int, ...] | None = None

    def draw_rank(self, rng: Random) -> int:
        """A rank for a piece."""
        return rng.randrange(self.ranks) if self.owners is None else rng.choice(self.owners)

    @property
    def axes(self) -> list[int]:
        """The sizes of the mesh's axes."""
        return [int(axis.partition("=")[2]) for axis in self.mesh.partition(" @ ")[0].split(",")]


def random_world(rng: Random) -> World:
    """A mesh of two to four ranks, rarely one that leaves out a rank; one in five programs is mostly in pieces."""
    mesh, ranks = PARTIAL_MESH if rng.random() < 0.04 else rng.choice(MESHES)
    return World(ranks, mesh, rng.choice((0.0, 0.0, 0.0, 0.05, 0.8)))


def random_spec(rng: Random, world: World, shape: tuple[int, ...], dtype: str, pending: bool = True) -> str:
    """A spec that fits a shape."""
    for _ in range(20):
        if rng.random() < world.pieces:
            text = _pieces(rng, world, shape)
        else:
            op = rng.choice(REDUCTIONS[_family(dtype)])
            text = f"on {world.mesh}: " + ", ".join(_placement(rng, n, shape, op, pending) for n in world.axes)
        try:
            parse_spec(text).layout(shape)
        except LayoutError:
            continue
        return text
    return replicated(world)


def replicated(world: World) -> str:
    """Every rank of the mesh holds the whole."""
    return f"on {world.mesh}: " + ", ".join("R" for _ in world.axes)


def _family(dtype: str) -> str:
    return next((family for family in ("complex", "float", "bool") if family in dtype), "int")


def _placement(rng: Random, count: int, shape: tuple[int, ...], op: str, pending: bool) -> str:
    drawn = rng.random()
    if pending and drawn < 0.15:
        return f"P({op})"
    if not shape or drawn < 0.35:
        return "R"
    dim = rng.randrange(len(shape))
    rule = rng.choice(("", "", "", "sizes", "groups", "block", "unit", "each"))
    if rule == "unit":
        rule = f" unit({rng.randint(2, 3)})"
    elif rule == "each":
        rule = _copies(rng, shape[dim], [n for n in range(1, count + 1) if count % n == 0])
    elif rule == "sizes":
        rule = f" sizes({_listed(_cuts(rng, shape[dim], count))})"
    elif rule == "groups":
        rule = f" groups({_listed(_cuts(rng, shape[dim], rng.randint(1, 3)))})"
    elif rule == "block":
        rule = f" block({rng.randint(1, 2)})"
    return f"S({dim}){rule}"


def _copies(rng: Random, length: int, divisors: list[int]) -> str:
    """Groups whose parts are on one rank or several, of units sometimes; or one group of which they are on several."""
    unit = rng.choice((1, 1, 2))
    units = f" unit({unit})" if unit > 1 else ""
    if rng.random() < 0.4:
        return f" each {divisors[-1]}{units}"
    groups = [n * unit for n in _cuts(rng, length // unit, rng.randint(1, 3))]
    groups[-1] += length % unit
    return f" groups({','.join(f'{n} each {rng.choice(divisors)}' for n in groups)}){units}"


def _cuts(rng: Random, length: int, count: int) -> list[int]:
    """Lengths of `count` parts, zeros among them."""
    edges = [0, *sorted(rng.randint(0, length) for _ in range(count - 1)), length]
    return [b - a for a, b in pairwise(edges)]


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _pieces(rng: Random, world: World, shape: tuple[int, ...]) -> str:
    """Boxes by guillotine cuts, on any ranks; or chunks, several on a rank."""
    if not shape or 0 in shape:
        return f"as pieces {world.draw_rank(rng)}[{','.join(f'0:{n}' for n in shape)}]"
    if rng.random() < 0.3:
        ranks = [world.draw_rank(rng) for _ in range(rng.randint(1, world.ranks + 1))]
        return f"as chunk({rng.randrange(len(shape))}) over {_listed(ranks)}"
    boxes = [[(0, n) for n in shape]]
    for _ in range(rng.randint(1, 4)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        start, stop = box[dim]
        at = rng.randint(start, stop)
        boxes += [b for b in (_cut(box, dim, start, at), _cut(box, dim, at, stop)) if b[dim][0] < b[dim][1]]
    texts = [f"{world.draw_rank(rng)}[{','.join(f'{a}:{b}' for a, b in box)}]" for box in boxes]
    return "as pieces " + ", ".join(texts)


def _cut(box: list[tuple[int, int]], dim: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(start, stop) if d == dim else part for d, part in enumerate(box)]


LENGTHS = (1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8)
CLASSES: dict[str, tuple[str, ...]] = {
    "any": ("float64", "float32", "bfloat16", "complex128", "int64", "bool"),
    "num": ("float64", "float32", "bfloat16", "complex128", "int64"),
    "real": ("float64", "float32", "bfloat16", "int64"),
    "float": ("float64", "float32", "bfloat16", "complex128"),
    "rfloat": ("float64", "float32", "bfloat16"),
    "int": ("int64",),
    "bool": ("bool",),
    "cplx": ("complex128",),
}


@dataclass
class Draft:
    """A program in the making: what it holds so far, with the values on whole tensors."""

    rng: Random
    world: World
    dtype: str
    mode: str
    inputs: list[Input] = field(default_factory=list)
    steps: list[Statement] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    inexact: set[str] = field(default_factory=set)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.names.items() if isinstance(value, Tensor)}

    def pick(self, shape: tuple[int, ...], dtype: str, fill: str = "integers", reuse: float = 0.6) -> str:
        """A tensor of this shape, dtype and fill: one that is there, or a new input."""
        if fill == "integers":
            found = [n for n, t in self.tensors.items() if tuple(t.shape) == shape and name_dtype(t) == dtype]
        else:
            found = [i.name for i in self.inputs if (i.shape, i.dtype, i.fill) == (shape, dtype, fill)]
        return self.rng.choice(found) if found and self.rng.random() < reuse else self.add(shape, dtype, fill)

    def add(self, shape: tuple[int, ...], dtype: str, fill_: str = "integers") -> str:
        """A new input."""
        same = [i.spec for i in self.inputs if i.shape == shape and i.dtype == dtype]
        spec = random_spec(self.rng, self.world, shape, dtype)
        if same and self.rng.random() < 0.5:
            spec = self.rng.choice(same)
        if fill_ == "integers" and self.rng.random() < 0.15:
            fill_ = self.rng.choice(("normal", "positive", "constant")) if "float" in dtype else "positive"
        tape = ("float" in dtype or "complex" in dtype) and not re.search(r"P\((avg|min|max|product)\)", spec)
        item = Input(f"a{len(self.inputs)}", dtype, shape, spec, fill_, tape and self.rng.random() < 0.6)
        self.inputs.append(item)
        values = fill(item, 0)
        self.names[item.name] = values.requires_grad_() if item.requires_grad else values
        if item.fill == "normal" or dtype == "bfloat16" or self.mode == "autocast":
            self.inexact.add(item.name)
        return item.name

    def shape(self, dims: int, only: bool) -> tuple[int, ...]:
        """A small shape; a dim of no elements is rare."""
        count = dims if only else self.rng.randint(dims, max(dims, 3))
        lengths = LENGTHS if self.rng.random() < 0.9 else (*LENGTHS, 0)
        return tuple(self.rng.choice(lengths) for _ in range(count))

    def first(self, operator: Operator) -> str:
        """The first tensor of a statement."""
        known = CLASSES[operator.kind]

        def fits(name: str, tensor: Tensor) -> bool:
            right = tensor.ndim == operator.dims if operator.only else tensor.ndim >= operator.dims
            return right and name_dtype(tensor) in known and not (operator.needs and name in self.inexact)

        found = [name for name, tensor in self.tensors.items() if fits(name, tensor)]
        if found and self.rng.random() < 0.85:
            results = [name for name in found if name.startswith("v")][-3:]
            return self.rng.choice(results if results and self.rng.random() < 0.7 else found)
        return self.add(self.shape(operator.dims, operator.only), self.dtype if self.dtype in known else known[0])


def name_dtype(tensor: Tensor) -> str:
    """The dtype of a tensor without the name of torch."""
    return str(tensor.dtype).removeprefix("torch.")


class Picked:
    """What one statement has drawn so far."""

    def __init__(self, draft: Draft, name: str) -> None:
        self.draft, self.name = draft, name
        self.dim = 0
        self.start = 0
        self.count = 1
        self.index: tuple[int, ...] = ()
        # Often as many rows as the first tensor has: then one tensor can stand for both in an aliased round.
        self.width = self.shape[0] if self.x.ndim == 2 and draft.rng.random() < 0.4 else draft.rng.randint(1, 5)

    @property
    def x(self) -> Tensor:
        found: Tensor = self.draft.names[self.name]
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    @property
    def dtype(self) -> str:
        return name_dtype(self.x)

    @property
    def length(self) -> int:
        """The length of the dim that was drawn."""
        return self.shape[self.dim]

    def like(self, shape: tuple[int, ...]) -> str:
        """A tensor of this shape and the first one's dtype."""
        return self.draft.pick(shape, self.dtype)

    def indices(self, shape: tuple[int, ...], bound: int) -> str:
        """A tensor of indices from 0 to `bound` - 1."""
        return self.draft.pick(shape, "int64", f"index:{max(bound, 1)}")

    def among(self, low: int, high: int) -> int:
        """A number from `low` to `high`, which may be below `low`."""
        return self.draft.rng.randint(low, max(low, high))


def _first(p: Picked) -> str:
    return p.name


def _same(p: Picked) -> str:
    return p.like(p.shape)


def _broadcast(p: Picked) -> str:
    rng = p.draft.rng
    shape = p.shape
    if rng.random() < 0.4:
        shape = tuple(1 if rng.random() < 0.3 else n for n in shape)
        shape = shape[rng.randint(0, len(shape)) if rng.random() < 0.4 else 0 :]
    return p.like(shape)


def _dim(p: Picked) -> str:
    p.dim = p.draft.rng.randrange(p.x.ndim)
    return str(p.dim if p.draft.rng.random() < 0.7 else p.dim - p.x.ndim)


def _other_dim(p: Picked) -> str:
    return str(p.draft.rng.choice([d for d in range(p.x.ndim) if d != p.dim % p.x.ndim]))


def _place(p: Picked) -> str:
    return str(p.among(0, p.length - 1))


def _first_place(p: Picked) -> str:
    return str(p.among(0, p.shape[0] - 1))


def _start(p: Picked) -> str:
    p.start = p.among(0, p.length)
    return str(p.start)


def _length(p: Picked) -> str:
    return str(p.among(0 if p.draft.rng.random() < 0.2 else 1, p.length - p.start))


def _length_from_one(p: Picked) -> str:
    return str(p.among(1, p.length))


def _small(p: Picked) -> str:
    return str(p.draft.rng.choice((-2, -1, 0, 1, 2, 3)))


def _permutation(p: Picked) -> str:
    dims = list(range(p.x.ndim))
    p.draft.rng.shuffle(dims)
    return ", ".join(map(str, dims))


def _new_shape(p: Picked) -> str:
    """Neighbouring dims are joined, or one is cut in two."""
    rng, shape = p.draft.rng, list(p.shape)
    at = rng.randrange(len(shape))
    halves = [n for n in range(1, shape[at] + 1) if shape[at] % n == 0]
    if rng.random() < 0.4 and halves:
        one = rng.choice(halves)
        shape[at : at + 1] = [one, shape[at] // one]
    elif at + 1 < len(shape):
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        shape = [math.prod(shape)] if rng.random() < 0.5 else [-1, *shape[1:]]
    return ", ".join(map(str, shape))


def _mask(p: Picked) -> str:
    return p.draft.pick(p.shape, "bool")


def _index(p: Picked) -> str:
    p.index = (p.among(1, 5),)
    return p.indices(p.index, p.length)


def _single(p: Picked) -> str:
    p.index = (1,)
    return p.indices(p.index, p.length)


def _index_of_first(p: Picked) -> str:
    shape = (p.among(1, 4),) if p.draft.rng.random() < 0.7 else (2, 2)
    return p.indices(shape, p.shape[0])


def _index_of_second(p: Picked) -> str:
    return p.indices((p.among(1, 4),), p.shape[1])


def _beside_index(p: Picked) -> str:
    """What is written at the indices: the first tensor's shape, as long as the indices in the dim."""
    dim = p.dim % p.x.ndim
    return p.like((*p.shape[:dim], p.index[0], *p.shape[dim + 1 :]))


def _scatter(p: Picked) -> str:
    dim = p.dim % p.x.ndim
    p.index = tuple(p.among(1, 4) if d == dim else n for d, n in enumerate(p.shape))
    return p.indices(p.index, p.length)


def _beside_scatter(p: Picked) -> str:
    return p.like(p.index)


def _factor(p: Picked) -> str:
    batch = p.shape[:-2] if p.x.ndim == 3 or p.draft.rng.random() < 0.5 else ()
    return p.like((*batch, p.shape[-1], p.width))


def _weight(p: Picked) -> str:
    return p.like((p.width, p.shape[-1]))


def _bias(p: Picked) -> str:
    return p.like((p.width,))


def _row(p: Picked) -> str:
    """A vector: as long as the last dim, or as the product's last dim where a factor was drawn."""
    return p.like(p.shape[-1:])


def _table(p: Picked) -> str:
    return p.draft.pick((3, p.among(1, 4)), "float64")


def _labels(p: Picked) -> str:
    return p.indices(p.shape[:1], p.shape[1])


def _kernel(p: Picked) -> str:
    return p.like((p.width, p.shape[1], 3))


def _spec(p: Picked) -> str:
    return repr(random_spec(p.draft.rng, p.draft.world, p.shape, p.dtype, pending=False))


FIELDS: dict[str, Callable[[Picked], str]] = {
    "x": _first,
    "y": _same,
    "z": _same,
    "b": _broadcast,
    "d": _dim,
    "e": _other_dim,
    "k": _place,
    "k0": _first_place,
    "start": _start,
    "length": _length,
    "length1": _length_from_one,
    "n": _small,
    "perm": _permutation,
    "shape": _new_shape,
    "mask": _mask,
    "index": _index,
    "single": _single,
    "index0": _index_of_first,
    "index1": _index_of_second,
    "xindex": _beside_index,
    "xsingle": _beside_index,
    "scatter": _scatter,
    "xscatter": _beside_scatter,
    "m": _factor,
    "w": _weight,
    "bias": _bias,
    "row": _row,
    "table": _table,
    "labels": _labels,
    "kernel": _kernel,
    "spec": _spec,
}


DTYPES = ("float64",) * 9 + ("float32",) * 4 + ("complex128",) * 2 + ("int64",) * 2 + ("bfloat16", "bool")
LARGEST, MOST_DIMS, MOST_EXACT = 600, 4, 2.0**20
# Their second gradients are not defined where a vector, or a rank's part of it, is zero.
_LENGTHS_OF_VECTORS = re.compile(r"norm|dist|cosine|std\(")
_FIELD = re.compile(r"\{(\w+)\}")


class NoFitError(Exception):
    """A template that does not fit the tensors at hand: another one is drawn."""


def random_program(seed: int, empty_ranks: bool = False) -> Program:
    """The program of a seed; the same for the same seed.

    With `empty_ranks` some rank holds nothing of some input, there are operators of which ranks with parts and without
    have done different things, and gradients are taken twice.

    Statements are tried in host memory: on a GPU an index out of range ends the process's use of it.

    >>> random_program(5) == random_program(5)
    True
    """
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives some once: what is drawn does not depend on that
        return _draw_program(Random(seed), empty_ranks)


def _draw_program(rng: Random, empty_ranks: bool) -> Program:
    mode = rng.choice(("grad",) * 8 + ("no_grad", "inference", "autocast"))
    dtype = "float32" if mode == "autocast" else rng.choice(DTYPES)
    world = World(*rng.choice(EMPTY_WORLDS)) if empty_ranks else random_world(rng)
    draft = Draft(rng, world, dtype, mode)
    wanted = rng.randint(1, 6) if empty_ranks else rng.randint(3, 10)
    operators = (*OPERATORS, *EMPTY_RANK_OPERATORS) if empty_ranks else OPERATORS
    for _ in range(wanted * 12):
        if len(draft.steps) == wanted:
            break
        _extend(draft, rng.choice(operators))
    backward = rng.random() < 0.8
    twice = backward and empty_ranks and not any(_LENGTHS_OF_VECTORS.search(step.code) for step in draft.steps)
    program = Program(world.ranks, tuple(draft.inputs), tuple(draft.steps), (), backward, twice)
    return replace(program, rounds=_rounds(draft)).without_unused()


def _extend(draft: Draft, operator: Operator) -> None:
    """Add a statement; nothing changes if it does not fit."""
    kept = (list(draft.inputs), dict(draft.names), set(draft.inexact))
    before = {name: value.detach().clone() for name, value in draft.tensors.items()}
    try:
        step = _statement(draft, operator)
        execute(step, draft.names)
        _check_results(draft, step, operator)
    except Exception:  # torch refuses in many ways; a template that does not fit is no matter
        draft.inputs, draft.names, draft.inexact = kept
        for name, value in before.items():
            if name in draft.names and not torch.equal(draft.names[name], value):
                with torch.no_grad():
                    draft.names[name].copy_(value)
        return
    draft.steps.append(step)


def _statement(draft: Draft, operator: Operator) -> Statement:
    picked = Picked(draft, draft.first(operator))
    free = sum(len(step.targets) for step in draft.steps)
    texts = {"t": f"v{free}", "u": f"v{free + 1}"}
    statement = operator.statement
    for name in dict.fromkeys(_FIELD.findall(statement)):
        if name not in texts:
            texts[name] = FIELDS[name](picked)
    return Statement(operator.name, statement.format(**texts))


def _check_results(draft: Draft, step: Statement, operator: Operator) -> None:
    """Refuse results that are too large; note which tensors are no longer exact."""
    rounded = not operator.keeps or any(name in draft.inexact for name in step.reads)
    if operator.needs and any(name in draft.inexact for name in step.reads):
        raise NoFitError("a rounded number could end on either side of a jump")
    changed = step.reads if operator.writes else step.targets
    for name in changed:
        value = draft.names[name]
        if not isinstance(value, Tensor):
            continue
        if value.numel() > LARGEST or value.ndim > MOST_DIMS:
            raise NoFitError("too large")
        size = _largest(value)
        if not size < MOST_EXACT and not (operator.needs and draft.rng.random() < 0.2):
            raise NoFitError("too large a number, or none")
        if rounded or name_dtype(value) == "bfloat16":
            draft.inexact.add(name)
    if operator.writes and rounded:
        draft.inexact |= {name for name, tensor in draft.tensors.items() if _shares(tensor, changed, draft)}


def _shares(tensor: Tensor, changed: tuple[str, ...], draft: Draft) -> bool:
    """Whether a tensor is a view of one that was written to."""
    places = {draft.names[n].untyped_storage().data_ptr() for n in changed if isinstance(draft.names[n], Tensor)}
    return tensor.untyped_storage().data_ptr() in places


def _largest(value: Tensor) -> float:
    if value.dtype == torch.bool or value.numel() == 0:
        return 0.0
    return float(value.detach().abs().max())


def _rounds(draft: Draft) -> tuple[Round, ...]:
    rng = draft.rng
    rounds = [Round(0, (), draft.mode), Round(1, (), draft.mode)]
    pairs = [
        (other.name, one.name)
        for number, one in enumerate(draft.inputs)
        for other in draft.inputs[number + 1 :]
        if (one.shape, one.dtype) == (other.shape, other.dtype) and "index" not in one.fill + other.fill
    ]
    if pairs:
        rounds.append(Round(2, (rng.choice(pairs),), draft.mode))
    if draft.mode != "grad":
        rounds.append(Round(3))
    elif rng.random() < 0.15:
        rounds.append(Round(3, (), rng.choice(("no_grad", "inference"))))
    if rng.random() < 0.4:
        rng.shuffle(rounds)
    return tuple(rounds)
