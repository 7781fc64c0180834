"""The part of the demo that computes: what each rank does, and what it reports."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from shardwise.checkpoint import load, save
from shardwise.cli.demo.model import Transformer, batch_of, plan_for
from shardwise.comm import default_comm
from shardwise.geometry import Mesh, parse_layout
from shardwise.nn import ModelPlan, ShardedOptimizer, shard_module
from shardwise.ops import explain
from shardwise.ops.engine.explain import LogEntry
from shardwise.tensor import ShardedTensor, shard

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
