"""What enters a traced program from outside: each value passes `Admission`, which notes how to compare it, or refuses.

1. A profile function sees each frame of Python before its first instruction, and each call of C. For a frame of the
   user's code the global names, cells, defaults and imports that its code mentions are admitted. Mentioned is read.
2. An object that is admitted is looked at for all attributes that any code which ran has mentioned, on the object, its
   class and its bases; a container is admitted with all of its entries, however many and deep (10,000 in all).
3. A value of a kind that changes by being used (an iterator, a generator of random numbers, a file), an object that C
   code has made, or a C function that is not known to compute from its arguments alone is refused before it is used.
4. Modules, optimizers and ShardedTensors are state. Where one appears that the trace does not know, the trace is given
   up and begins again with it. `predict_state` finds most of them beforehand: it admits what is mentioned, without
   running anything, and refuses nothing.
5. Code that runs beside the program is not part of it. Garbage is not collected during a trace, so that callbacks of
   `gc`, finalizers and weak references of what others left wait for its end; handlers of signals run as they are, as
   does what writes logs and warnings, which returns nothing.
"""

from __future__ import annotations

import builtins
import functools
import logging
import sys
from abc import ABCMeta
from array import array
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from operator import attrgetter, itemgetter, methodcaller
from os import environ, getenv
from pathlib import Path, PurePath
from re import Pattern
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._lazy import collector_paused
from shardwise.comm.stand_in import NotTraceableError, StandInComm
from shardwise.compiler.reads import (
    CLASS_METADATA,
    FLAGS_OF_TORCH,
    FUNCTION_METADATA,
    IMPURE_TRUSTED,
    KNOWN_PYTHONS,
    LRU_CACHE,
    MISSING,
    NUMPY_CONSTANTS,
    NUMPY_READERS,
    OPAQUE_STDLIB,
    PLAIN_TYPES,
    PRISTINE,
    READ_BY,
    REFUSED_BUILTINS,
    SIMPLE,
    SPECIAL_METHODS,
    WRITES_LOGS,
    CodeNames,
    Entries,
    Reads,
    attributes_of,
    decimal_context,
    describe_kind,
    describe_plain,
    find_importer,
    handles_signal,
    has_code,
    is_allowed_stdlib,
    is_pure_builtin,
    is_python_class,
    line_of,
    name_of,
    names_in,
    origin_of,
    origin_of_code,
    origin_of_module,
    put_in_class,
    put_into,
    reads_a_mode,
    registered_classes,
    results_of_cache,
    value_of,
    words,
)
from shardwise.tensor.sharded_tensor import ShardedTensor

MOST_ENTRIES, MOST_BYTES = 10_000, 64 << 10
PLAIN_TENSOR = "it uses a plain tensor that is neither an argument nor a parameter or buffer; pass it as an argument"
NOT_YET = "which the next call may find done"
_ALLOWED_BASES = {
    *PLAIN_TYPES,
    object,
    deque,
    OrderedDict,
    defaultdict,
    type,
    SimpleNamespace,
    BaseException,
    Exception,
}
_C_CALLABLES = (BuiltinFunctionType, MethodWrapperType, MethodDescriptorType, WrapperDescriptorType)
_TUPLE_FIELD: type = type(namedtuple("_Pair", "first").first)  # type: ignore[attr-defined]  # made in C
_UNCHANGING = (
    _TUPLE_FIELD,
    torch.layout,
    torch.memory_format,
    torch.finfo,
    torch.iinfo,
    Decimal,
    date,
    time,
    timedelta,
    tzinfo,
    Pattern,
    PurePath,
    GenericAlias,
    UnionType,
    np.dtype,
    np.ufunc,
)
_FOLLOWED_TORCH = ("torch.optim.", "torch.amp.", "torch.cuda.amp.")  # schedulers and scalers: they change as they run
_REFUSED_TORCH = ("torch.utils.data", "torch.random")
_OWN_STATE = frozenset(("state", "param_groups", "defaults"))  # of optimizers, watched where the state is
_OWN_FIELDS = frozenset(("sharding", "local_parts", "comm"))  # of a ShardedTensor, as `_` and what follows
_IMPLICIT = frozenset(("forward", "__call__"))
_NOT_READ = words(
    """
    __module__ __doc__ __dict__ __weakref__ __qualname__ __annotations__ __static_attributes__ __firstlineno__
    __orig_bases__ __parameters__ __annotate_func__ __annotations_cache__ _abc_impl
    """
)


class Refusal(BaseException):
    """Stops a trace before something is used that a graph cannot compare; no program catches it as an error."""


class NewState(BaseException):
    """Stops a trace: the program uses a module, an optimizer or a ShardedTensor that was not known."""


@dataclass(eq=False)
class _Holder:
    """An object, class or Python module whose attributes are admitted as they are mentioned."""

    path: str
    entries: Entries
    is_lenient: bool = False
    is_of_library: bool = False  # a Python module of the standard library: what the user's code mentions is read
    is_trusted: bool = False  # of torch: what is there is compared, what is not there is not looked for
    skips: frozenset[str] = frozenset()
    slots: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None  # as slots, but read only where they are mentioned
    owner: Any = None


class Admission:
    """Notes all that a program reads; of what it cannot compare it raises a `Refusal`, unless it only predicts."""

    def __init__(self, modules: Iterable[nn.Module], known: Iterable[object], *, predicts: bool = False) -> None:
        self.reads = Reads()
        self.refused: str | None = None
        self.found: list[object] = []  # state that was not known
        self._predicts = predicts
        self._known = {id(value): value for value in known}
        self._seen: dict[int, object] = {}
        self._queue: list[tuple[Any, str, bool]] = []
        self._names: set[str] = set(_IMPLICIT)
        self._user_names: set[str] = set()
        self._loaded: set[str] = set()
        self._searched: set[type] = set()  # classes of objects whose methods ask them for any attribute
        self._missing: set[str] = set()  # modules that are not imported yet
        self._reads_all = False
        self._holders: list[_Holder] = []
        self._functions: dict[CodeType, list[tuple[FunctionType, str]]] = {}
        self._active: dict[CodeType, set[int]] = {}
        self._nested: set[CodeType] = set()
        self._drains = False
        self._entry_count = 0
        self._at: tuple[CodeType, int | None] | None = None
        self._calls: dict[Any, bool] = {}
        self._beside: FrameType | None = None
        for module in modules:
            self._seen[id(module)] = module
            self._add_module(module)
        self._drain()

    # Frames

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See each frame and each call of C on this thread inside a `with` block."""
        if sys.version_info[:2] not in KNOWN_PYTHONS or sys.implementation.name != "cpython":
            raise NotTraceableError(
                f"what code reads is not known for Python {sys.version_info[0]}.{sys.version_info[1]}"
            )
        before = sys.getprofile()
        profile = self._profile  # kept: CPython calls it once more where a callback of `gc` made it raise
        with collector_paused():
            sys.setprofile(profile)
            try:
                yield
            finally:
                sys.setprofile(before)
        self.check()

    def mentions(self, name: str) -> bool:
        """Whether code that ran may have read an attribute of this name."""
        return name in self._names or self._reads_all

    def check(self) -> None:
        """Raise a refusal again that the program caught."""
        if self.refused is None and (late := sorted(self._missing & sys.modules.keys())):
            self._refuse(f"it imports {late[0]}, {NOT_YET}")
        if self.refused is not None:
            raise Refusal(self.refused)
        if self.found:
            raise NewState

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._beside is not None:
            if event == "return" and frame is self._beside:
                self._beside = None
        elif event == "call":
            code = frame.f_code
            seen = self._active.get(code)
            if seen is not None and (not seen or id(frame.f_globals) in seen):
                return
            self._enter(frame, code)
        elif event == "c_call" and self._active.get(frame.f_code):
            self._check_c_call(frame, argument)

    def _enter(self, frame: FrameType, code: CodeType) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        origin = origin_of_code(code, module)
        if origin == "stdlib" and module in ("logging", "warnings") and code.co_name in WRITES_LOGS:
            self._beside = frame
            if module == "logging" and self._is_called_directly(frame):
                self.reads.note_log(frame.f_locals.get("self", logging.root), code.co_name, frame.f_locals.get("level"))
        elif origin == "stdlib":
            caller: FrameType | None = frame
            while caller is not None and origin_of(caller.f_code.co_filename) == "stdlib":
                caller = caller.f_back
            if caller is not None and self._active.get(caller.f_code):  # of the user's, not of a trusted library
                self._at = caller.f_code, caller.f_lineno
                self._enter_stdlib(frame, code)
        elif origin == "trusted":
            is_pure = code.co_name not in IMPURE_TRUSTED and not module.startswith(FLAGS_OF_TORCH)
            if is_pure and not reads_a_mode(code):
                self._active[code] = set()
            elif self._is_called_directly(frame):
                if is_pure:
                    return self.reads.note_mode(FunctionType(code, frame.f_globals))
                self._refuse(f"it calls {code.co_name}, which a graph would not do again")
        else:
            self._at = (frame.f_back.f_code, frame.f_back.f_lineno) if frame.f_back is not None else (code, None)
            if not self._is_known(code) and (importer := find_importer(frame)) is not None:
                if origin_of(importer.f_code.co_filename) == "user":
                    self._at = importer.f_code, importer.f_lineno
                    self._refuse(f"it imports a module, {NOT_YET}")
                self._active[code] = set()
                return
            if not self._is_known(code):
                first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
                kind = first if isinstance(first, type) else type(first)
                self.admit(kind, kind.__qualname__)
                self._drain()
            if not self._is_known(code):
                if handles_signal(frame):
                    self._beside = frame
                    return
                caller = frame.f_back
                if code.co_filename.startswith("<") and caller is not None and not self._active.get(caller.f_code):
                    self._active[code] = set()  # code that torch has made
                    return
                name = code.co_qualname
                self._refuse(f"it calls {name}, which is reached in a way that cannot be compared between calls")
            self._activate(code, frame.f_globals, code.co_name)
            if (itself := names_in(code).itself) is not None:
                self._search(code, frame.f_locals[itself])

    def _is_called_directly(self, frame: FrameType) -> bool:
        """Whether the user's code has called this function of torch, not torch itself."""
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name in ("inner", "wrapper", "_fn", "fn"):  # what decorates it
            caller = caller.f_back
        if caller is None or not self._active.get(caller.f_code):
            return False
        self._at = caller.f_code, caller.f_lineno
        return True

    def _is_known(self, code: CodeType) -> bool:
        return code in self._functions or code in self._nested

    def _enter_stdlib(self, frame: FrameType, code: CodeType) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if code.co_name == "_find_and_load":
            self._refuse(f"it imports {frame.f_locals.get('name')}, {NOT_YET}")
        if not is_allowed_stdlib(module, code):
            self._refuse(f"it calls {module}.{code.co_qualname}, which may give something else in each call")
        if module == "os":
            self._admit_environment()
        self._active[code] = set()
        if module == "typing" and code.co_name in ("__instancecheck__", "_proto_hook"):  # of protocols
            self._mention(frozenset(), True)
        if module.partition(".")[0] not in OPAQUE_STDLIB:
            names = names_in(code)
            held = frame.f_globals
            for _ in self.reads.entries_of(held, module, held, put_into(held)).ask(names.globals):
                pass  # what is compared: functions of the standard library may be replaced
            asked, unknown = names.read_named(held)
            self._mention(asked, unknown or module == "copy", is_stdlib=True)
            self._drain()

    def _check_c_call(self, frame: FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if owner is builtins and name in _NAMES_OF_BUILTINS:
            self._read_computed(names_in(frame.f_code), frame)
        key = function if owner is None or isinstance(owner, ModuleType | type) else (type(owner), name)
        pure = self._calls.get(key)
        if pure is None:
            pure = self._calls[key] = is_pure_builtin(function)
        if owner is None or isinstance(owner, ModuleType):
            read = READ_BY.get(function)
            if read is not None:
                self.reads.note_value(*read)
            elif str(getattr(function, "__module__", None) or getattr(owner, "__name__", "")).startswith("torch"):
                self.reads.note_mode(function)
        if not pure:
            self._at = frame.f_code, frame.f_lineno
            self._refuse(f"it calls {name_of(function)}, which a graph would not do again")

    def _read_computed(self, names: CodeNames, frame: FrameType) -> None:
        """Admit what a call of `getattr` or another reads whose name the code does not say."""
        local = names.named_by.get(frame.f_lasti)
        if local is not None and isinstance(asked := frame.f_locals.get(local), str):
            self._mention(frozenset((asked,)), False)
        for value in [frame.f_locals.get(searched) for searched in names.searched] if local is None else ():
            self._mention(frozenset(), isinstance(value, Tensor))
            self._read_whole(value, value if isinstance(value, type) else type(value))
        self._drain()

    def _read_whole(self, value: Any, kind: type) -> None:
        """Admit all attributes of an object and of its class."""
        self.admit(kind, kind.__qualname__)
        self._drain()
        owners = {id(value), *map(id, kind.__mro__)}
        for holder in [holder for holder in self._holders if id(holder.owner) in owners]:
            self._extend(holder, None)

    def _search(self, code: CodeType, value: Any) -> None:
        """Admit all attributes of the objects of a class: a method of it asks them for any."""
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        found = next((kind for kind in kinds if any(has_code(v, code) for v in vars(kind).values())), None)
        if found is None:  # a method that something wraps
            return self._mention(frozenset(), True)
        self._searched.add(found)
        for holder in [h for h in self._holders if h.owner in found.__mro__ or found in type(h.owner).__mro__]:
            self._extend(holder, None)
        self._drain()

    def _activate(self, code: CodeType, module: dict[str, Any], path: str) -> None:
        """Admit what code reads that begins to run, and the parts of all functions that have it."""
        if id(module) in self._active.setdefault(code, set()):
            return
        self._active[code].add(id(module))
        if not self._predicts:
            self._at = code, None
        names = names_in(code)
        if names.reflective is not None:
            self._refuse(f"it reads {names.reflective}, which cannot be compared between calls", {names.reflective})
        self._nested.update(names.nested)
        self._loaded |= names.loaded
        self._read_globals(module, names.globals)
        for name, level in names.imports:
            self._admit_import(name, level, module)
        for function, where in self._functions.get(code, ()):
            self._add_parts(function, where)
        self._mention(*names.read_named(module))
        self._drain()

    def _read_globals(self, module: dict[str, Any], names: frozenset[str]) -> None:
        entries = self.reads.entries_of(module, "", module, put_into(module))
        for name, value in entries.ask(names):
            self.admit(value, name)
        own = vars(builtins)
        inherited = {name for name in names if name not in module}
        for name, value in self.reads.entries_of(own, "", own, put_into(own)).ask(inherited):
            self.admit(value, name)

    def _admit_import(self, name: str, level: int, module: dict[str, Any]) -> None:
        if level:
            package = str(module.get("__package__") or "").split(".")
            name = ".".join([*package[: len(package) - level + 1], *([name] if name else [])])
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            part = ".".join(parts[:count])
            if origin_of_module(part) == "trusted":
                continue
            if part not in sys.modules:
                self._missing.add(part)  # refused where it is imported: this line may not run
                break
            asked = () if self._predicts else [part]
            for _, value in self.reads.entries_of(sys.modules, "sys.modules", sys.modules, _ignore).ask(asked):
                self.admit(value, part)

    def _mention(self, names: frozenset[str], reads_all: bool, *, is_stdlib: bool = False) -> None:
        """From now on these attributes of all objects are read."""
        new = names - self._names
        turns = reads_all and not self._reads_all
        if not is_stdlib and (own := names - self._user_names):
            self._user_names |= own
            for holder in [holder for holder in self._holders if holder.is_of_library]:
                self._extend(holder, own)
        if not new and not turns:
            return
        self._names |= new
        self._reads_all |= turns
        if "__code__" in new:  # of whichever function: a code object itself never changes
            for function, path in [pair for pairs in self._functions.values() for pair in pairs]:
                self.reads.note_function(path, function)
        for holder in [holder for holder in self._holders if not holder.is_of_library]:
            self._extend(holder, None if self._reads_all else new)

    def _extend(self, holder: _Holder, new: Iterable[str] | None) -> None:
        """Admit attributes of a holder; None is all of them."""
        entries, is_whole = holder.entries, new is None
        if new is None:
            entries.is_whole = not (holder.skips or holder.is_of_library)
            new = [name for name in entries.held if isinstance(name, str)]
        new = [name for name in new if name in entries.held] if holder.is_trusted else [*new]
        skips = _NOT_READ if isinstance(holder.owner, type | ModuleType) else ()
        for name, value in entries.ask(name for name in new if name not in holder.skips):
            if name in skips:
                continue
            self._admit_attribute(value, f"{holder.path}.{name}" if holder.path else name, name, holder)
        for name in [name for name in holder.metadata or () if name in new and holder.metadata is not None]:
            self._admit_metadata(holder, name)
        for name in holder.slots or ():
            if (is_whole or name in new) and holder.slots is not None and holder.slots[name] is not None:
                member, holder.slots[name] = holder.slots[name], None
                self._admit_slot(holder, name, member)

    def _admit_attribute(self, value: Any, path: str, name: str, holder: _Holder) -> None:
        owner = holder.owner
        if isinstance(value, MemberDescriptorType | GetSetDescriptorType):
            return  # what an object has there is read from the object
        is_own = isinstance(value, FunctionType) and origin_of(value.__code__.co_filename) == "user"
        if holder.is_trusted and not is_own and not isinstance(value, ModuleType):
            return
        if owner is np:
            return self._refuse_value(value, path)
        if holder.is_of_library and not holder.is_trusted:
            if value is sys.modules:
                return self._refuse_value(value, path)
            if isinstance(value, FunctionType | type | MethodType):
                if value is getenv:
                    self._admit_environment()
                return  # its frames are seen
            if isinstance(value, BuiltinFunctionType) and name not in self._loaded:
                return  # it is called at once, which is seen
        if isinstance(owner, type) and isinstance(value, FunctionType) and not self._predicts:
            self._register(value, path)
            return
        self.admit(value, path, is_lenient=holder.is_lenient)

    def _admit_metadata(self, holder: _Holder, name: str) -> None:
        """Admit what a function or class is called, or another attribute of it that is not in its dict."""
        if name in ("__name__", "__qualname__"):
            self.reads.note_name(holder.path, holder.owner)
        elif holder.metadata is not None and (member := holder.metadata.get(name)) is not None:
            self._admit_slot(holder, name, member)

    def _admit_slot(self, holder: _Holder, name: str, member: Any) -> None:
        owner, kind = holder.owner, type(holder.owner)

        def read() -> Any:
            try:
                return member.__get__(owner, kind)
            except AttributeError:
                return MISSING

        def put(value: Any) -> None:
            member.__delete__(owner) if value is MISSING else member.__set__(owner, value)

        value = self.reads.note_value(f"{holder.path}.{name}", read, put)
        if value is not MISSING:
            self.admit(value, f"{holder.path}.{name}")

    # Values

    def admit(self, value: Any, path: str, *, is_lenient: bool = False) -> None:
        """Note how a value from outside is compared, with all that is read behind it, or refuse it."""
        if type(value) in SIMPLE or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        self._queue.append((value, path, is_lenient))

    def admit_target(self, target: Any) -> None:
        """Admit the program itself, with what it wraps."""
        self.admit(target, getattr(target, "__name__", type(target).__name__))
        self._drain()

    def admit_classes(self, value: Any) -> None:
        """Admit the classes of objects that are taken apart into tensors and numbers."""
        queue, seen = [value], set[int]()
        while queue:
            value = queue.pop()
            if isinstance(value, (*SIMPLE, Tensor)) or id(value) in seen:
                continue
            seen.add(id(value))
            self.admit(type(value), type(value).__qualname__)
            queue += (
                [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, list | tuple) else []
            )
            queue += [*(attributes_of(value) or {}).values()]

    def _drain(self) -> None:
        if self._drains:
            return
        self._drains = True
        try:
            while self._queue:
                self._admit_one(*self._queue.pop())
        finally:
            self._drains = False
        if self.found and not self._predicts:
            raise NewState

    def _admit_one(self, value: Any, path: str, is_lenient: bool) -> None:
        if isinstance(value, Tensor | nn.Module | torch.optim.Optimizer):
            self._admit_state(value, path, is_lenient)
        elif isinstance(value, type):
            self._add_class(value, path)
        elif isinstance(value, ModuleType):
            self._add_python_module(value, path)
        elif callable(value) and self._admit_callable(value, path, is_lenient):
            return
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            self._register(value, path)
        elif isinstance(value, np.ndarray | np.generic | array | bytearray):
            self._admit_array(value, path)
        elif isinstance(value, (*PLAIN_TYPES, deque, MappingProxyType)):
            self._admit_plain(value, path, is_lenient)
        elif isinstance(value, ContextVar):
            self.admit(self.reads.note_value(path, lambda: value_of(value)), path)
        elif value is environ:
            self._admit_environment()
        elif isinstance(value, Decimal):
            self.reads.note_value("the context of decimal numbers", decimal_context)
        elif value is Ellipsis or value is NotImplemented or isinstance(value, _UNCHANGING):
            return
        else:
            self._admit_object(value, path, is_lenient)

    def _admit_state(self, value: Any, path: str, is_lenient: bool) -> None:
        if id(value) in self._known:
            if isinstance(value, torch.optim.Optimizer):
                self._add_holder(value, path, vars(value), skips=_OWN_STATE)
            elif isinstance(value, Tensor):
                self._add_holder(value, path, vars(value), skips=_OWN_FIELDS | {n for n in vars(value) if n[0] == "_"})
            return
        if isinstance(value, Tensor) and not isinstance(value, ShardedTensor):
            if not self._predicts:  # a trace that uses it, besides these, fails
                self.reads.note_value(f"the layout of {path}", lambda: describe_plain(value))
                self._add_holder(value, path, value.__dict__)
            return
        if isinstance(value, ShardedTensor) and isinstance(value.comm, StandInComm) and value.comm.is_traced:
            self._refuse(f"it keeps a tensor in {path}, which a graph would not do again")
        self.found.append(value)
        if self._predicts:
            for module in value.modules() if isinstance(value, nn.Module) else ():
                self._seen[id(module)] = module
                self._add_module(module)
            if isinstance(value, torch.optim.Optimizer):
                self._add_holder(value, path, vars(value), skips=_OWN_STATE)

    def _add_module(self, module: nn.Module) -> None:
        path = type(module).__name__
        self.admit(type(module), path)
        entries = Entries(path, module, vars(module), _ignore)  # compared with all that modules have, in `guards`
        self._holders.append(_Holder(path, entries, skips=_MODULE_ATTRIBUTES, owner=module))
        is_whole = self._reads_all or not self._searched.isdisjoint(type(module).__mro__)
        self._extend(self._holders[-1], None if is_whole else self._names)
        for held in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            for hook in held.values():
                self.admit(hook, f"a hook of {path}")

    def _admit_callable(self, value: Any, path: str, is_lenient: bool) -> bool:
        """Admit a function or another thing that is called; whether it was one of a known kind."""
        if isinstance(value, FunctionType):
            self._register(value, path)
            if self._predicts and origin_of(value.__code__.co_filename) == "user":
                self._activate(value.__code__, value.__globals__, path)
            if value.__dict__ or origin_of(value.__code__.co_filename) == "user":
                self._add_holder(value, path, value.__dict__, metadata=FUNCTION_METADATA)
        elif isinstance(value, MethodType):
            self.admit(value.__self__, path.rpartition(".")[0] or type(value.__self__).__name__, is_lenient=is_lenient)
            self.admit(value.__func__, path, is_lenient=is_lenient)
        elif isinstance(value, functools.partial):
            self.reads.note_value(path, lambda: (value.func, *value.args))
            self._add_holder(value, path, value.__dict__)
            for part in (value.func, value.args, value.keywords):
                self.admit(part, path, is_lenient=is_lenient)
        elif isinstance(value, LRU_CACHE):
            # Each miss makes a new entry: that of a value which was computed again is another object.
            found = results_of_cache(value)
            if found is None or len(found[1]) > MOST_ENTRIES:
                self._refuse_value(value, path)
                return True
            cache, results = found
            self.reads.note_value(  # a cache that is full takes entries again, but not without a miss
                f"the cache of {path}",
                lambda: (value.cache_info().misses, *cache.values()),
                lambda _: value.cache_clear(),
            )
            for result in results:
                self.admit(result, f"what {path} has cached")
            self._register(value.__wrapped__, path)
        elif isinstance(value, attrgetter | methodcaller | itemgetter):
            self._mention(frozenset(), not isinstance(value, itemgetter))
        elif isinstance(value, _C_CALLABLES):
            self._admit_c_callable(value, path)
        else:
            return False
        return True

    def _admit_c_callable(self, value: Any, path: str) -> None:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType | type):
            self.admit(owner, path)
        if value in _NAMED_BUILTINS:
            self._mention(frozenset(), True) if path not in _NAMES_OF_BUILTINS else None
        elif not is_pure_builtin(value) and (PRISTINE.get(path) is not value or path in REFUSED_BUILTINS):
            self._refuse_value(value, path)

    def _admit_plain(self, value: Any, path: str, is_lenient: bool) -> None:
        if isinstance(value, slice):
            parts: Iterable[Any] = (value.start, value.stop, value.step)
        elif isinstance(value, MappingProxyType):
            self.reads.note_value(path, lambda: (*value, *value.values()))
            parts = [*value, *value.values()]
        elif isinstance(value, list | tuple | dict | set | frozenset | deque):
            if type(value).__iter__ not in _OWN_ITERATORS and not isinstance(value, dict):
                self._refuse_value(value, path)
            if not isinstance(value, tuple | frozenset):
                self.reads.note_contents(path, value)
            parts = [*value, *value.values()] if isinstance(value, dict) else [*value]
            self._entry_count += len(parts)
            if self._entry_count > MOST_ENTRIES and not self._predicts:
                self._refuse(f"it reads containers of more than {MOST_ENTRIES} entries in all", _words(path))
        else:
            parts = ()
        for part in parts:
            self.admit(part, f"an entry of {path}", is_lenient=is_lenient)
        if isinstance(value, defaultdict):
            self.admit(value.default_factory, path)
        if type(value) not in (*PLAIN_TYPES, deque, MappingProxyType, OrderedDict, defaultdict, torch.Size):
            self._admit_object(value, path, is_lenient)

    def _admit_array(self, value: Any, path: str) -> None:
        size = value.nbytes if isinstance(value, np.ndarray | np.generic) else memoryview(value).nbytes
        if size > MOST_BYTES or (
            isinstance(value, np.ndarray) and (value.dtype.hasobject or type(value) is not np.ndarray)
        ):
            return self._refuse(f"it reads {path}, an array of {size} bytes; pass it as an argument", _words(path))
        if isinstance(value, np.ndarray):
            kept = value.copy()
            self.reads.note_value(
                f"what is in {path}",
                lambda: (value.dtype.str, value.shape, value.tobytes()),
                lambda _: np.copyto(value, kept),
            )
        elif not isinstance(value, np.generic):
            self.reads.note_value(f"what is in {path}", lambda: bytes(value))

    def _admit_environment(self) -> None:
        self.admit(environ._data, "os.environ")  # type: ignore[attr-defined]  # the dict that it encodes

    def _admit_object(self, value: Any, path: str, is_lenient: bool) -> None:
        """Admit an instance of a class by its attributes."""
        kind = type(value)
        module = f"{kind.__module__}."
        if module.startswith("shardwise."):
            for name in ("_target", "_uses"):  # of a compiled program
                self.admit(getattr(value, "__dict__", {}).get(name), path)
        elif module.startswith("torch."):
            if isinstance(value, torch.Generator) or module.startswith(_REFUSED_TORCH):
                self._refuse_value(value, path)
            elif module.startswith(_FOLLOWED_TORCH):
                self._add_holder(value, path, vars(value), is_whole=True, is_lenient=True)
        elif module.startswith("numpy."):
            self._refuse_value(value, path) if kind.__name__ not in NUMPY_CONSTANTS else None
        elif module == "weakref.":
            self._refuse_value(value, path)
        elif module.partition(".")[0] in OPAQUE_STDLIB:
            if isinstance(value, logging.Logger):
                self._add_holder(value, path, vars(value), is_of_library=True)
        elif not is_lenient or hasattr(value, "__dict__"):
            outside = [base for base in kind.__mro__ if base not in _ALLOWED_BASES and not is_python_class(base)]
            if any(not _is_exception(base) for base in outside):
                if not is_lenient:
                    self._refuse_value(value, path)
                return
            self._add_class(kind, kind.__qualname__)
            is_whole = isinstance(value, Enum) or _is_stdlib(kind)
            slots = {
                n: m for base in kind.__mro__ for n, m in vars(base).items() if isinstance(m, MemberDescriptorType)
            }
            held = attributes_of(value)
            self.reads.note_object(path, value, held)
            self._add_holder(
                value, path, {} if held is None else held, is_whole=is_whole, slots=slots, is_lenient=is_lenient
            )

    # Holders and functions

    def _add_holder(
        self,
        owner: Any,
        path: str,
        held: Any,
        *,
        is_whole: bool = False,
        put: Callable[[str, Any], None] | None = None,
        **options: Any,
    ) -> None:
        entries = self.reads.entries_of(owner, path, held, put or put_into(held))
        is_whole |= not self._searched.isdisjoint(type(owner).__mro__)
        holder = _Holder(path, entries, owner=owner, **options)
        self._holders.append(holder)
        names = self._user_names if holder.is_of_library else self._names
        self._extend(holder, None if is_whole or (self._reads_all and not holder.is_of_library) else names)

    def _add_class(self, kind: type, path: str) -> None:
        meta = type(kind)
        for member in kind.__members__.values() if issubclass(kind, Enum) else ():
            self.admit(member, f"{path}.{member.name}")
        if meta is not type and not _is_stdlib(meta):
            self.admit(meta, meta.__qualname__)
        if isinstance(kind, ABCMeta) and not _is_stdlib(kind):
            self.reads.note_value(f"the classes registered for {path}", lambda: registered_classes(kind))
        for base in kind.__mro__:
            name = base.__qualname__
            if origin_of_module(base.__module__) == "trusted":
                if "forward" in vars(base) and (base is kind or id(base) not in self._seen):
                    self._seen[id(base)] = base
                    entries = self.reads.entries_of(base, name, vars(base), _ignore)
                    for part, value in entries.ask(["forward"]):
                        self._register(value, f"{name}.{part}")
                continue
            if (id(base) in self._seen and base is not kind) or not is_python_class(base) or _is_stdlib(base):
                continue
            self._seen[id(base)] = base
            for part, value in vars(base).items():
                self._register(value, f"{name}.{part}")
                made = value.__func__ if isinstance(value, staticmethod) else value
                if isinstance(made, FunctionType) and made.__code__.co_filename.startswith("<"):
                    self.reads.note_function(f"{name}.{part}", made)  # of a namedtuple: no frame of the user's
            self.reads.note_class(name, base)
            put = functools.partial(put_in_class, base)
            self._add_holder(base, name, vars(base), put=put, metadata=CLASS_METADATA)
            implicit = {n for n in vars(base) if n.startswith("__") and n.endswith("__")} | SPECIAL_METHODS
            self._extend(self._holders[-1], sorted(implicit - _NOT_READ))
        if not self._searched.isdisjoint(kind.__mro__):
            self._read_whole(kind, kind)

    def _add_python_module(self, module: ModuleType, path: str) -> None:
        if module.__name__ == "numpy.random":
            self._refuse_value(module, path)
        elif module is np:
            held = {name: vars(np)[name] for name in NUMPY_READERS}
            self._add_holder(module, path, held, is_of_library=True)
        elif module.__name__.startswith(
            "torch"
        ):  # its own functions are trusted; another one may be put in their place
            self._add_holder(module, path, vars(module), is_of_library=True, is_trusted=True)
        elif (origin := origin_of_module(module.__name__)) == "user" or (origin == "stdlib" and not self._predicts):
            if origin == "user":
                self.reads.note_object(path, module, None)
            self._add_holder(module, path, vars(module), is_of_library=origin == "stdlib")

    def _register(self, value: Any, path: str) -> None:
        """Remember which functions have some code: their parts are admitted once a frame of it runs."""
        if isinstance(value, property):
            for part in (value.fget, value.fset, value.fdel):
                self._register(part, path)
        elif isinstance(value, staticmethod | classmethod | LRU_CACHE):
            self._register(value.__wrapped__, path)
            if isinstance(value, LRU_CACHE):
                self.admit(value, path)
        elif isinstance(value, functools.cached_property):
            self._register(value.func, path)
        elif isinstance(value, FunctionType):
            self._seen[id(value)] = value
            self._functions.setdefault(value.__code__, []).append((value, path))
            if "__code__" in self._names:
                self.reads.note_function(path, value)
            if origin_of(value.__code__.co_filename) != "user":
                for cell in value.__closure__ or ():
                    found = self.reads.note_cell(path, cell)
                    is_table = isinstance(found, dict) and value.__module__ == "functools"  # of singledispatch
                    is_called = isinstance(found, FunctionType | MethodType | functools.partial)
                    if is_called or is_table or _is_user_object(found):
                        self.admit(found, path, is_lenient=True)
            elif value.__code__ in self._active:
                self._add_parts(value, path)

    def _add_parts(self, function: FunctionType, path: str) -> None:
        self.reads.note_function(path, function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self.admit(self.reads.note_cell(name, cell), name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.admit(value, f"a default value of {path}")
        if function.__kwdefaults__:
            self.reads.note_contents(f"the default values of {path}", function.__kwdefaults__)

    # Refusals

    def _refuse_value(self, value: Any, path: str) -> None:
        text = f"it uses {path}, {describe_kind(value)}, which cannot be compared between calls"
        self._refuse(text, _words(path))

    def _refuse(self, text: str, names: set[str] | None = None) -> None:
        if self._predicts:
            return
        if self._at is not None:
            code, line = self._at
            line = line_of(code, names) if line is None and names else line or code.co_firstlineno
            text = f"{text} (at {Path(code.co_filename).name}:{line}, {code.co_name})"
        self.refused = self.refused or text
        raise Refusal(self.refused)


_OWN_ITERATORS = {kind.__iter__ for kind in (list, tuple, set, frozenset, deque)}
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_NAMES_OF_BUILTINS = ("getattr", "hasattr", "setattr", "delattr", "vars", "dir")
_NAMED_BUILTINS = tuple(PRISTINE[name] for name in _NAMES_OF_BUILTINS)


def predict_state(target: Any, uses: Sequence[object]) -> list[object]:
    """The modules, optimizers and ShardedTensors that a program mentions, found without running it."""
    admission = Admission((), (), predicts=True)
    for value in uses:
        admission.admit(value, type(value).__name__)
    owner = getattr(target, "__self__", None)
    for value in vars(owner).values() if owner is not None and hasattr(owner, "__dict__") else ():
        if isinstance(value, nn.Module | torch.optim.Optimizer | ShardedTensor):
            admission.admit(value, type(value).__name__)
    admission.admit_target(target)
    return admission.found


def _words(path: str) -> set[str]:
    return {*path.replace("an entry of ", "").split(".")}


def _ignore(name: str, value: Any) -> None:
    """What is not put back: entries that programs do not set."""


def _is_stdlib(kind: type) -> bool:
    return origin_of_module(kind.__module__) == "stdlib"


def _is_exception(kind: type) -> bool:
    return issubclass(kind, BaseException) and kind.__module__ == "builtins"


def _is_user_object(value: Any) -> bool:
    return origin_of_module(type(value).__module__) == "user"
