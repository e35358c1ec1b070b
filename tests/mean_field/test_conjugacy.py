"""No false conjugacy where a few values far apart would not see it: rows of very different noise,
steps and windows between the values, bumps where q ends; and none refused for its guards.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
from models.mixture import mixture
from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field import conjugacy
from ppl_gp.mean_field.choose import paired, single
from ppl_gp.mean_field.conjugacy import not_affine, num_values
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.reading.dependence import decides
from ppl_gp.reading.reading import declare
from ppl_gp.reading.roles import scored

RNG = np.random.default_rng(6)
FIRST = np.arange(12) < 6
CURVES = {"tanh": jnp.tanh, "abs": jnp.abs, "clip": lambda w: jnp.clip(w, 0.0, 2.0)}


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("event", [False, True])
@pytest.mark.parametrize("noise", [1e-6, 1e-3])
@pytest.mark.parametrize("curve", CURVES)
def test_rows_of_small_noise_hide_no_others(curve, noise, event):
    sd = np.where(FIRST, noise, 1.0)
    y = np.where(FIRST, 1.0, 0.6) + sd * RNG.normal(size=12)

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        fn = dist.Normal(jnp.where(FIRST, w[0] + w[1], CURVES[curve](w[0])), sd)
        if event:
            numpyro.sample("y", fn.to_event(1), obs=y)
            return
        with numpyro.plate("data", 12):
            numpyro.sample("y", fn, obs=y)

    with pytest.raises(pg.NotConjugateError, match="'w'.*'y'"):
        pg.fit(model, pg.MeanField(), 0)


def about(penalty, prior):
    """A mean with a factor of its own."""

    def model():
        mu = numpyro.sample("mu", prior)
        numpyro.factor("own", penalty(mu))
        with numpyro.plate("data", 15):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=Y)

    return model


Y = 1.0 + RNG.normal(size=15)
PENALTIES = {
    "window": lambda mu: jnp.where((mu > 1.1) & (mu < 1.25), -50.0, 0.0),
    "narrow window": lambda mu: jnp.where(jnp.abs(mu - 1.2) < 0.02, 20.0, 0.0),
    "interval": lambda mu: jnp.where((mu > 0.5) & (mu < 1.0), 0.0, -1000.0),
    "step": lambda mu: jnp.where(mu > 1.25, 1.0, 0.0),
    "bump": lambda mu: -5.0 * jnp.exp(-(((mu - 1.0) / 0.05) ** 2)),
}


@pytest.mark.one_case
@pytest.mark.parametrize("spread", [1.0, 3.0, 100.0])
@pytest.mark.parametrize("name", PENALTIES)
def test_what_differs_between_the_values_is_seen(name, spread):
    with pytest.raises(pg.NotConjugateError, match="'mu'.*'own'"):
        pg.fit(about(PENALTIES[name], dist.Normal(0.0, spread)), pg.MeanField(), 0)


@pytest.mark.slow
def test_windows_of_a_probability_and_of_a_rate_are_seen():
    def windows():
        p = numpyro.sample("p", dist.Beta(2.0, 2.0))
        numpyro.factor("own", jnp.where((p > 0.49) & (p < 0.51), -50.0, 0.0))
        numpyro.sample("k", dist.Binomial(10, p), obs=5)

    def rates():
        m = numpyro.sample("m", dist.Gamma(3.0, 1.0))
        numpyro.sample("k", dist.Poisson(jnp.where((m > 3.0) & (m < 3.3), 1.0, m)), obs=3)

    for model, term in ((windows, "own"), (rates, "k")):
        with pytest.raises(pg.NotConjugateError, match=f"'{term}'"):
            pg.fit(model, pg.MeanField(), 0)


def guarded(y, k):
    """Clips that no value reaches, links whose code compares."""
    w = numpyro.sample("w", dist.Gamma(2.0, 1.0))
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(m, 1.0 / jnp.sqrt(jnp.maximum(w, 1e-12))), obs=y)
        numpyro.sample("b", dist.Bernoulli(logits=jnp.log(p) - jnp.log1p(-p)), obs=k % 2)
        numpyro.sample("z", dist.Categorical(logits=jnp.log(share)), obs=k % 3)
        numpyro.sample("c", dist.Categorical(probs=share), obs=k % 3)


@pytest.mark.slow
def test_guards_are_no_curves():
    k = np.arange(10)
    fit = pg.fit(guarded, pg.MeanField(), 0, 100.0 * RNG.normal(size=10), k)
    assert fit.result == "converged"
    alpha = 1.0 + 2.0 * np.bincount(k % 3)
    np.testing.assert_allclose(fit.sites["share"].concentration, alpha, rtol=1e-9)
    beta = fit.sites["p"]
    found = float(beta.concentration1), float(beta.concentration0)
    np.testing.assert_allclose(found, (6.0, 6.0), rtol=1e-9)


@pytest.mark.slow
def test_what_is_impossible_under_a_label_is_told():
    y = np.array([0, 0, 3, 0, 5])

    def inflated(rate_of):
        def model():
            share = numpyro.sample("share", dist.Beta(1.0, 1.0))
            rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
            with numpyro.plate("data", 5):
                z = numpyro.sample("z", dist.Bernoulli(share))
                numpyro.sample("y", dist.Poisson(rate_of(rate, z)), obs=y)

        return model

    with pytest.raises(pg.NotConjugateError, match="'y' is not finite at some values"):
        pg.fit(inflated(lambda rate, z: rate * z), pg.MeanField(), 0)
    unlikely = inflated(lambda rate, z: jnp.where(z == 1, rate, 1e-8))
    assert pg.fit(unlikely, pg.MeanField(), 0).result == "converged"


def test_the_likelihood_is_named_where_it_overflows():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(jnp.exp(mu), 1.0), obs=0.3)

    with pytest.raises(pg.NotConjugateError, match="'y' is not finite|conjugate to 'y'"):
        pg.fit(model, pg.MeanField(), 0)


def squared_at(y, first, second, num):
    """y ~ Normal(a, 1), but Normal(a^2, 1) at these values of the labels; -1: at every one."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    x = numpyro.sample("x", dist.Categorical(jnp.ones(num) / num))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Categorical(jnp.ones(12) / 12))
        there = ((x == first) | (first < 0)) & ((z == second) | (second < 0))
        numpyro.sample("y", dist.Normal(jnp.where(there, a**2, a), 1.0), obs=y)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(("num", "values"), [(12, [(0, 7), (11, 11)]), (40, [(39, -1), (-1, 7)])])
def test_every_value_of_a_label_is_looked_at(num, values, near):
    """All 144 combinations of two labels; of 480, which are too many, every value of each."""

    def failed(first, second):
        args = Y[:2], jnp.asarray(first), jnp.asarray(second), num
        declared = declare(squared_at, args, {})
        trace = first_trace(declared, args, {})
        joint = log_joint_of(declared, trace, args, {})
        sites = [single(k, trace[k]) for k in joint.latents]
        return not_affine(joint, ("a", "y"), sites[0], sites, near)

    assert [failed(*v) for v in values] == [["y"], ["y"]]
    assert failed(num, num) == []


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, rest: x**2 + rest, False),
        (lambda x, rest: jnp.where(rest > 0, x, 2.0 * x), False),
        (lambda x, rest: jnp.where(x > 0, rest, 0.0), True),
        (lambda x, rest: jnp.round(jnp.exp(x)), True),
        (lambda x, rest: jnp.where(jnp.isnan(x), 0.0, x), False),
        (lambda x, rest: x.astype(int) * rest, True),
        (lambda x, rest: jnp.sum(jnp.sort(x)), True),
        (lambda x, rest: (x > 0, x * rest)[1], False),
        (lambda x, rest: jax.jit(lambda x: (x > 0, x * rest))(x)[1], False),
        (lambda x, rest: jax.jit(lambda x: (x > 0, x * rest))(x)[0] * rest, True),
        (lambda x, rest: dist.Normal(x, jnp.exp(x), validate_args=True).log_prob(0.3), False),
        (lambda x, rest: dist.Gamma(2.0, 1.0, validate_args=True).log_prob(x), True),
    ],
)
def test_what_decides_by_its_values(function, found):
    assert decides(function, jnp.ones(3), jnp.ones(3)) == found


LATENTS = {
    "gamma": (dist.Gamma(2.0, 1.5), 0.7, False),
    "dirichlet": (dist.Dirichlet(jnp.ones(3)), jnp.array([0.2, 0.5, 0.3]), False),
    # its ends are parameters: what it says of its support counts
    "uniform": (dist.Uniform(0.0, 2.0), 0.3, True),
    # its density asks whether a value is zero
    "beta": (dist.Beta(2.0, 3.0).expand([2]).to_event(1), jnp.array([0.2, 0.6]), True),
    "wishart": (dist.Wishart(3, rate_matrix=jnp.eye(2)), jnp.array([[2.0, 0.4], [0.4, 1.0]]), None),
}


@pytest.mark.filterwarnings("ignore:Out-of-support values")
@pytest.mark.parametrize("name", LATENTS)
def test_a_latents_density_needs_no_look_at_its_own_support(name):
    fn, value, found = LATENTS[name]
    site = {"type": "sample", "is_observed": False, "fn": fn, "value": value, "scale": None}
    np.testing.assert_array_equal(scored(site), fn.log_prob(value))
    assert scored({**site, "is_observed": True, "value": -value}) == -np.inf
    if found is not None:
        assert decides(lambda x, rest: scored({**site, "value": x}), value, 0.0) == found


def test_a_mixture_with_numpyros_checks_is_held_to_values_while_they_are_cheap(monkeypatch):
    X = jnp.asarray(RNG.normal(size=(12, 2)))
    declared = declare(mixture, (X, 3), {})
    trace = first_trace(declared, (X, 3), {})
    joint = log_joint_of(declared, trace, (X, 3), {})
    sites = [single(k, trace[k]) for k in joint.latents]
    both = paired("mean", "precision", trace)
    terms = ("precision", "mean", "x")
    assert num_values(joint, terms, both, sites) == 2000
    monkeypatch.setattr(conjugacy, "_WORK", 1000)
    assert num_values(joint, terms, both, sites) == 0
    # a categorical's probabilities are clipped: a decision, looked at whatever it costs
    assert num_values(joint, ("weights", "z"), sites[0], sites) >= 80
