"""Which calls are tried? Samples of torch's own operator database, laid out in a few fixed ways, and what they give.

1. Each operator gives its first few samples, in float64 where it has it. With edges: also with other values in their
   tensors (zeros of both signs, ties, infinities, nan, integers at the limits), and with a length of 0, 1 or 3 in place
   of their largest.
2. A way lays out every tensor of a sample over two ranks: along its first dim, along its last, or mixed, by a checksum.
3. The same call on whole tensors gives the values, and gradients where the operator has them, to compare with.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if importlib.util.find_spec("expecttest") is None:  # torch's test utilities want its TestCase, and nothing else of it
    _stand_in = types.ModuleType("expecttest")
    _stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]  # a module made here
    sys.modules["expecttest"] = _stand_in
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

# Each drawing looks twice on the whole stack for the test case that asks for it. There is none, and that takes longest.
for _module in (common_utils, core):
    _module.extract_test_fn = lambda: None  # type: ignore[attr-defined]  # a module of torch's own tests

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
WAYS = ("first dim", "last dim", "mixed")
LARGEST = 20_000
# Of several results torch passes back the gradient of the first alone.
AUXILIARY = (
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
INF, NAN = float("inf"), float("nan")
NO_VALUES = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")


def _pick(like: Tensor, *values: float) -> Tensor:
    """A tensor like another one of some values, each drawn about as often."""
    drawn = torch.randint(len(values), like.shape, generator=torch.Generator().manual_seed(like.numel()))
    kind = like.dtype if not (like.is_floating_point() or like.is_complex()) else torch.float64
    return torch.tensor(values, dtype=kind)[drawn].to(like.dtype)


def _pick_limits(like: Tensor) -> Tensor:
    """The limits of whole numbers in turn: in 6 elements each of them."""
    limits = torch.iinfo(like.dtype)
    values = torch.tensor([limits.min, limits.max, 0, 1, limits.max - 1, limits.min + 1], dtype=like.dtype)
    return values[torch.arange(like.numel()).reshape(like.shape) % len(values)]


EDGES: dict[str, Callable[[Tensor], Tensor]] = {  # of floating point and complex tensors
    "zeros": torch.zeros_like,
    "ties": lambda x: _pick(x, -1.0, 0.0, 1.0),
    "zeros of both signs": lambda x: _pick(x, 0.0, -0.0, 1.0),
    "large": lambda x: x * 1e5,
    "tiny": lambda x: x * 1e-7,
    "infinities": lambda x: _pick(x, INF, -INF, 0.0, 1.0, -1.0),
    "nan": lambda x: _pick(x, NAN, 0.0, 1.0, -1.0, 2.0),
}
WHOLE_EDGES: dict[str, Callable[[Tensor], Tensor]] = {  # of integers; of booleans all but the last
    "zeros": torch.zeros_like,
    "ties": lambda x: _pick(x, 0, 1),
    "ones": torch.ones_like,
    "limits": _pick_limits,
}
LENGTHS = {"length 0": 0, "length 1": 1, "length 3": 3}


def change_values(arguments: Arguments, dtype: torch.dtype, name: str) -> Arguments | None:
    """A sample with the values of an edge in its tensors of the dtype; None if there are none or they stay as they are.

    Of integers the first tensor alone is changed: others are indices, as a rule.
    """
    whole = not (dtype.is_floating_point or dtype.is_complex)
    change = (WHOLE_EDGES if whole else EDGES).get(name)
    if change is None or (dtype == torch.bool and name == "limits"):
        return None
    leaves, tree = pytree.tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    chosen = [i for i in (places[:1] if whole else places) if leaves[i].dtype == dtype and leaves[i].numel()]
    for place in chosen:
        leaf = leaves[place]
        leaves[place] = change(leaf.detach()).requires_grad_(leaf.requires_grad)
    return pytree.tree_unflatten(leaves, tree) if chosen else None


def change_length(arguments: Arguments, length: int) -> Arguments | None:
    """A sample in which the largest length of its tensors is another one, wherever it appears; None if it is that."""
    leaves, tree = pytree.tree_flatten(arguments)
    longest = max((n for leaf in leaves if isinstance(leaf, Tensor) for n in leaf.shape), default=0)
    if longest <= length:
        return None
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            for dim, size in enumerate(leaf.shape):
                leaf = leaf.narrow(dim, 0, length) if size == longest else leaf
            leaves[place] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return pytree.tree_unflatten(leaves, tree)


# Torch itself ends the process, gives memory that nothing has written, or other gradients of nan in rows of one length.
NO_EDGES = {"lcm": ("limits",), "resize_": tuple(LENGTHS), "resize_as_": tuple(LENGTHS)}
NO_EDGES |= dict.fromkeys(("nn.functional.hardshrink", "nn.functional.softshrink"), ("nan",))


def edges_of(arguments: Arguments, dtype: torch.dtype, operator: str = "") -> Iterator[tuple[str, Arguments]]:
    """A sample of an operator at every edge that there is for it, by name."""
    left_out = NO_EDGES.get(operator, ())
    for name in dict.fromkeys((*EDGES, *WHOLE_EDGES)):
        if name in left_out:
            continue
        if (changed := change_values(arguments, dtype, name)) is not None:
            yield name, changed
    for name, length in LENGTHS.items():
        if name not in left_out and (changed := change_length(arguments, length)) is not None:
            yield name, changed


@dataclass(frozen=True)
class OpTrial:
    """One call: a function, its sample, the way its tensors are laid out, and whether it writes to the first."""

    name: str
    function: Callable[..., Any]
    arguments: Arguments
    way: int
    inplace: bool
    gradients: bool
    first_only: bool = False

    def dim(self, number: int, tensor: Tensor) -> int | None:
        """The dim along which tensor `number` is cut, or None where it is replicated."""
        if tensor.ndim == 0:
            return None
        if self.way < 2:
            return 0 if self.way == 0 else tensor.ndim - 1
        drawn = zlib.crc32(f"{self.name} {number}".encode()) % (tensor.ndim + 1)
        return None if drawn == tensor.ndim else drawn

    def placed(self, place: Callable[[Tensor, int | None], Tensor]) -> Arguments:
        """The arguments with each tensor put in its place, as a new leaf."""
        leaves, tree = pytree.tree_flatten(self.arguments)
        number = 0
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                copy = leaf.detach().clone().requires_grad_(leaf.requires_grad and self.gradients)
                leaves[index] = place(copy, self.dim(number, leaf))
                number += 1
        return pytree.tree_unflatten(leaves, tree)

    def call(self, arguments: Arguments) -> tuple[Any, list[Tensor]]:
        """What the call gives, and the tensors that went in."""
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        with torch.set_grad_enabled(self.gradients):
            result = self.function(*arguments[0], **arguments[1])
        return (result, arguments[0][0]) if self.inplace else result, tensors


@dataclass(frozen=True)
class Expected:
    """What a call on whole tensors gives: all leaves of the result, and the gradient of each tensor."""

    leaves: list[Any]
    gradients: list[Tensor | None]


class _RandomOpDetector(TorchDispatchMode):
    """Notices operators that draw random numbers, by torch's tag."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def operators() -> list[Any]:
    """All operators of the database that can run here and whose values mean something."""
    return [op for op in op_db if op.name not in NO_VALUES and _dtype(op) is not None]


def trials(op: Any, samples: int, ways: Sequence[int] = (0, 1, 2)) -> Iterator[tuple[OpTrial, Expected]]:
    """The trials of an operator and what each gives; random calls and calls that fail on whole tensors are left out."""
    name = f"{op.name} {op.variant_test_name}".strip()
    dtype = _dtype(op)
    gradients = op.supports_autograd and dtype in (torch.float64, torch.float32)
    found = _run_quietly(lambda: [s for s in islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), samples)])
    for number, sample in enumerate(found or ()):
        arguments = ((sample.input, *sample.args), dict(sample.kwargs))
        if not _is_usable(arguments):
            continue
        for inplace, function in ((False, op.op), (True, op.get_inplace())):
            known: Expected | None = None
            for way in ways:
                label = f"{name}{' in place' if inplace else ''} #{number} {WAYS[way]}"
                first_only = op.name in AUXILIARY
                trial = OpTrial(label, function, arguments, way, inplace, gradients and not inplace, first_only)
                known = known or (_run_quietly(partial(compute_expected, trial)) if function is not None else None)
                if known is not None:
                    yield trial, known


def compute_expected(trial: OpTrial) -> Expected | None:
    """The call on whole tensors; None if it draws random numbers."""
    with _RandomOpDetector() as seeded:
        trial.call(trial.placed(lambda tensor, _: tensor))
    if seeded.seen:
        return None
    result, tensors = trial.call(trial.placed(lambda tensor, _: tensor))
    leaves = pytree.tree_leaves(result)
    backward(leaves[:1] if trial.first_only else leaves)
    return Expected([v.detach() if isinstance(v, Tensor) else v for v in leaves], [t.grad for t in tensors])


def backward(leaves: Sequence[Any]) -> None:
    """Gradients of a weighted sum of everything that is on the tape; the weights differ from element to element."""
    total: Tensor | None = None
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
            weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).reshape(leaf.shape)
            term = ((leaf.abs() if leaf.is_complex() else leaf) * weights).sum()
            total = term if total is None else total + term
    if total is not None:
        total.backward()


def _dtype(op: Any) -> torch.dtype | None:
    return next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)


def _is_usable(arguments: Any) -> bool:
    """Whether all tensors are plain, small and on the CPU, and there is one."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(
        type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and t.numel() <= LARGEST for t in tensors
    )


def _run_quietly(make: Callable[[], Any]) -> Any:
    """What `make` gives, without warnings; None if torch itself refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AttributeError, AssertionError):
            return None
