"""Does every wait end, and does what comes late do no harm?"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch

import shardwise
from shardwise.comm import Comm
from shardwise.sync import SyncError, publish, session, subscribe
from tests.sync.worlds import TOKEN, alone, laid_out


def hold(link: Any, request: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let a publisher answer requests of one kind only when an event is set."""
    free, answer = threading.Event(), link._answer

    def wait_and_answer(guest: Any, message: Any) -> Any:
        if message["do"] == request:
            free.wait(60)
        return answer(guest, message)

    monkeypatch.setattr(link, "_answer", wait_and_answer)
    return free


def test_an_answer_that_comes_late_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        free = hold(trainer, "again", monkeypatch)
        link = subscribe(served, trainer.address, token=TOKEN)
        trainer.push(1)
        assert link.pull(60) == 1
        patience, link._patience = link._patience, 0.2
        with pytest.raises(SyncError, match="step 1: timed out"):
            link.verify()
        link._patience = patience
        free.set()  # the grant of version 1 is on its way now
        weights["w"].fill_(2)
        trainer.push(2)
        assert link.pull(60) == 2 and served["w"].tolist() == [2.0] * 4
        assert link.verify()
        link.close()


def test_ranks_wait_for_a_publisher_that_hangs_no_longer_than_they_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN, name="trainer") as trainer:
        free = hold(trainer, "take", monkeypatch)

        def serve(comm: Comm) -> None:
            with subscribe({"w": laid_out(torch.zeros(4), "on x=2: S(0)", comm)}, trainer.address, token=TOKEN) as link:
                assert link.pull(0.1) is None
                assert link.problem is not None and "publisher 'trainer' rank 0 does not answer" in link.problem

        try:
            shardwise.run_local(serve, 2, timeout=6.0)  # the deadline of the link is 30 s
        finally:
            free.set()


def count_threads() -> int:
    return sum(thread.name == "shardwise-sync" for thread in threading.enumerate())


def test_a_closed_link_leaves_no_threads() -> None:
    before = count_threads()
    trainer = publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN)
    links = [subscribe({"w": torch.zeros(4)}, trainer.address, token=TOKEN, comm=alone()) for _ in range(3)]
    trainer.push(1)
    assert [link.pull(60) for link in links] == [1] * 3
    assert count_threads() == before + 7  # who accepts, and for each subscriber one for versions and one for data
    trainer.close()  # while they are connected
    assert count_threads() == before


def test_a_listener_without_descriptors_accepts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_PAUSE_SECONDS", 0.01)
    accept, failed = socket.socket.accept, threading.Event()

    def refuse(self: socket.socket) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(24, "Too many open files")
        return accept(self)

    with publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        monkeypatch.setattr(socket.socket, "accept", refuse)
        began = time.monotonic()
        subscribe({"w": torch.zeros(4)}, trainer.address, token=TOKEN).close()
        assert failed.is_set() and time.monotonic() - began < 30


@pytest.mark.parametrize("after", ["nothing", "the challenge", "the handshake"])
def test_a_publisher_that_stops_while_they_meet_is_an_error_in_time(after: str) -> None:
    stopped = threading.Event()

    def serve(_: Any) -> None:
        stopped.wait(60)

    began = time.monotonic()
    if after == "the handshake":
        listener = session.SyncListener(("127.0.0.1", 0), TOKEN.encode(), {"epoch": "1"}, serve)
        port, close = listener.port, listener.close
    else:
        server = socket.create_server(("127.0.0.1", 0))
        port, close = server.getsockname()[1], server.close
        if after == "the challenge":
            server.settimeout(60)

            def challenge() -> None:
                guest, _ = server.accept()
                session._send_open(guest, {"shardwise.sync": 1, "nonce": "00" * 16}, time.monotonic() + 20)
                stopped.wait(60)
                guest.close()

            threading.Thread(target=challenge).start()
    try:
        with pytest.raises(SyncError, match=r"subscriber 'me' rank 0: no publisher at tcp://.* within 0.5 s: "):
            subscribe({"w": torch.zeros(2)}, f"tcp://127.0.0.1:{port}", token=TOKEN, deadline=0.5, name="me")
    finally:
        stopped.set()
        close()
    assert time.monotonic() - began < 40
