"""Do all ranks save the same state? What each rank has, compared by one digest and merged where it differs.

1. Every rank describes its state: the tree, and for each tensor dtype and layout. Equal digests: done.
2. Else (pipeline stages, say) the descriptions are exchanged. Trees are merged; an entry that several ranks have is
   the same on all of them. A plain tensor counts as copied on the ranks that have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from shardwise.checkpoint.assign import TensorToSave
from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Json
from shardwise.checkpoint.state import Leaf
from shardwise.comm import Comm
from shardwise.geometry import Layout, find_dtype, layout_from_json, layout_to_json
from shardwise.tensor.move import replicated_layout


def gather_or_raise(comm: Comm, given: Json, problem: str | None, label: str, wanted: bool = True) -> list[Json]:
    """What every rank passes, in the order of ranks; if any has a problem, all raise a CheckpointError that names it.

    A rank that only wants to know of problems says so, and gets nothing else.
    """
    data = json.dumps(problem) if problem is not None else "null\n" + json.dumps(given, separators=(",", ":"))
    everyone = [text.partition(b"\n") for text in comm.all_gather_bytes(data.encode(), label=label)]
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
    texts = comm.all_gather_bytes(text.encode(), label=label)
    everyone = dict(zip(comm.ranks, map(json.loads, texts), strict=True))
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
