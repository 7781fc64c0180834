"""Modules, hooks, plans, custom operators and optimizers of the namespace beside torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import install
from tests.compat.fidelity import Names, described, locals_of, numbers, ours_of, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4)
Program = Callable[[Names], Any]


def run(names: Names, table: str, key: str) -> Any:
    return TABLES[table][key](names)


def linear(names: Names, **options: Any) -> Any:
    """A layer whose weight is sharded by rows; the values of rank 0 count."""
    layer = nn.Linear(3, 8)
    with torch.no_grad():
        layer.weight.copy_(numbers(8, 3) + 100 * dist.get_rank())
        layer.bias.fill_(1.0)
    names.api.shard_parameter(layer, "weight", names.chunks(0), **options)
    return layer


def facts(sharded: Any) -> list[Any]:
    local = sharded.local_shards()[0].tensor
    told = [sharded.requires_grad, local.requires_grad, local.is_leaf]
    return [type(sharded).__name__, str(sharded.dtype), *told, described(sharded.metadata()), locals_of(sharded)]


# Parameters


def load_into(names: Names, values: float) -> list[Any]:
    layer, other = linear(names), linear(names)
    torch.nn.init.constant_(other.weight, values)
    told = layer.load_state_dict(other.state_dict())
    return [str(told), facts(layer.weight)]


def assigned(names: Names) -> list[Any]:
    layer, other = linear(names), linear(names)
    layer.load_state_dict(other.state_dict(), assign=True)
    return facts(layer.weight)


def whole_state(names: Names) -> list[Any]:
    """torch's functions of state dicts gather the parameters."""
    words = import_module("torch.distributed.checkpoint.state_dict")
    found = words.get_model_state_dict(linear(names), options=words.StateDictOptions(full_state_dict=True))
    return [(name, type(value).__name__, value.tolist()) for name, value in found.items()]


PARAMETERS: dict[str, Program] = {
    "a whole state": whole_state,
    "shard_parameter": lambda names: facts(linear(names).weight),
    "shard_parameter returns nothing": lambda names: str(
        names.api.shard_parameter(nn.Linear(3, 8), "weight", names.chunks(0))
    ),
    "shard_parameter from another rank": lambda names: facts(linear(names, src_rank=2).weight),
    "a sharded parameter is one": lambda names: [
        isinstance(linear(names).weight, nn.Parameter),
        isinstance(linear(names).weight, names.sharded_tensor.ShardedTensor),
    ],
    "names of parameters": lambda names: [name for name, _ in linear(names).named_parameters()],
    "names in the state": lambda names: [
        (name, type(value).__name__, value.requires_grad) for name, value in linear(names).state_dict().items()
    ],
    "a state that keeps gradients": lambda names: [
        value.requires_grad for value in linear(names).state_dict(keep_vars=True).values()
    ],
    "load_state_dict": lambda names: load_into(names, 5.0),
    "load_state_dict that assigns": assigned,
    "a parameter that is frozen": lambda names: (
        layer := linear(names),
        layer.requires_grad_(False),
        facts(layer.weight),
    )[2],
    "a parameter that was frozen before": lambda names: frozen_before(names, by_plan=False),
    "a parameter of a plan that was frozen before": lambda names: frozen_before(names, by_plan=True),
    "zero_grad": lambda names: (layer := linear(names), layer.zero_grad(), str(layer.weight.grad))[2],
    "copies of modules": lambda names: facts(copy.deepcopy(linear(names)).weight),
    "named_params_with_sharded_tensor": lambda names: [
        (name, type(value).__name__)
        for name, value in names.sharded_optim.named_params_with_sharded_tensor(holder(names))
    ],
}


def frozen_before(names: Names, by_plan: bool) -> list[Any]:
    """`nn.Parameter(tensor)` makes it take gradients."""
    layer = nn.Linear(3, 8).requires_grad_(False)
    nn.init.ones_(layer.weight)
    if by_plan:
        names.api.shard_module(layer, names.sharding_plan.ShardingPlan({"weight": names.chunks(0)}))
    else:
        names.api.shard_parameter(layer, "weight", names.chunks(0))
    return [facts(layer.weight), layer.bias.requires_grad]


def holder(names: Names) -> nn.Module:
    """Sharded tensors as attributes and as a parameter, at two levels."""
    module = nn.Module()
    module.table = names.sharded_tensor.ones(names.chunks(0), 8)
    module.below = linear(names)
    module.below.table = names.sharded_tensor.ones(names.chunks(0), 4)
    return module


@pytest.mark.parametrize("key", PARAMETERS)
def test_parameters(world: Ranks, key: str) -> None:
    same_values(world, run, "parameters", key)


# Hooks and plans


class Table(nn.Module):
    """Returns a sharded tensor, by rows or by columns."""

    def __init__(self, names: Names, size: tuple[int, ...], dim: int = 0) -> None:
        super().__init__()
        self.names, self.size, self.dim = names, size, dim

    def forward(self, *_: Any) -> Any:
        return self.names.shard(numbers(*self.size), self.names.chunks(self.dim))


def collected(names: Names, size: tuple[int, ...], dim: int) -> list[Any]:
    module = Table(names, size, dim)
    same = names.api._collect_local_shard(module) is module
    return [same, type(module()).__name__, module().tolist()]


def resharded(names: Names) -> list[Any]:
    module = names.api._reshard_output(Table(names, (8, 4)), names.chunks(1))
    return [described(module().metadata()), locals_of(module())]


def planned(names: Names) -> list[Any]:
    model = nn.Sequential(nn.Embedding(8, 4), Table(names, (8, 4)))
    with torch.no_grad():
        model[0].weight.copy_(numbers(8, 4))
    plan = names.sharding_plan.ShardingPlan(
        {"0.weight": names.chunks(1)}, output_plan={"1": names.chunks(1)}, return_local_tensor=["", "0"]
    )
    told = names.api.shard_module(model, plan)
    return [told, facts(model[0].weight), model(torch.tensor([[1, 2]])).tolist()]


def resharded_in_place(names: Names) -> list[Any]:
    class Keeper(nn.Module):
        def forward(self, kept: Any) -> Any:
            return kept

    kept, keeper = names.shard(numbers(4, 4), names.chunks(0)), Keeper()
    hooked = names.api._reshard_output(keeper, names.chunks(1))
    return [hooked is keeper, keeper(kept) is kept, facts(kept)]


HOOKS: dict[str, Program] = {
    "an output that is kept": resharded_in_place,
    "the local result": lambda names: collected(names, (8, 3), 0),
    "the local result without a dim of one": lambda names: collected(names, (4, 3), 0),
    "the local result without a column": lambda names: collected(names, (3, 4), 1),
    "a result that is not sharded": lambda names: names.api._collect_local_shard(nn.Identity())(torch.ones(2)).tolist(),
    "a resharded result": resharded,
    "a plain result stays": lambda names: names.api._reshard_output(nn.Identity(), names.chunks(0))(3),
    "a plan": planned,
}


@pytest.mark.parametrize("key", HOOKS)
def test_hooks_and_plans(world: Ranks, key: str) -> None:
    same_values(world, run, "hooks", key)


# Custom operators


def seen_by(operator: list[Any], answer: Any) -> Callable[..., Any]:
    def implementation(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        names = sorted(kind.__name__ for kind in types)
        operator.append([names, len(args), sorted(kwargs or {}), process_group is dist.group.WORLD])
        return answer

    return implementation


def called(names: Names) -> list[Any]:
    """What a user's implementation is passed."""
    seen: list[Any] = []
    names.sharded_tensor.custom_sharded_op_impl(torch.ldexp)(seen_by(seen, "own"))
    made = names.shard(numbers(8), names.chunks(0))
    return [torch.ldexp(made, made), torch.ldexp(made, torch.ones(1)), torch.ldexp(made, other=made), seen]


def order_of_tables(names: Names) -> list[Any]:
    """A user's operator goes before that of a spec, which goes before a default."""
    made, found = names.shard(numbers(8), names.chunks(0)), []
    api, tensors = names.module("sharding_spec.api"), names.sharded_tensor
    tensors._sharded_op_impl(torch.signbit)(seen_by([], "default"))
    found.append(torch.signbit(made))
    api.custom_sharding_spec_op(names.sharding_spec.ChunkShardingSpec, torch.signbit)(seen_by([], "spec"))
    found.append(torch.signbit(made))
    tensors.custom_sharded_op_impl(torch.signbit)(seen_by([], "custom"))
    found.append(torch.signbit(made))
    has = [api._has_custom_op(names.chunks(0), op) for op in (torch.signbit, torch.atanh)]
    told = api._dispatch_custom_op(names.chunks(0), torch.signbit, (), (made,), {}, None)
    return [*found, has, told]


def replaced(names: Names) -> list[Any]:
    """Functions that the package has itself can be replaced."""
    names.sharded_tensor.custom_sharded_op_impl(torch.nn.functional.linear)(seen_by([], "sharded linear"))
    layer = linear(names)
    return [layer(torch.ones(2, 3)), torch.nn.functional.linear(torch.ones(2, 3), layer.weight)]


def named(names: Names) -> list[str]:
    def implementation(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        """Its text."""

    made = names.sharded_tensor.custom_sharded_op_impl(torch.nextafter)(implementation)
    return [made.__name__, str(made.__doc__)]


def on_local_shards(names: Names) -> list[Any]:
    """Operators that programs define by what they do to each shard."""
    common = names.module("sharded_tensor._ops._common")
    common._register_sharded_op_on_local_shards(
        torch.pow, early_stop_func=lambda x, exponent: exponent == 1, extra_check=lambda x, exponent: 1 / exponent
    )
    common._register_sharded_op_on_local_shards(
        torch.erfinv,
        customized_func=lambda args, kwargs, group: (
            [names.sharded_tensor.Shard(shard.tensor * 3, shard.metadata) for shard in args[0].local_shards()],
            args[0].metadata(),
        ),
    )
    common._register_sharded_op_on_local_shards(torch.nn.functional.hardsigmoid)
    made = names.shard(numbers(8, 2), names.chunks(0))
    shown = [locals_of(torch.erfinv(made)), locals_of(torch.nn.functional.hardsigmoid(made))]
    shown += [locals_of(torch.pow(made, 2)), torch.pow(made, 1) is made]
    try:
        torch.pow(made, 0)
    except ZeroDivisionError as error:
        shown.append(str(error))
    return shown


def on_local_tensors(names: Names) -> list[Any]:
    """Operators on the only local tensor of a tensor in chunks."""
    common = names.module("sharding_spec.chunk_sharding_spec_ops._common")
    common._register_sharded_op_on_local_tensor(torch.nn.functional.softmin)
    common._register_sharded_op_on_local_tensor(
        torch.Tensor.adjoint,
        customized_func=lambda args, kwargs, group: (args[0].local_tensor().t(), names.chunks(1), (2, 8)),
    )
    made = names.shard(numbers(8, 2), names.chunks(0))
    results = torch.nn.functional.softmin(made, dim=1), made.adjoint()
    return [[locals_of(result), list(result.size()), repr(result.sharding_spec())] for result in results]


def methods(names: Names) -> list[Any]:
    """Methods that the class has of its own are asked for like functions."""
    made, seen = names.shard(numbers(8, 2), names.chunks(0)), []

    class Marked(names.sharding_spec.ChunkShardingSpec):  # type: ignore[name-defined,misc]  # one of each package
        pass

    def implementation(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        seen.append([len(args), process_group is dist.group.WORLD])
        return 5

    for method in ("clone", "detach", "requires_grad_", "is_contiguous", "__deepcopy__", "size", "numel", "tolist"):
        names.module("sharding_spec.api").custom_sharding_spec_op(Marked, getattr(torch.Tensor, method))(implementation)
    made._sharding_spec = Marked(0, list(names.chunks(0).placements))
    called = [made.clone(), made.detach(), made.requires_grad_(True), made.is_contiguous(), copy.deepcopy(made)]
    return [called, made.size(0), made.numel(), made.tolist(), seen]


OPERATORS: dict[str, Program] = {
    "operators on local shards": on_local_shards,
    "operators on local tensors": on_local_tensors,
    "methods": methods,
    "what an implementation sees": called,
    "the order of tables": order_of_tables,
    "a replaced function": replaced,
    "the name of an implementation": named,
}


@pytest.mark.parametrize("key", OPERATORS)
def test_custom_operators(world: Ranks, key: str) -> None:
    same_values(world, run, "operators", key)


# Optimizers


def optimized(names: Names) -> list[Any]:
    layer = linear(names)
    params = dict(names.sharded_optim.named_params_with_sharded_tensor(layer))
    optimizer = names.sharded_optim.ShardedOptimizer(params, torch.optim.SGD, 0.5, momentum=0.9)
    local = layer.weight.local_tensor()
    for step in range(2):
        local.grad = torch.full_like(local, step + 1.0)
        layer.bias.grad = torch.ones_like(layer.bias)
        told = optimizer.step()
    kept = [len(optimizer.param_groups), len(optimizer.param_groups[0]["params"]), len(optimizer.state)]
    before = [local.grad is None, optimizer.param_groups[0]["lr"], told]
    optimizer.zero_grad()
    return [
        kept,
        before,
        local.grad is None,
        locals_of(layer.weight),
        layer.bias.tolist(),
        list(optimizer.named_params),
    ]


def test_the_optimizer_steps_on_local_shards(world: Ranks) -> None:
    same_values(world, optimized)


def groups_of_the_optimizer(names: Names) -> list[Any]:
    """Programs scale and clip the gradients of what is in the groups."""
    layer = linear(names)
    params = dict(names.sharded_optim.named_params_with_sharded_tensor(layer))
    optimizer = names.sharded_optim.ShardedOptimizer(params, torch.optim.SGD, lr=0.5)
    local = layer.weight.local_tensor()
    local.grad, layer.bias.grad = torch.ones_like(local), torch.zeros_like(layer.bias)
    norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    return [
        [parameter is local for parameter in optimizer.param_groups[0]["params"]],
        optimizer.param_groups is optimizer._optim.param_groups,
        norm.item(),
        local.grad.tolist(),
        type(optimizer).__name__,
    ]


def test_groups_of_the_optimizer_have_local_tensors(world: Ranks) -> None:
    same_values(world, groups_of_the_optimizer)


def local_optimizer(names: Names) -> list[Any]:
    """A plain optimizer on the local tensors."""
    layer = linear(names)
    local = layer.weight.local_tensor()
    optimizer = torch.optim.SGD([local], lr=1.0)
    local.grad = torch.ones_like(local)
    optimizer.step()
    return locals_of(layer.weight)


def test_a_plain_optimizer_steps_on_local_shards(world: Ranks) -> None:
    same_values(world, local_optimizer)


# install()


def classes_after_install(names: Names) -> list[bool]:
    """The class that torch's own clients get is that of the namespace."""
    with install():
        theirs = import_module("torch.distributed._shard.sharded_tensor")
        planner = import_module("torch.distributed.checkpoint.planner_helpers")
        fsdp = import_module("torch.distributed.fsdp._shard_utils")
        made = theirs.zeros(names.chunks(0), 8)
        shared = [module.ShardedTensor is names.sharded_tensor.ShardedTensor for module in (theirs, planner, fsdp)]
        return [*shared, isinstance(made, planner.ShardedTensor)]


def test_install_gives_torchs_clients_the_class_of_the_namespace(world: Ranks) -> None:
    assert ours_of(world, classes_after_install) == [[True] * 4] * 4


def checkpoint_after_install(names: Names) -> bool:
    with install():
        return hasattr(import_module("torch.distributed._shard.checkpoint"), "save_state_dict")


def test_install_keeps_the_old_path_of_checkpoints(world: Ranks) -> None:
    """torch has the package torch.distributed.checkpoint under this path, too."""
    assert ours_of(world, checkpoint_after_install) == [True] * 4


TABLES: dict[str, dict[str, Program]] = {"parameters": PARAMETERS, "hooks": HOOKS, "operators": OPERATORS}
