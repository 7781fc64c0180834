"""One or two plans for a model as a target of the page. Loads torch, which the other targets do without."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardwise.geometry import LayoutError
from shardwise.nn import ModelPlan, PlanError, load_plan, plan_from_data
from shardwise.page.plan_facts import plan_facts
from shardwise.planner import DEVICES, OPTIMIZERS, Estimate, estimate
from shardwise.planner.model_sources import load_model
from shardwise.planner.rehearsal import Inputs
from shardwise.transfer import Topology

MOST_KNOWN = 16
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
            found = [(name, self._estimate(plan, settings, topology)) for name, plan in self.plans]
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
        """Other plans or settings: `plans` is a list of plans as data, `settings` has some of `SETTINGS`."""
        given = question.get("plans", [plan.to_data() for _, plan in self.plans])
        if len(given) != len(self.plans):
            raise ValueError(f"the page shows {len(self.plans)} plans, got {len(given)}")
        names = [name for name, _ in self.plans]
        plans = tuple((name, plan_from_data(data, name)) for name, data in zip(names, given, strict=True))
        return replace(self, plans=plans, settings=read_settings(question.get("settings", {}), self.settings)).facts()


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
