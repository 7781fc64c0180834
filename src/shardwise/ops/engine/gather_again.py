"""Parameters that are gathered for an operator, freed after it, and gathered again in the backward pass.

1. A parameter that is marked (`reshard_after_forward` of a plan) is sharded; an operator gets it whole. Torch would
   keep the whole one for the backward pass: of all layers, so that each rank needs the memory of the whole model.
2. So what the operator saves of it is replaced, while the operator runs, by a note of the move and of the view that was
   saved. The backward pass makes the move again when it needs the values. Every rank's backward pass meets the same
   notes in the same order, as it meets the same moves.
3. What is cast from a marked parameter, as autocast does, is marked as well: it is cast first, and then gathered.
4. In checkpointed code nothing is saved anyway. In a traced program moves are marked by their label, and the graph of
   the backward pass makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import has_saved_tensors_hooks, storage_identity
from shardwise.comm.traced import is_tracing
from shardwise.geometry import Layout
from shardwise.tensor.autograd import LayoutMove, move_locals
from shardwise.tensor.move import buffer_limit
from shardwise.tensor.move_operator import AGAIN
from shardwise.tensor.sharded_tensor import ShardedTensor

_MARK, _NOTE = "reshard_after_forward", "_gathered_from"


def mark_for_resharding(tensor: ShardedTensor) -> None:
    """Free what is gathered of a parameter after each operator of the forward pass."""
    tensor.__dict__[_MARK] = True


def is_resharded(tensor: ShardedTensor) -> bool:
    """Whether what is gathered of a tensor is freed after each operator."""
    return _MARK in tensor.__dict__


def copy_mark(source: ShardedTensor, target: Any) -> None:
    """Mark what was cast from a marked parameter."""
    if _MARK in source.__dict__ and isinstance(target, ShardedTensor):
        target.__dict__[_MARK] = True


@dataclass(frozen=True, eq=False, slots=True)
class GatherNote:
    """From which local tensors a whole one was made, and how."""

    link: LayoutMove
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    memory: int

    def make_again(self) -> Tensor:
        """The whole tensor, made again."""
        if tuple(t._version for t in self.sources) != self.versions:
            raise RuntimeError(
                "a parameter that is needed for the backward pass was changed in place after the forward pass; call "
                "backward before the optimizer's step"
            )
        with torch.no_grad():
            return move_locals(self.link, tuple(t.detach() for t in self.sources))[0]


@dataclass(frozen=True, eq=False, slots=True)
class SavedView:
    """What an operator saved of a gathered tensor."""

    note: GatherNote
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def note_gather(moved: ShardedTensor, source: ShardedTensor, layout: Layout, label: str) -> None:
    """Note how a tensor was gathered, if its source is marked."""
    if _MARK not in source.__dict__ or is_tracing() or not source.local_parts or not moved.local_parts:
        return
    limit = buffer_limit(source.sharding, layout, source.dtype.itemsize, None)
    link = LayoutMove(source.sharding, layout, source.comm, source.dtype, label_again(source, label), limit)
    versions = tuple(t._version for t in source.local_parts)
    memory = storage_identity(moved.local_parts[0].untyped_storage())
    moved.__dict__[_NOTE] = GatherNote(link, source.local_parts, versions, memory)


def label_again(source: ShardedTensor, label: str) -> str:
    """The label of a move that the backward pass makes again."""
    return f"{label}{AGAIN}" if _MARK in source.__dict__ else label


def free_after_forward(tensors: Sequence[ShardedTensor]) -> AbstractContextManager[Any]:
    """A context in which an operator saves notes in place of gathered parameters."""
    notes = [t.__dict__[_NOTE] for t in tensors if _NOTE in t.__dict__]
    if not notes or not torch.is_grad_enabled() or is_tracing() or has_saved_tensors_hooks():
        return nullcontext()
    by_memory = {note.memory: note for note in notes}

    def pack(tensor: Tensor) -> Any:
        note = by_memory.get(storage_identity(tensor.untyped_storage()))
        if note is None:
            return tensor
        return SavedView(note, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, SavedView):
        return saved  # type: ignore[no-any-return]  # a tensor
    return saved.note.make_again().as_strided(saved.size, saved.stride, saved.offset)
