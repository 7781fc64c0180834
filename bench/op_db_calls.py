"""The calls of the page docs/op_db.md: samples of torch's operator database in dtypes, layouts, forms; how each ends.

A call is an operator's function on one sample: as it is, with gradients where it has them; in place; or with `out=`.
All its tensors are laid out alike over two ranks. The same call on whole tensors gives what is expected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bench.op_samples import (
    AUXILIARY,
    Arguments,
    _is_usable,
    _RandomOpDetector,
    _run_quietly,
    backward,
    edges_of,
)
from bench.op_trials import CLEAR
from shardwise import CommError, Mesh, MeshSpec, Partial, Replicate, Shard, ShardedTensor, from_local, shard
from shardwise.comm import Comm
from tools.fuzz.values import difference

RIGHT, REFUSED, UNCLEAR, WRONG = KINDS = ("right", "refused", "unclear", "wrong")
RANKS = 2
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.bfloat16)
EDGE_DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)  # at edges rounding must not hide anything
LAYOUTS = ("R", "S(0)", "S(-1)", "P", "uneven")  # R first: what splits nothing counts as R
WITHOUT_SUMS = (torch.bool, torch.uint16, torch.uint32, torch.uint64)  # torch does not add them, or not all of them
FURTHER = 8  # samples looked at beyond those that are used
CALL, IN_PLACE, OUT = "call", "in place", "out="
DRAWN = "as drawn"  # by torch, which avoids edges
NEAR = {torch.bfloat16: 5e-2, torch.float64: 1e-9, torch.complex128: 1e-9}
Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    operator: str
    dtype: torch.dtype
    number: int
    form: str
    function: Callable[..., Any]
    arguments: Arguments
    gradients: bool
    first_only: bool
    values: str = DRAWN

    @property
    def label(self) -> str:
        return f"{self.operator} {str(self.dtype).removeprefix('torch.')} #{self.number} {self.values} {self.form}"


@dataclass(frozen=True)
class Answer:
    """What a call gives: the leaves of its result, and the gradient of each tensor that went in."""

    leaves: list[Any]
    gradients: list[Any]


def name_of(op: Any) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


def calls(op: Any, samples: int, edges: bool = False) -> Iterator[tuple[Call, Answer]]:
    """The calls of an operator and what each gives on whole tensors; random ones and those that fail are left out.

    With `edges` the samples have other values and lengths (`edges_of`) instead of those that torch draws.
    """
    forms = {CALL: op.op, IN_PLACE: op.get_inplace(), OUT: op.op if op.supports_out else None}
    for dtype in EDGE_DTYPES if edges else DTYPES:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        drawn = _run_quietly(partial(_samples, op, dtype, gradients, samples))
        for number, sample in enumerate(filter(_is_usable, drawn or ())):
            for values, arguments in edges_of(sample, dtype, op.name) if edges else [(DRAWN, sample)]:
                for form, function in forms.items():
                    taped = gradients and form == CALL
                    auxiliary = op.name in AUXILIARY
                    call = Call(name_of(op), dtype, number, form, function, arguments, taped, auxiliary, values)
                    wanted = _run_quietly(partial(_expected, call)) if function is not None else None
                    if wanted is not None:
                        yield call, wanted


def _samples(op: Any, dtype: torch.dtype, gradients: bool, count: int) -> list[Arguments]:
    """The first samples with two dims or more; those with fewer, which layouts split in fewer ways, come after them.

    Every process draws the same ones.
    """
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    drawn = islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), count + FURTHER)
    found: list[Arguments] = [((sample.input, *sample.args), dict(sample.kwargs)) for sample in drawn]
    return sorted(found, key=lambda arguments: -min(2, max(map(len, _shapes(arguments)), default=0)))[:count]


def _shapes(arguments: Arguments) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def layouts_of(call: Call) -> list[str]:
    """The layouts that differ for a call: one that puts every tensor where an earlier one does is left out."""
    seen: dict[tuple[str, ...], str] = {}
    for layout in LAYOUTS:
        seen.setdefault(tuple(_described(layout, shape, call) for shape in _shapes(call.arguments)), layout)
    return list(seen.values())


def _described(layout: str, shape: tuple[int, ...], call: Call) -> str:
    if layout == "P":  # the sum of inf + 0j and a number is not a number in torch; addends of the limits wrap around
        endless = call.dtype.is_complex and call.values in ("infinities", "large")
        return "R" if call.dtype == torch.bool or endless or call.values == "limits" else "P"
    if layout == "R" or not shape:
        return "R"
    if layout == "S(-1)":
        return f"S({len(shape) - 1})"
    return "S(0)" if layout == "S(0)" or (shape[0] + 1) // RANKS == min(1, shape[0]) else "uneven"


def _expected(call: Call) -> Answer | None:
    with _RandomOpDetector() as seeded:
        answer(call, lambda tensor: tensor, lambda value: value)
    return None if seeded.seen else answer(call, lambda tensor: tensor, lambda value: value)


def answer(call: Call, place: Place, whole: Callable[[Any], Any]) -> Answer:
    """Run a call on tensors put in place, with the results made whole."""
    args, kwargs = _placed(call, place)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if call.form == OUT:
        kwargs = {**kwargs, "out": _outputs(call, place)}
    with torch.set_grad_enabled(call.gradients):
        result = call.function(*args, **kwargs)
    given = {CALL: result, IN_PLACE: (result, args[0]), OUT: kwargs.get("out")}[call.form]
    leaves = [whole(leaf) for leaf in pytree.tree_leaves(given)]
    if not call.gradients:
        return Answer(leaves, [])
    backward(leaves[:1] if call.first_only else leaves)
    return Answer([v.detach() if isinstance(v, Tensor) else v for v in leaves], [_gradient(t, whole) for t in tensors])


def _gradient(tensor: Tensor, whole: Callable[[Any], Any]) -> Any:
    """No gradient is a gradient of zeros."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.grad is None else whole(tensor.grad)


def _placed(call: Call, place: Place) -> Arguments:
    leaves, tree = pytree.tree_flatten(call.arguments)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            laid = place(leaf.detach().clone())
            leaves[index] = laid.requires_grad_() if leaf.requires_grad and call.gradients else laid
    found: Arguments = pytree.tree_unflatten(leaves, tree)
    return found


def _outputs(call: Call, place: Place) -> Any:
    """Tensors to write to, filled with ones, in the shape that the call gives."""
    args, kwargs = _placed(call, lambda tensor: tensor)
    with torch.no_grad():
        given = call.function(*args, **kwargs)
    leaves = pytree.tree_leaves(given)
    made = [place(torch.ones_like(leaf, memory_format=torch.contiguous_format)) for leaf in leaves]
    return made[0] if isinstance(given, Tensor) else tuple(made)


def compare(found: Answer, wanted: Answer, dtype: torch.dtype) -> str | None:
    """What differs, in words, or None."""
    near = NEAR.get(dtype, 1e-4)
    return difference(_plain(found.leaves), _plain(wanted.leaves), near) or _labelled(
        difference(_plain(found.gradients), _plain(wanted.gradients), near)
    )


def _plain(values: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in values]


def _labelled(text: str | None) -> str | None:
    return None if text is None else f"gradient: {text}"


def sharded(layout: str, comm: Comm) -> Place:
    """A function that lays a whole tensor out over the ranks of a comm; None where a layout has no meaning for it."""
    mesh = Mesh.of(tp=RANKS)

    def place(tensor: Tensor) -> ShardedTensor:
        if layout == "P" and tensor.dtype not in WITHOUT_SUMS:
            return from_local(addend(tensor, comm.rank), MeshSpec(mesh, [Partial("sum")]), tuple(tensor.shape))
        dim = 0 if layout in ("S(0)", "uneven") else tensor.ndim - 1
        if tensor.ndim == 0 or layout in ("R", "P"):
            return shard(tensor, MeshSpec(mesh, [Replicate()]), None)
        uneven = (min(1, tensor.shape[0]), max(0, tensor.shape[0] - 1)) if layout == "uneven" else None
        return shard(tensor, MeshSpec(mesh, [Shard(dim, sizes=uneven)]), None)

    return place


def addend(tensor: Tensor, rank: int) -> Tensor:
    """One of two addends of a tensor, without rounding: halves of floats, and 1 against the rest of integers."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor / 2
    return torch.ones_like(tensor) if rank else tensor - 1


@dataclass(frozen=True)
class Ending:
    """How one call ended."""

    operator: str
    dtype: str
    form: str
    layout: str
    kind: str
    text: str = ""
    values: str = DRAWN


def end(call: Call, wanted: Answer, layout: str, place: Place, whole: Callable[[Any], Any]) -> Ending:
    """Run a call on this rank; every rank runs it."""
    row = (call.operator, str(call.dtype).removeprefix("torch."), call.form, layout)
    try:
        problem = compare(answer(call, place, whole), wanted, call.dtype)
    except CommError:
        raise
    except CLEAR as error:
        return Ending(*row, REFUSED, str(error), call.values)
    except Exception as error:
        return Ending(*row, UNCLEAR, f"{type(error).__name__}: {error}", call.values)
    return Ending(*row, RIGHT if problem is None else WRONG, problem or "", call.values)
