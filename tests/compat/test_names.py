"""Is every name of torch.distributed._shard there, with torch's arguments and defaults?"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

TORCH, OURS = "torch.distributed._shard", "shardwise.compat._shard"

NAMES = {
    "": "_shard_tensor load_with_process_group shard_module shard_parameter sharded_tensor sharding_spec",
    ".api": "_shard_tensor shard_parameter shard_module load_with_process_group _get_current_process_group"
    " _reshard_output _collect_local_shard ChunkShardingSpec ShardedTensor Sharder ShardingPlan ShardingSpec",
    ".metadata": "ShardMetadata",
    ".sharder": "Sharder",
    ".sharding_plan": "ShardingPlan ShardingPlanner",
    ".sharding_plan.api": "ShardingPlan ShardingPlanner Sharder ShardingSpec",
    ".sharding_spec": "ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata"
    " ShardingSpec _infer_sharding_spec_from_shards_metadata",
    ".sharding_spec.api": "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata ShardingSpec"
    " _infer_sharding_spec_from_shards_metadata custom_sharding_spec_op _has_custom_op _dispatch_custom_op"
    " check_tensor get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata",
    ".sharding_spec.chunk_sharding_spec": "ChunkShardingSpec Shard ShardMetadata ShardingSpec get_chunked_dim_size"
    " get_split_size narrow_tensor _parse_and_validate_remote_device",
    ".sharding_spec.chunk_sharding_spec_ops._common": "_chunk_sharding_spec_check _sharded_op_common"
    " _register_sharded_op_on_local_tensor",
    ".sharding_spec._internals": "check_tensor get_chunk_sharding_params get_chunked_dim_size get_split_size"
    " validate_non_overlapping_shards_metadata _check_shard_metadata_pair_overlap",
    ".sharded_tensor": "Shard ShardedTensor ShardedTensorBase ShardedTensorMetadata ShardMetadata TensorProperties"
    " empty ones zeros full rand randn init_from_local_shards state_dict_hook pre_load_state_dict_hook"
    " custom_sharded_op_impl _sharded_op_impl",
    ".sharded_tensor.api": "ShardedTensor ShardedTensorBase Shard TensorProperties ShardedTensorMetadata"
    " _create_tensor_from_params _register_remote_shards _sharded_tensor_map check_tensor build_global_metadata"
    " build_metadata_from_local_shards validate_non_overlapping_shards_metadata _flatten_tensor_size"
    " _parse_and_validate_remote_device _validate_output_tensor_for_gather",
    ".sharded_tensor._ops._common": "_register_sharded_op_on_local_shards _sharded_op_common",
    ".sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING ShardMetadata",
    ".sharded_tensor.shard": "Shard ShardMetadata",
    ".sharded_tensor.utils": "_parse_and_validate_remote_device _flatten_tensor_size _validate_output_tensor_for_gather"
    " build_metadata_from_local_shards build_global_metadata recalc_global_sharded_tensor_metadata check_tensor"
    " validate_non_overlapping_shards_metadata Shard ShardedTensorMetadata TensorProperties",
    ".sharded_tensor.reshard": "reshard_local_shard reshuffle_local_shard get_idx_from_placements"
    " build_reshard_metadata",
    ".sharded_tensor.logger": "_get_or_create_logger",
    ".sharded_optim": "ShardedOptimizer named_params_with_sharded_tensor",
    ".sharded_optim.api": "ShardedOptimizer",
    "._utils": "narrow_tensor narrow_tensor_by_index",
    ".common_op_utils": "_basic_validation _register_default_op",
    ".op_registry_utils": "_register_op _decorator_func",
}
MEMBERS = (
    "metadata local_shards local_tensor remote_shards sharding_spec gather reshard cpu cuda is_pinned"
    " _init_from_local_shards _init_from_local_shards_and_global_metadata _init_from_local_tensor _get_preferred_device"
    " _prepare_init _post_init _normalize_pg"
    " __getstate__ __setstate__ __torch_function__ __torch_dispatch__ __hash__ __repr__"
)
FIELDS = (
    "_process_group _local_shards _metadata _sharding_spec _init_rrefs ProcessGroupState to shard_size size shape dtype"
)
CASES = [(module, name) for module, names in NAMES.items() for name in names.split()]


def problems(theirs: Any, ours: Any) -> list[str]:
    """How the arguments of ours differ from torch's; more keyword arguments with defaults are welcome."""
    found = []
    want, have = (dict(inspect.signature(f).parameters) for f in (theirs, ours))
    for name, parameter in want.items():
        if name not in have:
            found.append(f"no argument {name}")
        elif have[name].kind != parameter.kind:
            found.append(f"{name} is {have[name].kind.description}, torch's {parameter.kind.description}")
        elif have[name].default != parameter.default and str(have[name].default) != "<factory>":
            found.append(f"{name} defaults to {have[name].default}, torch's to {parameter.default}")
    shared = [name for name in have if name in want]
    if shared != [name for name in want if name in have]:
        found.append(f"the order is {shared}")
    for name in have.keys() - want.keys():
        if have[name].default is inspect.Parameter.empty and have[name].kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            found.append(f"{name} has to be given")
    return found


@pytest.mark.parametrize(("module", "name"), CASES)
def test_name_is_there_with_torchs_arguments(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(TORCH + module), name)
    ours = getattr(importlib.import_module(OURS + module), name)
    if inspect.isfunction(theirs) or (inspect.isclass(theirs) and dataclasses.is_dataclass(theirs)):
        assert problems(theirs, ours) == []


@pytest.mark.parametrize("name", [*MEMBERS.split(), "__init__"])
def test_member_is_there_with_torchs_arguments(name: str) -> None:
    theirs = importlib.import_module(TORCH + ".sharded_tensor").ShardedTensor
    ours = importlib.import_module(OURS + ".sharded_tensor").ShardedTensor
    if name == "__init__":
        assert problems(theirs.__init__, ours.__new__) == ["no argument self", "cls has to be given"]
    else:
        assert problems(getattr(theirs, name), getattr(ours, name)) == []


@pytest.mark.parametrize("name", FIELDS.split())
def test_field_is_there(name: str) -> None:
    assert hasattr(importlib.import_module(OURS + ".sharded_tensor").ShardedTensor, name)


@pytest.mark.parametrize("name", ["ShardingSpec.build_metadata", "ShardingSpec.shard"])
def test_methods_of_a_users_spec_are_torchs(name: str) -> None:
    cls, method = name.split(".")
    theirs, ours = (getattr(importlib.import_module(root + ".sharding_spec"), cls) for root in (TORCH, OURS))
    assert problems(getattr(theirs, method), getattr(ours, method)) == []
    assert getattr(ours, method).__isabstractmethod__


def test_every_module_says_what_it_offers() -> None:
    for module, names in NAMES.items():
        assert set(names.split()) <= set(importlib.import_module(OURS + module).__all__), module


IMPORTS = [
    "import sys, shardwise.compat._shard.checkpoint as m; hasattr(m, '__file__')\n"
    "assert 'torch.distributed.checkpoint.api' not in sys.modules",
    "import shardwise.compat._shard.sharding_spec.chunk_sharding_spec_ops._common as m; m._sharded_op_common",
    "import shardwise.compat._shard.sharded_tensor.api; shardwise.compat._shard.sharded_tensor.api.ShardedTensor",
    "from shardwise.compat._shard.sharded_tensor import Shard, reshard; reshard.reshard_local_shard",
    "from shardwise.compat._shard.sharded_optim.api import *; ShardedOptimizer",
    "from shardwise.compat import _shard; _shard.api.shard_module",
    "import pickle; pickle.loads(b'cshardwise.compat._shard._utils\\nnarrow_tensor\\n.')",
    "import importlib; importlib.import_module('shardwise.compat._shard.sharder').Sharder",
    "from shardwise.compat._shard.checkpoint import FileSystemReader",
]


def test_modules_are_imported_as_files_are() -> None:
    """Each first in an interpreter in which the drop-in names are not loaded."""
    program = f"""
import sys
for statement in {IMPORTS!r}:
    for name in [n for n in sys.modules if n.startswith("shardwise.compat._shard")]:
        del sys.modules[name]
    exec(statement, {{}})
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", ["narrow_tensor", "reshard_local_shard", "ShardedTensor", "Shard", "ShardingPlan"])
def test_names_are_pickled_by_where_they_are_defined(name: str) -> None:
    modules = [importlib.import_module(OURS + module) for module in NAMES if module]
    value = next(getattr(module, name) for module in modules if hasattr(module, name))
    assert pickle.loads(pickle.dumps(value)) is value


def test_a_module_that_torch_does_not_have_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'shardwise\.compat\._shard\.nothing'"):
        importlib.import_module(OURS + ".nothing")


def test_differences_are_reported() -> None:
    def theirs(a: int, b: int = 1, *, c: int = 2) -> None: ...

    def ours(b: int, d: int, *, a: int = 1, c: int = 3) -> None: ...

    assert problems(theirs, ours) == [
        "a is keyword-only, torch's positional or keyword",
        "b defaults to <class 'inspect._empty'>, torch's to 1",
        "c defaults to 3, torch's to 2",
        "the order is ['b', 'a', 'c']",
        "d has to be given",
    ]
