"""Each known defect of torch.distributed._shard: the same program on torch's names fails, on ours it works."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.world import Ranks, world_fixture

world = world_fixture(3)
TORCH, OURS = "torch.distributed._shard", "shardwise.compat._shard"


@dataclass(frozen=True)
class Names:
    """One of the two packages, its modules found by attribute, and a group that gives up soon."""

    root: str
    group: Any

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"{self.root}.{name}")

    def spec(self, dim: int, *ranks: int) -> Any:
        return self.sharding_spec.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])

    def shard(self, tensor: torch.Tensor, spec: Any, group: Any = None) -> Any:
        return self.api._shard_tensor(tensor, spec, process_group=group or self.group)


def attempt(root: str, program: Callable[[Names], Any]) -> tuple[bool, Any]:
    """Whether a program ends without an error, and with what; torch's groups give up after three seconds."""
    group = dist.new_group(timeout=timedelta(seconds=3 if root == TORCH else 60))
    try:
        return True, program(Names(root, group))
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"[:200]
    finally:
        dist.barrier()  # on the world's group: no rank goes on while another still waits in the failed one


def both(world: Ranks, program: Callable[[Names], Any], **limits: float) -> tuple[list[Any], list[Any]]:
    """What each rank got from torch's names and from ours; ours have to work everywhere."""
    theirs = world.run(attempt, TORCH, program, **limits)
    ours = world.run(attempt, OURS, program, **limits)
    assert all(fine for fine, _ in ours), ours
    return theirs, [value for _, value in ours]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype)


# 3, 4: gather


def gather_large_numbers(names: Names) -> list[int]:
    values = torch.tensor([2**24 + 1, 2**53 + 1, -(2**62) - 1, 5])
    sharded = names.shard(values, names.spec(0, 0, 1, 2))
    out = torch.zeros(4, dtype=torch.int64) if dist.get_rank() == 0 else None
    sharded.gather(0, out)
    return [] if out is None else (out - values).tolist()


def test_gather_keeps_every_digit(world: Ranks) -> None:
    theirs, ours = both(world, gather_large_numbers)
    assert theirs[0][1] != [0, 0, 0, 0]
    assert ours == [[0, 0, 0, 0], [], []]


def gather_in_a_subgroup(names: Names) -> list[float] | None:
    """Ranks 1 and 2 form a group and gather on rank 2; its number in the group is 1."""
    limit = timedelta(seconds=3 if names.root == TORCH else 60)
    pair = dist.new_group([1, 2], timeout=limit)
    if dist.get_rank() == 0:
        return None
    shard = names.sharded_tensor.Shard.from_tensor_and_offsets(
        numbers(2) + dist.get_rank(), [2 * dist.get_rank() - 2], dist.get_rank()
    )
    sharded = names.sharded_tensor.init_from_local_shards([shard], 4, process_group=pair)
    out = torch.zeros(4) if dist.get_rank() == 2 else None
    sharded.gather(2, out)
    return None if out is None else out.tolist()


def test_gather_works_in_a_subgroup(world: Ranks) -> None:
    theirs, ours = both(world, gather_in_a_subgroup)
    assert not theirs[1][0] and not theirs[2][0]
    assert ours == [None, None, [1.0, 2.0, 2.0, 3.0]]


# 5, 6: reshard


def reshard_uneven_to_another_dim(names: Names) -> list[Any]:
    sharded = names.shard(numbers(5, 4), names.spec(0, 0, 1, 2))
    return list(sharded.reshard(names.spec(1, 0, 1, 2)).local_tensor().tolist())


def test_reshard_of_uneven_chunks_to_another_dim(world: Ranks) -> None:
    theirs, ours = both(world, reshard_uneven_to_another_dim)
    assert not any(fine for fine, _ in theirs)
    assert ours == [part.tolist() for part in torch.tensor_split(numbers(5, 4), (2, 4), dim=1)]


def reshard_to_an_enumeration(names: Names) -> list[Any]:
    sharded = names.shard(numbers(6), names.spec(0, 0, 1, 2))
    pieces = [([0], [1], 2), ([1], [4], 0), ([5], [1], 2)]
    shards = [names.metadata.ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in pieces]
    moved = sharded.reshard(names.sharding_spec.EnumerableShardingSpec(shards))
    assert moved is sharded
    return [shard.tensor.tolist() for shard in moved.local_shards()]


def test_reshard_to_any_spec_in_place(world: Ranks) -> None:
    theirs, ours = both(world, reshard_to_an_enumeration)
    assert all("Only ChunkShardingSpec supported for reshard" in text for _, text in theirs)
    assert ours == [[[1.0, 2.0, 3.0, 4.0]], [], [[0.0], [5.0]]]


# 7, 8: which ranks hold what


def shard_on_two_of_three_ranks(names: Names) -> list[Any]:
    sharded = names.shard(numbers(4), names.spec(0, 2, 0))
    return [shard.tensor.tolist() for shard in sharded.local_shards()]


def test_fewer_placements_than_ranks(world: Ranks) -> None:
    theirs, ours = both(world, shard_on_two_of_three_ranks)
    assert not any(fine for fine, _ in theirs)
    assert ours == [[[2.0, 3.0]], [], [[0.0, 1.0]]]


def shard_twice_on_one_rank(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8), names.spec(0, 0, 1, 0, 2))
    return [shard.tensor.tolist() for shard in sharded.local_shards()]


def test_a_rank_that_is_listed_twice(world: Ranks) -> None:
    theirs, ours = both(world, shard_twice_on_one_rank)
    assert not all(fine for fine, _ in theirs)
    assert ours == [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0]], [[6.0, 7.0]]]


def shard_by_enumeration(names: Names) -> list[Any]:
    pieces = [([0, 0], [1, 3], 1), ([1, 0], [2, 1], 2), ([1, 1], [2, 2], 0)]
    shards = [names.metadata.ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in pieces]
    sharded = names.shard(numbers(3, 3), names.sharding_spec.EnumerableShardingSpec(shards))
    return [shard.tensor.tolist() for shard in sharded.local_shards()]


def test_a_tensor_is_sharded_by_enumeration(world: Ranks) -> None:
    theirs, ours = both(world, shard_by_enumeration)
    assert all("EnumerableShardingSpec.shard not implemented" in text for _, text in theirs)
    assert ours == [[[[4.0, 5.0], [7.0, 8.0]]], [[[0.0, 1.0, 2.0]]], [[[3.0], [6.0]]]]


# 9, 12: modules and optimizers


def swap_a_module(names: Names) -> list[str]:
    class Doubled(names.sharder.Sharder):  # type: ignore[name-defined,misc]  # one class of each package
        def shard(self, module: nn.Module) -> nn.Module:
            return nn.Sequential(module, module)

    model = nn.Sequential(nn.Linear(2, 2))
    names.api.shard_module(model, names.sharding_plan.ShardingPlan({"0": Doubled()}), process_group=names.group)
    return [type(child).__name__ for child in model.children()]


def test_a_sharder_swaps_its_module(world: Ranks) -> None:
    theirs, ours = both(world, swap_a_module)
    assert all(children == ["Linear", "Sequential"] for _, children in theirs)  # under the name mod_name
    assert ours == [["Sequential"]] * 3


def save_an_optimizer(names: Names) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 3, bias=False)
    names.api.shard_parameter(model, "weight", names.spec(0, 0, 1, 2), process_group=names.group)
    named = dict(names.sharded_optim.named_params_with_sharded_tensor(model))
    optimizer = names.sharded_optim.ShardedOptimizer(named, torch.optim.SGD, lr=0.5, momentum=0.5)
    weight: Any = model.weight
    for shard in weight.local_shards():
        shard.tensor.grad = torch.ones_like(shard.tensor)
    optimizer.step()
    state = optimizer.state_dict()
    again = names.sharded_optim.ShardedOptimizer(named, torch.optim.SGD, lr=0.1, momentum=0.1)
    again.load_state_dict(state)
    return [
        list(state["state"]),
        again.param_groups[0]["lr"],
        state["state"]["weight"]["momentum_buffer"].full().tolist(),
    ]


def test_optimizer_state_is_saved_by_name_and_loaded(world: Ranks) -> None:
    theirs, ours = both(world, save_an_optimizer)
    assert all("not implemented" in text for _, text in theirs)
    assert ours == [[["weight"], 0.5, [[1.0, 1.0]] * 3]] * 3


# 10, 11: computing, comparing, copying


def compute(names: Names) -> list[Any]:
    rows = names.shard(numbers(4, 2), names.spec(0, 0, 1, 2))
    return list((torch.relu(rows * 2 + rows) - 1).local_tensor().tolist())


def test_arithmetic(world: Ranks) -> None:
    theirs, ours = both(world, compute)
    assert all("torch function 'mul'" in text for _, text in theirs)
    whole = numbers(4, 2) * 3 - 1
    assert ours == [part.tolist() for part in torch.tensor_split(whole, (2, 4))]


def compare(names: Names) -> list[bool]:
    one, same, other = (names.shard(numbers(4) + i, names.spec(0, 0, 1, 2)) for i in (0, 0, 1))
    return [bool(torch.equal(one, same)), bool(torch.allclose(one, same)), bool(torch.equal(one, other))]


def test_tensors_are_compared(world: Ranks) -> None:
    theirs, ours = both(world, compare)
    assert not any(fine for fine, _ in theirs)
    assert ours == [[True, True, False]] * 3


def copy_values(names: Names) -> list[float]:
    one, other = (names.shard(numbers(4) + i, names.spec(0, 0, 1, 2)) for i in (0, 1))
    one.copy_(other)
    return list(one.local_tensor().tolist())


def test_values_are_copied(world: Ranks) -> None:
    theirs, ours = both(world, copy_values)
    assert ours == [value for _, value in theirs] == [[1.0, 2.0], [3.0, 4.0], []]


# 13: operators of specs


def inherit_an_operator(names: Names) -> str:
    class Rows(names.sharding_spec.ChunkShardingSpec):  # type: ignore[name-defined,misc]  # one of each package
        __hash__ = names.sharding_spec.ChunkShardingSpec.__hash__

    def asin(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "the spec's own"

    register = names.sharding_spec.api.custom_sharding_spec_op
    register(names.sharding_spec.ChunkShardingSpec, torch.asin)(asin)
    return str(torch.asin(names.shard(numbers(4), Rows(0, ["rank:0/cpu", "rank:1/cpu", "rank:2/cpu"]))))


def test_a_subclass_of_a_spec_inherits_its_operators(world: Ranks) -> None:
    theirs, ours = both(world, inherit_an_operator)
    assert not any(fine for fine, _ in theirs)
    assert ours == ["the spec's own"] * 3


# 14: empty shards


def offsets_of_empty_shards(names: Names) -> list[int]:
    told = names.shard(numbers(2), names.spec(0, 0, 1, 2)).metadata().shards_metadata
    return [shard.shard_offsets[0] for shard in told]


def test_empty_shards_lie_inside_the_tensor(world: Ranks) -> None:
    theirs, ours = both(world, offsets_of_empty_shards)
    assert ours == [[0, 1, 2]] * 3
    assert [value for _, value in theirs] == [[0, 1, 2]] * 3


def more_ranks_than_rows(names: Names) -> list[int]:
    told = names.sharded_tensor.zeros(names.spec(0, 0, 1, 2, 0, 1), 3, process_group=names.group).metadata()
    assert pickle.loads(pickle.dumps(told)) == told
    return [shard.shard_offsets[0] for shard in told.shards_metadata]


def test_empty_shards_of_a_short_dim_have_offsets_of_their_own(world: Ranks) -> None:
    theirs, ours = both(world, more_ranks_than_rows)
    assert ours == [[0, 1, 2, 3, 4]] * 3
    assert [value for _, value in theirs] == [[0, 1, 2, 3, 4]] * 3


def test_a_program_that_fails_on_ours_is_reported(world: Ranks) -> None:
    with pytest.raises(AssertionError, match="Invalid sharding dim: 3"):
        both(world, shard_a_missing_dim)


def shard_a_missing_dim(names: Names) -> None:
    names.shard(numbers(2), names.spec(3, 0, 1, 2))


# 5 again, last: torch's takes the processes down


def reshard_round_in_a_circle(names: Names) -> list[Any]:
    sharded = names.shard(numbers(5, 2), names.spec(0, 0, 1, 2))
    return list(sharded.reshard(names.spec(0, 1, 2, 0)).local_tensor().tolist())


def test_reshard_in_a_circle_of_three_ranks(world: Ranks) -> None:
    ours = world.run(attempt, OURS, reshard_round_in_a_circle)
    first, second, third = (part.tolist() for part in torch.tensor_split(numbers(5, 2), (2, 4)))
    assert ours == [(True, third), (True, first), (True, second)]
    theirs = world.outcomes(attempt, TORCH, reshard_round_in_a_circle)
    assert any(outcome.error is not None or not outcome.value[0] for outcome in theirs)
