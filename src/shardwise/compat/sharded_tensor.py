"""torch's ShardedTensor: the native one, with torch's meaning where the two differ.

1. The local shards and the metadata are objects that programs read, change and assign: the local tensors are those of
   the shards, whatever is done to the list.
2. Functions that torch defines for each shard (random values, comparisons, lookups of plain ids) do so here;
   `functions.py` lists them. All others are the native ones, and give tensors of this class.
3. A tensor may belong to a group that this rank is not a member of, or to none.

All that is *torch's meaning* is in this package: the native class knows nothing of it.

Remote references to the shards that other ranks hold (`init_rrefs=True`), over torch.distributed.rpc.

1. A tensor gets a number, and a weak reference to it is kept under that number.
2. All ranks of the world exchange their RPC rank and the tensor's number. Every rank sees what every
   other said, so a mistake on one is raised on all of them, before anything is sent by RPC.
3. Each rank sends references to its local shards to the others, which find their tensor by its number.
4. All wait until all are done.

Sharded tensors in state dicts: those that are plain attributes of a module, and torch's state of one tensor.

Parameters and buffers need no hook. For other attributes:

    module._register_state_dict_hook(state_dict_hook)
    module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)

Registered on a root module or on any module below it, a hook covers that module and all below.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from shardwise._torch import _remote_device, pytree
from shardwise.comm import Comm, default_comm, gather_values, name_ranks
from shardwise.comm.current import GroupOrComm, group_of
from shardwise.compat.custom_ops import (
    ask_custom_ops,
    call_torch_meaning,
    set_tensor_type,
    takes_plain_as_replicated,
)
from shardwise.compat.from_shards import (
    TensorParts,
    agree_on_parts_of_tensor,
    build_parts_from_metadata,
    build_parts_of_any_rank,
    find_shard_order,
    gather_parts_from_shards,
    outside_comm,
    resolve_group,
)
from shardwise.compat.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    PlacementShardingSpec,
    check_gather_output,
    flatten_size,
    rank_of,
)
from shardwise.geometry import Box, Layout, ShardingSpec
from shardwise.geometry.layout import rebuild_layout
from shardwise.ops.implicit_replication import plain_as_replicated
from shardwise.tensor import pickling
from shardwise.tensor.execute import view_box
from shardwise.tensor.pickling import ProcessGroupState, comm_to_load_on
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.shards import (
    MEM_FORMAT_ENCODING,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    describe_layout,
    make_local_shards,
)

_NO_RPC = -1
_numbers = itertools.count()
_sharded_tensor_map: dict[int, weakref.ref[TorchShardedTensor]] = {}


def register_rrefs(tensor: TorchShardedTensor) -> None:
    """Give every rank of a tensor references to the others' shards.

    All ranks of the world call it together, after `torch.distributed.rpc.init_rpc`; those outside of the tensor's
    process group get references too.
    """
    number = next(_numbers)
    tensor._sharded_tensor_id = number
    _sharded_tensor_map[number] = weakref.ref(tensor, partial(_forget_number, number))
    try:
        exchange_rrefs(tensor)
    except BaseException:
        _forget_number(number)
        raise


def forget_rrefs(tensor: TorchShardedTensor) -> None:
    """Let references to a tensor's number go; a tensor that is collected is forgotten without this."""
    if tensor._sharded_tensor_id is not None:
        _forget_number(tensor._sharded_tensor_id)


def exchange_rrefs(tensor: TorchShardedTensor) -> None:
    """Send references to this rank's shards to the other ranks of the world and receive theirs."""
    assert tensor._sharded_tensor_id is not None, "a tensor is numbered before its references are sent"
    comm = default_comm()  # also ranks outside of the tensor's group hold references
    tensor._remote_shards.clear()
    outside = not tensor.comm.ranks
    numbers = _exchange_numbers(comm, tensor._sharded_tensor_id, tensor.comm.ranks, outside)
    shards = tensor.local_shards()
    sent = []
    for rank, number in numbers.items():
        if rank != comm.rank and shards:
            references = [rpc.RRef(shard) for shard in shards]
            sent.append(rpc.rpc_async(rank, register_remote_shards, args=(number, references, comm.rank)))
    torch.futures.wait_all(sent)
    comm.barrier(label="init_rrefs: all references have arrived")


def register_remote_shards(sharded_tensor_id: int, rrefs: list[Any], rpc_rank: int) -> None:
    """Keep the references that another rank sent; RPC calls this on the rank that receives them."""
    reference = _sharded_tensor_map.get(sharded_tensor_id)
    if reference is None:
        raise RuntimeError(
            f"Could not find sharded_tensor_id: {sharded_tensor_id} in map: {sorted(_sharded_tensor_map)}; "
            "the tensor no longer exists on the rank that was sent references"
        )
    tensor = reference()
    if tensor is None:
        raise RuntimeError(f"ShardedTensor weakref has been deallocated: number {sharded_tensor_id}")
    tensor._remote_shards[rpc_rank] = rrefs


def remote_shards(tensor: TorchShardedTensor) -> dict[int, list[Any]]:
    """Return the references to the shards of the other ranks, by RPC rank."""
    if not tensor._init_rrefs:
        raise RuntimeError(
            "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available; "
            "create it with init_rrefs=True after torch.distributed.rpc.init_rpc"
        )
    return tensor._remote_shards


def _forget_number(number: int, reference: object = None) -> None:
    _sharded_tensor_map.pop(number, None)


def _exchange_numbers(comm: Comm, number: int, members: tuple[int, ...], outside: bool) -> dict[int, int]:
    """Return the number for the tensor of each rank in its group or outside of every group, or raise on all ranks."""
    said = gather_values(comm, [_rpc_rank(), number, outside], label="init_rrefs: numbers of the tensor")
    without = [rank for rank, (rpc_rank, _, _) in said.items() if rpc_rank == _NO_RPC]
    if without:
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if init_rrefs is set to True; "
            f"it is not on {name_ranks(without)}"
        )
    if comm.process_group is None and comm.world_size > 1:
        raise RuntimeError("init_rrefs=True needs ranks that are processes; those of run_local are threads of one")
    for rank, (rpc_rank, _, _) in said.items():
        if rank != rpc_rank:
            raise ValueError(
                "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process group rank: "
                f"{rank} and RPC rank: {rpc_rank}; pass init_rpc the rank of init_process_group"
            )
    return {rank: theirs for rank, (_, theirs, is_outside) in said.items() if rank in members or is_outside}


def _rpc_rank() -> int:
    try:
        return int(rpc.get_worker_info().id)
    except RuntimeError:
        return _NO_RPC


TorchState: TypeAlias = tuple[list[Shard], ShardedTensorMetadata, ProcessGroupState, ShardingSpec, bool]


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add the attributes that are sharded tensors, of a module and all below it, to its state dict.

    >>> from shardwise.geometry import ChunkSpec
    >>> module = nn.Module()
    >>> module.table = ShardedTensor(ChunkSpec(0, ranks=1), 4, 2)
    >>> handle = module._register_state_dict_hook(state_dict_hook)
    >>> list(module.state_dict())
    ['table']
    """
    for owner, name, key in _plain_attributes(module, prefix):
        value = owner.__dict__[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set attributes of a module and all below it to the sharded tensors that a state dict holds for them.

    What was set is taken out of `state_dict` (`load_state_dict` hands over a copy), since a strict load would find it
    unexpected: it is neither parameter nor buffer.

    >>> from shardwise.geometry import ChunkSpec
    >>> module = nn.Module()
    >>> module.table = None
    >>> handle = module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)
    >>> table = ShardedTensor(ChunkSpec(0, ranks=1), 4, 2)
    >>> module.load_state_dict({"table": table})
    <All keys matched successfully>
    >>> module.table is table
    True
    """
    for owner, name, key in list(_plain_attributes(module, prefix)):
        if isinstance(value := state_dict.get(key), ShardedTensor):
            setattr(owner, name, value)
            if name in owner.__dict__:
                del state_dict[key]


def _plain_attributes(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Every plain attribute of a module and those below it: its owner, its name, and its key in a state dict.

    A module that is registered in several places has a key for each, as its parameters have.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}{path}." if path else prefix
        for name in owner.__dict__:
            yield owner, name, start + name


def get_state(tensor: TorchShardedTensor) -> TorchState:
    """Return torch's state of a tensor: shards, metadata, group, spec, and whether it has remote references."""
    group = ProcessGroupState.of(tensor.comm)
    return tensor.local_shards(), tensor.metadata(), group, tensor.sharding_spec(), tensor._init_rrefs


def set_state(tensor: TorchShardedTensor, state: TorchState) -> None:
    """Give a tensor of the same size and dtype torch's state, on the process group of the moment.

    A file that torch's own class wrote is read in this way: pickle makes a tensor that has nothing yet.
    """
    shards, metadata, group, spec, init_rrefs = state
    comm = comm_to_load_on(type(tensor), group)
    if hasattr(tensor, "sharding"):
        _check_same_kind(tensor, metadata)
    layout = spec.layout(metadata.size)
    for name in ("_shards", "_shard_order"):
        tensor.__dict__.pop(name, None)
    tensor.sharding, tensor.comm, tensor._anchor, tensor._fingerprint = layout, comm, None, None
    tensor.local_parts = _locals_of(shards, layout, comm.rank)
    tensor._metadata, tensor._sharding_spec = metadata, spec
    if len(shards) == len(tensor.local_parts):
        tensor._local_shards = shards
    tensor.requires_grad_(metadata.tensor_properties.requires_grad)
    tensor._with_rrefs(init_rrefs)


def _check_same_kind(tensor: TorchShardedTensor, metadata: ShardedTensorMetadata) -> None:
    have, given = (tuple(tensor.shape), tensor.dtype), (tuple(metadata.size), metadata.tensor_properties.dtype)
    if have != given:
        raise ValueError(
            f"a ShardedTensor of shape {have[0]} and {have[1]} cannot take a state of shape {given[0]} and {given[1]}; "
            "make a tensor of the state's shape and dtype, or use pickle, which does"
        )


def _locals_of(shards: list[Shard], layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """The local tensors that shards, one for each piece, are parts of."""
    shapes, table = layout.local_shapes(rank), layout.table.take(layout.rows_of(rank))
    if len(table) != len(shards):
        raise ValueError(f"rank {rank} holds {len(table)} pieces of {layout}; the state has {len(shards)} shards")
    if len(shapes) == len(shards):
        return tuple(shard.tensor for shard in shards)
    whole = [shards[0].tensor.detach().new_empty(shape) for shape in shapes]
    for shard, slot, start in zip(shards, table.slots.tolist(), table.local_offsets.tolist(), strict=True):
        view_box(whole[slot], Box(tuple(start), tuple(shard.tensor.shape))).copy_(shard.tensor.detach())
    return tuple(whole)


_PARTS: Any = ShardedTensor.__dict__["local_parts"]  # the slot, which the property below covers


class TorchShardedTensorBase(ShardedTensor):
    """torch's `ShardedTensorBase`: shards and metadata, which need no process group.

    The shards may be of several ranks' placements: one process that assembles all of a tensor.
    """

    ProcessGroupState = pickling.ProcessGroupState

    @staticmethod
    def __new__(
        cls: type[TorchShardedTensorBase],
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        pin_memory: bool = False,
        requires_grad: bool = False,
    ) -> TorchShardedTensorBase:
        """Metadata without shards, which are assigned to `_local_shards`."""
        where = sharding_spec.layout(flatten_size(size))
        tensor: Any = wrap(where, (), _no_comm(), dtype=dtype or torch.get_default_dtype(), cls=cls)
        properties = TensorProperties(tensor.dtype, layout, requires_grad, pin_memory=pin_memory)
        tensor._metadata, tensor._local_shards = describe_layout(where, properties), []
        made: TorchShardedTensorBase = tensor
        return made

    @property
    def local_parts(self) -> tuple[Tensor, ...]:
        """This rank's local tensors: those of the local shards, once these were read or assigned."""
        shards: list[Shard] | None = self.__dict__.get("_shards")
        if shards is None or not self.__dict__["_shards_are_parts"]:
            parts: tuple[Tensor, ...] = _PARTS.__get__(self)
            return parts
        return tuple(shard.tensor for shard in self._sort_shards(shards))

    @local_parts.setter
    def local_parts(self, parts: tuple[Tensor, ...]) -> None:
        _PARTS.__set__(self, parts)
        shards: list[Shard] | None = self.__dict__.get("_shards")
        if shards is None or not self.__dict__["_shards_are_parts"]:
            return
        shards = self._sort_shards(shards)
        if [tuple(s.tensor.shape) for s in shards] != [tuple(part.shape) for part in parts]:
            del self.__dict__["_shards"]
            return
        for shard, part in zip(shards, parts, strict=True):
            object.__setattr__(shard, "tensor", part)  # past the hook of a Shard, which leads here

    def _sort_shards(self, shards: list[Shard]) -> list[Shard]:
        """The shards in the order of the layout; programs may list them in another."""
        order: tuple[int, ...] | None = self.__dict__.get("_shard_order")
        return shards if order is None or len(order) != len(shards) else [shards[index] for index in order]

    def local_shards(self) -> list[Shard]:
        """This rank's shards; what is assigned to one of them, or to the list, becomes a local tensor."""
        if "_shards" not in self.__dict__:
            parts, shards = self.local_parts, make_local_shards(self, self._describe_pieces())
            self.__dict__["_shards_are_parts"] = list(map(id, parts)) == [id(shard.tensor) for shard in shards]
            order: tuple[int, ...] | None = self.__dict__.get("_shard_order")
            if order is not None and len(order) == len(shards):
                shards = [shards[order.index(place)] for place in range(len(shards))]
            self.__dict__["_shards"] = shards
        found: list[Shard] = self.__dict__["_shards"]
        return found

    def _describe_pieces(self) -> list[ShardMetadata]:
        """The metadata of all pieces in the order of the layout: the objects of `metadata()`, where it has them."""
        if "_described" not in self.__dict__:
            return self.metadata().shards_metadata
        # What is there may have been assigned, in another order.
        known = {piece: piece for piece in self.metadata().shards_metadata}
        return [known.get(piece, piece) for piece in self._build_metadata().shards_metadata]

    def _build_metadata(self) -> ShardedTensorMetadata:
        """What the layout says, whatever was assigned."""
        return describe_layout(self.sharding, self.metadata().tensor_properties, self.device)

    @property
    def _local_shards(self) -> list[Shard]:
        return self.local_shards()

    @_local_shards.setter
    def _local_shards(self, shards: list[Shard]) -> None:
        self.__dict__["_shards"], self.__dict__["_shards_are_parts"] = shards, True
        self._find_shard_order()

    def _find_shard_order(self) -> None:
        self.__dict__["_shard_order"] = find_shard_order(self.local_shards(), self.sharding, self.comm.rank)

    def _like(self, layout: Layout, locals_: tuple[Tensor, ...], anchor: Tensor | None = None) -> Self:
        made: Any = super()._like(layout, locals_, anchor)
        if layout is self.sharding:
            made.__dict__["_shard_order"] = self.__dict__.get("_shard_order")
        copied: Self = made
        return copied

    @property
    def _metadata(self) -> ShardedTensorMetadata:
        return self.metadata()

    @_metadata.setter
    def _metadata(self, metadata: ShardedTensorMetadata) -> None:
        self.__dict__["_described"] = metadata

    def sharding_spec(self) -> ShardingSpec:
        """The spec that this tensor was laid out by: the very object that was passed or assigned."""
        return self._sharding_spec

    @property
    def _sharding_spec(self) -> ShardingSpec:
        given: ShardingSpec | None = self.__dict__.get("_given_spec")
        return given if given is not None and given == self.sharding.spec else self.sharding.spec

    @_sharding_spec.setter
    def _sharding_spec(self, spec: ShardingSpec) -> None:
        self.__dict__["_given_spec"] = spec
        self.sharding = spec.layout(tuple(self.shape))
        if "_shards" in self.__dict__:
            self._find_shard_order()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # as the native one
        """All metadata, as torch prints it; layouts that torch does not have are printed by their own names."""
        known = isinstance(self.sharding.spec, PlacementShardingSpec)
        return f"ShardedTensor({self.metadata()})" if known else super().__repr__()

    def _forget(self) -> None:
        """Keep shards and metadata, which programs may hold; write what may have changed into them."""
        if "_described" in self.__dict__:
            self.metadata().tensor_properties.requires_grad = self.requires_grad

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the length of one dim."""
        if dim is not None and not -self.ndim <= dim < self.ndim:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-self.ndim}, {self.ndim - 1}], but got {dim})"
            )
        return super().size(dim)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> TorchShardedTensor:
        parts = build_parts_of_any_rank(local_shards, sharded_tensor_metadata, sharding_spec)
        return TorchShardedTensor._from_parts(parts, _no_comm(), sharding_spec, local_shards)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = call_torch_meaning(func, args, kwargs or {})
        if answer is NotImplemented:
            with plain_as_replicated() if takes_plain_as_replicated(args, kwargs or {}) else nullcontext():
                answer = super().__torch_function__(func, types, args, kwargs)
        if isinstance(answer, ShardedTensor):
            return set_tensor_type(answer, cls)
        if isinstance(answer, list | tuple | dict):
            pytree.tree_map_(lambda leaf: set_tensor_type(leaf, cls), answer)
        return answer


class TorchShardedTensor(TorchShardedTensorBase):
    """torch's `ShardedTensor`.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> x = TorchShardedTensor(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 2)
    >>> x.local_shards()[0].metadata, isinstance(x, ShardedTensor)
    (ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 2], placement=rank:0/cpu), True)
    """

    _reads_notation = False

    _init_rrefs: bool = False
    _sharded_tensor_id: int | None = None

    @staticmethod
    def __new__(
        cls: type[TorchShardedTensor],
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: GroupOrComm | None = None,
        init_rrefs: bool = False,
    ) -> TorchShardedTensor:
        tensor: Any = ShardedTensor.__new__(
            cls,
            sharding_spec,
            *size,
            dtype=dtype,
            layout=layout,
            requires_grad=requires_grad,
            pin_memory=pin_memory,
            memory_format=memory_format,
            process_group=process_group,
        )
        tensor.__dict__["_given_spec"] = sharding_spec
        made: TorchShardedTensor = tensor
        return made._with_rrefs(init_rrefs)

    @classmethod
    def _from_parts(
        cls, parts: TensorParts, comm: Comm, spec: ShardingSpec | None = None, shards: Sequence[Shard] | None = None
    ) -> Self:
        made: Any = wrap(parts.layout, parts.locals, comm, dtype=parts.dtype, cls=cls)
        if spec is not None:
            made.__dict__["_given_spec"] = spec
        if shards is not None and {id(shard.tensor) for shard in shards} == set(map(id, parts.locals)):
            made._local_shards = shards
        tensor: Self = made
        return tensor

    @staticmethod
    def _resolve_comm(process_group: GroupOrComm | None) -> Comm:
        return resolve_group(process_group)

    @staticmethod
    def _check_ranks(layout: Layout, comm: Comm) -> None:
        if comm.ranks:  # a rank outside of the group does not know which ranks are members
            ShardedTensor._check_ranks(layout, comm)

    @property
    def _process_group(self) -> Any:
        return self.comm.process_group

    @_process_group.setter
    def _process_group(self, group: GroupOrComm | None) -> None:
        self.comm = self._resolve_comm(group)

    def _get_preferred_device(self) -> torch.device:
        return self.comm.device

    @property
    def _remote_shards(self) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = self.__dict__.setdefault("_rrefs", {})
        return found

    @classmethod
    def _normalize_pg(cls, process_group: GroupOrComm | None) -> GroupOrComm:
        return group_of(cls._resolve_comm(None)) if process_group is None else process_group

    def _prepare_init(self, process_group: GroupOrComm | None = None, init_rrefs: bool = False) -> None:
        self._init_rrefs, self._sharded_tensor_id = init_rrefs, None
        self._process_group = process_group

    def _post_init(self) -> None:
        if self._init_rrefs:
            register_rrefs(self)

    def _with_rrefs(self, init_rrefs: bool) -> Self:
        self._init_rrefs = init_rrefs
        self._post_init()
        return self

    def remote_shards(self) -> dict[int, list[Any]]:
        """RRefs to the shards of other ranks, by RPC rank; needs `init_rrefs=True`."""
        return remote_shards(self)

    @classmethod
    def _init_from_local_shards(
        cls, local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
    ) -> Self:
        comm = cls._resolve_comm(process_group)
        parts = gather_parts_from_shards(local_shards, global_size, comm)
        return cls._from_parts(parts, comm, shards=parts.shards)._with_rrefs(init_rrefs)

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]  # as in torch, which has a group here
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Any = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        comm = cls._resolve_comm(process_group)
        parts = build_parts_from_metadata(local_shards, sharded_tensor_metadata, comm, sharding_spec)
        return cls._from_parts(parts, comm, sharding_spec, local_shards)._with_rrefs(init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> Self:
        comm = cls._resolve_comm(process_group)
        parts = agree_on_parts_of_tensor(local_tensor, sharding_spec, global_size, comm)
        return cls._from_parts(parts, comm, sharding_spec)._with_rrefs(init_rrefs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert dtype or device of every local tensor; the same object if nothing changes."""
        if args and not isinstance(args[0], torch.dtype | torch.device | str | int | Tensor):
            raise RuntimeError(f"ShardedTensor.to() have wrong arguments: got {type(args[0]).__name__} first")
        _check_memory_format(kwargs.get("memory_format", torch.preserve_format))
        group = kwargs.pop("process_group", None)
        made: Any = super().to(*args, **kwargs)
        if made is not self:
            made.comm = self.comm if group is None else self._resolve_comm(group)
            made.__dict__["_shard_order"] = self.__dict__.get("_shard_order")
        return made

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> Any:
        """This tensor with its local tensors on this rank's current GPU."""
        _check_memory_format(memory_format)
        return super().cuda(device, non_blocking, memory_format, process_group)

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> Self:  # type: ignore[override]  # as the native one
        """A copy of this tensor; differentiable."""
        if memory_format not in (torch.contiguous_format, torch.preserve_format):
            raise RuntimeError(f"Only support torch.preserve_format for ShardedTensor! Got {memory_format}")
        return super().clone(memory_format=memory_format)

    def gather(  # type: ignore[override]  # torch.distributed's verb, and torch.gather by other arguments
        self,
        dst: int = 0,
        out: Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
        *,
        dim: int | None = None,
        index: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The whole tensor on rank `dst`, written to `out` if it is passed. Not recorded: `out` stays a leaf.

        With an index it is torch's `gather(dim, index)`. An index is named as such, sharded, or of integers where this
        tensor has another dtype.
        """
        given = out if index is None else index
        indexes = isinstance(given, Tensor) and given.dtype == torch.int64 and self.dtype != torch.int64
        if given is not None and (index is not None or indexes or isinstance(given, ShardedTensor)):
            return super().gather(dst if dim is None else dim, given, **options)
        if enforce_dtype:
            warnings.warn("`enforce_dtype` is not needed: values keep their dtype", FutureWarning, stacklevel=2)
        with torch.no_grad():
            return self.gather_to(dst, out=out, dtype=dtype, **options)

    def _gather_problem(self, dst: int, out: Tensor | None) -> str | None:
        try:
            if out is not None:
                check_gather_output(self.comm.rank, dst, self.shape, out)
        except ValueError as error:
            return str(error)
        return super()._gather_problem(dst, out)

    def reshard(self, resharding_spec: ShardingSpec) -> Self:
        """This very tensor, moved to another spec in place; gradients pass, as through `redistribute`.

        The metadata stays the same object; its list of shards is replaced by the new ones in the order of ranks.
        """
        if not isinstance(resharding_spec, ShardingSpec):
            raise ValueError(f"reshard takes a ShardingSpec, got {type(resharding_spec)}")
        if resharding_spec == self.sharding_spec():
            return self
        new: ShardedTensor = self.redistribute(resharding_spec, label="reshard")
        metadata = self.metadata()
        metadata.shards_metadata = sorted(new.metadata().shards_metadata, key=lambda shard: rank_of(shard.placement))
        for name in ("_shards", "_shard_order"):
            self.__dict__.pop(name, None)
        self.sharding, self.local_parts, self._anchor = new.sharding, new.local_parts, new._anchor
        self._sharding_spec = resharding_spec
        return self

    def _extra_state(self) -> dict[str, Any]:
        return {"_init_rrefs": self._init_rrefs, "_shard_order": self.__dict__.get("_shard_order")}

    def _restore_extra_state(self, extra: dict[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in extra.items() if name != "_init_rrefs"})
        self._with_rrefs(extra["_init_rrefs"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the native one, with metadata that is not what the layout says: resharded, changed, or assigned."""
        function, (kind, saved) = super().__reduce_ex__(protocol)
        metadata = self.__dict__.get("_described")
        if metadata is not None and metadata.shards_metadata != self._build_metadata().shards_metadata:
            saved.extra["_described"] = metadata
        return function, (kind, saved)

    def __getstate__(self) -> Any:
        return get_state(self)

    def __setstate__(self, state: Any) -> None:
        set_state(self, state)


PlacementShardingSpec.tensor_type = TorchShardedTensor
ask_custom_ops(TorchShardedTensor, "clone", "detach", "requires_grad_", "is_contiguous", "__deepcopy__")
ask_custom_ops(TorchShardedTensor, "size", "dim", "numel", "tolist", "backward")
# Programs print and compare the names of classes.
TorchShardedTensor.__name__, TorchShardedTensorBase.__name__ = "ShardedTensor", "ShardedTensorBase"
# What torch.load makes of a file with weights_only=True: the tensor, and its spec in torch's form.
torch.serialization.add_safe_globals(
    [
        TorchShardedTensor,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        ShardMetadata,
        ShardedTensorMetadata,
        TensorProperties,
        MEM_FORMAT_ENCODING,
        _remote_device,
        rebuild_layout,
    ]
)


def _check_memory_format(memory_format: torch.memory_format) -> None:
    if memory_format not in (torch.contiguous_format, torch.preserve_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported! Got {memory_format}"
        )


def _no_comm() -> Comm:
    """The comm of a tensor that has no process group."""
    return outside_comm(-1, torch.device("cpu"), 0.0, process_group=None)
