"""Computing with tensors that are cut by units: nothing moves, heads come out whole, and the cut is kept or refused."""

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
    LayoutError,
    Mesh,
    MeshSpec,
    Placement,
    Replicate,
    Shard,
    from_local,
    parse_placements,
    run_local,
    shard,
)
from shardwise.compat.dtensor import to_dtensor
from shardwise.ops import no_communication
from shardwise.ops.views import view_spec
from tests.dense import assert_same, check, lay, numbers, ramp


def test_each_cut_by_heads_is_a_plain_cut_of_the_heads() -> None:
    for heads, length, ranks in product(range(2, 8), range(2, 5), range(1, 5)):
        mesh = Mesh.of(tp=ranks)
        seen = view_spec(MeshSpec(mesh, [Shard(0, unit=length)]), (heads * length,), (heads, length))
        assert seen.placements == (Shard(0),)
        back = view_spec(seen, (heads, length), (heads * length,))
        flat = MeshSpec(mesh, [Shard(0, unit=length)]).layout((heads * length,))
        assert back.layout((heads * length,)) == flat


def attend(x: Tensor, q: Tensor, kv: Tensor, o: Tensor, length: int = 4) -> Tensor:
    """Attention of uneven heads: 7 heads of 4, as linear layers, views and one product with its gradient."""
    query, key = (F.linear(x, w).view(*x.shape[:-1], -1, length).transpose(1, 2) for w in (q, kv))
    heads = F.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2)
    return F.linear(heads.reshape(*x.shape[:-1], -1), o)


ATTENTION = (numbers(2, 5, 6), numbers(28, 6, seed=1), numbers(28, 6, seed=2), numbers(6, 28, seed=3))


def test_attention_of_uneven_heads_sums_once_and_moves_nothing_else() -> None:
    rows, columns = "on tp=4: S(0) unit(4)", "on tp=4: S(1) unit(4)"
    check(attend, ("on tp=4: R", rows, rows, columns), ATTENTION, world=4)

    def body(comm: Comm) -> tuple[Placement, ...]:
        laid = [lay(t, s) for t, s in zip(ATTENTION, ("on tp=4: R", rows, rows, columns), strict=True)]
        with no_communication():
            return attend(*laid).placements  # type: ignore[attr-defined]  # it is a ShardedTensor

    assert str(run_local(body, 4)[0]) == "(Partial('sum'),)"


def placements(program: Callable[..., Any], *layouts: str, shape: tuple[int, ...] = (20, 3)) -> list[str]:
    """The placements of the results of a program that moves nothing."""

    def body(comm: Comm) -> list[str]:
        laid = [lay(ramp(*shape, grad=False), layout) for layout in layouts]
        with no_communication():
            found = program(*laid)
        results = found if isinstance(found, list | tuple) else [found]
        whole = program(*(ramp(*shape, grad=False) for _ in layouts))
        assert_same(list(results), list(whole) if isinstance(whole, list | tuple) else [whole])
        return [str(r.placements[0]) for r in results]

    return run_local(body, 3)[0]


UNIT = "on tp=3: S(0) unit(4)"
KEPT: dict[str, tuple[Callable[..., Any], int, list[str]]] = {
    "transposed": (lambda x: x.t(), 1, ["Shard(1, unit=4)"]),
    "pointwise": (lambda x: (x * 2).exp() + x, 1, ["Shard(0, unit=4)"]),
    "product": (lambda x, y: x * y.sum(1, True), 2, ["Shard(0, unit=4)"]),
    "joined along another dim": (lambda x, y: torch.cat([x, y], 1), 2, ["Shard(0, unit=4)"]),
    "joined along the dim": (lambda x, y: torch.cat([x, y]), 2, ["Shard(0, groups=(20, 20), unit=4)"]),
    "joined and split": (
        lambda x, y: list(torch.cat([x, y]).split([20, 20])),
        2,
        ["Shard(0, unit=4)", "Shard(0, unit=4)"],
    ),
    "slice at units": (lambda x: x[:16], 1, ["Shard(0, sizes=(8, 8, 0))"]),
    "slice inside a unit": (lambda x: x[3:], 1, ["Shard(0, sizes=(5, 8, 4))"]),
    "one more dim": (lambda x: x.unsqueeze(0), 1, ["Shard(1, unit=4)"]),
    "rows in units": (lambda x: x.unflatten(0, (5, 4)), 1, ["Shard(0)"]),
    "summed over another dim": (lambda x: x.sum(1), 1, ["Shard(0, unit=4)"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_operators_keep_the_cut(name: str) -> None:
    program, count, wanted = KEPT[name]
    assert placements(program, *[UNIT] * count) == wanted


def test_tensors_of_other_units_are_joined_by_the_longest() -> None:
    rows, units = "on tp=2: S(0)", "on tp=2: S(0) unit(2)"
    for given in ((rows, units), (units, rows), (units, "on tp=2: R"), (units, "on tp=2: S(0) unit(3)")):
        check(lambda x, y: torch.cat([x, y]) * 2.0, given, (ramp(6, 3), ramp(6, 3)), (ramp(5, 3), ramp(4, 3)))


def test_group_norm_of_whole_groups_and_of_cut_ones() -> None:
    layout = "on tp=2: S(1) unit(4)"
    check(lambda x: F.group_norm(x, 3), (layout,), (numbers(2, 12, 3),))
    check(lambda x: F.group_norm(x, 4), (layout,), (numbers(2, 12, 3),))


def test_parts_say_the_lengths_and_parts_of_broken_units_are_refused() -> None:
    def body(comm: Comm) -> None:
        rows = (8, 4)[comm.rank]
        made = from_local(torch.full((rows, 2), float(comm.rank)), Mesh.of(tp=2), [Shard(0, unit=4)])
        assert tuple(made.shape) == (12, 2) and made.sharding == MeshSpec(Mesh.of(tp=2), [Shard(0, unit=4)]).layout(
            (12, 2)
        )
        with pytest.raises(LayoutError, match="cuts inside a unit: 7 rows are 1 unit of 4 and 3 rows"):
            from_local(torch.zeros((7, 5)[comm.rank], 2), Mesh.of(tp=2), [Shard(0, unit=4)])

    run_local(body, 2)


def test_dtensor_takes_even_units_and_refuses_others() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(LayoutError, match=r"Shard\(0, unit=4\) on axis 'tp' has no counterpart in DTensor"):
            to_dtensor(shard(ramp(12, grad=False), "on tp=2: S(0) unit(4)", None))
        with pytest.raises(LayoutError, match=r"Shard\(0, each=\(2,\)\) on axis 'tp' has no counterpart in DTensor"):
            to_dtensor(shard(ramp(12, grad=False), "on tp=2: S(0) each 2", None))

    run_local(body, 2)


def test_moves_between_units_and_others() -> None:
    specs = ["R", "S(0)", "S(0) unit(3)", "S(0) unit(4)", "S(0) groups(8,4) unit(4)", "P(sum)", "S(1)"]
    x = ramp(12, 3, grad=False)

    def body(comm: Comm) -> None:
        for source, target in product(specs, [s for s in specs if s != "P(sum)"]):
            moved = lay(x, f"on tp=2: {source}").redistribute(f"on tp=2: {target}")
            assert_same(moved, x)
            assert moved.placements == parse_placements(target)

    run_local(body, 2)


def test_replicas_are_not_units() -> None:
    assert MeshSpec(Mesh.of(tp=2), [Shard(0, unit=9)]).layout((8,)).local_shapes(1) == ((0,),)
    assert MeshSpec(Mesh.of(tp=2), [Replicate()]).layout((8,)).local_shapes(1) == ((8,),)
