"""Torch's names for what a ShardedTensor has and does, with the meaning that DTensor gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, is_grad_enabled

from shardwise.comm import Comm, agree
from shardwise.comm.device_meshes import find_device_mesh
from shardwise.geometry import LayoutError, MeshSpec, Placement, Replicate
from shardwise.tensor.autograd_mixin import AttributesMixin
from shardwise.tensor.dispatch import on_local_tensors
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.moving.autograd import LayoutMove, dual_layout, tape_inputs, with_moved_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TorchNamesMixin(AttributesMixin):
    """`placements`, `device_mesh`, `to_local` and `full_tensor`."""

    comm: Comm
    _anchor: Tensor | None

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """What each mesh axis does, or None for layouts without a mesh."""
        spec = self.sharding.spec
        return spec.placements if isinstance(spec, MeshSpec) else None

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's DeviceMesh of this tensor's ranks; `sharding.spec.mesh` is ours, which needs no process group.

        The one that the tensor came from, else one is made: then every rank of the world has to ask.
        """
        return find_device_mesh(self._mesh_spec("device_mesh").mesh, self.device.type, self.comm)

    def _mesh_spec(self, name: str) -> MeshSpec:
        spec = self.sharding.spec
        if not isinstance(spec, MeshSpec):
            raise LayoutError(
                f"{name} needs a mesh, and this tensor is laid out by {spec!r}; redistribute it to a MeshSpec first"
            )
        return spec

    @on_local_tensors
    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's local tensor, on the tape; a tensor without elements where the rank has none.

        Gradients that reach it are read as those of this layout (the whole gradient of a replicated tensor, and of a
        pending sum). If each rank computes something else with it, they are in another one: `grad_placements` names it,
        as in `to_local(grad_placements=[Partial()])` for addends. `local_tensors()` returns several.

        >>> import torch
        >>> from shardwise.comm import run_local
        >>> from shardwise.geometry import Mesh, Partial
        >>> from shardwise.tensor import shard
        >>> def body(comm):
        ...     x = shard(torch.ones(2), MeshSpec(Mesh.of(dp=2), (Replicate(),))).requires_grad_()
        ...     (x.to_local(grad_placements=[Partial()]) * (comm.rank + 1)).sum().backward()
        ...     return x.grad.full().tolist()
        >>> run_local(body, 2)[0]
        [3.0, 3.0]
        """
        if len(self.local_parts) > 1:
            raise NotImplementedError(
                f"to_local() is for one local tensor, and rank {self.comm.rank} has {len(self.local_parts)}; use "
                "local_tensors() or local_shards()"
            )
        local = tape_inputs(self.local_parts, self._anchor, self.dtype, self.device)[0]
        if grad_placements is None:
            return local
        layout = MeshSpec(self._mesh_spec("grad_placements").mesh, grad_placements).layout(self.sharding.shape)
        agree(self.comm, {"grad_placements": format_layout_text(layout)}, label="to_local")
        dual = dual_layout(self.sharding)
        if layout == dual or not is_grad_enabled() or not local.requires_grad:
            return local
        return with_moved_gradient(LayoutMove(layout, dual, self.comm, self.dtype, "gradient of to_local"), local)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor on every rank, as `full()`; `grad_placements` as for `to_local`."""
        if grad_placements is None:
            whole: Tensor = self.full()
            return whole
        mesh = self._mesh_spec("grad_placements").mesh
        spread = self.redistribute(MeshSpec(mesh, (Replicate(),) * mesh.ndim), label="full_tensor")
        local: Tensor = spread.to_local(grad_placements=grad_placements)
        return local.clone() if any(local is own for own in self.local_parts) else local
