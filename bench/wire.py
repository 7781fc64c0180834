"""How many bytes went over the loopback interface? Gloo's ranks on one host talk through it."""

from __future__ import annotations

from pathlib import Path

_INTERFACES = Path("/proc/net/dev")


def loopback_bytes() -> int | None:
    """The bytes received on the loopback interface since the machine started; None where it does not say."""
    if not _INTERFACES.exists():
        return None
    rows = (row.split(":", 1) for row in _INTERFACES.read_text().splitlines() if ":" in row)
    return next((int(figures.split()[0]) for name, figures in rows if name.strip() == "lo"), None)
