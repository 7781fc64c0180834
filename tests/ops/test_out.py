"""`out=` is written with what the operator gives without it, in the layout that `out` has, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Mesh, run_local, shard
from shardwise.comm import Comm
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import check_op, lay, placements_of, ramp

CALLS: dict[str, Callable[..., Any]] = {
    "add": lambda x, out: torch.add(x, 2.0, out=out),
    "mm": lambda x, out: torch.mm(x, x, out=out),
    "addmm": lambda x, out: torch.addmm(x, x, x, alpha=0.5, out=out),
    "matmul": lambda x, out: torch.matmul(x, x, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 1, out=out),
    "where": lambda x, out: torch.where(x > 0, x, -x, out=out),
    "sort": lambda x, out: torch.sort(x, 1, out=(out, torch.zeros_like(out, dtype=torch.int64)))[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_out_is_written_in_its_own_layout(name: str) -> None:
    def call(x: Any, out: Any) -> Any:
        CALLS[name](x, out)
        return out

    dense, room = ramp(4, 4, grad=False), torch.zeros(4, 4, dtype=torch.float64)
    check_op(call, dense, room, worlds=((2,), (2, 2)), pending=False, limit=12)


def test_out_of_a_sum_and_of_a_maximum_with_its_place() -> None:
    def call(x: Any, total: Any, most: Any, at: Any) -> Any:
        torch.sum(x, 1, out=total)
        torch.max(x, 1, out=(most, at))
        return total, most, at

    rooms = [torch.zeros(4, dtype=d) for d in (torch.float64, torch.float64, torch.int64)]
    check_op(call, ramp(4, 6, grad=False), *rooms, worlds=((2,),), limit=40)


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    mesh = Mesh.of(tp=2)
    whole = ramp(4, 4, grad=False)
    wrong = {
        "shape": (torch.zeros(4, 5, dtype=torch.float64), r"\(4, 4\) does not fit in \(4, 5\)"),
        "dtype": (torch.zeros(4, 4, dtype=torch.int64), "torch.float64 cannot be written to torch.int64"),
    }

    def body(comm: Comm) -> None:
        for placement in placements_of(whole, 2, pending=False):
            x = lay(whole, mesh, (placement,))
            for room, text in wrong.values():
                out = lay(room, mesh, (placement,)) if room.shape == whole.shape else lay(room, mesh, (R,))
                with pytest.raises(UnsupportedOpError, match=text):
                    torch.mm(x, x, out=out)
                assert not out.full().any()
            leaf = lay(ramp(4, 4), mesh, (placement,))
            with pytest.raises(UnsupportedOpError, match="no gradient passes through out="):
                torch.mm(leaf, x, out=torch.zeros_like(x))

    R = placements_of(whole, 2)[0]
    run_local(body, 2, timeout=60)


def test_out_of_functions_that_have_an_answer_of_their_own() -> None:
    """Functions that are answered before torch breaks them down, as torch.matmul and torch.norm are."""

    def call(x: Any, product: Any, length: Any) -> Any:
        torch.matmul(x, x, out=product)
        torch.norm(x, p=3, dim=1, out=length)
        return product, length

    rooms = [torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)]
    check_op(call, ramp(4, 4, grad=False), *rooms, worlds=((2,), (2, 2)), pending=False, limit=12)


RESIZED: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x, out: torch.neg(x, out=out),
    "broadcast": lambda x, out: torch.mul(x, x[0], out=out),
    "a comparison": lambda x, out: torch.add(x, (x > 0).to(x.dtype), out=out),
    "a sum": lambda x, out: torch.sum(x, 0, out=out),
    "a product": lambda x, out: torch.mm(x, x.t(), out=out),
    "a join": lambda x, out: torch.cat([x, x], out=out),
}


@pytest.mark.parametrize(
    "place", ["on tp=3: S(0)", "on tp=2 @ 0,2: S(0)", "as chunk(0) over 0,2", "as chunk(0) over 1"]
)
@pytest.mark.parametrize("name", RESIZED)
def test_out_without_elements_gets_the_shape_of_the_result(name: str, place: str) -> None:
    """As torch does it; a row of a tensor in pieces is on a mesh, beside which the pieces are."""
    whole = ramp(5, 4, grad=False)
    expected = RESIZED[name](whole, torch.empty(0, 4, dtype=torch.float64))

    def body(comm: Comm) -> None:
        x = shard(whole, place)
        for out in (x[:0].clone(), shard(torch.empty(0, 4, dtype=torch.float64), place)):
            assert RESIZED[name](x, out) is out
            torch.testing.assert_close(out.full(), expected)

    run_local(body, 3, timeout=60)
