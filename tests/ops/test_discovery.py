"""Are the right strategies found, and no wrong ones? Known operators, odd schemas, and the rules made from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.comm import Comm, run_local
from shardwise.geometry import Layout, Mesh, MeshSpec, Replicate, Shard
from shardwise.ops.discovery import limit_integers
from shardwise.ops.registration import (
    AutoRule,
    DiscoveryReport,
    discover_sharding,
    format_strategy,
    register_sharding,
    remove_sharding,
)
from shardwise.ops.rule import TensorMeta, find_rule, normalise_strategies, split_call

aten = torch.ops.aten
X, Y = torch.zeros(8, 6), torch.zeros(6, 5)
LIBRARY = "shardwise_discover"


def found(op: Any, *args: Any, **kwargs: Any) -> set[str]:
    return {format_strategy(s) for s in discover_sharding(op, *args, **kwargs).strategies}


INDEX = torch.tensor([1, 7, 0, 3])
ROWS, COLUMNS, PENDING = "S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"
PRODUCT = {"S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)"}
SELECTED = {"S(1), R -> S(1)", "R, S(0) -> S(0)", "P(sum), R -> P(sum)"}
SPLIT = {"S(1) -> S(1), S(1), S(1), S(1)", "P(sum) -> P(sum), P(sum), P(sum), P(sum)"}
IN_PLACE = {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P(sum), R -> P(sum)"}
EXPECTED: dict[str, tuple[Any, tuple[Any, ...], set[str]]] = {
    "mm": (aten.mm.default, (X, Y), PRODUCT),
    "softmax": (aten._softmax.default, (X, -1, False), {ROWS}),
    "cumsum": (aten.cumsum.default, (X, 0), {COLUMNS, PENDING}),
    "mean": (aten.mean.default, (X,), {PENDING}),
    "amin": (aten.amin.default, (X, [0], True), {"S(0) -> P(min)", COLUMNS}),
    "prod": (aten.prod.default, (X,), {"S(0) -> P(product)", "S(1) -> P(product)"}),
    "any": (aten.any.default, (X > 0,), {"S(0) -> P(max)", "S(1) -> P(max)"}),
    "all": (aten.all.dim, (X > 0, 0), {"S(0) -> P(min)", "S(1) -> S(0)"}),
    "argmax": (aten.argmax.default, (X, 0), {"S(1) -> S(0)"}),
    "relu": (aten.relu.default, (X,), {ROWS, COLUMNS}),
    "two outputs": (aten.sort.default, (X, 1), {"S(0) -> S(0), S(0)"}),
    "tensors in a list": (aten.cat.default, ([X, X], 0), {"S(1), S(1) -> S(1)", "P(sum), P(sum) -> P(sum)"}),
    "a list of outputs": (aten.split.Tensor, (X, 2, 0), SPLIT),
    "in place": (aten.mul_.Tensor, (X, X), IN_PLACE),
    "indices": (aten.index_select.default, (X, 0, INDEX), SELECTED),
    "no tensor comes out": (aten.equal.default, (X, X), set()),
    "sizes in the arguments": (aten.view.default, (X, [48]), {PENDING}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_known_operators(name: str) -> None:
    op, args, expected = EXPECTED[name]
    strategies = found(op, *args)
    replicated = {s for s in strategies if s.replace("R", "").replace("-", "").strip(" ,>") == ""}
    assert len(replicated) == 1
    assert strategies - replicated == expected


def test_tensors_given_by_name() -> None:
    assert "S(0), S(0), S(0) -> S(0)" in found(aten.add.out, X, X, out=torch.zeros(8, 6))


def test_integers_stay_in_the_range_of_the_sample() -> None:
    assert found(aten.embedding.default, torch.zeros(3, 4), torch.tensor([[0, 2, 1], [1, 1, 0]])) >= {"S(1), R -> S(2)"}


def test_an_operator_that_needs_the_samples_own_values() -> None:
    discovered = discover_sharding(aten.linalg_cholesky.default, torch.eye(4).expand(5, 4, 4).clone())
    assert {format_strategy(s) for s in discovered.strategies} >= {"S(0) -> S(0)"}
    assert "the sample's own values" in discovered.notes[0]


def test_random_operators_are_refused() -> None:
    with pytest.raises(ValueError, match="it draws random numbers"):
        discover_sharding(aten.bernoulli.default, torch.full((8, 6), 0.5))


def test_samples_that_do_not_run_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"aten.mm.default does not run on tensors of shapes \(8, 6\), \(8, 6\)"):
        discover_sharding(aten.mm.default, X, X)
    with pytest.raises(ValueError, match="no tensor to shard"):
        discover_sharding(aten.arange.default, 3)


def test_a_name_with_several_overloads_is_an_error_that_lists_them() -> None:
    with pytest.raises(ValueError, match=r"aten.sum has the overloads .*dim_IntList.*; name one"):
        discover_sharding(aten.sum, X)


# Devices


def test_samples_on_a_device_are_tried_in_host_memory() -> None:
    """An index out of range, as in parts of a dim that is indexed, would end a process's use of a GPU."""
    seen = set()

    def look_up(x: Tensor, index: Tensor) -> Tensor:
        seen.add(x.device.type)
        return x.cpu().index_select(0, index.cpu()).to(x.device)

    with torch.library._scoped_library(LIBRARY, "DEF") as library:
        library.define("look_up(Tensor x, Tensor index) -> Tensor")
        library.impl("look_up", look_up, "CompositeExplicitAutograd")
        assert "R, S(0) -> S(0)" in found(torch.ops.shardwise_discover.look_up.default, X, INDEX)
    assert seen == {"cpu"}


def test_an_operator_that_runs_on_a_device_only_gets_indices_that_are_valid_in_every_part() -> None:
    index, ends = torch.tensor([1, 7, 0, 3, 5, 2]), torch.tensor([3, 8])
    call = split_call(aten.index_select.default, (X, 0, index), {})
    limited = limit_integers(call)
    assert limited.tensors[0] is X
    assert limited.tensors[1].tolist() == [1, 1, 0, 1, 1, 0]  # a dim of 6 is cut in parts of 2
    bags = split_call(aten._embedding_bag.default, (X, index, ends), {})
    assert limit_integers(bags).tensors[2] is ends  # its name is `offsets`
    with pytest.raises(ValueError, match="does not run in host memory and takes integers"):
        limit_integers(split_call(aten.index_select.default, (torch.zeros(3, 4), 0, index), {}))


# Sources


def rule_from(discovered: DiscoveryReport) -> Any:
    names: dict[str, Any] = {"torch": torch}
    text = discovered.source().replace("register_sharding(torch.ops", "(lambda op: lambda f: f)(torch.ops")
    exec(compile(text, "rule", "exec"), names)
    return next(v for k, v in names.items() if k.endswith("_rule"))


def meta(tensor: Tensor) -> TensorMeta:
    layout: Layout = MeshSpec(Mesh.of(tp=2), (Replicate(),)).layout(tuple(tensor.shape))
    return TensorMeta(tuple(tensor.shape), tensor.dtype, layout, (Replicate(),))


def strategies_of(discovered: DiscoveryReport, rule: Any, *replaced: Any) -> set[str]:
    args, kwargs = discovered.call.fill_slots([meta(t) for t in discovered.call.tensors])
    args = (*args[: len(args) - len(replaced)], *replaced)
    given = normalise_strategies(rule(*args, **kwargs), discovered.call.args, kwargs, len(discovered.call.tensors))
    return {format_strategy(s) for s in given}


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "no tensor comes out"])
def test_the_source_gives_the_same_strategies(name: str) -> None:
    op, args, _ = EXPECTED[name]
    discovered = discover_sharding(op, *args)
    assert strategies_of(discovered, rule_from(discovered)) == {format_strategy(s) for s in discovered.strategies}


def test_dims_in_the_source_follow_the_argument() -> None:
    discovered = discover_sharding(aten.any.dim, torch.zeros(4, 5, 6, dtype=torch.bool), 1)
    rule = rule_from(discovered)
    assert strategies_of(discovered, rule, -1) == {"R -> R", "S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> P(max)"}
    assert strategies_of(discovered, rule, 0) == {"R -> R", "S(0) -> P(max)", "S(1) -> S(0)", "S(2) -> S(1)"}


def test_a_source_that_does_not_follow_replicates_for_other_arguments() -> None:
    discovered = discover_sharding(aten.sum.dim_IntList, X, [0])
    assert strategies_of(discovered, rule_from(discovered), [1]) == {"R -> R"}


# Rules that discover


@pytest.fixture
def double_rows() -> Iterator[Any]:
    """A custom operator that takes a tensor by name and gives two."""
    with torch.library._scoped_library(LIBRARY, "DEF") as library:
        library.define("scaled_sums(Tensor x, int dim, *, Tensor scale) -> (Tensor, Tensor)")
        library.impl("scaled_sums", scaled_sums, "CompositeExplicitAutograd")
        op = getattr(torch.ops, LIBRARY).scaled_sums.default
        yield op
        if find_rule(op) is not None:
            remove_sharding(op)


def scaled_sums(x: Tensor, dim: int, *, scale: Tensor) -> tuple[Tensor, Tensor]:
    return x * scale, (x * scale).sum(dim)


def test_an_auto_rule_finds_its_strategies_at_first_use(double_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    register_sharding(double_rows, "auto", dtensor=False)
    whole, scale = torch.arange(60.0).reshape(10, 6), torch.arange(6.0)

    def body(comm: Comm) -> list[Tensor]:
        mesh = Mesh.of(tp=2)
        x = shardwise.shard(whole, MeshSpec(mesh, (Shard(0, sizes=(7, 3)),)))
        s = shardwise.shard(scale, MeshSpec(mesh, (Replicate(),)))
        scaled, sums = double_rows(x, 0, scale=s)
        _, other = double_rows(x, 1, scale=s)
        return [scaled.full(), sums.full(), other.full()]

    with caplog.at_level(logging.INFO, "shardwise.ops"):
        results = run_local(body, 2)
    for scaled, sums, other in results:
        assert torch.equal(scaled, whole * scale)
        assert torch.equal(sums, (whole * scale).sum(0))
        assert torch.equal(other, (whole * scale).sum(1))
    assert "S(0), R -> S(0), P(sum)" in caplog.text
    assert "S(0), R -> S(0), S(0)" in caplog.text


def test_an_auto_rule_shrinks_large_tensors_but_not_what_integers_may_refer_to() -> None:
    rule = AutoRule(aten.slice.Tensor)
    large = meta(torch.empty(4096, 4096, device="meta"))
    first_rows = list(rule(large, 0, 0, 5))
    assert ([Shard(0)], [Shard(0), None, None, None]) not in first_rows
    assert ([Shard(1)], [Shard(1), None, None, None]) in first_rows


def test_a_discovered_rule_can_be_registered(double_rows: Any) -> None:
    discovered = discover_sharding(double_rows, X, 0, scale=torch.zeros(6))
    register_sharding(double_rows, discovered.rule, dtensor=False)
    assert find_rule(double_rows) is discovered.rule
    with pytest.raises(ValueError, match="has a rule already; pass override=True"):
        register_sharding(double_rows, "auto", dtensor=False)
    assert shardwise.check_sharding(double_rows, X, 0, scale=torch.zeros(6)).ok


def test_an_operator_that_takes_some_dtypes_and_whole_words_of_memory() -> None:
    """Grouped products take no float64, lengths in units of 16 bytes, and offsets that ascend to the last row."""
    op = torch.ops.aten._grouped_mm.default
    sample = torch.zeros(20, 16), torch.zeros(4, 16, 32), torch.tensor([3, 8, 8, 20], dtype=torch.int32)
    found = [format_strategy(s) for s in discover_sharding(op, *sample).strategies]
    assert found[:3] == ["R, R, R -> R", "S(1), S(1), R -> P(sum)", "R, S(2), R -> S(1)"]
    assert "S(0), R, R -> S(0)" not in found  # offsets of all rows are not those of some
    layouts = [MeshSpec(Mesh.of(tp=2), [Replicate()]).layout(tuple(t.shape)) for t in sample]
    metas = [TensorMeta(tuple(t.shape), t.dtype, a, (Replicate(),)) for t, a in zip(sample, layouts, strict=True)]
    assert len(AutoRule(op)(*metas)) == len(found)


def test_the_error_of_samples_that_do_not_run_is_that_of_their_own_dtype() -> None:
    sample = torch.zeros(20, 5), torch.zeros(4, 5, 7), torch.tensor([3, 8, 8, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match="strides should be multiple of 16 bytes"):
        discover_sharding(torch.ops.aten._grouped_mm.default, *sample)
