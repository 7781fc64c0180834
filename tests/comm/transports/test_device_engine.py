"""Do ranks that read each other's device memory move the right bytes, and never a segment that is gone?

Memory of one process stands in for a device (`tests/fake_device.py`). The engines are the real ones, over real sockets,
one thread for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm import Comm, DisagreementError, LocalComm, run_local
from shardwise.comm.faults import TransportError
from shardwise.comm.protocol import Capabilities
from shardwise.comm.transports import device_memory
from shardwise.comm.transports.device_memory import OpenedSegments, SameHostDeviceEngine, SharedSegments
from shardwise.geometry import Layout
from shardwise.tensor import wrap
from tests.fake_device import FakeDevice, engines, on_device, run
from tests.moving import assert_holds, layouts, local_parts, reducible, values


def test_boxes_with_strides_are_read_where_they_are() -> None:
    device = FakeDevice()
    held = [on_device(device, torch.arange(24).view(4, 6) + 100 * rank) for rank in range(3)]

    def body(rank: int, engine: SameHostDeviceEngine) -> Tensor:
        columns = {r: [held[rank][:, 2 * r : 2 * r + 2]] for r in range(3) if r != rank}
        out = torch.full((3, 4, 2), -1)
        out[rank] = held[rank][:, 2 * rank : 2 * rank + 2]

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            for peer, (box,) in lent.items():
                assert box.stride() == (6, 1)
                assert box.data_ptr() == held[peer][:, 2 * rank :].data_ptr()
                out[peer] = box

        engine.lend(columns, [r for r in range(3) if r != rank], take, call="swap").wait()
        return out

    with engines(3, device) as made:
        for rank, out in enumerate(run(made, body)):
            assert torch.equal(out, torch.stack([held[p][:, 2 * rank : 2 * rank + 2] for p in range(3)]))


@pytest.mark.parametrize("length", [0, 1, 7, 300_000])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_reductions_gathers_and_broadcasts(op: Any, length: int) -> None:
    device = FakeDevice()
    values = [torch.arange(3 * length, dtype=torch.float64).add(1).roll(rank) for rank in range(3)]
    stacked = torch.stack(values)
    whole = {
        "sum": stacked.sum(0),
        "avg": stacked.sum(0) / 3,
        "min": stacked.amin(0),
        "max": stacked.amax(0),
        "product": stacked.prod(0),
    }[op]

    def body(rank: int, engine: SameHostDeviceEngine) -> None:
        mine = on_device(device, values[rank])
        out, everything = (on_device(device, torch.zeros(n * length, dtype=torch.float64)) for n in (1, 9))
        engine.reduce_scatter_into(out, mine, op, call="scatter").wait()
        assert torch.equal(out, whole.view(3, -1)[rank])
        engine.all_gather_into(everything, mine, call="gather").wait()
        assert torch.equal(everything, stacked.view(-1))
        engine.all_reduce(mine, op, call="reduce").wait()
        assert torch.equal(mine, whole)
        mine.copy_(values[rank])
        engine.broadcast(mine, 1, call="broadcast").wait()
        assert torch.equal(mine, values[1])
        assert engine.all_gather_bytes(bytes([rank]), call="bytes") == [b"\0", b"\1", b"\2"]

    with engines(3, device) as made:
        run(made, body)


def test_boxes_are_exchanged() -> None:
    device = FakeDevice()
    held = [on_device(device, torch.arange(24).view(4, 6) + 100 * rank) for rank in range(3)]

    def body(rank: int, engine: SameHostDeviceEngine) -> Tensor:
        out = on_device(device, torch.full((4, 6), -1))
        sends = {r: [held[rank][:, 2 * r : 2 * r + 2]] for r in range(3)}
        works = [engine.exchange(sends, {r: [out[:, 2 * r : 2 * r + 2]] for r in range(3)}, call="swap")]
        works.append(engine.exchange({}, {}, call="nothing"))
        for work in reversed(works):
            work.wait()
        return out

    with engines(3, device) as made:
        for rank, out in enumerate(run(made, body)):
            assert torch.equal(out, torch.cat([held[r][:, 2 * rank : 2 * rank + 2] for r in range(3)], 1))


@pytest.mark.parametrize("one_shot", [False, True])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_all_ranks_get_the_same_bits_by_each_path(monkeypatch: pytest.MonkeyPatch, op: Any, one_shot: bool) -> None:
    monkeypatch.setattr(device_memory, "_ONE_CALL_BYTES", 1 << 20 if one_shot else 0)
    generator = torch.Generator("cpu").manual_seed(4)
    given = [torch.randn(1003, generator=generator, device="cpu") for _ in range(3)]
    wanted = torch.maximum(torch.maximum(*given[:2]), given[2]) if op == "max" else given[0] + given[1] + given[2]
    wanted = wanted / 3 if op == "avg" else wanted
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> None:
        mine, out = on_device(device, given[rank]), on_device(device, torch.zeros(1003, device="cpu"))
        engine.all_reduce_into(out, mine, op, call="into").wait()
        assert torch.equal(out, wanted) and torch.equal(mine, given[rank])
        engine.all_reduce(mine, op, call="in place").wait()
        assert torch.equal(mine, wanted)

    with engines(3, device) as made:
        run(made, body)


def test_one_rank_alone() -> None:
    with engines(1, FakeDevice()) as made:
        x = torch.tensor([1.0, 2.0])
        made[0].all_reduce(x, "sum", call="reduce").wait()
        assert x.tolist() == [1.0, 2.0]


def describe(shared: SharedSegments, *tensors: Tensor) -> tuple[bytes, list[Tensor]]:
    messages, kept = shared.describe({1: tensors})
    return messages[1], kept[1]


def test_memory_that_others_cannot_open_is_copied() -> None:
    device = FakeDevice()
    shared = SharedSegments(device)
    tensor = torch.ones(3)  # in no segment
    with pytest.raises(OSError, match="cannot be opened by other processes"):
        describe(shared, tensor)
    tensor.clone = lambda memory_format: on_device(device, torch.ones(3))  # type: ignore[method-assign]  # a device's
    message, kept = describe(shared, tensor)
    assert kept[0] is not tensor
    assert torch.equal(OpenedSegments(device).read("me", message)[0], torch.ones(3))


def test_handle_is_made_and_opened_once_for_each_segment() -> None:
    device = FakeDevice()
    memory = device.allocate(64)
    shared, opened = SharedSegments(device), OpenedSegments(device)
    for at in (0, 8, 32):
        message, _ = describe(shared, memory[at : at + 8].view(torch.int64))
        opened.read("other", message)[0].fill_(at)
    assert device.opened == [b"1"]
    assert memory.view(torch.int64).tolist() == [0, 8, 0, 0, 32, 0, 0, 0]


def test_new_segment_at_the_address_of_a_freed_one_is_opened_again() -> None:
    device = FakeDevice()
    shared, opened = SharedSegments(device), OpenedSegments(device)
    first = device.allocate(64)
    message, _ = describe(shared, first)
    opened.read("other", message)
    device.free(first)
    second = device.allocate(64, address=first.data_ptr())
    assert second.data_ptr() == first.data_ptr()
    later, _ = describe(shared, second)
    assert later != message
    opened.read("other", later)
    assert device.opened == [b"1", b"2"]
    assert device.closed == [first.data_ptr()]
    assert len(opened) == 1
    again, _ = describe(shared, second)
    opened.read("other", again)
    assert (device.opened, len(device.closed)) == ([b"1", b"2"], 1)


def test_tensors_of_a_closed_segment_are_forgotten() -> None:
    device = FakeDevice()
    shared, opened = SharedSegments(device), OpenedSegments(device)
    first = device.allocate(8)
    message, _ = describe(shared, first)
    assert opened.read("owner", message)[0] is opened.read("owner", message)[0]
    device.free(first)
    opened.read("owner", describe(shared, device.allocate(8))[0])
    assert device.closed == [first.data_ptr()]
    with pytest.raises(KeyError):  # it would have to be opened, and its handle is gone
        opened.read("owner", message)


def test_same_number_of_another_process_is_another_segment() -> None:
    device, other = FakeDevice(), FakeDevice()
    ours, _ = describe(SharedSegments(device), device.allocate(8))
    theirs, _ = describe(SharedSegments(other), other.allocate(8))
    assert ours == theirs
    opened = OpenedSegments(device)
    assert opened.read("a", ours)[0] is not opened.read("b", theirs)[0]
    assert len(opened) == 2


def test_freed_segments_are_noticed_without_new_ones() -> None:
    device = FakeDevice()
    shared, opened = SharedSegments(device), OpenedSegments(device)
    kept, freed = device.allocate(8), device.allocate(8)
    opened.read("other", describe(shared, kept, freed)[0])
    device.free(freed)
    for _ in range(65):
        opened.read("other", describe(shared, kept)[0])
    assert device.closed == [freed.data_ptr()]


def test_ranks_in_different_calls_are_named() -> None:
    def body(rank: int, engine: SameHostDeviceEngine) -> str:
        try:
            engine.all_gather_bytes(b"", call=f"call {rank}")
        except TransportError as error:
            engine.abort(error.reason, error.suspects)
            return error.reason
        return "no error"

    with engines(2, FakeDevice()) as made:
        for text in run(made, body):
            assert "the ranks made different calls" in text


def test_rank_that_never_calls_is_named() -> None:
    with engines(2, FakeDevice(), timeout=0.2) as made, pytest.raises(TransportError, match=r"no answer within 0\.2 s"):
        made[0].all_gather_bytes(b"", call="gather")
    with engines(2, FakeDevice(), timeout=20.0) as made:
        made[1].close()
        with pytest.raises(TransportError, match="its process ended"):
            made[0].all_gather_bytes(b"", call="gather")


def test_sizes_that_differ_are_named() -> None:
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> str:
        sends = {1: [device.allocate(8)]} if rank == 0 else {}
        receives = {0: [device.allocate(4)]} if rank == 1 else {}
        try:
            engine.exchange(sends, receives, call="move").wait()
        except TransportError as error:
            engine.abort(error.reason, error.suspects)
            return error.reason
        return "no error"

    with engines(2, device) as made:
        for text in run(made, body):
            assert text.startswith("move: rank 0 sends [8] bytes to rank 1, which do not match the [4] received")


def test_call_that_failed_while_another_was_awaited_does_not_end() -> None:
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> list[str]:
        reads = rank == 0
        sends, receives = ({}, {1: [device.allocate(4)]}) if reads else ({0: [device.allocate(8)]}, {})
        work = engine.exchange(sends, receives, call="move")
        texts = []
        for wait in (lambda: engine.all_gather_bytes(b"", call="next"), work.wait):
            try:
                wait()
                texts.append("no error")
            except TransportError as error:
                engine.abort(error.reason, error.suspects)
                texts.append(error.reason)
        return texts

    with engines(2, device) as made:
        first, _ = run(made, body)
        assert all(text.startswith("move: rank 1 sends [8] bytes to rank 0") for text in first), first


def test_rank_whose_memory_cannot_be_lent_is_named_on_every_rank() -> None:
    """As after expandable segments were turned on when the ranks had connected."""
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> tuple[str, tuple[int, ...]]:
        mine = torch.ones(4) if rank else on_device(device, torch.ones(4))
        try:
            engine.all_reduce(mine, "sum", call="sum of w").wait()
        except TransportError as error:
            engine.abort(error.reason, error.suspects)
            return error.reason, tuple(error.suspects)
        return "no error", ()

    with engines(2, device) as made:
        for text, ranks in run(made, body):
            assert text.startswith("sum of w: rank 1 cannot lend its tensors: memory of cpu cannot be opened by other")
            assert ranks == (1,)


class LendingLocalComm(LocalComm):
    """Ranks as threads that read each other's boxes where they are, as they do on a GPU."""

    capabilities = Capabilities(reads_peers=True)  # type: ignore[assignment]  # as of processes, which fuse no moves

    def exchange(self, sends: Any, receives: Any, **options: Any) -> Any:
        boxes = [t for side in (sends, receives) for listed in side.values() for t in listed]
        assert all(t.dim() == 2 for t in boxes), "boxes were packed"
        return super().exchange(sends, receives, **options)


def _move_lending(comm: Comm, src: Layout, dst: Layout, whole: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(comm, LocalComm)
    lending = LendingLocalComm(comm.rank, comm._hub, timeout=comm.timeout)
    held = wrap(src, tuple(local_parts(src, comm.rank, whole)), lending, dtype=whole.dtype)
    return held.redistribute(dst).local_tensors()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_between_ranks_that_lend_pack_nothing(dtype: torch.dtype) -> None:
    found = [(name, layout) for name, layout in layouts(12, 12).items() if reducible(layout, dtype)]
    whole = values((12, 12), dtype)
    pairs = [(a, b) for i, a in enumerate(found) for j, b in enumerate(found) if (i + 2 * j) % 5 == 0]
    for (before, src), (after, dst) in pairs:
        assert_holds(dst, run_local(_move_lending, 4, src, dst, whole), whole, f"{before} -> {after}")


def test_threads_that_lend_to_one_that_does_not_expect_it_are_named() -> None:
    def body(comm: LocalComm) -> None:
        sends = {1: [torch.ones(2)]} if comm.rank == 0 else {}
        comm.exchange(sends, {}, label="move", combine=lambda arrived: None).wait()

    with pytest.raises(RuntimeError, match=r"'move': rank 0 send to rank 1, which expects"):
        run_local(body, 2)


def test_ranks_that_disagree_take_back_what_they_started() -> None:
    """Some have started the move when it turns out that another one asks for something else; then all go on."""

    def body(comm: LocalComm) -> str:
        lending = LendingLocalComm(comm.rank, comm._hub, timeout=comm.timeout)
        found = layouts(12, 12)
        src, dst = found["rows"], found["columns" if comm.rank else "replicated"]
        whole = values((12, 12), torch.float32)
        held = wrap(src, tuple(local_parts(src, comm.rank, whole)), lending, dtype=whole.dtype)
        with pytest.raises(DisagreementError, match=r"to is .* on rank 0 and .* on ranks 1-3"):
            held.redistribute(dst)
        return str(bool(torch.equal(held.redistribute(found["replicated"]).local_tensor(), whole)))

    assert run_local(body, 4) == ["True"] * 4


def test_call_that_was_started_while_ranks_agree_is_taken_back() -> None:
    device = FakeDevice()
    held = [on_device(device, torch.full((2,), rank)) for rank in range(3)]

    def body(rank: int, engine: SameHostDeviceEngine) -> list[Any]:
        found: list[Any] = []
        for said in (b"same", b"other" if rank == 1 else b"same", b"same"):
            out = on_device(device, torch.full((2,), -1))
            finish = engine.start_agreeing(said, call="agree")
            number = engine.calls + 1
            work = None
            if said == b"same":
                sends, receives = {(rank + 1) % 3: [held[rank]]}, {(rank - 1) % 3: [out]}
                work = engine.exchange(sends, receives, call="ring")
            if len(set(finish())) > 1:
                engine.withdraw_call(number)
                found.append(engine.all_gather_bytes(b"", call="withdrawn"))
            elif work is not None:
                work.wait()
                found.append(out.tolist())
        return found

    with engines(3, device) as made:
        for rank, (first, withdrawn, last) in enumerate(run(made, body)):
            assert first == last == [(rank - 1) % 3] * 2
            assert withdrawn == [b""] * 3
