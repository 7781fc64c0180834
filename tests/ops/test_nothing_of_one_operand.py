"""A rank that holds nothing of an operand decides as the others do: values, refusals, the tape, first and second
gradients, hooks, what is saved for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm import Comm, run_local

Put = Callable[[Tensor], Any]
PLACES = {
    "some ranks": "as chunk(0) over 0,2",
    "one rank": "as chunk(0) over 0",
    "a smaller mesh": "on tp=2 @ 0,2: S(0)",
    "a mesh of one": "on one=1 @ 0: R",
    "boxes": "as pieces 0[0:2,0:3], 0[2:4,0:3], 2[4:5,0:3]",
    "empty parts": "on tp=3: S(0) sizes(5,0,0)",
}


def values() -> Tensor:
    return torch.arange(15.0, dtype=torch.float64).reshape(5, 3) / 7 + 0.1


def _penalty(x: Any) -> Any:
    (grad,) = torch.autograd.grad((x.tanh() * x).sum(), x, create_graph=True)
    assert grad.requires_grad
    (grad * grad).sum().backward()
    return x.grad


def _hessian_product(x: Any) -> Any:
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    direction = (x.detach() * 2 + 1).requires_grad_()
    (found,) = torch.autograd.grad(grad, x, grad_outputs=direction, create_graph=True)
    return found, torch.autograd.grad(found.sum(), direction)[0]


def _hessians(x: Any) -> Any:
    def loss(y: Any) -> Any:
        return (y**3).sum() + (y.t() @ y).tanh().sum()

    return torch.autograd.functional.hessian(loss, x), torch.func.jacrev(torch.func.grad(loss))(x)  # type: ignore[no-untyped-call]


def _softmax_twice(x: Any) -> Any:
    (grad,) = torch.autograd.grad((x.softmax(0) * x.softmax(1)).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def _product_twice(x: Any) -> Any:
    (grad,) = torch.autograd.grad((x @ x.t()).relu().square().mean(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def _norm_twice(x: Any) -> Any:
    y = x * (x.detach() > 1)  # a rank's part may be all zeros
    (grad,) = torch.autograd.grad(y.norm() * x.sum() + y.norm(dim=0).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def _written_twice(x: Any) -> Any:
    y = x * 1
    y[1:3].mul_(x[:2])
    y.t().mul_(2)
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return y, x.grad


def _hooks(x: Any) -> Any:
    y, seen = x.tanh(), []
    y.register_hook(lambda grad: seen.append(grad.sum()) or grad * 3)
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad, seen[0]


def _saved_on_host(x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        y = (x.tanh() * x).sum()
    y.backward()
    return x.grad


def _saved_as_arrays(x: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        y = x.exp().sum()
    y.backward()
    return x.grad


def _beams(x: Any) -> Any:
    best = x.flatten().topk(3).indices
    places = (x.detach().flatten() * 0 + 1).long().cumsum(0) % 5  # more indices than rows
    return x[best // 3], best % 3, x[places // 2], x.index_select(0, places // 2)


def _lists(x: Any) -> Any:
    other = (x.detach() + 1).requires_grad_()
    one, two = torch._foreach_add([x, other], [other, x])
    half, _ = torch._foreach_mul([x, other], 0.5)
    ((one + half).sum() * two.tanh().sum()).backward()
    return one, x.grad, other.grad


def _hinge(x: Any) -> Any:
    sides = torch.where(values() > 1, 1.0, -1.0).double()
    if isinstance(x, sw.ShardedTensor):
        sides = sw.shard(sides, x.sharding.spec if isinstance(x.sharding.spec, sw.MeshSpec) else "on tp=3: S(0)")
    loss = F.hinge_embedding_loss(x, sides)
    loss.backward()
    return loss, x.grad


def _written_number(x: Any) -> Any:
    total = x.detach().sum(0)
    total[True] = 1.0
    return total


def _inference_views(x: Any) -> Any:
    turned = x.detach().clone()
    with torch.inference_mode():
        turned.t_()
        turned.unsqueeze_(0)
    assert tuple(turned.shape) == (1, 3, 5)
    return turned


def _cast(x: Any) -> Any:
    y = x.detach().float()
    with torch.autocast(x.device.type, torch.bfloat16):
        product = torch.einsum("ij,kj->ik", y, y)
        loss = F.cross_entropy(F.linear(y, y), (y[:, 0] * 0).long(), label_smoothing=0.1)
    assert product.dtype == torch.bfloat16 and loss.dtype == torch.float32
    return product.float(), loss


def _base_is_written(x: Any) -> Any:
    base = x.detach().clone()
    view = base.unsqueeze(0)
    row = view[0, 1:3]
    base.mul_(x.tanh())
    assert view.requires_grad and row.requires_grad and base.detach().requires_grad is False
    (view.square().sum() + row.sum()).backward()
    return view, row, x.grad


def _inference(x: Any) -> Any:
    total = x.detach().sum(0)  # may be pending
    with torch.inference_mode():
        scaled = total / total.abs().sum().clamp(min=1)
        return scaled + total, torch.func.grad(lambda t: (t * t).sum())(x.detach())


def _same_twice(x: Any) -> Any:
    y = (x * 1).double()  # which is what it got
    torch._foreach_add_([y, y], 1)
    y.flatten()
    y.zero_()
    return y


def _sigmoid_twice(x: Any) -> Any:
    (grad,) = torch.autograd.grad(F.logsigmoid(x - x[0].detach()).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "gradient penalty": _penalty,
    "hessian product": _hessian_product,
    "hessians": _hessians,
    "softmax, twice": _softmax_twice,
    "product, twice": _product_twice,
    "norm, twice": _norm_twice,
    "writes, twice": _written_twice,
    "hooks": _hooks,
    "saved on the host": _saved_on_host,
    "saved as arrays": _saved_as_arrays,
    "list of booleans": lambda x: x[[True, False, True, True, False]],
    "list of numbers": lambda x: x[[1, 0, 3]],
    "beams": _beams,
    "lists of tensors": _lists,
    "hinge": _hinge,
    "no dims": lambda x: ((x > 1).any(dim=()), (x > 1).all(dim=())),
    "dims are None": lambda x: (x.sum(dim=None), x.mean(dim=None), x.nanmean(), x.nansum(dim=None), x.std(dim=None)),
    "logarithms of sums": lambda x: torch.autograd.grad(x.logcumsumexp(1).sum(), x, create_graph=True)[0],
    "a number is written": _written_number,
    "views in inference mode": _inference_views,
    "autocast": _cast,
    "the base of views is written": _base_is_written,
    "inference mode": _inference,
    "one tensor twice": _same_twice,
    "logarithm of a sigmoid, twice": _sigmoid_twice,
    "two totals": lambda x: torch.stack([x.sum(), x.detach().t().sum() * 2]) * x.amax(),
}


def _wholes(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [each for one in result for each in _wholes(one)]
    return [result.full() if isinstance(result, sw.ShardedTensor) else result]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_those_of_whole_tensors(name: str, place: str) -> None:
    program, several = PROGRAMS[name], place == "boxes" and name == "hooks"
    if place == "boxes" and name == "the base of views is written":
        pytest.skip("views of boxes are copies, which are not used after the write")
    expected = _wholes(program(values().requires_grad_()))

    def body(comm: Comm) -> None:
        x = sw.shard(values(), PLACES[place]).requires_grad_()
        if several:
            for register in (x.register_hook, x.register_post_accumulate_grad_hook):
                with pytest.raises(NotImplementedError, match="one local tensor on each rank, and rank 0 has 2"):
                    register(lambda grad: grad)
            return
        found = _wholes(program(x))
        for one, other in zip(found, expected, strict=True):
            assert one.requires_grad == other.requires_grad
            torch.testing.assert_close(one, other)

    run_local(body, 3, timeout=60)


def test_real_views_of_parts_without_elements_have_gradients() -> None:
    def body(comm: Comm) -> Tensor:
        whole = torch.complex(values(), values() + 1)
        x, grads = sw.shard(whole, "on tp=4: S(0)").requires_grad_(), []
        for y in (x, whole.requires_grad_()):
            torch.view_as_real(y).permute(2, 0, 1).sum().backward()
            (torch.view_as_real(y).transpose(0, 1) ** 2).sum().backward()
            grads.append(y.grad)
        torch.testing.assert_close(grads[0].full(), grads[1])
        return grads[0].full()

    run_local(body, 4, timeout=60)


@pytest.mark.parametrize("join", ["sum", "stack"])
def test_numbers_on_different_sets_of_ranks_are_put_together(join: str) -> None:
    """As the losses of several parts of a model, and the norms that clip_grad_norm_ stacks."""

    def body(comm: Comm) -> None:
        specs = ["on ep=4: R", "on ep=2 @ 0-1: S(0)", "on dp=2,tp=2: R, P(sum)", "as chunk(0) over 3"]
        parts = [sw.shard(values(), spec).requires_grad_() if "P" not in spec else None for spec in specs]
        parts[2] = sw.from_local([values() / 2], sw.parse_spec(specs[2]), (5, 3)).requires_grad_()
        totals = [part.square().sum() for part in parts]
        for _ in range(2):  # the second time from what is remembered
            found = torch.stack(totals).sum() if join == "stack" else totals[0] + totals[1] + totals[2] + totals[3]
            torch.testing.assert_close(found.full(), 4 * values().square().sum())
        found.backward()
        for part in parts:
            torch.testing.assert_close(part.grad.full(), 2 * values())
        with pytest.raises(RuntimeError, match="the tensors are on different meshes"):
            parts[0] * parts[1]

    run_local(body, 4, timeout=60)


WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "places are filled": lambda x, i, y: x.index_fill_(-1, i, 2),
    "places are added to": lambda x, i, y: x.index_add_(-1, i, y),
    "a sum is put out": lambda x, i, y: torch.sum(y, -1, keepdim=True, out=x),
}


@pytest.mark.parametrize("target", ["as chunk(0) over 2", "on dp=3: R", "a sum over some ranks"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_stays_where_others_have_nothing_of_it(name: str, target: str) -> None:
    """The others are on a mesh that a user named: what is computed there is copied to where it belongs."""
    number, recorded = torch.tensor([3.0], dtype=torch.float64), name != "a sum is put out"
    places, given = torch.tensor([0, 0]), torch.tensor([2.0, 5.0], dtype=torch.float64)

    def put(t: Tensor) -> Any:
        if target == "a sum over some ranks":
            return sw.shard(t.expand(2) / 2, "as chunk(0) over 0,2").sum(0, keepdim=True).detach()
        return sw.shard(t, target)

    def written(start: Any, i: Any, y: Any) -> list[Any]:
        leaves = [start.requires_grad_(recorded), y.requires_grad_(recorded)]
        x = leaves[0] * 1
        place = getattr(x, "sharding", None)
        found = WRITES[name](x, i, y)
        assert getattr(found, "sharding", None) is place and found.requires_grad == recorded
        if recorded:
            (found * found).sum().backward()
        return [found, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = written(number.clone(), places, given.clone())

    def body(comm: Comm) -> None:
        spec = "on tp=2 @ 0,2: R"
        for _ in range(2):  # the second time from what is remembered
            found = written(put(number), sw.shard(places, spec), sw.shard(given, spec))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.full(), other)

    run_local(body, 3, timeout=60)


def test_hooks_of_leaves_run_in_one_order_on_ranks_that_hold_nothing_of_them() -> None:
    """They may ask all ranks; what comes after on the tape does as well."""

    def body(comm: Comm) -> None:
        order: list[str] = []
        x = sw.shard(values()[0], "on tp=2 @ 0,2: R").requires_grad_()
        weight = sw.shard(values(), "on tp=2 @ 0,2: S(0)").requires_grad_()
        hidden = x * 2
        hidden.register_hook(lambda grad: order.append("hidden") or grad * grad.sum().item())
        weight.register_hook(lambda grad: order.append("weight") or grad * grad.full().amax().item())
        F.linear(hidden, weight).sum().backward()
        assert order == ["weight", "hidden"]
        torch.testing.assert_close(x.grad.full(), 2 * values().sum(0) * values().sum())

    run_local(body, 3, timeout=60)


ALIKE: dict[str, Callable[[Any], Any]] = {
    "product along": lambda x: x.prod(1),
    "product along the parts": lambda x: x.prod(0, keepdim=True),
    "product": lambda x: x.prod(),
    "running product": lambda x: x.cumprod(1),
    "running maximum": lambda x: x.cummax(1).values,
    "running minimum": lambda x: x.cummin(-1).values,
    "trace": lambda x: x.select(1, 0).trace(),
    "convolution": lambda x: F.conv_transpose1d(x, x[:1] * 1, x[0, :, 0]),
    "product of nothing": lambda x: x[:0, 0] @ x[:0, 0].t(),
    "a vector added": lambda x: torch.addmv(x[:1, 0, 0], x[:, 0], x[0, 0]),
}


@pytest.mark.parametrize("place", ["on tp=3: S(0)", "on tp=2 @ 0,2: S(0)", "on one=1 @ 1: R", "as chunk(0) over 0,2"])
@pytest.mark.parametrize("name", ALIKE)
def test_gradients_are_on_the_tape_of_all_ranks_or_none(name: str, place: str) -> None:
    """Torch leaves out of the tape what is constant for no elements, for a dim of length 1, or for these values."""
    program = ALIKE[name]

    def differentiate(x: Any, power: int) -> tuple[bool, list[Any]]:
        (grad,) = torch.autograd.grad((program(x * 1) ** power).sum(), x, create_graph=True)
        taped: bool = grad.requires_grad
        second = torch.autograd.grad((grad * grad).sum(), x, allow_unused=True)[0] if taped else None
        return taped, [grad.detach(), second]

    def body(comm: Comm, values: Tensor, power: int) -> bool:
        expected = differentiate(values.clone().requires_grad_(), power)[1]
        taped, found = differentiate(sw.shard(values, place).requires_grad_(), power)
        for one, other in zip(found, expected, strict=True):
            if one is not None:
                torch.testing.assert_close(one.full(), torch.zeros_like(values) if other is None else other.detach())
        return taped

    for shape in ((2, 1, 2), (2, 1, 1), (1, 1, 1)):
        for start in (1.5, 0.0):
            values = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) + start
            for power in (1, 3):
                assert len(set(run_local(body, 3, values, power, timeout=60))) == 1
