"""Slices, rows, indices, scatters and joins, held against the dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh, Partial, Placement, Replicate, Shard
from shardwise.ops import MixedTensorsError, no_communication, plain_as_replicated, replicate
from shardwise.tensor.sharded_tensor import ShardedTensor
from tests.dense import check, check_op, lay, numbers, ramp


def laid(tensor: Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> Any:
    """A ShardedTensor, as far as a type checker can follow torch's functions: not at all."""
    return lay(tensor, mesh, placements)


def ids(*values: Any) -> Tensor:
    return torch.tensor(values)


SLICES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "rows": (lambda x: x[1:4], (5, 3)),
    "every second": (lambda x: x[:, 1:6:2], (2, 7)),
    "narrow": (lambda x: x.narrow(1, 2, 3), (2, 7)),
    "nothing": (lambda x: x[2:2], (4, 2)),
    "all": (lambda x: x[:], (4, 2)),
    "a row": (lambda x: x[1], (3, 4)),
    "the last column": (lambda x: x[:, -1], (3, 4)),
    "mixed": (lambda x: x[1:, None, 0, ..., ::2], (3, 4, 5)),
    "split": (lambda x: x.split(2, 0), (5, 3)),
    "split with sizes": (lambda x: x.split([1, 4], 1), (2, 5)),
    "chunk": (lambda x: x.chunk(3, 1), (2, 6)),
    "unbind": (lambda x: x.unbind(1), (2, 3)),
    "triangles": (lambda x: x.tril(1) + x.triu(-1), (2, 4, 5)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (4, 3)),
    "pad": (lambda x: F.pad(x, (1, 2)), (4, 3)),
}
INDICES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rows": (lambda x, i: x[i], (ramp(4, 3), ids(1, 3, -4, 0, 1))),
    "pairs": (lambda x, i, j: x[i, j], (ramp(4, 3), ids(1, 3, -4), ids([0], [2]))),
    "columns": (lambda x, i: x[:, i], (ramp(2, 4, 3), ids([1, 3], [0, 0]))),
    "apart": (lambda x, i, j: x[i, :, j], (ramp(3, 2, 3), ids(1, 2), ids(0, 2))),
    "index_select": (lambda x, i: x.index_select(1, i), (ramp(3, 4), ids(3, 0, 1))),
    "gather": (lambda x, i: torch.gather(x, 1, i), (ramp(3, 4), ids([3, 0], [1, 1], [2, 0]))),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 0), (ramp(3, 2), ids([2, 0], [1, 1], [2, 0]))),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), (ramp(3, 4), ids([3, 0], [1, 2], [2, 0]), ramp(3, 2))),
    "scatter of a value": (lambda x, i: x.scatter(1, i, 2.0), (ramp(3, 4), ids([3, 0], [1, 2], [2, 0]))),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), (ramp(4, 3), ids([3, 0, 1], [1, 2, 3]), ramp(2, 3))),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (ramp(4, 3), ids(3, 0), ramp(2, 3))),
    "index_put, added": (lambda x, i, v: x.index_put((i,), v, True), (ramp(4, 3), ids(3, 0), ramp(3))),
    "masked_fill": (lambda x, m: x.masked_fill(m, 0.5), (ramp(4, 3), ramp(4, 3, grad=False) > 0)),
    "where": (lambda m, x: torch.where(m, x, x * 2), (ramp(4, 3, grad=False) > 0, ramp(4, 3))),
    "masked_select": (lambda x, m: x.masked_select(m), (ramp(4, 3), ramp(4, 3, grad=False) > 0)),
    "cat": (lambda x, y: torch.cat([x, y], 0), (ramp(4, 3), ramp(3, 3))),
    "cat of columns": (lambda x, y: torch.cat([x, y * 2], -1), (ramp(2, 4), ramp(2, 3))),
    "cat and split": (lambda x, y: torch.split_with_sizes(torch.cat([x, y], 0), [4, 3]), (ramp(4, 3), ramp(3, 3))),
    "stack": (lambda x, y: torch.stack([x, y], 1), (ramp(4, 3), ramp(4, 3))),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str) -> None:
    fn, shape = SLICES[name]
    check_op(fn, ramp(*shape), limit=14)


@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str) -> None:
    fn, tensors = INDICES[name]
    check_op(fn, *tensors, limit=12)


def test_writing_by_index_where_the_tensor_can_stay() -> None:
    """A tensor that is written to cannot be moved: some layouts are refused, none is wrong."""
    check_op(lambda x, i, v: (x * 1).index_put_((i,), v), ramp(4, 3), ids(3, 0), ramp(3), limit=12, unsupported=True)
    check_op(
        lambda x, i: (x * 1).scatter_(1, i, 2.0), ramp(3, 4), ids([3, 0], [1, 2], [2, 0]), limit=12, unsupported=True
    )


WORLD = Mesh.of(tp=2)


def test_slicing_a_sharded_dim_moves_nothing() -> None:
    def body(comm: Comm) -> list[str]:
        x = laid(ramp(7, 4), WORLD, (Shard(0),))
        with no_communication():
            parts = [x[2:], x[::3], x[1], x[:, 2], *x.split([3, 4])]
        return [str(p.placements) for p in parts]

    assert run_local(body, 2)[0] == [
        "(Shard(0, sizes=(2, 3)),)",
        "(Shard(0),)",
        "(Partial('sum'),)",
        "(Shard(0),)",
        "(Shard(0, sizes=(3, 0)),)",
        "(Shard(0, sizes=(1, 3)),)",
    ]


def test_fused_weights_are_joined_and_split_in_place() -> None:
    def body(comm: Comm) -> list[str]:
        q, k = laid(ramp(4, 3), WORLD, (Shard(0),)), laid(ramp(2, 3), WORLD, (Shard(0),))
        with no_communication():
            fused: Any = torch.cat([q, k, k])
            parts = fused.split([4, 2, 2])
            last = fused[4:]
        assert torch.equal(parts[0].full(), q.full()) and torch.equal(parts[2].full(), k.full())
        return [str(p.placements) for p in (fused, *parts, last)]

    assert run_local(body, 2)[0] == [
        "(Shard(0, groups=(4, 2, 2)),)",
        "(Shard(0),)",
        "(Shard(0),)",
        "(Shard(0),)",
        "(Shard(0, groups=(2, 2)),)",
    ]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda x: x.__setitem__(3, 7.0),
    "an element": lambda x: x.__setitem__((0, -1), 1.0),
    "a slice": lambda x: x.__setitem__((slice(1, 4), slice(None, None, 2)), 4.0),
    "dots": lambda x: x.__setitem__((..., 1), 2.0),
    "a row of another": lambda x: x.__setitem__(4, x[0] * 2),
    "rows of another": lambda x: x.__setitem__((slice(0, 2), slice(None)), x[2:4] + 1),
    "a column, broadcast": lambda x: x.__setitem__((slice(None), 2), x[0, 0]),
    "in place on a slice": lambda x: x[1:4].mul_(3),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_rows_and_slices(name: str) -> None:
    expected = ramp(5, 3, grad=False).clone()
    WRITES[name](expected)

    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0), Shard(1), Shard(0, sizes=(0, 5))):
            x = laid(ramp(5, 3, grad=False), WORLD, (placement,))
            WRITES[name](x)
            assert torch.equal(x.full(), expected), placement

    run_local(body, 2)


def test_writing_to_a_row_that_shares_no_memory_reaches_the_tensor() -> None:
    def body(comm: Comm) -> None:
        whole, values = ramp(4, 3, grad=False), ramp(3, grad=False)
        x = laid(ramp(4, 3, grad=False), WORLD, (Shard(0),))
        y = laid(ramp(3, grad=False), WORLD, (Replicate(),))
        ways = (lambda r, v: r.add_(v), lambda r, v: r.mul_(2), lambda r, v: r.copy_(v), lambda r, v: r.zero_())
        writes: tuple[Callable[[Any, Any], Any], ...] = ways
        for write in writes:
            write(x[3], y)
            write(whole[3], values)
            assert torch.equal(x.full(), whole)
        x[:, 1].mul_(0)
        assert not bool(x.full()[:, 1].any())

    run_local(body, 2)


def test_plain_indices_are_named_and_can_be_read_as_replicated() -> None:
    def body(comm: Comm) -> str:
        x = laid(ramp(4, 3), WORLD, (Shard(0),))
        with plain_as_replicated():
            assert torch.equal(x[ids(3, 0)].full(), ramp(4, 3)[ids(3, 0)])
        assert x[replicate(ids(1), x)].placements == (Partial("sum"),)
        with pytest.raises(RuntimeError) as caught:
            x[ids(3, 0)]
        return str(caught.value)

    assert run_local(body, 2)[0].startswith("aten.index.Tensor got a plain tensor of shape (2,) as argument 'indices'")


def test_a_row_that_is_not_there() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
            laid(ramp(4, 3), WORLD, (Shard(0),))[4]

    run_local(body, 2)


@pytest.mark.parametrize("kind", [Partial("sum"), Replicate(), Shard(0)], ids=str)
def test_a_number_is_added_to_a_pending_sum_once(kind: Any) -> None:
    def body(comm: Comm) -> None:
        x = laid(ramp(4, 3, grad=False), WORLD, (kind,))
        torch.testing.assert_close((x + 1).full(), ramp(4, 3, grad=False) + 1)
        torch.testing.assert_close((x - 2.5).full(), ramp(4, 3, grad=False) - 2.5)
        rounded = torch.div(ramp(4, 3, grad=False), 0.7, rounding_mode="floor")
        torch.testing.assert_close(x.div(0.7, rounding_mode="floor").full(), rounded)

    run_local(body, 2)


def _written_where(x: Any, mask: Any, value: Any) -> Any:
    y = x * 1.0
    y[mask] = value
    return y


def test_values_are_written_where_a_mask_says() -> None:
    mask = ramp(4, 6, grad=False) > 1.0
    check_op(lambda x, m: _written_where(x, m, 2.0), ramp(4, 6), mask, pending=False, worlds=[(2,), (2, 2)])
    rows = torch.tensor([True, False, True, True])
    check_op(_written_where, ramp(4, 6), rows, ramp(6), pending=False, worlds=[(2,)], limit=40)


def on_host(*values: Any) -> Tensor:
    return torch.tensor(values, device="cpu")


def _write(key: Callable[[], Any], value: Callable[[], Any]) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        y = x * 1.0
        y[key()] = value()
        return y

    return program


IN_HOST_MEMORY: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x[on_host(2, -4, 0)],
    "as many rows": lambda x: x[on_host(2, -4, 0, 1, 3)],
    "columns": lambda x: x[:, on_host(2, 0)],
    "pairs": lambda x: x[on_host(2, -4, 0), ids(1, 1, 2)],
    "a mask": lambda x: x[on_host(True, False, True, False)],
    "a number in rows": _write(lambda: on_host(2, 0), lambda: 2.0),
    "a number in rows of a list": _write(lambda: [2, 0], lambda: 2.0),
    "a host number in rows": _write(lambda: ids(2, 0), lambda: torch.tensor(2.0, dtype=torch.float64, device="cpu")),
    "a host number where a mask says": _write(
        lambda: on_host(True, False, True, False), lambda: torch.tensor(2.0, dtype=torch.float64, device="cpu")
    ),
    "values in rows": _write(lambda: on_host(2, 0), lambda: ramp(2, 3, grad=False)),
    "values where a mask says": _write(lambda: on_host(True, False, True, False), lambda: ramp(2, 3, grad=False)),
    "values at pairs": _write(lambda: (on_host(2, 0), ids(1, 2)), lambda: ramp(2, grad=False)),
}


@pytest.mark.parametrize("name", IN_HOST_MEMORY)
def test_indices_in_host_memory(name: str) -> None:
    """Torch takes them for tensors on a device too, and a single value."""
    program, x = IN_HOST_MEMORY[name], ramp(4, 3)

    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0), Shard(0, sizes=(0, 4)), Shard(0, block=1), Shard(1)):
            with plain_as_replicated():
                found = program(laid(x, Mesh.of(tp=2), (placement,)))
            torch.testing.assert_close(found.full(), program(x))

    run_local(body, 2)


OUTSIDE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "index": (lambda x, i: x[i], (7, -5)),
    "index_select": (lambda x, i: x.index_select(0, i), (7, -1)),
    "gather": (lambda x, i: torch.gather(x, 0, i.unsqueeze(1)), (7, -1)),
    "embedding": (lambda x, i: F.embedding(i, x), (7, -1)),
    "index_put": (lambda x, i: x.index_put((i,), torch.zeros((), dtype=x.dtype)), (7, -5)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_indices_that_no_rank_holds_are_refused(name: str) -> None:
    function, wrong = OUTSIDE[name]

    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0), Shard(0, sizes=(4, 0)), Shard(1)):
            for number in wrong:
                x = laid(ramp(4, 3), Mesh.of(tp=2), (placement,))
                index = laid(ids(0, number, 3), Mesh.of(tp=2), (Replicate(),))
                with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
                    function(x, index).full()

    run_local(body, 2)


def test_functions_that_make_tensors_on_their_way() -> None:
    check_op(lambda i: F.one_hot(i, 5), ids(0, 1, 2, 1), worlds=[(2,), (2, 2)])
    table, bags = ramp(4, 3), ids([0, 1], [2, 1], [3, 3])
    check_op(lambda w, i: F.embedding_bag(i, w, mode="mean"), table, bags, worlds=[(2,)], limit=40, unsupported=True)

    def body(comm: Comm) -> None:
        with pytest.raises(MixedTensorsError, match="got a plain tensor of shape"):
            F.embedding_bag(bags, laid(table, Mesh.of(tp=2), (Shard(0),)))

    run_local(body, 2)


def test_the_same_bytes_under_another_dtype() -> None:
    values = ramp(4, 6, grad=False)
    check_op(lambda x: x.view(torch.int64), values, worlds=[(2,)])
    check_op(lambda x: x.view(torch.int32), values, worlds=[(2,)])


def test_a_gathered_dim_that_one_axis_cuts_while_another_leaves_a_rank_empty() -> None:
    """The function that looks up a rank's rows is taken, not the one that only checks where there is nothing."""
    index = torch.tensor([[2, 0]])

    def program(x: Any) -> Any:
        where = "on dp=2,tp=2: S(1) groups(0,1,1), R"
        return torch.gather(x, 0, lay(index, where) if isinstance(x, ShardedTensor) else index)

    check(program, ["on dp=2,tp=2: R, S(0)"], (numbers(3, 2, seed=1),), (numbers(3, 2, seed=2),), world=4)


@pytest.mark.parametrize("accumulate", (False, True))
@pytest.mark.parametrize("layout", ("S(0)", "S(1)", "S(0) sizes(1,3)", "R"))
def test_one_value_for_each_place_of_a_mask(layout: str, accumulate: bool) -> None:
    """`x[mask] = y[mask]`: values in the order of places, whichever rank has them."""

    def program(x: Any, y: Any) -> Any:
        out = x * 1
        if accumulate:
            return out.index_put((x > 0,), y[x > 0], accumulate=True)
        out[x > 0] = y[x > 0]
        return out

    def rows(x: Any, y: Any) -> Any:
        mask = x[:, 0] > 0
        return (x * 1).index_put_((mask,), y[mask], accumulate=accumulate)

    calls = [(numbers(4, 4, seed=seed), numbers(4, 4, seed=seed + 1)) for seed in (1, 3)]
    for one in (program, rows):
        check(one, [f"on tp=2: {layout}", "on tp=2: S(0)"], *calls)
