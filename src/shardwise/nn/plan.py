"""A plan for a whole model in a few lines: a mesh, patterns over parameter names, and how plain inputs are read.

A plan is a value. It is checked against a model on the meta device, for any number of ranks, without a process group.

`ShardingPlan`, `Sharder` and `ShardingPlanner` are torch's way of saying which parameters and modules are sharded.

Which parameter does a pattern name, and what does its text say for each axis of the mesh?

A pattern is a parameter's path in which `*` matches one part, `**` any number of parts, `{q,k,v}` one of several and
`{0-15}` one of these numbers:

    "blocks.*.mlp.up.weight": "S(0)"                 for the plan's axis, or the mesh's only one
    "blocks.*.{q,k,v}_proj.weight": "S(0)"           three layers of each block
    "blocks.{0-15}.**"                               the first 16 blocks
    "blocks.*.attn.qkv.weight": "tp: S(0) groups(q,k,v)"   other axes replicate; q, k and v are numbers of the plan
    "embed.weight": "R, S(1)"                        one placement for each axis

Everything here is text and geometry: no tensors, no process group.

Does a plan fit the model and the ranks? Everything is checked before anything changes, on all ranks together.

What is wrong on one rank only, and plans that differ between ranks, are raised on every rank: none waits for others.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from shardwise._text import to_toml
from shardwise.comm import Comm, DisagreementError, advise_ranks, agree, name_ranks
from shardwise.comm.current import remember_device_mesh
from shardwise.geometry import (
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
    format_placement,
    parse_spec,
)
from shardwise.geometry.mesh import is_device_mesh
from shardwise.geometry.notation import read_by_axis, read_placements
from shardwise.geometry.placements import to_placement
from shardwise.nn.heads import keep_heads
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_RANGE = re.compile(r"\b(\d+)\\-(\d+)\b")  # in an escaped pattern
_ALTERNATIVE_DOT = re.compile(r"\.(?![^{}]*\})")  # a dot outside of {self_attn.q,mlp.up}
_MAX_SUGGESTIONS = 3


class PlanError(ValueError):
    """A plan that does not fit its model, with everything that is wrong with it.

    >>> import torch, shardwise
    >>> shardwise.ModelPlan(shardwise.Mesh.of(tp=2), {"wieght": "S(0)"}).specs(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    ...
    shardwise.nn.plan.PlanError: the pattern 'wieght' matches no parameter; near it: weight
    """


def match_patterns(patterns: Iterable[str], names: Sequence[str], what: str = "parameter") -> dict[str, str]:
    """The pattern of each name that has one; patterns without a name and names with two are errors.

    >>> match_patterns(["blocks.*.up.weight"], ["blocks.0.up.weight", "blocks.1.up.weight", "head.weight"])
    {'blocks.0.up.weight': 'blocks.*.up.weight', 'blocks.1.up.weight': 'blocks.*.up.weight'}
    >>> match_patterns(["block.*.up.weight"], ["blocks.0.up.weight", "head.weight"])
    Traceback (most recent call last):
    ...
    shardwise.nn.plan.PlanError: the pattern 'block.*.up.weight' matches no parameter; near it: blocks.0.up.weight
    """
    found: dict[str, list[str]] = {}
    problems = []
    for pattern in patterns:
        matcher = _compile_pattern(pattern)
        hits = [name for name in names if matcher.fullmatch(name)]
        for name in hits:
            found.setdefault(name, []).append(pattern)
        if not hits:
            near = ", ".join(_find_similar_names(pattern, names)) or "nothing"
            wide = ".".join("**" if part == "*" else part for part in pattern.split("."))
            fits = wide != pattern and any(map(_compile_pattern(wide).fullmatch, names))
            fix = f"; * is one part of a name, ** any number of parts: {wide!r}" if fits else ""
            problems.append(f"the pattern {pattern!r} matches no {what}; near it: {near}{fix}")
    for name, several in found.items():
        if len(several) > 1:
            problems.append(f"{name} matches {' and '.join(map(repr, several))}; a {what} has one pattern")
    if problems:
        raise PlanError("\n".join(problems))
    return {name: several[0] for name, several in found.items()}


def _find_similar_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names most like a pattern, one of several that differ in numbers only.

    >>> _find_similar_names("layer.*.up.weight", ["layers.0.up.weight", "layers.1.up.weight", "layers.0.down.weight"])
    ['layers.0.up.weight', 'layers.0.down.weight']
    """
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), name)
    close = get_close_matches(pattern, kinds, n=_MAX_SUGGESTIONS, cutoff=0.6) or list(kinds)[:_MAX_SUGGESTIONS]
    return [kinds[kind] for kind in close]


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise PlanError("a pattern is a parameter's path such as 'blocks.*.weight'; got an empty one")
    texts = [".*" if part == "**" else _part_expression(part, pattern) for part in _ALTERNATIVE_DOT.split(pattern)]
    return re.compile(r"\.".join(texts).replace(r".*\.", r"(?:.*\.)?"))


def _part_expression(part: str, pattern: str) -> str:
    """The regular expression of one part of a pattern.

    >>> _part_expression("{q,k}_proj", "layers.{q,k}_proj"), _part_expression("{0-2,8}", "layers.{0-2,8}")
    ('(?:q|k)_proj', '(?:0|1|2|8)')
    """
    text = re.escape(part.replace(" ", "")).replace(r"\*", r"[^.]*")
    text = re.sub(r"\\\{([^{}]*)\\\}", lambda m: f"(?:{_RANGE.sub(_list_numbers, m[1]).replace(',', '|')})", text)
    if r"\{" in text or r"\}" in text:
        raise PlanError(f"the pattern {pattern!r}: a brace has no partner; alternatives are written {{q,k,v}}")
    return text


def _list_numbers(found: re.Match[str]) -> str:
    return "|".join(map(str, range(int(found[1]), int(found[2]) + 1)))


def write_placements(value: Any) -> Any:
    """Placements of a parameter, one or a list, ours or torch's, in the notation; anything else as it is.

    >>> from shardwise.geometry import Replicate, Shard
    >>> write_placements([Replicate(), Shard(0, block=2)]), write_placements("tp: S(0)")
    ('R, S(0) block(2)', 'tp: S(0)')
    """
    listed = value if isinstance(value, list | tuple) else [value]
    try:
        return ", ".join(format_placement(to_placement(p)) for p in listed)
    except LayoutError:
        return value


def read_mesh(text: str) -> Mesh:
    """A mesh from its text.

    >>> read_mesh("dp=2,tp=4").shape
    (2, 4)
    """
    spec = parse_spec(f"on {text}: {', '.join('R' * text.count('='))}")
    mesh = getattr(spec, "mesh", None)
    assert isinstance(mesh, Mesh)
    return mesh


class Sharder(ABC):
    """Shards a whole module in a way that specs of single parameters cannot express.

    >>> class Freeze(Sharder):
    ...     def shard(self, module):
    ...         return module.requires_grad_(False)
    >>> ShardingPlan({"encoder": Freeze()}).plan["encoder"].shard(nn.Linear(1, 1)).weight.requires_grad
    False
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that takes the place of `module`."""


@dataclass
class ShardingPlan:
    """What `shard_module` does to a model; "" names the model itself.

    `plan` maps each parameter to a spec, or each module to a `Sharder`. `output_plan` has a spec for
    each module whose sharded output is redistributed. Modules in `return_local_tensor` return their local tensor.

    >>> from shardwise.geometry import ChunkSpec
    >>> plan = ShardingPlan({"fc1.weight": ChunkSpec(0, ranks=4)}, return_local_tensor=["fc1"])
    >>> plan.output_plan is None
    True
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes a plan for a model.

    >>> from shardwise.geometry import ChunkSpec
    >>> class ByRows(ShardingPlanner):
    ...     def build_plan(self, module):
    ...         return ShardingPlan({name: ChunkSpec(0, ranks=2) for name, _ in module.named_parameters()})
    >>> list(ByRows().build_plan(nn.Linear(2, 4)).plan)
    ['weight', 'bias']
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return how to shard the module."""


def owners_of(module: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that own each parameter, by the id of the parameter: several for a shared one.

    >>> layer = nn.Linear(2, 1)
    >>> [type(owner).__name__ for owner in owners_of(nn.Sequential(layer))[id(layer.weight)]]
    ['Linear']
    """
    found: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(owner)
    return found


REPLICATED, PLAIN, BALANCED = "replicated", "plain", "balanced"
STAGE_AXIS = "pp"
ATTENTION = ("ulysses", "ring", "gather")
OTHERS = "**"  # the inputs that an input_plan does not name


LARGE_BYTES, MODEL_BYTES = 1 << 20, 256 << 20  # of parameters for which memory matters


@dataclass(frozen=True)
class ModelPlan:
    """How the parameters of a model are laid out on a mesh, by pattern; parameters without a pattern are replicated.

    - `mesh`: a Mesh, or torch's DeviceMesh.
    - `parameters`: pattern to placements, in the notation (see `shardwise.nn.plan`), or as objects, also torch's:
      `[Replicate(), Shard(0)]`.
    - `axis`: the axis that a single placement without a name is for.
    - `lengths`: the numbers behind names in `groups(q,k,v)`.
    - `input_plan`: how plain inputs of the model are read: "replicated" (every rank passes the same), or placements.
      Along an axis with S(0), as in "dp: S(0)", every rank passes its own part of dim 0; along one with S(1), as in
      "dp: S(0), cp: S(1)" for context parallelism, every rank passes the whole and the plan cuts it: tensors of two or
      three dims (tokens, embeddings of them) whose dim is as long as the axis at least; others stay whole. A mapping
      says so for each argument by its name, and "**" for all others: `{"mask": "cp: S(2)", "**": "cp: S(1)"}`.
      None: each layer reads inputs as this rank's batch.
    - `output_plan`: "plain" for a model that returns plain tensors: the rows that this rank passed in, and whole
      tensors where dim 0 is not the batch; other dims are whole. None: outputs are ShardedTensors.
    - `activations`: where tensors between modules are. A mapping of patterns of modules to placements: what such a
      module returns (the first floating-point tensor of it) is redistributed to them along the axes that they name, and
      stays as it is along the others. A text by itself, such as "tp: S(1)" for sequence parallelism, is for the tables
      of embeddings, where the stream of activations begins. A dim that is shorter than its axis stays whole.
      Parameters that are split along a named axis are never moved along it, except along axes that `input_plan` splits
      inputs along: there they are gathered, as in fully sharded training. None: operators move what is fewer bytes.
    - `pad_inputs`: for keyword arguments of the model, the number that fills them up where the parts of the batch have
      other lengths in dims after dim 0, as in `{"input_ids": 0, "attention_mask": 0, "labels": -100}`. All parts get
      the longest length, and so do the outputs. None: such parts are an error.
    - `reshard_after_forward`: whether parameters that an operator needs whole are freed after it and gathered again in
      the backward pass: True, False, or patterns. None: large ones of large models, except for the last operator's.
    - `prefetch_bytes`: how many bytes of parameters are gathered before an operator needs them, beside computation,
      and of gradients summed beside it. None: as many as the operator with most parameters needs. 0: none.
    - `gather_dtype`: the dtype in which parameters are gathered and used, as torch.bfloat16; or patterns to dtypes.
      Their gradients are summed in float32, and optimizers see the parameters as they are.

    - `attention`: how attention over a split sequence is computed: "ulysses", "ring" or "gather". None: as is cheapest.
    - `recompute`: activation checkpointing: modules that keep their inputs only and compute the rest again in the
      backward pass. Patterns of modules; True: the layers of the model's lists of modules.
    - `stages`: for pipelines, the stage of each parameter, along the axis `pp` of the mesh, which no placement names.
      A mapping of patterns of modules or parameters to numbers from 0, as in `{"embed": 0, "layers.{0-15}": 0, ...}`;
      "balanced": as many stages as the axis has ranks, with contiguous layers of about equal sizes; a number: so many,
      balanced. Stage i is on place i % pp of the axis. `shard_module` gives a rank its stages only, and
      `shardwise.nn.Pipeline` hands them to a schedule of torch.

    >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {"0.weight": "tp: S(0)", "2.weight": "tp: S(1)"})
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> plan.specs(model)["2.weight"]
    MeshSpec(dp=2,tp=2, (Replicate(), Shard(1)))
    >>> plan.specs(model)["0.bias"]
    MeshSpec(dp=2,tp=2, (Replicate(), Replicate()))
    """

    mesh: Mesh
    parameters: Mapping[str, Any]
    axis: str | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    input_plan: str | Mapping[str, Any] | None = None
    output_plan: str | None = None
    reshard_after_forward: bool | Sequence[str] | None = None
    prefetch_bytes: int | None = None
    gather_dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None
    pad_inputs: Mapping[str, float] | None = None
    activations: str | Mapping[str, Any] | None = None
    stages: str | int | Mapping[str, int] | None = None
    attention: str | None = None
    recompute: bool | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if is_device_mesh(self.mesh):
            object.__setattr__(self, "_device_mesh", self.mesh)
            object.__setattr__(self, "mesh", remember_device_mesh(cast(Any, self.mesh)))
        if not isinstance(self.parameters, Mapping):
            raise PlanError(
                "a plan maps patterns to placements, as in ModelPlan(Mesh.of(tp=2), {'*.weight': 'S(0)'}); got "
                f"{type(self.parameters).__name__} in place of the patterns"
            )
        object.__setattr__(self, "parameters", {p: write_placements(v) for p, v in self.parameters.items()})
        object.__setattr__(self, "gather_dtype", _read_dtypes(self.gather_dtype))
        _check_kinds(self.mesh, self.parameters)
        _check_bytes(self.prefetch_bytes)
        if self.stages is not None:
            _check_stages(self)
        if self.attention not in (None, *ATTENTION) or (self.attention is not None and self.input_plan is None):
            raise PlanError(
                f"attention is {', '.join(map(repr, ATTENTION))} or None, in a plan with an input_plan; got "
                f"{self.attention!r} and input_plan {self.input_plan!r}"
            )
        if self.input_plan == "replicate":  # as in Replicate() and in other libraries
            object.__setattr__(self, "input_plan", REPLICATED)
        for name, number in (self.pad_inputs or {}).items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise PlanError(f"pad_inputs maps names of arguments to numbers, got {name!r}: {number!r}")
        _check_output_plan(self.output_plan, self.input_plan)
        if isinstance(self.input_plan, Mapping):
            written = {name: write_placements(value) for name, value in self.input_plan.items()}
            object.__setattr__(self, "input_plan", written)
        if self.axis is not None:
            self.mesh.axis_index(self.axis)
        for name, text in self._input_texts().items():
            try:
                _check_inputs(self._read_inputs(text), text)
            except LayoutError as error:
                raise PlanError(f"input_plan {name + ': ' if name != OTHERS else ''}{text!r}: {error}") from None
        if isinstance(self.activations, Mapping):
            written = {pattern: write_placements(value) for pattern, value in self.activations.items()}
            object.__setattr__(self, "activations", written)
        _check_activations(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_device_mesh"}

    @property
    def device_mesh(self) -> Any:
        """Torch's DeviceMesh that the plan was made with, or None."""
        return vars(self).get("_device_mesh")

    @property
    def input_placements(self) -> tuple[Placement, ...] | None:
        """What each axis does to plain inputs, or None if each layer reads them on its own."""
        return None if self.input_plan is None else self._read_inputs(self._input_texts().get(OTHERS, REPLICATED))

    @property
    def named_input_placements(self) -> dict[str, tuple[Placement, ...]]:
        """The same for the arguments of a model that the plan names.

        >>> ModelPlan(Mesh.of(cp=2), {}, input_plan={"mask": "S(2)", "**": "S(1)"}).named_input_placements
        {'mask': (Shard(2),)}
        """
        return {name: self._read_inputs(text) for name, text in self._input_texts().items() if name != OTHERS}

    def _input_texts(self) -> dict[str, Any]:
        if isinstance(self.input_plan, Mapping):
            return dict(self.input_plan)
        return {} if self.input_plan is None else {OTHERS: self.input_plan}

    def _read_inputs(self, text: Any) -> tuple[Placement, ...]:
        mesh = self.stage_mesh(0)
        if text == REPLICATED:
            return (Replicate(),) * mesh.ndim
        if not isinstance(text, str):
            raise LayoutError("an input_plan has placements such as 'dp: S(0)', or 'replicated'")
        return read_placements(text, mesh, self.axis, self.lengths)

    @property
    def stage_count(self) -> int:
        """How many stages the plan has, 1 without any."""
        if self.stages is None:
            return 1
        if isinstance(self.stages, Mapping):
            return max(self.stages.values()) + 1
        return self.mesh.axis_size(STAGE_AXIS) if isinstance(self.stages, str) else self.stages

    def stage_mesh(self, stage: int) -> Mesh:
        """The mesh of the ranks that have a stage: all of it without stages.

        >>> ModelPlan(Mesh.of(pp=2, tp=2), {}, input_plan="replicated", stages="balanced").stage_mesh(1).ranks
        array([2, 3])
        """
        if self.stages is None:
            return self.mesh
        rest, place = [a for a in self.mesh.axes if a != STAGE_AXIS], stage % self.mesh.axis_size(STAGE_AXIS)
        return self.mesh.submesh(*rest, pp=place) if rest else Mesh((STAGE_AXIS,), [int(self.mesh.ranks[place])])

    def of_stage(self, stage: int, names: Sequence[str], entry: str | None) -> ModelPlan:
        """The plan of the parameters with these names for the ranks of a stage, which has no stages itself.

        `entry`: the module where the stream of `activations` begins, if no table of embeddings is in the stage.
        """

        def keep(given: Any, among: Iterable[str] = names) -> Any:
            if not isinstance(given, Mapping | list | tuple):
                return given
            kept = [p for p in given if any(map(_compile_pattern(p).fullmatch, among))]
            return {p: given[p] for p in kept} if isinstance(given, Mapping) else kept

        stream = {entry: self.activations} if isinstance(self.activations, str) and entry else self.activations
        return replace(
            self,
            mesh=self.stage_mesh(stage),
            parameters=keep(self.parameters),
            reshard_after_forward=keep(self.reshard_after_forward),
            recompute=keep(self.recompute, {name[: m.start()] for name in names for m in re.finditer(r"\.", name)}),
            gather_dtype=keep(self.gather_dtype),
            output_plan=None,
            activations=stream,
            stages=None,
        )

    def assign_stages(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The stage of each tensor that has one, from the names and shapes of a model's, in their order.

        >>> shapes = {f"{n}.weight": (8, 8) for n in ("embed", "layers.0", "layers.1", "layers.2", "head")}
        >>> plan = ModelPlan(Mesh.of(pp=2), {}, input_plan="replicated", stages="balanced")
        >>> list(plan.assign_stages(shapes).values())
        [0, 0, 0, 1, 1]
        """
        if self.stages is None:
            return {}
        if not isinstance(self.stages, Mapping):
            return _balance_stages(shapes, self.stage_count)
        paths = {name: [name[: m.start()] for m in re.finditer(r"\.", name)] + [name] for name in shapes}
        listed = sorted({path for several in paths.values() for path in several})
        hits: dict[str, dict[int, str]] = {}
        for pattern, stage in self.stages.items():
            matcher = _compile_pattern(pattern)
            if not any(matcher.fullmatch(path) for path in listed):
                near = ", ".join(_find_similar_names(pattern, listed)) or "nothing"
                raise PlanError(f"stages: the pattern {pattern!r} matches no module or parameter; near it: {near}")
            for name, several in paths.items():
                if any(matcher.fullmatch(path) for path in several):
                    hits.setdefault(name, {}).setdefault(stage, pattern)
        for name, found in hits.items():
            if len(found) > 1:
                both = " and ".join(f"{stage} ({pattern!r})" for stage, pattern in found.items())
                raise PlanError(f"stages: {name} is in the stages {both}; a parameter has one stage")
        return {name: next(iter(found)) for name, found in hits.items()}

    def activation_placements(self, text: str) -> dict[str, Placement]:
        """What a text of `activations` says of the axes that it names."""
        return read_by_axis(text, self.stage_mesh(0), self.axis, self.lengths)

    def pinned_axes(self, spec: MeshSpec) -> frozenset[str]:
        """The axes along which a parameter of such a spec is never moved.

        >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {}, input_plan="dp: S(0)", activations="dp: S(0), tp: S(1)")
        >>> plan.pinned_axes(MeshSpec(plan.mesh, (Shard(0), Shard(1))))
        frozenset({'tp'})
        """
        texts = self.activations.values() if isinstance(self.activations, Mapping) else (self.activations,)
        named = {axis for text in texts if text is not None for axis in self.activation_placements(text)}
        inputs = zip(self.stage_mesh(0).axes, self.input_placements or (), strict=False)
        split = {axis for axis, placement in inputs if isinstance(placement, Shard)}
        by_axis = zip(spec.mesh.axes, spec.placements, strict=True)
        return frozenset(a for a, p in by_axis if a in named - split and isinstance(p, Shard))

    def activation_modules(self, module: nn.Module) -> dict[str, str]:
        """The modules whose outputs are redistributed, by name, and to which placements.

        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        >>> ModelPlan(Mesh.of(tp=2), {}, input_plan="replicated", activations="tp: S(1)").activation_modules(model)
        {'0': 'tp: S(1)'}
        """
        if self.activations is None:
            return {}
        if isinstance(self.activations, Mapping):
            names = [name for name, _ in module.named_modules() if name]
            found = match_patterns(self.activations, names, "module")
            return {name: self.activations[pattern] for name, pattern in found.items()}
        specs = self.specs(module)
        tables = [name for name, part in module.named_modules() if isinstance(part, nn.Embedding)]
        split = [name for name in tables if self.pinned_axes(specs[f"{name}.weight" if name else "weight"])]
        if not tables:
            raise PlanError(
                f"activations {self.activations!r}: the model has no nn.Embedding, where the stream of them would "
                f"begin; name the modules, as in {{'patches': {self.activations!r}}}"
            )
        return dict.fromkeys(split or tables, self.activations)

    def resharded(self, module: nn.Module) -> set[str]:
        """The names of the parameters of which the whole is freed after each operator and gathered again in backward.

        If the plan does not say: all large ones, where the sharded parameters of the model are larger than 256 MiB.
        """
        tensors = dict(module.named_parameters(remove_duplicate=False))
        if self.reshard_after_forward is None:
            sizes = {n: tensors[n].nbytes for n in match_patterns(self.parameters, list(tensors))}
            return {n for n, size in sizes.items() if size >= LARGE_BYTES and sum(sizes.values()) >= MODEL_BYTES}
        if isinstance(self.reshard_after_forward, bool):
            return set(tensors) if self.reshard_after_forward else set()
        return set(match_patterns(self.reshard_after_forward, list(tensors)))

    def gather_dtypes(self, module: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes in which parameters are gathered and used, by name, where the plan says so.

        >>> plan = ModelPlan(Mesh.of(dp=2), {"**": "S(0)"}, gather_dtype={"0.*": "bfloat16"})
        >>> plan.gather_dtypes(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
        {'0.weight': torch.bfloat16, '0.bias': torch.bfloat16}
        """
        floating = [n for n, t in module.named_parameters(remove_duplicate=False) if t.is_floating_point()]
        given = self.gather_dtype
        if given is None or isinstance(given, torch.dtype):
            return {} if given is None else dict.fromkeys(floating, given)
        assert isinstance(given, Mapping)
        return {name: cast(torch.dtype, given[p]) for name, p in match_patterns(given, floating).items()}

    def to_data(self) -> dict[str, Any]:
        """The plan as plain data, as files of plans have it."""
        data: dict[str, Any] = {"mesh": str(self.mesh)}
        plain = ("axis", "input_plan", "output_plan", "prefetch_bytes", "attention")
        data |= {name: value for name in plain if (value := getattr(self, name)) is not None}
        for name in ("reshard_after_forward", "recompute"):
            if (given := getattr(self, name)) is not None:
                data[name] = given if isinstance(given, bool) else list(given)
        if self.gather_dtype is not None:
            data["gather_dtype"] = _write_dtypes(self.gather_dtype)
        data |= {"lengths": dict(self.lengths)} if self.lengths else {}
        data |= {"pad_inputs": dict(self.pad_inputs)} if self.pad_inputs else {}
        if self.activations is not None:
            data["activations"] = self.activations if isinstance(self.activations, str) else dict(self.activations)
        if self.stages is not None:
            data["stages"] = dict(self.stages) if isinstance(self.stages, Mapping) else self.stages
        return data | {"parameters": dict(self.parameters)}

    def __str__(self) -> str:
        """The plan as TOML, as `save_plan` writes it: to edit and to load again."""
        return to_toml(self.to_data()).rstrip()

    def specs(self, module: nn.Module) -> dict[str, MeshSpec]:
        """The spec of every parameter; raises `PlanError` with all that does not fit.

        Projections of attention that a pattern would cut inside a head are cut by heads (`nn/heads.py`).
        """
        tensors = dict(module.named_parameters(remove_duplicate=False))
        found = self.specs_of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors)
        if self.input_placements is None:
            return found
        problems: list[str] = []
        found |= keep_heads(module, found, self.input_placements, problems)
        if problems:
            raise PlanError("\n".join(problems))
        return found

    def specs_of(
        self, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor] | None = None
    ) -> dict[str, MeshSpec]:
        """The spec of every tensor of these names and shapes, as for the parameters of a model.

        `tensors`: by the same names, to find those that have several.

        >>> ModelPlan(Mesh.of(tp=2), {"*.weight": "S(0)"}).specs_of({"up.weight": (8, 4), "up.bias": (8,)})["up.bias"]
        MeshSpec(tp=2, (Replicate(),))
        """
        matched = match_patterns(self.parameters, list(shapes))
        stages = self.assign_stages(shapes)
        problems: list[str] = _check_all_have_stages(shapes, stages) if self.stages is not None else []
        found: dict[str, MeshSpec] = {}
        for name, shape in shapes.items():
            pattern, mesh = matched.get(name), self.stage_mesh(stages.get(name, 0))
            try:
                spec = self._parse_spec(REPLICATED if pattern is None else self.parameters[pattern], mesh)
                spec.layout(shape)
                found[name] = spec
            except LayoutError as error:
                problems.append(f"{name} ({pattern!r}): {error}")
        problems += _unify_shared_specs(tensors or {}, found, matched)
        if problems:
            raise PlanError("\n".join(problems))
        return found

    def _parse_spec(self, text: str, mesh: Mesh) -> MeshSpec:
        if text == REPLICATED:
            return MeshSpec(mesh, (Replicate(),) * mesh.ndim)
        placements = read_placements(text, mesh, self.axis, self.lengths)
        if any(isinstance(p, Partial) for p in placements):
            raise LayoutError(f"{text!r}: a parameter is sharded or replicated, never pending")
        return MeshSpec(mesh, placements)

    @property
    def replicated(self) -> MeshSpec:
        """The spec of parameters without a pattern, and of buffers, of the first stage."""
        return self._parse_spec(REPLICATED, self.stage_mesh(0))

    def layouts(self, module: nn.Module) -> Iterator[tuple[str, Tensor, Layout]]:
        """The name, the tensor and the layout of each parameter, a shared one once."""
        specs = self.specs(module)
        for name, tensor in module.named_parameters():
            yield name, tensor, specs[name].layout(tuple(tensor.shape))


def _unify_shared_specs(
    tensors: Mapping[str, Tensor], specs: dict[str, MeshSpec], matched: Mapping[str, str]
) -> list[str]:
    """Give all names of a shared parameter the spec of the one that has a pattern; return what contradicts."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    problems = []
    for shared in (several for several in names.values() if len(several) > 1):
        if len({specs[n].mesh for n in shared if n in specs}) > 1:
            problems.append(
                f"{' and '.join(shared)} are one parameter, and are in different stages; give them the same stage, or "
                "make them two (for transformers: tie_word_embeddings=False)"
            )
            continue
        asked = {specs[n] for n in shared if n in matched and n in specs}
        if len(asked) > 1:
            listed = "; ".join(f"{n}: {matched[n]!r}" for n in shared if n in matched)
            problems.append(f"{' and '.join(shared)} are one parameter, and their patterns differ: {listed}")
        elif asked:
            specs.update(dict.fromkeys(shared, next(iter(asked))))
    return problems


def _check_kinds(mesh: object, parameters: Mapping[str, object]) -> None:
    if not isinstance(mesh, Mesh):
        raise PlanError(f"a plan's mesh is a Mesh such as Mesh.of(dp=2, tp=4), or torch's DeviceMesh; got {mesh!r}")
    for pattern, text in parameters.items():
        if not isinstance(text, str):
            raise PlanError(
                f"{pattern!r}: a plan by patterns has placements as strings, such as 'tp: S(0)', got "
                f"{type(text).__name__}; specs of single parameters belong in a ShardingPlan"
            )


def _read_dtypes(given: Any) -> Any:
    """A dtype, or patterns to dtypes, with names of dtypes replaced by them."""
    if isinstance(given, Mapping):
        return {pattern: _read_dtypes(dtype) for pattern, dtype in given.items()}
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if given is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise PlanError(f"gather_dtype is a floating-point dtype such as torch.bfloat16, got {given!r}")


def _write_dtypes(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {pattern: _write_dtypes(dtype) for pattern, dtype in given.items()}
    return str(given).removeprefix("torch.")


def _check_bytes(given: Any) -> None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise PlanError(f"prefetch_bytes is a number of bytes, 0 for none, or None; got {given!r}")


def _check_stages(plan: ModelPlan) -> None:
    given, mesh = plan.stages, plan.mesh
    if STAGE_AXIS not in mesh.axes:
        raise PlanError(f"stages are along an axis {STAGE_AXIS!r} of the mesh, as in Mesh.of(pp=2, dp=4); got {mesh}")
    if plan.input_plan is None:
        raise PlanError(f"stages need an input_plan, such as {REPLICATED!r} or 'dp: S(0)'")
    ranks = mesh.axis_size(STAGE_AXIS)
    numbers = list(given.values()) if isinstance(given, Mapping) else [given]
    if given != BALANCED and (not numbers or any(type(n) is not int or n < 0 for n in numbers)):
        raise PlanError(
            f"stages is {BALANCED!r}, a number of stages, or maps patterns to numbers from 0, as in {{'embed': 0, "
            f"'layers.{{0-15}}': 0, 'layers.{{16-31}}': 1, 'head': 1}}; got {given!r}"
        )
    if isinstance(given, Mapping) and (missing := sorted(set(range(plan.stage_count)) - set(numbers))):
        raise PlanError(f"stages: no pattern has stage {missing[0]}, and the last is {plan.stage_count - 1}")
    if plan.stage_count < ranks or plan.stage_count % ranks:
        raise PlanError(
            f"stages: {plan.stage_count} stages on pp={ranks}; each rank has equally many, so use a multiple of {ranks}"
        )


def _balance_stages(shapes: Mapping[str, tuple[int, ...]], count: int) -> dict[str, int]:
    """Contiguous layers of about equal sizes for each stage; what comes before and after them is in the outer ones.

    Layers are those numbers of a path that have most elements. Matrices after them (a head) are work too; those before
    them are tables.
    """
    layers, lists = dict[str, tuple[str, int]](), dict[str, int]()
    for name, shape in shapes.items():
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        if at is not None:
            layers[name] = ".".join(parts[:at]), int(parts[at])
            lists[layers[name][0]] = lists.get(layers[name][0], 0) + prod(shape)
    path = max(lists, key=lambda key: lists[key], default="")
    sizes: dict[int, int] = {}
    for name, (where, number) in layers.items():
        if where == path:
            sizes[number] = sizes.get(number, 0) + prod(shapes[name]) * (len(shapes[name]) > 1)
    if len(sizes) < count:
        raise PlanError(
            f"stages: {count} balanced stages need as many layers in one list, and {path or 'the model'!r} has "
            f"{len(sizes)}; pass a mapping of patterns to stages"
        )
    names = list(shapes)
    first = next(i for i, name in enumerate(names) if layers.get(name, ("",))[0] == path and name in layers)
    inside = {name: number for name, (where, number) in layers.items() if where == path}
    after = sum(prod(shapes[n]) for n in names[first:] if n not in inside and len(shapes[n]) > 1)
    stage_of = dict(zip(sorted(sizes), _cut_into_runs([sizes[n] for n in sorted(sizes)], after, count), strict=True))
    return {
        name: stage_of[inside[name]] if name in inside else (0 if i < first else count - 1)
        for i, name in enumerate(names)
    }


def _cut_into_runs(sizes: Sequence[int], after: int, count: int) -> list[int]:
    """The number of the run of each size if the largest run, the last one with `after` besides, is to be small.

    >>> _cut_into_runs([4, 4, 4, 4], 4, 2)
    [0, 0, 1, 1]
    >>> _cut_into_runs([4, 4, 4, 4], 6, 2)
    [0, 0, 0, 1]
    """
    total = [0, *accumulate(sizes)]
    best = {len(sizes): (after, [len(sizes)])}  # what the runs from here on need, and where they end
    for left in range(1, count + 1):
        found = {}
        for start in range(count - left, len(sizes) - left + 1):
            ends = range(start + 1, len(sizes) - left + 2) if left > 1 else (len(sizes),)
            costs = [
                (max(best[end][0], total[end] - total[start]) if left > 1 else total[end] - total[start] + after, end)
                for end in ends
            ]
            cost, end = min(costs)
            found[start] = cost, [end, *(best[end][1] if left > 1 else ())]
        best = found
    return [run for run, (a, b) in enumerate(pairwise([0, *best[0][1]])) for _ in range(a, b)]


def _check_all_have_stages(shapes: Mapping[str, tuple[int, ...]], stages: Mapping[str, int]) -> list[str]:
    left = [name for name in shapes if name not in stages]
    if not left:
        return []
    return [f"stages: {', '.join(left[:5])}{' ...' * (len(left) > 5)}: {len(left)} parameters have no stage"]


def _check_output_plan(output_plan: object, input_plan: object) -> None:
    if output_plan not in (None, PLAIN):
        raise PlanError(f"output_plan is {PLAIN!r} or None, got {output_plan!r}")
    if output_plan is not None and input_plan is None:
        raise PlanError(
            f"output_plan {PLAIN!r} needs an input_plan, such as {REPLICATED!r}: without one each layer reads and "
            "returns this rank's own batch, which is plain already"
        )


def _check_activations(plan: ModelPlan) -> None:
    given = plan.activations
    if given is not None and plan.input_plan is None:
        raise PlanError(
            f"activations {given!r} needs an input_plan, such as {REPLICATED!r}: without one each layer reads and "
            "returns this rank's own batch, which is a plain tensor"
        )
    for where, text in ({"": given} if isinstance(given, str) else given or {}).items():
        if not isinstance(text, str):
            raise PlanError(f"activations maps patterns of modules to placements such as 'tp: S(1)', got {text!r}")
        try:
            found = plan.activation_placements(text)
        except LayoutError as error:
            raise PlanError(f"activations {where + ': ' if where else ''}{text!r}: {error}") from None
        if any(isinstance(p, Partial) or (isinstance(p, Shard) and p.dim < 0) for p in found.values()):
            raise PlanError(
                f"activations {text!r}: activations are sharded or replicated, never pending, and dims are counted "
                "from the front, as in 'tp: S(1)'"
            )


def _check_inputs(placements: tuple[Placement, ...], text: str) -> None:
    """Raise unless a rank's plain input is the whole, a part of dim 0, or cut along another dim by the plan."""
    cut = [p for p in placements if isinstance(p, Shard)]
    if any(p.dim < 0 or not (p.is_plain or (p.dim and p == Shard(p.dim, zigzag=True))) for p in cut) or len(cut) < sum(
        not isinstance(p, Replicate) for p in placements
    ):
        raise PlanError(
            f"input_plan {text!r}: plain inputs are 'replicated', or each rank's part of dim 0 along some axes, as in "
            "'dp: S(0)', or cut along another dim, as in 'cp: S(1)', or 'cp: S(1) zigzag'; the lengths of parts are "
            "those of each batch, so pass no sizes, and count dims from the front"
        )


PlanFields: TypeAlias = dict[str, object]


def check_on_all_ranks(comm: Comm, check: Callable[[], PlanFields]) -> None:
    """Run a check on every rank; raise on all of them if one fails, or if the fields they return differ.

    >>> from shardwise.comm import run_local
    >>> try:
    ...     run_local(lambda comm: check_on_all_ranks(comm, lambda: {"src_rank": comm.rank}), 2)
    ... except DisagreementError as error:
    ...     print(error)
    'shard_module': the ranks pass different plans: src_rank is 0 on rank 0 and 1 on rank 1; pass the same on every rank
    """
    own, fields = None, PlanFields()
    try:
        fields = check()
    except Exception as error:  # of any kind: the other ranks must hear of it
        own = error
    try:
        agree(comm, fields, label="shard_module", what="plans", problem=own)
    except DisagreementError:
        if own is not None:
            raise own from None
        raise


def check_source(src_rank: Any, comm: Comm) -> None:
    """Raise unless the source is a rank of the group, counted in it."""
    if not isinstance(src_rank, int):
        raise TypeError(f"src_rank is the number of a rank of the group, got {type(src_rank).__name__}")
    if not 0 <= src_rank < comm.world_size:
        raise ValueError(f"src_rank={src_rank} is not in the group: it has ranks 0 to {comm.world_size - 1}")


def check_mesh(mesh: Mesh, comm: Comm, *, whole: bool) -> None:
    """Raise unless the ranks of a mesh are in a group, or are all of it."""
    ranks = set(mesh.ranks.reshape(-1).tolist())
    if ranks <= set(comm.ranks) if not whole else ranks == set(comm.ranks):
        return
    advice = advise_ranks(comm)
    if ranks < set(comm.ranks):
        advice = (
            "with an input_plan all of them take part: pass a mesh of all, or the process_group of the mesh's ranks"
        )
    here, there = name_ranks(sorted(ranks)), name_ranks(comm.ranks)
    raise PlanError(f"the mesh {mesh} has {here}, and the process group has {there}; {advice}")


def lay_out_specs(specs: Mapping[str, ShardingSpec], tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """The layout of each planned tensor, except specs with a user's `shard`; raises with all that does not fit."""
    problems, found = [], {}
    for name, spec in specs.items():
        shape = tuple(tensors[name].shape)
        try:
            if isinstance(tensors[name], ShardedTensor):
                raise PlanError("it is already sharded; change its layout with redistribute()")
            if not spec.shards_itself:
                found[name] = spec.layout(shape)
        except ValueError as error:
            problems.append(f"{name} of shape {shape}: {error}")
    if problems:
        raise PlanError("\n".join(problems))
    return found


def check_ranks(layouts: Mapping[str, Layout], comm: Comm) -> None:
    """Raise unless all layouts are on ranks of a group."""
    problems = []
    for name, layout in layouts.items():
        outside = sorted(set(layout.ranks) - set(comm.ranks))
        if outside:
            by = f"the mesh {layout.spec.mesh}" if isinstance(layout.spec, MeshSpec) else "its spec"
            problems.append(
                f"{name}: {by} names {name_ranks(outside)}, not in the process group ({name_ranks(comm.ranks)}); "
                f"{advise_ranks(comm)}"
            )
    if problems:
        raise PlanError("\n".join(problems))


def layout_texts(layouts: Mapping[str, Layout]) -> PlanFields:
    """What ranks compare of their plans."""
    return {name: format_layout_text(layout) for name, layout in layouts.items()}
