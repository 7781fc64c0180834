"""Where the fuzzer is: `python -m tools.fuzz` (or `make fuzz`) in the source tree, its names in `tools.fuzz`."""

from __future__ import annotations

import sys
from typing import Any

MOVED = (
    "the fuzzer is part of Shardwise's source tree, not of the installed package: run `python -m tools.fuzz` or "
    "`make fuzz` in a checkout, and import its names from `tools.fuzz` there"
)
NAMES = {"Finding", "Input", "ProcessRanks", "Program", "Round", "Statement", "Tally", "Verdict", "random_program"}
NAMES |= {"run_isolated", "run_on_process", "run_on_threads", "run_seeds", "script", "shrink", "worst"}


def __getattr__(name: str) -> Any:
    if name in NAMES:
        raise ImportError(f"{__name__}.{name}: {MOVED}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(MOVED)
