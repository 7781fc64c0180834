"""How does each rank get the rows it wants of a table that lies on many ranks, and how do gradients go back?

1. Every rank says how many rows it asks of whom: one small gather, which also tells if something is wrong anywhere.
2. The row numbers travel, each once to each rank that holds a part of the row.
3. The rows come back, straight into the result where they lie side by side in it.

The gradient of the rows goes the same ways in the other direction and is added up where the rows are held, by all
replicas in the same order. Every rank takes part in all of it, with or without rows of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.comm import Comm, agree
from shardwise.geometry import Layout
from shardwise.nn.bands import Band, length, rows_in, share

Where: TypeAlias = Tensor | slice
Blocks: TypeAlias = dict[int, list[Tensor]]
TINY = 1e-7  # torch's own guard against a division by zero


@dataclass(frozen=True, eq=False)
class Request:
    """The rows that this rank wants, ascending and each once, and those that others want of it, by rank."""

    layout: Layout
    comm: Comm
    rows: Tensor
    asked: dict[int, Tensor]
    label: str

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the result."""
        return len(self.rows), self.layout.shape[1]

    def fetch(self, locals_: Sequence[Tensor], like: Tensor) -> Tensor:
        """The rows themselves."""
        result = like.new_empty(self.shape)
        own = self.comm.rank

        def taken(band: Band, rows: Tensor) -> Tensor:
            return band.of_local(locals_[band.slot]).index_select(0, rows)

        sends = {r: self._for_asker(r, r, taken) for r in self.comm.ranks}
        places = {r: list(self._places(r, own)) for r in self.comm.ranks}
        receives = {r: [_target(result, band, where) for band, where in found] for r, found in places.items()}
        self._exchange(sends, receives, "rows")
        for rank, found in places.items():
            for (band, where), block in zip(found, receives[rank], strict=True):
                if not _is_straight(result, band, where):
                    result[where, slice(*band.columns)] = block
        return result

    def push(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the local tensors, from that of the rows."""
        sends = {
            r: [gradient[where, slice(*band.columns)].contiguous() for band, where in self._places(r, None)]
            for r in self.comm.ranks
        }
        found = {r: list(self._asked_of_me(r, None)) for r in self.comm.ranks}
        receives = {r: [gradient.new_empty(len(at), band.width) for band, at in f] for r, f in found.items()}
        self._exchange(sends, receives, "gradients")
        sums = tuple(gradient.new_zeros(shape) for shape in self.layout.local_shapes(self.comm.rank))
        for rank, bands in found.items():
            for (band, at), block in zip(bands, receives[rank], strict=True):
                band.of_local(sums[band.slot]).index_add_(0, at, block)
        return sums

    def renorm(self, locals_: Sequence[Tensor], most: float, kind: float, like: Tensor) -> None:
        """Scale rows that are wanted by anyone and whose norm is greater than `most`, in place."""
        if all(band.width == self.layout.shape[1] for r in self.layout.ranks for band in self._bands(r, None)):
            for rank in self.comm.ranks:
                for band, at in self._asked_of_me(rank, None):
                    torch.embedding_renorm_(band.of_local(locals_[band.slot]), at, most, kind)
            return
        norms = self._norms(locals_, kind, like)
        scales = torch.where(norms > most, most / (norms + TINY), torch.ones_like(norms))
        self._scale(locals_, scales)

    def _norms(self, locals_: Sequence[Tensor], kind: float, like: Tensor) -> Tensor:
        """The norms of the wanted rows, from what the holders of their columns know."""
        whole = kind == float("inf")

        def powers(band: Band, rows: Tensor) -> Tensor:
            block = band.of_local(locals_[band.slot]).index_select(0, rows).abs()
            return block.amax(1) if whole else block.pow(kind).sum(1)

        sends = {r: self._for_asker(r, r, powers) for r in self.comm.ranks}
        places = {r: list(self._places(r, self.comm.rank)) for r in self.comm.ranks}
        receives = {r: [like.new_empty(length(where)) for _, where in found] for r, found in places.items()}
        self._exchange(sends, receives, "norms")
        parts = [(b.columns, w, p) for r, f in places.items() for (b, w), p in zip(f, receives[r], strict=True)]
        total = like.new_zeros(len(self.rows))
        # In the order of the columns, whoever held them: then all ranks get the same bits.
        for _, where, part in sorted(parts, key=lambda p: p[0]):
            total[where] = torch.maximum(total[where], part) if whole else total[where] + part
        return total if whole else total.pow(1 / kind)

    def _scale(self, locals_: Sequence[Tensor], scales: Tensor) -> None:
        """Multiply rows of local tensors, each once, however many ranks want it."""
        sends = {r: [scales[where] for _, where in self._places(r, None)] for r in self.comm.ranks}
        found = {r: list(self._asked_of_me(r, None)) for r in self.comm.ranks}
        receives = {r: [scales.new_empty(len(at)) for _, at in f] for r, f in found.items()}
        self._exchange(sends, receives, "scales")
        for number, band in enumerate(self._bands(self.comm.rank, None)):
            rows = torch.cat([found[r][number][1] for r in self.comm.ranks])
            factors = torch.cat([receives[r][number] for r in self.comm.ranks])
            once, places = torch.unique(rows, return_inverse=True)
            factor = factors.new_empty(len(once))
            factor[places] = factors
            part = band.of_local(locals_[band.slot])
            part[once] = part[once] * factor.unsqueeze(1)

    def _bands(self, holder: int, asker: int | None) -> tuple[Band, ...]:
        return share(self.layout, holder, asker).bands

    def _places(self, holder: int, asker: int | None) -> Iterator[tuple[Band, Where]]:
        """The bands of another rank, with the places of their rows in the result."""
        for band in self._bands(holder, asker):
            yield band, band.runs.find(self.rows)[0]

    def _asked_of_me(self, asker: int, chosen_by: int | None) -> Iterator[tuple[Band, Tensor]]:
        """This rank's bands, with the local numbers of the rows that another rank wants."""
        for band in self._bands(self.comm.rank, chosen_by):
            yield band, band.runs.find(self.asked[asker])[1]

    def _for_asker(self, asker: int, chosen_by: int | None, make: Callable[[Band, Tensor], Tensor]) -> list[Tensor]:
        return [make(band, at) for band, at in self._asked_of_me(asker, chosen_by)]

    def _exchange(self, sends: Blocks, receives: Blocks, what: str) -> None:
        _exchange(self.comm, sends, receives, f"{self.label}: {what}")


def _exchange(comm: Comm, sends: Blocks, receives: Blocks, label: str) -> None:
    """Exchange blocks; what a rank has for itself is copied."""
    own = comm.rank
    for source, target in zip(sends[own], receives[own], strict=True):
        target.copy_(source)
    outgoing, incoming = ({r: b for r, b in blocks.items() if r != own} for blocks in (sends, receives))
    comm.exchange(outgoing, incoming, label=label).wait()


def _is_straight(result: Tensor, band: Band, where: Where) -> bool:
    """Whether a band's rows are one run of the result's memory."""
    return isinstance(where, slice) and band.width == result.shape[1]


def _target(result: Tensor, band: Band, where: Where) -> Tensor:
    if _is_straight(result, band, where):
        return result[where]
    return result.new_empty(length(where), band.width)


def ask(
    layout: Layout,
    comm: Comm,
    rows: Tensor,
    *,
    everyone: bool,
    fields: Mapping[str, object],
    label: str,
    problem: str | None = None,
) -> Request:
    """Tell all holders which rows (ascending, each once) this rank wants; with `everyone`, replicas are told as well.

    A problem of one rank, or fields that differ between ranks, are raised on all of them before any row travels.
    """
    own = comm.rank
    reached = {r: rows_in(share(layout, r, None if everyone else own).reach, rows) for r in comm.ranks}
    digest = zlib.crc32(repr((sorted(fields.items()), layout._meaning, everyone)).encode())
    head = [digest, int(problem is not None), *(length(reached[r]) for r in comm.ranks)]
    told = torch.stack(comm.all_gather(torch.tensor(head, device=comm.device), label=label)).tolist()
    if any(line[0] != digest or line[1] for line in told):
        agree(comm, {**fields, "everyone": everyone, "layout": layout._meaning.hex()}, label=label, problem=problem)
    mine = comm.ranks.index(own) + 2
    asked = {r: rows.new_empty(line[mine]) for r, line in zip(comm.ranks, told, strict=True)}
    sends = {r: [rows[where]] for r, where in reached.items()}
    _exchange(comm, sends, {r: [ids] for r, ids in asked.items()}, f"{label}: row numbers")
    return Request(layout, comm, rows, asked, label)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, *held: Tensor) -> Tensor:
        ctx.request = request
        return request.fetch(held, held[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # A rank that holds nothing gives a gradient for its anchor, which has no elements.
        return None, *(ctx.request.push(grads[0]) or (grads[0].new_zeros(0),))


def fetched(request: Request, held: tuple[Tensor, ...]) -> Tensor:
    """The wanted rows, recorded on the tape of what this rank holds: its local tensors, or its anchor."""
    rows: Tensor = _Fetch.apply(request, *held)  # type: ignore[no-untyped-call]  # untyped in torch
    return rows
