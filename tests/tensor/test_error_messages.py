"""What a new user gets wrong on the first day: each error says what was passed, the rule, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import shardwise
from shardwise import (
    ChunkSpec,
    Mesh,
    MeshSpec,
    ModelPlan,
    Partial,
    Replicate,
    Shard,
    ShardedOptimizer,
    launch,
    run_local,
)
from shardwise import plan_transfer as plan
from shardwise import shard as lay_out

X: Any = torch.ones(8, 4)
ONE: Any = Mesh.of(tp=1)
any_: Any = shardwise  # functions that a type checker would stop from being called like this
ROWS, COLUMNS = ChunkSpec(0, 2).layout((8, 4)), ChunkSpec(1, 2).layout((8, 4))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def on_chunks() -> Any:
    return lay_out(X, ChunkSpec(0, 1))


def on_mesh() -> Any:
    return lay_out(X, ONE, [Shard(0)])


INIT = "this process is a world by itself: call torch.distributed.init_process_group"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no ranks were started": (
        lambda: lay_out(X, ChunkSpec(0, 4)),
        f"names ranks 1-3, not in the comm .rank 0.; {INIT}",
    ),
    "no ranks for a plan": (
        lambda: shardwise.shard_module(model(), ModelPlan(Mesh.of(tp=4), {"0.weight": "S(0)"})),
        f"the mesh tp=4 has ranks 0-3, and the process group has rank 0; {INIT}",
    ),
    "an array": (
        lambda: lay_out(X.numpy(), ChunkSpec(0, 1)),
        "got ndarray; make a tensor of it first: torch.as_tensor",
    ),
    "placements without a mesh": (lambda: lay_out(X, Shard(0)), r"placements need a mesh: shard\(x, Mesh.of\(tp=4\)"),
    "a list of placements": (lambda: lay_out(X, [TorchShard(0)]), "placements need a mesh"),
    "a mesh without placements": (lambda: lay_out(X, ONE), "the mesh tp=1 needs placements, one for each axis"),
    "a placement as the source": (
        lambda: lay_out(X, ChunkSpec(0, 1), Replicate()),
        r"src_rank is a rank, or None .* got Replicate: Replicate\(\)",
    ),
    "a text as the source": (lambda: lay_out(X, ChunkSpec(0, 1), "0"), "src_rank is a rank, .* got str: '0'"),
    "a dim that is not there": (lambda: lay_out(X, ChunkSpec(5, 1)), r"shape \(8, 4\) has a dim from -2 to 1"),
    "torch's words for ranks": (lambda: any_.ChunkSpec(0, ["rank:0/cpu"]), "ranks as numbers, a count such as 4"),
    "a device as ranks": (lambda: any_.ChunkSpec(0, "cpu"), "ChunkSpec takes ranks as numbers"),
    "axes by name": (lambda: any_.Mesh(dp=2, tp=2), r"Mesh\(dp=2, tp=2\): .* is Mesh.of\(dp=2, tp=2\)"),
    "sizes without names": (
        lambda: any_.Mesh.of(2, 2),
        r"Mesh.of\(2, 2\) does not name its axes; write Mesh.of\(dp=2, tp=2\)",
    ),
    "a shape without names": (lambda: any_.Mesh((2, 2)), r"Mesh takes names of axes and ranks.* got \(2, 2\) and None"),
    "ranks as a size": (lambda: any_.Mesh.of(dp=[0, 1]), r"'dp' has a number of ranks, got list: \[0, 1\]; to choose"),
    "an axis in place of a dim": (
        lambda: any_.Shard("tp"),
        r"Shard takes the number of a tensor's dim.* got str: 'tp'",
    ),
    "a class in place of a placement": (lambda: MeshSpec(ONE, [Shard]), r"this is the class Shard; write Shard\(0\)"),
    "a shape in place of a mesh": (lambda: MeshSpec((2, 2), [Shard(0)]), "a mesh is a Mesh, .* got tuple"),
    "too few placements": (lambda: MeshSpec(Mesh.of(dp=2, tp=2), [TorchShard(0)]), "needs 2 placements.* got 1"),
    "another reduction": (lambda: Partial("mean"), "the reduction is one of sum, avg"),
    "no target": (lambda: on_mesh().redistribute(), "redistribute takes a spec, .* got NoneType"),
    "a device as a target": (lambda: on_mesh().redistribute("cuda"), r"expected S\(dim\), R or P .*found 'cuda'"),
    "placements on chunks": (
        lambda: on_chunks().redistribute([TorchReplicate()]),
        "placements need a mesh, and this tensor",
    ),
    "parts without a shape": (lambda: shardwise.from_local(X, ChunkSpec(0, 1)), "needs the global shape; pass shape="),
    "a plan of texts": (
        lambda: any_.plan_transfer("S(0)", "S(1)", itemsize=4),
        "expected a dtype and a shape such as f32.8,4.; found 'S'",
    ),
    "a plan of specs": (lambda: any_.plan_transfer(ChunkSpec(0, 2), COLUMNS, itemsize=4), r"spec.layout\(\(8, 4\)\)"),
    "a plan without a width": (
        lambda: any_.plan_transfer(ROWS, COLUMNS),
        "needs the bytes of an element, and none is known; pass itemsize=4 for f32",
    ),
    "a plan of two widths": (
        lambda: any_.plan_transfer("f32[8,4] on tp=2: S(0)", "f64[8,4] on tp=2: S(1)"),
        "needs the bytes of an element, and got 4 and 8",
    ),
    "a plan of tensors": (lambda: any_.plan_transfer(on_chunks(), COLUMNS, itemsize=4), "pass its .sharding"),
    "a pattern with a typing error": (
        lambda: shardwise.shard_module(model(), ModelPlan(ONE, {"0.wieght": "S(0)"})),
        "'0.wieght' matches no parameter; near it: 0.weight",
    ),
    "a placement by its long name": (
        lambda: shardwise.shard_module(model(), ModelPlan(ONE, {"0.weight": "Shard(0)"})),
        r"expected S\(dim\), R or P \(for Shard\(dim\), Replicate\(\), Partial\(\)\)",
    ),
    "a list of patterns": (lambda: any_.ModelPlan(ONE, ["0.weight"]), "maps patterns to placements, .* got list"),
    "mesh and patterns exchanged": (
        lambda: any_.ModelPlan({"0.weight": "S(0)"}, ONE),
        "got Mesh in place of the patterns",
    ),
    "a plan without a mesh": (
        lambda: any_.shard_module(model(), {"0.weight": "S(0)"}),
        r"such as ModelPlan\(Mesh.of\(tp=2\), .* got dict",
    ),
    "ranks without a function": (lambda: any_.run_local(2, print), r"run_local\(fn, world_size, \*args\)"),
    "a name to launch": (lambda: any_.launch("main", 2), r"launch\(fn, world_size, \*args\) .*; got str and int"),
    "an optimizer that is made": (
        lambda: any_.ShardedOptimizer(dict(model().named_parameters()), torch.optim.SGD(model().parameters())),
        "takes the class of an optimizer and its options, .* got SGD as the class",
    ),
    "parameters without names": (
        lambda: any_.ShardedOptimizer(model().parameters(), torch.optim.SGD),
        r"by name, such as dict\(model.named_parameters\(\)\)",
    ),
    "a size before the spec": (lambda: any_.zeros(4, 4), r"the spec comes first.* zeros\(ChunkSpec\(0, 4\), 8, 4\)"),
    "a tensor as a spec": (lambda: any_.ShardedTensor(X), r"shard\(x, spec\) lays out an existing tensor"),
    "a text to replicate": (lambda: any_.replicate("x"), "replicate takes a tensor that every rank has, got str"),
    "a plain tensor as a DTensor": (lambda: shardwise.compat.from_dtensor(X), "takes a DTensor, got Tensor; shard"),
    "a package as a text": (lambda: shardwise.compat.install("torch"), r"a list of packages, .*; pass \['torch'\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_write(name: str) -> None:
    call, text = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_checkpoints_of_other_things(tmp_path: Path) -> None:
    save: Any = shardwise.save
    with pytest.raises(shardwise.CheckpointError, match=r"got Sequential: pass its state_dict\(\)"):
        save(model(), tmp_path / "a")
    with pytest.raises(shardwise.CheckpointError, match=r"got ndarray: pass torch.as_tensor\(x\)"):
        save({"x": X.numpy()}, tmp_path / "a")
    with pytest.raises(shardwise.CheckpointError, match=r"got dict; the state comes first: save\(state, path\)"):
        save(str(tmp_path / "a"), {"x": X})
    with pytest.raises(shardwise.CheckpointError, match="no such checkpoint"):
        shardwise.load({"x": X}, tmp_path / "a")


def test_what_is_right_beside_the_mistakes() -> None:
    assert plan(ROWS, COLUMNS, itemsize=4).moved_bytes == 64
    assert lay_out(X, ONE, [TorchReplicate()]).placements == (Replicate(),)
    assert run_local(lambda comm: comm.rank, 2) == [0, 1]
    assert callable(launch) and issubclass(ShardedOptimizer, torch.optim.Optimizer)
