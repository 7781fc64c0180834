"""Rules of matrix products, from one description of each: which letters are rows, columns, batches and sums.

`linear` and `matmul` are operators of their own: no dims are merged, so inner dims may be split in any way.

Operators that work on some dims of each tensor as a whole, and alike on all others: those may be sharded.

Factorisations and solvers of matrices, Fourier transforms, windows over images. What has no other dims is computed
whole, and the engine says so in `explain()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import aten, decompose, is_any_autocast_enabled
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.implicit_replication import register_plain_maker
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, ignores_lengths, takes_copies
from shardwise.ops.rules.pointwise import pointwise_strategies
from shardwise.ops.views import LocalView


def product_strategies(formula: str, operands: Sequence[TensorMeta]) -> list[Strategy]:
    """Strategies of a product written as in einsum: "mk,kn->mn".

    A letter may be sharded wherever it appears; a letter that is summed over leaves a pending sum. What is pending may
    stay so. No other tensor is made pending: zeros in place of addends are not numbers beside an infinity.
    """
    left, out = formula.split("->")
    letters = left.split(",")
    found = [Strategy((Replicate(),), (Replicate(),) * len(letters))]
    for letter in dict.fromkeys("".join(letters)):
        inputs = tuple(_shard_of(letter, names) for names in letters)
        result: Placement = Shard(out.index(letter)) if letter in out else Partial("sum")
        found.append(Strategy((result,), inputs))
    for index, operand in enumerate(operands):
        if any(isinstance(p, Partial) for p in operand.placements):
            pended = tuple(Partial("sum") if i == index else Replicate() for i in range(len(letters)))
            found.append(Strategy((Partial("sum"),), pended))
    return found


def _shard_of(letter: str, names: str) -> Placement:
    return Shard(names.index(letter)) if letter in names else Replicate()


@register_sharding(aten.mm.default)
@ignores_lengths
@takes_copies
def mm(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("mk,kn->mn", [a, b])


@register_sharding(aten.bmm.default)
@ignores_lengths
@takes_copies
def bmm(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("bmk,bkn->bmn", [a, b])


@register_sharding(aten.mv.default)
@ignores_lengths
def mv(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("mk,k->m", [a, b])


@register_sharding(aten.dot.default)
def dot(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("k,k->", [a, b])


def _bias_strategies(bias: TensorMeta, formula: str, operands: Sequence[TensorMeta]) -> list[Strategy]:
    """A product plus a tensor that broadcasts to it: the bias is cut as the result is, and pending where that is."""
    ndim = len(formula.split("->")[1])
    return [
        Strategy(s.outputs, (_bias_placement(bias, s.outputs[0], ndim), *s.inputs))
        for s in product_strategies(formula, operands)
    ]


def _bias_placement(bias: TensorMeta, result: Placement | None, ndim: int) -> Placement:
    if isinstance(result, Shard):
        own = result.dim - (ndim - bias.ndim)
        return Shard(own) if own >= 0 and bias.shape[own] != 1 else Replicate()
    return result or Replicate()


@register_sharding(aten.addmm.default)
@ignores_lengths
@takes_copies
def addmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _bias_strategies(bias, "mk,kn->mn", [a, b])


@register_sharding(aten.baddbmm.default)
@ignores_lengths
@takes_copies
def baddbmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _bias_strategies(bias, "bmk,bkn->bmn", [a, b])


@register_sharding(aten.addmv.default)
def addmv(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return [replace(s, local_if_empty=_addmv_of_rows) for s in _bias_strategies(bias, "mk,k->m", [a, b])]


def _addmv_of_rows(view: LocalView, bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Of no rows and a bias of one element torch returns one element."""
    return aten.addmv.default(bias.expand(a.shape[:1]), a, b, **options)  # type: ignore[no-any-return]


@register_sharding(aten.addr.default)
def addr(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _bias_strategies(bias, "m,n->mn", [a, b])


@register_sharding(aten._euclidean_dist.default)
def euclidean_dist(a: TensorMeta, b: TensorMeta) -> list[Any]:
    """Distances of many rows, by a product; the decomposition has no gradient where rows are equal."""
    batch = LETTERS[: a.ndim - 2]
    return [s for s in product_strategies(f"{batch}m,{batch}n->{batch}mn", ()) if not _has_partial(s)]


@register_sharding(aten.linalg_cross.default)
def cross(a: TensorMeta, b: TensorMeta, *, dim: int = -1) -> list[Strategy]:
    """Products of the elements of one dim, the others broadcast."""
    at = dim % a.ndim
    return [s for s in pointwise_strategies([a, b]) if s.outputs != (Shard(at),)]


def _has_partial(strategy: Strategy) -> bool:
    return any(isinstance(p, Partial) for p in (*strategy.inputs, *strategy.outputs))


LETTERS = "abcdefghij"


@register_sharding(aten.linear.default)
@ignores_lengths
@takes_copies
def linear(x: TensorMeta, weight: TensorMeta, bias: TensorMeta | None = None) -> list[Any]:
    rows = LETTERS[: x.ndim - 1]
    out = "n" if weight.ndim == 2 else ""
    strategies = product_strategies(f"{rows}k,{out}k->{rows}{out}", [x, weight])
    if bias is None:
        return strategies
    return [
        Strategy(s.outputs, (*s.inputs, _linear_bias_placement(s.outputs[0], bias, x.ndim - 1))) for s in strategies
    ]


def _linear_bias_placement(result: Placement | None, bias: TensorMeta, last: int) -> Placement:
    """The bias is cut where the last dim of the result is, and pending where the result is."""
    if isinstance(result, Shard):
        return Shard(0) if result.dim == last and bias.ndim and bias.shape[0] != 1 else Replicate()
    return result or Replicate()


@register_sharding(aten.matmul.default)
@ignores_lengths
@takes_copies
def matmul(a: TensorMeta, b: TensorMeta) -> list[Any]:
    """Products of the last two dims, the others broadcast: a dim of length 1 is whole wherever the other is cut."""
    batch = LETTERS[: max(a.ndim, b.ndim, 2) - 2]
    left = _letters(a, batch, "mk" if a.ndim > 1 else "k")
    right = _letters(b, batch, "kn" if b.ndim > 1 else "k")
    ends = ("m" if a.ndim > 1 else "") + ("n" if b.ndim > 1 else "")
    strategies = product_strategies(f"{left},{right}->{batch}{ends}", [a, b])
    return [_replicate_ones(s, (a, b)) for s in strategies if _is_cut(s, (a, b))]


def _letters(x: TensorMeta, batch: str, matrix: str) -> str:
    own = max(0, x.ndim - 2)
    return batch[len(batch) - own :] + matrix


def _is_cut(strategy: Strategy, metas: Sequence[TensorMeta]) -> bool:
    """Whether a cut batch dim is longer than 1 in one of the operands."""
    dims = [(p.dim, m) for p, m in zip(strategy.inputs, metas, strict=True) if isinstance(p, Shard)]
    return not dims or any(m.shape[d] != 1 or d >= m.ndim - 2 for d, m in dims)


def _replicate_ones(strategy: Strategy, metas: Sequence[TensorMeta]) -> Strategy:
    """The strategy with batch dims of length 1 replicated."""
    inputs = tuple(
        Replicate() if isinstance(p, Shard) and p.dim < m.ndim - 2 and m.shape[p.dim] == 1 else p
        for p, m in zip(strategy.inputs, metas, strict=True)
    )
    return Strategy(strategy.outputs, inputs)


@register_sharding(aten.einsum.default)
@ignores_lengths
@takes_copies
def einsum(equation: str, tensors: Sequence[TensorMeta], *, path: Sequence[int] | None = None) -> list[Any] | Steps:
    """A product of several tensors by its own formula; diagonals, dots and dims that broadcast are broken down.

    So is each product under autocast: a sum over one element is not a matrix product to torch, and is not cast, and
    that must not depend on how many elements a rank has.
    """
    formula = _write_formula(equation)
    operands = formula.split("->")[0].split(",")
    lengths: dict[str, int] = {}
    plain = "." not in formula and len(tensors) > 1
    plain &= [len({*names}) for names in operands] == [t.ndim for t in tensors]
    for names, tensor in zip(operands, tensors, strict=True) if plain else ():
        plain &= all(lengths.setdefault(letter, n) == n for letter, n in zip(names, tensor.shape, strict=True))
    one = plain and not is_any_autocast_enabled()
    return product_strategies(formula, tensors) if one else Steps(_break_einsum_down)


def _write_formula(equation: str) -> str:
    """The equation with its result written out: the letters that appear once, in order.

    >>> _write_formula("ij, jk"), _write_formula("ij,jk->ki")
    ('ij,jk->ik', 'ij,jk->ki')
    """
    formula = equation.replace(" ", "")
    if "->" in formula:
        return formula
    return f"{formula}->" + "".join(sorted(c for c in {*formula} - {","} if formula.count(c) == 1))


def _break_einsum_down(equation: str, tensors: Any, **options: Any) -> Any:
    return decompose(aten.einsum.default, (equation, tensors), options)


def _add_products(x: Any, one: Any, other: Any, *, beta: complex = 1, alpha: complex = 1) -> Any:
    """The sum of the products of all pairs of matrices, added to a tensor; one that is not added is not looked at."""
    total = aten.bmm.default(one, other).sum(0)
    scaled = total if alpha == 1 else total * alpha
    return scaled if beta == 0 else (x if beta == 1 else x * beta) + scaled


register_sharding(aten.addbmm.default, Steps(_add_products))


@register_sharding(aten._pdist_forward.default)
def pair_distances(x: TensorMeta, p: float = 2) -> list[Strategy]:
    """Every row meets every other: they are wanted whole."""
    return [Strategy((Replicate(),), (Replicate(),))]


MATRICES = (  # the last two dims of every tensor are a matrix
    aten._linalg_svd.default,
    aten._linalg_eigh.default,
    aten.linalg_eig.default,
    aten._linalg_eigvals.default,
    aten._linalg_slogdet.default,
    aten._linalg_det.default,
    aten.linalg_qr.default,
    aten.geqrf.default,
    aten.linalg_cholesky_ex.default,
    aten.cholesky.default,
    aten.cholesky_inverse.default,
    aten.cholesky_solve.default,
    aten.linalg_inv_ex.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_pinv.atol_rtol_tensor,
    aten.triangular_solve.default,
    aten.linalg_solve_triangular.default,
    aten._cdist_forward.default,
)
IMAGES = {  # how many of the last dims are the image's
    aten.upsample_nearest1d.default: 1,
    aten._upsample_nearest_exact1d.default: 1,
    aten.upsample_linear1d.default: 1,
    aten._upsample_nearest_exact2d.default: 2,
    aten.upsample_bicubic2d.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten._upsample_bicubic2d_aa.default: 2,
    aten.upsample_nearest3d.default: 3,
    aten._upsample_nearest_exact3d.default: 3,
    aten.upsample_trilinear3d.default: 3,
    aten.reflection_pad1d.default: 1,
    aten.reflection_pad2d.default: 2,
    aten.reflection_pad3d.default: 3,
    aten.replication_pad1d.default: 1,
    aten.replication_pad2d.default: 2,
    aten.replication_pad3d.default: 3,
    aten.max_unpool2d.default: 2,
    aten.max_unpool3d.default: 3,
    aten.adaptive_max_pool3d.default: 3,
}
FOURIER = (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)
ALONG_DIM = (
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_copy.default,
)
REPLICATED_ONLY_OPS = (  # positions in the result depend on all values, or dims have no order to keep
    aten.linalg_lstsq.default,
    aten._linalg_solve_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_ldl_solve.default,
    aten.lu_unpack.default,
    aten.ormqr.default,
    aten.linalg_householder_product.default,
    aten.histogram.bins_tensor,
    aten.histogram.bin_ct,
    aten._histogramdd_from_bin_cts.default,
    aten._histogramdd_from_bin_tensors.default,
    aten.nonzero_static.default,
    aten._ctc_loss.default,
    aten._ctc_loss.Tensor,
    aten._histogramdd_bin_edges.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.put.default,
    aten.take.default,
    aten.masked_scatter.default,
    aten.segment_reduce.default,
    aten.searchsorted.Tensor,
    aten.grid_sampler_3d.default,
    aten.fractional_max_pool2d.default,
    aten._trilinear.default,
)


def _tensor_metas(values: Sequence[Any]) -> list[TensorMeta]:
    return [v for v in values if isinstance(v, TensorMeta)]


def batch_strategies(metas: Sequence[TensorMeta], whole: int, outputs: int) -> list[Strategy]:
    """All replicated, or a dim before the last `whole` ones sharded, in every tensor that has it as long."""
    found = [_replicated_strategy(metas, outputs)]
    before = max(m.ndim - whole for m in metas)
    for dim in range(before):
        from_end = before - dim
        length = max(m.shape[m.ndim - whole - from_end] for m in metas if m.ndim - whole >= from_end)
        inputs = tuple(_batch_placement(m, m.ndim - whole - from_end, length) for m in metas)
        if any(isinstance(p, Shard) for p in inputs):
            found.append(Strategy((Shard(dim),) * outputs, inputs))
    return found


def _batch_placement(meta: TensorMeta, dim: int, length: int) -> Placement:
    return Shard(dim) if dim >= 0 and meta.shape[dim] == length != 1 else Replicate()


def _replicated_strategy(metas: Sequence[TensorMeta], outputs: int) -> Strategy:
    return Strategy((Replicate(),) * outputs, (Replicate(),) * len(metas))


def _register_batched(op: Any, whole: int, local: Any = None) -> None:
    def rule(*args: Any, **kwargs: Any) -> list[Strategy]:
        found = batch_strategies(_tensor_metas((*args, *kwargs.values())), whole, len(op._schema.returns))
        return [Strategy(s.outputs, s.inputs, local) for s in found]

    register_sharding(op, rule)


def pad_empty(op: Any) -> Any:
    """Call an operator that refuses empty tensors: they get one row, which is taken from the result again."""

    def local(view: Any, *args: Any, **kwargs: Any) -> Any:
        empty = {d for a in args if isinstance(a, Tensor) for d, length in enumerate(a.shape) if length == 0}
        if not empty:
            return op(*args, **kwargs)
        result = op(*(_add_row(a) if isinstance(a, Tensor) else a for a in args), **kwargs)
        return tuple(_drop_row(r, empty) for r in result) if isinstance(result, tuple) else _drop_row(result, empty)

    return local


def _add_row(tensor: Tensor) -> Tensor:
    for dim in [d for d, length in enumerate(tensor.shape) if length == 0]:
        row = [1 if d == dim else length for d, length in enumerate(tensor.shape)]
        tensor = torch.cat([tensor, tensor.new_zeros(row)], dim)
    return tensor


def _drop_row(tensor: Tensor, empty: set[int]) -> Tensor:
    for dim in empty:
        tensor = tensor.narrow(dim, 0, 0)
    return tensor


for _op in MATRICES:
    _register_batched(_op, 2)
for _op, _dims in IMAGES.items():
    _register_batched(_op, _dims, pad_empty(_op))


def _register_fourier(op: Any) -> None:
    def rule(x: TensorMeta, dim: Sequence[int], *options: Any) -> list[Strategy]:
        """Transformed dims are whole, all others may be sharded."""
        gone = {d % x.ndim for d in dim}
        kept = [Strategy((Shard(d),), (Shard(d),), pad_empty(op)) for d in range(x.ndim) if d not in gone]
        return [_replicated_strategy([x], 1), *kept]

    register_sharding(op, rule)


for _op in FOURIER:
    _register_fourier(_op)


def _register_windowed(op: Any, signal: int) -> None:
    """Transforms of windows: the last `signal` dims are whole, a dim of signals before them may be sharded."""

    def rule(x: TensorMeta, *args: Any, **kwargs: Any) -> list[Strategy]:
        metas = _tensor_metas((x, *args, *kwargs.values()))
        found = [_replicated_strategy(metas, 1)]
        if x.ndim > signal:
            inputs: tuple[Placement, ...] = (Shard(0), *(Replicate() for _ in metas[1:]))
            found.append(Strategy((Shard(0),), inputs, pad_empty(op)))
        return found

    register_sharding(op, rule)


for _op, _dims in {aten.stft.default: 1, aten.stft.center: 1, aten.istft.default: 2}.items():
    _register_windowed(_op, _dims)
for _function in (  # made of operators and of constants: counts, weights, an identity matrix
    torch.combinations,
    torch.quantile,
    Tensor.quantile,
    torch.nanquantile,
    Tensor.nanquantile,
    torch.matrix_power,
    Tensor.matrix_power,
    torch.linalg.matrix_power,
    torch.linalg.matrix_rank,
    torch.unravel_index,
    torch.ctc_loss,
    F.ctc_loss,
):
    register_plain_maker(_function)


@register_sharding(aten._safe_softmax.default)
def safe_softmax(x: TensorMeta, dim: int, dtype: torch.dtype | None = None) -> list[Strategy]:
    """The dim that is normalised is whole, all others may be sharded."""
    kept = [d for d in range(x.ndim) if d != dim % x.ndim]
    return [_replicated_strategy([x], 1), *(Strategy((Shard(d),), (Shard(d),)) for d in kept)]


def _powers(x: Any, *, N: int | None = None) -> Any:
    """The columns 1, x, x * x, ... of `vander`; torch writes them to a plain tensor."""
    x = x if x.ndim else aten.unsqueeze.default(x, 0)  # a number is one row
    count = x.shape[-1] if N is None else N
    if count < 1:
        raise RuntimeError(f"vander of a tensor of shape {list(x.shape)} with N={count}: N must be at least 1")
    columns = aten.stack.default([aten.ones_like.default(x), *(x for _ in range(count - 1))], -1)
    return aten.cumprod.default(columns, x.ndim)


def _ordered_powers(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    if x.ndim != 1:
        raise RuntimeError(f"vander of a tensor of shape {list(x.shape)}: it takes one of 1 dim; see linalg.vander")
    columns = _powers(x, N=N)
    return columns if increasing else aten.flip.default(columns, [x.ndim])


register_sharding(aten.linalg_vander.default, Steps(_powers))
register_sharding(aten.vander.default, Steps(_ordered_powers))


def _pad_and_stack(
    sequences: Sequence[Any], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Sequences of several lengths, each padded to the longest; torch writes them to a plain tensor."""
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"pad_sequence with padding_side={padding_side!r}: it is 'left' or 'right'")
    longest = max(s.shape[0] for s in sequences)
    padded = []
    for sequence in sequences:
        ends = [longest - sequence.shape[0], 0] if padding_side == "left" else [0, longest - sequence.shape[0]]
        widths = [*(0 for _ in range(2 * (sequence.ndim - 1))), *ends]
        padded.append(aten.constant_pad_nd.default(sequence, widths, padding_value) if any(widths) else sequence)
    return aten.stack.default(padded, 0 if batch_first else 1)


register_sharding(aten.pad_sequence.default, Steps(_pad_and_stack))


# Decompositions of torch use these, which have no gradient of their own.
register_sharding(torch.ops.prims.where.default, Steps(aten.where.self))
register_sharding(torch.ops.prims.convert_element_type.default, Steps(lambda x, dtype: x.to(dtype)))


@register_sharding(list(ALONG_DIM))
def along_dim_rule(
    x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta | float | None = None, *rest: Any, **options: Any
) -> list[Strategy]:
    """The dim that the index runs along is whole, and so is the index; other dims are sharded alike."""
    metas = _tensor_metas((x, index, source))
    found = [_replicated_strategy(metas, 1)]
    for own in range(x.ndim):
        if own != dim % x.ndim:
            others = (Shard(own),) if len(metas) > 2 and metas[2].ndim == x.ndim else (Replicate(),) * (len(metas) - 2)
            found.append(Strategy((Shard(own),), (Shard(own), Replicate(), *others)))
    return found


@register_sharding(aten.index_reduce.default)
def index_reduce(
    x: TensorMeta, dim: int, index: TensorMeta, source: TensorMeta, *rest: Any, **options: Any
) -> list[Strategy]:
    found = along_dim_rule(x, dim, index, source)
    return [Strategy(s.outputs, s.inputs, _index_reduce_part) for s in found]


def _index_reduce_part(view: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """The local part; rows of one element as a vector, since torch fails on them for products in low precision."""
    if x.ndim < 2 or x.numel() != x.shape[dim]:
        return aten.index_reduce.default(x, dim, index, source, *rest, **kwargs)
    return aten.index_reduce.default(x.flatten(), 0, index, source.flatten(), *rest, **kwargs).reshape(x.shape)


@register_sharding(aten.grid_sampler_2d.default)
def grid_sampler(x: TensorMeta, grid: TensorMeta, *options: Any) -> list[Strategy]:
    local = pad_empty(aten.grid_sampler_2d.default)
    return [_replicated_strategy([x, grid], 1), Strategy((Shard(0),), (Shard(0), Shard(0)), local)]


def _register_whole(op: Any) -> None:
    def rule(*args: Any, **kwargs: Any) -> list[Strategy]:
        return [_replicated_strategy(_tensor_metas((*args, *kwargs.values())), len(op._schema.returns))]

    register_sharding(op, rule)


for _op in REPLICATED_ONLY_OPS:
    _register_whole(_op)
