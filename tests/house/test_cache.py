"""Does every cache of the package keep its bound, forget on change, and hold nothing of a call that failed?

The registry of `_cache.py` lists them all. A program of operators, moves and views is run with all caches empty, with
caches that are full at one entry, and after a change of rules: the results are the same.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Partial, Replicate, Shard, run_local
from shardwise._cache import Cache, all_caches, cached, clear_on_change, limit, remembered_bytes
from shardwise._lazy import collector_paused
from tests.dense import lay

SRC = Path(__file__).parents[2] / "src" / "shardwise"
PAIR = Mesh.of(tp=2)
X = torch.arange(24, dtype=torch.float64).reshape(4, 6) - 7


class Thing:
    """Equal to every other, as layouts are that mean the same in other words."""

    lasts = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)

    def __hash__(self) -> int:
        return 1


def test_a_full_cache_is_cleared() -> None:
    cache: Cache[int, int] = Cache(3)
    for number in range(10):
        assert cache.put(number, -number) == -number
        assert 0 < len(cache) <= 3 and cache[number] == -number


def test_answers_by_value_and_by_identity() -> None:
    calls: list[Any] = []

    @cached(4)
    def by_value(thing: Thing) -> Thing:
        calls.append(thing)
        return thing

    @cached(4, identity=True, keep=lambda thing, *rest: thing.lasts)
    def by_identity(thing: Thing, number: int = 0) -> tuple[Thing, int]:
        calls.append(thing)
        return thing, number

    one, other = Thing(), Thing()
    assert by_value(one) is by_value(other) is one and len(calls) == 1
    assert by_identity(one)[0] is one and by_identity(other)[0] is other and by_identity(one)[0] is one
    assert by_identity(one, 2) == (one, 2) and len(calls) == 4
    brief = Thing()
    brief.lasts = False
    assert by_identity(brief) is by_identity(brief) and len(calls) == 5
    gone = weakref.ref(brief)
    calls.clear()
    del brief
    gc.collect()
    assert gone() is None


def test_a_call_that_fails_is_not_remembered_and_ids_are_not_used_again() -> None:
    fails = [True]

    @cached(identity=True)
    def by_identity(thing: Thing) -> int:
        if fails[0]:
            raise ValueError
        return id(thing)

    @cached()
    def by_value(number: int) -> int:
        if fails[0]:
            raise ValueError
        return number

    for function, value in ((by_identity, Thing()), (by_value, 3)):
        with pytest.raises(ValueError):
            function(value)  # type: ignore[arg-type]  # each of its own kind
    fails[0] = False
    assert by_value(3) == 3
    for _ in range(100):
        thing = Thing()
        assert by_identity(thing) == id(thing)
        del thing


def test_keep_says_what_is_not_remembered() -> None:
    calls: list[int] = []

    @cached(keep=lambda number: number > 0)
    def negate(number: int) -> int:
        calls.append(number)
        return -number

    assert [negate(n) for n in (1, 1, -1, -1)] == [-1, -1, 1, 1] and calls == [1, -1, -1]


def test_a_change_clears_what_follows_from_rules() -> None:
    cache: Cache[int, int] = Cache(on_change=True)
    kept: Cache[int, int] = Cache()
    cache.put(1, 1)
    kept.put(1, 1)
    clear_on_change()
    assert not cache and kept == {1: 1}


def test_a_cache_ends_with_its_owner() -> None:
    before = len(all_caches())
    made: Any = Cache(7)
    assert len(all_caches()) == before + 1
    del made
    gc.collect()
    assert len(all_caches()) <= before


PROGRAM: dict[str, Callable[[Any, Any], Any]] = {
    "pointwise": lambda x, y: torch.relu(x * 2 + y),
    "product": lambda x, y: x @ y.t(),
    "softmax": lambda x, y: F.softmax(x, -1) * y,
    "views": lambda x, y: (x.reshape(2, 2, 6)[1:, 0] + y.t().reshape(4, 6)[0]).transpose(0, 1),
    "slices": lambda x, y: x[1:3, 2:5] + y[::2, :3],
    "reduction": lambda x, y: x.var(0) + y.sum(0),
    "writes": lambda x, y: x.clone().add_(y),
}
LAYOUTS: tuple[Any, ...] = (
    MeshSpec(PAIR, (Shard(0),)),
    MeshSpec(PAIR, (Shard(1),)),
    MeshSpec(PAIR, (Replicate(),)),
    MeshSpec(Mesh.of(other=2), (Shard(0),)),
    MeshSpec(PAIR, (Shard(0, sizes=(3, 1)),)),
    ChunkSpec(0, (1, 0)),
    ChunkSpec(0, (0, 1, 0)),
)


@contextmanager
def small_caches(size: int) -> Iterator[None]:
    """All caches that are dicts hold at most so many entries."""
    held = [(c, c.size) for c in all_caches() if isinstance(c, Cache)]
    for cache, _ in held:
        cache.clear()
        cache.size = size
    try:
        yield
    finally:
        for cache, before in held:
            cache.size = before


def run_program(comm: Comm) -> None:
    for spec in LAYOUTS:
        x, y = (lay(t, PAIR, (Replicate(),)).redistribute(spec) for t in (X, X.flip(0)))
        for name, function in PROGRAM.items():
            for _ in range(2):
                torch.testing.assert_close(function(x, y).full(), function(X, X.flip(0)), msg=f"{name} {spec}")
        total = x.redistribute(MeshSpec(PAIR, (Partial(),)))
        torch.testing.assert_close((total * 2 + y).full(), X * 2 + X.flip(0))


@pytest.mark.parametrize("size", (1, 2, 4096))
def test_every_cache_gives_the_same_answers_whatever_it_holds(size: int) -> None:
    with small_caches(size):
        run_local(run_program, 2, timeout=120)
        clear_on_change()
        run_local(run_program, 2, timeout=120)
        too_long = [c for c in all_caches() if isinstance(c, Cache) and len(c) > 2 * c.size]  # two threads fill it
        assert not too_long
    for cache in all_caches():
        cache.clear()
    run_local(run_program, 2, timeout=120)


@pytest.fixture
def low_limit() -> Iterator[int]:
    """All caches together keep at most so many bytes."""
    before, limit.most = limit.most, 400 << 10
    for cache in all_caches():
        cache.clear()
    limit.start()
    yield limit.most
    limit.most = before
    limit.start()


def test_new_lengths_are_forgotten_by_bytes(low_limit: int) -> None:
    """What is remembered of ever-new lengths stays below the limit of all caches, far below their limits by entries."""
    found: list[int] = []

    def body(comm: Comm) -> None:
        weight = lay(torch.ones(6, 4), PAIR, (Replicate(),)).requires_grad_()
        for length in range(4, 124, 2):
            x = lay(torch.ones(length, 4), PAIR, (Shard(0),))
            torch.softmax(F.linear(x, weight) * 2, -1).sum(0).square().mean().backward()
            comm.barrier(label="measure")
            found.append(remembered_bytes())
            comm.barrier(label="measured")

    run_local(body, 2, timeout=120)
    assert max(found) <= low_limit * 5 // 4  # it is looked at after 128 entries at least
    assert sum(later < before // 2 for before, later in pairwise(found)) >= 2, found
    grown = sorted(later - before for before, later in pairwise(found) if later > before)
    assert grown[len(grown) // 2] <= 2 * 40_000  # of one length on two ranks


def test_what_is_remembered_is_counted_with_what_it_keeps() -> None:
    cache: Cache[str, Any] = Cache()
    before = remembered_bytes()
    array = np.zeros(100_000)
    cache.put("an array twice", (array, [array[1:]]))
    assert 800_000 < remembered_bytes() - before < 810_000
    cache.put("what others own", (torch.ones(100_000), np, array.sum, Thing))
    assert remembered_bytes() - before < 810_000


def test_nothing_else_remembers() -> None:
    """In these packages every cache is one of `_cache.py`."""
    done = [SRC / "ops"]
    found = [
        str(path)
        for folder in done
        for path in folder.rglob("*.py")
        if any(word in path.read_text() for word in ("lru_cache", "import cache\n", "@cache\n", "_MAX_"))
    ]
    assert not found


def test_the_collector_waits_and_goes_on_where_it_was_on() -> None:
    assert gc.isenabled()
    with suppress(ValueError), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
