"""`mode="reduce-overhead"`: a graph that is recorded once and replayed gives what the program gives, or is not used.

Where the tests do not run on a GPU, host memory stands in for one: what records a call notes the operators with their
tensors, computes nothing, and computes them again in the same memory for each replay, as a CUDA graph does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise import Comm, Mesh, ModelPlan, run_local, shard, shard_module
from shardwise.compiler import replay
from tests.device import DEVICE

BACKEND = "aot_eager"
TENSOR_PARALLEL = ModelPlan(Mesh.of(tp=1), {"0.*": "S(0)", "2.weight": "S(1)"}, axis="tp", input_plan="replicated")
TWO_RANKS = ModelPlan(Mesh.of(tp=2), {"0.*": "S(0)", "2.weight": "S(1)"}, axis="tp", input_plan="replicated")


class _Notes(TorchDispatchMode):
    """Notes operators and their tensors; `undo` gives tensors from outside the values that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._made: list[Any] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not any(value is known for known in self._made):
                self._before.append((value, value.detach().clone()))
                self._made.append(value)
        results = func(*args, **(kwargs or {}))
        self._made += tree_leaves(results)
        self.calls.append((func, args, kwargs or {}, tree_leaves(results)))
        return results

    def undo(self) -> None:
        for tensor, value in self._before:
            tensor.detach().copy_(value)


def record_operators(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
    with _Notes() as notes:
        results = run()
    notes.undo()

    def again() -> None:
        with torch.no_grad():
            for func, args, kwargs, made in notes.calls:
                for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    return results, again


@pytest.fixture(autouse=True)
def _host_memory_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cuda":
        monkeypatch.setitem(replay.RECORDERS, DEVICE, record_operators)


def make_layers() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


LAYERS = make_layers()  # made once: ranks that are threads share torch's generator


def make_model(plan: ModelPlan = TENSOR_PARALLEL) -> nn.Module:
    return shard_module(copy.deepcopy(LAYERS), plan)


def make_step(model: nn.Module, owner: torch.optim.Optimizer, clip: float = 0.5) -> Callable[[Tensor], Any]:
    def step(batch: Tensor) -> Any:
        owner.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        owner.step()
        return loss

    return step


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach().full() if isinstance(tensor, shardwise.ShardedTensor) else tensor.detach()
    return found


def alone(body: Callable[[Comm], Any]) -> Any:
    return run_local(body, 1)[0]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, wanted in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(full(mine), full(wanted), rtol=1e-4, atol=1e-6)
        assert (mine.grad is None) == (wanted.grad is None)
        if mine.grad is not None:
            assert_close(full(mine.grad), full(wanted.grad), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if (name, DEVICE) != ("adamw", "cuda")])
def test_steps_are_recorded_once_and_replayed(name: str) -> None:
    def body(comm: Comm) -> str:
        models = [make_model(), make_model()]
        owners = [OPTIMIZERS[name](model.parameters()) for model in models]
        steps = [make_step(*pair) for pair in zip(models, owners, strict=True)]
        compiled = shardwise.compile(steps[0], backend=BACKEND, mode="reduce-overhead")
        kept: list[tuple[Tensor, Tensor]] = []
        for number in range(7):
            for owner in owners:
                owner.param_groups[0]["lr"] = 0.01 * (number + 1)  # as a scheduler does
            batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
            losses = [full(run(batch)) for run in (compiled, steps[1])]
            assert_close(*losses)
            assert_same(*models)
            gradient = next(models[0].parameters()).grad
            assert gradient is not None
            kept += [(losses[0], losses[0].clone()), (full(gradient), full(gradient).clone())]
        assert all(torch.equal(*pair) for pair in kept), "a replay wrote to results of an earlier one"
        assert len({float(t.abs().sum()) for t, _ in kept}) == len(kept)
        return compiled.explain()

    assert "CUDA graph: recorded 1 times, replayed 4 times" in alone(body)


def test_gradients_that_are_added_to_are_copied_both_ways() -> None:
    def body(comm: Comm) -> str:
        models = [make_model(), make_model()]

        def add(model: nn.Module) -> Callable[[Tensor], Any]:
            def step(batch: Tensor) -> Any:
                loss = model(batch).sum()
                loss.backward()
                return loss

            return step

        compiled = shardwise.compile(add(models[0]), backend=BACKEND, mode="reduce-overhead")
        wanted = add(models[1])
        for number in range(8):
            if number == 6:
                for model in models:
                    for p in model.parameters():
                        assert p.grad is not None
                        p.grad = p.grad.clone() * 2  # other memory than that of the calls before
            batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
            assert_close(full(compiled(batch)), full(wanted(batch)))
            assert_same(*models)
        return compiled.explain()

    assert "CUDA graph: recorded 1 times" in alone(body)


def test_arguments_that_are_written_to_and_replaced_state() -> None:
    def body(comm: Comm) -> str:
        scale = shard(torch.ones(4), "on x=1: R")

        def program(x: Tensor, total: Tensor) -> Tensor:
            total.add_(x)
            return total * scale

        compiled = shardwise.compile(program, backend=BACKEND, mode="reduce-overhead", uses=[scale])
        sums = [shard(torch.zeros(4), "on x=1: R") for _ in range(2)]
        for number in range(8):
            if number == 5:
                scale.local_parts = (torch.full((4,), 3.0),)
            mine = sums[number % 2]
            before, versions = mine.full().clone(), mine.local_tensor()._version
            x = torch.full((4,), float(number))
            result = compiled(shard(x, "on x=1: R"), mine)
            assert torch.equal(mine.full(), before + x)
            assert torch.equal(result.full(), (before + x) * (3.0 if number >= 5 else 1.0))
            assert mine.local_tensor()._version > versions
        return compiled.explain()

    assert "CUDA graph: recorded 2 times, replayed 6 times" in alone(body)


def test_what_cannot_be_recorded_runs_as_with_the_default_mode(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Comm) -> list[str]:
        model, x = make_model(), shard(torch.ones(2, 4), "on tp=1: R")
        compiled = shardwise.compile(model, backend=BACKEND, mode="reduce-overhead")
        for _ in range(4):
            compiled(x).sum().backward()
        shared = shardwise.compile(lambda t: (t.t(), t * 2), backend=BACKEND, mode="reduce-overhead")
        for _ in range(4):
            view, double = shared(x)
            assert view.local_tensor().data_ptr() == x.local_tensor().data_ptr()
            assert torch.equal(double.full(), x.full() * 2)
        noisy = shardwise.compile(lambda t: torch.dropout(t, 0.5, True), backend=BACKEND, mode="reduce-overhead")
        drawn = [noisy(x).full() for _ in range(5)]
        assert len({tuple(t.flatten().tolist()) for t in drawn}) > 1
        return [found.explain() for found in (compiled, shared, noisy)]

    module, shared, noisy = alone(body)
    assert "no CUDA graph: its forward and backward passes are two graphs; compile the whole step" in module
    assert "no CUDA graph: a result shares memory with an argument" in shared
    assert "no CUDA graph: it draws random numbers of sharded tensors, which are made on the host" in noisy
    assert "no CUDA graph: a result shares memory" in caplog.text


def test_moves_between_ranks_are_not_recorded_where_the_comm_sends_messages() -> None:
    def body(comm: Comm) -> str:
        model = make_model(TWO_RANKS)
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        compiled = shardwise.compile(step, backend=BACKEND, mode="reduce-overhead")
        losses = [full(compiled(torch.ones(2, 4))).item() for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        return compiled.explain()

    for explained in run_local(body, 2):
        assert "no CUDA graph: its moves need messages between the ranks, which a replay would not repeat" in explained


@pytest.mark.skipif(DEVICE == "cuda", reason="messages between threads are not part of a CUDA graph")
def test_ranks_record_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the operators of moves are noted as well, so ranks can replay them; one rank's device refuses."""
    monkeypatch.setattr("shardwise.comm.protocol.Capabilities.captures_graphs", True)

    def body(comm: Comm, refused: bool) -> str:
        models = [make_model(TWO_RANKS), make_model(TWO_RANKS)]
        owners = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        steps = [make_step(*pair) for pair in zip(models, owners, strict=True)]
        compiled = shardwise.compile(steps[0], backend=BACKEND, mode="reduce-overhead")
        for number in range(5):
            if refused and comm.rank == 1:
                monkeypatch.setattr(replay, "_empty_as", _refuse)
            batch = torch.full((2, 4), number + 1.0)
            assert_close(full(compiled(batch)), full(steps[1](batch)))
            assert_same(*models)
        return compiled.explain()

    assert all("replayed 2 times" in explained for explained in run_local(body, 2, False))
    for explained in run_local(body, 2, True):
        assert "no CUDA graph: " in explained and "out of memory" in explained


def _refuse(tensor: Tensor) -> Tensor:
    raise RuntimeError("out of memory")


@pytest.mark.skipif(DEVICE != "cpu", reason="about host memory")
def test_the_host_has_no_such_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(replay.RECORDERS, "cpu")

    def body(comm: Comm) -> str:
        model = make_model()
        step = make_step(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        compiled = shardwise.compile(step, backend=BACKEND, mode="reduce-overhead")
        losses = [full(compiled(torch.ones(2, 4))).item() for _ in range(4)]
        assert losses == sorted(losses, reverse=True)
        return compiled.explain()

    assert "no CUDA graph: its tensors are on cpu, not on a GPU" in alone(body)


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="mode is 'default' or 'reduce-overhead', got 'fast'"):
        shardwise.compile(lambda x: x, mode="fast")
