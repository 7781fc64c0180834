"""How few bytes can pass between hosts? A bound from the layouts and the hosts alone, to hold a plan against.

For each region, where a source cell meets a destination cell:

1. Hosts that hold all addends of it (of a value without a pending reduction: that hold it) need nothing from others.
   Every other host that needs the result receives it once.
2. If no host has all addends, one of those that have some, if possible one that needs the result, receives the sum of
   each of the others; then every other host that needs the result receives it once.
"""

from __future__ import annotations

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.reduction import overlap_regions
from shardwise.transfer.routes import box_volumes
from shardwise.transfer.topology import Topology

MOST_REGIONS = 1 << 15


def lower_bound_between_hosts(src: Layout, dst: Layout, topology: Topology) -> int | None:
    """The fewest elements that pass between hosts; None where this is not known.

    >>> from shardwise.geometry import parse_spec
    >>> src, dst = (parse_spec(f"on x=4: {text}").layout((8,)) for text in ("S(0)", "R"))
    >>> lower_bound_between_hosts(src, dst, Topology(ranks_per_host=2))
    8
    """
    if src.pending is not None and dst.pending is not None and src.pending.op == dst.pending.op:
        return None  # addends keep their numbers
    found, first = overlap_regions(src, dst)
    if len(found.cells) > MOST_REGIONS:
        return None
    holding, needing = _hosts_by_addend(src, topology), _hosts_by_addend(dst, topology)
    volumes = box_volumes(found.sizes).tolist()
    targets = dst.table.cells[first][found.boxes] if len(found.boxes) else found.boxes
    total = 0
    for cell, target, volume in zip(found.cells.tolist(), targets.tolist(), volumes, strict=True):
        count = _count_entries(list(holding[cell].values()), needing[target][0])
        if count is None:
            return None
        total += count * volume
    return total


def _count_entries(addends: list[set[int]], needing: set[int]) -> int | None:
    """How often a region, or an addend of it, enters a host; `addends` lists the hosts of each addend."""
    complete = set.intersection(*addends)
    if complete:
        return len(needing - complete)
    if any(len(hosts) > 1 for hosts in addends):
        return None  # which hosts contribute is a choice
    some = set.union(*addends)
    return len(some) - 1 + len(needing) - bool(some & needing)


def _hosts_by_addend(layout: Layout, topology: Topology) -> dict[int, dict[int, set[int]]]:
    """For each cell and each of its addends, the hosts that hold it."""
    table = layout.table
    found: dict[int, dict[int, set[int]]] = {}
    hosts: IntArray = topology.host_of(table.ranks)
    rows = np.unique(np.stack([table.cells, table.addends, hosts], axis=1), axis=0)
    for cell, addend, host in rows.tolist():
        found.setdefault(cell, {}).setdefault(addend, set()).add(host)
    return found
