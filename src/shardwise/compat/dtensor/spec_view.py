"""What torch's `register_sharding` shows to a rule: a DTensorSpec for each tensor, lists of tensors as tuples.

A ShardedTensor has no DeviceMesh, which would need process groups. A `SpecView` answers for it what a DTensorSpec does.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardwise.compat.dtensor.layouts import torch_placement
from shardwise.geometry import Placement
from shardwise.ops.engine.registry import Rule, Steps, TensorMeta
from shardwise.tensor.dtensors import TENSOR_MODULE


@dataclass(frozen=True)
class MeshView:
    """The shape of a mesh, by DeviceMesh's names."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]


@dataclass(frozen=True)
class TensorMetaView:
    """Shape, strides and dtype of a whole tensor, by the names of a DTensorSpec's `tensor_meta`."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SpecView:
    """A ShardedTensor by the names of a DTensorSpec; placements are torch's."""

    mesh: MeshView
    placements: tuple[Any, ...]
    tensor_meta: TensorMetaView

    @property
    def device_mesh(self) -> MeshView:
        return self.mesh

    @property
    def shape(self) -> torch.Size:
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor_meta.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_shards(self) -> int:
        return prod(n for n, p in zip(self.mesh.shape, self.placements, strict=True) if p.is_shard())

    def is_replicated(self) -> bool:
        return all(placement.is_replicate() for placement in self.placements)

    def is_sharded(self) -> bool:
        return any(placement.is_shard() for placement in self.placements)


@dataclass(frozen=True)
class TorchRule:
    """A rule in torch's manner; called with `TensorMeta`s, it is asked with `SpecView`s in their place."""

    rule: Rule

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Any] | Steps:
        return self.rule(*map(_view, args), **{name: _view(value) for name, value in kwargs.items()})


def _view(value: Any) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(one, TensorMeta) for one in value):
        return tuple(_view(one) for one in value)
    if not isinstance(value, TensorMeta):
        return value
    strides = tuple(prod(value.shape[dim + 1 :]) for dim in range(value.ndim))
    mesh = getattr(value.layout.spec, "mesh", None)
    ranks = (len(value.layout.ranks),) if mesh is None else mesh.shape
    return SpecView(
        MeshView(ranks, None if mesh is None else mesh.axes),
        tuple(_torch_placement(placement) for placement in value.placements),
        TensorMetaView(torch.Size(value.shape), strides, value.dtype),
    )


def _torch_placement(placement: Placement) -> Any:
    words = importlib.import_module(TENSOR_MODULE)
    return torch_placement(placement) or words.Shard(placement.dim)  # type: ignore[union-attr]  # only of a Shard
