"""Host memory over a gloo group: point-to-point straight from and into the passed tensors.

Reductions are an exchange of runs and a sum on arrival, in rank order: half the bytes of gloo's reduce-scatter, every
dtype, the same bits on every rank. They are complete when the call returns, and go through in windows:

1. While one window is summed, the next one travels.
2. Scratch memory is bounded however long the tensor is and however many ranks there are.
3. It is kept for the next reduction: touching fresh memory for the first time costs more than moving the bytes.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single
from shardwise.comm.faults import TransportError, to_transport_error
from shardwise.comm.flat_tensors import Edges, as_bytes, reduce_runs
from shardwise.comm.protocol import CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.rank_text import name_ranks

_SLOT = 256
_SLOT_HEADER = struct.Struct("<qI")
_SMALL_REDUCTION_BYTES = 1 << 16
_WINDOW = 4 << 20
_WORKSPACE = 64 << 20  # bytes, for the windows of all ranks together


class GlooEngine:
    """Moves host tensors between the ranks of a gloo group."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], timeout: float) -> None:
        self._group, self._rank, self._ranks, self._timeout = group, rank, ranks, timeout
        self._index = ranks.index(rank)
        self._others = tuple(r for r in ranks if r != rank)
        self.awaited = self._others
        self._kept: Tensor | None = None

    def exchange(self, sends: Edges, receives: Edges, *, label: str) -> Work:
        """Post every receive and every send at once; nothing is packed."""
        works: list[tuple[int, dist.Work | None]] = []
        peer = -1
        try:
            for peer, tensors in receives.items():
                works += [(peer, dist.irecv(t, peer, group=self._group, tag=k)) for k, t in enumerate(tensors)]
            for peer, tensors in sends.items():
                works += [(peer, dist.isend(t, peer, group=self._group, tag=k)) for k, t in enumerate(tensors)]
        except RuntimeError as error:
            raise to_transport_error(error, (peer,)) from error
        return PendingWork(partial(self._wait, works))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Gather small tensors in one collective, large ones straight into their places."""
        parts = out.view(len(self._ranks), -1)
        if tensor.nbytes <= _SMALL_REDUCTION_BYTES:
            self._native(all_gather_single(out, tensor, self._group))
            return CompletedWork()
        mine = parts[self._index]
        if mine.data_ptr() != tensor.data_ptr():
            mine.copy_(tensor)
        sends = {r: [as_bytes(tensor, label=label)] for r in self._others}
        receives = {r: [as_bytes(parts[i], label=label)] for i, r in enumerate(self._ranks) if r != self._rank}
        return self.exchange(sends, receives, label=label)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, label: str) -> Work:
        """Exchange the runs window by window and reduce them as they arrive."""
        runs = tensor.view(len(self._ranks), -1)
        cuts = [(out[at], [run[at] for run in runs]) for at in _window_slices(len(out), self._window_length(out))]
        self._reduce(cuts, op, label)
        return CompletedWork()

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, label: str) -> Work:
        """Gather and reduce small tensors; reduce-scatter and gather the windows of large ones."""
        if tensor.nbytes <= _SMALL_REDUCTION_BYTES:
            parts = tensor.new_empty((len(self._ranks), tensor.numel()))
            self.all_gather_into(as_bytes(parts, label=label), as_bytes(tensor, label=label), label=label).wait()
            reduce_runs(tensor, list(parts), op)
            return CompletedWork()
        count = len(self._ranks)
        windows = _window_slices(len(tensor), self._window_length(tensor) * count)
        cut = [list(tensor[at].tensor_split(count)) for at in windows]
        self._reduce([(runs[self._index], runs) for runs in cut], op, label, share=True)
        return CompletedWork()

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Broadcast as bytes, in gloo's own tree."""
        work = dist.broadcast(as_bytes(tensor, label=label), src, group=self._group, async_op=True)
        return PendingWork(partial(self._native, work))

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Gather one fixed slot per rank and, only if some rank has more, the rest."""
        check = zlib.crc32(label.encode())
        head = _SLOT_HEADER.pack(len(data), check) + data[: _SLOT - _SLOT_HEADER.size]
        slots = self._gather_slots(head, _SLOT)
        headers = [_SLOT_HEADER.unpack_from(slot) for slot in slots]
        other = [r for r, (_, c) in zip(self._ranks, headers, strict=True) if c != check]
        if other:
            reason = f"{label!r}: the ranks made different calls: {name_ranks(other)} not in {label!r}"
            raise TransportError(reason, other, exact=True)
        sizes = [size for size, _ in headers]
        longest = max(sizes) - (_SLOT - _SLOT_HEADER.size)
        rest = self._gather_slots(data[_SLOT - _SLOT_HEADER.size :], longest) if longest > 0 else [b""] * len(slots)
        return [(slot[_SLOT_HEADER.size :] + more)[:size] for slot, more, size in zip(slots, rest, sizes, strict=True)]

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """The notes in the store report it."""

    def close(self) -> None:
        """Nothing is held."""

    def _gather_slots(self, data: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        out = torch.empty(size * len(self._ranks), dtype=torch.uint8)
        self._native(all_gather_single(out, mine, self._group))
        whole = out.numpy().tobytes()
        return [whole[i * size : (i + 1) * size] for i in range(len(self._ranks))]

    def _window_length(self, tensor: Tensor) -> int:
        """How many elements of each rank are reduced at a time."""
        return max(1, min(_WINDOW, _WORKSPACE // (2 * len(self._ranks))) // tensor.element_size())

    def _reduce(
        self, cuts: Sequence[tuple[Tensor, list[Tensor]]], op: ReduceOp, label: str, *, share: bool = False
    ) -> None:
        """For each window reduce this rank's run of every rank; run i of this rank goes to rank i.

        With `share`, what this rank has reduced then goes to all others, into their run of this rank.
        """
        if not cuts:
            return
        memory, rooms = self._rooms(cuts[0][0])  # no later window is longer than the first
        shared: list[Work] = []
        started = self._start_window(cuts[0][1], rooms[0], label)
        for number, (out, runs) in enumerate(cuts, 1):
            parts, work = started
            if number < len(cuts):
                started = self._start_window(cuts[number][1], rooms[number % 2], label)
            work.wait()
            reduce_runs(out, parts, op)
            shared += [self._share(runs, label)] if share else []
        for work in shared:
            work.wait()
        self._kept = memory  # after a failure it is dropped instead: something may still write to it

    def _rooms(self, longest: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Two sets of room for the longest window of every other rank, in kept memory if there is enough."""
        size = -(-longest.nbytes // 16) * 16  # every row starts where any dtype may
        others = len(self._others)
        memory, self._kept = self._kept, None
        if memory is None or len(memory) < 2 * others * size:
            memory = torch.empty(2 * others * size, dtype=torch.uint8)
        rows = [memory[i * size : (i + 1) * size].view(longest.dtype) for i in range(2 * others)]
        return memory, [rows[:others], rows[others:]]

    def _start_window(self, runs: list[Tensor], room: list[Tensor], label: str) -> tuple[list[Tensor], Work]:
        """Start sending one window's runs; return every rank's run of this rank, in rank order, and the work."""
        mine, rows = runs[self._index], iter(room)
        parts = [mine if r == self._rank else next(rows)[: len(mine)] for r in self._ranks]
        sends = {r: [as_bytes(runs[i], label=label)] for i, r in enumerate(self._ranks) if r != self._rank}
        receives = {r: [as_bytes(parts[i], label=label)] for i, r in enumerate(self._ranks) if r != self._rank}
        return parts, self.exchange(sends, receives, label=label)

    def _share(self, runs: list[Tensor], label: str) -> Work:
        mine = [as_bytes(runs[self._index], label=label)]
        receives = {r: [as_bytes(runs[i], label=label)] for i, r in enumerate(self._ranks) if r != self._rank}
        return self.exchange(dict.fromkeys(self._others, mine), receives, label=label)

    def _wait(self, works: list[tuple[int, dist.Work | None]]) -> None:
        deadline = time.monotonic() + self._timeout
        for peer, work in works:
            self.awaited = (peer,)
            try:
                if work is not None:
                    work.wait(_time_left(deadline))
            except RuntimeError as error:
                raise to_transport_error(error, (peer,)) from error

    def _native(self, work: dist.Work | None) -> None:
        self.awaited = self._others
        try:
            if work is not None:
                work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise to_transport_error(error, self._others) from error


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _window_slices(length: int, step: int) -> Iterator[slice]:
    """Cut a length in slices of at most `step`."""
    return (slice(at, at + step) for at in range(0, length, step))
