"""Models of transformers in a trainer and in a server of other ranks: their weights need no map of names."""

from __future__ import annotations

import threading

import pytest
import torch

import shardwise
from tests.sync.worlds import TOKEN, free_address, run_worlds

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-models")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64}
MAKE = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "tied embeddings": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    ),
    "stacked experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4)
    ),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_served_model_gives_the_logits_of_the_trained_one(kind: str) -> None:
    address, ids, one_at_a_time = free_address(), torch.arange(8)[None], threading.Lock()

    def sharded(seed: int, mesh: shardwise.Mesh) -> torch.nn.Module:
        with one_at_a_time:  # ranks are threads, and share torch's generator
            torch.manual_seed(seed)
            model = MAKE[kind]()
        return shardwise.shard_module(model, shardwise.hf.plan(model, mesh))

    def train(comm: shardwise.Comm) -> None:
        with shardwise.sync.publish(sharded(1, shardwise.Mesh.of(fsdp=2, tp=2)), address, token=TOKEN) as link:
            link.push(1)
            while not link.removed:
                link.drain(0.2)

    def serve(comm: shardwise.Comm) -> torch.Tensor:
        model = sharded(2, shardwise.Mesh.of(tp=2))
        with shardwise.sync.subscribe(model, address, token=TOKEN, verify=True) as link:
            assert link.pull(60) == 1
        logits = model(ids).logits
        return logits.full() if isinstance(logits, shardwise.ShardedTensor) else logits

    found = run_worlds((train, 4), (serve, 2))[1]
    torch.manual_seed(1)
    for logits in found:
        torch.testing.assert_close(logits, MAKE[kind]()(ids).logits if logits is found[0] else found[0])
