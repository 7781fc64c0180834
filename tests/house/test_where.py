"""Does the page "where to change what" name files that exist?"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "where.md"


def named_paths(text: str) -> list[str]:
    """Files and folders that a page names from the root of the project."""
    return re.findall(r"`((?:src|tests)/[\w./]+)`", text)


def test_every_named_file_exists() -> None:
    paths = named_paths(PAGE.read_text())
    assert len(paths) > 20
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_every_step_of_a_call_exists() -> None:
    steps = re.findall(r"`((?:tensor|transfer|ops|checkpoint)/[\w/]+\.py)`", PAGE.read_text())
    assert len(steps) > 10
    assert [s for s in steps if not (ROOT / "src" / "shardwise" / s).exists()] == []
