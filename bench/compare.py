"""`python -m bench compare A B`: what became slower or faster between two results, beside how much figures vary.

1. A and B are files that a section wrote, or folders of them; `A,A2,...` are several runs of one state of the source,
   whose spread is the noise. Rows are matched by section, table, column and the texts in the row.
2. A ratio is the median of B over the median of A. Its noise is the larger of both spreads, (largest - smallest) /
   median. Of single runs nothing is known, and the noise is shown as a dash.
3. A ratio beyond its noise, and beyond the tolerance, is marked. The exit status is 0: a benchmark is read, not obeyed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Cell, Figures

Key = tuple[str, str, str, str]  # section, table, row, column
TOLERANCE = 0.1


def read(names: str) -> dict[Key, list[float]]:
    """The numbers of one or several runs, by what they are of."""
    found: dict[Key, list[float]] = {}
    for name in names.split(","):
        path = Path(name)
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            for key, value in _numbers(json.loads(file.read_text())).items():
                found.setdefault(key, []).append(value)
    return found


def machine_of(names: str) -> dict[str, Any]:
    """What the first result of some runs was measured on."""
    path = Path(names.split(",")[0])
    file = next(iter(sorted(path.glob("*.json")))) if path.is_dir() else path
    machine: dict[str, Any] = json.loads(file.read_text())["machine"]
    return machine


def _numbers(result: Mapping[str, Any]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for table in result["tables"]:
        seen: Counter[str] = Counter()
        for row in table["rows"]:
            label = ", ".join([str(row[0]), *(cell for cell in row[1:] if isinstance(cell, str))])
            seen[label] += 1
            label += f" ({seen[label]})" if seen[label] > 1 else ""
            for column, cell in zip(table["columns"], row, strict=True):
                if isinstance(cell, float):
                    found[result["section"], table["title"], label, column] = cell
    return found


def noise(values: Sequence[float]) -> float | None:
    """How far runs of one state lie apart, as a share of their median; None of a single run.

    >>> noise([9.0, 10.0, 11.0]), noise([10.0])
    (0.2, None)
    """
    middle = median(values)
    return (max(values) - min(values)) / middle if len(values) > 1 and middle else None


def compare(before: Mapping[Key, Sequence[float]], after: Mapping[Key, Sequence[float]]) -> Figures:
    """A row for each figure that both have, those that changed most first."""
    rows: list[tuple[float, list[Cell]]] = []
    for key in before.keys() & after.keys():
        a, b = median(before[key]), median(after[key])
        if a <= 0 or b <= 0:
            continue
        spreads = [spread for spread in map(noise, (before[key], after[key])) if spread is not None]
        spread = max(spreads, default=None)
        changed = abs(b / a - 1) > max(TOLERANCE, spread or 0.0)
        mark = "" if not changed else "more" if b > a else "less"
        rows.append((max(a / b, b / a), [": ".join(key[:3]), key[3], a, b, b / a, spread, mark]))
    rows.sort(key=lambda row: (-row[0], str(row[1])))
    missing = sorted({": ".join(key[:3]) for key in before.keys() ^ after.keys()})
    notes = [f"Only in one of them: {name}" for name in missing]
    columns = ("figure", "column", "before", "after", "ratio", "noise", f"beyond noise and {TOLERANCE:g}")
    return Figures("After / before", columns, [row for _, row in rows], notes)
