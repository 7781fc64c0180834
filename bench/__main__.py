"""`python -m bench [SECTION ...]`: run the sections named, or all; print tables and write them as JSON.

`python -m bench compare A B`: the ratios of two results, files or folders; `A,A2` are several runs of one state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from bench import (
    autoplan,
    checkpoint,
    compiled,
    estimates,
    first_use,
    gpu,
    gpu_step,
    hosts,
    layouts,
    modules,
    move,
    ops,
    ops_share,
    page,
    plans,
    sequences,
    sync,
)
from bench.compare import compare, machine_of, read
from bench.report import RESULTS, Figures, save, show

Section = Callable[[bool], Sequence[Figures]]
WIDTH = 150

SECTIONS: dict[str, Section] = {
    "layouts": lambda tiny: layouts.run(layouts.TINY if tiny else layouts.LayoutBenchSizes()),
    "plans": lambda tiny: plans.run(plans.TINY if tiny else plans.PlanBenchSizes()),
    "estimates": lambda tiny: estimates.run(estimates.TINY if tiny else estimates.EstimateBenchSizes()),
    "autoplan": lambda tiny: autoplan.run(autoplan.TINY if tiny else autoplan.AutoplanBenchSizes()),
    "page": lambda tiny: page.run(page.TINY if tiny else page.PageBenchSizes()),
    "ops": lambda tiny: ops.run(ops.TINY if tiny else ops.OpBenchSizes()),
    "first_use": lambda tiny: first_use.run(first_use.TINY if tiny else first_use.FirstUseSizes()),
    "ops_share": lambda tiny: ops_share.run(ops_share.TINY if tiny else ops_share.OpShareBenchSizes()),
    "compile": lambda tiny: compiled.run(compiled.TINY if tiny else compiled.CompileBenchSizes()),
    "modules": lambda tiny: modules.run(modules.TINY if tiny else modules.ModuleBenchSizes()),
    "sequences": lambda tiny: sequences.run(sequences.TINY if tiny else sequences.SequenceBenchSizes()),
    "move": lambda tiny: move.run(move.TINY if tiny else move.MoveBenchSizes()),
    "gpu": lambda tiny: gpu.run(gpu.TINY if tiny else gpu.GpuBenchSizes()),
    "gpu_step": lambda tiny: gpu_step.run(gpu_step.TINY if tiny else gpu_step.GpuStepSizes()),
    "hosts": lambda tiny: hosts.run(hosts.TINY if tiny else hosts.HostBenchSizes()),
    "sync": lambda tiny: sync.run(sync.TINY if tiny else sync.SyncBenchSizes()),
    "checkpoint": lambda tiny: checkpoint.run(checkpoint.TINY if tiny else checkpoint.CheckpointBenchSizes()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--tiny", action="store_true", help="small sizes and one run of each: does it work at all?")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the JSON files")
    chosen = parser.parse_args(arguments)
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    if chosen.sections[:1] == ["compare"]:
        if len(chosen.sections) != 3:
            parser.error("compare takes two results: python -m bench compare BEFORE AFTER")
        before, after = chosen.sections[1:]
        show(compare(read(before), read(after)), console)
        if machine_of(before) != machine_of(after):
            console.print(f"Measured on other machines: {machine_of(before)}, {machine_of(after)}", highlight=False)
        return 0
    unknown = [name for name in chosen.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    for name in chosen.sections or SECTIONS:
        tables = SECTIONS[name](chosen.tiny)
        for table in tables:
            show(table, console)
        save(name, tables, chosen.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
