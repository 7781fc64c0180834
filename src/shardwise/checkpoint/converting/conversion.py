"""What of a checkpoint is converted, and under which names: filters, a map of names, the model alone.

1. `only` and `without` choose tensors and values by their stored names.
2. For formats that store a model's tensors and nothing else, what belongs to the optimizer is left out; if everything
   left is under one key such as "model", it is taken from there, so that names are those of the state dict.
3. A map of names makes the tensors that are written. Values keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpoint.converting.name_map import NameMap
from shardwise.checkpoint.converting.patterns import filter_by_globs
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Index, Json, TensorEntry, iterate_leaves

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state", "net", "app")
TRAINING_KEYS = (
    *("optim", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states", "optimizer_state_dict"),
    *("lr_scheduler", "lr_schedulers", "scheduler", "grad_scaler", "scaler", "dataloader", "train_state"),
    *("rng", "rng_state"),
)
_GONE = object()  # what is left of a leaf that is not kept; None is a value


@dataclass(frozen=True)
class Conversion:
    """How the index of a source becomes that of what is written. `model_only`: see the module docstring."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    names: NameMap | None = None
    model_only: bool = False

    def to_json(self) -> Json:
        """The conversion as plain data, for another process."""
        names = None if self.names is None else self.names.data
        return [list(self.only), list(self.without), names, self.model_only]

    @classmethod
    def from_json(cls, data: Any) -> Conversion:
        """The conversion that `to_json` wrote."""
        only, without, names, model_only = data
        return cls(tuple(only), tuple(without), None if names is None else NameMap.of(names), model_only)

    def apply(self, index: Index) -> Index:
        """What is written, as an index of the source's bytes; an error for patterns that match nothing."""
        chosen = self.choose(index)
        if (self.only or self.without) and not chosen.tensors and not chosen.leaves:
            raise CheckpointError("nothing is left to write: the filters leave out every tensor and value")
        return self.rename(chosen)

    def choose(self, index: Index) -> Index:
        """What the filters choose, as it is stored."""
        if not self.only and not self.without:
            return index
        named = {tensor: name for name, tensor, _ in index.leaves if tensor is not None}
        names = [*(name for name, _, _ in index.leaves), *(n for n in index.tensors if n not in named), *index.opaque]
        return _keep_names(index, named, filter_by_globs(names, self.only, self.without))

    def rename(self, index: Index) -> Index:
        """The same under the names that are written."""
        index = take_model(index) if self.model_only else index
        return index if self.names is None else rename_index(index, self.names)

    def left_out(self, index: Index) -> tuple[str, ...]:
        """What is not of the model, where the model alone is written: tensors, and all values."""
        if not self.model_only:
            return ()
        chosen = self.choose(index)
        kept = {run for entry in take_model(chosen).tensors.values() for run in _runs(entry)}
        tensors = (name for name, entry in chosen.tensors.items() if len(entry.cut) and not kept & _runs(entry))
        return (*tensors, *(name for name, tensor, _ in chosen.leaves if tensor is None))


def _runs(entry: TensorEntry) -> set[tuple[int, int]]:
    return set(zip(entry.files, entry.begins, strict=True))


def rename_index(index: Index, names: NameMap) -> Index:
    """An index under other names: renamed tensors are entries of the outermost dict, others stay where they are."""
    tensors = names.apply(index.tensors)
    kept = {name for name in tensors if tensors[name] is index.tensors.get(name)}
    tree = _edit_tree(index.tree, lambda _, node: node if not _is_tensor(node) or node["tensor"] in kept else _GONE)
    tree = {"dict": []} if tree is _GONE else tree
    if not (isinstance(tree, dict) and "dict" in tree):
        raise CheckpointError("the state is not a dict, so that tensors cannot get other names in it")
    taken = {str(key) for key, _ in tree["dict"]}
    fresh = [name for name in tensors if name not in kept]
    clash = next((name for name in fresh if name in taken), None)
    if clash is not None:
        raise CheckpointError(f"a tensor would be called {clash}, which is another entry of the state; rename it")
    return replace(index, tensors=tensors, tree={"dict": [*tree["dict"], *([n, {"tensor": n}] for n in fresh)]})


def take_model(index: Index) -> Index:
    """The tensors of the model alone, under their names in its state dict."""
    tree = index.tree
    while (children := _dict_children(tree)) is not None:
        training = any(key in MODEL_KEYS and _dict_children(child) is not None for key, child in children)
        kept = [
            [key, child]
            for key, child in children
            if str(key) not in TRAINING_KEYS or not (training or _dict_children(child) is not None)
        ]
        tree = {"dict": kept}
        holding = [(key, child) for key, child in kept if any(t is not None for _, t, _ in iterate_leaves(child))]
        if len(holding) != 1 or holding[0][0] not in MODEL_KEYS or _dict_children(holding[0][1]) is None:
            break
        tree = holding[0][1]
    found = {name: tensor for name, tensor, _ in iterate_leaves(tree) if tensor is not None}
    tensors = {name: replace(index.tensors[stored], name=name) for name, stored in found.items()}
    return replace(index, tensors=tensors, tree={"dict": [[name, {"tensor": name}] for name in tensors]})


def _keep_names(index: Index, named: Mapping[str, str], chosen: Collection[str]) -> Index:
    tensors = {name: e for name, e in index.tensors.items() if named.get(name, name) in chosen}
    tree = _edit_tree(index.tree, lambda name, node: node if name in chosen else _GONE)
    opaque = tuple(name for name in index.opaque if name in chosen)
    return replace(index, tensors=tensors, tree={"dict": []} if tree is _GONE else tree, opaque=opaque)


def _is_tensor(node: Json) -> bool:
    return isinstance(node, dict) and "tensor" in node


def _dict_children(node: Json) -> list[tuple[Any, Json]] | None:
    return [(key, child) for key, child in node["dict"]] if isinstance(node, dict) and "dict" in node else None


def _edit_tree(node: Json, leaf: Callable[[str, Json], Json], path: tuple[str, ...] = ()) -> Json:
    """A tree with other leaves: `leaf` gets the name and the node of each. Containers that lose all of them go too."""
    children = _dict_children(node)
    if children is not None:
        edited = [[key, _edit_tree(child, leaf, (*path, str(key)))] for key, child in children]
        left = [pair for pair in edited if pair[1] is not _GONE]
        return {"dict": left} if left or not children else _GONE
    items = node.get("tuple") if isinstance(node, dict) else node
    if not isinstance(items, list):
        return leaf(".".join(path), node)
    found = [_edit_tree(child, leaf, (*path, str(i))) for i, child in enumerate(items)]
    if items and all(child is _GONE for child in found):
        return _GONE
    found = [None if child is _GONE else child for child in found]  # the others keep their numbers
    return found if isinstance(node, list) else {"tuple": found}
