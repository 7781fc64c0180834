"""A nested state taken apart into tensors and values by name, and filled again.

A tensor is a layout, a dtype and this rank's local tensors, whatever its class. One with a pending reduction is stored
reduced.

Do all ranks save the same state? Each describes what it has: the tree, and for each tensor dtype and layout. If the
digests differ (pipeline stages, say) the descriptions are exchanged and merged; an entry that several ranks have is the
same on all of them. A plain tensor counts as copied on the ranks that have it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats.base import TensorToSave
from shardwise.checkpoint.index import MAX_DEPTH, Json, Scalar, checksum
from shardwise.checkpoint.store import CARRIERS, CopyTarget
from shardwise.comm import Comm, gather_raw
from shardwise.geometry import ChunkSpec, DType, Layout, find_dtype, layout_from_json, layout_to_json
from shardwise.tensor import ShardedTensor, redistribute_many, wrap
from shardwise.tensor.functions import TENSOR_MODULE, spec_from_dtensor
from shardwise.tensor.move import replicated_layout, single_rank_layout


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A tensor of the state. `plain`: no sharded tensor; all ranks that have it hold the same values.

    `held` are its local tensors themselves, `locals` the same without gradients.
    """

    name: str
    layout: Layout
    dtype: DType
    locals: tuple[Tensor, ...]
    plain: bool
    tensor: Tensor
    held: tuple[Tensor, ...]


def make_leaf(name: str, tensor: Tensor, comm: Comm) -> Leaf:
    """A tensor of any known class as a leaf."""
    kind_of = type(tensor)
    if isinstance(tensor, ShardedTensor):
        layout, held, plain = tensor.sharding, tensor.local_parts, False
    elif kind_of is not Tensor and kind_of is not nn.Parameter and is_dtensor(tensor):
        layout, held, plain = *_dtensor_parts(tensor, comm), False
    else:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = (
                "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            )
            raise CheckpointError(
                f"{name}: a tensor that is {kind} cannot be stored; convert it to a dense tensor first"
            )
        layout, held, plain = replicated_layout(tuple(tensor.shape), comm.ranks), (tensor,), True
    if layout.ranks != comm.ranks and (outside := sorted(set(layout.ranks) - set(comm.ranks))):
        raise CheckpointError(
            f"{name}: it is on ranks {outside[:8]}, which are not among the comm's ranks {list(comm.ranks)[:8]}; "
            "pass a comm that includes all of them"
        )
    # without a comprehension for one part, which is a call: this runs for each tensor of a push
    parts = [held[0].detach() if held[0].requires_grad else held[0]] if len(held) == 1 else [t.detach() for t in held]
    return Leaf(name, layout, dtype_of(tensor.dtype), tuple(parts), plain, tensor, tuple(held))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is torch's DTensor; torch's module is not loaded to find out."""
    module = sys.modules.get(TENSOR_MODULE)
    kind = getattr(module, "DTensor", None)  # another thread may be loading the module right now
    return kind is not None and isinstance(tensor, kind)


def _dtensor_parts(tensor: Tensor, comm: Comm) -> tuple[Layout, tuple[Tensor, ...]]:
    spec = tensor._spec  # type: ignore[attr-defined]  # only DTensors come here
    ours = spec_from_dtensor(spec.mesh, spec.placements, tensor.shape, getattr(spec, "shard_order", None))
    layout = ours.layout(tuple(tensor.shape))
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # only DTensors come here
    return layout, (local,) if comm.rank in layout.ranks else ()


@cache
def dtype_of(dtype: torch.dtype) -> DType:
    """An element type as the pure layers know it.

    >>> dtype_of(torch.bfloat16).name
    'bf16'
    """
    return find_dtype(str(dtype))


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """An element type as torch knows it."""
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64}
_INTS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}
_OF_NUMPY = _FLOATS | _INTS | {torch.bool}


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are in host memory as they are."""
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of a plain tensor: unsigned numbers of its elements' width.

    >>> as_array(torch.ones(2, 2, dtype=torch.bfloat16)).tolist()
    [[16256, 16256], [16256, 16256]]
    """
    itemsize = tensor.dtype.itemsize
    if tensor.dtype not in _OF_NUMPY:
        tensor = tensor.view(_CARRIERS[itemsize])
    array: npt.NDArray[Any] = tensor.numpy()
    return array.view(CARRIERS[itemsize])


def flat_bytes(tensor: Tensor) -> memoryview | None:
    """The bytes of a tensor, if they are contiguous in host memory.

    >>> flat_bytes(torch.ones(2, dtype=torch.int16)).tolist(), flat_bytes(torch.ones(2, 2)[:, 0])
    ([1, 0, 1, 0], None)
    """
    if not is_plain(tensor) or not tensor.is_contiguous():
        return None
    return as_array(tensor).reshape(-1).view(np.uint8).data


class TensorTarget:
    """A tensor that stored elements are copied into where they have to be moved to its device, or converted."""

    def __init__(self, tensor: Tensor, stored: torch.dtype) -> None:
        self._tensor, self._stored = tensor, stored

    def __getitem__(self, place: Any) -> TensorTarget:
        return TensorTarget(self._tensor[place], self._stored)

    def __setitem__(self, place: Any, part: npt.NDArray[Any]) -> None:
        buffer = torch.empty(part.shape, dtype=self._stored, device="cpu")
        as_array(buffer)[...] = part
        self._tensor[place].copy_(buffer)


def copy_target(tensor: Tensor, stored: DType) -> CopyTarget:
    """Where stored elements go: the memory of the tensor itself, where it can hold them as they are."""
    dtype = torch_dtype(stored)
    return as_array(tensor) if tensor.dtype == dtype and is_plain(tensor) else TensorTarget(tensor, dtype)


_MAX_DIGITS = 1000
_PARAMS_PATH = re.compile(r"(?:^|\.)param_groups\.\d+\.params$")


@dataclass(frozen=True)
class FlatState:
    """The leaves of a state by name, and its tree as JSON."""

    tensors: dict[str, Tensor]
    values: dict[str, Scalar]
    tree: Json


def flatten_state(state: object) -> FlatState:
    """Take a state apart.

    >>> import torch
    >>> flat = flatten_state({"lr": 0.1, "w": torch.ones(2), "betas": (0.9, float("inf"))})
    >>> list(flat.tensors), list(flat.values)
    (['w'], ['lr', 'betas.0', 'betas.1'])
    >>> flat.tree["dict"][0], flat.tree["dict"][1], flat.tree["dict"][2]
    (['lr', 0.1], ['w', {'tensor': 'w'}], ['betas', {'tuple': [0.9, {'float': 'inf'}]}])
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Scalar] = {}

    def leaf(name: str, value: object) -> Json:
        if name in tensors or name in values:
            raise CheckpointError(f"two entries of the state are called {name!r}; rename one of them")
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        values[name] = _check_scalar(name, value)
        return _scalar_json(values[name])

    tree = _encode_node(state, (), leaf)
    return FlatState(tensors, values, tree)


def _encode_node(node: object, path: tuple[str, ...], leaf: Callable[[str, object], Json]) -> Json:
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"the state is nested deeper than {MAX_DEPTH} levels, or contains itself, at {path[0]!r}")
    if isinstance(node, Tensor):
        return leaf(".".join(path), node)
    if isinstance(node, Mapping):
        for key in node:
            if type(key) not in (str, int):
                raise CheckpointError(f"{'.'.join(path)}: keys are strings or ints, got the {type(key).__name__} {key}")
        return {"dict": [[key, _encode_node(value, (*path, str(key)), leaf)] for key, value in node.items()]}
    if isinstance(node, list | tuple):
        items = [_encode_node(value, (*path, str(i)), leaf) for i, value in enumerate(node)]
        return items if isinstance(node, list) else {"tuple": items}
    return leaf(".".join(path), node)


def _check_scalar(name: str, value: object) -> Scalar:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise CheckpointError(f"{name}: an int of more than {_MAX_DIGITS} digits cannot be stored")
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise CheckpointError(
        f"{name or 'the state'}: a checkpoint stores tensors, numbers, strings, bools and None in dicts, lists and "
        f"tuples; got {type(value).__name__}: {_advise_conversion(value)}"
    )


def _advise_conversion(value: object) -> str:
    """What to store in place of a value that cannot be."""
    if hasattr(value, "state_dict"):
        return "pass its state_dict()"
    return "pass torch.as_tensor(x)" if hasattr(value, "__array__") else "convert it"


def _scalar_json(value: Scalar) -> Json:
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def fill_state(node: Any, values: Mapping[str, Scalar], path: tuple[str, ...] = ()) -> Any:
    """Put values in place of those of the same name: dicts and lists are changed in place, tuples are rebuilt.

    Tuples with names, and enums that are numbers, stay of their classes.

    >>> fill_state({"a": 1, "b": (2, 3)}, {"a": 7, "b.1": 9})
    {'a': 7, 'b': (2, 9)}
    """
    if isinstance(node, Tensor):
        return node
    if isinstance(node, Mapping):
        for key, child in list(node.items()):
            new = fill_state(child, values, (*path, str(key)))
            if new is not child:
                node[key] = new  # type: ignore[index]  # a state that cannot be changed says so itself
        return node
    if isinstance(node, list | tuple):
        items = [fill_state(child, values, (*path, str(i))) for i, child in enumerate(node)]
        if isinstance(node, list):
            node[:] = items
            return node
        if all(a is b for a, b in zip(items, node, strict=True)):
            return node
        return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
    value = values.get(".".join(path), node)
    if isinstance(node, Enum):
        with suppress(ValueError):  # a number that has no name there stays a number
            return type(node)(value)
    return value


def reduced_layout(layout: Layout) -> Layout:
    """A layout without a pending reduction: the same one, or rows over the same ranks.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial
    >>> reduced_layout(MeshSpec(Mesh.of(x=2), (Partial("sum"),)).layout((4, 2))).local_shapes(0)
    ((2, 2),)
    """
    if layout.pending is None:
        return layout
    return ChunkSpec(0, layout.ranks).layout(layout.shape) if layout.ndim else single_rank_layout((), layout.ranks[0])


def reduce_pending(leaves: Sequence[Leaf], comm: Comm) -> dict[str, tuple[Tensor, ...]]:
    """Each leaf's local tensors in its settled layout; all ranks of those with a pending reduction take part."""
    held = {leaf.name: leaf.locals for leaf in leaves}
    pending = [leaf for leaf in leaves if leaf.layout.pending is not None]
    moved = redistribute_by_comm(
        [leaf_to_sharded(leaf, comm) for leaf in pending], [reduced_layout(e.layout) for e in pending]
    )
    return held | {leaf.name: tensor.local_parts for leaf, tensor in zip(pending, moved, strict=True)}


def redistribute_by_comm(tensors: Sequence[ShardedTensor], layouts: Sequence[Layout]) -> list[ShardedTensor]:
    """The tensors in other layouts; those that share a comm share its exchanges."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(id(tensor.comm), []).append(number)
    results: dict[int, ShardedTensor] = {}
    with torch.no_grad():
        for group in groups.values():
            moved = redistribute_many([tensors[i] for i in group], [layouts[i] for i in group])
            results |= dict(zip(group, moved, strict=True))
    return [results[i] for i in range(len(tensors))]


def leaf_to_sharded(leaf: Leaf, comm: Comm) -> ShardedTensor:
    """A leaf as a ShardedTensor over the ranks that take part in its moves."""
    if isinstance(leaf.tensor, ShardedTensor):
        return leaf.tensor
    members = comm if set(leaf.layout.ranks) == set(comm.ranks) else comm.subset(leaf.layout.ranks)
    return wrap(leaf.layout, leaf.locals, members, dtype=torch_dtype(leaf.dtype))


def gather_or_raise(comm: Comm, given: Json, problem: str | None, label: str, wanted: bool = True) -> list[Json]:
    """What every rank passes, in the order of ranks; if any has a problem, all raise a CheckpointError that names it.

    A rank that only wants to know of problems says so, and gets nothing else.
    """
    data = json.dumps(problem) if problem is not None else "null\n" + json.dumps(given, separators=(",", ":"))
    everyone = [text.partition(b"\n") for text in gather_raw(comm, data.encode(), label=label).values()]
    problems = [json.loads(one[0]) for one in everyone]
    raise_problems(comm, problems)
    return [json.loads(one[2]) for one in everyone] if wanted else []


def raise_problems(comm: Comm, problems: Sequence[str | None]) -> None:
    """Raise a CheckpointError that names the ranks that have a problem, if any has; all ranks know all problems."""
    found = [(rank, text) for rank, text in zip(comm.ranks, problems, strict=True) if text is not None]
    if found:
        same = len({text for _, text in found}) == 1 and len(found) == len(problems)
        raise CheckpointError(found[0][1] if same else "; ".join(f"rank {rank}: {text}" for rank, text in found[:4]))


@lru_cache(maxsize=4096)
def layout_text(layout: Layout) -> str:
    """A layout as JSON text, equal where layouts are written alike."""
    return json.dumps(layout_to_json(layout), separators=(",", ":"))


def describe_state(tree: Json, leaves: Sequence[Leaf]) -> Json:
    """What a rank reports to the others about its state; tensors of one layout refer to it by number."""
    numbers: dict[tuple[Layout, bool], int] = {}
    entries = {
        e.name: [e.dtype.torch_name, e.plain, numbers.setdefault((e.layout, e.plain), len(numbers))] for e in leaves
    }
    layouts = [json.dumps(layout.shape) if plain else layout_text(layout) for layout, plain in numbers]
    return {"tree": tree, "tensors": entries, "layouts": layouts}


def agree_on_state(
    comm: Comm, tree: Json, leaves: Sequence[Leaf], fields: Json, problem: str | None, label: str
) -> tuple[Json, list[TensorToSave], list[Json]]:
    """The tree and tensors of all ranks together, and every rank's `fields`; raises on all ranks if one cannot."""
    text = json.dumps(describe_state(tree, leaves), separators=(",", ":"))
    found = gather_or_raise(comm, [checksum(text.encode()), fields], problem, label)
    others = [one[1] for one in found]
    if len({one[0] for one in found}) == 1:
        return tree, [TensorToSave(e.name, e.dtype, e.layout) for e in leaves], others
    everyone = {rank: json.loads(each) for rank, each in gather_raw(comm, text.encode(), label=label).items()}
    return _merge_trees(everyone), _merge_tensors(everyone), others


def _merge_trees(everyone: Mapping[int, Json]) -> Json:
    (first, tree), *rest = [(rank, given["tree"]) for rank, given in everyone.items()]
    for rank, other in rest:
        tree = _merge_nodes(tree, other, "", (first, rank))
    return tree


def _merge_nodes(one: Json, other: Json, path: str, ranks: tuple[int, int]) -> Json:
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict) and "dict" in one and "dict" in other:
        ours, theirs = ({(type(k).__name__, k): v for k, v in node["dict"]} for node in (one, other))
        merged = {
            key: _merge_nodes(ours[key], theirs[key], f"{path}.{key[1]}" if path else str(key[1]), ranks)
            if key in ours and key in theirs
            else ours.get(key, theirs.get(key))
            for key in {**ours, **theirs}
        }
        return {"dict": [[key[1], value] for key, value in merged.items()]}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and path.endswith("param_groups"):
        return [_merge_nodes(a, b, f"{path}.{i}", ranks) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    if isinstance(one, list) and isinstance(other, list) and _PARAMS_PATH.search(path):
        return list(dict.fromkeys([*one, *other]))  # names of parameters, of which each rank has some
    raise CheckpointError(
        f"{path or 'the state'}: rank {ranks[0]} has {_shorten_json(one)} and rank {ranks[1]} has "
        f"{_shorten_json(other)}; "
        "save the same value on all ranks, or save per-rank values under names of their own"
    )


def _shorten_json(node: Json) -> str:
    text = json.dumps(node)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _merge_tensors(everyone: Mapping[int, Json]) -> list[TensorToSave]:
    holders: dict[str, dict[int, Json]] = {}
    for rank, given in everyone.items():
        for name, (dtype, plain, number) in given["tensors"].items():
            holders.setdefault(name, {})[rank] = [dtype, plain, given["layouts"][number]]
    return [_merge_tensor(name, by_rank) for name, by_rank in holders.items()]


def _merge_tensor(name: str, by_rank: Mapping[int, Json]) -> TensorToSave:
    (first, entry), *rest = by_rank.items()
    for rank, other in rest:
        if other != entry:
            raise CheckpointError(
                f"{name}: rank {first} has {entry[0]} {entry[2]} and rank {rank} has {other[0]} {other[2]}; a name "
                "refers to one tensor with one layout"
            )
    dtype, plain, text = entry
    if plain:
        return TensorToSave(name, find_dtype(dtype), replicated_layout(tuple(json.loads(text)), tuple(by_rank)))
    layout = layout_from_json(json.loads(text))
    missing = sorted(set(layout.ranks) - set(by_rank))
    if missing:
        raise CheckpointError(f"{name}: ranks {missing[:8]} have parts of it, but it is not in their states")
    return TensorToSave(name, find_dtype(dtype), layout)
