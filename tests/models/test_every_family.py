"""Every family of transformers in every layout: loss and gradients are those of the dense model, or it is refused.

All cells run in `make test-models`, which writes the page from them; elsewhere a sample of ten.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise.hf
from shardwise import Comm, LayoutError, PlanError, ShardedTensor, run_local, shard_module
from shardwise._torch import pytree
from shardwise.tensor.dispatch import UnsupportedOpError
from tests.models.environment import import_or_skip
from tests.models.every_family import NotTried, build, find_loss, list_families, make_batch
from tests.models.families import LAYOUTS
from tests.models.test_gallery import rows_of

transformers = import_or_skip("transformers")

SAMPLE = {
    "mixtral": "tp2",
    "mamba2": "fsdp2",
    "longformer": "dp2",
    "qwen2_vl": "tp2",
    "led": "2x2",
    "segformer": "fsdp2",
    "jetmoe": "tp2",
    "wav2vec2": "dp2",
    "switch_transformers": "tp2",
    "resnet": "fsdp2",
}
# They draw from torch's own generator, which ranks that are threads share: the order of patches, the keys of queries.
RANDOM = ("informer", "vilt")
FAMILIES = list_families()
CELLS = [(kind, layout) for kind in FAMILIES for layout in LAYOUTS]
CELLS = [cell for cell in CELLS if "SHARDWISE_MODELS_TABLE" in os.environ or cell in SAMPLE.items()]
REFUSALS = (PlanError, LayoutError, UnsupportedOpError)
NO_PAIRS = "no layers were found that can be split over 2 ranks of axis 'tp'"
CONVOLUTIONS = """bit efficientnet encodec gemma3n_vision hgnet_v2 mobilenet_v1 mobilenet_v2 mobilevitv2 poolformer
    pp_lcnet regnet resnet sam3_lite_text_text_model swiftformer textnet upernet xcodec"""
REFUSED = {kind: dict.fromkeys(("tp2", "2x2"), NO_PAIRS) for kind in CONVOLUTIONS.split()}


@functools.lru_cache(maxsize=1)
def run_dense(kind: str) -> tuple[nn.Module, dict[str, Any], list[bool], Tensor, dict[str, Tensor]] | str:
    """A model, its batch, which outputs have its rows, and the loss and gradients; or why there is no small one."""
    head, name = FAMILIES[kind]
    if kind in RANDOM:
        return "each rank would draw other numbers"
    try:
        start = build(kind, name)
        batch = make_batch(start, head)
        dense = copy.deepcopy(start)
        output = dense(**batch)
        loss = find_loss(output)
        loss.backward()
        if not torch.equal(find_loss(dense(**batch)), loss):
            raise NotTried("it draws random numbers")
    except Exception as error:  # of any kind: the family is not tried
        return str(error).strip().partition("\n")[0] if isinstance(error, NotTried) else type(error).__name__
    if not loss.isfinite():
        return "the loss is not finite"
    rows = {value.shape[0] for value in batch.values() if isinstance(value, Tensor)}
    own = [value.ndim > 0 and value.shape[0] in rows for value in list_leaves(output)]
    return start, batch, own, loss.detach(), {n: p.grad for n, p in dense.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "layout"), CELLS, ids=map("-".join, CELLS))
def test_a_family_has_the_loss_and_gradients_of_the_dense_model(
    kind: str, layout: str, record_property: Callable[[str, object], None]
) -> None:
    for name, value in dict(kind=kind, head=FAMILIES[kind][0], cell=layout).items():
        record_property(name, value)
    ran = run_dense(kind)
    if isinstance(ran, str):
        record_property("skipped", ran)
        pytest.skip(ran)
    start, batch, has_rows, expected, wanted = ran
    mesh = LAYOUTS[layout]

    def body(comm: Comm) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(start)
        try:
            plan = shardwise.hf.plan(model, mesh)
        except PlanError as error:
            if "pass example=" not in str(error):
                raise
            plan = shardwise.hf.plan(model, mesh, batch)
        shard_module(model, plan)
        mine = rows_of(batch, mesh, comm.rank)
        own, of_all = split_loss(model(**mine), has_rows)
        (own + of_all).backward()
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return whole(own), whole(of_all), gradients

    try:
        results = run_local(body, mesh.size, timeout=60.0)
    except REFUSALS as error:
        record_property("refused", sentence := str(error).partition("\n")[0])
        assert re.search(REFUSED.get(kind, {}).get(layout, "(?!)"), sentence), sentence
        return
    assert kind not in REFUSED or layout not in REFUSED[kind], "what is listed as refused works"
    axes = [axis for axis in mesh.axes if axis in ("dp", "fsdp")]
    others = [axis for axis in mesh.axes if axis not in axes]
    first = [rank for rank in range(mesh.size) if all(mesh.coordinates(rank)[axis] == 0 for axis in others)]
    for _, of_all, gradients in results:
        loss = of_all + sum(results[rank][0] for rank in first) if axes else of_all + results[0][0]
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        assert gradients.keys() == wanted.keys()
        largest = max(float(g.norm()) for g in wanted.values())  # gradients of keys' biases are noise beside it
        for name, gradient in wanted.items():
            off = float((gradients[name] - gradient).norm())
            assert off <= 1e-3 * float(gradient.norm()) + 1e-5 * largest, f"{name}: {off} of {gradient.norm()}"


def split_loss(output: Any, has_rows: list[bool]) -> tuple[Tensor, Tensor]:
    """The loss of what has this rank's rows, and that of what is the same on all ranks, as the model's own loss is.

    A model that joins all images into one sequence, or stacks its layers, returns both.
    """
    none = torch.zeros(())
    if getattr(output, "loss", None) is not None:
        return none, output.loss
    sums = [(value * value).sum() for value in list_leaves(output)]
    own = [value for value, mine in zip(sums, has_rows, strict=True) if mine]
    of_all = [value for value, mine in zip(sums, has_rows, strict=True) if not mine]
    return sum(own, none), sum(of_all, none)


def list_leaves(output: Any) -> list[Tensor]:
    """The tensors of an output of which a loss is made."""
    return [v for v in pytree.tree_leaves(dict(output)) if isinstance(v, Tensor) and v.requires_grad]


def whole(value: Tensor) -> Tensor:
    return value.full() if isinstance(value, ShardedTensor) else value.detach()
