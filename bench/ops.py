"""Section "ops": what does computing on ShardedTensors cost beside plain tensors, DTensors and code written by hand?

1. Single operators on small tensors, so that the cost of the call shows; contenders take turns on every rank.
2. The same at shapes never seen before.
3. Forward and backward passes of a perceptron and of a transformer block.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.testing import assert_close

from bench import ops_models
from bench.report import Cell, Figures
from bench.timing import Contender, run_interleaved
from shardwise import Mesh, MeshSpec, Replicate, Shard, ShardedTensor, shard
from shardwise.comm import LocalWorld

PLAIN, OURS, DTENSOR, HAND = "plain", "shardwise", "DTensor", "by hand"
MICRO = 1e6
Lay = Callable[[Tensor, bool], Tensor]


@dataclass(frozen=True)
class OpBenchSizes:
    """Ranks of each world, turns, calls in a turn, new shapes, turns of the models."""

    worlds: tuple[int, ...] = (1, 2)
    turns: int = 25
    calls: int = 200
    shapes: int = 15
    model_turns: int = 60


TINY = OpBenchSizes(turns=1, calls=2, shapes=2, model_turns=1)


@dataclass(frozen=True)
class Operands:
    """What the operators get: two matrices that may be cut, and weights that every rank holds."""

    x: Tensor
    y: Tensor
    weight: Tensor
    bias: Tensor


OPS: dict[str, Callable[[Operands], Any]] = {
    "add": lambda o: o.x + o.y,
    "mul by scalar": lambda o: o.x * 2.0,
    "relu": lambda o: torch.relu(o.x),
    "linear": lambda o: F.linear(o.x, o.weight, o.bias),
    "layer_norm": lambda o: F.layer_norm(o.x, (o.x.shape[-1],), o.bias, o.bias),
    "softmax": lambda o: torch.softmax(o.x, -1),
    "t": lambda o: o.x.t(),
    "view": lambda o: o.x.view(-1, 2, 4),
    "detach": lambda o: o.x.detach(),
}


def run(sizes: OpBenchSizes) -> list[Figures]:
    """All tables, for each world."""
    tables = []
    for ranks in sizes.worlds:
        with LocalWorld(ranks) as world:
            calls = world.run(_measure_calls, sizes)[0]
            news = world.run(_measure_new_shapes, sizes)[0]
            models = world.run(_measure_models, sizes)[0]
        tables += [_calls_table(calls, ranks), _news_table(news, ranks), _models_table(models, ranks)]
    return tables


def _calls_table(found: dict[str, dict[str, float]], ranks: int) -> Figures:
    rows: list[list[Cell]] = []
    for name, times in found.items():
        mine, theirs = times[OURS] - times[PLAIN], times[DTENSOR] - times[PLAIN]
        rows.append([name, times[PLAIN], times[OURS], times[DTENSOR], mine, theirs, mine / theirs])
    columns = ["operator", PLAIN, OURS, DTENSOR, "our overhead", "its overhead", "ratio (target 0.5)"]
    return Figures(f"One operator on 8 x 8, {_ranks(ranks)}: microseconds, the least of all turns", columns, rows)


def _news_table(found: dict[str, dict[str, float]], ranks: int) -> Figures:
    rows: list[list[Cell]] = [
        [name, times[PLAIN], times[OURS], times[DTENSOR], times[OURS] / times[DTENSOR]] for name, times in found.items()
    ]
    columns = ["operator", PLAIN, f"{OURS} (target 300)", DTENSOR, "ratio"]
    return Figures(f"The first call at a new shape, {_ranks(ranks)}: microseconds, median", columns, rows)


def _models_table(found: dict[str, dict[str, float]], ranks: int) -> Figures:
    rows: list[list[Cell]] = [
        [
            name,
            *(times[k] for k in (PLAIN, HAND, OURS, DTENSOR)),
            times[OURS] / times[HAND],
            times[DTENSOR] / times[HAND],
        ]
        for name, times in found.items()
    ]
    columns = ["model", PLAIN, HAND, OURS, DTENSOR, "ours / by hand (target 1.3)", "DTensor / by hand"]
    return Figures(f"Forward and backward, {_ranks(ranks)}: microseconds, median", columns, rows)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _prepare() -> tuple[Mesh, DeviceMesh]:
    """Meshes over this world; the peers' warnings are not ours to fix."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    return Mesh.of(tp=world), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def _layers(mesh: Mesh, device_mesh: DeviceMesh) -> dict[str, Lay]:
    """How each kind lays a whole tensor out: along dim 0, or replicated."""

    def ours(tensor: Tensor, cut: bool) -> Tensor:
        return shard(tensor, MeshSpec(mesh, [Shard(0) if cut else Replicate()]), None)

    def theirs(tensor: Tensor, cut: bool) -> Tensor:
        place, world = device_mesh.get_local_rank(), device_mesh.size()
        part = tensor.chunk(world)[place].clone() if cut else tensor
        return DTensor.from_local(part, device_mesh, [TorchShard(0) if cut else TorchReplicate()], run_check=False)

    return {PLAIN: lambda tensor, cut: tensor, OURS: ours, DTENSOR: theirs}


def _operands(lay: Lay, rows: int) -> Operands:
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    weight, bias = torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator)
    return Operands(lay(x, True), lay(y, True), lay(weight, False), lay(bias, False))


def _whole(value: Tensor) -> Tensor:
    return value.full() if isinstance(value, ShardedTensor) else getattr(value, "full_tensor", lambda: value)()


def _measure_calls(sizes: OpBenchSizes) -> dict[str, dict[str, float]]:
    """For each operator the least time of one call, in microseconds; all give the same values."""
    held = {name: _operands(lay, 8) for name, lay in _layers(*_prepare()).items()}
    found = {}
    for name, op in OPS.items():
        for operands in held.values():
            for _ in range(2):
                assert_close(_whole(op(operands)), op(held[PLAIN]))
        ways = [Contender(kind, _repeat_calls(op, operands, sizes.calls)) for kind, operands in held.items()]
        spans = run_interleaved(ways, sizes.turns)
        found[name] = {kind: min(e - s for s, e in runs) * MICRO / sizes.calls for kind, runs in spans.items()}
    return found


def _repeat_calls(op: Callable[[Operands], Any], operands: Operands, calls: int) -> Callable[[Any], None]:
    def repeat(_: Any) -> None:
        for _ in range(calls):
            op(operands)

    return repeat


def _measure_new_shapes(sizes: OpBenchSizes) -> dict[str, dict[str, float]]:
    """For each operator the median time of the first call at a new shape, in microseconds."""
    layers = _layers(*_prepare())
    found = {}
    rows = 64
    for name, op in OPS.items():
        for lay in layers.values():
            op(_operands(lay, 32))
        times: dict[str, list[float]] = {kind: [] for kind in layers}
        for _ in range(sizes.shapes):
            rows += 2
            ways = [Contender(kind, op, partial(_operands, lay, rows)) for kind, lay in layers.items()]
            for kind, spans in run_interleaved(ways, 1).items():
                times[kind] += [e - s for s, e in spans]
        found[name] = {kind: median(values) * MICRO for kind, values in times.items()}
    return found


def _measure_models(sizes: OpBenchSizes) -> dict[str, dict[str, float]]:
    """For each model the median time of a forward and a backward pass, in microseconds; all give the same loss."""
    mesh, device_mesh = _prepare()
    x = torch.randn(ops_models.BATCH, ops_models.TOKENS, ops_models.WIDTH, generator=torch.Generator().manual_seed(3))
    laid = shard(x, MeshSpec(mesh, [Replicate()]), None)
    pairs: dict[str, tuple[Any, Any]] = {
        "perceptron": (ops_models.Perceptron, ops_models.HandPerceptron),
        "transformer block": (ops_models.BenchBlock, ops_models.HandBlock),
    }
    found = {}
    for name, (model, hand) in pairs.items():
        ways = [
            Contender(PLAIN, ops_models.step(ops_models.make_seeded(model), x)),
            Contender(HAND, ops_models.step(ops_models.shard_by_hand(ops_models.make_seeded(hand)), x)),
            Contender(OURS, ops_models.step(ops_models.make_sharded(ops_models.make_seeded(model), mesh), laid)),
            Contender(
                DTENSOR, ops_models.step(ops_models.make_dtensors(ops_models.make_seeded(model), device_mesh), x)
            ),
        ]
        losses = [_whole(way.run(None)).detach() for way in [*ways, *ways, *ways]]
        for loss in losses:
            assert_close(loss, losses[0], rtol=1e-3, atol=1e-3)
        spans = run_interleaved(ways, sizes.model_turns, before=torch.distributed.barrier)
        found[name] = {kind: median(e - s for s, e in runs) * MICRO for kind, runs in spans.items()}
    return found
