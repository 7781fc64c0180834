"""What did a traced program read from outside of its arguments, and is all of it as it was?

1. While a program is traced, `admission` notes each place that the program may read, before it does: entries of a dict
   (global names, attributes of an object, a class or a Python module), the contents of a container, and single values
   (cells of closures, slots, functions' defaults).
2. `holds` compares them by identity, in a few passes in C; where something differs, one by one and by value: equal
   numbers of one type are the same, 1 and 1.0 are not, nor are -0.0 and 0.0.
3. What the program itself has changed is found by the same comparison, and `undo` puts it back.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import CellType, FunctionType
from typing import Any, cast

import torch

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
MISSING: Any = object()
_CONTENTS = attrgetter("cell_contents")


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal numbers and strings of one type.

    >>> is_same((1, "a"), (1, "a")), is_same(1, 1.0), is_same(0.0, -0.0), is_same([], [])
    (True, False, False, False)
    """
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return struct.pack("d", one) == struct.pack("d", other)
    if kind is complex:
        return is_same((one.real, one.imag), (other.real, other.imag))
    if kind is tuple or kind is torch.Size:
        return len(one) == len(other) and all(map(is_same, one, other))
    if kind is slice:
        return is_same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return (kind in SIMPLE or kind is range) and bool(one == other)


def read_cell(cell: CellType) -> Any:
    """What a cell of a closure has, or `MISSING` where the name is not assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _put_cell(cell: CellType, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def describe_change(source: str, now: Any, before: Any) -> str:
    """A change in words, with the values where they are short.

    >>> describe_change("config.scale", 3.0, 2.0)
    'config.scale is 3.0, was 2.0'
    """
    texts = [_short(value) for value in (now, before)]
    return f"{source} is {texts[0]}, was {texts[1]}" if None not in texts else f"{source} is another object"


def _short(value: Any) -> str | None:
    if value is MISSING:
        return "missing"
    return text if isinstance(value, SIMPLE) and len(text := repr(value)) <= 60 else None


@dataclass(eq=False)
class Entries:
    """Entries of a dict that a program may read by name: those that are there, and that the others are not."""

    path: str
    owner: object
    held: Mapping[Any, Any]
    put: Callable[[str, Any], None]
    is_whole: bool = False
    asked: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)

    def ask(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Note that these names may be read; the ones that are new and there, with their values."""
        new = [
            name for name in (sorted(names) if isinstance(names, set | frozenset) else names) if name not in self.asked
        ]
        self.asked.update(new)
        for name in new:
            if name in self.held:
                self.values[name] = self.held[name]
                yield name, self.values[name]

    def source(self, name: str) -> str:
        """One entry in words."""
        return f"{self.path}.{name}" if self.path else f"the name {name}"

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """The entries that are not as they were: name, value now, value before."""
        extra = self.held.keys() - self.values.keys() if self.is_whole else self.held.keys() & self.asked
        for name in [*self.values, *(extra - self.values.keys())]:
            now, before = self.held.get(name, MISSING), self.values.get(name, MISSING)
            if not is_same(now, before):
                yield str(name), now, before

    def accept(self) -> None:
        """Remember equal values that are other objects."""
        self.values = {name: self.held[name] for name in self.values}


@dataclass(eq=False)
class Contents:
    """A list, set, deque or dict, and all that it had, in order."""

    path: str
    held: Any
    items: Any = field(init=False)  # the entries as they are now; of a dict its keys
    values: Any = field(init=False)  # of a dict
    before: tuple[list[Any], list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        kind: Any = OrderedDict if isinstance(self.held, OrderedDict) else dict
        is_table = isinstance(self.held, dict)
        self.items, self.values = (kind.keys(self.held), kind.values(self.held)) if is_table else (self.held, ())
        self.accept()

    def accept(self) -> None:
        """Remember what it has now."""
        self.before = [*self.items], [*self.values]

    def is_same(self) -> bool:
        """Whether it has the same entries, in the same order."""
        items, values = self.before
        same_length = len(self.items) == len(items)
        return same_length and all(map(is_same, self.items, items)) and all(map(is_same, self.values, values))

    def restore(self) -> None:
        """Put everything back."""
        self.held.clear()
        items, values = self.before
        if isinstance(self.held, list | deque):
            self.held.extend(items)
        else:
            self.held.update(zip(items, values, strict=True) if isinstance(self.held, dict) else items)


@dataclass(eq=False)
class Value:
    """One value that is read in a way of its own."""

    source: str
    read: Callable[[], Any]
    before: Any
    put: Callable[[Any], None] | None = None


class Reads:
    """All that a program read from outside: compared before each call of its graph."""

    def __init__(self) -> None:
        self.entries: dict[int, Entries] = {}
        self.contents: dict[int, Contents] = {}
        self.values: list[Value] = []
        self._cells: dict[int, tuple[str, CellType, Any]] = {}
        self._functions: dict[int, tuple[str, FunctionType, tuple[Any, ...]]] = {}
        self._objects: dict[int, tuple[str, Any, type, Any]] = {}
        self._stages: list[Callable[[], bool]] | None = None

    # What is noted

    def entries_of(self, owner: object, path: str, held: Mapping[Any, Any], put: Callable[[str, Any], None]) -> Entries:
        """The entries of an owner's dict that are noted."""
        return self.entries.setdefault(id(owner), Entries(path, owner, held, put))

    def note_contents(self, path: str, held: Any) -> None:
        """Note all entries of a container."""
        self.contents.setdefault(id(held), Contents(path, held))

    def note_cell(self, name: str, cell: CellType) -> Any:
        """Note what a cell has, and return it."""
        return self._cells.setdefault(id(cell), (name, cell, read_cell(cell)))[2]

    def note_function(self, path: str, function: FunctionType) -> None:
        """Note the code and defaults of a function."""
        self._functions.setdefault(id(function), (path, function, _function_parts(function)))

    def note_object(self, path: str, value: Any, attributes: Any) -> None:
        """Note an object's class, and its dict of attributes where it has one."""
        self._objects.setdefault(id(value), (path, value, type(value), attributes))

    def note_value(self, source: str, read: Callable[[], Any], put: Callable[[Any], None] | None = None) -> Any:
        """Note what a function returns now, and return it."""
        before = read()
        self.values.append(Value(source, read, before, put))
        return before

    # What is compared

    def holds(self) -> bool:
        """Whether a program would read the same; cheap, since every call of a compiled program asks."""
        if self._stages is None:
            self._stages = self._make_stages()
        try:
            if all(map(call, self._stages)):
                return True
        except (LookupError, ValueError, AttributeError, RuntimeError):  # an entry, a cell or an attribute is gone
            pass
        if self.difference() is not None:
            return False
        for entries in self.entries.values():
            entries.accept()
        for contents in self.contents.values():
            contents.accept()
        self._cells = {key: (name, cell, read_cell(cell)) for key, (name, cell, _) in self._cells.items()}
        self._functions = {key: (path, f, _function_parts(f)) for key, (path, f, _) in self._functions.items()}
        self._stages = self._make_stages()
        return True

    def _make_stages(self) -> list[Callable[[], bool]]:
        """Comparisons by identity, each a pass in C over one kind of place; those of nothing are left out."""
        named = [entries for entries in self.entries.values() if entries.values]
        getters = [itemgetter(*entries.values, next(iter(entries.values))) for entries in named]
        dicts = [entries.held for entries in named]
        named_values = [
            value for entries in named for value in (*entries.values.values(), next(iter(entries.values.values())))
        ]
        partial = [entries for entries in self.entries.values() if not entries.is_whole]
        absent = [frozenset(entries.asked) - entries.values.keys() for entries in partial]
        views = [entries.held.keys() for entries in partial]
        wholes = [entries.held for entries in self.entries.values() if entries.is_whole]
        lengths = [len(entries.values) for entries in self.entries.values() if entries.is_whole]
        boxes = [contents.items for contents in self.contents.values()]
        sizes = [len(contents.before[0]) for contents in self.contents.values()]
        parts = [*chain.from_iterable(contents.before[0] for contents in self.contents.values())]
        tables = [contents.values for contents in self.contents.values() if isinstance(contents.held, dict)]
        table_values = [*chain.from_iterable(contents.before[1] for contents in self.contents.values())]
        cells = [(cell, value) for _, cell, value in self._cells.values()]
        full = [cell for cell, value in cells if value is not MISSING]
        found = [value for _, value in cells if value is not MISSING]
        empty = [cell for cell, value in cells if value is MISSING]
        functions = [function for _, function, _ in self._functions.values()]
        function_values = [*chain.from_iterable(parts for _, _, parts in self._functions.values())]
        objects = [value for _, value, _, _ in self._objects.values()]
        kinds = [kind for _, _, kind, _ in self._objects.values()]
        owners = [value for _, value, _, attributes in self._objects.values() if attributes is not None]
        attributes = [attributes for *_, attributes in self._objects.values() if attributes is not None]
        values = self.values
        stages: list[tuple[Any, Callable[[], bool]]] = [
            (named, lambda: all(map(is_, chain.from_iterable(map(call, getters, dicts)), named_values))),
            (partial, lambda: all(map(_is_disjoint, views, absent))),
            (wholes, lambda: [*map(len, wholes)] == lengths),
            (boxes, lambda: [*map(len, boxes)] == sizes and all(map(is_, chain.from_iterable(boxes), parts))),
            (tables, lambda: all(map(is_, chain.from_iterable(tables), table_values))),
            (full, lambda: all(map(is_, map(_CONTENTS, full), found))),
            (empty, lambda: all(read_cell(cell) is MISSING for cell in empty)),
            (functions, lambda: all(map(is_, chain.from_iterable(map(_function_parts, functions)), function_values))),
            (objects, lambda: all(map(is_, map(type, objects), kinds))),
            (owners, lambda: all(map(is_, map(_attributes_of, owners), attributes))),
            (values, lambda: all(is_same(value.read(), value.before) for value in values)),
        ]
        return [stage for places, stage in stages if places]

    def difference(self) -> str | None:
        """What is not as it was, in words: the first of all differences, or None."""
        return next((describe_change(*change) for change in self._changes()), None)

    def _changes(self) -> Iterator[tuple[str, Any, Any]]:
        for entries in self.entries.values():
            yield from ((entries.source(name), now, before) for name, now, before in entries.changes())
        for name, cell, before in self._cells.values():
            if not is_same(now := read_cell(cell), before):
                yield f"the name {name}", now, before
        for contents in self.contents.values():
            if not contents.is_same():
                yield f"what is in {contents.path}", contents.held, None
        for path, function, parts in self._functions.values():
            if not all(map(is_same, _function_parts(function), parts)):
                yield f"the code or a default value of {path}", function, None
        for path, value, kind, attributes in self._objects.values():
            if type(value) is not kind or (attributes is not None and _attributes_of(value) is not attributes):
                yield f"the class or the dict of {path}", value, None
        for value in self.values:
            if not is_same(now := value.read(), value.before):
                yield value.source, now, value.before

    def undo(self) -> str | None:
        """Put everything back as it was when it was noted; say what was changed first, or None."""
        found = []
        for entries in self.entries.values():
            for name, _, before in [*entries.changes()]:
                entries.put(name, before)
                found.append(entries.source(name))
        for name, cell, before in self._cells.values():
            if not is_same(read_cell(cell), before):
                _put_cell(cell, before)
                found.append(f"the name {name}")
        for contents in self.contents.values():
            if not contents.is_same():
                contents.restore()
                found.append(f"{contents.path}, a {type(contents.held).__name__}")
        for value in self.values:
            if not is_same(value.read(), value.before):
                if value.put is not None:
                    value.put(value.before)
                found.append(value.source)
        return found[0] if found else None

    def facts(self) -> dict[str, str]:
        """The numbers and strings that were read, by name, in the words of `explain()`."""
        found = {name: value for name, _, value in self._cells.values()}
        for entries in self.entries.values():
            found |= {f"{entries.path}.{n}" if entries.path else n: value for n, value in entries.values.items()}
        return {f"name {name}": repr(value) for name, value in found.items() if isinstance(value, SIMPLE)}


def _is_disjoint(view: Any, names: frozenset[str]) -> bool:
    return cast(bool, view.isdisjoint(names))


def _function_parts(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _attributes_of(value: Any) -> Any:
    return object.__getattribute__(value, "__dict__")
