"""Drop-in names: `shardwise.compat._shard` mirrors `torch.distributed._shard`; `install()` puts it in its place.

`register_sharding` is torch's, effective for DTensor and for ShardedTensor; `from_dtensor` and `to_dtensor` lead from
one to the other. Names are loaded on first use, and are listed in `__init__.pyi`.
"""

import shardwise.ops  # noqa: F401  # drop-in names come with the operators
from shardwise._lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
