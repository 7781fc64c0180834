"""Are loaders as inference engines write them recorded exactly, and refused when they compute?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.sync import RecordingError, StateMap, publish, record, subscribe
from shardwise.sync.recording import apply_map

Weights = Iterable[tuple[str, Tensor]]
HIDDEN, HEAD, HEADS, KV_HEADS, INNER, EXPERTS, VOCAB, PADDED = 8, 2, 4, 2, 6, 4, 10, 16


class Qkv(nn.Module):
    """Fused queries, keys and values; with more ranks than kv heads these are replicated."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.heads = HEADS // ranks
        self.kv_heads = max(1, KV_HEADS // ranks)
        self.weight = nn.Parameter(torch.empty((self.heads + 2 * self.kv_heads) * HEAD, HIDDEN, dtype=torch.bfloat16))
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]  # as engines do

    def weight_loader(self, param: Tensor, loaded: Tensor, shard: str) -> None:
        sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        starts = {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}
        replicas = max(1, self.ranks // KV_HEADS)
        shard_rank = self.rank if shard == "q" else self.rank // replicas
        size = sizes[shard] * HEAD
        part = param.data.narrow(0, starts[shard] * HEAD, size)
        loaded = loaded.narrow(0, shard_rank * size, size)
        assert part.shape == loaded.shape
        part.copy_(loaded)


class Mlp(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.size = rank, INNER // ranks
        self.gate_up = nn.Parameter(torch.empty(2 * self.size, HIDDEN))
        self.down = nn.Parameter(torch.empty(self.size, HIDDEN))  # kept transposed

    def load(self, shard: str, loaded: Tensor) -> None:
        if shard == "down":
            self.down.data.copy_(loaded[:, self.rank * self.size : (self.rank + 1) * self.size].t().contiguous())
            return
        number = ["gate", "up"].index(shard)
        self.gate_up.data.chunk(2)[number][:] = loaded.chunk(INNER // self.size)[self.rank]


class Moe(nn.Module):
    """Stacked experts with an expert map: this rank has some of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        count = EXPERTS // ranks
        self.map = {e: e - rank * count for e in range(rank * count, (rank + 1) * count)}
        self.w13 = nn.Parameter(torch.empty(count, 2 * INNER, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(count, HIDDEN, INNER))

    def load(self, expert: int, shard: str, loaded: Tensor) -> None:
        local = self.map.get(expert)
        if local is None:
            return
        if shard == "w2":
            self.w2.data[local] = loaded
        else:
            start = 0 if shard == "w1" else INNER
            self.w13.data[local].narrow(0, start, INNER).copy_(loaded)


class Engine(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        rows = PADDED // ranks
        self.embed = nn.Parameter(torch.empty(rows, HIDDEN, dtype=torch.bfloat16))
        self.lm_head = self.embed
        self.qkv, self.mlp, self.moe = Qkv(rank, ranks), Mlp(rank, ranks), Moe(rank, ranks)
        self.norm = nn.Parameter(torch.empty(HIDDEN))

    def load_weights(self, weights: Weights) -> None:
        params = dict(self.named_parameters())
        for name, loaded in weights:
            part = name.split(".")
            if name == "embed.weight":
                rows = PADDED // self.ranks
                start = self.rank * rows
                shard = loaded.narrow(0, min(start, VOCAB), max(0, min(rows, VOCAB - start)))
                params["embed"].data[: shard.shape[0]].copy_(shard)
                params["embed"].data[shard.shape[0] :].fill_(0)
            elif part[0] == "attn":
                params["qkv.weight"].weight_loader(params["qkv.weight"], loaded, part[1])  # type: ignore[attr-defined]
            elif part[0] == "mlp":
                self.mlp.load(part[1], loaded)
            elif part[0] == "experts":
                self.moe.load(int(part[1]), part[2], loaded)
            elif name == "norm":
                params["norm"].data.copy_(loaded)


SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCAB, HIDDEN),
    "attn.q": (HEADS * HEAD, HIDDEN),
    "attn.k": (KV_HEADS * HEAD, HIDDEN),
    "attn.v": (KV_HEADS * HEAD, HIDDEN),
    "mlp.gate": (INNER, HIDDEN),
    "mlp.up": (INNER, HIDDEN),
    "mlp.down": (HIDDEN, INNER),
    "norm": (HIDDEN,),
    **{f"experts.{e}.{w}": (INNER, HIDDEN) for e in range(EXPERTS) for w in ("w1", "w3")},
    **{f"experts.{e}.w2": (HIDDEN, INNER) for e in range(EXPERTS)},
}
TYPES = {name: (shape, torch.float32) for name, shape in SHAPES.items()}


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def built(rank: int, ranks: int, device: str) -> Engine:
    engine = Engine.__new__(Engine)
    with torch.device(device):
        engine.__init__(rank, ranks)  # type: ignore[misc]  # on the device
    return engine


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_an_engine_is_recorded_exactly(rank: int, ranks: int, device: str) -> None:
    engine = built(rank, ranks, device)
    kept = {name: p.detach().clone() for name, p in engine.named_parameters()}
    found = record(engine.load_weights, TYPES, into=engine)
    assert set(found.targets) == set(engine.state_dict())
    wanted, trained = built(rank, ranks, "cpu"), values()
    wanted.load_weights(trained.items())
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(apply_map(found, name, trained), tensor), name
    if device == "cpu":  # nothing is left in it
        assert all(
            torch.equal(p.detach().view(torch.uint8), kept[n].view(torch.uint8)) for n, p in engine.named_parameters()
        )


@pytest.mark.parametrize("rank", range(4))
def test_kv_heads_fewer_than_ranks(rank: int) -> None:
    layer = Qkv(rank, 4)

    def load(weights: Weights) -> None:
        for name, loaded in weights:
            layer.weight_loader(layer.weight, loaded, name)

    shapes = {n: ((h * HEAD, HIDDEN), torch.bfloat16) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}
    found = record(load, shapes, into=layer)
    low = rank // 2 * HEAD
    assert [str(term) for term in found.targets["weight"].terms] == [
        f"[0:2, 0:8] = q[{rank * HEAD}:{rank * HEAD + 2}, 0:8]",
        f"[2:4, 0:8] = k[{low}:{low + 2}, 0:8]",
        f"[4:6, 0:8] = v[{low}:{low + 2}, 0:8]",
    ]


def copies(target: Tensor, make: Callable[[Tensor, Tensor], Any]) -> Callable[[Weights], None]:
    """A loader of one tensor `w`."""

    def load(weights: Weights) -> None:
        for _, loaded in weights:
            make(target, loaded)

    return load


def assign(index: Any, change: Callable[[Tensor], Tensor] = lambda w: w) -> Callable[[Tensor, Tensor], None]:
    def make(target: Tensor, loaded: Tensor) -> None:
        target[index] = change(loaded)

    return make


def append(target: Tensor, loaded: Tensor) -> None:
    temporary = torch.empty(4, 6)
    temporary[:2] = loaded[2:]
    temporary[2:].copy_(loaded[:2])
    temporary[0, 0] = 5.0
    target.copy_(temporary)


WAYS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Any]]] = {
    "cat": ((8, 6), lambda t, w: t.copy_(torch.cat([w, w]))),
    "stack": ((4, 2, 6), lambda t, w: t.copy_(torch.stack([w, w], dim=1))),
    "view": ((2, 12), lambda t, w: t.copy_(w.view(2, 12))),
    "reshape of a transpose": ((24,), lambda t, w: t.copy_(w.t().reshape(-1))),
    "unflatten": ((2, 2, 6), lambda t, w: t.copy_(w.reshape(2, 2, 6))),
    "every second": ((4, 3), lambda t, w: t.copy_(w[:, ::2])),
    "interleaved": ((8, 6), lambda t, w: (t[0::2].copy_(w), t[1::2].copy_(w))),
    "repeat_interleave": ((8, 6), lambda t, w: t.copy_(w.repeat_interleave(2, dim=0))),
    "repeat": ((8, 6), lambda t, w: t.copy_(w.repeat(2, 1))),
    "expand": ((3, 4, 6), lambda t, w: t.copy_(w.unsqueeze(0).expand(3, 4, 6))),
    "broadcast": ((3, 4, 6), lambda t, w: t.copy_(w)),
    "pad": ((6, 8), lambda t, w: t.copy_(nn.functional.pad(w, (1, 1, 0, 2), value=2.5))),
    "index_select": ((3, 6), lambda t, w: t.copy_(w.index_select(0, torch.tensor([3, 0, 1])))),
    "index": ((4, 3), lambda t, w: t.copy_(w[:, torch.tensor([5, 0, -1])])),
    "index_put": ((4, 6), lambda t, w: assign(torch.tensor([2, 0, 1, 3]))(t, w)),
    "index_copy": ((4, 6), lambda t, w: t.index_copy_(1, torch.tensor([1, 0, 2, 3, 5, 4]), w)),
    "temporaries": ((4, 6), append),
    "element by element": ((4, 6), lambda t, w: [t[i, j].copy_(w[i, j]) for i in range(4) for j in range(6)]),
    "split": ((6, 4), lambda t, w: [t[:1].copy_(w.tensor_split([1], 1)[0].t()), t[1:].copy_(w.narrow(1, 1, 5).t())]),
    "zeros": ((5, 6), lambda t, w: (t.zero_(), t[:4].copy_(w))),
    "twice": ((4, 6), lambda t, w: (t.copy_(w), t[1:3].copy_(w[:2]))),
    "half and back": ((4, 6), lambda t, w: t.copy_(w.double().float())),
    "movedim": ((6, 4), lambda t, w: t.copy_(w.movedim(0, 1).contiguous().clone())),
    "to": ((4, 6), lambda t, w: t.copy_(w.to("cpu").contiguous())),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_copying(way: str) -> None:
    shape, make = WAYS[way]
    target = torch.full(shape, -1.0)
    found = record(copies(target, make), {"w": ((4, 6), torch.float32)}, into={"t": target})
    assert target.eq(-1).all()
    source = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    make(target, source)
    assert torch.equal(apply_map(found, "t", {"w": source}), target)


def test_memory_that_is_replaced() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, 6, device="meta"))

        def load_weights(self, weights: Weights) -> None:
            for _, loaded in weights:
                self.w.data = loaded.to(torch.bfloat16).t().contiguous()

    module = Replaces()
    found = record(module.load_weights, {"w": ((4, 6), torch.float32)}, into=module)
    assert str(found) == "w: bf16[6, 4]\n  [0:6, 0:4] = w[0:4, 0:6] transposed (1, 0)  bf16 <- f32"


def swallow(target: Tensor, loaded: Tensor) -> None:
    try:
        target.copy_(loaded * 2)
    except RuntimeError:
        target.copy_(loaded)
    except ValueError:
        target.copy_(loaded)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t, w: t.copy_(w + 1), r"add of w at test_recording.py:\d+ cannot be recorded"),
        (lambda t, w: t.copy_(w * w), "mul of w"),
        (lambda t, w: t.copy_(w / w.amax()), "amax of w"),
        (lambda t, w: t.add_(w), "add_ of t, w"),
        (lambda t, w: t.fill_(w[0, 0].item()), "_local_scalar_dense of w"),
        (lambda t, w: t.copy_(w) if w.sum() > 0 else None, "sum of w"),
        (lambda t, w: t.copy_(w.view(torch.int32)), "a view of f32 as i32 of w"),
        (lambda t, w: t.copy_(w.bfloat16()), "converting w from f32 to bf16 and then to f32"),
        (lambda t, w: t.copy_(w[w > 0].reshape(4, 6)), "gt of w"),
        (swallow, "mul of w"),
        (lambda t, w: t[:3].copy_(w[:3]), r"t\[3:4, 0:6\] was not written by the loader"),
        (lambda t, w: t[:, :2].copy_(w[:, :2]), r"t\[0:4, 2:6\] was not written"),
        (lambda t, w: t.copy_(torch.empty(4, 6)), r"t\[0:4, 0:6\] was not written"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(make: Any, text: str) -> None:
    target = torch.zeros(4, 6)
    with pytest.raises(RecordingError, match=text):
        record(copies(target, make), {"w": ((4, 6), torch.float32)}, into={"t": target})


def test_unwritten_tensors_may_be_allowed_and_are_left_out() -> None:
    state = {"t": torch.zeros(4, 6), "kv_scale": torch.ones(())}
    load = copies(state["t"], lambda t, w: t.copy_(w))
    with pytest.raises(RecordingError, match=r"kv_scale.* was not written"):
        record(load, {"w": ((4, 6), torch.float32)}, into=state)
    found = record(load, {"w": ((4, 6), torch.float32)}, into=state, allow_unwritten=["kv_*"])
    assert list(found.targets) == ["t"]


def test_a_loader_that_depends_on_the_call_is_found() -> None:
    target, calls = torch.zeros(4, 6), []

    def make(t: Tensor, w: Tensor) -> None:
        calls.append(1)
        t.copy_(w if len(calls) == 1 else w.flipud())

    with pytest.raises(RecordingError, match="t: the loader gives other values than what was recorded"):
        record(copies(target, make), {"w": ((4, 6), torch.float32)}, into={"t": target})
    assert target.eq(0).all()


def test_many_experts_are_recorded_in_one_term_each() -> None:
    stacked = torch.empty(64, 8, 4, device="meta")

    def load(weights: Weights) -> None:
        for name, loaded in weights:
            expert, part = name.split(".")
            stacked[int(expert)].chunk(2)[int(part)].copy_(loaded)

    shapes = {f"{e}.{p}": ((4, 4), torch.bfloat16) for e in range(64) for p in range(2)}
    found = record(load, {n: (s, torch.float32) for n, (s, _) in shapes.items()}, into={"w": stacked})
    assert found.term_count == 128


def test_a_recorded_map_feeds_a_link() -> None:
    trained = values()
    with publish(trained, "tcp://127.0.0.1:0", token="a-token-of-the-tests") as trainer:

        def serve(comm: shardwise.Comm) -> None:
            engine, wanted = built(comm.rank, 2, "cpu"), built(comm.rank, 2, "cpu")
            found: StateMap = record(engine.load_weights, TYPES, into=engine)
            with subscribe(engine, trainer.address, token="a-token-of-the-tests", names=found, verify=True) as link:
                assert link.pull() == 1 and link.verify()
            wanted.load_weights(trained.items())
            for name, tensor in wanted.state_dict().items():
                assert torch.equal(engine.state_dict()[name], tensor), name

        trainer.push(1)
        shardwise.run_local(serve, 2)
