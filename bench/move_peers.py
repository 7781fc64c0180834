"""The others: the raw collective that moves the same bytes, DTensor, and torch's ShardedTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.api import _shard_tensor
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from bench.move_cases import RANKS, MoveCase, Shape
from bench.timing import Contender
from shardwise.geometry import Layout, MeshSpec, Partial, Shard

FRESH, READY = "raw, fresh buffers", "raw, ready buffers"
NATIVE = "gloo reduce_scatter"
DTENSOR, SHARDED = "DTensor", "torch ShardedTensor"
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def raw_contenders(case: MoveCase, held: tuple[Tensor, ...], result: int, values: Tensor) -> list[Contender]:
    """The raw collective from flat memory into fresh memory of `result` elements, and into memory that is ready."""
    kind, *peers = case.raw.split()
    source = held[0].reshape(-1) if held else torch.empty(0)
    if kind == "scatter" and dist.get_rank() == 0:
        source = values.reshape(-1)
    need = source.numel() if kind == "exchange_and_sum" else result
    move = _swap(*map(int, peers)) if kind == "swap" else _MOVES[kind]
    ready = torch.ones(need)
    found = [
        Contender(FRESH, lambda _: move(torch.empty(need), source)),
        Contender(READY, lambda _: move(ready, source)),
    ]
    if kind == "exchange_and_sum":
        found.append(Contender(NATIVE, lambda _: _reduce_scatter(torch.empty(result), source)))
    return found


def _all_to_all(out: Tensor, source: Tensor) -> Tensor:
    dist.all_to_all_single(out, source)
    return out


def _exchange_and_sum(out: Tensor, source: Tensor) -> Tensor:
    dist.all_to_all_single(out, source)
    return out.view(RANKS, -1).sum(0)


def _swap(a: int, b: int) -> Callable[[Tensor, Tensor], Tensor]:
    def move(out: Tensor, source: Tensor) -> Tensor:
        rank = dist.get_rank()
        if rank not in (a, b):
            return out.copy_(source)
        other = b if rank == a else a
        pair = [dist.P2POp(dist.isend, source, other), dist.P2POp(dist.irecv, out, other)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return out

    return move


def _all_gather(out: Tensor, source: Tensor) -> Tensor:
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(out, source)
    return out


def _reduce_scatter(out: Tensor, source: Tensor) -> Tensor:
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(out, source)
    return out


def _all_reduce(out: Tensor, source: Tensor) -> Tensor:
    dist.all_reduce(out.copy_(source))
    return out


def _gather(out: Tensor, source: Tensor) -> Tensor:
    dist.gather(source, list(out.chunk(RANKS)) if dist.get_rank() == 0 else None)
    return out


def _scatter(out: Tensor, source: Tensor) -> Tensor:
    dist.scatter(out, list(source.chunk(RANKS)) if dist.get_rank() == 0 else None)
    return out


_MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all_to_all": _all_to_all,
    "exchange_and_sum": _exchange_and_sum,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "scatter": _scatter,
}


def device_mesh(grid: tuple[int, ...]) -> DeviceMesh:
    """A mesh of all ranks, made once: making one is collective."""
    if grid not in _meshes:
        _meshes[grid] = init_device_mesh("cpu", grid, mesh_dim_names=("x", "y")[: len(grid)])
    return _meshes[grid]


def dtensor_contenders(case: MoveCase, shape: Shape, held: tuple[Tensor, ...], values: Tensor) -> list[Contender]:
    """DTensor's way, where it supports the case."""
    if case.grid is None:
        return []
    mesh = device_mesh(case.grid)
    if case.verb == "shard":
        return [Contender(DTENSOR, lambda _: _parts(distribute_tensor(values, mesh, [DShard(0)])))]
    src, dst = case.layouts(shape)
    size = torch.Size(shape)
    whole = DTensor.from_local(held[0], mesh, _placements(src), run_check=False, shape=size, stride=(shape[1], 1))
    if case.verb == "gather":
        return [Contender(DTENSOR, lambda _: (whole.full_tensor(),)[: dist.get_rank() == 0])]
    return [Contender(DTENSOR, lambda _: _parts(whole.redistribute(placements=_placements(dst))))]


def _parts(tensor: DTensor) -> tuple[Tensor, ...]:
    return (tensor.to_local(),)


def _placements(layout: Layout) -> list[Any]:
    assert isinstance(layout.spec, MeshSpec)
    return [
        DShard(p.dim) if isinstance(p, Shard) else DPartial("sum") if isinstance(p, Partial) else DReplicate()
        for p in layout.spec.placements
    ]


def sharded_tensor_contenders(
    case: MoveCase, shape: Shape, held: tuple[Tensor, ...], values: Tensor
) -> list[Contender]:
    """The way of torch's ShardedTensor, where it supports the case."""
    rows = chunk_spec(0, range(RANKS))
    if case.verb == "shard":
        return [Contender(SHARDED, lambda _: _locals(_shard_tensor(values, rows)))]
    if case.verb == "gather":
        tensor = make_torch_sharded(held[0], shape)
        return [Contender(SHARDED, lambda _: _gather_to_first(tensor, shape))]
    if not case.reshard:
        return []
    target = chunk_spec(1, range(RANKS)) if case.raw == "all_to_all" else chunk_spec(0, (1, 0, 2, 3))
    return [
        Contender(SHARDED, lambda st: _locals(st.reshard(target)), prepare=lambda: make_torch_sharded(held[0], shape))
    ]


def _gather_to_first(tensor: ShardedTensor, shape: Shape) -> tuple[Tensor, ...]:
    out = torch.empty(shape) if dist.get_rank() == 0 else None
    tensor.gather(0, out)
    return () if out is None else (out,)


def chunk_spec(dim: int, ranks: Sequence[int]) -> ChunkShardingSpec:
    """torch's spec of chunks over these ranks."""
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{r}/cpu" for r in ranks])


def make_torch_sharded(held: Tensor, shape: Shape) -> ShardedTensor:
    """Rows over all ranks, of copies of nothing: the local tensor is shared."""
    shard = TorchShard.from_tensor_and_offsets(held, [held.shape[0] * dist.get_rank(), 0], dist.get_rank())
    return init_from_local_shards([shard], *shape)


def _locals(tensor: ShardedTensor) -> tuple[Tensor, ...]:
    return tuple(shard.tensor for shard in tensor.local_shards())
