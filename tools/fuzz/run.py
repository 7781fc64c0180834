"""Does a program give on ShardedTensors what it gives on whole tensors? Every rank runs both and compares.

1. A round runs on whole tensors first: statements from the first that torch itself refuses on are left out.
2. Each statement runs on ShardedTensors; then the ranks tell each other how it ended. A refusal by all ranks is counted
   and the statement left out, with those that need its result; a refusal by some, or another error, is a failure.
3. The same statements run on whole tensors; at the end all tensors are compared, the inputs and their gradients too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Comm, CommError, DisagreementError, ShardedTensor, default_comm, parse_spec, run_local
from shardwise.comm.local import default_device
from tools.fuzz.program import Program, Round, Statement
from tools.fuzz.values import difference, loss_of, make_inputs, on_ranks, tolerance, whole

RIGHT, WRONG, ERROR, APART = "right", "wrong", "error", "ranks differ"
LIMIT = 60.0
# Errors that speak of layouts to the user; by name, since not all of them are re-exported by the package.
_REFUSALS = {"UnsupportedOpError", "MixedTensorsError", "HiddenCommunicationError"}
Names = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """How a program ended: right, wrong, with an error of no layout, or with ranks that went apart.

    `ran` and `refused` list operators, once for each statement and round.
    """

    kind: str
    text: str = ""
    operator: str = ""
    ran: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def failed(self) -> bool:
        return self.kind != RIGHT

    def __str__(self) -> str:
        return f"{self.kind}: {self.operator}: {self.text}" if self.failed else f"right ({len(self.ran)} statements)"


class ProgramFailure(Exception):
    """A program that failed on this rank; its one argument is the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def run_on_threads(program: Program, limit: float = LIMIT) -> Verdict:
    """Run a program with all ranks as threads of this process.

    >>> from tools.fuzz import Input
    >>> rows = Input("a0", "float64", (3, 2), "on tp=2: S(0)")
    >>> run_on_threads(Program(2, (rows,), (Statement("sum", "v0 = a0.sum()"),), (Round(0), Round(1))))
    Verdict(kind='right', text='', operator='', ran=('sum', 'sum'), refused=())
    """
    try:
        return worst(run_local(run_on_rank, program.ranks, program, timeout=limit))
    except CommError as error:
        return Verdict(APART, str(error))


def run_on_process(program: Program) -> Verdict:
    """Run a program as this process's rank of the default comm; every rank calls it."""
    return run_on_rank(default_comm(), program)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of the first rank that failed, else that of rank 0."""
    return next((v for v in verdicts if v.failed), verdicts[0])


def run_on_rank(comm: Comm, program: Program) -> Verdict:
    """Run all rounds on this rank."""
    ran: list[str] = []
    refused: list[tuple[str, str]] = []
    for number, round_ in enumerate(program.rounds):
        try:
            _Run(comm, program, round_, ran, refused).run()
        except ProgramFailure as failure:
            found = failure.verdict
            text = f"round {number}: {found.text}"
            return Verdict(found.kind, text, found.operator, tuple(ran), tuple(refused))
    return Verdict(RIGHT, ran=tuple(ran), refused=tuple(refused))


@dataclass
class _Run:
    """One round on one rank."""

    comm: Comm
    program: Program
    round: Round
    ran: list[str]
    refused: list[tuple[str, str]]

    def run(self) -> None:
        count, backward = dense_steps(self.program, self.round)
        dense = make_inputs(self.program.inputs, self.round, whole)
        laid = make_inputs(self.program.inputs, self.round, on_ranks(self.comm))
        inputs, grads = tuple(laid), [(n, laid[n], dense[n]) for n in laid if dense[n].requires_grad]
        done: list[Statement] = []
        for step in self.program.steps[:count]:
            if all(name in laid for name in step.reads) and self._sharded(step, laid):
                done.append(step)
        if not _whole(done, dense, self.round):
            return  # without the refused statements the rest means something that torch refuses
        last = done[-1].operator if done else "inputs"
        operators = {t: step.operator for step in done for t in step.targets}
        self._together(lambda: self._compare(laid, dense, operators, last), last, "compare")
        if self.program.compiled and done:
            function = _as_function(done, inputs)
            for _ in range(2):  # the second time from what is remembered
                again = self._run_compiled(function, done)
                self._together(lambda a=again: self._compare(a, dense, operators, last), last, "compare compiled")  # type: ignore[misc]  # a default
        if backward and _can_backward(dense, inputs) and not any(_is_out_of_date(v, dense[n]) for n, v in laid.items()):
            self._backward(laid, dense, grads, last)

    def _run_compiled(self, function: Callable[..., Any], done: Sequence[Statement]) -> Names:
        """What a compiled function gives for inputs that are made anew, and what it leaves in them."""
        laid = make_inputs(self.program.inputs, self.round, on_ranks(self.comm))
        with mode(self.round):
            results = function(**laid)
        return {**laid, **dict(zip(_targets(done), results, strict=True))}

    def _sharded(self, step: Statement, names: Names) -> bool:
        """Run a statement on ShardedTensors; False if all ranks refuse it."""
        outcome = ""
        try:
            with mode(self.round):
                execute(step, names)
        except CommError:
            raise
        except Exception as error:
            outcome = f"{'refused' if is_refusal(error) else 'error'} {type(error).__name__}: {error}"
        self._agree(outcome, step)
        if outcome:
            self.refused.append((step.operator, outcome.partition(" ")[2]))
            return False
        self.ran.append(step.operator)
        return True

    def _agree(self, outcome: str, step: Statement) -> None:
        kinds = [data.decode() for data in self.comm.all_gather_bytes(outcome[:120].encode(), label=step.code)]
        starts = {kind.partition(":")[0] for kind in kinds}
        if len(starts) > 1:
            raise ProgramFailure(Verdict(APART, f"{step.code}: the ranks end as {kinds}", step.operator))
        if outcome.startswith("error"):
            raise ProgramFailure(Verdict(ERROR, f"{step.code}: {outcome[6:]}", step.operator))

    def _together(self, compare: Callable[[], str | None], operator: str, label: str) -> None:
        """Compare on every rank before any of them stops."""
        try:
            problem = compare() or ""
            kind = WRONG
        except CommError:
            raise
        except Exception as error:
            problem, kind = f"{type(error).__name__}: {error}", ERROR
        told = self.comm.all_gather_bytes(b"wrong" if problem else b"", label=f"fuzz {label}")
        if problem:
            named, _, text = problem.partition("\n") if kind == WRONG else (operator, "", problem)
            raise ProgramFailure(Verdict(kind, f"{label}: {text}", named))
        if any(told):
            raise ProgramFailure(Verdict(WRONG, f"{label}: on another rank", operator))

    def _compare(self, laid: Names, dense: Names, operators: Mapping[str, str], last: str) -> str | None:
        near = tolerance(dense.values(), self.round.mode == "autocast")
        for name, found in laid.items():
            if _is_out_of_date(found, dense[name]):
                continue
            text = difference(gathered(found), dense[name], near)
            if text is not None:
                return f"{operators.get(name, last)}\n{name}: {text}"
        return None

    def _backward(self, laid: Names, dense: Names, inputs: list[tuple[str, Any, Any]], last: str) -> None:
        if self.program.twice:
            self._second_gradients(laid, dense, inputs, last)
        torch.autograd.backward(loss_of(dense.values()))
        near = tolerance(dense.values(), self.round.mode == "autocast")

        def compare() -> str | None:
            torch.autograd.backward(loss_of([gathered(value) for value in laid.values()]))
            for name, found, wanted in inputs:
                if found.is_leaf and wanted.grad is not None and not _averaged(self.program, name):
                    grad = torch.zeros_like(wanted) if found.grad is None else gathered(found.grad)
                    text = difference(grad, wanted.grad, near)
                    if text is not None:
                        return f"{last}\ngradient of {name}: {text}"
            return None

        self._together(compare, last, "backward")

    def _second_gradients(self, laid: Names, dense: Names, inputs: list[tuple[str, Any, Any]], last: str) -> None:
        """Compare the gradients of the sum of all gradients' squares; nothing where torch itself has none."""
        leaves = [(n, a, b) for n, a, b in inputs if a.is_leaf and b.is_leaf and not _averaged(self.program, n)]
        try:
            wanted = _penalty([b for _, _, b in leaves], dense.values())
        except RuntimeError:
            return
        near = 10 * tolerance(dense.values(), self.round.mode == "autocast")

        def compare() -> str | None:
            found = _penalty([a for _, a, _ in leaves], laid.values())
            for (name, *_), one, other in zip(leaves, found, wanted, strict=True):
                text = _compare_gradients(one, other, near)
                if text is not None:
                    return f"{last}\nsecond gradient of {name}: {text}"
            return None

        self._together(compare, last, "second backward")


def _penalty(leaves: Sequence[Any], values: Iterable[Any]) -> tuple[Any, ...]:
    """The gradients of the sum of the squares of the gradients of tensors."""
    loss = loss_of([gathered(value) for value in values])
    grads: Any = torch.autograd.grad(loss, leaves, create_graph=True, retain_graph=True, allow_unused=True)
    taped = [g for g in grads if isinstance(g, Tensor) and g.requires_grad]  # None, too, where a leaf was not used
    squares = [(g * g.conj()).real.sum() for g in taped]
    if not squares:
        return (None,) * len(leaves)
    total = torch.stack([gathered(s).double() for s in squares]).sum()
    return torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)


def _compare_gradients(found: Any, wanted: Any, near: float) -> str | None:
    """What differs; None and zeros are the same: which of the two torch returns depends on how a graph was built."""
    if found is None or wanted is None:
        one = found if wanted is None else wanted
        return None if one is None or not bool(gathered(one).any()) else "one is None, the other is not zero"
    return difference(gathered(found), wanted, near)


def _is_out_of_date(value: Any, whole: Any) -> bool:
    """Whether a value's use is refused: a copy in place of a view, or to torch itself one of several views of a tensor,
    that was written to since."""
    if isinstance(value, tuple | list):
        return any(map(_is_out_of_date, value, whole))
    copied = value._copied_from if isinstance(value, ShardedTensor) else None
    try:
        if copied is not None:
            copied.check()
        if isinstance(whole, Tensor):
            _ = whole.grad_fn
    except RuntimeError:
        return True
    return False


def _averaged(program: Program, name: str) -> bool:
    return "P(avg)" in next(i.spec for i in program.inputs if i.name == name)


def _can_backward(names: Names, inputs: Sequence[str]) -> bool:
    return any(isinstance(v, Tensor) and v.requires_grad and n not in inputs for n, v in names.items())


def is_refusal(error: Exception) -> bool:
    """Whether an error is a clear refusal: one that speaks of layouts or of arguments, not one of Python's or a bug."""
    if isinstance(error, DisagreementError | UnicodeError):
        return False
    return isinstance(error, ValueError) or any(c.__name__ in _REFUSALS for c in type(error).__mro__)


def gathered(value: Any) -> Any:
    """The whole of a ShardedTensor, also inside tuples; other values as they are."""
    if isinstance(value, ShardedTensor):
        return _checked(value)
    if isinstance(value, tuple | list):
        return [gathered(item) for item in value]
    return value


def _checked(value: ShardedTensor) -> Tensor:
    found = value.full()
    assert found.shape == value.shape, f"full() has shape {tuple(found.shape)}, the tensor {tuple(value.shape)}"
    assert found.dtype == value.dtype, f"full() has dtype {found.dtype}, the tensor {value.dtype}"
    return found


def redistribute(tensor: Tensor, spec: str) -> Tensor:
    """A copy in another layout, or of a whole tensor; raises if the layout does not fit its shape."""
    target = parse_spec(spec).layout(tuple(tensor.shape))
    if isinstance(tensor, ShardedTensor):
        moved: Tensor = tensor.redistribute(target).clone()  # a move to the same layout may share memory
        return moved
    return tensor.clone()


def hooked(tensor: Tensor) -> Tensor:
    """Twice the tensor, whose gradient is doubled by a hook, if it has one."""
    made = tensor * 2
    if made.requires_grad:
        try:
            made.register_hook(lambda grad: grad if grad is None else grad * 2)  # type: ignore[no-untyped-call]  # untyped in torch
        except NotImplementedError as error:  # several local tensors on a rank
            raise ValueError(str(error)) from error
    return made


def with_view(view: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """A copy of the tensor, after a view of it was written to, times what the view has then."""
    made = tensor * 1
    part = view(made)
    part.mul_(2)
    return made * part.sum()


def saved_on_host(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """The result of a function that keeps what it needs for the backward pass in host memory."""
    with torch.autograd.graph.save_on_cpu():
        return function(tensor)


SCOPE = {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "redistribute": redistribute,
    "hooked": hooked,
    "saved_on_host": saved_on_host,
    "with_view": with_view,
}


def _targets(steps: Sequence[Statement]) -> list[str]:
    return list(dict.fromkeys(target for step in steps for target in step.targets))


def _as_function(steps: Sequence[Statement], inputs: Sequence[str]) -> Callable[..., Any]:
    """All statements as one compiled function of the inputs, which returns all results."""
    lines = [*(step.code for step in steps), f"return [{', '.join(_targets(steps))}]"]
    scope = dict(SCOPE)
    exec("\n  ".join([f"def statements({', '.join(inputs)}):", *lines]), scope)
    return shardwise.compile(cast(Callable[..., Any], scope["statements"]), backend="eager")


def execute(step: Statement, names: Names) -> None:
    """Run a statement; new names are added."""
    scope = {**SCOPE, **names}
    exec(step.code, scope)
    for target in step.targets:
        names[target] = scope[target]


@contextmanager
def mode(round_: Round) -> Iterator[None]:
    """The mode of torch in which statements run."""
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    cast = torch.autocast(default_device().type, torch.bfloat16) if round_.mode == "autocast" else nullcontext()
    with cast, modes.get(round_.mode, nullcontext)():
        yield


def dense_steps(program: Program, round_: Round) -> tuple[int, bool]:
    """How many statements torch itself runs on whole tensors, and whether the backward pass works then.

    A device gets those that run in host memory: an index out of range ends a process's use of a GPU.
    """
    steps = program.steps
    if default_device().type != "cpu":
        with torch.device("cpu"):
            steps = steps[: _try_steps(program, steps, round_)[0]]
    return _try_steps(program, steps, round_)


def _try_steps(program: Program, steps: Sequence[Statement], round_: Round) -> tuple[int, bool]:
    names: Names = make_inputs(program.inputs, round_, whole)
    inputs = tuple(names)
    count = 0
    for step in steps:
        if not _whole([step], names, round_):
            break
        count += 1
    if not program.backward or round_.mode in ("no_grad", "inference") or not _can_backward(names, inputs):
        return count, False
    try:
        torch.autograd.backward(loss_of(names.values()))
    except RuntimeError:
        return count, False
    return count, True


def _whole(steps: Sequence[Statement], names: Names, round_: Round) -> bool:
    """Run statements on whole tensors; False if torch refuses one."""
    try:
        with mode(round_):
            for step in steps:
                execute(step, names)
    except Exception:
        return False
    return True
