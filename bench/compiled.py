"""A perceptron and a transformer block compiled: plain, by hand with raw collectives, ours, and on DTensors.

1. Forward and backward on 1 rank and on 2 gloo ranks: the first call, which compiles, and the median of later ones.
2. On a machine with a GPU the block in bfloat16 on 1 rank over nccl, at several widths.
3. A fully sharded model of equal blocks on 4 gloo ranks, with moves beside computation and without.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import shardwise
from bench import compiled_deep, ops_models
from bench.compiled_deep import DeepModelSizes
from bench.report import Cell, Figures
from bench.timing import Contender, run_interleaved, seconds
from shardwise import Mesh, MeshSpec, Replicate, ShardedTensor, shard
from shardwise.comm import LocalWorld

BLOCK = "transformer block"
PLAIN, HAND, OURS, EAGER, DTENSOR = "plain", "by hand", "ours", "ours, not compiled", "DTensor"
MILLI = 1e3
RankFigures: TypeAlias = dict[str, dict[str, tuple[float, Any]]]
MODELS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "perceptron": (ops_models.Perceptron, ops_models.HandPerceptron),
    BLOCK: (ops_models.BenchBlock, ops_models.HandBlock),
}


@dataclass(frozen=True)
class CompileBenchSizes:
    """What is measured."""

    worlds: Sequence[int] = (1, 2)
    models: Sequence[str] = tuple(MODELS)
    repeats: int = 100
    backend: str = "inductor"
    gpu_widths: Sequence[int] = (256, 1024, 4096)
    deep: DeepModelSizes | None = field(default_factory=DeepModelSizes)


TINY = CompileBenchSizes(worlds=(1,), models=("perceptron",), repeats=1, backend="aot_eager", gpu_widths=(), deep=None)


@dataclass(frozen=True)
class CompileCase:
    """Where a model computes, how wide it is, in which dtype."""

    device: str = "cpu"
    width: int = ops_models.WIDTH
    dtype: torch.dtype = torch.float32


def run(sizes: CompileBenchSizes) -> list[Figures]:
    """The tables, for each world."""
    tables = []
    for ranks in sizes.worlds:
        with LocalWorld(ranks) as world:
            found = world.run(_measure, sizes, CompileCase())
        where = "1 rank" if ranks == 1 else f"{ranks} gloo ranks"
        tables.append(_make_table(found, where, sizes.backend))
    for width in sizes.gpu_widths if torch.cuda.is_available() else ():
        case = CompileCase("cuda", width, torch.bfloat16)
        tables.append(
            _make_table([_run_alone(sizes, case)], f"1 rank on a GPU, bfloat16, width {width}", sizes.backend)
        )
    return tables if sizes.deep is None else [*tables, compiled_deep.run(sizes.deep, sizes.backend)]


def _run_alone(sizes: CompileBenchSizes, case: CompileCase) -> RankFigures:
    """What one rank on a device measures, in a process of its own."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        process = get_context("spawn").Process(target=_be_alone, args=(replace(sizes, models=(BLOCK,)), case, path))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"the rank on {case.device} ended with code {process.exitcode}; its error is above")
        found: RankFigures = json.loads(path.read_text())
    return found


def _be_alone(sizes: CompileBenchSizes, case: CompileCase, path: Path) -> None:
    backend = "nccl" if case.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}.store", rank=0, world_size=1)
    path.write_text(json.dumps(_measure(sizes, case)))
    dist.destroy_process_group()


def _make_table(by_rank: Sequence[RankFigures], where: str, backend: str) -> Figures:
    rows: list[list[Cell]] = []
    for name, ways in by_rank[0].items():
        steady = {way: seconds([found[name][way][1] for found in by_rank]) * MILLI for way in ways}
        for way, (first, _) in ways.items():
            rows.append([name, way, first, steady[way], steady[way] / steady[PLAIN], steady[way] / steady[HAND]])
    columns = ["model", "way", "first call, s", "later calls, ms", "to plain", "to by hand"]
    return Figures(f"Compiled by {backend}, forward and backward, {where}", columns, rows)


def _measure(sizes: CompileBenchSizes, case: CompileCase) -> RankFigures:
    """For each model and way the first call's seconds and the spans of later calls; all give the same loss."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for name in sizes.models:
        firsts, ways = {}, []
        for way, step in _make_steps(name, case, sizes.backend).items():
            start = time.perf_counter()
            firsts[way] = step(None), time.perf_counter() - start
            ways.append(Contender(way, step))
        losses = [_read_loss(loss) for loss, _ in firsts.values()]
        for loss in losses[1:]:
            assert_close(loss, losses[0], rtol=0.05 if case.dtype == torch.bfloat16 else 1e-3, atol=1e-3)
        run_interleaved(ways, min(3, sizes.repeats))
        spans = run_interleaved(ways, sizes.repeats, dist.barrier)
        found[name] = {way: (firsts[way][1], spans[way]) for way in spans}
    return found


def _make_steps(name: str, case: CompileCase, backend: str) -> dict[str, Callable[[Any], Any]]:
    whole, hand = MODELS[name]
    world = dist.get_world_size()
    mesh, device_mesh = Mesh.of(tp=world), init_device_mesh(case.device, (world,), mesh_dim_names=("tp",))
    shape = ops_models.BATCH, ops_models.TOKENS, case.width
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(case.device, case.dtype)
    laid = shard(x, MeshSpec(mesh, [Replicate()]), None)

    def seeded(kind: Callable[[int], nn.Module]) -> nn.Module:
        return ops_models.make_seeded(partial(kind, case.width)).to(case.device, case.dtype)

    ours = [ops_models.make_sharded(seeded(whole), mesh) for _ in range(2)]
    dtensors = ops_models.make_dtensors(seeded(whole), device_mesh)
    return {
        PLAIN: _make_step(seeded(whole), torch.compile(backend=backend), x),
        HAND: _make_step(ops_models.shard_by_hand(seeded(hand)), torch.compile(backend=backend), x),
        OURS: _make_step(ours[0], lambda model: shardwise.compile(model, backend=backend), laid),
        EAGER: _make_step(ours[1], lambda model: model, laid),
        DTENSOR: _make_step(dtensors, torch.compile(backend=backend), x),
    }


def _make_step(model: nn.Module, compile_model: Callable[[Any], Any], x: Tensor) -> Callable[[Any], Any]:
    compiled = compile_model(model)

    def run_step(_: Any) -> Tensor:
        model.zero_grad()
        y = compiled(x)
        loss = (y * y).sum()
        loss.backward()
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        return loss

    return run_step


def _read_loss(loss: Any) -> Tensor:
    whole: Tensor = loss.full() if isinstance(loss, ShardedTensor) else loss
    return whole.detach().float().cpu()
