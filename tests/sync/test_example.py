"""Does the example of two jobs give in its server the tokens that one process gives, after every step?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.sync.worlds import free_address

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "sync_weights.py")
LIMIT, STEPS = 300.0, 3


def started(*arguments: str, ranks: int) -> subprocess.Popen[str]:
    options = ["--steps", str(STEPS), *arguments[1:]]
    torchrun = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", *torchrun, EXAMPLE, arguments[0], *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "SHARDWISE_SYNC_TOKEN": "of-the-environment"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    try:
        out, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
    assert process.returncode == 0, out
    return out


def test_two_jobs_of_torchrun_give_what_one_process_gives() -> None:
    address = free_address()
    jobs = [started(role, "--address", address, ranks=n) for role, n in (("server", 2), ("trainer", 4), ("alone", 1))]
    server, trainer, alone = map(finished, jobs)
    wanted = re.findall(r"^step (\d+)  loss (\S+)  tokens (.*)$", alone, re.MULTILINE)
    assert len(wanted) == STEPS, alone
    assert re.findall(r"^step (\d+)  tokens (.*)$", server, re.MULTILINE) == [(n, tokens) for n, _, tokens in wanted]
    losses = re.findall(r"^step \d+  loss (\S+)$", trainer, re.MULTILINE)
    assert all(abs(float(a) - float(b)) < 5e-5 for a, (_, b, _) in zip(losses, wanted, strict=True)), trainer
