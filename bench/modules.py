"""Section "modules": sharded layers beside torch's own and beside code written by hand.

1. Lookups: every rank brings its own ids and gets its own rows of a table that lies on all ranks.
2. Models: a perceptron and a transformer block, forward, backward and optimizer step, tensor-parallel.
3. Fully sharded models (`fully_sharded`), and Muon (`owners`).

All ways take turns, with a barrier before each; a run lasts from the first rank's start to the last rank's end.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from bench import fully_sharded, ops_models, owners
from bench.modules_lookup import HAND, OURS, TORCH, LookupCase, contenders
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import LocalWorld
from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan, shard_module
from shardwise.tensor import ShardedTensor

DTENSOR, PLAIN = "DTensor", "plain, one rank"
LOOKUP_AIM, MODEL_AIM = 1.2, 1.15


@dataclass(frozen=True)
class ModuleBenchSizes:
    """The lookups, their turns, the ranks; the ranks and turns of the models, and which ones (none named: all)."""

    cases: tuple[LookupCase, ...] = (
        LookupCase(100_000, 64, 10_000, 0, 0, False),
        LookupCase(100_000, 64, 10_000, 0, 0, True),
        LookupCase(100_000, 64, 10_000, 0, 1, False),
        LookupCase(100_000, 64, 10_000, 0, 1, True),
        LookupCase(1_000_000, 64, 40_000, 0, 0, False),
        LookupCase(100_000, 64, 10_000, 20, 0, False),
        LookupCase(100_000, 64, 10_000, 20, 0, True),
        LookupCase(100_000, 64, 10_000, 20, 1, False),
        LookupCase(100_000, 64, 10_000, 20, 1, True),
    )
    turns: int = 15
    ranks: int = 4
    model_ranks: int = 2
    model_turns: int = 60
    models: tuple[str, ...] = ()
    sharded: fully_sharded.ShardedBenchSizes = field(default_factory=fully_sharded.ShardedBenchSizes)
    owners: owners.OwnerBenchSizes = field(default_factory=owners.OwnerBenchSizes)


TINY = ModuleBenchSizes(
    cases=(LookupCase(64, 4, 20, 0, 0, True), LookupCase(64, 4, 20, 5, 1, False)),
    turns=1,
    ranks=2,
    model_turns=1,
    models=("perceptron", "transformer block"),
    sharded=fully_sharded.TINY,
    owners=owners.TINY,
)


def run(sizes: ModuleBenchSizes) -> list[Figures]:
    """The four tables."""
    with LocalWorld(sizes.ranks) as world:
        lookups = [_join_rank_times(world.run(_lookup, case, sizes.turns)) for case in sizes.cases]
    with LocalWorld(sizes.model_ranks) as world:
        models = {kind: _join_rank_times(world.run(_model, kind, sizes.model_turns)) for kind in sizes.models or MODELS}
    return [
        _lookup_table(sizes, lookups),
        _model_table(sizes, models),
        *fully_sharded.run(sizes.sharded),
        *owners.run(sizes.owners),
    ]


def _join_rank_times(by_rank: Sequence[dict[str, list[Span]]]) -> dict[str, float]:
    return {name: seconds([found[name] for found in by_rank]) for name in by_rank[0]}


def _silence_warnings() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # the peers deprecate themselves and each other
    logging.disable(logging.WARNING)


def _lookup(case: LookupCase, turns: int) -> dict[str, list[Span]]:
    """On one rank: all ways give the same, then they take turns."""
    _silence_warnings()
    ways = contenders(case)
    results = {way.name: way.run(None).detach() for way in ways}
    for name, result in results.items():
        assert_close(result, results[TORCH], msg=f"{name} differs from {TORCH}")
    return run_interleaved(ways, turns, before=dist.barrier)


def _lookup_table(sizes: ModuleBenchSizes, found: Sequence[dict[str, float]]) -> Figures:
    rows = [_lookup_row(case, times) for case, times in zip(sizes.cases, found, strict=True)]
    return Figures(
        f"lookups, {sizes.ranks} gloo ranks, each with its own ids: medians in ms, interleaved",
        ["lookup", "table", "ids", OURS, TORCH, HAND, f"ours / {TORCH}", f"ours / {HAND}", "aim", "met"],
        rows,
        ["by hand: distinct ids, counts, ids and rows by three all-to-alls of gloo; for tables split by rows only"],
    )


def _lookup_row(case: LookupCase, times: dict[str, float]) -> list[Cell]:
    hand = times.get(HAND)
    ratio = None if hand is None else times[OURS] / hand
    aim = LOOKUP_AIM if hand is not None else 1.0
    met = (ratio if ratio is not None else times[OURS] / times[TORCH]) <= aim
    shown = [times[OURS] * 1e3, times[TORCH] * 1e3, None if hand is None else hand * 1e3]
    table = f"{case.rows:,} x {case.width}"
    return [case.name, table, case.ids, *shown, times[OURS] / times[TORCH], ratio, aim, "yes" if met else "no"]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (ops_models.Perceptron, ops_models.HandPerceptron, (ops_models.TOKENS, ops_models.WIDTH)),
    "transformer block": (
        ops_models.BenchBlock,
        ops_models.HandBlock,
        (ops_models.BATCH, ops_models.TOKENS, ops_models.WIDTH),
    ),
}
MODELS |= {
    f"transformer block, width {width}": (
        partial(ops_models.BenchBlock, width),
        partial(ops_models.HandBlock, width),
        (ops_models.BATCH, ops_models.TOKENS, width),
    )
    for width in (256, 512)
}


def _model(kind: str, turns: int) -> dict[str, list[Span]]:
    _silence_warnings()
    plain, hand, shape = MODELS[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = {
        OURS: _shard_by_plan(_make_seeded_model(plain)),
        HAND: ops_models.shard_by_hand(_copy_state(hand(), _make_seeded_model(plain))),
        DTENSOR: ops_models.make_dtensors(_make_seeded_model(plain), mesh),
        PLAIN: _make_seeded_model(plain),
    }
    made = [Contender(name, _step(model, x)) for name, model in ways.items()]
    losses = {way.name: [_number(way.run(None)) for _ in range(3)] for way in made}
    for name, found in losses.items():
        assert_close(found, losses[PLAIN], rtol=1e-3, atol=1e-3, msg=f"{name} differs from {PLAIN}")
    return run_interleaved(made, turns, before=dist.barrier)


def _make_seeded_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make()


def _copy_state(model: nn.Module, other: nn.Module) -> nn.Module:
    model.load_state_dict(other.state_dict())
    return model


def _shard_by_plan(model: nn.Module) -> nn.Module:
    patterns = {}
    for name, _ in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if layer.endswith(ops_models.BY_ROWS):
            patterns[name] = "S(0)"
        elif layer.endswith(ops_models.BY_COLUMNS) and kind == "weight":
            patterns[name] = "S(1)"
    plan = ModelPlan(Mesh.of(tp=dist.get_world_size()), patterns, input_plan="replicated")
    shard_module(model, plan)
    return model


def _number(loss: Any) -> float:
    if isinstance(loss, ShardedTensor):
        return float(loss.full().detach())
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)


def _step(model: nn.Module, x: Any) -> Callable[[Any], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    forward_backward = ops_models.step(model, x)

    def run(_: Any) -> Any:
        loss = forward_backward(None)
        optimizer.step()
        return loss.detach()

    return run


def _model_table(sizes: ModuleBenchSizes, found: dict[str, dict[str, float]]) -> Figures:
    rows: list[list[Cell]] = []
    for kind, times in found.items():
        ratio, peer = times[OURS] / times[HAND], times[OURS] / times[DTENSOR]
        shown = [times[name] * 1e3 for name in (OURS, HAND, DTENSOR, PLAIN)]
        met = "yes" if ratio <= MODEL_AIM and peer < 1 else "no"
        rows.append([kind, *shown, ratio, peer, MODEL_AIM, met])
    return Figures(
        f"forward + backward + step, {sizes.model_ranks} gloo ranks, tensor-parallel: medians in ms, interleaved",
        ["model", OURS, HAND, DTENSOR, PLAIN, f"ours / {HAND}", f"ours / {DTENSOR}", "aim", "met"],
        rows,
    )
