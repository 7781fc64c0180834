"""Which functions take the short way at their second call, and do they give the same there?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Partial, Replicate, Shard, ShardedTensor, run_local, shard
from shardwise._cache import clear_on_change
from shardwise.geometry import Placement, ShardingSpec
from shardwise.ops import sharding_rule
from shardwise.tensor import wrap
from tests.dense import assert_same, lay, numbers

MESH = Mesh.of(tp=2)
VALUES = torch.arange(24, dtype=torch.float64).reshape(4, 6) - 7
UNEVEN = Shard(0, sizes=(3, 1))
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), UNEVEN, Partial("sum"))


class LongWay(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the operators that meet a ShardedTensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(t, ShardedTensor) for t in types)
        return func(*args, **(kwargs or {}))


def _taking(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    with LongWay() as mode:
        result = function(*args)
    return result, mode.count


def _whole(tensor: Any) -> Tensor:
    assert isinstance(tensor, ShardedTensor)
    return tensor.full()


FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "layer_norm": lambda x, y: F.layer_norm(x, (6,)),
    "linear": lambda x, y: F.linear(x, y),
    "exp": lambda x, y: y.exp(),
    "cat": lambda x, y: torch.cat([x, y, x], 1),
    "stack": lambda x, y: torch.stack((y, x), dim=1),
    "einsum": lambda x, y: torch.einsum("ij,kj->ki", x, y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_moved_inputs_take_the_short_way(name: str) -> None:
    """Also where an input has to be moved first, for every pair of placements; gradients included."""
    function = FUNCTIONS[name]

    def body(comm: Comm) -> None:
        for first in PLACEMENTS:
            for second in PLACEMENTS:
                for turn in range(3):
                    dense = [(VALUES * 0.1).requires_grad_(), (VALUES * 0.2).requires_grad_()]
                    held = [lay(t.detach(), MESH, (p,)) for t, p in zip(dense, (first, second), strict=True)]
                    for t in held:
                        t.requires_grad_()
                    result, long = _taking(function, *held)
                    assert long == 0 or turn == 0, (name, first, second)
                    expected = function(*dense)
                    torch.testing.assert_close(_whole(result), expected)
                    _whole(result).square().sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
                    expected.square().sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
                    for t, d in zip(held, dense, strict=True):
                        if d.grad is not None:
                            assert t.grad is not None
                            torch.testing.assert_close(_whole(t.grad), d.grad)

    run_local(body, 2, timeout=60)


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, w: F.adaptive_avg_pool2d(x, 2),
    "topk": lambda x, w: x.topk(2).values,
    "max": lambda x, w: torch.max(x, -1).values,
    "split": lambda x, w: x.split(2, 2)[1],
}


@pytest.mark.parametrize("layout", ["on tp=2: S(0)", "on tp=2: R", "on tp=2: S(0) sizes(4,0)"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_the_short_way(name: str, layout: str) -> None:
    """Where every rank has elements; a rank without any gets the right shape, and gradients, as well."""

    def body(comm: Comm) -> None:
        whole, filters = numbers(4, 3, 4, 4), numbers(2, 3, 2, 2, seed=1)
        weight = lay(filters, "on tp=2: R")
        for turn in range(3):
            x, dense = lay(whole, layout).requires_grad_(), whole.clone().requires_grad_()
            first, long = _taking(LAYERS[name], x, weight)
            assert turn == 0 or long == 0 or "sizes" in layout
            expected = LAYERS[name](dense, filters)
            assert_same(first, expected)
            first.square().sum().backward()
            expected.square().sum().backward()
            assert x.grad is not None and dense.grad is not None
            assert_same(x.grad, dense.grad)

    run_local(body, 2, timeout=60)


def test_writes_take_the_short_way() -> None:
    clear_on_change()  # what other tests have made known is forgotten

    def body(comm: Comm) -> int:
        first = 0
        for placement in PLACEMENTS:
            dense, x = VALUES.clone(), lay(VALUES.clone(), MESH, (placement,))
            step = lay(VALUES.clone(), MESH, (placement,))
            local = x.local_tensor()
            for turn in range(3):
                (given, long) = _taking(lambda: x.add_(step, alpha=-0.5).mul_(2))  # noqa: B023  # called at once
                dense.add_(VALUES, alpha=-0.5).mul_(2)
                assert long == 0 or turn == 0, placement
                first += long
                assert given is x
                assert x.local_tensor() is local
                torch.testing.assert_close(_whole(x), dense)
        return first

    assert max(run_local(body, 2, timeout=60)) > 0, "the long way is counted"


def test_the_short_way_is_not_taken_to_what_was_copied() -> None:
    def body(comm: Comm) -> None:
        whole, x = VALUES.clone(), lay(VALUES.clone(), MESH, (Shard(0),))
        for _ in range(3):
            own = x[1].clone()
            own.mul_(2)
            x[1].mul_(2)
            whole[1].mul_(2)
            torch.testing.assert_close(_whole(x), whole)

    run_local(body, 2, timeout=60)


def test_what_was_varied_is_forgotten_when_it_is_written_to() -> None:
    def body(comm: Comm) -> None:
        weight = lay(VALUES.clone(), MESH, (Replicate(),)).requires_grad_()
        rows = lay(VALUES.clone(), MESH, (Shard(0),))
        for turn in range(1, 4):
            (weight * rows).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
            assert weight.grad is not None
            torch.testing.assert_close(_whole(weight.grad), turn * VALUES)
            with torch.no_grad():
                weight.add_(weight, alpha=1.0)
            torch.testing.assert_close(_whole(weight * rows), 2**turn * VALUES * VALUES)

    run_local(body, 2, timeout=60)


def test_the_gradient_is_one_object_until_it_changes() -> None:
    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0)):
            x = lay(VALUES.clone(), MESH, (placement,)).requires_grad_()
            (x * 2).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
            first = x.grad
            assert first is not None and first is x.grad
            (x * 3).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
            torch.testing.assert_close(_whole(x.grad), torch.full_like(VALUES, 5))
            x.grad = None
            assert x.grad is None
            (x * 4).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
            assert x.grad is not first
            torch.testing.assert_close(_whole(x.grad), torch.full_like(VALUES, 4))

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("spec", [ChunkSpec(0, 2), MeshSpec(MESH, [Shard(0)])])
def test_chunked_tensors_take_the_short_way(spec: ShardingSpec) -> None:
    def body(comm: Comm) -> None:
        x = shard(VALUES.clone(), spec, None)
        for turn in range(2):
            result, long = _taking(lambda: (x + x).exp())
            assert long == 0 or turn == 0
            torch.testing.assert_close(_whole(result), (VALUES + VALUES).exp())

    run_local(body, 2, timeout=60)


def test_the_dtype_counts() -> None:
    """Addends of whole numbers stay addends in a sum of whole numbers; addends with fractions do not."""

    def body(comm: Comm) -> None:
        for dtype in (torch.int64, torch.float64):
            parts = torch.tensor([1.5, 2.5]).to(dtype)
            whole = lay(parts, MESH, (Partial("sum"),))
            for _ in range(2):
                assert int(_whole(whole.sum(dtype=torch.int64))) == int(parts.sum(dtype=torch.int64))

    run_local(body, 2, timeout=60)


def test_numbers_share_a_shortcut_but_for_those_that_decide() -> None:
    """A pending sum stays one times any number but 0 and those that are not finite, whatever came before."""

    def body(comm: Comm) -> Any:
        terms = wrap(MeshSpec(MESH, (Partial("sum"),)).layout((4,)), (torch.tensor([1.0, -3.0, 0.0, 2.0]),), comm)
        rows = shard(torch.arange(1.0, 5.0), MeshSpec(MESH, (Shard(0),)), comm=comm)
        kept = [(terms * n).sharding.spec.placements for n in (7.0, 8.0, 0.0)]
        found = []
        for number in (2.0, 3.0, 0.0, 0.5, math.inf, 4.0, math.nan, -1.5):
            found += [(terms * number).full(), (rows * number).full(), (rows / number).full()]
            found.append(rows.clone().addcdiv_(rows, rows, value=number).full())
        return [t.tolist() for t in found], kept

    values, kept = run_local(body, 2)[0]
    whole, total = torch.arange(1.0, 5.0), 2 * torch.tensor([1.0, -3.0, 0.0, 2.0])
    wanted = []
    for number in (2.0, 3.0, 0.0, 0.5, math.inf, 4.0, math.nan, -1.5):
        wanted += [total * number, whole * number, whole / number, whole + number]
    assert repr(values) == repr([t.tolist() for t in wanted])
    assert kept == [(Partial("sum"),), (Partial("sum"),), (Replicate(),)]


def test_a_rule_that_reads_a_number_is_asked_for_each() -> None:
    asked: list[float] = []

    def rule(x: Any, number: float) -> list[tuple[list[Any], list[Any]]]:
        asked.append(number)
        return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]

    def body(comm: Comm) -> list[Any]:
        rows = shard(torch.arange(1.0, 5.0), MeshSpec(MESH, (Shard(0),)), comm=comm)
        return [(rows / n).full().tolist() for n in (0.25, 2.0, 0.5, 3.0)]

    before = run_local(body, 2)[0]
    with sharding_rule(torch.ops.aten.div.Tensor, rule):
        assert run_local(body, 2)[0] == before
    assert set(asked) >= {0.25, 2.0, 0.5, 3.0}
