"""Optimizers, gradient clipping and scaling on sharded parameters: losses equal those of a dense run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm import Comm, run_local
from shardwise.geometry import Box, EnumerableSpec, Mesh, Partial, Piece, Placement, Replicate, Shard
from shardwise.ops import explain, no_communication
from shardwise.tensor import ShardedTensor, shard
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import lay, numbers, ramp
from tests.device import DEVICE

Params = Sequence[Any]
START = (torch.sin(ramp(6, 5, grad=False)), torch.cos(ramp(6, grad=False)), torch.sin(ramp(3, 6, grad=False) * 2))
INPUT = torch.cos(ramp(4, 5, grad=False))
MODES: dict[str, dict[str, Any]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **mode: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, **mode),
    "plain SGD": lambda p, **mode: torch.optim.SGD(p, lr=0.01, **mode),
    "Adam": lambda p, **mode: torch.optim.Adam(p, lr=0.01, **mode),
    "AdamW": lambda p, **mode: torch.optim.AdamW(p, lr=0.01, amsgrad=True, **mode),
    "Adagrad": lambda p, **mode: torch.optim.Adagrad(p, lr=0.01, **mode),
}
LAYOUTS: list[tuple[tuple[int, ...], tuple[tuple[Placement, ...], ...]]] = [
    ((2, 2), ((Replicate(), Shard(0)), (Replicate(), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Replicate()))),
    ((3,), ((Shard(0, sizes=(0, 2, 4)),), (Replicate(),), (Shard(0),), (Shard(0),))),
]


def laid(tensor: Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> Any:
    """A ShardedTensor, as far as a type checker can follow torch's functions: not at all."""
    return lay(tensor, mesh, placements)


def train(params: Params, x: Any, optimizer: torch.optim.Optimizer, clip: float | None, foreach: bool) -> list[Tensor]:
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        loss: Any = (F.linear(torch.relu(F.linear(x, params[0], params[1])), params[2]) ** 2).sum()
        loss.backward()
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(params, clip, foreach=foreach))
        optimizer.step()
        seen.append(loss)
    return [s.full() if isinstance(s, ShardedTensor) else s for s in seen]


@pytest.mark.parametrize("clip", [None, 1.0], ids=["free", "clipped"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_of_five_steps(kind: str, mode: str, clip: float | None) -> None:
    dense = [nn.Parameter(t.clone()) for t in START]
    foreach = mode == "foreach"
    expected = train(dense, INPUT, KINDS[kind](dense, **MODES[mode]), clip, foreach)
    for world, placements in LAYOUTS:
        mesh = Mesh.of(**dict(zip(("dp", "tp"), world, strict=False)))

        def body(comm: Comm, mesh: Mesh = mesh, placements: Any = placements) -> None:
            params: list[Any] = [nn.Parameter(laid(t, mesh, p)) for t, p in zip(START, placements, strict=False)]
            optimizer = KINDS[kind](params, **MODES[mode])
            found = train(params, laid(INPUT, mesh, placements[3]), optimizer, clip, foreach)
            torch.testing.assert_close(
                [f.detach() for f in found], [e.detach() for e in expected], rtol=1e-10, atol=1e-12
            )
            for param, whole in zip(params, dense, strict=True):
                torch.testing.assert_close(param.full().detach(), whole.detach())
                for name, value in optimizer.state[param].items():
                    assert not isinstance(value, ShardedTensor) or value.sharding == param.sharding, name

        run_local(body, mesh.ranks.size, timeout=60)


WORLD = Mesh.of(tp=2)


def test_a_step_moves_nothing() -> None:
    def body(comm: Comm) -> None:
        cuts: list[Placement] = [Shard(0), Replicate(), Shard(1)]
        for mode in MODES.values():
            params = [nn.Parameter(laid(t, WORLD, (cut,))) for t, cut in zip(START, cuts, strict=True)]
            for param in params:
                param.grad = torch.ones_like(param)
            with no_communication():
                torch.optim.AdamW(params, lr=0.1, **mode).step()

    run_local(body, 2)


def test_zero_grad_and_lists_with_plain_tensors() -> None:
    def body(comm: Comm) -> None:
        param: Any = nn.Parameter(laid(START[0], WORLD, (Shard(0),)))
        plain = nn.Parameter(torch.ones(2, dtype=torch.float64))
        param.grad, plain.grad = torch.ones_like(param), torch.ones(2, dtype=torch.float64)
        optimizer = torch.optim.SGD([param, plain], lr=0.5, foreach=True)
        optimizer.step()
        torch.testing.assert_close(param.full().detach(), START[0] - 0.5)
        assert plain.tolist() == [0.5, 0.5]
        optimizer.zero_grad(set_to_none=False)
        assert not bool(param.grad.full().any())

    run_local(body, 2)


def test_lists_in_irregular_pieces_and_in_other_layouts() -> None:
    spec = EnumerableSpec([Piece(Box((0, 0), (2, 3)), 1), Piece(Box((2, 0), (1, 3)), 1), Piece(Box((3, 0), (1, 3)), 0)])

    def body(comm: Comm) -> None:
        one, two = shard(ramp(4, 3, grad=False), spec), laid(ramp(4, 3, grad=False), WORLD, (Shard(1),))
        added: Any = torch._foreach_add([one, two], [two, one], alpha=2)
        for result, first in zip(added, (one, two), strict=True):
            assert result.sharding == first.sharding
            torch.testing.assert_close(result.full(), 3 * ramp(4, 3, grad=False))
        torch._foreach_mul_([one, two], [2.0, 3.0])
        torch.testing.assert_close(one.full() * 3, two.full() * 2)
        norms: Any = torch._foreach_norm([two, two])
        torch.testing.assert_close(norms[0].full(), two.full().norm())

    run_local(body, 2)


def test_pending_sums_in_lists_stay_pending_or_are_refused() -> None:
    def body(comm: Comm) -> None:
        x = laid(ramp(4, 3, grad=False), WORLD, (Partial(),))
        doubled: list[Any] = [torch._foreach_mul([x], 2.0)[0], torch._foreach_add([x], [x])[0]]
        for one in doubled:
            torch.testing.assert_close(one.full(), 2 * ramp(4, 3, grad=False))
        refusals: list[Callable[[], Any]] = [lambda: torch._foreach_exp([x]), lambda: torch._foreach_add([x], 1.0)]
        for refused in refusals:
            with pytest.raises(
                UnsupportedOpError, match="with a pending sum: redistribute it to Shard or Replicate first"
            ):
                refused()

    run_local(body, 2)


@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_gradient_scaling_skips_a_step_on_all_ranks(bad_rank: int | None) -> None:
    def body(comm: Comm) -> tuple[float, bool]:
        param: Any = nn.Parameter(laid(START[0], WORLD, (Shard(0),)))
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((param * param).sum()).backward()
        assert isinstance(param.grad, ShardedTensor)
        if comm.rank == bad_rank:
            param.grad.local_tensor()[0] = torch.inf
        scaler.unscale_(optimizer)
        if bad_rank is None:
            torch.testing.assert_close(param.grad.full(), 2 * START[0])
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), bool(torch.equal(param.full().detach(), START[0]))

    assert run_local(body, 2) == [(4.0, False) if bad_rank is None else (2.0, True)] * 2


ORDERS = (2.0, 1.0, 3.0, float("inf"))


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_a_list_take_one_exchange_of_a_number_per_tensor_and_rank(order: float) -> None:
    """Replicated tensors need none; tensors that different axes cut make different groups."""
    values = [
        torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(i)) for i in range(6)
    ]
    uneven = Shard(0, sizes=(4, 0))
    placements: list[tuple[Placement, ...]] = [(Replicate(), Replicate()), (Replicate(), Shard(0))]
    placements += [(Replicate(), Shard(1)), (Shard(1), Shard(0)), (Replicate(), uneven), (uneven, Shard(1))]

    def body(comm: Comm) -> list[int]:
        mesh = Mesh.of(dp=2, tp=2)
        held: list[Tensor] = [lay(v, mesh, p) for v, p in zip(values, placements, strict=True)]
        with explain() as log:
            norms = torch._foreach_norm(held, order)
        for norm, value in zip(norms, values, strict=True):
            assert isinstance(norm, ShardedTensor)
            torch.testing.assert_close(norm.full(), torch.linalg.vector_norm(value, order))
        return [e.moved_bytes for e in log.entries if e.moved_bytes]

    by_tp, by_both = 3 * 8 * 4, 2 * 8 * 4 * 3  # each of 4 ranks receives a number per tensor from 1 or 3 others
    assert run_local(body, 4, timeout=60) == [[by_tp, by_both]] * 4


def test_norms_of_a_list_alone_or_recorded() -> None:
    """Pending sums, odd orders and tensors in pieces are taken alone; gradients pass."""
    value = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(1))

    def body(comm: Comm) -> None:
        mesh = Mesh.of(tp=2)
        pending, rows = (lay(value, mesh, (p,)) for p in (Partial("sum"), Shard(0)))
        for order in (2.0, 0.0, -1.0):
            for norm in torch._foreach_norm([pending, rows], order):
                assert isinstance(norm, ShardedTensor)
                torch.testing.assert_close(norm.full(), torch.linalg.vector_norm(value, order))
        dense = value.clone().requires_grad_()
        rows.requires_grad_()
        torch._foreach_norm([rows])[0].backward()  # type: ignore[no-untyped-call]  # untyped in torch
        torch._foreach_norm([dense])[0].backward()  # type: ignore[no-untyped-call]  # untyped in torch
        assert isinstance(rows.grad, ShardedTensor)
        torch.testing.assert_close(rows.grad.full(), dense.grad)

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("place", ["on tp=3: S(0)", "on tp=3: R", "on tp=2 @ 0,2: S(0)", "as chunk(0) over 0,2"])
def test_norms_of_a_list_are_all_on_the_tape_if_one_is(place: str) -> None:
    def norms(x: Any, y: Any) -> list[Any]:
        found = [*torch._foreach_norm([x * 1, y]), *torch._foreach_norm([y, x * 1], 1)]
        assert all(t.requires_grad for t in found)
        (grad,) = torch.autograd.grad(found[1] * 2 + found[2] * 3 + found[3], x)
        return [*found, grad]

    values, others = numbers(5, 2), numbers(5, seed=1)
    expected = norms(values.clone().requires_grad_(), others)

    def body(comm: Comm) -> None:
        x, y = shard(values, place).requires_grad_(), shard(others, "on tp=3: S(0)" if "=3" in place else place)
        for one, other in zip(norms(x, y), expected, strict=True):
            torch.testing.assert_close(one.full(), other.detach() if other.is_leaf else other)

    run_local(body, 3, timeout=60)
