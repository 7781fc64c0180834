"""Ranks that share one GPU: the first of them makes the copies and reductions of all, in one piece.

A GPU runs the work of one process at a time and takes long to turn from one to the next (0.14 ms on an H200). So each
rank sends the leader where its tensors are: those that others read, and those that others fill. The leader queues the
work of all ranks on its stream, marks the moment after it, and confirms. The others let their streams wait for that
moment. A rank whose stream has nothing left to do says so, and the leader's stream does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardwise.comm.transports.device_memory import LENT, READ
from shardwise.comm.transports.device_peers import DevicePeers
from shardwise.comm.transports.links import Frame
from shardwise.comm.transports.peer_calls import PeerCall

TensorsByRank = Mapping[int, Sequence[Tensor]]


@dataclass(frozen=True)
class RankBoxes:
    """The tensors of one rank in a call, by the rank that reads or fills them."""

    sends: TensorsByRank
    receives: TensorsByRank

    def flatten(self) -> list[Tensor]:
        """All tensors in one list."""
        return [t for side in (self.sends, self.receives) for tensors in side.values() for t in tensors]

    def header(self, idle: bool) -> bytes:
        """How the list is to be read, and whether the tensors are ready."""
        sides = [" ".join([f"{rank} {len(tensors)}" for rank, tensors in side.items()]) for side in self._sides()]
        return f"{int(idle)}|{sides[0]}|{sides[1]}\n".encode()

    def _sides(self) -> tuple[TensorsByRank, TensorsByRank]:
        return self.sends, self.receives


def read_boxes(header: bytes, tensors: Sequence[Tensor]) -> RankBoxes:
    """The reverse of `flatten` and `header`."""
    _, *sides = _read_header(header)
    rest = iter(tensors)
    sends, receives = ({rank: [next(rest) for _ in range(count)] for rank, count in side} for side in sides)
    return RankBoxes(sends, receives)


@lru_cache(maxsize=4096)
def _read_header(header: bytes) -> tuple[Any, ...]:
    idle, *sides = header.decode().rstrip("\n").split("|")
    numbers = [[int(text) for text in side.split()] for side in sides]
    return idle == "1", *(tuple(zip(side[::2], side[1::2], strict=True)) for side in numbers)


LeaderWork = Callable[[Mapping[int, RankBoxes]], Callable[[], None] | None]
"""Does the work of all ranks; may return what does it again for tensors at the same places."""

_MAX_KNOWN_WORK = 512


class LedCall(PeerCall):
    """One call that the leader carries out for all ranks: `work` is called there, with the tensors of all of them."""

    def __init__(
        self,
        call: str,
        rank: int,
        ranks: Sequence[int],
        boxes: RankBoxes,
        work: LeaderWork,
        peers: DevicePeers,
        known_work: dict[Any, Callable[[], None]],
    ) -> None:
        self._leader, leads = ranks[0], rank == ranks[0]
        super().__init__(call, ranks[1:] if leads else (), () if leads else (self._leader,))
        self._rank, self._ranks, self._boxes, self._work, self._peers = rank, ranks, boxes, work, peers
        self._known_work = known_work
        self._arrived: dict[int, bytes] = {}
        self._kept: list[Tensor] = []
        self._started_on, self._stream = peers.current_stream(), None

    def describe(self) -> dict[int, bytes]:
        """Mark the moment at which this rank's tensors are ready; return its message to the leader."""
        if self._rank == self._leader:
            return {}
        stream = self._started_on
        messages, kept = self._peers.describe({self._leader: self._boxes.flatten()}, rank=self._rank, call=self.call)
        self._kept = kept[self._leader]
        idle = stream is None or stream.query()  # after the copies of what cannot be opened
        if not idle:
            self._peers.mark(LENT, self.number, stream)
        return {self._leader: self._boxes.header(idle) + messages[self._leader]}

    def take(self, frame: Frame) -> Iterable[int]:
        """Keep what a rank has sent; after the last one, do the work of all."""
        self._arrived[frame.rank] = bytes(frame.body)
        if self.expected:
            return ()
        self._lead()
        return self._ranks[1:]

    def _lead(self) -> None:
        self._stream = self._peers.current_stream()
        self._peers.order_streams(self._stream, self._started_on)
        arrived = [self._arrived[rank].partition(b"\n") for rank in self._ranks[1:]]
        for rank, (header, _, _) in zip(self._ranks[1:], arrived, strict=True):
            if not _read_header(header)[0]:
                self._peers.events.wait(rank, LENT, self.number, self._stream)
        own = tuple([(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self._boxes.flatten()])
        places = self.call, self._stream, self._boxes.header(True), own, *(m[0][1:] + m[2] for m in arrived)
        key = self._peers.closings(), places
        again = self._known_work.get(key)
        if again is not None:
            again()
        else:
            self._do_work(arrived, places)
        self._peers.mark(READ, self.number, self._stream)

    def _do_work(self, arrived: Sequence[tuple[bytes, bytes, bytes]], places: Any) -> None:
        boxes = {self._rank: self._boxes}
        for rank, (header, _, message) in zip(self._ranks[1:], arrived, strict=True):
            boxes[rank] = read_boxes(header, self._peers.read(rank, message))
        again = self._work(boxes)
        if again is not None:
            if len(self._known_work) >= _MAX_KNOWN_WORK:
                self._known_work.clear()
            self._known_work[self._peers.closings(), places] = again

    def settle(self) -> None:
        """Let the current stream wait for the leader's work."""
        stream = self._peers.current_stream()
        if self._rank != self._leader:
            self._peers.await_readers((self._leader,), self.number, stream)
            self._copy_back()
            self._peers.order_streams(self._started_on, stream)
        else:
            self._peers.order_streams(stream, self._stream)
            self._peers.order_streams(self._started_on, stream)
        self._boxes, self._kept = RankBoxes({}, {}), []

    def give_up(self, ended: set[int]) -> None:
        """After a failure: what the leader does with this rank's memory, it has done before its program goes on."""
        self._peers.await_possible_readers({self._leader} - ended - {self._rank}, self.number)

    def _copy_back(self) -> None:
        """Copy what the leader wrote to copies of this rank's tensors, which it could not open."""
        filled = [t for tensors in self._boxes.receives.values() for t in tensors]
        for target, written in zip(filled, self._kept[len(self._kept) - len(filled) :], strict=True):
            if written is not target:
                target.copy_(written)
