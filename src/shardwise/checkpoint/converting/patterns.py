"""Which names fit a pattern, what did its wildcards stand for, and which new name do they give?

In a pattern `*` stands for one part of a name between dots (or some of it), `**` for any number of parts, and `{layer}`
for one part that has a name. In the new name the stars stand for the same, in the same order; `{layer}` may be
anywhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from shardwise.checkpoint.errors import CheckpointError

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
