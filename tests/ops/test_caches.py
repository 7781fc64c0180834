"""What is remembered of a call? One that failed, or one with other data, must leave nothing wrong behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Comm, LayoutError, Mesh, MeshSpec, Partial, Replicate, Shard, explain, run_local, sharding_rule
from shardwise._cache import clear_on_change
from shardwise.ops import Steps, TensorMeta
from shardwise.ops import dispatch_cache as fast_path
from shardwise.ops import engine as dispatcher
from tests.dense import lay
from tests.device import DEVICE

PAIR = Mesh.of(tp=2)
X = torch.arange(24, dtype=torch.float64).reshape(4, 6) - 7


@torch.library.custom_op("shardwise_caches::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """Its shape depends on values, and no tag says so."""
    return x[x > 0].clone()


@torch.library.custom_op("shardwise_caches::plus", mutates_args=())
def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@plus.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def everywhere(*args: Any) -> list[Any]:
    return [([Replicate()], [Replicate() for _ in args])]


def test_a_shape_that_a_rule_got_wrong_is_an_error_every_time() -> None:
    def body(comm: Comm) -> None:
        x = lay(X, PAIR, (Shard(0),))
        for _ in range(3):
            with pytest.raises(LayoutError, match="the rule is wrong"):
                plus(x, x)

    with sharding_rule(plus, lambda x, y: [([Shard(1)], [Shard(0), Shard(0)])]):
        run_local(body, 2, timeout=60)


def test_a_remembered_call_compares_shapes() -> None:
    """An operator whose shapes depend on values without saying so: an error, never the shape of the first call."""

    def body(comm: Comm) -> None:
        assert tuple(positive(lay(X, PAIR, (Replicate(),))).shape) == (16,)
        for _ in range(2):
            with pytest.raises(LayoutError, match=r"returned \(24,\), where .* has \(\(16,\),\)|rule is wrong"):
                positive(lay(X + 10, PAIR, (Replicate(),)))

    with sharding_rule(positive, everywhere):
        run_local(body, 2, timeout=60)


def test_a_call_that_failed_leaves_nothing_behind() -> None:
    """The rule, its local function, a finish and steps raise at the first call, and are asked again at the second."""
    broken = [True]

    def fail(*args: Any) -> Any:
        if broken[0]:
            raise RuntimeError("not yet")
        return None

    def rule(x: TensorMeta, y: TensorMeta) -> Any:
        fail()
        return everywhere(x, y)

    def steps(x: Any, y: Any) -> Any:
        fail()
        return x + y

    def body(comm: Comm) -> None:
        x = lay(X, PAIR, (Shard(0),))
        found: Any = plus(x, x)
        assert torch.equal(found.full(), X + X)

    for code in (rule, Steps(steps), lambda x, y: Steps(steps)):
        broken[0] = True
        with sharding_rule(plus, code):
            before = len(dispatcher._decisions), len(fast_path._shortcuts)
            with pytest.raises(RuntimeError, match="not yet"):
                run_local(body, 2, timeout=60)
            assert (len(dispatcher._decisions), len(fast_path._shortcuts)) == before
            broken[0] = False
            run_local(body, 2, timeout=60)


@pytest.mark.parametrize("order", [(False, True), (True, False)], ids=("plain first", "with gradients first"))
def test_a_rule_sees_what_is_differentiated(order: tuple[bool, bool]) -> None:
    seen: list[tuple[bool, bool]] = []

    def rule(x: TensorMeta, y: TensorMeta) -> list[Any]:
        seen.append((x.requires_grad, y.requires_grad))
        placement = Replicate() if x.requires_grad else Shard(0)
        return [([placement], [placement, placement])]

    def body(comm: Comm) -> None:
        for _ in range(2):
            for grad in order:
                x = lay(X, PAIR, (Shard(0),)).requires_grad_(grad)
                found: Any = torch.ops.shardwise_caches.plus(x, lay(X, PAIR, (Shard(0),)))
                assert found.placements == ((Replicate(),) if grad else (Shard(0),))
                with torch.no_grad():
                    found = torch.ops.shardwise_caches.plus(x, lay(X, PAIR, (Shard(0),)))
                assert found.placements == (Shard(0),)

    with sharding_rule(plus, rule):
        run_local(body, 2, timeout=60)
    assert set(seen) == {(True, False), (False, False)}


def test_slices_of_other_bounds_are_other_calls() -> None:
    keys: list[Any] = [
        slice(1, 3), slice(0, 3), slice(1, 3, 2), slice(None, 2), slice(-2, None), (slice(1, 2), 0), (0, slice(1, 2)),
        (..., slice(1, 4)), (None, slice(0, 1)), (slice(None), 3), (slice(None), slice(3, 3)), 2, -1,
    ]  # fmt: skip

    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0), Shard(1), Shard(0, sizes=(3, 1))):
            x: Any = lay(X, PAIR, (placement,))
            for _ in range(2):
                for key in keys:
                    assert torch.equal(x[key].full(), X[key]), (placement, key)

    clear_on_change()
    run_local(body, 2, timeout=60)


def test_a_view_as_another_dtype_is_not_a_reshape() -> None:
    def body(comm: Comm) -> None:
        x: Any = lay(X, PAIR, (Shard(0),))
        for _ in range(3):
            assert x.view(torch.int64).dtype == torch.int64
            assert x.view(24).dtype == torch.float64

    clear_on_change()
    run_local(body, 2, timeout=60)


def test_autocast_to_another_dtype_is_another_call() -> None:
    def body(comm: Comm) -> None:
        x: Any = lay(X.float()[:, :4], PAIR, (Shard(0),))
        for dtype in (torch.bfloat16, torch.float16, None, torch.bfloat16):
            with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
                assert (x @ x).dtype == (dtype or torch.float32)
                assert torch.mm(x, x).dtype == (dtype or torch.float32)

    clear_on_change()
    run_local(body, 2, timeout=60)


REPLACED: dict[str, Callable[[Any], Any]] = {
    "data of another dtype": lambda x: setattr(x, "data", x.detach().to(torch.float32)),
    "data in another layout": lambda x: setattr(x, "data", x.detach().redistribute((Shard(1),))),
    "resharded": lambda x: x.reshard(MeshSpec(PAIR, (Shard(1),))),
    "a view in place": lambda x: x.unsqueeze_(0),
    "an assigned shard": lambda x: setattr(x.local_shards()[0], "tensor", x.local_tensor() * 2),
    "a local tensor of another dtype": lambda x: setattr(x.local_tensor(), "data", x.local_tensor().int()),
    "data of a copy": lambda x: setattr(copy.copy(x), "data", x.detach().to(torch.float32)),
}
READERS: tuple[Callable[[Any], Any], ...] = (
    torch.relu,
    lambda x: x + x,
    lambda x: x * 2,
    lambda x: torch.where(x > 0, x, x),
    lambda x: x.sum(),
    lambda x: x.transpose(0, -1),
    lambda x: x.clone().zero_(),
    lambda x: (x + 1).zero_() + 1,
)


@pytest.mark.parametrize("name", REPLACED)
def test_what_replaces_layout_or_local_tensors_is_seen(name: str) -> None:
    def read(x: Any) -> None:
        whole = x.full()
        for reader in READERS:
            for _ in range(2):
                found, wanted = reader(x), reader(whole)
                assert found.dtype == wanted.dtype and found.local_tensor().dtype == wanted.dtype
                assert torch.equal(found.full(), wanted)

    def body(comm: Comm) -> None:
        x: Any = lay(X, PAIR, (Shard(0),))
        read(x)
        REPLACED[name](x)
        read(x)

    clear_on_change()
    run_local(body, 2, timeout=60)


def test_a_local_tensor_that_was_cut_is_an_error() -> None:
    def body(comm: Comm) -> None:
        x: Any = lay(X, PAIR, (Shard(0),))
        for _ in range(2):
            torch.relu(x)
        x.local_tensor().data = x.local_tensor().detach()[:1]
        for _ in range(2):
            with pytest.raises(LayoutError, match=r"returned \(1, 6\), where .* has \(\(2, 6\),\)"):
                torch.relu(x)

    run_local(body, 2, timeout=60)


SHAPES = ((8, 6), (6, 6), (2, 6), (1, 6), (8, 1), (3, 6), (0, 6), (12, 6))
AT_SHAPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, w, b: x + x.clone(),
    "broadcast": lambda x, w, b: x * b,
    "linear": lambda x, w, b: F.linear(x, w, w[:, 0]),
    "matmul": lambda x, w, b: x @ w.t(),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (x.shape[-1],)),
    "softmax": lambda x, w, b: torch.softmax(x, -1),
    "t": lambda x, w, b: x.t(),
    "sum": lambda x, w, b: x.sum(0),
}


@pytest.mark.parametrize("name", AT_SHAPES)
@pytest.mark.parametrize("placement", (Shard(0), Shard(1), Replicate()), ids=str)
def test_a_choice_at_one_shape_is_right_at_others(name: str, placement: Any) -> None:
    """What is chosen is shared between shapes; lengths of 0 and 1, and pieces that are empty or uneven, are others."""
    function = AT_SHAPES[name]

    def body(comm: Comm) -> None:
        for shape in SHAPES:
            dense = [
                torch.randn(size, generator=torch.Generator(DEVICE).manual_seed(5)) for size in (shape, (4, shape[1]))
            ]
            dense.append(torch.randn(shape[1], generator=torch.Generator(DEVICE).manual_seed(6)))
            held = [lay(t, PAIR, (p,)) for t, p in zip(dense, (placement, Replicate(), Replicate()), strict=True)]
            torch.testing.assert_close(function(*held).full(), function(*dense))

    clear_on_change()
    run_local(body, 2, timeout=60)


def test_shapes_that_do_not_fit_are_refused_on_every_rank_after_some_that_do() -> None:
    """The first local parts of 8 and of 7 rows have the same shape."""

    def body(comm: Comm) -> list[str]:
        x, y, short = (lay(torch.ones(n, 6), PAIR, (Shard(0),)) for n in (8, 8, 7))
        refused = []
        for function in (lambda a, b: a + b, lambda a, b: torch.maximum(a, b)):
            assert torch.equal(function(x, y).full(), function(torch.ones(8, 6), torch.ones(8, 6)))
            with pytest.raises(RuntimeError, match="broadcast") as caught:
                function(x, short)
            refused.append(type(caught.value).__name__)
        return refused

    first, second = run_local(body, 2, timeout=60)
    assert first == second and len(first) == 2


def test_numbers_that_change_at_every_step_are_decided_once() -> None:
    def body(comm: Comm) -> list[int]:
        x = lay(X, Mesh.of(tp=1), (Shard(0),)).requires_grad_()
        optimizer = torch.optim.AdamW([x], lr=0.1)
        known = []
        for _ in range(4):
            (x * x).sum().backward()
            optimizer.step()
            known.append(len(dispatcher._decisions))
        return known

    (known,) = run_local(body, 1, timeout=60)
    assert known[1] == known[3]


def test_a_remembered_number_does_not_stand_for_zero_or_infinity() -> None:
    def body(comm: Comm) -> None:
        for number in (2.0, 3.0, 0.0, float("inf"), 4.0):
            pending = lay(X, PAIR, (Partial("sum"),))  # a new one: what was summed once is taken so again
            product = pending * number
            assert isinstance(product.placements[0], Partial) == (number in (2.0, 3.0, 4.0))
            torch.testing.assert_close(product.full(), X * number, equal_nan=True)

    run_local(body, 2, timeout=60)


def _sum_and(change: Callable[[Any], Any]) -> Callable[[Comm], tuple[int, Tensor]]:
    """Have a pending tensor summed, change something, and use it again: the bytes of the second use, and its result."""

    def body(comm: Comm) -> tuple[int, Tensor]:
        x: Any = lay(X, PAIR, (Partial("sum"),)) * 1
        x.exp()
        change(x)
        with explain() as log:
            found: Any = x * x
        return log.moved_bytes, found.full()

    return body


SUM_BYTES = 2 * X.numel() * 8
CHANGES: dict[str, tuple[Callable[[Any], Any], int, Tensor]] = {
    "nothing": (lambda x: x.relu(), 0, X * X),
    "written": (lambda x: x.mul_(2.0), SUM_BYTES, 4 * X * X),
    "written through a view": (lambda x: x.t().mul_(2.0), SUM_BYTES, 4 * X * X),
    "a local tensor written": (lambda x: x.local_tensor().mul_(2.0), SUM_BYTES, 4 * X * X),
    "other memory": (lambda x: setattr(x.local_tensor(), "data", x.local_tensor() * 2), SUM_BYTES, 4 * X * X),
    "other data": (lambda x: setattr(x, "data", x.detach() * 2), SUM_BYTES, 4 * X * X),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sum_is_made_again_after_a_change(name: str) -> None:
    change, moved, wanted = CHANGES[name]
    for _ in range(2):
        for found in run_local(_sum_and(change), 2, timeout=60):
            assert found[0] == moved
            assert torch.equal(found[1], wanted)


def test_a_sum_made_without_a_tape_is_no_part_of_one() -> None:
    def body(comm: Comm) -> list[Tensor]:
        found = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            x: Any = lay(X, PAIR, (Partial("sum"),)).requires_grad_()
            with mode():
                assert torch.equal((x * x).full(), X * X)
            for _ in range(2):
                with torch.no_grad():
                    assert not (x * x).requires_grad
                ((x * x).exp() * x * 0 + x * x).sum().backward()
            found.append(x.grad.full())
        return found

    for gradients in run_local(body, 2, timeout=60):
        assert all(torch.equal(g, 4 * X) for g in gradients)


def test_a_sum_that_several_operators_use_has_one_gradient() -> None:
    """Backward makes one sum for the replicated result, however many columns use it."""

    def body(comm: Comm) -> tuple[list[int], Tensor]:
        weights = [lay(torch.eye(6, dtype=X.dtype), PAIR, (Shard(0),)).requires_grad_() for _ in range(3)]
        moved = []
        for _ in range(2):
            x: Any = lay(X, PAIR, (Partial("sum"),)).requires_grad_()
            with explain() as log:
                sum(F.linear(x, w).exp() for w in weights).sum().backward()  # type: ignore[union-attr]  # never 0
            moved.append(log.moved_bytes)
        return moved, x.grad.full()

    for moved, gradient in run_local(body, 2, timeout=60):
        assert moved == [2 * SUM_BYTES] * 2
        torch.testing.assert_close(gradient, 3 * X.exp())


def test_a_replicated_weight_whose_local_tensor_gets_other_memory_is_read_again() -> None:
    """It varies, so a tensor over its memory is kept for its next use."""

    def body(comm: Comm) -> None:
        x, weight = lay(X, PAIR, (Shard(0),)), lay(X[:3], PAIR, (Replicate(),)).requires_grad_()
        for factor in (1, 2, 4):
            found: Any = F.linear(x, weight)
            assert torch.equal(found.full(), F.linear(X, X[:3] * factor))
            found.sum().backward()
            weight.local_tensor().data = weight.local_tensor().detach() * 2

    run_local(body, 2, timeout=60)
