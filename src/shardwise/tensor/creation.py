"""Making ShardedTensors: from a whole tensor, from local tensors, filled with one value or random ones; and many moves.

Every rank calls these functions alike. Random values are the same whatever the spec and the number of ranks; see
`shardwise.tensor.random`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from shardwise._text import count_of, public
from shardwise._torch import is_dual_level
from shardwise.comm import (
    Comm,
    DisagreementError,
    advise_ranks,
    agree,
    fold_values,
    gather_values,
    name_ranks,
)
from shardwise.comm.agree import label_error, make_request, print_once, raise_problems
from shardwise.comm.current import GroupOrComm, comm_of_device_mesh, resolve_comm
from shardwise.comm.local import number_device
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Placement, ShardingSpec
from shardwise.geometry.mesh import is_device_mesh
from shardwise.geometry.notation import read_spec
from shardwise.geometry.serialize import infer_from_parts
from shardwise.tensor import random_init as _init  # noqa: F401  # registers the in-place functions of random values
from shardwise.tensor.dispatch import register_function, sharded_leaves
from shardwise.tensor.execute import Handle
from shardwise.tensor.functions import from_dtensor, is_dtensor
from shardwise.tensor.move import (
    can_start_early,
    describe_tensor,
    find_move,
    format_layout_text,
    is_move_recorded,
    mesh_spec_of,
    move_to,
    replicated_layout,
    single_rank_layout,
    start_moving,
    start_on_request,
    target_layout,
)
from shardwise.tensor.pickling import PLAIN_SPECS
from shardwise.tensor.random import Distribution, normal, uniform
from shardwise.tensor.sharded_tensor import ShardedTensor, allocate_locals, wrap
from shardwise.tensor.writes import draw_into, fill_with

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

MeshLike: TypeAlias = "Mesh | DeviceMesh"
PlacementsLike: TypeAlias = "str | Sequence[Placement | TorchPlacement]"
LayoutLike: TypeAlias = "Layout | ShardingSpec | PlacementsLike"


@overload
def shard(
    tensor: Tensor | None,
    spec: Layout | ShardingSpec | str,
    src_rank: int | None = 0,
    *,
    comm: GroupOrComm | None = None,
) -> ShardedTensor: ...
@overload
def shard(
    tensor: Tensor | None, spec: MeshLike, src_rank: PlacementsLike, *, comm: GroupOrComm | None = None
) -> ShardedTensor: ...
@overload
def shard(
    tensor: Tensor | None,
    spec: MeshLike,
    src_rank: int | None = 0,
    *,
    placements: PlacementsLike,
    comm: GroupOrComm | None = None,
) -> ShardedTensor: ...
def shard(
    tensor: Tensor | None,
    spec: Any,
    src_rank: Any = 0,
    *,
    placements: Any = None,
    comm: Any = None,
) -> ShardedTensor:
    """Shard a whole tensor over the ranks. Every rank calls it.

    Rank `src_rank` has the data, and sends each rank its part; other ranks may pass None. With `src_rank=None` every
    rank has the data, and nothing is sent.

    `spec` is the layout you want: a text in the notation ("tp: S(0)", "on dp=2,tp=2: R, S(0)", or a tensor as it is
    printed, "f32[6,4] on tp=2: S(0)"), a spec, a Layout, or a mesh and its placements: `shard(x, mesh, [Shard(0)])`.
    torch's DeviceMesh and placements work too. A DTensor is redistributed.

    The result is a copy on the same kind of device; use `from_local` to share memory with local tensors. Gradients flow
    back to the source only. If every rank computed the tensor from sharded ones, pass `src_rank=None`.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import GridSpec
    >>> def body(comm):
    ...     x = shard(torch.arange(4) if comm.rank == 1 else None, GridSpec([(1, 3)], [0, 1]), src_rank=1)
    ...     return x.local_tensor().tolist()
    >>> run_local(body, 2)
    [[0], [1, 2, 3]]
    """
    if src_rank is not None and not isinstance(src_rank, int) and (isinstance(spec, Mesh) or is_device_mesh(spec)):
        placements, src_rank = src_rank, 0
    comm = _comm_for(spec, comm)
    if is_device_mesh(spec) and src_rank == 0 and 0 not in comm.ranks:  # of a submesh: its first rank, as in torch
        src_rank = comm.ranks[0]
    if is_dtensor(tensor):
        return _shard_dtensor(tensor, spec, placements, comm)
    like = (tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, Tensor) else (None, None)
    spec, unread = _read_spec(spec, placements, comm, *like)
    given = _agree_on_source(tensor, spec, src_rank, comm, unread)
    shape, dtype = tuple(given["shape"]), getattr(torch, given["dtype"].removeprefix("torch."))
    dst = spec if isinstance(spec, Layout) else spec.layout(shape)
    held = (tensor,) if tensor is not None and src_rank in (None, comm.rank) else ()
    unheld, device = given["requires_grad"] and not held, _device_of_kind(given["device"], comm)
    anchor = torch.empty(0, dtype=dtype, device=device, requires_grad=True) if unheld else None
    src = replicated_layout(shape, comm.ranks) if src_rank is None else single_rank_layout(shape, src_rank)
    locals_, anchor = move_to(wrap(src, held, comm, dtype=dtype, device=device, anchor=anchor), dst, "shard")
    if src == dst:  # nothing moved; the result owns its memory in every layout
        locals_ = tuple(local.clone(memory_format=torch.contiguous_format) for local in locals_)
    return wrap(dst, locals_, comm, dtype=dtype, device=device, anchor=anchor)


def _device_of_kind(kind: str, comm: Comm) -> torch.device:
    """Where this rank has its part of a tensor that other ranks have on a device of this kind."""
    return comm.device if comm.device.type == kind else number_device(kind)


def _comm_for(spec: Any, comm: Any) -> Comm:
    """The comm that is passed, else that of a DeviceMesh, else the current one."""
    return comm_of_device_mesh(spec) if comm is None and is_device_mesh(spec) else resolve_comm(comm)


def _read_spec(
    spec: Any,
    placements: Any,
    comm: Comm,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Any, Exception | None]:
    """A mesh and placements, or a text, as a spec or a Layout, and why that is not possible; anything else as it is.

    A text that names a dtype and a shape has to name those of the tensor.
    """
    try:
        if isinstance(spec, Mesh) or is_device_mesh(spec):
            return mesh_spec_of(spec, placements), None
        if isinstance(spec, str) and placements is None:
            return read_spec(spec, None, comm.ranks, None if dtype is None else str(dtype), shape), None
    except (TypeError, ValueError) as error:
        return spec, error
    if placements is not None:
        return spec, TypeError(
            f"placements go with a mesh, and {spec!r} is not one; pass a mesh and placements, or a spec"
        )
    return spec, None


def _shard_dtensor(tensor: Any, spec: Any, placements: Any, comm: Comm) -> ShardedTensor:
    """A DTensor in another layout, if it is on ranks of the comm."""
    held: ShardedTensor | None = None
    problem: str | Exception | None = None
    try:
        held = from_dtensor(tensor, comm)
        problem = _outside_problem(held.sharding, comm)
    except ValueError as error:
        problem = error
    agree(comm, {}, label="shard", problem=problem)
    assert held is not None
    mesh_and_placements = (spec, placements) if placements is not None else (spec,)
    moved: ShardedTensor = held.redistribute(*mesh_and_placements, label="shard")
    return moved


def _agree_on_source(
    tensor: Any, spec: Any, src_rank: int | None, comm: Comm, problem: Exception | None = None
) -> dict[str, Any]:
    """What all ranks know of the tensor after one small exchange; raises on all of them if they do not agree."""
    own: dict[str, Any] = {"src_rank": str(src_rank), "has": tensor is not None}
    if isinstance(spec, Layout):
        own["rule"] = (digest := _digest_spec(spec.spec)) and f"{digest} {spec.shape}"
    else:
        own["rule"] = _digest_spec(spec) if isinstance(spec, ShardingSpec) else None
    if problem is None:
        problem = _argument_problem(tensor, spec, src_rank, comm)
    if problem is None and tensor is not None:
        own |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": tensor.device.type}
        own["requires_grad"] = tensor.requires_grad and torch.is_grad_enabled()
        own["spec"], problem = _check_layout_of(spec, tuple(tensor.shape), comm)
    own["problem"] = None if problem is None else [type(problem) is TypeError, str(problem)]
    everyone = gather_values(comm, own, label="shard")
    _check_sources(everyone, src_rank, comm, problem)
    source: dict[str, Any] = everyone[comm.ranks[0] if src_rank is None else src_rank]
    rules = {given["rule"] for given in everyone.values()}
    if not all(given["has"] for given in everyone.values()) and (None in rules or len(rules) > 1):
        laid_out, problem = _check_layout_of(spec, tuple(source["shape"]), comm)
        agree(comm, {"spec": laid_out}, label="shard", problem=problem)
    return source


def _argument_problem(tensor: Any, spec: Any, src_rank: int | None, comm: Comm) -> Exception | None:
    """Why this rank's arguments cannot be meant, before the shape is looked at."""
    if src_rank is not None and (isinstance(src_rank, bool) or not isinstance(src_rank, int)):
        got = f"{type(src_rank).__name__}: {src_rank!r}"
        return TypeError(f"src_rank is a rank, or None where every rank has the data; got {got}")
    if tensor is not None and not _is_plain_tensor(tensor):
        return TypeError(f"shard takes a whole tensor, got {type(tensor).__name__}{_advice_for(tensor)}")
    if tensor is not None and tensor.layout is not torch.strided:
        return LayoutError(f"shard takes a strided tensor, got one with {tensor.layout}; pass x.to_dense()")
    if not isinstance(spec, Layout | ShardingSpec):
        return TypeError(
            "shard takes a spec such as ChunkSpec(0, 4), a Layout, or a mesh and placements, got "
            f"{type(spec).__name__}: {spec!r}{_advice_for_spec(spec)}"
        )
    if src_rank is not None and src_rank not in comm.ranks:
        return LayoutError(f"src_rank {src_rank} is not in the comm ({name_ranks(comm.ranks)})")
    if tensor is None and src_rank in (None, comm.rank):
        return TypeError(f"this rank has the data (src_rank={src_rank}) but passes no tensor")
    return None


@lru_cache(maxsize=1024)
def _digest_spec(spec: ShardingSpec) -> str | None:
    """A digest of all that a spec says, the same on every rank; None for specs that cannot be written down.

    Ranks whose specs have the same one lay out a shape in the same way, or none of them can.
    """
    if type(spec) not in PLAIN_SPECS:
        return None
    return hashlib.blake2b(json.dumps(spec.to_json()).encode(), digest_size=16).hexdigest()


def _is_plain_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and not is_dtensor(value)


def _advice_for(value: object) -> str:
    if not isinstance(value, Tensor):
        return "; make a tensor of it first: torch.as_tensor(x)"
    if isinstance(value, ShardedTensor):
        return "; use its redistribute()"
    return "; it is laid out already: shard(x, spec) or compat.from_dtensor(x) converts it" if is_dtensor(value) else ""


def _check_layout_of(
    spec: Layout | ShardingSpec, shape: tuple[int, ...], comm: Comm
) -> tuple[str | None, Exception | None]:
    """The layout as text, and why the spec does not lay out this shape."""
    try:
        layout = spec if isinstance(spec, Layout) else spec.layout(shape)
    except ValueError as error:
        return None, error
    if layout.shape != shape:
        return None, LayoutError(f"a tensor of shape {shape} cannot take a layout of shape {layout.shape}")
    outside = _outside_problem(layout, comm)
    return (format_layout_text(layout), None) if outside is None else (None, LayoutError(outside))


def _advice_for_spec(spec: Any) -> str:
    listed = spec if isinstance(spec, list | tuple) else [spec]
    if listed and all(hasattr(p, "is_shard") for p in listed):
        return "; placements need a mesh: shard(x, Mesh.of(tp=4), (Shard(0),))"
    axes = [p for p in listed if isinstance(p, str)]
    if isinstance(spec, list | tuple) and axes and len(axes) + listed.count(None) == len(listed):  # as JAX has them
        written = ", ".join(f"S({listed.index(axis)})" for axis in axes)
        sizes = ",".join(f"{axis}=2" for axis in axes)
        return f"; here each axis of a mesh has a placement: shard(x, 'on {sizes}: {written}')"
    return ""


def _outside_problem(layout: Layout, comm: Comm) -> str | None:
    """Why a layout does not fit the ranks of a comm, or None."""
    outside = sorted(set(layout.ranks) - set(comm.ranks))
    if not outside:
        return None
    by = f"the mesh {layout.spec.mesh}" if isinstance(layout.spec, MeshSpec) else "the layout"
    return f"{by} names {name_ranks(outside)}, not in the comm ({name_ranks(comm.ranks)}); {advise_ranks(comm)}"


def _check_sources(
    everyone: dict[int, dict[str, Any]], src_rank: int | None, comm: Comm, own: Exception | None
) -> None:
    problems = {rank: given["problem"][1] for rank, given in everyone.items() if given["problem"]}
    has_data = {rank for rank, given in everyone.items() if given["has"]}
    if problems and set(problems) == has_data and len(set(problems.values())) == 1:  # the others pass None
        kind = TypeError if next(iter(everyone[rank]["problem"][0] for rank in problems)) else LayoutError
        others = kind(next(iter(problems.values())))
        raise print_once(label_error(own or others, "shard"), comm) from None
    if problems:
        raise_problems(problems, "shard", comm, own)
    for field in ("src_rank", "shape", "dtype", "spec", *(["requires_grad"] if src_rank is None else [])):
        values = {rank: str(given[field]) for rank, given in everyone.items() if given.get(field) is not None}
        if len(set(values.values())) > 1:
            found = fold_values(values)
            text = f"'shard': the ranks pass different {field}s: {found}; pass the same on every rank"
            raise print_once(DisagreementError(text), comm)


@overload
def from_local(
    local_tensors: Tensor | Sequence[Tensor],
    layout: Layout | ShardingSpec | str,
    *,
    shape: Sequence[int] | None = None,
    comm: GroupOrComm | None = None,
) -> ShardedTensor: ...
@overload
def from_local(
    local_tensors: Tensor | Sequence[Tensor],
    layout: ShardingSpec | str,
    shape: Sequence[int],
    /,
    *,
    comm: GroupOrComm | None = None,
) -> ShardedTensor: ...
@overload
def from_local(
    local_tensors: Tensor | Sequence[Tensor],
    layout: MeshLike,
    *,
    placements: PlacementsLike,
    shape: Sequence[int] | None = None,
    comm: GroupOrComm | None = None,
) -> ShardedTensor: ...
@overload
def from_local(
    local_tensors: Tensor | Sequence[Tensor],
    layout: MeshLike,
    placements: PlacementsLike,
    /,
    *,
    shape: Sequence[int] | None = None,
    comm: GroupOrComm | None = None,
) -> ShardedTensor: ...
def from_local(
    local_tensors: Tensor | Sequence[Tensor],
    layout: Any,
    *given: Any,
    shape: Sequence[int] | None = None,
    placements: Any = None,
    comm: Any = None,
) -> ShardedTensor:
    """Make a ShardedTensor of local tensors that exist already, without a copy. Gradients flow to them.

    - `from_local(locals, layout)`, or with a spec and the global shape: `from_local(locals, spec, shape)`.
    - `from_local(local, mesh, placements)`, as DTensor has it: the mesh and the placements may be torch's. Without
      `shape`, the global shape follows from the parts of all ranks, which along one axis may have different lengths.

    >>> from shardwise.geometry import ChunkSpec
    >>> from_local(torch.ones(2, 3), ChunkSpec(0, 1), (2, 3)).full().sum().item()
    6.0
    """
    comm = _comm_for(layout, comm)
    held, problem = _list_local_tensors(local_tensors)
    if isinstance(layout, Mesh) or is_device_mesh(layout):
        layout, shape, unread = _read_parts(held, layout, given[0] if given else placements, shape, comm)
        problem = problem or unread
    elif given:
        shape = given[0]
    unread = None
    if isinstance(layout, str):
        layout, unread = _read_spec(layout, None, comm, held[0].dtype if held else None, shape)
    where, unfit = _resolve_local_layout(layout, shape)
    problem = problem or unread or unfit or _local_problem(held, where, comm)
    asked: dict[str, Any] = {"layout": format_layout_text(where) if problem is None else None}
    agree(comm, asked, label="from_local", problem=problem)
    dtype, grad, device = _agree_on_kind(held, comm)
    anchor = None if held or not grad else torch.empty(0, dtype=dtype, device=device, requires_grad=True)
    return wrap(where, held, comm, dtype=dtype, device=device, anchor=anchor)


def _read_parts(
    held: Sequence[Tensor], mesh: Any, placements: Any, shape: Sequence[int] | None, comm: Comm
) -> tuple[Any, Sequence[int] | None, Exception | None]:
    """The spec and the global shape of parts on a mesh, and why there are none; the parts' shapes are gathered."""
    spec, problem = _read_spec(mesh, placements, comm)
    if shape is not None or problem is not None:
        return spec, shape, problem
    given = gather_values(comm, list(held[0].shape) if held else None, label="from_local")
    shapes = {rank: tuple(shape) for rank, shape in given.items() if shape is not None}
    try:
        return (*infer_from_parts(spec, shapes), None)
    except LayoutError as error:
        return spec, None, error


def _list_local_tensors(given: Any) -> tuple[tuple[Tensor, ...], Exception | None]:
    """The local tensors as a tuple, or what else was passed."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return (), TypeError(f"from_local takes a tensor or a list of tensors, got {type(given).__name__}")
    listed = (given,) if isinstance(given, Tensor) else tuple(given)
    wrong = next((each for each in listed if not _is_plain_tensor(each)), None)
    if wrong is None:
        return listed, None
    return (), TypeError(f"local tensors are plain tensors, got {type(wrong).__name__}{_advice_for(wrong)}")


def _agree_on_kind(held: Sequence[Tensor], comm: Comm) -> tuple[torch.dtype, bool, torch.device]:
    """The dtype of the local tensors of all ranks, whether they are on the tape, and where a rank without any has them.

    Raises unless dtype and tape are the same on all ranks that have some.
    """
    own = [str(held[0].dtype), str(any(t.requires_grad for t in held)), held[0].device.type] if held else None
    kinds = {rank: kind for rank, kind in gather_values(comm, own, label="from_local").items() if kind is not None}
    dtypes, grads = ({rank: kind[i] for rank, kind in kinds.items()} for i in (0, 1))
    devices = [kind[2] for kind in kinds.values()]
    if len(set(dtypes.values())) > 1:
        raise DisagreementError(
            f"'from_local': the ranks have different dtypes: {fold_values(dtypes)}; convert them first"
        )
    if len(set(grads.values())) > 1:
        raise DisagreementError(
            f"'from_local': requires_grad is {fold_values(grads)}; every rank takes part in the backward pass, "
            "so pass tensors of one kind"
        )
    dtype = next((getattr(torch, text.removeprefix("torch.")) for text in dtypes.values()), torch.get_default_dtype())
    return dtype, "True" in grads.values(), _device_of_kind(devices[0] if devices else comm.device.type, comm)


def _resolve_local_layout(
    layout: Layout | ShardingSpec, shape: Sequence[int] | None
) -> tuple[Layout, Exception | None]:
    if isinstance(layout, Layout):
        return layout, None
    try:
        if not isinstance(layout, ShardingSpec):
            raise TypeError(
                "from_local takes a Layout, a spec and a shape, or a mesh and placements, got "
                f"{type(layout).__name__}: {layout!r}"
            )
        if shape is None:
            raise LayoutError("from_local with a spec needs the global shape; pass shape=, or a Layout")
        return layout.layout(shape), None
    except (TypeError, ValueError) as error:
        return single_rank_layout((), 0), error


def _local_problem(held: Sequence[Tensor], layout: Layout, comm: Comm) -> Exception | None:
    problem = _outside_problem(layout, comm) or _misfit_of_locals(held, layout, comm)
    return None if problem is None else LayoutError(problem)


def _misfit_of_locals(held: Sequence[Tensor], layout: Layout, comm: Comm) -> str | None:
    shapes = layout.local_shapes(comm.rank)
    found = tuple(tuple(t.shape) for t in held)
    if found != shapes:
        return f"the layout assigns this rank local tensors of shapes {list(shapes)}, got {list(found)}"
    if len({(t.dtype, t.device) for t in held}) > 1:
        return f"local tensors have one dtype and device, got {sorted({f'{t.dtype} on {t.device}' for t in held})}"
    return None


@overload
def redistribute_many(
    tensors: Sequence[ShardedTensor],
    targets: Sequence[LayoutLike],
    *,
    async_op: Literal[False] = False,
    max_buffer_bytes: int | None = None,
) -> list[ShardedTensor]: ...
@overload
def redistribute_many(
    tensors: Sequence[ShardedTensor],
    targets: Sequence[LayoutLike],
    *,
    async_op: Literal[True],
    max_buffer_bytes: int | None = None,
) -> Handle[list[ShardedTensor]]: ...
@public
def redistribute_many(
    tensors: Sequence[ShardedTensor],
    targets: Sequence[Any],
    *,
    async_op: bool = False,
    max_buffer_bytes: int | None = None,
) -> Any:
    """Redistribute many tensors at once, with shared messages. Return the new tensors in order.

    With `async_op`, return a Handle whose `wait()` returns them. If gradients are recorded, tensors move one by one.

    >>> import shardwise
    >>> def body(comm):
    ...     rows, columns = shardwise.ChunkSpec(0, ranks=2), shardwise.ChunkSpec(1, ranks=2)
    ...     moved = redistribute_many([shardwise.ones(rows, 4, 6), shardwise.ones(rows, 2, 2)], [columns, columns])
    ...     return [tuple(x.local_tensor().shape) for x in moved]
    >>> shardwise.run_local(body, 2)[0]
    [(4, 3), (2, 1)]
    """
    label = "redistribute_many"
    lists: tuple[object, object] = tensors, targets
    if not all(isinstance(given, Sequence) for given in lists):
        kinds = f"{type(tensors).__name__} and {type(targets).__name__}"
        raise TypeError(f"{label} takes a list of tensors and a list of targets, got {kinds}; one is x.redistribute()")
    if not tensors and not targets:
        return Handle(None, lambda results: []) if async_op else []
    each: Sequence[object] = tensors
    plain = [type(t).__name__ for t in each if not isinstance(t, ShardedTensor)]
    if plain:
        raise TypeError(f"{label}: moves ShardedTensors, got {plain[0]}; make one with shard() or from_local()")
    if not tensors or any(t.comm is not tensors[0].comm for t in tensors):
        raise ValueError(f"{label}: needs tensors that share one comm; move those of other comms on their own")
    dsts, problem = _resolve_target_layouts(tensors, targets)
    moves = [
        f"{describe_tensor(t.dtype, t.sharding)} -> {format_layout_text(dst)}"
        for t, dst in zip(tensors, dsts, strict=False)
    ]
    asked = {"moves": moves, "max_buffer_bytes": max_buffer_bytes}

    def finish(results: Sequence[tuple[Tensor, ...]]) -> list[ShardedTensor]:
        return [t._like(dst, held) for t, dst, held in zip(tensors, dsts, results, strict=True)]

    if problem is None and not async_op:
        started = [find_move(t, dst, label, max_buffer_bytes) for t, dst in zip(tensors, dsts, strict=True)]
        if all(map(can_start_early, tensors, started)):
            return finish(start_on_request(tensors, started, make_request(asked), label, max_buffer_bytes).wait())
    agree(tensors[0].comm, asked, label=label, problem=problem)
    if not async_op and (is_dual_level() or any(is_move_recorded(t) for t in tensors)):
        return [t._like(dst, *move_to(t, dst, label, max_buffer_bytes)) for t, dst in zip(tensors, dsts, strict=True)]
    running = start_moving(tensors, dsts, label, max_buffer_bytes)
    return Handle(running, finish) if async_op else finish(running.wait())


def _resolve_target_layouts(
    tensors: Sequence[ShardedTensor], targets: Sequence[Any]
) -> tuple[list[Layout], str | Exception | None]:
    """The requested layouts, or why there are none."""
    if len(tensors) != len(targets):
        return [], TypeError(
            f"redistribute_many takes a target for each tensor, got {count_of(len(tensors), 'tensor')} and "
            f"{count_of(len(targets), 'target')}"
        )
    try:
        dsts = [target_layout(t.sharding, target, dtype=t.dtype) for t, target in zip(tensors, targets, strict=True)]
    except (TypeError, ValueError) as error:
        return [], error
    moves = [find_move(t, dst, "redistribute_many") for t, dst in zip(tensors, dsts, strict=True)]
    return dsts, "; ".join(move.problem for move in moves if move.problem is not None) or None


F = TypeVar("F", bound=Callable[..., ShardedTensor])


class CreationOptions(TypedDict, total=False):
    """What `empty` and the functions that fill an empty tensor take by keyword."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: GroupOrComm | None
    device: torch.device | str | None


class LikeOptions(TypedDict, total=False):
    """What `empty_like` and the functions that fill its result take by keyword."""

    dtype: torch.dtype | None
    device: torch.device | str | None
    requires_grad: bool
    pin_memory: bool


@public
def empty(
    sharding_spec: ShardingSpec | str,
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: GroupOrComm | None = None,
    device: torch.device | str | None = None,
) -> ShardedTensor:
    """Return a sharded tensor with uninitialized values, on the devices that the spec names, else on `device`.

    >>> from shardwise.geometry import ChunkSpec
    >>> empty(ChunkSpec(0, ranks=1), 3, 2, dtype=torch.int64).local_tensor().shape
    torch.Size([3, 2])
    """
    tensor = ShardedTensor(
        sharding_spec,
        *size,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        pin_memory=pin_memory and device is None,
        memory_format=memory_format,
        process_group=process_group,
    )
    if device is None:
        return tensor
    return _empty_on_device(tensor, torch.device(device), pin_memory)


def _empty_on_device(tensor: ShardedTensor, device: torch.device, pin_memory: bool = False) -> ShardedTensor:
    """An empty tensor like this one, on a device."""
    named = {d for d in tensor.sharding.table.devices or () if d is not None and torch.device(d) != device}
    if named:
        raise LayoutError(
            f"device={str(device)!r} was requested, and the spec {tensor.sharding.spec!r} places shards on "
            f"{sorted(named)}; omit one of them"
        )
    locals_ = allocate_locals(tensor.sharding, tensor.comm, tensor.dtype, device=device, pin_memory=pin_memory)
    made = wrap(tensor.sharding, locals_, tensor.comm, dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def takes_options_of(model: Callable[..., Any]) -> Callable[[F], F]:
    """Show the keywords of a function in the signature of one that passes them on."""

    def show(function: F) -> F:
        own = [p for p in signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        passed_on = [p for p in signature(model).parameters.values() if p.kind is p.KEYWORD_ONLY]
        positional = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        named = [p for p in own if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = signature(function).replace(  # type: ignore[attr-defined]  # as functools.wraps sets it
            parameters=[*positional, *passed_on, *named]
        )
        return function

    return show


@public
@takes_options_of(empty)
def full(
    sharding_spec: ShardingSpec | str,
    size: int | Sequence[int | Sequence[int]],
    fill_value: complex,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """Return a sharded tensor filled with `fill_value`. Takes the options of `empty`.

    >>> from shardwise.geometry import ChunkSpec
    >>> full(ChunkSpec(0, ranks=1), (2,), 7).local_tensor()
    tensor([7., 7.])
    """
    sizes = size if isinstance(size, Sequence) else (size,)
    tensor = empty(
        sharding_spec,
        *sizes,
        **options,
    )
    with torch.no_grad():
        return fill_with(tensor, fill_value)


@public
@takes_options_of(empty)
def zeros(
    sharding_spec: ShardingSpec | str,
    *size: int | Sequence[int],
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """Return a sharded tensor of zeros. Takes the options of `empty`.

    >>> from shardwise.geometry import ChunkSpec
    >>> zeros(ChunkSpec(0, ranks=1), 2).local_tensor()
    tensor([0., 0.])
    """
    return full(
        sharding_spec,
        size,
        0,
        **options,
    )


@public
@takes_options_of(empty)
def ones(
    sharding_spec: ShardingSpec | str,
    *size: int | Sequence[int],
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """Return a sharded tensor of ones. Takes the options of `empty`.

    >>> from shardwise.geometry import ChunkSpec
    >>> ones(ChunkSpec(0, ranks=1), 2, dtype=torch.int64).local_tensor()
    tensor([1, 1])
    """
    return full(
        sharding_spec,
        size,
        1,
        **options,
    )


@public
@takes_options_of(empty)
def rand(
    sharding_spec: ShardingSpec | str,
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    seed: int | None = None,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """Return uniform random numbers in [0, 1): the same values for every layout and number of ranks.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import ChunkSpec
    >>> def whole(comm, dim):
    ...     return rand(ChunkSpec(dim, ranks=comm.world_size), 4, 6, seed=3).full()
    >>> torch.equal(run_local(whole, 3, 0)[0], run_local(whole, 2, 1)[0])
    True
    """
    tensor = empty(
        sharding_spec,
        *size,
        **options,
    )
    return _draw_values("rand", tensor, lambda: uniform(0, 1, tensor.dtype), generator, seed)


@public
@takes_options_of(empty)
def randn(
    sharding_spec: ShardingSpec | str,
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    seed: int | None = None,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """Return normal random numbers (mean 0, variance 1): the same values for every layout and number of ranks.

    >>> from shardwise.geometry import ChunkSpec
    >>> values = randn(ChunkSpec(0, ranks=1), 10000, seed=3).local_tensor()
    >>> round(values.std().item(), 1)
    1.0
    """
    tensor = empty(
        sharding_spec,
        *size,
        **options,
    )
    return _draw_values("randn", tensor, lambda: normal(0, 1, tensor.dtype), generator, seed)


def _draw_values(
    label: str,
    tensor: ShardedTensor,
    values: Callable[[], Distribution],
    generator: torch.Generator | None,
    seed: int | None,
) -> ShardedTensor:
    with torch.no_grad():
        return draw_into(tensor, values, label=label, generator=generator, seed=seed)


@public
def empty_like(
    tensor: ShardedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> ShardedTensor:
    """Return an uninitialized tensor in the layout of `tensor`.

    >>> from shardwise.geometry import ChunkSpec
    >>> empty_like(ones(ChunkSpec(0, ranks=1), 2), dtype=torch.int8).dtype
    torch.int8
    """
    dtype, place = dtype or tensor.dtype, torch.device(device) if device is not None else tensor.device
    locals_ = tuple(
        torch.empty(t.shape, dtype=dtype, device=t.device if device is None else place, pin_memory=pin_memory)
        for t in tensor.local_parts
    )
    made = wrap(tensor.sharding, locals_, tensor.comm, dtype=dtype, device=place)
    return made.requires_grad_(requires_grad)


@public
def full_like(tensor: ShardedTensor, fill_value: complex, **options: Unpack[LikeOptions]) -> ShardedTensor:
    """Return a tensor in the layout of `tensor`, filled with `fill_value`. Takes the options of `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> full_like(ones(ChunkSpec(0, ranks=1), 2), 5).local_tensor()
    tensor([5., 5.])
    """
    with torch.no_grad():
        return fill_with(empty_like(tensor, **options), fill_value)


@public
def zeros_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    """Return zeros in the layout of `tensor`. Takes the options of `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> zeros_like(ones(ChunkSpec(0, ranks=1), 2)).local_tensor()
    tensor([0., 0.])
    """
    return full_like(tensor, 0, **options)


@public
def ones_like(tensor: ShardedTensor, **options: Unpack[LikeOptions]) -> ShardedTensor:
    """Return ones in the layout of `tensor`. Takes the options of `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> ones_like(zeros(ChunkSpec(0, ranks=1), 2)).local_tensor()
    tensor([1., 1.])
    """
    return full_like(tensor, 1, **options)


@public
def rand_like(
    tensor: ShardedTensor,
    *,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    **options: Unpack[LikeOptions],
) -> ShardedTensor:
    """Return uniform random numbers in the layout of `tensor`. Takes the options of `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> x = zeros(ChunkSpec(0, ranks=1), 2)
    >>> torch.equal(rand_like(x, seed=1).local_tensor(), rand(ChunkSpec(0, ranks=1), 2, seed=1).local_tensor())
    True
    """
    made = empty_like(tensor, **options)
    return _draw_values("rand_like", made, lambda: uniform(0, 1, made.dtype), generator, seed)


@public
def randn_like(
    tensor: ShardedTensor,
    *,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    **options: Unpack[LikeOptions],
) -> ShardedTensor:
    """Return normal random numbers in the layout of `tensor`. Takes the options of `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> x = zeros(ChunkSpec(0, ranks=1), 2)
    >>> torch.equal(randn_like(x, seed=1).local_tensor(), randn(ChunkSpec(0, ranks=1), 2, seed=1).local_tensor())
    True
    """
    made = empty_like(tensor, **options)
    return _draw_values("randn_like", made, lambda: normal(0, 1, made.dtype), generator, seed)


_LIKE: dict[Callable[..., Any], Callable[..., ShardedTensor]] = {
    torch.empty_like: empty_like,
    torch.zeros_like: zeros_like,
    torch.ones_like: ones_like,
    torch.full_like: full_like,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
}


def _register_like_function(function: Callable[..., Any], native: Callable[..., ShardedTensor]) -> None:
    """Let torch's function answer with ours; memory is always contiguous and strided.

    One value everywhere has no pending form: such tensors are made by the operator, which replicates them.
    """

    @register_function(function)
    def like(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        if function in (torch.ones_like, torch.full_like) and next(sharded_leaves(args, kwargs)).sharding.pending:
            return NotImplemented
        named = {"tensor" if name == "input" else name: value for name, value in kwargs.items()}
        return native(*args, **{name: v for name, v in named.items() if name not in ("layout", "memory_format")})


for _function, _native in _LIKE.items():
    _register_like_function(_function, _native)
