"""What users meet on their first day: recurrent layers, hooks, copies that broadcast, formats, distributions, loading.

Each works as it does on whole tensors, replicated ones included.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Comm, ShardedTensor, manual_seed, run_local
from shardwise.compat._shard import sharded_tensor as compat_sharded_tensor
from shardwise.compat._shard.metadata import ShardMetadata
from shardwise.compat._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from shardwise.compat.sharded_tensor import TorchShardedTensor
from tests.dense import S0, S1, P, R, assert_gradient, assert_same, check, forget, lay, numbers

LAYOUTS = {"S0": S0, "S1": S1, "R": R, "P": P}


def matrix(seed: int) -> Tensor:
    return numbers(4, 4, seed=seed)


def run(body: Callable[[Comm], Any], world: int = 2) -> list[Any]:
    forget()
    return run_local(body, world, timeout=60)


def filled(module: nn.Module) -> nn.Module:
    """The module with values that are the same on every rank."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=number) * 0.3)
    return module


def sharded(module: nn.Module, layout: str) -> nn.Module:
    """The module with its parameters laid out; vectors are replicated where the layout cuts dim 1."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            where = R if layout == S1 and parameter.ndim < 2 else layout
            setattr(part, name, nn.Parameter(lay(parameter.detach(), where)))
    return module


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 4, dtype=torch.float64),
    "LSTM of two layers": lambda: nn.LSTM(4, 4, 2, batch_first=True, dtype=torch.float64),
    "LSTM both ways": lambda: nn.LSTM(4, 4, bidirectional=True, dtype=torch.float64),
    "LSTM without bias": lambda: nn.LSTM(4, 4, bias=False, dtype=torch.float64),
    "LSTM with projection": lambda: nn.LSTM(4, 4, proj_size=2, dtype=torch.float64),
    "GRU": lambda: nn.GRU(4, 4, dtype=torch.float64),
    "GRU both ways": lambda: nn.GRU(4, 4, 2, bidirectional=True, dtype=torch.float64),
    "RNN": lambda: nn.RNN(4, 4, dtype=torch.float64),
    "RNN with relu": lambda: nn.RNN(4, 4, nonlinearity="relu", dtype=torch.float64),
}
CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTMCell": lambda: nn.LSTMCell(4, 4, dtype=torch.float64),
    "GRUCell": lambda: nn.GRUCell(4, 4, dtype=torch.float64),
    "RNNCell": lambda: nn.RNNCell(4, 4, dtype=torch.float64),
    "RNNCell with relu": lambda: nn.RNNCell(4, 4, nonlinearity="relu", dtype=torch.float64),
}


def compare_modules(make: Callable[[], nn.Module], weights: str, given: str, whole: Tensor) -> None:
    """Outputs, gradients of input and parameters, twice."""

    def body(comm: Comm) -> None:
        dense, held = filled(make()), sharded(filled(make()), weights)
        for turn in range(2):
            one = (whole * (turn + 1)).requires_grad_()
            other = lay(one, given)
            expected, found = _flat(dense(one)), _flat(held(other))
            assert_same(found, expected)
            torch.stack([t.square().sum() for t in expected]).sum().backward()  # type: ignore[no-untyped-call]
            torch.stack([t.full().square().sum() for t in found]).sum().backward()  # type: ignore[no-untyped-call]
            assert_gradient(other, one)
            for a, b in zip(held.parameters(), dense.parameters(), strict=True):
                assert_gradient(a, b)

    run(body)


def _flat(value: Any) -> list[Any]:
    return [t for v in value for t in _flat(v)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("given", ("on tp=2: R", "on tp=2: S(1)"))
@pytest.mark.parametrize("weights", ("R", "S0", "S1"))
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, weights: str, given: str) -> None:
    """Input and parameters replicated; the batch sharded; the parameters sharded."""
    compare_modules(RECURRENT[name], LAYOUTS[weights], given, numbers(3, 4, 4, seed=9))


IN_FLOAT32: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True),
    "GRU": lambda: nn.GRU(4, 3, 2, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(4, 3, 2, bidirectional=True, batch_first=True),
}


@pytest.mark.parametrize("given", ("on tp=2: R", "on tp=2: S(0)", "on tp=2: S(0) sizes(3,0)", "on tp=2: S(2)"))
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_recurrent_layers_in_the_kernels_of_float32(name: str, given: str) -> None:
    """Torch has other kernels for float32, and turns their result in place where the batch comes first."""
    whole = numbers(3, 5, 4, seed=9).float()

    def body(comm: Comm) -> None:
        dense, held = filled(IN_FLOAT32[name]()), sharded(filled(IN_FLOAT32[name]()), R)
        one = whole.clone().requires_grad_()
        other = lay(one, given)
        expected, found = _flat(dense(one)), _flat(held(other))
        torch.stack([t.square().sum() for t in expected]).sum().backward()  # type: ignore[no-untyped-call]
        torch.stack([t.full().square().sum() for t in found]).sum().backward()  # type: ignore[no-untyped-call]
        pairs = [*zip(found, expected, strict=True), (other.grad, one.grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(held.parameters(), dense.parameters(), strict=True)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.full(), theirs)

    run(body)


def test_dropout_between_recurrent_layers_does_not_depend_on_the_layout() -> None:
    def body(comm: Comm, given: str) -> Any:
        manual_seed(5)
        layers = sharded(filled(nn.LSTM(4, 4, 3, dropout=0.5, dtype=torch.float64)), R)
        output, (hidden, cell) = layers(lay(numbers(3, 4, 4, seed=9), given))
        assert tuple(hidden.shape) == tuple(cell.shape) == (3, 4, 4)
        return output.full()

    whole, cut = (run(lambda comm, given=given: body(comm, given))[0] for given in ("on tp=2: R", "on tp=2: S(1)"))
    dense = filled(nn.LSTM(4, 4, 3, dtype=torch.float64))(numbers(3, 4, 4, seed=9))[0]
    torch.testing.assert_close(cut, whole)
    assert not torch.allclose(whole, dense)


def test_packed_sequences_of_a_replicated_batch() -> None:
    whole, lengths = numbers(4, 5, 4, seed=9), torch.tensor([5, 3, 2, 1], device="cpu")

    def through(layer: nn.Module, batch: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(batch, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)[0]

    def body(comm: Comm) -> None:
        dense = filled(nn.LSTM(4, 3, 2, dtype=torch.float64))
        held = sharded(filled(nn.LSTM(4, 3, 2, dtype=torch.float64)), R)
        batch = lay(whole, R)
        assert_same([through(held, batch)], [through(dense, whole)])
        through(dense, whole).square().sum().backward()
        through(held, batch).square().sum().backward()
        for a, b in zip(held.parameters(), dense.parameters(), strict=True):
            assert_gradient(a, b)
        assert_same([through(held, lay(whole, S0))], [through(dense, whole)])

    with pytest.warns(UserWarning, match=r"packed sequences are whole on every rank, so .* is gathered"):
        run(body)


@pytest.mark.parametrize("given", ("R", "S0"))
@pytest.mark.parametrize("weights", ("R", "S0", "S1"))
@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells(name: str, weights: str, given: str) -> None:
    compare_modules(CELLS[name], LAYOUTS[weights], LAYOUTS[given], matrix(9))


@pytest.mark.parametrize("source", ("S0", "R", "P", "plain"))
@pytest.mark.parametrize("target", ("S0", "S1", "R"))
def test_copies_that_broadcast(target: str, source: str) -> None:
    def copied(x: Any, y: Any) -> Any:
        return x.copy_(y)

    for shape in ((4,), (1, 4), (4, 1), (1, 1), (1,), ()):
        where = [LAYOUTS[target]] + ([] if source == "plain" else [LAYOUTS[source] if shape else R])
        check(copied, where, (matrix(1), numbers(*shape, seed=2)), (matrix(3), numbers(*shape, seed=4)), grad=False)
        check(lambda x, y: (x * 1).copy_(y) * 2, where, (matrix(1), numbers(*shape, seed=2)))


FORMATS = ("{:.4f}", "{:e}", "{:10.2f}", "{:+g}", "{}", "{:,.1f}", "{:%}")


@pytest.mark.parametrize("layout", ("S0", "R", "P"))
def test_formats_of_one_element(layout: str) -> None:
    """f"{loss:.4f}" of a tensor without dims, whatever is pending; a float and an int of it too."""

    def body(comm: Comm) -> list[str]:
        dense, held = matrix(1).square().mean(), lay(matrix(1), LAYOUTS[layout]).square().mean()
        for form in FORMATS[:4]:
            assert form.format(held) == form.format(dense), form
        assert f"{held:,.1f}" == f"{dense:,.1f}" and f"{held:%}" == f"{dense:%}"
        assert float(held) == pytest.approx(float(dense)) and int(held) == int(dense)
        assert f"{lay(torch.tensor(7), R):03d}" == "007"
        assert isinstance(f"{held}", str) and isinstance(f"{lay(matrix(1), LAYOUTS[layout])}", str)
        return [form.format(held) for form in FORMATS[:4]]

    texts = run(body)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layout", ("S0", "S1", "R"))
def test_divergence_of_distributions(layout: str) -> None:
    def program(p: Any, q: Any) -> Any:
        one, other = torch.distributions.Normal(p, p * 0 + 1), torch.distributions.Normal(q, q * 0 + 2)
        return torch.distributions.kl_divergence(one, other)

    check(program, [LAYOUTS[layout]] * 2, (matrix(1), matrix(2)), (matrix(3), matrix(4)))


@pytest.mark.parametrize("layout", ("S0", "S1", "R"))
@pytest.mark.parametrize("name", ("multinomial", "multinomial with replacement", "poisson", "rrelu"))
def test_random_functions(name: str, layout: str) -> None:
    """The same for a seed on every rank and in every layout, in the range that torch gives, others at the next call."""
    programs: dict[str, Callable[[Any], Any]] = {
        "multinomial": lambda p: torch.multinomial(p, 3),
        "multinomial with replacement": lambda p: torch.multinomial(p, 5, replacement=True),
        "poisson": lambda p: torch.poisson(p * 20),
        "rrelu": lambda p: F.rrelu(-p, training=True),
    }
    whole = numbers(4, 4, seed=1).abs().clamp(0.1, 0.9)
    whole[2, 1] = 0.0
    program = programs[name]

    def body(comm: Comm) -> Tensor:
        manual_seed(3)
        first, second = (program(lay(whole, LAYOUTS[layout])) for _ in range(2))
        manual_seed(3)
        again = program(lay(whole, R))
        dense = program(whole)
        assert first.shape == dense.shape and first.dtype == dense.dtype
        assert torch.equal(first.full(), again.full()) and not torch.equal(first.full(), second.full())
        _check_range(name, whole, first.full())
        whole_result: Tensor = first.full()
        return whole_result

    one, other = run(body)
    assert torch.equal(one, other)


def _check_range(name: str, whole: Tensor, found: Tensor) -> None:
    if name == "rrelu":
        slopes = found[whole > 0] / -whole[whole > 0]
        assert bool(((slopes >= 1 / 8) & (slopes <= 1 / 3)).all()) and slopes.max() - slopes.min() > 0.01
    elif name == "poisson":
        assert bool((found[whole == 0] == 0).all()) and abs(float(found.mean() / whole.mean()) - 20) < 8
    else:
        assert bool((found >= 0).all() and (found < 4).all()) and 1 not in found[2]
        if name == "multinomial":
            assert all(len(set(row.tolist())) == 3 for row in found)


@pytest.mark.parametrize("layout", ("S0", "R", "P"))
@pytest.mark.parametrize("training", (True, False))
def test_rrelu_without_chance(layout: str, training: bool) -> None:
    """With one slope, or in evaluation, it is a function."""
    check(lambda x: F.rrelu(x, 0.2, 0.2, training=training), [LAYOUTS[layout]], (matrix(1),), (matrix(2),))


@pytest.mark.parametrize("weights", ("R", "S0", "S1"))
@pytest.mark.parametrize("norm_type", (2.0, 1.0, float("inf")))
@pytest.mark.usefixtures("renorm_on_host")
def test_an_embedding_with_a_largest_norm(weights: str, norm_type: float) -> None:
    """Rows that are looked up are scaled in place, before they are used; others stay."""

    def make() -> Any:
        return filled(nn.Embedding(8, 4, max_norm=0.5, norm_type=norm_type, dtype=torch.float64))

    def body(comm: Comm) -> None:
        dense, held = make(), sharded(make(), LAYOUTS[weights])
        for ids in (torch.tensor([1, 7, 1, 4]), torch.tensor([[0, 7], [2, 2]])):
            expected, found = dense(ids), held(lay(ids, R))
            assert_same(found, expected)
            assert_same(held.weight, dense.weight)
            expected.square().sum().backward()
            found.full().square().sum().backward()
            assert_gradient(held.weight, dense.weight)

    run(body)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "addbmm": (torch.addbmm, ((4, 4), (4, 4, 2), (4, 2, 4))),
    "addbmm, scaled": (lambda *t: torch.addbmm(*t, beta=0.5, alpha=2), ((4, 4), (4, 4, 2), (4, 2, 4))),
    "addbmm, not added": (lambda *t: torch.addbmm(*t, beta=0), ((4, 4), (4, 4, 2), (4, 2, 4))),
    "addbmm of a row": (torch.addbmm, ((4,), (4, 4, 2), (4, 2, 4))),
    "addbmm_": (lambda x, y, z: (x * 1).addbmm_(y, z), ((4, 4), (4, 4, 2), (4, 2, 4))),
    "pdist": (F.pdist, ((5, 4),)),
    "pdist by 1": (lambda x: F.pdist(x, 1.0), ((5, 4),)),
    "pdist by inf": (lambda x: torch.pdist(x, float("inf")), ((5, 4),)),
    "pdist of one row": (F.pdist, ((1, 4),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, layout: str) -> None:
    function, shapes = FUNCTIONS[name]
    where = [R if layout == "S1" and len(shape) < 2 else LAYOUTS[layout] for shape in shapes]
    calls = [[numbers(*shape, seed=s + i) for i, shape in enumerate(shapes)] for s in (1, 5)]
    check(function, where, *calls)


MEETING = {
    "chunk and mesh": ("as chunk(0) over 0,1", "on tp=2: S(0)"),
    "other axis name": ("on dp=2: S(0)", "on tp=2: S(0)"),
    "other axis name, replicated": ("on dp=2: R", "on tp=2: S(0)"),
    "pieces and mesh": ("as pieces 0[0:2,0:4], 1[2:4,0:4]", "on tp=2: S(0)"),
    "grid and mesh": ("as grid(2+2, 4) over 0,1", "on tp=2: S(0)"),
    "axis of one": ("on dp=1,tp=2: R, S(0)", "on tp=2: S(0)"),
    "chunk and chunk of columns": ("as chunk(1) over 0,1", "on tp=2: S(1)"),
    "replicas as a grid": ("as grid(4, 4) over 0,1 each 2", "on tp=2: R"),
    "pending on other names": ("on dp=2: P(sum)", "on tp=2: P(sum)"),
    "uneven": ("as grid(3+1, 4) over 0,1", "on tp=2: S(0) sizes(3,1)"),
}


@pytest.mark.parametrize("turn", (False, True), ids=("", "turned"))
@pytest.mark.parametrize("name", MEETING)
def test_equal_layouts_meet_however_they_were_described(name: str, turn: bool) -> None:
    where = MEETING[name][:: -1 if turn else 1]
    for program in (
        lambda x, y: x + y,
        lambda x, y: x * y.sum(),
        lambda x, y: F.linear(x, y),
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: torch.where(x > 0, x, y).softmax(1),
    ):
        check(program, where, (matrix(1), matrix(2)), (matrix(3), matrix(4)))
    check(lambda x, y: x.add_(y).mul_(y), where, (matrix(1), matrix(2)), grad=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_load_by_default(layout: str) -> None:
    """`weights_only=True`: alone, in a state dict, as a parameter."""

    def body(comm: Comm) -> None:
        held = lay(matrix(1), LAYOUTS[layout])
        for given in (held, {"w": held, "step": 3}, [nn.Parameter(held.detach())] if layout != "P" else [held]):
            file = io.BytesIO()
            torch.save(given, file)
            file.seek(0)
            back: Any = torch.load(file)
            loaded = back["w"] if isinstance(back, dict) else back[0] if isinstance(back, list) else back
            assert isinstance(loaded, ShardedTensor)
            assert_same(loaded, matrix(1))

    run(body)


def test_torch_load_of_a_tensor_of_torchs_meaning() -> None:
    """The class and the specs of shardwise.compat are known to `weights_only=True` as well."""

    def body(comm: Comm) -> None:
        whole = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        half = [ShardMetadata([2 * r, 0], [2, 4], f"rank:{r}/cpu") for r in range(2)]
        for spec in (whole, EnumerableShardingSpec(half)):
            held: Any = compat_sharded_tensor.rand(spec, 4, 4)
            file = io.BytesIO()
            torch.save({"w": held}, file)
            file.seek(0)
            back = torch.load(file)["w"]
            assert type(back) is type(held) is TorchShardedTensor
            assert torch.equal(back.local_shards()[0].tensor, held.local_shards()[0].tensor)

    run(body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_testing(layout: str) -> None:
    """`assert_close` passes and fails on every rank, beside any layout and beside a plain tensor."""

    def body(comm: Comm) -> None:
        x = lay(matrix(1), LAYOUTS[layout])
        for other in (lay(matrix(1), S0), lay(matrix(1), R), x):
            torch.testing.assert_close(x, other)
        torch.testing.assert_close(x, lay(matrix(1) * (1 + 1e-9), S1))
        torch.testing.assert_close([x, {"a": x}], [x, {"a": x}])
        changed = matrix(1)
        changed[3, 3] += 1  # on the last rank only
        for wrong in (lay(changed, S0), lay(matrix(1)[:, :2].contiguous(), S0), lay(matrix(1).float(), S0)):
            with pytest.raises(AssertionError):
                torch.testing.assert_close(x, wrong)

    run(body)


@pytest.mark.parametrize("layout", ("R", "as grid(4, 4) over 0,1 each 2"))
def test_values_of_a_replicated_tensor(layout: str) -> None:
    """What every rank has is given as numbers; what no rank has whole is gathered on every rank."""

    def body(comm: Comm) -> None:
        x = lay(matrix(1), LAYOUTS.get(layout, layout))
        assert x.tolist() == matrix(1).tolist()
        assert (x.cpu().numpy() == matrix(1).cpu().numpy()).all()
        scalar: Any = lay(torch.tensor(2.5), R)
        assert scalar.tolist() == 2.5 and scalar.cpu().numpy() == 2.5 and scalar.item() == 2.5
        with pytest.raises(RuntimeError, match="requires grad"):
            lay(matrix(1).requires_grad_(), R).cpu().numpy()
        for other in (S0, P):
            assert (lay(matrix(1), other).cpu().numpy() == matrix(1).cpu().numpy()).all()

    run(body)
