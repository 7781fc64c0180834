"""Is the notation taken wherever a spec is?"""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise import Comm, LayoutError, Mesh, MeshSpec, Replicate, Shard, run_local, shard
from shardwise.nn.plan import PlanError, match_patterns

X = torch.arange(24.0).reshape(4, 6)


def test_texts_are_taken_in_place_of_specs() -> None:
    def body(comm: Comm) -> None:
        rows = shard(X, "tp: S(0)")
        assert rows.sharding == MeshSpec(Mesh(("tp",), range(4)), (Shard(0),)).layout((4, 6))
        assert shard(X, "S(0)").sharding == rows.sharding
        square = shard(X, "on dp=2,tp=2: R, S(1)")
        assert square.sharding.spec == MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(1)))
        assert square.redistribute("dp: S(0)").sharding.spec.placements == (Shard(0), Replicate())
        assert square.redistribute("R, R").sharding.spec.placements == (Replicate(), Replicate())
        chunks = square.redistribute("as chunk(0) over 3,2,1,0")
        assert torch.equal(chunks.local_tensor(), X[3 - comm.rank : 4 - comm.rank])
        assert torch.equal(chunks.redistribute("tp: S(1)").full(), X)
        assert torch.equal(shardwise.from_local(X, "all: R", (4, 6)).full(), X)
        assert tuple(shardwise.zeros("tp: S(1)", 2, 8).local_tensor().shape) == (2, 2)

    run_local(body, 4)


def test_a_printed_tensor_is_taken_in_place_of_a_spec() -> None:
    """What `repr`, `draw` and the commands print is what every function that wants a layout takes."""

    def body(comm: Comm) -> None:
        rows = shard(X, "f32[4,6] on tp=2: S(0)")
        assert str(shardwise.TensorType("f32", rows.sharding)) in repr(rows)
        assert shard(X if comm.rank == 0 else None, "f32[4,6] on tp=2: S(0)").sharding == rows.sharding
        columns = rows.redistribute("f32[4,6] on tp=2: S(1)")
        assert columns.sharding == rows.redistribute("torch.float32[4,6] on tp=2: S(1)").sharding
        assert shardwise.redistribute_many([rows], ["[4,6] on tp=2: S(1)"])[0].sharding == columns.sharding
        made = shardwise.from_local(rows.local_tensor(), "f32[4,6] on tp=2: S(0)")
        assert made.sharding == rows.sharding
        zeros = shardwise.zeros("bf16[4,6] on tp=2: S(0)")
        assert (zeros.dtype, zeros.sharding) == (torch.bfloat16, rows.sharding)
        assert shardwise.zeros("[4,6] on tp=2: S(0)", dtype=torch.int8).dtype == torch.int8
        for wrong, own in (("f64[4,6]", "f32[4,6]"), ("f32[6,4]", "f32[4,6]")):
            for call in (lambda text: shard(X, text), rows.redistribute):
                with pytest.raises(
                    ValueError, match=rf"the text says {wrong}, and the tensor is {own}".replace("[", "\\[")
                ):
                    call(f"{wrong} on tp=2: S(0)")
        with pytest.raises(ValueError, match=r"the text says f32\[4,6\], and the tensor is f32\[6,4\]"):
            shardwise.zeros("f32[4,6] on tp=2: S(0)", 6, 4)

    run_local(body, 2)


def test_texts_that_do_not_say_enough_are_errors_on_every_rank() -> None:
    def body(comm: Comm) -> tuple[str, str]:
        with pytest.raises(LayoutError) as sizes:
            shard(X, "dp: S(0), tp: S(1)")
        with pytest.raises(LayoutError) as axis:
            shard(X, "on dp=2,tp=2: R, R").redistribute("pp: S(0)")
        return str(sizes.value), str(axis.value)

    for sizes, axis in run_local(body, 4):
        assert "'dp: S(0), tp: S(1)' does not say how large its axes are; write 'on dp=2,tp=2: R, S(0)'" in sizes
        assert "names the axis 'pp'; the mesh has dp, tp" in axis


def test_patterns_have_alternatives() -> None:
    parts = ("attn.q_proj", "attn.k_proj", "attn.o_proj", "mlp.up")
    names = [f"layers.{i}.{part}.weight" for i in range(2) for part in parts]
    found = match_patterns(["layers.*.attn.{q, k}_proj.weight", "layers.*.{attn.o_proj,mlp.up}.weight"], names)
    assert set(found) == set(names) and sum("{q, k}" in pattern for pattern in found.values()) == 4
    with pytest.raises(PlanError, match="a brace has no partner"):
        match_patterns(["layers.*.{q,k.weight"], names)
