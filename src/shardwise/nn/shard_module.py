"""Shard the parameters of a model in place, as a plan says.

1. The whole plan is checked against the model and the ranks, on all ranks together, before any parameter changes: a
   wrong plan leaves the model whole.
2. Each planned parameter becomes a ShardedTensor; each module with a `Sharder` is replaced by what it returns.
   Parameters on the meta device get their local parts only, and their values afterwards.
3. Forward hooks say how plain inputs are read, redistribute outputs (the plan's `activations`) and return local
   tensors.
4. Values of what had none come from the user's `init(model)` (a checkpoint, say), from `reset_parameters` of the
   modules that own it, or from their constructors. What has none then is an error that names it.

Mixed precision as fully sharded training has it: parameters are gathered and used in a dtype of fewer bytes.

1. While a module's forward runs, its parameters are seen in the `gather_dtype` of the plan, and its floating-point
   inputs are cast to it. Outside of it they are what they are: optimizers and checkpoints see the full precision.
2. A parameter is cast before it is gathered, so that fewer bytes travel; also where it is gathered again or ahead.
3. Terms of a gradient travel in the smaller dtype, are added up in float32, and reach the parameter unrounded.

Activation checkpointing: the forward of each module that the plan names in `recompute` runs in torch's `checkpoint`.

Where do the values of a model on the meta device come from?

1. Buffers that no checkpoint has (non-persistent ones, such as frequencies of rotary embeddings) are made again before
   anything else, by the code that made them: `_init_weights` of a model of transformers, or the constructor of the
   module, called with its attributes of the same names as its arguments; its parameters are not allocated.
2. `init(model)`, which may load a checkpoint; or without it `reset_parameters` of the modules that own parameters.
   torch's random fills give the same values in every layout: no rank needs the whole.
3. Buffers that are still without values then, such as persistent ones that a checkpoint lacks, as in 1.

Memory that was allocated without values holds a pattern of bytes. Where it still does, nothing was written.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

from shardwise._text import package_logger, public
from shardwise._torch import count_running_calls
from shardwise._tree import map_nest
from shardwise.comm import Comm, DisagreementError, agree, name_ranks
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.compiler.compiled import route_torch_compile
from shardwise.geometry import Layout, LayoutError, ShardingSpec
from shardwise.nn.inputs import adapt_methods, register_activation_hooks, register_input_hooks
from shardwise.nn.lookup import register_local_batch_hooks
from shardwise.nn.lookup_routes import owned_rows
from shardwise.nn.optimizer import drop_parameters, hold_sharded_parameters, register_state_dict_functions
from shardwise.nn.plan import (
    ModelPlan,
    PlanError,
    PlanFields,
    Sharder,
    ShardingPlan,
    check_mesh,
    check_on_all_ranks,
    check_ranks,
    check_source,
    lay_out_specs,
    layout_texts,
    match_patterns,
)
from shardwise.nn.plan_costs import find_cut_heads
from shardwise.nn.plan_files import load_plan
from shardwise.nn.stages import CountRandom, find_units, take_stages
from shardwise.ops.implicit_replication import plain_as_replicated
from shardwise.ops.unshard import ALWAYS, AUTOMATIC, copy_mark, mark_for_resharding, pin_parameter, register_prefetch
from shardwise.tensor.creation import empty, shard
from shardwise.tensor.random import next_stream
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.transfer.transfer import format_bytes

Initialiser: TypeAlias = Callable[[nn.Module], object]
RESET_METHODS = ("reset_parameters", "_reset_parameters")
_PATTERN = 0xA5


class MissingValues:
    """The tensors of a model that have no values, and where each gets them from."""

    def __init__(self, module: nn.Module, init: Initialiser | None) -> None:
        self.module, self.init = module, init
        self.owners = {path: part for path, part in module.named_modules() if _meta_names(part)}
        self.buffers: dict[str, Tensor] = {}
        self.elsewhere: dict[str, int] = {}  # owners in stages of other ranks, and how many random tensors they take

    def leave_stages(self, whole: nn.Module, comm: Comm) -> None:
        """Leave what is in stages of other ranks out, after its tensors left the module; `whole` has no values."""
        self.comm = comm
        for path, part in self.owners.items():
            if not _meta_names(part):
                with CountRandom() as counted:
                    _reset(whole.get_submodule(path))
                self.elsewhere[path] = counted.count

    def find_sources(self) -> None:
        """Make buffers again; raise if something can get no values. The model stays as it is."""
        without = []
        for path, part in self.owners.items():
            names = [name for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta]
            made = _rebuild_buffers(self.module, part, names) if names else {}
            self.buffers |= {_join(path, name): value for name, value in made.items()}
            left = [name for name in _meta_names(part) if name not in made]
            if left and self.init is None and _find_reset(part) is None:
                without.append(f"{path or type(part).__name__} ({', '.join(left)})")
        if without:
            raise ValueError(
                f"{'; '.join(without)}: tensors on the meta device whose modules have no reset_parameters(); "
                "pass init=, a function that fills the model"
            )

    def fill(self) -> None:
        """Give values to what was allocated without."""
        if not self.owners:
            return
        if self.init is None:
            for path, part in self.owners.items():
                for _ in range(self.elsewhere.get(path, 0)):  # the next tensor is that of the whole model
                    next_stream(self.comm, fields={}, label="reset_parameters of other stages")
                if path not in self.elsewhere:
                    _reset(part)
        else:
            self._reset_owners_of_lost_buffers()
        self._fill_buffers(lambda part, name: name in part._non_persistent_buffers_set)
        if self.init is not None:
            self.init(self.module)
        self._fill_buffers(lambda part, name: _is_without_values(part._buffers[name]))

    def _reset_owners_of_lost_buffers(self) -> None:
        """Run `reset_parameters` where a buffer is in no checkpoint and no constructor made it."""
        for path, part in ((p, m) for p, m in self.owners.items() if p not in self.elsewhere):
            lost = [n for n in part._non_persistent_buffers_set if _is_without_values(part._buffers[n])]
            if any(_join(path, name) not in self.buffers for name in lost):
                _reset(part)

    def _fill_buffers(self, wanted: Callable[[nn.Module, str], bool]) -> None:
        for full_name, value in self.buffers.items():
            path, _, name = full_name.rpartition(".")
            part = self.module.get_submodule(path)
            buffer = part._buffers.get(name)
            if buffer is None or not wanted(part, name):
                continue
            if isinstance(buffer, ShardedTensor):
                with torch.no_grad():
                    buffer.copy_(value)
            else:
                part._buffers[name] = value

    def check(self) -> PlanFields:
        """Raise if tensors have no values still."""
        if not self.owners:
            return {}
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        left = [name for name, tensor in tensors if _is_without_values(tensor)]
        if left:
            raise ValueError(
                f"{', '.join(left[:5])}{' ...' * (len(left) > 5)}: {len(left)} tensors came from the meta device and "
                "have no values: neither init, nor a reset_parameters(), nor the constructor of their module filled "
                "them; fill them in init="
            )
        return {}


def mark_without_values(tensor: ShardedTensor) -> None:
    """Fill memory with a pattern that shows later whether something was written."""
    for local in tensor.local_parts:
        _bytes_of(local).fill_(_PATTERN)


def _is_without_values(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    if not isinstance(tensor, ShardedTensor):
        return tensor.is_meta
    held = [local for local in tensor.local_parts if local.numel()]
    return bool(held) and all(_has_pattern(local) for local in held)


def _has_pattern(local: Tensor) -> bool:
    values = _bytes_of(local)
    return bool((values[:64] == _PATTERN).all()) and bool((values == _PATTERN).all())


def _bytes_of(local: Tensor) -> Tensor:
    return local.detach().reshape(-1).view(torch.uint8) if local.numel() else local.new_empty(0, dtype=torch.uint8)


def _meta_names(part: nn.Module) -> list[str]:
    tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    return [name for name, tensor in tensors if tensor.is_meta]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _find_reset(part: nn.Module) -> Callable[[], object] | None:
    return next((getattr(part, name) for name in RESET_METHODS if hasattr(part, name)), None)


def _reset(part: nn.Module) -> None:
    padding = getattr(part, "padding_idx", None)
    reset = _find_reset(part)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and padding is not None:
        _reset_table(part, padding)
    elif reset is not None:
        reset()


def _reset_table(part: nn.Embedding | nn.EmbeddingBag, padding: int) -> None:
    """As torch does: normal values, and zeros for the padding."""
    nn.init.normal_(part.weight)
    weight = part.weight
    if not isinstance(weight, ShardedTensor):
        with torch.no_grad():
            weight[padding].fill_(0)
        return
    for band in owned_rows(weight.sharding, weight.comm.rank, None).slabs:
        local = weight.local_parts[band.slot].detach()
        _, rows = band.runs.find(np.array([padding % weight.shape[0]]))
        band.take_columns(local)[rows.tolist()] = 0


def _rebuild_buffers(module: nn.Module, part: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The buffers of a module with the values that its own code computes; those that cannot be made are left out."""
    found = _run_init_weights(module, part, names)
    left = [name for name in names if name not in found]
    return found | (_run_constructor(part, left) if left else {})


def _run_init_weights(module: nn.Module, part: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """What `_init_weights(part)` of a model of transformers writes to the buffers of a part, on a copy of it."""
    models = [m for m in module.modules() if hasattr(m, "_init_weights") and any(p is part for p in m.modules())]
    if not models:
        return {}
    twin = copy.copy(part)
    twin._parameters = {name: _put_on_meta(parameter) for name, parameter in part._parameters.items()}
    twin._buffers = {name: _allocate_like(buffer) for name, buffer in part._buffers.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        models[-1]._init_weights(twin)  # type: ignore[operator]  # of the innermost model, which knows its parts
    made = {name: twin._buffers[name] for name in names}
    return {name: value for name, value in made.items() if value is not None and not _has_pattern(value)}


def _put_on_meta(parameter: nn.Parameter | None) -> nn.Parameter | None:
    """A parameter without values: what draws random numbers for it does nothing."""
    return None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def _allocate_like(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or not buffer.is_meta:
        return buffer
    made = torch.empty_like(buffer, device="cpu")
    _bytes_of(made).fill_(_PATTERN)
    return made


def _run_constructor(part: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The buffers of a module of the same class, constructed with this one's attributes as arguments."""
    arguments = _find_arguments(part)
    if arguments is None:
        return {}
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), _parameters_on_meta():
            twin = type(part)(**arguments)
    except Exception:  # of any kind: the attributes were not the arguments
        return {}
    made = {name: twin._buffers.get(name) for name in names}
    return {
        name: value
        for name, value in made.items()
        if value is not None and _are_alike(value, part._buffers[name]) and not value.is_meta
    }


def _find_arguments(part: nn.Module) -> dict[str, Any] | None:
    """The arguments of a module's constructor, from its attributes of the same names; None if one is unknown.

    A default is not an answer: the module may have been made with another value.
    """
    found: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(type(part).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ("device", "dtype"):
            continue
        if name not in part.__dict__:
            return None
        found[name] = part.__dict__[name]
    return found


def _are_alike(value: Tensor, buffer: Tensor | None) -> bool:
    return buffer is not None and value.shape == buffer.shape and value.dtype == buffer.dtype


class _Constructing(threading.local):
    on_meta = False


_constructing = _Constructing()
_registering = threading.Lock()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that this thread constructs keep their parameters on the meta device."""
    with _registering:
        _watch_registrations()
    _constructing.on_meta = True
    try:
        yield
    finally:
        _constructing.on_meta = False


@cache
def _watch_registrations() -> None:
    """Register the hook once and for all: torch's table of hooks must not change while other ranks' threads read it."""

    def put_on_meta(_module: nn.Module, _name: str, value: Any) -> Any:
        return _put_on_meta(value) if _constructing.on_meta and isinstance(value, nn.Parameter) else None

    register_module_parameter_registration_hook(put_on_meta)


_CAST_NAMES = "_cast_names"  # of a module: the names that hide parameters, for each call that runs


def register_casts(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Let the modules of a model see parameters in other dtypes: by the names of parameters."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {n: dtypes[prefix + n] for n, _ in module.named_parameters(recurse=False) if prefix + n in dtypes}
        if own:
            module.__dict__[_CAST_NAMES] = []
            module.register_forward_pre_hook(partial(_hide_parameters, dtypes=own), with_kwargs=True)
            module.register_forward_hook(_show_parameters, always_call=True)


def _hide_parameters(
    module: nn.Module, args: Any, kwargs: Any, dtypes: Mapping[str, torch.dtype]
) -> tuple[Any, dict[str, Any]]:
    """Put cast parameters in front of a module's own: attributes of an object are found before its parameters."""
    calls: list[list[str]] = module.__dict__[_CAST_NAMES]
    while calls and count_running_calls(module) <= len(calls):  # one was interrupted, as by Ctrl-C
        _show_parameters(module, args, None)
    hidden: list[str] = []
    for name, dtype in dtypes.items():
        parameter: object = module._parameters.get(name)
        if isinstance(parameter, ShardedTensor) and parameter.dtype != dtype and name not in module.__dict__:
            cast = parameter.to(dtype)
            copy_mark(parameter, cast)
            module.__dict__[name] = cast
            hidden.append(name)
    calls.append(hidden)
    cast_input = partial(_cast_floating, dtype=next(iter(dtypes.values())))
    return map_nest(cast_input, args), map_nest(cast_input, kwargs)


def _show_parameters(module: nn.Module, _args: Any, _output: Any) -> None:
    calls = module.__dict__[_CAST_NAMES]
    for name in calls.pop() if calls else ():
        del module.__dict__[name]


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


_log = package_logger(__name__)
M = TypeVar("M", bound=nn.Module)
OutputSpecs: TypeAlias = dict[str, ShardingSpec]


def shard_or_allocate(
    tensor: Tensor, spec: ShardingSpec, src_rank: int, process_group: GroupOrComm | None
) -> ShardedTensor:
    """A tensor laid out by a spec: the values of the source rank, or none for a tensor on the meta device."""
    if tensor.is_meta:
        made = empty(spec, *tensor.shape, dtype=tensor.dtype, process_group=process_group)
        mark_without_values(made)
        return made
    comm = resolve_comm(process_group)
    if spec.shards_itself:
        agree(comm, {"src_rank": src_rank, "sharding_spec": spec}, label="_shard_tensor")
        made = cast(Any, spec).shard(tensor, src_rank=src_rank, process_group=process_group)
        return cast(ShardedTensor, made)
    check_source(src_rank, comm)
    return shard(tensor.detach(), spec, comm.ranks[src_rank], comm=comm)


@public
def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
) -> None:
    """Replace a parameter of a module by a ShardedTensor with the values of rank `src_rank`.

    The module then reads plain inputs of embedding, embedding_bag and linear as this rank's own batch. A parameter on
    the meta device gets local tensors without values.

    >>> from shardwise.geometry import ChunkSpec
    >>> layer = nn.Linear(4, 2)
    >>> shard_parameter(layer, "weight", ChunkSpec(0, ranks=1))
    >>> type(layer.weight).__name__, tuple(layer.weight.shape)
    ('ShardedTensor', (2, 4))
    """
    tensor = _find_parameter(module, param_name)
    hold_sharded_parameters(
        [(tensor, _put_sharded_parameter(module, param_name, sharding_spec, src_rank, process_group))]
    )


def _put_sharded_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int, process_group: GroupOrComm | None
) -> ShardedTensor:
    tensor = _find_parameter(module, param_name)
    try:
        sharded = shard_or_allocate(tensor, sharding_spec, src_rank, process_group)
    except (DisagreementError, LayoutError, TypeError) as error:
        kind = LayoutError if isinstance(error, LayoutError) else type(error)
        raise kind(f"{type(module).__name__}.{param_name}: {error}") from None
    # nn.Parameter keeps the class of a tensor subclass and marks it as a parameter.
    parameter = cast(ShardedTensor, nn.Parameter(sharded, requires_grad=tensor.requires_grad))
    module.register_parameter(param_name, cast(nn.Parameter, parameter))
    register_local_batch_hooks(module)
    return parameter


def _find_parameter(module: nn.Module, param_name: str) -> torch.Tensor:
    """Return a parameter that can be sharded, or raise."""
    if not hasattr(module, param_name):
        text = f"{type(module).__name__} has no attribute `{param_name}`"
        owner, _, own = param_name.rpartition(".")
        known = dict(module.named_parameters())
        if param_name in known:
            text += f"; a module in it has it: shard_parameter(module.get_submodule({owner!r}), {own!r}, spec)"
        elif near := difflib.get_close_matches(param_name, known, n=2):
            text += f"; near it: {', '.join(near)}"
        raise AttributeError(text)
    tensor = getattr(module, param_name)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"Expected {type(module).__name__}.{param_name} to be a Tensor, but found {type(tensor).__name__}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"param: {param_name} is not a contiguous Tensor; make it contiguous before it is sharded")
    return tensor


@public
def shard_module(
    module: M,
    plan: ShardingPlan | ModelPlan | str | os.PathLike[str],
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
    *,
    init: Initialiser | None = None,
) -> M:
    """Shard a model in place by a plan, or the file of one, and return it. Every rank calls it.

    Optimizers that hold the model's parameters hold the sharded ones afterwards, with their state.

    Parameters on the meta device are allocated in their local parts only. They get values from `init(model)`, which may
    load a checkpoint, or else from their modules' `reset_parameters`: the same values for every layout.

    >>> from shardwise.geometry import ChunkSpec
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> model = shard_module(model, ShardingPlan({"0.weight": ChunkSpec(0, ranks=1)}))
    >>> type(model[0].weight).__name__
    'ShardedTensor'
    """
    plan = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    if not isinstance(plan, ShardingPlan | ModelPlan):
        raise TypeError(
            "shard_module takes a ShardingPlan or a ModelPlan, such as ModelPlan(Mesh.of(tp=2), {'*.weight': 'S(0)'}), "
            f"or the path of a plan's file; got {type(plan).__name__}"
        )
    if process_group is None and isinstance(plan, ModelPlan):
        process_group = plan.device_mesh
    comm = resolve_comm(process_group)
    missing = MissingValues(module, init)

    def check() -> PlanFields:
        check_source(src_rank, comm)
        fields = (
            _check_model_plan(module, plan, comm)
            if isinstance(plan, ModelPlan)
            else _check_named_plan(module, plan, comm)
        )
        missing.find_sources()
        return {"src_rank": src_rank, "init": init is not None, **fields}

    check_on_all_ranks(comm, check)
    heads = find_cut_heads(plan, module) if isinstance(plan, ModelPlan) else []
    before = dict(module.named_parameters(remove_duplicate=False))
    if isinstance(plan, ModelPlan) and plan.stages is not None:
        staged = take_stages(module, plan, comm)
        missing.leave_stages(staged.skeleton, staged.comm)
        shard_by_patterns(module, staged.inner, 0, staged.comm)
    elif isinstance(plan, ModelPlan):
        shard_by_patterns(module, plan, src_rank, comm)
    else:
        _shard_by_names(module, plan, src_rank, process_group)
    after = [(before.get(name), p) for name, p in module.named_parameters(remove_duplicate=False)]
    if isinstance(plan, ModelPlan) and plan.stages is not None:
        left = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        drop_parameters([parameter for name, parameter in before.items() if name not in left])
    hold_sharded_parameters([(w, p) for w, p in after if w is not None and w is not p and isinstance(p, ShardedTensor)])
    for text in heads if comm.rank == comm.ranks[0] else ():
        warnings.warn(text, stacklevel=3)
    missing.fill()
    check_on_all_ranks(comm, missing.check)
    _log_sharded(module, plan, comm)
    register_state_dict_functions()
    route_torch_compile()
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]  # untyped in torch
    return module


def _log_sharded(module: nn.Module, plan: ShardingPlan | ModelPlan, comm: Comm) -> None:
    """Say what became of a model, on its first rank."""
    if comm.rank != comm.ranks[0] or not _log.isEnabledFor(logging.INFO):
        return
    sharded = [p for p in module.parameters() if isinstance(p, ShardedTensor)]
    held = sum(part.nbytes for p in sharded for part in p.local_parts)
    whole = sum(p.numel() * p.dtype.itemsize for p in sharded)
    where = f"on {plan.mesh}, inputs {plan.input_plan}" if isinstance(plan, ModelPlan) else name_ranks(comm.ranks)
    kind, count = type(module).__name__, len(sharded)
    sizes = format_bytes(held), format_bytes(whole)
    _log.info("%s is sharded %s: %d parameters, %s of %s on rank %d", kind, where, count, *sizes, comm.rank)


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Torch's functions of state dicts may have been loaded after the model was sharded."""
    register_state_dict_functions()


def _check_named_plan(module: nn.Module, plan: ShardingPlan, comm: Comm) -> PlanFields:
    """Check a plan by names against a model and ranks; return what ranks compare of it."""
    layouts = _check_plan_layouts(module, plan)
    _check_all_meta_listed(module, plan)
    check_ranks(layouts, comm)
    sharders = {name: type(rule).__name__ for name, rule in plan.plan.items() if isinstance(rule, Sharder)}
    outputs = {f"output of {path!r}": type(spec).__name__ for path, spec in (plan.output_plan or {}).items()}
    return {**layout_texts(layouts), **sharders, **outputs, "return_local_tensor": plan.return_local_tensor or []}


def _shard_by_names(module: nn.Module, plan: ShardingPlan, src_rank: int, group: GroupOrComm | None) -> None:
    for name, rule in plan.plan.items():
        path, _, last = name.rpartition(".")
        parent = module.get_submodule(path)
        if isinstance(rule, Sharder):
            setattr(parent, last, _run_sharder(name, rule, module.get_submodule(name)))
        elif not isinstance(getattr(parent, last), ShardedTensor):  # else it is shared, and done under another name
            others = _other_names(module, name)
            _put_sharded_parameter(parent, last, rule, src_rank, group)
            _assign_shared_parameter(module, getattr(parent, last), others)
    for path, spec in (plan.output_plan or {}).items():
        reshard_output(module.get_submodule(path), spec)
    for path in plan.return_local_tensor or ():
        collect_local_shard(module.get_submodule(path))


def _run_sharder(name: str, sharder: Sharder, module: nn.Module) -> nn.Module:
    made: object = sharder.shard(module)
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise TypeError(f"{type(sharder).__name__}.shard() returns the module to put at '{name}', got {kind}")
    return made


def _other_names(module: nn.Module, name: str) -> list[str]:
    """The other names of a parameter that a model has several times."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    return [other for other, tensor in tensors.items() if other != name and tensor is tensors.get(name)]


def _assign_shared_parameter(module: nn.Module, parameter: nn.Parameter, names: Iterable[str]) -> None:
    """Put a sharded parameter in the places of one that had several names."""
    for name in names:
        path, _, last = name.rpartition(".")
        parent = module.get_submodule(path)
        parent.register_parameter(last, parameter)
        register_local_batch_hooks(parent)


def _check_all_meta_listed(module: nn.Module, plan: ShardingPlan) -> None:
    """Raise if parameters on the meta device would be left there."""
    sharders = tuple(f"{name}." for name, rule in plan.plan.items() if isinstance(rule, Sharder))
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    planned = {id(t) for n, t in tensors if n in plan.plan}
    left = [n for n, t in tensors if t.is_meta and id(t) not in planned and not n.startswith(sharders)]
    if left:
        raise ValueError(
            f"{', '.join(left[:3])}{' ...' * (len(left) > 3)}: {len(left)} tensors on the meta device are not in the "
            "plan and would stay without values; list them, or use a ModelPlan, which replicates what has no pattern"
        )


def _check_model_plan(module: nn.Module, plan: ModelPlan, comm: Comm) -> PlanFields:
    """Check a plan by patterns against a model and ranks; return what ranks compare of it."""
    specs = plan.specs(module)
    plan.resharded(module), plan.gather_dtypes(module), plan.activation_modules(module), find_recomputed(module, plan)
    if plan.stages is not None:
        find_units(module, plan.assign_stages({name: layout.shape for name, _, layout in plan.layouts(module)}))
    check_mesh(plan.mesh, comm, whole=plan.input_plan is not None)
    layouts = lay_out_specs(specs, dict(module.named_parameters(remove_duplicate=False)))
    return {
        **layout_texts(layouts),
        "mesh": str(plan.mesh),
        "input_plan": plan.input_plan,
        "output_plan": plan.output_plan,
        "reshard_after_forward": plan.reshard_after_forward,
        "prefetch_bytes": plan.prefetch_bytes,
        "gather_dtype": str(plan.gather_dtype),
        "pad_inputs": dict(plan.pad_inputs or {}),
        "activations": str(plan.activations),
        "stages": str(plan.stages),
        "attention": plan.attention,
        "recompute": str(plan.recompute),
    }


def shard_by_patterns(module: nn.Module, plan: ModelPlan, src_rank: int, group: Comm) -> None:
    """Shard every parameter; one with several names stays one."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    resharded = plan.resharded(module)
    for name, spec in plan.specs(module).items():
        tensor, (path, _, last) = tensors[name], name.rpartition(".")
        if id(tensor) not in made:
            sharded = shard_or_allocate(tensor.detach().contiguous(), spec, src_rank, group)
            made[id(tensor)] = nn.Parameter(sharded, requires_grad=tensor.requires_grad)
        parameter = made[id(tensor)]
        if name in resharded and isinstance(parameter, ShardedTensor):
            mark_for_resharding(parameter, AUTOMATIC if plan.reshard_after_forward is None else ALWAYS)
        if isinstance(parameter, ShardedTensor) and (axes := plan.pinned_axes(spec)):
            pin_parameter(parameter, axes)
        parent = module.get_submodule(path)
        parent.register_parameter(last, parameter)
        if plan.input_plan is None:
            register_local_batch_hooks(parent)
    if plan.input_plan is not None:
        _replicate_buffers(module, plan, src_rank, group)
        register_input_hooks(module, plan, group)
        register_activation_hooks(module, plan)
    register_casts(module, plan.gather_dtypes(module))
    _compute_again(module, find_recomputed(module, plan))
    register_prefetch(module, plan.prefetch_bytes)
    adapt_methods(module, plan, group)


def find_blocks(model: nn.Module) -> list[str]:
    """The modules of the outermost lists of a model: its layers.

    >>> find_blocks(nn.Sequential(nn.Embedding(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))
    ['1.0', '1.1']
    """
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    parts = dict(model.named_modules())
    return [f"{name}.{child}" for name in outer for child, _ in parts[name].named_children()]


def find_recomputed(module: nn.Module, plan: ModelPlan) -> list[str]:
    """The names of the modules that a plan has computed again in the backward pass.

    >>> from shardwise.geometry import Mesh
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    >>> [find_recomputed(model, ModelPlan(Mesh.of(dp=2), {}, recompute=r)) for r in (True, ["0"], None)]
    [['1.0', '1.1'], ['0'], []]
    """
    if not plan.recompute:
        return []
    if plan.recompute is not True:
        return list(match_patterns(plan.recompute, [name for name, _ in module.named_modules() if name], "module"))
    if not (blocks := find_blocks(module)):
        raise PlanError(
            f"{type(module).__name__} has no list of blocks (nn.ModuleList) to compute again; name modules by "
            "patterns, as in recompute=['layers.*']"
        )
    return blocks


def _compute_again(module: nn.Module, names: Sequence[str]) -> None:
    """Let modules keep their inputs only, and compute what they need for the backward pass a second time."""
    for name in names:
        part = module.get_submodule(name)
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, context_fn=_second_time)


def _second_time() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The second time, outside of the model's forward pass, plain tensors are read as in it."""
    return nullcontext(), plain_as_replicated()


def _replicate_buffers(module: nn.Module, plan: ModelPlan, src_rank: int, group: Comm) -> None:
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(
                name,
                shard_or_allocate(buffer.contiguous(), plan.replicated, src_rank, group),
                persistent=name not in part._non_persistent_buffers_set,
            )


@public
def check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    """Raise PlanError if a plan does not fit the model: unknown names, layouts that do not fit, or conflicts.

    >>> from shardwise.geometry import ChunkSpec
    >>> check_plan(nn.Linear(4, 8), ShardingPlan({"weight": ChunkSpec(0, ranks=2)}))
    >>> check_plan(nn.Linear(4, 8), ShardingPlan({"wieght": ChunkSpec(0, ranks=2)}))
    Traceback (most recent call last):
    ...
    AttributeError: Linear has no attribute `wieght`; near it: weight
    """
    _check_plan_layouts(module, plan)


def _check_plan_layouts(module: nn.Module, plan: ShardingPlan) -> dict[str, Layout]:
    """Check a plan without ranks; return the layouts of its parameters."""
    sharded = [name for name, rule in plan.plan.items() if isinstance(rule, Sharder)]
    specs, tensors = OutputSpecs(), {}
    for name, rule in plan.plan.items():
        path, _, last = name.rpartition(".")
        if isinstance(rule, Sharder):
            _check_sharder_path(module, name, sharded)
        elif isinstance(rule, ShardingSpec):
            _check_free_of_sharders("parameter", name, path, sharded)
            specs[name], tensors[name] = rule, _find_parameter(module.get_submodule(path), last)
        else:
            raise TypeError(
                f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', got {type(rule).__name__}"
            )
    _check_outputs(module, plan)
    layouts = lay_out_specs(specs, tensors)
    _check_shared(layouts, tensors)
    return layouts


def _check_outputs(module: nn.Module, plan: ShardingPlan) -> None:
    for path, spec in (plan.output_plan or {}).items():
        module.get_submodule(path)
        if not isinstance(spec, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{path}', got {type(spec).__name__}")
    for path in plan.return_local_tensor or ():
        module.get_submodule(path)


def _check_shared(layouts: dict[str, Layout], tensors: dict[str, torch.Tensor]) -> None:
    """Raise if a parameter with several names has several layouts."""
    first: dict[int, str] = {}
    for name, layout in layouts.items():
        other = first.setdefault(id(tensors[name]), name)
        if layouts[other] != layout:
            raise PlanError(f"{other} and {name} are one parameter, and their specs differ; use the same spec for both")


def _check_sharder_path(module: nn.Module, name: str, sharded: list[str]) -> None:
    if name == "":
        raise KeyError("Module path must not be empty for custom sharder! Call its shard() on the model yourself")
    module.get_submodule(name)
    _check_free_of_sharders("module", name, name.rpartition(".")[0], sharded)


def _check_free_of_sharders(kind: str, name: str, path: str, sharded: list[str]) -> None:
    for other in sharded:
        if path == other or path.startswith(other + "."):
            raise RuntimeError(
                f"ShardingPlan is in-valid, trying to shard a {kind}: {name}, but there's already a Sharder entry "
                f"for module {other}, {kind} sharding should not conflict with the submodule tree that a Sharder "
                "is working with!"
            )


@public
def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Make a module lay its sharded output out by a spec; other outputs pass.

    >>> from shardwise.geometry import ChunkSpec
    >>> reshard_output(nn.ReLU(), ChunkSpec(0, ranks=1))
    ReLU()
    """

    def hook(_module: nn.Module, _input: Any, output: Any) -> Any:
        return output.redistribute(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


@public
def collect_local_shard(module: nn.Module) -> nn.Module:
    """Make a module return its rank's local tensor in place of a sharded output.

    A chunk of length 1 loses the dim that was cut: rank 2 of a (4, 16) tensor over 4 ranks returns shape (16,).

    >>> collect_local_shard(nn.ReLU())(torch.ones(1))
    tensor([1.])
    """

    def hook(_module: nn.Module, _input: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        local, dim = output.local_tensor(), output.sharding_spec().dropped_dim
        return local.squeeze(dim) if dim is not None and local.size(dim) == 1 else local

    module.register_forward_hook(hook)
    return module
