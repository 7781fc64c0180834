"""`torch.distributions` and `nn.init.sparse_` of ShardedTensors: as dense, and samples that no layout changes.

Threads share torch's generator: what torch draws by itself differs between the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn

from shardwise import Comm, ShardedTensor, manual_seed, run_local
from shardwise.ops.implicit_replication import MixedTensorsError
from shardwise.ops.rules.random import _count_successes, _log_gamma_quantile
from tests.dense import BOXES, S0, S1, R, assert_gradient, assert_same, forget, lay, numbers
from tests.device import DEVICE

# Torch's own, of every sample of a Wishart distribution.
pytestmark = pytest.mark.filterwarnings("ignore:Singular sample detected:UserWarning")
LAYOUTS = {"S0": S0, "S1": S1, "R": R, "uneven": "on tp=2: S(0) sizes(0,4)"}
Maker = Callable[[Any], Any]

# Of a 4x4 matrix of numbers between 0.1 and 0.9.
MADE: dict[str, Maker] = {
    "Bernoulli": D.Bernoulli,
    "Bernoulli of logits": lambda a: D.Bernoulli(logits=a),
    "Beta": lambda a: D.Beta(a, a + 1),
    "Binomial": lambda a: D.Binomial(5, a),
    "Categorical": D.Categorical,
    "Categorical of logits": lambda a: D.Categorical(logits=a),
    "Cauchy": lambda a: D.Cauchy(a, a),
    "Chi2": D.Chi2,
    "ContinuousBernoulli": D.ContinuousBernoulli,
    "Dirichlet": D.Dirichlet,
    "Exponential": D.Exponential,
    "FisherSnedecor": lambda a: D.FisherSnedecor(a, a + 2),
    "Gamma": lambda a: D.Gamma(a, a),
    "Geometric": D.Geometric,
    "Gumbel": lambda a: D.Gumbel(a, a),
    "HalfCauchy": D.HalfCauchy,
    "HalfNormal": D.HalfNormal,
    "Independent": lambda a: D.Independent(D.Normal(a, a), 1),
    "InverseGamma": lambda a: D.InverseGamma(a + 2, a),
    "Kumaraswamy": lambda a: D.Kumaraswamy(a, a),
    "Laplace": lambda a: D.Laplace(a, a),
    "LogNormal": lambda a: D.LogNormal(a, a),
    "LogisticNormal": lambda a: D.LogisticNormal(a, a),
    "MixtureSameFamily": lambda a: D.MixtureSameFamily(D.Categorical(a), D.Normal(a, a)),
    "Multinomial": lambda a: D.Multinomial(5, a),
    "MultivariateNormal": lambda a: D.MultivariateNormal(a[0], scale_tril=a.tril()),
    "NegativeBinomial": lambda a: D.NegativeBinomial(5, a),
    "Normal": lambda a: D.Normal(a, a),
    "OneHotCategorical": D.OneHotCategorical,
    "OneHotCategoricalStraightThrough": D.OneHotCategoricalStraightThrough,
    "Pareto": lambda a: D.Pareto(a, a + 1),
    "Poisson": D.Poisson,
    "RelaxedBernoulli": lambda a: D.RelaxedBernoulli(torch.tensor(0.5), a),
    "RelaxedOneHotCategorical": lambda a: D.RelaxedOneHotCategorical(torch.tensor(0.5), a),
    "StudentT": lambda a: D.StudentT(a + 2, a, a),
    "TransformedDistribution": lambda a: D.TransformedDistribution(D.Normal(a, a), [D.ExpTransform()]),
    "Uniform": lambda a: D.Uniform(a * 0, a),
    "VonMises": lambda a: D.VonMises(a, a),
    "Weibull": lambda a: D.Weibull(a, a),
    "Wishart": lambda a: D.Wishart(20.0, covariance_matrix=a @ a.t() + torch.diag_embed(a.sum(0))),
}


def chances(seed: int = 1) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float64) * 0.8 + 0.1


def run(body: Callable[[Comm], Any], world: int = 2) -> list[Any]:
    forget()
    return run_local(body, world, timeout=60)


def is_known(distribution: Any, name: str) -> bool:
    """Whether torch has this of the distribution."""
    try:
        value = getattr(distribution, name)
        if callable(value):
            value()
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MADE)
def test_distributions(name: str, layout: str) -> None:
    """Samples that every rank sees alike and no layout changes; log probabilities with gradients, moments, entropy."""
    make, where, whole = MADE[name], LAYOUTS[layout], chances()

    def body(comm: Comm) -> None:
        drawn = []
        for place in (R, where):
            manual_seed(3)
            held = make(lay(whole, place))
            drawn.append([held.sample(), held.sample((3,)), *([held.rsample()] if held.has_rsample else [])])
        for one, other in zip(*drawn, strict=True):
            assert isinstance(other, ShardedTensor)
            assert_same(other, one.full(), rtol=1e-6, atol=1e-6)  # sums are added up in another order
        values = drawn[0][0].full()
        leaf, laid = whole.clone().requires_grad_(), lay(whole.clone().requires_grad_(), where)
        dense, held = make(leaf), make(laid)
        for attribute in ("mean", "variance", "entropy"):
            if is_known(dense, attribute):
                pair = [getattr(one, attribute) for one in (held, dense)]
                assert_same(*(one() if callable(one) else one for one in pair), rtol=1e-6, atol=1e-6)
        expected, found = dense.log_prob(values), held.log_prob(lay(values, R))
        assert_same(found, expected, rtol=1e-6, atol=1e-6)
        expected.sum().backward()
        found.full().sum().backward()
        assert_gradient(laid, leaf, rtol=1e-6, atol=1e-6)

    run(body)


@pytest.mark.parametrize("name", sorted(n for n in MADE if n not in ("MultivariateNormal", "VonMises", "Wishart")))
def test_samples_have_the_moments(name: str) -> None:
    """Of many: the mean of the samples is that of the distribution, within five standard errors."""
    make = MADE[name]
    if not all(is_known(make(chances()), n) for n in ("mean", "variance")):
        pytest.skip("torch has no moments of it")
    count = 3000

    def body(comm: Comm) -> None:
        manual_seed(11)
        dense, held = make(chances()), make(lay(chances(), S0))
        found = held.sample((count,)).double().mean(0).full()
        error = (dense.variance / count).sqrt()
        usable = dense.mean.isfinite() & error.isfinite()
        assert bool((((found - dense.mean).abs() < 5 * error + 1e-9) | ~usable).all())

    run(body)


@pytest.mark.parametrize("layout", ("S0", "R"))
@pytest.mark.parametrize("name", ("Normal", "Uniform", "Gamma", "Beta", "Dirichlet", "StudentT", "Gumbel", "Laplace"))
def test_gradients_of_samples(name: str, layout: str) -> None:
    """Of `rsample`: close to the change of the sample when the parameter changes and the random numbers do not."""
    make, step = MADE[name], 1e-6

    def body(comm: Comm) -> None:
        def sample(whole: Tensor) -> tuple[Any, Any]:
            manual_seed(5)
            laid = lay(whole.requires_grad_(), LAYOUTS[layout])
            return laid, make(laid).rsample()

        laid, drawn = sample(chances())
        weights = numbers(*drawn.shape, seed=2)
        (drawn * lay(weights, R)).sum().backward()
        if name not in ("Beta", "Dirichlet"):  # torch's gradient of these follows another path of equal chance
            moved = sample(chances() + step)[1].full() - drawn.full()
            expected = (moved.detach() * weights).sum() / step
            torch.testing.assert_close(laid.grad.full().sum(), expected, rtol=1e-3, atol=1e-3)
        assert bool(laid.grad.full().isfinite().all())

    run(body)


def test_quantiles() -> None:
    shape = torch.tensor([1e-3, 0.1, 1.0, 5.0, 1e4], dtype=torch.float64).reshape(-1, 1)
    chance = torch.tensor([1e-9, 0.1, 0.5, 0.999], dtype=torch.float64)
    log = _log_gamma_quantile(chance.expand(5, 4), shape.expand(5, 4))
    again = torch.special.gammainc(shape.expand(5, 4), log.exp())
    usable = log > -700  # below, the number itself is zero
    torch.testing.assert_close(again[usable], chance.expand(5, 4)[usable], rtol=1e-6, atol=1e-12)
    small = (chance.log() + math.lgamma(1.001)) / 1e-3
    torch.testing.assert_close(log[0, :3], small[:3], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", (0, 1, 7, 400))
@pytest.mark.parametrize("chance", (0.0, 0.3, 0.5, 0.9, 1.0))
def test_counts_of_successes(count: int, chance: float) -> None:
    """The share of each count among evenly spread chances is its probability."""
    drawn = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    found = _count_successes(drawn, torch.full_like(drawn, count), torch.full_like(drawn, chance))
    shares = torch.bincount(found.long(), minlength=count + 1) / 20000
    expected = D.Binomial(count, torch.tensor(chance, dtype=torch.float64)).log_prob(torch.arange(count + 1.0)).exp()
    torch.testing.assert_close(shares.double(), expected.double(), rtol=0, atol=1e-3)


def test_irregular_pieces() -> None:
    def body(comm: Comm) -> None:
        for make in (MADE["Uniform"], MADE["Normal"], MADE["Gumbel"]):
            found = []
            for place in (R, BOXES):
                manual_seed(3)
                found.append(make(lay(chances(), place)).rsample())
            assert_same(found[1], found[0].full())

    run(body)


def test_plain_tensors_stay_plain() -> None:
    torch.manual_seed(1)
    one = D.Uniform(torch.zeros(3), torch.ones(3)).sample()
    torch.manual_seed(1)
    assert type(one) is Tensor and torch.equal(one, torch.rand(3))
    assert type(nn.init.sparse_(torch.empty(4, 4), 0.5)) is Tensor


def test_a_plain_value_is_refused_on_every_rank() -> None:
    """Ranks may have drawn other values each."""

    def body(comm: Comm) -> None:
        with pytest.raises(MixedTensorsError, match="got a plain tensor of shape"):
            D.Normal(lay(chances(), S0), 1.0).log_prob(chances(2))

    run(body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_initial_values(layout: str) -> None:
    def body(comm: Comm) -> Tensor:
        found = []
        for where in (LAYOUTS[layout], R):
            manual_seed(3)
            made = nn.init.sparse_(lay(torch.empty(4, 4), where), 0.5, std=2.0)
            assert isinstance(made, ShardedTensor)
            found.append(made.full())
        assert torch.equal(*found)
        return found[0]

    first, second = run(body)
    assert torch.equal(first, second)
    assert (first == 0).sum(0).tolist() == [2] * 4
    manual = run_local(
        lambda comm: (manual_seed(3), nn.init.sparse_(lay(torch.empty(4, 4), R), 0.5, std=2.0))[1].full(), 2
    )
    assert torch.equal(first, manual[0])
