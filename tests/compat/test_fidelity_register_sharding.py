"""register_sharding as torch documents it, for DTensors and for sharded tensors alike.

A program takes one of the two functions and runs on DTensors; torch's own gives the expected results where it is right.
What a rule does for a ShardedTensor of the namespace is tested on ours alone: torch's rules do not reach there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import experimental as torchs

import shardwise
from shardwise import compat
from tests.compat.fidelity import TORCH, Names, numbers, ours_of, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4)
aten = torch.ops.aten
TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs")


def register(names: Names, ops: Any) -> Callable[[Any], Any]:
    return (torchs.register_sharding if names.root == TORCH else compat.register_sharding)(ops)


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape or (4,))


def take_away(op: Any) -> None:
    """Remove torch's built-in strategies of an operator."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for table in TABLES:
        getattr(propagator, table, {}).pop(op, None)


@contextmanager
def counted(rule: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """A rule that notes each call's arguments."""
    calls: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return rule(*args, **kwargs)

    yield noted, calls


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """A custom operator, made once in a process."""
    if not hasattr(torch.ops.fidelity, name):
        torch.library.define(f"fidelity::{name}", schema)
        torch.library.impl(f"fidelity::{name}", "CompositeExplicitAutograd", function)
        torch.library.register_fake(f"fidelity::{name}", fake)
    return getattr(torch.ops.fidelity, name).default


def distinct(names: Names, name: str) -> str:
    return f"{name}_{'there' if names.root == TORCH else 'here'}"


# Built-in rules are replaced


def softmax_rule(x: Any, dim: int, half_to_float: bool) -> list[Any]:
    taken = dim if dim >= 0 else dim + x.ndim
    free = [d for d in range(x.ndim) if d != taken]
    return [([Replicate()], [Replicate(), None, None])] + [([Shard(d)], [Shard(d), None, None]) for d in free]


def softmax(names: Names) -> list[Any]:
    take_away(aten._softmax.default)
    register(names, aten._softmax.default)(softmax_rule)
    found, values = [], torch.rand(8, 12, 16, generator=torch.Generator().manual_seed(1))
    for dim in (-3, -1, 0, 1):
        for cut in range(3):
            result = torch.nn.functional.softmax(distribute_tensor(values, mesh_of(), [Shard(cut)]), dim=dim)
            right = torch.allclose(result.full_tensor(), torch.softmax(values, dim))
            found.append((dim, cut, str(result.placements), right))
    return found


def test_a_softmax_rule_replaces_the_built_in_one(world: Ranks) -> None:
    for found in same_values(world, softmax):
        for dim, cut, placements, right in found:
            kept = cut != dim % 3
            assert (placements, right) == ((f"(Shard(dim={cut}),)" if kept else "(Replicate(),)"), True)


def argmax_rule(x: Any, dim: int, keepdim: bool = False) -> list[Any]:
    rules = [([Replicate()], [Replicate(), None, None])]
    if keepdim:
        rules += [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim]
    return rules


def argmax(names: Names, calls: list[tuple[int, bool]]) -> list[Any]:
    take_away(aten.argmax.default)
    register(names, aten.argmax.default)(argmax_rule)
    values, found = torch.rand(8, 8, generator=torch.Generator().manual_seed(2)), []
    sharded = distribute_tensor(values, mesh_of(), [Shard(1)])
    for dim, keepdim in calls:
        result = torch.argmax(sharded, dim=dim, keepdim=keepdim)
        right = torch.equal(result.full_tensor(), torch.argmax(values, dim, keepdim=keepdim))
        found.append((str(result.placements), right))
    return found


def test_an_argmax_rule_has_strategies_for_each_dim(world: Ranks) -> None:
    expected = [("(Shard(dim=1),)", True), ("(Replicate(),)", True)]
    assert same_values(world, argmax, [(0, True), (1, True)]) == [expected] * 4


def test_a_rule_runs_where_dtensor_has_a_function_of_its_own(world: Ranks) -> None:
    """DTensor computes argmax by a function of its own, which here gives a part of the result as the whole."""
    assert ours_of(world, argmax, [(0, False)]) == [[("(Replicate(),)", True)]] * 4


def register_as_a_decorator(names: Names) -> list[Any]:
    single = register(names, aten._softmax.default)(softmax_rule) is softmax_rule
    several = register(names, [aten._softmax.default, aten._log_softmax.default])(softmax_rule) is softmax_rule
    values = numbers(8, 4)
    result = torch.log_softmax(distribute_tensor(values, mesh_of(), [Shard(0)]), 1)
    return [single, several, str(result.placements), torch.allclose(result.full_tensor(), values.log_softmax(1))]


def test_a_rule_of_one_or_several_operators_is_returned_unchanged(world: Ranks) -> None:
    assert same_values(world, register_as_a_decorator) == [[True, True, "(Shard(dim=0),)", True]] * 4


def register_again(names: Names) -> list[str]:
    """The rule that was registered last counts, also after a call; torch's cache keeps the answer of the first."""
    op = define(distinct(names, "twice"), "(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)
    sharded, found = distribute_tensor(numbers(8, 4), mesh_of(), [Shard(0)]), []
    for kept in (Shard(0), Replicate(), Shard(1)):
        register(names, op)(lambda x, kept=kept: [([kept], [kept])])
        found.append(str(op(sharded).placements))
    return found


def test_a_second_rule_replaces_the_first(world: Ranks) -> None:
    expected = ["(Shard(dim=0),)", "(Replicate(),)", "(Shard(dim=1),)"]
    assert ours_of(world, register_again) == [expected] * 4


def replace_relu(names: Names) -> str:
    """torch 2.13 ignores a rule for operators of which it has a "single-dim strategy", if that is not taken away."""
    register(names, aten.relu.default)(lambda x: [([Replicate()], [Replicate()])])
    return str(torch.relu(distribute_tensor(numbers(8, 4), mesh_of(), [Shard(0)])).placements)


def test_a_rule_replaces_a_built_in_one_that_torch_would_prefer(world: Ranks) -> None:
    assert ours_of(world, replace_relu) == ["(Replicate(),)"] * 4


# What a rule sees


def arguments_of_a_rule(names: Names) -> list[Any]:
    op = define(distinct(names, "scaled"), "(Tensor x, int factor) -> Tensor", lambda x, n: x * n, lambda x, n: x + 0)
    rules = [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]
    with counted(lambda x, factor: rules) as (rule, calls):
        register(names, op)(rule)
        op(distribute_tensor(numbers(8, 4), mesh_of(), [Shard(1)]), 3)
    (seen, factor), _ = calls[0]
    return [
        [int(n) for n in seen.shape],
        seen.ndim,
        [str(placement) for placement in seen.placements],
        seen.placements[0] == Shard(1),
        seen.placements[0].is_shard(1),
        [int(n) for n in seen.stride],
        str(seen.tensor_meta.dtype),
        list(seen.mesh.shape),
        seen.mesh.ndim,
        seen.num_shards,
        seen.is_replicated(),
        factor,
    ]


def test_a_rule_sees_what_a_dtensor_spec_tells(world: Ranks) -> None:
    same_values(world, arguments_of_a_rule)


def lists_in_a_rule(names: Names) -> list[Any]:
    """A list of tensors is a tuple of specs; inputs are listed one for each tensor."""
    op = define(
        distinct(names, "joined"),
        "(Tensor[] xs, int dim) -> Tensor",
        lambda xs, d: torch.cat(xs, d),
        lambda xs, d: torch.cat(xs, d),
    )

    def rule(xs: Any, dim: int) -> list[Any]:
        shapes.append([[int(n) for n in x.shape] for x in xs])
        free = [d for d in range(xs[0].ndim) if d != dim]
        return [([p], [*[p] * len(xs), None]) for p in (Replicate(), *map(Shard, free))]

    shapes: list[Any] = []
    register(names, op)(rule)
    parts = [distribute_tensor(numbers(8, n), mesh_of(), [Shard(0)]) for n in (2, 3)]
    result = op(parts, 1)
    whole = torch.cat([numbers(8, 2), numbers(8, 3)], 1)
    return [shapes[0], str(result.placements), torch.equal(result.full_tensor(), whole)]


def test_a_rule_of_an_operator_with_a_list_of_tensors(world: Ranks) -> None:
    assert same_values(world, lists_in_a_rule) == [[[[8, 2], [8, 3]], "(Shard(dim=0),)", True]] * 4


def parts_of(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [part.clone() for part in torch.split(x, sizes, 1)]


def list_out_of_a_rule(names: Names) -> list[Any]:
    """torch's own raises for an operator that returns a list."""
    op = define(distinct(names, "parts"), "(Tensor x, int[] sizes) -> Tensor[]", parts_of, parts_of)
    register(names, op)(lambda x, sizes: [([p], [p, None]) for p in (Replicate(), Shard(0))])
    results = op(distribute_tensor(numbers(8, 5), mesh_of(), [Shard(0)]), [2, 3])
    expected = torch.split(numbers(8, 5), [2, 3], 1)
    return [torch.equal(r.full_tensor(), e) for r, e in zip(results, expected, strict=True)]


def test_a_rule_of_an_operator_that_returns_a_list(world: Ranks) -> None:
    assert ours_of(world, list_out_of_a_rule) == [[True, True]] * 4


def two_results(names: Names) -> list[Any]:
    op = define(
        distinct(names, "extremes"),
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x.amin(1), x.amax(1)),
        lambda x: (x.amin(1), x.amax(1)),
    )
    register(names, op)(lambda x: [([p, p], [p]) for p in (Replicate(), Shard(0))])
    small, large = op(distribute_tensor(numbers(8, 5), mesh_of(), [Shard(0)]))
    return [str(small.placements), str(large.placements), large.full_tensor().tolist()]


def test_a_rule_of_an_operator_with_two_results(world: Ranks) -> None:
    assert same_values(world, two_results)[0][:2] == ["(Shard(dim=0),)", "(Shard(dim=0),)"]


def keyword_arguments(names: Names) -> list[Any]:
    schema = "(Tensor x, *, int times=1, Tensor? bias=None) -> Tensor"
    op = define(distinct(names, "plus"), schema, plus, plus)

    def rule(x: Any, **kwargs: Any) -> list[Any]:
        seen.append(sorted(kwargs))
        return [([p], [p]) for p in (Replicate(), Shard(0), Shard(1))]

    seen: list[Any] = []
    register(names, op)(rule)
    sharded = distribute_tensor(numbers(8, 4), mesh_of(), [Shard(1)])
    return [[op(sharded, times=n).full_tensor().sum().item() for n in (2, 3)], seen[0]]


def plus(x: torch.Tensor, times: int = 1, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x * times


def test_a_rule_takes_keyword_arguments(world: Ranks) -> None:
    total = numbers(8, 4).sum().item()
    assert same_values(world, keyword_arguments) == [[[2 * total, 3 * total], ["times"]]] * 4


def partial_results(names: Names) -> list[Any]:
    op = define(distinct(names, "total"), "(Tensor x) -> Tensor", lambda x: x.sum(), lambda x: x.sum())
    register(names, op)(lambda x: [([Replicate()], [Replicate()]), ([Partial()], [Shard(0)])])
    result = op(distribute_tensor(numbers(8, 4), mesh_of(), [Shard(0)]))
    return [str(result.placements), result.full_tensor().item()]


def test_a_rule_may_leave_a_sum_pending(world: Ranks) -> None:
    assert same_values(world, partial_results) == [["(Partial(sum),)", numbers(8, 4).sum().item()]] * 4


def two_axes(names: Names) -> list[Any]:
    """A rule is for one axis; on a mesh of two, both follow it."""
    op = define(distinct(names, "half"), "(Tensor x) -> Tensor", lambda x: x / 2, torch.empty_like)
    register(names, op)(lambda x: [([p], [p]) for p in (Replicate(), Shard(0), Shard(1))])
    result = op(distribute_tensor(numbers(8, 4), mesh_of(2, 2), [Shard(1), Shard(0)]))
    return [str(result.placements), torch.equal(result.full_tensor(), numbers(8, 4) / 2)]


def test_a_rule_holds_for_each_axis_of_a_mesh(world: Ranks) -> None:
    assert same_values(world, two_axes) == [["(Shard(dim=1), Shard(dim=0))", True]] * 4


# Arguments that are not tensors count in the cache


def flip(x: torch.Tensor, dims: Any) -> torch.Tensor:
    return torch.flip(x, list(dims))


def shift(x: torch.Tensor, rows: bool) -> torch.Tensor:
    return torch.roll(x, 1, 0 if rows else 1)


def along(x: torch.Tensor, where: str) -> torch.Tensor:
    return torch.cumsum(x, {"rows": 0, "columns": 1}[where])


def free_of(*taken: int) -> list[Any]:
    return [([p], [p, None]) for p in (Replicate(), *(Shard(d) for d in (0, 1) if d not in taken))]


ARGUMENTS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], list[Any]]] = {
    "int[]": ("(Tensor x, int[] dims) -> Tensor", flip, lambda x, dims: free_of(*dims), [[1], [0], [0, 1]]),
    "bool": ("(Tensor x, bool rows) -> Tensor", shift, lambda x, rows: free_of(0 if rows else 1), [False, True, False]),
    "str": (
        "(Tensor x, str where) -> Tensor",
        along,
        lambda x, where: free_of(0 if where == "rows" else 1),
        ["columns", "rows", "columns"],
    ),
}


def call_with(names: Names, kind: str, given: Any, whole: Callable[[Any], Any]) -> list[bool]:
    schema, function, rule, values = ARGUMENTS[kind]
    name = f"{type(given).__name__}_with_{kind.strip('[]')}"
    op = define(distinct(names, name), schema, function, lambda x, *_: torch.empty_like(x))
    register(names, op)(rule)
    return [torch.equal(whole(op(given, value)), function(numbers(8, 4), value)) for value in values]


def call_dtensor_with(names: Names, kind: str) -> list[bool]:
    given = distribute_tensor(numbers(8, 4), mesh_of(), [Shard(0)])
    return call_with(names, kind, given, lambda result: result.full_tensor())


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_that_are_not_tensors_count_for_dtensors(world: Ranks, kind: str) -> None:
    """torch's own cache forgets them: the second call gives wrong numbers."""
    assert ours_of(world, call_dtensor_with, kind) == [[True] * 3] * 4


def call_sharded_with(names: Names, kind: str) -> list[bool]:
    given = names.shard(numbers(8, 4), names.chunks(0))
    return call_with(names, kind, given, lambda result: result.full())


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_that_are_not_tensors_count_for_sharded_tensors(world: Ranks, kind: str) -> None:
    assert ours_of(world, call_sharded_with, kind) == [[True] * 3] * 4


# Sharded tensors of the namespace


def replace_for_sharded_tensors(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 4), names.chunks(0))
    with counted(lambda x: [([Replicate()], [Replicate()])]) as (rule, calls):
        register(names, aten.sigmoid.default)(rule)
        result = torch.sigmoid(sharded)
    (seen,), _ = calls[0]
    local = [list(t.shape) for t in result.local_tensors()]
    return [isinstance(result, shardwise.ShardedTensor), local, [int(n) for n in seen.shape], seen.ndim]


def test_a_rule_replaces_the_built_in_one_of_sharded_tensors(world: Ranks) -> None:
    assert ours_of(world, replace_for_sharded_tensors) == [[True, [[8, 4]], [8, 4], 2]] * 4


def softmax_of_sharded_tensors(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 4), names.chunks(0))
    with counted(softmax_rule) as (rule, calls):
        register(names, aten._softmax.default)(rule)
        kept, moved = torch.softmax(sharded, 1), torch.softmax(sharded, 0)
    right = [torch.allclose(r.full(), numbers(8, 4).softmax(d)) for r, d in ((kept, 1), (moved, 0))]
    shapes = [[list(t.shape) for t in result.local_tensors()] for result in (kept, moved)]
    return [*right, sorted({args[1] for args, _ in calls}), shapes[0], shapes[1] in ([[8, 4]], [[8, 1]])]


def test_a_softmax_rule_holds_for_sharded_tensors(world: Ranks) -> None:
    """Along the dim that is cut, the rule allows copies or another cut only."""
    assert ours_of(world, softmax_of_sharded_tensors) == [[True, True, [0, 1], [[2, 4]], True]] * 4


def placements_of_sharded_tensors(names: Names) -> list[Any]:
    op = define("seen_here", "(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    with counted(lambda x: [([p], [p]) for p in (Replicate(), Shard(0), Shard(1))]) as (rule, calls):
        register(names, op)(rule)
        op(names.shard(numbers(8, 4), names.chunks(1)))
    (seen,), _ = calls[0]
    return [seen.placements[0] == Shard(1), seen.placements[0].is_shard(1), str(seen.tensor_meta.dtype)]


def test_a_rule_sees_torchs_placements_of_sharded_tensors(world: Ranks) -> None:
    assert ours_of(world, placements_of_sharded_tensors) == [[True, True, "torch.float32"]] * 4
