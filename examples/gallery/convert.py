"""Reshard a checkpoint on disk for other ranks and other names, without starting any rank.

python examples/gallery/convert.py
"""

import tempfile
from pathlib import Path

import torch

import shardwise
from shardwise import run_local
from shardwise.checkpoint import reshard

NAMES = {"blocks.*.q": "model.layers.*.attention.query"}


def write(comm: shardwise.Comm, path: Path) -> None:
    values = torch.arange(48.0).reshape(8, 6)
    state = {f"blocks.{i}.q": shardwise.shard(values + i, "on tp=4: S(0)") for i in range(2)}
    shardwise.save(state, path)


def read(comm: shardwise.Comm, path: Path) -> bool:
    names = [f"model.layers.{i}.attention.query" for i in range(2)]
    state = {name: shardwise.empty("on tp=2: S(1)", 8, 6) for name in names}
    shardwise.load(state, path)
    values = torch.arange(48.0).reshape(8, 6)
    return all(torch.equal(state[name].full_tensor(), values + i) for i, name in enumerate(names))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "trained", Path(folder) / "served"
        run_local(write, 4, source)
        reshard(source, target, layout="on tp=2: S(1)", names=NAMES)  # or: shardwise reshard trained served ...
        print(*sorted(p.name for p in target.iterdir()), sep="\n")
        print("equal:", all(run_local(read, 2, target)))


if __name__ == "__main__":
    main()
