"""Torch's DeviceMesh beside ours: the comm of one, and the DeviceMesh of a Mesh.

A DeviceMesh has process groups. It is made at most once for a mesh, by all ranks together, and kept as long as it is
used; one that a tensor came from is used again.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from shardwise.comm.current import default_comm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import Comm
from shardwise.geometry import Mesh
from shardwise.geometry.torch_words import to_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_meshes: WeakValueDictionary[tuple[Mesh, str], Any] = WeakValueDictionary()


def comm_of_device_mesh(device_mesh: DeviceMesh) -> Comm:
    """The comm of all ranks of a DeviceMesh: the current one where it has these ranks, else the group of its axis."""
    around, ranks = default_comm(), sorted(device_mesh.mesh.flatten().tolist())
    if sorted(around.ranks) == ranks:
        return around
    if device_mesh.ndim == 1:
        return ProcessGroupComm.of(device_mesh.get_group())
    raise ValueError(
        f"the mesh has {len(ranks)} of the {around.world_size} ranks of the world and {device_mesh.ndim} axes; pass "
        "comm=, a comm of exactly the mesh's ranks"
    )


def remember_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The Mesh of a DeviceMesh; `find_device_mesh` leads back to it."""
    mesh = to_mesh(device_mesh)
    _meshes[(mesh, device_mesh.device_type)] = device_mesh
    return mesh


def find_device_mesh(mesh: Mesh, device_type: str, comm: Comm) -> DeviceMesh:
    """The DeviceMesh of a Mesh: one that is known, else a new one, which every rank of the world has to ask for."""
    known = _meshes.get((mesh, device_type))
    if known is None:
        if comm.process_group is None:
            raise ValueError(
                f"DTensor needs a torch process group, and the comm of this tensor has none: {comm!r}; start the "
                "ranks with shardwise.launch or torchrun, or use x.sharding.spec.mesh, which needs none"
            )
        made = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
        known = made(device_type, torch.tensor(mesh.ranks.tolist(), device="cpu"), mesh_dim_names=mesh.axes)
        _meshes[(mesh, device_type)] = known
    found: DeviceMesh = known
    return found
