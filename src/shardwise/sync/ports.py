"""How do bytes of a slot get from a rank of a publisher to a rank of a subscriber, and which way do they take?

1. Ranks of one host map slots: those in memory of the host by a descriptor, those of a GPU by CUDA's IPC. The reader
   copies strided boxes straight out of them.
2. Other ranks pack what is read in runs, and a carrier takes each run across: a socket; a group of gloo or nccl of the
   two ranks alone; or a one-sided transport of torch 2.15, which reads runs out of one registered ring of the sender,
   since its remote buffers have no offsets.
3. The reader chooses by what both ends can do (`Capabilities`): what reads the other's memory comes first, then what
   takes bytes from device to device, then sockets. What cannot be made, or fails, is left out until the publisher is
   met again, with the reason; sockets are left.
4. gloo, nccl and torch's store have no authentication. The store listens on the address by which the two ranks have
   met, under keys that begin with a secret sent over their sealed connection, and each step has a deadline.
"""

from __future__ import annotations

import atexit
import base64
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._cache import Cache
from shardwise._torch import TCPStore, make_pair_group, one_sided_transports
from shardwise.comm.launch import host_store
from shardwise.comm.protocol import Capabilities
from shardwise.comm.transports.device_memory import OpenedSegments, identify_gpu, segment_memory
from shardwise.sync.plan import AskedRead
from shardwise.sync.session import Channel, Message
from shardwise.sync.slots import CopiesByAddress, MappedSlot

_SEND_BYTES = 4 << 20
_ALIGNMENT = 16
_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.02
_FORM_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MAX_CARD = 1 << 20
_CPU = torch.device("cpu")
MEMORY, SOCKETS, GLOO, NCCL = "memory", "sockets", "gloo", "nccl"
T = TypeVar("T")


class PortError(OSError):
    """Bytes cannot take a way between two ranks; another may work."""


def check_transport(name: str) -> str:
    """The transport that is asked for, if it is one."""
    known = ("auto", MEMORY, SOCKETS, GLOO, NCCL, *one_sided_names())
    if name not in known:
        raise ValueError(f"transport is one of {', '.join(known)}; got {name!r}")
    return name


def one_sided_names() -> tuple[str, ...]:
    """The one-sided transports that torch knows in this process, installed or not."""
    module = one_sided_transports()
    return () if module is None else tuple(module.available_transports())


_usable: Cache[str, bool] = Cache()


def _is_usable(name: str) -> bool:
    """Whether an endpoint of a one-sided transport can be made here."""
    found = _usable.get(name)
    if found is None:
        try:
            one_sided_transports().new_transport(name).close()
            found = _usable.put(name, True)
        except Exception:  # of a library that is another's, or not there
            found = _usable.put(name, False)
    return found


# What maps slots.


class MappedSlots:
    """The slots of a rank of the same host, in this rank's address space."""

    name = MEMORY

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._slots: dict[int, MappedSlot] = {}
        self._opened: OpenedSegments | None = None
        self.copies = CopiesByAddress()

    def find(self, number: int, until: float) -> MappedSlot:
        """A slot; raises `PortError` if its memory cannot be opened here."""
        if number not in self._slots:
            self._map_all(until)
        found = self._slots.get(number)
        if found is None:
            raise PortError("its slots cannot be mapped")
        return found

    def _map_all(self, until: float) -> None:
        self._channel.send({"do": "slots"}, until)
        listed = self._channel.receive(until)["slots"]
        found = self._channel.receive_descriptors(len(listed), until) if listed else []
        for (number, nbytes, on_device), descriptor in zip(listed, found, strict=True):
            self._slots[number] = MappedSlot(descriptor, nbytes, self._open(on_device))

    def _open(self, on_device: Sequence[str] | None) -> Tensor | None:
        """The memory of a slot that is on a GPU."""
        if on_device is None:
            return None
        memory = segment_memory(self._device)
        if memory is None:
            raise PortError("its slots are on a GPU, and the tensors here are not")
        try:
            if self._opened is None:
                self._opened = OpenedSegments(memory)
            return self._opened.read(on_device[0], on_device[1].encode())[0]
        except (OSError, RuntimeError) as error:  # no peer access, another container, a process that has gone
            raise PortError(f"its slots on a GPU cannot be opened: {first_line(error)}") from error

    def close(self) -> None:
        """Let go of the slots."""
        self.copies.clear()
        self._slots.clear()
        if self._opened is not None:
            with suppress(OSError, RuntimeError):
                self._opened.close()


# What carries runs.


class Carrier(Protocol):
    """Takes runs of bytes from a rank of the publisher to a rank of a subscriber; both ends have one."""

    name: str
    device: torch.device
    """Where runs are, at this end."""
    longest: int
    """The bytes of a run of several reads; 0 if each read is a run."""

    def send(self, parts: Sequence[Tensor], until: float) -> None:
        """Send packed reads as one run."""
        ...

    def receive(self, nbytes: int, until: float, into: Tensor | None = None) -> Tensor:
        """The next run, as bytes, in `into` if that is passed; its memory is used again for the run after it."""
        ...

    def close(self) -> None:
        """Give up what it holds; the other end may be gone."""
        ...


def place_in_run(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these sizes begin in a run, and its length.

    >>> place_in_run([3, 16, 1])
    ([0, 16, 32], 33)
    """
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def cut_runs(sizes: Sequence[int], longest: int) -> list[int]:
    """How many reads each run has, if runs have at most so many bytes; a longer read is a run of its own.

    >>> cut_runs([8, 8, 50, 8], 32), cut_runs([8, 8], 0)
    ([2, 1, 1], [1, 1])
    """
    counts: list[int] = []
    end = longest + 1
    for size in sizes:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT + size
        if end > longest or not counts:
            counts.append(0)
            end = size
        counts[-1] += 1
    return counts


def pack_run(rows: Iterable[AskedRead], memory: Tensor, longest: int) -> list[Tensor]:
    """What a reader has put together in a run, which has at most so many bytes; a single read may have more."""
    parts: list[Tensor] = []
    end = 0
    for row in rows:
        parts.append(row.packed(memory))
        end = -(-end // _ALIGNMENT) * _ALIGNMENT + parts[-1].nbytes
        if len(parts) > 1 and end > longest:
            raise ConnectionError(f"a reader asks for a run of more than {longest} bytes")
    return parts


def _as_run(parts: Sequence[Tensor], out: Tensor | None, device: torch.device) -> Tensor:
    """Packed reads one after another, in `out` if that is passed."""
    flat = [part.reshape(-1).view(torch.uint8) for part in parts]
    starts, nbytes = place_in_run([len(part) for part in flat])
    if out is None:
        if len(flat) == 1:
            return flat[0].to(device)
        out = torch.empty(nbytes, dtype=torch.uint8, device=device)
    elif nbytes > len(out):
        raise ConnectionError(f"a run of {nbytes} bytes does not fit into {len(out)}")
    for start, part in zip(starts, flat, strict=True):
        out[start : start + len(part)].copy_(part)
    return out[:nbytes]


class SocketCarrier:
    """The connection itself."""

    name = SOCKETS
    device = _CPU
    longest = 0

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, parts: Sequence[Tensor], until: float) -> None:
        data = _as_run(parts, None, _CPU).numpy().data
        for start in range(0, len(data), _SEND_BYTES):
            self._channel.send_raw(data[start : start + _SEND_BYTES], until)

    def receive(self, nbytes: int, until: float, into: Tensor | None = None) -> Tensor:
        run = torch.empty(nbytes, dtype=torch.uint8, device=_CPU) if into is None else into
        self._channel.receive_raw(run.numpy().data, until)
        return run

    def close(self) -> None:
        """The connection is closed by whoever opened it."""


class GroupCarrier:
    """A group of torch of just these two ranks."""

    def __init__(self, backend: str, group: Any, place: int, device: torch.device, longest: int) -> None:
        self.name, self._group, self._place = backend, group, place
        self.device, self.longest = device, longest

    def send(self, parts: Sequence[Tensor], until: float) -> None:
        run = _as_run(parts, None, self.device)
        self._wait(self._group.send([run], 1 - self._place, 0), until)

    def receive(self, nbytes: int, until: float, into: Tensor | None = None) -> Tensor:
        run = torch.empty(nbytes, dtype=torch.uint8, device=self.device) if into is None else into
        self._wait(self._group.recv([run], 1 - self._place, 0), until)
        return run

    def _wait(self, work: Any, until: float) -> None:
        try:
            if self.name == GLOO:
                work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
                return
            while not work.is_completed():
                if time.monotonic() > until:
                    raise PortError(f"{self.name}: a run did not arrive within the time limit")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise PortError(f"{self.name}: {first_line(error)}") from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.name == NCCL:
            wait([_start(group.abort)], _CLOSE_SECONDS)


class RingCarrier:
    """One endpoint of a one-sided transport: the sender packs a run into its ring, the reader reads it from there."""

    def __init__(self, name: str, channel: Channel, device: torch.device, longest: int, until: float) -> None:
        self.name, self.device, self.longest, self._channel = name, device, longest, channel
        self._transport = one_sided_transports().new_transport(name, device)
        self._remote: Any = None
        try:
            self._ring = torch.empty(longest, dtype=torch.uint8, device=device)
            self._memory = self._transport.register_memory(self._ring, timeout=_left(until))
            self._own = self._memory.to_remote_buffer(timeout=_left(until))
            self.card = {
                "url": base64.b64encode(self._transport.bind(timeout=_left(until))).decode(),
                "ring": base64.b64encode(self._own.serialize()).decode(),
            }
        except BaseException:
            self.close()
            raise

    def connected_to(self, card: Mapping[str, Any], until: float) -> RingCarrier:
        """The same, connected to the endpoint that the other side has described."""
        self._transport.connect(base64.b64decode(str(card["url"]), validate=True), timeout=_left(until))
        self._remote = type(self._own).deserialize(base64.b64decode(str(card["ring"]), validate=True))
        return self

    def send(self, parts: Sequence[Tensor], until: float) -> None:
        run = _as_run(parts, self._ring, self.device)
        _settle(self.device)
        self._channel.send({"packed": len(run)}, until)
        if self._channel.receive(until).get("taken") != len(run):
            raise PortError(f"{self.name}: the reader could not read a run")

    def receive(self, nbytes: int, until: float, into: Tensor | None = None) -> Tensor:
        if self._channel.receive(until).get("packed") != nbytes:
            raise PortError(f"{self.name}: a run of another length was packed than {nbytes} bytes")
        work = self._transport.read(
            self._memory.to_mutable_view(0, nbytes), self._remote, async_op=True, timeout=_left(until)
        )
        try:
            work.wait(timedelta(seconds=_left(until)))
        except Exception as error:  # what is on its way writes to the ring, which the transport keeps until it ends
            raise PortError(f"{self.name}: {first_line(error)}") from error
        run = self._ring[:nbytes]
        if into is not None:
            run = into.copy_(run)
        _settle(self.device)
        self._channel.send({"taken": nbytes}, until)
        return run

    def close(self) -> None:
        try:
            self._transport.close(timeout=_CLOSE_SECONDS)
        except Exception:  # it keeps its memory until what is on its way has ended
            _unfinished.append(self)


_unfinished: list[RingCarrier] = []
"""Whose transfers may go on: their memory is not given back."""


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _start(call: Callable[[], T]) -> Future[T]:
    """Make a call that may hang in a thread, which the program waits for a little when it ends."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)
        finally:
            _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="shardwise-sync-port", daemon=True)
    _running.add(thread)
    thread.start()
    return done


_running: set[threading.Thread] = set()


@atexit.register
def _end_all() -> None:
    """A thread within torch when Python ends would abort the program."""
    until = time.monotonic() + _FORM_SECONDS
    for thread in list(_running):
        thread.join(_left(until))


# How both ends come to have one.


def capabilities_of(way: str) -> Capabilities:
    """What a way can do: mapped memory and one-sided transports read the other's memory, nccl stays on the device."""
    if way in (SOCKETS, GLOO, NCCL):
        return Capabilities(captures_graphs=way == NCCL)
    return Capabilities(reads_peers=True, takes_strides=way == MEMORY)


def list_ways(asked: str, near: bool, device: torch.device, left_out: Mapping[str, str]) -> list[str]:
    """The ways that a reader tries, best first, where its tensors are on a device."""
    if asked != "auto":
        return [asked]
    ways = [SOCKETS, *([MEMORY] if near else (name for name in one_sided_names() if _is_usable(name)))]
    if device.type == "cuda" and dist.is_nccl_available():
        ways.append(NCCL)

    def cost(way: str) -> tuple[bool, bool, bool]:
        can = capabilities_of(way)
        return not can.takes_strides, not can.reads_peers, not can.captures_graphs

    return sorted((way for way in ways if way not in left_out), key=cost)


def ask_for(name: str, channel: Channel, device: torch.device, longest: int, until: float) -> MappedSlots | Carrier:
    """The reader's end of a way; a `PortError` if one of the two cannot make it."""
    if name == MEMORY:
        if not channel.is_local:
            raise PortError("the publisher is on another host")
        return MappedSlots(channel, device)
    if name == SOCKETS:
        return SocketCarrier(channel)
    asked = {"do": "carry", "by": name, "longest": longest}
    if name in (GLOO, NCCL):
        asked["gpu"] = identify_gpu(device) if device.type == "cuda" else None
        answer = _exchange(channel, asked, until)
        return _confirm(channel, lambda: _form_group(name, channel, answer, 1, device, longest, until), until)
    ring = _open_ring(name, device, longest, channel, until)
    try:
        answer = _exchange(channel, {**asked, **ring.card}, until)
        return _confirm(channel, lambda: ring.connected_to(answer, until), until)
    except BaseException:
        ring.close()
        raise


def answer_for(channel: Channel, asked: Message, device: torch.device, until: float) -> Carrier | None:
    """The publisher's end of a way that a reader asks for, whose slots are on a device; None if it cannot be made."""
    name, longest = str(asked["by"]), int(asked["longest"])
    ring: RingCarrier | None = None
    try:
        if name in (GLOO, NCCL):
            store, said = _open_store(name, channel, device, asked.get("gpu"))
        elif name in one_sided_names():
            ring = _open_ring(name, device, longest, channel, until)
            said = ring.card
        else:
            raise PortError(f"the publisher does not have {name!r:.40}")
    except PortError as error:
        channel.send({"problem": f"the publisher's rank: {error}"}, until)
        return None
    channel.send(said, until)
    try:
        if ring is not None:
            made = ring
            return _confirm(channel, lambda: made.connected_to(asked, until), until)
        return _confirm(channel, lambda: _form_group(name, channel, said, 0, device, longest, until, store), until)
    except BaseException as error:
        if ring is not None:
            ring.close()
        if isinstance(error, PortError):
            return None
        raise


C = TypeVar("C", bound=Carrier)


def _confirm(channel: Channel, make: Callable[[], C], until: float) -> C:
    """Make one end while the other is made; if one of them cannot be, neither is kept."""
    making, limit = _start(make), time.monotonic() + _limit(until)
    theirs: str | None = None
    kept = False
    try:
        while not making.done() and time.monotonic() < limit and not theirs:
            wait([making], _LOOK_SECONDS)
            if theirs is None and select.select([channel], [], [], 0)[0]:
                theirs = str(channel.receive(until)["problem"])[:300]
        ours = theirs or "it took longer than the time limit"
        if making.done():
            error = making.exception()
            ours = "" if error is None else first_line(error)
        channel.send({"problem": ours}, until)
        if theirs is None:
            theirs = str(channel.receive(until)["problem"])[:300]
        if ours or theirs:
            raise PortError(theirs or ours)
        kept = True
        return making.result()
    finally:
        if not kept:
            making.add_done_callback(lambda made: made.exception() or made.result().close())


def _limit(until: float) -> float:
    """Seconds in which an end is made, which leaves some to say that it could not be."""
    return min(_FORM_SECONDS, _left(until) / 2)


def _exchange(channel: Channel, message: Message, until: float) -> Message:
    channel.send(message, until)
    answer = channel.receive(until, _MAX_CARD)
    if "problem" in answer:
        raise PortError(str(answer["problem"])[:300])
    return answer


def _open_store(name: str, channel: Channel, device: torch.device, other: object) -> tuple[TCPStore, Message]:
    """A store for a group, and how the reader finds it."""
    if name == NCCL and (device.type != "cuda" or other is None or not dist.is_nccl_available()):
        raise PortError("nccl is for versions and tensors that are both on GPUs")
    if name == NCCL and identify_gpu(device) == other:
        raise PortError("nccl does not take two ranks of one GPU")
    try:
        store = host_store(channel.address)
    except (OSError, RuntimeError) as error:
        raise PortError(f"no store at {channel.address}: {first_line(error)}") from error
    return store, {"host": channel.address, "port": store.port, "prefix": secrets.token_hex(16)}


def _open_ring(name: str, device: torch.device, longest: int, channel: Channel, until: float) -> RingCarrier:
    try:
        return RingCarrier(name, channel, device, longest, until)
    except Exception as error:  # of a library that is another's
        raise PortError(f"{name}: {first_line(error)}") from error


def _form_group(
    name: str,
    channel: Channel,
    said: Message,
    place: int,
    device: torch.device,
    longest: int,
    until: float,
    store: TCPStore | None = None,
) -> GroupCarrier:
    """Make one of the two ends of a group; a first message shows that both are there."""
    on, limit = device if name == NCCL else _CPU, timedelta(seconds=_limit(until))
    host, port = str(said["host"]), int(said["port"])
    met = store or TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    group = make_pair_group(name, met, str(said["prefix"]), place, channel.address, limit)
    carrier = GroupCarrier(name, group, place, on, longest)
    until = time.monotonic() + limit.total_seconds()
    if place == 0:
        carrier.send([torch.ones(1, dtype=torch.uint8, device=on)], until)
    else:
        carrier.receive(1, until)
    return carrier
