"""Checkpoint formats, a class each: all that are known, in the order in which a folder is tried."""

from __future__ import annotations

from shardwise.checkpoint.files import CheckpointError, ReadableFolder
from shardwise.checkpoint.formats.base import Format
from shardwise.checkpoint.formats.dcp import DcpFormat
from shardwise.checkpoint.formats.huggingface import HuggingFaceFormat
from shardwise.checkpoint.formats.shardwise import ShardwiseFormat
from shardwise.checkpoint.formats.torch_file import FILE_SUFFIXES, TorchFileFormat

FORMATS: list[Format] = [ShardwiseFormat(), DcpFormat(), HuggingFaceFormat(), TorchFileFormat()]
BUILT_IN = tuple(FORMATS)  # what other processes know: formats may be added in this one


def find_format(name: str) -> Format:
    """The format to write, by its name.

    >>> find_format("hf").title
    'Hugging Face'
    """
    writable = [known for known in FORMATS if known.writable]
    found = next((known for known in writable if known.name == name), None)
    if found is None:
        raise CheckpointError(f"unknown format {name!r}; known: {', '.join(known.name for known in writable)}")
    return found


def detect_format(folder: ReadableFolder) -> tuple[Format, str] | None:
    """The format of a folder and the name of its index, or None if it is not a checkpoint."""
    for known in FORMATS:
        index_name = known.detect(folder)
        if index_name is not None:
            return known, index_name
    return None


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name belongs in a checkpoint.

    >>> is_checkpoint_file("rank00000-00000.safetensors"), is_checkpoint_file("notes.txt")
    (True, False)
    """
    return any(name in known.index_names or name.endswith(known.suffixes) for known in FORMATS)


def describe_expected() -> str:
    """What a checkpoint looks like, in words."""
    kinds = [f"{' or '.join(known.index_names)} ({known.title})" for known in FORMATS]
    return (
        f"a folder with {', '.join(kinds)}, or a .safetensors file, or one of torch.save ({', '.join(FILE_SUFFIXES)})"
    )
