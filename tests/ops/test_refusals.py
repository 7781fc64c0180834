"""Does every rank take the same decision? Ranks that have nothing, uneven parts, groups, blocks; forward and backward.

Each program is right on every rank or refused on every rank, with the same error. A rank that waits for another ends by
its time-out, and the test says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import (
    Comm,
    CommError,
    Replicate,
    ShardedTensor,
    from_local,
    init_from_local_shards,
    parse_spec,
    run_local,
    shard,
)
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import (
    R,
    WaitsForAnotherThread,
    assert_ends_alike,
    assert_same,
    check_or_refuse,
    ends,
    forget,
    lay,
    numbers,
)
from tests.device import DEVICE, OUT_OF_RANGE

# Layouts of an 8x4 tensor over 2 ranks in which ranks differ: lengths, runs, or whether there is anything.
UNLIKE = {
    "empty": "on tp=2: S(0) sizes(0,8)",
    "uneven": "on tp=2: S(0) sizes(5,3)",
    "groups": "on tp=2: S(0) groups(5,3)",
    "block": "on tp=2: S(0) block(3)",
    "empty column": "on tp=2: S(1) sizes(4,0)",
    "column groups": "on tp=2: S(1) groups(1,3)",
    "column block": "on tp=2: S(1) block(1)",
}
INDEX = torch.tensor([6, 0, 3, 3, 7])


def tall(seed: int = 1) -> Tensor:
    return numbers(8, 4, seed=seed)


def replicated(like: Any, value: Tensor) -> Any:
    """An index as the tensor's program takes it: replicated beside a ShardedTensor, plain beside a plain tensor."""
    return lay(value, f"on tp={like.comm.world_size}: R") if isinstance(like, ShardedTensor) else value


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "index_select": lambda x: x.index_select(0, replicated(x, INDEX)),
    "index_select of columns": lambda x: x.index_select(1, replicated(x, INDEX % 4)),
    "index": lambda x: x[replicated(x, INDEX)],
    "index of columns": lambda x: x[:, replicated(x, INDEX % 4)],
    "index of both": lambda x: x[replicated(x, INDEX), replicated(x, INDEX % 4)],
    "index_add": lambda x: x.index_add(0, replicated(x, INDEX), replicated(x, numbers(5, 4))),
    "index_add of columns": lambda x: x.index_add(1, replicated(x, INDEX % 4), replicated(x, numbers(8, 5))),
    "index_copy": lambda x: x.index_copy(0, replicated(x, INDEX[:3]), replicated(x, numbers(3, 4))),
    "index_fill": lambda x: x.index_fill(0, replicated(x, INDEX), 2.0),
    "index_put": lambda x: x.index_put((replicated(x, INDEX[:3]),), replicated(x, numbers(3, 4))),
    "gather": lambda x: torch.gather(x, 0, replicated(x, INDEX.reshape(5, 1).expand(5, 4).contiguous())),
    "scatter_add": lambda x: x.scatter_add(
        0, replicated(x, INDEX.reshape(5, 1).expand(5, 4).contiguous()), replicated(x, numbers(5, 4))
    ),
    "take": lambda x: x.take(replicated(x, INDEX)),
    "embedding": lambda x: F.embedding(replicated(x, INDEX), x),
    "embedding_bag": lambda x: F.embedding_bag(replicated(x, INDEX.reshape(1, 5)), x),
    "one row": lambda x: x[3],
    "rows": lambda x: x[2:7] * 2,
    "every second row": lambda x: x[::2] * 2,
    "one element": lambda x: x[5, 2],
    "mask": lambda x: x[x > 0],
    "cat": lambda x: torch.cat([x, x]),
    "cat of columns": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x * 2]),
    "cat and index": lambda x: torch.cat([x, x]).index_select(0, replicated(x, INDEX + 8)),
    "cat and index_add": lambda x: torch.cat([x, x]).index_add(
        0, replicated(x, INDEX + 8), replicated(x, numbers(5, 4))
    ),
    "cat and rows": lambda x: torch.cat([x, x])[7:10] * 2,
    "cat and sum": lambda x: torch.cat([x, x]).cumsum(0),
    "cat and reshape": lambda x: torch.cat([x, x]).reshape(2, 8, 4).sum(0),
    "cat and softmax": lambda x: torch.cat([x, x]).softmax(0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(3, 0),
    "split": lambda x: x.split(3)[1] * 2,
    "chunk": lambda x: x.chunk(3, 1)[0] * 2,
    "reshape": lambda x: x.reshape(4, 8) * 2,
    "flatten": lambda x: x.flatten()[3:] * 2,
    "transpose": lambda x: x.t() @ x,
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(0).values,
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "sort": lambda x: x.sort(0).values,
    "topk": lambda x: x.topk(2, 0).values,
    "median": lambda x: x.median(0).values,
    "max": lambda x: x.max(0).values,
    "argmax": lambda x: x.argmax(0),
    "softmax": lambda x: x.softmax(0),
    "var": lambda x: x.var(0),
    "std of all": lambda x: x.std(),
    "norm": lambda x: x.norm(dim=0),
    "inf norm": lambda x: x.norm(float("inf")),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: x.prod(0),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cross_entropy": lambda x: F.cross_entropy(x, replicated(x, torch.arange(8) % 4)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True),
    "quantile": lambda x: torch.quantile(x, 0.3, 0),
    "quantile of rows": lambda x: torch.quantile(x, 0.3, 1, keepdim=True),
    "nanquantile": lambda x: torch.nanquantile(x, 0.3, 1),
    "group_norm": lambda x: F.group_norm(x, 2),
    "diagonal": lambda x: x.diagonal() * 2,
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "unfold": lambda x: x.unfold(0, 3, 2) * 2,
    "repeat": lambda x: x.repeat(2, 1),
    "diff": lambda x: x.diff(dim=0),
    "select and write": lambda x: (x * 1).index_fill_(0, replicated(x, INDEX), 1.0),
    "write a slice": lambda x: _written(x, slice(2, 5)),
    "write a row": lambda x: _written(x, 3),
    "where": lambda x: torch.where(x > 0, x, x.mean()),
    "equal": lambda x: torch.equal(x, x * 1),
    "item": lambda x: x.sum().item(),
    "item of one": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
}


def _written(x: Any, rows: Any) -> Any:
    copy = x * 1
    copy[rows] = 0.5
    return copy


@pytest.mark.parametrize("layout", UNLIKE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_where_ranks_differ(name: str, layout: str) -> None:
    check_or_refuse(PROGRAMS[name], [UNLIKE[layout]], (tall(1),), (tall(2),), atol=1e-9)


WIDER = {
    "groups, one of them on two ranks": (3, "on tp=3: S(0) groups(2,6)"),
    "blocks, one rank with one": (3, "on tp=3: S(0) block(2)"),
    "two ranks with nothing": (4, "on tp=4: S(0) sizes(1,7,0,0)"),
}


@pytest.mark.parametrize("layout", WIDER)
@pytest.mark.parametrize("name", PROGRAMS)
def test_where_one_rank_of_many_differs(name: str, layout: str) -> None:
    world, where = WIDER[layout]
    check_or_refuse(PROGRAMS[name], [where], (tall(1),), (tall(2),), world=world, atol=1e-9)


JOINED: dict[str, Callable[[Any], Any]] = {
    "index_select": lambda x: x.index_select(0, replicated(x, INDEX)),
    "index": lambda x: x[replicated(x, INDEX)],
    "index_add": lambda x: x.index_add(0, replicated(x, INDEX), replicated(x, numbers(5, 4))),
    "index_put": lambda x: x.index_put((replicated(x, INDEX[:3]),), replicated(x, numbers(3, 4))),
    "gather": lambda x: torch.gather(x, 0, replicated(x, INDEX.reshape(5, 1).expand(5, 4).contiguous())),
    "embedding": lambda x: F.embedding(replicated(x, INDEX), x),
    "tril": lambda x: x.tril(),
    "rows": lambda x: x[3:8] * 2,
    "row": lambda x: x[6],
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "matmul": lambda x: x.t() @ x,
    "split": lambda x: x.split(3)[1] * 2,
}


@pytest.mark.parametrize("rows", (4, 5, 6))
@pytest.mark.parametrize("world", (3, 4))
@pytest.mark.parametrize("name", JOINED)
def test_of_uneven_shards_that_were_joined(name: str, world: int, rows: int) -> None:
    """`cat` of plain chunks of which the last are shorter, or empty, cuts each group on its own."""

    def program(x: Any) -> Any:
        return JOINED[name](torch.cat([x, x * 2]))

    calls = [(numbers(rows, 4, seed=seed),) for seed in (1, 2)]
    check_or_refuse(program, [f"on tp={world}: S(0)"], *calls, world=world, atol=1e-9)


ABSENT = {
    "a mesh of two of three": "on tp=2 @ 0,2: S(0)",
    "chunks on two of three": "as chunk(0) over 2,1",
    "all on one rank": "as pieces 1[0:8,0:4]",
    "replicas on two of three": "on tp=2 @ 1,2: R",
    "more ranks than rows": "on tp=3: S(1) sizes(0,4,0)",
}


@pytest.mark.parametrize("layout", ABSENT)
@pytest.mark.parametrize("name", PROGRAMS)
def test_where_a_rank_has_nothing(name: str, layout: str) -> None:
    """Also what was computed has nothing there, and the rank goes on with the others."""
    if "replicated" in PROGRAMS[name].__code__.co_names:
        pytest.skip("the index is on ranks of another mesh")
    check_or_refuse(PROGRAMS[name], [ABSENT[layout]], (tall(1),), (tall(2),), world=3, atol=1e-9)


INSIDE = ("a mesh of two of three", "replicas on two of three")


@pytest.mark.parametrize("layout", INSIDE)
def test_a_rank_outside_of_the_mesh_goes_on_without_data(layout: str) -> None:
    """The same program text on every rank: layouts, dtypes and gradients are known also where there is no data."""

    def body(comm: Comm) -> tuple[Any, ...]:
        x = lay(tall(1).requires_grad_(), ABSENT[layout])
        hidden = torch.cat([x, x * 2]).softmax(0)
        out: Any = (hidden @ hidden.t()).sum(0).float()
        out.full().sum().backward()
        assert x.grad is not None
        return out.sharding, out.dtype, out.shape, out.requires_grad, x.grad.sharding, len(out.local_parts)

    forget()
    found = run_local(body, 3, timeout=60)
    assert len({known[:-1] for known in found}) == 1
    assert [known[-1] for known in found] == [int(rank in found[0][0].ranks) for rank in range(3)]


@pytest.mark.parametrize("layout", INSIDE)
def test_shapes_that_depend_on_values_are_refused_on_every_rank(layout: str) -> None:
    """Also where a rank outside of the mesh does not call it: the layout alone decides."""

    def body(comm: Comm, everywhere: bool) -> str:
        x = lay(tall(1), ABSENT[layout])
        if everywhere or x.local_parts:
            with pytest.raises(UnsupportedOpError, match="depends on values") as caught:
                x.nonzero()
            return str(caught.value)
        return ""

    assert len(set(run_local(body, 3, True, timeout=60))) == 1
    assert len(set(run_local(body, 3, False, timeout=60)) - {""}) == 1


def _local_list(tensor: Any) -> list[float]:
    values: list[float] = tensor.local_tensor().tolist()
    return values


def test_ranks_outside_of_the_mesh_need_not_compute() -> None:
    """A program for the mesh's ranks alone, which needs no moves."""

    def body(comm: Comm) -> list[float] | None:
        x = lay(tall(1), ABSENT["replicas on two of three"])
        return None if comm.rank == 0 else _local_list((x @ x.t()).softmax(0).sum(0))

    nothing, *found = run_local(body, 3, timeout=60)
    assert nothing is None and found[0] == found[1] == pytest.approx([1.0] * 8)


COMPLEX: dict[str, Callable[[Any], Any]] = {
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "logcumsumexp of columns": lambda x: x.logcumsumexp(1),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "prod": lambda x: x.prod(0),
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(dim=0),
    "abs": lambda x: x.abs(),
    "angle": lambda x: x.angle(),
    "matmul": lambda x: x.t() @ x,
    "mean": lambda x: x.mean(0),
    "softmax by hand": lambda x: x.exp() / x.exp().sum(0),
    "max": lambda x: x.max(),
    "sort": lambda x: x.sort(0).values,
}


@pytest.mark.parametrize("layout", ("uneven", "empty", "groups", "empty column"))
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name: str, layout: str) -> None:
    """What torch itself refuses of complex numbers is refused on every rank as well."""
    whole = torch.complex(tall(1), tall(2))

    def body(comm: Comm) -> None:
        dense, held = whole.clone().requires_grad_(), lay(whole.clone().requires_grad_(), UNLIKE[layout])
        expected = _attempt(lambda: COMPLEX[name](dense))
        found = _attempt(lambda: COMPLEX[name](held))
        if expected is None:
            assert found is None, "torch refuses this, and it gave a result"
            return
        if found is None:
            raise ValueError("refused")
        assert_same(found, expected)
        dense_backward = _attempt(lambda: expected.abs().sum().backward() or expected)
        found_backward = _attempt(lambda: found.full().abs().sum().backward() or found)
        assert (dense_backward is None) <= (found_backward is None)
        if found_backward is not None:
            assert held.grad is not None and dense.grad is not None
            assert_same(held.grad, dense.grad)

    assert_ends_alike(body, 2)


def _attempt(call: Callable[[], Any]) -> Any:
    """What a call gives, or None if it is refused; a rank that is left waiting is not a refusal."""
    try:
        return call()
    except CommError:
        raise
    except (RuntimeError, NotImplementedError, ValueError):
        return None


WRONG: dict[str, Callable[[Any], Any]] = {
    "index too large": lambda x: x[replicated(x, torch.tensor([0, 8]))],
    "index_select too large": lambda x: x.index_select(0, replicated(x, torch.tensor([7, -9]))),
    "gather too large": lambda x: torch.gather(x, 0, replicated(x, torch.full((1, 4), 8))),
    "embedding too large": lambda x: F.embedding(replicated(x, torch.tensor([8])), x),
    "index_add too large": lambda x: x.index_add(0, replicated(x, torch.tensor([8])), replicated(x, numbers(1, 4))),
    "class too large": lambda x: F.cross_entropy(x, replicated(x, torch.arange(8))),
    "shapes": lambda x: x @ x,
    "dim": lambda x: x.sum(2),
    "reshape": lambda x: x.reshape(5, 7),
    "dtype": lambda x: x.bitwise_and(x),
    "row": lambda x: x[9],
    "cholesky of no such matrix": lambda x: torch.linalg.cholesky(-(x.t() @ x)),
    "negative bincount": lambda x: torch.bincount((x * 0 - 1).long()[:, 0]),
    "split sizes": lambda x: x.split([3, 3]),
    "item of many": lambda x: x.item(),
    "one_hot of a class too large": lambda x: F.one_hot((x == x.max()).long() * 5, 3),
    "one_hot of a negative class": lambda x: F.one_hot((x == x.max()).long() * -1, 3),
    "bernoulli": lambda x: torch.bernoulli((x == x.max()).double() * 2),
    "bernoulli in place": lambda x: (x * 1).bernoulli_((x == x.max()).double() * 2),
    "poisson": lambda x: torch.poisson((x == x.max()).double() * -1),
    "multinomial": lambda x: torch.multinomial((x == x.max()).double() * -1, 2),
    "multinomial with replacement": lambda x: torch.multinomial((x == x.max()).double() * -1, 2, True),
    "normal": lambda x: torch.normal(x, (x == x.max()).double() * -1),
}


# A GPU checks values while it computes: a wrong one ends the process's use of it, as it does in torch.
FOUND_BY_KERNELS = re.compile("(index|index_select|gather|embedding|index_add|class) too large|one_hot|bernoulli|multi")
CUT_INDEX = (("gather too large", "empty column"), ("index_add too large", "empty column"))


@pytest.mark.parametrize(("name", "layout"), CUT_INDEX)
def test_a_mistake_in_a_cut_index(name: str, layout: str) -> None:
    """The rank that has the wrong entry raises; the other is told so at the next exchange, and does not wait."""

    def body(comm: Comm) -> Any:
        return WRONG[name](lay(tall(1), UNLIKE[layout])).full()

    forget()
    first, second = ends(body, 2)
    assert not first.startswith(("done", "left waiting")), first
    assert second.startswith("left waiting") and "rank 0 did not take part" in second, second


@pytest.mark.parametrize("layout", (*UNLIKE, "replicated"))
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_found_on_every_rank(name: str, layout: str) -> None:
    """Only one rank has the row that is asked for or the value that is wrong; all ranks raise."""

    def body(comm: Comm) -> Any:
        return WRONG[name](lay(tall(1), {**UNLIKE, "replicated": R}[layout]))

    if (name, layout) in CUT_INDEX:
        pytest.skip("the index is cut: test_a_mistake_in_a_cut_index")
    if DEVICE == "cuda" and FOUND_BY_KERNELS.match(name):
        pytest.skip(OUT_OF_RANGE)
    if DEVICE != "cpu" and name.startswith("one_hot"):
        pytest.skip("classes on a device are not looked at, as in torch")
    forget()
    found = ends(body, 2)
    assert not any(end == "done" or end.startswith("left waiting") for end in found), "\n".join(found)
    kinds = {end.partition(":")[0] for end in found}
    assert len(kinds) == 1, "\n".join(found)


def _shards(odd: bool) -> Any:
    return init_from_local_shards("no list" if odd else [], 8, 4)  # type: ignore[arg-type]  # the mistake


def _elements(odd: bool) -> Any:
    return init_from_local_shards([torch.zeros(8, 4)] if odd else [], 8, 4)  # type: ignore[list-item]  # the mistake


MISTAKES: dict[str, Callable[[bool], Any]] = {
    "a text for a list of shards": _shards,
    "tensors for shards": _elements,
    "None for a list of shards": lambda odd: init_from_local_shards(None if odd else [], 8, 4),  # type: ignore[arg-type]
    "a text for a length": lambda odd: init_from_local_shards([], "eight" if odd else 8, 4),
    "a text for a local tensor": lambda odd: from_local(
        "no tensor" if odd else torch.zeros(4, 4),  # type: ignore[arg-type]
        parse_spec("on tp=2: S(0)"),
        (8, 4),
    ),
    "a list for a whole tensor": lambda odd: shard(
        [1.0, 2.0] if odd else torch.zeros(8, 4),  # type: ignore[arg-type]
        parse_spec("on tp=2: S(0)"),
        None,
    ),
    "a text for a spec": lambda odd: shard(
        torch.zeros(8, 4),
        "S(0)" if odd else parse_spec("on tp=2: S(0)"),  # type: ignore[arg-type]
        None,
    ),
    "a number for a target": lambda odd: lay(tall(), "on tp=2: S(0)").redistribute(3.5 if odd else (Replicate(),)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_type_on_one_rank_only(name: str) -> None:
    """Every rank raises an error of one type; none waits for the one that made the mistake."""
    found = ends(lambda comm: MISTAKES[name](comm.rank == 1), 2)
    assert not any(end == "done" or end.startswith("left waiting") for end in found), "\n".join(found)
    assert len({end.partition(":")[0] for end in found}) == 1, "\n".join(found)


def test_two_threads_that_describe_one_layout_get_one_object() -> None:
    """Else one rank takes a tensor given twice for two, and moves it twice."""
    spec = WaitsForAnotherThread()
    first, second = run_local(lambda comm: spec.layout((6,)), 2, timeout=60)
    assert first is second


def test_a_new_layout_at_once_on_all_ranks() -> None:
    """A tensor given twice is moved once on every rank, however the threads take turns."""

    def body(comm: Comm, length: int) -> bool:
        whole = numbers(length, seed=length)
        x = lay(whole, "on tp=4: P(sum)")
        assert_same(x * x, whole * whole)
        y = lay(whole, f"on tp=4: S(0) sizes({length},0,0,0)")
        assert_same(torch.outer(y, y), torch.outer(whole, whole))
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for length in range(2, 62):
            assert run_local(body, 4, length, timeout=60) == [True] * 4
    finally:
        sys.setswitchinterval(interval)
