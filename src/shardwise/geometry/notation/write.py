"""How is a layout printed in one line? The inverse of `notation`, which explains the grammar."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.dtypes import find_dtype
from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import format_ranks
from shardwise.geometry.placements import Partial, Placement, Replicate, Shard
from shardwise.geometry.specs import ChunkSpec, GridSpec, MeshSpec


def format_layout(layout: Layout, dtype: str | None = "f32") -> str:
    """Write a layout in the notation; a spec of a user's own class is written as its pieces. None leaves out the dtype.

    >>> from shardwise.geometry.mesh import Mesh
    >>> spec = MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(0)), order=("tp", "dp"))
    >>> format_layout(spec.layout((8, 4)), "bf16")
    'bf16[8,4] on dp=2,tp=2: S(0), S(0) split tp>dp'
    """
    name = "" if dtype is None else find_dtype(dtype).name
    return f"{name}[{_join_numbers(layout.shape)}] {format_rule(layout)}".rstrip()


def format_placement(placement: Placement) -> str:
    """Write one placement.

    >>> format_placement(Shard(0, groups=(8, 4, 4))), format_placement(Partial("max")), format_placement(Replicate())
    ('S(0) groups(8,4,4)', 'P(max)', 'R')
    """
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return f"P({placement.op})"
    rule = [
        f" {name}({_join_numbers(v)})" for name in ("sizes", "groups") if (v := getattr(placement, name)) is not None
    ]
    rule += [f" block({placement.block})"] if placement.block is not None else []
    rule += [f" owners({_join_numbers(placement.owners.ranks.tolist())})"] if placement.owners is not None else []
    return f"S({placement.dim}){''.join(rule)}"


def _join_numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def format_rule(layout: Layout) -> str:
    """Write how a layout splits a tensor, without the tensor's type; nothing where all of it is on rank 0.

    >>> format_rule(ChunkSpec(0, ranks=4).layout((8, 2)))
    'as chunk(0) over 0-3'
    """
    spec = _find_built_in_spec(layout)
    if isinstance(spec, MeshSpec):
        return _format_mesh_rule(spec, layout.shape)
    if isinstance(spec, ChunkSpec):
        return f"as chunk({spec.dim}) over {format_ranks(spec.ranks)}"
    if isinstance(spec, GridSpec):
        cuts = [f"/{s}" if isinstance(s, int) else "+".join(map(str, s)) for s in spec.splits]
        each = f" each {spec.ranks.shape[-1]}" if spec.ranks.shape[-1] > 1 else ""
        return f"as grid({', '.join(cuts)}) over {format_ranks(spec.ranks.reshape(-1).tolist())}{each}"
    if layout.pending is not None:
        raise LayoutError(
            f"{layout.spec!r} leaves a {layout.pending} pending, which a list of pieces cannot express; lay it out "
            "with a MeshSpec to write it in the notation"
        )
    return f"as pieces {_format_pieces(layout.pieces)}"


LONGEST, MOST_PIECES = 160, 64


def shorten_layout(layout: Layout, dtype: str | None = None) -> str:
    """Write a layout for a table or a message: in the notation, cut off where that is long, else by its spec.

    >>> from shardwise.geometry.mesh import Mesh
    >>> shorten_layout(MeshSpec(Mesh.of(tp=2), (Shard(0),)).layout((8, 4)), "bf16")
    'bf16[8,4] on tp=2: S(0)'
    """
    name = "" if dtype is None else find_dtype(dtype).name
    built_in = type(layout.spec) in (MeshSpec, ChunkSpec, GridSpec) or len(layout.table) <= MOST_PIECES
    try:
        text = format_layout(layout, None) if built_in else f"[{_join_numbers(layout.shape)}] {layout.spec!r}"
    except LayoutError:
        text = f"[{_join_numbers(layout.shape)}] {layout.spec!r}"
    return name + (text if len(text) <= LONGEST else f"{text[:LONGEST]}…")


def _find_built_in_spec(layout: Layout) -> ShardingSpec | None:
    """The mesh, chunk or grid spec that means the layout, if its spec is one; a user's subclass may mean another."""
    spec = layout.spec
    if type(spec) in (MeshSpec, ChunkSpec, GridSpec):
        return spec
    same: ShardingSpec | None = None
    if isinstance(spec, MeshSpec):
        same = MeshSpec(spec.mesh, spec.placements, spec.order)
    elif isinstance(spec, ChunkSpec):
        same = ChunkSpec(spec.dim, spec.ranks)
    elif isinstance(spec, GridSpec):
        same = GridSpec(spec.splits, spec.ranks)
    return same if same is not None and same.layout(layout.shape) == layout else None


def _format_mesh_rule(spec: MeshSpec, shape: tuple[int, ...]) -> str:
    if spec.mesh.ndim == 0:
        return "" if spec.mesh.is_contiguous else f"@ {int(spec.mesh.ranks)}"
    order = ">".join(_unusual_order(spec.resolved(shape)))
    split = f" split {order}" if order else ""
    return f"on {spec.mesh}: {', '.join(map(format_placement, spec.placements))}{split}"


def _unusual_order(spec: MeshSpec) -> list[str]:
    """The axes, outermost first, of every dim that is not split in mesh order."""
    by_dim: dict[int, list[str]] = {}
    for axis in spec.order:
        if isinstance(placement := spec.placements[spec.mesh.axis_index(axis)], Shard):
            by_dim.setdefault(placement.dim, []).append(axis)
    return [a for axes in by_dim.values() if axes != sorted(axes, key=spec.mesh.axis_index) for a in axes]


def _format_pieces(pieces: Sequence[Piece]) -> str:
    """Pieces in their order; neighbours with the same box are written once, with all their ranks."""
    runs: list[tuple[Box, list[int]]] = []
    for piece in pieces:
        if runs and runs[-1][0] == piece.box:
            runs[-1][1].append(piece.rank)
        else:
            runs.append((piece.box, [piece.rank]))
    return ", ".join(f"{format_ranks(ranks)}{str(box).replace(' ', '')}" for box, ranks in runs) or "none"
