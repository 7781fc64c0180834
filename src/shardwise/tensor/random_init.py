"""`torch.nn.init` and torch's in-place random methods on ShardedTensors; values do not depend on the layout.

torch's own functions work on a ShardedTensor: those that ask for an override and those that are built on the in-place
methods, all of which are registered here. The functions of this file have torch's names and arguments too; with them
`trunc_normal_` takes one draw for each element instead of a loop that compares the whole tensor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.random import bernoulli, integers, normal, truncated_normal, uniform
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.writes import draw_into, fill_with

Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Generator = torch.Generator | None


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator = None) -> Tensor:
    """Fill a tensor with uniform random numbers, in place.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor.creation import empty
    >>> x = uniform_(empty(ChunkSpec(0, ranks=1), 1000), 2, 3)
    >>> bool((x.local_tensor() >= 2).all() and (x.local_tensor() < 3).all())
    True
    """
    with torch.no_grad():
        if isinstance(tensor, ShardedTensor):
            return draw_uniform(tensor, a, b, generator=generator)
        return tensor.uniform_(a, b, generator=generator)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator = None) -> Tensor:
    """Fill a tensor with normal random numbers, in place."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Generator = None
) -> Tensor:
    """Fill a tensor with normal random numbers between `a` and `b`, in place.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor.creation import empty
    >>> x = trunc_normal_(empty(ChunkSpec(0, ranks=1), 1000), a=-1, b=1)
    >>> bool(x.local_tensor().abs().max() <= 1)
    True
    """
    if not isinstance(tensor, ShardedTensor):
        return nn.init.trunc_normal_(tensor, mean, std, a, b, generator=generator)
    fields = {"mean": mean, "std": std, "a": a, "b": b}
    with torch.no_grad():
        return draw_into(
            tensor,
            lambda: truncated_normal(mean, std, a, b, tensor.dtype),
            label="trunc_normal_",
            fields=fields,
            generator=generator,
        )


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill a tensor with one value, in place."""
    with torch.no_grad():
        return tensor.fill_(val)


def ones_(tensor: Tensor) -> Tensor:
    """Fill a tensor with ones, in place."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill a tensor with zeros, in place."""
    return constant_(tensor, 0.0)


def fan_in_and_out(shape: Sequence[int]) -> tuple[int, int]:
    """How many inputs and outputs a weight of this global shape connects to one value.

    >>> fan_in_and_out((8, 4, 3, 3))
    (36, 72)
    """
    if len(shape) < 2:
        raise ValueError(
            "Fan in and fan out can not be computed for tensor with fewer than 2 dimensions; "
            f"the shape is {tuple(shape)}"
        )
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator = None) -> Tensor:
    """Fill a weight with uniform random numbers of the variance 2 / (fan in + fan out), times the gain squared."""
    bound = math.sqrt(3.0) * gain * math.sqrt(2.0 / sum(fan_in_and_out(tensor.shape)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator = None) -> Tensor:
    """Fill a weight with normal random numbers of the variance 2 / (fan in + fan out), times the gain squared."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(fan_in_and_out(tensor.shape))), generator)


def kaiming_uniform_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Generator = None
) -> Tensor:
    """Fill a weight with uniform random numbers of the variance gain squared / fan.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor.creation import empty
    >>> x = kaiming_uniform_(empty(ChunkSpec(0, ranks=1), 64, 6), nonlinearity="relu")
    >>> bool(x.local_tensor().abs().max() <= 1)
    True
    """
    if 0 in tensor.shape:
        return _warn_no_elements(tensor)
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01, generator: Generator = None) -> Tensor:
    """Fill a matrix with normal random numbers and a share of each column with zeros, in place."""
    if tensor.ndim != 2:
        raise ValueError(f"sparse_ fills tensors of 2 dims, got {tensor.ndim}")
    zeros = math.ceil(sparsity * tensor.shape[0])
    with torch.no_grad():
        normal_(tensor, 0.0, std, generator)
        places = torch.rand_like(tensor, dtype=torch.float64).argsort(0).argsort(0)
        return tensor.masked_fill_(places < zeros, 0)


def kaiming_normal_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", generator: Generator = None
) -> Tensor:
    """Fill a weight with normal random numbers of the variance gain squared / fan."""
    if 0 in tensor.shape:
        return _warn_no_elements(tensor)
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), generator)


def _warn_no_elements(tensor: Tensor) -> Tensor:
    warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=3)
    return tensor


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: Any) -> float:
    modes = ["fan_in", "fan_out"]
    if mode.lower() not in modes:
        raise ValueError(f"Mode {mode.lower()} not supported, please use one of {modes}")
    fan = fan_in_and_out(tensor.shape)[modes.index(mode.lower())]
    return nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


@register_function(nn.init.uniform_)
def _init_uniform(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Tensor:
    return uniform_(*args, **kwargs)


@register_function(nn.init.normal_)
def _init_normal(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Tensor:
    return normal_(*args, **kwargs)


@register_function(nn.init.constant_)
def _init_constant(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Tensor:
    return constant_(*args, **kwargs)


@register_function(nn.init.kaiming_uniform_)
def _init_kaiming_uniform(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Tensor:
    return kaiming_uniform_(*args, **kwargs)


# What the in-place operators of these names do


def _as_written(number: Any) -> Any:
    """A number for messages, as the user wrote it: torch turns whole numbers that operators take into floats."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def draw_uniform(
    tensor: ShardedTensor, from_: float = 0.0, to: float = 1.0, *, generator: Generator = None
) -> ShardedTensor:
    fields = {"from": _as_written(from_), "to": _as_written(to)}
    return draw_into(
        tensor, lambda: uniform(from_, to, tensor.dtype), label="uniform_", fields=fields, generator=generator
    )


def draw_normal(
    tensor: ShardedTensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator = None
) -> ShardedTensor:
    fields = {"mean": _as_written(mean), "std": _as_written(std)}
    return draw_into(
        tensor, lambda: normal(mean, std, tensor.dtype), label="normal_", fields=fields, generator=generator
    )


def draw_bernoulli(tensor: ShardedTensor, p: Any = 0.5, *, generator: Generator = None) -> ShardedTensor:
    if isinstance(p, Tensor):
        raise UnsupportedOpError("bernoulli_ on a ShardedTensor takes one probability for all elements, got a tensor")
    return draw_into(tensor, lambda: bernoulli(p), label="bernoulli_", fields={"p": p}, generator=generator)


def draw_integers(
    tensor: ShardedTensor, from_: int | None = None, to: int | None = None, *, generator: Generator = None
) -> ShardedTensor:
    low, high = (None, from_) if to is None else (from_, to)
    fields = {"from": low, "to": high}
    return draw_into(
        tensor, lambda: integers(low, high, tensor.dtype), label="random_", fields=fields, generator=generator
    )


def fill_value(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    if isinstance(value, ShardedTensor) or not isinstance(tensor, ShardedTensor):
        raise UnsupportedOpError("fill_ takes a number or a plain 0-dim tensor; use x.full() of a ShardedTensor")
    return fill_with(tensor, value)
