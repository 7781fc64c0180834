"""Does `from_pretrained` load what a checkpoint of a training run is converted to, with the same logits?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardwise.checkpoint import NameMap, load, reshard
from shardwise.checkpoint import open as open_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("default")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QKV_AND_GATES = """
[lengths]
q = 16
kv = 8

[[change]]
split = "model.layers.*.self_attn.qkv_proj.weight"
to = [
    "model.layers.*.self_attn.q_proj.weight",
    "model.layers.*.self_attn.k_proj.weight",
    "model.layers.*.self_attn.v_proj.weight",
]
sizes = ["q", "kv", "kv"]

[[change]]
split = "model.layers.*.mlp.gate_up_proj.weight"
to = ["model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"]
"""
SEPARATE_EXPERTS = """
[rename]
"model.layers.*.mlp.gate.weight" = "model.layers.*.block_sparse_moe.gate.weight"

[[change]]
unstack = "model.layers.*.mlp.experts.gate_up_proj"
to = "layers.*.{expert}.fused"

[[change]]
split = "layers.*.{expert}.fused"
to = [
    "model.layers.*.block_sparse_moe.experts.{expert}.w1.weight",
    "model.layers.*.block_sparse_moe.experts.{expert}.w3.weight",
]

[[change]]
unstack = "model.layers.*.mlp.experts.down_proj"
to = "model.layers.*.block_sparse_moe.experts.{expert}.w2.weight"
"""
STACKED_EXPERTS = """
[rename]
"model.layers.*.block_sparse_moe.gate.weight" = "model.layers.*.mlp.gate.weight"

[[change]]
fuse = [
    "model.layers.*.block_sparse_moe.experts.{expert}.w1.weight",
    "model.layers.*.block_sparse_moe.experts.{expert}.w3.weight",
]
to = "layers.*.{expert}.fused"

[[change]]
stack = "layers.*.{expert}.fused"
to = "model.layers.*.mlp.experts.gate_up_proj"

[[change]]
stack = "model.layers.*.block_sparse_moe.experts.{expert}.w2.weight"
to = "model.layers.*.mlp.experts.down_proj"
"""


@pytest.fixture(autouse=True, scope="module")
def torchvision_operators() -> Any:
    """A torchvision built for another torch lacks operators that its import asks for; transformers imports it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import torchvision  # noqa: F401
    except ImportError:
        return None
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(torch.arange(20).reshape(2, 10) % 60).logits
    return found


def make_model(family: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


def save_training(model: nn.Module, path: Path) -> Path:
    """A checkpoint of torch.distributed.checkpoint with an optimizer, and beside it the model's configuration."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path / "dcp")
    model.config.save_pretrained(path / "base")  # type: ignore[operator,union-attr]  # a model of transformers
    return path / "dcp"


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("max_file_bytes", [None, 8000])
def test_from_pretrained_loads_a_converted_training_run(
    tmp_path: Path, family: str, max_file_bytes: int | None
) -> None:
    model = make_model(family)
    source = save_training(model, tmp_path)
    report = reshard(source, tmp_path / "hf", format="hf", config=tmp_path / "base", max_file_bytes=max_file_bytes)
    assert "config.json" in report.copied and any(name.startswith("optim.") for name in report.left_out)
    loaded, info = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(loaded), logits(model))


def test_a_converted_dtype_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    model = make_model("Llama")
    reshard(save_training(model, tmp_path), tmp_path / "hf", format="hf", config=tmp_path / "base", dtype="bf16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model.bfloat16()))


def test_fused_projections_are_split_for_another_model(tmp_path: Path) -> None:
    fused = make_model("Phi3", original_max_position_embeddings=32)
    separate = make_model("Llama", rms_norm_eps=fused.config.rms_norm_eps)  # type: ignore[union-attr]
    source = save_training(fused, tmp_path)
    separate.config.save_pretrained(tmp_path / "llama")  # type: ignore[operator,union-attr]
    (tmp_path / "map.toml").write_text(QKV_AND_GATES)
    reshard(source, tmp_path / "hf", format="hf", config=tmp_path / "llama", names=tmp_path / "map.toml")
    loaded = type(separate).from_pretrained(tmp_path / "hf")  # type: ignore[attr-defined]
    assert torch.allclose(logits(loaded), logits(fused), atol=1e-6)
    reshard(source, tmp_path / "model", only=["model.*"], names={"model.**": "**"})
    load(separate.state_dict(), tmp_path / "model", names=NameMap.of(tmp_path / "map.toml"))
    assert torch.equal(logits(separate), logits(loaded)), "a load through the map fills the model in place"


def test_experts_are_separated_and_stacked(tmp_path: Path) -> None:
    model = make_model("Mixtral", num_local_experts=4)
    source = save_training(model, tmp_path)
    (tmp_path / "separate.toml").write_text(SEPARATE_EXPERTS)
    (tmp_path / "stacked.toml").write_text(STACKED_EXPERTS)
    reshard(source, tmp_path / "hf", format="hf", config=tmp_path / "base", names=tmp_path / "separate.toml")
    model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    with open_checkpoint(tmp_path / "hf") as ours, open_checkpoint(tmp_path / "saved") as theirs:
        assert sorted(ours) == sorted(theirs), "the names under which transformers stores them"
        assert all(torch.equal(ours[name].read(), theirs[name].read()) for name in ours)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "hf")), logits(model))  # type: ignore[attr-defined]
    with open_checkpoint(tmp_path / "saved", names=tmp_path / "stacked.toml") as stacked:
        expected = model.state_dict()
        assert sorted(stacked) == sorted(expected)
        assert all(torch.equal(stacked[name].read(), expected[name]) for name in stacked)
