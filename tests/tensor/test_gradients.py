"""Gradients through every move, on all ranks of one process: by finite differences, and exactly by their duals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import shardwise.ops  # noqa: F401  # registers the operators
from shardwise.comm import Comm, run_local
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Replicate,
    Shard,
    ShardingSpec,
)
from shardwise.tensor import ShardedTensor, from_local, redistribute_many, shard
from shardwise.tensor.move import dual_layout
from tests.moving import error_of, layouts, local_parts, values

PAIR = Mesh.of(tp=2)
SMALL: dict[str, ShardingSpec] = {
    "rows": ChunkSpec(0, 2),
    "columns, swapped": ChunkSpec(1, (1, 0)),
    "one rank": ChunkSpec(0, (1,)),
    "grid": GridSpec((1, (1, 0, 2)), [[1, 0, 0]]),
    "two boxes or none": EnumerableSpec([Piece(Box((0, 0), (2, 2)), 0), Piece(Box((0, 2), (2, 1)), 0)]),
    "replicated": MeshSpec(PAIR, (Replicate(),)),
    "groups": MeshSpec(PAIR, (Shard(1, groups=(2, 1)),)),
    "cyclic": MeshSpec(PAIR, (Shard(1, block=1),)),
    "sum": MeshSpec(PAIR, (Partial("sum"),)),
    "avg": MeshSpec(PAIR, (Partial("avg"),)),
}
MATRIX = {name: layout for name, layout in layouts(5, 7).items() if name not in ("max", "min", "product")}


def point(shape: tuple[int, ...] = (2, 3)) -> Tensor:
    return torch.linspace(-1.0, 2.0, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).requires_grad_()


def in_lockstep(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Check gradients by finite differences; every rank does the same steps with the same numbers."""
    return gradcheck(function, (x,), fast_mode=False)


def between_all(start: str) -> Callable[[Tensor], Tensor]:
    """From one layout to each that comes after it and back, between plain tensors."""
    others = [SMALL[b] for a, b in combinations_with_replacement(SMALL, 2) if a == start]

    def function(x: Tensor) -> Tensor:
        moved = shard(x * x, SMALL[start], None)
        for spec in others:
            moved = moved.redistribute(spec).redistribute(SMALL[start])
        return moved.full() * 2

    return function


@pytest.mark.parametrize("start", SMALL)
def test_redistribute_between_every_pair_of_small_layouts(start: str) -> None:
    assert run_local(lambda comm: in_lockstep(between_all(start), point()), 2) == [True] * 2


def through_one_rank(comm: Comm, spec: ShardingSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """From rank 1 alone over a layout to rank 0 alone; the second tensor keeps rank 0 on the tape of the first move."""
    start = shard(x * x, ChunkSpec(0, (1,)), None)
    given = start.local_tensor() if comm.rank == 1 else None
    gathered = shard(given, spec, src_rank=1).clone().to(torch.float64, copy=True).gather_to(0)
    assert gathered is not None and (gathered.numel() > 0) is (comm.rank == 0)
    return gathered.reshape(-1), (x if start._anchor is None else start._anchor)[:0].sum()


@pytest.mark.parametrize("name", SMALL)
def test_shard_from_one_rank_conversion_and_gather_to_another(name: str) -> None:
    """Row by row of the Jacobian, on rank 0; rank 1 takes the same steps."""

    def body(comm: Comm) -> None:
        x, step = point().detach(), 1e-6
        for i in range(6):
            leaf = x.clone().requires_grad_()
            out, anchor = through_one_rank(comm, SMALL[name], leaf)
            (out[i : i + 1].sum() + anchor).backward()
            shift = torch.zeros(6, dtype=torch.float64)
            shift[i] = step
            up, _ = through_one_rank(comm, SMALL[name], (x + shift.view(2, 3)).requires_grad_())
            down, _ = through_one_rank(comm, SMALL[name], (x - shift.view(2, 3)).requires_grad_())
            assert leaf.grad is not None
            slopes = ((up - down) / (2 * step)).detach()
            assert comm.rank == 1 or torch.allclose(slopes, leaf.grad.reshape(-1), atol=1e-8)
            assert torch.allclose(leaf.grad.reshape(-1)[i], 2 * x.reshape(-1)[i])

    run_local(body, 2)


@pytest.mark.parametrize("name", ["columns, swapped", "sum", "avg"])
def test_second_derivatives(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        moved = shard(x**3, SMALL["rows"], None).redistribute(SMALL[name]).redistribute(SMALL["replicated"])
        return moved.full() * x

    def body(comm: Comm) -> bool:
        return gradgradcheck(function, (point(),), (point().detach().requires_grad_(),), fast_mode=False)

    assert run_local(body, 2) == [True] * 2


def test_second_derivatives_of_a_pending_average() -> None:
    """Of the value: neither derivative has the factor of an addend."""
    layout = SMALL["avg"].layout((2, 3))

    def body(comm: Comm) -> Any:
        own: Any = from_local(point().detach().clone().requires_grad_(), layout)
        whole = own.redistribute(SMALL["rows"]).full()
        (grad,) = torch.autograd.grad((whole**3).sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(grad.full().sum(), own)
        return torch.allclose(grad.full(), 3 * whole**2), torch.allclose(second.full(), 6 * whole)

    assert run_local(body, 2) == [(True, True)] * 2


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a bias beside a pending sum": lambda h, w, b: (torch.tanh(torch.nn.functional.linear(h, w, b)) ** 2).sum(),
    "a bias of a norm": lambda h, w, b: (torch.nn.functional.layer_norm(h @ w, (4,), b) ** 3).sum(),
    "a bias beside sums": lambda h, w, b: ((h.sum(1, keepdim=True) * w.sum(0) + b) ** 2).mean(),
}


def both_derivatives(function: Callable[..., Tensor], *given: Any) -> list[Tensor]:
    """Gradients, and the gradients of the sum of their squares."""
    leaves = [t.detach().requires_grad_() for t in given]
    grads = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    return [*grads, *torch.autograd.grad(sum((g * g).sum() for g in grads), leaves)]


def test_second_derivatives_where_one_axis_has_addends_and_another_copies() -> None:
    """In one world, so that moves between the same layouts are remembered for one another."""
    mesh, (row, column, copy) = Mesh.of(dp=2, tp=2), (Shard(0), Shard(1), Replicate())
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (4, 4), (4,))]
    inputs = [(row, column), (copy, row), (column, row), (row, copy)]
    weights = [(row, column), (copy, column), (copy, row)]
    biases = [(copy, copy), (copy, row), (copy, Partial("sum"))]

    def body(comm: Comm) -> None:
        for name, function in FORMULAS.items():
            expected = both_derivatives(function, *whole)
            for h, w, b in product(inputs, weights, biases):
                given = [shard(t, MeshSpec(mesh, at)) for t, at in zip(whole, (h, w, (copy, copy)), strict=True)]
                given[2] = given[2].redistribute(MeshSpec(mesh, b))
                for found, wanted in zip(both_derivatives(function, *given), expected, strict=True):
                    assert isinstance(found, ShardedTensor)
                    assert torch.allclose(found.full(), wanted), (name, h, w, b)

    run_local(body, 4)


@pytest.mark.parametrize("shape", [(), (0, 3)], ids=str)
def test_shapes_without_dims_or_elements(shape: tuple[int, ...]) -> None:
    specs = [MeshSpec(PAIR, (p,)) for p in (Replicate(), Partial("sum"), Partial("avg"))]

    def body(comm: Comm) -> None:
        for one in specs:
            for two in (*specs, EnumerableSpec([Piece(Box.whole(shape), 1)])):
                x = point(shape).detach().requires_grad_()
                (shard(x, one, None).redistribute(two).full() * 3).sum().backward()
                assert x.grad is not None and torch.equal(x.grad, torch.full(shape, 3.0, dtype=torch.float64))

    run_local(body, 2)


# Exactly, by duality


def expected_grads(layout: Layout, rank: int, weights: Tensor) -> list[Tensor]:
    """The gradient of a leaf when the whole gets `weights`: that of the value, whatever is pending."""
    return local_parts(dual_layout(layout), rank, weights)


def test_every_pair_of_layouts_gives_the_leaf_its_exact_gradient() -> None:
    def body(comm: Comm) -> None:
        whole, weights = values((5, 7), torch.float64), values((5, 7), torch.float64) * 8 - 3
        for there, src in MATRIX.items():
            expected = expected_grads(src, comm.rank, weights)
            for here, dst in MATRIX.items():
                leaf = from_local(local_parts(src, comm.rank, whole), src).requires_grad_()
                moved = leaf.redistribute(dst)
                assert moved.requires_grad and (src == dst or not moved.is_leaf), f"{there} -> {here}"
                (moved.full() * weights).sum().backward()
                assert leaf.grad is not None and leaf.grad.sharding == dual_layout(src), f"{there} -> {here}"
                held = leaf.grad.local_tensors()
                assert len(held) == len(expected) and all(map(torch.equal, held, expected)), f"{there} -> {here}"

    run_local(body, 4)


def test_a_buffer_limit_holds_in_the_backward_pass_too() -> None:
    def body(comm: Comm) -> bool:
        x = point((5, 7)).detach().requires_grad_()
        moved = shard(x, MATRIX["rows"], None).redistribute(MATRIX["cyclic"], max_buffer_bytes=96)
        (moved.full(max_buffer_bytes=200) * 2).sum().backward()
        return x.grad is not None and torch.equal(x.grad, torch.full((5, 7), 2.0, dtype=torch.float64))

    assert run_local(body, 4) == [True] * 4


def test_only_the_source_rank_gets_the_gradient_of_shard() -> None:
    def body(comm: Comm) -> Any:
        x = point().detach().requires_grad_() if comm.rank == 1 else None
        laid = shard(x, SMALL["two boxes or none"], src_rank=1)
        assert laid.requires_grad
        laid.full().sum().backward()
        return None if x is None else x.grad

    none, grad = run_local(body, 2)
    assert none is None and torch.equal(grad, torch.ones(2, 3, dtype=torch.float64))


def test_gather_gives_every_rank_something_to_call_backward_on() -> None:
    def body(comm: Comm) -> Any:
        leaf = shard(point().detach(), SMALL["rows"], None).requires_grad_()
        gathered = leaf.gather_to(1)
        assert gathered is not None
        (gathered * 5).sum().backward()
        assert leaf.grad is not None
        with torch.no_grad():
            assert (leaf.gather_to(1) is None) is (comm.rank == 0)
        return leaf.grad.local_tensor()

    assert all(torch.equal(grad, torch.full((1, 3), 5.0, dtype=torch.float64)) for grad in run_local(body, 2))


def test_many_at_once_are_recorded() -> None:
    def body(comm: Comm) -> None:
        leaves = [shard(point().detach(), SMALL[name], None).requires_grad_() for name in ("rows", "avg")]
        one, two = redistribute_many(leaves, [SMALL["cyclic"], SMALL["one rank"]])
        (one.full() * 2 + two.full() * 3).sum().backward()
        first, second = leaves[0].grad, leaves[1].grad
        assert first is not None and second is not None
        assert bool((first.local_tensor() == 2).all()) and bool((second.local_tensor() == 3).all())
        with torch.no_grad():
            assert not redistribute_many(leaves, [SMALL["cyclic"]] * 2)[0].requires_grad
        assert not leaves[0].redistribute(SMALL["cyclic"], async_op=True).wait().requires_grad

    run_local(body, 2)


# What a tensor says about its gradient


def test_every_rank_gives_the_same_answers_also_one_that_holds_nothing() -> None:
    def body(comm: Comm) -> None:
        leaf = shard(point().detach(), SMALL["one rank"], None)
        assert (leaf.requires_grad, leaf.is_leaf, leaf.grad, leaf.grad_fn) == (False, True, None, None)
        assert leaf.requires_grad_() is leaf and leaf.requires_grad and leaf.is_leaf
        moved = leaf.redistribute(SMALL["two boxes or none"])
        assert moved.requires_grad and not moved.is_leaf and moved.grad_fn is not None
        moved.retain_grad()
        moved.full().sum().backward()
        assert leaf.grad is not None and moved.grad is not None
        assert leaf.grad.sharding == leaf.sharding and moved.grad.sharding == moved.sharding
        assert not leaf.detach().requires_grad and leaf.clone().requires_grad and not leaf.clone().is_leaf
        leaf.grad = None
        assert leaf.grad is None
        leaf.requires_grad = False
        assert not leaf.requires_grad and not leaf.redistribute(SMALL["rows"]).requires_grad

    run_local(body, 2)


def test_gradients_add_up_and_can_be_set() -> None:
    def body(comm: Comm) -> list[str]:
        leaf = shard(point().detach(), SMALL["one rank"], None).requires_grad_()
        for _ in range(2):
            (leaf.redistribute(SMALL["rows"]).full() + leaf.full()).sum().backward()
        assert leaf.grad is not None and all(bool((t == 4).all()) for t in leaf.grad.local_tensors())
        leaf.grad = None
        leaf.grad = shard(torch.full((2, 3), 7.0, dtype=torch.float64), SMALL["one rank"], None)
        assert leaf.grad is not None and bool((leaf.grad.full() == 7).all())
        return [error_of(setattr, leaf, "grad", leaf.redistribute(SMALL["rows"]))]

    texts = run_local(body, 2)
    assert texts[0] == texts[1]
    assert texts[0] == [
        "ValueError: the gradient has the layout [2,3] as chunk(0) over 1, got [2,3] as chunk(0) over 0-1; "
        "redistribute it"
    ]


def test_backward_from_a_sharded_tensor() -> None:
    weights = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

    def body(comm: Comm) -> list[str]:
        for name in SMALL:
            for plain in (True, False):
                x = point().detach().requires_grad_()
                end = shard(x, SMALL["rows"], None).redistribute(SMALL[name])
                end.backward(weights if plain else shard(weights, SMALL["cyclic"], None))
                assert x.grad is not None and torch.equal(x.grad, weights), name
        for op in ("sum", "avg"):
            one = point(()).detach().requires_grad_()
            shard(one, MeshSpec(PAIR, (Partial(op),)), None).backward()
            assert one.grad is not None and one.grad.item() == 1.0, op
        try:
            shard(x, SMALL["rows"], None).backward()
        except RuntimeError as error:
            return [str(error)]
        return []

    assert run_local(body, 2) == [["grad can be implicitly created only for scalar outputs; this has shape (2, 3)"]] * 2


def test_hooks_see_and_change_gradients() -> None:
    def body(comm: Comm) -> None:
        leaf = shard(point().detach(), SMALL["one rank"], None).requires_grad_()
        seen: list[Layout] = []

        def double(grad: ShardedTensor) -> ShardedTensor:
            seen.append(grad.sharding)
            return grad._like(grad.sharding, tuple(t * 2 for t in grad.local_tensors()))

        handle = leaf.register_hook(double)
        leaf.full().sum().backward()
        handle.remove()
        leaf.full().sum().backward()
        assert seen == [leaf.sharding] and leaf.grad is not None
        assert all(bool((t == 3).all()) for t in leaf.grad.local_tensors())
        many = shard(point().detach(), SMALL["two boxes or none"], None).requires_grad_()
        if comm.rank == 0:
            with pytest.raises(NotImplementedError, match="register_hook needs one local tensor on each rank"):
                many.register_hook(double)

    run_local(body, 2)


def test_a_parameter_is_a_sharded_tensor() -> None:
    def body(comm: Comm) -> None:
        for name in ("rows", "one rank", "two boxes or none", "replicated"):
            weight = torch.nn.Parameter(shard(point().detach(), SMALL[name], None))
            assert isinstance(weight, ShardedTensor) and isinstance(weight, torch.nn.Parameter)
            assert weight.requires_grad and weight.is_leaf and weight.sharding is SMALL[name].layout((2, 3))
            module = torch.nn.Module()
            module.weight = weight
            assert dict(module.named_parameters())["weight"] is weight
            weight.full().sum().backward()
            assert weight.grad is not None
            module.zero_grad()
            assert weight.grad is None
            assert not torch.nn.Parameter(weight.detach(), requires_grad=False).requires_grad

    run_local(body, 2)


def test_reshard_keeps_a_leaf_a_leaf() -> None:
    def body(comm: Comm) -> None:
        leaf = shard(point().detach(), SMALL["one rank"], None).requires_grad_()
        leaf.reshard(SMALL["cyclic"])
        assert leaf.requires_grad and leaf.is_leaf
        leaf.full().sum().backward()
        assert leaf.grad is not None and leaf.grad.sharding == leaf.sharding

    run_local(body, 2)


def test_conversion_converts_gradients_back() -> None:
    def body(comm: Comm) -> None:
        leaf = shard(point().detach().float(), SMALL["one rank"], None).requires_grad_()
        (leaf.to(torch.float64).full() * 3).sum().backward()
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        assert all(t.dtype == torch.float32 and bool((t == 3).all()) for t in leaf.grad.local_tensors())

    run_local(body, 2)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_no_gradient_passes_through_other_reductions(op: str) -> None:
    spec = MeshSpec(PAIR, (Partial(op),))

    def body(comm: Comm) -> list[str]:
        pending = from_local(point().detach().requires_grad_(), spec, (2, 3))
        values_ = shard(point().detach(), SMALL["rows"], None).requires_grad_()
        with torch.no_grad():
            pending.redistribute(SMALL["rows"])
        return [
            error_of(pending.redistribute, SMALL["rows"]),
            error_of(pending.full),
            error_of(values_.redistribute, spec),
            error_of(redistribute_many, [pending], [SMALL["rows"]]),
        ]

    text = (
        f"ValueError: no gradient passes through a pending {op}; redistribute to Shard or Replicate under "
        "torch.no_grad(), or use a pending sum or avg"
    )
    assert run_local(body, 2) == [[text] * 4] * 2


def compute_where_some_ranks_hold_nothing(comm: Comm) -> Any:
    x = shard(torch.arange(8.0), ChunkSpec(0, 3)).requires_grad_()
    y = x.redistribute(EnumerableSpec([Piece(Box((0,), (5,)), 2), Piece(Box((5,), (3,)), 0)]))
    z = torch.relu(y * y - 2 * y)
    kinds = (z > 0).dtype, z.requires_grad, (y > 1).full().tolist()
    z.sum().backward()
    assert x.grad is not None
    return kinds, x.grad.full().tolist()


def test_operators_on_pieces_keep_ranks_that_hold_nothing_on_the_tape() -> None:
    plain = torch.arange(8.0, requires_grad=True)
    torch.relu(plain * plain - 2 * plain).sum().backward()
    assert plain.grad is not None
    wanted = (torch.bool, True, (plain > 1).tolist()), plain.grad.tolist()
    assert run_local(compute_where_some_ranks_hold_nothing, 3) == [wanted] * 3


@pytest.mark.parametrize("where", ["leaf", "result", "after"])
def test_hooks_keep_no_tensor_alive(where: str) -> None:
    def body(comm: Comm) -> bool:
        x: Any = shard(torch.ones(4, 4), ChunkSpec(0, ranks=2)).requires_grad_()
        result = x * 2
        if where == "after":
            x.register_post_accumulate_grad_hook(lambda tensor: None)
        else:
            (x if where == "leaf" else result).register_hook(lambda grad: grad * 2)
        held = weakref.ref(x.local_parts[0])
        del x, result
        comm.barrier(label="made")  # the other rank has returned from the calls that read this one's tensor
        gc.collect()
        return held() is None

    assert all(run_local(body, 2))
