"""Recording local operations from inside `__torch_dispatch__`.

There torch excludes the autograd keys, since it takes the wrapper to be on the tape already. Ours is not: its local
tensors are. So the thread's normal dispatch keys are put back for the local call. This is the only place that makes
this private call.
"""

from __future__ import annotations

from typing import Any

import torch

_INCLUDE = torch._C._dispatch_tls_local_include_set()
_EXCLUDE = torch._C._dispatch_tls_local_exclude_set()


def recording() -> Any:
    """A context in which operators on plain tensors are recorded as they are outside of `__torch_dispatch__`.

    >>> with recording():
    ...     (torch.ones(1, requires_grad=True) * 2).grad_fn is not None
    True
    """
    return torch._C._ForceDispatchKeyGuard(_INCLUDE, _EXCLUDE)
