"""How are ranks arranged? A `Mesh` is an n-D array of ranks with a name for each axis; it needs no devices.

Torch's DeviceMesh is taken for one. Torch is not imported: its objects are recognised by their attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.geometry.box import LayoutError

IntArray: TypeAlias = npt.NDArray[np.int64]
MAX_RANKS = 2**20  # that are counted rather than listed


class DeviceMeshLike(Protocol):
    """What torch's DeviceMesh has, by which it is recognised."""

    @property
    def mesh(self) -> Any: ...
    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...


def freeze_array(values: Any) -> IntArray:
    """An int64 array that cannot be written to."""
    array = np.array(values, dtype=np.int64)
    array.setflags(write=False)
    return array


class Mesh:
    """Named axes over an n-D array of distinct ranks: `Mesh(names, ranks)`.

    With the names in second place, as torch has them, the first is the shape of a mesh of ranks 0, 1, 2..., or an array
    of ranks.

    >>> mesh = Mesh.of(dp=2, tp=4)
    >>> mesh.shape, mesh.coordinates(6)
    ((2, 4), {'dp': 1, 'tp': 2})
    >>> print(mesh.submesh("tp", dp=1))
    tp=4 @ 4-7
    >>> Mesh((2, 4), ("dp", "tp")) == mesh
    True
    """

    __slots__ = ("__weakref__", "_hash", "_indices", "axes", "ranks")
    axes: tuple[str, ...]
    ranks: IntArray
    _hash: int
    _indices: dict[int, tuple[int, ...]] | None

    def __init__(self, axes: npt.ArrayLike | None = None, ranks: npt.ArrayLike | None = None, **sizes: int) -> None:
        if sizes:
            shown = ", ".join(f"{name}={size!r}" for name, size in sizes.items())
            raise LayoutError(f"Mesh({shown}): a mesh by the sizes of its axes is Mesh.of({shown})")
        axes, ranks = _read_axes_and_ranks(axes, ranks)
        self._set("axes", axes)
        try:
            self._set("ranks", freeze_array(ranks))
        except (TypeError, ValueError):
            raise LayoutError(f"the ranks of a mesh are numbers, got {ranks!r}; {_MESH_FORMS}") from None
        self._check()
        self._set("_indices", None)
        self._set("_hash", hash((self.axes, self.ranks.shape, self.ranks.tobytes())))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        if len(self.axes) != self.ranks.ndim:
            raise LayoutError(f"a mesh of shape {self.shape} needs {self.ranks.ndim} axis names, got {self.axes}")
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"axis names must differ, got {self.axes}")
        for name in self.axes:
            if not name.isidentifier():
                raise LayoutError(f"an axis name is a Python identifier such as 'dp', got {name!r}")
        if self.ranks.size == 0:
            raise LayoutError(f"a mesh needs at least one rank, got shape {self.shape}")
        if self.ranks.min() < 0:
            raise LayoutError(f"a rank is 0 or more, got {int(self.ranks.min())} in a mesh of shape {self.shape}")
        values, counts = np.unique(self.ranks, return_counts=True)
        if counts.max() > 1:
            raise LayoutError(f"rank {int(values[counts.argmax()])} appears {int(counts.max())} times in the mesh")

    @classmethod
    def of(cls, *sizes: int, **axes: int) -> Mesh:
        """A mesh of ranks 0, 1, 2... in row-major order: `Mesh.of(dp=2, tp=4)`."""
        if sizes:
            named = ", ".join(f"{name}={size}" for name, size in zip(("dp", "tp", "pp"), sizes, strict=False))
            raise TypeError(
                f"Mesh.of({', '.join(map(repr, sizes))}) does not name its axes; write Mesh.of({named}), or with "
                "other names"
            )
        for name, size in axes.items():
            if not isinstance(size, int):
                raise LayoutError(
                    f"axis {name!r} has a number of ranks, got {type(size).__name__}: {size!r}; to choose the ranks "
                    "use Mesh(('dp', 'tp'), [[0, 1], [2, 3]])"
                )
            if size < 1:
                raise LayoutError(f"axis {name!r} needs at least one rank, got {size}")
        return cls(tuple(axes), number_ranks(tuple(axes.values())))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is frozen: {name} cannot be set")

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.axes, self.ranks)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranks.shape)

    @property
    def size(self) -> int:
        return int(self.ranks.size)

    @property
    def ndim(self) -> int:
        return self.ranks.ndim

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks are 0, 1, 2... in row-major order."""
        return bool(np.array_equal(self.ranks.reshape(-1), np.arange(self.size)))

    def axis_index(self, axis: str | int) -> int:
        """The position of an axis, from its name or (possibly negative) position."""
        if isinstance(axis, str):
            if axis not in self.axes:
                raise LayoutError(f"no axis {axis!r}; this mesh has {', '.join(map(repr, self.axes)) or 'no axes'}")
            return self.axes.index(axis)
        if not -self.ndim <= axis < self.ndim:
            raise LayoutError(f"no axis {axis}; this mesh has {self.ndim} axes: {self.axes}")
        return axis % self.ndim

    def axis_size(self, axis: str | int) -> int:
        return self.shape[self.axis_index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank along each axis."""
        found = np.argwhere(self.ranks == rank)
        if len(found) == 0:
            raise LayoutError(f"rank {rank} is not in the mesh {self}")
        return dict(zip(self.axes, map(int, found[0]), strict=True))

    def indices(self, rank: int) -> tuple[int, ...] | None:
        """The coordinates of a rank in order of the axes; None for a rank that is not in the mesh."""
        if self._indices is None:
            places = np.argwhere(np.ones(self.shape, dtype=bool)).tolist()  # right for a mesh without axes too
            self._set("_indices", dict(zip(self.ranks.reshape(-1).tolist(), map(tuple, places), strict=True)))
        found: dict[int, tuple[int, ...]] = self._indices  # type: ignore[assignment]  # set above
        return found.get(rank)

    def submesh(self, *keep: str, **fixed: int) -> Mesh:
        """The mesh of the axes in `keep`, the others held at the coordinates in `fixed`."""
        for name, coordinate in fixed.items():
            if not 0 <= coordinate < self.axis_size(name):
                raise LayoutError(f"axis {name!r} has {self.axis_size(name)} ranks, coordinate {coordinate} is invalid")
        missing = [a for a in self.axes if a not in keep and a not in fixed]
        if missing or set(keep) & set(fixed):
            raise LayoutError(f"each axis of {self.axes} is either kept or fixed; got keep={keep}, fixed={fixed}")
        kept = [self.axis_index(a) for a in keep]
        index = tuple(fixed[a] if a in fixed else slice(None) for a in self.axes)
        order = np.argsort(np.argsort(kept))
        return Mesh(keep, self.ranks[index].transpose(tuple(int(i) for i in order)))

    def groups(self, axis: str | int) -> list[tuple[int, ...]]:
        """The rank groups along an axis: those that differ in this coordinate only.

        >>> Mesh.of(dp=2, tp=2).groups("dp")
        [(0, 2), (1, 3)]
        """
        index = self.axis_index(axis)
        rows = np.moveaxis(self.ranks, index, -1).reshape(-1, self.shape[index])
        return [tuple(map(int, row)) for row in rows]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        if self._hash != other._hash or self.axes != other.axes or self.ranks.shape != other.ranks.shape:
            return False
        return bool((self.ranks == other.ranks).all())

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        axes = ",".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        return axes if self.is_contiguous else f"{axes} @ {format_ranks(self.ranks.reshape(-1).tolist())}"

    def __repr__(self) -> str:
        return f"Mesh({self})"

    def to_json(self) -> dict[str, Any]:
        return {"axes": list(self.axes), "ranks": self.ranks.tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Mesh:
        return cls(data["axes"], data["ranks"])


def is_device_mesh(value: object) -> bool:
    """Whether this is torch's DeviceMesh."""
    return hasattr(value, "mesh_dim_names") and hasattr(value, "mesh")


def to_mesh(value: Any) -> Mesh:
    """A Mesh, or torch's DeviceMesh as one; axes without names are called axis0, axis1...

    >>> to_mesh((2, 2))
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: a mesh is a Mesh, such as Mesh.of(dp=2, tp=4), or torch's DeviceMesh; ...
    """
    if isinstance(value, Mesh):
        return value
    if not is_device_mesh(value):
        raise LayoutError(
            "a mesh is a Mesh, such as Mesh.of(dp=2, tp=4), or torch's DeviceMesh; got "
            f"{type(value).__name__}: {value!r}"
        )
    ranks = value.mesh.tolist()
    names = value.mesh_dim_names or tuple(f"axis{i}" for i in range(value.mesh.ndim))
    return Mesh(tuple(names), ranks)


def number_ranks(shape: Sequence[int]) -> IntArray:
    """The ranks 0, 1, 2... as an array of a shape; an error for more of them than there can be.

    >>> number_ranks((2, 2)).tolist()
    [[0, 1], [2, 3]]
    """
    count = math.prod(shape)
    if count > MAX_RANKS:
        sizes = " x ".join(str(size)[:20] for size in shape[:8])
        raise LayoutError(f"{sizes} ranks are more than {MAX_RANKS}; pass a smaller number of ranks")
    return np.arange(count).reshape(shape)


def _read_axes_and_ranks(axes: Any, ranks: Any) -> tuple[tuple[str, ...], Any]:
    """The names and the array of ranks, from either order of arguments."""
    if _are_names(ranks) and len(ranks):
        names = (ranks,) if isinstance(ranks, str) else tuple(ranks)
        if isinstance(axes, int):
            axes = (axes,)
        is_shape = isinstance(axes, list | tuple) and len(axes) == len(names) and all(isinstance(n, int) for n in axes)
        flat = isinstance(axes, list | tuple) and len(axes) > 0 and all(isinstance(n, int) for n in axes)
        if flat and not is_shape and (len(names) > 1 or len(set(axes)) < len(axes)):
            raise LayoutError(
                f"the shape {tuple(axes)} has {len(axes)} axes, and the names {names} are {len(names)}; name each axis"
            )
        if is_shape and min(axes) < 1:
            raise LayoutError(f"a mesh of shape {tuple(axes)} has an axis without ranks; every axis has 1 or more")
        return names, number_ranks(axes) if is_shape else axes
    if _are_names(axes) and ranks is not None:
        return ((axes,) if isinstance(axes, str) else tuple(axes)), ranks
    raise LayoutError(f"Mesh takes names of axes and ranks; got {axes!r} and {ranks!r}; {_MESH_FORMS}")


_MESH_FORMS = "write Mesh.of(dp=2, tp=2), Mesh((2, 2), ('dp', 'tp')) or Mesh(('dp', 'tp'), [[0, 1], [2, 3]])"


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(n, str) for n in value))


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as a short list in which runs are folded.

    >>> format_ranks([0, 1, 2, 3, 8, 6])
    '0-3,8,6'
    """
    parts: list[str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i < len(ranks) and ranks[i] == ranks[i - 1] + 1:
            continue
        run = ranks[start:i]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
        start = i
    return ",".join(parts)
