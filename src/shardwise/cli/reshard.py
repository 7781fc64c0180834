"""`shardwise reshard`: rewrite a checkpoint in another layout, for other ranks, or in another format."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats import FORMATS
from shardwise.checkpoint.resharding import ReshardReport, reshard
from shardwise.cli.output import (
    INTERRUPTED,
    AsJson,
    PlanFile,
    escape_for_terminal,
    format_count,
    format_seconds,
    parse_bytes,
    print_json,
    shorten_title,
)
from shardwise.geometry import LayoutError
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line, print_lines

_LISTED = 5


_WRITABLE = [known for known in FORMATS if known.writable]
FormatName = StrEnum("FormatName", {known.name: known.name for known in _WRITABLE})  # type: ignore[misc]  # from a table
_DEFAULT_FORMAT = FormatName(FORMATS[0].name)
_TITLES = "; ".join(f"{known.name}: {known.title}" for known in _WRITABLE if known.name != known.title)
SourcePath = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint: shardwise, torch, Hugging Face; a .pt file.")
]
Destination = Annotated[str, typer.Argument(metavar="DST", help="The folder to write, or a URL.")]
LayoutText = Annotated[
    str | None,
    typer.Option("--layout", metavar="TEXT", help='For all tensors: "S(0)" with --ranks, or "on tp=4: S(0)".'),
]
Ranks = Annotated[int | None, typer.Option(min=1, metavar="N", help="The number of ranks of a short layout.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="GLOB", help="Take only what has this name, * and ? allowed; may be repeated."),
]
Except = Annotated[list[str] | None, typer.Option("--except", metavar="GLOB", help="Leave this out; may be repeated.")]
Names = Annotated[
    Path | None,
    typer.Option("--names", metavar="FILE", help="A .toml map: rename, split, fuse, stack, transpose."),
]
Element = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="Convert floats, as to bf16 or f32.")]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FOLDER", help="Copy config.json and tokenizer files from here (hf)."),
]
AsFormat = Annotated[FormatName, typer.Option("--format", help=f"{_TITLES}.")]
Workers = Annotated[int | None, typer.Option(min=1, metavar="W", help="Processes to copy with; by size and cores.")]
Memory = Annotated[str, typer.Option(metavar="SIZE", help="Memory that all processes together may use.")]
MaxFile = Annotated[str | None, typer.Option("--max-file", metavar="SIZE", help="Maximum bytes of tensors per file.")]
Unchecked = Annotated[bool, typer.Option("--no-verify", help="Do not check the checksums of the source.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint DST once all is written.")]
Restart = Annotated[bool, typer.Option("--restart", help="Do not resume a run that was stopped; start over.")]


def command(
    src: SourcePath,
    dst: Destination,
    plan: PlanFile = None,
    layout: LayoutText = None,
    ranks: Ranks = None,
    format: AsFormat = _DEFAULT_FORMAT,
    only: Only = None,
    exclude: Except = None,
    names: Names = None,
    dtype: Element = None,
    config: Config = None,
    workers: Workers = None,
    memory: Memory = "256MB",
    max_file: MaxFile = None,
    no_verify: Unchecked = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint in another layout, for other ranks, under other names, or in another format.

    Tensors that --plan does not name are replicated; without --plan and --layout they keep their layouts. A Hugging
    Face folder gets the model without its optimizer. A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      shardwise reshard runs/step-1000 runs/for-2 --layout "S(0)" --ranks 2
      shardwise reshard runs/step-1000 runs/tp4 --plan plan.toml --memory 1GB
      shardwise reshard runs/step-1000 runs/model --format hf --config base
      shardwise reshard model.pt runs/start --names map.toml --dtype bf16
    """
    options: dict[str, Any] = {
        "plan": None if plan is None else load_plan_file(plan),
        "layout": layout,
        "ranks": ranks,
        "format": format.value,
        "only": only or (),
        "exclude": exclude or (),
        "names": names,
        "dtype": dtype,
        "config": config,
        "workers": workers,
        "max_buffer_bytes": parse_bytes(memory),
        "max_file_bytes": None if max_file is None else parse_bytes(max_file),
        "verify": not no_verify,
        "overwrite": overwrite,
        "resume": not restart,
    }
    try:
        report = reshard(src, dst, **options)
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here, `shardwise clean` removes it", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except (LayoutError, CheckpointError):
        raise
    except ValueError as error:  # a plan that does not fit
        raise LayoutError(str(error)) from error
    if as_json:
        print_json(report_json(report))
    else:
        print_lines(report_lines(report), sys.stdout)


def load_plan_file(path: Path) -> Any:
    """The plan in a file; what is wrong with it is an error like any other."""
    from shardwise.nn import load_plan  # loads torch

    try:
        return load_plan(path)
    except ValueError as error:
        raise LayoutError(str(error)) from error


def report_json(report: ReshardReport) -> dict[str, Any]:
    """What was done, as plain data."""
    return {**vars(report), "path": str(report.path)}


def report_lines(report: ReshardReport) -> list[Line]:
    """What was done, in words."""
    where = f" for {format_count(len(report.ranks), 'rank')}" if report.ranks else ""
    rate = format_bytes((report.bytes - report.kept_bytes) / max(report.seconds, 1e-9))
    lines = [
        f"wrote {report.path} ({report.format}): {format_count(report.tensors, 'tensor')}, "
        f"{format_bytes(report.bytes)} in "
        f"{format_count(report.files, 'file')}{where}",
        f"{format_seconds(report.seconds)}, {rate}/s, {format_count(report.workers, 'worker')}",
    ]
    if report.kept_bytes:
        lines.append(f"{format_bytes(report.kept_bytes)} were kept from a run that was stopped")
    if report.unfit:
        lines.append(
            f"replicated along axes that split a dim they lack, or that do not fit: {_list_some_names(report.unfit)}"
        )
    if report.repeated:
        lines.append(f"the same bytes as another tensor, written again: {_list_some_names(report.repeated)}")
    if report.copied:
        lines.append(f"copied along: {_list_some_names(report.copied)}")
    if report.left_out:
        lines.append(
            "left out, since the format has no place for them or they cannot be read: "
            f"{_list_some_names(report.left_out)}"
        )
    return [line(text) for text in lines]


def _list_some_names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(escape_for_terminal(shorten_title(name)) for name in names[:_LISTED]) + more
