"""Do Functions and hooks that torch puts around modules work on ShardedTensors, which are not on the tape?

Full backward hooks of modules, activation checkpointing of both kinds and inside of itself, and a user's own
`torch.autograd.Function`: values, gradients, and what hooks are given, as on whole tensors.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardwise import Comm, ShardedTensor, register_autograd_function, run_local, shard
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import BOXES, S0, S1, P, R, assert_gradient, assert_same, check, forget, lay, numbers

LAYOUTS = {"S0": S0, "S1": S1, "R": R, "P": P, "P(avg)": "on tp=2: P(avg)"}
OUTSIDE = "on tp=2 @ 0,2: S(0)"


def matrix(seed: int) -> Tensor:
    return numbers(4, 4, seed=seed)


class Block(nn.Module):
    """Two inputs, one of them not differentiated at times, two outputs, parameters."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        return F.linear(x, self.weight), x * y


Heard = list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]


def listen(module: nn.Module, replace: bool) -> Heard:
    """Hooks of both kinds; what they heard, in order."""
    heard: Heard = []

    def before(module: nn.Module, grads: Any) -> Any:
        heard.append(("before", grads, ()))
        return tuple(None if g is None else g * 3 for g in grads) if replace else None

    def after(module: nn.Module, given: Any, grads: Any) -> Any:
        heard.append(("after", given, grads))
        return tuple(None if g is None else g * 0.5 for g in given) if replace else None

    module.register_full_backward_pre_hook(before)
    module.register_full_backward_hook(after)
    module.register_full_backward_hook(lambda module, given, grads: heard.append(("second", given, grads)))
    return heard


@pytest.mark.parametrize("replace", (False, True), ids=("", "replaced"))
@pytest.mark.parametrize("second", (True, False), ids=("both", "one"))
@pytest.mark.parametrize("layouts", [(x, w) for x in LAYOUTS for w in ("S0", "R", "P")])
def test_full_backward_hooks(layouts: tuple[str, str], second: bool, replace: bool) -> None:
    """Hooks are given the gradients of whole tensors; what they return takes their place; twice."""
    where, weights = (LAYOUTS[name] for name in layouts)

    def body(comm: Comm) -> None:
        dense, held = Block(matrix(1)), Block(lay(matrix(1), weights))
        expected, found = listen(dense, replace), listen(held, replace)
        for seed in (2, 4):
            whole, other = matrix(seed).requires_grad_(), matrix(seed + 1).requires_grad_(second)
            x, y = lay(whole, where), lay(other, where)
            for module, given in ((dense, (whole, other)), (held, (x, y))):
                module.zero_grad()
                one, two = module(*given)
                (one.square().sum() + (two * two).sum()).backward()
            assert_gradient(x, whole)
            assert_gradient(y, other)
            assert_gradient(held.weight, dense.weight)
        assert [name for name, *_ in found] == [name for name, *_ in expected]
        for (_, *one_pair), (_, *other_pair) in zip(found, expected, strict=True):
            for given_grads, dense_grads in zip(one_pair, other_pair, strict=True):
                assert [g is None for g in given_grads] == [g is None for g in dense_grads]
                assert_same([g for g in given_grads if g is not None], [g for g in dense_grads if g is not None])

    forget()
    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("layout", (BOXES, OUTSIDE, "on tp=3: S(0) sizes(0,4,0)"))
def test_full_backward_hooks_where_a_rank_has_nothing(layout: str) -> None:
    def body(comm: Comm) -> list[int]:
        heard: list[int] = []
        module = nn.Sequential(nn.GELU(), nn.Tanh())
        module.register_full_backward_hook(lambda module, given, grads: heard.append(1) or (given[0] * 2,))
        whole = matrix(1).requires_grad_()
        x = lay(whole, layout)
        F.tanh(F.gelu(whole)).square().sum().mul(2).backward()
        module(x).square().sum().backward()
        assert_gradient(x, whole)
        return heard

    forget()
    assert run_local(body, 3, timeout=60) == [[1]] * 3


def test_a_hook_of_all_modules_and_one_that_is_removed() -> None:
    heard: list[str] = []

    def body(comm: Comm) -> None:
        module = nn.Linear(4, 4, dtype=torch.float64)
        module.weight = nn.Parameter(lay(matrix(1), S0))
        module.bias = None  # type: ignore[assignment]  # none
        handle = module.register_full_backward_hook(lambda module, given, grads: heard.append("removed"))
        handle.remove()
        module(lay(matrix(2).requires_grad_(), R)).sum().backward()

    every = nn.modules.module.register_module_full_backward_hook(lambda m, i, o: heard.append(type(m).__name__))
    try:
        run_local(body, 2, timeout=60)
    finally:
        every.remove()
    assert heard == ["Linear"] * 2


def test_a_gradient_in_another_layout_is_moved() -> None:
    """Also a plain one, which is the same on every rank."""

    def body(comm: Comm, plain: bool) -> None:
        module = nn.Tanh()
        module.register_full_backward_hook(
            lambda module, given, grads: (given[0].full() if plain else given[0].redistribute("R"),)
        )
        whole = matrix(1).requires_grad_()
        x = lay(whole, S0)
        whole.tanh().sum().backward()
        module(x).sum().backward()
        assert_gradient(x, whole)

    for plain in (False, True):
        run_local(body, 2, plain, timeout=60)


def test_a_wrong_number_of_gradients_is_an_error_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        module = nn.Tanh()
        module.register_full_backward_hook(lambda module, given, grads: (*given, *given))
        with pytest.raises(RuntimeError, match="invalid number of grad_input, got 2, but expected 1"):
            module(lay(matrix(1).requires_grad_(), S0)).sum().backward()

    run_local(body, 2, timeout=60)


def test_hooks_of_tensors_and_nodes() -> None:
    """On tensors inside of a module with hooks: each is called once, with the gradient of the whole."""

    def body(comm: Comm) -> None:
        whole = matrix(1).requires_grad_()
        x = lay(whole, S0)
        counted: list[Any] = []
        x.register_post_accumulate_grad_hook(lambda leaf: counted.append("leaf"))
        module = nn.Tanh()
        module.register_full_backward_hook(lambda module, given, grads: counted.append("module"))
        out: Any = module(x)
        out.register_hook(lambda grad: counted.append("tensor") or grad * 2)
        out.sum().backward()
        (whole.tanh() * 2).sum().backward()
        assert_gradient(x, whole)
        assert counted == ["tensor", "module", "leaf"]

    run_local(body, 2, timeout=60)


@register_autograd_function
class Cube(torch.autograd.Function):
    """x ** 3 of its own, with a number beside it."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x**2 * (3 * ctx.factor), None


@register_autograd_function
class Swap(torch.autograd.Function):
    """Two tensors in, two of other values and an index out; with `setup_context`."""

    @staticmethod
    def forward(x: Any, y: Any) -> Any:
        return y * 2, x * 3, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.needed = ctx.needs_input_grad

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, second, last = grads
        assert last is None and ctx.needed == (True, True)
        return None if second is None else second * 3, None if first is None else first * 2


@register_autograd_function
class Straight(torch.autograd.Function):
    """The usual trick: round forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


cube: Any = Cube.apply  # untyped in torch
swap: Any = Swap.apply
straight: Any = Straight.apply

OWN: dict[str, Callable[..., Any]] = {
    "cube": lambda x: cube(x * 1, 2.0),
    "cube of a leaf": lambda x: cube(x, 2.0),
    "swap": lambda x: list(swap(x, x * x))[:2],
    "one of two": lambda x: swap(x, x * 2)[1],
    "straight": lambda x: straight(x * 3) * x,
    "inside of each other": lambda x: cube(straight(x) + x, 0.5),
    "twice differentiated": lambda x: torch.autograd.grad(cube(x, 1.0).sum(), x, create_graph=True)[0],
    "no grad": lambda x: _without_grad(x),
    "checkpointed": lambda x: checkpoint(lambda y: cube(y, 2.0) * y, x, use_reentrant=False),
}


def _without_grad(x: Any) -> Any:
    with torch.no_grad():
        return cube(x, 1.0)


@pytest.mark.parametrize("layout", (*LAYOUTS, "boxes"))
@pytest.mark.parametrize("name", OWN)
def test_a_function_of_ones_own(name: str, layout: str) -> None:
    check(OWN[name], [LAYOUTS.get(layout, BOXES)], (matrix(1),), (matrix(2),))


def test_a_function_of_ones_own_beside_plain_tensors() -> None:
    """Without ShardedTensors it is what it was; and mixed with a plain tensor that is differentiated."""
    whole = matrix(1).requires_grad_()
    cube(whole, 2.0).sum().backward()
    torch.testing.assert_close(whole.grad, 6 * whole.detach() ** 2)

    def body(comm: Comm) -> None:
        x, plain = lay(matrix(1).requires_grad_(), S0), matrix(2).requires_grad_()
        first, second, _ = swap(x, plain)
        assert isinstance(second, ShardedTensor) and not isinstance(first, ShardedTensor)
        (first.sum() + second.full().sum()).backward()
        assert plain.grad is not None and x.grad is not None
        assert_same(plain.grad, torch.full((4, 4), 2.0, dtype=torch.float64))
        assert_same(x.grad, torch.full((4, 4), 3.0, dtype=torch.float64))

    run_local(body, 2, timeout=60)


def is_freed(watched: weakref.ref[Any]) -> bool:
    """Whether a collection frees it; while another rank's thread collects, a collection of this thread does nothing."""
    for _ in range(50):
        gc.collect()
        if watched() is None:
            return True
        time.sleep(0.05)
    return False


def test_what_a_function_returned_is_freed() -> None:
    """The node keeps what the Function saved, and not its own results, which keep the node: nothing would free them."""

    def body(comm: Comm) -> bool:
        out = cube(lay(matrix(1).requires_grad_(), S0), 2.0)
        watched = weakref.ref(out.local_tensor().untyped_storage())
        del out
        return is_freed(watched)

    assert run_local(body, 2, timeout=60) == [True, True]


class Scale(torch.autograd.Function):
    """Writes to its first argument, and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Any, other: Any) -> Any:
        ctx.save_for_backward(x * 1, other)
        ctx.mark_dirty(x)
        return x.mul_(other)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        before, other = ctx.saved_tensors
        return grad * other, grad * before


@pytest.mark.parametrize(
    "place", ["on tp=3: S(0)", "on tp=3: P", "on tp=2 @ 0,2: S(1)", "as chunk(0) over 0,2", "on tp=3: R"]
)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_function_may_write_to_its_argument(place: str, recorded: bool) -> None:
    def program(x: Any, other: Any) -> Any:
        held = x * 2 if recorded else (x * 2).detach()
        found = Scale.apply(held, other)  # type: ignore[no-untyped-call]  # untyped in torch
        assert found is held and found.requires_grad
        (found.tanh() * held).sum().backward()
        return found, other.grad, x.grad if recorded else None

    def body(comm: Comm) -> None:
        whole = program(matrix(1).requires_grad_(), matrix(2).requires_grad_())
        given = (shard(m.detach(), place).requires_grad_() for m in (matrix(1), matrix(2)))
        for one, other in zip(program(*given), whole, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one.full_tensor(), other)

    run_local(body, 3, timeout=60)


def test_a_function_that_writes_and_then_needs_whole_tensors_is_refused() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.mark_dirty(x)
            x.mul_(2)
            return x.add_(torch.ones(tuple(x.shape), dtype=x.dtype))

    def body(comm: Comm) -> None:
        with pytest.raises(UnsupportedOpError, match="uses operators of ShardedTensors only"):
            Writes.apply(lay(matrix(1), S0))  # type: ignore[no-untyped-call]  # untyped in torch

    run_local(body, 2, timeout=60)


def test_a_function_needs_no_registration_but_one_of_torch_does() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]  # torch's takes any number
            return grad * 3

    class OfTorch(Own):
        __module__ = "torch.somewhere"

    def body(comm: Comm) -> None:
        x = lay(matrix(1).requires_grad_(), S0)
        Own.apply(x).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
        assert torch.equal(x.grad.full(), torch.full((4, 4), 3.0, dtype=torch.float64))
        with pytest.raises(UnsupportedOpError, match=r"shardwise\.register_autograd_function"):
            OfTorch.apply(x)  # type: ignore[no-untyped-call]  # untyped in torch

    run_local(body, 2, timeout=60)


def mlp(x: Any, w: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, w)), w)


def normed(x: Any, w: Any) -> Any:
    return F.layer_norm(x * w, (4,)) @ w


def saving(reentrant: bool, program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(program, *args, use_reentrant=reentrant)


def _nested(inner: bool, outer: bool) -> Callable[..., Any]:
    once = saving(inner, mlp)
    return saving(outer, lambda x, w: normed(once(x, w), w))


def _three_deep() -> Callable[..., Any]:
    once = saving(False, mlp)
    twice = saving(False, lambda x, w: normed(once(x, w), w) + once(w, x))
    return saving(False, lambda x, w: twice(x, w) * once(x, w))


def _by_keyword(x: Any, w: Any) -> Any:
    def inner(x: Any, w: Any) -> Any:
        return checkpoint(lambda a, *, b: mlp(a, b), x, b=w, use_reentrant=False)

    return checkpoint(inner, x, w, use_reentrant=False)


def _sequential(x: Any, w: Any) -> Any:
    layers: Iterator[Any] = (lambda y: F.gelu(y @ w) for _ in range(4))
    return checkpoint_sequential(list(layers), 2, x, use_reentrant=False)  # type: ignore[no-untyped-call]


CHECKPOINTED: dict[str, Callable[..., Any]] = {
    "re-entrant": saving(True, mlp),
    "inside of itself": _nested(False, False),
    "re-entrant inside": _nested(True, False),
    "re-entrant outside": _nested(False, True),
    "re-entrant both": _nested(True, True),
    "three deep": _three_deep(),
    "by keyword": _by_keyword,
    "sequential": _sequential,
    "behind a sum": lambda x, w: w.exp().mean() * saving(False, mlp)(x, w),
    "in part": lambda x, w: saving(True, mlp)(x * 2, w) + mlp(x, w),
}


@pytest.mark.parametrize("layouts", ((R, S0), (S0, R), (S0, S1), (S1, P)))
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_activation_checkpointing(name: str, layouts: tuple[str, str]) -> None:
    calls = [(matrix(s), matrix(s + 1)) for s in (1, 3)]
    check(CHECKPOINTED[name], layouts, *calls)


@pytest.mark.parametrize("name", ("re-entrant", "inside of itself", "three deep"))
def test_activation_checkpointing_where_a_rank_has_nothing(name: str) -> None:
    check(CHECKPOINTED[name], [OUTSIDE, OUTSIDE], (matrix(1), matrix(2)), (matrix(3), matrix(4)), world=3)


@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpointing_frees_what_it_computes_again(reentrant: bool) -> None:
    """The hidden tensor of the checkpointed code does not outlive it; it is made once more in the backward pass."""

    def body(comm: Comm) -> tuple[bool, int]:
        made: list[Any] = []

        def program(x: Any) -> Any:
            hidden = x.exp()
            made.append(weakref.ref(hidden.local_tensor().untyped_storage()))
            return hidden * hidden

        x: Any = lay(matrix(1).requires_grad_(), S0)
        out: Any = checkpoint(program, x * 1, use_reentrant=reentrant)
        freed = is_freed(made[0])
        out.sum().backward()
        return freed, len(made)

    forget()
    assert run_local(body, 2, timeout=60) == [(True, 2)] * 2
