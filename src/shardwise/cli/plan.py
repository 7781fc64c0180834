"""`shardwise plan`: print the transfer between two layouts.

`shardwise show`: draw a layout.

`shardwise topology`: measure the links between ranks and what a rank computes, once, for all estimates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from shardwise.cli.output import (
    AsJson,
    format_seconds,
    parse_bytes,
    print_json,
    shorten_title,
    table_lines,
    terminal_width,
)
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, TensorType, find_dtype, layout_to_json, parse_layout
from shardwise.geometry.state_map import TensorShape
from shardwise.transfer import Link, Topology, Transfer, plan_transfer
from shardwise.transfer.cost import Device
from shardwise.transfer.topology import BETWEEN_HOSTS, WITHIN_HOST
from shardwise.transfer.transfer import StateTransfer, format_between_hosts, format_bytes, plan_state
from shardwise.view import Line, draw_layout, draw_ranks, draw_table, line, print_lines

if TYPE_CHECKING:
    from shardwise.planner.calibrate import Calibration

SHOWN_EDGES = 16
PLAN_SUFFIXES = (".toml", ".json", ".yaml", ".yml")

SourceText = Annotated[str, typer.Argument(metavar="SRC", help="A tensor and its layout, in the notation.")]
TargetText = Annotated[
    str, typer.Argument(metavar="DST", help="The target layout; dtype and shape may be omitted.", show_default=False)
]
ModelText = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="SRC and DST are files of model plans: for a factory, a config.json or a checkpoint; or, as --model A B, "
        "for the shapes that one of them lists.",
    ),
]
Apart = Annotated[bool, typer.Option("--apart", help="The second plan is of another job: its ranks come after.")]
PlanDtype = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Of the parameters, such as bf16.")]
RanksPerHost = Annotated[int, typer.Option(min=1, metavar="N", help="Ranks that share a host.")]
TopologyText = Annotated[
    str | None,
    typer.Option(
        "--topology",
        metavar="FILE|N[:A:B]",
        help="What shardwise topology measured; or ranks per host, bandwidths within and between: 8:300GB:25GB.",
    ),
]
Buffer = Annotated[str | None, typer.Option(metavar="SIZE", help="Maximum bytes a rank has in flight, such as 64MB.")]

AllEdges = Annotated[bool, typer.Option("--edges", help="List every edge in the JSON, also of very large plans.")]


def plan(
    src: SourceText,
    dst: TargetText = "",
    model: ModelText = None,
    apart: Apart = False,
    dtype: PlanDtype = None,
    ranks_per_host: RanksPerHost = 8,
    links: TopologyText = None,
    buffer: Buffer = None,
    as_json: AsJson = False,
    edges: AllEdges = False,
) -> None:
    """Print who sends how much to whom to turn one layout into another, or a whole model from one plan to another.

    Nothing is sent.

    \b
    Examples:
      shardwise plan "f32[4096,1024] on tp=4: S(0)" "on tp=4: S(1)"
      shardwise plan "bf16[8192,64] on dp=16: S(0)" "on tp=4: S(1)" --buffer 64MB
      shardwise plan --model config.json trainer.toml server.toml --apart
    """
    topology = Topology(ranks_per_host=ranks_per_host) if links is None else find_topology(links)
    if model is not None:
        if buffer is not None or edges:
            raise LayoutError("--buffer and --edges are for the transfer of one tensor; leave out --model or them")
        paths = (src, dst) if dst else (model, src)
        report_state(model if dst else None, paths, dtype, apart, topology, as_json)
        return
    if dst and (src.endswith(PLAN_SUFFIXES) or dst.endswith(PLAN_SUFFIXES)):
        raise LayoutError(f"{src} and {dst}: plans of whole models need the model: --model MODEL {src} {dst}")
    if not dst or apart or dtype is not None:
        raise LayoutError("pass SRC and DST, two layouts; --apart and --dtype are for --model and two files of plans")
    source = parse_layout(src)
    target = parse_layout(dst, like=source)
    transfer = plan_between(source, target, topology, None if buffer is None else parse_bytes(buffer))
    if as_json:
        print_json(plan_to_json(source, target, transfer, topology, edges or None))
    else:
        print_lines(plan_lines(source, target, transfer, topology), sys.stdout)


def report_state(
    model: str | None, paths: tuple[str, str], dtype: str | None, apart: bool, topology: Topology, as_json: bool
) -> None:
    """Print what moving all parameters of a model from one plan to another takes."""
    from shardwise.nn import PlanError, load_plan  # these load torch

    try:
        shapes = find_shapes(model, paths, dtype)
        plans = [load_plan(path) for path in paths]
        specs = [each.specs_of({name: kind.shape for name, kind in shapes.items()}) for each in plans]
    except PlanError as error:
        raise LayoutError(str(error)) from error
    if apart:
        first = 1 + int(plans[0].mesh.ranks.max())
        specs[1] = {
            name: MeshSpec(Mesh(spec.mesh.axes, spec.mesh.ranks + first), spec.placements, spec.order)
            for name, spec in specs[1].items()
        }
    pairs = [
        (specs[0][name].layout(kind.shape), specs[1][name].layout(kind.shape), find_dtype(kind.dtype).itemsize)
        for name, kind in shapes.items()
    ]
    found = plan_state(pairs, topology)
    groups = group_pairs(list(shapes.items()), pairs)
    if as_json:
        data = {"from": str(plans[0].mesh), "to": str(plans[1].mesh), **found.to_json(), "groups": groups}
        print_json(data)
    else:
        sizes = [f"{each.mesh}: {each.mesh.ranks.size:,} ranks" for each in plans]
        meshes = [f"{text}, {path}" for text, path in zip(sizes, paths, strict=True)]
        print_lines(state_lines(found, meshes, groups), sys.stdout)


def find_shapes(model: str | None, paths: tuple[str, str], dtype: str | None) -> dict[str, TensorShape]:
    """The parameters of a model by name; those of a checkpoint, or of the plans' own `shapes` without one."""
    from shardwise.checkpoint.formats import FORMATS  # these load torch, or take long
    from shardwise.cli.inspect import open_checkpoint
    from shardwise.nn.plan_files import read_shapes
    from shardwise.planner.rehearsal import load_model

    if model is None:
        found = next(filter(None, map(read_shapes, paths)), None)
        if found is None:
            raise LayoutError(
                f"neither {paths[0]} nor {paths[1]} has shapes; pass a model, as in --model llama/config.json A B, or "
                'add a table: [shapes] "layers.{0-31}.up.weight" = "bf16[4096,1024]"'
            )
    elif (
        "://" in model
        or (Path(model).is_file() and not model.endswith(".json"))
        or any((Path(model) / name).exists() for known in FORMATS for name in known.index_names)
    ):
        index = open_checkpoint(model).store.index
        found = {name: TensorShape(entry.shape, entry.dtype.name) for name, entry in index.tensors.items()}
    else:
        with redirect_stdout(sys.stderr):  # the user's module may print
            parameters = dict(load_model(model).model.named_parameters())
        found = {name: TensorShape.of(x.shape, str(x.dtype)) for name, x in parameters.items()}
    if dtype is not None:
        found = {name: TensorShape.of(kind.shape, dtype) for name, kind in found.items()}
    return found


def group_pairs(
    named: Sequence[tuple[str, TensorShape]], pairs: Sequence[tuple[Layout, Layout, int]]
) -> list[dict[str, Any]]:
    """Tensors that move alike, those with most bytes first."""
    names: dict[tuple[Layout, Layout, int], list[int]] = {}
    for number, pair in enumerate(pairs):
        names.setdefault(pair, []).append(number)
    found = []
    for (src, dst, itemsize), numbers in names.items():
        transfer = plan_transfer(src, dst, itemsize=itemsize)
        name, kind = named[numbers[0]]
        found.append(
            {
                "tensors": len(numbers),
                "first": name,
                "from": str(TensorType(find_dtype(kind.dtype).name, src)),
                "to": str(TensorType(find_dtype(kind.dtype).name, dst)),
                "moved_bytes": transfer.moved_bytes * len(numbers),
            }
        )
    return sorted(found, key=lambda row: -int(str(row["moved_bytes"])))


def state_lines(found: StateTransfer, meshes: Sequence[str], groups: Sequence[dict[str, Any]]) -> list[Line]:
    """The figures of a whole model, and of the tensors that move alike."""
    rows = [
        ("from", meshes[0]),
        ("to", meshes[1]),
        ("tensors", f"{found.count:,} of {len(groups)} kinds"),
        ("moved", f"{format_bytes(found.moved_bytes)}, lower bound {format_bytes(found.lower_bound_bytes)}"),
        ("between hosts", format_bytes(found.bytes_between_hosts)),
        ("copied locally", format_bytes(found.copied_bytes)),
        ("busiest sender", _busiest(found.busiest_rank(sends=True))),
        ("busiest receiver", _busiest(found.busiest_rank(sends=False))),
        *(("busiest link" if not i else "", str(each)) for i, each in enumerate(found.busiest_links)),
        ("estimate", f"{format_seconds(found.seconds)} ({_hosts_text(found.topology)})"),
    ]
    width = max(len(name) for name, _ in rows)
    shown = [
        (f"{row['tensors']:,}", row["first"], row["from"], row["to"], format_bytes(row["moved_bytes"]))
        for row in groups[:SHOWN_EDGES]
    ]
    table = table_lines(("tensors", "first", "from", "to", "moved"), shown, left=4)
    hidden = len(groups) - len(shown)
    more = [line(f"and {hidden} more kinds of tensors")] if hidden > 0 else []
    return [*(line(f"{name:<{width}}  {value}") for name, value in rows), line(), *table, *more]


def plan_between(
    source: TensorType, target: TensorType, topology: Topology, max_buffer_bytes: int | None = None
) -> Transfer:
    """The transfer between two tensors that have the same element type and shape."""
    if source.dtype != target.dtype:
        raise LayoutError(
            f"a transfer keeps the dtype, but the source is {source.dtype} and the destination {target.dtype}; "
            "omit dtype and shape in the destination to use those of the source"
        )
    if source.shape != target.shape:
        raise LayoutError(
            f"a transfer keeps the shape, but the source has {source.shape} and the destination {target.shape}; "
            "omit dtype and shape in the destination to use those of the source"
        )
    return plan_transfer(
        source.layout,
        target.layout,
        itemsize=source.itemsize,
        topology=topology,
        max_buffer_bytes=max_buffer_bytes,
    )


def plan_lines(source: TensorType, target: TensorType, transfer: Transfer, topology: Topology) -> list[Line]:
    """The figures of a transfer, its edges, and what it does in words."""
    rows = [
        ("from", shorten_title(str(source))),
        ("to", shorten_title(str(target))),
        ("moved", f"{format_bytes(transfer.moved_bytes)}, lower bound {format_bytes(transfer.lower_bound_bytes)}"),
        ("between hosts", format_between_hosts(transfer) or "unknown"),
        ("copied locally", format_bytes(transfer.copied_bytes)),
        ("rounds", _rounds(transfer)),
        ("collective", str(transfer.collective or "none: a plain exchange")),
        ("busiest sender", _busiest(transfer.busiest_sender)),
        ("busiest receiver", _busiest(transfer.busiest_receiver)),
        ("estimate", _estimate(transfer, topology)),
    ]
    width = max(len(name) for name, _ in rows)
    figures = [line(f"{name:<{width}}  {value}") for name, value in rows]
    words = [line(text) for text in transfer.explain().split("\n")]
    return [*figures, *_edge_lines(transfer), line(), *words]


def _rounds(transfer: Transfer) -> str:
    limit = transfer.max_buffer_bytes
    return str(transfer.rounds) + ("" if limit is None else f", buffers of at most {format_bytes(limit)}")


def _busiest(entry: tuple[int, int] | None) -> str:
    return "none" if entry is None else f"rank {entry[0]}, {format_bytes(entry[1])}"


def _estimate(transfer: Transfer, topology: Topology) -> str:
    return f"{format_seconds(transfer.estimate(topology))} ({_hosts_text(topology)})"


def _hosts_text(topology: Topology) -> str:
    within, between = (format_bytes(link.bandwidth) for link in (topology.within, topology.between))
    count = "uneven numbers of" if topology.ranks_per_host is None else topology.ranks_per_host
    return f"{count} ranks per host, {within}/s within and {between}/s between hosts"


def _edge_lines(transfer: Transfer) -> list[Line]:
    """The first edges as a table: source rank, destination rank, bytes."""
    edges, count = transfer.first_edges(SHOWN_EDGES)
    if not edges:
        return []
    rows = [(str(s), str(d), format_bytes(n)) for s, d, n in edges]
    table = draw_table(("from", "to", "bytes"), rows, ranks=[source for source, _, _ in edges])
    hidden = count - len(edges)
    return [line(), *table, *([line(f"and {hidden} more edges")] if hidden > 0 else [])]


def plan_to_json(
    source: TensorType, target: TensorType, transfer: Transfer, topology: Topology, edges: bool | None = None
) -> dict[str, Any]:
    """The transfer as plain data, with the figures that the table shows."""
    return {
        "from": str(source),
        "to": str(target),
        **transfer.to_json(edges=edges),
        "busiest_sender": transfer.busiest_sender,
        "busiest_receiver": transfer.busiest_receiver,
        "estimate_seconds": transfer.estimate(topology),
    }


LayoutText = Annotated[str, typer.Argument(metavar="LAYOUT", help="A tensor and its layout, in the notation.")]


def show(layout: LayoutText, as_json: AsJson = False) -> None:
    """Draw which rank holds which part of a tensor, and how many bytes each rank holds.

    \b
    Example:
      shardwise show "f32[8,6] on dp=2,tp=2: S(0), S(1)"
    """
    tensor = parse_layout(layout)
    if as_json:
        print_json(tensor_to_json(tensor))
    else:
        print_lines(tensor_lines(tensor, terminal_width()), sys.stdout)


def tensor_lines(tensor: TensorType, width: int) -> list[Line]:
    """A tensor's notation, the picture of its layout, and what each rank holds."""
    title = line(shorten_title(str(tensor)))
    return [title, line(), *draw_layout(tensor.layout, width), line(), *draw_ranks(tensor)]


def tensor_to_json(tensor: TensorType) -> dict[str, Any]:
    """The layout and the numbers of each rank as plain data."""
    layout = tensor.layout
    elements = layout.elements_per_rank()
    ranks = [
        {
            "rank": rank,
            "elements": elements[rank],
            "bytes": elements[rank] * tensor.itemsize,
            "local_shapes": [list(shape) for shape in layout.local_shapes(rank)],
            "pieces": [{"offsets": p.box.offsets, "sizes": p.box.sizes} for p in layout.pieces_of(rank)],
        }
        for rank in layout.ranks
    ]
    return {
        "notation": str(tensor),
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "layout": layout_to_json(layout),
        "pending": None if layout.pending is None else str(layout.pending),
        "bytes": layout.numel * tensor.itemsize,
        "ranks": ranks,
    }


Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="A file for what was measured.")]
RankCount = Annotated[int, typer.Option("--ranks", min=1, metavar="N", help="Local ranks to start.")]
DeviceKind = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda", help="What ranks compute on.")]
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="How often each move is made.")]


def topology(
    output: Output = None,
    ranks: RankCount = 2,
    device: DeviceKind = None,
    repeats: Repeats = 9,
    as_json: AsJson = False,
) -> None:
    """Measure the links between ranks and what each rank computes, for plan, model and estimates of your own.

    Under torchrun (--no-python shardwise topology ...) it measures between the ranks of that job, on one host or
    several; by itself it starts local ranks.
    Measure while the machine does nothing else.

    \b
    Examples:
      shardwise topology --ranks 4 -o machine.toml
      shardwise topology --device cuda --ranks 8 --repeats 25 --json
    """
    from shardwise.comm import launch  # these load torch
    from shardwise.planner.calibrate import calibrate

    found: Calibration = launch(calibrate, ranks, repeats, device=device)[0]
    if os.environ.get("RANK", "0") != "0":
        return
    if output is not None:
        found.save(output)
    if as_json:
        print_json({**found.to_json(), "errors": list(found.errors)})
    else:
        print_lines([line(text) for text in calibration_lines(found, output)], sys.stdout)


def calibration_lines(found: Calibration, output: Path | None) -> list[str]:
    """The figures of the links and the device, and how far the fit is from the samples."""
    links, device = found.topology, found.device
    rows = [("ranks", f"{found.ranks}, {links.ranks_per_host or 'uneven numbers'} per host")]
    used = [("within hosts", links.within)] if found.samples else []
    if found.samples and len(set(links.host_of(np.arange(found.ranks)).tolist())) > 1:
        used.append(("between hosts", links.between))
    for name, link in used:
        call = format_seconds(link.call + link.latency + link.overhead)
        rows.append((name, f"{format_bytes(link.bandwidth)}/s, {call} for an empty message"))
    if found.samples:
        rows.append(("sums", f"{format_bytes(links.memory)}/s, as {links.collectives}"))
    rate = max(row[3] for own in device.products.values() for row in own)
    rows += [
        ("device", f"{device.name}, {format_bytes(device.memory_bytes)} for each rank"),
        ("products", f"{rate / 1e9:,.0f} billion operations per second"),
        ("memory", f"{format_bytes(device.bandwidth)}/s"),
        ("operator", f"{format_seconds(device.eager_call)} of Python"),
        *((f"each {kind}", f"{format_seconds(s)} in an eager step") for kind, s in device.eager_moves.items()),
    ]
    lines = [f"{name:<15}{text}" for name, text in rows]
    if found.errors:
        off = [abs(error) for error in found.errors]
        lines.append(f"estimates of {len(off)} moves: {median(off):.0%} off in the median, {max(off):.0%} at worst")
    if found.errors and not found.is_close:
        lines.append("that is too far to rely on: measure again while the machine does nothing else, with --repeats 25")
    return [*lines, *([f"written to {output}"] if output is not None else [])]


def find_topology(text: str) -> Topology:
    """What a file says, or a short text."""
    return Topology.from_file(text) if names_file(text) else read_topology(text)


def read_topology(text: str) -> Topology:
    """Ranks per host, and the bandwidths within and between hosts if they are given.

    >>> read_topology("4:450GB:50GB").between.bandwidth
    50000000000.0
    """
    count, *rates = text.split(":")
    if not count.isdecimal() or int(count) < 1 or len(rates) not in (0, 2):
        raise LayoutError(
            f"{text!r} is not a topology; write the ranks of a host, as in 8, or with the bandwidths within and "
            "between hosts, as in 8:300GB:25GB, or the file that shardwise topology wrote"
        )
    if not rates:
        return Topology(ranks_per_host=int(count))
    within, between = (float(parse_bytes(rate)) for rate in rates)
    links = Link(WITHIN_HOST.latency, within), Link(BETWEEN_HOSTS.latency, between)
    return Topology(int(count), within=links[0], between=links[1])


def read_device(text: str) -> Device | None:
    """The device that was measured with a topology, where the text names a file."""
    return Device.from_file(text) if names_file(text) else None


def names_file(text: str) -> bool:
    """Whether a topology is given as a file.

    >>> names_file("machine.toml"), names_file("8:300GB:25GB")
    (True, False)
    """
    return text.endswith(".toml") or not text[:1].isdecimal()
