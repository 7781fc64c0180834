"""Do ranks of a host read every byte of another host once, and do all of them have it then?"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.comm import Comm
from shardwise.geometry import Layout, parse_layout
from shardwise.geometry.state_map import BlockScale, StateMap
from shardwise.sync import publish, subscribe
from shardwise.sync.plan import Wanted, list_reads, plan_reads, quantize_blocks, share_reads
from shardwise.sync.subscriber import Subscriber
from tests.sync.test_plan import fill_slots, published, quantized, want
from tests.sync.worlds import TOKEN, free_address, gathered, laid_out, parts_of, run_worlds, whole

TARGETS = [
    "f32[12,10] on x=4: R",
    "f32[12,10] on a=2,b=2: R, S(1)",
    "f32[12,10] as chunk(0) over 0-3",
    "f32[12,10] on x=4: S(1) sizes(1,0,6,3)",
]


def share_all(
    source: str, targets: list[Layout], hosts: str, limit: int = 1 << 20, near: tuple[int, ...] = ()
) -> tuple[list[list[Wanted]], dict[str, int], int]:
    """Plan and carry out what all ranks do; the tensors of each, what each host read, and the number of rounds."""
    src, value = parse_layout(source).layout, torch.arange(120.0).reshape(12, 10)
    pub = published({"w": src}, "zyxz")
    slots = fill_slots(pub, {"w": value})
    wanted = [[want("w", layout, rank) for layout in targets] for rank in range(4)]
    names = StateMap.identity(pub.types)
    plans = [plan_reads(pub, names, wanted[rank], rank, hosts[rank], limit) for rank in range(4)]
    lists = [list_reads(plan, near) for plan in plans]
    read = dict.fromkeys(hosts, 0)
    for rank in range(4):
        peers = {peer: lists[peer] for peer in range(4) if hosts[peer] == hosts[rank]}
        plans[rank] = share_reads(plans[rank], rank, peers, near, limit)
        for owner, reads in plans[rank].reads.items():
            for each in (r for r in reads if not r.is_passed):
                read[hosts[rank]] += each.sent_bytes
                place_of(wanted, rank, each).copy_(each.view(slots[owner])[each.widen])
    rounds = max(len(plan.gives) for plan in plans)
    for number in range(rounds):
        for rank, plan in enumerate(plans):
            gets = plan.gets[number] if number < len(plan.gets) else {}
            assert sum(r.sent_bytes for reads in gets.values() for r in reads) <= max(limit, 480)
            for peer, reads in gets.items():
                given = plans[peer].gives[number][rank] if peer != rank else plan.gives[number][rank]
                for mine, theirs in zip(reads, given, strict=True):
                    arrived = theirs.in_source_order(place_of(wanted, peer, theirs))
                    mine.in_source_order(place_of(wanted, rank, mine)).copy_(arrived)
    for rank in range(4):
        for each, layout in zip(wanted[rank], targets, strict=True):
            for piece, slot in zip(layout.pieces_of(rank), layout.table.slots[layout.rows_of(rank)], strict=True):
                assert torch.equal(each.parts[int(slot)], value[piece.box.slices])
    return wanted, read, rounds


def place_of(wanted: list[list[Wanted]], rank: int, read: Any) -> Tensor:
    return wanted[rank][read.target].parts[read.part][read.here]


@pytest.mark.parametrize("source", ["f32[12,10] on a=2,b=2: S(0), S(1)", "f32[12,10] on x=4: R"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("hosts", ["aaaa", "abab", "abcd"])
def test_a_host_reads_each_byte_once(source: str, target: str, hosts: str) -> None:
    layout = parse_layout(target).layout
    _, read, _ = share_all(source, [layout], hosts)
    for host, nbytes in read.items():
        needed = torch.zeros(12, 10)
        for rank in (r for r in range(4) if hosts[r] == host):
            for piece in layout.pieces_of(rank):
                needed[piece.box.slices] = 1
        assert nbytes == 4 * needed.sum()


def test_boxes_that_overlap_are_cut_along_each_other() -> None:
    one, other = (parse_layout(f"f32[12,10] on x=4: S({dim})").layout for dim in (0, 1))
    source = "f32[12,10] on x=4: S(0) sizes(5,0,6,1)"
    assert share_all(source, [one, other, parse_layout("f32[12,10] on x=4: R").layout], "aaaa")[1] == {"a": 480}
    assert share_all(source, [one, one], "abcd")[1] == dict.fromkeys("abcd", 120)  # twice by one rank: read once
    assert share_all(source, [one, other], "aaaa", near=range(4))[1] == {"a": 960}  # out of memory that is mapped


def test_what_is_passed_on_at_a_time_is_bounded_and_shared_out() -> None:
    copied = parse_layout("f32[12,10] on x=4: R").layout
    _, read, rounds = share_all("f32[12,10] on x=4: S(0)", [copied], "aaaa", limit=60)
    assert read == {"a": 480} and rounds >= 480 // 60 - 1
    pub = published({f"w{i}": copied for i in range(8)}, "zyxz")
    plans = [
        plan_reads(pub, StateMap.identity(pub.types), [want(n, copied, r) for n in pub.tensors], r, "a")
        for r in range(4)
    ]
    lists = {rank: list_reads(plan, ()) for rank, plan in enumerate(plans)}
    found = [share_reads(plan, rank, lists, (), 1 << 20) for rank, plan in enumerate(plans)]
    own = [sum(r.sent_bytes for reads in plan.reads.values() for r in reads if not r.is_passed) for plan in found]
    assert own == [960] * 4
    assert [plan.nbytes for plan in found] == [8 * 480] * 4


NAMES = {"rename": {"w": "t"}, "change": [{"transpose": "t"}]}


@pytest.mark.parametrize("apply", ["stage", "swap", "in_place"])
@pytest.mark.parametrize("strides", [True, False])
def test_a_link_carries_what_a_host_needs_once(apply: Any, strides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    if not strides:
        monkeypatch.setattr(Subscriber, "_takes_strides", False)
    address, steps = free_address(), 3
    pushed = [threading.Event() for _ in range(steps)]
    pulled = [threading.Event() for _ in range(steps)]

    def train(comm: Comm) -> None:
        state = {
            "w": laid_out(whole((90, 70), 1), "on x=2: S(0)", comm),
            "v": laid_out(whole((64,), 2).bfloat16(), "on x=2: R", comm),
        }
        with publish(state, address, token=TOKEN, delta=True) as link:
            for step in range(steps):
                if comm.rank == 0:
                    parts_of(state["w"])[0][step] = 9.0 + step
                link.push(step)
                comm.barrier(label="pushed")
                pushed[step].set()
                assert pulled[step].wait(60)

    def serve(comm: Comm) -> list[int]:
        state = {"t": laid_out(torch.zeros(70, 90), "on x=3: R", comm), "v": torch.zeros(64)}
        found = []
        with subscribe(
            state, address, token=TOKEN, names=NAMES, apply=apply, verify=True, max_buffer_bytes=4096
        ) as link:
            for step in range(steps):
                assert pushed[step].wait(60)
                assert link.pull(60) == step, link.problem
                assert link.verify()
                expected = whole((90, 70), 1)
                for row in range(step + 1):
                    expected[row] = 9.0 + row
                assert torch.equal(gathered(state["t"]), expected.t())
                assert torch.equal(state["v"], whole((64,), 2))
                found.append(link.read_bytes)
                comm.barrier(label="read")
                pulled[step].set()
            assert "bytes come from ranks of its host that read them" in link.describe()
        return found

    by_rank = run_worlds((train, 2), (serve, 3))[1]
    once = 90 * 70 * 4 + 64 * 2
    total = [sum(sizes) for sizes in zip(*by_rank, strict=True)]
    assert total[0] == once and min(sizes[0] for sizes in by_rank) > once / 8
    assert total[2] < once / 10 if apply == "stage" else total[2] == once


def test_what_is_quantized_is_read_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    trained = {"q": whole((6, 7), 1), "k": whole((5, 7), 2)}
    with publish(trained, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)

        def serve(comm: Comm) -> int:
            state = {"w": torch.zeros(11, 7, dtype=torch.float8_e4m3fn), "w.scale": torch.zeros(3, 3)}
            with subscribe(state, trainer.address, token=TOKEN, names=quantized, verify=True) as link:
                assert link.pull(60) == 1 and link.verify()
                made = quantize_blocks(torch.cat(list(trained.values())), BlockScale("s", (4, 3)), torch.float8_e4m3fn)
                assert torch.equal(state["w"].float(), made[0].float()) and torch.equal(state["w.scale"], made[1])
                return link.read_bytes

        assert sum(shardwise.run_local(serve, 2)) == 11 * 7 * 4


@pytest.mark.parametrize("kind", [ConnectionError, IndexError])
def test_a_rank_that_cannot_read_fails_the_pull_on_all(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    with publish({"w": torch.ones(64), "v": torch.ones(64)}, "tcp://127.0.0.1:0", token=TOKEN) as trainer:
        trainer.push(1)

        def serve(comm: Comm) -> None:
            state = {"w": torch.zeros(64), "v": torch.zeros(64)}
            with subscribe(state, trainer.address, token=TOKEN) as link:
                receive, failed = link._receive, []

                def fail(*arguments: Any) -> None:
                    if comm.rank == 1 and not failed:
                        failed.append(True)
                        raise kind("the cable is cut")
                    receive(*arguments)

                monkeypatch.setattr(link, "_receive", fail)
                assert link.pull(0) is None and not state["w"].any() and not state["v"].any()
                assert link.problem is not None and "rank 1: publisher" in link.problem and "cable" in link.problem
                assert link.pull(60) == 1 and state["w"].all() and state["v"].all()

        shardwise.run_local(serve, 2)
