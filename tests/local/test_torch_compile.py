"""`torch.compile` of a sharded model: right results, and one warning that names `shardwise.compile`.

Dynamo is loaded and changed once in a process, so each program runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, warnings
{first}
import torch
from torch import nn
from shardwise import Mesh, ModelPlan, shard_module

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
plain.load_state_dict(model.state_dict())
shard_module(model, ModelPlan(Mesh.of(tp=1), {{"*.weight": "S(0)"}}, axis="tp", input_plan="replicated"))
x = torch.ones(3, 4)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        output = compiled(x)
        output.sum().backward()
torch.testing.assert_close(output.full(), plain(x))
for _ in range(2):
    plain(x).sum().backward()
for one, other in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(one.grad.full(), other.grad)
again = torch.compile(plain, backend="eager", fullgraph=True)
torch.testing.assert_close(again(x), plain(x))
print(sum("use shardwise.compile(model)" in str(w.message) for w in seen))
"""


def run(first: str) -> str:
    """What the program prints; `first` is run before anything is imported."""
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_sharded_model_gives_its_results_with_one_warning() -> None:
    assert run("") == "1"


def test_dynamo_that_was_loaded_before_knows_as_well() -> None:
    assert run("import torch._dynamo") == "1"
