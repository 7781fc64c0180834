"""How does a trainer publish its weights? `push` copies them into a slot and goes on; readers come when they like.

1. Each rank has a listener for data; that of the first rank, the lead, is the address and also grants versions.
2. A push is agreed on by all ranks. The lead chooses a slot that nobody reads, every rank copies its part there, and
   when all have done so the version can be read. The weights may change as soon as `push` returns.
3. A reader has a lease of its version. A slot with a lease is not written before the lease is `deadline` seconds old;
   then it is revoked, the reader finds another generation in the slot and discards what it has read.
4. Subscribers that die, hang or are refused are dropped. Nothing that they do makes a rank of the trainer wait longer.
5. With `delta` each rank compares its part with that of the version before, which is in the other slot. Readers on
   other hosts say which version they have and get what changed since.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._text import package_logger
from shardwise._torch import copy_each
from shardwise.checkpoint.changes import ChangeLog, Flags, Union, compare, encode_changes
from shardwise.checkpoint.digests import sum_box
from shardwise.checkpoint.state import Leaf, agree_on_state, flatten_state, make_leaf, torch_dtype
from shardwise.comm import Comm, agree, gather_values
from shardwise.comm.transports.device_memory import segment_memory
from shardwise.comm.transports.links import identify_host
from shardwise.geometry import Layout, LayoutError
from shardwise.sync.plan import AskedRead, Published, RankPlace, parse_read, read_description
from shardwise.sync.ports import Carrier, SocketCarrier, answer_for, first_line, pack_run
from shardwise.sync.session import (
    MAX_DESCRIPTION,
    Channel,
    Message,
    SyncError,
    SyncListener,
    is_loopback,
    write_token,
)
from shardwise.sync.slots import HEADER_BYTES, CopiesByAddress, VersionSlot
from shardwise.tensor.move import format_layout_text

_log = package_logger(__name__)
Keep: TypeAlias = Literal["auto", "host", "device"]
KEEP = ("auto", "host", "device")
ROUND_SECONDS = 5.0
_MAX_LISTS = 4
_LEAST_SHARE = 4  # of what is free on a GPU, so much more than two versions need
_CPU = torch.device("cpu")
_IDLE_SECONDS = 86400.0 * 20  # the longest wait that a socket takes


def tensors_of(state: object) -> dict[str, Tensor]:
    """The tensors of a module or a nested state by name."""
    if isinstance(state, nn.Module):
        state = state.state_dict(keep_vars=True)
    return flatten_state(state).tensors if not isinstance(state, Tensor) else {"": state}


class Member(NamedTuple):
    """A subscriber as the publisher sees it: its world, how many ranks, and the step that it has; None before one.

    >>> Member("server", ranks=2, step=10).step
    10
    """

    world: str
    ranks: int
    step: int | None


class Removed(NamedTuple):
    """A subscriber that is not served any more, and why.

    >>> Removed("server", rank=0, reason="it said goodbye").reason
    'it said goodbye'
    """

    world: str
    rank: int
    reason: str


@dataclass(eq=False)
class _Lease:
    slot: int
    since: float


@dataclass(eq=False)
class _Guest:
    """The control connection of a subscriber's lead."""

    channel: Channel
    world: str
    ranks: int
    planned: bool = False
    step: int | None = None
    seq: int = 0
    lease: _Lease | None = None


class _Version(NamedTuple):
    seq: int
    step: int
    slot: int


@dataclass(eq=False)
class _Desk:
    """What the lead knows of versions and subscribers; every thread that serves one shares it."""

    deadline: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    guests: list[_Guest] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    versions: dict[int, _Version] = field(default_factory=dict)  # by slot
    seq: int = 0
    slots: int = 2
    closed: bool = False

    @property
    def newest(self) -> _Version | None:
        return max(self.versions.values(), default=None)

    def leased(self) -> dict[int, float]:
        """The slots that are read, and since when the newest lease of each has been given."""
        found: dict[int, float] = {}
        for guest in self.guests:
            if guest.lease is not None:
                found[guest.lease.slot] = max(found.get(guest.lease.slot, 0.0), guest.lease.since)
        return found

    def choose_slot(self, patience: float) -> tuple[_Version, _Version | None]:
        """A slot for the next version: one that nobody reads, the oldest; else one that is revoked. And what it had."""
        with self.changed:
            until = time.monotonic() + patience
            while True:
                leased, now = self.leased(), time.monotonic()
                free = [s for s in range(self.slots) if s not in leased or now - leased[s] > self.deadline]
                free = free or ([min(leased, key=leased.__getitem__)] if now >= until else [])
                if free:
                    break
                self.changed.wait(min(until, min(leased.values()) + self.deadline) - now + 0.01)
            slot = min(free, key=lambda s: self.versions[s].seq if s in self.versions else 0)
            for guest in self.guests:
                if guest.lease is not None and guest.lease.slot == slot:
                    self._drop(guest, f"it read a version for more than {self.deadline:g} s")
            self.seq += 1
            return _Version(self.seq, 0, slot), self.versions.pop(slot, None)

    def publish(self, version: _Version) -> None:
        """Let a version be read."""
        with self.changed:
            self.versions[version.slot] = version
            self.changed.notify_all()

    def _drop(self, guest: _Guest, reason: str) -> None:
        guest.lease = None
        if guest in self.guests:
            self.guests.remove(guest)
            self.removed.append(Removed(guest.world, 0, reason))
            del self.removed[:-1000]
            _log.warning("subscriber %s is dropped: %s", guest.world, reason)
        guest.channel.close()
        self.changed.notify_all()

    def drop(self, guest: _Guest, reason: str) -> None:
        with self.changed:
            self._drop(guest, reason)

    def members(self) -> list[Member]:
        with self.changed:
            return [Member(g.world, g.ranks, g.step) for g in self.guests if g.planned]


class Publisher:
    """The publishing side of a link; made by `publish`, the same on every rank of the trainer.

    >>> import torch, shardwise
    >>> weights = {"w": torch.arange(4.0)}
    >>> link = shardwise.sync.publish(weights, "tcp://127.0.0.1:0", token="only-for-this-example")
    >>> link.push(step=1)
    >>> link.members, link.version
    ([], 1)
    >>> link.close()
    """

    def __init__(self, state: object, place: tuple[str, int], token: bytes | None, comm: Comm, **options: Any) -> None:
        self.comm, self._state = comm, state
        self.deadline: float = options["deadline"]
        self._delta: bool = options["delta"]
        self._keep: Keep = options["keep"]
        self._device = _CPU  # where slots are
        self.name: str = options["name"] or f"{socket.gethostname()}:{os.getpid()}"
        self.members: list[Member] = []
        """Subscribers, as of the last push or drain."""
        self.removed: list[Removed] = []
        """Subscribers that were dropped, with the reason, as of the last push or drain."""
        self.version: int | None = None
        """The step of the newest version."""
        self.problem: str | None = None
        """Why this rank's part of the newest version was dropped, if it was; only after `push(wait=False)`."""
        self._pushing = threading.Lock()
        self._writing: threading.Thread | None = None
        self._hook: Any = None
        self._lead = comm.rank == comm.ranks[0]
        self._desk = _Desk(self.deadline)
        self._slots: dict[int, VersionSlot] = {}
        self._copies = CopiesByAddress()
        self._last: tuple[int, int] | None = None  # slot and number of the version before
        self._places: list[_Place] = []
        self._changes: ChangeLog | None = None
        self._guard = threading.Lock()
        self._listener: SyncListener | None = None
        self._token_file: Any = None
        self._text, self._ready = "", threading.Event()
        self._published, self.address = self._describe(place, token)

    def _describe(self, place: tuple[str, int], token: bytes | None) -> tuple[Published, str]:
        """Agree on what is published and where the ranks are, and start to listen."""
        leaves, problem = self._leaves()
        epoch = secrets.token_hex(16)
        try:
            if self._lead and problem is None:
                token = self._listen(place, token, epoch)
        except (OSError, ValueError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)
            problem = f"{self._where} cannot listen at tcp://{place[0]}:{place[1]}: {text}; port 0 finds a free one"
        said = json.dumps({"token": token.hex(), "epoch": epoch, "name": self.name}) if self._lead and token else ""
        received = agree(
            self.comm,
            {"publish at": place, "deadline": self.deadline, "delta": self._delta},
            label="sync publish",
            problem=problem,
            payload=said.encode(),
        )
        given = json.loads(received[self.comm.ranks[0]])
        self._epoch, self.name = given["epoch"], given["name"]
        try:
            if not self._lead:
                self._listen(
                    (place[0] if is_loopback(place[0]) else _own_address(place), 0),
                    bytes.fromhex(given["token"]),
                    self._epoch,
                )
        except OSError as error:
            problem = f"{self._where} cannot listen: {error}"
        assert problem is not None or self._listener is not None
        port = 0 if self._listener is None else self._listener.port
        at = place[0] if self._lead or is_loopback(place[0]) else _own_address(place)
        card = [identify_host() or f"alone-{self.comm.rank}", self._listener.name if self._listener else None, at, port]
        _, tensors, addresses = agree_on_state(self.comm, {}, leaves, card, problem, "sync publish")
        first: dict[tuple[Any, ...], int] = {}
        kinds = {t.name: (t.dtype, t.layout) for t in tensors}
        memory = {leaf.name: _memory_key(leaf) for leaf in leaves}
        tied = [first.setdefault((memory.get(t.name, t.name), t.dtype, t.layout), i) for i, t in enumerate(tensors)]
        everyone = gather_values(self.comm, tied, label="sync publish: tied tensors")
        if any(other != tied for other in everyone.values()):
            tied = list(range(len(tensors)))
        found_places = [RankPlace(host, name, (ip, number)) for host, name, ip, number in addresses]
        listed = dict(zip(self.comm.ranks, found_places, strict=True))
        nowhere = RankPlace("", None, ("", 0))  # of ranks that are not the comm's
        places = tuple(listed.get(rank, nowhere) for rank in range(1 + max(self.comm.ranks)))
        self._text = Published(self.name, kinds, tuple(tied), places, self._delta).to_text()
        if len(self._text) > MAX_DESCRIPTION:
            raise LayoutError(f"the description of {len(kinds)} tensors has more than {MAX_DESCRIPTION} bytes")
        found = read_description(self._text)
        self._slot_bytes = int(found.slot_bytes[self.comm.rank])
        self._places = _own_places(found, self.comm.rank)
        self._numbers = {place.offset: number for number, place in enumerate(self._places)}
        self._changes = ChangeLog(max(1 << 20, self._slot_bytes // 4)) if self._delta else None
        self._ready.set()
        host, number = listed[self.comm.ranks[0]].address
        return found, f"tcp://{f'[{host}]' if ':' in host else host}:{number}"

    @property
    def _where(self) -> str:
        return f"publisher {self.name!r} rank {self.comm.rank}"

    def _leaves(self) -> tuple[list[Leaf], str | None]:
        """The tensors as they are now, and what is wrong with them."""
        try:
            leaves = [make_leaf(name, tensor, self.comm) for name, tensor in tensors_of(self._state).items()]
        except Exception as error:  # all ranks hear of it, whatever it is
            return [], str(error) or type(error).__name__
        pending = [leaf.name for leaf in leaves if leaf.layout.pending is not None]
        if pending:
            return [], f"{pending[0]} has a pending reduction; redistribute it first, then publish"
        kind = type(self._state).__name__
        return (
            leaves,
            None if leaves else f"there are no tensors in a {kind}; publish a module or a nested dict of tensors",
        )

    def _listen(self, place: tuple[str, int], token: bytes | None, epoch: str) -> bytes:
        if token is None:
            # the port is known once something listens there, and nobody can answer before the token is written
            token, waiting = b"", place
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(waiting)
                place = (place[0], probe.getsockname()[1])
            token, self._token_file = write_token(place[1])
        self._listener = SyncListener(place, token, {"epoch": epoch}, self._serve, local=True)
        return token

    # What is served, in threads of the listener.

    def _serve(self, channel: Channel) -> None:
        if not self._ready.wait(self.deadline):
            raise ConnectionError("the ranks of the publisher have not agreed on what they publish")
        if channel.peer.get("role") == "control":
            if not self._lead:
                raise ConnectionError("versions are granted by the first rank")
            self._serve_control(channel)
            return
        lists: dict[int, list[AskedRead]] = {}
        carrier: Carrier = SocketCarrier(channel)
        try:
            while True:
                message = channel.receive(time.monotonic() + _IDLE_SECONDS, MAX_DESCRIPTION)
                until = time.monotonic() + self.deadline
                match message["do"]:
                    case "slots":
                        self._send_slots(channel, until)
                    case "list":
                        if len(lists) >= _MAX_LISTS:
                            lists.pop(next(iter(lists)))
                        lists[message["list"]] = [parse_read(row, self._slot_bytes) for row in message["rows"]]
                        channel.send({"ok": True}, until)
                    case "carry":
                        carrier.close()
                        carrier = self._find_carrier(channel, message, until) or SocketCarrier(channel)
                    case "read":
                        self._send_list(channel, carrier, lists[message["list"]], message, until)
                    case "digest":
                        self._send_sums(channel, lists[message["list"]], message["slot"], message["generation"], until)
                    case other:
                        raise ConnectionError(f"an unknown request {other!r:.40}")
        finally:
            carrier.close()

    def _find_carrier(self, channel: Channel, asked: Message, until: float) -> Carrier | None:
        if not 0 < int(asked["longest"]) <= max(self._slot_bytes, 1 << 20):
            raise ConnectionError(f"a reader asks for runs of {asked['longest']!r:.20} bytes")
        return answer_for(channel, asked, self._device, until)

    def _send_slots(self, channel: Channel, until: float) -> None:
        with self._guard:
            found = {number: slot for number, slot in self._slots.items() if slot.descriptor is not None}
            sizes = [[number, slot.nbytes, slot.on_device] for number, slot in found.items()]
            copies = [os.dup(slot.descriptor) for slot in found.values() if slot.descriptor is not None]
        try:
            channel.send({"slots": sizes if channel.is_local else []}, until)
            if channel.is_local and copies:
                channel.send_descriptors(copies, until)
        finally:
            for copy in copies:
                os.close(copy)

    def _send_list(
        self, channel: Channel, carrier: Carrier, rows: Sequence[AskedRead], message: Message, until: float
    ) -> None:
        """Send what a reader has listed out of a slot, then whether the slot was whole all the time.

        If the reader has an earlier version and it is known what changed since, only that is sent.
        """
        generation = message["generation"]
        with self._guard:
            slot = self._slots.get(message["slot"])
        whole = slot is not None and slot.wait_whole(generation, until)
        changes = None
        if self._changes is not None and message.get("since"):
            changes = self._changes.since(int(message["since"]), generation // 2)
        channel.send({"whole": whole, "delta": changes is not None}, until)
        if slot is None or not whole:
            return
        at = iter(rows)
        for count in message["runs"]:
            if changes is None:
                carrier.send(pack_run(islice(at, int(count)), slot.memory, carrier.longest), until)
                continue
            for row in islice(at, int(count)):
                channel.send_raw(self._encode(slot.memory, row, changes), until)
        channel.send({"whole": slot.generation == generation}, until)

    def _encode(self, memory: Tensor, row: AskedRead, changes: Union) -> memoryview:
        """What changed of what a reader has listed: the number of bytes, then these."""
        number = self._numbers.get(row.offset)
        kind = None if number is None else (self._places[number].shape, self._places[number].dtype)
        if number is None or kind != (row.shape, torch_dtype(row.dtype)) or row.scale is not None:
            raise ValueError("a reader asks for changes of what is not a piece of this rank")
        flags = changes.flags(number, torch.Size(row.shape).numel())
        data = b""
        if flags is not None:
            seen = torch.from_numpy(flags).view(row.shape)[row.index].permute(row.order).contiguous().view(-1)
            if bool(seen.any()):
                data = encode_changes(row.packed(memory).reshape(-1), seen.numpy()).tobytes()
        return memoryview(len(data).to_bytes(8, "little") + data)

    def _send_sums(
        self, channel: Channel, rows: Sequence[AskedRead], number: int, generation: int, until: float
    ) -> None:
        """Send the sums of what a reader has listed, for it to compare with what it has."""
        with self._guard:
            slot = self._slots.get(number)
        sums: list[list[str]] = []
        if slot is not None and slot.wait_whole(generation, until):
            for row in rows:
                packed = row.packed(slot.memory)
                sums.append([f"{lane:x}" for lane in sum_box(packed, (0,) * packed.ndim, packed.shape)])
        channel.send({"whole": slot is not None and slot.generation == generation, "sums": sums}, until)

    def _serve_control(self, channel: Channel) -> None:
        guest = _Guest(channel, str(channel.peer.get("world"))[:200], int(channel.peer.get("size", 1)))
        desk = self._desk
        with desk.changed:
            desk.guests.append(guest)
        reason = "the connection ended"
        try:
            channel.send({"description": self._text}, time.monotonic() + self.deadline)
            while True:
                message = channel.receive(time.monotonic() + _IDLE_SECONDS)
                if message["do"] == "bye":
                    reason = str(message.get("reason", "it said goodbye"))[:500]
                    break
                channel.send(self._answer(guest, message), time.monotonic() + self.deadline)
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = f"the connection ended: {error}"
        finally:
            desk.drop(guest, reason)

    def _answer(self, guest: _Guest, message: Message) -> Message:
        desk = self._desk
        match message["do"]:
            case "planned":
                with desk.changed:
                    guest.planned = True
                    desk.changed.notify_all()
                return {"ok": True}
            case "take":
                return self._grant(guest, int(message["have"]), min(float(message["wait"]), ROUND_SECONDS))
            case "again":
                return self._grant_again(guest, int(message["seq"]))
            case "took" | "release":
                with desk.changed:
                    lease, guest.lease = guest.lease, None
                    if message["do"] == "took" and lease is not None:
                        guest.step, guest.seq = int(message["step"]), int(message["seq"])
                    desk.changed.notify_all()
                return {"ok": lease is not None}
            case other:
                raise ConnectionError(f"an unknown request {other!r:.40}")

    def _grant(self, guest: _Guest, have: int, wait: float) -> Message:
        """The newest version if the subscriber has it not, with a lease; or nothing after some waiting."""
        desk, until = self._desk, time.monotonic() + wait
        with desk.changed:
            while (version := desk.newest) is None or version.seq <= have:
                left = until - time.monotonic()
                if left <= 0 or desk.closed:
                    return {"version": None}
                desk.changed.wait(left)
            guest.lease = _Lease(version.slot, time.monotonic())
            return {"version": [version.seq, version.step, version.slot]}

    def _grant_again(self, guest: _Guest, seq: int) -> Message:
        """A lease of a version that the subscriber has, if it is kept still."""
        with self._desk.changed:
            version = next((v for v in self._desk.versions.values() if v.seq == seq), None)
            if version is None:
                return {"version": None}
            guest.lease = _Lease(version.slot, time.monotonic())
            return {"version": list(version)}

    # What the trainer calls.

    def push(self, step: int, *, wait: bool = True) -> None:
        """Make the weights as they are now the version `step`; all ranks call it. It never waits for subscribers.

        When it returns the weights are copied, so they may change. With `wait=False` they are copied in the back, and
        every `step()` of an optimizer of torch waits until they are; call `guard()` before you change them otherwise.
        A version whose weights were written to while they were copied is dropped, and `problem` says so.
        """
        with self._pushing:  # by one thread at a time
            self._push(step, wait)

    def _push(self, step: int, wait: bool) -> None:
        self.guard()
        problem = self._problem_of(step)
        leaves, wrong = self._leaves()
        problem = problem or wrong or self._difference(leaves)
        said: Mapping[str, Any] = {}
        replaced = None
        if self._lead and problem is None:
            chosen, replaced = self._desk.choose_slot(min(self.deadline, self.comm.timeout / 2))
            said = {"slot": chosen.slot, "seq": chosen.seq, **self._news()}
        try:
            received = agree(
                self.comm, {"step": step}, label="sync push", problem=problem, payload=json.dumps(said).encode()
            )
        except ValueError:
            if replaced is not None:
                self._desk.publish(replaced)  # nothing was written
            raise
        said = json.loads(received[self.comm.ranks[0]])
        self._take_news(said)
        slot, seq = said["slot"], said["seq"]
        is_new = slot not in self._slots
        failure = None
        try:
            if is_new:
                with self._guard:
                    self._slots[slot] = self._make_slot(leaves)
            self._slots[slot].generation = 2 * seq - 1
            if wait:
                self._write(leaves, slot, seq)
                self._slots[slot].generation = 2 * seq
        except Exception as error:  # of any kind: all ranks hear of it
            failure = str(error) or type(error).__name__
        if wait or is_new:
            self._raise_failures(step, slot if is_new else None, failure)
        self.version = step
        if wait:
            self._end_write(step, slot, seq)
        else:
            self._write_in_back(leaves, step, slot, seq)

    def _make_slot(self, leaves: Sequence[Leaf]) -> VersionSlot:
        """A slot on the GPU that has all parts of this rank, where others can open its memory and there is room."""
        devices = {part.device for leaf in leaves for part in leaf.locals if part.numel()}
        device = devices.pop() if len(devices) == 1 else _CPU
        if self._keep != "host" and segment_memory(device) is not None:
            free = _free_bytes(device) if self._keep == "auto" and not self._slots else sys.maxsize
            try:
                if 2 * self._slot_bytes > free // _LEAST_SHARE:
                    raise MemoryError(f"two versions would take more than a quarter of its {free} free bytes")
                found = VersionSlot(self._slot_bytes, device)
                self._device = device
                return found
            except (OSError, RuntimeError, MemoryError) as error:
                if self._keep == "device":
                    raise
                self._keep = "host"
                _log.info(
                    "%s keeps versions in memory of the host, not of %s: %s", self._where, device, first_line(error)
                )
        elif self._keep == "device":
            raise ValueError(f"keep='device' needs all tensors of a rank on one GPU, and they are on {device}")
        return VersionSlot(self._slot_bytes)

    def _raise_failures(self, step: int, new_slot: int | None, failure: str | None) -> None:
        """Raise on all ranks if one of them could not write; a new slot is then new for all of them once more."""
        failures = {r: f for r, f in gather_values(self.comm, failure, label="sync push: written").items() if f}
        if failures:
            slot = None if new_slot is None else self._slots.pop(new_slot, None)
            self._copies.clear()
            if slot is not None:
                slot.close()
            raise SyncError(
                f"publisher {self.name!r}: step {step} was not published: "
                + "; ".join(f"rank {rank}: {text}" for rank, text in list(failures.items())[:4])
            )

    def _end_write(self, step: int, slot: int, seq: int) -> None:
        """This rank's part is whole: readers may take it, and find out by themselves where another rank's is not."""
        self._last, self.problem = (slot, seq), None
        self._slots[slot].generation = 2 * seq
        if self._lead:
            self._desk.publish(_Version(seq, step, slot))

    def _write_in_back(self, leaves: Sequence[Leaf], step: int, slot: int, seq: int) -> None:
        """Copy this rank's part in a thread, for which optimizers wait; a part that changes meanwhile is dropped."""
        parts = [part for leaf in leaves for part in leaf.locals]
        for device in {part.device for part in parts if part.device.type not in ("cpu", "meta")}:
            torch.accelerator.current_stream(device).synchronize()
        before = [_count_writes(part) for part in parts]

        def run() -> None:
            try:
                self._write(leaves, slot, seq)
                problem = None
            except Exception as error:  # of any kind: it is said at the next push
                problem = str(error)
            if before != [_count_writes(part) for part in parts]:
                problem = "weights were written to while they were copied; call guard() before"
            if problem is None:
                self._end_write(step, slot, seq)
                return
            self._last, self._slots[slot].generation = None, 0
            self.problem = f"{self._where}: step {step} was not published: {problem}"
            _log.warning("%s", self.problem)

        self._writing = threading.Thread(target=run, name="shardwise-sync-push", daemon=True)
        self._writing.start()
        if self._hook is None:
            me = weakref.ref(self)
            self._hook = register_optimizer_step_pre_hook(lambda *_: _guard_link(me))

    def guard(self) -> None:
        """Wait until the weights of a `push(wait=False)` are copied, so that they may change."""
        writing = self._writing
        if writing is not None:
            writing.join()

    def _problem_of(self, step: object) -> str | None:
        if self._listener is None:
            return f"{self._where}: the link is closed"
        if self._listener.is_inherited:
            return f"{self._where}: the link was made before this process was forked; publish in one of them only"
        if type(step) is not int:
            return f"{self._where}: a step is an int, got {step!r:.40}"
        return None

    def _difference(self, leaves: Sequence[Leaf]) -> str | None:
        """What is not as it was described; the weights of a link keep their names, types and layouts."""
        described = self._published.tensors
        for leaf in leaves:
            known = described.get(leaf.name)
            if known is not None and known[0] is leaf.dtype and known[1] is leaf.layout:
                continue
            if known is None or known[0] != leaf.dtype or not _is_laid_out(leaf, known[1]):
                now = f"{leaf.dtype}{format_layout_text(leaf.layout)}"
                then = "not there" if known is None else f"{known[0]}{format_layout_text(known[1])}"
                return (
                    f"{leaf.name} is not what was published: it is {now}, and was {then}; publish again after names, "
                    "types or layouts change"
                )
        gone = sorted(described.keys() - {leaf.name for leaf in leaves}) if len(leaves) < len(described) else []
        if gone:
            return f"{gone[0]} was published and is not there any more; publish again after names change"
        return None

    def _write(self, leaves: Sequence[Leaf], number: int, seq: int) -> None:
        """Copy this rank's part of the state into a slot."""
        slot = self._slots[number]
        by_name = {leaf.name: leaf for leaf in leaves}
        before = None if self._last is None else self._slots[self._last[0]]
        last, self._last = self._last, None  # until all ranks have written
        changed: dict[int, Flags] = {}
        pieces = self._pieces_of(slot)
        parts = [by_name[place.name].locals[place.part] for place in self._places]
        parts = [
            part if part.shape == piece.shape else part[place.where]
            for part, piece, place in zip(parts, pieces, self._places, strict=True)
        ]
        if self._changes is None or before is None:
            if slot.on_device is None:
                copy_each(pieces, parts)
            else:
                self._copies.find(number, parts, lambda: (pieces, parts))()
        else:
            for at, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
                old = piece.clone() if before is slot else self._pieces_of(before)[at]
                piece.copy_(part)
                changed[at] = compare(piece, old)
        if self._changes is not None and last is not None:
            self._changes.add(seq, last[1], changed)

    def _pieces_of(self, slot: VersionSlot) -> list[Tensor]:
        """Where each piece of this rank is in a slot."""
        if not slot.pieces:
            slot.pieces = [place.view(slot.memory) for place in self._places]
        return slot.pieces

    def _news(self) -> Mapping[str, Any]:
        with self._desk.changed:
            return {"removed": self._desk.removed[-100:], "members": self._desk.members()}

    def _take_news(self, said: Mapping[str, Any]) -> None:
        self.members = [Member(*each) for each in said["members"]]
        self.removed = [Removed(*each) for each in said["removed"]]

    def drain(self, timeout: float) -> list[str]:
        """Wait until every connected subscriber has the newest version; the worlds that have it, on all ranks."""
        self.guard()
        until = time.monotonic() + timeout
        while True:
            done, said = True, ""
            if self._lead:
                done = self._wait_for_members(min(until, time.monotonic() + ROUND_SECONDS))
                done = done or time.monotonic() >= until
                said = json.dumps({"done": done, **self._news()})
            received = agree(self.comm, {"drain": timeout}, label="sync drain", payload=said.encode())
            found = json.loads(received[self.comm.ranks[0]])
            self._take_news(found)
            if found["done"]:
                return [member.world for member in self.members if member.step == self.version]

    def _wait_for_members(self, until: float) -> bool:
        desk = self._desk
        with desk.changed:
            newest = desk.newest
            while newest is not None and any(g.planned and g.seq < newest.seq for g in desk.guests):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                desk.changed.wait(left)
        return True

    def describe(self) -> str:
        """The link in words: what is published, what a version costs, who reads it."""
        count = len(self._published.tensors)
        lines = [
            f"publisher {self.name!r} at {self.address}: {count} tensors on {len(self.comm.ranks)} ranks",
            f"a version takes {self._slot_bytes - HEADER_BYTES} bytes of "
            f"{'host memory' if self._device.type == 'cpu' else str(self._device)} on rank {self.comm.rank}, and "
            f"up to {self._desk.slots} versions are kept",
        ]
        lines += ["readers on other hosts get what changed since the version that they have"] if self._delta else []
        lines += [f"subscriber {m.world!r}: {m.ranks} ranks, step {m.step}" for m in self.members]
        return "\n".join(lines)

    def close(self) -> None:
        """Stop publishing; subscribers keep what they have. Each rank may call it alone."""
        listener, self._listener = self._listener, None
        if listener is None or listener.is_inherited:
            return
        self.guard()
        if self._hook is not None:
            self._hook.remove()
        with self._desk.changed:
            self._desk.closed = True
            self._desk.changed.notify_all()
        listener.close()
        with self._guard:
            for slot in self._slots.values():
                slot.close()
        if self._token_file is not None:
            with suppress(OSError):
                self._token_file.unlink()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_bytes(device: torch.device) -> int:
    """What a GPU has free, and what torch keeps of it unused."""
    if device.type != "cuda":
        return sys.maxsize
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _count_writes(part: Tensor) -> int:
    """torch's count of writes to a tensor; tensors of inference mode have none."""
    return 0 if part.is_inference() else part._version


def _guard_link(link: weakref.ref[Publisher]) -> None:
    found = link()
    if found is not None:
        found.guard()


def _is_laid_out(leaf: Leaf, layout: Layout) -> bool:
    """Whether a tensor is still in a layout; plain ones have their shape only."""
    return leaf.layout.shape == layout.shape if leaf.plain else leaf.layout == layout


class _Place(NamedTuple):
    """A piece that this rank keeps: of which tensor and local part, which box, and where it is in the slot."""

    name: str
    dtype: torch.dtype
    part: int
    where: tuple[slice, ...]
    shape: tuple[int, ...]
    offset: int

    def view(self, memory: Tensor) -> Tensor:
        """The piece in the memory of a slot."""
        count = torch.Size(self.shape).numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + count].view(self.dtype).view(self.shape)


def _own_places(published: Published, rank: int) -> list[_Place]:
    """What a rank keeps, in the order of the tensors."""
    found = []
    for number, (name, (dtype, layout)) in enumerate(published.tensors.items()):
        if published.tied[number] != number:
            continue
        kept, table = published.kept[number], layout.table
        for row, offset in zip(kept.rows.tolist(), kept.offsets.tolist(), strict=True):
            if int(table.ranks[row]) == rank:
                shape = tuple(table.sizes[row].tolist())
                at = table.local_offsets[row].tolist()
                where = tuple(slice(o, o + n) for o, n in zip(at, shape, strict=True))
                found.append(_Place(name, torch_dtype(dtype), int(table.slots[row]), where, shape, offset))
    return found


def _own_address(place: tuple[str, int]) -> str:
    """The address of this machine by which it reaches another one; nothing is sent to find out."""
    with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place[0], place[1] or 9))
        return str(probe.getsockname()[0])


def _memory_key(leaf: Leaf) -> tuple[Any, ...]:
    """Equal for tensors that share all of their memory on this rank."""
    if any(part.numel() == 0 for part in leaf.locals) or not leaf.locals:
        return (leaf.name,)
    return tuple((part.data_ptr(), tuple(part.shape), part.stride(), part.device) for part in leaf.locals)
