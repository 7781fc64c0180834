"""What is written in place keeps the layout it is written to, whatever that is; gradients pass as they do whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, MeshSpec, Partial, Replicate, Shard, ShardedTensor, explain, from_local, run_local, shard
from shardwise.comm import Comm
from shardwise.geometry import Placement
from shardwise.ops import MixedTensorsError
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.dense import check_op, lay, ramp

MESH = Mesh.of(tp=2)
INDEX = torch.tensor([[2, 0, 1], [1, 2, 0]])
SMALL = ((1,), (2,), (2, 2))

WRITES: dict[str, Callable[..., Any]] = {
    "exp_": lambda y, z: y.exp_(),
    "clamp_": lambda y, z: y.clamp_(-0.5, 0.7),
    "a number": lambda y, z: y.add_(1.5),
    "a product": lambda y, z: y.mul_(z),
    "a quotient": lambda y, z: y.div_(z.abs() + 1),
    "where a mask says": lambda y, z: y.masked_fill_(z > 0, 2.0),
    "addcmul_": lambda y, z: y.addcmul_(z, z, value=0.5),
    "itself": lambda y, z: y.sub_(y.detach().clone()),
    "lerp_": lambda y, z: y.lerp_(z, 0.25),
    "fill_": lambda y, z: y.fill_(3.0),
    "an element": lambda y, z: y.fill_(z[0, 0]),
    "a slice": lambda y, z: y[1:].copy_(z[:2]),
    "a row": lambda y, z: y.__setitem__(1, 4.0),
    "rows by a list": lambda y, z: y.__setitem__([0, 2], 4.0),
    "a triangle": lambda y, z: y.tril_(),
    "comparison": lambda y, z: y.gt_(z.detach()),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_in_place_keeps_the_layout(name: str) -> None:
    def write(x: Any, z: Any) -> Any:
        y = x * 1.0
        before = getattr(y, "sharding", None)
        WRITES[name](y, z)
        assert getattr(y, "sharding", None) is before
        return y

    worlds = SMALL[:2] if name in ("a slice", "a row") else SMALL  # what two axes cut is sliced as a copy
    check_op(write, ramp(3, 4), ramp(3, 4, start=-2.0, step=0.31), worlds=worlds, limit=14)


SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter_": lambda y, i, z: y.scatter_(0, i, z[:2, :3]),
    "scatter_add_": lambda y, i, z: y.scatter_add_(0, i, z[:2, :3]),
    "scatter_reduce_": lambda y, i, z: y.scatter_reduce_(0, i, z[:2, :3], "amax"),
    "index_put_": lambda y, i, z: y.index_put_((i[0], i[1]), z[0, :3]),
    "index_add_": lambda y, i, z: y.index_add_(0, i[0], z),
    "index_copy_": lambda y, i, z: y.index_copy_(0, i[0], z),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_writing_by_indices_keeps_the_layout(name: str) -> None:
    def write(x: Any, index: Any, z: Any) -> Any:
        return SCATTERS[name](x * 1.0, index, z)

    check_op(write, ramp(3, 4), INDEX, ramp(3, 4, start=-2.0, step=0.31), worlds=((2,),), limit=24)


KINDS = ("sum", "avg", "max", "min", "product")


@pytest.mark.parametrize("kind", KINDS)
def test_every_pending_reduction_is_written(kind: str) -> None:
    values = ramp(3, 4, grad=False)

    def body(comm: Comm) -> None:
        for number, write in enumerate(list(WRITES.values()) * 2):  # twice, on other values
            dense, other = values + number, values.flip(0) - number
            x = shard(dense, MeshSpec(MESH, [Replicate()]), None).redistribute([Partial(kind)])
            z = shard(other, MeshSpec(MESH, [Shard(1)]), None)
            write(x, z)
            write(dense, other)
            assert x.placements == (Partial(kind),)
            assert_close(x.full(), dense)

    run_local(body, 2)


def test_out_may_be_pending() -> None:
    def body(comm: Comm) -> None:
        for number in range(2):
            whole = ramp(3, 4, grad=False) + number
            x = lay(whole, MESH, (Partial("sum"),))
            out = lay(torch.ones(3, 4, dtype=torch.float64), MESH, (Partial("sum"),))
            for call in (torch.exp, torch.abs, lambda t, out: torch.clamp(t, 0, 1, out=out)):
                assert call(x, out=out) is out and out.placements == (Partial("sum"),)
                assert_close(out.full(), call(whole, out=torch.empty_like(whole)))
        torch.exp(x, out=x)
        assert_close(x.full(), whole.exp())

    run_local(body, 2)


def test_addends_are_reduced_before_they_are_converted() -> None:
    def body(comm: Comm) -> None:
        halves = from_local(torch.tensor([0.5, 1.5]), MeshSpec(MESH, [Partial("sum")]), (2,))
        for placement in (Partial("sum"), Replicate(), Shard(0)):
            whole = shard(torch.tensor([7, 7]), MeshSpec(MESH, [Replicate()]), None).redistribute([placement])
            assert whole.copy_(halves).full().tolist() == [1, 3]
            assert torch.ops.aten.copy_.default(whole.fill_(0), halves).full().tolist() == [1, 3]

    run_local(body, 2)


def test_what_moves_for_a_write_is_shown() -> None:
    def body(comm: Comm) -> None:
        x = lay(ramp(4, grad=False), MESH, (Partial("sum"),))
        with explain() as log:
            x.exp_()
        assert "aten.exp.default" in str(log)

    run_local(body, 2)


# Views in place

VIEWS: dict[str, Callable[[Any], Any]] = {
    "unsqueeze_": lambda y: y.unsqueeze_(1),
    "unsqueeze_ at the end": lambda y: y.unsqueeze_(-1),
    "squeeze_": lambda y: y.squeeze_(),
    "squeeze_ of a dim": lambda y: y.squeeze_(1),
    "squeeze_ of dims": lambda y: y.squeeze_((0, 1)),
    "transpose_": lambda y: y.transpose_(0, 2),
    "swapdims_": lambda y: y.swapdims_(0, 2),
    "t_": lambda y: y.squeeze_(1).t_(),
    "several": lambda y: y.transpose_(0, 1).squeeze_(0).unsqueeze_(2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_in_place(name: str) -> None:
    def view(x: Any) -> Any:
        y = x * 2.0
        turned = VIEWS[name](y)
        assert turned is y and tuple(y.size()) == tuple(y.shape) and y.dim() == y.ndim == len(y.stride())
        return y * torch.ones_like(y), y.sum(-1)

    check_op(view, ramp(3, 1, 4), worlds=SMALL, limit=12)


def test_a_view_in_place_shares_the_memory_of_what_it_was() -> None:
    def body(comm: Comm) -> None:
        dense = ramp(4, 3, grad=False)
        x = shard(dense, MeshSpec(MESH, [Shard(0)]), None)
        other = x.view(12)
        x.t_().mul_(2)
        assert_close(other.full(), dense.view(12) * 2)
        assert x.placements == (Shard(1),) and torch.empty_like(x).shape == (3, 4)

    run_local(body, 2)


def test_a_leaf_keeps_its_shape() -> None:
    def body(comm: Comm) -> None:
        x = shard(ramp(4, 3), MeshSpec(MESH, [Shard(0)]), None).detach().requires_grad_()
        for change in (lambda: x.t_(), lambda: x.unsqueeze_(0)):
            with pytest.raises(UnsupportedOpError, match="a tensor that requires grad is given the shape"):
                change()
        with pytest.raises(UnsupportedOpError, match="a tensor that requires grad is given"), torch.no_grad():
            x.t_()
        with pytest.raises(UnsupportedOpError, match="cannot be resized"):
            x.resize_(12)
        assert x.shape == (4, 3)

    run_local(body, 2)


def test_resize_gives_as_many_elements_another_shape() -> None:
    def body(comm: Comm) -> None:
        dense = ramp(4, 3, grad=False)
        for placement in (Replicate(), Shard(0), Partial("sum")):
            x = lay(dense, MESH, (placement,))
            assert x.resize_(2, 6) is x and x.size() == (2, 6) and torch.equal(x.full(), dense.view(2, 6))
            assert torch.equal(x.resize_as_(x.new_zeros(4, 3)).full(), dense)
            with pytest.raises(UnsupportedOpError, match="12 elements become 15"):
                x.resize_(5, 3)
        room = x.new_empty(0).resize_(2, 2)
        assert room.fill_(3).full().tolist() == [[3.0, 3.0]] * 2 and room.placements == (Replicate(),)
        with pytest.raises(UnsupportedOpError, match="reads a ShardedTensor as contiguous memory"):
            lay(dense, MESH, (Replicate(),)).t().resize_(2, 6)

    run_local(body, 2)


# Strides


@pytest.mark.parametrize(
    "placement", [Replicate(), Shard(0), Shard(1), Shard(0, sizes=(4, 0)), Partial("sum")], ids=str
)
def test_strides_are_those_of_the_whole(placement: Placement) -> None:
    def strided(x: Any) -> Any:
        y = x * 1.0
        windows = y.as_strided((3, 2), (2, 3), 1)
        spread = torch.as_strided_scatter(y, windows * 2.0, (3, 2), (2, 3), 1)
        return windows, torch.as_strided_copy(y, (2, 2), (1, 4)), spread

    check_op(strided, ramp(4, 3), placements=[[placement]], worlds=((2,),))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=str)
def test_windows_over_transposed_dims_read_the_memory_of_the_whole(placement: Placement) -> None:
    def windows(x: Any) -> Any:
        y = (x * 1.0).transpose(0, 1)  # (sequence, batch, width) as (batch, sequence, width), seen in overlapping parts
        size, stride = list(y.shape), list(y.stride())
        return y.as_strided([size[0], 3, 2, size[2]], [stride[0], stride[1], stride[1], stride[2]])

    check_op(windows, ramp(4, 2, 3), placements=[[placement]], worlds=((2,),))


def test_strides_of_a_part_of_memory_are_refused_on_every_rank() -> None:
    def body(comm: Comm) -> list[str]:
        found = []
        x = shard(ramp(4, 3, grad=False), MeshSpec(MESH, [Shard(0)]), None)
        for part in (x[1:], x[:, :2], x.t()[:, ::2]):
            with pytest.raises(UnsupportedOpError, match="a slice, a transposed view or the like") as caught:
                part.as_strided((2,), (1,))
            found.append(str(caught.value))
        assert torch.equal(x.t().clone().contiguous().as_strided((2, 2), (4, 1)).full(), x.full().t()[:2, :2])
        return found

    first, other = run_local(body, 2)
    assert first == other


def test_strides_of_a_replicated_tensor_share_its_memory() -> None:
    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0)):
            x = shard(ramp(4, 3, grad=False), MeshSpec(MESH, [placement]), None)
            part = x.as_strided((2, 2), (3, 1))
            if placement == Replicate():
                part.zero_()
                assert x.full()[:2, :2].abs().sum() == 0
            else:
                with pytest.raises(UnsupportedOpError, match="so what is written to it would be lost"):
                    part.zero_()

    run_local(body, 2)


# What torch makes on the way


def test_tensors_that_torch_makes_are_the_same_everywhere() -> None:
    def made(x: Any) -> Any:
        return x[[2, 0]], torch.quantile(x, 0.25, 1), x[:, [True, False, True, True]], torch.combinations(x[0])

    check_op(made, ramp(3, 4), worlds=((2,),))


def test_results_that_torch_keeps_for_itself_are_whole() -> None:
    square = ramp(3, 3, grad=False) + 4 * torch.eye(3)

    def body(comm: Comm) -> None:
        for placement in (Replicate(), Shard(0), Partial("sum")):
            x = lay(square, MESH, (placement,))
            out = lay(torch.ones(3, 3, dtype=torch.float64), MESH, (placement,))
            assert_close(torch.linalg.inv(x, out=out).full(), square.inverse())
            assert_close(torch.msort(x, out=out).full(), torch.msort(square))
            rank = shard(torch.tensor(0), MeshSpec(MESH, [Replicate()]), None)
            assert int(torch.linalg.matrix_rank(x, out=rank).full()) == int(rank.full()) == 3
        with pytest.raises(torch.linalg.LinAlgError):
            torch.linalg.inv(torch.zeros_like(x), out=out)

    run_local(body, 2)


def test_a_plain_tensor_of_the_caller_is_not_written() -> None:
    def body(comm: Comm) -> None:
        x = shard(ramp(3, 3, grad=False), MeshSpec(MESH, [Shard(0)]), None)
        plain = torch.empty(0, dtype=torch.float64)
        for call in (torch.exp, torch.linalg.inv, torch.msort):
            with pytest.raises(MixedTensorsError):
                call(x, out=plain)
        with pytest.raises(MixedTensorsError):
            x[torch.tensor([0, 1])]
        assert plain.shape == (0,)

    run_local(body, 2)


def test_places_to_split_at_may_be_sharded() -> None:
    def body(comm: Comm) -> None:
        dense, places = ramp(5, 3, grad=False), torch.tensor([1, 4], device="cpu")
        x = shard(dense, MeshSpec(MESH, [Shard(0)]), None)
        found = torch.tensor_split(x, shard(places, MeshSpec(MESH, [Shard(0)]), None))
        for one, other in zip(found, torch.tensor_split(dense, places), strict=True):
            assert torch.equal(one.full(), other)

    run_local(body, 2)


def test_several_targets_are_written() -> None:
    def body(comm: Comm) -> None:
        dense = ramp(3, 4, grad=False)
        x = lay(dense, MESH, (Partial("sum"),))
        rooms: list[ShardedTensor] = [lay(torch.zeros(4, dtype=torch.float64), MESH, (Shard(0),)) for _ in range(3)]
        torch.unbind_copy(x, 0, out=rooms)
        wanted: list[Tensor] = list(dense.unbind(0))
        assert all(torch.equal(r.full(), w) for r, w in zip(rooms, wanted, strict=True))

    run_local(body, 2)
