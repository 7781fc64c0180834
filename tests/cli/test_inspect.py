"""Does `shardwise inspect` list what a checkpoint holds, and find everything that is broken?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Replicate, Shard, run_local
from shardwise.checkpoint.formats.shardwise import INDEX_NAME
from shardwise.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def data_of(*arguments: object, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same tensors as a checkpoint `c` and as a Hugging Face folder `hf`."""
    folder = tmp_path_factory.mktemp("made")

    def write(comm: Comm) -> None:
        w = shardwise.shard(torch.arange(24.0).reshape(6, 4), ChunkSpec(0, 4))
        mesh = MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(1)))
        v = shardwise.shard(torch.arange(64).reshape(8, 8).to(torch.bfloat16), mesh)
        tensors = {"w": w, "v": v, "bias": torch.ones(5)}
        shardwise.save({"model": tensors, "step": 100, "loss": float("nan"), "name": "run"}, folder / "c")
        shardwise.save_hf(tensors, folder / "hf", max_file_bytes=150)

    run_local(write, 4)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "c", tmp_path / "c"))


def test_all_there_is_to_know_is_listed(made: Path) -> None:
    out = run(made / "c").stdout.splitlines()
    assert out[1:6] == [
        "format      shardwise",
        "tensors     3, 244 B in 4 files",
        "values      3",
        "held        4 ranks, 84 B to 116 B each, mean 108 B",
        "written     4 ranks, 32 B to 96 B each, mean 61 B",
    ]
    assert out[7:11] == [
        "tensor      dtype  shape   layout                 bytes",
        "model.w     f32    (6, 4)  as chunk(0) over 0-3    96 B",
        "model.v     bf16   (8, 8)  on dp=2,tp=2: R, S(1)  128 B",
        "model.bias  f32    (5,)    on all=4: R             20 B",
    ]
    assert out[12:14] == ["rank   held  written", "   0  116 B     96 B"]
    assert out[18:20] == ["file                         bytes  tensors", "rank00000-00000.safetensors  288 B        2"]
    assert out[-3:] == ["step   100", "loss   nan", "name   'run'"]


def test_json_holds_the_same_and_nothing_else_is_printed(made: Path) -> None:
    data = data_of(made / "c", "--verify")
    assert list(data)[:6] == ["path", "format", "count", "bytes", "tensors", "values"]
    assert list(data)[6:] == ["opaque", "ranks", "files", "verified"]
    assert (data["format"], data["count"], data["bytes"]) == ("shardwise", 3, 244)
    assert data["tensors"][1] == {
        "name": "model.v",
        "dtype": "bf16",
        "shape": [8, 8],
        "layout": "on dp=2,tp=2: R, S(1)",
        "bytes": 128,
        "files": ["rank00000-00000.safetensors", "rank00003-00000.safetensors"],
    }
    assert data["values"] == {"step": 100, "loss": {"float": "nan"}, "name": "run"}
    assert data["ranks"][3] == {"rank": 3, "held_bytes": 84, "written_bytes": 64}
    assert sum(r["written_bytes"] for r in data["ranks"]) == 244
    assert data["verified"] == {"ok": True, "checked_bytes": 244, "problems": []}


def test_a_hugging_face_folder_and_one_of_its_files(made: Path) -> None:
    data = data_of(made / "hf", "--verify")
    assert (data["format"], data["count"], data["bytes"], data["ranks"]) == ("Hugging Face", 3, 244, [])
    assert {t["layout"] for t in data["tensors"]} == {None}
    assert data["verified"] == {"ok": True, "checked_bytes": 0, "problems": []}
    single = data_of(made / "hf" / "model-00001-of-00002.safetensors")
    assert (single["format"], single["count"]) == ("safetensors file", 1)
    assert "it stores no checksums of its bytes" in run(made / "hf", "--verify").stdout


def test_a_very_long_name_does_not_widen_the_table(tmp_path: Path) -> None:
    shardwise.save({"n" * 5000: torch.ones(2)}, tmp_path / "c")
    result = run(tmp_path / "c")
    assert max(map(len, result.stdout.splitlines())) < 200 and "n" * 119 + "…" in result.stdout


def test_names_order_and_limit(made: Path) -> None:
    def names(*arguments: str) -> list[str]:
        return [t["name"] for t in data_of(made / "c", *arguments)["tensors"]]

    assert names("--sort", "name") == ["model.bias", "model.v", "model.w"]
    assert names("--sort", "bytes") == ["model.v", "model.w", "model.bias"]
    assert names("--name", "*.w", "--name", "*.b*") == ["model.w", "model.bias"]
    assert names("--sort", "bytes", "--limit", "1") == ["model.v"]
    assert "and 2 more tensors; --limit 0 shows all" in run(made / "c", "--limit", "1").stdout
    assert "more tensors" not in run(made / "c", "--limit", "0").stdout
    none = run(made / "c", "--name", "decoder.*")
    assert (none.exit_code, none.stdout) == (2, "")
    assert "no tensor is called decoder.*; it has ['model.w'," in none.stderr


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def test_every_problem_is_found(copy: Path) -> None:
    flip(copy / "rank00000-00000.safetensors", -1)
    flip(copy / "rank00002-00000.safetensors", 20)
    (copy / "rank00003-00000.safetensors").unlink()
    problems = data_of(copy, "--verify", status=1)["verified"]["problems"]
    assert [(p["file"], p["tensor"]) for p in problems] == [
        ("rank00002-00000.safetensors", None),
        ("rank00003-00000.safetensors", None),
        ("rank00002-00000.safetensors", "model.w"),
        ("rank00000-00000.safetensors", "model.v"),
        ("rank00003-00000.safetensors", "model.v"),
    ]
    texts = [p["problem"] for p in problems]
    assert texts[0] == "the header is damaged: its checksum differs"
    assert texts[1] == "cannot be read: No such file or directory"
    assert texts[2] == "[4:6, 0:4] is lost with its file"
    assert texts[3].endswith("are damaged: their checksum differs; 1 of 1 blocks of [0:8, 0:4]")
    result = run(copy, "--verify")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "broken: 5 problems\n  rank00002-00000.safetensors: the header is damaged" in result.stdout
    assert run(copy).exit_code == 0, "without --verify nothing but the index is read"


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / INDEX_NAME).read_text())
    del content["index_sum"]
    change(content)
    (folder / INDEX_NAME).write_text(json.dumps(content))


def test_an_index_that_disagrees_with_the_files_is_found(copy: Path) -> None:
    def swap(content: dict[str, Any]) -> None:  # same bytes, same checksums, but said to be of another type
        content["tensors"]["model.v"][0] = "float16"

    forged(copy, swap)
    problems = data_of(copy, "--verify", status=1)["verified"]["problems"]
    assert [p["problem"].split(" at byte")[0] for p in problems] == ["the header has no f16[8, 4]"] * 2


def test_a_damaged_layout_is_found_and_the_rest_is_listed(copy: Path) -> None:
    forged(copy, lambda content: content["cuts"][0]["spec"].update(kind="what"))
    data = data_of(copy, "--verify", status=1)
    assert data["tensors"][0]["layout"] == "damaged"
    assert [p["tensor"] for p in data["verified"]["problems"]] == ["model.w"]


def test_an_index_that_cannot_be_read(copy: Path) -> None:
    forged(copy, lambda content: content["cuts"][0].update(shape=[7, 4]))
    plain, verified = run(copy), run(copy, "--verify")
    assert (plain.exit_code, plain.stdout, verified.exit_code) == (2, "", 1)
    assert "the boxes of tensor 'model.w' do not tile it" in plain.stderr
    assert "the boxes of tensor 'model.w' do not tile it" in verified.stdout
    data = data_of(copy, "--verify", status=1)
    assert not data["verified"]["ok"] and "do not tile it" in data["verified"]["problems"][0]["problem"]


def test_paths_that_hold_no_checkpoint(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    (tmp_path / "half.safetensors").write_bytes(b"12345")
    expected = "expected a folder with shardwise.index.json (shardwise), .metadata (torch.distributed.checkpoint)"
    cases = {
        tmp_path / "none": "no such file or folder; expected",
        made / "cc": f"no such file or folder; near: {made / 'c'}; expected",
        made: f"a folder with c/, hf/, not a checkpoint; inside are {made / 'c'}, {made / 'hf'}; expected",
        tmp_path / "empty": "an empty folder; expected",
        tmp_path / "notes": "a folder with a.txt, not a checkpoint; expected",
        tmp_path / "notes" / "a.txt": "a file of 5 bytes, not a checkpoint; expected",
        tmp_path / "half.safetensors": "a file of 5 bytes that claims a header",
        made / "c" / INDEX_NAME: f"a file of a checkpoint; pass its folder, {made / 'c'}",
    }
    for path, text in cases.items():
        result = run(path)
        assert (result.exit_code, result.stdout) == (2, ""), path
        assert result.stderr.startswith(f"error: {path}: {text}"), result.stderr
        assert ("; expected" not in text) or expected in result.stderr


def test_torch_is_not_loaded(made: Path) -> None:
    code = "import sys; from shardwise.cli.main import app; app(standalone_mode=False); print('torch' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code, "inspect", str(made / "c"), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-1] == "False"
