"""Is lent memory read after it is ready and before it is used again, whatever the streams, and also after a failure?

Streams stand in for those of a GPU: they write down for which others they wait, and when a stream reads or writes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.faults import TransportError
from shardwise.comm.transports import device_memory
from shardwise.comm.transports.device_memory import LENT, READ, DevicePeers, SameHostDeviceEngine
from shardwise.comm.transports.links import FrameKind
from tests.fake_device import FakeDevice, engines, on_device, run


class FakeStream:
    """A stream: what it does, in order."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.idle = name, list[str](), True

    def wait_stream(self, other: FakeStream) -> None:
        self.done.append(f"wait for {other.name}")

    def query(self) -> bool:
        return self.idle


class StreamPeers(DevicePeers):
    """Each thread has a current stream, and waits for events are written down on it."""

    streams = threading.local()

    def current_stream(self) -> Any:
        return self.streams.__dict__.setdefault("current", FakeStream("default"))

    @classmethod
    def use(cls, name: str) -> FakeStream:
        cls.streams.current = FakeStream(name)
        return cls.streams.current


class SeenEvents:
    """Passes on to the stand-in's events, and writes down on which stream they are awaited."""

    def __init__(self, events: Any) -> None:
        self._events = events
        self.awaited: list[tuple[int, int, str]] = []
        self.marked: list[tuple[int, str]] = []

    def record(self, moment: int, number: int, stream: FakeStream) -> None:
        self.marked.append((moment, stream.name))
        self._events.record(moment, number, stream)

    def wait(self, rank: int, moment: int, number: int, stream: FakeStream) -> None:
        self.awaited.append((rank, moment, stream.name))
        self._events.wait(rank, moment, number, stream)

    def wait_if_marked(self, rank: int, moment: int, number: int, stream: FakeStream) -> None:
        if (rank, moment, number) in self._events.recorded:
            self.awaited.append((rank, moment, stream.name))


def stream_peers(device: Any, shared: Any, opened: Any, events: Any, owners: Any) -> DevicePeers:
    return StreamPeers(device, shared, opened, SeenEvents(events), owners)


def seen(engine: SameHostDeviceEngine) -> SeenEvents:
    events = engine._peers.events
    assert isinstance(events, SeenEvents)
    return events


def test_call_that_is_served_on_another_stream_follows_the_one_that_started_it() -> None:
    device = FakeDevice()
    barrier = threading.Barrier(2)

    def body(rank: int, engine: SameHostDeviceEngine) -> list[list[str]]:
        mine, out = on_device(device, torch.full((4,), rank)), on_device(device, torch.full((4,), -1))
        first = StreamPeers.use("first")
        if rank:
            barrier.wait()  # so that rank 0 serves the call when it waits
        work = engine.exchange({1 - rank: [mine]}, {1 - rank: [out]}, call="swap")
        if not rank:
            barrier.wait()
        second = StreamPeers.use("second")
        work.wait()
        assert out.tolist() == [1 - rank] * 4
        return [first.done, second.done]

    with engines(2, device, make_peers=stream_peers) as made:
        found = run(made, body)
        assert found[0] == [["wait for second"], ["wait for first"]]  # before it reads, and before memory is free
        assert found[1][0] == ["wait for second"]
        assert (1, LENT, "second") in seen(made[0]).awaited and (READ, "second") in seen(made[0]).marked
        assert (1, READ, "second") in seen(made[0]).awaited


def test_copy_of_what_cannot_be_opened_is_made_before_it_is_lent() -> None:
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> Tensor:
        StreamPeers.use("only")
        mine, out = torch.full((4,), rank), on_device(device, torch.full((4,), -1))
        copy = on_device(device, mine)
        if rank:
            mine.clone = lambda memory_format: copy  # type: ignore[method-assign, assignment]
        engine.exchange({1 - rank: [mine if rank else copy]}, {1 - rank: [out]}, call="swap").wait()
        return out

    with engines(2, device, make_peers=stream_peers) as made:
        assert [out.tolist() for out in run(made, body)] == [[1] * 4, [0] * 4]
        assert (1, LENT, "only") in seen(made[0]).awaited


def test_after_a_failure_memory_is_kept_from_being_overwritten_while_it_is_read() -> None:
    """Rank 1 reads what rank 0 lends; rank 2 never does, and rank 0 gives up: its stream waits for rank 1."""
    device = FakeDevice()
    has_read = threading.Event()

    def body(rank: int, engine: SameHostDeviceEngine) -> None:
        StreamPeers.use("only")
        if rank == 2:
            has_read.wait(20)
            return
        sends = {1: [device.allocate(8)], 2: [device.allocate(8)]} if rank == 0 else {}
        work = engine.exchange(sends, {0: [device.allocate(8)]} if rank else {}, call="move")
        if rank:
            work.wait()
            has_read.set()
            return
        with pytest.raises(TransportError, match=r"no answer within 2 s"):
            work.wait()
        engine.abort("rank 0 gives up", (0,))

    with engines(3, device, timeout=2.0, make_peers=stream_peers) as made:
        run(made, body)
        assert seen(made[0]).awaited == [(1, READ, "only")]


def test_memory_of_a_rank_that_gives_up_while_it_is_read_is_not_taken() -> None:
    """Rank 1 gives up and writes to what it lent when rank 0 has begun to use it; no message says so before."""
    gone_on = threading.Event()

    class SlowDevice(FakeDevice):
        def open(self, handle: bytes, size: int) -> Tensor:
            assert gone_on.wait(20)
            return super().open(handle, size)

    device = SlowDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> str:
        mine, out = on_device(device, torch.full((4,), rank)), on_device(device, torch.full((4,), -1))
        try:
            work = engine.exchange({0: [mine]} if rank else {}, {} if rank else {1: [out]}, call="move")
            work.wait()
            return f"read {out.tolist()}"
        except TransportError as error:
            engine.abort(f"rank {rank}: {error.reason}", error.suspects)
            mine.fill_(9)
            gone_on.set()
            return error.reason

    with engines(2, device, timeout=1.0) as made:
        assert run(made, body) == ["rank 1: no answer within 1 s", "no answer within 1 s"]


def test_rank_that_gives_up_goes_on_after_those_that_use_its_memory() -> None:
    """Rank 0 has read, or will have by the time it marked, and its confirmation is lost."""
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> None:
        StreamPeers.use("only")
        if rank == 0:
            send = engine._calls._links.send
            engine._calls._links.send = lambda r, frame, **later: (  # type: ignore[method-assign]
                None if frame[0] == FrameKind.TAKEN else send(r, frame, **later)
            )
        mine, out = device.allocate(8), device.allocate(8)
        work = engine.exchange({0: [mine]} if rank else {}, {} if rank else {1: [out]}, call="move")
        if rank == 0:
            work.wait()
            return
        with pytest.raises(TransportError, match="no answer within 1 s"):
            work.wait()
        engine.abort("rank 1 gives up", (1,))

    with engines(2, device, timeout=1.0, make_peers=stream_peers) as made:
        run(made, body)
        assert seen(made[1]).awaited == [(0, READ, "only")]


def test_rank_that_raises_while_it_reads_is_named_at_once() -> None:
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> str:
        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            if rank:
                raise MemoryError("no memory left")

        mine = device.allocate(8)
        try:
            engine.lend({1 - rank: [mine]}, [1 - rank], take, call="swap").wait()
            engine.all_gather_bytes(b"", call="next")
        except (MemoryError, TransportError) as error:
            return str(error)
        return "no error"

    with engines(2, device, timeout=20.0) as made:
        texts = run(made, body)
    assert texts == ["swap: rank 1 was ended by MemoryError", "no memory left"]


def test_process_waits_for_what_it_marked_and_lent_before_it_ends() -> None:
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> FakeStream:
        stream = StreamPeers.use("only")
        mine, out = device.allocate(8), device.allocate(8)
        engine.exchange({1 - rank: [mine]}, {1 - rank: [out]}, call="swap").wait()
        stream.idle = rank == 0
        return stream

    with engines(2, device, make_peers=stream_peers) as made:
        streams = run(made, body)
        assert [engine._peers.passes_marks(0.01) for engine in made] == [True, False]
        done = threading.Timer(0.05, lambda: setattr(streams[1], "idle", True))
        done.start()
        assert made[1]._peers.passes_marks(20.0)
        assert streams[1].idle


def test_ranks_that_were_forked_are_different_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for pid in (7, 8):
        monkeypatch.setattr(device_memory.os, "getpid", lambda pid=pid: pid)
        names.add(device_memory.identify_process())
    assert len(names) == 2
