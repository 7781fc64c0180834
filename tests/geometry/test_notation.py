"""Is every layout written so that it reads back the same, and does every mistake point at its character?"""

import itertools
import re
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    NotationError,
    Partial,
    Piece,
    Placement,
    Reduction,
    Replicate,
    Shard,
    ShardingSpec,
)
from shardwise.geometry.layout import Cells, PieceTable
from shardwise.geometry.notation import (
    DTYPES,
    DType,
    TensorType,
    find_dtype,
    format_layout,
    format_placement,
    format_rule,
    parse_layout,
    parse_placements,
    parse_ranks,
    parse_spec,
    read_spec,
    shorten_layout,
)
from shardwise.testing.strategies import layouts as any_layouts

# Texts that print exactly as they are written.
CANONICAL = [
    "f32[4096,1024] on tp=4: S(0)",
    "f32[4096,1024] on dp=2,tp=4: R, S(1)",
    "bf16[4096,1024] on tp=4 @ 4-7: S(-1)",
    "f32[8] on dp=2,tp=2 @ 0,2,1,3: S(0), R",
    "f32[9,2] on tp=4: S(0) sizes(3,0,5,1)",
    "f32[6144,8] on tp=4: S(0) groups(4096,1024,1024)",
    "f32[0] on tp=2: S(0) groups()",
    "i64[100] on tp=4: S(0) block(16)",
    "f32[8] on a=2,b=2,c=2: P(sum), P(avg), R",
    "f32[8] on tp=4: P(max)",
    "f32[64] on dp=2,tp=4: S(0), S(0) split tp>dp",
    "f32[64] on dp=2,tp=4: S(0), S(-1) split tp>dp",
    "f32[64,8] on a=2,b=2,c=2,d=2: S(1), S(1), S(0), S(0) split d>c",
    "f32[10,4] as chunk(0) over 0-3",
    "f32[10,4] as chunk(-1) over 3,0,0-1",
    "f32[8,4] as grid(4+4, 2+2) over 0-3",
    "f32[8,4] as grid(/2, 1+0+3) over 5,4,3,2,1,0",
    "f32[8,4] as grid(/2, 4) over 0,2,1,3 each 2",
    "f32[4,4] as pieces 0[0:2,0:4], 1[2:4,0:4]",
    "f32[4,4] as pieces 0,2[0:2,0:4], 1[2:4,0:4], 1[4:4,0:4]",
    "f32[0,3] as pieces none",
    "f32[] on tp=4: R",
    "f32[] on tp=4: P(product)",
    "f32[] as grid() over 0-1 each 2",
    "f32[] as pieces 3[]",
    "f32[4,4]",
    "f32[4,4] @ 3",
]


@pytest.mark.parametrize("text", CANONICAL)
def test_text_prints_as_written(text: str) -> None:
    assert str(parse_layout(text)) == text


@pytest.mark.parametrize(
    ("loose", "tight"),
    [
        ("  float32 [ 8 , 4 ] on  tp = 4 :S( 0 )", "f32[8,4] on tp=4: S(0)"),
        ("bfloat16[8] on tp=2:P", "bf16[8] on tp=2: P(sum)"),
        ("f32[8] on dp=2,tp=2: S(0), S(0) split dp>tp", "f32[8] on dp=2,tp=2: S(0), S(0)"),
        ("f32[8] on dp=2,tp=2: S(0), S(0) split tp", "f32[8] on dp=2,tp=2: S(0), S(0) split tp>dp"),
        ("f32[8] on tp=4 @ 0,1,2-3: S(0)", "f32[8] on tp=4: S(0)"),
        ("f32[4]\n@ 0", "f32[4]"),
        ("f32[8,2] on tp=2: S( -1 )block(1)", "f32[8,2] on tp=2: S(-1) block(1)"),
        ("f32[4] on on=2,S=2: R, S(0)", "f32[4] on on=2,S=2: R, S(0)"),
    ],
)
def test_loose_text_is_tidied(loose: str, tight: str) -> None:
    assert str(parse_layout(loose)) == tight


MISTAKES = [
    ("", 0, "expected a dtype and a shape such as f32[8,4]; the text ends here"),
    ("on tp=4: S(0)", 0, "expected a dtype and a shape such as f32[8,4]; found 'on'; write f32[8,4] on tp=4: S(0)"),
    ("tp=4: S(0)", 0, "expected a dtype and a shape such as f32[8,4]; found 'tp'; write f32[8,4] on tp=4: S(0)"),
    ("f33[4] on tp=4: S(0)", 0, "unknown dtype 'f33'; did you mean f32?"),
    ("q[4]", 0, "unknown dtype 'q'; known: f64, f32,"),
    ("f32", 3, "expected '[' after the dtype; the text ends here"),
    ("f32[8,4 on tp=4: S(0)", 8, "expected ',' or ']' in the shape; found 'on'"),
    ("f32[8,-4]", 6, "expected a length, an integer; found '-'"),
    ("f32[99999999999999999999]", 4, "a length does not fit in 64 bits"),
    ("f32[8] over 0-3", 7, "expected 'on' (a mesh), 'as' (chunk, grid or pieces) or '@' (one rank); found 'over'"),
    ("f32[8] @", 8, "expected a rank, an integer; the text ends here"),
    ("f32[8] on 4: S(0)", 10, "expected the name of a mesh axis such as tp=4; found '4'"),
    ("f32[8] on tp4: S(0)", 13, "expected '=' after axis 'tp4'; found ':'"),
    ("f32[8] on tp=0: S(0)", 13, "axis 'tp' needs at least one rank, got 0"),
    ("f32[8] on tp=2,tp=2: S(0), R", 15, "axis 'tp' appears twice"),
    ("f32[8] on tp=99999999: S(0)", 10, "the mesh has 99999999 ranks; the notation takes up to 1048576"),
    ("f32[8] on tp=4 S(0)", 15, "expected ':' after the mesh, then a placement for each axis; found 'S'"),
    ("f32[8] on tp=4 @ 0-2: S(0)", 15, "the mesh has 4 places and 3 ranks are listed; list 4"),
    ("f32[8] on tp=4 @ 0,1,1,2: S(0)", 15, "rank 1 appears 2 times in the mesh"),
    ("f32[8] on tp=4 @ 3-0: S(0)", 17, "a run of ranks must ascend, got 3-0"),
    ("f32[8] as chunk(0) over 0-99999999", 24, "more than 1048576 ranks"),
    (
        "f32[8] on tp=4: T(0)",
        16,
        "expected S(dim), R or P for axis 'tp' (for Shard(dim), Replicate(), Partial()); found 'T'",
    ),
    ("f32[8] on tp=4: S 0", 18, "expected '(' after S, as in S(0); found '0'"),
    ("f32[8] on tp=4: S(0", 19, "expected ')' after the dim; the text ends here"),
    ("f32[8] on dp=2,tp=4: S(0)", 25, "expected ',' and a placement for axis 'tp' (the mesh needs 2 placements"),
    ("f32[8] on tp=4: S(0), R", 20, "expected no more placements: the mesh has only the axes tp"),
    ("f32[8] on tp=4: S(1)", 16, "dim 1: a tensor of shape (8,) has a dim from -1 to 0"),
    ("f32[] on dp=2,tp=2: R, S(0)", 23, "dim 0: a tensor of shape () has no dim"),
    ("f32[8] on tp=4: P(mean)", 18, "expected a reduction, one of sum, avg, min, max, product; found 'mean'"),
    ("f32[8] on dp=2,tp=2: P(sum), P(max)", 21, "axes with pending max and sum have no defined order"),
    ("f32[8] on tp=2: S(0) sizes(3,4)", 16, "dim 0 of length 8 is split into sizes (3, 4) over axis 'tp' of 2 ranks"),
    ("f32[8] on tp=2: S(0) sizes(3,4", 30, "expected ',' or ')' in sizes; the text ends here"),
    ("f32[8] on tp=2: S(0) block(0)", 16, "a block has at least one row"),
    ("f32[8] on dp=2,tp=2: S(0), S(0) split x>dp", 38, "no axis 'x'; this mesh has 'dp', 'tp'"),
    ("f32[8] on dp=2,tp=2: S(0), S(0) split dp>dp", 41, "axis 'dp' appears twice in the split order"),
    ("f32[8] on tp=2: S(0) S(1)", 21, "expected nothing more after the layout; found 'S'"),
    ("f32[8] as chunks(0) over 0-3", 10, "expected chunk, grid or pieces after 'as'; found 'chunks'"),
    ("f32[8] as chunk(1) over 0-3", 16, "dim 1: a tensor of shape (8,) has a dim from -1 to 0"),
    ("f32[8] as chunk(0) on 0-3", 19, "expected 'over' and the ranks, as in chunk(0) over 0-3; found 'on'"),
    ("f32[8] as grid(4+4) over 0-2", 25, "the grid has 2 cells; 3 ranks are given"),
    ("f32[8] as grid(4+4) over 0-2 each 2", 25, "the grid has 2 cells, each on 2 ranks; 3 ranks are given"),
    ("f32[8] as grid(4+4) over 0-1 each 0", 25, "each cell needs at least one rank"),
    ("f32[8] as grid(/0) over 0", 16, "a dim is split into at least one chunk, got 0"),
    ("f32[8] as grid(4+3) over 0-1", 10, "dim 0 of length 8 is split into sizes (4, 3), which must sum to 8"),
    ("f32[8] as grid(4+4) over 0,0 each 2", 25, "the grid has 2 cells, each on 2 ranks; 2 ranks"),
    ("f32[8] as pieces 0[0:4], 1[3:8]", 10, "overlap in [3:4]: [0:4] on rank 0 and [3:8] on rank 1"),
    ("f32[8] as pieces 0[0:4], 1[5:8]", 10, "no piece covers [4:5]"),
    ("f32[8] as pieces 0[4:0]", 19, "a box starts before it stops, got 4:0"),
    ("f32[8] as pieces 0(0:4)", 18, "expected '[' and a box after the ranks, as in 0[0:2,0:4]; found '('"),
    ("f32[8] as pieces 0[0-4]", 20, "expected ':' between start and stop; found '-'"),
]


@pytest.mark.parametrize(("text", "position", "message"), MISTAKES)
def test_mistake_points_at_its_character(text: str, position: int, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_layout(text)
    shown, line, pointer = str(caught.value).split("\n")
    assert message in shown
    assert (line, pointer) == (f"  {text}", "  " + " " * position + "^")
    assert caught.value.position == position


def test_rule_alone_takes_type_and_shape_of_another() -> None:
    like = parse_layout("bf16[8,4] on tp=2: S(0)")
    assert str(parse_layout("on tp=4: S(1)", like=like)) == "bf16[8,4] on tp=4: S(1)"
    assert str(parse_layout("as chunk(1) over 3,1", like=like)) == "bf16[8,4] as chunk(1) over 3,1"
    assert str(parse_layout("@ 5", like=like)) == "bf16[8,4] @ 5"
    assert str(parse_layout("f32[2]", like=like)) == "f32[2]"
    for text, message in [("", "expected a dtype"), ("on", "the name of a mesh axis"), ("as", "expected chunk, grid")]:
        with pytest.raises(NotationError, match=message):
            parse_layout(text, like=like)


def test_parts_of_the_notation() -> None:
    assert parse_spec("on dp=2: S(0) sizes(3,1)") == MeshSpec(Mesh.of(dp=2), (Shard(0, (3, 1)),))
    assert parse_placements("P, P(max), R, S(-2) groups(4,2)") == (
        Partial(),
        Partial("max"),
        Replicate(),
        Shard(-2, groups=(4, 2)),
    )
    assert parse_ranks("3, 0-2,7") == (3, 0, 1, 2, 7)
    with pytest.raises(NotationError, match="expected nothing more after the last placement; found 'S'"):
        parse_placements("R S(0)")
    with pytest.raises(NotationError, match="expected nothing more after the last rank; found '-'"):
        parse_ranks("0-1-2")


def test_single_rank_has_the_plainest_spec() -> None:
    assert parse_layout("f32[4,4]").layout.pieces == (Piece(Box((0, 0), (4, 4)), 0),)
    assert parse_layout("f32[4,4]").layout == ChunkSpec(0, 1).layout((4, 4))


def test_dtypes_have_one_name_each() -> None:
    names = [d.name for d in DTYPES] + [d.torch_name for d in DTYPES if d.torch_name != "bool"]
    assert len(set(names)) == len(names)
    assert [find_dtype(d.torch_name) for d in DTYPES] == list(DTYPES)
    assert all(str(parse_layout(f"{d}[3]")) == f"{d}[3]" for d in DTYPES)
    assert TensorType("torch.float16", ChunkSpec(0, 1).layout((2,))).dtype == "f16"


class Diagonal(ShardingSpec):
    """A user's own spec: row r on rank r, last row first."""

    def pieces(self, shape: Sequence[int]) -> list[Piece]:
        return [Piece(Box((r,), (1,)), r) for r in reversed(range(shape[0]))]


class Shifted(ChunkSpec):
    """A user's subclass that means something else than its base."""

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        return ChunkSpec(self.dim, self.ranks[1:] + self.ranks[:1]).resolve(shape)


class Named(MeshSpec):
    """A user's subclass that means the same as its base."""


class Pending(Diagonal):
    def reduction(self) -> Reduction:
        return Reduction("sum")


def test_users_specs_are_written_as_what_they_mean() -> None:
    assert format_layout(Diagonal().layout((3,))) == "f32[3] as pieces 2[2:3], 1[1:2], 0[0:1]"
    assert format_layout(Shifted(0, 2).layout((4,))) == "f32[4] as pieces 1[0:2], 0[2:4]"
    assert format_layout(Named(Mesh.of(tp=2), (Partial(),)).layout((4,))) == "f32[4] on tp=2: P(sum)"
    with pytest.raises(LayoutError, match="leaves a sum pending, which a list of pieces cannot express"):
        format_layout(Pending().layout((3,)))


# Round trip: random layouts of every built-in spec.

lengths = st.integers(0, 7)
shapes = st.lists(lengths, min_size=1, max_size=3).map(tuple)


def parts_of(length: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths, zeros included, that add up to a length."""
    cuts = st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1).map(sorted)
    return cuts.map(lambda c: tuple(b - a for a, b in itertools.pairwise([0, *c, length])))


@st.composite
def shards(draw: st.DrawFn, shape: tuple[int, ...], ranks: int, plain: bool) -> Shard:
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    kind = "plain" if plain else draw(st.sampled_from(["plain", "sizes", "groups", "block"]))
    if kind == "sizes":
        return Shard(dim, sizes=draw(parts_of(shape[dim], ranks)))
    if kind == "groups":
        return Shard(dim, groups=draw(parts_of(shape[dim], draw(st.integers(1, 3)))))
    return Shard(dim, block=draw(st.integers(1, 4))) if kind == "block" else Shard(dim)


@st.composite
def mesh_layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes)
    sizes = draw(st.lists(st.integers(1, 3), max_size=3))
    count = int(np.prod(sizes, dtype=np.int64))
    ranks = draw(st.permutations(range(count))) if draw(st.booleans()) else range(draw(st.integers(0, 2)), 99)
    axes = draw(st.permutations(["dp", "tp", "pp"]))[: len(sizes)]
    op = draw(st.sampled_from(["sum", "avg", "max"]))
    others = st.sampled_from([Replicate(), Partial(op)])
    placements: list[Placement] = []
    for size in sizes:
        taken = any(isinstance(p, Shard) for p in placements)
        placements.append(draw(st.one_of(others, shards(shape, size, plain=taken))))
    first = [isinstance(p, Shard) and p.sizes is not None for p in placements]
    order = sorted(draw(st.permutations(axes)), key=lambda a: not first[axes.index(a)])
    return MeshSpec(Mesh(axes, np.reshape(list(ranks)[:count], sizes)), placements, order).layout(shape)


@st.composite
def chunk_layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes)
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    return ChunkSpec(draw(st.integers(-len(shape), len(shape) - 1)), ranks, ["cpu"] * len(ranks)).layout(shape)


@st.composite
def grid_layouts(draw: st.DrawFn) -> Layout:
    shape = draw(st.lists(lengths, max_size=3).map(tuple))
    counts = [draw(st.integers(1, 3)) for _ in shape]
    splits = [draw(st.one_of(st.just(c), parts_of(n, c))) for n, c in zip(shape, counts, strict=True)]
    copies = draw(st.integers(1, 2))
    cells = int(np.prod(counts, dtype=np.int64))
    ranks = [draw(st.permutations(range(4)))[:copies] for _ in range(cells)]
    return GridSpec(splits, np.reshape(ranks, (*counts, copies))).layout(shape)


@st.composite
def enumerable_layouts(draw: st.DrawFn) -> Layout:
    grid = draw(grid_layouts())
    pieces = draw(st.permutations(grid.pieces))
    return EnumerableSpec(pieces, replicated=True).layout(grid.shape)


layouts = st.one_of(mesh_layouts(), chunk_layouts(), grid_layouts(), enumerable_layouts())


@given(layouts, st.sampled_from(DTYPES))
@example(EnumerableSpec([]).layout((0, 2)), DTYPES[0])
def test_every_layout_reads_back_the_same(layout: Layout, dtype: object) -> None:
    text = format_layout(layout, str(dtype))
    read = parse_layout(text)
    assert read.layout == layout
    assert read.dtype == str(dtype)
    assert str(read) == text


TOKENS = ["f32", "[", "4", "]", "on", "as", "tp", "=", ":", "S", "(", "0", ")", "R", ",", "-", "@", "chunk", "grid"]


@given(st.text(max_size=20) | st.lists(st.sampled_from(TOKENS), max_size=20).map(" ".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        tensor = parse_layout(text)
    except NotationError as error:
        assert 0 <= error.position <= len(text)
    else:
        assert parse_layout(str(tensor)) == tensor


def test_placements_print_as_they_are_read() -> None:
    text = "S(0) sizes(1,2), S(1) groups(), S(-1) block(3), S(2), R, P(sum), P(min)"
    assert ", ".join(map(format_placement, parse_placements(text))) == text


LONG_TEXTS = [
    "f32[8] " + "x" * 1_000_000,
    "a" * 1_000_000 + "[4]",
    "f32[" + "1," * 300_000 + "1]",
    "f32[4] on " + ",".join(f"a{i}=1" for i in range(100_000)) + ": R",
    "(" * 1_000_000,
]


@pytest.mark.parametrize("text", LONG_TEXTS, ids=[text[:12] for text in LONG_TEXTS])
def test_a_text_of_a_megabyte_is_refused_soon(text: str) -> None:
    started = time.process_time()
    with pytest.raises(LayoutError):
        parse_layout(text)
    assert time.process_time() - started < 5


def test_dims_and_axes_that_no_array_has() -> None:
    with pytest.raises(LayoutError, match="a tensor of 60 dims on a mesh with 4 axes that do not shard it"):
        parse_layout(f"f32[{','.join('1' * 60)}] on a=1,b=1,c=1,d=1: R, R, R, R")


@given(any_layouts(pending=True), st.sampled_from(DTYPES))
def test_all_that_is_printed_is_read_where_a_layout_is_wanted(layout: Layout, dtype: DType) -> None:
    typed = TensorType(dtype.name, layout)
    printed = [str(typed), f"{dtype.torch_name}{str(typed)[len(dtype.name) :]}", format_layout(layout, None)]
    printed += [f"torch.{dtype.torch_name}{format_layout(layout, None)}", f"  {typed}\n"]
    short = shorten_layout(layout, dtype.name)
    printed += [] if short.endswith("…") else [short]
    for text in printed:
        assert read_spec(text, None, ()) == layout
        assert read_spec(text, Mesh.of(other=3), (7, 8, 9), f"torch.{dtype.torch_name}", layout.shape) == layout
        assert parse_layout(text, like=typed) == typed
    if rule := format_rule(layout):
        assert read_spec(rule, None, ()).layout(layout.shape) == layout  # type: ignore[union-attr]  # a spec


MISFITS = [
    (
        ("f32[6,4] on tp=2: S(0)", "float64", (6, 4)),
        "the text says f32[6,4], and the tensor is f64[6,4]; leave out 'f32",
    ),
    (("f32[6,4] on tp=2: S(0)", "f32", (8, 4)), "the text says f32[6,4], and the tensor is f32[8,4]; leave out"),
    (("[6,4] on tp=2: S(0)", "f32", (8, 4)), "the text says [6,4], and the tensor is f32[8,4]; leave out '[6,4]'"),
    (("f32[6,4]", "f32", (4, 6)), "the text says f32[6,4], and the tensor is f32[4,6]; name a mesh"),
    (("f33[6,4] on tp=2: S(0)", None, None), "unknown dtype 'f33'; did you mean f32"),
    (("f32[6,4] on tp=2: S(2)", None, None), "a tensor of shape (6, 4) has a dim from -2 to 1"),
    (("f32[6,4] on tp=2: S(0)…", None, None), "this text was cut off where it was printed"),
    (("  ", None, None), "a layout is wanted, and the text is empty; write 'R'"),
]


@pytest.mark.parametrize(("asked", "message"), MISFITS)
def test_a_printed_tensor_has_to_be_like_the_one_it_is_for(
    asked: tuple[str, str | None, tuple[int, ...] | None], message: str
) -> None:
    text, dtype, shape = asked
    with pytest.raises(LayoutError, match=re.escape(message)):
        read_spec(text, Mesh.of(tp=2), (0, 1), dtype, shape)


# As types.


@given(layout=any_layouts(ranks=4) | any_layouts(ranks=4, pending=True, kinds=["mesh"]))
def test_what_is_printed_as_a_type_is_read_back(layout: Layout) -> None:
    text = format_layout(layout, "bf16", style="types")
    assert parse_layout(text).layout == layout and parse_layout(text).dtype == "bf16"
    assert read_spec(format_layout(layout, None, style="types"), None, ()) == layout


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("f32[8,4] on dp=2,tp=2: S(0), S(1)", "f32[8@dp, 4@tp] on dp=2,tp=2"),
        ("f32[8,4] on dp=2,tp=2: S(1), S(1) split tp>dp", "f32[8, 4@(tp, dp)] on dp=2,tp=2"),
        ("f32[8,4] on dp=2,tp=2: R, S(-1)", "f32[8, 4@tp] on dp=2,tp=2"),
        ("f32[8] on dp=2,tp=2: P(sum), P(avg)", "f32[8]{P(sum): dp, P(avg): tp} on dp=2,tp=2"),
        ("f32[6] on dp=2,tp=2 @ 3,1,0,2: S(0) sizes(4,2), R", "f32[6@dp sizes(4,2)] on dp=2,tp=2 @ 3,1,0,2"),
        (
            "f32[48,2] on dp=2,tp=4: P(sum), S(0) groups(32,8 each 2,8 each 2) unit(4)",
            "f32[48@tp groups(32,8 each 2,8 each 2) unit(4), 2]{P(sum): dp} on dp=2,tp=4",
        ),
        ("f32[8,4] on dp=2,tp=2: R, R", "f32[8,4] on dp=2,tp=2: R, R"),
        ("f32[8] as chunk(0) over 2,0", "f32[8] as chunk(0) over 2,0"),
    ],
)
def test_types(text: str, types: str) -> None:
    layout = parse_layout(text).layout
    assert format_layout(layout, style="types") == types and parse_layout(types).layout == layout
    assert parse_layout(types[3:], like=parse_layout("f32[1]")).layout == layout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f32[8@dp, 4@tp]", "expected 'on' and the mesh, as in f32[8@dp, 4@tp] on dp=2,tp=2; the text ends here"),
        ("f32[8@x] on tp=2", "no axis 'x'; this mesh has 'tp'"),
        ("f32[8@tp, 4@tp] on tp=2", "axis 'tp' appears twice; an axis does one thing"),
        ("f32[8@tp] on tp=2: S(0)", "expected nothing more after the mesh: the type says what its axes do; found ':'"),
        ("f32[8@] on tp=2", "expected an axis of the mesh, as in 8@tp; found ']'"),
        ("f32[8@(tp] on tp=2", "expected ',' or ')' among the axes; found ']'"),
        ("f32[8]{S(0): tp} on tp=2", "expected 'P' as in {P(sum): tp}; found 'S'"),
        ("f32[8@tp sizes(1,2)] on tp=2", "dim 0 of length 8 is split into sizes (1, 2) over axis 'tp' of 2 ranks"),
    ],
)
def test_mistakes_in_types(text: str, said: str) -> None:
    with pytest.raises(NotationError, match=re.escape(said)):
        parse_layout(text)
