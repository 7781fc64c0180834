"""Do the notebooks show what their code gives? Runs the code cells of each as Jupyter would, and writes the outputs.

    python -m tools.notebooks

A cell gives what it prints, and the value of its last expression, as text and, where it has a picture, as HTML.
"""

from __future__ import annotations

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def run_notebook(data: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells give now, run one after the other in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in data["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = run_cell("".join(cell["source"]), names, count)
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**data, "cells": cells}


def run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What a cell prints and shows, as the outputs of a notebook."""
    tree = ast.parse(source)
    ends = tree.body[-1] if tree.body else None
    last = ends.value if isinstance(ends, ast.Expr) else None
    if last is not None:
        tree.body.pop()
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last), f"cell {count}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        shown: dict[str, Any] = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": shown})
    return outputs


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        data = run_notebook(json.loads(path.read_text()))
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
        print(f"ran {path.name}")


if __name__ == "__main__":
    main()
