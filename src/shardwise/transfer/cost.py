"""How many seconds does a move take as it is carried out, and a computation on a device? The one cost table.

What reads it: `Transfer.estimate`, the choice of who reduces, `shardwise plan`, `shardwise model`, the planner, the
page. All of it is arithmetic on figures of a plan, so every rank finds the same.

A link has a latency `a` (until the first byte arrives), an overhead `o` for each message, a bandwidth `1/b` of a port,
and what a call costs before anything is sent, `c`. `n` are the bytes of the whole result in a group of `p` ranks, `g`
seconds per byte that is combined or copied.

| runs as | seconds |
|---|---|
| exchange of boxes, each round | `c + a + o * most messages of a port + b * most bytes of a port`, links in parallel |
| all-gather, reduce-scatter (ring) | `c + (p-1) a + (p-1)/p n b` (`+ (p-1)/p n g`) |
| all-reduce, ring or tree | the less of `c + 2(p-1) a + 2(p-1)/p n b` and `c + 2 ceil(log2 p) (a + n b)`, and `g` |
| all-reduce over hosts of q ranks | ring within for `n`, between for `n/q`, within again |
| all-reduce, reduce-scatter by messages | an exchange of `p-1` messages; an all-reduce is two of them |
| broadcast | the less of `c + ceil(log2 p) (a + n b)` and `c + p a + n b` |

A collective is priced only where the comm makes it by itself; any other transfer runs as exchanges. Which of the two
it is says `find_comm_collective`, which also decides it when the transfer is carried out.

A computation takes the longer of its operations and its bytes (a roofline), and the launch of a kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from shardwise.geometry.box import LayoutError
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.notation import DType, find_dtype
from shardwise.transfer.topology import Link, Topology, read_toml

# What a device computes


@dataclass(frozen=True)
class Device:
    """Memory in bytes, and dense operations per second in bf16; the rest has values of an accelerator.

    - `efficiency`: the share of `flops` that large products reach; smaller ones reach less (`product_rate`).
    - `bandwidth`: bytes per second of its memory; `launch`: seconds of a kernel without work.
    - `eager_call`: seconds in which Python dispatches an operator. With `asynchronous` the device computes meanwhile.
    - `eager_moves`: seconds of a move in an eager step beside its bytes, by what is moved ("gather" of a parameter,
      "gradient", "activation"), where they were measured; they replace what a link takes for a call.
    - `overlap`: the share of what travels beside computation that does not hold it up: on a CPU moving takes cores.
    - `products`: measured operations per second by dtype, as rows (m, n, k, rate); they replace `flops`.

    >>> DEVICES["h100"].memory_bytes
    80000000000
    """

    name: str
    memory_bytes: int
    flops: float
    efficiency: float = 0.7
    bandwidth: float = 2e12
    launch: float = 3e-6
    eager_call: float = 20e-6
    asynchronous: bool = True
    overlap: float = 1.0
    products: Mapping[str, tuple[tuple[float, float, float, float], ...]] = field(default_factory=dict)
    eager_moves: Mapping[str, float] = field(default_factory=dict)

    def move_seconds(self, kind: str, seconds: float, empty: float) -> float:
        """The seconds of a move of a kind in an eager step; `empty`: those that the links take for no bytes.

        >>> Device("small", 1, 1.0, eager_moves={"gather": 2.0}).move_seconds("gather", 5.0, 1.0)
        6.0
        """
        return seconds if kind not in self.eager_moves else seconds - empty + self.eager_moves[kind]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Device:
        """The device that `shardwise topology -o FILE` measured."""
        data = read_toml(path).get("device")
        if data is None:
            raise LayoutError(f"{path} describes no device; make one that does: shardwise topology -o {path}")
        try:
            return cls(**{**data, "products": {k: tuple(map(tuple, v)) for k, v in data["products"].items()}})
        except (KeyError, TypeError, AttributeError) as error:
            raise LayoutError(f"{path} describes no device that can be used: {error}") from error


GB, TERA = 10**9, 1e12
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * GB, 312 * TERA, bandwidth=1.555e12),
        Device("a100", 80 * GB, 312 * TERA, bandwidth=2.039e12),
        Device("h100", 80 * GB, 989 * TERA, bandwidth=3.35e12),
        Device("h200", 141 * GB, 989 * TERA, bandwidth=4.8e12),
        Device("b200", 180 * GB, 2250 * TERA, bandwidth=8e12),
        Device("mi300x", 192 * GB, 1307 * TERA, bandwidth=5.3e12),
    )
}

Product: TypeAlias = tuple[float, float, float]
FULL_PRODUCT = (128, 128, 256)  # a product with fewer rows, columns or terms leaves units of a device idle
NEAREST = 4


def node_seconds(
    device: Device,
    *,
    flops: float = 0,
    nbytes: float = 0,
    shape: Product | None = None,
    dtype: str | DType = "bf16",
) -> float:
    """Seconds of a node on a device: its operations, or its bytes where those take longer, and a launch.

    `nbytes` are those of its inputs and outputs; `shape` is (m, n, k) of a product, whose rate depends on it.

    >>> h100 = DEVICES["h100"]
    >>> round(1e6 * node_seconds(h100, flops=2 * 4096**3, nbytes=3 * 2 * 4096**2, shape=(4096, 4096, 4096)))
    202
    >>> round(1e6 * node_seconds(h100, flops=2 * 16 * 4096**2, nbytes=2 * 4096**2, shape=(16, 4096, 4096)))
    13
    """
    if not flops and not nbytes:
        return 0.0
    computing = flops / product_rate(device, shape, dtype) if flops else 0.0
    return max(computing, nbytes / device.bandwidth) + device.launch


def product_rate(device: Device, shape: Product | None, dtype: str | DType) -> float:
    """Operations per second of a product: measured ones near its shape, else a share of the peak.

    32 bits take twice as long as 16. Without a shape, that of a large product.
    """
    kind = find_dtype(dtype) if isinstance(dtype, str) else dtype
    measured = device.products.get(kind.name)
    if measured:
        return _interpolate(measured, shape)
    share = math.prod(min(1.0, n / full) for n, full in zip(shape or FULL_PRODUCT, FULL_PRODUCT, strict=True))
    return device.flops * device.efficiency * share / max(1.0, kind.itemsize / 2)


def _interpolate(measured: Sequence[tuple[float, float, float, float]], shape: Product | None) -> float:
    """The rate at a shape from the nearest measured ones, all in logarithms; without a shape the highest."""
    rows = np.log2(np.maximum(np.asarray(measured, np.float64), 1e-30))
    if shape is None:
        return float(2 ** rows[:, 3].max())
    distance = ((rows[:, :3] - np.log2(np.maximum(shape, 1))) ** 2).sum(axis=1)
    nearest = np.argsort(distance, kind="stable")[:NEAREST]
    if distance[nearest[0]] < 1e-9:
        return float(2 ** rows[nearest[0], 3])
    weights = 1 / distance[nearest]
    return float(2 ** (rows[nearest, 3] @ weights / weights.sum()))


# What moves


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What a step sends over one kind of link, by rank: messages and bytes, out and in."""

    ranks: IntArray
    messages_out: IntArray
    messages_in: IntArray
    bytes_out: IntArray
    bytes_in: IntArray

    @property
    def is_used(self) -> bool:
        return bool(self.messages_out.any() or self.messages_in.any())


def link_seconds(load: LinkLoad, link: Link, topology: Topology, rounds: int = 1) -> float:
    """Seconds of an exchange over one kind of link, without its calls: the busiest port, in or out, decides."""
    if not load.is_used:
        return 0.0
    ports = topology.port_of(load.ranks, link)
    sides = ((load.messages_out, load.bytes_out), (load.messages_in, load.bytes_in))
    sums = [[np.bincount(ports, weights=amounts).max() for amounts in side] for side in sides]
    busiest = max(messages * link.overhead * rounds + nbytes / link.bandwidth for messages, nbytes in sums)
    return rounds * link.latency + float(busiest)


def exchange_seconds(
    near: LinkLoad, far: LinkLoad, topology: Topology, *, rounds: int = 1, copied: float = 0, combined: float = 0
) -> float:
    """Seconds of a step that is carried out by exchanges; one that sends nothing takes none.

    `copied` and `combined` are the bytes that the busiest rank copies within itself, and adds up.
    """
    loads = [(load, link) for load, link in ((near, topology.within), (far, topology.between)) if load.is_used]
    if not loads:
        return 0.0
    call = max(1, rounds) * max(link.call for _, link in loads)
    moving = max(link_seconds(load, link, topology, rounds) for load, link in loads)
    return call + max(moving, copied / topology.memory) + combined / topology.memory


def collective_seconds(kind: str, nbytes: float, groups: Sequence[Sequence[int]], topology: Topology) -> float:
    """Seconds of a collective that the comm makes by itself, in groups side by side; `nbytes` as in the table above.

    >>> hosts = Topology(ranks_per_host=8)
    >>> column = [range(0, 1024, 8)]
    >>> [round(1e6 * collective_seconds("all_reduce", n, column, hosts)) for n in (16_384, 2**30)]
    [169, 88854]
    """
    if not groups or nbytes == 0:
        return 0.0
    shapes: dict[tuple[int, int], Sequence[int]] = {}
    for group in groups:
        hosts = np.unique(topology.host_of(np.asarray(group, np.int64)), return_counts=True)[1]
        shapes.setdefault((len(hosts), int(hosts.max(initial=1))), group)
    return max(_group_seconds(kind, nbytes, hosts, most, topology) for hosts, most in shapes)


def _group_seconds(kind: str, nbytes: float, hosts: int, per_host: int, topology: Topology) -> float:
    """The same for one group on so many hosts, with at most so many ranks on each of them."""
    near, far, g = topology.within, topology.between, 1 / topology.memory
    ranks = hosts * per_host
    if ranks == 1:
        return 0.0
    call = max(near.call if per_host > 1 else 0.0, far.call if hosts > 1 else 0.0)
    once = (ranks - 1) / ranks * nbytes
    combining = once * g if "reduce" in kind else 0.0
    if kind == "broadcast":
        return call + _broadcast_seconds(nbytes, hosts, per_host, topology)
    times = 2 if kind == "all_reduce" else 1
    if topology.collectives == "messages":
        return call + times * _messages_seconds(nbytes / ranks, hosts, per_host, topology) + combining
    within = _ring_seconds(near, per_host, nbytes, per_host)
    ring = times * (within + _ring_seconds(far, hosts, nbytes / per_host, per_host))
    if kind == "all_reduce":
        hops = ((link, 2 * math.ceil(math.log2(count))) for link, count in ((near, per_host), (far, hosts)))
        tree = sum(hop * (link.latency + nbytes * _share(link, per_host) / link.bandwidth) for link, hop in hops)
        ring = min(ring, tree)
    return call + ring + combining


def _share(link: Link, per_host: int) -> int:
    """How many ranks of a group send through one port of a link."""
    return min(link.ranks_per_port, per_host)


def _ring_seconds(link: Link, ranks: int, nbytes: float, per_host: int) -> float:
    """Once around a ring; between hosts each rank of a host has a ring of its own for its share of the bytes."""
    return (ranks - 1) * link.latency + (ranks - 1) / ranks * nbytes * _share(link, per_host) / link.bandwidth


def _messages_seconds(part: float, hosts: int, per_host: int, topology: Topology) -> float:
    """An exchange in which each rank sends a part of so many bytes to every other one."""
    found = 0.0
    for link, peers in ((topology.within, per_host - 1), (topology.between, (hosts - 1) * per_host)):
        if peers:
            port = peers * _share(link, per_host)
            found = max(found, link.latency + port * (link.overhead + part / link.bandwidth))
    return found


def _broadcast_seconds(nbytes: float, hosts: int, per_host: int, topology: Topology) -> float:
    """A tree, or for many bytes a chain that passes them on in pieces."""
    tree = chain = 0.0
    for link, ranks in ((topology.within, per_host), (topology.between, hosts)):
        if ranks > 1:
            tree += math.ceil(math.log2(ranks)) * (link.latency + nbytes / link.bandwidth)
            chain += ranks * link.latency + nbytes / link.bandwidth
    return min(tree, chain)
