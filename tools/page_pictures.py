"""Draw the pictures of docs/view.md: `python -m tools.page_pictures` writes docs/pictures, with a headless Chromium.

It prints how long each canvas took to draw.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Replicate, Shard, run_local
from shardwise.cli.inspect import open_checkpoint
from shardwise.cli.view import CheckpointTarget, LayoutTarget, MoveTarget, StepTarget
from shardwise.nn import ModelPlan, plan_from_data, shard_module
from shardwise.page.document import render_document
from shardwise.page.facts import read_trace
from shardwise.page.plan_facts import SETTINGS, PlanTarget
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


PATTERNS = {
    "embed.weight": "tp: S(0)",
    "blocks.*.{up,gate}.weight": "tp: S(0)",
    "blocks.*.down.weight": "tp: S(1)",
    "head.weight": "tp: S(0)",
}
PLANS: dict[str, dict[str, Any]] = {
    "tp8.toml": {"mesh": "dp=16,tp=8", "input_plan": "dp: S(0)", "parameters": PATTERNS},
    "tp32.toml": {"mesh": "dp=4,tp=32", "input_plan": "dp: S(0)", "parameters": PATTERNS},
}


class GatedBlock(nn.Module):
    """A gated layer with a residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + out


class GatedModel(nn.Module):
    """Layers of a language model without attention: enough for a picture."""

    def __init__(self, layers: int = 40, width: int = 8192, words: int = 128256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(GatedBlock(width, 3 * width) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return out


def plan_target(*names: str) -> PlanTarget:
    """Plans for a model of several billion parameters."""
    with torch.device("meta"):
        model = GatedModel()
    settings = {**SETTINGS, "batch": 8, "dtype": "bf16"}
    plans = tuple((name, plan_from_data(PLANS[name])) for name in names)
    return PlanTarget(f"{' and '.join(names)} for models:make", model, plans, settings=settings)


def record_step() -> StepTarget:
    """One step of a small model on 4 local ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"

        def train(comm: Comm) -> None:
            torch.manual_seed(0)
            model = nn.Sequential(*(GatedBlock(256, 768) for _ in range(3)))
            parameters = {"*.{up,gate}.weight": "tp: S(0)", "*.down.weight": "tp: S(1)"}
            shard_module(model, ModelPlan(Mesh.of(dp=2, tp=2), parameters, input_plan="dp: S(0)"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for turn in range(4):
                with shardwise.trace(path) if turn == 3 else nullcontext():
                    model(torch.ones(64, 256)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

        run_local(train, 4)
        return StepTarget("step.json", read_trace(path))


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    opened = open_checkpoint(save_checkpoint(folder))
    return {**CheckpointTarget(opened).facts(), "title": "runs/step-1000"}


def find_pages(folder: Path) -> dict[str, tuple[Callable[[], dict[str, Any]], str, int]]:
    """For each picture: the facts of the page, a script to run on it, and how tall it is."""
    fused = "bf16[6144,4096] on dp=2,tp=4: R, S(0) groups(4096,1024,1024)"
    many = "bf16[131072,131072] on dp=128,tp=128: S(0), S(1)"
    return {
        "layout": (LayoutTarget(fused).facts, "", 1090),
        "move": (MoveTarget(fused, "on dp=2,tp=4: S(0), S(1)", buffer="8MB").facts, MIDDLE, 1420),
        "move_16384_dark": (MoveTarget(many, "on a=32,b=512: S(1), S(0)").facts, MIDDLE, 1060),
        "plan": (plan_target("tp8.toml").facts, "", 960),
        "plans": (plan_target(*PLANS).facts, "", 940),
        "step": (lambda: record_step().facts(), "", 960),
        "checkpoint": (lambda: checkpoint_facts(folder), "", 820),
    }


def main(names: list[str]) -> None:
    """Draw the named pictures, or all of them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        for name, (facts, script, tall) in find_pages(Path(folder)).items():
            if names and name not in names:
                continue
            path = Path(folder) / f"{name}.html"
            path.write_text(render_document(facts(), served=name in ("layout", "plan")))
            browser.emulate(prefers_color_scheme="dark" if name.endswith("dark") else "light")
            browser.open(path.as_uri())
            browser.wait_for("document.getElementById('content').dataset.shown")
            browser.run(script)
            browser.picture(PICTURES / f"{name}.png", tall)
            print(f"{name}: {', '.join(browser.run(TIMES))}; console: {browser.logged() or 'empty'}")


if __name__ == "__main__":
    main(sys.argv[1:])
