"""Do checkpoints come back bit by bit, in any layout, on any number of ranks, with everything around the tensors?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_map_only

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, Layout, Mesh, MeshSpec, Partial, Replicate, Shard, run_local
from shardwise.checkpoint import clean, files, leftovers
from shardwise.checkpoint import saving as writing
from shardwise.checkpoint import store as reading
from shardwise.checkpoint.formats import base as assign
from shardwise.checkpoint.formats import find_format
from shardwise.checkpoint.formats.base import TensorToSave
from shardwise.geometry import find_dtype
from shardwise.tensor import ShardedTensor, wrap
from shardwise.testing.oracle import small_layouts
from tests.moving import DTYPES, assert_holds, layouts, local_parts, reducible, same_bytes, values

SHAPE = (2, 2)
EVERY = layouts(7, 9)


def held(layout: Layout, comm: Comm, whole: Tensor) -> ShardedTensor:
    """This rank's part of a tensor that holds `whole`."""
    return wrap(layout, tuple(local_parts(layout, comm.rank, whole)), comm, dtype=whole.dtype)


def blank(layout: Layout, comm: Comm, dtype: torch.dtype) -> ShardedTensor:
    """A tensor that holds nothing of the kind that is loaded."""
    parts = tuple(torch.full(shape, 99, dtype=dtype) for shape in layout.local_shapes(comm.rank))
    return wrap(layout, parts, comm, dtype=dtype)


def save_all(comm: Comm, path: Path, found: Sequence[Layout], whole: Tensor) -> None:
    shardwise.save({str(i): held(layout, comm, whole) for i, layout in enumerate(found)}, path)


def load_pairs(comm: Comm, path: Path, pairs: Sequence[tuple[int, Layout]], dtype: torch.dtype) -> list[Any]:
    """Load one stored tensor into many layouts at once: names lead many tensors of the state to one that is stored."""
    state = {f"{n}.{i}": blank(layout, comm, dtype) for n, (i, layout) in enumerate(pairs)}
    shardwise.load(state, path, names=lambda name: name.partition(".")[2], strict=False)
    return [t.local_tensors() for t in state.values()]


def check_pairs(path: Path, pairs: Sequence[tuple[int, Layout]], ranks: int, whole: Tensor) -> None:
    by_rank = run_local(load_pairs, ranks, path, pairs, whole.dtype)
    for number, (i, layout) in enumerate(pairs):
        assert_holds(layout, [parts[number] for parts in by_rank], whole, f"{i} -> {layout!r} on {ranks} ranks")


@pytest.mark.parametrize("ranks_after", [1, 2])
@pytest.mark.parametrize("ranks_before", [1, 2])
def test_every_pair_of_small_layouts_is_exact(tmp_path: Path, ranks_before: int, ranks_after: int) -> None:
    """What is stored depends on the boxes alone, so layouts of the same boxes are saved and one of them is loaded."""
    whole = values(SHAPE, torch.float32)
    before, after = small_layouts(SHAPE, ranks_before), small_layouts(SHAPE, ranks_after)
    run_local(save_all, ranks_before, tmp_path / "c", before, whole)
    cut_alike = {frozenset(p.box for p in x.pieces): i for i, x in enumerate(before) if x.pending is None}
    pairs = [(i, layout) for i in cut_alike.values() for layout in after]
    check_pairs(tmp_path / "c", pairs, ranks_after, whole)


@pytest.mark.parametrize("ranks_before, ranks_after", [(1, 3), (3, 2), (4, 1), (2, 4)])
def test_every_small_layout_is_saved_and_loaded(tmp_path: Path, ranks_before: int, ranks_after: int) -> None:
    """Every layout of either side takes part; which meets which goes round."""
    whole = values(SHAPE, torch.int64)
    before, after = (small_layouts(SHAPE, n)[:: 9 if n == 4 else 1] for n in (ranks_before, ranks_after))
    run_local(save_all, ranks_before, tmp_path / "c", before, whole)
    turns = max(len(before), len(after))
    pairs = [(i % len(before), after[i * 7 % len(after)]) for i in range(turns)]
    pairs += [((i * 5 + 3) % len(before), layout) for i, layout in enumerate(after)]
    check_pairs(tmp_path / "c", pairs, ranks_after, whole)


@pytest.mark.parametrize("ranks_before", [1, 2, 3, 4])
def test_every_pair_of_cuts_on_every_number_of_ranks(tmp_path: Path, ranks_before: int) -> None:
    """Saved once in every way to cut the tensor, loaded in every way by one to four ranks."""
    whole = values(SHAPE, torch.float16)
    before = cut_apart(ranks_before)
    run_local(save_all, ranks_before, tmp_path / "c", before, whole)
    for ranks_after in (1, 2, 3, 4):
        pairs = [(i, layout) for i in range(len(before)) for layout in cut_apart(ranks_after)]
        check_pairs(tmp_path / "c", pairs, ranks_after, whole)


@lru_cache
def cut_apart(ranks: int) -> list[Layout]:
    """One layout for each way to cut the tensor into boxes that so many ranks hold."""
    return list({frozenset(p.box for p in x.pieces): x for x in small_layouts(SHAPE, ranks)}.values())


@pytest.mark.parametrize("at_once", [True, False])
def test_large_tensors_come_from_mapped_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """What is done for large tensors, done for small ones; pages at once, or one by one on an older system."""
    whole = values((7, 9), torch.bfloat16)
    monkeypatch.setattr(reading, "LARGE_BYTES", 1)
    monkeypatch.setattr(files, "_WORTH_FETCHING", 1)
    if not at_once:
        monkeypatch.setattr(files, "_POPULATE_READ", 9999)
    every = list(EVERY.values())
    run_local(save_all, 4, tmp_path / "c", every, whole)
    pairs = [(i, layout) for i in range(0, len(every), 3) for layout in every]
    check_pairs(tmp_path / "c", pairs, 4, whole)
    taken = shardwise.open(tmp_path / "c")["0"][2:6, 1:4]
    assert same_bytes(taken, whole[2:6, 1:4].cpu())


def test_many_threads_load_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {f"t{i}": values((7, 9 + i), torch.float32) for i in range(20)}
    shardwise.save(whole, tmp_path / "c")
    monkeypatch.setattr(reading, "_WORTH_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    state = {name: torch.zeros_like(t) for name, t in whole.items()}
    shardwise.load(state, tmp_path / "c")
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    before = {name: torch.zeros_like(t) for name, t in whole.items()}
    with pytest.raises(CheckpointError, match=r"'t19': bytes .* are damaged"):
        shardwise.load(before, tmp_path / "c")
    assert all(not t.any() for t in before.values()), "nothing is changed before all is checked"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128, torch.uint16, torch.float8_e8m0fnu, torch.float8_e5m2])
def test_every_kind_of_layout_and_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    bytes_ = torch.arange(63 * dtype.itemsize, dtype=torch.uint8).remainder(2 if dtype == torch.bool else 255)
    odd = dtype in (torch.uint16, torch.float8_e8m0fnu, torch.float8_e5m2)
    whole = bytes_.view(dtype).reshape(7, 9) if odd else values((7, 9), dtype)
    found = [x for x in EVERY.values() if x.pending is None or (not odd and reducible(x, dtype))]
    run_local(save_all, 4, tmp_path / "c", found, whole)
    check_pairs(tmp_path / "c", [(i, found[i * 5 % len(found)]) for i in range(len(found))], 4, whole)
    with shardwise.open(tmp_path / "c") as checkpoint:
        checkpoint.verify()
        assert all(same_bytes(checkpoint[name].read(), whole.cpu()) for name in checkpoint)
        assert all(checkpoint[str(i)].dtype == dtype for i in range(len(found)))


def test_the_nested_state_comes_back(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 4), "scalar": torch.tensor(7)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]},
        "epoch": 5,
        "name": "größe \u2603",
        "odd": [None, True, float("-inf"), -(2**70)],
        "part": torch.arange(12).reshape(3, 4).t()[1:3],
    }
    shardwise.save(state, tmp_path / "c")
    with shardwise.open(tmp_path / "c") as checkpoint:
        back = checkpoint.state()
    assert repr(back) == repr(tree_map_only(torch.Tensor, torch.Tensor.cpu, state))
    assert type(back["optimizer"]["groups"][0]["betas"]) is tuple
    blank_state = {**state, "epoch": 0, "name": "", "odd": [0, 0, 0, 0], "part": torch.zeros(2, 3, dtype=torch.int64)}
    expected = repr(state)
    again = shardwise.load(blank_state, tmp_path / "c")
    assert again is blank_state and repr(again) == expected


class Phase(IntEnum):
    WARM_UP = 1
    DECAY = 2


class Betas(NamedTuple):
    first: float
    second: float


def test_tuples_with_names_and_enums_stay_of_their_classes(tmp_path: Path) -> None:
    shardwise.save({"betas": Betas(0.5, 0.75), "phase": Phase.DECAY, "later": 7, "w": torch.ones(1)}, tmp_path / "c")
    state = {"betas": Betas(0.0, 0.0), "phase": Phase.WARM_UP, "later": Phase.WARM_UP, "w": torch.zeros(1)}
    shardwise.load(state, tmp_path / "c")
    assert repr(state) == repr({"betas": Betas(0.5, 0.75), "phase": Phase.DECAY, "later": 7, "w": torch.ones(1)})


def test_small_tensors_far_and_near_in_one_file(tmp_path: Path) -> None:
    """Some of many tensors, with others of any width between them: parts that lie near are read together."""
    names = [f"t{i}" for i in range(60)]
    dtypes = (torch.float32, torch.int8, torch.float64, torch.bool)
    whole = {n: values((5 + 700 * (i % 7 == 3), 9), dtypes[i % 4]) for i, n in enumerate(names)}
    shardwise.save(whole, tmp_path / "c")
    for chosen in (names[::2], names[5:7] + names[40:], names[11:12], names):
        state = {n: torch.zeros_like(whole[n]) for n in chosen}
        shardwise.load(state, tmp_path / "c", strict=False, max_buffer_bytes=1 << 16)
        assert all(torch.equal(state[n], whole[n]) for n in chosen)


@pytest.mark.parametrize("columns", [slice(0, 3), slice(40_000, 80_001), slice(7, 100_000)])
def test_columns_of_wide_tensors_are_read_in_every_way(tmp_path: Path, columns: slice) -> None:
    """Short rows far apart, long rows far apart, and rows with small gaps, also through the smallest buffer."""
    whole = torch.arange(3 * 2 * 100_003, dtype=torch.int32).reshape(3, 2, 100_003)
    shardwise.save({"w": whole}, tmp_path / "c")
    for limit in (1 << 16, 1 << 28):
        with shardwise.open(tmp_path / "c", max_buffer_bytes=limit) as checkpoint:
            assert torch.equal(checkpoint["w"][:, :, columns], whole[:, :, columns].cpu())
            assert torch.equal(checkpoint["w"][1:, 1, columns], whole[1:, 1, columns].cpu())


def test_an_optimizer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[torch.nn.Linear, torch.optim.Adam]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(3)
    shardwise.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    other, fresh = trained(1)
    state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
    shardwise.load(state, tmp_path / "c")
    fresh.load_state_dict(state["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())


def test_files_are_ordinary_safetensors_files(tmp_path: Path) -> None:
    whole = values((7, 9), torch.bfloat16)
    run_local(save_all, 4, tmp_path / "c", [EVERY["rows"]], whole)
    rows = []
    for file in sorted((tmp_path / "c").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            rows += [opened.get_tensor(key) for key in opened.offset_keys()]
    assert same_bytes(torch.cat(rows), whole.cpu())


def test_copies_are_written_once_and_shared_out() -> None:
    big, small = TensorToSave("big", find_dtype("f32"), everywhere(4, (64, 1 << 18))), []
    small = [TensorToSave(f"s{i}", find_dtype("f32"), everywhere(4, (64,))) for i in range(8)]
    assigned = assign.BoxAssignment([big, *small], range(4))
    by_rank = [assigned.parts_of(rank) for rank in range(4)]
    assert [sum(holder.here.numel for holder in parts.values()) for parts in by_rank] == [16 * (1 << 18) + 128] * 4
    written = [place for parts in by_rank for place in parts]
    assert len(written) == len(set(written)) == 4 + 8


def test_boxes_are_assigned_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reshard to very many ranks asks for the files of each."""
    calls: list[int] = []
    plain = assign.assign_boxes
    monkeypatch.setattr(assign, "assign_boxes", lambda tensors: calls.append(len(tensors)) or plain(tensors))
    layout = MeshSpec(Mesh.of(x=4096), (Shard(0),)).layout((5, 2))
    tensors = [TensorToSave("w", find_dtype("f32"), layout), TensorToSave("v", find_dtype("f64"), layout)]
    files = find_format("shardwise").plan_files(assign.SaveRequest(tensors, {"dict": []}, range(4096))).all_files()
    assert [len(file.items) for file in files] == [2] * 5 and calls == [2]


def everywhere(ranks: int, shape: tuple[int, ...]) -> Layout:
    return MeshSpec(Mesh.of(x=ranks), (Replicate(),)).layout(shape)


def test_files_are_capped_and_large_tensors_pass_through_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "STAGING_BYTES", 64)
    x = torch.arange(600.0).reshape(20, 30).t()
    shardwise.save({"a": x, "b": x.to(torch.float64), "c": x[:3]}, tmp_path / "c", max_file_bytes=3000)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    with shardwise.open(tmp_path / "c", max_buffer_bytes=1) as checkpoint:
        assert torch.equal(checkpoint["a"].read(), x.cpu()) and torch.equal(checkpoint["b"][...], x.double().cpu())


def test_blocks_are_checked_one_by_one(tmp_path: Path) -> None:
    x = torch.arange(3 << 20, dtype=torch.float32).reshape(3 << 10, 1 << 10)
    shardwise.save({"x": x}, tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with shardwise.open(tmp_path / "c") as checkpoint:
        assert torch.equal(checkpoint["x"][5:1000], x[5:1000].cpu())
        with pytest.raises(CheckpointError, match=r"tensor 'x': bytes \d+ to \d+ are damaged"):
            checkpoint["x"][-1]


def test_slices(tmp_path: Path) -> None:
    whole = values((7, 9), torch.float32)
    run_local(save_all, 4, tmp_path / "c", [EVERY["two boxes or none"]], whole)
    stored = shardwise.open(tmp_path / "c")["0"]
    assert stored.layout == EVERY["two boxes or none"] and stored.shape == (7, 9) and len(stored.boxes) == 5
    for index in (..., 3, (slice(None), -1), (slice(1, 6, 2), slice(8, 2)), (slice(-4, None), slice(3, 8, 3)), (2, 5)):
        assert torch.equal(stored[index], whole[index].cpu())
    for wrong, text in (
        ((1, 2, 3), "more entries"),
        (7, "out of range"),
        (slice(None, None, -1), "steps"),
        ("a", "str"),
    ):
        with pytest.raises(IndexError, match=text):
            stored[wrong]


def test_a_misfit_of_many_names_is_found_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are near are looked for in the first problems only: a comparison of all with all takes minutes."""
    states = {f"layers.{i}.weight": {"exp_avg": torch.zeros(1)} for i in range(300)}
    shardwise.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": states}}, tmp_path / "c")
    compared: list[str] = []
    monkeypatch.setattr(
        "shardwise.checkpoint.loading.difflib.get_close_matches", lambda name, *_, **__: compared.append(name) or []
    )
    state = {"model": {"w": torch.zeros(2)}, "optimizer": {"state": {}}}
    with pytest.raises(CheckpointError, match=r"and 295 more; an optimizer has no state .* the optimizer themselves"):
        shardwise.load(state, tmp_path / "c")
    assert 0 < len(compared) <= 10 and not state["model"]["w"].any()


def test_a_tensor_whose_elements_share_memory_is_not_loaded_into(tmp_path: Path) -> None:
    shardwise.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")
    with pytest.raises(shardwise.CheckpointError, match="w is expanded in the state: several elements share"):
        shardwise.load({"w": torch.zeros(1, 3).expand(2, 3)}, tmp_path / "c")


def test_strict_partial_renamed_and_cast(tmp_path: Path) -> None:
    shardwise.save({"layer.weight": torch.arange(4.0), "layer.bias": torch.ones(2), "step": 4}, tmp_path / "c")
    weight, bias = torch.zeros(4), torch.zeros(2)
    with pytest.raises(CheckpointError) as error:
        shardwise.load({"layer.wieght": weight, "layer.bias": bias, "step": 0}, tmp_path / "c")
    assert "layer.wieght is missing from it (near: layer.weight)" in str(error.value)
    assert "it has layer.weight, which the state does not have (near: layer.wieght)" in str(error.value)
    with pytest.raises(CheckpointError, match=r"layer.bias has the shape \(3,\) in the state and \(2,\) in it"):
        shardwise.load({"layer.bias": torch.zeros(3)}, tmp_path / "c", strict=False)
    with pytest.raises(CheckpointError, match=r"layer.bias is f64 in the state and f32 in it \(cast=True converts\)"):
        shardwise.load({"layer.bias": torch.zeros(2).double()}, tmp_path / "c", strict=False)
    with pytest.raises(CheckpointError, match="step is a tensor in the state and the value 4 in it"):
        shardwise.load({"step": torch.zeros(())}, tmp_path / "c", strict=False)
    with pytest.raises(CheckpointError, match=r"layer.bias is not a tensor in the state"):
        shardwise.load({"layer.bias": 3}, tmp_path / "c", strict=False)
    state = {"w": weight, "other": bias}
    shardwise.load(state, tmp_path / "c", names={"w": "layer.weight"}, strict=False)
    assert weight.tolist() == [0, 1, 2, 3] and bias.tolist() == [0, 0]
    wide = {"layer.weight": torch.zeros(4, dtype=torch.float64), "layer.bias": torch.zeros(2, dtype=torch.bfloat16)}
    shardwise.load({**wide, "step": 0}, tmp_path / "c", cast=True)
    assert wide["layer.weight"].tolist() == [0, 1, 2, 3] and wide["layer.bias"].tolist() == [1, 1]


def save_stage(comm: Comm, path: Path) -> None:
    """Ranks 0 and 1 have one stage of a model, ranks 2 and 3 another; the last value is everywhere."""
    stage = comm.rank // 2
    members = comm.subset((2 * stage, 2 * stage + 1))
    layout = ChunkSpec(0, members.ranks).layout((5, 2))
    mine = held(layout, members, values((5, 2), torch.float32) + stage)
    shardwise.save({f"stage{stage}": {"w": mine, "plain": torch.full((3,), stage)}, "step": 7}, path)


def test_ranks_with_different_names_save_together(tmp_path: Path) -> None:
    run_local(save_stage, 4, tmp_path / "c")
    state = shardwise.open(tmp_path / "c").state()
    assert state["step"] == 7 and list(state) == ["stage0", "step", "stage1"]
    assert torch.equal(state["stage1"]["w"], (values((5, 2), torch.float32) + 1).cpu())
    assert state["stage0"]["plain"].tolist() == [0, 0, 0]


def save_with(comm: Comm, path: Path, make: Any) -> str:
    try:
        shardwise.save(make(comm), path)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda comm: {"rank": comm.rank}, "rank: rank 0 has 0 and rank 1 has 1; save the same value on all ranks"),
        (lambda comm: {"x": torch.zeros(2 + comm.rank)}, "a name refers to one tensor with one layout"),
        (lambda comm: {"x": object() if comm.rank else 1}, "rank 1: x: a checkpoint stores tensors, numbers"),
        (lambda comm: {"a": {"b": 1}, "a.b": 2}, "two entries of the state are called 'a.b'"),
        (lambda comm: {(1, 2): 3}, "keys are strings or ints, got the tuple"),
        (lambda comm: {"x": torch.zeros(2, device="meta")}, "x: a tensor that is on the meta device cannot be stored"),
    ],
)
def test_what_cannot_be_saved_is_told_to_every_rank(tmp_path: Path, make: Any, text: str) -> None:
    found = run_local(save_with, 2, tmp_path / "c", make)
    assert all(text in told for told in found) and len(set(found)) == 1
    assert os.listdir(tmp_path) == []


def test_a_state_that_holds_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": 1}
    state["again"] = state
    with pytest.raises(CheckpointError, match="nested deeper than 100 levels, or contains itself"):
        shardwise.save(state, tmp_path / "c")


def test_a_rank_that_fails_makes_all_raise_and_the_old_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values((7, 9), torch.float32)
    run_local(save_all, 4, tmp_path / "c", [EVERY["rows"]], whole)
    plain = writing.FileWriter.finish

    def finish(writer: Any) -> Any:
        if "rank00001" in writer._file.name:
            raise OSError(28, "No space left on device")
        return plain(writer)

    monkeypatch.setattr(writing.FileWriter, "finish", finish)
    for async_op in (False, True):
        found = run_local(save_failing, 4, tmp_path / "c", async_op)
        assert all("rank 1: OSError: [Errno 28] No space left on device" in told for told in found), found
        assert os.listdir(tmp_path) == ["c"] and leftovers(tmp_path / "c") == []
        assert torch.equal(shardwise.open(tmp_path / "c")["0"].read(), whole.cpu())


def save_failing(comm: Comm, path: Path, async_op: bool) -> str:
    state = {"0": held(EVERY["rows"], comm, values((7, 9), torch.float32) + 1)}
    try:
        saving = shardwise.save(state, path, async_op=async_op)
        if saving is not None:
            saving.wait()
    except CheckpointError as error:
        return str(error)
    return "saved"


def save_in_background(comm: Comm, path: Path) -> None:
    tensor = held(EVERY["rows"], comm, values((7, 9), torch.float32))
    first = shardwise.save({"x": tensor, "n": 1}, path, async_op=True)
    for local in tensor.local_tensors():
        local.add_(1)
    second = shardwise.save({"x": tensor, "n": 2}, path, async_op=True)
    assert first.done()
    state = {"x": blank(EVERY["columns"], comm, torch.float32), "n": 0}
    shardwise.load(state, path)
    second.wait()
    assert state["n"] == 2


def test_saving_in_the_background(tmp_path: Path) -> None:
    run_local(save_in_background, 4, tmp_path / "c")
    state = shardwise.open(tmp_path / "c").state()
    assert state["n"] == 2 and torch.equal(state["x"], (values((7, 9), torch.float32) + 1).cpu())
    assert os.listdir(tmp_path) == ["c"]


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"contains things other than a checkpoint \(a.txt\)"):
        shardwise.save({"x": torch.zeros(2)}, tmp_path / "notes")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        shardwise.save({"x": torch.zeros(2)}, tmp_path / "notes" / "a.txt")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        shardwise.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"not a checkpoint; expected a folder with shardwise.index.json"):
        shardwise.open(tmp_path / "notes")


def test_leftovers_are_recognised_and_removed(tmp_path: Path) -> None:
    shardwise.save({"n": 1}, tmp_path / "c")
    (tmp_path / ".c.saving-0011").mkdir()
    (tmp_path / ".c.saving-0011" / "rank00000-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".other.saving-0011").mkdir()
    assert [p.name for p in leftovers(tmp_path / "c")] == [".c.saving-0011"]
    assert [p.name for p in clean(tmp_path / "c")] == [".c.saving-0011"]
    assert sorted(os.listdir(tmp_path)) == [".other.saving-0011", "c"]


def test_a_commit_killed_between_its_renames_is_read_and_completed(tmp_path: Path) -> None:
    shardwise.save({"n": 1}, tmp_path / "c")
    shardwise.save({"n": 2}, tmp_path / "new")
    os.rename(tmp_path / "c", tmp_path / ".c.replaced-77")
    os.rename(tmp_path / "new", tmp_path / ".c.saving-77")
    assert shardwise.open(tmp_path / "c").values() == {"n": 2}
    assert [p.name for p in leftovers(tmp_path / "c")] == [".c.replaced-77"]
    clean(tmp_path / "c")
    assert shardwise.open(tmp_path / "c").values() == {"n": 2} and os.listdir(tmp_path) == ["c"]


def test_many_small_tensors_share_a_few_exchanges(tmp_path: Path) -> None:
    counts = run_local(count_exchanges, 2, tmp_path / "c")
    assert counts == [(3, 3)] * 2
    index = json.loads((tmp_path / "c" / "shardwise.index.json").read_text())
    assert len(index["tensors"]) == 200 and len(index["cuts"]) == 1


def count_exchanges(comm: Comm, path: Path) -> tuple[int, int]:
    calls: list[str] = []
    plain = comm.all_gather_bytes

    def gather(data: bytes, *, label: str) -> list[bytes]:
        calls.append(label)
        return plain(data, label=label)

    comm.all_gather_bytes = gather  # type: ignore[method-assign]
    layout = ChunkSpec(0, 2).layout((4, 4))
    shardwise.save({f"t{i}": blank(layout, comm, torch.float32) for i in range(200)}, path)
    saves = len(calls)
    shardwise.load({f"t{i}": blank(layout, comm, torch.float32) for i in range(200)}, path)
    return saves, len(calls) - saves


def test_pending_tensors_on_some_ranks_are_stored_reduced(tmp_path: Path) -> None:
    layout = MeshSpec(Mesh(("x",), (1, 2)), (Partial("sum"),)).layout((7, 9))
    whole = values((7, 9), torch.float32)
    run_local(save_all, 3, tmp_path / "c", [layout, layout], whole)
    assert torch.equal(shardwise.open(tmp_path / "c")["1"].read(), whole.cpu())


def test_saves_in_the_background_copy_into_the_memory_of_the_last_one(tmp_path: Path) -> None:
    def save(comm: Comm) -> list[int]:
        places = []
        x = torch.arange(600.0).reshape(20, 30)
        state = {
            "x": x,
            "t": x.t(),
            "b": x > 3,
            "h": x.bfloat16()[::2],
            "c": torch.ones(3, dtype=torch.complex64).conj(),
        }
        state |= {"none": torch.empty(0, 3), "one": torch.tensor(7, dtype=torch.int16)}
        for size in (1, 1, 4, 1):
            given = {**state, "more": torch.full((2000 * size,), float(size))}
            expected = {name: tensor.clone() for name, tensor in given.items()}
            saving = shardwise.save(given, tmp_path / "c", async_op=True)
            x.add_(1)  # after save returned: this is not stored
            saving.wait()
            places.append(writing._host_buffers[comm].data_ptr())
            with shardwise.open(tmp_path / "c") as checkpoint:
                assert all(torch.equal(checkpoint[name].read(), tensor) for name, tensor in expected.items())
        return places

    (places,) = run_local(save, 1)
    assert places[0] == places[1]


def test_a_copy_is_stored_once(tmp_path: Path) -> None:
    """Groups whose parts are on several ranks, saved and loaded into other layouts and back."""
    whole = torch.arange(96, dtype=torch.float32).reshape(48, 2)
    copies = "on tp=4: S(0) groups(32,8 each 2,8 each 2) unit(4)"

    def body(comm: Comm) -> None:
        shardwise.save({"w": shardwise.shard(whole.clone(), copies)}, tmp_path / "copies")
        shardwise.save({"w": shardwise.shard(whole.clone(), "on tp=4: S(1)")}, tmp_path / "columns")
        for name, layout in (("copies", copies), ("copies", "on tp=4: S(0)"), ("columns", copies)):
            found = shardwise.shard(torch.zeros(48, 2), layout)
            shardwise.load({"w": found}, tmp_path / name)
            assert torch.equal(found.full(), whole)
            assert shardwise.digest(found) == shardwise.digest(shardwise.shard(whole, "on tp=4: R"))

    run_local(body, 4)
    stored = 0
    for path in (tmp_path / "copies").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored += sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118  # no dict
    assert stored == whole.nbytes
