"""Does an operator on ShardedTensors give what it gives on whole tensors? Every placement, values and gradients.

1. Take a function of tensors and whole arguments; compute result and gradients once on plain tensors.
2. For each mesh and each combination of placements (replicated, each dim sharded, sharded raggedly with an empty
   rank, a pending sum) lay the arguments out and compute again, on all ranks of one process.
3. Compare every result and every gradient, put together, with the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.testing import assert_close

import shardwise.ops  # noqa: F401  # brings the operators
from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.tensor import ShardedTensor, from_local, shard
from shardwise.tensor.dispatch import UnsupportedOpError

Placements: TypeAlias = tuple[Placement, ...]
Combination: TypeAlias = tuple[Placements, ...]
Worlds: TypeAlias = Sequence[tuple[int, ...]]

WORLDS: Worlds = ((1,), (2,), (3,), (2, 2))
LINES: Worlds = ((1,), (2,), (3,))
AXES = ("dp", "tp", "pp")


def ramp(*shape: int, start: float = -1.0, step: float = 0.37, grad: bool = True) -> Tensor:
    """Distinct float64 values in no simple order, so that sums, maxima and sorts of rows differ."""
    count = torch.Size(shape).numel()
    scattered = (torch.arange(count, dtype=torch.float64) * 7 + 3) % max(count, 1) if count % 7 else torch.arange(count)
    return (scattered.to(torch.float64) * step + start).reshape(shape).requires_grad_(grad)


def check_op(
    fn: Callable[..., Any],
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
    """Assert that `fn` gives the same on ShardedTensors as on whole tensors, in values and gradients.

    - `placements`: for each tensor the placements to try on an axis; None: all that fit its shape and dtype.
    - `pending`, `ragged`: whether "all" holds pending sums, and Shards with an empty rank.
    - `worlds`: the shapes of the meshes. At most `limit` combinations are tried on each, evenly picked, and three
      on one rank.
    - `unsupported`: where UnsupportedOpError may be raised: never, anywhere, or for the combinations it says.
    - `look`: called with each combination and its result, for assertions about layouts.
    """
    expected, grads = _dense(fn, dense)
    for world in worlds:
        mesh = Mesh.of(**dict(zip(AXES, world, strict=False)))
        tried = _picked(list(_combinations(dense, placements, world, pending, ragged)), limit if max(world) > 1 else 3)

        def body(comm: Comm, mesh: Mesh = mesh, tried: Sequence[Combination] = tried) -> None:
            for chosen in tried:
                allowed = unsupported(chosen) if callable(unsupported) else unsupported
                try:
                    _compare(fn, dense, mesh, chosen, expected, grads, rtol, atol, look)
                except UnsupportedOpError:
                    if not allowed:
                        raise
                except Exception as error:
                    error.add_note(f"on mesh {mesh} with {chosen}")
                    raise

        run_local(body, mesh.ranks.size, timeout=60)


def placements_of(tensor: Tensor, ranks: int, pending: bool = True, ragged: bool = True) -> list[Placement]:
    """Every placement of a tensor on an axis: replicated, each dim sharded, each dim sharded raggedly, pending."""
    found: list[Placement] = [Replicate(), *(Shard(d) for d in range(tensor.ndim))]
    if ragged and ranks > 1:
        found += [Shard(d, sizes=_ragged(tensor.shape[d], ranks)) for d in range(tensor.ndim)]
    if pending and tensor.dtype != torch.bool:
        found.append(Partial("sum"))
    return found


def lay_out(tensor: Tensor, mesh: Mesh, placements: Placements) -> ShardedTensor:
    """A whole tensor in this layout, as a leaf; addends of pending sums are twice the value, minus the value, zeros."""
    spec = MeshSpec(mesh, placements)
    whole = MeshSpec(mesh, [Replicate() if isinstance(p, Partial) else p for p in placements])
    laid = shard(tensor.detach(), whole, None)
    place = mesh.coordinates(laid.comm.rank)
    factor = 1
    for axis, size, placement in zip(mesh.axes, mesh.shape, placements, strict=True):
        if isinstance(placement, Partial) and size > 1:
            assert placement.op == "sum"
            factor *= (2, -1)[place[axis]] if place[axis] < 2 else 0
    own = (laid.local_tensor() * factor if factor != 1 else laid.local_tensor()).clone()
    return from_local(own.requires_grad_(tensor.requires_grad), spec, tuple(tensor.shape))


def _dense(fn: Callable[..., Any], dense: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in dense]
    outputs = _flat(fn(*leaves))
    loss = _loss(outputs)
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    return [o.detach() for o in outputs], [t.grad for t in leaves]


def _compare(
    fn: Callable[..., Any],
    dense: Sequence[Tensor],
    mesh: Mesh,
    chosen: Combination,
    expected: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    rtol: float,
    atol: float,
    look: Callable[[Combination, Any], None] | None,
) -> None:
    leaves = [lay_out(t, mesh, p) for t, p in zip(dense, chosen, strict=True)]
    result = fn(*leaves)
    if look is not None:
        look(chosen, result)
    outputs = [_whole(o) for o in _flat(result)]
    assert len(outputs) == len(expected)
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(found.detach(), wanted, rtol=rtol, atol=atol, equal_nan=True, msg=_say(f"output {number}"))
    loss = _loss(outputs)
    if loss is None:
        return
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    for number, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        found_grad = None if leaf.grad is None else leaf.grad.full()
        if grad is not None:
            assert found_grad is not None, f"tensor {number} has no gradient"
            assert_close(found_grad, grad, rtol=rtol, atol=atol, equal_nan=True, msg=_say(f"gradient {number}"))
        else:
            assert found_grad is None or not bool(found_grad.any()), f"tensor {number} has a gradient"


def _say(what: str) -> Callable[[str], str]:
    return lambda text: f"{what}: {text}"


def _whole(value: Any) -> Tensor:
    assert isinstance(value, ShardedTensor), f"the result is a {type(value).__name__}"
    if value.sharding.pending is not None and value.sharding.pending.op not in ("sum", "avg"):
        assert not value.requires_grad, "no gradient passes through a pending maximum"
    return value.full()


def _flat(value: Any) -> list[Any]:
    return [v for one in value for v in _flat(one)] if isinstance(value, list | tuple) else [value]


def _loss(outputs: Sequence[Tensor]) -> Tensor | None:
    """A weighted sum of all outputs that are on the tape; the weights differ from element to element."""
    total: Tensor | None = None
    for number, output in enumerate(outputs):
        if output.requires_grad:
            weights = torch.linspace(0.5, 1.5 + number, max(output.numel(), 1), dtype=torch.float64)
            term = (output * weights[: output.numel()].reshape(output.shape).to(output.dtype)).sum()
            total = term if total is None else total + term
    return total


def _combinations(
    dense: Sequence[Tensor],
    placements: Sequence[Sequence[Placement] | None] | None,
    world: tuple[int, ...],
    pending: bool,
    ragged: bool,
) -> Sequence[Combination]:
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
