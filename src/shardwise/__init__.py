"""Shardwise: describe, compute on and move sharded tensors.

Importing this package is light: names are loaded on first use, and are listed in `__init__.pyi`. With the first name
that needs torch the operators are loaded too.
"""

from shardwise._lazy import attach_stub, keep_moved_modules

_WITHOUT_TORCH = ("shardwise._version", "shardwise.geometry", "shardwise.transfer", "shardwise.view")

__getattr__, __dir__, __all__ = attach_stub(
    __name__,
    __file__,
    first="shardwise.ops",
    unless=_WITHOUT_TORCH,
)

keep_moved_modules()
