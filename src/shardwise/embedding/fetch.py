"""How does each rank get the rows it wants of a table that is spread over many ranks, and how do gradients go back?

1. Every rank sends the owners the rows it wants (`asking`).
2. The rows come back, straight into the buffer where they are adjacent in it, and from there to the ids.

The gradient of the rows takes the reverse path and is added up where the rows are stored, by all
replicas in the same order. Every rank takes part in all of it, with or without its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.embedding.lookup_call import LookupCall, exchange_requests
from shardwise.embedding.routes import RowQuery, build_row_query
from shardwise.embedding.slabs import ColumnSlab, RowIndex, RowNumbers, index_length, owned_rows
from shardwise.tensor.recorder import observed_exchange

BlocksByRank: TypeAlias = dict[int, list[Tensor]]
SlabRows: TypeAlias = tuple[ColumnSlab, RowIndex]
NORM_EPSILON = 1e-7  # torch's own guard against a division by zero


@dataclass(frozen=True, eq=False, slots=True)
class RowRequest:
    """The rows that this rank wants, and those that others want of it, by rank."""

    call: LookupCall
    query: RowQuery
    asked: dict[int, RowNumbers]

    def fetch(self, locals_: Sequence[Tensor], like: Tensor) -> Tensor:
        """The rows themselves, in the order of the buffer."""
        sends = {
            r: [
                band.take_columns(locals_[band.slot]).index_select(0, at)
                for band, at in self._requested_slabs(r, like, True)
            ]
            for r in self._ranks
        }
        tiles = {r: list(self._tiles(r, True)) for r in self._ranks}
        width = self.call.layout.shape[1]
        every = [tile for found in tiles.values() for tile in found]
        if sum(b.width for b, _ in every) == width > 0 and all(index_length(w) == self.query.size for _, w in every):
            return self._fetch_columns(sends, tiles, like)
        result = like.new_empty(self.query.size, width)
        receives = {r: [_receive_buffer(result, tile) for tile in found] for r, found in tiles.items()}
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: rows")
        for rank, found in tiles.items():
            for tile, block in zip(found, receives[rank], strict=True):
                if not _is_contiguous_in(result, tile):
                    result[tile[1], slice(*tile[0].columns)] = block
        return result

    def _fetch_columns(self, sends: BlocksByRank, tiles: dict[int, list[SlabRows]], like: Tensor) -> Tensor:
        """The rows where every holder has some columns of all of them."""
        receives = {r: [like.new_empty(self.query.size, b.width) for b, _ in found] for r, found in tiles.items()}
        receives[self.call.comm.rank] = sends[self.call.comm.rank]
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: rows")
        blocks = [(b.columns, block) for r, f in tiles.items() for (b, _), block in zip(f, receives[r], strict=True)]
        blocks.sort(key=lambda pair: pair[0])
        return torch.cat([block for _, block in blocks], 1) if len(blocks) > 1 else blocks[0][1]

    def push_gradients(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the local tensors, from that of the rows in the order of the buffer."""
        sends = {r: [_take_slab_rows(gradient, tile) for tile in self._tiles(r, False)] for r in self._ranks}
        found = {r: list(self._requested_slabs(r, gradient, False)) for r in self._ranks}
        receives = {r: [gradient.new_empty(len(at), band.width) for band, at in f] for r, f in found.items()}
        receives[self.call.comm.rank] = sends[self.call.comm.rank]
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: gradients")
        sums = tuple(gradient.new_zeros(shape) for shape in self.call.layout.local_shapes(self.call.comm.rank))
        for rank, bands in found.items():
            for (band, at), block in zip(bands, receives[rank], strict=True):
                band.take_columns(sums[band.slot]).index_add_(0, at, block)
        return sums

    def renorm(self, locals_: Sequence[Tensor], most: float, kind: float, like: Tensor) -> None:
        """Scale rows that are wanted by anyone and whose norm is greater than `most`, in place."""
        layout, own = self.call.layout, self.call.comm.rank
        if any(band.width != layout.shape[1] for r in layout.ranks for band in owned_rows(layout, r, None).slabs):
            self._scale(locals_, _norm_scales(self._norms(locals_, kind, like), most))
            return
        found = [[at for _, at in self._requested_slabs(r, like, False)] for r in self._ranks]
        for band, wanted in zip(owned_rows(layout, own, None).slabs, zip(*found, strict=True), strict=True):
            part, rows = band.take_columns(locals_[band.slot]), torch.cat(wanted).unique()  # type: ignore[no-untyped-call]  # untyped in torch
            taken = part.index_select(0, rows)
            part[rows] = taken * _norm_scales(torch.linalg.vector_norm(taken, kind, 1), most).unsqueeze(1)

    def _norms(self, locals_: Sequence[Tensor], kind: float, like: Tensor) -> Tensor:
        """The norms of the wanted rows, from what the holders of their columns know."""
        whole = kind == float("inf")

        def powers(band: ColumnSlab, rows: Tensor) -> Tensor:
            block = band.take_columns(locals_[band.slot]).index_select(0, rows).abs()
            return block.amax(1) if whole else block.pow(kind).sum(1)

        sends = {r: [powers(*found) for found in self._requested_slabs(r, like, True)] for r in self._ranks}
        places = {r: list(self._tiles(r, True)) for r in self._ranks}
        receives = {r: [like.new_empty(index_length(where)) for _, where in found] for r, found in places.items()}
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: norms")
        parts = [(b.columns, w, p) for r, f in places.items() for (b, w), p in zip(f, receives[r], strict=True)]
        total = like.new_zeros(self.query.size)
        # In the order of the columns, whoever held them: then all ranks get the same bits.
        for _, where, part in sorted(parts, key=lambda p: p[0]):
            total[where] = torch.maximum(total[where], part) if whole else total[where] + part
        return total if whole else total.pow(1 / kind)

    def _scale(self, locals_: Sequence[Tensor], scales: Tensor) -> None:
        """Multiply rows of local tensors, each once, however many ranks want it."""
        sends = {r: [scales[where] for _, where in self._tiles(r, False)] for r in self._ranks}
        found = {r: list(self._requested_slabs(r, scales, False)) for r in self._ranks}
        receives = {r: [scales.new_empty(len(at)) for _, at in f] for r, f in found.items()}
        exchange_blocks(self.call.comm, sends, receives, f"{self.call.label}: scales")
        for number, band in enumerate(owned_rows(self.call.layout, self.call.comm.rank, None).slabs):
            rows = torch.cat([found[r][number][1] for r in self._ranks])
            factors = torch.cat([receives[r][number] for r in self._ranks])
            once, places = torch.unique(rows, return_inverse=True)
            factor = factors.new_empty(len(once))
            factor[places] = factors
            part = band.take_columns(locals_[band.slot])
            part[once] = part[once] * factor.unsqueeze(1)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self.call.comm.ranks

    def _tiles(self, holder: int, answers: bool) -> Iterator[SlabRows]:
        """The bands of another rank (those it answers with, or all), with the places of their rows in the buffer."""
        group = self.call.routes.group_of.get(holder)
        if group is None:
            return
        sent, where = self.query.sent[group], self.query.where[group]
        for band, inside in slabs_for(self.call, holder, self.call.comm.rank, answers):
            yield band, where if inside else _compose_index(where, band.runs.find(sent)[0])

    def _requested_slabs(self, asker: int, like: Tensor, answers: bool) -> Iterator[tuple[ColumnSlab, Tensor]]:
        """This rank's bands, with the local numbers of the rows that another rank wants."""
        for band, inside in slabs_for(self.call, self.call.comm.rank, asker, answers):
            yield band, index_tensor(band.runs.find(self.asked[asker], inside)[1], like)


def _norm_scales(norms: Tensor, most: float) -> Tensor:
    """What rows of these norms are multiplied by.

    Torch's own function has a kernel for GPUs that fails where there are no ids, takes norms other than the first and
    second for other numbers, and takes a row of a view for the whole row.
    """
    return torch.where(norms > most, most / (norms + NORM_EPSILON), torch.ones_like(norms))


def slabs_for(call: LookupCall, holder: int, asker: int, answers: bool) -> Iterator[tuple[ColumnSlab, bool]]:
    """The bands that a rank answers with (or all it holds), and whether they contain all requested rows."""
    chosen = call.asker_for_answers(asker) if answers else None
    for band in owned_rows(call.layout, holder, chosen).slabs:
        yield band, band.whole and chosen == call.asker_for_requests(asker)


def index_tensor(places: RowNumbers, like: Tensor) -> Tensor:
    """Numbers as an index of tensors such as another one."""
    return torch.from_numpy(places).to(like.device)


def exchange_blocks(comm: Comm, sends: BlocksByRank, receives: BlocksByRank, label: str) -> None:
    """Exchange blocks; what a rank has for itself is copied."""
    own = comm.rank
    for source, target in zip(sends[own], receives[own], strict=True):
        if target is not source:
            target.copy_(source)
    outgoing, incoming = ({r: b for r, b in blocks.items() if r != own} for blocks in (sends, receives))
    with observed_exchange(comm, label, outgoing, incoming):
        comm.exchange(outgoing, incoming, label=label).wait()


def _compose_index(outer: RowIndex, inner: RowIndex) -> RowIndex:
    """An index of what another index takes."""
    if not isinstance(outer, slice):
        taken: RowIndex = outer[inner]
        return taken
    if isinstance(inner, slice):
        return slice(outer.start + inner.start, outer.start + inner.stop)
    moved: RowIndex = inner + outer.start
    return moved


def _is_contiguous_in(result: Tensor, tile: SlabRows) -> bool:
    """Whether a tile is one run of the result's memory."""
    return isinstance(tile[1], slice) and tile[0].width == result.shape[1]


def _receive_buffer(result: Tensor, tile: SlabRows) -> Tensor:
    return (
        result[tile[1]] if _is_contiguous_in(result, tile) else result.new_empty(index_length(tile[1]), tile[0].width)
    )


def _take_slab_rows(rows: Tensor, tile: SlabRows) -> Tensor:
    """A tile of some rows, contiguous."""
    band, where = tile
    columns = rows if band.width == rows.shape[1] else rows[:, slice(*band.columns)]
    return (
        columns[where].contiguous() if isinstance(where, slice) else columns.index_select(0, index_tensor(where, rows))
    )


def request_rows(call: LookupCall, ids: RowNumbers, problem: str | None = None) -> RowRequest:
    """Tell all holders which rows this rank wants.

    A problem of one rank, or fields that differ between ranks, are raised on all of them before any row travels.
    """
    wanted = build_row_query(ids, call.routes, call.layout.shape[0])
    told = exchange_requests(call, [(rows,) for rows in wanted.sent], problem=problem)
    return RowRequest(
        call, wanted, {r: lists[0] if lists else np.zeros(0, np.int64) for r, lists in told.lists.items()}
    )


@dataclass(frozen=True, eq=False, slots=True)
class RowExpansion:
    """How rows of the buffer become those of ids; `dropped` marks those that pass no gradient on."""

    size: int
    places: Tensor | None = None
    order: Tensor | None = None
    dropped: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """The row of each id."""
        return rows if self.places is None else rows.index_select(0, self.places)

    def backward(self, gradient: Tensor) -> Tensor:
        """The gradient of the buffer's rows from that of the ids' rows."""
        if self.dropped is not None:
            gradient = gradient.masked_fill(self.dropped.unsqueeze(1), 0)
        if self.places is None:
            return gradient.contiguous()
        if self.order is not None:
            return gradient.index_select(0, self.order)
        return gradient.new_zeros(self.size, gradient.shape[1]).index_add_(0, self.places, gradient)


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: RowRequest, spread: RowExpansion, *held: Tensor) -> Tensor:
        ctx.request, ctx.spread = request, spread
        return spread.forward(request.fetch(held, held[0]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A rank that holds nothing returns a gradient for its anchor, which has no elements.
        pushed = ctx.request.push_gradients(ctx.spread.backward(grads[0]))
        return None, None, *(pushed or (grads[0].new_zeros(0),))


def fetch_rows(request: RowRequest, spread: RowExpansion, held: tuple[Tensor, ...]) -> Tensor:
    """The wanted rows, recorded on the tape of what this rank holds: its local tensors, or its anchor."""
    rows: Tensor = _FetchRows.apply(request, spread, *held)  # type: ignore[no-untyped-call]  # untyped in torch
    return rows
