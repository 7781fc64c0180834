"""L1: how one layout becomes another. Plans are values; nothing is sent to make one. Never imports torch."""

from shardwise.transfer.senders import BoxMessage, Copy, Routes, Step
from shardwise.transfer.steps import Collective
from shardwise.transfer.topology import Link, Topology
from shardwise.transfer.transfer import Transfer, plan_transfer, transfer_from_json

__all__ = [
    "BoxMessage",
    "Collective",
    "Copy",
    "Link",
    "Routes",
    "Step",
    "Topology",
    "Transfer",
    "plan_transfer",
    "transfer_from_json",
]
