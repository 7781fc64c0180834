"""Views of sharded tensors: values, gradients, and that nothing is moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm, run_local
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Placement, Replicate, Shard
from shardwise.ops import no_communication
from shardwise.ops.explain import HiddenCommunicationError
from shardwise.ops.views import NoViewError, view_spec
from tests.dense import LINES, check_op, lay, ramp

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "t": (lambda x: x.t(), (4, 5)),
    "transpose": (lambda x: x.transpose(0, -1), (4, 3, 5)),
    "permute": (lambda x: x.permute(2, 0, 1), (4, 3, 5)),
    "unsqueeze": (lambda x: x.unsqueeze(-1).unsqueeze(0), (4, 3)),
    "squeeze": (lambda x: x.squeeze(), (4, 1, 3)),
    "squeeze of a dim": (lambda x: x.squeeze(1), (2, 3, 1)),
    "squeeze of dims": (lambda x: x.squeeze((0, 2)), (1, 3, 1)),
    "expand": (lambda x: x.expand(2, 4, -1, 3), (4, 1, 3)),
    "flip": (lambda x: x.flip(0), (4, 3)),
    "roll": (lambda x: x.roll(1, 1), (4, 3)),
    "unfold": (lambda x: x.unfold(1, 2, 1), (2, 4)),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), (2, 3, 3)),
    "movedim": (lambda x: x.movedim(0, 1).mT, (2, 3, 2)),
    "clone": (lambda x: x.clone().contiguous().detach() + x, (3, 2)),
}
RESHAPES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "flatten": (lambda x: x.flatten(), (4, 3)),
    "split and merge": (lambda x: x.view(2, 2, 6), (4, 6)),
    "there and back": (lambda x: x.reshape(12, 2).view(4, 3, 2), (4, 6)),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)), (4, 6)),
    "batch and sequence": (lambda x: x.view(12, 4).view(2, 6, 4), (2, 6, 4)),
    "odd sequence": (lambda x: x.view(10, 4).view(2, 5, 4), (2, 5, 4)),
    "view_as": (lambda x: x.view_as(x.t()), (4, 3)),
    "of a transposed one": (lambda x: x.t().reshape(-1), (4, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_dims_with_other_numbers(name: str) -> None:
    fn, shape = CASES[name]
    check_op(fn, ramp(*shape), limit=14)


@pytest.mark.parametrize("name", RESHAPES)
def test_reshapes_are_right_or_refused(name: str) -> None:
    fn, shape = RESHAPES[name]
    check_op(fn, ramp(*shape), limit=14)


@pytest.mark.parametrize(("shape", "bias"), [((4, 6), True), ((2, 3, 6), True), ((2, 3, 6), False)], ids=str)
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    check_op(F.linear, ramp(*shape), ramp(5, 6), *([ramp(5)] if bias else []), limit=14)


PRODUCTS = [((2, 4, 6), (6, 3)), ((2, 4, 6), (2, 6, 3)), ((3, 1, 4, 2), (2, 2, 3)), ((6,), (6, 3)), ((2, 4, 6), (6,))]


@pytest.mark.parametrize(("one", "other"), PRODUCTS, ids=str)
def test_matmul(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    check_op(lambda a, b: a @ b, ramp(*one), ramp(*other), limit=12)


# The arithmetic of cuts, held against the elements that each rank has


def own_elements(layout: Layout, rank: int) -> list[int]:
    """The numbers of the elements in a rank's local tensor, in order."""
    numbers = np.arange(layout.numel).reshape(layout.shape)
    local = np.zeros(layout.local_shapes(rank)[0], np.int64)
    table = layout.table.take(layout.rows_of(rank))
    for offset, size, at in zip(table.offsets, table.sizes, table.local_offsets, strict=True):
        here = tuple(slice(a, a + s) for a, s in zip(at, size, strict=True))
        local[here] = numbers[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    return [int(n) for n in local.reshape(-1)]


def shapes_of(numel: int, most: int = 3) -> list[tuple[int, ...]]:
    """All shapes with this many elements and at most so many dims."""
    found: list[tuple[int, ...]] = [(numel,)]
    for shape in found:
        last = shape[-1]
        if len(shape) < most:
            found += [(*shape[:-1], d, last // d) for d in range(1, last + 1) if last % d == 0]
    return sorted(set(found))


def cuts_of(shape: tuple[int, ...]) -> list[Placement]:
    found: list[Placement] = [Replicate()]
    for dim, length in enumerate(shape):
        found += [
            Shard(dim),
            Shard(dim, block=1),
            Shard(dim, block=2),
            Shard(dim, sizes=(length - length // 3, length // 3)),
            Shard(dim, unit=2),
            Shard(dim, unit=3),
        ]
        found += [Shard(dim, groups=(length // 2,) * 2)] if length % 2 == 0 else []
        found += [Shard(dim, groups=(length // 2,) * 2, unit=2)] if length % 4 == 0 else []
    return found


def views_of(numel: int) -> list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]]:
    """Shapes, placements on two axes, and other shapes."""
    pairs = [(shape, pair) for shape in shapes_of(numel) for pair in product(cuts_of(shape), repeat=2)]
    return [(shape, pair, after) for shape, pair in pairs for after in shapes_of(numel)]


@pytest.mark.parametrize(("numel", "every"), [(6, 11), (12, 37)])
def test_small_views_keep_every_element_in_its_place(numel: int, every: int) -> None:
    mesh = Mesh.of(a=2, b=2)
    kept = 0
    for before, pair, after in views_of(numel)[::every]:
        try:
            layout = MeshSpec(mesh, pair).layout(before)
            result = view_spec(MeshSpec(mesh, pair), before, after).layout(after)
        except (LayoutError, NoViewError):
            continue
        kept += 1
        for rank in range(4):
            assert own_elements(result, rank) == own_elements(layout, rank), (before, pair, after)
    assert kept > 300


def on(mesh: Mesh, *placements: Placement) -> Callable[[Tensor], Any]:
    return lambda tensor: lay(tensor, mesh, placements)


def test_heads_and_sequences_are_split_and_merged_without_moving() -> None:
    mesh = Mesh.of(dp=2, tp=2)

    def body(comm: Comm) -> list[str]:
        hidden = on(mesh, Shard(0), Shard(2))(ramp(4, 3, 8))
        sequence = on(mesh, Shard(0), Shard(1))(ramp(4, 3, 8))
        with no_communication():
            heads = hidden.view(4, 3, 4, 2).transpose(1, 2)
            back = heads.transpose(1, 2).reshape(4, 3, 8)
            flat = sequence.view(12, 8)
            again = flat.view(4, 3, 8)
        assert torch.equal(back.full(), hidden.full()) and torch.equal(again.full(), sequence.full())
        return [str(x.placements) for x in (heads, back, flat, again)]

    assert run_local(body, 4)[0] == [
        "(Shard(0), Shard(1))",
        "(Shard(0), Shard(2))",
        "(Shard(0), Shard(0, groups=(3, 3, 3, 3)))",
        "(Shard(0), Shard(1))",
    ]


# Views that cut rows in two: what a fused projection and its heads are viewed as, for each length of the batch.
RECUT: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "split of a fused dim": ((24,), (3, 8)),
    "heads of a fused dim": ((24,), (3, 2, 4)),
    "odd heads": ((15,), (3, 5)),
    "prime lengths": ((35,), (5, 7)),
}


@pytest.mark.parametrize("batch", (1, 2, 3, 4))
@pytest.mark.parametrize("name", RECUT)
def test_a_view_that_cannot_carry_its_cuts_over_moves_the_tensor_first(name: str, batch: int) -> None:
    before, after = RECUT[name]
    check_op(lambda x: x.view(batch, *after) * 2.0, ramp(batch, *before), worlds=((2,), (3,), (2, 2)))


@pytest.mark.parametrize("sizes", ((8, 0), (6, 2), (4, 4)))
@pytest.mark.parametrize("batch", (1, 2, 3, 4))
def test_heads_are_merged_with_the_batch_whatever_its_length(batch: int, sizes: tuple[int, int]) -> None:
    """As attention does: [time, batch, heads * width] is viewed as [time, batch * heads, width]."""
    cuts = (Shard(2, sizes=sizes), Shard(1), Replicate())
    check_op(lambda x: x.view(3, batch * 2, 4).transpose(0, 1), ramp(3, batch, 8), placements=[cuts], worlds=((2,),))


@pytest.mark.parametrize("size", [(-1,), (5, 1, 5), (25, 1)])
@pytest.mark.parametrize("owner", [(0, 5), (5, 0)])
def test_a_tensor_that_one_rank_has_alone_is_viewed_in_place(owner: tuple[int, int], size: tuple[int, ...]) -> None:
    """The cut that can be viewed has the same pieces: nothing is copied, and both may be written to."""

    def body(comm: Comm) -> Tensor:
        x = on(Mesh.of(tp=2), Shard(2, groups=owner))(ramp(1, 5, 5, grad=False))
        flat = x.view(size)
        flat.add_(1)
        x.mul_(2)
        x[:, :1] = x[:, -1:]
        assert torch.equal(flat.full().flatten(), x.full().flatten())
        return x.full()

    expected = (ramp(1, 5, 5, grad=False) + 1) * 2
    expected[:, :1] = expected[:, -1:]
    for found in run_local(body, 2):
        assert torch.equal(found, expected)


def test_a_view_that_has_to_move_the_tensor_is_a_copy_and_what_is_written_to_it_is_written_to_both() -> None:
    def body(comm: Comm) -> None:
        fused = on(Mesh.of(tp=2), Shard(1))(ramp(5, 24, grad=False))
        heads = fused.view(5, 3, 8)
        heads.add_(1)
        assert heads.placements == (Shard(2),) and fused.placements == (Shard(1),)
        for found in (heads.full().reshape(5, 24), fused.full()):
            assert torch.equal(found, ramp(5, 24, grad=False) + 1)
        with no_communication(), pytest.raises(HiddenCommunicationError, match="view"):
            fused.view(5, 3, 8)

    run_local(body, 2)


def test_uneven_parts_that_two_axes_cut_are_flattened_after_one_is_made_whole() -> None:
    mesh, whole = Mesh.of(dp=2, tp=2), ramp(4, 6, 2)

    def body(comm: Comm) -> Tensor:
        uneven = on(mesh, Shard(0, sizes=(3, 1)), Shard(0))(whole)
        flat = uneven.flatten(0, 1)
        assert flat.placements == (Shard(0, sizes=(18, 6)), Replicate())
        found: Tensor = flat.full()
        return found

    for found in run_local(body, 4):
        assert torch.equal(found, whole.flatten(0, 1))


def test_a_view_that_cannot_be_is_torchs_error() -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(RuntimeError, match=r"shape \[5, -1\] is invalid for a tensor of shape \[2, 6\]"):
            on(Mesh.of(tp=2), Shard(0))(ramp(2, 6)).view(5, -1)

    run_local(body, 2)


def test_views_share_memory() -> None:
    def body(comm: Comm) -> None:
        x = on(Mesh.of(tp=2), Shard(0))(ramp(4, 3, grad=False))
        x.view(-1).fill_(7)
        x.t()[0].fill_(5)
        assert torch.equal(x.full(), torch.tensor([[5.0, 7.0, 7.0]] * 4, dtype=torch.float64))

    run_local(body, 2)


def test_views_without_elements() -> None:
    check_op(lambda x: x.view(3, 0), ramp(0, 3), worlds=LINES, ragged=False)


def test_new_tensors_after_others() -> None:
    def body(comm: Comm) -> None:
        x = on(Mesh.of(tp=2), Shard(0))(ramp(4, 3, grad=False))
        assert x.new_zeros(4, 3).placements == (Shard(0),) and x.new_full((2,), 3.0).placements == (Replicate(),)
        assert math.isclose(x.new_ones(5).full().sum().item(), 5.0)
        for made in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), torch.empty_like(x)):
            assert made.sharding is x.sharding

    run_local(body, 2)
