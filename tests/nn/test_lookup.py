"""Does a sharded table or weight give each rank, for its own plain batch, what the whole one gives, gradients too?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import no_communication
from shardwise.comm import Comm, run_local
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Replicate,
    Shard,
    ShardingSpec,
)
from shardwise.nn import lookup_fetch as lookup_call
from shardwise.nn import plain_as_local_batch, shard_parameter
from shardwise.ops import HiddenCommunicationError, MixedTensorsError
from shardwise.tensor import ShardedTensor, shard
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("renorm_on_host")
RANKS, ROWS, WIDTH = 3, 11, 6
Function = Callable[[Tensor, int], Tensor]

SPECS: dict[str, ShardingSpec] = {
    "rows": ChunkSpec(0, 3),
    "columns": ChunkSpec(1, 3),
    "permuted": ChunkSpec(0, (2, 0, 1)),
    "uneven": MeshSpec(Mesh.of(x=3), (Shard(0, sizes=(0, 8, 3)),)),
    "cyclic": MeshSpec(Mesh.of(x=3), (Shard(0, block=2),)),
    "one rank": EnumerableSpec([Piece(Box((0, 0), (ROWS, WIDTH)), 1)]),
    "irregular": EnumerableSpec(
        [
            Piece(Box((0, 0), (5, 3)), 1),
            Piece(Box((0, 3), (2, 3)), 0),
            Piece(Box((2, 3), (9, 3)), 2),
            Piece(Box((5, 0), (6, 3)), 0),
        ]
    ),
    "replicas": EnumerableSpec(
        [Piece(Box((0, 0), (5, 6)), 0), Piece(Box((0, 0), (5, 6)), 1), Piece(Box((5, 0), (6, 6)), 1)], replicated=True
    ),
    "everywhere": MeshSpec(Mesh.of(x=3), (Replicate(),)),
}
# One rank asks for rows twice, one for a single row, one for nothing.
IDS = [torch.tensor([[3, 3, 10, 0], [7, 2, 2, 5]]), torch.tensor([[1]]), torch.zeros(0, 4, dtype=torch.int64)]


def table(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(1))


def scales(ids: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, max(1, ids.numel()), dtype=torch.float64)[: ids.numel()].reshape(ids.shape)


def runs(rank: int) -> tuple[Tensor, Tensor]:
    """Flat ids and offsets with an empty bag."""
    flat = IDS[rank].flatten()
    return flat, torch.tensor([0, 0, min(1, len(flat))])


def with_last(rank: int) -> tuple[Tensor, Tensor]:
    flat, offsets = runs(rank)
    return flat, torch.cat([offsets, torch.tensor([len(flat)])])


EMBEDDINGS: dict[str, Function] = {
    "plain": lambda w, r: F.embedding(IDS[r], w),
    "int32": lambda w, r: F.embedding(IDS[r].int(), w),
    "padding": lambda w, r: F.embedding(IDS[r], w, padding_idx=3),
    "padding from the end": lambda w, r: F.embedding(IDS[r], w, padding_idx=-1),
    "max_norm": lambda w, r: F.embedding(IDS[r], w, max_norm=1.5),
    "max_norm 1": lambda w, r: F.embedding(IDS[r], w, max_norm=1.5, norm_type=1.0),
    "max_norm inf": lambda w, r: F.embedding(IDS[r], w, max_norm=0.5, norm_type=float("inf")),
}
BAGS: dict[str, Function] = {
    "mean": lambda w, r: F.embedding_bag(IDS[r], w, padding_idx=2),
    "max": lambda w, r: F.embedding_bag(IDS[r], w, mode="max", max_norm=2.0),
    "weighted sum": lambda w, r: F.embedding_bag(IDS[r], w, mode="sum", per_sample_weights=scales(IDS[r])),
    "offsets": lambda w, r: F.embedding_bag(*_bag_args(w, runs(r)), mode="mean"),
    "last offset": lambda w, r: F.embedding_bag(*_bag_args(w, with_last(r)), mode="sum", include_last_offset=True),
}
LINEAR: dict[str, Function] = {
    "many rows": lambda w, r: F.linear(torch.full((2, 3 + r, WIDTH), 0.5 + r, dtype=torch.float64), w),
    "few rows": lambda w, r: F.linear(torch.full((1 if r == 0 else 0, WIDTH), 0.5 + r, dtype=torch.float64), w),
    "one row": lambda w, r: F.linear(torch.full((WIDTH,), 0.5 + r, dtype=torch.float64), w, torch.ones(ROWS).double()),
}


def _bag_args(weight: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return given[0], weight, given[1]


def loss(result: Tensor, rank: int) -> Tensor:
    return (result * (result + 1)).sum() * (rank + 1)


def _close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape and torch.allclose(found, expected), what


def dense(function: Function) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's result, the gradient of the sum of all losses, and the table afterwards."""
    weight = table().requires_grad_()
    results = [function(weight, rank) for rank in range(RANKS)]
    torch.stack([loss(result, rank) for rank, result in enumerate(results)]).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert weight.grad is not None
    return [r.detach() for r in results], weight.grad, weight.detach()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("functions", [EMBEDDINGS, BAGS, LINEAR], ids=["embedding", "embedding_bag", "linear"])
def test_each_rank_gets_the_result_of_its_own_batch(spec: ShardingSpec, functions: dict[str, Function]) -> None:
    def body(comm: Comm) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for function in functions.values():
            weight = shard(table(), spec).requires_grad_()
            with plain_as_local_batch():
                result = function(weight, comm.rank)
            loss(result, comm.rank).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            grad = weight.grad
            assert isinstance(grad, ShardedTensor)
            found.append((result.detach(), grad.full(), weight.detach().full()))
        return found

    by_rank = run_local(body, RANKS)
    for number, (name, function) in enumerate(functions.items()):
        results, grad, after = dense(function)
        for rank in range(RANKS):
            found = by_rank[rank][number]
            _close(found[0], results[rank], name)
            _close(found[1], grad, f"gradient of {name}")
            _close(found[2], after, f"table after {name}")


def test_weights_of_samples_get_gradients() -> None:
    def gradient(weight: Tensor, rank: int) -> Tensor:
        samples = scales(IDS[rank]).requires_grad_()
        loss(F.embedding_bag(IDS[rank], weight, mode="sum", per_sample_weights=samples), rank).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        assert samples.grad is not None
        return samples.grad

    def body(comm: Comm) -> Tensor:
        with plain_as_local_batch():
            return gradient(shard(table(), ChunkSpec(0, 3)).requires_grad_(), comm.rank)

    for rank, found in enumerate(run_local(body, RANKS)):
        torch.testing.assert_close(found, gradient(table().requires_grad_(), rank))


@pytest.mark.parametrize("spec", [SPECS["rows"], SPECS["columns"]], ids=["rows", "columns"])
def test_modules_with_sharded_parameters_read_plain_inputs_as_their_batch(spec: ShardingSpec) -> None:
    layers: dict[str, nn.Module] = {
        "embedding": nn.Embedding(ROWS, WIDTH, padding_idx=3, max_norm=1.0),
        "bag": nn.EmbeddingBag(ROWS, WIDTH, mode="sum"),
        "linear": nn.Linear(WIDTH, ROWS),
    }

    def inputs(kind: str, rank: int) -> Tensor:
        return torch.full((2, WIDTH), float(rank)) if kind == "linear" else IDS[rank]

    def body(comm: Comm) -> list[Tensor]:
        found = []
        for kind, whole in layers.items():
            layer = copy.deepcopy(whole)
            shard_parameter(layer, "weight", spec)
            found.append(layer(inputs(kind, comm.rank)).detach())
        return found

    for rank, results in enumerate(run_local(body, RANKS)):
        for (kind, whole), found in zip(layers.items(), results, strict=True):
            torch.testing.assert_close(found, copy.deepcopy(whole)(inputs(kind, rank)).detach())


def test_a_forward_that_raises_ends_the_reading() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(table())

        def forward(self, ids: Tensor) -> Tensor:
            raise KeyError("inside")

    layer = Fails()
    shard_parameter(layer, "weight", ChunkSpec(0, 1))
    with pytest.raises(KeyError, match="inside"):
        layer(IDS[0])
    with pytest.raises(MixedTensorsError):
        F.embedding(IDS[0], layer.weight)


def test_sharded_ids_go_the_usual_way_inside_a_block() -> None:
    def body(comm: Comm) -> Tensor:
        mesh = Mesh.of(x=2)
        weight = shard(table(), MeshSpec(mesh, (Shard(1),)))
        ids = shard(IDS[0], MeshSpec(mesh, (Replicate(),)))
        with plain_as_local_batch():
            found = F.embedding(ids, weight)
        assert isinstance(found, ShardedTensor)
        return found.full()

    for found in run_local(body, 2):
        torch.testing.assert_close(found, F.embedding(IDS[0], table()))


class Counting:
    """A comm that counts the bytes it sends to others."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.sent: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def exchange(self, sends: Any, receives: Any, *, label: str) -> Any:
        self.sent[label] = sum(t.nbytes for r, blocks in sends.items() if r != self.comm.rank for t in blocks)
        return self.comm.exchange(sends, receives, label=label)


def _sent(spec: ShardingSpec, function: Callable[[Tensor], Tensor]) -> list[dict[str, int]]:
    """The bytes that each of two ranks sends in the exchanges of a lookup."""

    def body(comm: Comm) -> dict[str, int]:
        weight = shard(table(), spec)
        counting = Counting(comm)
        weight.comm = counting  # stands in for a comm
        with plain_as_local_batch():
            function(weight)
        return counting.sent

    return run_local(body, 2)


def test_only_the_rows_that_are_wanted_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([0, 10, 10, 10, 10, 9])
    # Rows 9 and 10 lie on rank 1: they come back once. A short list of ids needs no exchange of its own.
    rows = [{"embedding: rows": 8 * WIDTH}, {"embedding: rows": 16 * WIDTH}]
    assert _sent(ChunkSpec(0, 2), lambda weight: F.embedding(ids, weight)) == rows
    monkeypatch.setattr(lookup_call, "INLINE", 0)
    numbers = [{"embedding: row numbers": 8}, {"embedding: row numbers": 4}]
    assert _sent(ChunkSpec(0, 2), lambda weight: F.embedding(ids, weight)) == [
        {**n, **r} for n, r in zip(numbers, rows, strict=True)
    ]


def test_few_repeated_ids_are_not_made_distinct() -> None:
    ids = torch.tensor([0, 10, 1, 8, 8, 9])
    assert _sent(ChunkSpec(0, 2), lambda weight: F.embedding(ids, weight)) == [
        {"embedding: rows": 2 * 8 * WIDTH},
        {"embedding: rows": 4 * 8 * WIDTH},
    ]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sums_of_bags_travel_instead_of_rows(mode: str) -> None:
    ids = torch.tensor([[0, 10, 1, 2], [8, 7, 6, 9]])
    # One sum of each bag from each rank that has a row of it: the second bag has none on rank 0.
    assert _sent(ChunkSpec(0, 2), lambda weight: F.embedding_bag(ids, weight, mode=mode)) == [
        {"embedding_bag: sums of bags": 8 * WIDTH},
        {"embedding_bag: sums of bags": 2 * 8 * WIDTH},
    ]
    assert (
        _sent(ChunkSpec(1, 2), lambda weight: F.embedding_bag(ids, weight, mode=mode))
        == [{"embedding_bag: sums of bags": 2 * 8 * WIDTH // 2}] * 2
    )


def test_rows_of_bags_travel_where_they_are_fewer_than_sums() -> None:
    ids = torch.tensor([[10, 10], [10, 10], [10, 10]])
    assert _sent(ChunkSpec(0, 2), lambda weight: F.embedding_bag(ids, weight, mode="sum")) == [
        {"embedding_bag: rows": 0},
        {"embedding_bag: rows": 8 * WIDTH},
    ]


WRONG: list[tuple[str, Callable[[Tensor, int], Any], str]] = [
    ("out of range", lambda w, r: F.embedding(torch.tensor([r * 9]), w), r"rank 2: Index out of range .* has 11 rows"),
    (
        "negative",
        lambda w, r: F.embedding(torch.tensor([r - 1]), w),
        r"rank 0: Index out of range in Input: ids from -1",
    ),
    ("float ids", lambda w, r: F.embedding(torch.tensor([0.0]), w), "ids are int32 or int64, got torch.float32"),
    ("max_norm", lambda w, r: F.embedding(IDS[r], w, max_norm=1.0 + r), "max_norm is 1.0 on rank 0 and 2.0 on rank 1"),
    ("no offsets", lambda w, r: F.embedding_bag(IDS[r].flatten(), w), "offsets is required for 1D input"),
    ("both", lambda w, r: F.embedding_bag(IDS[r], w, torch.tensor([0])), "exactly 1 dim where offsets are given"),
    ("mode", lambda w, r: F.embedding_bag(IDS[r], w, mode="min"), "mode 'min' is not supported"),
    ("start", lambda w, r: F.embedding_bag(IDS[0][0], w, torch.tensor([1])), "the first offset is 1; it must be 0"),
    (
        "descending offsets",
        lambda w, r: F.embedding_bag(IDS[0][0], w, torch.tensor([0, 3, 1])),
        "offsets ascend from 0 to at most 4, the number of ids",
    ),
    (
        "far offsets",
        lambda w, r: F.embedding_bag(IDS[0][0], w, torch.tensor([0, 5])),
        "at most 4, the number of ids; these end at 5",
    ),
    (
        "float offsets",
        lambda w, r: F.embedding_bag(IDS[0][0], w, torch.tensor([0.0])),
        "offsets have 1 dim and are int32 or int64, got 1 dims of torch.float32",
    ),
    (
        "two modes",
        lambda w, r: F.embedding_bag(IDS[r], w, mode=("sum", "mean", "sum")[r]),
        "mode is 'sum' on ranks 0, 2",
    ),
    (
        "dtype of weights",
        lambda w, r: F.embedding_bag(IDS[r], w, mode="sum", per_sample_weights=scales(IDS[r]).float()),
        "per_sample_weights are torch.float32 and the table is torch.float64; use the same dtype",
    ),
    (
        "last",
        lambda w, r: F.embedding_bag(IDS[0][0], w, torch.tensor([0, 3]), include_last_offset=True),
        "the last of the offsets is the number of ids, 4",
    ),
    (
        "weights",
        lambda w, r: F.embedding_bag(IDS[r], w, mode="sum", per_sample_weights=torch.ones(1)),
        "per_sample_weights size .* not equal to input size",
    ),
    ("width", lambda w, r: F.linear(torch.ones(1, 4).double(), w), "takes inputs of width 6; the ranks"),
]


@pytest.mark.parametrize(("function", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_one_rank_asks_wrongly_is_raised_on_all(function: Function, text: str) -> None:
    def body(comm: Comm) -> None:
        with plain_as_local_batch(), pytest.raises(ValueError, match=text):
            function(shard(table(), ChunkSpec(0, 3)), comm.rank)

    run_local(body, RANKS)


def test_what_no_rank_may_ask() -> None:
    weight = shard(table(), ChunkSpec(0, 1))
    with plain_as_local_batch():
        with pytest.raises(RuntimeError, match='flag on "scale_grad_by_freq" not supported'):
            F.embedding(IDS[0], weight, scale_grad_by_freq=True)
        with pytest.raises(RuntimeError, match='flag on "sparse" not supported'):
            F.embedding_bag(IDS[0], weight, sparse=True)
        with pytest.raises(ValueError, match='"max_norm" must be larger than zero'):
            F.embedding(IDS[0], weight, max_norm=-1.0)
        with pytest.raises(ValueError, match="padding_idx 11 is outside of the table's 11 rows"):
            F.embedding(IDS[0], weight, padding_idx=11)
        with pytest.raises(ValueError, match=r"exactly 2 dims, got shape \(11,\)"):
            F.embedding(IDS[0], shard(table()[:, 0], ChunkSpec(0, 1)))
        with pytest.raises(HiddenCommunicationError), no_communication():
            F.embedding(IDS[0], weight)


def test_a_pending_table_is_refused() -> None:
    def body(comm: Comm) -> None:
        weight = shard(table(), MeshSpec(Mesh.of(x=2), (Partial(),)))
        with plain_as_local_batch(), pytest.raises(UnsupportedOpError, match="a reduction of the table is pending"):
            F.embedding(IDS[0], weight)

    run_local(body, 2)
