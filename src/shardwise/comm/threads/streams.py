"""The order of work on a GPU that ranks share as threads: streams wait for each other only where they differ.

A stream is known here by its handle, a number that is read much faster than torch makes an object of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from shardwise._torch import current_raw_stream

_DEFAULT = 0  # the handle of every device's default stream


def find_stream(device: torch.device) -> int | None:
    """The handle of this thread's stream of a device; None on the CPU."""
    if device.type != "cuda":
        return None
    index = cast("int | None", device.index)  # torch's types know no device without one
    return current_raw_stream(torch.cuda.current_device() if index is None else index)


def wait_for_streams(device: torch.device, stream: int, others: Iterable[int | None]) -> None:
    """Have a stream wait for those of other ranks; if there are any, also for the default stream.

    Ranks that use streams of their own still share tensors that were made on the default one.
    """
    different = {other for other in others if other is not None} - {stream}
    for other in (different | {_DEFAULT}) - {stream} if different else ():
        _open_stream(device, stream).wait_stream(_open_stream(device, other))


def follow_stream(device: torch.device, stream: int, done: int | None) -> None:
    """Have a stream follow the one on which work was done for it, and the default stream follow both."""
    if done is not None and done != stream:
        _open_stream(device, stream).wait_stream(_open_stream(device, done))
    if stream != _DEFAULT:
        _open_stream(device, _DEFAULT).wait_stream(_open_stream(device, stream))


def _open_stream(device: torch.device, handle: int) -> Any:
    if handle == _DEFAULT:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]  # untyped in torch
