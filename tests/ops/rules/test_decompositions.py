"""Do the decompositions of torch that are taken compute what the operators do? Those that do not have rules of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import TORCH_RELEASE
from tests.dense import S0, S1, P, R, check, numbers
from tools.decompositions import find_differences

INF, NAN = float("inf"), float("nan")
LAYOUTS = (S0, S1, R, P)
KNOWN = {
    # Torch's own kernels give one value for nan in their vector loop, and another in the rest of the row.
    "aten.elu_backward.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    # Called by torch's own backward passes, of whole tensors: other saved values, or second gradients, at infinities.
    "aten._batch_norm_with_update.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.embedding_dense_backward.default",
    "aten.glu_backward.default",
    "aten.native_layer_norm_backward.default",
    # Second gradients: of elu, at its corner, the third; log_sigmoid, which calls the other, has a rule of its own.
    "aten.log_sigmoid_forward.default",
    # The second gradient of torch's operator is not that of v * g / |v|; the decomposition's is.
    "aten._weight_norm_interface.default",
}
HARMLESS = ({"infinities"}, {"nan"}, {"infinities", "nan"})


@pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="the table is of this release of torch")
def test_decompositions_that_differ_have_rules() -> None:
    found, tried = find_differences()
    assert {name: found[name] for name in found.keys() - KNOWN} == {}
    assert len(tried) > 40
    second = [name for name in KNOWN if set(found.get(name, {}).values()) <= {"gradients", "second gradients"}]
    assert [n for n in KNOWN if n not in second and found.get(n) and set(found[n]) not in HARMLESS] == []


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).requires_grad_()


SCORES = table([0.5, -0.5, 1.5, 0.0], [0.0, 1.0, 0.0, 1.0], [2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.5, 1.0])
LABELS = torch.tensor([[0, 3, -1, 2], [-1, 1, 1, 1], [3, 2, 1, 0], [1, -1, 0, 0]])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_multilabel_margin_loss_ends_a_row_of_targets_at_minus_1(layout: str, reduction: str) -> None:
    def program(x: Tensor, target: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, target, reduction=reduction)

    check(program, (layout, R), (SCORES, LABELS))
    check(program, ("on tp=2: S(0)", "on tp=2: S(0) sizes(4,0)"), (SCORES, LABELS))
    check(program, (layout if layout != S1 else S0, R), (table([0.5, -0.5, 1.5, 0.0])[0], LABELS[0]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_multi_margin_loss_has_the_gradient_of_the_margin(layout: str, reduction: str) -> None:
    target = torch.tensor([0, 1, 2, 3])
    for p in (1, 2):
        check(lambda x, t, p=p: F.multi_margin_loss(x, t, p=p, reduction=reduction), (layout, R), (SCORES, target))
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    check(
        lambda x, t, w: F.multi_margin_loss(x, t, weight=w, reduction=reduction),
        (layout, R, R),
        (SCORES.detach(), target, weights),
        grad=False,
    )


@pytest.mark.parametrize("layout", ["on tp=2 @ 0-1: S(0)", "on tp=2 @ 1-2: S(1)", "on tp=1 @ 2: R"])
def test_margin_losses_where_a_rank_has_nothing(layout: str) -> None:
    for reduction in ("none", "mean", "sum"):
        check(
            lambda x, r=reduction: F.multilabel_margin_loss(x, (x.detach() * 0).long(), reduction=r),
            (layout,),
            (SCORES,),
            world=3,
        )
        check(
            lambda x, r=reduction: F.multi_margin_loss(x, x.detach().argmax(1), p=2, reduction=r),
            (layout,),
            (SCORES,),
            world=3,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_distances_of_equal_rows_have_a_gradient(layout: str) -> None:
    rows = numbers(30, 4)
    rows[1] = rows[0]
    check(lambda x: torch.cdist(x, x), (layout,), (rows.requires_grad_(),), rtol=1e-6, atol=1e-6)
    other = torch.cat([rows.detach(), rows.detach()]).requires_grad_()
    check(torch.cdist, (layout, S0), (rows, other), rtol=1e-6, atol=1e-6)
    check(lambda x, y: torch.cdist(x[None], y.reshape(2, 30, 4)), (layout, S0), (rows, other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", (S0, S1, R))
def test_isin_finds_what_is_beside_a_nan(layout: str) -> None:
    values = torch.tensor([[NAN, 1.0, -1.0, 0.0], [INF, -INF, 2.0, -3.0]]).repeat(5, 1)
    among = torch.tensor([NAN, 2.0, -3.0, 0.0, 1.0] * 10)
    for given in (R, S0):
        check(torch.isin, (layout, given), (values, among))
    check(lambda x, y: torch.isin(x, y, invert=True), (layout, R), (values, among))


@pytest.mark.parametrize("layout", (S0, S1, R))
def test_gradients_of_prelu_and_cross_at_infinities(layout: str) -> None:
    x = table([NAN, 1.0, -1.0], [INF, -INF, 2.0], [-INF, 0.0, -0.0], [1.0, -2.0, 3.0])
    for weight in (torch.tensor([0.1]), torch.tensor([0.1, 0.2, 0.3])):
        check(F.prelu, (layout, R), (x, weight.to(torch.float64).requires_grad_()))
    check(lambda a, b: torch.linalg.cross(a, b), (layout, layout), (x, numbers(4, 3).requires_grad_()))
    check(
        lambda a, b: torch.linalg.cross(a, b, dim=0),
        (layout, R),
        (x[1:].detach().requires_grad_(), x[:1].detach().expand(3, 3)),
    )


@pytest.mark.parametrize("layout", (S0, S1, R))
def test_products_and_norms_at_infinities(layout: str) -> None:
    x = table([NAN, 1.0, -1.0, 0.0], [INF, -INF, 2.0, 1.0], [-INF, 0.0, -0.0, 1.0], [1.0, -2.0, 3.0, 1.0])
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    programs: list[Any] = [
        lambda a, v: torch.addmv(v, a, v, alpha=0),
        lambda a, v: torch.addmv(v, a, v, beta=0, alpha=2),
        lambda a, v: torch.addr(a, v, v, beta=0),
        lambda a, v: torch.addr(a, v, v, alpha=2),
    ]
    for program in programs:
        check(program, (layout, R), (x, vector))
    for dim in (0, 1):
        check(lambda a, dim=dim: torch.renorm(a, INF, dim, 1.0), (layout,), (x,))
        check(lambda a, dim=dim: torch.renorm(a, 2, dim, 1.0), (layout,), (numbers(4, 4).requires_grad_(),))


@pytest.mark.parametrize("layout", (S0, S1, R, P))
def test_gradients_of_losses_called_as_operators(layout: str) -> None:
    x = numbers(4, 4)
    y, grad = x + torch.tensor([0.0, 1.0, -1.0, 0.5]), torch.tensor(2.0, dtype=torch.float64)
    ops = torch.ops.aten
    for reduction in (1, 2):
        check(lambda g, a, b, r=reduction: ops.smooth_l1_loss_backward(g, a, b, r, 1.0), (R, layout, S0), (grad, x, y))
        check(
            lambda g, a, b, r=reduction: ops.soft_margin_loss_backward(g, a, b, r),
            (R, layout, S0),
            (grad, x, y),
            grad=False,
        )
    check(lambda g, a, b: ops.huber_loss_backward(g, a, b, 0, 1.0), (S1, layout, S0), (x, x, y))
