"""Does the page "where to change what" name files that exist, and does it fit one screen?"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "where.md"
BASES = (ROOT, ROOT / "src" / "shardwise", ROOT / "tests")
MOST_ROWS, MOST_FILES = 40, 2  # a change that has to touch more files shows that the code is cut in the wrong place


def named_paths(text: str) -> list[str]:
    """Files and folders that a page names: from the root of the project, of the package, or of the tests."""
    return re.findall(r"`((?:[\w.]+/)*[\w.]+(?:/|\.(?:py|pyi|toml)))`", text)


def missing(text: str) -> list[str]:
    """Named files and folders that do not exist."""
    return [path for path in named_paths(text) if not any((base / path).exists() for base in BASES)]


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row of the first table, without its head."""
    lines = text.split("\n## ")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]


def test_every_named_file_exists() -> None:
    assert len(named_paths(PAGE.read_text())) > 60
    assert missing(PAGE.read_text()) == []


def test_a_task_opens_one_or_two_files_and_all_fit_a_screen() -> None:
    rows = table_rows(PAGE.read_text())
    assert 20 < len(rows) <= MOST_ROWS
    assert all(len(row) == 3 for row in rows)
    assert [row[0] for row in rows if len(named_paths(row[1])) > MOST_FILES and "releases" not in row[0]] == []


@pytest.mark.parametrize("path", ["tensor/gone.py", "tests/gone.py", "gone/", "_gone.pyi"])
def test_a_file_that_is_gone_is_found(path: str) -> None:
    assert missing(f"| a task | `{path}` | `tests/dense.py` |") == [path]
