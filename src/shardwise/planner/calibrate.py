"""How fast is this machine? Moves and computations are timed once on all ranks, and a topology is fitted to them.

1. Moves of many sizes are made as a program makes them: one message, messages to all, gathers, sums; where ranks are on
   several hosts also inside each of them.
2. The rows of `transfer/cost.py` are linear in the figures of the links. Those that fit the samples best are kept, by
   relative error, none below zero. Collectives are taken to be native or messages, whichever fits.
3. Products, passes over memory and a small step are timed on all ranks at once, since ranks of a host share it. On a
   CPU the clock is that of the thread, which other programs do not disturb: among figures of which some are too good by
   chance, a search would find just those. How long a rank waits for a core is one figure for all of them: of the turns
   the one in which ranks had most of the cores.
4. In a step operators read what is not in the caches: larger steps of one rank show by how much slower memory and
   products are there. Small steps that gather parameters, sum gradients and move activations show what the engine adds
   to a move in a step, where ranks meet each other on their way and do not wait for the first message of an idle link.
5. The result is written with its samples, so that the fit can be checked and repeated: `Topology.from_file`.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from shardwise.comm import Comm, LocalComm, default_comm, use_comm
from shardwise.comm.agree import gather_values
from shardwise.geometry import Mesh, parse_layout
from shardwise.nn.plan import ModelPlan
from shardwise.nn.shard_module import shard_module
from shardwise.planner.estimate import PricedMoves, lay_out_eager
from shardwise.planner.rehearsal import MOVE_KINDS, Rehearsal, rehearse
from shardwise.tensor import from_local
from shardwise.transfer import Link, Topology, Transfer, plan_transfer
from shardwise.transfer.cost import Device
from shardwise.transfer.topology import Collectives

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

MOVE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
PRODUCTS = (64, 256, 1024)
FASTEST = 1e-12  # seconds per byte, where the samples show no cost of bytes
TOO_FAR = 0.25
TURNS, PREFER = 8, 0.3
STRETCH_SECONDS = 0.04
Measure: TypeAlias = Callable[[Sequence[tuple[Callable[[], Any], int]], int], list[float]]
SMALL_ROWS = 256  # many enough for fully sharded layers to gather their parameters, rather than move their inputs
LEAST_STEP = (1e-8, 1e-9, 1e-9, 1e-13)  # of call, latency, overhead, byte


@dataclass(frozen=True)
class MoveSample:
    """A move between two layouts, in the notation, and the seconds that it took."""

    src: str
    dst: str
    seconds: float

    def transfer(self) -> Transfer:
        source = parse_layout(self.src)
        return plan_transfer(source.layout, parse_layout(self.dst, like=source).layout, itemsize=source.itemsize)


@dataclass(frozen=True)
class Calibration:
    """What was measured: the fitted topology, the device, and the samples with the error of the fit for each.

    - `errors`: estimated seconds over measured ones, less 1. `is_close`: whether half of them are within 25 %.
    - `threads` of a rank, which are those that it computes with in training as well.
    """

    topology: Topology
    device: Device
    samples: tuple[MoveSample, ...]
    errors: tuple[float, ...]
    ranks: int
    threads: int = 1

    @property
    def is_close(self) -> bool:
        return median(map(abs, self.errors)) <= TOO_FAR

    def to_json(self) -> dict[str, Any]:
        """What the file has."""
        links = {key: value for key, value in self.topology.to_json().items() if value is not None}
        own = asdict(self.device)
        own["products"] = {dtype: [list(row) for row in rows] for dtype, rows in self.device.products.items()}
        samples = [asdict(sample) for sample in self.samples]
        made = f"{date.today()}, {self.ranks} ranks on {self.device.name}, torch {torch.__version__}"
        made += f", {self.threads} threads each"
        return {"version": 1, "measured": made, **links, "device": own, "sample": samples}

    def save(self, path: str | Path) -> None:
        """Write the file that `Topology.from_file` and `Device.from_file` read."""
        beside = Path(f"{path}.{os.getpid()}")
        beside.write_text(_to_toml(self.to_json()))
        beside.replace(path)


def _to_toml(data: Mapping[str, Any]) -> str:
    """Tables, one level of tables in them, and lists of tables; JSON's strings, numbers and lists are valid TOML.

    >>> print(_to_toml({"a": 1e-6, "b": {"c": {"d": [1.5]}}, "e": [{"f": "g"}]}), end="")
    a = 1e-06
    [b]
    c.d = [1.5]
    [[e]]
    f = "g"
    """
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    lists = {key: value for key, value in data.items() if isinstance(value, list) and value and type(value[0]) is dict}
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if key not in tables and key not in lists]
    named = [(f"[{key}]", value) for key, value in tables.items()]
    named += [(f"[[{key}]]", value) for key, values in lists.items() for value in values]
    for head, table in named:
        lines.append(head)
        for key, value in table.items():
            inner = value.items() if isinstance(value, dict) else [(None, value)]
            lines += [f"{key if more is None else f'{key}.{more}'} = {json.dumps(each)}" for more, each in inner]
    return "\n".join(lines) + "\n"


def calibrate(comm: Comm | None = None, repeats: int = 9) -> Calibration:
    """Measure the links between the ranks of a comm and what each of them computes; collective, same on all ranks.

    >>> found = calibrate(LocalComm.alone(), repeats=1)
    >>> found.ranks, found.samples, found.device.products["f32"][0][:3]
    (1, (), (64, 64, 64))
    """
    comm = comm or default_comm()
    hosts = comm.find_topology()
    samples, stretch = _time_moves(comm, hosts, repeats)
    topology = fit_topology(samples, _host_numbers(comm, hosts))
    device = _time_device(comm, repeats, stretch, topology)
    errors = tuple(sample.transfer().estimate(topology) / sample.seconds - 1 for sample in samples)
    return Calibration(topology, device, samples, errors, comm.world_size, torch.get_num_threads())


# Moves


def _host_numbers(comm: Comm, topology: Topology | None) -> Topology:
    """The hosts in short form where they have equal numbers of successive ranks."""
    if topology is None:
        return Topology(ranks_per_host=comm.world_size)
    hosts = topology.host_of(np.array(sorted(comm.ranks))).tolist()
    size = hosts.count(hosts[0])
    regular = hosts == [rank // size for rank in range(len(hosts))]
    return Topology(ranks_per_host=size) if regular else Topology(hosts=hosts)


def _time_moves(comm: Comm, topology: Topology | None, repeats: int) -> tuple[tuple[MoveSample, ...], float]:
    """Moves between all ranks, and side by side in groups: hosts where there are several of one size, else pairs.

    Every turn makes all of them, so that a slow moment of the machine falls on all alike. Each turn also computes:
    returned is how many times as long as on a core of its own a rank takes, 1 on accelerators. What ranks have of the
    cores in the best turn counts: other programs only ever take from it.
    """
    ranks, inner = list(comm.ranks), 2
    if topology is not None:
        numbers = topology.host_of(np.array(ranks)).tolist()
        ranks = [rank for _, rank in sorted(zip(numbers, ranks, strict=True))]
        inner = numbers.count(numbers[0]) if len({numbers.count(each) for each in numbers}) == 1 else 1
    moves, runs = list_moves(ranks, inner) if len(ranks) > 1 else [], list[Callable[[], Any]]()
    for src, dst in moves:
        source = parse_layout(src)
        ones = torch.ones(source.layout.local_shapes(comm.rank)[0], device=comm.device)
        x = from_local(ones, source.layout, comm=comm)
        runs.append(partial(x.redistribute, parse_layout(dst, like=source).layout))
    turns: list[list[float]] = []
    for turn in range(repeats):
        spans = [_time(run, 1, comm, before=0 if turn else 2)[0] for run in runs]
        turns.append([*spans, _time_stretch(comm) if comm.device.type == "cpu" else 1.0])
    *own, stretches = zip(*turns, strict=True)
    samples = (MoveSample(src, dst, s) for (src, dst), s in zip(moves, _slowest(own, comm), strict=True))
    every = gather_values(comm, stretches, label="calibrate").values()
    shares = [fmean(1 / stretch for stretch in turn) for turn in zip(*every, strict=True)]
    return tuple(samples), max(1 / max(shares), _ranks_of_host(comm) / _cores())


def _time_stretch(comm: Comm) -> float:
    """The time that computing takes, over the time that this thread has a core."""
    square = torch.ones(256, 256, device=comm.device)
    comm.barrier(label="calibrate")
    started, on_core = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < STRETCH_SECONDS:
        torch.mm(square, square)
    return (time.perf_counter() - started) / (time.thread_time() - on_core)


def list_moves(ranks: Sequence[int], inner: int = 1) -> list[tuple[str, str]]:
    """What is timed, by growing size: one message, messages to all, a gather, two kinds of sums; then in groups.

    >>> list_moves([0, 1])[1]
    ('f32[4,64] on x=2 @ 0,1: S(0)', 'on x=2 @ 0,1: S(1)')
    >>> list_moves(range(4), 2)[5]
    ('f32[8,32] on g=2,x=2 @ 0,1,2,3: R, S(0)', 'on g=2,x=2 @ 0,1,2,3: R, R')
    """
    count, grouped = len(ranks), 1 < inner < len(ranks) and len(ranks) % inner == 0
    order, turned = (",".join(map(str, each)) for each in (ranks, [*ranks[1:], ranks[0]]))
    mesh, groups = f"on x={count} @ {order}:", f"on g={count // inner},x={inner} @ {order}: R,"
    found = []
    for nbytes in MOVE_BYTES:
        rows = 2 * count
        tensor = f"f32[{rows},{max(1, nbytes // 4 // rows // rows) * rows}]"
        kinds = [("S(0)", "S(1)"), ("S(0)", "R"), ("P", "R"), ("P", "S(0)")]
        found.append((f"{tensor} {mesh} S(0)", f"on x={count} @ {turned}: S(0)"))
        found += [(f"{tensor} {mesh} {a}", f"{mesh} {b}") for a, b in kinds]
        found += [(f"{tensor} {groups} {a}", f"{groups} {b}") for a, b in kinds[1:3] if grouped]
    return found


def _slowest(spans: Sequence[Sequence[float]], world: Comm) -> list[float]:
    """One of the shortest turns, each as long as on its slowest rank: other programs only ever make one longer."""
    every = list(gather_values(world, spans, label="calibrate").values())
    turns = [sorted(max(turn) for turn in zip(*(own[i] for own in every), strict=True)) for i in range(len(spans))]
    return [found[len(found) // 8] for found in turns]


def _time(
    run: Callable[[], Any],
    repeats: int,
    world: Comm,
    calls: int = 1,
    before: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of a call, which all ranks begin together; some turns more come first."""
    spans = []
    for _ in range(repeats + before):
        world.barrier(label="calibrate")
        _wait_for_device(world.device)
        start = clock()
        for _ in range(calls):
            run()
        _wait_for_device(world.device)
        spans.append((clock() - start) / calls)
    return spans[before:]


def _wait_for_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# The fit


def fit_topology(samples: Sequence[MoveSample], hosts: Topology) -> Topology:
    """The topology on these hosts whose estimates are closest to the samples.

    >>> made = Topology(4, within=Link(2e-6, 5e9, 1e-6, 1e-4), memory=4e9, collectives="messages")
    >>> moves = [MoveSample(src, dst, 1.0) for src, dst in list_moves(range(4))]
    >>> samples = [replace(move, seconds=move.transfer().estimate(made)) for move in moves]
    >>> found = fit_topology(samples, Topology(4))
    >>> round(found.within.bandwidth / 1e9, 2), round(found.memory / 1e9, 2), found.collectives
    (5.0, 4.0, 'messages')
    """
    if not samples:
        return _with_figures(hosts, _figures_of(hosts), hosts.collectives, calibrated=False)
    transfers, seconds = [sample.transfer() for sample in samples], np.array([sample.seconds for sample in samples])
    kinds: tuple[Collectives, ...] = ("messages", "native")
    fits = [(_fit_figures(transfers, seconds, hosts, kind), kind) for kind in kinds]
    (_, figures), kind = min(fits, key=lambda fit: fit[0][0])
    return _with_figures(hosts, figures, kind, calibrated=True)


def _figures_of(topology: Topology) -> Array:
    """What is fitted, in seconds: call, latency, overhead, byte of both links, and a byte of a rank's own memory."""
    links = [[k.call, k.latency, k.overhead, 1 / k.bandwidth] for k in (topology.within, topology.between)]
    return np.array([*links[0], *links[1], 1 / topology.memory])


def _with_figures(hosts: Topology, figures: Array, kind: Collectives, *, calibrated: bool) -> Topology:
    """The same hosts with other figures."""
    links = [
        Link(latency=float(a), bandwidth=float(1 / max(b, FASTEST)), overhead=float(o), call=float(c))
        for c, a, o, b in (figures[:4], figures[4:8])
    ]
    memory = float(1 / max(figures[8], FASTEST))
    return Topology(hosts.ranks_per_host, hosts.hosts, *links, memory=memory, collectives=kind, calibrated=calibrated)


def _fit_figures(
    transfers: Sequence[Transfer], seconds: Array, hosts: Topology, kind: Collectives
) -> tuple[float, Array]:
    """The median relative error, and the figures.

    Estimates are piecewise linear and homogeneous in the figures: each turn solves with the slopes at the last ones.
    Weights are those of the least absolute relative error, so a turn of the machine that was slow does not count much.
    """

    def predict(figures: Array) -> Array:
        made = _with_figures(hosts, figures, kind, calibrated=True)
        return np.array([transfer.estimate(made) for transfer in transfers])

    figures, best = _figures_of(hosts), (np.inf, _figures_of(hosts))
    weights = 1 / seconds
    # what a call, a message and a hop take can hardly be told apart between few ranks: rather the call
    prefer = PREFER * np.diag([0, 1, 1, 0, 0, 1, 1, 0, 0.0]) * weights.max()
    for _ in range(TURNS):
        now = predict(figures)
        slopes = np.zeros((len(seconds), len(figures)))
        for column, value in enumerate(figures):
            step = max(1e-3 * value, LEAST_STEP[column % 4 if column < 8 else 3])
            slopes[:, column] = (predict(figures + step * (np.arange(len(figures)) == column)) - now) / step
        used = slopes.any(axis=0)
        solved = figures.copy()
        rows = np.vstack([slopes * weights[:, None], prefer])
        wanted = np.append(seconds * weights, np.zeros(len(prefer)))
        solved[used] = solve_nonnegative(rows[:, used], wanted)
        figures = solved
        relative = np.abs(predict(figures) / seconds - 1)
        best = min(best, (float(np.median(relative)), figures), key=lambda found: found[0])
        weights = 1 / seconds / np.sqrt(np.maximum(relative, 0.05))
    return best


def solve_nonnegative(rows: Array, wanted: Array) -> Array:
    """The figures of at least zero with the least squared error: the best of all choices of those that are zero.

    >>> solve_nonnegative(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([1.0, 0.9, 0.8])).round(2).tolist()
    [0.9, 0.0]
    """
    count, best, error = rows.shape[1], np.zeros(rows.shape[1]), np.inf
    for chosen in itertools.product((True, False), repeat=count):
        columns = np.flatnonzero(chosen)
        found = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0] if len(columns) else np.zeros(0)
        left = float(((rows[:, columns] @ found - wanted) ** 2).sum())
        if (found >= 0).all() and left < error - 1e-12:
            best, error = np.zeros(count), left
            best[columns] = found
    return best


# The device


def _time_device(comm: Comm, repeats: int, stretch: float, topology: Topology) -> Device:
    """What one rank computes while the others do: products, sums of large tensors, a step of small operators."""
    device = comm.device

    def measure(runs: Sequence[tuple[Callable[[], Any], int]], repeats: int) -> list[float]:
        """Seconds of a call of each of these, which are called so many times in each turn."""
        clock = time.thread_time if device.type == "cpu" else time.perf_counter
        turns = [
            [_time(run, 1, comm, calls, before=0 if turn else 2, clock=clock)[0] for run, calls in runs]
            for turn in range(repeats)
        ]
        return [stretch * seconds for seconds in _slowest(list(zip(*turns, strict=True)), comm)]

    names = ("f32",) if device.type == "cpu" else ("f32", "bf16")
    shapes = list(itertools.product(PRODUCTS[:2] if device.type == "cpu" else PRODUCTS, PRODUCTS, PRODUCTS))
    products: dict[str, tuple[tuple[float, float, float, float], ...]] = {}
    for name in names:
        kind = torch.float32 if name == "f32" else torch.bfloat16
        ones = partial(torch.ones, dtype=kind, device=device)
        runs = [
            (partial(torch.mm, ones(m, k), ones(k, n)), max(1, min(50, int(1e8 / (2 * m * n * k)))))
            for m, n, k in shapes
        ]
        found = measure(runs, min(repeats, 5))
        products[name] = tuple((m, n, k, 2 * m * n * k / s) for (m, n, k), s in zip(shapes, found, strict=True))
    large, small = (torch.ones(n, device=device) for n in (1 << 20, 8))
    passing, launch = measure([(partial(torch.add, x, x), calls) for x, calls in ((large, 1), (small, 200))], repeats)
    fastest = max(row[3] * (2 if name == "f32" else 1) for name, rows in products.items() for row in rows)
    sharing = _ranks_of_host(comm)
    made = Device(
        _device_name(device),
        _memory_of(device, sharing),
        fastest,
        efficiency=1.0,
        bandwidth=12 * large.numel() / passing,
        launch=launch,
        eager_call=0.0,
        asynchronous=device.type != "cpu",
        overlap=1.0 if device.type != "cpu" else min(1.0, max(0.0, _cores() / sharing - 1)),
        products=products,
    )
    if made.asynchronous:
        step = _SmallStep.alone(small_layers(32), (SMALL_ROWS, 32))
        spent = measure([(step.run, 1)], repeats)[0] - step.computing(made)
        return replace(made, eager_call=max(0.0, spent / len(step.rehearsal.operators)))
    return _time_steps(comm, repeats, made, topology, measure)


class _SmallStep(NamedTuple):
    """A small sharded step, ready to run, and its rehearsal."""

    plan: ModelPlan
    rehearsal: Rehearsal
    run: Callable[[], None]

    @classmethod
    def of(cls, plan: ModelPlan, build: Callable[[], nn.Module], shape: tuple[int, int], comm: Comm) -> _SmallStep:
        """Forward and backward of a model under a plan, each rank with inputs of a shape."""
        inputs = torch.ones(shape, device=comm.device, requires_grad=not list(build().parameters()))
        rehearsal = rehearse(build(), plan, (inputs,), int(plan.mesh.ranks.min()), None)
        with use_comm(comm):
            model = shard_module(build().to(comm.device), plan, process_group=comm)

        def run() -> None:
            with use_comm(comm):
                model(inputs).sum().backward()
                for parameter in model.parameters():
                    parameter.grad = None

        return cls(plan, rehearsal, run)

    @classmethod
    def alone(cls, build: Callable[[], nn.Module], shape: tuple[int, int]) -> _SmallStep:
        """The same of a rank by itself: nothing moves."""
        return cls.of(ModelPlan(Mesh.of(x=1), {}, input_plan="replicated"), build, shape, LocalComm.alone())

    def computing(self, device: Device) -> float:
        """The seconds of its operators, as they are estimated."""
        return lay_out_eager(self.rehearsal, self.price(Topology(1)), replace(device, asynchronous=False)).compute

    def price(self, topology: Topology) -> PricedMoves:
        """What its moves cost."""
        return PricedMoves(self.rehearsal.moves, self.plan.mesh, int(self.plan.mesh.ranks.min()), topology)


def small_layers(width: int) -> Callable[[], nn.Module]:
    """Four pairs of layers.

    >>> len(small_layers(32)())
    16
    """

    def build() -> nn.Module:
        layers = [
            (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width)) for _ in range(4)
        ]
        return nn.Sequential(*itertools.chain(*layers))

    return build


def _time_steps(comm: Comm, repeats: int, device: Device, topology: Topology, measure: Measure) -> Device:
    """What operators take in steps: memory is not as fast as where one tensor is read again and again.

    A small step shows what the engine adds to an operator; large norms how fast memory is, and large layers how fast
    products are; three small steps with different moves what the engine adds to each kind of move.
    """
    steps = [
        _SmallStep.alone(build, shape)
        for build, shape in (
            (small_layers(32), (SMALL_ROWS, 32)),
            (
                lambda: nn.Sequential(*(part for _ in range(3) for part in (nn.LayerNorm(1024), nn.GELU()))),
                (1024, 1024),
            ),
            (lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.GELU()), (1024, 256)),
        )
    ]
    small, passes, layers = measure([(step.run, 1) for step in steps], repeats)
    device = replace(
        device, eager_call=max(0.0, small - steps[0].computing(device)) / len(steps[0].rehearsal.operators)
    )

    def slower(factor: float) -> Device:
        return replace(device, bandwidth=device.bandwidth * factor)

    device = slower(_find_factor(lambda factor: steps[1].computing(slower(factor)), passes))

    def slower_products(factor: float) -> Device:
        rows = {name: tuple((*row[:3], row[3] * factor) for row in own) for name, own in device.products.items()}
        return replace(device, products=rows)

    device = slower_products(_find_factor(lambda factor: steps[2].computing(slower_products(factor)), layers))
    return device if comm.world_size == 1 else _time_engine(comm, repeats, device, topology)


def _find_factor(predict: Callable[[float], float], seconds: float) -> float:
    """The factor, at most 1, at which so many seconds are predicted; smaller factors predict more.

    >>> round(_find_factor(lambda factor: 1 / factor, 4.0), 3)
    0.25
    """
    low, high = 1 / 64, 1.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predict(middle) > seconds else (low, middle)
    return high if predict(1.0) < seconds else 1.0


def _time_engine(comm: Comm, repeats: int, device: Device, topology: Topology) -> Device:
    """What each kind of move takes in an eager step beside its bytes: of three steps with different moves."""
    mesh, whole, width = Mesh(("x",), list(comm.ranks)), "x: S(0)", max(32, comm.world_size)
    pairs = {"{0,4,8,12}.*": whole, "{2,6,10,14}.weight": "x: S(1)"}
    weights = {"{0,2,4,6,8,10,12,14}.weight": whole}
    plans = [
        ModelPlan(mesh, {}, input_plan=whole),
        ModelPlan(mesh, weights, input_plan=whole, reshard_after_forward=True),
        ModelPlan(mesh, pairs, input_plan="replicated"),
    ]
    steps = [_SmallStep.of(plan, small_layers(width), (SMALL_ROWS, width), comm) for plan in plans]
    turns = [[_time(step.run, 1, comm, before=0 if turn else 2)[0] for step in steps] for turn in range(repeats)]
    rows, left = [], []
    for step, seconds in zip(steps, _slowest(list(zip(*turns, strict=True)), comm), strict=True):
        moves = step.price(topology)
        nothing = replace(device, eager_moves=dict.fromkeys(MOVE_KINDS, 0.0))
        rows.append([sum(m.kind == kind for m in moves.sent) / seconds for kind in MOVE_KINDS])
        left.append(1 - lay_out_eager(step.rehearsal, moves, nothing).step / seconds)
    found = solve_nonnegative(np.array(rows), np.array(left))
    return replace(device, eager_moves=dict(zip(MOVE_KINDS, found.tolist(), strict=True)))


def _device_name(device: torch.device) -> str:
    return platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _ranks_of_host(comm: Comm) -> int:
    """How many ranks the fullest host has."""
    hosts = comm.find_topology()
    if hosts is None:
        return comm.world_size
    return int(np.unique(hosts.host_of(np.array(comm.ranks)), return_counts=True)[1].max())


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_of(device: torch.device, sharing: int) -> int:
    """The memory of a GPU, or this rank's share of the host's."""
    if device.type != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // sharing
