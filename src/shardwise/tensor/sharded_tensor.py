"""The tensor itself: a layout, this rank's local tensors, and a comm, as a `torch.Tensor`.

The ShardedTensor is not on the autograd tape: its local tensors are. `requires_grad`, `grad`, `is_leaf` and
`backward` are answered from them. What moves data is in `move.py`; this file offers it as methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from shardwise._text import draw_html, public
from shardwise._torch import make_wrapper_subclass
from shardwise.comm import Comm, advise_ranks, name_ranks
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.comm.stand_in import StandInComm
from shardwise.geometry import Layout, LayoutError, Mesh, Placement, ShardingSpec
from shardwise.geometry.notation import find_dtype, read_spec
from shardwise.tensor import pickling
from shardwise.tensor.autograd_mixin import AutogradMixin, CopiedView, LocalMemoryMixin, TorchNamesMixin
from shardwise.tensor.dispatch import call_function, enter_function, enter_operator, on_local_tensors, refuse_operator
from shardwise.tensor.execute import Handle, check_conversion, limit_addend
from shardwise.tensor.move import (
    check_and_move,
    check_move,
    replicated_layout,
    single_rank_layout,
    start_moving,
    target_layout,
)
from shardwise.tensor.recorder import write_tensor
from shardwise.tensor.shards import (
    Shard,
    ShardedTensorMetadata,
    TensorProperties,
    describe_layout,
    make_local_shards,
    spec_on_device,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


def local_device(layout: Layout, rank: int, slot: int, comm: Comm) -> torch.device:
    """The device a layout names for a local tensor, else the comm's."""
    devices = layout.table.devices
    if devices is None:
        return comm.device
    rows = layout.rows_of(rank)
    named = devices[int(rows[layout.table.slots[rows] == slot][0])]
    return comm.device if named is None else torch.device(named)


def _device_without_parts(layout: Layout, comm: Comm) -> torch.device:
    """Where a rank without parts counts a tensor: on the host if the layout names it, else on the comm's device."""
    named = next((d for d in layout.table.devices or () if d is not None), None)
    return comm.device if named is None or torch.device(named).type != "cpu" else torch.device("cpu")


def allocate_locals(
    layout: Layout,
    comm: Comm,
    dtype: torch.dtype,
    *,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
) -> tuple[Tensor, ...]:
    """Uninitialised local tensors of this rank."""
    shapes = layout.local_shapes(comm.rank)
    places = [
        torch.device(device) if device is not None else local_device(layout, comm.rank, i, comm)
        for i in range(len(shapes))
    ]
    return tuple(
        torch.empty(shape, dtype=dtype, device=place, pin_memory=pin_memory)
        for shape, place in zip(shapes, places, strict=True)
    )


def size_to_tuple(size: Sequence[Any]) -> tuple[int, ...]:
    """A size passed as numbers or as one sequence of numbers."""
    numbers = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    for number in numbers:
        if not isinstance(number, int):
            raise TypeError(f"size has to be a sequence of ints, found: {list(numbers)}")
    return numbers


def wrap(
    layout: Layout,
    locals_: tuple[Tensor, ...],
    comm: Comm,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    anchor: Tensor | None = None,
    cls: type[ShardedTensor] | None = None,
) -> ShardedTensor:
    """A ShardedTensor over these local tensors, unchecked; dtype and device count where this rank has none.

    A rank that takes part without data has local tensors without memory; what it wraps is on the device of the others,
    so that autocast casts it as it does there.
    """
    known = locals_[0] if locals_ else None
    if known is not None:
        stands_in = known.is_meta and comm.__class__ is StandInComm
        device = comm.device_of_others if stands_in else known.device  # type: ignore[attr-defined]
    tensor: ShardedTensor = make_wrapper_subclass(
        cls or ShardedTensor,
        layout.shape,
        dtype=dtype if known is None else known.dtype,
        device=device or _device_without_parts(layout, comm),
    )
    tensor.sharding = layout
    tensor.local_parts = locals_
    tensor.comm = comm
    tensor._fingerprint = None
    if anchor is not None:
        tensor._anchor = anchor
    return tensor


@dataclass
class PrintOptions:
    """What the repr of a ShardedTensor has besides its layout."""

    values: bool = False


print_options = PrintOptions()


def set_printoptions(*, values: bool) -> None:
    """Let `print(x)` of a ShardedTensor show its values too, as `torch.set_printoptions` says, in this process.

    They are gathered: with `values=True` every rank prints a tensor, or none does. The layout is shown in any case.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor import shard
    >>> set_printoptions(values=True)
    >>> print(run_local(lambda comm: str(shard(torch.arange(4), ChunkSpec(0, 2))), 2)[0])
    ShardedTensor(i64[4] as chunk(0) over 0-1, rank 0 holds (2,),
        [0, 1, 2, 3])
    >>> set_printoptions(values=False)
    """
    print_options.values = values


def _write_values(tensor: ShardedTensor) -> str:
    with torch.no_grad():
        text = repr(tensor.detach().full()).removeprefix("tensor(").removesuffix(")")
    numbers = text.partition(", dtype=")[0]
    return ",\n    " + numbers.replace("\n       ", "\n    ")  # torch's lines start below its own opening bracket


derived_types: set[type] = set()  # the subclasses of ShardedTensor, for code that must not spend an isinstance


class ShardedTensor(LocalMemoryMixin, AutogradMixin, TorchNamesMixin):
    """A tensor that is stored in pieces on many ranks, and computes like a regular tensor.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor import shard
    >>> def body(comm):
    ...     x = shard(torch.arange(6.0).reshape(3, 2), ChunkSpec(0, 2))
    ...     return x.redistribute(ChunkSpec(1, 2)).local_tensor().tolist()
    >>> run_local(body, 2)
    [[[0.0], [2.0], [4.0]], [[1.0], [3.0], [5.0]]]

    Three plain attributes say all about it, and rules and extensions read them: `sharding`, the Layout (which rank has
    which boxes); `local_parts`, this rank's local tensors, which are on the autograd tape; `comm`, through which its
    ranks communicate. They are set once; operations return new tensors.

    >>> x = run_local(lambda: shard(torch.arange(4), "tp: S(0)"), 2)[1]
    >>> x.sharding.pieces[1], x.local_parts, x.comm.rank
    (Piece(...), (tensor([2, 3]),), 1)
    """

    # Slots are read and set faster than other attributes. `_fingerprint` is what the fast path keeps of a tensor;
    # `_forget` drops it where a method replaces the layout or the local tensors.
    __slots__ = ("_fingerprint", "comm", "local_parts", "sharding")
    sharding: Layout
    local_parts: tuple[Tensor, ...]
    comm: Comm
    _fingerprint: Any
    _anchor: Tensor | None = None
    _copied_from: CopiedView | None = None
    _dense_strides: tuple[int, ...] | None = None  # of the whole, unless it is contiguous: see dense_strides.py
    _pinned_axes: frozenset[str] = frozenset()  # axes along which operators do not move it: see ops/propagation.py
    _reads_notation: ClassVar[bool] = True

    @staticmethod
    @public
    def __new__(
        cls: type[ShardedTensor],
        sharding_spec: ShardingSpec | str,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: GroupOrComm | None = None,
    ) -> ShardedTensor:
        if isinstance(sharding_spec, str) and cls._reads_notation:
            sharding_spec, size, dtype = cls._read_notation(sharding_spec, size, dtype, process_group)
        if not isinstance(sharding_spec, ShardingSpec):
            raise ValueError(
                f"Expecting ShardingSpec but got: {type(sharding_spec)}; the spec comes first, then the size, as in "
                "zeros(ChunkSpec(0, 4), 8, 4); shard(x, spec) shards an existing tensor"
            )
        if layout != torch.strided:
            raise ValueError(f"Only torch.strided layout is currently supported, got {layout}")
        if memory_format != torch.contiguous_format:
            raise ValueError(f"Only torch.contiguous_format memory_format is currently supported, got {memory_format}")
        comm = cls._resolve_comm(process_group)
        dtype = dtype or torch.get_default_dtype()
        try:
            where = sharding_spec.layout(size_to_tuple(size))
        except LayoutError as error:
            if size:
                raise
            raise LayoutError(f"{error}; the size follows the spec, as in zeros(spec, 8, 4)") from None
        cls._check_ranks(where, comm)
        tensor = wrap(where, allocate_locals(where, comm, dtype, pin_memory=pin_memory), comm, dtype=dtype, cls=cls)
        return tensor.requires_grad_(requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        derived_types.add(cls)

    @classmethod
    def _read_notation(
        cls, text: str, size: tuple[Any, ...], dtype: torch.dtype | None, process_group: GroupOrComm | None
    ) -> tuple[ShardingSpec, tuple[Any, ...], torch.dtype | None]:
        """The spec, the size and the dtype of a new tensor; a text such as "f32[6,4] on tp=2: S(0)" says all three."""
        known = size_to_tuple(size) if size else None
        read = read_spec(text, None, cls._resolve_comm(process_group).ranks, str(dtype) if dtype else None, known)
        if isinstance(read, Layout):
            named = text.partition("[")[0].strip()
            made = getattr(torch, find_dtype(named).torch_name) if named else dtype
            return read.spec, read.shape, made
        return read, size, dtype

    @staticmethod
    def _resolve_comm(process_group: GroupOrComm | None) -> Comm:
        return resolve_comm(process_group)

    @staticmethod
    def _check_ranks(layout: Layout, comm: Comm) -> None:
        outside = sorted(set(layout.ranks) - set(comm.ranks))
        if outside:
            raise ValueError(
                f"Global rank {outside[0]} does not exist in input process group: it has {name_ranks(comm.ranks)}; "
                f"{advise_ranks(comm)}"
            )

    # What is where

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]  # a property, as the others
        """Torch's word for how elements are stored: always `torch.strided`. Where the pieces are is `sharding`.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.ones(4), "tp: S(0)").layout, 2)
        [torch.strided, torch.strided]
        """
        return torch.strided

    def sharding_spec(self) -> ShardingSpec:
        """The spec of this tensor's layout.

        >>> from shardwise import ChunkSpec, run_local, shard
        >>> run_local(lambda: shard(torch.ones(4), ChunkSpec(0, 2)).sharding_spec(), 2)[0]
        ChunkSpec(dim=0, ranks=0-1)
        """
        return self.sharding.spec

    def local_tensors(self) -> tuple[Tensor, ...]:
        """Return this rank's local tensors: none, one or many. Gradients flow through them.

        >>> from shardwise import ChunkSpec, run_local, shard
        >>> run_local(lambda: shard(torch.arange(3), ChunkSpec(0, (0, 1, 0))).local_tensors(), 2)
        [(tensor([0]), tensor([2])), (tensor([1]),)]
        """
        return self.local_parts

    def local_tensor(self) -> Tensor:
        """Return this rank's local tensor; an error if it has none or several.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.arange(4), "tp: S(0)").local_tensor(), 2)
        [tensor([0, 1]), tensor([2, 3])]
        """
        if len(self.local_parts) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported by local_tensor(). Number of shards: {len(self.local_parts)}; "
                "use local_tensors() or local_shards()"
            )
        return self.local_parts[0]

    def local_shards(self) -> list[Shard]:
        """Return this rank's shards with their metadata, as torch's ShardedTensor does.

        A tensor that is assigned to `shard.tensor` becomes the local tensor.

        >>> from shardwise import run_local, shard
        >>> def body():
        ...     (piece,) = shard(torch.arange(4), "tp: S(0)").local_shards()
        ...     return piece.metadata.shard_offsets, piece.tensor
        >>> run_local(body, 2)
        [([0], tensor([0, 1])), ([2], tensor([2, 3]))]
        """
        if "_shards" not in self.__dict__:
            self.__dict__["_shards"] = make_local_shards(self, self.metadata().shards_metadata)
        shards: list[Shard] = self.__dict__["_shards"]
        return shards

    def metadata(self) -> ShardedTensorMetadata:
        """The metadata of all pieces on all ranks.

        >>> from shardwise import run_local, shard
        >>> metadata = run_local(lambda: shard(torch.arange(4), "tp: S(0)").metadata(), 2)[0]
        >>> [(piece.shard_offsets, piece.shard_sizes) for piece in metadata.shards_metadata]
        [([0], [2]), ([2], [2])]
        """
        if "_described" not in self.__dict__:
            properties = TensorProperties(
                dtype=self.dtype, requires_grad=self.requires_grad, pin_memory=self.is_pinned()
            )
            self.__dict__["_described"] = describe_layout(self.sharding, properties, self.device)
        described: ShardedTensorMetadata = self.__dict__["_described"]
        return described

    def shard_size(self) -> torch.Size:
        """The global shape.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.ones(4, 3), "tp: S(0)").shard_size(), 2)[0]
        torch.Size([4, 3])
        """
        return self.shape

    # Moving

    def _like(self, layout: Layout, locals_: tuple[Tensor, ...], anchor: Tensor | None = None) -> ShardedTensor:
        return wrap(layout, locals_, self.comm, dtype=self.dtype, device=self.device, anchor=anchor, cls=type(self))

    @overload
    def redistribute(
        self,
        target: Layout | ShardingSpec | Mesh | DeviceMesh | str | Sequence[Placement | TorchPlacement] | None = None,
        placements: str | Sequence[Placement | TorchPlacement] | None = None,
        *,
        device_mesh: Mesh | DeviceMesh | None = None,
        async_op: Literal[False] = False,
        max_buffer_bytes: int | None = None,
        label: str = "redistribute",
    ) -> ShardedTensor: ...
    @overload
    def redistribute(
        self,
        target: Layout | ShardingSpec | Mesh | DeviceMesh | str | Sequence[Placement | TorchPlacement] | None = None,
        placements: str | Sequence[Placement | TorchPlacement] | None = None,
        *,
        device_mesh: Mesh | DeviceMesh | None = None,
        async_op: Literal[True],
        max_buffer_bytes: int | None = None,
        label: str = "redistribute",
    ) -> Handle[ShardedTensor]: ...
    @on_local_tensors
    def redistribute(
        self,
        target: Any = None,
        placements: Any = None,
        *,
        device_mesh: Any = None,
        async_op: bool = False,
        max_buffer_bytes: int | None = None,
        label: str = "redistribute",
    ) -> Any:
        """Return the same values in another layout. Differentiable.

        `target` is a spec, a Layout, placements on this tensor's mesh, such placements in notation ("S(0), R"), or a
        mesh with `placements`. Torch's DeviceMesh and placements are read as ours; `device_mesh` and `placements` may
        be passed by name, as DTensor has them. With `async_op`, a Handle whose `wait()` returns the tensor (outside
        autograd).

        >>> from shardwise import run_local, shard
        >>> def body():
        ...     rows = shard(torch.arange(6).reshape(2, 3), "tp: S(0)")
        ...     return rows.redistribute("S(1) sizes(1,2)").local_tensor().tolist()
        >>> run_local(body, 2)
        [[[0], [3]], [[1, 2], [4, 5]]]
        """
        dst: Layout | None = None
        problem: Exception | None = None
        try:
            dst = target_layout(self.sharding, device_mesh if target is None else target, placements, self.dtype)
        except (TypeError, ValueError) as error:
            problem = error
        asked = {"max_buffer_bytes": max_buffer_bytes}
        if not async_op:
            return self._like(dst or self.sharding, *check_and_move(self, dst or self.sharding, label, asked, problem))
        check_move(self, dst or self.sharding, label, asked, problem)
        assert dst is not None
        running = start_moving([self], [dst], label, max_buffer_bytes)
        return Handle(running, lambda results: self._like(dst, results[0]))

    @on_local_tensors
    def full(self, *, max_buffer_bytes: int | None = None) -> Tensor:
        """Return the whole tensor on every rank. Differentiable.

        It is a copy in every layout: later writes to this tensor do not change it. Where each rank holds the whole,
        `local_tensor()` returns it without a copy.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.arange(3), "tp: S(0)").sum().full(), 2)
        [tensor(3), tensor(3)]
        """
        dst = replicated_layout(tuple(self.shape), self.comm.ranks)
        whole = check_and_move(self, dst, "full", {"max_buffer_bytes": max_buffer_bytes})[0][0]
        return whole.clone() if self.sharding == dst else whole

    def gather(self, dim: Any = None, index: Any = None, **options: Any) -> Any:
        """Gather elements at `index` along `dim`, as torch.gather does; `gather_to(rank)` gives the whole on one rank.

        >>> from shardwise import run_local, shard
        >>> def body():
        ...     rows = shard(torch.arange(6).reshape(2, 3), "tp: S(0)")
        ...     return rows.gather(1, shard(torch.tensor([[2], [0]]), "tp: S(0)")).tolist()
        >>> run_local(body, 2)[0]
        [[2], [3]]
        """
        if index is None:
            raise TypeError(
                "gather(dim, index) picks elements, as torch.Tensor.gather does, and no index was passed; "
                f"gather_to({0 if dim is None else dim}) returns the whole tensor on that rank"
            )
        return torch.gather(self, dim, index, **options)

    @on_local_tensors
    def gather_to(
        self,
        rank: int = 0,
        *,
        out: Tensor | None = None,
        dtype: torch.dtype | None = None,
        max_buffer_bytes: int | None = None,
    ) -> Tensor | None:
        """Return the whole tensor on one (global) rank, exact in every dtype, in `out` if it is passed.

        Other ranks get None; where gradients are recorded they get a tensor without elements that is on the tape, so
        that every rank can call backward.

        >>> from shardwise.comm import run_local
        >>> from shardwise.tensor import shard
        >>> run_local(lambda: shard(torch.arange(4), "tp: S(0)").gather_to(1), 2)
        [None, tensor([0, 1, 2, 3])]
        """
        problem = self._gather_problem(rank, out)
        layout = single_rank_layout(tuple(self.shape), rank if problem is None else self.comm.ranks[0])
        asked = {"dst": rank, "dtype": str(dtype), "max_buffer_bytes": max_buffer_bytes}
        locals_, anchor = check_and_move(self, layout, "gather", asked, problem)
        if self.comm.rank != rank:
            return anchor
        result = locals_[0] if dtype is None else locals_[0].to(dtype)
        if out is not None:
            return out.copy_(result)
        return result.clone() if self.sharding == layout and result is locals_[0] else result

    def _gather_problem(self, dst: Any, out: Tensor | None) -> str | None:
        if not isinstance(dst, int):
            return f"gather_to takes the number of a rank, as in gather_to(0); got {type(dst).__name__}: {dst!r}"
        if dst not in self.comm.ranks:
            return f"gather to rank {dst}, which is not in the comm ({name_ranks(self.comm.ranks)})"
        if out is None:
            return None
        if self.comm.rank != dst:
            return f"Argument ``out`` must NOT be specified on non-destination ranks; dst is {dst}"
        if tuple(out.shape) != tuple(self.shape):
            return f"Argument ``out`` has size {tuple(out.shape)}, but should be {tuple(self.shape)}"
        return None

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Move this tensor to another spec in place. `redistribute` returns a new tensor instead.

        >>> from shardwise import ChunkSpec, run_local, shard
        >>> run_local(lambda: str(shard(torch.ones(4, 2), ChunkSpec(0, 2)).reshard(ChunkSpec(1, 2))), 2)[0]
        'ShardedTensor(f32[4,2] as chunk(1) over 0-1, rank 0 holds (4, 1))'
        """
        if not isinstance(resharding_spec, ShardingSpec):
            raise ValueError(f"reshard takes a ShardingSpec, got {type(resharding_spec)}")
        with torch.no_grad():
            new: ShardedTensor = self.redistribute(resharding_spec, label="reshard")
        keep = self.requires_grad
        self.sharding, self.local_parts, self._anchor = new.sharding, tuple(t.detach() for t in new.local_parts), None
        self._forget()
        self.requires_grad_(keep)
        return self

    def _forget(self) -> None:
        """Drop what was derived from the layout and the local tensors."""
        self._fingerprint = None
        self.__dict__.pop("_shards", None)
        self.__dict__.pop("_described", None)

    @on_local_tensors
    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Convert dtype or device, as torch.Tensor.to does; returns this tensor if nothing changes. Differentiable.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: str(shard(torch.ones(4), "tp: S(0)").to(torch.bfloat16)), 2)[0]
        'ShardedTensor(bf16[4] on tp=2: S(0), rank 0 holds (2,))'
        """
        group = kwargs.pop("process_group", None)
        without_format = {k: v for k, v in kwargs.items() if k != "memory_format"}
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        moved_probe = probe.to(*args, **without_format)
        if moved_probe is probe and group is None:  # torch returns the tensor itself, unless it is to be copied
            return self
        pending, dtype = self.sharding.pending, moved_probe.dtype
        is_half = self.dtype.is_floating_point and self.dtype.itemsize == 2 and self.device == moved_probe.device
        widens = is_half and dtype.is_floating_point and dtype.itemsize > 2 and group is None
        if widens and pending is not None and pending.op == "sum":  # summed before it is wider, for half the bytes
            summed: ShardedTensor = torch.ops.aten._to_copy.default(self, dtype=dtype)
            return summed
        check_conversion(self.sharding.pending, self.dtype, moved_probe.dtype)
        addends = (limit_addend(t, self.sharding.pending, moved_probe.dtype) for t in self.local_parts)
        locals_ = tuple(t.to(*args, **kwargs) for t in addends)
        anchor = None if self._anchor is None else self._anchor.to(*args, **without_format)
        comm = self.comm if group is None else self._resolve_comm(group)
        where = spec_on_device(self.sharding.spec, moved_probe.device).layout(self.sharding.shape)
        device = moved_probe.device
        made = wrap(where, locals_, comm, dtype=moved_probe.dtype, device=device, anchor=anchor, cls=type(self))
        if self._pinned_axes:
            made._pinned_axes = self._pinned_axes
        return made

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: GroupOrComm | None = None
    ) -> ShardedTensor:
        """Return a copy with its local tensors in CPU memory.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.ones(4), "tp: S(0)").cpu().device, 2)[0]
        device(type='cpu')
        """
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: GroupOrComm | None = None,
    ) -> ShardedTensor:
        """Return a copy with its local tensors on this rank's current GPU.

        >>> from shardwise import run_local, shard
        >>> if torch.cuda.is_available():
        ...     assert run_local(lambda: shard(torch.ones(4), "tp: S(0)").cuda().is_cuda, 2) == [True, True]
        """
        place = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        return self.to(place, non_blocking=non_blocking, memory_format=memory_format, process_group=process_group)

    # Being a tensor; `shardwise.ops` binds the code that answers functions and operators

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return enter_function(call_function, func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return enter_operator(refuse_operator, func, args, kwargs or {})

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, format_spec: str) -> str:
        """One element as its value, as torch prints it: `f"{loss:.4f}"`. Every rank asks. Else the repr."""
        return format(self.item(), format_spec) if self.ndim == 0 else object.__format__(self, format_spec)

    def tolist(self) -> Any:
        """Return the values as nested lists, gathered if needed. Every rank calls it.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.arange(4), "tp: S(0)").tolist(), 2)[1]
        [0, 1, 2, 3]
        """
        return self._gather_values().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, gathered if needed. Every rank calls it.

        Where every rank has all of them the array shares this rank's memory. Else it is a gathered copy, which cannot
        be written: writes would not reach the tensor.

        >>> from shardwise import run_local, shard
        >>> run_local(lambda: shard(torch.arange(4), "tp: S(0)").numpy(), 2)[1]
        array([0, 1, 2, 3])
        """
        values = self._gather_values()
        array = values.numpy(force=force)
        if values is not (self.local_parts or (None,))[0]:
            array.flags.writeable = False
        return array

    def _gather_values(self) -> Tensor:
        """All values, as Python needs them: this rank's own tensor where every rank has the whole."""
        whole = self.sharding == replicated_layout(tuple(self.shape), self.comm.ranks)
        return self.local_parts[0] if whole else self.full()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # no contents are passed
        grad = ", requires_grad=True" if self.requires_grad else ""
        held = ", ".join(str(tuple(t.shape)) for t in self.local_parts) or "nothing"
        text = f"{write_tensor(self.sharding, self.dtype)}, rank {self.comm.rank} holds {held}{grad}"
        return f"ShardedTensor({text}{_write_values(self) if print_options.values else ''})"

    def _repr_html_(self) -> str:
        """A picture of the layout for notebooks; no other rank is asked."""
        return draw_html("layout_html", self.sharding, str(self.dtype))

    def __copy__(self) -> ShardedTensor:
        return pickling.shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return pickling.deep_copy(self, memo)

    def _extra_state(self) -> dict[str, Any]:
        """What a subclass adds to copies and pickles; `_restore_extra_state` takes it on the other side."""
        return {}

    def _restore_extra_state(self, extra: dict[str, Any]) -> None:
        self.__dict__.update(extra)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.reduce(self)

    # Being saved and loaded by torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return list(pickling.make_write_items(self, fqn))

    def __create_chunk_list__(self) -> list[Any]:
        return list(pickling.held_chunks(self))

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return pickling.find_chunk_tensor(self, index)


# What torch.load makes of a file with weights_only=True: the tensor, from plain data and tensors.
torch.serialization.add_safe_globals(
    [ShardedTensor, pickling.rebuild, pickling.SavedTensor, pickling.ProcessGroupState]
)
