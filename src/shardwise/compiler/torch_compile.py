"""`torch.compile` of a sharded module is `shardwise.compile` of it.

1. `torch.compile(model)` returns torch's own wrapper of the model, a module with its parameters and methods. Where the
   model has sharded parameters, the wrapper's forward is what `shardwise.compile` returns; dynamo sees none of it.
2. `model.compile()` passes the module's own call, which is compiled in the same way.
3. Everything else goes to torch as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from shardwise.compiler.compiled import CompiledProgram, compile
from shardwise.tensor.sharded_tensor import ShardedTensor


def route_torch_compile() -> None:
    """Let `torch.compile` hand sharded modules over, from now on."""
    original: Any = torch.compile
    if hasattr(original, "_routes_sharded_modules"):
        return

    @wraps(original)
    def torch_compile(model: Any = None, **options: Any) -> Any:
        module = model if isinstance(model, nn.Module) else _module_of_call(model)
        if module is None or options.get("disable", False) or not _is_sharded(module):
            return original(model, **options)
        program = _compile_sharded(model, **options)
        if module is not model:
            return program
        wrapper = original(model, **options)
        wrapper.forward = program
        wrapper.__dict__["__deepcopy__"] = lambda memo: torch_compile(copy.deepcopy(model, memo), **options)
        return wrapper

    torch_compile._routes_sharded_modules = True  # type: ignore[attr-defined]  # a mark of this function
    torch.compile = torch_compile


def _module_of_call(function: Any) -> nn.Module | None:
    """The module whose own call this is, as `nn.Module.compile` passes it."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) and function.__name__ == "_call_impl" else None


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, ShardedTensor) for parameter in module.parameters())


def _compile_sharded(
    program: Callable[..., Any], *, backend: Any = "inductor", **without_meaning_here: Any
) -> CompiledProgram:
    return compile(program, backend=backend)
