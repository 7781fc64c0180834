"""Ranks outside of a tensor's process group, and state dicts that are loaded on a group."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

from tests.compat.fidelity import (
    OURS,
    TORCH,
    Names,
    assert_same_errors,
    assert_same_values,
    both,
    described,
    end_of,
    locals_of,
    numbers,
    ours_of,
    same_errors,
    same_values,
)
from tests.world import Ranks, world_fixture

world = world_fixture(4)
MEMBERS = (1, 2, 3)
RPC_SECONDS = 60.0


def members(names: Names) -> tuple[Any, Any]:
    """A group without rank 0, on which torch gives a stand-in for it, and a spec of its ranks."""
    return dist.new_group(MEMBERS), names.chunks(0, *MEMBERS)


def facts(sharded: Any) -> list[Any]:
    """What a tensor says of itself on any rank."""
    metadata = sharded.metadata()
    return [
        len(sharded.local_shards()),
        described(metadata),
        list(metadata.size),
        list(sharded.size()),
        str(sharded.dtype),
        sharded.requires_grad,
        sharded.dim(),
        len(sharded.sharding_spec().placements),
        metadata.tensor_properties.requires_grad,
    ]


def create(names: Names, function: str) -> list[Any]:
    group, spec = members(names)
    sizes = ((5, 2), 3.0) if function == "full" else (5, 2)
    return facts(getattr(names.sharded_tensor, function)(spec, *sizes, process_group=group))


@pytest.mark.parametrize("function", ["empty", "zeros", "ones", "full", "rand", "randn"])
def test_creation_works_on_a_rank_outside_of_the_group(world: Ranks, function: str) -> None:
    outside, *inside = same_values(world, create, function)
    assert outside[0] == 0 and [value[0] for value in inside] == [1, 1, 1]
    assert outside[1:] == inside[0][1:]


def create_directly(names: Names) -> list[Any]:
    group, spec = members(names)
    made = names.sharded_tensor.ShardedTensor(
        spec,
        4,
        3,
        dtype=torch.int64,
        layout=torch.strided,
        requires_grad=False,
        pin_memory=False,
        process_group=group,
    )
    return facts(made)


def test_the_constructor_works_on_a_rank_outside_of_the_group(world: Ranks) -> None:
    assert same_values(world, create_directly)[0][0] == 0


def create_from_metadata(names: Names) -> list[Any]:
    group, spec = members(names)
    whole = names.sharded_tensor.zeros(spec, 6, 2, process_group=group)
    made = names.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(
        whole.local_shards(), whole.metadata(), process_group=group
    )
    return facts(made)


def test_metadata_makes_a_tensor_on_a_rank_outside_of_the_group(world: Ranks) -> None:
    assert same_values(world, create_from_metadata)[0][0] == 0


def use_outside(names: Names) -> list[Any]:
    group, spec = members(names)
    sharded = names.sharded_tensor.ones(spec, 6, 2, process_group=group)
    torch.nn.init.constant_(sharded, 5.0)
    copied, cloned, detached = copy.deepcopy(sharded), sharded.clone(), sharded.detach()
    return [facts(made) for made in (sharded, copied, cloned, detached)] + [locals_of(sharded), locals_of(copied)]


def test_copies_and_local_functions_work_on_a_rank_outside(world: Ranks) -> None:
    assert same_values(world, use_outside)[0][-2:] == [[], []]


def place_outside(names: Names) -> None:
    """The spec names rank 0, which is not in the group: members refuse it."""
    group, _ = members(names)
    names.sharded_tensor.zeros(names.chunks(0, 0, 1), 4, process_group=group)


def test_a_placement_outside_of_the_group_is_refused_by_members(world: Ranks) -> None:
    theirs, ours = both(world, place_outside)
    assert_same_errors(theirs, ours, words=("Global rank 0 does not exist in input process group",))


class Holder(nn.Module):
    """A module with a sharded tensor as a plain attribute, in a submodule too."""

    def __init__(self, names: Names, made: Any) -> None:
        super().__init__()
        self.table = made
        self.below = nn.Module()
        self.below.table = made
        self._register_state_dict_hook(names.sharded_tensor.state_dict_hook)
        self.register_load_state_dict_pre_hook(names.sharded_tensor.pre_load_state_dict_hook)


def saved(state: dict[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def save_and_load_on_a_group(names: Names) -> list[Any]:
    group, spec = members(names)
    sharded = names.sharded_tensor.zeros(spec, 6, 2, process_group=group)
    for shard in sharded.local_shards():
        shard.tensor.fill_(dist.get_rank())
    state = Holder(names, sharded).state_dict()
    with names.api.load_with_process_group(group) as current:
        assert current is group and names.api._get_current_process_group() is group
        loaded = torch.load(saved(state), weights_only=False)
    other = Holder(names, None)
    other.load_state_dict(loaded, strict=False)
    found: Any = other.below.table
    return [sorted(name.lstrip(".") for name in loaded), facts(found), locals_of(found), found._process_group is group]


def test_state_dicts_are_saved_and_loaded_on_ranks_outside_of_the_group(world: Ranks) -> None:
    values = same_values(world, save_and_load_on_a_group)
    assert [value[2] for value in values] == [[]] + [[[[float(rank)] * 2] * 2] for rank in MEMBERS]
    assert all(value[3] for value in values)


def pickle_on_a_group(names: Names) -> list[Any]:
    group, spec = members(names)
    data = pickle.dumps(names.sharded_tensor.zeros(spec, 6, 2, process_group=group))
    with names.api.load_with_process_group(group):
        return facts(pickle.loads(data))


def test_pickles_are_loaded_on_ranks_outside_of_the_group(world: Ranks) -> None:
    same_values(world, pickle_on_a_group)


def state_of_the_group(names: Names) -> list[Any]:
    group, spec = members(names)
    shards, metadata, state, kept, rrefs = names.sharded_tensor.zeros(spec, 6, process_group=group).__getstate__()
    numbers_of = [state.local_rank, state.global_rank, state.local_world_size, state.global_world_size]
    return [len(shards), described(metadata), numbers_of, kept == spec, rrefs]


def test_the_saved_state_holds_ranks_and_sizes_of_group_and_world(world: Ranks) -> None:
    values = same_values(world, state_of_the_group)
    assert [value[2] for value in values] == [[-1, 0, -1, 4], [0, 1, 3, 4], [1, 2, 3, 4], [2, 3, 3, 4]]


def load_on(names: Names, saving: tuple[int, ...] | None, loading: tuple[int, ...] | None) -> None:
    """Save a tensor of one group and load it under another; None is the default group."""
    group = None if saving is None else dist.new_group(saving)
    spec = names.chunks(0, *(saving or range(4)))
    state = {"table": names.sharded_tensor.zeros(spec, 8, process_group=group)}
    buffer = saved(state)
    if loading is None:
        torch.load(buffer, weights_only=False)
        return
    other = dist.new_group(loading)
    with names.api.load_with_process_group(other):
        torch.load(buffer, weights_only=False)


def test_loading_under_a_group_with_another_number_says_so(world: Ranks) -> None:
    """Rank 1 is outside of the group of ranks 0, 2 and 3, in which rank 0 alone keeps its number."""
    theirs, ours = both(world, load_on, None, (0, 2, 3))
    assert_same_errors(theirs[1:], ours[1:], words=("Local rank at save time was", "but at load time was"))
    assert_same_errors(theirs[:1], ours[:1], words=("Local world size at save time was 4", "was 3"))


def test_loading_under_a_group_of_another_size_says_so(world: Ranks) -> None:
    theirs, ours = both(world, load_on, None, (0, 1))
    assert_same_errors(theirs[:2], ours[:2], words=("Local world size at save time was 4", "was 2"))
    assert_same_errors(theirs[2:], ours[2:], words=("Local rank at save time was", "but at load time was -1"))


def test_loading_a_groups_tensor_without_the_group_says_so(world: Ranks) -> None:
    same_errors(world, load_on, MEMBERS, None, words=("Local rank at save time was", "but at load time was"))


def load_twice(names: Names) -> None:
    with names.api.load_with_process_group(dist.group.WORLD), names.api.load_with_process_group(dist.group.WORLD):
        pass


def test_a_block_inside_of_a_block_is_refused(world: Ranks) -> None:
    same_errors(world, load_twice, words=("ProcessGroup already set by previous", "load_with_process_group"))


def groups_around_a_block(names: Names) -> list[bool]:
    group, _ = members(names)
    seen = [names.api._get_current_process_group() is dist.group.WORLD]
    with pytest.raises(KeyError), names.api.load_with_process_group(group):
        seen.append(names.api._get_current_process_group() is group)
        raise KeyError
    return [*seen, names.api._get_current_process_group() is dist.group.WORLD]


def test_a_block_ends_when_it_raises(world: Ranks) -> None:
    assert same_values(world, groups_around_a_block) == [[True, True, True]] * 4


def dump(names: Names) -> bytes:
    return saved({"table": names.sharded_tensor.zeros(names.chunks(0), 8)}).getvalue()


def load_here(names: Names, data: bytes) -> None:
    torch.load(io.BytesIO(data), weights_only=False)


def test_loading_without_a_process_group_says_what_to_initialise(world: Ranks) -> None:
    theirs, ours = both(world, dump)
    ends = [end_of(root, load_here, ended[2].value) for root, ended in ((TORCH, theirs), (OURS, ours))]
    assert_same_errors(ends[:1], ends[1:], words=("Need to initialize default process group", "init_process_group"))


def gather_in_the_group(names: Names) -> Any:
    """torch's own gather fails in a sub-group of other numbers; a group that starts at rank 0 works in both."""
    group = dist.new_group((0, 1, 2))
    if dist.get_rank() == 3:
        return None
    sharded = names.shard(numbers(6), names.chunks(0, 0, 1, 2), process_group=group)
    out = torch.zeros(6) if dist.get_rank() == 1 else None
    sharded.gather(1, out)
    return None if out is None else out.tolist()


def test_members_of_a_group_shard_and_gather_without_the_others(world: Ranks) -> None:
    assert same_values(world, gather_in_the_group)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


# Remote references: the ranks join one RPC world at the first test that needs it.


def join_rpc(meeting_point: str) -> str:
    """Start RPC; return why it cannot be."""
    if not rpc.is_available():
        return "this build of torch has no torch.distributed.rpc"
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rank = dist.get_rank()
    options: Any = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}", rpc_timeout=RPC_SECONDS)
    start: Any = rpc.init_rpc
    try:
        start(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    except RuntimeError as error:
        return f"torch.distributed.rpc does not start here: {error}"
    return ""


def leave_rpc() -> None:
    gc.collect()
    rpc.shutdown(timeout=RPC_SECONDS)


@pytest.fixture(scope="module")
def rpc_world(world: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    reasons = world.run(join_rpc, str(tmp_path_factory.mktemp("rpc") / "meet"))
    if any(reasons):
        pytest.skip(next(filter(None, reasons)))
    yield world
    world.run(leave_rpc)


def shards_by_worker(names: Names) -> list[Any]:
    spec = names.sharding_spec.ChunkShardingSpec(0, [f"worker{rank}/cpu" for rank in (3, 1, 0, 2)])
    return facts(names.sharded_tensor.zeros(spec, 8, 2, init_rrefs=True))


def test_placements_name_workers_of_rpc(rpc_world: Ranks) -> None:
    theirs, ours = both(rpc_world, shards_by_worker)
    assert_same_values(theirs, ours)


def remote_offsets(sharded: Any) -> dict[int, list[int]]:
    """The first offset of each remote shard, fetched from its rank."""
    fetched = {rank: [ref.to_here() for ref in refs] for rank, refs in sharded.remote_shards().items()}
    return {rank: [shard.metadata.shard_offsets[0] for shard in shards] for rank, shards in sorted(fetched.items())}


def assert_created_outside(world: Ranks) -> None:
    """Without this, members would wait for the rank outside in an exchange of references."""
    outside = ours_of(world, create, "zeros")[0]
    assert outside[0] == 0, outside


def create_with_references(names: Names) -> list[Any]:
    group, spec = members(names)
    sharded = names.sharded_tensor.empty(spec, 6, 2, process_group=group, init_rrefs=True)
    return [facts(sharded), remote_offsets(sharded)]


def test_a_rank_outside_of_the_group_has_remote_shards(rpc_world: Ranks) -> None:
    assert_created_outside(rpc_world)
    outside, first, *_ = same_values(rpc_world, create_with_references)
    assert outside[0][0] == 0 and outside[1] == {1: [0], 2: [2], 3: [4]}
    assert first[1] == {2: [2], 3: [4]}


def load_with_references(names: Names) -> list[Any]:
    group, spec = members(names)
    sharded = names.sharded_tensor.zeros(spec, 6, 2, process_group=group, init_rrefs=True)
    buffer = saved({"table": sharded})
    with names.api.load_with_process_group(group):
        loaded = torch.load(buffer, weights_only=False)["table"]
    return [facts(loaded), remote_offsets(loaded)]


def test_a_loaded_tensor_has_remote_shards_on_a_rank_outside(rpc_world: Ranks) -> None:
    assert_created_outside(rpc_world)
    same_values(rpc_world, load_with_references)
