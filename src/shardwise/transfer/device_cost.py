"""Which transport is faster between the GPUs of one host: reading through CUDA IPC, or nccl? A model without devices.

1. A transport takes a latency for each call and moves bytes at a bandwidth (`Link`); the busiest GPU sets the time.
2. Boxes with strides are read where they are. nccl takes runs of memory, so they are packed before and unpacked
   after: bytes that are copied within a GPU, at a third bandwidth.
3. What a transfer asks of each transport is counted from the plan, or from the sizes of a collective. Ranks have these
   in common, and the rates as well, so that all of them choose alike.

The default rates are estimates, from the figures of vendors and from one H200: nothing was measured between GPUs. They
are constants, so that a program sums in the same order each time it runs. `combine_seconds` makes rates of what ranks
measured, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardwise.geometry.cells import PieceTable
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.routes import Routes, Step
from shardwise.transfer.topology import Link
from shardwise.transfer.transfer import Transfer

DeviceTransport = Literal["ipc", "nccl"]
SMALL_SAMPLE, LARGE_SAMPLE = 1 << 12, 1 << 25  # bytes that each rank gathers from each other one to measure a transport


@dataclass(frozen=True)
class DeviceRates:
    """The latency of a call and the bandwidth of a GPU's port for both transports, and those of a copy within a GPU."""

    ipc: Link
    nccl: Link
    copy: Link


DEFAULT_RATES = DeviceRates(
    # About 0.1 ms of Python and messages on the host, the same for both: places and confirmations here, a comparison of
    # calls there. A copy that reads through NVLink (450 GB/s each way) is launched like any other, and reaches about
    # two thirds of the link.
    ipc=Link(latency=110e-6, bandwidth=300e9),
    # nccl's kernels synchronise with those of all peers before they move bytes, and fill the link better.
    nccl=Link(latency=130e-6, bandwidth=370e9),
    # A copied byte is read and written: half of the 4.2 TB/s that copies reach on an H200; one launch.
    copy=Link(latency=5e-6, bandwidth=2.1e12),
)


@dataclass(frozen=True)
class DeviceTraffic:
    """What a transfer asks of its busiest rank: calls, bytes in or out, and bytes that messages need packed.

    >>> DeviceTraffic(1, 100, 50) + DeviceTraffic(1, 10, 0)
    DeviceTraffic(calls=2, port_bytes=110, packed_bytes=50)
    """

    calls: int
    port_bytes: int
    packed_bytes: int

    def __add__(self, other: DeviceTraffic) -> DeviceTraffic:
        return DeviceTraffic(
            self.calls + other.calls, self.port_bytes + other.port_bytes, self.packed_bytes + other.packed_bytes
        )


@dataclass(frozen=True)
class TransportWork:
    """What one transport does for a transfer, on its busiest rank; `copied_bytes` stay within the GPU."""

    calls: int
    port_bytes: int
    copied_bytes: int = 0

    def seconds(self, link: Link, copy: Link) -> float:
        """How long that takes; packing and unpacking are a copy each."""
        copying = copy.seconds(2, self.copied_bytes) if self.copied_bytes else 0.0
        return link.seconds(self.calls, self.port_bytes) + copying


TransportWorks = tuple[TransportWork, TransportWork]
"""What reading and what nccl would do."""


@dataclass(frozen=True)
class TransportChoice:
    """The faster transport, and what both would take.

    >>> print(TransportChoice("ipc", 2e-4, 3e-4))
    ipc (0.200 ms, nccl 0.300 ms)
    """

    transport: DeviceTransport
    ipc_seconds: float
    nccl_seconds: float

    def __str__(self) -> str:
        times = {"ipc": self.ipc_seconds, "nccl": self.nccl_seconds}
        chosen = times.pop(self.transport)
        ((other, slower),) = times.items()
        return f"{self.transport} ({1e3 * chosen:.3f} ms, {other} {1e3 * slower:.3f} ms)"


def choose_transport(works: TransportWorks, rates: DeviceRates = DEFAULT_RATES) -> TransportChoice:
    """The faster transport.

    >>> whole, strided = DeviceTraffic(1, 100 << 20, 0), DeviceTraffic(1, 100 << 20, 200 << 20)
    >>> [choose_transport(work_for_moves(traffic)).transport for traffic in (whole, strided)]
    ['nccl', 'ipc']
    """
    ipc, nccl = works[0].seconds(rates.ipc, rates.copy), works[1].seconds(rates.nccl, rates.copy)
    return TransportChoice("ipc" if ipc <= nccl else "nccl", ipc, nccl)


def work_for_moves(traffic: DeviceTraffic) -> TransportWorks:
    """The work of a transfer as boxes that are read, and as packed messages."""
    calls, port = max(1, traffic.calls), traffic.port_bytes
    return TransportWork(calls, port), TransportWork(calls, port, traffic.packed_bytes)


def work_for_gather(part: int, world: int) -> TransportWorks:
    """The work of an all-gather of so many bytes from each rank."""
    both = TransportWork(1, (world - 1) * part)
    return both, both


def work_for_reduce_scatter(part: int, world: int) -> TransportWorks:
    """The work of a reduce-scatter in which each rank ends with so many bytes; readers keep sums in between."""
    port = (world - 1) * part
    return TransportWork(1, port, max(0, world - 2) * part), TransportWork(1, port)


def work_for_all_reduce(nbytes: int, world: int) -> TransportWorks:
    """The work of an all-reduce; readers of few bytes read everything in one call, and take two for more."""
    share = (world - 1) * nbytes // world
    one, two = _work_of_readers(nbytes, world)
    return one if is_one_shot_faster(nbytes, world) else two, TransportWork(1, 2 * share)


def is_one_shot_faster(nbytes: int, world: int) -> bool:
    """Whether ranks that read all of each other's tensors end sooner than those that scatter sums and gather them.

    By constant rates, so that a program has the same calls each time it runs.

    >>> [is_one_shot_faster(size << 20, 4) for size in (1, 16, 64)]
    [True, True, False]
    """
    one, two = (work.seconds(DEFAULT_RATES.ipc, DEFAULT_RATES.copy) for work in _work_of_readers(nbytes, world))
    return one <= two


def _work_of_readers(nbytes: int, world: int) -> tuple[TransportWork, TransportWork]:
    """An all-reduce in one call, in which every rank reads everything, and in two, in which it reads its share."""
    share = (world - 1) * nbytes // world
    return TransportWork(1, (world - 1) * nbytes, world * nbytes), TransportWork(2, 2 * share, share)


def work_for_broadcast(nbytes: int, world: int) -> TransportWorks:
    """The work of a broadcast: all readers read from one GPU, whose port sends the bytes to each of them."""
    return TransportWork(1, (world - 1) * nbytes), TransportWork(1, nbytes)


def count_traffic(transfer: Transfer) -> DeviceTraffic | None:
    """What a whole plan asks of its busiest rank; None for the part of one rank, which does not know the others.

    >>> import shardwise
    >>> rows, columns = (shardwise.ChunkSpec(dim, ranks=2).layout((4, 6)) for dim in (0, 1))
    >>> count_traffic(shardwise.plan_transfer(rows, columns, itemsize=4))  # columns are cut out of rows
    DeviceTraffic(calls=1, port_bytes=24, packed_bytes=24)
    """
    if transfer.rank is not None:
        return None
    total = DeviceTraffic(0, 0, 0)
    for step in transfer.steps:
        total += _count_step(step, transfer.itemsize)
    return total


def _count_step(step: Step, itemsize: int) -> DeviceTraffic:
    routes, elements = step.routes, step.routes.elements()
    width = 1 + max(int(ranks.max(initial=0)) for ranks in (routes.src_ranks, routes.dst_ranks))
    packed = np.where(_are_runs(routes, routes.src_rows, step.src.table), 0, elements)
    staged = elements if step.op is not None else None  # terms arrive in buffers, whatever their shape
    if staged is None:
        staged = np.where(_are_runs(routes, routes.dst_rows, step.dst.table), 0, elements)
    sent, received = _sum_by_rank(routes.src_ranks, elements, width), _sum_by_rank(routes.dst_ranks, elements, width)
    copied = _sum_by_rank(routes.src_ranks, packed, width) + _sum_by_rank(routes.dst_ranks, staged, width)
    port = int(np.maximum(sent, received).max(initial=0))
    return DeviceTraffic(step.rounds, port * itemsize, int(copied.max(initial=0)) * itemsize)


def _sum_by_rank(ranks: IntArray, amounts: IntArray, width: int) -> IntArray:
    total = np.zeros(width, np.int64)
    np.add.at(total, ranks, amounts)
    return total


def _are_runs(routes: Routes, rows: IntArray, table: PieceTable) -> IntArray:
    """Which boxes are one run of memory of their local tensor: whole but for one dim, after dims of length 1."""
    tensors = _local_sizes(table)[rows]
    is_run = np.ones(len(routes), bool)
    inner_whole = np.ones(len(routes), bool)
    for dim in reversed(range(routes.sizes.shape[1])):
        is_run &= inner_whole | (routes.sizes[:, dim] == 1)
        inner_whole &= routes.sizes[:, dim] == tensors[:, dim]
    return is_run.astype(np.int64)


def _local_sizes(table: PieceTable) -> IntArray:
    """The shape of the local tensor that each piece is in."""
    width = int(table.slots.max(initial=0)) + 1
    tensors, index = np.unique(table.ranks * width + table.slots, return_inverse=True)
    sizes: IntArray = np.zeros((len(tensors), table.sizes.shape[1]), np.int64)
    np.maximum.at(sizes, index.reshape(-1), table.local_offsets + table.sizes)
    found: IntArray = sizes[index.reshape(-1)]
    return found


def combine_seconds(by_rank: Sequence[Mapping[str, tuple[float, float]]]) -> DeviceRates:
    """The rates that follow from what all ranks measured: seconds for the small and for the large sample.

    A call ends when its slowest rank does, so the longest times count. Every rank has the same list, and so the rates.

    >>> fast, slow = ({"ipc": (1e-4, 2e-4), "nccl": (1e-4, n), "copy": (1e-5, 2e-5)} for n in (2e-4, 3e-4))
    >>> combine_seconds([fast, slow]) == combine_seconds([slow, fast])
    True
    """
    links = {}
    for name in ("ipc", "nccl", "copy"):
        small, large = (max(times[name][i] for times in by_rank) for i in (0, 1))
        links[name] = Link(small, (LARGE_SAMPLE - SMALL_SAMPLE) / max(large - small, large * 1e-3, 1e-9))
    return DeviceRates(**links)
