"""How are sizes and times written on the command line?"""

from __future__ import annotations

import re
import shutil

from shardwise.geometry import LayoutError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LONGEST_TITLE = 300


def parse_bytes(text: str) -> int:
    """A number of bytes from a text with a unit.

    >>> parse_bytes("64MB"), parse_bytes("1.5 GiB"), parse_bytes("100")
    (64000000, 1610612736, 100)
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", text)
    factor = {**UNITS, **BINARY_UNITS}.get(match[2].upper()) if match else None
    count = int(float(match[1]) * factor) if match and factor else 0
    if count < 1:
        raise LayoutError(f"{text!r} is not a number of bytes; write for example 64MB, 1.5GiB or 4096")
    return count


def format_seconds(seconds: float) -> str:
    """A time with a fitting unit.

    >>> format_seconds(0), format_seconds(1.25e-5), format_seconds(0.5), format_seconds(90)
    ('0 us', '12.5 us', '500.0 ms', '90.0 s')
    """
    if seconds == 0:
        return "0 us"
    unit, factor = next(((u, f) for u, f in (("us", 1e6), ("ms", 1e3)) if seconds * f < 1000), ("s", 1.0))
    return f"{seconds * factor:.1f} {unit}"


def counted(count: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(2, "file")
    ('1 rank', '2 files')
    """
    return f"{count} {what}{'s' * (count != 1)}"


def terminal_width() -> int:
    """The width to draw in: the terminal's (or that of COLUMNS), within reason."""
    return min(160, max(40, shutil.get_terminal_size().columns))


def shortened(text: str) -> str:
    """A title that stays readable: a layout of a thousand pieces is cut off."""
    return text if len(text) <= LONGEST_TITLE else f"{text[:LONGEST_TITLE]}…"
