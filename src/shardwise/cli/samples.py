"""Sample arguments of an operator, written on one line.

f32[8,6]          a tensor
i64[5]<8          a tensor of integers from 0 to 7
1  0.5  true  none  "mean"
[1, 2]  [f32[4], f32[4]]
keepdim=true      an argument given by name
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwise.geometry import find_dtype
from shardwise.geometry.scanner import Scanner

WORDS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
NUMBER = re.compile(r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+)")
TEXT = re.compile(r"'([^']*)'|\"([^\"]*)\"")


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor to be made: its dtype, its shape, and for integers where they end."""

    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The arguments of a call, by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parse_samples(text: str) -> Samples:
    """Read sample arguments.

    >>> parse_samples("f32[8,6], 1, keepdim=true")
    Samples(args=(Sample(dtype='f32', shape=(8, 6), limit=None), 1), kwargs={'keepdim': True})
    """
    scanner = Scanner(text)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    while scanner.rest:
        name = _name(scanner)
        if name is not None:
            kwargs[name] = _value(scanner)
        elif kwargs:
            scanner.fail("an argument without a name after one with a name")
        else:
            args.append(_value(scanner))
        if scanner.rest:
            scanner.expect(",", "between arguments")
    return Samples(tuple(args), kwargs)


def _name(scanner: Scanner) -> str | None:
    """The name of an argument given by name, read with its sign; None if there is none."""
    word = scanner.peek_word()
    if not word or not scanner.rest[len(word) :].lstrip().startswith("="):
        return None
    scanner.take(word)
    scanner.take("=")
    return word


def _value(scanner: Scanner) -> Any:
    if scanner.take("["):
        return scanner.items(lambda: _value(scanner), "]", "in a list")
    for pattern in (NUMBER, TEXT):
        found = pattern.match(scanner.rest)
        if found is not None:
            scanner.take(found.group())
            return _number(found.group()) if pattern is NUMBER else found.group(1) or found.group(2) or ""
    word = scanner.peek_word()
    if word in WORDS and scanner.take(word):
        return WORDS[word]
    return _tensor(scanner)


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _tensor(scanner: Scanner) -> Sample:
    at = scanner.at
    dtype = scanner.word()
    with scanner.pointing(at):
        find_dtype(dtype)
    scanner.expect("[", f"after {dtype}, as in {dtype}[8,6]")
    shape = scanner.items(lambda: scanner.integer("the length of a dim"), "]", "in a shape")
    limit = scanner.integer("where the integers end") if scanner.take("<") else None
    return Sample(dtype, tuple(shape), limit)
