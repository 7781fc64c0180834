"""Which line of the user's own code asks for something?"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def user_line() -> str:
    """The innermost line of the user's own code on the stack, as `train.py:12`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, "<")) or "/torch/" in name or _is_standard(name)):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def _is_standard(name: str) -> bool:
    """Whether a file is part of Python, such as contextlib; installed packages may be in a folder below it."""
    return name.startswith(_STANDARD_LIBRARY) and "site-packages" not in name and "dist-packages" not in name
