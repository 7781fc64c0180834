"""Random values are a function of seed, shape and index: every box, layout and world gives the same ones."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
import shardwise.tensor.random as drawing
from shardwise.comm import Comm, DisagreementError, run_local
from shardwise.geometry import Box, ChunkSpec, Layout, LayoutError, Mesh, MeshSpec, Partial, Replicate
from shardwise.tensor.random import (
    Distribution,
    NumberSource,
    Stream,
    Tiling,
    bernoulli,
    check_not_pending,
    fill_box,
    fill_locals,
    integers,
    manual_seed,
    next_stream,
    normal,
    truncated_normal,
    uniform,
    unit_of,
)
from shardwise.testing import small_layouts
from shardwise.testing.strategies import layouts

KINDS: dict[str, tuple[Distribution, torch.dtype]] = {
    "uniform": (uniform(-1, 3, torch.float32), torch.float32),
    "uniform64": (uniform(0, 1, torch.float64), torch.float64),
    "normal": (normal(2, 0.5, torch.float32), torch.float32),
    "normal64": (normal(0, 1, torch.float64), torch.float64),
    "bfloat16": (normal(0, 1, torch.bfloat16), torch.bfloat16),
    "complex": (normal(0, 1, torch.complex64), torch.complex64),
    "truncated": (truncated_normal(0, 1, -2, 2, torch.float32), torch.float32),
    "bernoulli": (bernoulli(0.5), torch.bool),
    "integers": (integers(0, 1000, torch.int64), torch.int64),
}
SEVEN = Stream(7)
SHAPES = [(), (0,), (5,), (1000,), (3, 7), (0, 4), (40, 300), (300, 33), (3, 4, 5), (2, 3, 3, 3), (5, 6, 200)]


def drawn(kind: str, shape: tuple[int, ...], box: Box | None = None, stream: Stream = SEVEN) -> torch.Tensor:
    values, dtype = KINDS[kind]
    box = Box.whole(shape) if box is None else box
    target = torch.empty(box.sizes, dtype=dtype)
    fill_box(target, shape, box, stream, values)
    return target


def boxes(shape: tuple[int, ...]) -> list[Box]:
    """Boxes with every combination of a few spans in each dim."""
    spans = [sorted({(0, n), (0, n // 2), (n // 2, n), (n // 3, n // 3 + 1), (n // 3, n - n // 4)}) for n in shape]
    picked = [[(a, b) for a, b in span if a < b <= n] for span, n in zip(spans, shape, strict=True)]
    return [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in itertools.product(*picked)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_gets_the_values_of_the_whole_tensor(kind: str) -> None:
    for shape in SHAPES:
        whole = drawn(kind, shape)
        for box in boxes(shape):
            assert torch.equal(drawn(kind, shape, box), whole[box.slices]), (shape, box)


def test_small_batches_and_tensors_on_other_devices_get_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (300, 500)
    whole = drawn("normal", shape)
    monkeypatch.setattr(drawing, "BATCH_ELEMENTS", 1 << 10)
    assert torch.equal(drawn("normal", shape), whole)
    monkeypatch.setattr(drawing, "STAGED_ELEMENTS", 7000)
    target = torch.empty(shape)
    drawing._fill_staged(target, shape, Box.whole(shape), Stream(7), KINDS["normal"][0])
    assert torch.equal(target, whole)


def check_layout(layout: Layout, stream: Stream = SEVEN) -> None:
    """Every rank's local tensors hold its boxes of the whole."""
    whole = drawn("normal", layout.shape, stream=stream)
    for rank in layout.ranks:
        locals_ = [torch.full(shape, math.nan) for shape in layout.local_shapes(rank)]
        fill_locals(layout, rank, locals_, stream, KINDS["normal"][0])
        own = layout.table.take(layout.rows_of(rank))
        for slot, at, sizes, piece in zip(own.slots, own.local_offsets, own.sizes, own.pieces(), strict=True):
            inside = Box(tuple(at.tolist()), tuple(sizes.tolist()))
            assert torch.equal(locals_[slot][inside.slices], whole[piece.box.slices])
        assert not any(torch.isnan(local).any() for local in locals_)


@pytest.mark.parametrize("shape", [(), (4,), (0, 3), (3, 2)])
def test_every_small_layout_holds_the_same_tensor(shape: tuple[int, ...]) -> None:
    for layout in small_layouts(shape, ranks=2, pending=False):
        check_layout(layout)


@settings(max_examples=60)
@given(data=st.data())
def test_random_layouts_hold_the_same_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(7, 140), (150, 3), (5, 4, 9), (260,)]))
    layout = data.draw(layouts(shape=shape, ranks=4))
    if layout.pending is None:
        check_layout(layout)


def test_values_do_not_change_between_versions() -> None:
    first = drawn("uniform64", (3, 4), stream=Stream(42, 1))[0]
    assert (first * 2**24).floor().tolist() == [11493119, 4854089, 10115063, 6559557]
    target = torch.empty(3, 4)
    fill_box(target, (3, 4), Box.whole((3, 4)), Stream(42, 1), uniform(0, 1, torch.float32))
    assert (target[0] * 2**24).tolist() == [8727412, 2520870, 4446412, 2116773]
    assert drawn("integers", (3, 4), stream=Stream(42, 1))[0].tolist() == [955, 668, 852, 165]
    fill_box(target, (3, 4), Box.whole((3, 4)), Stream(42, 1), normal(0, 1, torch.float32))
    torch.testing.assert_close(target[0], torch.tensor([0.99471194, 1.8978713, -1.4164501, 1.5431514]))


def test_seeds_counts_shapes_and_elements_differ() -> None:
    streams = [Stream(0), Stream(1), Stream(1 << 32), Stream(0, 1), Stream(0, 1 << 32)]
    tensors = [drawn("uniform64", (64, 300), stream=s) for s in streams]
    assert len(torch.cat(tensors).unique()) == len(streams) * 64 * 300


def test_uniform_numbers_are_uniform() -> None:
    x = drawn("uniform", (500, 200)).double()
    assert x.min() >= -1 and x.max() < 3
    assert abs(x.mean() - 1) < 0.02 and abs(x.std() - 4 / math.sqrt(12)) < 0.02
    counts = torch.histc(x, bins=16, min=-1, max=3)
    assert ((counts - 6250) ** 2 / 6250).sum() < 50


def test_normal_numbers_are_normal_and_independent() -> None:
    x = (drawn("normal", (400, 256)).double() - 2) / 0.5
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
    assert abs((x**3).mean()) < 0.05 and abs((x**4).mean() - 3) < 0.1
    for other in (x.roll(1, 0), x.roll(1, 1), x.roll(16, 1), x.roll(128, 1)):
        assert abs((x * other).mean()) < 0.02
        assert abs((x**2 * other**2).mean() - 1) < 0.05


def test_other_distributions() -> None:
    assert abs(drawn("bernoulli", (100, 300)).double().mean() - 0.5) < 0.02
    whole = drawn("integers", (100, 300))
    assert whole.min() == 0 and whole.max() == 999 and abs(whole.double().mean() - 499.5) < 5
    z = drawn("complex", (100, 300))
    assert abs(z.abs().square().mean() - 1) < 0.03 and abs(z.real.mean()) < 0.02
    t = drawn("truncated", (100, 300))
    assert t.min() >= -2 and t.max() <= 2 and abs(t.mean()) < 0.02 and abs(t.std() - 0.8796) < 0.02


@pytest.mark.parametrize(("low", "high"), [(6.0, 8.0), (-8.0, -6.0), (-0.1, 0.1), (-50.0, 50.0), (3.0, 3.0)])
def test_truncated_normal_keeps_its_bounds_far_out(low: float, high: float) -> None:
    numbers = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
    values = truncated_normal(0, 1, low, high, torch.float64).compute(
        numbers, torch.empty(2, 1000, dtype=torch.float64, device="cpu")
    )
    assert low <= values.min() and values.max() <= high
    if low == 6.0:
        assert abs(values.mean() - 6.158) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 0.0), (-3.0, -1.0), (100.0, 100.5), (2.0, 2.0)])
def test_uniform_numbers_stay_below_the_upper_bound(dtype: torch.dtype, low: float, high: float) -> None:
    source = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = torch.tensor([0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))], dtype=source)
    values = uniform(low, high, dtype).compute(numbers, torch.empty(2, 3, dtype=source)).to(dtype)
    assert low <= values.min() and (values.max() < high or low == high)


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "factor"),
    [
        ((4096, 4096), (1024, 0), (1024, 4096), 1.0),
        ((4096, 4096), (0, 1024), (4096, 1024), 1.0),
        ((4096, 4096), (2048, 2048), (2048, 2048), 1.0),
        ((4096, 4096), (0, 1000), (4096, 1000), 1.16),
        ((4096, 4096), (0, 64), (4096, 64), 2.0),
        ((512, 512, 3, 3), (0, 128, 0, 0), (512, 128, 3, 3), 1.34),
        ((1 << 22,), (1000,), (1 << 20,), 1.001),
    ],
)
def test_little_more_is_drawn_than_is_held(
    monkeypatch: pytest.MonkeyPatch, shape: Any, offsets: Any, sizes: Any, factor: float
) -> None:
    counted = []
    monkeypatch.setattr(NumberSource, "draw", lambda self, ribbon, position, out: counted.append(len(out)))
    monkeypatch.setattr(drawing.BatchBuffers, "values", lambda self, count: torch.zeros(count))
    fill_box(torch.empty(sizes), shape, Box(offsets, sizes), Stream(0), uniform(0, 1, torch.float32))
    assert math.prod(sizes) <= sum(counted) <= math.prod(sizes) * factor


def test_tiles_and_units_follow_from_the_shape() -> None:
    assert Tiling.of((32, 32, 512, 128)).edges == (4, 4, 32)
    assert Tiling.of(()).edges == () and Tiling.of((0, 0)).edges == (1,)
    for row in range(1, 400):
        rows, width = unit_of(row)
        assert width % 32 == 0 and rows * row <= width < rows * row + 32


# Streams


def asked(comm: Comm, generator: torch.Generator | None = None, **fields: Any) -> Stream:
    return next_stream(comm, fields=fields, label="test", generator=generator)


def test_streams_count_up_and_the_first_rank_decides() -> None:
    def body(comm: Comm) -> list[Stream]:
        generator = torch.Generator().manual_seed(10 + comm.rank)
        torch.manual_seed(20 + comm.rank)
        return [*(asked(comm, generator) for _ in range(3)), *(asked(comm) for _ in range(3))]

    first, *others = run_local(body, 3, timeout=60)
    assert others == [first] * 2
    assert first[0] == Stream(10) and len(set(first)) == 6
    assert [stream.count for stream in first[3:]] == [0, 1, 2]


def test_the_state_of_a_generator_names_its_stream() -> None:
    """Also of one that another Python object stands for, as operators get it, and in another process."""

    def body(comm: Comm) -> None:
        generator = torch.Generator().manual_seed(3)
        first = asked(comm, generator)
        state = generator.get_state()
        second, third = asked(comm, generator), asked(comm, generator)
        again = torch.Generator().manual_seed(99)
        again.set_state(state)
        assert len({first, second, third}) == 3 and [asked(comm, again), asked(comm, again)] == [second, third]

    run_local(body, 2, timeout=60)


INVERSES: dict[str, tuple[tuple[float, ...], float]] = {  # arguments, and a quarter of the values is below
    "exponential_": ((2.0,), math.log(4 / 3) / 2),
    "cauchy_": ((1.0, 2.0), -1.0),
    "log_normal_": ((0.5, 1.0), math.exp(0.5 - 0.67449)),
}


@pytest.mark.parametrize("draw", INVERSES)
def test_values_by_inverse_functions_have_their_distribution(draw: str) -> None:
    arguments, quarter = INVERSES[draw]

    def body(comm: Comm) -> None:
        cut, whole = (
            shardwise.zeros(spec, 4000) for spec in (ChunkSpec(0, (0, 1)), MeshSpec(Mesh.of(x=2), (Replicate(),)))
        )
        for x in (cut, whole):
            shardwise.manual_seed(4)
            getattr(x, draw)(*arguments)
        assert torch.equal(cut.full(), whole.full())
        assert abs((cut.full() < quarter).double().mean() - 0.25) < 0.03
        with pytest.raises(RuntimeError, match=draw):
            getattr(cut, draw)(*arguments[:-1], -1.0)

    run_local(body, 2, timeout=60)


def test_trials_up_to_the_first_success() -> None:
    def body(comm: Comm) -> None:
        x = shardwise.zeros(ChunkSpec(0, (0, 1)), 4000, dtype=torch.int64).geometric_(0.25).full()
        assert x.min() == 1 and abs(x.double().mean() - 4) < 0.3
        assert abs((x == 1).double().mean() - 0.25) < 0.03

    run_local(body, 2, timeout=60)


def test_ones_with_the_probabilities_of_another_tensor() -> None:
    def body(comm: Comm) -> None:
        spec = ChunkSpec(0, (0, 1))
        p = shardwise.shard(torch.tensor([0.0, 1.0] * 20), spec)
        assert torch.equal(shardwise.zeros(spec, 40).bernoulli_(p).full(), p.full())

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize(
    "draw", ["uniform_", "normal_", "random_", "bernoulli_", "bernoulli", "like", *INVERSES, "geometric_"]
)
def test_a_generator_gives_other_numbers_at_each_call(draw: str) -> None:
    def values(generator: torch.Generator) -> torch.Tensor:
        spec = ChunkSpec(0, (0, 1))
        x = shardwise.full(spec, (64,), 0.5)
        if draw == "like":
            return shardwise.rand_like(x, generator=generator).full()
        arguments = (0.3,) if draw == "geometric_" else ()
        return getattr(x, draw)(*arguments, generator=generator).full()

    def body(comm: Comm) -> None:
        generator = torch.Generator().manual_seed(1)
        one, other = values(generator), values(generator)
        assert not torch.equal(one, other)
        assert torch.equal(one, values(generator.manual_seed(1)))

    run_local(body, 2, timeout=60)


def test_seeding_again_starts_again_and_other_seeds_keep_their_count() -> None:
    def body(comm: Comm) -> list[Stream]:
        torch.manual_seed(5)
        first = [asked(comm), asked(comm)]
        torch.manual_seed(6)
        first.append(asked(comm))
        torch.manual_seed(5)
        return [*first, asked(comm)]

    assert run_local(body, 1) == [[Stream(5, 0), Stream(5, 1), Stream(6, 0), Stream(5, 0)]]
    generator = torch.Generator().manual_seed(3)
    seen = run_local(lambda comm: [asked(comm, generator), asked(comm, generator.manual_seed(3))], 1)
    assert seen == [[Stream(3, 0), Stream(3, 0)]]


def test_a_seed_that_comes_back_goes_on_counting() -> None:
    def body(comm: Comm) -> list[Stream]:
        torch.manual_seed(5)
        before = asked(comm)
        with torch.random.fork_rng():
            torch.manual_seed(6)
            inside = asked(comm)
        return [before, inside, asked(comm)]

    assert run_local(body, 1) == [[Stream(5, 0), Stream(6, 0), Stream(5, 1)]]


@pytest.mark.parametrize("own_seed", [None, 8])
def test_a_state_that_is_set_again_gives_the_same_streams_again(own_seed: int | None) -> None:
    def body(comm: Comm) -> None:
        torch.manual_seed(5)
        if own_seed is not None:
            manual_seed(own_seed)
        states, streams = [], []
        for plain in (0, 0, 3, 1, 0):
            torch.rand(plain)
            states.append(torch.get_rng_state())
            streams.append(asked(comm))
        assert [s.count for s in streams] == [0, 1, 2, 3, 4] and {s.seed for s in streams} == {own_seed or 5}
        for start in range(5):
            with torch.random.fork_rng():
                torch.set_rng_state(states[start])
                assert asked(comm) == streams[start]
        assert asked(comm) == Stream(own_seed or 5, 5)

    run_local(body, 1)


def test_our_own_seed_holds_for_one_comm_until_torch_is_seeded() -> None:
    def body(comm: Comm) -> list[Stream]:
        manual_seed(8)
        first = [asked(comm), asked(comm)]
        manual_seed(8)
        first.append(asked(comm))
        comm.barrier(label="all have drawn")
        torch.manual_seed(9)
        comm.barrier(label="all have seeded")
        return [*first, asked(comm)]

    assert run_local(body, 2) == [[Stream(8, 0), Stream(8, 1), Stream(8, 0), Stream(9, 0)]] * 2


def test_ranks_that_ask_for_different_things_all_raise() -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(DisagreementError) as caught:
            asked(comm, shape=(4, comm.rank // 2))
        return str(caught.value)

    text = "'test': the ranks pass different arguments: shape is (4, 0) on ranks 0, 1 and (4, 1) on rank 2; "
    assert all(found.startswith(text) for found in run_local(body, 3))


# Errors


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: uniform(2, 1, torch.float32), RuntimeError, r"uniform_ expects .* from=2 > to=1"),
        (lambda: uniform(-3e38, 3e38, torch.float32), RuntimeError, r"uniform_ expects to-from <="),
        (lambda: uniform(0, 1, torch.int64), NotImplementedError, r"'uniform' is not implemented for torch.int64"),
        (lambda: normal(0, 1, torch.bool), NotImplementedError, r"'normal_' is not implemented for torch.bool"),
        (lambda: normal(0, 1, torch.float8_e4m3fn), NotImplementedError, r"not implemented for torch.float8_e4m3fn"),
        (lambda: normal(0, -1, torch.float32), RuntimeError, r"normal expects std >= 0.0, but found std -1"),
        (lambda: truncated_normal(0, 1, 2, 1, torch.float32), ValueError, r"needs a <= b and std >= 0, got a=2, b=1"),
        (lambda: bernoulli(1.5), RuntimeError, r"p to be in \[0, 1\], but got p=1.5"),
        (lambda: integers(4, 4, torch.int64), RuntimeError, r"'from' to be less than 'to', but found from=4 >= to=4"),
        (lambda: integers(None, None, torch.complex64), NotImplementedError, r"not implemented for torch.complex64"),
    ],
)
def test_wrong_arguments(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_random_values_need_values_not_addends() -> None:
    layout = MeshSpec(Mesh.of(dp=2), (Partial("sum"),)).layout((4,))
    with pytest.raises(LayoutError, match=r"rand on a tensor with a pending sum: .* use Shard or Replicate"):
        check_not_pending(layout, "rand")
    check_not_pending(ChunkSpec(0, 2).layout((4,)), "rand")


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.int8, 0, 127), (torch.uint8, 0, 255), (torch.bool, 0, 1), (torch.bfloat16, 0, 256), (torch.int64, 0, None)],
)
def test_integers_span_the_dtype(dtype: torch.dtype, low: int, high: int | None) -> None:
    target = torch.empty(3000, dtype=dtype)
    fill_box(target, (3000,), Box((0,), (3000,)), Stream(1), integers(None, None, dtype))
    assert target.min() >= low and (high is None or target.max().item() <= high)
    assert len(target.unique()) > (1 if dtype == torch.bool else 100)
