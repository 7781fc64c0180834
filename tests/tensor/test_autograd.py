"""Gradients through torch's own ways of asking for them: functions, second derivatives, hooks, checkpoints, `data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import Mesh, Partial, Replicate, Shard, run_local
from shardwise.comm import Comm
from shardwise.geometry import Placement
from shardwise.tensor import ShardedTensor
from tests.dense import check_op, lay, ramp

ROWS = Shard(0)
PAIR = Mesh.of(tp=2)
X, W = ramp(4, 6, step=0.05), ramp(5, 6, step=0.03)
WAYS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1, sizes=(5, 1)), Partial("sum"))


def leaf(tensor: Tensor, placement: Placement = ROWS) -> Any:
    return lay(tensor.detach().clone().requires_grad_(), PAIR, (placement,))


def first(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """The first derivatives, on the tape: check_op takes their gradients."""
    return lambda *tensors: torch.autograd.grad(fn(*tensors), tensors, create_graph=True)


SECOND: dict[str, Callable[..., Any]] = {
    "softmax": first(lambda x, w: (F.softmax(x @ w.t(), -1) ** 2).sum()),
    "mlp": first(lambda x, w: torch.tanh(x @ w.t()).pow(3).mean()),
    "norm": first(lambda x, w: F.layer_norm(x, (6,), w[0], w[1]).pow(3).sum()),
    "rows": first(lambda x, w: (x[1] * w[2]).sum() ** 2 + x.amax(0).pow(3).sum() + x.cumsum(0).pow(3).sum()),
    "spread": first(lambda x, w: x.var(0).pow(2).sum() + w.norm() ** 3 + x.logsumexp(1).pow(3).sum()),
    "seeded": lambda x, w: torch.autograd.grad(torch.tanh(x @ w.t()).sum(0), [x], w[:, 0] ** 2, create_graph=True),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name: str) -> None:
    check_op(SECOND[name], X, W, worlds=((2,), (2, 2)), limit=12, rtol=1e-8)


def test_torch_functions_give_gradients_of_sharded_and_plain_tensors() -> None:
    def body(comm: Comm) -> None:
        for placement in WAYS:
            x, y, plain = leaf(X, placement), leaf(X, placement), torch.ones(3, dtype=X.dtype, requires_grad=True)
            loss = (x**3).sum().full() + plain.sum()
            of_x, of_y, of_plain = torch.autograd.grad(loss, [x, y, plain], allow_unused=True, retain_graph=True)
            assert torch.allclose(of_x.full(), 3 * X**2) and of_y is None and torch.equal(of_plain, torch.ones(3))
            torch.autograd.backward([(x**2).sum(), x], [None, leaf(X).detach()], inputs=[x])
            assert torch.allclose(x.grad.full(), 3 * X)
            (x * y).sum().backward(inputs=[y])
            assert torch.allclose(x.grad.full(), 3 * X) and torch.allclose(y.grad.full(), X)
            with pytest.raises(RuntimeError, match="appears to not have been used"):
                torch.autograd.grad((x * x).sum(), [y])

    run_local(body, 2, timeout=60)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_every_function_takes_sharded_tensors() -> None:
    def body(comm: Comm) -> None:
        for placement in WAYS:
            x = leaf(X, placement)
            _Square.apply(x).sum().backward()
            assert torch.allclose(x.grad.full(), 2 * X)
            with torch.inference_mode():
                assert torch.allclose((x * x).full(), X * X)
            assert torch.allclose(_Square.apply(x.detach()).full(), X * X)

    run_local(body, 2)


def test_checkpointed_activations() -> None:
    def body(comm: Comm) -> None:
        x, w = leaf(X), leaf(W, Replicate())
        checkpoint(lambda a: F.gelu(a @ w.t()), x, use_reentrant=False).sum().backward()
        dense, weight = (t.detach().clone().requires_grad_() for t in (X, W))
        F.gelu(dense @ weight.t()).sum().backward()
        assert torch.allclose(x.grad.full(), dense.grad) and torch.allclose(w.grad.full(), weight.grad)

    run_local(body, 2)


def _dropped(comm: Comm) -> list[tuple[Any, Any]]:
    """What checkpointed dropout gives in the forward pass, and its gradient, for which it computes again."""
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        mesh = Mesh.of(all=comm.world_size)
        x: Any = lay(torch.ones(16, 16, dtype=X.dtype, requires_grad=True), mesh, (ROWS,))
        y = checkpoint(lambda a: F.dropout(F.dropout(a, 0.5), 0.2), x, use_reentrant=False)
        y.sum().backward()
        found.append((y.detach().full(), x.grad.full()))
    return found


def test_checkpointed_dropout_drops_the_same_again() -> None:
    (first, of_first), (second, of_second) = run_local(_dropped, 1)[0]
    assert torch.equal(first, of_first) and torch.equal(second, of_second) and not torch.equal(first, second)


def test_checkpointed_dropout_is_refused_where_ranks_share_a_generator() -> None:
    with pytest.raises(ValueError, match="random numbers are drawn inside a backward pass"):
        run_local(_dropped, 2)


def test_hooks_after_accumulation_and_gradients_that_hooks_may_give() -> None:
    def body(comm: Comm) -> None:
        x, seen = leaf(X), list[Any]()
        x.register_post_accumulate_grad_hook(lambda t: seen.append((t is x, t.grad.full().sum().item())))
        x.sum().backward()
        x.sum().backward()
        assert seen == [(True, 24.0), (True, 48.0)]
        for wrong in (lambda g: g.redistribute((Replicate(),)), lambda g: torch.zeros(4, 6)):
            y = leaf(X)
            y.register_hook(wrong)
            with pytest.raises(ValueError, match=r"the gradient has the layout \[4,6\] on tp=2: S\(0\), got"):
                (y * y).sum().backward()

    run_local(body, 2)


def test_data_can_be_assigned() -> None:
    def body(comm: Comm) -> None:
        x, other = leaf(X), leaf(X * 2, Shard(1)).detach()
        memory = x.local_tensor()
        x.data = leaf(X * 3).detach()
        assert x.local_tensor() is memory and torch.equal(x.full(), X * 3) and x.requires_grad
        x.data = other
        assert x.placements == (Shard(1),) and torch.equal(x.full(), X * 2) and x.requires_grad
        (x * x).sum().backward()
        assert torch.equal(x.grad.full(), X * 4)
        x.data.zero_()
        assert not x.full().any()
        with pytest.raises(TypeError, match="the data of a ShardedTensor is a ShardedTensor, got Tensor"):
            x.data = X.detach()

    run_local(body, 2)


def test_a_module_is_converted() -> None:
    def body(comm: Comm) -> None:
        module = nn.Linear(6, 5, bias=False)
        module.weight = nn.Parameter(leaf(W).detach())
        weight, optimizer = module.weight, torch.optim.SGD(module.parameters(), lr=1.0)
        module(leaf(X, Replicate())).sum().backward()
        module.float()
        assert module.weight is weight and weight.dtype == weight.grad.dtype == torch.float32
        assert isinstance(weight, ShardedTensor) and weight.requires_grad
        out = module(lay(X.detach().float(), PAIR, (Replicate(),)))
        assert out.dtype == torch.float32 and torch.allclose(out.full(), X.float() @ W.float().t())
        optimizer.step()
        assert torch.allclose(weight.full(), (W - X.sum(0)).float())

    run_local(body, 2)
