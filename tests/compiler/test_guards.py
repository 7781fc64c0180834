"""`shardwise.compile`: what is traced again and why, what stays as it is without a graph, and what programs may do."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Replicate, Shard, ShardedTensor, run_local, shard
from shardwise.comm import CommError, LocalComm
from shardwise.tensor.move import Move, find_numbered
from tests.dense import numbers
from tests.device import DEVICE

BACKEND = "aot_eager"
MESH = Mesh.of(tp=2)
ROWS, COLUMNS, WHOLE = (MeshSpec(MESH, (p,)) for p in (Shard(0), Shard(1), Replicate()))


def lay(spec: Any, *shape: int, seed: int = 0, grad: bool = False) -> ShardedTensor:
    return shard(numbers(*shape, seed=seed, dtype=torch.float32), spec, None).requires_grad_(grad)


def ranks(body: Callable[[Comm], Any], *, warns: bool = False) -> list[Any]:
    """What two ranks return; warnings are ignored around them: their filters belong to the process, not to a thread."""
    with warnings.catch_warnings():
        if warns:
            warnings.simplefilter("ignore")
        return run_local(body, 2, timeout=60.0)


def alone(body: Callable[[], Any]) -> Any:
    """The result of a program in a world of one rank."""
    return run_local(lambda comm: body(), 1, timeout=60.0)[0]


def compile_quietly(program: Callable[..., Any], **options: Any) -> Any:
    return shardwise.compile(program, backend=BACKEND, **options)


def test_comms_of_the_same_ranks_have_their_own_numbers_of_a_move() -> None:
    """As in a notebook that calls `run_local` again and again."""
    src, dst = (spec.layout((4, 6)) for spec in (ChunkSpec(0, ranks=1), ChunkSpec(1, ranks=1)))
    comms = [LocalComm.alone() for _ in range(40)]
    moves = [Move.of(src, dst, comm, torch.float32, "m") for comm in comms]
    numbers = [move.number for move in moves]
    again = [Move(src, dst, comm, torch.float32, "m") for comm in comms]
    assert len(set(numbers)) == 40 and [move.number for move in again] == numbers
    assert all(find_numbered(number) is move for number, move in zip(numbers, moves, strict=True))


def test_moves_are_operators_of_the_graph() -> None:
    def body(comm: Comm) -> tuple[list[str], bool]:
        names: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            names.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
            return graph.forward

        run = shardwise.compile(lambda x: x.redistribute(COLUMNS) * 2, backend=backend)
        x = lay(ROWS, 4, 6)
        return names, torch.equal(run(x).full(), x.full() * 2) and run(x).sharding == COLUMNS.layout((4, 6))

    for names, right in ranks(body):
        assert right and [n for n in names if "shardwise" in n] == [
            "shardwise.start_moves.default",
            "shardwise.wait_moves.default",
        ]


def test_another_kind_of_inputs_is_traced_again_and_explained() -> None:
    def body(comm: Comm) -> str:
        run = compile_quietly(lambda x, scale: (x * scale).sum())
        for x, scale in (
            (lay(ROWS, 4, 6), 2.0),
            (lay(ROWS, 4, 6, seed=1), 2.0),
            (lay(COLUMNS, 4, 6), 2.0),
            (lay(COLUMNS, 4, 6), 3.0),
            (lay(COLUMNS, 4, 8), 3.0),
        ):
            expected: Any = (x * scale).sum()
            assert_close(run(x, scale).full(), expected.full())
        with torch.no_grad():
            run(lay(COLUMNS, 4, 8), 3.0)
        with torch.autocast(DEVICE, torch.bfloat16):
            run(lay(COLUMNS, 4, 8), 3.0)
        return str(run.explain())

    for text in ranks(body):
        lines = [line for line in text.splitlines() if line.startswith("kind")]
        reasons = [line.partition("because: ")[2] for line in lines]
        assert lines[0].startswith("kind 0, 2 calls") and reasons[0] == "the first call"
        assert reasons[1] == "argument 0 is torch.float32[4,6] on tp=2: S(1), was torch.float32[4,6] on tp=2: S(0)"
        assert reasons[2] == "argument 1 is 3.0, was 2.0"
        assert reasons[3] == "argument 0 is torch.float32[4,8] on tp=2: S(1), was torch.float32[4,6] on tp=2: S(1)"
        assert reasons[4] == "grad mode is False, was True"
        assert reasons[5].startswith(f"grad mode is True, was False; autocast is {DEVICE} to torch.bfloat16, was off")


def test_attributes_of_modules_and_numbers_of_closures_are_constants_that_are_compared() -> None:
    class Scale(nn.Module):
        factor = 1.0

        def forward(self, x: Any) -> Any:
            return F.dropout(x * self.factor, 0.5, self.training)

    def body() -> tuple[Any, ...]:
        model, offset = Scale().eval(), 1.0

        def program(x: Any) -> Any:
            return model(x) + offset

        run, x = compile_quietly(program), lay(ChunkSpec(0, ranks=1), 4)
        first = run(x).full()
        model.factor = 2.0
        second = run(x).full()
        offset = 5.0
        third = run(x).full()
        model.train()
        return x.full(), first, second, third, run(x).full(), run.explain()

    x, first, second, third, fourth, text = alone(body)
    assert_close(first, x + 1)
    assert_close(second, 2 * x + 1)
    assert_close(third, 2 * x + 5)
    assert not torch.equal(fourth, third)
    for reason in (
        "factor of Scale (module 0) is 2.0",
        "name offset is 5.0, was 1.0",
        "training of Scale (module 0) is True",
    ):
        assert reason in text


def test_random_numbers_are_new_in_each_call_and_those_of_the_program_without_a_graph() -> None:
    def body(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        def program(x: Any) -> Any:
            return F.dropout(x, 0.5) + torch.rand_like(x) + F.dropout(x, 0.5)

        run, x, found = compile_quietly(program), lay(ROWS, 6, 4), []
        for function in (run, program):
            shardwise.manual_seed(3)
            found.append([function(x).full() for _ in range(3)])
        return found[0], found[1]

    for compiled, eager in ranks(body):
        assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
        assert not torch.equal(compiled[0], compiled[1]) and not torch.equal(compiled[1], compiled[2])


def test_writes_in_place_reach_arguments_and_state() -> None:
    def body(comm: Comm) -> tuple[Tensor, ...]:
        kept = lay(ROWS, 4, 2, seed=1)
        before = kept.full()

        def program(x: Any) -> Any:
            x.mul_(3)
            kept.add_(x)
            return kept

        run, x = compile_quietly(program), lay(ROWS, 4, 2)
        whole = x.full()
        results = [run(x), run(x)]
        assert all(result is kept for result in results)
        return before + 12 * whole, kept.full(), 9 * whole, x.full()

    for expected, kept, expected_x, x in ranks(body):
        assert_close(kept, expected)
        assert_close(x, expected_x)


def test_gradients_accumulate_over_steps_as_without_a_graph() -> None:
    def body(comm: Comm) -> tuple[Any, Any]:
        found = []
        for wrap in (compile_quietly, lambda program: program):
            weight = lay(COLUMNS, 3, 4, grad=True)

            def make(weight: Any) -> Callable[[Any], Any]:
                def program(x: Any) -> Any:
                    loss = (x @ weight).square().sum()
                    loss.backward()
                    return loss

                return program

            run = wrap(make(weight))
            for seed in (0, 1, 2):
                run(lay(WHOLE, 2, 3, seed=seed))
            assert weight.grad is not None
            found.append(weight.grad.full())
        return found[0], found[1]

    for compiled, eager in ranks(body):
        assert_close(compiled, eager)


def test_checkpointed_code_draws_the_same_numbers_again() -> None:
    def body() -> tuple[Tensor, Tensor]:
        spec, found = ChunkSpec(0, ranks=1), []
        for wrap in (compile_quietly, lambda program: program):
            x = lay(spec, 6, 4, grad=True)

            def program(x: Any) -> Any:
                return checkpoint(lambda t: F.dropout(t * t, 0.5), x, use_reentrant=False).sum()

            torch.manual_seed(5)
            wrap(program)(x).backward()
            assert x.grad is not None
            found.append(x.grad.full())
        return found[0], found[1]

    compiled, eager = alone(body)
    assert_close(compiled, eager)
    assert (compiled == 0).any() and (compiled != 0).any()


def test_autocast_means_what_it_means_without_a_graph() -> None:
    def body(comm: Comm) -> tuple[Any, Any]:
        def program(x: Any, w: Any) -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                return x @ w

        x, w = lay(ROWS, 4, 6), lay(WHOLE, 6, 2)
        return compile_quietly(program)(x, w).full(), program(x, w).full()

    for compiled, eager in ranks(body):
        assert compiled.dtype == torch.bfloat16
        assert_close(compiled, eager)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x: x * x.sum().item(), "DataDependentOutputException"),
        (lambda x: x if torch.equal(x, x * 2) else x * 2, "DataDependentOutputException|bool"),
        (lambda x: x[x > 0], "Data|Dynamic|Unsupported"),
    ],
    ids=["a value", "a comparison", "a shape"],
)
def test_what_depends_on_values_runs_without_a_graph_on_every_rank(program: Callable[..., Any], reason: str) -> None:
    def body(comm: Comm) -> tuple[Any, Any, str]:
        run, x = compile_quietly(program), lay(ROWS, 4, 6)
        first, second = run(x), run(x)
        assert_close(first.full(), second.full())
        return first.full(), program(x).full(), run.explain()

    for compiled, eager, text in ranks(body, warns=True):
        assert_close(compiled, eager)
        assert "runs without a graph: ranks 0, 1: " in text and "kind 0, 2 calls" in text


def test_running_without_a_graph_is_one_warning() -> None:
    def body() -> list[str]:
        run = compile_quietly(lambda x: x * x.sum().item())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run(lay(ChunkSpec(0, ranks=1), 4))
            run(lay(ChunkSpec(0, ranks=1), 6))
        return [str(w.message) for w in seen if "shardwise.compile" in str(w.message)]

    (text,) = alone(body)
    assert "runs without a graph: rank 0: DataDependentOutputException" in text


def test_an_attribute_that_is_set_is_not_forgotten() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.last = 0, None

        def forward(self, x: Any) -> Any:
            self.count += 1
            self.last = x * 2
            return x + self.count

    def body() -> tuple[int, Any, list[Any], str]:
        model, x = Counting(), lay(ChunkSpec(0, ranks=1), 3)
        run = compile_quietly(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [run(x).full() - x.full() for _ in range(3)]
        return model.count, type(model.last), results, run.explain()

    count, kind, results, text = alone(body)
    assert count == 3 and kind is ShardedTensor and "it sets Counting." in text
    for i, result in enumerate(results):
        assert_close(result, torch.full((3,), float(i + 1)))


def test_errors_of_the_program_are_its_own_on_every_rank() -> None:
    def body(comm: Comm) -> str:
        run = compile_quietly(lambda x: x.redistribute(3))
        try:
            run(lay(ROWS, 4, 6))
        except TypeError as error:
            return str(error)
        return "no error"

    one, other = ranks(body, warns=True)
    assert one == other and "redistribute takes a spec" in one


def test_ranks_that_trace_different_programs_raise_as_without_a_graph() -> None:
    def body(comm: Comm) -> str:
        run = compile_quietly(lambda x: x.redistribute(COLUMNS if comm.rank else WHOLE))
        try:
            run(lay(ROWS, 4, 6))
        except shardwise.DisagreementError as error:
            return str(error)
        return "no error"

    one, other = ranks(body, warns=True)
    assert one == other and "the ranks pass different arguments: to is" in one


def test_backends_are_checked() -> None:
    with pytest.raises(ValueError, match="there is no backend 'none'; torch has "):
        shardwise.compile(lambda x: x, backend="none")
    with pytest.raises(TypeError, match="compile takes a module or a function, got int"):
        shardwise.compile(3)  # type: ignore[arg-type]  # what is tested


def test_hooks_that_are_registered_later_run() -> None:
    def body() -> tuple[Tensor, Tensor, str]:
        model = nn.Sequential(nn.Identity())
        run, x = compile_quietly(model), lay(ChunkSpec(0, ranks=1), 3)
        run(x)
        model[0].register_forward_hook(lambda module, args, output: output * 3)
        return run(x).full(), x.full(), run.explain()

    hooked, x, text = alone(body)
    assert_close(hooked, 3 * x)
    assert "an attribute or a hook of a module" in text


def test_a_tensor_that_is_passed_twice_is_one_kind_and_another_than_two_tensors() -> None:
    def body() -> tuple[list[Any], str]:
        run, spec = compile_quietly(lambda x, y: x * 2 + y), ChunkSpec(0, ranks=1)
        x, y = lay(spec, 4), lay(spec, 4, seed=1)
        results = [run(*pair).full() - (pair[0] * 2 + pair[1]).full() for pair in ((x, x), (y, y), (x, y), (x, x))]
        return results, run.explain()

    results, text = alone(body)
    assert not any(result.any() for result in results)
    assert "2 kinds of inputs" in text and "kind 0, 3 calls" in text


def test_worlds_that_have_ended_leave_no_moves_behind() -> None:
    comms: list[weakref.ref[Comm]] = []

    def body(comm: Comm) -> None:
        comms.append(weakref.ref(comm))
        compile_quietly(lambda x: x.redistribute(COLUMNS) * 2)(lay(ROWS, 4, 6))

    with warnings.catch_warnings(action="error"):
        for _ in range(18):
            ranks(body)
    gc.collect()
    assert not any(comm() is not None for comm in comms)


def write_to_first(a: Any, b: Any) -> Any:
    a.add_(1)
    return a * 2 + b.sum()


def write_by_data(a: Any, b: Any) -> Any:
    a.data.mul_(3)
    return b * 2


def write_to_a_view(a: Any, b: Any) -> Any:
    a[0:1].mul_(3)
    return b * 2


def write_to_what_is_detached(a: Any, b: Any) -> Any:
    a.detach().mul_(3)
    return b * 2


PAIRS: dict[str, Callable[[ShardedTensor], tuple[Any, Any]]] = {
    "others": lambda y: (y, y + 0),
    "columns": lambda y: (y, y[:, 1:]),
    "detached": lambda y: (y, y.detach()),
    "columns first": lambda y: (y[:, 1:], y),
    "columns of one": lambda y: (y[:, :2], y[:, 2:]),
}


@pytest.mark.parametrize("program", [write_to_first, write_by_data, write_to_a_view, write_to_what_is_detached])
def test_arguments_that_share_memory_with_one_that_is_written_to(program: Callable[..., Any]) -> None:
    def body() -> None:
        for names in (("others", "columns", "others", "detached"), ("columns first", "columns of one"), ("detached",)):
            run = compile_quietly(program)
            for name in names:
                one, other = (PAIRS[name](lay(ChunkSpec(0, ranks=1), 3, 4)) for _ in range(2))
                assert_close(run(*one).full(), program(*other).full())
                assert_close(one[0].full(), other[0].full())
                assert_close(one[1].full(), other[1].full())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone(body)


def test_arguments_that_share_memory_and_are_only_read_stay_compiled() -> None:
    def body() -> str:
        run, y = compile_quietly(lambda a, b: a.sum() + b.sum()), lay(ChunkSpec(0, ranks=1), 3, 4)
        for pair in ((y, y[:, 1:]), (y, y.detach())):
            assert_close(run(*pair).full(), (pair[0].sum() + pair[1].sum()).full())
        return str(run.explain())

    assert "without a graph" not in alone(body)


def test_a_detached_view_of_a_parameter_is_read_after_the_step() -> None:
    def make(weight: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
        def step(x: Any, seen: Any) -> Any:
            optimizer.zero_grad()
            (weight * x).square().sum().backward()
            optimizer.step()
            return seen * 2

        return step

    def body() -> list[list[Tensor]]:
        found = []
        for wrap in (compile_quietly, lambda program: program):
            weight = lay(ChunkSpec(0, ranks=1), 3, 4, grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.5)
            run, x = wrap(make(weight, optimizer)), lay(ChunkSpec(0, ranks=1), 3, 4, seed=1)
            found.append([run(x, seen).full() for seen in (weight.detach(), weight.detach() + 0, weight.detach())])
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled, eager = alone(body)
    for one, other in zip(compiled, eager, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("picked", [(0,), (1,), (2,), (0, 1), (0, 2)])
def test_inputs_of_results_that_are_not_used_have_no_gradient(picked: tuple[int, ...]) -> None:
    def program(a: Any, b: Any) -> Any:
        return a * 2, b.t(), a @ b

    def body() -> None:
        run, found = compile_quietly(program), []
        for function in (run, program, run):
            a, b = (lay(ChunkSpec(0, ranks=1), 3, 3, seed=i, grad=True) for i in range(2))
            results = function(a, b)
            for _ in range(2):
                sum(results[i].sum() for i in picked).backward(retain_graph=True)
            found.append([None if t.grad is None else t.grad.full() for t in (a, b)])
        for grads in zip(*found, strict=True):
            assert len({grad is None for grad in grads}) == 1
            if grads[0] is not None:
                assert_close(grads[0], grads[1])
                assert_close(grads[2], grads[1])

    alone(body)


def test_a_value_that_changes_on_one_rank_is_an_error_on_all() -> None:
    class Options:
        scale = 2.0

    def body(comm: Comm) -> str:
        options, x = Options(), lay(ROWS, 4, 6)
        options.scale = 2.0
        run = compile_quietly(lambda x: x.redistribute(COLUMNS) * options.scale)
        assert_close(run(x).full(), x.full() * 2)
        if comm.rank == 1:
            options.scale = 3.0
        try:
            run(x)
        except CommError as error:
            return str(error)
        return "no error"

    one, other = ranks(body)
    assert "rank 1: 'compile'" in one and "rank 1: 'compile'" in other
    assert "rank 1 traces again, since name options.scale is 3.0, was 2.0" in other


def use_what_is_added_to(pending: Any) -> Any:
    made = pending * 1
    first = made.exp()  # sums it
    made.mul_(2)
    return first + made.exp()


def write_by_out(pending: Any) -> Any:
    made = pending * 1
    first = made * made
    torch.add(made, made, out=made)
    return first - made * made


def write_to_an_argument(pending: Any) -> Any:
    first = pending.relu()
    pending.neg_()
    return first + pending.relu()


@pytest.mark.parametrize("program", [use_what_is_added_to, write_by_out, write_to_an_argument])
def test_a_sum_is_not_used_again_after_a_write(program: Callable[..., Any]) -> None:
    def body(comm: Comm) -> None:
        run = compile_quietly(program)
        for seed in (0, 0, 1):
            given = [shardwise.from_local([numbers(3, seed=seed)], "on tp=2: P(sum)", (3,)) for _ in range(2)]
            assert_close(run(given[0]).full(), program(given[1]).full())
            assert_close(given[0].full(), given[1].full())

    ranks(body, warns=True)


def return_a_view_of_before(x: Any) -> Any:
    view = x.view(8, 16)
    x.add_(1)
    return view


def return_a_view(x: Any) -> Any:
    return x.view(8, 16)


@pytest.mark.parametrize("program", [return_a_view_of_before, return_a_view])
def test_views_that_are_copies_are_out_of_date_as_without_a_graph(program: Callable[..., Any]) -> None:
    """What a graph returns is not known to be a copy, and would be read after a write as if it were not."""

    def body(comm: Comm) -> str:
        run = compile_quietly(program)
        for _ in range(2):
            x = lay("on tp=2: S(2) each 2 unit(2)", 8, 4, 4)
            view = run(x)
            x.add_(1)
            with pytest.raises(RuntimeError, match="which was written to since, so it is out of date"):
                view.full()
        return str(run.explain())

    assert all("a view" in text for text in ranks(body, warns=True))


def test_gradients_of_an_argument_that_some_rank_has_nothing_of() -> None:
    """A graph of that rank would have no input that the results depend on."""

    def body(comm: Comm) -> None:
        run = compile_quietly(lambda x: x.sum() * 2)
        for _ in range(2):
            x = lay("as chunk(0) over 0", 3, 2).requires_grad_()
            found = run(x)
            assert found.requires_grad
            found.backward()
            assert_close(x.grad.full(), torch.full((3, 2), 2.0))

    ranks(body, warns=True)


def test_an_argument_that_some_rank_has_nothing_of_is_part_of_the_graph() -> None:
    """What comes out of a move into which nothing goes is a tensor of the graph, and of the dtype of the others."""

    def program(x: Any, mask: Any) -> Any:
        low = -x.amax(-2)
        picked = torch.where(mask, low, low)
        torch._foreach_add_([picked, low], 1)
        return picked + low

    def body(comm: Comm) -> tuple[Any, Any, str]:
        x = shard(numbers(5, 7, 3, dtype=torch.float64), "as pieces 2[0:3,0:7,0:3], 0[3:5,0:7,0:3]")
        mask = shard(torch.ones(3, dtype=torch.bool), "on tp=3 @ 2,0,1: R")
        compiled = shardwise.compile(program, backend="eager")
        return compiled(x, mask).full(), program(x, mask).full(), compiled.explain()

    for found, expected, text in run_local(body, 3, timeout=60.0):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert "without a graph" not in text, text
