"""torch.masked works on ShardedTensors: it asks `tensor.layout` for torch's kind of layout, which is torch.strided."""

from typing import Any

import pytest
import torch

from shardwise import Mesh, MeshSpec, Replicate, Shard, run_local, shard

SPECS = {
    "rows": MeshSpec(Mesh.of(tp=2), (Shard(0),)),
    "columns": MeshSpec(Mesh.of(tp=2), (Shard(1, sizes=(1, 3)),)),
    "copies": MeshSpec(Mesh.of(tp=2), (Replicate(),)),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("function", ["sum", "mean", "amax", "prod", "norm"])
def test_masked_reductions_equal_those_of_whole_tensors(function: str, name: str) -> None:
    values = torch.arange(20.0).reshape(5, 4) / 7 + 1
    mask = torch.arange(20).reshape(5, 4) % 3 != 0
    reduce: Any = getattr(torch.masked, function)
    order = (2.0,) if function == "norm" else ()
    want = reduce(values, *order, dim=1, mask=mask)

    def body(comm: Any) -> torch.Tensor:
        x, m = shard(values, SPECS[name]), shard(mask, SPECS[name])
        assert x.layout == torch.strided
        return reduce(x, *order, dim=1, mask=m).full()

    for found in run_local(body, 2):
        torch.testing.assert_close(found, want)
