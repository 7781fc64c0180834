"""Plain tensors beside tensors of the namespace: the same on every rank, their gradients those of the whole.

In modules whose parameters are sharded, plain inputs are a rank's own batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import plain_as_replicated
from shardwise.comm import Comm, run_local
from shardwise.compat._shard import _shard_tensor, shard_parameter, sharded_tensor
from shardwise.compat._shard.sharding_spec import ChunkShardingSpec
from shardwise.ops import MixedTensorsError
from tests.device import PLACE

Function = Callable[[Any, Any], Any]


def chunks(dim: int, ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/{PLACE}" for rank in range(ranks)])


def matrix(*size: int) -> Tensor:
    return torch.sin(torch.arange(float(torch.Size(size).numel()), dtype=torch.float64) * 1.7).reshape(size)


def mask(x: Tensor) -> Tensor:
    return torch.arange(30, device=x.device).reshape(5, 6) % 3 == 0


FUNCTIONS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "add": (lambda x, p: x + p, (6,)),
    "add a column": (lambda x, p: x + p, (5, 1)),
    "add more dims": (lambda x, p: p + x, (2, 5, 6)),
    "subtract from": (lambda x, p: p - x, (5, 6)),
    "in place": (lambda x, p: x.clone().add_(p), (6,)),
    "mul": (lambda x, p: x * p, (6,)),
    "masked_fill": (lambda x, p: x.masked_fill(mask(x), -1.0) * p, (6,)),
    "where by a plain mask": (lambda x, p: torch.where(mask(x), x, p), (5, 6)),
    "where by a sharded mask": (lambda x, p: torch.where(x > 0, p, x), (6,)),
    "layer_norm": (lambda x, p: F.layer_norm(x, (6,), p, p * 2), (6,)),
    "rms_norm": (lambda x, p: F.rms_norm(x, (6,), p), (6,)),
    "matmul": (lambda x, p: x @ p, (6, 3)),
    "matmul from the left": (lambda x, p: p @ x, (3, 5)),
    "addmm": (lambda x, p: torch.addmm(p, x, x.t()), (5,)),
    "linear of a plain weight": (lambda x, p: F.linear(x, p, p[:, 0]), (2, 6)),
    "linear of a sharded weight": (lambda x, p: F.linear(x * 2, x, p), (5,)),
    "dropout": (lambda x, p: F.dropout(x + p, 0.0), (6,)),
    "cat": (lambda x, p: torch.cat([x, p]), (2, 6)),
    "index": (lambda x, p: x[torch.tensor([4, 0, 0], device=x.device)] * p, (6,)),
    "no leaf": (lambda x, p: x * (p * p).sum(0, keepdim=True) + p.exp(), (6,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (1, 3), (0, 4)])
def test_values_and_gradients_are_those_of_the_whole(name: str, dim: int, ranks: int) -> None:
    function, size = FUNCTIONS[name]
    dense, beside = matrix(5, 6).requires_grad_(), (matrix(*size) + 2).requires_grad_()
    expected = function(dense, beside)
    scale = matrix(*expected.shape) + 0.5
    (expected * scale).sum().backward()

    def body(comm: Comm) -> tuple[type, Tensor, Any, Any]:
        x, plain = _shard_tensor(matrix(5, 6), chunks(dim, ranks)), (matrix(*size) + 2).requires_grad_()
        x.requires_grad_()
        found = function(x, plain)
        (found * scale).sum().backward()
        return type(found), found.full().detach(), x.grad.full(), plain.grad

    for kind, values, gradient, of_plain in run_local(body, ranks):
        assert kind is sharded_tensor.ShardedTensor
        torch.testing.assert_close(values, expected.detach())
        torch.testing.assert_close(gradient, dense.grad)
        torch.testing.assert_close(of_plain, beside.grad)


def test_native_tensors_and_tensors_to_write_to_are_refused_still() -> None:
    def body(comm: Comm) -> None:
        ours, theirs = shardwise.ones(chunks(0, 2), 3, 2), sharded_tensor.ones(chunks(0, 2), 3, 2)
        with pytest.raises(MixedTensorsError, match=r"got a plain tensor of shape \(2,\) as argument 'other'"):
            ours + torch.ones(2)
        with pytest.raises(MixedTensorsError, match="as argument 'out'"):
            torch.exp(theirs, out=torch.empty(0))

    run_local(body, 2)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3)).to(torch.float64)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
@pytest.mark.parametrize("own", [True, False])
def test_gradients_of_plain_biases_are_summed_like_those_of_sharded_weights(dims: tuple[int, int], own: bool) -> None:
    """A batch of 13 rows that is a sharded tensor, or of which each rank has 4 of its own."""
    start, batch = layers(), matrix(13, 6)
    dense = copy.deepcopy(start)
    used = batch[:12] if own else batch
    expected = dense(used)
    expected.square().sum().backward()

    def body(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        model = copy.deepcopy(start)
        for index, dim in zip((0, 3), dims, strict=True):
            shard_parameter(model[index], "weight", chunks(dim, 3))
        mine = batch[4 * comm.rank : 4 * comm.rank + 4]
        found = model(mine if own else _shard_tensor(batch.clone(), chunks(0, 3)))
        found.square().sum().backward()
        if own:  # the norm has no sharded parameter: torch's own layer, which knows of no other rank
            for parameter in model[2].parameters():
                assert parameter.grad is not None
                comm.all_reduce(parameter.grad, label="the norm's gradient").wait()
        gradients = [p.grad for p in model.parameters()]
        return (
            torch.cat(comm.all_gather(found.detach(), label="rows")) if own else found.full().detach(),
            [g.full() if isinstance(g, shardwise.ShardedTensor) else g for g in gradients],  # type: ignore[misc]
        )

    for values, gradients in run_local(body, 3):
        torch.testing.assert_close(values, expected.detach())
        for gradient, parameter in zip(gradients, dense.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


class Scaled(nn.Module):
    """A sharded weight beside its input, a plain parameter and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor | None) -> Any:
        if x is not None:
            return self.weight * x
        return (self.weight + self.shift).masked_fill(torch.tensor([True, False], device=self.shift.device), 0.0)


def test_a_module_with_sharded_parameters_takes_plain_parameters_and_masks_and_refuses_its_own_batch() -> None:
    def body(comm: Comm) -> Tensor:
        model = Scaled()
        shard_parameter(model, "weight", chunks(0, 2))
        with pytest.raises(MixedTensorsError):
            model(torch.full((3, 2), float(comm.rank)))  # each rank has its own: not the same on every rank
        made = model(None)
        made.sum().backward()
        assert model.shift.grad is not None and model.shift.grad.tolist() == [0.0, 3.0]
        whole: Tensor = made.full().detach()
        return whole

    for found in run_local(body, 2):
        assert found.tolist() == [[0.0, 2.0]] * 3


def test_linear_of_plain_rows_is_of_own_rows_unless_they_are_said_to_be_the_same() -> None:
    weight = matrix(5, 6)

    def body(comm: Comm) -> None:
        sharded, bias = _shard_tensor(weight.clone(), chunks(0, 3)), torch.arange(5.0, dtype=torch.float64)
        rows = matrix(comm.rank + 1, 6) + comm.rank
        own = F.linear(rows, sharded, bias)
        assert type(own) is Tensor
        torch.testing.assert_close(own, F.linear(rows, weight, bias))
        with plain_as_replicated():
            same: Any = F.linear(matrix(2, 6), sharded, bias)
        torch.testing.assert_close(same.full(), F.linear(matrix(2, 6), weight, bias))

    run_local(body, 3)


CONTIGUOUS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x.t().contiguous(),
    "clone": lambda x: x.t().clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("name", CONTIGUOUS)
@pytest.mark.parametrize("dim", [0, 1])
def test_transposed_tensors_become_contiguous(name: str, dim: int) -> None:
    def body(comm: Comm) -> None:
        x = _shard_tensor(matrix(5, 6), chunks(dim, 3)).requires_grad_()
        made = CONTIGUOUS[name](x)
        assert type(made) is sharded_tensor.ShardedTensor and made.sharding_spec().dim == 1 - dim
        assert made.is_contiguous() and all(part.is_contiguous() for part in made.local_parts)
        assert not x.t().local_tensor().is_contiguous() or comm.rank == 2  # which has one row
        assert torch.equal(made.full(), matrix(5, 6).t())
        (made * matrix(6, 5)).sum().backward()
        assert torch.equal(x.grad.full(), matrix(6, 5).t())

    run_local(body, 3)
