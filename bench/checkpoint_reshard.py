"""Section "checkpoint", offline: how fast is a checkpoint resharded on disk, and in how much memory?

A checkpoint of 2 GB, saved by 4 ranks as rows, becomes columns over 2 ranks: by the command, as a user runs it, with a
limit on memory, beside one process that reads the same bytes and writes them raw. Peaks are those of the kernel (VmHWM)
of all processes of the command, summed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import shardwise
from bench.report import Cell, Figures
from shardwise.comm import run_local
from shardwise.geometry import ChunkSpec

SAVERS, READERS = 4, 2
_COMMAND = "from shardwise.cli.main import app; app()"
_BLOCK = 4 << 20
WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("shardwise, 1 worker", ("--workers", "1")),
    ("shardwise, 2 workers", ("--workers", "2")),
    ("shardwise, 2 workers, --no-verify", ("--workers", "2", "--no-verify")),
    ("dcp, 2 workers", ("--workers", "2", "--format", "dcp")),
)


@dataclass(frozen=True)
class ReshardSizes:
    """How many tensors of which shape, the limit on memory, the ways, and the runs of each."""

    tensors: int = 16
    shape: tuple[int, int] = (8192, 4096)
    memory: int = 256_000_000
    ways: tuple[tuple[str, tuple[str, ...]], ...] = WAYS
    repeats: int = 3

    @property
    def bytes(self) -> int:
        return self.tensors * self.shape[0] * self.shape[1] * 4


TINY_RESHARD = ReshardSizes(tensors=2, shape=(64, 64), ways=WAYS[1:2], repeats=1)


def reshard_figures(sizes: ReshardSizes) -> Figures:
    """The offline reshard with one and two workers, to all formats, beside a raw copy."""
    times: dict[str, list[float]] = {name: [] for name, _ in sizes.ways}
    peaks: dict[str, int] = {}
    raw: list[float] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        _write_source(Path(folder) / "source", sizes)
        for _ in range(sizes.repeats):
            raw.append(_copy_raw(Path(folder)))
            for name, options in sizes.ways:
                seconds, peak = _measure_command(Path(folder), sizes.memory, options)
                times[name].append(seconds)
                peaks[name] = max(peak, peaks.get(name, 0))
    medians = {"raw copy": statistics.median(raw)} | {n: statistics.median(t) for n, t in times.items()}
    rows: list[Sequence[Cell]] = [
        (name, t, sizes.bytes / t / 1e9, t / medians["raw copy"], peaks[name] / 1e6 if name in peaks else None)
        for name, t in medians.items()
    ]
    notes = (
        f"{sizes.bytes / 1e9:.1f} GB from rows over {SAVERS} ranks to columns over {READERS}; the whole command "
        f"is timed, medians of {sizes.repeats} runs in turn.",
        f"--memory {sizes.memory // 10**6}MB; the peak is that of all its processes, interpreters included.",
    )
    return Figures("Checkpoints: offline reshard", ("way", "s", "GB/s", "x raw copy", "peak memory, MB"), rows, notes)


def _write_source(path: Path, sizes: ReshardSizes) -> None:
    def body(_comm: object) -> None:
        spec = ChunkSpec(0, SAVERS)
        state = {f"w{i}": shardwise.full(spec, sizes.shape, float(i)) for i in range(sizes.tensors)}
        for tensor in state.values():
            for local in tensor.local_tensors():
                local += torch.arange(local.shape[1])
        shardwise.save(state, path)

    run_local(body, SAVERS)


def _copy_raw(folder: Path) -> float:
    """Read all bytes of the source and write them to as many files, synced."""
    started = time.perf_counter()
    for number, file in enumerate(sorted((folder / "source").glob("*.safetensors"))):
        with file.open("rb", buffering=0) as source, (folder / f"raw{number}").open("wb", buffering=0) as target:
            buffer = memoryview(bytearray(_BLOCK))
            while count := source.readinto(buffer):
                target.write(buffer[:count])
            os.fsync(target.fileno())
    seconds = time.perf_counter() - started
    for path in folder.glob("raw*"):
        path.unlink()
    return seconds


def _measure_command(folder: Path, memory: int, options: Sequence[str]) -> tuple[float, int]:
    """The seconds of one run of the command, and its peak of memory in bytes."""
    texts = ["reshard", str(folder / "source"), str(folder / "made"), "--layout", "S(1)", "--ranks", str(READERS)]
    command = [sys.executable, "-c", _COMMAND, *texts, "--memory", str(memory), "--overwrite", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    peaks: dict[int, int] = {}
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        peaks |= {pid: peak for pid in _family(process.pid) if (peak := _peak(pid))}
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise RuntimeError(f"the command ended with status {process.returncode}")
    return seconds, sum(peaks.values())


def _family(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = stat.read_text().rpartition(")")
        except OSError:
            continue
        if int(fields.split()[1]) == pid:
            found.append(int(name.split()[0]))
    return found


def _peak(pid: int) -> int:
    """The most memory that a process had so far, in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
