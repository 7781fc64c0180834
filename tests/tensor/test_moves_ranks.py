"""Moves between real processes over gloo: some of every kind, exact, with and without shared host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from shardwise.comm import ProcessGroupComm
from shardwise.geometry import ChunkSpec, Layout, Mesh, MeshSpec, Partial, Shard
from shardwise.tensor import from_local, redistribute_many, shard
from shardwise.tensor.move import find_move
from tests.device import PLACE
from tests.moving import (
    DTYPES,
    assert_holds,
    error_of,
    layouts,
    local_parts,
    reducible,
    same_bytes,
    scalar_layouts,
    values,
)
from tests.world import Ranks, world_fixture

world = world_fixture(4)
both_transports = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
SHAPE = (37, 29)
MATRIX = layouts(*SHAPE)
PAIRS = [
    ("rows", "columns"),
    ("columns", "rows permuted"),
    ("rows", "rows permuted"),
    ("rows permuted", "a rank three times"),
    ("ragged", "two boxes or none"),
    ("two boxes or none", "grid"),
    ("grid of replicas", "replicated columns"),
    ("rows", "replicated"),
    ("replicated", "one rank"),
    ("one rank", "replicated"),
    ("other ranks", "cyclic"),
    ("groups", "rows twice, inside out"),
    ("rows twice", "rows twice, inside out"),
    ("sum", "rows"),
    ("avg", "replicated"),
    ("max", "two boxes or none"),
    ("min", "sum"),
    ("cyclic", "avg"),
    ("product", "columns"),
]
Held = list[tuple[Tensor, ...]]
Packed = list[list[tuple[bytes, tuple[int, ...]]]]
_comms: dict[bool, ProcessGroupComm] = {}


def comm_for(shared: bool) -> ProcessGroupComm:
    """One comm per transport, kept over the life of the rank."""
    if shared not in _comms:
        _comms[shared] = ProcessGroupComm(timeout=60, shared_memory=shared)
    return _comms[shared]


def pairs_of(dtype: torch.dtype) -> list[tuple[Layout, Layout]]:
    found = [(MATRIX[there], MATRIX[here]) for there, here in PAIRS]
    return [(src, dst) for src, dst in found if reducible(src, dtype) and reducible(dst, dtype)]


def packed(tensors: Sequence[Tensor]) -> list[tuple[bytes, tuple[int, ...]]]:
    """Bytes and shapes, since plain pickle does not take every dtype."""
    return [(t.reshape(-1).view(torch.uint8).cpu().numpy().tobytes(), tuple(t.shape)) for t in tensors]


def unpacked(parts: Sequence[tuple[bytes, tuple[int, ...]]], dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.frombuffer(bytearray(data), dtype=torch.uint8).to(PLACE).view(dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype)
        for data, shape in parts
    ]


def move_pairs(shared: bool, dtypes: Sequence[torch.dtype], limit: int | None) -> dict[str, Packed]:
    """Move every pair in every dtype; check that the sources are as they were."""
    comm = comm_for(shared)
    held: dict[str, Packed] = {}
    for dtype in dtypes:
        moved = held[str(dtype)] = []
        for src, dst in pairs_of(dtype):
            tensor = from_local(local_parts(src, comm.rank, values(SHAPE, dtype)), src, comm=comm)
            moved.append(packed(tensor.redistribute(dst, max_buffer_bytes=limit).local_tensors()))
            assert all(map(same_bytes, tensor.local_tensors(), local_parts(src, comm.rank, values(SHAPE, dtype))))
    return held


@both_transports
def test_pairs_of_every_kind_in_every_dtype(world: Ranks, shared: bool) -> None:
    held = world.run(move_pairs, shared, DTYPES, None)
    for dtype in DTYPES:
        for i, (src, dst) in enumerate(pairs_of(dtype)):
            parts = [unpacked(rank[str(dtype)][i], dtype) for rank in held]
            assert_holds(dst, parts, values(SHAPE, dtype), f"{dtype}: {src} -> {dst}")


@pytest.mark.parametrize("limit", [100, 1000])
def test_pairs_within_a_buffer_limit(world: Ranks, limit: int) -> None:
    held = world.run(move_pairs, True, [torch.bfloat16], limit)
    for i, (src, dst) in enumerate(pairs_of(torch.bfloat16)):
        parts = [unpacked(rank["torch.bfloat16"][i], torch.bfloat16) for rank in held]
        assert_holds(dst, parts, values(SHAPE, torch.bfloat16), f"{limit}: {src} -> {dst}")


def move_within_a_limit() -> list[Any]:
    """Between rows and columns of uneven lengths, and sums, within an eighth of a rank's part."""
    comm, found = comm_for(True), list[Any]()
    mesh = Mesh.of(tp=4)
    whole = torch.arange(1536 * 1024, dtype=torch.float32).view(1536, 1024)
    rows, columns = (MeshSpec(mesh, (Shard(dim, sizes),)) for dim, sizes in ((0, (500, 0, 36, 1000)), (1, None)))
    for src, dst in ((rows, columns), (columns, rows)):
        tensor = shard(whole, src, None, comm=comm)
        limit = 4 * 1536 * 1024 // 8 // 4
        held = tensor.redistribute(dst, max_buffer_bytes=limit)
        move = find_move(tensor, dst.layout((1536, 1024)), "redistribute", limit)
        found.append((torch.equal(held.full(), whole), [step.rounds for step in move.transfer.steps]))
    terms = MeshSpec(mesh, (Partial("sum"),)).layout((1536, 1024))
    tensor = from_local(whole * (comm.rank + 1), terms, comm=comm)
    summed = tensor.redistribute("R", max_buffer_bytes=1 << 17)
    move = find_move(tensor, summed.sharding, "redistribute", 1 << 17)
    found.append((torch.equal(summed.local_tensor(), whole * 10), move.collective is not None))
    return found


@pytest.mark.skipif(PLACE != "cpu", reason="about host memory")
def test_a_limit_costs_no_rounds_where_runs_of_memory_are_read(world: Ranks) -> None:
    assert world.run(move_within_a_limit) == [[(True, [1]), (True, [1]), (True, True)]] * 4


def move_large(shared: bool) -> bool:
    """8 MB, whose messages go straight from source to destination memory."""
    comm = comm_for(shared)
    whole = torch.arange(1 << 20, dtype=torch.int64).reshape(1024, 1024)
    tensor = shard(whole if comm.rank == 2 else None, ChunkSpec(0, 4), 2, comm=comm)
    handle = tensor.redistribute(ChunkSpec(1, (3, 1, 0, 2)), async_op=True)
    again = tensor.redistribute(ChunkSpec(0, (1, 2, 3, 0)))
    moved = handle.wait()
    gathered = moved.gather_to(1)
    return torch.equal(again.full(), whole) and (gathered is None or torch.equal(gathered, whole))


@both_transports
def test_large_tensors_two_moves_in_flight(world: Ranks, shared: bool) -> None:
    assert world.run(move_large, shared) == [True] * 4


def move_many_pieces(shared: bool) -> bool:
    """Layouts of hundreds of pieces are compared between processes by what they mean."""
    comm = comm_for(shared)
    spec = MeshSpec(Mesh.of(tp=4), (Shard(0, block=1),))
    whole = values((300, 3), torch.int64)
    tensor = shard(whole, spec, None, comm=comm)
    assert len(tensor.sharding.table) > 64
    return torch.equal(tensor.redistribute(ChunkSpec(1, 4)).redistribute(spec).full(), whole)


def test_layouts_of_many_pieces(world: Ranks) -> None:
    assert world.run(move_many_pieces, True) == [True] * 4


def move_without_dims() -> dict[str, tuple[Tensor, ...]]:
    comm, held = comm_for(True), {}
    for there, src in scalar_layouts().items():
        tensor = from_local(local_parts(src, comm.rank, values((), torch.float64)), src, comm=comm)
        for here, dst in scalar_layouts().items():
            held[f"{there} -> {here}"] = tensor.redistribute(dst).local_tensors()
    return held


def test_tensors_without_dims(world: Ranks) -> None:
    held = world.run(move_without_dims)
    for name in held[0]:
        dst = scalar_layouts()[name.split(" -> ")[1]]
        assert_holds(dst, [rank[name] for rank in held], values((), torch.float64), name)


def gather_exactly() -> list[bool]:
    """Every dtype to every rank, and between the ranks of a group of two."""
    comm, right = comm_for(True), []
    for i, dtype in enumerate(DTYPES):
        whole = values(SHAPE, dtype)
        out = torch.empty(SHAPE, dtype=dtype) if comm.rank == i % 4 else None
        found = shard(whole, MATRIX["grid"], None, comm=comm).gather_to(i % 4, out=out)
        right.append(found is out and (out is None or same_bytes(out, whole)))
    pair = comm.subset((1, 3)) if comm.rank in (1, 3) else comm.subset((0, 2))
    exact = torch.tensor([16777217, 2**62 + 1, -(2**53) - 1])
    tensor = shard(exact if comm.rank == pair.ranks[0] else None, ChunkSpec(0, pair.ranks), pair.ranks[0], comm=pair)
    found = tensor.gather_to(pair.ranks[1])
    right.append(torch.equal(exact, tensor.full()) and (found is None or torch.equal(found, exact)))
    return right


def test_gather_is_exact_also_on_sub_groups(world: Ranks) -> None:
    assert world.run(gather_exactly) == [[True] * (len(DTYPES) + 1)] * 4


def gather_on_a_torch_group() -> bool:
    """A torch process group is as good as a comm."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return True
    tensor = shard(torch.arange(7), ChunkSpec(0, (3, 1, 2)), None, comm=group)
    assert tensor.comm.process_group is group
    found = tensor.gather_to(3)
    return found is None or found.tolist() == list(range(7))


def test_a_torch_process_group_serves_as_comm(world: Ranks) -> None:
    assert world.run(gather_on_a_torch_group) == [True] * 4


def many_at_once() -> dict[str, Held]:
    comm, held = comm_for(True), {}
    for dtype in (torch.float32, torch.complex64):
        pairs = pairs_of(dtype)
        tensors = [from_local(local_parts(s, comm.rank, values(SHAPE, dtype)), s, comm=comm) for s, _ in pairs]
        handle = redistribute_many(tensors, [dst for _, dst in pairs], async_op=True)
        held[str(dtype)] = [t.local_tensors() for t in handle.wait()]
    return held


def test_many_tensors_in_shared_exchanges(world: Ranks) -> None:
    held = world.run(many_at_once)
    for dtype in (torch.float32, torch.complex64):
        for i, (src, dst) in enumerate(pairs_of(dtype)):
            parts = [rank[str(dtype)][i] for rank in held]
            assert_holds(dst, parts, values(SHAPE, dtype), f"{dtype}: {src} -> {dst}")


def pass_gradients(shared: bool) -> list[str]:
    """The gradient of the whole arrives at every leaf, in the leaf's layout; returns the pairs where it does not."""
    comm, wrong = comm_for(shared), []
    weights = values(SHAPE, torch.float64) * 8 - 3
    for there, here in PAIRS:
        if {there, here} & {"max", "min", "product"}:
            continue
        x = values(SHAPE, torch.float64).requires_grad_()
        moved = shard(x, MATRIX[there], None, comm=comm).redistribute(MATRIX[here])
        (moved.full() * weights).sum().backward()
        if x.grad is None or not torch.equal(x.grad, weights):
            wrong.append(f"{there} -> {here}")
    return wrong


@both_transports
def test_gradients_of_pairs_of_every_kind(world: Ranks, shared: bool) -> None:
    assert world.run(pass_gradients, shared) == [[]] * 4


def refused() -> list[str]:
    comm = comm_for(True)
    tensor = from_local(local_parts(MATRIX["avg"], comm.rank, values(SHAPE, torch.float32)), MATRIX["avg"], comm=comm)
    counted = tensor.to(torch.float64)
    flags = shard(values(SHAPE, torch.bool), MATRIX["rows"], None, comm=comm)
    wrong: Any = torch.empty(3) if comm.rank == 0 else None
    return [error_of(flags.redistribute, MATRIX["sum"]), error_of(counted.gather_to, 0, out=wrong)]


def test_what_cannot_be_done_is_told_on_every_rank(world: Ranks) -> None:
    results = world.run(refused)
    assert all(found == results[0] for found in results)
    undefined, out = results[0]
    assert undefined.startswith("LayoutError: ") and "a pending sum of bool values is not defined" in undefined
    assert out == "DisagreementError: 'gather': rank 0: Argument ``out`` has size (3,), but should be (37, 29)"


def shard_a_dtensor(placement: str, src_rank: int | None) -> tuple[list[float], str]:
    """Pass a DTensor where a whole tensor is needed, and where a local one is: the values, and what was raised."""
    whole = torch.arange(24.0).reshape(4, 6)
    mesh = init_device_mesh("cpu", (4,))
    given = distribute_tensor(whole, mesh, [DShard(0) if placement == "S(0)" else DReplicate()])
    if placement == "P":
        given = DTensor.from_local(whole / 4, mesh, [DPartial()])
    columns = ChunkSpec(1, 4)
    laid = shard(given, columns, src_rank)
    assert laid.local_tensor().shape == columns.layout((4, 6)).local_shapes(laid.comm.rank)[0]
    return laid.full().flatten().tolist(), error_of(from_local, given, columns, (4, 6))


@pytest.mark.parametrize("src_rank", (0, 1, None))
@pytest.mark.parametrize("placement", ("S(0)", "R", "P"))
def test_a_dtensor_is_laid_out_by_all_ranks_together(world: Ranks, placement: str, src_rank: int | None) -> None:
    """No rank starts DTensor's collectives alone; as a local tensor it is refused on every rank."""
    first, *others = world.run(shard_a_dtensor, placement, src_rank)
    assert others == [first] * 3
    assert first[0] == [float(i) for i in range(24)]
    assert "got DTensor" in first[1]
