"""DTensor and ShardedTensor on real ranks: the same memory and values, gradients that pass, rules right for both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.experimental import register_sharding as torchs_register_sharding

import shardwise
from shardwise.compat import dtensor_fallback, from_dtensor, to_dtensor
from shardwise.geometry import Mesh, MeshSpec, Partial, Replicate, Shard
from tests.device import DEVICE
from tests.world import Ranks, on_host, world_fixture

world = world_fixture(2)
WHOLE = torch.arange(24.0).reshape(4, 6)
lib = torch.library


def flip_op(name: str) -> Any:
    """A custom operator `name(x, int[] dims)` that flips dims; made once in a process."""
    if not hasattr(torch.ops.shardwise_test, name):
        lib.define(f"shardwise_test::{name}", "(Tensor x, int[] dims) -> Tensor")
        lib.impl(f"shardwise_test::{name}", "CompositeExplicitAutograd", lambda x, dims: torch.flip(x, dims))
        lib.register_fake(f"shardwise_test::{name}", lambda x, dims: torch.empty_like(x))
    return getattr(torch.ops.shardwise_test, name).default


def flip_rule(x: Any, dims: list[int]) -> list[Any]:
    free = [d for d in range(x.ndim) if d not in dims]
    return [([TorchReplicate()], [TorchReplicate(), None])] + [([TorchShard(d)], [TorchShard(d), None]) for d in free]


def flips(op: Any) -> list[bool]:
    """Whether flips along each dim of one DTensor are right; rows are sharded."""
    whole = WHOLE.cpu()
    x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [TorchShard(0)])
    return [torch.equal(op(x, dims).full_tensor(), whole.flip(dims)) for dims in ([1], [0])]


def both_rules_flip() -> tuple[list[bool], list[bool]]:
    torchs_register_sharding(flip_op("flip_by_torch"))(flip_rule)
    theirs = flips(flip_op("flip_by_torch"))
    shardwise.register_sharding(flip_op("flip_by_us"), dtensor=True)(flip_rule)
    return theirs, flips(flip_op("flip_by_us"))


def test_torchs_key_forgets_the_dims_and_ours_does_not(world: Ranks) -> None:
    for theirs, ours in world.run(both_rules_flip):
        assert theirs == [True, False]
        assert ours == [True, True]


def relu_placements() -> tuple[bool, str, str, str]:
    """Whether torch has a single-dim strategy for relu; where relu of a row-sharded DTensor lies by torch's
    registration of "replicate only", by ours, and after."""
    relu = torch.ops.aten.relu.default
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(WHOLE.cpu(), mesh, [TorchShard(0)])

    def replicated(x: Any) -> list[Any]:
        return [([TorchReplicate()], [TorchReplicate()])]

    propagator = DTensor._op_dispatcher.sharding_propagator
    before = propagator.op_strategy_funcs.get(relu)
    torchs_register_sharding(relu)(replicated)
    theirs = str(torch.relu(x).placements)
    propagator.op_strategy_funcs.pop(relu)
    if before is not None:
        propagator.op_strategy_funcs[relu] = before
    with shardwise.sharding_rule(relu, replicated, dtensor=True):
        ours = str(torch.relu(x).placements)
    single = relu in getattr(propagator, "op_single_dim_strategy_funcs", {})
    return single, theirs, ours, str(torch.relu(x).placements)


def test_a_registered_rule_wins_over_torchs_own_and_leaves_again(world: Ranks) -> None:
    shard, replicate = str((TorchShard(0),)), str((TorchReplicate(),))
    for ignored_by_torch, theirs, ours, after in world.run(relu_placements):
        assert theirs == (shard if ignored_by_torch else replicate)
        assert (ours, after) == (replicate, shard)


def split_op() -> Any:
    if not hasattr(torch.ops.shardwise_test, "halves"):
        lib.define("shardwise_test::halves", "(Tensor x, *, Tensor? scale=None) -> Tensor[]")
        lib.impl("shardwise_test::halves", "CompositeExplicitAutograd", halves)
        lib.register_fake("shardwise_test::halves", halves)
    return torch.ops.shardwise_test.halves.default


def halves(x: Tensor, *, scale: Tensor | None = None) -> list[Tensor]:
    scaled = x if scale is None else x * scale
    return [scaled[:, :3].clone(), scaled[:, 3:].clone()]


def halves_rule(x: Any, *, scale: Any = None) -> list[Any]:
    named = [] if scale is None else [Replicate()]
    return [([Replicate()], [Replicate(), *named]), ([Shard(0)], [Shard(0), *named])]


def listed_outputs() -> list[bool]:
    op = split_op()
    shardwise.register_sharding(op, dtensor=True)(halves_rule)
    mesh, whole = init_device_mesh("cpu", (2,)), WHOLE.cpu()
    x = distribute_tensor(whole, mesh, [TorchShard(0)])
    scale = distribute_tensor(torch.full((1,), 2.0, device="cpu"), mesh, [TorchReplicate()])
    plain, scaled = op(x), op(x, scale=scale)
    right = [torch.equal(a.full_tensor(), b) for a, b in zip(plain, halves(whole), strict=True)]
    right += [torch.equal(a.full_tensor(), b * 2) for a, b in zip(scaled, halves(whole), strict=True)]
    return [*right, all(t.placements == (TorchShard(0),) for t in (*plain, *scaled))]


def test_lists_of_tensors_and_named_tensors(world: Ranks) -> None:
    assert world.run(listed_outputs) == [[True] * 5] * 2


def round_trips() -> list[tuple[str, bool, bool, bool]]:
    """Each layout to DTensor and back: its placements there, equal values, shared memory, the same layout again."""
    line, square = Mesh.of(tp=2), Mesh.of(dp=1, tp=2)
    specs = [
        MeshSpec(line, (Shard(0),)),
        MeshSpec(line, (Shard(1),)),
        MeshSpec(line, (Partial("sum"),)),
        MeshSpec(line, (Shard(1, sizes=(3, 3)),)),
        MeshSpec(square, (Replicate(), Shard(0))),
        MeshSpec(square, (Shard(0), Shard(0))),
    ]
    found = [_go_round(WHOLE, spec, by_torch=DEVICE == "cpu") for spec in specs]
    with on_host():
        return found + [_go_round(WHOLE.cpu(), spec, by_torch=True) for spec in specs if DEVICE != "cpu"]


def _go_round(whole: Tensor, spec: MeshSpec, *, by_torch: bool) -> tuple[str, bool, bool, bool]:
    """`by_torch`: the DTensor is gathered too. Gloo cannot gather device memory in this way, and torch crashes."""
    x = shardwise.shard(whole, spec)
    there = to_dtensor(x)
    back = from_dtensor(there)
    shared = there.to_local().data_ptr() == x.local_tensor().data_ptr() == back.local_tensor().data_ptr()
    same = torch.equal(back.full(), whole) and (not by_torch or torch.equal(there.full_tensor(), whole))
    same = same and there.device == x.device == whole.device
    return str(there.placements), same, shared, back.sharding == x.sharding


def test_layouts_there_and_back(world: Ranks) -> None:
    results = world.run(round_trips)
    for found in results:
        assert all(same and again for _, same, _, again in found)
        assert all(shared for _, _, shared, _ in found)
    assert results[0][3][0] == str((TorchShard(1),))


def gradients() -> tuple[bool, bool]:
    mesh = init_device_mesh(DEVICE, (2,))
    weight = torch.arange(24.0).reshape(4, 6)
    own, own_weight = (t.chunk(2)[dist.get_rank()] for t in (WHOLE, weight))
    there = DTensor.from_local(own, mesh, [TorchShard(0)]).requires_grad_()
    here = from_dtensor(there)
    (here.full() * weight).sum().backward()
    grad = there.grad
    assert isinstance(grad, DTensor) and grad.placements == (TorchShard(0),)
    passed_on = torch.equal(grad.to_local(), own_weight)
    x = shardwise.shard(WHOLE, MeshSpec(Mesh.of(tp=2), (Shard(0),))).requires_grad_()
    product = to_dtensor(x, mesh) * DTensor.from_local(own_weight, mesh, [TorchShard(0)])
    product.to_local().sum().backward()
    return passed_on, x.grad is not None and torch.equal(x.grad.full(), weight)


def test_gradients_pass_both_ways(world: Ranks) -> None:
    assert world.run(gradients) == [(True, True)] * 2


def pending_from_torch() -> bool:
    mesh = init_device_mesh(DEVICE, (2,))
    there = DTensor.from_local(WHOLE * (dist.get_rank() + 1), mesh, [TorchPartial()], run_check=False)
    return torch.equal(from_dtensor(there).full(), WHOLE * 3)


def test_pending_sums(world: Ranks) -> None:
    assert world.run(pending_from_torch) == [True] * 2


def refused() -> list[str]:
    x = shardwise.shard(WHOLE, MeshSpec(Mesh.of(tp=2), (Shard(0, sizes=(3, 1)),)))
    pieces = shardwise.shard(WHOLE, shardwise.ChunkSpec(0, ranks=(0, 1, 0, 1)))
    texts = []
    for tensor in (x, pieces):
        try:
            to_dtensor(tensor)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_what_has_no_counterpart_is_refused(world: Ranks) -> None:
    for ragged, pieces in world.run(refused):
        assert "sizes=(3, 1)) on axis 'tp' has no counterpart in DTensor" in ragged
        assert "needs a mesh and one local tensor on each rank" in pieces


def only_there() -> Any:
    if not hasattr(torch.ops.shardwise_test, "only_there"):
        lib.define("shardwise_test::only_there", "(Tensor x) -> Tensor")
        lib.impl("shardwise_test::only_there", "CompositeExplicitAutograd", lambda x: x.flip(1))
        lib.register_fake("shardwise_test::only_there", lambda x: torch.empty_like(x))
    return torch.ops.shardwise_test.only_there.default


def fallback() -> tuple[str, bool, list[tuple[Any, ...]]]:
    op = only_there()
    torchs_register_sharding(op)(lambda x: [([TorchShard(0)], [TorchShard(0)])])
    x = shardwise.shard(WHOLE, MeshSpec(Mesh.of(tp=2), (Shard(0),)))
    try:
        op(x)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    with dtensor_fallback(), shardwise.explain() as log:
        y = op(x)
    right = isinstance(y, shardwise.ShardedTensor) and torch.equal(y.full(), WHOLE.flip(1))
    return refused, right, [(e.name, e.inputs) for e in log.entries if "DTensor" in e.name]


def test_a_function_without_a_rule_runs_on_dtensor_when_allowed(world: Ranks) -> None:
    for refused_text, right, log in world.run(fallback):
        assert "no rule" in refused_text
        assert right
        assert len(log) == 1
        assert "only_there" in log[0][0]
        assert log[0][1] == ("tp=2: S(0)",)
