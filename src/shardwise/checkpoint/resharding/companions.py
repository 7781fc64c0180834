"""Which files are copied along with a model's tensors? Its configuration and tokenizer, so that it can be loaded.

They are small, and copied as they are; only the dtype in `config.json` follows that of the tensors.
"""

from __future__ import annotations

import json

from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import Format
from shardwise.checkpoint.storage.base import ReadableFolder
from shardwise.geometry import DType

_CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_MAX_FILE_BYTES = 1 << 26


def read_companions(folder: ReadableFolder, format: Format, dtype: DType | None, required: bool) -> dict[str, bytes]:
    """The files of a folder that a format has beside its tensors; an error if some are `required` and there is none."""
    found = {name: folder.read(name, _MAX_FILE_BYTES) for name in format.companions if folder.has(name)}
    if required and _CONFIG not in found:
        raise CheckpointError(f"{folder.path}: it has no {_CONFIG}; pass the folder that has the model's")
    if dtype is not None and _CONFIG in found:
        found[_CONFIG] = _set_config_dtype(found[_CONFIG], dtype)
    return found


def _set_config_dtype(data: bytes, dtype: DType) -> bytes:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data  # copied as it is: whoever loads the model will say so
    keys = [key for key in _DTYPE_KEYS if isinstance(config, dict) and isinstance(config.get(key), str)]
    if not keys:
        return data
    return json.dumps({**config, **dict.fromkeys(keys, dtype.torch_name)}, indent=2).encode() + b"\n"


def digest_companions(files: dict[str, bytes]) -> list[list[str]]:
    """What identifies the files, for a run that is resumed."""
    return [[name, checksum(data)] for name, data in sorted(files.items())]
