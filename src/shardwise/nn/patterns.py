"""Which parameter does a pattern name, and what does its text say for each axis of the mesh?

A pattern is a parameter's path in which `*` matches one part, `**` any number of parts, `{q,k,v}` one of several:

    "blocks.*.mlp.up.weight": "S(0)"                 for the plan's axis, or the mesh's only one
    "blocks.*.{q,k,v}_proj.weight": "S(0)"           three layers of each block
    "blocks.*.attn.qkv.weight": "tp: S(0) groups(q,k,v)"   other axes replicate; q, k and v are numbers of the plan
    "embed.weight": "R, S(1)"                        one placement for each axis

Everything here is text and geometry: no tensors, no process group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from shardwise.geometry import LayoutError, Mesh, Placement, Replicate, format_placement, parse_placements, parse_spec
from shardwise.geometry.torch_words import to_placement

_LENGTHS = re.compile(r"\b(groups|sizes)\s*\(([^)]*)\)")
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*:(.*)", re.DOTALL)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_ALTERNATIVE_DOT = re.compile(r"\.(?![^{}]*\})")  # a dot outside of {self_attn.q,mlp.up}
_MAX_SUGGESTIONS = 3


class PlanError(ValueError):
    """A plan that does not fit its model, with everything that is wrong with it."""


def match_patterns(patterns: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """The pattern of each name that has one; patterns without a name and names with two are errors.

    >>> match_patterns(["blocks.*.up.weight"], ["blocks.0.up.weight", "blocks.1.up.weight", "head.weight"])
    {'blocks.0.up.weight': 'blocks.*.up.weight', 'blocks.1.up.weight': 'blocks.*.up.weight'}
    >>> match_patterns(["block.*.up.weight"], ["blocks.0.up.weight", "head.weight"])
    Traceback (most recent call last):
    ...
    shardwise.nn.patterns.PlanError: the pattern 'block.*.up.weight' matches no parameter; near it: blocks.0.up.weight
    """
    found: dict[str, list[str]] = {}
    problems = []
    for pattern in patterns:
        matcher = _compile_pattern(pattern)
        hits = [name for name in names if matcher.fullmatch(name)]
        for name in hits:
            found.setdefault(name, []).append(pattern)
        if not hits:
            near = ", ".join(_find_similar_names(pattern, names)) or "nothing"
            problems.append(f"the pattern {pattern!r} matches no parameter; near it: {near}")
    for name, several in found.items():
        if len(several) > 1:
            problems.append(f"{name} matches {' and '.join(map(repr, several))}; a parameter has one pattern")
    if problems:
        raise PlanError("\n".join(problems))
    return {name: several[0] for name, several in found.items()}


def _find_similar_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names most like a pattern, one of several that differ in numbers only.

    >>> _find_similar_names("layer.*.up.weight", ["layers.0.up.weight", "layers.1.up.weight", "layers.0.down.weight"])
    ['layers.0.up.weight', 'layers.0.down.weight']
    """
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), name)
    close = get_close_matches(pattern, kinds, n=_MAX_SUGGESTIONS, cutoff=0.6) or list(kinds)[:_MAX_SUGGESTIONS]
    return [kinds[kind] for kind in close]


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise PlanError("a pattern is a parameter's path such as 'blocks.*.weight'; got an empty one")
    texts = [".*" if part == "**" else _part_expression(part, pattern) for part in _ALTERNATIVE_DOT.split(pattern)]
    return re.compile(r"\.".join(texts).replace(r".*\.", r"(?:.*\.)?"))


def _part_expression(part: str, pattern: str) -> str:
    """The regular expression of one part of a pattern.

    >>> _part_expression("{q,k}_proj", "layers.{q,k}_proj")
    '(?:q|k)_proj'
    """
    text = re.escape(part).replace(r"\*", r"[^.]*")
    text = re.sub(r"\\\{([^{}]*)\\\}", lambda m: f"(?:{'|'.join(w.strip() for w in m[1].split(','))})", text)
    if r"\{" in text or r"\}" in text:
        raise PlanError(f"the pattern {pattern!r}: a brace has no partner; alternatives are written {{q,k,v}}")
    return text


def read_placements(
    text: str, mesh: Mesh, axis: str | None = None, lengths: Mapping[str, int] | None = None
) -> tuple[Placement, ...]:
    """What each axis of a mesh does, from a text in any of the three forms.

    >>> mesh = Mesh.of(dp=2, tp=4)
    >>> read_placements("tp: S(0) groups(q,kv,kv)", mesh, lengths={"q": 8, "kv": 4})
    (Replicate(), Shard(0, groups=(8, 4, 4)))
    >>> read_placements("S(1)", mesh, axis="tp"), read_placements("S(0), R", mesh)
    ((Replicate(), Shard(1)), (Shard(0), Replicate()))
    """
    parts = _split_at_commas(_substitute_lengths(text, lengths or {}))
    named = [_NAMED.match(part) for part in parts]
    if any(named):
        if not all(named):
            raise LayoutError(f"{text!r}: name the axis of every placement, as in 'dp: S(0), tp: S(1)', or of none")
        axes = [m[1] for m in named if m is not None]
        if len(set(axes)) < len(axes):
            twice = next(a for a in axes if axes.count(a) > 1)
            raise LayoutError(f"{text!r} gives the axis {twice!r} two placements; an axis has one")
        return _parse_by_axis({m[1]: m[2] for m in named if m is not None}, mesh, text)
    if len(parts) == 1 and mesh.ndim != 1:
        if axis is None:
            raise LayoutError(
                f"{text!r} does not say which axis of {mesh} it is for; write 'axis: {text}', set the plan's axis, "
                f"or write {mesh.ndim} placements"
            )
        return _parse_by_axis({axis: parts[0]}, mesh, text)
    if len(parts) != mesh.ndim:
        raise LayoutError(f"{text!r} has {len(parts)} placements; the mesh {mesh} has {mesh.ndim} axes")
    return tuple(parse_placements(part)[0] for part in parts)


def _parse_by_axis(texts: Mapping[str, str], mesh: Mesh, text: str) -> tuple[Placement, ...]:
    unknown = sorted(set(texts) - set(mesh.axes))
    if unknown:
        raise LayoutError(f"{text!r} names the axis {unknown[0]!r}; the mesh has {', '.join(mesh.axes)}")
    return tuple(parse_placements(texts[a])[0] if a in texts else Replicate() for a in mesh.axes)


def _substitute_lengths(text: str, lengths: Mapping[str, int]) -> str:
    """The text with names of lengths replaced by the lengths."""

    def number(word: str) -> str:
        word = word.strip()
        if not word.isidentifier():
            return word
        if word not in lengths:
            known = ", ".join(lengths) or "none"
            raise LayoutError(f"{text!r} names the length {word!r}; the plan's lengths are: {known}")
        return str(lengths[word])

    return _LENGTHS.sub(lambda m: f"{m[1]}({','.join(map(number, m[2].split(',')))})", text)


def write_placements(value: Any) -> Any:
    """Placements of a parameter, one or a list, ours or torch's, in the notation; anything else as it is.

    >>> from shardwise.geometry import Shard
    >>> write_placements([Replicate(), Shard(0, block=2)]), write_placements("tp: S(0)")
    ('R, S(0) block(2)', 'tp: S(0)')
    """
    listed = value if isinstance(value, list | tuple) else [value]
    try:
        return ", ".join(format_placement(to_placement(p)) for p in listed)
    except LayoutError:
        return value


def _split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets.

    >>> _split_at_commas("S(0) groups(4,2), R")
    ['S(0) groups(4,2)', ' R']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def read_mesh(text: str) -> Mesh:
    """A mesh from its text.

    >>> read_mesh("dp=2,tp=4").shape
    (2, 4)
    """
    spec = parse_spec(f"on {text}: {', '.join('R' * text.count('='))}")
    mesh = getattr(spec, "mesh", None)
    assert isinstance(mesh, Mesh)
    return mesh
