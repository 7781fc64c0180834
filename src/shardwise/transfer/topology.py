"""How fast are the links? Hosts, and an alpha-beta model: a message costs a latency plus its bytes over a bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.geometry.box import LayoutError
from shardwise.geometry.mesh import IntArray


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link: latency in seconds, bandwidth in bytes per second.

    >>> Link(latency=1e-5, bandwidth=25e9).seconds(messages=2, nbytes=50_000_000)
    0.00202
    """

    latency: float
    bandwidth: float

    def seconds(self, messages: int, nbytes: int) -> float:
        """The time that this many messages with this many bytes in all take."""
        return messages * self.latency + nbytes / self.bandwidth


WITHIN_HOST = Link(latency=3e-6, bandwidth=300e9)
BETWEEN_HOSTS = Link(latency=10e-6, bandwidth=25e9)


@dataclass(frozen=True)
class Topology:
    """Which ranks share a host, and how fast the links within and between hosts are.

    >>> Topology(ranks_per_host=8).host_of(np.array([0, 7, 8])).tolist()
    [0, 0, 1]
    """

    ranks_per_host: int | None = None
    hosts: tuple[int, ...] | None = None
    within: Link = WITHIN_HOST
    between: Link = BETWEEN_HOSTS

    def __init__(
        self,
        ranks_per_host: int | None = None,
        hosts: Sequence[int] | None = None,
        within: Link = WITHIN_HOST,
        between: Link = BETWEEN_HOSTS,
    ) -> None:
        if (ranks_per_host is None) == (hosts is None):
            raise LayoutError("a Topology needs ranks_per_host, or hosts with the host number of each rank")
        if ranks_per_host is not None and ranks_per_host < 1:
            raise LayoutError(f"a host has at least one rank, got ranks_per_host={ranks_per_host}")
        object.__setattr__(self, "ranks_per_host", ranks_per_host)
        object.__setattr__(self, "hosts", None if hosts is None else tuple(int(h) for h in hosts))
        object.__setattr__(self, "within", within)
        object.__setattr__(self, "between", between)

    def host_of(self, ranks: IntArray) -> IntArray:
        """The host number of each of these ranks."""
        if self.hosts is None:
            return ranks // np.int64(self.ranks_per_host or 1)
        if len(ranks) and int(ranks.max()) >= len(self.hosts):
            raise LayoutError(
                f"the topology names the hosts of {len(self.hosts)} ranks; rank {int(ranks.max())} has none"
            )
        return np.asarray(self.hosts, np.int64)[ranks]

    def to_json(self) -> dict[str, Any]:
        links = {"within": [self.within.latency, self.within.bandwidth]}
        links["between"] = [self.between.latency, self.between.bandwidth]
        hosts = None if self.hosts is None else list(self.hosts)
        return {"ranks_per_host": self.ranks_per_host, "hosts": hosts, **links}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Topology:
        return cls(data["ranks_per_host"], data["hosts"], Link(*data["within"]), Link(*data["between"]))
