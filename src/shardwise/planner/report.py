"""An estimate in text, one plan or two side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from shardwise.geometry import LayoutError, parse_layout
from shardwise.planner.estimate import Estimate, ParameterRow
from shardwise.transfer import plan_transfer
from shardwise.transfer.transfer import format_bytes

BAR, SHOWN_MOVES = 24, 8
_NUMBER = re.compile(r"\b\d+\b")


def memory_rows(found: Estimate) -> list[tuple[str, int | None]]:
    """The parts of a rank's memory by name, in bytes; None where it is not known."""
    return [
        ("parameters", found.parameter_bytes),
        ("gradients", found.gradient_bytes),
        ("optimizer state", found.optimizer_bytes),
        ("buffers", found.buffer_bytes),
        ("activations", found.activation_bytes),
        ("peak", found.peak_bytes),
    ]


def summary_rows(plans: Sequence[Estimate]) -> list[tuple[str, ...]]:
    """The figures of one or several estimates, one row for each figure."""
    rows: list[tuple[str, ...]] = [("mesh", *(p.mesh for p in plans)), ("ranks", *(f"{p.ranks:,}" for p in plans))]
    for number, (name, _) in enumerate(memory_rows(plans[0])):
        amounts = [memory_rows(plan)[number][1] for plan in plans]
        rows.append((name, *("unknown" if a is None else format_bytes(a) for a in amounts)))
    rows.append(("memory", *map(_memory_text, plans)))
    for axis in dict.fromkeys(axis for plan in plans for axis in plan.traffic):
        rows.append((f"traffic {axis}", *(format_bytes(plan.traffic.get(axis, 0)) for plan in plans)))
    times: list[tuple[str, Callable[[Estimate], float]]] = [
        ("compute", lambda p: p.compute_seconds),
        ("communication", lambda p: p.communication_seconds),
        ("step", lambda p: p.step_seconds),
    ]
    rows += [(name, *(_seconds_text(read(plan)) for plan in plans)) for name, read in times]
    return [*rows, ("tokens per second", *map(_rate_text, plans))]


def _memory_text(plan: Estimate) -> str:
    room = plan.device.memory_bytes - plan.peak_bytes
    of = f"{format_bytes(plan.device.memory_bytes)} of {plan.device.name}"
    return f"{of}: fits, {format_bytes(room)} free" if plan.fits else f"{of}: {format_bytes(-room)} too little"


def _rate_text(plan: Estimate) -> str:
    return f"{plan.tokens / plan.step_seconds:,.0f}" if plan.step_seconds else "unknown"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def parameter_rows(found: Estimate) -> list[tuple[str, ...]]:
    """One row for each parameter, equal layers folded to one."""
    return [
        (
            row.name,
            str(count),
            row.layout,
            format_bytes(row.rank_bytes * count),
            format_bytes((row.gradient_bytes + row.optimizer_bytes) * count),
            format_bytes(row.traffic_bytes * count) if row.traffic_bytes else "-",
        )
        for row, count in fold_rows(found.rows)
    ]


PARAMETER_HEAD = ("parameter", "count", "layout", "memory", "training memory", "traffic")
MOVE_HEAD = ("move of a step", "count", "from", "to", "received", "axes", "time")


def fold_rows(rows: Sequence[ParameterRow]) -> list[tuple[ParameterRow, int]]:
    """Rows whose names differ in numbers only, and nothing else, as one: 'blocks.{0-79}.up.weight'."""
    groups: dict[tuple[object, ...], list[ParameterRow]] = {}
    for row in rows:
        key = replace(row, name=_NUMBER.sub("#", row.name), module="")
        groups.setdefault((key,), []).append(row)
    return [(replace(group[0], name=_fold_names([r.name for r in group])), len(group)) for group in groups.values()]


def _fold_names(names: Sequence[str]) -> str:
    """One name for names that differ in numbers only.

    >>> _fold_names(["b.0.up", "b.1.up", "b.7.up"])
    'b.{0-7}.up'
    """
    numbers = list(zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True))
    texts = iter(str(n[0]) if min(n) == max(n) else f"{{{min(n)}-{max(n)}}}" for n in numbers)
    return _NUMBER.sub(lambda _: next(texts), names[0])


def move_rows(found: Estimate) -> list[tuple[str, ...]]:
    """The moves that receive most in a step."""
    return [
        (
            move.label,
            str(move.count),
            move.src,
            move.dst.partition(": ")[2] or move.dst,
            format_bytes(move.received_bytes * move.count),
            "+".join(move.axes),
            _seconds_text(move.seconds * move.count),
        )
        for move in found.moves[:SHOWN_MOVES]
    ]


def resharding_bytes(one: Estimate, other: Estimate) -> int | None:
    """The bytes that all ranks send together to turn the parameters of one plan into those of the other.

    None where the plans are for other parameters, or a layout is too long to be written.
    """
    layouts = {row.name: row.layout for row in other.rows}
    if {row.name for row in one.rows} != set(layouts):
        return None
    try:
        return sum(_moved_bytes(row.layout, layouts[row.name]) for row in one.rows)
    except LayoutError:
        return None


@lru_cache(maxsize=4096)
def _moved_bytes(src: str, dst: str) -> int:
    if src == dst:
        return 0
    source, target = parse_layout(src), parse_layout(dst)
    return plan_transfer(source.layout, target.layout, itemsize=source.itemsize).moved_bytes
