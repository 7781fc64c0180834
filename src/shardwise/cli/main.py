"""The command `shardwise`: all commands in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise._version import __version__
from shardwise.cli.check_rule import check_rule
from shardwise.cli.clean import clean
from shardwise.cli.demo import demo
from shardwise.cli.diff import diff
from shardwise.cli.errors import Commands
from shardwise.cli.inspect import inspect
from shardwise.cli.plan import plan
from shardwise.cli.reshard import command as reshard
from shardwise.cli.show import show

# Plain help texts: the rich ones load rich, which takes a quarter of the start-up time.
app = typer.Typer(
    name="shardwise", cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Describe how a tensor is laid out over ranks, and plan its way to any other layout.

    \b
    Examples:
      shardwise show "f32[8,6] on dp=2,tp=2: S(0), S(1)"
      shardwise plan "f32[4096,1024] on tp=4: S(0)" "on tp=4: S(1)"
      shardwise inspect runs/step-1000 --verify
      shardwise diff runs/step-1000 runs/step-2000
      shardwise clean runs
      shardwise demo
    """


app.command()(show)
app.command()(plan)
app.command()(demo)
app.command()(check_rule)
app.command()(inspect)
app.command()(diff)
app.command()(clean)
app.command("reshard")(reshard)
