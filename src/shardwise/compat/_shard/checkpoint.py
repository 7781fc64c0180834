"""The names of `torch.distributed._shard.checkpoint`: those of `torch.distributed.checkpoint`, loaded on first use."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("torch.distributed.checkpoint"), name)


__all__: list[str] = []
