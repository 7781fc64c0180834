"""Loggers: one for each package, all below "shardwise", quiet until an application asks for them.

Pictures of values in notebooks: classes of all layers have one, and `shardwise.view.draw`, above them, draws it.

A notebook asks a value for its picture long after everything is loaded, so the drawing code is found by name then.
"""

from __future__ import annotations

import logging
from pkgutil import resolve_name
from typing import Any

logging.getLogger("shardwise").addHandler(logging.NullHandler())  # without it Python prints warnings by itself


def package_logger(module: str) -> logging.Logger:
    """The logger of the package that a module belongs to.

    >>> package_logger("shardwise.comm.transports.backends").name
    'shardwise.comm'
    """
    return logging.getLogger(".".join(module.split(".")[:2]))


def draw_html(drawing: str, *args: Any) -> str:
    """The HTML that a function of `shardwise.view.draw` makes.

    >>> draw_html("table_html", "sizes", ("name", "bytes"), [("w", "96 B")])[:5]
    '<div>'
    """
    made: str = resolve_name(f"shardwise.view.draw:{drawing}")(*args)
    return made
