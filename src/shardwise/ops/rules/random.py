"""Tensors made after others, random values, conversions and copies, and the value of one element.

1. `zeros_like`, `new_zeros`, `rand_like`: tensors made after others, in their layout.
2. `dropout`, `bernoulli`, `randint_like`: random numbers come from the streams of sharded tensors, never from a rank's
   own generator, so that they do not depend on the layout and replicas stay equal.
3. Conversions and copies that torch's functions are broken down into.
4. `item()`: a Python number, the same on every rank.

Random values computed from uniform or normal ones: exponential, poisson, multinomial, randomised leaky ReLU ...

Each draws uniform or normal numbers through the streams of sharded tensors and computes the values from them, so that
replicas are equal and the layout changes nothing. No gradient passes to the parameters, as in torch.

`torch.distributions` of ShardedTensors, and `nn.init.sparse_`: draws that are alike on all ranks, in every layout.

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
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise._torch import DirichletFunction, assert_async, aten, draw_dirichlet, draw_standard_gamma
from shardwise.comm import Comm, DisagreementError
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Partial, Replicate, Shard, ShardingSpec
from shardwise.ops.implicit_replication import plain_as_replicated, replicate
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, takes_copies
from shardwise.ops.rules.pointwise import pointwise_strategies
from shardwise.ops.rules.view import pending_kinds
from shardwise.ops.unshard import move_input
from shardwise.ops.views import gather_dims, mesh_spec, mesh_spec_of, mesh_view, redistribute_to, resolve_partial
from shardwise.tensor.autograd_function import register_autograd_function
from shardwise.tensor.creation import empty, empty_like, rand, rand_like, randn, randn_like
from shardwise.tensor.dispatch import UnsupportedOpError, register_function, run_function
from shardwise.tensor.execute import check_conversion
from shardwise.tensor.move import format_layout_text, replicated_layout
from shardwise.tensor.random import Distribution, bernoulli, integers, normal, uniform
from shardwise.tensor.random_init import draw_bernoulli, draw_integers, draw_normal, draw_uniform, fill_value, sparse_
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import check_writable, draw_into, mark_copied


@register_sharding(
    [
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
    ]
)
@takes_copies
def like_rule(x: TensorMeta, *args: Any, **kwargs: Any) -> list[Any]:
    """As the tensor is cut; one value everywhere has no pending form, so a pending tensor yields a replicated one."""
    found = [Strategy((Replicate(),), (Replicate(),))]
    found += [Strategy((Shard(d),), (Shard(d),)) for d in range(x.ndim)]
    return found + [Strategy((Replicate(),), (p,)) for p in pending_kinds(x)]


@register_sharding(
    [
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.lift_fresh.default,
    ]
)
@takes_copies
def untagged_pointwise_rule(*args: Any, **kwargs: Any) -> list[Any]:
    """Pointwise operators that torch does not tag as such."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    found = pointwise_strategies(metas)
    return found + [Strategy((p,), (p,)) for p in pending_kinds(*metas) if len(metas) == 1]


@register_sharding(aten.copy_.default)
@takes_copies
def copy_into(x: TensorMeta, source: TensorMeta, non_blocking: bool = False) -> list[Strategy] | Steps:
    """As pointwise operators; what is pending is copied as addends, which must be of the right dtype and shape."""
    pending = pending_kinds(x, source)
    if pending and (x.dtype != source.dtype or x.shape != source.shape):
        return Steps(_copy_converted)
    return pointwise_strategies([x, source]) + [Strategy((p,), (p, p)) for p in pending]


def _copy_converted(target: ShardedTensor, source: Any, non_blocking: bool = False) -> ShardedTensor:
    """Copy values of another dtype or shape; they are converted before they become addends."""
    if source.dtype != target.dtype:
        source = convert_parts(source, dtype=target.dtype)
    if source.shape != target.shape:
        source = source.expand(tuple(target.shape))
    copied: ShardedTensor = aten.copy_.default(target, source, non_blocking)
    return copied


def _draw_like(draw: Callable[..., ShardedTensor], tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    known = {k: v for k, v in options.items() if k in ("dtype", "device", "pin_memory") and v is not None}
    return draw(tensor, **known)


register_sharding(aten.rand_like.default, Steps(partial(_draw_like, rand_like)))
register_sharding(aten.randn_like.default, Steps(partial(_draw_like, randn_like)))


def new_layout(tensor: ShardedTensor, size: Sequence[int]) -> Layout:
    """The layout of a new tensor that is made from another: as that one if the shape is the same, else everywhere."""
    spec = mesh_view(tensor.sharding)
    if spec is None:
        raise UnsupportedOpError(
            f"a new tensor of shape {list(size)} made from one in irregular pieces ({tensor.sharding.spec!r}) has no "
            "mesh; make it with shardwise.zeros(spec, size) and the like"
        )
    same = tuple(size) == tensor.sharding.shape and tensor.sharding.pending is None
    placements = spec.placements if same else (Replicate(),) * spec.mesh.ndim
    return MeshSpec(spec.mesh, placements, spec.order).layout(size)


def _make_new(op: Any, tensor: ShardedTensor, size: Sequence[int], *rest: Any, **options: Any) -> ShardedTensor:
    """Make the local part by the operator itself, with the local size."""
    layout, comm = new_layout(tensor, tuple(size)), tensor.comm
    if not tensor.local_parts:
        sample = op(torch.empty(0, dtype=tensor.dtype, device=tensor.device), (0,), *rest, **options)
        return wrap(layout, (), comm, dtype=sample.dtype, device=sample.device)
    return wrap(layout, (op(tensor.local_parts[0], layout.local_shapes(comm.rank)[0], *rest, **options),), comm)


for _op in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default):
    register_sharding(_op, Steps(partial(_make_new, _op), takes_copies=True))


@register_function(Tensor.new)
def _new_like(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """`x.new(size)`, by which torch's distributions make what they draw into; other forms are left to torch."""
    tensor, *sizes = args
    numbers = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    if kwargs or not sizes or not all(isinstance(n, int) for n in numbers):
        return NotImplemented
    return tensor.new_empty(numbers)


def _fill(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    """Overwrite a tensor with one value; a pending reduction gets addends that make it up."""
    if isinstance(value, ShardedTensor):
        return _copy_converted(tensor, value)
    try:
        return fill_value(tensor, value)
    except LayoutError:
        check_writable(tensor)
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise UnsupportedOpError(
                f"{format_layout_text(tensor.sharding)} is filled with a plain tensor that requires grad, and its "
                "gradient would be lost; redistribute to Shard or Replicate first"
            ) from None
        number = value.item() if isinstance(value, Tensor) else value
        filled: Any = aten.new_full.default(tensor, tuple(tensor.shape), number)
        written: ShardedTensor = aten.copy_.default(tensor, filled)
        return written


def draw_noise_like(tensor: ShardedTensor, probability: float, dtype: torch.dtype) -> ShardedTensor:
    """Ones with a probability, else zeros; replicated where the tensor is a pending sum."""
    made: Any = aten.empty_like.default(tensor, dtype=dtype)
    return draw_into(made, lambda: bernoulli(probability), label="dropout", fields={"p": probability})


def _drop(tensor: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    keep = 1.0 if train is False else 1.0 - p
    kept: Any = draw_noise_like(tensor, keep, torch.bool)
    return tensor * (0.0 if keep == 0 else 1.0 / keep) * kept, kept


def _draw_bernoulli_like(tensor: ShardedTensor, p: float, *, generator: Any = None) -> ShardedTensor:
    made = empty_like(tensor)
    return draw_into(made, lambda: bernoulli(p), label="bernoulli", fields={"p": p}, generator=generator)


def _draw_integers_like(
    tensor: ShardedTensor,
    low: int,
    high: int,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> ShardedTensor:
    made, fields = empty_like(tensor, dtype=dtype), {"low": low, "high": high}
    return draw_into(
        made, lambda: integers(low, high, made.dtype), label="randint_like", fields=fields, generator=generator
    )


def _draw_integers_below(tensor: ShardedTensor, high: int, **options: Any) -> ShardedTensor:
    return _draw_integers_like(tensor, 0, high, **options)


register_sharding(aten.native_dropout.default, Steps(_drop))
register_sharding(aten.bernoulli.p, Steps(_draw_bernoulli_like))
for _name in ("default", "generator", "low_dtype", "low_generator_dtype"):
    if _name in aten.randint_like.overloads():  # older torch takes no generator
        _draw = _draw_integers_like if _name.startswith("low") else _draw_integers_below
        register_sharding(getattr(aten.randint_like, _name), Steps(_draw))

# Values written in place
register_sharding(aten.uniform_.default, Steps(draw_uniform, takes_copies=True))
register_sharding(aten.normal_.default, Steps(draw_normal, takes_copies=True))
register_sharding(aten.bernoulli_.float, Steps(draw_bernoulli, takes_copies=True))
register_sharding(
    [getattr(aten.random_, name) for name in ("default", "to", "from")], Steps(draw_integers, takes_copies=True)
)
register_sharding([aten.fill_.Scalar, aten.fill_.Tensor], Steps(_fill, takes_copies=True))


def _fill_diagonal(tensor: ShardedTensor, fill_value: float, wrap: bool = False) -> ShardedTensor:
    """Write one value along the diagonal, whose places follow from the shape."""
    places = torch.zeros(tuple(tensor.shape), dtype=torch.bool, device=tensor.device).fill_diagonal_(True, wrap)
    written: ShardedTensor = aten.masked_fill_.Scalar(tensor, replicate(places, tensor), fill_value)
    return written


register_sharding(aten.fill_diagonal_.default, Steps(_fill_diagonal, takes_copies=True))
register_sharding(aten.zero_.default, Steps(lambda tensor: fill_value(tensor, 0), True, takes_copies=True))


# Copies and conversions


def _same_shape_strategies(x: TensorMeta) -> list[Strategy]:
    whole = Strategy((Replicate(),), (Replicate(),))
    return [whole, *(Strategy((Shard(d),), (Shard(d),)) for d in range(x.ndim))]


@register_sharding(aten.alias.default)
@takes_copies
def alias(x: TensorMeta) -> list[Strategy]:
    return _same_shape_strategies(x) + [Strategy((p,), (p,)) for p in pending_kinds(x)]


@register_sharding(aten._to_copy.default)
@takes_copies
def convert(x: TensorMeta, *, device: Any = None, **_: Any) -> list[Strategy] | Steps:
    """By parts where a sum is pending or the device may change; anything else as any operator of one tensor."""
    return (
        _same_shape_strategies(x)
        if x.layout.pending is None and device is None
        else Steps(convert_parts, takes_copies=True)
    )


def convert_parts(tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    """The tensor with its local parts converted, whatever its layout; reduced first where parts are not enough.

    A pending sum that becomes wider is made first, for half the bytes: norms convert what they read, and need the sum.
    It stays with the tensor, so that what reads it next does not sum again.
    """
    names = ("dtype", "device", "non_blocking", "memory_format")
    dtype, pending = options.get("dtype") or tensor.dtype, tensor.sharding.pending
    spec = mesh_view(tensor.sharding)
    if pending is not None and pending.op == "sum" and spec is not None and _is_wider(dtype, tensor.dtype):
        whole = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
        tensor = move_input(tensor, mesh_spec(spec.mesh, whole, spec.order).layout(tensor.sharding.shape), "conversion")
    try:
        check_conversion(tensor.sharding.pending, tensor.dtype, dtype)
    except ValueError:
        tensor = resolve_partial(tensor, "conversion")
    return tensor.to(**{k: v for k, v in options.items() if k in names and v is not None}, copy=True)


def _is_wider(one: torch.dtype, other: torch.dtype) -> bool:
    return one.is_floating_point and other.is_floating_point and one.itemsize > other.itemsize


def _register_eager(op: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Conjugated or negated now, not when it is read: local tensors are moved as they are in memory.

    The result is marked, since torch's own would share memory.
    """

    def local(view: Any, tensor: Tensor) -> Tensor:
        return function(tensor)

    def mark(result: ShardedTensor) -> ShardedTensor:
        return mark_copied(result, "a conjugate or negative")

    @register_sharding(op)
    def rule(x: TensorMeta) -> list[Strategy]:
        return [Strategy(s.outputs, s.inputs, local, finish=mark) for s in _same_shape_strategies(x)]


_register_eager(aten._conj.default, torch.conj_physical)
_register_eager(aten._neg_view.default, torch.neg)


def _detach(tensor: ShardedTensor) -> ShardedTensor:
    return tensor.detach()


def _check_errors(verdicts: ShardedTensor, *args: Any, **kwargs: Any) -> None:
    """Every rank sees the verdicts of all, so that all raise or none."""
    aten._linalg_check_errors.default(verdicts.detach().full(), *args, **kwargs)


def _item(tensor: ShardedTensor) -> Any:
    """What `item()`, `float()` and `bool()` ask for; pending sums are added up, and every rank gets the value."""
    return _take_whole(tensor, "item").item()


def _take_whole(tensor: Any, name: str) -> Tensor:
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach()  # type: ignore[no-any-return]  # a plain one
    whole = replicated_layout(tuple(tensor.shape), tensor.comm.ranks)
    return redistribute_to(tensor.detach(), whole, name).local_parts[0]


def _equal(tensor: Any, other: Any) -> bool:
    """What operators of torch ask of tensors inside; every rank gets the answer."""
    return torch.equal(_take_whole(tensor, "equal"), _take_whole(other, "equal"))


register_sharding(aten.detach.default, Steps(_detach, takes_copies=True))
register_sharding(aten._linalg_check_errors.default, Steps(_check_errors))
register_sharding(aten._local_scalar_dense.default, Steps(_item))
register_sharding(aten.equal.default, Steps(_equal))


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


register_sharding(aten.exponential_.default, Steps(_draw_exponential, takes_copies=True))
register_sharding(aten.cauchy_.default, Steps(_draw_cauchy, takes_copies=True))
register_sharding(aten.log_normal_.default, Steps(_draw_log_normal, takes_copies=True))
register_sharding(aten.geometric_.default, Steps(_draw_geometric, takes_copies=True))


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
register_sharding(aten.bernoulli_.Tensor, Steps(_draw_bernoulli_into, takes_copies=True))


def _draw_multinomial(
    weights: ShardedTensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Positions along the last dim, drawn with chances in proportion to the weights."""
    count = weights.shape[-1] if weights.ndim else 0
    if weights.ndim not in (1, 2) or num_samples <= 0 or not count or (num_samples > count and not replacement):
        raise RuntimeError(
            f"multinomial draws from rows with weights, of 1 or 2 dims, at least once, and at most once each without "
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
register_sharding(aten.rrelu_with_noise_.default, Steps(_draw_slopes_in_place, takes_copies=True))


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
        Replicate() if not fits or isinstance(p, Partial) else p.along(p.dim + more) if isinstance(p, Shard) else p
        for p in view.placements
    ]
    return MeshSpec(view.mesh, placements, view.order)


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
