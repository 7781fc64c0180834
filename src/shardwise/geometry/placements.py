"""What does one mesh axis do to a tensor? It shards a dim, replicates, or leaves a reduction pending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.geometry.errors import LayoutError, whole_numbers

REDUCE_OPS = ("sum", "avg", "min", "max", "product")


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis splits dim `dim`: as `torch.chunk` does, or by the given rule.

    - `sizes`: the length each rank of the axis gets; zeros are fine.
    - `groups`: the dim is a concatenation of groups of these lengths (a fused QKV weight), each split on its own.
    - `block`: blocks of this length are dealt to the ranks in turn (block-cyclic).

    >>> Shard(0), Shard(-1, sizes=(3, 0, 5, 1)), Shard(0, groups=(8, 4, 4)), Shard(0, block=2)
    (Shard(0), Shard(-1, sizes=(3, 0, 5, 1)), Shard(0, groups=(8, 4, 4)), Shard(0, block=2))
    """

    dim: int
    sizes: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("sizes", "groups", "block") if getattr(self, n) is not None]
        if len(given) > 1:
            raise LayoutError(f"Shard({self.dim}) takes one of sizes, groups and block, got {' and '.join(given)}")
        for name in ("sizes", "groups"):
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, whole_numbers(value, f"Shard({self.dim}, {name}=...)"))
            if any(v < 0 for v in value):
                raise LayoutError(f"Shard({self.dim}, {name}={tuple(value)}): lengths are 0 or more")
        if self.block is not None and self.block < 1:
            raise LayoutError(f"Shard({self.dim}, block={self.block}): a block has at least one row")

    def __repr__(self) -> str:
        rule = "".join(
            f", {n}={getattr(self, n)}" for n in ("sizes", "groups", "block") if getattr(self, n) is not None
        )
        return f"Shard({self.dim}{rule})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis holds an addend; the value is their reduction, still to be done.

    >>> Partial(), Partial("max")
    (Partial('sum'), Partial('max'))
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise LayoutError(f"Partial({self.op!r}): the reduction is one of {', '.join(REDUCE_OPS)}")

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


Placement: TypeAlias = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class Reduction:
    """A pending reduction in its plainest form: an average is a sum with a divisor.

    >>> str(Reduction("sum", divisor=4))
    'sum / 4'
    """

    op: str
    divisor: int = 1

    def __str__(self) -> str:
        return self.op if self.divisor == 1 else f"{self.op} / {self.divisor}"


def pending_reduction(placements: Sequence[Placement], axis_sizes: Sequence[int]) -> Reduction | None:
    """The one reduction that several `Partial` axes leave pending together, or None.

    >>> pending_reduction((Partial("avg"), Partial("sum")), (4, 2))
    Reduction(op='sum', divisor=4)
    """
    pending = [(p.op, n) for p, n in zip(placements, axis_sizes, strict=True) if isinstance(p, Partial) and n > 1]
    ops = {"sum" if op == "avg" else op for op, _ in pending}
    if not ops:
        return None
    if len(ops) > 1:
        raise LayoutError(
            f"axes with pending {' and '.join(sorted(ops))} have no defined order of reduction; "
            "use one kind of Partial, or redistribute one axis first"
        )
    divisor = 1
    for op, size in pending:
        divisor *= size if op == "avg" else 1
    return Reduction(ops.pop(), divisor)


def resolve_dim(dim: int, shape: Sequence[int], what: str) -> int:
    """A dim counted from the end, resolved against the shape.

    >>> resolve_dim(-1, (4, 6), "Shard(-1)")
    1
    """
    ndim = len(shape)
    if not -ndim <= dim < ndim:
        fits = f"a dim from {-ndim} to {ndim - 1}" if ndim else "no dim: a 0-dim tensor can only be replicated"
        raise LayoutError(f"{what}: a tensor of shape {tuple(shape)} has {fits}")
    return dim % ndim
