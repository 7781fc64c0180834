"""How is a layout written in one line? `parse_layout` reads the short notation, `format_layout` prints it.

The grammar, with blanks allowed between any two tokens (docs/notation.md explains it by examples):

    tensor    = dtype "[" lengths "]" rule
    rule      = "" | "@" rank                                        everything on rank 0, or on this rank
              | "on" axis "=" n {"," axis "=" n} ["@" ranks] ":" placements ["split" axis {">" axis}]
              | "as" "chunk" "(" dim ")" "over" ranks
              | "as" "grid" "(" {cut ","} ")" "over" ranks ["each" n]
              | "as" "pieces" ("none" | ranks box {"," ranks box})
    placement = "R" | "P" ["(" op ")"] | "S" "(" dim ")" [cut rule]
    cut rule  = "sizes" list | "groups" list | "block" "(" n ")" | "owners" list
    list      = "(" {length ","} ")"
    cut       = "/" n | length {"+" length}                          n chunks, or these lengths
    box       = "[" {start ":" stop ","} "]"
    ranks     = (rank | first "-" last) {"," ...}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from shardwise._notebook import draw_html
from shardwise.geometry.box import Box, Piece
from shardwise.geometry.dtypes import find_dtype
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.notation.scan import Scanner
from shardwise.geometry.notation.write import format_layout
from shardwise.geometry.placements import REDUCE_OPS, Partial, Placement, Replicate, RowOwners, Shard, resolve_dim
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec

MAX_RANKS = 2**20


@dataclass(frozen=True, slots=True)
class TensorType:
    """What can be said about a sharded tensor without its values: element type, shape and layout.

    >>> tensor = parse_layout("bf16[8,6] on dp=2,tp=2: R, S(1)")
    >>> tensor.dtype, tensor.shape, tensor.itemsize
    ('bf16', (8, 6), 2)
    >>> print(tensor)
    bf16[8,6] on dp=2,tp=2: R, S(1)
    """

    dtype: str
    layout: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", find_dtype(self.dtype).name)

    @property
    def itemsize(self) -> int:
        return find_dtype(self.dtype).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def __str__(self) -> str:
        return format_layout(self.layout, self.dtype)

    def _repr_html_(self) -> str:
        """A picture for notebooks."""
        return draw_html("layout_html", self.layout, self.dtype)


def parse_layout(text: str, like: TensorType | None = None) -> TensorType:
    """Read a tensor's element type, shape and layout; with `like`, a text without type and shape takes those.

    >>> parse_layout("f32[10,4] as chunk(0) over 0-3").layout.local_shapes(3)
    ((1, 4),)
    >>> print(parse_layout("on tp=2: S(1)", like=parse_layout("f32[4,6]")))
    f32[4,6] on tp=2: S(1)
    """
    scanner = Scanner(text)
    if scanner.rest.partition("[")[0].strip().isidentifier() and scanner.peek_word() not in ("on", "as"):
        dtype, shape = _read_type(scanner)
    elif like is not None and scanner.rest:
        dtype, shape = like.dtype, like.shape
    else:
        scanner.fail(f"expected a dtype and a shape such as f32[8,4]; {scanner.found()}")
    rule = _read_rule(scanner)
    for at, dim in rule.dims:
        with scanner.errors_at(at):
            resolve_dim(dim, shape, f"dim {dim}")
    with scanner.errors_at(rule.at):
        return TensorType(dtype, rule.spec.layout(shape))


def parse_spec(text: str) -> ShardingSpec:
    """Read the rule alone, without element type and shape.

    >>> parse_spec("on dp=2,tp=4: R, S(1)")
    MeshSpec(dp=2,tp=4, (Replicate(), Shard(1)))
    """
    return _read_rule(Scanner(text)).spec


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Read placements, one for each mesh axis.

    >>> parse_placements("R, S(-1) sizes(3,0,5), P(avg)")
    (Replicate(), Shard(-1, sizes=(3, 0, 5)), Partial('avg'))
    """
    scanner = Scanner(text)
    placements = [_read_placement(scanner, "")]
    while scanner.take(","):
        placements.append(_read_placement(scanner, ""))
    scanner.end("after the last placement")
    return tuple(placements)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read a list of ranks in which runs may be folded.

    >>> parse_ranks("0-3,8,6")
    (0, 1, 2, 3, 8, 6)
    """
    scanner = Scanner(text)
    ranks = _read_ranks(scanner)
    scanner.end("after the last rank")
    return ranks


MAX_DIMS = 64


@dataclass
class _ParsedSpec:
    """A spec, where an error about it points, and the dims it names with their places in the text."""

    spec: ShardingSpec
    at: int
    dims: list[tuple[int, int]] = field(default_factory=list)


def _read_type(scanner: Scanner) -> tuple[str, tuple[int, ...]]:
    with scanner.errors_at(scanner.at):
        dtype = find_dtype(scanner.word()).name
    scanner.expect("[", "after the dtype")
    at = scanner.at
    shape = tuple(scanner.items(lambda: scanner.integer("a length"), "]", "in the shape"))
    if len(shape) > MAX_DIMS:
        scanner.fail(f"a tensor has at most {MAX_DIMS} dims, got {len(shape)}", at)
    return dtype, shape


def _read_rule(scanner: Scanner) -> _ParsedSpec:
    at = scanner.at
    if scanner.take("on"):
        rule = _read_mesh_rule(scanner)
    elif scanner.take("as"):
        rule = _read_listed_rule(scanner)
    elif scanner.take("@") or not scanner.rest:
        rank = scanner.integer("a rank") if scanner.at > at else 0
        rule = _ParsedSpec(MeshSpec(Mesh((), rank), ()), at)
    else:
        scanner.fail(f"expected 'on' (a mesh), 'as' (chunk, grid or pieces) or '@' (one rank); {scanner.found()}")
    scanner.end("after the layout")
    return rule


def _read_mesh_rule(scanner: Scanner) -> _ParsedSpec:
    mesh = _read_mesh(scanner)
    scanner.expect(":", "after the mesh, then a placement for each axis")
    rule_at, placements, dims = scanner.at, [], []
    for index, axis in enumerate(mesh.axes):
        if index and not scanner.take(","):
            named = f"{mesh.ndim} placements, one for each of the axes {', '.join(mesh.axes)}"
            scanner.fail(f"expected ',' and a placement for axis {axis!r} (the mesh needs {named}); {scanner.found()}")
        at = scanner.at
        placements.append(placement := _read_placement(scanner, f" for axis {axis!r}"))
        if isinstance(placement, Shard):
            dims.append((at, placement.dim))
    if scanner.peek(","):
        scanner.fail(f"expected no more placements: the mesh has only the axes {', '.join(mesh.axes)}")
    order = _read_order(scanner, mesh) if scanner.take("split") else None
    with scanner.errors_at(rule_at):
        return _ParsedSpec(MeshSpec(mesh, placements, order), rule_at, dims)


def _read_mesh(scanner: Scanner) -> Mesh:
    axes: dict[str, int] = {}
    start = scanner.at
    while not axes or scanner.take(","):
        at = scanner.at
        axis = scanner.word() or scanner.fail(f"expected the name of a mesh axis such as tp=4; {scanner.found()}")
        if len(axes) >= MAX_DIMS:
            scanner.fail(f"a mesh has at most {MAX_DIMS} axes", at)
        if axis in axes:
            scanner.fail(f"axis {axis!r} appears twice; axis names must differ", at)
        scanner.expect("=", f"after axis {axis!r}")
        at = scanner.at
        axes[axis] = scanner.integer(f"the number of ranks of axis {axis!r}")
        if axes[axis] < 1:
            scanner.fail(f"axis {axis!r} needs at least one rank, got {axes[axis]}", at)
    size = math.prod(axes.values())
    if size > MAX_RANKS:
        scanner.fail(f"the mesh has {size} ranks; the notation takes up to {MAX_RANKS}", start)
    at = scanner.at
    ranks = _read_ranks(scanner) if scanner.take("@") else tuple(range(size))
    if len(ranks) != size:
        scanner.fail(f"the mesh has {size} places and {len(ranks)} ranks are listed; list {size}", at)
    with scanner.errors_at(at):
        return Mesh(tuple(axes), np.reshape(ranks, tuple(axes.values())))


def _read_order(scanner: Scanner, mesh: Mesh) -> list[str]:
    order: list[str] = []
    while not order or scanner.take(">"):
        with scanner.errors_at(scanner.at):
            axis = scanner.peek_word() or scanner.fail(f"expected an axis, as in split tp>dp; {scanner.found()}")
            mesh.axis_index(axis)
        if axis in order:
            scanner.fail(f"axis {axis!r} appears twice in the split order")
        order.append(scanner.word())
    return order


def _read_placement(scanner: Scanner, place: str) -> Placement:
    at = scanner.at
    if scanner.take("R"):
        return Replicate()
    if scanner.take("P"):
        return _read_partial(scanner)
    if not scanner.take("S"):
        scanner.fail(f"expected S(dim), R or P{place} (for Shard(dim), Replicate(), Partial()); {scanner.found()}")
    scanner.expect("(", "after S, as in S(0)")
    dim = scanner.integer("a dim", signed=True)
    scanner.expect(")", "after the dim")
    with scanner.errors_at(at):
        if scanner.take("block"):
            scanner.expect("(", "after block, as in block(16)")
            block = scanner.integer("the length of a block")
            scanner.expect(")", "after the length of a block")
            return Shard(dim, block=block)
        if scanner.take("owners"):
            return Shard(dim, owners=RowOwners(_read_lengths(scanner, "owners")))
        if scanner.take("sizes"):
            return Shard(dim, sizes=_read_lengths(scanner, "sizes"))
        return Shard(dim, groups=_read_lengths(scanner, "groups") if scanner.take("groups") else None)


def _read_partial(scanner: Scanner) -> Partial:
    if not scanner.take("("):
        return Partial()
    op = scanner.peek_word()
    if op not in REDUCE_OPS:
        scanner.fail(f"expected a reduction, one of {', '.join(REDUCE_OPS)}; {scanner.found()}")
    scanner.take(op)
    scanner.expect(")", "after the reduction")
    return Partial(op)


def _read_lengths(scanner: Scanner, word: str) -> tuple[int, ...]:
    scanner.expect("(", f"after {word}, as in {word}(4,2,2)")
    return tuple(scanner.items(lambda: scanner.integer("a length"), ")", f"in {word}"))


def _read_ranks(scanner: Scanner) -> tuple[int, ...]:
    ranks: list[int] = []
    while True:
        at = scanner.at
        first = scanner.integer("a rank")
        last = scanner.integer("the last rank of the run") if scanner.take("-") else first
        if last < first:
            scanner.fail(f"a run of ranks must ascend, got {first}-{last}; list ranks in another order with commas", at)
        if len(ranks) + last - first >= MAX_RANKS:
            scanner.fail(f"more than {MAX_RANKS} ranks; the notation takes up to {MAX_RANKS}", at)
        ranks.extend(range(first, last + 1))
        if not scanner.take(","):
            return tuple(ranks)


def _read_listed_rule(scanner: Scanner) -> _ParsedSpec:
    at = scanner.at
    if scanner.take("chunk"):
        scanner.expect("(", "after chunk, as in chunk(0)")
        dims = [(scanner.at, dim := scanner.integer("a dim", signed=True))]
        scanner.expect(")", "after the dim")
        scanner.expect("over", "and the ranks, as in chunk(0) over 0-3")
        return _ParsedSpec(ChunkSpec(dim, _read_ranks(scanner)), at, dims)
    if scanner.take("grid"):
        return _ParsedSpec(_read_grid(scanner), at)
    if scanner.take("pieces"):
        return _ParsedSpec(_read_pieces(scanner), at)
    scanner.fail(f"expected chunk, grid or pieces after 'as'; {scanner.found()}")


def _read_grid(scanner: Scanner) -> GridSpec:
    scanner.expect("(", "after grid, as in grid(4+4, /2)")
    splits = scanner.items(lambda: _read_cut(scanner), ")", "in the grid")
    scanner.expect("over", "and the ranks, as in grid(4+4, /2) over 0-3")
    at = scanner.at
    ranks = _read_ranks(scanner)
    copies = scanner.integer("the number of replicas of a cell") if scanner.take("each") else 1
    if copies < 1:
        scanner.fail("each cell needs at least one rank, got each 0", at)
    counts = [s if isinstance(s, int) else len(s) for s in splits]
    if len(ranks) != math.prod(counts) * copies:
        held = f", each on {copies} ranks" if copies > 1 else ""
        scanner.fail(f"the grid has {math.prod(counts)} cells{held}; {len(ranks)} ranks are given", at)
    with scanner.errors_at(at):
        return GridSpec(splits, np.reshape(ranks, (*counts, copies)))


def _read_cut(scanner: Scanner) -> int | tuple[int, ...]:
    if scanner.take("/"):
        at = scanner.at
        count = scanner.integer("a number of chunks")
        return count if count > 0 else scanner.fail("a dim is split into at least one chunk, got 0", at)
    lengths = [scanner.integer("a length")]
    while scanner.take("+"):
        lengths.append(scanner.integer("a length"))
    return tuple(lengths)


def _read_pieces(scanner: Scanner) -> EnumerableSpec:
    pieces: list[Piece] = []
    if scanner.take("none"):
        return EnumerableSpec(pieces)
    while not pieces or scanner.take(","):
        ranks = _read_ranks(scanner)
        scanner.expect("[", "and a box after the ranks, as in 0[0:2,0:4]")
        sides = scanner.items(lambda: _read_side(scanner), "]", "in the box")
        box = Box(tuple(a for a, _ in sides), tuple(b - a for a, b in sides))
        pieces.extend(Piece(box, rank) for rank in ranks)
    filled = [p.box for p in pieces if p.box.numel]
    return EnumerableSpec(pieces, replicated=len(set(filled)) < len(filled))


def _read_side(scanner: Scanner) -> tuple[int, int]:
    at = scanner.at
    start = scanner.integer("the start of the box")
    scanner.expect(":", "between start and stop")
    stop = scanner.integer("the stop of the box")
    return (start, stop) if start <= stop else scanner.fail(f"a box starts before it stops, got {start}:{stop}", at)
