"""Every operation of a comm, on threads of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shardwise import LayoutError, NotationError
from shardwise.comm import (
    Comm,
    CommError,
    DisagreementError,
    LocalComm,
    agree,
    current_comm,
    default_comm,
    run_local,
    use_comm,
)

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16,
    torch.uint32, torch.int32, torch.uint64, torch.int64,
]  # fmt: skip


def filled(dtype: torch.dtype, seed: int, count: int = 24) -> torch.Tensor:
    """Return `count` elements whose bytes are a function of the seed."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.arange(count).add(seed).remainder(3).eq(0)
    return torch.arange(count * size).mul(7).add(seed * 31).remainder(251).to(torch.uint8).view(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare exactly, NaN included."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def all_to_all(comm: Comm, dtype: torch.dtype) -> bool:
    sends = {r: [filled(dtype, 10 * comm.rank + r), filled(dtype, 5, 0)] for r in comm.ranks}
    receives = {r: [torch.empty(4, 6, dtype=dtype)] for r in comm.ranks}
    comm.exchange(sends, receives, label="all to all").wait()
    return all(same_bytes(receives[r][0], filled(dtype, 10 * r + comm.rank)) for r in comm.ranks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exchange_moves_every_dtype(dtype: torch.dtype) -> None:
    assert run_local(all_to_all, 3, dtype) == [True] * 3


def test_exchange_between_some_ranks_with_other_shapes_and_dtypes() -> None:
    def body(comm: Comm) -> Any:
        got = torch.zeros(2, 2, dtype=torch.int32)
        sends = {2: [torch.arange(4, dtype=torch.int32).view(torch.uint8)]} if comm.rank == 0 else {}
        comm.exchange(sends, {0: [got]} if comm.rank == 2 else {}, label="one edge").wait()
        return got.tolist()

    assert run_local(body, 3) == [[[0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 1], [2, 3]]]


def test_a_posted_exchange_completes_though_the_other_rank_waits_later() -> None:
    def body(comm: Comm) -> Any:
        other = 1 - comm.rank
        got = torch.zeros(3)
        work = comm.exchange({other: [torch.full((3,), float(comm.rank))]}, {other: [got]}, label="early")
        if comm.rank == 0:
            work.wait()
        comm.barrier(label="between")
        work.wait()
        work.wait()
        return got.tolist()

    assert run_local(body, 2) == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [6.0, 9.0]), ("avg", [2.0, 3.0]), ("min", [1.0, 2.0]), ("max", [3.0, 4.0]), ("product", [6.0, 24.0])],
)
def test_reductions(op: Any, expected: list[float]) -> None:
    def body(comm: Comm) -> Any:
        x = torch.tensor([1.0, 2.0]) + comm.rank
        comm.all_reduce(x, op, label="reduce").wait()
        whole = (torch.tensor([1.0, 2.0]) + comm.rank).repeat(3)
        part = torch.empty(2)
        comm.reduce_scatter_into(part, whole, op, label="scatter").wait()
        return x.tolist(), part.tolist(), whole.tolist() == (torch.tensor([1.0, 2.0]) + comm.rank).repeat(3).tolist()

    assert run_local(body, 3) == [(expected, expected, True)] * 3


def test_gathers_and_broadcast() -> None:
    def body(comm: Comm) -> Any:
        mine = torch.tensor([[comm.rank, -comm.rank]])
        out = torch.empty(6, dtype=torch.int64)
        comm.all_gather_into(out, mine, label="into").wait()
        word = torch.tensor(comm.rank * 1.5)
        comm.broadcast(word, 2, label="word").wait()
        texts = comm.all_gather_bytes(b"x" * comm.rank, label="texts")
        return [t.tolist() for t in comm.all_gather(mine, label="list")], out.tolist(), word.item(), texts

    expected = ([[[0, 0]], [[1, -1]], [[2, -2]]], [0, 0, 1, -1, 2, -2], 3.0, [b"", b"x", b"xx"])
    assert run_local(body, 3) == [expected] * 3


def test_subsets_keep_the_numbers_of_the_world() -> None:
    def body(comm: Comm) -> Any:
        pair = comm.subset([3, 1] if comm.rank % 2 else [0, 2])
        x = torch.tensor([comm.rank])
        pair.all_reduce(x, label="pair").wait()
        again = comm.subset(pair.ranks)
        again.barrier(label="again")
        return pair.rank, pair.ranks, x.item(), comm.subset(comm.ranks) is comm

    assert run_local(body, 4) == [
        (0, (0, 2), 2, True),
        (1, (1, 3), 4, True),
        (2, (0, 2), 2, True),
        (3, (1, 3), 4, True),
    ]


def test_an_exception_ends_all_ranks_and_names_its_own() -> None:
    seen: list[str] = []

    def body(comm: Comm) -> None:
        if comm.rank == 2:
            raise ValueError("bad weight")
        try:
            comm.barrier(label="step 7")
        except CommError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="bad weight") as caught:
        run_local(body, 4, timeout=60)
    assert caught.value.__notes__ == ["on rank 2 of run_local (world of 4)"]
    assert seen == ["barrier 'step 7': rank 2 raised ValueError: bad weight"] * 3


def different_calls(comm: Comm) -> None:
    if comm.rank == 1:
        comm.barrier(label="end")
    else:
        comm.all_reduce(torch.zeros(2), label="loss").wait()


def short_receive(comm: Comm) -> None:
    if comm.rank == 0:
        comm.exchange({1: [torch.zeros(3)]}, {}, label="move").wait()
    else:
        comm.exchange({}, {0: [torch.zeros(2)]} if comm.rank == 1 else {}, label="move").wait()


def early_return(comm: Comm) -> None:
    if comm.rank != 1:
        comm.barrier(label="end")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            different_calls,
            "the ranks made different calls (ranks 0, 2: all_reduce 'loss' (sum of 2 elements of float32); "
            "rank 1: barrier 'end'); every rank must make the same calls in the same order",
        ),
        (
            short_receive,
            "'move': rank 0 sends [12] bytes to rank 1, which receives [8]; "
            "the k-th tensors on both sides must match",
        ),
        (
            early_return,
            "barrier 'end': rank 1 did not take part before it returned; every rank must make the same calls",
        ),
    ],
)  # fmt: skip
def test_mismatches_are_raised_on_all_ranks(body: Any, message: str) -> None:
    seen: list[str] = []

    def watched(comm: Comm) -> None:
        try:
            body(comm)
        except CommError as error:
            seen.append(str(error))
            raise

    with pytest.raises(CommError):
        run_local(watched, 3, timeout=60)
    assert set(seen) == {message}


def test_a_time_out_names_the_absent_rank() -> None:
    hold = threading.Event()

    def body(comm: Comm) -> None:
        if comm.rank == 1:
            hold.wait(60)
        else:
            try:
                comm.barrier(label="wait for it")
            finally:
                hold.set()

    with pytest.raises(CommError, match=r"barrier 'wait for it': rank 1 did not take part within 0\.2 s") as caught:
        run_local(body, 2, timeout=0.2)
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("kind", ["exchange", "broadcast", "all_reduce"])
def test_a_late_rank_does_not_read_what_was_written_after_the_time_out(kind: str) -> None:
    gave_up = threading.Event()

    def body(comm: Comm) -> str:
        x = torch.full((4,), 7.0 if comm.rank == 0 else 0.0)
        if comm.rank == 1:
            gave_up.wait(60)
        try:
            if kind == "exchange":
                comm.exchange({1: [x]} if comm.rank == 0 else {}, {0: [x]} if comm.rank else {}, label="w").wait()
            elif kind == "broadcast":
                comm.broadcast(x, 0, label="w").wait()
            else:
                comm.all_reduce(x, label="w").wait()
        except CommError as error:
            x.fill_(-1.0)
            gave_up.set()
            return str(error)
        return f"read {x.tolist()}"

    first, late = run_local(body, 2, timeout=0.2)
    assert "rank 1 did not take part within 0.2 s" in first and late == first


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("names", [list(TORCHRUN), ["RANK", "WORLD_SIZE"]], ids=["torchrun", "rank and size alone"])
def test_a_rank_of_torchrun_without_a_process_group_is_not_alone(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    for name in names:
        monkeypatch.setenv(name, TORCHRUN[name])
    with pytest.raises(
        CommError, match=r"this process is rank 1 of 4 \(RANK, WORLD_SIZE\), but .* call torch.distributed"
    ):
        default_comm()
    assert run_local(lambda comm: default_comm() is comm, 2) == [True, True]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert default_comm().ranks == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.exchange({9: [torch.zeros(1)]}, {}, label="m"), r"sends to rank 9, not in this comm \(rank 0\)"),
        (lambda c: c.exchange({0: [torch.zeros(4, 4).t()]}, {}, label="m"), "is not contiguous; only contiguous"),
        (lambda c: c.broadcast(torch.zeros(1), 5, label="m"), r"source rank 5 is not in this comm \(rank 0\)"),
        (lambda c: c.all_reduce(torch.zeros(1), "median", label="m"), "reduction 'median' is unknown; use one of sum"),
        (lambda c: c.all_reduce(torch.zeros(1, dtype=torch.int32), "avg", label="m"), "'avg' of torch.int32 would be"),
        (lambda c: c.all_gather_into(torch.zeros(3), torch.zeros(2), label="m"), "do not fill an output of 3 elements"),
        (lambda c: c.reduce_scatter_into(torch.zeros(2), torch.zeros(3), label="m"), "does not split into 1 outputs"),
        (lambda c: c.subset([0, 0]), "pass each rank once"),
        (lambda c: c.subset([]), "without being in it; only its members call"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_moves(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(LocalComm.alone())


def test_sources_stay_as_they_are_and_leaves_that_need_gradients_move() -> None:
    def body(comm: Comm) -> Any:
        x = torch.ones(4, requires_grad=True)
        got = torch.empty(4)
        comm.exchange({1 - comm.rank: [x]}, {1 - comm.rank: [got]}, label="leaf").wait()
        return got.requires_grad, x.tolist()

    assert run_local(body, 2) == [(False, [1.0] * 4)] * 2


def test_nested_worlds_and_current_comm() -> None:
    def inner(comm: Comm, base: int) -> int:
        x = torch.tensor(base)
        comm.all_reduce(x, label="inner").wait()
        return int(x)

    def outer(comm: Comm) -> Any:
        assert current_comm() is comm and default_comm() is comm
        with use_comm(LocalComm.alone()) as alone:
            assert default_comm() is alone
        return run_local(inner, 2, comm.rank + 1), torch.get_num_threads(), current_comm() is comm

    threads = torch.get_num_threads()
    assert run_local(outer, 2) == [([2, 2], 1, True), ([4, 4], 1, True)]
    assert (torch.get_num_threads(), current_comm(), default_comm().world_size) == (threads, None, 1)


def test_a_backward_pass_may_communicate() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            total = grad.clone()
            default_comm().all_reduce(total, label="grad").wait()
            return total

    def body(comm: Comm) -> Any:
        x = torch.ones(2, requires_grad=True)
        apply: Any = Sum.apply
        (apply(x) * (comm.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert run_local(body, 3) == [[6.0, 6.0]] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_threads_share_one_gpu() -> None:
    def body(comm: Comm) -> Any:
        got = torch.zeros(1000, device=comm.device)
        other = (comm.rank + 1) % 3
        make_stream: Any = torch.cuda.Stream
        with torch.cuda.stream(make_stream()):
            mine = torch.full((1000,), float(comm.rank), device=comm.device)
            comm.exchange({other: [mine]}, {(comm.rank - 1) % 3: [got]}, label="ring").wait()
            comm.all_reduce(got, label="total").wait()
        return sorted(set(got.tolist()))

    assert run_local(body, 3, device="cuda") == [[3.0]] * 3


def test_threads_of_ranks_enter_their_gpu_and_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread calls something of its GPU before it computes; where no GPU is used, CUDA is not touched."""
    entered: list[tuple[str, int]] = []

    class Stream:
        def query(self) -> None:
            entered.append((threading.current_thread().name, -1))

    def set_device(number: int) -> None:
        entered.append((threading.current_thread().name, number))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    run_local(lambda comm: None, 2, device="cpu")
    assert entered == []
    for device, number in (("cuda:1", 1), ("cuda", 2)):
        run_local(lambda comm: None, 2, device=device)
        assert sorted(entered) == [(f"rank {rank}", call) for rank in range(2) for call in (-1, number)]
        entered.clear()


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="run_local with world_size=0: pass at least 1 rank"):
        run_local(lambda comm: None, 0)


def disagree_everywhere(comm: Comm) -> str:
    with pytest.raises(DisagreementError) as caught:
        agree(comm, {"shape": (comm.rank,)}, label="m")
    return str(caught.value)


def fail_alike(comm: Comm) -> str:
    with pytest.raises(DisagreementError) as caught:
        agree(comm, {}, label="m", problem="too long" if comm.rank != 2 else "too short")
    return str(caught.value)


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        ("no tensor", ValueError, "'m': no tensor"),
        (TypeError("got int: 5"), TypeError, "'m': got int: 5"),
        (LayoutError("m: no dim 3"), LayoutError, "m: no dim 3"),
        (NotationError("expected R", "Q", 0), NotationError, "'m': expected R\n  Q\n  ^"),
        (KeyError("name"), KeyError, "'name'"),
    ],
)
def test_what_all_ranks_find_wrong_is_raised_as_it_is(problem: Any, kind: type[Exception], text: str) -> None:
    def body(comm: Comm) -> None:
        agree(comm, {"rank": comm.rank}, label="m", problem=problem)

    with pytest.raises(kind) as caught:
        run_local(body, 3)
    assert str(caught.value) == text and type(caught.value) is kind
    assert caught.value.__cause__ is None and len(caught.value.__notes__) == 1


def test_errors_stay_short_in_a_large_world() -> None:
    assert run_local(fail_alike, 5) == ["'m': ranks 0, 1, 3, 4: too long; rank 2: too short"] * 5
    texts = run_local(disagree_everywhere, 24)
    assert len(set(texts)) == 1
    assert "shape is (0,) on rank 0 and (1,) on rank 1 and" in texts[0] and "and others on ranks 6-23;" in texts[0]
