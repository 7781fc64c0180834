"""Operators that draw random numbers: dropout, bernoulli, randint_like. What they draw does not depend on the layout.

They go through the streams of sharded tensors, never through a rank's own generator, so replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.ops.engine import call_op
from shardwise.tensor.creation import empty_like, rand_like
from shardwise.tensor.dispatch import handler
from shardwise.tensor.distributions import bernoulli, integers
from shardwise.tensor.inplace import draw_into
from shardwise.tensor.sharded_tensor import ShardedTensor

aten = torch.ops.aten
Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def noise_like(tensor: ShardedTensor, probability: float, dtype: torch.dtype) -> ShardedTensor:
    """Ones with a probability, else zeros; replicated where the tensor is a pending sum."""
    made: ShardedTensor = call_op(aten.empty_like.default, (ShardedTensor,), (tensor,), {"dtype": dtype})
    return draw_into(made, lambda: bernoulli(probability), label="dropout", fields={"p": probability})


@handler(aten.native_dropout.default)
def _native_dropout(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    tensor, p, train = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("train", True)
    keep = 1.0 if train is False else 1.0 - p
    kept = noise_like(tensor, keep, torch.bool)
    scaled = call_op(aten.mul.Tensor, types, (tensor, 0.0 if keep == 0 else 1.0 / keep), {})
    return call_op(aten.mul.Tensor, types, (scaled, kept), {}), kept


@handler(aten.bernoulli.default)
def _bernoulli(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    """Ones with the probabilities that the tensor holds."""
    tensor: ShardedTensor = args[0]
    drawn = rand_like(tensor.detach(), generator=kwargs.get("generator"))
    return call_op(aten.lt.Tensor, types, (drawn, tensor.detach()), {}).to(tensor.dtype)


@handler(aten.bernoulli.p)
def _bernoulli_p(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    made = empty_like(args[0])
    p = args[1]
    return draw_into(made, lambda: bernoulli(p), label="bernoulli", fields={"p": p}, generator=kwargs.get("generator"))


@handler(aten.randint_like.default, aten.randint_like.low_dtype)
def _randint_like(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    low, high = (0, args[1]) if len(args) == 2 else (args[1], args[2])
    made = empty_like(args[0], dtype=kwargs.get("dtype"))
    return draw_into(
        made, lambda: integers(low, high, made.dtype), label="randint_like", fields={"low": low, "high": high}
    )
