"""Where does a version of the weights stay while others read it? In slots: memory that every process of the host maps.

1. A rank's part of a version is packed in one slot, each piece row by row at an offset that both sides compute from
   the layouts. Of replicas on one host only one rank keeps a piece, in turns.
2. A slot begins with a generation: odd while it is written, `2 * number of the version` when it is whole. Whoever
   reads looks before and after: a version that was overwritten meanwhile is discarded, never used.
3. The memory is an anonymous file of the kernel. Its descriptor is handed to readers of the same host, who map it
   read-only. Where there is no such thing, slots are ordinary memory and are read over sockets.
4. Weights of one GPU may have their slots there. Readers open them by CUDA's IPC, as ranks of one world do; the
   generation is in memory of the host all the same. The streams of both sides are waited for: whoever sees a
   generation sees what was written before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwise.comm.transports.device_memory import (
    SharedSegments,
    identify_process,
    segment_memory,
)
from shardwise.comm.transports.kernels import RepeatedCopy
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray

HEADER_BYTES = 4096
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class KeptPieces:
    """The pieces of a tensor that slots have: rows of the layout's table, and where each is in its rank's slot."""

    rows: IntArray
    offsets: IntArray


def place_pieces(
    tensors: Sequence[tuple[Layout, int]], tied: Sequence[int], hosts: Sequence[int]
) -> tuple[list[KeptPieces], IntArray]:
    """Where each tensor's pieces are in the slots of their ranks, and how many bytes each rank's slot has.

    Tensors are layouts with the bytes of an element; `tied[i]` is the first tensor with the same memory as tensor i.
    """
    width = len(hosts)
    host_of = np.asarray(hosts, np.int64)
    ends = np.full(width, HEADER_BYTES, np.int64)
    placed: list[KeptPieces] = []
    for number, (layout, itemsize) in enumerate(tensors):
        if tied[number] != number:
            placed.append(placed[tied[number]])
            continue
        rows = _one_per_host(layout, host_of, number)
        table = layout.table
        ranks = table.ranks[rows]
        sizes = table.sizes[rows].prod(axis=1) * itemsize
        sizes = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        order = np.argsort(ranks, kind="stable")
        before = np.cumsum(sizes[order]) - sizes[order]
        first = np.searchsorted(ranks[order], ranks[order], side="left")
        offsets = np.empty_like(sizes)
        offsets[order] = before - before[first] + ends[ranks[order]] if len(rows) else before
        placed.append(KeptPieces(rows, offsets))
        np.add.at(ends, ranks, sizes)
    return placed, ends


def _one_per_host(layout: Layout, host_of: IntArray, number: int) -> IntArray:
    """The rows that are kept: of each box one on each host, which ranks take in turns by box and tensor."""
    table = layout.table
    filled = np.flatnonzero(table.sizes.prod(axis=1) > 0)
    width = int(host_of.max(initial=0)) + 1
    keys = table.cells[filled] * width + host_of[table.ranks[filled]]
    order = np.lexsort((table.ranks[filled], keys))
    keys = keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, len(keys)))
    turn = (number + table.cells[filled[order[first]]]) % np.maximum(counts, 1)
    return np.sort(filled[order[first + turn]])


class _Slot:
    """Memory that begins with a generation."""

    memory: Tensor
    _words: IntArray

    @property
    def generation(self) -> int:
        return int(self._words[0])

    def wait_whole(self, generation: int, until: float) -> bool:
        """Whether it has a generation, or will have once it is written, before a time of the monotonic clock."""
        while (found := self.generation) == generation - 1 and time.monotonic() < until:
            time.sleep(0.001)
        return found == generation


class VersionSlot(_Slot):
    """Memory of this process that others read; with `device` the pieces are there.

    Raises an OSError if other processes cannot open the memory of the device.
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes = nbytes
        self.pieces: list[Tensor] = []
        """Views of the memory, made once by whoever writes to it."""
        self.descriptor: int | None = None
        self.on_device: tuple[str, str] | None = None
        """For slots of a device: the process, and what others open the memory by."""
        found = None if device is None else segment_memory(device)
        if found is not None:
            messages, kept = SharedSegments(found).describe({0: [found.allocate(nbytes)]})
            self.on_device, memory = (identify_process(), messages[0].decode()), kept[0][0]
        nbytes = HEADER_BYTES if found is not None else nbytes
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("shardwise-sync", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(self.descriptor, 0, nbytes)  # memory that is missing is an error here, not a signal
                mapped = mmap.mmap(self.descriptor, nbytes)
            except OSError as error:
                os.close(self.descriptor)
                raise MemoryError(f"a slot of {nbytes} bytes cannot be allocated: {error}") from error
            header = torch.frombuffer(mapped, dtype=torch.uint8)
        else:
            header = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self.memory = header if found is None else memory
        self._words = header[:HEADER_BYTES].numpy().view(np.int64)

    @property
    def generation(self) -> int:
        return super().generation

    @generation.setter
    def generation(self, value: int) -> None:
        self._words[0] = value

    def close(self) -> None:
        """Give the descriptor back; memory of the host goes when nobody maps it."""
        if self.on_device is not None:
            self.generation = 0  # who reads it meanwhile must not use what comes there next
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class MappedSlot(_Slot):
    """A slot of another process, mapped read-only; `opened` is its memory on a device."""

    def __init__(self, descriptor: int, nbytes: int, opened: Tensor | None = None) -> None:
        mapped_bytes = nbytes if opened is None else HEADER_BYTES
        try:
            if os.fstat(descriptor).st_size < mapped_bytes or nbytes < HEADER_BYTES:
                raise ConnectionError(f"a slot of {nbytes} bytes is announced, and the file is shorter")
            mapped = mmap.mmap(descriptor, mapped_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if opened is not None and opened.nbytes < nbytes:
            raise ConnectionError(f"a slot of {nbytes} bytes is announced, and its memory has {opened.nbytes}")
        self.memory = tensor_of_map(mapped) if opened is None else opened
        self._words = np.frombuffer(mapped, np.int64, HEADER_BYTES // 8)


class CopiesByAddress:
    """Copies between views of the same memory, as long as its tensors stay where they are."""

    def __init__(self) -> None:
        self._known: dict[object, RepeatedCopy] = {}

    def find(self, number: int, tensors: Sequence[Tensor], make: Callable[[], Pairs]) -> RepeatedCopy:
        """The copies of a slot from or to these tensors; `make` lists targets and sources."""
        key = number, *[(x.data_ptr(), x.stride()) for x in tensors]
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KEPT_COPIES:
                self._known.clear()
            found = self._known[key] = RepeatedCopy(*make())
        return found

    def clear(self) -> None:
        """Forget them, and the memory that they would read."""
        self._known.clear()


Pairs: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
_KEPT_COPIES = 4  # two slots, and two sets of memory that are swapped


def tensor_of_map(mapped: mmap.mmap) -> Tensor:
    """The bytes of a read-only map as a tensor that must not be written to; it keeps the map alive.

    torch warns of memory that it may not write to, so it gets the address from NumPy and not the buffer.
    """
    array = np.frombuffer(mapped, np.uint8)
    memory = (ctypes.c_ubyte * len(array)).from_address(array.ctypes.data)
    memory._keep = array  # type: ignore[attr-defined]  # the map lives as long as the tensor's buffer
    return torch.frombuffer(memory, dtype=torch.uint8)
