"""The boxes of a rank's messages as slices of its local tensors, worked out once for each part of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from shardwise.tensor.moving.parts import Message, MessagesByRound, RankPart

BoxSlices: TypeAlias = tuple[int, tuple[slice, ...], int]
"""A box of a local tensor: which tensor, where in it, and which term of a reduction."""


@dataclass(frozen=True, slots=True)
class SlicesByRound:
    """The boxes of a rank's messages by round and peer."""

    part: RankPart
    separate: Mapping[int, bool]  # whether the boxes received in a round are the same or have nothing in common
    sends: Mapping[int, Mapping[int, Sequence[BoxSlices]]]
    receives: Mapping[int, Mapping[int, Sequence[BoxSlices]]]


_known_slices: dict[int, SlicesByRound] = {}
_KEPT_SLICES = 1024


def slices_by_round(part: RankPart) -> SlicesByRound:
    """The slices of a rank's part of a step."""
    known = _known_slices.get(id(part))
    if known is None:
        if len(_known_slices) >= _KEPT_SLICES:
            _known_slices.clear()
        separate = {number: _are_separate(edges) for number, edges in part.receives.items()}
        known = SlicesByRound(part, separate, _list_slices(part.sends), _list_slices(part.receives))
        _known_slices[id(part)] = known  # which keeps the part, so that its id stays its own
    return known


_MOST_COMPARED = 64


def _are_separate(edges: Mapping[int, Sequence[Message]]) -> bool:
    """Whether each two boxes of a round are the same or have nothing in common; no, if they are too many to compare."""
    boxes = {(m.slot, m.box) for cut in edges.values() for message in cut for m in message}
    if len(boxes) > _MOST_COMPARED:
        return False
    return not any(a[0] == b[0] and a[1].intersect(b[1]) for a, b in combinations(boxes, 2))


def _list_slices(messages: MessagesByRound) -> Mapping[int, Mapping[int, Sequence[BoxSlices]]]:
    return {
        number: {
            peer: [(m.slot, m.box.slices, m.term) for message in cut for m in message] for peer, cut in edges.items()
        }
        for number, edges in messages.items()
    }
