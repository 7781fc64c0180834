"""Is a new format one class and one line? A toy format is saved, opened, loaded, resharded and inspected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import reshard
from shardwise.checkpoint.files import PinnedFolder
from shardwise.checkpoint.formats import FORMATS
from shardwise.checkpoint.formats.base import (
    BoxAssignment,
    FileItem,
    FilePlan,
    Format,
    Holder,
    ItemSums,
    PlannedFile,
    SaveRequest,
)
from shardwise.checkpoint.index import FileEntry, Index, StoredCut, TensorEntry, checksum
from shardwise.cli.main import app
from shardwise.geometry import find_dtype


class ToyPlan(FilePlan):
    """One file of bare bytes for each rank."""

    def __init__(self, request: SaveRequest) -> None:
        self.tensors, self.tree = request.tensors, request.tree
        self.assigned = BoxAssignment(request.tensors, request.ranks)
        self.cuts, self.ranks = self.assigned.cuts, self.assigned.ranks

    def files_of(self, rank: int) -> Sequence[PlannedFile]:
        items, position = [], 0
        for tensor, box in self.assigned.parts_of(rank) if rank in self.ranks else ():
            items.append(FileItem(tensor, box, position))
            position += self.bytes_of(items[-1])
        return [PlannedFile(f"{rank}.toy", position, items)] if items else []

    def holder_of(self, item: FileItem, rank: int) -> Holder | None:
        return self.assigned.parts_of(rank)[item.tensor, item.box]

    def finish_file(self, file: PlannedFile, sums: Sequence[ItemSums]) -> list[tuple[int, bytes]]:
        return []

    def make_index(self, written: Sequence[tuple[PlannedFile, Sequence[ItemSums]]]) -> tuple[str, bytes] | None:
        rows = [
            [self.tensors[i.tensor].name, self.box_of(i).offsets, self.box_of(i).sizes, number, i.begin, sums]
            for number, (file, found) in enumerate(written)
            for i, (sums, _) in zip(file.items, found, strict=True)
        ]
        tensors = [[t.name, t.dtype.name, t.layout.shape] for t in self.tensors]
        files = [[file.name, file.bytes] for file, _ in written]
        return "toy.json", json.dumps([files, tensors, rows, self.tree]).encode()


class ToyFormat(Format):
    """Bare bytes, and a list of what is where."""

    name = "toy"
    title = "a toy"
    index_names = ("toy.json",)
    suffixes = (".toy",)

    def read_index(self, folder: PinnedFolder, index_name: str) -> tuple[Index, str]:
        data = folder.read(index_name)
        files, tensors, rows, tree = json.loads(data)
        entries = {}
        for name, dtype, shape in tensors:
            own = [row for row in rows if row[0] == name]
            offsets, sizes = (np.array([r[i] for r in own], np.int64).reshape(len(own), len(shape)) for i in (1, 2))
            cut = StoredCut(tuple(shape), offsets, sizes)
            columns = ([r[i] for r in own] for i in (3, 4, 5))
            entries[name] = TensorEntry(name, find_dtype(dtype), cut, *columns)
        return Index([FileEntry(name, size, 0, None) for name, size in files], entries, tree), checksum(data)

    def plan_files(self, request: SaveRequest) -> ToyPlan:
        return ToyPlan(request)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FORMATS.append(ToyFormat())
    yield
    FORMATS.pop()


WHOLE = torch.arange(24.0).reshape(6, 4)


def save_as_toy(comm: Comm, path: Path, async_op: bool) -> None:
    state = {"w": shardwise.shard(WHOLE, ChunkSpec(0, comm.world_size)), "step": 3}
    saving = shardwise.save(state, path, format="toy", async_op=async_op)
    if saving is not None:
        saving.wait()


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("async_op", [False, True])
def test_a_toy_format_is_saved_opened_loaded_and_resharded(tmp_path: Path, async_op: bool) -> None:
    run_local(save_as_toy, 3, tmp_path / "a", async_op)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["0.toy", "1.toy", "2.toy", "toy.json"]
    with shardwise.open(tmp_path / "a") as opened:
        opened.verify()
        assert torch.equal(opened["w"].read(), WHOLE.cpu()) and opened.values() == {"step": 3}
    for source, target, format in (("a", "b", "shardwise"), ("b", "c", "toy"), ("c", "d", "dcp"), ("d", "e", "toy")):
        report = reshard(tmp_path / source, tmp_path / target, layout="S(1)", ranks=2, format=format)
        assert (report.format, report.files) == (format, 2)
    state = shardwise.load({"w": torch.zeros(6, 4), "step": 0}, tmp_path / "e")
    assert torch.equal(state["w"], WHOLE) and state["step"] == 3
    run_local(save_as_toy, 2, tmp_path / "e", async_op)
    assert len(list((tmp_path / "e").iterdir())) == 3, "a checkpoint of a registered format is replaced"


@pytest.mark.usefixtures("toy")
def test_commands_know_a_toy_format(tmp_path: Path) -> None:
    run_local(save_as_toy, 2, tmp_path / "a", False)
    found = CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--verify"])
    assert found.exit_code == 0 and "format      a toy" in found.stdout and "verified" in found.stdout
    data = (tmp_path / "a" / "1.toy").read_bytes()
    (tmp_path / "a" / "1.toy").write_bytes(data[:-1] + b"?")
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--verify"]).exit_code == 1


def test_without_the_line_in_the_table_it_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown format 'toy'; known: shardwise, dcp, hf"):
        shardwise.save({"w": WHOLE}, tmp_path / "a", format="toy")


def save_any(comm: Comm, path: Path, format: str) -> None:
    shardwise.save({"w": shardwise.shard(WHOLE, ChunkSpec(1, comm.world_size))}, path, format=format)


@pytest.mark.parametrize("format", ["shardwise", "dcp", "hf"])
def test_a_save_and_a_reshard_write_the_same_bytes(tmp_path: Path, format: str) -> None:
    run_local(save_any, 2, tmp_path / "saved", format)
    run_local(save_any, 2, tmp_path / "source", "shardwise")
    reshard(tmp_path / "source", tmp_path / "written", format=format)
    saved, written = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("saved", "written"))
    assert saved == written
