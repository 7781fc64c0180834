"""Does each transfer go by the faster device transport, on all ranks alike, and arrive whatever was chosen?

Two sets of real engines over host memory stand in for CUDA IPC and for nccl; nothing here has met several GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from shardwise.comm import Comm, LocalComm, run_local
from shardwise.comm.transports import device_choice
from shardwise.comm.transports.device_choice import (
    DeviceChoiceEngine,
    choose_device_engine,
    find_request,
    measure_rates,
)
from shardwise.geometry import Layout
from shardwise.tensor import wrap
from shardwise.transfer import Link
from shardwise.transfer.device_cost import (
    DEFAULT_RATES,
    DeviceRates,
    DeviceTraffic,
    choose_transport,
    work_for_moves,
)
from tests.fake_device import CPU, FakeDevice, engines, on_device, run
from tests.local.test_device_connect import ThreadGatherer
from tests.moving import assert_holds, layouts, local_parts, values

SWITCH_BYTES = 1 << 12  # with these rates fewer bytes than this are read, and more go by nccl
RATES = DeviceRates(Link(0.0, 1.0), Link(SWITCH_BYTES / 2, 2.0), Link(0.0, 1e9))


class StandInNative:
    """An engine that counts its calls, and compares them over the sockets of the readers first, as nccl does."""

    def __init__(self, engine: Any, host: Any) -> None:
        self._engine, self._host, self.used = engine, host, Counter[str]()
        self.device = engine.device

    def compare_over(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name not in ("exchange", "all_gather_into", "reduce_scatter_into", "all_reduce", "broadcast"):
            return found

        def call(*args: Any, call: str) -> Any:
            self._host.all_gather_bytes(b"", call=call)
            self.used[name] += 1
            return found(*args, call=call)

        return call


@contextmanager
def choosing(world: int, device: FakeDevice, rates: DeviceRates = RATES) -> Iterator[list[DeviceChoiceEngine]]:
    with engines(world, device) as readers, engines(world, device) as others:
        natives = [StandInNative(other, reader) for other, reader in zip(others, readers, strict=True)]
        yield [
            DeviceChoiceEngine(reader, native, rank, world, rates)  # type: ignore[arg-type]  # by __getattr__
            for rank, (reader, native) in enumerate(zip(readers, natives, strict=True))
        ]


def used(made: list[DeviceChoiceEngine]) -> list[Counter[str]]:
    return [engine._native.used for engine in made]  # type: ignore[attr-defined]  # of the stand-in


@pytest.mark.parametrize(("length", "native"), [(3, False), (2000, True)])
def test_collectives_go_either_way(length: int, native: bool) -> None:
    device = FakeDevice()
    held = [torch.arange(3 * length, dtype=torch.float64, device=CPU).add(rank) for rank in range(3)]
    total = torch.stack(held).sum(0)

    def body(rank: int, engine: DeviceChoiceEngine) -> None:
        mine = on_device(device, held[rank])
        part, whole = (on_device(device, torch.zeros(n * length, dtype=torch.float64)) for n in (1, 9))
        engine.all_gather_into(whole, mine, call="gather").wait()
        assert torch.equal(whole.cpu(), torch.cat(held))
        engine.reduce_scatter_into(part, mine, "sum", call="scatter").wait()
        assert torch.equal(part.cpu(), total.view(3, -1)[rank])
        engine.all_reduce(mine, "sum", call="reduce").wait()
        assert torch.equal(mine.cpu(), total)
        mine.copy_(held[rank])
        engine.broadcast(mine, 2, call="broadcast").wait()
        assert torch.equal(mine.cpu(), held[2])

    with choosing(3, device) as made:
        run(made, body)  # type: ignore[arg-type]  # any engine
        names = ("all_gather_into", "reduce_scatter_into", "all_reduce", "broadcast")
        assert used(made) == [Counter(names if native else ())] * 3


def test_messages_go_by_nccl_and_boxes_are_read() -> None:
    device = FakeDevice()
    held = [on_device(device, torch.full((4, 4), rank)) for rank in range(2)]

    def body(rank: int, engine: DeviceChoiceEngine) -> None:
        row, column = (on_device(device, torch.full((4,), -1)) for _ in range(2))
        work = engine.exchange({1 - rank: [held[rank][0]]}, {1 - rank: [row]}, call="message")
        other = engine.exchange_boxes({1 - rank: [held[rank][:, 1]]}, {1 - rank: [column]}, call="boxes")
        other.wait()
        work.wait()
        assert row.tolist() == column.tolist() == [1 - rank] * 4

    with choosing(2, device) as made:
        run(made, body)  # type: ignore[arg-type]  # any engine
        assert used(made) == [Counter(["exchange"])] * 2


def test_nccl_waits_until_ranks_agree_and_a_call_is_taken_back() -> None:
    """While ranks compare what they ask for nothing is started that could not be taken back."""
    device = FakeDevice()
    held = [on_device(device, torch.full((2,), rank)) for rank in range(3)]

    def body(rank: int, engine: DeviceChoiceEngine) -> list[Any]:
        found: list[Any] = []
        for said in (b"same", b"other" if rank == 1 else b"same", b"same"):
            out = on_device(device, torch.full((2,), -1))
            finish, number = engine.start_agreeing(said, call="agree"), engine.calls + 1
            before = used([engine])[0].total()
            work = engine.exchange({(rank + 1) % 3: [held[rank]]}, {(rank - 1) % 3: [out]}, call=f"ring of {said!r}")
            assert used([engine])[0].total() == before
            if len(set(finish())) > 1:
                engine.withdraw_call(number)
                found.append(engine.all_gather_bytes(b"", call="withdrawn"))
                continue
            work.wait()
            found.append(out.tolist())
        return found

    with choosing(3, device) as made:
        for rank, (first, withdrawn, last) in enumerate(run(made, body)):  # type: ignore[arg-type]  # any engine
            assert first == last == [(rank - 1) % 3] * 2
            assert withdrawn == [b""] * 3
        assert used(made) == [Counter({"exchange": 2})] * 3


class ChoosingLocalComm(LocalComm):
    """Ranks as threads that read boxes or exchange messages, by the model; counts which."""

    takes_offers = False
    lends_memory = True  # type: ignore[assignment]  # of the class instead of an instance
    takes_offers = False  # as processes, of which each makes its own part of a move
    counted: ClassVar[Counter[str]] = Counter()

    def prefers_lending(self, count: Callable[[], DeviceTraffic | None]) -> bool:
        traffic = count()
        assert traffic is not None
        return choose_transport(work_for_moves(traffic), RATES).transport == "ipc"

    def exchange(self, *args: Any, **kwargs: Any) -> Any:
        self.counted["exchange"] += 1
        return super().exchange(*args, **kwargs)

    def exchange_boxes(self, *args: Any, **kwargs: Any) -> Any:
        self.counted["exchange_boxes"] += 1
        return super().exchange_boxes(*args, **kwargs)


def move(comm: Comm, src: Layout, dst: Layout, whole: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(comm, LocalComm)
    choosing = ChoosingLocalComm(comm.rank, comm._hub, timeout=comm.timeout)
    held = wrap(src, tuple(local_parts(src, comm.rank, whole)), choosing, dtype=whole.dtype)
    return held.redistribute(dst).local_tensors()


@pytest.mark.parametrize("size", [12, 64])
@pytest.mark.parametrize("names", [("rows", "columns"), ("columns", "rows"), ("rows", "replicated")])
def test_moves_go_either_way(names: tuple[str, str], size: int) -> None:
    found = layouts(size, size)
    src, dst, whole = found[names[0]], found[names[1]], values((size, size), torch.float64)
    ChoosingLocalComm.counted.clear()
    assert_holds(dst, run_local(move, 4, src, dst, whole), whole, str(names))
    wanted = "exchange_boxes" if size == 12 else "exchange"
    assert ChoosingLocalComm.counted == {wanted: 4}


def test_ranks_that_measure_differently_end_with_the_same_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    with engines(3, device) as readers, engines(3, device) as others:

        def body(rank: int, engine: Any) -> DeviceRates:
            seconds = iter([(rank + 1) * t for t in (1e-4, 2e-4, 1e-4, 3e-4, 1e-5, 2e-5)])
            order[rank] = seconds
            return measure_rates(engine, others[rank], rank, range(3))

        order: dict[int, Iterator[float]] = {}
        monkeypatch.setattr(device_choice, "_measure_gather", lambda engine, *_: next(order[engine._rank]))
        monkeypatch.setattr(device_choice, "_measure_copy", lambda engine_device, _: 1e-5)
        rates = run(readers, body)
    assert rates[0] == rates[1] == rates[2]
    assert rates[0].ipc.latency == pytest.approx(3e-4)  # that of the slowest rank


def test_both_transports_are_really_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(device_choice, "LARGE_SAMPLE", 1 << 16)
    monkeypatch.setattr(device_choice, "_make_sample", lambda _, size: device.allocate(size))
    with engines(2, device) as readers, engines(2, device) as others:
        natives = [StandInNative(other, reader) for other, reader in zip(others, readers, strict=True)]
        rates = run(readers, lambda rank, engine: measure_rates(engine, natives[rank], rank, range(2)))  # type: ignore[arg-type]
        assert [native.used["all_gather_into"] for native in natives] == [12, 12]
    assert rates[0] == rates[1]
    assert all(0 < link.latency < 60 for link in (rates[0].ipc, rates[0].nccl, rates[0].copy))


def choose(
    monkeypatch: pytest.MonkeyPatch, requests: list[str], *, reachable: bool = True, shares_gpu: bool = False
) -> list[Any]:
    """What ranks end with that ask for these transports: the kind of engine, or the error."""
    device = FakeDevice()
    monkeypatch.setattr(device_choice, "LARGE_SAMPLE", 1 << 16)
    monkeypatch.setattr(device_choice, "_make_sample", lambda _, size: device.allocate(size))
    gatherer = ThreadGatherer(len(requests))
    with engines(len(requests), device) as readers, engines(len(requests), device) as others:
        for reader in readers:
            reader.shares_gpu = shares_gpu

        def connect(host: Any, rank: int, *args: Any, instead: str, **kwargs: Any) -> Any:
            assert instead == "nccl is used"
            return readers[rank] if reachable else None

        def body(rank: int, other: Any) -> Any:
            host = gatherer.of(rank)
            try:
                native: Any = StandInNative(other, host)
                ranks = tuple(range(len(requests)))
                engine = choose_device_engine(native, host, rank, ranks, 20.0, requests[rank])
            except ValueError as error:
                return str(error)
            return getattr(engine, "rates", type(engine).__name__)

        monkeypatch.setattr(device_choice, "connect_devices", connect)
        return run(others, body)


def test_engine_that_was_asked_for_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, ["nccl"] * 2) == ["StandInNative"] * 2
    assert choose(monkeypatch, ["ipc"] * 2) == ["SameHostDeviceEngine"] * 2
    assert choose(monkeypatch, ["auto"] * 2) == [DEFAULT_RATES] * 2
    first, second = choose(monkeypatch, ["measured"] * 2)
    assert first == second != DEFAULT_RATES and isinstance(first, DeviceRates)


@pytest.mark.parametrize("request_", ["auto", "measured", "ipc"])
def test_ranks_that_share_a_gpu_do_without_nccl(monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    assert choose(monkeypatch, [request_] * 2, shares_gpu=True) == ["SameHostDeviceEngine"] * 2


def test_ranks_that_cannot_read_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, ["auto"] * 2, reachable=False) == ["StandInNative"] * 2


def test_different_requests_are_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in choose(monkeypatch, ["auto", "ipc", "auto"]):
        assert "ranks ask for different device transports" in text
        assert "rank 1: 'ipc'" in text and "SHARDWISE_DEVICE_TRANSPORT" in text


def test_request_is_that_of_the_argument_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(device_choice.VARIABLE, raising=False)
    assert find_request(None) == "auto"
    monkeypatch.setenv(device_choice.VARIABLE, "nccl")
    assert (find_request(None), find_request("ipc")) == ("nccl", "ipc")
    monkeypatch.setenv(device_choice.VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"device transport 'fast' .*SHARDWISE_DEVICE_TRANSPORT.*use one of"):
        find_request(None)
