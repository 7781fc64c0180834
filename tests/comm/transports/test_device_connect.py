"""Do ranks find out together whether they can read each other's device memory, and say why they cannot?"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import ProcessGroupComm
from shardwise.comm.transports import device_memory
from shardwise.comm.transports.backends import NativeEngine
from shardwise.comm.transports.device_memory import (
    DeviceEntry,
    OpenedSegments,
    SameHostDeviceEngine,
    choose_device_engine,
    connect_devices,
    find_request,
)
from tests.fake_device import CPU, FakeDevice, NoEvents, open_fake_entry


class ThreadGatherer:
    """The bytes of ranks that are threads; those of rank r go through `given[r]`."""

    def __init__(self, world: int) -> None:
        self._barrier, self._data = threading.Barrier(world, timeout=60), dict[int, bytes]()

    def of(self, rank: int) -> Any:
        def gather(data: bytes, *, call: str) -> list[bytes]:
            self._data[rank] = data
            self._barrier.wait()
            found = [self._data[r] for r in sorted(self._data)]
            self._barrier.wait()
            return found

        return type("Gatherer", (), {"all_gather_bytes": staticmethod(gather)})


class OpenEvents(NoEvents):
    """Events that every rank can open."""

    def open(self, handles: Any) -> None:
        assert all(handles.values())


def connect(
    monkeypatch: pytest.MonkeyPatch, infos: list[dict[str, Any]], device: FakeDevice | None = None
) -> list[SameHostDeviceEngine | None]:
    """Connect a thread for each info; an info's fields replace those that the rank would write."""
    device, recorded = device or FakeDevice(), set[tuple[int, int, int]]()
    local = threading.local()

    def open_entry(_: torch.device) -> tuple[DeviceEntry | None, dict[str, Any]]:
        given = infos[local.rank]
        if "problem" in given:
            return None, given
        fields = {"process": str(local.rank)} | given
        return open_fake_entry(device, OpenEvents(local.rank, recorded), **fields)

    monkeypatch.setattr(device_memory, "_open_entry", open_entry)
    monkeypatch.setattr(device_memory, "opened_segments", lambda _: OpenedSegments(device))
    ranks, gatherer = tuple(range(len(infos))), ThreadGatherer(len(infos))

    def body(rank: int) -> SameHostDeviceEngine | None:
        local.rank = rank
        return connect_devices(gatherer.of(rank), rank, ranks, CPU, 20.0, wanted=True, instead="nccl is used")

    with ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(body, ranks))


def test_ranks_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in connect(monkeypatch, [{}, {}, {}]):
        assert engine is not None
        engine.close()


def choose(
    monkeypatch: pytest.MonkeyPatch, requests: list[str], *, reachable: bool = True, shares_gpu: bool = False
) -> list[str]:
    """What ranks end with that ask for these transports: the kind of engine, or the error."""
    local = threading.local()
    gatherer, ranks = ThreadGatherer(len(requests)), tuple(range(len(requests)))

    def connect(host: Any, rank: int, *args: Any, instead: str, **kwargs: Any) -> str | None:
        assert instead == "nccl is used"
        return "ipc" if reachable else None

    def body(rank: int) -> Any:
        local.rank = rank
        native = NativeEngine(gatherer, rank, ranks, CPU, gatherer.of(rank))  # type: ignore[arg-type]  # nothing is sent
        try:
            found: Any = choose_device_engine(native, rank, ranks, 20.0, requests[rank])
        except ValueError as error:
            return str(error)
        return "nccl" if found is native else found

    monkeypatch.setattr(device_memory, "connect_devices", connect)
    monkeypatch.setattr(device_memory, "identify_gpu", lambda _: "GPU-0" if shares_gpu else f"GPU-{local.rank}")
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(body, ranks))


def test_engine_that_was_asked_for_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for request, found in (("nccl", "nccl"), ("ipc", "ipc"), ("auto", "nccl")):
        assert choose(monkeypatch, [request] * 2) == [found] * 2


@pytest.mark.parametrize("request_", ["auto", "ipc"])
def test_ranks_that_share_a_gpu_do_without_nccl(monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    assert choose(monkeypatch, [request_] * 2, shares_gpu=True) == ["ipc"] * 2


def test_ranks_that_cannot_read_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, ["ipc"] * 2, reachable=False) == ["nccl"] * 2


def test_different_requests_are_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in choose(monkeypatch, ["auto", "ipc", "auto"]):
        assert "ranks ask for different device transports" in text
        assert "rank 1: 'ipc'" in text and "SHARDWISE_DEVICE_TRANSPORT" in text


def test_request_is_that_of_the_argument_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "SHARDWISE_DEVICE_TRANSPORT"
    monkeypatch.delenv(variable, raising=False)
    assert find_request(None) == "auto"
    monkeypatch.setenv(variable, "nccl")
    assert (find_request(None), find_request("ipc")) == ("nccl", "ipc")
    with pytest.warns(FutureWarning, match="device transport 'measured' is 'auto' now"):
        assert find_request("measured") == "auto"
    monkeypatch.setenv(variable, "fast")
    with pytest.raises(ValueError, match=r"device transport 'fast' .*SHARDWISE_DEVICE_TRANSPORT.*use one of"):
        find_request(None)


@pytest.mark.parametrize(
    ("infos", "why"),
    [
        ([{}, {"problem": "memory of cuda:0 cannot be opened"}, {}], "rank 1: memory of cuda:0 cannot be opened"),
        ([{}, {}, {"secret": "00" * 16}], "other bytes are read than rank 2 wrote"),
        ([{}, {"host": "elsewhere"}, {}], None),
    ],
)
def test_one_rank_that_cannot_is_enough_and_every_rank_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, infos: list[dict[str, Any]], why: str | None
) -> None:
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        assert connect(monkeypatch, infos) == [None] * 3
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (0 if why is None else 3)
    assert all(why is not None and why in text and text.endswith(": nccl is used") for text in texts), texts


def test_memory_that_cannot_be_opened_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of GPUs without peer access: one rank's open fails."""

    class Unreachable(FakeDevice):
        def open(self, handle: bytes, size: int) -> torch.Tensor:
            raise OSError(217, "cuIpcOpenMemHandle_v2: peer access is not supported between these two devices")

    with caplog.at_level(logging.WARNING, logger="shardwise"):
        assert connect(monkeypatch, [{}, {}], Unreachable()) == [None, None]
    assert "peer access is not supported" in caplog.text


def test_rank_without_a_driver_declines() -> None:
    entry, info = device_memory._open_entry(torch.device("cuda"))
    if entry is None:
        assert "\n" not in info["problem"]
    else:
        entry.listener.close()
    assert (entry is None) != torch.cuda.is_available()


def test_call_inside_of_a_capture_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm = ProcessGroupComm(device="cuda:0")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for call in (lambda: comm.all_reduce(torch.ones(2), label="w"), lambda: comm.barrier(label="w")):
            with pytest.raises(RuntimeError, match=r"'w'.*: the current stream is captured into a CUDA graph"):
                call()
        assert comm._engine is None and comm._failure is None
    finally:
        dist.destroy_process_group()
