"""An optimizer over the local tensors of sharded parameters, whose state is saved and loaded by parameter name.

State that has its parameter's shape (momenta, averages) is itself a ShardedTensor of the parameter's layout: it is
checkpointed and redistributed like the parameter.

Optimizers that were made before a model was sharded hold its whole parameters, which nothing trains any more.

1. `hold_sharded_parameters` finds the optimizers that exist and puts the sharded parameters in their groups, in place.
   Their state is sharded along: each rank takes its parts of its own values.
2. An optimizer that gets whole parameters afterwards, from a list made before, raises at its first step.

State dicts the way torch's functions make them: `torch.distributed.checkpoint.state_dict` and ShardedTensors.

`get_model_state_dict` and its relatives know torch's own classes. They are taught ours, once their module is loaded:

1. `full_state_dict=True` gathers ShardedTensors, as it gathers DTensors.
2. `get_optimizer_state_dict` and `set_optimizer_state_dict` take a `ShardedOptimizer`, whose state is by name already.
   Whole tensors that are set are laid out as the optimizer's are; with `broadcast_from_rank0` rank 0 has them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._torch import STATE_DICT, STATE_DICT_UTILS, pytree
from shardwise._tree import map_nest
from shardwise.comm import gather_values
from shardwise.geometry import Layout
from shardwise.tensor.creation import redistribute_many, shard
from shardwise.tensor.move import replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

OptimizerState: TypeAlias = dict[str, Any]
# These look at a parameter as a whole (norms, row means, matrix products), so that a part of it is not enough.
_WHOLE_PARAMETER_OPTIMIZERS = tuple(
    getattr(optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(optim, name)
)


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, nn.Parameter | ShardedTensor]]:
    """Yield the parameters of a module and the ShardedTensors among its plain attributes, each once, by name.

    >>> [name for name, _ in named_params_with_sharded_tensor(nn.Linear(2, 1))]
    ['weight', 'bias']
    """
    seen: set[int] = set()
    for path, part in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(part).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) not in seen:
            yield name, parameter


def local_tensors(parameter: Tensor) -> list[Tensor]:
    """Return what an optimizer on this rank works on: the local tensors of a sharded parameter, or the parameter."""
    return list(parameter.local_parts) if isinstance(parameter, ShardedTensor) else [parameter]


_REPLACED = "_shardwise_replaced"  # on a parameter: a sharded one has taken its place in a module


def hold_sharded_parameters(pairs: Sequence[tuple[Tensor, ShardedTensor]]) -> None:
    """Let the optimizers that hold whole parameters hold the sharded ones in their place, with their state.

    >>> from shardwise import ChunkSpec, shard
    >>> whole = nn.Parameter(torch.ones(4))
    >>> optimizer = optim.SGD([whole], lr=0.5)
    >>> sharded = nn.Parameter(shard(torch.ones(4), ChunkSpec(0, ranks=1)))
    >>> hold_sharded_parameters([(whole, sharded)])
    >>> optimizer.param_groups[0]["params"][0] is sharded
    True
    """
    sharded_by_id = {id(whole): sharded for whole, sharded in pairs}
    for whole, _ in pairs:
        whole.__dict__[_REPLACED] = True
    existing = _find_optimizers()
    own = [o for o in existing if isinstance(o, ShardedOptimizer)]
    inner = {id(o._optim) for o in own}
    for optimizer in own:
        optimizer._replace(sharded_by_id)
    for optimizer in existing:
        if id(optimizer) in inner or isinstance(optimizer, ShardedOptimizer):
            continue
        for group in optimizer.param_groups:
            group["params"][:] = [sharded_by_id.get(id(p), p) for p in group["params"]]
        for whole in [p for p in optimizer.state if id(p) in sharded_by_id]:
            sharded = sharded_by_id[id(whole)]
            optimizer.state[sharded] = shard_state(optimizer.state.pop(whole), sharded)


def drop_parameters(parameters: Sequence[Tensor]) -> None:
    """Let optimizers forget parameters, with their state: those of stages that other ranks have.

    >>> kept, gone = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    >>> optimizer = optim.SGD([kept, gone], lr=0.5)
    >>> drop_parameters([gone])
    >>> [p.shape for p in optimizer.param_groups[0]["params"]]
    [torch.Size([2])]
    """
    gone, optimizers = {id(p) for p in parameters}, _find_optimizers()
    inner = {id(o._optim) for o in optimizers if isinstance(o, ShardedOptimizer)}
    for optimizer in (o for o in optimizers if id(o) not in inner):
        if isinstance(optimizer, ShardedOptimizer):
            optimizer._drop(gone)
            continue
        for group in optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if id(p) not in gone]
        for parameter in [p for p in optimizer.state if id(p) in gone]:
            del optimizer.state[parameter]


def move_parameters(parameters: Sequence[ShardedTensor], layouts: Sequence[Layout]) -> list[nn.Parameter]:
    """The same parameters in other layouts, in one exchange with their gradients and the state of their optimizers.

    Optimizers hold the new ones afterwards. Called on every rank.

    >>> from shardwise import ChunkSpec, run_local, shard
    >>> def body(comm):
    ...     weight = nn.Parameter(shard(torch.ones(4), ChunkSpec(0, ranks=2)))
    ...     optimizer = optim.SGD([weight], lr=1.0)
    ...     (moved,) = move_parameters([weight], [ChunkSpec(0, ranks=(1, 0)).layout((4,))])
    ...     return optimizer.param_groups[0]["params"][0] is moved
    >>> run_local(body, 2)
    [True, True]
    """
    jobs: list[tuple[ShardedTensor, Layout]] = [(p.detach(), to) for p, to in zip(parameters, layouts, strict=True)]
    put: list[Callable[[ShardedTensor], object]] = []
    optimizers = _find_optimizers()
    inner = {id(o._optim) for o in optimizers if isinstance(o, ShardedOptimizer)}
    for parameter, layout in zip(parameters, layouts, strict=True):
        for optimizer in optimizers:
            if id(optimizer) in inner:
                continue
            if isinstance(optimizer, ShardedOptimizer):
                optimizer._gather_local_state(parameter)
            state = (optimizer._optim if isinstance(optimizer, ShardedOptimizer) else optimizer).state
            for key, value in state[parameter].items() if parameter in state else ():
                if isinstance(value, ShardedTensor) and value.sharding == parameter.sharding:
                    jobs.append((value, layout))
                    put.append(partial(state[parameter].__setitem__, key))
    graded = [i for i, p in enumerate(parameters) if isinstance(p.grad, ShardedTensor)]
    jobs += [(cast(ShardedTensor, parameters[i].grad), layouts[i]) for i in graded]
    with torch.no_grad():
        moved = redistribute_many([tensor for tensor, _ in jobs], [to for _, to in jobs])
    made = [nn.Parameter(t, requires_grad=p.requires_grad) for t, p in zip(moved, parameters, strict=False)]
    for tensor, put_back in zip(moved[len(made) :], put, strict=False):
        put_back(tensor)
    for i, gradient in zip(graded, moved[len(made) + len(put) :], strict=True):
        made[i].grad = gradient
    hold_sharded_parameters([(old, cast(ShardedTensor, new)) for old, new in zip(parameters, made, strict=True)])
    return made


def _find_optimizers() -> list[Any]:
    """The optimizers of this process.

    An object refers to its class, and torch marks the classes of which it has made optimizers. `gc.get_objects` would
    hold objects that other threads are about to finish, tuples among them, which Python then refuses to complete.
    """
    kinds: set[type] = set()
    left: list[type] = [optim.Optimizer]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if hasattr(getattr(kind, "step", None), "hooked") or issubclass(kind, ShardedOptimizer):
            kinds.add(kind)
    referrers = gc.get_referrers(*kinds) if kinds else []
    return [o for o in referrers if type(o) in kinds and "param_groups" in vars(o)]


def shard_state(state: Any, parameter: ShardedTensor) -> Any:
    """A parameter's state with its tensors laid out like the parameter, those of other shapes replicated.

    Each rank takes its parts of its own values. Numbers, and tensors without dims, stay as they are.
    """

    def lay_out(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or value.ndim == 0:
            return value
        comm, alike = parameter.comm, value.shape == parameter.shape
        where = parameter.sharding if alike else replicated_layout(tuple(value.shape), comm.ranks)
        return shard(value, where, None, comm=comm)

    return map_nest(lay_out, state)


def _refuse_replaced(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step that would train nothing: each rank knows of its own model, and all models are the same."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [p for p in held if _REPLACED in p.__dict__ and p.grad is None]
    if stale:
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(held)} parameters as they were before shard_module "
            f"replaced them (the first has the shape {tuple(stale[0].shape)}): its step would train nothing; make it "
            "from model.parameters() again, after shard_module"
        )


register_optimizer_step_pre_hook(_refuse_replaced)


class GroupView(dict[str, Any]):
    """The options of a group of an optimizer on local tensors, with the sharded parameters as its `params`.

    Schedulers write options here. What looks at gradients (GradScaler) meets the sharded ones, and so decides the same
    on every rank.
    """

    def __init__(self, inner: dict[str, Any], parameters: list[Tensor]) -> None:
        super().__init__(inner, params=parameters)
        self._inner = inner

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params":
            self._inner[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class ShardedOptimizer(optim.Optimizer):
    """A torch optimizer, on the local tensors of sharded and plain parameters.

    It treats every element on its own, as SGD, Adam and most others do. Those that look at a parameter as a whole
    (LBFGS, Adafactor, Muon) are refused for parameters that are split: pass them the ShardedTensors themselves.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> optimizer = ShardedOptimizer({"weight": weight}, optim.SGD, lr=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.tolist(), optimizer.state_dict()["param_groups"][0]["params"]
    ([0.5, 0.5], ['weight'])
    """

    named_params: Mapping[str, Tensor]

    def __init__(
        self,
        named_params: Mapping[str, Tensor | ShardedTensor],
        optimizer_class: Callable[..., optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        if not callable(optimizer_class):
            raise TypeError(
                "ShardedOptimizer takes the class of an optimizer and its options, as in ShardedOptimizer(dict(model."
                f"named_parameters()), torch.optim.AdamW, lr=0.1); got {type(optimizer_class).__name__} as the class"
            )
        self.named_params = _collect_named_parameters(named_params)
        self._groups: list[list[str]] = [list(self.named_params)]
        tensors = [local for value in self.named_params.values() for local in local_tensors(value)]
        # A rank may hold no part of any parameter: torch takes an empty group, but no empty list.
        given: list[Any] = tensors or [{"params": []}]
        self._optim = optimizer_class(given, *optimizer_args, **optimizer_kwargs)
        _check_elementwise(self._optim, self.named_params)
        self._share()

    def _share(self) -> None:
        """Hold the very state, options and hooks of the wrapped optimizer, so that schedulers see one optimizer."""
        self.__dict__.update(vars(self._optim))
        groups = zip(self._optim.param_groups, self._groups, strict=True)
        self.param_groups = [GroupView(group, [self.named_params[n] for n in names]) for group, names in groups]

    def _drop(self, gone: set[int]) -> None:
        """Forget parameters by their ids."""
        kept = {name: p for name, p in self.named_params.items() if id(p) not in gone}
        for parameter in (p for name, p in self.named_params.items() if name not in kept):
            for local in local_tensors(parameter):
                self._optim.state.pop(local, None)
        self.named_params, self._groups = kept, [[n for n in names if n in kept] for names in self._groups]
        for group, names in zip(self._optim.param_groups, self._groups, strict=True):
            group["params"][:] = [local for name in names for local in local_tensors(kept[name])]
        self._share()

    def _gather_local_state(self, parameter: ShardedTensor) -> None:
        """Keep the state of a parameter as ShardedTensors under the parameter itself, until `_replace` cuts it."""
        if not any(held is parameter for held in self.named_params.values()):
            return
        states = [self._optim.state.pop(local, {}) for local in parameter.local_parts]
        alike = [k for k, v in (states[0] if states else {}).items() if isinstance(v, Tensor) and v.ndim]
        gathered = {k: wrap(parameter.sharding, tuple(s[k] for s in states), parameter.comm) for k in alike}
        if states and states[0]:
            self._optim.state[parameter] = {**states[0], **gathered}

    def _replace(self, sharded_by_id: Mapping[int, ShardedTensor]) -> None:
        """Hold sharded parameters in place of whole ones, and the parts of their state."""
        for name, whole in list(self.named_params.items()):
            sharded = sharded_by_id.get(id(whole))
            if sharded is None:
                continue
            self.named_params = {**self.named_params, name: sharded}
            if whole in self._optim.state:
                state = shard_state(self._optim.state.pop(whole), sharded)
                for slot, local in enumerate(sharded.local_parts):
                    self._optim.state[local] = {key: _take_local_slot(value, slot) for key, value in state.items()}
        for group, names in zip(self._optim.param_groups, self._groups, strict=True):
            group["params"][:] = [local for name in names for local in local_tensors(self.named_params[name])]
        self._share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or set to zero) all gradients."""
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step, on local tensors only; return what the closure returned."""
        return self._optim.step(closure) if closure is not None else self._optim.step()

    def init_state(self) -> None:
        """Make the state that the first step would make, and change no parameter: something to load a checkpoint into.

        It takes a step with gradients of zero and a learning rate of zero; parameters that have state are left out.
        Load before the next step, since counters are already at one step.

        >>> optimizer = ShardedOptimizer({"w": nn.Parameter(torch.ones(2))}, optim.Adam)
        >>> optimizer.init_state()
        >>> sorted(optimizer.state_dict()["state"]["w"])
        ['exp_avg', 'exp_avg_sq', 'step']
        """
        groups = self._optim.param_groups
        tensors = [t for group in groups for t in group["params"]]
        kept = [(t.grad, t) for t in tensors]
        rates = [group["lr"] for group in groups]
        for tensor in tensors:
            wanted = tensor.requires_grad and tensor not in self._optim.state
            tensor.grad = torch.zeros_like(tensor) if wanted else None
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
            self._optim.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            for grad, tensor in kept:
                tensor.grad = grad

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add parameters with their own options; `params` maps names to parameters (or lists such pairs)."""
        named = _collect_named_parameters(param_group["params"])
        twice = sorted(named.keys() & self.named_params.keys())
        if twice:
            raise ValueError(f"the parameters {twice} are in another group already; pass each parameter once")
        _check_elementwise(self._optim, named)
        locals_ = [local for value in named.values() for local in local_tensors(value)]
        self._optim.add_param_group({**param_group, "params": locals_})
        self.named_params = {**self.named_params, **named}
        self._groups.append(list(named))
        self._share()

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name; called on every rank when a rank holds no part of some parameter."""
        groups = zip(self._optim.param_groups, self._groups, strict=True)
        options = [{**_group_options(group), "params": list(names)} for group, names in groups]
        return {
            "state": {n: s for n, p in self.named_params.items() if (s := self._state_of(p))},
            "param_groups": options,
        }

    def _state_of(self, parameter: Tensor) -> OptimizerState:
        """Return the state of one parameter; tensors of the shape of the local tensors become sharded like it."""
        locals_ = local_tensors(parameter)
        states = [self._optim.state.get(local, {}) for local in locals_]
        if not isinstance(parameter, ShardedTensor):
            return dict(states[0])
        found: OptimizerState = {}
        for key, value in (states[0] if states else {}).items():
            parts = tuple(state[key] for state in states)
            alike = all(isinstance(p, Tensor) and p.shape == t.shape for p, t in zip(parts, locals_, strict=True))
            found[key] = wrap(parameter.sharding, parts, parameter.comm) if alike else value
        return found | _gather_missing_state(parameter, found)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and options from `state_dict()`, redistributed where the layouts differ."""
        names = [list(group["params"]) for group in state_dict["param_groups"]]
        if names != self._groups:
            raise ValueError(
                f"the state has the parameter groups {names}, this optimizer has {self._groups}; "
                "they must have the same names in the same order"
            )
        state: dict[int, OptimizerState] = {}
        groups, index = [], 0
        for group in state_dict["param_groups"]:
            first = index
            for name in group["params"]:
                for local_state in self._states_for(name, state_dict["state"].get(name, {})):
                    state |= {index: local_state} if local_state else {}
                    index += 1
            groups.append({**_group_options(group), "params": list(range(first, index))})
        self._optim.load_state_dict({"state": state, "param_groups": groups})
        self._share()

    def _states_for(self, name: str, state: Mapping[str, Any]) -> list[OptimizerState]:
        """Return the state of each local tensor of a parameter."""
        parameter = self.named_params[name]
        if not isinstance(parameter, ShardedTensor):
            return [dict(state)]
        laid_out = {key: _lay_out_like_parameter(name, key, value, parameter) for key, value in state.items()}
        return [
            {key: _take_local_slot(value, i) for key, value in laid_out.items()}
            for i in range(len(parameter.local_parts))
        ]


def _collect_named_parameters(params: object) -> dict[str, Tensor]:
    """Parameters by name, from a mapping or from pairs."""
    pairs = (
        list(params.items()) if isinstance(params, Mapping) else list(params) if isinstance(params, Iterable) else []
    )
    if not pairs or not all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in pairs):
        raise ValueError(
            "an optimizer's parameters are given by name, such as dict(model.named_parameters()): a param group's "
            "`params` maps names to parameters, and there is at least one"
        )
    return dict(pairs)


def _check_elementwise(optimizer: optim.Optimizer, named: Mapping[str, Tensor]) -> None:
    """Raise if an optimizer that needs whole parameters is to work on parts."""
    if not isinstance(optimizer, _WHOLE_PARAMETER_OPTIMIZERS):
        return
    cut = [name for name, p in named.items() if isinstance(p, ShardedTensor) and not _is_whole_on_every_rank(p)]
    if cut:
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} needs whole parameters, and ranks have parts of {len(cut)} parameters, such as "
            f"{cut[0]!r}; pass it the sharded parameters themselves: {kind}(model.parameters(), ...)"
            + ("; shardwise.nn.Muon computes each matrix on one rank" if kind == "Muon" else "")
        )


def _is_whole_on_every_rank(parameter: ShardedTensor) -> bool:
    held = parameter.sharding.elements_per_rank()
    return all(held.get(rank) == parameter.numel() for rank in parameter.comm.ranks)


def _group_options(group: Mapping[str, Any]) -> OptimizerState:
    return {key: value for key, value in group.items() if key != "params"}


def _gather_missing_state(parameter: ShardedTensor, found: Mapping[str, Any]) -> OptimizerState:
    """Return the state that only other ranks hold, counters with their values: every rank then has the same names."""
    comm = parameter.comm
    if set(comm.ranks) <= set(parameter.sharding.ranks):
        return {}
    mine = {key: _describe_state_value(value) for key, value in found.items()}
    everyone = gather_values(comm, mine, label="optimizer state").values()
    states: OptimizerState = {key: value for given in everyone for key, value in given.items()}
    return {key: _make_state_value(value, parameter) for key, value in states.items() if key not in found}


def _describe_state_value(value: Any) -> OptimizerState:
    """Return what another rank needs to know of a state: its dtype and, for a counter, its value and kind of device."""
    if not isinstance(value, Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    if isinstance(value, ShardedTensor):
        return {"dtype": dtype}
    return {"dtype": dtype, "value": value.tolist(), "on_host": value.device.type == "cpu"}


def _make_state_value(stored: Mapping[str, Any], parameter: ShardedTensor) -> Any:
    if "dtype" not in stored:
        return stored["value"]
    dtype, device = getattr(torch, stored["dtype"]), parameter.device
    if "value" in stored:
        return torch.tensor(stored["value"], dtype=dtype, device="cpu" if stored["on_host"] else device)
    return wrap(parameter.sharding, (), parameter.comm, dtype=dtype, device=device)


def _lay_out_like_parameter(name: str, key: str, value: Any, parameter: ShardedTensor) -> Any:
    """Return a copy of a state, laid out as its parameter is."""
    if isinstance(value, ShardedTensor):
        same = value.sharding == parameter.sharding
        # States of few bits (torchao's) have `to`, and no `clone`.
        return value.to(value.dtype, copy=True) if same else value.redistribute(parameter.sharding)
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
        raise ValueError(
            f"state {key!r} of {name!r} is a whole tensor of shape {tuple(value.shape)}; shard it like the parameter "
            "first: shard(value, parameter.sharding_spec())"
        )
    return value


def _take_local_slot(value: Any, slot: int) -> Any:
    if isinstance(value, ShardedTensor):
        return value.local_parts[slot]
    return value.clone() if isinstance(value, Tensor) else value


_TAUGHT = "__shardwise__"


def register_state_dict_functions() -> None:
    """Let torch's functions of state dicts know ShardedTensors and ShardedOptimizers, if their modules are loaded."""
    for name in (STATE_DICT_UTILS, STATE_DICT):
        _replace(name, "_gather_state_dict", _gather_sharded)
    _replace(STATE_DICT, "_get_optim_state_dict", _get_sharded)
    _replace(STATE_DICT, "_load_optim_state_dict", _load_sharded)


def _replace(module: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    loaded = sys.modules.get(module)
    theirs = getattr(loaded, name, None)
    if theirs is not None and not hasattr(theirs, _TAUGHT):
        ours = wraps(theirs)(make(theirs))
        setattr(ours, _TAUGHT, True)
        setattr(loaded, name, ours)


def _gather_sharded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def gather(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        whole = pytree.tree_map(lambda v: v.detach().full() if isinstance(v, ShardedTensor) else v, state_dict)
        return theirs(whole, *args, **kwargs)

    return gather


def _get_sharded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def get(model: nn.Module, optimizers: Sequence[Any], info: Any) -> Any:
        ours, others = _divide(optimizers)
        if not ours or not info.handle_optim:
            return theirs(model, optimizers, info)
        found = theirs(model, others, info) if others else {}
        for optimizer in ours:
            optimizer.init_state()
            state: Any = optimizer.state_dict()
            words = sys.modules[STATE_DICT]
            if info.flatten_optimizer_state_dict:
                state = _flatten(state)
            state = words._maybe_full_or_cpu_state_dict(state, info)
            found = _merge(found, state)
        return found

    return get


def _divide(optimizers: Sequence[Any]) -> tuple[list[ShardedOptimizer], tuple[Any, ...]]:
    ours = [o for o in optimizers if isinstance(o, ShardedOptimizer)]
    return ours, tuple(o for o in optimizers if not isinstance(o, ShardedOptimizer))


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if "param_groups" not in one or "param_groups" not in other:
        return {**one, **other}
    groups = [*one["param_groups"], *other["param_groups"]]
    return {"state": {**one["state"], **other["state"]}, "param_groups": groups}


def _flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """One level of names, as torch writes them: `state.<parameter>.<key>`, `param_groups.<parameter>.<option>`."""
    flat = {f"state.{name}.{key}": v for name, values in state["state"].items() for key, v in values.items()}
    for group in state["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return flat


def _unflatten(flat: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The state of `_flatten`, in the groups of another one."""
    state = {n: {k: flat[f"state.{n}.{k}"] for k in values} for n, values in like["state"].items()}
    groups = []
    for group in like["param_groups"]:
        first = group["params"][0]
        options = {k: flat.get(f"param_groups.{first}.{k}", v) for k, v in group.items() if k != "params"}
        groups.append({**options, "params": list(group["params"])})
    return {"state": state, "param_groups": groups}


def _load_sharded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def load(model: nn.Module, optimizers: Sequence[Any], state_dict: dict[str, Any], info: Any) -> None:
        parameters = dict(model.named_parameters())
        if not info.handle_optim or not any(isinstance(p, ShardedTensor) for p in parameters.values()):
            theirs(model, optimizers, state_dict, info)
            return
        if info.full_state_dict:
            state_dict = _lay_out_whole(state_dict, parameters, info.broadcast_from_rank0)
            info = replace(info, full_state_dict=False, broadcast_from_rank0=False)
        ours, others = _divide(optimizers)
        if others:
            theirs(model, others, state_dict, info)
        for optimizer in ours:
            optimizer.init_state()
            given = state_dict if "state" in state_dict else _unflatten(state_dict, optimizer.state_dict())
            names = set(optimizer.named_params)
            state = {name: values for name, values in given["state"].items() if name in names}
            groups = [group for group in given["param_groups"] if set(group["params"]) <= names]
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    return load


def _lay_out_whole(state_dict: dict[str, Any], parameters: Mapping[str, Tensor], from_rank0: bool) -> dict[str, Any]:
    """A state of whole tensors, nested or flat, with those of a sharded parameter's shape laid out as it is."""
    if from_rank0:
        state_dict = _broadcast_structure(state_dict)
    source = 0 if from_rank0 else None
    if "state" not in state_dict:
        return {key: _lay_out(value, parameters.get(_parameter_of(key)), source) for key, value in state_dict.items()}
    state = {
        name: {key: _lay_out(value, parameters.get(name), source) for key, value in values.items()}
        for name, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _parameter_of(key: str) -> str:
    """The parameter that a flat key such as `state.0.weight.exp_avg` is about."""
    return key.removeprefix("state.").rpartition(".")[0]


def _broadcast_structure(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's state on every rank; tensors of several elements are shapes on the others, which `shard` fills."""
    rank = dist.get_rank()
    hollow = pytree.tree_map(lambda v: _Shape(v.shape) if isinstance(v, Tensor) and v.dim() > 0 else v, state_dict)
    box = [hollow if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    received: Any = box[0]
    return state_dict if rank == 0 else received


@dataclass(frozen=True)
class _Shape:
    """The shape of a tensor that rank 0 has."""

    shape: torch.Size


def _lay_out(value: Any, parameter: Tensor | None, source: int | None) -> Any:
    whole = isinstance(value, Tensor | _Shape) and not isinstance(value, ShardedTensor)
    if not whole or not isinstance(parameter, ShardedTensor) or value.shape != parameter.shape:
        return value
    held = value if isinstance(value, Tensor) else None
    return shard(held, parameter.sharding, source, comm=parameter.comm)
