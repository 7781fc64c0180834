"""Do our words for a layout and DTensor's mean the same? Held against torch's own arithmetic, for all small meshes.

What needs ranks that talk is in tests/compat/test_dtensor_ranks.py.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torchs_arithmetic
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise
import shardwise.compat
from shardwise.comm import Comm, run_local
from shardwise.compat import to_dtensor
from shardwise.geometry import LayoutError, Mesh, MeshSpec, Partial, Replicate, Shard
from shardwise.ops.dtensor_rules import _schema_info, torch_placements
from shardwise.tensor.functions import spec_from_dtensor

SQUARE, CUBE = Mesh.of(dp=2, tp=2), Mesh.of(pp=2, dp=3, tp=2)


def torchs(mesh: Mesh) -> Any:
    return SimpleNamespace(mesh=torch.tensor(mesh.ranks.tolist()), mesh_dim_names=mesh.axes)


def assert_same_boxes(spec: MeshSpec, placements: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    layout = spec.layout(shape)
    for rank in spec.mesh.ranks.flatten().tolist():
        coordinates = list(spec.mesh.coordinates(rank).values())
        sizes, offsets = torchs_arithmetic(shape, spec.mesh.shape, coordinates, placements)
        (own,) = layout.pieces_of(rank)
        assert own.box.sizes == tuple(sizes)
        if 0 not in sizes:
            assert own.box.offsets == tuple(offsets)


@pytest.mark.parametrize("shape", [(12, 8), (7, 5), (1, 3)])
def test_every_pair_of_placements_on_a_square(shape: tuple[int, ...]) -> None:
    for placements in product([Shard(0), Shard(1), Shard(-1), Replicate(), Partial("sum")], repeat=2):
        spec = MeshSpec(SQUARE, placements)
        there = torch_placements(spec, shape)
        assert_same_boxes(spec, there, shape)
        assert spec_from_dtensor(torchs(SQUARE), there, shape).layout(shape) == spec.layout(shape)


@pytest.mark.parametrize("order", list(permutations(CUBE.axes)))
def test_every_order_of_splits(order: tuple[str, ...]) -> None:
    spec, shape = MeshSpec(CUBE, (Shard(0),) * 3, order), (24, 2)
    there = torch_placements(spec, shape)
    assert any(isinstance(p, _StridedShard) for p in there) == (order != CUBE.axes)
    assert_same_boxes(spec, there, shape)
    assert spec_from_dtensor(torchs(CUBE), there, shape).layout(shape) == spec.layout(shape)


def test_an_order_given_apart_from_the_placements() -> None:
    order = (SimpleNamespace(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = spec_from_dtensor(torchs(SQUARE), (TorchShard(0), TorchShard(0)), (8,), order)
    assert spec.order == ("tp", "dp")


def test_axes_without_names_get_some() -> None:
    mesh = SimpleNamespace(mesh=torch.tensor([[0, 1]]), mesh_dim_names=None)
    assert spec_from_dtensor(mesh, (TorchReplicate(), TorchPartial("max")), (4,)).mesh.axes == ("axis0", "axis1")


def test_what_torch_has_no_words_for_is_refused() -> None:
    for cut in (Shard(0, sizes=(5, 3)), Shard(0, groups=(4, 4)), Shard(0, block=1)):
        with pytest.raises(LayoutError, match=r"on axis 'dp' has no counterpart in DTensor, which splits dim 0"):
            torch_placements(MeshSpec(SQUARE, (cut, Replicate())), (8,))
    with pytest.raises(LayoutError, match="only for multiples of 4"):
        torch_placements(MeshSpec(SQUARE, (Shard(0), Shard(0)), ("tp", "dp")), (6,))


def test_what_we_have_no_words_for_is_refused() -> None:
    with pytest.raises(LayoutError, match="do not order the axes"):
        spec_from_dtensor(torchs(SQUARE), (_StridedShard(0, split_factor=3), TorchShard(0)), (12,))
    private = type("_MaskPartial", (TorchPartial,), {})()
    with pytest.raises(LayoutError, match="has no counterpart; redistribute"):
        spec_from_dtensor(torchs(SQUARE), (private, TorchReplicate()), (12,))


def test_a_world_of_threads_has_no_dtensor() -> None:
    def body(comm: Comm) -> str:
        x = shardwise.shard(torch.zeros(4), MeshSpec(Mesh.of(tp=2), (Shard(0),)))
        with pytest.raises(ValueError, match="DTensor needs a torch process group"):
            to_dtensor(x)
        return "refused"

    assert run_local(body, 2) == ["refused"] * 2


LATE = """
import sys, torch, shardwise
from shardwise import Replicate

relu = torch.ops.aten.relu.default
shardwise.register_sharding(relu, override=True, dtensor=True)(lambda x: [([Replicate()], [Replicate()])])
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import DTensor

propagator = DTensor._op_dispatcher.sharding_propagator
single = getattr(propagator, "op_single_dim_strategy_funcs", {})
assert "shardwise" in propagator.op_strategy_funcs[relu].__module__
assert relu not in single
assert propagator.op_to_schema_info[relu].static_argnum == 100  # no argument but tensors, as torch counts
shardwise.remove_sharding(relu)
for op in (relu, torch.ops.aten.mm.default):
    torchs = single.get(op) or propagator.op_strategy_funcs[op]
    assert "shardwise" not in getattr(torchs, "__module__", ""), "torch's own are there again"
print("registered late")
"""


def test_a_rule_waits_until_dtensor_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "registered late\n"), done.stderr


BOTH = """
import torch, shardwise
from shardwise.compat import register_sharding
from shardwise.ops.rule import find_rule
from torch.distributed.tensor import DTensor

relu, tanh = torch.ops.aten.relu.default, torch.ops.aten.tanh.default
rule = lambda x: [([shardwise.Replicate()], [shardwise.Replicate()])]
register_sharding(relu)(rule)
shardwise.register_sharding(tanh, override=True)(rule)
assert find_rule(relu).rule is rule and find_rule(tanh) is rule
funcs = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
print([op in funcs and "shardwise" in funcs[op].__module__ for op in (relu, tanh)])
"""


def test_the_drop_in_name_replaces_rules_of_both_and_the_native_one_leaves_dtensor_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BOTH], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "[True, False]\n"), done.stderr


def test_what_counts_in_torch_s_key_starts_at_the_first_argument_that_is_no_tensor() -> None:
    """torch's own test of register_sharding looks at these numbers."""
    importlib.import_module("torch.distributed.tensor")
    aten = torch.ops.aten
    found = {
        op: _schema_info(op) for op in (aten._softmax.default, aten.argmax.default, aten.add.Tensor, aten.cat.default)
    }
    assert [info.static_argnum for info in found.values()] == [1, 1, 2, 0]
    assert found[aten.add.Tensor].static_kwargkey == ["alpha"]
    assert _schema_info(aten.clamp.Tensor).static_argnum == 1, "which bound is left out is in the key"
