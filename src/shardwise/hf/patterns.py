"""Few patterns for many parameters: numbers become `*`, and names that differ in one part become alternatives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardwise.nn.patterns import match_patterns

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def fold_patterns(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Patterns that match exactly the parameters in `texts`, each with its text.

    >>> names = [f"h.{i}.{n}.weight" for i in range(3) for n in ("q_proj", "k_proj", "norm")]
    >>> fold_patterns({n: "tp: S(0)" for n in names if "norm" not in n}, names)
    {'h.*.{q,k}_proj.weight': 'tp: S(0)'}
    """
    folded: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        folded.setdefault(_NUMBER.sub("*", name), {})[name] = text
    found: dict[str, str] = {}
    for pattern, members in folded.items():
        everyone = [n for n in names if _NUMBER.sub("*", n) == pattern]
        if len(set(members.values())) == 1 and set(everyone) == set(members):
            found[pattern] = next(iter(members.values()))
        else:  # layers differ: each by its name
            found |= members
    return _shorten(_join_alternatives(found), names)


def _join_alternatives(found: Mapping[str, str]) -> dict[str, str]:
    """Patterns with one text that differ in one part are one pattern with alternatives."""
    joined: list[tuple[list[list[str]], str]] = []
    for pattern, text in found.items():
        parts = pattern.split(".")
        for several, other in joined:
            differ = [i for i, (a, b) in enumerate(zip(several, parts, strict=False)) if b not in a]
            same = other == text and len(several) == len(parts)
            if same and len(differ) == 1 and all(len(p) == 1 for i, p in enumerate(several) if i != differ[0]):
                several[differ[0]].append(parts[differ[0]])
                break
        else:
            joined.append(([[part] for part in parts], text))
    return {".".join(map(_write_alternatives, parts)): text for parts, text in joined}


def _write_alternatives(parts: Sequence[str]) -> str:
    """One part of a pattern.

    >>> _write_alternatives(["q_proj", "k_proj"]), _write_alternatives(["weight", "bias"]), _write_alternatives(["up"])
    ('{q,k}_proj', '{weight,bias}', 'up')
    """
    if len(parts) == 1:
        return parts[0]
    ends = {p[p.find("_") :] if "_" in p else "" for p in parts}
    end = ends.pop() if len(ends) == 1 else ""
    return "{" + ",".join(p.removesuffix(end) for p in parts) + "}" + end


def _shorten(found: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """`{weight,bias}` as `*` where there is nothing else."""
    shorter = {p.removesuffix("{weight,bias}") + "*" if p.endswith("{weight,bias}") else p: t for p, t in found.items()}
    same = _matches(shorter, names) == _matches(found, names)
    return shorter if same else dict(found)


def _matches(patterns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: patterns[pattern] for name, pattern in match_patterns(patterns, list(names)).items()}
