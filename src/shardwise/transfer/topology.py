"""How fast are the links? Which ranks share a host, and for each kind of link what a message and a byte cost.

A link has a latency, paid once by messages that are under way together; an overhead, paid for each of them; a
bandwidth, which ranks that send through one port share; and what a call costs before anything is sent.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from shardwise._text import public
from shardwise.geometry.box import LayoutError
from shardwise.geometry.mesh import IntArray

Collectives: TypeAlias = Literal["native", "messages"]


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link: seconds, and bytes per second of a port; `ranks_per_port` ranks of a host share a port.

    >>> Link(latency=1e-5, bandwidth=25e9, overhead=1e-6, call=0).seconds(messages=2, nbytes=50_000_000)
    0.002012
    """

    latency: float
    bandwidth: float
    overhead: float = 1e-6
    call: float = 20e-6
    ranks_per_port: int = 1

    def __post_init__(self) -> None:
        wrong = [name for name in ("latency", "overhead", "call") if not getattr(self, name) >= 0]
        wrong += [name for name in ("bandwidth", "ranks_per_port") if not getattr(self, name) > 0]
        if wrong:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in wrong)
            raise LayoutError(f"a link takes no negative time, and has a bandwidth and ranks at each port; got {given}")

    def seconds(self, messages: int, nbytes: float) -> float:
        """The time that messages under way together take through one port, with this many bytes in all."""
        return self.call + self.latency + messages * self.overhead + nbytes / self.bandwidth


WITHIN_HOST = Link(latency=3e-6, bandwidth=300e9, overhead=0.5e-6)
BETWEEN_HOSTS = Link(latency=10e-6, bandwidth=25e9)
MEMORY_RATE = 1e12


@dataclass(frozen=True)
class Topology:
    """Which ranks share a host, and how fast the links within and between hosts are.

    - `memory`: bytes per second at which a rank copies, or combines addends, in its own memory.
    - `collectives`: "native" where rings and trees make them (nccl), "messages" where they are exchanges of messages.
    - `calibrated`: whether the figures were measured and describe what was measured; see `shardwise topology`.

    >>> Topology(ranks_per_host=8).host_of(np.array([0, 7, 8])).tolist()
    [0, 0, 1]
    """

    ranks_per_host: int | None = None
    hosts: tuple[int, ...] | None = None
    within: Link = WITHIN_HOST
    between: Link = BETWEEN_HOSTS
    memory: float = MEMORY_RATE
    collectives: Collectives = "native"
    calibrated: bool = False

    @public
    def __init__(
        self,
        ranks_per_host: int | None = None,
        hosts: Sequence[int] | None = None,
        within: Link = WITHIN_HOST,
        between: Link = BETWEEN_HOSTS,
        *,
        memory: float = MEMORY_RATE,
        collectives: Collectives = "native",
        calibrated: bool = False,
    ) -> None:
        if (ranks_per_host is None) == (hosts is None):
            raise LayoutError("a Topology needs ranks_per_host, or hosts with the host number of each rank")
        if ranks_per_host is not None and ranks_per_host < 1:
            raise LayoutError(f"a host has at least one rank, got ranks_per_host={ranks_per_host}")
        if collectives not in get_args(Collectives) or not memory > 0:
            raise LayoutError(
                f"a Topology has collectives 'native' or 'messages' and a memory rate above 0; got {collectives!r} and "
                f"{memory}"
            )
        object.__setattr__(self, "ranks_per_host", ranks_per_host)
        object.__setattr__(self, "hosts", None if hosts is None else tuple(int(h) for h in hosts))
        object.__setattr__(self, "within", within)
        object.__setattr__(self, "between", between)
        object.__setattr__(self, "memory", float(memory))
        object.__setattr__(self, "collectives", collectives)
        object.__setattr__(self, "calibrated", calibrated)

    def host_of(self, ranks: IntArray) -> IntArray:
        """The host number of each of these ranks."""
        if self.hosts is None:
            return ranks // np.int64(self.ranks_per_host or 1)
        if len(ranks) and int(ranks.max()) >= len(self.hosts):
            raise LayoutError(
                f"the topology names the hosts of {len(self.hosts)} ranks; rank {int(ranks.max())} has none"
            )
        return np.asarray(self.hosts, np.int64)[ranks]

    def port_of(self, ranks: IntArray, link: Link) -> IntArray:
        """The number of the port of a link that each of these ranks uses.

        >>> Topology(ranks_per_host=4).port_of(np.array([0, 1, 2, 7]), Link(0, 1, ranks_per_port=2)).tolist()
        [0, 0, 1, 3]
        """
        if link.ranks_per_port == 1:
            return ranks
        hosts = self.host_of(ranks)
        if self.hosts is None:
            place, most = ranks % np.int64(self.ranks_per_host or 1), self.ranks_per_host or 1
        else:
            every = np.asarray(self.hosts, np.int64)
            order = np.argsort(every, kind="stable")
            turns = np.empty_like(every)
            turns[order] = np.arange(len(every)) - np.searchsorted(every[order], every[order], side="left")
            place, most = turns[ranks], int(turns.max(initial=0)) + 1
        ports: IntArray = hosts * -(-most // link.ranks_per_port) + place // link.ranks_per_port
        return ports

    def without_bytes(self) -> Topology:
        """The same hosts, on which bytes take no time: what is left is that of calls and messages.

        >>> round(1e6 * Topology(ranks_per_host=8).without_bytes().within.seconds(messages=1, nbytes=1e9))
        24
        """
        within, between = (replace(link, bandwidth=1e30) for link in (self.within, self.between))
        return replace(self, within=within, between=between, memory=1e30)

    def to_json(self) -> dict[str, Any]:
        hosts = None if self.hosts is None else list(self.hosts)
        links = {name: asdict(getattr(self, name)) for name in ("within", "between")}
        more = {"memory": self.memory, "collectives": self.collectives, "calibrated": self.calibrated}
        return {"ranks_per_host": self.ranks_per_host, "hosts": hosts, **links, **more}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """The topology that `to_json` wrote; a link may also be a pair of latency and bandwidth."""
        links = [
            Link(**link) if isinstance(link, Mapping) else Link(*link) for link in (data["within"], data["between"])
        ]
        more = {name: data[name] for name in ("memory", "collectives", "calibrated") if name in data}
        return cls(data.get("ranks_per_host"), data.get("hosts"), *links, **more)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Topology:
        """The topology that `shardwise topology -o FILE` measured."""
        data = read_toml(path)
        try:
            return cls.from_json(data)
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{path} is not a topology: {_problem_of(error)}"
            raise LayoutError(f"{problem}; make one: shardwise topology") from error


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The data of a TOML file; what cannot be read, or is not TOML, is a LayoutError that names it."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LayoutError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _problem_of(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
