"""Sharded tensors that are plain attributes of a module, in its state dict and out of it.

Parameters and buffers need no hook. For other attributes:

    module._register_state_dict_hook(state_dict_hook)
    module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)

Registered on a root module or on any module below it, a hook covers that module and all below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.tensor.sharded_tensor import ShardedTensor


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add the attributes that are sharded tensors, of a module and all below it, to its state dict.

    >>> from shardwise.geometry import ChunkSpec
    >>> module = nn.Module()
    >>> module.table = ShardedTensor(ChunkSpec(0, ranks=1), 4, 2)
    >>> handle = module._register_state_dict_hook(state_dict_hook)
    >>> list(module.state_dict())
    ['table']
    """
    for owner, name, key in _plain_attributes(module, prefix):
        value = owner.__dict__[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set attributes of a module and all below it to the sharded tensors that a state dict holds for them.

    What was set is taken out of `state_dict` (`load_state_dict` hands over a copy), since a strict load would find it
    unexpected: it is neither parameter nor buffer.

    >>> from shardwise.geometry import ChunkSpec
    >>> module = nn.Module()
    >>> module.table = None
    >>> handle = module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)
    >>> table = ShardedTensor(ChunkSpec(0, ranks=1), 4, 2)
    >>> module.load_state_dict({"table": table})
    <All keys matched successfully>
    >>> module.table is table
    True
    """
    for owner, name, key in list(_plain_attributes(module, prefix)):
        if isinstance(value := state_dict.get(key), ShardedTensor):
            setattr(owner, name, value)
            if name in owner.__dict__:
                del state_dict[key]


def _plain_attributes(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Every plain attribute of a module and those below it: its owner, its name, and its key in a state dict.

    A module that is registered in several places has a key for each, as its parameters have.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}{path}." if path else prefix
        for name in owner.__dict__:
            yield owner, name, start + name
