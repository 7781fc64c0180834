"""An optimizer over the local tensors of sharded parameters, whose state is saved and loaded by parameter name.

State that has its parameter's shape (momenta, averages) is itself a ShardedTensor of the parameter's layout: it is
checkpointed and redistributed like the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from shardwise.comm import gather_values
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


def _make_state_value(told: Mapping[str, Any], parameter: ShardedTensor) -> Any:
    if "dtype" not in told:
        return told["value"]
    dtype, device = getattr(torch, told["dtype"]), parameter.device
    if "value" in told:
        return torch.tensor(told["value"], dtype=dtype, device="cpu" if told["on_host"] else device)
    return wrap(parameter.sharding, (), parameter.comm, dtype=dtype, device=device)


def _lay_out_like_parameter(name: str, key: str, value: Any, parameter: ShardedTensor) -> Any:
    """Return a copy of a state, laid out as its parameter is."""
    if isinstance(value, ShardedTensor):
        return value.clone() if value.sharding == parameter.sharding else value.redistribute(parameter.sharding)
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
