"""Every kind of layout to every other, in every dtype, all ranks in one process: exact by a function of the index."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise
from shardwise.comm import Comm, DisagreementError, run_local
from shardwise.geometry import (
    Box,
    ChunkSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Replicate,
    RowOwners,
    Shard,
)
from shardwise.geometry import ShardingSpec as Spec
from shardwise.tensor import ShardedTensor, execute, from_local, redistribute_many, shard
from shardwise.tensor.execute import start_moves
from shardwise.tensor.move import Move
from shardwise.testing.strategies import layout_pairs
from tests.moving import (
    DTYPES,
    FP8,
    LINE,
    CountingComm,
    CountingPool,
    LendingCountingComm,
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


def sharded(layout: Layout, dtype: torch.dtype, comm: Comm) -> ShardedTensor:
    """This rank's part of the tensor that is filled by a function of the index."""
    return from_local(local_parts(layout, comm.rank, values(layout.shape, dtype)), layout, comm=comm)


def every_pair(comm: Comm, chosen: Mapping[str, Layout], dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Move from each layout to each other; check that the source is as it was."""
    held = {}
    for there, src in chosen.items():
        tensor = sharded(src, dtype, comm)
        before = [t.clone() for t in tensor.local_tensors()]
        for here, dst in chosen.items():
            moved = tensor.redistribute(dst)
            assert moved.sharding == dst and moved.dtype == dtype and moved.shape == src.shape
            held[f"{there} -> {here}"] = moved.local_tensors()
        assert all(map(same_bytes, tensor.local_tensors(), before)), f"{there}: the source was changed"
    return held


def assert_every_pair(chosen: Mapping[str, Layout], dtype: torch.dtype) -> None:
    held = run_local(every_pair, 4, chosen, dtype)
    for there in chosen:
        for here, dst in chosen.items():
            name = f"{there} -> {here}"
            assert_holds(dst, [rank[name] for rank in held], values(dst.shape, dtype), f"{dtype} {name}")


def fitting(chosen: Mapping[str, Layout], dtype: torch.dtype) -> dict[str, Layout]:
    return {name: layout for name, layout in chosen.items() if reducible(layout, dtype)}


def test_the_check_can_fail() -> None:
    layout, whole = MATRIX["grid"], values((5, 7), torch.float32)
    held = [local_parts(layout, rank, whole) for rank in range(4)]
    assert_holds(layout, held, whole, "as made")
    held[3][0][-1, -1] += 1
    with pytest.raises(AssertionError, match="rank 3 is wrong in"):
        assert_holds(layout, held, whole, "one element")
    layout = MATRIX["avg"]
    held = [local_parts(layout, rank, whole) for rank in range(4)]
    assert_holds(layout, held, whole, "as made")
    held[2][0][0, 0] += 4
    with pytest.raises(AssertionError, match="do not reduce"):
        assert_holds(layout, held, whole, "one addend")


def test_every_pair_of_layouts() -> None:
    assert_every_pair(MATRIX, torch.float32)


def every_pair_at_once(comm: Comm, dtypes: Sequence[torch.dtype]) -> dict[str, list[tuple[Tensor, ...]]]:
    """Move from each layout to each other, one tensor of each dtype in the same exchange."""
    held = {}
    for there, src in MATRIX.items():
        able = [dtype for dtype in dtypes if reducible(src, dtype)]
        tensors = {dtype: sharded(src, dtype, comm) for dtype in able}
        for here, dst in MATRIX.items():
            chosen = [tensors[dtype] for dtype in able if reducible(dst, dtype)]
            moved = redistribute_many(chosen, [dst] * len(chosen))
            held[f"{there} -> {here}"] = [t.local_tensors() for t in moved]
    return held


def test_every_pair_of_layouts_in_every_dtype() -> None:
    others = [dtype for dtype in DTYPES if dtype != torch.float32]
    held = run_local(every_pair_at_once, 4, others)
    for there, src in MATRIX.items():
        for here, dst in MATRIX.items():
            name = f"{there} -> {here}"
            able = [dtype for dtype in others if reducible(src, dtype) and reducible(dst, dtype)]
            assert [len(rank[name]) for rank in held] == [len(able)] * 4
            for i, dtype in enumerate(able):
                assert_holds(dst, [rank[name][i] for rank in held], values((5, 7), dtype), f"{dtype} {name}")


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (4, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, FP8], ids=str)
def test_every_pair_of_short_and_empty_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    every = fitting(layouts(*shape), dtype)
    few = ("rows permuted", "a rank three times", "grid", "two boxes or none", "groups", "replicated columns", "sum")
    assert_every_pair({name: every[name] for name in few}, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pair_of_layouts_without_dims(dtype: torch.dtype) -> None:
    assert_every_pair(fitting(scalar_layouts(), dtype), dtype)


@settings(max_examples=60)
@given(layout_pairs(ranks=4, pending=True), st.sampled_from([None, 64, 1000]))
def test_random_pairs_with_and_without_a_limit(pair: tuple[Layout, Layout], limit: int | None) -> None:
    src, dst = pair

    def body(comm: Comm) -> tuple[Tensor, ...]:
        moved: ShardedTensor = sharded(src, torch.float64, comm).redistribute(dst, max_buffer_bytes=limit)
        return moved.local_tensors()

    try:
        held = run_local(body, 4)
    except LayoutError as error:
        assert limit == 64 and "is too small" in str(error)
        return
    assert_holds(dst, held, values(dst.shape, torch.float64), f"{src} -> {dst}")


def test_bits_that_are_no_numbers_survive() -> None:
    whole = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    nans = torch.full((16, 16), float("nan")).view(torch.int32).add(torch.arange(256).reshape(16, 16).int())

    def body(comm: Comm) -> Any:
        held = []
        for bits in (whole.view(FP8), nans.view(torch.float32)):
            src = layouts(16, 16)["cyclic"]
            tensor = from_local(local_parts(src, comm.rank, bits), src)
            held.append(tensor.redistribute(layouts(16, 16)["two boxes or none"]).local_tensors())
        return held

    held, dst = run_local(body, 4), layouts(16, 16)["two boxes or none"]
    assert_holds(dst, [rank[0] for rank in held], whole.view(FP8), "fp8")
    assert_holds(dst, [rank[1] for rank in held], nans.view(torch.float32), "NaN payloads")


class RowsOfEveryOther(Spec):
    """A user's own rule: row i on rank i modulo 2."""

    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        return [Piece(Box((i, 0), (1, shape[1])), i % 2) for i in range(shape[0])]


def test_a_users_own_spec_is_as_good_as_ours() -> None:
    spec = RowsOfEveryOther()

    def body(comm: Comm) -> Any:
        moved = sharded(MATRIX["cyclic"], torch.float32, comm).redistribute(spec)
        assert moved.sharding_spec() is spec
        return moved.local_tensors(), moved.redistribute(MATRIX["grid"]).local_tensors()

    held, whole = run_local(body, 4), values((5, 7), torch.float32)
    assert_holds(spec.layout((5, 7)), [rank[0] for rank in held], whole, "there")
    assert_holds(MATRIX["grid"], [rank[1] for rank in held], whole, "and back")


def test_placements_and_notation_on_the_tensors_own_mesh() -> None:
    def body(comm: Comm) -> Any:
        tensor = sharded(MATRIX["replicated columns"], torch.float32, comm)
        return tensor.redistribute((Shard(0), Replicate())), tensor.redistribute("S(0), R")

    for one, two in run_local(body, 4):
        assert one.placements == two.placements == (Shard(0), Replicate())
        assert torch.equal(one.local_tensor(), two.local_tensor())


def test_a_text_that_was_read_before_is_read_for_each_tensors_own_mesh_shape_and_dtype() -> None:
    square, line = Mesh.of(dp=2, tp=2), Mesh.of(tp=4)

    def body(comm: Comm) -> Any:
        found = []
        for _ in range(2):
            for mesh in (square, line):
                for shape in ((4, 8), (8, 4)):
                    held = shard(torch.zeros(shape), MeshSpec(mesh, [Replicate()] * mesh.ndim))
                    moved = held.redistribute("tp: S(0)")
                    found.append((moved.sharding.spec.mesh, moved.local_tensor().shape))  # type: ignore[attr-defined]
                    held.redistribute("f32[4,8] on tp=4: S(1)") if shape == (4, 8) else None
            with pytest.raises(LayoutError, match=r"the text says f32\[4,8\], and the tensor is f64\[4,8\]"):
                shard(torch.zeros(4, 8).double(), "on tp=4: R").redistribute("f32[4,8] on tp=4: S(1)")
            with pytest.raises(LayoutError, match=r"the text says f32\[4,8\], and the tensor is f32\[8,4\]"):
                shard(torch.zeros(8, 4), "on tp=4: R").redistribute("f32[4,8] on tp=4: S(1)")
        return found

    for found in run_local(body, 4):
        assert found == 2 * [(square, (2, 8)), (square, (4, 4)), (line, (1, 8)), (line, (2, 4))]


LIMITED = ("columns", "rows permuted", "a rank three times", "two boxes or none", "replicated", "sum", "avg")


@pytest.mark.parametrize("counted", [CountingComm, LendingCountingComm])
@pytest.mark.parametrize("limit", [48, 60, 200, 1 << 20])
def test_a_buffer_limit_changes_nothing_and_is_kept(
    limit: int, counted: type[CountingComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: MATRIX[name] for name in LIMITED}
    monkeypatch.setattr(execute, "staging_pool", pool := CountingPool())

    def body(comm: Comm) -> Any:
        counting, held = counted(comm), {}
        for there, src in chosen.items():
            for here, dst in chosen.items():
                moved = sharded(src, torch.float32, counting).redistribute(dst, max_buffer_bytes=limit)
                held[f"{there} -> {here}"] = moved.local_tensors()
        return held, counting.exchanges

    results = run_local(body, 4)
    for there in chosen:
        for here, dst in chosen.items():
            name = f"{there} -> {here}"
            assert_holds(dst, [held[name] for held, _ in results], values((5, 7), torch.float32), f"{limit}: {name}")
    assert set(pool.held.values()) <= {0} and pool.most <= limit
    assert (pool.most == 0) == (counted is LendingCountingComm), "where ranks read each other's memory there are none"
    rounds = sum(len(exchanges) for _, exchanges in results)
    assert limit > 60 or rounds > 4 * len(chosen) ** 2, "a small limit takes more rounds"


ROWS, COLUMNS, WHOLE, ADDENDS = (
    MeshSpec(LINE, (placement,)).layout((64, 64)) for placement in (Shard(0), Shard(1), Replicate(), Partial("sum"))
)


@pytest.mark.parametrize(
    ("src", "dst", "rounds"),
    [(ROWS, WHOLE, (1, 16)), (COLUMNS, WHOLE, (7, 16)), (ROWS, COLUMNS, (2, 4)), (ADDENDS, WHOLE, (9, 32))],
    ids=["rows -> whole", "columns -> whole", "rows -> columns", "addends -> whole"],
)
def test_only_what_passes_through_buffers_takes_rounds(src: Layout, dst: Layout, rounds: tuple[int, int]) -> None:
    """With an eighth of the whole as the limit; the second number is for tensors that lie transposed in memory."""

    def body(comm: Comm) -> Any:
        counting, found = CountingComm(comm), []
        for strided in (False, True):
            tensor = sharded(src, torch.float32, counting)
            with shardwise.no_communication():
                tensor = tensor.t().contiguous().t() if strided else tensor
            assert (tensor._dense_strides is not None) == strided
            before = len(counting.exchanges)
            moved = tensor.redistribute(dst, max_buffer_bytes=64 * 64 * 4 // 8)
            found.append((len(counting.exchanges) - before, moved.local_tensors()))
        return found

    results = run_local(body, 4)
    for strided in (0, 1):
        assert_holds(dst, [found[strided][1] for found in results], values((64, 64), torch.float32), str(strided))
    assert tuple(found[0] for found in results[0]) == rounds


def test_many_tensors_share_a_buffer_limit() -> None:
    def body(comm: Comm) -> Any:
        counting = CountingComm(comm)
        tensors = [sharded(MATRIX["rows"], torch.float32, counting) for _ in range(3)]
        moved = redistribute_many(tensors, [MATRIX["columns"]] * 3, max_buffer_bytes=96)
        return [t.local_tensors() for t in moved], max(nbytes for _, nbytes in counting.exchanges)

    results = run_local(body, 4)
    for i in range(3):
        assert_holds(MATRIX["columns"], [held[i] for held, _ in results], values((5, 7), torch.float32), f"tensor {i}")
    assert max(most for _, most in results) <= 96


def test_a_limit_below_one_element_per_message_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> str:
        counting = CountingComm(comm)
        tensor = sharded(MATRIX["rows"], torch.float32, counting)
        text = error_of(tensor.redistribute, MATRIX["columns"], max_buffer_bytes=3)
        assert counting.exchanges == []
        return text

    texts = run_local(body, 4)
    assert len(set(texts)) == 1
    assert "max_buffer_bytes=3 is too small: a rank exchanges up to 3 messages" in texts[0]


MIXED = [("rows", "columns"), ("ragged", "cyclic"), ("sum", "replicated"), ("one rank", "grid"), ("avg", "max")]


def many(comm: Comm, counted: type[CountingComm], at_once: bool) -> Any:
    counting = counted(comm)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float32)
    tensors = [sharded(MATRIX[there], dtype, counting) for (there, _), dtype in zip(MIXED, dtypes, strict=True)]
    targets = [MATRIX[here] for _, here in MIXED]
    if at_once:
        moved = redistribute_many(tensors, targets)
    else:
        moved = [t.redistribute(target) for t, target in zip(tensors, targets, strict=True)]
    return [t.local_tensors() for t in moved], [label for label, _ in counting.exchanges]


@pytest.mark.parametrize("counted", [CountingComm, LendingCountingComm])
def test_many_at_once_equal_one_by_one_in_one_exchange_per_step(counted: type[CountingComm]) -> None:
    for (once, labels), (singly, single_labels) in zip(
        run_local(many, 4, counted, True), run_local(many, 4, counted, False), strict=True
    ):
        assert all(map(same_bytes, sum(once, ()), sum(singly, ())))
        assert labels == ["redistribute_many"] * 2, "one exchange for each of the two steps of a replicated reduction"
        assert single_labels == ["redistribute"] * 6


def test_many_at_once_disagreeing_or_impossible_is_told_to_every_rank() -> None:
    def body(comm: Comm) -> list[str]:
        one, two = sharded(MATRIX["rows"], torch.float32, comm), sharded(MATRIX["sum"], torch.int64, comm)
        flags = sharded(MATRIX["rows"], torch.bool, comm)
        target = MATRIX["grid"] if comm.rank == 2 else MATRIX["columns"]
        wrong = "S(0)" if comm.rank == 1 else MATRIX["columns"]
        return [
            error_of(redistribute_many, [one, two], [MATRIX["rows"], target]),
            error_of(redistribute_many, [one, two], [MATRIX["columns"], wrong]),
            error_of(redistribute_many, [one, flags], [MATRIX["columns"], MATRIX["sum"]]),
            error_of(redistribute_many, [one], [ChunkSpec(0, (3, 4))]),
            error_of(redistribute_many, [one, two], [target] if comm.rank == 0 else [target, target]),
        ]

    moves, unplaced, undefined, outside, counts = zip(*run_local(body, 4), strict=True)
    assert len(set(moves)) == len(set(unplaced)) == len(set(undefined)) == len(set(outside)) == len(set(counts)) == 1
    assert moves[0].startswith("DisagreementError: 'redistribute_many': the ranks pass different arguments: moves is")
    assert "rank 1: " in unplaced[0]
    assert "a pending sum of bool values is not defined" in undefined[0]
    assert "the layout names rank 4, not in the comm (ranks 0-3)" in outside[0]
    assert "rank 0: redistribute_many takes a target for each tensor, got 2 tensors and 1 target" in counts[0]


def test_nothing_to_move() -> None:
    assert redistribute_many([], []) == []
    assert redistribute_many([], [], async_op=True).wait() == []


def test_handles_complete_once_and_in_flight_together() -> None:
    def body(comm: Comm) -> Any:
        one, two = sharded(MATRIX["rows"], torch.float32, comm), sharded(MATRIX["avg"], torch.float64, comm)
        first = one.redistribute(MATRIX["columns"], async_op=True)
        second = two.redistribute(MATRIX["grid of replicas"], async_op=True)
        third = redistribute_many([one, one], [MATRIX["cyclic"], MATRIX["grid"]], async_op=True)
        moved = first.wait()
        assert moved is first.wait() and isinstance(moved, ShardedTensor)
        return [t.local_tensors() for t in (moved, second.wait(), *third.wait())]

    held = run_local(body, 4)
    for i, name in enumerate(("columns", "grid of replicas", "cyclic", "grid")):
        dtype = torch.float64 if i == 1 else torch.float32
        assert_holds(MATRIX[name], [rank[i] for rank in held], values((5, 7), dtype), name)


def test_a_handle_in_several_rounds() -> None:
    def body(comm: Comm) -> Any:
        tensor = sharded(MATRIX["rows"], torch.float32, comm)
        return tensor.redistribute(MATRIX["columns"], async_op=True, max_buffer_bytes=48).wait().local_tensors()

    assert_holds(MATRIX["columns"], run_local(body, 4), values((5, 7), torch.float32), "async")


REFUSED = [
    ("sum", torch.bool, "a pending sum of bool values is not defined; use Partial('max') for any, Partial('min')"),
    ("avg", torch.bool, "a pending sum of bool values is not defined"),
    ("max", torch.complex64, "a pending max of complex values (torch.complex64) is not defined; use Partial('sum')"),
    ("min", torch.complex64, "a pending min of complex values (torch.complex64) is not defined"),
    ("product", torch.bool, "a pending product of bool values is not defined"),
    ("avg", torch.int64, "a pending average of torch.int64 values does not stay in torch.int64; convert to a floating"),
]


@pytest.mark.parametrize(("name", "dtype", "text"), REFUSED)
def test_reductions_that_are_not_defined_are_refused_on_every_rank(name: str, dtype: torch.dtype, text: str) -> None:
    pending = MATRIX[name]

    def body(comm: Comm) -> list[str]:
        blank = [torch.zeros(s, dtype=dtype) for s in pending.local_shapes(comm.rank)]
        into = sharded(MATRIX["rows"], dtype, comm)
        return [
            error_of(from_local(blank, pending).redistribute, MATRIX["rows"]),
            error_of(into.redistribute, pending),
            error_of(from_local(blank, pending).full),
            error_of(from_local(blank, pending).gather_to, 0),
        ]

    for found in zip(*run_local(body, 4), strict=True):
        assert len(set(found)) == 1 and text in found[0]


def test_moves_the_ranks_disagree_on_are_refused_on_every_rank() -> None:
    def body(comm: Comm) -> list[str]:
        tensor = sharded(MATRIX["rows"], torch.float32, comm)
        odd = comm.rank == 3
        own = MATRIX["rows permuted"] if odd else MATRIX["rows"]
        other = from_local(local_parts(MATRIX["rows"], comm.rank, values((5, 7), torch.float32)), MATRIX["rows"])
        other.sharding = own
        return [
            error_of(tensor.redistribute, MATRIX["columns" if odd else "grid"]),
            error_of(tensor.redistribute, MATRIX["grid"], max_buffer_bytes=100 if odd else 200),
            error_of(tensor.redistribute, "S(0)" if odd else MATRIX["grid"]),
            error_of(tensor.redistribute, ChunkSpec(2, 4)),
            error_of(tensor.redistribute, MeshSpec(Mesh.of(tp=6), (Shard(0),))),
            error_of(other.redistribute, MATRIX["grid"]),
        ]

    results = run_local(body, 4)
    assert all(found == results[0] for found in results)
    to, limit, placed, dim, ranks, source = results[0]
    assert to.startswith("DisagreementError: 'redistribute': the ranks pass different arguments: to is ")
    assert "max_buffer_bytes is 200 on ranks 0-2 and 100 on rank 3" in limit
    assert "rank 3: placements need a mesh, and this tensor is laid out by ChunkSpec" in placed
    assert "ChunkSpec(dim=2): a tensor of shape (5, 7) has a dim from -2 to 1" in dim
    assert "the layout names ranks 4, 5, not in the comm (ranks 0-3)" in ranks
    assert "from is " in source


def test_many_pieces_are_compared_between_ranks() -> None:
    rows = MeshSpec(LINE, (Shard(0, block=1),)).layout((300, 2))
    odd = MeshSpec(Mesh(("tp",), (1, 0, 2, 3)), (Shard(0, block=1),)).layout((300, 2))
    assert len(rows.table) > 64

    def body(comm: Comm) -> Any:
        tensor = sharded(ChunkSpec(1, 2).layout((300, 2)), torch.int64, comm)
        text = error_of(tensor.redistribute, odd if comm.rank == 2 else rows)
        return text, tensor.redistribute(rows).local_tensors()

    results = run_local(body, 4)
    assert {text.split(":")[0] for text, _ in results} == {"DisagreementError"}
    assert_holds(rows, [held for _, held in results], values((300, 2), torch.int64), "many pieces")


def test_targets_that_are_none() -> None:
    tensor = from_local(torch.ones(2, 3), ChunkSpec(0, 1), (2, 3))
    with pytest.raises(LayoutError, match="a tensor of shape \\(2, 3\\) cannot take a layout of shape \\(3, 2\\)"):
        tensor.redistribute(ChunkSpec(0, 1).layout((3, 2)))
    on_mesh = from_local(torch.ones(2, 3), MeshSpec(Mesh.of(tp=1), (Partial("sum"),)), (2, 3))
    with pytest.raises(TypeError, match=r"takes a spec, a Layout, placements .*; got int: 3"):
        on_mesh.redistribute(3)
    assert issubclass(LayoutError, ValueError) and issubclass(DisagreementError, ValueError)


def ask_for_what_is_not_one(comm: Comm) -> list[str]:
    whole: Any = values((5, 7), torch.float32)
    rows = sharded(MATRIX["rows"], torch.float32, comm)
    nonsense: Any = 5
    with pytest.raises(TypeError) as caught:
        redistribute_many([rows, whole], [MATRIX["columns"]] * 2)
    return [
        error_of(shard, whole, nonsense),
        error_of(shard, whole.tolist(), MATRIX["rows"]),
        error_of(shard, rows, MATRIX["rows"]),
        error_of(shard, whole[1:], MATRIX["rows"]),
        error_of(rows.redistribute, MATRIX["columns"], max_buffer_bytes="1 MB"),
        error_of(rows.redistribute, MATRIX["columns"], max_buffer_bytes=0),
        str(caught.value),
    ]


def test_arguments_of_the_wrong_kind_are_named() -> None:
    texts = run_local(ask_for_what_is_not_one, 4)
    assert all(found == texts[0] for found in texts)
    spec, data, again, shape, limit, zero, many = texts[0]
    assert [text.split(":")[0] for text in texts[0][:3]] == ["TypeError"] * 3
    assert {text.split(":")[0] for text in texts[0][3:6]} == {"LayoutError"}
    assert "a mesh and placements, got int: 5" in spec
    assert "shard takes a whole tensor, got list" in data
    assert "shard takes a whole tensor, got ShardedTensor; use its redistribute()" in again
    assert "a tensor of shape (4, 7) cannot take a layout of shape (5, 7)" in shape
    assert "max_buffer_bytes is a positive number of bytes or None, got '1 MB'" in limit
    assert "max_buffer_bytes is a positive number of bytes or None, got 0" in zero
    assert "redistribute_many: moves ShardedTensors, got Tensor; make one with shard() or from_local()" in many


# Moves as values


def test_a_move_is_kept_on_its_comm_with_its_dual() -> None:
    rows, columns, renamed = (MATRIX["rows"], MATRIX["columns"], MeshSpec(Mesh.of(x=4), (Shard(1),)).layout((5, 7)))
    comms: list[weakref.ref[Comm]] = []

    def body(comm: Comm) -> None:
        comms.append(weakref.ref(comm))
        move = Move.of(rows, columns, comm, torch.float32, "m")
        assert Move.of(rows, columns, comm, torch.float32, "m") is move and move.dual.dual is move
        assert (move.dual.src, move.dual.dst, move.dual.label) == (columns, rows, "m (backward)")
        others = [
            Move.of(rows, columns, comm, torch.float32, "n"),
            Move.of(rows, columns, comm, torch.float64, "m"),
            Move.of(rows, columns, comm, torch.float32, "m", limit=4),
            Move.of(rows, columns, comm, torch.float32, "m", scale=(2, 1)),
            Move.of(rows, renamed, comm, torch.float32, "m"),
        ]
        assert all(other is not move for other in others) and others[2].limit == 4 and move.limit is None
        assert renamed == columns and others[4].dst.spec is renamed.spec  # a plan is shared, the words are not

    run_local(body, 4)
    gc.collect()
    assert not any(comm() is not None for comm in comms)


def test_a_move_of_a_layout_that_depends_on_data_is_not_kept() -> None:
    mesh = Mesh.of(x=2)
    src = MeshSpec(mesh, (Shard(0),)).layout((4, 3))
    dst = MeshSpec(mesh, (Shard(0, owners=RowOwners([1, 0, 1, 0])),)).layout((4, 3))

    def body(comm: Comm) -> tuple[list[float], int]:
        tensor = sharded(src, torch.float32, comm)
        before = len(comm.__dict__.get("moves", ()))
        moved = tensor.redistribute(dst)
        return moved.local_tensor()[:, 0].tolist(), len(comm.__dict__.get("moves", ())) - before

    assert run_local(body, 2) == [([3.0, 9.0], 0), ([0.0, 6.0], 0)]


def test_results_of_running_moves_are_taken_once() -> None:
    def body(comm: Comm) -> None:
        held = [sharded(MATRIX[name], torch.float32, comm) for name in ("rows", "grid")]
        moves = [Move.of(t.sharding, MATRIX["columns"], comm, t.dtype, "m") for t in held]
        running = start_moves(moves, [t.local_parts for t in held])
        second = running.take(1)
        assert second is not None and running.take(1) is None and running.wait()[1] is None
        assert all(map(torch.equal, running.wait()[0], second)) and running.take(0) is not None

    run_local(body, 4)
