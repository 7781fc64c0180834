"""Does the tool that changes the source find what can be changed, and tell tests that notice from tests that do not?"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.mutants import KILLED, SURVIVED, UNCOVERED, Coverage, Mutation, copy_tree, judge, mutations, record, sample

SOURCE = """
def clip(x: int, most: int = 10) -> int:
    # a < b in a comment
    if x < 0 or not most:
        raise ValueError(f"{x + 1} < {most}")
    list(zip([x], [most], strict=True))
    return min(x, most) if (x
        is not None) else -1
"""
CODE = "def half(n):\n    if n >= 2:\n        return n // 2\n    return 0\n\n\ndef elsewhere(n):\n    return n + 1\n"
TESTS = (
    "import subprocess, sys\n\nfrom shardwise.ops.code import half\n\n\n"
    "def test_weak():\n    assert half(6) == 3\n\n\n"
    "def test_edge():\n    assert (half(2), half(1)) == (1, 0)\n\n\n"
    "def test_of_another_process():\n"
    "    program = 'from shardwise.ops.code import elsewhere; assert elsewhere(1) == 2'\n"
    "    subprocess.run([sys.executable, '-c', program], check=True)\n"
)


def test_every_kind_of_change_is_found() -> None:
    found = [m.text for m in mutations("a.py", SOURCE.encode())]
    conditions = ["not (x < 0 or not most)", "not (x\n        is not None)"]
    assert found == ["11", conditions[0], "<=", "1", "and", "most", conditions[1], "is", "1", "2"]


def test_each_change_is_python_of_another_meaning() -> None:
    path = Path(__file__).parents[2] / "src" / "shardwise" / "geometry" / "box.py"
    source = path.read_bytes()
    found = mutations("box.py", source)
    assert len(found) > 20
    for mutation in found:
        changed = mutation.apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutation
        assert mutation.line == source[: mutation.start].count(b"\n") + 1


def test_a_sample_repeats() -> None:
    assert sample("geometry", 5, seed=1) == sample("geometry", 5, seed=1) != sample("geometry", 5, seed=2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, text in {
        "src/shardwise/__init__.py": "",
        "src/shardwise/ops/__init__.py": "",
        "src/shardwise/ops/code.py": CODE,
        "tests/part/test_code.py": TESTS,
        "tools/mutants_recorder.py": (Path(__file__).parents[2] / "tools" / "mutants_recorder.py").read_text(),
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_tests_that_notice_kill_and_others_do_not(tree: Path, tmp_path: Path) -> None:
    record(tree, tmp_path / "record.json", ["tests/part"])
    covered = Coverage.read(tmp_path / "record.json")
    file = "tests/part/test_code.py"
    weak, edge, other = f"{file}::test_weak", f"{file}::test_edge", f"{file}::test_of_another_process"
    assert covered.tests == [weak, edge, other, file]
    path = "src/shardwise/ops/code.py"
    source = CODE.encode()
    greater = Mutation(path, 2, source.index(b">="), source.index(b">=") + 2, ">")
    assert sorted(covered.tests_of(greater)) == [edge, weak]
    assert covered.tests_of(Mutation(path, 4, source.index(b"0"), source.index(b"0") + 1, "1")) == [edge]
    assert covered.tests_of(Mutation(path, 8, source.index(b"+"), source.index(b"+") + 1, "-")) == [file]
    copied = copy_tree(tmp_path / "copy", tree)
    assert judge(greater, [weak], copied) == SURVIVED
    assert judge(greater, [weak, edge], copied) == KILLED
    assert judge(greater, [], copied) == UNCOVERED
    assert (copied / path).read_bytes() == source
    assert greater.diff(source) == f"{path}:2\n  - if n >= 2:\n  + if n > 2:"
