"""The Trainer, and loops of accelerate, on spawned ranks: as on one process; also continued on other ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import shardwise.hf
from shardwise import PlanError, ShardedTensor, shard_module
from tests.models.environment import import_or_skip
from tests.models.families import FAMILIES, LAYOUTS, LENGTH, VOCABULARY
from tests.world import Ranks, world_fixture

transformers = import_or_skip("transformers")
import_or_skip("accelerate")

world = world_fixture(2, timeout=120.0)
STEPS = 4


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        drawn = torch.randint(3, VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(5))
        self.rows = [{"input_ids": row, "labels": row} for row in drawn]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def arguments(folder: Path, rows: int, **more: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        max_steps=STEPS,
        save_steps=2,
        logging_steps=1,
        learning_rate=0.05,
        optim="sgd",
        optim_args="momentum=0.9",
        data_seed=7,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def start_accelerate() -> None:
    """What torchrun sets."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), ACCELERATE_USE_CPU="true")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")


def train_sharded(layout: str, folder: Path, resume: str | None = None, **more: Any) -> tuple[Any, ...]:
    start_accelerate()
    mesh = LAYOUTS[layout]
    model = FAMILIES["llama"].build(transformers)
    if resume is not None:  # what is not loaded would show
        torch.nn.init.zeros_(model.model.norm.weight)
        torch.nn.init.zeros_(model.lm_head.weight)
    shard_module(model, shardwise.hf.plan(model, mesh))
    rows = 4 if layout == "tp2" else 2
    data = Sentences()
    trainer = shardwise.hf.ShardedTrainer(model, arguments(folder, rows, **more), train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {n: p.full() for n, p in model.named_parameters() if isinstance(p, ShardedTensor)}
    return losses, found, trainer.evaluate()["eval_loss"]


def train_dense(folder: Path, **more: Any) -> tuple[Any, ...]:
    model = FAMILIES["llama"].build(transformers)
    data = Sentences()
    trainer = transformers.Trainer(model, arguments(folder, 4, **more), train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {n: p.detach() for n, p in model.named_parameters()}
    return losses, found, trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    return train_dense(tmp_path_factory.mktemp("dense"), save_strategy="no")


@pytest.mark.parametrize("layout", ["tp2", "dp2", "fsdp2"])
def test_the_trainer_trains_evaluates_and_continues(
    world: Ranks, dense: tuple[Any, ...], layout: str, tmp_path: Path
) -> None:
    results = world.run(train_sharded, layout, tmp_path)
    for found in results:
        assert_close(found[0], dense[0], rtol=1e-3, atol=1e-3)
        assert_close(found[1], dense[1], rtol=1e-3, atol=1e-4)
        assert found[2] == pytest.approx(dense[2], rel=1e-4)
    half = tmp_path / "checkpoint-2"
    assert {"config.json", "model.safetensors", "optimizer.pt", "scheduler.pt"} <= {p.name for p in half.iterdir()}
    assert json.loads((half / "trainer_state.json").read_text())["global_step"] == 2
    again = world.run(train_sharded, "fsdp2" if layout == "dp2" else layout, tmp_path / "again", str(half))
    assert_close(again[0][1], results[0][1], rtol=1e-4, atol=1e-5)


class Ragged(Sentences):
    """Rows of several lengths, more of them than the batches of all ranks hold."""

    def __init__(self, count: int) -> None:
        super().__init__()
        lengths = [LENGTH - 4 * (i % 2) for i in range(count)]
        rows = zip(self.rows, lengths, strict=False)
        self.rows = [{name: row[name][:length] for name in row} for row, length in rows]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As tokenizers do: each batch has the length of its longest row."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def evaluate_rows(layout: str | None, count: int, folder: Path) -> tuple[float, int]:
    model = FAMILIES["bert"].build(transformers)
    data = Ragged(count)
    if layout is None:
        trainer = transformers.Trainer(model, arguments(folder, 2), data_collator=collate, eval_dataset=data)
    else:
        start_accelerate()
        shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
        options = arguments(folder, 2 if layout == "tp2" else 1)
        trainer = shardwise.hf.ShardedTrainer(model, options, data_collator=collate, eval_dataset=data)
    found = trainer.predict(data)
    return found.metrics["test_loss"], len(found.predictions)


@pytest.mark.parametrize(("layout", "count"), [("dp2", 5), ("dp2", 6), ("fsdp2", 7), ("tp2", 5)])
def test_evaluation_counts_each_row_once_and_pads_ragged_parts_together(
    world: Ranks, layout: str, count: int, tmp_path: Path
) -> None:
    expected = evaluate_rows(None, count, tmp_path)
    for found in world.run(evaluate_rows, layout, count, tmp_path):
        assert found[0] == pytest.approx(expected[0], rel=1e-4) and found[1] == expected[1] == count


def test_bf16_trains_as_the_dense_trainer_does(world: Ranks, tmp_path: Path) -> None:
    expected = train_dense(tmp_path / "dense", save_strategy="no", bf16=True)
    for found in world.run(train_with_bf16, "tp2", tmp_path):
        assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)
        assert {value.dtype for value in found[1].values()} == {torch.float32}


def train_with_bf16(layout: str, folder: Path) -> tuple[Any, ...]:
    return train_sharded(layout, folder, save_strategy="no", bf16=True)


DRAWN: dict[str, dict[str, Any]] = {"plain": {}, "beams": dict(num_beams=2, top_k=10, temperature=1.5)}


def prompts() -> Tensor:
    return torch.stack([Sentences()[i]["input_ids"] for i in range(2)])


def sample(layout: str, seed: int, kind: str) -> Tensor:
    model = FAMILIES["llama"].build(transformers)
    shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
    rank = torch.distributed.get_rank()
    mine = prompts() if layout == "tp2" else prompts()[rank : rank + 1]
    torch.manual_seed(seed)
    return model.generate(mine, max_new_tokens=6, do_sample=True, **DRAWN[kind])


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_tokens_are_those_of_the_dense_model_with_the_same_seed(world: Ranks, kind: str) -> None:
    model = FAMILIES["llama"].build(transformers)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model.generate(prompts(), max_new_tokens=6, do_sample=True, **DRAWN[kind])
        assert all(torch.equal(made, expected) for made in world.run(sample, "tp2", seed, kind))
        assert torch.equal(torch.cat(world.run(sample, "dp2", seed, kind)), expected)


def test_a_model_that_is_not_sharded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="ShardedTrainer trains a model that shard_module sharded by a ModelPlan"):
        shardwise.hf.ShardedTrainer(FAMILIES["bert"].build(transformers), arguments(tmp_path, 1))


def train_with_smoothing(layout: str | None, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The Trainer's own label smoothing makes a loss of the outputs for this rank's rows."""
    if layout is not None:
        start_accelerate()
    model, data = FAMILIES["llama"].build(transformers), Sentences()
    options = arguments(folder, 2 if layout else 4, save_strategy="no", label_smoothing_factor=0.1)
    if layout is None:
        trainer = transformers.Trainer(model, options, train_dataset=data)
    else:
        shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
        trainer = shardwise.hf.ShardedTrainer(model, options, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {n: p.full() if isinstance(p, ShardedTensor) else p.detach() for n, p in model.named_parameters()}


def test_a_loss_of_rows_is_averaged_over_the_parts_of_a_batch(world: Ranks, tmp_path: Path) -> None:
    expected = train_with_smoothing(None, tmp_path)
    for found in world.run(train_with_smoothing, "dp2", tmp_path):
        assert_close(found, expected, rtol=1e-3, atol=1e-4)


def run_loop(layout: str | None, folder: Path, resume: bool = False, safe: bool = True) -> tuple[Any, ...]:
    """A loop of accelerate: gradients of two batches make a step, the state is saved after the second step."""
    accelerate = import_or_skip("accelerate")
    model, parts, kind = FAMILIES["gpt2"].build(transformers), 1, accelerate.Accelerator  # its ends are one parameter
    if layout is not None:
        start_accelerate()
        shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
        parts, kind = 1 if layout == "tp2" else 2, shardwise.hf.ShardedAccelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4 * parts)
    loader: Any = torch.utils.data.DataLoader(Sentences(), batch_size=4 // parts)
    loader, model, optimizer, scheduler = accelerator.prepare(loader, model, optimizer, scheduler)
    if resume:
        accelerator.load_state(str(folder))
    losses, logits = [], []
    for number, batch in enumerate(loader):
        if resume and number < 4:
            continue
        with accelerator.accumulate(model):
            output = model(**batch)
            accelerator.backward(output.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(output.loss.item())
        logits.append(accelerator.gather_for_metrics(output.logits).detach())
        if number == 3 and not resume:
            accelerator.save_state(str(folder), safe_serialization=safe)
    accelerator.save_model(model, str(folder / "model"))
    found = {n: p.full() if isinstance(p, ShardedTensor) else p.detach() for n, p in model.named_parameters()}
    return losses, logits, found


@pytest.mark.parametrize(("layout", "again"), [("tp2", "dp2"), ("dp2", "fsdp2"), ("fsdp2", "tp2")])
def test_a_loop_of_accelerate_trains_saves_and_continues_in_another_layout(
    world: Ranks, layout: str, again: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("family", "accelerate, its states saved and loaded")
    record_property("layout", layout)
    losses, logits, values = run_loop(None, tmp_path / "dense")
    for found in world.run(run_loop, layout, tmp_path, False, layout != "dp2"):
        assert_close(found, (losses, logits, values), rtol=1e-4, atol=1e-5)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"optimizer.bin", "pytorch_model.bin" if layout == "dp2" else "model.safetensors"} <= written
    for found in world.run(run_loop, again, tmp_path, True):
        assert_close(found, (losses[4:], logits[4:], values), rtol=1e-4, atol=1e-5)
    model = FAMILIES["gpt2"].build(transformers)
    accelerate = import_or_skip("accelerate")
    accelerate.load_checkpoint_in_model(model, str(tmp_path / "model"))
    assert_close({n: p.detach() for n, p in model.named_parameters()}, values, rtol=1e-4, atol=1e-5)
    record_property("shown", "T S")


def make_tokenizer() -> Any:
    tokenizers = import_or_skip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2")


def train_with_trl(kind: str, layout: str | None, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    if layout is not None:
        start_accelerate()
    trl, datasets = import_or_skip("trl"), import_or_skip("datasets")
    rows = [row["input_ids"].tolist() for row in Sentences().rows]
    texts = [[f"w{token}" for token in row] for row in rows]
    more: dict[str, Any] = dict(processing_class=make_tokenizer())
    model = FAMILIES["llama"].build(transformers)
    base = getattr(trl, f"{kind}Trainer")
    if layout is not None:
        shard_module(model, shardwise.hf.plan(model, LAYOUTS[layout]))
        base = type("Sharded", (shardwise.hf.ShardedTrainer, base), {})
    options: dict[str, Any] = dict(gradient_checkpointing=False, bf16=False)
    if kind == "SFT":
        data = [{"input_ids": row, "labels": row} for row in rows]
    elif kind == "DPO":
        parts = [{"prompt": row[:3], "chosen": row[3:6], "rejected": row[5:]} for row in texts]
        data = [{name: " ".join(words) for name, words in part.items()} for part in parts]
        more["ref_model"] = FAMILIES["llama"].build(transformers)
        if layout is not None:
            shard_module(more["ref_model"], shardwise.hf.plan(more["ref_model"], LAYOUTS[layout]))
    else:
        data = [{"prompt": " ".join(row[:4])} for row in texts]
        more["reward_funcs"] = lambda completions, **_: [float(len(set(text.split()))) for text in completions]
        options |= dict(num_generations=2, max_completion_length=4, beta=0.0)
    made = transformers.TrainingArguments.to_dict(
        arguments(folder, 2 if layout == "dp2" else 4, **(dict(save_strategy="no")))
    )
    keep = (
        "per_device_train_batch_size max_steps logging_steps learning_rate optim optim_args data_seed use_cpu report_to"
    )
    options |= {name: made[name] for name in keep.split()}
    settings = getattr(trl, f"{kind}Config")(str(folder), save_strategy="no", disable_tqdm=True, **options)
    trainer = base(model=model, args=settings, train_dataset=datasets.Dataset.from_list(data), **more)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {n: p.full() if isinstance(p, ShardedTensor) else p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "layout"), [("SFT", "tp2"), ("SFT", "dp2"), ("DPO", "tp2"), ("DPO", "dp2"), ("GRPO", "tp2")]
)
def test_the_trainers_of_trl(
    world: Ranks, kind: str, layout: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Drawn completions of GRPO are others where each rank draws its own, so only the layout without parts is equal."""
    import_or_skip("trl")
    record_property("family", f"{kind}Trainer (trl)")
    record_property("layout", layout)
    expected = train_with_trl(kind, None, tmp_path)
    for found in world.run(train_with_trl, kind, layout, tmp_path):
        assert_close(found, expected, rtol=1e-3, atol=1e-4)
    record_property("shown", "T")
