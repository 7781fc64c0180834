"""Which line of the user's own code asks for something?"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])


def user_line() -> str:
    """The innermost line of the user's own code on the stack, as `train.py:12`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, "<")) or "/torch/" in name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
