"""A plugin of pytest that notes which test runs which line, threads included, for `tools.mutants`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

SRC = Path(__file__).parents[1] / "src"
_running = coverage.Coverage(data_file=None, source=[str(SRC)], config_file=False, concurrency=["thread"])
_seconds: dict[str, float] = {}


def pytest_load_initial_conftests() -> None:
    _running.start()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running.switch_context(item.nodeid)
    begin = time.perf_counter()
    yield
    _seconds[item.nodeid] = time.perf_counter() - begin
    _running.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails without a mutation can kill none."""
    if report.failed:
        _seconds.pop(report.nodeid, None)


def pytest_sessionfinish() -> None:
    _running.stop()
    data = _running.get_data()
    tests = sorted(_seconds)
    numbers = {test: number for number, test in enumerate(tests)}
    lines = {
        str(Path(path).relative_to(SRC.parent)): {
            line: sorted(numbers[test] for test in found if test in numbers)
            for line, found in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    record = {"tests": tests, "seconds": [_seconds[test] for test in tests], "lines": lines}
    Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps(record))
