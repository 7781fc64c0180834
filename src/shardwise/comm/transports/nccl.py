"""Device memory over a group whose backend takes it (nccl): torch's own collectives, on the current stream.

Ranks compare what they call where bytes of the host are gathered; a collective on device memory is not held up for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.comm.faults import TransportError, to_transport_error
from shardwise.comm.flat_tensors import Edges, as_bytes
from shardwise.comm.protocol import CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.rank_text import name_ranks

_HEAD = struct.Struct("<qI")


class NativeEngine:
    """Moves device tensors between the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], device: torch.device) -> None:
        self._group, self._ranks, self.device = group, ranks, device
        self._others = self.awaited = tuple(r for r in ranks if r != rank)

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Post all sends and receives as one batch."""
        posts = [dist.P2POp(dist.irecv, t, peer, self._group) for peer, ts in receives.items() for t in ts]
        posts += [dist.P2POp(dist.isend, t, peer, self._group) for peer, ts in sends.items() for t in ts]
        if not posts:
            return CompletedWork()
        works = self._guard(partial(dist.batch_isend_irecv, posts))
        return PendingWork(partial(self._wait, works))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Gather as bytes, so that every dtype is taken."""
        whole, part = as_bytes(out, label=call), as_bytes(tensor, label=call)
        return self._start(partial(all_gather_single, whole, part, self._group))

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce and scatter on the device."""
        return self._start(partial(reduce_scatter_single, out, tensor, _torch_op(op), self._group))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce in place on the device."""
        return self._start(partial(dist.all_reduce, tensor, op=_torch_op(op), group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Broadcast as bytes."""
        view = as_bytes(tensor, label=call)
        return self._start(partial(dist.broadcast, view, src, group=self._group, async_op=True))

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Gather the lengths and what is called, then the bytes padded to the longest."""
        check = zlib.crc32(call.encode())
        heads = [_HEAD.unpack(head) for head in self._gather(_HEAD.pack(len(data), check), call)]
        other = [rank for rank, (_, theirs) in zip(self._ranks, heads, strict=True) if theirs != check]
        if other:
            raise TransportError(
                f"the ranks made different calls: {name_ranks(other)} not in {call}", other, exact=True
            )
        sizes = [size for size, _ in heads]
        parts = self._gather(data.ljust(max(sizes), b"\0"), call) if max(sizes) else [b""] * len(sizes)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """The notes in the store report it."""

    def close(self) -> None:
        """Nothing is held."""

    def _gather(self, data: bytes, call: str) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        out = mine.new_empty(len(self._ranks) * len(data))
        self.all_gather_into(out, mine, call=call).wait()
        whole = out.cpu().numpy().tobytes()
        return [whole[i * len(data) : (i + 1) * len(data)] for i in range(len(self._ranks))]

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
