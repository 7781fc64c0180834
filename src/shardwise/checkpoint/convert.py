"""A checkpoint under other names: tensors renamed, split, fused, stacked and transposed, without reading a byte.

1. `Conversion`: filters choose tensors and values by their stored names. For formats that store a model's tensors and
   nothing else, what belongs to the optimizer is left out; if everything left is under one key such as "model", it is
   taken from there. Then a map of names makes the tensors that are written; values keep their names.
2. `NameMap`: the renames are one step, then come the changes in order, each on the names that the ones before it gave.
   Names that no pattern fits stay. A map comes from a TOML file:

    [lengths]
    q = 4096
    kv = 1024

    [rename]
    "module.**" = "**"

    [[change]]
    split = "layers.*.wqkv.weight"
    to = ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"]
    sizes = ["q", "kv", "kv"]

3. `NamePattern`: `*` stands for one part of a name between dots (or some of it), `**` for any number of parts, and
   `{layer}` for one part that has a name. In the new name the stars stand for the same, in the same order.
4. A derived tensor is described as stored ones are: each of its boxes is a region of a run of bytes of the source, with
   its own strides. So it is read like any other, a bounded part at a time.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from shardwise._text import parse_text
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.index import Index, Json, StoredCut, StridedView, TensorEntry, checksum, iterate_leaves
from shardwise.geometry.mesh import IntArray

_TOKEN = re.compile(r"\*\*|\*|\{[^{}]*\}")
_MAX_SUGGESTIONS = 3
_COMPARED_NAMES = 2000


@dataclass(frozen=True)
class Captures:
    """What the stars of a pattern stood for, in order, and its named parts."""

    stars: tuple[str, ...]
    named: tuple[tuple[str, str], ...]

    def without(self, key: str) -> Captures:
        """The same without one of the named parts."""
        return Captures(self.stars, tuple(pair for pair in self.named if pair[0] != key))

    def with_part(self, key: str, value: str) -> Captures:
        """The same with one more named part."""
        return Captures(self.stars, (*self.named, (key, value)))


@dataclass(frozen=True)
class NamePattern:
    """A name with wildcards.

    >>> found = NamePattern("h.*.attn.{kind}").match("h.11.attn.bias")
    >>> found, NamePattern("layers.*.{kind}").fill(found)
    (Captures(stars=('11',), named=(('kind', 'bias'),)), 'layers.11.bias')
    """

    text: str

    def __post_init__(self) -> None:
        keys = self.keys
        bad = [key for key in keys if not key.isidentifier()]
        if not self.text or bad:
            raise CheckpointError(
                f"{self.text!r} is not a pattern of names: write *, ** and parts with a name such as {{layer}}"
            )
        if len(set(keys)) < len(keys):
            raise CheckpointError(f"the pattern {self.text!r} has a named part twice; each has a name of its own")

    @cached_property
    def tokens(self) -> list[str]:
        return _TOKEN.findall(self.text)

    @property
    def stars(self) -> list[str]:
        """The stars, in order."""
        return [token for token in self.tokens if token.startswith("*")]

    @property
    def keys(self) -> list[str]:
        """The names of the named parts."""
        return [token[1:-1] for token in self.tokens if token.startswith("{")]

    @cached_property
    def _matcher(self) -> re.Pattern[str]:
        literals = _TOKEN.split(self.text)
        parts = [re.escape(literals[0])]
        for token, literal in zip(self.tokens, literals[1:], strict=True):
            parts += [{"**": "(.*)", "*": "([^.]*)"}.get(token, "([^.]+)"), re.escape(literal)]
        return re.compile("".join(parts))

    def match(self, name: str) -> Captures | None:
        """What the wildcards stand for in a name, or None if it does not fit."""
        found = self._matcher.fullmatch(name)
        if found is None:
            return None
        pairs = list(zip(self.tokens, found.groups(), strict=True))
        named = sorted((token[1:-1], text) for token, text in pairs if token.startswith("{"))
        return Captures(tuple(text for token, text in pairs if token.startswith("*")), tuple(named))

    def fill(self, captures: Captures) -> str:
        """The name that this pattern gives for what the wildcards of another stand for."""
        stars, named = iter(captures.stars), dict(captures.named)
        return _TOKEN.sub(lambda m: next(stars) if m[0].startswith("*") else named[m[0][1:-1]], self.text)

    def check_fills_from(self, other: NamePattern, extra: Iterable[str] = ()) -> None:
        """Raise unless the wildcards of a pattern determine the names that this one gives."""
        unknown = sorted(set(self.keys) - set(other.keys) - set(extra))
        if self.stars != other.stars or unknown:
            raise CheckpointError(
                f"the wildcards of {self.text!r} are not those of {other.text!r}; write the same stars in the same "
                "order, and named parts that it has"
            )


def match_all(pattern: NamePattern, names: Iterable[str], what: str) -> dict[str, Captures]:
    """The names that fit a pattern; an error if there is none, which lists similar ones."""
    known = list(names)
    found = {name: captures for name in known if (captures := pattern.match(name)) is not None}
    if not found:
        raise CheckpointError(f"{what} {pattern.text!r} matches no name{suggest_names(pattern.text, known)}")
    return found


def suggest_names(pattern: str, names: Sequence[str]) -> str:
    """A hint with the names most like a pattern, one of several that differ in numbers only."""
    kinds: dict[str, str] = {}
    for name in names[:_COMPARED_NAMES]:
        kinds.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), name)
    near = difflib.get_close_matches(pattern, kinds, n=_MAX_SUGGESTIONS, cutoff=0.5) or list(kinds)[:_MAX_SUGGESTIONS]
    return f"; near it: {', '.join(kinds[kind][:100] for kind in near)}" if near else "; there are none"


def filter_by_globs(names: Iterable[str], only: Sequence[str], without: Sequence[str]) -> set[str]:
    """The names that fit one of `only` (all, where that is empty) and none of `without`; `*` matches dots as well.

    >>> sorted(filter_by_globs(["model.a.w", "model.b", "optim.a"], ["model.*"], ["*.b"]))
    ['model.a.w']
    """
    known = list(names)
    for pattern in (*only, *without):
        if not any(fnmatchcase(name, pattern) for name in known):
            raise CheckpointError(f"the filter {pattern!r} matches no name{suggest_names(pattern, known)}")
    return {
        name
        for name in known
        if (not only or any(fnmatchcase(name, pattern) for pattern in only))
        and not any(fnmatchcase(name, pattern) for pattern in without)
    }


def narrow_tensor(entry: TensorEntry, dim: int, start: int, length: int) -> TensorEntry:
    """The indices `start` to `start + length` of one dim."""
    low = np.maximum(entry.cut.offsets[:, dim], start)
    high = np.minimum(entry.cut.offsets[:, dim] + entry.cut.sizes[:, dim], start + length)
    kept = np.flatnonzero(high > low).tolist() if length else []
    skipped = (low - entry.cut.offsets[:, dim]).tolist()
    offsets, sizes = entry.cut.offsets[kept].copy(), entry.cut.sizes[kept].copy()
    offsets[:, dim], sizes[:, dim] = low[kept] - start, (high - low)[kept]

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(start=found.start + skipped[number] * found.strides[dim])

    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    return _derive(entry, shape, offsets, sizes, kept, view)


def permute_tensor(entry: TensorEntry, dims: Sequence[int]) -> TensorEntry:
    """The dims in another order, as `torch.permute` does."""
    order = list(dims)

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(strides=tuple(found.strides[d] for d in order))

    shape = tuple(entry.shape[d] for d in order)
    rows = range(len(entry.cut))
    return _derive(entry, shape, entry.cut.offsets[:, order], entry.cut.sizes[:, order], rows, view)


def insert_dim(entry: TensorEntry, dim: int) -> TensorEntry:
    """A dim of length 1 in front of a dim, as `torch.unsqueeze` does."""

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(strides=(*found.strides[:dim], 0, *found.strides[dim:]))

    shape = (*entry.shape[:dim], 1, *entry.shape[dim:])
    offsets, sizes = np.insert(entry.cut.offsets, dim, 0, axis=1), np.insert(entry.cut.sizes, dim, 1, axis=1)
    return _derive(entry, shape, offsets, sizes, range(len(entry.cut)), view)


def select_index(entry: TensorEntry, dim: int, index: int) -> TensorEntry:
    """One index of a dim, without the dim, as `torch.select` does."""
    entry = narrow_tensor(entry, dim, index, 1)

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(strides=(*found.strides[:dim], *found.strides[dim + 1 :]))

    shape = (*entry.shape[:dim], *entry.shape[dim + 1 :])
    offsets, sizes = np.delete(entry.cut.offsets, dim, axis=1), np.delete(entry.cut.sizes, dim, axis=1)
    return _derive(entry, shape, offsets, sizes, range(len(entry.cut)), view)


def _derive(
    entry: TensorEntry,
    shape: tuple[int, ...],
    offsets: IntArray,
    sizes: IntArray,
    kept: Sequence[int],
    view: Callable[[int], StridedView],
) -> TensorEntry:
    files, begins = [entry.files[i] for i in kept], [entry.begins[i] for i in kept]
    sums, views = [entry.sums[i] for i in kept], [view(i) for i in kept]
    return TensorEntry(entry.name, entry.dtype, StoredCut(shape, offsets, sizes), files, begins, sums, views)


def concatenate_tensors(parts: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Tensors one after another along a dim, as `torch.cat` does; the name is that of the first."""
    first, length = parts[0], sum(part.shape[dim] for part in parts)
    for part in parts[1:]:
        alike = part.shape[:dim] == first.shape[:dim] and part.shape[dim + 1 :] == first.shape[dim + 1 :]
        if part.dtype != first.dtype or not alike:
            raise CheckpointError(
                f"{first.name} is {first.dtype}{list(first.shape)} and {part.name} is {part.dtype}{list(part.shape)}; "
                f"what is joined along dim {dim} has one dtype and the same lengths of the other dims"
            )
    moved, start = [], 0
    for part in parts:
        shift = np.zeros(len(part.shape), np.int64)
        shift[dim], start = start, start + part.shape[dim]
        moved.append(part.cut.offsets + shift)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    cut = StoredCut(shape, np.concatenate(moved), np.concatenate([part.cut.sizes for part in parts]))
    views = [part.view_of(number) for part in parts for number in range(len(part.cut))]
    files, begins = [n for part in parts for n in part.files], [n for part in parts for n in part.begins]
    return TensorEntry(first.name, first.dtype, cut, files, begins, [s for part in parts for s in part.sums], views)


Tensors: TypeAlias = Mapping[str, TensorEntry]
_MAX_UNSTACKED = 1 << 20


class NameChange(ABC):
    """One step: which tensors it takes, and what it makes of them."""

    word: ClassVar[str]

    @abstractmethod
    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        """The names that are used up, and the new tensors, from all there are."""


@dataclass(frozen=True)
class Rename(NameChange):
    """Other names for the same tensors; a name that fits two patterns is an error."""

    names: tuple[tuple[NamePattern, NamePattern], ...]
    word: ClassVar[str] = "rename"

    def __post_init__(self) -> None:
        for old, new in self.names:
            new.check_fills_from(old)

    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        fitting: dict[str, tuple[NamePattern, str]] = {}
        made: dict[str, TensorEntry] = {}
        for old, new in self.names:
            for name, captures in match_all(old, tensors, "the pattern").items():
                if name in fitting:
                    raise CheckpointError(
                        f"{name} fits {fitting[name][0].text!r} and {old.text!r}; write patterns of which it fits one"
                    )
                fitting[name] = (old, new.fill(captures))
        for name, (_, new_name) in fitting.items():
            _add(made, new_name, tensors[name])
        return set(fitting), made


@dataclass(frozen=True)
class Split(NameChange):
    """One tensor into several along a dim; `sizes` are their lengths, equal ones without. See `Fuse` for `groups`."""

    source: NamePattern
    targets: tuple[NamePattern, ...]
    sizes: tuple[int, ...] | None
    dim: int
    groups: int = 1
    word: ClassVar[str] = "split"

    def __post_init__(self) -> None:
        for target in self.targets:
            target.check_fills_from(self.source)
        if self.sizes is not None and len(self.sizes) != len(self.targets):
            raise CheckpointError(
                f"split {self.source.text!r}: {len(self.sizes)} sizes for {len(self.targets)} names; give one for each"
            )

    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        found = match_all(self.source, tensors, "split: the pattern")
        made: dict[str, TensorEntry] = {}
        for name, captures in found.items():
            for target, part in zip(self.targets, self._parts(tensors[name]), strict=True):
                _add(made, target.fill(captures), part)
        return set(found), made

    def _parts(self, entry: TensorEntry) -> list[TensorEntry]:
        dim = _check_dim(entry, self.dim, self.word)
        length, count = entry.shape[dim], len(self.targets)
        sizes = self.sizes or (length // count,) * count
        if sum(sizes) != length or any(size % self.groups for size in sizes):
            groups = f", each a multiple of {self.groups} groups" if self.groups > 1 else ""
            raise CheckpointError(
                f"split {entry.name}: dim {dim} has {length} indices, the sizes are {list(sizes)}; they have to add up "
                f"to {length}{groups}"
            )
        parts: list[list[TensorEntry]] = [[] for _ in sizes]
        start = 0
        for _ in range(self.groups):
            for part, size in zip(parts, sizes, strict=True):
                part.append(narrow_tensor(entry, dim, start, size // self.groups))
                start += size // self.groups
        return [concatenate_tensors(part, dim) if len(part) > 1 else part[0] for part in parts]


@dataclass(frozen=True)
class Fuse(NameChange):
    """Several tensors into one along a dim. With `groups`, each is cut into so many parts, and those take turns."""

    sources: tuple[NamePattern, ...]
    target: NamePattern
    dim: int
    groups: int = 1
    word: ClassVar[str] = "fuse"

    def __post_init__(self) -> None:
        for source in self.sources:
            self.target.check_fills_from(source)

    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        first = match_all(self.sources[0], tensors, "fuse: the pattern")
        used: set[str] = set()
        made: dict[str, TensorEntry] = {}
        for captures in first.values():
            names = [source.fill(captures) for source in self.sources]
            missing = [name for name in names if name not in tensors]
            if missing:
                raise CheckpointError(f"fuse: {names[0]} is there but {missing[0]} is not; they are fused together")
            used.update(names)
            _add(made, self.target.fill(captures), self._fused([tensors[name] for name in names]))
        return used, made

    def _fused(self, parts: Sequence[TensorEntry]) -> TensorEntry:
        dim = _check_dim(parts[0], self.dim, self.word)
        uneven = [part for part in parts if len(part.shape) == len(parts[0].shape) and part.shape[dim] % self.groups]
        if uneven:
            raise CheckpointError(
                f"fuse {uneven[0].name}: dim {dim} has {uneven[0].shape[dim]} indices, not a multiple of the "
                f"{self.groups} groups"
            )
        if self.groups == 1:
            return concatenate_tensors(parts, dim)
        lengths = [part.shape[dim] // self.groups for part in parts]
        turns = [
            narrow_tensor(part, dim, group * length, length)
            for group in range(self.groups)
            for part, length in zip(parts, lengths, strict=True)
        ]
        return concatenate_tensors(turns, dim)


@dataclass(frozen=True)
class Stack(NameChange):
    """Separate tensors, numbered by a named part of their names, into one with a new dim."""

    source: NamePattern
    target: NamePattern
    dim: int
    word: ClassVar[str] = "stack"

    def __post_init__(self) -> None:
        self.target.check_fills_from(self.source)
        _numbering_key(self.source, self.target, self.word)

    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        key = _numbering_key(self.source, self.target, self.word)
        found = match_all(self.source, tensors, "stack: the pattern")
        groups: dict[Captures, dict[str, str]] = {}
        for name, captures in found.items():
            groups.setdefault(captures.without(key), {})[dict(captures.named)[key]] = name
        made: dict[str, TensorEntry] = {}
        for captures, members in groups.items():
            expected = [str(number) for number in range(len(members))]
            if set(members) != set(expected):
                raise CheckpointError(
                    f"stack: {self.target.fill(captures)} is made of the numbers {', '.join(sorted(members)[:8])}; "
                    f"they have to be 0 to {len(members) - 1}"
                )
            entries = [tensors[members[number]] for number in expected]
            dim = _check_dim(entries[0], self.dim, self.word, extra=1)
            parts = [insert_dim(entry, dim) for entry in entries]
            _add(made, self.target.fill(captures), concatenate_tensors(parts, dim))
        return set(found), made


@dataclass(frozen=True)
class Unstack(NameChange):
    """One tensor into separate ones along a dim that goes away; a named part of the new names is the number."""

    source: NamePattern
    target: NamePattern
    dim: int
    word: ClassVar[str] = "unstack"

    def __post_init__(self) -> None:
        key = _numbering_key(self.target, self.source, self.word)
        self.target.check_fills_from(self.source, [key])

    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        key = _numbering_key(self.target, self.source, self.word)
        found = match_all(self.source, tensors, "unstack: the pattern")
        made: dict[str, TensorEntry] = {}
        for name, captures in found.items():
            dim = _check_dim(tensors[name], self.dim, self.word)
            count = tensors[name].shape[dim]
            if len(made) + count > _MAX_UNSTACKED:
                raise CheckpointError(f"unstack {name}: more than {_MAX_UNSTACKED} tensors come of it; see dim {dim}")
            for number in range(count):
                part = select_index(tensors[name], dim, number)
                _add(made, self.target.fill(captures.with_part(key, str(number))), part)
        return set(found), made


@dataclass(frozen=True)
class Transpose(NameChange):
    """The last two dims exchanged, or all dims in the order `dims`; the name stays."""

    source: NamePattern
    dims: tuple[int, ...] | None
    word: ClassVar[str] = "transpose"

    def apply(self, tensors: Tensors) -> tuple[set[str], dict[str, TensorEntry]]:
        found = match_all(self.source, tensors, "transpose: the pattern")
        made: dict[str, TensorEntry] = {}
        for name in found:
            ndim = len(tensors[name].shape)
            dims = self.dims or (*range(ndim - 2), ndim - 1, ndim - 2)
            if sorted(dims) != list(range(ndim)):
                raise CheckpointError(f"transpose {name}: it has {ndim} dims, the order of dims is {list(dims)}")
            _add(made, name, permute_tensor(tensors[name], dims))
        return set(found), made


def _add(made: dict[str, TensorEntry], name: str, entry: TensorEntry) -> None:
    if name in made:
        raise CheckpointError(f"{made[name].name} and {entry.name} would both be called {name}; rename one of them")
    made[name] = entry


def _check_dim(entry: TensorEntry, dim: int, word: str, extra: int = 0) -> int:
    ndim = len(entry.shape) + extra
    if not -ndim <= dim < ndim:
        raise CheckpointError(f"{word} {entry.name}: it has the shape {list(entry.shape)}, which has no dim {dim}")
    return dim % ndim


def _numbering_key(numbered: NamePattern, other: NamePattern, word: str) -> str:
    keys = [key for key in numbered.keys if key not in other.keys]
    if len(keys) != 1:
        raise CheckpointError(
            f"{word}: {numbered.text!r} needs one named part that {other.text!r} lacks, such as {{expert}}: the number"
        )
    return keys[0]


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
        path = Path(given)
        try:
            if path.stat().st_size > _MAX_MAP_BYTES:
                raise CheckpointError(f"{path}: a map of names has at most {_MAX_MAP_BYTES} bytes")
            data = parse_text(tomllib.loads, path.read_text(encoding="utf-8"))
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path.name} is not valid TOML: {error}") from error
        return _parse_map(data, path.name)

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


def _parse_map(data: Mapping[str, Any], where: str) -> NameMap:
    unknown = sorted(set(data) - set(_TABLES))
    if unknown:
        raise CheckpointError(f"{where}: no table {unknown[0]!r}; a map of names has {', '.join(_TABLES)}")
    lengths, renames, changes = data.get("lengths", {}), data.get("rename", {}), data.get("change", [])
    if not isinstance(lengths, Mapping) or not all(type(n) is int and n > 0 for n in lengths.values()):
        raise CheckpointError(f"{where}: lengths are numbers of 1 or more by name")
    if not isinstance(renames, Mapping) or not all(isinstance(new, str) for new in renames.values()):
        raise CheckpointError(f"{where}: rename has patterns and new names, both texts")
    if not isinstance(changes, list) or not all(isinstance(change, Mapping) for change in changes):
        raise CheckpointError(f"{where}: every change is a table of its own, [[change]]")
    steps: list[NameChange] = []
    try:
        if renames:
            steps.append(Rename(tuple((NamePattern(old), NamePattern(new)) for old, new in renames.items())))
        steps += [_ChangeParser(change, lengths).parse() for change in changes]
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if not steps:
        raise CheckpointError(f"{where}: it has no rename and no change")
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


MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "app")
TRAINING_KEYS = (
    *("optim", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states", "optimizer_state_dict"),
    *("lr_scheduler", "lr_schedulers", "scheduler", "grad_scaler", "scaler", "dataloader", "train_state"),
    *("rng", "rng_state"),
)
_GONE = object()  # what is left of a leaf that is not kept; None is a value


@dataclass(frozen=True)
class Conversion:
    """How the index of a source becomes that of what is written. `model_only`: see the module docstring."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    names: NameMap | None = None
    model_only: bool = False

    def to_json(self) -> Json:
        """The conversion as plain data, for another process."""
        names = None if self.names is None else self.names.data
        return [list(self.only), list(self.without), names, self.model_only]

    @classmethod
    def from_json(cls, data: Any) -> Conversion:
        """The conversion that `to_json` wrote."""
        only, without, names, model_only = data
        return cls(tuple(only), tuple(without), None if names is None else NameMap.of(names), model_only)

    def apply(self, index: Index) -> Index:
        """What is written, as an index of the source's bytes; an error for patterns that match nothing."""
        chosen = self.choose(index)
        if (self.only or self.without) and not chosen.tensors and next(chosen.leaves, None) is None:
            raise CheckpointError("nothing is left to write: the filters leave out every tensor and value")
        return self.rename(chosen)

    def choose(self, index: Index) -> Index:
        """What the filters choose, as it is stored."""
        if not self.only and not self.without:
            return index
        named = {tensor: name for name, tensor, _ in index.leaves if tensor is not None}
        names = [*(name for name, _, _ in index.leaves), *(n for n in index.tensors if n not in named), *index.opaque]
        return _keep_names(index, named, filter_by_globs(names, self.only, self.without))

    def rename(self, index: Index) -> Index:
        """The same under the names that are written."""
        index = take_model(index) if self.model_only else index
        return index if self.names is None else rename_index(index, self.names)

    def left_out(self, index: Index) -> tuple[str, ...]:
        """What is not of the model, where the model alone is written: tensors, and all values."""
        if not self.model_only:
            return ()
        chosen = self.choose(index)
        kept = {run for entry in take_model(chosen).tensors.values() for run in _runs(entry)}
        tensors = (name for name, entry in chosen.tensors.items() if len(entry.cut) and not kept & _runs(entry))
        return (*tensors, *(name for name, tensor, _ in chosen.leaves if tensor is None))


def _runs(entry: TensorEntry) -> set[tuple[int, int]]:
    return set(zip(entry.files, entry.begins, strict=True))


def rename_index(index: Index, names: NameMap) -> Index:
    """An index under other names: renamed tensors are entries of the outermost dict, others stay where they are."""
    tensors = names.apply(index.tensors)
    kept = {name for name in tensors if tensors[name] is index.tensors.get(name)}

    def keep(_: str, node: Json) -> Json:
        return _GONE if isinstance(node, dict) and "tensor" in node and node["tensor"] not in kept else node

    tree = _edit_tree(index.tree, keep)
    tree = {"dict": []} if tree is _GONE else tree
    if not (isinstance(tree, dict) and "dict" in tree):
        raise CheckpointError("the state is not a dict, so that tensors cannot get other names in it")
    taken = {str(key) for key, _ in tree["dict"]}
    fresh = [name for name in tensors if name not in kept]
    clash = next((name for name in fresh if name in taken), None)
    if clash is not None:
        raise CheckpointError(f"a tensor would be called {clash}, which is another entry of the state; rename it")
    return replace(index, tensors=tensors, tree={"dict": [*tree["dict"], *([n, {"tensor": n}] for n in fresh)]})


def take_model(index: Index) -> Index:
    """The tensors of the model alone, under their names in its state dict."""
    tree = index.tree
    while (children := _dict_children(tree)) is not None:
        training = any(key in MODEL_KEYS and _dict_children(child) is not None for key, child in children)
        kept = [
            [key, child]
            for key, child in children
            if str(key) not in TRAINING_KEYS or not (training or _dict_children(child) is not None)
        ]
        tree = {"dict": kept}
        holding = [(key, child) for key, child in kept if any(t is not None for _, t, _ in iterate_leaves(child))]
        if len(holding) != 1 or holding[0][0] not in MODEL_KEYS or _dict_children(holding[0][1]) is None:
            break
        tree = holding[0][1]
    found = {name: tensor for name, tensor, _ in iterate_leaves(tree) if tensor is not None}
    tensors = {name: replace(index.tensors[stored], name=name) for name, stored in found.items()}
    return replace(index, tensors=tensors, tree={"dict": [[name, {"tensor": name}] for name in tensors]})


def _keep_names(index: Index, named: Mapping[str, str], chosen: Collection[str]) -> Index:
    tensors = {name: e for name, e in index.tensors.items() if named.get(name, name) in chosen}
    tree = _edit_tree(index.tree, lambda name, node: node if name in chosen else _GONE)
    opaque = tuple(name for name in index.opaque if name in chosen)
    return replace(index, tensors=tensors, tree={"dict": []} if tree is _GONE else tree, opaque=opaque)


def _dict_children(node: Json) -> list[tuple[Any, Json]] | None:
    return [(key, child) for key, child in node["dict"]] if isinstance(node, dict) and "dict" in node else None


def _edit_tree(node: Json, leaf: Callable[[str, Json], Json], path: tuple[str, ...] = ()) -> Json:
    """A tree with other leaves: `leaf` gets the name and the node of each. Containers that lose all of them go too."""
    children = _dict_children(node)
    if children is not None:
        edited = [[key, _edit_tree(child, leaf, (*path, str(key)))] for key, child in children]
        left = [pair for pair in edited if pair[1] is not _GONE]
        return {"dict": left} if left or not children else _GONE
    items = node.get("tuple") if isinstance(node, dict) else node
    if not isinstance(items, list):
        return leaf(".".join(path), node)
    found = [_edit_tree(child, leaf, (*path, str(i))) for i, child in enumerate(items)]
    if items and all(child is _GONE for child in found):
        return _GONE
    found = [None if child is _GONE else child for child in found]  # the others keep their numbers
    return found if isinstance(node, list) else {"tuple": found}
