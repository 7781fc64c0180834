"""Drop-in names: `shardwise.compat._shard` mirrors `torch.distributed._shard`; `install()` puts it in its place."""

from shardwise.compat.installing import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
