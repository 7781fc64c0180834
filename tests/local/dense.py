"""A program on ShardedTensors beside the same program on whole tensors: values, gradients, and how each rank ended.

1. A program is a function of tensors. A call is a tuple of whole tensors; one object given twice is one tensor given
   twice, on both sides.
2. Every rank lays the tensors out as layouts in notation say ("on tp=2: S(0)"), runs the program on them and on the
   whole ones, and compares results and gradients.
3. All calls of a program run one after the other in one world, so that what the first one left behind meets the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import (
    Comm,
    CommError,
    MeshSpec,
    Partial,
    Replicate,
    ShardedTensor,
    from_local,
    parse_spec,
    run_local,
    shard,
    sharding_rule,
)
from shardwise.geometry import Box, Piece, ShardingSpec
from tests.device import DEVICE

Program: TypeAlias = Callable[..., Any]
Call: TypeAlias = Sequence[Any]
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


def lay(whole: Tensor, layout: str) -> ShardedTensor:
    """A whole tensor, which every rank has, in a layout; a leaf that requires grad if the whole does."""
    spec = parse_spec(layout)
    if isinstance(spec, MeshSpec) and any(isinstance(p, Partial) for p in spec.placements):
        laid = _pending(whole.detach(), spec)
    else:
        laid = shard(whole.detach(), spec, None)
    return laid.requires_grad_(whole.requires_grad)


def _pending(whole: Tensor, spec: MeshSpec) -> ShardedTensor:
    """Addends that reduce to the whole and differ from it and from each other."""
    placements = [Replicate() if isinstance(p, Partial) else p for p in spec.placements]
    settled = shard(whole, MeshSpec(spec.mesh, placements), None)
    place = spec.mesh.coordinates(settled.comm.rank)
    local = settled.local_tensor().clone()
    for axis, size, placement in zip(spec.mesh.axes, spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Partial) and size > 1:
            local = _addend(local, placement.op, place[axis], size)
    return from_local(local, spec, tuple(whole.shape))


def _addend(value: Tensor, op: str, place: int, size: int) -> Tensor:
    if op in ("sum", "avg"):
        return value * ((2, -1)[place] if place < 2 else 0) * (size if op == "avg" else 1)
    if op == "product":
        return value * 2 if place == 0 else value * 0 + (0.5 if place == 1 else 1)
    mine = torch.arange(value.numel()).reshape(value.shape).remainder(size) == place
    return torch.where(mine, value, value - 3 if op == "max" else value + 3)


def whole_of(value: Any) -> Any:
    """What a program gave, whole."""
    if isinstance(value, ShardedTensor):
        return value.full()
    if isinstance(value, list | tuple):
        return [whole_of(v) for v in value]
    return value


def assert_same(found: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Fail unless what was found, put together, is what is expected: shapes, dtypes and values."""
    if isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, rtol=rtol, atol=atol)
    elif isinstance(expected, Tensor):
        assert tuple(found.shape) == tuple(expected.shape), f"shape {tuple(found.shape)}, dense {tuple(expected.shape)}"
        assert found.dtype == expected.dtype, f"{found.dtype}, dense {expected.dtype}"
        assert_close(whole_of(found).detach(), expected.detach(), rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(expected, float):
        assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert found == expected


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
                _compare(program, layouts, call, grad, rtol, atol)
            except Exception as error:
                error.add_note(f"in call {number} with {', '.join(layouts)}")
                raise

    return body


def _compare(program: Program, layouts: Sequence[str], call: Call, grad: bool, rtol: float, atol: float) -> None:
    wholes: dict[int, Tensor] = {id(t): _leaf(t, grad) for t in call if isinstance(t, Tensor)}
    held: dict[int, ShardedTensor] = {}
    for value, layout in zip(call, layouts, strict=False):
        if isinstance(value, Tensor) and id(value) not in held:
            held[id(value)] = lay(wholes[id(value)], layout)
    expected = program(*(wholes.get(id(v), v) if isinstance(v, Tensor) else v for v in call))
    found = program(*(held.get(id(v), wholes.get(id(v))) if isinstance(v, Tensor) else v for v in call))
    assert_same(found, expected, rtol=rtol, atol=atol)
    if not grad:
        for key, laid in held.items():  # what a program has written to
            assert_same(laid, wholes[key], rtol=rtol, atol=atol)
        return
    loss = _weighed(expected)
    if not loss.requires_grad:
        return
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    _weighed(whole_of(found)).backward()  # type: ignore[no-untyped-call]  # untyped in torch
    for key, laid in held.items():
        if wholes[key].requires_grad:
            assert_gradient(laid, wholes[key], rtol=rtol, atol=atol)


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


def _leaf(tensor: Tensor, grad: bool) -> Tensor:
    able = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(grad and able)


def _weighed(value: Any) -> Tensor:
    """A number that depends on every element of every result, on each with another weight."""
    flat = value if isinstance(value, list | tuple) else [value]
    taped = [v for v in flat if isinstance(v, Tensor) and v.requires_grad]
    total = torch.zeros((), dtype=torch.float64)
    for v in taped:
        real = torch.view_as_real(v) if v.is_complex() else v
        weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).reshape(real.shape)
        total = total + (real * weights).sum()
    return total


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
