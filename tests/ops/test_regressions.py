"""Numbers that were once silently wrong, with their relatives, and calls that once ended in an error of ours.

Tensors that are written to while others are pending, gradients at ties and at equal values, lengths of zero, divisions
by zero, random numbers of replicas, pending tensors beside empty ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import shardwise
from shardwise import Comm, Replicate, Shard, ShardedTensor, manual_seed, redistribute_many, run_local
from shardwise.geometry import parse_spec
from tests.dense import (
    S0,
    S1,
    P,
    R,
    assert_gradient,
    assert_same,
    check,
    check_or_refuse,
    ends,
    forget,
    lay,
    numbers,
)

LAYOUTS = {"S0": S0, "S1": S1, "R": R, "P": P}


def matrix(seed: int) -> Tensor:
    return numbers(4, 4, seed=seed)


OUT: dict[str, Callable[..., Any]] = {
    "mul": lambda x, y, out: torch.mul(x, y, out=out),
    "mul by a number": lambda x, y, out: torch.mul(x, 3.0, out=out),
    "div": lambda x, y, out: torch.div(x, y, out=out),
    "div by a number": lambda x, y, out: torch.div(x, 3.0, out=out),
    "neg": lambda x, y, out: torch.neg(x, out=out),
    "add": lambda x, y, out: torch.add(x, y, out=out),
    "sub": lambda x, y, out: torch.sub(x, y, alpha=2, out=out),
    "positive": lambda x, y, out: torch.add(x, 0, out=out),
    "exp": lambda x, y, out: torch.exp(x, out=out),
    "abs": lambda x, y, out: torch.abs(x, out=out),
    "sigmoid": lambda x, y, out: torch.sigmoid(x, out=out),
    "clamp": lambda x, y, out: torch.clamp(x, min=0.0, out=out),
    "maximum": lambda x, y, out: torch.maximum(x, y, out=out),
    "lerp": lambda x, y, out: torch.lerp(x, y, 0.5, out=out),
    "addcmul": lambda x, y, out: torch.addcmul(x, x, y, out=out),
    "addmm": lambda x, y, out: torch.addmm(x, x, y, out=out),
    "mm": lambda x, y, out: torch.mm(x, y, out=out),
    "matmul": lambda x, y, out: torch.matmul(x, y, out=out),
    "cumsum": lambda x, y, out: torch.cumsum(x, 0, out=out),
    "normalize": lambda x, y, out: F.normalize(x, dim=0, out=out),
    "softmax": lambda x, y, out: torch.softmax(x, 0, out=out),
    "sort": lambda x, y, out: torch.sort(x, 0, out=(out, torch.empty_like(x, dtype=torch.int64)))[0],
    "where": lambda x, y, out: torch.where(x > 0, x, y, out=out),
    "cat": lambda x, y, out: torch.cat([x[:2], y[:2]], out=out),
    "stack": lambda x, y, out: torch.stack([x[0], y[1], x[2], y[3]], out=out),
    "index_select": lambda x, y, out: torch.index_select(x, 0, (y > 99).long()[0], out=out),
    "tril": lambda x, y, out: torch.tril(x, out=out),
    "float_power": lambda x, y, out: torch.float_power(x, 2, out=out),
    "eye": lambda x, y, out: torch.eye(4, out=out),
    "arange": lambda x, y, out: torch.arange(4, out=out[1]),
}


@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize("given", ("P", "S0", "R"))
@pytest.mark.parametrize("name", OUT)
def test_what_is_written_to_out(name: str, given: str, written: str) -> None:
    """Addends go into no tensor that is not pending itself."""
    calls = [(matrix(s), matrix(s + 1), torch.zeros(4, 4, dtype=torch.float64)) for s in (1, 4)]
    for second in (given, "R"):
        where = [LAYOUTS[given], LAYOUTS[second], LAYOUTS[written]]
        check_or_refuse(OUT[name], where, *calls, grad=False)


def test_a_pending_value_written_to_a_replicated_tensor() -> None:
    """The named examples: right, not refused."""
    calls = [(matrix(s), matrix(s + 1), torch.zeros(4, 4, dtype=torch.float64)) for s in (1, 4)]
    for name in ("mul", "div", "neg", "mul by a number", "div by a number"):
        check(OUT[name], [P, R, R], *calls, grad=False)


def _parametrized(name: str, layout: str | None) -> Any:
    """A linear layer whose weight is parametrized, on plain tensors or on ShardedTensors; the same start everywhere."""
    layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    layer.weight = torch.nn.Parameter(matrix(1))
    getattr(torch.nn.utils.parametrizations, name)(layer)
    held: Any = layer.parametrizations.weight  # type: ignore[union-attr]  # typed as a tensor or a module
    for parameter in [n for n, _ in held.named_parameters(recurse=False)]:
        if layout is not None:
            whole = getattr(held, parameter).detach()
            setattr(held, parameter, torch.nn.Parameter(lay(whole, R if 1 in whole.shape else layout)))
    if name == "spectral_norm":
        for buffer, seed in (("_u", 7), ("_v", 8)):
            start = F.normalize(numbers(4, seed=seed), dim=0)
            setattr(held[0], buffer, start if layout is None else lay(start, R))
    return layer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ("spectral_norm", "weight_norm"))
def test_parametrizations(name: str, layout: str) -> None:
    """Of a sharded weight: three looks at it in training, one in evaluation, then gradients."""

    def body(comm: Comm) -> None:
        dense, held = _parametrized(name, None), _parametrized(name, LAYOUTS[layout])
        for turn in range(4):
            dense.train(turn < 3)
            held.train(turn < 3)
            assert_same(held.weight, dense.weight, rtol=1e-6, atol=1e-7)
        dense(matrix(2)).square().sum().backward()
        held(lay(matrix(2), R)).full().square().sum().backward()
        for one, other in zip(held.parameters(), dense.parameters(), strict=True):
            assert_gradient(one, other, rtol=1e-5, atol=1e-6)

    forget()
    run_local(body, 2, timeout=60)


EQUAL: dict[str, Callable[[Any], Any]] = {
    "std": lambda x: x.std(0),
    "std of all": lambda x: x.std(),
    "std, not corrected": lambda x: x.std(0, correction=0),
    "std_mean": lambda x: list(torch.std_mean(x, 0)),
    "var": lambda x: x.var(0),
    "norm of differences": lambda x: (x - x.mean(0)).norm(dim=0),
    "vector_norm": lambda x: torch.linalg.vector_norm(x - x[0], dim=0),
    "norm of zeros": lambda x: (x * 0).norm(),
    "1-norm of zeros": lambda x: (x * 0).norm(1, 0),
    "3-norm of zeros": lambda x: (x * 0).norm(3, 0),
    "normalize": lambda x: F.normalize(x - x.mean(0), dim=0),
    "cosine_similarity": lambda x: F.cosine_similarity(x - x.mean(0), x, dim=0),
    "dist": lambda x: torch.dist(x, x.detach()),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
    "prod with a zero": lambda x: (x - x[0:1, 0:1]).prod(0),
    "cumprod with a zero": lambda x: (x - x[0:1, 0:1]).cumprod(0),
    "layer_norm": lambda x: F.layer_norm(x.t(), (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}
TIES: dict[str, Callable[[Any], Any]] = {
    "inf norm": lambda x: x.norm(float("inf")),
    "inf norm of rows": lambda x: x.norm(float("inf"), dim=0),
    "inf vector_norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=0),
    "-inf norm": lambda x: x.norm(float("-inf"), dim=0),
    "amax": lambda x: x.amax(0),
    "amin of all": lambda x: x.amin(),
    "max of all": lambda x: x.max(),
    "min of all": lambda x: x.min(),
    "max of rows": lambda x: list(x.max(0)),
    "median": lambda x: list(x.median(0)),
    "aminmax": lambda x: list(torch.aminmax(x, dim=0)),
    "cummax": lambda x: list(x.cummax(0)),
    "topk": lambda x: x.topk(2, 0).values,
    "sort": lambda x: list(x.sort(dim=0, stable=True)),
    "argmax": lambda x: x.argmax(0),
    "kthvalue": lambda x: x.kthvalue(1, 0).values,
    "mode": lambda x: x.mode(0).values,
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "relu": lambda x: (x - 1).relu(),
    "clamp": lambda x: x.clamp(max=1.0),
    "clip_grad_norm": lambda x: x / x.norm(float("inf")).clamp(min=1.0),
}
SPLITS = {"S0": S0, "S1": S1, "R": R, "uneven": "on tp=2: S(0) sizes(3,1)", "one": "on tp=2: S(0) sizes(4,0)", "P": P}


@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.parametrize("name", EQUAL)
def test_gradients_at_equal_values(name: str, layout: str) -> None:
    ones, rows = torch.ones(4, 4, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64).expand(4, 4)
    check_or_refuse(EQUAL[name], [SPLITS[layout]], (ones * 3,), (rows,), (rows * 0,), rtol=1e-7, atol=1e-9)


def _has_derivative(function: Callable[[Tensor], Any]) -> bool:
    x = torch.ones(2, requires_grad=True)
    try:
        torch.autograd.grad(function(x)[0], x)
    except RuntimeError as error:
        assert "is not implemented" in str(error)
        return False
    return True


@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.parametrize("name", TIES)
def test_gradients_at_ties_across_ranks(name: str, layout: str) -> None:
    ones = torch.ones(4, 4, dtype=torch.float64)
    some = torch.tensor([[1.0, 2, 1, 0], [1, 1, 0, 2], [-1, 2, 1, 0], [1, -2, 1, 2]], dtype=torch.float64)
    if name == "aminmax" and not _has_derivative(torch.aminmax):
        pytest.skip("this release of torch has no derivative of aminmax")
    check_or_refuse(TIES[name], [SPLITS[layout]], (ones,), (some,), (-some,), (ones * 0,))


EMPTY: dict[str, Callable[[Any], Any]] = {
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(0),
    "std of all": lambda x: x.std(),
    "var, not corrected": lambda x: x.var(0, correction=0),
    "var_mean": lambda x: list(torch.var_mean(x, 0)),
    "std_mean": lambda x: list(torch.std_mean(x, 0)),
    "mean": lambda x: x.mean(0),
    "mean of all": lambda x: x.mean(),
    "nanmean": lambda x: x.nanmean(0),
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "norm": lambda x: x.norm(dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "all": lambda x: (x > 0).all(0),
    "any": lambda x: (x > 0).any(0),
    "median of all": lambda x: x.median(),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "count": lambda x: torch.count_nonzero(x, 0),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*:UserWarning")
@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.parametrize("rows", (0, 1))
@pytest.mark.parametrize("name", EMPTY)
def test_a_dim_of_no_rows_and_of_one(name: str, rows: int, layout: str) -> None:
    """Also sharded, where ranks have none anyway."""
    where = {**SPLITS, "uneven": f"on tp=2: S(0) sizes(0,{rows})", "one": f"on tp=2: S(0) sizes({rows},0)"}[layout]
    check_or_refuse(EMPTY[name], [where], (numbers(rows, 4, seed=1),), (numbers(rows, 4, seed=2),))


LIMITS: dict[str, Callable[[Any], Any]] = {
    "/ 0": lambda x: x / 0,
    "/ 0.0": lambda x: x / 0.0,
    "/ zero": lambda x: x / (x.sum() * 0),
    "/ zeros": lambda x: x / torch.zeros_like(x),
    "/ -0.0": lambda x: torch.div(x, -0.0),
    "* inf": lambda x: x * float("inf"),
    "* -inf": lambda x: float("-inf") * x,
    "* nan": lambda x: x * float("nan"),
    "/ inf": lambda x: x / float("inf"),
    "+ inf": lambda x: x + float("inf"),
    "- itself": lambda x: x - x,
    "div_": lambda x: (x * 1).div_(0.0),
    "mul_": lambda x: (x * 1).mul_(float("inf")),
    "sum / 0": lambda x: x.sum() / 0,
    "mean / 0": lambda x: x.mean(0) / 0,
    "linear * inf": lambda x: (x @ x) * float("inf"),
}


@pytest.mark.parametrize("layout", ("on tp=2: P(sum)", "on tp=2: P(avg)", R, S0))
@pytest.mark.parametrize("name", LIMITS)
def test_infinities_of_pending_values(name: str, layout: str) -> None:
    """Addends of both signs divided by zero are inf and -inf, and their sum is not a number."""
    check_or_refuse(LIMITS[name], [layout], (matrix(1),), (matrix(2),), grad=False)


@pytest.mark.parametrize("op", ("sum", "avg"))
@pytest.mark.parametrize("ranks", (2, 3))
def test_the_gradient_of_a_pending_leaf(op: str, ranks: int) -> None:
    """It is the gradient of the value that the addends reduce to, whatever reduces them."""
    where = [f"on tp={ranks}: P({op})"]
    for program in (
        lambda x: x * 2,
        lambda x: x.square(),
        lambda x: x.sum(),
        lambda x: x @ x.t(),
        lambda x: x.softmax(0) + x,
    ):
        check(program, where, (matrix(1),), (matrix(2),), world=ranks)


RANDOM: dict[str, Callable[[Any], Any]] = {
    "normal of means": lambda p: torch.normal(p, 1.0),
    "normal of deviations": lambda p: torch.normal(0.0, p),
    "normal of both": lambda p: torch.normal(p, p),
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda p: p.clone().bernoulli_(p),
    "poisson": torch.poisson,
    "binomial": lambda p: torch.binomial(p * 0 + 5, p),
    "rand_like": torch.rand_like,
    "randint_like": lambda p: torch.randint_like(p, 9),
    "dropout": lambda p: F.dropout(p, 0.5),
    "alpha_dropout": lambda p: F.alpha_dropout(p, 0.5, training=True),
    "dropout1d": lambda p: F.dropout1d(p, 0.5),
    "rrelu": lambda p: F.rrelu(-p, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "uniform_": lambda p: p.clone().uniform_(),
    "normal_": lambda p: p.clone().normal_(),
    "exponential_": lambda p: p.clone().exponential_(),
    "geometric_": lambda p: p.clone().geometric_(0.5),
    "cauchy_": lambda p: p.clone().cauchy_(),
    "log_normal_": lambda p: p.clone().log_normal_(),
    "random_": lambda p: p.clone().random_(9),
    "multinomial": lambda p: torch.multinomial(p, 2),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_replicas(name: str) -> None:
    """All ranks have the same numbers, the same as in another layout, and others at the next call."""
    whole = numbers(4, 6, seed=1).abs().clamp(0.1, 0.9)

    def body(comm: Comm) -> None:
        drawn = []
        for layout in (R, S0, S1):
            manual_seed(5)
            drawn.append([RANDOM[name](lay(whole, layout)) for _ in range(2)])
        for tensor in drawn[0]:
            local = tensor.local_tensor()
            every = comm.all_gather_bytes(local.detach().contiguous().cpu().numpy().tobytes(), label="replicas")
            assert len(set(every)) == 1, "the replicas differ"
        for one, other in zip(drawn[0], (*drawn[1], *drawn[2]), strict=False):
            assert torch.equal(one.full(), other.full()), "the layout changes the numbers"
        assert not torch.equal(drawn[0][0].full(), drawn[0][1].full()), "the second call gives the first call's numbers"

    forget()
    found = ends(body, 2)
    allowed = ("done", "UnsupportedOpError") if name in ("bernoulli_", "binomial") else ("done",)
    assert len(set(found)) == 1 and found[0] in allowed, "\n".join(found)


@pytest.mark.parametrize("pending", ("sum", "avg", "min", "max"))
def test_pending_tensors_beside_empty_ones(pending: str, tmp_path: Path) -> None:
    """The empty tensor comes first, last, alone; moved all at once, one by one in the background, saved in a file."""
    full, none = matrix(1), numbers(0, 4)
    where = f"on tp=2: P({pending})"

    def body(comm: Comm, order: list[Tensor]) -> None:
        held = [lay(t, where) for t in order]
        for target in ((Replicate(),), (Shard(0),)):
            moved = redistribute_many(held, [target] * len(held))
            for one, whole in zip(moved, order, strict=True):
                assert_same(one, whole)
            started = [t.redistribute(target, async_op=True) for t in held]
            for handle, whole in zip(started, order, strict=True):
                assert_same(handle.wait(), whole)
        name = tmp_path / f"{pending} {len(order)} {order[0].numel()}"
        shardwise.save({str(i): t for i, t in enumerate(held)}, name)
        back = {str(i): lay(torch.zeros_like(t), S0) for i, t in enumerate(order)}
        shardwise.load(back, name)
        for number, whole in enumerate(order):
            assert_same(back[str(number)], whole)

    for order in ([none, full], [full, none], [none, full, none], [none], [none, none]):
        run_local(body, 2, order, timeout=60)


@pytest.mark.parametrize("layout", ("on tp=2: S(0) sizes(0,4)", "on tp=2: S(0) sizes(4,0)", S0, R, "on tp=3: S(0)"))
def test_the_variance_of_complex_numbers(layout: str) -> None:
    whole = torch.complex(matrix(1), matrix(2))
    world = 3 if "tp=3" in layout else 2
    for program in (
        lambda x: x.var(0),
        lambda x: x.std(0),
        lambda x: x.var(),
        lambda x: x.std(1),
        lambda x: x.var(0, correction=0),
        lambda x: list(torch.var_mean(x, 0)),
        lambda x: list(torch.std_mean(x)),
    ):
        check(program, [layout], (whole,), (whole * 2,), world=world)


JOINED: dict[str, tuple[str, torch.dtype, torch.dtype]] = {
    "float and min": ("min", torch.float64, torch.float64),
    "float and max": ("max", torch.float64, torch.float64),
    "float and product": ("product", torch.float64, torch.float64),
    "float and sum": ("sum", torch.float64, torch.float64),
    "bool and avg": ("avg", torch.bool, torch.float64),
    "bool and sum": ("sum", torch.bool, torch.float64),
    "int and avg": ("avg", torch.int64, torch.float64),
    "bool and max": ("max", torch.bool, torch.int64),
    "float32 and avg": ("avg", torch.float32, torch.float64),
}


@pytest.mark.parametrize("first", ("R", "S0"))
@pytest.mark.parametrize("name", JOINED)
def test_joining_what_is_pending_and_what_is_not(name: str, first: str) -> None:
    """Values and dtypes; gradients of what is not pending by a minimum or a maximum."""
    op, one, other = JOINED[name]
    calls = [((matrix(s) > 0) if one == torch.bool else matrix(s).to(one), matrix(s + 1).to(other)) for s in (1, 3)]
    where = [LAYOUTS[first], f"on tp=2: P({op})"]
    for program in (
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.cat([b, a], 1),
        lambda a, b: torch.stack([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
    ):
        check(program, where, *calls, grad=False)

    def to_the_first(a: Any, b: Any) -> Any:
        b = b.detach()
        return torch.cat([a, b]) if one.is_floating_point else torch.cat([a, b]) * 2

    check(to_the_first, where, *calls)


def test_a_pending_maximum_has_no_wrong_gradient() -> None:
    """A leaf that is pending by a minimum or a maximum, joined to one that is not: right, or refused on every rank."""

    def body(comm: Comm) -> None:
        for op in ("min", "max", "product"):
            dense = [matrix(1).requires_grad_(), matrix(2).requires_grad_()]
            held: list[Any] = [lay(dense[0], R), lay(dense[1], f"on tp=2: P({op})")]
            joined: Any = torch.cat(held)
            torch.cat(dense).square().sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
            joined.full().square().sum().backward()
            for one, other in zip(held, dense, strict=True):
                assert_gradient(one, other)

    forget()
    found = ends(body, 2)
    assert len(set(found)) == 1 and not found[0].startswith("left waiting"), "\n".join(found)


def test_nothing_is_a_ShardedTensor_by_accident() -> None:
    """What these programs give on ShardedTensors is a ShardedTensor, so that the comparisons above mean something."""

    def body(comm: Comm) -> None:
        x = lay(matrix(1), P)
        assert isinstance(x / 0, ShardedTensor) and isinstance(torch.cat([x, x]), ShardedTensor)

    run_local(body, 2, timeout=60)


OTHER_MESHES: dict[str, Callable[[Any, Any], Any]] = {
    "_foreach_add": lambda x, y: torch._foreach_add([x, y], 1),
    "_foreach_add_": lambda x, y: (torch._foreach_add_([x, y], 1), (x, y))[1],
    "_foreach_mul_ by lists": lambda x, y: (torch._foreach_mul_([x, y], [x, y]), (x, y))[1],
    "_foreach_norm": lambda x, y: torch._foreach_norm([x, y]),
}


@pytest.mark.parametrize("name", OTHER_MESHES)
def test_lists_of_tensors_on_several_meshes(name: str) -> None:
    """Rank 1 has a part of one tensor and nothing of the other."""
    program = OTHER_MESHES[name]

    def make() -> list[Any]:
        return [torch.arange(1.0, 7.0).reshape(2, 3), torch.full((2, 2), 3.0)]

    def body(comm: Comm) -> list[Tensor]:
        layouts = (parse_spec("on all=3: S(0)"), parse_spec("on tp=2 @ 0,2: R"))
        return [t.full() for t in program(*map(shardwise.shard, make(), layouts))]

    for found in run_local(body, 3):
        assert_close(found, list(program(*make())))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["amin", "amax"])
def test_extremes_of_few_elements_as_whole_numbers(name: str, dtype: torch.dtype) -> None:
    """Two of four ranks have nothing: what they add to the result is infinite, and no whole number is."""

    def body(comm: Comm) -> list[Tensor]:
        x: Any = shardwise.shard(torch.tensor([3.0, 5.0]), parse_spec("on dp=2,tp=2: S(0), S(0)"))
        return [getattr(x, name)().to(dtype).full(), getattr(x, name)(0, keepdim=True).type(dtype).full()]

    value = 3 if name == "amin" else 5
    for found in run_local(body, 4):
        assert_close(found, [torch.tensor(value, dtype=dtype), torch.tensor([value], dtype=dtype)])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_of_irregular_pieces_is_changed_in_place(rows: int) -> None:
    def body(comm: Comm) -> Tensor:
        spec = parse_spec(f"as pieces 1[0:{rows},4:5], 1[0:{rows},0:4]")
        x = shardwise.shard(torch.zeros(rows, 5, dtype=torch.bfloat16), spec)
        x[0] += 1
        x[:].mul_(2)
        return x.full()

    expected = torch.zeros(rows, 5, dtype=torch.bfloat16)
    expected[0] = 2
    for found in run_local(body, 3):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_of_tile_are_no_dims(layout: str) -> None:
    check(lambda x: x.tile(2) + x.tile((1, 2)), [LAYOUTS[layout]], (matrix(1),))
    check(lambda x: x.tile((3, 2)), [LAYOUTS[layout]], (matrix(1),))
