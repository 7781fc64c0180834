"""Drop-in names: `shardwise.compat._shard` mirrors `torch.distributed._shard`; `install()` puts it in its place.

`register_sharding` is torch's, effective for DTensor and for ShardedTensor; `from_dtensor` and `to_dtensor` lead from
one to the other.
"""

from shardwise.compat.dtensor.bridge import dtensor_fallback, from_dtensor, to_dtensor
from shardwise.compat.dtensor.registration import register_torch_sharding as register_sharding
from shardwise.compat.installing import Installation, install, uninstall

__all__ = [
    "Installation",
    "dtensor_fallback",
    "from_dtensor",
    "install",
    "register_sharding",
    "to_dtensor",
    "uninstall",
]
