"""Which comm does a sharded tensor use, and which torch group is handed back to callers that speak torch?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import torch.distributed as dist
from torch import Tensor

from shardwise.comm import Comm, ProcessGroupComm, current_comm, default_comm
from shardwise.comm.device_meshes import comm_of_device_mesh
from shardwise.comm.traced import traced_comm
from shardwise.geometry.torch_words import is_device_mesh

GroupOrComm: TypeAlias = dist.ProcessGroup | Comm
_loading_group: ContextVar[GroupOrComm | None] = ContextVar("shardwise_loading", default=None)


def resolve_comm(process_group: GroupOrComm | None = None) -> Comm:
    """Return the comm of a torch process group or of a comm; without one, that of the surrounding block or the world.

    >>> resolve_comm().ranks
    (0,)
    >>> from shardwise.comm import LocalComm
    >>> resolve_comm(alone := LocalComm.alone()) is alone
    True
    """
    group: object = process_group if process_group is not None else _loading_group.get()
    if group is None:
        return default_comm()
    if is_device_mesh(group):
        return comm_of_device_mesh(cast(Any, group))
    if isinstance(group, dist.ProcessGroup):
        return traced_comm(ProcessGroupComm.of(group))
    if isinstance(group, Comm):
        return traced_comm(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the process group passed; call only on the group's members")
    raise ValueError(
        "process_group is a torch ProcessGroup or DeviceMesh, a shardwise Comm or None; got "
        f"{type(group).__name__}: {group!r}"
    )


def group_of(comm: Comm) -> GroupOrComm:
    """Return what functions written for torch are handed as `process_group`: the torch group, else the comm itself.

    >>> group_of(resolve_comm())
    LocalComm(rank=0, ranks=(0,), device='cpu')
    """
    return comm.process_group if comm.process_group is not None else comm


def comm_of(value: object) -> Comm | None:
    """Return the comm of a sharded tensor, None for anything else.

    >>> comm_of(3) is None
    True
    """
    comm = getattr(value, "comm", None) if isinstance(value, Tensor) else None
    return comm if isinstance(comm, Comm) else None


def same_group(one: Comm, other: Comm) -> bool:
    """Whether two comms connect the same ranks by the same means.

    >>> same_group(resolve_comm(), resolve_comm())
    True
    """
    if one is other:
        return True
    if one.process_group is None or other.process_group is None:
        return one.process_group is other.process_group and one.ranks == other.ranks
    return one.process_group is other.process_group


@contextmanager
def load_with_process_group(process_group: GroupOrComm | None) -> Iterator[GroupOrComm | None]:
    """Unpickle sharded tensors onto this group inside a `with` block, instead of onto the default one.

    >>> from shardwise.comm import LocalComm
    >>> with load_with_process_group(LocalComm.alone()) as group:
    ...     get_current_process_group() is group
    True
    """
    if _loading_group.get() is not None:
        raise RuntimeError(
            'ProcessGroup already set by previous "load_with_process_group" context manager; '
            "leave that block before entering another"
        )
    token = _loading_group.set(process_group)
    try:
        yield process_group
    finally:
        _loading_group.reset(token)


def get_current_process_group() -> GroupOrComm:
    """Return the group of the surrounding `load_with_process_group` or `use_comm`, else torch's default group.

    >>> get_current_process_group()
    Traceback (most recent call last):
    ...
    ValueError: Default process group has not been initialized, please make sure to call init_process_group.
    """
    group = loading_group()
    if group is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return group


def loading_group() -> GroupOrComm | None:
    """Return the group that a tensor unpickled now belongs to, None where no world has been set up.

    >>> loading_group() is None
    True
    """
    if (group := _loading_group.get()) is not None:
        return group
    comm = current_comm()
    if comm is not None:
        return group_of(comm)
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
