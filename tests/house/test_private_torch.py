"""Does every private name of torch that the package uses still do what the package needs it for?

One guard for each name of `shardwise._torch`. When a new release of torch breaks one,
this file says which.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import is_dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from shardwise import _torch
from shardwise import _torch as _torch_graphs
from tests.device import DEVICE

SRC = Path(__file__).parents[2] / "src" / "shardwise"
PRIVATE = re.compile(
    r"torch\._(C|ops|decomp|dispatch|dynamo)\b|_make_wrapper_subclass|_pytree\b|from torch\S* import _"
)


class Wrapper(Tensor):
    """A wrapper without storage around one tensor, which notes the functions and operators that it meets."""

    seen: list[Any]

    @staticmethod
    def of(inner: Tensor) -> Wrapper:
        made: Wrapper = _torch.make_wrapper_subclass(Wrapper, inner.shape, dtype=inner.dtype)
        made.inner = inner  # type: ignore[attr-defined]  # an attribute of this test's own
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with _torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.seen.append(func)
        with _torch.autograd_on_locals():
            return func(*[a.inner if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Wrapper.seen = []


def test_missing_name_is_reported_with_the_supported_versions() -> None:
    with pytest.raises(ImportError, match=r"uses torch\._C\.gone, which torch \S+ does not have; it supports torch 2"):
        _torch.private_name("_C.gone")


def test_missing_module_is_reported_alike() -> None:
    with pytest.raises(
        ImportError, match=r"uses torch\._gone\.table, which torch \S+ does not have; it supports torch 2"
    ):
        _torch.private_name("_gone.table")


def test_placements_are_read() -> None:
    place = _torch._remote_device("rank:1/cuda:2")
    assert (place.rank(), place.device(), place.worker_name()) == (1, torch.device("cuda:2"), None)


def test_stores_are_those_of_torch_distributed() -> None:
    assert issubclass(_torch.TCPStore, _torch.Store)


def test_wrapper_has_the_shape_and_no_storage() -> None:
    made = Wrapper.of(torch.ones(2, 3))
    assert tuple(made.shape) == (2, 3)
    assert type(made) is Wrapper


def test_disabled_torch_function_leads_to_the_operator() -> None:
    torch.sin(Wrapper.of(torch.ones(2)))
    assert Wrapper.seen == [torch.sin, torch.ops.aten.sin.default]


def test_operators_on_locals_are_recorded_inside_of_torch_dispatch() -> None:
    result = torch.sin(Wrapper.of(torch.ones(2, requires_grad=True)))
    assert result.grad_fn is not None


def test_without_the_guard_nothing_would_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "autograd_on_locals", torch.enable_grad)
    assert torch.sin(Wrapper.of(torch.ones(2, requires_grad=True))).grad_fn is None


def test_composite_operators_arrive_whole_below_autograd() -> None:
    x = Wrapper.of(torch.ones(2, 2))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        Wrapper.seen = []
        with mode(), _torch.below_autograd(), _torch.DisableTorchFunctionSubclass():
            torch.softmax(x, 0)
            x.narrow(0, 0, 1)
        assert Wrapper.seen == [torch.ops.aten.softmax.int, torch.ops.aten.narrow.default]


def test_views_of_nothing_that_are_written_to_have_second_gradients_if_they_are_tracked() -> None:
    leaf = torch.zeros(2, 0, requires_grad=True)
    base = leaf * 1
    with _torch.track_views(True):
        view = base.unsqueeze(0)
    view.sub_(1)
    assert torch.autograd.grad(view.exp().sum(), leaf, create_graph=True)[0].requires_grad


def test_functions_are_entered_again_where_they_were_disabled() -> None:
    x = Wrapper.of(torch.ones(2, 2))
    with _torch.below_autograd(), _torch.DisableTorchFunctionSubclass(), _torch.EnableTorchFunction():
        torch.relu(x)
    assert Wrapper.seen == [torch.relu, torch.ops.aten.relu.default]


def test_composite_operators_are_decomposed_by_torchs_own_kernel() -> None:
    """Also where torch has a default device, which is a mode that functions pass through."""
    for place in (nullcontext(), torch.device("cpu")):
        with place:
            given = Wrapper.of(torch.ones(2, 2))
            Wrapper.seen = []
            _torch.decompose(torch.ops.aten.softmax.int, (given, 0), {})
        assert Wrapper.seen == [torch.ops.aten._softmax.default]
    assert _torch.is_composite(torch.ops.aten.softmax.int) and not _torch.is_composite(torch.ops.aten.mm.default)
    assert not _torch.is_composite(torch.softmax)


def test_autocast_is_restored_and_off_below_what_it_casts() -> None:
    device = "cuda" if DEVICE == "cuda" else "cpu"
    a, cast = torch.ones(2, 2, device=device), torch.get_autocast_dtype(device)
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast(device, cast):
        assert _torch.is_any_autocast_enabled() and device in _torch.autocast_device_types
        keys = _torch.current_dispatch_keys()
    for op, dtype in ((torch.ops.aten.add.Tensor, cast), (torch.ops.aten.mm.default, torch.float32)):
        with _torch.autograd_on_locals(keys.below(op)):
            assert (a @ a).dtype == dtype
    assert (a @ a).dtype == torch.float32


def test_inference_mode_is_restored() -> None:
    with torch.inference_mode():
        keys = _torch.current_dispatch_keys()
        with _torch.autograd_on_locals(keys):
            assert torch.ones(2).mul(2).is_inference()
    assert keys != _torch.current_dispatch_keys()


def test_operators_and_packets_have_their_types() -> None:
    assert isinstance(torch.ops.aten.sin.default, _torch.OpOverload)
    assert isinstance(torch.ops.aten.sin, _torch.OpOverloadPacket)


def test_forward_mode_is_off_inside_an_autograd_function() -> None:
    inside: list[bool] = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            inside.append(_torch.is_forward_grad_enabled())
            return x.clone()

    Noting.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
    assert (_torch.is_forward_grad_enabled(), inside) == (True, [False])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, at the first dual number
def test_dual_numbers_are_noticed() -> None:
    one = torch.ones(1)
    assert not _torch.is_dual_level()
    with _torch.forward_ad.dual_level():
        assert _torch.is_dual_level()
        dual = _torch.forward_ad.make_dual(one, one)
        assert _torch.forward_ad.unpack_dual(dual * 2).tangent.item() == 2.0
        with _torch.DisableTorchFunctionSubclass():
            wrapper = Wrapper.of(one)
        with pytest.raises(Exception):  # noqa: B017  # the wrapper here has no storage; what it met counts
            _torch.forward_ad.make_dual(wrapper, wrapper)
        with pytest.raises(Exception):  # noqa: B017
            _torch.forward_ad.unpack_dual(wrapper)
            raise ValueError("met")
    assert {_torch.make_dual_function, _torch.unpack_dual_function} <= set(Wrapper.seen)


def test_distributions_draw_by_these_functions() -> None:
    with _torch.DisableTorchFunctionSubclass():
        wrapper = Wrapper.of(torch.ones(2))
    for draw in (_torch.draw_standard_gamma, _torch.draw_dirichlet):
        assert draw(torch.ones(3)).shape == (3,)
        draw(wrapper)
    assert {_torch.draw_standard_gamma, _torch.draw_dirichlet} <= set(Wrapper.seen)
    sample = torch.distributions.Dirichlet(torch.ones(3, requires_grad=True)).rsample()
    assert sample.grad_fn is not None and sample.grad_fn.name() == f"{_torch.DirichletFunction.__name__}Backward"


def test_batches_and_traces_are_noticed() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def note(x: Tensor) -> Tensor:
        seen.append((_torch.is_batched_tensor(x), _torch.is_transformed_tensor(x), _torch.is_tracing()))
        return x * 2

    note(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2))
    make_fx(note)(torch.ones(2))
    torch.func.grad(lambda x: note(x).sum())(torch.ones(2))
    assert seen == [(False, False, False), (True, True, False), (False, False, True), (False, True, False)]


def test_a_module_with_full_backward_hooks_is_inside_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Any] = []
    monkeypatch.setattr(_torch.BackwardHookFunction, "apply", lambda *args: applied.append(args) or args)
    module = torch.nn.Tanh()
    module.register_full_backward_pre_hook(lambda module, grads: None)
    with pytest.raises(RuntimeError, match="setting up backward hooks"):
        module(torch.ones(1, requires_grad=True))
    assert len(applied) == 1


@pytest.mark.parametrize("reentrant", (False, True))
def test_what_checkpointing_applies(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    module: Any = torch.utils.checkpoint
    started: list[str] = []
    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(module, name))  # so that it is put back
    _torch.replace_checkpoint_generator(lambda own: lambda *args: started.append("generator") or own(*args))
    monkeypatch.setattr(_torch.CheckpointFunction, "apply", lambda *args: started.append("function"))
    module.checkpoint(torch.exp, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
    assert started == ["function" if reentrant else "generator"]


def test_asynchronous_assertion_raises_on_the_cpu() -> None:
    _torch.assert_async(torch.tensor(True, device="cpu"), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        _torch.assert_async(torch.tensor(False, device="cpu"), "not fine")


def test_many_tensors_are_copied_in_one_call() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(2, 2)[:, 1]], [torch.ones(2), torch.arange(2.0)]
    _torch.foreach_copy(targets, sources)
    assert [t.tolist() for t in targets] == [[1, 1], [0, 1]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_handle_of_the_current_stream() -> None:
    assert _torch.current_raw_stream(0) == torch.cuda.default_stream(0).cuda_stream == 0
    with torch.cuda.stream(torch.cuda.Stream(0)) as _:
        assert _torch.current_raw_stream(0) == torch.cuda.current_stream(0).cuda_stream != 0


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": [1, (2,)], "b": 3}
    leaves, structure = _torch.pytree.tree_flatten(tree)
    assert leaves == [1, 2, 3] == list(_torch.pytree.tree_iter(tree)) == _torch.pytree.tree_leaves(tree)
    assert _torch.pytree.tree_unflatten(leaves, structure) == tree
    assert _torch.pytree.tree_map(lambda x: x + 1, tree) == {"a": [2, (3,)], "b": 4}


def test_decompositions_are_keyed_by_overload() -> None:
    table = _torch.decomposition_table
    assert torch.ops.aten.addcmul.default in table
    assert all(isinstance(op, _torch.OpOverload) for op in table if str(op).startswith("aten."))


def test_a_backward_pass_is_noticed() -> None:
    inside: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: inside.append(_torch.is_in_backward()))  # type: ignore[no-untyped-call]
    (x * 2).backward()
    assert (_torch.is_in_backward(), inside) == (False, [True])


def test_what_a_backward_pass_does_with_a_leaf_is_known_while_it_runs() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    found: list[Any] = []

    def look(grad: Tensor) -> None:
        found.append(_torch.only_accumulates(node, leaf))
        _torch.on_backward_end(lambda: found.append("end"))

    def run(*inputs: Tensor, get: bool = False) -> list[Any]:
        found.clear()
        result = leaf * 2
        result.register_hook(look)  # type: ignore[no-untyped-call]
        total = (result * other).sum()
        torch.autograd.grad(total, inputs) if get else total.backward(inputs=inputs or None)
        return list(found)

    assert node.variable is leaf  # type: ignore[attr-defined]  # what a leaf's node has
    assert run() == [True, "end"] and run(leaf) == [True, "end"]
    assert run(leaf, get=True) == [False, "end"]
    for handle in (leaf.register_hook(print), leaf.register_post_accumulate_grad_hook(lambda _: None)):  # type: ignore[no-untyped-call]
        assert run()[0] is False
        handle.remove()
    assert run() == [True, "end"]


@pytest.mark.parametrize("early", [False, True])
def test_a_node_can_run_as_early_as_those_of_leaves(early: bool) -> None:
    order: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
            ctx.name = name
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            order.append(ctx.name)
            return grads[0], None

    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: order.append("leaf"))  # type: ignore[no-untyped-call]
    one, two = (Noted.apply(t, n) for t, n in ((leaf, "one"), (other, "two")))  # type: ignore[no-untyped-call]
    if early:
        _torch.run_as_leaf(one)
    (one * two).sum().backward()
    assert order == (["one", "leaf", "two"] if early else ["two", "one", "leaf"])
    _torch.run_as_leaf(leaf)  # which has no node


def test_running_calls_of_a_module_are_found_on_the_stack() -> None:
    class Nested(torch.nn.Module):
        def forward(self, depth: int) -> list[int]:
            own = _torch.count_running_calls(self)
            return [own, *self(depth - 1)] if depth else [own, _torch.count_running_calls(other)]

    module, other = Nested(), Nested()
    module.register_forward_hook(lambda module, args, output: None, always_call=True)
    assert module(2) == [1, 2, 3, 0] and _torch.count_running_calls(module) == 0
    leaf = torch.ones(1, requires_grad=True)
    assert not _torch.has_accumulate_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert _torch.has_accumulate_hooks(leaf)
    assert _torch.gradient_hooks(leaf) == (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)


def test_hooks_on_saved_tensors_are_noticed() -> None:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert not _torch.has_saved_tensors_hooks() and _torch.saved_tensors_hook() is None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        assert _torch.has_saved_tensors_hooks() and _torch.saved_tensors_hook() is keep
    assert not _torch.has_saved_tensors_hooks()


def test_each_run_of_checkpointed_code_has_its_own_hook() -> None:
    seen = []

    def program(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.saved_tensors_hook())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    sum(checkpoint(program, x, use_reentrant=False).sum() for _ in range(2)).backward()
    assert len(seen) == 4 == len(set(map(id, seen))) and None not in seen


def test_all_operators_on_lists_are_listed() -> None:
    names = list(_torch.operator_names())
    assert {"add", "_foreach_add", "native_layer_norm"} <= set(names)
    assert names == sorted(names)
    on_lists = {name for name in names if name.startswith("_foreach_")}
    listed = _torch.list_operators_on_lists()
    assert on_lists | {"_fused_adamw_", "_fused_sgd_"} <= set(listed) <= set(names)
    assert listed == sorted(listed)


def test_reductions_have_their_numbers() -> None:
    assert [_torch.reduction_number(n) for n in ("none", "mean", "sum")] == [0, 1, 2]


def test_packed_sequences_are_made_by_these_functions() -> None:
    data, sizes = _torch.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 1], device="cpu"), True)
    assert (tuple(data.shape), sizes.tolist()) == ((4, 1), [2, 1, 1])
    padded, lengths = _torch.pad_packed_sequence(data, sizes, True, 0.0, 3)
    assert (padded[1, 1].item(), lengths.tolist()) == (0.0, [3, 1])
    Wrapper.seen = []
    torch.nn.utils.rnn.pack_padded_sequence(Wrapper.of(torch.ones(2, 3, 1)), [3, 1], batch_first=True)
    assert _torch.pack_padded_sequence in Wrapper.seen


def test_functions_of_state_dicts_take_what_ours_take() -> None:
    utils, words = import_module(_torch.STATE_DICT_UTILS), import_module(_torch.STATE_DICT)

    def parameters(module: Any, name: str) -> list[str]:
        return list(inspect.signature(getattr(module, name)).parameters)

    assert parameters(utils, "_gather_state_dict")[0] == "state_dict"
    assert parameters(words, "_gather_state_dict")[0] == "state_dict"
    assert parameters(words, "_get_optim_state_dict") == ["model", "optimizers", "info"]
    assert parameters(words, "_load_optim_state_dict") == ["model", "optimizers", "state_dict", "info"]
    assert parameters(words, "_maybe_full_or_cpu_state_dict") == ["state_dict", "info"]
    assert is_dataclass(words._StateDictInfo)


def test_no_other_file_uses_private_names() -> None:
    found = [
        f"{path.relative_to(SRC)}:{node.lineno} {PRIVATE.search(ast.unparse(node))}"
        for path in sorted(SRC.rglob("*.py"))
        if path.name not in ("_torch.py", "_torch.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.ImportFrom | ast.Import) and PRIVATE.search(ast.unparse(node))
    ]
    assert found == []


def test_a_dispatch_mode_is_seen_as_long_as_it_is_on() -> None:
    found = []
    with FakeTensorMode():
        found.append(_torch.is_dispatch_mode_on())
        with _torch.no_dispatch_modes():
            found.append(_torch.is_dispatch_mode_on())
            real = torch.ones(2)
    assert found == [True, False] and not _torch.is_dispatch_mode_on()
    assert type(real) is Tensor and real.tolist() == [1, 1]


def test_tensor_guards_see_dtypes_strides_and_requires_grad() -> None:
    one = torch.ones(2, 3)
    guards = _torch.TensorGuards(one, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert guards.check(torch.zeros(2, 3))
    others = [torch.ones(3, 2), torch.ones(3, 2).t(), one.double(), torch.ones(2, 3, requires_grad=True)]
    assert not any(guards.check(other) for other in others)


def test_a_module_over_flat_tensors_is_traced_with_its_backward() -> None:
    class Square(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * x,)

    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        run = lambda args: graph.forward(*args)  # noqa: E731  # an attribute is set on it
        run._boxed_call = True  # type: ignore[attr-defined]  # how torch is told that arguments come as one list
        return run

    x = torch.tensor([3.0], requires_grad=True)
    run = _torch_graphs.trace_joint_graph(
        Square(),
        [x],
        forward=compiler,
        backward=compiler,
        inference=compiler,
        partitioned=lambda *pair: graphs.extend(pair),
        decompositions={},
    )
    run(x)[0].backward()
    assert len(graphs) == 2 and x.grad is not None and x.grad.tolist() == [6.0]


def test_compilers_are_found_by_name() -> None:
    assert callable(_torch_graphs.named_backend("eager")) and callable(_torch_graphs.inductor_compiler())
    assert torch.ops.aten.addr.default in _torch_graphs.inductor_decompositions()


def test_code_that_asks_is_told_that_it_is_compiled() -> None:
    others: list[bool] = []
    with _torch_graphs.compiling_flag():
        assert torch.compiler.is_compiling()
        thread = Thread(target=lambda: others.append(bool(torch.compiler.is_compiling())))
        thread.start()
        thread.join()
    assert not torch.compiler.is_compiling() and others == [False]


def test_record_function_does_nothing_while_it_is_switched_off() -> None:
    before = torch.autograd.profiler.record_function
    with _torch_graphs.no_record_function():
        assert torch.autograd.profiler.record_function is _torch_graphs._NoRecord
        with torch.autograd.profiler.record_function("name"):
            pass
    assert torch.autograd.profiler.record_function is before


def test_a_wrapper_takes_the_shape_of_another_in_place() -> None:
    wrapper, like = Wrapper.of(torch.ones(0)), Wrapper.of(torch.ones(2, 3))
    _torch.set_wrapper_shape(wrapper, like)
    with _torch.DisableTorchFunctionSubclass():
        assert wrapper.shape == (2, 3) and wrapper.stride() == (3, 1) and type(wrapper) is Wrapper
    with torch.inference_mode():
        _torch.set_wrapper_shape(wrapper, Wrapper.of(torch.ones(4)))
    with _torch.DisableTorchFunctionSubclass():
        assert wrapper.shape == (4,) and not wrapper.is_inference()
    assert Wrapper.seen == []


def test_code_is_left_alone_by_dynamo() -> None:
    def function() -> int:
        return 1

    _torch_graphs.skip_recursively(function.__code__)
    assert function() == 1
    _torch_graphs.skip_package("shardwise")


def test_tensors_made_from_nothing_inside_an_operator_pass_through_modes() -> None:
    with FakeTensorMode(), _torch.autograd_on_locals(_torch.current_dispatch_keys()):
        made = torch.empty(2)
    assert type(made) is not Tensor
    with _torch.autograd_on_locals(_torch.current_dispatch_keys()):
        assert type(torch.empty(2)) is Tensor


def test_storage_identity() -> None:
    one, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert _torch.storage_identity(one.untyped_storage()) == _torch.storage_identity(one[2:].untyped_storage())
    assert _torch.storage_identity(one.untyped_storage()) != _torch.storage_identity(other.untyped_storage())


def test_the_node_that_was_traced_last_is_known() -> None:
    found: list[Any] = []

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        found.append(_torch_graphs.last_traced_node().target)
        return y.cos()

    make_fx(program)(torch.ones(2))
    assert found == [torch.ops.aten.sin.default] and _torch_graphs.last_traced_node() is None


def test_hooks_on_saved_tensors_run_in_traces_where_that_is_asked_for() -> None:
    before = _torch_graphs._set_hooks_tracing(True)
    x = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda t: t):
            x.sin()
            assert seen == []
            with _torch_graphs.saved_tensors_hooks_in_traces():
                x.sin()
    finally:
        _torch_graphs._set_hooks_tracing(before)
    assert len(seen) == 1


def test_calls_of_backward_are_noticed() -> None:
    seen: list[str] = []
    original = torch.autograd.backward
    with _torch_graphs.calling_before_backward(lambda: seen.append("backward")):
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["backward"] and torch.autograd.backward is original


def test_threads_trace_one_after_another_where_a_thread_that_traced_has_ended() -> None:
    def trace() -> None:
        _torch_graphs.keep_missing_device_guard()
        with FakeTensorMode():
            torch.ones(2)

    for _ in range(3):
        thread = Thread(target=trace)
        thread.start()
        thread.join()


def test_comm_debug_modes_and_their_counts() -> None:
    assert _torch.comm_debug_modes() == []
    with CommDebugMode() as mode:
        assert _torch.comm_debug_modes() == [mode]
        mode.comm_counts[torch.ops.aten.add] += 1
    assert mode.get_total_counts() == 1 and _torch.comm_debug_modes() == []


def test_is_profiling() -> None:
    assert not _torch.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert _torch.is_profiling()


def test_name_new_groups() -> None:
    from torch.distributed import distributed_c10d as c10d

    with _torch.name_new_groups("mine"):
        assert c10d._process_group_name([0, 1], use_hashed_name=True) == "mine"
    # since torch 2.15 the hash depends on how many groups were made, and each name counts as one
    assert re.fullmatch("[0-9a-f]{40}", c10d._process_group_name([0, 1], use_hashed_name=True))


def test_a_kernel_that_refuses_in_a_trace_is_logged_by_torch_alone() -> None:
    """Inside `without_log_of_refusals` nothing is; other records are."""
    log, seen = logging.getLogger("torch._subclasses.fake_tensor"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]  # of this one
    log.addHandler(handler)
    try:
        for around in (nullcontext(), _torch.without_log_of_refusals()):
            with around, FakeTensorMode(), pytest.raises(RuntimeError):
                torch.mm(torch.empty(2, 3), torch.empty(2, 3))
        with _torch.without_log_of_refusals():
            log.error("another")
    finally:
        log.removeHandler(handler)
    assert [text.split(" for ")[0] for text in seen] == ["failed while attempting to run meta", "another"]


def test_groups_of_two_without_a_world() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda i: _torch.make_pair_group("gloo", store, "a", i, "127.0.0.1", limit), (0, 1)))
    sent, received = torch.arange(3.0), torch.zeros(3)
    works = [ends[1].recv([received], 0, 0), ends[0].send([sent], 1, 0)]
    assert all(work.wait(limit) for work in works) and torch.equal(sent, received)


def test_one_sided_transports_have_the_names_that_are_used() -> None:
    module = _torch.one_sided_transports()
    assert (module is None) == (_torch.TORCH_RELEASE < (2, 15))
    if module is not None:
        assert isinstance(module.available_transports(), tuple) and callable(module.new_transport)
        wanted = {"bind", "connect", "register_memory", "read", "close"}
        assert wanted <= set(dir(module.Transport))


def test_many_copies_are_one_call() -> None:
    targets = [torch.zeros(2, 3).t(), torch.zeros(2, dtype=torch.bfloat16), torch.nn.Parameter(torch.zeros(()))]
    before = [target._version for target in targets]
    with torch.no_grad():
        _torch.copy_each(targets, [torch.ones(3, 2), torch.full((1,), 2.0), torch.tensor(3.0)])
    _torch.copy_each([], [])
    assert [float(target.detach().sum()) for target in targets] == [6.0, 4.0, 3.0]
    assert all(target._version > old for target, old in zip(targets, before, strict=True))
