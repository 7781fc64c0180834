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
