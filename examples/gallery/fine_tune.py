"""Fine-tune a model of transformers on 4 ranks, split over two axes, and save it for `from_pretrained`.

python examples/gallery/fine_tune.py

The model is small and random, so that nothing is downloaded. `shardwise.hf.load(None, folder, mesh)` loads a real one.
"""

import copy
import tempfile

import torch
import transformers

import shardwise.hf
from shardwise import Mesh, run_local, shard_module

MESH = Mesh.of(dp=2, tp=2)
CONFIG = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def train(model: torch.nn.Module, ids: torch.Tensor, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(CONFIG)
    ids = torch.randint(0, CONFIG.vocab_size, (4, 12))
    prompt = ids[:1, :3]
    folder = tempfile.TemporaryDirectory()

    def body(comm: shardwise.Comm) -> list[float]:
        model = copy.deepcopy(whole)
        plan = shardwise.hf.plan(model, MESH)  # tp splits layers, dp splits the batch; print(plan) shows it
        shard_module(model, plan)
        losses = train(model, ids.chunk(2)[MESH.coordinates(comm.rank)["dp"]])
        model.save_pretrained(folder.name)  # on every rank; one of them writes
        return losses

    losses = run_local(body, 4)[0]
    expected = train(whole, ids)
    for step, (ours, one) in enumerate(zip(losses, expected, strict=True), 1):
        print(f"step {step}  sharded {ours:.6f}  whole {one:.6f}")
    with folder:
        saved = transformers.LlamaForCausalLM.from_pretrained(folder.name)
    tokens = [m.generate(prompt, max_new_tokens=6, do_sample=False).tolist() for m in (saved, whole)]
    print("tokens of the saved model:", *tokens[0][0])
    print("equal:", tokens[0] == tokens[1] and all(abs(a - b) < 1e-4 for a, b in zip(losses, expected, strict=True)))


if __name__ == "__main__":
    main()
