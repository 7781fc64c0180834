"""Nests of values: what torch takes apart (lists, tuples, dicts, registered classes), dataclasses and UserDicts.

A batch is often an object of the user's own, and tokenizers return a UserDict. Where one has tensors it is taken apart
into its attributes, and put together again as a new object of its class.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from shardwise._torch import pytree


class _OpenedObject:
    """Stands for an object while torch takes a nest apart; what is put together is of the object's class again."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _take_apart(opened: _OpenedObject) -> tuple[list[Any], tuple[Any, tuple[str, ...]]]:
    held = vars(opened.value)
    return [_open_objects(value) for value in held.values()], (type(opened.value), tuple(held))


def _put_together(values: Any, kind: tuple[Any, tuple[str, ...]]) -> Any:
    made = kind[0].__new__(kind[0])
    made.__dict__.update(zip(kind[1], values, strict=True))
    return made


pytree.register_pytree_node(_OpenedObject, _take_apart, _put_together, serialized_type_name="shardwise.OpenedObject")


def _is_opened(value: Any) -> bool:
    if not (is_dataclass(value) or isinstance(value, UserDict)) or isinstance(value, type):
        return False
    if type(value).__new__ is not object.__new__ or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(leaf, Tensor) or _is_opened(leaf) for leaf in pytree.tree_iter(list(vars(value).values())))


def _open_objects(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: _OpenedObject(leaf) if _is_opened(leaf) else leaf, tree)


def flatten_nest(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a nest, and what puts them together again.

    >>> flatten_nest({"a": [1, 2]})[0]
    [1, 2]
    """
    leaves, structure = pytree.tree_flatten(tree)
    if any(_is_opened(leaf) for leaf in leaves):
        leaves, structure = pytree.tree_flatten(_open_objects(tree))
    return leaves, structure


def unflatten_nest(leaves: Any, structure: Any) -> Any:
    """The nest of some leaves."""
    return pytree.tree_unflatten(leaves, structure)


def map_nest(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nest of what a function returns for each leaf."""
    leaves, structure = flatten_nest(tree)
    return unflatten_nest([function(leaf) for leaf in leaves], structure)
