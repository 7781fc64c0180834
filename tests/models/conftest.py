"""Models and frameworks of others: skipped where they are not installed, with their warnings left to them.

With SHARDWISE_MODELS_TABLE=docs/models.md the table of families and layouts is written from the results.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.models.environment import make_torchvision_importable
from tests.models.every_family import write_families
from tests.models.families import write_table

RESULTS: dict[tuple[str, str], str] = {}
CELLS: dict[tuple[str, str], dict[str, str]] = {}


make_torchvision_importable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cell = dict(report.user_properties)
    if report.when == "call" and "family" in cell:
        RESULTS[str(cell["family"]), str(cell["layout"])] = str(cell.get("shown", "")) if report.passed else ""
    if report.when == "call" and "kind" in cell:
        found = {name: str(value) for name, value in cell.items()}
        CELLS[found["kind"], found["cell"]] = {**found, "outcome": report.outcome}


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("SHARDWISE_MODELS_TABLE")
    if path and RESULTS:
        Path(path).write_text(write_table(RESULTS) + write_families(CELLS))
