"""Is a view that had to be copied still what a view would be? Not after the tensor it was taken from is written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.tensor.dispatch import UnsupportedOpError


@dataclass(frozen=True, slots=True)
class CopiedView:
    """What a copy was taken from, and how often that had been written to then.

    Local tensors share their count of writes with all their views and with what they are detached from. They are kept
    as long as the copy is, as torch keeps the memory of a view's base.
    """

    name: str
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, name: str, sources: Sequence[Tensor]) -> CopiedView:
        counted = tuple(local.detach() for local in sources if not local.is_inference())
        return cls(name, counted, tuple(local._version for local in counted))

    def check(self) -> None:
        """Raise if the copy is out of date."""
        if any(local._version != version for local, version in zip(self.sources, self.versions, strict=True)):
            raise UnsupportedOpError(
                f"{self.name} was copied and shares no memory with the tensor it was taken from, which was written to "
                "since, so it is out of date; take it again, or clone() it at once if the old values are meant"
            )
