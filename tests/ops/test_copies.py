"""Computing with tensors whose parts are on several ranks: values and gradients of whole ones, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import (
    Comm,
    ShardedTensor,
    explain,
    from_local,
    manual_seed,
    parse_placements,
    parse_spec,
    replicate,
    run_local,
    shard,
)
from shardwise.ops import no_communication
from tests.dense import assert_same, check, lay, numbers, ramp


def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, repeats: bool = False) -> Tensor:
    """Attention of grouped queries, heads of 2 rows, as three linear layers."""
    query, key, value = (F.linear(x, w).view(*x.shape[:-1], -1, 2).transpose(1, 2) for w in (q, k, v))
    if repeats:  # as models do that know of no groups
        shape = (*key.shape[:2], query.shape[1] // key.shape[1], *key.shape[2:])
        key, value = (t[:, :, None].expand(shape).reshape(query.shape) for t in (key, value))
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=not repeats)
    return F.linear(made.transpose(1, 2).reshape(*x.shape[:-1], -1), o)


def attend_fused(x: Tensor, qkv: Tensor, bias: Tensor, o: Tensor, rows: tuple[int, int]) -> Tensor:
    """The same as one linear layer."""
    parts = F.linear(x, qkv, bias).split([rows[0], rows[1], rows[1]], -1)
    query, key, value = (t.view(*x.shape[:-1], -1, 2).transpose(1, 2) for t in parts)
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return F.linear(made.transpose(1, 2).reshape(*x.shape[:-1], -1), o)


CASES = [
    (h, g, n)
    for h, g, n in product(range(1, 9), range(1, 9), (2, 3, 4))
    if g < n and n % g == 0 and h % n == 0 and h % g == 0
]


@pytest.mark.parametrize(("h", "g", "n"), CASES)
def test_attention_of_fewer_heads_of_keys_than_ranks(h: int, g: int, n: int) -> None:
    """Nothing moves in the forward pass; gradients are those of whole tensors, of a layer's input too."""
    x, o = numbers(2, 3, 4), numbers(4, 2 * h, seed=3)
    q, k, v = numbers(2 * h, 4, seed=1), numbers(2 * g, 4, seed=2), numbers(2 * g, 4, seed=4)
    three = [f"on tp={n}: {p}" for p in ("R", "S(0)", *[f"S(0) each {n // g} unit(2)"] * 2, "S(1)")]
    for repeats in (False, True):
        check(attend, three, (x, q, k, v, o, repeats), world=n)
    groups = f"S(0) groups({2 * h},{2 * g} each {n // g},{2 * g} each {n // g}) unit(2)"
    one = [f"on tp={n}: {p}" for p in ("R", groups, groups, "S(1)")]
    qkv = (x, torch.cat([q, k, v]), numbers(2 * h + 4 * g, seed=5), o)
    check(attend_fused, one, (*qkv, (2 * h, 2 * g)), world=n)

    def body(comm: Comm) -> None:
        with no_communication():
            attend(*(lay(t, s) for t, s in zip((x, q, k, v, o), three, strict=True)))
            attend_fused(*(lay(t, s) for t, s in zip(qkv, one, strict=True)), (2 * h, 2 * g))

    run_local(body, n)


def test_queries_in_uneven_parts_follow_the_keys() -> None:
    """14 heads of queries and 2 of keys on 4 ranks: each has queries of one key only."""
    x, o = numbers(2, 3, 4), numbers(4, 28, seed=3)
    q, k, v = numbers(28, 4, seed=1), numbers(4, 4, seed=2), numbers(4, 4, seed=4)
    own = "sizes(8,6,8,6) unit(2)"
    layouts = [
        f"on tp=4: {p}" for p in ("R", f"S(0) {own}", "S(0) each 2 unit(2)", "S(0) each 2 unit(2)", f"S(1) {own}")
    ]
    check(attend, layouts, (x, q, k, v, o), world=4)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "fsdp=2,tp=2"])
def test_copies_beside_a_split_batch(mesh: str) -> None:
    """Parameters that are whole or gathered along the axis of the batch: their gradients are summed over both."""
    x, o = numbers(2, 3, 4), numbers(4, 8, seed=3)
    q, k, v = numbers(8, 4, seed=1), numbers(2, 4, seed=2), numbers(2, 4, seed=4)
    other = "R" if mesh.startswith("dp") else "S(1)"
    layouts = [
        f"on {mesh}: {p}" for p in ("S(0), R", f"{other}, S(0)", *[f"{other}, S(0) each 2 unit(2)"] * 2, "R, S(1)")
    ]
    check(attend, layouts, (x, q, k, v, o), world=4)


def like(x: Tensor, values: list[int]) -> Tensor:
    """Whole numbers beside a tensor: on every rank, if it is sharded."""
    made = torch.tensor(values)
    return replicate(made, x) if isinstance(x, ShardedTensor) else made


COPIES = "on tp=4: S(0) groups(4,2 each 2,2 each 2)"
OPERATORS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x: (x * 2).exp() + x,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "sum in rows": lambda x: x.sum(1),
    "mean": lambda x: x.mean(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "largest": lambda x: x.amax(0),
    "softmax of rows": lambda x: x.softmax(0),
    "softmax in rows": lambda x: x.softmax(1),
    "norm of rows": lambda x: F.layer_norm(x, x.shape),
    "norm in rows": lambda x: F.rms_norm(x, x.shape[1:]),
    "running sum": lambda x: x.cumsum(0),
    "sorted": lambda x: x.sort(0).values,
    "transposed": lambda x: x.t().contiguous(),
    "product that keeps the rows": lambda x: x @ x.new_ones(3, 2),
    "product over the rows": lambda x: x.t() @ x,
    "linear layer over the rows": lambda x: F.linear(x.t(), x.t()),
    "einsum over the rows": lambda x: torch.einsum("ij,ik->jk", x, x),
    "whole groups": lambda x: list(x.split([4, 2, 2])),
    "half a group": lambda x: x[5:],
    "one row": lambda x: x[6] * x[1],
    "rows by number": lambda x: x.index_select(0, like(x, [7, 0, 4])),
    "joined along another dim": lambda x: torch.cat([x, x], 1),
    "joined along the dim": lambda x: torch.cat([x, x]),
    "stacked": lambda x: torch.stack([x, x], 1),
    "flat": lambda x: x.reshape(-1),
    "in pairs of rows": lambda x: x.reshape(4, 2, 3),
    "in fours of rows": lambda x: x.reshape(2, 12),
    "one more dim": lambda x: x.unsqueeze(0).expand(2, 8, 3),
    "rows replaced": lambda x: torch.slice_scatter(x, x[:2] * 2, 0, 3, 5),
    "without a dim": lambda x: x[:1, :1].reshape(()) * x[:1, :1].reshape(1),
    "turned round": lambda x: x.flip(0),
    "padded": lambda x: F.pad(x, (0, 0, 1, 2)),
    "triangle": lambda x: x.tril(),
    "dtype": lambda x: x.float().double(),
    "loss": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "classes": lambda x: F.cross_entropy(x, like(x, [0, 1, 2, 0, 1, 2, 0, 1])),
    "where": lambda x: torch.where(x > 0, x, -x),
    "convolution": lambda x: F.conv1d(x.unsqueeze(0), x.new_ones(2, 8, 2)),
    "determinant": lambda x: (x.t() @ x).det(),
    "second value": lambda x: x.topk(2, 0).values,
}


@pytest.mark.parametrize(
    "layout", [COPIES, "on tp=4: S(0) each 2 unit(3)", "on a=2,b=2: S(1) each 2, S(0) groups(4,4 each 2)"]
)
def test_operators(layout: str) -> None:
    """Marked for copies or not: each gives the values and the gradients of the whole."""
    for program in OPERATORS.values():
        check(program, [layout], (numbers(8, 3),), world=4)


def test_which_operators_keep_copies() -> None:
    kept = [
        "pointwise",
        "sum in rows",
        "softmax in rows",
        "norm in rows",
        "product that keeps the rows",
        "dtype",
        "where",
    ]

    def body(comm: Comm) -> None:
        x = lay(ramp(8, 3, grad=False), COPIES)
        with no_communication():
            for name in kept:
                assert OPERATORS[name](x).placements == parse_placements(COPIES.partition(": ")[2]), name
            parts = x.split([4, 2, 2])
            assert [str(p.placements[0]) for p in parts] == ["Shard(0)", *["Shard(0, each=(2,))"] * 2]  # type: ignore[attr-defined]
            assert str(x.t().placements[0]) == "Shard(1, groups=(4, 2, 2), each=(1, 2, 2))"
            rows = lay(ramp(8, 3, grad=False), "on tp=4: S(0) each 2 unit(4)")
            assert str(rows.view(2, 4, 3).placements[0]) == "Shard(0, each=(2,))"
            assert str(rows.view(2, 4, 3).reshape(8, 3).placements[0]) == "Shard(0, unit=4, each=(2,))"
            assert str(rows.sum().placements[0]) == "Partial('sum')"  # each copy counts once

    run_local(body, 4)


def test_beside_other_cuts() -> None:
    """Operands with copies and without, or with others, in one operator."""
    others = ["R", "S(0)", "S(1)", "P(sum)", "S(0) each 4", "S(0) sizes(1,0,5,2)", COPIES.partition(": ")[2]]
    for other in others:
        for pair in ((COPIES, f"on tp=4: {other}"), (f"on tp=4: {other}", COPIES)):
            check(lambda x, y: (x * y + x).sum(1), pair, (numbers(8, 3), numbers(8, 3, seed=1)), world=4)


def test_written_in_place() -> None:
    def scaled(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.mul_(2).add_(1).clamp_(max=3)

    def sorted_rows(x: Tensor) -> Tensor:
        with torch.no_grad():
            x[1:7] = 5
            x.cumsum_(0)
            return x.fill_diagonal_(2)

    for program in (
        scaled,
        sorted_rows,
        lambda x: x.zero_(),
        lambda x: x.fill_(3),
        lambda x: x.copy_(x.new_ones(8, 3)),
    ):
        check(program, [COPIES], (ramp(8, 3, grad=False),), world=4, grad=False)


def test_written_through_views() -> None:
    """Also where a view had to be copied because a rank has copies of everything, as if it were replicated."""

    def through(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            x[1:].mul_(2)
            x.view(-1)[5:7].fill_(3)
            x.t()[1].add_(1)
            x.flip(0).zero_()
            return [x[4:6], x]

    for layout in (COPIES, "on tp=4: S(0) each 4", "on tp=4: S(1) each 2"):
        check(through, [layout], (ramp(8, 3, grad=False),), world=4, grad=False)


def test_random_numbers_do_not_depend_on_copies() -> None:
    def body(comm: Comm) -> None:
        found = []
        for layout in (COPIES, "on tp=4: R", "on tp=4: S(1)"):
            manual_seed(3)
            x = shard(torch.zeros(8, 3), layout)
            found.append([x.uniform_().full().clone(), x.normal_().full(), F.dropout(x, 0.5).full()])
        for other in found[1:]:
            assert_same(found[0], other, rtol=0, atol=0)

    run_local(body, 4)


def test_gradients_of_leaves_are_summed_once() -> None:
    """Equal bits on all copies; what has no copies is as before; a second backward pass adds."""
    whole = numbers(8, 3)

    def body(comm: Comm) -> None:
        w, expected = shard(whole.clone(), COPIES).requires_grad_(), whole.clone().requires_grad_()
        for _ in range(2):
            (w.sigmoid() * w).sum().backward()
            (expected.sigmoid() * expected).sum().backward()
        assert w.grad is not None and w.grad.sharding is w.sharding and w.is_leaf
        assert_same(w.grad, expected.grad)
        local = w.grad.local_tensor()
        others = comm.all_gather_bytes(local[1:].contiguous().numpy().tobytes(), label="copies")
        assert others[comm.rank] == others[comm.rank ^ 1]
        (twice,) = torch.autograd.grad((w.exp() * 3).sum(), w)  # also where nothing accumulates
        assert_same(twice, whole.exp() * 3)
        seen: list[Any] = []
        w.register_hook(lambda grad: seen.append(grad.full()))
        w.grad = None
        (w * 2).sum().backward()
        assert_same(seen[0], torch.full((8, 3), 2.0, dtype=torch.float64))
        assert_same(w.grad, torch.full((8, 3), 2.0, dtype=torch.float64))
        activation = w * 2
        activation.retain_grad()
        activation.pow(2).sum().backward()
        assert str(activation.grad.placements[0]).endswith("addends=True)")  # type: ignore[union-attr]
        assert_same(activation.grad, 4 * whole)

    run_local(body, 4)


def test_gradients_of_leaves_are_summed_in_one_order_on_all_ranks() -> None:
    """A rank that has no part of them takes part in the sums, before what comes after on the tape."""

    def body(comm: Comm) -> None:
        whole = [t.requires_grad_() for t in (numbers(4), *(numbers(5, 4, seed=i) for i in range(6)))]
        specs = ["on tp=2 @ 0,2: R", *["on tp=2 @ 0,2: S(0) each 2"] * 6]
        parts = [shard(t.detach(), spec).requires_grad_() for t, spec in zip(whole, specs, strict=True)]
        for x, weight, *rest in (whole, parts):
            F.linear(F.leaky_relu(x, 0.25), weight).square().sum().backward()
            torch.cat(rest, 1).square().sum().backward()
        for part, one in zip(parts, whole, strict=True):
            assert_same(part.grad, one.grad)

    run_local(body, 3, timeout=60)


def test_second_gradients() -> None:
    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        return grad.pow(2).sum()

    check(penalty, [COPIES], (numbers(8, 3),), world=4)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_training_keeps_copies_equal(make: Any) -> None:
    whole, x = numbers(8, 3), numbers(3, 4, seed=1)

    def train(w: Tensor, x: Tensor) -> Tensor:
        optimizer = make([w], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (w @ x).sin().sum().backward()
            torch.nn.utils.clip_grad_norm_([w], 0.5)
            optimizer.step()
        return w.detach()

    expected = train(whole.clone().requires_grad_(), x)

    def body(comm: Comm) -> None:
        w = shard(whole.clone(), COPIES).requires_grad_()
        assert_same(train(w, shard(x, "on tp=4: R")), expected)
        rest = comm.all_gather_bytes(w.detach().local_tensor()[1:].contiguous().numpy().tobytes(), label="copies")
        assert rest[comm.rank] == rest[comm.rank ^ 1]

    run_local(body, 4)


def test_parts_of_ranks() -> None:
    """`from_local` knows how long the whole is; the gradients of a rank's own tensor are addends."""

    def body(comm: Comm) -> None:
        part = torch.full((2, 3), float(comm.rank // 2), requires_grad=True)
        made = from_local(part, parse_spec("on tp=4: S(0) each 2").mesh, parse_placements("S(0) each 2"))  # type: ignore[attr-defined]
        assert tuple(made.shape) == (4, 3) and made.full()[:, 0].tolist() == [0, 0, 1, 1]
        made.sum().backward()
        shares = [torch.frombuffer(bytearray(b)) for b in comm.all_gather_bytes(part.grad.numpy().tobytes(), label="g")]  # type: ignore[union-attr]
        assert all((shares[i] + shares[i ^ 1] == 1).all() for i in range(4))
        fused = from_local(torch.zeros(2, 3), parse_spec(COPIES).mesh, parse_placements("S(0) groups(4,2 each 4)"))  # type: ignore[attr-defined]
        assert isinstance(fused, ShardedTensor)

    with pytest.raises(Exception, match="rank"):
        run_local(body, 4)


def test_sums_of_copies_send_nothing_between_replicas() -> None:
    """On dp x tp the second sum, of copies, is within a group of tp; bits are equal on all ranks."""

    def body(comm: Comm) -> tuple[list[int], bytes]:
        w = shard(numbers(6, 4), "on dp=2,tp=2: R, S(0) groups(4,2 each 2)").requires_grad_()
        with explain() as log:
            (w * shard(numbers(6, 4, seed=1), "on dp=2,tp=2: R, R")).sum().backward()
        assert_same(w.grad, numbers(6, 4, seed=1))
        own = w.grad.local_tensor()[2:].contiguous().numpy().tobytes()  # type: ignore[union-attr]
        return [entry.moved_bytes for entry in log.entries if entry.name == "gradient of copies"], own

    found = run_local(body, 4)
    assert {tuple(moved) for moved, _ in found} == {(2 * 2 * 8 * 8,)} and len({own for _, own in found}) == 1
