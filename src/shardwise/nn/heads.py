"""Which rows of a layer belong to one head of attention, and how is it cut so that every rank has whole heads?

1. Heads are known where the module that has a projection, or the projection itself, has a `head_dim` or a number of
   heads under one of the usual names: in the inputs of layers that are named as the last of attention, in the outputs
   of the others.
2. A plan says `S(0)`. Where this cuts a head apart, all projections of the attention are cut by heads instead: whole
   heads in chunks, of queries those that read the same keys together. Fewer heads of keys than ranks are on several
   ranks each (`each`), and queries follow them, in uneven parts if need be.
3. A plan that names sizes or blocks means them: one that cuts a head apart is an error with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from shardwise.geometry import LayoutError, MeshSpec, Placement, Replicate, Shard
from shardwise.geometry.placements import chunk_sizes, split_part

OUT_PROJECTIONS = ("out_proj", "o_proj", "c_proj", "out_lin", "dense", "wo", "to_out", "proj", "output", "out")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
WIDTHS = ("embed_dim", "hidden_size", "d_model", "n_embd")


def is_linear(part: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: nn.Linear, or the transposed one of GPT-2, named Conv1D there."""
    return isinstance(part, nn.Linear) or (type(part).__name__ == "Conv1D" and hasattr(part, "nf"))


@dataclass(frozen=True)
class Projection:
    """A parameter with heads along a dim, each of `length` rows; `ends`: its layer reads heads, and makes none.

    `attention` is the module that says how long a head is.
    """

    name: str
    dim: int
    size: int
    length: int
    ends: bool
    attention: str

    def is_cut_apart(self, shard: Shard, ranks: int) -> bool:
        """Whether a part begins or ends inside a head.

        >>> Projection("k_proj.weight", 0, 8, 4, False, "").is_cut_apart(Shard(0), 4)
        True
        """
        parts = split_part(((0, self.size),), shard, ranks, "")
        return any(row % self.length for part in parts for run in part for row in run)


def find_projections(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> list[Projection]:
    """The parameters of a model with heads of attention.

    >>> attention = nn.MultiheadAttention(6, 3)
    >>> [(p.name, p.dim, p.length) for p in find_projections(attention, attention.named_parameters())][2:]
    [('out_proj.weight', 1, 2)]
    """
    parts, found = dict(module.named_modules()), []
    for name, tensor in tensors:
        path = name.rpartition(".")[0]
        lengths = {p: find_head_length(parts[p]) for p in (path, path.rpartition(".")[0])}
        attention = next((p for p, length in lengths.items() if length), None)
        linear = is_linear(parts[path])
        ends = linear and path.rpartition(".")[2] in OUT_PROJECTIONS
        if attention is None or not tensor.ndim or (ends and tensor.ndim < 2):
            continue
        dim = int(ends == isinstance(parts[path], nn.Linear)) if linear and tensor.ndim == 2 else 0
        size, length = int(tensor.shape[dim]), lengths[attention]
        if size % length == 0 and (size != length or linear):
            found.append(Projection(name, dim, size, length, ends, attention))
    return found


def find_head_length(part: nn.Module) -> int:
    """The length of a head in a module of attention, 0 in another."""
    for name in ("head_dim", "head_size", "attention_head_size", "dim_head"):
        if isinstance(length := getattr(part, name, None), int):
            return length
    count = next((n for name in HEAD_COUNTS if isinstance(n := getattr(part, name, None), int) and n > 0), 0)
    width = next((n for name in WIDTHS if isinstance(n := getattr(part, name, None), int)), 0)
    if not width:  # the queries' width: the largest of the layers that multiply the same inputs
        layers = [layer for layer in part.children() if isinstance(layer, nn.Linear)]
        width = max((layer.in_features for layer in layers), default=0)
    return width // count if count and width % count == 0 else 0


def deal_heads(found: Mapping[str, tuple[Projection, Shard]], ranks: int) -> dict[str, Shard]:
    """How the projections of one attention are cut over some ranks so that none cuts a head apart.

    >>> def rows(heads): return Projection("", 0, 64 * heads, 64, False, ""), Shard(0)
    >>> deal_heads({"q": rows(14), "k": rows(2)}, 4)
    {'q': Shard(0, sizes=(256, 192, 256, 192), unit=64), 'k': Shard(0, unit=64, each=(2,))}
    >>> deal_heads({"q": rows(12), "k": rows(3)}, 2)
    {'q': Shard(0, unit=256), 'k': Shard(0, unit=64)}
    """
    heads = {name: _count_heads(projection, shard) for name, (projection, shard) in found.items()}
    most = max(max(counts) for counts in heads.values())
    keys = min(min(counts) for name, counts in heads.items() if not found[name][0].ends or len(heads) == 1)
    group = most // keys if most % keys == 0 else 1
    shared = ranks // keys if keys < min(ranks, most) and ranks % keys == 0 and most % keys == 0 else 1
    made = {}
    for name, (projection, shard) in found.items():
        length, counts = projection.length, heads[name]
        if not shard.is_plain and shard.groups is None:
            made[name] = replace(shard, unit=length) if shard.each is None and shard.unit is None else shard
        elif shard.groups is not None:
            follows = shared > 1 and most % ranks == 0
            each = tuple(shared if follows and n == keys else 1 for n in counts)
            made[name] = replace(shard, unit=length, each=each) if shard.each is None else shard
        elif shared > 1 and counts == [keys] and not projection.ends:
            made[name] = replace(shard, unit=length, each=(shared,))
        elif shared > 1:
            sizes = tuple(n * length for _ in range(keys) for n in chunk_sizes(group, shared))
            made[name] = shard if most % ranks == 0 else replace(shard, sizes=sizes, unit=length)
        else:
            made[name] = replace(shard, unit=length * (group if counts == [most] and keys >= ranks else 1))
    return made


def _count_heads(projection: Projection, shard: Shard) -> list[int]:
    """The heads of each group that a projection has; fused ones that are not whole heads count as one group."""
    lengths = shard.groups or (projection.size,)
    if any(n % projection.length for n in lengths):
        lengths = (projection.size,)
    return [n // projection.length for n in lengths]


def keep_heads(
    module: nn.Module, specs: Mapping[str, MeshSpec], batch: Sequence[Placement], problems: list[str]
) -> dict[str, MeshSpec]:
    """The specs of a plan that cut heads apart, with cuts by heads; `problems` gets what the plan says otherwise.

    Along axes that split the batch as well parameters are gathered before they are used, and may be cut anywhere.
    """
    parts, made = dict(module.named_modules()), dict[str, MeshSpec]()
    together: dict[str, list[Projection]] = {}
    for projection in find_projections(module, module.named_parameters()):
        if projection.name in specs and is_linear(parts[projection.name.rpartition(".")[0]]):
            together.setdefault(projection.attention, []).append(projection)
    for projections in together.values():
        for axis, given in enumerate(batch):
            if isinstance(given, Replicate):
                made |= _keep_along(axis, projections, {**specs, **made}, problems)
    return made


def _keep_along(
    axis: int, projections: Sequence[Projection], specs: Mapping[str, MeshSpec], problems: list[str]
) -> dict[str, MeshSpec]:
    """The projections of one attention along an axis that alone splits their heads."""
    found, cut = dict[str, tuple[Projection, Shard]](), False
    for one in projections:
        spec = specs[one.name]
        placement = spec.placements[axis]
        others = [p for a, p in enumerate(spec.placements) if a != axis and isinstance(p, Shard) and p.dim == one.dim]
        if isinstance(placement, Shard) and placement.dim == one.dim and not others:
            found[one.name] = one, placement
            cut = cut or one.is_cut_apart(placement, spec.mesh.shape[axis])
    ranks = specs[projections[0].name].mesh.shape[axis]
    if not cut or all(one.size // one.length < ranks for one, _ in found.values()):
        return {}  # of fewer heads than ranks each would be cut, or ranks have none: `describe_plan` says so
    made: dict[str, MeshSpec] = {}
    try:
        dealt = deal_heads(found, ranks)
    except LayoutError as error:
        names = ", ".join(name for name, (one, shard) in found.items() if one.is_cut_apart(shard, ranks))
        problems.append(f"{names}, of which a head has {next(iter(found.values()))[0].length} rows: {error}")
        return {}
    for name, shard in dealt.items():
        one, before = found[name]
        parts = (split_part(((0, one.size),), each, ranks, "") for each in (before, shard))
        if next(parts) != next(parts):
            spec = specs[name]
            made[name] = MeshSpec(
                spec.mesh, [shard if a == axis else p for a, p in enumerate(spec.placements)], spec.order
            )
    return made
