"""Coverage against counting: for thousands of small random box sets, the verdict and the region named are right."""

import re

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from shardwise.geometry import Box, LayoutError
from shardwise.geometry.layout import Layout, check_coverage, first_miscovered_point
from shardwise.testing import strategies as sw

Ints = npt.NDArray[np.int64]


def counts(shape: tuple[int, ...], offsets: Ints, sizes: Ints) -> Ints:
    """How many boxes hold each element."""
    total = np.zeros(shape, np.int64)
    for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
        total[Box(tuple(offset), tuple(size)).slices] += 1
    return total


def guillotine(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """An exact tiling by random cuts, empty boxes among them."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(random.integers(0, 6) if shape else 0):
        offset, size = boxes.pop(random.integers(len(boxes)))
        dim = random.integers(len(shape))
        at = int(random.integers(size[dim] + 1))
        step = tuple(at if d == dim else 0 for d in range(len(shape)))
        boxes.append((offset, tuple(at if d == dim else s for d, s in enumerate(size))))
        boxes.append(
            (
                tuple(o + a for o, a in zip(offset, step, strict=True)),
                tuple(s - a for s, a in zip(size, step, strict=True)),
            )
        )
    random.shuffle(boxes)
    size_of = (len(boxes), len(shape))
    return np.array([b[0] for b in boxes], np.int64).reshape(size_of), np.array(
        [b[1] for b in boxes], np.int64
    ).reshape(size_of)


def disturbed(random: np.random.Generator, shape: tuple[int, ...], offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """The same boxes with one left out, doubled, shrunk or moved; sometimes that changes nothing."""
    row, offsets, sizes = random.integers(len(offsets)), offsets.copy(), sizes.copy()
    kind = random.integers(4)
    if kind == 0:
        return np.delete(offsets, row, axis=0), np.delete(sizes, row, axis=0)
    if kind == 1:
        return np.concatenate([offsets, offsets[row : row + 1]]), np.concatenate([sizes, sizes[row : row + 1]])
    if shape:
        dim = random.integers(len(shape))
        if kind == 2:
            sizes[row, dim] = max(0, sizes[row, dim] - 1)
        else:
            offsets[row, dim] = random.integers(shape[dim] - sizes[row, dim] + 1)
    return offsets, sizes


def random_cases(count: int) -> list[tuple[tuple[int, ...], Ints, Ints]]:
    random = np.random.default_rng(7)
    cases = []
    for number in range(count):
        shape = tuple(int(n) for n in random.integers(0, 5, size=random.integers(0, 4)))
        offsets, sizes = guillotine(random, shape)
        if number % 4:
            offsets, sizes = disturbed(random, shape, offsets, sizes)
        cases.append((shape, offsets, sizes))
    return cases


def test_verdict_and_first_point_match_counting() -> None:
    exact = 0
    for shape, offsets, sizes in random_cases(4000):
        wrong = np.argwhere(counts(shape, offsets, sizes) != 1)
        point = first_miscovered_point(shape, offsets, sizes)
        exact += len(wrong) == 0
        if len(wrong) == 0:
            assert point is None, (shape, offsets, sizes)
        else:
            assert point is not None, (shape, offsets, sizes)
            assert point.tolist() == wrong[0].tolist(), (shape, offsets, sizes)
    assert 1000 < exact < 3000


def parse_box(text: str) -> Box:
    ends = [tuple(map(int, part.split(":"))) for part in text.strip("[]").split(", ") if part]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def test_named_region_is_right() -> None:
    seen = {"overlap": 0, "gap": 0}
    for shape, offsets, sizes in random_cases(3000):
        total = counts(shape, offsets, sizes)
        if (total == 1).all():
            check_coverage(shape, offsets, sizes, str)
            continue
        with pytest.raises(LayoutError) as caught:
            check_coverage(shape, offsets, sizes, lambda row: f"piece {row}")
        text = str(caught.value)
        region = parse_box(re.findall(r"\[[0-9:, ]*\]", text)[0])
        if "overlap" in text:
            seen["overlap"] += 1
            first, second = (int(n) for n in re.findall(r"piece (\d+)", text))
            boxes = [Box(tuple(offsets[i].tolist()), tuple(sizes[i].tolist())) for i in (first, second)]
            assert boxes[0].intersect(boxes[1]) == region
            assert (total[region.slices] > 1).all()
        else:
            seen["gap"] += 1
            assert region.numel > 0
            assert (total[region.slices] == 0).all(), (shape, offsets, sizes, text)
    assert min(seen.values()) > 200, seen


def test_gap_is_grown_as_far_as_it_goes() -> None:
    offsets, sizes = np.array([[0, 0], [0, 2]]), np.array([[1, 2], [4, 2]])
    with pytest.raises(LayoutError, match=r"^no piece covers \[1:4, 0:2\] of a tensor of shape \(4, 4\)"):
        check_coverage((4, 4), offsets, sizes, str)


def onion(ndim: int, length: int) -> tuple[Ints, Ints]:
    """Slabs of thickness 1 cut off one dim after the other: many distinct edges in every dim from few boxes."""
    low, rows = [0] * ndim, []
    for _ in range(length - 1):
        for dim in range(ndim):
            size = [length - o for o in low]
            size[dim] = 1
            rows.append((list(low), size))
            low[dim] += 1
    rows.append((list(low), [1] * ndim))
    return np.array([r[0] for r in rows]), np.array([r[1] for r in rows])


def test_many_distinct_edges_in_many_dims() -> None:
    """300 edges in each of 8 dims: a row-major corner number does not fit in an int64."""
    ndim, length = 8, 300
    shape = (length,) * ndim
    offsets, sizes = onion(ndim, length)
    assert first_miscovered_point(shape, offsets, sizes) is None
    last = first_miscovered_point(shape, offsets[:-1], sizes[:-1])
    assert last is not None
    assert last.tolist() == [length - 1] * ndim
    first = first_miscovered_point(shape, offsets[1:], sizes[1:])
    assert first is not None
    assert first.tolist() == [0] * ndim


def test_hundred_thousand_pieces() -> None:
    index = np.stack(np.unravel_index(np.arange(100_000), (500, 200)), axis=1)
    offsets, sizes = index * (3, 5), np.broadcast_to(np.array([3, 5]), index.shape)
    check_coverage((1500, 1000), offsets, sizes, str)
    with pytest.raises(LayoutError, match=r"^no piece covers \[741:744, 380:385\] "):
        kept = np.arange(100_000) != 247 * 200 + 76
        check_coverage((1500, 1000), offsets[kept], sizes[kept], str)


@settings(max_examples=300)
@given(layout=sw.layouts(ranks=5, pending=True))
def test_pieces_of_each_copy_cover_without_overlap(layout: Layout) -> None:
    """Counted element by element: every addend of every cell is held by the same number of ranks, each element once."""
    table = layout.table
    for addend in range(int(table.addends.max(initial=0)) + 1):
        rows = np.flatnonzero(table.addends == addend)
        _, first = np.unique(table.cells[rows], return_index=True)
        assert (counts(layout.shape, table.offsets[rows[first]], table.sizes[rows[first]]) == 1).all()
    for rank in layout.ranks:
        own = table.take(layout.rows_of(rank))
        assert (counts(layout.shape, own.offsets, own.sizes) <= 1).all()
