"""Attention whose queries, keys and values are all split by rows: three strategies, each equal to the dense one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import Comm, Mesh, MeshSpec, ShardedTensor, explain, replicate, run_local, shard
from shardwise.geometry import Placement, Shard
from shardwise.ops.explain import Log
from shardwise.ops.propagation import prefer_strategies
from shardwise.ops.rules.attention import _list_seen
from tests.dense import numbers

attend: Any = F.scaled_dot_product_attention
KINDS = ("ring", "ulysses", "gather")


def _draw(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]


def _run(
    mesh: Mesh, texts: str | Sequence[str], tensors: Sequence[Tensor], kind: str | None = "ring", **options: Any
) -> str:
    """Compare results and gradients with the dense ones on every rank; the kind that explain() shows."""
    texts = [texts] * len(tensors) if isinstance(texts, str) else texts
    mask = tensors[3] if len(tensors) > 3 else None
    options |= {"enable_gqa": tensors[0].shape[-3] != tensors[1].shape[-3]} if tensors[0].ndim > 2 else {}
    whole = [t.clone().requires_grad_(t is not mask) for t in tensors]
    dense = attend(*whole, **options)
    weights = numbers(*dense.shape, seed=9).to(dense.dtype)
    (dense * weights).sum().backward()

    def body(comm: Comm) -> str:
        with prefer_strategies(kind):
            held = [shard(t, f"on {mesh}: {text}", None) for t, text in zip(tensors, texts, strict=True)]
            for tensor in held[:3]:
                tensor.requires_grad_()
            with explain() as log:
                made = attend(*held, **options)
            (made * replicate(weights, made)).sum().backward()
        close = {"rtol": 2e-2, "atol": 2e-2} if dense.dtype == torch.bfloat16 else {}
        assert_close(made.full(), dense, **close)
        for own, other in zip(held[:3], whole, strict=False):
            assert_close(own.grad.full(), other.grad, **close)  # type: ignore[union-attr]  # it has one
        return _kind_of(log)

    found: list[str] = run_local(body, int(mesh.ranks.max()) + 1)
    return found[0]


def _kind_of(log: Log) -> str:
    return log.entries[-1].name.partition("(")[2].rstrip(")")


def _allowed(rows: int, columns: int) -> Tensor:
    """Documents of 3 tokens, and a row that sees nothing."""
    at = torch.arange(rows).unsqueeze(1) // 3 == torch.arange(columns).unsqueeze(0) // 3
    at[1] = False
    return at


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_and_gradients_are_the_dense_ones(ranks: int, kind: str) -> None:
    mesh, grouped = Mesh.of(cp=ranks), (6, 3) if ranks == 3 else (4, 4 if kind == "ulysses" else 2)
    for length, counts, cut in (
        (16, grouped, "S(2)"),
        (13, grouped, "S(2) zigzag"),
        (5, (ranks, ranks), "S(2) zigzag"),
        (3, grouped, "S(2)"),
        (2 if kind == "gather" else 1, (2, 2), "S(2) zigzag"),
    ):
        given = _draw([(1, counts[0], length, 4), *[(1, counts[1], length, 4)] * 2])
        mask = _allowed(length, length) if length > 1 else torch.ones(1, 1, dtype=torch.bool)
        for tensors, causal in ((given, True), (given, False), ([*given, mask], False)):
            found = _run(mesh, [cut, cut, cut, "R"][: len(tensors)], tensors, kind, is_causal=causal)
            assert found == kind or (length < 3 and kind != "ring"), (length, counts, causal, found)


CASES: dict[str, tuple[Mesh, Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "beside data parallel": (Mesh.of(dp=2, cp=2), "S(0), S(2) zigzag", [(2, 4, 7, 4)] * 3, {"is_causal": True}),
    "beside heads": (
        Mesh.of(tp=2, cp=2),
        "S(1), S(2) zigzag",
        [(1, 4, 7, 4), (1, 2, 7, 4), (1, 2, 7, 4)],
        {"is_causal": True},
    ),
    "over two axes": (Mesh.of(a=2, b=2), "S(2), S(2)", [(1, 2, 11, 4)] * 3, {"is_causal": True}),
    "keys on each rank of an axis": (
        Mesh.of(a=2, b=2),
        ["S(2), S(2)", "R, S(2)", "R, S(2)"],
        [(1, 2, 11, 4)] * 3,
        {"is_causal": True},
    ),
    "all on each rank of an axis": (Mesh.of(a=2, b=2), "R, S(2)", [(1, 2, 6, 4)] * 3, {}),
    "other lengths": (Mesh.of(cp=3), "S(2)", [(1, 2, 5, 4), (1, 2, 8, 4), (1, 2, 8, 4)], {"is_causal": True}),
    "narrow values": (Mesh.of(cp=3), "S(2)", [(1, 4, 5, 4), (1, 2, 5, 4), (1, 2, 5, 3)], {"scale": 0.3}),
    "columns of values on another axis": (
        Mesh.of(cp=2, tp=2),
        ["S(2), R", "S(2), R", "S(2), S(3)"],
        [(1, 2, 6, 4)] * 3,
        {"is_causal": True},
    ),
    "queries cut otherwise": (
        Mesh.of(cp=2),
        ["S(2) zigzag", "S(2)", "S(2) sizes(1,6)"],
        [(1, 2, 7, 4)] * 3,
        {"is_causal": True},
    ),
    "heads as dim 0": (Mesh.of(cp=2), "S(1)", [(3, 7, 4)] * 3, {"is_causal": True}),
    "blocks of rows": (Mesh.of(cp=2), "S(2) block(3)", [(1, 2, 11, 4)] * 3, {"is_causal": True}),
    "not all ranks": (Mesh(("cp",), [0, 2]), "S(2)", [(1, 2, 5, 4)] * 3, {"is_causal": True}),
    "turned ranks": (Mesh(("cp",), [2, 0, 1]), "S(2) zigzag", [(1, 2, 7, 4)] * 3, {"is_causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_beside_other_axes_and_of_other_shapes(name: str) -> None:
    mesh, texts, shapes, options = CASES[name]
    for dtype in (torch.float64, torch.bfloat16):
        assert _run(mesh, texts, [t.to(dtype) for t in _draw(shapes)], **options) == "ring"


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (1, 4, 5, 7), (1, 1, 1, 7), (5, 1)])
def test_masks_of_numbers_and_of_any_shape(shape: tuple[int, ...]) -> None:
    given = _draw([(2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4)])
    for mask in (numbers(*shape, seed=5), numbers(*shape, seed=5) > 0):
        for texts in (["S(2)"] * 3, ["S(2) zigzag"] * 3):
            assert _run(Mesh.of(cp=2), [*texts, "R"], [*given, mask]) == "ring"


def test_a_mask_that_is_learned_is_differentiated() -> None:
    given, bias = _draw([(1, 2, 6, 4)] * 3), numbers(6, 6, seed=5)
    dense = bias.clone().requires_grad_()
    attend(*given, dense).square().sum().backward()

    def body(comm: Comm) -> None:
        q, k, v = (shard(t, "on cp=2: S(2)", None) for t in given)
        mask = shard(bias, "on cp=2: R", None).requires_grad_()
        attend(q, k, v, mask).square().sum().backward()
        assert_close(mask.grad.full(), dense.grad)  # type: ignore[union-attr]  # it has one

    run_local(body, 2)


def test_only_what_needs_a_gradient_gets_one() -> None:
    given = _draw([(1, 2, 6, 4)] * 3)

    def body(comm: Comm) -> list[Any]:
        found = list[Any]()
        with prefer_strategies("ring"):
            for needed in range(3):
                held = [shard(t, "on cp=3: S(2)", None) for t in given]
                held[needed].requires_grad_()
                with explain() as log:
                    attend(*held, is_causal=True).sum().backward()
                found.append([t.grad is not None for t in held])
                assert any("backward" in e.name for e in log.entries) == (needed > 0)
        return found

    assert run_local(body, 3) == [[[i == n for i in range(3)] for n in range(3)]] * 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own tangents
def test_tangents_and_second_derivatives_are_those_of_gathered_keys() -> None:
    q, k, v, other = _draw([(1, 2, 5, 3)] * 4)

    def differentiate_twice(q: Any, k: Any, v: Any) -> Any:
        (grad,) = torch.autograd.grad(attend(q, k, v, is_causal=True).square().sum(), k, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), q)[0]

    def find_tangent(q: Any, k: Any, v: Any, tangent: Any) -> Any:
        return forward_ad.unpack_dual(attend(q, forward_ad.make_dual(k, tangent), v)).tangent  # type: ignore[no-untyped-call]

    def body(comm: Comm, function: Any, *tensors: Tensor) -> None:
        with prefer_strategies("ring"):
            held = [shard(t.detach(), "on cp=2: S(2)", None) for t in tensors]
            for own, given in zip(held, tensors, strict=True):
                own.requires_grad_(given.requires_grad)
            assert_close(function(*held).full(), function(*tensors))

    with sdpa_kernel(SDPBackend.MATH):  # the only kernel of torch with such derivatives
        run_local(body, 2, differentiate_twice, q.clone().requires_grad_(), k.clone().requires_grad_(), v)
        with forward_ad.dual_level():  # type: ignore[no-untyped-call]  # both are switches of the process
            run_local(body, 2, find_tangent, q, k, v, other)


class _Largest(TorchDispatchMode):
    """The elements of the largest local tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_tensor_of_a_ring_falls_with_the_ranks(causal: bool) -> None:
    """No rank ever has all keys, nor the pairs of more than its rows with all of them."""
    given = _draw([(1, 2, 48, 4)] * 3)

    def body(comm: Comm, kind: str) -> int:
        with prefer_strategies(kind):
            held = [shard(t, f"on cp={comm.world_size}: S(2) zigzag", None).requires_grad_() for t in given]
            with _Largest() as largest:
                attend(*held, is_causal=causal).square().sum().backward()
        return largest.elements

    whole = given[0].numel()
    assert [max(run_local(body, n, "ring")) for n in (2, 3, 4)] == [whole // n for n in (2, 3, 4)]
    assert max(run_local(body, 4, "gather")) >= whole


def _choose(shape: tuple[int, ...], keys: int, cut: str = "S(2)", ranks: int = 4, **options: Any) -> str:
    """What is chosen by cost, of tensors without memory."""
    held: list[Any] = []

    def body(comm: Comm) -> str:
        spec = f"on cp={ranks}: {cut}"
        q = shard(torch.empty(shape, device="meta"), spec, None)
        k = shard(torch.empty((shape[0], keys, *shape[2:]), device="meta"), spec, None)
        with explain() as log:
            held.append(attend(q, k, k, enable_gqa=True, **options))
        return _kind_of(log)

    return str(run_local(body, ranks)[0])


def test_cost_chooses_by_bytes_and_by_what_hides_them() -> None:
    assert _choose((1, 8, 64, 8), 8) == "ulysses"  # fewer bytes than all keys
    assert _choose((1, 8, 64, 8), 2) == "gather"  # heads of keys cannot be split
    assert _choose((1, 8, 65536, 128), 2) == "ring"  # moves beside computation
    assert _choose((1, 8, 65536, 128), 8, is_causal=True) == "ulysses"  # late rows would have twice the work
    assert _choose((1, 8, 65536, 128), 8, "S(2) zigzag", is_causal=True) == "ring"


def test_each_call_has_the_kind_that_is_preferred_then() -> None:
    def body(comm: Comm) -> list[str]:
        given, found = [shard(t, "on cp=2: S(2)", None) for t in _draw([(1, 4, 8, 2)] * 3)], list[str]()
        for kind in (*KINDS, None, *KINDS, None):
            with prefer_strategies(kind):
                for _ in range(3):
                    attend(*given)
                with explain() as log:
                    attend(*given)
                found.append(_kind_of(log))
        return found

    assert run_local(body, 2) == [[*KINDS, "gather"] * 2] * 2


def test_what_is_seen_of_blocks_is_what_positions_say() -> None:
    """For all zigzags and plain cuts of small lengths: each pair of rows exactly once."""
    for ranks in (2, 3, 4):
        for length in range(1, 14):
            for cut in (Shard(0), Shard(0, zigzag=True), Shard(0, block=2)):
                runs = _runs_of(cut, length, ranks)
                for rows in runs:
                    for columns in runs:
                        _check_seen(rows, columns)


def _runs_of(cut: Placement, length: int, ranks: int) -> list[Any]:
    from shardwise.ops.views import find_runs

    layout = MeshSpec(Mesh.of(cp=ranks), [cut]).layout((length,))
    return [[run for run in find_runs(layout, rank, 0) if run[0] < run[1]] for rank in range(ranks)]


def _check_seen(rows: Sequence[Any], columns: Sequence[Any]) -> None:
    own, other = ([i for a, b, _ in runs for i in range(a, b)] for runs in (rows, columns))
    seen = torch.zeros(len(own), len(other), dtype=torch.int64)
    for r, c, kind in _list_seen(rows, columns):
        block = torch.ones_like(seen[r, c])
        if kind == "some":
            block = (torch.tensor(other)[c].unsqueeze(0) <= torch.tensor(own)[r].unsqueeze(1)).to(torch.int64)
        seen[r, c] += block.tril() if kind == "causal" else block
    assert seen.tolist() == [[int(o <= r) for o in other] for r in own]
