"""Every mode with every option, on tables cut in all ways: the results and gradients of the whole table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm, run_local
from shardwise.geometry import Box, ChunkSpec, EnumerableSpec, Mesh, MeshSpec, Piece, Replicate, Shard, ShardingSpec
from shardwise.nn import lookup_fetch as lookup_call
from shardwise.nn import plain_as_local_batch
from shardwise.tensor import ShardedTensor, shard
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("renorm_on_host")
RANKS, ROWS, WIDTH = 2, 7, 4
SPECS: dict[str, ShardingSpec] = {
    "rows": ChunkSpec(0, 2),
    "columns": ChunkSpec(1, 2),
    "one rank": EnumerableSpec([Piece(Box((0, 0), (ROWS, WIDTH)), 1)]),
    "cyclic rows": MeshSpec(Mesh.of(x=2), (Shard(0, block=1),)),
    "overlapping": EnumerableSpec(
        [Piece(Box((0, 0), (5, 1)), 0), Piece(Box((5, 0), (2, 1)), 1), Piece(Box((0, 1), (7, 3)), 1)]
    ),
    "two bands": EnumerableSpec(
        [
            Piece(Box((0, 0), (5, 2)), 0),
            Piece(Box((0, 2), (2, 2)), 0),
            Piece(Box((5, 0), (2, 2)), 1),
            Piece(Box((2, 2), (5, 2)), 1),
        ]
    ),
    "replicas": EnumerableSpec(
        [Piece(Box((0, 0), (4, 4)), 0), Piece(Box((0, 0), (4, 4)), 1), Piece(Box((4, 0), (3, 4)), 1)], replicated=True
    ),
    "everywhere": MeshSpec(Mesh.of(x=2), (Replicate(),)),
}
# Few repeat, so that sums travel; many repeat, so that rows are fetched. The second rank has fewer, or none.
BATCHES = {
    "few repeat": [torch.tensor([0, 6, 3, 2, 5, 2, 4, 1]), torch.tensor([6, 0])],
    "many repeat": [torch.tensor([2, 5, 5, 5, 2, 2, 5, 2]), torch.zeros(0, dtype=torch.int64)],
}


@dataclass(frozen=True)
class Case:
    """A call of embedding (no mode) or embedding_bag."""

    batch: str
    mode: str | None
    form: str
    padding: int | None
    most: float | None
    kind: float
    weights: str

    def __call__(self, table: Tensor, rank: int) -> tuple[Tensor, Tensor | None]:
        """The result, and the weights of samples if they get a gradient."""
        ids = BATCHES[self.batch][rank]
        given: dict[str, Any] = {"padding_idx": self.padding, "max_norm": self.most, "norm_type": self.kind}
        if self.mode is None:
            return F.embedding(ids.view(2, -1) if self.form == "2 dims" else ids.int(), table, **given), None
        samples = None
        if self.form == "2 dims":
            ids = ids.view(-1, 2)
        else:
            ends = [len(ids)] if self.form == "last offset" else []
            given["offsets"] = torch.tensor([0, 0, len(ids) // 3, *ends])
            given["include_last_offset"] = bool(ends)
        if self.weights != "none":
            samples = torch.linspace(0.5, 2, max(1, ids.numel()), dtype=torch.float64)[: ids.numel()].view(ids.shape)
            samples.requires_grad_(self.weights == "trained")
        result = F.embedding_bag(ids, table, mode=self.mode, per_sample_weights=samples, **given)
        return result, samples if self.weights == "trained" else None


def cases(batch: str) -> Iterator[Case]:
    limits = [(None, 2.0), (1.0, 2.0), (1.0, 1.0), (0.5, float("inf"))]
    for form, padding, (most, kind) in itertools.product(["1 dim", "2 dims"], [None, 2, -2], limits):
        yield Case(batch, None, form, padding, most, kind, "none")
    forms = ["2 dims", "offsets", "last offset"]
    for mode, form, padding, most in itertools.product(["sum", "mean", "max"], forms, [None, 2], [None, 1.0]):
        for weights in ["none", "given", "trained"] if mode == "sum" else ["none"]:
            yield Case(batch, mode, form, padding, most, 2.0, weights)


def table() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(1))


def loss(result: Tensor, rank: int) -> Tensor:
    return (result * (result + 1)).sum() * (rank + 1)


def whole(case: Case) -> list[list[Tensor]]:
    """For each rank: its result, the table's gradient, the table afterwards, and the gradient of weights of samples."""
    weight = table().requires_grad_()
    made = []
    for rank in range(RANKS):
        made.append(case(weight, rank))
        loss(made[-1][0], rank).backward()  # type: ignore[no-untyped-call]  # untyped in torch
    return [_found(result, weight, samples) for result, samples in made]


def _found(result: Tensor, weight: Tensor, samples: Tensor | None) -> list[Tensor]:
    grad = weight.grad
    assert grad is not None
    both = (t.full() if isinstance(t, ShardedTensor) else t for t in (grad, weight.detach()))
    return [result.detach(), *both, *([] if samples is None or samples.grad is None else [samples.grad])]


def _compare(spec: ShardingSpec, chosen: list[Case]) -> None:
    def body(comm: Comm) -> list[list[Tensor]]:
        found = []
        for case in chosen:
            weight = shard(table(), spec).requires_grad_()
            with plain_as_local_batch():
                result, samples = case(weight, comm.rank)
            loss(result, comm.rank).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            found.append(_found(result, weight, samples))
        return found

    by_rank = run_local(body, RANKS)
    for number, case in enumerate(chosen):
        for rank, expected in enumerate(whole(case)):
            found = by_rank[rank][number]
            assert len(found) == len(expected), case
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.shape == theirs.shape and torch.allclose(mine, theirs), (case, rank)


@pytest.mark.parametrize("name", ["rows", "columns", "one rank", "two bands", "replicas"])
def test_every_mode_with_every_option(name: str) -> None:
    _compare(SPECS[name], list(cases("few repeat")))


@pytest.mark.parametrize("name", ["rows", "replicas"])
def test_every_mode_with_ids_that_repeat(name: str) -> None:
    _compare(SPECS[name], list(cases("many repeat")))


@pytest.mark.parametrize("name", ["cyclic rows", "overlapping", "everywhere"])
def test_sums_and_rows_of_other_cuts(name: str) -> None:
    _compare(SPECS[name], [case for case in cases("few repeat") if case.most is None and case.padding != -2])


@pytest.mark.parametrize("name", ["rows", "replicas"])
def test_long_lists_travel_on_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_call, "INLINE", 8)
    _compare(SPECS[name], [case for case in cases("few repeat") if case.most is None and case.padding != -2])


def test_lists_of_one_rank_come_along_and_those_of_another_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_call, "INLINE", 24)
    _compare(SPECS["columns"], [case for case in cases("few repeat") if case.most is None and case.padding is None])
