"""Do ranks leave sockets behind: those of a comm that was dropped, or that is there until the process ends?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from shardwise.comm import ProcessGroupComm, default_comm
from tests.world import PATIENT, DeviceWorld

ROOT = Path(__file__).parents[2]
kept: list[ProcessGroupComm] = []


def use_comms() -> list[float]:
    sums = []
    for comm in (default_comm(), ProcessGroupComm(timeout=PATIENT), ProcessGroupComm(timeout=PATIENT)):
        x = torch.ones(1 << 16)
        comm.all_reduce(x, label="sum").wait()
        sums.append(x[0].item())
    kept.append(comm)  # the second one is dropped
    return sums


def main() -> None:
    with DeviceWorld(2, timeout=PATIENT) as world:
        print(world.run(use_comms))


def test_no_socket_is_left_open() -> None:
    """Python says so, on stderr, if a socket is dropped before it was closed."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "tests.comm.test_closed_sockets"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([[2.0] * 3] * 2)
    assert "socket" not in done.stderr and "ResourceWarning" not in done.stderr, done.stderr


if __name__ == "__main__":
    main()
