"""Methods that models of transformers and peft have besides `forward`, made to work on sharded parameters.

- `generate`: all ranks generate for the whole batch in step, so that no rank stops while others wait for it. Where
  each rank passes its own rows, the rows of all are gathered first, and each rank gets those of its own back.
- `save_pretrained`: the tensors are gathered on the first rank, which writes; every rank calls it, and every rank
  raises what went wrong.

- `torch.autograd.Function`s that stand beside a model's classes in its files take ShardedTensors.

A module keeps its class's name and bases: its class becomes a subclass with these methods, found by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import pytree
from shardwise.comm import Comm, DisagreementError, agree
from shardwise.geometry import Shard
from shardwise.nn.inputs import place_inputs, register_input_hooks, whole_batch_inputs
from shardwise.nn.model_plan import ModelPlan
from shardwise.tensor.autograd_function import register_autograd_function
from shardwise.tensor.sharded_tensor import ShardedTensor

_METHODS = ("generate", "save_pretrained")


@dataclass(frozen=True)
class ShardedBy:
    """The plan and the ranks of a sharded module."""

    plan: ModelPlan
    comm: Comm

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedBy:
        return self  # copies of a model are on the same ranks


def adapt_methods(module: nn.Module, plan: ModelPlan, comm: Comm) -> None:
    """Give a model's `generate` and `save_pretrained` a form for sharded parameters, wherever a part has them."""
    for part in module.modules():
        kind = type(part)
        names = tuple(name for name in _METHODS if callable(getattr(kind, name, None)))
        if names:
            part.__class__ = _derive_class(kind, names)  # type: ignore[arg-type]  # a class is hashable
            part.__dict__["_sharded_by"] = ShardedBy(plan, comm)
            part.__dict__.pop("_compiled_call", None)  # of transformers' generate(); in a copy it is the original's
        if "generate" in names and part is not module and plan.input_plan is not None:
            register_input_hooks(part, plan, comm)  # a wrapper's generate() calls the forward of the model inside


def adapt_functions(module: nn.Module) -> None:
    """Let the autograd Functions that are defined in the files of a model's classes take ShardedTensors."""
    for name in {kind.__module__ for part in module.modules() for kind in type(part).__mro__}:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(value, type) and issubclass(value, torch.autograd.Function) and value.__module__ == name:
                register_autograd_function(value)


@cache
def _derive_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    made = {"generate": _generate, "save_pretrained": _save_pretrained}
    body: dict[str, Any] = {name: made[name](getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**body, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _generate(original: Any) -> Any:
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        by: ShardedBy = self.__dict__["_sharded_by"]
        kwargs = {**_without_compiling(self, kwargs), **kwargs}
        placements = by.plan.input_placements or ()
        if not any(isinstance(p, Shard) for p in placements):
            with whole_batch_inputs():
                return pytree.tree_map(_to_plain, original(self, *args, **kwargs))
        placed = place_inputs((args, kwargs), by.plan.mesh, placements, by.comm)
        batch = next(t for t in pytree.tree_leaves(placed) if isinstance(t, ShardedTensor) and t.ndim > 0)
        args, kwargs = pytree.tree_map(_to_plain, placed)
        with whole_batch_inputs():
            made = original(self, *args, **kwargs)
        return pytree.tree_map(lambda value: _take_own_rows(_to_plain(value), batch), made)

    generate.__doc__ = original.__doc__
    return generate


def _without_compiling(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What keeps transformers from compiling for a static cache on a GPU, which it does unless told otherwise.

    torch.compile leaves out what touches ShardedTensors; CUDA graphs of the little that is left would be in the way.
    """
    settings = getattr(model, "generation_config", None)
    asked = given.get("compile_config") or getattr(settings, "compile_config", None)
    return {"disable_compile": True} if asked is None and hasattr(settings, "disable_compile") else {}


def _to_plain(value: Any) -> Any:
    return value.full() if isinstance(value, ShardedTensor) else value


def _take_own_rows(value: Any, batch: ShardedTensor) -> Any:
    """The rows of a result that belong to this rank's rows of the batch; a row may have several (beams, samples)."""
    length = int(batch.shape[0])
    if not isinstance(value, Tensor) or value.ndim == 0 or length == 0 or value.shape[0] % length:
        return value
    box = batch.sharding.pieces_of(batch.comm.rank)[0].box
    each = value.shape[0] // length
    return value[box.offsets[0] * each : (box.offsets[0] + box.sizes[0]) * each]


def _save_pretrained(original: Any) -> Any:
    def save_pretrained(
        self: nn.Module, save_directory: Any, *args: Any, state_dict: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        comm = self.__dict__["_sharded_by"].comm
        whole = gather_state(self.state_dict() if state_dict is None else state_dict, comm, self)
        result, problem = None, None
        if comm.rank == comm.ranks[0]:
            try:
                result = original(self, save_directory, *args, state_dict=whole, **kwargs)
            except Exception as error:  # of any kind: the other ranks must hear of it
                problem = error
        try:
            agree(comm, {}, label="save_pretrained", what="calls", problem=None if problem is None else str(problem))
        except DisagreementError:
            if problem is not None:
                raise problem from None
            raise
        return result

    save_pretrained.__doc__ = original.__doc__
    return save_pretrained


def gather_state(state: Mapping[str, Any], comm: Comm, module: nn.Module | None = None) -> dict[str, Any]:
    """A state with its tensors whole, in CPU memory of the first rank; empty on the others.

    Parameters that a module has under several names stay one tensor.
    """
    first = comm.ranks[0]
    aliases = _find_aliases(module) if module is not None else {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        same = aliases.get(name, name)
        if same != name and same in whole:
            whole[name] = whole[same]
        elif isinstance(value, ShardedTensor):
            with torch.no_grad():
                found = value.gather(first)
            whole[name] = None if found is None else found.cpu()
        else:
            whole[name] = value.cpu() if isinstance(value, Tensor) else value
    return whole if comm.rank == first else {}


def _find_aliases(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter that has several."""
    names: dict[int, str] = {}
    return {n: names.setdefault(id(p), n) for n, p in module.named_parameters(remove_duplicate=False)}
