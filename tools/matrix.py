"""Which releases of torch and Python does the package work with? Each is tried; docs/versions.md has the table.

1. Build the wheel.
2. For each pair of releases: a fresh environment in a temporary folder with the wheel, this torch, and pytest.
3. Run the checks there against the wheel: the folder they run in has the tests and the README, but no source.
4. Put one row for each pair into the table. A pair that was not tried keeps its row. Environments are removed.

A release of torch without a CPU build takes about 5 GB while it is tried, so this is run on demand: `make matrix`, or
`make matrix PAIRS="2.14.0 2.15.0:3.13"` for some pairs; `python tools/matrix.py --plan` prints the commands.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
PAIRS = ("2.11.0:3.11", "2.12.0:3.11", "2.13.0:3.11", "2.14.0:3.11", "2.15.0:3.11", "2.15.0:3.12", "2.15.0:3.13")
OWN_CHOICE = ("torch", "setuptools")  # not held to constraints.txt: what is tried, and what releases of torch pin
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "safetensors")
COPIED = ("README.md", "pyproject.toml", "constraints.txt", "docs", "tests", "bench", "tools")
SECONDS = 3600
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b")
HEADINGS = ("torch", "Python")


@dataclass(frozen=True, order=True)
class Pair:
    """A release of torch and one of Python."""

    torch: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read `2.15.0:3.13`; without a Python it is that of this interpreter.

        >>> Pair.parse("2.15.0:3.13")
        Pair(torch='2.15.0', python='3.13')
        """
        torch, _, python = text.partition(":")
        if not re.fullmatch(r"\d+\.\d+\.\d+", torch) or not re.fullmatch(r"(3\.\d+)?", python):
            raise ValueError(f"{text!r} is not a pair of releases; write one as 2.15.0 or 2.15.0:3.13")
        return cls(torch, python or "{}.{}".format(*sys.version_info))

    @property
    def interpreter(self) -> str:
        return sys.executable if self.python == "{}.{}".format(*sys.version_info) else f"python{self.python}"


@dataclass(frozen=True)
class Check:
    """One column of the table: a command, run with the environment's programs first on the path."""

    heading: str
    command: tuple[str, ...]


PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
CHECKS = (
    Check("README", ("python", "tests/house/test_docs.py", "README.md")),
    Check("`shardwise demo`", ("shardwise", "demo")),
    Check("drop-in", (*PYTEST, "tests/compat")),
    Check("operators", (*PYTEST, "tests/ops", "--ignore-glob=*test_op_db*")),
)


def install_commands(pair: Pair, environment: Path, wheel: Path, constraints: Path) -> list[list[str]]:
    """Return the commands that make an environment with the wheel, one torch and what the checks need."""
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    wanted = [str(wheel), f"torch=={pair.torch}", *NEEDED]
    return [[pair.interpreter, "-m", "venv", str(environment)], [*pip, "-c", str(constraints), *wanted]]


def loosen(constraints: str) -> str:
    """Return constraints without the pins that each pair chooses itself.

    >>> loosen("numpy==2.4.6\\ntorch==2.13.0\\n")
    'numpy==2.4.6\\n'
    """
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in OWN_CHOICE)


def describe_outcome(status: int, output: str) -> str:
    """Return a cell of the table: the counts of pytest where there are any, else whether the command succeeded.

    >>> describe_outcome(1, "...\\n2 failed, 12 passed in 3.41s")
    '**2 failed**, 12 passed'
    >>> describe_outcome(0, "fine"), describe_outcome(-8, "")
    ('ok', '**status -8**')
    """
    last = output.strip().rpartition("\n")[2]
    counts = [f"{n} {kind}" for n, kind in COUNTS.findall(last)]
    bold = [f"**{c}**" if c.split()[1] in ("failed", "error", "errors") else c for c in counts]
    if status and not any(c.startswith("**") for c in bold):
        bold.append(f"**status {status}**")
    return ", ".join(bold) or "ok"


def replace_rows(page: str, cells: dict[Pair, Sequence[str]]) -> str:
    """Return the page with these rows in its table, in order; other rows stay."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    rows = {_pair_of(line): line for line in lines[start + 1 : end]}
    rows |= {pair: "| " + " | ".join([pair.torch, pair.python, *texts]) + " |" for pair, texts in cells.items()}
    ordered = [rows[pair] for pair in sorted(rows, key=_release_numbers)]
    heading = "| " + " | ".join([*HEADINGS, *(check.heading for check in CHECKS)]) + " |"
    rule = "|---" * (len(HEADINGS) + len(CHECKS)) + "|"
    return "\n".join([*lines[: start - 1], heading, rule, *ordered, *lines[end:]]) + "\n"


def _pair_of(row: str) -> Pair:
    torch, python = (cell.strip() for cell in row.split("|")[1:3])
    return Pair(torch, python)


def _release_numbers(pair: Pair) -> list[int]:
    return [int(n) for n in f"{pair.torch}.{pair.python}".split(".")]


def try_pair(pair: Pair, wheel: Path, folder: Path) -> list[str]:
    """Make the environment, run every check, remove it, and return the cells of its row."""
    environment, place, constraints = folder / "environment", folder / "checks", folder / "constraints.txt"
    constraints.write_text(loosen((ROOT / "constraints.txt").read_text()))
    for command in install_commands(pair, environment, wheel, constraints):
        subprocess.run(command, check=True)
    place.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    return [run_check(check, environment, place) for check in CHECKS]


def run_check(check: Check, environment: Path, place: Path) -> str:
    """Run one check and return its cell; the end of the output of one that fails is printed."""
    variables = {**os.environ, "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    command = [text for word in check.command for text in expand_files(word, place)]
    try:
        done = subprocess.run(
            command,
            cwd=place,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"**over {SECONDS} s**"
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-60:]), flush=True)
    return describe_outcome(done.returncode, done.stdout)


def expand_files(word: str, place: Path) -> list[str]:
    """Return the files that a pattern matches, or the word itself where it is none."""
    return sorted(str(path.relative_to(place)) for path in place.glob(word)) if "*" in word else [word]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the source tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("shardwise-*.whl"))


def print_plan(pairs: Iterable[Pair]) -> None:
    """Print the commands that would be run."""
    for pair in pairs:
        print(f"torch {pair.torch}, Python {pair.python}:")
        commands = install_commands(pair, Path("environment"), Path("shardwise.whl"), Path("constraints.txt"))
        for command in [*commands, *(check.command for check in CHECKS)]:
            print("  " + " ".join(command))


def main(arguments: Sequence[str]) -> int:
    """Try the pairs that are named, or all; the status is 1 where a check failed."""
    parser = argparse.ArgumentParser(description="Try the package with releases of torch and Python.")
    parser.add_argument("pairs", nargs="*", type=Pair.parse, help="such as 2.15.0 or 2.15.0:3.13; default: all")
    parser.add_argument("--plan", action="store_true", help="print the commands, and run none")
    given = parser.parse_args(arguments)
    pairs = given.pairs or [Pair.parse(text) for text in PAIRS]
    if given.plan:
        print_plan(pairs)
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as built:
        wheel = build_wheel(Path(built))
        for pair in pairs:
            with tempfile.TemporaryDirectory() as folder:
                cells = try_pair(pair, wheel, Path(folder))
            print(pair.torch, pair.python, *cells, sep=" | ", flush=True)
            PAGE.write_text(replace_rows(PAGE.read_text(), {pair: cells}))
            failed = failed or any("**" in cell for cell in cells)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
