"""A trainer and a server in two jobs: after every step the server generates text with the new weights.

    torchrun --nproc-per-node 4 --master-port 29501 examples/sync_weights.py trainer
    torchrun --nproc-per-node 2 --master-port 29502 examples/sync_weights.py server

Start them in any order, in two terminals. The trainer's weights are cut over fsdp=2 and tp=2. The server has other
names and fused weights, cut over tp=2: `NAMES` says how they are made of the trainer's. To compare, `python
examples/sync_weights.py alone` does all of it in one process, and prints the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise

VOCABULARY, WIDTH, HEADS, INNER, LAYERS, BATCH, LENGTH = 32, 32, 4, 64, 2, 8, 12
PROMPT, NEW_TOKENS = (1, 2, 3), 6
PLAN = {
    "layers.*.q.weight": "fsdp: S(1), tp: S(0)",
    "layers.*.k.weight": "fsdp: S(1), tp: S(0)",
    "layers.*.v.weight": "fsdp: S(1), tp: S(0)",
    "layers.*.o.weight": "fsdp: S(0), tp: S(1)",
    "layers.*.gate.weight": "fsdp: S(1), tp: S(0)",
    "layers.*.up.weight": "fsdp: S(1), tp: S(0)",
    "layers.*.down.weight": "fsdp: S(0), tp: S(1)",
    "embed.weight": "fsdp: S(0)",
    "head.weight": "fsdp: S(0)",
}
# What the server has, made of what the trainer has. A group for each rank of tp: its rows of q, of k and of v.
TP = 2
NAMES = {
    "rename": {"embed.weight": "embed", "head.weight": "head", "layers.*.o.weight": "h.*.o"},
    "change": [
        {"fuse": [f"layers.*.{n}.weight" for n in "qkv"], "to": "h.*.qkv", "groups": TP},
        {"fuse": ["layers.*.gate.weight", "layers.*.up.weight"], "to": "h.*.gate_up", "groups": TP},
        {"rename": "layers.*.down.weight", "to": "h.*.down"},
    ],
}
SERVED = {"qkv": (3 * WIDTH, WIDTH), "o": (WIDTH, WIDTH), "gate_up": (2 * INNER, WIDTH), "down": (WIDTH, INNER)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = normed(x)
        x = x + self.o(attend(self.q(y), self.k(y), self.v(y), HEADS))
        y = normed(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A small decoder in the manner of Llama."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(normed(x)).flatten(0, 1), targets.flatten())


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Causal attention of these heads."""
    q, k, v = (each.reshape(*each.shape[:-1], heads, WIDTH // HEADS).transpose(-2, -3) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def trainer(address: str, token: str, steps: int) -> None:
    model = Llama()
    mesh = shardwise.Mesh.of(fsdp=dist.get_world_size() // TP, tp=TP)
    shardwise.shard_module(model, shardwise.ModelPlan(mesh, PLAN, input_plan="fsdp: S(0)"))
    optimizer = shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.01)
    mine = mesh.coordinates(dist.get_rank())["fsdp"]
    with shardwise.sync.publish(model, address, token=token, name="trainer") as link:
        while not link.members:  # only to show every step in the server: a trainer does not have to wait
            link.drain(timeout=1.0)
        for step in range(steps):
            loss = model(*(part.tensor_split(mesh.axis_size("fsdp"))[mine] for part in batch_of(step)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            link.push(step)
            link.drain(timeout=60.0)
            value = float(loss.full().detach())
            if dist.get_rank() == 0:
                print(f"step {step}  loss {value:.5f}", flush=True)


def server(address: str, token: str, steps: int) -> None:
    ranks = dist.get_world_size()
    assert ranks == TP, f"NAMES fuses for {TP} ranks; start so many"
    cuts = {"qkv": "S(0)", "o": "S(1)", "gate_up": "S(0)", "down": "S(1)"}
    shapes = {f"h.{i}.{name}": shape for i in range(LAYERS) for name, shape in SERVED.items()}
    specs = {name: f"on tp={TP}: {cuts[name.split('.')[2]]}" for name in shapes}
    weights = {name: shardwise.zeros(specs[name], shape) for name, shape in shapes.items()}
    whole = {name: torch.zeros(VOCABULARY, WIDTH) for name in ("embed", "head")}
    local = {name: tensor.local_tensor() for name, tensor in weights.items()} | whole
    with shardwise.sync.subscribe({**weights, **whole}, address, token=token, names=NAMES, name="server") as link:
        while link.version != steps - 1:
            step = link.pull()
            if step is None:
                raise SystemExit(f"no new weights: {link.problem}")
            tokens = generate(local, ranks)
            if dist.get_rank() == 0:
                print(f"step {step}  tokens {tokens}", flush=True)


def generate(weights: Mapping[str, Tensor], ranks: int) -> list[int]:
    """Continue the prompt with this rank's parts of the fused weights, as an inference engine does."""
    ids = list(PROMPT)
    for _ in range(NEW_TOKENS):
        x = weights["embed"][torch.tensor(ids)]
        for i in range(LAYERS):
            q, k, v = (normed(x) @ weights[f"h.{i}.qkv"].t()).chunk(3, dim=-1)
            x = x + summed(attend(q, k, v, HEADS // ranks) @ weights[f"h.{i}.o"].t(), ranks)
            gate, up = (normed(x) @ weights[f"h.{i}.gate_up"].t()).chunk(2, dim=-1)
            x = x + summed((F.silu(gate) * up) @ weights[f"h.{i}.down"].t(), ranks)
        ids.append(int((normed(x)[-1] @ weights["head"].t()).argmax()))
    return ids


def summed(x: Tensor, ranks: int) -> Tensor:
    if ranks > 1:
        dist.all_reduce(x)
    return x


def alone(steps: int) -> None:
    """The same in one process, with plain tensors and torch only."""
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(*batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = model.state_dict()
        fused = {"embed": state["embed.weight"], "head": state["head.weight"]}
        for i in range(LAYERS):
            w = {name: state[f"layers.{i}.{name}.weight"] for name in ("q", "k", "v", "o", "gate", "up", "down")}
            fused[f"h.{i}.qkv"] = torch.cat([w["q"], w["k"], w["v"]])
            fused[f"h.{i}.gate_up"] = torch.cat([w["gate"], w["up"]])
            fused |= {f"h.{i}.o": w["o"], f"h.{i}.down": w["down"]}
        print(f"step {step}  loss {float(loss.detach()):.5f}  tokens {generate(fused, 1)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["trainer", "server", "alone"])
    parser.add_argument("--address", default="tcp://127.0.0.1:29600")
    parser.add_argument("--token", default="a secret of both jobs")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    if given.role == "alone":
        alone(given.steps)
        return
    dist.init_process_group("gloo")
    {"trainer": trainer, "server": server}[given.role](given.address, given.token, given.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
