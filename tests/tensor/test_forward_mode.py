"""Forward-mode differentiation of ShardedTensors: tangents as those of whole tensors, in every layout.

Torch has one level of dual numbers for all threads: it is entered once, around the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Comm, ShardedTensor, redistribute_many, run_local
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import BOXES, S0, S1, P, R, assert_same, forget, lay, numbers

forward_ad: Any = torch.autograd.forward_ad  # untyped in torch
# Torch's own, when it loads its formulas.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
LAYOUTS = {"S0": S0, "S1": S1, "R": R, "P": P, "P(avg)": "on tp=2: P(avg)", "uneven": "on tp=2: S(0) sizes(0,4)"}
PLACES = {**LAYOUTS, "block": "on tp=2: S(0) block(1)"}


def matrix(seed: int) -> Tensor:
    return numbers(4, 4, seed=seed)


def laid_like(x: Any, whole: Tensor, layout: str) -> Any:
    return lay(whole, layout) if isinstance(x, ShardedTensor) else whole


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "square": lambda x: x * x,
    "mlp": lambda x: F.linear(F.gelu(F.linear(x, x)), x),
    "matmul": lambda x: x @ x.t(),
    "softmax": lambda x: x.softmax(0) * x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "sum": lambda x: x.sum(0) * x.sum(1),
    "mean": lambda x: x - x.mean(),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(),
    "norm": lambda x: F.normalize(x, dim=0),
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(0).values * 2,
    "max of all": lambda x: x.max(),
    "inf norm": lambda x: x.norm(float("inf")),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x.prod(0),
    "rows": lambda x: x[1:3] * 2,
    "row": lambda x: x[2],
    "cat": lambda x: torch.cat([x, x * x]).reshape(2, 16).sum(0),
    "transpose": lambda x: x.t().contiguous() * x,
    "where": lambda x: torch.where(x > 0, x * x, x),
    "in place": lambda x: (x * x).mul_(x).add_(1),
    "flip": lambda x: x.flip(0) * x,
    "sort": lambda x: x.sort(0).values,
    "cross_entropy": lambda x: F.cross_entropy(x, x.softmax(1)),
    "mse_loss": lambda x: F.mse_loss(x, x * x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x * x),
    "tril": lambda x: x.tril() @ x,
    "dtype": lambda x: (x.float() * 2).double(),
    "redistribute": lambda x: x.redistribute("R") * x if isinstance(x, ShardedTensor) else x * x,
    "constant": lambda x: (x > 0).sum(),
    "detach": lambda x: x.detach() * x,
}


def tangent_of(program: Callable[..., Any], *pairs: tuple[Any, Any]) -> list[Any]:
    out = program(*(forward_ad.make_dual(x, t) for x, t in pairs))
    return list(forward_ad.unpack_dual(out))


def assert_pair(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert_same(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        assert_same(found[1], expected[1], rtol=1e-6, atol=1e-6)


def run_in_level(body: Callable[[Comm], Any], world: int = 2) -> list[Any]:
    forget()
    with forward_ad.dual_level():
        return run_local(body, world, timeout=60)


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_tangents(name: str, layout: str) -> None:
    """Beside tensors that are recorded too, and after the same call without tangents, whose shortcut is not taken."""
    program, where = PROGRAMS[name], PLACES[layout]

    def body(comm: Comm) -> None:
        for seed, grad in ((1, False), (3, True)):
            whole, along = matrix(seed).requires_grad_(grad), matrix(seed + 1)
            expected = tangent_of(program, (whole, along))
            for tangent in (along, lay(along, where), lay(along, S1)):
                assert_pair(tangent_of(program, (lay(whole, where), tangent)), expected)

    def before(comm: Comm) -> None:
        for seed in (5, 6, 7):
            program(lay(matrix(seed), where))

    forget()
    run_local(before, 2, timeout=60)
    with forward_ad.dual_level():
        run_local(body, 2, timeout=60)


@pytest.mark.parametrize("layout", ("boxes", "outside", "empty"))
@pytest.mark.parametrize("name", ("square", "mean", "where", "in place", "max of all"))
def test_tangents_where_a_rank_has_nothing(name: str, layout: str) -> None:
    where = {"boxes": BOXES, "outside": "on tp=2 @ 0,2: S(0)", "empty": "on tp=3: S(0) sizes(0,4,0)"}[layout]

    def body(comm: Comm) -> None:
        whole, along = matrix(1), matrix(2)
        found = tangent_of(PROGRAMS[name], (lay(whole, where), lay(along, where)))
        assert_pair(found, tangent_of(PROGRAMS[name], (whole, along)))

    run_in_level(body, 3)


@pytest.mark.parametrize("layouts", [(x, w) for x in ("S0", "R", "P") for w in ("S0", "S1", "R")])
def test_one_of_two_tensors_has_a_tangent(layouts: tuple[str, str]) -> None:
    one, other = (LAYOUTS[name] for name in layouts)

    def body(comm: Comm) -> None:
        x, w, along = matrix(1), matrix(2), matrix(3)
        for program in (lambda a, b: a @ b, lambda a, b: F.linear(b, a).softmax(0), lambda a, b: (a * b).sum(0)):
            expected = tangent_of(lambda a, w=w, program=program: program(a, w), (x, along))
            held = lay(w, other)
            found = tangent_of(lambda a, w=held, program=program: program(a, w), (lay(x, one), lay(along, one)))
            assert_pair(found, expected)

    run_in_level(body)


@pytest.mark.parametrize("layout", ("S0", "S1", "R", "P"))
@pytest.mark.parametrize("name", ("square", "mlp", "softmax", "layer_norm", "mean", "amax", "cat"))
def test_tangents_of_gradients_and_gradients_of_tangents(name: str, layout: str) -> None:
    """Forward over reverse and reverse over forward: both are the product of the Hessian and a vector."""
    program, where = PROGRAMS[name], LAYOUTS[layout]

    def forward_over_reverse(x: Any, t: Any) -> Any:
        dual = forward_ad.make_dual(x, t)
        (grad,) = torch.autograd.grad(program(dual).square().sum(), dual, create_graph=True)
        return forward_ad.unpack_dual(grad).tangent

    def reverse_over_forward(x: Any, t: Any) -> Any:
        out = program(forward_ad.make_dual(x, t)).square().sum()
        return torch.autograd.grad(forward_ad.unpack_dual(out).tangent, x)[0]

    def body(comm: Comm) -> None:
        whole, along = matrix(1).requires_grad_(), matrix(2)
        expected = torch.autograd.functional.hvp(lambda x: program(x).square().sum(), whole, along)[1]  # type: ignore[no-untyped-call]
        for way in ways:
            assert_same(way(lay(whole, where), lay(along, where)), expected, rtol=1e-6, atol=1e-6)

    # Torch's own gradients of these tangents raise, or are wrong.
    ways = (forward_over_reverse, *(() if name in ("softmax", "layer_norm") else (reverse_over_forward,)))
    run_in_level(body)


def test_a_tangent_in_a_backward_pass_without_a_tape() -> None:
    """`create_graph=False`: the gradients that move have tangents all the same."""

    def body(comm: Comm) -> None:
        def program(x: Any, t: Any, w: Any) -> Any:
            dual = forward_ad.make_dual(x, t)
            (grad,) = torch.autograd.grad(((dual @ w) ** 3).sum(), dual)
            return forward_ad.unpack_dual(grad).tangent

        x, t, w = matrix(1).requires_grad_(), matrix(2), matrix(3)
        assert_same(program(lay(x, R), lay(t, R), lay(w, S1)), program(x, t, w), rtol=1e-6, atol=1e-6)

    run_in_level(body)


def test_many_moves_at_once_carry_tangents() -> None:
    def body(comm: Comm) -> None:
        duals = [forward_ad.make_dual(lay(matrix(i), S0), lay(matrix(i + 2), S0)) for i in range(2)]
        for i, moved in enumerate(redistribute_many(duals, ["S(1)", "R"])):
            assert_same(forward_ad.unpack_dual(moved).tangent, matrix(i + 2))
        with pytest.raises(NotImplementedError, match="tangents of forward mode do not travel with async_op=True"):
            redistribute_many(duals, ["S(1)", "R"], async_op=True)

    run_in_level(body)


def test_what_has_no_tangent_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        x = lay(matrix(1), S0)
        with pytest.raises(ValueError, match=r"a tangent has the shape of its value: \(4, 4\), got \(4,\)"):
            forward_ad.make_dual(x, lay(numbers(4), R))
        with pytest.raises(ValueError, match="no gradient passes through a pending max"):
            forward_ad.make_dual(lay(matrix(1), "on tp=2: P(max)"), x)
        with pytest.raises(UnsupportedOpError, match=r"pass tangent\.full\(\)"):
            forward_ad.make_dual(matrix(1), x)
        assert forward_ad.unpack_dual(x).tangent is None

    run_in_level(body)


def test_a_level_ends() -> None:
    """What was dual has no tangent afterwards, and functions take their shortcuts again."""

    def body(comm: Comm) -> None:
        x, t = (lay(matrix(seed), "on tp=1: S(0)") for seed in (1, 2))
        with forward_ad.dual_level():
            kept: Any = forward_ad.make_dual(x, t) * 2
        assert_same(kept, matrix(1) * 2)
        assert forward_ad.unpack_dual(kept).tangent is None
        with forward_ad.dual_level():
            assert forward_ad.unpack_dual(kept).tangent is None

    forget()
    run_local(body, 1, timeout=60)


@pytest.mark.parametrize("name", ("square", "mlp", "softmax", "sum", "amax", "cat", "in place", "constant"))
def test_jvp(name: str) -> None:
    """In one rank: torch counts jvps of all threads together. Several ranks are processes elsewhere."""
    program = PROGRAMS[name]

    def body(comm: Comm) -> None:
        for seed in (1, 3):
            whole, along = matrix(seed).requires_grad_(seed == 3), matrix(seed + 1)
            where = "on tp=1: S(0)"
            found = torch.func.jvp(program, (lay(whole, where),), (lay(along, where),))
            assert_pair(found, torch.func.jvp(program, (whole,), (along,)))

    forget()
    run_local(body, 1, timeout=60)


def test_jvp_of_a_gradient() -> None:
    """By the tape; `torch.func.grad` inside would lose the tangent, and is refused."""

    def hvp(x: Any, t: Any) -> Any:
        def gradient(y: Any) -> Any:
            return torch.autograd.grad((y.exp() * y).sum(), y, create_graph=True)[0]

        return torch.func.jvp(gradient, (x,), (t,))

    def body(comm: Comm) -> None:
        whole, along, where = matrix(1).requires_grad_(), matrix(2), "on tp=1: S(0)"
        x, t = lay(whole, where), lay(along, where)
        assert_pair(hvp(x, t), ((whole.exp() * (1 + whole)), (whole.exp() * (2 + whole)) * along))
        with pytest.raises(UnsupportedOpError, match=r"use torch\.autograd\.grad inside of torch\.func\.jvp"):
            torch.func.jvp(torch.func.grad(lambda y: (y.exp() * y).sum()), (x.detach(),), (t,))

    run_local(body, 1, timeout=60)


BATCHED: dict[str, Callable[[Any], Any]] = {
    "jacfwd": lambda x: torch.func.jacfwd(lambda y: y * y)(x),
    "linearize": lambda x: torch.func.linearize(lambda y: y * y, x)[1](x),
}


@pytest.mark.parametrize("name", BATCHED)
def test_many_tangents_at_once_are_refused(name: str) -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(UnsupportedOpError, match=r"call torch\.func\.jvp for one tangent after the other"):
            BATCHED[name](lay(matrix(1), "on tp=1: S(0)"))

    run_local(body, 1, timeout=60)
