"""`linear` of plain inputs with a sharded weight: each rank passes its own rows and gets its own result.

Of two strategies the one that moves fewer bytes is chosen, by numbers that all ranks know:

1. the weight goes to every rank, and each multiplies its own rows; gradients of the weight are summed in backward;
2. the rows of all ranks form one sharded tensor, the engine multiplies it with the weight in its layout, and each rank
   gets its rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm, DisagreementError
from shardwise.geometry import Mesh, MeshSpec, Shard
from shardwise.nn.lookup import as_matrix, default_implementation, is_local_batch
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import mesh_view
from shardwise.tensor.dispatch import register_function
from shardwise.tensor.move import move_to, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_linear_of_sharded = default_implementation(F.linear)


@register_function(F.linear)
def _linear(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    if _is_local_linear(*args, **kwargs):
        return _linear_local_rows(*args, **kwargs)
    return _linear_of_sharded(types, args, kwargs, comm)


def _is_local_linear(input: Any, weight: Any, bias: Any = None) -> bool:
    return is_local_batch((input,), (weight, bias))


def _linear_local_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    mesh = _sharding_mesh(weight) if isinstance(weight, ShardedTensor) else None
    result = _linear_over_mesh(input, weight, mesh) if mesh is not None and isinstance(weight, ShardedTensor) else None
    if result is None:
        return F.linear(input, _gather_parameter(weight), None if bias is None else _gather_parameter(bias))
    return result if bias is None else result + _gather_parameter(bias)


def _gather_parameter(parameter: Tensor) -> Tensor:
    """All of a parameter, its gradients summed over the ranks."""
    if not isinstance(parameter, ShardedTensor):
        return parameter
    comm = parameter.comm
    dst = replicated_layout(tuple(parameter.shape), comm.ranks)
    locals_, anchor = move_to(parameter, dst, "linear")
    return vary_along(wrap(dst, locals_, comm, dtype=parameter.dtype, anchor=anchor), dst, (0,))


def _sharding_mesh(weight: ShardedTensor) -> Mesh | None:
    """The one axis over all ranks that cuts the weight, if it is laid out so."""
    view = mesh_view(weight.sharding)
    if view is None or view.mesh.ndim != 1 or set(view.mesh.ranks.tolist()) != set(weight.comm.ranks):
        return None
    return view.mesh if isinstance(view.placements[0], Shard) and weight.comm.world_size > 1 else None


def _linear_over_mesh(input: Tensor, weight: ShardedTensor, mesh: Mesh) -> Tensor | None:
    """The second strategy, or None where the first one moves less."""
    comm, rows = weight.comm, as_matrix(input)
    own = torch.tensor([*rows.shape, int(input.requires_grad)], device=comm.device)
    told = dict(zip(comm.ranks, (t.tolist() for t in comm.all_gather(own, label="linear")), strict=True))
    _check_widths({r: t[1] for r, t in told.items()}, weight)
    total = sum(t[0] for t in told.values())
    if total * sum(weight.shape) >= weight.numel():
        return None
    if any(t[2] for t in told.values()) and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # every rank takes part in the backward pass of the others
    spec = MeshSpec(mesh, (Shard(0, sizes=tuple(told[r][0] for r in mesh.ranks.tolist())),))
    batch = wrap(spec.layout((total, weight.shape[1])), (rows.contiguous(),), comm)
    product: Any = F.linear(batch, weight)
    result = move_to(product, spec.layout((total, weight.shape[0])), "linear")[0][0]
    return result.reshape(*input.shape[:-1], weight.shape[0])


def _check_widths(widths: dict[int, int], weight: ShardedTensor) -> None:
    wrong = {r: w for r, w in widths.items() if w != weight.shape[1]}
    if wrong:
        raise DisagreementError(
            f"linear: a weight of shape {tuple(weight.shape)} takes inputs of width {weight.shape[1]}; the ranks "
            f"{sorted(wrong)} pass {sorted(set(wrong.values()))}"
        )
