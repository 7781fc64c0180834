"""Section "hosts": how long do moves take between two hosts, beside what the link between them allows?

1. Two network namespaces with two ranks each stand for two hosts; the link between them has a limited bandwidth.
2. Ours reads memory within a host and sends each byte over the link once. Beside it, in turns, the same move over the
   sockets of gloo, planned without hosts: what every rank needs is sent to it.
3. Bytes are counted on the link. What the link allows is the fewest bytes that a host must send, over its bandwidth.
4. torchrun starts the transformer example on both hosts; its losses are those of the model whole on every rank.
5. A deep fully sharded model on both hosts, with moves beside computation and without: there moves wait for the link,
   not for the cores.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import compiled_deep
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import Comm, LocalWorld, ProcessGroupComm, default_comm
from shardwise.geometry import Layout, parse_spec
from shardwise.tensor import from_local
from shardwise.testing.network_hosts import HostsWorld, NetworkHosts, why_no_network_hosts
from shardwise.transfer import Topology, plan_transfer

HOSTS = Topology(hosts=(0, 0, 1, 1))
CASES = [("S(0)", "S(1)"), ("S(0)", "R"), ("P", "S(0)"), ("P", "S(1)"), ("P", "R")]
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_transformer.py"
EXAMPLE_SECONDS = 300
Shape = tuple[int, int]


@dataclass(frozen=True)
class HostBenchSizes:
    """The tensor, the link, the runs of each case, the steps of the example and the deep model with its link.

    No steps, no deep model: they are left out.
    """

    shape: Shape = (4096, 1024)
    megabits: int = 200
    runs: int = 5
    steps: int = 4
    deep: compiled_deep.DeepModelSizes | None = field(default_factory=lambda: compiled_deep.DeepModelSizes(repeats=7))
    deep_megabits: int = 400


TINY = HostBenchSizes(shape=(64, 64), runs=1, steps=0, deep=None)


class SocketsComm(ProcessGroupComm):
    """A comm that knows of no hosts and uses gloo's sockets only."""

    def find_topology(self) -> None:
        """None is known."""


def run(sizes: HostBenchSizes) -> list[Figures]:
    """All cases, and the example."""
    if (reason := why_no_network_hosts()) is not None:
        return [Figures("Moves between two hosts", ["move"], [], [f"Left out: {reason}"])]
    with NetworkHosts(megabits=sizes.megabits) as hosts:
        with HostsWorld(hosts, 4) as world:
            rows = [_measure_case(hosts, world, *case, sizes) for case in CASES]
        trained = [_run_example(hosts, sizes.steps)] if sizes.steps else []
    size = sizes.shape[0] * sizes.shape[1] * 4 / 1e6
    title = f"Moves of {size:.1f} MB between two hosts with two ranks each, {sizes.megabits} Mbit/s"
    columns = ["move", "MB a host sends", "lower bound", "link allows, ms", "ours, ms", "ratio", "gloo's sockets, ms"]
    notes = ["Bytes are counted on the link, with headers, in one run of ours."]
    return [Figures(title, columns, rows, notes), *trained, *_measure_deep(sizes)]


def _measure_case(hosts: NetworkHosts, world: LocalWorld, src: str, dst: str, sizes: HostBenchSizes) -> list[Cell]:
    before, after = (_layout(text, sizes.shape) for text in (src, dst))
    bound = plan_transfer(before, after, itemsize=4, topology=HOSTS).lower_bound_between_hosts or 0
    world.run(_move_in_turns, src, dst, sizes.shape, 1)
    already = hosts.bytes_sent()
    world.run(_move_once, src, dst, sizes.shape)
    sent = max(now - then for now, then in zip(hosts.bytes_sent(), already, strict=True))
    by_rank = world.run(_move_in_turns, src, dst, sizes.shape, sizes.runs)
    ours, sockets = (1e3 * seconds([found[name] for found in by_rank]) for name in ("ours", "sockets"))
    allowed = 1e3 * bound / 2 / hosts.bytes_per_second
    print(f"{src} -> {dst}: {ours:.0f} ms, the link allows {allowed:.0f}", file=sys.stderr, flush=True)
    return [f"{src} -> {dst}", sent / 1e6, bound / 2e6, allowed, ours, ours / allowed, sockets]


def _measure_deep(sizes: HostBenchSizes) -> list[Figures]:
    if sizes.deep is None:
        return []
    with NetworkHosts(megabits=sizes.deep_megabits) as hosts, HostsWorld(hosts, sizes.deep.ranks) as world:
        where = f"two hosts joined by {sizes.deep_megabits} Mbit/s"
        return [compiled_deep.measure_in(world, sizes.deep, "inductor", where)]


def _layout(text: str, shape: Shape) -> Layout:
    return parse_spec(f"on x=4: {text}").layout(shape)


def _move_once(src: str, dst: str, shape: Shape) -> None:
    _contender("ours", src, dst, shape, default_comm()).run(None)


def _move_in_turns(src: str, dst: str, shape: Shape, runs: int) -> dict[str, list[Span]]:
    comm = default_comm()
    sockets = SocketsComm(shared_memory=False)
    contenders = [_contender("ours", src, dst, shape, comm), _contender("sockets", src, dst, shape, sockets)]
    return run_interleaved(contenders, runs, lambda: comm.barrier(label="bench"))


def _contender(name: str, src: str, dst: str, shape: Shape, comm: Comm) -> Contender:
    before, after = (_layout(text, shape) for text in (src, dst))
    held = [torch.ones(part) for part in before.local_shapes(comm.rank)]
    tensor = from_local(held, before, comm=comm)
    return Contender(name, lambda _: tensor.redistribute(after))


def _run_example(hosts: NetworkHosts, steps: int) -> Figures:
    """Start torchrun on both hosts; the first one prints the losses."""
    began = time.monotonic()
    port = hosts.call(0, _free_port)
    started = [_start_torchrun(hosts, host, port, steps) for host in range(len(hosts.names))]
    try:
        printed = [process.communicate(timeout=EXAMPLE_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError(f"the example failed on the hosts:\n{chr(10).join(printed)}")
    difference = next(line.split()[-1] for line in printed[0].splitlines() if line.startswith("largest difference"))
    row: Sequence[Cell] = [f"{steps} steps", difference, time.monotonic() - began]
    return Figures(
        "torchrun --nnodes 2: the transformer example", ["run", "largest difference of losses", "seconds"], [row]
    )


def _start_torchrun(hosts: NetworkHosts, host: int, port: int, steps: int) -> subprocess.Popen[str]:
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host)]
    options += ["--master-addr", hosts.addresses[0], "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLE), "--steps", str(steps)]
    return subprocess.Popen(hosts.command(host, *command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        port: int = free.getsockname()[1]
        return port
