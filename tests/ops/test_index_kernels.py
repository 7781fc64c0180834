"""Do kernels get only what those for GPUs take? There an index out of range, or a table without columns, is fatal.

1. A dispatch mode looks at what is passed to the kernels that index, on every rank, in the forward and backward pass.
2. Programs of legal indices run in it, on tables cut in all ways, also so that a rank has no rows or no columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import Comm, Mesh, MeshSpec, Replicate, Shard, ShardedTensor, replicate, run_local, shard
from shardwise.nn import plain_as_local_batch
from tests.dense import numbers

aten = torch.ops.aten
Ranges = Iterator[tuple[Tensor, int, int]]


def _one_dim(x: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Ranges:
    yield index, 0, x.shape[dim]


def _several_dims(x: Tensor, indices: list[Tensor | None], *rest: Any, **named: Any) -> Ranges:
    for dim, index in enumerate(indices):
        if index is not None and index.dtype != torch.bool:
            yield index, -x.shape[dim], x.shape[dim]


def _rows(weight: Tensor, ids: Tensor, *rest: Any, **named: Any) -> Ranges:
    assert weight.shape[1] > 0, "a table without columns"
    yield ids, 0, weight.shape[0]


def _rows_of_gradient(grad: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Ranges:
    assert grad.shape[-1] > 0, "gradients without columns"
    assert ids.numel() or not by_frequency, "no ids to count"
    yield ids, 0, rows


def _bags_of_gradient(grad: Tensor, *rest: Any, **named: Any) -> Ranges:
    assert grad.shape[-1] > 0, "gradients without columns"
    yield from ()


def _scaled_rows(weight: Tensor, ids: Tensor, *rest: Any) -> Ranges:
    raise AssertionError("the kernel that scales rows knows few norms, and fails where there are no ids")


def _places(x: Tensor, index: Tensor) -> Ranges:
    yield index, -x.numel(), x.numel()


def _classes(scores: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int) -> Ranges:
    yield target[target != ignored], 0, scores.shape[1]


CHECKS: dict[Any, Callable[..., Ranges]] = {
    aten.embedding.default: _rows,
    aten.embedding_dense_backward.default: _rows_of_gradient,
    aten.embedding_renorm_.default: _scaled_rows,
    aten._embedding_bag.default: _rows,
    aten._embedding_bag_forward_only.default: _rows,
    aten._embedding_bag_dense_backward.default: _bags_of_gradient,
    aten.index_select.default: _one_dim,
    aten.gather.default: _one_dim,
    aten.scatter.src: _one_dim,
    aten.scatter.value: _one_dim,
    aten.scatter_add.default: _one_dim,
    aten.scatter_add_.default: _one_dim,
    aten.scatter_reduce.two: _one_dim,
    aten.index_add.default: _one_dim,
    aten.index_add_.default: _one_dim,
    aten.index_copy.default: _one_dim,
    aten.index_fill.int_Scalar: _one_dim,
    aten.index.Tensor: _several_dims,
    aten.index_put.default: _several_dims,
    aten.index_put_.default: _several_dims,
    aten.take.default: _places,
    aten.nll_loss_forward.default: _classes,
}


class KernelLimits(TorchDispatchMode):
    """Raises where a kernel gets what one for GPUs does not take; counts the kernels it looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, ShardedTensor) for t in types):
            return NotImplemented
        if func in CHECKS:
            self.looked_at += 1
            for index, low, high in CHECKS[func](*args, **(kwargs or {})):
                found = index.detach().cpu()
                assert bool(((found >= low) & (found < high)).all()), f"{func}: {found.tolist()} is not below {high}"
        return func(*args, **(kwargs or {}))


PAIR, GRID = Mesh.of(x=2), Mesh.of(x=2, y=2)
SPECS = {
    "rows": MeshSpec(PAIR, (Shard(0),)),
    "uneven rows": MeshSpec(PAIR, (Shard(0, sizes=(1, 5)),)),
    "no rows": MeshSpec(PAIR, (Shard(0, sizes=(0, 6)),)),
    "cyclic rows": MeshSpec(PAIR, (Shard(0, block=1),)),
    "columns": MeshSpec(PAIR, (Shard(1),)),
    "no columns": MeshSpec(PAIR, (Shard(1, sizes=(0, 4)),)),
    "whole": MeshSpec(PAIR, (Replicate(),)),
    "blocks": MeshSpec(GRID, (Shard(0), Shard(1))),
    "empty blocks": MeshSpec(GRID, (Shard(0, sizes=(6, 0)), Shard(1, sizes=(0, 4)))),
}
IDS = torch.tensor([5, 0, 3, 3, 1])
TARGETS = torch.tensor([3, 0, -100, 1, 2, 3])
MATRIX = torch.tensor([[5, 0, 3, 3], [1, 2, 0, 4]])
Take = Callable[[Tensor], Any]
PROGRAMS: dict[str, Callable[[Any, Take], Any]] = {
    "embedding": lambda x, take: F.embedding(take(IDS), x),
    "embedding, padding": lambda x, take: F.embedding(take(IDS), x, padding_idx=3),
    "embedding, no ids": lambda x, take: F.embedding(take(IDS[:0]), x),
    "embedding, frequencies": lambda x, take: F.embedding(take(IDS), x, scale_grad_by_freq=True),
    "embedding, frequencies, no ids": lambda x, take: F.embedding(take(IDS[:0]), x, scale_grad_by_freq=True),
    "embedding, largest norm": lambda x, take: F.embedding(take(IDS), x, max_norm=1.0),
    "embedding, largest norm, no ids": lambda x, take: F.embedding(take(IDS[:0]), x, max_norm=1.0),
    "bag sum": lambda x, take: F.embedding_bag(take(IDS.repeat(2).view(5, 2)), x, mode="sum"),
    "bag mean": lambda x, take: F.embedding_bag(take(IDS.repeat(2).view(5, 2)), x),
    "bag max": lambda x, take: F.embedding_bag(take(IDS.repeat(2).view(5, 2)), x, mode="max"),
    "index": lambda x, take: x[take(IDS)],
    "index from the end": lambda x, take: x[take(IDS - 6)],
    "index of both dims": lambda x, take: x[take(IDS), take(IDS % 4 - 4)],
    "index of columns": lambda x, take: x[:, take(IDS % 4)],
    "index, nothing": lambda x, take: x[take(IDS[:0])],
    "index_select": lambda x, take: x.index_select(0, take(IDS)),
    "index_select of columns": lambda x, take: x.index_select(1, take(IDS % 4)),
    "gather": lambda x, take: x.gather(0, take(MATRIX)),
    "take_along_dim": lambda x, take: torch.take_along_dim(x, take(MATRIX % 4).t()[:, :2].repeat(2, 1)[:6], 1),
    "take": lambda x, take: torch.take(x, take(IDS * 4 - 24)),
    "index_put": lambda x, take: x.index_put((take(IDS),), take(numbers(5, 4, seed=2)), accumulate=True),
    "index_put from the end": lambda x, take: x.index_put((take(IDS[:3] - 6),), take(numbers(3, 4, seed=2))),
    "index_add": lambda x, take: x.index_add(0, take(IDS), take(numbers(5, 4, seed=2))),
    "index_copy": lambda x, take: x.index_copy(0, take(IDS[:3]), take(numbers(3, 4, seed=2))),
    "index_fill": lambda x, take: x.index_fill(0, take(IDS[:3]), 2.0),
    "scatter": lambda x, take: x.scatter(0, take(MATRIX), 2.0),
    "scatter_add": lambda x, take: x.scatter_add(0, take(MATRIX), take(numbers(2, 4, seed=2))),
    "scatter_reduce": lambda x, take: x.scatter_reduce(0, take(MATRIX), take(numbers(2, 4, seed=2)), "amax"),
    "nll_loss": lambda x, take: F.nll_loss(x.log_softmax(1), take(TARGETS)),
    "cross_entropy": lambda x, take: F.cross_entropy(x, take(TARGETS), reduction="sum", label_smoothing=0.1),
}


def _run(program: Callable[[Any, Take], Any], x: Any, take: Take) -> tuple[Tensor, Tensor]:
    """The result and the gradient."""
    result = program(x, take)
    whole = result.full() if isinstance(result, ShardedTensor) else result
    (whole * whole).sum().backward()
    grad = x.grad
    return whole.detach(), grad.full() if isinstance(grad, ShardedTensor) else grad


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_get_indices_in_range_and_tables_with_columns(name: str) -> None:
    table = numbers(6, 4)
    # in host memory: torch's own kernels for GPUs fail where there are no ids
    expected = _run(PROGRAMS[name], table.cpu().clone().requires_grad_(), lambda t: t.cpu())

    def body(comm: Comm, spec: MeshSpec) -> int:
        x = shard(table, spec).detach().requires_grad_()
        with KernelLimits() as limits:
            found = _run(PROGRAMS[name], x, lambda t: replicate(t, x))
        assert_close([t.cpu() for t in found], list(expected))
        return limits.looked_at

    looked_at = [run_local(body, spec.mesh.ranks.size, spec, timeout=60) for spec in SPECS.values()]
    assert max(map(max, looked_at)) > 0


@pytest.mark.parametrize("mode", ("embedding", "sum", "mean", "max"))
def test_lookups_of_a_local_batch(mode: str) -> None:
    """Each rank looks up ids of its own, one of them none."""
    table = numbers(6, 4)
    batches = [IDS.repeat(2).view(5, 2), IDS[:0].view(0, 2)] * 2

    def look_up(x: Any, ids: Tensor) -> Any:
        if mode == "embedding":
            return F.embedding(ids, x, max_norm=1.0, norm_type=float("inf"))
        return F.embedding_bag(ids, x, mode=mode)

    def body(comm: Comm, spec: MeshSpec) -> None:
        x = shard(table, spec).detach().requires_grad_()
        with KernelLimits(), plain_as_local_batch():
            found = look_up(x, batches[comm.rank])
            (found * found).sum().backward()
        assert_close(found.detach().cpu(), look_up(table.cpu().clone(), batches[comm.rank].cpu()))

    for spec in SPECS.values():
        run_local(body, spec.mesh.ranks.size, spec, timeout=60)


@pytest.mark.parametrize(
    "kernel",
    (
        lambda: F.embedding(IDS, torch.zeros(6, 0)),
        lambda: F.embedding(IDS[:0], torch.zeros(6, 4).requires_grad_(), scale_grad_by_freq=True).sum().backward(),
        lambda: torch.embedding_renorm_(torch.zeros(6, 4), IDS, 1.0, 2.0),
        lambda: torch.zeros(5, 0)[IDS],
    ),
    ids=("no columns", "no ids to count", "scaled rows", "out of range"),
)
def test_the_limits_are_noticed(kernel: Callable[[], Any]) -> None:
    """Host memory takes all of these."""
    with pytest.raises(AssertionError), KernelLimits():
        kernel()
