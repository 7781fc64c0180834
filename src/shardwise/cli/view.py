"""`shardwise view`: a page on layouts, moves, checkpoints, plans and steps, in a browser or as one file."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.errors import CheckpointError
from shardwise.cli.checkpoints import open_checkpoint
from shardwise.cli.output import AsJson, print_json
from shardwise.cli.plan import Buffer, RanksPerHost
from shardwise.geometry import LayoutError, NotationError
from shardwise.page.document import render_document
from shardwise.page.server import PageServer
from shardwise.page.targets import CheckpointTarget, LayoutTarget, MoveTarget, PageTarget, split_move

Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help='A layout, "A -> B", a checkpoint, one or two plans, or a trace.'),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write one self-contained HTML file.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port on the loopback interface; 0: any free one.")]
OpenBrowser = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]


def view(
    targets: Targets,
    output: Output = None,
    ranks_per_host: RanksPerHost = 8,
    buffer: Buffer = None,
    port: Port = 0,
    open_browser: OpenBrowser = True,
    as_json: AsJson = False,
) -> None:
    """Show a layout, a move, a checkpoint, a model plan or a recorded step on a page.

    The page is served on this machine only, under an address that cannot be guessed, until Ctrl-C.

    \b
    Examples:
      shardwise view "f32[4096,1024] on dp=2,tp=4: S(0), S(1)"
      shardwise view "f32[4096,1024] on tp=4: S(0) -> on tp=4: S(1)"
      shardwise view runs/step-1000 -o checkpoint.html
    """
    target = find_target(targets, ranks_per_host, buffer)
    facts = target.facts()
    if as_json:
        print_json(facts)
    elif output is not None:
        write_page(facts, output)
    else:
        serve(facts, target, port, open_browser)


def find_target(targets: Sequence[str], ranks_per_host: int, buffer: str | None) -> PageTarget:
    """What the arguments name: a file or folder that exists, or else the notation."""
    first = targets[0]
    if len(targets) > 2:
        raise LayoutError(f"a page shows one target, or two plans or layouts beside each other; got {len(targets)}")
    if len(targets) == 2:
        return MoveTarget(first, targets[1], ranks_per_host, buffer or "")
    if os.path.exists(first) or "://" in first:
        return CheckpointTarget(open_checkpoint(first))
    move = split_move(first)
    if move is not None:
        return MoveTarget(*move, ranks_per_host, buffer or "")
    try:
        target = LayoutTarget(first, ranks_per_host)
        target.facts()
    except NotationError as error:
        if "[" not in first:
            raise CheckpointError(
                f"{first}: no such file or folder, and not a layout such as f32[8,6] on tp=2: S(0)"
            ) from error
        raise
    return target


def write_page(facts: dict[str, Any], output: Path) -> None:
    """Write the page to a file, complete or not at all."""
    text = render_document(facts)
    partial = output.with_name(f".{output.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(output)
    print(f"wrote {output}, {len(text.encode()):,} bytes")


def serve(facts: dict[str, Any], target: PageTarget, port: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    with PageServer(facts, target.answer, port) as server:
        print(f"serving {server.address}  (Ctrl-C to stop)", flush=True)
        if open_browser:
            webbrowser.open(server.address)
        server.serve_forever()
