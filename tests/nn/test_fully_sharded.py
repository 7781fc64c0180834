"""Fully sharded models: whole parameters are freed after use and gathered again in the backward pass."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Comm, Mesh, ModelPlan, PlanError, ShardedTensor, run_local, shard_module
from shardwise.comm import DisagreementError
from shardwise.nn import plan_from_data, plan_to_data
from shardwise.ops import unshard as prefetch
from shardwise.ops import unshard as vary
from shardwise.ops.implicit_replication import reads_plain_as_replicated
from tests.dense import numbers
from tests.device import DEVICE

LAYERS, WIDTH, ROWS = 8, 16, 64  # a batch is larger than a weight, so that weights are gathered
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make_plan(resharded: Any) -> ModelPlan:
    cut = {"layers.*.weight": "S(0)", "layers.*.bias": "S(0)"}
    return ModelPlan(Mesh.of(dp=2), cut, axis="dp", input_plan="dp: S(0)", reshard_after_forward=resharded)


def make_model(plan: ModelPlan | None = None) -> Deep:
    model = Deep()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, dtype=torch.float32) / WIDTH**0.5
    if plan is not None:
        shard_module(model, plan)
    return model


class GatheredMemory:
    """Notes the memory of everything that was moved for an operator, to see what is still alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[int, list[tuple[StorageWeakRef, int]]] = {0: [], 1: []}
        move = vary.move_input

        def noted(tensor: ShardedTensor, *args: Any, **options: bool) -> ShardedTensor:
            moved = move(tensor, *args, **options)
            memory = [local.untyped_storage() for local in moved.local_parts]
            self.seen[tensor.comm.rank] += [(StorageWeakRef(m), m.nbytes()) for m in memory]  # type: ignore[no-untyped-call]
            return moved

        for module in ("engine", "dispatch_cache"):
            monkeypatch.setattr(f"shardwise.ops.{module}.move_input", noted)

    def alive(self, rank: int) -> int:
        """The bytes of moved tensors that are alive on a rank."""
        sizes = [size for memory, size in self.seen[rank] if not memory.expired()]  # type: ignore[no-untyped-call]
        return sum(sizes)


def whole_batch(seed: int = 0) -> Tensor:
    return numbers(ROWS, WIDTH, seed=seed, dtype=torch.float32)


def train_beside(
    model: nn.Module, dense: nn.Module, memory: GatheredMemory, comm: Comm, passes: int
) -> tuple[list[int], list[Any], list[Any]]:
    """What is alive between forward and backward of each pass, and the gradients of both models."""
    alive = []
    for seed in range(passes):
        loss = model(whole_batch(seed).chunk(2)[comm.rank]).square().mean()
        alive.append(memory.alive(comm.rank))
        loss.backward()
        assert memory.alive(comm.rank) == 0
        dense(whole_batch(seed)).square().mean().backward()
    gradients = [p.grad.full() for p in model.parameters()]  # type: ignore[union-attr]
    return alive, gradients, [p.grad for p in dense.parameters()]


@pytest.mark.parametrize(("resharded", "kept"), [(True, 0), (False, LAYERS - 1), (["three"], None)])
def test_no_whole_parameter_is_kept_between_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, resharded: Any, kept: int | None
) -> None:
    if kept is None:  # the first layer's weight is not needed for the backward pass
        resharded, kept = [f"layers.{i}.weight" for i in range(3)], LAYERS - 3
    memory = GatheredMemory(monkeypatch)

    def body(comm: Comm) -> tuple[list[int], list[Any], list[Any]]:
        model, dense = make_model(make_plan(resharded)), make_model()
        return train_beside(model, dense, memory, comm, passes=2)  # the second one by what was remembered

    for alive, found, expected in run_local(body, 2, timeout=60.0):
        assert [size // WEIGHT_BYTES for size in alive] == [kept, kept]
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_automatic_keeps_the_last_operators_parameters_once_the_order_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.nn.plan.LARGE_BYTES", WEIGHT_BYTES)
    monkeypatch.setattr("shardwise.nn.plan.MODEL_BYTES", LAYERS * WEIGHT_BYTES)
    memory = GatheredMemory(monkeypatch)

    def body(comm: Comm) -> tuple[list[int], list[Any], list[Any]]:
        model, dense = make_model(replace(make_plan(None), prefetch_bytes=WEIGHT_BYTES)), make_model()
        return train_beside(model, dense, memory, comm, passes=3)

    for alive, found, expected in run_local(body, 2, timeout=60.0):
        assert [size // WEIGHT_BYTES for size in alive] == [0, 1, 1]
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_is_changed_before_backward_is_an_error_on_every_rank() -> None:
    def body(comm: Comm) -> str:
        model = make_model(make_plan(True))
        loss = model(whole_batch().chunk(2)[comm.rank]).square().mean()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(
            RuntimeError, match="changed in place after the forward pass; call backward before"
        ) as error:
            loss.backward()
        return str(error.value)

    one, other = run_local(body, 2, timeout=60.0)
    assert one.splitlines()[0] == other.splitlines()[0]


def test_parameters_that_were_made_in_inference_mode_are_gathered() -> None:
    def body(comm: Comm) -> list[Tensor]:
        with torch.inference_mode():
            model = make_model(replace(make_plan(True), prefetch_bytes=1 << 20))
            return [model(whole_batch().chunk(2)[comm.rank]).full() for _ in range(2)]

    expected = make_model()(whole_batch())
    for found in run_local(body, 2, timeout=60.0):
        for output in found:
            assert_close(output, expected, rtol=1e-4, atol=1e-6)


def test_a_backward_pass_that_raised_does_not_keep_the_model_alive() -> None:
    def body(comm: Comm) -> bool:
        model = make_model(replace(make_plan(True), prefetch_bytes=1 << 20))
        part = whole_batch().chunk(2)[comm.rank]
        for _ in range(2):
            model(part).square().mean().backward()
        hidden: list[Any] = []
        model.layers[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        loss = model(part).square().mean()
        hidden[0].register_hook(lambda grad: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        held = weakref.ref(model.layers[0].weight.local_parts[0])  # type: ignore[union-attr, index]
        hidden.clear()
        del model, loss
        gc.collect()
        return held() is None

    assert all(run_local(body, 2, timeout=60.0))


def test_an_interrupted_forward_leaves_nothing_open() -> None:
    """Torch calls no hooks of a forward that was interrupted; the next one finds what was left behind."""

    def body(comm: Comm) -> tuple[bool, bool, int]:
        plan = replace(make_plan(True), gather_dtype=torch.bfloat16, prefetch_bytes=1 << 20, output_plan="plain")
        model, other = make_model(plan), make_model(plan)
        part = whole_batch().chunk(2)[comm.rank]

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        model.layers[1].forward = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            model(part)
        del model.layers[1].forward
        same = [torch.equal(model(part), other(part)) for _ in range(2)]
        assert not any("weight" in layer.__dict__ for layer in model.layers)
        return all(same), reads_plain_as_replicated(), len(prefetch._active.forward)

    assert run_local(body, 2, timeout=60.0) == [(True, False, 0)] * 2


def test_checkpointed_code_is_as_without() -> None:
    def body(comm: Comm) -> tuple[list[Any], list[Any]]:
        found = []
        for again in (True, False):
            model = make_model(make_plan(True))
            part = whole_batch().chunk(2)[comm.rank]
            output = checkpoint(model, part, use_reentrant=False) if again else model(part)
            output.square().mean().backward()
            found.append([p.grad.full() for p in model.parameters()])  # type: ignore[union-attr]
        return found[0], found[1]

    for one, other in run_local(body, 2, timeout=60.0):
        assert all(map(torch.equal, one, other))


def test_autocast_gathers_in_its_dtype_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GatheredMemory(monkeypatch)

    def body(comm: Comm) -> tuple[int, set[int], bool]:
        model = make_model(make_plan(True))
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(whole_batch().chunk(2)[comm.rank]).float().square().mean()
        alive = memory.alive(comm.rank)
        loss.backward()
        dtypes = all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        return alive, {size for _, size in memory.seen[comm.rank]}, dtypes

    for alive, sizes, dtypes in run_local(body, 2, timeout=60.0):
        assert alive < WEIGHT_BYTES and WEIGHT_BYTES // 2 in sizes and WEIGHT_BYTES not in sizes and dtypes


def test_a_compiled_model_keeps_no_whole_parameters_for_its_backward() -> None:
    def body(comm: Comm) -> tuple[bool, list[str], list[str]]:
        model, dense = make_model(make_plan(True)), make_model()
        run = shardwise.compile(model, backend="aot_eager")
        run(whole_batch().chunk(2)[comm.rank]).square().mean().backward()
        dense(whole_batch()).square().mean().backward()
        right = all(
            torch.allclose(p.grad.full(), q.grad, atol=1e-6)  # type: ignore[union-attr, arg-type]
            for p, q in zip(model.parameters(), dense.parameters(), strict=True)
        )
        graphs = run._order[0].result.graphs
        saved = next(node for node in graphs["forward"].graph.nodes if node.op == "output").args[0]
        shapes = [tuple(node.meta["val"].shape) for node in saved if node is not None]
        return right, [str(s) for s in shapes if s == (WIDTH, WIDTH)], run._order[0].schedules["backward"].events

    for right, whole, events in run_local(body, 2, timeout=60.0):
        assert right and whole == [] and any("again in backward" in event for event in events)


def test_what_is_resharded_is_decided_by_the_plan() -> None:
    small = make_model()
    assert make_plan(None).resharded(small) == set()
    assert make_plan(True).resharded(small) == {name for name, _ in small.named_parameters()}
    assert make_plan(["layers.0.*"]).resharded(small) == {"layers.0.weight", "layers.0.bias"}
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(5)))
    plan = ModelPlan(Mesh.of(dp=2), {"*.weight": "S(0)"}, axis="dp")
    assert plan.resharded(large) == {f"{i}.weight" for i in range(5)}
    with pytest.raises(PlanError, match="matches no parameter"):
        make_plan(["none.*"]).resharded(small)
    for given in (True, ["layers.*.weight"], None):
        assert plan_from_data(plan_to_data(make_plan(given))) == make_plan(given)


def test_overlap_and_mixed_precision_are_decided_by_the_plan() -> None:
    model, plan = make_model(), make_plan(True)
    for dtypes in (torch.bfloat16, "bfloat16", {"layers.0.*": "float16"}):
        made = replace(plan, prefetch_bytes=5, gather_dtype=dtypes)  # type: ignore[arg-type]
        assert plan_from_data(plan_to_data(made)) == made
        assert len(made.gather_dtypes(model)) == (2 if isinstance(dtypes, dict) else 2 * LAYERS)
    assert make_plan(True).gather_dtypes(model) == {}
    with pytest.raises(PlanError, match="gather_dtype is a floating-point dtype"):
        replace(plan, gather_dtype="int8")
    with pytest.raises(PlanError, match="prefetch_bytes is a number of bytes, 0 for none, or None; got -1"):
        replace(plan, prefetch_bytes=-1)
    with pytest.raises(PlanError, match="matches no parameter"):
        replace(plan, gather_dtype={"none.*": "bfloat16"}).gather_dtypes(model)


def test_ranks_whose_plans_overlap_differently_fail_on_every_rank() -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(DisagreementError) as error:
            shard_module(make_model(), replace(make_plan(True), prefetch_bytes=comm.rank))
        return str(error.value)

    one, other = run_local(body, 2, timeout=60.0)
    assert one == other and "prefetch_bytes" in one


def test_parameters_are_full_precision_outside_of_their_modules() -> None:
    def body(comm: Comm) -> tuple[list[torch.dtype], list[torch.dtype], list[torch.dtype]]:
        model = make_model(replace(make_plan(True), gather_dtype=torch.bfloat16))
        layer = model.layers[0]
        seen: list[torch.dtype] = []
        layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model(whole_batch().chunk(2)[comm.rank]).float().square().mean().backward()
        with pytest.raises(RuntimeError):
            model(whole_batch()[:, :3])  # of a wrong shape
        return seen, [p.dtype for p in model.parameters()], [layer.weight.dtype, layer.weight.grad.dtype]

    for seen, own, after in run_local(body, 2, timeout=60.0):
        assert seen[:2] == [torch.bfloat16] * 2 and set(own) == set(after) == {torch.float32}


def test_what_a_move_returns_may_be_written_to() -> None:
    """`embeddings += positions`, as many models have it, of a table that is split with the batch."""
    ids, start = torch.tensor([[0, 3], [5, 1], [3, 3], [2, 4]]), torch.arange(256.0).reshape(64, 4) / 64

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.positions = nn.Embedding(64, 4), nn.Embedding(2, 4)
            with torch.no_grad():
                self.table.weight.copy_(start)
                self.positions.weight.copy_(start[:2] / 7)

        def forward(self, ids: Tensor) -> Tensor:
            found = self.table(ids)
            found *= 3
            found += self.positions(torch.arange(2))
            return found.square().sum()

    dense = Model()
    dense(ids).backward()

    def body(comm: Comm) -> list[Tensor]:
        model = Model()
        shard_module(model, ModelPlan(Mesh.of(fsdp=2), {"*.weight": "S(0)"}, input_plan="S(0)", output_plan="plain"))
        model(ids.chunk(2)[comm.rank]).backward()
        return [p.grad.full() for p in model.parameters()]

    for found in run_local(body, 2):
        assert_close(found, [p.grad for p in dense.parameters()])


def test_memory_of_a_gathered_parameter_is_used_again_once_nothing_refers_to_it() -> None:
    memory = prefetch.PassMemory()
    make = partial(memory.allocate, dtype=torch.float32, device=torch.device("cpu"))
    shape = (256, prefetch.LEAST_BYTES // 1024)
    first = make(shape).fill_(1.0)
    at, view, copied = first.data_ptr(), first.t()[3:5], torch.ones(2, 256).requires_grad_()
    assert first.shape == shape and first.is_contiguous() and not first._is_view()
    output = copied @ first  # whose backward pass needs it
    del first
    assert make(shape).fill_(2.0).data_ptr() != at and view.sum() == 2 * 256
    del view
    output.sum().backward()
    assert copied.grad is not None and bool((copied.grad == shape[1]).all())
    made = [make(shape)]
    assert made[0].data_ptr() != at  # the tape of an output that is alive
    del output
    made.append(make(shape))
    assert made[1].data_ptr() == at and made[0].data_ptr() != at
    del made
    make((*shape, 2))  # no free buffer has this size: they are dropped
    assert [buffer.nbytes for buffer in memory._free] == [2 * prefetch.LEAST_BYTES]


def test_a_pass_has_a_buffer_for_the_layer_that_runs_and_one_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing starts ahead, which depends on when threads run."""
    monkeypatch.setattr(prefetch, "LEAST_BYTES", WEIGHT_BYTES)
    fresh, empty = [], torch.empty

    def counted(shape: Any, **options: Any) -> Tensor:
        made = empty(shape, **options)
        if made.nbytes == WEIGHT_BYTES:
            fresh.append(threading.get_ident())
        return made

    monkeypatch.setattr(torch, "empty", counted)

    def body(comm: Comm) -> list[int]:
        found, part = [], whole_batch().chunk(2)[comm.rank]
        kept, model = (make_model(replace(make_plan(kind), prefetch_bytes=WEIGHT_BYTES)) for kind in (False, True))
        kept(part).square().mean().backward()
        for _ in range(3):
            model.zero_grad()
            fresh_before = fresh.count(threading.get_ident())
            model(part).square().mean().backward()
            found.append(fresh.count(threading.get_ident()) - fresh_before)
            pairs = zip(model.parameters(), kept.parameters(), strict=True)
            assert all(torch.equal(one.grad.full(), other.grad.full()) for one, other in pairs)  # type: ignore[union-attr]
        return found

    for buffers in run_local(body, 2, timeout=60.0):
        assert max(buffers) <= 4  # of 2 * LAYERS gathers: two in the forward pass, two in the backward pass
