"""Shapes that do not fit are refused on every rank, whatever the layouts: local parts must not fit by chance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from shardwise import Mesh, MeshSpec, Replicate, Shard, run_local, shard
from shardwise.comm import Comm
from shardwise.geometry import Placement
from tests.dense import lay

F = torch.nn.functional
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "matmul": (torch.matmul, ((4, 3), (4, 3))),
    "mm": (torch.mm, ((2, 4), (3, 2))),
    "bmm": (torch.bmm, ((4, 2, 2), (3, 2, 2))),
    "linear": (F.linear, ((4, 3), (2, 4))),
    "dot": (torch.dot, ((4,), (3,))),
    "add": (torch.add, ((4, 3), (3, 4))),
    "addmm": (torch.addmm, ((2, 2), (2, 4), (3, 2))),
}


def placements_of(shape: tuple[int, ...]) -> list[Placement]:
    return [Replicate(), *(Shard(d) for d in range(len(shape)))]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses(name: str) -> None:
    function, shapes = CASES[name]

    def body(comm: Comm) -> int:
        mesh, tried = Mesh.of(x=2), 0
        for placed in product(*(placements_of(s) for s in shapes)):
            tensors = [
                shard(torch.ones(s), MeshSpec(mesh, (p,)), src_rank=None) for s, p in zip(shapes, placed, strict=True)
            ]
            with pytest.raises((RuntimeError, ValueError)):
                function(*tensors)
            tried += 1
        return tried

    assert all(count > 3 for count in run_local(body, 2))


def test_lengths_of_two_axes_that_would_cut_one_dim_are_left_out() -> None:
    """Each tensor has lengths of its own along another axis; together they would not fit, so the dim is cut evenly."""
    columns, rows = Shard(1, sizes=(5, 1)), Shard(0, sizes=(3, 1))
    ways: list[tuple[tuple[Placement, ...], tuple[Placement, ...]]] = [
        ((columns, Replicate()), (Shard(0), columns)),
        ((Replicate(), columns), (columns, Shard(0))),
        ((rows, Replicate()), (Replicate(), rows)),
    ]
    dense, other = (torch.arange(24, dtype=torch.float64).reshape(4, 6).sin() + i for i in range(2))

    def body(comm: Comm) -> None:
        mesh = Mesh.of(dp=2, tp=2)
        for one, two in ways:
            x, y = (lay(t.clone().requires_grad_(), mesh, p) for t, p in ((dense, one), (other, two)))
            found: Any = x @ y.t() + (x * y).sum()
            assert torch.allclose(found.full(), dense @ other.t() + (dense * other).sum())
            found.sum().backward()
            assert x.grad is not None and torch.allclose(x.grad.full(), other.sum(0) + 16 * other)

    run_local(body, 4, timeout=60)
