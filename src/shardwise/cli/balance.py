"""How evenly is a checkpoint spread? Bytes that each rank held and wrote, and what lies in each file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.cli.checkpoints import OWN_FORMAT, Layouts, Opened
from shardwise.cli.units import counted
from shardwise.transfer.report import format_bytes

_WRITER = re.compile(r"rank(\d{1,9})-\d+\.safetensors|__(\d{1,9})_\d+\.distcp")


@dataclass(frozen=True)
class Balance:
    """Bytes by rank, as far as the format tells, and the number of tensors in each file."""

    held: Mapping[int, int]
    written: Mapping[int, int]
    tensors_by_file: Sequence[int]

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.held, *self.written})


def balance_of(found: Opened, layouts: Layouts) -> Balance:
    """How a checkpoint is spread; only the format of shardwise tells who held copies of what."""
    index = found.store.index
    held: dict[int, int] = {}
    in_file = [0] * len(index.files)
    tensors = [0] * len(index.files)
    for entry in index.tensors.values():
        elements_per_rank = layouts.elements_per_rank(entry) if found.format == OWN_FORMAT else {}
        for rank, elements in elements_per_rank.items():
            held[rank] = held.get(rank, 0) + elements * entry.dtype.itemsize
        for number, (_, elements) in zip(entry.files, entry.cut.extents, strict=True):
            in_file[number] += elements * entry.dtype.itemsize
        for number in set(entry.files):
            tensors[number] += 1
    written: dict[int, int] = {}
    for file, nbytes in zip(index.files, in_file, strict=True):
        writer = writer_of(file.name)
        if writer is not None:
            written[writer] = written.get(writer, 0) + nbytes
    return Balance(held, written, tensors)


def writer_of(name: str) -> int | None:
    """The rank that wrote a file, if its name tells.

    >>> writer_of("rank00003-00000.safetensors"), writer_of("__2_0.distcp"), writer_of("model.safetensors")
    (3, 2, None)
    """
    found = _WRITER.fullmatch(name)
    return int(found[1] or found[2]) if found else None


def spread(counts: Mapping[int, int], what: str) -> str:
    """The range and the mean of some numbers of bytes.

    >>> spread({0: 90, 1: 110}, "rank")
    '2 ranks, 90 B to 110 B each, mean 100 B'
    """
    low, high, mean = min(counts.values()), max(counts.values()), sum(counts.values()) / len(counts)
    who = counted(len(counts), what)
    if low == high:
        return f"{who}, {format_bytes(low)}{' each' * (len(counts) != 1)}"
    return f"{who}, {format_bytes(low)} to {format_bytes(high)} each, mean {format_bytes(mean)}"
