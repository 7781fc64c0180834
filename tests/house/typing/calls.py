"""Calls that a type checker takes, and calls that it refuses: each of these has an `ignore` that is needed."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate as TorchReplicate

import shardwise
from shardwise import ChunkSpec, Mesh, MeshSpec, Replicate, Shard, ShardedTensor, from_local, redistribute_many, shard

x = torch.ones(8, 4)
mesh = Mesh.of(dp=2, tp=2)


def right() -> None:
    """What the documentation shows."""
    a = shard(x, "on tp=4: S(0)")
    assert_type(a, ShardedTensor)
    shard(x, ChunkSpec(0, 4), None)
    shard(None, a.sharding, 1, comm=a.comm)
    shard(x, mesh, [Shard(0), Replicate()])
    shard(x, mesh, placements="S(0), R")
    from_local(x, "f32[8,4] on tp=1: S(0)")
    from_local([x], ChunkSpec(0, 4), (8, 4))
    from_local(x, mesh, [Shard(0), Replicate()], shape=(8, 4))
    MeshSpec(mesh, (Shard(0), TorchReplicate()))
    Mesh((2, 2), ("dp", "tp"))
    shardwise.ones_like(a, dtype=torch.int64)
    assert_type(a.redistribute("S(1)"), ShardedTensor)
    assert_type(a.redistribute("S(1)", async_op=True).wait(), ShardedTensor)
    assert_type(redistribute_many([a], ["S(1)"]), list[ShardedTensor])
    assert_type(a.full(), Tensor)
    assert_type(a.gather_to(0), Tensor | None)
    shardwise.zeros("tp: S(0)", 4, 4)
    assert_type(shardwise.run_local(lambda: 1, 2), list[int])


def wrong(a: ShardedTensor) -> None:
    """What a newcomer may write."""
    shard(x, 3.7, "banana", comm=17)  # type: ignore[call-overload]
    shard(x, 3.7)  # type: ignore[call-overload]
    shard(x, "tp: S(0)", "banana")  # type: ignore[call-overload]
    shard(x, "tp: S(0)", comm=17)  # type: ignore[call-overload]
    shard(x, [Shard(0)])  # type: ignore[call-overload]
    shard(x, mesh)  # type: ignore[call-overload]
    shard([1.0], "tp: S(0)")  # type: ignore[call-overload]
    from_local(x, 3)  # type: ignore[call-overload]
    from_local("x", "tp: S(0)")  # type: ignore[arg-type]
    a.redistribute(7)  # type: ignore[call-overload]
    a.redistribute("R", max_buffer_bytes="1 MB")  # type: ignore[call-overload]
    redistribute_many([x], ["R"])  # type: ignore[list-item]
    a.gather_to("all")  # type: ignore[arg-type]
    shardwise.zeros("tp: S(0)", 4.5)  # type: ignore[arg-type]
    shardwise.draw(3)  # type: ignore[arg-type]
    shardwise.run_local(print, "2")  # type: ignore[arg-type]
    Mesh.of(dp="two")  # type: ignore[arg-type]
    shardwise.plan_transfer(3, 4, itemsize=4)  # type: ignore[arg-type]
    shardwise.save({"x": x}, "folder", comm=17)  # type: ignore[call-overload]
    shardwise.load({"x": x}, "folder", comm="world")  # type: ignore[arg-type]
    MeshSpec(3, [Shard(0)])  # type: ignore[arg-type]
    MeshSpec(mesh, 3)  # type: ignore[arg-type]
    Mesh(object(), object())  # type: ignore[arg-type]
    shardwise.full("tp: S(0)", 4.5, 1)  # type: ignore[arg-type]
    shardwise.zeros_like(a, dtype="f32")  # type: ignore[arg-type]
    shardwise.register_sharding(3)  # type: ignore[call-overload]
    shardwise.describe_plan({"w": "S(0)"}, torch.nn.Linear(2, 2))  # type: ignore[arg-type]
