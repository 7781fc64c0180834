"""What does an engine's own loading code put where? It is run once on tensors without memory, and its copies are noted.

1. Sources are tensors on the meta device, parameters may be. A dispatch mode sees every operator. Views run as they
   are: torch itself keeps storage, offset and strides, so that every view of a dense tensor can be written as boxes.
2. Each storage has a `MappedTensor`: what it is made of now. A copy takes the boxes of what it reads and puts them in
   place of those that it overwrites. Temporaries are storages like others, so copies of copies lead back to sources.
3. Every other operator on a recorded tensor would compute with values. It is refused with the names of the tensors and
   the line of the loader, at the end once more if the loader caught the error and went on.
4. At the end the boxes of each parameter are those of the memory that it has then. What nothing was written to is an
   error: uninitialised memory is never served.
5. If the loader can run on real tensors, it does so once, with random values, and must give what the map gives.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._text import public
from shardwise._torch import storage_identity
from shardwise.checkpoint.state import dtype_of, torch_dtype
from shardwise.geometry import Box, LayoutError, find_dtype
from shardwise.geometry.state_map import (
    MAX_TERMS,
    MappedTensor,
    MapTerm,
    StateMap,
    TensorShape,
    concatenate_mapped,
    identity_term,
    terms_of_view,
)
from shardwise.sync.publisher import tensors_of

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
_UNWRITTEN, _COMPUTED = "\0unwritten", "\0computed"
_MOST_INDICES = 1 << 16
_WIDER = {  # conversions that lose nothing
    ("bf16", "f32"),
    ("f16", "f32"),
    ("bf16", "f64"),
    ("f16", "f64"),
    ("f32", "f64"),
    *((f"f8{kind}", wide) for kind in ("e4m3fn", "e5m2") for wide in ("bf16", "f16", "f32", "f64")),
}


class RecordingError(LayoutError):
    """A loader did with weights what cannot be written as boxes; the text names tensors, operator and line.

    >>> issubclass(RecordingError, ValueError)
    True
    """


@dataclass(eq=False)
class _Memory:
    """A storage of a recorded tensor, as a dense tensor of its first shape: what it is made of, what keeps it alive."""

    made: MappedTensor
    holder: Tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes what is copied where while it is active; `record` uses it."""

    def __init__(self, sources: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._memory: dict[int, _Memory] = {}
        self._names: dict[int, str] = {}
        self.problem: str | None = None
        self.sources = {name: TensorShape(tuple(t.shape), dtype_of(t.dtype).name) for name, t in sources.items()}
        for name, tensor in sources.items():
            self._note(tensor, (identity_term(name, tuple(tensor.shape)),))
        for name, tensor in into.items():
            self._names.setdefault(storage_identity(tensor.untyped_storage()), name)
            if storage_identity(tensor.untyped_storage()) not in self._memory:
                self._note(tensor, None)

    # What storages are made of.

    def _note(self, tensor: Tensor, terms: tuple[MapTerm, ...] | None) -> None:
        """A storage that is new; without terms nothing was written to it."""
        dense = _is_dense(tensor)
        shape = tuple(tensor.shape) if dense else (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,)
        if terms is None:
            terms = (identity_term(_UNWRITTEN, shape),)
        made = MappedTensor(shape, dtype_of(tensor.dtype).name, terms)
        if not dense and terms[0].source != _UNWRITTEN:
            made = replace(made, terms=(identity_term(_UNWRITTEN, shape),))
        self._memory[storage_identity(tensor.untyped_storage())] = _Memory(made, tensor)
        if not dense and terms[0].source != _UNWRITTEN:
            self._write(tensor, MappedTensor(tuple(tensor.shape), made.dtype, terms))

    def _of(self, tensor: Tensor) -> _Memory | None:
        return self._memory.get(storage_identity(tensor.untyped_storage()))

    def content(self, tensor: Tensor) -> MappedTensor:
        """What a tensor, any view of a storage, is made of now."""
        memory = self._of(tensor)
        dtype, shape = dtype_of(tensor.dtype).name, tuple(tensor.shape)
        if memory is None:
            if tensor.device.type != "meta" and tensor.numel() and tensor.dtype.itemsize <= 16:
                once = tensor.reshape(-1)[:1] if tensor.ndim else tensor.reshape(1)
                if tensor.numel() == 1 or all(s == 0 for s, n in zip(tensor.stride(), shape, strict=True) if n > 1):
                    return MappedTensor(shape, dtype, (MapTerm(Box.whole(shape), None, fill=float(once.item())),))
            return MappedTensor(shape, dtype, (identity_term(_COMPUTED, shape),))
        if dtype != memory.made.dtype:
            self._refuse(f"a view of {memory.made.dtype} as {dtype}", (tensor,))
        views = terms_of_view(
            (0,) * tensor.ndim, shape, "x", memory.made.shape, int(tensor.storage_offset()), tensor.stride()
        )
        made = StateMap(self.sources, {"x": memory.made})
        terms = tuple(part for view in views for part in made.compose(view))
        return MappedTensor(shape, dtype, terms)

    def _write(self, target: Tensor, value: MappedTensor) -> None:
        """Put what a tensor of the shape of `target` is made of in its place."""
        memory = self._of(target)
        assert memory is not None
        base = memory.made
        value = self._converted(value, base.dtype, target)
        new: list[MapTerm] = []
        for view in _regions(target, base.shape):
            part = value
            for dim, (start, size) in enumerate(zip(view.box.offsets, view.box.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            kept = [dim for dim in view.axes if dim >= 0]
            for dim in sorted((d for d in range(target.ndim) if d not in kept), reverse=True):
                part = part.select(dim, 0)
            left = sorted(kept)
            part = part.permute([left.index(dim) for dim in kept])
            for dim, axis in enumerate(view.axes):
                if axis < 0:
                    part = part.insert_dim(dim)
            shift = view.starts
            new += [replace(t, box=t.box.shifted(shift)) for t in part.terms]
        covered = [t.box for t in new]
        kept_terms = list(base.terms)
        for box in covered:
            kept_terms = [part for term in kept_terms for part in _without(term, box)]
        if len(kept_terms) + len(new) > MAX_TERMS:
            self._refuse(f"more than {MAX_TERMS} boxes", (target,))
        memory.made = replace(base, terms=(*kept_terms, *new))

    def _converted(self, value: MappedTensor, dtype: str, target: Tensor) -> MappedTensor:
        """A value in another element type, if converting in one step from the sources gives the same."""
        for term in value.terms:
            first = self.sources[term.source].dtype if term.source in self.sources else value.dtype
            if not (value.dtype in (dtype, first) or (first, value.dtype) in _WIDER):
                self._refuse(f"converting {term.source} from {first} to {value.dtype} and then to {dtype}", (target,))
        return replace(value, dtype=dtype)

    def _refuse(self, what: str, tensors: Sequence[Tensor]) -> NoReturn:
        names = sorted({name for tensor in tensors for name in self._names_in(tensor)})
        text = f"{what} of {', '.join(names[:4]) or 'a recorded tensor'} at {_line_of_loader()} cannot be recorded"
        self.problem = self.problem or f"{text}; copies, views, concatenations, casts and fills can"
        raise RecordingError(self.problem)

    def _names_in(self, tensor: Tensor) -> set[str]:
        memory = self._of(tensor)
        if memory is None:
            return set()
        found = {t.source for t in memory.made.terms if t.source is not None and t.source in self.sources}
        name = self._names.get(storage_identity(tensor.untyped_storage()))
        return found | ({name} if name is not None else set())

    # What operators do.

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in _tensors_in((args, kwargs))]
        recorded = [t for t in tensors if self._of(t) is not None]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if func.is_view or name in ("_unsafe_view", "alias", "set_", "_reshape_alias"):
            return func(*args, **kwargs)
        handler = _HANDLERS.get(name)
        if handler is None or (not recorded and name not in _FACTORIES and name != "scalar_tensor"):
            if recorded and name not in _HARMLESS:
                self._refuse(f"{name}", recorded)
            return func(*args, **kwargs)
        return handler(self, func, args, kwargs)

    def scalar(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A number that is assigned."""
        out: Tensor = func(*args, **kwargs)
        if out.is_meta:
            self._note(out, (MapTerm(Box((), ()), None, fill=float(args[0])),))
        return out

    def factory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`empty`, `zeros`, `full` and their relatives: floats become meta tensors that are recorded."""
        name = func.name().removeprefix("aten::").partition(".")[0]
        dtype = kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], Tensor) else torch.get_default_dtype())
        if not dtype.is_floating_point:
            plain: Tensor = func(*args, **kwargs)
            return plain
        kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        out: Tensor = func(*args, **kwargs)
        fill: float | None = None
        if "zeros" in name or "ones" in name:
            fill = float("ones" in name)
        elif "full" in name:
            fill = float(kwargs.get("fill_value", args[1] if name != "new_full" else args[2]))
        self._note(out, None if fill is None else (MapTerm(Box.whole(tuple(out.shape)), None, fill=fill),))
        return out

    def convert(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`clone`, `contiguous`, `to`, `float`: a copy of all elements in new memory."""
        value = self.content(args[0])
        if kwargs.get("device") is not None or args[0].device.type != "meta":
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        source = args[0]
        if source.device.type != "meta":
            source = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
            kwargs.pop("device", None)
        out: Tensor = func(source, *args[1:], **kwargs)
        return self._made(out, value)

    def _made(self, out: Tensor, value: MappedTensor) -> Tensor:
        value = self._converted(value, dtype_of(out.dtype).name, out)
        self._note(out, None)
        self._write(out, value)
        return out

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`target.copy_(source)`, with broadcasting."""
        target: Tensor = args[0]
        source: Tensor = args[1]
        if self._of(target) is None:
            self._refuse("copying to memory that is not recorded", (source,))
        try:
            spread = source.expand(target.shape)
        except RuntimeError as error:
            raise RuntimeError(f"{error} (while recording at {_line_of_loader()})") from error
        self._write(target, self.content(spread))
        return target

    def fill(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`zero_`, `fill_`."""
        target: Tensor = args[0]
        value = args[1] if len(args) > 1 else 0.0
        if isinstance(value, Tensor) and self._of(value) is not None:
            return self.copy(func, (target, value), kwargs)
        shape, number = tuple(target.shape), float(value)
        if self._of(target) is None:
            out: Tensor = func(*args, **kwargs)
            return out
        made = MappedTensor(shape, dtype_of(target.dtype).name, (MapTerm(Box.whole(shape), None, fill=number),))
        self._write(target, made)
        return target

    def join(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`cat` and `stack`."""
        parts = list(args[0])
        dim = int(args[1] if len(args) > 1 else kwargs.get("dim", 0))
        out = self._run_on_meta(func, args, kwargs)
        stacking = func.name().startswith("aten::stack")
        dim %= out.ndim
        values = [
            replace(self.content(p), dtype=dtype_of(p.dtype).name) for p in parts if p.ndim == out.ndim - stacking
        ]
        values = [self._converted(v, dtype_of(out.dtype).name, out) for v in values]
        values = [v.insert_dim(dim) for v in values] if stacking else values
        return self._made(out, concatenate_mapped(values, dim))

    def _run_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """An operator on the shapes of its arguments."""

        def bare(x: Any) -> Any:
            if isinstance(x, Tensor) and self._of(x) is not None and x.device.type != "meta":
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return [bare(each) for each in x] if isinstance(x, list | tuple) else x

        out: Tensor = func(*bare(args), **kwargs)
        return out

    def pad(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`torch.nn.functional.pad` with a constant."""
        source, pads = args[0], args[1]
        out = self._run_on_meta(func, args, kwargs)
        if min(pads) < 0:
            self._refuse("padding by a negative amount", (source,))
        shape = tuple(out.shape)
        number = float(args[2] if len(args) > 2 else kwargs.get("value", 0.0))
        self._note(out, (MapTerm(Box.whole(shape), None, fill=number),))
        inner = out
        for i, (before, _) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
            dim = out.ndim - 1 - i
            inner = inner.narrow(dim, before, source.shape[dim])
        self._write(inner, self.content(source))
        return out

    def repeat(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`repeat`, `tile`: the source several times."""
        source, repeats = args[0], args[1]
        out = self._run_on_meta(func, args, kwargs)
        value = self.content(source)
        while len(value.shape) < len(repeats):
            value = value.insert_dim(0)
        if math.prod(repeats) > _MOST_INDICES:
            self._refuse(f"repeating {math.prod(repeats)} times", (source,))
        for dim, count in enumerate(repeats):
            if count != 1:
                value = concatenate_mapped([value] * count, dim) if count else value.narrow(dim, 0, 0)
        return self._made(out, value)

    def select(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`index_select` and `x[indices]` along one dim, with indices that are known."""
        source = args[0]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "index_select":
            dim, chosen = int(args[1]) % source.ndim, args[2]
        else:
            dim, chosen = self._one_index(source, args[1])
        numbers = self._known_indices(source, dim, chosen)
        out = self._run_on_meta(func, args, kwargs)
        value = self.content(source)
        parts = [value.narrow(dim, start, count) for start, count in _index_runs(numbers)]
        return self._made(out, concatenate_mapped(parts or [value.narrow(dim, 0, 0)], dim))

    def put(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`index_copy_` and `x[indices] = value` along one dim, with indices that are known."""
        target: Tensor = args[0]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "index_copy_":
            dim, chosen, value = int(args[1]) % target.ndim, args[2], args[3]
        else:
            if (args[3] if len(args) > 3 else kwargs.get("accumulate", False)) is True:
                self._refuse("adding to indices", (target,))
            (dim, chosen), value = self._one_index(target, args[1]), args[2]
        if self._of(target) is None:
            self._refuse("writing to memory that is not recorded", (value,))
        numbers = self._known_indices(target, dim, chosen)
        shape = (*target.shape[:dim], len(numbers), *target.shape[dim + 1 :])
        made, start = self.content(value.expand(shape)), 0
        for first, count in _index_runs(numbers):
            self._write(target.narrow(dim, first, count), made.narrow(dim, start, count))
            start += count
        return target

    def _one_index(self, x: Tensor, indices: Sequence[Tensor | None]) -> tuple[int, Tensor]:
        used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(used) != 1 or used[0][1].dtype == torch.bool or used[0][1].ndim != 1:
            self._refuse("indexing by several dims, by masks or by matrices", (x,))
        return used[0]

    def _known_indices(self, x: Tensor, dim: int, chosen: Tensor) -> list[int]:
        if chosen.device.type == "meta" or self._of(chosen) is not None or chosen.numel() > _MOST_INDICES:
            self._refuse("indexing by values that are loaded, or by too many", (x,))
        length = int(x.shape[dim])
        return [int(i) % length for i in chosen.tolist()]

    def result(self, name: str, tensor: Tensor, may_be_unwritten: bool) -> MappedTensor:
        """What a parameter is made of when the loader has ended."""
        made = self.content(tensor)
        for term in made.terms:
            if term.source == _UNWRITTEN and not may_be_unwritten:
                raise RecordingError(
                    f"{name}{term.box} was not written by the loader; it would be served uninitialised. Load it, or "
                    f"pass allow_unwritten=[{name!r}]"
                )
            if term.source == _COMPUTED and not may_be_unwritten:
                raise RecordingError(f"{name}{term.box} was given values that are not in the checkpoint")
        return made


_FACTORIES = {
    *("empty", "empty_strided", "zeros", "ones", "full"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"),
    "new_empty_strided",
}
_HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_FACTORIES, Recorder.factory),
    **dict.fromkeys(("clone", "_to_copy", "contiguous"), Recorder.convert),
    **dict.fromkeys(("zero_", "fill_"), Recorder.fill),
    **dict.fromkeys(("cat", "stack"), Recorder.join),
    **dict.fromkeys(("index_select", "index"), Recorder.select),
    **dict.fromkeys(("index_copy_", "index_put_"), Recorder.put),
    "scalar_tensor": Recorder.scalar,
    "copy_": Recorder.copy,
    "constant_pad_nd": Recorder.pad,
    "repeat": Recorder.repeat,
}
_HARMLESS = {"lift_fresh", "sym_size", "sym_stride", "is_same_size", "_has_compatible_shallow_copy_type"}


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, row by row."""
    whole = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
    return bool(tensor.is_contiguous()) and tensor.storage_offset() == 0 and whole


def _regions(target: Tensor, shape: Sequence[int]) -> Iterator[MapTerm]:
    """The boxes of a storage that a view covers: terms whose steps are all 1."""
    for term in terms_of_view(
        (0,) * target.ndim, tuple(target.shape), "", shape, int(target.storage_offset()), target.stride()
    ):
        yield from _unit_steps(term)


def _unit_steps(term: MapTerm) -> Iterator[MapTerm]:
    dim = next((axis for step, axis in zip(term.steps, term.axes, strict=True) if axis >= 0 and step != 1), None)
    if dim is None:
        yield term
        return
    for index in range(term.box.offsets[dim], term.box.ends[dim]):
        offsets, sizes = list(term.box.offsets), list(term.box.sizes)
        offsets[dim], sizes[dim] = index, 1
        part = term.cut(Box(tuple(offsets), tuple(sizes)))
        steps = tuple(1 if axis == dim else step for step, axis in zip(part.steps, part.axes, strict=True))
        yield from _unit_steps(replace(part, steps=steps))


def _without(term: MapTerm, box: Box) -> Iterator[MapTerm]:
    """The parts of a term outside of a box."""
    met = term.box.intersect(box)
    if met is None or met.numel == 0:
        yield term
        return
    left = term.box
    for dim in range(left.ndim):
        for low, high in ((left.offsets[dim], met.offsets[dim]), (met.ends[dim], left.ends[dim])):
            if low < high:
                offsets, sizes = list(left.offsets), list(left.sizes)
                offsets[dim], sizes[dim] = low, high - low
                yield term.cut(Box(tuple(offsets), tuple(sizes)))
        offsets, sizes = list(left.offsets), list(left.sizes)
        offsets[dim], sizes[dim] = met.offsets[dim], met.sizes[dim]
        left = Box(tuple(offsets), tuple(sizes))


def _index_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Indices as runs: the first of each, and how many follow each other."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], i - start
            start = i


def _tensors_in(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, list | tuple):
        for each in node:
            yield from _tensors_in(each)
    elif isinstance(node, dict):
        yield from _tensors_in(list(node.values()))


def _line_of_loader() -> str:
    """The innermost line outside of torch and of this file that runs now."""
    frame = sys._getframe(1)
    inside = (str(Path(torch.__file__).parent), __file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@public
def record(
    load_weights: LoadWeights,
    shapes: Mapping[str, TensorShape | Tensor | tuple[Sequence[int], torch.dtype]],
    *,
    into: nn.Module | Mapping[str, Tensor],
    check: bool = True,
    allow_unwritten: Sequence[str] = (),
) -> StateMap:
    """Run an engine's loading code once, without values, and return what it puts where as a `StateMap`.

    `load_weights` takes an iterable of names and tensors, as the engines' models do. `shapes` are the checkpoint's (the
    trainer's) tensors. `into` is the model or the tensors that are filled: this rank's own, of which the map is.
    Nothing is written to them. Arithmetic on weights is refused, and so are elements that nothing is written to, except
    for names that fit a pattern of `allow_unwritten`. With `check` the loader also runs on random values, if it can.

    >>> import torch, shardwise
    >>> served = {"qk": torch.empty(3, 2, dtype=torch.bfloat16)}
    >>> def load_weights(weights):
    ...     rows = {"q": slice(0, 2), "k": slice(2, 3)}
    ...     for name, loaded in weights:
    ...         served["qk"][rows[name]].copy_(loaded[:, :2])
    >>> shapes = {"q": ((2, 4), torch.float32), "k": ((1, 4), torch.float32)}
    >>> print(shardwise.sync.record(load_weights, shapes, into=served))
    qk: bf16[3, 2]
      [0:2, 0:2] = q[0:2, 0:2]  bf16 <- f32
      [2:3, 0:2] = k[0, 0:2]  bf16 <- f32
    """
    types = {name: _type_of(given) for name, given in shapes.items()}
    sources = {
        name: torch.empty(kind.shape, dtype=torch_dtype(find_dtype(kind.dtype)), device="meta")
        for name, kind in types.items()
    }
    recorder = Recorder(sources, tensors_of(into))
    with torch.no_grad(), recorder:
        try:
            load_weights(iter(list(sources.items())))
        except RecordingError:
            raise
        except Exception as error:
            if recorder.problem is not None:
                raise RecordingError(recorder.problem) from error
            raise
    if recorder.problem is not None:
        raise RecordingError(recorder.problem)
    targets: dict[str, MappedTensor] = {}
    for name, tensor in tensors_of(into).items():
        free = any(fnmatchcase(name, pattern) for pattern in allow_unwritten)
        made = recorder.result(name, tensor, free)
        if not any(term.source in (_UNWRITTEN, _COMPUTED) for term in made.terms):
            targets[name] = replace(made, terms=tuple(sorted(made.terms, key=lambda term: term.box)))
    found = StateMap(types, targets, "recorded").checked()
    if check:
        _check(load_weights, found, into)
    return found


def _type_of(given: Any) -> TensorShape:
    if isinstance(given, TensorShape):
        return given
    if isinstance(given, Tensor):
        return TensorShape(tuple(given.shape), dtype_of(given.dtype).name)
    shape, dtype = given
    return TensorShape.of(shape, str(dtype))


def _check(load_weights: LoadWeights, found: StateMap, into: nn.Module | Mapping[str, Tensor]) -> None:
    """Run the loader on random values and compare bit by bit, unless it fills meta tensors that cannot be replaced."""
    tensors = tensors_of(into)
    if not any(tensor.is_meta for tensor in tensors.values()):
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        data = {name: tensor.data for name, tensor in tensors.items()}
        try:
            _compare_run(load_weights, found, into)
        finally:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.data = data[name]
                    tensor.copy_(before[name])
    elif isinstance(into, nn.Module) and getattr(load_weights, "__self__", None) is into:
        twin = _with_memory(into)
        _compare_run(getattr(twin, load_weights.__name__), found, twin)


def _with_memory(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have memory; tensors that are shared, and what hangs on them, stay so."""
    memo: dict[int, Any] = {}
    given = [*module.parameters(), *module.buffers()]
    for old in given:
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
        memo[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    for old in given:
        memo[id(old)].__dict__.update(copy.deepcopy(old.__dict__, memo))
    return copy.deepcopy(module, memo)


def _compare_run(load_weights: LoadWeights, found: StateMap, into: nn.Module | Mapping[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    values = {name: _random(kind, generator) for name, kind in found.sources.items()}
    with torch.no_grad():
        load_weights(iter([(name, value.clone()) for name, value in values.items()]))
        for name, tensor in tensors_of(into).items():
            if name in found.targets and not _same_bits(tensor.detach().cpu(), apply_map(found, name, values)):
                raise RecordingError(
                    f"{name}: the loader gives other values than what was recorded; it depends on values, on time or "
                    "on the order of calls, and cannot be recorded"
                )


def apply_map(state_map: StateMap, name: str, sources: Mapping[str, Tensor]) -> Tensor:
    """The tensor that a map makes of whole source tensors.

    >>> types = {"w": TensorShape((2, 3), "i64")}
    >>> apply_map(StateMap.identity(types).transpose("w"), "w", {"w": torch.arange(6).reshape(2, 3)})
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    made = state_map.targets[name]
    assert made.scale is None, "values that are quantized after that are not those of the tensor"
    out = torch.empty(made.shape, dtype=torch_dtype(find_dtype(made.dtype)), device="cpu")
    for term in made.terms:
        if term.source is None:
            out[term.box.slices].fill_(term.fill)
        else:
            out[term.box.slices].copy_(sources[term.source][term.index].permute(term.order)[term.widen])
    return out


def _random(kind: TensorShape, generator: torch.Generator) -> Tensor:
    dtype = torch_dtype(find_dtype(kind.dtype))
    if dtype.is_floating_point:
        return torch.randn(kind.shape, generator=generator, device="cpu").to(dtype)
    return torch.randint(0, 100, kind.shape, generator=generator, device="cpu").to(dtype)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    ours, theirs = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(ours, theirs)
