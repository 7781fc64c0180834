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
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import has_saved_tensors_hooks, storage_identity
from shardwise.comm.traced import is_tracing
from shardwise.geometry import Layout
from shardwise.ops.engine.gathers.gather_order import ParameterGather, find_parameter, note_cast
from shardwise.ops.engine.gathers.prefetch import ParameterPrefetcher, current_prefetcher, end_operator
from shardwise.tensor.move import buffer_limit
from shardwise.tensor.moving.autograd import LayoutMove, move_locals
from shardwise.tensor.moving.move_operator import AGAIN
from shardwise.tensor.sharded_tensor import ShardedTensor

_MARK, _NOTE = "reshard_after_forward", "_gathered_from"
ALWAYS, AUTOMATIC = "always", "automatic"


def mark_for_resharding(tensor: ShardedTensor, kind: str = ALWAYS) -> None:
    """Free what is gathered of a parameter after each operator of the forward pass.

    `AUTOMATIC`: but not after the last one, as the backward pass begins with it.
    """
    tensor.__dict__[_MARK] = kind


def is_resharded(tensor: ShardedTensor) -> bool:
    """Whether what is gathered of a tensor is freed after each operator."""
    return _MARK in tensor.__dict__


def copy_mark(source: ShardedTensor, target: Any) -> None:
    """Mark what was cast from a parameter as the parameter is marked."""
    if isinstance(target, ShardedTensor):
        note_cast(source, target)
        if _MARK in source.__dict__:
            target.__dict__[_MARK] = source.__dict__[_MARK]


def find_gather(source: ShardedTensor, layout: Layout, label: str) -> ParameterGather | None:
    """The move of a parameter, or of what was cast from one; None for anything else."""
    parameter = find_parameter(source)
    if parameter is None or layout.depends_on_data or source.sharding.depends_on_data:
        return None
    if len(source.sharding.ranks) != source.comm.world_size:
        return None  # a rank without a part has nothing to ask for, and all ranks must start the same moves
    if any(part.is_inference() for part in parameter.local_parts):
        return None  # whether they were changed in the meantime is not to be seen
    return ParameterGather(parameter, source.dtype, layout, label)


@dataclass(frozen=True, eq=False, slots=True)
class GatherNote:
    """From which local tensors of a parameter a whole one was made, and how."""

    gather: ParameterGather
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    memory: int
    prefetcher: ParameterPrefetcher | None

    def make_again(self) -> Tensor:
        """The whole tensor, made again."""
        if tuple(t._version for t in self.sources) != self.versions:
            raise RuntimeError(
                "a parameter that is needed for the backward pass was changed in place after the forward pass; call "
                "backward before the optimizer's step"
            )
        gather, comm = self.gather, self.gather.parameter.comm
        src, size = gather.parameter.sharding, gather.dtype.itemsize
        limit = buffer_limit(src, gather.layout, size, None)
        label = f"{gather.label}{AGAIN}"
        started = None
        if self.prefetcher is not None and all(map(is_, self.sources, gather.parameter.local_parts)):
            started = self.prefetcher.ask(replace(gather, label=label))
            self.prefetcher.end_operator()
        link = LayoutMove(src, gather.layout, comm, gather.dtype, label, limit, started=started)
        with torch.no_grad():
            return move_locals(link, tuple(t.detach().to(gather.dtype) for t in self.sources))[0]


@dataclass(frozen=True, eq=False, slots=True)
class SavedView:
    """What an operator saved of a gathered tensor."""

    note: GatherNote
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def note_gather(moved: ShardedTensor, source: ShardedTensor, gather: ParameterGather) -> None:
    """Note how a tensor was gathered, if its source is marked."""
    mark, prefetcher = source.__dict__.get(_MARK), current_prefetcher()
    if mark is None or not moved.local_parts:
        return
    if mark == AUTOMATIC and prefetcher is not None and prefetcher.is_kept(gather):
        return
    sources = gather.parameter.local_parts
    versions = tuple(t._version for t in sources)
    memory = storage_identity(moved.local_parts[0].untyped_storage())
    moved.__dict__[_NOTE] = GatherNote(gather, sources, versions, memory, prefetcher)


def label_again(source: ShardedTensor, label: str) -> str:
    """The label of a move that the backward pass makes again."""
    return f"{label}{AGAIN}" if _MARK in source.__dict__ else label


def free_after_forward(tensors: Sequence[ShardedTensor]) -> AbstractContextManager[Any]:
    """A context in which an operator, which has its inputs now, saves notes in place of gathered parameters."""
    end_operator()
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
