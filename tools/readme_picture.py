"""Draw the picture of the README, `docs/pictures/three_layouts.svg`: one weight in three layouts, and what moves.

python tools/readme_picture.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from shardwise import Layout, parse_layout, plan_transfer
from shardwise.transfer.transfer import format_bytes
from shardwise.view import PALETTE, ink_on

WEIGHT = "bf16[6144,4096]"
STAGES = (
    ("train: 8 ranks, fused q, k, v", "on dp=2,tp=4: R, S(0) groups(4096,1024,1024)"),
    ("train on: fully sharded", "on fsdp=8: S(0)"),
    ("serve: 3 uneven ranks", "on tp=3: S(1) sizes(2048,1024,1024)"),
)
PATH = Path(__file__).parents[1] / "docs" / "pictures" / "three_layouts.svg"
WIDTH, HEIGHT, GAP, TOP, LEFT = 168, 168, 118, 44, 46


def draw_svg() -> str:
    """The whole picture as text."""
    tensors = [parse_layout(f"{WEIGHT} {rule}") for _, rule in STAGES]
    total = LEFT * 2 + WIDTH * len(STAGES) + GAP * (len(STAGES) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} 250" font-family="sans-serif" role="img">',
        "<title>One weight in three layouts, and the bytes that move between them</title>",
        f'<rect width="{total}" height="250" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
    ]
    for number, ((title, rule), tensor) in enumerate(zip(STAGES, tensors, strict=True)):
        x = LEFT + number * (WIDTH + GAP)
        parts += [_text(x + WIDTH / 2, 28, title, 13, "bold"), *_tiles(tensor.layout, x)]
        parts.append(_text(x + WIDTH / 2, TOP + HEIGHT + 22, rule.removeprefix("on "), 9))
        if number:
            move = plan_transfer(tensors[number - 1].layout, tensor.layout, itemsize=tensor.itemsize)
            assert move.moved_bytes == move.lower_bound_bytes
            parts += _arrow(x - GAP, format_bytes(move.moved_bytes))
    return "\n".join([*parts, "</svg>", ""])


def _tiles(layout: Layout, x: float) -> list[str]:
    """A rectangle for each box, with a band and a number for each rank that has it."""
    rows, columns = layout.shape
    parts = []
    pieces = sorted(layout.pieces, key=lambda piece: (piece.box.offsets, piece.box.sizes, piece.rank))
    for box, holders in groupby(pieces, key=lambda piece: piece.box):
        ranks = [piece.rank for piece in holders]
        left, top = x + box.offsets[1] / columns * WIDTH, TOP + box.offsets[0] / rows * HEIGHT
        width, height = box.sizes[1] / columns * WIDTH / len(ranks), box.sizes[0] / rows * HEIGHT
        for band, rank in enumerate(ranks):
            at = left + band * width
            parts.append(
                f'<rect x="{at:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="{PALETTE[rank]}" stroke="#ffffff"/>'
            )
            if height > 12:
                parts.append(_text(at + width / 2, top + height / 2 + 4, str(rank), 11, ink=ink_on(PALETTE[rank])))
    return parts


def _arrow(x: float, label: str) -> list[str]:
    y = TOP + HEIGHT / 2
    line = f'<path d="M{x + 14} {y} h{GAP - 34} m-8 -6 l8 6 l-8 6" fill="none" stroke="#57606a" stroke-width="2"/>'
    return [_text(x + GAP / 2, y - 12, label, 13, "bold"), line, _text(x + GAP / 2, y + 22, "the lower bound", 11)]


def _text(x: float, y: float, text: str, size: int, weight: str = "normal", ink: str = "#1f2328") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="{size}" font-weight="{weight}"'
    return f'<text {place} fill="{ink}">{text}</text>'


if __name__ == "__main__":
    PATH.write_text(draw_svg())
    print(f"wrote {PATH}")
