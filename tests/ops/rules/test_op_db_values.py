"""Calls of torch's operator database that need care: integers that are rounded, bool sums, tensors as fill values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dense import S0, S1, P, R, check, numbers

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_put_by_two_indices_adds_each_value_once(layout: str) -> None:
    def program(x: Tensor, one: Tensor, other: Tensor, values: Tensor) -> Tensor:
        return x.index_put((one, other), values, accumulate=True)

    one, other = torch.arange(6).reshape(6, 1) % 4, torch.arange(6) % 3
    check(program, (layout, R, R, layout), (numbers(4, 4), one, other, numbers(6, 6, seed=1)))
    check(program, (layout, R, R, R), (numbers(4, 4, 4), one, other, numbers(6, 6, 4, seed=1)))
    check(program, ("on tp=2: S(2)", R, R, layout), (numbers(4, 4, 4), one, other, numbers(6, 6, 4, seed=1)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_renorm_in_low_precision_has_a_gradient(layout: str) -> None:
    whole = numbers(4, 4, dtype=torch.bfloat16)
    check(lambda x: torch.renorm(x, 2, 0, 1.0), (layout,), (whole,), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_layer_norm_statistics_have_the_dtype_of_torch(layout: str, weight: torch.dtype) -> None:
    def program(x: Tensor, weight: Tensor) -> list[Tensor]:
        return list(torch.native_layer_norm(x, [4], weight, None, 1e-5))

    given = numbers(4, 4, dtype=torch.bfloat16), numbers(4, seed=1, dtype=weight)
    check(program, (layout, R), given, grad=False, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_reduce_of_a_row_of_one_element_is_computed_on_every_rank() -> None:
    def program(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return x.index_reduce(1, index, source, "prod")

    x, source = (numbers(4, 4, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    uneven = "on tp=2: S(0) sizes(1,3)"
    check(program, (uneven, R, uneven), (x, torch.tensor([0, 1, 1, 3]), source), grad=False, rtol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_logcumsumexp_of_complex_numbers(layout: str) -> None:
    whole = torch.complex(numbers(4, 4), numbers(4, 4, seed=1))
    check(lambda x: torch.logcumsumexp(x, 1), (layout,), (whole,))


@pytest.mark.parametrize("layout", (S0, R))
def test_a_copy_made_inside_a_torch_function_is_on_the_tape(layout: str) -> None:
    def program(x: Tensor, target: Tensor, variance: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, target, variance, eps=0.5, reduction="none")

    check(program, (layout,) * 3, (numbers(4, 4), numbers(4, 4, seed=1), numbers(4, 4, seed=2).abs()))
