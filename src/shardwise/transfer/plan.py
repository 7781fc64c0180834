"""Which bytes go where, to turn one layout into another? `plan_transfer` answers for every pair of layouts.

Nothing is sent to make a plan, and planning is a function of its arguments: every rank makes the same plan.
"""

from __future__ import annotations

from typing import Any

from shardwise._log import package_logger
from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.geometry.serialize import layout_from_json
from shardwise.transfer.steps import PlanOptions
from shardwise.transfer.topology import Topology
from shardwise.transfer.transfer import Transfer

_log = package_logger(__name__)


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
    _check_plan_arguments(src, dst, itemsize, max_buffer_bytes)
    options = PlanOptions(itemsize, topology, max_buffer_bytes)
    transfer = Transfer(src, dst, options, rank)
    if transfer.is_listed or max_buffer_bytes is not None:
        _ = transfer.rounds  # what cannot be planned is refused here
    _log.debug("planned %r", transfer)
    return transfer


def _check_plan_arguments(src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None) -> None:
    for name, given in (("source", src), ("destination", dst)):
        if not isinstance(given, Layout):
            raise LayoutError(_describe_other_kind(name, given))
    if src.shape != dst.shape:
        raise LayoutError(f"a transfer keeps the shape; the source has {src.shape}, the destination {dst.shape}")
    if itemsize < 1:
        raise LayoutError(f"itemsize is the number of bytes of an element, got {itemsize}")
    if max_buffer_bytes is not None and max_buffer_bytes < 1:
        raise LayoutError(f"max_buffer_bytes must be at least one element, got {max_buffer_bytes}")


def _describe_other_kind(name: str, given: object) -> str:
    """What to pass in place of something that is not a layout."""
    fix = "a spec lays out a shape: spec.layout((8, 4))"
    if isinstance(given, str):
        fix = f"read the text first: parse_layout({given!r}).layout, with its shape, as in 'f32[8,4] on tp=2: S(0)'"
    elif isinstance(getattr(given, "layout", None), Layout):
        fix = "pass its .layout"
    elif isinstance(getattr(given, "sharding", None), Layout):
        fix = "pass its .sharding"
    return f"plan_transfer takes layouts, and the {name} is {type(given).__name__}: {str(given)[:80]}; {fix}"


def transfer_from_json(data: dict[str, Any]) -> Transfer:
    """The transfer that `Transfer.to_json` wrote: planned again from its arguments, checked against its figures.

    >>> import json, shardwise
    >>> rows, columns = (shardwise.ChunkSpec(dim, ranks=2).layout((4, 6)) for dim in (0, 1))
    >>> written = json.dumps(plan_transfer(rows, columns, itemsize=4).to_json())
    >>> transfer_from_json(json.loads(written)).moved_bytes
    48
    """
    topology = None if data["topology"] is None else Topology.from_json(data["topology"])
    transfer = plan_transfer(
        layout_from_json(data["src"]),
        layout_from_json(data["dst"]),
        itemsize=data["itemsize"],
        topology=topology,
        max_buffer_bytes=data["max_buffer_bytes"],
        rank=data["rank"],
    )
    listed = data["bytes_by_edge"]
    same = int(data["moved_bytes"]) == transfer.moved_bytes
    if not same or (listed is not None and {(s, d): n for s, d, n in listed} != dict(transfer.bytes_by_edge)):
        raise LayoutError("this JSON describes a transfer with other routes than this version of shardwise plans")
    return transfer
