"""How does a model of several stages run, each on ranks of its own, in a schedule of torch.distributed.pipelining?

1. A plan's `stages` say which parameters are in which stage. A *unit* is a module all of whose parameters are in one
   stage, such as an embedding, a layer or a head. The code between units (positions, masks, loops over layers) is the
   model's own, and runs on every rank.
2. `shard_module` takes the tensors of other stages out of the units of the model and leaves the units where they are.
3. A forward pass of the whole model without values says in which order units are called, what each returns, and which
   of it the next stage takes: the *stream*. Everything else that a stage takes from an earlier one is an error.
4. A stage runs the model's forward. Units of other stages return zeros of the right shapes; the first call of its own
   takes the stream from the stage before; after the last call of its own the pass ends, and the stream is sent.
5. Across stages go plain local tensors between ranks with equal places along the other axes, in the layout of the
   plan's `activations`, else that of the inputs. Gradients come back as they were sent: parts, or equal copies.

No schedule is written here: torch's run `PipelineStage`s, whose module is a `StageModule`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._tree import flatten_nest, map_nest, unflatten_nest
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Placement, Replicate, Shard
from shardwise.nn.inputs import activation_layout, place_inputs, whole_inputs
from shardwise.nn.plan import PLAIN, STAGE_AXIS, ModelPlan, PlanError
from shardwise.ops.implicit_replication import plain_as_replicated
from shardwise.ops.views import redistribute_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_STATE = "_stages"  # of a sharded model: its `StagedModel`
_UNIT = "_unit"  # of a unit: its name and the `StagedModel`
# What these return depends on the shapes of their arguments only.
_READS_SHAPES = {"empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"}
_READS_SHAPES |= {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "sym_size", "sym_numel"}


_READS_VALUES = (Tensor.item, Tensor.__bool__, Tensor.__contains__)  # checks of padding, layers left out at random
_ALL, _OF_ALL = (Tensor.all, torch.all), "_holds_for_all"


class NoValues(TorchFunctionMode):
    """Answers questions about values, of which there are none: no padding, no layer is left out.

    What holds for `all` elements is taken to hold, as in "no sequence is packed": that is how models ask for the usual.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS_VALUES:
            return func is Tensor.__bool__ and _OF_ALL in args[0].__dict__
        result = func(*args, **(kwargs or {}))
        if func in _ALL and isinstance(result, Tensor):
            result.__dict__[_OF_ALL] = True
        return result


def copy_on_meta(module: nn.Module) -> nn.Module:
    """A copy of a model whose tensors are on the meta device, also those that it keeps in other attributes.

    >>> layer = nn.Linear(4, 2)
    >>> layer.cached = [torch.ones(3)]
    >>> twin = copy_on_meta(layer)
    >>> twin.weight.is_meta, twin.cached[0].is_meta, layer.cached[0].is_meta
    (True, True, False)
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    with _CopyOnMeta():
        try:
            return copy.deepcopy(module, dict(memo))
        except Exception:  # of any kind: something that cannot be copied, such as a lock or a process group, is shared
            values = [v for part in module.modules() for n, v in vars(part).items() if n not in _MODULE_FIELDS]
            for value in values:
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:  # of any kind
                    memo[id(value)] = value
            return copy.deepcopy(module, memo)


_MODULE_FIELDS = ("_parameters", "_buffers", "_modules")


class _CopyOnMeta(TorchFunctionMode):
    """Copies tensors to the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:  # of parameters that no module has
            return args[0].to("meta")
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().to("meta").requires_grad_(tensor.requires_grad))


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit in the pass without values: what it returned."""

    unit: str
    stage: int
    output: Any


@dataclass(frozen=True)
class Crossing:
    """What one stage returns and the next one takes: numbers of leaves in the output and in the arguments."""

    leaves: tuple[tuple[int, int], ...]
    tensors: tuple[Tensor, ...]  # on the meta device


@dataclass(frozen=True)
class StageTrace:
    """The calls of units in a forward pass, what crosses from each stage to the next, and inputs that a stage reads."""

    calls: tuple[UnitCall, ...]
    crossings: tuple[Crossing, ...]
    inputs_read: Mapping[int, tuple[str, ...]]
    result: Tensor  # what the model returns, on the meta device

    def span(self, stage: int) -> tuple[int, int]:
        """The numbers of the first call of a stage and of the one after its last."""
        own = [i for i, call in enumerate(self.calls) if call.stage == stage]
        return own[0], own[-1] + 1


def find_units(module: nn.Module, stages: Mapping[str, int]) -> dict[str, int]:
    """The outermost modules that are in one stage, by name; raises for parameters of modules in several.

    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    >>> find_units(model, {"0.weight": 0, "1.0.weight": 0, "1.0.bias": 0, "1.1.weight": 1, "1.1.bias": 1})
    {'0': 0, '1.0': 0, '1.1': 1}
    """
    found: dict[str, int] = {}
    inside: dict[str, set[int]] = {}
    for name, stage in stages.items():
        parts = name.split(".")
        for end in range(len(parts)):
            inside.setdefault(".".join(parts[:end]), set()).add(stage)
    for path, part in module.named_modules():
        if path not in inside or any(path.startswith(f"{unit}.") for unit in found):
            continue
        if len(inside[path]) == 1 and path and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            found[path] = next(iter(inside[path]))
        elif own := [n for n, _ in part.named_parameters(recurse=False)]:
            raise PlanError(
                f"stages: {own[0]!r} is a parameter of {path or type(part).__name__}, which has parts in the stages "
                f"{sorted(inside[path])} and whose forward runs on all of them; move it to a module of its own"
            )
    return found


class CountRandom(TorchDispatchMode):
    """Counts the random tensors that are drawn in a `with` block.

    >>> with CountRandom() as counted, torch.device("meta"):
    ...     _ = nn.Linear(2, 2)
    >>> counted.count
    2
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Labels(TorchDispatchMode):
    """Follows whose values each tensor of a pass depends on: the inputs' and the stages', by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._found: dict[int, frozenset[Any]] = {}
        self._kept: list[Tensor] = []  # so that no number of an object is used twice

    def of(self, tree: Any) -> frozenset[Any]:
        """The labels of all tensors of a nest."""
        return frozenset().union(*(self._found.get(id(t), ()) for t in flatten_nest(tree)[0] if isinstance(t, Tensor)))

    def put(self, tree: Any, labels: frozenset[Any]) -> None:
        """Label all tensors of a nest."""
        for tensor in (t for t in flatten_nest(tree)[0] if isinstance(t, Tensor)):
            self._found[id(tensor)] = labels
            self._kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        labels = self.of((args, kwargs or {}))
        if labels and func.overloadpacket.__name__ not in _READS_SHAPES:
            self.put(result, labels)
        return result


@dataclass
class _Tracing:
    """What a pass without values has met."""

    labels: _Labels
    count: int
    calls: list[UnitCall] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    read: dict[int, set[str]] = field(default_factory=dict)

    def enter(self, unit: str, stage: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Check what a unit takes; the stream that comes from the stage before is a tensor of the new stage."""
        before = self.calls[-1].stage if self.calls else 0
        if stage not in (before, before + 1):
            last = f"{self.calls[-1].unit} of stage {before}" if self.calls else "the start"
            raise PlanError(f"stages: {unit} of stage {stage} is called after {last}; number stages in order of calls")
        leaves, structure = flatten_nest((args, kwargs))
        if stage == before + 1:
            left = flatten_nest(self.calls[-1].output)[0] if self.calls else []
            pairs = [(i, j) for j, leaf in enumerate(leaves) for i, t in enumerate(left) if t is leaf and _is_tensor(t)]
            if not pairs:
                raise PlanError(
                    f"stages: {unit} of stage {stage} does not take what {self.calls[-1].unit} of stage {before} "
                    "returns as it is; a stage ends where a module's output is the next module's input"
                    if self.calls
                    else f"stages: the first module called is {unit} of stage {stage}; number stages in order of calls"
                )
            self.crossings.append(Crossing(tuple(pairs), tuple(leaves[j] for _, j in pairs)))
            for _, j in pairs:
                leaves[j] = torch.empty_like(leaves[j])
        self.check(f"{unit} of stage {stage} takes", stage, leaves)
        taken: tuple[Any, Any] = unflatten_nest(leaves, structure)
        return taken

    def check(self, what: str, stage: int, tree: Any) -> None:
        """Raise if values of another stage are read; note which inputs are."""
        labels = self.labels.of(tree)
        others = sorted(label for label in labels if isinstance(label, int) and label != stage)
        if others:
            raise PlanError(
                f"stages: {what} what stage {others[0]} computed, besides the stream that comes from the stage before; "
                "a stage takes that stream only, and inputs of the model"
            )
        self.read.setdefault(stage, set()).update(label for label in labels if isinstance(label, str))

    def leave(self, unit: str, stage: int, output: Any) -> None:
        """Note a call."""
        self.labels.put(output, frozenset({stage}))
        self.calls.append(UnitCall(unit, stage, output))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def trace_stages(model: nn.Module, units: Mapping[str, int], args: Any, kwargs: Mapping[str, Any]) -> StageTrace:
    """Follow a forward pass of a model on the meta device through its stages.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3))
    >>> trace = trace_stages(model, {"0": 0, "1": 1}, (torch.zeros(5, dtype=torch.long, device="meta"),), {})
    >>> [call.unit for call in trace.calls], tuple(trace.crossings[0].tensors[0].shape)
    (['0', '1'], (5, 2))
    """
    labels = _Labels()
    tracing = _Tracing(labels, max(units.values()) + 1)
    names = list(signature(model.forward).parameters)
    for name, value in chain(zip(names, args, strict=False), kwargs.items()):
        labels.put(value, frozenset({name}))
    handles = []
    for name, stage in units.items():
        part = model.get_submodule(name)

        def enter(_m: nn.Module, args: Any, kwargs: Any, name: str = name, stage: int = stage) -> Any:
            return tracing.enter(name, stage, args, kwargs)

        def leave(_m: nn.Module, _args: Any, output: Any, name: str = name, stage: int = stage) -> None:
            tracing.leave(name, stage, output)

        handles += [part.register_forward_pre_hook(enter, with_kwargs=True), part.register_forward_hook(leave)]
    try:
        with torch.no_grad(), torch.device("meta"), NoValues(), labels:
            output = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    last = tracing.count - 1
    if not tracing.calls or tracing.calls[-1].stage != last:
        raise PlanError(f"stages: the forward pass ends without a module of stage {last}")
    tracing.check(f"the end of {type(model).__name__}'s forward takes", last, output)
    result = next((leaf for leaf in flatten_nest(output)[0] if _is_tensor(leaf)), None)
    if result is None:
        raise PlanError(f"stages: {type(model).__name__} returns no floating-point tensor")
    read = {stage: tuple(sorted(names)) for stage, names in tracing.read.items()}
    return StageTrace(tuple(tracing.calls), tuple(tracing.crossings), read, result)


@dataclass(eq=False)
class StagedModel:
    """What a model knows of its stages: the whole model without values, its units, and the stage that runs now."""

    plan: ModelPlan
    inner: ModelPlan  # of this rank's stages
    world: Comm
    comm: Comm  # of the ranks with this rank's stages
    skeleton: nn.Module
    units: Mapping[str, int]
    running: _Running | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedModel:
        return self  # a copy of a model is on the same ranks

    @property
    def own_stages(self) -> list[int]:
        """The stages of this rank."""
        place, ranks = self.plan.mesh.coordinates(self.world.rank)[STAGE_AXIS], self.plan.mesh.axis_size(STAGE_AXIS)
        return list(range(place, self.plan.stage_count, ranks))


@dataclass(eq=False)
class _Running:
    """A forward pass of one stage: what it took from the stage before, and how many units were called."""

    trace: StageTrace
    stage: int
    received: tuple[ShardedTensor, ...]
    device: torch.device
    at: int = 0


class _StageEnd(Exception):
    """Ends a model's forward pass after the last unit of a stage."""

    def __init__(self, output: Any) -> None:
        super().__init__("the forward pass of a stage ends here")
        self.output = output


@cache
def _unit_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class whose calls follow the stage that runs."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name, staged = self.__dict__[_UNIT]
        call = partial(kind.__call__, self)
        return _call_unit(name, staged, call, args, kwargs)

    made = type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


def _call_unit(name: str, staged: StagedModel, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    run = staged.running
    if run is None:
        raise PlanError(
            f"{name} is in stage {staged.units[name]} of {staged.plan.stage_count}: a model with stages is run by a "
            "schedule of torch.distributed.pipelining, from shardwise.nn.Pipeline(model, example).stages"
        )
    calls = run.trace.calls
    if run.at >= len(calls) or calls[run.at].unit != name:
        expected = calls[run.at].unit if run.at < len(calls) else "the end of the pass"
        raise PlanError(f"stages: the forward pass calls {name} where it called {expected} with the example")
    made, (first, end) = calls[run.at], run.trace.span(run.stage)
    run.at += 1
    if made.stage != run.stage:
        return map_nest(lambda leaf: _stand_in(leaf, run.device), made.output)
    if run.received and run.at == first + 1:
        leaves, structure = flatten_nest((args, kwargs))
        pairs = run.trace.crossings[run.stage - 1].leaves
        for (_, place), tensor in zip(pairs, run.received, strict=True):
            leaves[place] = tensor
        args, kwargs = unflatten_nest(leaves, structure)
    output = call(*args, **kwargs)
    if run.at == end and run.stage + 1 < staged.plan.stage_count:
        raise _StageEnd(output)
    return output


def _stand_in(leaf: Any, device: torch.device) -> Any:
    """Zeros in the shape of what a unit of another stage returned, in the memory of one."""
    return torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf


def take_stages(module: nn.Module, plan: ModelPlan, comm: Comm) -> StagedModel:
    """Leave a model the parameters of this rank's stages; `shard_module` shards what is left."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    units = find_units(module, plan.assign_stages(shapes))
    place = plan.mesh.coordinates(comm.rank)[STAGE_AXIS]
    inner_comm = comm.subset(plan.stage_mesh(place).ranks.reshape(-1).tolist())
    staged = StagedModel(plan, plan, comm, inner_comm, copy_on_meta(module), units)
    own = staged.own_stages
    for name, stage in units.items():
        part = module.get_submodule(name)
        for inside in part.modules() if stage not in own else ():
            inside._parameters.update(dict.fromkeys(inside._parameters))
            inside._buffers.update(dict.fromkeys(inside._buffers))
        part.__class__ = _unit_class(type(part))  # type: ignore[arg-type]  # a class is hashable
        part.__dict__[_UNIT] = name, staged
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tables = any(isinstance(m, nn.Embedding) and m.weight is not None for m in module.modules())
    entry = None if tables else next(name for name, stage in units.items() if stage in own)
    staged.inner = plan.of_stage(place, names, entry)
    module.__dict__[_STATE] = staged
    return staged


class StageModule(nn.Module):
    """One stage as the module of a PipelineStage: takes and returns plain local tensors."""

    def __init__(self, model: nn.Module, staged: StagedModel, trace: StageTrace, stage: int, example: Any) -> None:
        super().__init__()
        self.model, self.staged, self.trace, self.stage = model, staged, trace, stage
        self.given: dict[str, Any] = example
        self.output_layout: Layout | None = None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The local tensors of the stage's parameters, which schedules read and write gradients of."""
        units = tuple(f"{name}." for name, stage in self.staged.units.items() if stage == self.stage)
        for name, parameter in self.model.named_parameters():
            if name.startswith(units):
                yield from parameter.local_parts if isinstance(parameter, ShardedTensor) else (parameter,)  # type: ignore[misc]  # leaves of the tape

    def boundary(self, crossing: int) -> list[Layout]:
        """The layouts of what leaves a stage, on this rank's mesh."""
        return [
            stream_layout(self.staged.inner, tuple(tensor.shape), self.staged.plan.activations)
            for tensor in self.trace.crossings[crossing].tensors
        ]

    def forward(self, *given: Tensor, **kwargs: Any) -> Any:
        staged, stage = self.staged, self.stage
        received: tuple[ShardedTensor, ...] = ()
        arguments = self._arguments(given, kwargs)
        if stage > 0:
            layouts = self.boundary(stage - 1)
            received = tuple(wrap(layout, (t,), staged.comm) for layout, t in zip(layouts, given, strict=True))
        before = staged.running
        staged.running = _Running(self.trace, stage, received, staged.comm.device)
        try:
            output = self.model(**arguments)
        except _StageEnd as end:
            return self._send(end.output)
        finally:
            staged.running = before
        return self._return(output)

    def _arguments(self, given: Sequence[Tensor], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model: of the first stage those given, of others zeros where values are not read."""
        if self.stage == 0:
            names = [name for name in self.given if name not in kwargs]
            plain = {name: value for name, value in self.given.items() if not _has_tensors(value)}
            return {**plain, **dict(zip(names, given, strict=False)), **kwargs}
        wanted = [name for name in self.trace.inputs_read.get(self.stage, ()) if _has_tensors(self.given.get(name))]
        missing = [name for name in wanted if name not in kwargs]
        if missing:
            raise PlanError(
                f"stages: stage {self.stage} reads the input {missing[0]!r} of the model; pass it to every stage, "
                f"as in schedule.step({missing[0]}=...)"
            )
        return {**self.given, **kwargs}

    def _send(self, output: Any) -> Any:
        leaves, layouts = flatten_nest(output)[0], self.boundary(self.stage)
        pairs = self.trace.crossings[self.stage].leaves
        sent = [
            redistribute_to(leaves[i], layout, f"end of stage {self.stage}").local_parts[0].contiguous()
            for (i, _), layout in zip(pairs, layouts, strict=True)
        ]
        return sent[0] if len(sent) == 1 else tuple(sent)

    def _return(self, output: Any) -> Tensor:
        """This rank's part of what the model returns."""
        tensor = next(t for t in flatten_nest(output)[0] if isinstance(t, ShardedTensor) and t.is_floating_point())
        layout = tensor.sharding
        if self.staged.plan.output_plan == PLAIN or not isinstance(layout.spec, MeshSpec):
            layout = stream_layout(self.staged.inner, tuple(tensor.shape), None, batch_only=True)
        elif layout.pending is not None:
            placements = [p if isinstance(p, Shard) else Replicate() for p in layout.spec.placements]
            layout = MeshSpec(layout.spec.mesh, placements, layout.spec.order).layout(layout.shape)
        self.output_layout = layout
        local: Tensor = redistribute_to(tensor, layout, "output of the last stage").local_parts[0]
        return local


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in flatten_nest(value)[0])


def stream_layout(plan: ModelPlan, shape: tuple[int, ...], activations: Any, *, batch_only: bool = False) -> Layout:
    """The layout of activations of this shape between stages: as inputs, and along other axes as `activations` say.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {}, input_plan="dp: S(0)")
    >>> stream_layout(plan, (4, 8, 6), "tp: S(1)").spec
    MeshSpec(dp=2,tp=2, (Shard(0), Shard(1)))
    """
    given = zip(plan.mesh.axes, plan.input_placements or (), strict=True)
    wanted: dict[str, Placement] = {
        a: p for a, p in given if isinstance(p, Shard) and p.dim < (1 if batch_only else len(shape))
    }
    texts = set(activations.values()) if isinstance(activations, Mapping) else {activations}
    if len(texts) == 1 and (text := texts.pop()) is not None:
        wanted |= plan.activation_placements(text)
    return activation_layout(plan.replicated, shape, wanted, "between stages")


class Pipeline:
    """The stages of this rank, for torch's schedules, of a model that `shard_module` sharded by a plan with `stages`.

    `args` and `kwargs` are those of one micro-batch as this rank passes them: their shapes count, not their values.
    `stages` are `torch.distributed.pipelining.PipelineStage`s, one for each stage of the rank, and `stage` the only
    one; `loss(fn)` is the loss of a schedule. Ranks are processes, as torch's schedules send through process groups.

    >>> from shardwise import Mesh, run_local, shard_module
    >>> plan = ModelPlan(Mesh.of(pp=2), {}, input_plan="replicated", stages={"0": 0, "1": 1})
    >>> def body(comm):
    ...     model = shard_module(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), plan)
    ...     return [name for name, _ in model.named_parameters()]
    >>> run_local(body, 2)
    [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        staged: StagedModel | None = model.__dict__.get(_STATE)
        if staged is None:
            raise PlanError(
                "Pipeline takes a model that shard_module sharded by a plan with stages, as in ModelPlan(Mesh.of(pp=2),"
                " ..., stages='balanced')"
            )
        names = list(signature(model.forward).parameters)
        if len(args) > len(names):
            raise PlanError(f"{type(model).__name__}.forward takes {len(names)} arguments, and the example has more")
        self.staged = staged
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        whole_args, whole_kwargs = whole_inputs(staged.skeleton, staged.plan, (), given)
        self.trace = trace_stages(staged.skeleton, staged.units, whole_args, whole_kwargs)
        example = map_nest(lambda leaf: _stand_in(leaf, staged.comm.device), given)
        self.modules = [StageModule(model, staged, self.trace, stage, example) for stage in staged.own_stages]

    @cached_property
    def _along(self) -> Comm:
        """The comm of the ranks with equal places along the other axes, one for each place of stages."""
        world = self.staged.world
        return world.subset(next(g for g in self.staged.plan.mesh.groups(STAGE_AXIS) if world.rank in g))

    @cached_property
    def stages(self) -> list[Any]:
        """The PipelineStages of this rank, in order."""
        staged = self.staged
        if staged.world.process_group is None:
            raise PlanError(
                "torch's schedules send between processes, and these ranks have no process group; start them with "
                "shardwise.launch or torchrun, not with run_local"
            )
        make = importlib.import_module("torch.distributed.pipelining").PipelineStage
        return [
            make(
                module,
                module.stage,
                staged.plan.stage_count,
                staged.comm.device,
                input_args=self._ends(module, module.stage - 1),
                output_args=self._ends(module, module.stage),
                group=self._along.process_group,
            )
            for module in self.modules
        ]

    @property
    def stage(self) -> Any:
        """The only stage of this rank."""
        if len(self.stages) != 1:
            raise PlanError(f"this rank has {len(self.stages)} stages: pass `stages` to a schedule of several")
        return self.stages[0]

    def _ends(self, module: StageModule, crossing: int) -> tuple[Tensor, ...]:
        """What a stage takes or returns on this rank, without values."""
        if crossing < 0:
            given = [t for t in flatten_nest(module.given)[0] if isinstance(t, Tensor)]
            return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in given)
        if crossing < len(self.trace.crossings):
            tensors, layouts = self.trace.crossings[crossing].tensors, module.boundary(crossing)
        else:
            tensors = (self.trace.result,)
            layouts = [stream_layout(self.staged.inner, tuple(tensors[0].shape), None, batch_only=True)]
        rank = self.staged.world.rank
        return tuple(
            torch.empty(layout.local_shapes(rank)[0], dtype=t.dtype, device="meta", requires_grad=True)
            for t, layout in zip(tensors, layouts, strict=True)
        )

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients of all stages so that their norm together is at most so large; return the norm before."""
        parameters = [p for p in self.modules[0].model.parameters() if p.grad is not None]
        own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = own.full() if isinstance(own, ShardedTensor) else own
        square = square.detach().double().square().reshape(1).to(self.staged.comm.device)
        self._along.all_reduce(square, label="clip_grad_norm").wait()
        total = square.sqrt().reshape(())
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total.to(own.dtype))
        return float(total)

    def loss(self, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A loss for a schedule: `fn(output, target)` of the outputs of all ranks together, as for the whole model.

        Targets are read as the plan's `input_plan` reads inputs. The result is the loss on every rank.
        """
        staged = self.staged

        def compute(output: Tensor, target: Any, **kwargs: Any) -> Tensor:
            layout = self.modules[-1].output_layout
            assert layout is not None
            whole = wrap(layout, (output,), staged.comm)
            placements = staged.inner.input_placements or ()
            with plain_as_replicated():
                found = fn(whole, place_inputs(target, staged.inner.mesh, placements, staged.comm), **kwargs)
            if not isinstance(found, ShardedTensor):
                return found
            local: Tensor = found.redistribute(staged.inner.replicated).local_parts[0]
            return local

        return compute
