"""Every family in every layout: trained, saved, loaded and generated as the dense model on one process."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise.hf
from shardwise import Comm, Mesh, ShardedTensor, run_local, shard_module
from shardwise.checkpoint import loading
from shardwise.nn import PlanError
from tests.device import DEVICE
from tests.models.environment import import_or_skip
from tests.models.families import DECODER, FAMILIES, LAYOUTS, LENGTH, tokens

transformers = import_or_skip("transformers")

TIMEOUT = 120.0
GREEDY: dict[str, Any] = dict(max_new_tokens=4, do_sample=False)


def rows_of(batch: Mapping[str, Tensor], mesh: Mesh, rank: int) -> dict[str, Tensor]:
    """The part of a batch that a rank passes."""
    axis = next((axis for axis in mesh.axes if axis in ("dp", "fsdp")), None)
    if axis is None:
        return dict(batch)
    part, parts = mesh.coordinates(rank)[axis], mesh.axis_size(axis)

    def take(value: Any) -> Any:
        if isinstance(value, list):  # an item for each row
            return value[part * len(value) // parts : (part + 1) * len(value) // parts]
        return value.chunk(parts)[part] if isinstance(value, Tensor) else value

    return {name: take(value) for name, value in batch.items()}


def join_rows(mesh: Mesh, results: list[Tensor]) -> Tensor:
    """The whole batch from the results of all ranks."""
    axis = next((axis for axis in mesh.axes if axis in ("dp", "fsdp")), None)
    if axis is None:
        return results[0]
    others = {a: 0 for a in mesh.axes if a != axis}
    ranks = [mesh.submesh(**others, **{axis: i}).ranks.reshape(-1)[0] for i in range(mesh.axis_size(axis))]
    return torch.cat([results[int(rank)] for rank in ranks])


def train(model: nn.Module, batch: Mapping[str, Tensor], steps: int = 2) -> list[float]:
    """A few lines that anyone would write; they know nothing of sharding."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full() if isinstance(p, ShardedTensor) else p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_saves_loads_and_generates(
    name: str, layout: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    family, mesh = FAMILIES[name], LAYOUTS[layout]
    record_property("family", family.title)
    record_property("layout", layout)
    batch, start = family.batch(), family.build(transformers)
    dense = copy.deepcopy(start)
    first = next(iter(batch))
    generates = dense.can_generate()
    losses = train(dense, batch)
    expected = dense.generate(batch[first], **GREEDY) if generates else None

    def body(comm: Comm) -> tuple[Any, ...]:
        model = copy.deepcopy(start)
        plan = shardwise.hf.plan(model, mesh)
        shard_module(model, plan)
        mine = rows_of(batch, mesh, comm.rank)
        own = train(model, mine)
        made = model.generate(mine[first], **GREEDY) if generates else None
        model.save_pretrained(tmp_path)
        again = shardwise.hf.load(None, tmp_path, plan)
        return own, whole(model), made, model(**mine).loss.item(), again(**mine).loss.item()

    results = run_local(body, mesh.size, timeout=TIMEOUT)
    for own, parameters, _, before, after in results:
        assert_close(own, losses, rtol=1e-4, atol=1e-5)
        assert_close(parameters, whole(dense), rtol=1e-3, atol=1e-5)
        assert before == after
    restored = type(dense).from_pretrained(tmp_path).to(DEVICE)
    assert_close(whole(restored), results[0][1], rtol=0, atol=0)
    if generates:
        assert torch.equal(join_rows(mesh, [made for _, _, made, _, _ in results]), expected)
    record_property("shown", "T S G" if generates else "T S")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_under_autocast_is_as_near_to_full_precision_as_the_dense_model(name: str) -> None:
    family = FAMILIES[name]
    batch, start = family.batch(), family.build(transformers)
    dtypes: dict[bool, torch.dtype] = {}

    def run(model: nn.Module, half: bool) -> dict[str, Tensor]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=half):
            output = model(**batch)
        logits = output.logits_per_image if "pixel_values" in batch and "input_ids" in batch else output.logits
        dtypes.setdefault(half, logits.dtype)
        assert logits.dtype == dtypes[half]  # that of the dense model, which runs first
        output.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found = {n: g.full() if isinstance(g, ShardedTensor) else g for n, g in grads.items()}
        return {"loss": output.loss.detach().float(), **found}

    exact, dense = run(copy.deepcopy(start), False), run(copy.deepcopy(start), True)
    assert dtypes == {False: torch.float32, True: torch.float32 if name in ("mamba", "bart") else torch.bfloat16}

    def body(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["tp2"]))
        return run(model, True)

    largest = max(value.norm() for value in exact.values())  # gradients of keys' biases are noise beside it
    for found in run_local(body, 2, timeout=TIMEOUT):
        assert found.keys() == exact.keys() and {value.dtype for value in found.values()} == {torch.float32}
        for part, value in found.items():
            off, allowed = (value - exact[part]).norm(), (dense[part] - exact[part]).norm()
            enough = 2 * allowed + 1e-3 * exact[part].norm() + 1e-3 * largest
            assert off <= enough, f"{part}: {off} where dense has {allowed}"


# transformers compiles for a static cache on a GPU, with CUDA graphs, which torch allows in its own threads only
STATIC: dict[str, Any] = dict(cache_implementation="static", disable_compile=DEVICE != "cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "several of each": dict(num_beams=4, num_return_sequences=2),
    "static cache": STATIC,
    "beams and static cache": dict(STATIC, num_beams=2),
    "without cache": dict(use_cache=False),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=3),
}


@pytest.mark.parametrize("layout", ["tp2", "2x2"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generate_gives_the_tokens_of_the_dense_model(layout: str, options: dict[str, Any]) -> None:
    mesh = LAYOUTS[layout]
    arguments = dict(GREEDY, **options)
    dense = FAMILIES["llama"].build(transformers)
    expected = dense.generate(tokens(), **arguments)

    def body(comm: Comm) -> Tensor:
        model = copy.deepcopy(dense)
        shard_module(model, shardwise.hf.plan(model, mesh))
        return model.generate(rows_of({"ids": tokens()}, mesh, comm.rank)["ids"], **arguments)

    assert torch.equal(join_rows(mesh, run_local(body, mesh.size, timeout=TIMEOUT)), expected)


def test_a_copy_of_a_model_whose_generate_was_compiled_generates_by_its_own_parameters() -> None:
    settings = transformers.CompileConfig(backend="eager", mode=None)
    settings._compile_all_devices = True
    dense = FAMILIES["llama"].build(transformers)
    arguments = dict(GREEDY, cache_implementation="static", compile_config=settings)
    dense.generate(tokens(), **arguments)
    other = copy.deepcopy(dense)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    expected = other.generate(tokens(), **GREEDY)

    def body(comm: Comm) -> Tensor:
        model = copy.deepcopy(other)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["tp2"]))
        return model.generate(tokens(), **arguments)

    for made in run_local(body, 2, timeout=TIMEOUT):
        assert torch.equal(made, expected)


@pytest.mark.parametrize(("given", "disabled"), [({}, True), ({"disable_compile": False}, False)])
def test_generate_is_not_compiled_unless_asked_for(
    given: dict[str, Any], disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def look(self: Any, model_kwargs: Any, generation_config: Any) -> bool:
        seen.append(generation_config.disable_compile)
        return False

    monkeypatch.setattr(transformers.generation.GenerationMixin, "_valid_auto_compile_criteria", look)

    def body(comm: Comm) -> None:
        model = FAMILIES["llama"].build(transformers)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["tp2"]))
        model.generate(tokens(), **GREEDY, **given)

    run_local(body, 2, timeout=TIMEOUT)
    assert seen and set(seen) == {disabled}


def test_prompts_of_other_lengths_on_other_ranks_are_refused_on_all() -> None:
    def body(comm: Comm) -> str:
        model = FAMILIES["llama"].build(transformers)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["dp2"]))
        with pytest.raises(shardwise.DisagreementError) as caught:
            model.generate(tokens()[:, : LENGTH - comm.rank], **GREEDY)
        return str(caught.value)

    for text in run_local(body, 2, timeout=TIMEOUT):
        assert "parts differ in dim 0 only" in text


def test_shorter_prompts_are_filled_up_on_the_left_where_there_is_a_mask() -> None:
    dense = FAMILIES["llama"].build(transformers)
    prompts = [tokens()[2 * rank : 2 * rank + 2, : LENGTH - 3 * rank] for rank in range(2)]
    expected = [dense.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY) for ids in prompts]

    def body(comm: Comm) -> Tensor:
        model = copy.deepcopy(dense)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["dp2"]))
        ids = prompts[comm.rank]
        return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)

    for found, wanted in zip(run_local(body, 2, timeout=TIMEOUT), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_model_on_the_meta_device_has_its_rotary_frequencies(tmp_path: Path) -> None:
    dense = FAMILIES["llama"].build(transformers)
    dense.save_pretrained(tmp_path)
    expected = dense(input_ids=tokens()).logits

    def body(comm: Comm) -> Tensor:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(dense.config)
        plan = shardwise.hf.plan(model, LAYOUTS["tp2"])
        shard_module(model, plan, init=lambda m: shardwise.load(m.state_dict(), tmp_path))
        return model(input_ids=tokens()).logits

    for logits in run_local(body, 2, timeout=TIMEOUT):
        assert_close(logits, expected)


def test_tied_weights_are_stored_once_and_loaded_as_one(tmp_path: Path) -> None:
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, tie_word_embeddings=True))

    def body(comm: Comm) -> bool:
        model = copy.deepcopy(dense)
        plan = shardwise.hf.plan(model, LAYOUTS["tp2"])
        shard_module(model, plan)
        model.save_pretrained(tmp_path)
        again = shardwise.hf.load(None, tmp_path, plan)
        return again.lm_head.weight is again.model.embed_tokens.weight

    assert all(run_local(body, 2, timeout=TIMEOUT))
    with shardwise.open(tmp_path) as stored:
        assert "lm_head.weight" not in stored.names()


def test_each_rank_reads_what_it_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of tensors that a rank reads are those of its local parts, not of the model."""
    dense = FAMILIES["llama"].build(transformers)
    dense.save_pretrained(tmp_path)
    read: dict[int, int] = {}
    original = loading.copy_tensors

    def count(store: Any, jobs: Any, *rest: Any) -> None:
        listed = list(jobs)
        read[shardwise.default_comm().rank] = sum(
            part.there.numel * entry.dtype.itemsize for entry, parts, _ in listed for part in parts
        )
        original(store, listed, *rest)

    monkeypatch.setattr(loading, "copy_tensors", count)

    def body(comm: Comm) -> tuple[int, int]:
        model = shardwise.hf.load(None, tmp_path, LAYOUTS["tp2"])
        return comm.rank, sum(t.local_tensor().nbytes for t in model.state_dict().values())

    for rank, held in run_local(body, 2, timeout=TIMEOUT):
        assert read[rank] == held < 0.6 * sum(p.nbytes for p in dense.parameters())


def test_sharded_files_and_a_config_are_written_once(tmp_path: Path) -> None:
    dense = FAMILIES["llama"].build(transformers)

    def body(comm: Comm) -> None:
        model = copy.deepcopy(dense)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["tp2"]))
        model.save_pretrained(tmp_path, max_shard_size="20KB")

    run_local(body, 2, timeout=TIMEOUT)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors.index.json"} <= names and "model.safetensors" not in names
    assert_close(
        whole(transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(DEVICE)), whole(dense), rtol=0, atol=0
    )


def test_what_fails_while_it_is_written_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body(comm: Comm) -> str:
        model = FAMILIES["llama"].build(transformers)
        shard_module(model, shardwise.hf.plan(model, LAYOUTS["tp2"]))
        with pytest.raises(Exception) as caught:
            model.save_pretrained(tmp_path / "file" / "model")
        return str(caught.value)

    for text in run_local(body, 2, timeout=TIMEOUT):
        assert "Not a directory" in text


def test_plans_by_structure_are_those_that_a_model_lists_itself() -> None:
    mesh = LAYOUTS["tp2"]
    model = FAMILIES["llama"].build(transformers)
    own, listed = shardwise.hf.plan(model, mesh), "embed_tokens" in str(model._tp_plan)
    model._tp_plan = {}
    found = shardwise.hf.plan(model, mesh)
    left_out = () if listed else ("model.embed_tokens.weight",)  # older versions of transformers do not list it
    specs = [{n: spec for n, spec in plan.specs(model).items() if n not in left_out} for plan in (found, own)]
    assert specs[0] == specs[1]
    assert '"model.layers.*.self_attn.{q,k,v}_proj.weight" = "S(0)"' in str(own).replace("tp: ", "")


def test_a_mesh_that_fits_no_layer_is_an_error() -> None:
    model = FAMILIES["bert"].build(transformers)
    with pytest.raises(PlanError, match="the axis 'rows' of rows=2 says nothing: name axes tp, ep, dp, fsdp"):
        shardwise.hf.plan(model, Mesh.of(rows=2))
    with pytest.raises(PlanError, match="lists no experts in an ep_plan"):
        shardwise.hf.plan(model, Mesh.of(ep=2))


def test_the_program_of_the_gallery_fine_tunes_as_one_rank_does(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gallery" / "fine_tune.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "equal: True"
