"""A rule of ours as a strategy of torch's DTensor.

1. The rule is asked with `TensorMeta`s made from the DTensors' specs; its strategies become torch's. Those
   that DTensor cannot run (a `local` of their own, lengths of their own) are left out.
2. torch expands them to the mesh. A keyword tensor is never moved by DTensor, so strategies that would need it
   are left out.
3. torch's cache key holds every argument that is not a tensor, and what would win over a registered rule without a
   word is put aside until the rule is removed: an operator's "single-dim strategy", a function of its own.

As long as `torch.distributed.tensor` is not loaded, rules wait: loading it takes seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

import torch

from shardwise._torch import OpOverload, clear_dtensor_caches
from shardwise.compat.dtensor.layouts import torch_placement
from shardwise.compat.dtensor.spec_view import TorchRule
from shardwise.geometry import Shard
from shardwise.ops.engine.registry import Rule, Steps, Strategy, TensorMeta, ask_rule
from shardwise.ops.engine.schema import Slot
from shardwise.tensor.dtensors import TENSOR_MODULE, dtensor_split_order, spec_from_dtensor

_TABLES = (
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
)
_HANDLERS = "_custom_op_handlers"  # of the dispatcher: functions that compute an operator without a rule
_rules_to_install: dict[Any, Rule] = {}
_replaced_entries: dict[Any, dict[str, Any]] = {}


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
    """Every argument that is not a tensor counts in torch's key."""
    named = [a.name for a in op._schema.arguments if a.kwarg_only and "Tensor" not in str(a.type)]
    words = sys.modules[f"{TENSOR_MODULE}._op_schema"]
    return words.RuntimeSchemaInfo(static_argnum=0, static_kwargkey=named or None, needs_pytree=True)


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
