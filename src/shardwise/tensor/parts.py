"""What does one rank do in one step of a transfer? Worked out once and kept, since plans are used again and again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

from shardwise.geometry import Box, Layout
from shardwise.transfer import Copy, Move, Step, Transfer, plan_transfer

SMALL_MESSAGE_BYTES = 64 * 1024
WHOLE_PLAN_RANKS = 256

Message: TypeAlias = tuple[Move, ...]
Edges: TypeAlias = Mapping[int, Mapping[int, Sequence[Message]]]


@dataclass(frozen=True, eq=False, slots=True)
class RankPart:
    """A rank's messages by round and peer, its local copies and fills, and the shapes of its destination tensors."""

    sends: Edges
    receives: Edges
    copies: Sequence[Copy]
    fills: Sequence[tuple[int, Box]]
    shapes: Sequence[tuple[int, ...]]
    reducing: bool


def plan_for(src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None, rank: int) -> Transfer:
    """The plan from which a rank works: the whole one in small worlds, else this rank's part of it."""
    small = len(src.ranks) + len(dst.ranks) <= 2 * WHOLE_PLAN_RANKS or max_buffer_bytes is not None
    return _plan(src, dst, itemsize, max_buffer_bytes, None if small else rank)


@lru_cache(maxsize=4096)
def _plan(src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None, rank: int | None) -> Transfer:
    return plan_transfer(src, dst, itemsize=itemsize, max_buffer_bytes=max_buffer_bytes, rank=rank)


@lru_cache(maxsize=4096)
def rank_part(step: Step, rank: int, itemsize: int) -> RankPart:
    """What a rank does in a step."""
    receives, copies = step.receives_of(rank), step.copies_of(rank)
    shapes = step.dst.local_shapes(rank)
    reached = sum(m.box.numel for m in receives) + sum(c.dst_box.numel for c in copies)
    reducing = step.op is not None and reached > sum(Box.whole(s).numel for s in shapes)
    return RankPart(
        _by_round_and_peer(step.sends_of(rank), itemsize),
        _by_round_and_peer(receives, itemsize),
        copies,
        step.fills_of(rank),
        shapes,
        reducing,
    )


def _by_round_and_peer(moves: Sequence[Move], itemsize: int) -> Edges:
    grouped: dict[int, dict[int, list[Move]]] = {}
    for (number, peer), group in groupby(moves, key=lambda m: (m.round, m.peer)):
        grouped.setdefault(number, {}).setdefault(peer, []).extend(group)
    return {n: {peer: messages(moves, itemsize) for peer, moves in edges.items()} for n, edges in grouped.items()}


def messages(moves: Iterable[Move], itemsize: int) -> list[Message]:
    """Cut an edge's moves into messages: large boxes alone, runs of small ones together."""
    cut: list[list[Move]] = []
    room = 0
    for move in moves:
        size = move.box.numel * itemsize
        if size >= SMALL_MESSAGE_BYTES or size > room:
            cut.append([])
            room = 0 if size >= SMALL_MESSAGE_BYTES else SMALL_MESSAGE_BYTES
        cut[-1].append(move)
        room -= size
    return [tuple(message) for message in cut]
