"""Which operators can be computed on ShardedTensors? The page docs/operator_table.md, written from the registry.

`python tools/operator_table.py docs/operator_table.md` writes it; without a path it is printed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import shardwise.ops  # registers the rules
from shardwise._torch import OpOverload, operator_names
from shardwise.ops.rule import Steps, find_rule, is_pointwise, registered_ops
from shardwise.tensor.dispatch import find_function, registered_functions

HEAD = """# Operators on sharded tensors

This page is written from the registry by `python tools/operator_table.py docs/operator_table.md`; a test keeps it up to
date. How to write, find and check a rule of your own is on the page [operators](operators.md).

- **rule**: strategies for one mesh axis, of which the cheapest is chosen for each axis.
  A rule may also say that a call is computed in several steps, where a sharded dim needs communication in the middle.
- **steps**: always computed in several steps, as where arguments or random numbers depend on the layout.
- **function**: a function of torch that is not an operator, and is answered as a whole.

Functions that torch breaks down into these operators (`torch.nn.functional`, modules, optimizers, losses) work too.
"""


def render_page() -> str:
    """The whole page."""
    rows = _table_rows()
    pointwise = sorted({_operator_name(op) for op in _all_overloads() if is_pointwise(op)} - set(rows))
    table = [
        f"| `{name}` | {', '.join(sorted(kinds))} | {', '.join(sorted(where))} |"
        for name, (kinds, where) in rows.items()
    ]
    return "\n".join(
        [
            HEAD,
            f"## Rules and steps ({len(rows)} operators)",
            "",
            "| operator | computed by | written in |",
            "|---|---|---|",
            *table,
            "",
            f"## Pointwise operators ({len(pointwise)})",
            "",
            "Known from torch's own tag, so that a custom operator with the tag needs no rule: any dim may be sharded,",
            "as long as all operands are cut alike; pending sums stay pending through linear ones.",
            "",
            ", ".join(f"`{name}`" for name in pointwise),
            "",
        ]
    )


def _table_rows() -> dict[str, tuple[set[str], set[str]]]:
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for op in registered_ops():
        code = find_rule(op)
        if isinstance(code, Steps):
            _note_operator_entry(found, op, "steps", getattr(code.run, "func", code.run))
        else:
            _note_operator_entry(found, op, "rule", code)
    for function in registered_functions():
        _note_operator_entry(found, function, "function", find_function(function))
    return dict(sorted(found.items()))


def _note_operator_entry(found: dict[str, tuple[set[str], set[str]]], op: Any, kind: str, code: Any) -> None:
    """Note an operator of torch's, or a function of torch's that is answered as a whole."""
    module = getattr(code, "__module__", "")
    package = shardwise.ops.__name__.partition(".")[0]
    if not module.startswith(package) or _operator_name(op).startswith(f"{package}."):
        return
    kinds, where = found[_operator_name(op)]
    kinds.add(kind)
    where.add(module.rpartition(".")[2])


def _operator_name(op: Any) -> str:
    if isinstance(op, OpOverload):
        return str(op._schema.name).replace("::", ".")
    owner = "Tensor." if "Tensor" in getattr(op, "__qualname__", "") or _is_method(op) else ""
    name = getattr(op, "__name__", repr(op))
    module = (getattr(op, "__module__", None) or "torch").replace("torch._C._nn", "torch.nn.functional")
    return f"Tensor.{name}" if owner else f"{module if module.startswith('torch.nn') else 'torch'}.{name}"


def _is_method(op: Any) -> bool:
    return getattr(torch.Tensor, getattr(op, "__name__", ""), None) is op


def _all_overloads() -> list[Any]:
    """Every overload of torch's own operators."""
    packets = [getattr(torch.ops.aten, n) for n in operator_names() if hasattr(torch.ops.aten, n)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def main(arguments: list[str]) -> None:
    if arguments:
        Path(arguments[0]).write_text(render_page())
    else:
        print(render_page(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
