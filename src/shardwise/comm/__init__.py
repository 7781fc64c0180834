"""How ranks talk: the `Comm` interface, over a torch process group or over the threads of one process."""

from .agree import agree
from .current import current_comm, default_comm, use_comm
from .errors import CommError, DisagreementError
from .launch import LocalWorld, Outcome, launch
from .local import LocalComm
from .process_group import ProcessGroupComm, comm_from_device_mesh
from .protocol import Comm, ReduceOp, Work
from .run_local import run_local
from .telling import fold_texts, fold_values, name_ranks

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
    "agree",
    "comm_from_device_mesh",
    "current_comm",
    "default_comm",
    "fold_texts",
    "fold_values",
    "launch",
    "name_ranks",
    "run_local",
    "use_comm",
]
