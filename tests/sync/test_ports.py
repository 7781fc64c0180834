"""Does each way of bytes bring the right ones, and does one that does not work leave another, with the reason?"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise._torch import one_sided_transports
from shardwise.comm import default_comm
from shardwise.sync import SyncError, ports, publish, publisher, slots, subscribe
from tests.device import DEVICE
from tests.fake_device import FakeDevice, SharedFileDevice
from tests.sync import one_sided
from tests.sync.one_sided import StandInTransport
from tests.sync.test_links import SOURCES, TARGETS, move_all
from tests.sync.worlds import TOKEN, free_address, whole
from tests.world import Ranks, world_fixture

world = world_fixture(3)


@contextmanager
def stand_in(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let memory of a device stand in for that of the GPU on which all tensors are."""
    for module in (publisher, slots, ports):
        monkeypatch.setattr(module, "segment_memory", lambda _: device)
    yield device


def pull_once(trainer: Any, served: dict[str, Tensor], **options: Any) -> str:
    """Pull the newest version, and what the link says of itself then."""
    with subscribe(served, trainer.address, token=TOKEN, **options) as link:
        assert link.pull(20) == trainer.version, link.problem
        return link.describe()


@pytest.mark.parametrize("apply", ["stage", "swap", "in_place"])
def test_slots_on_a_device_are_read_there(apply: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(FakeDevice(), monkeypatch) as device:
        move_all(free_address(), SOURCES[:4], TARGETS[:3], apply=apply)
        assert device.opened and len(device.closed) == len(device.opened)


def test_generations_of_slots_on_a_device_are_in_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    with stand_in(FakeDevice(), monkeypatch), publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(3)
        slot = trainer._slots[0]
        assert slot.on_device is not None and not slot.memory[: slots.HEADER_BYTES].any()
        assert os.fstat(slot.descriptor or 0).st_size == slots.HEADER_BYTES
        assert "24 bytes by memory" in pull_once(trainer, served).replace("in 1 boxes of rank 0 ", "")
        assert served["w"].tolist() == [0, 1, 2, 3, 4, 5]


class Unreachable(FakeDevice):
    """Memory that others cannot open, as that of a GPU without peer access."""

    def open(self, handle: bytes, size: int) -> Tensor:
        raise OSError(217, "cuIpcOpenMemHandle_v2: peer access is not supported between these two devices")


class Expandable(FakeDevice):
    """Memory that has no handles, as that of expandable segments."""

    def allocate(self, size: int, address: int | None = None) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize("delta", [False, True])
def test_memory_that_cannot_be_opened_is_read_over_sockets(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    with (
        stand_in(Unreachable(), monkeypatch),
        publish(weights, "tcp://127.0.0.1:0", token=TOKEN, delta=delta) as trainer,
        subscribe(served, trainer.address, token=TOKEN) as link,
    ):
        for step in range(3):
            weights["w"].add_(1)
            trainer.push(step)
            assert link.pull(20) == step and torch.equal(served["w"], weights["w"])
        text = link.describe()
        assert "of rank 0 by sockets" in text
        assert "not by memory: its slots on a GPU cannot be opened: [Errno 217] cuIpcOpenMemHandle_v2: peer" in text
        assert link.verify()


def test_tensors_that_are_not_on_the_device_are_read_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    with stand_in(FakeDevice(), monkeypatch), publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)
        monkeypatch.setattr(ports, "segment_memory", lambda _: None)
        assert "not by memory: its slots are on a GPU, and the tensors here are not" in pull_once(trainer, served)
        assert torch.equal(served["w"], weights["w"])


def test_versions_stay_on_the_host_where_the_device_cannot_have_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights, served = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    caplog.set_level("INFO", "shardwise.sync")
    with stand_in(Expandable(), monkeypatch), publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)
        assert trainer._slots[0].on_device is None and "expandable_segments" in caplog.text
        assert "by memory" in pull_once(trainer, served) and torch.equal(served["w"], weights["w"])
    with stand_in(FakeDevice(), monkeypatch), publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        monkeypatch.setattr(publisher, "_free_bytes", lambda _: 8 * 4096)
        trainer.push(1)
        assert trainer._slots[0].on_device is None and "more than a quarter of its 32768 free bytes" in caplog.text


def test_versions_that_must_stay_on_a_device_are_an_error_where_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.arange(6.0)}
    with publish(weights, "tcp://127.0.0.1:0", token=TOKEN, keep="device", name="trainer") as trainer:
        if DEVICE == "cpu":
            with pytest.raises(SyncError, match=r"'trainer': step 1 was not published: rank 0: keep='device' needs"):
                trainer.push(1)
        said = r"step 1 was not published: rank 0: memory of .* cannot be opened"
        with stand_in(Expandable(), monkeypatch), pytest.raises(SyncError, match=said):
            trainer.push(1)
    with pytest.raises(ValueError, match="keep is one of auto, host, device; got 'gpu'"):
        publish(weights, "tcp://127.0.0.1:0", token=TOKEN, keep="gpu")  # type: ignore[arg-type]


def test_memory_of_a_publisher_that_has_gone_is_closed_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    address = free_address()
    with stand_in(FakeDevice(), monkeypatch) as device:
        trainer = publish(weights, address, token=TOKEN)
        link = subscribe(served, address, token=TOKEN)
        trainer.push(1)
        assert link.pull(20) == 1
        mapped = link._sources[0].port.find(0, time.monotonic() + 10)
        trainer.close()
        assert mapped.generation == 0  # whoever reads it now discards what it has read
        assert link.pull(0.2) is None and link.state == "waiting"
        weights["w"].add_(1)
        with publish(weights, address, token=TOKEN) as trainer:
            trainer.push(2)
            while link.version != 2:
                link.pull(20)
            assert torch.equal(served["w"], weights["w"])
            assert len(device.closed) == 1 and len(device.opened) == 2
        link.close()
        assert len(device.closed) == 2


def serve_from_device(folder: str, address: str, ready: str) -> str:
    """Rank 0 publishes from memory of a device and ends; the others, another world, keep what they have."""
    comm, device = default_comm(), SharedFileDevice(Path(folder))
    for module in (publisher, slots, ports):
        module.segment_memory = lambda _: device  # type: ignore[attr-defined,assignment]
    if comm.rank == 0:
        link = publish({"w": torch.arange(8.0)}, address, token=TOKEN, name="trainer", comm=comm.subset([0]))
        link.push(5)
        while not (Path(ready + "1").exists() and Path(ready + "2").exists()):
            link.drain(0.1)
        os._exit(0)
    ours = comm.subset([1, 2])
    served = {"w": shardwise.from_local(torch.zeros(4), shardwise.ChunkSpec(0, ranks=[1, 2]).layout((8,)), comm=ours)}
    with subscribe(served, address, token=TOKEN, comm=ours, deadline=10, name="server") as link:
        assert link.pull(30) == 5, link.problem
        Path(ready + str(comm.rank)).touch()
        until = time.monotonic() + 60
        while link.state == "current" and time.monotonic() < until:
            assert link.pull(0.1) is None
        assert "by memory" in link.describe(), link.describe()
        return f"{link.state} {link.version} {served['w'].local_tensor().tolist()} {link.problem}"


def test_a_publisher_that_dies_leaves_what_was_read_of_its_device(world: Ranks, tmp_path: Path) -> None:
    found = world.outcomes(serve_from_device, str(tmp_path), free_address(), str(tmp_path / "ready"))
    world.restart()
    assert [str(each.value)[:45] for each in found[1:]] == [
        "waiting 5 [0.0, 1.0, 2.0, 3.0] subscriber 'se",
        "waiting 5 [4.0, 5.0, 6.0, 7.0] subscriber 'se",
    ]
    assert "publisher 'trainer'" in str(found[1].value)


def serve_from_gpu(address: str, folder: str, expandable: bool) -> list[str]:
    """Rank 0 publishes from its GPU, the others pull versions and check each; rank 0 dies at the end."""
    comm = default_comm()
    if comm.rank == 0:
        if expandable:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        weights = {name: whole((300, 200), i).cuda() for i, name in enumerate("abc")}
        weights |= {"small": torch.ones(7, dtype=torch.bfloat16, device="cuda"), "n": torch.zeros((), device="cuda")}
        link = publish(weights, address, token=TOKEN, name="trainer", comm=comm.subset([0]))
        while not Path(folder, "1").exists() or not Path(folder, "2").exists():
            weights["n"].add_(1)
            weights["a"].add_(1)
            weights["b"].t().add_(1)
            link.push(int(weights["n"].item()))
            link.drain(1.0)
        os._exit(0)
    ours = comm.subset([1, 2])
    layout = shardwise.ChunkSpec(1, ranks=[1, 2]).layout((300, 200))
    parts = [torch.zeros(300, 100, device="cuda") for _ in "abc"]
    served: dict[str, Tensor] = {
        name: shardwise.from_local(x, layout, comm=ours) for name, x in zip("abc", parts, strict=True)
    }
    served |= {"small": torch.zeros(7, device="cuda"), "n": torch.zeros((), device="cuda")}
    at = slice(0, 100) if comm.rank == 1 else slice(100, 200)
    with subscribe(served, address, token=TOKEN, comm=ours, deadline=20, name="server") as link:
        for turn in range(20):
            step = link.pull(30)
            assert step is not None, link.problem
            for i, (x, moved) in enumerate(zip(parts, (1, 1, 0), strict=True)):
                wanted = whole((300, 200), i).to(x.device)[:, at] + moved * step
                assert torch.equal(x, wanted), (turn, step, i)
            assert served["small"].tolist() == [1.0] * 7 and served["n"].item() == step
        text = link.describe()
        Path(folder, str(comm.rank)).touch()
        until = time.monotonic() + 60
        while link.state == "current" and time.monotonic() < until:
            link.pull(0.1)
        return [link.state, text, str(link.problem)]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("expandable", [False, True])
def test_versions_stay_on_a_gpu(world: Ranks, expandable: bool, tmp_path: Path) -> None:
    found = world.outcomes(serve_from_gpu, free_address(), str(tmp_path), expandable)
    world.restart()
    for outcome in found[1:]:
        assert outcome.error is None, outcome.error
        state, text, problem = outcome.value
        print(text)
        assert state == "waiting" and "publisher 'trainer'" in problem
        assert "of rank 0 by memory" in text and "not by" not in text


def test_a_group_of_gloo_carries_the_same() -> None:
    move_all(free_address(), SOURCES[1:4], TARGETS[:3], transport="gloo")
    move_all(free_address(), SOURCES[2:4], TARGETS[:2], transport="gloo", max_buffer_bytes=20)


@pytest.mark.parametrize("longest", [40, 1 << 20])
def test_runs_are_cut_alike_at_both_ends(longest: int) -> None:
    weights = {"a": torch.arange(7, dtype=torch.uint8), "b": torch.arange(6.0), "c": torch.arange(9.0).bfloat16()}
    weights |= {"d": torch.arange(12).reshape(3, 4)}
    served = {"a": torch.zeros(7, dtype=torch.uint8), "b": torch.zeros(6).half(), "c": torch.zeros(9)}
    served |= {"d": torch.zeros(4, 3, dtype=torch.int64).t()}
    with publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)
        text = pull_once(trainer, served, transport="gloo", max_buffer_bytes=longest, verify=True)
        assert "of rank 0 by gloo" in text
    for name, x in served.items():
        assert torch.equal(x, weights[name].to(x.dtype)), name


def test_a_way_that_was_asked_for_and_cannot_be_taken_is_an_error_of_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> Any:
        raise OSError(98, "no port is left")

    with publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN, name="trainer") as trainer:
        trainer.push(1)
        monkeypatch.setattr(ports, "host_store", refuse)
        for way, said in (("gloo", "no store at 127.0.0.1: .* no port is left"), ("nccl", "nccl is for versions and")):
            with subscribe({"w": torch.zeros(4)}, trainer.address, token=TOKEN, transport=way, name="server") as link:
                assert link.pull(0.3) is None and link.version is None
                assert link.problem is not None
                start = f"subscriber 'server': step 1: rank 0: publisher 'trainer' rank 0: transport='{way}' cannot be"
                assert re.match(rf"{start} used: the publisher's rank: {said}", link.problem), link.problem
        with pytest.raises(ValueError, match=r"transport is one of auto, memory, sockets, gloo, nccl.*; got 'tcp'"):
            subscribe({"w": torch.zeros(4)}, trainer.address, token=TOKEN, transport="tcp")


@pytest.mark.parametrize("end", [0, 1])
def test_a_group_that_one_end_cannot_form_is_given_up_by_both(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ports.make_pair_group

    def fail(backend: str, store: Any, prefix: str, place: int, *rest: Any) -> Any:
        if place == end:
            raise RuntimeError("no memory for a group")
        return made(backend, store, prefix, place, *rest)

    served = {"w": torch.zeros(4)}
    with publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN, deadline=2.0) as trainer:
        trainer.push(1)
        monkeypatch.setattr(ports, "make_pair_group", fail)
        with subscribe(served, trainer.address, token=TOKEN, transport="gloo", deadline=1.0) as link:
            assert link.pull(0.1) is None
            assert link.problem is not None and "cannot be used: no memory for a group" in link.problem
            monkeypatch.setattr(ports, "make_pair_group", made)
            assert link.pull(20) == 1 and served["w"].tolist() == [1.0] * 4


def test_a_run_that_never_comes_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served, free = {"w": torch.zeros(4)}, threading.Event()
    with publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN, name="trainer") as trainer:
        trainer.push(1)
        with subscribe(served, trainer.address, token=TOKEN, transport="gloo", deadline=2.0, name="server") as link:
            assert link.pull(20) == 1
            send = ports.GroupCarrier.send
            monkeypatch.setattr(ports.GroupCarrier, "send", lambda *args: free.wait(60) and send(*args))
            trainer.push(2)
            began = time.monotonic()
            assert link.pull(0.1) is None and time.monotonic() - began < 20
            assert "subscriber 'server': step 2: rank 0: publisher 'trainer' rank 0: gloo: " in caplog.text
            assert link.version == 1 and served["w"].tolist() == [1.0] * 4
            monkeypatch.setattr(ports.GroupCarrier, "send", send)
            free.set()
            assert link.pull(20) == 2


@pytest.mark.parametrize("asked", ["a long ring", "a long run"])
def test_readers_cannot_ask_for_more_memory_than_a_version_takes(asked: str) -> None:
    weights, served = {"w": torch.ones(1 << 16)}, {"w": torch.zeros(1 << 16)}
    with publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)
        with subscribe(served, trainer.address, token=TOKEN, transport="sockets") as link:
            assert link.pull(20) == 1
            source, until = link._sources[0], time.monotonic() + 20
            if asked == "a long ring":
                source.channel.send({"do": "carry", "by": "gloo", "longest": 1 << 40}, until)
            else:
                rows = [read.to_json() for read in link._own[0][0]] * 1000
                source.channel.send({"do": "list", "list": 1, "rows": rows}, until)
                source.channel.receive(until)
                request = {"do": "read", "list": 1, "runs": [1000], "slot": 0, "generation": 2, "since": 0}
                source.channel.send(request, until)
                assert source.channel.receive(until) == {"whole": True, "delta": False}
            with pytest.raises(ConnectionError, match="closed"):
                source.channel.receive(until)
            weights["w"].fill_(2)
            trainer.push(2)
            while link.version != 2:
                link.pull(20)
            assert torch.equal(served["w"], weights["w"])


def test_the_best_way_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(ports, "one_sided_names", lambda: ("nixl", "other"))
    monkeypatch.setattr(ports, "_is_usable", lambda name: name == "nixl")
    monkeypatch.setattr(ports.dist, "is_nccl_available", lambda: True)
    assert ports.list_ways("auto", True, cpu, {}) == ["memory", "sockets"]
    assert ports.list_ways("auto", True, gpu, {"memory": "no peer access"}) == ["nccl", "sockets"]
    assert ports.list_ways("auto", False, gpu, {}) == ["nixl", "nccl", "sockets"]
    assert ports.list_ways("auto", False, cpu, {"nixl": "not at the other end"}) == ["sockets"]
    assert ports.list_ways("gloo", False, cpu, {"gloo": "it failed"}) == ["gloo"]


def serve_by_gloo(address: str) -> list[float]:
    """Rank 0 is one world, the others are another; their groups are beside that of all three."""
    comm = default_comm()
    if comm.rank == 0:
        weights = {"w": torch.zeros(8), "v": torch.ones(3, 4)}
        with publish(weights, address, token=TOKEN, comm=comm.subset([0])) as link:
            for step in range(1, 4):
                weights["w"].fill_(step)
                link.push(step)
                while sum(each.step == step for each in link.members) < 1:
                    link.drain(0.2)
            comm.barrier(label="all have it")
        return []
    ours = comm.subset([1, 2])
    served = {"w": shardwise.from_local(torch.zeros(4), shardwise.ChunkSpec(0, ranks=[1, 2]).layout((8,)), comm=ours)}
    served |= {"v": torch.zeros(3, 4)}
    seen = []
    with subscribe(served, address, token=TOKEN, comm=ours, transport="gloo") as link:
        while link.version != 3:
            assert link.pull(60) is not None, link.problem
            assert served["w"].local_tensor().tolist() == [float(link.version)] * 4 and served["v"].sum() == 12
            seen.append(float(link.version))
        assert "of rank 0 by gloo" in link.describe()
        comm.barrier(label="all have it")
    return seen


def test_two_worlds_of_processes_meet_in_groups_of_gloo(world: Ranks) -> None:
    assert [seen[-1:] for seen in world.run(serve_by_gloo, free_address())] == [[], [3.0], [3.0]]


@pytest.fixture
def one_sided_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[StandInTransport]]:
    """A one-sided transport that is installed, by an entry point where torch has them."""
    info = tmp_path / "standin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torch.distributed.transports]\nstandin = tests.sync.one_sided:StandInTransport\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    if one_sided_transports() is None:
        monkeypatch.setattr(ports, "one_sided_transports", one_sided.stand_in_module)
    ports._usable.clear()
    one_sided.made.clear()
    yield one_sided.made
    ports._usable.clear()


def test_one_sided_transports_read_runs_out_of_a_ring(
    one_sided_backend: list[StandInTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")  # they come first there
    move_all(free_address(), SOURCES[2:5], TARGETS[:3])
    assert any(each.reads for each in one_sided_backend) and all(each.closed for each in one_sided_backend)
    one_sided_backend.clear()
    move_all(free_address(), SOURCES[2:4], TARGETS[:3], transport=one_sided.NAME, max_buffer_bytes=64)
    assert max(nbytes for each in one_sided_backend for nbytes in each.reads) <= 64


def test_many_reads_are_one_transfer(one_sided_backend: list[StandInTransport]) -> None:
    weights = {f"w{i}": torch.full((5, 3), float(i)) for i in range(50)}
    served = {name: torch.zeros(5, 3) for name in weights}
    with publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        for step in range(2):
            trainer.push(step)
        assert "by standin" in pull_once(trainer, served, transport=one_sided.NAME)
    assert [each.reads for each in one_sided_backend if each.reads] == [[50 * 64 - 4]]
    assert all(torch.equal(served[name], weights[name]) for name in weights)


def test_a_transfer_that_does_not_end_leaves_sockets(
    one_sided_backend: list[StandInTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    weights, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    with (
        publish(weights, "tcp://127.0.0.1:0", token=TOKEN) as trainer,
        subscribe(served, trainer.address, token=TOKEN, deadline=1.0) as link,
    ):
        trainer.push(1)
        assert link.pull(20) == 1 and "of rank 0 by standin" in link.describe()
        for each in one_sided_backend:
            each.free.clear()
        weights["w"].fill_(2)
        trainer.push(2)
        while link.version != 2:
            link.pull(5)
        assert served["w"].tolist() == [2.0] * 4
        text = link.describe()
        assert "of rank 0 by sockets" in text and "not by standin: standin: transport wait timed out" in text
    assert len(ports._unfinished) >= 1  # its memory is not given back while the transfer may go on
    for each in one_sided_backend:
        each.free.set()
    ports._unfinished.clear()


def test_a_transport_that_the_other_end_does_not_have_leaves_sockets(
    one_sided_backend: list[StandInTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    served = {"w": torch.zeros(4)}
    with publish({"w": torch.ones(4)}, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)
        names = ports.one_sided_names
        asked: list[str] = []

        def only_here() -> tuple[str, ...]:
            here = threading.current_thread() is threading.main_thread()
            asked.append("here" if here else "there")
            return names() if here else ()

        monkeypatch.setattr(ports, "one_sided_names", only_here)
        text = pull_once(trainer, served)
        assert "by sockets" in text and "not by standin: the publisher's rank: the publisher does not have" in text
        assert "there" in asked and served["w"].tolist() == [1.0] * 4
