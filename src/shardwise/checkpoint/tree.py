"""The tree of a nested state as JSON: the tensors and values in it, by their path.

The name of a leaf is its path joined by dots: `{"model": {"w": x}, "steps": [1, 2]}` has the tensor `model.w` and the
values `steps.0` and `steps.1`. In JSON, scalars and lists are unchanged; everything else is an object with one
key that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from shardwise.checkpoint.errors import CheckpointError

Json: TypeAlias = Any
Scalar: TypeAlias = bool | int | float | str | None
MAX_DEPTH = 100


def iterate_leaves(tree: Json) -> Iterator[tuple[str, str | None, Scalar]]:
    """The (name, tensor or None, value) of every leaf of a tree in JSON, checked.

    >>> list(iterate_leaves({"dict": [["a", [1, {"tensor": "w"}]]]}))
    [('a.0', None, 1), ('a.1', 'w', None)]
    """
    yield from _iterate_node_leaves(tree, ())


def _iterate_node_leaves(node: Json, path: tuple[str, ...]) -> Iterator[tuple[str, str | None, Scalar]]:
    if isinstance(node, dict) and "tensor" in node:
        if len(node) != 1 or not isinstance(node["tensor"], str):
            raise CheckpointError(f"the tree of the index has a tensor without a name at {'.'.join(path)!r}")
        yield ".".join(path), node["tensor"], None
    elif (children := _tree_children(node, path)) is not None:
        for key, child in children:
            yield from _iterate_node_leaves(child, (*path, str(key)))
    else:
        yield ".".join(path), None, _parse_tree_scalar(node, path)


def _tree_children(node: Json, path: tuple[str, ...]) -> list[tuple[str | int, Json]] | None:
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
        raise CheckpointError(f"the tree of the index has keys that are not strings or ints at {'.'.join(path)!r}")
    return None


def _parse_tree_scalar(node: Json, path: tuple[str, ...]) -> Scalar:
    if isinstance(node, dict):
        if list(node) == ["float"] and node["float"] in ("nan", "inf", "-inf"):
            return float(node["float"])
        raise CheckpointError(f"the tree of the index has an unknown kind {list(node)[:3]} at {'.'.join(path)!r}")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise CheckpointError(f"the tree of the index has a {type(node).__name__} at {'.'.join(path)!r}")


def build_state(tree: Json, tensor: Callable[[str], Any]) -> Any:
    """The nested state of a tree in JSON, with what `tensor` returns for each name.

    >>> build_state({"dict": [["a", {"tuple": [1, {"tensor": "w"}]}]]}, str.upper)
    {'a': (1, 'W')}
    """
    return _build_node(tree, (), tensor)


def _build_node(node: Json, path: tuple[str, ...], tensor: Callable[[str], Any]) -> Any:
    if isinstance(node, dict) and "tensor" in node:
        return tensor(node["tensor"])
    children = _tree_children(node, path)
    if children is None:
        return _parse_tree_scalar(node, path)
    built = [(key, _build_node(child, (*path, str(key)), tensor)) for key, child in children]
    if isinstance(node, dict) and "dict" in node:
        return dict(built)
    values = [value for _, value in built]
    return tuple(values) if isinstance(node, dict) else values
