"""L4: checkpoints that load anywhere. A folder of safetensors files and one JSON index."""

from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.folders import clean, leftovers
from shardwise.checkpoint.huggingface import save_hf
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.reader import Checkpoint, StoredTensor, open
from shardwise.checkpoint.saving import save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Saving",
    "StoredTensor",
    "clean",
    "leftovers",
    "load",
    "open",
    "save",
    "save_hf",
]
