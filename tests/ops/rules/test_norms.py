"""Normalisation with any dim sharded, held against the dense one in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import run_local
from shardwise.geometry import Mesh, Placement, Replicate, Shard
from shardwise.ops.engine import call_operator
from tests.dense import Combination, check_op, lay, ramp

WHOLE_OR_CUT: list[Placement] = [Replicate(), Shard(0)]


def test_layer_norm() -> None:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (5,), w, b)

    check_op(norm, ramp(3, 5), ramp(5), ramp(5, step=0.2), placements=[None, WHOLE_OR_CUT, WHOLE_OR_CUT], limit=16)


def test_layer_norm_over_two_dims_without_weights() -> None:
    check_op(lambda x: F.layer_norm(x, (5, 2)), ramp(3, 5, 2), limit=16)


def test_rms_norm() -> None:
    check_op(lambda x, w: F.rms_norm(x, (5,), w), ramp(3, 5), ramp(5), placements=[None, WHOLE_OR_CUT], limit=16)
    check_op(lambda x: F.rms_norm(x, (5, 2), eps=1e-3), ramp(3, 5, 2), worlds=[(2,), (2, 2)], limit=16)


def test_group_norm() -> None:
    places: list[Any] = [None, [Replicate()], WHOLE_OR_CUT]
    x, w, b = ramp(3, 4, 2), ramp(4), ramp(4, step=0.2)
    check_op(lambda x, w, b: F.group_norm(x, 2, w, b), x, w, b, placements=places, worlds=[(2,), (2, 2)], limit=20)


def test_group_norm_keeps_channels_where_ranks_have_whole_groups() -> None:
    def look(chosen: Combination, result: Any) -> None:
        assert result.placements == chosen[0]

    check_op(lambda x: F.group_norm(x, 2), ramp(3, 4, 2), placements=[[Shard(1), Shard(0)]], worlds=[(2,)], look=look)


@pytest.mark.parametrize("shape", [(5, 3), (3, 2, 2, 2)], ids=str)
def test_batch_norm_by_statistics_of_the_whole_batch(shape: tuple[int, ...]) -> None:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, w, b, training=True)

    w, b = ramp(shape[1]), ramp(shape[1], step=0.2)
    check_op(norm, ramp(*shape), w, b, placements=[None, WHOLE_OR_CUT, [Replicate()]], limit=14)


def test_batch_norm_by_given_statistics() -> None:
    def norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, w)

    tensors = (ramp(5, 3), ramp(3, grad=False), ramp(3, start=1.0, grad=False), ramp(3))
    places: list[Any] = [None, WHOLE_OR_CUT, [Replicate()], WHOLE_OR_CUT]
    check_op(norm, *tensors, placements=places, worlds=[(2,), (2, 2)], limit=16)


def test_running_statistics_move_alike_on_all_ranks() -> None:
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def norm(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        out = F.batch_norm(x, mean, var, training=True, momentum=0.3)
        return [out, mean, var]

    check_op(norm, ramp(5, 3), mean, var, placements=[None, WHOLE_OR_CUT, WHOLE_OR_CUT], limit=16)


def test_a_module_with_plain_buffers() -> None:
    dense = torch.nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
    expected = dense(ramp(5, 3))

    def body(comm: Any) -> None:
        module = torch.nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
        out = module(lay(ramp(5, 3), Mesh.of(dp=2), (Shard(0),)))
        torch.testing.assert_close(out.full(), expected)
        torch.testing.assert_close(module.running_mean, dense.running_mean)
        torch.testing.assert_close(module.running_var, dense.running_var)
        module.eval()
        again = module(lay(ramp(5, 3), Mesh.of(dp=2), (Shard(0),)))
        assert again.placements == (Shard(0),)

    run_local(body, 2)


def test_one_value_per_channel_is_refused() -> None:
    def body(comm: Any) -> None:
        x = lay(ramp(1, 3), Mesh.of(dp=2), (Shard(0),))
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            F.batch_norm(x, None, None, training=True)

    run_local(body, 2)


def test_instance_norm() -> None:
    check_op(lambda x: F.instance_norm(x), ramp(3, 2, 4), worlds=[(2,)], unsupported=True)


def test_rms_norm_as_a_device_asks_for_it() -> None:
    """The operator gives two tensors; of values so small that its own epsilon counts, also in a narrow dtype."""
    for dtype in (torch.float64, torch.bfloat16):
        values = (ramp(3, 8).detach() * 1e-3).to(dtype)
        wanted = torch.ops.aten._fused_rms_norm(values, [8], None, None)

        def body(comm: Any, values: Any = values, wanted: Any = wanted) -> None:
            x = lay(values, Mesh.of(tp=2), (Shard(1),))
            found = call_operator(None, torch.ops.aten._fused_rms_norm.default, (), (x, [8], None, None), {})
            assert len(found) == 2
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one.full(), other)
            torch.testing.assert_close(F.rms_norm(x, (8,)).full(), wanted[0])

        run_local(body, 2)
