"""Values of sharded and pending tensors that Python asks for: gathered, the same on every rank, or forbidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.comm import Comm, run_local
from shardwise.geometry import ChunkSpec, Mesh, MeshSpec, Partial, Replicate, Shard

WHOLE = torch.arange(12.0).reshape(4, 3)
MESH = Mesh.of(tp=3)
LAYOUTS: dict[str, Any] = {
    "rows": MeshSpec(MESH, (Shard(0),)),
    "columns": MeshSpec(MESH, (Shard(1),)),
    "replicated": MeshSpec(MESH, (Replicate(),)),
    "two of three ranks": ChunkSpec(0, ranks=(0, 2)),
    "pending": None,
}
PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().cpu().numpy().tolist(),
    "asarray": lambda x: np.asarray(x.detach(), dtype=np.float64).tolist(),
    "rows": lambda x: [row.tolist() for row in x],
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.amax()),
    "int": lambda x: int(x[1, 2]),
    "bool": lambda x: bool((x > 100).any()),
    "format": lambda x: f"{x.sum()} {x[0, 1]:.3f} {x.amax()!s:.0}",
    "index": lambda x: list(range(20))[x.long().amax()],
    "range": lambda x: list(range(x.long()[0, 2])),
    "sizes of parts": lambda x: [len(p) for p in torch.split(torch.arange(12), x.long()[0].add(3).tolist())],
    "math": lambda x: math.sqrt(x.sum()),
    "contains": lambda x: 7.0 in x,
}


def lay_out(name: str, comm: Comm) -> Tensor:
    if name != "pending":
        return shardwise.shard(WHOLE, LAYOUTS[name], comm=comm)
    return shardwise.from_local(WHOLE if comm.rank == 1 else torch.zeros(4, 3), MESH, [Partial()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_get_the_values_of_the_whole_tensor_on_every_rank(program: str, layout: str) -> None:
    def body(comm: Comm) -> Any:
        return PROGRAMS[program](lay_out(layout, comm))

    assert run_local(body, 3) == [PROGRAMS[program](WHOLE)] * 3


def test_a_gathered_array_is_a_copy_that_cannot_be_written() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(ValueError, match="read-only"):
            lay_out("rows", comm).numpy()[0] = 5.0
        replicated = lay_out("replicated", comm)
        replicated.numpy()[0] = 5.0
        assert replicated.tolist()[0] == [5.0] * 3

    run_local(body, 3)


@pytest.mark.parametrize("ask", [lambda x: x.tolist(), lambda x: x.numpy(), lambda x: f"{x.sum()}"])
def test_values_are_not_gathered_where_communication_is_forbidden(ask: Callable[[Tensor], Any]) -> None:
    def body(comm: Comm) -> None:
        x, replicated = lay_out("rows", comm), lay_out("replicated", comm)
        with shardwise.no_communication(), pytest.raises(RuntimeError, match="communication is forbidden here"):
            ask(x)
        with shardwise.no_communication():
            assert replicated.tolist() == WHOLE.tolist()

    run_local(body, 3)


def test_printed_tensors_have_their_layout_and_their_values_on_request() -> None:
    def body(comm: Comm) -> str:
        return str(lay_out("rows", comm).requires_grad_())

    head = "ShardedTensor(f32[4,3] on tp=3: S(0), rank 1 holds (2, 3), requires_grad=True"
    assert run_local(body, 3)[1] == head + ")"
    shardwise.set_printoptions(values=True)
    try:
        found = run_local(body, 3)[1]
    finally:
        shardwise.set_printoptions(values=False)
    rows = ["[[ 0.,  1.,  2.],", "     [ 3.,  4.,  5.],", "     [ 6.,  7.,  8.],", "     [ 9., 10., 11.]])"]
    assert found == "\n".join([head + ",", "    " + rows[0], *rows[1:]])
