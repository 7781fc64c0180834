"""A transfer in words and as a table, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.transfer.routes import Step
from shardwise.transfer.steps import unreached_rows
from shardwise.transfer.totals import StepOutline

if TYPE_CHECKING:
    from shardwise.transfer.transfer import Transfer

SHOWN_EDGES = 16


def format_bytes(count: int | float) -> str:
    """A number of bytes with a fitting unit.

    >>> format_bytes(16), format_bytes(268435456)
    ('16 B', '268.4 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_transfer_table(transfer: Transfer) -> str:
    """The figures of a transfer, then its edges."""
    rows = [
        ("shape", str(transfer.src.shape)),
        ("from", repr(transfer.src.spec)),
        ("to", repr(transfer.dst.spec)),
        ("moved", f"{format_bytes(transfer.moved_bytes)} (lower bound {format_bytes(transfer.lower_bound_bytes)})"),
        *([("between hosts", text)] if (text := format_between_hosts(transfer)) else []),
        ("copied locally", format_bytes(transfer.copied_bytes)),
        ("exchanges", _exchanges_text(transfer)),
        ("collective", str(transfer.collective or "none")),
        ("busiest sender", _busiest_text(transfer.busiest_sender)),
        ("busiest receiver", _busiest_text(transfer.busiest_receiver)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join(lines + _edge_lines(transfer, width))


def format_between_hosts(transfer: Transfer) -> str | None:
    """The bytes between hosts and their lower bound, if it is known; None for a plan without a topology.

    >>> from shardwise.geometry import parse_spec
    >>> from shardwise.transfer import Topology, plan_transfer
    >>> src, dst = (parse_spec(f"on x=4: {text}").layout((8,)) for text in ("S(0)", "R"))
    >>> format_between_hosts(plan_transfer(src, dst, itemsize=4, topology=Topology(ranks_per_host=2)))
    '32 B (lower bound 32 B)'
    """
    passing, bound = transfer.bytes_between_hosts, transfer.lower_bound_between_hosts
    if passing is None:
        return None
    return format_bytes(passing) + ("" if bound is None else f" (lower bound {format_bytes(bound)})")


def _exchanges_text(transfer: Transfer) -> str:
    limit = transfer.max_buffer_bytes
    return str(transfer.rounds) if limit is None else f"{transfer.rounds} (buffers of {format_bytes(limit)})"


def _busiest_text(entry: tuple[int, int] | None) -> str:
    return "none" if entry is None else f"rank {entry[0]}, {format_bytes(entry[1])}"


def _edge_lines(transfer: Transfer, width: int) -> list[str]:
    edges, count = transfer.first_edges(SHOWN_EDGES)
    lines = [f"{f'{s} -> {d}':<{width}}  {format_bytes(n)}" for s, d, n in edges]
    hidden = count - len(edges)
    return lines if hidden <= 0 else [*lines, f"and {hidden} more edges"]


def describe_transfer(transfer: Transfer) -> str:
    """What happens, step by step, in plain words."""
    fills = [len(unreached_rows(outline, transfer.rank)) for outline in transfer.outlines]
    if transfer.moved_bytes == 0 and not any(fills):
        return (
            f"Nothing is sent: every rank has what it needs and copies {format_bytes(transfer.copied_bytes)} locally."
        )
    lines = [_describe_step(transfer, number) for number in range(len(transfer.totals))]
    if len(lines) > 1:
        lines = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
    if transfer.collective is not None:
        lines.append(f"Together this is: {transfer.collective}.")
    met = transfer.moved_bytes == transfer.lower_bound_bytes
    bound = "the lower bound" if met else f"where {format_bytes(transfer.lower_bound_bytes)} is the lower bound"
    passing = transfer.bytes_between_hosts
    among = "" if passing is None else f", {format_bytes(passing)} of it between hosts"
    lines.append(f"In total {format_bytes(transfer.moved_bytes)} move, {bound}{among}.")
    return "\n".join(lines)


def _describe_step(transfer: Transfer, number: int) -> str:
    step: Step | StepOutline = transfer.unsplit_steps[number] if transfer.is_listed else transfer.outlines[number]
    total, rounds = transfer.totals[number], transfer.rounds_by_step[number]
    sent = format_bytes(int(total.sent.sum()) * transfer.itemsize)
    senders, receivers = int((total.sent > 0).sum()), int((total.received > 0).sum())
    text = f"{senders} ranks send {sent} in {int(total.boxes_out.sum())} boxes to {receivers} ranks"
    if isinstance(step, Step) and step.in_place:
        text += " of their hosts, which pass on what came from another host"
    if step.op is not None and step.src.pending is not None:
        text += f", which combine what arrives by {step.op}"
    if step.scale != (1, 1):
        text += f" and multiply it by {step.scale[0]}/{step.scale[1]}"
    filled = len(step.fills) if isinstance(step, Step) else len(unreached_rows(step, transfer.rank))
    if filled:
        text += f"; {filled} pieces are filled with the identity of {step.op}"
    if rounds > 1:
        text += f", in {rounds} rounds"
    return text + "."
