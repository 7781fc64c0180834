"""Ranks of one host find out together whether all can read each other's device memory, and connect if so.

1. Each rank writes a card: its host and process, its listener, handles of its events, and where a secret of its own is
   on the device. One that cannot writes why. The cards are gathered over the group's own backend.
2. Each connects to all others, opens their events and reads their secrets.
3. They exchange whether that worked. If it did not on one rank (another container, expandable segments, GPUs without
   peer access, MIG), none reads device memory, and the log of every rank says which rank cannot, and why.

In a group with nccl, ranks of one host use nccl if each has a GPU of its own; nccl refuses ranks that share one.
SHARDWISE_DEVICE_TRANSPORT, or an argument of the comm, asks for `nccl` or `ipc` instead, the same on every rank.

Ranks of one host with device memory: a rank reads the others' tensors where they are, by CUDA's IPC.

1. A sender marks the moment at which its tensors are ready in its stream and sends the receiver their places: segment,
   handle, offset, shape, strides. Nothing is packed: a box of a larger tensor is a tensor with strides.
2. The receiver opens the segments it does not know, lets its stream wait for that moment, and uses the tensors as if
   they were its own: copies them into place, or reduces them. It marks the moment after that and confirms.
3. The sender lets its stream wait for the receivers' moments. From then on its program may write to what it lent.

No rank waits for a device here: only the messages are waited for, which say what streams will do. Ranks have GPUs with
peer access, or share one.

Streams: a call belongs to the stream on which it was started, but it may be served on another one, by whoever waits.
So the stream that reads and writes first waits for the one that started the call, and both wait for the readers: memory
that is freed after `wait()` goes back to the stream it was made on.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._text import package_logger
from shardwise.comm.agree import fold_texts, name_ranks
from shardwise.comm.faults import TransportError
from shardwise.comm.flat_tensors import Edges, as_bytes
from shardwise.comm.protocol import Capabilities, PendingWork, ReduceOp, TakeLent, TensorsByRank, Work
from shardwise.comm.transports.calls import PeerCall, PeerEngine
from shardwise.comm.transports.device_memory import (
    LENT,
    READ,
    CudaEvents,
    CudaMemory,
    DevicePeers,
    SharedSegments,
    identify_process,
    is_driver_present,
    opened_segments,
)
from shardwise.comm.transports.engine import Engine, Gatherer
from shardwise.comm.transports.kernels import copy_boxes, reduce_tensors
from shardwise.comm.transports.links import (
    Frame,
    FrameKind,
    Listener,
    PeerSockets,
    describe_door,
    different_sizes_error,
    door_of,
    identify_host,
)
from shardwise.comm.transports.nccl import NativeEngine

_ONE_CALL_BYTES = 1 << 26  # of the tensors of all ranks: up to here every rank reads all of them in an all-reduce


class LendCall(PeerCall):
    """One call in which ranks lend each other tensors: `take` is called once, with those of all expected ranks."""

    def __init__(
        self,
        call: str,
        lent: Mapping[int, Sequence[Tensor]],
        expected: Iterable[int],
        take: TakeLent,
        peers: DevicePeers,
    ) -> None:
        super().__init__(call, expected, lent)
        self._lent, self._take, self._peers = lent, take, peers
        self._readers, self._arrived = tuple(lent), dict[int, bytes]()
        self._started_on, self._stream = peers.current_stream(), None

    def take(self, frame: Frame) -> Iterable[int]:
        """Keep where the tensors are; use them after the last message."""
        self._arrived[frame.rank] = bytes(frame.body)
        if self.expected:
            return ()
        self.use()
        return self._arrived

    def use(self) -> None:
        """Use the tensors of all ranks, on the current stream."""
        events, self._stream = self._peers.events, self._peers.current_stream()
        self._peers.order_streams(self._stream, self._started_on)
        for rank in self._arrived:
            events.wait(rank, LENT, self.number, self._stream)
        self._take({rank: self._peers.read(rank, self._arrived[rank]) for rank in sorted(self._arrived)})
        if self._arrived:
            self._peers.mark(READ, self.number, self._stream)

    def settle(self) -> None:
        """Let the current stream wait for what was read and written in this call."""
        stream = self._peers.current_stream()
        self._peers.order_streams(stream, self._stream)
        self._peers.await_readers(self._readers, self.number, stream)
        self._peers.order_streams(self._started_on, stream)
        self._lent = {}

    def give_up(self, ended: set[int]) -> None:
        """After a failure: what ranks read of this one's memory, they have read before its program goes on."""
        self._peers.await_possible_readers(set(self._readers) - ended, self.number)


class SameHostDeviceEngine(PeerEngine):
    """Moves device tensors between processes of one host."""

    capabilities = Capabilities(reads_peers=True, starts_early=True)

    def __init__(
        self, rank: int, ranks: tuple[int, ...], links: PeerSockets, peers: DevicePeers, timeout: float
    ) -> None:
        super().__init__(rank, ranks, links, timeout)
        self._peers, self.device = peers, peers.device

    def lend(self, sends: TensorsByRank, receives: Iterable[int], take: TakeLent, *, call: str) -> Work:
        """Lend tensors of any strides to ranks; `take` reads what others lend, on this rank's stream."""
        with self._calls.lock, self._calls.abort_if_raised(call):
            messages, lent = self._peers.describe(sends, rank=self._rank, call=call)
            operation = LendCall(call, lent, receives, take, self._peers)
            number = self._calls.register(operation)
            if lent:
                self._peers.mark(LENT, number, self._peers.current_stream())
            if not operation.expected:
                operation.use()
            self._calls.start(operation, {rank: (FrameKind.RANGES, body) for rank, body in messages.items()})
        return PendingWork(partial(self._finish, operation))

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Copy what is lent into what is received."""
        return self.exchange_boxes(sends, receives, call=call)

    def exchange_boxes(self, sends: TensorsByRank, receives: TensorsByRank, *, call: str) -> Work:
        """Copy tensors of any strides, those that this rank sends to itself included."""
        own = list(zip(receives.get(self._rank, ()), sends.get(self._rank, ()), strict=True))

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            copy_boxes([*own, *(pair for r in lent for pair in _pair_boxes(call, r, self._rank, lent[r], receives[r]))])

        others = {r: tensors for r, tensors in sends.items() if r != self._rank}
        return self.lend(others, (r for r in receives if r != self._rank), take, call=call)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Every rank reads every other rank's tensor."""
        parts = list(out.view(len(self._ranks), -1))
        if parts[self._index].data_ptr() != tensor.data_ptr():
            parts[self._index].copy_(tensor)
        return self._share(parts, tensor, call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Every rank reads its run of all others, and reduces them in rank order."""
        return self._reduce(out, list(tensor.view(len(self._ranks), -1)), op, call)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce small tensors on every rank; reduce-scatter and gather large ones, in place."""
        if not self._reads_all(tensor):
            return self.all_reduce_into(tensor, tensor, op, call=call)
        total = torch.empty_like(tensor)
        work = self.all_reduce_into(total, tensor, op, call=call)

        def finish() -> None:
            work.wait()
            tensor.copy_(total)

        return PendingWork(finish)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """The same, into another tensor: in one call, unless ranks had to read too much."""
        if self._reads_all(tensor):
            return self._reduce(out, [tensor] * len(self._ranks), op, call)
        runs, results = (list(t.tensor_split(len(self._ranks))) for t in (tensor, out))
        self._reduce(results[self._index], runs, op, call).wait()
        return self._share(results, results[self._index], call)

    def _reads_all(self, tensor: Tensor) -> bool:
        """Whether an all-reduce is one call, in which every rank reads all tensors."""
        return tensor.nbytes * len(self._ranks) <= _ONE_CALL_BYTES

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Every rank reads the source's tensor."""
        view = [as_bytes(tensor, label=call)] if tensor.numel() else []
        sends = dict.fromkeys(self._others, view) if self._rank == src and view else {}
        return self.exchange(sends, {src: view} if self._rank != src and view else {}, call=call)

    def _share(self, parts: Sequence[Tensor], mine: Tensor, call: str) -> Work:
        """Lend one tensor to all others and copy theirs into `parts`, in group order."""
        edges = {r: [t] for r, t in zip(self._ranks, parts, strict=True) if r != self._rank and t.numel()}
        return self.exchange({r: [mine] for r in self._others} if mine.numel() else {}, edges, call=call)

    def _reduce(self, out: Tensor, runs: Sequence[Tensor], op: ReduceOp, call: str) -> Work:
        """Lend the i-th run to the i-th rank and reduce what all ranks lend and this rank's own run."""
        sends = {r: [run] for r, run in zip(self._ranks, runs, strict=True) if r != self._rank and run.numel()}
        own = runs[self._index]
        expected = self._others if own.numel() else ()

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            if own.numel():
                for rank in lent:
                    _pair_boxes(call, rank, self._rank, lent[rank], [out])
                terms = [own if rank == self._rank else lent[rank][0] for rank in self._ranks]
                reduce_tensors(out, terms, op)

        return self.lend(sends, expected, take, call=call)

    def _finish(self, operation: LendCall) -> None:
        self._calls.wait(operation)
        operation.settle()


def _pair_boxes(
    call: str, src: int, dst: int, sent: Sequence[Tensor], wanted: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The k-th tensor that is received and the k-th that is sent; they must match."""
    if [t.shape for t in sent] != [t.shape for t in wanted]:
        theirs, ours = [t.nbytes for t in sent], [t.nbytes for t in wanted]
        if theirs != ours:
            raise different_sizes_error(call, src, dst, f"{theirs} bytes", str(ours))
        shapes = [str([tuple(t.shape) for t in each]) for each in (sent, wanted)]
        raise different_sizes_error(call, src, dst, f"shapes {shapes[0]}", shapes[1])
    return list(zip(wanted, sent, strict=True))


_CONNECT_SECONDS = 10.0
_VARIABLE = "SHARDWISE_DEVICE_TRANSPORT"
_REQUESTS = ("auto", "ipc", "nccl")
_log = package_logger(__name__)


def find_request(argument: str | None) -> str:
    """Return which transport is asked for, by an argument or else by the variable."""
    found = argument or os.environ.get(_VARIABLE) or "auto"
    if found == "measured":
        warnings.warn(
            "device transport 'measured' is 'auto' now: nccl where each rank has a GPU of its own, else CUDA IPC",
            FutureWarning,
            stacklevel=3,
        )
        return "auto"
    if found not in _REQUESTS:
        raise ValueError(
            f"device transport {found!r} (argument device_transport, or {_VARIABLE}): use one of {_REQUESTS}"
        )
    return found


def choose_device_engine(
    native: NativeEngine, rank: int, ranks: tuple[int, ...], timeout: float, request: str
) -> Engine:
    """The engine for ranks of one host with nccl, of one kind on every rank."""
    card = json.dumps([request, _identify_gpu(native.device)]).encode()
    said = [json.loads(data) for data in native.all_gather_bytes(card, call="choose device transport")]
    if len({asked for asked, _ in said}) > 1:
        texts = fold_texts({r: repr(asked) for r, (asked, _) in zip(ranks, said, strict=True)})
        raise ValueError(f"ranks ask for different device transports ({texts}); set {_VARIABLE} alike on every rank")
    if request == "nccl" or (request == "auto" and len({gpu for _, gpu in said}) == len(ranks)):
        return native
    reading = connect_devices(native, rank, ranks, native.device, timeout, wanted=True, instead="nccl is used")
    if reading is None:
        return native
    why = "as was asked" if request == "ipc" else "some share a GPU, which nccl refuses"
    level = logging.INFO if rank == ranks[0] else logging.DEBUG
    _log.log(level, "%s read each other's device memory and do not use nccl: %s", name_ranks(ranks), why)
    return reading


def _identify_gpu(device: torch.device) -> str:
    """What identifies a GPU of this host: its number differs between processes that see different ones."""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class DeviceEntry:
    """Where others connect to this rank, and what they read to see that they can."""

    device: torch.device
    listener: Listener
    shared: SharedSegments
    events: CudaEvents
    probe: Tensor


def connect_devices(
    over: Gatherer,
    rank: int,
    ranks: tuple[int, ...],
    device: torch.device,
    timeout: float,
    *,
    wanted: bool,
    instead: str = "it goes through host memory",
) -> SameHostDeviceEngine | None:
    """Return an engine for ranks of one host with device memory, or None on every rank if some rank cannot.

    `instead`: what happens then, for the log.
    """
    entry, card = _open_entry(device) if wanted else (None, {})
    try:
        told = over.all_gather_bytes(json.dumps(card).encode(), call="connect devices of one host")
        cards: dict[int, dict[str, Any]] = {r: json.loads(data) for r, data in zip(ranks, told, strict=True)}
        problems = {r: card["problem"] for r, card in cards.items() if "problem" in card}
        if problems:
            _log_refusal(problems, instead)
        if entry is None or len({each.get("host") for each in cards.values()}) != 1 or not card["host"]:
            return None
        owners = {r: each["process"] for r, each in cards.items()}
        peers = DevicePeers(entry.device, entry.shared, opened_segments(entry.device), entry.events, owners)
        links, problem = _connect(entry, rank, cards, peers, min(_CONNECT_SECONDS, timeout / 2))
        answers = over.all_gather_bytes(problem.encode(), call="devices of one host can be read")
        problems = {r: answer.decode() for r, answer in zip(ranks, answers, strict=True) if answer}
        if links is None or problems:
            _log_refusal(problems, instead)
            if links is not None:
                links.close()
            return None
        return SameHostDeviceEngine(rank, ranks, links, peers, timeout)
    finally:
        if entry is not None:
            entry.listener.close()


def _open_entry(device: torch.device) -> tuple[DeviceEntry | None, dict[str, Any]]:
    """Listen, and write down what the others must know, or why this rank's memory cannot be read."""
    try:
        if not is_driver_present():
            raise OSError("CUDA's driver is not there")
        device = torch.empty(0, device=device).device  # with its number
        secret = secrets.token_bytes(16)
        probe = torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(device)
        torch.cuda.synchronize(device)
        shared, events = SharedSegments(CudaMemory(device)), CudaEvents(device)
        messages, _ = shared.describe({-1: [probe]})
        card = {
            "probe": messages[-1].decode(),
            "secret": secret.hex(),
            "events": events.handles(),
            "host": identify_host(),
            "process": identify_process(),
        }
        listener = Listener()
    except (OSError, RuntimeError) as error:
        return None, {"problem": _first_line(error)}
    return DeviceEntry(device, listener, shared, events, probe), card | describe_door(listener)


def _connect(
    entry: DeviceEntry, rank: int, cards: Mapping[int, dict[str, Any]], peers: DevicePeers, seconds: float
) -> tuple[PeerSockets | None, str]:
    """Connect to all others and read their secrets; return the connections, and what went wrong."""
    others = {r: card for r, card in cards.items() if r != rank}
    links: PeerSockets | None = None
    try:
        doors = {r: door_of(card) for r, card in cards.items()}
        links = entry.listener.connect(rank, doors, seconds)
        entry.events.open({r: card["events"] for r, card in others.items()})
        for r, card in others.items():
            read = peers.read(r, card["probe"].encode())[0].cpu()
            if read.numpy().tobytes().hex() != card["secret"]:
                return links, f"other bytes are read than rank {r} wrote"
    except (OSError, RuntimeError, TransportError) as error:
        return links, _first_line(error)
    return links, ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _log_refusal(problems: Mapping[int, str], instead: str) -> None:
    _log.warning("ranks of one host do not read each other's device memory (%s): %s", fold_texts(problems), instead)
