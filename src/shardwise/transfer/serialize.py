"""A transfer from plain JSON."""

from __future__ import annotations

from typing import Any

from shardwise.geometry.errors import LayoutError
from shardwise.geometry.serialize import layout_from_json
from shardwise.transfer.plan import plan_transfer
from shardwise.transfer.topology import Topology
from shardwise.transfer.transfer import Transfer


def transfer_from_json(data: dict[str, Any]) -> Transfer:
    """The transfer that `Transfer.to_json` wrote: planned anew from its arguments, checked against its figures."""
    topology = None if data["topology"] is None else Topology.from_json(data["topology"])
    transfer = plan_transfer(
        layout_from_json(data["src"]),
        layout_from_json(data["dst"]),
        itemsize=data["itemsize"],
        topology=topology,
        max_buffer_bytes=data["max_buffer_bytes"],
        rank=data["rank"],
    )
    edges = {(s, d): n for s, d, n in data["bytes_by_edge"]}
    if edges != dict(transfer.bytes_by_edge):
        raise LayoutError("this JSON describes a transfer with other routes than this version of shardwise plans")
    return transfer
