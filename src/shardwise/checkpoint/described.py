"""A tensor as a checkpoint plans it: what is known before a value is touched, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.geometry import DType, Layout


@dataclass(frozen=True, eq=False, slots=True)
class Described:
    """A tensor that the ranks save together."""

    name: str
    dtype: DType
    layout: Layout

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize
