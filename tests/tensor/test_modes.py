"""Do torch's modes count, at the first call as at the later ones? Autocast, inference mode, no_grad, hooks, functions.

The dense program runs in the same mode; dtypes are compared as well as values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise import Comm, Replicate, ShardedTensor, run_local, sharding_rule
from tests.dense import (
    S0,
    S1,
    P,
    R,
    assert_gradient,
    assert_same,
    check,
    check_or_refuse,
    forget,
    lay,
    numbers,
)
from tests.device import DEVICE

aten = torch.ops.aten
LAYOUTS = {"S0": S0, "S1": S1, "R": R, "P": P}
COARSE: dict[str, Any] = {"rtol": 0.05, "atol": 0.05}


def single(seed: int) -> Tensor:
    return numbers(4, 4, seed=seed, dtype=torch.float32)


def casting(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def cast(*args: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16, **options):
            return program(*args)

    return cast


CAST: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "linear with bias": lambda x, y: F.linear(x, y, y[0]),
    "mm": torch.mm,
    "matmul": torch.matmul,
    "operator @": lambda x, y: x @ y,
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "bmm": lambda x, y: torch.bmm(x.unsqueeze(0), y.unsqueeze(0)),
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "stacked linears": lambda x, y: F.linear(F.linear(F.relu(F.linear(x, y)), y), y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x.view(2, 2, 4), y.view(2, 2, 4), y.view(2, 2, 4)),
    "conv1d": lambda x, y: F.conv1d(x.view(2, 2, 4), y[:2].reshape(2, 2, 2)),
    "linear and softmax": lambda x, y: F.linear(x, y).softmax(-1),
    "linear and mse_loss": lambda x, y: F.mse_loss(F.linear(x, y), x),
    "linear and cat": lambda x, y: torch.cat([F.linear(x, y), x]),
    "linear and add": lambda x, y: F.linear(x, y) + x,
    "linear and layer_norm": lambda x, y: F.layer_norm(F.linear(x, y), (4,)),
    "prod": lambda x, y: (x.to(torch.bfloat16).prod(), y),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CAST)
def test_autocast_from_the_first_call_on(name: str, layout: str) -> None:
    calls = [(single(1), single(2)), (single(3), single(4)), (single(5), single(6))]
    check(casting(CAST[name]), [LAYOUTS[layout]] * 2, *calls, grad=name != "prod", **COARSE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ("linear", "matmul", "attention", "einsum", "stacked linears", "linear and add"))
def test_autocast_comes_and_goes(name: str, layout: str) -> None:
    """What ran without autocast runs with it, and the other way round; also where a block inside turns it off."""
    program = CAST[name]

    def inner(x: Any, y: Any) -> Any:
        with torch.autocast(DEVICE, enabled=False):
            return program(x, y)

    def comes(x: Any, y: Any) -> Any:
        return [program(x, y), casting(program)(x, y), casting(inner)(x, y), casting(program)(x, y), program(x, y)]

    def goes(x: Any, y: Any) -> Any:
        return [casting(program)(x, y), program(x, y), casting(casting(program))(x, y)]

    for order in (comes, goes):
        check(order, [LAYOUTS[layout]] * 2, (single(1), single(2)), (single(3), single(4)), **COARSE)


@pytest.mark.parametrize("reduction", ("none", "mean"))
@pytest.mark.parametrize("layouts", ((R, S0), (S1, S1), (S0, R)))
def test_autocast_of_smooth_labels(layouts: tuple[str, str], reduction: str) -> None:
    """The scores are bfloat16, the loss is float32, also where ranks have different classes."""

    def program(x: Any, w: Any) -> Any:
        labels = (x > 9).sum(1)
        return F.cross_entropy(F.linear(x, w), labels, label_smoothing=0.1, reduction=reduction)

    check(casting(program), layouts, (single(1), single(2)), (single(3), single(4)), **COARSE)


def test_autocast_of_modules() -> None:
    """An MLP and a block of attention, their weights sharded: trained two steps as the dense ones."""

    def model() -> Any:
        middle = (torch.nn.GELU(), torch.nn.LayerNorm(8))
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), *middle, torch.nn.Linear(8, 4))
        with torch.no_grad():
            for number, parameter in enumerate(layers.parameters()):
                parameter.copy_(numbers(*parameter.shape, seed=number, dtype=torch.float32))
        return layers

    def body(comm: Comm) -> None:
        dense, held = model(), model()
        for module in held.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(lay(parameter.detach(), S0)))
        for _ in range(2):
            for layers, x in ((dense, single(1)), (held, lay(single(1), R))):
                with torch.autocast(DEVICE, torch.bfloat16):
                    out = layers(x)
                assert out.dtype == torch.bfloat16
                out.float().square().mean().backward()
            for one, other in zip(held.parameters(), dense.parameters(), strict=True):
                assert_gradient(one, other, rtol=0.1, atol=0.1)

    forget()
    run_local(body, 2, timeout=60)


def test_a_grad_scaler_skips_on_every_rank() -> None:
    """The gradient of one rank's part overflows: no rank takes the step, and the scale is the same everywhere."""

    def train(x: Any, w: Any, scaler: Any) -> None:
        optimizer = torch.optim.SGD([w], lr=0.1)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            blown = torch.ones(4, 4)
            blown[3, 3] = factor
            loss = (F.linear(x, w) * (lay(blown, S0) if isinstance(x, ShardedTensor) else blown)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def body(comm: Comm) -> float:
        dense, whole = torch.amp.GradScaler("cpu", init_scale=256.0), single(2).requires_grad_()
        train(single(1), whole, dense)
        scaler, held = torch.amp.GradScaler("cpu", init_scale=256.0), lay(single(2).requires_grad_(), S0)
        train(lay(single(1), R), held, scaler)
        assert scaler.get_scale() == dense.get_scale() == 128.0
        assert_same(held, whole, rtol=1e-5, atol=1e-6)
        return float(scaler.get_scale())

    forget()
    assert run_local(body, 2, timeout=60) == [128.0, 128.0]


COMMON: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x.view(2, 2, 4)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "linear": lambda x: F.linear(x, x * 2),
    "matmul": lambda x: (x * 2) @ x,
    "matmul of batches": lambda x: x.view(2, 2, 4) @ (x + 1),
    "attention": lambda x: F.scaled_dot_product_attention(x.view(2, 2, 4), x.view(2, 2, 4) + 1, x.view(2, 2, 4) + 2),
    "cross_entropy": lambda x: F.cross_entropy(x, x.softmax(1)),
    "nll_loss": lambda x: F.nll_loss(x, (x > 9).sum(1)),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "gelu": F.gelu,
    "silu": F.silu,
    "normalize": lambda x: F.normalize(x, dim=0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=1),
    "std": lambda x: x.std(0),
    "var_mean": lambda x: list(torch.var_mean(x, 1)),
    "norm": lambda x: x.norm(),
    "reshape": lambda x: x.reshape(2, 8) * 2,
    "flatten": lambda x: x.flatten() + 1,
    "chunk": lambda x: x.chunk(2, 1)[1] * 2,
    "split": lambda x: x.split(3)[0] * 2,
    "transpose": lambda x: x.transpose(0, 1) * 2,
    "cumsum": lambda x: x.cumsum(0),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "tensordot": lambda x: torch.tensordot(x, x * 2, 1),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "conv1d": lambda x: F.conv1d(x.view(2, 2, 4), (x * 2)[:2].reshape(2, 2, 2)),
    "pad": lambda x: F.pad(x, (1, 1)),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "meshgrid": lambda x: list(torch.meshgrid(x[0], x[1], indexing="ij")),
}


@pytest.mark.parametrize("mode", ("inference_mode", "no_grad"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COMMON)
def test_a_mode_at_the_first_call(name: str, layout: str, mode: str) -> None:
    """First in the mode, on tensors from outside and from inside of it; then outside, with gradients; then in it."""
    program, where = COMMON[name], [LAYOUTS[layout]]
    entered = getattr(torch, mode)

    def body(comm: Comm) -> None:
        for seed in range(2):
            whole = numbers(4, 4, seed=seed)
            outside = lay(whole, where[0])
            with entered():
                expected = program(whole)
                assert_same(program(outside), expected)
                assert_same(program(lay(whole, where[0])), expected)
            leaf = numbers(4, 4, seed=seed + 5).requires_grad_()
            laid = lay(leaf, where[0])
            flat = program(leaf) if isinstance(program(leaf), list) else [program(leaf)]
            found = program(laid) if isinstance(program(laid), list) else [program(laid)]
            torch.stack([t.square().sum() for t in flat]).sum().backward()  # type: ignore[no-untyped-call]
            torch.stack([t.full().square().sum() for t in found]).sum().backward()  # type: ignore[no-untyped-call]
            assert_gradient(laid, leaf)

    forget()
    run_local(body, 2, timeout=60)


COMPOSITE: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "softmax": (aten.softmax.int, lambda x: torch.softmax(x, 1)),
    "log_softmax": (aten.log_softmax.int, lambda x: F.log_softmax(x, 1)),
    "layer_norm": (aten.layer_norm.default, lambda x: F.layer_norm(x, (4,))),
    "rms_norm": (aten.rms_norm.default, lambda x: F.rms_norm(x, (4,))),
    "group_norm": (aten.group_norm.default, lambda x: F.group_norm(x, 2)),
    "einsum": (aten.einsum.default, lambda x: torch.einsum("ij,kj->ik", x, x)),
    "linear": (aten.linear.default, lambda x: F.linear(x, x)),
    "matmul": (aten.matmul.default, lambda x: torch.matmul(x, x)),
    "tensordot": (aten.tensordot.default, lambda x: torch.tensordot(x, x, 1)),
    "kron": (aten.kron.default, lambda x: torch.kron(x, x)),
    "cross_entropy": (aten.cross_entropy_loss.default, lambda x: F.cross_entropy(x, x)),
    "cosine_similarity": (aten.cosine_similarity.default, lambda x: F.cosine_similarity(x, x)),
    "conv1d": (aten.conv1d.default, lambda x: F.conv1d(x.view(1, 4, 4), x.view(1, 4, 4))),
    "batch_norm": (aten.batch_norm.default, lambda x: F.batch_norm(x, None, None, training=True)),
    "attention": (
        aten.scaled_dot_product_attention.default,
        lambda x: F.scaled_dot_product_attention(x.view(1, 4, 4), x.view(1, 4, 4), x.view(1, 4, 4)),
    ),
    "triplet": (aten.triplet_margin_loss.default, lambda x: F.triplet_margin_loss(x, x * 2, x * 3)),
    "diff": (aten.diff.default, lambda x: torch.diff(x)),
    "outer": (aten.outer.default, lambda x: torch.outer(x.sum(0), x.sum(1))),
    "square": (aten.square.default, torch.square),
    "block_diag": (aten.block_diag.default, lambda x: torch.block_diag(x, x)),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("layout", ("S0", "R"))
@pytest.mark.parametrize("mode", (nullcontext, torch.no_grad, torch.inference_mode), ids=("grad", "none", "inference"))
@pytest.mark.parametrize("name", COMPOSITE)
def test_the_rule_of_a_composite_operator_is_asked(name: str, mode: Any, layout: str) -> None:
    """And obeyed: it wants everything replicated, so the result is."""
    op, program = COMPOSITE[name]
    asked: list[str] = []

    def rule(*args: Any, **kwargs: Any) -> list[Any]:
        asked.append(name)
        return [([Replicate()], [_replicated(a) for a in (*args, *kwargs.values())])]

    def body(comm: Comm) -> None:
        for seed in range(2):
            whole = numbers(4, 4, seed=seed).requires_grad_()
            laid = lay(whole, LAYOUTS[layout])
            with mode():
                found, expected = program(laid), program(whole)
            assert_same(found, expected)
            assert found.placements == (Replicate(),)
            if expected.requires_grad:
                expected.square().sum().backward()
                found.full().square().sum().backward()
                assert_gradient(laid, whole)

    with sharding_rule(op, rule):
        run_local(body, 2, timeout=60)
    assert asked, f"the rule of {op} was never asked"


def _replicated(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_replicated(a) for a in argument] if any(hasattr(a, "placements") for a in argument) else None
    return Replicate() if hasattr(argument, "placements") else None


TAPED: dict[str, Callable[..., Any]] = {
    "mlp": lambda x, w: F.linear(F.gelu(F.linear(x, w)), w),
    "norm": lambda x, w: F.layer_norm(x * w, (4,)) @ w,
    "softmax": lambda x, w: (x @ w).softmax(-1) * x,
    "glu": lambda x, w: F.glu(x * w, 1) + F.normalize(x, dim=1)[:, :2],
}


@pytest.mark.parametrize("layouts", ((R, S0), (S0, R), (S0, S1), (S1, P)))
@pytest.mark.parametrize("name", TAPED)
def test_saved_tensors_hooks(name: str, layouts: tuple[str, str]) -> None:
    """Packed tensors are copies; what is unpacked is used."""
    program = TAPED[name]

    def hooked(x: Any, w: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return program(x, w)

    def on_cpu(x: Any, w: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return program(x, w)

    calls = [(numbers(4, 4, seed=s), numbers(4, 4, seed=s + 1)) for s in (1, 3)]
    check(hooked, layouts, *calls)
    check(on_cpu, layouts, *calls)
    check(lambda x, w: program(x, w) + hooked(x, w), layouts, *calls)


@pytest.mark.parametrize("layouts", ((R, S0), (S0, R), (S0, S1), (S1, P)))
@pytest.mark.parametrize("name", TAPED)
def test_activation_checkpointing(name: str, layouts: tuple[str, str]) -> None:
    program = TAPED[name]

    def once(x: Any, w: Any) -> Any:
        return checkpoint(program, x, w, use_reentrant=False)

    calls = [(numbers(4, 4, seed=s), numbers(4, 4, seed=s + 1)) for s in (1, 3)]
    check(once, layouts, *calls)
    check(lambda x, w: program(x, w) + once(x, w), layouts, *calls)
    check(lambda x, w: checkpoint(program, x, w, use_reentrant=True), layouts, *calls)


@pytest.mark.parametrize("layouts", ((R, S0), (S0, R)))
def test_autocast_inside_activation_checkpointing(layouts: tuple[str, str]) -> None:
    """The second forward, in the backward pass, is cast as the first one was."""

    def program(x: Any, w: Any) -> Any:
        return checkpoint(casting(TAPED["mlp"]), x, w, use_reentrant=False)

    check(program, layouts, (single(1), single(2)), (single(3), single(4)), **COARSE)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "grad": lambda x, w: torch.func.grad(lambda a: (a @ w).square().sum())(x),
    "grad of both": lambda x, w: list(torch.func.grad(lambda a, b: (a @ b).square().sum(), argnums=(0, 1))(x, w)),
    "grad and value": lambda x, w: list(torch.func.grad_and_value(lambda a: (a * w).sum())(x)),
    "vjp": lambda x, w: torch.func.vjp(lambda a: a * w, x)[1](w)[0],
    "vmap": lambda x, w: torch.func.vmap(lambda a, b: a * b)(x, w),
    "functional_call": lambda x, w: torch.func.functional_call(torch.nn.Linear(4, 4, bias=False), {"weight": w}, (x,)),
}


@pytest.mark.parametrize("layouts", ((R, R), (S0, R), (S0, S0), (S1, P)))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_functions(name: str, layouts: tuple[str, str]) -> None:
    """Right, or refused on every rank; what is computed afterwards is right."""
    calls = [(single(1), single(2)), (single(3), single(4))]
    check_or_refuse(FUNCTIONS[name], layouts, *calls, grad=False, rtol=1e-4, atol=1e-4)
    check(lambda x, w: (x @ w).square() * x, layouts, *calls, rtol=1e-4, atol=1e-4)
