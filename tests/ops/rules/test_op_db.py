"""Does every operator of torch's own database give on ShardedTensors what it gives on whole tensors, or say why not?

Samples come from torch, laid out over two ranks in three ways (bench/op_samples.py). Calls end right or refused with an
error of ours; a wrong number, ranks that end differently or an error that does not speak of layouts fails the test.
"""

from __future__ import annotations

import pytest

from bench.op_samples import operators, trials
from bench.op_trials import RIGHT, UNCLEAR, WRONG, TrialOutcome, run_ours

CHUNKS = 16
SAMPLES = 2
LEAST_SHARE = 0.95


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_are_right_or_refused(chunk: int) -> None:
    outcomes = [o for op in operators()[chunk::CHUNKS] for o in run_ours(list(trials(op, SAMPLES)))]
    assert [_line(o) for o in outcomes if o.kind == WRONG] == []
    unclear = [o for o in outcomes if o.kind == UNCLEAR]
    assert [_line(o) for o in unclear] == []
    assert sum(o.kind == RIGHT for o in outcomes) >= LEAST_SHARE * len(outcomes)


def _line(outcome: TrialOutcome) -> str:
    return f"{outcome.name}: {outcome.text}"
