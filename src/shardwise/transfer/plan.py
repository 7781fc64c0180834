"""Which bytes go where, to turn one layout into another? `plan_transfer` answers for every pair of layouts.

Nothing is sent to make a plan, and planning is a function of its arguments: every rank makes the same plan.
"""

from __future__ import annotations

from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.transfer.stages import plan_steps
from shardwise.transfer.step import Options
from shardwise.transfer.topology import Topology
from shardwise.transfer.transfer import Transfer


def plan_transfer(
    src: Layout,
    dst: Layout,
    *,
    itemsize: int,
    topology: Topology | None = None,
    max_buffer_bytes: int | None = None,
    rank: int | None = None,
) -> Transfer:
    """The plan that turns `src` into `dst`, both of one shape, on the same, overlapping or disjoint ranks.

    - `itemsize`: bytes per element.
    - `topology`: which ranks share a host; replicas on the receiver's host are preferred.
    - `max_buffer_bytes`: the most bytes a rank has in flight, in and out together; the exchange is cut into rounds.
    - `rank`: plan only the part that this rank takes in.

    >>> from shardwise.geometry import ChunkSpec
    >>> transfer = plan_transfer(ChunkSpec(0, 2).layout((4, 4)), ChunkSpec(1, 2).layout((4, 4)), itemsize=4)
    >>> transfer.bytes_by_edge
    {(0, 1): 16, (1, 0): 16}
    """
    _check(src, dst, itemsize, max_buffer_bytes)
    options = Options(itemsize, topology, max_buffer_bytes)
    return Transfer(src, dst, options, rank, plan_steps(src, dst, options, rank))


def _check(src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None) -> None:
    if src.shape != dst.shape:
        raise LayoutError(f"a transfer keeps the shape; the source has {src.shape}, the destination {dst.shape}")
    if itemsize < 1:
        raise LayoutError(f"itemsize is the number of bytes of an element, got {itemsize}")
    if max_buffer_bytes is not None and max_buffer_bytes < 1:
        raise LayoutError(f"max_buffer_bytes is at least one element, got {max_buffer_bytes}")
