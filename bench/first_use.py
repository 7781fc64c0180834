"""Section "first_use": how long do the first calls of a process take, beyond the import of torch?

Each turn is a process of its own, whose time on the processor is taken: other load does not count, nor does waiting
for a disk. torch loads DTensor when any subclass of tensors computes for the first time; that is done before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from bench.report import Cell, Figures

PROGRAM = """
import json, time
import torch

class Other(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return torch.ones(2)

torch.Tensor._make_wrapper_subclass(Other, (2,)).relu()
times = [time.process_time()]

def note():
    times.append(time.process_time())

import shardwise
x = shardwise.shard(torch.ones(8, 8), "on x=1: S(0)")
note()
x + x
note()
block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
block = shardwise.shard_module(block, shardwise.ModelPlan(shardwise.Mesh.of(x=1), {"**": "R"}))
note()
loss = block(shardwise.shard(torch.ones(2, 8, 32), "on x=1: S(0)")).sum()
note()
loss.backward()
note()
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""
ROWS = ("import, first tensor", "first x + x", "shard_module", "transformer block: forward", "and backward")


@dataclass(frozen=True)
class FirstUseSizes:
    """How many processes are started."""

    turns: int = 7


TINY = FirstUseSizes(turns=1)


def run(sizes: FirstUseSizes) -> list[Figures]:
    """The least times of all processes, after one that writes the compiled modules."""
    turns = [_run_process() for _ in range(sizes.turns + 1)][1:]
    rows: list[list[Cell]] = [
        [name, 1e3 * min(times)] for name, times in zip(ROWS, zip(*turns, strict=True), strict=True)
    ]
    return [Figures("First calls of a process: milliseconds of processor time, the least", ["call", "ms"], rows)]


def _run_process() -> list[float]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    found: list[float] = json.loads(done.stdout)
    return found
