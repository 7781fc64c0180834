"""Do the drawings show every tile where it is, in a bounded space, on any terminal?"""

import io
import re
import textwrap
from pathlib import Path

import pytest

import shardwise
from shardwise.geometry import parse_layout
from shardwise.view import (
    PALETTE,
    RAMP,
    Limits,
    TextRun,
    Tile,
    colour_of,
    draw_layout,
    draw_ranks,
    label,
    line,
    picture_of,
    plain_text,
    print_lines,
    rank_colour,
    replace_unencodable,
)

DRAWINGS = {
    "f32[10] on tp=4: S(0)": """
        dim 0 (10) across
                3           3           3       1
          ┌───────────┬───────────┬───────────┬────┐
          │     0     │     1     │     2     │ 3  │
          └───────────┴───────────┴───────────┴────┘
        """,
    "f32[8,6] on dp=2,tp=2: R, S(0) sizes(7,1)": """
        dim 0 (8) down, dim 1 (6) across
                 6
           ┌───────────┐
           │           │
         7 │    0,2    │
           │           │
           ├───────────┤
         1 │    1,3    │
           └───────────┘
        """,
    "f32[4,4] as pieces 0[0:3,0:1], 1[0:1,1:4], 2[1:4,3:4], 3[3:4,0:3], 4,5[1:3,1:3]": """
        dim 0 (4) down, dim 1 (4) across
              1         2        1
           ┌──────┬──────────────────┐
         1 │      │        1         │
           │      │                  │
           │  0   ├───────────┬──────┤
           │      │           │      │
         2 │      │    4-5    │      │
           │      │           │  2   │
           ├──────┴───────────┤      │
         1 │        3         │      │
           │                  │      │
           └──────────────────┴──────┘
        """,
    "f32[] on tp=2: P": """
        one element, no dims
          ┌───────────┐
          │    0+1    │
          └───────────┘
        pending: sum; 0+1 in a tile: rank 0 and rank 1 each hold an addend
        """,
    "f32[1,7] on tp=2: S(1)": """
        dim 0 (1) down, dim 1 (7) across
                 4         3
           ┌───────────┬────────┐
           │           │        │
         1 │     0     │   1    │
           │           │        │
           └───────────┴────────┘
        """,
    "f32[4,2,2] on a=2: S(0)": """
        dim 1 (2) down, dim 2 (2) across
        [0:2, :, :]
                 2
           ┌───────────┐
           │           │
         2 │     0     │
           │           │
           └───────────┘
        [2:4, :, :]
                 2
           ┌───────────┐
           │           │
         2 │     1     │
           │           │
           └───────────┘
        """,
    "f32[2] on tp=3: S(0)": """
        dim 0 (2) across
                1           1
          ┌───────────┬───────────┐
          │     0     │     1     │
          └───────────┴───────────┘
        empty: rank 2 [2:2]
        """,
    "f32[0,8] on tp=2: S(1)": """
        no elements
        empty: rank 0 [0:0, 0:4], rank 1 [0:0, 4:8]
        """,
    "f32[24,1] on tp=2: S(0) groups(16,4,4)": """
        dim 0 (24) down, dim 1 (1) across
                 1
           ┌───────────┐
         8 │     0     │
           ├───────────┤
         8 │     1     │
           ├───────────┤
         2 │     0     │
           ├───────────┤
         2 │     1     │
           ├───────────┤
         2 │     0     │
           ├───────────┤
         2 │     1     │
           └───────────┘
        """,
}


@pytest.mark.parametrize("text", DRAWINGS)
def test_drawing(text: str) -> None:
    drawn = plain_text(draw_layout(parse_layout(text).layout))
    assert drawn.splitlines() == textwrap.dedent(DRAWINGS[text]).strip("\n").rstrip().splitlines()


def test_model_keeps_addends_and_replicas_apart() -> None:
    [panel] = picture_of(parse_layout("f32[4] on a=2,b=2: P, R").layout).panels
    assert panel.tiles == (Tile((0, 1), (0, 1), ((0, 1), (2, 3))),)


def test_model_is_cut_to_its_limits() -> None:
    picture = picture_of(parse_layout("f32[9,9,9] on a=9,b=9,c=9: S(0), S(1), S(2)").layout, Limits(2, 3, 4))
    assert (len(picture.panels), picture.hidden_panels) == (2, 7)
    panel = picture.panels[1]
    assert (panel.slice_of, panel.row_sizes, panel.column_sizes) == (((1, 2),), (1,) * 3, (1,) * 4)
    assert (panel.hidden_rows, panel.hidden_columns, len(panel.tiles)) == (6, 5, 12)
    assert panel.tiles[0].holders == ((81,),)


def test_tile_that_reaches_past_the_limit_is_clipped() -> None:
    layout = parse_layout("f32[4,9] as pieces 9[0:1,0:9], 0[1:4,0:3], 1[1:4,3:6], 2[1:4,6:9]").layout
    [panel] = picture_of(layout, Limits(columns=2)).panels
    assert [t.columns for t in panel.tiles] == [(0, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize(
    "text",
    [
        "f32[65536,65536] on dp=128,tp=128: S(0), S(1)",
        "f32[65536,65536] on dp=128,tp=128: R, S(1)",
        "f32[64,64] on a=4096,b=4: P, S(0)",
        "f32[100,100,100] on a=16,b=16,c=64: S(0), S(1), S(2)",
        "f32[99] on a=16384: S(0)",
        "f32[16384] as chunk(0) over 0-16383",
    ],
)
def test_drawing_of_16384_ranks_is_bounded(text: str, width: int) -> None:
    tensor = parse_layout(text)
    lines = plain_text([*draw_layout(tensor.layout, width), *draw_ranks(tensor)]).splitlines()
    assert len(lines) < 220
    drawn = [row for row in lines if "│" in row or "─" in row]
    assert max(map(len, drawn)) <= width


def test_labels_are_cut_between_ranks() -> None:
    assert label(((0, 128, 256),), 8) == "0,128,…"
    assert label(((10,), (20,), (30,)), 7) == "10+20+…"
    assert label(((1000000,),), 4) == "…"


def test_ranks_in_the_middle_are_left_out() -> None:
    lines = plain_text(draw_ranks(parse_layout("f32[40] on tp=20: S(0)"))).splitlines()
    assert lines[0] == "rank  local tensors  elements  bytes"
    assert lines[10:13] == [
        "   9           (2,)         2    8 B",
        "   …  6 more ranks",
        "  16           (2,)         2    8 B",
    ]
    assert len(lines) == 1 + 10 + 1 + 4 + 1
    assert lines[-1] == "the tensor has 160 B; 20 ranks hold 160 B, 8 B each"


def test_many_local_tensors_are_counted() -> None:
    lines = plain_text(draw_ranks(parse_layout("f32[64] as chunk(0) over 0,0,0,0,0,0,0,0,0,0,0,0"))).splitlines()
    assert "12 tensors, the first (6,)" in lines[1]
    assert plain_text(draw_ranks(parse_layout("f32[0] as pieces none"))).splitlines()[1:] == [
        "the tensor has 0 B; no rank holds a piece"
    ]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    stream = Terminal()
    print_lines([(TextRun("a", rank=1), TextRun("b"))], stream)
    red, green, blue = (int(PALETTE[1][i : i + 2], 16) for i in (1, 3, 5))
    assert stream.getvalue() == f"\x1b[30;48;2;{red};{green};{blue}ma\x1b[0mb\n"
    assert colour_of(1) == colour_of(1 + len(PALETTE))


def test_colours_are_those_of_the_page() -> None:
    colours = (Path(shardwise.__file__).parent / "page" / "front" / "parts" / "colours.js").read_text()
    assert re.findall(r"#[0-9a-f]{6}", colours.partition("NAMED = ")[2].partition(";")[0]) == list(PALETTE)
    rows = colours.partition("RAMP = ")[2].partition("\n];")[0]
    ramp = [tuple(map(int, row)) for row in re.findall(r"\[(\d+), (\d+), (\d+)\]", rows)]
    assert [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in ramp] == list(RAMP)
    assert rank_colour(3, 8) == PALETTE[3] and rank_colour(0, 9) == RAMP[0] and rank_colour(8, 9) == RAMP[-1]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    stream = Terminal()
    print_lines([(TextRun("a", rank=1), TextRun("│"))], stream)
    assert stream.getvalue() == "a│\n"


def test_a_poor_encoding_gets_ascii() -> None:
    assert replace_unencodable("┌─┐│…é", "ascii") == "+-+|~?"
    assert replace_unencodable("┌─┐", "utf-8") == "┌─┐"
    assert plain_text([line("x ")]) == "x"
