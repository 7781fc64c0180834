"""What is remembered, and when it is forgotten: the only caches of the package.

1. Every cache has a bound, since layouts and shapes of long programs are endless. A full one is cleared as a whole, or
   loses its oldest entries: values are cheap to make again. All caches together have a bound as well, in bytes: what
   they keep is measured now and then, since entries grow after they were made, and above it all of them are cleared.
2. Keys hold all that an answer depends on. Equal keys share an answer; where equal values differ in words, as layouts
   do that are described on different meshes, answers belong to the object (`identity`).
3. What belongs to data of one step is not remembered: the answer is kept with the object, or nowhere (`keep`).
4. A call that raises stores nothing.
5. What follows from registered rules, functions and overrides is cleared when one of them changes (`on_change`).

Operations on a cache are single operations of a dict. Two threads may make one value twice, and either object is right.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_SIZE = 4096

_all: list[weakref.ref[Any]] = []  # each has `clear` and `size`


class Cache(dict[K, V], Generic[K, V]):
    """A dict of at most `size` entries, filled by `put`.

    >>> squares = Cache(2)
    >>> [squares.put(n, n * n) for n in (1, 2, 3)], squares
    ([1, 4, 9], {3: 9})
    """

    __slots__ = ("__weakref__", "on_change", "size")

    def __init__(self, size: int = DEFAULT_SIZE, *, on_change: bool = False) -> None:
        super().__init__()
        self.size, self.on_change = size, on_change
        _all.append(weakref.ref(self, _all.remove))

    def put(self, key: K, value: V) -> V:
        """Remember a value; returns it."""
        if len(self) >= self.size:
            self.clear()
        self[key] = value
        limit.count += 1
        if limit.count >= limit.due:
            limit.look()
        return value


class _Function:
    """A function with its answers by the value of its arguments, as `cached` lists it."""

    def __init__(self, answers: Any, size: int, on_change: bool) -> None:
        self._answers, self.size, self.on_change = answers, size, on_change

    def clear(self) -> None:
        self._answers.cache_clear()

    def __len__(self) -> int:
        return int(self._answers.cache_info().currsize)


_functions: list[_Function] = []


def cached(
    size: int = DEFAULT_SIZE,
    *,
    identity: bool = False,
    on_change: bool = False,
    keep: Callable[..., bool] | None = None,
) -> Callable[[F], F]:
    """Decorate a function whose answers are remembered by its positional arguments.

    `identity`: by the first argument as an object, which stays alive with its answer, and by the value of the others.
    `keep(*arguments)` is false where nothing may be remembered. With `identity` the answer is then kept with the first
    argument, and ends with it.

    >>> @cached()
    ... def double(n: int) -> int:
    ...     return print("computed") or 2 * n
    >>> double(4), double(4)
    computed
    (8, 8)
    """

    def decorate(function: F) -> F:
        return cast(
            F,
            _cache_by_identity(function, size, on_change, keep)
            if identity
            else _cache_by_value(function, size, on_change, keep),
        )

    return decorate


def _cache_by_value(
    function: Callable[..., Any], size: int, on_change: bool, keep: Callable[..., bool] | None
) -> Callable[..., Any]:
    known = lru_cache(maxsize=size)(function)
    _functions.append(_Function(known, size, on_change))
    _all.append(weakref.ref(_functions[-1], _all.remove))
    if keep is None:
        return known

    def answer(*arguments: Any) -> Any:
        return known(*arguments) if keep(*arguments) else function(*arguments)

    answer.cache_info = known.cache_info  # type: ignore[attr-defined]  # functions take attributes
    return update_wrapper(answer, function)


def _cache_by_identity(
    function: Callable[..., Any], size: int, on_change: bool, keep: Callable[..., bool] | None
) -> Callable[..., Any]:
    answers: Cache[Any, tuple[Any, Any]] = Cache(size, on_change=on_change)

    def answer(first: Any, *rest: Any) -> Any:
        key = (id(first), *rest) if rest else id(first)
        known = answers.get(key)
        if known is not None:
            return known[1]
        if keep is None or keep(first, *rest):
            return answers.put(key, (first, function(first, *rest)))[1]  # the entry keeps the object, so its id
        own: dict[Any, Any] = first.__dict__.setdefault("_answers", {})
        if (answer, rest) not in own:
            own[answer, rest] = function(first, *rest)
        return own[answer, rest]

    answer.answers = answers  # type: ignore[attr-defined]  # functions take attributes
    return update_wrapper(answer, function)


def all_caches() -> list[Any]:
    """Every cache of the process: each has `size`, `on_change`, `clear()` and a length."""
    return [cache for ref in list(_all) if (cache := ref()) is not None]


_OWN = ("shardwise.geometry", "shardwise.transfer", "shardwise.ops", "shardwise.tensor")


def remembered_bytes() -> int:
    """About how many bytes all caches keep, each once: without functions, classes, tensors and comms."""
    queue: list[Any] = []
    for cache in all_caches():
        queue += [cache] if isinstance(cache, Cache) else gc.get_referents(cache._answers)
    seen, found = set[int](), 0
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, type | FunctionType | ModuleType):
            continue
        seen.add(id(value))
        kind = type(value)
        is_own = kind is partial or (kind.__module__.startswith(_OWN) and not hasattr(kind, "__torch_function__"))
        if isinstance(value, dict):
            queue += [*value, *value.values()]
        elif isinstance(value, tuple | list | set | frozenset) or is_own:
            queue += gc.get_referents(value)
        elif kind.__module__ == "numpy":
            queue.append(getattr(value, "base", None))
        elif kind.__module__ != "builtins":
            continue
        found += sys.getsizeof(value)
    return found


class _Limit:
    """The bound of all caches together: they are looked at before they can have got there, and cleared when close."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.start()

    def start(self) -> None:
        """Count from nothing."""
        self.count, self.due = 0, 128

    def look(self) -> None:
        """Measure, and clear all caches where they keep too much; else say after how many entries to look again."""
        self.due = sys.maxsize  # for other threads, meanwhile
        found = remembered_bytes()
        if found > self.most * 3 // 4:
            for cache in all_caches():
                cache.clear()
            return self.start()
        left = (self.most - found) * self.count // (2 * found + 1)
        self.due = self.count + max(128, min(left, self.count))


limit = _Limit(20 << 20)


def clear_on_change() -> None:
    """Say that a rule, a function or an override was registered or removed."""
    for cache in all_caches():
        if cache.on_change:
            cache.clear()


def _is_lasting(layout: Any, *rest: Any) -> bool:
    return not layout.depends_on_data


def _is_lasting_plan(first: Any, second: Any, *rest: Any) -> bool:
    """Whether a layout and another one, or a plan between two, do not depend on data."""
    src, dst = (first, second) if hasattr(first, "depends_on_data") else (first.src, first.dst)
    return not (src.depends_on_data or dst.depends_on_data)


cache_by_identity = cached(8192, identity=True, keep=_is_lasting)
"""For functions of a layout: answers about one that depends on data end with it."""
cache_plans = cached(keep=_is_lasting_plan)
"""For functions of two layouts, or of a plan between two: answers are not kept where one depends on data."""
