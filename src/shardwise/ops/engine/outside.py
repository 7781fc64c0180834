"""Operators on a rank of the comm that is outside of the tensors' mesh: it takes part without data.

1. Such a rank computes as the mesh's first rank would, on meta tensors and with a comm that sends nothing. What comes
   out has the layouts and dtypes of the results, and whatever the layouts do not allow is refused here as it is there.
2. The results on this rank are ShardedTensors without local tensors. Their anchors are on the tape behind the meta
   tensors, so that the backward pass meets the same moves as on the mesh's ranks.
3. Operators that ask all ranks of the comm, for a value or a seed, run as they are: they need no local tensors.
4. Where shapes depend on values there is nothing to compute them from: refused on every rank, from the layouts alone.

Apart from the exchanges of the comm, nothing here waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, pytree
from shardwise.comm import Comm, Work
from shardwise.comm.protocol import LendingComm, TakeLent, find_lending
from shardwise.geometry import MeshSpec
from shardwise.ops.engine.irregular import is_in_pieces
from shardwise.ops.engine.known_calls.recording import note_special
from shardwise.ops.engine.mixed import copy_mesh_note
from shardwise.ops.engine.registry import Steps, find_rule
from shardwise.ops.engine.schema import has_tag
from shardwise.tensor.dispatch import UnsupportedOpError, sharded_leaves
from shardwise.tensor.inplace import MEMORY_NOTES, note_write_without_data
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.transfer import Topology
from shardwise.transfer.device_cost import DeviceTraffic

_ASK_ALL_RANKS = {aten._local_scalar_dense.default, aten._linalg_check_errors.default, aten.detach.default}
_STAND_IN = "_stand_in"


@dataclass(frozen=True)
class StandInComm:
    """The comm of a rank that computes as another would: it takes part in exchanges, and sends and receives nothing.

    How the bytes of the others travel, packed or lent, is chosen by the real comm: the same on every rank.
    """

    rank: int
    real: Comm
    device: torch.device

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.real.ranks

    @property
    def world_size(self) -> int:
        return self.real.world_size

    @property
    def timeout(self) -> float:
        return self.real.timeout

    @property
    def process_group(self) -> None:
        return None

    def find_topology(self) -> Topology | None:
        return self.real.find_topology()

    @property
    def lends_memory(self) -> bool:
        return find_lending(self.real) is not None

    def prefers_lending(self, count: Callable[[], DeviceTraffic | None]) -> bool:
        return self._lending.prefers_lending(count)

    def exchange(self, sends: Any, receives: Any, *, label: str) -> Work:
        return self.real.exchange({}, {}, label=label)

    def exchange_boxes(self, sends: Any, receives: Any, *, label: str) -> Work:
        return self._lending.exchange_boxes({}, {}, label=label)

    def lend(self, sends: Any, receives: Any, take: TakeLent, *, label: str) -> Work:
        return self._lending.lend({}, (), lambda lent: None, label=label)

    @property
    def _lending(self) -> LendingComm:
        lending = find_lending(self.real)
        assert lending is not None
        return lending

    def _refuse(self, *args: Any, label: str = "a collective", **kwargs: Any) -> Any:
        raise UnsupportedOpError(
            f"'{label}' asks all ranks of the comm, and rank {self.real.rank} is outside of the tensors' mesh; "
            "redistribute to a mesh of all ranks"
        )

    all_gather = all_gather_into = reduce_scatter_into = all_reduce = broadcast = _refuse
    barrier = subset = all_gather_bytes = _refuse


class _EnterMesh(torch.autograd.Function):
    """From the anchor of a tensor to the local tensor that the other rank has, without values."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.anchor = anchor.dtype, anchor.device
        return torch.empty(shape, dtype=anchor.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.anchor
        return _LeaveMesh.apply(grads[0], dtype, device), None  # type: ignore[no-untyped-call]  # untyped in torch


class _LeaveMesh(torch.autograd.Function):
    """The reverse: the anchor of a result."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        ctx.shape = tuple(local.shape)
        return torch.empty(0, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _EnterMesh.apply(grads[0], ctx.shape), None, None  # type: ignore[no-untyped-call]  # untyped in torch


def is_outside(op: Any, tensors: Sequence[ShardedTensor]) -> bool:
    """Whether this rank takes part in an operator without data; tensors in pieces are computed by all ranks anyway."""
    draws = has_tag(op, torch.Tag.nondeterministic_seeded) and isinstance(find_rule(op), Steps)
    if op in _ASK_ALL_RANKS or draws:
        return False
    left_out = [_leaves_out_this_rank(t) for t in tensors]
    if _takes_lists(op) and not all(left_out):
        return False  # each tensor of a list is computed by itself, and this rank has some of them
    return any(left_out) and not any(map(is_in_pieces, tensors))


@cache
def _takes_lists(op: Any) -> bool:
    name: str = op._schema.name.removeprefix("aten::")
    return name.startswith(("_foreach_", "_fused_"))


def _leaves_out_this_rank(tensor: ShardedTensor) -> bool:
    if tensor.local_parts:
        return False
    spec = tensor.sharding.spec
    return isinstance(spec, MeshSpec) and tensor.comm.rank not in spec.mesh.ranks


def refuse_unknown_shapes(op: Any, tensors: Sequence[ShardedTensor]) -> None:
    """Raise where shapes depend on values and a tensor's mesh leaves out ranks: those could not know the shapes."""
    if not has_tag(op, torch.Tag.dynamic_output_shape) or _is_index_without_mask(op, tensors):
        return
    for tensor in tensors:
        spec = tensor.sharding.spec
        if isinstance(spec, MeshSpec) and spec.mesh.ranks.size < tensor.comm.world_size:
            raise UnsupportedOpError(
                f"{op} of {format_layout_text(tensor.sharding)}: the shape of the result depends on values, and "
                f"the mesh has {spec.mesh.ranks.size} of the comm's {tensor.comm.world_size} ranks: the others would "
                "not know it; redistribute to a mesh of all ranks, or compute in a comm of the mesh's ranks"
            )


def _is_index_without_mask(op: Any, tensors: Sequence[ShardedTensor]) -> bool:
    return op is aten.index.Tensor and not any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])


def compute_outside(call_op: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operator on a rank outside of the mesh; `call_op` computes it on a rank inside."""
    note_special()
    given = list(sharded_leaves(args, kwargs))
    left_out = next(t for t in given if _leaves_out_this_rank(t))
    spec = left_out.sharding.spec
    assert isinstance(spec, MeshSpec)
    comm = StandInComm(int(spec.mesh.ranks.flat[0]), left_out.comm, torch.device("meta"))
    twins = {id(t): _stand_in_for(t, comm) for t in given}
    versions = {key: _version_of(twin) for key, twin in twins.items()}
    joins = op in (aten.stack.default, aten.cat.default)  # the only ones where a number is an element like others
    new_args, new_kwargs = pytree.tree_map_only(Tensor, lambda t: _replace_tensor(t, twins, joins), (args, kwargs))
    result = call_op(op, (ShardedTensor,), new_args, new_kwargs)
    for tensor in given:
        if _version_of(twins[id(tensor)]) != versions[id(tensor)]:
            _note_written(tensor, twins[id(tensor)])
    own = {id(twins[id(t)]): t for t in given}
    return pytree.tree_map_only(
        ShardedTensor, lambda t: own[id(t)] if id(t) in own else _wrap_without_data(t, left_out), result
    )


def _replace_tensor(tensor: Tensor, twins: dict[int, ShardedTensor], joins: bool) -> Tensor:
    """The stand-in of a ShardedTensor; a plain tensor without its values; numbers stay, unless they are joined."""
    if isinstance(tensor, ShardedTensor):
        return twins[id(tensor)]
    return tensor if tensor.ndim == 0 and not joins else tensor.to("meta")


def _version_of(twin: ShardedTensor) -> int:
    """How often a stand-in was written to; tensors of inference mode do not count it, and are on no tape."""
    counted = [t for t in twin.local_parts if not t.is_inference()]
    return counted[0]._version if counted else 0


def _stand_in_for(tensor: ShardedTensor, comm: StandInComm) -> ShardedTensor:
    """The tensor as the other rank has it, without values; one object as long as the tensor is not written to."""
    known: tuple[Tensor | None, bool, ShardedTensor] | None = tensor.__dict__.get(_STAND_IN)
    now = tensor._anchor, tensor.requires_grad
    if known is not None and known[2].sharding is tensor.sharding and known[0] is now[0] and known[1] == now[1]:
        known[2]._dense_strides = tensor._dense_strides
        return known[2]
    made = wrap(tensor.sharding, tuple(_make_locals(tensor, comm.rank)), comm, dtype=tensor.dtype)
    made._dense_strides = tensor._dense_strides
    copy_mesh_note(tensor, made)
    for local in made.local_parts:
        local.untyped_storage().__dict__.update(tensor.__dict__.get(MEMORY_NOTES, {}))
    tensor.__dict__[_STAND_IN] = (*now, made)
    return made


def _make_locals(tensor: ShardedTensor, rank: int) -> list[Tensor]:
    shapes = tensor.sharding.local_shapes(rank)
    if not tensor.requires_grad:
        return [torch.empty(shape, dtype=tensor.dtype, device="meta") for shape in shapes]
    taped = tensor._tape_tensors()[0]
    with torch.enable_grad():
        return [_EnterMesh.apply(taped, shape) for shape in shapes]  # type: ignore[no-untyped-call]  # untyped in torch


def _wrap_without_data(twin: ShardedTensor, left_out: ShardedTensor) -> ShardedTensor:
    """The result on this rank; notes about its memory go with it, so that writing to it is refused as elsewhere."""
    anchor = _anchor_of(twin, left_out.device)
    made = wrap(twin.sharding, (), left_out.comm, dtype=twin.dtype, device=left_out.device, anchor=anchor)
    made.__dict__[MEMORY_NOTES] = dict(twin.local_parts[0].untyped_storage().__dict__) if twin.local_parts else {}
    return made


def _note_written(tensor: ShardedTensor, twin: ShardedTensor) -> None:
    """Put a tensor that was written to on the tape, if that is recorded; torch itself refuses that for a leaf."""
    if not torch.is_grad_enabled():
        return
    if tensor._anchor is not None and tensor.requires_grad and tensor.is_leaf:
        tensor._anchor.zero_()
    tensor._anchor = None
    note_write_without_data(tensor, _anchor_of(twin, tensor.device))


def _anchor_of(twin: ShardedTensor, device: torch.device) -> Tensor | None:
    if not twin.requires_grad:
        return None
    with torch.enable_grad():
        anchor: Tensor = _LeaveMesh.apply(twin.local_parts[0], twin.dtype, device)  # type: ignore[no-untyped-call]
    return anchor
