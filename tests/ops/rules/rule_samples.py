"""Sample arguments for the built-in rules, in one table; simple operators get theirs from their schema.

Dims that have nothing to do with each other have different lengths, so that they are not cut together by chance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import shardwise.ops.rules.experts  # noqa: F401  # defines an operator that has a sample here
from shardwise._torch import aten

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def t(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ids(*shape: int, below: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % below).reshape(shape)


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


LINE, IMAGE, VOLUME = t(4, 6, 8), t(4, 6, 8, 5), t(4, 6, 8, 5, 7)
SQUARES, TALL = torch.eye(4).expand(5, 4, 4) * 2, t(5, 6, 4)
LU, PIVOTS = torch.linalg.lu_factor(SQUARES + torch.ones(4, 4))
LDL, LDL_PIVOTS = torch.linalg.ldl_factor(SQUARES)
COMPLEX = torch.zeros(4, 6, dtype=torch.complex64)
OFFSETS = torch.tensor([5, 5, 12, 24], dtype=torch.int32)
SAMPLES: dict[Any, tuple[Any, ...]] = {
    aten.bucketize.Tensor: (t(4, 6), torch.tensor([-1.0, 0.0, 0.5, 2.0])),
    aten.scaled_dot_product_attention.default: (t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 8)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (t(2, 4, 5, 8), t(2, 4, 7, 8), t(2, 4, 7, 8)),
    aten.transpose.int: (t(4, 6, 5), 0, 2),
    aten.quantile.scalar: (t(4, 6, 5), 0.3, 1),
    aten.quantile.default: (t(4, 6, 5), torch.tensor([0.2, 0.9]), 1),
    aten.nanquantile.scalar: (t(4, 6, 5), 0.3, 1),
    aten.nanquantile.default: (t(4, 6, 5), torch.tensor([0.2, 0.9]), 1),
    aten._standard_gamma_grad.default: (t(4, 6).abs() + 1, t(4, 6).abs() + 1),
    aten._dirichlet_grad.default: (torch.full((4, 6), 0.2), t(4, 6).abs() + 1, t(4, 6).abs() + 9),
    aten.permute.default: (t(4, 6, 5), [2, 0, 1]),
    aten.squeeze.default: (t(4, 1, 6),),
    aten.squeeze.dim: (t(4, 1, 6), 1),
    aten.squeeze.dims: (t(4, 1, 6), [1]),
    aten.expand.default: (t(4, 1, 6), [4, 5, 6]),
    aten.unfold.default: (t(4, 9), 1, 3, 2),
    aten.view_as_real.default: (COMPLEX,),
    aten.view.dtype: (t(4, 6), torch.int64),
    aten.view_as_complex.default: (t(4, 6, 2),),
    aten.index.Tensor: (t(8, 6), [ids(5, below=8)]),
    aten.index_select.default: (t(8, 6), 0, ids(5, below=8)),
    aten.gather.default: (t(8, 6), 0, ids(5, 6, below=8)),
    aten.scatter.src: (t(8, 6), 0, torch.arange(8).reshape(8, 1).expand(8, 6).flip(0).contiguous(), t(8, 6)),
    aten.scatter.value: (t(8, 6), 0, ids(5, 6, below=8), 2.0),
    aten.scatter.reduce: (t(8, 6), 0, ids(5, 6, below=8), t(5, 6), {"reduce": "add"}),
    aten.scatter_.src: (t(8, 6), 0, torch.arange(8).reshape(8, 1).expand(8, 6).flip(0).contiguous(), t(8, 6)),
    aten.scatter_.value: (t(8, 6), 0, ids(5, 6, below=8), 2.0),
    aten.scatter_.reduce: (t(8, 6), 0, ids(5, 6, below=8), t(5, 6), {"reduce": "add"}),
    aten.scatter_reduce.two: (t(8, 6), 0, ids(5, 6, below=8), t(5, 6), "sum"),
    aten.scatter_reduce_.two: (t(8, 6), 0, ids(5, 6, below=8), t(5, 6), "sum"),
    aten.scatter_add.default: (t(8, 6), 0, ids(5, 6, below=8), t(5, 6)),
    aten.scatter_add_.default: (t(8, 6), 0, ids(5, 6, below=8), t(5, 6)),
    aten.index_put.default: (t(8, 6), [ids(5, below=8)], t(5, 6), True),
    aten.index_put_.default: (t(8, 6), [ids(5, below=8)], t(5, 6), True),
    aten.masked_select.default: (t(8, 6), mask(8, 6)),
    aten.masked_fill.Tensor: (t(8, 6), mask(8, 6), t()),
    aten.masked_fill_.Scalar: (t(8, 6), mask(8, 6), 2.0),
    aten.masked_fill_.Tensor: (t(8, 6), mask(8, 6), t()),
    aten.convolution.default: (t(4, 6, 8), t(5, 6, 3), t(5), [1], [1], [1], False, [0], 1),
    aten.avg_pool2d.default: (IMAGE, [2, 2]),
    aten._adaptive_avg_pool2d.default: (IMAGE, [3, 2]),
    aten.avg_pool3d.default: (VOLUME, [2, 2, 2]),
    aten._adaptive_avg_pool3d.default: (VOLUME, [3, 2, 2]),
    aten.max_pool2d_with_indices.default: (IMAGE, [2, 2]),
    aten.adaptive_max_pool2d.default: (IMAGE, [3, 2]),
    aten.max_pool3d_with_indices.default: (VOLUME, [2, 2, 2]),
    aten.upsample_nearest2d.default: (IMAGE, [9, 10]),
    aten.upsample_bilinear2d.default: (IMAGE, [9, 10], False),
    aten._to_copy.default: (t(4, 6), {"dtype": torch.float64}),
    aten.softplus_backward.default: (t(4, 6), t(4, 6), 1.0, 20.0),
    aten.addmv.default: (t(4), t(4, 6), t(6)),
    aten.addr.default: (t(4, 6), t(4), t(6)),
    aten._euclidean_dist.default: (t(4, 3), t(5, 3)),
    aten.linalg_cross.default: (t(4, 3), t(4, 3)),
    aten.renorm.default: (t(4, 6), 2, 0, 1.0),
    aten._softmax_backward_data.default: (t(4, 6), t(4, 6), 1, torch.float32),
    aten._log_softmax_backward_data.default: (t(4, 6), t(4, 6), 1, torch.float32),
    aten.multi_margin_loss.default: (t(8, 6), ids(8, below=6)),
    aten.multilabel_margin_loss_forward.default: (t(8, 6), ids(8, 6, below=6), 1),
    aten.nll_loss_backward.default: (t(), t(8, 6), ids(8, below=6), None, 1, -100, torch.tensor(8.0)),
    aten.nll_loss2d_backward.default: (t(), t(4, 6, 5, 3), ids(4, 5, 3, below=6), None, 1, -100, torch.tensor(60.0)),
    aten.embedding.default: (t(10, 4), ids(3, 7, below=10)),
    aten._embedding_bag.default: (t(10, 4), ids(9, below=10), torch.tensor([0, 2, 2, 7])),
    aten._embedding_bag_forward_only.default: (t(10, 4), ids(9, below=10), torch.tensor([0, 2, 2, 7])),
    aten.native_batch_norm.default: (t(4, 6, 5), t(6), t(6), None, None, True, 0.1, 1e-5),
    aten.layer_norm.default: (t(4, 5, 6), [6], t(6), t(6), 1e-5),
    aten.native_layer_norm.default: (t(4, 5, 6), [6], t(6), t(6), 1e-5),
    aten.rms_norm.default: (t(4, 5, 6), [6], t(6), 1e-5),
    aten._fused_rms_norm.default: (t(4, 5, 6), [6], t(6), 1e-5),
    aten.rms_norm.default: (t(4, 5, 6), [6], t(6)),
    aten.native_group_norm.default: (t(4, 6, 5), t(6), t(6), 4, 6, 5, 2, 1e-5),
    aten.nll_loss_forward.default: (t(8, 6), ids(8, below=6), t(6), 2, -100),
    aten.nll_loss2d_forward.default: (t(4, 6, 5, 3), ids(4, 5, 3, below=6), t(6), 2, -100),
    aten._linalg_eigh.default: (SQUARES,),
    aten.linalg_eig.default: (SQUARES,),
    aten._linalg_eigvals.default: (SQUARES,),
    aten._linalg_slogdet.default: (SQUARES,),
    aten._linalg_det.default: (SQUARES,),
    aten.linalg_cholesky_ex.default: (SQUARES,),
    aten.cholesky.default: (SQUARES,),
    aten.cholesky_inverse.default: (SQUARES,),
    aten.cholesky_solve.default: (t(5, 4, 3), SQUARES),
    aten.linalg_inv_ex.default: (SQUARES,),
    aten.linalg_ldl_factor_ex.default: (SQUARES,),
    aten.linalg_matrix_exp.default: (SQUARES,),
    # more rows than columns: with fewer, torch returns memory that was never set where the rank is deficient
    aten.linalg_lstsq.default: (t(6, 4), t(6, 3)),
    aten.triangular_solve.default: (t(5, 4, 3), SQUARES),
    aten.linalg_solve_triangular.default: (SQUARES, t(5, 4, 3), {"upper": True}),
    aten.linalg_householder_product.default: (TALL, t(5, 4)),
    aten._linalg_solve_ex.default: (SQUARES, t(5, 4, 3)),
    aten.linalg_lu_solve.default: (LU, PIVOTS, torch.ones(5, 4, 3)),
    aten.linalg_ldl_solve.default: (LDL, LDL_PIVOTS, torch.ones(5, 4, 3)),
    aten.lu_unpack.default: (LU, PIVOTS),
    aten.ormqr.default: (TALL, t(5, 4), t(5, 6, 3)),
    aten.upsample_nearest1d.default: (LINE, [9]),
    aten._upsample_nearest_exact1d.default: (LINE, [9]),
    aten.upsample_linear1d.default: (LINE, [9], False),
    aten._upsample_nearest_exact2d.default: (IMAGE, [9, 10]),
    aten.upsample_bicubic2d.default: (IMAGE, [9, 10], False),
    aten._upsample_bilinear2d_aa.default: (IMAGE, [9, 10], False),
    aten._upsample_bicubic2d_aa.default: (IMAGE, [9, 10], False),
    aten.upsample_nearest3d.default: (VOLUME, [9, 10, 3]),
    aten._upsample_nearest_exact3d.default: (VOLUME, [9, 10, 3]),
    aten.upsample_trilinear3d.default: (VOLUME, [9, 10, 3], False),
    aten.reflection_pad1d.default: (LINE, [1, 2]),
    aten.reflection_pad2d.default: (IMAGE, [1, 2, 1, 0]),
    aten.reflection_pad3d.default: (VOLUME, [1, 2, 1, 0, 1, 1]),
    aten.replication_pad1d.default: (LINE, [1, 2]),
    aten.replication_pad2d.default: (IMAGE, [1, 2, 1, 0]),
    aten.replication_pad3d.default: (VOLUME, [1, 2, 1, 0, 1, 1]),
    aten.max_unpool2d.default: (t(4, 6, 3, 2), ids(4, 6, 3, 2, below=6), [8, 5]),
    aten.max_unpool3d.default: (t(4, 6, 3, 2, 2), ids(4, 6, 3, 2, 2, below=12), [8, 5, 4], [2, 2, 2], [0, 0, 0]),
    aten.fractional_max_pool2d.default: (IMAGE, [2, 2], [3, 2], torch.full((4, 6, 2), 0.5)),
    aten.adaptive_max_pool3d.default: (VOLUME, [3, 2, 2]),
    aten._fft_c2c.default: (COMPLEX, [1], 0, True),
    aten._fft_c2r.default: (COMPLEX, [1], 0, 10),
    aten.index_reduce.default: (t(8, 6), 0, ids(5, below=8), t(5, 6), "amax"),
    aten.index_fill.int_Scalar: (t(8, 6), 0, ids(5, below=8), 2.0),
    aten.index_fill.int_Tensor: (t(8, 6), 0, ids(5, below=8), torch.tensor(2.0)),
    aten.index_copy.default: (t(8, 6), 0, torch.tensor([7, 0, 3]), t(3, 6)),
    aten.grid_sampler_2d.default: (t(4, 6, 8, 5), t(4, 3, 7, 2), 0, 0, False),
    aten.grid_sampler_3d.default: (VOLUME, t(4, 3, 7, 2, 3), 0, 0, False),
    aten._histogramdd_bin_edges.default: (t(8, 2), [3, 4], {"range": [-1.0, 1.0, -1.0, 1.0]}),
    aten.bincount.default: (ids(8, below=6), None, 6),
    aten.put.default: (t(8, 6), torch.tensor([7, 0, 30]), t(3)),
    aten.take.default: (t(8, 6), torch.tensor([7, 0, 30])),
    aten.masked_scatter.default: (t(8, 6), mask(8, 6), t(8, 6)),
    aten.segment_reduce.default: (t(8, 6), "sum", {"lengths": torch.tensor([3, 1, 4])}),
    aten._conj.default: (COMPLEX,),
    torch.ops.prims.where.default: (mask(4, 6), t(4, 6), t(4, 6)),
    aten.repeat.default: (t(4, 6), [2, 1, 1]),
    aten.constant_pad_nd.default: (t(4, 6), [1, 2]),
    aten.diagonal.default: (t(4, 5, 6), 0, 0, 2),
    aten.mm.default: (t(4, 6), t(6, 5)),
    aten.bmm.default: (t(3, 4, 6), t(3, 6, 5)),
    aten.mv.default: (t(4, 6), t(6)),
    aten.dot.default: (t(6), t(6)),
    aten.addmm.default: (t(5), t(4, 6), t(6, 5)),
    aten.baddbmm.default: (t(3, 4, 5), t(3, 4, 6), t(3, 6, 5)),
    aten._grouped_mm.default: (t(24, 16), t(4, 16, 32), OFFSETS),
    torch.ops.shardwise._grouped_mm_at_experts.default: (t(24, 16), t(4, 16, 32), OFFSETS),
    aten.linear.default: (t(3, 4, 6), t(5, 6), t(5)),
    aten.matmul.default: (t(3, 4, 6), t(6, 5)),
    aten.einsum.default: ("bmk,nk->bnm", [t(3, 4, 6), t(5, 6)]),
    aten.kthvalue.default: (t(4, 6), 2),
    aten.sort.stable: (t(4, 6), {"stable": True}),
    aten.argsort.stable: (t(4, 6), {"stable": True}),
    aten.slice.Tensor: (t(8, 6), 0, 1, 7, 2),
    aten.split_with_sizes.default: (t(8, 6), [3, 5]),
    aten.unsafe_split_with_sizes.default: (t(8, 6), [3, 5]),
    aten.var_mean.correction: (t(4, 6), [1]),
    aten.std_mean.correction: (t(4, 6), [1]),
    aten.var.correction: (t(4, 6), [1]),
    aten.std.correction: (t(4, 6), [1]),
    aten.copy_.default: (t(4, 6), t(4, 6)),
    aten.diagonal_scatter.default: (t(4, 6, 5), t(4, 5), 0, 1, 2),
    aten.stft.default: (t(4, 32), 8, 4, 8, torch.ones(8), False, True, True),
    aten.stft.center: (t(4, 32), 8, 4, 8, torch.ones(8), {"return_complex": True}),
    aten.istft.default: (torch.zeros(4, 5, 9, dtype=torch.complex64), 8, 4, 8, torch.ones(8)),
    aten.histogram.bins_tensor: (t(4, 6), torch.arange(5.0)),
    aten.histogram.bin_ct: (t(4, 6), 5, {"range": [0.0, 1.0]}),
    aten._histogramdd_from_bin_cts.default: (t(6, 2), [3, 4], {"range": [0.0, 1.0, 0.0, 1.0]}),
    aten._histogramdd_from_bin_tensors.default: (t(6, 2), [torch.arange(4.0), torch.arange(5.0)]),
    aten.nonzero_static.default: (t(4, 6), {"size": 7}),
    aten._ctc_loss.default: (t(7, 4, 5), ids(4, 3, below=4) + 1, [7] * 4, [3] * 4),
    aten._ctc_loss.Tensor: (t(7, 4, 5), ids(4, 3, below=4) + 1, torch.full((4,), 7), torch.full((4,), 3)),
}
NEEDS_GPU = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_grouped_mm.default,
}
TAKES_THE_LEAF = {aten.lift_fresh.default}  # gives the very tensor back, which then is no leaf any more
UNDEFINED_VALUES = {aten.empty_like.default, aten.hash_tensor.default}  # none, or in uint64, which has no sums
HIDES_NAN = {
    aten.scaled_dot_product_attention.default
}  # one of torch's kernels gives 0 for a query with a nan, others nan
# Kernels that take the lengths they are given without a check end the process on parts that do not fit together.
NOT_DISCOVERED = {
    aten.linalg_ldl_solve.default,
    aten.lu_unpack.default,
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def sample_of(op: Any) -> Arguments | None:
    """Arguments for an operator: the table's, else made from its schema; None if they are not simple."""
    listed = SAMPLES.get(op)
    if listed is not None:
        named = listed[-1] if isinstance(listed[-1], dict) else {}
        return listed[: len(listed) - bool(named)], named
    needed = [a for a in op._schema.arguments if not a.has_default_value()]
    made = [_simple(str(a.type)) for a in needed]
    if any(m is None for m in made):
        return None
    return tuple(m for m, a in zip(made, needed, strict=True) if not a.kwarg_only), {
        a.name: m for m, a in zip(made, needed, strict=True) if a.kwarg_only
    }


def _simple(kind: str) -> Any:
    plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional") else kind
    table = {
        "Tensor": t(4, 6),
        "List[Tensor]": [t(4, 6), t(4, 6)],
        "int": 1,
        "SymInt": 1,
        "List[int]": [1],
        "List[SymInt]": [1],
        "bool": False,
        "number": 2,
        "float": 0.5,
    }
    return table.get(plain)
