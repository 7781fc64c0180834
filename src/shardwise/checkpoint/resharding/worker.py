"""A worker process: segments come in as lines of JSON, their checksums go out as lines of JSON.

It never imports torch: moving bytes needs none. It ends when its input does, so a parent that was killed leaves no
worker behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.checkpoint.converting.conversion import Conversion
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.resharding.copy import Copier, VerifiedBlocks
from shardwise.checkpoint.resharding.plan import ItemRange, RangeSums, Segment
from shardwise.checkpoint.store import open_store
from shardwise.geometry import Box, find_dtype


def task_json(segment: Segment, known: Sequence[RangeSums] | None) -> list[Any]:
    """A segment, and what is known of it from an earlier run, as plain data.

    >>> part = ItemRange(0, "w", Box((0,), (4,)), 64, 0, 16)
    >>> task_json(Segment(2, "a.safetensors", (part,)), None)
    [2, 'a.safetensors', [[0, 'w', [0], [4], 64, 0, 16]], None]
    """
    ranges = [
        [r.item, r.tensor, list(r.box.offsets), list(r.box.sizes), r.begin, r.low, r.high] for r in segment.ranges
    ]
    return [segment.file, segment.name, ranges, known]


def task_from_json(data: Any) -> tuple[Segment, list[RangeSums] | None]:
    """The segment that `task_json` wrote, and what is known of it.

    >>> part = ItemRange(0, "w", Box((0,), (4,)), 64, 0, 16)
    >>> task_from_json(task_json(Segment(2, "a.safetensors", (part,)), None))[0].ranges == (part,)
    True
    """
    file, name, ranges, known = data
    parts = tuple(ItemRange(i, t, Box(tuple(o), tuple(s)), b, low, high) for i, t, o, s, b, low, high in ranges)
    return Segment(file, name, parts), known and [(text, crc) for text, crc in known]


def copy_or_keep_segment(
    copier: Copier, segment: Segment, known: Sequence[RangeSums] | None
) -> tuple[list[RangeSums], bool]:
    """The checksums of a segment, and whether it already existed and is still valid; else it is copied."""
    if known is not None and copier.is_unchanged(segment, known):
        return list(known), True
    return copier.copy(segment), False


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more; the first line says what all of them are about."""
    job = json.loads(requests.readline())
    store = open_store(job["source"], job["limit"])
    if store.digest != job["digest"]:
        replies.write(
            json.dumps({"error": f"{store.folder} was changed while it was read; start over"}).encode() + b"\n"
        )
        return
    store.index = Conversion.from_json(job["conversion"]).apply(store.index)
    marks = VerifiedBlocks(store.index, Path(job["marks"])) if job["verify"] else None
    dtype = None if job["dtype"] is None else find_dtype(job["dtype"])
    copier = Copier(store, Path(job["folder"]), marks, job["crc"], dtype)
    for line in requests:
        try:
            if store.digest != job["digest"]:
                raise CheckpointError(f"{store.folder} was changed while it was read; start over")
            reply: dict[str, Any] = {"result": copy_or_keep_segment(copier, *task_from_json(json.loads(line)))}
        except (ValueError, OSError) as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
