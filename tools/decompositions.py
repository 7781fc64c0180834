"""Does torch's table of decompositions compute what the operators compute? Tried for those that the engine takes.

1. `taken_operators` lists the operators without a rule that are computed by torch's table (`ops/engine.py`).
2. Calls of them: what the samples of torch's operator database call beneath autograd, and the calls of this file.
3. Each is tried as it is, and with other values in its floating point tensors (`EDGES`).
4. The operator and its decomposition must agree: shapes, dtypes, values, the gradients of the first result, and the
   gradients of these gradients' squares. What torch itself cannot compute or differentiate is not compared.

`python tools/decompositions.py` prints what differs. That needs a rule or steps of its own in `ops/rules`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise.ops  # noqa: F401  # registers the rules
from bench.op_samples import EDGES, INF, operators
from shardwise._torch import aten, decomposition_table, is_composite, operator_names
from shardwise.ops.engine import find_fallback
from shardwise.ops.rule import OperatorCall, find_rule, is_pointwise, split_call

SAMPLES = 5
DATABASE = {  # entries of the database that call such operators: to try all of them takes minutes
    "_batch_norm_with_update",
    "_chunk_cat",
    "_native_batch_norm_legit",
    "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate",
    "block_diag",
    "bucketize",
    "diag_embed",
    "diagflat",
    "__rsub__",
    "index_add",
    "linalg.cross",
    "linspace",
    "logspace",
    "max_pool2d_with_indices_backward",
    "nn.functional.channel_shuffle",
    "nn.functional.glu",
    "nn.functional.logsigmoid",
    "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "nn.functional.prelu",
    "nn.functional.unfold",
    "renorm",
    "rot90",
    "select_scatter",
    "slice_scatter",
    "vdot",
}
REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AssertionError)


def taken_operators() -> set[Any]:
    """The operators that are computed by torch's decompositions."""
    packets = [getattr(aten, name) for name in operator_names() if hasattr(aten, name)]
    return {op for p in packets for op in (getattr(p, o) for o in p.overloads()) if is_taken(op)}


def is_taken(op: Any) -> bool:
    """Whether the engine computes an operator by its decomposition in torch's table."""
    if op not in decomposition_table or find_rule(op) is not None or is_pointwise(op) or is_composite(op):
        return False
    return find_fallback(op) is decomposition_table[op]


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes the calls of operators that are taken, with copies of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_taken(func):
            copied = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
            self.calls.append(split_call(func, *copied))
        return func(*args, **(kwargs or {}))


def database_calls() -> Iterator[OperatorCall]:
    """What the samples of the database call."""
    for info in operators():
        for dtype in (torch.float64, torch.int64, torch.complex128) if info.name in DATABASE else ():
            if dtype not in info.supported_dtypes("cpu"):
                continue
            for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES):
                recorder = _CallRecorder()
                with recorder, contextlib.suppress(*REFUSALS):
                    info.op(sample.input, *sample.args, **sample.kwargs)
                yield from recorder.calls


def own_calls() -> Iterator[OperatorCall]:
    """Calls that no sample makes, as of operators that torch's own backward passes call."""
    for op, *args in _own_arguments():
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        if is_taken(op):
            yield split_call(op, args, kwargs)


def _own_arguments() -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(7)

    def t(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def ids(*shape: int, below: int = 3) -> Tensor:
        return torch.randint(below, shape, generator=generator)

    group = t(2, 4, 3), t(2, 4, 3), t(2, 2), t(2, 2), t(4)
    probabilities, positive, wide = t(4, 3).sigmoid(), t(3).abs() + 0.1, {"dtype": torch.float64}
    total = torch.tensor(4.0, dtype=torch.float64)
    labels = torch.tensor([[0, 3, -1, 2], [-1, 1, 1, 1], [3, 2, 1, 0]])
    return [
        (aten._addmm_activation.default, t(5), t(4, 6), t(6, 5)),
        (aten._addmm_activation.default, t(5), t(4, 6), t(6, 5), {"use_gelu": True}),
        (aten._euclidean_dist.default, t(4, 3), t(5, 3)),
        (aten._log_softmax_backward_data.default, t(4, 5), t(4, 5).log_softmax(1), 1, torch.float64),
        (aten._softmax_backward_data.default, t(4, 5), t(4, 5).softmax(1), 1, torch.float64),
        (aten._native_batch_norm_legit.no_stats, t(4, 3, 5), t(3), t(3), True, 0.1, 1e-5),
        (aten._native_batch_norm_legit_no_training.default, t(4, 3, 5), t(3), t(3), t(3), positive, 0.1, 1e-5),
        (aten._prelu_kernel.default, t(4, 3), t(1, 3)),
        (aten._prelu_kernel_backward.default, t(4, 3), t(4, 3), t(4, 3)),
        (aten._unsafe_index.Tensor, t(6, 5), [ids(4)]),
        (aten._unsafe_index_put.default, t(6, 5), [torch.tensor([4, 0])], t(2, 5)),
        (aten._unsafe_index_put.default, t(6, 5), [ids(4)], t(4, 5), True),
        (aten._weight_norm_interface.default, t(4, 3), t(4, 1), 0),
        (aten._weight_norm_interface.default, t(4, 3), t(1, 3), 1),
        (aten.addmv.default, t(4), t(4, 3), t(3), {"beta": 0, "alpha": 2}),
        (aten.addmv.default, t(4), t(4, 3), t(3), {"alpha": 0}),
        (aten.addr.default, t(4, 3), t(4), t(3), {"beta": 0, "alpha": 2}),
        (aten.affine_grid_generator.default, t(2, 2, 3), [2, 1, 3, 4], True),
        (aten.affine_grid_generator.default, t(2, 3, 4), [2, 1, 3, 4, 2], False),
        (aten.baddbmm.dtype, t(2, 4, 5).float(), t(2, 4, 6).bfloat16(), t(2, 6, 5).bfloat16(), torch.float32),
        (aten.binary_cross_entropy_backward.default, t(4, 3), probabilities, probabilities, None, 0),
        (aten.bucketize.Scalar, 1.0, t(5).sort().values),
        (aten.col2im.default, t(2, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        (aten.diagonal_backward.default, t(3), [3, 4], 0, 0, 1),
        (aten.elu_backward.default, t(4, 3), 1.0, 1.0, 1.0, False, t(4, 3)),
        (aten.embedding_dense_backward.default, t(4, 5), ids(4), 6, 1, True),
        (aten.floor_divide.Scalar, t(4, 3), -0.3),
        (aten.floor_divide.Scalar, torch.tensor([-7, 7, -8, 5]), 3),
        (aten.glu.default, t(4, 6), 0),
        (aten.glu_backward.default, t(4, 3), t(4, 6), 1),
        (aten.hardsigmoid_backward.default, t(4, 3), t(4, 3) * 3),
        (aten.hardswish_backward.default, t(4, 3), t(4, 3) * 3),
        (aten.hardtanh_backward.default, t(4, 3), t(4, 3), -1.0, 1.0),
        (aten.huber_loss_backward.default, t(4, 3), t(4, 3), t(4, 3), 0, 1.0),
        (aten.index_add.default, t(4, 3), 0, torch.tensor([0, 2]), t(2, 3), {"alpha": 0.5}),
        (aten.isin.Scalar_Tensor, 1.0, t(4, 3)),
        (aten.isin.Tensor_Scalar, t(4, 3), 1.0),
        (aten.isin.Tensor_Tensor, t(40), t(30)),
        (aten.leaky_relu_backward.default, t(4, 3), t(4, 3), 0.1, False),
        (aten.log_sigmoid_forward.default, t(4, 3)),
        (aten.log_sigmoid_backward.default, t(4, 3), t(4, 3), t(4, 3)),
        (aten.mse_loss_backward.default, t(), t(4, 3), t(4, 3), 1),
        (aten.multi_margin_loss.default, t(4, 5), ids(4), 2, 0.5, None, 0),
        (aten.multilabel_margin_loss_forward.default, t(3, 4), labels, 0),
        (aten.native_group_norm_backward.default, *group, 2, 4, 3, 2, [True] * 3),
        (aten.native_layer_norm_backward.default, t(4, 3), t(4, 3), [3], t(4, 1), t(4, 1), t(3), t(3), [True] * 3),
        (aten.nll_loss_backward.default, t(), t(4, 3), ids(4), None, 1, -100, total),
        (aten.norm.ScalarOpt_dim_dtype, t(4, 3), 2, [1], False, wide),
        (aten.norm.ScalarOpt_dim_dtype, t(4, 3), INF, [1], True, wide),
        (aten.norm.ScalarOpt_dtype, t(4, 3), 0, wide),
        (aten.reflection_pad1d_backward.default, t(2, 7), t(2, 4), [1, 2]),
        (aten.reflection_pad2d_backward.default, t(2, 7, 5), t(2, 4, 3), [1, 1, 1, 2]),
        (aten.renorm.default, t(4, 3), INF, 0, 1.0),
        (aten.rrelu_with_noise_backward.default, t(4, 3), t(4, 3), t(4, 3), 0.1, 0.3, True, False),
        (aten.rsub.Tensor, t(3), t(3), {"alpha": 2}),
        (aten.select_backward.default, t(3), [3, 4], 1, 2),
        (aten.slice_backward.default, t(3, 2), [3, 4], 1, 1, 3, 1),
        (aten.smooth_l1_loss_backward.default, t(), t(4, 3), t(4, 3), 1, 0.5),
        (aten.soft_margin_loss_backward.default, t(), t(4, 3), t(4, 3), 1),
        (aten.softplus_backward.default, t(4, 3), t(4, 3), 1.0, 20.0),
        (aten.unfold_backward.default, t(3, 2, 3), [5, 2], 0, 3, 1),
    ]


def compare(call: OperatorCall) -> dict[str, str]:
    """On which values the decomposition of a call differs from the operator, and in what."""
    found = {}
    for name, change in {"as they are": lambda x: x, **EDGES}.items():
        values = [change(t) if _is_number(t) else t for t in call.tensors]
        expected = _run(call.op, call, values)
        if expected is None:
            continue
        made = _run(decomposition_table[call.op], call, values)
        parts = zip(("values", "gradients", "second gradients"), expected, made or expected, strict=True)
        differing = [what for what, one, other in parts if one is not None and not _are_same(other, one)]
        if made is None or differing:
            found[name] = "raises" if made is None else differing[0]
    return found


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


Outcome = tuple[list[Tensor], list[Tensor] | None, list[Tensor] | None]


def _run(compute: Any, call: OperatorCall, values: Sequence[Tensor]) -> Outcome | None:
    """The results, and the first and second gradients of the first one if it has any; None if it raises."""
    attempts = (True, False)  # some operators refuse tensors that require gradients
    for gradient in attempts:
        leaves = [v.clone().requires_grad_(gradient and _is_number(v)) for v in values]
        args, kwargs = call.fill_slots(leaves)
        try:
            made = compute(*args, **kwargs)
        except REFUSALS:
            continue
        results = [r for r in (made if isinstance(made, list | tuple) else [made]) if isinstance(r, Tensor)]
        first = _gradients(results[:1], leaves)
        squares = None if first is None else [(g * g.conj()).real.sum() for g in first if g.requires_grad]
        second = _gradients([torch.stack(squares)], leaves) if squares else None
        return [r.detach() for r in results], first, second
    return None


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor] | None:
    """The gradients of a weighted sum of the first result, which can be differentiated where torch can do so."""
    used = [leaf for leaf in leaves if leaf.requires_grad]
    if not used or not results or not results[0].requires_grad:
        return None
    weights = torch.arange(1, 1 + results[0].numel(), dtype=torch.float64).reshape(results[0].shape)
    total = (torch.view_as_real(results[0]).sum(-1) if results[0].is_complex() else results[0]) * weights
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True, "create_graph": True}
    try:
        return list(torch.autograd.grad(total.sum(), used, **options))
    except REFUSALS:
        return None


def _are_same(found: list[Tensor] | None, wanted: list[Tensor]) -> bool:
    return found is not None and len(found) == len(wanted) and all(map(_is_same, found, wanted))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not _is_number(one):
        return torch.equal(one, other)
    limit = 1e-9 if one.dtype in (torch.float64, torch.complex128) else 1e-4
    return torch.allclose(one, other, rtol=limit, atol=limit * 1e-2, equal_nan=True)


def find_differences() -> tuple[dict[str, dict[str, str]], set[str]]:
    """What differs, by operator and by values; and the operators that were tried."""
    found: dict[str, dict[str, str]] = {}
    tried = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (*database_calls(), *own_calls()):
            tried.add(str(call.op))
            if call.tensors and (differences := compare(call)):
                found.setdefault(str(call.op), {}).update(differences)
    return found, tried


def main() -> None:
    found, tried = find_differences()
    for name in sorted(found):
        print(f"{name}: {', '.join(f'{what} ({values})' for values, what in found[name].items())}")
    untried = sorted({str(op) for op in taken_operators()} - tried)
    print(f"{len(tried)} operators tried, {len(found)} differ; not tried: {', '.join(untried)}")


if __name__ == "__main__":
    main()
