"""What the ranks of tests have imported before they are forked: the server of forks imports this module and no other.

Collections of garbage pass over the objects that are here by then: there are many, they live as long as the process,
and a collection that visits them copies their pages.
"""

import gc

import sympy  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.testing  # noqa: F401

import shardwise.checkpoint.store
import shardwise.nn  # noqa: F401
import tests.dense
import tests.world  # noqa: F401
import tools.fuzz  # noqa: F401

gc.collect()
gc.freeze()
