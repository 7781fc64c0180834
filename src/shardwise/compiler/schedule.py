"""When do the moves of a graph start, and when are they waited for?"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from shardwise.tensor.move_operator import find_record


@dataclass
class Schedule:
    """The moves of a graph in order, as texts that are the same on every rank."""

    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    summary: str = ""


def schedule_moves(graph: GraphModule, memory_limit: int) -> Schedule:
    """Schedule."""
    found = Schedule()
    for node in graph.graph.nodes:
        if node.target is torch.ops.shardwise.move.default:
            found.events.append(find_record(node.args[1]).text())
    return found
