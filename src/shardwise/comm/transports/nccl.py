"""Device memory over a group whose backend takes it (nccl): torch's own collectives, on the current stream.

Ranks compare what they call before a collective starts, over an engine of host memory: that of the group's own gloo
(`cpu:gloo,cuda:nccl`), or of a gloo group of the same ranks. So nothing that the host has to know goes through the
device, which would stop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.comm.faults import to_transport_error
from shardwise.comm.flat_tensors import Edges, as_bytes
from shardwise.comm.protocol import Capabilities, CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.transports.engine import Engine


class NativeEngine(Engine):
    """Moves device tensors between the ranks of a group; over `host` they compare their calls."""

    capabilities = Capabilities(captures_graphs=True)

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        host: Engine,
    ) -> None:
        self._group, self._ranks, self.device, self._host = group, ranks, device, host
        self._others = self.awaited = tuple(r for r in ranks if r != rank)

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Post all sends and receives as one batch."""
        self._compare(call)
        posts = [dist.P2POp(dist.irecv, t, peer, self._group) for peer, ts in receives.items() for t in ts]
        posts += [dist.P2POp(dist.isend, t, peer, self._group) for peer, ts in sends.items() for t in ts]
        if not posts:
            return CompletedWork()
        works = self._guard(partial(dist.batch_isend_irecv, posts))
        return PendingWork(partial(self._wait, works))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Gather as bytes, so that every dtype is taken."""
        self._compare(call)
        return self._gather_into(out, tensor, call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce and scatter on the device."""
        self._compare(call)
        return self._start(partial(reduce_scatter_single, out, tensor, _torch_op(op), self._group))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce in place on the device."""
        self._compare(call)
        return self._start(partial(dist.all_reduce, tensor, op=_torch_op(op), group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Broadcast as bytes."""
        self._compare(call)
        view = as_bytes(tensor, label=call)
        return self._start(partial(dist.broadcast, view, src, group=self._group, async_op=True))

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Gather over the host."""
        return self._host.all_gather_bytes(data, call=call)

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify the others over the host."""
        self._host.abort(reason, ranks)

    def close(self) -> None:
        """Close what the host holds."""
        self._host.close()

    def _compare(self, call: str) -> None:
        """Fail on every rank if a rank makes another call, before the collective starts."""
        self._host.all_gather_bytes(b"", call=call)

    def _gather_into(self, out: Tensor, tensor: Tensor, call: str) -> Work:
        whole, part = as_bytes(out, label=call), as_bytes(tensor, label=call)
        return self._start(partial(all_gather_single, whole, part, self._group))

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
