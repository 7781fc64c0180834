"""A nested state taken apart into tensors and values by name, and filled again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.tree import MAX_DEPTH, Json, Scalar

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
    if isinstance(node, Tensor):
        return leaf(".".join(path), node)
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


def refill(state: Any, values: Mapping[str, Scalar]) -> Any:
    """Put values in place of those of the same name: dicts and lists are changed, tuples made anew.

    >>> refill({"a": 1, "b": (2, 3)}, {"a": 7, "b.1": 9})
    {'a': 7, 'b': (2, 9)}
    """
    return _refill(state, (), values)


def _refill(node: Any, path: tuple[str, ...], values: Mapping[str, Scalar]) -> Any:
    if isinstance(node, Tensor):
        return node
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
    return values.get(".".join(path), node)
