"""Plain tensors mixed with sharded ones: numbers and 0-dim tensors are replicated values, others are an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise._text import public
from shardwise._torch import aten, pytree
from shardwise.comm import Comm
from shardwise.comm.current import resolve_comm
from shardwise.geometry import Layout, Mesh, MeshSpec, Replicate, Shard
from shardwise.ops.rule import OperatorCall, Slot
from shardwise.ops.views import find_mesh, mesh_view, redistribute_to, view_on_mesh
from shardwise.tensor.dispatch import UnsupportedOpError, is_plain_passed, register_function, run_function
from shardwise.tensor.move import is_differentiated
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_ANY_MESH = "_any_mesh"
_plain_is_replicated: ContextVar[bool] = ContextVar("shardwise_plain_as_replicated", default=False)


class MixedTensorsError(UnsupportedOpError):
    """A plain tensor was mixed with a ShardedTensor, and nothing says how to read it.

    >>> import torch, shardwise
    >>> shardwise.ones(shardwise.ChunkSpec(0, ranks=1), 4) + torch.ones(4)
    Traceback (most recent call last):
    ...
    shardwise.ops.implicit_replication.MixedTensorsError: aten.add.Tensor got a plain tensor of shape (4,) ...
    """


class _ReplicatedReading(ContextDecorator):
    """No generator: one that a traced module leaves open would be closed later, in the context of something else."""

    def __enter__(self) -> None:
        self._token = _plain_is_replicated.set(True)

    def __exit__(self, *error: object) -> None:
        _plain_is_replicated.reset(self._token)


def plain_as_replicated() -> AbstractContextManager[None]:
    """Read plain tensors mixed with sharded ones as replicated: every rank has the same values.

    >>> import torch, shardwise
    >>> def body(comm):
    ...     x = shardwise.ones(shardwise.ChunkSpec(0, ranks=2), 4)
    ...     with plain_as_replicated():
    ...         return (x + torch.arange(4)).local_tensor().tolist()
    >>> shardwise.run_local(body, 2)
    [[1.0, 2.0], [3.0, 4.0]]
    """
    return _ReplicatedReading()


def reads_plain_as_replicated() -> bool:
    """Whether plain tensors are read as replicated here: inside `plain_as_replicated`, or a model that says so."""
    return _plain_is_replicated.get()


@public
def replicate(tensor: Tensor, like: ShardedTensor | None = None) -> ShardedTensor:
    """Make a replicated ShardedTensor of a plain tensor that every rank has. Nothing is sent or copied.

    It is on the mesh of `like`, or of the tensors that it is computed with.

    >>> import torch, shardwise
    >>> def body(comm):
    ...     x = shardwise.ones(shardwise.ChunkSpec(0, ranks=2), 4)
    ...     return (x + replicate(torch.arange(4))).local_tensor().tolist()
    >>> shardwise.run_local(body, 2)
    [[1.0, 2.0], [3.0, 4.0]]
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"replicate takes a tensor that every rank has, got {type(tensor).__name__}")
    if like is not None:
        return wrap(_replicated_on_mesh(tuple(tensor.shape), _mesh_of(like)), (tensor,), like.comm)
    comm = resolve_comm(None)
    made = wrap(_replicated_on_mesh(tuple(tensor.shape), Mesh(("all",), comm.ranks)), (tensor,), comm)
    made.__dict__[_ANY_MESH] = True
    return made


def replicate_made(tensor: Tensor, like: ShardedTensor) -> ShardedTensor:
    """A plain tensor that torch made of shapes alone, on every rank: replicated on the mesh of another."""
    layout = _replicated_on_mesh(tuple(tensor.shape), _mesh_of(like))
    parts = (tensor,) if like.comm.rank in layout.ranks else ()
    return wrap(layout, parts, like.comm, dtype=tensor.dtype, device=tensor.device)


def copy_mesh_note(source: ShardedTensor, target: ShardedTensor) -> None:
    """Let a tensor take the mesh of those it is computed with, if another one does."""
    if _ANY_MESH in source.__dict__:
        target.__dict__[_ANY_MESH] = True


def takes_any_mesh(tensor: ShardedTensor) -> bool:
    """Whether a tensor takes the mesh of those it is computed with."""
    return _ANY_MESH in tensor.__dict__


def _mesh_of(tensor: ShardedTensor) -> Mesh:
    view = mesh_view(tensor.sharding)
    return view.mesh if view is not None else Mesh(("all",), tensor.comm.ranks)


def _replicated_on_mesh(shape: tuple[int, ...], mesh: Mesh) -> Layout:
    return MeshSpec(mesh, (Replicate(),) * mesh.ndim).layout(shape)


def convert_plain_tensors(call: OperatorCall) -> list[ShardedTensor]:
    """All tensors of a call as ShardedTensors; plain ones that are not 0-dim are refused unless read as replicated."""
    sharded = _sharded_of(call)
    first = next((t for t in sharded if _ANY_MESH not in t.__dict__), sharded[0])
    found = []
    for number, tensor in enumerate(call.tensors):
        if isinstance(tensor, ShardedTensor):
            found.append(replicate(tensor.local_parts[0], first) if _ANY_MESH in tensor.__dict__ else tensor)
        elif tensor.ndim == 0 or _plain_is_replicated.get():
            beside_stand_ins = first.comm.device.type == "meta"
            found.append(replicate(tensor.to("meta") if beside_stand_ins else tensor, first))
        else:
            raise MixedTensorsError(
                f"{call.op} got a plain tensor of shape {tuple(tensor.shape)} as argument "
                f"{_argument_name(call, number)!r} "
                "next to a ShardedTensor; if every rank has the same values pass shardwise.replicate(t), or use "
                "`with shardwise.plain_as_replicated():`; for a model, shard_module(model, plan) shards parameters, an "
                'input_plan reads plain inputs ("R": the same on every rank), output_plan="plain" returns plain ones'
            )
    return found


def refuse_lost_gradients(call: OperatorCall, written: Iterable[int]) -> None:
    """Raise if a plain tensor that is on torch's own tape is written to: it would not know of the ShardedTensors."""
    plain = [i for i in written if not isinstance(call.tensors[i], ShardedTensor) and call.tensors[i].requires_grad]
    if plain and torch.is_grad_enabled() and any(map(is_differentiated, _sharded_of(call))):
        raise UnsupportedOpError(
            f"{call.op} writes values of a ShardedTensor that requires grad to a plain tensor that requires grad, as "
            f"argument {_argument_name(call, plain[0])!r}: gradients would be lost; use the operator that does not "
            "write, or shardwise.replicate(t)"
        )


def _sharded_of(call: OperatorCall) -> list[ShardedTensor]:
    return [t for t in call.tensors if isinstance(t, ShardedTensor)]


def is_placeholder(tensor: Any) -> bool:
    """Whether torch itself made an empty plain tensor, to be resized and filled by an operator that writes to it."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, ShardedTensor):
        return False
    return tuple(tensor.shape) == (0,) and not is_plain_passed()


def join_rank_sets(call: OperatorCall) -> OperatorCall | None:
    """The same call with tensors that are on different sets of ranks on one; None if it has to be without writing.

    Numbers, and tensors on meshes that no user named, are moved to the mesh of the others. All ranks of the comm come
    here, before those outside of a mesh go on with stand-ins. What is written to stays where it is: if another one has
    to stay as well, the result is copied there, and all ranks of the comm have to come here for both.
    """
    given = {i: t for i, t in enumerate(call.tensors) if isinstance(t, ShardedTensor) and _ANY_MESH not in t.__dict__}
    if len({_ranks_of_mesh(t.sharding) for t in given.values()}) < 2:
        return call
    meshes, written = {i: _mesh_of(t) for i, t in given.items()}, call.written
    copies = call.op is aten.copy_.default  # from any mesh, as `Tensor.copy_` does
    fixed = [i for i, t in given.items() if i in written or not (copies or t.numel() == 1 or _is_own(meshes[i]))]
    lead = max(fixed or given, key=lambda i: (i in written, given[i].numel(), meshes[i].ranks.size))
    moved = {i for i in given if meshes[i] != meshes[lead]}
    if not moved.isdisjoint(fixed):
        return None if written else call
    tensors: list[Any] = list(call.tensors)
    for index in moved:
        tensors[index] = _cut_over_mesh(given[index], meshes[lead])
    return call.with_tensors(tensors)


@cache_by_identity
def _ranks_of_mesh(layout: Layout) -> frozenset[int]:
    view = mesh_view(layout)
    return frozenset() if view is None else frozenset(map(int, view.mesh.ranks.flat))


def describe_on_one_mesh(tensors: Sequence[ShardedTensor], written: Collection[int]) -> list[ShardedTensor]:
    """The same tensors on one mesh where their layouts can be described so: that of what is written, or the largest.

    Nothing is moved. Layouts that mean the same meet, whatever their axes are called and whoever described them.
    """
    tensors = [t if i in written or not _hides_mesh(t) else _show_mesh(t) for i, t in enumerate(tensors)]
    specs = [mesh_view(t.sharding) for t in tensors]
    if len({s.mesh for s in specs if s is not None}) < 2:
        return list(tensors)
    lead = min(written) if written else max(range(len(tensors)), key=lambda i: (tensors[i].numel(), -i))
    mesh = _mesh_of(tensors[lead])
    described = [
        t if s is None or s.mesh == mesh else _describe_on_mesh(t, mesh) for t, s in zip(tensors, specs, strict=True)
    ]
    return _move_from_own_meshes(described, written)


def _move_from_own_meshes(tensors: list[ShardedTensor], written: Collection[int]) -> list[ShardedTensor]:
    """The same tensors, those on a mesh that no user named moved to the one that a user did, or that is written to.

    Tensors in irregular pieces are put on such meshes; numbers go to the mesh of the others. Meshes of other ranks are
    left to the caller: ranks outside of one do not come here.
    """
    specs = [mesh_view(t.sharding) for t in tensors]
    meshes = list(dict.fromkeys(s.mesh for s in specs if s is not None))
    if len(meshes) < 2 or len({frozenset(map(int, m.ranks.flat)) for m in meshes}) > 1:
        return tensors
    long = [s.mesh for t, s in zip(tensors, specs, strict=True) if s is not None and t.numel() != 1]
    named = next((m for m in long or meshes if not _is_own(m)), (long or meshes)[0])
    held = specs[min(written)] if written else None
    mesh = named if held is None else held.mesh
    movable = [
        s is not None and s.mesh != mesh and (_is_own(s.mesh) or _is_own(mesh) or t.numel() == 1)
        for t, s in zip(tensors, specs, strict=True)
    ]
    return [
        _cut_over_mesh(t, mesh) if moves and i not in written else t
        for i, (t, moves) in enumerate(zip(tensors, movable, strict=True))
    ]


def _is_own(mesh: Mesh) -> bool:
    """Whether the mesh was made for tensors that have none: its axes have names of ours."""
    return all(name in ("all", "chunks", "pieces") or name.startswith("cells") for name in mesh.axes)


def _cut_over_mesh(tensor: ShardedTensor, mesh: Mesh) -> ShardedTensor:
    """The tensor cut along its longest dim over the first axis of a mesh, and replicated over the others.

    One number is replicated.
    """
    cut = Shard(max(range(tensor.ndim), key=lambda d: tensor.shape[d])) if tensor.numel() != 1 else Replicate()
    placements = (cut, *(Replicate(),) * (mesh.ndim - 1))
    return redistribute_to(tensor, MeshSpec(mesh, placements).layout(tuple(tensor.shape)), "one mesh")


def describe_given(call: OperatorCall) -> OperatorCall:
    """The same call with its sharded tensors on one mesh, where their layouts can be described so.

    A tensor on some ranks, whose spec names no mesh, meets the mesh that another one is on. It is as regular as that
    one then, and a rank outside of the mesh takes part without data.
    """
    given = {i: t for i, t in enumerate(call.tensors) if isinstance(t, ShardedTensor)}
    specs = [mesh_view(t.sharding) for t in given.values()]
    if len({s.mesh for s in specs if s is not None}) < 2 and not any(map(_hides_mesh, given.values())):
        return call
    numbers = list(given)
    made = describe_on_one_mesh(list(given.values()), {numbers.index(i) for i in call.written if i in given})
    found = dict(zip(numbers, made, strict=True))
    return call.with_tensors([found.get(i, t) for i, t in enumerate(call.tensors)])


def _hides_mesh(tensor: ShardedTensor) -> bool:
    """Whether listed pieces are a mesh layout of all ranks; where a rank has nothing they stay irregular."""
    layout = tensor.sharding
    if mesh_view(layout) is not None or len(layout.ranks) != len(tensor.comm.ranks):
        return False
    return find_mesh(layout) is not None


def _show_mesh(tensor: ShardedTensor) -> ShardedTensor:
    spec = find_mesh(tensor.sharding)
    assert spec is not None
    return wrap(spec.layout(tuple(tensor.shape)), tensor.local_parts, tensor.comm)


def _describe_on_mesh(tensor: ShardedTensor, mesh: Mesh) -> ShardedTensor:
    spec = view_on_mesh(tensor.sharding, mesh)
    if spec is None:
        return tensor
    layout = spec.layout(tuple(tensor.shape))
    return wrap(
        layout, tensor.local_parts, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=tensor._anchor
    )


def _argument_name(call: OperatorCall, number: int) -> str:
    """The name of the argument that holds tensor number `number` of a call."""
    schema = getattr(call.op, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else [str(i) for i in range(len(call.args))]
    for name, value in [*zip(names, call.args, strict=False), *call.kwargs.items()]:
        if Slot(number) in (value if isinstance(value, list | tuple) else [value]):
            return name
    return str(number)


def register_plain_maker(function: Callable[..., Any]) -> None:
    """Register a torch function that makes intermediate plain tensors (offsets, counts): they are replicated values."""

    @register_function(function, out=True)
    def run(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        return run_plain_maker(function, args, kwargs)


def run_plain_maker(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function with the plain tensors that it makes as replicated values.

    What the caller passes is not: a plain tensor among the arguments is refused as anywhere.
    """
    given = [v for v in pytree.tree_iter((args, kwargs)) if isinstance(v, Tensor)]
    if any(t.ndim > 0 and not isinstance(t, ShardedTensor) for t in given):
        return run_function(function, args, kwargs)
    with plain_as_replicated():
        return run_function(function, args, kwargs)
