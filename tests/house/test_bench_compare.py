"""Does `python -m bench compare` find what changed, beside the noise of several runs?"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.compare import compare, read
from bench.report import Figures, save

COLUMNS = ("case", "ms", "bytes", "way")


def write(folder: Path, run: str, small: float, large: float) -> str:
    rows = [["move", small, 4, "ours"], ["move", large, 4, "ours"], ["move", 2.0, 4, "theirs"]]
    save("move", [Figures("times", COLUMNS, rows)], folder / run)
    return str(folder / run)


def test_ratios_are_shown_with_their_noise(tmp_path: Path) -> None:
    before = [write(tmp_path, f"before{number}", 1.0 + 0.1 * number, 10.0 + number) for number in range(3)]
    after = [write(tmp_path, f"after{number}", 2.2, 11.0) for number in range(2)]
    found = compare(read(",".join(before)), read(",".join(after)))
    assert [[row[0], row[4], row[6]] for row in found.rows] == [
        ["move: times: move, ours", pytest.approx(2.0), "more"],
        ["move: times: move, ours (2)", pytest.approx(1.0), ""],
        ["move: times: move, theirs", 1.0, ""],
    ]
    assert [row[5] for row in found.rows] == [pytest.approx(0.2 / 1.1), pytest.approx(2 / 11), 0.0]


def test_a_change_within_the_noise_is_not_marked(tmp_path: Path) -> None:
    noisy = ",".join(write(tmp_path, f"n{number}", 1.0 + number, 10.0) for number in range(2))
    quiet = write(tmp_path, "quiet", 1.0, 10.0)
    assert {row[6] for row in compare(read(noisy), read(quiet)).rows} == {""}
    single = compare(read(write(tmp_path, "single", 2.0, 10.0)), read(quiet)).rows
    assert [row[5:] for row in single] == [[None, "less"], [None, ""], [None, ""]]


def test_the_command_compares_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = write(tmp_path, "a", 1.0, 10.0), write(tmp_path, "b", 1.0, 20.0)
    save("other", [Figures("more", ("case", "ms"), [["x", 1.0]])], tmp_path / "b")
    assert main(["compare", before, after]) == 0
    out = capsys.readouterr().out
    assert "After / before" in out and "Only in one of them: other: more: x" in out
    with pytest.raises(SystemExit):
        main(["compare", before])
    assert "compare takes two results" in capsys.readouterr().err
