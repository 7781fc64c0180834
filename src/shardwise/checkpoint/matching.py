"""Which stored tensor goes into which tensor of the state? By name, shape and dtype; errors list near misses."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Index, TensorEntry, stored_names, stored_values
from shardwise.checkpoint.leaves import Leaf
from shardwise.checkpoint.tree import Scalar

Names: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None] | None
_LISTED = 5


@dataclass(frozen=True)
class Matched:
    """The tensors to fill, each with what is stored for it, and the values to put in place."""

    tensors: Sequence[tuple[Leaf, TensorEntry]]
    values: Mapping[str, Scalar]


def match(
    index: Index,
    tensors: Sequence[Leaf],
    values: Mapping[str, Scalar],
    *,
    strict: bool,
    names: Names,
    cast: bool,
) -> Matched:
    """Find what is stored for every entry of a state; raise one error that lists all that does not fit."""
    rename = _renaming(names)
    held_tensors, held_values = stored_names(index), stored_values(index)
    own = [*(leaf.name for leaf in tensors), *values]
    wanted = {name: source for name in own if (source := rename(name)) is not None}
    problems = _kind_problems(wanted, {leaf.name for leaf in tensors}, held_tensors, held_values)
    if strict:
        problems += _missing(wanted, {**held_tensors, **held_values})
        problems += _unexpected(set(wanted.values()), {**held_tensors, **held_values}, wanted)
    found = [
        (leaf, index.tensors[held_tensors[wanted[leaf.name]]])
        for leaf in tensors
        if leaf.name in wanted and wanted[leaf.name] in held_tensors
    ]
    problems += [text for leaf, entry in found if (text := _misfit(leaf, entry, cast))]
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise CheckpointError("the checkpoint does not fit the state: " + "; ".join(problems[:_LISTED]) + more)
    chosen = {name: held_values[wanted[name]] for name in values if name in wanted and wanted[name] in held_values}
    return Matched(found, chosen)


def _renaming(names: Names) -> Callable[[str], str | None]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    mapping = names
    return lambda name: mapping.get(name, name)


def _kind_problems(
    wanted: Mapping[str, str], tensors: set[str], held_tensors: Mapping[str, str], held_values: Mapping[str, Scalar]
) -> list[str]:
    problems = []
    for name, source in wanted.items():
        if name in tensors and source in held_values:
            problems.append(f"{name} is a tensor in the state and the value {held_values[source]!r:.40} in it")
        if name not in tensors and source in held_tensors:
            problems.append(f"{name} is no tensor in the state and a tensor in it")
    return problems


def _missing(wanted: Mapping[str, str], held: Mapping[str, object]) -> list[str]:
    return [f"{_both(n, s)} is missing in it{_near(s, held)}" for n, s in wanted.items() if s not in held]


def _unexpected(sources: set[str], held: Mapping[str, object], wanted: Mapping[str, str]) -> list[str]:
    return [
        f"it holds {name}, which the state has not{_near(name, wanted)} (strict=False leaves it out)"
        for name in held
        if name not in sources
    ]


def _both(name: str, source: str) -> str:
    return name if name == source else f"{source} (for {name})"


def _near(name: str, others: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(others)[:2000], n=2, cutoff=0.75)
    return f" (near: {', '.join(near)})" if near else ""


def _misfit(leaf: Leaf, entry: TensorEntry, cast: bool) -> str | None:
    if leaf.layout.shape != entry.shape:
        return f"{leaf.name} has the shape {leaf.layout.shape} in the state and {entry.shape} in it"
    if leaf.dtype != entry.dtype and not cast:
        return f"{leaf.name} is {leaf.dtype} in the state and {entry.dtype} in it (cast=True converts)"
    return None
