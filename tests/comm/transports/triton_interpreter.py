"""Programs in Triton's interpreter, which needs no GPU; Triton takes it when it is imported, so in a new process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, for its interpreter"
)


def run_in_interpreter(program: str) -> str:
    """What a program prints; fails with its errors if it does not end well."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment["PYTHONPATH"] += os.pathsep + os.getcwd()
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
