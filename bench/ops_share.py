"""Section "ops_share": of torch's operator database, which share runs right on ShardedTensors and on DTensors?

Both get the same samples in the same layouts over two ranks: ours as threads, DTensor's as gloo processes. A call is
right if values and gradients equal those on whole tensors. An operator counts as run if one of its calls is right.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.op_samples import operators, trials
from bench.op_trials import RANKS, RIGHT, UNCLEAR, WRONG, TensorKind, TrialOutcome, run_ours, run_trial
from bench.report import Cell, Figures
from shardwise.comm import CommError, LocalWorld

KINDS = (RIGHT, "refused", UNCLEAR, WRONG)
LIMIT = 30.0


@dataclass(frozen=True)
class OpShareBenchSizes:
    """How many samples of an operator, of every how many-th operator, and in how many operators at a time."""

    samples: int = 3
    step: int = 1
    chunk: int = 8


TINY = OpShareBenchSizes(samples=1, step=80, chunk=4)


def run(sizes: OpShareBenchSizes) -> list[Figures]:
    """Both shares, and the operators that only one of the two runs."""
    numbers = list(range(0, len(operators()), sizes.step))
    mine = {n: run_ours(list(trials(operators()[n], sizes.samples))) for n in numbers}
    with LocalWorld(RANKS, timeout=10.0) as world:
        chunks = [numbers[i : i + sizes.chunk] for i in range(0, len(numbers), sizes.chunk)]
        theirs = {n: found for chunk in chunks for n, found in _run_dtensor_trials(world, chunk, sizes.samples).items()}
    tried = [n for n in numbers if mine[n]]
    table = Figures(
        "Operators and calls of torch's database that run right on 2 ranks",
        ["", "operators", "run", "share", "calls", *KINDS, "share of calls"],
        [_row("shardwise", mine, tried), _row("DTensor", theirs, tried)],
        ["unclear: an error that does not speak of layouts; DTensor's own errors are not told apart: all are unclear"],
    )
    return [
        table,
        _make_ahead_table("DTensor", theirs, mine, tried),
        _make_ahead_table("shardwise", mine, theirs, tried),
    ]


def _row(name: str, found: dict[int, list[TrialOutcome]], tried: Sequence[int]) -> list[Cell]:
    count = Counter(outcome.kind for n in tried for outcome in found[n])
    ran = sum(any(o.kind == RIGHT for o in found[n]) for n in tried)
    calls = sum(count.values())
    return [name, len(tried), ran, ran / len(tried), calls, *(count[k] for k in KINDS), count[RIGHT] / max(calls, 1)]


def _make_ahead_table(
    name: str, one: dict[int, list[TrialOutcome]], other: dict[int, list[TrialOutcome]], tried: Sequence[int]
) -> Figures:
    """The operators of which this kind runs more calls than the other."""
    rights = {n: [sum(o.kind == RIGHT for o in found[n]) for found in (one, other)] for n in tried}
    ahead = sorted((n for n in tried if rights[n][0] > rights[n][1]), key=lambda n: rights[n][1] - rights[n][0])
    rows: list[list[Cell]] = [[_name(n), *rights[n], len(one[n])] for n in ahead]
    return Figures(f"Operators of which {name} runs more calls", ["operator", name, "the other", "calls"], rows)


def _name(number: int) -> str:
    op: Any = operators()[number]
    return f"{op.name} {op.variant_test_name}".strip()


def _run_dtensor_trials(world: LocalWorld, chunk: Sequence[int], samples: int) -> dict[int, list[TrialOutcome]]:
    """DTensor's outcomes; operators on which it hangs or ends a process count as unclear."""
    try:
        return world.run(_run_trials_on_rank, list(chunk), samples, limit=LIMIT)[0]
    except CommError as error:
        print(f"DTensor, operators {list(map(_name, chunk))}: {error}", file=sys.stderr, flush=True)
        world.close()
        if len(chunk) > 1:
            return {n: found for one in chunk for n, found in _run_dtensor_trials(world, [one], samples).items()}
        lost = [TrialOutcome(trial.name, UNCLEAR, str(error)) for trial, _ in trials(operators()[chunk[0]], samples)]
        return {chunk[0]: lost}


def _run_trials_on_rank(numbers: Sequence[int], samples: int) -> dict[int, list[TrialOutcome]]:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = dtensor_kind(_device_mesh())
        return {n: [run_trial(*one, kind) for one in trials(operators()[n], samples)] for n in numbers}


@cache
def _device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def dtensor_kind(mesh: DeviceMesh) -> TensorKind:
    """torch's DTensors on a mesh of one axis."""

    def place(tensor: Tensor, dim: int | None) -> Tensor:
        values = tensor.detach()
        part = values if dim is None else _part(values, dim, mesh)
        placements = [Replicate() if dim is None else Shard(dim)]
        laid = DTensor.from_local(
            part.clone(), mesh, placements, run_check=False, shape=values.shape, stride=values.contiguous().stride()
        )
        return laid.detach().requires_grad_(tensor.requires_grad)

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    return TensorKind(place, whole, ())


def _part(values: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's chunk, empty where there are fewer chunks than ranks."""
    chunks, place = values.chunk(RANKS, dim), mesh.get_local_rank()
    return chunks[place] if place < len(chunks) else values.narrow(dim, 0, 0)
