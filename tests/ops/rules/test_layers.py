"""Embeddings, attention, convolutions, pooling and random operators, held against the dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh, Partial, Placement, Replicate, Shard
from shardwise.ops import no_communication
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.random import manual_seed
from tests.dense import check_op, lay, ramp

IDS = torch.tensor([[1, 3, 6], [0, 0, 2]])
BAGS = (torch.tensor([1, 3, 6, 0, 0, 2]), torch.tensor([0, 2, 2]))


def laid(tensor: Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> Any:
    """A ShardedTensor, as far as a type checker can follow torch's functions: not at all."""
    return lay(tensor, mesh, placements)


def wave(*shape: int) -> Tensor:
    """Values of all signs, small enough for exponentials."""
    return torch.sin(ramp(*shape, grad=False) * 3).requires_grad_()


attend: Any = F.scaled_dot_product_attention
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "embedding": (lambda w, i: F.embedding(i, w), (ramp(7, 4), IDS)),
    "embedding with padding": (lambda w, i: F.embedding(i, w, padding_idx=3), (ramp(7, 4), IDS)),
    "embedding with frequencies": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (ramp(7, 4), IDS)),
    "bags, added": (lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"), (ramp(7, 4), *BAGS)),
    "bags, averaged": (lambda w, i, o: F.embedding_bag(i, w, o, mode="mean"), (ramp(7, 4), *BAGS)),
    "bags, largest": (lambda w, i, o: F.embedding_bag(i, w, o, mode="max"), (ramp(7, 4), *BAGS)),
    "attention": (lambda q, k, v: attend(q, k, v), (wave(2, 4, 3, 5), wave(2, 4, 6, 5), wave(2, 4, 6, 5))),
    "causal attention": (lambda q, k, v: attend(q, k, v, is_causal=True), (wave(2, 2, 4, 3),) * 3),
    "masked attention": (lambda q, k, v, m: attend(q, k, v, m), (*(wave(2, 2, 3, 4),) * 3, wave(1, 1, 3, 3).detach())),
    "scaled attention": (lambda q, k, v: attend(q, k, v, scale=0.3), (wave(2, 3, 4),) * 3),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (wave(2, 3, 4, 4), wave(4, 3, 3, 3), wave(4))),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2), (wave(2, 3, 6), wave(4, 3, 3))),
    "transposed conv2d": (F.conv_transpose2d, (wave(2, 3, 4, 4), wave(3, 4, 3, 3), wave(4))),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), (wave(2, 4, 4, 4), wave(6, 2, 3, 3))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (wave(2, 3, 4, 4),)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (wave(2, 3, 4),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 2), (wave(2, 3, 4, 4),)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (wave(2, 3, 4),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0), (wave(2, 3, 2, 2),)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_dense_one(name: str) -> None:
    fn, tensors = CASES[name]
    check_op(fn, *tensors, limit=12)


WORLD = Mesh.of(tp=2)


def test_heads_and_rows_of_tables_stay_where_they_are() -> None:
    def body(comm: Comm) -> list[str]:
        table = laid(ramp(7, 4), WORLD, (Shard(0),))
        heads = laid(wave(2, 4, 3, 5), WORLD, (Shard(1),))
        grouped = laid(wave(2, 2, 3, 5), WORLD, (Shard(1),))
        with no_communication():
            rows: Any = F.embedding(laid(IDS, WORLD, (Replicate(),)), table)
            found = attend(heads, heads, heads, is_causal=True)
            shared = attend(heads, grouped, grouped, enable_gqa=True)
        dense = attend(wave(2, 4, 3, 5), wave(2, 2, 3, 5), wave(2, 2, 3, 5), enable_gqa=True)
        torch.testing.assert_close(shared.full(), dense)
        return [str(x.placements) for x in (rows, found, shared)]

    assert run_local(body, 2)[0] == ["(Partial('sum'),)", "(Shard(1),)", "(Shard(1),)"]


def test_dropout_of_attention_takes_fewer_heads_of_keys() -> None:
    """On one rank, whose random stream no other thread moves on."""

    def body(comm: Comm) -> None:
        mesh = Mesh.of(tp=1)
        heads, grouped = laid(wave(2, 4, 3, 5), mesh, (Shard(1),)), laid(wave(2, 2, 3, 5), mesh, (Shard(1),))
        repeated: Any = grouped.repeat_interleave(2, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            found = attend(heads, grouped, grouped, dropout_p=0.5, enable_gqa=True)
            torch.manual_seed(7)
            expected = attend(heads, repeated, repeated, dropout_p=0.5)
        torch.testing.assert_close(found.full(), expected.full())
        assert not torch.allclose(found.full(), attend(heads, grouped, grouped, enable_gqa=True).full())

    run_local(body, 1)


def test_causal_rows_are_counted_from_the_first_one_also_where_another_axis_cuts_the_batch() -> None:
    x = wave(2, 2, 4, 3).detach()
    mesh = Mesh.of(dp=2, tp=2)

    def body(comm: Comm) -> None:
        rows, whole = laid(x, mesh, (Shard(0), Shard(2))), laid(x, mesh, (Shard(0), Replicate()))
        torch.testing.assert_close(attend(rows, whole, whole, is_causal=True).full(), attend(x, x, x, is_causal=True))

    run_local(body, 4)


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(0))], ids=str)
def test_multihead_attention_module(placements: tuple[Placement, Placement]) -> None:
    given, weights = placements
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 4, batch_first=True).double()
    x = wave(2, 3, 8)
    expected = module(x, x, x, need_weights=False)[0]
    values = {name: p.detach() for name, p in module.named_parameters()}

    def body(comm: Comm) -> None:
        own = nn.MultiheadAttention(8, 4, batch_first=True).double()
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            own_part = laid(value, WORLD, (Replicate() if name.startswith("in_") else weights,))
            setattr(own.get_submodule(owner), last, nn.Parameter(own_part))
        laid_x = laid(x, WORLD, (given,))
        result = own(laid_x, laid_x, laid_x, need_weights=False)[0]
        torch.testing.assert_close(result.full(), expected)

    run_local(body, 2)


# Random operators: one result for every layout


def ones(world: tuple[int, ...], placements: tuple[Placement, ...], fn: Callable[[Any], Any]) -> list[Any]:
    mesh = Mesh.of(**dict(zip(("dp", "tp"), world, strict=False)))

    def body(comm: Comm) -> Any:
        manual_seed(3, comm)
        x = laid(torch.ones(6, 8, dtype=torch.float64).requires_grad_(), mesh, placements)
        y = fn(x)
        y.full().sum().backward()
        assert x.grad is not None
        return y.full().detach(), x.grad.full()

    return run_local(body, mesh.ranks.size)


LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((1,), (Replicate(),)),
    ((2,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((3,), (Replicate(),)),
    ((2, 2), (Shard(1), Replicate())),
    ((2,), (Partial(),)),
]
DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout of features": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5) * x,
    "rand_like": lambda x: torch.rand_like(x) * x,
    "randint_like": lambda x: torch.randint_like(x, 0, 9) * x,
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operators_do_not_depend_on_the_layout(name: str) -> None:
    layouts = [(w, p) for w, p in LAYOUTS if "dropout" in name or not isinstance(p[0], Partial)]
    expected = ones(*layouts[0], DRAWS[name])[0]
    assert len(expected[0].unique()) > 1
    for world, placements in layouts[1:]:
        for result, grad in ones(world, placements, DRAWS[name]):
            assert torch.equal(result, expected[0]) and torch.equal(grad, expected[1]), (world, placements)


def test_attention_with_dropout_does_not_depend_on_the_layout() -> None:
    def run(world: int, placement: Placement) -> Tensor:
        def body(comm: Comm) -> Tensor:
            manual_seed(1, comm)
            x = laid(wave(2, 2, 4, 3), Mesh.of(tp=world), (placement,))
            return attend(x, x, x, dropout_p=0.4, is_causal=True).full().detach()  # type: ignore[no-any-return]

        results = run_local(body, world)
        assert all(torch.equal(r, results[0]) for r in results)
        return results[0]

    expected = run(1, Replicate())
    for placement in (Shard(0), Shard(1), Replicate()):
        torch.testing.assert_close(run(2, placement), expected)


def test_torchs_own_kernels_refuse_to_draw() -> None:
    def body(comm: Comm) -> None:
        x = laid(wave(2, 2, 4, 3), WORLD, (Shard(0),))
        with pytest.raises(UnsupportedOpError, match="attention with dropout draws random numbers; call"):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x, 0.5)

    run_local(body, 2)


@pytest.mark.parametrize("shapes", [((1, 0, 2), (2, 0, 2)), ((0, 2, 4), (3, 2, 2))])
def test_convolutions_of_no_channels_or_no_images_have_the_shape_that_torch_gives_them(shapes: Any) -> None:
    """Without channels the result has none."""
    for bias in ((), (torch.ones(shapes[1][0], dtype=torch.float64),)):
        check_op(
            lambda x, kernel, *b: F.conv1d(x, kernel, *b, padding=1),
            *(torch.zeros(s, dtype=torch.float64) for s in shapes),
            *bias,
            worlds=[(2,)],
            pending=False,
        )
