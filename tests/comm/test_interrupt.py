"""Does Ctrl-C on a terminal end a program and its ranks without a word from the ranks?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys, time
from shardwise.comm import launch

def wait_long():
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: both ranks write here
    time.sleep(600)

if __name__ != "__main__":
    wait_long()  # as if the imports of a rank took long
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
    try:
        launch(wait_long, 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
"""


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_is_one_line_and_ends_all_ranks_while_they_start(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            ranks = [int(process.stdout.readline()) for _ in range(2)]
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert all(map(ended, ranks))
