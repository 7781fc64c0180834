"""`shardwise model`: memory, traffic and time of a training step of a model, before anything is allocated.

`shardwise autoplan`: the plan with the shortest step that fits, and a bound that proves how good it is.

What estimates a step loads torch, which `--help` and the other commands do without: functions import it.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import (
    NO,
    AsJson,
    Batch,
    DeviceName,
    DtypeText,
    Optimizer,
    PlanFile,
    SequenceLength,
    parse_bytes,
    print_json,
    table_lines,
)
from shardwise.cli.plan import TopologyText, find_topology, read_device
from shardwise.geometry import LayoutError
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line, print_lines

if TYPE_CHECKING:
    from shardwise.nn import ModelPlan
    from shardwise.planner import Estimate
    from shardwise.planner.rehearsal import ModelSource
    from shardwise.transfer.cost import Device

Source = Annotated[
    str,
    typer.Argument(metavar="FACTORY|CONFIG", help="package.module:function that returns a model, or a config.json."),
]
MeshText = Annotated[
    str | None, typer.Option("--mesh", metavar="MESH", help="Make the plan: axes dp, fsdp, tp, ep, as in dp=128,tp=8.")
]
PlanOut = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan, such as plan.toml, to edit it.")
]
OtherPlan = Annotated[Path | None, typer.Option("--compare", metavar="FILE", help="A second plan, side by side.")]
ComputeDtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Of operators, where autocast casts.")]
Again = Annotated[bool, typer.Option("--checkpoint", help="Blocks are computed again in the backward pass.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="The time of a step under shardwise.compile.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a device, in place of the known one.")]


def model(
    source: Source,
    plan: PlanFile = None,
    mesh: MeshText = None,
    compare: OtherPlan = None,
    output: PlanOut = None,
    batch: Batch = 8,
    sequence: SequenceLength = 4096,
    optimizer: Optimizer = "adamw",
    dtype: DtypeText = None,
    compute_dtype: ComputeDtype = None,
    topology: TopologyText = None,
    device: DeviceName = "",
    memory: Memory = None,
    again: Again = False,
    compiled: Compiled = False,
    as_json: AsJson = False,
) -> None:
    """Print what a training step of a model needs under a plan: memory, traffic, time. Nothing is allocated.

    The status is 1 if the step does not fit in the device's memory. Two plans are compared at the same batch of all
    ranks together: --batch is that of each rank under the first one.

    \b
    Examples:
      shardwise model models:make --plan plan.toml --batch 4 --sequence 2048
      shardwise model llama/config.json --mesh dp=128,tp=8 -o plan.toml
      shardwise model llama/config.json --mesh dp=128,tp=8 --device h200
      shardwise model llama/config.json --plan a.toml --compare b.toml --json
    """
    if (plan is None) == (mesh is None):
        raise LayoutError("pass one of --plan (a file) and --mesh (a plan is made for it)")
    options: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "compute_dtype": compute_dtype}
    options |= {"batch": batch, "sequence": sequence, "topology": find_topology(topology or "8")}
    options |= {"again": again, "compiled": compiled}
    size = None if memory is None else parse_bytes(memory)
    measured = device or read_device(topology or "8") or "h100"
    if not report_model(source, plan or mesh or "", (compare, output), (measured, size), options, as_json):
        raise typer.Exit(NO)


def report_model(
    source: str,
    plan: Path | str,
    files: tuple[Path | None, Path | None],
    device: tuple[str | Device, int | None],
    options: dict[str, Any],
    as_json: bool,
) -> bool:
    """Print the estimate of a model under the plan of a file, or one made for a mesh; return whether it fits.

    `files` are that of a second plan, and the one to which the first is written.
    """
    from shardwise.nn import PlanError, load_plan, save_plan
    from shardwise.planner import estimate
    from shardwise.planner.estimate import batch_for, find_device
    from shardwise.planner.rehearsal import load_model

    (name, memory), (compare, output) = device, files
    try:
        with redirect_stdout(sys.stderr):  # the user's module and its forward pass may print
            loaded, found = load_model(source), find_device(name)
            options["device"] = found if memory is None else replace(found, memory_bytes=memory)
            plans = [load_plan(plan) if isinstance(plan, Path) else make_plan_for(loaded, plan)]
            plans += [load_plan(compare)] if compare is not None else []
            if output is not None:
                save_plan(plans[0], output)
            made: list[Estimate] = []
            for one in plans:
                same = options if not made else {**options, "batch": batch_for(one, made[0].sequences)}
                made.append(estimate(loaded.model, one, inputs=loaded.inputs, **same))
    except PlanError as error:
        raise LayoutError(str(error)) from error
    if as_json:
        print_json(estimates_to_json(made))
    else:
        print_lines(estimate_lines(loaded, made), sys.stdout)
    return made[0].fits


def make_plan_for(loaded: ModelSource, mesh: str) -> ModelPlan:
    """A plan for a mesh; the arguments of a forward pass that a factory returned show what follows what."""
    from shardwise.hf.plans import plan as make_plan
    from shardwise.nn.plan import read_mesh

    given = loaded.inputs
    if isinstance(given, tuple):
        given = inspect.signature(loaded.model.forward).bind(*given).arguments
    return make_plan(loaded.model, read_mesh(mesh), given)


def estimate_lines(loaded: ModelSource, found: list[Estimate]) -> list[Line]:
    """The figures of one plan, or of two side by side; then parameters and moves of the first."""
    from shardwise.planner.estimate import (
        ACTIVATION_HEAD,
        MOVE_HEAD,
        PARAMETER_HEAD,
        activation_rows,
        move_rows,
        parameter_rows,
        resharding_bytes,
        summary_rows,
    )

    first = found[0]
    title = f"{type(loaded.model).__name__}, {first.elements:,} parameters; one step on rank {first.rank}"
    step = " and ".join(dict.fromkeys(f"{one.batch} x {one.sequence}" for one in found))
    step = f"batch {step} on each rank, {first.tokens:,} tokens in all, {first.optimizer}"
    head = ("", "plan") if len(found) == 1 else ("", "plan", "compared")
    lines = [line(title), line(step), line(), *table_lines(head, summary_rows(found), left=len(head))]
    if len(found) > 1:
        cost = resharding_bytes(*found)
        text = "unknown" if cost is None else format_bytes(cost)
        lines.append(line(f"moving the parameters from one plan to the other sends {text}"))
    lines += [line(f"note: {note}") for note in first.notes]
    lines += [line(), *table_lines(PARAMETER_HEAD, parameter_rows(first), left=3)]
    kept = activation_rows(first)
    lines += [line(), *table_lines(ACTIVATION_HEAD, kept, left=1)] if kept else []
    moves = move_rows(first)
    return [*lines, line(), *table_lines(MOVE_HEAD, moves, left=4)] if moves else lines


def estimates_to_json(found: list[Estimate]) -> dict[str, Any]:
    """The first estimate as plain data; a second one is under `compare`, with what moving between them sends."""
    data = found[0].to_json()
    if len(found) > 1:
        from shardwise.planner.estimate import resharding_bytes

        data |= {"compare": found[1].to_json(), "resharding_bytes": resharding_bytes(*found)}
    return data


SomeAgain = Annotated[
    bool | None,
    typer.Option("--checkpoint/--no-checkpoint", help="All blocks are computed again in the backward pass, or none."),
]
Narrow = Annotated[
    str | None, typer.Option("--gather-dtype", metavar="DTYPE", help="Parameters may be gathered in it.")
]
Mesh = Annotated[str | None, typer.Option("--mesh", metavar="MESH", help="The axes, as in dp=2,tp=4.")]
Ranks = Annotated[int | None, typer.Option(min=2, metavar="N", help="Choose the mesh of so many ranks, too.")]
AllMeshes = Annotated[bool, typer.Option("--sweep", help="Print the plans of all meshes of --ranks.")]
Global = Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences of all ranks; one each if left out.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to: .toml, .json or .yaml.")]
Objective = Annotated[str, typer.Option(metavar="NAME", help="seconds, or bytes that are received.")]
Fix = Annotated[list[str], typer.Option(metavar="PATTERN=PLACEMENTS", help='As in "blocks.*.up.weight=tp: S(0)".')]
Forbid = Annotated[list[str], typer.Option(metavar="PATTERN=PLACEMENTS", help="Placements that may not be.")]
Axes = Annotated[str, typer.Option(metavar="NAMES", help="Of the meshes of --ranks.")]
Seconds = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For the search on each mesh.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print what other placements would cost.")]
NO_PINS: list[str] = []


def autoplan(
    source: Source,
    mesh: Mesh = None,
    ranks: Ranks = None,
    all_meshes: AllMeshes = False,
    axes: Axes = "dp,tp",
    batch: Global = None,
    sequence: SequenceLength = 4096,
    optimizer: Optimizer = "adamw",
    dtype: DtypeText = None,
    compute_dtype: ComputeDtype = None,
    topology: TopologyText = None,
    device: DeviceName = "",
    memory: Memory = None,
    again: SomeAgain = None,
    gather_dtype: Narrow = None,
    compiled: Compiled = False,
    objective: Objective = "seconds",
    fix: Fix = NO_PINS,
    forbid: Forbid = NO_PINS,
    time_limit: Seconds = 30.0,
    explain: Explain = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Find the plan of a model with the shortest step that fits in memory, with a bound that proves how good it is.

    The plan is written to a file, or printed as TOML; `shardwise model --plan`, `load_plan` and `shard_module` take it.
    The status is 1 if no plan fits.

    \b
    Examples:
      shardwise autoplan models:make --mesh dp=2,tp=4 --memory 40GiB -o plan.toml
      shardwise autoplan llama/config.json --ranks 64 --sweep --dtype bf16
      shardwise autoplan models:make --mesh tp=4 --fix inputs=replicated
    """
    if (mesh is None) == (ranks is None) or (all_meshes and ranks is None):
        raise LayoutError("pass one of --mesh and --ranks; --sweep prints all meshes of --ranks")
    links = topology or "8"
    options: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "compute_dtype": compute_dtype, "again": again}
    options |= {"topology": find_topology(links), "device": device or read_device(links) or "h100"}
    options |= {"gather_dtype": gather_dtype, "compiled": compiled, "objective": objective, "time_limit": time_limit}
    options |= {"memory_limit": None if memory is None else parse_bytes(memory)}
    options |= {"fix": dict(map(_split_pin, fix)), "forbid": {p: [t] for p, t in map(_split_pin, forbid)}}
    given = {"batch": batch, "sequence": sequence}
    if not report_plan(
        source, mesh, ranks, (all_meshes, tuple(axes.split(",")), explain), options, given, out, as_json
    ):
        raise typer.Exit(NO)


def _split_pin(text: str) -> tuple[str, str]:
    pattern, equals, placements = text.partition("=")
    if not equals:
        raise LayoutError(f'{text!r} is not a pin; write a pattern and placements, as in "blocks.*.up.weight=tp: S(0)"')
    return pattern.strip(), placements.strip()


def report_plan(
    source: str,
    mesh: str | None,
    ranks: int | None,
    shown: tuple[bool, tuple[str, ...], bool],
    options: dict[str, Any],
    given: dict[str, Any],
    out: Path | None,
    as_json: bool,
) -> bool:
    """Find a plan, write it and print how good it is; whether there is one."""
    from shardwise.nn import PlanError, save_plan
    from shardwise.nn.plan_files import plan_file_kind
    from shardwise.planner import AutoPlanner, sweep
    from shardwise.planner.rehearsal import load_model

    all_meshes, axes, explain = shown
    found = None
    if out is not None and not out.parent.is_dir():
        raise LayoutError(f"{out}: there is no folder {out.parent}")
    try:
        if out is not None:  # before a search that takes long
            plan_file_kind(out)
        with redirect_stdout(sys.stderr):  # the user's module and its forward pass may print
            loaded = load_model(source)
            planner = AutoPlanner(
                mesh or ",".join([f"{axes[0]}={ranks}", *(f"{axis}=1" for axis in axes[1:])]), **options
            )
            if ranks is not None:
                found = sweep(planner, loaded.model, ranks, loaded.inputs, axes=axes, **given)
                plan = found.fastest
            else:
                plan = planner.plan(loaded.model, loaded.inputs, **given)
    except PlanError as error:
        if "fits" not in str(error):
            raise LayoutError(str(error)) from error
        print(error, file=sys.stderr)
        return False
    if out is not None:
        save_plan(plan, out)
    if as_json:
        data = {"plan": plan.to_data(), "certificate": asdict(plan.finding.certificate)}
        data |= {"estimate": plan.finding.estimate.to_json()}
        print_json(data | ({"sweep": found.to_json()} if found is not None else {}))
        return True
    texts = str(found).splitlines() if found is not None and all_meshes else []
    texts += ["", *str(plan).splitlines()] if out is None else [f"the plan is in {out}"]
    texts += ["", f"certificate: {plan.finding.certificate}"]
    texts += ["", *plan.explain().splitlines()] if explain else []
    print_lines([*map(line, texts), line(), *estimate_lines(loaded, [plan.finding.estimate])], sys.stdout)
    return True
