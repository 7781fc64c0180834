"""Expert parallelism: tokens go to the rank of their expert, in one exchange, and come back.

python examples/gallery/experts.py
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import Mesh, ModelPlan, explain, run_local, shard_module

RANKS, EXPERTS, WIDTH, HIDDEN = 2, 4, 8, 16
PLAN = ModelPlan(Mesh.of(ep=RANKS), {"up": "ep: S(0)", "down": "ep: S(0)"}, input_plan="ep: S(0)")


class Experts(nn.Module):
    """A mixture of experts as model libraries write it; it knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        order = ids.reshape(-1).argsort()
        ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = F.grouped_mm(x[order // 2], self.up, offs=ends).relu()
        rows = F.grouped_mm(rows, self.down, offs=ends) * weights.reshape(-1)[order, None]
        return rows[order.argsort()].view(*ids.shape, -1).sum(1)


def main() -> None:
    torch.manual_seed(0)
    dense, batch = Experts(), torch.randn(12, WIDTH)
    expected = dense(batch)
    expected.square().sum().backward()

    def body(comm: shardwise.Comm) -> tuple[bool, bool, str]:
        model = copy.deepcopy(dense)
        model.zero_grad()
        shard_module(model, PLAN)
        with explain() as log:
            found = model(batch.chunk(RANKS)[comm.rank])
            found.square().sum().backward()
        grad = model.up.grad.full_tensor()  # type: ignore[union-attr]
        same = torch.allclose(found.full_tensor(), expected, atol=1e-5)
        return same, torch.allclose(grad, dense.up.grad, atol=1e-4), str(log)  # type: ignore[arg-type]

    forward, backward, log = run_local(body, RANKS)[0]
    print(log)
    print("equal:", forward and backward)


if __name__ == "__main__":
    main()
