"""A plan for a model of transformers without typing it: from its own `tp_plan` and `ep_plan`, else by its structure.

The names of the mesh's axes say what each is for:

- `tp`: linear layers are split by columns and then by rows, embeddings by rows of the table;
- `ep`: experts are divided, each rank has some of them whole;
- `dp`: each rank has its own part of the batch;
- `cp`: each rank computes its own part of the sequence; every rank passes the whole;
- `fsdp`: as `dp`, and parameters of two dims and more are split as well, along the first dim that no other axis splits.

Few patterns for many parameters: numbers become `*`, and names that differ in one part become alternatives.

Which linear layers of a model are split by columns, and which by rows? Found by following one forward pass.

The pass runs on a copy of the model on the meta device, which shares nothing with it: nothing is computed, and what the
forward pass keeps in the model stays in the copy. Each tensor has an origin:

- *stream*: whole hidden states (inputs, embeddings, outputs of rows);
- *columns*: computed from outputs of these linear layers, and from nothing of the stream since;
- none: masks, positions, parameters, which go with anything.

A model that needs values on the way (it splits rows by numbers that it counted) is followed with its own parameters.

1. A linear layer that reads the stream is a candidate for columns: its output has it as origin.
2. A linear layer that reads columns is their row: the sum over ranks ends there, and its output is stream.
3. Columns that meet the stream outside of a linear layer would have to be gathered, and stay whole.
4. On the way, views show how many heads a layer has, and splits show which groups are fused in it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._text import package_logger, public
from shardwise._torch import pytree
from shardwise.geometry import Mesh, Replicate, Shard
from shardwise.geometry.notation import read_placements
from shardwise.nn.heads import Projection, deal_heads, is_linear
from shardwise.nn.plan import BALANCED, OTHERS, PLAIN, REPLICATED, STAGE_AXIS, ModelPlan, PlanError, match_patterns
from shardwise.nn.stages import copy_on_meta

_FUSED = re.compile(r"qkv|gate_up|query_key_value|up_gate")  # layers that are several in one
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def fold_patterns(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Patterns that match exactly the parameters in `texts`, each with its text.

    >>> names = [f"h.{i}.{n}.weight" for i in range(3) for n in ("q_proj", "k_proj", "norm")]
    >>> fold_patterns({n: "tp: S(0)" for n in names if "norm" not in n}, names)
    {'h.*.{q,k}_proj.weight': 'tp: S(0)'}
    """
    folded: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        folded.setdefault(_NUMBER.sub("*", name), {})[name] = text
    found: dict[str, str] = {}
    for pattern, members in folded.items():
        everyone = [n for n in names if _NUMBER.sub("*", n) == pattern]
        if len(set(members.values())) == 1 and set(everyone) == set(members):
            found[pattern] = next(iter(members.values()))
        else:  # layers differ: each by its name
            found |= members
    return _shorten(_join_alternatives(found), names)


def _join_alternatives(found: Mapping[str, str]) -> dict[str, str]:
    """Patterns with one text that differ in one part are one pattern with alternatives."""
    joined: list[tuple[list[list[str]], str]] = []
    for pattern, text in found.items():
        parts = pattern.split(".")
        for several, other in joined:
            differ = [i for i, (a, b) in enumerate(zip(several, parts, strict=False)) if b not in a]
            same = other == text and len(several) == len(parts)
            if same and len(differ) == 1 and all(len(p) == 1 for i, p in enumerate(several) if i != differ[0]):
                several[differ[0]].append(parts[differ[0]])
                break
        else:
            joined.append(([[part] for part in parts], text))
    return {".".join(map(_write_alternatives, parts)): text for parts, text in joined}


def _write_alternatives(parts: Sequence[str]) -> str:
    """One part of a pattern.

    >>> _write_alternatives(["q_proj", "k_proj"]), _write_alternatives(["weight", "bias"]), _write_alternatives(["up"])
    ('{q,k}_proj', '{weight,bias}', 'up')
    """
    if len(parts) == 1:
        return parts[0]
    ends = {p[p.find("_") :] if "_" in p else "" for p in parts}
    end = ends.pop() if len(ends) == 1 else ""
    return "{" + ",".join(p.removesuffix(end) for p in parts) + "}" + end


def _shorten(found: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """`{weight,bias}` as `*` where there is nothing else."""
    shorter = {p.removesuffix("{weight,bias}") + "*" if p.endswith("{weight,bias}") else p: t for p, t in found.items()}
    same = _matches(shorter, names) == _matches(found, names)
    return shorter if same else dict(found)


def _matches(patterns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: patterns[pattern] for name, pattern in match_patterns(patterns, list(names)).items()}


Origin: TypeAlias = frozenset[str] | None
STREAM: frozenset[str] = frozenset()
_SPLITS = (torch.split, Tensor.split, torch.chunk, Tensor.chunk)
_READS_VALUES = (Tensor.item, Tensor.__bool__, Tensor.__contains__)  # checks of padding, layers left out at random
_GROUPED = ("grouped_mm", "_grouped_mm")
_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten)


@dataclass
class LinearPairs:
    """Linear layers by name: those of columns with the rows that they end in, their heads and their fused groups."""

    rows: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    heads: dict[str, set[int]] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def usable_rows(self, ranks: int) -> dict[str, set[str]]:
        """The rows and their columns that can be split over this many ranks; one that cannot leaves the others whole.

        >>> LinearPairs({"down": {"up"}}, {"up"}).usable_rows(4)
        {}
        """
        found = dict(self.rows)
        while True:
            used = set().union(*found.values())
            uneven = {n for n in used if any(h % ranks for h in self.heads.get(n, ()))}
            uneven = {n for n in uneven if not self.has_heads_of_one_length(n)}
            wrong = {n for n in used if n in self.whole or n in found or n in uneven}
            kept = {row: columns for row, columns in found.items() if not columns & wrong}
            if len(kept) == len(found):
                return kept
            self.whole |= used - set().union(*kept.values())
            found = kept

    def has_heads_of_one_length(self, name: str) -> bool:
        """Whether a layer's heads are alike, so that whole ones can be dealt to any number of ranks."""
        return len(self.heads.get(name, ())) <= max(1, len(self.groups.get(name, ())))


def in_features(part: nn.Module) -> int:
    """The length of a linear layer's input."""
    return int(part.in_features if isinstance(part, nn.Linear) else part.nx)  # type: ignore[arg-type]  # of Conv1D


def out_features(part: nn.Module) -> int:
    """The length of a linear layer's output."""
    return int(part.out_features if isinstance(part, nn.Linear) else part.nf)  # type: ignore[arg-type]  # of Conv1D


def find_linear_pairs(module: nn.Module, inputs: Mapping[str, Any], device: torch.device | None = None) -> LinearPairs:
    """Follow a forward pass of a model on the meta device; on the device of its parameters if it needs values.

    >>> block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> find_linear_pairs(block, {"input": torch.ones(2, 4)}).rows
    {'2': {'0'}}
    """
    device = torch.device("meta") if device is None else device
    found, given = LinearPairs(), pytree.tree_map_only(Tensor, lambda t: _put_on(t, device), dict(inputs))
    twin = (copy_on_meta(module) if device.type == "meta" else _copy_but_parameters(module)).eval()
    # In evaluation: layers that are left out at random would need values.
    with torch.no_grad(), device, _hooks(twin, found), _OriginMode(found, device), _global_caches_restored(twin):
        twin(**given)
    return found


def _copy_but_parameters(module: nn.Module) -> nn.Module:
    """A copy of a model that shares the parameters with it and nothing else."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


_FUNCTION_CACHE = type(functools.lru_cache(int))


@contextmanager
def _global_caches_restored(module: nn.Module) -> Iterator[None]:
    """Put back what a pass without values left in the files of a model's classes: tables that functions remember."""
    files = {kind.__module__ for part in module.modules() for kind in type(part).__mro__} - {"builtins"}
    files = {name for name in files if not name.startswith("torch.")}
    spaces: list[Any] = [vars(sys.modules[name]) for name in files if name in sys.modules]
    spaces += [vars(kind) for space in spaces for kind in space.values() if isinstance(kind, type)]
    remembering = {id(f): f for space in spaces for f in space.values() if type(f) is _FUNCTION_CACHE}
    misses = {key: f.cache_info().misses for key, f in remembering.items()}
    tables = {id(v): v for space in spaces for n, v in space.items() if type(v) is dict and n != "__builtins__"}
    before = [(table, dict(table)) for table in (*tables.values(), *(s for s in spaces if isinstance(s, dict)))]
    try:
        yield
    finally:
        for key, function in remembering.items():
            if function.cache_info().misses != misses[key]:
                function.cache_clear()
        for table, kept in before:
            for name in [n for n, v in table.items() if v is not kept.get(n) and _has_meta(v)]:
                table.pop(name)
                table.update({name: kept[name]} if name in kept else {})


def _has_meta(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value))


def _put_on(value: Tensor, device: torch.device) -> Tensor:
    moved = torch.zeros_like(value, device=device) if value.is_meta else value.detach().clone().to(device)
    if moved.is_floating_point():
        _set_origin(moved, STREAM)
    return moved


def _origin(value: Any) -> Origin:
    return getattr(value, "_shardwise_origin", None)


def _set_origin(value: Any, origin: Origin) -> None:
    if isinstance(value, Tensor) and origin is not None:
        value._shardwise_origin = origin  # type: ignore[attr-defined]  # a note on a tensor that lives for one pass


class _OriginMode(TorchFunctionMode):
    """Gives each result the origin of the arguments, and notes heads and fused groups."""

    def __init__(self, found: LinearPairs, device: torch.device) -> None:
        super().__init__()
        self.found = found
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type == "meta":
            if func in _READS_VALUES and args[0].is_meta:
                return False  # there are no values: no padding, no layer left out
            if getattr(func, "__name__", "") in _GROUPED and args[0].ndim == 2:  # torch takes bfloat16 only there
                func, args, kwargs = torch.matmul, (args[0], args[1][0] if args[1].ndim == 3 else args[1]), {}
            if func in _VIEWS:  # sizes that were computed as tensors
                sizes = pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else int(t), args[1:])
                args = (args[0], *sizes)
            if any(isinstance(v, Tensor) and not v.is_meta for v in pytree.tree_leaves((args, kwargs))):
                # A table that a function remembers, or one made from numbers.
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        if not leaves:
            return result
        origin = self._join([o for v in leaves if (o := _origin(v)) is not None])
        made = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
        for value in made:
            if value.is_floating_point():
                _set_origin(value, origin)
        if origin and made:
            self._note_shapes(func, leaves[0], made, origin)
        return result

    def _join(self, origins: list[frozenset[str]]) -> Origin:
        if not origins:
            return None
        joined = frozenset().union(*origins)
        if joined and STREAM in origins:
            self.found.whole |= joined
            return STREAM
        return joined

    def _note_shapes(self, func: Any, given: Tensor, made: list[Tensor], origin: frozenset[str]) -> None:
        first = tuple(made[0].shape)
        for name in origin:
            cut = 0 < len(first) == given.ndim and first[:-1] == given.shape[:-1] and first[-1] != given.shape[-1]
            cut = cut and given.shape[-1] == self.found.widths.get(name)  # not halves of heads, which come later
            if cut and func in _SPLITS:
                self.found.groups.setdefault(name, tuple(int(m.shape[-1]) for m in made))
            elif cut and func is Tensor.__getitem__:  # slices one after the other
                self.found.groups[name] = (*self.found.groups.get(name, ()), int(first[-1]))
            elif func in _VIEWS and len(first) == given.ndim + 1 and first[:-2] == given.shape[:-1]:
                self.found.heads.setdefault(name, set()).add(int(first[-2]))


@contextmanager
def _hooks(module: nn.Module, found: LinearPairs) -> Iterator[None]:
    """Follow linear layers and embeddings of a model."""
    widths = {int(p.in_features) for p in module.modules() if isinstance(p, nn.Linear)}
    widths |= {int(p.weight.shape[0]) for p in module.modules() if is_linear(p) and not isinstance(p, nn.Linear)}  # type: ignore[index]  # of Conv1D
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if is_linear(part):
                stack.callback(part.register_forward_hook(_follow_linear(name, found)).remove)
            elif isinstance(part, nn.Embedding) and part.embedding_dim in widths:
                stack.callback(part.register_forward_hook(lambda _m, _i, out: _set_origin(out, STREAM)).remove)
        yield


def _follow_linear(name: str, found: LinearPairs) -> Callable[[nn.Module, Any, Any], None]:
    def hook(part: nn.Module, inputs: Any, output: Any) -> None:
        columns = _origin(inputs[0])
        if columns:
            found.rows.setdefault(name, set()).update(columns)
            output._shardwise_origin = STREAM
        else:
            found.widths[name] = int(output.shape[-1])
            output._shardwise_origin = frozenset({name})

    return hook


_log = package_logger(__name__)
TENSOR_AXIS, EXPERT_AXIS, DATA_AXES, FSDP_AXIS = "tp", "ep", ("dp", "fsdp"), "fsdp"
SEQUENCE_AXIS = "cp"
_AXES = (TENSOR_AXIS, EXPERT_AXIS, *DATA_AXES, SEQUENCE_AXIS)


@public
def plan(model: nn.Module, mesh: Mesh, example: Any = None, *, sequence_parallel: bool = False) -> ModelPlan:
    """The plan of a model for a mesh with the axes tp, ep, dp, fsdp, cp and pp (some of them); print it to edit it.

    A model without a `tp_plan` of its own is followed through one forward pass without values; `example` has the
    arguments of that pass, by name or in their order, where they cannot be made from the model's config. With
    `sequence_parallel` what is between the layers that `tp` splits is split along the sequence: as many bytes are
    sent, and 1/tp of it is held.

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
    if example is not None and not isinstance(example, Mapping):
        values = example if isinstance(example, tuple | list) else (example,)
        example = dict(zip(inspect.signature(model.forward).parameters, values, strict=False))
    if STAGE_AXIS in mesh.axes:
        rest = [axis for axis in mesh.axes if axis != STAGE_AXIS]
        made = ModelPlan(mesh, {}, input_plan=REPLICATED, output_plan=PLAIN, stages=BALANCED)
        if rest:
            inner = plan(model, made.stage_mesh(0), example, sequence_parallel=sequence_parallel)
            made = replace(inner, mesh=mesh, stages=BALANCED)
        made.specs(model)
        return made
    unknown = [axis for axis in mesh.axes if axis not in _AXES]
    if unknown:
        raise PlanError(f"the axis {unknown[0]!r} of {mesh} says nothing: name axes {', '.join((*_AXES, STAGE_AXIS))}")
    if sequence_parallel and TENSOR_AXIS not in mesh.axes:
        raise PlanError(f"sequence_parallel=True splits activations along {TENSOR_AXIS!r}, and {mesh} has no such axis")
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
    pads = _find_pads(model) if data else None
    inputs: Any = ", ".join(data) or REPLICATED
    if SEQUENCE_AXIS in mesh.axes:
        masks = {"attention_mask": inputs} if "attention_mask" in inspect.signature(model.forward).parameters else {}
        others = ", ".join([*data, f"{SEQUENCE_AXIS}: S(1)"])
        inputs = {**masks, OTHERS: others} if masks else others
    stream = f"{TENSOR_AXIS}: S(1)" if sequence_parallel else None
    made = ModelPlan(
        mesh, fold_patterns(texts, names), input_plan=inputs, output_plan=PLAIN, pad_inputs=pads, activations=stream
    )
    return _write_heads(made, texts, model)


def _write_heads(plan: ModelPlan, texts: Mapping[str, str], model: nn.Module) -> ModelPlan:
    """The plan with the cuts by heads written out, so that they are seen and can be edited."""
    found, names = dict(texts), [name for name, _ in model.named_parameters()]
    for name, spec in plan.specs(model).items():
        written = read_placements(texts[name], plan.mesh) if name in texts else spec.placements
        if written != spec.placements:
            shown = [(a, p) for a, p in zip(plan.mesh.axes, spec.placements, strict=True) if p != Replicate()]
            found[name] = ", ".join(f"{axis}: {placement.format()}" for axis, placement in shown)
    return plan if found == texts else replace(plan, parameters=fold_patterns(found, names))


def _find_pads(model: nn.Module) -> dict[str, float] | None:
    """What fills up the batches of a model that reads tokens and a mask: what the mask leaves out, and no labels."""
    config, names = getattr(model, "config", None), inspect.signature(model.forward).parameters
    if config is None or "attention_mask" not in names:
        return None
    token = getattr(config, "pad_token_id", None) or 0
    pads = {"input_ids": token, "attention_mask": 0, "token_type_ids": 0, "decoder_input_ids": token}
    pads |= {"decoder_attention_mask": 0, "labels": -100}
    return {name: number for name, number in pads.items() if name in names} if "input_ids" in names else None


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
    """What the model's own plan says; of fused layers, and where it splits less than half, the structure says more."""
    own = getattr(model, "_tp_plan", None)
    found, problem = _follow_tp_plan(model, own, ranks) if own else {}, ""
    if not found or _split_share(model, found) < 0.5:
        experts = {n: "S(0)" for n, p in _find_experts(model).items() if n not in found and p.shape[0] % ranks == 0}
        found |= experts if found else {}
        try:
            found = {**_follow_structure(model, ranks, example), **found}
        except PlanError as error:
            if not found:
                raise
            problem = str(error)
    elif any(_FUSED.search(name) for name in found):  # whose parts are seen where they are taken apart
        with suppress(PlanError):
            structure = _follow_structure(model, ranks, example)
            found |= {n: text for n, text in structure.items() if text.partition(" ")[0] == found.get(n)}
    if not found:
        raise PlanError(
            f"{type(model).__name__}: no layers were found that can be split over {ranks} ranks of axis "
            f"{TENSOR_AXIS!r}; use the axes dp or fsdp, another number of ranks, or write a ModelPlan"
        )
    share = _split_share(model, found)
    if share < 0.5:
        whole = [(p.nbytes, name) for name, p in model.named_parameters() if name not in found]
        largest = ", ".join(name for _, name in sorted(whole, reverse=True)[:3])
        warnings.warn(
            f"{type(model).__name__}: the axis {TENSOR_AXIS!r} splits {len(found)} parameters, {100 * share:.1f} % of "
            f"the bytes; every rank has the whole of {len(whole)} others, such as {largest}: neither its tp_plan nor a "
            f"forward pass shows columns and rows that {ranks} ranks divide"
            + (f" ({problem})" if problem else "")
            + "; add patterns for them, or use the axis fsdp",
            stacklevel=4,
        )
    return found


def _split_share(model: nn.Module, found: Mapping[str, str]) -> float:
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    return sum(sizes.get(name, 0) for name in found) / max(1, sum(sizes.values()))


def _follow_tp_plan(model: nn.Module, own: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The placements of parameters by the styles that the model lists for its modules."""
    heads = _count_heads(model)
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        plain, factor = _strip_adapter(name)
        for style in (own.get(_fold_numbers(plain)), own.get(_fold_numbers(plain.rpartition(".")[0]))):
            text = None if style is None or factor in style else _read_style(style, parameter)
            if text is not None and _are_dealt(heads.get(plain.split(".")[-2], 0), heads["q_proj"], ranks):
                found[name] = text
                break
    return found


def _are_dealt(count: int, queries: int, ranks: int) -> bool:
    """Whether heads are dealt to ranks, each whole: not fewer heads of keys that ranks cannot share evenly."""
    return count >= min(queries, ranks) or (count > 0 and ranks % count == 0) or count == 0


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
    queries = _read_common(config, "num_attention_heads")
    keys = _read_common(config, "num_key_value_heads") or queries
    return {"q_proj": queries, "k_proj": keys, "v_proj": keys}


def _read_common(config: Any, name: str) -> int:
    """A number of a config; where layers have numbers of their own, the largest that divides them all."""
    layers = getattr(config, "per_layer_config", None) or [config]
    layers = list(layers.values()) if isinstance(layers, Mapping) else layers
    return math.gcd(*(int(getattr(layer, name, 0) or 0) for layer in layers))


def find_key_heads(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The weights that make keys and values: with the name of the queries' weight beside, and how many heads it has."""
    heads, names = _count_heads(model), [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        if own in ("k_proj", "v_proj") and heads[own]:
            found[name] = f"{parent}.q_proj.weight".removeprefix("."), heads[own]
    return found


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
    found = dict.fromkeys(_find_experts(model), "S(0)")
    if not found:
        raise PlanError(f"{type(model).__name__} lists no experts in an ep_plan: the axis {EXPERT_AXIS!r} has no use")
    return found


def _find_experts(model: nn.Module) -> dict[str, Tensor]:
    """The parameters with a dim of experts in front, as a model's own `ep_plan` lists them."""
    own = getattr(model, "_ep_plan", None) or {}
    return {n: p for n, p in model.named_parameters() if own.get(_fold_numbers(n)) == "grouped_gemm"}


def _follow_structure(model: nn.Module, ranks: int, example: Mapping[str, Any] | None) -> dict[str, str]:
    """Columns and rows as a forward pass meets them; tables of the vocabulary by rows."""
    examples = [make_example(model), make_example(model, all_inputs=True)] if example is None else [example]
    pairs = _run_without_values(model, examples, asked=example is None)
    modules, vocabulary = dict(model.named_modules()), _find_vocabulary(model)
    for name, part in modules.items():
        if is_linear(part) and id(part.weight) in vocabulary:
            pairs.rows.pop(name, None)
    rows = pairs.usable_rows(ranks)
    found = {name: "S(0)" for name, p in model.named_parameters() if id(p) in vocabulary}
    for row, columns in rows.items():
        cuts = {row: Shard(0), **{name: _cut_in_groups(name, modules[name], pairs) for name in columns}}
        cuts |= _cut_by_heads(row, cuts, modules, pairs, ranks)
        for name in columns:
            part, cut = modules[name], cuts[name]
            found[f"{name}.weight"] = cut.along(0 if isinstance(part, nn.Linear) else 1).format()
            if getattr(part, "bias", None) is not None:
                found[f"{name}.bias"] = cut.format()
        found[f"{row}.weight"] = cuts[row].along(1 if isinstance(modules[row], nn.Linear) else 0).format()
    return found


def _cut_in_groups(name: str, part: nn.Module, pairs: LinearPairs) -> Shard:
    groups = pairs.groups.get(name, ())
    return Shard(0, groups=groups) if sum(groups) == out_features(part) else Shard(0)


def _cut_by_heads(
    row: str, cuts: Mapping[str, Shard], modules: Mapping[str, nn.Module], pairs: LinearPairs, ranks: int
) -> dict[str, Shard]:
    """The cuts of columns and of the row that they end in, where even ones would cut heads apart."""
    found: dict[str, tuple[Projection, Shard]] = {}
    for name, cut in cuts.items():
        part, most = modules[name], max(pairs.heads.get(name, ()), default=0)
        size = in_features(part) if name == row else out_features(part)
        length = (cut.groups or (size,))[0] // most if most else 0
        found[name] = Projection(name, 0, size, length, name == row, ""), cut
    lengths = {one.length for name, (one, _) in found.items() if name != row}
    length = lengths.pop() if len(lengths) == 1 else 0
    if not length or any(n % length for one, cut in found.values() for n in cut.groups or (one.size,)):
        return {}
    found = {name: (replace(one, length=length), cut) for name, (one, cut) in found.items()}
    return deal_heads(found, ranks) if any(one.is_cut_apart(cut, ranks) for one, cut in found.values()) else {}


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


def _run_without_values(model: nn.Module, examples: Sequence[Mapping[str, Any]], *, asked: bool) -> LinearPairs:
    """Follow a forward pass with the first of these arguments that work; `asked`: they are made from the config."""
    device, errors = next((p.device for p in model.parameters()), torch.device("meta")), []
    for example in examples:
        try:
            return find_linear_pairs(model, example)
        except Exception as error:  # of any kind: that of the pass without values says more than others
            errors.append(error)
            if device.type != "meta":
                try:
                    return find_linear_pairs(model, example, device)
                except Exception as with_values:
                    errors[-1] = error if asked else with_values
    advice = "pass example=, the arguments of one forward pass, or write" if asked else "correct example=, or write"
    how = "without values " if asked or device.type == "meta" else ""
    raise PlanError(
        f"{type(model).__name__} has no tp_plan, and a forward pass {how}fails: {errors[0]}; {advice} a ModelPlan"
    ) from errors[0]


def _make_images(config: Any, dtype: torch.dtype | None) -> Tensor:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 224)
    sides = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros(1, getattr(config, "num_channels", 3), *sides, dtype=dtype, device="meta")


def _compares_images_with_texts(model: nn.Module) -> bool:
    """Whether a model takes a text and an image, apart from each other: the text has no tokens that are images."""
    config, named = model.config, inspect.signature(model.forward).parameters
    both = hasattr(config, "vision_config") and hasattr(config, "text_config")
    tokens = hasattr(config, "image_token_id") or hasattr(config, "image_token_index")
    return both and not tokens and "pixel_values" in named and "input_ids" in named


def make_example(model: nn.Module, *, all_inputs: bool = False) -> dict[str, Tensor]:
    """Arguments for one forward pass of a model of transformers, from its config: the main ones, or all it names."""
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
        length = 2 * getattr(config, "max_source_positions", 64)
        found = {name: torch.zeros(1, config.num_mel_bins, length, dtype=dtype, device="meta")}
    elif name == "input_values":  # a second of sound
        found = {name: torch.zeros(1, 16000, dtype=dtype, device="meta")}
    else:
        found = {name: ids}
    if _compares_images_with_texts(model):
        found["pixel_values"] = _make_images(config.vision_config, dtype)
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids
    if all_inputs:
        named = inspect.signature(model.forward).parameters
        others = {"input_ids": ids, "decoder_input_ids": ids}
        others |= {"pixel_values": _make_images(getattr(config, "vision_config", config), dtype)}
        found |= {other: value for other, value in others.items() if other in named and other not in found}
    return found
