"""Programs around a sharded model: peft, averages, Fabric, Lightning, accelerate, convolutional networks; unchanged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

import shardwise.hf
from shardwise import Comm, run_local, shard_module
from tests.models.environment import import_or_skip
from tests.models.families import FAMILIES, LAYOUTS, NETWORKS, ROWS
from tests.models.test_gallery import rows_of

transformers = import_or_skip("transformers")
TIMEOUT = 120.0
BATCH = FAMILIES["llama"].batch()
Program = Callable[[nn.Module, Path], Any]


def as_dense(program: Program, start: nn.Module, folder: Path, layout: str = "tp2") -> None:
    """Run a program on a dense model and on one that is split over two ranks; compare all that it returns."""
    expected = program(copy.deepcopy(start), folder)

    def body(comm: Comm) -> Any:
        model = copy.deepcopy(start)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
        return program(model, folder)

    for found in run_local(body, 2, timeout=TIMEOUT):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full() if hasattr(p, "full") else p.detach() for n, p in model.named_parameters() if p.requires_grad}


def with_averages(model: nn.Module, folder: Path) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return averaged(**BATCH).loss.item(), whole(averaged)


def with_fabric(model: nn.Module, folder: Path) -> Any:
    fabric = import_or_skip("lightning").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(**BATCH).loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def with_lightning(model: nn.Module, folder: Path) -> Any:
    lightning = import_or_skip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc,name-defined]  # imported where it is installed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = [{name: value[i] for name, value in BATCH.items()} for i in range(ROWS)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Task(), torch.utils.data.DataLoader(rows, batch_size=2))
    return trainer.callback_metrics["loss"].item(), whole(model)


def with_accelerate(model: nn.Module, folder: Path) -> Any:
    accelerator = import_or_skip("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for _ in range(2):
        loss = model(**BATCH).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PROGRAMS: dict[str, Program] = {
    "EMA": with_averages,
    "Fabric": with_fabric,
    "Lightning": with_lightning,
    "accelerate": with_accelerate,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_on_a_dense_model(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("family", name)
    record_property("layout", "tp2")
    with warnings.catch_warnings(action="ignore"):
        as_dense(PROGRAMS[name], FAMILIES["llama"].build(transformers), tmp_path)
    record_property("shown", "T")


def test_adapters_of_peft_train_generate_and_save(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    peft = import_or_skip("peft")
    record_property("family", "Llama with LoRA (peft)")
    record_property("layout", "tp2")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    start = peft.get_peft_model(FAMILIES["llama"].build(transformers), settings)
    for name, parameter in start.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)

    def program(model: nn.Module, folder: Path) -> Any:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            model(**BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        made = model.generate(input_ids=BATCH["input_ids"], max_new_tokens=3, do_sample=False)
        model.save_pretrained(folder)
        return made, whole(model)

    plan = shardwise.hf.plan(start, LAYOUTS["tp2"])
    assert (
        plan.specs(start)["base_model.model.model.layers.0.self_attn.o_proj.lora_A.default.weight"] != plan.replicated
    )
    as_dense(program, start, tmp_path)
    restored = peft.PeftModel.from_pretrained(FAMILIES["llama"].build(transformers), tmp_path)
    trained = program(copy.deepcopy(start), tmp_path / "dense")[1]
    found = {name: p.detach() for name, p in restored.named_parameters() if name in trained}
    assert_close(found, trained, rtol=1e-4, atol=1e-5)
    record_property("shown", "T S G")


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "AdaLoRA": lambda peft: peft.AdaLoraConfig(total_step=10, target_modules=["q_proj", "down_proj"]),
    "BOFT": lambda peft: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj", "down_proj"]),
    "DoRA": lambda peft: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"]),
    "FourierFT": lambda peft: peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"]),
    "HRA": lambda peft: peft.HRAConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "IA3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoHa": lambda peft: peft.LoHaConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "LoKr": lambda peft: peft.LoKrConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "OFT": lambda peft: peft.OFTConfig(oft_block_size=8, target_modules=["q_proj", "down_proj"]),
    "P-tuning": lambda peft: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16),
    "Prefix tuning": lambda peft: peft.PrefixTuningConfig(num_virtual_tokens=3),
    "Prompt tuning": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=3),
    "VeRA": lambda peft: peft.VeraConfig(r=4, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_kind_of_adapter_trains(
    name: str, layout: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    peft = import_or_skip("peft")
    record_property("family", f"Llama with {name} (peft)")
    record_property("layout", layout)
    settings = ADAPTERS[name](peft)
    settings.task_type = "CAUSAL_LM"
    start = peft.get_peft_model(FAMILIES["llama"].build(transformers), settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (p for p in start.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    def program(model: nn.Module, folder: Path) -> Any:
        by = getattr(model, "_sharded_by", None)
        batch = BATCH if by is None else rows_of(BATCH, by.plan.mesh, by.comm.rank)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, whole(model)

    as_dense(program, start.eval(), tmp_path, layout)
    record_property("shown", "T")


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_libraries_train(
    name: str, layout: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("family", name)
    record_property("layout", layout)
    torch.manual_seed(0)
    start = NETWORKS[name](import_or_skip).double().train()
    generator = torch.Generator().manual_seed(2)
    side = 64 if "torchvision" in name else 32
    images, labels = torch.randn(4, 3, side, side, generator=generator, dtype=torch.float64), torch.arange(4) % 3

    def train(model: nn.Module, rows: slice, share: float) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows]) * share
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    expected = train(copy.deepcopy(start), slice(None), 1.0)

    def body(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
        return train(model, slice(2 * comm.rank, 2 * comm.rank + 2), 0.5)

    for found in run_local(body, 2, timeout=TIMEOUT):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    record_property("shown", "T")
