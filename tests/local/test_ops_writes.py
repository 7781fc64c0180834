"""What is written through a view of a ShardedTensor reaches the tensor, or is refused; it is never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Mesh, Replicate, Shard, run_local
from shardwise.comm import Comm
from shardwise.geometry import Placement
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.local.op_cases import lay_out

MESH = Mesh.of(tp=2)
VALUES = torch.arange(24, dtype=torch.float64).reshape(4, 6)
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(0, sizes=(0, 4)), Shard(1, sizes=(5, 1)))

# Each view, and the dims along which a cut means that it has to be copied.
VIEWS: dict[str, tuple[Callable[[Any], Any], set[int]]] = {
    "slice": (lambda x: x[1:3], set()),
    "slice with a step": (lambda x: x[::2, 1:], set()),
    "transpose": (lambda x: x.t(), set()),
    "slice of a transpose": (lambda x: x.t()[1:3], set()),
    "unsqueeze": (lambda x: x.unsqueeze(1), set()),
    "split": (lambda x: x.split((1, 2, 1))[1], set()),
    "chunk of columns": (lambda x: x.chunk(3, 1)[2], set()),
    "detach": (lambda x: x.detach(), set()),
    "row": (lambda x: x[1], {0}),
    "column": (lambda x: x[:, -1], {1}),
    "part of a row": (lambda x: x[1, 2:4], {0}),
    "row under another name": (lambda x: x[1].unsqueeze(0).detach(), {0}),
    "element": (lambda x: x[1][2], {0, 1}),
    "unbind": (lambda x: x.unbind(0)[3], {0}),
    "squeezed slice": (lambda x: x[1:2].squeeze(0), {0}),
    "expanded slice": (lambda x: x[:1].expand(1, 6), {0}),
    "diagonal": (lambda x: x.diagonal(1), {0, 1}),
    "windows": (lambda x: x.unfold(1, 2, 2), {1}),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda v: v.mul_(3),
    "add_": lambda v: v.add_(1),
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(2.5),
    "copy_": lambda v: v.copy_(torch.ones(v.shape, dtype=v.dtype)),
    "setitem": lambda v: v.__setitem__(..., 7.0),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
    "in place by another operator": lambda v: v.xlogy_(v),
}


@pytest.mark.parametrize("name", VIEWS)
def test_writes_take_effect_or_are_refused(name: str) -> None:
    view, copied = VIEWS[name]

    def body(comm: Comm) -> None:
        for placement in PLACEMENTS:
            for write, change in WRITES.items():
                dense, sharded = VALUES.clone(), lay_out(VALUES.clone(), MESH, (placement,))
                if isinstance(placement, Shard) and placement.dim in copied:
                    part = view(sharded)
                    with pytest.raises(UnsupportedOpError, match="so what is written to it would be lost"):
                        change(part)
                    change(part.clone() if not part.sharding.pending else part.full())
                else:
                    change(view(dense))
                    change(view(sharded))
                assert torch.equal(sharded.full(), dense), (name, placement, write)

    run_local(body, 2, timeout=60)


def test_random_writes_to_a_copied_row_are_refused_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        x = lay_out(VALUES.clone(), MESH, (Shard(0),))
        with pytest.raises(UnsupportedOpError, match="a row of a sharded dim was copied"):
            x[1].normal_()

    run_local(body, 2)


def test_gradients_of_what_was_written_through_a_view() -> None:
    def change(x: Any) -> Any:
        y = x * 1.0
        y[1:3].mul_(3.0)
        y.t()[2:].mul_(y.t()[2:].detach().clone())
        return y.full() if hasattr(y, "full") else y

    dense: Any = VALUES.clone().requires_grad_()
    (change(dense) * VALUES).sum().backward()

    def body(comm: Comm) -> None:
        for placement in PLACEMENTS:
            sharded: Any = lay_out(VALUES.clone().requires_grad_(), MESH, (placement,))
            (change(sharded) * VALUES).sum().backward()
            assert torch.equal(sharded.grad.full(), dense.grad)

    run_local(body, 2, timeout=60)


def test_a_conjugate_is_computed_at_once_and_not_written_to() -> None:
    values = torch.complex(VALUES, -VALUES - 1)

    def body(comm: Comm) -> None:
        x: Any = lay_out(values, MESH, (Shard(0),))
        assert torch.equal(x.conj().full(), values.conj().resolve_conj())
        assert torch.equal(torch._neg_view(x), lay_out(-values, MESH, (Shard(0),)))
        with pytest.raises(UnsupportedOpError, match="a conjugate or negative was copied"):
            x.conj().mul_(2)

    run_local(body, 2)
