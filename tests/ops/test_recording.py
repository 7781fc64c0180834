"""Is an operator's code recorded on the tape of the local tensors, whoever wrote it and whatever it forgets?

No rule, local function, finish or step here enters autograd by itself: the dispatcher does, once.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import (
    Comm,
    Mesh,
    MeshSpec,
    Partial,
    Replicate,
    Shard,
    plain_as_replicated,
    run_local,
    shard,
    sharding_rule,
)
from shardwise.ops import Steps, Strategy
from shardwise.tensor import dispatch
from tests.dense import lay

PAIR = Mesh.of(tp=2)
X = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3)


@torch.library.custom_op("shardwise_recording::soft", mutates_args=())
def soft(x: Tensor) -> Tensor:
    return x.sin() * x


@soft.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * (x.sin() + x * x.cos())


soft.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _local(view: Any, x: Tensor) -> Tensor:
    return x.sin() * x


def _double(result: Any) -> Any:
    return result + result


def _strategies(local: Any = None, finish: Any = None) -> Any:
    return lambda x: [Strategy((p,), (p,), local, finish=finish) for p in (Replicate(), Shard(0), Shard(1))]


def _steps(x: Any) -> Any:
    return x.sin() * x


def _gather_and_compute(x: Any) -> Any:
    whole = x.redistribute([Replicate()])
    return whole.sin() * whole


RULES: dict[str, tuple[Any, float]] = {
    "the operator itself": (_strategies(), 1.0),
    "a local function": (_strategies(_local), 1.0),
    "a finish": (_strategies(finish=_double), 2.0),
    "a local function and a finish": (_strategies(_local, _double), 2.0),
    "steps": (Steps(_steps), 1.0),
    "steps that a rule returns": (lambda x: Steps(_steps), 1.0),
    "steps that communicate": (Steps(_gather_and_compute), 1.0),
    "a finish that communicates": (_strategies(finish=lambda y: y.redistribute([Replicate()])), 1.0),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1, sizes=(3, 0)), Partial("sum")], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_gradients_are_kept(name: str, placement: Any) -> None:
    rule, factor = RULES[name]

    def body(comm: Comm) -> None:
        dense = X.clone().requires_grad_()
        x = lay(X, PAIR, (placement,)).requires_grad_()
        for _ in range(2):
            dense.grad = x.grad = None
            found: Any = soft(x)
            expected = soft(dense) * factor
            assert torch.allclose(found.full(), expected)
            expected.square().sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
            found.full().square().sum().backward()
            assert x.grad is not None and dense.grad is not None
            assert torch.allclose(x.grad.full(), dense.grad)

    with sharding_rule(soft, rule):
        run_local(body, 2, timeout=60)


def test_without_the_one_guard_gradients_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would notice."""
    monkeypatch.setattr(dispatch, "autograd_on_locals", lambda keys: nullcontext())

    def body(comm: Comm) -> bool:
        found: Any = soft(lay(X, PAIR, (Shard(0),)).requires_grad_())
        return bool(found.requires_grad)

    with sharding_rule(soft, Steps(_steps)):
        assert run_local(body, 2, timeout=60) == [False, False]


def test_nothing_is_recorded_where_gradients_are_off() -> None:
    def body(comm: Comm) -> None:
        x = lay(X, PAIR, (Shard(0),)).requires_grad_()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found: Any = soft(x)
            assert not found.requires_grad
            assert found.local_parts[0].is_inference() == (mode is torch.inference_mode)

    for rule, _ in RULES.values():
        with sharding_rule(soft, rule):
            run_local(body, 2, timeout=60)


def test_an_operator_in_the_table_of_functions_is_refused() -> None:
    with pytest.raises(TypeError, match=r"aten\.sin\.default is an operator: register a rule with shardwise\.register"):
        dispatch.register_function(torch.ops.aten.sin.default)


def test_a_user_replaces_what_is_built_in() -> None:
    """Also where the built-in one is steps, or returns steps for a dim that is cut."""

    def body(comm: Comm) -> str:
        x: Any = lay(X, PAIR, (Shard(0),))
        return str(x.softmax(0).placements)

    assert run_local(body, 2)[0] == "(Shard(0),)"
    with sharding_rule(torch.ops.aten._softmax.default, lambda x, dim, half: [([Replicate()], [Replicate()])]):
        assert run_local(body, 2)[0] == "(Replicate(),)"
    assert run_local(body, 2)[0] == "(Shard(0),)"


def clone_clamp_and_square(x: Any) -> Any:
    """A function written in Python, as many of `torch.nn.functional` are: it calls methods of the tensor."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(clone_clamp_and_square, (x,), x)
    copy = x.clone()
    with torch.no_grad():
        copy.clamp_(min=-0.5)
    return copy.to(torch.float32).to(torch.float64) ** 2


def scale_by_plain(x: Any, scale: Tensor) -> Any:
    if torch.overrides.has_torch_function_variadic(x, scale):
        return torch.overrides.handle_torch_function(scale_by_plain, (x, scale), x, scale)
    return x * (scale.sin() + 1)


def test_methods_inside_of_functions_written_in_python_are_recorded() -> None:
    leaf = X.clone().requires_grad_()
    clone_clamp_and_square(leaf).sum().backward()

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        found = []
        for placement in (Shard(0), Replicate()):
            x = shard(X, MeshSpec(PAIR, (placement,))).requires_grad_()
            clone_clamp_and_square(x).sum().backward()
            found.append(x.grad.full())
        return found[0], found[1]

    for rows, copies in run_local(body, 2):
        torch.testing.assert_close(rows, leaf.grad)
        torch.testing.assert_close(copies, leaf.grad)


def test_losses_of_torch_pass_gradients_to_every_argument() -> None:
    inputs = [X.abs() + 0.5, X.cos(), X.abs() + 0.1]
    leaves = [t.clone().requires_grad_() for t in inputs]
    torch.nn.functional.gaussian_nll_loss(*leaves).backward()

    def body(comm: Comm) -> list[Tensor]:
        tensors = [shard(t, MeshSpec(PAIR, (Shard(0),))).requires_grad_() for t in inputs]
        torch.nn.functional.gaussian_nll_loss(*tensors).backward()
        return [t.grad.full() for t in tensors]

    for grads in run_local(body, 2):
        for found, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(found, leaf.grad)


def test_plain_arguments_of_functions_written_in_python_keep_their_tape() -> None:
    def body(comm: Comm) -> Tensor:
        scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        x = shard(X, MeshSpec(PAIR, (Replicate(),)))
        with plain_as_replicated():
            scale_by_plain(x, scale).sum().backward()
        assert scale.grad is not None
        return scale.grad

    want = torch.tensor(0.3, dtype=torch.float64).cos() * X.sum()
    for grad in run_local(body, 2):
        torch.testing.assert_close(grad, want)
