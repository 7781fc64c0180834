"""Does long work say how far it is: once, on the first rank, on a terminal, in bytes that add up?"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise import _progress
from shardwise._progress import show_progress
from shardwise.checkpoint import reshard

Seen = list[tuple[int, int]]
WHOLE = torch.arange(64.0).reshape(8, 8)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as the error stream, and no delay; not a fixture, since pytest sets the stream when a test begins."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress, "QUIET_SECONDS", 0.0)
    return stream


def on_two_ranks(work: Callable[[Any, Seen], object]) -> list[Seen]:
    """What the ranks report, each to a function of its own."""

    def body(comm: shardwise.Comm) -> Seen:
        seen: Seen = []
        work(lambda done, total: seen.append((done, total)), seen)
        return seen

    return shardwise.run_local(body, 2)


def ends_in_full(seen: Seen) -> bool:
    """The bytes done grow to the total."""
    done = [one for one, _ in seen]
    return bool(done) and done == sorted(done) and seen[-1][0] == seen[-1][1] == max(t for _, t in seen)


@pytest.mark.parametrize("kind", ["shardwise", "dcp"])
def test_each_rank_reports_the_bytes_that_it_writes_and_reads(tmp_path: Path, kind: str) -> None:
    def save(report: Any, seen: Seen) -> None:
        shardwise.save({"w": shardwise.shard(WHOLE, "on tp=2: S(0)")}, tmp_path / "a", format=kind, progress=report)

    def load(report: Any, seen: Seen) -> None:
        target = shardwise.zeros("f32[8,8] on tp=2: S(1)")
        shardwise.load({"w": target}, tmp_path / "a", progress=report)
        assert torch.equal(target.full(), WHOLE)

    for seen in on_two_ranks(save):
        assert ends_in_full(seen) and seen[-1] == (128, 128)
    for seen in on_two_ranks(load):  # 128 bytes to fill, and some to check
        assert ends_in_full(seen) and seen[-1][1] >= 128


def test_saves_that_gather_and_saves_in_the_background_report(tmp_path: Path) -> None:
    def save(report: Any, seen: Seen) -> None:
        x = shardwise.shard(WHOLE, "on tp=2: S(0)")
        shardwise.checkpoint.save_hf({"w": x}, tmp_path / "hf", progress=report)
        written = list(seen)
        shardwise.save({"w": x}, tmp_path / "later", async_op=True, progress=report).wait()
        assert seen[len(written) :] == [(128, 128)]
        seen[:] = written

    first, second = on_two_ranks(save)
    assert first == [(256, 256)] and second == []  # one rank writes the whole tensor


def test_resharding_and_discovery_report(tmp_path: Path) -> None:
    shardwise.save({"w": WHOLE}, tmp_path / "a")
    seen: Seen = []
    reshard(tmp_path / "a", tmp_path / "b", layout="S(0)", ranks=2, progress=lambda *n: seen.append(n))
    assert ends_in_full(seen) and seen[-1] == (256, 256)
    tried: Seen = []
    mm, sample = torch.ops.aten.mm.default, (torch.zeros(4, 6), torch.zeros(6, 5))
    shardwise.discover_sharding(mm, *sample, progress=lambda *n: tried.append(n))
    assert ends_in_full(tried) and len(tried) > 5
    checked: Seen = []
    shardwise.check_sharding(mm, *sample, progress=lambda *n: checked.append(n))
    assert checked == tried


def test_the_first_rank_alone_draws_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    opened = []
    plain = _progress._Bar._open

    def noted(self: _progress._Bar, total: int) -> Any:
        opened.append(shardwise.default_comm().rank)
        return plain(self, total)

    def body() -> None:
        state = {"w": shardwise.shard(WHOLE, "on tp=2: S(0)")}
        shardwise.save(state, tmp_path / "a")
        shardwise.load(state, tmp_path / "a")
        shardwise.save(state, tmp_path / "a", progress=False)
        shardwise.save(state, tmp_path / "a", async_op=True).wait()

    monkeypatch.setattr(_progress._Bar, "_open", noted)
    shardwise.run_local(body, 2)
    assert opened == [0, 0]
    assert "saving" in terminal.getvalue() and "loading" in terminal.getvalue()


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log, asked_for = use_terminal(monkeypatch), io.StringIO(), io.StringIO()
    for stream, asked, shown in ((terminal, None, True), (log, None, False), (asked_for, True, True)):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress(asked, "reading", 100) as meter:
            assert meter.active == shown
            meter.advance(60)
        assert ("reading" in stream.getvalue()) == shown


def test_short_work_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(_progress, "QUIET_SECONDS", 60.0)
    with show_progress(None, "reading", 100) as meter:
        meter.advance(60)
    assert terminal.getvalue() == ""


def test_another_type_is_refused_on_every_rank(tmp_path: Path) -> None:
    def body(comm: shardwise.Comm) -> str:
        with pytest.raises(shardwise.CheckpointError) as caught:
            shardwise.save({"w": WHOLE}, tmp_path / "a", progress="yes" if comm.rank else None)  # type: ignore[call-overload]
        return str(caught.value)

    for text in shardwise.run_local(body, 2):
        assert "progress='yes': pass True, False, None or a function of (done, total)" in text
    assert not (tmp_path / "a").exists()


def test_an_error_of_the_function_ends_the_save_on_every_rank(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("no room for a bar")

    def body(comm: shardwise.Comm) -> str:
        with pytest.raises(shardwise.CheckpointError) as caught:
            shardwise.save({"w": WHOLE + comm.rank * 0}, tmp_path / "a", progress=stop if comm.rank == 0 else None)
        return str(caught.value)

    assert all("no room for a bar" in text for text in shardwise.run_local(body, 2))
    assert not (tmp_path / "a").exists()
