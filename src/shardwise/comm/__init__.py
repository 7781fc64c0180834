"""How ranks talk: the `Comm` interface, over a torch process group or over the threads of one process."""

from shardwise.comm.agree import (
    agree,
    any_rank,
    fold_texts,
    fold_values,
    gather_raw,
    gather_values,
    name_ranks,
)
from shardwise.comm.current import advise_ranks, current_comm, default_comm, run_local, use_comm
from shardwise.comm.launch import LocalWorld, Outcome, launch
from shardwise.comm.local import LocalComm
from shardwise.comm.process_group import ProcessGroupComm, comm_from_device_mesh
from shardwise.comm.protocol import Comm, CommError, DisagreementError, ReduceOp, Work

__all__ = [
    "Comm",
    "CommError",
    "DisagreementError",
    "LocalComm",
    "LocalWorld",
    "Outcome",
    "ProcessGroupComm",
    "ReduceOp",
    "Work",
    "advise_ranks",
    "agree",
    "any_rank",
    "comm_from_device_mesh",
    "current_comm",
    "default_comm",
    "fold_texts",
    "fold_values",
    "gather_raw",
    "gather_values",
    "launch",
    "name_ranks",
    "run_local",
    "use_comm",
]
