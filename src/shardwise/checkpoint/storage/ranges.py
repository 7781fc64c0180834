"""Ranges of files behind a URL: read in aligned chunks, several at a time, in bounded memory.

What is read in order is fetched ahead; the chunks used last are kept, up to a limit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.storage.base import FileReader
from shardwise.checkpoint.storage.remote_path import RemotePath

_THREADS, _AHEAD = 8, 4
_LARGE_CHUNK, _SMALL_CHUNK, _SMALL_READ = 4 << 20, 64 << 10, 4 << 10
_SMALL_CHUNKS = 32


class RangeCache:
    """Chunks of files, fetched by a few threads, the ones used last kept up to a limit."""

    def __init__(self, limit: int) -> None:
        self.chunk_bytes = min(_LARGE_CHUNK, max(_SMALL_CHUNK, limit // 8))
        self._most = max(2, limit // 2 // self.chunk_bytes)
        self._chunks: OrderedDict[tuple[str, int, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwise read")

    def read(self, place: RemotePath, size: int, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Bytes of a file of this size."""
        if low >= high:
            return np.empty(0, np.uint8)
        step = _SMALL_CHUNK if high - low <= _SMALL_READ else self.chunk_bytes
        numbers = range(low // step, (high - 1) // step + 1)
        found = np.empty(0 if len(numbers) == 1 else high - low, np.uint8)
        for first in range(numbers.start, numbers.stop, self._most):  # no more at once than are kept
            some = range(first, min(numbers.stop, first + self._most))
            for number, chunk in zip(some, [self._start(place, size, step, n) for n in some], strict=True):
                begin, data = number * step, np.frombuffer(chunk.result(), np.uint8)
                part = data[max(0, low - begin) : high - begin]
                if len(numbers) == 1:
                    self._read_ahead(place, size, step, number)
                    return part
                at = max(low, begin) - low
                found[at : at + len(part)] = part
        return found

    def fetch(self, place: RemotePath, size: int, low: int, high: int) -> None:
        """Start to read bytes, as many as may be kept."""
        step = self.chunk_bytes
        for number in list(range(low // step, -(-high // step)))[: self._most - 1]:
            self._start(place, size, step, number)

    def _read_ahead(self, place: RemotePath, size: int, step: int, number: int) -> None:
        """Start with the next chunks, where the one before was read as well and there is room."""
        with self._lock:
            in_order = (place.url, step, number - 1) in self._chunks
        if in_order and step == self.chunk_bytes and self._most >= 2 * _AHEAD:
            self.fetch(place, size, (number + 1) * step, min(size, (number + 1 + _AHEAD) * step))

    def _start(self, place: RemotePath, size: int, step: int, number: int) -> Future[bytes]:
        key = (place.url, step, number)
        with self._lock:
            found = self._chunks.get(key)
            if found is None or (found.done() and found.exception() is not None):
                low = number * step
                found = self._pool.submit(place.read_range, low, min(size, low + step))
                self._chunks[key] = found
            self._chunks.move_to_end(key)
            while len(self._chunks) > self._most + (_SMALL_CHUNKS if step == _SMALL_CHUNK else 0):
                self._chunks.popitem(last=False)
        return found

    def close(self) -> None:
        """Stop the threads, which finish the ranges that they are reading, and drop what was read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._chunks.clear()


class RangedFile(FileReader):
    """A file behind a URL, of which ranges are read."""

    def __init__(self, place: RemotePath, cache: RangeCache, size: int) -> None:
        self._place, self._cache, self.size = place, cache, size

    def read(self, low: int, high: int) -> npt.NDArray[np.uint8]:
        return self._cache.read(self._place, self.size, low, min(high, self.size))

    def read_into(self, place: memoryview, begin: int) -> None:
        data = self.read(begin, begin + len(place))
        if len(data) != len(place):
            raise CheckpointError(f"{self._place}: cannot be read: it ends at byte {self.size}")
        place[:] = data.data

    def fetch(self, low: int, high: int) -> bool:
        self._cache.fetch(self._place, self.size, low, high)
        return True

    def release(self) -> None:
        return None  # the cache has a limit of its own
