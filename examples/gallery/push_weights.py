"""Push weights from a trainer to a server after every step: other ranks, another layout, fused names.

python examples/gallery/push_weights.py
"""

import copy
import queue
import threading

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise import Mesh, ModelPlan, run_local, shard_module

STEPS, WIDTH, TOKEN = 3, 8, "a secret of both sides"
PLAN = ModelPlan(Mesh.of(fsdp=4), {"**": "fsdp: S(0)"}, input_plan="replicated", output_plan="plain")
# The server has one tensor "gate_up" where the trainer has two. "groups": each of its 2 ranks gets rows of both.
NAMES = {"change": [{"fuse": ["gate.weight", "up.weight"], "to": "gate_up", "groups": 2}]}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 16, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def train(whole: nn.Module, batch: Tensor, addresses: queue.Queue[str]) -> None:
    model = shard_module(copy.deepcopy(whole), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with shardwise.sync.publish(model, "tcp://127.0.0.1:0", token=TOKEN) as link:
        addresses.put(link.address)  # two jobs agree on an address with a port, such as tcp://HOST:29600
        for number in range(1, STEPS + 1):
            step(model, optimizer, batch)
            link.push(number)  # copies the weights and returns: the next step runs while servers read
        while not link.members:
            link.drain(timeout=0.1)  # no server was there yet
        link.drain(timeout=30)


def serve(comm: shardwise.Comm, address: str, batch: Tensor) -> tuple[int, Tensor]:
    weights = {"gate_up": shardwise.zeros("on tp=2: S(0)", 32, WIDTH, dtype=torch.float64)}
    with shardwise.sync.subscribe(weights, address, token=TOKEN, names=NAMES) as link:
        number = 0
        while number < STEPS:
            number = link.pull(timeout=30) or number  # all tensors of one step, or none
    gate, up = weights["gate_up"].local_tensor().chunk(2)
    return number, F.silu(batch @ gate.T) * (batch @ up.T)  # the columns of this rank


def main() -> None:
    torch.manual_seed(0)
    whole, batch = Gated(), torch.randn(4, WIDTH, dtype=torch.float64)
    addresses: queue.Queue[str] = queue.Queue()
    trainer = threading.Thread(target=run_local, args=(train, 4, whole, batch, addresses))  # else: a job of its own
    trainer.start()
    served = run_local(serve, 2, addresses.get(), batch)
    trainer.join()

    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(STEPS):
        step(whole, optimizer, batch)
    print("the server has the weights of step", served[0][0])
    print("equal:", torch.allclose(torch.cat([columns for _, columns in served], 1), whole(batch)))


if __name__ == "__main__":
    main()
