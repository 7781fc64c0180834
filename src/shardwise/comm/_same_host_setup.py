"""Find out together whether all ranks of a group can read each other's memory, and connect them if so.

1. Each rank listens and tells the others, over the group's own backend: its host, process, listener, and the address
   of a secret.
2. If all are on one host, of one user, and none declines, they connect, and each reads the others' secrets.
3. They tell each other how that went. Only if all succeeded is the engine used; else all keep to the backend.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any, Protocol

from . import _remote_memory as memory
from ._links import Links, Listener
from ._same_host import SameHostEngine

_CONNECT_SECONDS = 10.0
_SECRET_BYTES = 16


class Gatherer(Protocol):
    """The means by which the ranks talk before they are connected."""

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Return the bytes of all ranks in group order."""
        ...


def connect_same_host(
    over: Gatherer, rank: int, ranks: tuple[int, ...], timeout: float, *, wanted: bool
) -> SameHostEngine | None:
    """Return an engine for ranks of one host, or None on every rank if some rank cannot or will not."""
    if len(ranks) == 1:
        return None
    able = wanted and memory.supported()
    listener = Listener() if able else None
    secret = ctypes.create_string_buffer(secrets.token_bytes(_SECRET_BYTES), _SECRET_BYTES)
    if able:
        memory.allow_siblings()
    card = _card(listener, secret) if listener is not None else {"host": None}
    told = over.all_gather_bytes(json.dumps(card).encode(), label="connect ranks of one host")
    cards = {r: json.loads(data) for r, data in zip(ranks, told, strict=True)}
    hosts = {each["host"] for each in cards.values()}
    links: Links | None = None
    if listener is not None:
        links = _connect(listener, rank, cards) if hosts == {card["host"]} else None
        listener.close()
    if len(hosts) > 1 or None in hosts:
        return None
    answers = over.all_gather_bytes(b"y" if links is not None else b"n", label="ranks of one host connected")
    if links is None or b"n" in answers:
        return None
    return SameHostEngine(rank, ranks, links, {r: each["pid"] for r, each in cards.items()}, timeout)


def _card(listener: Listener, secret: ctypes.Array[ctypes.c_char]) -> dict[str, Any]:
    return {
        "host": _host(),
        "pid": os.getpid(),
        "listener": listener.name,
        "secret": secret.raw.hex(),
        "address": ctypes.addressof(secret),
    }


def _host() -> str:
    """Return what tells one running kernel, its process numbers, its sockets and its user from any other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net", "user")]
    return "/".join([socket.gethostname(), boot, str(os.getuid()), *spaces])


def _connect(listener: Listener, rank: int, cards: dict[int, dict[str, Any]]) -> Links | None:
    """Connect to all others and try to read their memory; None if anything of it is refused."""
    try:
        names = {r: str(card["listener"]) for r, card in cards.items()}
        links = listener.connect(rank, names, {r: int(card["pid"]) for r, card in cards.items()}, _CONNECT_SECONDS)
        readable = all(_reads(card) for r, card in cards.items() if r != rank)
    except OSError:
        return None
    if not readable:
        links.close()
        return None
    return links


def _reads(card: dict[str, Any]) -> bool:
    seen = ctypes.create_string_buffer(_SECRET_BYTES)
    memory.read_memory(card["pid"], [(card["address"], _SECRET_BYTES)], [(ctypes.addressof(seen), _SECRET_BYTES)])
    return seen.raw.hex() == str(card["secret"])
