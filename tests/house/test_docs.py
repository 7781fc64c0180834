"""Does every piece of code in README.md and docs/ do what the page says?

1. A page is cut into fenced blocks. `<!-- not run: reason -->` right before a block leaves it out.
2. All blocks of a page run in order in one fresh process, in an empty folder, and share one namespace.
3. A `python` block with `>>>` is a doctest. Another one is executed; a `text` block directly after it is its output.
4. A `console` or `bash` block that starts with `$ shardwise ` is run; the output shown is compared.

`python -m tests.house.test_docs PAGE` runs one page by hand.
"""

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import textwrap
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked import run_forked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = {"python", "py", "python3", "pycon"}
SHELL = {"console", "bash", "sh", "shell"}
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^`]*$")
NOT_RUN = re.compile(r"^\s*<!--\s*not run:(?P<reason>.*?)-->\s*$")
PROMPT = "$ "
COMMAND = PROMPT + "shardwise "
PAGE_SECONDS = 480


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of its first row, and whether the page says not to run it."""

    language: str
    body: str
    line: int
    not_run: bool = False
    output: str | None = None


def blocks_of(text: str) -> list[Block]:
    """Cut a page into blocks; a `text` block directly after a `python` block becomes that block's output."""
    found: list[Block] = []
    previous, end = "", 0
    lines = text.splitlines()
    rows = iter(enumerate(lines, start=1))
    for number, row in rows:
        fence = FENCE.match(row)
        if not fence:
            previous = row if row.strip() else previous
            continue
        body = "\n".join(_rows_until(fence["ticks"], rows))
        block = Block(fence["language"].lower(), textwrap.dedent(body), number + 1, _is_marked(previous, number))
        between = "".join(lines[end : number - 1]).strip()
        if block.language == "text" and found and found[-1].language in PYTHON and not between:
            found[-1] = Block(found[-1].language, found[-1].body, found[-1].line, found[-1].not_run, block.body)
        else:
            found.append(block)
        previous, end = "", number + 1 + (body.count("\n") + 1 if body else 0)
    return found


def _rows_until(ticks: str, rows: Iterator[tuple[int, str]]) -> Iterator[str]:
    for _, row in rows:
        if row.strip().startswith(ticks) and not row.strip().strip(ticks[0]):
            return
        yield row


def _is_marked(previous: str, line: int) -> bool:
    marker = NOT_RUN.match(previous)
    assert not marker or marker["reason"].strip(), f"line {line}: 'not run:' needs a reason"
    return bool(marker)


def run_page(path: Path) -> list[str]:
    """Run the blocks of a page in the current folder and process; return what went wrong, one text per block."""
    module = types.ModuleType("page")
    sys.modules["page"] = module
    found = [(block, _run_block(block, path, module.__dict__)) for block in blocks_of(path.read_text())]
    return [f"{path.name}:{block.line}: {problem}" for block, problem in found if problem]


def _run_block(block: Block, path: Path, namespace: dict[str, object]) -> str:
    if not block.language:
        return "a block without a language; write text for what is not code"
    if block.not_run:
        return ""
    if block.language in PYTHON:
        run = _run_doctest if block.body.lstrip().startswith(">>>") else _run_python
        return run(block, path, namespace)
    return _run_shell(block) if block.language in SHELL else ""


def _run_doctest(block: Block, path: Path, namespace: dict[str, object]) -> str:
    if block.output is not None:
        return "a >>> block shows its output itself; remove the text block after it"
    test = doctest.DocTestParser().get_doctest(block.body, {}, path.name, str(path), block.line - 1)
    test.globs = namespace
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    return "".join(report)


def _run_python(block: Block, path: Path, namespace: dict[str, object]) -> str:
    source = "\n" * (block.line - 1) + block.body  # so that tracebacks show the lines of the page
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(path), "exec"), namespace)
    except (Exception, SystemExit):
        return traceback.format_exc()
    return "" if block.output is None else difference(block.output, printed.getvalue())


def _run_shell(block: Block) -> str:
    if not block.body.startswith(COMMAND):
        named = re.search(r"^(\$ )?shardwise ", block.body, flags=re.MULTILINE)
        return f"start the block with '{COMMAND}...' so that it is run, or say why it is not" if named else ""
    steps = re.split(r"^\$ ", block.body, flags=re.MULTILINE)[1:]
    return "\n".join(filter(None, map(_run_command, steps)))


def _run_command(step: str) -> str:
    rows = step.splitlines(keepends=True)
    last = next(i for i, row in enumerate(rows) if not row.endswith("\\\n"))
    command, shown = "".join(rows[: last + 1]).rstrip("\n"), "".join(rows[last + 1 :])
    bash = ["bash", "-c", command]
    done = subprocess.run(bash, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if shown.strip():  # an error that the page shows is an output like another
        problem = difference(shown, done.stdout)
    else:
        problem = f"exit status {done.returncode}\n{done.stdout}" if done.returncode else ""
    return f"{PROMPT}{command}\n{problem}" if problem else ""


def difference(shown: str, printed: str) -> str:
    """What differs between the output shown and the one printed; `...` stands for anything, line ends do not count."""
    want, got = (re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n") + "\n" for text in (shown, printed))
    checker = doctest.OutputChecker()
    if checker.check_output(want, got, doctest.ELLIPSIS):
        return ""
    return checker.output_difference(doctest.Example("", want), got, doctest.REPORT_NDIFF)


def run_in_fresh_process(path: Path, folder: Path) -> tuple[int, str]:
    """Run a page in a new process group, so that a page that hangs ends together with all it has started."""
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return run_forked(main, str(path), folder=folder, settings=here | plain, limit=PAGE_SECONDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path) -> None:
    status, report = run_in_fresh_process(page, tmp_path)
    assert status == 0, report


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"(`+).*?\1", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)", prose)
    local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
    assert [t for t in local if not (page.parent / t).exists()] == []


# What the checks above accept and refuse, each on a page of its own.

GOOD = """
```python
x = 2
print(x, [1, 2])
```

```text
2 [1, ...]
```

1. In a list:

   ```python
   def double(y):
       return 2 * y
   ```

```python
>>> double(x)
4
```

<!-- not run: needs another machine -->
```python
raise RuntimeError
```
"""

WRONG = {
    "raises": ("```python\n1 / 0\n```", "ZeroDivisionError"),
    "exits": ("```python\nraise SystemExit(0)\n```", "SystemExit"),
    "warns": ("```python\nimport warnings\nwarnings.warn('old')\n```", "UserWarning: old"),
    "output": ("```python\nprint(1)\n```\n\n```text\n2\n```", "+ 1"),
    "no output": ("```python\nx = 1\n```\n```text\n2\n```", "- 2"),
    "doctest": ("```python\n>>> 1 + 1\n3\n```", "Expected"),
    "in a list": ("- item\n\n  ```python\n  1 / 0\n  ```", "ZeroDivisionError"),
    "marker without a reason": ("<!-- not run: -->\n```python\n1 / 0\n```", "needs a reason"),
    "marker too early": ("<!-- not run: old -->\n\ntext\n\n```python\n1 / 0\n```", "ZeroDivisionError"),
    "no language": ("```\nx = 1\n```", "without a language"),
    "unknown command": ("```console\n$ shardwise no-such-command\n```", "exit status"),
    "command output": ("```console\n$ shardwise --help\nnothing\n```", "- nothing"),
    "command without a prompt": ("```bash\nshardwise --help\n```", "start the block with"),
    "command in the middle": ("```bash\n$ cd here\n$ shardwise --help\n```", "start the block with"),
}


def test_good_page_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    assert run_in_fresh_process(page, tmp_path) == (0, "")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_page_fails(case: str, tmp_path: Path) -> None:
    text, reason = WRONG[case]
    page = tmp_path / "page.md"
    page.write_text(text)
    status, report = run_in_fresh_process(page, tmp_path)
    assert status == 1
    assert reason in report


def test_shown_command_output_is_compared(tmp_path: Path) -> None:
    (tmp_path / "shardwise").write_text("#!/bin/sh\necho got $*\n")
    (tmp_path / "shardwise").chmod(0o755)
    block = "$ shardwise a \\\n  b\ngot a b\n$ shardwise c | tr c d\ngot d"
    page = tmp_path / "page.md"
    first = f"import os\nos.environ['PATH'] = {str(tmp_path)!r} + ':' + os.environ['PATH']"
    page.write_text(f"```python\n{first}\n```\n```console\n{block}\n```\n")
    assert run_in_fresh_process(page, tmp_path) == (0, "")


def main(page: str) -> int:
    problems = run_page(Path(page).resolve())
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
