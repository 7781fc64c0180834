"""Plain inputs of a sharded model: replicated, or each rank's own part of dim 0.

Tensors among a model's arguments become ShardedTensors before its forward runs. Lengths of parts are exchanged, so that
they may differ from rank to rank and from batch to batch. Plain tensors that the forward makes itself (positions,
masks) are the same on every rank and are read as replicated. With an `output_plan` of "plain" the outputs of the
outermost module come back as plain tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwise._nests import flatten_nest, unflatten_nest
from shardwise._torch import count_running_calls
from shardwise.comm import Comm, DisagreementError
from shardwise.comm.traced import traced_comm
from shardwise.geometry import Layout, Mesh, MeshSpec, Placement, Replicate, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.nn.model_plan import PLAIN, ModelPlan
from shardwise.nn.plain_outputs import BatchSplits, find_batch_splits, make_plain
from shardwise.ops.engine.mixed import plain_as_replicated
from shardwise.ops.engine.view_sharding import NoViewError, express_shard
from shardwise.tensor.dynamo import warn_compiled_callers
from shardwise.tensor.recorder import recorded_wait, recorders
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_input_scopes: ContextVar[tuple[InputScope, ...]] = ContextVar("shardwise_inputs", default=())
_whole_batch: ContextVar[bool] = ContextVar("shardwise_whole_batch", default=False)


@dataclass(frozen=True)
class InputScope:
    """A module whose forward runs: how its plain tensors are read, and how its batch is split over ranks."""

    module: nn.Module
    reading: AbstractContextManager[None]
    splits: BatchSplits


@contextmanager
def whole_batch_inputs() -> Iterator[None]:
    """Read plain inputs of sharded models, and plain tensors near sharded ones, as the same on every rank."""
    token = _whole_batch.set(True)
    try:
        with plain_as_replicated():
            yield
    finally:
        _whole_batch.reset(token)


def register_input_hooks(module: nn.Module, plan: ModelPlan, comm: Comm) -> None:
    """Make a model read its plain inputs, and return its outputs, as a plan says."""
    given = plan.input_placements
    assert given is not None
    replicated = plan.replicated.placements

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        warn_compiled_callers()
        _drop_interrupted(module)
        placements = replicated if _whole_batch.get() else given
        taken: tuple[Any, Any]
        if not kwargs and all(type(value) is Tensor for value in args):  # the usual case, without looking into nests
            placed = _place_tensors(args, plan.mesh, placements, comm)
            taken = tuple(placed), kwargs
        else:
            leaves, structure = flatten_nest((args, kwargs))
            placed = _place_tensors(leaves, plan.mesh, placements, comm)
            taken = unflatten_nest(placed, structure)
        splits = find_batch_splits(placed, placements)
        reading = plain_as_replicated()
        reading.__enter__()
        _input_scopes.set((*_input_scopes.get(), InputScope(module, reading, splits)))
        return taken

    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        opened = _input_scopes.get()
        if not opened or opened[-1].module is not module:  # the inputs could not be placed
            return None
        _input_scopes.set(opened[:-1])
        opened[-1].reading.__exit__(None, None, None)
        if plan.output_plan != PLAIN or len(opened) > 1 or output is None:  # None: the forward raised
            return None
        return make_plain(output, plan.mesh, opened[-1].splits)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _drop_interrupted(entered: nn.Module) -> None:
    """Leave the scopes of calls that do not run any more: they were interrupted, as by Ctrl-C."""
    opened = list(_input_scopes.get())
    while opened and count_running_calls(opened[-1].module) <= (opened[-1].module is entered):
        opened.pop().reading.__exit__(None, None, None)
        _input_scopes.set(tuple(opened))


def place_inputs(tree: Any, mesh: Mesh, placements: Sequence[Placement], comm: Comm) -> Any:
    """The same nest of arguments with its plain tensors as ShardedTensors: whole ones, or parts of dim 0.

    >>> import torch
    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     batch = torch.ones(comm.rank + 1, 3)
    ...     return tuple(place_inputs([batch], Mesh.of(dp=2), (Shard(0),), comm)[0].shape)
    >>> run_local(body, 2)
    [(3, 3), (3, 3)]
    """
    leaves, structure = flatten_nest(tree)
    return unflatten_nest(_place_tensors(leaves, mesh, placements, comm), structure)


def _place_tensors(values: Sequence[Any], mesh: Mesh, placements: Sequence[Placement], comm: Comm) -> list[Any]:
    comm, found = traced_comm(comm), list(values)
    plain = [i for i, value in enumerate(found) if isinstance(value, Tensor) and not isinstance(value, ShardedTensor)]
    shapes = [tuple(found[i].shape) for i in plain]
    if any(isinstance(p, Shard) for p in placements):
        layouts = _gather_part_layouts(shapes, mesh, placements, comm)
    else:
        layouts = [_replicated_input_layout(shape, mesh, tuple(placements)) for shape in shapes]
    for index, layout in zip(plain, layouts, strict=True):
        found[index] = wrap(layout, (found[index].contiguous(),), comm)
    return found


@lru_cache(maxsize=1024)
def _replicated_input_layout(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Layout:
    return MeshSpec(mesh, placements).layout(shape)


def _gather_part_layouts(
    shapes: Sequence[tuple[int, ...]], mesh: Mesh, placements: Sequence[Placement], comm: Comm
) -> list[Layout]:
    """The layouts of which these are this rank's parts; one small exchange collects the lengths of all ranks."""
    with recorded_wait(comm, "inputs: lengths") if recorders else nullcontext():
        told = comm.all_gather_bytes(json.dumps(shapes).encode(), label="inputs")
    by_rank = {r: [tuple(s) for s in json.loads(data)] for r, data in zip(comm.ranks, told, strict=True)}
    if any(len(given) != len(shapes) for given in by_rank.values()):
        raise DisagreementError(
            f"inputs: the ranks pass {sorted({len(g) for g in by_rank.values()})} plain tensors; pass equally many"
        )
    return [_infer_input_layout({r: g[i] for r, g in by_rank.items()}, mesh, placements) for i in range(len(shapes))]


def _infer_input_layout(shapes: dict[int, tuple[int, ...]], mesh: Mesh, placements: Sequence[Placement]) -> Layout:
    """The layout of one input from the shapes of all ranks' parts."""
    cut = [axis for axis, p in enumerate(placements) if isinstance(p, Shard)]
    ranks = np.moveaxis(mesh.ranks, cut, range(len(cut)))
    ranks = ranks.reshape(*ranks.shape[: len(cut)], -1)
    found = np.array([shapes[r][0] if shapes[r] else 0 for r in ranks.reshape(-1).tolist()]).reshape(ranks.shape)
    lengths, first = found[..., 0], shapes[int(ranks.reshape(-1)[0])]
    if any(s[1:] != first[1:] or len(s) != len(first) for s in shapes.values()) or (found != lengths[..., None]).any():
        raise DisagreementError(
            f"inputs: the parts have the shapes {sorted(set(shapes.values()))}; parts differ in dim 0 only, and only "
            f"along {_format_axes(mesh, cut)}"
        )
    if not first:
        return MeshSpec(mesh, (Replicate(),) * mesh.ndim).layout(())
    given = list(placements)
    for level, axis in enumerate(cut):
        given[axis] = _infer_split(lengths.sum(tuple(range(level + 1, len(cut)))), mesh, axis)
    return MeshSpec(mesh, given).layout((int(lengths.sum()), *first[1:]))


def _infer_split(lengths: IntArray, mesh: Mesh, axis: int) -> Shard:
    """How an axis cuts dim 0, from the lengths along it (last) in each part of the axes before it."""
    sizes = [tuple(row) for row in lengths.reshape(-1, lengths.shape[-1]).tolist()]
    try:
        return express_shard(0, sizes)
    except NoViewError:
        raise DisagreementError(
            f"inputs: the parts along axis {mesh.axes[axis]!r} have the lengths {' and '.join(map(str, sizes))} in the "
            "parts of the axes before it; use the same lengths in all of them, or those of torch.chunk"
        ) from None


def _format_axes(mesh: Mesh, axes: Sequence[int]) -> str:
    names = [repr(mesh.axes[axis]) for axis in axes]
    return f"axis {names[0]}" if len(names) == 1 else f"the axes {', '.join(names)}"
