"""torch 1.13's partial and replicated tensors: values, classes, errors and gradients, and beside sharded tensors."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import Comm, Mesh, run_local
from shardwise.compat import install
from shardwise.compat._shard import _shard_tensor, shard_parameter, sharded_tensor
from shardwise.compat._shard.partial_tensor import _PartialTensor
from shardwise.compat._shard.replicated_tensor import ReplicatedTensor
from shardwise.compat._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from tests.device import DEVICE, PLACE

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{PLACE}" for rank in ranks])


def matrix(*size: int, seed: int = 0) -> Tensor:
    return torch.sin(torch.arange(float(torch.Size(size).numel()), device=DEVICE) * 1.7 + seed).reshape(size)


def reduce(op: Any, parts: list[Tensor]) -> Tensor:
    stacked = torch.stack(parts)
    return stacked.sum(0) if op == SUM else stacked.amax(0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
@pytest.mark.parametrize(("size", "op"), [((13, 21), SUM), ((12, 22), MAX), ((3, 5), SUM)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_partial_tensor_is_reduced_into_chunks(
    size: tuple[int, int], op: Any, dim: int, order: tuple[int, ...]
) -> None:
    spec = chunks(dim, *order)
    wanted = reduce(op, [matrix(*size, seed=rank) for rank in range(4)])

    def body(comm: Comm) -> None:
        partial = _PartialTensor(matrix(*size, seed=comm.rank), reduce_op=op)
        assert partial.size() == torch.Size(size) and partial._reduce_op == op
        made = partial.reshard(spec)
        assert type(made) is sharded_tensor.ShardedTensor and made.sharding_spec() is spec
        torch.testing.assert_close(made.full(), wanted)
        own = made.local_shards()[0].metadata if made.local_shards() else None
        assert own is None or own.shard_sizes[dim] == -(-size[dim] // 4) or comm.rank in order[-2:]

    run_local(body, 4)


PENDING: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "transpose": (lambda x: x.transpose(0, 1), lambda t: t.t()),
    "torch.transpose": (lambda x: torch.transpose(x, 0, 1), lambda t: t.t()),
    "cat": (lambda x: torch.cat([x, x]), lambda t: torch.cat([t, t])),
    "cat along dim 1": (lambda x: torch.cat([x, x, x], dim=1), lambda t: torch.cat([t, t, t], 1)),
    "chunk": (lambda x: x.chunk(2, 0)[1], lambda t: t.chunk(2, 0)[1]),
    "mul": (lambda x: x * 2, lambda t: t * 2),
    "add": (lambda x: x + x, lambda t: t + t),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), lambda t: t.t()),
    "detach": (lambda x: x.detach(), lambda t: t),
    "deepcopy": (copy.deepcopy, lambda t: t),
}


@pytest.mark.parametrize("name", PENDING)
def test_what_is_computed_with_a_partial_tensor_is_pending_still(name: str) -> None:
    function, dense = PENDING[name]
    wanted = dense(matrix(6, 4, seed=0) + matrix(6, 4, seed=1))

    def body(comm: Comm) -> None:
        made = function(_PartialTensor(matrix(6, 4, seed=comm.rank)))
        assert type(made) is _PartialTensor
        torch.testing.assert_close(made._local_shard, dense(matrix(6, 4, seed=comm.rank)))
        torch.testing.assert_close(made.reshard(chunks(0, 1, 0)).full(), wanted)

    run_local(body, 2)


def test_what_is_not_linear_in_the_addends_is_computed_with_their_sum() -> None:
    def body(comm: Comm) -> None:
        made = torch.exp(_PartialTensor(matrix(6, 4, seed=comm.rank)))
        assert type(made) is sharded_tensor.ShardedTensor
        torch.testing.assert_close(made.full(), (matrix(6, 4, seed=0) + matrix(6, 4, seed=1)).exp())

    run_local(body, 2)


def test_gradients_of_a_partial_tensor_are_those_of_the_sum() -> None:
    def body(comm: Comm) -> Tensor:
        own = matrix(5, 4, seed=comm.rank).requires_grad_()
        (_PartialTensor(own).reshard(chunks(1, 0, 1)) * 3).sum().backward()
        assert own.grad is not None
        return own.grad

    for gradient in run_local(body, 2):
        assert torch.equal(gradient, torch.full((5, 4), 3.0, device=DEVICE))


def test_partial_tensors_are_refused_in_the_words_of_torch() -> None:
    def body(comm: Comm) -> None:
        pieces = [ShardMetadata([5 * r, 0], [5, 5], f"rank:{r}/{PLACE}") for r in range(2)]
        with pytest.raises(NotImplementedError, match=r"Only ChunkShardingSpec supported for reshard\."):
            _PartialTensor(matrix(10, 5)).reshard(EnumerableShardingSpec(pieces))
        with pytest.raises(NotImplementedError, match=r"Only real partial tensor supported for reshard\."):
            _PartialTensor(torch.ones(4, dtype=torch.cfloat, device=DEVICE)).reshard(chunks(0, 0, 1))
        with pytest.raises(ValueError, match=r"reduce_op needs to be a member of .*\.ReduceOp, got 'sum'"):
            _PartialTensor(matrix(4), reduce_op="sum")
        one = _PartialTensor(matrix(10))
        with pytest.raises(RuntimeError, match="All inputs need to be an instance of _PartialTensor"):
            torch.cat([one, matrix(10)])
        with pytest.raises(RuntimeError, match="reduce_ops need to be the same"):
            torch.cat([one, _PartialTensor(matrix(10), reduce_op=MAX)])
        with pytest.raises(RuntimeError, match='"out" kwarg is not supported'):
            torch.cat([one, one], out=matrix(10))

    run_local(body, 2)


def test_replicated_tensors_are_validated() -> None:
    def body(comm: Comm) -> None:
        own = torch.full((3, 3), 4.0, device=DEVICE)
        replica = ReplicatedTensor(own)
        assert replica.validate() and replica.process_group is not None
        if comm.rank == 2:
            own += 3
        with pytest.raises(ValueError, match="ReplicatedTensor have different values on rank 0 and 2"):
            replica.validate()

    run_local(body, 3)


def test_only_replicated_tensors_together_give_one() -> None:
    def body(comm: Comm) -> None:
        one, other, plain = ReplicatedTensor(matrix(3)), ReplicatedTensor(matrix(3) + 1), matrix(3)
        product = one * other
        assert type(product) is ReplicatedTensor and product.process_group is one.process_group
        torch.testing.assert_close(product + plain, matrix(3) * (matrix(3) + 1) + plain)
        assert [type(x) for x in (one + plain, plain + one, one + 2, torch.cat([one, plain]))] == [Tensor] * 4
        assert type(one.shape) is torch.Size and type(one.grad) is type(None)
        groups = [comm.subset([comm.rank]), comm]
        with pytest.raises(RuntimeError, match="must be in the same process group in torch function 'mul'"):
            ReplicatedTensor(plain, groups[0]) * ReplicatedTensor(plain, groups[1])

    run_local(body, 2)


BESIDE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, r: x + r,
    "add from the left": lambda x, r: r + x,
    "mul": lambda x, r: x * r,
    "layer_norm": lambda x, r: F.layer_norm(x, (6,), r, r),
    "native": lambda x, r: x.redistribute(Mesh.of(all=2), "S(1)") - r,
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("dim", [0, 1])
def test_beside_sharded_tensors_a_replicated_one_is_the_same_on_every_rank(name: str, dim: int) -> None:
    function = BESIDE[name]
    dense, weight = matrix(5, 6).requires_grad_(), (matrix(6) + 2).requires_grad_()
    expected = function(dense, weight) if name != "native" else dense - weight
    expected.square().sum().backward()

    def body(comm: Comm) -> None:
        x = _shard_tensor(matrix(5, 6), chunks(dim, 0, 1)).requires_grad_()
        replica = ReplicatedTensor(matrix(6) + 2).requires_grad_()
        found = function(x, replica)
        assert type(found) is sharded_tensor.ShardedTensor
        torch.testing.assert_close(found.full(), expected)
        found.square().sum().backward()
        assert replica.grad is not None
        torch.testing.assert_close(replica.grad + 0, weight.grad)

    run_local(body, 2)


def test_a_replicated_bias_of_a_layer_leaves_plain_rows_a_ranks_own() -> None:
    torch.manual_seed(0)
    start, batch = nn.Linear(6, 4).to(DEVICE), matrix(4, 6)
    dense = copy.deepcopy(start)
    dense(batch).square().sum().backward()

    def body(comm: Comm) -> None:
        model = copy.deepcopy(start)
        shard_parameter(model, "weight", chunks(0, 0, 1))
        model.bias = nn.Parameter(ReplicatedTensor(model.bias.detach()))
        found = model(batch[2 * comm.rank : 2 * comm.rank + 2])
        torch.testing.assert_close(found + 0, dense(batch)[2 * comm.rank : 2 * comm.rank + 2])
        found.square().sum().backward()
        torch.testing.assert_close(model.weight.grad.full(), dense.weight.grad)
        torch.testing.assert_close(model.bias.grad + 0, dense.bias.grad)

    run_local(body, 2)


def test_replicated_tensors_are_copied_and_pickled() -> None:
    def body(comm: Comm) -> None:
        replica = ReplicatedTensor(matrix(3).requires_grad_())
        for made in (copy.deepcopy(replica), pickle.loads(pickle.dumps(replica)), nn.Parameter(replica)):
            assert isinstance(made, ReplicatedTensor) and made.requires_grad
            assert torch.equal(made, replica) and made.data_ptr() != 0

    run_local(body, 2)


def test_programs_that_import_torchs_path_find_them() -> None:
    with install():
        for name, kind in (("partial_tensor", _PartialTensor), ("replicated_tensor", ReplicatedTensor)):
            module = importlib.import_module(f"torch.distributed._shard.{name}")
            assert getattr(module, kind.__name__) is kind
    assert shardwise.ShardedTensor in _PartialTensor.__mro__
