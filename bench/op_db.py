"""`python -m bench.op_db docs/op_db.md`: torch's operator database on ShardedTensors, beside DTensor, as a page.

Ours run as threads of one process for each batch, DTensor's as two gloo processes. A call is right if values and
gradients equal those on whole tensors, refused if every rank raises, and wrong otherwise. `--edges` writes the section
of the page about samples with values and lengths at the edges, of ours alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.op_db_calls import (
    KINDS,
    RANKS,
    REFUSED,
    RIGHT,
    UNCLEAR,
    WRONG,
    Answer,
    Call,
    Ending,
    calls,
    end,
    layouts_of,
    name_of,
    sharded,
)
from bench.op_db_dtensor import run_dtensors
from bench.op_samples import operators
from shardwise import CommError, ShardedTensor, run_local
from shardwise.comm import Comm

BATCH, LIMIT, MEMORY = 8, 120.0, 2**34
PRELOADED = ["bench.op_db_calls", "bench.op_db_dtensor", "sympy", "torch._dynamo"]  # in the server that forks
HEAD = """# Torch's operator database

How every operator of torch's own database for tests ends on sharded tensors over 2 ranks.
`python -m bench.op_db docs/op_db.md` writes this page; `tests/ops/rules/test_op_db.py` runs a part of it.

- Samples ({samples} for each dtype) in float32, complex64, int64, bool and bfloat16; forward with backward, in place,
  and with `out=`. All tensors of a call are in one layout: `S(0)`, `S(-1)`, `R`, `P` (a pending sum) or uneven (`S(0)`
  of 1 row and the rest).
- **right**: values and gradients equal those on whole tensors. **refused**: every rank raises an error that names the
  layout. **unclear**: every rank raises another error. **wrong**: other values, or ranks that end differently.
- DTensor gets the same calls on two gloo processes, but for the uneven layout, which it does not have; its errors are
  not told apart, so they count as unclear. Of an operator in which its ranks wait for each other forever or a process
  ends, this counts as one unclear call, and the calls after it are left out.
- Calls that draw random numbers are left out, and layouts that are the same for a call: a tensor without dims is
  replicated in each of them, so it counts once.
"""
EDGES, OPERATORS = "## Edge values", "## Operators ("
EDGE_HEAD = """
`python -m bench.op_db docs/op_db.md --edges` writes this section: {samples} for each dtype of float64, complex128,
int64 and bool, each with other values in its tensors (zeros, ties, zeros of both signs, very large and tiny numbers,
infinities, nan, integers at the limits of the dtype), and with a length of 0, 1 or 3 in place of its largest one. Calls
of which whole tensors raise an error are left out, and what torch does not define: memory that `resize_` adds, `lcm` at
the limits (the process ends), gradients of `hardshrink` at nan, sums of complex infinities and of integers at the
limits. In the layouts and forms above, of {operators} operators (`--step 10` takes every tenth), with torch {release}.
"""


def run_ours(numbers: Sequence[int], samples: int, edges: bool = False) -> list[Ending]:
    """The calls of some operators on ShardedTensors; a call that breaks the world is wrong."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for number in numbers:
        for call, wanted in calls(operators()[number], samples, edges):
            for layout in layouts_of(call):
                found.append(run_on_threads(call, wanted, layout))
    return found


def run_on_threads(call: Call, wanted: Answer, layout: str) -> Ending:
    """Run a call with all ranks as threads; a rank that is wrong, or ranks that end differently, make it wrong."""

    def body(comm: Comm) -> Ending:
        ending = end(call, wanted, layout, sharded(layout, comm), _whole)
        kinds = {data.decode() for data in comm.all_gather_bytes(ending.kind.encode(), label=call.label)}
        if len(kinds) == 1:
            return ending
        return Ending(*_row(ending), WRONG, f"ranks end as {sorted(kinds)}: {ending.text}", call.values)

    try:
        endings = run_local(body, RANKS, timeout=20.0)
        return next((ending for ending in endings if ending.kind == WRONG), endings[0])
    except CommError as error:
        row = call.operator, str(call.dtype).removeprefix("torch."), call.form, layout
        return Ending(*row, WRONG, str(error), call.values)


def _row(ending: Ending) -> tuple[str, str, str, str]:
    return ending.operator, ending.dtype, ending.form, ending.layout


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, ShardedTensor) else value


def _serve(numbers: list[int], samples: int, edges: bool, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # lengths are values of some operators
    pipe.send(run_ours(numbers, samples, edges))


def ours(numbers: Sequence[int], samples: int, edges: bool = False) -> list[Ending]:
    """Run a batch in a process of its own; of a batch whose process ends or hangs, each operator alone."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(list(numbers), samples, edges, there), daemon=True)
    child.start()
    there.close()
    try:
        if here.poll(LIMIT * (5 if edges else 1)):
            found: list[Ending] = here.recv()
            return found
        problem = f"no end within {LIMIT:g} s"
    except EOFError:
        problem = "the process died"
    finally:
        child.kill()
        child.join()
    if len(numbers) > 1:
        return [ending for number in numbers for ending in ours([number], samples, edges)]
    return [Ending(name_of(operators()[numbers[0]]), "", "call", "", WRONG, problem)]


def page(mine: Sequence[Ending], others: Sequence[Ending], samples: int) -> str:
    """The page: summaries by dtype, form and layout, then one row for each operator."""
    lines = [HEAD.format(samples=samples), "## In short", ""]
    columns = ["shardwise: calls", *KINDS, "share", *(["DTensor: calls", "right", "wrong", "share"] if others else [])]
    groups: list[tuple[str, Callable[[Ending], str]]] = [
        ("dtype", lambda e: e.dtype),
        ("form", lambda e: e.form),
        ("layout", lambda e: e.layout),
    ]
    lines += _table(["all", *columns], {"all": list(mine)}, {"all": list(others)})
    for title, key in groups:
        lines += _table([title, *columns], _grouped(mine, key), _grouped(others, key))
    lines += [f"{OPERATORS}{len({e.operator for e in mine})})", ""]
    by_operator = [_grouped(endings, lambda e: e.operator) for endings in (mine, others)]
    lines += _table(["operator", *columns], *by_operator)
    return "\n".join(lines)


def write_edges(text: str, endings: Sequence[Ending], samples: int) -> str:
    """A page with the section of edge values made anew, in front of the operators."""
    number = "1 sample" if samples == 1 else f"{samples} samples"
    release, count = ".".join(torch.__version__.split(".")[:2]), len({e.operator for e in endings})
    lines = [EDGES, EDGE_HEAD.format(samples=number, operators=count, release=release)]
    columns = ["calls", *KINDS, "share"]
    lines += _table(["all", *columns], {"all": list(endings)}, {})
    for title, key in (("values", lambda e: e.values), ("dtype", lambda e: e.dtype), ("layout", lambda e: e.layout)):
        lines += _table([title, *columns], _grouped(endings, key), {})
    before, _, operators_of = text.partition(OPERATORS)
    return before.partition(EDGES)[0] + "\n".join(lines) + "\n" + OPERATORS + operators_of


def _grouped(endings: Sequence[Ending], key: Callable[[Ending], str]) -> dict[str, list[Ending]]:
    found: dict[str, list[Ending]] = {}
    for ending in endings:
        found.setdefault(key(ending), []).append(ending)
    return {name: rows for name, rows in found.items() if name}


def _table(head: Sequence[str], mine: dict[str, list[Ending]], others: dict[str, list[Ending]]) -> list[str]:
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, endings in mine.items():
        cells = [f"`{name}`" if head[0] == "operator" else name, *_cells(endings, KINDS)]
        if len(head) > 7:
            cells += _cells(others.get(name, []), (RIGHT, WRONG))
        rows.append("| " + " | ".join(cells) + " |")
    return [*rows, ""]


def _cells(endings: Sequence[Ending], kinds: Sequence[str]) -> list[str]:
    count = Counter(ending.kind for ending in endings)
    share = f"{1000 * count[RIGHT] // len(endings) / 10:g} %" if endings else ""  # rounded down: 100 is all
    return [str(len(endings)), *(str(count[kind]) for kind in kinds), share]


def batches(step: int, only: Sequence[str] = ()) -> Iterator[list[int]]:
    """The numbers of the operators tried, some at a time; `only` names some, without their variants or with them."""
    numbers = [n for n, op in enumerate(operators()) if not only or op.name in only or name_of(op) in only][::step]
    for start in range(0, len(numbers), BATCH):
        yield numbers[start : start + BATCH]


Batch = tuple[bool, list[int]]


def try_batch(batch: Batch, samples: int, edges: bool = False) -> list[Ending]:
    """How the calls of some operators end: on DTensors, or on ours."""
    dtensor, numbers = batch
    found = run_dtensors(numbers, samples) if dtensor else ours(numbers, samples, edges)
    print(f"{'DTensor' if dtensor else 'shardwise'}: operators up to {numbers[-1] + 1}", file=sys.stderr, flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.op_db", description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", help="the page to write; printed if it is left out")
    parser.add_argument("--samples", type=int, default=3, help="samples of each; with 1, few run in place")
    parser.add_argument("--step", type=int, default=1, help="every how many-th operator")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="the operators tried, by name")
    parser.add_argument("--jobs", type=int, default=1, help="how many batches run at once")
    parser.add_argument("--no-dtensor", action="store_true", help="ours only")
    parser.add_argument("--edges", action="store_true", help="samples at edges, ours only: that section of the page")
    parser.add_argument("--failures", type=Path, help="a file for our calls that are not right, a line each")
    chosen = parser.parse_args(arguments)
    listed = list(batches(chosen.step, chosen.only))
    ours_alone = chosen.no_dtensor or chosen.edges
    todo = [(dtensor, batch) for dtensor in ([False] if ours_alone else [True, False]) for batch in listed]
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        ended = list(pool.map(lambda batch: try_batch(batch, chosen.samples, chosen.edges), todo))
    mine, others = (
        [e for (dtensor, _), found in zip(todo, ended, strict=True) if dtensor is wanted for e in found]
        for wanted in (False, True)
    )
    old = chosen.path.read_text() if chosen.path and chosen.path.exists() else OPERATORS
    if chosen.edges:
        text = write_edges(old, mine, chosen.samples)
    else:
        kept = EDGES + old.partition(EDGES)[2].partition(OPERATORS)[0] if EDGES in old else ""
        text = page(mine, others, chosen.samples).replace(OPERATORS, kept + OPERATORS, 1)
    chosen.path.write_text(text) if chosen.path else print(text)
    if chosen.failures is not None:
        bad = [e for kind in (WRONG, UNCLEAR, REFUSED) for e in mine if e.kind == kind]
        chosen.failures.write_text(
            "".join(f"{e.kind}: {' '.join(_row(e))} ({e.values}): {' '.join(e.text.split())}\n" for e in bad)
        )


if __name__ == "__main__":
    main()
