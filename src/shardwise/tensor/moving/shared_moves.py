"""A move that one rank makes for all, where ranks are threads of one process: the last one that asks for it.

1. Each rank offers its local tensors and memory for its result while the ranks agree on the move.
2. If all ranks ask for the same move and offer it, the last of them copies every box from where it is to where it
   belongs, or reduces the whole tensors. Nothing is packed, and the ranks meet once.
3. Which boxes these are is worked out once for a plan. On a GPU the copies, or the sums, are one launch, which is kept
   for the addresses of its tensors.

Moves of several steps, and reductions that are not of whole tensors in equal runs, are not shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from shardwise._torch import foreach_copy
from shardwise.comm import ReduceOp
from shardwise.comm.kernels.box_copies import copy_boxes
from shardwise.comm.kernels.run_sums import reduce_runs
from shardwise.comm.threads.jobs import RendezvousJob, plan_reduction
from shardwise.comm.threads.streams import find_stream
from shardwise.geometry import Box
from shardwise.tensor.caches import cache_plans
from shardwise.tensor.moving.parts import RankPart, find_whole_collective, work_out_rank_part
from shardwise.tensor.moving.reductions import rescale
from shardwise.transfer import Step, Transfer

_KEPT_LAUNCHES = 256
TensorBox: TypeAlias = tuple[int, int, tuple[slice, ...] | None]
"""A box of a rank's local tensor: the rank's index, which tensor, where in it; None is the whole."""


@dataclass(frozen=True, slots=True)
class RankTensors:
    """What a rank offers: the local tensors that are moved, and those for the result."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False, slots=True)
class SharedMove:
    """The copies of all ranks (target and source, by the target's rank), or the reduction of their whole tensors."""

    transfer: Transfer
    ranks: tuple[int, ...]
    dtype: torch.dtype
    copies: Sequence[Sequence[tuple[TensorBox, TensorBox]]]
    collective: str | None = None
    _launches: dict[Any, Callable[[], None]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.transfer.src.numel * self.dtype.itemsize

    def make_offer(self, rank: int, held: Sequence[Tensor], device: torch.device) -> RankTensors:
        """What a rank brings: its local tensors off the tape, and fresh memory."""
        sources = [t.detach().resolve_conj().resolve_neg() for t in held]
        if self.collective is not None:
            sources = [t.contiguous() for t in sources]
        shapes = self.transfer.dst.local_shapes(rank)
        targets = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]
        return RankTensors(tuple(sources), tuple(targets))

    def plan_jobs(self, offers: Sequence[RankTensors]) -> list[RendezvousJob]:
        """What is to be done with the offers of all ranks."""
        if any(t.device.type != "cpu" for offer in offers for t in offer.targets[:1]):
            return [partial(self._launch, offers)]
        if self.collective is not None:
            return plan_reduction(*self._list_runs(offers), self._op)
        return [partial(_copy_all, copies, offers) for copies in self.copies if copies]

    def finish(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A rank's results, scaled."""
        for target in results:
            for step in self.transfer.steps:
                rescale(target, step.scale)
        return results

    @property
    def _op(self) -> ReduceOp:
        return cast(ReduceOp, self.transfer.steps[0].op)

    def _list_runs(self, offers: Sequence[RankTensors]) -> tuple[list[list[Tensor]], list[Tensor]]:
        """For each consecutive run of a reduction the tensors into which it goes, and what is reduced, both flat."""
        wholes = [offer.sources[0].view(-1) for offer in offers]
        outs = [offer.targets[0].view(-1) for offer in offers]
        return [outs] if self.collective == "all_reduce" else [[out] for out in outs], wholes

    def _launch(self, offers: Sequence[RankTensors]) -> None:
        """Copy or reduce all; the same between the same addresses by the launch that did it before."""
        tensors = [t for offer in offers for t in (*offer.sources, *offer.targets)]
        key = (find_stream(tensors[0].device), *((t.data_ptr(), t.stride()) for t in tensors))
        known = self._launches.get(key)
        if known is not None:
            known()
            return
        launch = self._copy_boxes(offers) if self.collective is None else self._reduce_runs(offers)
        if launch is not None:
            if len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.clear()
            self._launches[key] = launch

    def _copy_boxes(self, offers: Sequence[RankTensors]) -> Callable[[], None] | None:
        copies = chain.from_iterable(self.copies)
        return copy_boxes([(_find_box(to, offers, 1), _find_box(at, offers, 0)) for to, at in copies])

    def _reduce_runs(self, offers: Sequence[RankTensors]) -> Callable[[], None] | None:
        outs, wholes = self._list_runs(offers)
        lengths = [len(run[0]) for run in outs]
        terms = zip(*(torch.split(whole, lengths) for whole in wholes), strict=True)
        return reduce_runs(list(zip(terms, outs, strict=True)), self._op)


def _copy_all(copies: Sequence[tuple[TensorBox, TensorBox]], offers: Sequence[RankTensors]) -> None:
    targets = [_find_box(to, offers, 1) for to, _ in copies]
    foreach_copy(targets, [_find_box(at, offers, 0) for _, at in copies])


def _find_box(box: TensorBox, offers: Sequence[RankTensors], side: int) -> Tensor:
    index, slot, at = box
    offer = offers[index]
    tensor = (offer.targets if side else offer.sources)[slot]
    return tensor if at is None else tensor[at]


@cache_plans
def find_shared_move(transfer: Transfer, ranks: tuple[int, ...], dtype: torch.dtype) -> SharedMove | None:
    """How one rank makes a transfer for all of these ranks; None if that is not possible.

    >>> from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard
    >>> from shardwise.transfer import plan_transfer
    >>> rows, whole = (MeshSpec(Mesh.of(x=2), (kind,)).layout((8, 8)) for kind in (Shard(0), Replicate()))
    >>> shared = find_shared_move(plan_transfer(rows, whole, itemsize=4), (0, 1), torch.float32)
    >>> [len(copies) for copies in shared.copies]
    [2, 2]
    """
    kind = find_whole_collective(transfer, ranks, dtype)
    if kind is not None:
        return SharedMove(transfer, ranks, dtype, (), kind)
    if transfer.rank is not None or len(transfer.steps) != 1:
        return None
    step = transfer.steps[0]
    parts = [work_out_rank_part(step, rank, dtype.itemsize) for rank in ranks]
    if step.op is not None or step.in_place or any(part.fills for part in parts):
        return None
    return SharedMove(transfer, ranks, dtype, [_list_copies(step, i, ranks, parts) for i in range(len(ranks))])


def _list_copies(
    step: Step, index: int, ranks: tuple[int, ...], parts: Sequence[RankPart]
) -> list[tuple[TensorBox, TensorBox]]:
    """The copies into one rank's result."""
    rank, part = ranks[index], parts[index]
    found = []
    for copy in part.copies:
        found.append(((index, copy.dst_slot, copy.dst_box), (index, copy.src_slot, copy.src_box)))
    for number, edges in part.receives.items():
        for peer, messages in edges.items():
            theirs = ranks.index(peer)
            sent = chain.from_iterable(parts[theirs].sends[number][rank])
            for to, at in zip(chain.from_iterable(messages), sent, strict=True):
                found.append(((index, to.slot, to.box), (theirs, at.slot, at.box)))
    return [(_cut(to, step.dst.local_shapes(rank)), _cut(at, step.src.local_shapes(ranks[at[0]]))) for to, at in found]


def _cut(box: tuple[int, int, Box], shapes: Sequence[tuple[int, ...]]) -> TensorBox:
    index, slot, place = box
    return index, slot, None if place.sizes == shapes[slot] else place.slices
