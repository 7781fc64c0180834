"""Does a reading rank ask for just what it lacks, of the right owners, and is a strange description refused?"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.checkpoint.convert import NameMap
from shardwise.comm import Comm
from shardwise.geometry import Layout, LayoutError, find_dtype, parse_layout
from shardwise.geometry.state_map import BlockScale, StateMap, TensorShape
from shardwise.sync import RefusedError, publish, subscribe
from shardwise.sync.plan import (
    Published,
    RankPlace,
    ReadPlan,
    Wanted,
    map_of_names,
    parse_read,
    plan_reads,
    quantize_blocks,
    read_description,
    resolve_map,
)
from tests.sync.worlds import TOKEN

BLOCKS: dict[str, Any] = {
    "kind": "mesh",
    "mesh": {"axes": ["x"], "ranks": [0, 1]},
    "placements": [{"kind": "shard", "dim": 0, "block": 1}],
}
F32 = find_dtype("f32")


def published(layouts: dict[str, Layout], hosts: Sequence[str]) -> Published:
    places = tuple(RankPlace(host, None, ("127.0.0.1", 1)) for host in hosts)
    tied = tuple(range(len(layouts)))
    return Published("trainer", {n: (F32, x) for n, x in layouts.items()}, tied, places).placed()


def fill_slots(source: Published, values: dict[str, Tensor]) -> list[Tensor]:
    """The slots of all ranks, as the publisher's ranks write them."""
    slots = [torch.zeros(int(n), dtype=torch.uint8) for n in source.slot_bytes]
    for number, (name, (_, layout)) in enumerate(source.tensors.items()):
        kept = source.kept[number]
        for row, offset in zip(kept.rows.tolist(), kept.offsets.tolist(), strict=True):
            piece = layout.table.pieces()[row]
            data = values[name][piece.box.slices].contiguous().reshape(-1).view(torch.uint8)
            slots[piece.rank][offset : offset + len(data)] = data
    return slots


def carry_out(plan: ReadPlan, slots: Sequence[Tensor], wanted: Sequence[Wanted]) -> None:
    for fill in plan.fills:
        wanted[fill.target].parts[fill.part][fill.here].fill_(fill.value)
    for rank, reads in plan.reads.items():
        for read in reads:
            wanted[read.target].parts[read.part][read.here].copy_(read.view(slots[rank])[read.widen])


def want(name: str, layout: Layout, rank: int) -> Wanted:
    parts = tuple(torch.full(shape, -1.0) for shape in layout.local_shapes(rank))
    return Wanted(name, layout, torch.float32, parts, False)


LAYOUTS = [
    "f32[12,10] as chunk(0) over 0-3",
    "f32[12,10] on a=2,b=2: S(0), S(1)",
    "f32[12,10] on a=2,b=2: R, S(1)",
    "f32[12,10] on x=4: R",
    "f32[12,10] on x=4: S(1) sizes(1,0,6,3)",
]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
def test_each_rank_reads_what_it_needs_once(source: str, target: str, hosts: str) -> None:
    src, dst = parse_layout(source).layout, parse_layout(target).layout
    value = torch.arange(120.0).reshape(12, 10)
    pub = published({"w": src}, hosts)
    slots = fill_slots(pub, {"w": value})
    for rank in range(4):
        wanted = [want("w", dst, rank)]
        plan = plan_reads(pub, StateMap.identity(pub.types), wanted, rank, hosts[rank])
        assert plan.nbytes == 4 * dst.elements_per_rank().get(rank, 0)
        carry_out(plan, slots, wanted)
        again = want("w", dst, rank)
        for piece, slot in zip(dst.pieces_of(rank), dst.table.slots[dst.rows_of(rank)], strict=True):
            held = wanted[0].parts[int(slot)]
            assert held.numel() == piece.box.numel == again.parts[int(slot)].numel()
            assert torch.equal(held, value[piece.box.slices])
    total = sum(math.prod(s) for kept in pub.kept for s in src.table.sizes[kept.rows].tolist())
    assert total == 120 * len({hosts[r] for r in range(4)}) if source == LAYOUTS[3] else total >= 120


def sent_by(pub: Published, readers: int, hosts: Sequence[str], dst: Layout) -> Counter[int]:
    """The bytes that each owner sends to all readers."""
    sent: Counter[int] = Counter()
    for rank in range(readers):
        wanted = [want(name, dst, rank) for name in pub.tensors]
        plan = plan_reads(pub, StateMap.identity(pub.types), wanted, rank, hosts[rank])
        sent.update({owner: sum(r.sent_bytes for r in reads) for owner, reads in plan.reads.items()})
    return sent


def test_replicas_share_the_work_over_all_tensors() -> None:
    copied = parse_layout("f32[8,8] on x=4: R").layout
    pub = published({f"w{i}": copied for i in range(32)}, "abcd")  # each on a host of its own
    alone = parse_layout("f32[8,8] on x=1: R").layout
    assert sent_by(pub, 1, ["z"], alone) == dict.fromkeys(range(4), 32 * 256 // 4)
    both = parse_layout("f32[8,8] on x=2: R").layout
    assert sent_by(pub, 2, ["z", "z"], both) == dict.fromkeys(range(4), 2 * 32 * 256 // 4)
    one = published({"w": copied}, "abcd")
    four = parse_layout("f32[8,8] on x=4: R").layout
    assert sent_by(one, 4, "zzzz", four) == dict.fromkeys(range(4), 256)  # one tensor, four readers: each another owner


def test_no_box_is_larger_than_a_buffer() -> None:
    src, dst = (parse_layout(text).layout for text in ("f32[12,10] on x=4: S(1)", "f32[12,10] on x=1: R"))
    pub, value = published({"w": src}, "aabb"), torch.arange(120.0).reshape(12, 10)
    wanted = [want("w", dst, 0)]
    plan = plan_reads(pub, StateMap.identity(pub.types), wanted, 0, "z", 40)
    sizes = [read.sent_bytes for reads in plan.reads.values() for read in reads]
    assert max(sizes) <= 40 and sum(sizes) == plan.nbytes == 480 and len(sizes) > 10
    carry_out(plan, fill_slots(pub, {"w": value}), wanted)
    assert torch.equal(wanted[0].parts[0], value)


def test_the_own_host_is_read_first_and_keeps_a_piece_once() -> None:
    copied = parse_layout("f32[8,8] on x=4: R").layout
    pub = published({f"w{i}": copied for i in range(16)}, "aabb")
    assert pub.slot_bytes.tolist() == [4096 + 8 * 256] * 4  # a host keeps 16 tensors, its ranks 8 each
    assert sent_by(pub, 2, "bb", parse_layout("f32[8,8] on x=2: R").layout) == {2: 4096, 3: 4096}


def test_a_thousand_ranks_are_planned_by_rank() -> None:
    src = parse_layout("f32[8192,8192] on dp=64,tp=16: S(0), S(1)").layout
    dst = parse_layout("f32[8192,8192] on dp=8,tp=32: R, S(0)").layout
    pub = published({"w": src}, [f"h{r // 8}" for r in range(1024)])
    shapes = dst.local_shapes(5)
    wanted = [Wanted("w", dst, torch.float32, tuple(torch.empty(s, device="meta") for s in shapes), False)]
    plan = plan_reads(pub, StateMap.identity(pub.types), wanted, 5, "elsewhere")
    assert plan.nbytes == 4 * 8192 * 256
    assert len(plan.reads) == 2 * 16


def test_maps_of_names_are_maps_of_boxes() -> None:
    types = {f"l.{i}.{n}": TensorShape((4, 6), "f32") for i in range(2) for n in "qkv"}
    names = NameMap.of(
        {
            "rename": {"l.*.v": "h.*.v"},
            "change": [
                {"fuse": ["l.*.q", "l.*.k"], "to": "h.*.qk", "groups": 2},
                {"split": "h.*.v", "to": ["h.*.v1", "h.*.v2"], "dim": 1},
                {"stack": "h.{i}.v1", "to": "v1"},
                {"transpose": "h.*.v2"},
            ],
        }
    )
    found = map_of_names(names, types).checked()
    assert str(found.only(["v1", "h.1.qk", "h.0.v2"])) == "\n".join(
        [
            "v1: f32[2, 4, 3]",
            "  [0:1, 0:4, 0:3] = l.0.v[0:4, 0:3]",
            "  [1:2, 0:4, 0:3] = l.1.v[0:4, 0:3]",
            "h.1.qk: f32[8, 6]",
            "  [0:2, 0:6] = l.1.q[0:2, 0:6]",
            "  [2:4, 0:6] = l.1.k[0:2, 0:6]",
            "  [4:6, 0:6] = l.1.q[2:4, 0:6]",
            "  [6:8, 0:6] = l.1.k[2:4, 0:6]",
            "h.0.v2: f32[3, 4]",
            "  [0:3, 0:4] = l.0.v[0:4, 3:6] transposed (1, 0)",
        ]
    )


def test_a_map_for_other_tensors_is_refused(tmp_path: Any) -> None:
    given = StateMap.identity({"w": TensorShape((4,), "f32")})
    assert resolve_map(given, {"w": TensorShape((4,), "bf16")}).sources["w"].dtype == "bf16"
    with pytest.raises(LayoutError, match="the map takes w, which is not published; near it: v"):
        resolve_map(given, {"v": TensorShape((4,), "f32")})
    with pytest.raises(LayoutError, match=r"the map is for w of f32\[4\]; the publisher has f32\[5\]"):
        resolve_map(given, {"w": TensorShape((5,), "f32")})
    path = tmp_path / "map.json"
    path.write_text(json.dumps(given.to_json()))
    assert resolve_map(path, given.sources) == given


def test_interleaved_terms_are_read_with_their_steps() -> None:
    src = parse_layout("f32[12,10] as chunk(0) over 0-3").layout
    value = torch.arange(120.0).reshape(12, 10)
    pub = published({"w": src}, "abcd")
    data = {
        "format": "shardwise.state_map/1",
        "sources": [["w", "f32", [12, 10]]],
        "targets": [
            ["v", "f32", [2, 6, 10], [[[0, 0, 0], [2, 6, 10], 0, [1, 0], [2, 1], [1, 2]]]],
            ["p", "f32", [10, 8], [[[0, 0], [10, 4], 0, [0, 0], [3, 1], [1, 0]], [[0, 4], [10, 4], -1, 9.0]]],
        ],
    }
    state_map = resolve_map(StateMap.from_json(data), pub.types)
    v, p = (
        parse_layout(text).layout for text in ("f32[2,6,10] as chunk(1) over 0-1", "f32[10,8] as chunk(0) over 0-1")
    )
    for rank in range(2):
        wanted = [want("v", v, rank), want("p", p, rank)]
        plan = plan_reads(pub, state_map, wanted, rank, "z")
        assert plan.nbytes == 4 * (3 * 10 + 4 * 5)  # what is repeated travels once
        carry_out(plan, fill_slots(pub, {"w": value}), wanted)
        whole = torch.stack([value[1::2]] * 2)
        assert torch.equal(wanted[0].parts[0], whole[:, 3 * rank : 3 * rank + 3])
        padded = torch.cat([value[::3].t(), torch.full((10, 4), 9.0)], dim=1)
        assert torch.equal(wanted[1].parts[0], padded[5 * rank : 5 * rank + 5])


def describe() -> dict[str, Any]:
    layouts = {"w": parse_layout("f32[8,8] on x=2: S(0)").layout, "v": parse_layout("f32[8] on x=2: R").layout}
    data: dict[str, Any] = json.loads(published(layouts, "ab").to_text())
    return data


def test_descriptions_come_back() -> None:
    text = json.dumps(describe())
    found = read_description(text)
    assert json.loads(found.to_text()) == describe()
    assert found.types["w"] == TensorShape((8, 8), "f32")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda d: d.pop("ranks"), "'ranks'"),
        (lambda d: d.update(ranks=[]), "0 ranks"),
        (lambda d: d["tensors"][0].__setitem__(1, "f99"), "unknown dtype"),
        (lambda d: d["tensors"][0].__setitem__(2, 9), "damaged"),
        (lambda d: d["tensors"][1].__setitem__(0, "w"), "a name appears twice"),
        (lambda d: d["tensors"][1].__setitem__(3, 0), "v is not tied to tensor 0"),
        (lambda d: d["tensors"][1].__setitem__(3, 5), "v is not tied to tensor 5"),
        (lambda d: d.update(ranks=d["ranks"][:1]), "on ranks up to 1 of 1"),
        (lambda d: d["layouts"][0].update(shape=[1 << 40, 8], spec=BLOCKS), "too many blocks"),
        (lambda d: d["layouts"][0].update(spec={"kind": "grid", "splits": [1 << 30, 1], "ranks": [0]}), "more parts"),
        (lambda d: d["layouts"][0]["spec"]["placements"].__setitem__(0, {"kind": "partial", "op": "sum"}), "a layout"),
        (lambda d: d.update(tensors=5), "damaged"),
    ],
)
def test_damaged_descriptions_are_refused(spoil: Any, text: str) -> None:
    data = describe()
    spoil(data)
    with pytest.raises(LayoutError, match=text):
        read_description(json.dumps(data))


def test_too_many_tensors_and_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(describe())
    monkeypatch.setattr("shardwise.sync.plan.MAX_PIECES", 3)
    with pytest.raises(LayoutError, match="more than 3 pieces"):
        read_description(text)
    monkeypatch.setattr("shardwise.sync.plan.MAX_TENSORS", 1)
    with pytest.raises(LayoutError, match="2 tensors"):
        read_description(text)


@pytest.mark.parametrize(
    "row",
    [
        [-64, [4], "f32", [[0, 4, 1]], [0], "f32", None],
        [4096, [100000], "f32", [[0, 4, 1]], [0], "f32", None],
        [4097, [4], "f32", [[0, 4, 1]], [0], "f32", None],
        [4096, [-4], "f32", [[0, 4, 1]], [0], "f32", None],
        [4096, [4], "f32", [], [0], "f32", None],
        [4096, [4], "f77", [[0, 4, 1]], [0], "f32", None],
        [4096, [4]],
        [4096, [4], "f32", [[0, 4, 1]], [0], "f8e4m3fn", [[0], "amax"]],
        [4096, [4], "f32", [[0, 4, 1]], [0], "f8e4m3fn", [[2, 2], "amax"]],
        [4096, [4], "f32", [[0, 4, 1]], [0], "f8e4m3fn", [[2], "pickle"]],
    ],
)
def test_a_reader_gets_nothing_beyond_a_slot(row: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"what is not in a slot|unknown dtype|not enough values|blocks of"):
        parse_read(row, 8192)


# Values that are quantized

BLOCK = (4, 3)


def quantized(types: Mapping[str, TensorShape], rule: str = "amax") -> StateMap:
    return StateMap.identity(types).fuse(["q", "k"], "w").quantize("w", "w.scale", BLOCK, rule=rule)


@pytest.mark.parametrize("rule", ["amax", "amax_pow2"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_blocks_are_quantized_by_their_largest(rule: str, dtype: torch.dtype) -> None:
    values = torch.randn(10, 7, generator=torch.Generator().manual_seed(1)) * 100
    values[4:8, 3:6] = 0
    codes, scales = quantize_blocks(values, BlockScale("s", BLOCK, rule), dtype)
    assert scales.shape == (3, 3) and codes.dtype == dtype
    for i, j in itertools.product(range(3), range(3)):
        block = values[4 * i : 4 * i + 4, 3 * j : 3 * j + 3]
        scale = block.abs().max() / torch.finfo(dtype).max
        scale = scale if rule == "amax" else torch.exp2(torch.log2(scale).ceil())
        scale = scale if scale > 0 else torch.tensor(1.0)
        assert scales[i, j] == scale
        assert torch.equal(codes[4 * i : 4 * i + 4, 3 * j : 3 * j + 3].float(), (block / scale).to(dtype).float())


@pytest.mark.parametrize("apply", ["stage", "swap", "in_place"])
@pytest.mark.parametrize("host", [None, "another host"])
def test_a_server_gets_codes_and_scales(apply: Any, host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if host is not None:
        monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: host)
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(6, 7, generator=generator), torch.randn(5, 7, generator=generator)
    trained = {"q": q, "k": k}
    with publish(trained, "tcp://127.0.0.1:0", token=TOKEN, delta=True) as trainer:

        def serve(comm: Comm) -> list[Tensor]:
            codes = shardwise.zeros("on x=2: S(0) unit(4)", (11, 7), dtype=torch.float8_e4m3fn)
            state = {"w": codes, "w.scale": shardwise.zeros("on x=2: S(0)", (3, 3))}
            options: dict[str, Any] = {"names": quantized, "apply": apply, "token": TOKEN, "verify": True}
            with subscribe(state, trainer.address, **options) as link:
                here = comm.rank == 0 or host is None or apply == "stage"  # a block of rank 0 has rows of q and of k
                assert ("values that are quantized here" in link.describe()) == here
                for step in (1, 2):
                    if comm.rank == 0:
                        q[3, 2] = 10.0 * step
                        trainer.push(step)
                    comm.barrier(label="pushed")
                    assert link.pull(60) == step and link.verify()
                    wanted = quantize_blocks(torch.cat([q, k]), BlockScale("w.scale", BLOCK), torch.float8_e4m3fn)
                    here = slice(0, 8) if comm.rank == 0 else slice(8, 11)
                    assert torch.equal(codes.local_tensor().float(), wanted[0][here].float())
                    comm.barrier(label="compared")
                found = [codes.full(), state["w.scale"].full()]
                if comm.rank == 1:
                    state["w.scale"].local_tensor()[0, 0] += 1
                assert link.verify().different == ("w on rank 1: [0:3, 0:7]",)
            return [*found, *wanted]

        codes, scales, *wanted = shardwise.run_local(serve, 2)[0]
    assert torch.equal(codes.float(), wanted[0].float()) and torch.equal(scales, wanted[1])


@pytest.mark.parametrize("rule", ["amax", "amax_pow2"])
@pytest.mark.parametrize(("apply", "limit"), [("stage", 1 << 20), ("swap", 500), ("in_place", 1 << 20)])
def test_the_sender_quantizes_where_that_saves_bytes(
    rule: str, apply: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, block = torch.Generator().manual_seed(3), (4, 3)
    trained = {
        "w": torch.randn(22, 40, generator=generator) * 10,
        "v": torch.randn(16, 21, generator=generator).bfloat16(),
    }

    def names(types: Mapping[str, TensorShape]) -> StateMap:
        made = StateMap.identity(types).transpose("w")
        return made.quantize("w", "w.scale", block, rule=rule).quantize("v", "v.scale", block, rule=rule)

    def served(host: str) -> list[tuple[list[Tensor], int]]:
        monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: host)
        with publish(trained, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
            trainer.push(1)

            def serve(comm: Comm) -> tuple[list[Tensor], int]:
                state = {
                    "w": shardwise.zeros("on x=2: S(0) unit(4)", (40, 22), dtype=torch.float8_e4m3fn),
                    "w.scale": shardwise.zeros("on x=2: S(0)", (10, 8)),
                    "v": torch.zeros(16, 21, dtype=torch.float8_e4m3fn),  # both ranks need all of it
                    "v.scale": torch.zeros(4, 7),
                }
                options: dict[str, Any] = {"apply": apply, "max_buffer_bytes": limit, "verify": True}
                with subscribe(state, trainer.address, token=TOKEN, names=names, **options) as link:
                    assert ("quantized here" in link.describe()) == (host != "elsewhere")
                    assert link.pull(60) == 1, link.problem
                    assert link.verify()
                    found = [x.full() if isinstance(x, shardwise.ShardedTensor) else x.clone() for x in state.values()]
                    comm.barrier(label="compared")
                    state["v.scale"][2, 5] *= 2
                    assert [text.split(":")[0] for text in link.verify().different] == ["v on rank 0", "v on rank 1"]
                return found, link.read_bytes

            return shardwise.run_local(serve, 2)

    far, near = served("elsewhere"), served(shardwise.sync.subscriber.identify_host() or "")
    for (one, _), (other, _) in zip(far, near, strict=True):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))
    assert sum(nbytes for _, nbytes in far) == 40 * 22 + 10 * 8 * 4 + 16 * 21 + 4 * 7 * 4  # codes and scales, once


def test_values_travel_where_quantizing_saves_nothing() -> None:
    types = {"w": TensorShape((8, 9), "bf16")}
    layout = parse_layout("bf16[8,9] on x=1: R").layout
    pub = Published("t", {"w": (find_dtype("bf16"), layout)}, (0,), (RankPlace("a", None, ("", 1)),)).placed()

    def plan(block: tuple[int, int], pad: int = 8, host: str = "z", **options: Any) -> ReadPlan:
        made = StateMap.identity(types).pad("w", 0, pad).quantize("w", "s", block)
        shapes = {"w": (pad, 9), "s": made.targets["w"].scale.shape((pad, 9))}  # type: ignore[union-attr]  # it has one
        dtypes = {"w": torch.float8_e4m3fn, "s": torch.float32}
        wanted = [
            Wanted(n, parse_layout(f"f32{list(shape)} on x=1: R").layout, dtypes[n], (torch.empty(shape),), True)
            for n, shape in shapes.items()
        ]
        return plan_reads(pub, made, wanted, 0, host, **options)

    def makes_codes(found: ReadPlan) -> bool:
        coded = {read.scales is not None for reads in found.reads.values() for read in reads}
        assert len(coded) == 1 and (not found.quantized) in coded
        return True in coded

    assert makes_codes(plan((4, 3), takes_codes=True))
    assert not makes_codes(plan((4, 3)))  # changes of values are wanted
    assert not makes_codes(plan((2, 2), takes_codes=True))  # a code and a scale for each four take 2 bytes a value
    assert not makes_codes(plan((4, 3), pad=12, takes_codes=True))  # nobody has the rows that are filled


def test_no_cut_goes_through_a_block_and_scales_are_where_their_blocks_are() -> None:
    types = {"q": TensorShape((6, 7), "bf16"), "k": TensorShape((5, 7), "bf16")}
    made = quantized(types)
    assert StateMap.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert made.only(["w.scale"]) == made and made.scales == {"w.scale": "w"}
    with pytest.raises(LayoutError, match="w is quantized, which is the last step of a map"):
        made.transpose("w")
    with pytest.raises(LayoutError, match=r"blocks of \(4,\) with the rule 'amax' for \[6, 7\]"):
        StateMap.identity(types).quantize("q", "s", (4,))
    with pytest.raises(LayoutError, match="two tensors would be called k"):
        StateMap.identity(types).quantize("q", "k", BLOCK)
    with pytest.raises(LayoutError, match="bf16 to i8; floats become"):
        StateMap.identity(types).quantize("q", "s", BLOCK, "i8")
    with publish(
        {"q": torch.zeros(6, 7).bfloat16(), "k": torch.zeros(5, 7).bfloat16()}, "tcp://127.0.0.1:0", token=TOKEN
    ) as link:
        with pytest.raises(RefusedError, match="q is f8e4m3fn here and bf16 there; codes of fp8 have scales"):
            subscribe({"q": torch.zeros(6, 7, dtype=torch.float8_e4m3fn)}, link.address, token=TOKEN)

        def refused(codes: Any, scales: Any, text: str) -> None:
            with pytest.raises(RefusedError, match=text):
                subscribe({"w": codes, **scales}, link.address, token=TOKEN, names=quantized)

        def body(comm: Comm) -> None:
            codes = shardwise.zeros("on x=2: S(0) unit(4)", (11, 7), dtype=torch.float8_e4m3fn)
            scales = {"w.scale": shardwise.zeros("on x=2: S(0)", (3, 3))}
            cut = shardwise.zeros("on x=2: S(0)", (11, 7), dtype=torch.float8_e4m3fn)
            refused(cut, scales, r"w: a rank has \[0:6, 0:7\], which goes through blocks of \(4, 3\); cut between them")
            refused(codes, {}, r"w.scale gets its scales; pass a float32 tensor of the shape \[3, 3\]")
            refused(codes.float(), scales, "w is f32 here, and quantized to f8e4m3fn")
            other = {"w.scale": shardwise.zeros("on x=2: S(1)", (3, 3))}
            refused(codes, other, r"w.scale: a rank lacks \[0:2, 0:3\], the scales of \[0:8, 0:7\] of w")

        shardwise.run_local(body, 2)
