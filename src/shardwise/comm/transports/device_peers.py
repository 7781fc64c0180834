"""What a rank needs to read the device memory of its peers, and they to read its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.faults import TransportError
from shardwise.comm.transports.device_memory import OpenedSegments, PeerEvents, SharedSegments


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
        self._shared, self._opened, self._owners = shared, opened, owners

    def describe(self, lent: Mapping[int, Sequence[Tensor]]) -> tuple[dict[int, bytes], dict[int, list[Tensor]]]:
        """Return the messages that lend tensors to ranks, and the tensors to keep until they have been read."""
        try:
            return self._shared.describe(lent)
        except OSError as error:
            raise TransportError(f"its memory cannot be lent: {error}", tuple(lent)) from error

    def read(self, rank: int, message: bytes) -> list[Tensor]:
        """Return the tensors that a rank lends."""
        try:
            return self._opened.read(self._owners[rank], message)
        except OSError as error:
            raise TransportError(f"its device memory cannot be read ({error})", (rank,)) from error

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
