"""Do tensors in boxes, or in several chunks on a rank, take the same steps as any other?

Replicated values that meet them vary, pending ones are reduced first, what is written to is written, shapes broadcast,
and what cannot be done is refused on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Comm, no_communication, plain_as_replicated, run_local
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import (
    BOXES,
    CHUNKS,
    S0,
    S1,
    P,
    R,
    assert_ends_alike,
    assert_gradient,
    assert_same,
    check,
    check_or_refuse,
    forget,
    lay,
    numbers,
)

ON_FOUR = "as pieces 3[0:2,0:4], 0[2:4,0:1], 3[2:4,1:2], 2[2:3,2:4], 0[3:4,2:4]"  # rank 1 has nothing
REPLICAS = "as grid(2+2, 4) over 0,1,1,0 each 2"  # both halves on both ranks
ONE_RANK = "as pieces 1[0:2,0:4], 1[2:4,0:4]"  # rank 0 has nothing
COLUMNS = "as chunk(1) over 1,0,1"
IRREGULAR = {"boxes": BOXES, "chunks": CHUNKS, "replicas": REPLICAS, "one rank": ONE_RANK, "columns": COLUMNS}


def matrix(seed: int = 1) -> Tensor:
    return numbers(4, 4, seed=seed)


NORMALISED: dict[str, Callable[[Any], Any]] = {
    "x / x.sum()": lambda x: x / x.sum(),
    "x - x.mean()": lambda x: x - x.mean(),
    "x * x.sum()": lambda x: x * x.sum(),
    "x / x.norm()": lambda x: x / x.norm(),
    "x / x.std()": lambda x: (x - x.mean()) / x.std(),
    "x / x.var()": lambda x: x / x.var(unbiased=False),
    "x / x.amax()": lambda x: x / x.amax(),
    "x - x.min()": lambda x: x - x.min(),
    "x * x.prod()": lambda x: x * x.prod(),
    "softmax by hand": lambda x: (x - x.max()).exp() / (x - x.max()).exp().sum(),
    "x - x.logsumexp()": lambda x: x - x.logsumexp((0, 1)),
    "mean of squares": lambda x: x * torch.rsqrt((x * x).mean() + 1e-5),
    "scalar first": lambda x: x.sum() * x + x.mean() / x,
    "twice": lambda x: (x / x.sum()) / (x / x.sum()).square().sum(),
    "loss": lambda x: ((x - x.mean()) ** 3).sum(),
    "where": lambda x: torch.where(x > x.mean(), x * x.sum(), x),
    "where by one truth": lambda x: torch.where((x > 1e9).any(), x, -x),
    "lerp": lambda x: torch.lerp(x, x.mean(), 0.25),
    "clamp": lambda x: torch.clamp(x, max=x.mean()),
}


@pytest.mark.parametrize("layout", IRREGULAR)
@pytest.mark.parametrize("name", NORMALISED)
def test_a_tensor_meets_what_it_was_reduced_to(name: str, layout: str) -> None:
    """The reduced value is replicated, the tensor is not: its gradient comes from all ranks."""
    check(NORMALISED[name], [IRREGULAR[layout]], (matrix(1),), (matrix(2),))


@pytest.mark.parametrize("name", NORMALISED)
def test_the_same_over_four_ranks(name: str) -> None:
    check(NORMALISED[name], [ON_FOUR], (matrix(1),), (matrix(2),), world=4)


BESIDE: dict[str, Callable[..., Any]] = {
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "sub from": lambda x, y: y - x,
    "div": lambda x, y: y / x,
    "pow": lambda x, y: (x * x + 1) ** y,
    "maximum": torch.maximum,
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "mul and sum": lambda x, y: (x * y).sum() * y.sum(),
}


@pytest.mark.parametrize("other", (S0, S1, R, P, "on tp=2: P(avg)", CHUNKS, BOXES))
@pytest.mark.parametrize("layout", IRREGULAR)
@pytest.mark.parametrize("name", BESIDE)
def test_beside_any_other_layout(name: str, layout: str, other: str) -> None:
    """A replicated operand gets its whole gradient; a pending one is reduced first."""
    grad = "avg" not in other
    check_or_refuse(BESIDE[name], [IRREGULAR[layout], other], (matrix(1), matrix(2)), (matrix(3), matrix(4)), grad=grad)


@pytest.mark.parametrize("layout", IRREGULAR)
@pytest.mark.parametrize("name", ("mul", "add", "sub from", "addcmul"))
def test_beside_one_replicated_number(name: str, layout: str) -> None:
    for scalar in (numbers(seed=5), numbers(1, seed=6), numbers(1, 1, seed=7)):
        check(BESIDE[name], [IRREGULAR[layout], R], (matrix(1), scalar), (matrix(2), scalar))


PENDING: dict[str, Callable[..., Any]] = {
    "sum": lambda x, rows: x * rows.sum(),
    "mean": lambda x, rows: x - rows.mean(),
    "sum first": lambda x, rows: rows.sum() - x,
    "maximum": lambda x, rows: x + rows.amax(),
    "norm": lambda x, rows: x / rows.norm(),
    "sum of all": lambda x, rows: (x * rows.sum()).sum(),
    "in place": lambda x, rows: (x * 1).mul_(rows.sum()),
}


@pytest.mark.parametrize("rows", (S0, S1, P, R))
@pytest.mark.parametrize("layout", IRREGULAR)
@pytest.mark.parametrize("name", PENDING)
def test_beside_a_pending_number(name: str, layout: str, rows: str) -> None:
    """Each rank has only an addend of it."""
    check(PENDING[name], [IRREGULAR[layout], rows], (matrix(1), matrix(2)), (matrix(3), matrix(4)))


WRITES: dict[str, Callable[..., Any]] = {
    "add_": lambda a, x: a.add_(x),
    "mul_": lambda a, x: a.mul_(x),
    "sub_ twice": lambda a, x: a.sub_(x).sub_(x),
    "copy_": lambda a, x: a.copy_(x),
    "addcmul_": lambda a, x: a.addcmul_(x, x),
    "lerp_": lambda a, x: a.lerp_(x, 0.5),
    "+=": lambda a, x: a.__iadd__(x),
    "add_ of a sum": lambda a, x: a.add_(x.sum()),
    "masked_fill_": lambda a, x: a.masked_fill_(x > 0, 7.0),
    "add out": lambda a, x: torch.add(x, x, out=a),
    "copy_ of itself": lambda a, x: a.copy_(a),
}


@pytest.mark.parametrize("layouts", ((S0, BOXES), (S1, CHUNKS), (R, BOXES), (BOXES, S0), (CHUNKS, BOXES), (BOXES, R)))
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_there(name: str, layouts: tuple[str, str]) -> None:
    """Without a tape, with one that is off, and on a tensor that was computed."""
    calls = [(matrix(1), matrix(2)), (matrix(3), matrix(4))]
    check_or_refuse(WRITES[name], layouts, *calls, grad=False)

    def quietly(a: Any, x: Any) -> Any:
        with torch.no_grad():
            return WRITES[name](a, x)

    check_or_refuse(quietly, layouts, *calls, grad=False)


@pytest.mark.parametrize("layouts", ((S0, BOXES), (BOXES, S0), (CHUNKS, CHUNKS), (BOXES, R), (BOXES, P)))
def test_a_computed_tensor_is_written_to(layouts: tuple[str, str]) -> None:
    """On the tape: the gradient of what is written, and of what was there."""
    for program in (
        lambda a, x: (a * 2).add_(x),
        lambda a, x: (a * 2).mul_(x).add_(a),
        lambda a, x: (a + 1).copy_(x),
    ):
        check_or_refuse(program, list(layouts), (matrix(1), matrix(2)), (matrix(3), matrix(4)))


def test_adding_boxes_to_rows_changes_the_rows() -> None:
    """The named example, without leave to refuse."""
    check(lambda a, x: a.add_(x), [S0, BOXES], (matrix(1), matrix(2)), grad=False)
    check(lambda a, x: a.add_(x), [CHUNKS, BOXES], (matrix(1), matrix(2)), grad=False)
    check(lambda a, x: a.add_(x), [BOXES, S0], (matrix(1), matrix(2)), grad=False)


@pytest.mark.parametrize("shape", ((1, 1, 1), (1, 1), (1,), (), (4,), (1, 4), (4, 1), (1, 4, 4), (3, 4, 4), (2, 1, 1)))
@pytest.mark.parametrize("layout", IRREGULAR)
def test_shapes_broadcast(layout: str, shape: tuple[int, ...]) -> None:
    """(4, 4) times (1, 1, 1) has three dims."""
    for program in (lambda x, y: x * y, lambda x, y: y - x):
        check_or_refuse(program, [IRREGULAR[layout], R], (matrix(1), numbers(*shape, seed=2)))


def test_a_number_of_three_dims_gives_three_dims() -> None:
    check(lambda x, y: x * y, [BOXES, R], (matrix(1), numbers(1, 1, 1, seed=2)))
    check(lambda x, y: x * y, [CHUNKS, R], (matrix(1), numbers(1, 1, 1, seed=2)))


ONE_ELEMENT = {
    "0-dim on rank 1": ("as pieces 1[]", ()),
    "vector on rank 1": ("as pieces 1[0:1]", (1,)),
    "matrix on rank 1": ("as pieces 1[0:1,0:1]", (1, 1)),
    "matrix on rank 0": ("as pieces 0[0:1,0:1]", (1, 1)),
    "chunks": ("as chunk(0) over 0,1,0", (1,)),
    "sizes": ("on tp=2: S(0) sizes(0,1)", (1,)),
}


@pytest.mark.parametrize("one", ONE_ELEMENT)
@pytest.mark.parametrize("layout", ("boxes", "chunks", "one rank"))
def test_one_element_that_one_rank_has(layout: str, one: str) -> None:
    where, shape = ONE_ELEMENT[one]
    for name in ("mul", "add", "sub from"):
        check(BESIDE[name], [IRREGULAR[layout], where], (matrix(1), numbers(*shape, seed=2)))


@pytest.mark.parametrize("one", ONE_ELEMENT)
@pytest.mark.parametrize("other", (S0, R, P))
def test_one_element_beside_a_mesh(other: str, one: str) -> None:
    where, shape = ONE_ELEMENT[one]
    check_or_refuse(lambda x, y: x * y, [other, where], (matrix(1), numbers(*shape, seed=2)))


ON_A_MESH: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: torch.nn.functional.linear(x, x * 2),
    "sum of rows": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(0).values,
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "cumsum": lambda x: x.cumsum(0),
    "mean of rows, kept": lambda x: x - x.mean(1, keepdim=True),
    "argmax": lambda x: x.argmax(),
    "argmax of rows": lambda x: x.argmax(1),
    "nonzero": lambda x: x.nonzero(),
    "median": lambda x: x.median(),
    "flip": lambda x: x.flip(0),
    "masked_select": lambda x: x[x > 0],
    "tril": lambda x: x.tril(),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 1)),
    "new_zeros": lambda x: x.new_zeros(x.shape) + x,
    "quantile": lambda x: torch.quantile(x, 0.5, 0),
}


@pytest.mark.parametrize("layout", (*IRREGULAR, "on four"))
@pytest.mark.parametrize("name", ON_A_MESH)
def test_other_operators_are_computed_on_a_mesh(name: str, layout: str) -> None:
    where, world = (ON_FOUR, 4) if layout == "on four" else (IRREGULAR[layout], 2)
    check(ON_A_MESH[name], [where], (matrix(1),), (matrix(2),), world=world)


@pytest.mark.parametrize("ranks", ("2,1", "1"))
def test_chunks_on_some_of_the_ranks_stay_there(ranks: str) -> None:
    """A mesh of those ranks says the same, and nothing has to move."""

    def body(comm: Comm) -> None:
        x: Any = lay(matrix(1), f"as chunk(0) over {ranks}")
        with no_communication():
            found = x.softmax(1)[:, 1:].sum(1)
        assert set(found.sharding.ranks) == set(x.sharding.ranks)

    forget()
    run_local(body, 3, timeout=60)


def test_a_view_of_pieces_that_had_to_move_is_refused_once_it_is_old() -> None:
    """It is a copy. On ranks that have nothing of the pieces too, which have no local tensors that count writes."""

    def body(comm: Comm) -> None:
        whole, x = matrix(1), lay(matrix(1), ONE_RANK)
        for view in (lambda x: x[1:3], lambda x: x[1:, 2], lambda x: x.t(), lambda x: x.unsqueeze(0)[0]):
            seen = view(x)
            assert_same(seen * 2, view(whole) * 2)
            x.add_(1)
            whole.add_(1)
            with pytest.raises(UnsupportedOpError, match="so it is out of date"):
                seen * 2
        assert_same(torch.nn.functional.linear(x, x), whole @ whole.t())

    forget()
    run_local(body, 2, timeout=20)


VIEW_WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda x: x[1].add_(1),
    "a row, augmented": lambda x: x.__setitem__(2, x[2].mul_(3)),
    "an element": lambda x: x.__setitem__((1, 2), 5.0),
    "a slice": lambda x: x[1:3, 1:].zero_(),
    "a flat view": lambda x: x.view(-1)[3:9].fill_(2.0),
    "a scan": lambda x: x.cumsum_(0),
    "rows by number": lambda x: x.index_fill_(0, torch.tensor([1, 3]), 4.0),
    "rows one after the other": lambda x: [row.mul_(2) for row in x],
}


@pytest.mark.parametrize("layout", [ONE_RANK, BOXES])
@pytest.mark.parametrize("write", VIEW_WRITES)
def test_writes_to_pieces_and_their_views(write: str, layout: str) -> None:
    def body(comm: Comm) -> None:
        whole, x = matrix(1), lay(matrix(1), layout)
        with plain_as_replicated():
            VIEW_WRITES[write](x)
        VIEW_WRITES[write](whole)
        assert_same(x, whole)

    forget()
    run_local(body, 2, timeout=60)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x * 2)),
    "broadcast both ways": lambda x: x[:, :1] * x[1],
    "transpose": lambda x: x.t() * 2,
    "rows": lambda x: x[1:3] * 2,
    "row": lambda x: x[1],
    "reshape": lambda x: x.reshape(2, 8),
    "sum, kept": lambda x: x / x.sum((0, 1), keepdim=True),
    "index": lambda x: x[torch.tensor([0, 2])],
    "write a row": lambda x: (x * 1).index_fill_(0, torch.tensor([1]), 3.0),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.0),
    "item": lambda x: x.sum().item(),
    "equal": lambda x: torch.equal(x, x * 1),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "to": lambda x: x.to(torch.float32) * 2,
    "comparison": lambda x: x > x.mean(),
    "any": lambda x: (x > 1).any(),
    "frexp": lambda x: list(torch.frexp(x)),
    "std_mean": lambda x: list(torch.std_mean(x)),
}


@pytest.mark.parametrize("layout", (*IRREGULAR, "on four"))
@pytest.mark.parametrize("name", REFUSED)
def test_right_or_refused_on_every_rank(name: str, layout: str) -> None:
    where, world = (ON_FOUR, 4) if layout == "on four" else (IRREGULAR[layout], 2)
    check_or_refuse(REFUSED[name], [where], (matrix(1),), (matrix(2),), world=world, grad=False)


@pytest.mark.parametrize("layout", IRREGULAR)
def test_a_step_of_training(layout: str) -> None:
    """A table in irregular pieces, a replicated scale, two steps of SGD with momentum."""
    forget()

    def body(comm: Comm) -> None:
        dense = [matrix(1).requires_grad_(), numbers(seed=2).requires_grad_()]
        held: list[Any] = [lay(dense[0], IRREGULAR[layout]), lay(dense[1], R)]
        for tensors in (dense, held):
            optimizer = torch.optim.SGD(tensors, lr=0.1, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                loss = ((tensors[0] / tensors[0].norm() - tensors[1]) ** 2).mean()
                loss.backward()
                optimizer.step()
        for laid, whole in zip(held, dense, strict=True):
            assert_gradient(laid, whole)
            assert_same(laid, whole)

    run_local(body, 2, timeout=60)


def test_a_tensor_of_two_worlds_is_refused_alike() -> None:
    """Boxes on ranks of which one is not in the other tensor's mesh."""

    def body(comm: Comm) -> None:
        x = lay(matrix(1), "as pieces 0[0:1,0:4], 1[1:4,0:3], 2[1:4,3:4]")
        y = lay(matrix(2), "on tp=2: S(0)")
        assert_same(x * y, matrix(1) * matrix(2))
        assert_same(y * x.sum(), matrix(2) * matrix(1).sum())

    assert_ends_alike(body, 3)
