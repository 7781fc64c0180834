"""The command `shardwise`: all commands in one place."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwise._version import __version__

COMMANDS = {
    "show": "shardwise.cli.plan:show",
    "plan": "shardwise.cli.plan:plan",
    "view": "shardwise.cli.view:view",
    "model": "shardwise.cli.model:model",
    "autoplan": "shardwise.cli.model:autoplan",
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
_AS_JSON = "json"
SETTINGS = {"help_option_names": ["-h", "--help"]}


class LazyCommands(TyperGroup):
    """All commands, each loaded when it is called; errors become messages.

    The list of commands loads none of them, so that help comes at once: their docstrings are read from the files.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:  # all of them: the nearest one is suggested
            if name not in self.commands:
                self.commands[name] = _load_command(name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List all commands, each with the first sentence of its help, on as many lines as that takes."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(_read_docstring(place))) for name, place in COMMANDS.items()])

    def main(
        self,
        args: Any = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Run the command line; what it cannot read is one line, as every error."""
        _open_missing_streams()
        given = [str(word) for word in (sys.argv[1:] if args is None else args)]
        if not standalone_mode or not given:
            return super().main(given, prog_name, complete_var, standalone_mode, *rest, **options)
        as_json = "--json" in given
        try:
            status = super().main(given, prog_name, complete_var, False, *rest, obj={_AS_JSON: as_json}, **options)
        except typer.Abort:
            print("interrupted", file=sys.stderr)
            sys.exit(_output().INTERRUPTED)
        except Exception as error:
            if not hasattr(error, "format_message"):  # what the arguments' parser raises, and nothing else, has it
                raise
            output = _output()
            output.report_error(output.LayoutError(usage_message(error)), as_json)
            sys.exit(output.UNUSABLE)
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(_output().INTERRUPTED) from None
        except BrokenPipeError:
            _output().discard_output()
            raise typer.Exit(_output().NO_READER) from None
        except Exception as error:
            if not isinstance(error, _output().REPORTED):
                raise
            _output().report_error(error, isinstance(ctx.obj, dict) and bool(ctx.obj.get(_AS_JSON)))
            raise typer.Exit(_output().UNUSABLE) from error


def _output() -> Any:
    """The module that writes results and errors; it loads NumPy, which help does not need."""
    return import_module("shardwise.cli.output")


def _read_docstring(place: str) -> str:
    """The docstring of a command, without loading its module."""
    module, _, function = place.partition(":")
    text = Path(__file__).with_name(f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8")
    found = re.search(rf'^def {function}\(.*?"""(.*?)"""', text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def first_sentence(text: str) -> str:
    """The first sentence of a help text, on one line.

    >>> first_sentence("Draw a layout,\\nin colour. More about it.")
    'Draw a layout, in colour'
    """
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def usage_message(error: Any) -> str:
    """What is wrong with the arguments, and where to look.

    >>> import typer
    >>> usage_message(typer.BadParameter("'x' is not a number."))
    "invalid value: 'x' is not a number; see --help"
    """
    text = error.format_message().rstrip(".").replace(". Did you mean", "; did you mean")
    command = f"{error.ctx.command_path} --help" if getattr(error, "ctx", None) is not None else "--help"
    return f"{text[:1].lower()}{text[1:]}{'' if text.endswith('?') else f'; see {command}'}"


def _open_missing_streams() -> None:
    """Let what is written to a stream that was closed (`>&-`) go nowhere: Python has None in its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends


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
