"""Calls of torch's operator database that need care: integers that are rounded, bool sums, tensors as fill values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.local.dense import S0, S1, P, R, check, numbers

LAYOUTS = (S0, S1, R, P)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_fill_passes_a_gradient_to_its_value(layout: str) -> None:
    def program(x: Tensor, value: Tensor, index: Tensor) -> list[Tensor]:
        return [x.index_fill(0, index, value), x.index_fill(1, index, value)]

    check(program, (layout, R, R), (numbers(4, 4), torch.tensor(1.5, dtype=torch.float64), torch.tensor([0, 2])))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_of_integers_are_taken_of_whole_values(layout: str) -> None:
    whole = torch.arange(64).reshape(4, 4, 4) * 7 % 13

    def program(x: Tensor) -> list[Tensor]:
        return [F.avg_pool1d(x, 3), F.avg_pool2d(x, 3), F.avg_pool3d(x.unsqueeze(0), 3)]

    check(program, (layout,), (whole,), grad=False)


@pytest.mark.parametrize("layout", (S0, S1, R))
def test_scatter_add_of_bool_is_or(layout: str) -> None:
    index = torch.arange(16).reshape(4, 4) % 3
    x, source = (torch.arange(16).reshape(4, 4) % n == 0 for n in (5, 2))

    def program(x: Tensor, index: Tensor, source: Tensor) -> list[Tensor]:
        return [x.scatter_add(0, index, source), x.scatter_add(1, index, source)]

    check(program, (layout,) * 3, (x, index, source))
