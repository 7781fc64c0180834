"""`torch.compile` of a sharded model is `shardwise.compile` of it; of other code around ShardedTensors it warns once.

Dynamo is loaded and changed once in a process, so programs that it sees run in a process of their own.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, run_local, shard_module
from shardwise.compiler import CompiledProgram

PROGRAM = """
import sys, warnings
{first}
import torch
from torch import nn
from shardwise import Mesh, ModelPlan, shard_module
from shardwise._torch import is_called_by_compiled_code, is_dynamo_at_work

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
plain.load_state_dict(model.state_dict())
shard_module(model, ModelPlan(Mesh.of(tp=1), {{"*.weight": "S(0)"}}, axis="tp", input_plan="replicated"))
x = torch.ones(3, 4)

def look(graph, inputs):
    inside.append((is_called_by_compiled_code(), is_dynamo_at_work()))
    return graph.forward

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    compiled = torch.compile(lambda x: model(x), backend="eager")
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
try:
    torch.compile(lambda p: p.add_(1), backend="eager", fullgraph=True)(next(model.parameters()))
except RuntimeError as error:
    assert "got ShardedTensors, which torch takes into no graph: use shardwise.compile; an opt" in str(error), error
else:
    raise AssertionError("a whole graph of torch took a ShardedTensor")
inside = []

@torch.compiler.disable
def note():
    inside.append((is_called_by_compiled_code(), is_dynamo_at_work()))

note(), torch.compile(lambda: note(), backend="eager")(), torch.compile(lambda x: x * 2, backend=look)(x)
assert inside == [(False, False), (True, False), (True, True)], inside
print(sum("use shardwise.compile(model)" in str(w.message) for w in seen))
"""


def run(first: str) -> str:
    """What the program prints; `first` is run before anything is imported."""
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_function_gives_its_results_with_one_warning() -> None:
    assert run("") == "1"


def test_dynamo_that_was_loaded_before_knows_as_well() -> None:
    assert run("import torch._dynamo") == "1"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_sharded_model_is_compiled_as_a_whole(in_place: bool) -> None:
    def body(comm: Comm) -> str:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        whole = copy.deepcopy(model)
        shard_module(model, ModelPlan(Mesh.of(tp=1), {"*.weight": "S(0)"}, axis="tp", input_plan="replicated"))
        run: Any = model
        if in_place:
            model.compile(backend="eager")
        else:
            run = torch.compile(model, backend="eager")
        assert isinstance(run, nn.Module) and list(run.parameters()) == list(model.parameters())
        x = torch.ones(3, 4)
        for _ in range(2):
            run(x).sum().backward()
            whole(x).sum().backward()
        assert_close(run(x).full(), whole(x))
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(one.grad, ShardedTensor)
            assert_close(one.grad.full(), other.grad)
        program: Any = model._compiled_call_impl if in_place else run.forward
        return str(program.explain())

    (text,) = run_local(body, 1, timeout=60.0)
    assert "kind 0, 3 calls, traced because: the first call" in text and "without a graph" not in text


def test_plain_modules_and_switched_off_calls_go_to_torch() -> None:
    def body(comm: Comm) -> list[bool]:
        model = nn.Sequential(nn.Linear(4, 8))
        plain: Any = torch.compile(nn.Linear(2, 2), backend="eager")
        shard_module(model, ModelPlan(Mesh.of(tp=1), {"*.weight": "S(0)"}, axis="tp", input_plan="replicated"))
        off: Any = torch.compile(model, disable=True)
        return [isinstance(getattr(run, "forward", None), CompiledProgram) for run in (plain, off)]

    assert run_local(body, 1, timeout=60.0) == [[False, False]]
