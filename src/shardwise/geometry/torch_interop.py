"""Torch's own words for layouts: DeviceMesh, and the placements of `torch.distributed.tensor`.

Torch is never imported: its objects are told by their attributes and class names. Each function takes ours as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import Any

from shardwise.geometry.box import LayoutError
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.placements import Partial, Placement, Replicate, Shard


def is_device_mesh(value: object) -> bool:
    """Whether this is torch's DeviceMesh."""
    return hasattr(value, "mesh_dim_names") and hasattr(value, "mesh")


def to_mesh(value: Any) -> Mesh:
    """A Mesh, or torch's DeviceMesh as one; axes without names are called axis0, axis1...

    >>> to_mesh((2, 2))
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: a mesh is a Mesh, such as Mesh.of(dp=2, tp=4), or torch's DeviceMesh; ...
    """
    if isinstance(value, Mesh):
        return value
    if not is_device_mesh(value):
        raise LayoutError(
            "a mesh is a Mesh, such as Mesh.of(dp=2, tp=4), or torch's DeviceMesh; got "
            f"{type(value).__name__}: {value!r}"
        )
    ranks = value.mesh.tolist()
    names = value.mesh_dim_names or tuple(f"axis{i}" for i in range(value.mesh.ndim))
    return Mesh(tuple(names), ranks)


def to_placement(value: Any, where: str = "") -> Placement:
    """A placement, or torch's as one of ours; a strided shard is a Shard, and `read_order` says what its stride means.

    >>> to_placement(Shard(0)), to_placement("S(0)")
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: a placement is Shard(dim), Replicate() or Partial(), ...got str: 'S(0)'; ...
    """
    if isinstance(value, Shard | Replicate | Partial):
        return value
    kind = type(value).__name__
    if any(c.__module__.startswith("torch.") for c in type(value).__mro__):
        if kind in ("Shard", "_StridedShard"):
            return Shard(value.dim)
        if kind == "Replicate":
            return Replicate()
        if kind == "Partial":
            return Partial(value.reduce_op)
        raise LayoutError(f"{where}{value!r} has no counterpart; redistribute it to Shard, Replicate or Partial first")
    if isinstance(value, type) and issubclass(value, Shard | Replicate | Partial):
        called = f"{value.__name__}(0)" if value is Shard else f"{value.__name__}()"
        raise LayoutError(f"{where}a placement is an object, and this is the class {value.__name__}; write {called}")
    fix = "; parse_placements reads the notation" if isinstance(value, str) else ""
    raise LayoutError(
        f"{where}a placement is Shard(dim), Replicate() or Partial(), of shardwise or of torch.distributed.tensor; got "
        f"{type(value).__name__}: {value!r}{fix}"
    )


def read_order(mesh: Mesh, placements: Sequence[Any]) -> list[str]:
    """The order of splits, as axis names, that torch's strided shards represent; empty without any."""
    strided = {p.dim for p in placements if type(p).__name__ == "_StridedShard"}
    order: list[str] = []
    for dim in sorted(strided):
        axes = [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        wanted = {a: getattr(placements[a], "split_factor", 1) for a in axes}
        fits = [p for p in permutations(axes) if all(split_factor(mesh, p, a) == wanted[a] for a in axes)]
        if not fits:
            raise LayoutError(
                f"the split factors {wanted} of dim {dim} do not order the axes {mesh}; redistribute to Shard({dim})"
            )
        order += [mesh.axes[a] for a in fits[0]]
    return order


def split_factor(mesh: Mesh, order: Sequence[int], axis: int) -> int:
    """Torch's split factor: the ranks of the axes that split earlier but come later in the mesh."""
    return prod(mesh.shape[a] for a in order[: order.index(axis)] if a > axis)
