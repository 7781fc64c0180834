"""Is the faster device transport chosen, from what all ranks know, and are bytes counted as the plan moves them?"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from shardwise.geometry import ChunkSpec, Layout, Mesh, MeshSpec, Partial, Replicate, Shard
from shardwise.transfer import Link, plan_transfer
from shardwise.transfer.device_cost import (
    DEFAULT_RATES,
    LARGE_SAMPLE,
    DeviceRates,
    DeviceTraffic,
    TransportWorks,
    choose_transport,
    combine_seconds,
    count_traffic,
    work_for_all_reduce,
    work_for_broadcast,
    work_for_gather,
    work_for_moves,
    work_for_reduce_scatter,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("works", "wanted"),
    [
        (work_for_moves(DeviceTraffic(1, 4096, 8192)), "ipc"),  # few bytes: the latency counts
        (work_for_moves(DeviceTraffic(1, 256 * MIB, 0)), "nccl"),  # runs of memory: the bandwidth counts
        (work_for_moves(DeviceTraffic(1, 256 * MIB, 512 * MIB)), "ipc"),  # boxes that nccl needs packed and unpacked
        (work_for_gather(64 * MIB, 8), "nccl"),
        (work_for_gather(1024, 8), "ipc"),
        (work_for_reduce_scatter(64 * MIB, 8), "nccl"),
        (work_for_all_reduce(64 * MIB, 8), "nccl"),
        (work_for_all_reduce(4096, 8), "ipc"),
        (work_for_broadcast(64 * MIB, 8), "nccl"),  # one GPU would send to seven readers
    ],
)
def test_faster_transport_is_chosen(works: TransportWorks, wanted: str) -> None:
    choice = choose_transport(works)
    times = {"ipc": choice.ipc_seconds, "nccl": choice.nccl_seconds}
    assert choice.transport == wanted == min(times, key=lambda name: times[name])


def test_rates_decide() -> None:
    works = work_for_moves(DeviceTraffic(2, 10 * MIB, 20 * MIB))
    slow = Link(latency=1.0, bandwidth=1e6)
    assert choose_transport(works, DeviceRates(slow, DEFAULT_RATES.nccl, DEFAULT_RATES.copy)).transport == "nccl"
    assert choose_transport(works, DeviceRates(DEFAULT_RATES.ipc, slow, DEFAULT_RATES.copy)).transport == "ipc"
    same = DeviceRates(DEFAULT_RATES.ipc, DEFAULT_RATES.ipc, DEFAULT_RATES.copy)
    choice = choose_transport(works, same)
    assert choice.nccl_seconds - choice.ipc_seconds == pytest.approx(same.copy.seconds(2, 20 * MIB))


LAYOUTS: dict[str, Layout] = {
    "rows": ChunkSpec(0, 4).layout((12, 16)),
    "columns": ChunkSpec(1, 4).layout((12, 16)),
    "blocks": MeshSpec(Mesh.of(x=2, y=2), (Shard(0), Shard(1))).layout((12, 16)),
    "uneven": ChunkSpec(0, 3).layout((12, 16)),
    "replicated": MeshSpec(Mesh.of(x=4), (Replicate(),)).layout((12, 16)),
    "terms": MeshSpec(Mesh.of(x=4), (Partial("sum"),)).layout((12, 16)),
    "row pairs": MeshSpec(Mesh.of(x=2, y=2), (Shard(0), Shard(0))).layout((12, 16)),
}


@pytest.mark.parametrize(("src", "dst"), [(a, b) for a, b in permutations(LAYOUTS, 2) if b != "terms"])
def test_traffic_is_that_of_the_busiest_rank(src: str, dst: str) -> None:
    transfer = plan_transfer(LAYOUTS[src], LAYOUTS[dst], itemsize=4)
    port = packed = calls = 0
    for step in transfer.steps:
        sent, received, copied = [0] * 4, [0] * 4, [0] * 4
        for rank in range(4):
            for move in step.sends_of(rank):
                size = 4 * move.box.numel
                sent[rank] += size
                whole = np.zeros(step.src.local_shapes(rank)[move.slot], np.int32)
                copied[rank] += 0 if whole[move.box.slices].flags.c_contiguous else size
            for move in step.receives_of(rank):
                size = 4 * move.box.numel
                received[rank] += size
                whole = np.zeros(step.dst.local_shapes(rank)[move.slot], np.int32)
                in_place = whole[move.box.slices].flags.c_contiguous and step.op is None
                copied[rank] += 0 if in_place else size
        port += max(map(max, zip(sent, received, strict=True)))
        packed += max(copied)
        calls += step.rounds
    assert count_traffic(transfer) == DeviceTraffic(calls, port, packed)


def test_part_of_one_rank_is_not_counted() -> None:
    assert count_traffic(plan_transfer(LAYOUTS["rows"], LAYOUTS["columns"], itemsize=4, rank=1)) is None


def test_ranks_that_measured_differently_choose_alike() -> None:
    quick, slow = ((1e-4, 2e-4), (1e-4, 9e-4))
    measured = [
        {"ipc": quick, "nccl": slow, "copy": quick},
        {"ipc": slow, "nccl": quick, "copy": quick},
        {"ipc": quick, "nccl": quick, "copy": quick},
    ]
    works = work_for_moves(DeviceTraffic(1, LARGE_SAMPLE, 0))
    alone = {choose_transport(works, combine_seconds([each])).transport for each in measured}
    assert alone == {"ipc", "nccl"}  # each for itself would choose its own
    together = {combine_seconds(order) for order in permutations(measured)}
    assert len(together) == 1
    (rates,) = together
    assert rates.ipc.seconds(1, LARGE_SAMPLE) == pytest.approx(9e-4, rel=1e-3)  # the slowest rank sets the time


def test_measurements_without_a_difference_are_usable() -> None:
    rates = combine_seconds([{"ipc": (2e-4, 1e-4), "nccl": (0.0, 0.0), "copy": (1e-5, 1e-5)}])
    assert all(link.bandwidth > 0 for link in (rates.ipc, rates.nccl, rates.copy))
