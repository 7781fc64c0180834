"""Every operation of a comm, between real processes over gloo, with and without shared host memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import redirect_stderr, suppress
from importlib import import_module
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise import ChunkSpec, shard
from shardwise.comm import (
    Comm,
    CommError,
    DisagreementError,
    ProcessGroupComm,
    agree,
    comm_from_device_mesh,
    default_comm,
    launch,
    run_local,
)
from shardwise.comm.faults import TransportError
from shardwise.comm.transports import backends
from tests.device import DEVICE
from tests.world import Ranks, world_fixture

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16,
    torch.uint32, torch.int32, torch.uint64, torch.int64,
]  # fmt: skip

COMBINE = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}
world = world_fixture(3)
faults: Any = import_module("shardwise.comm.faults")
both_transports = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
_comms: dict[bool, ProcessGroupComm] = {}


def comm_for(shared: bool) -> ProcessGroupComm:
    """Return one comm per transport, kept over the life of the rank."""
    if shared not in _comms:
        _comms[shared] = ProcessGroupComm(timeout=60, shared_memory=shared)
    return _comms[shared]


def filled(dtype: torch.dtype, seed: int, count: int) -> torch.Tensor:
    """Return `count` elements whose bytes are a function of the seed."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.arange(count).add(seed).remainder(3).eq(0)
    return torch.arange(count * size).mul(7).add(seed * 31).remainder(251).to(torch.uint8).view(dtype)


def distinct(tensor: torch.Tensor) -> list[Any]:
    return sorted(set(tensor.flatten().tolist()))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def exchange_strided_tensors(to_strides: bool) -> list[bool]:
    """Columns of matrices, of short runs and long ones, few bytes and many, into columns or into whole tensors."""
    comm, right = comm_for(True), []
    comm.barrier(label="connect")
    assert comm.capabilities.takes_strides
    other = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for dtype, rows, width in ((torch.uint8, 50, 3), (torch.float32, 70, 200), (torch.complex128, 900, 90)):
        whole = filled(dtype, 5, 2 * rows * width * comm.world_size).view(comm.world_size, rows, 2 * width)
        memory = torch.zeros(rows, 3 * width, dtype=dtype)
        target = memory[:, 1 : 1 + width] if to_strides else memory.view(-1)[: rows * width].view(rows, width)
        sent, wanted = whole[comm.rank][:, :width], whole[other[1]][:, :width]
        comm.exchange({other[0]: [sent]}, {other[1]: [target]}, label="columns").wait()
        expected = torch.zeros_like(memory)
        place = expected[:, 1 : 1 + width] if to_strides else expected.view(-1)[: rows * width].view(rows, width)
        place.copy_(wanted)
        right.append(torch.equal(memory, expected))
    return right


@pytest.mark.skipif(DEVICE != "cpu", reason="about host memory")
@pytest.mark.parametrize("to_strides", [False, True])
def test_tensors_of_any_strides_travel_between_processes_of_one_host(world: Ranks, to_strides: bool) -> None:
    assert world.run(exchange_strided_tensors, to_strides) == [[True] * 3] * 3


def move_every_dtype(shared: bool) -> list[str]:
    comm, wrong = comm_for(shared), []
    for dtype in DTYPES:
        sends = {r: [filled(dtype, 10 * comm.rank + r, 5 + r), filled(dtype, 1, 0)] for r in comm.ranks}
        receives = {r: [torch.empty(5 + comm.rank, dtype=dtype)] for r in comm.ranks}
        comm.exchange(sends, receives, label=f"move {dtype}").wait()
        for r in comm.ranks:
            if not same_bytes(receives[r][0], filled(dtype, 10 * r + comm.rank, 5 + comm.rank)):
                wrong.append(str(dtype))
            if not same_bytes(sends[r][0], filled(dtype, 10 * comm.rank + r, 5 + r)):
                wrong.append(f"source of {dtype}")
    return wrong


@both_transports
def test_exchange_moves_every_dtype_and_leaves_sources_alone(world: Ranks, shared: bool) -> None:
    assert world.run(move_every_dtype, shared) == [[]] * 3


def move_large_and_many(shared: bool) -> bool:
    """A ring of 6 MB, and 50 small tensors of several lengths against the ring, started together."""
    comm = comm_for(shared)
    after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    large = torch.empty(1_500_000, dtype=torch.int32)
    small = [torch.empty(n, dtype=torch.int16) for n in range(50)]
    one = comm.exchange({after: [filled(torch.int32, comm.rank, 1_500_000)]}, {before: [large]}, label="ring")
    two = comm.exchange({before: [filled(torch.int16, comm.rank, n) for n in range(50)]}, {after: small}, label="back")
    two.wait()
    one.wait()
    return same_bytes(large, filled(torch.int32, before, 1_500_000)) and all(
        same_bytes(t, filled(torch.int16, after, n)) for n, t in enumerate(small)
    )


@both_transports
def test_large_and_many_tensors_in_two_exchanges_at_once(world: Ranks, shared: bool) -> None:
    assert world.run(move_large_and_many, shared) == [True] * 3


def reduce_all_ways(shared: bool, count: int, op: Any) -> tuple[bool, bool, bytes]:
    comm = comm_for(shared)
    comm.barrier(label="connect")
    assert comm._engine is not None
    inputs = [torch.linspace(0.5, 2.5, 3 * count, dtype=torch.float32) * (r + 1) for r in comm.ranks]
    combine: Any = COMBINE[op]
    where = comm._engine.device  # a GPU divides by a number as it multiplies with its inverse, a host does not
    expected = combine(combine(inputs[0].to(where), inputs[1].to(where)), inputs[2].to(where))
    expected = (expected / 3 if op == "avg" else expected).to(inputs[0].device)
    whole = inputs[comm.rank].clone()
    part = torch.empty(count)
    comm.reduce_scatter_into(part, whole, op, label="scatter").wait()
    untouched = torch.equal(whole, inputs[comm.rank])
    comm.all_reduce(whole, op, label="reduce").wait()
    right = torch.equal(part, expected[comm.rank * count : (comm.rank + 1) * count]) and torch.equal(whole, expected)
    return right, untouched, whole.cpu().numpy().tobytes()[:64]


@both_transports
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_reductions_in_rank_order_with_the_same_bits_everywhere(world: Ranks, shared: bool, op: str) -> None:
    for count in (1, 4_001, 100_003):
        results = world.run(reduce_all_ways, shared, count, op)
        assert [r[:2] for r in results] == [(True, True)] * 3
        assert len({r[2] for r in results}) == 1


def reduce_in_many_windows(op: str) -> tuple[bool, bool]:
    usual, backends._WINDOW = backends._WINDOW, 1 << 12
    try:
        found = [reduce_all_ways(False, count, op)[:2] for count in (20_001, 100_003, 20_001)]
    finally:
        backends._WINDOW = usual
    return all(right for right, _ in found), all(untouched for _, untouched in found)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reductions_over_sockets_in_windows_of_kept_memory(world: Ranks, op: str) -> None:
    assert world.run(reduce_in_many_windows, op) == [(True, True)] * 3


def reduce_odd_dtypes(shared: bool) -> list[Any]:
    comm = comm_for(shared)
    values = []
    for dtype, op in [(torch.bool, "max"), (torch.int64, "sum"), (torch.bfloat16, "sum"), (torch.complex64, "sum")]:
        x = torch.tensor([comm.rank, 1]).to(dtype)
        comm.all_reduce(x, op, label="odd").wait()  # type: ignore[arg-type]  # the tuple hides the literal
        values.append(x.tolist())
    empty = torch.empty(0)
    comm.all_reduce(empty, label="empty").wait()
    comm.reduce_scatter_into(empty, empty, label="empty").wait()
    comm.all_gather_into(empty, empty, label="empty").wait()
    return values


@both_transports
def test_reductions_of_dtypes_that_gloo_refuses_and_of_nothing(world: Ranks, shared: bool) -> None:
    assert world.run(reduce_odd_dtypes, shared) == [[[True, True], [3, 3], [3.0, 3.0], [3 + 0j, 3 + 0j]]] * 3


def gather_all_ways(shared: bool, count: int) -> list[Any]:
    comm = comm_for(shared)
    mine = torch.full((count, 2), comm.rank, dtype=torch.int64)
    out = torch.empty(3 * count, 2, dtype=torch.int64)
    comm.all_gather_into(out, mine, label="into").wait()
    in_place = torch.empty(3, count, dtype=torch.float8_e5m2)
    in_place[comm.rank] = comm.rank
    comm.all_gather_into(in_place, in_place[comm.rank], label="in place").wait()
    listed = [distinct(t) for t in comm.all_gather(mine, label="list")]
    word = torch.full((count,), comm.rank)
    comm.broadcast(word, 1, label="word").wait()
    texts = comm.all_gather_bytes(bytes([comm.rank]) * (comm.rank * 300), label="texts")
    comm.barrier(label="end")
    return [out.view(3, -1).float().mean(1).tolist(), in_place.float().mean(1).tolist(), listed,
            distinct(word), [len(t) for t in texts], texts[2][:2]]  # fmt: skip


@both_transports
@pytest.mark.parametrize("count", [2, 40_000])
def test_gathers_broadcast_and_bytes(world: Ranks, shared: bool, count: int) -> None:
    expected = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [[0], [1], [2]], [1], [0, 300, 600], b"\2\2"]
    assert world.run(gather_all_ways, shared, count) == [expected] * 3


def in_subset(shared: bool) -> Any:
    comm = comm_for(shared)
    if comm.rank == 1:
        return None
    pair = comm.subset([2, 0])
    x = torch.tensor([comm.rank + 1.0])
    pair.all_reduce(x, label="pair").wait()
    got = torch.zeros(1)
    other = 2 - comm.rank
    pair.exchange({other: [x + comm.rank]}, {other: [got]}, label="swap").wait()
    word = torch.tensor(comm.rank)
    pair.broadcast(word, 2, label="word").wait()
    return pair.ranks, pair.rank, x.item(), got.item(), word.item(), comm.subset((0, 2)) is pair


@both_transports
def test_only_the_members_of_a_subset_call_it(world: Ranks, shared: bool) -> None:
    assert world.run(in_subset, shared) == [((0, 2), 0, 4.0, 6.0, 2, True), None, ((0, 2), 2, 4.0, 4.0, 2, True)]


def in_overlapping_subsets() -> list[float]:
    """Rank 1 makes a group with rank 0 and then one with rank 2, which has made none yet; twice."""
    totals = []
    for _ in range(2):
        comm = comm_for(True)
        for pair in ((0, 1), (1, 2)):
            if comm.rank in pair:
                x = torch.tensor([comm.rank + 1.0])
                comm.subset(pair).all_reduce(x, label="pair").wait()
                totals.append(x.item())
    return totals


def test_subsets_overlap_whatever_each_rank_was_in_before(world: Ranks) -> None:
    assert world.run(in_overlapping_subsets) == [[3.0] * 2, [3.0, 5.0] * 2, [5.0] * 2]


def over_torch_groups() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    comm = comm_from_device_mesh(mesh, "tp")
    x = torch.tensor([1])
    comm.all_reduce(x, label="mesh").wait()
    default = default_comm()
    return x.item(), comm.ranks, default.ranks == comm.ranks, default.process_group is dist.group.WORLD


def test_comms_of_a_device_mesh_and_of_the_default_group(world: Ranks) -> None:
    assert world.run(over_torch_groups) == [(3, (0, 1, 2), True, True)] * 3


def without_warnings(shared: bool) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gather_all_ways(shared, 2)
        reduce_all_ways(shared, 100_003, "sum")
        return move_every_dtype(shared) == []


@both_transports
def test_no_operation_warns(world: Ranks, shared: bool) -> None:
    assert world.run(without_warnings, shared) == [True] * 3


def with_device_tensors(shared: bool) -> list[Any]:
    """Tensors of one GPU that all ranks share, through a gloo group."""
    comm = ProcessGroupComm(device="cuda", timeout=60, shared_memory=shared)
    other = {0: 1, 1: 0, 2: 2}[comm.rank]
    got = torch.zeros(50_000, device="cuda")
    comm.exchange({other: [torch.full_like(got, comm.rank)]}, {other: [got]}, label="swap").wait()
    total = torch.full((50_000,), comm.rank + 1.0, device="cuda")
    comm.all_reduce(total, label="total").wait()
    out = torch.empty(6, dtype=torch.float8_e4m3fn, device="cuda")
    comm.all_gather_into(out, torch.full((2,), comm.rank, device="cuda").to(out.dtype), label="gather").wait()
    return [distinct(got), distinct(total), out.float().tolist(), comm.device.type]


@both_transports
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_tensors_are_staged_through_host_memory(world: Ranks, shared: bool) -> None:
    gathered = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert world.run(with_device_tensors, shared) == [[[float(r)], [6.0], gathered, "cuda"] for r in (1, 0, 2)]


def over_nccl() -> Any:
    if dist.get_rank() != 0:
        return None
    comm = ProcessGroupComm(dist.new_group([0], backend="nccl", use_local_synchronization=True))
    x = torch.arange(4.0, device="cuda")
    out = torch.empty(4, device="cuda")
    comm.exchange({0: [x]}, {0: [out]}, label="self").wait()
    comm.all_reduce(x, "avg", label="reduce").wait()
    part = torch.empty(4, device="cuda")
    comm.reduce_scatter_into(part, x, "max", label="scatter").wait()
    gathered = comm.all_gather(x.to(torch.float8_e5m2), label="gather")[0].float()
    on_host = torch.ones(2)
    comm.broadcast(on_host, 0, label="word").wait()
    comm.barrier(label="end")
    texts = comm.all_gather_bytes(b"abc", label="texts")
    return out.tolist() == x.tolist() == part.tolist(), gathered.tolist(), on_host.tolist(), texts, comm.device.type


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_group_over_nccl(world: Ranks) -> None:
    assert world.run(over_nccl)[0] == (True, [0.0, 1.0, 2.0, 3.0], [1.0, 1.0], [b"abc"], "cuda")


def disagree(shared: bool) -> None:
    comm = comm_for(shared)
    fields: dict[str, object] = {"shape": (8, 4), "dtype": torch.float32 if comm.rank != 1 else torch.float64}
    if comm.rank == 2:
        fields["src_rank"] = 0
    agree(comm, {"shape": (8, 4)}, label="first")
    agree(comm, fields, label="shard")


@both_transports
def test_disagreement_is_raised_on_all_ranks(world: Ranks, shared: bool) -> None:
    errors = [outcome.error for outcome in world.outcomes(disagree, shared)]
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert {str(error) for error in errors} == {
        "'shard': the ranks pass different arguments: dtype is torch.float32 on ranks 0, 2 and torch.float64 "
        "on rank 1; src_rank is nothing on ranks 0, 1 and 0 on rank 2; pass the same on every rank"
    }


def rank_times(factor: int) -> int:
    return dist.get_rank() * factor


def test_launch_returns_results_in_rank_order() -> None:
    assert launch(rank_times, 2, 10) == [0, 10]


def find_port() -> int:
    """A free port below those that the system picks for sockets which ask for any: no other test takes it meanwhile."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def rank_without_comm(factor: int = 1) -> int:
    return default_comm().rank * factor


def rank_with_comm(comm: Comm, factor: int = 1) -> tuple[int, bool]:
    return comm.rank * factor, comm is default_comm()


def test_launch_and_run_local_call_the_same_functions() -> None:
    cases: list[tuple[Any, tuple[int, ...]]] = [(rank_without_comm, ()), (rank_without_comm, (10,))]
    for body, args in [*cases, (rank_with_comm, (10,))]:
        assert launch(body, 2, *args) == run_local(body, 2, *args)
    assert run_local(rank_with_comm, 2, 10) == [(0, True), (10, True)]
    assert run_local(lambda own: own.world_size, nprocs=3) == [3, 3, 3]
    for start in (run_local, launch):
        assert list(signature(start).parameters)[:4] == ["fn", "world_size", "args", "nprocs"]
        with pytest.raises(TypeError, match=r"takes neither with 1 argument$"):
            start(lambda a, b, c: None, 2, 1)  # type: ignore[operator]  # of two functions
        with pytest.raises(ValueError, match="with world_size=0: pass at least 1 rank"):
            start(rank_without_comm, 0)


def test_launch_under_torchrun_uses_the_given_world(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    for name, value in {**given, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="launch with 4 processes starts none: RANK=0 and WORLD_SIZE=1 are set"):
        assert launch(alone_in_a_given_world, 4) == [("ProcessGroupComm", (0,), 5.0, [b"x"])]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch(alone_in_a_given_world, 4) == [("ProcessGroupComm", (0,), 5.0, [b"x"])]
    assert not dist.is_initialized()


def alone_in_a_given_world() -> Any:
    comm = default_comm()
    x = torch.tensor([5.0], device=comm.device)
    comm.all_reduce(x, label="alone").wait()
    return type(comm).__name__, comm.ranks, x.item(), comm.all_gather_bytes(b"x", label="alone")


def device_of_rank() -> tuple[int, str]:
    return default_comm().rank, default_comm().device.type


def test_launch_gives_ranks_comms_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = "cuda" if DEVICE == "cuda" else "cpu"
    assert launch(device_of_rank, 2, device=chosen) == [(0, chosen), (1, chosen)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda': torch .* sees no GPU here; leave device out for the CPU"):
        launch(device_of_rank, 2, device="cuda")


def test_launch_explains_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="use a function defined at the top of a module"):
        launch(lambda: None, 2)


def test_launch_without_a_guard_around_it_is_one_error(tmp_path: Path) -> None:
    """Each rank imports the program, and comes to `launch` again: it ends silently, and the first call says why."""
    program = tmp_path / "program.py"
    program.write_text("import os\nfrom shardwise.comm import launch\n\nlaunch(os.getpid, 1)\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.strip().endswith(
        "each rank is a new process that imports the program, and the program starts ranks as it is imported; put the "
        'call of launch under `if __name__ == "__main__":`'
    )


def what_is_printed(shared: bool) -> list[str]:
    """What a rank prints of errors that nobody catches: one that all agree on, one of its own, one that all raise."""
    comm, printed = comm_for(shared), []
    errors: list[Exception] = [ValueError(f"of rank {comm.rank}"), ValueError(f"of every rank, {shared=}")]
    try:
        agree(comm, {"x": comm.rank}, label="call")
    except DisagreementError as found:
        errors.insert(0, found)
    for error in errors:
        patient = patch.multiple(faults, _LATER_SECONDS=0.0, _UNCAUGHT_SECONDS=30.0)
        with redirect_stderr(StringIO()) as text, patient:
            sys.excepthook(type(error), error, error.__traceback__)
        printed.append(text.getvalue())
        comm.barrier(label="printed")
    return printed


@both_transports
def test_one_rank_prints_what_all_of_them_raise(world: Ranks, shared: bool) -> None:
    first, *others = world.run(what_is_printed, shared)
    text = "'call': the ranks pass different arguments: x is 0 on rank 0"
    assert text in first[0] and "Traceback (most recent call last)" in first[0]
    assert "ValueError: of rank 0" in first[1] and "ValueError: of every rank" in first[2]
    for rank, (said, own, same) in enumerate(others, 1):
        assert said == f"[rank{rank}]: DisagreementError: the same error as on rank 0\n"
        assert f"ValueError: of rank {rank}" in own
        assert same == f"[rank{rank}]: ValueError: the same error as on rank 0\n"


def reduce_in_a_subset_beside_the_program(shared: bool) -> list[float]:
    """What goes on in the background of a comm reduces in a subset, as a gradient's sum along one axis of a mesh."""
    comm = ProcessGroupComm(timeout=60, shared_memory=shared)
    pair = comm.subset((0, 1)) if comm.rank < 2 else comm.subset((2,))
    later, first = torch.ones(3), torch.full((5,), 2.0)

    def run() -> None:
        time.sleep(0.2 * (comm.rank == 0))  # in which the program of this rank would be the first to call
        pair.all_reduce(first, label="beside").wait()

    call = comm.submit(run)
    if comm.rank == 1:
        call.wait()
    pair.all_reduce(later, label="program").wait()
    call.wait()
    comm.barrier(label="end")
    return [*distinct(first), *distinct(later)]


@both_transports
def test_calls_of_a_subset_come_after_those_in_the_background(world: Ranks, shared: bool) -> None:
    assert world.run(reduce_in_a_subset_beside_the_program, shared) == [[4.0, 2.0]] * 2 + [[2.0, 1.0]]


def different_calls(shared: bool) -> tuple[str, bool, int]:
    comm = ProcessGroupComm(timeout=60, shared_memory=shared)  # no more is called on it
    x = shard(torch.arange(6.0), ChunkSpec(0, 3), comm=comm)
    try:
        x.full() if comm.rank else x.redistribute(ChunkSpec(0, (2, 1, 0)))
    except CommError as error:
        found = error
    frames = traceback.extract_tb(found.__traceback__)
    return str(found), isinstance(found.__cause__, TransportError), len(frames)


def test_different_calls_are_told_in_a_few_lines(world: Ranks) -> None:
    for text, chained, frames in world.run(different_calls, False):
        assert "made different calls" in text or "did not take part" in text
        assert not chained and frames <= 6
