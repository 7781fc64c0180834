"""Torch functions that are answered as a whole, since they are more than one operator, or none.

1. `torch.equal`, `torch.allclose`, `copy_`, `contiguous`: what every tensor can do.
2. `torch.autograd.grad` and `torch.autograd.backward`: on the local tensors, which are on the tape.
3. `torch.jit.trace`, which would record the operators of one rank: refused.

What `torch.compile` does with ShardedTensors: whatever touches them runs as it is, with one warning.

Dynamo, the tracer of `torch.compile`, follows Python code. It would follow ours into rules and layouts, which work with
NumPy and tables, and fail there. So when it is loaded it learns to leave the code of this package alone, and all that
this code calls. The program is then compiled around its ShardedTensors; `shardwise.compile` compiles all of it.

Torch's DTensor as a ShardedTensor, over the same memory.

Gradients pass through, since in both a sharded tensor gets a sharded gradient and all else a replicated one. What is
asked of torch's objects is found by attribute and class name, so that `torch.distributed.tensor` is not loaded for it.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise._torch import (
    TORCH_RELEASE,
    is_called_by_compiled_code,
    is_dynamo_at_work,
    pytree,
    skip_package,
    skip_recursively,
)
from shardwise.comm import Comm, any_rank
from shardwise.comm.current import comm_of_device_mesh, remember_device_mesh
from shardwise.comm.stand_in import is_tracing
from shardwise.geometry import LayoutError, Mesh, MeshSpec
from shardwise.geometry.mesh import to_mesh
from shardwise.geometry.placements import to_placement
from shardwise.geometry.specs import read_order
from shardwise.tensor.autograd_mixin import allow_writes_to_copies, has_format, tape_tensors
from shardwise.tensor.dispatch import RECORDS_ONE_RANK, UnsupportedOpError, register_function, sharded_leaves
from shardwise.tensor.move import check_move, format_layout_text, move_to, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import check_elements_apart, check_writable, copy_values, count_write

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@register_function(Tensor.copy_)
def _copy_into(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    """Copy into a ShardedTensor, in place: from one of any layout, or from a plain tensor that every rank holds.

    A plain tensor takes the whole value of a ShardedTensor, which is gathered.
    Addends that have to be converted are left to the operator, which knows when to reduce first.
    """
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        return target.copy_(source.full())  # as `load_state_dict` of a plain model does, on every rank
    if tuple(source.shape) != tuple(target.shape):
        shape = tuple(target.shape)
        own = tuple(source.shape)
        if len(own) > len(shape) or any(n not in (1, m) for n, m in zip(own[::-1], shape[::-1], strict=False)):
            raise ValueError(f"copy_ needs equal shapes, or one that broadcasts, got {shape} and {own}")
        source = source.expand(shape)
    with allow_writes_to_copies():
        check_writable(target)
    check_elements_apart(target, "copy_")
    if isinstance(source, ShardedTensor) and source.dtype != target.dtype and _is_pending(source, target):
        return NotImplemented
    copy_values(target, *_align_values(source, target))
    count_write(target)
    if target._copied_from is not None:
        target._copied_from.write_back()
    return target


def _is_pending(*tensors: ShardedTensor) -> bool:
    return any(t.sharding.pending is not None for t in tensors)


def _align_values(source: Tensor, target: ShardedTensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Another tensor's values in the layout of `target`, and the anchor of a rank that has none of them."""
    if isinstance(source, ShardedTensor):
        check_move(source, target.sharding, "align")
        return move_to(source, target.sharding, "align")
    comm = target.comm
    held = wrap(replicated_layout(tuple(source.shape), comm.ranks), (source,), comm)
    return move_to(held, target.sharding, "align")


def _compare(args: Args, kwargs: Kwargs, comm: Comm, compare: Any, label: str) -> bool:
    first, second = args[0], args[1]
    if not isinstance(first, ShardedTensor):
        first, second = second, first
    if tuple(first.shape) != tuple(second.shape):
        return False
    # What torch refuses for these dtypes it must refuse on every rank, also on one that holds nothing.
    compare(*(torch.zeros(1, dtype=t.dtype, device="cpu") for t in (first, second)), *args[2:], **kwargs)
    if first.sharding.pending is not None:
        dst = replicated_layout(tuple(first.shape), comm.ranks)
        check_move(first, dst, label)
        first = wrap(dst, move_to(first, dst, label)[0], comm)
    held, _ = _align_values(second, first)
    same = all(compare(a, b, *args[2:], **kwargs) for a, b in zip(first.local_parts, held, strict=True))
    return not any_rank(comm, not same, label=label)


@register_function(torch.equal, Tensor.equal)
def _equal(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> bool:
    """Whether two tensors of any layouts hold equal values; the same answer on every rank."""
    return _compare(args, kwargs, comm, torch.equal, "equal")


@register_function(torch.allclose, Tensor.allclose)
def _allclose(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> bool:
    """Whether two tensors of any layouts hold close values; the same answer on every rank."""
    return _compare(args, kwargs, comm, torch.allclose, "allclose")


@register_function(torch.Tensor.contiguous)
def _contiguous(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> ShardedTensor:
    """The tensor itself where the whole would be contiguous, else a copy: as torch has it, so that writes to the result
    are seen in the tensor, or not, in every layout."""
    tensor, memory_format = _read_contiguous(*args, **kwargs)
    if not has_format(tuple(tensor.shape), tensor._dense_strides, memory_format):
        return tensor.clone(memory_format=memory_format)
    if all(t.is_contiguous(memory_format=memory_format) for t in tensor.local_parts):
        return tensor
    local = tuple(t.contiguous(memory_format=memory_format) for t in tensor.local_parts)
    return wrap(tensor.sharding, local, comm, dtype=tensor.dtype, anchor=tensor._anchor)


def _read_contiguous(
    tensor: ShardedTensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[ShardedTensor, torch.memory_format]:
    return tensor, memory_format


Tensors = Tensor | Sequence[Tensor]


def _to_list(value: Tensors | None, count: int) -> list[Any]:
    """Tensors, or one of them, as a list; `count` times None where there are none."""
    if value is None:
        return [None] * count
    return [value] if isinstance(value, Tensor) else list(value)


def _tape_and_seeds(tensors: Sequence[Tensor], given: Tensors | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors on this rank's tape, and the gradient that each starts from."""
    seeds: list[Tensor | None] = []
    for tensor, seed in zip(tensors, _to_list(given, len(tensors)), strict=True):
        if isinstance(tensor, ShardedTensor):
            seeds += tensor._seed(seed)
        else:
            seeds.append(seed.full() if isinstance(seed, ShardedTensor) else seed)
    return [t for tensor in tensors for t in tape_tensors(tensor)], seeds


@register_function(torch.autograd.backward)
def _backward(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> None:
    backward(*args, **kwargs)


def backward(
    tensors: Tensors,
    grad_tensors: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensors | None = None,
) -> None:
    """What `torch.autograd.backward` does, for plain tensors and ShardedTensors together."""
    roots, seeds = _tape_and_seeds(_to_list(tensors, 0), grad_tensors)
    leaves = None if inputs is None else [t for one in _to_list(inputs, 0) for t in tape_tensors(one)]
    torch.autograd.backward(roots, seeds, retain_graph, create_graph, inputs=leaves)


@register_function(torch.autograd.grad)
def _grad(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    return grad(*args, **kwargs)


def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """What `torch.autograd.grad` does; the gradient of a ShardedTensor is one, in the dual layout."""
    if is_grads_batched:
        raise UnsupportedOpError(
            "torch.autograd.grad with is_grads_batched=True is not supported for ShardedTensors; use a loop"
        )
    wanted = _to_list(inputs, 0)
    roots, seeds = _tape_and_seeds(_to_list(outputs, 0), grad_outputs)
    leaves = [t for one in wanted for t in tape_tensors(one)]
    found = iter(
        torch.autograd.grad(
            roots,
            leaves,
            seeds,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
    )
    return tuple(_assemble_gradient(one, list(islice(found, len(tape_tensors(one))))) for one in wanted)


def _assemble_gradient(tensor: Tensor, grads: Sequence[Tensor | None]) -> Tensor | None:
    known = tuple(g for g in grads if g is not None)
    if len(known) < len(grads):
        return None
    if not isinstance(tensor, ShardedTensor):
        return known[0]
    return tensor._gradient(known)


def _refuse_recording(record: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that records operators, which says what to do where it gets ShardedTensors."""

    @wraps(record)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, ShardedTensor) for leaf in pytree.tree_iter((args, kwargs))):
            raise UnsupportedOpError(RECORDS_ONE_RANK)
        return record(*args, **kwargs)

    return run


torch.jit.trace = _refuse_recording(torch.jit.trace)  # it asks no types of arguments
torch.jit.trace_module = _refuse_recording(torch.jit.trace_module)

DYNAMO = "torch._dynamo"
_PACKAGE = "shardwise"
_warned: list[bool] = []
_MAY_SEE_NOTHING = TORCH_RELEASE < (2, 12)  # it does not follow the forward of torch's own modules after a hook of ours


def watch_for_dynamo() -> None:
    """Prepare dynamo for ShardedTensors, now or when it is loaded: loading it takes long, so it is not done here."""
    if DYNAMO in sys.modules:
        _prepare()
    else:
        sys.meta_path.insert(0, _DynamoFinder())


class _DynamoFinder(MetaPathFinder):
    """Finds dynamo as the others do, and has something done after it is loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithEnd(spec.loader)
        return spec


class _LoaderWithEnd(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _prepare()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def _prepare() -> None:
    skip_package(_PACKAGE)
    for code in _all_code():
        skip_recursively(code)
    ShardedTensor.__tensor_flatten__ = property(_warn_once)  # type: ignore[attr-defined]  # what dynamo asks for


def _warn_once(tensor: ShardedTensor) -> Any:
    """Say that we are not a tensor subclass that dynamo can follow, and warn if it is dynamo that asks."""
    if not _warned and is_dynamo_at_work() and not is_tracing():
        _warn()
    raise AttributeError("a ShardedTensor cannot be taken apart: its layout is not a constant of a graph")


def warn_compiled_callers() -> None:
    """Warn where a sharded module is called by compiled code: dynamo before torch 2.12 may never see its tensors."""
    if _MAY_SEE_NOTHING and not _warned and DYNAMO in sys.modules and not is_tracing() and is_called_by_compiled_code():
        _warn()


def _warn() -> None:
    _warned.append(True)
    warnings.warn(
        "torch.compile runs what touches ShardedTensors without compiling it; use shardwise.compile(model), which "
        "compiles all of it",
        stacklevel=3,
    )


def _all_code() -> Iterator[types.CodeType]:
    """The code of all functions of the package that are loaded, those inside of others too."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for value in list(vars(module).values()):
                yield from _code_of(value, module.__name__)


def _code_of(value: Any, module: str) -> Iterator[types.CodeType]:
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType):
        yield from _nested(value.__code__)
    elif isinstance(value, type) and value.__module__ == module:
        for part in vars(value).values():
            if not isinstance(part, type):
                yield from _code_of(part, module)
    if isinstance(inner, types.FunctionType):
        yield from _nested(inner.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


TENSOR_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> bool:
    """Whether this is torch's DTensor; whoever has one has loaded its module, which takes long to load.

    Another thread may be loading it right now: then nobody has one.
    """
    kind = getattr(sys.modules.get(TENSOR_MODULE), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def from_dtensor(tensor: DTensor, comm: Comm | None = None) -> ShardedTensor:
    """A DTensor as a ShardedTensor over the same memory.

    `comm` holds the mesh's ranks; the default is the mesh's own group for one axis, else the world if the mesh covers
    it. Placements without a counterpart (torch's private ones) are refused.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> import torch
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> x = from_dtensor(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
    >>> type(x).__name__, x.local_tensor().shape
    ('ShardedTensor', torch.Size([4]))
    >>> dist.destroy_process_group()
    """
    if not is_dtensor(tensor):
        raise TypeError(
            f"from_dtensor takes a DTensor, got {type(tensor).__name__}; shard(x, spec) lays out a plain one"
        )
    spec = tensor._spec
    shape = tuple(spec.shape)
    native = spec_from_dtensor(spec.mesh, spec.placements, shape, dtensor_split_order(spec))
    layout = native.layout(shape)
    comm = comm or comm_of_device_mesh(spec.mesh)
    remember_device_mesh(spec.mesh)
    if comm.rank not in native.mesh.ranks:
        return wrap(layout, (), comm, dtype=tensor.dtype)
    local: Any = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    if layout.local_shapes(comm.rank) != (tuple(local.shape),):
        raise LayoutError(
            f"the DTensor {spec} has {tuple(local.shape)} on rank {comm.rank}, where {format_layout_text(layout)} has "
            f"{layout.local_shapes(comm.rank)[0]}; redistribute it to plain Shard placements first"
        )
    return wrap(layout, (local,), comm)


def convert_dtensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of ShardedTensors with DTensors among them as ShardedTensors of the same comm."""
    if TENSOR_MODULE not in sys.modules or not any(is_dtensor(leaf) for leaf in pytree.tree_iter((args, kwargs))):
        return args, kwargs
    comm = next(sharded_leaves(args, kwargs)).comm
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: from_dtensor(leaf, comm) if is_dtensor(leaf) else leaf, (args, kwargs)
    )
    return found


def spec_from_dtensor(
    device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], shard_order: Any = None
) -> MeshSpec:
    """A DTensor's mesh and placements as a MeshSpec; strided shards become an order of splits."""
    mesh = to_mesh(device_mesh)
    order = None if shard_order is None else [mesh.axes[axis] for entry in shard_order for axis in entry.mesh_dims]
    for dim in {p.dim for p in placements if type(p).__name__ == "_StridedShard"}:
        check_even(mesh, [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim], dim, shape)
    return MeshSpec(mesh, [to_placement(p) for p in placements], order or read_order(mesh, placements))


def check_even(mesh: Mesh, axes: Sequence[int], dim: int, shape: Sequence[int]) -> None:
    """Raise unless axes that split a dim in another order than the mesh's split it evenly."""
    parts = prod(mesh.shape[a] for a in axes)
    if shape[dim] % parts:
        raise LayoutError(
            f"dim {dim} of length {shape[dim]} is split by {parts} ranks in another order than the mesh's; torch's "
            f"strided shards mean the same as ours only for multiples of {parts}: redistribute first"
        )


def dtensor_split_order(spec: Any) -> Any:
    """The order of splits that a DTensor's spec has apart from its placements; None where strided shards say it."""
    strided = any(type(p).__name__ == "_StridedShard" for p in spec.placements)
    return None if strided else getattr(spec, "shard_order", None)
