"""A rank that has no part of a tensor takes part in the same exchanges as the others, and knows where the tensor is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm import Comm, run_local
from shardwise.comm.local import LocalComm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import Capabilities, CompletedWork, Work
from shardwise.comm.transports.engine import Engine

PLACES = {
    "outside": "on tp=2 @ 0,2: S(0)",
    "outside, summed": "on tp=2 @ 0,2: P",
    "empty": "on tp=3: S(0) sizes(0,4,0)",
    "boxes": "as pieces 0[0:2,0:6], 2[2:4,0:6]",
}

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "mean of columns": lambda x: x.mean(0),
    "product": lambda x: F.gelu(x @ x.mT).sum(1),
    "maximum": lambda x: x.amax(0) * x.std(),
}


def values() -> Tensor:
    return torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()


@pytest.mark.parametrize("place", PLACES)
def test_ranks_without_parts_choose_as_the_others(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU memory may be lent instead of packed: what a rank has must not decide that."""
    monkeypatch.setattr(LocalComm, "capabilities", Capabilities(reads_peers=True, fuses_moves=True))

    def body(comm: Comm) -> None:
        for name, program in PROGRAMS.items():
            whole = values().requires_grad_()
            x = sw.shard(values(), PLACES[place]).requires_grad_()
            expected, found = program(whole), program(x)
            expected.square().sum().backward()
            found.square().sum().backward()
            assert x.grad is not None and whole.grad is not None
            torch.testing.assert_close(found.full_tensor(), expected, msg=name)
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad, msg=name)

    run_local(body, 3, timeout=60)


IN_PLACE_VIEWS: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze(0).squeeze_(0),
}


@pytest.mark.parametrize("name", IN_PLACE_VIEWS)
@pytest.mark.parametrize("place", PLACES)
def test_views_in_place_have_their_shape_on_every_rank(place: str, name: str) -> None:
    view = IN_PLACE_VIEWS[name]

    def body(comm: Comm) -> None:
        whole, x = values().requires_grad_(), sw.shard(values(), PLACES[place]).requires_grad_()
        expected, held = whole * 2, x * 2
        seen, found = view(expected), view(held)
        if name != "squeeze_":
            assert found is held and tuple(held.shape) == tuple(expected.shape)
        assert tuple(found.shape) == tuple(found.sharding.shape) == tuple(seen.shape)
        torch.testing.assert_close((found * 3).full_tensor(), seen * 3)
        (found * found).sum().backward()
        (seen * seen).sum().backward()
        assert x.grad is not None and whole.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)

    run_local(body, 3, timeout=60)


def test_a_leaf_is_not_turned_in_place_on_any_rank() -> None:
    def body(comm: Comm) -> None:
        x = sw.shard(values(), PLACES["outside"]).requires_grad_()
        with pytest.raises(RuntimeError, match="in place, as a leaf"):
            x.t_()
        assert tuple(x.shape) == (4, 6)

    run_local(body, 3, timeout=60)


TOGETHER: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda x, y, index: torch.add(x, y, alpha=2),
    "step": lambda x, y, index: torch.heaviside(y.detach(), x.detach()) * x,
    "loss": lambda x, y, index: F.huber_loss(x, y, reduction="none") + F.mse_loss(y, x),
    "product": lambda x, y, index: x @ y.mT,
    "in place": lambda x, y, index: (x * 1).add_(y) + (y * 1).mul_(x),
    "rows": lambda x, y, index: x.index_select(0, index) + (y * 1).index_fill_(1, index, 2.0)[:2],
    "numbers": lambda x, y, index: F.huber_loss(x.sum(), y.mean(), reduction="none") * x.sum(),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("named", ["on tp=2 @ 0,2: R", "on tp=2 @ 0,2: S(1)", "on tp=3: S(0)"])
@pytest.mark.parametrize("chunks", ["as chunk(0) over 0,2", "as chunk(0) over 2"])
def test_chunks_on_some_ranks_meet_tensors_on_a_mesh(name: str, named: str, chunks: str) -> None:
    """Described on the mesh they are as regular as those: a rank that is outside of it computes with stand-ins."""

    def body(comm: Comm) -> None:
        index = torch.tensor([1, 3])
        for first, second in ((named, chunks), (chunks, named)):
            whole, other = values().requires_grad_(), values().cos().requires_grad_()
            expected = TOGETHER[name](whole, other, index)
            expected.square().sum().backward()
            for _ in range(2):  # the second time by what is remembered
                x = sw.shard(values(), first).requires_grad_()
                y = sw.shard(values().cos(), second).requires_grad_()
                found = TOGETHER[name](x, y, sw.shard(index, chunks))
                torch.testing.assert_close(found.full(), expected)
                found.square().sum().backward()
                for one, dense in ((x, whole), (y, other)):
                    if one.grad is not None or dense.grad is not None:
                        torch.testing.assert_close(one.grad.full(), dense.grad)

    run_local(body, 3, timeout=60)


@pytest.mark.parametrize("grad", (False, True))
def test_ranks_that_pass_nothing_have_their_part_where_the_source_has_its(grad: bool) -> None:
    def body(comm: Comm) -> list[str]:
        assert isinstance(comm, LocalComm)
        comm.device = torch.device("meta")  # no part may be made there
        whole = values().requires_grad_(grad)
        mine = [values().requires_grad_(grad)] if comm.rank == 0 else []
        made = [
            sw.shard(whole if comm.rank == 1 else None, "on tp=2: S(0)", src_rank=1),
            sw.shard(whole, "on tp=1 @ 0: R"),
            sw.from_local(mine, "on tp=1 @ 0: R", (4, 6)),
        ]
        moved = [x.redistribute("on tp=2: S(1)") for x in made]
        return [str(x.device) for x in made] + [str(x.local_tensor().device) for x in moved]

    here = str(values().device)
    assert run_local(body, 2, timeout=60) == [[here] * 6] * 2


def test_what_a_rank_receives_is_where_the_tensor_is() -> None:
    """Also where the comm has another device and the rank had no part before."""

    def body(comm: Comm) -> list[str]:
        assert isinstance(comm, LocalComm)
        x = sw.shard(values(), "on tp=1 @ 0: R").requires_grad_()
        comm.device = torch.device("meta")  # no result may be made there
        moved = x.redistribute("on tp=2: S(0)")
        plain = x.detach().redistribute("on tp=2: S(1)")
        started = x.detach().redistribute("on tp=2: R", async_op=True).wait()
        found = [str(t.local_tensor().device) for t in (moved, plain, started)]
        assert moved.local_tensor().sum() == values()[2 * comm.rank : 2 * comm.rank + 2].sum()
        return found

    here = str(values().device)
    assert run_local(body, 2, timeout=60) == [[here] * 3] * 2


def test_states_of_an_optimizer_are_where_the_parameter_is() -> None:
    """Also on a rank that has no part of it, and learns of them from the others."""

    def body(comm: Comm) -> set[str]:
        assert isinstance(comm, LocalComm)
        comm.device = torch.device("meta")  # no state may be made there
        weight = torch.nn.Parameter(sw.shard(values(), "on tp=1 @ 0: R"))
        optimizer = sw.ShardedOptimizer({"w": weight}, torch.optim.Adam, lr=0.5)
        (weight * weight).sum().backward()
        optimizer.step()
        states = optimizer.state_dict()["state"]["w"]
        assert {"exp_avg", "exp_avg_sq", "step"} <= set(states)
        return {str(states[name].device) for name in ("exp_avg", "exp_avg_sq")}

    assert run_local(body, 2, timeout=60) == [{str(values().device)}] * 2


class NotingEngine(Engine):
    """An engine that lends device memory, and notes the calls that ranks compare."""

    device = torch.device("meta")
    awaited = ()

    def __init__(self) -> None:
        self.compared: list[str] = []

    def exchange(self, *boxes: Any, call: str) -> Work:
        self.compared.append(call)
        return CompletedWork()

    lend = exchange


def test_ranks_with_host_tensors_device_tensors_or_none_make_one_call() -> None:
    """Where a rank's tensors are must not show in the call."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm, engine = ProcessGroupComm(), NotingEngine()
        comm._engine = engine
        comm._capabilities = Capabilities(reads_peers=True)
        for bases in ([], [torch.empty(2)], [torch.empty(2, device="meta")]):
            comm.exchange({0: bases}, {}, label="move").wait()
        comm.exchange({}, {}, label="move").wait()
        assert len(engine.compared) == 4 and len(set(engine.compared)) == 1
        comm.exchange({}, {}, label="move", combine=lambda arrived: None).wait()
        assert engine.compared[-1] != engine.compared[0]  # these do not fit together
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("inference", [False, True])
def test_a_sum_is_made_again_after_a_write_to_a_view_on_every_rank(inference: bool) -> None:
    def body(comm: Comm) -> None:
        with torch.inference_mode(inference):
            whole = values().double()
            x = sw.from_local([whole / 2] if comm.rank else [], "on tp=2 @ 2,1: P", (4, 6)).double()
            for _ in range(2):
                torch.testing.assert_close(x.abs().full(), whole.abs())
                x.select(0, 3).zero_()
                whole.select(0, 3).zero_()
                x[x == 0] = 1
                whole[whole == 0] = 1
            torch.testing.assert_close(x.full(), whole)
            assert x.select(-1, 2).sum().item() == whole.select(-1, 2).sum().item()

    run_local(body, 3, timeout=60)


def test_a_converted_tensor_is_no_view_of_what_it_was_converted_from() -> None:
    """In inference mode torch calls an operator for it whose schema says that it may be one."""

    def body(comm: Comm) -> None:
        x = sw.from_local([values().float()] if comm.rank != 1 else [], "on tp=2 @ 0,2: P(product)", (4, 6))
        with torch.inference_mode():
            column = x.double().select(-1, 2)
            both = torch.stack([column, column], -1)
            expected = values().float().double().square()[:, 2]
            assert column.sum().item() == pytest.approx(expected.sum().item())
            torch.testing.assert_close(both.full(), torch.stack([expected, expected], -1))

    run_local(body, 3, timeout=60)


@pytest.mark.parametrize("order", [float("inf"), -float("inf"), 1])
def test_norms_along_a_dim_counted_from_the_end_of_tensors_without_elements(order: float) -> None:
    def body(comm: Comm) -> None:
        x = sw.shard(torch.zeros(1, 2, 0), "on one=1 @ 2: S(0)")
        assert torch.linalg.vector_norm(x, order, -2).full().shape == (1, 0)
        assert torch.linalg.vector_norm(x, order, -3, keepdim=True).full().shape == (1, 2, 0)

    run_local(body, 3, timeout=60)


def test_a_second_gradient_is_none_on_every_rank_or_on_none() -> None:
    """That of a convolution, which is linear, on a mesh that leaves out a rank."""

    def body(comm: Comm) -> bool:
        x = sw.shard(values().reshape(2, 2, 6), "on one=1 @ 1: R").requires_grad_()
        kernel = sw.shard(values()[:, :2].reshape(2, 2, 2), "on one=1 @ 1: R")
        (grad,) = torch.autograd.grad(F.conv1d(x, kernel, padding=1).sum(), x, create_graph=True)
        return torch.autograd.grad((grad * grad).sum(), x, allow_unused=True)[0] is None

    assert len(set(run_local(body, 2, timeout=60))) == 1


def _cut(shape: tuple[int, ...], place: str) -> str:
    """A layout of a shape in which some rank of three has nothing."""
    if not shape:
        return "as pieces 2[]" if place == "pieces" else "on tp=2 @ 0,2: R"
    sizes = {"first dim": (0, f"0,{shape[0]},0"), "last dim": (len(shape) - 1, f"{shape[-1]},0,0")}
    if place in sizes:
        return "on tp=3: S({}) sizes({})".format(*sizes[place])
    return "as chunk(0) over 0,2" if place == "pieces" else "on tp=2 @ 0,2: S(0)"


ROWS = torch.tensor([1, 0, 1])
TWICE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "conv1d": (lambda x, k, b: F.conv1d(x, k, b, 2, 2), ((1, 3, 4), (3, 3, 3), (3,))),
    "conv2d of groups": (lambda x, k: F.conv2d(x, k, groups=2), ((1, 2, 3, 3), (2, 1, 2, 2))),
    "conv3d": (lambda x, k: F.conv3d(x, k), ((1, 1, 4, 4, 4), (1, 1, 1, 1, 1))),
    "conv_transpose2d": (
        lambda x, k, b: F.conv_transpose2d(x, k, b, 2, 2, 1),
        ((1, 3, 4, 4), (3, 3, 3, 3), (3,)),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((1, 6, 3), (6,), (6,))),
    "instance_norm": (lambda x: F.instance_norm(x), ((1, 2, 3),)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), ((3, 2), (2,))),
    "embedding": (lambda w: F.embedding(_ids(w), w, padding_idx=0), ((9, 4),)),
    "zero_": (lambda x: torch.zero_(x.clone()), ((4, 2),)),
    "fill_": (lambda x: x.clone().fill_(2.0), ((),)),
    "to": (lambda x: x.to(torch.float32, memory_format=torch.channels_last), ((1, 2, 2, 2),)),
    "diff of no order": (lambda x: torch.diff(x, 0), ((4,),)),
    "matrix_power of no order": (lambda x: torch.linalg.matrix_power(x, 0), ((2, 2),)),
    "pinv": (lambda x: torch.linalg.pinv(x, rtol=1e-9), ((2, 2),)),
    "cov": (lambda x, w: torch.cov(x, aweights=w.detach().abs()), ((3,), (3,))),
    "index_fill": (lambda x, v: x.index_fill(0, _rows(x), v), ((4, 2), ())),
    "index_put": (lambda x, v: x.index_put((_rows(x),), v), ((4, 2), (3, 2))),
    "index_reduce": (lambda x, s: x.index_reduce(0, _rows(x), s, "prod"), ((4, 2), (3, 2))),
    "scatter_reduce": (lambda x, s: x.scatter_reduce(0, (s.detach() > 0).long(), s, "prod"), ((4, 2), (3, 2))),
    "copy_": (lambda x, y: (x * 1).copy_(y.detach()) + y, ((4,), (4,))),
}


def _rows(beside: Tensor) -> Tensor:
    return sw.replicate(ROWS) if isinstance(beside, sw.ShardedTensor) else ROWS


def _ids(table: Tensor) -> Tensor:
    if not isinstance(table, sw.ShardedTensor) or len(table.sharding.ranks) < 3:
        return _rows(table)
    return sw.shard(ROWS, "on tp=3: S(0) sizes(3,0,0)")


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("place", ["first dim", "last dim", "outside", "pieces"])
@pytest.mark.parametrize("name", TWICE)
def test_second_gradients_where_a_rank_has_nothing(name: str, place: str) -> None:
    """Of sums of squares and of sums: the second gradients of what is linear are none, on every rank."""
    function, shapes = TWICE[name]
    whole = [torch.linspace(-1.7, 1.1, max(1, math.prod(s)), dtype=torch.float64).reshape(s).sin() for s in shapes]

    def differentiate(given: list[Any], power: int) -> tuple[list[Any], list[bool]]:
        out = function(*given)
        first = torch.autograd.grad((out**power).sum(), given, create_graph=True, allow_unused=True)
        recorded = [g is not None and g.requires_grad for g in first]
        squares = [(g * g).sum() for g, has_tape in zip(first, recorded, strict=True) if has_tape]
        second = torch.autograd.grad(sum(squares[1:], squares[0]), given, allow_unused=True) if squares else ()
        return [*first, *second], recorded

    def body(comm: Comm) -> list[list[bool]]:
        flags = []
        for power in (1, 2):
            expected, _ = differentiate([w.clone().requires_grad_() for w in whole], power)
            given = [sw.shard(w, _cut(tuple(w.shape), place)).requires_grad_() for w in whole]
            found, recorded = differentiate(given, power)
            for one, other in zip(found, expected, strict=False):
                held = torch.zeros(()) if one is None else one.full_tensor()
                torch.testing.assert_close(held, torch.zeros_like(held) if other is None else other, check_dtype=False)
            flags.append(recorded)
        return flags

    found = run_local(body, 3, timeout=60)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("place", ["on tp=1 @ 1: P(min)", "on tp=2 @ 0,2: P", "on tp=3: P"])
def test_what_is_written_in_place_stays_for_the_gradient_of_the_other(place: str) -> None:
    """The target needs no gradient, but that of the divisor is computed from the values that it had."""

    def body(comm: Comm) -> None:
        x = sw.shard(values()[0], place)
        divisor = sw.shard(values()[1], place.partition(":")[0] + ": R").requires_grad_()
        (x.div_(divisor + 2)).sum().backward()
        whole = values()[1].requires_grad_()
        (values()[0] / (whole + 2)).sum().backward()
        assert divisor.grad is not None and whole.grad is not None
        torch.testing.assert_close(divisor.grad.full_tensor(), whole.grad)

    run_local(body, 3, timeout=60)


WRITTEN_SUMS: dict[str, Callable[[Any], Any]] = {
    "multiplied by itself": lambda v: v.mul_(v) - v,
    "added to by products": lambda v: torch.ones_like(v) + v.addcmul_(v, v),
    "filled": lambda v: v * v + v.fill_(2.0) - v,
}


@pytest.mark.parametrize("name", WRITTEN_SUMS)
def test_a_sum_that_was_made_before_a_write_is_known_on_every_rank(name: str) -> None:
    """Which strategy is chosen depends on whether a sum was made before: outside of the mesh as well."""

    def body(comm: Comm) -> None:
        whole = values().requires_grad_()
        x = sw.shard(values(), "on tp=2 @ 2,1: S(0)").requires_grad_()
        torch.testing.assert_close(
            WRITTEN_SUMS[name](x.sum()).full_tensor(), WRITTEN_SUMS[name](whole.sum()), msg=lambda text: text
        )

    run_local(body, 3, timeout=60)


def test_a_hook_gets_no_gradient_where_torch_gives_none() -> None:
    """Second derivatives of what a linear operator is given are none, and hooks are called with that."""

    def body(comm: Comm) -> None:
        seen: list[str] = []
        x = sw.shard(values()[:, None], "on tp=2 @ 0,2: R").requires_grad_()
        kernel = sw.shard(torch.ones(1, 1, 2, dtype=torch.float64), "on tp=2 @ 0,2: R")
        twice = x.tanh() * 2

        def hook(grad: Any) -> Any:
            seen.append(type(grad).__name__)
            return grad if grad is None else grad * 2

        twice.register_hook(hook)
        found = F.conv1d(twice, kernel)
        (grad,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        torch.autograd.grad(grad.square().sum(), x)
        assert seen[0] == "ShardedTensor" and "NoneType" in seen[1:]

    run_local(body, 3, timeout=60)


@pytest.mark.parametrize("view", ["unsqueeze", "slice", "transpose", "select"])
def test_a_view_that_is_written_to_has_second_gradients_where_it_is_empty(view: str) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "unsqueeze": lambda x: x.unsqueeze(0),
        "slice": lambda x: x[:, 1:],
        "transpose": lambda x: x.mT,
        "select": lambda x: x.select(1, 2),
    }

    def second(x: Any) -> Any:
        y = x * 1
        written = ways[view](y)
        written.sub_(1)
        (grad,) = torch.autograd.grad(written.exp().sum() + y.sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    expected = second(values().requires_grad_())

    def body(comm: Comm) -> None:
        found = second(sw.shard(values(), PLACES["empty"]).requires_grad_())
        torch.testing.assert_close(found.full_tensor(), expected)

    run_local(body, 3, timeout=60)


NO_ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "trapezoid": lambda x: torch.trapezoid(x, dim=0),
    "trapezoid of points": lambda x: torch.trapezoid(x, x, dim=0),
    "trapz": lambda x: torch.trapz(x, dx=2.0, dim=0),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=0),
    "diff": lambda x: torch.diff(x, dim=0, prepend=x, append=x),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x),
    "geqrf": lambda x: torch.geqrf(x)[0],
    "histogramdd": lambda x: torch.histogramdd(x, [2, 2]).hist,
    "interpolate": lambda x: F.interpolate(x.reshape(0, 2, 1, 1), scale_factor=1.7),
}


@pytest.mark.parametrize("place", ["on tp=2: S(0)", "on tp=2: R", "on tp=1 @ 1: S(0)", "as chunk(0) over 0,1"])
@pytest.mark.parametrize("name", NO_ELEMENTS)
def test_results_of_no_elements_are_sharded_on_every_rank(name: str, place: str) -> None:
    """Some of them torch makes of shapes alone; of some it knows no shapes without values, or says a wrong thing."""
    expected = NO_ELEMENTS[name](torch.ones(0, 2))

    def body(comm: Comm) -> None:
        found = NO_ELEMENTS[name](sw.shard(torch.ones(0, 2), place))
        assert isinstance(found, sw.ShardedTensor)
        torch.testing.assert_close(found.full_tensor(), expected)

    run_local(body, 2, timeout=60)


def test_a_copy_into_a_tensor_on_the_tape_is_seen_by_what_is_computed_after_it() -> None:
    """The tensor had been computed with before, so that its stand-in was known."""

    def body(comm: Comm) -> None:
        x, source = (sw.shard(values(), PLACES["outside"]).requires_grad_() for _ in range(2))
        y = x * 1
        before = y.sum()
        y.copy_(source)
        (y.square().sum() + before).backward()
        assert x.grad is not None and source.grad is not None
        torch.testing.assert_close(source.grad.full_tensor(), 2 * values())
        torch.testing.assert_close(x.grad.full_tensor(), torch.ones_like(values()))

    run_local(body, 3, timeout=60)


WRITTEN_VIEWS: dict[str, Callable[[Any], Any]] = {
    "every second row": lambda y: y[::2].clamp_(-1, 1),
    "rows": lambda y: y[1:].copy_(y.detach()[1:].flip(0)),
    "unflatten": lambda y: y.unflatten(1, (3, 2)).sin_(),
    "one dim": lambda y: y.view(-1).mul_(2),
    "transposed": lambda y: y.t().sin_(),
}


@pytest.mark.parametrize("place", [*PLACES.values(), "on tp=3: S(0)", "on tp=3: S(1) sizes(1,0,5)"])
@pytest.mark.parametrize("name", WRITTEN_VIEWS)
def test_what_is_computed_with_a_view_and_its_base_has_second_gradients(name: str, place: str) -> None:
    """The view and the base depend on what was written on every rank, so that all meet moves in the same order."""

    def second(x: Any) -> Any:
        y = x * 1
        for _ in range(2):  # the second time from what is remembered
            view = WRITTEN_VIEWS[name](y)
        (grad,) = torch.autograd.grad((y * view.sum()).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    expected = second(values().requires_grad_())

    def body(comm: Comm) -> None:
        found = second(sw.shard(values(), place).requires_grad_())
        torch.testing.assert_close(found.full_tensor(), expected)

    run_local(body, 3, timeout=60)


EXPANDED: dict[str, Callable[[Any], Any]] = {
    "add_": lambda v: v.add_(1),
    "copy_": lambda v: v.copy_(v.clone()),
    "out=": lambda v: torch.mul(v, 2, out=v),
    "index_fill_": lambda v: v.index_fill_(0, sw.replicate(torch.tensor([0])), 1),
    "uniform_": lambda v: v.uniform_(),
    "a list": lambda v: torch._foreach_add_([v], 1),
}


@pytest.mark.parametrize("place", ["on tp=2 @ 0,2: R", "on tp=3: S(0)"])
@pytest.mark.parametrize("name", EXPANDED)
def test_elements_that_share_memory_are_not_written_one_by_one_on_any_rank(name: str, place: str) -> None:
    def body(comm: Comm) -> str:
        x = sw.shard(torch.arange(2.0), place)
        expanded = x.unsqueeze(0).expand(3, 2)
        with pytest.raises(
            RuntimeError, match=r"of shape \(3, 2\) that was expanded: the 3 elements along dim 0"
        ) as said:
            EXPANDED[name](expanded)
        expanded.zero_()
        assert torch.equal(x.full(), torch.zeros(2))
        return str(said.value)

    assert len(set(run_local(body, 3, timeout=60))) == 1
