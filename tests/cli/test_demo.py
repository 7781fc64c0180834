"""The demo's story on real processes: every chapter is right, and says so in words and in data."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.demo import run_chapters
from shardwise.cli.demo_story import (
    ResumeResult,
    TrainingResult,
    load_chapter,
    move_chapter,
    resume_chapter,
    training_chapter,
)
from shardwise.view import plain_text

HEADINGS = [
    "A tensor is split over a 2 x 2 mesh of ranks.",
    "The target has uneven rows and another order of ranks.",
    "The plan moves the fewest bytes.",
    "The same move on 4 processes: every element arrived.",
    "A transformer is sharded by a plan of 6 patterns; its code stays as it is.",
    "It is trained on 4 ranks, next to the same model unsharded: the losses are equal.",
    "One step moved ",
    "The checkpoint of 4 ranks (64 tensors, 2.6 MB) is resharded for 2, without starting any.",
    "2 ranks load it into the same plan on another mesh, tp=2: all 48 equal, bit by bit.",
    "They resume training where the 4 stopped: the losses are equal.",
]


@pytest.mark.usefixtures("forked_ranks")
def test_every_chapter_is_right_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    chapters = list(run_chapters(show=False))
    assert [c.heading[: len(h)] for c, h in zip(chapters, HEADINGS, strict=True)] == HEADINGS
    assert all(chapter.right for chapter in chapters)
    assert os.listdir(tmp_path) == []
    data: dict[str, Any] = {key: value for c in chapters for key, value in c.data.items()}
    check_numbers(json.loads(json.dumps(data)))
    assert "blocks.*.qkv.weight   S(0) groups(q,k,v)" in plain_text(chapters[4].lines)
    assert "optimizer.state.blocks.0.down.weight.exp_avg  dp=2,tp=2: R, S(1)" in plain_text(chapters[7].lines)


def check_numbers(data: dict[str, Any]) -> None:
    losses = data["training"]["losses"] + data["going_on"]["losses"]
    dense = data["training"]["dense_losses"] + data["going_on"]["dense_losses"]
    assert losses == pytest.approx(dense, abs=1e-9) and len(losses) == 12
    assert losses[11] < losses[7] < losses[0] / 2
    assert data["move_is_exact"] and data["transfer"]["moved_bytes"] == 240
    assert data["loaded"] == {"tensors": 48, "equal": 48}
    assert data["resharded"]["ranks"] == 2 and data["resharded"]["tensors"] == 64


def test_what_differs_is_called_so() -> None:
    weight = {"w": torch.ones(2)}
    trained = TrainingResult([1.0] * 8, [1.0] * 12, 0.0, [], weight)
    off = TrainingResult([1.0] * 7 + [1.001], [1.0] * 12, 0.0, [], weight)
    found = ResumeResult(weight, [1.0] * 4)
    assert (
        training_chapter(trained).right and load_chapter(trained, found).right and resume_chapter(trained, found).right
    )
    wrong = [
        move_chapter(False),
        training_chapter(off),
        training_chapter(TrainingResult(trained.losses, trained.dense_losses, 1e-3, [], weight)),
        load_chapter(trained, ResumeResult({"w": torch.tensor([1.0, 1.0000001])}, found.losses)),
        load_chapter(trained, ResumeResult({}, found.losses)),
        resume_chapter(trained, ResumeResult(weight, [1.0] * 3 + [0.9])),
    ]
    assert [chapter.right for chapter in wrong] == [False] * 6
    assert [chapter.heading.split(": ")[1] for chapter in wrong] == [
        "WRONG VALUES.",
        "THE LOSSES DIFFER.",
        "THE LOSSES DIFFER.",
        "ONLY 0 OF 1 EQUAL.",
        "ONLY 0 OF 1 EQUAL.",
        "THE LOSSES DIFFER.",
    ]
