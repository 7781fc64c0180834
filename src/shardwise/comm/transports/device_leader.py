"""Ranks that share one GPU: the first of them makes the copies and reductions of all, in one piece.

A GPU runs the work of one process at a time and takes long to turn from one to the next (0.14 ms on an H200). So each
rank sends the leader where its tensors are: those that others read, and those that others fill. The leader queues the
work of all ranks on its stream, marks the moment after it, and confirms. The others let their streams wait for that
moment. A rank whose stream has nothing left to do says so, and the leader's stream does not wait for it.

A warm call cuts no boxes: what a rank has to say of them, and what the leader does for all, is known by the places of
the whole tensors. Whether these are still where they were is asked of the driver each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor

from shardwise.comm.transports.device_memory import LENT, READ, LentTensors
from shardwise.comm.transports.device_peers import DevicePeers
from shardwise.comm.transports.links import Frame
from shardwise.comm.transports.peer_calls import PeerCall

T = TypeVar("T")
TensorsByRank = Mapping[int, Sequence[Tensor]]
CutBoxes = Callable[[], tuple[TensorsByRank, TensorsByRank]]
"""Makes the boxes that a rank sends and receives, by the other ranks."""


@dataclass(frozen=True)
class RankBoxes:
    """The tensors of one rank in a call, by the rank that reads or fills them."""

    sends: TensorsByRank
    receives: TensorsByRank

    def flatten(self) -> list[Tensor]:
        """All tensors in one list."""
        return [t for side in (self.sends, self.receives) for tensors in side.values() for t in tensors]

    def header(self) -> bytes:
        """How the list is to be read."""
        sides = (self.sends, self.receives)
        texts = [" ".join([f"{rank} {len(tensors)}" for rank, tensors in side.items()]) for side in sides]
        return f"{texts[0]}|{texts[1]}\n".encode()


def read_boxes(header: bytes, tensors: Sequence[Tensor]) -> RankBoxes:
    """The reverse of `flatten` and `header`."""
    sides = _read_header(header)
    rest = iter(tensors)
    sends, receives = ({rank: [next(rest) for _ in range(count)] for rank, count in side} for side in sides)
    return RankBoxes(sends, receives)


@lru_cache(maxsize=4096)
def _read_header(header: bytes) -> tuple[Any, ...]:
    numbers = [[int(text) for text in side.split()] for side in header.decode().split("|")]
    return tuple(tuple(zip(side[::2], side[1::2], strict=True)) for side in numbers)


@dataclass(frozen=True)
class CallBoxes:
    """The boxes of one rank in a call: `cut` makes them of the bases, the same ones for equal keys and places."""

    key: Hashable
    bases: Sequence[Tensor]
    cut: Callable[[], RankBoxes]

    def places(self) -> tuple[Any, ...]:
        """What the boxes depend on."""
        return self.key, *[(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self.bases]


def boxes_as_they_are(boxes: RankBoxes) -> CallBoxes:
    """Boxes that have been cut already."""
    return CallBoxes(boxes.header(), boxes.flatten(), lambda: boxes)


LeaderWork = Callable[[Mapping[int, RankBoxes]], Callable[[], None] | None]
"""Does the work of all ranks; may return what does it again for tensors at the same places."""

_MOST_KNOWN = 512


@dataclass(frozen=True)
class KnownCalls:
    """What ranks remember of calls, since programs go round in steps: no tensor is kept alive."""

    work: dict[Any, Callable[[], None]] = field(default_factory=dict)
    messages: dict[Any, tuple[bytes, LentTensors]] = field(default_factory=dict)


def _remember(known: dict[Any, T], key: Any, value: T) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = value


class LedCall(PeerCall):
    """One call that the leader carries out for all ranks: `work` is called there, with the tensors of all of them."""

    def __init__(
        self,
        call: str,
        rank: int,
        ranks: Sequence[int],
        boxes: CallBoxes,
        work: LeaderWork,
        peers: DevicePeers,
        known: KnownCalls,
    ) -> None:
        self._leader, leads = ranks[0], rank == ranks[0]
        super().__init__(call, ranks[1:] if leads else (), () if leads else (self._leader,))
        self._rank, self._ranks, self._boxes, self._work, self._peers = rank, ranks, boxes, work, peers
        self._known = known
        self._arrived: dict[int, bytes] = {}
        self._written: list[tuple[Tensor, Tensor]] = []  # tensors, and copies of them that the leader fills
        self._kept: Sequence[Tensor] = ()
        self._started_on, self._stream = peers.current_stream(), None

    def describe(self) -> dict[int, bytes]:
        """Mark the moment at which this rank's tensors are ready; return its message to the leader."""
        if self._rank == self._leader:
            return {}
        places, stream = self._boxes.places(), self._started_on
        known = self._known.messages.get(places)
        if known is None or not self._peers.is_current(self._leader, known[1]):
            known = self._describe_boxes(places)
        idle = stream is None or stream.query()  # after the copies of what cannot be opened
        if not idle:
            self._peers.mark(LENT, self.number, stream)
        return {self._leader: (b"1" if idle else b"0") + known[0] + known[1].message}

    def _describe_boxes(self, places: Any) -> tuple[bytes, LentTensors]:
        boxes = self._boxes.cut()
        tensors = boxes.flatten()
        lent, self._kept = self._peers.describe_to(self._leader, tensors, rank=self._rank, call=self.call)
        filled = sum(map(len, boxes.receives.values()))
        pairs = zip(tensors[len(tensors) - filled :], self._kept[len(tensors) - filled :], strict=True)
        self._written = [(target, copy) for target, copy in pairs if target is not copy]
        if lent.is_repeatable:
            _remember(self._known.messages, places, (boxes.header(), lent))
        return boxes.header(), lent

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
        arrived = [self._arrived[rank] for rank in self._ranks[1:]]
        for rank, message in zip(self._ranks[1:], arrived, strict=True):
            if not message.startswith(b"1"):
                self._peers.events.wait(rank, LENT, self.number, self._stream)
        places = self.call, self._stream, self._boxes.places(), *[message[1:] for message in arrived]
        again = self._known.work.get((self._peers.closings(), places))
        if again is not None:
            again()
        else:
            self._do_work(places)
        self._peers.mark(READ, self.number, self._stream)

    def _do_work(self, places: Any) -> None:
        boxes = {self._rank: self._boxes.cut()}
        for rank in self._ranks[1:]:
            header, _, message = self._arrived[rank][1:].partition(b"\n")
            boxes[rank] = read_boxes(header, self._peers.read(rank, message))
        again = self._work(boxes)
        if again is not None:
            _remember(self._known.work, (self._peers.closings(), places), again)

    def settle(self) -> None:
        """Let the current stream wait for the leader's work."""
        stream = self._peers.current_stream()
        if self._rank != self._leader:
            self._peers.await_readers((self._leader,), self.number, stream)
            for target, copy in self._written:
                target.copy_(copy)
        else:
            self._peers.order_streams(stream, self._stream)
        self._peers.order_streams(self._started_on, stream)
        self._boxes, self._kept, self._written = _NO_BOXES, (), []

    def give_up(self, ended: set[int]) -> None:
        """After a failure: what the leader does with this rank's memory, it has done before its program goes on."""
        self._peers.await_possible_readers({self._leader} - ended - {self._rank}, self.number)


_NO_BOXES = boxes_as_they_are(RankBoxes({}, {}))
