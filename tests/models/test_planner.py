"""Is a `config.json` of Hugging Face enough to plan a model?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardwise.hf
from shardwise import Mesh
from shardwise.cli.main import app
from shardwise.nn import PlanError
from shardwise.planner import estimate
from shardwise.planner.rehearsal import load_model
from tests.models.environment import import_or_skip

transformers = import_or_skip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}


def test_config_is_planned_with_its_own_loss(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["model", str(tmp_path), "--mesh", "dp=2,tp=2", "--batch", "2", "--sequence", "16", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    whole = sum(p.numel() for p in load_model(str(tmp_path)).model.parameters())
    assert data["elements"] == whole
    assert whole * 4 / 2 <= data["parameter_bytes"] < whole * 4 * 0.6
    assert data["activation_bytes"] > 0 and set(data["traffic"]) <= {"dp", "tp", "dp,tp"}


def test_a_fully_sharded_model_keeps_its_batch_sharded(tmp_path: Path) -> None:
    """On 1,024 ranks, each with one sequence: activations and operations are those of one sequence."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 256, "intermediate_size": 512}))
    model = load_model(str(tmp_path)).model
    found = {
        ranks: estimate(model, shardwise.hf.plan(model, Mesh.of(fsdp=ranks)), batch=1, sequence=64)
        for ranks in (8, 1024)
    }
    assert found[1024].activation_bytes == pytest.approx(found[8].activation_bytes, rel=0.2)
    assert found[1024].flops == pytest.approx(found[8].flops, rel=0.05)


def test_broken_configs_are_named(tmp_path: Path) -> None:
    assert transformers is not None
    path = tmp_path / "config.json"
    for text, problem in (
        ("{", "is not valid JSON"),
        ("{}", "it has no model_type"),
        ('{"model_type": "no-such-model"}', "transformers cannot make a model of it"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=problem):
            load_model(str(path))
