"""Torch's own words on real ranks: DeviceMesh, placements, submeshes, DTensors, to_local, data parallel wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import Mesh, MeshSpec, ModelPlan, Partial, Replicate, Shard, ShardedTensor
from tests.device import DEVICE, PLACE
from tests.world import Ranks, on_host, world_fixture

world = world_fixture(4, shared=True)
WHOLE = torch.arange(48.0).reshape(8, 6)
S0, S1, R = TorchShard(0), TorchShard(1), TorchReplicate()


def square() -> DeviceMesh:
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))


def own_part(mesh: DeviceMesh, placements: list[Any], whole: torch.Tensor = WHOLE) -> torch.Tensor:
    """What the rank at this coordinate has; `distribute_tensor` gives another part on a mesh of unsorted ranks."""
    part = whole
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            parts = part.chunk(mesh.size(axis), placement.dim)
            at = (mesh.get_coordinate() or [])[axis]
            part = parts[at] if at < len(parts) else parts[0].narrow(placement.dim, 0, 0)
    return part


def dtensor(mesh: DeviceMesh, placements: list[Any], whole: torch.Tensor = WHOLE) -> DTensor:
    return DTensor.from_local(own_part(mesh, placements, whole), mesh, placements)


def torchs_parts_are_ours() -> list[bool]:
    """Whether what we make with torch's words has the local tensors that the mesh says."""
    meshes = [square(), init_device_mesh(DEVICE, (4,)), DeviceMesh(DEVICE, [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))]
    found = []
    for mesh in meshes:
        for placements in ([S0, R], [S1, S0], [R, R], [S0, S0]) if mesh.ndim == 2 else ([S0], [S1], [R]):
            part = own_part(mesh, placements)
            ours = shardwise.shard(WHOLE, mesh, placements)
            again = shardwise.from_local(part, mesh, placements)
            spec = shardwise.shard(WHOLE, MeshSpec(mesh, placements))
            moved = shardwise.shard(WHOLE, Mesh.of(all=4), [Replicate()]).redistribute(mesh, placements)
            found += [torch.equal(x.to_local(), part) for x in (ours, again, spec, moved)]
            found.append(all(torch.equal(x.full_tensor(), WHOLE) for x in (ours, again, spec, moved)))
    return found


def test_tensors_are_made_and_moved_with_a_device_mesh_and_torchs_placements(world: Ranks) -> None:
    for found in world.run(torchs_parts_are_ours):
        assert found == [True] * 55


def of_strided_shards() -> tuple[Any, ...]:
    spec = MeshSpec(square(), [_StridedShard(0, split_factor=2), S0])
    theirs = DTensor.from_local(WHOLE[:2], square(), [_StridedShard(0, split_factor=2), S0])
    return (
        spec.order,
        shardwise.shard(WHOLE, spec).to_local()[:, 0].tolist(),
        shardwise.compat.from_dtensor(theirs).full().shape,
    )


def test_a_strided_shard_is_an_order_of_splits(world: Ranks) -> None:
    for rank, (order, rows, made) in enumerate(world.run(of_strided_shards)):
        assert order == ("tp", "dp")
        assert rows == WHOLE[[[0, 1], [4, 5], [2, 3], [6, 7]][rank], 0].tolist()
        assert tuple(made) == (8, 6)


def on_a_submesh() -> tuple[Any, ...]:
    """Each row of the mesh has a tensor and a model of its own."""
    mesh, row = square(), dist.get_rank() // 2
    ours = shardwise.shard(WHOLE + row, mesh["tp"], [S0])
    layer = nn.Linear(6, 4)
    nn.init.constant_(layer.weight, row + 1.0)
    shardwise.shard_module(layer, ModelPlan(mesh["tp"], {"weight": S0, "bias": [Shard(0)]}, input_plan="replicated"))
    parts = shardwise.from_local(torch.ones(dist.get_rank() % 2 + 1, 3), mesh["tp"], [S0])
    return (
        ours.comm.ranks,
        ours.full().sum().item(),
        layer.weight.full().mean().item(),
        layer.weight.comm.ranks,
        parts.placements,
    )


def test_a_submesh_has_the_ranks_of_its_own_group(world: Ranks) -> None:
    for rank, (ranks, total, mean, of_layer, parts) in enumerate(world.run(on_a_submesh)):
        row = rank // 2
        assert ranks == of_layer == (2 * row, 2 * row + 1)
        assert (total, mean) == (WHOLE.sum().item() + 48 * row, row + 1)
        assert parts == (Shard(0, sizes=(1, 2)),)


def on_another_groups_submesh() -> None:
    shardwise.shard(WHOLE, MeshSpec(square()["tp"], [S0]))


def test_a_spec_of_a_submesh_on_all_ranks_is_refused_everywhere(world: Ranks) -> None:
    for outcome in world.outcomes(on_another_groups_submesh):
        assert "the ranks pass different specs" in str(outcome.error)


def with_dtensors() -> list[bool]:
    mesh = square()
    theirs = dtensor(mesh, [S0, S1])
    ours = shardwise.shard(WHOLE * 2, MeshSpec(mesh, [S0, R]))
    sums = [ours + theirs, theirs + ours, torch.add(ours, other=theirs)]
    found = [torch.equal(x.full(), WHOLE * 3) and isinstance(x, ShardedTensor) for x in sums]
    found.append(torch.equal(shardwise.shard(theirs, mesh, [R, S0]).full(), WHOLE))
    found.append(torch.equal(shardwise.shard(theirs, MeshSpec(Mesh.of(all=4), [Shard(1)])).full(), WHOLE))
    found.append(torch.equal(torch.cat([ours, theirs]).full(), torch.cat([WHOLE * 2, WHOLE])))
    with torch.no_grad():
        ours.copy_(theirs)
    found.append(torch.equal(ours.full(), WHOLE))
    leaf = dtensor(mesh, [S0, R]).requires_grad_()
    (shardwise.shard(leaf, mesh, [R, S1]) * ours).sum().backward()
    found.append(torch.equal(leaf.grad.to_local(), own_part(mesh, [S0, R])))
    return found


def test_a_dtensor_is_converted_by_shard_and_by_operators(world: Ranks) -> None:
    for found in world.run(with_dtensors):
        assert found == [True] * 8


def model_of_dtensors() -> tuple[Any, ...]:
    mesh = square()
    layer = nn.Linear(6, 4)
    for name, whole in (("weight", WHOLE[:4]), ("bias", torch.ones(4))):
        setattr(layer, name, nn.Parameter(dtensor(mesh, [S0, R], whole)))
    shardwise.shard_module(layer, ModelPlan(mesh, {"weight": "tp: S(0)"}, input_plan="replicated"))
    return type(layer.weight), layer.weight.placements, layer(WHOLE).full()


def test_a_plan_converts_parameters_that_are_dtensors(world: Ranks) -> None:
    for kind, placements, found in world.run(model_of_dtensors):
        assert kind is ShardedTensor
        assert placements == (Replicate(), Shard(0))
        assert torch.equal(found, nn.functional.linear(WHOLE, WHOLE[:4], torch.ones(4)))


def gradients_like_torchs() -> list[tuple[str, bool]]:
    """The gradient of a leaf through to_local and full_tensor, ours beside DTensor's, for each placement."""
    with on_host():
        return _compare_gradients(init_device_mesh("cpu", (4,)), dist.get_rank(), WHOLE.cpu())


def _compare_gradients(mesh: DeviceMesh, rank: int, whole: torch.Tensor) -> list[tuple[str, bool]]:
    found = []
    for grads in (None, [TorchPartial()], [R], [S0]):
        for placement in (S0, R):
            own = whole[:2] if placement == S0 else whole
            if grads == [S0] and placement == R:
                continue
            shards = [DTensor.from_local(own.clone(), mesh, [placement]).requires_grad_() for _ in range(2)]
            ours = shardwise.compat.from_dtensor(shards[1])
            if grads is None or grads == [placement] or placement == R:
                for x in (shards[0], ours):
                    (x.to_local(grad_placements=grads) * (rank + 1)).sum().backward()
                found.append(
                    (f"{placement} {grads}", torch.equal(shards[0].grad.full_tensor(), shards[1].grad.full_tensor()))
                )
            if grads == [S0]:
                continue
            for x in (shards[0], ours):
                (x.full_tensor(grad_placements=grads) * (1.0 if grads in (None, [R]) else rank + 1)).sum().backward()
            found.append((f"full {placement}", torch.equal(shards[0].grad.full_tensor(), shards[1].grad.full_tensor())))
    return found


def test_gradients_of_local_and_full_tensors_are_those_of_dtensor(world: Ranks) -> None:
    for found in world.run(gradients_like_torchs):
        assert len(found) > 8
        assert all(same for _, same in found), found


def names() -> tuple[Any, ...]:
    mesh = square()
    x = shardwise.shard(WHOLE, mesh, [S0, TorchReplicate()])
    made = shardwise.shard(WHOLE, Mesh.of(dp=2, tp=2), (Shard(0), Replicate()))
    lone = shardwise.shard(WHOLE, shardwise.ChunkSpec(0, 4))
    with pytest.raises(ValueError, match="device_mesh needs a mesh, and this tensor is laid out by ChunkSpec"):
        lone.device_mesh  # noqa: B018  # the attribute is what is asked for
    pending = shardwise.from_local(torch.ones(2), mesh, [TorchPartial(), R])
    total = pending.redistribute(device_mesh=mesh, placements=[R, R])
    answers = x.placements[0].is_shard(0), x.placements[1].is_replicate(), pending.placements[0].is_partial("sum")
    return made.device_mesh.mesh_dim_names, made.device_mesh is x.device_mesh, answers, total.to_local().tolist()


def test_names_of_dtensor_exist(world: Ranks) -> None:
    for axes, same, answers, total in world.run(names):
        assert axes == ("dp", "tp")
        assert same
        assert answers == (True, True, True)
        assert total == [2.0, 2.0]


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": fully_shard,
    "FullyShardedDataParallel": lambda m: FullyShardedDataParallel(m, device_id=torch.device(PLACE)),
}


def wrap_model(name: str, layout: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    shardwise.shard_module(model, ModelPlan(Mesh.of(dp=2, tp=2), {"**": layout}, input_plan="dp: S(0)"))
    WRAPPERS[name](model)


@pytest.mark.parametrize("layout", ["tp: S(0)", "R, R"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_data_parallel_wrappers_say_on_every_rank_what_to_write_instead(world: Ranks, name: str, layout: str) -> None:
    for outcome in world.outcomes(wrap_model, name, layout):
        text = str(outcome.error)
        assert f"{name} cannot wrap a model whose parameters are ShardedTensors" in text
        assert "input_plan='dp: S(0)'" in text


def collective() -> None:
    dist.all_reduce(shardwise.shard(WHOLE, Mesh.of(all=4), [Shard(0)]))


def test_collectives_of_torch_say_what_they_take(world: Ranks) -> None:
    for outcome in world.outcomes(collective):
        assert "the collectives of torch.distributed take plain tensors; pass x.local_tensor()" in str(outcome.error)


def pending_to_local() -> list[float]:
    x = shardwise.from_local(torch.ones(2).requires_grad_(), Mesh.of(all=4), [Partial()])
    x.to_local().sum().backward()
    return [*x.grad.full().tolist(), *x.detach().full_tensor().tolist()]


def test_the_local_tensor_of_a_pending_sum_is_this_ranks_addend(world: Ranks) -> None:
    assert world.run(pending_to_local) == [[1.0, 1.0, 4.0, 4.0]] * 4
