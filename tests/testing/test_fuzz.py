"""Do random programs give on ShardedTensors what they give on whole tensors, and is it noticed if they do not?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Replicate, Shard, register_sharding, remove_sharding
from tools.fuzz import (
    Input,
    Program,
    Round,
    Statement,
    Tally,
    Verdict,
    random_program,
    run_isolated,
    run_on_threads,
    script,
    shrink,
)
from tools.fuzz.__main__ import main
from tools.fuzz.generate import OPERATORS
from tools.fuzz.program import candidates
from tools.fuzz.run import APART, ERROR, WRONG, is_refusal
from tools.fuzz.values import addends, difference, fill, tolerance

ROOT = Path(__file__).parents[2]
PROGRAMS, CHUNKS = 240, 6
EMPTY_RANK_PROGRAMS = 40
MOST_REFUSED = 0.06  # of what ran; views of tensors in pieces, and writes into pending ones
MANY = 1200
ROWS = Input("a0", "float64", (4, 3), "on tp=2: S(0)")


# Without a rule unless a test plants one.
@torch.library.custom_op("shardwise_fuzz::running", mutates_args=())
def running(x: Tensor) -> Tensor:
    return x.cumsum(0)


@torch.library.custom_op("shardwise_fuzz::first_rank_fails", mutates_args=())
def first_rank_fails(x: Tensor) -> Tensor:
    if x.numel() and x.shape[0] == 3:
        raise ValueError("three rows are too many")
    return x.clone()


@torch.library.custom_op("shardwise_fuzz::breaks", mutates_args=())
def breaks(x: Tensor) -> Tensor:
    if x.shape[0] < 4:
        raise IndexError("a mistake of ours")
    return x.clone()


@pytest.fixture
def planted() -> Iterator[None]:
    """Rules that are wrong: a running sum, and two more operators, are taken for operators on each row."""
    for op in (running, first_rank_fails, breaks):

        @register_sharding(op)
        def rule(x: Any) -> list[Any]:
            return [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]

    yield
    for op in (running, first_rank_fails, breaks):
        remove_sharding(op)


def _program(code: str, *inputs: Input, rounds: int = 1) -> Program:
    return Program(2, inputs or (ROWS,), (Statement("planted", code),), tuple(map(Round, range(rounds))))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_are_right_or_refused_by_all_ranks(chunk: int) -> None:
    seeds = range(chunk, PROGRAMS, CHUNKS)
    tally = Tally()
    failed = []
    programs = [random_program(seed) for seed in seeds]
    for seed, verdict in zip(seeds, run_isolated(programs), strict=True):
        tally.count(verdict)
        if verdict.failed:
            failed.append(f"seed {seed}: {verdict}")
    hint = "python -m tools.fuzz --programs 1 --seed N shrinks one and prints it as a script"
    assert failed == [], hint
    assert sum(tally.refused.values()) <= MOST_REFUSED * sum(tally.ran.values()), "\n".join(tally.lines())


def test_programs_in_which_a_rank_holds_nothing_are_right_or_refused_by_all_ranks() -> None:
    programs = [random_program(seed, empty_ranks=True) for seed in range(EMPTY_RANK_PROGRAMS)]
    assert sum(p.twice for p in programs) > EMPTY_RANK_PROGRAMS / 3
    verdicts = list(run_isolated(programs))
    failed = [f"seed {seed}: {verdict}" for seed, verdict in enumerate(verdicts) if verdict.failed]
    assert failed == [], (
        "python -m tools.fuzz --empty-ranks --programs 1 --seed N shrinks one and prints it as a script"
    )
    assert sum(len(v.refused) for v in verdicts) <= MOST_REFUSED * sum(len(v.ran) for v in verdicts)


def test_a_second_gradient_that_is_wrong_is_noticed() -> None:
    """The value and the first gradient are those of the square."""
    code = "v0 = (a0 * a0).sum() if type(a0) is torch.Tensor else (2 * a0.detach() * a0 - a0.detach() ** 2).sum()"
    once = replace(_program(code, replace(ROWS, requires_grad=True)), backward=True)
    assert not run_on_threads(once).failed
    verdict = run_on_threads(replace(once, twice=True))
    assert (verdict.kind, "second gradient of a0" in verdict.text) == (WRONG, True), verdict


@pytest.mark.parametrize("views", ["a0.chunk(2)", "a0.unbind(0)"])
def test_views_that_torch_itself_refuses_after_a_write_are_not_compared(views: str) -> None:
    taken = _program(f"v0 = {views}", Input("a0", "float64", (4, 2), "on tp=2: R", "integers", requires_grad=True))
    written = Statement("x.add_(1)", "v1 = a0.detach().add_(1)")
    verdict = run_on_threads(replace(taken, steps=(*taken.steps, written)))
    assert len(verdict.ran) == 2 and not verdict.failed, verdict


def test_a_compiled_function_that_gives_something_else_is_noticed() -> None:
    program = _program("v0 = a0 * (2 if torch.compiler.is_compiling() else 1)")
    assert not run_on_threads(program).failed
    verdict = run_on_threads(replace(program, compiled=True))
    assert (verdict.kind, "compare compiled: v0" in verdict.text) == (WRONG, True), verdict
    assert not run_on_threads(replace(_program("v0 = a0 * 2"), compiled=True)).failed


def test_programs_depend_on_the_seed_alone_and_differ() -> None:
    programs = [random_program(seed) for seed in range(60)]
    assert programs == [random_program(seed) for seed in range(60)]
    assert len(set(programs)) == 60
    assert {p.ranks for p in programs} == {2, 3, 4}
    assert any(r.aliases for p in programs for r in p.rounds)
    assert all(len(p.rounds) >= 2 and len({r.seed for r in p.rounds}) >= 2 for p in programs)
    assert {r.mode for p in programs for r in p.rounds} == {"grad", "no_grad", "inference", "autocast"}
    specs = " ".join(i.spec for p in programs for i in p.inputs)
    assert all(word in specs for word in ("sizes(", "groups(", "block(", "pieces", "chunk(", "P(sum)", "P(avg)", "R"))


def test_json_round_trip() -> None:
    programs = [random_program(seed) for seed in range(40)]
    assert [Program.from_json(p.to_json()) for p in programs] == programs


def test_every_template_can_be_drawn() -> None:
    """A template that never fits would be a gap that nobody sees."""
    drawn = {step.operator for seed in range(MANY) for step in random_program(seed).steps}
    assert {op.name for op in OPERATORS} - drawn == set()


def test_a_wrong_result_is_noticed(planted: None) -> None:
    code = "v0 = torch.ops.shardwise_fuzz.running(a0)"
    verdict = run_on_threads(_program(code))
    assert (verdict.kind, verdict.operator) == (WRONG, "planted")
    assert "compare: v0: " in verdict.text
    whole = replace(ROWS, spec="on tp=2: R")
    assert not run_on_threads(_program(code, whole)).failed


def test_ranks_that_go_apart_are_noticed(planted: None) -> None:
    uneven = replace(ROWS, spec="on tp=2: S(0) sizes(3,1)")
    verdict = run_on_threads(_program("v0 = torch.ops.shardwise_fuzz.first_rank_fails(a0)", uneven), limit=5.0)
    assert verdict.kind == APART, verdict


def test_an_error_of_ours_is_noticed(planted: None) -> None:
    verdict = run_on_threads(_program("v0 = torch.ops.shardwise_fuzz.breaks(a0)"))
    assert verdict.kind == ERROR
    assert "a mistake of ours" in verdict.text


def test_a_refusal_by_all_ranks_is_counted() -> None:
    verdict = run_on_threads(_program("v0 = torch.ops.shardwise_fuzz.running(a0)", rounds=2))
    tally = Tally()
    tally.count(verdict)
    assert not verdict.failed
    assert (tally.refused, tally.ran) == ({"planted": 2}, {})
    assert "0 statements ran, 2 were refused (100.0 %)" in tally.lines()[0]
    assert "UnsupportedOpError" in tally.lines()[2]


def test_which_errors_are_refusals() -> None:
    assert is_refusal(ValueError("no"))
    assert not any(map(is_refusal, [IndexError("no"), RuntimeError("no"), KeyError("no"), AssertionError("no")]))


def test_an_aliased_round_passes_one_tensor_twice() -> None:
    other = replace(ROWS, name="a1")
    steps = (Statement("is", "v0 = a0 is a1"), Statement("add_", "a0.add_(a1)"))
    program = Program(2, (ROWS, other), steps, (Round(0), Round(0, (("a1", "a0"),))))
    verdict = run_on_threads(program)
    assert verdict.ran == ("is", "add_", "is", "add_"), verdict


def test_shrinking_keeps_the_statement_that_fails(planted: None) -> None:
    noise = [Statement("mul", "v0 = a0 * a1"), Statement("sum", "v1 = v0.sum(0)")]
    wrong = Statement("running", "v2 = torch.ops.shardwise_fuzz.running(v0)")
    after = [Statement("add_", "v2.add_(1)"), Statement("exp", "v3 = torch.exp(v2 / 8)")]
    inputs = (ROWS, replace(ROWS, name="a1", requires_grad=True, fill="normal"))
    program = Program(2, inputs, (*noise, wrong, *after), (Round(0), Round(1), Round(2, (("a1", "a0"),))), True)
    small = shrink(program, lambda p: run_on_threads(p).kind == WRONG)
    assert [step.operator for step in small.steps] == ["mul", "running"]
    assert (len(small.rounds), small.backward, small.inputs[0].requires_grad) == (1, False, False)
    assert small.inputs[0].shape == (2, 2) or max(small.inputs[0].shape) <= 3


def test_shrinking_ends_and_gives_simpler_programs_only() -> None:
    program = random_program(7)
    assert shrink(program, lambda p: False) == program
    smallest = shrink(program, lambda p: True)
    assert (len(smallest.steps), len(smallest.rounds)) == (1, 1)
    assert len(list(candidates(program))) == len(set(candidates(program)))


def test_the_printed_script_reproduces(tmp_path: Path) -> None:
    plant = (
        "import torch\n"
        "from shardwise import Shard, register_sharding\n"
        "@torch.library.custom_op('fuzz_script::running', mutates_args=())\n"
        "def running(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x.cumsum(0)\n"
        "register_sharding(running)(lambda x: [([Shard(0)], [Shard(0)])])\n"
    )
    wrong = _run(tmp_path, script(_program("v0 = torch.ops.fuzz_script.running(a0)"), plant))
    assert (wrong.returncode, wrong.stdout.startswith("wrong: planted: round 0")) == (1, True), wrong.stderr
    right = _run(tmp_path, str(_program("v0 = a0.cumsum(0)")))
    assert (right.returncode, right.stdout) == (0, "right (1 statements)\n"), right.stderr


def _run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(text)
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | paths)


def test_a_process_that_dies_ends_one_program_only() -> None:
    dies = _program("v0 = torch.os.abort() if a0 is not None else 0")
    fine = _program("v0 = a0.sum()")
    found = list(run_isolated([fine, dies, fine]))
    assert [v.kind for v in found] == ["right", ERROR, "right"]
    assert "exit code -6" in found[1].text


def test_differences_are_described() -> None:
    ones = torch.ones(2)
    assert difference(ones, ones) is None
    assert difference(ones, ones.double()) == "dtype torch.float32, expected torch.float64"
    assert difference(ones, ones.clone().requires_grad_()) == "requires_grad False, expected True"
    assert difference(ones, torch.tensor([1.0, torch.nan])) == "1 of 2 elements, by at most nan"
    assert difference([ones], [ones, ones]) == "list, expected 2 values"
    assert difference(3, 4) == "3, expected 4"
    assert difference(torch.tensor([torch.inf]), torch.tensor([torch.inf])) is None
    assert difference(torch.tensor([1.0 + 1e-9], dtype=torch.float64), torch.ones(1, dtype=torch.float64)) is None
    assert difference(torch.tensor([1.0 + 1e-5], dtype=torch.float64), torch.ones(1, dtype=torch.float64)) is not None


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_addends_reduce_to_the_values(op: str) -> None:
    values = fill(ROWS, 3)
    stacked = torch.stack(addends(values, op, 3, seed=0))
    reducer = {"avg": "mean", "min": "amin", "max": "amax", "product": "prod"}.get(op, op)
    assert torch.equal(getattr(stacked, reducer)(0), values)
    assert not torch.equal(stacked[0], stacked[1])


def test_the_coarsest_dtype_says_how_far_results_may_be_apart() -> None:
    assert tolerance([torch.ones(1).double(), 3, torch.ones(1).long()]) == 1e-7
    assert tolerance([torch.ones(1).double(), torch.ones(1)]) == 2e-3
    assert tolerance([torch.ones(1).double()], autocast=True) == tolerance([torch.ones(1).bfloat16()]) == 0.15


def test_data_differ_from_round_to_round() -> None:
    assert not torch.equal(fill(ROWS, 0), fill(ROWS, 1))
    assert torch.equal(fill(ROWS, 0), fill(ROWS, 0))


def test_the_command_counts_and_ends_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--seed", "2", "--programs", "1"])
    printed = capsys.readouterr().out
    assert "1 programs, " in printed
    assert status == int("0 programs failed" not in printed)


def test_a_verdict_in_words() -> None:
    assert str(Verdict(WRONG, "round 0: v0", "add")) == "wrong: add: round 0: v0"


def test_the_old_address_says_where_the_fuzzer_is() -> None:
    with pytest.raises(ImportError, match=r"testing\.fuzz\.Program: .*import its names from `tools\.fuzz`"):
        from shardwise.testing.fuzz import Program  # noqa: F401
    command = [sys.executable, "-m", "shardwise.testing.fuzz", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "run `python -m tools.fuzz` or `make fuzz`" in done.stderr) == (1, True)
