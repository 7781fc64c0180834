"""Which ranks share a host?

1. Each rank names its host: kernel, process numbers, sockets and user. Ranks with different names share nothing.
2. Equal names are not enough: machines that were restored from one snapshot have all of this in common. So each rank
   connects to the listeners of the ranks with its name, in rank order, until one answers, and all ranks exchange the
   number of that one. Only a process of the same kernel and network can answer.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.comm.transports.engine import Gatherer
from shardwise.comm.transports.links import Door, Listener, is_reachable


def identify_host() -> str | None:
    """Return what identifies a running kernel, its process numbers, its sockets and its user; None if it hides that."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net", "user")]
    except OSError:
        return None
    return "/".join([socket.gethostname(), boot, str(os.getuid()), *spaces])


def describe_door(listener: Listener) -> dict[str, Any]:
    """Return what other ranks must know to connect to a listener of this process, for JSON."""
    return {"pid": os.getpid(), "listener": listener.name, "token": listener.token.hex()}


def door_of(card: Mapping[str, Any]) -> Door:
    """Return the door that another rank has described."""
    return Door(card["listener"], bytes.fromhex(card["token"]), card["pid"])


def find_hosts(over: Gatherer, rank: int, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the host number of each rank, in group order; None if a rank does not know its host."""
    if len(ranks) == 1:
        return (0,)
    listener: Listener | None = None
    card: dict[str, Any] = {"host": identify_host()}
    try:
        listener = Listener()
        card |= describe_door(listener)
    except OSError:
        pass  # without one, names decide
    try:
        told = over.all_gather_bytes(json.dumps(card).encode(), call="find hosts")
        return number_hosts(over, rank, {r: json.loads(data) for r, data in zip(ranks, told, strict=True)})
    finally:
        if listener is not None:
            listener.close()


def number_hosts(over: Gatherer, rank: int, cards: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Number the hosts of all ranks, whose cards have the name of the host and, if all can listen, their doors."""
    names = [card["host"] for card in cards.values()]
    hosts = _number_in_order(names)
    if None in names or len(set(hosts)) == len(names) or any("listener" not in card for card in cards.values()):
        return None if None in names else hosts
    same = [r for r, card in cards.items() if card["host"] == cards[rank]["host"]]
    first = next(r for r in same if r == rank or is_reachable(door_of(cards[r])))
    return _number_in_order(over.all_gather_bytes(str(first).encode(), call="connect to ranks of one host"))


def _number_in_order(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Number values in order of appearance.

    >>> _number_in_order(["b", "a", "b"])
    (0, 1, 0)
    """
    order = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(order[value] for value in values)
