"""L1: how one layout becomes another. Plans are values; nothing is sent to make one. Never imports torch."""

from shardwise.transfer.collectives import Collective
from shardwise.transfer.plan import plan_transfer, transfer_from_json
from shardwise.transfer.routes import Copy, Move, Routes, Step
from shardwise.transfer.topology import Link, Topology
from shardwise.transfer.transfer import Transfer

__all__ = [
    "Collective",
    "Copy",
    "Link",
    "Move",
    "Routes",
    "Step",
    "Topology",
    "Transfer",
    "plan_transfer",
    "transfer_from_json",
]
