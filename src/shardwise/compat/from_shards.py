"""What tensor do these local shards make? The layout that they form together, found by one small exchange.

1. Each rank checks its own shards and packs what it knows into a few numbers: size, dtype, flags, offsets and sizes. A
   rank with a mistake sends its text instead.
2. All ranks read what all said, so each one finds the same layout, or raises the same error.

The functions at the end wrap the parts found as tensors of any class.

Which comm does a process group mean on a rank that is not one of its members?

`torch.distributed.new_group` gives such a rank a stand-in for the group. Tensors on it have no local shards there, only
metadata, and nothing can be sent. The native functions refuse the stand-in; torch's ShardedTensor takes it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import Comm, agree, default_comm, fold_texts, gather_raw, name_ranks
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.comm.stand_in import StandInComm
from shardwise.compat.specs import (
    check_no_overlap,
    check_tiles,
    flatten_size,
    global_metadata,
    infer_sharding_spec,
    metadata_from_local_shards,
    rank_of,
)
from shardwise.geometry import Layout, ShardingSpec
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.shards import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties

_HEAD = struct.Struct("<BBBHIH")
_PROBLEM, _SHARDS, _NOTHING = 0, 1, 2


@dataclass(frozen=True, slots=True)
class TensorParts:
    """What a ShardedTensor is wrapped from."""

    layout: Layout
    locals: tuple[Tensor, ...]
    dtype: torch.dtype
    shards: list[Shard] | None = None


def pack_metadata(metadata: ShardedTensorMetadata) -> bytes:
    """A rank's shards as bytes.

    >>> properties = TensorProperties(dtype=torch.int32)
    >>> shards = [ShardMetadata([4], [2], "rank:1/cpu")]
    >>> packed = pack_metadata(ShardedTensorMetadata(shards, torch.Size([6]), properties))
    >>> unpack_metadata(packed).shards_metadata, len(packed)
    ([ShardMetadata(shard_offsets=[4], shard_sizes=[2], placement=rank:1/cpu)], 59)
    """
    shards, properties = metadata.shards_metadata, metadata.tensor_properties
    places = list(dict.fromkeys(str(shard.placement) for shard in shards))
    texts = "\n".join([str(properties.dtype).removeprefix("torch."), *places]).encode()
    rows = [[*s.shard_offsets, *s.shard_sizes, places.index(str(s.placement))] for s in shards]
    head = _HEAD.pack(
        _SHARDS, properties.requires_grad, properties.pin_memory, len(metadata.size), len(shards), len(texts)
    )
    return head + texts + np.array([*metadata.size, *(n for row in rows for n in row)], "<i8").tobytes()


def unpack_metadata(data: bytes) -> ShardedTensorMetadata:
    """The shards that `pack_metadata` wrote."""
    _, requires_grad, pin_memory, ndim, count, length = _HEAD.unpack_from(data)
    dtype, *places = data[_HEAD.size : _HEAD.size + length].decode().split("\n")
    numbers = np.frombuffer(data, "<i8", offset=_HEAD.size + length)
    rows = numbers[ndim:].reshape(count, -1).tolist()
    width = (len(rows[0]) - 1) // 2 if rows else ndim
    properties = TensorProperties(
        dtype=getattr(torch, dtype), requires_grad=bool(requires_grad), pin_memory=bool(pin_memory)
    )
    shards = [ShardMetadata(row[:width], row[width:-1], places[row[-1]]) for row in rows]
    return ShardedTensorMetadata(shards, torch.Size(numbers[:ndim].tolist()), properties)


def gather_parts_from_shards(local_shards: Sequence[Shard], global_size: Sequence[Any], comm: Comm) -> TensorParts:
    """Find the tensor that all ranks' shards make; a size of None is found from the shards, stacked along dim 0."""
    stacked = any(dim is None for dim in global_size)
    packed = gather_raw(comm, _pack_own_shards(local_shards, global_size, comm), label="init_from_local_shards")
    _raise_problems(packed)
    whole = global_metadata(
        [unpack_metadata(data) if data[0] == _SHARDS else None for data in packed.values()], stacked
    )
    if stacked:
        _check_one_each(whole, comm)
        local_shards[0].metadata = whole.shards_metadata[comm.ranks.index(comm.rank)]
    layout = infer_sharding_spec(whole.shards_metadata).layout(whole.size)
    kept = local_shards if isinstance(local_shards, list) else list(local_shards)
    return TensorParts(layout, _sort_locals(kept, layout, comm.rank), whole.tensor_properties.dtype, kept)


def _pack_own_shards(local_shards: Sequence[Shard], global_size: Sequence[Any], comm: Comm) -> bytes:
    """What this rank knows, or what is wrong with it."""
    try:
        size = flatten_size([0 if dim is None else dim for dim in global_size])
        _check_shard_types(local_shards)
        if not local_shards:
            return bytes([_NOTHING])
        for shard in local_shards:
            _check_ndim(shard, size)
        return pack_metadata(metadata_from_local_shards(local_shards, size, comm.rank, comm.process_group))
    except (ValueError, TypeError, RuntimeError) as error:
        return bytes([_PROBLEM]) + f"{type(error).__name__}\n{error}".encode()


def _check_shard_types(local_shards: object) -> None:
    if isinstance(local_shards, str | bytes) or not isinstance(local_shards, Sequence):
        raise TypeError(f"local_shards is a list of Shards, got {type(local_shards).__name__}")
    wrong = [s for s in local_shards if not (hasattr(s, "tensor") and hasattr(s, "metadata"))]
    if wrong:
        raise TypeError(f"local_shards is a list of Shards, got one of {type(wrong[0]).__name__}")


def _check_ndim(shard: Shard, size: torch.Size) -> None:
    if not isinstance(shard, Shard):
        raise TypeError(f"local_shards is a list of Shard, found {type(shard).__name__} in it")
    if len(shard.metadata.shard_offsets) != len(size):
        raise ValueError(
            f"Rank of tensor is {len(size)}, but shards rank is {len(shard.metadata.shard_offsets)}: "
            f"{shard.metadata} of a tensor of size {list(size)}"
        )


def _raise_problems(packed: Mapping[int, bytes]) -> None:
    """Raise what the ranks found wrong, on all of them, as the first of them found it."""
    wrong = [(rank, data[1:].decode()) for rank, data in packed.items() if data[0] == _PROBLEM]
    if not wrong:
        return
    kinds = {"TypeError": TypeError, "RuntimeError": RuntimeError}
    kind = wrong[0][1].partition("\n")[0]
    raise kinds.get(kind, ValueError)(fold_texts({rank: text.partition("\n")[2] for rank, text in wrong}))


def _check_one_each(whole: ShardedTensorMetadata, comm: Comm) -> None:
    ranks = sorted(rank_of(shard.placement) for shard in whole.shards_metadata)
    if ranks != sorted(comm.ranks):
        raise ValueError(
            f"a global size with None is inferred from exactly one shard on each of the {name_ranks(comm.ranks)}; "
            f"the shards are on {name_ranks(ranks)}"
        )


def build_parts_from_metadata(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, comm: Comm, spec: ShardingSpec | None = None
) -> TensorParts:
    """The tensor that this metadata describes, which every rank passes alike: only this rank's shards are checked."""
    _check_number_of_shards(local_shards, metadata, comm)
    layout = _check_metadata(metadata, spec)
    for shard in local_shards:
        _check_against(shard, metadata.tensor_properties, comm.rank)
    return TensorParts(layout, _sort_locals(local_shards, layout, comm.rank), metadata.tensor_properties.dtype)


def build_parts_of_any_rank(
    local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, spec: ShardingSpec | None = None
) -> TensorParts:
    """The same for shards of any ranks' placements, which one process holds."""
    layout = _check_metadata(metadata, spec)
    locals_ = tuple(shard.tensor for shard in local_shards)
    return TensorParts(layout, locals_, metadata.tensor_properties.dtype)


def _check_metadata(metadata: ShardedTensorMetadata, spec: ShardingSpec | None) -> Layout:
    if not metadata.shards_metadata:
        raise ValueError("shards_metadata must not be empty!")
    if metadata.tensor_properties.layout != torch.strided:
        raise ValueError("Only torch.strided layout is currently supported")
    check_no_overlap(metadata.shards_metadata)
    check_tiles(metadata.shards_metadata, metadata.size)
    return (infer_sharding_spec(metadata.shards_metadata) if spec is None else spec).layout(metadata.size)


def _check_number_of_shards(local_shards: Sequence[Shard], metadata: ShardedTensorMetadata, comm: Comm) -> None:
    own = [shard for shard in metadata.shards_metadata if rank_of(shard.placement) == comm.rank]
    if len(local_shards) != len(own):
        raise RuntimeError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
            f"sharded_tensor_metadata ({len(own)}) on rank ({comm.rank}) "
        )


def _check_against(shard: Shard, properties: TensorProperties, rank: int) -> None:
    assert shard.metadata.placement is not None, "Must specify placement for `Shard`!"
    _raise_mismatch("tensor property", "layout", properties.layout, shard.tensor.layout, rank)
    if not shard.tensor.is_contiguous():
        raise ValueError("Only torch.contiguous_format memory_format is currently supported")
    described = (shard.metadata.shard_sizes, shard.metadata.placement.device())
    for name, expected, actual in zip(
        ("size", "device"), described, (list(shard.tensor.size()), shard.tensor.device), strict=True
    ):
        _raise_mismatch("local ShardMetadata", name, expected, actual, rank)
    for name in ("pin_memory", "dtype", "requires_grad"):
        actual = getattr(TensorProperties.create_from_tensor(shard.tensor), name)
        _raise_mismatch("tensor property", name, getattr(properties, name), actual, rank)


def _raise_mismatch(source: str, name: str, expected: object, actual: object, rank: int) -> None:
    if expected != actual:
        raise ValueError(
            f"Local shards' tensor {name} property is incompatible with {source} on rank {rank}: {source} "
            f"{name}={expected}, local shard tensor {name}={actual}."
        )


def _sort_locals(local_shards: Sequence[Shard], layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """The local tensors in the order in which a layout numbers them."""
    order = find_shard_order(local_shards, layout, rank)
    if order is None:
        asked = [(list(p.box.offsets), list(p.box.sizes)) for p in layout.pieces_of(rank)]
        held = [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in local_shards]
        raise ValueError(
            f"the sharding spec assigns rank {rank} the shards with offsets and sizes {asked}, and its local shards "
            f"are {held}; pass a spec and shards that agree"
        )
    return tuple(local_shards[index].tensor for index in order)


def find_shard_order(local_shards: Sequence[Shard], layout: Layout, rank: int) -> tuple[int, ...] | None:
    """Which of a rank's shards holds each piece that a layout assigns to it; None if they are not those pieces.

    >>> from shardwise.geometry import ChunkSpec
    >>> shards = [Shard.from_tensor_and_offsets(torch.zeros(2), [start], rank=0) for start in (2, 0)]
    >>> find_shard_order(shards, ChunkSpec(0, ranks=[0, 0]).layout((4,)), rank=0)
    (1, 0)
    """
    left, order = list(range(len(local_shards))), []
    for piece in layout.pieces_of(rank):
        offsets, sizes = list(piece.box.offsets), list(piece.box.sizes)
        held = ((index, local_shards[index].metadata) for index in left)
        found = [i for i, m in held if m.shard_sizes == sizes and (0 in sizes or m.shard_offsets == offsets)][:1]
        if not found:
            return None
        left.remove(found[0])
        order += found
    return None if left else tuple(order)


def agree_on_parts_of_tensor(
    local_tensor: Tensor, spec: ShardingSpec, global_size: Sequence[Any], comm: Comm
) -> TensorParts:
    """The tensor of this spec and size of which every rank holds one local tensor; all ranks agree on it first."""
    layout, problem = None, None
    try:
        layout = spec.layout(flatten_size(global_size))
        problem = _tensor_problem(local_tensor, layout, comm)
    except (ValueError, TypeError) as error:
        problem = str(error)
    fields = {
        "layout": None if layout is None else format_layout_text(layout),
        "dtype": local_tensor.dtype,
        "requires_grad": local_tensor.requires_grad,
    }
    agree(comm, fields, label="init_from_local_tensor", problem=problem)
    assert layout is not None
    locals_ = (local_tensor,) if layout.local_shapes(comm.rank) else ()
    return TensorParts(layout, locals_, local_tensor.dtype)


def _tensor_problem(tensor: Tensor, layout: Layout, comm: Comm) -> str | None:
    shapes = layout.local_shapes(comm.rank)
    outside = sorted(set(layout.ranks) - set(comm.ranks))
    if outside:
        return f"Global rank {outside[0]} does not exist in input process group: it has {name_ranks(comm.ranks)}"
    if not tensor.is_contiguous():
        return "local_tensor is not a contiguous Tensor."
    if len(shapes) > 1:
        return f"the spec assigns this rank {len(shapes)} local tensors; use init_from_local_shards or from_local"
    if shapes and tuple(tensor.shape) != shapes[0]:
        return (
            "Shard tensor size does not match with metadata.shard_lengths! "
            f"Found shard tensor size: {list(tensor.shape)}, metadata.shard_lengths: {list(shapes[0])}"
        )
    named = layout.pieces_of(comm.rank)[0].device if shapes else None
    if named is not None and torch.device(named) != tensor.device:
        return (
            "Local shard tensor device does not match with local Shard's placement! Found local shard tensor device: "
            f"{tensor.device}, local shard metadata placement device: {named}"
        )
    return None


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: GroupOrComm | None = None
) -> ShardedTensor:
    """The tensor that all ranks' local shards make together; the ranks exchange theirs in one small message.

    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     own = Shard.from_tensor_and_offsets(torch.full((2,), comm.rank), [2 * comm.rank], comm.rank)
    ...     return init_from_local_shards([own], 4).full().tolist()
    >>> run_local(body, 2)
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    comm = resolve_comm(process_group)
    return _wrap_parts(gather_parts_from_shards(local_shards, global_size, comm), comm)


def init_from_local_shards_and_global_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: GroupOrComm | None = None,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """The tensor that the metadata describes, the same on every rank; nothing is sent.

    >>> own = Shard.from_tensor_and_offsets(torch.zeros(2), [0], rank=0)
    >>> init_from_local_shards_and_global_metadata([own], ShardedTensorMetadata([own.metadata], torch.Size([2]))).shape
    torch.Size([2])
    """
    comm = resolve_comm(process_group)
    return _wrap_parts(build_parts_from_metadata(local_shards, sharded_tensor_metadata, comm, sharding_spec), comm)


def init_from_local_tensor(
    local_tensor: Tensor, sharding_spec: ShardingSpec, *global_size: Any, process_group: GroupOrComm | None = None
) -> ShardedTensor:
    """The tensor of this spec and size of which each rank holds one local tensor.

    >>> from shardwise.geometry import ChunkSpec
    >>> init_from_local_tensor(torch.zeros(2, 3), ChunkSpec(0, ranks=1), [2, 3]).shape
    torch.Size([2, 3])
    """
    comm = resolve_comm(process_group)
    return _wrap_parts(agree_on_parts_of_tensor(local_tensor, sharding_spec, global_size, comm), comm)


def _wrap_parts(parts: TensorParts, comm: Comm) -> ShardedTensor:
    return wrap(parts.layout, parts.locals, comm, dtype=parts.dtype)


def outside_comm(
    rank: int, device: torch.device, timeout: float, process_group: Any = dist.GroupMember.NON_GROUP_MEMBER
) -> Comm:
    """The comm of a rank in a group that it is not a member of, without ranks: whatever would communicate raises.

    >>> outside_comm(3, torch.device("cpu"), 1.0).barrier(label="save")
    Traceback (most recent call last):
    ...
    RuntimeError: 'save': rank 3 is not a member of the tensor's process group; call this only on its members
    """

    def refuse(label: str) -> Exception:
        return RuntimeError(
            f"'{label}': rank {rank} is not a member of the tensor's process group; call this only on its members"
        )

    return StandInComm(rank, (), device, refuse=refuse, timeout=timeout, process_group=process_group)


def resolve_group(process_group: GroupOrComm | None = None) -> Comm:
    """Return the comm of a group, also of one that this rank is not a member of; without one, the default comm.

    `load_with_process_group` is for tensors that are unpickled: new ones inside its block are on the default group.

    >>> resolve_group().ranks
    (0,)
    """
    if process_group is None:
        return default_comm()
    group: object = process_group
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        return resolve_comm(process_group)
    around = default_comm()
    return outside_comm(around.rank, around.device, around.timeout)
