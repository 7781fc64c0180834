"""What pytest does differently where the tests run on a GPU: tests for the CPU alone are skipped, with a reason."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import pytest

from tests.device import cpu_reason, skip_reason


class SkippedFile(pytest.File):
    """A test file that is skipped before it is imported: what it imports may need the CPU."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(skip_reason(self.path.name, "") or "", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Skip the files that are about the CPU, their tests and their doctests."""
    found = yield
    if not found or skip_reason(file_path.name, "") is None:
        return found
    return [SkippedFile.from_parent(parent, path=file_path)]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip the tests that are about the CPU."""
    for item in items:
        reason = skip_reason(item.path.name, item.name)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that turns out to need host tensors."""
    report = yield
    reason = cpu_reason(report.longreprtext) if report.failed else None
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, f"Skipped: {reason}")
    return report
