"""Mixture-of-experts models of transformers, unchanged and with default settings, train as on one process.

Each model has two layers of small random weights. Loss, every gradient and the parameters after two steps are compared
with those of the dense model, in layouts of experts (ep), columns (tp), batches (dp) and all parameters (fsdp).
"""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise.hf
from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, run_local, shard_module

with warnings.catch_warnings(action="ignore"):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-models")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TIMEOUT = 120.0
COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    max_position_embeddings=32,
)
LATENT: dict[str, Any] = dict(
    COMMON,
    num_key_value_heads=4,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    moe_intermediate_size=16,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(COMMON, num_local_experts=4, output_router_logits=True)),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(COMMON, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    ),
    "qwen3_moe": ("Qwen3Moe", dict(COMMON, num_experts=4, moe_intermediate_size=16, head_dim=4)),
    "deepseek_v2": ("DeepseekV2", dict(LATENT, topk_method="group_limited_greedy")),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
EXPERT_COLUMNS = {"**.experts.gate_up_proj": "tp: S(1) groups(i,i)", "**.experts.down_proj": "tp: S(2)"}
EXPERTS = {"**.experts.*_proj": "ep: S(0)"}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, str], str]] = {
    "tp2": ({"tp": 2}, EXPERT_COLUMNS, "replicated"),
    "dp2": ({"dp": 2}, {}, "dp: S(0)"),
    "fsdp2": ({"fsdp": 2}, {"**": "S(0)"}, "fsdp: S(0)"),
    "ep2": ({"ep": 2}, EXPERTS, "replicated"),
    "ep2 of batches": ({"ep": 2}, EXPERTS, "ep: S(0)"),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, EXPERT_COLUMNS, "dp: S(0)"),
    "dp2 x ep2": ({"dp": 2, "ep": 2}, EXPERTS, "dp: S(0), ep: S(0)"),
}
IDS = torch.randint(0, 64, (4, 7), generator=torch.Generator().manual_seed(1))


def make_model(name: str) -> nn.Module:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gate.weight"):
                parameter.normal_()  # routers that start from zeros send every token to the same experts
    return model


def attention_plan(name: str) -> dict[str, str]:
    latent = name.startswith("deepseek")
    columns, rows = (("q_b_proj", "kv_b_proj") if latent else ("q_proj", "k_proj", "v_proj")), "o_proj"
    weights = {f"**.self_attn.{c}.weight": "tp: S(0)" for c in columns} | {f"**.self_attn.{rows}.weight": "tp: S(1)"}
    biases = {f"**.self_attn.{c}.bias": "tp: S(0)" for c in columns} if name == "qwen2_moe" else {}
    return weights | biases


def train(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of two steps, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == 0:
            first = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(whole(loss))
    return losses, first


def whole(value: Any) -> Tensor:
    full = value.full() if isinstance(value, ShardedTensor) else value
    assert isinstance(full, Tensor)
    return full.detach().clone()


def own_part(ids: Tensor, mesh: Mesh, input_plan: str, rank: int) -> Tensor:
    for text in input_plan.split(",") if ":" in input_plan else []:
        axis = text.split(":")[0].strip()
        ids = ids.chunk(mesh.shape[mesh.axis_index(axis)])[mesh.coordinates(rank)[axis]]
    return ids


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_the_dense_model(name: str, layout: str) -> None:
    axes, patterns, input_plan = LAYOUTS[layout]
    mesh = Mesh.of(**axes)
    if "tp" in axes:
        patterns = {**patterns, **attention_plan(name)}
    width = 32 if name == "mixtral" else 16
    plan = ModelPlan(mesh, patterns, lengths={"i": width}, input_plan=input_plan)
    dense = make_model(name)
    losses, gradients = train(dense, IDS)
    parameters = {n: whole(p) for n, p in dense.named_parameters()}
    assert len(gradients) == len(parameters)
    start = make_model(name)

    def body(comm: Comm) -> None:
        model = copy.deepcopy(start)
        shard_module(model, plan, process_group=comm)
        assert all(isinstance(p, ShardedTensor) for p in model.parameters())
        found, grads = train(model, own_part(IDS, mesh, input_plan, comm.rank))
        assert_close(found, losses, rtol=1e-5, atol=1e-6)
        assert_close(grads, gradients, rtol=1e-4, atol=1e-6)
        after = {n: whole(p) for n, p in model.named_parameters()}
        assert_close(after, parameters, rtol=1e-3, atol=1e-4)

    run_local(body, math.prod(mesh.shape), timeout=TIMEOUT)


@pytest.mark.parametrize("name", MODELS)
def test_default_experts_are_grouped_products(name: str) -> None:
    """What this file is about: the models' own choice of how experts are computed."""
    assert make_model(name).config._experts_implementation == "grouped_mm"


OWN_PLANS = {
    "tp2": Mesh.of(tp=2),
    "ep2": Mesh.of(ep=2),
    "dp2 x tp2": Mesh.of(dp=2, tp=2),
    "dp2 x ep2": Mesh.of(dp=2, ep=2),
}


@pytest.mark.parametrize("layout", OWN_PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_generates_saves_and_loads_by_its_own_plan(name: str, layout: str, tmp_path: Path) -> None:
    mesh, start = OWN_PLANS[layout], make_model(name).eval()
    start.config.output_router_logits = False  # type: ignore[union-attr]  # Mixtral's balancing loss is for training
    greedy: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = start.generate(IDS, **greedy)  # type: ignore[operator]  # a method of transformers
    loss = float(start(input_ids=IDS, labels=IDS).loss)

    def body(comm: Comm) -> Tensor:
        model: Any = copy.deepcopy(start)
        plan = shardwise.hf.plan(model, mesh)
        shard_module(model, plan, process_group=comm)
        mine = own_part(IDS, mesh, "dp: S(0)", comm.rank) if "dp" in mesh.axes else IDS
        assert_close(float(model(input_ids=mine, labels=mine).loss), loss, rtol=1e-5, atol=1e-6)
        made: Tensor = model.generate(mine, **greedy)
        model.save_pretrained(tmp_path)
        again = shardwise.hf.load(None, tmp_path, plan)
        assert_close(float(again(input_ids=mine, labels=mine).loss), loss, rtol=1e-5, atol=1e-6)
        return made

    results = run_local(body, math.prod(mesh.shape), timeout=TIMEOUT)
    parts = [results[0], results[-1]] if "dp" in mesh.axes else results[:1]
    assert torch.equal(torch.cat(parts), expected)
