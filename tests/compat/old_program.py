"""A program as a user of torch's ShardedTensor wrote it, before Shardwise: test_migration.py runs it on both."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import shard_module, shard_parameter
from torch.distributed._shard.sharded_optim import ShardedOptimizer, named_params_with_sharded_tensor
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    init_from_local_shards,
    pre_load_state_dict_hook,
    state_dict_hook,
)
from torch.distributed._shard.sharded_tensor import zeros as sharded_zeros
from torch.distributed._shard.sharding_plan import ShardingPlan
from torch.distributed._shard.sharding_spec import ChunkShardingSpec


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.bags = nn.EmbeddingBag(12, 4, mode="sum")
        self.score = nn.Linear(4, 1)

    def forward(self, ids):
        return self.score(torch.tanh(self.words(ids).sum(1) + self.bags(ids)))


def chunks(dim):
    placements = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    return ChunkShardingSpec(dim=dim, placements=placements)


def sharded_model(seed, words_dim, bags_dim):
    torch.manual_seed(seed)
    model = Model()
    shard_parameter(model.words, "weight", chunks(words_dim))
    shard_module(model, ShardingPlan(plan={"bags.weight": chunks(bags_dim)}))
    model._register_state_dict_hook(state_dict_hook)
    model._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
    return model


def train(model, ids):
    optimizer = ShardedOptimizer(dict(named_params_with_sharded_tensor(model)), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids).sum().backward()
        for parameter in model.score.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def checkpoint(model, folder):
    """Save, and load into a model that is cut the other way."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = sharded_model(seed=5, words_dim=1, bags_dim=0)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"], strict=False)
    return other


def gathered():
    """What rank 0 gathers of two tensors: one made of zeros and filled, one made of the ranks' shards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = sharded_zeros(chunks(0), 5, 4)
    made.local_shards()[0].tensor.fill_(rank)
    mine = Shard.from_tensor_and_offsets(torch.full((2, 3), rank + 0.5), [2 * rank, 0], rank)
    both = (made, init_from_local_shards([mine], 2 * size, 3))
    outs = [torch.empty(tensor.size()) if rank == 0 else None for tensor in both]
    for tensor, out in zip(both, outs, strict=True):
        assert isinstance(tensor, ShardedTensor)
        tensor.gather(0, out)
    return [None if out is None else out.tolist() for out in outs]


def main(folder):
    rank = dist.get_rank()
    ids = torch.tensor([[rank, 3, 7], [2, rank + 4, 9]])
    model = sharded_model(seed=0, words_dim=0, bags_dim=1)
    before = model(ids).flatten().tolist()
    train(model, ids)
    names = [(name, type(value).__name__) for name, value in sorted(model.state_dict().items())]
    loaded = checkpoint(model, folder)
    return before, model(ids).flatten().tolist(), loaded(ids).flatten().tolist(), names, gathered()
