"""Texts: loggers, drawings for notebooks, and JSON that somebody else wrote.

Loggers: one for each package, all below "shardwise", quiet until an application asks for them.

Pictures of values in notebooks: classes of all layers have one, and `shardwise.view.draw`, above them, draws it.

A notebook asks a value for its picture long after everything is loaded, so the drawing code is found by name then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
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


def parse_text(parse: Callable[[str], Any], text: str) -> Any:
    """What a parser makes of a text; one that is nested too deeply for it is a ValueError, as other mistakes are.

    >>> parse_text(json.loads, "[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: it is nested too deeply
    """
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(text: str, unique_keys: bool = False) -> Any:
    """What a JSON text says; a ValueError says what is wrong with it. With `unique_keys`, also a key that comes twice.

    >>> parse_json('{"dp": 2, "dp": 4}', unique_keys=True)
    Traceback (most recent call last):
    ...
    ValueError: the key 'dp' appears twice
    """
    hook = _make_dict if unique_keys else None
    return parse_text(lambda given: json.loads(given, object_pairs_hook=hook), text)


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:100]!r} appears twice")
    return made
