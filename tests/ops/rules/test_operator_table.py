"""Does docs/operator_table.md say what the registry holds?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise._torch import TORCH_RELEASE

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "operator_table.md"


@pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="the page has the operators of the release in constraints.txt")
def test_the_page_is_current(tmp_path: Path) -> None:
    """Written in a process of its own: other tests register rules too."""
    fresh = tmp_path / "operator_table.md"
    command = [sys.executable, str(ROOT / "tools" / "operator_table.py"), str(fresh)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    assert PAGE.read_text() == fresh.read_text(), "run `python tools/operator_table.py docs/operator_table.md`"
