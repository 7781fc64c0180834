"""How much memory does a piece of work need at its peak? Counted by the kernel, not sampled.

Linux keeps the most pages that a process ever had in memory (VmHWM) and sets the mark back to the present value on
request. So the peak of one call is: give free heap back, set the mark back, call, read the mark.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_LIBC = ctypes.CDLL(None)


class Peak:
    """The bytes by which this process grew at its peak since `Peak()` was made; None where it cannot be known."""

    def __init__(self) -> None:
        self._known = sys.platform == "linux" and _RESET.exists()
        if self._known:
            gc.collect()
            if hasattr(_LIBC, "malloc_trim"):
                _LIBC.malloc_trim(0)
            _RESET.write_text("5")
            self._start = _field("VmRSS:")

    def grown(self) -> int | None:
        """The growth at the peak, in bytes."""
        return max(0, _field("VmHWM:") - self._start) if self._known else None


def _field(name: str) -> int:
    line = next(row for row in _STATUS.read_text().splitlines() if row.startswith(name))
    return int(line.split()[1]) * 1024
