"""Do the tests notice if one comparison, sign, constant or condition of the source is changed?

1. `record` runs the tests once under coverage and notes which of them run each line, in spawned ranks too.
2. A mutation replaces a few characters: `<` by `<=`, `+` by `-`, 1 by 2, `and` by `or`, a condition by its opposite.
3. For each one of a random sample, the tests that run its line are run in a copy of the tree, until one fails.
4. Survivors are printed as they would look in a diff: each is a test to write, or code that is not needed.

    python -m tools.mutants --record                          # once, and again when lines have moved
    python -m tools.mutants --package ops --sample 100 --seed 1
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
PACKAGES = ("ops", "tensor", "comm", "checkpoint", "geometry", "transfer")
RECORD = ROOT / "build" / "mutants.json"
MOST_SECONDS = 45.0
LIMIT = 240.0
KILLED, SURVIVED, UNCOVERED = "killed", "survived", "not run by a test"

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # what errors say is no behaviour
Lines: TypeAlias = dict[int, list[int]]


@dataclass(frozen=True)
class Mutation:
    """A change of some characters of a file, by their offsets in bytes."""

    path: str
    line: int
    start: int
    stop: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def diff(self, source: bytes) -> str:
        """The line before and after."""
        before = source.decode().splitlines()[self.line - 1]
        after = self.apply(source).decode().splitlines()[self.line - 1]
        return f"{self.path}:{self.line}\n  - {before.strip()}\n  + {after.strip()}"


def mutations(path: str, source: bytes) -> list[Mutation]:
    """All mutations of a file, in order.

    >>> [m.text for m in mutations("a.py", b"if a < 1 and not b:\\n    c = a + 2\\n")]
    ['not (a < 1 and not b)', '<=', '2', 'or', 'b', '-', '3']
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    finder = _Finder(path, source, starts)
    return sorted(set(finder.of(ast.parse(source))), key=lambda m: (m.start, -m.stop, m.text))


class _Finder:
    def __init__(self, path: str, source: bytes, starts: Sequence[int]) -> None:
        self._path, self._source, self._starts = path, source, starts

    def of(self, node: ast.AST) -> Iterator[Mutation]:
        """The mutations of a node and of all below it, but for texts of errors, annotations and decorators."""
        if isinstance(node, _SKIPPED) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # a check of ourselves, as assert is
            return
        yield from self._own(node)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.of(child)

    def _own(self, node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Constant):
                yield self._replace(node.test, f"not ({self._text(node.test)})")
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
                yield from self._between(left, right, *_COMPARISONS[type(op)])
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            if not any(isinstance(getattr(side, "value", None), str) for side in (node.left, node.right)):
                yield from self._between(node.left, node.right, *_ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield self._replace(node, self._text(node.operand))
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)

    def _constant(self, node: ast.Constant) -> Iterator[Mutation]:
        if isinstance(node.value, bool):
            yield self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            yield self._replace(node, str(node.value + 1))

    def _between(self, left: ast.expr, right: ast.expr, before: str, after: str) -> Iterator[Mutation]:
        """Replace an operator, which stands between two operands, perhaps among brackets and line ends."""
        start, stop = self._span(left)[1], self._span(right)[0]
        pattern = re.escape(before).replace(r"\ ", r"\s+")
        found = re.search(rb"(?<![\w<>=!])" + pattern.encode() + rb"(?![\w=])", self._source[start:stop])
        if found is not None:
            line = self._source[: start + found.start()].count(b"\n") + 1
            yield Mutation(self._path, line, start + found.start(), start + found.end(), after)

    def _replace(self, node: ast.expr, text: str) -> Mutation:
        return Mutation(self._path, node.lineno, *self._span(node), text)

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, stop = self._span(node)
        return self._source[start:stop].decode()


def sample(package: str, count: int, seed: int, root: Path = ROOT) -> list[Mutation]:
    """Mutations of a package, drawn at random; the same ones for the same seed and source."""
    found = [
        mutation
        for path in sorted((root / "src" / "shardwise" / package).rglob("*.py"))
        for mutation in mutations(str(path.relative_to(root)), path.read_bytes())
    ]
    return Random(seed).sample(found, min(count, len(found)))


@dataclass(frozen=True)
class Coverage:
    """Which tests run which lines, and how long they take."""

    tests: list[str]
    seconds: list[float]
    lines: dict[str, Lines]

    @classmethod
    def read(cls, path: Path) -> Coverage:
        data = json.loads(path.read_text())
        lines = {name: {int(n): tests for n, tests in found.items()} for name, found in data["lines"].items()}
        return cls(data["tests"], data["seconds"], lines)

    @classmethod
    def join(cls, parts: Sequence[Coverage]) -> Coverage:
        """One record of several."""
        joined = cls([], [], {})
        for part in parts:
            first = len(joined.tests)
            joined.tests.extend(part.tests)
            joined.seconds.extend(part.seconds)
            for path, lines in part.lines.items():
                of_file = joined.lines.setdefault(path, {})
                for line, numbers in lines.items():
                    of_file.setdefault(line, []).extend(first + number for number in numbers)
        return joined

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"tests": self.tests, "seconds": self.seconds, "lines": self.lines}))

    def tests_of(self, mutation: Mutation) -> list[str]:
        """Tests that run a line, the quickest first; of a line that runs at import alone, those of its file.

        A line may be run by thousands of tests: the first call of every test function comes before all second ones.
        """
        of_file = self.lines.get(mutation.path, {})
        numbers = of_file.get(mutation.line, [])
        if not numbers:
            numbers = sorted({test for tests in of_file.values() for test in tests})
        calls: Counter[str] = Counter()
        order = []
        for number in sorted(numbers, key=lambda n: self.seconds[n]):
            function = self.tests[number].partition("[")[0]
            calls[function] += 1
            order.append((calls[function], self.seconds[number], number))
        order.sort()
        until = bisect_right(list(accumulate(seconds for _, seconds, _ in order)), MOST_SECONDS)
        return [self.tests[number] for _, _, number in order[: max(until, 1)]]


def record(root: Path = ROOT, to: Path = RECORD, tests: Sequence[str] = (), jobs: int = 1) -> None:
    """Run tests under coverage, some files at a time, and write which lines each runs; failing tests are left out."""
    to.parent.mkdir(parents=True, exist_ok=True)
    files = [str(path.relative_to(root)) for name in tests for path in _test_files(root / name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def one(numbered: tuple[int, str]) -> Path:
            part = Path(folder) / f"{numbered[0]}.json"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.mutants_recorder", "-p", "no:cacheprovider"]
            environment = _environment(root, MUTANTS_RECORD=str(part))
            subprocess.run([*command, numbered[1]], cwd=root, env=environment, check=False)
            return part

        parts = [Coverage.read(part) for part in pool.map(one, enumerate(files)) if part.exists()]
    Coverage.join(parts).write(to)


def _test_files(path: Path) -> list[Path]:
    """The files of tests below a folder; the folder itself where its tests are doctests."""
    return [path] if path.is_file() else sorted(path.rglob("test_*.py")) or [path]


def _environment(root: Path, **extra: str) -> dict[str, str]:
    """A run that imports the copy, whatever is installed."""
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **extra}


def copy_tree(to: Path, root: Path = ROOT) -> Path:
    """A copy of what tests need."""
    skipped = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
    shutil.copytree(root, to, ignore=skipped, symlinks=True)
    return to


def judge(mutation: Mutation, tests: Sequence[str], tree: Path, limit: float = LIMIT) -> str:
    """Run tests with a mutation in a copy of the tree, which is as before afterwards."""
    if not tests:
        return UNCOVERED
    path = tree / mutation.path
    source = path.read_bytes()
    path.write_bytes(mutation.apply(source))
    listed = tree / "mutants_tests.txt"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={limit / 2:g}"]
    try:
        done = subprocess.run(
            [*command, f"@{listed}"], cwd=tree, env=_environment(tree), capture_output=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return KILLED
    finally:
        path.write_bytes(source)
    return SURVIVED if done.returncode == 0 else KILLED


def run(package: str, count: int, seed: int, jobs: int, covered: Coverage) -> Counter[str]:
    """Judge a sample of a package's mutations and print the survivors."""
    drawn = sample(package, count, seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees = [copy_tree(Path(folder) / str(n)) for n in range(jobs)]

        def one(mutation: Mutation) -> tuple[Mutation, str]:
            tree = trees.pop()
            try:
                return mutation, judge(mutation, covered.tests_of(mutation), tree)
            finally:
                trees.append(tree)

        for mutation, verdict in pool.map(one, drawn):
            found[verdict] += 1
            if verdict != KILLED:
                print(f"{verdict}: {mutation.diff((ROOT / mutation.path).read_bytes())}", flush=True)
    print(f"{package}: {found[KILLED]} of {len(drawn)} mutants killed", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="note which tests run which lines (minutes)")
    parser.add_argument("--tests", nargs="+", default=["src", "tests"], help="what --record runs")
    parser.add_argument("--package", choices=PACKAGES, action="append", help="all of them unless given")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.record or not RECORD.exists():
        record(tests=chosen.tests, jobs=chosen.jobs)
    covered = Coverage.read(RECORD)
    for package in chosen.package or ([] if chosen.record else PACKAGES):
        run(package, chosen.sample, chosen.seed, chosen.jobs, covered)


if __name__ == "__main__":
    main()
