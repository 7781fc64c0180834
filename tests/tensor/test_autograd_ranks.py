"""Forward mode and hooks of modules where each rank is a process: torch counts its levels of forward mode there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import parse_spec, shard
from tests.device import DEVICE
from tests.world import Ranks, world_fixture

world = world_fixture(2)
LAYOUTS = ("on tp=2: S(0)", "on tp=2: S(1)", "on tp=2: R")


def matrix(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float64)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "mlp": lambda x: F.linear(F.gelu(F.linear(x, x)), x),
    "softmax": lambda x: x.softmax(0) @ x,
    "amax": lambda x: x.amax(0) * x.sum(1),
    "clone": lambda x: x.clone().mul_(2) - x.mean(),
}


def _jvp(name: str, layout: str) -> list[tuple[Tensor, Tensor]]:
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads its formulas
    pairs = []
    for seed, grad in ((1, False), (3, True)):
        whole, along = matrix(seed).requires_grad_(grad), matrix(seed + 1)
        held = [shard(t.detach(), parse_spec(layout), None) for t in (whole, along)]
        found: Any = torch.func.jvp(PROGRAMS[name], (held[0].requires_grad_(grad),), (held[1],))
        expected: Any = torch.func.jvp(PROGRAMS[name], (whole,), (along,))
        pairs += [(one.full().detach(), other.detach()) for one, other in zip(found, expected, strict=True)]
    return pairs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_jvp(world: Ranks, name: str, layout: str) -> None:
    for pairs in world.run(_jvp, name, layout):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)


def _refused(layout: str) -> str:
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        torch.func.jacfwd(lambda x: x * x)(shard(matrix(1), parse_spec(layout), None))
    except RuntimeError as error:
        return str(error)
    return "not refused"


def test_many_tangents_are_refused_on_every_rank(world: Ranks) -> None:
    for text in world.run(_refused, LAYOUTS[0]):
        assert "call torch.func.jvp for one tangent after the other" in text


def _train(layout: str) -> list[tuple[Tensor, Tensor]]:
    """A module with hooks inside of checkpointed code; dropout drops the same elements when it is computed again."""
    heard: list[Tensor] = []
    layers = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
    layers.register_full_backward_hook(lambda module, given, grads: heard.append(given[0].full()))
    x = shard(matrix(1), parse_spec(layout), None).requires_grad_()
    out: Any = checkpoint(lambda y: checkpoint(layers, y * 1, use_reentrant=False), x, use_reentrant=False)
    out.sum().backward()
    kept = (out.full().detach() != 0).double() * 2
    expected = kept * (1 - out.full().detach() ** 2)
    assert x.grad is not None
    return [(x.grad.full(), expected), (heard[-1], expected)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_and_dropout_inside_of_nested_checkpointing(world: Ranks, layout: str) -> None:
    for pairs in world.run(_train, layout):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)
