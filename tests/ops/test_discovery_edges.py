"""Is no wrong rule accepted? Operators that look like something simpler on normal numbers, and their right answers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.geometry import Partial, Replicate, Shard
from shardwise.ops import discovery
from shardwise.ops.check_rule import check_sharding
from shardwise.ops.registration import discover_sharding, format_strategy, sharding_rule

LIBRARY = "shardwise_edges"
X, Y = torch.zeros(8, 6), torch.zeros(6, 5)
WHOLE_NUMBERS, FLAGS = torch.arange(48).reshape(8, 6), torch.zeros(8, 6, dtype=torch.bool)
ROWS, COLUMNS, PENDING = "S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"
POINTWISE, LINEAR = {ROWS, COLUMNS}, {ROWS, COLUMNS, PENDING}
SUMMED = {"S(0) -> P(sum)", "S(1) -> P(sum)"}
LARGEST, SMALLEST = {"S(0) -> P(max)", "S(1) -> P(max)"}, {"S(0) -> P(min)", "S(1) -> P(min)"}
COUNTED_ROWS = {"S(0) -> P(sum)", "S(1) -> S(0)"}
BOTH = {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"}


def scaled_if(test: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Doubles its argument, unless a test of the whole of it is true."""
    return lambda x: x * torch.where(test(x), 0.0, 2.0).to(x.dtype)


def keep_rows_that_are_not_zero(x: Tensor) -> Tensor:
    return x[x.abs().sum(1) > 0].sum(0) / x.shape[0]


ONE: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "clamp_10": (lambda x: x.clamp(-10, 10), POINTWISE),
    "clamp_1e4": (lambda x: x.clamp(-1e4, 1e4), POINTWISE),
    "clamp_from_below": (lambda x: x.clamp(min=-1e6), POINTWISE),
    "hardtanh": (torch.nn.functional.hardtanh, POINTWISE),
    "relu6": (torch.nn.functional.relu6, POINTWISE),
    "softplus": (torch.nn.functional.softplus, POINTWISE),
    "softshrink": (lambda x: torch.nn.functional.softshrink(x, 5.0), POINTWISE),
    "no_tiny": (lambda x: torch.where(x.abs() < 1e-5, 0.0, x).to(x.dtype), POINTWISE),
    "nan_to_num": (torch.nan_to_num, POINTWISE),
    "ones_for_zeros": (lambda x: torch.where(x == 0, 1.0, x).to(x.dtype), POINTWISE),
    "finite_only": (lambda x: torch.where(x.isfinite(), x, 0.0).to(x.dtype), POINTWISE),
    "floor": (torch.floor, POINTWISE),
    "sign": (torch.sign, POINTWISE),
    "copysign": (lambda x: torch.copysign(torch.ones_like(x), x), POINTWISE),
    "saturating_half": (lambda x: x.clamp(-65504, 65504), POINTWISE),
    "triple": (lambda x: x * 3, LINEAR),
    "negate": (lambda x: -x, LINEAR),
    "cast_free_copy": (lambda x: x.clone(), LINEAR),
    "sum_0": (lambda x: x.sum(0), {"S(0) -> P(sum)", "S(1) -> S(0)", PENDING}),
    "mean": (lambda x: x.mean(), {PENDING}),
    "centred": (lambda x: x - x.mean(0), {COLUMNS, PENDING}),
    "cumsum_0": (lambda x: x.cumsum(0), {COLUMNS, PENDING}),
    "cumsum_1": (lambda x: x.cumsum(1), {ROWS, PENDING}),
    "diff_0": (lambda x: x.diff(dim=0), {COLUMNS, PENDING}),
    "roll_0": (lambda x: x.roll(1, 0), {COLUMNS, PENDING}),
    "flip_1": (lambda x: x.flip(1), {ROWS, PENDING}),
    "first_row": (lambda x: x[0].clone(), {"S(1) -> S(0)", PENDING}),
    "first_columns": (lambda x: x[:, :3].clone(), {ROWS, PENDING}),
    "padded": (lambda x: torch.nn.functional.pad(x, (1, 1)), {ROWS, PENDING}),
    "above_5": (lambda x: (x > 5).sum(0), COUNTED_ROWS),
    "nans": (lambda x: x.isnan().sum(0), COUNTED_ROWS),
    "nonzeros": (lambda x: x.count_nonzero(), SUMMED),
    "abs_sum": (lambda x: x.abs().sum(), SUMMED),
    "overflows": (lambda x: (x.abs() > 65504).any(), LARGEST),
    "has_nan": (lambda x: x.isnan().any(), LARGEST),
    "all_finite": (lambda x: x.isfinite().all(), SMALLEST),
    "amax_1": (lambda x: x.amax(1), {"S(0) -> S(0)", "S(1) -> P(max)"}),
    "prod_0": (lambda x: x.prod(0), {"S(0) -> P(product)", "S(1) -> S(0)"}),
    "logsumexp_0": (lambda x: x.logsumexp(0), {"S(1) -> S(0)"}),
    "softmax_1": (lambda x: x.softmax(1), {ROWS}),
    "sort_1": (lambda x: x.sort(1).values, {ROWS}),
    "median_1": (lambda x: x.median(1).values, {ROWS}),
    "var_1": (lambda x: x.var(1), {ROWS}),
    "argmax_0": (lambda x: x.argmax(0), {"S(1) -> S(0)"}),
    "norm": (lambda x: x.norm(), set()),
    "clip_by_norm_100": (lambda x: x * (100 / (x.norm() + 1e-12)).clamp(max=1.0), set()),
    "clip_by_largest": (lambda x: x / (x.abs().amax() / 1e4).clamp(min=1.0), set()),
    "zeros_if_inf": (scaled_if(lambda x: x.isinf().any()), set()),
    "zeros_if_nan": (scaled_if(lambda x: x.isnan().any()), set()),
    "zeros_if_large_sum": (scaled_if(lambda x: x.sum() > 1000), set()),
    "zeros_if_large": (scaled_if(lambda x: x.abs().amax() > 100), set()),
    "zeros_if_all_small": (scaled_if(lambda x: x.abs().amax() < 1e-2), set()),
    "zeros_if_equal": (scaled_if(lambda x: x.amax() == x.amin()), set()),
    "times_count": (lambda x: x * (x > 1e3).sum(), set()),
    "different": (lambda x: torch.tensor(x.unique().numel()), set()),
    "is_sorted": (lambda x: (x.reshape(-1).diff() >= 0).all(), set()),
    "rows_not_zero": (keep_rows_that_are_not_zero, set()),
    "zeros_for_tiny": (lambda x: torch.where(x.abs() < 1e-12, 0.0, x).to(x.dtype), POINTWISE),
    "plus_tiny": (lambda x: x + 1e-12, POINTWISE),
    "twins_next_to_each_other": (lambda x: (x[1:] == x[:-1]).all(1).any(), set()),
    "half_if_sorted_down": (scaled_if(lambda x: (x[1:] <= x[:-1]).all()), set()),
    "overflows_after_scaling": (lambda x: ((x / 1e3).abs() > 65504).any().to(torch.float32), LARGEST),
    "sorted_columns": (lambda x: (x[1:] >= x[:-1]).all(0), {"S(1) -> S(0)"}),
    "zeros_if_negative": (scaled_if(lambda x: (x < 0).any()), set()),
    "clip_by_norm_1000": (lambda x: x * (1000 / (x.norm() + 1e-12)).clamp(max=1.0), set()),
    "rounded_to_half": (lambda x: x.half().to(x.dtype), POINTWISE),
    "quantized": (lambda x: (x / (x.abs().amax() + 1e-9) * 127).round(), set()),
}
OTHER: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], set[str]]] = {
    "double_integers": (lambda x: x * 2, (WHOLE_NUMBERS,), POINTWISE),
    "some_above_100": (lambda x: (x > 100).any(), (WHOLE_NUMBERS,), LARGEST),
    "sum_of_integers": (lambda x: x.sum(), (WHOLE_NUMBERS,), SUMMED),
    "clamped_integers": (lambda x: x.clamp(-100, 100), (WHOLE_NUMBERS,), POINTWISE),
    "negative_integers": (lambda x: (x < 0).any(), (WHOLE_NUMBERS,), LARGEST),
    "large_integers": (lambda x: (x > 1_000_000).any(), (WHOLE_NUMBERS,), LARGEST),
    "zeros_if_negative_integers": (lambda x: x * ~(x < 0).any(), (WHOLE_NUMBERS,), set()),
    "zeros_if_smallest_integer": (
        lambda x: torch.where((x == torch.iinfo(torch.int64).min).any(), 0, x),
        (WHOLE_NUMBERS,),
        set(),
    ),
    "flag_parity": (lambda x: x.sum() % 2, (FLAGS,), set()),
    "equal_tensors": (lambda x, y: (x == y).all(), (X, X), {"S(0), S(0) -> P(min)", "S(1), S(1) -> P(min)"}),
    "close_tensors": (
        lambda x, y: ((x - y).abs() < 1e-3).all(),
        (X, X),
        {"S(0), S(0) -> P(min)", "S(1), S(1) -> P(min)"},
    ),
    "any_flag": (lambda x: x.any(), (FLAGS,), LARGEST),
    "all_flags": (lambda x: x.all(), (FLAGS,), SMALLEST),
    "flags_in_rows": (lambda x: x.sum(0), (FLAGS,), COUNTED_ROWS),
    "add": (lambda x, y: x + y, (X, X), {*BOTH, "P(sum), P(sum) -> P(sum)"}),
    "maximum": (torch.maximum, (X, X), BOTH),
    "masked": (lambda x, y: torch.where(y > 5, x, 0.0).to(x.dtype), (X, X), {*BOTH, "P(sum), R -> P(sum)"}),
    "gated": (lambda x, y: x * y.clamp(-10, 10), (X, X), {*BOTH, "P(sum), R -> P(sum)"}),
    "add_unless_large": (lambda x, y: x + y * (x.abs().amax() < 1e4), (X, X), set()),
}
CASES = {**{name: (function, (X,), right) for name, (function, right) in ONE.items()}, **OTHER}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    function, sample, right = CASES[request.param]
    with torch.library._scoped_library(LIBRARY, "DEF") as library:
        library.define(f"{request.param}({', '.join(f'Tensor x{i}' for i in range(len(sample)))}) -> Tensor")
        library.impl(request.param, function, "CompositeExplicitAutograd")
        yield getattr(getattr(torch.ops, LIBRARY), request.param).default, sample, right


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_the_strategies_are_the_right_ones(case: Any) -> None:
    op, sample, right = case
    found = {format_strategy(s) for s in discover_sharding(op, *sample).strategies}
    whole = ", ".join("R" for _ in sample) + " -> R"
    assert found - {whole} == right


def test_what_was_not_tried_is_said() -> None:
    report = discover_sharding(torch.ops.aten.linalg_eigvals.default, torch.zeros(5, 4, 4))
    assert "not tried: " in str(report) and "a nan" in str(report)


def test_a_slow_machine_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(discovery, "perf_counter", lambda: 11.0 ** min(next(clock), 280))  # always much later
    report = discover_sharding(torch.ops.aten.mm.default, torch.zeros(4, 6), torch.zeros(6, 5))
    assert not report.notes and len(report.strategies) == 6


def test_an_operator_that_counts_up_to_a_value_gets_no_large_ones() -> None:
    counted = []

    def count_up(x: Tensor) -> Tensor:
        counted.append(int(x.abs().max()) if x.numel() else 0)
        for _ in range(min(counted[-1], 2 * 10**6)):
            abs(0)
        return x.clone()

    with torch.library._scoped_library(LIBRARY, "DEF") as library:
        library.define("count_up(Tensor x) -> Tensor")
        library.impl("count_up", count_up, "CompositeExplicitAutograd")
        report = discover_sharding(torch.ops.shardwise_edges.count_up.default, X)
    assert "1e+12" in str(report) and max(counted) < 10**7


def test_a_part_of_length_0_that_changes_the_result_is_said() -> None:
    with torch.library._scoped_library(LIBRARY, "DEF") as library:
        library.define("largest_or_zero(Tensor x) -> Tensor")
        library.impl("largest_or_zero", lambda x: x.amax() if x.numel() else x.sum(), "CompositeExplicitAutograd")
        report = discover_sharding(torch.ops.shardwise_edges.largest_or_zero.default, X)
    assert "a part of length 0 changes the result" in str(report) and "S(0) -> P(max)" in str(report)


def test_what_no_trial_tells_is_said() -> None:
    assert "not decided: " in str(discover_sharding(torch.ops.aten.neg.default, X))
    assert "not decided: " in str(check_sharding(torch.ops.aten.neg.default, X))


WRONG: dict[str, list[Any]] = {
    "plus_tiny": [([Partial("sum")], [Partial("sum")])],
    "twins_next_to_each_other": [([Partial("max")], [Shard(0)])],
    "half_if_sorted_down": [([Shard(1)], [Shard(1)])],
    "clamp_10": [([Partial("sum")], [Partial("sum")])],
    "above_5": [([Replicate()], [Shard(0)])],
    "zeros_if_inf": [([Shard(0)], [Shard(0)])],
    "overflows": [([Replicate()], [Shard(1)])],
    "clip_by_norm_100": [([Shard(1)], [Shard(1)])],
}


@pytest.mark.parametrize("name", WRONG)
def test_check_sharding_finds_what_is_wrong_on_edge_values_only(name: str) -> None:
    function, sample, _ = CASES[name]
    with torch.library._scoped_library(LIBRARY, "DEF") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, function, "CompositeExplicitAutograd")
        op = getattr(getattr(torch.ops, LIBRARY), name).default
        with sharding_rule(op, lambda x: [([Replicate()], [Replicate()]), *WRONG[name]]):
            checked = check_sharding(op, *sample)
    assert [w.strategy.inputs for w in checked.wrong] == [tuple(inputs) for _, inputs in WRONG[name]]
    assert " on " in checked.wrong[0].problem
