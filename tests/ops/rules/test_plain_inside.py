"""Functions in which torch itself makes plain tensors: lengths, columns of ones, a tensor to be filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shardwise import plain_as_replicated, run_local
from shardwise.ops import MixedTensorsError
from tests.dense import S0, S1, P, R, check, lay, numbers

LAYOUTS = (S0, S1, R, P)
X = numbers(4, 4).requires_grad_()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctc_loss_takes_lengths_as_numbers(layout: str) -> None:
    def program(x: Any, target: Tensor) -> list[Any]:
        one, two = (x.reshape(shape).log_softmax(2) for shape in ((4, 1, 4), (2, 2, 4)))
        return [F.ctc_loss(one, target[:1], (4,), (2,)), F.ctc_loss(two, target[:, :1], [2, 2], [1, 1])]

    check(program, (layout, R), (X, torch.tensor([[1, 2], [3, 1]])))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vander(layout: str) -> None:
    """Without gradients: torch's own writes to what its backward pass needs."""
    whole = X.detach()
    check(lambda x: torch.vander(x[0]), (layout,), (whole,), grad=False)
    check(lambda x: torch.vander(x[:, 1], 3, increasing=True), (layout,), (whole,), grad=False)
    check(lambda x: torch.linalg.vander(x, N=3), (layout,), (whole,), grad=False)
    check(lambda x: torch.vander(x[0], 1), (layout,), (whole,), grad=False)
    check(lambda x: torch.linalg.vander(x[0, 1], N=2), (layout,), (whole,), grad=False)
    check(lambda x: torch.linalg.vander(x), (layout,), (whole,), grad=False)
    if layout != P:
        check(lambda x: torch.vander(x[0]), (layout,), (torch.arange(16).reshape(4, 4) % 3,), grad=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_pad_sequence(layout: str, batch_first: bool) -> None:
    def program(x: Any) -> list[Any]:
        rows = [x[0], x[1, :2], x[2, :3]]
        blocks = [x[:3], x[:1], x]
        return [pad_sequence(rows, batch_first, 0.5), pad_sequence(blocks, batch_first, -1.0, padding_side="left")]

    check(program, (layout,), (X,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nuclear_norm(layout: str) -> None:
    for program in (lambda x: x.norm("nuc"), lambda x: torch.norm(x, "nuc"), lambda x: x.norm("nuc", (0, 1), True)):
        check(program, (layout,), (X,), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_into_parts_of_a_plain_tensor_has_gradients(layout: str) -> None:
    """As models fill a tensor of zeros row by row: the plain tensor has a tape of its own."""

    def program(x: Any) -> list[Any]:
        with plain_as_replicated():
            rows, some, columns = (torch.zeros(4, 6, dtype=torch.float64) for _ in range(3))
            for i, row in enumerate(x * 2):
                rows[i, : row.size(0)] = row
            some[[2, 0], 1:3] = x[:2, :2].exp()
            columns[:, torch.tensor([5, 1])] = x[:, 1:3]
            return [x * rows[:, :4], x.sum() * some, columns * x.sum()]

    check(program, (layout,), (X,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_indices_that_are_lists_of_numbers_of_the_tensors(layout: str) -> None:
    def program(x: Any, at: Tensor) -> list[Any]:
        rows, columns = (at[0], at[1]), [at[2], at[0]]
        written = x * 1
        written[rows, columns] = 0.0
        return [x[rows, columns], x[at[0], at[1]], written]

    check(program, (layout, R), (X, torch.tensor([3, 1, 0])))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_tensors_in_lists_of_which_torch_makes_a_tensor(layout: str) -> None:
    """torch reads them below all operators."""

    def program(x: Any) -> list[Any]:
        lengths = [0, *(x[0] + 9).long()[:2], (x[1, 1] * 0).int()]
        made = [torch.tensor(lengths), torch.as_tensor([[x[0, 0], 2.0]]), torch.tensor([x[0, 0] > 99, True])]
        return [x[:1, 0] * value.sum() for value in made]

    check(program, (layout,), (X.detach(),), grad=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_places_of_a_triangle(layout: str) -> None:
    """The indices that torch makes are plain tensors of the caller: refused, unless they are read as replicated."""

    def program(x: Any) -> list[Any]:
        rows, columns = torch.triu_indices(4, 4)
        with plain_as_replicated():
            written = x * 1
            written[rows, columns] = 0.0
            return [x[rows, columns], written, x.index_put((rows, columns), x[0, :1])]

    check(program, (layout,), (X,))
    with pytest.raises(MixedTensorsError, match=r"plain tensor of shape \(10,\)"):
        run_local(lambda: lay(X.detach(), layout)[tuple(torch.triu_indices(4, 4))], 2)
