"""Does a trace show what ranks did: operators, moves with their bytes and lines, and who waited for whom?"""

from __future__ import annotations

import json
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, ModelPlan, default_comm, run_local, shard_module
from shardwise.comm.background import BackgroundQueue
from shardwise.comm.local import LocalComm
from shardwise.nn import ShardingPlan
from shardwise.tensor.execute import Running
from shardwise.tensor.recorder import recorders
from shardwise.tracing import find_offset, merge_parts

ROWS, COLUMNS = ChunkSpec(0, ranks=2), ChunkSpec(1, ranks=2)
PLAN = ModelPlan(Mesh.of(tp=2), {"0.weight": "S(0)", "1.weight": "S(1)"}, input_plan="replicated")


def read(path: Path, category: str | None = None) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e["ph"] == "X" and category in (None, e["cat"])]


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    shard_module(net, PLAN)
    return net


def test_a_move_has_bytes_layouts_and_the_users_line(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def body(comm: Comm) -> None:
        x = shardwise.ones(ROWS, 4, 2)
        with shardwise.trace(path):
            x.redistribute(COLUMNS)

    run_local(body, 2)
    moves = read(path, "move")
    assert sorted(e["pid"] for e in moves) == [0, 1]
    for event in moves:
        assert event["name"] == "redistribute" and event["tid"] == 1
        details = event["args"]
        assert (details["bytes"], details["sent_bytes"], details["moved_bytes"]) == (8, 8, 16)
        assert details["from"] == "f32[4,2] as chunk(0) over 0-1" and details["to"] == "f32[4,2] as chunk(1) over 0-1"
        assert details["line"].startswith("test_trace.py:")
    named = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in named] == [(0, "rank 0"), (1, "rank 1")]


def test_a_step_has_operators_of_both_passes_and_the_forward_lines(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def body(comm: Comm) -> None:
        net, x = make_net(), torch.ones(2, 4, requires_grad=True)
        for _ in range(2):  # the second step takes shortcuts
            with shardwise.trace(path):
                net(x).square().sum().backward()

    run_local(body, 2)
    operators = [e for e in read(path, "operator") if e["pid"] == 0]
    forward = [e["name"] for e in operators if e["args"]["pass"] == "forward"]
    backward = [e["name"] for e in operators if e["args"]["pass"] == "backward"]
    assert forward.count("linear") == 2 and "sum" in forward
    assert any("Mm" in name or "Linear" in name for name in backward)
    assert all(e["args"]["line"].startswith("test_trace.py:") for e in operators)
    moves = [e for e in read(path) if e["pid"] == 0 and e["cat"] == "move"]
    assert len(moves) >= 1 and all(e["args"]["bytes"] > 0 for e in moves)
    linear = next(e for e in operators if e["name"] == "linear")
    assert linear["args"]["from"] == "f32[2,4] on tp=2: R | f32[8,4] on tp=2: S(0)"
    assert linear["args"]["to"] == "f32[2,8] on tp=2: S(1)"


class RankClock:
    """The clock of one rank in a trace: it stands still until a test moves it on; a rank reads it before it waits."""

    def __init__(self) -> None:
        self.now = 0
        self.was_read = threading.Event()


def hold_clocks(monkeypatch: pytest.MonkeyPatch) -> list[RankClock]:
    """Clocks of two ranks, by which their traces go."""
    clocks = [RankClock(), RankClock()]

    def read_clock() -> int:
        clock = clocks[default_comm().rank]
        now = clock.now
        clock.was_read.set()
        return now

    for name in ("shardwise.tensor.recorder", "shardwise.tracing"):
        monkeypatch.setattr(import_module(name), "time", SimpleNamespace(monotonic_ns=read_clock))
    return clocks


def wait_for_a_call(comm: Comm) -> None:
    """Return when the other rank has made a call that this one has not made."""
    assert isinstance(comm, LocalComm)
    deadline = time.monotonic() + 60
    while not comm._hub._open:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ends(events: list[dict[str, Any]], last: bool) -> dict[int, float]:
    """When each rank's first event begins, or the last one ends."""
    ranks = {e["pid"] for e in events}
    if last:
        return {rank: max(e["ts"] + e["dur"] for e in events if e["pid"] == rank) for rank in ranks}
    return {rank: min(e["ts"] for e in events if e["pid"] == rank) for rank in ranks}


def test_waiting_is_apart_from_moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clocks, begin = tmp_path / "step.json", hold_clocks(monkeypatch), threading.Event()

    def body(comm: Comm) -> None:
        x = shardwise.ones(ROWS, 4, 2)
        with shardwise.trace(path):
            if comm.rank == 0:
                assert begin.wait(60)
            else:
                begin.set()
                wait_for_a_call(comm)  # rank 0 has begun to wait for this one
                for clock in clocks:
                    clock.now += 200_000_000
            x.redistribute(COLUMNS)

    run_local(body, 2)
    waits = read(path, "wait")
    assert {e["args"]["line"].partition(":")[0] for e in waits} == {"test_trace.py"}
    begun, ended = ends(waits, last=False), ends(waits, last=True)
    assert {rank: ended[rank] - begun[rank] for rank in (0, 1)} == {0: 200_000, 1: 0}
    assert {e["pid"]: e["dur"] for e in read(path, "move")} == {0: 0, 1: 0}


def test_moves_that_run_beside_others_have_tracks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def body(comm: Comm) -> None:
        x, y = shardwise.ones(ROWS, 4, 2), shardwise.ones(ROWS, 6, 2)
        with shardwise.trace(path):
            first, second = x.redistribute(COLUMNS, async_op=True), y.redistribute(COLUMNS, async_op=True)
            second.wait(), first.wait()

    run_local(body, 2)
    assert {(e["pid"], e["tid"]) for e in read(path, "move")} == {(0, 1), (0, 2), (1, 1), (1, 2)}


def test_lookups_show_their_rows_as_moves(tmp_path: Path) -> None:
    """Rank 0 holds rows 0 to 3 and rank 1 rows 4 to 7, of 2 numbers each; rank 0 wants two rows of rank 1."""
    path = tmp_path / "step.json"

    def body(comm: Comm) -> None:
        table = nn.Embedding(8, 2)
        shard_module(table, ShardingPlan({"weight": ROWS}))
        ids = torch.tensor([0, 5, 6] if comm.rank == 0 else [7])
        with shardwise.trace(path):
            table(ids).sum().backward()

    run_local(body, 2)
    moves = {(e["pid"], e["name"].rpartition(": ")[2]): e["args"] for e in read(path, "move")}
    assert (moves[0, "rows"]["bytes"], moves[1, "rows"]["sent_bytes"]) == (16, 16)
    assert (moves[1, "gradients"]["bytes"], moves[0, "gradients"]["sent_bytes"]) == (16, 16)
    assert all(details["line"].startswith("test_trace.py:") for details in moves.values())
    assert {e["pid"] for e in read(path, "wait") if e["name"].endswith(": agree")} == {0, 1}


def test_waiting_for_a_move_in_the_background_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clocks = tmp_path / "step.json", hold_clocks(monkeypatch)

    def body(comm: Comm) -> None:
        queue, clock = BackgroundQueue(), clocks[comm.rank]
        with shardwise.trace(path):
            clock.was_read.clear()

            def end_when_waited_for() -> list[Any]:
                assert clock.was_read.wait(60)
                clock.now += 50_000_000
                return []

            moves = Running(comm, "linear, ahead", call=queue.submit(end_when_waited_for))
            assert moves.wait() == [] and moves.wait() == []

    run_local(body, 2)
    waits = [(e["pid"], e["tid"], e["dur"]) for e in read(path, "wait") if e["name"] == "linear, ahead: wait"]
    assert sorted(waits) == [(0, 1000, 50_000), (1, 1000, 50_000)]


def test_a_compiled_step_shows_its_moves(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def body(comm: Comm) -> None:
        net, x = make_net(), torch.ones(2, 4)
        step = shardwise.compile(lambda x: net(x).square().sum().backward(), backend="eager")
        step(x)
        with shardwise.trace(path):
            step(x)

    run_local(body, 2)
    events = read(path)
    assert {e["pid"] for e in events if e["cat"] == "move"} == {0, 1}
    assert any(e["name"].startswith("compiled") for e in events if e["cat"] == "operator")


def test_a_rank_that_raises_keeps_its_part(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def body(comm: Comm) -> None:
        x = shardwise.ones(ROWS, 4, 2)
        with shardwise.trace(path):
            x.redistribute(COLUMNS)
            if comm.rank == 1:
                raise ZeroDivisionError("on one rank")

    with pytest.raises(ZeroDivisionError) as caught:
        run_local(body, 2)
    own = tmp_path / "step.rank1.json"
    assert f"the trace of rank 1 up to here is in {own}" in caught.value.__notes__
    assert [e["pid"] for e in read(own, "move")] == [1]
    assert not path.exists() and not recorders


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(ValueError, match="cannot be written") as caught, shardwise.trace(tmp_path / "no" / "x"):
            pass
        return str(caught.value)

    one, other = run_local(body, 2)
    assert one == other and f"there is no folder {tmp_path / 'no'}" in one


def test_a_trace_inside_a_trace_is_refused(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        with shardwise.trace(tmp_path / "a.json"), pytest.raises(ValueError, match="is being traced already"):  # noqa: SIM117
            with shardwise.trace(tmp_path / "b.json"):
                pass

    run_local(body, 2)


def test_nothing_is_recorded_outside(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        x = shardwise.ones(ROWS, 4, 2)
        with shardwise.trace(tmp_path / "step.json"):
            pass
        x.redistribute(COLUMNS)

    run_local(body, 2)
    assert not recorders and read(tmp_path / "step.json") == []


def test_clocks_of_hosts_are_put_together() -> None:
    """Rank 1's clock is 5 s ahead; its exchanges ended when those of rank 0 did."""
    clock, other = [[0, 100], [200, 300]], [[5_000_000_010, 5_000_000_110], [5_000_000_205, 5_000_000_310]]
    offset = find_offset(clock, other)
    assert abs(offset + 5_000_000_000) < 100
    span = {"name": "m", "category": "move", "begin": 1000, "end": 3000, "track": 1, "details": {}, "move": "a#0"}
    late = {**span, "begin": 5_000_002_000, "end": 5_000_003_000, "sources": [0]}
    merged = merge_parts(
        [
            {"rank": 0, "clock": clock, "spans": [{**span, "sources": [1]}]},
            {"rank": 1, "clock": other, "spans": [late]},
        ]
    )
    found = {(e["pid"], e["cat"]): e["dur"] for e in merged["traceEvents"] if e["ph"] == "X"}
    assert found[0, "wait"] == pytest.approx(1.0, abs=0.1) and found[0, "move"] == pytest.approx(1.0, abs=0.1)
    assert (1, "wait") not in found


def test_the_profiler_shows_moves_by_name() -> None:
    """A profiler belongs to the process: one of the ranks starts it, and it sees the thread of that rank."""
    found: list[str] = []

    def body(comm: Comm) -> None:
        x = shardwise.ones("on tp=2: S(0)", 4, 2)
        if comm.rank == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
                x.redistribute("S(1)")
            found.extend(event.name for event in profile.events())
        else:
            x.redistribute("S(1)")

    run_local(body, 2)
    assert [name for name in found if name.startswith("shardwise.move redistribute: ") and " -> " in name]


def test_comm_debug_mode_counts_moves() -> None:
    def body(comm: Comm) -> list[int]:
        x, weight = shardwise.ones("on tp=2: S(1)", 4, 4), shardwise.ones("on tp=2: S(1)", 2, 4)
        counts = []
        with CommDebugMode() as mode:
            x.redistribute("S(0)")
        counts.append(mode.get_comm_counts()[torch.ops.shardwise.move])
        with CommDebugMode() as mode:
            x.redistribute("S(1)")
        counts.append(mode.get_total_counts())
        for _ in range(2):  # the long path, then a shortcut
            with CommDebugMode() as mode:
                F.linear(x, weight).relu()
            counts.append(mode.get_total_counts())
        return counts

    assert run_local(body, 2) == [[1, 0, 1, 1]] * 2
