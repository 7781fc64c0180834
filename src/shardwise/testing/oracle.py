"""What must every rank hold? Layouts applied to NumPy arrays, all ranks in one process: a yardstick for real code.

1. `global_values` fills a tensor by a function of the global index, so that a misplaced element is seen.
2. `scatter` cuts it into every rank's local arrays; where a reduction is pending, into addends that reduce to it.
3. `assemble` reads local arrays back into one array, and objects if two replicas differ.
4. `simulate` carries a transfer out, move by move, as an executor on real ranks does.

All small layouts of a shape, so that tests try every one of them instead of a few at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.placements import Partial, Placement, Reduction, Replicate, Shard
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec
from shardwise.transfer.senders import Step
from shardwise.transfer.transfer import Transfer

Array: TypeAlias = npt.NDArray[Any]
Locals: TypeAlias = dict[int, list[Array]]
Arrival: TypeAlias = tuple[int, int, Box, Array]

REDUCERS: dict[str, np.ufunc] = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


def global_values(shape: Sequence[int], dtype: npt.DTypeLike = np.int64) -> Array:
    """An array whose values 1, 2, 3... show where each element belongs; they start again where the dtype runs out.

    Of booleans every third is true.

    >>> global_values((2, 3))
    array([[1, 2, 3],
           [4, 5, 6]])
    """
    index = np.arange(np.prod(shape, dtype=np.int64)).reshape(tuple(shape))
    if np.dtype(dtype).kind == "b":
        return np.asarray(index % 3 == 0)
    return np.asarray(index % _count_exact_numbers(np.dtype(dtype)) + 1).astype(dtype)


def _count_exact_numbers(dtype: np.dtype[Any]) -> int:
    """How many of the numbers 1, 2, 3... a dtype holds exactly."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max)
    return int(2 ** (np.finfo(dtype).nmant + 1))


def scatter(layout: Layout, values: Array, seed: int = 0) -> Locals:
    """Every rank's local arrays of a tensor that holds `values`.

    A pending reduction gets random integer addends that reduce to the values without rounding, those of an average
    multiples of its divisor; the dtype has to hold negative numbers then.

    >>> from shardwise.geometry import ChunkSpec
    >>> scatter(ChunkSpec(0, ranks=2).layout((3,)), global_values((3,)))
    {0: [array([1, 2])], 1: [array([3])]}
    """
    assert values.shape == layout.shape, f"values of shape {values.shape} for a layout of shape {layout.shape}"
    addends = _addends(layout, values, np.random.default_rng(seed))
    local = allocate(layout, values.dtype)
    for row in _rows(layout):
        local[row.rank][row.slot][row.here.slices] = addends[row.addend][row.box.slices]
    return local


def allocate(layout: Layout, dtype: npt.DTypeLike) -> Locals:
    """Every rank's local arrays, filled with zeros.

    >>> from shardwise.geometry import ChunkSpec
    >>> allocate(ChunkSpec(0, ranks=2).layout((3,)), np.int64)
    {0: [array([0, 0])], 1: [array([0])]}
    """
    return {rank: [np.zeros(s, dtype) for s in layout.local_shapes(rank)] for rank in layout.ranks}


def assemble(layout: Layout, local: Mapping[int, Sequence[Array]]) -> Array:
    """The tensor that local arrays make up; fails when shapes are wrong or replicas differ. Reduces what is pending.

    >>> from shardwise.geometry import ChunkSpec
    >>> assemble(ChunkSpec(0, ranks=(1, 0)).layout((3,)), {0: [np.array([3])], 1: [np.array([1, 2])]})
    array([1, 2, 3])
    """
    _check_shapes(layout, local)
    dtype = next((array.dtype for arrays in local.values() for array in arrays), np.dtype(np.int64))
    addends = np.zeros((_addend_count(layout), *layout.shape), dtype)
    holder = np.full(addends.shape, -1, np.int64)
    for row in _rows(layout):
        mine = local[row.rank][row.slot][row.here.slices]
        place: tuple[int | slice, ...] = (row.addend, *row.box.slices)
        before = holder[place]
        differs = (before >= 0) & (addends[place] != mine)
        if differs.any():
            raise AssertionError(f"replicas differ: ranks {int(before[differs].min())} and {row.rank} in {row.box}")
        addends[place], holder[place] = mine, row.rank
    assert ((holder >= 0) == _held_addends(layout)).all() and (holder[0] >= 0).all(), "elements are uncovered"
    return reduce_addends(addends, layout.pending)


def reduce_addends(addends: Array, pending: Reduction | None) -> Array:
    """The reduction over the first dim, first to last.

    >>> reduce_addends(np.array([[1, 2], [5, 4]]), Reduction("sum", divisor=2))
    array([3, 3])
    """
    if pending is None:
        return np.asarray(addends[0])
    return divide(REDUCERS[pending.op].reduce(addends, axis=0), pending.divisor)


def divide(total: Array, divisor: int) -> Array:
    """An exact division that keeps the dtype."""
    return np.asarray(total if divisor == 1 else (total / divisor).astype(total.dtype))


def simulate(transfer: Transfer, local: Mapping[int, Sequence[Array]]) -> Locals:
    """The local arrays of every rank after a transfer, from those before it; the plan has to be that of all ranks.

    Fails when a box is written twice without a reduction, when an element is never written, or when the two sides of an
    exchange do not fit.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.transfer import plan_transfer
    >>> there, here = ChunkSpec(0, ranks=2).layout((2, 2)), ChunkSpec(1, ranks=2).layout((2, 2))
    >>> simulate(plan_transfer(there, here, itemsize=8), scatter(there, global_values((2, 2))))[0]
    [array([[1],
           [3]])]
    """
    assert transfer.rank is None, f"this plan is the part of rank {transfer.rank} only"
    _check_shapes(transfer.src, local)
    dtype = next((array.dtype for arrays in local.values() for array in arrays), np.dtype(np.int64))
    held: Mapping[int, Sequence[Array]] = local
    written: Locals = {}
    for step in transfer.steps:
        if not step.in_place:
            _check_written(written)
            written = allocate(step.dst, np.dtype(bool))
        held = _run_step(step, held, written, dtype)
    _check_written(written)
    return {rank: list(arrays) for rank, arrays in held.items()}


def _check_written(written: Locals) -> None:
    for rank, arrays in written.items():
        assert all(done.all() for done in arrays), f"rank {rank}: some elements are never written"


def _run_step(step: Step, local: Mapping[int, Sequence[Array]], written: Locals, dtype: np.dtype[Any]) -> Locals:
    """The arrays after a step; `written` says of what, and a step that passes on sends only what has been written."""
    ranks = sorted({*step.src.ranks, *step.dst.ranks})
    if step.in_place:
        for sent in _exchange(step, ranks, written).values():
            assert all(data.all() for *_, data in sent), "something is passed on that has not arrived"
    arrived = _exchange(step, ranks, local)
    result = {r: [a.copy() for a in local[r]] for r in step.dst.ranks} if step.in_place else allocate(step.dst, dtype)
    for rank in step.dst.ranks:
        for copy in step.copies_of(rank):
            data = local[rank][copy.src_slot][copy.src_box.slices]
            arrived[rank].append((copy.term, copy.dst_slot, copy.dst_box, data))
        _combine(step, rank, arrived[rank], result[rank], written[rank])
    return result


def _exchange(step: Step, ranks: Sequence[int], local: Mapping[int, Sequence[Array]]) -> dict[int, list[Arrival]]:
    """Round by round, the messages of each pair of ranks; the receiver's side of the plan says what arrives."""
    sends = {rank: step.sends_of(rank) for rank in ranks}
    receives = {rank: step.receives_of(rank) for rank in ranks}
    arrived: dict[int, list[Arrival]] = {rank: [] for rank in ranks}
    for number in range(step.rounds):
        wire: dict[tuple[int, int], list[Array]] = {}
        for rank in ranks:
            for move in (m for m in sends[rank] if m.round == number):
                wire.setdefault((rank, move.peer), []).append(local[rank][move.slot][move.box.slices].copy())
        for rank in ranks:
            for move in (m for m in receives[rank] if m.round == number):
                data = wire[move.peer, rank].pop(0)
                assert data.shape == move.box.sizes, f"{move.peer} sends {data.shape}, {rank} expects {move.box}"
                arrived[rank].append((move.term, move.slot, move.box, data))
        assert not any(wire.values()), f"round {number}: sent and not received: {[k for k, v in wire.items() if v]}"
    return arrived


def _combine(step: Step, rank: int, arrived: list[Arrival], result: list[Array], written: list[Array]) -> None:
    """Write what a rank got into its destination arrays: terms in ascending order, then fills, then the scale."""
    for _, slot, box, data in sorted(arrived, key=lambda arrival: arrival[0]):
        again, place = written[slot][box.slices], result[slot][box.slices]
        assert step.op is not None or not again.any(), f"rank {rank}: {box} of array {slot} is written twice"
        combined = data if step.op is None else np.where(again, REDUCERS[step.op](place, data), data)
        result[slot][box.slices], written[slot][box.slices] = combined, True
    for slot, box in step.fills_of(rank):
        assert step.op is not None and not written[slot][box.slices].any(), f"rank {rank}: fill over values in {box}"
        result[slot][box.slices], written[slot][box.slices] = identity(step.op, result[slot].dtype), True
    for slot, array in enumerate(result):
        result[slot] = divide(array * step.scale[0], step.scale[1]).astype(array.dtype)


def identity(op: str, dtype: np.dtype[Any]) -> Any:
    """The value that changes nothing when it is combined.

    >>> identity("product", np.dtype(np.int8)), identity("min", np.dtype(np.int8))
    (1, 127)
    """
    if op in ("sum", "product"):
        return 0 if op == "sum" else 1
    if dtype.kind == "f":
        return np.inf if op == "min" else -np.inf
    return int(np.iinfo(dtype).max if op == "min" else np.iinfo(dtype).min)


def _check_shapes(layout: Layout, local: Mapping[int, Sequence[Array]]) -> None:
    for rank in sorted({*layout.ranks, *local}):
        held = tuple(array.shape for array in local.get(rank, ()))
        if held != layout.local_shapes(rank):
            wanted = layout.local_shapes(rank)
            raise AssertionError(f"rank {rank} has arrays of shapes {held}; the layout assigns it {wanted}")


class _Row:
    """One row of a layout's table: a box, and where it is in which local array of which rank."""

    __slots__ = ("addend", "box", "here", "rank", "slot")

    def __init__(self, layout: Layout, row: int) -> None:
        table = layout.table
        sizes = tuple(table.sizes[row].tolist())
        self.box = Box(tuple(table.offsets[row].tolist()), sizes)
        self.here = Box(tuple(table.local_offsets[row].tolist()), sizes)
        self.rank, self.slot = int(table.ranks[row]), int(table.slots[row])
        self.addend = int(table.addends[row])


def _rows(layout: Layout) -> list[_Row]:
    return [_Row(layout, row) for row in range(len(layout.table))]


def _addend_count(layout: Layout) -> int:
    return int(layout.table.addends.max(initial=0)) + 1


def _held_addends(layout: Layout) -> Array:
    """For each addend which elements have it: where copies are addends, there are as many as copies."""
    held = np.zeros((_addend_count(layout), *layout.shape), bool)
    for row in _rows(layout):
        held[row.addend, ...][row.box.slices] = True
    return held


def _addends(layout: Layout, values: Array, random: np.random.Generator) -> Array:
    """For each addend one array of the global shape; together they reduce to the values."""
    count = _addend_count(layout)
    if layout.pending is None:
        return np.stack([values] * count)
    op, shape, held = layout.pending.op, (count, *values.shape), _held_addends(layout)
    turn = random.integers(count, size=values.shape) % np.maximum(held.sum(axis=0), 1)
    chosen = held & (np.cumsum(held, axis=0) - 1 == turn)
    if op == "sum":
        noise = np.where(chosen | ~held, 0, random.integers(-9, 10, size=shape)).astype(values.dtype)
        rest = (values - noise.sum(axis=0)).astype(values.dtype)
        return (np.where(chosen, rest, noise) * layout.pending.divisor).astype(values.dtype)
    if op == "product":
        signs = np.where(chosen, 1, random.choice([-1, 1], size=shape)).astype(values.dtype)
        return np.where(chosen, values * signs.prod(axis=0), signs).astype(values.dtype)
    away = random.integers(0, 10, size=shape).astype(values.dtype)
    return np.where(chosen, values, values + away if op == "min" else values - away)


def small_layouts(shape: Sequence[int], ranks: int, pending: bool = True) -> list[Layout]:
    """Every chunk, ragged, grouped, cyclic, replicated, pending, grid and T-shaped layout of a small shape, each once.

    Layouts that mean the same are listed once, whatever spec they come from.

    >>> len(small_layouts((2,), ranks=1)), len(small_layouts((2,), ranks=2))
    (2, 18)
    """
    shape = tuple(shape)
    sources = [
        _chunks(shape, ranks),
        _meshes(shape, ranks, pending),
        _grids(shape, ranks),
        _t_shaped_layouts(shape, ranks),
    ]
    found = {spec.layout(shape): None for specs in sources for spec in specs}
    return list(found)


def _chunks(shape: tuple[int, ...], ranks: int) -> Iterator[ShardingSpec]:
    for dim in range(len(shape)):
        for count in range(1, ranks + 1):
            for chosen in product(range(ranks), repeat=count):
                yield ChunkSpec(dim, chosen)


def _meshes(shape: tuple[int, ...], ranks: int, pending: bool) -> Iterator[ShardingSpec]:
    for count in range(1, ranks + 1):
        for chosen in permutations(range(ranks), count):
            mesh = Mesh(("a",), chosen)
            for placement in _placements(shape, count, pending):
                yield MeshSpec(mesh, (placement,))
    if ranks >= 4:
        for first, second in product(_placements(shape, 2, pending, plain=True), repeat=2):
            for order in (("a", "b"), ("b", "a")):
                yield MeshSpec(Mesh.of(a=2, b=2), (first, second), order)


def _placements(shape: tuple[int, ...], count: int, pending: bool, plain: bool = False) -> Iterator[Placement]:
    yield Replicate()
    if pending:
        yield Partial("sum")
    for dim, length in enumerate(shape):
        yield Shard(dim)
        if plain:
            continue
        yield Shard(dim, block=1)
        for first in range(1, length) if count == 2 else ():
            copies = Shard(dim, groups=(first, length - first), each=(1, 2))
            yield from (copies, copies.dual)[: 1 + pending]
        yield from (Shard(dim, groups=sizes) for sizes in _sizes(length, 2))
        yield from (Shard(dim, sizes=sizes) for sizes in _sizes(length, count))


def _sizes(length: int, count: int) -> Iterator[tuple[int, ...]]:
    """All splits of a length into `count` parts, including empty ones."""
    if count == 1:
        yield (length,)
        return
    for first in range(length + 1):
        yield from ((first, *rest) for rest in _sizes(length - first, count - 1))


def _grids(shape: tuple[int, ...], ranks: int) -> Iterator[ShardingSpec]:
    """Each dim whole or halved, every choice of owners."""
    for counts in product(*[(1, 2) if length > 1 else (1,) for length in shape]):
        cells = int(np.prod(counts, dtype=np.int64))
        for owners in product(range(ranks), repeat=cells):
            yield GridSpec(counts, np.array(owners).reshape((*counts, 1)))


def _t_shaped_layouts(shape: tuple[int, ...], ranks: int) -> Iterator[ShardingSpec]:
    """One cut right through, and one cut of the second part only: no grid explains it."""
    if len(shape) < 2 or min(shape[:2]) < 2:
        return
    rest = shape[2:]
    zeros = (0,) * len(rest)
    boxes = (
        Box((0, 0, *zeros), (1, shape[1], *rest)),
        Box((1, 0, *zeros), (shape[0] - 1, 1, *rest)),
        Box((1, 1, *zeros), (shape[0] - 1, shape[1] - 1, *rest)),
    )
    for owners in product(range(ranks), repeat=3):
        yield EnumerableSpec([Piece(box, rank) for box, rank in zip(boxes, owners, strict=True)])
