"""A checkpoint under other names: tensors renamed, split, fused, stacked and transposed, by patterns, from a TOML file.

    [lengths]
    q = 4096
    kv = 1024

    [rename]
    "module.**" = "**"

    [[change]]
    split = "layers.*.wqkv.weight"
    to = ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"]
    sizes = ["q", "kv", "kv"]

The renames are one step; then come the changes in order, each on the names that the ones before it gave. Names that no
pattern fits stay. Nothing is read: the result is an index whose tensors are made of regions of the stored ones.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.converting.changes import (
    Fuse,
    NameChange,
    Rename,
    Split,
    Stack,
    Tensors,
    Transpose,
    Unstack,
)
from shardwise.checkpoint.converting.patterns import NamePattern
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Json, TensorEntry

_MAX_MAP_BYTES = 1 << 24


@dataclass(frozen=True)
class NameMap:
    """Other names for the tensors of a checkpoint, and other tensors made of them.

    >>> NameMap.of({"module.**": "**"}).changes[0].word
    'rename'
    """

    changes: tuple[NameChange, ...]
    data: Json = None

    @classmethod
    def of(cls, given: NameMap | Mapping[str, Any] | str | os.PathLike[str]) -> NameMap:
        """A map from a TOML file, from what such a file has, or from a dict of patterns and new names."""
        if isinstance(given, NameMap):
            return given
        if isinstance(given, Mapping):
            plain = all(isinstance(value, str) for value in given.values())
            return _parse_map({"rename": dict(given)} if plain else given, "names")
        return _load_map(Path(given))

    @property
    def digest(self) -> str:
        """What differs between two maps."""
        return checksum(json.dumps(self.data).encode())

    def apply(self, tensors: Tensors) -> dict[str, TensorEntry]:
        """All tensors under their new names; those that no pattern fits come first, unchanged."""
        now = dict(tensors)
        for change in self.changes:
            used, made = change.apply(now)
            now = {name: entry for name, entry in now.items() if name not in used}
            for name, entry in made.items():
                if name in now:
                    raise CheckpointError(
                        f"{entry.name} would be called {name}, which another tensor is called; rename one of them"
                    )
                now[name] = entry if entry.name == name else replace(entry, name=name)
        return now


_TABLES = ("lengths", "rename", "change")
_FIELDS = {
    "rename": ("to",),
    "split": ("to", "sizes", "dim", "groups"),
    "fuse": ("to", "dim", "groups"),
    "stack": ("to", "dim"),
    "unstack": ("to", "dim"),
    "transpose": ("dims",),
}


def _load_map(path: Path) -> NameMap:
    try:
        if path.stat().st_size > _MAX_MAP_BYTES:
            raise CheckpointError(f"{path}: a map of names has at most {_MAX_MAP_BYTES} bytes")
        return _parse_map(tomllib.loads(path.read_text()), path.name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} is not valid TOML: {error}") from error


def _parse_map(data: Mapping[str, Any], told: str) -> NameMap:
    unknown = sorted(set(data) - set(_TABLES))
    if unknown:
        raise CheckpointError(f"{told}: no table {unknown[0]!r}; a map of names has {', '.join(_TABLES)}")
    lengths, renames, changes = data.get("lengths", {}), data.get("rename", {}), data.get("change", [])
    if not isinstance(lengths, Mapping) or not all(type(n) is int and n > 0 for n in lengths.values()):
        raise CheckpointError(f"{told}: lengths are numbers of 1 or more by name")
    if not isinstance(renames, Mapping) or not all(isinstance(new, str) for new in renames.values()):
        raise CheckpointError(f"{told}: rename has patterns and new names, both texts")
    if not isinstance(changes, list) or not all(isinstance(change, Mapping) for change in changes):
        raise CheckpointError(f"{told}: every change is a table of its own, [[change]]")
    steps: list[NameChange] = []
    try:
        if renames:
            steps.append(Rename(tuple((NamePattern(old), NamePattern(new)) for old, new in renames.items())))
        steps += [_ChangeParser(change, lengths).parse() for change in changes]
    except CheckpointError as error:
        raise CheckpointError(f"{told}: {error}") from error
    if not steps:
        raise CheckpointError(f"{told}: it has no rename and no change")
    return NameMap(tuple(steps), json.loads(json.dumps(dict(data))))


class _ChangeParser:
    """One [[change]] of a map; errors say which field is wrong."""

    def __init__(self, change: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
        words = [word for word in _FIELDS if word in change]
        if len(words) != 1:
            raise CheckpointError(f"a change has one of {', '.join(_FIELDS)}; got {', '.join(change) or 'nothing'}")
        self.change, self.lengths, self.word = change, lengths, words[0]
        unknown = sorted(set(change) - {self.word, *_FIELDS[self.word]})
        if unknown:
            raise CheckpointError(f"{self.word} has the fields {', '.join(_FIELDS[self.word])}; got {unknown[0]!r}")

    def parse(self) -> NameChange:
        match self.word:
            case "rename":
                return Rename(((self.pattern("rename"), self.pattern("to")),))
            case "split":
                return Split(
                    self.pattern("split"), self.patterns("to"), self.sizes(), self.number("dim", 0), self.groups()
                )
            case "fuse":
                return Fuse(self.patterns("fuse"), self.pattern("to"), self.number("dim", 0), self.groups())
            case "stack":
                return Stack(self.pattern("stack"), self.pattern("to"), self.number("dim", 0))
            case "unstack":
                return Unstack(self.pattern("unstack"), self.pattern("to"), self.number("dim", 0))
            case _:
                return Transpose(self.pattern("transpose"), self.numbers("dims"))

    def pattern(self, field: str) -> NamePattern:
        given = self.change.get(field)
        if not isinstance(given, str):
            raise CheckpointError(f"{self.word}: {field} is a name with wildcards, got {given!r:.60}")
        return NamePattern(given)

    def patterns(self, field: str) -> tuple[NamePattern, ...]:
        given = self.change.get(field)
        if not isinstance(given, list) or len(given) < 2 or not all(isinstance(one, str) for one in given):
            raise CheckpointError(f"{self.word}: {field} is a list of two or more names, got {given!r:.60}")
        return tuple(map(NamePattern, given))

    def number(self, field: str, default: int) -> int:
        given = self.change.get(field, default)
        given = self.lengths.get(given, given) if isinstance(given, str) else given
        if type(given) is not int:
            raise CheckpointError(f"{self.word}: {field} is a number or one of the lengths, got {given!r:.60}")
        return given

    def groups(self) -> int:
        found = self.number("groups", 1)
        if found < 1:
            raise CheckpointError(f"{self.word}: groups must be at least 1, got {found}")
        return found

    def numbers(self, field: str) -> tuple[int, ...] | None:
        given = self.change.get(field)
        if given is not None and not (isinstance(given, list) and all(type(n) is int for n in given)):
            raise CheckpointError(f"{self.word}: {field} is a list of numbers, got {given!r:.60}")
        return None if given is None else tuple(given)

    def sizes(self) -> tuple[int, ...] | None:
        given = self.change.get("sizes")
        if given is None:
            return None
        named: list[Any] = (
            [self.lengths.get(n, n) if isinstance(n, str) else n for n in given] if isinstance(given, list) else []
        )
        unknown = [n for n in named if type(n) is not int or n < 0]
        if not named or unknown:
            known = ", ".join(self.lengths) or "none"
            raise CheckpointError(f"split: sizes are numbers or names of lengths ({known}), got {given!r:.60}")
        return tuple(named)
