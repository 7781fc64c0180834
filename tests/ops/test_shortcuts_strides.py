"""Calls that differ only in the strides of the whole, or in what shares memory: the second one is never mistaken.

All sources of a shape are passed to one function, each twice and in both orders, and compared with whole tensors:
values, strides, and which writes are seen where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Comm, run_local
from tests.dense import S0, S1, R, assert_same, forget, lay, numbers
from tests.ops.test_shortcuts import LongWay

# Each of shape 4 x 6, as a view of a base or as what was computed from it.
SOURCES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "the base": ((4, 6), lambda base: base),
    "transposed": ((6, 4), lambda base: base.t()),
    "rows": ((6, 6), lambda base: base[:4]),
    "columns": ((4, 12), lambda base: base[:, :6]),
    "every second row": ((8, 6), lambda base: base[::2]),
    "copy of transposed": ((6, 4), lambda base: base.t().clone()),
    "one row": ((1, 6), lambda base: base.expand(4, 6)),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(2, 2, 6),
    "reshape of dims after": lambda x: x.reshape(4, 2, 3),
    "reshape to the same": lambda x: x.reshape(4, 6),
    "flatten": lambda x: x.flatten(),
    "torch.flatten": lambda x: torch.flatten(x, 0),
    "unflatten": lambda x: x.unflatten(1, (3, 2)),
    "contiguous": lambda x: x.contiguous(),
    "expand": lambda x: x.expand(2, 4, 6),
    "expand in the middle": lambda x: x[:, None].expand(4, 3, 6),
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, 4, 6)),
}


def _compare_once(call: Callable[[Any], Any], source: str, layout: str, seed: int) -> None:
    shape, take = SOURCES[source]
    whole = numbers(*shape, seed=seed)
    base = lay(whole, layout)
    x, dense = take(base), take(whole)
    y, wanted = call(x), call(dense)
    assert y.stride() == wanted.stride() and y.is_contiguous() == wanted.is_contiguous()
    assert_same(y, wanted)
    if y._copied_from is not None:  # a copy of a view that knows it: see test_copied_views.py
        return
    base.mul_(2), whole.mul_(2)
    assert_same(y, wanted)  # seen in a view, not in a copy
    if _is_written_once(wanted):
        y.mul_(3), wanted.mul_(3)
        assert_same(base, whole)


def _is_written_once(tensor: Tensor) -> bool:
    return all(stride or length == 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


@pytest.mark.parametrize("layout", [S0, S1, R, "on tp=2: S(0) sizes(3,1)"], ids=["S0", "S1", "R", "uneven"])
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_other_strides_are_not_mistaken(call: str, layout: str) -> None:
    names = [name for name, (shape, _) in SOURCES.items() if "sizes" not in layout or shape[0] == 4]

    def body(comm: Comm) -> None:
        for seed, source in enumerate([*names, *names, *reversed(names)]):
            _compare_once(CALLS[call], source, layout, seed)

    forget()
    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("layout", [S0, R], ids=["S0", "R"])
@pytest.mark.parametrize("call", CALLS)
def test_strided_calls_take_the_short_way(call: str, layout: str) -> None:
    """With equal values and gradients."""

    def body(comm: Comm) -> None:
        whole = numbers(4, 6, 2).requires_grad_()
        x = lay(whole, layout)
        for _ in range(3):
            strided = x.transpose(1, 2).reshape(4, 6, 2)[:, :, 0]
            with LongWay() as mode:
                y = CALLS[call](strided)
            (y * y).sum().backward()
        wanted = CALLS[call](whole.transpose(1, 2).reshape(4, 6, 2)[:, :, 0])
        (wanted * wanted).sum().backward()
        assert mode.count == 0
        assert y.stride() == wanted.stride()
        assert_same(y, wanted)
        assert whole.grad is not None and x.grad is not None
        assert_same(x.grad, whole.grad * 3)

    forget()
    run_local(body, 2, timeout=60)
