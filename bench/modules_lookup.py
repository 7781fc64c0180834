"""Lookups in a table that lies on many ranks: ours, torch's sharded ops, and an exchange written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.api import shard_parameter as torch_shard_parameter
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from bench.timing import Contender
from shardwise.geometry import ChunkSpec
from shardwise.nn import shard_parameter

OURS, TORCH, HAND = "ours", "torch's sharded", "by hand"


@dataclass(frozen=True)
class LookupCase:
    """A table, cut along `dim`, and what each rank looks up: ids, or bags of ids."""

    rows: int
    width: int
    ids: int
    bag: int
    dim: int
    backward: bool

    @property
    def name(self) -> str:
        what = "embedding" if self.bag == 0 else f"embedding_bag of {self.bag}"
        cut = "rows" if self.dim == 0 else "columns"
        return f"{what}, {cut}{', forward + backward' if self.backward else ''}"

    def module(self) -> nn.Module:
        """The same layer on every rank."""
        torch.manual_seed(0)
        if self.bag:
            return nn.EmbeddingBag(self.rows, self.width, mode="sum")
        return nn.Embedding(self.rows, self.width)

    def batch(self, rank: int) -> Tensor:
        """One rank's ids, some of them often, as in real data."""
        generator = torch.Generator().manual_seed(rank)
        drawn = torch.rand(self.ids, generator=generator).pow(2).mul(self.rows).long()
        return drawn.view(-1, self.bag) if self.bag else drawn


class HandLookup(torch.autograd.Function):
    """Rows of a table that is cut in equal runs of rows: distinct ids out, rows back, by three all-to-alls."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, ids: Tensor) -> Tensor:
        world, rank, length = dist.get_world_size(), dist.get_rank(), len(local)
        edges = torch.arange(1, world) * length
        counts = torch.diff(torch.searchsorted(ids, edges), prepend=torch.tensor([0]), append=torch.tensor([len(ids)]))
        asked = torch.empty_like(counts)
        dist.all_to_all_single(asked, counts)
        sends, receives = counts.tolist(), asked.tolist()
        wanted = ids.new_empty(sum(receives))
        dist.all_to_all_single(wanted, ids, receives, sends)
        ctx.rows, ctx.sends, ctx.receives, ctx.shape = wanted - rank * length, sends, receives, local.shape
        rows = local.new_empty(len(ids), local.shape[1])
        dist.all_to_all_single(rows, local.index_select(0, ctx.rows), sends, receives)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        got = grad.new_empty(len(ctx.rows), grad.shape[1])
        dist.all_to_all_single(got, grad.contiguous(), ctx.receives, ctx.sends)
        return grad.new_zeros(ctx.shape).index_add_(0, ctx.rows, got), None


def contenders(case: LookupCase) -> list[Contender]:
    """All ways to do a case, on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = case.batch(rank)
    ours, theirs = case.module(), case.module()
    shard_parameter(ours, "weight", ChunkSpec(case.dim, world))
    torch_shard_parameter(theirs, "weight", ChunkShardingSpec(case.dim, [f"rank:{r}/cpu" for r in range(world)]))
    ways = [Contender(OURS, _run(lambda: ours(ids), case)), Contender(TORCH, _run(lambda: theirs(ids), case))]
    if case.dim == 0:
        local = nn.Parameter(next(case.module().parameters()).detach().chunk(world)[rank].clone())
        ways.append(Contender(HAND, _run(lambda: _by_hand(local, ids), case)))
    return ways


def _by_hand(local: Tensor, ids: Tensor) -> Tensor:
    found, places = torch.unique(ids, return_inverse=True)
    rows = HandLookup.apply(local, found)
    return F.embedding_bag(places, rows, mode="sum") if ids.dim() == 2 else F.embedding(places, rows)


def _run(forward: Callable[[], Tensor], case: LookupCase) -> Callable[[Any], Tensor]:
    def run(_: Any) -> Tensor:
        with torch.set_grad_enabled(case.backward):
            result = forward()
        if case.backward:
            result.sum().backward()
        return result

    return run
