"""How is a layout written in one line? `parse_layout` reads the short notation, `format_layout` prints it.

The grammar, with blanks allowed between any two tokens (docs/notation.md explains it by examples):

    tensor    = dtype "[" lengths "]" rule | type "on" axis "=" n {"," axis "=" n} ["@" ranks]
    rule      = "" | "@" rank                                        everything on rank 0, or on this rank
              | "on" axis "=" n {"," axis "=" n} ["@" ranks] ":" placements ["split" axis {">" axis}]
              | "as" "chunk" "(" dim ")" "over" ranks
              | "as" "grid" "(" {cut ","} ")" "over" ranks ["each" n]
              | "as" "pieces" ("none" | ranks box {"," ranks box})
    placement = "R" | pending | "S" "(" dim ")" [cut rule] ["zigzag"] ["unit" "(" n ")"] ["addends"]
    pending   = "P" ["(" op ")"]
    cut rule  = "sizes" list | "groups" "(" {length ["each" n] ","} ")" | "each" n | "block" "(" n ")" | "owners" list
    list      = "(" {length ","} ")"
    type      = dtype "[" {length ["@" (split | "(" {split ","} ")")] ","} "]" ["{" {pending ":" axis ","} "}"]
    split     = axis [cut rule] ["zigzag"] ["unit" "(" n ")"] ["addends"]         the outermost split first
    cut       = "/" n | length {"+" length}                          n chunks, or these lengths
    box       = "[" {start ":" stop ","} "]"
    ranks     = (rank | first "-" last) {"," ...}

Placements by the names of axes ("tp: S(0)"), one for each axis ("R, S(0)"), or one for the only axis ("S(0)").

Where a spec is wanted, any of these will do next to a mesh, and so will a whole rule ("on dp=2,tp=2: R, S(0)") or a
whole tensor as it is printed ("f32[8,4] on dp=2,tp=2: R, S(0)"); `read_spec` tells them apart.

A text is read from left to right (`Scanner`), with errors that point at the character. Which element types there are,
and how wide each is, is one table, so that the pure layers never ask torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from shardwise._text import count_of, draw_html, public
from shardwise.geometry.box import Box, LayoutError, NotationError, Piece
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import MAX_RANKS, Mesh, format_ranks
from shardwise.geometry.placements import REDUCE_OPS, Partial, Placement, Replicate, RowOwners, Shard, resolve_dim
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its short name, torch's name for it, and its width in bytes."""

    name: str
    torch_name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


# Short name, torch's name and width; one element of f4e2m1fnx2 is a pair of 4-bit floats.
_TABLE = """
f64 float64 8, f32 float32 4, f16 float16 2, bf16 bfloat16 2, f8e4m3fn float8_e4m3fn 1,
f8e4m3fnuz float8_e4m3fnuz 1, f8e5m2 float8_e5m2 1, f8e5m2fnuz float8_e5m2fnuz 1, f8e8m0fnu float8_e8m0fnu 1,
f4e2m1fnx2 float4_e2m1fn_x2 1, i64 int64 8, i32 int32 4, i16 int16 2, i8 int8 1, u64 uint64 8, u32 uint32 4,
u16 uint16 2, u8 uint8 1, bool bool 1, c128 complex128 16, c64 complex64 8, c32 complex32 4
"""
DTYPES = tuple(DType(name, full, int(width)) for name, full, width in map(str.split, _TABLE.split(",")))

_by_name = {key: dtype for dtype in DTYPES for key in (dtype.name, dtype.torch_name, f"torch.{dtype.torch_name}")}


def find_dtype(name: str) -> DType:
    """The element type of a short name or of torch's name.

    >>> find_dtype("bf16").itemsize, find_dtype("float8_e4m3fn").name
    (2, 'f8e4m3fn')
    """
    try:
        return _by_name[name]
    except KeyError:
        known = [d.name for d in DTYPES] + [d.torch_name for d in DTYPES]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(d.name for d in DTYPES)}"
        raise LayoutError(f"unknown dtype {name!r}; {hint}") from None


T = TypeVar("T")
MAX_INT64 = 2**63 - 1
LONGEST_SHOWN = 60
_SPLIT_WORDS = ("sizes", "groups", "block", "owners", "each", "zigzag", "unit", "addends", "split")


class Scanner:
    """A text and a position in it; blanks between tokens do not count.

    >>> scanner = Scanner("tp = 4")
    >>> scanner.word(), scanner.take("="), scanner.integer("a size")
    ('tp', True, 4)
    """

    def __init__(self, text: str) -> None:
        self.text = "".join(" " if c.isspace() else c for c in text)
        self.at = 0
        self._skip_blanks()

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def _advance(self, count: int) -> None:
        self.at += count
        self._skip_blanks()

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise an error that points at a position, by default at the current one."""
        raise NotationError(message, self.text, self.at if at is None else at)

    @contextmanager
    def errors_at(self, at: int) -> Iterator[None]:
        """Let the errors of the geometry point at a position of the text."""
        try:
            yield
        except NotationError:
            raise
        except LayoutError as error:
            raise NotationError(str(error), self.text, at) from None

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def found(self) -> str:
        """What is at the position, in words for an error."""
        word = self.peek_word() or self.text[self.at : self.at + 1]
        more = "..." if len(word) > LONGEST_SHOWN else ""
        return f"found {word[:LONGEST_SHOWN] + more!r}" if word else "the text ends here"

    def peek_word(self) -> str:
        """The identifier at the position, or an empty text."""
        end = self.at
        if self.text[end : end + 1].isidentifier():
            end += 1
            while end < len(self.text) and f"_{self.text[end]}".isidentifier():  # each character once, however long
                end += 1
        return self.text[self.at : end]

    def peek(self, token: str) -> bool:
        """Whether this symbol or keyword comes next."""
        return self.peek_word() == token if token.isidentifier() else self.text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        """Read this symbol or keyword if it comes next."""
        if not self.peek(token):
            return False
        self._advance(len(token))
        return True

    def expect(self, token: str, place: str) -> None:
        """Read this symbol or keyword, or fail."""
        if not self.take(token):
            self.fail(f"expected {token!r} {place}; {self.found()}")

    def word(self) -> str:
        """Read an identifier; an empty text if there is none."""
        word = self.peek_word()
        self._advance(len(word))
        return word

    def integer(self, what: str, signed: bool = False) -> int:
        """Read a whole number, or fail and say what it is for."""
        start = self.at
        end = start + 1 if signed and self.text.startswith("-", start) else start
        while end < len(self.text) and self.text[end] in "0123456789":
            end += 1
        digits = self.text[start:end]
        if not digits.removeprefix("-"):
            self.fail(f"expected {what}, an integer; {self.found()}")
        if len(digits) > 19 or abs(int(digits)) > MAX_INT64:
            self.fail(f"{what} does not fit in 64 bits; the largest number is {MAX_INT64}")
        self._advance(end - start)
        return int(digits)

    def items(self, read: Callable[[], T], close: str, place: str, separator: str = ",") -> list[T]:
        """Read what is between brackets: any number of items, then the closing bracket."""
        found: list[T] = []
        if self.take(close):
            return found
        found.append(read())
        while self.take(separator):
            found.append(read())
        if not self.take(close):
            self.fail(f"expected {separator!r} or {close!r} {place}; {self.found()}")
        return found

    def end(self, place: str) -> None:
        """Fail unless the whole text was read."""
        if self.at < len(self.text):
            near = difflib.get_close_matches(self.peek_word(), _SPLIT_WORDS, n=1)
            self.fail(f"expected nothing more {place}; {self.found()}{f'; write {near[0]}' if near else ''}")


@public
def format_layout(
    layout: Layout, dtype: str | None = "f32", style: Literal["placements", "types"] = "placements"
) -> str:
    """Write a layout in the notation; a spec of a user's own class is written as its pieces. None leaves out the dtype.

    With `style="types"` each dim of a mesh layout says which axes split it, as JAX prints types; what no axis splits,
    and other layouts, are written as always. Both styles are read back.

    >>> from shardwise.geometry.mesh import Mesh
    >>> spec = MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(0)), order=("tp", "dp"))
    >>> format_layout(spec.layout((8, 4)), "bf16")
    'bf16[8,4] on dp=2,tp=2: S(0), S(0) split tp>dp'
    >>> format_layout(MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(1, unit=2))).layout((8, 4)), style="types")
    'f32[8@dp, 4@tp unit(2)] on dp=2,tp=2'
    """
    name = "" if dtype is None else find_dtype(dtype).name
    spec = _find_built_in_spec(layout)
    if style == "types" and isinstance(spec, MeshSpec) and not set(spec.placements) <= {Replicate()}:
        return f"{name}{_format_type(spec.resolved(layout.shape), layout.shape)} on {spec.mesh}"
    return f"{name}[{_join_numbers(layout.shape)}] {format_rule(layout)}".rstrip()


def format_placement(placement: Placement) -> str:
    """Write one placement.

    >>> format_placement(Shard(0, groups=(8, 4, 4))), format_placement(Partial("max")), format_placement(Replicate())
    ('S(0) groups(8,4,4)', 'P(max)', 'R')
    """
    return placement.format()


def _join_numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def format_rule(layout: Layout) -> str:
    """Write how a layout splits a tensor, without the tensor's type; nothing where all of it is on rank 0.

    >>> format_rule(ChunkSpec(0, ranks=4).layout((8, 2)))
    'as chunk(0) over 0-3'
    """
    spec = _find_built_in_spec(layout)
    if isinstance(spec, MeshSpec):
        if spec.mesh.ndim == 0:
            return "" if spec.mesh.is_contiguous else f"@ {int(spec.mesh.ranks)}"
        order = ">".join(_unusual_order(spec.resolved(layout.shape)))
        split = f" split {order}" if order else ""
        return f"on {spec.mesh}: {', '.join(map(format_placement, spec.placements))}{split}"
    if isinstance(spec, ChunkSpec):
        return f"as chunk({spec.dim}) over {format_ranks(spec.ranks)}"
    if isinstance(spec, GridSpec):
        cuts = [f"/{s}" if isinstance(s, int) else "+".join(map(str, s)) for s in spec.splits]
        each = f" each {spec.ranks.shape[-1]}" if spec.ranks.shape[-1] > 1 else ""
        return f"as grid({', '.join(cuts)}) over {format_ranks(spec.ranks.reshape(-1).tolist())}{each}"
    if layout.pending is not None:
        raise LayoutError(
            f"{layout.spec!r} leaves a {layout.pending} pending, which a list of pieces cannot express; lay it out "
            "with a MeshSpec to write it in the notation"
        )
    return f"as pieces {_format_pieces(layout.pieces)}"


LONGEST, MOST_PIECES = 160, 64


def shorten_layout(layout: Layout, dtype: str | None = None) -> str:
    """Write a layout for a table or a message: in the notation, cut off where that is long, else by its spec.

    >>> from shardwise.geometry.mesh import Mesh
    >>> shorten_layout(MeshSpec(Mesh.of(tp=2), (Shard(0),)).layout((8, 4)), "bf16")
    'bf16[8,4] on tp=2: S(0)'
    """
    name = "" if dtype is None else find_dtype(dtype).name
    built_in = type(layout.spec) in (MeshSpec, ChunkSpec, GridSpec) or len(layout.table) <= MOST_PIECES
    try:
        text = format_layout(layout, None) if built_in else f"[{_join_numbers(layout.shape)}] {layout.spec!r}"
    except LayoutError:
        text = f"[{_join_numbers(layout.shape)}] {layout.spec!r}"
    return name + (text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def _find_built_in_spec(layout: Layout) -> ShardingSpec | None:
    """The mesh, chunk or grid spec that means the layout, if its spec is one; a user's subclass may mean another."""
    spec = layout.spec
    if type(spec) in (MeshSpec, ChunkSpec, GridSpec):
        return spec
    same: ShardingSpec | None = None
    if isinstance(spec, MeshSpec):
        same = MeshSpec(spec.mesh, spec.placements, spec.order)
    elif isinstance(spec, ChunkSpec):
        same = ChunkSpec(spec.dim, spec.ranks)
    elif isinstance(spec, GridSpec):
        same = GridSpec(spec.splits, spec.ranks)
    return same if same is not None and same.layout(layout.shape) == layout else None


def _format_type(spec: MeshSpec, shape: tuple[int, ...]) -> str:
    """The lengths of a mesh layout with the axes that split each, and what is pending."""
    dims = []
    for dim, length in enumerate(shape):
        by_axis = ((axis, spec.placements[spec.mesh.axis_index(axis)]) for axis in spec.order)
        splits = [f"{a}{p.format_rule()}" for a, p in by_axis if isinstance(p, Shard) and p.dim == dim]
        several = f"({', '.join(splits)})" if len(splits) > 1 else "".join(splits)
        dims.append(f"{length}@{several}" if splits else str(length))
    pairs = zip(spec.mesh.axes, spec.placements, strict=True)
    pending = ", ".join(f"{p.format()}: {axis}" for axis, p in pairs if isinstance(p, Partial))
    return f"[{', '.join(dims)}]" + (f"{{{pending}}}" if pending else "")


def _unusual_order(spec: MeshSpec) -> list[str]:
    """The axes, outermost first, of every dim that is not split in mesh order."""
    by_dim: dict[int, list[str]] = {}
    for axis in spec.order:
        if isinstance(placement := spec.placements[spec.mesh.axis_index(axis)], Shard):
            by_dim.setdefault(placement.dim, []).append(axis)
    return [a for axes in by_dim.values() if axes != sorted(axes, key=spec.mesh.axis_index) for a in axes]


def _format_pieces(pieces: Sequence[Piece]) -> str:
    """Pieces in their order; neighbours with the same box are written once, with all their ranks."""
    runs: list[tuple[Box, list[int]]] = []
    for piece in pieces:
        if runs and runs[-1][0] == piece.box:
            runs[-1][1].append(piece.rank)
        else:
            runs.append((piece.box, [piece.rank]))
    return ", ".join(f"{format_ranks(ranks)}{str(box).replace(' ', '')}" for box, ranks in runs) or "none"


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


@public
def parse_layout(text: str, like: TensorType | None = None) -> TensorType:
    """Read a tensor in the notation: element type, shape and layout. With `like`, type and shape may be left out.

    >>> parse_layout("f32[10,4] as chunk(0) over 0-3").layout.local_shapes(3)
    ((1, 4),)
    >>> print(parse_layout("on tp=2: S(1)", like=parse_layout("f32[4,6]")))
    f32[4,6] on tp=2: S(1)
    """
    scanner = Scanner(text)
    head = scanner.rest.partition("[")[0].strip()
    if head.replace(".", "").isidentifier() and scanner.peek_word() not in ("on", "as"):
        found = _read_type(scanner)
    elif not head and scanner.peek("[") and like is not None:
        found = replace(_read_type(scanner, required=False), dtype=like.dtype)
    elif like is not None and scanner.rest:
        found = _ParsedType(like.dtype, like.shape)
    else:
        if scanner.peek_word() in _by_name:
            scanner.word()
            scanner.expect("[", "and the shape after the dtype, as in f32[8,4]")
        rule = scanner.rest if scanner.peek_word() == "on" else f"on {scanner.rest}"
        fix = f"; write f32[8,4] {rule[:LONGEST_SHOWN]}" if "=" in rule and ":" in rule else ""
        scanner.fail(f"expected a dtype and a shape such as f32[8,4]; {scanner.found()}{fix}")
    return TensorType(found.dtype, _read_layout(scanner, found))


@public
def parse_spec(text: str) -> ShardingSpec:
    """Read a spec in the notation: a layout without element type and shape.

    >>> parse_spec("on dp=2,tp=4: R, S(1)")
    MeshSpec(dp=2,tp=4, (Replicate(), Shard(1)))
    """
    return _read_rule(Scanner(text)).spec


@public
def parse_placements(text: str) -> tuple[Placement, ...]:
    """Read placements in the notation, one for each axis of a mesh.

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
_LONG_WORDS = {"replica": "R", "shard": "S(0) for dim 0", "partial": "P", "colwise": "S(0)", "rowwise": "S(1)"}
_SMALL_LETTERS = {"s": "S(0) for dim 0", "r": "R", "p": "P", "none": "R"}


@dataclass
class _ParsedSpec:
    """A spec, where an error about it points, and the dims it names with their places in the text."""

    spec: ShardingSpec
    at: int
    dims: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class _ParsedType:
    """An element type and a shape; and for a type with axes, what each does and where that is in the text, in order."""

    dtype: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int, Placement], ...] = ()


def _read_type(scanner: Scanner, required: bool = True) -> _ParsedType:
    """An element type, by the short name or torch's ("torch.float32"), and a shape; the type may be left out if not
    required."""
    start, dtype = scanner.at, scanner.word()
    while scanner.take("."):
        dtype += f".{scanner.word()}"
    if dtype or required:
        with scanner.errors_at(start):
            dtype = find_dtype(dtype).name
    scanner.expect("[", "after the dtype")
    at = scanner.at
    axes, shape = list[tuple[str, int, Placement]](), list[int]()

    def read_dim() -> None:
        shape.append(scanner.integer("a length"))
        if scanner.take("@"):
            read = partial(_read_split, scanner, len(shape) - 1)
            axes.extend(scanner.items(read, ")", "among the axes") if scanner.take("(") else [read()])

    scanner.items(read_dim, "]", "in the shape")
    if len(shape) > MAX_DIMS:
        scanner.fail(f"a tensor has at most {MAX_DIMS} dims, got {len(shape)}", at)
    if scanner.take("{"):
        axes += scanner.items(lambda: _read_pending(scanner), "}", "among what is pending")
    return _ParsedType(dtype, tuple(shape), tuple(axes))


def _read_split(scanner: Scanner, dim: int) -> tuple[str, int, Placement]:
    at = scanner.at
    axis = scanner.word() or scanner.fail(f"expected an axis of the mesh, as in 8@tp; {scanner.found()}")
    return axis, at, _read_shard(scanner, at, dim)


def _read_pending(scanner: Scanner) -> tuple[str, int, Placement]:
    scanner.expect("P", "as in {P(sum): tp}")
    pending = _read_partial(scanner)
    scanner.expect(":", "and the axis, as in {P(sum): tp}")
    at = scanner.at
    return scanner.word() or scanner.fail(f"expected an axis; {scanner.found()}"), at, pending


def _read_typed_layout(scanner: Scanner, found: _ParsedType) -> Layout:
    """The mesh after a type with axes, and the layout that both make."""
    scanner.expect("on", "and the mesh, as in f32[8@dp, 4@tp] on dp=2,tp=2")
    mesh = _read_mesh(scanner)
    scanner.end("after the mesh: the type says what its axes do")
    placements: dict[str, Placement] = {}
    order: list[str] = []
    for axis, at, placement in found.axes:
        with scanner.errors_at(at):
            mesh.axis_index(axis)
        if axis in placements:
            scanner.fail(f"axis {axis!r} appears twice; an axis does one thing", at)
        placements[axis] = placement
        order += [axis] if isinstance(placement, Shard) else []
    with scanner.errors_at(found.axes[0][1]):
        every = [placements.get(axis, Replicate()) for axis in mesh.axes]
        return MeshSpec(mesh, every, order).layout(found.shape)


def _read_layout(scanner: Scanner, found: _ParsedType) -> Layout:
    """The rule after a type, applied to the shape; errors point at the placement that they are about."""
    if found.axes:
        return _read_typed_layout(scanner, found)
    shape, rule = found.shape, _read_rule(scanner)
    for at, dim in rule.dims:
        with scanner.errors_at(at):
            resolve_dim(dim, shape, f"dim {dim}")
    with scanner.errors_at(rule.at):
        return rule.spec.layout(shape)


def _read_rule(scanner: Scanner) -> _ParsedSpec:
    at = scanner.at
    if scanner.take("on"):
        rule = _read_mesh_rule(scanner)
    elif scanner.take("as"):
        rule = _read_listed_rule(scanner)
    elif scanner.take("@") or not scanner.rest:
        if scanner.peek_word():
            scanner.fail(
                f"@ is followed by the number of a rank, and a mesh by on: 'on {scanner.rest[:LONGEST_SHOWN]}'"
            )
        rank = scanner.integer("a rank") if scanner.at > at else 0
        rule = _ParsedSpec(MeshSpec(Mesh((), rank), ()), at)
    else:
        fix = "; parse_layout reads a whole tensor" if _TYPE.match(scanner.rest) else ""
        scanner.fail(f"expected 'on' (a mesh), 'as' (chunk, grid or pieces) or '@' (one rank); {scanner.found()}{fix}")
    scanner.end("after the layout")
    return rule


def _read_mesh_rule(scanner: Scanner) -> _ParsedSpec:
    mesh = _read_mesh(scanner)
    scanner.expect(":", "after the mesh, then a placement for each axis")
    rule_at, placements, dims = scanner.at, [], []
    for index, axis in enumerate(mesh.axes):
        if index and not scanner.take(","):
            named = f"{count_of(mesh.ndim, 'placement')}, one for each of the axes {', '.join(mesh.axes)}"
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
        word = scanner.peek_word().lower()
        short = next((f"; write {s}" for long, s in _LONG_WORDS.items() if word.startswith(long)), "")
        short = f"; write {_SMALL_LETTERS[word]}" if word in _SMALL_LETTERS else short
        if scanner.rest[len(word) :].lstrip().startswith("="):
            short = f"; a mesh follows the word on: 'on {scanner.rest[:LONGEST_SHOWN]}'"
        scanner.fail(
            f"expected S(dim), R or P{place} (for Shard(dim), Replicate(), Partial()); {scanner.found()}{short}"
        )
    scanner.expect("(", "after S, as in S(0)")
    dim = scanner.integer("a dim", signed=True)
    scanner.expect(")", "after the dim")
    return _read_shard(scanner, at, dim)


def _read_shard(scanner: Scanner, at: int, dim: int) -> Shard:
    """How a dim is split, in the words after the dim; an error points at the place where it begins."""
    with scanner.errors_at(at):
        rule: dict[str, Any] = {}
        if scanner.take("block"):
            rule["block"] = _read_number(scanner, "block", "the length of a block")
        elif scanner.take("owners"):
            rule["owners"] = RowOwners(_read_lengths(scanner, "owners"))
        elif scanner.take("groups"):
            scanner.expect("(", "after groups, as in groups(4,2,2)")
            groups = scanner.items(lambda: (scanner.integer("a length"), _read_each(scanner)), ")", "in groups")
            rule["groups"], rule["each"] = tuple(n for n, _ in groups), tuple(each for _, each in groups) or None
        elif scanner.take("sizes"):
            rule["sizes"] = _read_lengths(scanner, "sizes")
        elif scanner.peek("each"):
            rule["each"] = (_read_each(scanner),)
        if scanner.take("zigzag"):
            rule["zigzag"] = True
        if scanner.take("unit"):
            rule["unit"] = _read_number(scanner, "unit", "the length of a unit")
        return Shard(dim, **rule, addends=scanner.take("addends"))


def _read_each(scanner: Scanner) -> int:
    """How many ranks have each part of a group."""
    return scanner.integer("the number of ranks that have each part") if scanner.take("each") else 1


def _read_number(scanner: Scanner, word: str, what: str) -> int:
    scanner.expect("(", f"after {word}, as in {word}(16)")
    number = scanner.integer(what)
    scanner.expect(")", f"after {what}")
    return number


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


_LENGTHS = re.compile(r"\b(groups|sizes|block|unit)\s*\(([^)]*)\)")
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*:(.*)", re.DOTALL)
_RULES = re.compile(r"\s*(?:(?:on|as)\b|@)")
_TYPE = re.compile(r"\s*([A-Za-z_][\w.]*)?\s*\[")


def read_spec(
    text: str, mesh: Mesh | None, ranks: Sequence[int], dtype: str | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec | Layout:
    """What a text means wherever a layout is wanted: all that is printed is read back.

    1. A tensor, as it is printed ("f32[8,4] on tp=2: S(0)", "[8,4] on tp=2: S(0)"): a Layout. A dtype and a shape that
       the caller knows have to be those of the text.
    2. A rule ("on dp=2,tp=2: R, S(0)", "as chunk(0) over 0-3", "@ 2"): its spec.
    3. Placements on a mesh ("tp: S(0)", "R, S(0)"): a MeshSpec; without a mesh, one axis over all ranks.

    >>> read_spec("tp: S(0)", None, (0, 1)), read_spec("tp: S(0)", Mesh.of(dp=2, tp=2), ())
    (MeshSpec(tp=2, (Shard(0),)), MeshSpec(dp=2,tp=2, (Replicate(), Shard(0))))
    >>> read_spec("f32[3] as chunk(0) over 0-1", None, ()).local_shapes(1)
    ((1,),)
    >>> read_spec("f32[6,4] on tp=2: S(0)", None, (), "torch.float64", (8, 4))
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: the text says f32[6,4], and the tensor is f64[8,4]; leave out 'f32[6,4]': ...
    """
    if text.rstrip().endswith("…"):
        raise NotationError("this text was cut off where it was printed; format_layout writes the whole", text, 0)
    if _TYPE.match(text):
        return _read_typed(text, dtype, shape)
    if _RULES.match(text):
        return parse_spec(text)
    if not text.strip():
        raise LayoutError("a layout is wanted, and the text is empty; write 'R', 'tp: S(0)' or 'on dp=2,tp=2: R, S(0)'")
    if mesh is None:
        parts = _split_at_commas(text)
        if len(parts) > 1:
            raise LayoutError(f"{text!r} does not say how large its axes are; write 'on dp=2,tp=2: R, S(0)'")
        named = _NAMED.match(parts[0])
        mesh = Mesh((named[1] if named else "all",), tuple(ranks))
    return MeshSpec(mesh, read_placements(text, mesh))


def _read_typed(text: str, dtype: str | None, shape: Sequence[int] | None) -> Layout:
    """The layout of a text that begins with a type, checked against what is known of the tensor."""
    scanner = Scanner(text)
    found = _read_type(scanner, required=False)
    named, lengths = found.dtype, found.shape
    known = None if dtype is None else find_dtype(dtype).name
    if (shape is not None and tuple(shape) != lengths) or (named and known and named != known):
        own = f"{known or named}[{_join_numbers(lengths if shape is None else shape)}]"
        said, rest = f"{named}[{_join_numbers(lengths)}]", scanner.rest
        fix = f"leave out {text[: scanner.at].strip()!r}: {rest!r}" if rest else "name a mesh: 'on tp=2: S(0)'"
        raise LayoutError(f"the text says {said}, and the tensor is {own}; {fix}")
    return _read_layout(scanner, found)


def read_placements(
    text: str, mesh: Mesh, axis: str | None = None, lengths: Mapping[str, int] | None = None
) -> tuple[Placement, ...]:
    """What each axis of a mesh does, from a text in any of the three forms.

    >>> mesh = Mesh.of(dp=2, tp=4)
    >>> read_placements("tp: S(0) groups(q,kv,kv)", mesh, lengths={"q": 8, "kv": 4})
    (Replicate(), Shard(0, groups=(8, 4, 4)))
    >>> read_placements("S(1)", mesh, axis="tp"), read_placements("S(0), R", mesh)
    ((Replicate(), Shard(1)), (Shard(0), Replicate()))
    """
    found = read_by_axis(text, mesh, axis, lengths)
    return tuple(found.get(a, Replicate()) for a in mesh.axes)


def read_by_axis(
    text: str, mesh: Mesh, axis: str | None = None, lengths: Mapping[str, int] | None = None
) -> dict[str, Placement]:
    """What the axes do that a text is about, in any of the three forms.

    >>> read_by_axis("tp: S(0)", Mesh.of(dp=2, tp=4)), read_by_axis("R, S(0)", Mesh.of(dp=2, tp=4))
    ({'tp': Shard(0)}, {'dp': Replicate(), 'tp': Shard(0)})
    """
    parts = _split_at_commas(_substitute_lengths(text, lengths or {}))
    named = [_NAMED.match(part) for part in parts]
    if any(named):
        if not all(named):
            raise LayoutError(f"{text!r}: name the axis of every placement, as in 'dp: S(0), tp: S(1)', or of none")
        axes = [m[1] for m in named if m is not None]
        if len(set(axes)) < len(axes):
            twice = next(a for a in axes if axes.count(a) > 1)
            raise LayoutError(f"{text!r} gives the axis {twice!r} two placements; an axis has one")
        return _parse_by_axis({m[1]: m[2] for m in named if m is not None}, mesh, text)
    if len(parts) == 1 and mesh.ndim != 1:
        if axis is None:
            raise LayoutError(
                f"{text!r} does not say which axis of {mesh} it is for; write 'axis: {text}', set the plan's axis, "
                f"or write {mesh.ndim} placements"
            )
        return _parse_by_axis({axis: parts[0]}, mesh, text)
    if len(parts) != mesh.ndim:
        raise LayoutError(
            f"{text!r} has {count_of(len(parts), 'placement')}; the mesh {mesh} has "
            f"{count_of(mesh.ndim, 'axis', 'axes')}"
        )
    return {a: parse_placements(part)[0] for a, part in zip(mesh.axes, parts, strict=True)}


def _parse_by_axis(texts: Mapping[str, str], mesh: Mesh, text: str) -> dict[str, Placement]:
    unknown = sorted(set(texts) - set(mesh.axes))
    if unknown:
        raise LayoutError(f"{text!r} names the axis {unknown[0]!r}; the mesh has {', '.join(mesh.axes)}")
    return {a: parse_placements(texts[a])[0] for a in mesh.axes if a in texts}


def _substitute_lengths(text: str, lengths: Mapping[str, int]) -> str:
    """The text with names of lengths replaced by the lengths."""

    def number(word: str) -> str:
        word, _, copies = word.strip().partition(" ")
        if copies:
            return f"{number(word)} {copies}"
        if not word.isidentifier():
            return word
        if word not in lengths:
            known = ", ".join(lengths) or "none"
            raise LayoutError(f"{text!r} names the length {word!r}; the plan's lengths are: {known}")
        return str(lengths[word])

    return _LENGTHS.sub(lambda m: f"{m[1]}({','.join(map(number, m[2].split(',')))})", text)


def _split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets.

    >>> _split_at_commas("S(0) groups(4,2), R")
    ['S(0) groups(4,2)', ' R']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
