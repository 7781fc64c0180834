"""A nested state as names: tensors and values by the path that leads to them, and the tree that holds them as JSON.

The name of a leaf is its path joined by dots: `{"model": {"w": x}, "steps": [1, 2]}` has the tensor `model.w` and the
values `steps.0` and `steps.1`. In JSON, scalars and lists stand for themselves; everything else is an object with one
key that says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError

Json: TypeAlias = Any
Scalar: TypeAlias = bool | int | float | str | None
MAX_DEPTH = 100
_MAX_DIGITS = 1000


@dataclass(frozen=True)
class Flat:
    """The leaves of a state by name, and its tree as JSON."""

    tensors: dict[str, Tensor]
    values: dict[str, Scalar]
    tree: Json


def flatten(state: object) -> Flat:
    """Take a state apart.

    >>> import torch
    >>> flat = flatten({"lr": 0.1, "w": torch.ones(2), "betas": (0.9, float("inf"))})
    >>> list(flat.tensors), list(flat.values)
    (['w'], ['lr', 'betas.0', 'betas.1'])
    >>> flat.tree["dict"][0], flat.tree["dict"][1], flat.tree["dict"][2]
    (['lr', 0.1], ['w', {'tensor': 'w'}], ['betas', {'tuple': [0.9, {'float': 'inf'}]}])
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Scalar] = {}

    def leaf(name: str, value: object) -> Json:
        if name in tensors or name in values:
            raise CheckpointError(f"two entries of the state are called {name!r}; rename one of them")
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        values[name] = _checked_scalar(name, value)
        return _scalar_json(values[name])

    tree = _encode(state, (), leaf)
    return Flat(tensors, values, tree)


def _encode(node: object, path: tuple[str, ...], leaf: Callable[[str, object], Json]) -> Json:
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"the state is nested deeper than {MAX_DEPTH} levels, or holds itself, at {path[0]!r}")
    if isinstance(node, Mapping):
        for key in node:
            if type(key) not in (str, int):
                raise CheckpointError(f"{'.'.join(path)}: keys are strings or ints, got the {type(key).__name__} {key}")
        return {"dict": [[key, _encode(value, (*path, str(key)), leaf)] for key, value in node.items()]}
    if isinstance(node, list | tuple):
        items = [_encode(value, (*path, str(i)), leaf) for i, value in enumerate(node)]
        return items if isinstance(node, list) else {"tuple": items}
    return leaf(".".join(path), node)


def _checked_scalar(name: str, value: object) -> Scalar:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise CheckpointError(f"{name}: an int of more than {_MAX_DIGITS} digits is not stored")
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise CheckpointError(
        f"{name or 'the state'}: a checkpoint holds tensors, numbers, strings, bools and None in dicts, lists and "
        f"tuples; got a {type(value).__name__}: convert it"
    )


def _scalar_json(value: Scalar) -> Json:
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def leaves(tree: Json) -> Iterator[tuple[str, str | None, Scalar]]:
    """The (name, tensor or None, value) of every leaf of a tree in JSON, checked.

    >>> list(leaves({"dict": [["a", [1, {"tensor": "w"}]]]}))
    [('a.0', None, 1), ('a.1', 'w', None)]
    """
    yield from _leaves(tree, ())


def _leaves(node: Json, path: tuple[str, ...]) -> Iterator[tuple[str, str | None, Scalar]]:
    if isinstance(node, dict) and "tensor" in node:
        if len(node) != 1 or not isinstance(node["tensor"], str):
            raise CheckpointError(f"the tree of the index has a tensor without a name at {'.'.join(path)!r}")
        yield ".".join(path), node["tensor"], None
    elif (children := _children(node, path)) is not None:
        for key, child in children:
            yield from _leaves(child, (*path, str(key)))
    else:
        yield ".".join(path), None, _scalar(node, path)


def _children(node: Json, path: tuple[str, ...]) -> list[tuple[str | int, Json]] | None:
    """The children of a container, or None for a leaf."""
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"the tree of the index is nested deeper than {MAX_DEPTH} levels")
    items = node.get("tuple") if isinstance(node, dict) else node
    if isinstance(items, list):
        return list(enumerate(items))
    if isinstance(node, dict) and isinstance(node.get("dict"), list):
        pairs = node["dict"]
        if all(isinstance(p, list) and len(p) == 2 and type(p[0]) in (str, int) for p in pairs):
            return [(key, child) for key, child in pairs]
        raise CheckpointError(f"the tree of the index has keys that are no strings or ints at {'.'.join(path)!r}")
    return None


def _scalar(node: Json, path: tuple[str, ...]) -> Scalar:
    if isinstance(node, dict):
        if list(node) == ["float"] and node["float"] in ("nan", "inf", "-inf"):
            return float(node["float"])
        raise CheckpointError(f"the tree of the index has an unknown kind {list(node)[:3]} at {'.'.join(path)!r}")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise CheckpointError(f"the tree of the index has a {type(node).__name__} at {'.'.join(path)!r}")


def build(tree: Json, tensor: Callable[[str], Any]) -> Any:
    """The nested state of a tree in JSON, with what `tensor` gives for each name.

    >>> build({"dict": [["a", {"tuple": [1, {"tensor": "w"}]}]]}, str.upper)
    {'a': (1, 'W')}
    """
    return _build(tree, (), tensor)


def _build(node: Json, path: tuple[str, ...], tensor: Callable[[str], Any]) -> Any:
    if isinstance(node, dict) and "tensor" in node:
        return tensor(node["tensor"])
    children = _children(node, path)
    if children is None:
        return _scalar(node, path)
    built = [(key, _build(child, (*path, str(key)), tensor)) for key, child in children]
    if isinstance(node, dict) and "dict" in node:
        return dict(built)
    values = [value for _, value in built]
    return tuple(values) if isinstance(node, dict) else values


def refill(state: Any, values: Mapping[str, Scalar]) -> Any:
    """Put values in place of those of the same name: dicts and lists are changed, tuples made anew.

    >>> refill({"a": 1, "b": (2, 3)}, {"a": 7, "b.1": 9})
    {'a': 7, 'b': (2, 9)}
    """
    return _refill(state, (), values)


def _refill(node: Any, path: tuple[str, ...], values: Mapping[str, Scalar]) -> Any:
    if isinstance(node, Mapping):
        for key, child in list(node.items()):
            new = _refill(child, (*path, str(key)), values)
            if new is not child:
                node[key] = new  # type: ignore[index]  # a state that cannot be changed says so itself
        return node
    if isinstance(node, list | tuple):
        items = [_refill(child, (*path, str(i)), values) for i, child in enumerate(node)]
        if isinstance(node, list):
            node[:] = items
            return node
        same = all(a is b for a, b in zip(items, node, strict=True))
        return node if same else tuple(items)
    return node if isinstance(node, Tensor) else values.get(".".join(path), node)
