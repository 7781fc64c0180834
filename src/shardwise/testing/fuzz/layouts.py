"""Random layouts, in the notation of one line.

A program has one mesh. Most inputs are laid out on it: chunks, uneven sizes, groups, blocks, replicas, pending
reductions. Some programs use pieces instead: boxes cut at random, any number of them on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

from shardwise import LayoutError, parse_spec

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
REDUCTIONS = {
    "float": ("sum", "sum", "sum", "avg", "min", "max", "product"),
    "complex": ("sum", "sum", "avg"),
    "int": ("sum", "sum", "min", "max"),
    "bool": ("max", "min"),
}


@dataclass(frozen=True)
class World:
    """The ranks of a program, its mesh in notation, and how often an input is laid out in pieces instead."""

    ranks: int
    mesh: str
    pieces: float

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
    rule = rng.choice(("", "", "", "sizes", "groups", "block"))
    if rule == "sizes":
        rule = f" sizes({_listed(_cuts(rng, shape[dim], count))})"
    elif rule == "groups":
        rule = f" groups({_listed(_cuts(rng, shape[dim], rng.randint(1, 3)))})"
    elif rule == "block":
        rule = f" block({rng.randint(1, 2)})"
    return f"S({dim}){rule}"


def _cuts(rng: Random, length: int, count: int) -> list[int]:
    """Lengths of `count` parts, zeros among them."""
    edges = [0, *sorted(rng.randint(0, length) for _ in range(count - 1)), length]
    return [b - a for a, b in pairwise(edges)]


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _pieces(rng: Random, world: World, shape: tuple[int, ...]) -> str:
    """Boxes by guillotine cuts, on any ranks; or chunks, several on a rank."""
    if not shape or 0 in shape:
        return f"as pieces {rng.randrange(world.ranks)}[{','.join(f'0:{n}' for n in shape)}]"
    if rng.random() < 0.3:
        ranks = [rng.randrange(world.ranks) for _ in range(rng.randint(1, world.ranks + 1))]
        return f"as chunk({rng.randrange(len(shape))}) over {_listed(ranks)}"
    boxes = [[(0, n) for n in shape]]
    for _ in range(rng.randint(1, 4)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        start, stop = box[dim]
        at = rng.randint(start, stop)
        boxes += [b for b in (_cut(box, dim, start, at), _cut(box, dim, at, stop)) if b[dim][0] < b[dim][1]]
    texts = [f"{rng.randrange(world.ranks)}[{','.join(f'{a}:{b}' for a, b in box)}]" for box in boxes]
    return "as pieces " + ", ".join(texts)


def _cut(box: list[tuple[int, int]], dim: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(start, stop) if d == dim else part for d, part in enumerate(box)]
