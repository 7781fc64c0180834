"""A small model over hosts and devices, in the words of torch: torchrun, a DeviceMesh, and a plan.

    torchrun --nproc-per-node 2 examples/torchrun_hosts.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/torchrun_hosts.py

Ranks of one host are next to each other, so the inner axis `tp`, which communicates most, stays inside a host. The
outer axis `dp` splits the batch. Each rank has its own GPU, over nccl; where these are too few, the CPU over gloo.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise

PLAN = {"0.weight": "tp: S(0)", "0.bias": "tp: S(0)", "2.weight": "tp: S(1)"}


def start() -> DeviceMesh:
    """Join the world that torchrun started, on this rank's own device."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    kind = "cuda" if torch.cuda.device_count() >= local else "cpu"  # nccl takes one rank for each GPU
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    ranks = dist.get_world_size()
    return init_device_mesh(kind, (ranks // local, local), mesh_dim_names=("dp", "tp"))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def main() -> None:
    mesh = start()
    model = make_model().to(mesh.device_type)
    plan = shardwise.ModelPlan(cast(Any, mesh), PLAN, input_plan="dp: S(0)")  # torch's mesh is taken as ours is
    shardwise.shard_module(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("dp"))  # the batch of this dp rank
        batch = torch.randn(8, 16, generator=generator).to(mesh.device_type)
        loss = (model(batch) - batch.flip(1).mean()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()  # every rank asks
        if dist.get_rank() == 0:
            print(f"step {step}  loss {value:.6f}  mesh {tuple(mesh.shape)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
