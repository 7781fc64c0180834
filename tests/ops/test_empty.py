"""Does a rank without heads, rows or channels keep empty tensors from the kernels that cannot take them?

Some of them end the process. So the calls of these operators are watched, and one with an empty tensor raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import TORCH_RELEASE, OpOverload
from shardwise.comm import run_local
from shardwise.geometry import Mesh, Placement, Replicate, Shard
from shardwise.ops import sharding_rule
from shardwise.ops.rule import Rule, find_rule
from tests.dense import check_op, lay, ramp
from tests.device import DEVICE

aten = torch.ops.aten
WATCHED = ("scaled_dot_product", "convolution", "_fft_", "bicubic", "_pad1d")
attend: Any = F.scaled_dot_product_attention
fused: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
if DEVICE == "cuda":
    fused = aten._scaled_dot_product_efficient_attention.default


@pytest.fixture(autouse=True)
def _calls_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    call = OpOverload.__call__

    def watch(op: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain = [a for a in args if type(a) is Tensor and a.device.type != "meta"]
        if any(word in str(op) for word in WATCHED) and any(a.numel() == 0 for a in plain):
            raise AssertionError(f"{op} is called with shapes {[tuple(a.shape) for a in plain]}")
        return call(op, *args, **kwargs)

    monkeypatch.setattr(OpOverload, "__call__", watch)


SPLITS = (Shard(1), Shard(1, sizes=(0, 5, 0, 0)), Shard(0), Shard(2))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_fewer_heads_rows_or_images_than_ranks(split: Placement, causal: bool) -> None:
    """5 heads in chunks of 2 leave nothing for the last of 4 ranks, although there are more heads than ranks."""
    rows = (split, split if split != Shard(2) else Replicate(), split if split != Shard(2) else Replicate())
    given = (ramp(2, 5, 3, 4), ramp(2, 5, 3, 4), ramp(2, 5, 3, 4))
    check_op(partial(attend, is_causal=causal), *given, placements=[[p] for p in rows], worlds=((4,),))


def test_attention_without_columns_of_values() -> None:
    whole, cut = [Replicate()], [Shard(3, sizes=(4, 0))]
    check_op(
        attend,
        ramp(1, 2, 3, 4),
        ramp(1, 2, 3, 4),
        ramp(1, 2, 3, 4),
        placements=[whole, whole, cut],
        worlds=((2,),),
    )


def test_attention_without_keys_is_zero() -> None:
    heads = [[Shard(1)]] * 3
    check_op(attend, ramp(1, 3, 3, 4), ramp(1, 3, 0, 4), ramp(1, 3, 0, 5), placements=heads, worlds=((2,),))


def call_fused(*given: Any) -> Any:
    """The fused kernel, which on a GPU computes in float32 and has no defaults."""
    return fused(*(t.float() for t in given), None, True)[0].double() if DEVICE == "cuda" else fused(*given)[0]


@pytest.mark.parametrize("split", [Shard(0), Shard(1)], ids=str)
def test_the_kernel_that_torch_picks(split: Placement) -> None:
    rtol, atol = (1e-4, 1e-4) if DEVICE == "cuda" else (1e-9, 1e-11)
    check_op(
        call_fused,
        ramp(2, 5, 3, 4),
        ramp(2, 5, 3, 4),
        ramp(2, 5, 3, 4),
        placements=[[split]] * 3,
        worlds=((4,),),
        rtol=rtol,
        atol=atol,
    )


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "conv2d": (lambda x, w: F.conv2d(x, w), (ramp(5, 3, 4, 4), ramp(2, 3, 2, 2)), 0),
    "conv1d, channels out": (lambda w, x: F.conv1d(x, w), (ramp(5, 2, 2), ramp(3, 2, 6)), 0),
    "fft": (lambda x: torch.fft.rfft(x, dim=1).abs(), (ramp(5, 4),), 0),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (ramp(2, 5, 4, 4),), 1),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), (ramp(5, 2, 4, 4),), 0),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (ramp(5, 2, 3, 3),), 0),
    "reflection pad": (lambda x: F.pad(x, (1, 1), mode="reflect"), (ramp(5, 2, 4),), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_images_and_signals(name: str) -> None:
    fn, given, dim = CASES[name]
    rest: list[list[Placement]] = [[Replicate()]] * (len(given) - 1)
    check_op(fn, *given, placements=[[Shard(dim)], *rest], worlds=((4,),))


@contextmanager
def unguarded(op: Any) -> Iterator[None]:
    rule = find_rule(op)
    assert rule is not None

    def without(*args: Any, **kwargs: Any) -> list[Any]:
        return [replace(s, local_if_empty=None) for s in rule(*args, **kwargs)]

    guarded: Rule = without
    with sharding_rule(op, guarded):
        yield


def test_an_empty_tensor_is_seen() -> None:
    mesh = Mesh.of(tp=2)

    def body(comm: Any) -> str:
        q = lay(ramp(1, 1, 3, 4), mesh, (Shard(1),))
        try:
            call_fused(q, q, q)
        except AssertionError as error:
            return str(error)
        return ""

    with unguarded(fused):
        found = run_local(body, 2, timeout=60)
    assert found[0] == "" and "is called with shapes [(1, 0, 3, 4)" in found[1]


@pytest.mark.parametrize("placement", (Replicate(), Shard(0), Shard(1)), ids=str)
@pytest.mark.parametrize("shape", ((2, 0), (0, 2), (2, 4, 0)))
def test_group_norm_of_nothing(shape: tuple[int, ...], placement: Placement) -> None:
    """As torch, which returns nothing, also where there are no channels to divide by; 2.15 refuses most of it."""

    def shape_of(x: torch.Tensor) -> tuple[int, ...] | str:
        try:
            return tuple(F.group_norm(x, 1).shape)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    def body(comm: Any) -> tuple[int, ...] | str:
        return shape_of(lay(torch.zeros(shape), Mesh.of(tp=2), (placement,)))

    expected = shape_of(torch.zeros(shape))
    assert expected == shape or TORCH_RELEASE >= (2, 15)
    assert run_local(body, 2, timeout=60) == [expected, expected]
