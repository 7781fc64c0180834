"""What does the page need to show model plans? Memory, traffic and time of one or two estimates, and their parameters.

Parameters are sent as columns: 2,000 of them are 200 kB. Equal layouts are looked at once, so that bytes by rank and
the cost of moving from one plan to the other take milliseconds for thousands of parameters.

One or two plans for a model as a target of the page. Loads torch, which the other targets do without.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._text import to_toml
from shardwise._torch import pytree
from shardwise.geometry import LayoutError, TensorType, parse_layout
from shardwise.nn import ModelPlan, PlanError, load_plan, plan_from_data
from shardwise.page.facts import shorten
from shardwise.planner import DEVICES, OPTIMIZERS, AutoPlanner, Estimate, FoundPlan, ParameterRow, estimate
from shardwise.planner.estimate import batch_for, count_batches
from shardwise.planner.rehearsal import Inputs, load_model, make_inputs
from shardwise.transfer import Topology
from shardwise.transfer.transfer import plan_state

COLUMNS = ("name", "module", "shape", "dtype", "layout", "parameters", "gradients", "optimizer", "traffic")
MOVE_COLUMNS = ("label", "backward", "from", "to", "count", "received", "seconds", "axes", "parameters")
MOST_MOVES = 400
PARTS = ("parameters", "gradients", "optimizer")


def plan_facts(title: str, model: str, estimates: Sequence[tuple[str, Estimate]], topology: Topology) -> dict[str, Any]:
    """All that the page shows of one or two plans for a model, each with a name, as plain data."""
    found = [estimate for _, estimate in estimates]
    return {
        "kind": "plan" if len(found) == 1 else "plans",
        "title": shorten(title),
        "model": model,
        "elements": found[0].elements,
        "plans": [_one_plan(name, estimate) for name, estimate in estimates],
        "columns": list(COLUMNS),
        "move_columns": list(MOVE_COLUMNS),
        "resharding": [moving_facts(a, b, topology) for a, b in (found, found[::-1])] if len(found) > 1 else None,
    }


def _one_plan(name: str, found: Estimate) -> dict[str, Any]:
    figures = ("ranks", "rank", "tokens", "flops", "compute_seconds", "communication_seconds", "step_seconds", "fits")
    memory = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "buffer_bytes", "peak_bytes")
    return {
        "name": name,
        "data": dict(found.plan),
        "toml": to_toml(found.plan),
        "mesh": found.mesh,
        "device": [found.device.name, found.device.memory_bytes],
        **{key: getattr(found, key) for key in (*figures, *memory)},
        "traffic": dict(found.traffic),
        "rows": [_row(row) for row in found.rows],
        "moves": [_move(move) for move in found.moves[:MOST_MOVES]],
        "hidden_moves": max(0, len(found.moves) - MOST_MOVES),
        "by_rank": bytes_by_rank(found.rows),
    }


def _row(row: ParameterRow) -> list[Any]:
    bytes_of_row = (row.rank_bytes, row.gradient_bytes, row.optimizer_bytes, row.traffic_bytes)
    return [row.name, row.module, list(row.shape), row.dtype, row.layout, *bytes_of_row]


def _move(move: Any) -> list[Any]:
    totals = (move.received_bytes * move.count, move.seconds * move.count)
    return [move.label, move.backward, move.src, move.dst, move.count, *totals, list(move.axes), move.parameters]


def bytes_by_rank(rows: Sequence[ParameterRow]) -> dict[str, Any] | None:
    """Bytes that each rank holds of parameters, gradients and optimizer state; None if a layout is not written out.

    `values` has one entry for each part if all ranks hold the same, which they mostly do.
    """
    totals: dict[int, Any] = {}
    try:
        for (layout, *shares), count in Counter(map(_kind, rows)).items():
            for rank, held in _held_bytes(layout):
                totals[rank] = totals.get(rank, 0) + np.array([1.0, *shares]) * held * count
    except LayoutError:
        return None
    ranks = sorted(totals)
    values = np.rint(np.array([totals[rank] for rank in ranks]).reshape(len(ranks), len(PARTS))).astype(np.int64).T
    equal = len(ranks) > 0 and bool((values == values[:, :1]).all())
    numbers = None if ranks == list(range(len(ranks))) else ranks
    shown = values[:, :1] if equal else values
    return {"count": len(ranks), "numbers": numbers, "equal": equal, "values": shown.tolist()}


def _kind(row: ParameterRow) -> tuple[str, float, float]:
    """What decides the bytes of a parameter on every rank: its layout, and the shares of gradients and state."""
    held = row.rank_bytes or 1
    return row.layout, row.gradient_bytes / held, row.optimizer_bytes / held


@lru_cache(maxsize=1024)
def _held_bytes(layout: str) -> tuple[tuple[int, int], ...]:
    tensor = parse_layout(layout)
    return tuple(tensor.layout.bytes_per_rank(tensor.itemsize).items())


def moving_facts(one: Estimate, other: Estimate, topology: Topology) -> dict[str, Any] | None:
    """What it costs to move the parameters from one plan to the other; None if they are not the same parameters."""
    layouts = {row.name: row.layout for row in other.rows}
    if {row.name for row in one.rows} != set(layouts):
        return None
    try:
        pairs = [(_read_layout(row.layout), _read_layout(layouts[row.name])) for row in one.rows]
    except LayoutError:
        return None
    found = plan_state(((a.layout, b.layout, a.itemsize) for a, b in pairs), topology)
    known = {(part.src, part.dst, part.itemsize): part.moved_bytes for part, _ in found.parts}
    return {
        "bytes": found.moved_bytes,
        "seconds": found.seconds,
        "busiest": [str(link) for link in found.busiest_links if link.sends],
        "by_parameter": [known[a.layout, b.layout, a.itemsize] for a, b in pairs],
    }


@lru_cache(maxsize=4096)
def _read_layout(text: str) -> TensorType:
    return parse_layout(text)


MOST_KNOWN = 16
SEARCH_SECONDS = 20.0
SETTINGS: dict[str, Any] = {
    "batch": 8,
    "sequence": 4096,
    "optimizer": "adamw",
    "dtype": None,
    "compute_dtype": None,
    "device": "h100",
    "ranks_per_host": 8,
}


@dataclass(frozen=True)
class PlanTarget:
    """A model, and one or two plans for it by name; `settings` are those of `SETTINGS`.

    The last estimates are kept: of two plans, only the one that was edited is estimated again.
    """

    title: str
    model: nn.Module
    plans: tuple[tuple[str, ModelPlan], ...]
    inputs: Inputs | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    _known: dict[str, Estimate] = field(default_factory=dict, repr=False)

    def facts(self, *, written: bool = False) -> dict[str, Any]:
        settings = {**SETTINGS, **self.settings}
        topology = Topology(int(settings["ranks_per_host"]))
        try:
            found: list[tuple[str, Estimate]] = []
            for name, plan in self.plans:
                own = settings
                if found:  # at the same batch of all ranks together, where that is divided
                    with suppress(PlanError):
                        own = {**settings, "batch": batch_for(plan, found[0][1].sequences)}
                found.append((name, self._estimate(plan, own, topology)))
        except PlanError as error:
            raise LayoutError(str(error)) from error
        choices = {"device": list(DEVICES), "optimizer": list(OPTIMIZERS)}
        named = type(self.model).__name__
        return {**plan_facts(self.title, named, found, topology), "settings": settings, "choices": choices}

    def _estimate(self, plan: ModelPlan, settings: Mapping[str, Any], topology: Topology) -> Estimate:
        key = json.dumps([plan.to_data(), dict(settings)])
        if key not in self._known:
            chosen = {name: settings[name] for name in ("batch", "sequence", "optimizer", "device")}
            chosen |= {name: settings[name] or None for name in ("dtype", "compute_dtype")}
            found = estimate(self.model, plan, topology=topology, inputs=self.inputs, **chosen)
            while len(self._known) >= MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
        return self._known[key]

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Other plans or settings: `plans` is a list of plans as data, `settings` has some of `SETTINGS`.

        With `autoplan` the last plan is replaced by the best one on its mesh. With `toml`, a plan as data: the text of
        its file.
        """
        if "toml" in question:
            return {"toml": to_toml(plan_from_data(question["toml"], "the plan").to_data())}
        given = question.get("plans", [plan.to_data() for _, plan in self.plans])
        if len(given) != len(self.plans):
            raise ValueError(f"the page shows {len(self.plans)} plans, got {len(given)}")
        names = [name for name, _ in self.plans]
        plans = tuple((name, plan_from_data(data, name)) for name, data in zip(names, given, strict=True))
        settings = read_settings(question.get("settings", {}), self.settings)
        other = replace(self, plans=plans, settings=settings)
        if not question.get("autoplan"):
            return other.facts()
        found = other._search()
        last = (plans[-1][0], plan_from_data(found.to_data(), plans[-1][0]))
        if len(plans) == 1:  # the same batch of all ranks together
            settings["batch"] = batch_for(found, settings["batch"] * count_batches(plans[0][1]))
        facts = replace(other, plans=(*plans[:-1], last), settings=settings).facts()
        return {**facts, "found": f"{last[0]}: {found.finding.certificate}"}

    def _search(self) -> FoundPlan:
        """The best plan on the mesh of the last one, for the batch of all ranks together under the first one."""
        settings, count = self.settings, count_batches(self.plans[0][1])
        named = {name: settings[name] for name in ("optimizer", "device")}
        named |= {name: settings[name] or None for name in ("dtype", "compute_dtype")}
        topology = Topology(int(settings["ranks_per_host"]))
        planner = AutoPlanner(self.plans[-1][1].mesh, topology=topology, time_limit=SEARCH_SECONDS, **named)
        one = make_inputs(self.model, settings["batch"], settings["sequence"]) if self.inputs is None else self.inputs
        every = pytree.tree_map_only(Tensor, lambda t: torch.cat([t] * count) if t.ndim else t, one)
        return planner.plan(self.model, every, sequence=settings["sequence"])


def open_plans(paths: Sequence[str], source: str, settings: Mapping[str, Any]) -> PlanTarget:
    """The target of one or two plan files for a model: a factory `package.module:function`, or a config.json."""
    try:
        loaded = load_model(source)
        plans = tuple((os.path.basename(path), load_plan(path)) for path in paths)
    except PlanError as error:
        raise LayoutError(str(error)) from error
    title = f"{' and '.join(name for name, _ in plans)} for {source}"
    return PlanTarget(title, loaded.model, plans, loaded.inputs, {**SETTINGS, **settings})


def read_settings(given: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Known settings, each of the right type.

    >>> read_settings({"batch": "4", "dtype": ""}, SETTINGS)["batch"]
    4
    """
    unknown = set(given) - set(SETTINGS)
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}; known are {', '.join(SETTINGS)}")
    read = {name: int(given[name]) for name in ("batch", "sequence", "ranks_per_host") if name in given}
    texts = {name: str(given[name] or "") or None for name in ("dtype", "compute_dtype") if name in given}
    named = {name: str(given[name]) for name in ("optimizer", "device") if name in given}
    if any(count < 1 for count in read.values()):
        raise ValueError("batch, sequence and ranks per host are 1 or more")
    return {**SETTINGS, **default, **read, **texts, **named}
