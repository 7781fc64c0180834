"""Which comm does a process group mean on a rank that is not one of its members?

`torch.distributed.new_group` gives such a rank a stand-in for the group. Tensors on it have no local shards there, only
metadata, and nothing can be sent. The native functions refuse the stand-in; torch's ShardedTensor takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import Comm, default_comm
from shardwise.tensor.comms import GroupOrComm, resolve_comm


@dataclass(frozen=True)
class OutsideComm:
    """The comm of a rank in a group that it is not a member of: whatever would communicate raises.

    >>> OutsideComm(3, torch.device("cpu"), 1.0).barrier(label="save")
    Traceback (most recent call last):
    ...
    RuntimeError: 'save': rank 3 is not a member of the tensor's process group; call this only on its members
    """

    rank: int
    device: torch.device
    timeout: float
    ranks: tuple[int, ...] = ()
    world_size: int = -1  # what torch answers as well
    process_group: Any = dist.GroupMember.NON_GROUP_MEMBER

    def _refuse(self, *args: Any, label: str = "a collective", **kwargs: Any) -> Any:
        raise RuntimeError(
            f"'{label}': rank {self.rank} is not a member of the tensor's process group; call this only on its members"
        )

    exchange = all_gather = all_gather_into = reduce_scatter_into = all_reduce = _refuse
    broadcast = barrier = subset = all_gather_bytes = find_topology = _refuse


def resolve_group(process_group: GroupOrComm | None = None) -> Comm:
    """Return the comm of a group, also of one that this rank is not a member of; without one, the default comm.

    `load_with_process_group` is for tensors that are unpickled: new ones inside its block are on the default group.

    >>> resolve_group().ranks
    (0,)
    """
    if process_group is None:
        return default_comm()
    group: object = process_group
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        return resolve_comm(process_group)
    around = default_comm()
    return OutsideComm(around.rank, around.device, around.timeout)
