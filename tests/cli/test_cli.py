"""Do the commands print what they promise, and turn mistakes into one line and exit status 2?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from shardwise import __version__, layout_from_json, parse_layout, plan_transfer
from shardwise.cli.demo import Chapter, draw_after, draw_before, explain_transfer
from shardwise.cli.main import COMMANDS, app, first_sentence
from shardwise.cli.output import parse_bytes, pointer_lines, shorten_title
from shardwise.geometry import LayoutError
from shardwise.view import line, plain_text

ROWS = "f32[4096,1024] on tp=4: S(0)"


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def output_of(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_prints_notation_picture_and_bytes() -> None:
    assert output_of("show", "float32[4] on tp=2:S(0) sizes(3,1)").splitlines() == [
        "f32[4] on tp=2: S(0) sizes(3,1)",
        "",
        "dim 0 (4) across",
        "        3       1",
        "  ┌───────────┬────┐",
        "  │     0     │ 1  │",
        "  └───────────┴────┘",
        "",
        "rank  local tensors  elements  bytes",
        "   0           (3,)         3   12 B",
        "   1           (1,)         1    4 B",
        "the tensor has 16 B; 2 ranks hold 16 B, from 4 B to 12 B each",
    ]


def test_show_json_holds_the_layout_and_each_rank() -> None:
    data = json.loads(output_of("show", "--json", "bf16[5,2] on dp=2,tp=2: P, S(0)"))
    tensor = parse_layout(data["notation"])
    assert layout_from_json(data["layout"]) == tensor.layout
    assert (data["dtype"], data["itemsize"], data["bytes"], data["pending"]) == ("bf16", 2, 20, "sum")
    assert [r["bytes"] for r in data["ranks"]] == [12, 8, 12, 8]
    assert data["ranks"][3] == {
        "rank": 3,
        "elements": 4,
        "bytes": 8,
        "local_shapes": [[2, 2]],
        "pieces": [{"offsets": [3, 0], "sizes": [2, 2]}],
    }


def test_plan_prints_the_figures() -> None:
    lines = output_of("plan", ROWS, "on tp=4: S(1)").splitlines()
    figures = dict(row.split("  ", 1) for row in lines[:10])
    assert {name: value.strip() for name, value in figures.items() if name != "estimate"} == {
        "from": ROWS,
        "to": "f32[4096,1024] on tp=4: S(1)",
        "moved": "12.6 MB, lower bound 12.6 MB",
        "between hosts": "0 B (lower bound 0 B)",
        "copied locally": "4.2 MB",
        "rounds": "1",
        "collective": "all_to_all of 4 ranks",
        "busiest sender": "rank 0, 3.1 MB",
        "busiest receiver": "rank 0, 3.1 MB",
    }
    assert "us (8 ranks per host, 300.0 GB/s within and 25.0 GB/s between hosts)" in figures["estimate"]
    assert lines[10:13] == ["", "from  to   bytes", "   0   1  1.0 MB"]
    assert lines[-1] == "In total 12.6 MB move, the lower bound, 0 B of it between hosts."


def test_plan_of_nothing_has_no_edges() -> None:
    out = output_of("plan", ROWS, "as chunk(0) over 0-3")
    assert "moved             0 B, lower bound 0 B" in out
    assert "from  to" not in out


def test_plan_lists_only_the_first_edges() -> None:
    out = output_of("plan", "f32[64,64] on tp=8: S(0)", "on tp=8: S(1)")
    assert "and 40 more edges" in out
    assert len(out.splitlines()) < 40


def test_plan_sums_the_edges_of_all_steps() -> None:
    out = output_of("plan", "f32[8] on a=2,b=2: P, S(0)", "on a=2,b=2: R, R")
    transfer = plan_transfer(
        parse_layout("f32[8] on a=2,b=2: P, S(0)").layout, parse_layout("f32[8] on a=2,b=2: R, R").layout, itemsize=4
    )
    rows = [
        tuple(map(int, row.removesuffix(" B").split()))
        for row in out.splitlines()
        if row.endswith(" B") and row[0] == " "
    ]
    assert {(s, d): n for s, d, n in rows} == transfer.bytes_by_edge


def test_plan_takes_hosts_and_a_buffer() -> None:
    one = json.loads(output_of("plan", ROWS, "on tp=4: S(1)", "--json"))
    many = json.loads(output_of("plan", ROWS, "on tp=4: S(1)", "--json", "--buffer", "1MB", "--ranks-per-host", "1"))
    assert (one["max_buffer_bytes"], many["max_buffer_bytes"]) == (None, 1_000_000)
    assert one["rounds"] == 1 < many["rounds"]
    assert one["estimate_seconds"] < many["estimate_seconds"]
    assert many["topology"]["ranks_per_host"] == 1
    assert many["moved_bytes"] == many["lower_bound_bytes"] == 12_582_912
    assert many["busiest_sender"] == [0, 3_145_728]


MISTAKES = [
    (("show", "f33[4]"), "error: unknown dtype 'f33'; did you mean f32?\n  f33[4]\n  ^\n"),
    (
        ("show", "f32[4] on tp=2: S(0) sizes(1,2)"),
        "error: dim 0 of length 4 is split into sizes (1, 2) over axis 'tp' of 2 ranks; pass 2 sizes that add up to 4\n"
        "  f32[4] on tp=2: S(0) sizes(1,2)\n"
        "                  ^\n",
    ),
    (
        ("plan", ROWS, "bf16[4096,1024]"),
        "error: a transfer keeps the dtype, but the source is f32 and the destination bf16; omit dtype and shape "
        "in the destination to use those of the source\n",
    ),
    (
        ("plan", ROWS, "f32[4096]"),
        "error: a transfer keeps the shape, but the source has (4096, 1024) and the destination (4096,); omit dtype "
        "and shape in the destination to use those of the source\n",
    ),
    (
        ("plan", ROWS, "on tp=4: S(1)", "--buffer", "many"),
        "error: 'many' is not a number of bytes; write for example 64MB, 1.5GiB or 4096\n",
    ),
    (
        ("plan", "a.toml", "b.toml"),
        "error: a.toml and b.toml: plans of whole models need the model: --model MODEL a.toml b.toml\n",
    ),
    (
        ("show", "tp=4: S(0)"),
        "error: expected a dtype and a shape such as f32[8,4]; found 'tp'; write f32[8,4] on tp=4: S(0)\n"
        "  tp=4: S(0)\n  ^\n",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistake_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


def test_mistake_is_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("show", "f33[4]").stderr.startswith("\x1b[31merror: unknown dtype 'f33'; did you mean f32?\x1b[0m\n")


def test_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.cli.plan.parse_layout", lambda text: 1 // 0)
    assert isinstance(run("show", "f32[4]").exception, ZeroDivisionError)


def test_pointer_stays_in_view() -> None:
    text = "f32[9] as pieces " + ", ".join(f"{r}[{r}:{r + 1}]" for r in range(30))
    shown, pointer = pointer_lines(text, 200)
    assert shown[pointer.index("^")] == text[200]
    assert len(shown) < 82
    assert pointer_lines("f32[4", 5) == ["  f32[4", "       ^"]


@pytest.mark.parametrize("command", ["show", "plan", "demo"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert f"  shardwise {command}" in output_of(command, "--help")
    assert f"    shardwise {command}" in output_of("--help")


def test_demo_draws_two_layouts_and_the_transfer() -> None:
    first, second, third = draw_before(), draw_after(), explain_transfer()
    assert first.heading == "A tensor is split over a 2 x 2 mesh of ranks."
    assert plain_text(second.lines).startswith("f32[8,8] on rows=4 @ 2,0,3,1: S(0) sizes(3,1,0,4)\n")
    assert "moved             240 B, lower bound 240 B" in plain_text(third.lines)
    assert third.data["transfer"]["moved_bytes"] == 240


@pytest.mark.parametrize(("status", "end"), [(0, "Everything is equal"), (1, "SOMETHING DIFFERS")])
def test_demo_ends_with_1_if_a_chapter_went_wrong(status: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = status == 0
    chapters = [Chapter("One.", [line("row")], {"a": 1}), Chapter("Two.", [], {"b": [2]}, right)]
    monkeypatch.setattr("shardwise.cli.demo.run_chapters", lambda show: iter(chapters))
    told, data = run("demo"), run("demo", "--json")
    assert (told.exit_code, data.exit_code) == (status, status)
    assert told.stdout.startswith(f"1. One.\n\nrow\n\n2. Two.\n\n{end}")
    assert json.loads(data.stdout) == {"a": 1, "b": [2], "right": right}


TRAINED = """
mesh = "fsdp=2,tp=2"
[parameters]
"layers.*.up" = "fsdp: S(0), tp: S(1)"
[shapes]
"layers.{0-9}.up" = "bf16[64,32]"
"norm" = "f32[64]"
"""
SERVED = """
mesh = "tp=2"
[parameters]
"layers.*.up" = "tp: S(1)"
"""


def test_plan_of_a_whole_model(tmp_path: Path) -> None:
    paths = str(tmp_path / "trained.toml"), str(tmp_path / "served.toml")
    for path, text in zip(paths, (TRAINED, SERVED), strict=True):
        Path(path).write_text(text)
    data = json.loads(output_of("plan", "--model", *paths, "--apart", "--json", "--ranks-per-host", "4"))
    up, norm = 64 * 32 * 2, 64 * 4
    assert (data["tensors"], data["moved_bytes"]) == (11, 10 * up + 2 * norm)
    assert data["busiest_receiver"] == [4, 5 * up + norm]
    assert data["groups"][0]["to"] == "bf16[64,32] on tp=2 @ 4-5: S(1)"
    told = output_of("plan", "--model", *paths)
    assert f"from              fsdp=2,tp=2: 4 ranks, {paths[0]}" in told
    assert "tensors           11 of 2 kinds" in told and "busiest link      rank" in told
    within = json.loads(output_of("plan", "--model", *paths, "--json", "--dtype", "f32"))
    assert within["moved_bytes"] == 10 * 64 * 32 * 4 // 2  # ranks 0 and 1 have half of theirs
    wrong = run("plan", "--model", paths[1], paths[1])
    assert wrong.exit_code == 2 and "has shapes; pass a model" in wrong.output
    (tmp_path / "served.toml").write_text(SERVED.replace(".up", ".down"))
    wrong = run("plan", "--model", *paths)
    assert wrong.exit_code == 2 and "down" in wrong.output
    (tmp_path / "trained.toml").write_text(TRAINED.replace("bf16[64,32]", "64 x 32"))
    wrong = run("plan", "--model", *paths)
    assert wrong.exit_code == 2 and "shapes 'layers.{0-9}.up' is a type and a shape" in wrong.output
    wrong = run("plan", "--model", *paths, "--buffer", "1MB")
    assert wrong.exit_code == 2 and "for the transfer of one tensor" in wrong.output


def test_plan_of_a_checkpoint_between_plans(tmp_path: Path) -> None:
    save_file({"layers.0.up": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    paths = str(tmp_path / "trained.toml"), str(tmp_path / "served.toml")
    for path, text in zip(paths, (TRAINED, SERVED), strict=True):
        Path(path).write_text(text)
    data = json.loads(output_of("plan", "--model", str(tmp_path / "model.safetensors"), *paths, "--apart", "--json"))
    assert (data["tensors"], data["moved_bytes"]) == (1, 64 * 32 * 4)


def test_version() -> None:
    assert output_of("--version") == f"shardwise {__version__}\n"


def test_long_titles_are_cut() -> None:
    assert len(shorten_title("x" * 10_000)) == 301


@pytest.mark.parametrize("text", ["", "0", "-1MB", "1XB", "1e6", "0.2B", "1 2"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="is not a number of bytes"):
        parse_bytes(text)


RUN_WITHOUT = """
import sys
sys.argv = ["shardwise", *sys.argv[1:]]
from shardwise.cli.main import app
try:
    app()
except SystemExit as stop:
    assert not stop.code, stop.code
loaded = {name.split(".")[0] for name in sys.modules}
print("loaded:", *sorted({"torch", "rich"} & loaded))
"""


@pytest.mark.parametrize("arguments", [("--help",), ("show", "f32[4]"), ("plan", ROWS, "@ 0")])
def test_no_command_loads_torch_and_plain_text_needs_no_rich(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", RUN_WITHOUT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_help_loads_what_it_prints_and_nothing_else() -> None:
    """Not NumPy, a server, or any command; each has its first sentence all the same."""
    code = "import sys; from shardwise.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass\n"
    names = {"numpy", "http.server", "torch", "rich", "shardwise.cli.plan"}
    code += f"print('loaded:', *sorted({names!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
    for name in COMMANDS:
        command = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]  # a group
        assert " ".join(first_sentence(command.help).split()) in " ".join(done.stdout.split()), name


PROGRAM = "import sys; from shardwise.cli.main import app; sys.argv[0] = 'shardwise'; app()"


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = [sys.executable, "-W", "error", "-c", PROGRAM, "show", "--json", "f32[4096] on tp=4096: S(0)"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=240)) == ("", 141)
    process.stderr.close()


def test_an_interrupt_is_one_line_and_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.cli.plan.parse_layout", interrupted)
    result = run("show", "f32[4]")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
