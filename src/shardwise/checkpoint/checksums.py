"""Checksums of stored bytes: XXH3 (64 bits) of every block of 4 MiB, so that a slice is checked without the rest.

XXH3 keeps up with memory (about 10 GB/s a core), where `zlib.crc32` gives 0.6 to 1 and would cost more than writing.
It detects accidents; it does not protect against someone who forges the index as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

BLOCK_BYTES = 4 << 20
SUM_DIGITS = 16


def checksum(data: memoryview | bytes) -> str:
    """The checksum of some bytes as 16 hexadecimal digits.

    >>> checksum(b"")
    '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def block_count(size: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many blocks this many bytes are.

    >>> block_count(0), block_count(1), block_count(BLOCK_BYTES + 1)
    (0, 1, 2)
    """
    return -(-size // block_bytes)


def split_into_blocks(data: memoryview, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Cut bytes into blocks."""
    for start in range(0, len(data), block_bytes):
        yield data[start : start + block_bytes]


class BlockSums:
    """The checksums of the blocks of bytes that come in parts of any length.

    >>> sums = BlockSums()
    >>> sums.update(memoryview(b"ab"))
    >>> sums.update(memoryview(b"c"))
    >>> sums.text() == checksum(b"abc")
    True
    """

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open: xxhash.xxh3_64 | None = None
        self._room = BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        if self._open is None and len(data) <= BLOCK_BYTES:
            self._begin(data)
            return
        while len(data):
            part, data = data[: self._room], data[self._room :]
            self._begin(part)

    def _begin(self, part: memoryview) -> None:
        if self._open is None:
            self._open = xxhash.xxh3_64()
        self._open.update(part)
        self._room -= len(part)
        if self._room == 0:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open.hexdigest())
        self._open, self._room = None, BLOCK_BYTES

    def text(self) -> str:
        """The checksums of all blocks, one after another."""
        self._close()
        return "".join(self._done)


def combine_crc(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes one after another, from theirs and the length of the second.

    >>> import zlib
    >>> combine_crc(zlib.crc32(b"shard"), zlib.crc32(b"wise"), 4) == zlib.crc32(b"shardwise")
    True
    """
    odd = [0xEDB88320, *(1 << n for n in range(31))]  # the effect of one zero bit on the register
    power = _square_matrix(_square_matrix(_square_matrix(odd)))  # of one zero byte
    while length:
        if length & 1:
            first = _apply_matrix(power, first)
        power, length = _square_matrix(power), length >> 1
    return first ^ second


def _apply_matrix(matrix: list[int], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector, row = vector >> 1, row + 1
    return total


def _square_matrix(matrix: list[int]) -> list[int]:
    return [_apply_matrix(matrix, row) for row in matrix]
