"""A view that had to be copied is never out of date without a word: it is refused once its source was written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Comm, ShardedTensor, run_local
from tests.local.dense import S0, S1, assert_same, ends, lay, numbers

COPIES: dict[str, tuple[Callable[[Any], Any], str, tuple[int, ...]]] = {
    "a row": (lambda x: x[1], S0, (4, 6)),
    "a row of a row": (lambda x: x[1][2:], S0, (4, 6)),
    "a row, by unbind": (lambda x: x.unbind(0)[1], S0, (4, 6)),
    "a view of another cut": (lambda x: x.view(5, 3, 8), S1, (5, 24)),
    "a view of that view": (lambda x: x.view(5, 3, 8).transpose(0, 1), S1, (5, 24)),
    "windows": (lambda x: x.unfold(0, 3, 1), S0, (6, 4)),
    "a diagonal": (lambda x: x.diagonal(), S0, (4, 4)),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "the tensor": lambda x: x.add_(1),
    "a view of it": lambda x: x.t().mul_(2),
    "a slice of it": lambda x: x[:1].zero_(),
    "its local tensor": lambda x: x.local_tensor().zero_() if isinstance(x, ShardedTensor) else x.zero_(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_right_or_refused(copy: str, write: str) -> None:
    """It is right before the write, and after it where it is a view; else every use of it is refused."""
    take, layout, shape = COPIES[copy]

    def body(comm: Comm) -> None:
        whole = numbers(*shape)
        x = lay(whole, layout)
        view, expected = take(x), take(whole)
        for _ in range(2):
            assert_same(view * 2, expected * 2)
        WRITES[write](x)
        WRITES[write](whole)
        assert_same(view.full(), expected)
        assert_same(view * 2, expected * 2)

    found = ends(body, 2)
    assert found in (["done"] * 2, ["UnsupportedOpError"] * 2), found


@pytest.mark.parametrize("use", [lambda v: v * 2, lambda v: v.full(), lambda v: v.sum().item(), lambda v: v.t()])
def test_every_use_of_an_old_copy_is_refused(use: Callable[[Any], Any]) -> None:
    def body(comm: Comm) -> None:
        x = lay(numbers(3, 4, 4), S0)
        row = x[1]
        use(row)
        use(row)
        x.mul_(3)
        use(row)

    assert ends(body, 2) == ["UnsupportedOpError"] * 2


def test_what_was_cloned_or_computed_before_is_kept() -> None:
    def body(comm: Comm) -> None:
        whole = numbers(4, 6)
        x = lay(whole, S0)
        kept, doubled = x[1].clone(), x[1] * 2
        x.zero_()
        assert_same(kept + 0, whole[1])
        assert_same(doubled + 0, whole[1] * 2)
        assert_same(x[1] + 1, torch.ones(6, dtype=whole.dtype))

    run_local(body, 2, timeout=60)


def test_gradients_pass_through_copies_of_leaves() -> None:
    def body(comm: Comm) -> None:
        x = lay(numbers(4, 6).requires_grad_(), S0)
        for _ in range(2):
            row = x[1]
            (row * row).sum().backward()
            with torch.no_grad():
                x.sub_(x.grad, alpha=0.1)
        dense = numbers(4, 6).requires_grad_()
        for _ in range(2):
            (dense[1] * dense[1]).sum().backward()
            with torch.no_grad():
                dense.sub_(dense.grad, alpha=0.1)
        assert_same(x, dense)

    run_local(body, 2, timeout=60)
