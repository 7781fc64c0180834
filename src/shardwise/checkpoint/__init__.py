"""L4: checkpoints that load anywhere. A folder of safetensors files and one JSON index.

Names are loaded on first use: looking into a checkpoint's index does without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.checkpoint.background import Saving
    from shardwise.checkpoint.folders import clean, leftovers
    from shardwise.checkpoint.formats.huggingface import save_hf
    from shardwise.checkpoint.loading import load
    from shardwise.checkpoint.opening import Checkpoint, StoredTensor, open
    from shardwise.checkpoint.resharding.run import ReshardReport, reshard
    from shardwise.checkpoint.saving import save

_MODULE_OF = {
    "Checkpoint": "shardwise.checkpoint.opening",
    "ReshardReport": "shardwise.checkpoint.resharding.run",
    "Saving": "shardwise.checkpoint.background",
    "StoredTensor": "shardwise.checkpoint.opening",
    "clean": "shardwise.checkpoint.folders",
    "leftovers": "shardwise.checkpoint.folders",
    "load": "shardwise.checkpoint.loading",
    "open": "shardwise.checkpoint.opening",
    "reshard": "shardwise.checkpoint.resharding.run",
    "save": "shardwise.checkpoint.saving",
    "save_hf": "shardwise.checkpoint.formats.huggingface",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ReshardReport",
    "Saving",
    "StoredTensor",
    "clean",
    "leftovers",
    "load",
    "open",
    "reshard",
    "save",
    "save_hf",
]


def __getattr__(name: str) -> Any:
    """Load a name on first use."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'shardwise.checkpoint' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
