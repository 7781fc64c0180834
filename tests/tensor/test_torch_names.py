"""Does a method of torch.Tensor keep torch's meaning on a ShardedTensor, also where the class has one of its own?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import Comm, ShardedTensor, run_local, shard
from shardwise.compat._shard import sharded_tensor as old

WHOLE = torch.arange(24.0).reshape(4, 6)
INDEX = torch.tensor([[0, 5], [1, 4], [2, 3], [3, 2]])

# Each name of torch.Tensor that the class answers itself, and a call as torch documents it.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "apply_": lambda x: x.clone().apply_(lambda v: v + 1),
    "backward": lambda x: x.clone().requires_grad_().sum().backward(None, False, False),
    "clone": lambda x: x.clone(memory_format=torch.preserve_format),
    "cpu": lambda x: x.cpu(memory_format=torch.preserve_format),
    "cuda": lambda x: callable(x.cuda),
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "detach_": lambda x: x.clone().detach_(),
    "device": lambda x: x.device,
    "dim": lambda x: x.dim(),
    "dtype": lambda x: x.dtype,
    "gather": lambda x: [x.gather(1, _like(x)), x.gather(dim=-1, index=_like(x)), x.gather(1, index=_like(x))],
    "grad": lambda x: x.grad,
    "grad_fn": lambda x: x.grad_fn,
    "is_contiguous": lambda x: x.is_contiguous(memory_format=torch.contiguous_format),
    "is_leaf": lambda x: x.is_leaf,
    "is_pinned": lambda x: x.is_pinned(),
    "is_shared": lambda x: x.clone().is_shared(),
    "is_sparse": lambda x: x.is_sparse,
    "layout": lambda x: x.layout,
    "ndim": lambda x: x.ndim,
    "numel": lambda x: x.numel(),
    "numpy": lambda x: _whole(x).numpy(force=True).tolist(),
    "pin_memory": lambda x: callable(x.pin_memory),
    "register_hook": lambda x: x.clone().requires_grad_().register_hook(lambda g: None) is None,
    "register_post_accumulate_grad_hook": lambda x: callable(x.register_post_accumulate_grad_hook),
    "requires_grad": lambda x: x.requires_grad,
    "requires_grad_": lambda x: x.clone().requires_grad_(True).requires_grad,
    "retain_grad": lambda x: (x.clone().requires_grad_() * 1).retain_grad(),
    "set_": lambda x: [x.clone().set_(x), x.clone().set_(source=x)],
    "shape": lambda x: x.shape,
    "share_memory_": lambda x: x.clone().share_memory_().shape,
    "size": lambda x: [x.size(), x.size(0), x.size(dim=-1)],
    "stride": lambda x: [x.stride(), x.stride(0), x.stride(dim=-1)],
    "to": lambda x: [x.to(torch.float64), x.to("cpu", torch.int32), x.to(x), x.to(dtype=torch.int8, copy=True)],
    "tolist": lambda x: _whole(x).tolist(),
    "untyped_storage": lambda x: callable(x.untyped_storage),
}


def _like(x: Tensor) -> Tensor:
    return shard(INDEX, x.sharding.spec) if isinstance(x, ShardedTensor) else INDEX


def _whole(x: Tensor) -> Tensor:
    return x.redistribute("R") if isinstance(x, ShardedTensor) else x


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.full() if isinstance(value, ShardedTensor) else value


def own_names() -> set[str]:
    """The public names of torch.Tensor that a class before it answers."""
    classes = ShardedTensor.__mro__[: ShardedTensor.__mro__.index(Tensor)]
    return {n for n in dir(Tensor) if not n.startswith("_") and any(n in vars(c) for c in classes)}


def test_every_name_that_hides_one_of_torch_is_compared_with_it() -> None:
    assert own_names() == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_name_of_torch_means_the_same(name: str) -> None:
    def body(comm: Comm) -> None:
        found, expected = _plain(CALLS[name](shard(WHOLE, "tp: S(0)"))), _plain(CALLS[name](WHOLE.clone()))
        assert type(found) is type(expected)
        for ours, theirs in zip(*([v] if not isinstance(v, list) else v for v in (found, expected)), strict=True):
            assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs

    run_local(body, 1)
    if name not in ("apply_", "share_memory_"):
        run_local(body, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_gather_picks_elements_and_writes_to_no_argument(world: int) -> None:
    def body(comm: Comm) -> None:
        x, index = shard(WHOLE, "tp: S(0)"), shard(INDEX, "tp: S(0)")
        assert torch.equal(x.gather(dim=-1, index=index).full(), WHOLE.gather(-1, INDEX))
        assert torch.equal(x.gather(1, index).full(), torch.gather(x, 1, index).full())
        assert torch.equal(index.full(), INDEX)
        gathered = x.gather_to(world - 1)
        assert (gathered is None) is (comm.rank != world - 1)
        assert gathered is None or torch.equal(gathered, WHOLE)
        with pytest.raises(
            TypeError, match=r"no index was passed; gather_to\(1\) returns the whole tensor on that rank"
        ):
            x.gather(1)

    run_local(body, world)


def test_the_drop_in_class_tells_both_apart() -> None:
    def body(comm: Comm) -> None:
        spec = shardwise.compat._shard.sharding_spec.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        x, index = old.zeros(spec, 4, 6), shard(INDEX, "tp: S(0)")
        for given, whole in zip(x.local_tensors(), WHOLE.chunk(2)[comm.rank :], strict=False):
            given.copy_(whole)
        out = torch.empty(4, 6) if comm.rank == 1 else None
        x.gather(1, out)
        assert out is None or torch.equal(out, WHOLE)
        for found in (x.gather(1, index), x.gather(dim=1, index=index)):
            assert torch.equal(found.full(), WHOLE.gather(1, INDEX))
        x.gather(0, torch.empty(4, 6) if comm.rank == 0 else None, enforce_dtype=True)

    # Outside of the ranks, which are threads: warnings are caught for a process.
    with pytest.warns(FutureWarning, match="`enforce_dtype` is not needed: values keep their dtype"):
        run_local(body, 2)
