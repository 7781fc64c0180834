"""The pickles of torch.distributed.checkpoint and torch.save, read without torch and without running anything.

A pickle is a program for a small machine. This one knows the operations that torch's pickles consist of, and no others.
Names of functions and classes are looked up in a short list of harmless stand-ins; every other name is an error, so
nothing in a file is ever executed. Keys of dicts are texts, numbers and stand-ins, so that nothing large is hashed.
Every object costs some bytes of the file, so memory grows with its length alone, whatever numbers are written in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import MAX_DIMS
from shardwise.geometry import DType, LayoutError, find_dtype

METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES = {
    *((METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((METADATA, name) for name in ("BytesStorageMetadata", "MetadataIndex", "StorageMeta")),
    (FILESYSTEM, "_StorageInfo"),
}
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}


class UnpickledObject:
    """The stand-in for an object of one of torch's classes: the name of the class, and its state."""

    kind = ""
    state: Any = None


_STAND_INS = {names: type(names[1], (UnpickledObject,), {"kind": names[1]}) for names in _CLASSES}


def _to_size_tuple(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list | tuple) or len(numbers) > MAX_DIMS or set(map(type, numbers)) - {int}:
        raise ValueError("no shape")
    return tuple(numbers)


def _ignore_path(*_parts: object) -> UnpickledObject:
    """Paths say where a folder was written; they are ignored."""
    return UnpickledObject()


def _ignore_device(*_parts: object) -> UnpickledObject:
    return UnpickledObject()


def _return_first(value: object, *_: object) -> object:
    return value


def _make_empty_hooks() -> dict[Any, Any]:
    return {}


def _return_counts(counts: object = None) -> object:
    """A Counter, as in the state of a scheduler: the dict it is made of, which is not copied."""
    if counts is not None and type(counts) is not dict:
        raise ValueError("counts that are not in a dict")
    return {} if counts is None else counts


@dataclass(frozen=True)
class PickledStorageType:
    """The type of a storage; None means one without a dtype."""

    dtype: DType | None


@dataclass(frozen=True)
class PickledStorage:
    """A storage that a pickle refers to: its type, the name of its record, and its length in elements."""

    kind: PickledStorageType
    key: str
    length: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor as a pickle describes it."""

    storage: PickledStorage
    dtype: DType
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _check_storage(storage: object, offset: object, rest: Sequence[object]) -> None:
    if not isinstance(storage, PickledStorage) or type(offset) is not int or any(r is not None for r in rest):
        raise ValueError("a tensor of an unknown kind")


def _rebuild_tensor(
    storage: PickledStorage, offset: int, sizes: Any, strides: Any, _grad: bool, _hooks: Any, *rest: Any
) -> PickledTensor:
    _check_storage(storage, offset, rest)
    if storage.kind.dtype is None:
        raise ValueError("a tensor of an unknown kind")
    return PickledTensor(storage, storage.kind.dtype, offset, _to_size_tuple(sizes), _to_size_tuple(strides))


def _rebuild_tensor_of_dtype(
    storage: PickledStorage, offset: int, sizes: Any, strides: Any, _grad: bool, _hooks: Any, dtype: DType, *rest: Any
) -> PickledTensor:
    _check_storage(storage, offset, rest)
    if not isinstance(dtype, DType):
        raise ValueError("a tensor of an unknown kind")
    return PickledTensor(storage, dtype, offset, _to_size_tuple(sizes), _to_size_tuple(strides))


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _to_size_tuple,
    ("torch.serialization", "_get_layout"): _return_first,
    (METADATA, "_MEM_FORMAT_ENCODING"): _return_first,
    ("collections", "OrderedDict"): _make_empty_hooks,
    ("collections", "Counter"): _return_counts,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _return_first,
    ("torch", "device"): _ignore_device,
}
_LONGEST_NAME, _LONGEST_INT, _LONGEST_DIGITS = 300, 1000, 20
_FREE_OBJECTS, _BYTES_PER_OBJECT = 100_000, 4
_DTYPE_OF_STORAGE = {storage: dtype for dtype, storage in STORAGES.items()}


def find_stand_in(module: str, name: str) -> Any:
    """What a name in a pickle stands for; an error for every name that is not on the list."""
    if (module, name) in _STAND_INS:
        return _STAND_INS[module, name]
    if (module, name) in _FUNCTIONS:
        return _FUNCTIONS[module, name]
    if module.partition(".")[0] == "pathlib":
        return _ignore_path
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return PickledStorageType(None)
    if module == "torch" and name in _DTYPE_OF_STORAGE:
        return PickledStorageType(find_dtype(_DTYPE_OF_STORAGE[name]))
    if module == "torch":
        return find_dtype(name)
    raise CheckpointError(
        f"it names {module}.{name}, which is not a metadata class of torch; nothing is called, so "
        "store tensors and plain values, such as a module's state_dict()"
    )


def _load_persistent(given: Any) -> PickledStorage:
    if not isinstance(given, tuple) or len(given) != 5:
        raise ValueError("an unknown kind of reference")
    word, kind, key, _device, length = given
    if word != "storage" or not isinstance(kind, PickledStorageType) or type(length) is not int:
        raise ValueError("an unknown kind of reference")
    if not isinstance(key, str):
        raise ValueError("a storage without a name")
    return PickledStorage(kind, key, length)


_MARK = object()
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_INTS = {b"J": 4, b"K": 1, b"M": 2}  # the width of the number that follows; J is signed
_TEXTS = {b"X": 4, b"\x8c": 1, b"\x8d": 8}  # the width of the length that comes before a text
_MEMO_WIDTHS = {b"q": 1, b"r": 4, b"h": 1, b"j": 4}
_KEYS = (str, int, float, NoneType, UnpickledObject)


class _PickleMachine:
    """Runs one pickle."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = memoryview(data), 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._room = _FREE_OBJECTS + len(self._data) // _BYTES_PER_OBJECT

    def run(self) -> Any:
        """The value that the pickle describes."""
        while True:
            code = self._take(1)
            if code == b".":
                return self._pop()
            if code in _CONSTANTS:
                self._stack.append(_CONSTANTS[code])
            elif code in _TEXTS:
                self._stack.append(str(self._take(self._number(_TEXTS[code])), "utf-8", "surrogatepass"))
            elif code in _INTS:
                self._stack.append(self._number(_INTS[code], signed=code == b"J"))
            elif code in _MEMO_WIDTHS:
                self._use_memo(self._number(_MEMO_WIDTHS[code]), put=code in (b"q", b"r"))
            elif code in _OTHERS:
                _OTHERS[code](self)
            else:
                raise ValueError(f"operation {code!r} is not one of torch's")

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if count < 0 or len(found) != count:
            raise ValueError("it ends too early")
        self._at += count
        return bytes(found)

    def _line(self) -> str:
        end = bytes(self._data[self._at : self._at + _LONGEST_NAME]).find(b"\n")
        if end < 0:
            raise ValueError("a name without an end")
        return str(self._take(end + 1)[:-1], "utf-8")

    def _number(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(width), "little", signed=signed)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("a value is missing")
        return self._stack.pop()

    def _make(self, value: Any) -> None:
        """Put down something that takes memory of its own."""
        self._room -= 1
        if self._room < 0:
            raise ValueError("it has more objects than bytes for them")
        self._stack.append(value)

    def _top(self, kind: type[Any]) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise ValueError(f"no {kind.__name__} to add to")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        for start in range(len(self._stack) - 1, -1, -1):
            if self._stack[start] is _MARK:
                found = self._stack[start + 1 :]
                del self._stack[start:]
                return found
        raise ValueError("a mark is missing")

    def _use_memo(self, number: int, put: bool) -> None:
        if not put:
            if number not in self._memo:
                raise ValueError("a reference to nothing")
            self._stack.append(self._memo[number])
        elif self._stack and self._stack[-1] is not _MARK:
            self._memo[number] = self._stack[-1]
        else:
            raise ValueError("nothing to remember")

    def _long(self, width: int) -> None:
        length = self._number(width)
        if length > _LONGEST_INT:
            raise ValueError(f"an int of {length} bytes")
        self._stack.append(self._number(length, signed=True))

    def _tuple(self, count: int) -> None:
        self._make(tuple(reversed([self._pop() for _ in range(count)])))

    def _extend(self) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def _append(self) -> None:
        item = self._pop()
        self._top(list).append(item)

    def _set_items(self, items: Sequence[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2 or not all(isinstance(key, _KEYS) for key in items[::2]):
            raise ValueError("keys that are neither texts nor numbers")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items((key, value))

    def _named(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > _LONGEST_NAME:
            raise ValueError("a name that is none")
        self._make(find_stand_in(module, name))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._named(module, name)

    def _call(self) -> None:
        args, function = self._pop(), self._pop()
        if function not in (*_FUNCTIONS.values(), _ignore_path) or type(args) is not tuple:
            raise ValueError("a call of something that is not a function")
        self._make(function(*args))

    def _new_object(self) -> None:
        args, made = self._pop(), self._pop()
        if not (isinstance(made, type) and issubclass(made, UnpickledObject)) or args != ():
            raise ValueError("an object of an unknown class")
        self._make(made())

    def _build(self) -> None:
        """Give an object its state, if it is a stand-in; others, such as element types, belong to the library."""
        state, made = self._pop(), self._stack[-1] if self._stack else None
        if type(made) is dict:
            return  # an OrderedDict with attributes of its own, such as the versions of modules in a state dict
        if not isinstance(made, UnpickledObject):
            raise ValueError(f"unexpected state for a {type(made).__name__}")
        made.state = state


_OTHERS: dict[bytes, Callable[[_PickleMachine], Any]] = {
    b"\x80": lambda m: m._number(1),
    b"\x95": lambda m: m._number(8),
    b"(": lambda m: m._stack.append(_MARK),
    b"0": lambda m: m._pop(),
    b"G": lambda m: m._stack.append(struct.unpack(">d", m._take(8))[0]),
    b"\x8a": lambda m: m._long(1),
    b"\x8b": lambda m: m._long(4),
    b"\x94": lambda m: m._use_memo(len(m._memo), put=True),
    b"p": lambda m: m._use_memo(int(m._line()[:_LONGEST_DIGITS]), put=True),
    b"g": lambda m: m._use_memo(int(m._line()[:_LONGEST_DIGITS]), put=False),
    b"a": _PickleMachine._append,
    b"e": _PickleMachine._extend,
    b"s": _PickleMachine._set_item,
    b"u": lambda m: m._set_items(m._since_mark()),
    b"t": lambda m: m._make(tuple(m._since_mark())),
    b"l": lambda m: m._make(m._since_mark()),
    b"c": lambda m: m._named(m._line(), m._line()),
    b"\x93": _PickleMachine._stack_global,
    b"R": _PickleMachine._call,
    b"\x81": _PickleMachine._new_object,
    b"b": _PickleMachine._build,
    b"Q": lambda m: m._make(_load_persistent(m._pop())),
    b"]": lambda m: m._make([]),
    b"}": lambda m: m._make({}),
    b")": lambda m: m._stack.append(()),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
}


def read_pickle(data: bytes | memoryview, name: str) -> Any:
    """What a pickle describes; `name` appears in errors. Any unexpected operation or name is an error.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"step": 3, "betas": (0.9, 0.99)}), "a file")
    {'step': 3, 'betas': (0.9, 0.99)}
    >>> read_pickle(pickle.dumps(print), "a file")
    Traceback (most recent call last):
    ...
    shardwise.checkpoint.errors.CheckpointError: a file: it names builtins.print, which is not a metadata class ...
    """
    try:
        return _PickleMachine(data).run()
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{name}: {str(error)[:300]}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{name}: damaged: {type(error).__name__}: {str(error)[:100]}") from error
