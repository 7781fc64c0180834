"""The examples as a user starts them: by python, by torchrun, and with a number of ranks that does not fit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked, run_module, run_script
from tools.notebooks import run_notebook

ROOT = Path(__file__).parents[2]
SETTINGS = {"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_python(folder: Path, *words: str, **settings: str) -> tuple[int, str]:
    """Run `python words...`; a warning of ours or for users is an error."""
    return run_forked(run_script, *words, folder=folder, settings=SETTINGS | {"TMPDIR": str(folder)} | settings)


def run_torchrun(folder: Path, *words: str) -> tuple[int, str]:
    """Run `torchrun words...` on this machine alone."""
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node", *words)
    return run_forked(run_module, *words, folder=folder, settings=SETTINGS | {"TMPDIR": str(folder)}, warning="default")


def example(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


def check(status: int, out: str, steps: int) -> None:
    """Every step has two equal losses, and a bar was shown."""
    assert status == 0, out
    pairs = re.findall(r"^step +\d+  sharded (\S+)  whole (\S+)", out, re.MULTILINE)
    assert len(pairs) == steps, out
    assert all(abs(float(ours) - float(dense)) < 2e-9 for ours, dense in pairs), out
    assert "training ━" in out and "100%" in out, out


def test_python_runs_an_example_and_leaves_no_file(tmp_path: Path) -> None:
    status, out = run_python(tmp_path, example("train_transformer"), "--ranks", "2", "--steps", "4")
    check(status, out, 4)
    assert "saved, and loaded with every parameter cut over 2 ranks" in out
    assert [name for name in os.listdir(tmp_path) if not name.startswith("torchinductor")] == []


def test_torchrun_runs_an_example(tmp_path: Path) -> None:
    status, out = run_torchrun(tmp_path, "2", example("recsys_embeddings"), "--steps", "4")
    check(status, out, 4)
    assert "the tables move to the layout of a planner" in out


def test_a_number_of_ranks_that_does_not_fit_is_told_in_one_line() -> None:
    names = runpy.run_path(example("train_transformer"))
    tensor_parallel, fully_sharded = names["tensor_parallel"], names["fully_sharded"]
    with pytest.raises(SystemExit, match="3 ranks do not fill a mesh with tp=2; pick a --tp dividing 3, or start"):
        tensor_parallel(3, 2)
    assert str(tensor_parallel(4, 1).mesh) == "dp=4,tp=1"
    with pytest.raises(SystemExit, match="3 ranks cut the 4 heads of attention apart; start ranks whose number"):
        fully_sharded(3)


def test_torchrun_starts_the_example_of_hosts_with_a_device_mesh(tmp_path: Path) -> None:
    """Twice, with one host of two devices and, in the variables that torchrun sets, of one: the losses are the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    losses = []
    for status, out in (
        run_torchrun(tmp_path, "2", example("torchrun_hosts")),
        run_python(tmp_path, example("torchrun_hosts"), **alone),
    ):
        assert status == 0, out
        losses.append(re.findall(r"^step \d  loss (\S+)  mesh \(1, \d\)", out, re.MULTILINE))
    assert len(losses[0]) == 3
    assert [round(float(a) - float(b), 5) for a, b in zip(*losses, strict=True)] == [0.0] * 3


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "gallery").glob("*.py")), ids=lambda path: path.stem)
def test_a_program_of_the_gallery_computes_what_one_rank_computes(path: Path, tmp_path: Path) -> None:
    if "import transformers" in path.read_text() and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: tests/models/test_gallery.py runs this program")
    status, out = run_python(tmp_path, str(path))
    assert status == 0, out
    assert out.splitlines()[-1] == "equal: True", out


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_code_gives(path: Path) -> None:
    """`python -m tools.notebooks` writes the outputs. Each has pictures, and is in the list of examples."""
    stored = json.loads(path.read_text())
    assert [cell["outputs"] for cell in cells_of(run_notebook(stored))] == [
        cell["outputs"] for cell in cells_of(stored)
    ]
    pictures = [o for cell in cells_of(stored) for o in cell["outputs"] if "text/html" in o.get("data", {})]
    assert pictures and f"(../examples/notebooks/{path.name})" in (ROOT / "docs" / "examples.md").read_text()


def cells_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_program_of_the_gallery_is_short_and_on_its_page() -> None:
    page, programs = (ROOT / "docs" / "examples.md").read_text(), list((ROOT / "examples" / "gallery").glob("*.py"))
    assert len(programs) >= 10
    assert [p.name for p in programs if f"(../examples/gallery/{p.name})" not in page] == []
    assert [p.name for p in programs if not 30 <= len(p.read_text().splitlines()) <= 80] == []
