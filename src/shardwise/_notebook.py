"""Pictures of values in notebooks: classes of all layers have one, and `shardwise.view.notebook`, above them, draws it.

A notebook asks a value for its picture long after everything is loaded, so the drawing code is found by name then.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any


def draw_html(drawing: str, *args: Any) -> str:
    """The HTML that a function of `shardwise.view.notebook` makes.

    >>> draw_html("table_html", "sizes", ("name", "bytes"), [("w", "96 B")])[:5]
    '<div>'
    """
    made: str = resolve_name(f"shardwise.view.notebook:{drawing}")(*args)
    return made
