"""Programs in a process of their own that starts at once: a fork of the server that ranks are forks of.

The process has imported what `tests/preloaded.py` says; a program whose imports are what a test is about runs in a new
interpreter instead.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.world import DeviceWorld, start_server


def run_forked(
    target: Callable[..., int | None],
    *args: Any,
    folder: Path,
    settings: Mapping[str, str] | None = None,
    warning: str = "error",
    limit: float = 480.0,
) -> tuple[int, str]:
    """Call a function as a program in a folder; return its exit status and all that it and its children print.

    It has a process group of its own: if it hangs, it ends together with all that it has started.
    """
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        environment = {**os.environ, **(settings or {})}
        task = (target, args, str(folder), environment, warning, str(out))
        start_server()
        process = DeviceWorld._context.Process(target=_enter, args=task)
        process.start()
        process.join(limit)
        code = process.exitcode
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        text = out.read_text(errors="replace") if out.exists() else ""
        return (code, text) if code is not None else (-signal.SIGKILL, f"{text}\nended after {limit:g} s")


def run_script(path: str, *words: str) -> None:
    """Run a script as `python path words...` does."""
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, *words: str) -> None:
    """Run a module as `python -m name words...` does."""
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _enter(
    target: Callable[..., int | None],
    args: Sequence[Any],
    folder: str,
    environment: Mapping[str, str],
    warning: Any,
    out: str,
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(out, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, encoding="utf-8", closefd=False) for stream in (1, 2))
    warnings.resetwarnings()
    warnings.simplefilter(warning)
    sys.exit(target(*args))
