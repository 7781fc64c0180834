"""Draw the pictures of docs/view.md: `python -m tools.page_pictures` writes docs/pictures, with a headless Chromium.

It prints how long each canvas took to draw.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Replicate, Shard, run_local
from shardwise.cli.checkpoints import open_checkpoint
from shardwise.page.document import render_document
from shardwise.page.targets import CheckpointTarget, LayoutTarget, MoveTarget
from tests.browser import Browser

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
TIMES = "return [...document.querySelectorAll('canvas')].map((c) => `${c.dataset.name} ${c.dataset.redrawMs} ms`)"
MIDDLE = (
    "const s = document.querySelector('[data-name=time]'); s.value = s.max * 0.56; s.dispatchEvent(new Event('input'))"
)


def save_checkpoint(folder: Path) -> str:
    """A small model, saved by 4 ranks."""
    mesh = Mesh.of(dp=2, tp=2)
    fused = MeshSpec(mesh, (Replicate(), Shard(0, groups=(64, 64, 64))))
    specs = {
        "attn.qkv.weight": (192, 64, fused),
        "attn.out.weight": (64, 64, MeshSpec(mesh, (Replicate(), Shard(1)))),
        "mlp.up.weight": (256, 64, MeshSpec(mesh, (Shard(1), Shard(0)))),
        "mlp.down.weight": (64, 256, MeshSpec(mesh, (Shard(0), Shard(1)))),
    }
    path = str(folder / "step-1000")

    def write(comm: Comm) -> None:
        model: dict[str, Any] = {"embed.weight": shardwise.shard(torch.zeros(1003, 64), ChunkSpec(0, ranks=4))}
        for block in range(24):
            for name, (rows, columns, spec) in specs.items():
                weight = torch.zeros(rows, columns, dtype=torch.bfloat16)
                model[f"blocks.{block}.{name}"] = shardwise.shard(weight, spec)
            model[f"blocks.{block}.norm.weight"] = torch.ones(64)
        shardwise.save({"model": model, "optimizer": {"lr": 3e-4}, "step": 1000}, path)

    run_local(write, 4)
    return path


def find_pages(folder: Path) -> dict[str, tuple[Callable[[], dict[str, Any]], str, int]]:
    """For each picture: the facts of the page, a script to run on it, and how tall it is."""
    fused = "bf16[6144,4096] on dp=2,tp=4: R, S(0) groups(4096,1024,1024)"
    many = "bf16[131072,131072] on dp=128,tp=128: S(0), S(1)"
    checkpoint = CheckpointTarget(open_checkpoint(save_checkpoint(folder)))
    return {
        "layout": (LayoutTarget(fused).facts, "", 1090),
        "move": (MoveTarget(fused, "on dp=2,tp=4: S(0), S(1)", buffer="8MB").facts, MIDDLE, 1420),
        "move_16384_dark": (MoveTarget(many, "on a=32,b=512: S(1), S(0)").facts, MIDDLE, 1060),
        "checkpoint": (lambda: {**checkpoint.facts(), "title": "runs/step-1000"}, "", 820),
    }


def main(names: list[str]) -> None:
    """Draw the named pictures, or all of them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        for name, (facts, script, tall) in find_pages(Path(folder)).items():
            if names and name not in names:
                continue
            path = Path(folder) / f"{name}.html"
            path.write_text(render_document(facts(), served=name == "layout"))
            browser.emulate(prefers_color_scheme="dark" if name.endswith("dark") else "light")
            browser.open(path.as_uri())
            browser.wait_for("document.getElementById('content').dataset.shown")
            browser.run(script)
            browser.picture(PICTURES / f"{name}.png", tall)
            print(f"{name}: {', '.join(browser.run(TIMES))}; console: {browser.logged() or 'empty'}")


if __name__ == "__main__":
    main(sys.argv[1:])
