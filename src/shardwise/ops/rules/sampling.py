"""Random values computed from uniform or normal ones: exponential, poisson, multinomial, randomised leaky ReLU ...

Each draws uniform or normal numbers through the streams of sharded tensors and computes the values from them, so that
replicas are equal and the layout changes nothing. No gradient passes to the parameters, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import assert_async, aten
from shardwise.comm import DisagreementError
from shardwise.ops.engine.registry import Steps
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import gather_dims, mesh_spec_of, resolve_partial
from shardwise.tensor.creation import empty, empty_like, rand_like, randn_like
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.inplace import draw_into
from shardwise.tensor.random.distributions import Distribution, normal, uniform
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


def _draw_checked(
    like: Any,
    given: Any,
    is_wrong: Callable[[Tensor], Tensor],
    rule: str,
    values: Callable[[], Distribution],
    waits: bool = False,
    **how: Any,
) -> Any:
    """Random numbers in the layout of `like`, unless an element of a parameter is wrong on some rank: then all raise.

    The verdict travels with the exchange in which ranks agree on the numbers. As in torch, a device is waited for only
    with `waits`; without it the device raises when it computes.
    """
    parts = given.local_parts if isinstance(given, ShardedTensor) else ()

    def distribution() -> Distribution:
        for part in (p for p in parts if not p.is_meta):
            wrong = is_wrong(part).any()
            if part.device.type != "cpu" and not waits:
                assert_async(~wrong, rule)
            elif bool(wrong):
                raise RuntimeError(rule)
        return values()

    made = empty_like(like, dtype=how.pop("dtype", None))
    try:
        return draw_into(made, distribution, **how)
    except DisagreementError as error:
        raise RuntimeError(str(error)) from error


def _draw_normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """Normal numbers around means, with deviations; one of the two may be a number."""
    mean, std = (resolve_partial(v.detach(), "normal") if isinstance(v, ShardedTensor) else v for v in (mean, std))
    both, rule = mean + std, "normal expects all elements of std >= 0.0"
    values = partial(normal, 0, 1, both.dtype)
    how = dict(label="normal", generator=generator)
    return mean + std * _draw_checked(both, std, lambda t: t < 0, rule, values, waits=True, **how)


register_sharding([aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor], Steps(_draw_normal))


def _draw_poisson(rate: ShardedTensor, generator: Any = None) -> ShardedTensor:
    rate = resolve_partial(rate.detach(), "poisson")
    values, rule = partial(uniform, 0, 1, torch.float64), "invalid Poisson rate, expected rate to be non-negative"
    how = dict(label="poisson", generator=generator, dtype=torch.float64)
    drawn = _draw_checked(rate, rate, lambda t: ~(t >= 0), rule, values, waits=True, **how)  # it is waited for below
    locals_ = tuple(_count_events(u, r) for u, r in zip(drawn.local_parts, rate.local_parts, strict=True))
    return wrap(rate.sharding, locals_, rate.comm, dtype=rate.dtype, device=rate.device)


register_sharding(aten.poisson.default, Steps(_draw_poisson))

_HALF_STEP = 2.0**-54  # half of the distance between uniform numbers: no logarithm is that of 0


def _write_drawn(tensor: ShardedTensor, drawn: Any) -> Any:
    return tensor.copy_(drawn)


def _draw_uniform_like(tensor: ShardedTensor, generator: Any) -> Any:
    return rand_like(tensor.detach(), dtype=torch.float64, generator=generator)


def _draw_exponential(tensor: ShardedTensor, lambd: float = 1.0, *, generator: Any = None) -> Any:
    if not lambd > 0:
        raise RuntimeError(f"exponential_ expects lambda > 0, but found lambda={lambd}")
    return _write_drawn(tensor, (_draw_uniform_like(tensor, generator) + _HALF_STEP).log() / -lambd)


def _draw_cauchy(tensor: ShardedTensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> Any:
    if not sigma > 0:
        raise RuntimeError(f"cauchy_ expects sigma > 0, but found sigma={sigma}")
    turns = _draw_uniform_like(tensor, generator) - (0.5 - _HALF_STEP)
    return _write_drawn(tensor, median + sigma * (math.pi * turns).tan())


def _draw_log_normal(tensor: ShardedTensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> Any:
    if not std > 0:
        raise RuntimeError(f"log_normal_ expects std > 0, but found std={std}")
    drawn: Any = randn_like(tensor.detach(), dtype=torch.float64, generator=generator)
    return _write_drawn(tensor, (mean + std * drawn).exp())


def _draw_geometric(tensor: ShardedTensor, p: float, *, generator: Any = None) -> Any:
    """How many trials there are up to the first success."""
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but found p={p}")
    trials = (_draw_uniform_like(tensor, generator) + _HALF_STEP).log() / math.log1p(-p)
    return _write_drawn(tensor, trials.ceil().clamp(min=1))


register_sharding(aten.exponential_.default, Steps(_draw_exponential))
register_sharding(aten.cauchy_.default, Steps(_draw_cauchy))
register_sharding(aten.log_normal_.default, Steps(_draw_log_normal))
register_sharding(aten.geometric_.default, Steps(_draw_geometric))


def _count_events(chance: Tensor, rate: Tensor) -> Tensor:
    """The smallest count that is at least as likely not to be exceeded as `chance`, by bisection.

    >>> _count_events(torch.tensor([0.1, 0.5, 0.99]), torch.tensor([2.0, 2.0, 0.0]))
    tensor([0., 2., 0.])
    """
    wide = rate.to(torch.float64)
    low, high = torch.full_like(wide, -1), (wide + 12 * wide.sqrt() + 40).ceil()
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, wide) >= chance
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.to(rate.dtype)


_PROBABILITIES = "bernoulli expects all probabilities to be between 0 and 1"


def _is_no_probability(t: Tensor) -> Tensor:
    return ~((t >= 0) & (t <= 1))


def _draw_bernoulli(chance: ShardedTensor, *, generator: Any = None) -> Any:
    """Ones with the probabilities that the tensor has, else zeros."""
    chance = resolve_partial(chance.detach(), "bernoulli")
    values = partial(uniform, 0, 1, chance.dtype)
    how = dict(label="bernoulli", generator=generator)
    drawn = _draw_checked(chance, chance, _is_no_probability, _PROBABILITIES, values, **how)
    return (drawn < chance).to(chance.dtype)


def _draw_bernoulli_into(x: ShardedTensor, chance: Any, generator: Any = None) -> Any:
    """The same, written in place; the probabilities may broadcast."""
    chance = resolve_partial(chance.detach(), "bernoulli") if isinstance(chance, ShardedTensor) else chance
    values = partial(uniform, 0, 1, chance.dtype)
    how = dict(label="bernoulli", generator=generator, dtype=chance.dtype)
    drawn = _draw_checked(x.detach(), chance, _is_no_probability, _PROBABILITIES, values, **how)
    return x.copy_(drawn < chance)


register_sharding(aten.bernoulli.default, Steps(_draw_bernoulli))
register_sharding(aten.bernoulli_.Tensor, Steps(_draw_bernoulli_into))


def _draw_multinomial(
    weights: ShardedTensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Positions along the last dim, drawn with chances in proportion to the weights."""
    count = weights.shape[-1] if weights.ndim else 0
    if weights.ndim not in (1, 2) or num_samples <= 0 or (num_samples > count and not replacement):
        raise RuntimeError(
            f"multinomial draws from rows of weights, of 1 or 2 dims, at least once, and at most once each without "
            f"replacement; got the shape {tuple(weights.shape)} and num_samples={num_samples}"
        )
    rows = gather_dims(resolve_partial(weights.detach(), "multinomial"), (weights.ndim - 1,), "multinomial")
    rule = "probability tensor contains either `inf`, `nan` or element < 0"
    values, wrong = partial(uniform, 0, 1, torch.float64), lambda t: ~((t >= 0) & (t < torch.inf))
    if not replacement:
        how = dict(label="multinomial", generator=generator, dtype=torch.float64)
        waits = -torch.log1p(-_draw_checked(rows, rows, wrong, rule, values, **how))
        return (rows / waits).topk(num_samples, -1).indices
    spec = mesh_spec_of(rows)
    if spec is None:
        raise UnsupportedOpError("multinomial of a tensor in irregular pieces; redistribute to a mesh or chunk layout")
    shape = (*rows.shape[:-1], num_samples)
    like = empty(spec, *shape, dtype=torch.float64, process_group=rows.comm)
    drawn = _draw_checked(like, rows, wrong, rule, values, label="multinomial", generator=generator)
    pairs = zip(rows.local_parts, drawn.local_parts, strict=True)
    return wrap(drawn.sharding, tuple(_find_positions(w, u) for w, u in pairs), rows.comm, dtype=torch.int64)


register_sharding(aten.multinomial.default, Steps(_draw_multinomial))


def _find_positions(weights: Tensor, chance: Tensor) -> Tensor:
    """For each chance the first position whose weights, with those before it, make up more than that share."""
    sums = weights.to(torch.float64).cumsum(-1)
    total = sums[..., -1:]
    return torch.searchsorted(sums, torch.minimum(chance * total, torch.nextafter(total, -total)), right=True)


def _draw_slopes(
    x: ShardedTensor,
    noise: ShardedTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """Negative values times slopes that are drawn in training and fixed otherwise; `noise` takes the slopes."""
    x = resolve_partial(x, "rrelu")
    if not training:
        return aten.leaky_relu.default(x, (lower + upper) / 2)
    drawn: Any = rand_like(x.detach(), generator=generator)
    slopes = torch.where(x.detach() <= 0, drawn * (upper - lower) + lower, 1.0)
    noise.copy_(slopes)
    return x * slopes


def _draw_slopes_in_place(x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    values = aten.clone.default(x)  # autograd may keep them, and x is overwritten
    return aten.copy_.default(x, _draw_slopes(values, *args, **kwargs))


register_sharding(aten.rrelu_with_noise.default, Steps(_draw_slopes))
register_sharding(aten.rrelu_with_noise_.default, Steps(_draw_slopes_in_place))
