"""Placements by the names of axes ("tp: S(0)"), one for each axis ("R, S(0)"), or one for the only axis ("S(0)").

Where a spec is wanted, any of these will do next to a mesh, and so will a whole rule ("on dp=2,tp=2: R, S(0)").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.notation.read import parse_placements, parse_spec
from shardwise.geometry.placements import Placement, Replicate
from shardwise.geometry.specs import MeshSpec

_LENGTHS = re.compile(r"\b(groups|sizes)\s*\(([^)]*)\)")
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*:(.*)", re.DOTALL)
_RULES = re.compile(r"\s*(on|as)\b")


def read_spec(text: str, mesh: Mesh | None, ranks: Sequence[int]) -> ShardingSpec:
    """The spec that a text means: a whole rule, or placements on a mesh; without a mesh, one axis over all ranks.

    >>> read_spec("tp: S(0)", None, (0, 1)), read_spec("tp: S(0)", Mesh.of(dp=2, tp=2), ())
    (MeshSpec(tp=2, (Shard(0),)), MeshSpec(dp=2,tp=2, (Replicate(), Shard(0))))
    >>> read_spec("as chunk(0) over 0-1", None, ()).layout((3,)).local_shapes(1)
    ((1,),)
    """
    if _RULES.match(text):
        return parse_spec(text)
    if mesh is None:
        parts = _split_at_commas(text)
        if len(parts) > 1:
            raise LayoutError(f"{text!r} does not say how large its axes are; write 'on dp=2,tp=2: R, S(0)'")
        named = _NAMED.match(parts[0])
        mesh = Mesh((named[1] if named else "all",), tuple(ranks))
    return MeshSpec(mesh, read_placements(text, mesh))


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
