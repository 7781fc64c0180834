"""`torch.distributions` of ShardedTensors, and `nn.init.sparse_`: draws that are alike on all ranks, in every layout.

1. Gamma, Dirichlet and binomial numbers are found from uniform ones by bisection of their distribution functions, so
   that one uniform number, which no layout changes, makes one value.
2. Most classes of `torch.distributions` draw plain tensors (`torch.rand(shape)`), on each rank its own. While a
   distribution that has ShardedTensors for parameters draws, such calls make ShardedTensors, cut as the parameters are.
   Constants that torch makes meanwhile are the same on every rank.
3. A number beside a ShardedTensor is expanded to a ShardedTensor, where torch would make a plain tensor of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise._torch import DirichletFunction, aten, draw_dirichlet, draw_standard_gamma
from shardwise.comm import Comm
from shardwise.geometry import Mesh, MeshSpec, Partial, Replicate, Shard, ShardingSpec
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.mixed import plain_as_replicated, replicate
from shardwise.ops.engine.registry import Steps, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import resolve_partial
from shardwise.ops.rules.pointwise import pointwise_strategies
from shardwise.tensor.autograd_function import register_autograd_function
from shardwise.tensor.creation import empty, rand, rand_like, randn
from shardwise.tensor.dispatch import UnsupportedOpError, register_function, run_function
from shardwise.tensor.random.init import sparse_
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_STEPS = 64  # of a bisection: halves the interval of a float64's logarithm down to its last bits


def _log_gamma_quantile(chance: Tensor, shape: Tensor) -> Tensor:
    """The logarithm of the number that a gamma variable of this shape stays below with this chance.

    >>> _log_gamma_quantile(torch.tensor([0.5]), torch.tensor([1.0], dtype=torch.float64)).exp()
    tensor([0.6931], dtype=torch.float64)
    """
    small = (chance.clamp_min(1e-300).log() + torch.lgamma(shape + 1)) / shape  # of a number that is nearly zero
    low, high = small.clamp_min(-700) - 1, torch.maximum((shape + 40 * shape.sqrt() + 80).log(), small + 1)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = torch.special.gammainc(shape, middle.exp()) < chance
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(small < -600, small, high)


def _draw_log_gamma(shape: ShardedTensor, generator: Any) -> tuple[Tensor, ...]:
    drawn = rand_like(shape, dtype=torch.float64, generator=generator)
    pairs = zip(drawn.local_parts, shape.local_parts, strict=True)
    return tuple(_log_gamma_quantile(u, a.detach().to(torch.float64)) for u, a in pairs)


def _standard_gamma(shape: ShardedTensor, generator: Any = None) -> ShardedTensor:
    """Gamma numbers; their gradient is that of moving the shape while the chance stays."""
    shape = resolve_partial(shape, "_standard_gamma")
    with torch.no_grad():
        logs = _draw_log_gamma(shape.detach(), generator)
    tiny = torch.finfo(shape.dtype).tiny
    values = [log.exp().to(shape.dtype).clamp_min(tiny) for log in logs]
    locals_ = tuple(_follow_shape(x, a) for x, a in zip(values, shape.local_parts, strict=True))
    return wrap(shape.sharding, locals_, shape.comm, dtype=shape.dtype, device=shape.device)


def _follow_shape(value: Tensor, shape: Tensor) -> Tensor:
    if not (shape.requires_grad and torch.is_grad_enabled()):
        return value
    slope: Tensor = aten._standard_gamma_grad.default(shape.detach(), value)
    return value + (shape - shape.detach()) * slope


def _sample_dirichlet(shape: ShardedTensor, generator: Any = None) -> Any:
    """Gamma numbers in proportion to their sum, by logarithms: small ones would all be zero."""
    shape = resolve_partial(shape.detach(), "_sample_dirichlet")
    logs = wrap(shape.sharding, _draw_log_gamma(shape, generator), shape.comm, dtype=torch.float64)
    tiny = torch.finfo(shape.dtype).tiny
    return torch.softmax(logs, -1).clamp(tiny, 1 - torch.finfo(shape.dtype).eps / 2).to(shape.dtype)


def _draw_binomial(count: Any, chance: Any, generator: Any = None) -> Any:
    count, chance = (resolve_partial(v.detach(), "binomial") for v in (count, chance))
    both: Any = count * 0 + chance  # one layout for both
    count = count + both * 0
    drawn = rand_like(both, dtype=torch.float64, generator=generator)
    count = count.redistribute(drawn.sharding, label="binomial")
    parts = zip(drawn.local_parts, count.local_parts, both.local_parts, strict=True)
    return wrap(both.sharding, tuple(_count_successes(*p) for p in parts), both.comm, dtype=both.dtype)


def _count_successes(drawn: Tensor, count: Tensor, chance: Tensor) -> Tensor:
    """The smallest number of successes that is not exceeded at least as often as `drawn`.

    >>> _count_successes(torch.tensor([0.1, 0.7, 0.9]), torch.tensor([2.0, 2.0, 2.0]), torch.tensor([0.5, 0.5, 1.0]))
    tensor([0., 1., 2.])
    """
    swap, n = chance > 0.5, count.to(torch.float64)
    p = torch.where(swap, 1 - chance, chance).to(torch.float64)
    log, odds = n * torch.log1p(-p), p.log() - torch.log1p(-p)
    total, found, k = log.exp(), torch.zeros_like(n), 0
    while bool((open_ := (total < drawn) & (found < n)).any()):
        log = log + torch.log(n - k) - math.log(k + 1) + odds
        total, k = torch.where(open_, total + log.exp(), total), k + 1
        found = torch.where(open_, torch.full_like(found, k), found)
    return torch.where(swap, n - found, found).to(chance.dtype)


register_sharding(aten._standard_gamma.default, Steps(_standard_gamma))
register_sharding(aten._sample_dirichlet.default, Steps(_sample_dirichlet))
register_sharding(aten.binomial.default, Steps(_draw_binomial))


@register_sharding([aten._standard_gamma_grad.default, aten._dirichlet_grad.default])
def gradients_of_draws(*tensors: TensorMeta) -> list[Any]:
    return pointwise_strategies(tensors)


register_autograd_function(DirichletFunction)


def _spec_for(like: ShardedTensor, shape: Sequence[int]) -> ShardingSpec:
    """A spec for draws: cut as the parameter is where they have its shape at their end, else replicated."""
    view, more = mesh_view(like.sharding), len(shape) - like.ndim
    if view is None:
        whole = MeshSpec(Mesh(("all",), like.comm.ranks), (Replicate(),))
        return like.sharding.spec if tuple(shape) == tuple(like.shape) else whole
    fits = more >= 0 and tuple(shape[more:]) == tuple(like.shape)
    placements = [
        Replicate() if not fits or isinstance(p, Partial) else _shift(p, more) if isinstance(p, Shard) else p
        for p in view.placements
    ]
    return MeshSpec(view.mesh, placements, view.order)


def _shift(cut: Shard, more: int) -> Shard:
    return Shard(cut.dim + more, cut.sizes, cut.groups, cut.block)


def _size_of(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


_MAKERS: dict[Any, Callable[..., Any]] = {torch.rand: rand, torch.randn: randn}
_FILLS = {Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.cauchy_}  # of a tensor that torch has just made
_DRAWS = {torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.binomial} | {
    draw_standard_gamma,
    draw_dirichlet,
}  # of parameters that are plain: numbers, which are the same on every rank
_NO_DRAWS = {torch.randint, torch.randperm}


class _DrawSharded(TorchFunctionMode):
    """Inside of it plain random numbers are drawn as ShardedTensors on the ranks of a parameter."""

    def __init__(self, like: ShardedTensor) -> None:
        super().__init__()
        self.like = like

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = _MAKERS.get(func)
        if make is not None:
            return self._make(make, _size_of(args), kwargs.get("dtype") or torch.get_default_dtype())
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(isinstance(a, ShardedTensor) for a in given):
            return func(*args, **kwargs)
        if func in _FILLS:
            return func(self._make(empty, tuple(args[0].shape), args[0].dtype), *args[1:], **kwargs)
        if func in _DRAWS:
            return func(*(replicate(a, self.like) if isinstance(a, Tensor) else a for a in args), **kwargs)
        if func in _NO_DRAWS:
            raise UnsupportedOpError(
                f"{func.__name__} inside of a distribution of ShardedTensors: every rank would draw numbers of its own"
            )
        return func(*args, **kwargs)

    def _make(self, make: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return make(_spec_for(self.like, shape), *shape, dtype=dtype, process_group=self.like.comm)


def _parameters_of(distribution: Any) -> list[ShardedTensor]:
    """The ShardedTensors that a distribution and those it is made of have."""
    held = list(vars(distribution).values())
    inner = [t for v in held if isinstance(v, torch.distributions.Distribution) for t in _parameters_of(v)]
    return [v for v in held if isinstance(v, ShardedTensor)] + inner


def _on_sharded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method without tensor arguments that draws ShardedTensors if the distribution has them."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _parameters_of(self)
        if not found:
            return method(self, *args, **kwargs)
        with _DrawSharded(max(found, key=lambda t: t.numel())), plain_as_replicated():
            return method(self, *args, **kwargs)

    return run


def _support_sharded(distribution: type[torch.distributions.Distribution]) -> None:
    """Let the methods of a class, and of those derived from it, draw ShardedTensors."""
    for name, own in list(vars(distribution).items()):
        if name in ("sample", "rsample", "entropy"):
            setattr(distribution, name, _on_sharded(own))
        elif name in ("mean", "variance", "mode") and isinstance(own, property) and own.fget is not None:
            setattr(distribution, name, property(_on_sharded(own.fget)))
    for derived in distribution.__subclasses__():
        _support_sharded(derived)


_support_sharded(torch.distributions.Distribution)


@register_function(torch.broadcast_tensors)
def _broadcast_numbers(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Tensors of one shape; what was a number is a ShardedTensor as well."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    like = next(t for t in tensors if isinstance(t, ShardedTensor))
    made = [replicate(t, like) if not isinstance(t, ShardedTensor) and t.ndim == 0 else t for t in tensors]
    return run_function(torch.broadcast_tensors, tuple(made), kwargs)


_plain_sparse = torch.nn.init.sparse_


@wraps(_plain_sparse)
def _sparse_of_any(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return (sparse_ if isinstance(tensor, ShardedTensor) else _plain_sparse)(tensor, *args, **kwargs)


torch.nn.init.sparse_ = _sparse_of_any
