"""Does one rank make the right move for all, where ranks are threads, and do they still notice what is wrong?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm import Comm, CommError, DisagreementError, LocalComm, run_local
from shardwise.comm import local as streams
from shardwise.geometry import Layout, Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.tensor import move as shared_moves
from shardwise.tensor import wrap
from shardwise.tensor.recorder import _move_watchers
from tests.moving import CountingComm, assert_holds, local_parts, values

LINE = Mesh.of(x=4)
PAIRS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Partial("sum"), Shard(0)),
    (Partial("sum"), Replicate()),
    (Partial("avg"), Replicate()),
    (Partial("max"), Shard(0)),
    (Partial("sum"), Shard(1)),
]


def layout_of(placement: Placement, shape: tuple[int, ...] = (8, 12)) -> Layout:
    return MeshSpec(LINE, (placement,)).layout(shape)


def held_by(comm: Comm, layout: Layout, *, grad: bool = False) -> Any:
    parts = local_parts(layout, comm.rank, values(layout.shape, torch.float64))
    return wrap(layout, tuple(t.clone().requires_grad_(grad) for t in parts), comm, dtype=torch.float64)


def count_calls(comm: Comm) -> int:
    """How often this rank has met the others."""
    assert isinstance(comm, LocalComm)
    return comm._hub._posted[comm.rank]


@pytest.mark.parametrize("shape", [(8, 12), (256, 300)], ids=["few bytes", "many"])
@pytest.mark.parametrize("grad", [False, True])
def test_move_that_one_rank_makes_for_all(shape: tuple[int, int], grad: bool) -> None:
    def body(comm: Comm) -> Any:
        results, meetings, gradients = [], [], []
        for there, here in PAIRS:
            tensor, before = (
                held_by(comm, layout_of(there, shape), grad=grad and there != Partial("max")),
                count_calls(comm),
            )
            held = [t.detach().clone() for t in tensor.local_parts]
            moved = tensor.redistribute(layout_of(here, shape))
            meetings.append(count_calls(comm) - before)
            assert all(map(torch.equal, tensor.local_parts, held)), "the source was changed"
            results.append([t.detach() for t in moved.local_parts])
            if moved.requires_grad:
                moved.local_parts[0].sum().backward()
                gradients.append(tensor.local_parts[0].grad)
        return results, meetings, gradients

    found = run_local(body, 4)
    for i, (there, here) in enumerate(PAIRS):
        rows = [rank[0][i] for rank in found]
        assert_holds(layout_of(here, shape), rows, values(shape, torch.float64), f"{there} -> {here}")
    shared = [1 if pair != PAIRS[-1] else 2 for pair in PAIRS]  # the last reduction does not end in runs
    assert [rank[1] for rank in found] == [shared] * 4
    assert all(g is not None and g.abs().min() > 0 for rank in found for g in rank[2])


def test_ranks_that_make_no_offer_take_part() -> None:
    """As a rank does whose program is traced, or whose moves are recorded."""

    def body(comm: Comm) -> list[list[Tensor]]:
        own = CountingComm(comm) if comm.rank == 2 else comm
        return [list(held_by(own, layout_of(a)).redistribute(layout_of(b)).local_parts) for a, b in PAIRS]

    found = run_local(body, 4)
    for i, (there, here) in enumerate(PAIRS):
        assert_holds(layout_of(here), [rank[i] for rank in found], values((8, 12), torch.float64), f"{there} -> {here}")


def test_rank_outside_of_the_layouts_takes_part() -> None:
    rows, columns = (MeshSpec(Mesh.of(x=2), (kind,)).layout((4, 6)) for kind in (Shard(0), Shard(1)))

    def body(comm: Comm) -> Any:
        before = count_calls(comm)
        return held_by(comm, rows).redistribute(columns).local_parts, count_calls(comm) - before

    found = run_local(body, 3)
    assert_holds(columns, [held for held, _ in found], values((4, 6), torch.float64), "two of three ranks")
    assert [meetings for _, meetings in found] == [1] * 3


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (
            (Shard(1), None),
            (Replicate(), None),
            "to is '[8,12] on x=4: S(1)' on ranks 0, 2, 3 and '[8,12] on x=4: R' on rank 1",
        ),
        ((Shard(1), 1 << 20), (Shard(1), None), "max_buffer_bytes is 1048576 on ranks 0, 2, 3 and None on rank 1"),
        ((Shard(1), None), (Shard(1), 4), "max_buffer_bytes is None on ranks 0, 2, 3 and 4 on rank 1"),
    ],
)
def test_ranks_that_ask_for_different_moves(one: Any, other: Any, text: str) -> None:
    """Also in calls that are known from before; then all ranks go on."""

    def body(comm: Comm) -> Any:
        tensor, errors = held_by(comm, layout_of(Shard(0))), []
        for placement, limit in (one, other):
            tensor.redistribute(layout_of(placement), max_buffer_bytes=None if limit == 4 else limit)
        for _ in range(2):
            placement, limit = other if comm.rank == 1 else one
            try:
                tensor.redistribute(layout_of(placement), max_buffer_bytes=limit)
            except DisagreementError as error:
                errors.append(str(error))
        return errors, tensor.redistribute(layout_of(Shard(1))).local_parts

    found = run_local(body, 4)
    assert_holds(layout_of(Shard(1)), [held for _, held in found], values((8, 12), torch.float64), "after the errors")
    assert all(errors == found[0][0] and len(errors) == 2 for errors, _ in found)
    assert text in found[0][0][0], found[0][0][0]


def test_layouts_with_one_meaning_and_other_words_are_different_requests() -> None:
    other = MeshSpec(Mesh.of(y=4), (Shard(1),)).layout((8, 12))

    def body(comm: Comm) -> tuple[str, str]:
        tensor = held_by(comm, layout_of(Shard(0)))
        names = [str(tensor.redistribute(dst).sharding.spec) for dst in (layout_of(Shard(1)), other)]
        with pytest.raises(DisagreementError) as caught:
            tensor.redistribute(other if comm.rank else layout_of(Shard(1)))
        return "".join(names), str(caught.value)

    found = run_local(body, 4)
    assert found == [found[0]] * 4 and "x=4" in found[0][0] and "y=4" in found[0][0] and "y=4" in found[0][1]


@pytest.mark.parametrize("shape", [(8, 12), (256, 300)], ids=["few bytes", "many"])
def test_failing_copy_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    def fail(*tensors: object) -> None:
        raise RuntimeError("no such memory")

    def body(comm: Comm) -> str:
        tensor = held_by(comm, layout_of(Shard(0), shape))
        with pytest.raises(CommError) as caught:
            tensor.redistribute(layout_of(Shard(1), shape))
        return str(caught.value)

    for name in ("foreach_copy", "copy_boxes"):  # on the CPU, and on other devices
        monkeypatch.setattr(shared_moves, name, fail)
    assert run_local(body, 4) == ["'redistribute': RuntimeError: no such memory"] * 4


def test_rank_that_ends_early_is_named() -> None:
    def body(comm: Comm) -> str:
        tensor = held_by(comm, layout_of(Shard(0)))
        if comm.rank == 3:
            return ""
        with pytest.raises(CommError) as caught:
            tensor.redistribute(layout_of(Shard(1)))
        return str(caught.value)

    assert "rank 3 did not take part before it returned" in run_local(body, 4)[0]


def test_watchers_see_each_move_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "shardwise.tensor.recorder._move_watchers", [*_move_watchers, lambda move: seen.append(move.label)]
    )

    def body(comm: Comm) -> None:
        for grad in (False, True):
            held_by(comm, layout_of(Shard(0)), grad=grad).redistribute(layout_of(Shard(1)), label=f"seen {grad}")

    run_local(body, 4)
    assert sorted(seen) == ["seen False"] * 4 + ["seen True"] * 4


def test_moves_in_inference_mode() -> None:
    def body(comm: Comm) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            moved: tuple[Tensor, ...] = held_by(comm, layout_of(Shard(0))).redistribute(layout_of(Shard(1))).local_parts
        return moved

    assert_holds(layout_of(Shard(1)), run_local(body, 4), values((8, 12), torch.float64), "inference")


def test_streams_wait_for_each_other_only_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, int]] = []

    class FakeStream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def wait_stream(self, other: FakeStream) -> None:
            waits.append((self.handle, other.handle))

    monkeypatch.setattr(streams, "_open_stream", lambda device, handle: FakeStream(handle))
    device = torch.device("cuda")
    streams.wait_for_streams(device, 0, [0, 0, None])
    streams.wait_for_streams(device, 7, [7, 7])
    streams.follow_stream(device, 0, 0)
    assert waits == []
    streams.wait_for_streams(device, 7, [7, 8])
    assert sorted(waits) == [(7, 0), (7, 8)]
    waits.clear()
    streams.follow_stream(device, 8, 7)
    assert waits == [(8, 7), (0, 8)]
