"""Making ShardedTensors: filled with one value, with random values, or from what each rank already holds.

Every rank calls these functions alike. Random values are the same whatever the spec and the number of ranks; see
`shardwise.tensor.random.fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypedDict, TypeVar, Unpack

import torch

from shardwise.comm import Comm
from shardwise.geometry import LayoutError, ShardingSpec
from shardwise.tensor.comms import GroupOrComm
from shardwise.tensor.dispatch import register_function, sharded_leaves
from shardwise.tensor.inplace import draw_into, fill_with
from shardwise.tensor.random import init as _init  # noqa: F401  # registers the in-place functions of random values
from shardwise.tensor.random.distributions import Distribution, normal, uniform
from shardwise.tensor.sharded_tensor import ShardedTensor, allocate_locals, wrap

F = TypeVar("F", bound=Callable[..., ShardedTensor])


class CreationOptions(TypedDict, total=False):
    """What `empty` and the functions that fill an empty tensor take by keyword."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: GroupOrComm | None
    device: torch.device | str | None


def empty(
    sharding_spec: ShardingSpec | str,
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    pin_memory: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    process_group: GroupOrComm | None = None,
    device: torch.device | str | None = None,
) -> ShardedTensor:
    """A tensor whose values are not set. Local tensors are on the device the spec names, else on `device`.

    >>> from shardwise.geometry import ChunkSpec
    >>> empty(ChunkSpec(0, ranks=1), 3, 2, dtype=torch.int64).local_tensor().shape
    torch.Size([3, 2])
    """
    tensor = ShardedTensor(
        sharding_spec,
        *size,
        dtype=dtype,
        layout=layout,
        requires_grad=requires_grad,
        pin_memory=pin_memory and device is None,
        memory_format=memory_format,
        process_group=process_group,
    )
    if device is None:
        return tensor
    return _empty_on_device(tensor, torch.device(device), pin_memory)


def _empty_on_device(tensor: ShardedTensor, device: torch.device, pin_memory: bool = False) -> ShardedTensor:
    """An empty tensor like this one, on a device."""
    named = {d for d in tensor.sharding.table.devices or () if d is not None and torch.device(d) != device}
    if named:
        raise LayoutError(
            f"device={str(device)!r} was requested, and the spec {tensor.sharding.spec!r} places shards on "
            f"{sorted(named)}; omit one of them"
        )
    locals_ = allocate_locals(tensor.sharding, tensor.comm, tensor.dtype, device=device, pin_memory=pin_memory)
    made = wrap(tensor.sharding, locals_, tensor.comm, dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def takes_options_of(model: Callable[..., Any]) -> Callable[[F], F]:
    """Show the keywords of a function in the signature of one that passes them on."""

    def show(function: F) -> F:
        own = [p for p in signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        passed_on = [p for p in signature(model).parameters.values() if p.kind is p.KEYWORD_ONLY]
        positional = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        named = [p for p in own if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = signature(function).replace(  # type: ignore[attr-defined]  # as functools.wraps sets it
            parameters=[*positional, *passed_on, *named]
        )
        return function

    return show


@takes_options_of(empty)
def full(
    sharding_spec: ShardingSpec | str,
    size: Any,
    fill_value: complex,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """A tensor filled with one value; the dtype is the default one unless it is passed; options as for `empty`.

    >>> from shardwise.geometry import ChunkSpec
    >>> full(ChunkSpec(0, ranks=1), (2,), 7).local_tensor()
    tensor([7., 7.])
    """
    sizes = size if isinstance(size, Sequence) else (size,)
    tensor = empty(
        sharding_spec,
        *sizes,
        **options,
    )
    with torch.no_grad():
        return fill_with(tensor, fill_value)


@takes_options_of(empty)
def zeros(
    sharding_spec: ShardingSpec | str,
    *size: Any,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """A tensor of zeros; options as for `empty`.

    >>> from shardwise.geometry import ChunkSpec
    >>> zeros(ChunkSpec(0, ranks=1), 2).local_tensor()
    tensor([0., 0.])
    """
    return full(
        sharding_spec,
        size,
        0,
        **options,
    )


@takes_options_of(empty)
def ones(
    sharding_spec: ShardingSpec | str,
    *size: Any,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """A tensor of ones; options as for `empty`.

    >>> from shardwise.geometry import ChunkSpec
    >>> ones(ChunkSpec(0, ranks=1), 2, dtype=torch.int64).local_tensor()
    tensor([1, 1])
    """
    return full(
        sharding_spec,
        size,
        1,
        **options,
    )


@takes_options_of(empty)
def rand(
    sharding_spec: ShardingSpec | str,
    *size: Any,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """A tensor of uniform random numbers in [0, 1), the same for every spec and number of ranks.

    >>> from shardwise.comm import run_local
    >>> from shardwise.geometry import ChunkSpec
    >>> def whole(comm, dim):
    ...     return rand(ChunkSpec(dim, ranks=comm.world_size), 4, 6, seed=3).full()
    >>> torch.equal(run_local(whole, 3, 0)[0], run_local(whole, 2, 1)[0])
    True
    """
    tensor = empty(
        sharding_spec,
        *size,
        **options,
    )
    return _draw_values("rand", tensor, lambda: uniform(0, 1, tensor.dtype), generator, seed)


@takes_options_of(empty)
def randn(
    sharding_spec: ShardingSpec | str,
    *size: Any,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    **options: Unpack[CreationOptions],
) -> ShardedTensor:
    """A tensor of normal random numbers (mean 0, variance 1), the same for every spec and number of ranks.

    >>> from shardwise.geometry import ChunkSpec
    >>> values = randn(ChunkSpec(0, ranks=1), 10000, seed=3).local_tensor()
    >>> round(values.std().item(), 1)
    1.0
    """
    tensor = empty(
        sharding_spec,
        *size,
        **options,
    )
    return _draw_values("randn", tensor, lambda: normal(0, 1, tensor.dtype), generator, seed)


def _draw_values(
    label: str,
    tensor: ShardedTensor,
    values: Callable[[], Distribution],
    generator: torch.Generator | None,
    seed: int | None,
) -> ShardedTensor:
    with torch.no_grad():
        return draw_into(tensor, values, label=label, generator=generator, seed=seed)


def empty_like(
    tensor: ShardedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> ShardedTensor:
    """A tensor in the layout of another, its values not set.

    >>> from shardwise.geometry import ChunkSpec
    >>> empty_like(ones(ChunkSpec(0, ranks=1), 2), dtype=torch.int8).dtype
    torch.int8
    """
    dtype, place = dtype or tensor.dtype, torch.device(device) if device is not None else tensor.device
    locals_ = tuple(
        torch.empty(t.shape, dtype=dtype, device=t.device if device is None else place, pin_memory=pin_memory)
        for t in tensor.local_parts
    )
    made = wrap(tensor.sharding, locals_, tensor.comm, dtype=dtype, device=place)
    return made.requires_grad_(requires_grad)


def full_like(tensor: ShardedTensor, fill_value: complex, **options: Any) -> ShardedTensor:
    """A tensor in the layout of another, filled with one value; options as for `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> full_like(ones(ChunkSpec(0, ranks=1), 2), 5).local_tensor()
    tensor([5., 5.])
    """
    with torch.no_grad():
        return fill_with(empty_like(tensor, **options), fill_value)


def zeros_like(tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    """A tensor of zeros in the layout of another; options as for `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> zeros_like(ones(ChunkSpec(0, ranks=1), 2)).local_tensor()
    tensor([0., 0.])
    """
    return full_like(tensor, 0, **options)


def ones_like(tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    """A tensor of ones in the layout of another; options as for `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> ones_like(zeros(ChunkSpec(0, ranks=1), 2)).local_tensor()
    tensor([1., 1.])
    """
    return full_like(tensor, 1, **options)


def rand_like(
    tensor: ShardedTensor, *, generator: torch.Generator | None = None, seed: int | None = None, **options: Any
) -> ShardedTensor:
    """A tensor of uniform random numbers in the layout of another; options as for `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> x = zeros(ChunkSpec(0, ranks=1), 2)
    >>> torch.equal(rand_like(x, seed=1).local_tensor(), rand(ChunkSpec(0, ranks=1), 2, seed=1).local_tensor())
    True
    """
    made = empty_like(tensor, **options)
    return _draw_values("rand_like", made, lambda: uniform(0, 1, made.dtype), generator, seed)


def randn_like(
    tensor: ShardedTensor, *, generator: torch.Generator | None = None, seed: int | None = None, **options: Any
) -> ShardedTensor:
    """A tensor of normal random numbers in the layout of another; options as for `empty_like`.

    >>> from shardwise.geometry import ChunkSpec
    >>> x = zeros(ChunkSpec(0, ranks=1), 2)
    >>> torch.equal(randn_like(x, seed=1).local_tensor(), randn(ChunkSpec(0, ranks=1), 2, seed=1).local_tensor())
    True
    """
    made = empty_like(tensor, **options)
    return _draw_values("randn_like", made, lambda: normal(0, 1, made.dtype), generator, seed)


_LIKE: dict[Callable[..., Any], Callable[..., ShardedTensor]] = {
    torch.empty_like: empty_like,
    torch.zeros_like: zeros_like,
    torch.ones_like: ones_like,
    torch.full_like: full_like,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
}


def _register_like_function(function: Callable[..., Any], native: Callable[..., ShardedTensor]) -> None:
    """Let torch's function answer with ours; memory is always contiguous and strided.

    One value everywhere has no pending form: such tensors are made by the operator, which replicates them.
    """

    @register_function(function)
    def like(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        if function in (torch.ones_like, torch.full_like) and next(sharded_leaves(args, kwargs)).sharding.pending:
            return NotImplemented
        named = {"tensor" if name == "input" else name: value for name, value in kwargs.items()}
        return native(*args, **{name: v for name, v in named.items() if name not in ("layout", "memory_format")})


for _function, _native in _LIKE.items():
    _register_like_function(_function, _native)
