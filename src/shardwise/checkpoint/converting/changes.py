"""The changes of a name map: tensors renamed, split, fused, stacked, unstacked and transposed, by patterns.

A change takes all tensors there are, and says which names are used up and which tensors come in their place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from shardwise.checkpoint.converting.derive import (
    concatenate_tensors,
    insert_dim,
    narrow_tensor,
    permute_tensor,
    select_index,
)
from shardwise.checkpoint.converting.patterns import Captures, NamePattern, match_all
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import TensorEntry

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
