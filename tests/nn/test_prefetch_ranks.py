"""Parameters gathered ahead and gradients summed later on real processes: the numbers are those without, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import Mesh, ModelPlan, default_comm, shard_module
from shardwise.comm import ProcessGroupComm
from shardwise.comm.current import use_comm
from shardwise.ops import unshard as gather_order
from shardwise.ops import unshard as prefetch
from tests.device import DEVICE
from tests.world import Ranks, on_host, world_fixture

world = world_fixture(2)
WIDTH, ROWS, LAYERS, STEPS = 16, 64, 4, 4
AHEAD = 1 << 20  # bytes: enough for all layers


class Deep(nn.Module):
    """Layers whose order, and what happens in between, the test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.order: list[int] = list(range(LAYERS))
        self.between: Callable[[int], None] = lambda number: None
        self.again: bool | None = None  # checkpointed code; whether with re-entrance
        self.kept: set[int] = set()  # layers that are not checkpointed in spite of it

    def forward(self, x: Any) -> Any:
        for number in self.order:
            self.between(number)
            layer, plain = self.layers[number], self.again is None or number in self.kept
            x = torch.tanh(layer(x) if plain else checkpoint(layer, x, use_reentrant=self.again))
        return x


def make_model(prefetch_bytes: int | None, **options: Any) -> Deep:
    torch.manual_seed(1)
    model = Deep()
    options = {"reshard_after_forward": True, **options}
    plan = ModelPlan(
        Mesh.of(dp=2), {"**": "S(0)"}, axis="dp", input_plan="dp: S(0)", prefetch_bytes=prefetch_bytes, **options
    )
    if prefetch_bytes is not None:
        shard_module(model, plan)
    return model


def batch(step: int, rank: int | None = None) -> Tensor:
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator(torch.empty(0).device).manual_seed(step))
    return whole if rank is None else whole.chunk(2)[rank]


class Fault(Exception):
    """What a test raises in the middle of a pass."""


def _plain(model: Deep, step: int, x: Tensor) -> None:
    model(x).square().mean().backward()


def _other_orders(model: Deep, step: int, x: Tensor) -> None:
    model.order = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1], [3, 1, 1, 0, 2]][step]
    _plain(model, step, x)


def _raises_in_forward(model: Deep, step: int, x: Tensor) -> None:
    def fail(number: int) -> None:
        if number == 2 and step > 0:
            raise Fault

    model.between = fail
    with pytest.raises(Fault) if step > 0 else ExitStack():
        model(x)
    model.between = lambda number: None
    _plain(model, step, x)


def _raises_in_backward(model: Deep, step: int, x: Tensor) -> None:
    def fail(grad: Tensor) -> None:
        raise Fault

    if step > 0:
        hidden: list[Any] = []
        handle = model.layers[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        loss = model(x).square().mean()
        handle.remove()
        hidden[0].register_hook(fail)
        with pytest.raises(Fault):
            loss.backward()
        model.zero_grad()
    _plain(model, step, x)


def _accumulates(model: Deep, step: int, x: Tensor) -> None:
    losses = [model(part).square().mean() for part in x.chunk(2)]  # two graphs at a time
    for loss in losses:
        loss.backward(retain_graph=True)
    losses[0].backward()


def _evaluates_between(model: Deep, step: int, x: Tensor) -> None:
    _plain(model, step, x)
    with torch.no_grad():
        model.eval()(x)
        model.train()


def _frozen(model: Deep, step: int, x: Tensor) -> None:
    for number in (0, 2):
        model.layers[number].requires_grad_(False)
    _plain(model, step, x)


def _checkpointed(model: Deep, step: int, x: Tensor) -> None:
    model.again = False
    _plain(model, step, x)


def _checkpointed_whole(model: Deep, step: int, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).square().mean().backward()


def _checkpointed_with_reentrance(model: Deep, step: int, x: Tensor) -> None:
    model.again = True
    _plain(model, step, x.requires_grad_())


def _checkpointed_in_the_middle_with_reentrance(model: Deep, step: int, x: Tensor) -> None:
    model.kept = {0, 3}
    _checkpointed_with_reentrance(model, step, x)


def _with_hooks(model: Deep, step: int, x: Tensor) -> None:
    handles = [p.register_hook(lambda grad: grad * 2) for p in model.layers[1].parameters()]
    _plain(model, step, x)
    for handle in handles:
        handle.remove()


def _asks_for_gradients(model: Deep, step: int, x: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(model(x).square().mean(), parameters), strict=True):
        parameter.grad = grad
    model(x).square().mean().backward(inputs=parameters[:3])


def _changes_in_between(model: Deep, step: int, x: Tensor) -> None:
    def change(number: int) -> None:
        with torch.no_grad():
            model.layers[(number + 1) % LAYERS].weight.mul_(1.5)  # one that is travelling
            model.layers[(number + 1) % LAYERS].weight.mul_(1 / 1.5)

    model.between = change
    with torch.no_grad():
        model(x)
    model.between = lambda number: None
    _plain(model, step, x)


def _autocast(model: Deep, step: int, x: Tensor) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()


STORIES: dict[str, Callable[[Deep, int, Tensor], None]] = {
    story.__name__: story
    for story in (
        _plain,
        _other_orders,
        _raises_in_forward,
        _raises_in_backward,
        _accumulates,
        _evaluates_between,
        _frozen,
        _checkpointed,
        _checkpointed_whole,
        _checkpointed_with_reentrance,
        _checkpointed_in_the_middle_with_reentrance,
        _with_hooks,
        _asks_for_gradients,
        _changes_in_between,
        _autocast,
    )
}


def _train(story: str, prefetch_bytes: int | None) -> tuple[list[Tensor], list[str], int]:
    """The parameters after some steps, the calls of the comm in order, and how many gathers were started ahead."""
    torch.set_num_threads(1)
    model, comm = make_model(prefetch_bytes), default_comm()
    calls: list[str] = []
    begin = ProcessGroupComm._begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupComm, "_begin", lambda self, call: (begin(self, call), calls.append(call))[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            STORIES[story](model, step, batch(step, None if prefetch_bytes is None else comm.rank))
            optimizer.step()
    parameters: list[Any] = list(model.parameters())
    found = [p.detach() if prefetch_bytes is None else p.detach().full() for p in parameters]
    return found, calls, sum(", ahead" in call for call in calls)


@pytest.mark.parametrize("story", STORIES)
def test_numbers_are_those_without_and_all_ranks_keep_one_order(world: Ranks, story: str) -> None:
    (found, calls, ahead), (other, other_calls, _) = world.run(_train, story, AHEAD)
    expected, _, none_ahead = world.run(_train, story, 0)[0]
    assert calls == other_calls and none_ahead == 0
    assert ahead > 0 or story == "_checkpointed_whole"
    for one, two, three in zip(found, other, expected, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def _train_dense(story: str) -> list[Tensor]:
    return _train(story, None)[0]


@pytest.mark.parametrize("story", ["_plain", "_other_orders", "_frozen"])
def test_numbers_are_those_of_one_process(world: Ranks, story: str) -> None:
    for one, other in zip(world.run(_train, story, AHEAD)[0][0], _train_dense(story), strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5)


def _train_over_sockets(prefetch_bytes: int) -> tuple[list[Tensor], int]:
    with use_comm(ProcessGroupComm(shared_memory=False, timeout=60.0)):
        found, _, ahead = _train("_plain", prefetch_bytes)
    return found, ahead


def test_over_the_groups_own_sockets_as_well(world: Ranks) -> None:
    found, ahead = world.run(_train_over_sockets, AHEAD)[0]
    expected, _ = world.run(_train_over_sockets, 0)[0]
    assert ahead > 0 and all(map(torch.equal, found, expected))


def _train_beside_fsdp(resharded: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradients in mixed precision: ours, FSDP2's, and those of full precision, after a second step."""
    torch.set_num_threads(1)
    with on_host():
        return _compare_with_fsdp(resharded, default_comm().rank)


def _compare_with_fsdp(resharded: bool, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    ours = make_model(AHEAD, gather_dtype=torch.bfloat16, reshard_after_forward=resharded)
    theirs, full = make_model(None), make_model(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=resharded)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    models: list[Any] = [ours, theirs, full]
    for step in range(2):
        for model in models:
            model.zero_grad()
            output = model(batch(step, rank))
            assert output.dtype == (torch.float32 if model is full else torch.bfloat16)
            output.float().square().mean().backward()
    grads: list[Any] = [[p.grad for p in model.parameters()] for model in models]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in ours.parameters() if p.grad is not None)
    return [(a.full(), b.full_tensor(), c.full()) for a, b, c in zip(*grads, strict=True)]


@pytest.mark.parametrize("resharded", [True, False])
def test_mixed_precision_is_that_of_fsdp(world: Ranks, resharded: bool) -> None:
    for found in world.run(_train_beside_fsdp, resharded):
        for ours, theirs, full in found:
            assert_close(ours, theirs, rtol=1e-6, atol=1e-9)  # sums are not rounded to 8 bits
            assert_close(ours, full, rtol=0.1, atol=1e-2)
            assert not torch.equal(ours, ours.bfloat16().float()) and not torch.equal(ours, full)


def _follow_one_step() -> tuple[list[int], list[int]]:
    """How many bytes of gathers travel ahead, and of gradients, at most, with room for two layers and for one."""
    torch.set_num_threads(1)
    most: list[int] = []
    for layers in (2, 1):
        room = layers * (WIDTH * WIDTH + WIDTH) * 4
        model = make_model(room)
        ahead: list[int] = [0]
        start = gather_order.GatherOrder._start_next

        def note(self: Any, operator: int, start: Any = start, ahead: list[int] = ahead) -> None:
            start(self, operator)
            ahead.append(len(self._ahead))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather_order.GatherOrder, "_start_next", note)
            for step in range(3):
                _plain(model, step, batch(step, default_comm().rank))
        most.append(max(ahead))
    left = [len(found._sums) for found in prefetch._prefetchers.values()]
    return most, left


def _try_overlap(slow_on: int, slow: bool) -> tuple[list[int], bool]:
    """How many operators' gathers start ahead in each step where steps with overlap (`slow`) or without take long."""
    now, started, same = 0.0, [], True
    made = gather_order.StartedOperator.__init__

    def note(self: Any, *args: Any) -> None:
        started[-1] += 1
        made(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_order, "LEAST_BYTES", 1)
        patch.setattr(gather_order, "time", SimpleNamespace(perf_counter=lambda: now))
        patch.setattr(gather_order.StartedOperator, "__init__", note)
        model, plain = make_model(0), make_model(0)
        prefetch.register_prefetch(model, None)

        def take_time(number: int) -> None:
            nonlocal now
            overlaps = prefetch._prefetchers[model]._trial.overlaps
            now += 5.0 if overlaps == slow and default_comm().rank == slow_on else 1.0

        model.between = take_time
        for step in range(9):
            started.append(0)
            for each in (model, plain):
                _plain(each, step, batch(step, default_comm().rank))
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                same &= torch.equal(mine.grad.local_tensor(), other.grad.local_tensor())
    return started, same


@pytest.mark.parametrize("slow", [True, False])
def test_overlap_is_kept_where_it_wins_on_every_rank(world: Ranks, slow: bool) -> None:
    for started, same in world.run(_try_overlap, 1, slow):
        assert same
        assert [count > 0 for count in started] == [False, True, True, False, True, False, *[not slow] * 3]


def test_the_limit_bounds_what_travels_ahead(world: Ranks) -> None:
    for most, left in world.run(_follow_one_step):
        assert most == [2, 1] and not any(left)
