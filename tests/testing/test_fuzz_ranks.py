"""Do random programs give on processes what they give on whole tensors?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.fuzz import Input, ProcessRanks, Program, Round, Statement, random_program
from tools.fuzz.run import APART, WRONG

PROGRAMS = 40
LIMIT = 60.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with ProcessRanks(LIMIT) as worlds:
        yield worlds


@pytest.mark.parametrize("size", [2, 3])
def test_programs_are_right_or_refused_by_all_ranks(ranks: ProcessRanks, size: int) -> None:
    seeds = [seed for seed in range(5000, 5400) if random_program(seed).ranks == size][: PROGRAMS // 2]
    verdicts = {seed: ranks.run(random_program(seed)) for seed in seeds}
    assert [f"seed {seed}: {verdict}" for seed, verdict in verdicts.items() if verdict.failed] == []
    assert sum(len(verdict.ran) for verdict in verdicts.values()) > 5 * len(seeds)


def test_a_rank_that_computes_something_else_is_noticed(ranks: ProcessRanks) -> None:
    other = "v0 = a0 + float(torch.distributed.get_rank()) if hasattr(a0, 'full') else a0 + 0"
    verdict = ranks.run(_program(Statement("other", other)))
    assert verdict.kind == WRONG


def test_a_rank_that_waits_alone_is_noticed() -> None:
    waits = "v0 = a0.full() if hasattr(a0, 'full') and torch.distributed.get_rank() == 0 else 0"
    with ProcessRanks(8.0) as worlds:
        assert worlds.run(_program(Statement("waits", waits))).kind == APART
        assert not worlds.run(_program(Statement("sum", "v0 = a0.sum()"))).failed


def _program(step: Statement) -> Program:
    return Program(2, (Input("a0", "float64", (4, 3), "on tp=2: S(0)"),), (step,), (Round(0),))
