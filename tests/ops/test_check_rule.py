"""Does the check find wrong and missing strategies, and do all built-in rules pass it?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise.ops  # noqa: F401  # registers the rules
from shardwise.geometry import Partial, Replicate, Shard
from shardwise.ops.check_rule import check_sharding
from shardwise.ops.registration import sharding_rule
from shardwise.ops.rule import Steps, Strategy, find_rule, registered_ops
from tests.ops.rules.rule_samples import (
    HIDES_NAN,
    NEEDS_GPU,
    NOT_DISCOVERED,
    TAKES_THE_LEAF,
    UNDEFINED_VALUES,
    sample_of,
)

aten = torch.ops.aten
HAVE_RULES = [op for op in registered_ops() if not isinstance(find_rule(op), Steps)]
BUILT_IN = [op for op in HAVE_RULES if op not in NEEDS_GPU | UNDEFINED_VALUES]
X = torch.zeros(8, 6)


def inputs(strategies: Any) -> list[Any]:
    return [getattr(s, "strategy", s).inputs for s in strategies]


def test_a_wrong_strategy_is_found_with_numbers() -> None:
    def wrong(x: Any, dim: int, **kwargs: Any) -> list[Any]:
        return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]

    with sharding_rule(aten.cumsum.default, wrong):
        checked = check_sharding(aten.cumsum.default, X, 0)
    assert not checked.ok
    assert inputs(checked.wrong) == [(Shard(0),)]
    assert checked.wrong[0].error is not None and checked.wrong[0].error > 0.1
    assert inputs(checked.missing) == [(Shard(1),), (Partial("sum"),)]
    text = str(checked)
    assert "wrong: S(0) -> S(0) on " in text
    assert "is off by" in text
    assert "missing: S(1) -> S(1)" in text


def test_a_rule_that_forgets_an_argument_is_found() -> None:
    def any_dim(x: Any, dim: list[int], keepdim: bool = False, **kwargs: Any) -> list[Any]:
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(1)])]

    with sharding_rule(aten.sum.dim_IntList, any_dim):
        assert check_sharding(aten.sum.dim_IntList, X, [0]).ok
        refused = check_sharding(aten.sum.dim_IntList, X, [1])
    assert inputs(refused.wrong) == [(Shard(1),)]


def test_a_wrong_gradient_is_found() -> None:
    """Values are right, but the local function cuts the tape."""

    def detached(view: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 1) + 0 * x if x.shape[0] < 8 else torch.relu(x.detach()) + 0 * x

    def rule(x: Any) -> list[Any]:
        return [Strategy((Replicate(),), (Replicate(),), detached)]

    with sharding_rule(aten.relu.default, rule):
        checked = check_sharding(aten.relu.default, X)
    assert [w.problem.partition(" is")[0] for w in checked.wrong] == ["the gradient of tensor 0"]


def test_a_rule_that_fails_is_reported_not_raised() -> None:
    def rule(x: Any, dim: int, *args: Any) -> list[Any]:
        return [([Replicate()], [Replicate()]), ([Shard(1)], [Shard(0)])]

    with sharding_rule(aten.select.int, rule):
        checked = check_sharding(aten.select.int, X, 0, 3)
    assert inputs(checked.wrong) == [(Shard(0),)]


def test_an_operator_without_a_rule_is_an_error() -> None:
    with torch.library._scoped_library("shardwise_check", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        with pytest.raises(ValueError, match=r"shardwise_check.unknown.default has no rule; register one"):
            check_sharding(torch.ops.shardwise_check.unknown.default, X)


def test_every_built_in_rule_has_a_sample() -> None:
    assert [str(op) for op in BUILT_IN if sample_of(op) is None] == []


# Deprecated operators have rules too; releases of torch differ in how often they say so.
@pytest.mark.filterwarnings("ignore:.*(is deprecated|in beta|is non-contiguous|was resized).*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")  # of parts without elements
@pytest.mark.parametrize("op", BUILT_IN, ids=str)
def test_built_in_rule(op: Any) -> None:
    sample = sample_of(op)
    if sample is None:
        pytest.skip("no sample; test_every_built_in_rule_has_a_sample names it")
    args, kwargs = sample
    with torch.set_grad_enabled(op not in TAKES_THE_LEAF):
        checked = check_sharding(op, *args, find_missing=op not in NOT_DISCOVERED, **kwargs)
    wrong = [w for w in checked.wrong if not (op in HIDES_NAN and " nan" in w.problem)]
    assert not wrong, str(checked)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.relu.default, aten.where.self, aten.mul_.Tensor], ids=str)
def test_pointwise_operators_known_by_their_tag(op: Any) -> None:
    given = {aten.where.self: (X > 0, X, X), aten.relu.default: (X,)}.get(op, (X, torch.zeros(6)))
    checked = check_sharding(op, *given, empty=True)
    assert checked.ok, str(checked)
    assert len(checked.strategies) >= 3
