"""Creation functions, tensors from local shards, and torch.nn.init, on all ranks of small worlds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.comm import Comm, DisagreementError, run_local
from shardwise.compat import from_shards
from shardwise.compat.specs import ChunkShardingSpec, EnumerableShardingSpec
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Replicate,
    Shard,
    ShardingSpec,
)
from shardwise.tensor import ShardedTensor, creation
from shardwise.tensor import random_init as init
from shardwise.tensor.random import manual_seed
from shardwise.tensor.shards import Shard as LocalShard
from shardwise.tensor.shards import ShardedTensorMetadata, ShardMetadata, TensorProperties
from tests.device import DEVICE, PLACE

SHAPE = (7, 5)
SPECS: dict[str, tuple[int, ShardingSpec]] = {
    "one rank": (1, ChunkSpec(0, ranks=1)),
    "rows": (3, ChunkSpec(0, ranks=3)),
    "columns, more ranks than needed": (4, ChunkSpec(1, ranks=4)),
    "torch's placements": (2, ChunkShardingSpec(1, [f"rank:1/{PLACE}", f"rank:0/{PLACE}"])),
    "ragged with an empty piece": (3, MeshSpec(Mesh.of(tp=3), (Shard(0, sizes=(5, 0, 2)),))),
    "grid": (4, GridSpec((2, 2), [[3, 1], [0, 2]])),
    "replicated": (2, MeshSpec(Mesh.of(dp=2), (Replicate(),))),
    "replicated rows": (4, MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(1)))),
    "grouped": (2, MeshSpec(Mesh.of(tp=2), (Shard(0, groups=(4, 3)),))),
    "two pieces on one rank, none on another": (
        3,
        EnumerableSpec([Piece(Box((0, 0), (7, 2)), 2), Piece(Box((0, 2), (3, 3)), 0), Piece(Box((3, 2), (4, 3)), 2)]),
    ),
}


def everywhere(make: Callable[[ShardingSpec], ShardedTensor]) -> list[torch.Tensor]:
    """The whole tensor that `make(spec)` gives, on every rank of every world of SPECS."""
    found = []
    for world, spec in SPECS.values():
        found += run_local(lambda comm, spec=spec: make(spec).full().clone(), world)
    return found


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda spec: creation.zeros(spec, *SHAPE), 0.0),
        (lambda spec: creation.ones(spec, SHAPE), 1.0),
        (lambda spec: creation.full(spec, SHAPE, 2.5), 2.5),
        (lambda spec: creation.zeros_like(creation.ones(spec, SHAPE)), 0.0),
        (lambda spec: torch.ones_like(creation.zeros(spec, SHAPE)), 1.0),
        (lambda spec: torch.full_like(creation.zeros(spec, SHAPE), 3.0, dtype=torch.float64), 3.0),
        (lambda spec: creation.empty(spec, SHAPE).fill_(torch.tensor(4.0)), 4.0),
        (lambda spec: nn.init.constant_(creation.empty(spec, SHAPE), 5), 5.0),
        (lambda spec: nn.init.ones_(creation.empty(spec, SHAPE)), 1.0),
        (lambda spec: init.zeros_(creation.ones(spec, SHAPE)), 0.0),
        (lambda spec: creation.ones(spec, SHAPE).zero_(), 0.0),
    ],
)
def test_one_value_everywhere(make: Any, value: float) -> None:
    assert all(torch.equal(x, torch.full_like(x, value)) and x.shape == SHAPE for x in everywhere(make))


def seeded(change: Callable[[ShardedTensor], Any]) -> Callable[[ShardingSpec], ShardedTensor]:
    def make(spec: ShardingSpec) -> ShardedTensor:
        manual_seed(11)
        tensor = creation.empty(spec, *SHAPE)
        assert change(tensor) is tensor
        return tensor

    return make


RANDOM: dict[str, Callable[[ShardingSpec], ShardedTensor]] = {
    "rand": lambda spec: creation.rand(spec, *SHAPE, seed=1),
    "randn": lambda spec: creation.randn(spec, SHAPE, seed=1),
    "randn float64": lambda spec: creation.randn(spec, SHAPE, dtype=torch.float64, seed=1),
    "randn bfloat16": lambda spec: creation.randn(spec, SHAPE, dtype=torch.bfloat16, seed=1),
    "randn complex": lambda spec: creation.randn(spec, SHAPE, dtype=torch.complex64, seed=1),
    "generator": lambda spec: creation.rand(spec, SHAPE, generator=torch.Generator().manual_seed(2)),
    "rand_like": lambda spec: creation.rand_like(creation.zeros(spec, SHAPE), seed=1),
    "torch.randn_like": seeded(lambda x: x.copy_(torch.randn_like(x))),
    "uniform_": seeded(lambda x: x.uniform_(-1, 1)),
    "normal_": seeded(lambda x: x.normal_(mean=1, std=2)),
    "bernoulli_": seeded(lambda x: x.bernoulli_(0.3)),
    "random_": seeded(lambda x: x.random_(2, 9)),
    "nn.init.uniform_": seeded(lambda x: nn.init.uniform_(x, 2, 3)),
    "nn.init.normal_": seeded(lambda x: nn.init.normal_(x, 2, 3)),
    "nn.init.kaiming_uniform_": seeded(lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5))),
    "nn.init.kaiming_normal_": seeded(lambda x: nn.init.kaiming_normal_(x, mode="fan_out", nonlinearity="relu")),
    "nn.init.xavier_uniform_": seeded(lambda x: nn.init.xavier_uniform_(x, gain=2)),
    "nn.init.xavier_normal_": seeded(lambda x: nn.init.xavier_normal_(x)),
    "trunc_normal_": seeded(lambda x: init.trunc_normal_(x, a=-1, b=0.5)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_do_not_depend_on_layout_or_world(name: str) -> None:
    first, *others = everywhere(RANDOM[name])
    assert len(set(first.flatten().tolist())) > 1
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", ["kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"])
def test_fans_come_from_the_global_shape(kind: str) -> None:
    def body(comm: Comm) -> tuple[float, float]:
        manual_seed(0)
        spec = ChunkSpec(0, ranks=comm.world_size)
        theirs = getattr(nn.init, kind)(creation.empty(spec, 64, 32, 3, 3)).full()
        manual_seed(0)
        ours = getattr(init, kind)(creation.empty(spec, 64, 32, 3, 3)).full()
        assert torch.equal(theirs, ours)
        return ours.std().item(), ours.abs().max().item()

    plain = torch.empty(64, 32, 3, 3)
    getattr(nn.init, kind)(plain, generator=torch.Generator(DEVICE).manual_seed(0))
    for std, _ in run_local(body, 2):
        assert abs(std / plain.std().item() - 1) < 0.03


def test_replicas_hold_equal_bits() -> None:
    def body(comm: Comm) -> torch.Tensor:
        torch.manual_seed(100 + comm.rank)
        return creation.randn(MeshSpec(Mesh.of(dp=3), (Replicate(),)), 50).local_tensor()

    first, *others = run_local(body, 3)
    assert all(torch.equal(first, other) for other in others)


def test_successive_tensors_differ_and_seeding_repeats_them() -> None:
    def body(comm: Comm) -> None:
        spec = ChunkSpec(0, ranks=2)
        manual_seed(3)
        a, b = creation.rand(spec, 6), creation.rand(spec, 6)
        manual_seed(3)
        assert torch.equal(a.full(), creation.rand(spec, 6).full())
        assert not torch.equal(a.full(), b.full())

    run_local(body, 2)


def test_writing_in_place_keeps_memory_and_bumps_the_version() -> None:
    x = creation.zeros(ChunkSpec(0, ranks=1), 4, 4)
    local = x.local_tensor()
    before, version = local.data_ptr(), local._version
    nn.init.normal_(x)
    assert x.local_tensor() is local and local.data_ptr() == before and local._version > version
    assert local.abs().sum() > 0


def test_leaves_that_require_grad_change_under_no_grad_only() -> None:
    x = creation.rand(ChunkSpec(0, ranks=1), 4, requires_grad=True)
    assert x.requires_grad and x.is_leaf and x.local_tensor().is_leaf
    nn.init.uniform_(x)
    nn.init.zeros_(x)
    assert x.local_tensor().requires_grad
    for change in (lambda: x.uniform_(), lambda: x.fill_(1), lambda: x.normal_()):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            change()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool, torch.complex128])
def test_dtype(dtype: torch.dtype) -> None:
    x = creation.ones(ChunkSpec(0, ranks=1), 3, dtype=dtype)
    assert x.dtype == x.local_tensor().dtype == dtype and x.local_tensor().tolist() == [1, 1, 1]
    assert creation.empty_like(x).dtype == dtype and torch.zeros_like(x, dtype=torch.int8).dtype == torch.int8


def test_default_dtype_and_device() -> None:
    spec = ChunkSpec(0, ranks=1)
    assert creation.full(spec, (2,), 1).dtype == torch.get_default_dtype()
    assert creation.zeros(spec, 2, device="meta").local_tensor().is_meta
    assert creation.rand(spec, 2, device="meta", requires_grad=True).requires_grad
    assert creation.zeros_like(creation.zeros(spec, 2), device="meta").device.type == "meta"
    named = ChunkShardingSpec(0, [f"rank:0/{PLACE}"])
    assert creation.ones(named, 2, device=PLACE).local_tensor().tolist() == [1, 1]
    with pytest.raises(
        LayoutError, match=rf"device='meta' was requested, and the spec .* places shards on \['{PLACE}'\]"
    ):
        creation.zeros(named, 2, device="meta")


def test_no_elements() -> None:
    x = creation.randn(ChunkSpec(1, ranks=1), 0, 3)
    assert x.shape == (0, 3) and creation.rand(MeshSpec(Mesh.of(a=1), (Replicate(),))).shape == ()
    with pytest.warns(UserWarning, match="zero-element tensors is a no-op"):
        nn.init.kaiming_uniform_(x)


# Errors


def pending(op: str, shape: tuple[int, ...] = (4,)) -> ShardedTensor:
    return creation.empty(MeshSpec(Mesh.of(dp=2), (Partial(op),)), shape)


def test_pending_reductions_take_no_random_values() -> None:
    def body(comm: Comm) -> None:
        for change in (lambda: pending("sum").uniform_(), lambda: nn.init.normal_(pending("max"))):
            with pytest.raises(LayoutError, match=r"on a tensor with a pending .* redistribute the tensor first"):
                change()

    run_local(body, 2)


def test_pending_reductions_are_made_only_of_values_that_stay_the_same() -> None:
    def body(comm: Comm) -> None:
        for op, value in (("sum", 0), ("avg", 7), ("max", 7), ("min", -1), ("product", 1)):
            assert creation.full_like(pending(op), value).full().tolist() == [value] * 4
        with pytest.raises(LayoutError, match="pending sum of 2 addends with 3 would make it 6"):
            creation.full_like(pending("sum"), 3)
        with pytest.raises(LayoutError, match="pending product of 2 addends with 3 would make it 9"):
            creation.full_like(pending("product"), 3)

    run_local(body, 2)


def test_pending_reductions_are_filled_with_terms_that_make_up_the_value() -> None:
    def body(comm: Comm) -> None:
        for op in ("sum", "avg", "max", "min", "product"):
            for value in (0, 1, 3, -7):
                made = pending(op)
                assert made.fill_(value).full().tolist() == [value] * 4 and made.placements == (Partial(op),)
            like = torch.full_like(pending(op), 5), torch.ones_like(pending(op))
            assert [t.full().tolist() for t in like] == [[5] * 4, [1] * 4]

    run_local(body, 2)


def test_wrong_arguments_are_raised_on_every_rank() -> None:
    def body(comm: Comm) -> list[str]:
        spec, texts = ChunkSpec(0, ranks=2), []
        for make in (
            lambda: creation.rand(spec, 4, dtype=torch.int64 if comm.rank else torch.float32),
            lambda: creation.rand(spec, 4, seed=comm.rank),
            lambda: creation.empty(spec, 4).normal_(0, 1 + comm.rank),
        ):
            with pytest.raises((DisagreementError, NotImplementedError)) as caught:
                make()
            texts.append(str(caught.value))
        return texts

    first, second = run_local(body, 2)
    assert (
        first[0]
        == "'rand': rank 1: 'uniform' is not implemented for torch.int64; use a floating point dtype and convert"
    )
    assert second[0] == first[0].removeprefix("'rand': rank 1: ")
    assert first[1:] == second[1:]
    assert "seed is 0 on rank 0 and 1 on rank 1" in first[1] and "std is 1 on rank 0 and 2 on rank 1" in first[2]


def test_fans_and_modes() -> None:
    x = creation.empty(ChunkSpec(0, ranks=1), 4)
    with pytest.raises(ValueError, match=r"fewer than 2 dimensions; the shape is \(4,\)"):
        nn.init.kaiming_uniform_(x)
    with pytest.raises(ValueError, match="Mode fan not supported"):
        nn.init.kaiming_uniform_(creation.empty(ChunkSpec(0, ranks=1), 4, 4), mode="fan")  # type: ignore[arg-type]


# From local shards


def shard_of(comm: Comm, offsets: list[int], tensor: torch.Tensor, rank: int | None = None) -> LocalShard:
    return LocalShard.from_tensor_and_offsets(tensor, offsets, comm.rank if rank is None else rank)


def test_local_shards_make_a_tensor() -> None:
    def body(comm: Comm) -> Any:
        whole = torch.arange(12.0).reshape(4, 3)
        rows = from_shards.init_from_local_shards(
            [shard_of(comm, [2 * comm.rank, 0], whole[2 * comm.rank :][:2])], 4, 3
        )
        assert isinstance(rows.sharding_spec(), ChunkShardingSpec) and torch.equal(rows.full(), whole)
        corners = [[(0, 0), (1, 1)], [(0, 1), (1, 0)]][comm.rank]
        shards = [
            shard_of(comm, [3 * r, 2 * c], whole[3 * r :, 2 * c :][: 3 - 2 * r, : 2 - c].clone()) for r, c in corners
        ]
        grid = from_shards.init_from_local_shards(shards, [4, 3])
        assert isinstance(grid.sharding_spec(), EnumerableShardingSpec) and torch.equal(grid.full(), whole)
        assert [s.metadata for s in grid.local_shards()] == [s.metadata for s in shards]
        none = from_shards.init_from_local_shards([shard_of(comm, [0, 0], whole)] if comm.rank else [], 4, 3)
        assert torch.equal(none.full(), whole) and none.dtype == whole.dtype
        return grid.local_shards()[0].tensor.data_ptr() == shards[0].tensor.data_ptr()

    assert run_local(body, 2) == [True, True]


def test_requires_grad_and_an_unknown_size() -> None:
    def body(comm: Comm) -> Any:
        own = torch.full((comm.rank + 1, 2), float(comm.rank), requires_grad=True)
        x = from_shards.init_from_local_shards([shard_of(comm, [0, 0], own)], None, 2)
        assert x.requires_grad
        return tuple(x.shape), x.full().tolist()

    assert run_local(body, 2) == [((3, 2), [[0, 0], [1, 1], [1, 1]])] * 2


def errors_of(world: int, make: Callable[[Comm], Any]) -> list[str]:
    """The text of the ValueError (or a kin) that every rank raises."""

    def body(comm: Comm) -> str:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            make(comm)
        return str(caught.value)

    return run_local(body, world)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda c: ([shard_of(c, [c.rank], torch.zeros(2))], 3), "overlap"),
        (
            lambda c: ([shard_of(c, [3 * c.rank], torch.zeros(2))], 5),
            "Total volume of shards: 4 does not match tensor vol",
        ),
        (lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2))], 3), "exceeds tensor dim: 3"),
        (lambda c: ([], 3), "ShardedTensor have no local shards on all ranks!"),
        (
            lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2))], 4 + c.rank),
            "ShardedTensor global_size property does not",
        ),
        (
            lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2, dtype=[torch.int8, torch.int16][c.rank]))], 4),
            "ShardedTensor dtype property does not match from different ranks! Found dtype=torch.int8 on rank:0",
        ),
        (
            lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2, requires_grad=c.rank == 1))], 4),
            "ShardedTensor requires_grad property does not match from different ranks!",
        ),
        (
            lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2), rank=0)], 4),
            "rank 1: Local shard metadata's rank does not match with the rank in its process group!",
        ),
        (
            lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(4)[:: 2 - c.rank][:2])], 4),
            "rank 0: Only torch.contiguous_format memory_format is currently supported!",
        ),
        (
            lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2))], 4, c.rank),
            "Rank of tensor is 2, but shards rank is 1",
        ),
        (lambda c: ([shard_of(c, [2 * c.rank], torch.zeros(2))], "4"), "size has to be a sequence of ints"),
    ],
)
def test_shards_that_make_no_tensor_raise_on_every_rank(make: Any, text: str) -> None:
    found = errors_of(2, lambda comm: from_shards.init_from_local_shards(*make(comm)))
    assert found[0] == found[1] and text in found[0]


def metadata(sizes: list[int], size: int, **properties: Any) -> ShardedTensorMetadata:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shards = [ShardMetadata([o], [n], f"rank:{r}/{PLACE}") for r, (o, n) in enumerate(zip(starts, sizes, strict=True))]
    return ShardedTensorMetadata(shards, torch.Size([size]), TensorProperties(**properties))


def test_local_shards_and_global_metadata() -> None:
    def body(comm: Comm) -> Any:
        described = metadata([1, 3], 4)
        own = LocalShard(torch.full((1 + 2 * comm.rank,), float(comm.rank)), described.shards_metadata[comm.rank])
        x = from_shards.init_from_local_shards_and_global_metadata([own], described)
        assert x.local_tensor() is own.tensor
        return x.full().tolist()

    assert run_local(body, 2) == [[0, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("described", "count", "text"),
    [
        (metadata([4], 4), 0, "Number of local shards (0) does not match number of local shards metadata"),
        (metadata([], 4), 0, "shards_metadata must not be empty!"),
        (
            metadata([4], 4, dtype=torch.int8),
            1,
            "Local shards' tensor dtype property is incompatible with tensor property",
        ),
        (metadata([4], 4, requires_grad=True), 1, "tensor requires_grad property is incompatible with tensor property"),
        (metadata([4], 5), 1, "Total volume of shards: 4 does not match tensor volume: 5"),
    ],
)
def test_metadata_that_does_not_fit(described: ShardedTensorMetadata, count: int, text: str) -> None:
    own = [LocalShard(torch.zeros(4), ShardMetadata([0], [4], f"rank:0/{PLACE}"))][:count]
    found = errors_of(1, lambda comm: from_shards.init_from_local_shards_and_global_metadata(own, described))
    assert text in found[0]


def test_a_local_tensor_makes_a_tensor() -> None:
    def body(comm: Comm) -> Any:
        sizes = (3, 0, 1)
        spec = MeshSpec(Mesh.of(tp=3), (Shard(0, sizes=sizes),))
        x = from_shards.init_from_local_tensor(torch.full((sizes[comm.rank], 2), comm.rank), spec, 4, 2)
        return x.full()[:, 0].tolist()

    assert run_local(body, 3) == [[0, 0, 0, 2]] * 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda c: torch.zeros(2 + c.rank),
            "rank 1: Shard tensor size does not match with metadata.shard_lengths! Found",
        ),
        (lambda c: torch.zeros(4)[:: 2 - c.rank][:2], "rank 0: local_tensor is not a contiguous Tensor."),
        (
            lambda c: torch.zeros(2, dtype=[torch.int8, torch.int16][c.rank]),
            "dtype is torch.int8 on rank 0 and torch.int16",
        ),
    ],
)
def test_local_tensors_that_do_not_fit_raise_on_every_rank(make: Any, text: str) -> None:
    found = errors_of(2, lambda comm: from_shards.init_from_local_tensor(make(comm), ChunkSpec(0, ranks=2), 4))
    assert found[0] == found[1] and text in found[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_holds_the_values_of_the_cpu() -> None:
    spec = ChunkSpec(0, ranks=1)
    for make in (creation.rand, creation.randn):
        on_cpu, on_cuda = make(spec, 300, 200, seed=4), make(spec, 300, 200, seed=4, device="cuda")
        assert on_cuda.local_tensor().is_cuda and torch.equal(on_cuda.local_tensor().cpu(), on_cpu.local_tensor())
