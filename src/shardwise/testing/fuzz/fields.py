"""How is each field of a template filled, given the first tensor and what was drawn before?"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from shardwise.testing.fuzz.draft import Draft, name_dtype
from shardwise.testing.fuzz.layouts import random_spec


class Picked:
    """What one statement has drawn so far."""

    def __init__(self, draft: Draft, name: str) -> None:
        self.draft, self.name = draft, name
        self.dim = 0
        self.start = 0
        self.count = 1
        self.index: tuple[int, ...] = ()
        # Often as many rows as the first tensor has: then one tensor can stand for both in an aliased round.
        self.width = self.shape[0] if self.x.ndim == 2 and draft.rng.random() < 0.4 else draft.rng.randint(1, 5)

    @property
    def x(self) -> Tensor:
        found: Tensor = self.draft.names[self.name]
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    @property
    def dtype(self) -> str:
        return name_dtype(self.x)

    @property
    def length(self) -> int:
        """The length of the dim that was drawn."""
        return self.shape[self.dim]

    def like(self, shape: tuple[int, ...]) -> str:
        """A tensor of this shape and the first one's dtype."""
        return self.draft.pick(shape, self.dtype)

    def indices(self, shape: tuple[int, ...], bound: int) -> str:
        """A tensor of indices from 0 to `bound` - 1."""
        return self.draft.pick(shape, "int64", f"index:{max(bound, 1)}")

    def among(self, low: int, high: int) -> int:
        """A number from `low` to `high`, which may be below `low`."""
        return self.draft.rng.randint(low, max(low, high))


def _first(p: Picked) -> str:
    return p.name


def _same(p: Picked) -> str:
    return p.like(p.shape)


def _broadcast(p: Picked) -> str:
    rng = p.draft.rng
    shape = p.shape
    if rng.random() < 0.4:
        shape = tuple(1 if rng.random() < 0.3 else n for n in shape)
        shape = shape[rng.randint(0, len(shape)) if rng.random() < 0.4 else 0 :]
    return p.like(shape)


def _dim(p: Picked) -> str:
    p.dim = p.draft.rng.randrange(p.x.ndim)
    return str(p.dim if p.draft.rng.random() < 0.7 else p.dim - p.x.ndim)


def _other_dim(p: Picked) -> str:
    return str(p.draft.rng.choice([d for d in range(p.x.ndim) if d != p.dim % p.x.ndim]))


def _place(p: Picked) -> str:
    return str(p.among(0, p.length - 1))


def _first_place(p: Picked) -> str:
    return str(p.among(0, p.shape[0] - 1))


def _start(p: Picked) -> str:
    p.start = p.among(0, p.length)
    return str(p.start)


def _length(p: Picked) -> str:
    return str(p.among(0 if p.draft.rng.random() < 0.2 else 1, p.length - p.start))


def _length_from_one(p: Picked) -> str:
    return str(p.among(1, p.length))


def _small(p: Picked) -> str:
    return str(p.draft.rng.choice((-2, -1, 0, 1, 2, 3)))


def _permutation(p: Picked) -> str:
    dims = list(range(p.x.ndim))
    p.draft.rng.shuffle(dims)
    return ", ".join(map(str, dims))


def _new_shape(p: Picked) -> str:
    """Neighbouring dims are joined, or one is cut in two."""
    rng, shape = p.draft.rng, list(p.shape)
    at = rng.randrange(len(shape))
    halves = [n for n in range(1, shape[at] + 1) if shape[at] % n == 0]
    if rng.random() < 0.4 and halves:
        one = rng.choice(halves)
        shape[at : at + 1] = [one, shape[at] // one]
    elif at + 1 < len(shape):
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        shape = [math.prod(shape)] if rng.random() < 0.5 else [-1, *shape[1:]]
    return ", ".join(map(str, shape))


def _mask(p: Picked) -> str:
    return p.draft.pick(p.shape, "bool")


def _index(p: Picked) -> str:
    p.index = (p.among(1, 5),)
    return p.indices(p.index, p.length)


def _single(p: Picked) -> str:
    p.index = (1,)
    return p.indices(p.index, p.length)


def _index_of_first(p: Picked) -> str:
    shape = (p.among(1, 4),) if p.draft.rng.random() < 0.7 else (2, 2)
    return p.indices(shape, p.shape[0])


def _index_of_second(p: Picked) -> str:
    return p.indices((p.among(1, 4),), p.shape[1])


def _beside_index(p: Picked) -> str:
    """What is written at the indices: the first tensor's shape, as long as the indices in the dim."""
    dim = p.dim % p.x.ndim
    return p.like((*p.shape[:dim], p.index[0], *p.shape[dim + 1 :]))


def _scatter(p: Picked) -> str:
    dim = p.dim % p.x.ndim
    p.index = tuple(p.among(1, 4) if d == dim else n for d, n in enumerate(p.shape))
    return p.indices(p.index, p.length)


def _beside_scatter(p: Picked) -> str:
    return p.like(p.index)


def _factor(p: Picked) -> str:
    batch = p.shape[:-2] if p.x.ndim == 3 or p.draft.rng.random() < 0.5 else ()
    return p.like((*batch, p.shape[-1], p.width))


def _weight(p: Picked) -> str:
    return p.like((p.width, p.shape[-1]))


def _bias(p: Picked) -> str:
    return p.like((p.width,))


def _row(p: Picked) -> str:
    """A vector: as long as the last dim, or as the product's last dim where a factor was drawn."""
    return p.like(p.shape[-1:])


def _table(p: Picked) -> str:
    return p.draft.pick((3, p.among(1, 4)), "float64")


def _labels(p: Picked) -> str:
    return p.indices(p.shape[:1], p.shape[1])


def _kernel(p: Picked) -> str:
    return p.like((p.width, p.shape[1], 3))


def _spec(p: Picked) -> str:
    return repr(random_spec(p.draft.rng, p.draft.world, p.shape, p.dtype, pending=False))


FIELDS: dict[str, Callable[[Picked], str]] = {
    "x": _first,
    "y": _same,
    "z": _same,
    "b": _broadcast,
    "d": _dim,
    "e": _other_dim,
    "k": _place,
    "k0": _first_place,
    "start": _start,
    "length": _length,
    "length1": _length_from_one,
    "n": _small,
    "perm": _permutation,
    "shape": _new_shape,
    "mask": _mask,
    "index": _index,
    "single": _single,
    "index0": _index_of_first,
    "index1": _index_of_second,
    "xindex": _beside_index,
    "xsingle": _beside_index,
    "scatter": _scatter,
    "xscatter": _beside_scatter,
    "m": _factor,
    "w": _weight,
    "bias": _bias,
    "row": _row,
    "table": _table,
    "labels": _labels,
    "kernel": _kernel,
    "spec": _spec,
}
