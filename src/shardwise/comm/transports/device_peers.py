"""What a rank needs to read the device memory of its peers, and they to read its own.

Before a process ends it waits, for a short time, until its streams have passed the moments that it marked for others,
and those of others at which they have read its memory: work that is queued ends with its process, and streams of
others would wait for it for ever; memory ends with its process as well.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.faults import TransportError
from shardwise.comm.transports.device_memory import READ, LentTensors, OpenedSegments, PeerEvents, SharedSegments

_EXIT_SECONDS, _LOOK_SECONDS = 5.0, 0.001


class DevicePeers:
    """What a rank needs to read the device memory of its peers, and they to read its own."""

    def __init__(
        self,
        device: torch.device,
        shared: SharedSegments,
        opened: OpenedSegments,
        events: PeerEvents,
        owners: Mapping[int, str],
    ) -> None:
        self.device, self.events = device, events
        self._used: set[Any] = set()  # streams on which something was marked, or awaited
        _peers.add(self)
        self._shared, self._opened, self._owners = shared, opened, owners

    def describe(
        self, lent: Mapping[int, Sequence[Tensor]], *, rank: int, call: str
    ) -> tuple[dict[int, bytes], dict[int, list[Tensor]]]:
        """Return the messages by which `rank` lends tensors to others, and the tensors to keep until they are read."""
        try:
            return self._shared.describe(lent)
        except OSError as error:
            raise TransportError(
                f"{call}: rank {rank} cannot lend its tensors: {error}", (rank,), exact=True
            ) from error

    def describe_to(
        self, peer: int, tensors: Sequence[Tensor], *, rank: int, call: str
    ) -> tuple[LentTensors, list[Tensor]]:
        """Return what one peer must know of tensors, and the tensors to keep until they have been read."""
        try:
            return self._shared.describe_to(peer, tensors)
        except OSError as error:
            raise TransportError(
                f"{call}: rank {rank} cannot lend its tensors: {error}", (rank,), exact=True
            ) from error

    def is_current(self, rank: int, lent: LentTensors) -> bool:
        """Whether an earlier description of tensors at the same places is still right."""
        return self._shared.is_current(rank, lent)

    def read(self, rank: int, message: bytes) -> list[Tensor]:
        """Return the tensors that a rank lends."""
        try:
            return self._opened.read(self._owners[rank], message)
        except OSError as error:
            raise TransportError(f"its device memory cannot be read ({error})", (rank,)) from error

    def mark(self, moment: int, number: int, stream: Any) -> None:
        """Mark the end of what a stream has to do so far, for the streams of others."""
        self.events.record(moment, number, stream)
        if stream is not None:
            self._used.add(stream)

    def await_readers(self, ranks: Iterable[int], number: int, stream: Any) -> None:
        """Let a stream wait until ranks have read, or written, what this rank lent them in a call."""
        for rank in ranks:
            self.events.wait(rank, READ, number, stream)
            if stream is not None:
                self._used.add(stream)

    def await_possible_readers(self, ranks: Iterable[int], number: int) -> None:
        """After a failure: let the current stream wait for ranks that use what was lent, if they do."""
        with suppress(RuntimeError):  # the device itself may have failed: then nothing is left to wait for
            for rank in ranks:
                self.events.wait_if_marked(rank, READ, number, self.current_stream())

    def passes_marks(self, seconds: float) -> bool:
        """Wait until the used streams have nothing left to do; whether they have, within so many seconds."""
        deadline = time.monotonic() + seconds
        while not all(stream.query() for stream in self._used):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def closings(self) -> int:
        """Return how often memory of other ranks was closed: what was known of it before may be wrong."""
        return self._opened.changes

    @staticmethod
    def order_streams(later: Any, earlier: Any) -> None:
        """Let one stream wait for what another one has to do so far, unless they are the same."""
        if earlier is not None and earlier != later:
            later.wait_stream(earlier)

    def current_stream(self) -> Any:
        """Return the stream on which this thread works; None where the device has none."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


_peers: weakref.WeakSet[DevicePeers] = weakref.WeakSet()


@atexit.register
def _pass_all_marks() -> None:
    """Not longer than a few seconds: a stream that waits for a process that was killed never ends."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for peers in list(_peers):
        try:
            peers.passes_marks(max(0.0, deadline - time.monotonic()))
        except RuntimeError:
            continue  # the device has failed: nothing is left to wait for
