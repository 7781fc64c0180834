"""Results do not depend on torch's default device and dtype: what shardwise makes for itself names its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Binomial, Gamma, Normal
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Partial, Replicate, Shard, ShardedTensor, run_local
from shardwise.nn import route_tokens
from tests.device import DEVICE

RANKS = 2
MESH = Mesh.of(tp=RANKS)
ROWS, COLUMNS, WHOLE = (MeshSpec(MESH, (p,)) for p in (Shard(0), Shard(1), Replicate()))
PENDING = MeshSpec(MESH, (Partial("sum"),))
aten = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.int64, device="cpu") * 7 % 11 - 5).to(dtype) / 4).reshape(shape).to(dtype)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def moves(comm: Comm) -> Any:
    x = sw.shard(numbers(5, 6), ROWS)
    held = sw.from_local([numbers(5, 6)], PENDING, (5, 6))
    many = sw.redistribute_many([x, held], [COLUMNS, ROWS])
    asked = x.redistribute(COLUMNS, async_op=True)
    return [x.redistribute(ChunkSpec(1, RANKS)), held.redistribute(ROWS), *many, asked.wait(), x.gather_to(0)]


def creation(comm: Comm) -> Any:
    made = [sw.zeros(ROWS, (4, 3), dtype=torch.float32), sw.full(ROWS, (4, 3), 2.5, dtype=torch.float32)]
    x = sw.shard(numbers(4, 3), ROWS)
    return [*made, sw.ones_like(x), sw.full_like(x, 3), x.new_zeros(2), x.new_full((2, 2), 1.0), torch.zeros_like(x)]


def random_values(comm: Comm) -> Any:
    sw.manual_seed(3)
    x = sw.rand(ROWS, (5, 3), dtype=torch.float32)
    drawn = [sw.randn(COLUMNS, (5, 4), dtype=torch.float64), torch.randn_like(x), x.clone().uniform_(-1, 1)]
    drawn += [F.dropout(x, 0.5), torch.bernoulli(x), torch.multinomial(x, 2), torch.rand_like(x)]
    return [x, *drawn, nn.init.kaiming_uniform_(sw.empty(ROWS, (5, 4), dtype=torch.float32))]


def distributions(comm: Comm) -> Any:
    sw.manual_seed(4)
    x = sw.shard(numbers(6, 2).abs() + 0.5, ROWS)
    counts = Binomial(sw.shard(numbers(6, 2).abs().ceil() + 3, ROWS), x / 4, validate_args=False).sample()
    return [Gamma(x, x, validate_args=False).sample(), counts, Normal(x, x, validate_args=False).sample()]


def operators(comm: Comm) -> Any:
    x, w = sw.shard(numbers(5, 6), ROWS), sw.shard(numbers(6, 4), COLUMNS)
    found = [x @ w, x + 1, x.softmax(0), x.sum(), x.mean(0), x.var(0), x.std(), x.norm(), x.cumsum(0), x.sort(0)]
    found += [x.argmax(), x.max(0), x.topk(2, 0), x.median(), x.logsumexp(0), x.prod(0), x.flatten(), x.t(), x > 0]
    with sw.plain_as_replicated():
        found += [x[1:4], x[ids(3, 0)], x[ids(4, 3, 2, 1, 0)], x.index_select(0, ids(0, 4)), x + numbers(6)]
        found += [torch.gather(x, 0, ids(0, 1)[None, :])]
    found += [torch.where(x > 0, x, 0.0), torch.cat([x, x]), x.roll(1, 0), x.flip(0), F.pad(x, (0, 0, 1, 1)), x.tril()]
    found += [x.unsqueeze(0).repeat(2, 1, 1), x.masked_fill(x > 0, 1), x.clamp(-1, 1), x.histc(4, -2, 2), x.unique()]
    return [*found, x.nonzero(), x.sum().item(), torch.allclose(x, x), x.sum(0).full().tolist()]


def layers(comm: Comm) -> Any:
    x, w, b = sw.shard(numbers(4, 6), ROWS), sw.shard(numbers(6), WHOLE), sw.shard(numbers(6), WHOLE)
    image, kernel = sw.shard(numbers(4, 2, 5, 5), ROWS), sw.shard(numbers(4, 2, 3, 3), WHOLE)
    query = sw.shard(numbers(2, 2, 4, 4), COLUMNS)
    classes = sw.shard(ids(0, 2, 5, 1), ROWS)
    found = [F.layer_norm(x, (6,), w, b), F.rms_norm(x, (6,), w), F.batch_norm(x, None, None, w, b, training=True)]
    found += [F.conv2d(image, kernel), F.max_pool2d(image, 2), F.interpolate(image, scale_factor=2.0)]
    found += [F.scaled_dot_product_attention(query, query, query, is_causal=True), F.cross_entropy(x, classes)]
    return [*found, F.mse_loss(x, x * 2), F.one_hot(classes, 6), F.gelu(x), F.group_norm(image, 2)]


def lookups(comm: Comm) -> Any:
    table = sw.shard(numbers(7, 4), ROWS).requires_grad_()
    with sw.plain_as_local_batch():
        bags = F.embedding_bag(ids(1, 6, 2, 0), table, ids(0, 3), mode="mean")
        rows = F.embedding(ids(6, 0, 3), table, padding_idx=0)
    (bags.sum() + (rows * rows).sum()).backward()
    return [bags.detach(), rows.detach(), table.grad, F.embedding(sw.shard(ids(6, 0, 3, 3), ROWS), table.detach())]


def experts(comm: Comm) -> Any:
    x = sw.shard(numbers(4, 3), MeshSpec(Mesh.of(ep=RANKS), (Shard(0),)))
    chosen = sw.shard(ids(1, 0, 1, 1).reshape(4, 1), MeshSpec(Mesh.of(ep=RANKS), (Shard(0),)))
    route = route_tokens(x, chosen, 2)
    weights = sw.shard(numbers(4, 1), MeshSpec(Mesh.of(ep=RANKS), (Shard(0),)))
    return [route.combine(route.rows * 2, weights)]


def make_model() -> nn.Module:
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
    return model


def shard_model(model: nn.Module) -> nn.Module:
    plan = sw.ModelPlan(MESH, {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"}, input_plan="replicated")
    sw.shard_module(model, plan)
    return model


def training(comm: Comm) -> Any:
    model = shard_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2):
        loss = model(numbers(4, 6) + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [loss.detach(), norm]
    return [*losses, *model.parameters()]


def sharded_optimizer(comm: Comm) -> Any:
    weight = nn.Parameter(sw.shard(numbers(4, 3), ROWS))
    optimizer = sw.ShardedOptimizer({"w": weight}, torch.optim.SGD, lr=0.5, momentum=0.9)
    (weight * weight).sum().backward()
    optimizer.step()
    return [weight, optimizer.state_dict()]


def compiled_step(comm: Comm) -> Any:
    model = shard_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = F.dropout(model(x), 0.25).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    sw.manual_seed(5)
    compiled = sw.compile(step, backend="eager", uses=(model, optimizer))
    return [compiled(numbers(4, 6)), compiled(numbers(4, 6)), *model.parameters()]


def meta_model(comm: Comm) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8, dtype=torch.float32), nn.ReLU(), nn.Linear(8, 4, dtype=torch.float32))
    sw.manual_seed(6)
    shard_model(model)
    return [model(numbers(4, 6).to(comm.device)), *model.parameters()]


def checkpoints(comm: Comm) -> Any:
    with TemporaryDirectory() if comm.rank == 0 else _nothing() as made:
        folder = Path(comm.all_gather_bytes(str(made).encode(), label="folder")[0].decode())
        x, plain = sw.shard(numbers(5, 6), ROWS), numbers(3)
        sw.save({"x": x, "plain": plain, "step": 3}, folder / "a")
        into = {"x": sw.zeros(COLUMNS, (5, 6), dtype=torch.float32), "plain": plain * 0, "step": 0}
        found = sw.load(into, folder / "a")
        opened = sw.open(folder / "a")
        sw.save({"y": x}, folder / "b", format="dcp")
        comm.all_gather_bytes(b"", label="read")
        rest = [opened["x"][1:3], sw.open(folder / "b")["y"][:]]
        comm.all_gather_bytes(b"", label="done")
    return [found, into, rest]


@contextmanager
def _nothing() -> Iterator[str]:
    yield ""


def copies(comm: Comm) -> Any:
    x = sw.shard(numbers(5, 6), ROWS)
    return [pickle.loads(pickle.dumps(x)), copy.deepcopy(x), x.to(torch.float64), x.clone(), x.cpu(), x.full()]


PROGRAMS: list[Callable[[Comm], Any]] = [
    moves,
    creation,
    random_values,
    distributions,
    operators,
    layers,
    lookups,
    experts,
    training,
    sharded_optimizer,
    compiled_step,
    meta_model,
    checkpoints,
    copies,
]


def run(program: Callable[[Comm], Any], default: str | None = None) -> list[Any]:
    """What every rank gets where this is the default device: whole tensors and other values in order."""

    def body(comm: Comm) -> list[Any]:
        with nullcontext() if default is None else torch.device(default):
            found = program(comm)
        return [v.full().detach() if isinstance(v, ShardedTensor) else v for v in tree_leaves(found)]

    return tree_leaves(run_local(body, RANKS))


@cache
def usual(program: Callable[[Comm], Any]) -> list[Any]:
    return run(program)


def is_same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return type(found) is type(wanted) and found == wanted
    return found.device == wanted.device and found.dtype == wanted.dtype and torch.equal(found, wanted)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_a_default_device_leaves_a_program_its_graphs() -> None:
    def body(comm: Comm) -> str:
        compiled = sw.compile(lambda x: x + 1, backend="eager")
        x = sw.shard(numbers(4), "on tp=2: S(0)")
        with torch.device("meta"):
            compiled(x)
        with torch.device("cpu"):
            compiled(x)
            compiled(x)
        return str(compiled.explain())

    text = run_local(body, RANKS, timeout=60)[0]
    assert "without a graph" not in text and "default device is cpu, was meta" in text, text


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("default", ["meta", torch.float64, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_torch_defaults(program: Callable[[Comm], Any], default: Any) -> None:
    wanted = usual(program)
    with default_dtype(torch.float32 if default == "meta" else default):
        found = run(program, default if default == "meta" else None)
    assert len(found) == len(wanted) > 0
    assert [i for i, pair in enumerate(zip(found, wanted, strict=True)) if not is_same(*pair)] == []


@pytest.mark.parametrize("default", ["meta", torch.float64, torch.bfloat16], ids=str)
def test_rules_are_found_and_checked_alike(default: Any) -> None:
    def find() -> tuple[str, ...]:
        a, b = numbers(4, 6), numbers(6, 5)
        picked = torch.tensor([0, 3, 1, 2, 5], dtype=torch.int64, device="cpu")
        return (
            str(sw.discover_sharding(aten.mm.default, a, b)),
            str(sw.check_sharding(aten.mm.default, a, b)),
            str(sw.check_sharding(aten.index_select.default, a, 1, picked)),
            str(sw.check_sharding(aten.cumsum.default, a, 0)),
        )

    wanted = find()
    with torch.device("meta") if default == "meta" else default_dtype(default):
        assert find() == wanted


def test_ranks_of_run_local_make_tensors_where_their_caller_does() -> None:
    with torch.device("meta"):
        assert run_local(lambda comm: (torch.empty(1).device.type, comm.device.type), 2) == [("meta", "cpu")] * 2
    assert run_local(lambda comm: torch.empty(1).device.type, 2) == [DEVICE] * 2
