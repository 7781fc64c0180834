"""The boxes of a rank's messages as slices of its local tensors, worked out once for each part of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.tensor.moving.parts import MessagesByRound, RankPart

BoxSlices: TypeAlias = tuple[int, tuple[slice, ...], int]
"""A box of a local tensor: which tensor, where in it, and which term of a reduction."""


@dataclass(frozen=True, slots=True)
class SlicesByRound:
    """The boxes of a rank's messages by round and peer."""

    part: RankPart
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
        known = SlicesByRound(part, _list_slices(part.sends), _list_slices(part.receives))
        _known_slices[id(part)] = known  # which keeps the part, so that its id stays its own
    return known


def _list_slices(messages: MessagesByRound) -> Mapping[int, Mapping[int, Sequence[BoxSlices]]]:
    return {
        number: {
            peer: [(m.slot, m.box.slices, m.term) for message in cut for m in message] for peer, cut in edges.items()
        }
        for number, edges in messages.items()
    }
