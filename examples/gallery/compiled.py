"""Compile a whole training step: forward, backward and optimizer become graphs of local tensors and moves.

python examples/gallery/compiled.py
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import shardwise
from shardwise import Mesh, ModelPlan, run_local, shard_module

PLAN = ModelPlan(
    Mesh.of(tp=2),
    {"0.*": "tp: S(0)", "2.weight": "tp: S(1)", "2.bias": "tp: R"},
    input_plan="replicated",
    output_plan="plain",
)


def make_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    batches = [torch.randn(4, 8, dtype=torch.float64) for _ in range(4)]
    step = make_step(copy.deepcopy(whole))
    expected = [step(batch).item() for batch in batches]

    def body(comm: shardwise.Comm) -> tuple[list[float], str]:
        model = copy.deepcopy(whole)
        shard_module(model, PLAN)
        run = shardwise.compile(make_step(model), backend="aot_eager")  # leave backend out for inductor
        return [run(batch).item() for batch in batches], str(run.explain())

    losses, log = run_local(body, 2)[0]
    print(log)
    for step_number, (ours, one) in enumerate(zip(losses, expected, strict=True), 1):
        print(f"step {step_number}  compiled {ours:.9f}  whole {one:.9f}")
    print("equal:", all(abs(a - b) < 1e-9 for a, b in zip(losses, expected, strict=True)))


if __name__ == "__main__":
    main()
