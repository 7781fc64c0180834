"""Resharding a checkpoint on disk: from any layout, number of ranks and format to any other, without a process group.

1. Every tensor gets its layout; the files of the new checkpoint are planned, and cut into segments.
2. Workers copy segments from the mapped source, a block at a time, and check every block of the source on the way.
   Finished segments are noted, so a run that was killed is taken up where it stopped.
3. Headers and the index come last; then the folder is put in place atomically.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.assign import TensorToSave
from shardwise.checkpoint.converting.conversion import Conversion
from shardwise.checkpoint.converting.elements import converted_dtype, find_cast_dtype
from shardwise.checkpoint.converting.name_map import NameMap
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import FilePlan, Format, SaveRequest
from shardwise.checkpoint.formats.table import find_format
from shardwise.checkpoint.resharding.companions import read_companions
from shardwise.checkpoint.resharding.execute import ConversionRequest, ReshardRun
from shardwise.checkpoint.resharding.layouts import ChosenLayouts, LayoutPlan, choose_layouts
from shardwise.checkpoint.resharding.pool import divide_memory
from shardwise.checkpoint.storage.place import Place, check_apart, find_place, new_save, open_plain_folder
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, open_store
from shardwise.geometry import DType, ShardingSpec


@dataclass(frozen=True)
class ReshardReport:
    """What a reshard did. `kept_bytes` of `bytes` were there from an earlier run; `seconds` are those of this one.

    `unfit`: tensors that one layout for all did not fit. `left_out`: entries that the
    format has no place for, or that cannot be read. `copied`: files that were copied along.

    >>> import tempfile, torch, shardwise
    >>> folder = tempfile.mkdtemp()
    >>> shardwise.save({"w": torch.ones(4, 2)}, f"{folder}/one")
    >>> report = reshard(f"{folder}/one", f"{folder}/two", layout="S(0)", ranks=2)
    >>> report.tensors, report.ranks, report.bytes
    (1, (0, 1), 32)
    """

    path: Place
    format: str
    tensors: int
    files: int
    ranks: tuple[int, ...]
    bytes: int
    kept_bytes: int
    seconds: float
    workers: int
    unfit: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    plan: LayoutPlan | None = None,
    layout: ShardingSpec | str | None = None,
    ranks: int | None = None,
    format: str = "shardwise",
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    names: NameMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    max_file_bytes: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ReshardReport:
    """Rewrite a checkpoint in another layout, for other ranks, names or another format. One process calls.

    - `plan` is a `shardwise.nn.ModelPlan`; or `layout` is one layout for all tensors, as a text such as "S(0)" (with
      `ranks`) or "on dp=2,tp=4: R, S(1)"; with neither, tensors keep their layouts.
    - `only`, `exclude`: globs of stored names to take, and not to take.
    - `names`: a `NameMap`, its TOML file, or a dict of patterns and new names. `dtype`: convert floats, as in "bf16".
    - `config`: the folder whose `config.json` and tokenizer files are copied along (format "hf"); else the source's.
    - `workers`: processes to copy with; one copies in this process. `max_buffer_bytes` bounds the memory of all.
    - `verify`: check every block of the source before it is used.
    - `resume`: resume a run with the same arguments that was killed; otherwise start over.
    - `progress` is called with the bytes done and the total bytes.

    >>> import tempfile, torch, shardwise
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shardwise.save({"w": torch.arange(6.0).reshape(3, 2), "step": 7}, f"{folder}/a")
    ...     report = reshard(f"{folder}/a", f"{folder}/b", layout="S(0)", ranks=2)
    ...     report.files, report.bytes, shardwise.open(f"{folder}/b")["w"].layout.local_shapes(1)
    (2, 24, ((1, 2),))
    """
    started = time.monotonic()
    _check_reshard_arguments(workers, max_buffer_bytes, max_file_bytes, ranks)
    source, target, kind = find_place(src), find_place(dst), find_format(format)
    check_apart(source, target)
    wanted, given = None if dtype is None else find_cast_dtype(dtype), None if names is None else NameMap.of(names)
    conversion = Conversion(tuple(only), tuple(exclude), given, kind.model_only)
    with closing(open_store(src, divide_memory(max_buffer_bytes, 1)[1])) as store:
        left_out, store.index = conversion.left_out(store.index), conversion.apply(store.index)
        chosen = _choose_target_layouts(store, plan, layout, ranks, kind)
        token, beside = secrets.token_hex(8), _read_beside(store, kind, config, wanted)
        files = _plan_target(store, chosen, kind, max_file_bytes, wanted, new_save(target, token).prefix)
        request = ConversionRequest(source, target, kind, conversion, wanted, beside, overwrite, verify)
        kept, used = ReshardRun(store, files, request, workers, max_buffer_bytes, progress).run(resume, token)
    return ReshardReport(
        path=target,
        format=format,
        tensors=len(files.tensors),
        files=len(files.all_files()),
        ranks=chosen.ranks if kind.has_layouts else (),
        bytes=sum(tensor.nbytes for tensor in files.tensors),
        kept_bytes=kept,
        seconds=time.monotonic() - started,
        workers=used,
        unfit=chosen.unfit,
        left_out=(*left_out, *files.left_out),
        copied=tuple(beside),
    )


def _read_beside(
    store: Store, format: Format, config: str | os.PathLike[str] | None, dtype: DType | None
) -> dict[str, bytes]:
    """The files to copy along, from the folder that was named or from the source."""
    if config is None:
        return read_companions(store.pinned, format, dtype, required=False)
    if not format.companions:
        raise CheckpointError(f"a checkpoint of format {format.name!r} has no configuration beside it; omit config")
    with open_plain_folder(find_place(config), DEFAULT_BUFFER_BYTES) as folder:
        return read_companions(folder, format, dtype, required=True)


def _check_reshard_arguments(
    workers: int | None, max_buffer_bytes: int, max_file_bytes: int | None, ranks: int | None
) -> None:
    limits = {"workers": workers, "ranks": ranks, "max_file_bytes": max_file_bytes}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise CheckpointError(f"{name} must be at least 1, got {value}")
    if max_buffer_bytes < 1 << 20:
        raise CheckpointError(f"max_buffer_bytes must be at least 1048576 (1 MiB), got {max_buffer_bytes}")


def _choose_target_layouts(
    store: Store, plan: LayoutPlan | None, layout: ShardingSpec | str | None, ranks: int | None, format: Format
) -> ChosenLayouts:
    if not format.has_layouts and not (plan is None and layout is None and ranks is None):
        raise CheckpointError(f"a {format.title} folder stores every tensor whole; omit plan, layout and ranks")
    return choose_layouts(store.index, plan, layout, ranks)


def _plan_target(
    store: Store, chosen: ChosenLayouts, format: Format, max_file_bytes: int | None, dtype: DType | None, prefix: str
) -> FilePlan:
    tensors = [
        TensorToSave(entry.name, converted_dtype(entry.dtype, dtype), chosen.layouts[entry.name])
        for entry in store.index.tensors.values()
    ]
    ranks = chosen.ranks if format.has_layouts and chosen.ranks else (0,)
    return format.plan_files(SaveRequest(tensors, store.index.tree, ranks, max_file_bytes, store.index.opaque, prefix))
