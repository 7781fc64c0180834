"""What did a traced program read from outside of its arguments, and is all of it as it was?

1. While a program is traced, `admission` notes each place that the program may read, before it does: entries of a dict
   (global names, attributes of an object, a class or a Python module), the contents of a container, and single values
   (cells of closures, slots, functions' defaults).
2. `holds` compares them by identity, in a few passes in C; where something differs, one by one and by value: equal
   numbers of one type are the same, 1 and 1.0 are not, nor are -0.0 and 0.0.
3. What the program itself has changed is found by the same comparison, and `undo` puts it back.

Which code computes from its arguments alone, and which names does code read?

1. Code is of one of three origins. That of torch, of this package and of a few libraries is trusted; that of Python's
   standard library is allowed for some modules; all other code is the user's, and what it reads is noted.
2. C functions are allowed by list. One that is not known reads something else in each call, until somebody has looked.
3. What code may read is taken from its names. A name that a local has (`getattr(x, name)`) is read where it is used;
   where one is computed otherwise, all attributes of that object may be read, or of all objects where it is no local.
   In a Python that is not known nothing is traced.
"""

from __future__ import annotations

import abc
import builtins
import dis
import functools
import gc
import logging
import struct
import sys
import sysconfig
import warnings
from abc import ABCMeta
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import getcontext
from functools import lru_cache
from itertools import chain, pairwise
from operator import attrgetter, call, is_, itemgetter
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from shardwise._torch import autocast_device_types

SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
MISSING: Any = object()
_CONTENTS = attrgetter("cell_contents")
_BASES, _NAMES = attrgetter("__mro__"), attrgetter("__name__", "__qualname__")
_function_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")


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
    if kind is float:  # a nan is in a list only if it is the same object
        return one == one and struct.pack("d", one) == struct.pack("d", other)
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
        self._classes: dict[int, tuple[str, type, tuple[type, ...]]] = {}
        self._named: dict[int, tuple[str, Any, tuple[str, str]]] = {}
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

    def note_class(self, path: str, kind: type) -> None:
        """Note the bases of a class."""
        self._classes.setdefault(id(kind), (path, kind, kind.__mro__))

    def note_name(self, path: str, named: Any) -> None:
        """Note what a function or class is called."""
        self._named.setdefault(id(named), (path, named, _NAMES(named)))

    def note_value(self, source: str, read: Callable[[], Any], put: Callable[[Any], None] | None = None) -> Any:
        """Note what a function returns now, and return it."""
        before = read()
        self.values.append(Value(source, read, before, put))
        return before

    def note_mode(self, ask: Callable[[], Any]) -> None:
        """Note what a function of torch returns that takes no arguments: a flag or another mode."""
        if is_question(ask.__name__) and ask.__name__ not in _IN_KEYS:
            try:
                is_mode = type(ask()) in SIMPLE
            except (TypeError, RuntimeError):  # it has arguments
                return
            if is_mode:
                self.note_value(f"torch.{ask.__name__}()", ask)

    def note_log(self, log: Any, name: str, level: Any) -> None:
        """Note whether a logger writes what it is called with: its handlers may do anything."""
        level = _LEVELS.get(name, level)
        if isinstance(log, logging.Logger) and isinstance(level, int):
            self.note_value(f"what {log.name} logs", lambda: log.isEnabledFor(level))

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
        classes, bases = [c for _, c, _ in self._classes.values()], [mro for *_, mro in self._classes.values()]
        called, names = [one for _, one, _ in self._named.values()], [both for *_, both in self._named.values()]
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
            (classes, lambda: all(map(is_, map(_BASES, classes), bases))),
            (called, lambda: [*map(_NAMES, called)] == names),
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
        yield from (
            (f"the bases of {path}", kind, None)
            for path, kind, mro in self._classes.values()
            if _BASES(kind) is not mro
        )
        yield from (
            (f"the name of {path}", one, None) for path, one, both in self._named.values() if _NAMES(one) != both
        )
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


def _attributes_of(value: Any) -> Any:
    return object.__getattribute__(value, "__dict__")


KNOWN_PYTHONS = ((3, 11), (3, 12), (3, 13))


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


Origin: TypeAlias = Literal["user", "stdlib", "trusted"]
_PACKAGE = str(Path(__file__).parents[1])
_PATHS = sysconfig.get_paths()
_SITES = tuple({_PATHS["purelib"], _PATHS["platlib"]})
_STDLIB = tuple({_PATHS["stdlib"], _PATHS["platstdlib"]})
_TRUSTED_PACKAGES = words(  # torch, and what it calls itself
    """
    torch functorch torchgen numpy sympy mpmath networkx optree triton filelock fsspec jinja2 markupsafe
    packaging psutil setuptools typing_extensions yaml _distutils_hack _pytest pytest
    """
)


def _places_of_packages() -> Iterator[str]:
    """How the names of trusted files begin: where torch has found its packages, which need not be beside each other."""
    yield f"{_PACKAGE}/"
    for name in _TRUSTED_PACKAGES:
        yield from (f"{site}/{name}{end}" for site in _SITES for end in ("/", ".py"))
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield f"{Path(file).parent}/" if Path(file).stem == "__init__" else file


_TRUSTED = tuple(_places_of_packages())
PURE_STDLIB = words(
    """
    _collections_abc _weakrefset abc base64 bisect collections colorsys contextlib copy copyreg dataclasses enum
    fractions functools heapq importlib inspect itertools json keyword linecache logging math numbers operator
    os re reprlib statistics string textwrap tokenize traceback types typing warnings weakref
    """
)
OPAQUE_STDLIB = words("logging typing abc re warnings inspect weakref")
_IMPURE_STDLIB_CODE = words(
    """
    currentframe stack getouterframes getinnerframes getmembers trace import_module reload get_type_hints
    get_annotations signature isEnabledFor getEffectiveLevel hasHandlers
    """
)
_OS_CODE = words("getenv __getitem__ encode decode fspath get __contains__ __iter__ __len__ encodekey check_str")
_PURE_C_MODULES = words(
    """
    builtins math cmath _operator operator itertools _functools functools _collections collections _struct
    _bisect _heapq _abc _json _sre re _typing _warnings torch shardwise numpy _contextvars
    """
)
IMPURE_BUILTINS = words("input open exec eval compile globals locals print breakpoint __import__")
REFUSED_BUILTINS = IMPURE_BUILTINS - {"print", "breakpoint", "__import__", "globals", "locals"}
IMPURE_TRUSTED = words(
    """
    manual_seed seed initial_seed load save fork_rng get_rng_state set_rng_state set_default_dtype
    set_default_device set_default_tensor_type __array__ __dlpack__ storage untyped_storage typed_storage
    share_memory_ use_deterministic_algorithms set_printoptions get_printoptions geterr seterr getbufsize
    __repr__ __format__
    """
)
_IMPURE_TORCH = words(
    """
    seed initial_seed manual_seed load save get_rng_state set_rng_state from_file _cuda_getCurrentRawStream
    synchronize memory_allocated
    """
)
_PLAIN_TYPES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, bool, range, slice, type(None))
_READS_VALUES = words("numpy tolist data_ptr __array__ __dlpack__ untyped_storage __reduce_ex__")
_IMPURE_METHODS = _IMPURE_TORCH | words("cache_info cache_clear")
_SPECIAL_OF = (object, int, float, complex, str, list, tuple, dict, set, bytearray)
SPECIAL_METHODS = frozenset(n for kind in _SPECIAL_OF for n in dir(kind) if n[:2] == n[-2:] == "__") | words(
    """
    __getattr__ __missing__ __enter__ __exit__ __get__ __set__ __delete__ __call__ __fspath__ __length_hint__ __next__
    __matmul__ __rmatmul__ __imatmul__ __itruediv__ __ifloordiv__ __ipow__ __ilshift__ __irshift__ __bytes__ __del__
    """
)
PRISTINE = dict(vars(builtins))
_BY_NAME = words("getattr hasattr setattr delattr")
_COMPUTED = _BY_NAME | words(
    "vars dir __dict__ __getattribute__ attrgetter methodcaller format format_map __getstate__"
)
_REFLECTIVE = words(
    """
    is_leaf grad_fn _version retains_grad
    __globals__ __closure__ __defaults__ __kwdefaults__ cell_contents f_globals f_locals f_back gi_frame
    __subclasses__
    """
)
_OF_ITSELF = words("__dict__ __getattribute__")
_LOADS_LOCAL = words("LOAD_FAST LOAD_FAST_CHECK LOAD_DEREF")
_LOADS_ONE = words("LOAD_FAST LOAD_FAST_CHECK LOAD_DEREF LOAD_GLOBAL LOAD_NAME LOAD_CONST")


@lru_cache(maxsize=4096)
def origin_of(filename: str) -> Origin:
    """Whose code a file has.

    >>> origin_of(torch.__file__), origin_of(functools.__file__), origin_of("train.py")
    ('trusted', 'stdlib', 'user')
    """
    if filename.startswith(_TRUSTED):
        return "trusted"
    if filename.startswith(_SITES):
        return "user"
    return "stdlib" if filename.startswith((*_STDLIB, "<frozen ")) else "user"


def origin_of_module(name: object) -> Origin:
    """Whose code a Python module has."""
    if not isinstance(name, str):  # a class whose `__module__` is a descriptor
        return "user"
    module = sys.modules.get(name)
    root, filename = name.partition(".")[0], None if module is None else vars(module).get("__file__")
    if isinstance(filename, str):
        return origin_of(filename)
    if root.startswith("namedtuple_") or root in (*_TRUSTED_PACKAGES, "shardwise"):
        return "trusted"
    return "stdlib" if root in sys.stdlib_module_names else "user"


def origin_of_code(code: CodeType, module: str) -> Origin:
    """Whose code this is; that of no file, as dataclasses and torch make it, is that of its module."""
    filename = code.co_filename
    if filename.startswith("<") and not filename.startswith("<frozen "):
        return "trusted" if filename.startswith("<eval_with_key>") else origin_of_module(module)
    return origin_of(filename)


def is_allowed_stdlib(module: str, code: CodeType) -> bool:
    """Whether some code of the standard library computes from its arguments alone."""
    root = module.partition(".")[0]
    if root == "os":
        return code.co_name in _OS_CODE
    return root in PURE_STDLIB and code.co_name not in _IMPURE_STDLIB_CODE


def is_pure_builtin(function: Any) -> bool:
    """Whether a C function, or a method of a C object, computes from its arguments alone."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if owner is None and (kind := getattr(function, "__objclass__", None)) is not None:
        owner = kind
    if owner is None or isinstance(owner, ModuleType):
        module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
        root = str(module).partition(".")[0]
        if root == "builtins":
            return name not in IMPURE_BUILTINS
        if root == "sys":
            return name in ("exc_info", "getsizeof", "intern")
        is_impure = name == "copy_context" or (root == "torch" and name in _IMPURE_TORCH) or ".random" in str(module)
        return root in _PURE_C_MODULES and not is_impure
    if isinstance(owner, Tensor):
        return name not in _READS_VALUES
    lookup = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    module = next((kind.__module__ for kind in lookup if name in vars(kind)), type(owner).__module__)
    is_random = ".random" in module or isinstance(owner, torch.Generator)
    return module.partition(".")[0] in _PURE_C_MODULES and not is_random and name not in _IMPURE_METHODS


def is_python_class(kind: type) -> bool:
    """Whether a class is made by a `class` statement, not in C: a class made in C has methods or a `__new__` in C."""
    for value in vars(kind).values():
        if isinstance(value, MethodDescriptorType | WrapperDescriptorType) and value.__objclass__ is kind:
            return False
        if isinstance(value, BuiltinFunctionType) and value.__self__ is kind:
            return False
    return True


@dataclass(frozen=True)
class CodeNames:
    """What some code may read by name."""

    globals: frozenset[str]
    attributes: frozenset[str]
    loaded: frozenset[str]  # attributes that it may take without calling them at once
    imports: tuple[tuple[str, int], ...]
    nested: tuple[CodeType, ...]
    reads_all: bool  # whether it may read attributes by names that are not in it
    named_by: Mapping[int, str]  # the local that names an attribute, by the place of the call of `getattr` or another
    named_by_globals: frozenset[str]
    searched: frozenset[str]  # the locals of which attributes of other names are read
    itself: str | None  # the local with the object of which a method reads any attribute
    reflective: str | None

    def read_named(self, module: Mapping[str, Any]) -> tuple[frozenset[str], bool]:
        """The attributes, with those that globals name; and whether others may be read as well."""
        named = [module.get(name) for name in self.named_by_globals]
        found = frozenset(name for name in named if isinstance(name, str))
        return self.attributes | found, self.reads_all or not all(isinstance(name, str) for name in named)


@lru_cache(maxsize=8192)
def names_in(code: CodeType) -> CodeNames:
    """The names in some code; not those of functions inside it."""
    instructions = [*dis.get_instructions(code)]
    used, loaded = set[str](), set[str]()
    imports: list[tuple[str, int]] = []
    reads_all = any(i.opname == "MATCH_CLASS" for i in instructions)
    constants, by_globals, searched, named_by = set[str](), set[str](), set[str](), dict[int, str]()
    for at, each in enumerate(instructions):
        name = each.argval
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL", "DELETE_NAME"):
            used.add(name)
            if name in _BY_NAME:
                owner, named, call = _find_name(instructions[at + 1 :])
                if named is not None and named.opname == "LOAD_CONST" and isinstance(named.argval, str):
                    constants.add(named.argval)
                elif named is not None and call is not None and named.opname in _LOADS_LOCAL:
                    named_by[call] = named.argval
                elif named is not None and call is not None and named.opname == "LOAD_GLOBAL":
                    by_globals.add(named.argval)
                elif owner is not None:
                    searched.add(owner)
                else:
                    reads_all = True
        elif each.opcode in dis.hasname and each.opname.startswith("LOAD_"):
            if each.opname.startswith(("LOAD_FROM_DICT", "LOAD_CLASS")):
                used.add(name)
            if not _is_method_load(each):
                loaded.add(name)
        elif each.opname == "IMPORT_NAME":
            level = instructions[at - 2].argval if at >= 2 and isinstance(instructions[at - 2].argval, int) else 0
            imports.append((str(name), level))
    mentioned = frozenset(code.co_names)
    computed = _COMPUTED - _BY_NAME
    owners = {
        _find_owner(code, instructions, at)
        for at, i in enumerate(instructions)
        if i.opcode in dis.hasname and i.argval in _OF_ITSELF
    }
    itself = owners.pop() if len(owners) == 1 else None
    if itself is not None:
        computed -= _OF_ITSELF
    return CodeNames(
        frozenset(used),
        mentioned | constants,
        frozenset(loaded),
        tuple(imports),
        tuple(constant for constant in code.co_consts if isinstance(constant, CodeType)),
        reads_all or bool(mentioned & computed) or bool((mentioned - used) & _BY_NAME),
        named_by,
        frozenset(by_globals),
        frozenset(searched),
        itself,
        "type" if _compares_classes(instructions) else next(iter(sorted(mentioned & _REFLECTIVE)), None),
    )


def _compares_classes(instructions: list[dis.Instruction]) -> bool:
    """Whether code asks whether `type(x)` is that of tensors: those of a trace are of other classes."""
    for at, each in enumerate(instructions):
        if each.argval in ("type", "__class__") and each.opname.startswith("LOAD_"):
            near = instructions[at + 1 : at + 14]
            names_class = any(i.argval in ("Tensor", "Parameter") and i.opname.startswith("LOAD_") for i in near)
            if names_class and any(i.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP") for i in near):
                return True
    return False


def _is_method_load(instruction: dis.Instruction) -> bool:
    """Whether an attribute is taken to be called at once."""
    if instruction.opname == "LOAD_METHOD":
        return True
    is_flagged = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and instruction.arg is not None
    return is_flagged and bool((instruction.arg or 0) & 1)


def _find_owner(code: CodeType, instructions: list[dis.Instruction], at: int) -> str | None:
    """The local of which this is the `__dict__`, or `__getattribute__` by `super()` or `object`.

    None if it is neither the first argument nor a name of a function around this one.
    """
    before = [(i.opname, i.argval) for i in instructions[:at] if i.opname not in ("PRECALL", "PUSH_NULL")]
    after = next(((i.opname, i.argval) for i in instructions[at + 1 :] if i.opname != "PUSH_NULL"), None)
    first = code.co_varnames[:1] if code.co_argcount else ()
    found: tuple[str, Any] = "", None
    if instructions[at].argval == "__dict__" or instructions[at].opname == "LOAD_SUPER_ATTR":
        found = before[-1]
    elif before[-2:] == [("LOAD_GLOBAL", "super"), ("CALL", 0)]:
        found = "LOAD_FAST", first[0] if first else None
    elif before[-1] == ("LOAD_GLOBAL", "object") and after is not None:
        found = after
    is_set = any(i.opname.startswith(("STORE_FAST", "STORE_DEREF")) and i.argval == found[1] for i in instructions)
    known = found[0] in _LOADS_LOCAL and found[1] in (*first, *code.co_freevars) and not is_set
    return found[1] if known else None


def _find_name(after: list[dis.Instruction]) -> tuple[str | None, dis.Instruction | None, int | None]:
    """The arguments of `getattr(x, name)`, as they follow the name `getattr`: `x` if it is a local, and the name.

    None for a name that is more than one instruction; and the place of the call, if it follows at once.
    """
    found = iter([i for i in after if i.opname not in ("PUSH_NULL", "EXTENDED_ARG", "PRECALL")])
    first = next(found, None)
    if first is None or first.opname not in _LOADS_ONE:
        return None, None, None
    second = next(found, None)
    local = first.argval if first.opname in _LOADS_LOCAL and second and second.opname != "LOAD_ATTR" else None
    while second is not None and second.opname == "LOAD_ATTR":
        second = next(found, None)
    rest = next(found, None)
    call = next(found, None) if rest is not None and rest.opname in _LOADS_ONE else rest
    return local, second, call.offset if call is not None and call.opname == "CALL" else None


def has_code(value: Any, code: CodeType) -> bool:
    """Whether some code is that of a function, or of one inside of it."""
    own = value.__code__ if isinstance(value, FunctionType) else value
    return own is code or (isinstance(own, CodeType) and any(has_code(part, code) for part in own.co_consts))


def handles_signal(frame: FrameType) -> bool:
    """Whether a frame is a handler of a signal: it gets the frame that it interrupts."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_back is not None and any(frame.f_locals.get(name) is frame.f_back for name in names)


def find_importer(frame: FrameType) -> FrameType | None:
    """The frame whose import runs this one, the outermost where imports are nested, or None."""
    found, above, is_import = None, frame.f_back, False
    while above is not None:
        if above.f_code.co_filename.startswith("<frozen importlib"):
            is_import = True
        elif is_import:
            found, is_import = above, False
        above = above.f_back
    return found


def name_of(function: Any) -> str:
    """The name of a function of C, with that of what it belongs to."""
    owner = getattr(function, "__self__", None)
    kind = owner if isinstance(owner, ModuleType | type) else type(owner)
    where = "" if owner is None else f"{kind.__name__}."
    return where.removeprefix("builtins.") + str(getattr(function, "__name__", function))


def describe_kind(value: Any) -> str:
    """The kind of a value in words."""
    name = f"the module {value.__name__}" if isinstance(value, ModuleType) else type(value).__name__
    return name if isinstance(value, ModuleType) else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def line_of(code: CodeType, names: set[str]) -> int:
    """The line on which some code mentions one of these names, or its first."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if instruction.argval in names and isinstance(instruction.argval, str):
            return line
    return code.co_firstlineno


def results_of_cache(function: Any) -> tuple[dict[Any, Any], list[Any]] | None:
    """The dict of a function under `lru_cache`, and the results in it; None where they are not found.

    >>> results_of_cache(lru_cache(4)(int))
    ({}, [])
    """
    parts = gc.get_referents(function)
    place = next((i for i, part in enumerate(parts) if part is function.__wrapped__), 0)
    cache = parts[place - 1]
    if type(cache) is not dict:
        return None
    found = [*cache.values()]
    link = type(found[0]) if found else None
    if link is None or link.__name__ != "_lru_list_elem":
        return cache, found
    return cache, [part for part, after in pairwise(parts[:place]) if after is link]


_registry_of: Any = vars(abc)["_get_dump"]  # what `ABCMeta._dump_registry` prints


def registered_classes(kind: ABCMeta) -> tuple[int, ...]:
    """The classes that are registered as subclasses of an abstract one."""
    return tuple(sorted(id(reference()) for reference in _registry_of(kind)[0]))


def decimal_context() -> tuple[Any, ...]:
    """What operations on decimal numbers go by."""
    now = getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(map(torch.get_autocast_dtype, autocast_device_types))


_LEVELS = {"warn": 30, "exception": 40, "fatal": 50} | {
    name.lower(): level for name, level in logging.getLevelNamesMapping().items()
}
WRITES_LOGS = words("debug info warning warn error exception critical fatal log warn_explicit _showwarnmsg")
FLAGS_OF_TORCH = ("torch.backends", "torch.utils.deterministic")
_IN_KEYS = words(  # modes that are part of a kind's key
    """
    is_grad_enabled is_inference_mode_enabled get_default_dtype get_default_device are_deterministic_algorithms_enabled
    is_anomaly_enabled get_float32_matmul_precision get_num_threads is_compiling is_dynamo_compiling is_exporting
    """
)
READ_BY: dict[Any, tuple[str, Callable[[], Any]]] = {  # what functions of C read that is compared
    torch.get_autocast_dtype: ("the dtypes of autocast", _autocast_dtypes),
    warnings.warn: ("the filters of warnings", lambda: tuple(warnings.filters)),
}
NUMPY_READERS = ("random", "load", "loadtxt", "genfromtxt", "fromfile", "memmap", "save", "savez")
NUMPY_CONSTANTS = words("_ArrayFunctionDispatcher _NoValueType ufunc")
_OF_FUNCTIONS = words("__name__ __qualname__ __doc__ __annotations__ __module__")
FUNCTION_METADATA = {name: vars(FunctionType)[name] for name in _OF_FUNCTIONS}
CLASS_METADATA = {n: vars(type)[n] for n in words("__name__ __qualname__")}
LRU_CACHE: Any = functools._lru_cache_wrapper
PLAIN_TYPES = _PLAIN_TYPES


def attributes_of(value: Any) -> Any:
    """The dict of an object, or None."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def describe_plain(tensor: Tensor) -> tuple[Any, ...]:
    """What a program may ask a plain tensor besides its values."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    has_gradient = tensor.is_leaf and tensor.grad is not None
    is_plain = tensor.is_inference(), tensor.is_conj(), tensor.is_neg(), has_gradient
    return tensor.shape, tensor.dtype, strides, str(tensor.device), tensor.requires_grad, *is_plain


def value_of(variable: ContextVar[Any]) -> Any:
    """What a context variable has, or its default, or `MISSING`."""
    try:
        return variable.get()  # its default, where it has one
    except LookupError:
        return MISSING


def put_into(held: dict[str, Any]) -> Callable[[str, Any], None]:
    """A function that sets an entry of a dict, or removes it."""

    def put(name: str, value: Any) -> None:
        if value is MISSING:
            held.pop(name, None)
        else:
            held[name] = value

    return put


def put_in_class(kind: type, name: str, value: Any) -> None:
    """Set an attribute of a class, or remove it."""
    if value is MISSING:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


def reads_a_mode(code: CodeType) -> bool:
    """Whether code of a trusted library is a function without arguments that asks for something.

    >>> reads_a_mode(torch.is_warn_always_enabled.__code__), reads_a_mode(torch.is_tensor.__code__)
    (True, False)
    """
    has_none = code.co_argcount + code.co_kwonlyargcount == 0 and not code.co_flags & 0b101100 and not code.co_freevars
    return has_none and is_question(code.co_name)


def is_question(name: str) -> bool:
    """Whether a function is called as one that asks for something."""
    return name.lstrip("_").startswith(("is_", "are_", "get_"))
