"""Making a ShardedTensor, taking it back whole, and what it does as a tensor, on all ranks of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise.ops  # noqa: F401  # what computes with ShardedTensors
from shardwise.comm import Comm, run_local
from shardwise.geometry import ChunkSpec, GridSpec, Layout, Mesh, MeshSpec, Partial, Replicate, Shard, ShardingSpec
from shardwise.tensor import ShardedTensor, execute, from_local, shard
from tests.moving import (
    DTYPES,
    FP8,
    CountingComm,
    CountingPool,
    assert_holds,
    error_of,
    layouts,
    local_parts,
    reducible,
    same_bytes,
    scalar_layouts,
    values,
)

MATRIX = layouts(5, 7)


def sharded(name: str, dtype: torch.dtype, comm: Comm) -> ShardedTensor:
    layout = MATRIX[name]
    return from_local(local_parts(layout, comm.rank, values((5, 7), dtype)), layout, comm=comm)


def texts_of(body: Any, ranks: int = 4) -> list[str]:
    """What each call of a body raised, having checked that all ranks raised the same."""
    results = run_local(body, ranks)
    assert all(found == results[0] for found in results)
    return list(results[0])


# Whole again


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_full_are_exact_from_every_layout(dtype: torch.dtype) -> None:
    names = [name for name, layout in MATRIX.items() if reducible(layout, dtype)]

    def body(comm: Comm) -> None:
        whole = values((5, 7), dtype)
        for i, name in enumerate(names):
            tensor = sharded(name, dtype, comm)
            gathered = tensor.gather_to(i % 4)
            assert (gathered is None) is (comm.rank != i % 4)
            assert gathered is None or same_bytes(gathered, whole), name
            assert same_bytes(tensor.full(), whole), name

    run_local(body, 4)


def test_gather_keeps_numbers_that_float32_loses() -> None:
    def body(comm: Comm) -> Any:
        exact = [
            torch.tensor([16777217, 2**62 + 1, -(2**53) - 1]),
            torch.tensor([0.1, 1 + 2**-52, 1e300], dtype=torch.float64),
        ]
        for whole in exact:
            gathered = shard(whole, ChunkSpec(0, (2, 0, 1))).gather_to(1)
            assert gathered is None or same_bytes(gathered, whole)
        return gathered is not None

    assert run_local(body, 3) == [False, True, False]


def test_gather_into_out_and_into_another_dtype() -> None:
    def body(comm: Comm) -> Any:
        tensor = sharded("cyclic", torch.int64, comm)
        out = torch.zeros(5, 7, dtype=torch.float64) if comm.rank == 2 else None
        found = tensor.gather_to(2, out=out)
        halves = tensor.gather_to(2, dtype=torch.float16)
        if comm.rank != 2:
            return found is None and halves is None
        assert found is out and out is not None and halves is not None
        return torch.equal(out, values((5, 7), torch.float64)) and halves.dtype == torch.float16

    assert run_local(body, 4) == [True] * 4


def test_gather_of_a_tensor_on_some_ranks() -> None:
    layout = ChunkSpec(0, (3, 1)).layout((5, 7))

    def body(comm: Comm) -> Any:
        if comm.rank not in (1, 3):
            return "not in it"
        pair = comm.subset((1, 3))
        tensor = from_local(local_parts(layout, comm.rank, values((5, 7), torch.int64)), layout, comm=pair)
        assert same_bytes(tensor.full(), values((5, 7), torch.int64))
        gathered = tensor.gather_to(3)
        wrong = error_of(tensor.gather_to, 0)
        return None if gathered is None else same_bytes(gathered, values((5, 7), torch.int64)), wrong

    wrong = "ValueError: gather to rank 0, which is not in the comm (ranks 1, 3)"
    assert run_local(body, 4) == ["not in it", (None, wrong), "not in it", (True, wrong)]


def test_gather_that_cannot_be_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> list[str]:
        tensor = sharded("rows", torch.float32, comm)
        here = comm.rank == 1
        return [
            error_of(tensor.gather_to, 1, out=torch.empty(7, 5) if here else None),
            error_of(tensor.gather_to, 1, out=torch.empty(5, 7) if comm.rank in (1, 2) else None),
            error_of(tensor.gather_to, 4),
            error_of(tensor.gather_to, 0 if here else 1),
            error_of(tensor.full, max_buffer_bytes=100 if here else 200),
        ]

    shape, outside, missing, differing, limit = texts_of(body)
    assert shape == ("DisagreementError: 'gather': rank 1: Argument ``out`` has size (7, 5), but should be (5, 7)")
    assert "rank 2: Argument ``out`` must NOT be specified on non-destination ranks; dst is 1" in outside
    assert missing == "ValueError: gather to rank 4, which is not in the comm (ranks 0-3)"
    assert "dst is 1 on ranks 0, 2, 3 and 0 on rank 1" in differing
    assert "max_buffer_bytes is 200 on ranks 0, 2, 3 and 100 on rank 1" in limit


def test_gather_within_a_buffer_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes through buffers is within the limit; a run of memory travels straight, however long."""
    monkeypatch.setattr(execute, "staging_pool", pool := CountingPool())

    def body(comm: Comm) -> int:
        counting = CountingComm(comm)
        tensor = sharded("two boxes or none", torch.float64, counting)
        gathered = tensor.gather_to(1, max_buffer_bytes=64)
        assert gathered is None or same_bytes(gathered, values((5, 7), torch.float64))
        return len(counting.exchanges)

    (rounds,) = set(run_local(body, 4))
    assert rounds > 1
    assert 0 < pool.most <= 64 and set(pool.held.values()) == {0}


# Laying out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, FP8, torch.bool], ids=str)
def test_shard_to_every_layout_from_every_rank(dtype: torch.dtype) -> None:
    chosen = {name: layout for name, layout in MATRIX.items() if reducible(layout, dtype)}

    def body(comm: Comm) -> Any:
        whole, held = values((5, 7), dtype), {}
        for i, (name, layout) in enumerate(chosen.items()):
            for src in (None, i % 4, (i + 1) % 4):
                given = whole if src in (None, comm.rank) or i % 2 else None
                held[f"{src} to {name}"] = shard(given, layout.spec, src).local_tensors()
        assert same_bytes(whole, values((5, 7), dtype))
        return held

    held = run_local(body, 4)
    for key in held[0]:
        assert_holds(chosen[key.split(" to ")[1]], [rank[key] for rank in held], values((5, 7), dtype), key)


def test_shard_of_what_every_rank_holds_sends_nothing() -> None:
    def body(comm: Comm) -> Any:
        counting = CountingComm(comm)
        for layout in (*MATRIX.values(), *scalar_layouts().values()):
            shard(values(layout.shape, torch.float32), layout, None, comm=counting)
        silent = counting.exchanges == []
        shard(values((5, 7), torch.float32), MATRIX["rows"], 0, comm=counting)
        return silent, len(counting.exchanges)

    assert run_local(body, 4) == [(True, 1)] * 4


@pytest.mark.parametrize("source", [None, 0])
@pytest.mark.parametrize(
    "spec",
    [ChunkSpec(0, 2), ChunkSpec(0, (0,)), MeshSpec(Mesh.of(x=2), (Replicate(),)), MeshSpec(Mesh.of(x=2), (Shard(1),))],
    ids=["rows", "one rank", "everywhere", "columns"],
)
def test_shard_full_and_gather_give_memory_of_their_own_in_every_layout(spec: ShardingSpec, source: int | None) -> None:
    def body(comm: Comm) -> tuple[list[float], list[float], list[float]]:
        given = torch.zeros(2, 2).t()
        sharded = shard(given, spec, source)
        before, gathered = sharded.full(), sharded.gather_to(0)
        for local in sharded.local_tensors():
            assert local.is_contiguous()
            local.fill_(1.0)
        assert gathered is None or gathered.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        return given.flatten().tolist(), before.flatten().tolist(), sharded.full().flatten().tolist()

    for given, before, after in run_local(body, 2):
        assert given == before == [0.0] * 4 and after == [1.0] * 4


def test_shard_on_some_ranks() -> None:
    def body(comm: Comm) -> Any:
        if comm.rank == 0:
            return None
        pair = comm.subset((1, 2))
        return shard(torch.arange(3) if comm.rank == 2 else None, ChunkSpec(0, (2, 1)), 2, comm=pair).local_tensor()

    _, one, two = run_local(body, 3)
    assert (one.tolist(), two.tolist()) == ([2], [0, 1])


def test_shard_that_cannot_be_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> list[str]:
        here, whole = comm.rank == 2, torch.ones(4, 6)
        return [
            error_of(shard, whole, ChunkSpec(0, 4), 2 if here else 0),
            error_of(shard, whole, ChunkSpec(0, 4), 7),
            error_of(shard, None if here else whole, ChunkSpec(0, 4), 2),
            error_of(shard, None if here else whole, ChunkSpec(0, 4), None),
            error_of(shard, whole.t() if here else whole, ChunkSpec(0, 4)),
            error_of(shard, whole.double() if here else whole, ChunkSpec(0, 4)),
            error_of(shard, whole, ChunkSpec(1 if here else 0, 4)),
            error_of(shard, whole if comm.rank == 0 else None, ChunkSpec(1 if here else 0, 4)),
            error_of(shard, whole if comm.rank == 0 else None, ChunkSpec(3 if here else 0, 4)),
            error_of(shard, whole, ChunkSpec(0, 5)),
            error_of(shard, whole, GridSpec(((1, 2), 1), [[0], [1]])),
            error_of(shard, whole.clone().requires_grad_(here), ChunkSpec(0, 4), None),
        ]

    source, missing, none, nowhere, shape, dtype, spec, hidden, dim, ranks, sizes, grad = texts_of(body)
    assert "different src_ranks: 0 on ranks 0, 1, 3 and 2 on rank 2" in source
    assert "src_rank 7 is not in the comm (ranks 0-3)" in missing
    assert "rank 2: this rank has the data (src_rank=2) but passes no tensor" in none
    assert "rank 2: this rank has the data (src_rank=None) but passes no tensor" in nowhere
    assert "different shapes: [4, 6] on ranks 0, 1, 3 and [6, 4] on rank 2" in shape
    assert "different dtypes: torch.float32 on ranks 0, 1, 3 and torch.float64 on rank 2" in dtype
    assert "different specs: " in spec and "pass the same on every rank" in spec
    assert "the ranks pass different arguments: spec is" in hidden and "on rank 2; pass the same" in hidden
    assert "rank 2: ChunkSpec(dim=3): a tensor of shape (4, 6) has a dim from -2 to 1" in dim
    assert "the layout names rank 4, not in the comm (ranks 0-3)" in ranks
    assert "dim 0 of length 4 is split into sizes (1, 2), which must sum to 4" in sizes
    assert "different requires_grads: False on ranks 0, 1, 3 and True on rank 2" in grad


def test_local_tensors_that_do_not_fit_are_refused_on_every_rank() -> None:
    spec = ChunkSpec(0, (0, 1))

    def body(comm: Comm) -> list[str]:
        here, two = comm.rank == 1, torch.ones(2, 3)
        mixed = GridSpec(((1, 3), 1), [[0], [0]])
        own: Any = [] if comm.rank == 2 else two
        return [
            error_of(from_local, [] if here else own, spec, (4, 3)),
            error_of(from_local, torch.ones(2, 4) if here else own, spec, (4, 3)),
            error_of(from_local, own, spec),
            error_of(from_local, own, ChunkSpec(0, (0, 7)), (4, 3)),
            error_of(from_local, two.double() if here else own, spec, (4, 3)),
            error_of(from_local, own, ChunkSpec(0, (1, 0) if here else (0, 1)), (4, 3)),
            error_of(from_local, [torch.ones(1, 1), torch.ones(3, 1).half()] if comm.rank == 0 else [], mixed, (4, 1)),
            error_of(from_local, two.clone().requires_grad_(here) if comm.rank != 2 else [], spec, (4, 3)),
        ]

    count, shape, unshaped, ranks, dtype, spec_text, kinds, grad = texts_of(body, 3)
    assert "rank 1: the layout assigns this rank local tensors of shapes [(2, 3)], got []" in count
    assert "rank 1: the layout assigns this rank local tensors of shapes [(2, 3)], got [(2, 4)]" in shape
    assert "from_local with a spec needs the global shape; pass shape=, or a Layout" in unshaped
    assert "the layout names rank 7, not in the comm (ranks 0-2)" in ranks
    both = "torch.float32 on rank 0 and torch.float64 on rank 1"
    assert f"the ranks have different dtypes: {both}; convert them first" in dtype
    assert "the ranks pass different arguments: layout is" in spec_text
    assert f"rank 0: local tensors have one dtype and device, got ['torch.float16 on {torch.empty(0).device}'" in kinds
    assert "requires_grad is False on rank 0 and True on rank 1; every rank" in grad


def test_local_tensors_are_taken_without_a_copy_and_a_rank_without_any_knows_the_dtype() -> None:
    def body(comm: Comm) -> Any:
        own = [torch.ones(4, 3, dtype=torch.float16)] if comm.rank == 1 else []
        tensor = from_local(own, ChunkSpec(0, (1,)), (4, 3))
        assert all(a is b for a, b in zip(tensor.local_tensors(), own, strict=True))
        return tensor.dtype, tuple(tensor.shape), len(tensor.local_shards())

    assert run_local(body, 2) == [(torch.float16, (4, 3), 0), (torch.float16, (4, 3), 1)]


# As a tensor


def test_reshard_changes_this_very_tensor() -> None:
    def body(comm: Comm) -> Any:
        tensor = sharded("rows", torch.float32, comm)
        old, shards = tensor.local_tensors(), tensor.local_shards()
        before = [t.clone() for t in old]
        assert tensor.reshard(MATRIX["cyclic"].spec) is tensor
        assert tensor.sharding is MATRIX["cyclic"] and tensor.local_shards() is not shards
        assert all(map(same_bytes, old, before))
        assert tensor.metadata().shards_metadata != []
        wrong = error_of(tensor.reshard, MATRIX["rows"])
        return tensor.local_tensors(), wrong, not tensor.requires_grad

    results = run_local(body, 4)
    assert_holds(MATRIX["cyclic"], [held for held, _, _ in results], values((5, 7), torch.float32), "reshard")
    assert {wrong.split(",")[0] for _, wrong, _ in results} == {"ValueError: reshard takes a ShardingSpec"}
    assert all(off for _, _, off in results)


def test_reshard_in_a_cycle_of_three_ranks_and_to_another_dim() -> None:
    whole = torch.arange(7 * 5).reshape(7, 5)

    def body(comm: Comm) -> Any:
        tensor = shard(whole, ChunkSpec(0, 3))
        tensor.reshard(ChunkSpec(0, (1, 2, 0)))
        cycle = tensor.full()
        tensor.reshard(ChunkSpec(1, (2, 0, 1)))
        return torch.equal(cycle, whole) and torch.equal(tensor.full(), whole)

    assert run_local(body, 3) == [True] * 3


def test_shards_of_groups_are_views_of_one_local_tensor() -> None:
    def body(comm: Comm) -> Any:
        tensor = shard(values((16, 16), torch.float32), layouts(16, 16)["groups"], None)
        shards = tensor.local_shards()
        for piece in shards:
            piece.tensor.mul_(2)
        corners = [tuple(s.metadata.shard_offsets) for s in shards]
        return len(tensor.local_tensors()), corners, tensor.full()

    for count, corners, whole in run_local(body, 4):
        assert count == 1 and len(corners) == 2
        assert torch.equal(whole, 2 * values((16, 16), torch.float32))


def test_conversion_keeps_layout_and_values() -> None:
    def body(comm: Comm) -> Any:
        for name in ("rows", "two boxes or none", "sum", "max", "one rank"):
            tensor = sharded(name, torch.float32, comm)
            assert tensor.to(torch.float32) is tensor and tensor.to(comm.device) is tensor
            copied = tensor.to(torch.float32, copy=True)
            assert copied is not tensor and all(map(same_bytes, copied.local_tensors(), tensor.local_tensors()))
            wide = tensor.to(torch.float64)
            assert wide.dtype == torch.float64 and wide.sharding == tensor.sharding
            assert same_bytes(wide.full(), values((5, 7), torch.float64))
            if name != "max":
                assert tensor.to(device="cpu", dtype=torch.complex64).dtype == torch.complex64
            assert tensor.cpu().device == torch.device("cpu") and tensor.cpu().cpu().sharding == tensor.sharding
        assert sharded("max", torch.float32, comm).to(torch.int64).full().dtype == torch.int64
        other = comm.subset(comm.ranks)
        assert sharded("rows", torch.float32, comm).to(torch.float64, process_group=other).comm is other
        return [
            error_of(sharded("sum", torch.float32, comm).to, torch.int64),
            error_of(sharded("avg", torch.float32, comm).to, torch.bool),
            error_of(sharded("sum", torch.int64, comm).to, torch.bool),
            error_of(sharded("max", torch.float32, comm).to, torch.complex64),
        ]

    fractions, average, flags, order = texts_of(body)
    assert fractions == (
        "ValueError: addends of a pending sum converted from torch.float32 to torch.int64 do not yield the converted "
        "value; redistribute to Shard or Replicate first"
    )
    assert "a pending sum / 4 converted" in average and "from torch.int64 to torch.bool" in flags
    assert "a pending max converted from torch.float32 to torch.complex64" in order


def test_copy_between_layouts_and_from_a_plain_tensor() -> None:
    def body(comm: Comm) -> Any:
        held = []
        for name in MATRIX:
            for source in (sharded("cyclic", torch.float32, comm), values((5, 7), torch.int64)):
                target = shard(torch.zeros(5, 7), MATRIX[name], None)
                own = target.local_tensors()
                assert target.copy_(source) is target
                assert all(a is b for a, b in zip(target.local_tensors(), own, strict=True))
                held.append(own)
        wrong = error_of(target.copy_, torch.zeros(7, 5))
        plain = torch.zeros(5, 7)
        assert plain.copy_(target) is plain
        assert torch.equal(plain, values((5, 7), torch.float32))
        return held, wrong

    results = run_local(body, 4)
    for i, (name, layout) in enumerate(MATRIX.items()):
        for j in (2 * i, 2 * i + 1):
            assert_holds(layout, [held[j] for held, _ in results], values((5, 7), torch.float32), f"copy_ to {name}")
    expected = "ValueError: copy_ needs equal shapes, or one that broadcasts, got (5, 7) and (7, 5)"
    assert {wrong for _, wrong in results} == {expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_equality_between_layouts_is_one_answer_on_all_ranks(dtype: torch.dtype) -> None:
    def body(comm: Comm) -> Any:
        one, two = sharded("rows", dtype, comm), sharded("two boxes or none", dtype, comm)
        whole = values((5, 7), dtype)
        odd = whole.clone()
        odd[4, 6] = ~odd[4, 6] if dtype == torch.bool else odd[4, 6] + 1
        other = shard(odd, MATRIX["grid"], None)
        small = shard(whole[:, :3], ChunkSpec(0, 4), None)
        return [
            torch.equal(one, two),
            two.equal(one),
            torch.equal(one, whole),
            torch.equal(whole, two),
            torch.equal(one, other),
            torch.equal(other, two),
            torch.equal(one, small),
        ]

    assert run_local(body, 4) == [[True, True, True, True, False, False, False]] * 4


def test_closeness_between_layouts() -> None:
    def body(comm: Comm) -> Any:
        one = sharded("rows", torch.float64, comm)
        near = shard(values((5, 7), torch.float64) + 1e-3, MATRIX["cyclic"], None)
        pending = sharded("sum", torch.float64, comm)
        whole = shard(values((5, 7), torch.float64), MATRIX["cyclic"], None)
        assert torch.allclose(pending, whole) and torch.equal(whole, pending.clone())
        assert not torch.allclose(pending, near) and not torch.allclose(near, pending)
        alone = sharded("one rank", torch.float32, comm)
        with pytest.raises(RuntimeError, match="Float did not match Double"):
            torch.allclose(alone, near)
        return [
            torch.allclose(one, near),
            torch.allclose(one, near, 0.0, 1e-2),
            torch.allclose(near, one, atol=1e-2),
            one.allclose(near, rtol=0.0, atol=1e-2),
            torch.allclose(one, pending),
        ]

    assert run_local(body, 4) == [[False, True, True, True, True]] * 4


def test_detach_shares_memory_and_clone_does_not() -> None:
    def body(comm: Comm) -> None:
        tensor = sharded("two boxes or none", torch.float32, comm).requires_grad_()
        off, copied = tensor.detach(), tensor.clone()
        assert off.sharding is tensor.sharding and not off.requires_grad and tensor.requires_grad
        assert copied.sharding is tensor.sharding and copied.requires_grad and not copied.is_leaf
        for a, b, c in zip(tensor.local_tensors(), off.local_tensors(), copied.local_tensors(), strict=True):
            assert a.data_ptr() == b.data_ptr() and (a.data_ptr() != c.data_ptr() or a.numel() == 0)
            assert same_bytes(a, c)
        assert isinstance(torch.clone(tensor), ShardedTensor) and isinstance(torch.detach(tensor), ShardedTensor)

    run_local(body, 4)


def test_the_text_of_a_tensor_says_what_is_where_and_shows_no_data() -> None:
    def body(comm: Comm) -> tuple[str, str]:
        tensor = shard(torch.full((4, 3), 77.0), ChunkSpec(0, (0, 1)), None)
        return repr(tensor), str(tensor.requires_grad_())

    held = run_local(body, 3)
    where = "f32[4,3] as chunk(0) over 0-1"
    assert held[0] == (
        f"ShardedTensor({where}, rank 0 holds (2, 3))",
        f"ShardedTensor({where}, rank 0 holds (2, 3), requires_grad=True)",
    )
    assert held[2][0] == f"ShardedTensor({where}, rank 2 holds nothing)"
    assert not any("77" in text for texts in held for text in texts)


def test_what_a_tensor_says_of_itself() -> None:
    def body(comm: Comm) -> None:
        layout: Layout = MATRIX["two boxes or none"]
        tensor = sharded("two boxes or none", torch.bfloat16, comm)
        assert tensor.shape == tensor.size() == tensor.shard_size() == (5, 7)
        assert (tensor.dtype, tensor.device, tensor.numel(), tensor.dim()) == (
            torch.bfloat16,
            comm.device,
            35,
            2,
        )
        assert tensor.sharding is layout and tensor.sharding_spec() is layout.spec and tensor.placements is None
        assert len({tensor, tensor, tensor.detach()}) == 2
        count = len(layout.local_shapes(comm.rank))
        assert len(tensor.local_shards()) == len(tensor.local_tensors()) == count
        if count != 1:
            with pytest.raises(NotImplementedError, match=f"Number of shards: {count}; use local_tensors()"):
                tensor.local_tensor()
        else:
            assert tensor.local_tensor() is tensor.local_tensors()[0]

    run_local(body, 4)


def test_a_fresh_tensor_is_laid_out_and_checked() -> None:
    def body(comm: Comm) -> list[str]:
        tensor = ShardedTensor(ChunkSpec(0, 4), 6, 3, dtype=torch.int32)
        assert tuple(t.shape for t in tensor.local_tensors()) == tensor.sharding.local_shapes(comm.rank)
        assert ShardedTensor(ChunkSpec(0, 4), (6, 3), requires_grad=True).requires_grad
        return [
            error_of(ShardedTensor, 7, 6, 3),
            error_of(ShardedTensor, "rows", 6, 3),
            error_of(ShardedTensor, ChunkSpec(0, 4), 6, layout=torch.sparse_coo),
            error_of(ShardedTensor, ChunkSpec(0, 4), 6, memory_format=torch.channels_last),
            error_of(ShardedTensor, ChunkSpec(0, 5), 6),
        ]

    spec, notation, strided, memory, ranks = texts_of(body)
    assert spec.startswith("ValueError: Expecting ShardingSpec but got: <class 'int'>; the spec comes first")
    assert notation.startswith("NotationError: expected S(dim), R or P")
    assert "Only torch.strided layout is currently supported, got torch.sparse_coo" in strided
    assert "Only torch.contiguous_format memory_format is currently supported" in memory
    assert "Global rank 4 does not exist in input process group: it has ranks 0-3" in ranks
    with pytest.raises(TypeError, match="size has to be a sequence of ints"):
        ShardedTensor(ChunkSpec(0, 1), 2.5)


def test_placements_of_a_mesh() -> None:
    spec = MeshSpec(Mesh.of(dp=1, tp=1), (Shard(0), Partial("max")))
    assert from_local(torch.ones(2), spec, (2,)).placements == (Shard(0), Partial("max"))
    assert from_local(torch.ones(2), spec, (2,)).redistribute("R, R").placements == (Replicate(), Replicate())
