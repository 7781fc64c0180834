"""Checkpoints between real processes: ours and torch.distributed.checkpoint's, with ShardedTensors and DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, zeros
from torch.distributed.tensor import Shard as TorchShard

import shardwise
from shardwise import ChunkSpec, GridSpec, Mesh, MeshSpec, Partial, Shard, ShardedTensor, default_comm
from shardwise.checkpoint import reshard
from shardwise.tensor import wrap
from tests.moving import error_of, layouts, local_parts, values
from tests.world import Ranks, world_fixture

world = world_fixture(4)
SHAPE = (7, 9)
EVERY = layouts(*SHAPE)
KINDS = [name for name, layout in EVERY.items() if layout.pending is None]


def whole() -> Tensor:
    return values(SHAPE, torch.float32)


def held(name: str) -> ShardedTensor:
    comm = default_comm()
    return wrap(EVERY[name], tuple(local_parts(EVERY[name], comm.rank, whole())), comm, dtype=torch.float32)


def blank(name: str) -> ShardedTensor:
    comm = default_comm()
    parts = tuple(torch.full(s, -1.0) for s in EVERY[name].local_shapes(comm.rank))
    return wrap(EVERY[name], parts, comm, dtype=torch.float32)


def dcp_save(path: str) -> None:
    dcp.save({"t": {name: held(name) for name in KINDS}, "plain": torch.arange(3)}, checkpoint_id=path)


def dcp_load(path: str) -> list[bool]:
    """Every tensor into another layout than it was saved in."""
    names = dict(zip(KINDS, KINDS[3:] + KINDS[:3], strict=True))
    state: dict[str, Any] = {"t": {old: blank(new) for old, new in names.items()}, "plain": torch.zeros(3)}
    dcp.load(state, checkpoint_id=path)
    return [torch.equal(t.full(), whole()) for t in state["t"].values()] + [state["plain"].tolist() == [0, 1, 2]]


def dtensor(*placements: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return distribute_tensor(whole().cpu(), mesh, placements)


def dcp_dtensor_there_and_back(path: str) -> list[bool]:
    dcp.save({"x": dtensor(TorchShard(0), TorchShard(1))}, checkpoint_id=f"{path}/dtensor")
    ours: dict[str, Any] = {"x": blank("two boxes or none")}
    dcp.load(ours, checkpoint_id=f"{path}/dtensor")
    dcp.save(ours, checkpoint_id=f"{path}/ours")
    mesh = init_device_mesh("cpu", (4,))
    theirs: dict[str, Any] = {"x": zeros(*SHAPE, device_mesh=mesh, placements=[TorchShard(1)])}
    dcp.load(theirs, checkpoint_id=f"{path}/ours")
    return [torch.equal(ours["x"].full(), whole()), torch.equal(theirs["x"].full_tensor(), whole().cpu())]


def dcp_refuses_pending(path: str) -> str:
    spec = MeshSpec(Mesh.of(x=4), (Partial("sum"),))
    pending = wrap(spec.layout(SHAPE), (whole(),), default_comm())
    return error_of(pending.__create_chunk_list__)


def ours_with_dtensors(path: str) -> list[bool]:
    made = {
        "sharded": dtensor(TorchShard(0), TorchShard(0)),
        "copied": dtensor(Replicate(), TorchShard(1)),
        "ours": held("grid"),
    }
    shardwise.save(made, path)
    mesh = init_device_mesh("cpu", (4,))
    state = {
        "sharded": blank("columns"),
        "copied": zeros(*SHAPE, device_mesh=mesh, placements=[TorchShard(0)]),
        "ours": zeros(*SHAPE, device_mesh=mesh, placements=[Replicate()]),
    }
    shardwise.load(state, path)
    tensors = [state["sharded"].full(), state["copied"].full_tensor(), state["ours"].to_local()]
    return [torch.equal(t.cpu(), whole().cpu()) for t in tensors]


def ours_between_processes(path: str) -> bool:
    shardwise.save({"x": held("rows"), "rank": 0}, path)
    saving = shardwise.save({"x": held("ragged"), "rank": 1}, path, async_op=True)
    saving.wait()
    state = {"x": shardwise.zeros(GridSpec((2, 2), [[0, 1], [2, 3]]), *SHAPE), "rank": 9}
    shardwise.load(state, path)
    return torch.equal(state["x"].full(), whole()) and state["rank"] == 1


def damaged_on_every_rank(path: str) -> str:
    tensor = shardwise.full(ChunkSpec(1, 4), SHAPE, 5.0)
    told = error_of(shardwise.load, {"x": tensor, "rank": 0}, path)
    assert torch.equal(tensor.full(), torch.full(SHAPE, 5.0)), "nothing is half-loaded"
    return told


def hugging_face(path: str) -> bool:
    state = {"model.a": held("rows"), "model.b": held("columns"), "model.c": torch.arange(5, dtype=torch.bfloat16)}
    shardwise.save_hf(state, path, max_file_bytes=300)
    back = {
        "model.a": shardwise.zeros(MeshSpec(Mesh.of(x=4), (Shard(1),)), *SHAPE),
        "model.b": torch.zeros(SHAPE),
        "model.c": torch.zeros(5, dtype=torch.bfloat16),
    }
    shardwise.load(back, path)
    dist.barrier()
    return (
        torch.equal(back["model.a"].full(), whole())
        and torch.equal(back["model.b"], whole())
        and back["model.c"].tolist() == [0, 1, 2, 3, 4]
    )


def test_torchs_checkpoint_saves_and_reshards_sharded_tensors(world: Ranks, tmp_path: Path) -> None:
    world.run(dcp_save, str(tmp_path / "c"))
    assert all(all(found) for found in world.run(dcp_load, str(tmp_path / "c")))


def test_torchs_checkpoint_both_ways_with_dtensor(world: Ranks, tmp_path: Path) -> None:
    assert world.run(dcp_dtensor_there_and_back, str(tmp_path)) == [[True, True]] * 4


def test_torchs_checkpoint_is_not_given_addends(world: Ranks, tmp_path: Path) -> None:
    assert "redistribute it to Shard or Replicate first" in world.run(dcp_refuses_pending, str(tmp_path))[0]


def test_dtensors_in_our_checkpoints(world: Ranks, tmp_path: Path) -> None:
    assert world.run(ours_with_dtensors, str(tmp_path / "c")) == [[True] * 3] * 4


def test_saving_loading_and_damage_between_processes(world: Ranks, tmp_path: Path) -> None:
    assert world.run(ours_between_processes, str(tmp_path / "c")) == [True] * 4
    file = sorted((tmp_path / "c").glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    told = world.run(damaged_on_every_rank, str(tmp_path / "c"))
    assert len(set(told)) == 1 and f"{file.name}: tensor 'x': bytes" in told[0] and "damaged" in told[0]


def test_hugging_face_folders(world: Ranks, tmp_path: Path) -> None:
    assert world.run(hugging_face, str(tmp_path / "m")) == [True] * 4
    assert len(list((tmp_path / "m").glob("model-0000*-of-00002.safetensors"))) == 2
    with shardwise.open(tmp_path / "m") as opened:
        assert torch.equal(opened["model.b"][2:5, ::3], whole()[2:5, ::3].cpu())


def test_torchs_folders_of_many_ranks_are_resharded_on_disk(world: Ranks, tmp_path: Path) -> None:
    world.run(dcp_save, str(tmp_path / "a"))
    world.run(dcp_dtensor_there_and_back, str(tmp_path))
    for path, names in (("a", [f"t.{name}" for name in KINDS]), ("dtensor", ["x"])):
        with shardwise.open(tmp_path / path) as checkpoint:
            checkpoint.verify()
            assert all(torch.equal(checkpoint[name].read(), whole().cpu()) for name in names)
    report = reshard(tmp_path / "a", tmp_path / "b", layout="S(1)", ranks=3, format="dcp")
    assert report.ranks == (0, 1, 2) and report.left_out == ()
    assert all(all(found) for found in world.run(dcp_load, str(tmp_path / "b")))
