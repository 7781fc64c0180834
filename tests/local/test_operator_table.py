"""Does docs/operator_table.md say what the registry holds?"""

from __future__ import annotations

from pathlib import Path

from shardwise.ops.table import page

PAGE = Path(__file__).parents[2] / "docs" / "operator_table.md"


def test_the_page_is_current() -> None:
    fresh = "run `python -m shardwise.ops.table docs/operator_table.md`"
    assert PAGE.read_text() == page(), fresh
