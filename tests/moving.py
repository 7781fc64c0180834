"""Layouts of every kind, values that tell where they belong, and addends that reduce to them without rounding.

A test makes every rank's local tensors with `local_parts`, moves them, returns what the ranks hold, and hands all of it
to `assert_holds`, which compares each element with a function of its global index, bit by bit.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm, LocalComm, Work
from shardwise.comm.protocol import Capabilities, Combine, TensorsByRank
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
)
from shardwise.tensor.execute import StagingPool

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, FP8, torch.complex64)
LINE, SQUARE = Mesh.of(tp=4), Mesh.of(dp=2, tp=2)


def _square(*placements: Placement, order: Sequence[str] | None = None) -> ShardingSpec:
    return MeshSpec(SQUARE, placements, order)


def _two_or_none(rows: int, columns: int) -> ShardingSpec:
    """Two boxes on ranks 0 and 3, one on rank 2, none on rank 1; no grid explains them."""
    top, left = rows // 2, columns // 3
    boxes = [
        (Box((0, 0), (top, columns)), 3),
        (Box((top, 0), (rows - top, left)), 0),
        (Box((top, left), (rows - top, left)), 3),
        (Box((top, 2 * left), ((rows - top) // 2, columns - 2 * left)), 2),
        (Box((top + (rows - top) // 2, 2 * left), (rows - top - (rows - top) // 2, columns - 2 * left)), 0),
    ]
    return EnumerableSpec([Piece(box, rank) for box, rank in boxes])


def layouts(rows: int, columns: int) -> dict[str, Layout]:
    """Every kind of layout of a matrix over 4 ranks, by name."""
    specs: dict[str, ShardingSpec] = {
        "rows": ChunkSpec(0, 4),
        "columns": ChunkSpec(1, 4),
        "rows permuted": ChunkSpec(0, (2, 0, 3, 1)),
        "a rank three times": ChunkSpec(1, (1, 0, 1, 3, 1)),
        "other ranks": ChunkSpec(0, (2, 3)),
        "one rank": GridSpec((1, 1), [[3]]),
        "ragged": MeshSpec(LINE, (Shard(0, sizes=(rows - rows // 2, 0, rows // 2, 0)),)),
        "grid": GridSpec((2, (columns // 4, 0, columns - columns // 4)), [[0, 1, 2], [3, 0, 1]]),
        "grid of replicas": GridSpec((2, 1), [[[0, 1]], [[3, 1]]]),
        "two boxes or none": _two_or_none(rows, columns),
        "replicated": MeshSpec(LINE, (Replicate(),)),
        "replicated columns": _square(Replicate(), Shard(1)),
        "groups": MeshSpec(LINE, (Shard(0, groups=(rows // 2, rows - rows // 2)),)),
        "cyclic": MeshSpec(LINE, (Shard(1, block=2),)),
        "rows twice": _square(Shard(0), Shard(0)),
        "rows twice, inside out": _square(Shard(0), Shard(0), order=("tp", "dp")),
        "sum": _square(Partial("sum"), Shard(0)),
        "avg": MeshSpec(LINE, (Partial("avg"),)),
        "max": _square(Shard(1), Partial("max")),
        "min": _square(Partial("min"), Replicate()),
        "product": _square(Partial("product"), Shard(1)),
    }
    return {name: spec.layout((rows, columns)) for name, spec in specs.items()}


def scalar_layouts() -> dict[str, Layout]:
    """Layouts of a 0-dim tensor over 4 ranks."""
    specs: dict[str, ShardingSpec] = {
        "replicated": MeshSpec(LINE, (Replicate(),)),
        "one rank": EnumerableSpec([Piece(Box((), ()), 2)]),
        "grid of replicas": GridSpec((), [3, 1]),
        "sum": MeshSpec(LINE, (Partial("sum"),)),
        "avg": _square(Partial("avg"), Replicate()),
        "max": _square(Replicate(), Partial("max")),
    }
    return {name: spec.layout(()) for name, spec in specs.items()}


def reducible(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether what the layout leaves pending is defined for a dtype."""
    pending = layout.pending
    if pending is None:
        return True
    if dtype.is_complex or dtype == torch.bool:
        return (pending.op in ("min", "max")) is (dtype == torch.bool)
    return pending.divisor == 1 or dtype.is_floating_point


def values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor filled by a function of the global index, in numbers that leave room for exact addends."""
    index = torch.arange(torch.Size(shape).numel()).reshape(tuple(shape))
    if dtype == torch.bool:
        return index.mul(7).remainder(3).eq(0)
    if dtype.is_complex:
        return torch.complex(index.float(), 1.0 - 3.0 * index).to(dtype)
    return index.remainder({FP8: 8, torch.bfloat16: 32}.get(dtype, 1 << 20)).to(dtype)


def _noise(whole: Tensor, addend: int) -> Tensor:
    index = torch.arange(whole.numel()).reshape(whole.shape)
    return index.mul(5).add(3 * addend).remainder(5).sub(2)


def _are_integers(whole: Tensor) -> bool:
    real = torch.view_as_real(whole) if whole.is_complex() else whole
    return torch.equal(real.to(torch.float64).round(), real.to(torch.float64))


def addend_of(layout: Layout, whole: Tensor, addend: int) -> Tensor:
    """One addend of a pending reduction: they reduce to `whole` exactly.

    Addends of integers differ in every element. Other values would be rounded: twice them, minus them, zeros.
    """
    pending = layout.pending
    if pending is None:
        return whole
    count = int(layout.table.addends.max()) + 1
    if whole.dtype == torch.bool:
        other = _noise(whole, addend).gt(0)
        if addend == 0:
            return whole
        return whole & other if pending.op == "max" else whole | other
    wide = whole.to(torch.complex128 if whole.is_complex() else torch.float64)
    if pending.op == "sum" and not _are_integers(whole):
        return whole * ((2, -1, 0)[min(addend, 2)] * pending.divisor if count > 1 else 1)
    if pending.op == "sum":
        noise = sum((_noise(whole, a) for a in range(1, count)), torch.zeros(whole.shape, dtype=torch.int64))
        mine = wide - noise if addend == 0 else _noise(whole, addend)
        return (mine * pending.divisor).to(whole.dtype)
    if pending.op == "product":
        signs = [_noise(whole, a).remainder(2).mul(2).sub(1) for a in range(1, count)]
        mine = wide * torch.stack(signs).prod(0) if addend == 0 else signs[addend - 1]
        return mine.to(whole.dtype)
    away = 0 if addend == 0 else _noise(whole, addend).abs()
    return (wide + away if pending.op == "min" else wide - away).to(whole.dtype)


def local_parts(layout: Layout, rank: int, whole: Tensor) -> list[Tensor]:
    """A rank's local tensors of a tensor that holds `whole`."""
    parts = [torch.empty(shape, dtype=whole.dtype) for shape in layout.local_shapes(rank)]
    for box, here, slot, addend in rows_of(layout, rank):
        value = addend_of(layout, whole, addend)[box.slices]
        for other in missing_addends(layout, box) if addend == 0 else ():  # the first one is theirs as well
            value = value + addend_of(layout, whole, other)[box.slices]
        parts[slot][here.slices] = value
    return parts


def missing_addends(layout: Layout, box: Box) -> list[int]:
    """The addends that a box has not: groups of one dim may have other numbers of copies."""
    table = layout.table
    here = ((table.offsets == box.offsets) & (table.sizes == box.sizes)).all(1)
    return sorted(set(table.addends.tolist()) - set(table.addends[here].tolist()))


def rows_of(layout: Layout, rank: int) -> list[tuple[Box, Box, int, int]]:
    """A rank's boxes: in the whole, in which local tensor and where, and of which addend."""
    own = layout.table.take(layout.rows_of(rank))
    columns = (own.offsets.tolist(), own.local_offsets.tolist(), own.sizes.tolist())
    found = zip(*columns, own.slots.tolist(), own.addends.tolist(), strict=True)
    return [(Box(tuple(o), tuple(n)), Box(tuple(h), tuple(n)), slot, addend) for o, h, n, slot, addend in found]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_holds(layout: Layout, held: Sequence[Sequence[Tensor]], whole: Tensor, what: str) -> None:
    """Fail unless the local tensors of all ranks hold exactly `whole` in this layout."""
    for rank, parts in enumerate(held):
        shapes = tuple(tuple(t.shape) for t in parts)
        assert shapes == layout.local_shapes(rank), f"{what}: rank {rank} holds shapes {shapes}"
        assert all(t.dtype == whole.dtype for t in parts), f"{what}: rank {rank} holds {[t.dtype for t in parts]}"
    if layout.pending is not None:
        assert same_bytes(_reduced(layout, held, whole), whole), f"{what}: the addends do not reduce to the values"
        return
    for rank, parts in enumerate(held):
        for box, here, slot, _ in rows_of(layout, rank):
            assert same_bytes(parts[slot][here.slices], whole[box.slices]), f"{what}: rank {rank} is wrong in {box}"


def _reduced(layout: Layout, held: Sequence[Sequence[Tensor]], whole: Tensor) -> Tensor:
    assert layout.pending is not None
    wide = torch.complex128 if whole.is_complex() else torch.float64
    count = int(layout.table.addends.max(initial=0)) + 1
    addends = torch.full((count, *whole.shape), float("nan"), dtype=wide)
    for rank, parts in enumerate(held):
        for box, here, slot, addend in rows_of(layout, rank):
            addends[addend][box.slices] = parts[slot][here.slices].to(wide)
            for other in missing_addends(layout, box):
                addends[other][box.slices] = 0
    if layout.pending.op == "sum":
        return (addends.sum(0) / layout.pending.divisor).to(whole.dtype)
    if layout.pending.op == "product":
        return addends.prod(0).to(whole.dtype)
    return (addends.amin(0) if layout.pending.op == "min" else addends.amax(0)).to(whole.dtype)


class CountingComm(LocalComm):
    """A comm of threads that notes, for each exchange, its label and the bytes this rank has in flight.

    Moves are exchanges as between processes: no rank makes them for all.
    """

    capabilities = Capabilities()  # type: ignore[assignment]  # of the class instead of an instance

    def __init__(self, comm: Comm) -> None:
        assert isinstance(comm, LocalComm)
        super().__init__(comm.rank, comm._hub, device=comm.device, timeout=comm.timeout)
        self.exchanges: list[tuple[str, int]] = []

    def exchange(
        self, sends: TensorsByRank, receives: TensorsByRank, *, label: str, combine: Combine | None = None, **more: Any
    ) -> Work:
        """Note the exchange, then do it."""
        if combine is None:
            self._note(sends, receives, label)
            return super().exchange(sends, receives, label=label, **more)
        at = len(self.exchanges)
        self._note(sends, {}, label)

        def note_and_combine(arrived: TensorsByRank) -> None:  # what arrives is counted when it is known
            self._note(sends, arrived, label)
            self.exchanges[at] = self.exchanges.pop()
            combine(arrived)

        return super().exchange(sends, receives, label=label, combine=note_and_combine, **more)

    def _note(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], label: str
    ) -> None:
        between = [(peer, edges) for edges in (sends, receives) for peer in edges if peer != self.rank]
        tensors = [t for peer, edges in between for t in edges[peer]]
        self.exchanges.append((label, sum(t.numel() * t.itemsize for t in tensors)))


class CountingPool(StagingPool):
    """A pool that notes the most bytes of buffers that each rank, a thread, has at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()
        self.most = 0
        self.sizes: dict[int, int] = {}

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer, thread = super().take(count, dtype, device), threading.get_ident()
        self.sizes[buffer.data_ptr()] = count * dtype.itemsize
        self.held[thread] += count * dtype.itemsize
        self.most = max(self.most, self.held[thread])
        return buffer

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self.held[threading.get_ident()] -= self.sizes[buffer.data_ptr()]
        super().give_back(buffers)


class LendingCountingComm(CountingComm):
    """The same where ranks read each other's tensors in place, as threads on a GPU do."""

    capabilities = Capabilities(reads_peers=True)  # type: ignore[assignment]  # of the class


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the ValueError or TypeError that a call raises, with its type; so that every rank reports its own."""
    try:
        call(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
