"""A view that had to be copied is never out of date without a word: it is refused once its source was written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Comm, ShardedTensor, run_local, shard
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import S0, S1, R, assert_same, ends, lay, numbers

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


STATEMENTS = {
    "a row": "x[2] += 1",
    "a column": "x[:, 1] *= 3",
    "an element": "x[1, 2] -= 4",
    "a row by another": "x[-1] += x[0]",
    "a row of a row": "x[3][1:3].zero_()",
    "a row in steps": "r = x[1]; r.mul_(2); r.add_(1)",
    "rows in turn": "for i in range(1, 4): x[i] += x[i - 1]",
    "a transposed row": "x.t()[1] += 1",
    "a view of another cut": "x.view(8, 3).mul_(2)",
    "a diagonal": "x.diagonal().add_(5)",
    "the diagonal": "x.fill_diagonal_(3.0)",
}


@pytest.mark.parametrize("layout", [S0, S1, R, "on tp=2: S(0) sizes(0,4)", "on tp=2: S(1) block(1)", "on tp=2: P"])
@pytest.mark.parametrize("statement", STATEMENTS)
def test_what_is_written_to_a_copy_is_written_to_its_source(statement: str, layout: str) -> None:
    """Values and gradients are those of whole tensors."""

    def body(comm: Comm) -> None:
        dense, leaf = numbers(4, 6).requires_grad_(), lay(numbers(4, 6), layout).requires_grad_()
        whole, x = dense * 2, leaf * 2
        exec(STATEMENTS[statement], {"x": whole})
        exec(STATEMENTS[statement], {"x": x})
        assert_same(x, whole)
        (whole * whole).sum().backward()
        (x * x).sum().backward()
        assert_same(leaf.grad, dense.grad)

    run_local(body, 2, timeout=60)


def test_detached_and_cloned_copies_are_refused_once_they_are_old() -> None:
    def body(comm: Comm) -> None:
        x = lay(numbers(4, 6), S0)
        row, detached = x[1], x[1].detach()
        x.add_(1)
        for use in (lambda: detached * 2, lambda: row.clone(), lambda: row.detach() + 1):
            with pytest.raises(UnsupportedOpError, match="so it is out of date"):
                use()

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("layout", [S0, S1, "on tp=2: S(0) block(1)"])
def test_rows_that_were_taken_together_can_be_written_one_after_the_other(layout: str) -> None:
    def body(comm: Comm) -> None:
        whole, x = numbers(4, 6), lay(numbers(4, 6), layout)
        for factor, (row, dense) in enumerate(zip(x, whole, strict=True)):
            row.mul_(factor)
            dense.mul_(factor)
        assert_same(x, whole)

    run_local(body, 2, timeout=60)


TURNS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.t_(),
    "transposed twice": lambda x: x.t_().transpose_(0, 1),
    "another dim": lambda x: x.unsqueeze_(1),
    "a dim and back": lambda x: x.unsqueeze_(0).squeeze_(),
}
PLACES = [
    "as pieces 2[0:3,0:3]",
    "as pieces 0[0:3,0:1],2[0:3,1:3]",
    "on tp=2 @ 0,2: S(1)",
    "as chunk(0) over 0,2",
    "on tp=3: S(0) each 3",
    "on tp=2 @ 0,2: S(0) groups(0 each 2,3 each 1)",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("turn", TURNS)
def test_a_tensor_turned_into_a_copied_view_of_itself_is_written_like_any_other(turn: str, place: str) -> None:
    """And so is a view taken before, of what the tensor was; after a write the other one is right, or refused."""

    def turned(x: Any) -> tuple[Any, Any]:
        before = x.view_as(x)
        TURNS[turn](x)
        return x, before

    def body(comm: Comm, number: int, write: Callable[[Any], Any]) -> None:
        expected = turned(numbers(3, 3))
        found = turned(shard(numbers(3, 3), place))
        write(expected[number])
        write(found[number])
        assert_same(found[number], expected[number])
        try:
            other = found[1 - number].full()
        except UnsupportedOpError as error:  # raised on every rank, or another one waits for this
            assert "so it is out of date" in str(error)
        else:
            assert_same(other, expected[1 - number])

    for number in range(2):
        run_local(body, 3, number, lambda x: x.sub_(1), timeout=60)
        run_local(body, 3, number, lambda x: x.unsqueeze(0).mul_(2), timeout=60)


def test_a_transposed_tensor_with_copies_gets_its_shape_in_place() -> None:
    def body(comm: Comm) -> None:
        whole = numbers(2, 5)
        x = shard(whole, "on tp=2: S(0) each 2 unit(2)")
        assert x.transpose_(0, 1) is x
        assert_same(x, whole.t())
        assert_same(numbers(5, 5) @ x.full(), numbers(5, 5) @ whole.t())

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("layout", [S0, "as chunk(0) over 0,1"])
def test_a_row_of_what_repeats_in_memory_is_not_written_and_says_so(layout: str) -> None:
    """Elements of an expanded tensor share memory, so that the row cannot be copied to it."""

    def body(comm: Comm) -> None:
        x = lay(numbers(4, 2), layout)
        repeated = x.unsqueeze(0).expand(2, 4, 2)
        with pytest.raises(UnsupportedOpError, match="shares no memory with the tensor it was taken from"):
            repeated.select(1, 3).zero_()
        assert_same(repeated, numbers(4, 2).expand(2, 4, 2))

    run_local(body, 2, timeout=60)
