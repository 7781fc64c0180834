"""GPUs of one host in a group with nccl: each transfer goes by the transport that is faster for it.

1. The ranks connect to read each other's device memory (`device_connect`). If they cannot, nccl does everything. If two
   of them share a GPU, which nccl refuses, everything is read.
2. Otherwise a model (`transfer.device_cost`) decides for every transfer. It is a function of what all ranks have in
   common: the plan or the sizes of a collective, and the rates. So all of them decide alike, without a message.
3. An `exchange` of messages whose sizes only both ends know always goes by nccl.
4. SHARDWISE_DEVICE_TRANSPORT, or an argument of the comm, sets what is asked for: `auto`, `measured` (rates that the
   ranks measure together when they connect), `ipc` or `nccl`; the same on every rank.

Ranks compare their calls over the sockets of the readers before nccl starts. That also keeps the order on the devices:
a rank reads what is lent in earlier calls before its nccl kernel waits for those of the others. While ranks still agree
on what they ask for, a call by nccl is not started: it could not be taken back.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise._log import package_logger
from shardwise.comm.flat_tensors import Edges
from shardwise.comm.protocol import PendingWork, ReduceOp, TakeLent, Work
from shardwise.comm.rank_text import fold_texts, name_ranks
from shardwise.comm.transports.device_connect import connect_devices
from shardwise.comm.transports.device_leader import CutBoxes, TensorsByRank
from shardwise.comm.transports.engine import AgreeingEngine, Engine, Gatherer, LendingEngine
from shardwise.comm.transports.nccl import NativeEngine
from shardwise.transfer.device_cost import (
    DEFAULT_RATES,
    LARGE_SAMPLE,
    SMALL_SAMPLE,
    DeviceRates,
    DeviceTraffic,
    TransportWorks,
    choose_transport,
    combine_seconds,
    work_for_all_reduce,
    work_for_broadcast,
    work_for_gather,
    work_for_moves,
    work_for_reduce_scatter,
)

VARIABLE = "SHARDWISE_DEVICE_TRANSPORT"
REQUESTS = ("auto", "measured", "ipc", "nccl")
_log = package_logger(__name__)


def find_request(argument: str | None) -> str:
    """Return which transport is asked for, by an argument or else by the variable."""
    found = argument or os.environ.get(VARIABLE) or "auto"
    if found not in REQUESTS:
        raise ValueError(
            f"device transport {found!r} (argument device_transport, or {VARIABLE}): use one of {REQUESTS}"
        )
    return found


class ReadingEngine(AgreeingEngine, LendingEngine, Protocol):
    """An engine that reads device memory, and can start a call while ranks agree."""

    @property
    def is_agreeing(self) -> bool:
        """Whether ranks compare what they ask for: a call that is started now may be withdrawn."""
        ...


class DeviceChoiceEngine:
    """Moves device tensors by one of two engines: `reading` other ranks' memory, or `native` collectives."""

    def __init__(self, reading: ReadingEngine, native: Engine, rank: int, world: int, rates: DeviceRates) -> None:
        self._reading, self._native, self._rank, self._world = reading, native, rank, world
        self.rates, self.device = rates, reading.device

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that the present wait is for; nccl's calls are compared over the readers' sockets."""
        return self._reading.awaited

    def prefers_lending(self, traffic: DeviceTraffic | None) -> bool:
        """Whether a transfer is to be read: if what it asks of the ranks is known, and reading is faster."""
        return traffic is not None and self._reads(work_for_moves(traffic), "moves")

    def exchange_boxes(self, sends: TensorsByRank, receives: TensorsByRank, *, call: str) -> Work:
        """Read boxes where they are."""
        return self._reading.exchange_boxes(sends, receives, call=call)

    def exchange_cut(self, key: Hashable, bases: Sequence[Tensor], cut: CutBoxes, *, call: str) -> Work:
        """Read boxes where they are."""
        return self._reading.exchange_cut(key, bases, cut, call=call)

    def lend(self, sends: TensorsByRank, receives: Iterable[int], take: TakeLent, *, call: str) -> Work:
        """Read what others lend."""
        return self._reading.lend(sends, receives, take, call=call)

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Send messages by nccl; not before the ranks have agreed."""
        if not self._reading.is_agreeing:
            return self._native.exchange(sends, receives, call=call)
        return PendingWork(lambda: self._native.exchange(sends, receives, call=call).wait())

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Gather by the faster transport."""
        return self._pick(work_for_gather(tensor.nbytes, self._world), call).all_gather_into(out, tensor, call=call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce and scatter by the faster transport."""
        engine = self._pick(work_for_reduce_scatter(out.nbytes, self._world), call)
        return engine.reduce_scatter_into(out, tensor, op, call=call)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce by the faster transport."""
        return self._pick(work_for_all_reduce(tensor.nbytes, self._world), call).all_reduce(tensor, op, call=call)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce into another tensor by the faster transport."""
        if self._reads(work_for_all_reduce(tensor.nbytes, self._world), call):
            return self._reading.all_reduce_into(out, tensor, op, call=call)
        return self._native.all_reduce(out.copy_(tensor), op, call=call)

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Broadcast by the faster transport."""
        return self._pick(work_for_broadcast(tensor.nbytes, self._world), call).broadcast(tensor, src, call=call)

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Gather over the readers' sockets."""
        return self._reading.all_gather_bytes(data, call=call)

    @property
    def calls(self) -> int:
        """The number of the last call that was started."""
        return self._reading.calls

    def start_agreeing(self, data: bytes, *, call: str) -> Callable[[], list[bytes]]:
        """Send bytes to all others; returns what waits for theirs."""
        return self._reading.start_agreeing(data, call=call)

    def withdraw_call(self, number: int) -> None:
        """Take back a call that some ranks have started and others have not."""
        self._reading.withdraw_call(number)

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify the others that this rank has stopped."""
        self._reading.abort(reason, ranks)
        self._native.abort(reason, ranks)

    def close(self) -> None:
        """Close both."""
        self._reading.close()
        self._native.close()

    def _pick(self, works: TransportWorks, call: str) -> Engine:
        return self._reading if self._reads(works, call) else self._native

    def _reads(self, works: TransportWorks, call: str) -> bool:
        choice = choose_transport(works, self.rates)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("rank %d: %s of %d bytes by %s", self._rank, call, works[1].port_bytes, choice)
        return choice.transport == "ipc"


def choose_device_engine(
    native: NativeEngine, host: Gatherer, rank: int, ranks: tuple[int, ...], timeout: float, request: str
) -> Engine:
    """The engine for ranks of one host with nccl, of one kind on every rank; `host` is how they talk before."""
    request = _agree_on_request(host, ranks, request)
    if request == "nccl":
        return native
    reading = connect_devices(host, rank, ranks, native.device, timeout, wanted=True, instead="nccl is used")
    if reading is None:
        return native
    if request == "ipc" or reading.shares_gpu:
        why = "as was asked" if request == "ipc" else "some share a GPU, which nccl refuses"
        _log_once(rank, ranks, f"read each other's device memory and do not use nccl: {why}")
        return reading
    native.compare_over(reading)
    rates = DEFAULT_RATES if request == "auto" else measure_rates(reading, native, rank, ranks)
    _log_once(rank, ranks, f"read device memory or use nccl, by what is faster ({request}: {_describe_rates(rates)})")
    return DeviceChoiceEngine(reading, native, rank, len(ranks), rates)


def _agree_on_request(host: Gatherer, ranks: tuple[int, ...], request: str) -> str:
    said = host.all_gather_bytes(request.encode(), call="choose device transport")
    if len(set(said)) > 1:
        texts = fold_texts({r: repr(data.decode()) for r, data in zip(ranks, said, strict=True)})
        raise ValueError(f"ranks ask for different device transports ({texts}); set {VARIABLE} alike on every rank")
    return request


def measure_rates(reading: Engine, native: Engine, rank: int, ranks: Sequence[int]) -> DeviceRates:
    """Measure both transports on all ranks together, and combine what they measured: the same on every rank."""
    seconds = {
        name: (_measure_gather(engine, len(ranks), SMALL_SAMPLE), _measure_gather(engine, len(ranks), LARGE_SAMPLE))
        for name, engine in (("ipc", reading), ("nccl", native))
    }
    seconds["copy"] = (_measure_copy(reading.device, SMALL_SAMPLE), _measure_copy(reading.device, LARGE_SAMPLE))
    told = reading.all_gather_bytes(json.dumps(seconds).encode(), call="measure device transports")
    return combine_seconds([json.loads(data) for data in told])


def _measure_gather(engine: Engine, world: int, received: int) -> float:
    """Seconds of an all-gather in which each rank receives so many bytes."""
    size = max(1, received // max(1, world - 1))
    part, out = _make_sample(engine.device, size), _make_sample(engine.device, world * size)
    return _best_seconds(lambda: engine.all_gather_into(out, part, call="measure").wait(), engine.device)


def _measure_copy(device: torch.device, size: int) -> float:
    source, target = _make_sample(device, size), _make_sample(device, size)
    return _best_seconds(lambda: target.copy_(source), device)


def _make_sample(device: torch.device, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _best_seconds(run: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """The shortest of some runs, after one that opens memory and connects."""
    found = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def _describe_rates(rates: DeviceRates) -> str:
    links = {"ipc": rates.ipc, "nccl": rates.nccl, "copies": rates.copy}
    return ", ".join(f"{n} {1e6 * k.latency:.0f} us and {k.bandwidth / 1e9:.0f} GB/s" for n, k in links.items())


def _log_once(rank: int, ranks: Sequence[int], text: str) -> None:
    _log.log(logging.INFO if rank == ranks[0] else logging.DEBUG, "%s %s", name_ranks(ranks), text)
