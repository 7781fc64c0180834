"""A program on ShardedTensors beside the same program on whole tensors: values, gradients, and how each rank ended.

1. A program is a function of tensors. A call is a tuple of whole tensors; one object given twice is one tensor given
   twice, on both sides.
2. Every rank lays the tensors out as layouts in notation say ("on tp=2: S(0)"), runs the program on them and on the
   whole ones, and compares results and gradients.
3. All calls of a program run one after the other in one world, so that what the first one left behind meets the others.
4. `check` and `check_or_refuse` take layouts; `check_op` tries every combination of placements (replicated, each dim
   sharded, sharded raggedly with an empty rank, a pending sum) on several meshes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import (
    Comm,
    CommError,
    Mesh,
    MeshSpec,
    Partial,
    Replicate,
    Shard,
    ShardedTensor,
    from_local,
    parse_spec,
    run_local,
    shard,
    sharding_rule,
)
from shardwise.comm import default_comm
from shardwise.geometry import Box, Piece, Placement, ShardingSpec
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.device import DEVICE
from tests.moving import local_parts

Program: TypeAlias = Callable[..., Any]
Call: TypeAlias = Sequence[Any]
Placements: TypeAlias = tuple[Placement, ...]
Combination: TypeAlias = tuple[Placements, ...]
Worlds: TypeAlias = Sequence[tuple[int, ...]]

WORLDS: Worlds = ((1,), (2,), (3,), (2, 2))
LINES: Worlds = ((1,), (2,), (3,))
AXES = ("dp", "tp", "pp")
TIMEOUT = 60.0
REFUSALS = ("UnsupportedOpError", "MixedTensorsError", "LayoutError")

# Layouts of a tensor of 4 rows or more over 2 ranks, by the words of the notation.
S0, S1, R, P = (f"on tp=2: {placement}" for placement in ("S(0)", "S(1)", "R", "P(sum)"))
BOXES = "as pieces 0[0:1,0:4], 1[1:4,0:3], 0[1:4,3:4]"  # of a 4x4 tensor
CHUNKS = "as chunk(0) over 0,1,0,1"  # two chunks on each rank


@torch.library.custom_op("tests_dense::nothing", mutates_args=())
def _nothing(x: Tensor) -> Tensor:
    return x.clone()


def forget() -> None:
    """Make every call a first call again: whatever is remembered about operators ends when a rule changes."""
    with sharding_rule(_nothing, lambda x: [([Replicate()], [Replicate()])]):
        pass


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values that differ from seed to seed, none of them near zero."""
    drawn = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float64)
    return (drawn + drawn.sign() * 0.1).to(dtype)


def ramp(*shape: int, start: float = -1.0, step: float = 0.37, grad: bool = True) -> Tensor:
    """Distinct float64 values in no simple order, so that sums, maxima and sorts of rows differ."""
    count = torch.Size(shape).numel()
    scattered = (torch.arange(count, dtype=torch.float64) * 7 + 3) % max(count, 1) if count % 7 else torch.arange(count)
    return (scattered.to(torch.float64) * step + start).reshape(shape).requires_grad_(grad)


def lay(
    whole: Tensor, layout: str | ShardingSpec | Mesh, placements: Sequence[Placement] | None = None
) -> ShardedTensor:
    """A whole tensor, which every rank has, in a layout or placed on a mesh; a leaf that requires grad if it does.

    Addends of what is pending reduce to the whole, and differ from it and from each other.
    """
    if isinstance(layout, Mesh):
        assert placements is not None
        layout = MeshSpec(layout, placements)
    spec = parse_spec(layout) if isinstance(layout, str) else layout
    laid = spec.layout(tuple(whole.shape))
    if laid.pending is None:
        return shard(whole.detach(), spec, None).requires_grad_(whole.requires_grad)
    parts = local_parts(laid, default_comm().rank, whole.detach())
    return from_local(parts, laid).requires_grad_(whole.requires_grad)


def whole_of(value: Any) -> Any:
    """What a program gave, whole."""
    if isinstance(value, ShardedTensor):
        return value.full()
    if isinstance(value, list | tuple):
        return [whole_of(v) for v in value]
    return value


def assert_same(found: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-11) -> Any:
    """Fail unless what was found, put together, is what is expected: shapes, dtypes and values. Return it whole."""
    if isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(expected)
        return [assert_same(one, other, rtol=rtol, atol=atol) for one, other in zip(found, expected, strict=True)]
    whole = whole_of(found)
    if isinstance(expected, Tensor):
        assert tuple(found.shape) == tuple(expected.shape), f"shape {tuple(found.shape)}, dense {tuple(expected.shape)}"
        assert found.dtype == expected.dtype, f"{found.dtype}, dense {expected.dtype}"
        assert_close(whole.detach(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(expected, float):
        assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert found == expected
    return whole


def check(
    program: Program,
    layouts: Sequence[str],
    *calls: Call,
    world: int = 2,
    grad: bool = True,
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> None:
    """Assert that the program gives on ShardedTensors what it gives on whole ones, call after call, from a first one.

    Arguments beyond the layouts, and those that are not tensors, are passed as they are.
    """
    forget()
    run_local(_comparing(program, layouts, calls, grad, rtol, atol), world, timeout=TIMEOUT)


def check_or_refuse(
    program: Program,
    layouts: Sequence[str],
    *calls: Call,
    world: int = 2,
    grad: bool = True,
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> None:
    """Assert the same, or that every rank refuses the program: never a wrong number, never a rank left waiting."""
    forget()
    found = ends(_comparing(program, layouts, calls, grad, rtol, atol), world)
    assert len(set(found)) == 1 and found[0] in ("done", *REFUSALS), "\n".join(found)


def _comparing(
    program: Program, layouts: Sequence[str], calls: Sequence[Call], grad: bool, rtol: float, atol: float
) -> Callable[[Comm], None]:
    def body(comm: Comm) -> None:
        for number, call in enumerate(calls):
            try:
                compare(DenseRun(program, call, grad), layouts, rtol=rtol, atol=atol)
            except Exception as error:
                error.add_note(f"in call {number} with {', '.join(layouts)}")
                raise

    return body


def check_op(
    fn: Program,
    *dense: Tensor,
    placements: Sequence[Sequence[Placement] | None] | None = None,
    worlds: Worlds = WORLDS,
    pending: bool = True,
    ragged: bool = True,
    unsupported: bool | Callable[[Combination], bool] = False,
    limit: int = 24,
    rtol: float = 1e-9,
    atol: float = 1e-11,
    look: Callable[[Combination, Any], None] | None = None,
) -> None:
    """Assert that `fn` gives the same on ShardedTensors as on whole tensors, for every combination of placements.

    - `placements`: for each tensor the placements to try on an axis; None: all that fit its shape and dtype.
    - `pending`, `ragged`: whether "all" holds pending sums, and Shards with an empty rank.
    - `worlds`: the shapes of the meshes. At most `limit` combinations are tried on each, evenly picked, and three
      on one rank.
    - `unsupported`: where UnsupportedOpError may be raised: never, anywhere, or for the combinations it says.
    - `look`: called with each combination and its result, for assertions about layouts.
    """
    expected = DenseRun(fn, dense, None)
    for world in worlds:
        mesh = Mesh.of(**dict(zip(AXES, world, strict=False)))
        tried = _picked(_combinations(dense, placements, world, pending, ragged), limit if max(world) > 1 else 3)

        def body(comm: Comm, mesh: Mesh = mesh, tried: Sequence[Combination] = tried) -> None:
            for chosen in tried:

                def examine(result: Any, chosen: Combination = chosen) -> None:
                    _assert_sharded(result)
                    if look is not None:
                        look(chosen, result)

                try:
                    compare(expected, [MeshSpec(mesh, p) for p in chosen], rtol=rtol, atol=atol, look=examine)
                except UnsupportedOpError:
                    if not (unsupported(chosen) if callable(unsupported) else unsupported):
                        raise
                except Exception as error:
                    error.add_note(f"on mesh {mesh} with {chosen}")
                    raise

        run_local(body, mesh.ranks.size, timeout=TIMEOUT)


def _assert_sharded(result: Any) -> None:
    for value in _flat(result):
        assert isinstance(value, ShardedTensor), f"the result is a {type(value).__name__}"
        if value.sharding.pending is not None and value.sharding.pending.op not in ("sum", "avg"):
            assert not value.requires_grad, "no gradient passes through a pending maximum"


def placements_of(tensor: Tensor, ranks: int, pending: bool = True, ragged: bool = True) -> list[Placement]:
    """Every placement of a tensor on an axis: replicated, each dim sharded, each dim sharded raggedly, pending."""
    found: list[Placement] = [Replicate(), *(Shard(d) for d in range(tensor.ndim))]
    if ragged and ranks > 1:
        found += [Shard(d, sizes=_ragged(tensor.shape[d], ranks)) for d in range(tensor.ndim)]
    if pending and tensor.dtype != torch.bool:
        found.append(Partial("sum"))
    return found


def _combinations(
    dense: Sequence[Tensor],
    placements: Sequence[Sequence[Placement] | None] | None,
    world: tuple[int, ...],
    pending: bool,
    ragged: bool,
) -> list[Combination]:
    given = placements or [None] * len(dense)
    plain = ragged and len(world) == 1
    each: list[list[Placements]] = []
    for tensor, own in zip(dense, given, strict=True):
        choices = [list(own) if own is not None else placements_of(tensor, n, pending, plain) for n in world]
        each.append([p for p in product(*choices) if _fits(p)])
    return list(product(*each))


def _fits(placements: Placements) -> bool:
    """Whether no dim is split raggedly by one axis and in any way by another."""
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    return len(set(dims)) == len(dims) or not any(isinstance(p, Shard) and p.sizes for p in placements)


def _ragged(length: int, ranks: int) -> tuple[int, ...]:
    """Nothing for the first rank, one row for each in the middle, the rest for the last."""
    middle = [min(1, max(0, length - 1))] * (ranks - 2)
    return (0, *middle, length - sum(middle)) if sum(middle) <= length else (0,) * (ranks - 1) + (length,)


def _picked(tried: list[Combination], limit: int) -> list[Combination]:
    """At most `limit` of them, evenly, with a step that has no pattern in common with the product's order."""
    if len(tried) <= limit:
        return tried
    step = len(tried) / limit
    return [tried[int(i * step)] for i in range(limit)]


class DenseRun:
    """A call of a program on whole tensors: what it gave, and the tensors with the gradients and values it left."""

    def __init__(self, program: Program, call: Call, grad: bool | None) -> None:
        """Tensors require gradients where they can, nowhere, or (None) as they do in the call."""
        self.program, self.call, self.grad = program, call, grad
        self.leaves = {id(t): _leaf(t, grad) for t in call if isinstance(t, Tensor)}
        self.result = program(*(self.leaves.get(id(v), v) for v in call))
        loss = _weighed(self.result)
        self.differentiated = loss.requires_grad
        if self.differentiated:
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch


def compare(
    dense: DenseRun,
    layouts: Sequence[str | ShardingSpec],
    *,
    rtol: float = 1e-9,
    atol: float = 1e-11,
    look: Callable[[Any], None] | None = None,
) -> None:
    """Run a program again with its first arguments in these layouts; compare what it gives and leaves behind."""
    held: dict[int, ShardedTensor] = {}
    for value, layout in zip(dense.call, layouts, strict=False):
        if isinstance(value, Tensor) and id(value) not in held:
            held[id(value)] = lay(_leaf(value, dense.grad), layout)
    found = dense.program(*(held.get(id(v), dense.leaves.get(id(v), v)) for v in dense.call))
    if look is not None:
        look(found)
    whole = assert_same(found, dense.result, rtol=rtol, atol=atol)
    if dense.grad is False:
        for key, laid in held.items():  # what a program has written to
            assert_same(laid, dense.leaves[key], rtol=rtol, atol=atol)
    if dense.differentiated:
        _weighed(whole).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        for key, laid in held.items():
            absent = laid.grad is None and dense.leaves[key].grad is not None
            assert not (absent and dense.grad is None), "an argument has no gradient"
            assert_gradient(laid, dense.leaves[key], rtol=rtol, atol=atol)


def assert_gradient(laid: Any, whole: Tensor, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Fail unless a tensor has the gradient of its whole; none stands for zeros."""
    expected = torch.zeros_like(whole) if whole.grad is None else whole.grad
    if laid.grad is None:
        assert not expected.any(), "no gradient"
        return
    try:
        assert_same(laid.grad, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        error.add_note("this is the gradient of an argument")
        raise


def _leaf(tensor: Tensor, grad: bool | None) -> Tensor:
    able = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(tensor.requires_grad if grad is None else grad and able)


def _weighed(value: Any) -> Tensor:
    """A number that depends on every element of every result, on each with another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for number, v in enumerate(_flat(value)):
        if isinstance(v, Tensor) and v.requires_grad:
            real = torch.view_as_real(v) if v.is_complex() else v
            weights = torch.linspace(0.5, 1.5 + number, max(real.numel(), 1), dtype=torch.float64)
            total = total + (real * weights[: real.numel()].reshape(real.shape).to(real.dtype)).sum()
    return total


def _flat(value: Any) -> list[Any]:
    return [v for one in value for v in _flat(one)] if isinstance(value, list | tuple) else [value]


def ends(body: Callable[[Comm], Any], world: int, *, timeout: float = TIMEOUT) -> list[str]:
    """How a body ends on each rank: "done", the name of the refusal, what else it raised, or that it was left waiting.

    A wrong number (AssertionError) is raised as it is.
    """

    def one(comm: Comm) -> str:
        try:
            body(comm)
        except CommError as error:
            return f"left waiting: {error}"
        except AssertionError:
            raise
        except Exception as error:
            return type(error).__name__ if type(error).__name__ in REFUSALS else f"{type(error).__name__}: {error}"
        return "done"

    return run_local(one, world, timeout=timeout)


def assert_ends_alike(body: Callable[[Comm], Any], world: int) -> None:
    """Fail if one rank refuses what the others go on with, or if a rank is left waiting."""
    forget()
    found = ends(body, world)
    assert len(set(found)) == 1 and not found[0].startswith("left waiting"), "\n".join(found)


class WaitsForAnotherThread(ShardingSpec):
    """Rows on two ranks; while it lays out a tensor it waits a moment for another thread that does the same."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def pieces(self, shape: Sequence[int]) -> list[Piece]:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(1.0)
        half = shape[0] // 2
        return [Piece(Box((0,), (half,)), 0), Piece(Box((half,), (shape[0] - half,)), 1)]
