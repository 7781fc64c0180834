"""Engines over a backend of torch's process groups: gloo for host memory, nccl for device memory.

gloo: point-to-point straight from and into the passed tensors. Reductions are an exchange of runs and a sum on arrival,
in rank order: half the bytes of gloo's reduce-scatter, every dtype, the same bits on every rank. They are complete when
the call returns, and go through in windows:

1. While one window is summed, the next one travels.
2. Scratch memory is bounded however long the tensor is and however many ranks there are.
3. It is kept for the next reduction: touching fresh memory for the first time costs more than moving the bytes.

A backend that takes device memory (nccl): torch's own collectives, on the current stream. Ranks compare what they call
before a collective starts, over an engine of host memory: that of the group's own gloo (`cpu:gloo,cuda:nccl`), or of a
gloo group of the same ranks. So nothing that the host has to know goes through the device, which would stop it.

fake: torch's backend without other ranks, for dry runs of a large job in one process. Layouts, plans and tensors on the
meta device work, since they need no values; whatever would move values is an error that says so.
"""

from __future__ import annotations

import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.comm.agree import name_ranks
from shardwise.comm.faults import TransportError, to_transport_error
from shardwise.comm.flat_tensors import Edges, as_bytes, reduce_runs
from shardwise.comm.protocol import Capabilities, CommError, CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.transports.engine import Engine, Stage
from shardwise.comm.transports.links import different_sizes_error

_SLOT = 256
_SLOT_HEADER = struct.Struct("<qI")
_HEAD_BYTES = 16  # what follows it may be read as any dtype
_EDGE_HEADER = struct.Struct("<IIQIIQI")  # the number of the call; the sizes of what is sent, and of what is expected
_TAGS = 1 << 31
_CALL_NUMBERS = 16  # few: gloo remembers every tag that was used
_SMALL_REDUCTION_BYTES = 1 << 16
_WINDOW = 4 << 20
_WORKSPACE = 64 << 20  # bytes, for the windows of all ranks together


class FakeEngine(Engine):
    """The ranks of a fake group: each would say what this one says; tensors without values are moved, no others."""

    device = torch.device("meta")

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self._rank, self._ranks = rank, ranks
        self.awaited = tuple(r for r in ranks if r != rank)

    def stage(self) -> Stage:
        return _NoStage(self.device)

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """What this rank says, once for each rank."""
        return [data] * len(self._ranks)

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        moved = [t for edges in (sends, receives) for listed in edges.values() for t in listed]
        return self._move(moved, call)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        return self._move([out, tensor], call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        return self._move([out, tensor], call)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        return self._move([tensor], call)

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        return self._move([tensor], call)

    def _move(self, tensors: Sequence[Tensor], call: str) -> Work:
        if any(not t.is_meta for t in tensors):
            raise CommError(
                f"{call}: the process group is torch's fake one, whose other {len(self.awaited)} ranks do not exist, "
                "so no values can be moved; make tensors of a dry run on the meta device, or "
                "call init_process_group with gloo or nccl",
                self.awaited,
            )
        return CompletedWork()


class _NoStage(Stage):
    """Tensors of any device are passed on as they are."""

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def write(self, tensor: Tensor) -> Tensor:
        return tensor

    def update(self, tensor: Tensor) -> Tensor:
        return tensor


class _GroupEngine(Engine):
    """An engine over a torch process group, which ends when torch destroys it: kept, it would keep its threads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._find_group = weakref.ref(group)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._find_group()
        if group is None:
            raise TransportError("the process group was destroyed by destroy_process_group", self.awaited, exact=True)
        return group


class GlooEngine(_GroupEngine):
    """Moves host tensors between the ranks of a gloo group."""

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], timeout: float) -> None:
        super().__init__(group)
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._index = ranks.index(rank)
        self._places = {r: place for place, r in enumerate(ranks)}
        self._others = tuple(r for r in ranks if r != rank)
        self.awaited = self._others
        self._kept: Tensor | None = None
        self._calls = 0

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Post every receive and every send at once; nothing is packed.

        What follows from ranks' own arguments, without a question to all, may differ between them, and gloo ends a
        process that gets more bytes than it expects. So the sizes are part of the number under which a message travels:
        one of another size matches nothing. Headers of one size travel beside the messages, both ways on each edge, and
        are compared before anything else is waited for.
        """
        tag = self._next_tag(call)
        header_tag = zlib.crc32(f"{self._calls} sizes".encode()) % _TAGS
        forms = {
            peer: (_describe_sizes(sends.get(peer, ())), _describe_sizes(receives.get(peer, ())))
            for peer in sorted({*sends, *receives})
        }
        headers = {peer: torch.empty(_EDGE_HEADER.size, dtype=torch.uint8, device="cpu") for peer in forms}
        works: list[tuple[int, dist.Work | None]] = []
        peer = -1
        try:
            for peer, header in headers.items():
                works.append((peer, self._group.recv([header], self._places[peer], header_tag)))
            for peer, (sent, wanted) in forms.items():
                own = torch.frombuffer(bytearray(_EDGE_HEADER.pack(tag, *sent, *wanted)), dtype=torch.uint8)
                works.append((peer, self._group.send([own], self._places[peer], header_tag)))
        except RuntimeError as error:
            raise to_transport_error(error, (peer,)) from error
        messages = self._exchange(sends, receives, tag, {peer: (one[2], two[2]) for peer, (one, two) in forms.items()})

        def wait() -> None:
            self._wait(works)
            for peer, header in headers.items():
                self._check_header(peer, header, tag, forms[peer], call)
            messages.wait()

        return PendingWork(wait)

    def _check_header(self, peer: int, header: Tensor, tag: int, own: tuple[_Sizes, _Sizes], call: str) -> None:
        """Raise unless a peer makes the same call, and sends and expects what this rank expects and sends."""
        check, *rest = _EDGE_HEADER.unpack(header.numpy().tobytes())
        if check != tag:
            own_name, other = name_ranks([self._rank]), name_ranks([peer])
            reason = f"the ranks made different calls: {other} not in {call}, as {own_name}"
            raise TransportError(reason, (peer, self._rank), exact=True)
        for src, dst, sent, wanted in (
            (peer, self._rank, tuple(rest[:3]), own[1]),
            (self._rank, peer, own[0], tuple(rest[3:])),
        ):
            if sent != wanted:
                raise different_sizes_error(call, src, dst, _write_sizes(*sent), _write_sizes(*wanted))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Gather small tensors in one collective, large ones straight into their places."""
        tag, parts = self._next_tag(call), out.view(len(self._ranks), -1)
        if tensor.nbytes <= _SMALL_REDUCTION_BYTES:
            as_bytes(out, label=call).view(len(self._ranks), -1).copy_(self._gather_small(tensor, tag, call))
            return CompletedWork()
        mine = parts[self._index]
        if mine.data_ptr() != tensor.data_ptr():
            mine.copy_(tensor)
        sends = {r: [as_bytes(tensor, label=call)] for r in self._others}
        receives = {r: [as_bytes(parts[i], label=call)] for i, r in enumerate(self._ranks) if r != self._rank}
        return self._exchange(sends, receives, tag)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Exchange the runs window by window and reduce them as they arrive."""
        runs = tensor.view(len(self._ranks), -1)
        cuts = [(out[at], [run[at] for run in runs]) for at in _window_slices(len(out), self._window_length(out))]
        self._reduce(cuts, op, self._next_tag(call))
        return CompletedWork()

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Gather and reduce small tensors; reduce-scatter and gather the windows of large ones."""
        tag = self._next_tag(call)
        if tensor.nbytes <= _SMALL_REDUCTION_BYTES:
            parts = self._gather_small(tensor, tag, call).contiguous().view(tensor.dtype)
            reduce_runs(tensor, list(parts), op)
            return CompletedWork()
        count = len(self._ranks)
        windows = _window_slices(len(tensor), self._window_length(tensor) * count)
        cut = [list(tensor[at].tensor_split(count)) for at in windows]
        self._reduce([(runs[self._index], runs) for runs in cut], op, tag, share=True)
        return CompletedWork()

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Pass the bytes down a tree of ranks.

        gloo's own broadcast goes on in the background after a time-out, with whatever the memory holds by then. A
        message between two ranks ends with its connection. What is called is compared first: a source does not hear
        from ranks that await another one.
        """
        self.all_gather_bytes(b"", call=call)
        tag, view = self._next_tag(call), [as_bytes(tensor, label=call)]
        parent, children = _tree_neighbours(self._ranks.index(src), self._index, len(self._ranks))
        if tensor.numel() and parent is not None:
            self._exchange({}, {self._ranks[parent]: view}, tag).wait()
        if tensor.numel():
            self._exchange({self._ranks[child]: view for child in children}, {}, tag).wait()
        return CompletedWork()

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Gather one fixed slot per rank and, only if some rank has more, the rest."""
        check = self._next_tag(call)
        head = _SLOT_HEADER.pack(len(data), check) + data[: _SLOT - _SLOT_HEADER.size]
        slots = self._gather_slots(head, _SLOT)
        headers = [_SLOT_HEADER.unpack_from(slot) for slot in slots]
        self._check_calls([c for _, c in headers], check, call)
        sizes = [size for size, _ in headers]
        longest = max(sizes) - (_SLOT - _SLOT_HEADER.size)
        rest = self._gather_slots(data[_SLOT - _SLOT_HEADER.size :], longest) if longest > 0 else [b""] * len(slots)
        return [(slot[_SLOT_HEADER.size :] + more)[:size] for slot, more, size in zip(slots, rest, sizes, strict=True)]

    def _next_tag(self, call: str) -> int:
        """The number under which the messages of a call travel: those of another call do not match.

        It holds the place of the call among the last ones and a hash of what is called, so that ranks that make other
        calls, or one call more, time out instead of taking each other's bytes; the faults they note name the calls.
        """
        self._calls = (self._calls + 1) % _CALL_NUMBERS
        return zlib.crc32(f"{self._calls} {call}".encode()) % _TAGS

    def _check_calls(self, checks: Sequence[int], own: int, call: str) -> None:
        other = [r for r, check in zip(self._ranks, checks, strict=True) if check != own]
        if other:
            reason = f"the ranks made different calls: {name_ranks(other)} not in {call}, as {name_ranks([self._rank])}"
            raise TransportError(reason, other, exact=True)

    def _gather_small(self, tensor: Tensor, tag: int, call: str) -> Tensor:
        """The bytes of every rank, one row each, through memory of our own: a call that fails leaves theirs alone.

        What is called is compared in a first slot, as long as that of `all_gather_bytes`: gloo ends a process that
        gets more bytes than it expects.
        """
        data = as_bytes(tensor, label=call)
        slot = torch.zeros(_SLOT, dtype=torch.uint8, device="cpu")
        slot[: _SLOT_HEADER.size] = torch.frombuffer(bytearray(_SLOT_HEADER.pack(0, tag)), dtype=torch.uint8)
        fitting = data[: _SLOT - _HEAD_BYTES]
        slot[_HEAD_BYTES : _HEAD_BYTES + len(fitting)] = fitting
        rows = self._gather_rows(slot)
        checks = [_SLOT_HEADER.unpack(row[: _SLOT_HEADER.size].numpy().tobytes())[1] for row in rows]
        self._check_calls(checks, tag, call)
        found = rows[:, _HEAD_BYTES : _HEAD_BYTES + len(fitting)]
        if len(data) == len(fitting):
            return found
        return torch.cat([found, self._gather_rows(data[len(fitting) :])], dim=1)

    def _gather_rows(self, mine: Tensor) -> Tensor:
        rows = mine.new_empty((len(self._ranks), len(mine)))
        self._native(all_gather_single(rows.view(-1), mine, self._group))
        return rows

    def _exchange(
        self, sends: Edges, receives: Edges, tag: int, forms: Mapping[int, tuple[int, int]] | None = None
    ) -> Work:
        """Post messages; `forms` has for each peer what is added to the tag of what is sent to it and received."""
        works: list[tuple[int, dist.Work | None]] = []
        peer, group = -1, self._group
        try:
            for peer, tensors in receives.items():
                at = tag if forms is None else tag + forms[peer][1]
                works += [
                    (peer, group.recv([t], self._places[peer], _message_tag(at, k))) for k, t in enumerate(tensors)
                ]
            for peer, tensors in sends.items():
                at = tag if forms is None else tag + forms[peer][0]
                works += [
                    (peer, group.send([t], self._places[peer], _message_tag(at, k))) for k, t in enumerate(tensors)
                ]
        except RuntimeError as error:
            raise to_transport_error(error, (peer,)) from error
        return PendingWork(partial(self._wait, works))

    def _gather_slots(self, data: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        out = torch.empty(size * len(self._ranks), dtype=torch.uint8, device="cpu")
        self._native(all_gather_single(out, mine, self._group))
        whole = out.numpy().tobytes()
        return [whole[i * size : (i + 1) * size] for i in range(len(self._ranks))]

    def _window_length(self, tensor: Tensor) -> int:
        """How many elements of each rank are reduced at a time."""
        return max(1, min(_WINDOW, _WORKSPACE // (2 * len(self._ranks))) // tensor.element_size())

    def _reduce(
        self, cuts: Sequence[tuple[Tensor, list[Tensor]]], op: ReduceOp, tag: int, *, share: bool = False
    ) -> None:
        """For each window reduce this rank's run of every rank; run i of this rank goes to rank i.

        With `share`, what this rank has reduced then goes to all others, into their run of this rank.
        """
        if not cuts:
            return
        memory, rooms = self._rooms(cuts[0][0])  # no later window is longer than the first
        shared: list[Work] = []
        started = self._start_window(cuts[0][1], rooms[0], tag)
        for number, (out, runs) in enumerate(cuts, 1):
            parts, work = started
            if number < len(cuts):
                started = self._start_window(cuts[number][1], rooms[number % 2], tag)
            work.wait()
            reduce_runs(out, parts, op)
            shared += [self._share(runs, tag)] if share else []
        for work in shared:
            work.wait()
        self._kept = memory  # after a failure it is dropped instead: something may still write to it

    def _rooms(self, longest: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Two sets of buffers for the longest window of every other rank, in kept memory if there is enough."""
        size = -(-longest.nbytes // 16) * 16  # every row starts where any dtype may
        others = len(self._others)
        memory, self._kept = self._kept, None
        if memory is None or len(memory) < 2 * others * size:
            memory = torch.empty(2 * others * size, dtype=torch.uint8, device="cpu")
        rows = [memory[i * size : (i + 1) * size].view(longest.dtype) for i in range(2 * others)]
        return memory, [rows[:others], rows[others:]]

    def _start_window(self, runs: list[Tensor], buffers: list[Tensor], tag: int) -> tuple[list[Tensor], Work]:
        """Start sending one window's runs; return every rank's run of this rank, in rank order, and the work."""
        mine, rows = runs[self._index], iter(buffers)
        parts = [mine if r == self._rank else next(rows)[: len(mine)] for r in self._ranks]
        sends = {r: [as_bytes(runs[i], label="reduce")] for i, r in enumerate(self._ranks) if r != self._rank}
        receives = {r: [as_bytes(parts[i], label="reduce")] for i, r in enumerate(self._ranks) if r != self._rank}
        return parts, self._exchange(sends, receives, tag)

    def _share(self, runs: list[Tensor], tag: int) -> Work:
        mine = [as_bytes(runs[self._index], label="reduce")]
        receives = {r: [as_bytes(runs[i], label="reduce")] for i, r in enumerate(self._ranks) if r != self._rank}
        return self._exchange(dict.fromkeys(self._others, mine), receives, tag)

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


_Sizes: TypeAlias = tuple[int, int, int]
"""The messages of one side of an edge: their count, their bytes, and a hash of all sizes."""


def _describe_sizes(messages: Sequence[Tensor]) -> _Sizes:
    sizes = [len(message) for message in messages]
    return len(sizes), sum(sizes), zlib.crc32(repr(sizes).encode())


def _write_sizes(count: int, size: int, _: int) -> str:
    """Sizes in words.

    >>> _write_sizes(2, 48, 0), _write_sizes(1, 8, 0)
    ('48 bytes in 2 messages', '8 bytes')
    """
    return f"{size} bytes" + (f" in {count} messages" if count > 1 else "")


def _message_tag(tag: int, number: int) -> int:
    return (tag + number) % _TAGS


def _tree_neighbours(root: int, place: int, count: int) -> tuple[int | None, list[int]]:
    """From whom a place of a binomial tree receives, and to whom it sends, farthest first.

    >>> [_tree_neighbours(0, place, 5) for place in range(5)]
    [(None, [4, 2, 1]), (0, []), (0, [3]), (2, []), (0, [])]
    """
    own = (place - root) % count
    step = own & -own if own else 1 << (count - 1).bit_length()
    below = [own + (step >> i) for i in range(1, step.bit_length())]
    parent = None if own == 0 else (own - step + root) % count
    return parent, [(child + root) % count for child in below if child < count]


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _window_slices(length: int, step: int) -> Iterator[slice]:
    """Cut a length in slices of at most `step`."""
    return (slice(at, at + step) for at in range(0, length, step))


class NativeEngine(_GroupEngine):
    """Moves device tensors between the ranks of a group; over `host` they compare their calls."""

    capabilities = Capabilities(captures_graphs=True)

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        host: Engine,
    ) -> None:
        super().__init__(group)
        self._ranks, self.device, self._host = ranks, device, host
        self._others = self.awaited = tuple(r for r in ranks if r != rank)

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Post all sends and receives as one batch."""
        self._compare(call)
        posts = [dist.P2POp(dist.irecv, t, peer, self._group) for peer, ts in receives.items() for t in ts]
        posts += [dist.P2POp(dist.isend, t, peer, self._group) for peer, ts in sends.items() for t in ts]
        if not posts:
            return CompletedWork()
        works = self._guard(partial(dist.batch_isend_irecv, posts))
        return PendingWork(partial(self._wait, works))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Gather as bytes, so that every dtype is taken."""
        self._compare(call)
        return self._gather_into(out, tensor, call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce and scatter on the device."""
        self._compare(call)
        return self._start(partial(reduce_scatter_single, out, tensor, _torch_op(op), self._group))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce in place on the device."""
        self._compare(call)
        return self._start(partial(dist.all_reduce, tensor, op=_torch_op(op), group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Broadcast as bytes."""
        self._compare(call)
        view = as_bytes(tensor, label=call)
        return self._start(partial(dist.broadcast, view, src, group=self._group, async_op=True))

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Gather over the host."""
        return self._host.all_gather_bytes(data, call=call)

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify the others over the host."""
        self._host.abort(reason, ranks)

    def close(self) -> None:
        """Close what the host holds."""
        self._host.close()

    def _compare(self, call: str) -> None:
        """Fail on every rank if a rank makes another call, before the collective starts."""
        self._host.all_gather_bytes(b"", call=call)

    def _gather_into(self, out: Tensor, tensor: Tensor, call: str) -> Work:
        whole, part = as_bytes(out, label=call), as_bytes(tensor, label=call)
        return self._start(partial(all_gather_single, whole, part, self._group))

    def _start(self, call: Callable[[], dist.Work | None]) -> Work:
        work = self._guard(call)
        return PendingWork(partial(self._wait, [work]))

    def _wait(self, works: list[dist.Work | None]) -> None:
        for work in works:
            if work is not None:
                self._guard(work.wait)

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise to_transport_error(error, self._others) from error


def _torch_op(op: ReduceOp) -> Any:
    return {
        "sum": dist.ReduceOp.SUM,
        "avg": dist.ReduceOp.AVG,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "product": dist.ReduceOp.PRODUCT,
    }[op]
