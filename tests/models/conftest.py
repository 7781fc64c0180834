"""Models and frameworks of others: skipped where they are not installed, with their warnings left to them.

With SHARDWISE_MODELS_TABLE=docs/models.md the table of families and layouts is written from the results. They are
noted in build/models.jsonl, so that a run of some tests replaces theirs and keeps the others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.models.environment import make_torchvision_importable
from tests.models.every_family import write_families
from tests.models.families import write_table

TABLE = os.environ.get("SHARDWISE_MODELS_TABLE")
NOTES = Path(__file__).parents[2] / "build" / "models.jsonl"


make_torchvision_importable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cell = {name: str(value) for name, value in report.user_properties}
    if TABLE and report.when == "call" and ("family" in cell or "kind" in cell):
        NOTES.parent.mkdir(exist_ok=True)
        with NOTES.open("a") as file:
            file.write(json.dumps({**cell, "outcome": report.outcome}) + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not TABLE or not NOTES.exists() or hasattr(session.config, "workerinput"):
        return
    notes = [json.loads(line) for line in NOTES.read_text().splitlines()]
    cells = {(note["kind"], note["cell"]): note for note in notes if "kind" in note}
    rows = {(note["family"], note["layout"]): note for note in notes if "family" in note}
    shown = {key: note.get("shown", "") if note["outcome"] == "passed" else "" for key, note in rows.items()}
    if shown:
        Path(TABLE).write_text(write_table(shown) + write_families(cells))
