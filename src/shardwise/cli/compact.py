"""`shardwise compact`: a version of a chain becomes the full checkpoint, and older ones go."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardwise.cli.output import AsJson, escape_for_terminal, print_json
from shardwise.view import line, print_lines

Path = Annotated[
    str, typer.Argument(metavar="PATH", help="The full checkpoint of a chain; versions are in PATH.deltas.")
]
Version = Annotated[int | None, typer.Option("--version", help="The version; the newest one by default.")]


def compact(path: Path, version: Version = None, as_json: AsJson = False) -> None:
    """Write a version of a chain (shardwise.sync.publish_files) as the full checkpoint, and remove older versions.

    The old checkpoint is replaced at once. All tensors are in memory meanwhile. The publisher may go on.

    \b
    Examples:
      shardwise compact runs/weights
      shardwise compact s3://bucket/weights --version 1200
    """
    from shardwise.checkpoint.changes import list_versions  # these load torch
    from shardwise.checkpoint.loading import compact as compact_chain

    before = len(list_versions(path))
    step = compact_chain(path, version)
    after = len(list_versions(path))
    if as_json:
        print_json({"path": path, "version": step, "removed": before - after, "versions": after})
        return
    text = f"{path} is version {step}; {before - after} older versions were removed, {after} are there"
    print_lines([line(escape_for_terminal(text))], sys.stdout)
