"""Values and gradients beside infinities and not-a-number: those of the whole tensor, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import run_local
from tests.dense import S0, S1, P, R, check, lay, numbers

LAYOUTS = (S0, S1, R, "on a=2,b=2: S(0), S(1)", "on tp=3: S(0)")
VALUES = {
    "a nan": [[0.0, 2, 2, -1], [2, 2, 0, 1], [1, nan, 2, 3], [2, 2, 2, 5]],
    "infinities": [[0.0, inf, 2, -1], [2, 2, 0, 1], [1, -inf, 2, 3], [2, 2, inf, 5]],
    "mostly -inf": [[-inf] * 4, [-inf, 1, 2, -inf], [-inf, 0, 0, -inf], [-inf] * 4],
    "all kinds": [[inf, inf, 1, 1], [inf, nan, -inf, 0], [0, 0, -0.0, 0], [nan, nan, 1, -inf]],
    "a row of nan": [[nan] * 4, [1, 2, 3, 4], [4, 4, 4, 4], [0, 0, 0, 0]],
}
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(0),
    "max along": lambda x: x.max(0).values,
    "min along": lambda x: x.min(1).values,
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "logsumexp": lambda x: x.logsumexp(0),
    "logsumexp of columns": lambda x: x.logsumexp(1, keepdim=True),
    "logsumexp of all": lambda x: x.logsumexp((0, 1)),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, 2, 0, keepdim=True),
    "1-norm": lambda x: x.norm(1),
    "3-norm": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "inf-norm": lambda x: torch.linalg.vector_norm(x, inf),
    "-inf-norm": lambda x: torch.linalg.vector_norm(x, -inf, 0),
    "dist": lambda x: torch.dist(x, x.flip(0)),
    "normalize": lambda x: F.normalize(x, dim=0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_the_whole(name: str) -> None:
    for layout in LAYOUTS:
        world = 4 if "b=2" in layout else 3 if "=3" in layout else 2
        calls = [(torch.tensor(v, dtype=torch.float64).requires_grad_(),) for v in VALUES.values()]
        check(PROGRAMS[name], (layout,), *calls, world=world)


@pytest.mark.parametrize("layout", (S0, S1, P))
@pytest.mark.parametrize("name", ["logsumexp", "logsumexp of all", "norm", "1-norm", "3-norm", "norm of rows"])
def test_second_gradients(name: str, layout: str) -> None:
    def program(x: Any) -> Any:
        result = PROGRAMS[name](x)
        (gradient,) = torch.autograd.grad((result * result).sum(), x, create_graph=True)
        return (gradient * gradient).sum()

    check(program, (layout,), (numbers(4, 4).requires_grad_(),))


@pytest.mark.parametrize("layout", (S0, S1, P))
def test_other_dtypes(layout: str) -> None:
    check(lambda x: x.logsumexp((0, 1)), (layout,), (torch.arange(16).reshape(4, 4),), rtol=1e-6, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers(4, 4).to(dtype).requires_grad_()
        check(lambda x: x.logsumexp(0), (layout,), (x,), rtol=2e-2, atol=2e-2)
        check(lambda x: torch.linalg.vector_norm(x, 2, 0), (layout,), (x,), rtol=2e-2, atol=2e-2)
        check(lambda x: torch.linalg.vector_norm(x, 3, dtype=torch.float64), (layout,), (x,), rtol=2e-2, atol=2e-2)
    z = torch.complex(numbers(4, 4), numbers(4, 4, seed=1)).requires_grad_()
    check(lambda x: torch.view_as_real(x.logsumexp(0)), (layout,), (z,))
    check(lambda x: torch.linalg.vector_norm(x, 3, 0), (layout,), (z,))
    check(lambda x: torch.linalg.vector_norm(x), (layout,), (z,))


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "dtype, non_blocking, copy": lambda x: x.to(torch.float64, False, True),
    "device, dtype, non_blocking, copy": lambda x: x.to(x.device, torch.float64, False, True),
    "device of None": lambda x: x.to(None, torch.float64, False, True),
    "no dtype": lambda x: x.to(x.device, None, False, True),
    "tensor, non_blocking, copy": lambda x: x.to(x, False, True),
    "memory_format": lambda x: x.to(torch.float64, False, True, memory_format=torch.preserve_format),
    "copy by name": lambda x: x.to(torch.float64, copy=True),
    "no copy": lambda x: x.to(torch.float64, False, False),
    "device": lambda x: x.to(x.device),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("layout", (S0, R))
def test_to_copies_where_it_is_asked_to_by_position(name: str, layout: str) -> None:
    def is_written(x: Any) -> tuple[bool, float]:
        made = CONVERSIONS[name](x)
        made.add_(1)
        return made is x, float((x.full() if hasattr(x, "full") else x).sum())

    whole: Tensor = numbers(4, 4)
    expected = is_written(whole.clone())
    found = run_local(lambda comm: is_written(lay(whole.clone(), layout)), 2)
    assert [made for made, _ in found] == [expected[0]] * 2
    assert found[0][1] == pytest.approx(expected[1]) == found[1][1]


@pytest.mark.parametrize("layout", (P, R))
def test_what_is_cut_is_not_made_pending_for_a_product(layout: str) -> None:
    """Of zeros in place of addends the product with an infinite gradient is nan."""
    values, row = torch.full((3, 3, 7), 1.5, dtype=torch.float64), numbers(7)

    def body(comm: Any) -> None:
        dense, y = row.detach().clone().requires_grad_(), lay(row.detach(), layout).requires_grad_()
        x = lay(values, "on tp=2: S(2)")
        found, expected = torch.einsum("...i,i->...", x, y), torch.einsum("...i,i->...", values, dense)
        scale = torch.full((3, 3), 1.0, dtype=torch.float64)
        scale[1, 1] = inf
        (found * lay(scale, R)).sum().backward()
        (expected * scale).sum().backward()
        assert y.grad is not None
        torch.testing.assert_close(y.grad.full(), dense.grad)

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("name", ["of all", "of columns", "of rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_products_that_overflow(layout: str, name: str) -> None:
    """Infinite, as those of the whole, and not undefined by a division by the product of one rank."""
    rows = [[1e200, 1e200, 1e200, 1e200], [-1e200, 1e200, 1e200, 1e200], [1e200] * 4, [1e200, 1e200, -1e200, inf]]
    big = torch.tensor(rows, dtype=torch.float64).requires_grad_()
    world = 4 if "b=2" in layout else 3 if "=3" in layout else 2
    program = {"of all": lambda x: x.prod(), "of columns": lambda x: x.prod(0), "of rows": lambda x: x.prod(1, True)}
    check(program[name], (layout,), (big,), world=world)
