"""Do messages through shared memory arrive whole, in order, from a rank that sleeps, is full, or has just ended?"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.comm.transports import pipes
from shardwise.comm.transports.links import Frame, FrameKind
from shardwise.comm.transports.pipes import CAPACITY, PeerPipes, SharedPipe, exchange_pipes, make_pipe
from tests.fake_device import join, make_pipes

pytestmark = pytest.mark.skipif(not pipes.are_pipes_supported(), reason="this processor reorders stores")


@contextmanager
def two_ranks() -> Iterator[tuple[PeerPipes, PeerPipes]]:
    ends, between = socket.socketpair(), make_pipes(2)
    a, b = (join({1 - rank: ends[rank]}, between[rank]) for rank in (0, 1))
    assert isinstance(a, PeerPipes) and isinstance(b, PeerPipes)
    try:
        yield a, b
    finally:
        a.close()
        b.close()


def receive_frames(links: PeerPipes, count: int) -> list[Frame]:
    frames: list[Frame] = []
    deadline = time.monotonic() + 20
    while len(frames) < count and time.monotonic() < deadline:
        frames += links.receive(1.0)
    return frames


def test_ring_wraps_around_and_takes_what_fits() -> None:
    descriptor = make_pipe()
    writer, reader = SharedPipe(descriptor), SharedPipe(descriptor)
    os.close(descriptor)
    draw = random.Random(0)
    sent, found = bytearray(), bytearray()
    while len(sent) < 5 * CAPACITY:
        data = draw.randbytes(draw.randrange(1, CAPACITY + 1000))
        taken = writer.write(memoryview(data))
        assert taken == min(len(data), CAPACITY - (len(sent) - len(found)))
        sent += data[:taken]
        if draw.random() < 0.7:
            found += reader.read()
    assert found + reader.read() == sent
    assert not reader.has_bytes


@pytest.mark.parametrize("spin", [0.0, 1e-3])
def test_frames_larger_than_the_memory_between_two_ranks(spin: float) -> None:
    sizes = [0, 1, CAPACITY - 1, 3 * CAPACITY + 5, 17, CAPACITY]
    bodies = [bytes([i]) * size for i, size in enumerate(sizes)]

    def swap(links: PeerPipes, peer: int, found: list[Frame]) -> None:
        links.spin_seconds = spin
        for number, body in enumerate(bodies):
            links.send(peer, FrameKind.DATA, number, "swap", body)
        found += receive_frames(links, len(bodies))
        while links.unsent({peer}):
            links.receive(0.01)

    with two_ranks() as both:
        results: tuple[list[Frame], list[Frame]] = ([], [])
        threads = [threading.Thread(target=swap, args=(both[r], 1 - r, results[r])) for r in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for found in results:
            assert [(f.number, f.label, bytes(f.body)) for f in found] == [
                (number, "swap", body) for number, body in enumerate(bodies)
            ]


def test_reader_that_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_LONGEST_SLEEP", 60.0)
    with two_ranks() as (a, b):
        found: list[Frame] = []
        reader = threading.Thread(target=lambda: found.extend(b.receive(60.0)))
        reader.start()
        while not a._outgoing[1].asleep:
            time.sleep(0.001)
        a.send(1, FrameKind.TAKEN, 7, "", b"")
        reader.join(20)
        assert [frame.number for frame in found] == [7]
        assert not a._outgoing[1].asleep
        a.send(1, FrameKind.TAKEN, 8, "", b"")  # nobody sleeps: nothing goes through the socket
        with pytest.raises(BlockingIOError):
            b._sockets[0].recv(1)
        assert [frame.number for frame in b.receive(0.0)] == [8]


def test_what_a_process_wrote_before_it_ended_is_read_first() -> None:
    ends, between = socket.socketpair(), make_pipes(2)
    child = os.fork()
    if not child:
        ends[0].close()
        links = join({0: ends[1]}, between[1])
        for number in (1, 2):
            links.send(0, FrameKind.DATA, number, "last words", b"x")
        os._exit(0)
    ends[1].close()
    os.waitpid(child, 0)
    links = PeerPipes({1: ends[0]}, {1: child}, between[0])
    try:
        found = links.receive(20.0)
        while not links.ended:
            found += links.receive(20.0)
        assert [frame.number for frame in found] == [1, 2]
        links.send(1, FrameKind.DATA, 3, "to nobody", b"x")
        assert not links.unsent({1})
    finally:
        links.close()


def test_peers_get_each_others_memory_and_refuse_anything_else() -> None:
    a, b = socket.socketpair()
    with a, b:
        found: dict[int, pipes.PipePair] = {}
        other = threading.Thread(target=lambda: found.update(exchange_pipes({0: b}, 20.0)))
        other.start()
        mine = exchange_pipes({1: a}, 20.0)[1]
        other.join(20)
        mine.outgoing.write(memoryview(b"to b"))
        found[0].outgoing.write(memoryview(b"to a"))
        assert (mine.incoming.read(), found[0].incoming.read()) == (b"to a", b"to b")
        b.send(b"p")  # without a descriptor
        with pytest.raises(OSError, match="rank 1 sent no memory"):
            exchange_pipes({1: a}, 20.0)
