"""Objects in a state: modules, optimizers, and everything else that has `state_dict` and `load_state_dict`.

Saving puts a plain state in the place of each object. That of an optimizer is named by parameter, so that it does not
depend on the order of parameters: `{"state": {"up.weight": {...}}, "param_groups": [{..., "params": ["up.weight"]}]}`,
as `ShardedOptimizer` has it. A parameter has the name that it has in the first module of the state that has all of the
optimizer's parameters; else its name in any of them, after the name of that module; else its number, as in "#3".

Loading reads what is stored for an object, whatever the object has now, and calls `load_state_dict`:

1. A module is filled in place; `load_state_dict` is called only where it has more than its own tensors.
2. An optimizer may have no state yet. What is stored for a parameter is read into the tensors that it has already, else
   into new ones: of the parameter's layout if they have its shape, else whole on all of its ranks. State that is stored
   by number, as `torch.save` of `optimizer.state_dict()` has it, is found by the order of the parameters.
3. Other objects (schedulers, scalers, data loaders) get the state as it was saved.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.index import MAX_DEPTH, Index, Json, TensorEntry, build_tree, tree_children
from shardwise.checkpoint.state import is_dtensor, torch_dtype
from shardwise.geometry import MeshSpec, Replicate
from shardwise.tensor import ShardedTensor, wrap
from shardwise.tensor.move import replicated_layout

Path: TypeAlias = tuple[str, ...]
Renamer: TypeAlias = Callable[[str], str | None]
_STATE, _GROUPS, _PARAMS, _NAMES = "state", "param_groups", "params", "param_names"
_UNSTORED = (_PARAMS, _NAMES)  # options of a group that other parameters have in another program
_MISSING = object()


class Parameter(NamedTuple):
    """A parameter of an optimizer: all of its names, of which the first is stored, and its group."""

    names: tuple[str, ...]
    value: Tensor
    group: int


def find_objects(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The objects of a state, each with its path, in order.

    >>> [(path, type(found).__name__) for path, found in find_objects({"model": nn.Linear(1, 1), "step": 3})]
    [(('model',), 'Linear')]
    """
    if is_object(node):
        yield path, node
    elif len(path) <= MAX_DEPTH and isinstance(node, Mapping | list | tuple):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from find_objects(child, (*path, str(key)))


def is_object(node: object) -> bool:
    """Whether something in a state is an object that has a state of its own."""
    if isinstance(node, Tensor | Mapping | list | tuple | str | type):
        return False
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def replace_objects(node: Any, states: Mapping[Path, Any], path: Path = ()) -> Any:
    """A state with something else in the place of each object; what has none is the same as before."""
    if path in states:
        return states[path]
    if not states or len(path) > MAX_DEPTH or not isinstance(node, Mapping | list | tuple):
        return node
    if isinstance(node, Mapping):
        return {key: replace_objects(child, states, (*path, str(key))) for key, child in node.items()}
    items = [replace_objects(child, states, (*path, str(number))) for number, child in enumerate(node)]
    return items if isinstance(node, list) else tuple(items)


def expand_objects(state: Any) -> tuple[Any, dict[str, str]]:
    """A state to save, with the plain state of every object in its place, and the module that each optimizer is of.

    >>> weight = nn.Linear(1, 1, bias=False)
    >>> optimizer = optim.SGD(weight.parameters(), lr=0.5)
    >>> plain, modules = expand_objects({"model": weight, "optimizer": optimizer})
    >>> plain["optimizer"]["param_groups"][0]["params"], modules
    (['weight'], {'optimizer': 'model'})
    """
    found = list(find_objects(state))
    known = ParameterNames(state, found) if found else None
    plain = replace_objects(state, {path: _plain_state(path, value, known) for path, value in found})
    owners = {".".join(path): known.module_of(value) for path, value in found if known and has_numbered_state(value)}
    return plain, {path: module for path, module in owners.items() if module is not None}


class ParameterNames:
    """The names that parameters have in the modules of a state, and tensors outside of them in the state itself."""

    def __init__(self, state: Any, objects: Sequence[tuple[Path, Any]]) -> None:
        self._modules = [
            (".".join(path), _named_parameters(value)) for path, value in objects if isinstance(value, nn.Module)
        ]
        self._tensors = {id(tensor): ".".join(path) for path, tensor in _find_tensors(state, ())}

    def of(self, optimizer: Any) -> list[Parameter]:
        """The parameters of an optimizer, in order."""
        rows = [(p, number) for number, group in enumerate(optimizer.param_groups) for p in group[_PARAMS]]
        own = getattr(optimizer, "named_params", None)
        if isinstance(own, Mapping):  # a ShardedOptimizer
            names = {id(value): (name,) for name, value in own.items()}
            return [Parameter(names[id(p)], p, number) for p, number in rows]
        module = self.module_of(optimizer)
        whole = next((named for name, named in self._modules if name == module), None)
        return [
            Parameter(tuple(whole[id(p)]) if whole is not None else self._names(p, place), p, number)
            for place, (p, number) in enumerate(rows)
        ]

    def module_of(self, optimizer: Any) -> str | None:
        """The name of the first module that has all of the optimizer's parameters."""
        parameters = [id(p) for group in optimizer.param_groups for p in group[_PARAMS]]
        return next((name for name, named in self._modules if named.keys() >= set(parameters)), None)

    def _names(self, parameter: Tensor, place: int) -> tuple[str, ...]:
        for prefix, named in self._modules:
            if id(parameter) in named:
                return tuple(f"{prefix}.{name}" if prefix else name for name in named[id(parameter)])
        return (self._tensors.get(id(parameter), f"#{place}"),)


def _named_parameters(module: nn.Module) -> dict[int, list[str]]:
    named: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    return named


def _find_tensors(node: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
    elif len(path) <= MAX_DEPTH and isinstance(node, Mapping | list | tuple):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _find_tensors(child, (*path, str(key)))


def has_numbered_state(value: object) -> bool:
    """Whether an object is an optimizer of torch, whose own state is by the number of the parameter."""
    return isinstance(value, optim.Optimizer) and type(value).state_dict is optim.Optimizer.state_dict


def _has_named_state(value: object) -> bool:
    return isinstance(value, optim.Optimizer) and isinstance(getattr(value, "named_params", None), Mapping)


def _call(path: Path, value: Any, method: str, *args: Any) -> Any:
    """What a method of an object returns; whatever it raises is an error that names the object."""
    try:
        return getattr(value, method)(*args)
    except Exception as error:  # of any kind: it is code of the user's, and all ranks have to know
        where, kind = ".".join(path) or "the state", type(error).__name__
        raise CheckpointError(f"{where}: {method}() of {type(value).__name__} raised {kind}: {error}") from error


def _plain_state(path: Path, value: Any, known: ParameterNames | None) -> Any:
    state = _call(path, value, "state_dict")
    if known is None or not has_numbered_state(value):
        return state
    parameters = known.of(value)
    names = [p.names[0] for p in parameters]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CheckpointError(f"{'.'.join(path)}: two of its parameters are called {twice[0]!r}; rename a module")
    groups = [
        {
            **{key: option for key, option in group.items() if key not in _UNSTORED},
            _PARAMS: [names[number] for number in group[_PARAMS]],
        }
        for group in state[_GROUPS]
    ]
    by_name = {names[key] if type(key) is int else key: held for key, held in state[_STATE].items()}
    return {**state, _STATE: by_name, _GROUPS: groups}


@dataclass(frozen=True, eq=False)
class ObjectLoad:
    """What is read for an object: a plain state to fill in its place, and what gives it to the object then.

    `stored_name`: where the checkpoint has it; None where each entry is found by its own name.
    """

    path: Path
    state: Any
    finish: Callable[[], object]
    stored_name: str | None = None

    def stored(self, name: str) -> str | None:
        """The stored name of an entry, if it is one of this object."""
        own = ".".join(self.path)
        if self.stored_name is None or not (not own or name.startswith(f"{own}.")):
            return None
        rest = name[len(own) + 1 :] if own else name
        return f"{self.stored_name}.{rest}" if self.stored_name else rest


def plan_objects(state: Any, index: Index, rename: Renamer, *, strict: bool, cast: bool) -> list[ObjectLoad]:
    """What to read for the objects of a state; an error for what does not fit, and for what is missing if strict."""
    objects = list(find_objects(state))
    known = ParameterNames(state, objects) if objects else None
    found = []
    for path, value in objects:
        if isinstance(value, nn.Module):
            found.append(_plan_module(path, value, index, rename))
            continue
        name = ".".join(path)
        stored_name = rename(name) if name else name
        node = _MISSING if stored_name is None else find_subtree(index.tree, stored_name)
        if node is _MISSING and strict and stored_name is not None:
            raise CheckpointError(
                f"the checkpoint does not fit the state: {stored_name} ({type(value).__name__}) is missing from it "
                "(strict=False leaves it as it is)"
            )
        if node is _MISSING:
            found.append(ObjectLoad(path, {}, lambda: None))
        elif known is not None and (has_numbered_state(value) or _has_named_state(value)):
            plan = _OptimizerPlan(path, value, node, index, known.of(value), strict)
            found.append(ObjectLoad(path, plan.state, partial(plan.finish, cast), stored_name))
        else:
            found.append(_plan_other(path, value, node, index, stored_name))
    return found


def find_subtree(tree: Json, name: str) -> Any:
    """The node of a tree that has a name."""
    if not name:
        return tree
    for key, child in tree_children(tree, 0) or ():
        if name == str(key):
            return child
        if name.startswith(f"{key}.") and (found := find_subtree(child, name[len(str(key)) + 1 :])) is not _MISSING:
            return found
    return _MISSING


def _plan_module(path: Path, module: nn.Module, index: Index, rename: Renamer) -> ObjectLoad:
    """A module's own tensors are filled where they are."""
    state = _call(path, module, "state_dict")
    for key in [key for key in state if key.endswith("_extra_state")]:  # whatever a module has besides
        stored_name = rename(".".join((*path, key)))
        node = _MISSING if stored_name is None else find_subtree(index.tree, stored_name)
        if node is not _MISSING:
            state[key] = build_tree(node, lambda _, name: _plain_tensor(index.tensors[name]))
    own = {part.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers()) for part in _parts(t)}
    tensors = dict(_find_tensors(state, ()))
    filled = len(tensors) == len(state) and all(
        not part.numel() or part.untyped_storage().data_ptr() in own for t in tensors.values() for part in _parts(t)
    )
    return ObjectLoad(path, state, (lambda: None) if filled else partial(_call, path, module, "load_state_dict", state))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if isinstance(tensor, ShardedTensor):
        return tensor.local_parts
    return (tensor._local_tensor,) if is_dtensor(tensor) else (tensor,)  # type: ignore[attr-defined]  # a DTensor's


def _plan_other(path: Path, value: Any, node: Json, index: Index, stored_name: str | None) -> ObjectLoad:
    """An object of any kind: what was saved, with tensors laid out like those that it has in their place now."""
    own_state = _call(path, value, "state_dict")
    own = dict(_find_tensors(own_state, ()))

    def make(at: Path, name: str) -> Tensor:
        return _empty_like(own.get(at), index.tensors[name])

    state = build_tree(node, make)
    return ObjectLoad(
        path, state, lambda: _call(path, value, "load_state_dict", _with_types(state, own_state)), stored_name
    )


def _with_types(state: Any, own: Any) -> Any:
    """A state with the kinds of dicts that the object has itself, such as a Counter, which is not stored."""
    if not isinstance(state, dict) or not isinstance(own, dict):
        return state
    made = {key: _with_types(value, own.get(key)) for key, value in state.items()}
    return type(own)(made) if type(own) in (Counter, OrderedDict) else made


def _plain_tensor(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")


def _empty_like(other: Tensor | None, entry: TensorEntry) -> Tensor:
    """Memory for a stored tensor: laid out like another one if that has its shape, else a plain tensor."""
    if other is None or tuple(other.shape) != entry.shape:
        return _plain_tensor(entry)
    dtype = torch_dtype(entry.dtype)
    if isinstance(other, ShardedTensor):
        parts = tuple(torch.empty_like(part, dtype=dtype) for part in other.local_parts)
        return wrap(other.sharding, parts, other.comm, dtype=dtype, device=other.device)
    return torch.empty_like(other.detach(), dtype=dtype)


class _OptimizerPlan:
    """What is read for an optimizer: `state`, by the stored keys of its parameters."""

    def __init__(
        self, path: Path, optimizer: Any, node: Json, index: Index, parameters: Sequence[Parameter], strict: bool
    ) -> None:
        self._path, self._optimizer, self._index, self._parameters = path, optimizer, index, parameters
        held = dict(tree_children(node, 0) or ())
        if not {_STATE, _GROUPS} <= held.keys():
            raise self._error("what is stored there is not the state of an optimizer: it has no state and param_groups")
        self._groups = build_tree(held[_GROUPS], lambda _, name: _plain_tensor(index.tensors[name]))
        if not isinstance(self._groups, list) or not all(
            isinstance(group, dict) and isinstance(group.get(_PARAMS), list) for group in self._groups
        ):
            raise self._error("its param_groups do not list their params")
        self._group_of = {key: number for number, group in enumerate(self._groups) for key in group[_PARAMS]}
        self._keys = self._find_keys(strict)
        state, rest = self._plan_state(tree_children(held[_STATE], 0) or ()), held.keys() - {_STATE, _GROUPS}
        plain = {
            key: build_tree(held[key], lambda _, name: _plain_tensor(index.tensors[name]))
            for key in held
            if key in rest
        }
        self.state = {**plain, _STATE: state, _GROUPS: self._groups}
        self._chosen = [self._choose_group(number) for number in range(len(optimizer.param_groups))]

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{'.'.join(self._path) or 'the state'}: {text}")

    def _find_keys(self, strict: bool) -> list[Any]:
        """The stored key of each parameter: its number, or one of its names; None for one that is not stored."""
        keys = list(self._group_of)
        if keys and all(type(key) is int for key in keys):
            if len(keys) != len(self._parameters):
                raise self._error(
                    f"the checkpoint has the state of {len(keys)} parameters by number, this optimizer has "
                    f"{len(self._parameters)}; make it with the same parameters in the same order"
                )
            return sorted(keys)
        found = [next((name for name in p.names if name in self._group_of), None) for p in self._parameters]
        lacking = [p.names[0] for p, key in zip(self._parameters, found, strict=True) if key is None]
        if strict and lacking:
            raise self._error(
                f"{len(lacking)} of its {len(found)} parameters are not in the checkpoint, such as {lacking[0]!r}; it "
                f"has {', '.join(map(repr, keys[:3])) or 'none'} (the module is part of the state, next to its "
                "optimizer; strict=False leaves them without state)"
            )
        return found

    def _plan_state(self, stored: Iterable[tuple[str | int, Json]]) -> dict[Any, Any]:
        """Memory for the state of each parameter, and for what is not of any of them."""
        by_key = {str(k): p for k, p in zip(self._keys, self._parameters, strict=True) if k is not None}
        others = {str(key) for key in self._group_of} - by_key.keys()
        state: dict[Any, Any] = {}
        for key, node in stored:
            if str(key) in by_key:
                state[key] = build_tree(node, partial(self._allocate, by_key[str(key)].value))
            elif str(key) not in others:
                state[key] = build_tree(node, lambda _, name: _plain_tensor(self._index.tensors[name]))
        return state

    def _allocate(self, parameter: Tensor, at: Path, name: str) -> Tensor:
        entry = self._index.tensors[name]
        own = self._optimizer.state.get(parameter, {}).get(at[0]) if len(at) == 1 else None
        if isinstance(own, Tensor) and tuple(own.shape) == entry.shape and own.dtype == torch_dtype(entry.dtype):
            return own
        if at[-1:] == ("step",):  # a counter in host memory, also of a parameter that has no dims
            return _plain_tensor(entry)
        if not isinstance(parameter, ShardedTensor) or tuple(parameter.shape) == entry.shape or not entry.shape:
            return _empty_like(parameter, entry)
        spec = parameter.sharding.spec
        if isinstance(spec, MeshSpec):
            layout = MeshSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim).layout(entry.shape)
        else:
            layout = replicated_layout(entry.shape, parameter.sharding.ranks)
        dtype, comm = torch_dtype(entry.dtype), parameter.comm
        parts = tuple(
            torch.empty(shape, dtype=dtype, device=parameter.device) for shape in layout.local_shapes(comm.rank)
        )
        return wrap(layout, parts, comm, dtype=dtype, device=parameter.device)

    def _choose_group(self, number: int) -> dict[str, Any]:
        """The stored options of a group of this optimizer: those of the group that has its parameters."""
        keys = [k for k, p in zip(self._keys, self._parameters, strict=True) if p.group == number and k is not None]
        found = {repr(options): options for k in keys for options in [_options(self._groups[self._group_of[k]])]}
        if len(found) > 1:
            raise self._error(
                f"the parameters of its group {number} are in {len(found)} groups of the checkpoint, which have "
                "different options; make the groups as they were"
            )
        return next(iter(found.values()), {})

    def finish(self, cast: bool) -> None:
        """Give the optimizer what was read."""
        own, filled = self._optimizer, self.state[_STATE]
        numbered = has_numbered_state(own)
        labels = [place if numbered else p.names[0] for place, p in enumerate(self._parameters)]
        label_of = {str(k): label for k, label in zip(self._keys, labels, strict=True) if k is not None}
        groups = [
            {
                **_options(group),
                **self._chosen[number],
                **({_NAMES: group[_NAMES]} if _NAMES in group else {}),
                _PARAMS: [label for label, p in zip(labels, self._parameters, strict=True) if p.group == number],
            }
            for number, group in enumerate(own.param_groups)
        ]
        state = {label_of.get(str(key), key): value for key, value in filled.items()}
        _call(self._path, own, "load_state_dict", {**self.state, _STATE: state, _GROUPS: groups})
        if numbered and not cast:
            self._restore_dtypes(state)

    def _restore_dtypes(self, state: Mapping[Any, Any]) -> None:
        """Torch converts state to the dtype of its parameter; what was in float32 beside a bfloat16 one stays so."""
        for place, p in enumerate(self._parameters):
            for key, value in state.get(place, {}).items():
                now = self._optimizer.state[p.value].get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    self._optimizer.state[p.value][key] = value.to(now.device)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _UNSTORED}
