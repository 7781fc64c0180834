"""Rules of a user's own operators: what may be registered, what a rule may answer, and operators with odd schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import (
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    check_sharding,
    register_sharding,
    remove_sharding,
    run_local,
    sharding_rule,
)
from shardwise.comm import Comm
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import lay

PAIR = Mesh.of(tp=2)
X = torch.arange(24, dtype=torch.float64).reshape(4, 6)


@torch.library.custom_op("shardwise_user_rules::running", mutates_args=())
def running(x: Tensor, by: float = 1.0) -> Tensor:
    return x.cumsum(0) * by


@torch.library.custom_op("shardwise_user_rules::bump_", mutates_args=("x",))
def bump_(x: Tensor, by: float) -> None:
    x.add_(by)


@pytest.fixture
def bump_rule() -> Iterator[None]:
    @register_sharding(bump_)
    def rule(x: Any, by: float) -> list[Any]:
        return [([], [Replicate(), None]), *(([], [Shard(d), None]) for d in range(x.ndim))]

    yield
    remove_sharding(bump_)


def on_rows(comm: Comm) -> Tensor:
    whole: Any = running(lay(X, PAIR, (Shard(0),)))
    found: Tensor = whole.full()
    return found


def test_an_operator_is_given_by_overload_name_or_definition() -> None:
    for op in (running, torch.ops.shardwise_user_rules.running, torch.ops.shardwise_user_rules.running.default):
        register_sharding(op)(lambda x, by=1.0: [([Replicate()], [Replicate(), None]), ([Shard(1)], [Shard(1), None])])
        assert torch.equal(run_local(on_rows, 2)[1], X.cumsum(0))
        remove_sharding(op)
    for wrong in ("running", torch.relu, Tensor.add):
        with pytest.raises(TypeError, match="is not a torch operator; pass one such as"):
            register_sharding(wrong)
    with pytest.raises(ValueError, match="has the overloads"):
        register_sharding(torch.ops.aten.add)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, r"a rule returns a list of pairs .*, got NoneType"),
        ([(Shard(0), Shard(0))], r"a rule returns a list of pairs .*, got \(Shard\(0\), Shard\(0\)\) among them"),
        ([(["S0"], ["S0"])], r"a rule returns Shard, Replicate or Partial \(ours or torch's\) or None, got 'S0'"),
        ([([Shard(-1)], [Shard(-1)])], r"count dims from the front"),
        ([([Shard(1), Shard(1)], [Shard(1)])], r"returns 2 output placements, but it has 1 outputs"),
    ],
)
def test_answers_that_make_no_sense(answer: Any, text: str) -> None:
    with sharding_rule(running, lambda x, by=1.0: answer), pytest.raises(LayoutError, match=text):
        run_local(on_rows, 2)


def test_layouts_that_no_strategy_takes_are_told_what_it_takes() -> None:
    def body(comm: Comm) -> None:
        x = lay(X, PAIR, (Partial("sum"),))
        with pytest.raises(UnsupportedOpError) as caught:
            bump_(x, 1.0)
        text = str(caught.value)
        assert "bump_.default of torch.float64[4,6] on tp=2: P(sum): no strategy of its rule fits" in text
        assert "the operator that does not write to its argument; on each axis the rule accepts R | S(0) | S(1)" in text

    with sharding_rule(bump_, lambda x, by: [([], [p, None]) for p in (Replicate(), Shard(0), Shard(1))]):
        run_local(body, 2)


def test_an_operator_that_only_writes(bump_rule: None) -> None:
    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0), Shard(1, sizes=(6, 0))):
            x: Any = lay(X.clone(), PAIR, (placement,))
            assert bump_(x, 2.0) is None  # type: ignore[func-returns-value]  # that it gives nothing is the point
            assert torch.equal(x.full(), X + 2)

    run_local(body, 2)
    checked = check_sharding(bump_, torch.zeros(8, 6), 2.0)
    assert checked.ok and len(checked.strategies) == 3, str(checked)


def test_a_wrong_rule_of_an_operator_that_only_writes_is_found() -> None:
    with sharding_rule(bump_, lambda x, by: [([], [Partial("sum"), None])]):
        checked = check_sharding(bump_, torch.zeros(8, 6), 2.0)
    assert not checked.ok and "is off by" in str(checked)


INNER = {
    "softmax": (torch.ops.aten._softmax.default, lambda x: x.softmax(1)),
    "log_softmax": (torch.ops.aten._log_softmax.default, lambda x: x.log_softmax(1)),
    "layer_norm": (torch.ops.aten.native_layer_norm.default, lambda x: torch.nn.functional.layer_norm(x, [6])),
}


@pytest.mark.parametrize("name", INNER)
def test_a_rule_of_the_operator_that_torch_makes_of_another_is_asked(name: str) -> None:
    op, function = INNER[name]
    asked = []

    def rule(x: Any, *rest: Any) -> list[Any]:
        asked.append(x)
        outputs = 3 if name == "layer_norm" else 1
        return [([Replicate()] * outputs, [Replicate(), *(None for _ in rest)])]

    def body(comm: Comm) -> tuple[Any, Tensor]:
        found: Any = function(lay(X, PAIR, (Shard(0),)))
        return found.placements, found.full()

    for _ in range(2):
        placements, value = run_local(body, 2)[0]
        assert placements == (Shard(0),) and torch.allclose(value, function(X)) and not asked
    with sharding_rule(op, rule):
        placements, value = run_local(body, 2)[0]
    assert placements == (Replicate(),) and torch.allclose(value, function(X)) and asked
    assert run_local(body, 2)[0][0] == (Shard(0),)
