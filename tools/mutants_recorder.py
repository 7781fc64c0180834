"""A plugin of pytest that notes which test runs which line, threads and spawned ranks included, for `tools.mutants`.

Lines of this process are noted for the test that runs. A world of ranks serves all tests of a file, so what spawned
processes run is noted for the file as a whole.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

SRC = Path(__file__).parents[1] / "src"
_STARTER = """
import multiprocessing.util
import os

import coverage

data = os.path.join(os.environ["MUTANTS_SPAWNED"], "lines")
running = coverage.Coverage(
    data_file=data, data_suffix=True, source=[{src!r}], config_file=False, concurrency=["thread"]
)
running.start()
multiprocessing.util.Finalize(None, lambda: (running.stop(), running.save()), exitpriority=100)
"""
_running = coverage.Coverage(data_file=None, source=[str(SRC)], config_file=False, concurrency=["thread"])
_spawned = tempfile.TemporaryDirectory()
_seconds: dict[str, float] = {}
_files: dict[str, float] = defaultdict(float)


def pytest_load_initial_conftests() -> None:
    starter = Path(_spawned.name) / "start"
    starter.mkdir()
    (starter / "sitecustomize.py").write_text(_STARTER.format(src=str(SRC)))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(starter), os.environ.get("PYTHONPATH", "")])
    os.environ["SHARDWISE_TEST_START"] = "spawn"  # a forked rank would not count its lines
    _running.start()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    file = item.nodeid.partition("::")[0]
    folder = Path(_spawned.name) / file.replace("/", "+")
    folder.mkdir(exist_ok=True)
    os.environ["MUTANTS_SPAWNED"] = str(folder)
    _running.switch_context(item.nodeid)
    begin = time.perf_counter()
    yield
    _seconds[item.nodeid] = time.perf_counter() - begin
    _files[file] += _seconds[item.nodeid]
    _running.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that fails without a mutation can kill none."""
    if report.failed:
        _seconds.pop(report.nodeid, None)


def pytest_unconfigure() -> None:
    """Write the record; worlds of ranks that live as long as the session have ended by now."""
    _running.stop()
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    data = _running.get_data()
    for path in data.measured_files():
        for line, tests in data.contexts_by_lineno(path).items():
            lines[path][line] |= {test for test in tests if test in _seconds}
    for found in Path(_spawned.name).glob("*/lines.*"):
        file = found.parent.name.replace("+", "/")
        spawned = coverage.CoverageData(str(found))
        spawned.read()
        for path in spawned.measured_files():
            for line in spawned.lines(path) or []:
                lines[path][line].add(file)
    seconds = {**_seconds, **_files}
    numbers = {test: number for number, test in enumerate(seconds)}
    named = {
        str(Path(path).relative_to(SRC.parent)): {line: sorted(numbers[t] for t in tests) for line, tests in of.items()}
        for path, of in lines.items()
    }
    record = {"tests": list(seconds), "seconds": list(seconds.values()), "lines": named}
    Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps(record))
    _spawned.cleanup()
