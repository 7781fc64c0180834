"""`python -m tools.fuzz`: random programs, the failing ones shrunk and printed as scripts."""

from __future__ import annotations

import argparse
import os
import sys
from itertools import count
from pathlib import Path

from tools.fuzz.campaign import Finding, Tally, run_seeds
from tools.fuzz.program import script

CHUNK = 100


def main(arguments: list[str] | None = None) -> int:
    """Run programs; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first program; the next ones follow")
    parser.add_argument("--programs", type=int, default=300, help="how many programs")
    parser.add_argument("--processes", action="store_true", help="ranks are processes, not threads")
    parser.add_argument("--empty-ranks", action="store_true", help="some rank holds nothing of some input")
    parser.add_argument("--compiled", action="store_true", help="statements are also compiled as one function")
    parser.add_argument("--endless", action="store_true", help="go on until interrupted")
    parser.add_argument("--save", type=Path, help="a folder that gets a script for each cause of failure")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share few cores; children inherit it
    failed = 0
    for start in count(chosen.seed, CHUNK) if chosen.endless else [chosen.seed]:
        size = CHUNK if chosen.endless else chosen.programs
        seeds = range(start, start + size)
        tally = run_seeds(seeds, chosen.processes, empty_ranks=chosen.empty_ranks, compiled=chosen.compiled)
        failed += tally.failures
        print(f"seeds {start} to {start + size - 1}:", *tally.lines(), sep="\n", flush=True)
        if chosen.save is not None:
            _save(chosen.save, tally)
    return int(failed > 0)


def _save(folder: Path, tally: Tally) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for finding in tally.findings.values():
        (folder / f"seed_{finding.seed}.py").write_text(_documented(finding))


def _documented(finding: Finding) -> str:
    comment = "".join(f"# {line}\n" for line in str(finding.verdict).splitlines())
    return comment + script(finding.program)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
