"""torch.einsum of ShardedTensors: products by a rule of their own, the rest broken down; values, gradients, strides."""

from __future__ import annotations

import pytest
import torch

from shardwise import Comm, run_local
from tests.dense import S0, S1, P, R, check, forget, lay, numbers

EQUATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ij,jk->ik": ((4, 6), (6, 2)),
    "ij,jk": ((4, 6), (6, 2)),
    "ab, b -> ba": ((4, 6), (6,)),
    "nd,edf->enf": ((4, 6), (2, 6, 3)),
    "bqhd,bkhd->bhqk": ((2, 4, 2, 3), (2, 4, 2, 3)),
    "ij,jk,kl->il": ((4, 6), (6, 2), (2, 4)),
    "ij,kl->ijkl": ((4, 2), (2, 4)),
    "ij,ij->": ((4, 6), (4, 6)),
    "ij->ji": ((4, 6),),
    "ii->i": ((4, 4),),
    "ii,ij->j": ((4, 4), (4, 2)),
    "...i,ij->...j": ((4, 2, 6), (6, 2)),
    "...i,i->...": ((4, 2), (2,)),
    "ij,jk->k": ((4, 1), (6, 2)),
}


@pytest.mark.parametrize("layout", [S0, S1, R, P], ids=["S0", "S1", "R", "P"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_is_that_of_whole_tensors(equation: str, layout: str) -> None:
    layouts = [layout, *([S0] * (len(EQUATIONS[equation]) - 1))]
    calls = [[numbers(*shape, seed=10 * turn + i) for i, shape in enumerate(EQUATIONS[equation])] for turn in range(2)]
    check(lambda *tensors: torch.einsum(equation, *tensors), layouts, *calls)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_result_has_the_strides_of_the_whole(equation: str) -> None:
    def body(comm: Comm) -> None:
        wholes = [numbers(*shape, seed=i) for i, shape in enumerate(EQUATIONS[equation])]
        for _ in range(3):
            found = torch.einsum(equation, *(lay(whole, R) for whole in wholes))
            assert found.stride() == torch.einsum(equation, *wholes).stride()

    forget()
    run_local(body, 2, timeout=60)


def test_a_product_moves_nothing_where_a_letter_is_cut_alike() -> None:
    def body(comm: Comm) -> None:
        x, y = lay(numbers(4, 6), "on tp=2: S(1)"), lay(numbers(2, 6, 3), "on tp=2: S(1)")
        assert torch.einsum("nd,edf->enf", x, y).sharding.pending is not None
        experts = torch.einsum("nd,edf->enf", lay(numbers(4, 6), R), lay(numbers(2, 6, 3), S0))
        assert experts.sharding == lay(numbers(2, 4, 3), S0).sharding

    run_local(body, 2, timeout=60)
