"""Reductions over whole and sharded dims, held against the dense ones in values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import TORCH_RELEASE
from shardwise.comm import Comm, run_local
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Placement,
    Replicate,
    Shard,
)
from shardwise.tensor import ShardedTensor, shard
from tests.dense import LINES, Combination, check_op, lay, ramp

SMOOTH: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: x.sum(0),
    "sum of the last dim, kept": lambda x: x.sum(-1, keepdim=True),
    "sum of two dims": lambda x: x.sum((0, 2)),
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(1),
    "mean of two dims, kept": lambda x: x.mean((0, 1), keepdim=True),
    "nansum": lambda x: x.nansum(1),
    "prod": lambda x: x.prod(),
    "prod of a dim": lambda x: x.prod(0),
    "prod of a dim, kept": lambda x: x.prod(1, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm of a dim": lambda x: torch.linalg.vector_norm(x, 2, 0),
    "1-norm": lambda x: x.norm(1, dim=1),
    "3-norm, kept": lambda x: torch.linalg.vector_norm(x, 3, (0, 1), keepdim=True),
    "inf-norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "-inf-norm": lambda x: torch.linalg.vector_norm(x, -math.inf, 0),
    "0-norm": lambda x: torch.linalg.vector_norm(x, 0, 0),
    "logsumexp": lambda x: x.logsumexp(0),
    "logsumexp of two dims": lambda x: x.logsumexp((0, 1), keepdim=True),
    "var": lambda x: x.var(),
    "var of a dim": lambda x: x.var(0),
    "var of two dims, uncorrected, kept": lambda x: torch.var(x, (0, 2), correction=0, keepdim=True),
    "std": lambda x: x.std(1),
    "var and mean": lambda x: torch.var_mean(x, 1),
    "std and mean": lambda x: torch.std_mean(x),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=1),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_reductions(name: str) -> None:
    check_op(SMOOTH[name], ramp(3, 5, 2), limit=8)


EXTREMES: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda x: x.amax(0),
    "amax of two dims, kept": lambda x: x.amax((0, 1), keepdim=True),
    "amin": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of a dim": lambda x: tuple(x.max(1)),
    "min of a dim, kept": lambda x: tuple(x.min(0, keepdim=True)),
    "argmax": lambda x: x.argmax(),
    "argmax of a dim": lambda x: x.argmax(1),
    "argmin of a dim, kept": lambda x: x.argmin(0, keepdim=True),
    "both": lambda x: tuple(x.aminmax()),
    "both of a dim": lambda x: tuple(torch.aminmax(x, dim=1)),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str) -> None:
    has_derivative = "both" not in name or TORCH_RELEASE >= (2, 12)  # torch 2.11 has none of aminmax
    check_op(EXTREMES[name], ramp(3, 5, 2, grad=has_derivative), limit=8)


@pytest.mark.parametrize("name", ["amax", "amin", "argmax of a dim", "max of a dim"])
def test_extremes_with_equal_and_missing_numbers(name: str) -> None:
    """Gradients are shared by all that are equal; the first position counts; not-a-number wins."""
    x = torch.tensor([[0.0, 2, 2], [2, 2, 0], [1, math.nan, 2], [2, 2, 2], [0, 1, 0]], dtype=torch.float64)
    check_op(EXTREMES[name], x.requires_grad_(), worlds=LINES, pending=False)


def test_maximum_of_plain_values_stays_pending() -> None:
    def look(chosen: Combination, result: Any) -> None:
        expected = Partial("max") if isinstance(chosen[0][0], Shard) else Replicate()
        assert result.placements == (expected,), chosen

    check_op(lambda x: x.amax(), ramp(3, 5, grad=False), worlds=[(2,)], pending=False, look=look)


ORDERED: dict[str, Callable[[Tensor], Any]] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumsum of the last dim": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: tuple(x.cummax(1)),
    "sort": lambda x: tuple(x.sort(1)),
    "stable sort": lambda x: tuple(torch.sort(x, dim=0, stable=True, descending=True)),
    "argsort": lambda x: x.argsort(0),
    "topk": lambda x: tuple(x.topk(2, 1)),
    "median": lambda x: tuple(x.median(1)),
    "median of everything": lambda x: x.median(),
    "kth value": lambda x: tuple(x.kthvalue(2, 0)),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_needs_a_dim_in_order(name: str) -> None:
    check_op(ORDERED[name], ramp(3, 5), limit=8)


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax_over_whole_and_sharded_dims(fn: Callable[..., Tensor], dim: int) -> None:
    check_op(lambda x: fn(x, dim), ramp(3, 5), limit=10)


BOOLEAN: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda x: (x > -1.5).all(),
    "all of a dim": lambda x: (x > 0).all(1),
    "all of dims, kept": lambda x: (x > 0).all((0, 1), keepdim=True),
    "any": lambda x: (x > 50).any(),
    "any of a dim": lambda x: (x > 2).any(0),
    "count": lambda x: (x > 0).count_nonzero(),
    "count along a dim": lambda x: torch.count_nonzero(x > 0, dim=1),
    "number of true": lambda x: (x > 0).sum(0),
}


@pytest.mark.parametrize("name", BOOLEAN)
def test_reductions_of_truth(name: str) -> None:
    check_op(BOOLEAN[name], ramp(3, 5, grad=False), limit=8)


IRREGULAR = {
    "two boxes, one, none": EnumerableSpec(
        [Piece(Box((0, 0), (2, 5)), 0), Piece(Box((2, 0), (1, 2)), 1), Piece(Box((2, 2), (1, 3)), 0)]
    ),
    "cells with copies": GridSpec(((1, 2), 1), [[[0, 1]], [[1, 2]]]),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of all dims": lambda x: x.sum((0, 1)),
    "mean": lambda x: x.mean(),
    "amax": lambda x: x.amax(),
    "min": lambda x: x.min(),
    "prod": lambda x: x.prod(),
    "norm": lambda x: x.norm(),
    "var": lambda x: x.var(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "all": lambda x: (x > -2).all(),
}


@pytest.mark.parametrize("layout", IRREGULAR)
def test_whole_tensors_in_irregular_pieces(layout: str) -> None:
    def body(comm: Comm) -> None:
        for name, fn in WHOLE.items():
            dense, x = ramp(3, 5), shard(ramp(3, 5, grad=False), IRREGULAR[layout], None).requires_grad_()
            expected, found = fn(dense), fn(x).full()
            torch.testing.assert_close(found.detach(), expected.detach(), msg=name)
            if expected.requires_grad:
                expected.backward()
                found.backward()
                assert x.grad is not None and dense.grad is not None
                torch.testing.assert_close(x.grad.full(), dense.grad, msg=name)

    run_local(body, 4)


@pytest.mark.parametrize("fn", [lambda x: x.sum(0), lambda x: x.mean(1), lambda x: x.amax(-1, keepdim=True)])
def test_a_dim_of_irregular_pieces_is_reduced_on_a_mesh(fn: Callable[[Tensor], Any]) -> None:
    def body(comm: Comm) -> None:
        dense = ramp(3, 5)
        x = shard(dense.detach(), IRREGULAR["two boxes, one, none"], None).requires_grad_()
        for _ in range(2):
            found = fn(x)
            torch.testing.assert_close(found.full(), fn(dense))
        fn(dense).square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(x.grad.full(), dense.grad)

    run_local(body, 3)


@pytest.mark.parametrize("fn", [lambda x: torch.softmax(x, 1), lambda x: x.var(1), lambda x: torch.log_softmax(x, 1)])
def test_narrow_numbers_are_added_up_in_wide_ones(fn: Callable[[Tensor], Any]) -> None:
    x = ramp(2, 300, step=0.01, grad=False).to(torch.bfloat16)

    def body(comm: Comm) -> None:
        found = fn(shard(x, ChunkSpec(1, 2), None)).full()
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, fn(x), rtol=0.01, atol=0.001)

    run_local(body, 2)


@pytest.mark.parametrize("name", ["sum", "softmax", "layer_norm", "amax"])
def test_what_needs_no_communication_takes_a_shortcut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Comm) -> Any:
        x = shard(ramp(4, 5, grad=False), MeshSpec(Mesh.of(dp=2), (Shard(0),)), None)
        result: Any = F.layer_norm(x, (5,)) if name == "layer_norm" else getattr(x, name)(1)
        return result.full()

    def refuse(*args: Any) -> None:
        raise AssertionError("torch took the function apart")

    first = run_local(body, 2)
    monkeypatch.setattr(ShardedTensor, "__torch_dispatch__", classmethod(refuse))
    assert all(torch.equal(*pair) for pair in zip(first, run_local(body, 2), strict=True))


def test_distance_and_trace() -> None:
    check_op(torch.dist, ramp(3, 5), ramp(3, 5, step=0.2), limit=8)
    has_derivative = TORCH_RELEASE >= (2, 12)  # that of torch 2.11 is wrong for more rows than columns
    check_op(torch.trace, ramp(5, 3, grad=has_derivative), limit=10)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial("sum")], ids=str)
def test_the_value_of_one_element_is_known_to_every_rank(placement: Placement) -> None:
    def body(comm: Comm) -> list[Any]:
        x = lay(torch.tensor([3.0], requires_grad=True), Mesh.of(dp=2), (placement,))
        return [x.item(), float(x), bool(x > 2), x.sum().item()]

    assert run_local(body, 2) == [[3.0, 3.0, True, 3.0]] * 2


def test_means_of_integers_are_refused_as_torch_does() -> None:
    def body(comm: Any) -> None:
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = lay(torch.arange(12).reshape(3, 4), Mesh.of(tp=2), (placement,))
            for mean in (lambda x: x.mean(), lambda x: x.mean(0), lambda x: x.bool().mean()):
                with pytest.raises(RuntimeError, match=r"mean\(\)"):
                    mean(x)
            assert torch.mean(x, dtype=torch.float64).item() == 5.5

    run_local(body, 2)


TIED: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "the first maximum": lambda x: x.max(0).values,
    "the largest magnitude": lambda x: torch.linalg.vector_norm(x, math.inf),
}


@pytest.mark.parametrize("name", TIED)
def test_second_gradients_of_extremes_that_ranks_share(name: str) -> None:
    """The gradient of an extreme depends on another tensor, whose own gradient comes from all ranks that share it."""
    rows, weights = torch.tensor([3.0, 1, 3, 2, 3], dtype=torch.float64), torch.arange(1, 6, dtype=torch.float64)

    def second(x: Any, scale: Any, weights: Any) -> Any:
        (grad,) = torch.autograd.grad((TIED[name](x) * scale).sqrt(), x, create_graph=True)
        return torch.autograd.grad((grad * grad * weights).sum(), (x, scale))

    whole = second(rows.clone().requires_grad_(), torch.tensor(2.0, dtype=torch.float64).requires_grad_(), weights)

    def body(comm: Comm) -> None:
        x, w = (shard(t, "on tp=3: S(0)") for t in (rows, weights))
        scale = shard(torch.tensor(2.0, dtype=torch.float64), "on tp=3: R")
        for found, expected in zip(second(x.requires_grad_(), scale.requires_grad_(), w), whole, strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)

    run_local(body, 3, timeout=60)


@pytest.mark.parametrize("layout", ["on tp=1: P", "on tp=1: P(avg)", "on dp=1,tp=1: P, P"])
def test_extremes_of_a_sum_over_one_rank(layout: str) -> None:
    """Nothing is pending there, whatever the placement says: steps that resolve it must not come back to themselves."""

    def body(comm: Comm) -> None:
        x = shard(ramp(2, 3), layout).requires_grad_()
        for found in (x.amax(), *torch.aminmax(x), x.max(), x.amin(0).sum()):
            (grad,) = torch.autograd.grad(found, x)
            assert grad.full_tensor().sum() in (1.0, 3.0)

    run_local(body, 1, timeout=60)
