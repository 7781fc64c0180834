"""Do modules, optimizers and schedulers come back from a checkpoint as if training had never stopped?"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise import CheckpointError, Comm, Mesh, run_local
from shardwise.nn import ModelPlan, ShardedOptimizer, shard_module

Groups = list[dict[str, Any]]
OPTIMIZERS: dict[str, Callable[[Groups], optim.Optimizer]] = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.1),
    "amsgrad": lambda groups: optim.Adam(groups, lr=0.1, amsgrad=True),
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain SGD": lambda groups: optim.SGD(groups, lr=0.1),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.01, momentum=0.5),
    "Rprop": lambda groups: optim.Rprop(groups, lr=0.01),
    "ASGD": lambda groups: optim.ASGD(groups, lr=0.01),
}
if hasattr(optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = lambda groups: optim.Adafactor(groups, lr=0.1)


class Net(nn.Module):
    """Two layers that share their weights, a frozen parameter, and one that is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.down.weight = self.up.weight
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return out


def groups_of(net: Net) -> Groups:
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    others = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}]


def batch(number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def train(net: nn.Module, optimizer: optim.Optimizer, scheduler: Any, first: int, last: int) -> None:
    for number in range(first, last):
        optimizer.zero_grad()
        net(batch(number)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def milestones(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_program_goes_on_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    net = Net()
    optimizer = OPTIMIZERS[kind](groups_of(net))
    scheduler = milestones(optimizer)
    train(net, optimizer, scheduler, 0, 3)
    shardwise.save({"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 3}, tmp_path / "c")
    train(net, optimizer, scheduler, 3, 6)

    other = Net(seed=1)
    fresh = OPTIMIZERS[kind](groups_of(other)[::-1])  # by name: the order of groups is free
    again = milestones(fresh)
    again.base_lrs = again.base_lrs[::-1]
    state = {"model": other, "optimizer": fresh, "scheduler": again, "step": 0}
    assert shardwise.load(state, tmp_path / "c") is state and state["step"] == 3
    assert state["model"] is other and state["optimizer"] is fresh and again.last_epoch == 3
    train(other, fresh, again, 3, 6)
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [g["lr"] for g in fresh.param_groups][::-1] == [g["lr"] for g in optimizer.param_groups]
    assert type(again.milestones) is Counter


def sharded(comm: Comm, spec: str, kind: str) -> tuple[nn.Module, Any, Any]:
    net = Dense().double()
    mesh = Mesh.of(tp=comm.world_size)
    shard_module(
        net, ModelPlan(mesh, {"up.weight": spec, "down.weight": "S(1)", "*.bias": "R"}, input_plan="replicated")
    )
    if kind == "ShardedOptimizer":
        optimizer: Any = ShardedOptimizer(dict(net.named_parameters()), optim.AdamW, lr=0.1)
    else:
        optimizer = OPTIMIZERS[kind]([{"params": list(net.parameters())}])
    return net, optimizer, milestones(optimizer)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        numbers = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own generator
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=numbers) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x.double())))
        return out


def run_part(comm: Comm, spec: str, kind: str, path: Path, first: int, last: int) -> list[Tensor]:
    net, optimizer, scheduler = sharded(comm, spec, kind)
    state = {"model": net, "training": [optimizer, scheduler]}
    if first:
        shardwise.load(state, path)
    train(net, optimizer, scheduler, first, last)
    shardwise.save(state, path)
    return [p.full() if isinstance(p, shardwise.ShardedTensor) else p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "ShardedOptimizer", "Adafactor"])
def test_training_goes_on_in_another_world_and_plan(kind: str, tmp_path: Path) -> None:
    if kind == "Adafactor" and kind not in OPTIMIZERS:
        pytest.skip("this torch has no Adafactor")
    dense = Dense().double()
    plain = OPTIMIZERS["AdamW" if kind == "ShardedOptimizer" else kind]([{"params": list(dense.parameters())}])
    train(dense, plain, milestones(plain), 0, 6)
    run_local(run_part, 2, "S(0)", kind, tmp_path / "c", 0, 3)
    run_local(run_part, 3, "S(1)", kind, tmp_path / "c", 3, 5)
    (last,) = run_local(run_part, 1, "R", kind, tmp_path / "c", 5, 6)
    for ours, theirs in zip(last, dense.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


def trained(net: Net | None = None, steps: int = 2) -> tuple[Net, optim.Optimizer]:
    net = net or Net()
    optimizer = OPTIMIZERS["AdamW"](groups_of(net))
    train(net, optimizer, milestones(optimizer), 0, steps)
    return net, optimizer


def assert_same_state(one: optim.Optimizer, other: optim.Optimizer) -> None:
    assert repr(one.state_dict()) == repr(other.state_dict())


def test_state_that_was_saved_by_number_is_found(tmp_path: Path) -> None:
    """As earlier programs saved it, and as torch.save does."""
    net, optimizer = trained()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    shardwise.save(state, tmp_path / "c")
    torch.save(state, tmp_path / "c.pt")
    shardwise.save(state, tmp_path / "dcp", format="dcp")
    for name in ("c", "c.pt", "dcp"):
        other = Net(seed=1)
        fresh = OPTIMIZERS["AdamW"](groups_of(other))
        shardwise.load({"model": other, "optimizer": fresh}, tmp_path / name)
        assert_same_state(optimizer, fresh)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    other = Net()
    with pytest.raises(CheckpointError, match="state of 7 parameters by number, this optimizer has 6"):
        shardwise.load({"model": other, "optimizer": optim.AdamW(list(other.parameters())[:6])}, tmp_path / "c")


def test_state_that_is_there_is_filled_or_dropped(tmp_path: Path) -> None:
    net, optimizer = trained(steps=1)
    shardwise.save({"model": net, "optimizer": optimizer}, tmp_path / "c")
    other, later = trained(steps=3)
    kept = later.state[other.head.weight]["exp_avg"]
    later.state[other.frozen] = {"exp_avg": torch.ones(2)}  # which no stored parameter has
    shardwise.load({"model": other, "optimizer": later}, tmp_path / "c")
    assert_same_state(optimizer, later)
    assert later.state[other.head.weight]["exp_avg"] is kept


def test_names_are_those_of_the_modules_in_the_state(tmp_path: Path) -> None:
    one, two, loose = nn.Linear(2, 1), nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    own = optim.SGD(one.parameters(), lr=0.1)
    both = optim.SGD([*one.parameters(), *two.parameters(), loose], lr=0.1)
    shardwise.save({"one": one, "two": two, "own": own, "both": both}, tmp_path / "c")
    with shardwise.open(tmp_path / "c") as checkpoint:
        state = checkpoint.state()
    assert state["own"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert state["both"]["param_groups"][0]["params"] == ["one.weight", "one.bias", "two.weight", "two.bias", "#4"]
    shardwise.save({"w": [loose], "optimizer": optim.SGD([loose])}, tmp_path / "d")
    assert shardwise.open(tmp_path / "d").values()["optimizer.param_groups.0.params.0"] == "w.0"


class Counting:
    """An object with a state, of no class that is known."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if state == {"seen": "bad"}:
            raise KeyError("unusable")
        self.state = state


def test_other_objects_are_values(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loader = Counting({"seen": [1, 2], "order": torch.arange(3), "nested": {"epoch": 2}})
    shardwise.save({"scaler": scaler, "loader": loader, "x": torch.ones(2)}, tmp_path / "c")
    fresh, empty, x = torch.amp.GradScaler("cpu"), Counting({}), torch.zeros(2)
    shardwise.load({"scaler": fresh, "loader": empty, "x": x}, tmp_path / "c")
    assert fresh.state_dict() == scaler.state_dict() and x.tolist() == [1, 1]
    assert empty.state["seen"] == [1, 2] and empty.state["order"].tolist() == [0, 1, 2]
    assert empty.state["nested"] == {"epoch": 2}
    shardwise.save(loader, tmp_path / "alone")
    alone = Counting({})
    assert shardwise.load(alone, tmp_path / "alone") is alone and alone.state["seen"] == [1, 2]


def test_a_module_alone_and_what_it_has_besides(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls, "seen": [1] * self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    net = Extra(2, 2)
    net.calls = 2
    saving = shardwise.save(net, tmp_path / "c", async_op=True)
    saving.wait()
    other = Extra(2, 2)
    shardwise.load(other, tmp_path / "c")
    assert other.calls == 2 and torch.equal(other.weight, net.weight)


def test_what_is_missing_or_does_not_fit_is_said(tmp_path: Path) -> None:
    net, optimizer = trained()
    shardwise.save({"model": net, "optimizer": optimizer}, tmp_path / "c")
    other = Net(seed=1)
    fresh = OPTIMIZERS["AdamW"](groups_of(other))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r'pass the module and the optimizer themselves, load\(\{"model": model'):
        shardwise.load({"model": other.state_dict(), "optimizer": fresh.state_dict()}, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"scheduler \(MultiStepLR\) is missing from it \(strict=False"):
        state = {"model": other, "optimizer": fresh, "scheduler": milestones(fresh)}
        shardwise.load(state, tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"optimizer: 7 of its 7 parameters are not in the checkpoint, such as '#0'"
    ):
        shardwise.load({"optimizer": fresh}, tmp_path / "c")
    with pytest.raises(
        CheckpointError, match="group 0 are in 2 groups of the checkpoint, which have different options"
    ):
        shardwise.load({"model": other, "optimizer": optim.AdamW(other.parameters())}, tmp_path / "c")
    assert repr(other.state_dict()) == repr(before) and not fresh.state
    shardwise.load({"model": other, "scheduler": milestones(fresh)}, tmp_path / "c", strict=False)
    assert torch.equal(other.head.weight, net.head.weight)


def test_an_object_that_raises_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    shardwise.save({"loader": Counting({"seen": "bad"})}, tmp_path / "c")

    def load(comm: Comm) -> str:
        try:
            shardwise.load({"loader": Counting({}) if comm.rank else Counting({"seen": ""})}, tmp_path / "c")
        except CheckpointError as error:
            return str(error)
        return "loaded"

    assert run_local(load, 2) == ["loader: load_state_dict() of Counting raised KeyError: 'unusable'"] * 2


def test_objects_under_other_names(tmp_path: Path) -> None:
    net, optimizer = trained()
    shardwise.save({"net": net, "optim": optimizer}, tmp_path / "c")
    other = Net(seed=1)
    fresh = OPTIMIZERS["AdamW"](groups_of(other))
    renamed = lambda name: name.replace("model", "net").replace("optimizer", "optim")  # noqa: E731
    shardwise.load({"model": other, "optimizer": fresh}, tmp_path / "c", names=renamed)
    assert_same_state(optimizer, fresh)
    again = OPTIMIZERS["AdamW"](groups_of(other))
    shardwise.load({"net": other, "optim": again}, tmp_path / "c", names={"optim": None}, strict=False)
    assert not again.state


def test_state_in_another_dtype_than_its_parameter_stays_so(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((4,), 1.0009765625)
    shardwise.save({"w": weight, "optimizer": optimizer}, tmp_path / "c")
    fresh = optim.SGD([weight], lr=0.1, momentum=0.9)
    shardwise.load({"w": weight, "optimizer": fresh}, tmp_path / "c")
    assert fresh.state[weight]["momentum_buffer"].dtype == torch.float32
    assert fresh.state[weight]["momentum_buffer"].tolist() == [1.0009765625] * 4


def test_stages_have_optimizers_of_their_own_parameters(tmp_path: Path) -> None:
    """Ranks that have different layers of one model, under the names that they have in it."""

    def stage(comm: Comm) -> bool:
        model = nn.ModuleDict({f"layer{comm.rank}": nn.Linear(3, 3)})
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        model[f"layer{comm.rank}"](torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        optimizer.step()
        shardwise.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
        other = nn.ModuleDict({f"layer{comm.rank}": nn.Linear(3, 3)})
        fresh = optim.AdamW(other.parameters())
        shardwise.load({"model": other, "optimizer": fresh}, tmp_path / "c", strict=False)
        assert_same_state(optimizer, fresh)
        return torch.equal(other[f"layer{comm.rank}"].weight, model[f"layer{comm.rank}"].weight)

    assert run_local(stage, 2) == [True, True]
    whole = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3) for rank in range(2)})
    optimizer = optim.AdamW(whole.parameters())
    shardwise.load({"model": whole, "optimizer": optimizer}, tmp_path / "c")
    assert [len(optimizer.state[p]) for p in whole.parameters()] == [3] * 4
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_one_name_for_optimizers_of_different_modules_is_refused(tmp_path: Path) -> None:
    def stage(comm: Comm) -> str:
        model = nn.Linear(3, 3)
        state = {"model": {f"stage{comm.rank}": model}, "optimizer": optim.AdamW(model.parameters())}
        with pytest.raises(CheckpointError) as raised:
            shardwise.save(state, tmp_path / "c")
        return str(raised.value)

    (text,) = set(run_local(stage, 2))
    assert text.startswith(
        "optimizer: it optimizes the module 'model.stage0' on rank 0 and 'model.stage1' on rank 1; save"
    )
    assert not list(tmp_path.iterdir())
