"""The chapters of the demo that run on processes: a move, training, a checkpoint, and resuming elsewhere.

The part of the demo that computes: what each rank does, and what it reports.

The model of the demo: a small transformer in plain torch, its batches, and a plan for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from shardwise.checkpoint import load, reshard, save
from shardwise.checkpoint import open as open_checkpoint
from shardwise.cli.demo import AFTER, BEFORE, Chapter
from shardwise.comm import LocalWorld, default_comm
from shardwise.geometry import Layout, Mesh, format_layout, parse_layout
from shardwise.nn import ModelPlan, ShardedOptimizer, describe_plan, shard_module
from shardwise.ops import explain
from shardwise.ops.explain import LogEntry
from shardwise.tensor import ShardedTensor, shard
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, LAYERS = 64, 64, 4, 8, 8, 2


PATTERNS = {
    "tokens.weight": "S(0)",
    "blocks.*.qkv.weight": "S(0) groups(q,k,v)",
    "blocks.*.out.weight": "S(1)",
    "blocks.*.up.weight": "S(0)",
    "blocks.*.down.weight": "S(1)",
    "head.weight": "S(0)",
}


def plan_for(mesh: Mesh) -> ModelPlan:
    """Heads, perceptrons and the vocabulary are cut along `tp`; the batch along `dp`, where the mesh has it."""
    return ModelPlan(
        mesh,
        PATTERNS,
        axis="tp",
        lengths={"q": WIDTH, "k": WIDTH, "v": WIDTH},
        input_plan="dp: S(0)" if "dp" in mesh.axes else "replicated",
    )


class DemoBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        return x


class Transformer(nn.Module):
    """Predicts the next token and returns the loss; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(DemoBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from random starts, and what follows each token."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


STEPS, MORE_STEPS = 8, 4
WORLD, SMALLER_WORLD = Mesh.of(dp=2, tp=2), Mesh.of(tp=2)


@dataclass(frozen=True)
class TrainingResult:
    """What a run on 4 ranks reports: losses of both models, how far their parameters are apart, and what was saved.

    `moves` are the kinds of moves in one step: operation, from, to, how often, bytes in all.
    """

    losses: list[float]
    dense_losses: list[float]
    difference: float
    moves: list[tuple[str, str, str, int, int]]
    saved: dict[str, Tensor]


@dataclass(frozen=True)
class ResumeResult:
    """What a run on 2 ranks reports: what was loaded, and the losses of further steps."""

    loaded: dict[str, Tensor]
    losses: list[float]


def move_exactly(before: str, after: str) -> bool:
    """Move a tensor between two layouts; whether every element arrived."""
    source = parse_layout(before)
    values = torch.arange(float(source.layout.numel)).reshape(source.layout.shape)
    moved = shard(values, source.layout).redistribute(parse_layout(after, like=source).layout)
    return bool(torch.equal(moved.full(), values))


def train(folder: str, show: bool) -> TrainingResult:
    """Train sharded and whole side by side, save the sharded model, and continue with the whole one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dense = Transformer().double()
    run, whole = TrainingRun(copy.deepcopy(dense), plan_for(WORLD)), TrainingRun(dense, None)
    losses, dense_losses = [], []
    for step in _show_steps(range(STEPS), show, "training on 4 ranks"):
        with explain() as log:
            losses.append(run.step(step))
        dense_losses.append(whole.step(step))
    difference = run.distance(whole)
    save({**run.state(), "step": STEPS}, folder)
    dense_losses += [whole.step(step) for step in range(STEPS, STEPS + MORE_STEPS)]
    return TrainingResult(losses, dense_losses, difference, _summarize_moves(log.entries), _gather_state(run.state()))


def _summarize_moves(entries: Sequence[LogEntry]) -> list[tuple[str, str, str, int, int]]:
    """The moves among recorded operations, those that differ in bytes only taken together."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for entry in (entry for entry in entries if entry.moved_bytes):
        kind = (entry.name, entry.inputs[0].partition(": ")[2], entry.outputs[0].partition(": ")[2])
        times, nbytes = found.get(kind, (0, 0))
        found[kind] = (times + 1, nbytes + entry.moved_bytes)
    return [(*kind, times, nbytes) for kind, (times, nbytes) in found.items()]


def resume(folder: str, show: bool) -> ResumeResult:
    """Load model and optimizer into other layouts, and continue training."""
    torch.set_num_threads(1)
    torch.manual_seed(1)  # other numbers than the saved ones: what matches afterwards was loaded
    run = TrainingRun(Transformer().double(), plan_for(SMALLER_WORLD))
    first = run.load(folder)
    loaded = _gather_state(run.state())
    steps = range(first, first + MORE_STEPS)
    return ResumeResult(loaded, [run.step(step) for step in _show_steps(steps, show, "continuing on 2 ranks")])


class TrainingRun:
    """A model and its optimizer; sharded as a plan says, or whole on every rank without one."""

    def __init__(self, model: nn.Module, plan: ModelPlan | None) -> None:
        self.model, self.plan = model, plan
        if plan is not None:
            shard_module(model, plan)
        self.optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-2)

    def step(self, number: int) -> float:
        """One step of training; the loss before it."""
        loss = self.model(*map(self._mine, batch_of(number)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(_gather_full(loss.detach()))

    def _mine(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch."""
        if self.plan is None or "dp" not in self.plan.mesh.axes:
            return batch
        place = self.plan.mesh.coordinates(default_comm().rank)["dp"]
        return batch.tensor_split(self.plan.mesh.axis_size("dp"))[place]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, folder: str) -> int:
        """Take model and optimizer from a checkpoint of any layout and number of ranks; return its step."""
        self.optimizer.init_state()
        state = load({**self.state(), "step": 0}, folder)
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def distance(self, whole: TrainingRun) -> float:
        """The largest difference between the parameters of two runs, the other one whole."""
        pairs = zip(self.model.parameters(), whole.model.parameters(), strict=True)
        return max(float((_gather_full(mine.detach()) - other.detach()).abs().max()) for mine, other in pairs)


def _gather_full(tensor: Tensor) -> Tensor:
    return tensor.full() if isinstance(tensor, ShardedTensor) else tensor


def _gather_state(state: Any, name: str = "") -> dict[str, Tensor]:
    """Every sharded tensor of a nested state, whole."""
    if isinstance(state, ShardedTensor):
        return {name: state.detach().full()}
    items = state.items() if isinstance(state, dict) else ()
    return {path: tensor for key, value in items for path, tensor in _gather_state(value, f"{name}.{key}").items()}


def _show_steps(steps: range, show: bool, what: str) -> Iterator[int]:
    """The steps, with a progress bar where the error stream is a terminal."""
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal and default_comm().rank == 0)
    yield from track(steps, what, console=console, transient=True, disable=hidden)


TOLERANCE = 1e-9
TIMEOUT = 300.0
OFFLINE = "S(0)"
SHOWN = ("model.blocks.0.qkv.weight", "optimizer.state.blocks.0.down.weight.exp_avg")


def run_rank_chapters(folder: Path, show: bool) -> Iterator[Chapter]:
    """All chapters that need processes; files are made in the folder."""
    with LocalWorld(WORLD.size, timeout=TIMEOUT) as world:
        yield move_chapter(all(world.run(move_exactly, BEFORE, AFTER)))
        yield plan_chapter()
        trained = world.run(train, str(folder / "trained"), show)[0]
    yield training_chapter(trained)
    yield step_chapter(trained)
    yield reshard_chapter(folder)
    with LocalWorld(SMALLER_WORLD.size, timeout=TIMEOUT) as world:
        found = world.run(resume, str(folder / "resharded"), show)[0]
    yield load_chapter(trained, found)
    yield resume_chapter(trained, found)


def move_chapter(exact: bool) -> Chapter:
    """The move of the first chapters, executed."""
    verdict = "every element arrived" if exact else "WRONG VALUES"
    return Chapter(f"The same move on 4 processes: {verdict}.", [], {"move_is_exact": exact}, exact)


def plan_chapter() -> Chapter:
    """The plan of the model: its patterns, and what they come to as a table."""
    plan = plan_for(WORLD)
    table = describe_plan(plan, Transformer().double())
    data = {"mesh": table.mesh, "parameters": table.elements, "rank_bytes": table.rank_bytes}
    lines = [*_table(*plan.parameters.items()), line(), *map(line, str(table).splitlines())]
    return Chapter("A transformer is sharded by a plan of 6 patterns; its code stays as it is.", lines, {"plan": data})


def training_chapter(trained: TrainingResult) -> Chapter:
    """The losses of the sharded model next to those of the whole one."""
    dense = trained.dense_losses[:STEPS]
    lines = [*_losses(0, trained.losses, dense), line(f"parameters differ by {trained.difference:.1e} at most")]
    right = trained.difference < TOLERANCE and _are_losses_close(trained.losses, dense)
    data = {"losses": trained.losses, "dense_losses": dense, "largest_difference": trained.difference}
    heading = f"It is trained on 4 ranks, next to the same model unsharded: {_verdict(right)}."
    return Chapter(heading, lines, {"training": data}, right)


def step_chapter(trained: TrainingResult) -> Chapter:
    """What one step of training moved."""
    rows = [(name, a, b, str(times), format_bytes(nbytes)) for name, a, b, times, nbytes in trained.moves]
    total = sum(nbytes for *_, nbytes in trained.moves)
    lines = _table(("operation", "from", "to", "times", "bytes"), *rows)
    return Chapter(f"One step moved {format_bytes(total)} between the ranks.", lines, {"step_moved_bytes": total})


def reshard_chapter(folder: Path) -> Chapter:
    """The checkpoint of 4 ranks, rewritten for 2 by this process alone."""
    report = reshard(folder / "trained", folder / "resharded", layout=OFFLINE, ranks=SMALLER_WORLD.size, workers=1)
    with open_checkpoint(folder / "trained") as old, open_checkpoint(folder / "resharded") as new:
        rows = [(name, _format_layout_rule(old[name].layout), _format_layout_rule(new[name].layout)) for name in SHOWN]
    data = {"tensors": report.tensors, "bytes": report.bytes, "ranks": len(report.ranks)}
    summary = f"{report.tensors} tensors, {format_bytes(report.bytes)}"
    heading = f"The checkpoint of 4 ranks ({summary}) is resharded for 2, without starting any."
    return Chapter(heading, _table(("tensor", "on 4 ranks", "on 2 ranks"), *rows), {"resharded": data})


def load_chapter(trained: TrainingResult, found: ResumeResult) -> Chapter:
    """Whether 2 ranks loaded what 4 ranks saved."""
    saved = trained.saved
    equal = [name for name in saved if name in found.loaded and torch.equal(saved[name], found.loaded[name])]
    exact = len(equal) == len(saved) == len(found.loaded)
    verdict = f"all {len(saved)} equal, bit by bit" if exact else f"ONLY {len(equal)} OF {len(saved)} EQUAL"
    heading = f"2 ranks load it into the same plan on another mesh, {SMALLER_WORLD}: {verdict}."
    return Chapter(heading, [], {"loaded": {"tensors": len(saved), "equal": len(equal)}}, exact)


def resume_chapter(trained: TrainingResult, found: ResumeResult) -> Chapter:
    """The losses of further steps, next to those of the unsharded model."""
    dense = trained.dense_losses[STEPS:]
    right = len(found.losses) == MORE_STEPS and _are_losses_close(found.losses, dense)
    data = {"losses": found.losses, "dense_losses": dense}
    heading = f"They resume training where the 4 stopped: {_verdict(right)}."
    return Chapter(heading, _losses(STEPS, found.losses, dense), {"going_on": data}, right)


def _verdict(right: bool) -> str:
    return "the losses are equal" if right else "THE LOSSES DIFFER"


def _are_losses_close(losses: list[float], dense: list[float]) -> bool:
    return all(abs(ours - other) < TOLERANCE for ours, other in zip(losses, dense, strict=True))


def _losses(first: int, losses: list[float], dense: list[float]) -> list[Line]:
    pairs = enumerate(zip(losses, dense, strict=True), start=first)
    rows = [(str(step), f"{ours:.9f}", f"{other:.9f}") for step, (ours, other) in pairs]
    return _table(("step", "sharded", "whole"), *rows)


def _format_layout_rule(layout: Layout) -> str:
    return format_layout(layout).partition(" on ")[2]


def _table(*rows: Sequence[str]) -> list[Line]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [line("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))) for row in rows]
