"""`shardwise view`: a page on layouts, moves, checkpoints, plans and steps, in a browser or as one file.

What can be looked at? Each target knows its facts, and answers the questions of the page with new ones.

A question changes numbers or texts in the notation. It never names a file: what is in files was opened before.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from shardwise._text import parse_json
from shardwise.checkpoint.files import CheckpointError
from shardwise.cli.inspect import OpenedCheckpoint, open_checkpoint
from shardwise.cli.output import (
    AsJson,
    Batch,
    DeviceName,
    DtypeText,
    Optimizer,
    SequenceLength,
    parse_bytes,
    print_json,
)
from shardwise.cli.plan import Buffer, RanksPerHost, plan_between, read_topology
from shardwise.geometry import LayoutError, NotationError, parse_layout
from shardwise.page.document import PageServer, render_document, write_link
from shardwise.page.facts import (
    MoveQuestion,
    checkpoint_facts,
    layout_facts,
    move_facts,
    read_trace,
    step_facts,
    tensor_facts,
)


class PageTarget(Protocol):
    """Something that the page shows."""

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        """What the page shows first; `written`: in a file, which cannot ask for more."""

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What it shows after a person changed something."""


@dataclass(frozen=True)
class LayoutTarget:
    """A layout in the notation."""

    notation: str
    ranks_per_host: int = 8

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return layout_facts(parse_layout(self.notation), self.ranks_per_host)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Another layout: `notation`, `ranks_per_host`.

        >>> LayoutTarget("f32[8] on tp=2: S(0)").answer({"notation": "f32[8] on tp=4: S(0)"})["ranks"]["count"]
        4
        """
        size = int(question.get("ranks_per_host") or self.ranks_per_host)
        return LayoutTarget(str(question.get("notation", self.notation)), size).facts()


@dataclass(frozen=True)
class MoveTarget:
    """The transfer between two layouts in the notation."""

    source: str
    target: str
    topology: str = "8"
    buffer: str = ""

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return self._facts(MoveQuestion(written=written))

    def _facts(self, question: MoveQuestion) -> dict[str, Any]:
        source = parse_layout(self.source)
        target = parse_layout(self.target, like=source)
        topology = read_topology(self.topology)
        limit = parse_bytes(self.buffer) if self.buffer else None
        return move_facts(source, target, plan_between(source, target, topology, limit), topology, question)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Another transfer, or other ranks of it: `source`, `target`, `topology`, `buffer`, and the windows."""
        given = MoveTarget(
            str(question.get("source", self.source)),
            str(question.get("target", self.target)),
            str(question.get("topology", self.topology)),
            str(question.get("buffer", self.buffer)),
        )
        senders, receivers = (_read_window(question.get(name)) for name in ("senders", "receivers"))
        animated = question.get("animated")
        return given._facts(MoveQuestion(senders, receivers, None if animated is None else int(animated)))


@dataclass(frozen=True)
class CheckpointTarget:
    """A checkpoint that is open."""

    opened: OpenedCheckpoint

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return checkpoint_facts(self.opened.path, self.opened.store)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The layout of one tensor, by its number: `tensor`."""
        return {"picture": tensor_facts(self.opened.store, int(question["tensor"]))}


@dataclass(frozen=True)
class StepTarget:
    """A recorded step."""

    title: str
    trace: Mapping[str, Any]

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        return step_facts(self.title, self.trace)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The same step: there is nothing to change about what was recorded."""
        return self.facts()


def split_move(text: str) -> tuple[str, str] | None:
    """The two layouts of `A -> B`, or None.

    >>> split_move("f32[8] on tp=2: S(0) -> on tp=2: R")
    ('f32[8] on tp=2: S(0)', 'on tp=2: R')
    """
    before, arrow, after = text.partition("->")
    return (before.strip(), after.strip()) if arrow else None


def _read_window(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help='A layout, "A -> B", a checkpoint, one or two plans, or a trace.'),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write one self-contained HTML file.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="SOURCE", help="The model of a plan: package.module:function or config.json."),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port on the loopback interface; 0: any free one.")]
OpenBrowser = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]


def view(
    targets: Targets,
    output: Output = None,
    ranks_per_host: RanksPerHost = 8,
    buffer: Buffer = None,
    model: ModelName = None,
    batch: Batch = 8,
    sequence: SequenceLength = 4096,
    optimizer: Optimizer = "adamw",
    dtype: DtypeText = None,
    device: DeviceName = "h100",
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
      shardwise view plan.toml other.toml --model mypackage.models:make
      shardwise view step.json
    """
    if as_json and output is not None:
        raise LayoutError("--json prints what the page shows and -o writes the page; pass one of them")
    settings = {"batch": batch, "sequence": sequence, "optimizer": optimizer, "dtype": dtype, "device": device}
    with redirect_stdout(sys.stderr):  # the module of a model, and its forward pass, may print
        target = find_target(targets, ranks_per_host, buffer or "", model, settings)
        facts = target.facts(written=output is not None)
    if as_json:
        print_json(facts)
    elif output is not None:
        write_page(facts, output)
    else:
        serve(facts, target, port, open_browser)


def find_target(
    targets: Sequence[str], ranks_per_host: int, buffer: str, model: str | None, settings: Mapping[str, Any]
) -> PageTarget:
    """What the arguments name: files that exist, by what is in them, or else the notation."""
    if len(targets) > 2:
        raise LayoutError(f"a page shows one target, or two plans or layouts beside each other; got {len(targets)}")
    kinds = {find_file_kind(target) for target in targets}
    if kinds == {"plan"}:
        return _open_plans(targets, model, {**settings, "ranks_per_host": ranks_per_host})
    first, *others = targets
    if others:
        _check_layouts(targets)
        return MoveTarget(first, others[0], str(ranks_per_host), buffer)
    if kinds == {"trace"}:
        return StepTarget(first, read_trace(first))
    if kinds == {"checkpoint"}:
        return CheckpointTarget(open_checkpoint(first))
    move = split_move(first)
    return _check_layout(first, ranks_per_host) if move is None else MoveTarget(*move, str(ranks_per_host), buffer)


def find_file_kind(target: str) -> str | None:
    """Whether a target is a plan, a trace or a checkpoint; None: it is not a file, and so the notation."""
    if not os.path.exists(target):
        return "checkpoint" if "://" in target else None
    kind = Path(target).suffix.lower()
    if os.path.isdir(target):
        return "checkpoint"
    if kind in (".toml", ".yaml", ".yml"):
        return "plan"
    if kind != ".json":
        return "checkpoint"
    try:
        data = parse_json(Path(target).read_text(encoding="utf-8"))
    except ValueError:
        return "trace"  # whose reader says what is wrong
    if not isinstance(data, dict) or "traceEvents" in data:
        return "trace"
    return "plan" if "mesh" in data and "parameters" in data else "checkpoint"


def _check_layouts(targets: Sequence[str]) -> None:
    """Raise where one of two targets is a file: side by side are two plans, or two layouts as a move."""
    for target in targets:
        kind = find_file_kind(target)
        if kind is not None:
            raise LayoutError(f"{target} is a {kind}; two targets are two plans, or the two layouts of a move")


def _open_plans(paths: Sequence[str], model: str | None, settings: Mapping[str, Any]) -> PageTarget:
    from shardwise.page.plan_facts import open_plans  # loads torch, which other targets do without

    if model is None:
        raise LayoutError(
            f"{paths[0]} is a plan for a model; name it with --model package.module:function or --model config.json"
        )
    return open_plans(paths, model, settings)


def _check_layout(text: str, ranks_per_host: int) -> LayoutTarget:
    """The layout, or an error that also fits a file whose name is wrong."""
    target = LayoutTarget(text, ranks_per_host)
    try:
        target.facts()
    except NotationError as error:
        if "[" in text:
            raise
        raise CheckpointError(
            f"{text}: no such file or folder, and not a layout such as f32[8,6] on tp=2: S(0)"
        ) from error
    return target


def write_page(facts: dict[str, Any], output: Path) -> None:
    """Write the page to a file, complete or not at all; what is not a file, as a pipe, is written to."""
    data = render_document(facts).encode(errors="replace")  # a path that is not UTF-8
    if not output.name or output.is_dir():
        raise LayoutError(f"-o {str(output)!r} is a folder; name a file in it, such as {output / 'page.html'}")
    partial = output.with_name(f".{output.name}.partial")
    try:
        if output.exists() and not output.is_file():
            output.write_bytes(data)
        else:
            partial.write_bytes(data)
            partial.replace(output)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(output)) from error
    print(f"wrote {output}, {len(data):,} bytes")


def serve(facts: dict[str, Any], target: PageTarget, port: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    try:
        server = PageServer(facts, target.answer, port)
    except OSError as error:
        raise LayoutError(
            f"port {port} cannot be served on: {error.strerror}; pass another --port, or 0 for any free one"
        ) from error
    with server, write_link(server.address) if open_browser else nullcontext() as link:
        print(f"serving {server.address}  (Ctrl-C to stop)", flush=True)
        if link is not None:
            webbrowser.open(link)
        server.serve_forever()
