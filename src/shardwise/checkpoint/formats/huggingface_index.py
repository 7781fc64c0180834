"""Hugging Face folders and single safetensors files as an index: every tensor whole, no checksums."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import open_file
from shardwise.checkpoint.formats.safetensors_header import HeaderEntry, header_size, parse_header
from shardwise.checkpoint.index import FileEntry, Index, StoredCut, TensorEntry


def read_header(path: Path) -> tuple[FileEntry, dict[str, HeaderEntry], bytes]:
    """A safetensors file as an entry, its tensors, and the bytes of its header."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            start += file.read(header_size(start, size, str(path)) - 8)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return FileEntry(path.name, size, len(start), checksum(start)), parse_header(start, size, str(path)), start


def read_file_index(path: Path) -> tuple[Index, str]:
    """The index of one safetensors file, and a digest of it."""
    file, entries, start = read_header(path)
    return _make_hf_index([file], {key: (0, entry) for key, entry in entries.items()}), checksum(start)


def read_folder_index(folder: Path, data: bytes) -> tuple[Index, str]:
    """The index of a folder with a `model.safetensors.index.json`, whose content is `data`, and a digest of it."""
    weight_map = _parse_weight_map(folder, data)
    numbers = {name: number for number, name in enumerate(sorted(set(weight_map.values())))}
    found = [read_header(folder / name) for name in numbers]
    tensors: dict[str, tuple[int, HeaderEntry]] = {}
    for key, name in weight_map.items():
        number = numbers[name]
        if key not in found[number][1]:
            raise CheckpointError(f"{folder / name}: tensor {key!r} is not in this file, where the index says it is")
        tensors[key] = (number, found[number][1][key])
    digest = checksum(data + b"".join(start for _, _, start in found))
    return _make_hf_index([file for file, _, _ in found], tensors), digest


def _parse_weight_map(folder: Path, data: bytes) -> dict[str, str]:
    try:
        weight_map = json.loads(data)["weight_map"]
        assert isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    except (ValueError, RecursionError, KeyError, TypeError, AssertionError):
        raise CheckpointError(f"{folder}: its index has no weight_map from tensors to files") from None
    for name in set(weight_map.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder}: {name[:200]!r} is not a file name in this folder; nothing is read")
    return weight_map


def _make_hf_index(files: Sequence[FileEntry], tensors: Mapping[str, tuple[int, HeaderEntry]]) -> Index:
    cuts: dict[tuple[int, ...], StoredCut] = {}
    entries: dict[str, TensorEntry] = {}
    for name, (file, entry) in tensors.items():
        cut = cuts.setdefault(entry.shape, _whole_cut(entry.shape))
        count = len(cut)
        entries[name] = TensorEntry(name, entry.dtype, cut, [file] * count, [entry.begin] * count, [""] * count)
    return Index(files, entries, {"dict": [[name, {"tensor": name}] for name in entries]})


def _whole_cut(shape: tuple[int, ...]) -> StoredCut:
    rows = 0 if 0 in shape else 1
    sizes = np.array([shape] * rows, np.int64).reshape(rows, len(shape))
    return StoredCut(shape, np.zeros_like(sizes), sizes)
