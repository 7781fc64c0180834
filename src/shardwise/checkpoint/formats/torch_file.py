"""Files of torch.save, read by the rules of `weights_only` and written, without torch and without running anything.

1. A file is an archive: a zip of uncompressed records. All its numbers are checked. When one is written, its records
   except the tensor's bytes are small and known before, so the bytes are copied first and the rest is written around.
2. Its pickle, a program for a small machine, describes the state. This machine knows the operations of torch's pickles
   and no others; names are looked up in a short list of harmless stand-ins, and every other name is an error. Every
   object costs some bytes of the file, so memory grows with its length alone, whatever numbers are written in it.
3. Each storage is a record of its own, with its CRC-32. A tensor is a view of it: an offset, sizes and strides. Tensors
   that share a storage, such as tied weights, share its bytes.
4. Numbers, texts, lists, tuples and dicts are values; what else the list of names lets through (a device, a dtype) is
   opaque.

A folder with `pytorch_model.bin`, or with several such files and their index, is read as well. The archives and pickles
of torch.distributed.checkpoint (`dcp.py`) are the same.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from shardwise.checkpoint.files import BytesReader, CheckpointError, FileReader, ReadableFolder, require
from shardwise.checkpoint.formats.base import FilePlan, Format, SaveRequest, digest_files
from shardwise.checkpoint.formats.huggingface import parse_weight_map
from shardwise.checkpoint.index import (
    CRC,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_NUMBER,
    FileEntry,
    Index,
    Json,
    StoredCut,
    StridedView,
    TensorEntry,
    check_name_bytes,
    checksum,
    row_major_strides,
)
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
    shardwise.checkpoint.files.CheckpointError: a file: it names builtins.print, which is not a metadata class ...
    """
    try:
        return _PickleMachine(data).run()
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{name}: {str(error)[:300]}") from error
    except (ValueError, TypeError, OverflowError) as error:
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

    >>> import pickle
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


ROOT = "archive/"
PICKLE, ORDER, DATA, VERSION = "data.pkl", "byteorder", "data/0", "version"
ALIGNMENT = 64
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END, _LOCATOR, _END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
_WIDE, _PADDING = 1, 0x4246
_NO = 0xFFFFFFFF
_ZIP64, _FLAGS, _DATE = 45, 0x0800, 0x0021  # version 4.5, names in UTF-8, 1980-01-01
_MAX_RECORDS, _MAX_DIRECTORY_BYTES = 10_000, 1 << 28
_MAX_PICKLE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Record:
    """A record of an archive: where its bytes begin in it, their number, and their CRC-32."""

    begin: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Some bytes of a file, of which small parts are read."""

    file: FileReader
    begin: int
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset` on; fewer, where the range ends before."""
        low, high = max(0, offset), min(self.size, offset + size)
        return self.file.read(self.begin + low, self.begin + high).tobytes() if low < high else b""


def read_archive(data: ByteRange | memoryview, name: str, max_records: int = _MAX_RECORDS) -> dict[str, Record]:
    """The records of an archive, by their names without the leading folder."""
    whole = ByteRange(BytesReader(data), 0, len(data)) if isinstance(data, memoryview) else data
    try:
        return _read_records(whole, max_records)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{name}: not an archive of torch.save, or a damaged one") from error


def read_record(data: ByteRange, record: Record, where: str) -> bytes:
    """A small record of an archive, checked."""
    if record.size > _MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where}: a pickle of {record.size} bytes; no more than {_MAX_PICKLE_BYTES} are read")
    found = data.read(record.begin, record.size)
    if zlib.crc32(found) != record.crc:
        raise CheckpointError(f"{where}: a record of {record.size} bytes is damaged: its CRC-32 differs")
    return found


def _read_records(data: ByteRange, max_records: int) -> dict[str, Record]:
    count, first, end = _find_directory(data)
    require(count <= max_records and 0 <= first <= end <= data.size, "no directory")
    require(count * _CENTRAL.size <= end - first <= _MAX_DIRECTORY_BYTES, "no directory")
    directory, position = data.read(first, end - first), 0
    found: dict[str, Record] = {}
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, position)
        method, crc, packed, size, names, extras, comments, local = (fields[i] for i in (4, 7, 8, 9, 10, 11, 12, 16))
        require(fields[0] == b"PK\x01\x02" and method == 0, "an entry that is none, or compressed")
        text = directory[position + _CENTRAL.size :][:names].decode()
        extra = memoryview(directory)[position + _CENTRAL.size + names :][:extras]
        size, packed, local = _read_zip64_numbers(extra, size, packed, local)
        require(size == packed, "an entry that is compressed")
        found[text.partition("/")[2]] = Record(_data_begin(data, local, size, first), size, crc)
        position += _CENTRAL.size + names + extras + comments
    return found


def _find_directory(data: ByteRange) -> tuple[int, int, int]:
    """The number of records, and the begin and end of the directory."""
    tail = data.read(data.size - _END.size - _LOCATOR.size, _END.size + _LOCATOR.size)
    require(len(tail) >= _END.size, "no end")
    signature, _, _, _, count, length, position, comment = _END.unpack(tail[-_END.size :])
    require(signature == b"PK\x05\x06" and comment == 0, "no end")
    if len(tail) == _END.size + _LOCATOR.size:
        mark, _, wide, _ = _LOCATOR.unpack(tail[: _LOCATOR.size])
        if mark == b"PK\x06\x07":
            fields = _END64.unpack(data.read(wide, _END64.size))
            require(fields[0] == b"PK\x06\x06", "no end")
            count, length, position = fields[7], fields[8], fields[9]
    return count, position, position + length


def _read_zip64_numbers(extra: memoryview, *numbers: int) -> list[int]:
    """Numbers that do not fit 32 bits are in the extra field, in order."""
    wide: list[int] = []
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == _WIDE:
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, 4))
        extra = extra[4 + length :]
    return [wide.pop(0) if n == _NO else n for n in numbers]


def _data_begin(data: ByteRange, local: int, size: int, end: int) -> int:
    fields = _LOCAL.unpack(data.read(local, _LOCAL.size))
    begin: int = local + _LOCAL.size + fields[9] + fields[10]
    require(fields[0] == b"PK\x03\x04" and local >= 0 and begin + size <= end, "an entry without its header")
    return begin


def write_archive(records: Mapping[str, bytes], data_size: int | None, crc: int = 0) -> tuple[bytes, bytes]:
    """What comes before and after the bytes of a tensor in an archive that begins at a multiple of 64 bytes.

    With `data_size` None there is no tensor; then the first part is the whole archive.

    >>> before, after = write_archive({PICKLE: b"..."}, 10)
    >>> len(before) % ALIGNMENT, read_archive(memoryview(before + b"0123456789" + after), "an archive")[DATA].size
    (0, 10)
    """
    before, directory = bytearray(), bytearray()
    for name, content in records.items():
        local = len(before)
        before += _local_header(name, len(content), zlib.crc32(content), local, pad=False) + content
        directory += _central_header(name, len(content), zlib.crc32(content), local)
    count, position = len(records), len(before)
    if data_size is not None:
        header = _local_header(DATA, data_size, crc, len(before), pad=True)
        directory += _central_header(DATA, data_size, crc, len(before))
        before += header
        count, position = count + 1, len(before) + data_size
    end = directory + _END64.pack(
        b"PK\x06\x06", _END64.size - 12, _ZIP64, _ZIP64, 0, 0, count, count, len(directory), position
    )
    end += _LOCATOR.pack(b"PK\x06\x07", 0, position + len(directory), 1)
    end += _END.pack(b"PK\x05\x06", 0, 0, count, count, min(len(directory), _NO), min(position, _NO), 0)
    return (bytes(before), bytes(end)) if data_size is not None else (bytes(before + end), b"")


def _local_header(name: str, size: int, crc: int, position: int, pad: bool) -> bytes:
    text = (ROOT + name).encode()
    extra = struct.pack("<2H2Q", _WIDE, 16, size, size)
    if pad:
        room = -(position + _LOCAL.size + len(text) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<2H", _PADDING, room) + b"Z" * room
    fields = (b"PK\x03\x04", _ZIP64, _FLAGS, 0, 0, _DATE, crc, _NO, _NO, len(text), len(extra))
    return _LOCAL.pack(*fields) + text + extra


def _central_header(name: str, size: int, crc: int, local: int) -> bytes:
    text = (ROOT + name).encode()
    extra = struct.pack("<2H3Q", _WIDE, 24, size, size, local)
    sizes = (crc, _NO, _NO, len(text), len(extra), 0, 0, 0, 0, _NO)
    return _CENTRAL.pack(b"PK\x01\x02", _ZIP64, _ZIP64, _FLAGS, 0, 0, _DATE, *sizes) + text + extra


FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SINGLE, _SEVERAL = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WHOLE = 1 << 62  # checksums are those of whole records
_MAX_FILE_RECORDS = 1 << 20
_MIN_NODES = 10_000
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files of torch before 1.6 begin


class TorchFileFormat(Format):
    """Whole tensors in archives of torch.save; only read."""

    name = "torch"
    title = "torch.save"
    index_names = (_SEVERAL, _SINGLE)
    suffixes = ()
    writable = False
    has_layouts = False

    def accepts_file(self, name: str) -> bool:
        return name.endswith(FILE_SUFFIXES)

    def title_of(self, index_name: str) -> str:
        return "torch.save file" if index_name.endswith(FILE_SUFFIXES) else self.title

    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        if index_name == _SEVERAL:
            return _read_several(folder, folder.read(index_name))
        found = _read_file(folder, index_name, 0)
        tree = {"dict": []} if found.tree is _SKIPPED else found.tree
        index = Index([found.entry], found.tensors, tree, _WHOLE, tuple(found.opaque))
        return index, _digest(folder, [index_name], found.pickled)

    def plan_files(self, request: SaveRequest) -> FilePlan:
        raise CheckpointError("files of torch.save are read, not written; choose another format")


def _digest(folder: ReadableFolder, names: list[str], pickled: bytes) -> str:
    return checksum(pickled + json.dumps(digest_files(folder, names)).encode())


def _read_several(folder: ReadableFolder, data: bytes) -> tuple[Index, str]:
    """The index of a model in several files, each with a part of its state dict."""
    weight_map = parse_weight_map(folder.path, data, ".bin")
    numbers = {name: number for number, name in enumerate(sorted(set(weight_map.values())))}
    parts = [_read_file(folder, name, number) for name, number in numbers.items()]
    missing = next((key for key, name in weight_map.items() if key not in parts[numbers[name]].tensors), None)
    if missing is not None:
        place = folder.path / weight_map[missing]
        raise CheckpointError(f"{place}: tensor {missing[:300]!r} is not in this file, where the index says it is")
    tensors = {key: parts[numbers[name]].tensors[key] for key, name in weight_map.items()}
    tree = {"dict": [[name, {"tensor": name}] for name in tensors]}
    index = Index([part.entry for part in parts], tensors, tree, _WHOLE)
    return index, _digest(folder, list(numbers), data + b"".join(part.pickled for part in parts))


_SKIPPED = object()  # an entry that is neither a tensor nor a plain value


def _read_file(folder: ReadableFolder, name: str, number: int) -> _TorchFile:
    where = str(folder.path / name)
    try:
        return _TorchFile(folder.reader(name), name, where, number)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: damaged: {type(error).__name__}: {str(error)[:200]}") from error


class _TorchFile:
    """One pass over a file: its tensors by name, its tree, and the names of what is opaque."""

    def __init__(self, file: FileReader, name: str, where: str, number: int) -> None:
        start = file.read(0, min(file.size, len(_OLD))).tobytes()
        if start == _OLD:
            raise CheckpointError(f"{where}: a file of torch before 1.6; load it with torch and save it again")
        if start[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{where}: not a file of torch.save")
        whole = ByteRange(file, 0, file.size)
        self.entry = FileEntry(name, file.size, 0, None)
        self.tensors: dict[str, TensorEntry] = {}
        self.opaque: list[str] = []
        self._where, self._number = where, number
        self._records = read_archive(whole, where, _MAX_FILE_RECORDS)
        if PICKLE not in self._records:
            raise CheckpointError(f"{where}: an archive without {PICKLE}, not one of torch.save")
        self._has_sums = self._records[PICKLE].crc != 0  # torch can leave them out; then all are 0
        self.pickled = self._read_small(whole, self._records[PICKLE])
        if ORDER in self._records and self._read_small(whole, self._records[ORDER]) != b"little":
            raise CheckpointError(f"{where}: its bytes are not in this machine's order")
        self._left = _MIN_NODES + len(self.pickled)
        self.tree = self._node(read_pickle(self.pickled, where), ())
        if self.tree is not _SKIPPED:
            check_name_bytes(self.tree, file.size, where)

    def _read_small(self, whole: ByteRange, record: Record) -> bytes:
        if self._has_sums:
            return read_record(whole, record, self._where)
        unchecked = whole.read(record.begin, min(record.size, 1 << 26))
        return read_record(whole, Record(record.begin, record.size, zlib.crc32(unchecked)), self._where)

    def _node(self, value: Any, path: tuple[str, ...]) -> Json:
        """A node of the tree; what holds itself, or repeats a few entries again and again, is an error."""
        self._left -= 1
        if self._left < 0 or len(path) > MAX_DEPTH:
            raise CheckpointError(f"{self._where}: its state is nested too deeply, or grows when it is written out")
        name = ".".join(path)
        if isinstance(value, PickledTensor):
            if name in self.tensors:
                raise CheckpointError(f"{self._where}: two tensors are called {name[:300]!r}")
            self.tensors[name] = self._tensor(name, value)
            return {"tensor": name}
        if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
            pairs = [[key, self._node(child, (*path, str(key)))] for key, child in value.items()]
            return {"dict": [pair for pair in pairs if pair[1] is not _SKIPPED]}
        if isinstance(value, list | tuple):
            items = [self._node(child, (*path, str(i))) for i, child in enumerate(value)]
            items = [None if item is _SKIPPED else item for item in items]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        self.opaque.append(name)
        return _SKIPPED

    def _tensor(self, name: str, found: PickledTensor) -> TensorEntry:
        where = f"{self._where}: tensor {name[:300]!r}"
        record = self._records.get(f"data/{found.storage.key}")
        numbers = (found.offset, *found.sizes, *found.strides)
        if record is None or len(found.sizes) != len(found.strides):
            raise CheckpointError(f"{where}: its storage is missing, or its strides are")
        if not all(type(n) is int and 0 <= n <= MAX_NUMBER for n in numbers):
            raise CheckpointError(f"{where}: sizes and strides that are none: {str(numbers)[:200]}")
        itemsize, count = found.dtype.itemsize, math.prod(found.sizes)
        last = found.offset + sum((n - 1) * s for n, s in zip(found.sizes, found.strides, strict=True))
        if count and (last + 1) * itemsize > record.size:
            raise CheckpointError(
                f"{where}: it ends at byte {(last + 1) * itemsize} of a storage of {record.size} bytes"
            )
        if count * itemsize > record.size:
            raise CheckpointError(f"{where}: its elements share bytes (an expanded tensor); save it with .contiguous()")
        rows = 1 if count else 0
        sizes = np.array([found.sizes] * rows, np.int64).reshape(rows, len(found.sizes))
        cut = StoredCut(found.sizes, np.zeros_like(sizes), sizes)
        sums = f"{CRC}{record.crc:08x}" if self._has_sums else ""
        plain = count * itemsize == record.size and found.strides == row_major_strides(found.sizes)
        views = None if plain else [StridedView(found.offset, found.strides, record.size)] * rows
        return TensorEntry(name, found.dtype, cut, [self._number] * rows, [record.begin] * rows, [sums] * rows, views)
