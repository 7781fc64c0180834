"""Plain inputs of a sharded model: replicated, or each rank's own part of dim 0.

Tensors among a model's arguments become ShardedTensors before its forward runs. Lengths of parts are exchanged, so that
they may differ from rank to rank and from batch to batch. Plain tensors that the forward makes itself (positions,
masks) are the same on every rank and are read as replicated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.comm import Comm, DisagreementError
from shardwise.geometry import Layout, Mesh, MeshSpec, Placement, Replicate, Shard
from shardwise.nn.model_plan import ModelPlan
from shardwise.ops.mixed import plain_as_replicated
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Reading = tuple[nn.Module, AbstractContextManager[None]]
_open: ContextVar[tuple[Reading, ...]] = ContextVar("shardwise_inputs", default=())


def read_inputs(module: nn.Module, plan: ModelPlan, comm: Comm) -> None:
    """Make a model read its plain inputs as a plan says."""
    placements = plan.input_placements
    assert placements is not None

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        taken: tuple[Any, Any] = placed((args, kwargs), plan.mesh, placements, comm)
        reading = plain_as_replicated()
        reading.__enter__()
        _open.set((*_open.get(), (module, reading)))
        return taken

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(_leave, always_call=True)


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    opened = _open.get()
    if opened and opened[-1][0] is module:  # not so if the inputs could not be placed
        _open.set(opened[:-1])
        opened[-1][1].__exit__(None, None, None)


def placed(tree: Any, mesh: Mesh, placements: Sequence[Placement], comm: Comm) -> Any:
    """The same nest of arguments with its plain tensors as ShardedTensors: whole ones, or parts of dim 0.

    >>> import torch
    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     batch = torch.ones(comm.rank + 1, 3)
    ...     return tuple(placed([batch], Mesh.of(dp=2), (Shard(0),), comm)[0].shape)
    >>> run_local(body, 2)
    [(3, 3), (3, 3)]
    """
    leaves, structure = pytree.tree_flatten(tree)
    plain = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, ShardedTensor)]
    shapes = [tuple(leaves[i].shape) for i in plain]
    if any(isinstance(p, Shard) for p in placements):
        layouts = _part_layouts(shapes, mesh, placements, comm)
    else:
        layouts = [MeshSpec(mesh, placements).layout(shape) for shape in shapes]
    for index, layout in zip(plain, layouts, strict=True):
        leaves[index] = wrap(layout, (leaves[index].contiguous(),), comm)
    return pytree.tree_unflatten(leaves, structure)


def _part_layouts(
    shapes: Sequence[tuple[int, ...]], mesh: Mesh, placements: Sequence[Placement], comm: Comm
) -> list[Layout]:
    """The layouts of which these are this rank's parts; one small exchange tells the lengths of all ranks."""
    told = comm.all_gather_bytes(json.dumps(shapes).encode(), label="inputs")
    by_rank = {r: [tuple(s) for s in json.loads(data)] for r, data in zip(comm.ranks, told, strict=True)}
    axis = next(i for i, p in enumerate(placements) if isinstance(p, Shard))
    if any(len(given) != len(shapes) for given in by_rank.values()):
        raise DisagreementError(
            f"inputs: the ranks pass {sorted({len(g) for g in by_rank.values()})} plain tensors; pass as many on each"
        )
    return [_layout({r: g[i] for r, g in by_rank.items()}, mesh, placements, axis) for i in range(len(shapes))]


def _layout(shapes: dict[int, tuple[int, ...]], mesh: Mesh, placements: Sequence[Placement], axis: int) -> Layout:
    """The layout of one input from the shapes of all ranks' parts."""
    first = shapes[int(mesh.ranks.reshape(-1)[0])]
    lengths = {r: s[0] if s else 0 for r, s in shapes.items()}
    groups = [tuple(lengths[r] for r in group) for group in mesh.groups(axis)]
    if any(s[1:] != first[1:] for s in shapes.values()) or len(set(groups)) > 1:
        raise DisagreementError(
            f"inputs: the parts have the shapes {sorted(set(shapes.values()))}; parts differ in dim 0 only, and only "
            f"along axis {mesh.axes[axis]!r}"
        )
    if not first:
        return MeshSpec(mesh, (Replicate(),) * mesh.ndim).layout(())
    shape = (sum(groups[0]), *first[1:])
    plain = MeshSpec(mesh, placements).layout(shape)
    if all(plain.local_shapes(r)[0][0] == n for r, n in lengths.items() if plain.local_shapes(r)):
        return plain
    given = [Shard(0, sizes=groups[0]) if i == axis else p for i, p in enumerate(placements)]
    return MeshSpec(mesh, given).layout(shape)
