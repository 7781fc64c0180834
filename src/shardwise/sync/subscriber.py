"""How does a server take over weights? All tensors of one version, or nothing.

1. The lead, the first rank, asks the publisher for a version that is newer than the one it has, and gets a lease of it.
   All ranks hear of it in the agreement that each pull makes anyway.
2. Every rank reads what it lacks, by a plan made once: out of the memory of ranks on its host, over sockets from
   others. Before and after, the slot says that the version in it is whole.
   A staged copy of an earlier version needs what changed since only, where the publisher knows that.
3. The ranks report to each other. Only if all have everything is it taken over: by default staged copies go into the
   tensors in place; "swap" exchanges their memory; "in_place" has read into them, with no memory and no way back.
4. If the publisher dies or restarts, the last whole version stays, the state is "waiting", and every pull tries the
   address again.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._text import package_logger
from shardwise._torch import copy_each
from shardwise.checkpoint.changes import compare, decode_changes, most_bytes, write_at
from shardwise.checkpoint.digests import Sums, sum_box
from shardwise.checkpoint.state import make_leaf, torch_dtype
from shardwise.comm import Comm, agree, gather_raw, gather_values
from shardwise.comm.transports.links import identify_host
from shardwise.sync.plan import (
    Filled,
    Published,
    Quantized,
    Read,
    ReadPlan,
    SentScales,
    Wanted,
    join_codes,
    list_reads,
    plan_reads,
    quantize_blocks,
    read_description,
    resolve_map,
    share_reads,
)
from shardwise.sync.ports import (
    SOCKETS,
    Carrier,
    MappedSlots,
    PortError,
    SocketCarrier,
    ask_for,
    cut_runs,
    list_ways,
    place_in_run,
)
from shardwise.sync.publisher import ROUND_SECONDS, tensors_of
from shardwise.sync.session import (
    MAX_DESCRIPTION,
    TOKEN_VARIABLE,
    Channel,
    Message,
    RefusedError,
    SyncError,
    connect,
    read_token,
)
from shardwise.sync.slots import MappedSlot

_log = package_logger(__name__)
_RETRY_SECONDS = 0.1
_ROWS = torch.contiguous_format
Apply: TypeAlias = Literal["stage", "swap", "in_place"]
APPLY = ("stage", "swap", "in_place")
T = TypeVar("T")


def run_or_describe(run: Callable[[], T]) -> tuple[T | None, str | None]:
    """What a call returns, or what was wrong: with values, with memory, or in code that was passed."""
    try:
        return run(), None
    except Exception as error:  # all ranks hear of it, whatever it is
        return None, str(error) or type(error).__name__


class _StaleError(SyncError):
    """The version was overwritten while it was read."""


@dataclass(frozen=True)
class Verification:
    """Whether what is served equals what was pushed: `different` names tensors with ranks and boxes of local tensors.

    >>> report = Verification(step=7, nbytes=1024, different=("w on rank 1: [0:4]",))
    >>> bool(report), str(report)
    (False, 'step 7: 1 of the boxes read differ from what was pushed: w on rank 1: [0:4]')
    """

    step: int
    nbytes: int
    different: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.different

    def __str__(self) -> str:
        if not self.different:
            return f"step {self.step}: {self.nbytes} bytes are those that were pushed"
        shown = "; ".join(self.different[:4])
        return f"step {self.step}: {len(self.different)} of the boxes read differ from what was pushed: {shown}"


@dataclass(eq=False)
class _Source:
    """A rank of the publisher that this rank reads from, and the way on which bytes come."""

    channel: Channel
    port: MappedSlots | Carrier
    runs: list[int]
    """How many reads travel together."""
    listed: bool = False

    def close(self) -> None:
        self.port.close()
        self.channel.close()


class Subscriber:
    """The subscribing side of a link; made by `subscribe`, the same on every rank of the server.

    >>> import torch, shardwise
    >>> token, served = "only-for-this-example", {"w": torch.zeros(4)}
    >>> with shardwise.sync.publish({"w": torch.arange(4.0)}, "tcp://127.0.0.1:0", token=token) as trainer:
    ...     link = shardwise.sync.subscribe(served, trainer.address, token=token)
    ...     trainer.push(step=7)
    ...     link.pull()
    7
    >>> served["w"], link.version, link.state
    (tensor([0., 1., 2., 3.]), 7, 'current')
    >>> link.close()
    """

    def __init__(self, state: object, place: tuple[str, int], token: bytes | None, comm: Comm, **options: Any) -> None:
        self.comm, self._place, self._token = comm, place, token
        self.deadline: float = options["deadline"]
        self._patience = min(self.deadline, comm.timeout / 3)  # other ranks wait for this one meanwhile
        self.apply: Apply = options["apply"]
        self.name: str = options["name"] or f"{socket.gethostname()}:{os.getpid()}"
        self.version: int | None = None
        """The step of the version that the tensors have; None before the first."""
        self.state = "waiting"
        """"waiting" for a publisher or a version, "current", "broken" after a failed pull in place, or "closed"."""
        self.problem: str | None = None
        """What the last attempt to read met, with the names of the world and the rank."""
        self.read_bytes = 0
        """What this rank read for the last version: in shared memory, or as it travelled."""
        self._limit: int = options["max_buffer_bytes"]
        self._names, self._after, self._verify = options["names"], options["after"], options["verify"]
        self._lead = comm.rank == comm.ranks[0]
        self._host = identify_host() or f"alone-{comm.rank}"
        self._using, self._process = threading.Lock(), os.getpid()
        self._incarnation = secrets.token_hex(16)
        self._control: Channel | None = None
        self._sources: dict[int, _Source] = {}
        self._transport: str = options["transport"]
        self._left_out: dict[int, dict[str, str]] = {}
        """By owner the ways that do not work, and why."""
        self._epoch, self._seq, self._text = "", 0, ""
        self._published: Published | None = None
        self._plan, self._rounds = ReadPlan({}, ()), 0
        self._own: dict[int, tuple[list[Read], int]] = {}
        """By owner what this rank reads itself, and how many bytes that is."""
        self._given = state
        self._wanted: list[Wanted] = []
        self._staging: list[tuple[Tensor, ...]] = []
        self._wide: dict[tuple[int, int], Tensor] = {}
        """What local tensors are quantized from, by tensor and part."""
        self._wide_seq = 0  # the number of the version that these have; 0: unknown
        self._staged = 0  # the number of the version that the staged copies have; 0: unknown
        problem = None
        if not callable(state) or isinstance(state, nn.Module):
            found, problem = run_or_describe(lambda: self._find_wanted(state))
            self._wanted = found or []
        agree(
            self.comm,
            {"subscribe to": place, "apply": self.apply, "verify": self._verify, "deadline": self.deadline},
            label="sync subscribe",
            problem=problem,
        )
        self._meet(time.monotonic() + self.deadline)

    @property
    def _where(self) -> str:
        return f"subscriber {self.name!r} rank {self.comm.rank}"

    @property
    def _address(self) -> str:
        return f"tcp://{self._place[0]}:{self._place[1]}"

    def _find_wanted(self, state: object) -> list[Wanted]:
        wanted = []
        for name, tensor in tensors_of(state).items():
            leaf = make_leaf(name, tensor, self.comm)
            if leaf.layout.pending is not None:
                raise ValueError(f"{name} has a pending reduction; redistribute it first")
            if any(n > 1 and not s for part in leaf.held for n, s in zip(part.shape, part.stride(), strict=True)):
                raise ValueError(f"{name} has elements that share memory; pass a tensor of its own, x.clone()")
            wanted.append(Wanted(name, leaf.layout, torch_dtype(leaf.dtype), leaf.held, leaf.plain))
        if not wanted:
            raise ValueError(
                f"there are no tensors to fill in a {type(state).__name__}; pass a module or a nested dict of tensors"
            )
        return wanted

    # Meeting the publisher.

    def _meet(self, until: float) -> None:
        """Connect for the first time; raises on all ranks if there is no publisher, or if it has other tensors."""
        while True:
            said = self._call(until) if self._lead else {}
            said["last"] = time.monotonic() >= until
            found = self._share("sync subscribe: meet", said)
            if "description" in found:
                self._adopt(found)
                return
            lead = f"subscriber {self.name!r} rank {self.comm.ranks[0]}"
            if found.get("refused"):
                raise RefusedError(f"{lead}: refused at {self._address}: {found['problem']}")
            if found["last"]:
                raise SyncError(
                    f"{lead}: no publisher at {self._address} within {self.deadline:g} s: {found['problem']}; call "
                    "shardwise.sync.publish there, or pass a longer deadline="
                )

    def _share(self, label: str, said: Mapping[str, Any], **alike: object) -> Message:
        """What the lead says, on all ranks; arguments must be alike on all of them."""
        text = json.dumps(said) if self._lead else ""
        received = agree(self.comm, alike, label=label, payload=text.encode())
        found: Message = json.loads(received[self.comm.ranks[0]])
        return found

    def _call(self, until: float) -> Message:
        """Connect to the publisher's lead, again and again for one round; what it says of itself, or a problem."""
        round_end, problem = min(until, time.monotonic() + ROUND_SECONDS), "nothing was tried"
        while True:
            try:
                token = self._token if self._token is not None else read_token(self._place[1])
                self._control = self._connect(self._place, "control", token, until)
                self._control_token = token
                text = self._control.receive(time.monotonic() + self._patience, MAX_DESCRIPTION + 4096)["description"]
                return {"description": text, "epoch": self._control.peer["epoch"], "token": token.hex()}
            except RefusedError as error:
                return {"problem": str(error), "refused": True}
            except FileNotFoundError:
                problem = (
                    "no token was passed, and no publisher of this user wrote one; pass the publisher's token= or "
                    f"set {TOKEN_VARIABLE}"
                )
            except TimeoutError as error:
                self._drop_control()
                problem = problem if problem != "nothing was tried" else str(error)  # what the last full attempt met
            except (OSError, KeyError) as error:
                self._drop_control()
                problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
            if time.monotonic() >= round_end:
                return {"problem": problem}
            time.sleep(min(_RETRY_SECONDS, max(0.0, round_end - time.monotonic())))

    def _connect(self, place: tuple[str, int] | str, role: str, token: bytes, until: float) -> Channel:
        hello = {"role": role, "world": self.name, "rank": self.comm.rank, "size": len(self.comm.ranks)}
        return connect(place, token, {**hello, "incarnation": self._incarnation}, until)

    def _adopt(self, said: Message) -> None:
        """Take over what the publisher describes: plan, allocate, report; raises on all ranks if it does not fit."""
        self._drop_sources()
        self._left_out.clear()
        self._data_token = bytes.fromhex(said["token"])
        same = said["description"] == self._text and said["epoch"] == self._epoch
        problem = None
        if said["description"] != self._text or self._published is None:
            _, problem = run_or_describe(lambda: self._plan_all(said["description"]))
        found = gather_values(self.comm, problem, label="sync subscribe: plan")
        refused = "; ".join(f"rank {rank}: {text}" for rank, text in list(found.items())[:4] if text)
        if refused:
            self._text = ""
            if self._lead and self._control is not None:
                with suppress(OSError):
                    self._control.send({"do": "bye", "reason": refused[:500]}, time.monotonic() + 1.0)
                self._drop_control()
            raise RefusedError(f"subscriber {self.name!r} does not fit the publisher at {self._address}: {refused}")
        if said["description"] != self._text:
            self._share_reads()
        self._text, self._epoch = said["description"], said["epoch"]
        if not same:
            self._seq = self._staged = 0
        if self._lead:
            with suppress(OSError):
                self._ask({"do": "planned"})

    def _publisher_name(self) -> str:
        return repr(self._published.world) if self._published is not None else "of other tensors"

    def _plan_all(self, text: str) -> None:
        published = read_description(text)
        types = published.types
        if callable(self._given) and not isinstance(self._given, nn.Module):
            self._wanted, self._staging = self._find_wanted(self._given(types)), []
        state_map = resolve_map(self._names(types) if callable(self._names) else self._names, types)
        rank = self.comm.ranks.index(self.comm.rank)
        whole = not published.delta or self.apply != "stage"  # changes of values are fewer bytes than all codes
        plan = plan_reads(
            published, state_map, self._wanted, self.comm.rank, self._host, self._limit, takes_codes=whole
        )
        _log.info("%s (number %d) reads %d bytes from %s", self._where, rank, plan.nbytes, list(plan.reads))
        if not self._staging:
            self._staging = [
                tuple(torch.zeros_like(part) if self.apply != "in_place" else part for part in want.parts)
                for want in self._wanted
            ]
        self._wide = {
            (each.target, each.part): torch.zeros_like(self._wanted[each.target].parts[each.part], dtype=each.wide)
            for each in plan.quantized
        }
        self._published, self._plan = published, plan
        self._targets = [part for want in self._wanted for part in want.parts]
        self._forms = [(part.shape, part.dtype) for part in self._targets]
        self._infers = any(part.is_inference() for part in self._targets)

    def _share_reads(self) -> None:
        """Let ranks of this host that need the same of other hosts read it once."""
        assert self._published is not None
        near = [r for r, at in enumerate(self._published.places) if at.host == self._host and at.name is not None]
        said = f"{self._host}\n{list_reads(self._plan, near)}".encode()
        everyone = gather_raw(self.comm, said, label="sync subscribe: reads")
        listed = {rank: text.decode().partition("\n") for rank, text in everyone.items()}
        lists = {rank: text for rank, (host, _, text) in listed.items() if host == self._host}
        limit = sys.maxsize if self._takes_strides else self._limit
        self._plan = share_reads(self._plan, self.comm.rank, lists, near, limit)
        own = {owner: [r for r in reads if not r.is_passed] for owner, reads in self._plan.reads.items()}
        self._own = {owner: (reads, sum(read.sent_bytes for read in reads)) for owner, reads in own.items()}
        rounds = gather_values(self.comm, len(self._plan.gives), label="sync subscribe: rounds")
        self._rounds = max(rounds.values())

    @property
    def _takes_strides(self) -> bool:
        return self.comm.capabilities.takes_strides or self.comm.capabilities.reads_peers

    # Pulling.

    def pull(self, timeout: float | None = None) -> int | None:
        """Take over the newest version if it is newer than the one here; all ranks call it.

        Returns its step, or None if there is none within `timeout` seconds (by default the link's deadline; 0 only
        looks). While the publisher is away `state` is "waiting", and the tensors stay as they are.
        """
        if self.state == "closed":
            raise SyncError(f"{self._where}: the link is closed")
        if self._process != os.getpid():
            raise SyncError(
                f"{self._where}: the link was made before this process was forked; subscribe after the fork"
            )
        with self._using:  # by one thread at a time
            return self._pull(timeout, time.monotonic() + (self.deadline if timeout is None else timeout))

    def _pull(self, timeout: float | None, until: float) -> int | None:
        while True:
            said: Message = {}
            if self._lead:
                said = self._look(until)
                said["last"] = time.monotonic() >= until
            found = self._share("sync pull: look", said, timeout=timeout)
            if "description" in found:
                try:
                    self._adopt(found)
                except RefusedError as error:
                    self.problem, self.state = str(error), "waiting" if self.state != "broken" else "broken"
            elif found.get("version") is not None:
                seq, step, slot = found["version"]
                if self._take(seq, step, slot, until):
                    return self.version
            elif "problem" in found:
                self.problem = found["problem"]
                self.state = "broken" if self.state == "broken" else "waiting"
            if found["last"]:
                return None

    def _look(self, until: float) -> Message:
        """Ask for a newer version, for at most a round; connects again where that was lost. Of the lead."""
        if self._control is None:
            said = self._call(max(until, time.monotonic() + _RETRY_SECONDS))
            if "problem" in said:
                name = self._publisher_name()
                said["problem"] = f"{self._where}: publisher {name} at {self._address}: {said['problem']}"
            return said
        try:
            wait = max(0.0, min(until - time.monotonic(), ROUND_SECONDS))
            return {"version": self._ask({"do": "take", "have": self._seq, "wait": wait}, wait)["version"]}
        except (OSError, KeyError) as error:
            return {"problem": f"{self._where}: publisher {self._publisher_name()} rank 0 does not answer: {error}"}

    def _ask(self, message: Message, wait: float = 0.0) -> Message:
        if self._control is None:
            raise ConnectionError("there is no connection to the publisher")
        until = time.monotonic() + wait + self._patience
        try:
            self._control.send(message, until)
            return self._control.receive(until)
        except BaseException:  # of Ctrl-C, too
            self._drop_control()  # an answer that comes late must not be taken for that of the next question
            raise

    def _take(self, seq: int, step: int, slot: int, until: float) -> bool:
        """Read a version; whether all ranks have it and it is taken over."""
        problem, in_part = None, False
        broken = self.apply == "in_place"
        if broken:
            self.state, self.version = "broken", None
        try:
            self._check_forms()
            with self._writing():
                in_part = self._read(slot, 2 * seq)
        except Exception as error:  # all ranks hear of it, whatever it is
            problem = str(error) or type(error).__name__
        self._pass_on()
        try:
            if problem is None:
                with self._writing():
                    self._complete(seq)
                    compares = in_part if self._verify is None else self._verify
                    different = self._compare(slot, 2 * seq, self._staging) if compares else []
                if different:
                    problem, self._staged = f"what was read is not what was pushed: {'; '.join(different[:4])}", 0
        except Exception as error:
            problem = str(error) or type(error).__name__
        found = gather_values(self.comm, problem, label="sync pull: read")
        failures = {rank: text for rank, text in found.items() if text is not None}
        if failures:
            self.problem = f"subscriber {self.name!r}: step {step}: " + "; ".join(
                f"rank {rank}: {text}" for rank, text in list(failures.items())[:4]
            )
            _log.warning("%s", self.problem)
            self._drop_sources()
            if self._lead:
                with suppress(OSError):
                    self._ask({"do": "release"})
            time.sleep(min(_RETRY_SECONDS, max(0.0, until - time.monotonic())))
            return False
        self._commit()
        self._seq, self.version, self.state, self.problem = seq, step, "current", None
        if self._lead:
            with suppress(OSError):
                self._ask({"do": "took", "seq": seq, "step": step})
        if self._after is not None:
            self._after(step)
        return True

    def _check_forms(self) -> None:
        """Raise if a local tensor is not what it was when the link was made."""
        if [(part.shape, part.dtype) for part in self._targets] == self._forms:
            return
        names = [want.name for want in self._wanted for _ in want.parts]
        for part, known, name in zip(self._targets, self._forms, names, strict=True):
            if (part.shape, part.dtype) != known:
                raise SyncError(
                    f"{name} is {part.dtype} of {list(part.shape)} now, and was {known[1]} of {list(known[0])}; "
                    "subscribe again after shapes or types change"
                )

    def _writing(self) -> AbstractContextManager[object]:
        """Where served tensors may be written to; those of inference mode may be in that mode alone."""
        return torch.inference_mode() if self._infers else torch.no_grad()

    def _read(self, slot: int, generation: int) -> bool:
        """Read what this rank reads itself; whether only changes of something were read."""
        until = time.monotonic() + self._patience
        since, self._staged, self.read_bytes, in_part, self._wide_seq = self._staged, 0, 0, False, 0
        for fill in self._plan.fills:
            self._place_of(fill).fill_(fill.value)
        for rank, reads in self._plan.reads.items():
            try:
                in_part |= self._read_from(rank, reads, slot, generation, since, until)
            except BaseException as error:
                source = self._sources.pop(rank, None)
                if source is not None:
                    source.close()
                if not isinstance(error, Exception):
                    raise
                text = str(error) or type(error).__name__
                if source is not None and source.port.name != SOCKETS and not isinstance(error, _StaleError):
                    self._leave_out(rank, source.port.name, text)
                raise SyncError(f"publisher {self._publisher_name()} rank {rank}: {text}") from error
        return in_part

    def _pass_on(self) -> None:
        """Give ranks of this host what this rank has read for them, and get what they have read; all ranks call it."""
        for number in range(self._rounds):
            gives, gets = (side[number] if number < len(side) else {} for side in (self._plan.gives, self._plan.gets))
            with torch.no_grad():
                sends = {
                    peer: [view if self._takes_strides else view.contiguous() for view in self._views_of(reads)]
                    for peer, reads in gives.items()
                }
                views = {peer: self._views_of(reads) for peer, reads in gets.items()}
                receives = {
                    peer: [v if self._takes_strides else torch.empty_like(v, memory_format=_ROWS) for v in listed]
                    for peer, listed in views.items()
                }
                self.comm.exchange(sends, receives, label="sync pull: within the host").wait()
                for peer, reads in gets.items():
                    for view, arrived in zip(views[peer], receives[peer], strict=True):
                        if view is not arrived:
                            view.copy_(arrived)
                    for read in (read for read in reads if read.is_repeated):
                        self._place_of(read).copy_(read.once(self._place_of(read)).clone()[read.widen])

    def _views_of(self, reads: Sequence[Read]) -> list[Tensor]:
        """Where reads go, in an order of dims that is one on all ranks that need the same."""
        views = []
        for read in reads:
            views.append(read.in_source_order(self._place_of(read)))
            views += [] if read.scales is None else [_scales_in(self._staging, read.scales)]
        return views

    def _complete(self, seq: int) -> None:
        """Quantize what is complete now."""
        for each in self._plan.quantized:
            for target, made in self._quantize(each, self._staging):
                target.copy_(made)
        self._wide_seq = seq
        if self.apply == "stage":  # other staged copies are, or were, tensors that the program writes to
            self._staged = seq

    def _read_from(
        self, rank: int, reads: Sequence[Read], slot: int, generation: int, since: int, until: float
    ) -> bool:
        own, nbytes = self._own[rank]
        if not own:
            return False
        source = self._sources.get(rank)
        if source is None:
            source = self._sources[rank] = self._open(rank, until)
        mapped = self._find_mapped(rank, source, slot, until)
        if mapped is not None and isinstance(source.port, MappedSlots):
            tensors, memory = [self._staging[r.target][r.part] for r in own], mapped.memory
            copy = source.port.copies.find(
                slot, tensors, lambda: ([self._place_of(r) for r in own], [r.view(memory)[r.widen] for r in own])
            )
            _check_whole(mapped.wait_whole(generation, until))
            with torch.no_grad():
                copy()
            _check_whole(mapped.generation == generation)
            self.read_bytes += nbytes
            return False
        assert not isinstance(source.port, MappedSlots)
        if not source.listed:
            self._send_list(source, reads, until)
        wanted = {"do": "read", "list": 0, "runs": source.runs, "slot": slot, "generation": generation, "since": since}
        source.channel.send(wanted, until)
        answer = source.channel.receive(until)
        _check_whole(answer["whole"])
        in_part, at = bool(answer["delta"]), iter(own)
        with torch.no_grad():
            for count in source.runs:
                if in_part:
                    for read in islice(at, count):
                        self._receive_changes(source.channel, read, until)
                else:
                    self._receive(source.port, list(islice(at, count)), until)
        _check_whole(source.channel.receive(until)["whole"])
        return in_part

    def _find_mapped(self, rank: int, source: _Source, slot: int, until: float) -> MappedSlot | None:
        """A slot in this rank's address space; None if it cannot be there, and another way is taken from now on."""
        if not isinstance(source.port, MappedSlots):
            return None
        try:
            return source.port.find(slot, until)
        except PortError as error:
            source.port.close()
            self._leave_out(rank, source.port.name, str(error))
            self._choose_port(rank, source, until)
            return None

    def _place_of(self, read: Read | Filled, parts: Sequence[Sequence[Tensor]] | None = None) -> Tensor:
        """Where what is read goes: in a wide copy of what is quantized, else in staged or other parts."""
        coded = isinstance(read, Read) and read.scales is not None
        wide = None if coded else self._wide.get((read.target, read.part))
        held = (self._staging if parts is None else parts)[read.target][read.part] if wide is None else wide
        return held[read.here]

    def _quantize(self, each: Quantized, parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Boxes of these parts that have codes and scales, each with what they should be."""
        codes = parts[each.target][each.part][each.here]
        scales = parts[each.scale_target][each.scale_part][each.scale_here]
        made = quantize_blocks(self._wide[each.target, each.part][each.here], each.scale, codes.dtype)
        return [(codes, made[0]), (scales, made[1])]

    def _send_list(self, source: _Source, reads: Sequence[Read], until: float) -> None:
        source.channel.send({"do": "list", "list": 0, "rows": [read.to_json() for read in reads]}, until)
        source.channel.receive(until)
        source.listed = True

    def _receive(self, carrier: Carrier, reads: Sequence[Read], until: float) -> None:
        """Receive a run, straight into the one place where it goes if it is there in this form."""
        starts, nbytes = place_in_run([read.sent_bytes for read in reads])
        into = None
        if len(reads) == 1 and reads[0].scales is None:
            target = self._place_of(reads[0])
            fits = target.dtype == torch_dtype(reads[0].wire) and tuple(target.shape) == reads[0].sent_shape
            if fits and target.is_contiguous() and target.device == carrier.device:
                into = target.reshape(-1).view(torch.uint8)
        run = carrier.receive(nbytes, until, into)
        self.read_bytes += sum(read.sent_bytes for read in reads)
        if into is None:
            for read, start in zip(reads, starts, strict=True):
                self._unpack(read, run[start : start + read.sent_bytes])

    def _unpack(self, read: Read, arrived: Tensor) -> None:
        """Copy the bytes of a read to where it goes."""
        target = self._place_of(read)
        if read.scales is not None:
            scales = _scales_in(self._staging, read.scales)
            scales.copy_(arrived[: 4 * scales.numel()].view(torch.float32).view(scales.shape))
            target.copy_(arrived[4 * scales.numel() :].view(target.dtype).view(target.shape))
            return
        target.copy_(arrived.view(torch_dtype(read.wire)).view(read.sent_shape)[read.widen])

    def _receive_changes(self, channel: Channel, read: Read, until: float) -> None:
        """Receive what changed since the version that is staged, and write it there."""
        head = bytearray(8)
        channel.receive_raw(memoryview(head), until)
        length, count = int.from_bytes(head, "little"), math.prod(read.sent_shape)
        if length > most_bytes(count, read.wire.itemsize):
            raise ConnectionError(f"{length} bytes of changes are announced for {count} elements")
        self.read_bytes += len(head) + length
        if length:
            data = np.empty(length, np.uint8)
            channel.receive_raw(data.data, until)
            positions, values = decode_changes(data, count, torch_dtype(read.wire))
            write_at(self._place_of(read), positions, values, read.sent_shape, read.widen)

    def _open(self, rank: int, until: float) -> _Source:
        assert self._published is not None
        place = self._published.places[rank]
        channel = None
        if place.name is not None and place.host == self._host:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                channel = self._connect(place.name, "data", self._data_token, until)
        channel = channel or self._connect(place.address, "data", self._data_token, until)
        source = _Source(channel, SocketCarrier(channel), [])
        try:
            self._choose_port(rank, source, until)
        except BaseException:
            channel.close()
            raise
        return source

    def _choose_port(self, rank: int, source: _Source, until: float) -> None:
        """Take the best way that both ends can make."""
        sizes = [read.sent_bytes for read in self._own[rank][0]]
        total = place_in_run(sizes)[1]
        assert self._published is not None
        most = min(self._limit // max(1, len(self._plan.reads)), int(self._published.slot_bytes[rank]))
        longest = max([1, *sizes, min(total, most)])
        near, left_out = source.channel.is_local, self._left_out.get(rank, {})
        for way in list_ways(self._transport, near, self._device, left_out):
            try:
                source.port = ask_for(way, source.channel, self._device, longest, until)
                break
            except PortError as error:
                if self._transport != "auto":
                    raise PortError(f"transport={way!r} cannot be used: {error}") from error
                self._leave_out(rank, way, str(error))
        packed = 0 if isinstance(source.port, MappedSlots) else source.port.longest
        source.runs = cut_runs(sizes, packed)

    def _leave_out(self, rank: int, way: str, reason: str) -> None:
        _log.info("%s does not read from rank %d by %s: %s", self._where, rank, way, reason)
        self._left_out.setdefault(rank, {})[way] = reason

    @property
    def _device(self) -> torch.device:
        """Where this rank's tensors are: its GPU, if one of them is there."""
        found = (part.device for want in self._wanted for part in want.parts)
        return next((device for device in found if device.type not in ("cpu", "meta")), torch.device("cpu"))

    def _commit(self) -> None:
        """Take over what has been read; nothing is sent, so that no other rank can spoil it."""
        if self.apply == "in_place":
            return
        staged = [part for parts in self._staging for part in parts]
        with self._writing():
            if self.apply == "stage":
                copy_each(self._targets, staged)
                return
            for target, part in zip(self._targets, staged, strict=True):
                target.data, part.data = part.data, target.data

    def verify(self) -> Verification:
        """Compare digests of the tensors here with those of the version that was pushed; all ranks call it.

        Raises `SyncError` if the publisher does not keep that version any more: pull, then verify.
        """
        with self._using:
            return self._verify_served()

    def _verify_served(self) -> Verification:
        self.check()
        said: Message = {}
        if self._lead:
            try:
                said = self._ask({"do": "again", "seq": self._seq})
            except (OSError, KeyError) as error:
                said = {"version": None, "problem": str(error)}
        found = self._share("sync verify", said)
        if found.get("version") is None:
            reason = found.get("problem", "it keeps newer versions only; pull, then verify")
            raise SyncError(f"{self._where}: publisher {self._publisher_name()}: step {self.version}: {reason}")
        problem, wrong = None, list[str]()
        try:
            slot = found["version"][2]
            served = [want.parts for want in self._wanted]
            if self._plan.quantized and self._wide_seq != self._seq:
                raise SyncError("a later pull has begun; pull, then verify")
            wrong = self._compare(slot, 2 * self._seq, served)
            wrong += [
                self._name_box(each)
                for each in self._plan.quantized
                if any(compare(here.reshape(-1), made.reshape(-1)).any() for here, made in self._quantize(each, served))
            ]
        except Exception as error:
            problem = f"{self._where}: {str(error) or type(error).__name__}"
        everyone = gather_values(self.comm, [problem, wrong, self._plan.nbytes], label="sync verify")
        if self._lead:
            with suppress(OSError):
                self._ask({"do": "release"})
        problems = [one[0] for one in everyone.values() if one[0] is not None]
        if problems:
            raise SyncError("; ".join(problems[:4]))
        assert self.version is not None
        different = tuple(text for one in everyone.values() for text in one[1])
        return Verification(self.version, sum(one[2] for one in everyone.values()), different)

    def _compare(self, slot: int, generation: int, parts: Sequence[Sequence[Tensor]]) -> list[str]:
        """The boxes in which these tensors differ from a slot: digests of both are compared, and values of fills."""
        until = time.monotonic() + self._patience
        wrong = []
        for fill in self._plan.fills:
            part = self._place_of(fill, parts)
            if not bool((part == torch.full((), fill.value, dtype=part.dtype, device=part.device)).all()):
                wrong.append(self._name_box(fill))
        for rank, reads in self._plan.reads.items():
            source = self._sources.get(rank)
            if source is None:
                source = self._sources[rank] = self._open(rank, until)
            if not source.listed:
                self._send_list(source, reads, until)
            source.channel.send({"do": "digest", "list": 0, "slot": slot, "generation": generation}, until)
            ours = [_sums_of(self._place_of(read, parts), read, parts) for read in reads]
            answer = source.channel.receive(until, MAX_DESCRIPTION)
            _check_whole(answer["whole"])
            theirs = [(int(a, 16), int(b, 16)) for a, b in answer["sums"]]
            wrong += [self._name_box(r) for r, a, b in zip(reads, ours, theirs, strict=True) if a != b]
        return wrong

    def _name_box(self, place: Read | Filled | Quantized) -> str:
        box = ", ".join(f"{cut.start}:{cut.stop}" for cut in place.here)
        return f"{self._wanted[place.target].name} on rank {self.comm.rank}: [{box}]"

    # Words and ends.

    def describe(self) -> str:
        """The link in words: from whom this rank reads how much, and what taking over costs."""
        assert self._published is not None
        staged = sum(part.numel() * part.element_size() for parts in self._staging for part in parts)
        cost = {
            "stage": f"{staged} bytes of staging, copied in place once all ranks have everything",
            "swap": f"{staged} bytes for a second set of tensors, whose memory is exchanged at each pull",
            "in_place": "no memory; a pull that fails leaves tensors of two versions, and the state 'broken'",
        }[self.apply]
        lines = [f"subscriber {self.name!r} of publisher {self._published.world!r}, step {self.version}: {self.state}"]
        wide = sum(part.numel() * part.element_size() for part in self._wide.values())
        lines += [f"{wide} bytes of values that are quantized here"] if wide else []
        for rank in self._plan.reads:
            own, nbytes = self._own[rank]
            source = self._sources.get(rank)
            way = "" if source is None else f" by {source.port.name}"
            lines += (
                [f"rank {self.comm.rank} reads {nbytes} bytes in {len(own)} boxes of rank {rank}{way}"] if own else []
            )
            lines += [f"  not by {way}: {reason}" for way, reason in self._left_out.get(rank, {}).items()]
        passed = [read.sent_bytes for reads in self._plan.reads.values() for read in reads if read.is_passed]
        lines += [f"{sum(passed)} bytes come from ranks of its host that read them"] if passed else []
        return "\n".join([*lines, f"apply={self.apply!r}: {cost}"])

    def check(self) -> None:
        """Raise unless the tensors are those of one version."""
        if self.state == "closed":
            raise SyncError(f"{self._where}: the link is closed")
        if self.version is None:
            raise SyncError(
                f"{self._where}: the tensors are not those of one version, state {self.state!r}; pull first"
            )

    def _drop_control(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _drop_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def close(self) -> None:
        """Leave the publisher; the tensors stay as they are. Each rank may call it alone."""
        if self._process != os.getpid():
            return  # the connections are those of the process that this one was forked from
        if self._control is not None:
            with suppress(OSError):
                self._control.send({"do": "bye"}, time.monotonic() + 1.0)
        self._drop_control()
        self._drop_sources()
        self.state = "closed"

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _scales_in(parts: Sequence[Sequence[Tensor]], scales: SentScales) -> Tensor:
    return parts[scales.target][scales.part][scales.here]


def _sums_of(held: Tensor, read: Read, parts: Sequence[Sequence[Tensor]]) -> Sums | None:
    """The sums of what a rank has of a read, as it travelled; None if parts that are repeated are not equal."""
    if read.scales is not None:
        both = join_codes(held.detach(), _scales_in(parts, read.scales).detach())
        return sum_box(both, (0,), both.shape)
    once = held[tuple(slice(None) if kept is not None else slice(0, 1) for kept in read.widen)]
    if once.shape != held.shape and compare(once.expand(held.shape), held).any():
        return None
    wire = once.detach().to(torch_dtype(read.wire)).reshape(read.sent_shape)
    return sum_box(wire, (0,) * wire.ndim, wire.shape)


def _check_whole(whole: object) -> None:
    if whole is not True:
        raise _StaleError("the version was overwritten while it was read")
