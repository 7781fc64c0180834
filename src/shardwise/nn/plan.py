"""Which parameters and modules of a model are sharded, and how its outputs come back: a plan, before anything moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from shardwise.geometry import ShardingSpec


class Sharder(ABC):
    """Shards a whole module in a way that specs of single parameters cannot say."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the module that takes the place of `module`."""


@dataclass
class ShardingPlan:
    """What `shard_module` does to a model; "" names the model itself.

    `plan` gives a spec for each parameter, or a `Sharder` for each module, to shard. `output_plan` gives a spec for
    each module whose sharded output is laid out anew. Modules in `return_local_tensor` return their local tensor.

    >>> from shardwise.geometry import ChunkSpec
    >>> plan = ShardingPlan({"fc1.weight": ChunkSpec(0, ranks=4)}, return_local_tensor=["fc1"])
    >>> plan.output_plan is None
    True
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes a plan for a model."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return how to shard the module."""


def owners_of(module: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that own each parameter, by the id of the parameter: several for a shared one.

    >>> layer = nn.Linear(2, 1)
    >>> [type(owner).__name__ for owner in owners_of(nn.Sequential(layer))[id(layer.weight)]]
    ['Linear']
    """
    found: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(owner)
    return found
