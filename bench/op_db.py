"""`python -m bench.op_db docs/op_db.md`: torch's operator database on ShardedTensors, beside DTensor, as a page.

Ours run as threads of one process for each batch, DTensor's as two gloo processes. A call is right if values and
gradients equal those on whole tensors, refused if every rank raises, and wrong otherwise.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from bench.op_db_calls import (
    RANKS,
    WITHOUT_SUMS,
    Answer,
    Call,
    Place,
    addend,
    answer,
    calls,
    compare,
    layouts_of,
    name_of,
    sharded,
)
from bench.op_samples import operators
from bench.op_trials import CLEAR
from shardwise import CommError, ShardedTensor, run_local
from shardwise.comm import Comm, LocalWorld

RIGHT, REFUSED, UNCLEAR, WRONG = KINDS = ("right", "refused", "unclear", "wrong")
BATCH, LIMIT = 8, 120.0
HEAD = """# Torch's operator database

How every operator of torch's own database for tests ends on sharded tensors over 2 ranks.
`python -m bench.op_db docs/op_db.md` writes this page; `tests/local/test_opinfo.py` runs a part of it.

- Samples ({samples} for each dtype) in float32, complex64, int64, bool and bfloat16; forward with backward, in place,
  and with `out=`. All tensors of a call are in one layout: `S(0)`, `S(-1)`, `R`, `P` (a pending sum) or uneven (`S(0)`
  of 1 row and the rest).
- **right**: values and gradients equal those on whole tensors. **refused**: every rank raises an error that names the
  layout. **unclear**: every rank raises another error. **wrong**: other values, or ranks that end differently.
- DTensor gets the same calls on two gloo processes, but for the uneven layout, which it does not have; its errors are
  not told apart, so they count as unclear.
- Calls that draw random numbers are left out, and layouts that are the same for a call: a tensor without dims is
  replicated in each of them, so it counts once.
"""


@dataclass(frozen=True)
class Ending:
    """How one call ended."""

    operator: str
    dtype: str
    form: str
    layout: str
    kind: str
    text: str = ""


def end(call: Call, wanted: Answer, layout: str, place: Place, whole: Callable[[Any], Any]) -> Ending:
    """Run a call on this rank; every rank runs it."""
    row = (call.operator, str(call.dtype).removeprefix("torch."), call.form, layout)
    try:
        problem = compare(answer(call, place, whole), wanted, call.dtype)
    except CommError:
        raise
    except CLEAR as error:
        return Ending(*row, REFUSED, str(error))
    except Exception as error:
        return Ending(*row, UNCLEAR, f"{type(error).__name__}: {error}")
    return Ending(*row, RIGHT) if problem is None else Ending(*row, WRONG, problem)


def run_ours(numbers: Sequence[int], samples: int) -> list[Ending]:
    """The calls of some operators on ShardedTensors; a call that breaks the world is wrong."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = []
    for number in numbers:
        for call, wanted in calls(operators()[number], samples):
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
        return Ending(*_row(ending), WRONG, f"ranks end as {sorted(kinds)}: {ending.text}")

    try:
        endings = run_local(body, RANKS, timeout=20.0)
        return next((ending for ending in endings if ending.kind == WRONG), endings[0])
    except CommError as error:
        return Ending(call.operator, str(call.dtype).removeprefix("torch."), call.form, layout, WRONG, str(error))


def _row(ending: Ending) -> tuple[str, str, str, str]:
    return ending.operator, ending.dtype, ending.form, ending.layout


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, ShardedTensor) else value


def _serve(numbers: list[int], samples: int, pipe: Any) -> None:
    pipe.send(run_ours(numbers, samples))


def ours(numbers: Sequence[int], samples: int) -> list[Ending]:
    """Run a batch in a process of its own; of a batch whose process ends or hangs, each operator alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.op_db_calls", "sympy", "torch._dynamo"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(list(numbers), samples, there), daemon=True)
    child.start()
    there.close()
    try:
        if here.poll(LIMIT):
            found: list[Ending] = here.recv()
            return found
        problem = f"no end within {LIMIT:g} s"
    except EOFError:
        problem = "the process died"
    finally:
        child.kill()
        child.join()
    if len(numbers) > 1:
        return [ending for number in numbers for ending in ours([number], samples)]
    return [Ending(name_of(operators()[numbers[0]]), "", "call", "", WRONG, problem)]


def theirs(world: LocalWorld, numbers: Sequence[int], samples: int) -> list[Ending]:
    """The same calls on DTensors; operators on which it hangs or ends a process count one unclear call."""
    try:
        found: list[Ending] = world.run(_on_rank, list(numbers), samples, limit=LIMIT)[0]
        return found
    except CommError as error:
        world.close()
        if len(numbers) > 1:
            return [ending for number in numbers for ending in theirs(world, [number], samples)]
        return [Ending(name_of(operators()[numbers[0]]), "", "call", "", UNCLEAR, str(error))]


def _on_rank(numbers: Sequence[int], samples: int) -> list[Ending]:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for number in numbers:
        for call, wanted in calls(operators()[number], samples):
            for layout in (name for name in layouts_of(call) if name != "uneven"):
                found.append(end(call, wanted, layout, _dtensors(layout), _full))
    return found


@cache
def _device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _dtensors(layout: str) -> Place:
    mesh = _device_mesh()
    rank = mesh.get_local_rank()

    def place(tensor: Tensor) -> Tensor:
        pending = layout == "P" and tensor.dtype not in WITHOUT_SUMS
        whole = tensor.ndim == 0 or layout in ("R", "P")
        dim = 0 if layout == "S(0)" else tensor.ndim - 1
        placement = Partial() if pending else Replicate() if whole else Shard(dim)
        part = addend(tensor, rank) if pending else tensor if whole else _chunk(tensor, dim, rank)
        stride = tensor.contiguous().stride()
        laid = DTensor.from_local(part.clone(), mesh, [placement], run_check=False, shape=tensor.shape, stride=stride)
        return laid.detach()

    return place


def _chunk(tensor: Tensor, dim: int, rank: int) -> Tensor:
    chunks = tensor.chunk(RANKS, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


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
    lines += [f"## Operators ({len({e.operator for e in mine})})", ""]
    by_operator = [_grouped(endings, lambda e: e.operator) for endings in (mine, others)]
    lines += _table(["operator", *columns], *by_operator)
    return "\n".join(lines)


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
    share = f"{100 * count[RIGHT] / len(endings):.0f} %" if endings else ""
    return [str(len(endings)), *(str(count[kind]) for kind in kinds), share]


def batches(step: int) -> Iterator[list[int]]:
    """The numbers of the operators tried, some at a time."""
    numbers = list(range(0, len(operators()), step))
    for start in range(0, len(numbers), BATCH):
        yield numbers[start : start + BATCH]


def _try_batches(listed: Sequence[Sequence[int]], *, samples: int, dtensor: bool) -> tuple[list[Ending], list[Ending]]:
    """How calls of these operators end: ours, and DTensor's in a world of its own."""
    mine: list[Ending] = []
    others: list[Ending] = []
    with LocalWorld(RANKS, timeout=15.0) as world:
        for batch in listed:
            mine += ours(list(batch), samples)
            others += theirs(world, list(batch), samples) if dtensor else []
            print(f"{batch[-1] + 1} of {len(operators())} operators", file=sys.stderr, flush=True)
    return mine, others


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.op_db", description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", help="the page to write; printed if it is left out")
    parser.add_argument("--samples", type=int, default=3, help="samples of each; with 1, few run in place")
    parser.add_argument("--step", type=int, default=1, help="every how many-th operator")
    parser.add_argument("--jobs", type=int, default=1, help="how many batches run at once")
    parser.add_argument("--no-dtensor", action="store_true", help="ours only")
    parser.add_argument("--failures", type=Path, help="a file for the wrong and unclear calls of ours, a line each")
    chosen = parser.parse_args(arguments)
    listed = list(batches(chosen.step))
    with ThreadPoolExecutor(chosen.jobs) as pool:
        run = partial(_try_batches, samples=chosen.samples, dtensor=not chosen.no_dtensor)
        pairs = list(pool.map(run, [listed[job :: chosen.jobs] for job in range(chosen.jobs)]))
    mine = [ending for found, _ in pairs for ending in found]
    others = [ending for _, found in pairs for ending in found]
    text = page(mine, others, chosen.samples)
    chosen.path.write_text(text) if chosen.path else print(text)
    if chosen.failures is not None:
        bad = [e for e in mine if e.kind in (WRONG, UNCLEAR)]
        chosen.failures.write_text("".join(f"{e.kind}: {' '.join(_row(e))}: {e.text.splitlines()[0]}\n" for e in bad))


if __name__ == "__main__":
    main()
