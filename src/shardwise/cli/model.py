"""`shardwise model`: memory, traffic and time of a training step of a model, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.output import NO, AsJson, parse_bytes
from shardwise.geometry import LayoutError
from shardwise.transfer import Link, Topology
from shardwise.transfer.topology import BETWEEN_HOSTS, WITHIN_HOST

Source = Annotated[
    str,
    typer.Argument(metavar="FACTORY|CONFIG", help="package.module:function that returns a model, or a config.json."),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan: .toml, .json or .yaml.")]
MeshText = Annotated[
    str | None, typer.Option("--mesh", metavar="MESH", help="Make the plan: axes dp, fsdp, tp, ep, as in dp=128,tp=8.")
]
OtherPlan = Annotated[Path | None, typer.Option("--compare", metavar="FILE", help="A second plan, side by side.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Sequences that each rank passes to the model.")]
Sequence = Annotated[int, typer.Option(min=1, metavar="N", help="Length of a sequence.")]
Optimizer = Annotated[str, typer.Option(metavar="NAME", help="adamw, adamw-fp32, adamw8bit, sgd, momentum and others")]
DtypeText = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Of the parameters, such as bf16.")]
ComputeDtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Of operators, where autocast casts.")]
TopologyText = Annotated[
    str,
    typer.Option("--topology", metavar="N[:A:B]", help="Ranks per host, bandwidth within and between: 8:300GB:25GB."),
]
DeviceName = Annotated[str, typer.Option("--device", metavar="NAME", help="h100, h200, a100, b200 or mi300x.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a device, in place of the known one.")]


def model(
    source: Source,
    plan: PlanFile = None,
    mesh: MeshText = None,
    compare: OtherPlan = None,
    batch: Batch = 8,
    sequence: Sequence = 4096,
    optimizer: Optimizer = "adamw",
    dtype: DtypeText = None,
    compute_dtype: ComputeDtype = None,
    topology: TopologyText = "8",
    device: DeviceName = "h100",
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Print what a training step of a model needs under a plan: memory, traffic, time. Nothing is allocated.

    The status is 1 if the step does not fit in the device's memory.

    \b
    Examples:
      shardwise model models:make --plan plan.toml --batch 4 --sequence 2048
      shardwise model llama/config.json --mesh dp=128,tp=8 --device h200
      shardwise model llama/config.json --plan a.toml --compare b.toml --json
    """
    from shardwise.cli.model_report import report_model  # loads torch, which other commands do without

    if (plan is None) == (mesh is None):
        raise LayoutError("pass one of --plan (a file) and --mesh (a plan is made for it)")
    options: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "compute_dtype": compute_dtype}
    options |= {"batch": batch, "sequence": sequence, "topology": read_topology(topology)}
    size = None if memory is None else parse_bytes(memory)
    if not report_model(source, plan or mesh or "", compare, (device, size), options, as_json):
        raise typer.Exit(NO)


def read_topology(text: str) -> Topology:
    """Ranks per host, and the bandwidths within and between hosts if they are given.

    >>> read_topology("4:450GB:50GB").between.bandwidth
    50000000000.0
    """
    count, *rates = text.split(":")
    if not count.isdecimal() or int(count) < 1 or len(rates) not in (0, 2):
        raise LayoutError(
            f"{text!r} is not a topology; write the ranks of a host, as in 8, or with the bandwidths within and "
            "between hosts, as in 8:300GB:25GB"
        )
    if not rates:
        return Topology(ranks_per_host=int(count))
    within, between = (float(parse_bytes(rate)) for rate in rates)
    links = Link(WITHIN_HOST.latency, within), Link(BETWEEN_HOSTS.latency, between)
    return Topology(int(count), within=links[0], between=links[1])
