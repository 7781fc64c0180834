"""The pickles of torch.distributed.checkpoint, read and written without torch, and without running anything.

A pickle names functions and classes to call. Reading gives each name in a short list a harmless stand-in; every other
name is an error, so nothing in a file is ever executed. Only stand-ins are given a state, and what a call makes is no
longer than a tensor has dims, so a file changes nothing outside and takes no memory but what its own length makes.
Writing puts down names and values, and imports nothing.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.errors import CheckpointError
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
_MAX_DIMS = 64


def _to_size_tuple(numbers: Any) -> tuple[Any, ...]:
    if not isinstance(numbers, list | tuple) or len(numbers) > _MAX_DIMS:
        raise ValueError("no shape")
    return tuple(numbers)


def _ignore_path(*_parts: object) -> UnpickledObject:
    """Paths say where a folder was written; they are ignored."""
    return UnpickledObject()


def _return_first(value: object, *_: object) -> object:
    return value


def _make_empty_hooks() -> dict[Any, Any]:
    return {}


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


def _rebuild_tensor(
    storage: PickledStorage, offset: int, sizes: Any, strides: Any, _grad: bool, _hooks: Any, *rest: Any
) -> PickledTensor:
    if storage.kind.dtype is None or any(rest):
        raise ValueError("a tensor of an unknown kind")
    return PickledTensor(storage, storage.kind.dtype, offset, _to_size_tuple(sizes), _to_size_tuple(strides))


def _rebuild_tensor_of_dtype(
    storage: PickledStorage, offset: int, sizes: Any, strides: Any, _grad: bool, _hooks: Any, dtype: DType, *rest: Any
) -> PickledTensor:
    if any(rest):
        raise ValueError("a tensor of an unknown kind")
    return PickledTensor(storage, dtype, offset, _to_size_tuple(sizes), _to_size_tuple(strides))


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _to_size_tuple,
    ("torch.serialization", "_get_layout"): _return_first,
    (METADATA, "_MEM_FORMAT_ENCODING"): _return_first,
    ("collections", "OrderedDict"): _make_empty_hooks,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _return_first,
}
_DTYPE_OF_STORAGE = {storage: dtype for dtype, storage in STORAGES.items()}


def _set_object_state(reader: Any) -> None:
    """Give an object its state, if it is a stand-in; others, such as element types, belong to the library."""
    state = reader.stack.pop()
    made = reader.stack[-1]
    if not isinstance(made, UnpickledObject):
        raise ValueError(f"unexpected state for a {type(made).__name__}")
    made.state = state


class _RestrictedUnpickler(pickle._Unpickler):
    """Python's own reader, in Python: the one in C makes room for as many references as a number in the file says."""

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _set_object_state}  # noqa: RUF012  # as its base has it

    def find_class(self, module: str, name: str) -> Any:
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
        raise CheckpointError(f"it names {module}.{name}, which is not a metadata class of torch; nothing is called")

    def persistent_load(self, given: Any) -> PickledStorage:
        word, kind, key, _device, length = given
        if word != "storage" or not isinstance(kind, PickledStorageType) or type(length) is not int:
            raise ValueError("an unknown kind of reference")
        return PickledStorage(kind, str(key), length)


def read_pickle(data: bytes | memoryview, name: str) -> Any:
    """What a pickle describes; `name` appears in errors. Any unexpected name is an error.

    >>> read_pickle(pickle.dumps({"step": 3, "betas": (0.9, 0.99)}), "a file")
    {'step': 3, 'betas': (0.9, 0.99)}
    >>> read_pickle(pickle.dumps(print), "a file")
    Traceback (most recent call last):
    ...
    shardwise.checkpoint.errors.CheckpointError: a file: it names builtins.print, which is not a metadata class ...
    """
    try:
        return _RestrictedUnpickler(io.BytesIO(data)).load()
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{name}: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{name}: damaged: {type(error).__name__}: {str(error)[:100]}") from error


@dataclass(frozen=True)
class PickleName:
    """Something that a pickle names: a module and a name in it."""

    module: str
    name: str


@dataclass(frozen=True)
class PickleCall:
    """The result of a call of something named."""

    of: PickleName
    args: tuple[Any, ...]


@dataclass(frozen=True)
class PickleObject:
    """An object of a class, given its state."""

    of: PickleName
    state: Any


@dataclass(frozen=True)
class PickleReference:
    """What `persistent_load` is to find."""

    value: tuple[Any, ...]


@dataclass(frozen=True)
class PicklePairs:
    """A dict, given as pairs: its keys need not be hashable here."""

    items: Sequence[tuple[Any, Any]]


def write_pickle(value: Any) -> bytes:
    """A pickle of plain values, names, calls and objects.

    >>> pickle.loads(write_pickle({"step": 3, "betas": [0.9, (None, True)], "big": 1 << 40}))
    {'step': 3, 'betas': [0.9, (None, True)], 'big': 1099511627776}
    >>> pickle.loads(write_pickle(PickleCall(PickleName("fractions", "Fraction"), (1, 3))))
    Fraction(1, 3)
    """
    writer = _PickleWriter()
    writer.put(value)
    return b"\x80\x02" + bytes(writer.out) + b"."


class _PickleWriter:
    def __init__(self) -> None:
        self.out = bytearray()
        self._known: dict[tuple[type, Any], int] = {}

    def put(self, value: Any) -> None:
        if isinstance(value, str | PickleName):
            self._once(value)
        elif isinstance(value, tuple):
            self._many(b"(", value, b"t")
        elif isinstance(value, list):
            self.out += b"]"
            self._many(b"(", value, b"e")
        elif isinstance(value, dict | PicklePairs):
            pairs = value.items if isinstance(value, PicklePairs) else value.items()
            self.out += b"}"
            self._many(b"(", [part for pair in pairs for part in pair], b"u")
        elif isinstance(value, PickleCall):
            self._all(b"R", value.of, value.args)
        elif isinstance(value, PickleObject):
            self._all(b"\x81", value.of, ())
            self._all(b"b", value.state)
        elif isinstance(value, PickleReference):
            self._all(b"Q", value.value)
        else:
            self.out += _encode_pickle_scalar(value)

    def _all(self, end: bytes, *values: Any) -> None:
        for value in values:
            self.put(value)
        self.out += end

    def _many(self, start: bytes, values: Sequence[Any], end: bytes) -> None:
        self.out += start
        self._all(end, *values)

    def _once(self, value: str | PickleName) -> None:
        """A text or a name; the second time, a reference to the first."""
        key = (type(value), value)
        if key in self._known:
            self.out += b"j" + struct.pack("<I", self._known[key])
            return
        if isinstance(value, PickleName):
            self.out += f"c{value.module}\n{value.name}\n".encode()
        else:
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
        self._known[key] = len(self._known)
        self.out += b"r" + struct.pack("<I", self._known[key])


def _encode_pickle_scalar(value: Any) -> bytes:
    if value is None or value is True or value is False:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    assert isinstance(value, int), f"a {type(value).__name__} is not written"
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data
