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
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from shardwise.geometry import LayoutError, Mesh, format_placement, parse_spec
from shardwise.geometry.torch_words import to_placement

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_ALTERNATIVE_DOT = re.compile(r"\.(?![^{}]*\})")  # a dot outside of {self_attn.q,mlp.up}
_MAX_SUGGESTIONS = 3


class PlanError(ValueError):
    """A plan that does not fit its model, with everything that is wrong with it.

    >>> import torch, shardwise
    >>> shardwise.ModelPlan(shardwise.Mesh.of(tp=2), {"wieght": "S(0)"}).specs(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    ...
    shardwise.nn.patterns.PlanError: the pattern 'wieght' matches no parameter; near it: weight
    """


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
    text = re.escape(part.replace(" ", "")).replace(r"\*", r"[^.]*")
    text = re.sub(r"\\\{([^{}]*)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", text)
    if r"\{" in text or r"\}" in text:
        raise PlanError(f"the pattern {pattern!r}: a brace has no partner; alternatives are written {{q,k,v}}")
    return text


def write_placements(value: Any) -> Any:
    """Placements of a parameter, one or a list, ours or torch's, in the notation; anything else as it is.

    >>> from shardwise.geometry import Replicate, Shard
    >>> write_placements([Replicate(), Shard(0, block=2)]), write_placements("tp: S(0)")
    ('R, S(0) block(2)', 'tp: S(0)')
    """
    listed = value if isinstance(value, list | tuple) else [value]
    try:
        return ", ".join(format_placement(to_placement(p)) for p in listed)
    except LayoutError:
        return value


def read_mesh(text: str) -> Mesh:
    """A mesh from its text.

    >>> read_mesh("dp=2,tp=4").shape
    (2, 4)
    """
    spec = parse_spec(f"on {text}: {', '.join('R' * text.count('='))}")
    mesh = getattr(spec, "mesh", None)
    assert isinstance(mesh, Mesh)
    return mesh
