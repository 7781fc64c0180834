"""A perceptron and a transformer block compiled: plain, by hand with raw collectives, ours, and on DTensors.

Forward and backward on 1 rank and on 2 gloo ranks: the first call, which compiles, and the median of later ones. On a
machine with a GPU the world of 1 rank computes there.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import shardwise
from bench import ops_models
from bench.report import Cell, Figures
from bench.timing import Contender, run_interleaved, seconds
from shardwise import Mesh, MeshSpec, Replicate, ShardedTensor, shard
from shardwise.comm import LocalWorld

PLAIN, HAND, OURS, EAGER, DTENSOR = "plain", "by hand", "ours", "ours, not compiled", "DTensor"
MILLI = 1e3
MODELS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "perceptron": (ops_models.Perceptron, ops_models.HandPerceptron),
    "transformer block": (ops_models.BenchBlock, ops_models.HandBlock),
}


@dataclass(frozen=True)
class CompileBenchSizes:
    """What is measured."""

    worlds: Sequence[int] = (1, 2)
    models: Sequence[str] = tuple(MODELS)
    repeats: int = 100
    backend: str = "inductor"


TINY = CompileBenchSizes(worlds=(1,), models=("perceptron",), repeats=1, backend="aot_eager")


def run(sizes: CompileBenchSizes) -> list[Figures]:
    """The tables, for each world."""
    tables = []
    for ranks in sizes.worlds:
        with LocalWorld(ranks) as world:
            found = world.run(_measure, sizes)
        tables.append(_make_table(found, ranks, sizes.backend))
    return tables


def _make_table(by_rank: Sequence[dict[str, dict[str, tuple[float, Any]]]], ranks: int, backend: str) -> Figures:
    rows: list[list[Cell]] = []
    for name, ways in by_rank[0].items():
        steady = {way: seconds([found[name][way][1] for found in by_rank]) * MILLI for way in ways}
        for way, (first, _) in ways.items():
            rows.append([name, way, first, steady[way], steady[way] / steady[PLAIN], steady[way] / steady[HAND]])
    columns = ["model", "way", "first call, s", "later calls, ms", "to plain", "to by hand"]
    where = "1 rank" if ranks == 1 else f"{ranks} gloo ranks"
    return Figures(f"Compiled by {backend}, forward and backward, {where}", columns, rows)


def _measure(sizes: CompileBenchSizes) -> dict[str, dict[str, tuple[float, Any]]]:
    """For each model and way the first call's seconds and the spans of later calls; all give the same loss."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() and dist.get_world_size() == 1 else "cpu"
    found = {}
    for name in sizes.models:
        firsts, ways = {}, []
        for way, step in _make_steps(name, device, sizes.backend).items():
            start = time.perf_counter()
            firsts[way] = step(None), time.perf_counter() - start
            ways.append(Contender(way, step))
        losses = [_read_loss(loss) for loss, _ in firsts.values()]
        for loss in losses[1:]:
            assert_close(loss, losses[0], rtol=1e-3, atol=1e-3)
        run_interleaved(ways, min(3, sizes.repeats))
        spans = run_interleaved(ways, sizes.repeats, dist.barrier)
        found[name] = {way: (firsts[way][1], spans[way]) for way in spans}
    return found


def _make_steps(name: str, device: str, backend: str) -> dict[str, Callable[[Any], Any]]:
    whole, hand = MODELS[name]
    world = dist.get_world_size()
    mesh, device_mesh = Mesh.of(tp=world), init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    shape = ops_models.BATCH, ops_models.TOKENS, ops_models.WIDTH
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    laid = shard(x, MeshSpec(mesh, [Replicate()]), None)

    def seeded(kind: type[nn.Module]) -> nn.Module:
        return ops_models.make_seeded(kind).to(device)

    ours = [ops_models.make_sharded(seeded(whole), mesh) for _ in range(2)]
    dtensors = ops_models.make_dtensors(seeded(whole), device_mesh)
    return {
        PLAIN: _make_step(seeded(whole), torch.compile(backend=backend), x, device),
        HAND: _make_step(ops_models.shard_by_hand(seeded(hand)), torch.compile(backend=backend), x, device),
        OURS: _make_step(ours[0], lambda model: shardwise.compile(model, backend=backend), laid, device),
        EAGER: _make_step(ours[1], lambda model: model, laid, device),
        DTENSOR: _make_step(dtensors, torch.compile(backend=backend), x, device),
    }


def _make_step(model: nn.Module, compile_model: Callable[[Any], Any], x: Tensor, device: str) -> Callable[[Any], Any]:
    compiled = compile_model(model)

    def run_step(_: Any) -> Tensor:
        model.zero_grad()
        y = compiled(x)
        loss = (y * y).sum()
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss

    return run_step


def _read_loss(loss: Any) -> Tensor:
    whole: Tensor = loss.full() if isinstance(loss, ShardedTensor) else loss
    return whole.detach().cpu()
