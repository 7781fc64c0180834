"""Does `shardwise clean` remove what was left, only after a yes, and never the last complete checkpoint?"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import shardwise
from shardwise import CheckpointError
from shardwise.checkpoint import clean
from shardwise.cli.main import app


def run(*arguments: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["clean", *map(str, arguments)], input=answer)


def data_of(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the checkpoint `c`, a killed save of it, a replaced one, a killed reshard of `d`, and a note."""
    shardwise.save({"x": torch.ones(4)}, tmp_path / "c")
    (tmp_path / ".c.saving-12ab").mkdir()
    (tmp_path / ".c.saving-12ab" / "rank00000-00000.safetensors").write_bytes(b"x" * 1000)
    shutil.copytree(tmp_path / "c", tmp_path / ".c.replaced-77")
    (tmp_path / ".d.resharding-work").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


ALL = [".c.replaced-77", ".c.saving-12ab", ".d.resharding-work", "c", "notes.txt"]


def test_a_dry_run_lists_and_changes_nothing(runs: Path) -> None:
    out = run(runs / "c", "--dry-run")
    assert out.exit_code == 0
    rows = [row.split() for row in out.stdout.splitlines()]
    assert rows[0] == ["folder", "kind", "last", "change", "bytes"]
    assert [(Path(r[0]).name, r[1]) for r in rows[1:]] == [(".c.replaced-77", "replaced"), (".c.saving-12ab", "saving")]
    assert rows[2][-2:] == ["1.0", "kB"] and rows[2][-3] == "ago"
    assert names(runs) == ALL


def test_removed_with_yes_and_by_answer_only(runs: Path) -> None:
    no = run(runs / "c", answer="n\n")
    assert (no.exit_code, names(runs)) == (1, ALL)
    assert "remove 2 folders of" in no.stderr and "nothing was changed" in no.stderr
    silent = run(runs / "c", answer="")
    assert (silent.exit_code, names(runs)) == (2, ALL)
    assert "there was no answer; pass --yes" in silent.stderr
    yes = run(runs / "c", answer="y\n")
    assert (yes.exit_code, names(runs)) == (0, [".d.resharding-work", "c", "notes.txt"])
    assert yes.stdout.splitlines()[-1].startswith("removed 2 folders of ")
    again = run(runs / "c")
    assert (again.exit_code, again.stdout) == (0, "nothing to clean\n")
    assert shardwise.open(runs / "c")["x"][:].tolist() == [1, 1, 1, 1]


def test_all_checkpoints_of_a_folder(runs: Path) -> None:
    data = data_of(runs, "--yes")
    assert set(data) == {"path", "done", "unfinished", "leftovers"}
    assert (data["path"], data["done"], data["unfinished"]) == (str(runs), True, [])
    found = [(Path(e["checkpoint"]).name, e["kind"], e["kept"], e["removed"]) for e in data["leftovers"]]
    assert found == [("c", "replaced", None, True), ("c", "saving", None, True), ("d", "resharding", None, True)]
    assert set(data["leftovers"][0]) >= {"path", "bytes", "seconds_since_change"}
    assert names(runs) == ["c", "notes.txt"]


def test_a_dry_run_in_json_removes_nothing(runs: Path) -> None:
    data = data_of(runs, "--dry-run")
    assert not data["done"] and not any(entry["removed"] for entry in data["leftovers"])
    assert names(runs) == ALL


def test_a_commit_that_was_cut_short_is_completed(runs: Path) -> None:
    shutil.rmtree(runs / ".c.saving-12ab")
    os.rename(runs / "c", runs / ".c.saving-77")
    asked = run(runs / "c", answer="n\n")
    assert "killed while it was committed" in asked.stdout and "complete c and remove 1 folder of" in asked.stderr
    assert not (runs / "c").exists()
    data = data_of(runs / "c", "--yes")
    assert data["unfinished"] == [str(runs / "c")]
    assert names(runs) == [".d.resharding-work", "c", "notes.txt"]
    assert shardwise.open(runs / "c")["x"][:].tolist() == [1, 1, 1, 1]


def test_a_complete_save_without_a_checkpoint_is_kept(runs: Path) -> None:
    os.rename(runs / "c", runs / ".c.saving-34cd")
    shutil.rmtree(runs / ".c.replaced-77")
    result = run(runs / "c", "--yes")
    assert result.exit_code == 0
    assert "kept: .c.saving-34cd: it is a complete checkpoint and c is not: rename it" in result.stdout
    assert names(runs) == [".c.saving-34cd", ".d.resharding-work", "notes.txt"]


def test_nothing_complete_is_removed_next_to_a_damaged_checkpoint(runs: Path) -> None:
    file = runs / "c" / "rank00000-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = run(runs / "c", "--yes")
    assert result.exit_code == 0
    assert "kept: .c.replaced-77: c is damaged (" in result.stdout and "their checksum differs" in result.stdout
    assert names(runs) == [".c.replaced-77", ".d.resharding-work", "c", "notes.txt"]
    with pytest.raises(CheckpointError, match=r"c is damaged, so \.c\.replaced-77 may be needed and nothing"):
        clean(runs / "c")
    file.write_bytes(data)
    assert [p.name for p in clean(runs / "c")] == [".c.replaced-77"]


def test_a_half_written_hugging_face_folder_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / ".m.saving-1").mkdir()
    (tmp_path / ".m.saving-1" / "model.safetensors").write_bytes(b"\x40" + bytes(20))
    assert run(tmp_path / "m", "--yes").exit_code == 0
    assert names(tmp_path) == []


def test_paths_that_name_nothing(tmp_path: Path) -> None:
    nothing = run(tmp_path / "none")
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert "no such file or folder, and nothing left beside it" in nothing.stderr
    (tmp_path / "file").write_text("x")
    assert "a file; pass the folder of a checkpoint" in run(tmp_path / "file").stderr
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty").stdout == "nothing to clean\n"
