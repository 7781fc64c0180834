"""The names at the top of the package: each loads, and those of modules that need torch are those modules' own."""

from __future__ import annotations

import builtins
import pickle
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

import shardwise
from shardwise._lazy import MOVED, OLD_NAMES, WORDS_OF_OTHERS


@pytest.mark.parametrize("name", [*shardwise.__all__, "open", "compile"])
def test_every_name_loads(name: str) -> None:
    assert getattr(shardwise, name) is not None
    assert name in dir(shardwise)


def test_names_of_modules_are_those_of_the_package() -> None:
    nn = import_module("shardwise.nn")
    both = sorted(set(nn.__all__) & set(shardwise.__all__))
    assert {"ModelPlan", "BalancedPlanner", "ShardedOptimizer", "load_plan", "shard_module"} <= set(both)
    assert all(getattr(shardwise, name) is getattr(nn, name) for name in both)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'shard_modul'"):
        shardwise.shard_modul  # noqa: B018  # the attribute is what is asked for


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("distribute_tensor", "here it is shard(x, mesh, placements)"),
        ("parallelize_module", "here it is shard_module(model, ModelPlan("),
        ("ColwiseParallel", "here it is the placement 'tp: S(0)' of a weight"),
        ("fully_shard", "here it is shard_module with 'dp: S(0)' in the plan's patterns"),
        ("NamedSharding", "here it is MeshSpec(mesh, placements)"),
        ("shrad", "did you mean shard"),
        ("ShardedTensr", "did you mean ShardedTensor"),
    ],
)
def test_a_name_of_others_is_answered_by_ours(name: str, advice: str) -> None:
    with pytest.raises(AttributeError) as read:
        getattr(shardwise, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from shardwise import {name}")
    for error in (read.value, imported.value):
        assert str(error).startswith(f"module 'shardwise' has no attribute '{name}'; {advice}")
        assert error.name == name
    assert not hasattr(shardwise, name)


def test_what_is_written_of_others_is_ours() -> None:
    """No word of others hides one of ours, and the words that the answers name exist."""
    assert not set(WORDS_OF_OTHERS) & set(shardwise.__all__)
    ours = re.compile(r"\b(?:shard|from_local|shard_module|launch|run_local|save|load)(?=\()|[A-Z]\w+Spec\b")
    found = {word for answer in WORDS_OF_OTHERS.values() for word in ours.findall(answer)}
    assert {"shard", "shard_module", "MeshSpec"} <= found <= set(shardwise.__all__)


def test_packages_load_on_first_use_and_do_not_hide_names_of_the_caller() -> None:
    """As the README has it: `import shardwise; shardwise.compat.install()`, without another import."""
    code = "import shardwise; print(shardwise.compat.install, shardwise.compat._shard, shardwise.nn.ModelPlan)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert {"checkpoint", "compat", "nn", "testing"} <= set(dir(shardwise))
    assert not {"checkpoint", "compat", "nn", "testing"} & set(shardwise.__all__)
    with pytest.raises(AttributeError, match=r"module 'shardwise.compat' has no attribute '_shards'"):
        shardwise.compat._shards  # type: ignore[attr-defined]  # noqa: B018  # the attribute is what is asked for


def test_no_builtin_is_hidden_by_a_star_import() -> None:
    assert not set(dir(builtins)) & {*shardwise.__all__, *shardwise.checkpoint.__all__}
    assert {"open", "compile"} <= set(dir(shardwise)) and "open" in dir(shardwise.checkpoint)


def test_the_drop_in_names_come_with_the_operators() -> None:
    code = "import shardwise.compat._shard, sys; print('shardwise.ops.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("earlier", "name"),
    [
        ("shardwise.checkpoint.errors", "CheckpointError"),
        ("shardwise.geometry.dtypes", "DType"),
        ("shardwise.geometry.errors", "LayoutError"),
        ("shardwise.geometry.notation.read", "TensorType"),
        ("shardwise.nn.model_plan", "ModelPlan"),
        ("shardwise.nn.model_plan", "ShardingPlan"),
        ("shardwise.nn.patterns", "PlanError"),
    ],
)
def test_pickles_of_earlier_releases_find_their_classes(earlier: str, name: str) -> None:
    found = pickle.loads(f"c{earlier}\n{name}\n.".encode())
    assert found.__name__ == name and earlier in MOVED
    assert getattr(import_module(earlier), name) is found


def test_moved_modules_are_loaded_on_first_use_only() -> None:
    assert all(find_spec(now) is not None for now in MOVED.values())
    code = "import shardwise, sys; print('torch' in sys.modules, 'shardwise.nn.model_plan' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False True\n"
    with pytest.raises(AttributeError, match="no attribute '__file__'"):
        import_module("shardwise.geometry.errors").__file__  # noqa: B018  # the attribute is what is asked for


def test_errors_of_the_notation_pass_through_pickle() -> None:
    with pytest.raises(shardwise.NotationError) as caught:
        shardwise.parse_layout("f32[8] on tp=2: Q(0)")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.position) == (str(caught.value), caught.value.position)


def test_names_of_the_old_api_live_in_compat() -> None:
    """The top of the package holds what people type; earlier imports find the same objects by one alias."""
    for name in OLD_NAMES:
        assert getattr(shardwise.compat, name) is getattr(shardwise, name)
        assert name in dir(shardwise.compat) and name not in dir(shardwise)
        exec(f"from shardwise import {name}")
    assert not hasattr(shardwise.compat, "Sharders") and not hasattr(shardwise.checkpoint, "Sharder")
