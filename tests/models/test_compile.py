"""A language model of transformers as a graph: `torch.compile` of the sharded model gives its losses and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing import assert_close

from shardwise import Comm, Mesh, ShardedTensor, run_local, shard_module
from shardwise.hf import plan
from tests.dense import numbers
from tests.models.environment import import_or_skip

transformers = import_or_skip("transformers")


def make_model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    for i, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, dtype=torch.float32) * 0.1
    shard_module(model, plan(model, Mesh.of(tp=2)))
    return model


def full(value: Any) -> Any:
    return value.detach().full() if isinstance(value, ShardedTensor) else value.detach()


def test_a_model_of_transformers_is_one_graph() -> None:
    def body(comm: Comm) -> str:
        models = [make_model(), make_model()]
        compiled: Any = torch.compile(models[0], backend="aot_eager")
        ids = torch.arange(24).reshape(2, 12) % 64
        for _ in range(2):
            losses = [run(input_ids=ids, labels=ids).loss for run in (compiled, models[1])]
            for loss in losses:
                loss.backward()
            assert_close(*map(full, losses))
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert_close(full(p.grad), full(q.grad), rtol=1e-4, atol=1e-6)
        return str(compiled.forward.explain())

    for text in run_local(body, 2, timeout=100.0):
        assert "kind 0, 2 calls" in text and "without a graph" not in text
