"""Mixed precision as fully sharded training has it: parameters are gathered and used in a dtype of fewer bytes.

1. While a module's forward runs, its parameters are seen in the `gather_dtype` of the plan, and its floating-point
   inputs are cast to it. Outside of it they are what they are: optimizers and checkpoints see the full precision.
2. A parameter is cast before it is gathered, so that fewer bytes travel; also where it is gathered again or ahead.
3. Terms of a gradient travel in the smaller dtype, are added up in float32, and reach the parameter unrounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._nests import map_nest
from shardwise._torch import count_running_calls
from shardwise.ops.engine.gathers.gather_again import copy_mark
from shardwise.tensor.sharded_tensor import ShardedTensor

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
