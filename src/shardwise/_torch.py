"""Every private name of torch that this package uses, each with the reason, and calls that differ by version.

Everything else that the package takes from torch is public API. `tests/house/test_private_torch.py` has one guard for
each name: it fails when a new release of torch moves the name or changes what it does.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, wraps
from operator import attrgetter
from pkgutil import resolve_name
from threading import Event, Thread, get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from shardwise._version import SUPPORTED_TORCH

TORCH_RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])


def private_name(path: str) -> Any:
    """Return a private name of torch, or say in one sentence which versions have it.

    >>> private_name("_C.no_such_name")
    Traceback (most recent call last):
    ...
    ImportError: shardwise uses torch._C.no_such_name, which torch ... does not have; it supports torch 2.11 to 2.15
    """
    try:
        return resolve_name(f"torch.{path}")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"shardwise uses torch.{path}, which torch {torch.__version__} does not have; it supports {SUPPORTED_TORCH}"
        ) from error


class MissingOp:
    """Stands for an operator that this version of torch does not have: rules for it are skipped, calls refused."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, overload: str) -> MissingOp:
        if overload.startswith("_"):
            raise AttributeError(f"torch {torch.__version__} has no operator {self.name}, so no {overload} of it")
        return MissingOp(f"{self.name}.{overload}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch {torch.__version__} has no operator {self.name}")


class OpNamespace:
    """Operators by name, as in `torch.ops`; one that this version of torch does not have is a `MissingOp`.

    >>> aten.relu.default
    <OpOverload(op='aten.relu', overload='default')>
    >>> aten.no_such_operator.default.name, aten.relu.no_such_overload.name
    ('aten.no_such_operator.default', 'aten.relu.no_such_overload')
    """

    def __init__(self, name: str, found: Any) -> None:
        self._name, self._found = name, found

    def __getattr__(self, name: str) -> Any:
        path, found = f"{self._name}.{name}", getattr(self._found, name, None)
        if found is None:
            found = MissingOp(path)
        elif isinstance(found, OpOverloadPacket):
            found = OpNamespace(path, found)
        setattr(self, name, found)
        return found


def present_ops(ops: Iterable[Any]) -> list[Any]:
    """Return the operators that this version of torch has."""
    return [op for op in ops if not isinstance(op, MissingOp)]


aten: Any = OpNamespace("aten", torch.ops.aten)

# Types: of the stores that ranks meet in, and of the placements of torch's old API, such as "rank:1/cuda:1".
if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch.distributed.remote_device import _remote_device as _remote_device
else:
    Store = private_name("distributed.Store")
    TCPStore = private_name("distributed.TCPStore")
    _remote_device = private_name("distributed.remote_device._remote_device")

# Calls a function of torch on a ShardedTensor without entering `__torch_function__` again. There is no public name.
DisableTorchFunctionSubclass: type[AbstractContextManager[None]] = private_name("_C.DisableTorchFunctionSubclass")
# And the other direction: steps of an operator that call functions of torch on ShardedTensors take the fast path.
EnableTorchFunction: type[AbstractContextManager[None]] = private_name("_C._EnableTorchFunction")

# The same without modes either: a default device of torch is one, and would call the operator again by its usual way.
DisableTorchFunction: type[AbstractContextManager[None]] = private_name("_C.DisableTorchFunction")

# The types of operators: `isinstance` is how an overload is told from a packet. Only the instances are public.
OpOverload: Any = private_name("_ops.OpOverload")
OpOverloadPacket: Any = private_name("_ops.OpOverloadPacket")

# Inside the forward of a `torch.autograd.Function` forward-mode differentiation is off: the only visible sign of it.
is_forward_grad_enabled: Any = private_name("_C._is_fwd_grad_enabled")

# The Functions that torch puts around a module with full backward hooks, and around code that is checkpointed with
# re-entrance. They are applied without asking the types of their arguments.
BackwardHookFunction: type[torch.autograd.Function] = private_name("nn.modules._functions.BackwardHookFunction")
CheckpointFunction: type[torch.autograd.Function] = private_name("utils.checkpoint.CheckpointFunction")

# Forward-mode differentiation: whether dual numbers are in use (the level has no public name), and the functions that
# a ShardedTensor meets in `torch.autograd.forward_ad.make_dual` and `unpack_dual`.
forward_ad: Any = private_name("autograd.forward_ad")
make_dual_function: Any = private_name("_VF._make_dual")
unpack_dual_function: Any = private_name("_VF._unpack_dual")

# Inside of `torch.func.jvp` torch asserts that nobody passes it by; our own Functions, on local tensors, do.
_allow_own_functions = private_name("_functorch.utils.enable_single_level_autograd_function")

# Whether operators are being traced into a graph, as `torch.func.linearize` does.
_dispatch_mode = private_name("_C._get_dispatch_mode")
_PROXY_MODE = private_name("_C._TorchDispatchModeKey.PROXY")

# Whether a tensor stands for many, inside of `torch.func.vmap`; and whether it is of any transform of `torch.func`.
is_batched_tensor: Any = private_name("_C._functorch.is_batchedtensor")
is_transformed_tensor: Any = private_name("_C._functorch.is_functorch_wrapped_tensor")

# The Function by which `torch.distributions.Dirichlet` and `Beta` draw samples with gradients.
DirichletFunction: type[torch.autograd.Function] = private_name("distributions.dirichlet._Dirichlet")
# What `torch.distributions` draws gamma and Dirichlet numbers by.
draw_standard_gamma: Any = private_name("_standard_gamma")
draw_dirichlet: Any = private_name("_sample_dirichlet")

# The handle of a thread's CUDA stream, without an object of torch for it; builds for the CPU do not have it.
_current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_raw_stream(device_index: int) -> int:
    """The handle of this thread's stream of a CUDA device, 0 for the default stream."""
    handle: int = _current_raw_stream(device_index)
    return handle


# Many copies in one call: ranks that are threads make those of all of them, and a call costs more than its elements.
foreach_copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = private_name("_foreach_copy_")

# Data-dependent checks on a GPU without a synchronisation.
assert_async: Any = private_name("_assert_async")

# Nested lists, tuples and dicts of tensors, as torch itself takes them apart; `torch.utils.pytree` has fewer functions.
pytree: Any = private_name("utils._pytree")

# What `torch.nn.utils.rnn` calls to pack sequences and to pad them again: the functions that a tensor can answer.
pack_padded_sequence = private_name("_pack_padded_sequence")
pad_packed_sequence = private_name("_pad_packed_sequence")

# The modules of torch's state dicts, whose private functions are taught ShardedTensors (`_gather_state_dict`) and
# ShardedOptimizers (`_get_optim_state_dict`, `_load_optim_state_dict`); by name, since they take long to load.
STATE_DICT_UTILS, STATE_DICT = "torch.distributed._state_dict_utils", "torch.distributed.checkpoint.state_dict"

# Decompositions of operators that have no rule: tried before an operator is refused. The table has no public name.
decomposition_table: dict[Any, Any] = private_name("_decomp.decomposition_table")

# Creates a tensor without storage whose class is ours: what every wrapper subclass of torch is made by.
make_wrapper_subclass: Any = private_name("Tensor._make_wrapper_subclass")

# A torch function on a ShardedTensor enters torch below its layers of autograd and of views: the wrapper is not on the
# tape, and an operator that is made of others arrives whole, in every mode, so that its own rule can be asked first.
below_autograd: type[AbstractContextManager[None]] = private_name("_C._AutoDispatchBelowADInplaceOrView")

# A view that is written to is known to the tape by how it was made, not by its strides: the gradient of a view by
# strides that has no elements is made of zeros, and so has no second gradient. There is no public name.
track_views: Callable[[bool], AbstractContextManager[None]] = private_name(
    "autograd.grad_mode._force_original_view_tracking"
)

# Operators on the wrapper itself, not on what it stands for. There is no public name.
_DisableTorchDispatch = private_name("_C._DisableTorchDispatch")

# Whether autocast is on for any device type: one call, where the public functions ask for one device type.
is_any_autocast_enabled: Any = private_name("_C._is_any_autocast_enabled")
autocast_device_types: tuple[str, ...] = tuple(private_name("_C._autocast_supported_devices")())

_top_saved_tensors_hooks = private_name("_C._autograd._top_saved_tensors_default_hooks")
_included_keys = private_name("_C._dispatch_tls_local_include_set")
_excluded_keys = private_name("_C._dispatch_tls_local_exclude_set")
_ForceDispatchKeyGuard = private_name("_C._ForceDispatchKeyGuard")
_has_kernel = private_name("_C._dispatch_has_kernel_for_dispatch_key")
_DispatchKey = private_name("_C.DispatchKey")
_AUTOCAST_KEYS = tuple(key for name, key in _DispatchKey.__members__.items() if name.startswith("Autocast"))
# Compares tensors with those of an earlier call (dtype, device, sizes, strides, requires_grad), all in one call in C++.
TensorGuards: Any = private_name("_C._dynamo.guards.TensorGuards")


_len_dispatch_stack = private_name("_C._len_torch_dispatch_stack")
_len_function_stack = private_name("_C._len_torch_function_stack")
_dispatch_mode_stack = private_name("utils._python_dispatch._get_current_dispatch_mode_stack")
_function_mode_stack = private_name("overrides._get_current_function_mode_stack")
_DefaultDeviceMode = private_name("utils._device.DeviceContext")

# Whether a profiler of torch runs: one call, without the objects that `torch.profiler` keeps.
is_profiling: Callable[[], bool] = private_name("_C._autograd._profiler_enabled")
# The number of the backward pass that a thread runs, or -1; what it does to a leaf; and calls at its end.
backward_pass_number: Any = private_name("_C._current_graph_task_id")
_will_engine_execute_node = private_name("_C._will_engine_execute_node")
on_backward_end: Any = private_name("autograd.Variable._execution_engine.queue_callback")
# The strides of what a pointwise operator makes of tensors of one shape.
pointwise_strides: Callable[..., tuple[int, ...]] = private_name("_prims_common.compute_elementwise_output_strides")
_all_schemas = private_name("_C._jit_get_all_schemas")
_reduction_number = private_name("nn._reduction.get_enum")


@dataclass(frozen=True, slots=True)
class DispatchKeys:
    """The layers of torch (autograd, autocast, inference mode) that operators of a thread pass through at some point.

    Inside `__torch_dispatch__` torch switches off all layers above, since it takes the wrapper to have passed them. Our
    wrapper is not on the tape, its local tensors are: so the layers that the caller had are put back for them.
    """

    included: Any
    excluded: Any

    def below(self, op: Any) -> DispatchKeys:
        """The layers for what an operator does: where autocast has cast its arguments, autocast is off inside."""
        cast = [key for key in autocast_keys_of(op) if not self.excluded.has(key)]
        return self.without_autocast(cast) if cast else self

    def without_autocast(self, device_types: Sequence[Any]) -> DispatchKeys:
        """The same with autocast off for some device types, as dispatch keys."""
        excluded = self.excluded
        for key in device_types:
            excluded = excluded.add(key)
        return DispatchKeys(self.included, excluded)


@cache
def autocast_keys_of(op: Any) -> tuple[Any, ...]:
    """The device types, as dispatch keys, on which autocast knows an operator."""
    return tuple(k for k in _AUTOCAST_KEYS if isinstance(op, OpOverload) and _has_kernel(op.name(), k.name))


def _read_keys(*, inference: bool) -> DispatchKeys:
    with torch.inference_mode(inference):
        return DispatchKeys(_included_keys(), _excluded_keys()).without_autocast(_AUTOCAST_KEYS)


_NORMAL_KEYS, _INFERENCE_KEYS = _read_keys(inference=False), _read_keys(inference=True)


def current_dispatch_keys() -> DispatchKeys:
    """Return the layers that operators of this thread pass through now, apart from those that are not ours to restore.

    >>> with torch.autocast("cpu"):
    ...     current_dispatch_keys() == current_dispatch_keys().below(torch.ops.aten.mm.default)
    False
    """
    keys = _INFERENCE_KEYS if torch.is_inference_mode_enabled() else _NORMAL_KEYS
    if not is_any_autocast_enabled():
        return keys
    now, excluded = _excluded_keys(), keys.excluded
    for key in _AUTOCAST_KEYS:
        excluded = excluded if now.has(key) else excluded.remove(key)
    return DispatchKeys(keys.included, excluded)


def autograd_on_locals(keys: DispatchKeys = _NORMAL_KEYS) -> Any:
    """Return a context in which operators on plain tensors pass these layers, inside `__torch_dispatch__` too.

    >>> with autograd_on_locals():
    ...     (torch.ones(1, requires_grad=True) * 2).grad_fn is not None
    True
    """
    included = keys.included
    if _len_dispatch_stack():  # modes, as tracers are, see what makes tensors from nothing by these keys alone
        included = included.add(_DispatchKey.Python).add(_DispatchKey.PythonTLSSnapshot)
    return _ForceDispatchKeyGuard(included, keys.excluded)


@contextmanager
def beside_func_transforms(keys: DispatchKeys) -> Iterator[None]:
    """Run code on local tensors that have tangents of their own: a transform of `torch.func` around it is passed by."""
    with autograd_on_locals(keys), _allow_own_functions():
        yield


def decompose(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a composite operator by the operators that torch's own kernel calls, below autograd.

    The public `op.decompose` prefers decompositions in Python that are made for tracing, and differ.
    """
    with below_autograd(), DisableTorchFunction():
        return op._op_dk(_DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@cache
def is_composite(op: Any) -> bool:
    """Whether torch itself writes an operator as other operators, whose gradients make up its gradient.

    >>> is_composite(torch.ops.aten.softmax.int), is_composite(torch.ops.aten._softmax.default)
    (True, False)
    """
    return isinstance(op, OpOverload) and bool(_has_kernel(op.name(), "CompositeImplicitAutograd"))


def is_dispatch_mode_on() -> bool:
    """Whether operators of this thread pass through a mode, as those of a traced program do."""
    return bool(_len_dispatch_stack())


def is_function_mode_on() -> bool:
    """Whether functions of torch that this thread calls pass through a mode other than a default device."""
    return bool(_len_function_stack()) and not all(isinstance(m, _DefaultDeviceMode) for m in _function_mode_stack())


def default_device() -> torch.device | None:
    """The default device of this thread, where one is set."""
    return torch.get_default_device() if _len_function_stack() else None


def comm_debug_modes() -> list[Any]:
    """Return the `CommDebugMode`s that operators of this thread pass through; it counts torch's collectives only."""
    if not _len_dispatch_stack():
        return []
    module = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    if module is None:
        return []
    return [mode for mode in _dispatch_mode_stack() if isinstance(mode, module.CommDebugMode)]


def is_inference_wrapper(wrapper: Tensor) -> bool:
    """Whether a wrapper was made in inference mode."""
    with DisableTorchFunctionSubclass():
        return wrapper.is_inference()


def set_wrapper_shape(wrapper: Tensor, like: Tensor) -> None:
    """Give a wrapper, which has no memory, the shape of another in place; torch's C++ code asks the wrapper for it."""
    with _DisableTorchDispatch(), DisableTorchFunctionSubclass(), torch.inference_mode(wrapper.is_inference()):
        if like.is_inference() and not wrapper.is_inference():
            like = make_wrapper_subclass(type(like), like.shape, dtype=like.dtype, device=like.device)
        with below_autograd():
            Tensor.data.__set__(wrapper, like)  # type: ignore[attr-defined]  # the class has a `data` of its own


def has_saved_tensors_hooks() -> bool:
    """Whether tensors that are saved for the backward pass go through hooks, as in checkpointed code, both times."""
    return _top_saved_tensors_hooks(True) is not None


def saved_tensors_hook() -> Callable[[Tensor], Any] | None:
    """The hook that tensors go through when they are saved: one for each run of checkpointed code, both times.

    A hook of ours that is put before a user's one names it as its attribute `before`.
    """
    hooks = _top_saved_tensors_hooks(True)
    return None if hooks is None else getattr(hooks[0], "before", hooks[0])


def saved_tensors_hook_pair() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks for saving a tensor and for unpacking it, or None."""
    return _top_saved_tensors_hooks(True)  # type: ignore[no-any-return]  # untyped in torch


def is_dual_level() -> bool:
    """Whether tensors may have tangents: inside of `dual_level()` and `torch.func.jvp`, on every thread."""
    return bool(forward_ad._current_level >= 0 and is_forward_grad_enabled())


def proxy_mode() -> Any:
    """The mode in which operators are traced into a graph, or None."""
    return _dispatch_mode(_PROXY_MODE)


def is_tracing() -> bool:
    """Whether operators are being traced into a graph."""
    return proxy_mode() is not None


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def global_module_hooks() -> list[dict[int, Any]]:
    """Return the dicts of the hooks that torch calls for all modules: a graph is of no use where others are there."""
    return [private_name(f"nn.modules.module.{name}") for name in _GLOBAL_HOOKS]


def global_step_hooks() -> list[dict[int, Any]]:
    """Return the dicts of the hooks that torch calls at the steps of all optimizers."""
    return [private_name(f"optim.optimizer._global_optimizer_{when}_hooks") for when in ("pre", "post")]


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a number that two storages share if they are the same memory; also without data, where addresses are 0."""
    return int(storage._cdata)


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, where checkpointed code is computed a second time."""
    return bool(backward_pass_number() != -1)


_module_call: Any = private_name("nn.Module._call_impl").__code__


def count_running_calls(module: Any) -> int:
    """How many calls of a module run on this thread, found on its stack.

    Torch calls `always_call` hooks where a forward raised an Exception, and not where it was interrupted (Ctrl-C).
    """
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is _module_call and frame.f_locals["self"] is module
        frame = frame.f_back
    return found


gradient_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")  # dicts of a tensor, or None


def has_accumulate_hooks(leaf: Any) -> bool:
    """Whether a leaf has hooks that run after its gradient was added to its `grad`."""
    return bool(leaf._post_accumulate_grad_hooks)


_LAST_SEQUENCE_NUMBER = (1 << 64) - 1


def run_as_leaf(tensor: Tensor) -> None:
    """Let backward passes run a tensor's node before all others that are ready, as they do with nodes of leaves."""
    node: Any = tensor.grad_fn
    if node is not None:
        node._set_sequence_nr(_LAST_SEQUENCE_NUMBER)


def only_accumulates(node: Any, leaf: Any) -> bool:
    """Whether all that the running backward pass does with a leaf's gradient is to add it to its `grad`."""
    try:
        hooked = leaf._backward_hooks or has_accumulate_hooks(leaf)
        return not hooked and bool(_will_engine_execute_node(node))
    except RuntimeError:  # `torch.autograd.grad` returns it instead
        return False


def replace_checkpoint_generator(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what `torch.utils.checkpoint.checkpoint` starts before it runs the code, without re-entrance.

    `make` gets torch's own. It saves the arguments, and takes the type of a tensor for no reason to do so otherwise.
    Both are called with the code, its arguments, its keyword arguments, and the options, which are passed on.
    """
    checkpointing, name = private_name("utils.checkpoint"), "_checkpoint_without_reentrant_generator"
    if hasattr(checkpointing, f"{name}_impl"):  # since torch 2.15
        named = getattr(checkpointing, f"{name}_impl")
        start = make(lambda code, args, kwargs, options: named(code, args, kwargs, **options))
        setattr(checkpointing, f"{name}_impl", lambda code, args, kwargs, **options: start(code, args, kwargs, options))
        return
    own = private_name(f"utils.checkpoint.{name}")
    count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(own).parameters.values()) - 1
    begin = make(lambda code, args, kwargs, options: own(code, *options, *args, **kwargs))

    @wraps(own)  # whoever replaces it again looks at its parameters
    def replaced(code: Any, *given: Any, **kwargs: Any) -> Any:
        return begin(code, given[count:], kwargs, given[:count])

    setattr(checkpointing, name, replaced)


def operator_names() -> Iterator[str]:
    """Return the names of torch's own operators, without `aten::` and overload; takes 10 ms."""
    return iter(sorted({s.name.removeprefix("aten::") for s in _all_schemas() if s.name.startswith("aten::")}))


def list_operators_on_lists() -> list[str]:
    """Return the names of the operators on lists and of fused ones, with and without "_", in no time."""
    written = {name for name in vars(torch) if name.startswith(("_foreach_", "_fused_"))}
    names = sorted(written | {name.removesuffix("_") for name in written})
    return [name for name in names if hasattr(torch.ops.aten, name)]


def reduction_number(name: str) -> int:
    """Return the number that operators of losses take for "none", "mean" or "sum"."""
    return int(_reduction_number(name))


def clear_dtensor_caches() -> None:
    """Make DTensor forget the strategies it has chosen, where this version keeps them in C++."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def default_store() -> Store | None:
    """Return the key-value store of the default group, if there is one."""
    try:
        return c10d._get_default_store()
    except (RuntimeError, ValueError):
        return None


def store_address(store: Store) -> tuple[str, int] | None:
    """Return where a store listens; None for one that is not reached over the network."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def make_pair_group(backend: str, store: Store, prefix: str, place: int, address: str, limit: timedelta) -> Any:
    """Make a group of two processes without a world, in place 0 or 1; gloo listens on `address` alone.

    `new_group` makes groups of the ranks of one world only, so the classes behind it are used. Those of nccl are in
    builds for CUDA alone.
    """
    store = private_name("distributed.PrefixStore")(prefix, store)
    if backend == "gloo":
        gloo: Any = private_name("_C._distributed_c10d.ProcessGroupGloo")
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=address)], limit
        return gloo(store, place, 2, options)
    nccl: Any = private_name("_C._distributed_c10d.ProcessGroupNCCL")
    options = nccl.Options()
    options._timeout = limit
    return nccl(store, place, 2, options)


def one_sided_transports() -> Any:
    """Return torch's module of transports that read memory of other hosts; None in versions that do not have it."""
    try:
        return private_name("distributed._transport")
    except ImportError:
        return None


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy the k-th source into the k-th target: one call for all."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def all_gather_single(out: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of equal flat tensors under the name that this version does not deprecate."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(out, tensor, group=group, async_op=True)
    return work


def reduce_scatter_single(out: Tensor, tensor: Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of equal flat runs under the name that this version does not deprecate."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(out, tensor, op=op, group=group, async_op=True)
    return work


def group_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    pairs = (entry.split(":") for entry in str(config).split(",") if ":" in entry)
    return {device: backend for device, backend in pairs}


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name of a group, the same on all its ranks; it is empty for one without a name, as stubs of tests."""
    try:
        return str(group.group_name)
    except RuntimeError:
        return ""


def ranks_are_threads() -> bool:
    """Whether each thread of this process has a torch.distributed world of its own, as in torch's tests."""
    return type(c10d._world) is not c10d._World


_naming = threading.local()


@contextmanager
def name_new_groups(name: str) -> Iterator[None]:
    """Name a group that this thread makes: torch's name counts those that a process has made, so members may differ."""
    own_name: Any = getattr(c10d, "_hash_ranks_to_str", None)
    if own_name is not None and not hasattr(own_name, "__wrapped__"):

        @wraps(own_name)
        def find_name(ranks: list[int]) -> str:
            return str(getattr(_naming, "name", None) or own_name(ranks))

        c10d._hash_ranks_to_str = find_name
    _naming.name = name
    try:
        yield
    finally:
        _naming.name = None


_disable_current_modes = private_name("utils._python_dispatch._disable_current_modes")


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which operators of this thread pass through no mode, so that values are real in a trace."""
    made: AbstractContextManager[Any] = _disable_current_modes()
    return made


_set_hooks_tracing = private_name("_C._autograd._saved_tensors_hooks_set_tracing")


# Which code dynamo leaves alone; in C, so that dynamo itself is not loaded.
_eval_frame: Any = private_name("_C._dynamo.eval_frame")


_CompileContext: Any = private_name("_guards.CompileContext")


def is_dynamo_at_work() -> bool:
    """Whether dynamo follows a function now; `torch.compiler.is_compiling` does not say so in torch 2.11."""
    return _CompileContext.try_get() is not None


def is_called_by_compiled_code() -> bool:
    """Whether what `torch.compile` returned for a function is being called, by the stack: dynamo does not say so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals["__name__"] == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


@contextmanager
def saved_tensors_hooks_in_traces() -> Iterator[None]:
    """Let hooks of tensors that are saved for the backward pass run in a trace, where torch leaves them out."""
    before = _set_hooks_tracing(False)
    try:
        yield
    finally:
        _set_hooks_tracing(before)


def last_traced_node() -> Any:
    """The node of the graph that is being traced which was made last, or None where nothing is traced."""
    mode = proxy_mode()
    return None if mode is None else mode.tracer.graph._root.prev


def trace_joint_graph(
    module: torch.nn.Module,
    inputs: Sequence[Tensor],
    *,
    forward: Any,
    backward: Any,
    inference: Any,
    partitioned: Any,
    decompositions: Mapping[Any, Any],
    computed_again: Any = lambda joint: (),
) -> Any:
    """Trace a module over flat tensors, forward with backward, without values; returns the function of its graphs.

    `partitioned(forward graph, backward graph)` is called where there is a backward pass, `computed_again(joint graph)`
    before: it returns the nodes whose results the backward pass computes again. What traces is loaded here,
    on first use, as loading takes long.
    """
    keep_missing_device_guard()
    trace, split = load_tracer()

    def partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
        for node in computed_again(joint):
            if "recompute" not in node.meta:
                compute_again(node, 0)
        graphs: tuple[Any, Any] = split(joint, joint_inputs, **options)
        partitioned(*graphs)
        return graphs

    with without_log_of_refusals():
        return trace(
            module,
            list(inputs),
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=dict(decompositions),
            keep_inference_input_mutations=True,
        )


@contextmanager
def without_log_of_refusals() -> Iterator[None]:
    """Keep what a kernel refuses in a trace out of torch's log: the error says it, of the whole tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def is_kept(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    log.addFilter(is_kept)
    try:
        yield
    finally:
        log.removeFilter(is_kept)


@cache
def load_tracer() -> tuple[Any, Any]:
    """Return what traces and what splits a graph; loaded on first use, as loading takes long."""
    trace = private_name("_functorch.aot_autograd.aot_module_simplified")
    split = private_name("_functorch.partitioners.min_cut_rematerialization_partition")
    private_name("_dynamo.config")  # which checkpointed code asks for while it is traced
    return trace, split


@cache
def keep_missing_device_guard() -> None:
    """Let a thread that never ends be the first to trace, where torch is built for CUDA and there is no GPU.

    Torch then makes a guard in memory of the thread that traces first, and looks at it in all later traces: it crashes
    if that thread has ended, as threads of ranks do.
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if make is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    made, never = Event(), Event()

    def stay() -> None:
        make()
        made.set()
        never.wait()

    Thread(target=stay, name="shardwise-device-guard", daemon=True).start()
    made.wait()


@contextmanager
def calling_before_backward(notice: Callable[[], None]) -> Iterator[None]:
    """Call a function before each `backward()`, on every thread."""
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        notice()
        original(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


def compute_again(node: Any, region: int) -> None:
    """Let the backward pass compute a node of a joint graph again; what one region gets from another is kept."""
    node.meta |= {"recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": region}


def inductor_compiler() -> Any:
    """Return what compiles one graph by inductor; loaded on first use, as loading takes long."""
    return _load_quietly("_inductor.compile_fx.compile_fx_inner")


def _load_quietly(path: str) -> Any:
    """Load a module of torch that warns of its own deprecated parts when it is loaded."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # torch 2.15 warns of TorchScript by the latter
            warnings.simplefilter("ignore", category)
        return private_name(path)


def inductor_decompositions() -> Mapping[Any, Any]:
    """Return the operators that inductor wants broken down."""
    found: Mapping[Any, Any] = _load_quietly("_inductor.decomposition.select_decomp_table")()
    return found


def named_backend(name: str) -> Any:
    """Return a backend of `torch.compile` by name; the public functions list their names only."""
    return _load_quietly("_dynamo.backends.registry.lookup_backend")(name)


class _TracingThread:
    """True on the thread that made it: ranks that are threads run programs while one of them traces."""

    def __init__(self) -> None:
        self._thread = get_ident()

    def __bool__(self) -> bool:
        return get_ident() == self._thread

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__


@contextmanager
def compiling_flag() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true on this thread: code that looks at values leaves that out then."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, _TracingThread()  # type: ignore[assignment]  # tested as a condition
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def no_record_function() -> Iterator[None]:
    """Make `record_function`, which optimizers enter, do nothing: it is an operator that graphs cannot hold."""
    profiler = torch.autograd.profiler
    before, profiler.record_function = profiler.record_function, _NoRecord  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        profiler.record_function = before  # type: ignore[misc]


class _NoRecord(nullcontext[None]):
    """Stands for `record_function`."""


_operators: Any = torch.library.Library("shardwise", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch


def define_operator(schema: str, kernel: Any, fake: Any) -> None:
    """Define an operator of the namespace `shardwise`, by its code and by what it returns for tensors without data."""
    name = schema.partition("(")[0]
    _operators.define(schema)
    _operators.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{name}", fake, lib=_operators)


def skip_package(name: str) -> None:
    """Let dynamo, which is loaded, not follow calls into the functions of a package."""
    private_name("_dynamo.trace_rules.add")(name)


def skip_recursively(code: CodeType) -> None:
    """Let dynamo leave alone a function that is called between graphs, and all that it calls."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
