"""Losses with any dim sharded, the classes among them, held against the dense ones in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import run_local
from shardwise.geometry import Mesh, Partial, Placement, Replicate, Shard
from shardwise.ops import explain
from tests.dense import LINES, check_op, lay, ramp
from tests.device import DEVICE, STANDIN

Places: TypeAlias = list[list[Placement] | None]
REDUCTIONS = ["none", "mean", "sum"]
PAIRS: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce with logits": F.binary_cross_entropy_with_logits,
    "soft margin": F.soft_margin_loss,
    "kl": F.kl_div,
    "poisson": F.poisson_nll_loss,
}


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides the total loss:UserWarning")
@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_pairs(name: str) -> None:
    def losses(x: Tensor, y: Tensor) -> list[Tensor]:
        return [PAIRS[name](x, y, reduction=reduction) for reduction in REDUCTIONS]

    y = ramp(3, 5, start=0.1, step=0.05, grad=name != "soft margin")
    check_op(losses, ramp(3, 5, step=0.11), y, worlds=[(2,), (2, 2)], limit=12)


def test_binary_cross_entropy_with_weights() -> None:
    def losses(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        return [F.binary_cross_entropy(x.sigmoid(), y, w, reduction=reduction) for reduction in REDUCTIONS]

    y = (ramp(3, 5, grad=False) > 1).double()
    check_op(losses, ramp(3, 5, step=0.11), y, ramp(5, start=0.2, grad=False), worlds=[(3,), (2, 2)], limit=12)


TARGET = torch.tensor([4, 0, 2])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_over_whole_and_sharded_classes(reduction: str) -> None:
    places: Places = [None, [Replicate(), Shard(0)]]
    check_op(lambda x, t: F.cross_entropy(x, t, reduction=reduction), ramp(3, 5), TARGET, placements=places, limit=20)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_with_weights_and_ignored_targets(reduction: str) -> None:
    def loss(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(x, t, w, reduction=reduction, ignore_index=2)

    places: Places = [None, [Replicate(), Shard(0)], [Replicate(), Shard(0)]]
    weights = ramp(5, start=0.3, grad=False)
    check_op(loss, ramp(3, 5), TARGET, weights, placements=places, limit=16)


def test_cross_entropy_with_smooth_labels() -> None:
    places: Places = [
        [Replicate(), Shard(0), Shard(1), Shard(1, sizes=(0, 5)), Partial("sum")],
        [Replicate(), Shard(0)],
    ]

    def losses(x: Tensor, t: Tensor) -> list[Tensor]:
        return [
            F.cross_entropy(x, t, reduction=r, label_smoothing=0.2, ignore_index=i)
            for r in REDUCTIONS
            for i in (-100, 2)
        ]

    check_op(losses, ramp(3, 5), TARGET, placements=places, worlds=[(2,)])
    plain: Places = [[Replicate(), Shard(0), Shard(1)], [Replicate()]]
    check_op(losses, ramp(3, 5), TARGET, placements=plain, worlds=[(2, 2)])


def test_cross_entropy_with_smooth_labels_and_weights() -> None:
    def losses(x: Tensor, t: Tensor, w: Tensor) -> list[Tensor]:
        return [F.cross_entropy(x, t, w, reduction=r, label_smoothing=0.2, ignore_index=2) for r in REDUCTIONS]

    places: Places = [[Replicate(), Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Shard(0)]]
    check_op(losses, ramp(3, 5), TARGET, ramp(5, start=0.3, grad=False), placements=places, worlds=[(2,), (3,)])


def test_cross_entropy_with_probabilities() -> None:
    shares = ramp(3, 5, start=1.0, grad=False)
    shares = shares / shares.sum(1, keepdim=True)
    check_op(lambda x, p: [F.cross_entropy(x, p, reduction=r) for r in REDUCTIONS], ramp(3, 5), shares, limit=12)


def test_classes_of_pictures() -> None:
    target = torch.arange(8).reshape(2, 2, 2) % 3
    places: Places = [None, [Replicate(), Shard(0), Shard(1)]]
    for reduction in REDUCTIONS:
        fn: Callable[..., Any] = lambda x, t, r=reduction: F.nll_loss(x, t, reduction=r)  # noqa: E731
        check_op(fn, ramp(2, 3, 2, 2), target, placements=places, worlds=[(2,), (2, 2)], limit=12, pending=False)


def test_one_example() -> None:
    check_op(
        lambda x, t: F.cross_entropy(x, t), ramp(5), torch.tensor(3), worlds=LINES, placements=[None, [Replicate()]]
    )


def test_everything_ignored_is_not_a_number_as_in_torch() -> None:
    target = torch.tensor([2, 2, 2])
    check_op(lambda x, t: F.nll_loss(x, t, ignore_index=2), ramp(3, 5, grad=False), target, worlds=[(2,)])


def test_sharded_scores_are_not_gathered() -> None:
    """What moves is a row of numbers per example and reduction, whatever the number of classes."""

    def body(comm: Any) -> int:
        mesh = Mesh.of(tp=2)
        x = lay(ramp(4, 300), mesh, (Shard(1),))
        t = lay(torch.arange(4), mesh, (Replicate(),))
        with explain() as log:
            loss: Any = F.cross_entropy(x, t)
            loss.backward()
        return log.moved_bytes

    assert all(moved < 4 * 300 * 8 // 4 for moved in run_local(body, 2))


def test_targets_out_of_bounds() -> None:
    def body(comm: Any) -> None:
        mesh = Mesh.of(tp=2)
        x = lay(ramp(3, 5), mesh, (Shard(1),))
        with pytest.raises(IndexError, match="Target 5 is out of bounds: the classes are 0 to 4"):
            F.nll_loss(x, lay(torch.tensor([0, 5, 1]), mesh, (Replicate(),)))

    run_local(body, 2)


@pytest.mark.skipif(DEVICE != STANDIN, reason="the CPU checks before it computes, a GPU while it does")
def test_a_device_finds_targets_out_of_bounds() -> None:
    def body(comm: Any) -> None:
        mesh = Mesh.of(tp=2)
        for placement in (Shard(1), Shard(0), Replicate()):
            x = lay(ramp(3, 5), mesh, (placement,))
            with pytest.raises(RuntimeError, match="a target is out of bounds: the classes are 0 to 4"):
                F.nll_loss(x, lay(torch.tensor([0, 5, 5]), mesh, (Replicate(),)))

    run_local(body, 2)


def test_cross_entropy_with_smooth_labels_of_nothing() -> None:
    def losses(x: Tensor, t: Tensor) -> list[Tensor]:
        return [F.cross_entropy(x, t, reduction=r, label_smoothing=0.1) for r in REDUCTIONS]

    for classes in (0, 2):
        nothing = torch.zeros(0, classes, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        check_op(losses, *nothing, placements=[[Shard(1)], [Replicate()]], worlds=[(2,)], pending=False)
