"""Hugging Face folders: every tensor whole in one safetensors file, an index where there are several; no checksums.

Tensors are put into files in order, up to the requested size; files are distributed over the ranks. A single
safetensors file is a checkpoint as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shardwise.checkpoint.assign import pack_into_files
from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import Format, ItemSums, PlannedFile, SaveRequest, digest_files
from shardwise.checkpoint.formats.safetensors import CODES, HeaderEntry, SafetensorsPlan, read_header
from shardwise.checkpoint.index import FileEntry, Index, StoredCut, TensorEntry, iterate_leaves
from shardwise.checkpoint.storage.base import Location, ReadableFolder

HF_INDEX_NAME = "model.safetensors.index.json"
HF_SINGLE_NAME = "model.safetensors"
HF_MAX_FILE_BYTES = 5_000_000_000
HF_COMPANIONS = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
)


class HuggingFaceFormat(Format):
    """Whole tensors in `model.safetensors`, or in numbered files with an index."""

    name = "hf"
    title = "Hugging Face"
    index_names = (HF_INDEX_NAME, HF_SINGLE_NAME)
    suffixes = (".safetensors",)
    companions = HF_COMPANIONS
    model_only = True
    has_values = False
    has_layouts = False

    def is_complete(self, folder: ReadableFolder) -> bool:
        """With an index, which is written last; a single file has its whole length."""
        found = self.detect(folder)
        if found != HF_SINGLE_NAME:
            return found is not None
        try:
            read_header(folder, found)
        except CheckpointError:
            return False
        return True

    def accepts_file(self, name: str) -> bool:
        return name.endswith(self.suffixes)

    def title_of(self, index_name: str) -> str:
        return self.title if index_name in self.index_names else "safetensors file"

    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        if index_name == HF_INDEX_NAME:
            return _read_folder_index(folder, folder.read(index_name))
        file, entries, start = read_header(folder, index_name)
        index = _make_hf_index([file], {key: (0, entry) for key, entry in entries.items()})
        return index, _digest(folder, index, start)

    def plan_files(self, request: SaveRequest) -> HuggingFacePlan:
        return HuggingFacePlan(request)


class HuggingFacePlan(SafetensorsPlan):
    """Files of whole tensors, each written by one of the ranks; values that are not tensors are left out."""

    gathers = True

    def __init__(self, request: SaveRequest) -> None:
        super().__init__()
        self.tensors, self.ranks, self._prefix = request.tensors, tuple(request.ranks), request.prefix
        values = tuple(name for name, tensor, _ in iterate_leaves(request.tree) if tensor is None)
        self.left_out = (*values, *request.unreadable)
        for tensor in self.tensors:
            if tensor.dtype.torch_name not in CODES:
                raise CheckpointError(f"tensor {tensor.name!r}: safetensors has no {tensor.dtype}; use another format")
        cuts: dict[tuple[int, ...], StoredCut] = {}
        self.cuts = [cuts.setdefault(t.layout.shape, _whole_cut(t.layout.shape, keep_empty=True)) for t in self.tensors]
        self._files = self._plan(HF_MAX_FILE_BYTES if request.max_file_bytes is None else request.max_file_bytes)

    def _plan(self, max_file_bytes: int) -> list[PlannedFile]:
        sizes = [(t.dtype.itemsize, t.nbytes) for t in self.tensors]
        groups = pack_into_files(sizes, max_file_bytes, widest_first=False) or [[]]
        names = [f"{self._prefix}model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        single = len(groups) == 1 and not self._prefix
        return [
            self.plan_file(HF_SINGLE_NAME if single else name, [(i, 0) for i in self._aligned(group)])
            for name, group in zip(names, groups, strict=True)
        ]

    def _aligned(self, group: Sequence[int]) -> list[int]:
        """Within a file the widest elements come first, so that all are aligned."""
        return sorted(group, key=lambda i: -self.tensors[i].dtype.itemsize)

    def files_of(self, rank: int) -> Sequence[PlannedFile]:
        return self._files[self.ranks.index(rank) :: len(self.ranks)]

    def all_files(self) -> list[PlannedFile]:
        return self._files

    def make_index(self, written: Sequence[tuple[PlannedFile, Sequence[ItemSums]]]) -> tuple[str, bytes] | None:
        if len(written) == 1 and not self._prefix:
            return None
        weight_map = {self.tensors[item.tensor].name: file.name for file, _ in written for item in file.items}
        total = sum(self.bytes_of(item) for file, _ in written for item in file.items)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return HF_INDEX_NAME, json.dumps(content, indent=2).encode()


def _read_folder_index(folder: ReadableFolder, data: bytes) -> tuple[Index, str]:
    weight_map = parse_weight_map(folder.path, data, ".safetensors")
    numbers = {name: number for number, name in enumerate(sorted(set(weight_map.values())))}
    found = [read_header(folder, name) for name in numbers]
    tensors: dict[str, tuple[int, HeaderEntry]] = {}
    for key, name in weight_map.items():
        number = numbers[name]
        if key not in found[number][1]:
            raise CheckpointError(
                f"{folder.path / name}: tensor {key!r} is not in this file, where the index says it is"
            )
        tensors[key] = (number, found[number][1][key])
    index = _make_hf_index([file for file, _, _ in found], tensors)
    return index, _digest(folder, index, data + b"".join(start for _, _, start in found))


def _digest(folder: ReadableFolder, index: Index, headers: bytes) -> str:
    """Two saves of one model have the same headers, so times count as well."""
    return checksum(headers + json.dumps(digest_files(folder, [file.name for file in index.files])).encode())


def parse_weight_map(folder: Location, data: bytes, suffix: str) -> dict[str, str]:
    """Which file has which tensor, from the index of a model in several files."""
    try:
        weight_map = json.loads(data)["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder}: its index has no weight_map from tensors to files")
    for name in set(weight_map.values()):
        if Path(name).name != name or not name.endswith(suffix):
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


def _whole_cut(shape: tuple[int, ...], keep_empty: bool = False) -> StoredCut:
    rows = 0 if 0 in shape and not keep_empty else 1
    sizes = np.array([shape] * rows, np.int64).reshape(rows, len(shape))
    return StoredCut(shape, np.zeros_like(sizes), sizes)
