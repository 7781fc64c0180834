"""Pickles for torch.distributed.checkpoint: names and values are written down, and nothing is imported."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PickleName:
    """Something that a pickle names: a module and a name in it."""

    module: str
    name: str


@dataclass(frozen=True)
class PickleCall:
    """The result of a call of something named."""

    of: PickleName
    args: tuple[Any, ...]


@dataclass(frozen=True)
class PickleObject:
    """An object of a class, given its state."""

    of: PickleName
    state: Any


@dataclass(frozen=True)
class PickleReference:
    """What `persistent_load` is to find."""

    value: tuple[Any, ...]


@dataclass(frozen=True)
class PicklePairs:
    """A dict, given as pairs: its keys need not be hashable here."""

    items: Sequence[tuple[Any, Any]]


def write_pickle(value: Any) -> bytes:
    """A pickle of plain values, names, calls and objects.

    >>> import pickle
    >>> pickle.loads(write_pickle({"step": 3, "betas": [0.9, (None, True)], "big": 1 << 40}))
    {'step': 3, 'betas': [0.9, (None, True)], 'big': 1099511627776}
    >>> pickle.loads(write_pickle(PickleCall(PickleName("fractions", "Fraction"), (1, 3))))
    Fraction(1, 3)
    """
    writer = _PickleWriter()
    writer.put(value)
    return b"\x80\x02" + bytes(writer.out) + b"."


class _PickleWriter:
    def __init__(self) -> None:
        self.out = bytearray()
        self._known: dict[tuple[type, Any], int] = {}

    def put(self, value: Any) -> None:
        if isinstance(value, str | PickleName):
            self._once(value)
        elif isinstance(value, tuple):
            self._many(b"(", value, b"t")
        elif isinstance(value, list):
            self.out += b"]"
            self._many(b"(", value, b"e")
        elif isinstance(value, dict | PicklePairs):
            pairs = value.items if isinstance(value, PicklePairs) else value.items()
            self.out += b"}"
            self._many(b"(", [part for pair in pairs for part in pair], b"u")
        elif isinstance(value, PickleCall):
            self._all(b"R", value.of, value.args)
        elif isinstance(value, PickleObject):
            self._all(b"\x81", value.of, ())
            self._all(b"b", value.state)
        elif isinstance(value, PickleReference):
            self._all(b"Q", value.value)
        else:
            self.out += _encode_pickle_scalar(value)

    def _all(self, end: bytes, *values: Any) -> None:
        for value in values:
            self.put(value)
        self.out += end

    def _many(self, start: bytes, values: Sequence[Any], end: bytes) -> None:
        self.out += start
        self._all(end, *values)

    def _once(self, value: str | PickleName) -> None:
        """A text or a name; the second time, a reference to the first."""
        key = (type(value), value)
        if key in self._known:
            self.out += b"j" + struct.pack("<I", self._known[key])
            return
        if isinstance(value, PickleName):
            self.out += f"c{value.module}\n{value.name}\n".encode()
        else:
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
        self._known[key] = len(self._known)
        self.out += b"r" + struct.pack("<I", self._known[key])


def _encode_pickle_scalar(value: Any) -> bytes:
    if value is None or value is True or value is False:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    assert isinstance(value, int), f"a {type(value).__name__} is not written"
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data
