"""Names of a package that are imported on first use, listed once: in the package's stub, `__init__.pyi`.

Type checkers and editors read the stub; this module reads the same lines when the package is imported.

A name that is not there is answered by the nearest one that is, or by what is written here in place of a word of
another library.

Pickles name the module of each class: `MOVED` has the modules that classes were in before, so that old pickles load.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import dis
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from shardwise._version import SUPPORTED_TORCH

MOVED = {
    "shardwise.checkpoint.errors": "shardwise.checkpoint.files",
    "shardwise.geometry.dtypes": "shardwise.geometry.notation",
    "shardwise.geometry.errors": "shardwise.geometry.box",
    "shardwise.geometry.notation.read": "shardwise.geometry.notation",
    "shardwise.nn.balanced": "shardwise.nn.plan_costs",
    "shardwise.nn.model_plan": "shardwise.nn.plan",
    "shardwise.nn.patterns": "shardwise.nn.plan",
    "shardwise.nn.plan_table": "shardwise.nn.plan_costs",
}
# Names of torch's old API, which live in `shardwise.compat`: `from shardwise import Sharder` finds them there.
_OLD = (
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "init_from_local_shards",
)
OLD_NAMES = {name: "shardwise.compat" for name in _OLD}

_PLAN = "shard_module(model, ModelPlan(Mesh.of(dp=2, tp=4), {pattern: placements}))"
WORDS_OF_OTHERS = {
    "distribute_tensor": "shard(x, mesh, placements)",
    "DTensor": "ShardedTensor; shard(x, mesh, placements) and from_local(part, mesh, placements) make one",
    "DeviceMesh": "Mesh.of(dp=2, tp=4); a DeviceMesh of torch is taken as well",
    "init_device_mesh": "Mesh.of(dp=2, tp=4); a DeviceMesh of torch is taken as well",
    "make_mesh": "Mesh.of(dp=2, tp=4)",
    "parallelize_module": _PLAN,
    "distribute_module": _PLAN,
    "tensor_parallel": f"{_PLAN}; shardwise.hf.plan makes the plan of a model of transformers",
    "ColwiseParallel": "the placement 'tp: S(0)' of a weight, and of its bias, in a ModelPlan",
    "RowwiseParallel": "the placement 'tp: S(1)' of a weight in a ModelPlan",
    "SequenceParallel": "nothing: a ModelPlan names the placements of parameters, and activations follow",
    "PrepareModuleInput": "input_plan= of a ModelPlan",
    "PrepareModuleOutput": "output_plan= of a ModelPlan",
    "fully_shard": "shard_module with 'dp: S(0)' in the plan's patterns",
    "FSDP": "shard_module with 'dp: S(0)' in the plan's patterns",
    "FullyShardedDataParallel": "shard_module with 'dp: S(0)' in the plan's patterns",
    "DDP": "shard_module with a plan whose input_plan is 'dp: S(0)'",
    "DistributedDataParallel": "shard_module with a plan whose input_plan is 'dp: S(0)'",
    "NamedSharding": "MeshSpec(mesh, placements), or the text 'on dp=2,tp=4: S(0), R'",
    "PartitionSpec": "MeshSpec(mesh, placements), or the text 'on dp=2,tp=4: S(0), R'",
    "PositionalSharding": "ChunkSpec or GridSpec",
    "device_put": "shard(x, spec), and x.redistribute(spec) for a tensor that is sharded already",
    "with_sharding_constraint": "x.redistribute(spec)",
    "redistribute": "a method: x.redistribute(spec)",
    "estimate": "shardwise.planner.estimate(model, plan)",
    "AutoPlanner": "shardwise.planner.AutoPlanner(mesh)",
    "publish": "shardwise.sync.publish(state, address)",
    "subscribe": "shardwise.sync.subscribe(state, address)",
    "Muon": "shardwise.nn.Muon(parameters)",
    "from_dtensor": "shardwise.compat.from_dtensor(dtensor)",
    "to_dtensor": "shardwise.compat.to_dtensor(tensor)",
    "reshard": "a method, x.redistribute(spec), or shardwise.checkpoint.reshard for files",
    "all_gather": "a method: x.full(), or x.redistribute('R')",
    "gather": "a method: x.gather_to(rank), or x.full() for all ranks",
    "all_reduce": "a method: x.redistribute('R') of a tensor that is pending",
    "init_process_group": "launch(fn, world_size), or torchrun with torch.distributed.init_process_group",
    "spawn": "launch(fn, world_size), or run_local(fn, world_size) for ranks that are threads",
    "get_rank": "default_comm().rank",
    "get_world_size": "default_comm().world_size",
    "save_state_dict": "save(state, path)",
    "load_state_dict": "load(state, path)",
    "ChunkShardingSpec": "ChunkSpec(dim, ranks); shardwise.compat has torch's class",
    "EnumerableShardingSpec": "EnumerableSpec(pieces); shardwise.compat has torch's class",
}


class MovedModule(ModuleType):
    """The earlier name of a module; the names in it are looked up in the present one, which is loaded then.

    >>> import pickle
    >>> pickle.loads(b"cshardwise.geometry.errors\\nLayoutError\\n.")
    <class 'shardwise.geometry.box.LayoutError'>
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools that walk over all modules ask for files and paths
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(MOVED[self.__name__]), name)


def keep_moved_modules() -> None:
    """Let the earlier names of modules be imported; loads nothing."""
    for name in MOVED:
        sys.modules.setdefault(name, MovedModule(name))


def read_stub(stub: Path, package: str) -> dict[str, tuple[str, str | None]]:
    """Return the module of each name that a stub imports and the name there, in order; None for a module of its own."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    found: dict[str, tuple[str, str | None]] = {}
    for module, alias in ((str(node.module), alias) for node in imports for alias in node.names):
        inside = module == package
        found[alias.asname or alias.name] = (f"{package}.{alias.name}", None) if inside else (module, alias.name)
    return dict(sorted(found.items()))


def attach_stub(
    package: str, file: str, first: str = "", unless: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    The module `first` is imported before every name, except for names of the modules in `unless`.
    """
    origins = read_stub(Path(file).with_suffix(".pyi"), package)
    aliases = {} if "." in package else OLD_NAMES

    def load(name: str) -> Any:
        if name not in origins and name not in aliases:
            raise _missing_name(package, name, origins, sys._getframe(1))
        module, own = origins.get(name) or (aliases[name], name)
        before = [first] if first and module not in unless else []
        value = _import_name([*before, module], own, f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    # `from shardwise import *` must hide neither a module of the caller's, such as torch's nn, nor a built-in (open).
    names = [name for name, (_, own) in origins.items() if own is not None and not hasattr(builtins, name)]
    return load, lambda: list(origins), names


def _missing_name(package: str, name: str, known: Sequence[str] | dict[str, Any], caller: FrameType) -> Exception:
    """The error of a name that is not there; `from package import name` shows the text of an ImportError only."""
    text = f"module {package!r} has no attribute {name!r}"
    if package.count(".") == 0 and name in WORDS_OF_OTHERS:
        text += f"; here it is {WORDS_OF_OTHERS[name]}"
    elif not name.startswith("__") and (near := difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)):
        text += f"; did you mean {' or '.join(near)}?"
    if dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
        return ImportError(text, name=name)
    return AttributeError(text, name=name)  # without the module: Python would add a guess of its own


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let Python's collector wait while many objects are made that are kept: it would look through all of them in vain.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _import_name(modules: Sequence[str], name: str | None, asked: str) -> Any:
    """Import modules, and return the last one or a name of it; an AttributeError inside is not hidden by `import`."""
    try:
        with collector_paused():
            last = [import_module(module) for module in modules][-1]
            return last if name is None else getattr(last, name)
    except AttributeError as error:
        raise ImportError(
            f"{asked} cannot be loaded: {error}; shardwise supports {SUPPORTED_TORCH}", name=name
        ) from error
