"""Ranks of one host find out together whether all can read each other's device memory, and connect if so.

1. Each rank writes a card: its host, process and GPU (by UUID: the numbers of GPUs differ between processes that see
   different ones), its listener, handles of its events, and where a secret of its own is on the device. One that cannot
   writes why. The cards are gathered over the group's own backend.
2. Each connects to all others, opens their events and reads their secrets.
3. They exchange whether that worked. If it did not on one rank (another container, expandable segments, GPUs without
   peer access, MIG), none reads device memory, and the log of every rank says which rank cannot, and why.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._log import package_logger
from shardwise.comm.faults import TransportError
from shardwise.comm.rank_text import fold_texts
from shardwise.comm.transports.device_memory import (
    CudaEvents,
    CudaMemory,
    SharedSegments,
    identify_process,
    is_driver_present,
    opened_segments,
)
from shardwise.comm.transports.device_peers import DevicePeers
from shardwise.comm.transports.engine import Gatherer
from shardwise.comm.transports.host_names import describe_door, door_of, identify_host
from shardwise.comm.transports.links import Listener, PeerSockets
from shardwise.comm.transports.pipes import are_pipes_supported, connect_pipes
from shardwise.comm.transports.same_host_device import SameHostDeviceEngine

_CONNECT_SECONDS = 10.0
_log = package_logger(__name__)


@dataclass(frozen=True)
class DeviceEntry:
    """Where others connect to this rank, and what they read to see that they can."""

    device: torch.device
    listener: Listener
    shared: SharedSegments
    events: CudaEvents
    probe: Tensor


def connect_devices(
    over: Gatherer,
    rank: int,
    ranks: tuple[int, ...],
    device: torch.device,
    timeout: float,
    *,
    wanted: bool,
    instead: str = "it goes through host memory",
) -> SameHostDeviceEngine | None:
    """Return an engine for ranks of one host with device memory, or None on every rank if some rank cannot.

    `instead`: what happens then, for the log.
    """
    entry, card = _open_entry(device) if wanted else (None, {})
    try:
        told = over.all_gather_bytes(json.dumps(card).encode(), call="connect devices of one host")
        cards: dict[int, dict[str, Any]] = {r: json.loads(data) for r, data in zip(ranks, told, strict=True)}
        problems = {r: card["problem"] for r, card in cards.items() if "problem" in card}
        if problems:
            _log_refusal(problems, instead)
        if entry is None or len({each.get("host") for each in cards.values()}) != 1 or not card["host"]:
            return None
        owners = {r: each["process"] for r, each in cards.items()}
        peers = DevicePeers(entry.device, entry.shared, opened_segments(entry.device), entry.events, owners)
        links, problem = _connect(entry, rank, cards, peers, min(_CONNECT_SECONDS, timeout / 2))
        answers = over.all_gather_bytes(problem.encode(), call="devices of one host can be read")
        problems = {r: answer.decode() for r, answer in zip(ranks, answers, strict=True) if answer}
        if links is None or problems:
            _log_refusal(problems, instead)
            if links is not None:
                links.close()
            return None
        gpus = [each["gpu"] for each in cards.values()]
        has_leader = len(ranks) > 1 and len(set(gpus)) == 1
        return SameHostDeviceEngine(
            rank, ranks, links, peers, timeout, has_leader=has_leader, shares_gpu=len(set(gpus)) < len(gpus)
        )
    finally:
        if entry is not None:
            entry.listener.close()


def _open_entry(device: torch.device) -> tuple[DeviceEntry | None, dict[str, Any]]:
    """Listen, and write down what the others must know, or why this rank's memory cannot be read."""
    try:
        if not is_driver_present():
            raise OSError("CUDA's driver is not there")
        device = torch.empty(0, device=device).device  # with its number
        secret = secrets.token_bytes(16)
        probe = torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(device)
        torch.cuda.synchronize(device)
        shared, events = SharedSegments(CudaMemory(device)), CudaEvents(device)
        messages, _ = shared.describe({-1: [probe]})
        card = {
            "probe": messages[-1].decode(),
            "secret": secret.hex(),
            "events": events.handles(),
            "gpu": str(torch.cuda.get_device_properties(device).uuid),
            "host": identify_host(),
            "process": identify_process(),
            "pipes": are_pipes_supported(),
        }
        listener = Listener()
    except (OSError, RuntimeError) as error:
        return None, {"problem": _first_line(error)}
    return DeviceEntry(device, listener, shared, events, probe), card | describe_door(listener)


def _connect(
    entry: DeviceEntry, rank: int, cards: Mapping[int, dict[str, Any]], peers: DevicePeers, seconds: float
) -> tuple[PeerSockets | None, str]:
    """Connect to all others and read their secrets; return the connections, and what went wrong."""
    others = {r: card for r, card in cards.items() if r != rank}
    links: PeerSockets | None = None
    try:
        doors = {r: door_of(card) for r, card in cards.items()}
        with_pipes = all(card.get("pipes", False) for card in cards.values())
        links = (connect_pipes if with_pipes else Listener.connect)(entry.listener, rank, doors, seconds)
        entry.events.open({r: card["events"] for r, card in others.items()})
        for r, card in others.items():
            read = peers.read(r, card["probe"].encode())[0].cpu()
            if read.numpy().tobytes().hex() != card["secret"]:
                return links, f"other bytes are read than rank {r} wrote"
    except (OSError, RuntimeError, TransportError) as error:
        return links, _first_line(error)
    return links, ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _log_refusal(problems: Mapping[int, str], instead: str) -> None:
    _log.warning("ranks of one host do not read each other's device memory (%s): %s", fold_texts(problems), instead)
