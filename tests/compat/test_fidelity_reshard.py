"""Order of metadata after reshard, offsets of empty chunks, and gradients through reshard."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from shardwise.compat import install
from tests.compat.fidelity import Names, described, locals_of, numbers, ours_of, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)]


def facts(sharded: Any) -> list[Any]:
    return [described(sharded.metadata()), [described_shard(s) for s in sharded.local_shards()], locals_of(sharded)]


def described_shard(shard: Any) -> tuple[list[int], list[int], str]:
    metadata = shard.metadata
    return list(metadata.shard_offsets), list(metadata.shard_sizes), str(metadata.placement)


# The order of metadata


def reshard(names: Names, before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> list[Any]:
    sharded = names.shard(numbers(8, 12), names.chunks(0, *before))
    spec = names.chunks(dim, *after)
    moved = sharded.reshard(spec)
    return [*facts(sharded), moved is sharded, sharded.sharding_spec() is spec, sharded._sharding_spec is spec]


@pytest.mark.parametrize(
    ("before", "dim", "after"),
    [
        (ORDERS[0], 0, ORDERS[1]),
        (ORDERS[0], 1, ORDERS[0]),
        (ORDERS[0], 1, ORDERS[2]),
        (ORDERS[1], 0, ORDERS[2]),
        (ORDERS[2], 0, ORDERS[0]),
        (ORDERS[2], 1, ORDERS[1]),
    ],
)
def test_reshard_leaves_metadata_in_the_order_of_ranks(
    world: Ranks, before: tuple[int, ...], dim: int, after: tuple[int, ...]
) -> None:
    for value in same_values(world, reshard, before, dim, after):
        assert [place for _, _, place in value[0]] == [f"rank:{rank}/cpu" for rank in range(4)]


def reshard_nowhere(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0, 2, 0, 1, 3))
    local, metadata = sharded.local_tensor(), sharded.metadata()
    sharded.reshard(names.chunks(0, 2, 0, 1, 3))
    return [sharded.local_tensor() is local, sharded.metadata() is metadata, *facts(sharded)]


def test_reshard_to_an_equal_spec_changes_nothing(world: Ranks) -> None:
    same_values(world, reshard_nowhere)


def compare_with_a_new_one(names: Names, dim: int, after: tuple[int, ...]) -> list[bool]:
    """Against a tensor sharded so from the start, its metadata in the order of ranks."""
    sharded, fresh = (
        names.shard(numbers(8, 12), names.chunks(0)),
        names.shard(numbers(8, 12), names.chunks(dim, *after)),
    )
    sharded.reshard(names.chunks(dim, *after))
    plain = sharded.metadata() == fresh.metadata()
    fresh._metadata.shards_metadata.sort(key=lambda shard: shard.placement.rank())
    return [
        plain,
        sharded._metadata == fresh._metadata,
        bool(torch.equal(sharded.local_tensor(), fresh.local_tensor())),
    ]


@pytest.mark.parametrize("after", ORDERS)
def test_resharded_metadata_equals_that_of_a_tensor_sharded_so_from_the_start(
    world: Ranks, after: tuple[int, ...]
) -> None:
    in_order = after == (0, 1, 2, 3)
    assert same_values(world, compare_with_a_new_one, 1, after) == [[in_order, True, True]] * 4


def reshard_there_and_back(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 12), names.chunks(0))
    before = copy.deepcopy(sharded.metadata())
    sharded.reshard(names.chunks(1, 3, 1, 2, 0)).reshard(names.chunks(0))
    return [sharded.metadata() == before, locals_of(sharded)]


def test_reshard_there_and_back_gives_equal_metadata(world: Ranks) -> None:
    assert all(value[0] for value in same_values(world, reshard_there_and_back))


def keep_metadata(names: Names) -> list[bool]:
    """The metadata object stays; its list of shards is replaced."""
    sharded = names.shard(numbers(8, 12), names.chunks(0))
    metadata = sharded.metadata()
    sharded.reshard(names.chunks(1))
    return [sharded.metadata() is metadata, metadata.shards_metadata[1].shard_offsets == [0, 3]]


def test_metadata_read_before_reshard_follows_it(world: Ranks) -> None:
    same_values(world, keep_metadata)


def functions_of_reshard(names: Names) -> list[Any]:
    module = names.module("sharded_tensor.reshard")
    before, after = names.chunks(0, 1, 0, 3, 2), names.chunks(1, 3, 2, 0, 1)
    sharded = names.shard(numbers(8, 12), before)
    built, ranks = module.build_reshard_metadata(torch.Size([8, 12]), after, 4)
    local = sharded.local_tensor()
    shards, metadata = module.reshard_local_shard(local, torch.Size([8, 12]), before, after, dist.group.WORLD)
    swapped, order = module.reshuffle_local_shard(
        local, torch.Size([8, 12]), before, names.chunks(0, 0, 1, 2, 3), dist.group.WORLD
    )
    listed = [(list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in [*built, *metadata, *order]]
    return [listed, ranks, [s.tensor.tolist() for s in [*shards, *swapped]]]


def test_functions_of_the_module_reshard(world: Ranks) -> None:
    same_values(world, functions_of_reshard)


def reshard_on_the_tape(names: Names, dim: int, after: tuple[int, ...]) -> list[Any]:
    """The gradient of a resharded tensor reaches the local tensors that it was made from."""
    sharded = names.shard(numbers(4, 4), names.chunks(0))
    sharded.requires_grad_()
    leaf = sharded.local_tensor()
    sharded.reshard(names.chunks(dim, *after))
    moved = sharded.local_tensor()
    weights = torch.arange(float(moved.numel())).reshape(moved.shape) + 10 * dist.get_rank()
    (moved * weights).sum().backward()
    return [moved.requires_grad, moved.is_leaf, None if leaf.grad is None else leaf.grad.tolist()]


@pytest.mark.parametrize(("dim", "after"), [(1, (0, 1, 2, 3)), (1, (2, 0, 3, 1)), (0, (1, 0, 3, 2))])
def test_gradients_pass_through_reshard(world: Ranks, dim: int, after: tuple[int, ...]) -> None:
    for value in same_values(world, reshard_on_the_tape, dim, after):
        assert value[:2] == [True, False] and value[2] is not None


# Empty chunks


def offsets(metadata: Any, dim: int) -> list[int]:
    return [shard.shard_offsets[dim] for shard in metadata.shards_metadata]


def counted(names: Names, spec: Any, *size: int) -> Any:
    """A tensor whose values are numbered; torch's `_shard_tensor` fails where an empty chunk starts past the end."""
    made = names.sharded_tensor.zeros(spec, *size)
    for shard in made.local_shards():
        (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(numbers(*size)[top : top + height, left : left + width])
    return made


def chunk(names: Names, length: int, dim: int) -> list[Any]:
    """The offsets along a dim of 4 chunks by the spec, those of a tensor, and this rank's own."""
    size, spec = [3, 3], names.chunks(dim)
    size[dim] = length
    built = spec.build_metadata(torch.Size(size), names.sharded_tensor.TensorProperties())
    made = counted(names, spec, *size)
    own = made.local_shards()[0].metadata.shard_offsets
    return [offsets(built, dim), offsets(made.metadata(), dim), own, locals_of(made)]


@pytest.mark.parametrize(("length", "dim"), [(2, 0), (5, 0), (1, 0), (2, 1), (2, -1), (0, 0)])
def test_each_empty_chunk_has_an_offset_of_its_own(world: Ranks, length: int, dim: int) -> None:
    same_values(world, chunk, length, dim)


def shard_rows(names: Names, length: int) -> list[Any]:
    made = names.shard(numbers(length, 3), names.chunks(0))
    return [offsets(made.metadata(), 0), made.local_shards()[0].metadata.shard_offsets, locals_of(made)]


def test_a_sharded_tensor_of_three_rows_has_offsets_of_its_own(world: Ranks) -> None:
    assert same_values(world, shard_rows, 3)[0][0] == [0, 1, 2, 3]


@pytest.mark.parametrize(("length", "starts"), [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (5, [0, 2, 4, 6])])
def test_tensors_of_few_rows_are_sharded_with_offsets_past_the_end(
    world: Ranks, length: int, starts: list[int]
) -> None:
    """torch's source rank raises here, while the others wait for it."""
    for rank, value in enumerate(ours_of(world, shard_rows, length)):
        assert value[:2] == [starts, [starts[rank], 0]]


def copies_of_two_rows(names: Names) -> list[list[int]]:
    """torch's own copies refuse offsets past the end."""
    made = counted(names, names.chunks(0), 2, 3)
    copies = made, copy.deepcopy(made), made.clone(), made.detach(), torch.zeros_like(made), made.to(torch.float64)
    return [offsets(copied.metadata(), 0) for copied in copies]


def test_copies_of_two_rows_on_four_ranks_start_at_0_1_2_3(world: Ranks) -> None:
    assert ours_of(world, copies_of_two_rows) == [[[0, 1, 2, 3]] * 6] * 4


def reshard_to_two_rows(names: Names) -> list[Any]:
    """torch gives both empty shards the offset 2 here, which torch.distributed.checkpoint cannot tell apart."""
    sharded = names.shard(numbers(2, 4), names.chunks(1))
    sharded.reshard(names.chunks(0))
    return [
        offsets(sharded.metadata(), 0),
        sharded.metadata() == names.shard(numbers(2, 4), names.chunks(0)).metadata(),
    ]


def test_empty_chunks_after_reshard_are_those_of_a_new_tensor(world: Ranks) -> None:
    assert ours_of(world, reshard_to_two_rows) == [[[0, 1, 2, 3], True]] * 4


def infer(names: Names, length: int) -> list[Any]:
    metadata = counted(names, names.chunks(1, 3, 2, 1, 0), 3, length).metadata()
    spec = names.sharding_spec._infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
    return [type(spec).__name__, getattr(spec, "dim", None), [str(place) for place in getattr(spec, "placements", [])]]


@pytest.mark.parametrize("length", [2, 5, 8])
def test_chunks_with_empty_ones_are_inferred_as_chunks(world: Ranks, length: int) -> None:
    assert same_values(world, infer, length)[0][:2] == ["ChunkShardingSpec", 1]


def join_empty_shards(names: Names, holders: int) -> list[Any]:
    """Shards of 2 rows, of which ranks beyond the second hold an empty one, each at its own offset."""
    rank, size = dist.get_rank(), (1 if dist.get_rank() < 2 else 0, 3)
    own = names.sharded_tensor.Shard.from_tensor_and_offsets(torch.full(size, float(rank)), [rank, 0], rank)
    return facts(names.sharded_tensor.init_from_local_shards([own] if rank < holders else [], 2, 3))


def test_empty_local_shards_keep_their_offsets(world: Ranks) -> None:
    assert [start for start, _, _ in same_values(world, join_empty_shards, 3)[0][0]] == [[0, 0], [1, 0], [2, 0]]


def test_empty_local_shards_past_the_end_keep_their_offsets(world: Ranks) -> None:
    """torch refuses the one of rank 3."""
    for value in ours_of(world, join_empty_shards, 4):
        assert [start for start, _, _ in value[0]] == [[0, 0], [1, 0], [2, 0], [3, 0]]


def save_and_load(names: Names, folder: str, length: int) -> list[Any]:
    made = counted(names, names.chunks(0), length, 3)
    with install() if names.root.startswith("shardwise") else torch.no_grad():
        where = str(Path(folder) / names.root)
        state_dict_saver.save({"table": made}, checkpoint_id=where)
        state = {"table": names.sharded_tensor.zeros(names.chunks(0, 3, 2, 1, 0), length, 3)}
        state_dict_loader.load(state, checkpoint_id=where)
    return locals_of(state["table"])


def test_checkpoints_with_an_empty_shard_are_read_back(world: Ranks, tmp_path: Path) -> None:
    values = same_values(world, save_and_load, str(tmp_path), 3)
    assert values == [[[]]] + [[[row]] for row in numbers(3, 3).tolist()[::-1]]


def test_checkpoints_with_empty_shards_past_the_end_are_read_back(world: Ranks, tmp_path: Path) -> None:
    """torch.distributed.checkpoint refuses torch's tensors of this kind: chunks have to be inside of the tensor."""
    values = ours_of(world, save_and_load, str(tmp_path), 2)
    assert values == [[[]], [[]], [[[3.0, 4.0, 5.0]]], [[[0.0, 1.0, 2.0]]]]


def gather_with_empty_chunks(names: Names) -> Any:
    made = names.shard(numbers(3, 3), names.chunks(0))
    out = torch.zeros(3, 3) if dist.get_rank() == 3 else None
    made.gather(3, out)
    return None if out is None else out.tolist()


def test_a_tensor_with_empty_chunks_is_gathered(world: Ranks) -> None:
    assert same_values(world, gather_with_empty_chunks)[3] == numbers(3, 3).tolist()


def order_of_pieces(names: Names) -> list[Any]:
    """Metadata of other constructors keeps the order in which shards or ranks are listed."""
    spec = names.pieces(([4], [4], 3), ([0], [2], 1), ([2], [2], 0))
    chunks = names.sharded_tensor.zeros(names.chunks(0, 2, 0, 3, 1), 8)
    rank = dist.get_rank()
    own = names.sharded_tensor.Shard.from_tensor_and_offsets(torch.zeros(2), [6 - 2 * rank], rank)
    joined = names.sharded_tensor.init_from_local_shards([own], 8)
    return [described(made.metadata()) for made in (names.sharded_tensor.zeros(spec, 8), chunks, joined)]


def test_metadata_keeps_the_order_of_its_spec(world: Ranks) -> None:
    same_values(world, order_of_pieces)


def sorted_by_offset(names: Names) -> list[int]:
    metadata = names.sharded_tensor.zeros(names.chunks(0, 3, 1, 0, 2), 5).metadata()
    shards = sorted(metadata.shards_metadata, key=operator.attrgetter("shard_offsets"))
    return [shard.placement.rank() for shard in shards]


def test_shards_sorted_by_offset_are_in_the_order_of_placements(world: Ranks) -> None:
    assert same_values(world, sorted_by_offset) == [[3, 1, 0, 2]] * 4
