"""Edges of helpers of tensors and checkpoints that larger tests pass by: bounds, empty stacks, offsets, options."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise
from shardwise import (
    CheckpointError,
    ChunkSpec,
    Comm,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Shard,
    from_local,
    run_local,
)
from shardwise.checkpoint.formats.dcp import _branch_to_json, _NodeLeaf
from shardwise.checkpoint.formats.torch_file import read_pickle
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.loading import _agree_on_load
from shardwise.checkpoint.reshard_copy import divide_memory
from shardwise.checkpoint.verify import _agrees, count_checked_bytes
from shardwise.geometry import Box, find_dtype
from shardwise.tensor.random import Stream, bernoulli, fill_box, integers, truncated_normal
from shardwise.transfer import plan_transfer


def test_whole_numbers_reach_the_last_one_of_their_dtype() -> None:
    """By default all numbers of the dtype from 0 on; within int64 otherwise."""
    numbers = torch.tensor([0, 126, 127, 128])
    assert integers(None, None, torch.int8).compute(numbers.clone(), torch.empty(0)).tolist() == [0, 126, 127, 0]
    assert integers(-(1 << 63), 0, torch.int64).compute(numbers.clone(), torch.empty(0))[0] == -(1 << 63)
    with pytest.raises(RuntimeError, match="within int64"):
        integers(-(1 << 63) - 5, 0, torch.int64)


def test_random_takes_one_bound_as_the_end() -> None:
    def body(comm: Comm) -> None:
        x = shardwise.zeros(ChunkSpec(0, (0, 1)), 50, dtype=torch.int64)
        assert set(x.random_(3).full().tolist()) == {0, 1, 2}
        assert set(x.random_(5, 7).full().tolist()) == {5, 6}

    run_local(body, 2, timeout=60)


def test_ones_are_drawn_below_the_probability() -> None:
    drawn = bernoulli(0.5).compute(torch.tensor([0.25, 0.5, 0.75]), torch.empty(0))
    assert drawn.tolist() == [True, False, False]


@pytest.mark.parametrize("mean", [-1.0, 0.0, 1.0])
def test_truncated_values_reach_both_bounds(mean: float) -> None:
    numbers = torch.tensor([0.0, 1.0], dtype=torch.float64)
    values = truncated_normal(mean, 1, -2, 2, torch.float64).compute(numbers, torch.empty(2, 2, dtype=torch.float64))
    assert sorted(values.tolist()) == pytest.approx([-2.0, 2.0], abs=1e-6)


def test_a_box_without_elements_draws_nothing() -> None:
    empty = torch.empty(0, 3)
    fill_box(empty, (4, 3), Box((2, 0), (0, 3)), Stream(1), truncated_normal(0, 1, -2, 2, torch.float32))
    meta = torch.empty(4, 3, device="meta")
    fill_box(meta, (4, 3), Box.whole((4, 3)), Stream(1), truncated_normal(0, 1, -2, 2, torch.float32))


def test_randn_has_mean_zero() -> None:
    def body(comm: Comm) -> None:
        values = shardwise.randn(ChunkSpec(0, (0, 1)), 4000, seed=3).full()
        assert abs(values.mean()) < 0.1 and abs(values.std() - 1) < 0.1

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize(("sizes", "even"), [((2, 2), True), ((1, 3), False)])
def test_rows_of_one_run_each_are_scattered_at_once(sizes: tuple[int, int], even: bool) -> None:
    mesh = Mesh.of(x=2)
    src = MeshSpec(mesh, (Partial("sum"),)).layout((4, 3))
    dst = MeshSpec(mesh, (Shard(0, sizes=sizes),)).layout((4, 3))
    found = plan_transfer(src, dst, itemsize=4).collective_of_comm((0, 1))
    assert str(found) == ("reduce_scatter of 2 ranks" if even else "None")
    turned = MeshSpec(mesh, (Shard(0),), order=None).layout((4, 3))
    assert plan_transfer(src, turned, itemsize=4).collective_of_comm((1, 0)) is None  # rows of the other rank


def test_a_bad_spec_or_rank_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(LayoutError, match=r"^from_local with a spec needs the global shape"):
            shardwise.from_local(torch.ones(2), ChunkSpec(0, (0, 1)))
        with pytest.raises(ValueError, match="rank 9"):
            shardwise.shard(torch.ones(4), ChunkSpec(0, (0, 1))).gather_to(9)

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize("data", [b"a.", b"0.", b"t.", b"u.", b"e.", b"q\x00.", b"(q\x00.", b"h\x05.", b"]t.", b"(."])
def test_pickles_that_take_from_nothing(data: bytes) -> None:
    with pytest.raises((ValueError, CheckpointError)) as raised:
        read_pickle(b"\x80\x02" + data, "a file")
    assert not isinstance(raised.value, pickle.UnpicklingError)


def test_lists_of_a_metadata_tree_may_have_gaps() -> None:
    leaf = _NodeLeaf({"value": 1})
    assert _branch_to_json({0: leaf, 2: leaf}) == [leaf.node, None, leaf.node]
    assert len(_branch_to_json({18: leaf})) == 19
    assert _branch_to_json({19: leaf}) == {"dict": [[19, leaf.node]]}


def test_ranks_that_load_other_checkpoints_are_told_once_it_is_certain() -> None:
    comm: Any = SimpleNamespace(ranks=(0, 1))
    same, other = (["a", "all", False, "w", False, None, []], ["b", "all", False, "w", False, None, []])
    state: Any = SimpleNamespace(unexpected=[], own=[])
    assert _agree_on_load(comm, [same, same], [], state)
    assert not _agree_on_load(comm, [same, other], [], state)  # a save may have replaced it in between
    with pytest.raises(CheckpointError, match="the checkpoint is not the same on ranks 0 and 1"):
        _agree_on_load(comm, [same, other], [same, other], state)
    with pytest.raises(CheckpointError, match="version is not the same on ranks 0 and 1"):
        _agree_on_load(comm, [same, [*same[:5], 3, []]], [], state)
    with pytest.raises(CheckpointError, match="verify is not the same"):
        _agree_on_load(comm, [same, ["a", "none", False, "w"]], [], state)


def test_blocks_that_a_read_touches() -> None:
    tensor: Any = SimpleNamespace(view_of=lambda number: (0, (4, 1), None), dtype=find_dtype("float32"))
    rows = ((2, 0), (2, 4))
    assert TensorEntry.touched_blocks(tensor, 0, Box(*rows), 32) == (1, 2)
    assert TensorEntry.touched_blocks(tensor, 0, Box(*rows), 16) == (2, 4)


def test_workers_fit_their_memory() -> None:
    workers, each = divide_memory(300 << 20, 8)
    assert 1 < workers < 8 and each >= 16 << 20


def test_bytes_with_checksums_are_counted(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        shardwise.save({"w": shardwise.ones(ChunkSpec(0, (0, 1)), 10, 3)}, tmp_path / "c")

    run_local(body, 2, timeout=60)
    with shardwise.open(tmp_path / "c") as opened:
        assert count_checked_bytes(opened._store) == 120


def test_headers_agree_in_dtype_and_shape() -> None:
    dtype = find_dtype("float32")
    entry: Any = SimpleNamespace(dtype=dtype)
    header: Any = SimpleNamespace(dtype=dtype, shape=(2, 3))
    assert _agrees(header, entry, (2, 3)) and not _agrees(None, entry, (2, 3)) and not _agrees(header, entry, (3, 2))


def test_pending_numbers_are_saved_as_cut_along_the_first_dim(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        mesh = MeshSpec(Mesh.of(x=2), (Partial("sum"),))
        state = {"w": shardwise.from_local(torch.ones(4, 2), mesh, (4, 2))}
        shardwise.save(state, tmp_path / "c")

    run_local(body, 2, timeout=60)
    with shardwise.open(tmp_path / "c") as opened:
        layout = opened["w"].layout
        assert [layout.local_shapes(rank) for rank in (0, 1)] == [((2, 2),), ((2, 2),)]


@pytest.mark.parametrize("target", ["on tp=2: R", "on tp=2: S(0)"])
def test_sums_of_complex_infinities_are_made_part_by_part(target: str) -> None:
    """Torch's own addition makes a part of inf + 0j not a number."""
    parts = [torch.tensor([complex(math.inf, 0.0), complex(1.0, -math.inf)]), torch.tensor([complex(1.0, 2.0), 0j])]

    def body(comm: Comm) -> None:
        found = from_local([parts[comm.rank]], "on tp=2: P(sum)", (2,)).redistribute(target).full()
        assert torch.view_as_real(found).tolist() == [[math.inf, 2.0], [1.0, -math.inf]]

    run_local(body, 2, timeout=60)
