"""Local shards as programs pass, list, change and pickle them; results of gather; what is printed and compared."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import install
from tests.compat.fidelity import Names, described, locals_of, numbers, ours_of, same_errors, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
Program = Callable[[Names], Any]


def run(names: Names, table: str, key: str) -> Any:
    return TABLES[table][key](names)


def facts(sharded: Any) -> list[Any]:
    listed = [(s.metadata.shard_offsets, s.tensor.tolist()) for s in sharded.local_shards()]
    return [repr(sharded.sharding_spec()), described(sharded.metadata()), listed]


def own_shard(names: Names, *size: int) -> Any:
    """This rank's shard of two rows."""
    rank = dist.get_rank()
    return names.sharded_tensor.Shard.from_tensor_and_offsets(numbers(2, *size) + rank, [2 * rank, 0], rank)


def whole_metadata(names: Names, pieces: list[Any], *size: int) -> Any:
    kinds = names.sharded_tensor
    return kinds.ShardedTensorMetadata(pieces, torch.Size(size), kinds.TensorProperties(dtype=torch.float32))


def swapped(names: Names, build: str) -> Any:
    """Two shards on each rank, listed from the last to the first."""
    rank = dist.get_rank()
    pieces = [names.piece([2 * i], [2], i % 4) for i in range(8)]
    own = [names.sharded_tensor.Shard(torch.full((2,), 1.0 * p.shard_offsets[0]), p) for p in pieces[rank::4][::-1]]
    if build == "metadata":
        kind = names.sharded_tensor.ShardedTensor
        return kind._init_from_local_shards_and_global_metadata(own, whole_metadata(names, pieces, 16)), own
    return names.sharded_tensor.init_from_local_shards(own, 16), own


def kept_list(names: Names) -> list[bool]:
    made, own = swapped(names, "metadata")
    return [made.local_shards() is own, made.local_shards()[0] is own[0]]


def order_of_copies(names: Names) -> list[Any]:
    made = swapped(names, "metadata")[0]
    copies = [
        made.clone(),
        made.detach(),
        copy.deepcopy(made),
        made.to(torch.float64),
        pickle.loads(pickle.dumps(made)),
    ]
    return [facts(one)[2] for one in copies]


def gather_swapped(names: Names) -> Any:
    out = torch.zeros(16) if dist.get_rank() == 1 else None
    swapped(names, "shards")[0].gather(1, out)
    return None if out is None else out.tolist()


def assigned_in_another_order(names: Names) -> Any:
    made = swapped(names, "metadata")[0]
    made._local_shards = made.local_shards()[::-1]
    out = torch.zeros(16) if dist.get_rank() == 0 else None
    made.gather(0, out)
    return [facts(made)[2], None if out is None else out.tolist()]


def shared_metadata(names: Names) -> list[bool]:
    made = names.sharded_tensor.zeros(names.chunks(0), 8, 2)
    spec = names.pieces(*(([2 * rank], [2], rank) for rank in range(4)))
    listed = names.sharded_tensor.zeros(spec, 8)
    return [
        made.local_shards()[0].metadata is made.metadata().shards_metadata[dist.get_rank()],
        listed.local_shards()[0].metadata is spec.shards[dist.get_rank()],
        made.metadata() is made._metadata,
    ]


SHARDS: dict[str, Program] = {
    "the list that was passed": kept_list,
    "shards in another order, by metadata": lambda names: facts(swapped(names, "metadata")[0]),
    "shards in another order": lambda names: facts(swapped(names, "shards")[0]),
    "copies keep the order": order_of_copies,
    "gather of shards in another order": gather_swapped,
    "shards assigned in another order": assigned_in_another_order,
    "metadata of shards": shared_metadata,
}


@pytest.mark.parametrize("key", SHARDS)
def test_local_shards(world: Ranks, key: str) -> None:
    same_values(world, run, "shards", key)


def gather_a_parameter(names: Names) -> Any:
    """`out` is no result of recorded operations: it is read by NumPy."""
    layer = nn.Linear(3, 8)
    with torch.no_grad():
        layer.weight.copy_(numbers(8, 3))
    names.api.shard_parameter(layer, "weight", names.chunks(0))
    out = torch.zeros(8, 3) if dist.get_rank() == 2 else None
    layer.weight.gather(dst=2, out=out)
    return None if out is None else [out.requires_grad, out.is_leaf, out.numpy().tolist()]


def properties(names: Names) -> list[Any]:
    kinds = names.sharded_tensor
    shard = kinds.Shard(numbers(2), names.piece([0], [2], 0))
    made = kinds.TensorProperties.create_from_tensor
    return [
        made(torch.zeros(2, 3)) == kinds.TensorProperties(dtype=torch.float32),
        made(torch.zeros(2, 3)) == made(torch.zeros(4)),
        [field.name for field in dataclasses.fields(shard)],
        sorted(dataclasses.asdict(shard)),
        dataclasses.replace(shard, tensor=torch.ones(2)).tensor.tolist(),
    ]


def printed(names: Names) -> list[str]:
    made = names.shard(numbers(8, 3), names.chunks(0))
    pieces = names.sharded_tensor.zeros(names.pieces(([0], [3], 1), ([3], [5], 0)), 8)
    return [repr(made), str(pieces), str({"weight": made.detach()})]


def pickled_after_reshard(names: Names) -> list[Any]:
    """The metadata is in the order of ranks, which the spec is not."""
    made = names.shard(numbers(4, 8), names.chunks(0))
    made.reshard(names.chunks(1, 3, 1, 0, 2))
    buffer = io.BytesIO()
    torch.save({"weight": made}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)["weight"]
    return [facts(loaded), loaded.metadata() == made.metadata(), facts(made.clone())]


def in_another_group(names: Names) -> list[bool]:
    """A tensor that has the device and dtype already is its own result, whatever group is passed."""
    group = dist.new_group(range(4))
    made = names.sharded_tensor.ones(names.chunks(0), 8)
    double = made.to(torch.float64, process_group=group)
    return [made.cpu(process_group=group) is made, made.to("cpu", process_group=group) is made, double is made] + [
        tensor._process_group is group for tensor in (made, double)
    ]


def made_in_a_loading_block(names: Names) -> list[bool]:
    """The block is for tensors that are read; new ones are on the default group."""
    group = dist.new_group(range(4))
    with names.api.load_with_process_group(group):
        made = names.sharded_tensor.zeros(names.chunks(0), 8, 3)
        layer = nn.Linear(3, 8)
        names.api.shard_parameter(layer, "weight", names.chunks(0))
        loaded = pickle.loads(pickle.dumps(made))
        tensors = (made, names.shard(numbers(8), names.chunks(0)), layer.weight, copy.deepcopy(made), loaded)
        return [tensor._process_group is group for tensor in tensors]


def made_step_by_step(names: Names) -> list[Any]:
    kind = names.sharded_tensor.ShardedTensor
    options = {"dtype": torch.float32, "layout": torch.strided, "requires_grad": False, "pin_memory": False}
    made = kind.__new__(kind, names.chunks(0), torch.Size([8, 3]), **options)
    made._prepare_init(process_group=None, init_rrefs=False)
    made._local_shards = [own_shard(names, 3)]
    made._post_init()
    return [facts(made), facts(made.clone()), made._process_group is kind._normalize_pg(None)]


def own_spec(names: Names) -> list[Any]:
    """A spec of a user's class stays that of a converted tensor."""

    @dataclasses.dataclass
    class Rows(names.sharding_spec.ShardingSpec):  # type: ignore[name-defined,misc]  # one of each package
        ranks: int

        def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: Any) -> Any:
            length = tensor_sizes[0] // self.ranks
            pieces = [names.piece([length * rank], [length], rank) for rank in range(self.ranks)]
            return names.sharded_tensor.ShardedTensorMetadata(pieces, tensor_sizes, tensor_properties)

        def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
            raise NotImplementedError

    made = names.sharded_tensor.full(Rows(4), (8,), 3.0)
    results = made.type_as(torch.zeros(1, dtype=torch.int64)), made.clone(), copy.deepcopy(made), made.detach()
    return [[type(one.sharding_spec()).__name__, str(one.dtype), locals_of(one)] for one in results]


TENSORS: dict[str, Program] = {
    "a spec of a user's class": own_spec,
    "gather of a parameter": gather_a_parameter,
    "properties and fields": properties,
    "what is printed": printed,
    "pickles of a resharded tensor": pickled_after_reshard,
    "to and cpu in another group": in_another_group,
    "tensors made in a loading block": made_in_a_loading_block,
    "a tensor made step by step": made_step_by_step,
}


@pytest.mark.parametrize("key", TENSORS)
def test_tensors(world: Ranks, key: str) -> None:
    same_values(world, run, "tensors", key)


def cuda_in_channels(names: Names) -> None:
    names.sharded_tensor.ones(names.chunks(0), 8).cuda(memory_format=torch.channels_last)


def test_cuda_checks_the_memory_format_first(world: Ranks) -> None:
    same_errors(world, cuda_in_channels, words=("Only `torch.contiguous_format` or",))


# Files that torch's own class wrote


def old_files(names: Names) -> list[Any]:
    """The first run, on torch's names, writes; the other reads the same bytes after install()."""
    theirs = Names("torch.distributed._shard")
    twice = theirs.chunks(0, *range(4), *range(4))
    saved = {"weight": theirs.shard(numbers(8, 3), theirs.chunks(0)), "twice": theirs.sharded_tensor.ones(twice, 16)}
    buffer = io.BytesIO()
    torch.save({**saved, "metadata": saved["weight"].metadata()}, buffer)
    buffer.seek(0)
    if names.root == theirs.root:
        loaded = torch.load(buffer, weights_only=False)
    else:
        with install():
            loaded = torch.load(buffer, weights_only=False)
    weight, kind = loaded["weight"], names.sharded_tensor.ShardedTensor
    weight.copy_(names.shard(numbers(8, 3) + 1, names.chunks(0)))
    return [
        [isinstance(loaded[name], kind) for name in ("weight", "twice")],
        facts(weight),
        facts(copy.deepcopy(loaded["twice"])),
        loaded["metadata"] == weight.metadata(),
        locals_of(pickle.loads(pickle.dumps(weight))),
    ]


def test_files_of_torchs_class_are_read_after_install(world: Ranks) -> None:
    same_values(world, old_files)


def weights_only(names: Names) -> list[Any]:
    made = names.shard(numbers(4, 8), names.chunks(0))
    made.reshard(names.chunks(1, 3, 1, 0, 2))
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    return described(torch.load(buffer, weights_only=True).metadata())[0]


def test_metadata_of_a_resharded_tensor_is_read_with_weights_only(world: Ranks) -> None:
    """torch's class needs `weights_only=False`."""
    assert ours_of(world, weights_only) == [([0, 4], [4, 2], "rank:0/cpu")] * 4


TABLES: dict[str, dict[str, Program]] = {"shards": SHARDS, "tensors": TENSORS}
