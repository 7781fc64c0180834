"""Where do the values of a model on the meta device come from? What none of these fills is an error that names it.

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
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.nn.lookup_routes import owned_rows
from shardwise.nn.plan import PlanFields
from shardwise.tensor.sharded_tensor import ShardedTensor

Initialiser: TypeAlias = Callable[[nn.Module], object]
RESET_METHODS = ("reset_parameters", "_reset_parameters")
_PATTERN = 0xA5


class MissingValues:
    """The tensors of a model that have no values, and where each gets them from."""

    def __init__(self, module: nn.Module, init: Initialiser | None) -> None:
        self.module, self.init = module, init
        self.owners = {path: part for path, part in module.named_modules() if _meta_names(part)}
        self.buffers: dict[str, Tensor] = {}

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
            for part in self.owners.values():
                _reset(part)
        else:
            self._reset_owners_of_lost_buffers()
        self._fill_buffers(lambda part, name: name in part._non_persistent_buffers_set)
        if self.init is not None:
            self.init(self.module)
        self._fill_buffers(lambda part, name: _is_without_values(part._buffers[name]))

    def _reset_owners_of_lost_buffers(self) -> None:
        """Run `reset_parameters` where a buffer is in no checkpoint and no constructor made it."""
        for path, part in self.owners.items():
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
    fill = next((f for m in module.modules() if (f := getattr(m, "_init_weights", None)) is not None), None)
    if fill is None:
        return {}
    twin = copy.copy(part)
    twin._parameters = {name: _put_on_meta(parameter) for name, parameter in part._parameters.items()}
    twin._buffers = {name: _allocate_like(buffer) for name, buffer in part._buffers.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        fill(twin)
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

    A default is no answer: the module may have been made with another value.
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
