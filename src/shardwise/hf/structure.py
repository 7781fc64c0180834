"""Which linear layers of a model are split by columns, and which by rows? Found by following one forward pass.

The pass runs on the meta device: nothing is computed. Each tensor has an origin:

- *stream*: whole hidden states (inputs, embeddings, outputs of rows);
- *columns*: computed from outputs of these linear layers, and from nothing of the stream since;
- none: masks, positions, parameters, which go with anything.

1. A linear layer that reads the stream is a candidate for columns: its output has it as origin.
2. A linear layer that reads columns is their row: the sum over ranks ends there, and its output is stream.
3. Columns that meet the stream outside of a linear layer would have to be gathered, and stay whole.
4. On the way, views show how many heads a layer has, and splits show which groups are fused in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise._torch import pytree

Origin: TypeAlias = frozenset[str] | None
STREAM: frozenset[str] = frozenset()
_SPLITS = (torch.split, Tensor.split, torch.chunk, Tensor.chunk)
_READS_VALUES = (Tensor.item, Tensor.__bool__, Tensor.__contains__)  # checks of padding, layers left out at random
_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten)


@dataclass
class LinearPairs:
    """Linear layers by name: those of columns with the rows that they end in, their heads and their fused groups."""

    rows: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    heads: dict[str, set[int]] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def usable_rows(self, ranks: int) -> dict[str, set[str]]:
        """The rows and their columns that can be split over this many ranks; one that cannot leaves the others whole.

        >>> LinearPairs({"down": {"up"}}, heads={"up": {6}}).usable_rows(4)
        {}
        """
        found = dict(self.rows)
        while True:
            used = set().union(*found.values())
            wrong = {n for n in used if n in self.whole or n in found or any(h % ranks for h in self.heads.get(n, ()))}
            kept = {row: columns for row, columns in found.items() if not columns & wrong}
            if len(kept) == len(found):
                return kept
            self.whole |= used - set().union(*kept.values())
            found = kept


def is_linear(part: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: nn.Linear, or the transposed one of GPT-2, named Conv1D there."""
    return isinstance(part, nn.Linear) or (type(part).__name__ == "Conv1D" and hasattr(part, "nf"))


def out_features(part: nn.Module) -> int:
    """The length of a linear layer's output."""
    return int(part.out_features if isinstance(part, nn.Linear) else part.nf)  # type: ignore[arg-type]  # of Conv1D


def find_linear_pairs(module: nn.Module, inputs: Mapping[str, Any]) -> LinearPairs:
    """Follow a forward pass of a model on the meta device.

    >>> block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> find_linear_pairs(block, {"input": torch.ones(2, 4)}).rows
    {'2': {'0'}}
    """
    found = LinearPairs()
    tensors = {n: t.to("meta") for n, t in (*module.named_parameters(), *module.named_buffers())}
    given = pytree.tree_map(_put_on_meta, dict(inputs))
    training = {part for part in module.modules() if part.training}
    module.eval()  # layers that are left out at random would need values
    try:
        with torch.no_grad(), torch.device("meta"), _hooks(module, found), _OriginMode(found):
            torch.func.functional_call(module, tensors, (), given)
    finally:
        for part in training:
            part.training = True
    return found


def _put_on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    moved = value.to("meta")
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

    def __init__(self, found: LinearPairs) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_VALUES:
            return False  # there are no values: no padding, no layer left out
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
            cut = len(first) == given.ndim and first[:-1] == given.shape[:-1] and first[-1] != given.shape[-1]
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
            output._shardwise_origin = frozenset({name})

    return hook
