"""A rule of five lines for an operator of your own, and a check that finds what is wrong with it.

python examples/gallery/own_operator.py
"""

import torch
from torch import Tensor

import shardwise
from shardwise import Mesh, MeshSpec, Replicate, Shard, check_sharding, register_sharding, run_local


@torch.library.custom_op("gallery::scale_rows", mutates_args=())
def scale_rows(x: Tensor, by: Tensor) -> Tensor:
    """Multiply each row by its number."""
    return x * by[:, None]


@scale_rows.register_fake
def _(x: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_sharding(torch.ops.gallery.scale_rows.default)
def rule(x, by):
    rows = ([Shard(0)], [Shard(0), Shard(0)])  # results, then inputs, along one axis of the mesh
    columns = ([Shard(1)], [Shard(1), Replicate()])
    return [rows, columns]


def main() -> None:
    x, by = torch.randn(6, 4), torch.randn(6)
    print(check_sharding(torch.ops.gallery.scale_rows.default, x, by))

    def body(comm: shardwise.Comm) -> bool:
        spec = MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(1)))
        found = scale_rows(shardwise.shard(x, spec), shardwise.shard(by, "on dp=2,tp=2: S(0), R"))
        return torch.equal(found.full_tensor(), scale_rows(x, by))

    print("equal:", all(run_local(body, 4)))


if __name__ == "__main__":
    main()
