"""How are the files of a checkpoint written? In large pages, whatever the parts, over memory of the old files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint import files


def test_parts_of_a_file_are_written_in_any_size_at_any_place(tmp_path: Path) -> None:
    """Large parts end with a large page of the file, and what is left is written with what follows."""
    generator, page = np.random.default_rng(0), files.LARGE_PAGE_BYTES
    lengths = [10, 3 * page + 5, 7, 1 << 20, page - 3, 2 * page, 100, page + 1]
    for lasting in (True, False):
        path, expected, position = tmp_path / str(lasting), bytearray(), 64
        expected += bytes(64)
        with files.PositionedFile(path, create=True) as output:
            for number, length in enumerate(lengths):
                data = generator.integers(0, 256, length, np.uint8)
                if number == 5:  # a gap
                    position += 1000
                    expected += bytes(1000)
                output.write(position, data.data, lasting=lasting)
                expected += data.tobytes()
                position += length
                if not lasting:
                    data[:] = 0
            output.write(0, b"head")
        expected[:4] = b"head"
        assert path.read_bytes() == expected


def test_writes_that_the_system_cuts_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        files, "_write_parts", lambda handle, parts, position: os.pwrite(handle, parts[0][:1000], position)
    )
    data = np.arange(3_000_000, dtype=np.uint8)
    with files.PositionedFile(tmp_path / "x", create=True) as output:
        output.write(0, b"abc")
        output.write(3, data.data, lasting=True)
        output.write(3 + len(data), b"end")
    assert (tmp_path / "x").read_bytes() == b"abc" + data.tobytes() + b"end"


def test_a_save_over_a_checkpoint_lets_the_system_forget_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WORTH_DROPPING", 1)
    dropped: list[str] = []

    def drop(path: Path) -> None:
        dropped.append(path.name)
        files.drop_from_cache(path)

    monkeypatch.setattr(folders, "drop_from_cache", drop)
    state = {"x": torch.arange(4.0)}
    for turn in (1.0, 2.0):
        shardwise.save({"x": state["x"] * turn}, tmp_path / "c")
    files.drop_from_cache(tmp_path / "none")
    into = {"x": torch.zeros(4)}
    shardwise.load(into, tmp_path / "c")
    assert torch.equal(into["x"], state["x"] * 2) and len(dropped) == 2 and dropped[0] == dropped[1]
