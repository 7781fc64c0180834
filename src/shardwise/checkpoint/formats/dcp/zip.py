"""Archives as torch.save writes them: a zip of uncompressed records, read and written without torch.

All numbers are checked when an archive is read. When one is written, its records except the tensor's bytes are small
and known before; so the bytes can be copied to their place first, and what is around them is written afterwards.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.checkpoint.errors import CheckpointError, require
from shardwise.checkpoint.storage.base import BytesReader, FileReader

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


def read_record(data: ByteRange, record: Record, told: str) -> bytes:
    """A small record of an archive, checked."""
    if record.size > _MAX_PICKLE_BYTES:
        raise CheckpointError(f"{told}: a pickle of {record.size} bytes; no more than {_MAX_PICKLE_BYTES} are read")
    found = data.read(record.begin, record.size)
    if zlib.crc32(found) != record.crc:
        raise CheckpointError(f"{told}: a record of {record.size} bytes is damaged: its CRC-32 differs")
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
