"""`shardwise digest`: one number for the weights of a checkpoint, whatever its format and layout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardwise._progress import show_progress
from shardwise.checkpoint.files import CheckpointError
from shardwise.cli.inspect import NamePatterns, filter_names, open_checkpoint
from shardwise.cli.output import AsJson, escape_for_terminal, print_json
from shardwise.view import line, print_lines

Path = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: its folder, or a .safetensors or .pt file.")]
ByTensor = Annotated[bool, typer.Option("--by-tensor", help="Print the digest of each tensor as well.")]


def digest(path: Path, name: NamePatterns = None, by_tensor: ByTensor = False, as_json: AsJson = False) -> None:
    """Print the digest of a checkpoint's tensors: equal for equal weights in any format, layout and number of ranks.

    It is that of `shardwise.digest(state)` of the same tensors, and that of a server's `link.verify()`.

    \b
    Examples:
      shardwise digest runs/step-1000
      shardwise digest model-hf --name "model.layers.0.*" --by-tensor
    """
    from shardwise.checkpoint.digests import digest_of, digest_stored
    from shardwise.checkpoint.loading import Checkpoint  # these load torch

    opened = open_checkpoint(path)
    with Checkpoint(opened.store) as checkpoint:
        names = filter_names(checkpoint.names(), name or [])
        if not names:
            raise CheckpointError(f"{path}: no tensor fits {', '.join(name or ['*'])}")
        found = {}
        with show_progress(None, "reading", sum(checkpoint[each].nbytes for each in names)) as meter:
            for each in names:
                found[each] = digest_stored(checkpoint, each)
                meter.advance(checkpoint[each].nbytes)
    total = digest_of(found)
    if as_json:
        print_json({"path": path, "digest": total.hex, "tensors": dict(total.by_tensor)})
        return
    rows = [f"{value}  {key}" for key, value in total.by_tensor.items()] if by_tensor else []
    texts = [*rows, f"{total.hex}  {len(found)} tensors of {path}"]
    print_lines([line(escape_for_terminal(text)) for text in texts], sys.stdout)
