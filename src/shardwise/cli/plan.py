"""`shardwise plan`: print the transfer between two layouts.

`shardwise show`: draw a layout.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shardwise.cli.output import AsJson, format_seconds, parse_bytes, print_json, shorten_title, terminal_width
from shardwise.geometry import LayoutError, TensorType, layout_to_json, parse_layout
from shardwise.transfer import Topology, Transfer, plan_transfer
from shardwise.transfer.transfer import format_between_hosts, format_bytes
from shardwise.view import Line, draw_layout, draw_ranks, draw_table, line, print_lines

SHOWN_EDGES = 16

SourceText = Annotated[str, typer.Argument(metavar="SRC", help="A tensor and its layout, in the notation.")]
TargetText = Annotated[str, typer.Argument(metavar="DST", help="The target layout; dtype and shape may be omitted.")]
RanksPerHost = Annotated[int, typer.Option(min=1, metavar="N", help="Ranks that share a host.")]
Buffer = Annotated[str | None, typer.Option(metavar="SIZE", help="Maximum bytes a rank has in flight, such as 64MB.")]

AllEdges = Annotated[bool, typer.Option("--edges", help="List every edge in the JSON, also of very large plans.")]


def plan(
    src: SourceText,
    dst: TargetText,
    ranks_per_host: RanksPerHost = 8,
    buffer: Buffer = None,
    as_json: AsJson = False,
    edges: AllEdges = False,
) -> None:
    """Print who sends how much to whom to turn one layout into another. Nothing is sent.

    \b
    Examples:
      shardwise plan "f32[4096,1024] on tp=4: S(0)" "on tp=4: S(1)"
      shardwise plan "bf16[8192,64] on dp=16: S(0)" "on tp=4: S(1)" --buffer 64MB
    """
    source = parse_layout(src)
    target = parse_layout(dst, like=source)
    topology = Topology(ranks_per_host=ranks_per_host)
    transfer = plan_between(source, target, topology, None if buffer is None else parse_bytes(buffer))
    if as_json:
        print_json(plan_to_json(source, target, transfer, topology, edges or None))
    else:
        print_lines(plan_lines(source, target, transfer, topology), sys.stdout)


def plan_between(
    source: TensorType, target: TensorType, topology: Topology, max_buffer_bytes: int | None = None
) -> Transfer:
    """The transfer between two tensors that have the same element type and shape."""
    if source.dtype != target.dtype:
        raise LayoutError(
            f"a transfer keeps the dtype, but the source is {source.dtype} and the destination {target.dtype}; "
            "omit dtype and shape in the destination to use those of the source"
        )
    if source.shape != target.shape:
        raise LayoutError(
            f"a transfer keeps the shape, but the source has {source.shape} and the destination {target.shape}; "
            "omit dtype and shape in the destination to use those of the source"
        )
    return plan_transfer(
        source.layout,
        target.layout,
        itemsize=source.itemsize,
        topology=topology,
        max_buffer_bytes=max_buffer_bytes,
    )


def plan_lines(source: TensorType, target: TensorType, transfer: Transfer, topology: Topology) -> list[Line]:
    """The figures of a transfer, its edges, and what it does in words."""
    rows = [
        ("from", shorten_title(str(source))),
        ("to", shorten_title(str(target))),
        ("moved", f"{format_bytes(transfer.moved_bytes)}, lower bound {format_bytes(transfer.lower_bound_bytes)}"),
        ("between hosts", format_between_hosts(transfer) or "unknown"),
        ("copied locally", format_bytes(transfer.copied_bytes)),
        ("rounds", _rounds(transfer)),
        ("collective", str(transfer.collective or "none: a plain exchange")),
        ("busiest sender", _busiest(transfer.busiest_sender)),
        ("busiest receiver", _busiest(transfer.busiest_receiver)),
        ("estimate", _estimate(transfer, topology)),
    ]
    width = max(len(name) for name, _ in rows)
    figures = [line(f"{name:<{width}}  {value}") for name, value in rows]
    words = [line(text) for text in transfer.explain().split("\n")]
    return [*figures, *_edge_lines(transfer), line(), *words]


def _rounds(transfer: Transfer) -> str:
    limit = transfer.max_buffer_bytes
    return str(transfer.rounds) + ("" if limit is None else f", buffers of at most {format_bytes(limit)}")


def _busiest(entry: tuple[int, int] | None) -> str:
    return "none" if entry is None else f"rank {entry[0]}, {format_bytes(entry[1])}"


def _estimate(transfer: Transfer, topology: Topology) -> str:
    within, between = (format_bytes(link.bandwidth) for link in (topology.within, topology.between))
    hosts = f"{topology.ranks_per_host} ranks per host, {within}/s within and {between}/s between hosts"
    return f"{format_seconds(transfer.estimate(topology))} ({hosts})"


def _edge_lines(transfer: Transfer) -> list[Line]:
    """The first edges as a table: source rank, destination rank, bytes."""
    edges, count = transfer.first_edges(SHOWN_EDGES)
    if not edges:
        return []
    rows = [(str(s), str(d), format_bytes(n)) for s, d, n in edges]
    table = draw_table(("from", "to", "bytes"), rows, ranks=[source for source, _, _ in edges])
    hidden = count - len(edges)
    return [line(), *table, *([line(f"and {hidden} more edges")] if hidden > 0 else [])]


def plan_to_json(
    source: TensorType, target: TensorType, transfer: Transfer, topology: Topology, edges: bool | None = None
) -> dict[str, Any]:
    """The transfer as plain data, with the figures that the table shows."""
    return {
        "from": str(source),
        "to": str(target),
        **transfer.to_json(edges=edges),
        "busiest_sender": transfer.busiest_sender,
        "busiest_receiver": transfer.busiest_receiver,
        "estimate_seconds": transfer.estimate(topology),
    }


LayoutText = Annotated[str, typer.Argument(metavar="LAYOUT", help="A tensor and its layout, in the notation.")]


def show(layout: LayoutText, as_json: AsJson = False) -> None:
    """Draw which rank holds which part of a tensor, and how many bytes each rank holds.

    \b
    Example:
      shardwise show "f32[8,6] on dp=2,tp=2: S(0), S(1)"
    """
    tensor = parse_layout(layout)
    if as_json:
        print_json(tensor_to_json(tensor))
    else:
        print_lines(tensor_lines(tensor, terminal_width()), sys.stdout)


def tensor_lines(tensor: TensorType, width: int) -> list[Line]:
    """A tensor's notation, the picture of its layout, and what each rank holds."""
    title = line(shorten_title(str(tensor)))
    return [title, line(), *draw_layout(tensor.layout, width), line(), *draw_ranks(tensor)]


def tensor_to_json(tensor: TensorType) -> dict[str, Any]:
    """The layout and the numbers of each rank as plain data."""
    layout = tensor.layout
    elements = layout.elements_per_rank()
    ranks = [
        {
            "rank": rank,
            "elements": elements[rank],
            "bytes": elements[rank] * tensor.itemsize,
            "local_shapes": [list(shape) for shape in layout.local_shapes(rank)],
            "pieces": [{"offsets": p.box.offsets, "sizes": p.box.sizes} for p in layout.pieces_of(rank)],
        }
        for rank in layout.ranks
    ]
    return {
        "notation": str(tensor),
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "layout": layout_to_json(layout),
        "pending": None if layout.pending is None else str(layout.pending),
        "bytes": layout.numel * tensor.itemsize,
        "ranks": ranks,
    }
