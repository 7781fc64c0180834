"""One way to show figures: tables on the terminal, the same rows as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Cell = str | float | int | None
RESULTS = Path(__file__).parent / "results"
BAR = 40


@dataclass(frozen=True)
class Figures:
    """A table: its title, its columns, its rows and what the reader has to know."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())


def show(figures: Figures, console: Console) -> None:
    """Print a table."""
    console.print(figures.title, markup=False, highlight=False, style="bold")
    table = Table(header_style="bold")
    for number, column in enumerate(figures.columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in figures.rows:
        table.add_row(*map(text, row))
    console.print(table)
    for note in figures.notes:
        console.print(note, markup=False, highlight=False)
    console.print()


def text(cell: Cell) -> str:
    """A cell as it is shown: three digits of a number, a dash for nothing.

    >>> text(0.01234), text(123.4), text(None), text(16384), text("x")
    ('0.0123', '123', '-', '16,384', 'x')
    """
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def bar(value: float, largest: float) -> str:
    """A length as a row of blocks.

    >>> bar(1, 4), bar(0, 4)
    ('##########', '')
    """
    return "#" * round(BAR * value / largest) if largest > 0 else ""


def machine() -> dict[str, Any]:
    """What the figures were measured on, in general words."""
    return {
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def save(section: str, tables: Sequence[Figures], folder: Path) -> Path:
    """Write a section's tables as JSON and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{section}.json"
    content = {"section": section, "machine": machine(), "tables": [asdict(t) for t in tables]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
