"""State dicts the way torch's functions make them: `torch.distributed.checkpoint.state_dict` and ShardedTensors.

`get_model_state_dict` and its relatives know torch's own classes. They are taught ours, once their module is loaded:

1. `full_state_dict=True` gathers ShardedTensors, as it gathers DTensors.
2. `get_optimizer_state_dict` and `set_optimizer_state_dict` take a `ShardedOptimizer`, whose state is by name already.
   Whole tensors that are set are laid out as the optimizer's are; with `broadcast_from_rank0` rank 0 has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch import STATE_DICT, STATE_DICT_UTILS, pytree
from shardwise.nn.optimizer import ShardedOptimizer
from shardwise.tensor import ShardedTensor, shard

_TAUGHT = "__shardwise__"


def teach_state_dict_functions() -> None:
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
