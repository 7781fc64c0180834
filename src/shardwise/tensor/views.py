"""Is a view that had to be copied still what a view would be? Not after the tensor it was taken from is written to.

What is written to the copy is written to that tensor as well, where the engine knows how (`ops/views.py`).

Which strides would the whole tensor have? By them contiguous() and reshape() copy exactly where torch copies.

A local tensor cannot tell: some columns of the whole may be all that a rank has, and contiguous there. So a tensor that
would not be contiguous as a whole has a note (`_dense_strides`), the same on every rank; one without is read as
contiguous.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise._torch import no_dispatch_modes, storage_identity
from shardwise.tensor.dispatch import UnsupportedOpError

Versions = tuple[int, ...]


_WRITES = "shardwise_writes"


def _count_writes(tensors: Sequence[Tensor]) -> Versions:
    return tuple(t.untyped_storage().__dict__.get(_WRITES, 0) if t.is_inference() else t._version for t in tensors)


def count_inference_write(local: Tensor) -> None:
    """Count a write to a local tensor of inference mode, for which torch keeps no version."""
    if local.is_inference():
        notes = local.untyped_storage().__dict__
        notes[_WRITES] = notes.get(_WRITES, 0) + 1


@dataclass(slots=True, eq=False)
class CopiedView:
    """What a copy was taken from, and how often that had been written to then.

    Local tensors share their count of writes with all their views and with what they are detached from. They are kept
    as long as the copy is, as torch keeps the memory of a view's base. `behind` is what the source was copied from.
    `write` writes the copy, whose local tensors are `parts`, to the source; `siblings` were taken with it and do not
    overlap.
    """

    name: str
    sources: tuple[Tensor, ...]
    versions: Versions
    behind: CopiedView | None = None
    write: Callable[[], None] | None = None
    parts: tuple[Tensor, ...] = ()
    written: Versions = ()
    siblings: tuple[CopiedView, ...] = ()

    @classmethod
    def of(cls, name: str, sources: Sequence[Tensor], behind: CopiedView | None = None) -> CopiedView:
        counted = tuple(local.detach() for local in sources)
        return cls(name, counted, _count_writes(counted), behind)

    def allow_writes(self, parts: tuple[Tensor, ...], write: Callable[[], None]) -> None:
        """Let what is written to these local tensors be written to the source by a function."""
        self.parts, self.written, self.write = parts, _count_writes(parts), write

    def check(self) -> None:
        """Raise if the copy is out of date."""
        if self.behind is not None:
            self.behind.check()
        if self.versions != _count_writes(self.sources):
            raise UnsupportedOpError(
                f"{self.name} was copied and shares no memory with the tensor it was taken from, which was written to "
                "since, so it is out of date; take it again, or clone() it at once if the old values are meant"
            )

    def write_back(self) -> None:
        """Write the copy to its source, if it was written to."""
        if self.write is None or self.written == _count_writes(self.parts):
            return
        fresh = [view for view in (self, *self.siblings) if view.versions == _count_writes(view.sources)]
        self.write()
        self.written = _count_writes(self.parts)
        for view in fresh:
            view.versions = _count_writes(view.sources)


class _Following(threading.local):
    on: bool = False


_following = _Following()


@contextmanager
def followed_writes() -> Iterator[None]:
    """A context after which the caller writes copies back that were written to in it."""
    before, _following.on = _following.on, True
    try:
        yield
    finally:
        _following.on = before


def is_written_back(view: CopiedView | None) -> bool:
    """Whether a write to a copy, made now, will be written to its source."""
    return _following.on and view is not None and view.write is not None


Strides = tuple[int, ...]


def make_stand_in(shape: Sequence[int], strides: Strides | None, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that has the shape and strides of a whole tensor; None stands for contiguous."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


def has_format(
    shape: Sequence[int], strides: Strides | None, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Whether a whole tensor with these strides is contiguous, in the sense of a memory format.

    >>> has_format((2, 3), None), has_format((2, 3), (1, 2)), has_format((2, 3), (9, 1))
    (True, False, False)
    """
    if strides is None and memory_format is torch.contiguous_format:
        return True
    with no_dispatch_modes():
        return make_stand_in(shape, strides, torch.uint8).is_contiguous(memory_format=memory_format)


def find_strides(made: Tensor) -> Strides | None:
    """The note for a whole tensor of which this is the stand-in."""
    return None if made.is_contiguous() else tuple(made.stride())


def copy_strides(shape: Sequence[int], strides: Strides | None, memory_format: torch.memory_format) -> Strides | None:
    """The note for a copy, in a memory format, of a whole tensor with these strides."""
    with no_dispatch_modes():
        return find_strides(make_stand_in(shape, strides, torch.uint8).clone(memory_format=memory_format))


def can_view(shape: Sequence[int], strides: Strides | None, size: Sequence[int]) -> bool:
    """Whether torch views a whole tensor with these strides in another shape, instead of copying it.

    >>> can_view((2, 3), (1, 2), (6,)), can_view((2, 3), (9, 1), (2, 1, 3))
    (False, True)
    """
    if strides is None:
        return True
    try:
        with no_dispatch_modes():
            make_stand_in(shape, strides, torch.uint8).view(tuple(size))
    except RuntimeError:
        return False
    return True


def copy_if_shared(local: Tensor, source: Tensor) -> Tensor:
    """A tensor that shares no memory with another."""
    shared = storage_identity(local.untyped_storage()) == storage_identity(source.untyped_storage())
    return local.clone() if shared else local
