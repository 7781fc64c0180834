"""Plain tensors mixed with sharded ones: an error that names the argument, and the two ways to say what is meant."""

from __future__ import annotations

import pytest
import torch

from shardwise import Mesh, MeshSpec, Replicate, Shard, plain_as_replicated, replicate, run_local, shard
from shardwise.comm import Comm
from shardwise.ops import MixedTensorsError

MESH = Mesh.of(dp=2, tp=2)
VALUES = torch.arange(32, dtype=torch.float64).reshape(8, 4)
SPEC = MeshSpec(MESH, (Shard(0), Replicate()))


def test_a_plain_tensor_is_refused_by_name() -> None:
    def body(comm: Comm) -> str:
        x = shard(VALUES, SPEC, src_rank=None)
        with pytest.raises(MixedTensorsError) as caught:
            torch.add(x, VALUES)
        return str(caught.value)

    for text in run_local(body, 4):
        assert "aten.add.Tensor got a plain tensor of shape (8, 4) as argument 'other'" in text
        assert "shardwise.replicate(t)" in text and "plain_as_replicated" in text


def test_both_ways_give_the_dense_result_and_gradient() -> None:
    def body(comm: Comm) -> None:
        x = shard(VALUES, SPEC, src_rank=None)
        for way in ("replicate", "like", "context"):
            plain = (VALUES + 1).requires_grad_()
            if way == "context":
                with plain_as_replicated():
                    product = x * plain
            else:
                product = x * (replicate(plain) if way == "replicate" else replicate(plain, x))
            assert torch.equal(product.full(), VALUES * plain)
            product.full().sum().backward()
            assert torch.equal(plain.grad, VALUES)

    run_local(body, 4)


def test_numbers_and_0_dim_tensors_need_no_words() -> None:
    def body(comm: Comm) -> None:
        x = shard(VALUES, SPEC, src_rank=None)
        assert torch.equal((x * 2 + torch.tensor(1.0)).full(), VALUES * 2 + 1)

    run_local(body, 4)


def test_two_replicated_tensors_without_a_mesh_compute_together() -> None:
    def body(comm: Comm) -> None:
        assert torch.equal((replicate(VALUES) + replicate(VALUES)).full(), VALUES * 2)

    run_local(body, 2)
