"""Is a later call ever answered by what an earlier one left behind? One tensor given twice, other data, other shapes.

Every program is called again and again: with different tensors and with one tensor in several places, in both orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm, run_local
from shardwise.tensor import shard
from tests.dense import BOXES, CHUNKS, S0, S1, P, R, check, numbers
from tests.device import DEVICE

UNEVEN = "on tp=2: S(0) sizes(3,1)"
EMPTY = "on tp=2: S(1) sizes(0,4)"
LAYOUTS = {"S0": S0, "S1": S1, "R": R, "P": P, "uneven": UNEVEN, "empty": EMPTY}
ORDERS = ("apart first", "twice first")


def pairs(order: str, make: Callable[[int], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Calls with two tensors and with one tensor given twice, each kind twice with other data."""
    apart = [(make(1), make(2)), (make(3), make(4))]
    one, other = make(5), make(6)
    twice = [(one, one), (other, other)]
    return [*apart, *twice, apart[0]] if order == "apart first" else [*twice, *apart, twice[0]]


def matrix(seed: int) -> Tensor:
    return numbers(4, 4, seed=seed)


BINARY: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "mm": torch.mm,
    "matmul": torch.matmul,
    "operator @": lambda x, y: x @ y,
    "x @ y.t()": lambda x, y: x @ y.t(),
    "div": torch.div,
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "addmm of one": lambda x, y: torch.addmm(y, x, x),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "kron": torch.kron,
    "chain_matmul": lambda x, y: torch.linalg.multi_dot([x, y, x]),
    "maximum": torch.maximum,
    "lerp": lambda x, y: torch.lerp(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcdiv": lambda x, y: torch.addcdiv(y, x, x),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, dim=0),
    "mse_loss": F.mse_loss,
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.stack([x, x])),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BINARY)
def test_one_tensor_given_twice(name: str, layout: str, order: str) -> None:
    check(BINARY[name], [LAYOUTS[layout]] * 2, *pairs(order, matrix))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ("S0", "R", "P"))
def test_one_vector_given_twice(layout: str, order: str) -> None:
    calls = pairs(order, lambda seed: numbers(4, seed=seed))
    for program in (torch.dot, torch.inner, torch.outer, torch.vdot, lambda x, y: x @ y):
        check(program, [LAYOUTS[layout]] * 2, *calls)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ("S0", "S1", "R", "P"))
@pytest.mark.parametrize("name", ("bmm", "baddbmm", "baddbmm of one", "cdist"))
def test_one_batch_given_twice(name: str, layout: str, order: str) -> None:
    programs: dict[str, Callable[..., Any]] = {
        "bmm": torch.bmm,
        "baddbmm": lambda x, y: torch.baddbmm(x, x, y),
        "baddbmm of one": lambda x, y: torch.baddbmm(y, x, x),
        "cdist": lambda x, y: torch.cdist(x, y, p=1.0),
    }
    check(programs[name], [LAYOUTS[layout]] * 2, *pairs(order, lambda seed: numbers(4, 4, 4, seed=seed)))


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("grad", (False, True), ids=("values", "gradients"))
@pytest.mark.parametrize("layout", ("S(0)", "S(1)", "S(2)", "S(3)", "R"))
@pytest.mark.parametrize("first", range(5))
def test_attention_of_one_tensor(first: int, layout: str, grad: bool, causal: bool) -> None:
    """Query, key and value apart, two of them as one, all three as one, each of these first; three dims and four."""
    for shape in ((2, 2, 4, 4), (4, 4, 4)):
        if layout == f"S({len(shape)})":
            continue
        q, k, v = (numbers(*shape, seed=seed) for seed in range(3))
        calls = [(q, k, v), (q, k, k), (q, q, v), (q, k, q), (q, q, q)]
        calls = [*calls[first:], *calls[:first], calls[first]]

        def program(a: Any, b: Any, c: Any) -> Any:
            return F.scaled_dot_product_attention(a, b, c, is_causal=causal)

        check(program, [f"on tp=2: {layout}"] * 3, *calls, grad=grad, rtol=1e-7, atol=1e-9)


INDEXED: dict[str, Callable[..., Any]] = {
    "index": lambda x, y: x[y],
    "index_select": lambda x, y: x.index_select(0, y),
    "gather": lambda x, y: torch.gather(x, 0, y),
    "take": torch.take,
    "take_along_dim": lambda x, y: torch.take_along_dim(x, y, 0),
    "index_add": lambda x, y: torch.index_add(x, 0, y, y),
    "index_copy": lambda x, y: torch.index_copy(x, 0, y, y),
    "scatter": lambda x, y: torch.scatter(x, 0, y, y),
    "scatter_add": lambda x, y: torch.scatter_add(x, 0, y, y),
    "index_put": lambda x, y: torch.index_put(x, (y,), y),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ("S0", "R", "uneven"))
@pytest.mark.parametrize("name", INDEXED)
def test_a_tensor_that_is_its_own_index(name: str, layout: str, order: str) -> None:
    def make(seed: int) -> Tensor:
        return torch.randperm(4, generator=torch.Generator(DEVICE).manual_seed(seed))

    check(INDEXED[name], [LAYOUTS[layout]] * 2, *pairs(order, make), grad=False)


IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": lambda x, y: x.add_(y),
    "sub_": lambda x, y: x.sub_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, y: x.div_(y),
    "copy_": lambda x, y: x.copy_(y),
    "addcmul_": lambda x, y: x.addcmul_(x, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "add out": lambda x, y: torch.add(x, y, out=x),
    "mul out": lambda x, y: torch.mul(x, y, out=y),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ("S0", "R", "uneven"))
@pytest.mark.parametrize("name", IN_PLACE)
def test_one_tensor_written_and_read(name: str, layout: str, order: str) -> None:
    check(IN_PLACE[name], [LAYOUTS[layout]] * 2, *pairs(order, matrix), grad=False)


DATA_DEPENDENT: dict[str, Callable[[Any], Any]] = {
    "nonzero": torch.nonzero,
    "argwhere": torch.argwhere,
    "nonzero as tuple": lambda x: list(torch.nonzero(x, as_tuple=True)),
    "where of one": lambda x: list(torch.where(x > 0)),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "index by mask": lambda x: x[x > 0],
    "index by row mask": lambda x: x[x.sum(1) > 0] if x.ndim > 1 else x[x > 1],
    "unique": torch.unique,
    "unique with counts": lambda x: list(torch.unique(x, return_inverse=True, return_counts=True)),
    "unique of rows": lambda x: torch.unique(x, dim=0),
    "unique_consecutive": torch.unique_consecutive,
    "count of nonzero": lambda x: torch.count_nonzero(x),
    "sum of a mask": lambda x: x[x > 0].sum(),
}


def sparse(seed: int, *shape: int) -> Tensor:
    """Whole numbers, of which another count is positive and another count is distinct for every seed."""
    drawn = torch.randint(-2, 2 + seed, shape, generator=torch.Generator(DEVICE).manual_seed(seed))
    return drawn.to(torch.float64)


@pytest.mark.parametrize("shape", ((8,), (4, 4)), ids=("vector", "matrix"))
@pytest.mark.parametrize("layout", ("R", "S0", "P"))
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_shapes_that_depend_on_data(name: str, layout: str, shape: tuple[int, ...]) -> None:
    """More elements, fewer, none, all: the shape is that of this call's data."""
    calls = [sparse(1, *shape), sparse(4, *shape), -sparse(2, *shape).abs(), sparse(3, *shape).abs() + 1]
    check(DATA_DEPENDENT[name], [LAYOUTS[layout]], *[(t,) for t in calls], grad=False)


COUNTED: dict[str, Callable[[Any], Any]] = {
    "bincount": torch.bincount,
    "bincount with minlength": lambda x: torch.bincount(x, minlength=2),
    "one_hot": F.one_hot,
    "embedding by bincount": lambda x: torch.bincount(x).cumsum(0),
}


@pytest.mark.parametrize("layout", ("R", "S0"))
@pytest.mark.parametrize("name", COUNTED)
def test_lengths_that_are_the_largest_value(name: str, layout: str) -> None:
    calls = [(torch.tensor([0, 1, 2, 1]),), (torch.tensor([5, 0, 0, 3]),), (torch.tensor([0, 0, 0, 0]),)]
    check(COUNTED[name], [LAYOUTS[layout]], *calls, grad=False)


def test_a_mask_of_its_own() -> None:
    """The mask is an argument, and holds another count of ones at every call."""
    x, masks = matrix(1), [matrix(seed) > 0 for seed in range(2, 5)]
    for program in (torch.masked_select, lambda t, m: t[m], lambda t, m: t[m.any(1)]):
        check(program, [R, R], *[(x, mask) for mask in masks])
        check(program, [S0, S0], *[(x, mask) for mask in masks])


@pytest.mark.parametrize("layouts", ((S0, S1), (S1, S0), (P, S0), (S0, R), (R, S1), (BOXES, S0), (CHUNKS, CHUNKS)))
def test_a_program_of_several_functions(layouts: tuple[str, str]) -> None:
    """Each of its functions has met other arguments before."""

    def program(x: Any, y: Any) -> Any:
        return (x * y + x * x) / (1 + y * y) + (x + x) * (y - y)

    calls = pairs("apart first", matrix)[:2] + pairs("twice first", matrix)[2:4]
    check(program, list(layouts), *calls)


def test_values_that_hide_a_wrong_answer() -> None:
    """Zeros, ones and one constant tell nothing about what a function does to other values."""
    zeros, ones = torch.zeros(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    for layout in (S0, S1, P, R):
        for program in (F.mse_loss, F.linear, torch.matmul, lambda x, y: F.layer_norm(x, (4,)) * y.mean()):
            check(program, [layout] * 2, (zeros, zeros), (ones, ones), (matrix(1), matrix(2)), rtol=1e-7)


@pytest.mark.filterwarnings("ignore:Using torch.cross without")
@pytest.mark.parametrize("layout", (S0, S1, P, R, UNEVEN))
def test_a_dim_that_is_found_in_the_shape(layout: str) -> None:
    """`torch.cross` takes the first dim of size 3, which of a local tensor may be another one."""
    pairs_of = [(numbers(n, 3, seed=1), numbers(n, 3, seed=2)) for n in (4, 4, 4)]
    check(torch.cross, [layout] * 2, *pairs_of)
    if layout is not UNEVEN:
        check(torch.cross, [layout] * 2, *[(numbers(5, 3, seed=s), numbers(5, 3, seed=s + 1)) for s in (1, 3)])


def test_what_was_chosen_without_autocast_is_not_taken_under_it() -> None:
    """`einsum` is broken down into products under autocast, which casts them; a matrix of one row does as others do."""

    def body(comm: Comm) -> None:
        x = shard(torch.ones(1, 2), "on tp=1 @ 1: R")
        for cast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                found = torch.einsum("ij,kj->ik", x, x)
            assert found.dtype is (torch.bfloat16 if cast else torch.float32)

    run_local(body, 2, timeout=60)
