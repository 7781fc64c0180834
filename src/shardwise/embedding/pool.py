"""How are bags of rows summed where the rows are held, so that sums travel instead of rows?

1. Each rank sends every group of holders its ids in the order of bags, where each bag begins, and weights if given.
2. A holder sums the rows of each bag that it has, in one call for each asking rank, and sends the sums.
3. The asking rank adds up what the holders had for its bags.

The gradient of a bag goes to the holders of its rows, which add it to each of them. A bag that has no row at a holder
costs nothing there: never more sums travel than rows would, and every rank knows which are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.embedding.fetch import BlocksByRank, exchange_blocks, index_tensor, slabs_for
from shardwise.embedding.lookup_call import LookupCall, RequestLists, exchange_requests
from shardwise.embedding.routes import count_distinct
from shardwise.embedding.slabs import ColumnSlab, RowNumbers, owned_rows
from shardwise.geometry.mesh import IntArray

CANNOT_POOL = 1 << 40  # more elements than any sums have: this rank cannot have its bags summed elsewhere


@dataclass(frozen=True, eq=False, slots=True)
class LocalBags:
    """The ids of a rank without padding, the bag of each (ascending), how many bags there are, weights of samples."""

    ids: RowNumbers
    of: IntArray
    count: int
    weights: Tensor | None

    def lengths(self) -> IntArray:
        """How many ids each bag has."""
        return np.bincount(self.of, minlength=self.count)


@dataclass(frozen=True, eq=False, slots=True)
class BagRequest:
    """What a rank asks of one group of holders: ids, where each bag begins among them, which bags these are."""

    ids: RowNumbers
    starts: RowNumbers
    bags: IntArray
    weights: Tensor | None

    def lists(self) -> RequestLists:
        """What travels; weights as bytes, in any dtype."""
        raw = np.zeros(0, np.uint8) if self.weights is None else self.weights.view(torch.uint8).numpy()
        return self.ids, self.starts, raw


def split_bags_by_holder(bags: LocalBags, call: LookupCall) -> list[BagRequest]:
    """The ids of some bags by group of holders."""
    order, counts = call.routes.sort_rows(bags.ids)
    ids, of, weights = bags.ids, bags.of, bags.weights
    if order is not None:
        ids, of = ids[order], of[order]
        weights = None if weights is None else weights[torch.from_numpy(order)]
    found, end = [], 0
    for count in counts:
        run, end = slice(end, end + count), end + count
        starts = np.flatnonzero(np.diff(of[run], prepend=-1)).astype(call.number)
        found.append(
            BagRequest(ids[run], starts, of[run][starts], None if weights is None else weights[run].contiguous())
        )
    return found


@dataclass(frozen=True, eq=False, slots=True)
class ReceivedBags:
    """What another rank asks of this one."""

    ids: RowNumbers
    starts: IntArray
    weights: Tensor | None

    @classmethod
    def of(cls, lists: RequestLists, like: Tensor) -> ReceivedBags:
        ids, starts, raw = lists
        weights = torch.frombuffer(bytearray(raw), dtype=like.dtype).to(like.device) if len(raw) else None
        return cls(ids, starts.astype(np.int64), weights)

    def within(self, band: ColumnSlab, inside: bool) -> ReceivedBags:
        """What concerns one band, in local numbers; as many bags, some of them empty."""
        where, local = band.runs.find(self.ids, inside)
        if isinstance(where, slice):
            return ReceivedBags(local, self.starts, self.weights)
        before = np.zeros(len(self.ids) + 1, np.int64)
        before[where + 1] = 1
        weights = None if self.weights is None else self.weights[index_tensor(where, self.weights)]
        return ReceivedBags(local, before.cumsum()[self.starts], weights)

    def sums(self, table: Tensor) -> Tensor:
        """The sum of each bag's rows of a local table."""
        ids = index_tensor(self.ids, table)
        if not table.is_contiguous():  # torch would copy all of it
            table, ids = table.index_select(0, ids), torch.arange(len(ids), device=table.device)
        return F.embedding_bag(
            ids, table, index_tensor(self.starts, table), mode="sum", per_sample_weights=self.weights
        )

    def spread(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Local rows, and for each the gradient of its bag."""
        bag = np.repeat(np.arange(len(self.starts)), np.diff(self.starts, append=len(self.ids)))
        rows = gradient.index_select(0, index_tensor(bag, gradient))
        return index_tensor(self.ids, gradient), rows if self.weights is None else rows.mul_(self.weights.unsqueeze(1))


@dataclass(frozen=True, eq=False, slots=True)
class BagPooling:
    """Bags of this rank by group of holders, and what others ask of it."""

    call: LookupCall
    count: int
    parts: list[BagRequest]
    asked: dict[int, ReceivedBags]

    def forward(self, locals_: Sequence[Tensor], like: Tensor) -> Tensor:
        """The sums of this rank's bags."""
        sends = {
            r: [one.sums(b.take_columns(locals_[b.slot])) for b, one in self._requested_slabs(r, True)]
            for r in self._ranks
        }
        tiles = {r: list(self._tiles(r, True)) for r in self._ranks}
        receives = {r: [like.new_empty(len(p.bags), b.width) for b, p in found] for r, found in tiles.items()}
        receives[self.call.comm.rank] = sends[self.call.comm.rank]
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: sums of bags")
        blocks = [(b, p, block) for r, found in tiles.items() for (b, p), block in zip(found, receives[r], strict=True)]
        if self._whole(blocks):
            return torch.cat([block for *_, block in sorted(blocks, key=lambda found: found[0].columns)], 1)
        result = like.new_zeros(self.count, self.call.layout.shape[1])
        for band, part, block in blocks:
            self._add(result[:, slice(*band.columns)], part, block)
        return result

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the local tensors, from that of this rank's sums."""
        sends: BlocksByRank = {r: [self._of(gradient, b, p) for b, p in self._tiles(r, False)] for r in self._ranks}
        found = {r: list(self._requested_slabs(r, False)) for r in self._ranks}
        receives = {r: [gradient.new_empty(len(a.starts), b.width) for b, a in f] for r, f in found.items()}
        receives[self.call.comm.rank] = sends[self.call.comm.rank]
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: gradients of bags")
        sums = tuple(gradient.new_zeros(shape) for shape in self.call.layout.local_shapes(self.call.comm.rank))
        for rank, bands in found.items():
            for (band, asked), block in zip(bands, receives[rank], strict=True):
                band.take_columns(sums[band.slot]).index_add_(0, *asked.spread(block))
        return sums

    def _whole(self, blocks: Sequence[tuple[ColumnSlab, BagRequest, Tensor]]) -> bool:
        """Whether each holder has some columns of all bags."""
        width = sum(band.width for band, *_ in blocks)
        return width == self.call.layout.shape[1] > 0 and all(len(p.bags) == self.count for _, p, _ in blocks)

    def _add(self, result: Tensor, part: BagRequest, block: Tensor) -> None:
        if len(part.bags) == self.count:
            result.add_(block)
        else:
            result.index_add_(0, index_tensor(part.bags, block), block)

    def _of(self, gradient: Tensor, band: ColumnSlab, part: BagRequest) -> Tensor:
        columns = gradient if band.width == gradient.shape[1] else gradient[:, slice(*band.columns)]
        full = len(part.bags) == self.count
        return columns.contiguous() if full else columns.index_select(0, index_tensor(part.bags, gradient))

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self.call.comm.ranks

    def _tiles(self, holder: int, answers: bool) -> Iterator[tuple[ColumnSlab, BagRequest]]:
        group = self.call.routes.group_of.get(holder)
        if group is not None:
            for band, _ in slabs_for(self.call, holder, self.call.comm.rank, answers):
                yield band, self.parts[group]

    def _requested_slabs(self, asker: int, answers: bool) -> Iterator[tuple[ColumnSlab, ReceivedBags]]:
        for band, inside in slabs_for(self.call, self.call.comm.rank, asker, answers):
            yield band, self.asked[asker].within(band, inside)


def request_bag_sums(
    call: LookupCall, bags: LocalBags, like: Tensor, *, possible: bool, problem: str | None
) -> BagPooling | None:
    """Ask the holders to sum bags, or None if fewer bytes travel when ranks fetch the rows themselves."""
    parts = split_bags_by_holder(bags, call)
    sums = (
        sum(len(p.bags) * width for p, width in zip(parts, _bag_sum_widths(call), strict=True))
        if possible
        else CANNOT_POOL
    )
    rows = count_distinct(bags.ids, call.layout.shape[0]) * call.layout.shape[1]
    told = exchange_requests(call, [part.lists() for part in parts], (sums, rows), problem)
    if sum(n[0] for n in told.notes.values()) > sum(n[1] for n in told.notes.values()):
        return None
    asked = {r: ReceivedBags.of(lists, like) for r, lists in told.lists.items() if lists}
    return BagPooling(call, bags.count, parts, asked)


def _bag_sum_widths(call: LookupCall) -> list[int]:
    """For each group of holders, how many elements travel for each bag."""
    own = call.comm.rank
    found = [0] * len(call.routes.row_ranges)
    for holder, group in call.routes.group_of.items():
        found[group] += sum(band.width for band in owned_rows(call.layout, holder, call.asker_for_answers(own)).slabs)
    return found


class _PoolBags(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooling: BagPooling, *held: Tensor) -> Tensor:
        ctx.pooling = pooling
        return pooling.forward(held, held[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A rank that holds nothing returns a gradient for its anchor, which has no elements.
        return None, *(ctx.pooling.backward(grads[0]) or (grads[0].new_zeros(0),))


def pool_bags(pooling: BagPooling, held: tuple[Tensor, ...]) -> Tensor:
    """The sums, recorded on the tape of what this rank holds: its local tensors, or its anchor."""
    sums: Tensor = _PoolBags.apply(pooling, *held)  # type: ignore[no-untyped-call]  # untyped in torch
    return sums
