"""Programs that try to fool `shardwise.compile`: each gives, and leaves behind, what it does without a graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise
from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, run_local, shard, shard_module
from shardwise.compiler import CompiledProgram
from tests.dense import numbers

PLAN = ModelPlan(
    Mesh.of(tp=1), {"up.*": "S(0)", "down.weight": "S(1)"}, axis="tp", input_plan="replicated", output_plan="plain"
)
Compile: TypeAlias = Callable[[Any], Any]
factor = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


def make_net(kind: type[nn.Module] = Net) -> Any:
    net = kind()
    for i, parameter in enumerate(net.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, dtype=torch.float32) / 4
    shard_module(net, PLAN)
    return net


def batch(seed: int = 0) -> Tensor:
    return numbers(3, 4, seed=seed, dtype=torch.float32)


def make_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        return loss.detach()

    return step


def _reads_containers_and_attributes(compiled: Compile) -> Any:
    class Options:
        scale = 1.0

    net, factors, named, options = make_net(), [1.0], {"scale": 1.0}, Options()
    options.scale = 1.0

    def program(x: Any) -> Any:
        return net(x) * factors[0] * named["scale"] * options.scale

    run, found = compiled(program), []
    for number in (1.0, 2.0):
        factors[0] = number
        found.append(run(batch()))
    named["scale"] = 3.0
    found.append(run(batch()))
    options.scale = 5.0
    return [*found, run(batch())]


def _reads_globals_of_helpers(compiled: Compile) -> Any:
    global factor
    net = make_net()

    def helper(x: Any) -> Any:
        return net(x) * factor

    run = compiled(lambda x: helper(x) + 1)
    found = [run(batch())]
    factor = 2.0
    found.append(run(batch()))
    factor = 1.0
    return found


class _Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scales[0]


def _reads_lists_of_modules(compiled: Compile) -> Any:
    net = make_net(_Configured)
    run = compiled(net)
    found = [run(batch())]
    net.scales[0] = 4.0
    return [*found, run(batch())]


def _names_another_model_later(compiled: Compile) -> Any:
    one, other = make_net(), make_net()
    with torch.no_grad():
        other.up.weight.mul_(2)
    table: Any = shard(torch.ones(3, 4), "on tp=1: S(0)")
    net = one

    def program(x: Any) -> Any:
        return net(x) + (table * 2).full()

    run = compiled(program)
    found = [run(batch())]
    net = other
    found.append(run(batch()))
    table = shard(torch.zeros(3, 4), "on tp=1: S(0)")
    return [*found, run(batch())]


def _keeps_notes(compiled: Compile) -> Any:
    net, calls, losses = make_net(), 0, []
    step = make_step(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def program(x: Any) -> Any:
        nonlocal calls
        calls += 1
        losses.append(step(x))
        return losses[-1]

    run = compiled(program)
    return [run(batch(seed)) for seed in range(3)], calls, losses


class _Noting(Net):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        self.seen.append(y.detach())
        self.mean = self.mean * 0.5 + y.detach().mean()
        return y + self.mean


def _keeps_notes_in_modules(compiled: Compile) -> Any:
    net = make_net(_Noting)
    run = compiled(net)
    return [run(batch(seed)) for seed in range(3)], net.seen, net.mean


def _sets_a_plain_buffer(compiled: Compile) -> Any:
    net = make_net(_Noting)
    net.register_buffer("mean", torch.zeros(()))
    run = compiled(net)
    return [run(batch(seed)) for seed in range(3)], net.mean


def _steps_its_scheduler(compiled: Compile) -> Any:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = make_step(net, optimizer)

    def program(x: Any) -> Any:
        loss = step(x)
        scheduler.step()
        return loss

    run = compiled(program)
    return [run(batch(seed)) for seed in range(4)], scheduler.last_epoch, optimizer.param_groups[0]["lr"]


def _makes_state_later(compiled: Compile) -> Any:
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

    def program(x: Any, is_last: bool) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = compiled(program)
    return [run(batch(i), i % 3 == 2) for i in range(9)], list(net.parameters())


def _thaws(compiled: Compile) -> Any:
    net = make_net()
    net.up.requires_grad_(False)
    run = compiled(make_step(net, torch.optim.Adam(net.parameters(), lr=0.1)))
    found = [run(batch(i)) for i in range(3)]
    net.up.requires_grad_(True)
    return found, [run(batch(i)) for i in range(3)], list(net.parameters())


def _loads_state_of_its_optimizer(compiled: Compile) -> Any:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run = compiled(make_step(net, optimizer))
    found = [run(batch(i)) for i in range(2)]
    kept = copy.deepcopy(optimizer.state_dict())
    found += [run(batch(i)) for i in range(2)]
    optimizer.load_state_dict(kept)
    return found, [run(batch(i)) for i in range(2)], list(net.parameters())


class _Counting(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            with torch.no_grad():
                parameter.sub_(parameter.grad * (0.1 / state["steps"]))


def _counts_steps_by_numbers(compiled: Compile) -> Any:
    net = make_net()
    run = compiled(make_step(net, _Counting(net.parameters())))
    return [run(batch(i)) for i in range(4)], list(net.parameters())


def _descend(parameter: Any) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def _steps_in_hooks(compiled: Compile) -> Any:
    net = make_net()
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(_descend)

    def program(x: Any) -> Any:
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    run = compiled(program)
    return [run(batch(i)) for i in range(3)]


@dataclass
class Batch:
    x: Any
    scale: float


class Result:
    def __init__(self, y: Any) -> None:
        self.parts, self.length = {"y": [y, y * 2]}, 2


def _passes_and_returns_objects(compiled: Compile) -> Any:
    net = make_net()

    def program(given: Batch) -> tuple[Batch, Result]:
        y = net(given.x) * given.scale
        return Batch(y, given.scale), Result(y)

    run, found = compiled(program), []
    for seed, scale in enumerate((2.0, 2.0, 3.0)):
        made, result = run(Batch(batch(seed), scale))
        found += [made.x + 0, made.scale, result.parts["y"], result.length]
    return found


def _changes_its_arguments(compiled: Compile) -> Any:
    net, kept = make_net(), list[Tensor]()

    def program(x: Any, into: list[Any]) -> Any:
        into.append(net(x).detach())
        return into[-1]

    run = compiled(program)
    return [run(batch(i), kept) for i in range(3)], kept


def _passes_what_cannot_be_compared(compiled: Compile) -> Any:
    net = make_net()
    run = compiled(lambda x, names, options: net(x) * len(names) * options[0])
    options = {1, 2}
    return [run(batch(), options, (2.0,)), run(batch(), {1}, (2.0,))]


STORIES: dict[str, tuple[Callable[[Compile], Any], str | None]] = {
    "containers and attributes": (_reads_containers_and_attributes, None),
    "globals of helpers": (_reads_globals_of_helpers, None),
    "lists of modules": (_reads_lists_of_modules, None),
    "another model": (_names_another_model_later, None),
    "objects": (_passes_and_returns_objects, None),
    "state that is made later": (_makes_state_later, None),
    "parameters that are thawed": (_thaws, None),
    "state that is loaded": (_loads_state_of_its_optimizer, None),
    "notes": (_keeps_notes, "it sets the name calls, which a graph would not do again"),
    "notes in modules": (_keeps_notes_in_modules, "it sets _Noting.seen, a list, which a graph would not do again"),
    "a plain buffer": (_sets_a_plain_buffer, "which a graph would not do again"),
    "a scheduler": (_steps_its_scheduler, "it sets scheduler.last_epoch, which a graph would not do again"),
    "steps that are numbers": (_counts_steps_by_numbers, "it sets the state of _Counting: steps, which a graph would"),
    "steps in hooks": (_steps_in_hooks, "parameters have hooks for their gradients"),
    "arguments that are changed": (
        _changes_its_arguments,
        "it changes a list, a dict or an object among its arguments",
    ),
    "arguments of other kinds": (_passes_what_cannot_be_compared, "argument 1 is a set; pass tensors"),
}


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.detach().full() if isinstance(value, ShardedTensor) else value


@pytest.mark.parametrize("name", STORIES)
def test_a_program_gives_what_it_gives_without_a_graph(name: str) -> None:
    story, reason = STORIES[name]

    def body(comm: Comm) -> tuple[Any, Any]:
        found = story(lambda program: shardwise.compile(program, backend="aot_eager"))
        return plain(found), plain(story(lambda program: program))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, expected = run_local(body, 1, timeout=60.0)[0]
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    texts = [text for w in caught if "runs without a graph" in (text := str(w.message))]
    assert (len(texts) == 1 and reason in texts[0]) if reason is not None else texts == []


def test_a_counter_beside_the_program_and_many_kinds_trace_no_more_than_needed() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net, self.steps = make_net(), 0

        def predict(self, x: Any, scale: int) -> Any:
            return self.net(x) * scale

    def body(comm: Comm) -> tuple[int, int, bool]:
        trainer = Trainer()
        run = shardwise.compile(trainer.predict, backend="eager")
        for _ in range(3):
            run(batch(), 1)
            trainer.steps += 1
        once = len(run._order)
        with warnings.catch_warnings(action="ignore"):
            right = all(torch.equal(run(batch(), i), trainer.predict(batch(), i)) for i in range(20))
        return once, len(run._order), right

    assert run_local(body, 1, timeout=60.0) == [(1, 16, True)]


def test_copies_of_compiled_models_have_their_own_parameters_and_graphs() -> None:
    def body(comm: Comm) -> list[tuple[float, int]]:
        found = []
        for compiled in (shardwise.compile, torch.compile):
            run: Any = compiled(make_net(), backend="aot_eager")
            expected = run(batch()).abs().sum().item()
            twin = copy.deepcopy(run)
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert run(batch()).abs().sum().item() == expected
            program = twin if isinstance(twin, CompiledProgram) else twin.forward
            found.append((twin(batch()).abs().sum().item(), len(program._order)))
        return found

    with warnings.catch_warnings(action="error"):
        assert run_local(body, 1, timeout=60.0) == [[(0.0, 1), (0.0, 1)]]


def test_learning_rates_are_numbers_to_a_compiler() -> None:
    """Kernels of a GPU take host tensors without dims as numbers, and any other host tensor as memory of the GPU."""
    seen: list[list[tuple[torch.Size, torch.device]]] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        seen.append([(t.shape, t.device) for t in inputs if t.dtype is torch.float64])
        return graph.forward

    def body(comm: Comm) -> list[float]:
        net = make_net()
        groups = [{"params": list(net.up.parameters()), "lr": 0.5}, {"params": list(net.down.parameters()), "lr": 0.0}]
        optimizer = torch.optim.SGD(groups)
        run = shardwise.compile(make_step(net, optimizer), backend=backend)
        before = net.down.weight.detach().full().clone()
        changes = []
        for rate in (0.0, 0.25, 0.0):
            optimizer.param_groups[1]["lr"] = rate
            run(batch())
            changes.append(float((net.down.weight.detach().full() - before).abs().sum()))
        return changes

    first, second, third = run_local(body, 1)[0]
    assert first == 0 < second == third
    assert seen == [[(torch.Size([]), torch.device("cpu"))] * 2]
