"""torch's specs and metadata: the same answers as torch's where torch is right, and right where it is not."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed._shard import metadata as torch_metadata
from torch.distributed._shard.sharded_tensor import metadata as torch_tensor_metadata
from torch.distributed._shard.sharded_tensor import shard as torch_shard
from torch.distributed._shard.sharding_spec import _internals as torch_internals
from torch.distributed._shard.sharding_spec import api as torch_api
from torch.distributed._shard.sharding_spec import chunk_sharding_spec as torch_chunk
from torch.distributed.remote_device import _remote_device

from shardwise.comm import run_local
from shardwise.compat._shard import sharding_spec
from shardwise.compat._shard.metadata import ShardMetadata
from shardwise.compat._shard.sharded_tensor import metadata as tensor_metadata
from shardwise.compat._shard.sharded_tensor import shard as compat_shard
from shardwise.compat._shard.sharded_tensor import utils
from shardwise.compat._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from shardwise.compat._shard.sharding_spec import _internals as internals
from shardwise.compat.specs import build_piece_table, rank_of
from shardwise.geometry import ChunkSpec, EnumerableSpec, Mesh, MeshSpec, Replicate, Shard
from shardwise.tensor.shards import describe_layout, spec_on_device
from tests.device import PLACE

infer = sharding_spec._infer_sharding_spec_from_shards_metadata
Properties = tensor_metadata.TensorProperties


def placements(*ranks: int) -> list[_remote_device | str]:
    return [f"rank:{rank}/cpu" for rank in ranks]


def plain(shards: list[Any]) -> list[tuple[list[int], list[int], str]]:
    return [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in shards]


def outcome(function: Any, *args: Any) -> tuple[Any, str]:
    """What a call gives, or the type and text of its error."""
    try:
        return function(*args), ""
    except Exception as error:
        return type(error), str(error)


# ShardMetadata, Shard, TensorProperties


@pytest.mark.parametrize(
    "arguments",
    [([0], [2, 3]), ([-1], [2]), ([0], [-2]), ([0, 4], [2, 3], "rank:1/cuda:1"), ([0], [1], "worker0/cpu"), ([0], [1])],
)
def test_shard_metadata_is_as_torchs(arguments: tuple[Any, ...]) -> None:
    theirs, said = outcome(torch_metadata.ShardMetadata, *arguments)
    ours, told = outcome(ShardMetadata, *arguments)
    if said:
        assert ours is theirs and said.split(",")[0].split(" have")[0] in told
    else:
        assert repr(ours) == repr(theirs)
        assert ours == ShardMetadata(*arguments) and hash(ours) == hash(ShardMetadata(*arguments))
        assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == ours


def test_shard_metadata_takes_sizes_of_tensors() -> None:
    assert ShardMetadata((0, 0), torch.zeros(2, 3).size()).shard_sizes == [2, 3]


@pytest.mark.parametrize("wrong", ["size", "device"])
def test_shard_checks_its_tensor(wrong: str) -> None:
    sizes, place = ([3], f"rank:0/{PLACE}") if wrong == "size" else ([2], "rank:0/cuda:7")
    theirs, said = outcome(torch_shard.Shard, torch.zeros(2), torch_metadata.ShardMetadata([0], sizes, place))
    ours, told = outcome(compat_shard.Shard, torch.zeros(2), ShardMetadata([0], sizes, place))
    assert ours is theirs is ValueError
    assert said.split("!")[0] in told


def test_properties_pickle_with_their_memory_format() -> None:
    given = Properties(dtype=torch.int8, memory_format=torch.channels_last, pin_memory=True)
    assert pickle.loads(pickle.dumps(given)) == given
    assert given.__getstate__()[3].value == torch_tensor_metadata.MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value
    with pytest.raises(RuntimeError, match=r"Invalid torch.memory_format: torch.channels_last_3d"):
        pickle.dumps(Properties(memory_format=torch.channels_last_3d))


def test_properties_pickle_with_their_strides() -> None:
    given = Properties.create_from_tensor(torch.zeros(2, 3).t())
    assert given.strides == (1, 3)
    assert pickle.loads(pickle.dumps(given)) == given
    assert len(Properties().__getstate__()) == 5  # what every release of torch reads


def test_properties_follow_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert Properties().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# Chunk specs


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("ranks", [(0,), (1, 0), (2, 0, 1), (3, 1, 2, 0)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunks_are_torchs_with_empty_ones_past_the_end(length: int, ranks: tuple[int, ...], dim: int) -> None:
    size = [3, 3]
    size[dim] = length
    theirs = torch_chunk.ChunkShardingSpec(dim, placements(*ranks)).build_metadata(
        torch.Size(size), torch_tensor_metadata.TensorProperties()
    )
    ours = ChunkShardingSpec(dim, placements(*ranks)).build_metadata(torch.Size(size), Properties())
    assert plain(ours.shards_metadata) == plain(theirs.shards_metadata)
    assert ours.size == torch.Size(size)
    layout = ChunkShardingSpec(dim, placements(*ranks)).layout(size)
    assert layout == ChunkSpec(dim, ranks).layout(size)
    assert [(list(p.box.offsets), list(p.box.sizes), f"rank:{p.rank}/{p.device}") for p in layout.pieces] == [
        ([min(o, n) for o, n in zip(off, size, strict=True)], s, p) for off, s, p in plain(theirs.shards_metadata)
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("rows", ["rank:0/cpu"]), NotImplementedError, "does not support named dimension"),
        ((None, ["rank:0/cpu"]), ValueError, "Sharding dim needs to be an integer"),
        ((0, ["rank:x/cpu"]), ValueError, "Could not parse remote_device"),
        ((0, [3]), TypeError, "Invalid type for remote_device"),
    ],
)
def test_wrong_chunk_specs_are_refused_as_by_torch(arguments: Any, error: type[Exception], text: str) -> None:
    for cls in (torch_chunk.ChunkShardingSpec, ChunkShardingSpec):
        with pytest.raises(error, match=text):
            cls(*arguments)


def test_dim_must_be_one_of_the_tensor() -> None:
    properties = torch_tensor_metadata.TensorProperties()
    with pytest.raises(ValueError, match="Invalid sharding dim: 2"):
        torch_chunk.ChunkShardingSpec(2, placements(0)).build_metadata(torch.Size([4, 4]), properties)
    spec = ChunkShardingSpec(2, placements(0))
    for call in (lambda: spec.build_metadata(torch.Size([4, 4]), Properties()), lambda: spec.layout((4, 4))):
        with pytest.raises(ValueError, match=r"Invalid sharding dim: 2; a tensor of shape \(4, 4\) has dims -2 to 1"):
            call()


def test_chunk_specs_are_hashable_values() -> None:
    one, same = ChunkShardingSpec(0, placements(1, 0)), ChunkShardingSpec(0, placements(1, 0))
    assert one == same and hash(one) == hash(same) and one != ChunkShardingSpec(0, placements(0, 1))
    assert one.layout((4,)) is same.layout((4,))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert repr(one) == repr(torch_chunk.ChunkShardingSpec(0, placements(1, 0)))


def test_a_callers_list_of_placements_is_left_alone() -> None:
    given = placements(0, 1)
    ChunkShardingSpec(0, given)
    assert given == ["rank:0/cpu", "rank:1/cpu"]


def test_a_spec_whose_placements_change_gives_new_layouts() -> None:
    spec = ChunkShardingSpec(0, placements(0, 1))
    before = spec.layout((4,))
    spec.placements.sort(key=lambda p: -rank_of(p))  # type: ignore[arg-type]  # parsed when the spec was made
    assert spec.layout((4,)) == ChunkSpec(0, (1, 0)).layout((4,)) != before


def test_a_rank_may_hold_several_chunks() -> None:
    assert ChunkShardingSpec(0, placements(0, 1, 0)).layout((6,)).local_shapes(0) == ((2,), (2,))


def test_placements_must_name_ranks() -> None:
    with pytest.raises(ValueError, match="the placement cpu names no rank; write 'rank:<rank>/cpu'"):
        ChunkShardingSpec(0, ["cpu"]).layout((2,))
    with pytest.raises(RuntimeError, match="RPC framework needs to be initialized for using worker names: worker0"):
        ChunkShardingSpec(0, ["worker0/cpu"]).layout((2,))


# Enumerable specs

HALVES = [ShardMetadata([0, 0], [2, 4], "rank:1/cpu"), ShardMetadata([2, 0], [2, 4], "rank:0/cpu")]


def test_enumerable_specs_are_hashable_values() -> None:
    one, same = EnumerableShardingSpec(list(HALVES)), EnumerableShardingSpec(copy.deepcopy(HALVES))
    assert one == same and hash(one) == hash(same)
    assert one.layout((4, 4)) is same.layout((4, 4))
    assert one.layout((4, 4)) == ChunkSpec(0, (1, 0)).layout((4, 4))


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [([0], [2]), ([2, 0], [2, 4])],
        [([0, 0], [2, 4]), ([1, 0], [2, 4])],
        [([0, 0], [2, 4]), ([2, 0], [2, 4])],
        [([0, 0], [2, 4]), ([0, 0], [2, 4])],
        [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 4])],
        [([0, 0], [3, 3]), ([0, 3], [3, 1]), ([3, 0], [1, 3]), ([2, 2], [2, 2])],
    ],
)
def test_enumerable_specs_refuse_what_torch_refuses(shards: list[tuple[list[int], list[int]]]) -> None:
    theirs, said = outcome(torch_api.EnumerableShardingSpec, [torch_metadata.ShardMetadata(*s) for s in shards])
    ours, told = outcome(EnumerableShardingSpec, [ShardMetadata(*s) for s in shards])
    assert bool(said) == bool(told)
    if said:
        assert ours is theirs is ValueError
        for phrase in ("Empty shard list", "inconsistent ranks", "overlap"):
            assert (phrase in said) == (phrase in told)


@pytest.mark.parametrize("shape", [(4,), (4, 4), (3, 4), (5, 4), (4, 5)])
def test_tensors_that_do_not_fit_are_refused_as_by_torch(shape: tuple[int, ...]) -> None:
    theirs, said = outcome(
        torch_internals.check_tensor,
        [torch_metadata.ShardMetadata(s.shard_offsets, s.shard_sizes) for s in HALVES],
        shape,
    )
    ours, told = outcome(internals.check_tensor, HALVES, shape)
    assert ours is theirs
    assert told.startswith(said[:60])
    if said:
        with pytest.raises(ValueError):
            EnumerableShardingSpec(HALVES).layout(shape)


def test_overlaps_match_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(400):
        numbers = torch.randint(0, 4, (3, 2, 2), generator=generator).tolist()
        shards = [ShardMetadata(offsets, sizes) for offsets, sizes in numbers]
        pairs = [
            (a, b)
            for a in range(3)
            for b in range(a)
            if internals._check_shard_metadata_pair_overlap(shards[a], shards[b])
        ]
        found, said = outcome(internals.validate_non_overlapping_shards_metadata, shards)
        assert (found is ValueError) == bool(pairs), numbers
        seen.add(bool(pairs))
        if pairs:
            assert any(
                f"{shards[b]} and {shards[a]}" in said or f"{shards[a]} and {shards[b]}" in said for a, b in pairs
            )
    assert seen == {True, False}


# Inference


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [2, 4, 5, 7, 8])
@pytest.mark.parametrize("ranks", [(0, 1), (2, 0, 1), (3, 1, 2, 0)])
def test_chunks_are_recognised_on_every_dim(dim: int, length: int, ranks: tuple[int, ...]) -> None:
    spec = ChunkShardingSpec(dim, placements(*ranks))
    size = [6, 6]
    size[dim] = length
    shards = spec.build_metadata(torch.Size(size), Properties()).shards_metadata
    assert infer(shards) == spec
    assert infer(shards[::-1]).layout(size) == spec.layout(size)


def test_torchs_offsets_of_empty_chunks_are_understood() -> None:
    theirs = torch_chunk.ChunkShardingSpec(0, placements(0, 1, 2, 3)).build_metadata(
        torch.Size([5]), torch_tensor_metadata.TensorProperties()
    )
    shards = [ShardMetadata(*given) for given in plain(theirs.shards_metadata)]
    assert shards[3].shard_offsets == [6]
    assert infer(shards) == ChunkShardingSpec(0, placements(0, 1, 2, 3))
    assert EnumerableShardingSpec(shards).layout((5,)).pieces[3].box.offsets == (5,)


def test_shards_of_two_dims_are_never_taken_for_chunks() -> None:
    mixed = [([4, 0], [4, 2]), ([0, 2], [8, 2])]
    infer_as_torch: Any = torch_api._infer_sharding_spec_from_shards_metadata
    theirs = infer_as_torch([torch_metadata.ShardMetadata(o, s, f"rank:{i}/cpu") for i, (o, s) in enumerate(mixed)])
    assert isinstance(theirs, torch_chunk.ChunkShardingSpec)  # torch forgets that it has seen dim 0
    ours = infer([ShardMetadata(o, s, f"rank:{i}/cpu") for i, (o, s) in enumerate(mixed)])
    assert isinstance(ours, EnumerableShardingSpec)


@pytest.mark.parametrize(
    "shards",
    [
        [([0], [4], "rank:0/cpu")],
        [([0], [1], "rank:0/cpu"), ([1], [3], "rank:1/cpu")],
        [([0], [2]), ([2], [2])],
    ],
    ids=["one shard", "ragged", "no placements"],
)
def test_other_shards_are_enumerated(shards: list[Any]) -> None:
    given = [ShardMetadata(*shard) for shard in shards]
    assert infer(given) == EnumerableShardingSpec(given)


def test_chunks_of_one_rank_in_another_order_are_chunks() -> None:
    given = [([2], [2], "rank:0/cpu"), ([0], [2], "rank:0/cpu")]
    infer_as_torch: Any = torch_api._infer_sharding_spec_from_shards_metadata
    theirs = infer_as_torch([torch_metadata.ShardMetadata(*shard) for shard in given])
    ours = infer([ShardMetadata(*shard) for shard in given])
    assert repr(ours) == repr(theirs) == "ChunkShardingSpec(dim=0, placements=[rank:0/cpu, rank:0/cpu])"


# Metadata of native layouts


def test_native_layouts_are_described() -> None:
    layout = MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(0))).layout((4,))
    told = describe_layout(layout, Properties(dtype=torch.int8), "cuda:3")
    assert plain(told.shards_metadata)[0] == ([0], [2], "rank:0/cuda:3")
    assert sorted(rank_of(s.placement) for s in told.shards_metadata) == [0, 1, 2, 3]
    assert told.tensor_properties.dtype == torch.int8


def test_devices_named_by_a_spec_are_kept() -> None:
    layout = ChunkSpec(0, (0, 1), devices=("cuda:0", None)).layout((2,))
    assert [str(s.placement) for s in describe_layout(layout, Properties()).shards_metadata] == [
        "rank:0/cuda:0",
        "rank:1/cpu",
    ]


def test_specs_move_to_another_device() -> None:
    shards = [ShardMetadata([0], [1], "rank:1/cuda:1"), ShardMetadata([1], [2], "rank:0/cuda:0")]
    moved = spec_on_device(EnumerableShardingSpec(shards), "cpu")
    assert isinstance(moved, EnumerableShardingSpec)
    assert [str(s.placement) for s in moved.shards] == ["rank:1/cpu", "rank:0/cpu"]
    assert [str(s.placement) for s in shards] == ["rank:1/cuda:1", "rank:0/cuda:0"]
    native = ChunkSpec(0, 2)
    assert spec_on_device(native, "cpu") is native


# A user's own spec, written for torch


@dataclass
class LastRankFirst(sharding_spec.ShardingSpec):
    """A rank's share grows with its number; a dataclass with a list is not hashable, as for torch it need not be."""

    weights: list[int]

    def build_metadata(self, tensor_sizes: Any, tensor_properties: Any) -> Any:
        shards, end = [], tensor_sizes[0]
        total = sum(self.weights)
        for rank, weight in enumerate(self.weights):
            size = tensor_sizes[0] * weight // total
            end -= size
            shards.append(ShardMetadata([end], [size], f"rank:{rank}/cpu"))
        return tensor_metadata.ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)

    def shard(self, tensor: Any, src_rank: int = 0, process_group: Any = None) -> Any:
        raise NotImplementedError


def test_a_users_spec_needs_only_torchs_two_methods() -> None:
    layout = LastRankFirst([1, 2, 3]).layout((12,))
    assert [str(p) for p in layout.pieces] == ["[10:12] on rank 0", "[6:10] on rank 1", "[0:6] on rank 2"]
    assert layout == LastRankFirst([1, 2, 3]).layout((12,))
    assert plain(describe_layout(layout, Properties()).shards_metadata)[0] == ([10], [2], "rank:0/cpu")


def test_a_users_spec_that_leaves_a_gap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no piece covers \[0:1\] of a tensor of shape \(13,\)"):
        LastRankFirst([1, 2, 3]).layout((13,))


class Backwards(ChunkShardingSpec):
    """A chunk spec whose own metadata decides."""

    def build_metadata(self, tensor_sizes: Any, tensor_properties: Any) -> Any:
        told = super().build_metadata(tensor_sizes, tensor_properties)
        places = [shard.placement for shard in told.shards_metadata][::-1]
        for shard, place in zip(told.shards_metadata, places, strict=True):
            shard.placement = place
        return told


def test_a_subclass_decides_by_its_metadata() -> None:
    assert Backwards(0, placements(0, 1)).layout((4,)) == ChunkSpec(0, (1, 0)).layout((4,))


# Metadata of many ranks


def test_metadata_of_all_ranks_is_put_together_and_checked() -> None:
    def part(rank: int, size: int = 4, **properties: Any) -> Any:
        shard = ShardMetadata([2 * rank], [2], f"rank:{rank}/cpu")
        return tensor_metadata.ShardedTensorMetadata([shard], torch.Size([size]), Properties(**properties))

    whole = utils.build_global_metadata([part(0), None, part(1)])
    assert plain(whole.shards_metadata) == [([0], [2], "rank:0/cpu"), ([2], [2], "rank:1/cpu")]
    with pytest.raises(ValueError, match="global_size property does not match from different ranks"):
        utils.build_global_metadata([part(0), part(1, size=5)])
    with pytest.raises(ValueError, match="dtype property does not match from different ranks"):
        utils.build_global_metadata([part(0), part(1, dtype=torch.int8)])
    with pytest.raises(ValueError, match="no local shards on all ranks"):
        utils.build_global_metadata([None])
    with pytest.raises(ValueError, match="overlap"):
        utils.build_global_metadata([part(0), part(0)])
    stacked = utils.build_global_metadata([part(1, 0), part(0, 0)], recalc_metadata=True)
    assert plain(stacked.shards_metadata) == [([2], [2], "rank:1/cpu"), ([0], [2], "rank:0/cpu")]
    assert stacked.size == torch.Size([4])


def test_local_shards_are_checked() -> None:
    def check(comm: Any) -> list[str]:
        def said(tensor: torch.Tensor, rank: int) -> str:
            first = compat_shard.Shard.from_tensor_and_offsets(torch.zeros(2), [0], comm.rank)
            shard = compat_shard.Shard.from_tensor_and_offsets(tensor, [2], rank)
            return outcome(utils.build_metadata_from_local_shards, [first, shard], torch.Size([4]), comm.rank, comm)[1]

        return [
            said(torch.zeros(2), comm.rank),
            said(torch.zeros(2), 1 - comm.rank),
            said(torch.zeros(2), 7),
            said(torch.zeros(2, dtype=torch.int8), comm.rank),
            said(torch.zeros(4)[::2], comm.rank),
        ]

    for fine, *wrong in run_local(check, 2):
        assert fine == ""
        texts = [
            "rank does not match",
            "Global rank 7 does not exist",
            "dtype property need to be the same",
            "contiguous",
        ]
        for text, told in zip(texts, wrong, strict=True):
            assert text in told


def test_tables_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="remote device is None"):
        build_piece_table([ShardMetadata([0], [1])], (1,))


def test_native_and_torch_like_specs_mean_the_same() -> None:
    layout = EnumerableShardingSpec(HALVES).layout((4, 4))
    assert EnumerableSpec(layout.pieces).layout((4, 4)) == layout
