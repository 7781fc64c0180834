"""A plan for a model of transformers without typing it: from its own `tp_plan` and `ep_plan`, else by its structure.

The names of the mesh's axes say what each is for:

- `tp`: linear layers are split by columns and then by rows, embeddings by rows of the table;
- `ep`: experts are divided, each rank has some of them whole;
- `dp`: each rank has its own part of the batch;
- `fsdp`: as `dp`, and parameters of two dims and more are split as well, along the first dim that no other axis splits.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._log import package_logger
from shardwise.geometry import Mesh
from shardwise.hf.patterns import fold_patterns
from shardwise.hf.structure import LinearPairs, find_linear_pairs, is_linear, out_features
from shardwise.nn.model_plan import PLAIN, REPLICATED, ModelPlan
from shardwise.nn.patterns import PlanError

_log = package_logger(__name__)
TENSOR_AXIS, EXPERT_AXIS, DATA_AXES, FSDP_AXIS = "tp", "ep", ("dp", "fsdp"), "fsdp"
_AXES = (TENSOR_AXIS, EXPERT_AXIS, *DATA_AXES)


def plan(model: nn.Module, mesh: Mesh, example: Mapping[str, Any] | None = None) -> ModelPlan:
    """The plan of a model for a mesh with the axes tp, ep, dp and fsdp (some of them); print it to edit it.

    A model without a `tp_plan` of its own is followed through one forward pass without values; `example` has the
    arguments of that pass, where they cannot be made from the model's config.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    ...     def forward(self, x):
    ...         return x + self.down(self.up(x).relu())
    >>> print(plan(Block(), Mesh.of(dp=2, tp=2), {"x": torch.ones(1, 4)}))
    mesh = "dp=2,tp=2"
    input_plan = "dp: S(0)"
    output_plan = "plain"
    <BLANKLINE>
    [parameters]
    "up.*" = "tp: S(0)"
    "down.weight" = "tp: S(1)"
    >>> plan(Block(), Mesh.of(fsdp=2, tp=2), {"x": torch.ones(1, 4)}).parameters["up.weight"]
    'fsdp: S(1), tp: S(0)'
    """
    unknown = [axis for axis in mesh.axes if axis not in _AXES]
    if unknown:
        raise PlanError(f"the axis {unknown[0]!r} of {mesh} says nothing: name axes {', '.join(_AXES)}")
    placements: dict[str, dict[str, str]] = {}
    if TENSOR_AXIS in mesh.axes:
        _add(placements, TENSOR_AXIS, _split_linear_layers(model, mesh.shape[mesh.axes.index(TENSOR_AXIS)], example))
    if EXPERT_AXIS in mesh.axes:
        _add(placements, EXPERT_AXIS, _split_experts(model))
    if FSDP_AXIS in mesh.axes:
        _add(placements, FSDP_AXIS, _split_fully(model, placements))
    names = [name for name, _ in model.named_parameters()]
    texts = {n: ", ".join(f"{a}: {t}" for a, t in _in_order(placements[n], mesh)) for n in names if n in placements}
    data = [f"{axis}: S(0)" for axis in mesh.axes if axis in DATA_AXES]
    source = "its own plan" if getattr(model, "_tp_plan", None) else "its structure"
    _log.info("a plan of %s for %s from %s: %d sharded parameters", type(model).__name__, mesh, source, len(texts))
    return ModelPlan(mesh, fold_patterns(texts, names), input_plan=", ".join(data) or REPLICATED, output_plan=PLAIN)


def _split_fully(model: nn.Module, placements: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """A dim of each parameter that no other axis splits: what is gathered along this axis is then cut as they say."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            taken = any(text.startswith("S(0)") for text in placements.get(name, {}).values())
            found[name] = "S(1)" if taken else "S(0)"
    return found


def _add(placements: dict[str, dict[str, str]], axis: str, found: Mapping[str, str]) -> None:
    for name, text in found.items():
        placements.setdefault(name, {})[axis] = text


def _in_order(by_axis: Mapping[str, str], mesh: Mesh) -> list[tuple[str, str]]:
    return [(axis, by_axis[axis]) for axis in mesh.axes if axis in by_axis]


def _split_linear_layers(model: nn.Module, ranks: int, example: Mapping[str, Any] | None) -> dict[str, str]:
    own = getattr(model, "_tp_plan", None)
    found = _follow_tp_plan(model, own, ranks) if own else _follow_structure(model, ranks, example)
    if not found:
        raise PlanError(
            f"{type(model).__name__}: no layers were found that can be split over {ranks} ranks of axis "
            f"{TENSOR_AXIS!r}; write a ModelPlan, or use another number of ranks"
        )
    return found


def _follow_tp_plan(model: nn.Module, own: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The placements of parameters by the styles that the model lists for its modules."""
    heads = _count_heads(model)
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        plain, factor = _strip_adapter(name)
        for style in (own.get(_fold_numbers(plain)), own.get(_fold_numbers(plain.rpartition(".")[0]))):
            text = None if style is None or factor in style else _read_style(style, parameter)
            if text is not None and heads.get(plain.split(".")[-2], 0) % ranks == 0:
                found[name] = text
                break
    return found


def _strip_adapter(name: str) -> tuple[str, str]:
    """The name of a parameter in the model that peft wraps, and the style that leaves a factor of LoRA whole.

    Of a product `B @ A` that is added to columns, B has the columns; of one that is added to rows, A has the rows.

    >>> _strip_adapter("base_model.model.up.base_layer.weight")
    ('up.weight', 'none')
    >>> _strip_adapter("base_model.model.up.lora_A.default.weight")
    ('up.weight', 'colwise')
    """
    plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    factor = re.search(r"\.lora_([AB])\.[^.]+(?=\.)", plain)
    if factor is None:
        return plain, "none"
    return plain.replace(factor[0], ""), {"A": "colwise", "B": "rowwise"}[factor[1]]


def _count_heads(model: nn.Module) -> dict[str, int]:
    """How many heads a layer has that must not be cut, by the name of the layer."""
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    queries = int(getattr(config, "num_attention_heads", 0) or 0)
    keys = int(getattr(config, "num_key_value_heads", 0) or queries)
    return {"q_proj": queries, "k_proj": keys, "v_proj": keys}


def _fold_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _read_style(style: str, parameter: Tensor) -> str | None:
    """What a style of transformers does to a parameter: `packed` ones fuse two layers."""
    rows, columns = parameter.ndim - 2, parameter.ndim - 1
    if "embedding_rowwise" in style:
        return "S(0)"
    if "colwise" in style:
        dim = max(rows, 0)
        half = parameter.shape[dim] // 2
        return f"S({dim}) groups({half},{half})" if "packed" in style else f"S({dim})"
    if "rowwise" in style and parameter.ndim > 1:
        return f"S({columns})"
    return None


def _split_experts(model: nn.Module) -> dict[str, str]:
    own = getattr(model, "_ep_plan", None) or {}
    found = {n: "S(0)" for n, p in model.named_parameters() if own.get(_fold_numbers(n)) == "grouped_gemm"}
    if not found:
        raise PlanError(f"{type(model).__name__} lists no experts in an ep_plan: the axis {EXPERT_AXIS!r} has no use")
    return found


def _follow_structure(model: nn.Module, ranks: int, example: Mapping[str, Any] | None) -> dict[str, str]:
    """Columns and rows as a forward pass meets them; tables of the vocabulary by rows."""
    pairs = _run_without_values(model, make_example(model) if example is None else example)
    modules, vocabulary = dict(model.named_modules()), _find_vocabulary(model)
    for name, part in modules.items():
        if is_linear(part) and id(part.weight) in vocabulary:
            pairs.rows.pop(name, None)
    rows = pairs.usable_rows(ranks)
    found = {name: "S(0)" for name, p in model.named_parameters() if id(p) in vocabulary}
    for row, columns in rows.items():
        for name in columns:
            found |= _split_columns(name, modules[name], pairs, ranks)
        found[f"{row}.weight"] = "S(1)" if isinstance(modules[row], nn.Linear) else "S(0)"
    return found


def _find_vocabulary(model: nn.Module) -> set[int]:
    """The tables of token embeddings and the layers that give logits, by the id of the parameter."""
    ends = [getattr(model, get, lambda: None) for get in ("get_input_embeddings", "get_output_embeddings")]
    parts = [part for get in ends if isinstance(part := _try(get), nn.Module) and hasattr(part, "weight")]
    return {id(part.weight) for part in parts if isinstance(part, nn.Embedding | nn.Linear)}


def _try(get: Any) -> Any:
    try:
        return get()
    except NotImplementedError:  # a model without tokens
        return None


def _split_columns(name: str, part: nn.Module, pairs: LinearPairs, ranks: int) -> dict[str, str]:
    groups = pairs.groups.get(name, ())
    fused = f" groups({','.join(map(str, groups))})" if sum(groups) == out_features(part) else ""
    dim = 0 if isinstance(part, nn.Linear) else 1
    bias = {f"{name}.bias": f"S(0){fused}"} if getattr(part, "bias", None) is not None else {}
    return {f"{name}.weight": f"S({dim}){fused}", **bias}


def _run_without_values(model: nn.Module, example: Mapping[str, Any]) -> LinearPairs:
    try:
        return find_linear_pairs(model, example)
    except Exception as error:
        raise PlanError(
            f"{type(model).__name__} has no tp_plan, and a forward pass without values fails: {error}; pass "
            "example=, the arguments of one forward pass, or write a ModelPlan"
        ) from error


def _make_images(config: Any, dtype: torch.dtype | None) -> Tensor:
    size = getattr(config, "image_size", 224)  # convolutions take any size
    sides = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros(1, getattr(config, "num_channels", 3), *sides, dtype=dtype, device="meta")


def _compares_images_with_texts(model: nn.Module) -> bool:
    """Whether a model takes a text and an image, apart from each other: the text has no tokens that are images."""
    config, named = model.config, inspect.signature(model.forward).parameters
    both = hasattr(config, "vision_config") and hasattr(config, "text_config")
    tokens = hasattr(config, "image_token_id") or hasattr(config, "image_token_index")
    return both and not tokens and "pixel_values" in named and "input_ids" in named


def make_example(model: nn.Module) -> dict[str, Tensor]:
    """Arguments for one forward pass of a model of transformers, from its config."""
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        raise PlanError(
            f"{type(model).__name__} has no config to make inputs from: pass example=, the arguments of one forward "
            "pass (for `shardwise model`, the factory returns the model and these), or write a plan"
        )
    dtype = getattr(model, "dtype", None)
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    if name == "pixel_values":
        found = {name: _make_images(config, dtype)}
    elif name == "input_features" and hasattr(config, "num_mel_bins"):
        length = 2 * config.max_source_positions
        found = {name: torch.zeros(1, config.num_mel_bins, length, dtype=dtype, device="meta")}
    elif name == "input_values":  # a second of sound
        found = {name: torch.zeros(1, 16000, dtype=dtype, device="meta")}
    else:
        found = {name: ids}
    if _compares_images_with_texts(model):
        found["pixel_values"] = _make_images(config.vision_config, dtype)
    return {**found, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else found
