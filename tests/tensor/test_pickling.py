"""Pickle, copy, deepcopy and torch.save of sharded tensors whose ranks are threads."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch
from torch import nn

from shardwise import ModelPlan, shard_module
from shardwise.comm import Comm, run_local
from shardwise.comm.current import get_current_process_group, load_with_process_group, resolve_comm
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import ChunkSpec, EnumerableSpec, Mesh, MeshSpec, Partial, Shard, ShardingSpec
from shardwise.tensor.sharded_tensor import ShardedTensor

T = TypeVar("T", bound=ShardedTensor)
TP = Mesh.of(tp=2)
SPECS: list[ShardingSpec] = [
    ChunkSpec(0, ranks=(1, 0)),
    ChunkSpec(0, ranks=(0, 1, 0)),
    ChunkSpec(1, ranks=(1,)),
    ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
    EnumerableSpec(ChunkSpec(1, ranks=2).layout((4, 6)).pieces),
    MeshSpec(TP, [Shard(1, groups=(4, 2))]),
    MeshSpec(TP, [Partial("sum")]),
]


def numbered(spec: ShardingSpec, comm: Comm, kind: type[T] = ShardedTensor, **options: Any) -> T:
    tensor = kind(spec, 4, 6, **options)
    for slot, local in enumerate(tensor.local_tensors()):
        values = torch.arange(float(local.numel())) + 100 * comm.rank + 1000 * slot
        local.detach().copy_(values.view(local.shape))
    return tensor


def assert_same(one: ShardedTensor, other: ShardedTensor) -> None:
    assert type(other) is type(one) and one is not other
    assert other.sharding_spec() == one.sharding_spec() and other.sharding == one.sharding
    assert (other.dtype, other.device, other.shape) == (one.dtype, one.device, one.shape)
    assert other.requires_grad == one.requires_grad and other.is_leaf
    assert [t.tolist() for t in other.local_tensors()] == [t.tolist() for t in one.local_tensors()]
    assert [s.metadata for s in other.local_shards()] == [s.metadata for s in one.local_shards()]


def through_pickle(tensor: Any) -> Any:
    return pickle.loads(pickle.dumps(tensor))


def through_torch(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state(tensor: TorchShardedTensor) -> TorchShardedTensor:
    state = through_pickle(tensor.__getstate__())
    made = TorchShardedTensor(tensor.sharding_spec(), 4, 6)
    made.__setstate__(state)
    return made


@pytest.mark.parametrize("way", [through_pickle, through_torch, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("kind", [ShardedTensor, TorchShardedTensor])
def test_every_kind_of_layout_comes_back(kind: type[ShardedTensor], spec: ShardingSpec, grad: bool, way: Any) -> None:
    def body(comm: Comm) -> bool:
        tensor = numbered(spec, comm, kind, requires_grad=grad)
        again = way(tensor)
        assert_same(tensor, again)
        assert again.comm is comm
        return True

    assert run_local(body, 2) == [True, True]


@pytest.mark.parametrize("spec", [s for s in SPECS if "Partial" not in repr(s)], ids=repr)
def test_torchs_state_comes_back(spec: ShardingSpec) -> None:
    def body(comm: Comm) -> bool:
        tensor = numbered(spec, comm, TorchShardedTensor, requires_grad=True)
        assert_same(tensor, through_state(tensor))
        return True

    assert run_local(body, 2) == [True, True]


def test_copies_own_their_memory_only_when_deep() -> None:
    def body(comm: Comm) -> tuple[bool, bool]:
        tensor = numbered(ChunkSpec(0, ranks=2), comm)
        shallow, deep = copy.copy(tensor), copy.deepcopy(tensor)
        pointer = tensor.local_tensor().data_ptr()
        return shallow.local_tensor().data_ptr() == pointer, deep.local_tensor().data_ptr() == pointer

    assert run_local(body, 2) == [(True, False)] * 2


def test_a_deep_copy_keeps_the_gradient_and_needs_a_leaf() -> None:
    def body(comm: Comm) -> list[float]:
        tensor = numbered(ChunkSpec(0, ranks=2), comm, requires_grad=True)
        torch.autograd.backward(tensor.local_tensor().sum())
        copied = copy.deepcopy(tensor)
        assert tensor.grad is not None and copied.grad is not None
        tensor.grad.local_tensor().zero_()
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(tensor.clone())
        return copied.grad.local_tensor().unique().tolist()  # type: ignore[no-any-return, no-untyped-call]  # torch's

    assert run_local(body, 2) == [[1.0], [1.0]]


@pytest.mark.parametrize("way", [through_pickle, through_torch, copy.deepcopy], ids=lambda f: f.__name__)
def test_a_parameter_stays_one_and_a_tied_one_stays_tied(way: Any) -> None:
    def body(comm: Comm) -> bool:
        module = nn.Module()
        module.weight = module.tied = nn.Parameter(numbered(ChunkSpec(0, ranks=2), comm))
        again = way(module)
        assert isinstance(again.weight, nn.Parameter) and isinstance(again.weight, ShardedTensor)
        assert [name for name, _ in again.named_parameters()] == ["weight"]
        return again.weight is again.tied

    assert run_local(body, 2) == [True, True]


def test_set_state_wants_a_tensor_of_the_same_shape() -> None:
    state = TorchShardedTensor(ChunkSpec(0, ranks=1), 4, 6).__getstate__()
    with pytest.raises(ValueError, match=r"of shape \(2,\) and torch.float32 cannot take a state of shape \(4, 6\)"):
        TorchShardedTensor(ChunkSpec(0, ranks=1), 2).__setstate__(state)


def saved_by(world: int) -> list[bytes]:
    return run_local(lambda comm: pickle.dumps(numbered(ChunkSpec(0, ranks=world), comm)), world)


def test_other_ranks_and_worlds_are_refused_with_the_way_out() -> None:
    two, one = saved_by(2), saved_by(1)

    def body(comm: Comm) -> list[str]:
        texts = []
        for data in (two[1 - comm.rank], one[0]):
            with pytest.raises(RuntimeError, match="which reshards") as caught:
                pickle.loads(data)
            texts.append(str(caught.value).partition(";")[0])
        return texts

    first, second = run_local(body, 2)
    assert first[0] == "Local rank at save time was 1, but at load time was 0"
    assert second[0] == "Local rank at save time was 0, but at load time was 1"
    assert first[1] == "Local world size at save time was 1, but at load time was 2"
    assert second[1] == "Local rank at save time was 0, but at load time was 1"


def test_a_larger_world_needs_to_be_set_up_before_loading() -> None:
    with pytest.raises(RuntimeError, match=r"Need to initialize default process group .* by rank 1 of a world of 2"):
        pickle.loads(saved_by(2)[1])


def test_a_world_of_one_needs_no_set_up() -> None:
    assert pickle.loads(saved_by(1)[0]).local_tensor().numel() == 24


def test_a_sub_group_is_restored_with_load_with_process_group() -> None:
    def body(comm: Comm) -> str:
        if comm.rank == 0:
            return "outside"
        part = comm.subset([1, 2])
        tensor = numbered(ChunkSpec(0, ranks=(1, 2)), comm, process_group=part)
        data = pickle.dumps(tensor)
        with load_with_process_group(part):
            assert get_current_process_group() is part and resolve_comm() is part
            assert_same(tensor, pickle.loads(data))
        for copied in (copy.copy(tensor), copy.deepcopy(tensor)):
            assert_same(tensor, copied)
            assert copied.comm is tensor.comm
        with pytest.raises(RuntimeError, match="Local rank at save time was"):
            pickle.loads(data)
        return "checked"

    assert run_local(body, 3) == ["outside", "checked", "checked"]


def test_load_with_process_group_does_not_nest_and_ends() -> None:
    comm = resolve_comm()
    with pytest.raises(KeyError), load_with_process_group(comm):
        raise KeyError
    with load_with_process_group(comm) as outer:
        again = pytest.raises(RuntimeError, match='already set by previous "load_with_process_group"')
        with again, load_with_process_group(comm):
            pass
        assert outer is comm and get_current_process_group() is comm
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        get_current_process_group()


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="a torch ProcessGroup or DeviceMesh, a shardwise Comm or None; got str"):
        resolve_comm("gloo")  # type: ignore[arg-type]  # the mistake under test


def test_a_sharded_model_is_copied_and_says_why_it_is_not_pickled() -> None:
    def body(comm: Comm) -> str:
        model = nn.Sequential(nn.Linear(4, 4))
        shard_module(model, ModelPlan(TP, {"**.weight": "tp: S(0)", "**.bias": "R"}, input_plan="R"))
        twin = copy.deepcopy(model)
        twin(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in twin.parameters())
        with pytest.raises(pickle.PicklingError) as raised:
            torch.save(model, io.BytesIO())
        return str(raised.value)

    for text in run_local(body, 2):
        assert text.startswith("a sharded model is bound to the ranks that run it, so it cannot be pickled; write its")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_writers_of_files_are_told_that_no_rank_has_the_memory_of_the_whole() -> None:
    def body(comm: Comm) -> tuple[int, str]:
        tensor = numbered(SPECS[0], comm)
        with pytest.raises(RuntimeError) as raised:
            safetensors.torch.save({"x": tensor})
        return tensor.untyped_storage().nbytes(), str(raised.value)

    for size, text in run_local(body, 2):
        assert size == 4 * 6 * 4
        assert text.startswith("the whole of a ShardedTensor is in the memory of no rank, so it has no address, which")
