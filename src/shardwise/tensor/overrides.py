"""Which function of the user's runs in place of a torch function on sharded tensors? One table answers.

An override counts for every sharded tensor, for tensors laid out by a class of spec (or one derived from it), or as a
default. `shardwise.compat.custom_ops` has the decorators that register them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from shardwise.tensor import caches

Override: TypeAlias = Callable[[Any, Any, Any, Any], Any]
EVERY, DEFAULT = "every spec", "no other override"  # the two keys that are not classes of specs

_overrides: dict[Callable[..., Any], dict[object, Override]] = {}


def set_override(func: Callable[..., Any], scope: object, override: Override) -> None:
    """Register an override of a torch function for EVERY tensor, for a class of specs, or as DEFAULT."""
    _overrides.setdefault(func, {})[scope] = override
    caches.invalidate_caches()


def find_override(func: Callable[..., Any], *scopes: object) -> Override | None:
    """Return the override of a torch function for the first of these scopes that has one, or None."""
    known = _overrides.get(func)
    return None if known is None else next((known[scope] for scope in scopes if scope in known), None)


def override_for(func: Callable[..., Any], spec: object) -> Override | None:
    """Return the override of a torch function that counts for tensors of a spec: the nearest class of it, bases too."""
    return None if func not in _overrides else find_override(func, EVERY, *type(spec).__mro__, DEFAULT)


@contextmanager
def overrides_scope() -> Iterator[None]:
    """Undo at the end of a `with` block all registrations made inside it.

    The table belongs to the process: around `run_local`, not inside it.
    """
    before = {func: dict(known) for func, known in _overrides.items()}
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
        caches.invalidate_caches()
