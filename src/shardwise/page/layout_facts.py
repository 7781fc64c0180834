"""What does the page need to draw a layout? Cuts along each dim and owners of the cells, or a list of boxes.

1. A regular layout is sent as its product form: a tensor over 16,384 ranks is two lists of cuts and one of owners.
2. If the cells are too many, neighbours along the dim with most cells are merged until they are not; the first one
   stands for all of them, and the facts say how many were merged.
3. An irregular layout is sent as its boxes, the first so many.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard, TensorType
from shardwise.geometry.cells import Cells
from shardwise.geometry.mesh import IntArray

MOST_OWNERS = 1 << 17
MOST_BOXES = 8192
LONGEST_TITLE = 240


def layout_facts(tensor: TensorType, ranks_per_host: int = 8) -> dict[str, Any]:
    """All that the page shows of a tensor and its layout, as plain data.

    >>> from shardwise.geometry import parse_layout
    >>> facts = layout_facts(parse_layout("f32[8,6] on dp=2,tp=2: S(0), R"))
    >>> facts["regular"]["owners"], facts["axes"][1]["words"]
    ([0, 1, 2, 3], 'has replicas')
    """
    layout = tensor.layout
    notation = str(tensor)
    return {
        "kind": "layout",
        "title": shorten(notation),
        "notation": notation,
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "bytes": layout.numel * tensor.itemsize,
        "ranks_per_host": ranks_per_host,
        **shape_facts(layout),
        "ranks": rank_facts(layout),
    }


def shorten(text: str, longest: int = LONGEST_TITLE) -> str:
    """A title that stays readable."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def shape_facts(layout: Layout) -> dict[str, Any]:
    """Who holds what, without element types and bytes."""
    regular = None if layout.cells is None else _cell_facts(layout.cells)
    return {
        "shape": list(layout.shape),
        "pending": None if layout.pending is None else str(layout.pending),
        "axes": _axis_facts(layout),
        "mesh_ranks": _mesh_ranks(layout),
        "groups": _group_facts(layout),
        "regular": regular,
        "boxes": _box_facts(layout) if regular is None else None,
    }


def rank_facts(layout: Layout) -> dict[str, Any]:
    """The elements that each rank holds; `numbers` is None if the ranks are 0, 1, 2..."""
    elements = layout.elements_per_rank()
    numbers = list(elements)
    return {
        "count": len(numbers),
        "numbers": None if numbers == list(range(len(numbers))) else numbers,
        "elements": list(elements.values()),
    }


def _axis_facts(layout: Layout) -> list[dict[str, Any]]:
    spec = layout.spec
    if not isinstance(spec, MeshSpec):
        return []
    placed = zip(spec.mesh.axes, spec.mesh.shape, spec.placements, strict=True)
    return [{"name": name, "size": size, "words": _words(placement, layout.ndim)} for name, size, placement in placed]


def _words(placement: Placement, ndim: int) -> str:
    """What an axis does, in words."""
    if isinstance(placement, Replicate):
        return "has replicas"
    if isinstance(placement, Partial):
        return f"has addends of a pending {placement.op}"
    assert isinstance(placement, Shard)
    text = f"splits dim {placement.dim % max(1, ndim)}"
    if placement.sizes is not None:
        return f"{text} in given sizes"
    if placement.groups is not None:
        return f"{text}, each of {len(placement.groups)} groups on its own"
    if placement.block is not None:
        return f"{text} in turns of {placement.block}"
    return f"{text} by the owners of its rows" if placement.owners is not None else text


def _mesh_ranks(layout: Layout) -> list[int] | None:
    """The ranks of the mesh in row-major order; None: 0, 1, 2..., or no mesh."""
    spec = layout.spec
    if not isinstance(spec, MeshSpec) or spec.mesh.is_contiguous:
        return None
    ranks: list[int] = spec.mesh.ranks.reshape(-1).tolist()
    return ranks


def _group_facts(layout: Layout) -> list[dict[str, Any]]:
    """The dims that are fused from groups, and the lengths of these."""
    placements = layout.spec.placements if isinstance(layout.spec, MeshSpec) else ()
    fused = [p for p in placements if isinstance(p, Shard) and p.groups is not None]
    return [{"dim": p.dim % layout.ndim, "lengths": list(p.groups or ())} for p in fused]


def _cell_facts(cells: Cells) -> dict[str, Any]:
    copies = cells.addends * cells.replicas
    shown = min(copies, MOST_OWNERS)
    counts = [dim.count for dim in cells.dims]
    steps = _merge_steps(counts, MOST_OWNERS // shown)
    taken = tuple(slice(None, None, step) for step in steps)
    owners = cells.owners[taken].reshape(-1, cells.addends, cells.replicas)
    cuts = []
    for dim, step in zip(cells.dims, steps, strict=True):
        first = np.arange(0, dim.count, step)
        last = np.minimum(first + step, dim.count) - 1
        ends = (dim.starts + dim.lengths)[last]
        cuts.append({"starts": dim.starts[first].tolist(), "ends": ends.tolist()})
    return {
        "cuts": cuts,
        "owners": owners.reshape(-1)[: MOST_OWNERS * 2].tolist(),
        "addends": cells.addends,
        "replicas": cells.replicas,
        "merged": steps,
    }


def _merge_steps(counts: list[int], most: int) -> list[int]:
    """How many neighbours are merged along each dim so that at most so many cells remain."""
    steps = [1] * len(counts)

    def left() -> list[int]:
        return [-(-count // step) for count, step in zip(counts, steps, strict=True)]

    while int(np.prod(left(), dtype=np.int64)) > max(1, most):
        steps[int(np.argmax(left()))] *= 2
    return steps


def _box_facts(layout: Layout) -> dict[str, Any]:
    """The distinct boxes and their holders: for each addend, the ranks."""
    table = layout.table
    boxes, first = np.unique(table.cells, return_index=True)
    first = first[(table.sizes[first] > 0).all(axis=1)]
    shown = first[:MOST_BOXES]
    holders = _holders(table.cells, table.addends, table.ranks)
    return {
        "starts": table.offsets[shown].tolist(),
        "ends": (table.offsets + table.sizes)[shown].tolist(),
        "holders": [holders[cell] for cell in table.cells[shown].tolist()],
        "hidden": len(first) - len(shown),
        "empty": len(boxes) - len(first),
    }


def _holders(cells: IntArray, addends: IntArray, ranks: IntArray) -> dict[int, list[list[int]]]:
    found: dict[int, dict[int, list[int]]] = {}
    for cell, addend, rank in zip(cells.tolist(), addends.tolist(), ranks.tolist(), strict=True):
        found.setdefault(cell, {}).setdefault(addend, []).append(rank)
    return {cell: [sorted(ranks) for _, ranks in sorted(by.items())] for cell, by in found.items()}
