"""Whether contiguous() and reshape() copy does not depend on the layout: writes are seen where torch shows them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import pytest
import torch

from shardwise import Comm, run_local
from tests.dense import S0, S1, assert_same, lay, numbers

CALLS: dict[str, Callable[[Any], Any]] = {
    "columns": lambda x: x[:, :2].contiguous(),
    "rows": lambda x: x[:1].contiguous(),
    "transposed": lambda x: x.t().contiguous(),
    "transposed twice": lambda x: x.t().t().contiguous(),
    "reshaped": lambda x: x.t().reshape(-1),
    "flattened": lambda x: x.transpose(0, 1).flatten(),
    "computed": lambda x: (x.t() * 1).reshape(-1),
    "a chunk": lambda x: x.chunk(2, 1)[0].contiguous(),
    "channels last": lambda x: x.view(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    "detached": lambda x: x.t().detach().contiguous(),
    "copied": lambda x: x.t().clone().contiguous(),
}


@pytest.mark.parametrize(
    "layout", [S0, S1, "on tp=2: S(1) sizes(1,3)", "on tp=2: S(0) sizes(0,2)", "on tp=2 @ 0,2: S(0)"]
)
@pytest.mark.parametrize("call", CALLS)
def test_writes_to_the_result_are_seen_where_torch_shows_them(call: str, layout: str) -> None:
    def body(comm: Comm) -> None:
        for _ in range(2):
            whole = numbers(2, 4)
            x = lay(whole, layout)
            CALLS[call](x).add_(1)
            CALLS[call](whole).add_(1)
            assert_same(x, whole)

    run_local(body, 3 if "0,2" in layout else 2, timeout=60)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, 1:3], lambda x: x.unfold(1, 2, 1), lambda x: x[1]])
def test_strides_are_those_of_the_whole(view: Callable[[Any], Any]) -> None:
    def body(comm: Comm) -> None:
        whole = numbers(2, 4)
        for layout in (S0, S1):
            for _ in range(2):
                found, wanted = view(lay(whole, layout)), view(whole)
                assert found.stride() == wanted.stride() and found.stride(0) == wanted.stride(0)
                assert found.is_contiguous() == wanted.is_contiguous()

    run_local(body, 2, timeout=60)


def test_pointwise_operators_order_dims_as_torch_does() -> None:
    """All orders of the dims of two tensors, of one shape and broadcast, against tensors of torch with data."""
    orders = list(permutations(range(3)))

    def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
        return torch.ones([shape[d] for d in order]).permute([order.index(d) for d in range(3)])

    def body(comm: Comm) -> None:
        for other, one, two in product([(2, 3, 4), (2, 1, 4), (1, 3, 4)], orders, orders):
            wholes = torch.ones([(2, 3, 4)[d] for d in one]), torch.ones([other[d] for d in two])
            given = [
                lay(w, "on tp=1: R").permute([o.index(d) for d in range(3)])
                for w, o in zip(wholes, (one, two), strict=True)
            ]
            wanted = permuted((2, 3, 4), one) * permuted(other, two)
            assert (given[0] * given[1]).stride() == wanted.stride(), (other, one, two)

    run_local(body, 1, timeout=60)
