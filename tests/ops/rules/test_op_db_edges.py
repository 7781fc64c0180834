"""Samples of the operator database with values and lengths at the edges: which there are, and a few operators on them.

`python -m bench.op_db --edges` tries all operators.
"""

from __future__ import annotations

import pytest
import torch

from bench.op_db import run_ours, write_edges
from bench.op_db_calls import RIGHT, Ending, name_of
from bench.op_samples import EDGES, LENGTHS, WHOLE_EDGES, edges_of, operators

NUMBERS = {name_of(op): number for number, op in enumerate(operators())}
OPERATORS = ("amax", "argmin", "clamp", "cummax", "sign")


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_at_edges_what_they_give_on_whole_tensors(name: str) -> None:
    endings = run_ours([NUMBERS[name]], samples=1, edges=True)
    assert {e.values for e in endings} >= {"infinities", "nan", "zeros of both signs", "length 3"}
    assert [e for e in endings if e.kind != RIGHT] == []


def test_values_of_all_tensors_of_the_dtype_are_changed_and_nothing_else() -> None:
    x, index = torch.ones(5, 2, requires_grad=True), torch.tensor([0, 1])
    found = dict(edges_of(((x, index, 2), {"other": x.detach()}), torch.float32))
    assert list(found) == [*EDGES, *LENGTHS]
    (changed, kept, number), named = found["infinities"]
    assert kept is index and number == 2 and changed.requires_grad and changed.shape == x.shape
    assert changed.isinf().any() and torch.equal(changed, named["other"])
    (changed, kept, _), named = found["length 3"]
    assert changed.shape == named["other"].shape == (3, 2) and torch.equal(kept, index)


def test_of_integers_the_first_tensor_is_changed_as_others_may_be_indices() -> None:
    x, index = torch.ones(2, 3, dtype=torch.int64), torch.tensor([0, 1])
    found = dict(edges_of(((x, index), {}), torch.int64))
    assert list(found) == [*WHOLE_EDGES, "length 0", "length 1"]
    (changed, kept), _ = found["limits"]
    assert {torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max} <= set(changed.flatten().tolist())
    assert kept is index
    assert "limits" not in dict(edges_of(((x.bool(),), {}), torch.bool))


def test_the_section_takes_the_place_of_the_one_before() -> None:
    page = "# Page\n\n## In short\n\n## Operators (1)\n\n| `add` |\n"
    once = write_edges(page, [Ending("add", "float64", "call", "R", RIGHT, "", "nan")], 1)
    assert "| nan | 1 | 1 | 0 | 0 | 0 | 100 % |" in once.splitlines()
    again = write_edges(once, [Ending("add", "float64", "call", "R", RIGHT, "", "ties")] * 2, 1)
    assert again.startswith("# Page\n\n## In short\n\n## Edge values\n")
    assert again.endswith("\n## Operators (1)\n\n| `add` |\n")
    assert "| ties | 2 | 2 | 0 | 0 | 0 | 100 % |" in again.splitlines() and "nan |" not in again
