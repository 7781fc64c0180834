"""Rules and layouts of ours for torch's DTensor: a rule as one of its strategies, a rule of its own here.

1. A rule is asked with `TensorMeta`s made from the DTensors' specs; its strategies become torch's. Those
   that DTensor cannot run (a `local` of their own, lengths of their own) are left out.
2. torch expands them to the mesh. A keyword tensor is never moved by DTensor, so strategies that would need it
   are left out.
3. torch's cache key holds every argument that is not a tensor, and what would win over a registered rule without a
   word is put aside until the rule is removed: an operator's "single-dim strategy", a function of its own.
4. A rule in torch's manner is shown what torch documents. A ShardedTensor has no DeviceMesh, which would need process
   groups: a `SpecView` answers for it what a DTensorSpec does.

As long as `torch.distributed.tensor` is not loaded, rules wait: loading it takes seconds. Registration is opt-in, since
it reaches into private tables of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from itertools import product
from math import prod
from typing import Any

import torch

from shardwise._torch import OpOverload, clear_dtensor_caches
from shardwise.geometry import LayoutError, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.geometry.specs import split_factor
from shardwise.ops.rule import Rule, Slot, Steps, Strategy, TensorMeta, ask_rule
from shardwise.tensor.functions import TENSOR_MODULE, check_even, dtensor_split_order, spec_from_dtensor

_TABLES = (
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
)
_NO_STATIC_ARGUMENT = 100  # torch's own number for an operator of tensors alone
_HANDLERS = "_custom_op_handlers"  # of the dispatcher: functions that compute an operator without a rule
_rules_to_install: dict[Any, Rule] = {}
_replaced_entries: dict[Any, dict[str, Any]] = {}


def torch_placements(spec: MeshSpec, shape: Sequence[int]) -> tuple[Any, ...]:
    """The placements of a MeshSpec in torch's words; what torch cannot say is refused with the reason."""
    resolved = spec.resolved(shape)
    found = [torch_placement(p) for p in resolved.placements]
    for axis in range(len(found)):
        if found[axis] is None:
            found[axis] = _chunk_placement(resolved, axis, shape)
    if not resolved.splits_in_mesh_order:
        _insert_strided_shards(resolved, shape, found)
    return tuple(found)


def torch_placement(placement: Placement) -> Any:
    """One placement as torch's class; None for a Shard with explicit sizes, which torch does not have."""
    words = sys.modules[TENSOR_MODULE]
    if isinstance(placement, Replicate):
        return words.Replicate()
    if isinstance(placement, Partial):
        return words.Partial(placement.op)
    return words.Shard(placement.dim) if placement.is_plain else None


def _chunk_placement(spec: MeshSpec, axis: int, shape: Sequence[int]) -> Any:
    """A Shard with given lengths as a plain one, if that cuts alike."""
    placement = spec.placements[axis]
    assert isinstance(placement, Shard)
    plain = [Shard(p.dim) if a == axis and isinstance(p, Shard) else p for a, p in enumerate(spec.placements)]
    if MeshSpec(spec.mesh, plain, spec.order).layout(shape) != spec.layout(shape):
        raise LayoutError(
            f"{placement!r} on axis {spec.mesh.axes[axis]!r} has no counterpart in DTensor, which splits dim "
            f"{placement.dim} of length {shape[placement.dim]} as torch.chunk does; "
            f"redistribute to Shard({placement.dim})"
        )
    return torch_placement(Shard(placement.dim))


def _insert_strided_shards(spec: MeshSpec, shape: Sequence[int], found: list[Any]) -> None:
    """Replace shards that split in another order than the mesh's by torch's strided ones."""
    words = sys.modules[f"{TENSOR_MODULE}.placement_types"]
    dims = {p.dim for p in spec.placements if isinstance(p, Shard)}
    for dim, axis in product(dims, range(spec.mesh.ndim)):
        order = [spec.mesh.axis_index(a) for a in spec.order]
        split = [a for a in order if isinstance(p := spec.placements[a], Shard) and p.dim == dim]
        if axis in split and (factor := split_factor(spec.mesh, split, axis)) > 1:
            check_even(spec.mesh, split, dim, shape)
            found[axis] = words._StridedShard(dim, split_factor=factor)


@dataclass(frozen=True)
class MeshView:
    """The shape of a mesh, by DeviceMesh's names."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]


@dataclass(frozen=True)
class TensorMetaView:
    """Shape, strides and dtype of a whole tensor, by the names of a DTensorSpec's `tensor_meta`."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SpecView:
    """A ShardedTensor by the names of a DTensorSpec; placements are torch's."""

    mesh: MeshView
    placements: tuple[Any, ...]
    tensor_meta: TensorMetaView

    @property
    def device_mesh(self) -> MeshView:
        return self.mesh

    @property
    def shape(self) -> torch.Size:
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor_meta.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_shards(self) -> int:
        return prod(n for n, p in zip(self.mesh.shape, self.placements, strict=True) if p.is_shard())

    def is_replicated(self) -> bool:
        return all(placement.is_replicate() for placement in self.placements)

    def is_sharded(self) -> bool:
        return any(placement.is_shard() for placement in self.placements)


@dataclass(frozen=True)
class TorchRule:
    """A rule in torch's manner; called with `TensorMeta`s, it is asked with `SpecView`s in their place."""

    rule: Rule

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Any] | Steps:
        return self.rule(*map(_view, args), **{name: _view(value) for name, value in kwargs.items()})


def _view(value: Any) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(one, TensorMeta) for one in value):
        return tuple(_view(one) for one in value)
    if not isinstance(value, TensorMeta):
        return value
    importlib.import_module(TENSOR_MODULE)
    strides = tuple(prod(value.shape[dim + 1 :]) for dim in range(value.ndim))
    mesh = getattr(value.layout.spec, "mesh", None)
    ranks = (len(value.layout.ranks),) if mesh is None else mesh.shape
    return SpecView(
        MeshView(ranks, None if mesh is None else mesh.axes),
        tuple(torch_placement(Shard(p.dim) if isinstance(p, Shard) else p) for p in value.placements),
        TensorMetaView(torch.Size(value.shape), strides, value.dtype),
    )


def register_dtensor_rule(op: Any, rule: Rule) -> None:
    """Give a DTensor operator a rule, now or when `torch.distributed.tensor` is loaded."""
    if not isinstance(op, OpOverload):
        return
    if hasattr(sys.modules.get(TENSOR_MODULE), "DTensor"):
        _install_dtensor_rule(op, rule)
        return
    _rules_to_install[op] = rule
    if not any(isinstance(finder, _DTensorImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DTensorImportHook())


def remove_dtensor_rule(op: Any) -> None:
    """Take a rule from DTensor; what torch had for the operator comes back."""
    _rules_to_install.pop(op, None)
    before = _replaced_entries.pop(op, None)
    if before is None:
        return
    for name, table in _tables().items():
        table.pop(op, None)
        if name in before:
            table[op] = before[name]
    _clear_caches(_propagator())


def _install_dtensor_rule(op: Any, rule: Rule) -> None:
    propagator, tables = _propagator(), _tables()
    _replaced_entries.setdefault(op, {name: table[op] for name, table in tables.items() if op in table})
    for table in tables.values():
        table.pop(op, None)
    propagator.register_op_strategy(op, _make_op_strategy(op, rule), _schema_info(op))
    _clear_caches(propagator)


def _propagator() -> Any:
    return sys.modules[TENSOR_MODULE].DTensor._op_dispatcher.sharding_propagator


def _tables() -> dict[str, dict[Any, Any]]:
    """The tables of torch in which an operator may have an entry."""
    found = {name: getattr(_propagator(), name, {}) for name in _TABLES}
    found[_HANDLERS] = getattr(sys.modules[TENSOR_MODULE].DTensor._op_dispatcher, _HANDLERS, {})
    return found


def _schema_info(op: Any) -> Any:
    """Every argument that is not a tensor counts in torch's key: those from the first one on, as torch counts them.

    A tensor that may be left out is not a tensor here: which of several are left out has to be in the key.
    """
    arguments = op._schema.arguments
    first = next((i for i, a in enumerate(arguments) if str(a.type) != "Tensor"), _NO_STATIC_ARGUMENT)
    named = [a.name for a in arguments if a.kwarg_only and "Tensor" not in str(a.type)]
    words = sys.modules[f"{TENSOR_MODULE}._op_schema"]
    return words.RuntimeSchemaInfo(static_argnum=first, static_kwargkey=named or None, needs_pytree=True)


def _clear_caches(propagator: Any) -> None:
    """Drop what torch derived from the rules before; its caches are per thread."""
    propagator.propagate_op_sharding.cache_clear()
    clear_dtensor_caches()


def _make_op_strategy(op: Any, rule: Rule) -> Callable[[Any], Any]:
    def strategy(op_schema: Any) -> Any:
        metas: list[TensorMeta] = []
        slots = tuple(_replace_strategies(a, metas) for a in op_schema.args_schema)
        named = {name: _replace_strategies(a, metas) for name, a in op_schema.kwargs_schema.items()}
        args = [_fill_metas(a, metas) for a in slots]
        kwargs = {name: _fill_metas(a, metas) for name, a in named.items()}
        if isinstance(rule, TorchRule):
            known = ask_rule(rule.rule, _torch_arguments(op_schema), (slots, named), len(metas))
        else:
            known = ask_rule(rule, (args, kwargs), (slots, named), len(metas))
        if isinstance(known, Steps):
            raise NotImplementedError(f"the rule of {op} computes these layouts in steps, which DTensor cannot run")
        outputs = _output_count(op, args, kwargs)
        lists = [made for s in known if (made := _to_torch_placements(s, outputs)) is not None]
        return _expand_strategies(op, op_schema, lists, outputs)

    return strategy


def _torch_arguments(op_schema: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operator with torch's own specs in place of tensors."""
    named = {name: _spec_of(value) for name, value in op_schema.kwargs_schema.items()}
    return [_spec_of(value) for value in op_schema.args_schema], named


def _spec_of(value: Any) -> Any:
    if hasattr(value, "strategies"):
        return value.strategies[0].output_spec
    return tuple(map(_spec_of, value.children)) if hasattr(value, "children") else value


def _expand_strategies(op: Any, op_schema: Any, lists: list[list[Any]], outputs: int) -> Any:
    words = sys.modules[f"{TENSOR_MODULE}._ops.utils"]
    expanded = words.expand_to_full_mesh_op_strategy(
        op_schema.get_mesh_from_args(),
        op_schema,
        lists,
        input_index=outputs,
        inplace_op=op_schema.is_inplace_op(),
    )
    first_named = len(op_schema.args_strategy)
    now = [s.strategies[0].output_spec.placements for s in op_schema.kwargs_strategy]
    expanded.strategies = [s for s in expanded.strategies if [i.placements for i in s.input_specs[first_named:]] == now]
    if _is_list_op(op):
        for one in expanded.strategies:
            one.output_specs = one.output_specs if isinstance(one.output_specs, tuple) else (one.output_specs,)
    return expanded


def _replace_strategies(value: Any, metas: list[TensorMeta]) -> Any:
    """An argument with Slots in place of torch's strategies, whose specs are noted as metas."""
    if hasattr(value, "strategies"):
        spec = value.strategies[0].output_spec
        native = spec_from_dtensor(spec.mesh, spec.placements, spec.shape, dtensor_split_order(spec))
        shape = tuple(spec.shape)
        metas.append(TensorMeta(shape, spec.tensor_meta.dtype, native.layout(shape), native.placements))
        return Slot(len(metas) - 1)
    if hasattr(value, "children"):
        return [_replace_strategies(v, metas) for v in value.children]
    return [_replace_strategies(v, metas) for v in value] if isinstance(value, list | tuple) else value


def _fill_metas(value: Any, metas: Sequence[TensorMeta]) -> Any:
    if isinstance(value, Slot):
        return metas[value.index]
    return [_fill_metas(v, metas) for v in value] if isinstance(value, list) else value


def _to_torch_placements(strategy: Strategy, outputs: int) -> list[Any] | None:
    """Outputs, then inputs, as torch lists them; None for a strategy that DTensor cannot run."""
    given = strategy.outputs
    every = [given[min(i, len(given) - 1)] for i in range(outputs)] if given else [None] * outputs
    placed = [*every, *strategy.inputs]
    own_cut = any(isinstance(p, Shard) and torch_placement(p) is None for p in placed)
    if strategy.local is not None or strategy.finish is not None or own_cut:
        return None
    return [None if p is None else torch_placement(p) for p in placed]


def _is_list_op(op: Any) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type).startswith("List")


def _output_count(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many tensors an operator returns; a list's length shows when the operator runs on meta tensors."""
    if not _is_list_op(op):
        return len(op._schema.returns)
    return len(op(*(_to_meta(a) for a in args), **{k: _to_meta(v) for k, v in kwargs.items()}))


def _to_meta(value: Any) -> Any:
    if isinstance(value, TensorMeta):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return [_to_meta(v) for v in value] if isinstance(value, list) else value


class _DTensorImportHook(MetaPathFinder):
    """Registers the rules that wait as soon as `torch.distributed.tensor` is loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != TENSOR_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _DTensorLoader(spec.loader)
        return spec


class _DTensorLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        while _rules_to_install:
            _install_dtensor_rule(*_rules_to_install.popitem())
