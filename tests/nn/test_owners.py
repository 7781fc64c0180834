"""Do optimizers of whole matrices give what one rank gives, in every layout, and where does each matrix travel?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.comm import Comm, run_local
from shardwise.geometry import parse_spec
from shardwise.nn import Muon, OwnerOptimizer, deal_owners
from shardwise.nn.owners import _rounds
from shardwise.ops.explain import explain
from shardwise.tensor import shard

SHAPES = {"up": (12, 8), "down": (8, 12), "square": (9, 9), "thin": (3, 11), "row": (1, 5)}
LAYOUTS = [
    ("on tp=4: S(0)",) * 5,
    ("on tp=4: S(1)",) * 5,
    ("on dp=2,tp=2: R, S(0)",) * 5,
    ("on dp=2,tp=2: S(0), S(1)", "on dp=2,tp=2: R, R", "on tp=4: S(0) unit(4)", "on tp=4: S(1) block(2)", "on tp=4: R"),
    ("on tp=2 @ 2-3: S(0)", "on tp=3: S(1)", "on a=2,b=2: S(1), S(1)", "on tp=4: S(0) sizes(0,3,0,0)", "on tp=1: R"),
]


def values(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=dtype, generator=generator) for name, shape in SHAPES.items()}


def train_whole(make: Callable[[list[nn.Parameter]], optim.Optimizer], dtype: torch.dtype, steps: int) -> list[Tensor]:
    params = {name: nn.Parameter(value) for name, value in values(dtype).items()}
    optimizer = make(list(params.values()))
    for step in range(steps):
        for p, grad in zip(params.values(), values(dtype, 1 + step).values(), strict=True):
            p.grad = grad
        optimizer.step()
    return [p.detach() for p in params.values()]


def make_sharded(texts: tuple[str, ...], dtype: torch.dtype, comm: Comm) -> dict[str, nn.Parameter]:
    pairs = zip(values(dtype).items(), texts, strict=True)
    return {name: nn.Parameter(shard(value, parse_spec(text), comm=comm)) for (name, value), text in pairs}


def set_gradients(params: dict[str, Any], dtype: torch.dtype, step: int) -> None:
    for p, grad in zip(params.values(), values(dtype, 1 + step).values(), strict=True):
        p.grad = shard(grad, p.sharding, comm=p.comm)


def train_sharded(
    make: Callable[[Any], optim.Optimizer], texts: tuple[str, ...], dtype: torch.dtype, steps: int, comm: Comm
) -> list[Tensor]:
    params = make_sharded(texts, dtype, comm)
    optimizer = make(list(params.values()))
    for step in range(steps):
        set_gradients(params, dtype, step)
        optimizer.step()
    return [p.detach().full() for p in params.values()]


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}])
@pytest.mark.parametrize("texts", LAYOUTS)
def test_bits_are_those_of_torch_on_whole_matrices(texts: tuple[str, ...], options: dict[str, Any]) -> None:
    whole = train_whole(lambda p: optim.Muon(p, lr=0.1, **options), torch.float32, 3)
    for found in run_local(
        lambda comm: train_sharded(lambda p: Muon(p, lr=0.1, **options), texts, torch.float32, 3, comm), 4
    ):
        for name, a, b in zip(SHAPES, whole, found, strict=True):
            assert torch.equal(a, b), name


def test_plain_parameters_have_the_bits_of_torch() -> None:
    whole = train_whole(lambda p: optim.Muon(p, lr=0.1), torch.float32, 3)
    for a, b in zip(whole, train_whole(lambda p: Muon(p, lr=0.1), torch.float32, 3), strict=True):
        assert torch.equal(a, b)


def dense_muon(params: list[Tensor], grads: list[list[Tensor]], lr: float) -> list[Tensor]:
    """Muon in a plain loop, in the type of its parameters."""
    buffers = [torch.zeros_like(p) for p in params]
    for step in grads:
        for i, grad in enumerate(step):
            buffers[i] = 0.95 * buffers[i] + 0.05 * grad
            x = 0.05 * grad + 0.95 * buffers[i]
            rows, columns = x.shape
            x = x / x.norm()
            for _ in range(5):
                s = x @ x.mT
                x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
            params[i] = params[i] * (1 - 0.1 * lr) - lr * max(1, rows / columns) ** 0.5 * x
    return params


@pytest.mark.parametrize("texts", LAYOUTS)
def test_float64_iterations_equal_a_dense_loop(texts: tuple[str, ...]) -> None:
    start = list(values(torch.float64).values())
    dense = dense_muon(start, [list(values(torch.float64, 1 + step).values()) for step in range(4)], lr=0.1)
    made = run_local(
        lambda comm: train_sharded(lambda p: Muon(p, lr=0.1, ns_dtype=torch.float64), texts, torch.float64, 4, comm),
        4,
    )
    for a, b in zip(dense, made[3], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


class Shampoo(OwnerOptimizer):
    """Two preconditioners of each matrix."""

    def matrix_state(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {"left": (rows, rows), "right": (columns, columns)}

    def update_matrix(self, matrix: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        return _inverse_root(state["left"]) @ matrix @ _inverse_root(state["right"])


def _inverse_root(square: Tensor) -> Tensor:
    found, vectors = torch.linalg.eigh(square)
    return vectors * found.clamp(min=1e-4) ** -0.25 @ vectors.T


@pytest.mark.parametrize("texts", LAYOUTS)
def test_any_function_of_whole_matrices(texts: tuple[str, ...]) -> None:
    whole = train_whole(lambda p: Shampoo(p, {"lr": 0.1}), torch.float64, 3)

    def body(comm: Comm) -> list[Tensor]:
        return train_sharded(lambda p: Shampoo(p, {"lr": 0.1}), texts, torch.float64, 3, comm)

    for found in run_local(body, 4):
        for a, b in zip(whole, found, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-9)


def test_stacked_and_fused_parameters_are_several_matrices() -> None:
    generator = torch.Generator().manual_seed(3)
    stack, fused = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((3, 4, 6), (12, 5)))
    grads = [torch.randn(t.shape, dtype=torch.float64, generator=generator) for t in (stack, fused)]

    def step(stacked: Any, rows: Any) -> None:
        groups = [{"params": [stacked], "stacked": True}, {"params": [rows], "fused": (8, 2, 2)}]
        optimizer = Muon(groups, lr=0.1, ns_dtype=torch.float64)
        optimizer.step()

    parts = [*stack, *fused.split((8, 2, 2))]
    dense = dense_muon(list(parts), [[*grads[0], *grads[1].split((8, 2, 2))]], lr=0.1)
    wanted = torch.stack(dense[:3]), torch.cat(dense[3:])

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        specs = "on ep=3: S(0)", "on tp=3: S(0) groups(8,2,2)"
        params = [nn.Parameter(shard(t, parse_spec(s), comm=comm)) for t, s in zip((stack, fused), specs, strict=True)]
        for p, grad in zip(params, grads, strict=True):
            p.grad = shard(grad, p.sharding, comm=comm)
        step(*params)
        return params[0].detach().full(), params[1].detach().full()

    plain = [nn.Parameter(t.clone()) for t in (stack, fused)]
    for p, grad in zip(plain, grads, strict=True):
        p.grad = grad
    step(*plain)
    for found in [*run_local(body, 3), tuple(plain)]:
        for a, b in zip(wanted, found, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_each_byte_travels_there_and_back_once() -> None:
    def body(comm: Comm) -> int:
        params = {i: nn.Parameter(shard(torch.randn(16, 8), parse_spec("on tp=4: S(0)"), comm=comm)) for i in range(8)}
        for p in params.values():
            p.grad = shard(torch.randn(16, 8), p.sharding, comm=comm)
        optimizer = Muon(list(params.values()))
        with explain() as log:
            optimizer.step()
        return log.moved_bytes

    count = 8 * 16 * 8 * 2  # bfloat16
    assert run_local(body, 4)[0] == 2 * count * 3 // 4


def test_costs_are_dealt_evenly_and_a_round_brings_one_matrix() -> None:
    owners = deal_owners({f"w{i}": 1.0 for i in range(10)}, ranks=(3, 5, 7))
    assert sorted(list(owners.values()).count(rank) for rank in (3, 5, 7)) == [3, 3, 4]
    assert deal_owners({"b": 1.0, "a": 1.0}, ranks=(0, 1)) == {"a": 0, "b": 1}

    def body(comm: Comm) -> list[int]:
        spec = parse_spec("on tp=2: S(0)")
        shapes = [(8, 8)] * 4 + [(4, 4)] * 8
        optimizer = Muon([nn.Parameter(shard(torch.randn(s), spec, comm=comm)) for s in shapes])
        most = []
        for works in _rounds(optimizer._deal()):
            totals = [sum(w.layout.elements_per_rank().get(rank, 0) for w in works) for rank in (0, 1)]
            most.append(max(totals))
        return most

    assert run_local(body, 2) == [[64, 64, 64]] * 2


def test_state_is_loaded_in_another_world_and_layout(tmp_path: Path) -> None:
    def make(texts: tuple[str, ...], comm: Comm) -> tuple[dict[str, nn.Parameter], Any, Any]:
        params = make_sharded(texts, torch.float64, comm)
        kinds = (
            Muon(dict(list(params.items())[:3]), lr=0.1, ns_dtype=torch.float64),
            Shampoo(dict(list(params.items())[3:]), {"lr": 0.1}),
        )
        return params, *kinds

    def steps(texts: tuple[str, ...], numbers: range, path: Path, load: bool, comm: Comm) -> list[Tensor]:
        params, muon, shampoo = make(texts, comm)
        state = {"weights": dict(params), "muon": muon, "shampoo": shampoo}
        if load:
            shardwise.load(state, path, comm=comm)
        for number in numbers:
            set_gradients(params, torch.float64, number)
            muon.step()
            shampoo.step()
        if not load:
            shardwise.save(state, path, comm=comm)
        return [p.detach().full() for p in params.values()]

    path = tmp_path / "state"
    run_local(lambda comm: steps(LAYOUTS[3], range(2), path, False, comm), 4)
    found = run_local(lambda comm: steps(("on tp=3: S(1)",) * 5, range(2, 4), path, True, comm), 3)
    whole = run_local(lambda comm: steps(("on tp=1: R",) * 5, range(4), tmp_path / "other", False, comm), 1)
    for a, b in zip(whole[0], found[2], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9)


def test_what_is_no_matrix_belongs_to_an_optimizer_beside() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(
        ValueError, match=r"1 of 2 parameters are others, such as bias of shape \(2,\).*AdamW beside it"
    ):
        Muon(model.named_parameters())
    with pytest.raises(ValueError, match=r"stacks of real matrices.*number 0 of shape \(2, 3\)"):
        Muon([{"params": [model.weight], "stacked": True}])
    with pytest.raises(ValueError, match=r"fused=\(2, 1\) are matrices of 3 rows together, got number 0 of shape \(2"):
        Muon([{"params": [model.weight], "fused": (2, 1)}])
    with pytest.raises(ValueError, match="adjust_lr_fn='other'"):
        Muon([model.weight], adjust_lr_fn="other")
    with pytest.raises(ValueError, match="rates are 0 or more"):
        Muon([model.weight], lr=-1)
