"""Random programs on sharded tensors against the same on whole tensors: `python -m tools.fuzz --help`."""

from tools.fuzz.campaign import Finding, ProcessRanks, Tally, run_isolated, run_seeds
from tools.fuzz.generate import random_program
from tools.fuzz.program import Input, Program, Round, Statement, script, shrink
from tools.fuzz.run import Verdict, run_on_process, run_on_threads, worst

__all__ = [
    "Finding",
    "Input",
    "ProcessRanks",
    "Program",
    "Round",
    "Statement",
    "Tally",
    "Verdict",
    "random_program",
    "run_isolated",
    "run_on_process",
    "run_on_threads",
    "run_seeds",
    "script",
    "shrink",
    "worst",
]
