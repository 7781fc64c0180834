"""The strategies reach every kind of layout, and the module says what it needs."""

import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardwise.geometry import ChunkSpec, EnumerableSpec, GridSpec, Layout, MeshSpec, Replicate, Shard
from shardwise.testing import global_values
from shardwise.testing import strategies as sw

T = TypeVar("T")


def sample(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """What the strategy draws, without shrinking."""
    drawn: list[T] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None)
    @given(value=strategy)
    def collect(value: T) -> None:
        drawn.append(value)

    collect()
    return drawn


@pytest.fixture(scope="module")
def layouts() -> list[Layout]:
    return sample(sw.layouts(ranks=4), 1000)


@pytest.fixture(scope="module")
def pending_layouts() -> list[Layout]:
    return sample(sw.layouts(ranks=4, pending=True), 300)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Layout, Layout]]:
    return sample(sw.layout_pairs(ranks=4), 400)


def shards(layout: Layout) -> list[Shard]:
    """The Shard placements that cut a dim with rows over several ranks."""
    spec = layout.spec
    if not isinstance(spec, MeshSpec):
        return []
    placed = zip(spec.placements, spec.mesh.shape, strict=True)
    return [p for p, n in placed if isinstance(p, Shard) and n > 1 and layout.shape[p.dim] > 1]


def chunk_ranks(layout: Layout) -> tuple[int, ...]:
    return layout.spec.ranks if isinstance(layout.spec, ChunkSpec) else ()


KINDS: dict[str, Callable[[Layout], bool]] = {
    "ragged": lambda x: any(p.sizes and len(set(p.sizes)) > 1 for p in shards(x)),
    "grouped": lambda x: any(p.groups for p in shards(x)) and any(len(x.pieces_of(r)) > 1 for r in x.ranks),
    "groups with copies": lambda x: any(p.each and p.groups and len(p.groups) > 1 for p in shards(x)),
    "block-cyclic": lambda x: any(p.block for p in shards(x)) and any(len(x.pieces_of(r)) > 1 for r in x.ranks),
    "dims from the end": lambda x: any(p.dim < 0 for p in shards(x)),
    "two axes on one dim": lambda x: len(shards(x)) == 2 and shards(x)[0].dim == shards(x)[1].dim,
    "two axes, other order": lambda x: isinstance(x.spec, MeshSpec) and not x.spec.splits_in_mesh_order and x.numel > 3,
    "replicated mesh": lambda x: isinstance(x.spec, MeshSpec) and Replicate() in x.spec.placements and len(x.ranks) > 2,
    "chunk, permuted": lambda x: len(chunk_ranks(x)) > 2 and list(chunk_ranks(x)) != sorted(chunk_ranks(x)),
    "chunk, repeated": lambda x: len(set(chunk_ranks(x))) < len(chunk_ranks(x)),
    "chunk, more ranks than rows": lambda x: len(chunk_ranks(x)) > max(x.shape, default=0) > 0,
    "grid": lambda x: isinstance(x.spec, GridSpec) and x.spec.ranks.shape[:2] == (2, 2) and x.numel > 3,
    "grid with replicas": lambda x: isinstance(x.spec, GridSpec) and x.spec.ranks.shape[-1] > 1 and x.numel > 3,
    "enumerable": lambda x: isinstance(x.spec, EnumerableSpec) and len(x.pieces) > 3,
    "enumerable, replicated": lambda x: (
        isinstance(x.spec, EnumerableSpec) and any(len(g) > 1 for g in x.replica_groups)
    ),
    "many pieces on one rank": lambda x: any(len(x.local_shapes(r)) > 2 for r in x.ranks),
    "no piece on a rank": lambda x: len(x.ranks) == 3,
    "no pieces": lambda x: not x.pieces,
    "empty pieces": lambda x: x.numel > 0 and any(p.box.numel == 0 for p in x.pieces),
    "0-dim": lambda x: x.ndim == 0 and len(x.ranks) > 1,
    "zero-length dims": lambda x: x.ndim == 2 and x.numel == 0 and len(x.ranks) > 1,
    "three dims": lambda x: x.ndim == 3 and x.numel > 8 and len(x.ranks) > 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_reach(kind: str, layouts: list[Layout]) -> None:
    assert any(KINDS[kind](layout) for layout in layouts)


@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_pending_layouts_reach(op: str, pending_layouts: list[Layout]) -> None:
    assert any(x.pending.op == op for x in pending_layouts if x.pending is not None)
    assert any(x.pending.divisor > 1 for x in pending_layouts if x.pending is not None)


def test_pending_is_an_option(layouts: list[Layout]) -> None:
    assert not any(layout.pending for layout in layouts)


RELATIONS: dict[str, Callable[[set[int], set[int]], bool]] = {
    "same": lambda a, b: a == b,
    "disjoint": lambda a, b: not a & b,
    "overlapping": lambda a, b: bool(a & b and a - b and b - a),
    "all": lambda a, b: len(a) == len(b) == 4,
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_pairs_reach(relation: str, pairs: list[tuple[Layout, Layout]]) -> None:
    assert all(source.shape == target.shape for source, target in pairs)
    ranks = [(set(source.ranks), set(target.ranks)) for source, target in pairs if source.ranks and target.ranks]
    assert any(RELATIONS[relation](first, second) for first, second in ranks)


def test_ranks_may_be_listed() -> None:
    assert {rank for layout in sample(sw.layouts(shape=(4,), ranks=[3, 8]), 50) for rank in layout.ranks} == {3, 8}


def test_missing_hypothesis_is_named() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None\nimport shardwise.testing\nimport shardwise.testing.strategies"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    text = "ImportError: shardwise.testing.strategies needs Hypothesis; run: pip install hypothesis"
    assert text in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float16, np.uint8, np.complex64], ids=lambda t: t.__name__)
def test_global_values_are_distinct(dtype: type[np.generic]) -> None:
    values = global_values((5, 40), dtype)
    assert values.dtype == dtype
    assert len(np.unique(values)) == 200
    assert not (values == 0).any()


def test_global_values_start_again_where_the_dtype_ends() -> None:
    assert len(np.unique(global_values((600,), np.uint8))) == 255
    assert global_values((4,), np.bool_).tolist() == [True, False, False, True]
