"""install(): torch's path leads to Shardwise, whatever was imported before or after, and back."""

from __future__ import annotations

import subprocess
import sys

import pytest

AFTER = "import torch.distributed.checkpoint as dcp, torch.distributed.fsdp as fsdp, torch.distributed._shard.api"
HOLDERS = [
    ("torch.distributed.checkpoint.planner_helpers", "ShardedTensor"),
    ("torch.distributed.checkpoint.planner_helpers", "ShardMetadata"),
    ("torch.distributed.checkpoint.utils", "Shard"),
    ("torch.distributed.checkpoint.filesystem", "narrow_tensor_by_index"),
    ("torch.distributed.checkpoint.optimizer", "ChunkShardingSpec"),
    ("torch.distributed.checkpoint.state_dict", "ShardedTensor"),
    ("torch.distributed._state_dict_utils", "ShardedTensor"),
    ("torch.distributed.fsdp._shard_utils", "ShardedTensorMetadata"),
    ("torch.distributed.fsdp._state_dict_utils", "init_from_local_shards"),
    ("torch.distributed.fsdp._fsdp_extensions", "ShardedTensor"),
    ("torch.distributed.tensor.parallel.fsdp", "shard_spec"),
]
READ = f"""
import importlib, sys
HOLDERS = {HOLDERS!r}
def homes():
    found = set()
    for module, name in HOLDERS:
        value = getattr(importlib.import_module(module), name)
        found.add((getattr(value, "__module__", None) or value.__name__).split(".")[0])
    return found
def path():
    import torch.distributed._shard.sharded_tensor as one
    from torch.distributed import _shard
    assert sys.modules["torch.distributed._shard"] is _shard
    assert _shard.sharded_tensor is one
    return one.ShardedTensor.__module__.split(".")[0]
"""


def run(program: str) -> str:
    """Run a program in a fresh interpreter; return what it prints."""
    command = [sys.executable, "-W", "error::FutureWarning", "-c", READ + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_modules_imported_before_are_changed_and_given_back_exactly() -> None:
    program = f"""
{AFTER}
def snapshot():
    return {{(m, n): id(v) for m in list(sys.modules) if m.startswith("torch.") and hasattr(sys.modules[m], "__dict__")
            for n, v in list(vars(sys.modules[m]).items())}}
homes()
before, names = snapshot(), sorted(n for n in sys.modules if n.startswith("torch."))
import shardwise.compat
assert (homes(), path()) == ({{"torch"}}, "torch")
shardwise.compat.install()
assert (homes(), path()) == ({{"shardwise"}}, "shardwise"), homes()
shardwise.compat.uninstall()
assert (homes(), path()) == ({{"torch"}}, "torch")
after = snapshot()
changed = [key for key in before if after.get(key) != before[key]]
print(changed, [n for n in names if n not in sys.modules])
"""
    assert run(program) == "[] []"


def test_modules_imported_after_get_ours_and_then_torchs() -> None:
    program = f"""
import shardwise.compat
assert "torch.distributed._shard" not in sys.modules
shardwise.compat.install()
assert path() == "shardwise"
{AFTER}
assert homes() == {{"shardwise"}}
shardwise.compat.uninstall()
print(*homes(), path())
"""
    assert run(program) == "torch torch"


def test_nothing_of_torchs_package_is_loaded_by_shardwise() -> None:
    program = """
import shardwise.compat._shard, shardwise.compat._shard.sharded_optim, shardwise.compat._shard.sharding_plan
with shardwise.compat.install():
    assert path() == "shardwise"
print([n for n in sys.modules if n.startswith("torch.distributed._shard")])
"""
    assert run(program) == "[]"


def test_blocks_nest_and_undo_once() -> None:
    program = """
from shardwise.compat import install, uninstall
with install():
    with install():
        pass
    assert path() == "shardwise"
assert path() == "torch"
install()
install()
uninstall()
uninstall()
print(path())
"""
    assert run(program) == "torch"


def test_only_chosen_packages_are_searched() -> None:
    program = f"""
{AFTER}
import shardwise.compat
with shardwise.compat.install(packages=["torch.distributed.fsdp"]):
    fsdp = importlib.import_module("torch.distributed.fsdp._shard_utils").ShardedTensor.__module__
    dcp = importlib.import_module("torch.distributed.checkpoint.utils").ShardedTensor.__module__
    print(fsdp.split(".")[0], dcp.split(".")[0], path())
"""
    assert run(program) == "shardwise torch shardwise"


@pytest.mark.parametrize("module", ["sharded_tensor._ops", "sharding_spec.chunk_sharding_spec_ops"])
def test_torchs_inner_modules_are_set_aside(module: str) -> None:
    program = f"""
name = "torch.distributed._shard.{module}"
before = importlib.import_module(name)
import shardwise.compat
with shardwise.compat.install():
    assert name not in sys.modules
print(sys.modules[name] is before)
"""
    assert run(program) == "True"
