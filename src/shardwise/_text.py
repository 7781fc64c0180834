"""Texts: loggers, tracebacks, drawings for notebooks, and JSON that somebody else wrote.

Loggers: one for each package, all below "shardwise", quiet until an application asks for them.

Tracebacks: errors that reach a caller show the caller's lines, and of ours the public call and where it was raised.

Pictures of values in notebooks: classes of all layers have one, and `shardwise.view`, above them, draws it.

A notebook asks a value for its picture long after everything is loaded, so the drawing code is found by name then.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any, TypeVar

logging.getLogger("shardwise").addHandler(logging.NullHandler())  # without it Python prints warnings by itself


def package_logger(module: str) -> logging.Logger:
    """The logger of the package that a module belongs to.

    >>> package_logger("shardwise.comm.transports.backends").name
    'shardwise.comm'
    """
    return logging.getLogger(".".join(module.split(".")[:2]))


def count_of(number: int, noun: str, plural: str = "") -> str:
    """A number of things, in words.

    >>> count_of(1, "round"), count_of(3, "round"), count_of(2, "axis", "axes")
    ('1 round', '3 rounds', '2 axes')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


E = TypeVar("E", bound=BaseException)
_torch = importlib.util.find_spec("torch")
_INTERNAL = (str(Path(__file__).parent), *((_torch and _torch.submodule_search_locations) or ()))
FULL_TRACEBACKS = "SHARDWISE_FULL_TRACEBACKS"  # an environment variable: set it to see all frames


def shorten_traceback(error: E) -> E:
    """The same error without our frames and torch's below the present one, apart from the last; others' frames stay.

    >>> def outer():
    ...     try:
    ...         package_logger(None)
    ...     except AttributeError as error:
    ...         raise shorten_traceback(error)
    >>> outer()
    Traceback (most recent call last):
    ...
    AttributeError: 'NoneType' object has no attribute 'split'
    """
    below = error.__traceback__ and error.__traceback__.tb_next
    if os.environ.get(FULL_TRACEBACKS):
        return error.with_traceback(below)
    frames: list[TracebackType] = []
    while below is not None:
        frames.append(below)
        below = below.tb_next
    kept = None
    for at, frame in reversed(list(enumerate(frames, 1))):
        if at == len(frames) or not frame.tb_frame.f_code.co_filename.startswith(_INTERNAL):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(kept)


def draw_html(drawing: str, *args: Any) -> str:
    """The HTML that a function of `shardwise.view` makes.

    >>> draw_html("table_html", "sizes", ("name", "bytes"), [("w", "96 B")])[:5]
    '<div>'
    """
    made: str = resolve_name(f"shardwise.view:{drawing}")(*args)
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
