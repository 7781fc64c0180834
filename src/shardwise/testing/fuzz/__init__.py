"""Random programs on sharded tensors against the same on whole tensors: `python -m shardwise.testing.fuzz --help`."""

from shardwise.testing.fuzz.campaign import Finding, Tally, run_seeds
from shardwise.testing.fuzz.generate import random_program
from shardwise.testing.fuzz.isolate import ProcessRanks, run_isolated
from shardwise.testing.fuzz.program import Input, Program, Round, Statement, script
from shardwise.testing.fuzz.run import Verdict, run_on_process, run_on_threads, worst
from shardwise.testing.fuzz.shrink import shrink

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
