"""Does every command keep the common promises: help with an example, --json, exit statuses, completion?"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.checkpoint.formats.huggingface import header_bytes
from shardwise.cli.main import COMMANDS, _load_command, app

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def safetensors(path: Path, *names: str) -> Path:
    """A file with tensors of these names, each of two zeros."""
    path.write_bytes(header_bytes({name: ("F32", [2], 8) for name in names}) + bytes(8 * len(names)))
    return path


def test_there_are_commands() -> None:
    assert {"show", "plan", "demo", "check-rule", "inspect", "diff", "clean", "reshard"} <= set(COMMANDS)


def test_a_command_loads_no_other_and_a_wrong_name_gets_a_suggestion() -> None:
    code = "import sys; from shardwise.cli.main import app; app(standalone_mode=False); print(*sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code, "show", "f32[4]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "shardwise.cli.plan" in loaded
    assert not {"shardwise.cli.inspect", "shardwise.checkpoint.index", "torch"} & set(loaded)
    wrong = CliRunner().invoke(app, ["inspct"])
    assert wrong.exit_code == 2 and wrong.stderr == "error: no such command 'inspct'; did you mean 'inspect'?\n"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "shardwise", "show"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: missing argument 'LAYOUT'; see shardwise show --help\n")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ('show "f32[4]" >&-', 0, ""),
        ('show "f32[4]" > /dev/full', 2, "error: No space left on device\n"),
        ('show "f32[4]" --json > /dev/full', 2, "error: No space left on device\n"),
        ('show "f33[4]" 2>&-', 2, ""),
    ],
)
def test_closed_and_full_streams_have_no_traceback(words: str, status: int, message: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m shardwise {words}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (status, message)


def test_an_error_does_not_steer_the_terminal() -> None:
    result = CliRunner().invoke(app, ["show", "f32[4]\x1b[31m on"])
    assert "\x1b" not in result.stderr and "  f32[4]\\x1b[31m on\n" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example_that_begins_with_it(command: str) -> None:
    text = output_of(command, "--help")
    assert re.search(r"Examples?:\n", text)
    examples = [row for row in text.splitlines() if row.startswith("    shardwise ")]
    assert examples and all(row.startswith(f"    shardwise {command}") for row in examples)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns_and_is_not_cut(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of(*command.split(), "-h")
    assert text == output_of(*command.split(), "--help")
    cut = [row for row in text.splitlines() if len(row) > 80 or row.endswith("...")]
    assert [row for row in cut if not row.startswith("Usage: ")] == []


ERRORS = {
    ("show", "f33[4]"): "unknown dtype 'f33'; did you mean f32?",
    ("show",): "missing argument 'LAYOUT'; see shardwise show --help",
    ("inspect", "a", "-x"): "no such option: -x; see shardwise inspect --help",
    ("inspect", "nowhere"): "nowhere: no such file or folder; expected ",
    ("diff", "a"): "missing argument 'B'; see shardwise diff --help",
    ("no-such-command",): "no such command 'no-such-command'; see shardwise --help",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_errors_are_one_style_and_json_with_json(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, data = (CliRunner().invoke(app, [*arguments, *more]) for more in ([], ["--json"]))
    assert (plain.exit_code, plain.stdout, data.exit_code, data.stderr) == (2, "", 2, "")
    assert plain.stderr.startswith(f"error: {ERRORS[arguments]}")
    (row,) = data.stdout.splitlines()
    error = json.loads(row)["error"]
    assert error["message"].startswith(ERRORS[arguments]) and error["status"] == 2
    assert ("position" in error) == ("dtype" in error["message"])


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_json_and_a_section_of_the_page(command: str) -> None:
    options = {name for parameter in _load_command(command).params for name in parameter.opts}
    assert "--json" in options
    assert f"\n## {command}" in PAGE
    assert f"\n| `{command}` |" in PAGE, "the table of JSON documents has a row for it"


def keys_on_page(command: str) -> set[str]:
    """The keys that the page says a command's JSON document has."""
    row = next(row for row in PAGE.splitlines() if row.startswith(f"| `{command}` |"))
    return set(re.findall(r"`([a-z_]+)`", row.split("|")[2]))


def test_json_documents_have_the_keys_that_the_page_says(tmp_path: Path) -> None:
    file = str(safetensors(tmp_path / "a.safetensors", "x"))
    cases = {
        "show": ("f32[4] on tp=2: S(0)",),
        "plan": ("f32[4] on tp=2: S(0)", "on tp=2: R"),
        "inspect": (file,),
        "diff": (file, file),
        "clean": (str(tmp_path),),
    }
    for command, arguments in cases.items():
        lines = output_of(command, *arguments, "--json").splitlines()
        assert len(lines) == 1
        assert set(json.loads(lines[0])) == keys_on_page(command), command


def test_statuses_are_those_of_the_page(tmp_path: Path) -> None:
    a, b = safetensors(tmp_path / "a.safetensors", "x"), safetensors(tmp_path / "b.safetensors", "y")
    cases: dict[int, list[tuple[object, ...]]] = {
        0: [("inspect", a), ("diff", a, a), ("show", "f32[4]"), ("--version",), ("clean", tmp_path)],
        1: [("diff", a, b)],
        2: [("inspect", tmp_path / "c"), ("diff", a), ("show", "f33[4]"), ("no-such-command",), ("inspect", a, "-x")],
    }
    for status, commands in cases.items():
        assert f"\n| {status} | " in PAGE
        for command in commands:
            assert CliRunner().invoke(app, list(map(str, command))).exit_code == status, command
    assert "\n| 130 | " in PAGE and "\n| 141 | " in PAGE


def test_files_that_may_not_be_read_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shardwise.cli.inspect.open_store", denied)
    path = str(safetensors(tmp_path / "a.safetensors", "x"))
    result = CliRunner().invoke(app, ["inspect", path])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {path}: Permission denied\n")


def test_names_in_a_file_do_not_steer_the_terminal(tmp_path: Path) -> None:
    a = safetensors(tmp_path / "a.safetensors", "x\x1b[31m\n", "\ud800")
    b = safetensors(tmp_path / "b.safetensors", "y\x07")
    out = output_of("inspect", str(a)) + CliRunner().invoke(app, ["diff", str(a), str(b)]).stdout
    assert "x\\x1b[31m\\n" in out and "\\ud800" in out and "only in B: tensor y\\x07" in out
    assert all(row.isprintable() for row in out.splitlines())


def shell(words: str, instruction: str = "complete_bash") -> list[str]:
    """What the program offers to a shell that completes the last of these words."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_SHARDWISE_COMPLETE": instruction}
    result = CliRunner().invoke(app, [], prog_name="shardwise", env=asked)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.split()


def test_shells_complete_commands_and_names_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors(tmp_path / "a.safetensors", "model.w", "model.b", "step")
    assert shell("shardwise ins") == ["inspect"]
    assert shell("shardwise inspect --ver") == ["--verify"]
    assert shell("shardwise inspect a.safetensors --name model.") == ["model.w", "model.b"]
    assert shell("shardwise diff a.safetensors b --name s") == ["step"]
    assert shell("shardwise inspect nothing --name s") == []
    assert shell("", "source_bash")[-4:] == ["default", "-F", "_shardwise_completion", "shardwise"]


WAITING = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
import shardwise.cli.inspect as checkpoints
from shardwise.cli.main import app

def slow(path):
    print("ready", flush=True)
    import time
    time.sleep(600)

checkpoints.open_store = slow
sys.argv[0] = "shardwise"
app()
"""


def test_ctrl_c_on_a_running_command_is_one_line(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", "x")
    command = [sys.executable, "-c", WAITING, "inspect", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (130, "interrupted\n")
