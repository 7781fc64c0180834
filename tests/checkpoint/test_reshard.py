"""Is a checkpoint that was resharded on disk the same checkpoint, in every layout and format, and are mistakes told?"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import shardwise
from shardwise import ChunkSpec, Comm, GridSpec, Mesh, MeshSpec, Replicate, Shard, ShardingSpec, run_local
from shardwise.checkpoint import CheckpointError, leftovers, reshard
from shardwise.checkpoint import reshard_copy as planning
from shardwise.checkpoint.commit import absolute_path
from shardwise.checkpoint.reshard_copy import divide_memory, split_into_boxes
from shardwise.checkpoint.resharding import spec_for, work_folder
from shardwise.cli.main import app
from shardwise.geometry import Box
from shardwise.nn import ModelPlan

SHAPE = (7, 6)
LAYOUTS: dict[str, ShardingSpec] = {
    "one rank": ChunkSpec(0, 1),
    "rows over 3": ChunkSpec(0, 3),
    "columns over 2": ChunkSpec(1, 2),
    "grid of 2 x 2": GridSpec((2, 2), [[0, 1], [2, 3]]),
    "copies of columns": MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(1))),
    "groups": MeshSpec(Mesh.of(tp=2), (Shard(0, groups=(4, 2, 1)),)),
    "block-cyclic": MeshSpec(Mesh.of(tp=2), (Shard(1, block=2),)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.bool, torch.float8_e4m3fn)


def values(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A tensor that is a function of the global index."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(torch.float32).to(dtype)


def state(spec: ShardingSpec | None) -> dict[str, Any]:
    """Tensors of several dtypes in a layout, and beside them what no layout cuts."""
    model = {str(d).removeprefix("torch."): values(d) for d in DTYPES}
    if spec is not None:
        model = {name: shardwise.shard(t, spec) for name, t in model.items()}
    rest = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 6), "row": torch.arange(5)}
    return {"model": model, "rest": rest, "step": 12, "betas": (0.9, float("inf")), "name": "run"}


def write(path: Path, spec: ShardingSpec) -> Path:
    def body(comm: Comm) -> None:
        shardwise.save(state(spec), path)

    run_local(body, max(spec.layout(SHAPE).ranks) + 1)
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: write(folder / str(number), spec) for number, (name, spec) in enumerate(LAYOUTS.items())}


def check_same(path: Path, scalars: bool = True) -> None:
    """A checkpoint holds the state, bit by bit, and its checksums are right."""
    expected = state(None)
    with shardwise.open(path) as checkpoint:
        checkpoint.verify()
        wanted = {f"{part}.{name}": t for part in ("model", "rest") for name, t in expected[part].items()}
        assert sorted(checkpoint.names()) == sorted(wanted)
        for name, tensor in wanted.items():
            found = checkpoint[name].read()
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.cpu().reshape(-1).view(torch.uint8)), name
        if scalars:
            assert checkpoint.values() == {"step": 12, "betas.0": 0.9, "betas.1": float("inf"), "name": "run"}


@pytest.mark.parametrize("before", LAYOUTS)
def test_every_pair_of_layouts_is_exact(sources: dict[str, Path], tmp_path: Path, before: str) -> None:
    for after, spec in LAYOUTS.items():
        path = tmp_path / "after"
        report = reshard(sources[before], path, layout=spec, overwrite=True)
        check_same(path)
        assert shardwise.open(path)["model.float32"].layout == spec.layout(SHAPE), after
        assert report.unfit == tuple(n for n in ("rest.scalar", "rest.empty", "rest.row") if n in report.unfit)


def test_what_is_written_is_what_a_save_would_write(sources: dict[str, Path], tmp_path: Path) -> None:
    reshard(sources["columns over 2"], tmp_path / "b", layout=LAYOUTS["rows over 3"])
    ours, saved = shardwise.open(tmp_path / "b"), shardwise.open(sources["rows over 3"])
    for name in (f"model.{str(d).removeprefix('torch.')}" for d in DTYPES):
        assert ours[name].boxes == saved[name].boxes
        assert ours[name].layout == saved[name].layout


def test_segments_and_workers_make_no_difference(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard(sources["rows over 3"], tmp_path / "one", layout="S(1)", ranks=3)
    reshard(sources["rows over 3"], tmp_path / "two", layout="S(1)", ranks=3, workers=2)
    monkeypatch.setattr(planning, "SEGMENT_BYTES", 16)
    seen: list[tuple[int, int]] = []
    reshard(sources["rows over 3"], tmp_path / "many", layout="S(1)", ranks=3, progress=lambda *n: seen.append(n))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(seen) > 50 and seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    assert tensors_of(tmp_path / "one") == tensors_of(tmp_path / "many")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The files but for the index: segments of 16 bytes have other checksums than blocks."""
    return {name: data for name, data in contents(folder).items() if name.endswith(".safetensors")}


def test_without_a_layout_tensors_keep_theirs(sources: dict[str, Path], tmp_path: Path) -> None:
    for before, spec in LAYOUTS.items():
        report = reshard(sources[before], tmp_path / "b", overwrite=True, max_file_bytes=100)
        assert report.files > 3 and report.ranks == spec.layout(SHAPE).ranks
        check_same(tmp_path / "b")
        assert shardwise.open(tmp_path / "b")["model.int8"].layout == spec.layout(SHAPE)


def test_one_layout_for_all_leaves_copies_where_it_does_not_fit(sources: dict[str, Path], tmp_path: Path) -> None:
    report = reshard(sources["one rank"], tmp_path / "b", layout="on dp=2,tp=2: S(0), S(1)")
    assert set(report.unfit) == {"rest.scalar", "rest.row"}
    opened = shardwise.open(tmp_path / "b")
    assert opened["rest.row"].layout.local_shapes(3) == ((2,),), "cut by dp, in copies along tp"
    assert opened["rest.scalar"].layout.ranks == (0, 1, 2, 3)
    report = reshard(sources["one rank"], tmp_path / "c", layout="as grid(3+4, 6) over 5,2")
    assert set(report.unfit) == {"rest.scalar", "rest.row", "rest.empty"} and report.ranks == (2, 5)
    assert shardwise.open(tmp_path / "c")["rest.row"].layout.local_shapes(5) == ((5,),)


def test_a_plan_by_pattern(sources: dict[str, Path], tmp_path: Path) -> None:
    plan = ModelPlan(Mesh.of(dp=2, tp=2), {"model.*": "tp: S(0)", "rest.row": "dp: S(0)"})
    report = reshard(sources["columns over 2"], tmp_path / "b", plan=plan)
    check_same(tmp_path / "b")
    opened = shardwise.open(tmp_path / "b")
    assert opened["model.bool"].layout.local_shapes(1) == ((3, 6),)
    assert opened["rest.row"].layout.local_shapes(3) == ((2,),)
    assert opened["rest.scalar"].layout.ranks == (0, 1, 2, 3) == report.ranks


def test_hugging_face_folders_both_ways(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        shardwise.save({"a": values(torch.float32), "b": values(torch.int8), "step": 3}, tmp_path / "a")

    run_local(body, 1)
    report = reshard(tmp_path / "a", tmp_path / "hf", format="hf", max_file_bytes=100)
    assert report.left_out == ("step",) and report.files == 2 and report.ranks == ()
    names = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert names == [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), "model.safetensors.index.json"]
    reshard(tmp_path / "hf", tmp_path / "back", layout="S(1)", ranks=3)
    reshard(tmp_path / "back", tmp_path / "single", format="hf")
    reshard(tmp_path / "single" / "model.safetensors", tmp_path / "file", layout="S(0)", ranks=2, workers=2)
    for name in ("hf", "back", "single", "file"):
        opened = shardwise.open(tmp_path / name)
        assert torch.equal(opened["a"].read(), values(torch.float32).cpu()), name
        assert torch.equal(opened["b"].read(), values(torch.int8).cpu()), name


def test_a_damaged_source_is_found_by_whoever_needs_it(sources: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(sources["rows over 3"], tmp_path / "a")
    file = source / "rank00002-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for workers in (1, 2):
        with pytest.raises(CheckpointError, match=r"rank00002-00000.safetensors: tensor .* are damaged"):
            reshard(source, tmp_path / "b", layout="S(1)", ranks=2, workers=workers)
    assert not (tmp_path / "b").exists()
    reshard(source, tmp_path / "b", layout="S(1)", ranks=2, verify=False, resume=False)


def test_a_narrow_slice_keeps_within_little_memory(tmp_path: Path) -> None:
    whole = torch.arange(1 << 20, dtype=torch.int32).reshape(1 << 12, 1 << 8)

    def body(comm: Comm) -> None:
        shardwise.save({"w": whole}, tmp_path / "a")

    run_local(body, 1)
    reshard(tmp_path / "a", tmp_path / "b", layout="S(1)", ranks=128, max_buffer_bytes=1 << 20)
    assert torch.equal(shardwise.open(tmp_path / "b")["w"].read(), whole.cpu())


def test_an_unfinished_run_of_something_else_is_told(sources: dict[str, Path], tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source = shutil.copytree(sources["rows over 3"], tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        reshard(source, tmp_path / "b", layout="S(1)", ranks=2, progress=stop)
    assert leftovers(tmp_path / "b") == [work_folder(absolute_path(tmp_path / "b"))]
    with pytest.raises(CheckpointError, match="contains an unfinished reshard of something else: files to write was"):
        reshard(source, tmp_path / "b", layout="S(1)", ranks=3)
    report = reshard(source, tmp_path / "b", layout="S(1)", ranks=2)
    assert report.kept_bytes > 0 and not leftovers(tmp_path / "b")
    check_same(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        reshard(source, tmp_path / "c", layout="S(1)", ranks=2, progress=stop)
    os.utime(next(source.glob("*.safetensors")), ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"source state was .*resume=False \(--restart\)"):
        reshard(source, tmp_path / "c", layout="S(1)", ranks=2)
    assert reshard(source, tmp_path / "c", layout="S(1)", ranks=2, resume=False).kept_bytes == 0


MISTAKES = [
    ({"layout": "S(0)"}, "'S\\(0\\)' does not say which ranks it is for"),
    ({"layout": "R, S(0)", "ranks": 4}, "does not say which ranks it is for"),
    ({"layout": "S(0)", "ranks": 0}, "ranks must be at least 1, got 0"),
    ({"ranks": 4}, "4 ranks, but no layout for them"),
    ({"layout": "on tp=4: S(0)", "ranks": 2}, "2 ranks were requested, but the layout .* covers 4"),
    ({"layout": "on tp=4: P"}, "leaves a reduction pending"),
    ({"layout": "S(0)", "ranks": 2, "format": "hf"}, "stores every tensor whole; omit plan, layout and ranks"),
    ({"layout": "S(0)", "ranks": 2, "format": "zip"}, "unknown format 'zip'; known: shardwise"),
    ({"layout": "S(0)", "ranks": 2, "max_buffer_bytes": 10}, "max_buffer_bytes must be at least 1048576"),
    ({"format": "hf"}, "safetensors has no c128; use another format"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_told_and_leave_nothing(
    sources: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        reshard(sources["one rank"], tmp_path / "b", **options)
    assert list(tmp_path.iterdir()) == []


def test_places_that_are_taken(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="b exists; choose another name, or pass overwrite=True"):
        reshard(sources["one rank"], tmp_path / "b")
    with pytest.raises(CheckpointError, match="contains things other than a checkpoint"):
        reshard(sources["one rank"], tmp_path / "b", overwrite=True)
    with pytest.raises(CheckpointError, match="is both source and destination"):
        reshard(sources["one rank"], sources["one rank"], overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["reshard", *map(str, arguments)])


def test_the_command(sources: dict[str, Path], tmp_path: Path) -> None:
    result = run(sources["rows over 3"], tmp_path / "b", "--layout", "S(1)", "--ranks", 2)
    assert result.exit_code == 0, result.output
    assert "9 tensors, " in result.stdout and " for 2 ranks" in result.stdout
    assert "lack, or that do not fit: rest.scalar, rest.row" in result.stdout
    check_same(tmp_path / "b")
    (tmp_path / "plan.toml").write_text('mesh = "tp=2"\n[parameters]\n"model.*" = "S(0)"\n')
    result = run(tmp_path / "b", tmp_path / "c", "--plan", tmp_path / "plan.toml", "--json", "--memory", "8MB")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["format"], told["ranks"], told["tensors"], told["unfit"]) == ("shardwise", [0, 1], 9, [])
    check_same(tmp_path / "c")


def test_the_command_tells_mistakes_with_status_2(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('mesh = "tp=2"\n[parameters]\n"modle.*" = "S(0)"\n')
    for arguments, message in (
        ((tmp_path / "none", tmp_path / "b", "--layout", "S(0)", "--ranks", 2), "none: no such checkpoint"),
        ((sources["one rank"], tmp_path / "b", "--layout", "S(0"), "expected ')' after the dim"),
        ((sources["one rank"], tmp_path / "b", "--plan", tmp_path / "plan.toml"), "'modle.*' matches no parameter"),
        ((sources["one rank"], tmp_path / "b", "--plan", tmp_path / "none.toml"), "none.toml: No such file"),
        ((sources["one rank"], sources["one rank"].parent / "1"), "1 exists; choose another name"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in result.output and "Traceback" not in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]


def test_runs_of_a_box_are_its_elements_in_order() -> None:
    for sizes in ((5,), (2, 3), (2, 3, 2), (3, 1, 4), ()):
        box = Box((0,) * len(sizes), sizes)
        order = torch.arange(box.numel).reshape(sizes)
        for first in range(box.numel + 1):
            for last in range(first, box.numel + 1):
                found = [order[part.slices].reshape(-1) for part in split_into_boxes(sizes, first, last)]
                joined = torch.cat(found) if found else torch.zeros(0, dtype=torch.long)
                assert joined.tolist() == list(range(first, last)), (sizes, first, last)
                assert len(found) <= max(1, 2 * len(sizes) - 1)


def test_texts_of_layouts_and_shares_of_memory() -> None:
    assert spec_for("as chunk(1) over 0-1", None) == ChunkSpec(1, 2)
    assert spec_for("S(0) block(2)", 3).layout((4,)).ranks == (0, 1, 2)
    for limit in (1 << 20, 1 << 28, 1 << 33):
        for wanted in (1, 2, 64):
            workers, each = divide_memory(limit, wanted)
            assert 1 <= workers <= wanted and each >= 16 << 20
            assert workers == 1 or workers * each + (workers + 1) * (48 << 20) <= limit


def test_workers_do_without_torch() -> None:
    assert "torch" in sys.modules
    import subprocess

    code = "import sys, shardwise.checkpoint.reshard_copy; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False\n"
