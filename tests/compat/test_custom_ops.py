"""Users' own implementations: who runs, with what, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._shard.sharding_spec.api as torch_specs
from torch.distributed._shard.metadata import ShardMetadata

from shardwise import shard
from shardwise.comm import Comm, LocalComm, run_local
from shardwise.compat.custom_ops import (
    check_op_arguments,
    custom_ops_scope,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
    dispatch_custom_op,
    find_custom_op,
    find_default_op,
    find_spec_op,
    has_custom_op,
    sharded_op_impl,
)
from shardwise.geometry import ChunkSpec, EnumerableSpec, GridSpec, ShardingSpec
from shardwise.tensor.sharded_tensor import ShardedTensor


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with custom_ops_scope():
        yield


class Rows(ChunkSpec):
    """Laid out as its base; only its class differs."""


def say(text: str) -> Any:
    def impl(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return text

    return impl


def ones(spec: ShardingSpec | None = None) -> ShardedTensor:
    return ShardedTensor(spec or ChunkSpec(0, ranks=1), 2, 3)


def test_a_custom_op_gets_torchs_four_arguments() -> None:
    seen: list[Any] = []

    @custom_sharded_op_impl(torch.nn.functional.linear)
    def linear(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        seen.append((types, args, kwargs, process_group))
        return "linear"

    x, weight = torch.ones(4, 3), ones()
    assert torch.nn.functional.linear(x, weight, bias=None) == "linear"
    types, args, kwargs, group = seen[0]
    assert ShardedTensor in types
    assert args[0] is x and any(a is weight for a in [*args, *kwargs.values()])
    assert group is weight.comm


def test_an_impl_uses_the_group_it_is_handed() -> None:
    @custom_sharded_op_impl(torch.sum)
    def total(types: Any, args: Any, kwargs: Any, process_group: Comm) -> torch.Tensor:
        part = args[0].local_tensor().sum()
        process_group.all_reduce(part, label="sum").wait()
        return torch.as_tensor(part)

    def body(comm: Comm) -> float:
        x = ShardedTensor(ChunkSpec(0, ranks=2), 2, 3)
        x.local_tensor().detach().fill_(comm.rank + 1.0)
        return float(torch.sum(x))

    assert run_local(body, 2) == [9.0, 9.0]


def test_the_general_op_wins_over_that_of_the_spec() -> None:
    custom_sharding_spec_op(ChunkSpec, torch.asin)(say("spec"))
    assert torch.asin(ones()) == "spec"
    custom_sharded_op_impl(torch.asin)(say("general"))
    assert torch.asin(ones()) == "general"


def test_a_subclass_of_a_spec_inherits_its_ops_and_may_replace_them() -> None:
    custom_sharding_spec_op(ChunkSpec, torch.asin)(say("chunk"))
    assert torch.asin(ones(Rows(0, ranks=1))) == "chunk"
    custom_sharding_spec_op(Rows, torch.asin)(say("rows"))
    assert torch.asin(ones(Rows(0, ranks=1))) == "rows"
    assert torch.asin(ones()) == "chunk"


def test_an_op_for_all_specs_is_registered_on_their_base() -> None:
    custom_sharding_spec_op(ShardingSpec, torch.asin)(say("any"))
    assert torch.asin(ones(GridSpec((1, 1), [[0]]))) == "any"


def test_two_classes_of_one_name_do_not_collide() -> None:
    ours = type("Twin", (ChunkSpec,), {})
    theirs = type("Twin", (ChunkSpec,), {})
    custom_sharding_spec_op(ours, torch.asin)(say("ours"))
    custom_sharding_spec_op(theirs, torch.asin)(say("theirs"))
    assert torch.asin(ones(ours(0, 1))) == "ours"
    assert torch.asin(ones(theirs(0, 1))) == "theirs"


def test_torchs_own_table_is_keyed_by_the_name_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two tests above ask for, asked of torch: a subclass has no ops, and twins share theirs."""
    monkeypatch.setattr(torch_specs, "_CUSTOM_SHARDING_SPEC_OPS", {})
    base: type[Any] = torch_specs.EnumerableShardingSpec
    heir, twin, other = type("Heir", (base,), {}), type("Twin", (base,), {}), type("Twin", (base,), {})
    register: Any = torch_specs.custom_sharding_spec_op
    register(base, torch.asin)(say("base"))
    register(twin, torch.asin)(say("twin"))
    has: Any = torch_specs._has_custom_op
    shards = [ShardMetadata([0], [2], "rank:0/cpu")]
    assert [has(cls(shards), torch.asin) for cls in (base, heir, twin, other)] == [True, False, True, True]


def test_registering_again_replaces() -> None:
    custom_sharded_op_impl(torch.asin)(say("first"))
    custom_sharded_op_impl(torch.asin)(say("second"))
    assert torch.asin(ones()) == "second"


def test_a_scope_restores_what_was_there_before() -> None:
    custom_sharded_op_impl(torch.asin)(say("outer"))
    custom_sharding_spec_op(ChunkSpec, torch.acos)(say("outer"))
    with custom_ops_scope():
        custom_sharded_op_impl(torch.asin)(say("inner"))
        custom_sharding_spec_op(ChunkSpec, torch.acos)(say("inner"))
        custom_sharding_spec_op(Rows, torch.atan)(say("inner"))
        sharded_op_impl(torch.atan)(say("inner"))
        assert [f(ones()) for f in (torch.asin, torch.acos)] == ["inner", "inner"]
    assert [f(ones()) for f in (torch.asin, torch.acos)] == ["outer", "outer"]
    assert not has_custom_op(Rows(0, 1), torch.atan) and find_default_op(torch.atan) is None


def test_lookups_and_dispatch_by_spec() -> None:
    impl = custom_sharding_spec_op(ChunkSpec, torch.asin)(say("chunk"))
    spec, other = Rows(0, 1), EnumerableSpec([])
    assert has_custom_op(spec, torch.asin) and find_spec_op(spec, torch.asin) is impl
    assert not has_custom_op(other, torch.asin) and find_custom_op(torch.asin) is None
    x = ones()
    assert dispatch_custom_op(spec, torch.asin, (ShardedTensor,), (x,), None, x.comm) == "chunk"
    with pytest.raises(RuntimeError, match="Custom op: asin not registered for EnumerableSpec or its bases"):
        dispatch_custom_op(other, torch.asin, (ShardedTensor,), (x,), None, x.comm)


@pytest.mark.parametrize("impl", [lambda a, b, c: None, lambda a, b, c, d, e: None, lambda: None])
@pytest.mark.parametrize("register", [custom_sharded_op_impl, sharded_op_impl])
def test_an_impl_of_another_signature_is_refused(register: Any, impl: Any) -> None:
    with pytest.raises(TypeError, match=r"expects signature: \(types, args, kwargs, process_group\), but received"):
        register(torch.asin)(impl)
    assert find_custom_op(torch.asin) is None and find_default_op(torch.asin) is None


def test_a_spec_op_needs_a_class() -> None:
    with pytest.raises(TypeError, match="takes a class of sharding specs and a torch function"):
        custom_sharding_spec_op(ChunkSpec(0, 1), torch.asin)  # type: ignore[arg-type]  # the mistake under test


def test_arguments_are_checked_before_an_impl_runs() -> None:
    impl = custom_sharded_op_impl(torch.asin)(say("ran"))
    with pytest.raises(ValueError, match="No input for 'asin'!"):
        impl((), (), None, None)
    with pytest.raises(TypeError, match=r"with args: \(Tensor\) and kwargs: \(\), called without any distributed"):
        impl((), (torch.ones(1),), {}, None)
    assert impl((), ([{"x": ones()}],), None, None) == "ran"


def test_tensors_of_two_groups_are_refused() -> None:
    def body(comm: Comm) -> str:
        alone = comm.subset([comm.rank])
        spec = ChunkSpec(0, ranks=[comm.rank])
        one, other = ShardedTensor(spec, 2), ShardedTensor(spec, 2, process_group=alone)
        again = ShardedTensor(spec, 2, process_group=comm.subset([comm.rank]))
        check_op_arguments(torch.add, (other, again))
        with pytest.raises(RuntimeError, match="should use the same ProcessGroup if used together in an op; 'add'"):
            check_op_arguments(torch.add, (one, other))
        return "checked"

    assert run_local(body, 2) == ["checked"] * 2


def test_comms_that_are_local_count_as_one_group_by_their_ranks() -> None:
    x = ones()
    y = ShardedTensor(ChunkSpec(0, ranks=1), 2, 3, process_group=LocalComm.alone())
    check_op_arguments(torch.add, (x, y))


def test_a_custom_op_that_computes_by_operators_answers_every_call() -> None:
    """What it does below must not be taken for what torch's own function does."""

    @custom_sharded_op_impl(torch.add)
    def multiply(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return torch.mul(*args)

    def body(comm: Comm) -> None:
        x = shard(torch.full((4, 2), 3.0), ChunkSpec(0, ranks=2), None)
        for _ in range(3):
            assert torch.add(x, x).full().eq(9).all()

    run_local(body, 2, timeout=60)
