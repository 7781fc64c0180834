"""How does each rank get the rows it wants of a table that is spread over many ranks, and how do gradients go back?

1. Every rank sends all others a head: whether it agrees with them, whether something is wrong, and how much it
   requests. A rank with few requests sends its lists along, so that one exchange is enough. Only if some rank requests
   more, its lists travel in a second exchange, each to the owners concerned. What is wrong on one rank is raised on all
   of them, before anything else is sent (`exchange_requests`).
2. The rows come back, straight into the buffer where they are adjacent in it, and from there to the ids (`RowRequest`).
   The gradient of the rows takes the reverse path and is added up where the rows are stored, by all replicas in the
   same order.
3. Bags of rows may be summed where the rows are stored, so that sums travel instead of rows (`BagPooling`). Each rank
   sends every group of owners its ids in the order of bags, where each bag begins, and weights if there are any. An
   owner sums the rows of each bag that it has, in one call for each requesting rank; the requesting rank adds up these
   sums. The gradient of a bag goes to the owners of its rows, which add it to each of them. A bag that has no row at an
   owner costs nothing there: never more sums travel than rows would, and every rank knows which are fewer.

Every rank takes part in all of it, with or without its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm, agree
from shardwise.geometry import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.nn.lookup_routes import (
    ColumnSlab,
    HolderRoutes,
    RowIndex,
    RowNumbers,
    RowQuery,
    build_row_query,
    count_distinct,
    holder_routes,
    index_length,
    owned_rows,
    replica_asker,
)
from shardwise.tensor.execute import exchange_blocks
from shardwise.tensor.recorder import recorded_wait, recorders

RequestLists: TypeAlias = tuple[npt.NDArray[Any], ...]

INLINE = 1 << 16  # bytes that a rank sends to all others, needed there or not, to save an exchange
INLINE_ALL = 1 << 20  # the same for all ranks together
_FIXED = 3  # inline, two notes
_WORD = 8


@dataclass(frozen=True, slots=True)
class LookupCall:
    """One collective lookup: the table, who takes part, and what must be the same on all ranks.

    With `everyone`, all replicas of the requested rows are notified, not only those that answer.
    """

    layout: Layout
    comm: Comm
    everyone: bool
    label: str
    fields: Mapping[str, object]

    def asker_for_requests(self, asker: int) -> int | None:
        """The rank to pass to `share` and `holder_routes` for the lists of an asking rank."""
        return None if self.everyone else replica_asker(self.layout, asker)

    def asker_for_answers(self, asker: int) -> int | None:
        """The rank to pass to `share` for what an asking rank gets."""
        return replica_asker(self.layout, asker)

    @property
    def routes(self) -> HolderRoutes:
        """Whom this rank asks."""
        return holder_routes(self.layout, self.asker_for_requests(self.comm.rank))

    @property
    def number(self) -> type[np.signedinteger[Any]]:
        """The shortest dtype for row numbers."""
        return np.int32 if self.layout.shape[0] < 1 << 31 else np.int64


@dataclass(frozen=True, slots=True)
class ReceivedRequests:
    """What every rank noted for all others, and the lists that concern this rank, by asking rank."""

    notes: dict[int, tuple[int, int]]
    lists: dict[int, RequestLists]


def exchange_requests(
    call: LookupCall, groups: Sequence[RequestLists], notes: tuple[int, int] = (0, 0), problem: str | None = None
) -> ReceivedRequests:
    """Send all owners what this rank requests from each group of them; lists of the same kinds for each group."""
    comm = call.comm
    parts = [part for lists in groups for part in lists]
    inline = sum(part.nbytes for part in parts) <= min(INLINE, INLINE_ALL // comm.world_size)
    head = [int(inline), *notes, *map(len, parts)]
    body = [part.tobytes() for part in parts] if inline else []
    message = b"".join([np.array(head, np.int64).tobytes(), *body])
    given = {**call.fields, "everyone": call.everyone, "layout": call.layout._layout_digest.hex()}
    with recorded_wait(comm, f"{call.label}: agree") if recorders else nullcontext():
        data = agree(comm, given, label=call.label, problem=problem, payload=message)
    heads = {r: np.frombuffer(d, np.int64, _FIXED).tolist() for r, d in data.items()}
    kinds = [part.dtype for part in groups[0]] if groups else []
    lists = {r: _read_request_lists(call, kinds, r, d, bool(heads[r][0])) for r, d in data.items()}
    long = {r for r, h in heads.items() if not h[0]}
    if long:
        own = call.comm.rank
        holders = call.routes.group_of if own in long else {}
        sends = {holder: [torch.from_numpy(part) for part in groups[group]] for holder, group in holders.items()}
        receives = {r: [torch.from_numpy(part) for part in lists[r]] for r in long}
        label = f"{call.label}: row numbers"
        exchange_blocks(call.comm, sends, receives, label)
    return ReceivedRequests({r: (h[1], h[2]) for r, h in heads.items()}, lists)


def _read_request_lists(
    call: LookupCall, kinds: Sequence[np.dtype[Any]], asker: int, data: bytes, inline: bool
) -> RequestLists:
    """The lists of an asking rank that concern this one: read from its message, or empty ones to be filled."""
    asked = holder_routes(call.layout, call.asker_for_requests(asker))
    group = asked.group_of.get(call.comm.rank)
    if group is None:
        return tuple(np.zeros(0, kind) for kind in kinds)
    first, count = group * len(kinds), len(asked.row_ranges) * len(kinds)
    lengths = np.frombuffer(data, np.int64, count, _FIXED * _WORD).tolist()
    own = lengths[first : first + len(kinds)]
    if not inline:
        return tuple(np.empty(n, kind) for n, kind in zip(own, kinds, strict=True))
    at = (_FIXED + count) * _WORD + sum(n * kinds[i % len(kinds)].itemsize for i, n in enumerate(lengths[:first]))
    found = []
    for length, kind in zip(own, kinds, strict=True):
        found.append(np.frombuffer(data, kind, length, at))
        at += length * kind.itemsize
    return tuple(found)


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
    received = exchange_requests(call, [(rows,) for rows in wanted.sent], problem=problem)
    return RowRequest(
        call, wanted, {r: lists[0] if lists else np.zeros(0, np.int64) for r, lists in received.lists.items()}
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
    received = exchange_requests(call, [part.lists() for part in parts], (sums, rows), problem)
    if sum(n[0] for n in received.notes.values()) > sum(n[1] for n in received.notes.values()):
        return None
    asked = {r: ReceivedBags.of(lists, like) for r, lists in received.lists.items() if lists}
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
