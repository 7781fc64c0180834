"""The command `shardwise`: all commands in one place."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from shardwise._version import __version__
from shardwise.cli.output import Commands

COMMANDS = {
    "show": "shardwise.cli.plan:show",
    "plan": "shardwise.cli.plan:plan",
    "view": "shardwise.cli.view:view",
    "model": "shardwise.cli.model:model",
    "topology": "shardwise.cli.plan:topology",
    "demo": "shardwise.cli.demo:demo",
    "doctor": "shardwise.cli.doctor:doctor",
    "check-rule": "shardwise.cli.check_rule:check_rule",
    "inspect": "shardwise.cli.inspect:inspect",
    "diff": "shardwise.cli.diff:diff",
    "digest": "shardwise.cli.diff:digest",
    "reshard": "shardwise.cli.reshard:command",
    "compact": "shardwise.cli.clean:compact",
    "clean": "shardwise.cli.clean:clean",
}
SETTINGS = {"help_option_names": ["-h", "--help"]}


class LazyCommands(Commands):
    """All commands, each loaded on demand: starting one takes a third less time."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:  # all of them: the nearest one is suggested
            if name not in self.commands:
                self.commands[name] = _load_command(name)
        return self.commands.get(cmd_name)


def _load_command(name: str) -> Any:
    module, _, function = COMMANDS[name].partition(":")
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, context_settings=SETTINGS)(getattr(import_module(module), function))
    return typer.main.get_command(alone)


# Plain help: rich formatting loads rich, which takes a quarter of the start-up time.
app = typer.Typer(
    name="shardwise",
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
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
    """Describe how tensors are laid out over ranks, plan transfers to any other layout, and manage checkpoints.

    \b
    Examples:
      shardwise show "f32[8,6] on dp=2,tp=2: S(0), S(1)"
      shardwise plan "f32[4096,1024] on tp=4: S(0)" "on tp=4: S(1)"
      shardwise model llama/config.json --mesh dp=128,tp=8 --dtype bf16
      shardwise topology --ranks 4 -o machine.toml
      shardwise view runs/step-1000
      shardwise inspect runs/step-1000 --verify
      shardwise diff runs/step-1000 runs/step-2000
      shardwise digest runs/step-1000
      shardwise reshard runs/step-1000 runs/for-2 --layout "S(0)" --ranks 2
      shardwise compact runs/weights
      shardwise clean runs
      shardwise doctor
      shardwise demo
    """
