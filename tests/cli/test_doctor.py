"""Does `shardwise doctor` say what works between ranks, and what to do where something does not?"""

import json
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli import doctor as doctor_command
from shardwise.cli.doctor import FAILED, SLOWER, DoctorFinding, advise_memory_reading, examine_gpus, examine_torch
from shardwise.cli.main import app
from shardwise.comm import CommError
from shardwise.comm.launch import ProbeResult
from tests.world import DeviceWorld

probes = import_module("shardwise.comm.launch")


def never_ends() -> tuple[None, str]:
    time.sleep(600)
    return None, ""


def test_transports_are_tried_and_a_hang_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LIMIT_SECONDS", 240.0)
    with DeviceWorld(2, timeout=60) as world:
        sockets = probes._run_probe(world, "sockets", probes.try_sockets)
        memory = probes._run_probe(world, "memory", probes.try_memory)
        ipc = probes._run_probe(world, "cuda ipc", probes.try_cuda_ipc)
        monkeypatch.setattr(probes, "LIMIT_SECONDS", 0.5)
        hang = probes._run_probe(world, "hang", never_ends)
    assert sockets.works and sockets.bytes_per_second
    assert memory.works or (memory.problem and "of process" in memory.problem)
    assert ipc.problem is None or ipc.problem.startswith("rank 0: ")
    assert hang.problem == "rank 0: stopped: it had not ended when its world was shut down"


class LateComm:
    """A comm whose other rank never comes."""

    def barrier(self, *, label: str) -> None:
        raise CommError("'probe': rank 1 did not take part", (1,))


def test_rank_that_failed_says_why_even_if_the_other_one_hangs() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: invalid device ordinal\nCompile with TORCH_USE_CUDA_DSA")

    late: Any = LateComm()
    assert probes._attempt(late, fail) == (None, "CUDA error: invalid device ordinal")
    with pytest.raises(CommError, match="did not take part"):
        probes._attempt(late, lambda: None)


def run_doctor(monkeypatch: pytest.MonkeyPatch, *results: ProbeResult) -> tuple[int, dict[str, DoctorFinding], str]:
    monkeypatch.setattr(probes, "probe_transports", lambda gpus: list(results))
    said = CliRunner().invoke(app, ["doctor"])
    data = CliRunner().invoke(app, ["doctor", "--json"])
    assert said.exit_code == data.exit_code
    found = json.loads(data.stdout)
    assert found["ok"] == (data.exit_code == 0)
    return said.exit_code, {each["name"]: DoctorFinding(**each) for each in found["findings"]}, said.stdout


def test_what_works_is_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ProbeResult("memory", problem="rank 1: read 0 of 16 bytes of process 7: Operation not permitted")
    status, found, text = run_doctor(monkeypatch, ProbeResult("sockets", bytes_per_second=2e9), refused)
    assert (status, found["between ranks: sockets"].found) == (0, "works, 2.0 GB/s")
    assert found["between ranks: memory"].state == SLOWER
    assert "Operation not permitted" in text and "-> ranks use sockets, which is slower; " in text
    assert text.endswith("all that is needed works\n")
    assert {"shardwise", "python", "torch", "gloo", "nccl", "s3fs"} <= set(found)


def test_what_does_not_work_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    status, found, text = run_doctor(monkeypatch, ProbeResult("sockets", problem="rank 0: connection refused"))
    assert (status, found["between ranks: sockets"].state) == (1, FAILED)
    assert "GLOO_SOCKET_IFNAME" in text and text.endswith("does not work: between ranks: sockets\n")


def test_ranks_that_cannot_be_started_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gpus: int) -> list[ProbeResult]:
        raise OSError("no more\nprocesses")

    monkeypatch.setattr(probes, "probe_transports", refuse)
    (found,) = list(doctor_command.examine_transports(0))
    assert (found.state, found.found) == (
        FAILED,
        "does not work (two ranks could not be started: no more processes)",
    )


def test_each_finding_is_printed_as_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def probe(gpus: int) -> Iterator[ProbeResult]:
        printed.append(capsys.readouterr().out)
        yield ProbeResult("sockets", bytes_per_second=1e9)
        printed.append(capsys.readouterr().out)
        yield ProbeResult("memory", bytes_per_second=2e9)

    monkeypatch.setattr(probes, "probe_transports", probe)
    doctor_command.doctor()
    before, sockets = printed
    assert before.startswith("ok      shardwise") and "\nok      gloo " in before and "between ranks" not in before
    assert sockets == "ok      between ranks: sockets  works, 1.0 GB/s\n"
    assert capsys.readouterr().out.splitlines()[0] == "ok      between ranks: memory   works, 2.0 GB/s"


@pytest.mark.parametrize(
    ("scope", "can_trace", "cause"),
    [(None, False, "--cap-add=SYS_PTRACE"), (2, False, "set it to 1, or add"), (3, True, "until the next start")],
)
def test_advice_follows_the_kernel_settings(scope: int | None, can_trace: bool, cause: str) -> None:
    assert cause in advise_memory_reading(scope, can_trace)


def test_gpus_that_cannot_be_used_are_one_line() -> None:
    class Broken:
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def device_count() -> int:
            return 2

        @staticmethod
        def get_device_properties(number: int) -> object:
            raise RuntimeError("CUDA error: uncorrectable ECC error\nCUDA kernel errors might be reported later")

    class OldDriver:
        @staticmethod
        def is_available() -> bool:
            warnings.warn("CUDA initialization: the driver is too old\n(found version 11040)", stacklevel=1)
            return False

    (found,) = examine_gpus(Broken)
    assert (found.state, found.found) == (FAILED, "cannot be used: CUDA error: uncorrectable ECC error")
    (found,) = examine_gpus(OldDriver)
    assert (found.state, found.found) == ("absent", "none (CUDA initialization: the driver is too old)")


def test_other_releases_and_gpus_are_named() -> None:
    class Cuda:
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def get_device_properties(number: int) -> object:
            return type("Properties", (), {"name": "H200", "total_memory": 150_000_000_000})

    assert examine_gpus(Cuda) == [DoctorFinding("gpu 0", "ok", "H200, 150.0 GB")]
    assert [examine_torch(v).state for v in ("2.10.0", "2.11.0", "2.15.1+cu130", "2.16.0")] == [
        FAILED,
        "ok",
        "ok",
        SLOWER,
    ]
