"""What is written through a view of a ShardedTensor reaches the tensor, or is refused; it is never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Mesh, MeshSpec, ModelPlan, Partial, Replicate, Shard, from_local, run_local, shard_module
from shardwise.comm import Comm
from shardwise.geometry import LayoutError, Placement
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import lay

MESH = Mesh.of(tp=2)
VALUES = torch.arange(24, dtype=torch.float64).reshape(4, 6)
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(0, sizes=(0, 4)), Shard(1, sizes=(5, 1)))

# Each view, and the dims along which a cut means that writes to it are refused.
VIEWS: dict[str, tuple[Callable[[Any], Any], set[int]]] = {
    "slice": (lambda x: x[1:3], set()),
    "slice with a step": (lambda x: x[::2, 1:], set()),
    "transpose": (lambda x: x.t(), set()),
    "slice of a transpose": (lambda x: x.t()[1:3], set()),
    "unsqueeze": (lambda x: x.unsqueeze(1), set()),
    "split": (lambda x: x.split((1, 2, 1))[1], set()),
    "chunk of columns": (lambda x: x.chunk(3, 1)[2], set()),
    "detach": (lambda x: x.detach(), set()),
    "row": (lambda x: x[1], set()),
    "column": (lambda x: x[:, -1], set()),
    "part of a row": (lambda x: x[1, 2:4], set()),
    "row under another name": (lambda x: x[1].unsqueeze(0).detach(), set()),
    "element": (lambda x: x[1][2], set()),
    "unbind": (lambda x: x.unbind(0)[3], set()),
    "squeezed slice": (lambda x: x[1:2].squeeze(0), set()),
    "expanded slice": (lambda x: x[:1].expand(1, 6), {0}),
    "diagonal": (lambda x: x.diagonal(1), set()),
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
                dense, sharded = VALUES.clone(), lay(VALUES.clone(), MESH, (placement,))
                part = view(sharded)
                if isinstance(placement, Shard) and placement.dim in copied:
                    with pytest.raises(UnsupportedOpError, match="so what is written to it would be lost"):
                        change(part)
                    change(part.clone() if not part.sharding.pending else part.full())
                elif write == "foreach" and part.sharding.pending:
                    with pytest.raises(UnsupportedOpError, match="on a tensor with a pending sum"):
                        change(part)
                else:
                    change(view(dense))
                    change(part)
                assert torch.equal(sharded.full(), dense), (name, placement, write)

    run_local(body, 2, timeout=60)


def test_random_writes_to_a_copied_row_are_refused_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        x = lay(VALUES.clone(), MESH, (Shard(0),))
        with pytest.raises(LayoutError, match="normal_ on a tensor with a pending sum"):
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
            sharded: Any = lay(VALUES.clone().requires_grad_(), MESH, (placement,))
            (change(sharded) * VALUES).sum().backward()
            assert torch.equal(sharded.grad.full(), dense.grad)

    run_local(body, 2, timeout=60)


def test_a_conjugate_is_computed_at_once_and_not_written_to() -> None:
    values = torch.complex(VALUES, -VALUES - 1)

    def body(comm: Comm) -> None:
        x: Any = lay(values, MESH, (Shard(0),))
        assert torch.equal(x.conj().full(), values.conj().resolve_conj())
        assert torch.equal(torch._neg_view(x), lay(-values, MESH, (Shard(0),)))
        with pytest.raises(UnsupportedOpError, match="a conjugate or negative was copied"):
            x.conj().mul_(2)

    run_local(body, 2)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: nn.ReLU(inplace=True),
    "ReLU6": lambda: nn.ReLU6(inplace=True),
    "SiLU": lambda: nn.SiLU(inplace=True),
    "Mish": lambda: nn.Mish(inplace=True),
    "Hardswish": lambda: nn.Hardswish(inplace=True),
    "Hardsigmoid": lambda: nn.Hardsigmoid(inplace=True),
    "Hardtanh": lambda: nn.Hardtanh(inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(inplace=True),
    "ELU": lambda: nn.ELU(inplace=True),
    "CELU": lambda: nn.CELU(inplace=True),
    "SELU": lambda: nn.SELU(inplace=True),
    "Threshold": lambda: nn.Threshold(0.1, 0.0, inplace=True),
    "RReLU, not training": lambda: nn.RReLU(inplace=True).eval(),
}
BETWEEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "linears": lambda act: nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 4)),
    "convolutions": lambda act: nn.Sequential(nn.Conv2d(3, 8, 2), act, nn.Conv2d(8, 4, 1)),
}
PLANS: dict[str, dict[str, str]] = {
    "columns, then rows": {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"},
    "rows, then columns: the activation gets a pending sum": {"0.weight": "S(1)", "2.weight": "S(0)", "2.bias": "S(0)"},
    "replicated": {},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layers", BETWEEN)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_write_to_their_input(name: str, layers: str, plan: str) -> None:
    """Between layers that keep their input or output for the backward pass; twice, so that it is remembered."""
    torch.manual_seed(0)
    dense = BETWEEN[layers](ACTIVATIONS[name]()).double()
    batch = torch.randn(2, 6, dtype=torch.float64) if layers == "linears" else torch.randn(2, 3, 4, 4).double()
    expected = dense(batch).detach()
    dense(batch).square().sum().backward()

    def body(comm: Comm) -> None:
        model: Any = copy.deepcopy(dense)
        model.zero_grad()
        shard_module(model, ModelPlan(MESH, PLANS[plan], input_plan="replicated"))
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(model(batch).full().detach(), expected)
            model(batch).square().sum().backward()
            for own, whole in zip(model.parameters(), dense.parameters(), strict=True):
                torch.testing.assert_close(own.grad.full(), whole.grad)

    run_local(body, 2)


def test_a_write_to_a_pending_sum_reaches_views_of_it() -> None:
    def body(comm: Comm) -> None:
        pending = from_local(VALUES * (1 if comm.rank else -2), MeshSpec(MESH, (Partial(),)), VALUES.shape)
        rows = pending[1:3]
        pending.relu_()
        assert pending.placements == (Partial(),)
        assert torch.equal(pending.full(), (-VALUES).relu())
        pending.add_(1)
        pending.exp_()
        assert torch.equal(rows.full(), ((-VALUES).relu() + 1).exp()[1:3])

    run_local(body, 2)
