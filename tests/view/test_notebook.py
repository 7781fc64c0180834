"""Do values have small pictures in notebooks, and in the terminal at any width?"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Box, ChunkSpec, Comm, EnumerableSpec, Layout, Mesh, ModelPlan, Piece, describe_plan, run_local
from shardwise.geometry import parse_layout, shorten_layout
from shardwise.view import MOST_ROWS, table_html


def parse(html: str) -> ElementTree.Element:
    """The picture as a tree: it is well-formed, has no script, and asks the network for nothing."""
    root = ElementTree.fromstring(html)
    assert not list(root.iter("script"))
    for element in root.iter():
        assert not {"href", "src", "onload", "onclick"} & set(element.attrib)
    return root


def texts(root: ElementTree.Element, kind: str) -> list[str]:
    return ["".join(e.itertext()) for e in root.iter() if e.tag.rpartition("}")[2] == kind]


def boxes(root: ElementTree.Element) -> list[dict[str, str]]:
    return [e.attrib for e in root.iter() if e.tag.rpartition("}")[2] == "rect"]


def test_a_layout_is_drawn_to_scale() -> None:
    root = parse(parse_layout("f32[6,4] on tp=2: S(0) sizes(4,2)").layout._repr_html_())
    assert texts(root, "code") == ["[6,4] on tp=2: S(0) sizes(4,2)"]
    first, second = boxes(root)
    assert float(first["height"]) == pytest.approx(2 * float(second["height"]))
    assert {"0", "1", "4", "2"} <= set(texts(root, "text"))
    assert all(e["stroke"] == "currentColor" for e in (first, second)), "seen on light and dark pages"


@pytest.mark.parametrize(
    "notation",
    ("f32[] on tp=2: R", "f32[8] on tp=2: P", "f32[2,3,4,5] on a=2,b=2: S(0), S(2)", "bf16[0,4] on tp=2: S(0)"),
)
def test_every_layout_has_a_picture(notation: str) -> None:
    root = parse(parse_layout(notation)._repr_html_())
    assert texts(root, "code") == [notation.replace("P", "P(sum)")]


def test_very_many_ranks_make_a_small_picture() -> None:
    assert len(parse_layout("f32[65536,65536] on dp=128,tp=128: S(0), S(1)").layout._repr_html_()) < 100_000


def test_a_transfer_is_a_matrix() -> None:
    src, dst = (ChunkSpec(dim, 2).layout((4, 4)) for dim in (0, 1))
    root = parse(shardwise.plan_transfer(src, dst, itemsize=4)._repr_html_())
    assert "rank 0 sends 16 B to rank 1" in texts(root, "title")
    assert any("moves 32 B (lower bound 32 B)" in text for text in texts(root, "div"))


def test_a_tensor_shows_its_layout() -> None:
    def body(comm: Comm) -> str:
        return str(shardwise.ones(ChunkSpec(0, 2), 4, 2)._repr_html_())

    assert texts(parse(run_local(body, 2)[0]), "code") == ["f32[4,2] as chunk(0) over 0-1"]


def test_a_plan_and_a_checkpoint_are_tables(tmp_path: Path) -> None:
    plan = ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"})
    cells = texts(parse(describe_plan(plan, nn.Linear(4, 8))._repr_html_()), "td")
    assert {"weight", "8x4", "S(0)"} <= set(cells)
    hostile = "<script>alert('w')</script>"
    shardwise.save({hostile: torch.ones(3), "b": torch.ones(2)}, tmp_path / "c")
    with shardwise.open(tmp_path / "c") as checkpoint:
        html = checkpoint._repr_html_()
    assert "<script>" not in html and hostile in texts(parse(html), "td")
    assert "f32[3]" in html and "12 B" in html


def test_long_tables_are_cut() -> None:
    root = parse(table_html("many", ("n",), [(str(i),) for i in range(MOST_ROWS + 5)]))
    assert len(texts(root, "td")) == MOST_ROWS and "and 5 more rows" in texts(root, "div")


def test_layouts_that_the_notation_lacks_are_written_by_their_spec() -> None:
    many: Any = EnumerableSpec([Piece(Box((i,), (1,)), i % 3) for i in range(100)])
    text = shorten_layout(many.layout((100,)), "f32")
    assert text.startswith("f32[100] EnumerableSpec") and len(text) < 200
    sizes = ",".join(["1"] * 500)
    assert shorten_layout(parse_layout(f"f32[500] on tp=500: S(0) sizes({sizes})").layout).endswith("…")


def drawn(value: Any, width: int | None = None) -> list[str]:
    out = io.StringIO()
    shardwise.draw(value, width=width, file=out)
    return out.getvalue().splitlines()


def test_draw_uses_the_notation_and_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Layout = parse_layout("f32[64,64] on tp=16: S(1)").layout
    for columns in (50, 80, 150):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = drawn(layout)
        assert lines[0] == "[64,64] on tp=16: S(1)"
        assert max(map(len, lines)) <= columns
        assert drawn(layout, width=columns) == lines
    assert max(map(len, drawn(layout, 150))) > max(map(len, drawn(layout, 80))), "a wide terminal shows more"


def test_draw_takes_tensors_transfers_and_texts() -> None:
    def body(comm: Comm) -> list[str]:
        return drawn(shardwise.ones(ChunkSpec(0, 2), 4, 2))

    assert run_local(body, 2)[0][0] == "f32[4,2] as chunk(0) over 0-1"
    assert drawn("f32[4,2] on tp=2: S(0)")[0] == "f32[4,2] on tp=2: S(0)"
    src, dst = (ChunkSpec(dim, 2).layout((4, 4)) for dim in (0, 1))
    assert any("lower bound" in line for line in drawn(shardwise.plan_transfer(src, dst, itemsize=4)))
    with pytest.raises(TypeError, match="draw takes a ShardedTensor, a Layout, a Transfer or a text"):
        drawn(torch.ones(2))
