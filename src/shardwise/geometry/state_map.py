"""Which elements of which source tensors is a destination tensor made of? `StateMap` answers for a whole state.

1. A term says where the elements of one box of a destination tensor come from. Along each dim of the source the index
   is `start + step * (index in the box along one dim of the destination)`, or `start` alone. So slices, transposes,
   interleaved parts and broadcasts are all one affine map for each dim; padding is a term without a source.
2. The terms of a tensor tile it: no element is missing and none is written twice.
3. Maps are values. `rename`, `split`, `fuse`, `stack`, `transpose`, `pad`, `cast` give the map that goes one step
   further; `then` composes two maps by cutting the terms of one where terms of the other meet.
4. A strided view of a tensor that is stored row by row is the same thing in another form: `terms_of_view` decodes it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.geometry.box import Box, LayoutError, to_int_tuple
from shardwise.geometry.layout import check_coverage, check_shape
from shardwise.geometry.notation import find_dtype

MAX_TERMS = 1_000_000
MAX_MAP_BYTES = 64 << 20
_FORMAT = "shardwise.state_map/1"
_SHOWN_TERMS = 200


@dataclass(frozen=True, slots=True)
class MapTerm:
    """Where the elements of one box of a destination tensor come from.

    `axes[d]` is the dim of the destination that runs along dim d of the source, or -1: it stays at `starts[d]`.

    >>> print(MapTerm(Box((4, 0), (2, 3)), "k", (0, 8), (1, 1), (1, 0)))
    [4:6, 0:3] = k[0:3, 8:10] transposed (1, 0)
    """

    box: Box
    source: str | None
    starts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    fill: float = 0.0

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many indices the term uses along each dim of the source."""
        return tuple(1 if axis < 0 else self.box.sizes[axis] for axis in self.axes)

    @property
    def index(self) -> tuple[slice | int, ...]:
        """What cuts the term out of the source; the dims that are left are those of `order`, in the source's order."""
        return tuple(
            start if axis < 0 else slice(start, start + step * (self.box.sizes[axis] - 1) + 1, step)
            for start, step, axis in zip(self.starts, self.steps, self.axes, strict=True)
        )

    @property
    def order(self) -> tuple[int, ...]:
        """How the dims that `index` leaves are permuted to come in the order of the destination."""
        kept = [axis for axis in self.axes if axis >= 0]
        return tuple(sorted(range(len(kept)), key=kept.__getitem__))

    @property
    def widen(self) -> tuple[slice | None, ...]:
        """The index that adds a dim of length 1 for each dim of the destination along which the term repeats."""
        return tuple(slice(None) if dim in self.axes else None for dim in range(self.box.ndim))

    def cut(self, box: Box) -> MapTerm:
        """The part of the term in a box of the destination, which is within that of the term."""
        starts = tuple(
            start if axis < 0 else start + step * (box.offsets[axis] - self.box.offsets[axis])
            for start, step, axis in zip(self.starts, self.steps, self.axes, strict=True)
        )
        return replace(self, box=box, starts=starts)

    def __str__(self) -> str:
        if self.source is None:
            return f"{self.box} = {self.fill:g}"
        parts = [
            f"{start}"
            if axis < 0
            else f"{start}:{start + step * (self.box.sizes[axis] - 1) + 1}" + (f":{step}" if step != 1 else "")
            for start, step, axis in zip(self.starts, self.steps, self.axes, strict=True)
        ]
        order = self.order
        turned = f" transposed {order}" if order != tuple(range(len(order))) else ""
        return f"{self.box} = {self.source}[{', '.join(parts)}]{turned}"


SCALE_RULES = ("amax", "amax_pow2")


@dataclass(frozen=True, slots=True)
class BlockScale:
    """How values become fp8: the tensor that gets a scale for each block, the block, and how a scale is chosen.

    A scale is the largest absolute value of its block over the largest of the type, rounded up to a power of two with
    "amax_pow2"; the values are the codes times the scale.
    """

    name: str
    block: tuple[int, ...]
    rule: str = "amax"

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a tensor.

        >>> BlockScale("w_scale", (128, 128)).shape((300, 256))
        (3, 2)
        """
        return tuple(-(-length // size) for length, size in zip(shape, self.block, strict=True))

    def to_json(self) -> list[Any]:
        return [self.name, list(self.block), self.rule]


@dataclass(frozen=True)
class MappedTensor:
    """A destination tensor: shape, element type, and the terms that tile it.

    With `scale` the terms say which values are quantized; `dtype` is that of the codes.
    """

    shape: tuple[int, ...]
    dtype: str
    terms: tuple[MapTerm, ...]
    scale: BlockScale | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * find_dtype(self.dtype).itemsize

    def narrow(self, dim: int, start: int, length: int) -> MappedTensor:
        """The indices `start` to `start + length` of one dim."""
        kept = Box(_at(dim, start, (0,) * len(self.shape)), _at(dim, length, self.shape))
        back = tuple(-o for o in kept.offsets)
        met = ((term, term.box.intersect(kept)) for term in self.terms)
        terms = tuple(_shift(term.cut(box), back) for term, box in met if box is not None)
        return MappedTensor(kept.sizes, self.dtype, terms)

    def permute(self, dims: Sequence[int]) -> MappedTensor:
        """The dims in another order, as `torch.permute` does."""
        place = {old: new for new, old in enumerate(dims)}

        def moved(term: MapTerm) -> MapTerm:
            box = Box(tuple(term.box.offsets[d] for d in dims), tuple(term.box.sizes[d] for d in dims))
            return replace(term, box=box, axes=tuple(place.get(axis, -1) for axis in term.axes))

        return MappedTensor(tuple(self.shape[d] for d in dims), self.dtype, tuple(map(moved, self.terms)))

    def insert_dim(self, dim: int) -> MappedTensor:
        """A dim of length 1 in front of a dim, as `torch.unsqueeze` does."""

        def moved(term: MapTerm) -> MapTerm:
            o, s = term.box.offsets, term.box.sizes
            box = Box((*o[:dim], 0, *o[dim:]), (*s[:dim], 1, *s[dim:]))
            return replace(term, box=box, axes=tuple(axis + (axis >= dim) for axis in term.axes))

        return MappedTensor((*self.shape[:dim], 1, *self.shape[dim:]), self.dtype, tuple(map(moved, self.terms)))

    def select(self, dim: int, index: int) -> MappedTensor:
        """One index of a dim, without the dim, as `torch.select` does."""
        one = self.narrow(dim, index, 1)

        def moved(term: MapTerm) -> MapTerm:
            o, s = term.box.offsets, term.box.sizes
            box = Box((*o[:dim], *o[dim + 1 :]), (*s[:dim], *s[dim + 1 :]))
            return replace(term, box=box, axes=tuple(-1 if a == dim else a - (a > dim) for a in term.axes))

        return MappedTensor((*one.shape[:dim], *one.shape[dim + 1 :]), self.dtype, tuple(map(moved, one.terms)))

    def pad(self, dim: int, to: int, fill: float = 0.0) -> MappedTensor:
        """The tensor with so many indices along a dim; the new ones, behind the others, have one value."""
        length = self.shape[dim]
        if to < length:
            raise LayoutError(f"pad: dim {dim} has {length} indices, which are more than {to}")
        shape = _at(dim, to, self.shape)
        box = Box(_at(dim, length, (0,) * len(shape)), _at(dim, to - length, shape))
        filled = () if box.numel == 0 else (MapTerm(box, None, fill=fill),)
        return MappedTensor(shape, self.dtype, self.terms + filled)


def concatenate_mapped(parts: Sequence[MappedTensor], dim: int) -> MappedTensor:
    """Tensors one after another along a dim, as `torch.cat` does."""
    first, start, terms = parts[0], 0, list[MapTerm]()
    for part in parts:
        if part.dtype != first.dtype or _at(dim, 0, part.shape) != _at(dim, 0, first.shape):
            raise LayoutError(
                f"{first.dtype}{list(first.shape)} and {part.dtype}{list(part.shape)} are not joined along dim {dim}: "
                "they need one dtype and the same lengths of the other dims"
            )
        shift = _at(dim, start, (0,) * len(part.shape))
        terms += [_shift(term, shift) for term in part.terms]
        start += part.shape[dim]
    return MappedTensor(_at(dim, start, first.shape), first.dtype, tuple(terms))


def _at(dim: int, value: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def _shift(term: MapTerm, by: tuple[int, ...]) -> MapTerm:
    return replace(term, box=Box(tuple(o + b for o, b in zip(term.box.offsets, by, strict=True)), term.box.sizes))


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The shape and the element type of a source tensor.

    >>> str(TensorShape.of((4, 2), "float32"))
    'f32[4, 2]'
    """

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: Iterable[object], dtype: str) -> TensorShape:
        """Both, checked."""
        return cls(check_shape(to_int_tuple(shape, "a shape")), find_dtype(dtype).name)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def identity_term(name: str, shape: tuple[int, ...]) -> MapTerm:
    """A whole tensor as it is."""
    ndim = len(shape)
    return MapTerm(Box.whole(shape), name, (0,) * ndim, (1,) * ndim, tuple(range(ndim)))


def terms_of_view(
    offsets: Sequence[int], sizes: Sequence[int], source: str, shape: Sequence[int], start: int, strides: Sequence[int]
) -> Iterator[MapTerm]:
    """A strided view of a tensor stored row by row, as terms for the box of a destination at `offsets`.

    A dim of the view that runs over several dims of the source becomes several terms, and so do several dims of the
    view that run along one dim of the source.

    >>> for term in terms_of_view((0, 0), (2, 6), "w", (2, 2, 3), start=0, strides=(6, 1)):
    ...     print(term)
    [0:2, 0:3] = w[0:2, 0, 0:3]
    [0:2, 3:6] = w[0:2, 1, 0:3]
    """
    box = Box(tuple(offsets), tuple(sizes))
    if box.numel == 0:
        return
    dense = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    waiting = [(box, start)]
    while waiting:
        box, start = waiting.pop()
        starts = [start // dense[d] % shape[d] for d in range(len(shape))]
        steps, axes = [1] * len(shape), [-1] * len(shape)
        split: tuple[int, int] | None = None  # a dim of the view, and after how many indices it is cut
        for dim in sorted(range(box.ndim), key=lambda dim: strides[dim]):
            stride, size = strides[dim], box.sizes[dim]
            if size == 1 or stride == 0:
                continue
            fits = [d for d in range(len(shape)) if shape[d] > 1 and dense[d] <= stride and stride % dense[d] == 0]
            assert fits and stride > 0, "a view of a dense tensor has strides of that tensor"
            along = fits[0]
            step = stride // dense[along]
            room = -(-(shape[along] - starts[along]) // step)
            if axes[along] >= 0 or room < size:
                split = (dim, 1 if axes[along] >= 0 else room)
                break
            axes[along], steps[along] = dim, step
        if split is None:
            yield MapTerm(box, source, tuple(starts), tuple(steps), tuple(axes))
            continue
        dim, count = split
        rest = Box(_at(dim, box.offsets[dim] + count, box.offsets), _at(dim, box.sizes[dim] - count, box.sizes))
        waiting += [(rest, start + count * strides[dim]), (Box(box.offsets, _at(dim, count, box.sizes)), start)]


@dataclass(frozen=True, eq=False)
class StateMap:
    """For each destination tensor the boxes of source tensors that it is made of; a value that can be printed.

    >>> types = {"q": TensorShape((4, 2), "f32"), "k": TensorShape((2, 2), "f32")}
    >>> print(StateMap.identity(types).fuse(["q", "k"], "qk").pad("qk", dim=0, to=8).cast("qk", "bf16"))
    qk: bf16[8, 2]
      [0:4, 0:2] = q[0:4, 0:2]  bf16 <- f32
      [4:6, 0:2] = k[0:2, 0:2]  bf16 <- f32
      [6:8, 0:2] = 0
    """

    sources: Mapping[str, TensorShape]
    targets: Mapping[str, MappedTensor]
    note: str = field(default="", compare=False)
    """Where the map comes from, for error messages."""

    @staticmethod
    def identity(types: Mapping[str, TensorShape]) -> StateMap:
        """Every tensor as it is."""
        targets = {n: MappedTensor(t.shape, t.dtype, (identity_term(n, t.shape),)) for n, t in types.items()}
        return StateMap(dict(types), targets)

    def _made(self, used: Iterable[str], made: Mapping[str, MappedTensor]) -> StateMap:
        gone = set(used)
        kept = {name: tensor for name, tensor in self.targets.items() if name not in gone}
        names = [*made, *(tensor.scale.name for tensor in made.values() if tensor.scale is not None)]
        clash = next((name for name in names if name in kept or name in self.scales), None)
        if clash is not None:
            raise LayoutError(f"two tensors would be called {clash}; rename one of them")
        return replace(self, targets={**kept, **made})

    def _target(self, name: str) -> MappedTensor:
        if name not in self.targets:
            raise LayoutError(f"there is no tensor {name!r}; there are {_shorten(self.targets)}")
        if self.targets[name].scale is not None:
            raise LayoutError(f"{name} is quantized, which is the last step of a map; do this before")
        return self.targets[name]

    def _target_dim(self, name: str, dim: int, extra: int = 0) -> int:
        ndim = len(self._target(name).shape) + extra
        if not -ndim <= dim < ndim:
            raise LayoutError(f"{name} has the shape {list(self.targets[name].shape)}, which has no dim {dim}")
        return dim % ndim

    def rename(self, names: Mapping[str, str]) -> StateMap:
        """The same tensors under other names: old name to new name.

        >>> list(StateMap.identity({"a": TensorShape((2,), "f32")}).rename({"a": "b"}).targets)
        ['b']
        """
        if len(set(names.values())) < len(names):
            raise LayoutError(f"rename gives two tensors one name: {_shorten(names.values())}")
        return self._made(names, {new: self._target(old) for old, new in names.items()})

    def split(self, name: str, to: Sequence[str], dim: int = 0, sizes: Sequence[int] | None = None) -> StateMap:
        """One tensor into several along a dim, of equal lengths or of `sizes`."""
        tensor, dim = self._target(name), self._target_dim(name, dim)
        lengths = list(sizes) if sizes is not None else [tensor.shape[dim] // max(1, len(to))] * len(to)
        if len(lengths) != len(to) or sum(lengths) != tensor.shape[dim] or min(lengths, default=-1) < 0:
            raise LayoutError(
                f"split {name}: dim {dim} has {tensor.shape[dim]} indices and the sizes for {len(to)} names are "
                f"{lengths}; pass one for each name, which add up to it"
            )
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        parts = {n: tensor.narrow(dim, s, k) for n, s, k in zip(to, starts, lengths, strict=True)}
        if len(parts) < len(to):
            raise LayoutError(f"split {name}: a name appears twice in {_shorten(to)}")
        return self._made([name], parts)

    def fuse(self, names: Sequence[str], to: str, dim: int = 0) -> StateMap:
        """Several tensors into one along a dim."""
        if not names:
            raise LayoutError(f"fuse: {to} needs one tensor or more")
        dim = self._target_dim(names[0], dim)
        return self._made(names, {to: concatenate_mapped([self._target(name) for name in names], dim)})

    def stack(self, names: Sequence[str], to: str, dim: int = 0) -> StateMap:
        """Several tensors of one shape into one with a new dim."""
        if not names:
            raise LayoutError(f"stack: {to} needs one tensor or more")
        dim = self._target_dim(names[0], dim, extra=1)
        parts = [self._target(name).insert_dim(dim) for name in names]
        return self._made(names, {to: concatenate_mapped(parts, dim)})

    def transpose(self, name: str, dims: Sequence[int] | None = None) -> StateMap:
        """The last two dims exchanged, or all dims in the order `dims`."""
        ndim = len(self._target(name).shape)
        order = list(dims) if dims is not None else [*range(ndim - 2), ndim - 1, ndim - 2]
        if sorted(order) != list(range(ndim)):
            raise LayoutError(f"transpose {name}: it has {ndim} dims, the order of dims is {order}")
        return self._made([name], {name: self.targets[name].permute(order)})

    def pad(self, name: str, dim: int, to: int, value: float = 0.0) -> StateMap:
        """More indices along a dim, behind the others, with one value: a vocabulary that is padded."""
        dim = self._target_dim(name, dim)
        return self._made([name], {name: self.targets[name].pad(dim, to, value)})

    def cast(self, name: str, dtype: str) -> StateMap:
        """Another element type."""
        return self._made([name], {name: replace(self._target(name), dtype=find_dtype(dtype).name)})

    def quantize(
        self, name: str, scale: str, block: Sequence[int], dtype: str = "f8e4m3fn", rule: str = "amax"
    ) -> StateMap:
        """Codes of an fp8 type, with a float32 scale for each block in a tensor of its own.

        Whoever receives a block quantizes it whole, so no cut of the destination may go through one.

        >>> print(StateMap.identity({"w": TensorShape((256, 256), "bf16")}).quantize("w", "w_scale", (128, 128)))
        w: f8e4m3fn[256, 256] with w_scale: f32[2, 2] for blocks of (128, 128), amax
          [0:256, 0:256] = w[0:256, 0:256]  f8e4m3fn <- bf16
        """
        made, kind = self._target(name), find_dtype(dtype)
        given = BlockScale(scale, to_int_tuple(block, "a block"), rule)
        if not kind.name.startswith("f8") or not find_dtype(made.dtype).name.startswith(("f", "bf")):
            raise LayoutError(f"quantize {name}: {made.dtype} to {kind.name}; floats become f8e4m3fn or f8e5m2")
        if len(given.block) != len(made.shape) or min(given.block, default=0) < 1 or rule not in SCALE_RULES:
            raise LayoutError(
                f"quantize {name}: blocks of {given.block} with the rule {rule!r} for {list(made.shape)}; pass a "
                f"length for each dim, and a rule of {', '.join(SCALE_RULES)}"
            )
        return self._made([name], {name: replace(made, dtype=kind.name, scale=given)})

    @cached_property
    def scales(self) -> Mapping[str, str]:
        """The tensors that get scales: their names, and those of the tensors that are quantized."""
        return {tensor.scale.name: name for name, tensor in self.targets.items() if tensor.scale is not None}

    def tie(self, name: str, to: str) -> StateMap:
        """The same tensor under one more name: tied embeddings."""
        return self._made([], {to: self._target(name)})

    def only(self, names: Iterable[str]) -> StateMap:
        """The map of some of the destination tensors."""
        listed = [self.scales.get(name, name) for name in names]
        return replace(self, targets={n: self.targets[n] if n in self.targets else self._target(n) for n in listed})

    def then(self, after: StateMap) -> StateMap:
        """The map that does both: `after` takes what this one makes.

        >>> turned = StateMap.identity({"w": TensorShape((4, 2), "f32")}).transpose("w")
        >>> halves = StateMap.identity({"w": TensorShape((2, 4), "f32")}).split("w", ["a", "b"])
        >>> print(turned.then(halves).targets["b"].terms[0])
        [0:1, 0:4] = w[0:4, 1:2] transposed (1, 0)
        """
        for name, wanted in after.sources.items():
            made = self.targets.get(name)
            if made is not None and (made.shape, made.dtype) != (wanted.shape, wanted.dtype):
                have = TensorShape(made.shape, made.dtype)
                raise LayoutError(f"{name} is made as {have} and taken as {wanted}; maps that follow each other agree")
        targets = {
            name: replace(tensor, terms=tuple(part for term in tensor.terms for part in self.compose(term)))
            for name, tensor in after.targets.items()
        }
        return replace(self, targets=targets)

    def compose(self, after: MapTerm) -> Iterator[MapTerm]:
        """A term whose source is made by this map, in terms of what that is made of."""
        if after.source is None:
            yield after
            return
        for before in self._target(after.source).terms:
            met = self._meet(after, before)
            if met is None:
                continue
            part = after.cut(met)
            # an index of the tensor in between, counted from the term's box: first + step * (index in `met`)
            first = [s - o for s, o in zip(part.starts, before.box.offsets, strict=True)]
            starts, steps, axes = [], [], []
            for start, step, axis in zip(before.starts, before.steps, before.axes, strict=True):
                starts.append(start if axis < 0 else start + step * first[axis])
                steps.append(1 if axis < 0 or part.axes[axis] < 0 else step * part.steps[axis])
                axes.append(-1 if axis < 0 else part.axes[axis])
            yield MapTerm(met, before.source, tuple(starts), tuple(steps), tuple(axes), before.fill)

    @staticmethod
    def _meet(after: MapTerm, before: MapTerm) -> Box | None:
        """The part of the box of `after` whose elements come from the box of `before`."""
        low, high = list(after.box.offsets), list(after.box.ends)
        ends = before.box.ends
        for d, (start, step, axis) in enumerate(zip(after.starts, after.steps, after.axes, strict=True)):
            begin, end = before.box.offsets[d], ends[d]
            if axis < 0:
                if not begin <= start < end:
                    return None
                continue
            origin = after.box.offsets[axis]
            low[axis] = max(low[axis], origin + -(-(begin - start) // step))
            high[axis] = min(high[axis], origin + -(-(end - start) // step))
            if low[axis] >= high[axis]:
                return None
        return Box(tuple(low), tuple(h - lo for lo, h in zip(low, high, strict=True)))

    @property
    def term_count(self) -> int:
        return sum(len(tensor.terms) for tensor in self.targets.values())

    def used_sources(self) -> set[str]:
        """The source tensors of which something is taken."""
        return {t.source for tensor in self.targets.values() for t in tensor.terms if t.source is not None}

    def checked(self) -> StateMap:
        """The same map; an error unless the terms of each tensor tile it and stay within their sources."""
        if self.term_count > MAX_TERMS:
            raise LayoutError(f"a map has at most {MAX_TERMS} terms, this one has {self.term_count}")
        for name, tensor in self.targets.items():
            for term in tensor.terms:
                self._check_term(name, tensor, term)
            ndim, count = len(tensor.shape), len(tensor.terms)
            offsets = np.array([t.box.offsets for t in tensor.terms], np.int64).reshape(count, ndim)
            sizes = np.array([t.box.sizes for t in tensor.terms], np.int64).reshape(count, ndim)
            try:
                check_coverage(tensor.shape, offsets, sizes, lambda i, t=tensor: str(t.terms[i]), "terms")  # type: ignore[misc]  # a default argument of a lambda has no type
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from error
        return self

    def _check_term(self, name: str, tensor: MappedTensor, term: MapTerm) -> None:
        if term.box.ndim != len(tensor.shape):
            raise LayoutError(f"{name} has {len(tensor.shape)} dims, and the box {term.box} of a term {term.box.ndim}")
        if term.source is None:
            return
        source = self.sources.get(term.source)
        if source is None:
            raise LayoutError(f"{name}: a term takes {term.source!r}, which is not among the source tensors")
        ndim, used = len(source.shape), [axis for axis in term.axes if axis >= 0]
        columns = {len(term.starts), len(term.steps), len(term.axes)}
        if columns != {ndim} or len(set(used)) < len(used) or max(used, default=-1) >= len(tensor.shape):
            raise LayoutError(f"{name}: the term {term!r:.200} does not fit the {ndim} dims of {term.source}")
        for start, step, axis, length in zip(term.starts, term.steps, term.axes, source.shape, strict=True):
            last = start if axis < 0 else start + step * (term.box.sizes[axis] - 1)
            if term.box.numel and not (0 <= start < length and last < length and step >= 1):
                raise LayoutError(f"{name}: {term} reaches beyond {term.source}, which is {source}")

    def to_json(self) -> dict[str, Any]:
        """The map as plain data; source tensors are referred to by number."""
        numbers = {name: i for i, name in enumerate(self.sources)}

        def row(term: MapTerm) -> list[Any]:
            box = [list(term.box.offsets), list(term.box.sizes)]
            if term.source is None:
                return [*box, -1, float(term.fill)]
            return [*box, numbers[term.source], list(term.starts), list(term.steps), list(term.axes)]

        return {
            "format": _FORMAT,
            "sources": [[name, t.dtype, list(t.shape)] for name, t in self.sources.items()],
            "targets": [
                [n, t.dtype, list(t.shape), list(map(row, t.terms)), *([t.scale.to_json()] if t.scale else [])]
                for n, t in self.targets.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Any, note: str = "") -> StateMap:
        """The map that `to_json` wrote, checked again.

        >>> text = json.dumps(StateMap.identity({"w": TensorShape((2,), "f32")}).to_json())
        >>> print(StateMap.from_json(json.loads(text)))
        w: f32[2]
          [0:2] = w[0:2]
        """
        try:
            if data["format"] != _FORMAT:
                raise LayoutError(f"a map has the format {_FORMAT!r}, this has {data['format']!r:.60}")
            if sum(len(target[3]) for target in data["targets"]) > MAX_TERMS:
                raise LayoutError(f"a map has at most {MAX_TERMS} terms")
            sources = {str(n): TensorShape.of(shape, dtype) for n, dtype, shape in data["sources"]}
            names = list(sources)
            targets, scaled = dict[str, MappedTensor](), list[tuple[str, str, Any]]()
            for name, dtype, shape, rows, *scale in data["targets"]:
                made = TensorShape.of(shape, dtype)
                wide = "f32" if scale else made.dtype
                targets[str(name)] = MappedTensor(made.shape, wide, tuple(_parse_row(r, names) for r in rows))
                scaled += [(str(name), made.dtype, *scale)] if scale else []
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(f"this is not a map of tensors in JSON: {type(error).__name__}: {error}") from error
        found = cls(sources, targets, note)
        for name, dtype, (scale, block, rule) in scaled:
            found = found.quantize(name, str(scale), block, dtype, rule)
        return replace(found, targets={name: found.targets[name] for name in targets}).checked()

    @cached_property
    def digest(self) -> str:
        """What differs between two maps."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, StateMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        lines: list[str] = []
        for name, tensor in self.targets.items():
            scale, title = tensor.scale, f"{name}: {tensor.dtype}{list(tensor.shape)}"
            if scale is not None:
                shape = list(scale.shape(tensor.shape))
                title += f" with {scale.name}: f32{shape} for blocks of {scale.block}, {scale.rule}"
            lines.append(title)
            for term in tensor.terms:
                source = None if term.source is None else self.sources[term.source]
                cast = "" if source is None or source.dtype == tensor.dtype else f"  {tensor.dtype} <- {source.dtype}"
                lines.append(f"  {term}{cast}")
        hidden = len(lines) - _SHOWN_TERMS
        return "\n".join(lines if hidden <= 0 else [*lines[:_SHOWN_TERMS], f"... and {hidden} more lines"])


def _parse_row(row: list[Any], names: list[str]) -> MapTerm:
    offsets, sizes, number, *rest = row
    box = Box(to_int_tuple(offsets, "offsets"), to_int_tuple(sizes, "sizes"))
    if number == -1:
        return MapTerm(box, None, fill=float(rest[0]))
    if not 0 <= number < len(names):
        raise LayoutError(f"a term takes source tensor {number} of {len(names)}")
    starts, steps, axes = (to_int_tuple(numbers, "a term") for numbers in rest)
    if min(axes, default=0) < -1:
        raise LayoutError(f"the axes of a term are dims or -1, got {axes}")
    return MapTerm(box, names[number], starts, steps, axes)


def _shorten(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
