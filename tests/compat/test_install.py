"""install(): torch's path leads to Shardwise, whatever was imported before or after, and back.

Each order of imports needs a fresh interpreter. The programs print one line for each question.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading

from shardwise.compat import install, uninstall

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


def run(program: str) -> list[str]:
    """Run a program in a fresh interpreter; return the lines it prints."""
    command = [sys.executable, "-W", "error::FutureWarning", "-c", READ + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_modules_imported_before_are_changed_and_given_back_exactly() -> None:
    program = f"""
{AFTER}
inner = ["torch.distributed._shard.sharded_tensor._ops.init", "torch.distributed._shard.sharding_spec._internals"]
def snapshot():
    return {{(m, n): id(v) for m in list(sys.modules) if m.startswith("torch.") and hasattr(sys.modules[m], "__dict__")
            for n, v in list(vars(sys.modules[m]).items())}}
homes()
import shardwise.compat.sharded_tensor  # registers what torch.load may make of a file, which install() does not
before, names = snapshot(), sorted(n for n in sys.modules if n.startswith("torch."))
from shardwise.compat import install, uninstall
print("before", *homes(), path())
install()
print("installed", *homes(), path(), [name in sys.modules for name in inner])
uninstall()
uninstall()
print("uninstalled", *homes(), path())
with install():
    with install():
        pass
    print("outer block", *homes(), path())
print("after blocks", *homes(), path())
with install(packages=["torch.distributed.fsdp"]):
    fsdp = importlib.import_module("torch.distributed.fsdp._shard_utils").ShardedTensor.__module__
    dcp = importlib.import_module("torch.distributed.checkpoint.utils").ShardedTensor.__module__
    print("one package", fsdp.split(".")[0], dcp.split(".")[0], path())
after = snapshot()
print("changed", [key for key in before if after.get(key) != before[key]], [n for n in names if n not in sys.modules])
"""
    assert run(program) == [
        "before torch torch",
        "installed shardwise shardwise [False, True]",
        "uninstalled torch torch",
        "outer block shardwise shardwise",
        "after blocks torch torch",
        "one package shardwise torch shardwise",
        "changed [] []",
    ]


def test_modules_imported_after_get_ours_and_then_torchs() -> None:
    program = f"""
import shardwise.compat
import shardwise.compat._shard, shardwise.compat._shard.sharded_optim, shardwise.compat._shard.sharding_plan
def loaded():
    return [n for n in sys.modules if n.startswith("torch.distributed._shard")]
print("before", loaded())
with shardwise.compat.install():
    print("in a block", path())
print("after it", loaded())
shardwise.compat.install()
{AFTER}
print("installed", *homes(), path())
shardwise.compat.uninstall()
print("uninstalled", *homes(), path())
"""
    assert run(program) == [
        "before []",
        "in a block shardwise",
        "after it []",
        "installed shardwise shardwise",
        "uninstalled torch torch",
    ]


def home() -> str:
    """The package that torch's path leads to now."""
    return str(importlib.import_module("torch.distributed._shard.sharded_tensor").ShardedTensor.__module__)


def test_blocks_in_threads_and_inside_each_other_end_with_the_last() -> None:
    inside, leave, seen = threading.Barrier(2), threading.Event(), []

    def second() -> None:
        with install():
            inside.wait(60)
            leave.wait(60)
            seen.append(home())

    thread = threading.Thread(target=second)
    thread.start()
    with install():
        inside.wait(60)
        with install():
            pass
        seen.append(home())
    leave.set()
    thread.join()
    seen.append(home())
    install()
    with install():
        pass
    seen.append(home())
    uninstall()
    seen.append(home())
    assert [name.partition(".")[0] for name in seen] == ["shardwise", "shardwise", "torch", "shardwise", "torch"]
