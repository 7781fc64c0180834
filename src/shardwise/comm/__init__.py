"""How ranks talk: the `Comm` interface, over a torch process group or over the threads of one process."""

from .current import current_comm, default_comm, use_comm
from .errors import CommError, DisagreementError
from .local import LocalComm
from .process_group import ProcessGroupComm, comm_from_device_mesh
from .protocol import Comm, ReduceOp, Work
from .run_local import run_local

__all__ = [
    "Comm",
    "CommError",
    "DisagreementError",
    "LocalComm",
    "ProcessGroupComm",
    "ReduceOp",
    "Work",
    "comm_from_device_mesh",
    "current_comm",
    "default_comm",
    "run_local",
    "use_comm",
]
