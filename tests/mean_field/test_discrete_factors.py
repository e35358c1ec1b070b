"""Factors of labels: their distributions over the site's own values, categories that cannot be,
masks and scales around them.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, stats

import ppl_gp as pg
from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field.discrete import CategoricalOver
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.reading.reading import declare

Y = np.array([-1.3, 0.2, 0.9, 1.4, -0.7, 2.1])
COUNTS = np.array([3, 1, 4, 2, 6, 3])


def scaled_counts(y):
    """Labels that count from one."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", y.shape[0]):
        c = numpyro.sample("c", dist.DiscreteUniform(1, 3))
        numpyro.sample("y", dist.Poisson(c * rate), obs=y)


def test_sites_of_labels_are_over_the_sites_own_values():
    fit = pg.fit(scaled_counts, pg.MeanField(), 0, COUNTS)
    q, draws = fit.sites["c"], np.asarray(fit.hyper["c"])
    assert q.support.lower_bound == 1 and q.support.upper_bound == 3
    assert np.all(np.isfinite(q.log_prob(draws)))
    often = np.stack([np.mean(draws == c, 0) for c in (1, 2, 3)], 1)
    np.testing.assert_allclose(often, q.probs, atol=0.06)
    np.testing.assert_allclose(q.mean, q.probs @ np.array([1.0, 2.0, 3.0]))
    # at the optimum log q(c) = E[log p(y | c, rate)] + const, and rate's factor is a gamma
    g = fit.sites["rate"]
    mean_log = jax.scipy.special.digamma(g.concentration) - jnp.log(g.rate)
    c = np.arange(1, 4)
    energy = COUNTS[:, None] * (np.log(c) + mean_log) - c * g.mean
    np.testing.assert_allclose(q.probs, jax.nn.softmax(energy), rtol=1e-5)


def test_a_categorical_over_values_is_a_distribution():
    probs, values = np.array([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]), (-2, 3, 4)
    d = CategoricalOver(jnp.asarray(probs), values)
    np.testing.assert_allclose(np.exp([d.log_prob(v) for v in values]).T, probs)
    assert np.all(d.log_prob(0) == -np.inf)
    z = np.asarray(d.sample(random.key(0), (100_000,)))
    np.testing.assert_allclose(z.mean(0), d.mean, atol=0.05)
    np.testing.assert_allclose(z.var(0), d.variance, rtol=0.02)
    np.testing.assert_array_equal(d.enumerate_support()[:, 0], values)
    again = jax.jit(lambda x: x)(d)
    np.testing.assert_allclose(again.log_prob(4), np.log(probs[:, 2]))
    assert d.expand((3, 2)).log_prob(4).shape == (3, 2)


def three_means(y, probs):
    """One precision, and labels of which one may be impossible."""
    tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with numpyro.plate("n", y.shape[0]):
        z = numpyro.sample("z", dist.Categorical(probs=probs))
        numpyro.sample("y", dist.Normal(jnp.array([-1.0, 5.0, 1.0])[z], tau**-0.5), obs=y)


def test_a_category_of_probability_zero_is_as_if_it_were_not_there():
    """The same bound and factors as without it; below the evidence by enumeration."""

    def two_means(y):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        with numpyro.plate("n", y.shape[0]):
            z = numpyro.sample("z", dist.Categorical(probs=jnp.array([0.4, 0.6])))
            numpyro.sample("y", dist.Normal(jnp.array([-1.0, 1.0])[z], tau**-0.5), obs=y)

    fit = pg.fit(three_means, pg.MeanField(), 0, Y, jnp.array([0.4, 0.0, 0.6]))
    other = pg.fit(two_means, pg.MeanField(), 0, Y)
    np.testing.assert_allclose(fit.log_evidence, other.log_evidence, rtol=1e-8)
    np.testing.assert_array_equal(fit.sites["z"].probs[:, 1], 0.0)
    np.testing.assert_allclose(
        fit.sites["z"].probs[:, [0, 2]], other.sites["z"].probs, rtol=1e-4, atol=1e-6
    )
    assert not np.any(np.asarray(fit.hyper["z"]) == 1)

    def density(tau):
        rows = [
            np.log(0.4 * stats.norm.pdf(y, -1, tau**-0.5) + 0.6 * stats.norm.pdf(y, 1, tau**-0.5))
            for y in Y
        ]
        return np.exp(np.sum(rows)) * stats.gamma.pdf(tau, 2.0)

    truth = np.log(integrate.quad(density, 0, 50, limit=200)[0])
    assert truth - 1.0 < fit.log_evidence < truth


def test_data_that_no_label_allows_have_no_finite_bound():
    def impossible(y):
        p = numpyro.sample("p", dist.Beta(2.0, 2.0))
        with numpyro.plate("n", y.shape[0]):
            z = numpyro.sample("z", dist.Bernoulli(p))
            numpyro.sample("x", dist.Categorical(jnp.array([[1.0, 0.0], [1.0, 0.0]])[z]), obs=y)

    with pytest.raises(pg.PplGpError):
        pg.fit(impossible, pg.MeanField(), 0, np.array([0, 1, 0]))


def test_a_mask_around_labels_is_refused_and_one_around_the_data_drops_them():
    seen = np.array([True, True, False, True, False, True])
    probs = jnp.array([0.4, 0.1, 0.5])

    def both(y, keep):
        with numpyro.handlers.mask(mask=keep):
            three_means(y, probs)

    def data_alone(y, keep):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        with numpyro.plate("n", y.shape[0]):
            z = numpyro.sample("z", dist.Categorical(probs=probs))
            normal = dist.Normal(jnp.array([-1.0, 5.0, 1.0])[z], tau**-0.5)
            numpyro.sample("y", normal.mask(keep), obs=y)

    with pytest.raises(pg.ModelError, match="Mask the observations alone"):
        pg.fit(both, pg.MeanField(), 0, Y, seen)
    first = np.array([True, True, True, False, False, False])  # the first batch masks nothing
    with pytest.raises(pg.ModelError, match="Mask the observations alone"):
        pg.fit(both, pg.MeanField(batch_size=3), 0, Y, first)
    masked = pg.fit(data_alone, pg.MeanField(), 0, Y, seen)
    fewer = pg.fit(three_means, pg.MeanField(), 0, Y[seen], probs)
    np.testing.assert_allclose(masked.log_evidence, fewer.log_evidence, rtol=1e-8)


LATENTS = {"label": dist.Categorical(jnp.ones(2) / 2), "value": dist.Normal(0.0, 1.0)}


@pytest.mark.parametrize("name", LATENTS)
def test_weights_of_what_a_latent_of_the_row_is_in_are_refused(name):
    """The bound of log sum_z (p(z) p(y | z))^w is not w log sum_z p(z) p(y | z)."""

    def model(y, w, around_latents):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        with numpyro.plate("n", y.shape[0]):
            with numpyro.handlers.scale(scale=w if around_latents else 1.0):
                z = numpyro.sample("z", LATENTS[name])
            with numpyro.handlers.scale(scale=w):
                numpyro.sample("y", dist.Normal(1.0 * z, tau**-0.5), obs=y)

    first = np.array([1.0, 1.0, 1.0, 2.0, 1.0, 1.0])  # the first batch weighs nothing
    for method in pg.MeanField(), pg.MeanField(batch_size=3):
        for around_latents in True, False:
            with pytest.raises(pg.ModelError, match="'z'.*whole-number.*MixtureSameFamily"):
                pg.fit(model, method, 0, Y, first, around_latents)


def test_weights_of_one_and_of_rows_without_latents_count_rows():
    def model(y, w, labelled):
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", y.shape[0]), numpyro.handlers.scale(scale=w):
            z = numpyro.sample("z", LATENTS["label"]) if labelled else 0
            numpyro.sample("y", dist.Normal(m + z, 1.0), obs=y)

    w = np.array([2, 1, 3, 1, 1, 2])
    weighed = pg.fit(model, pg.MeanField(), 0, Y, 1.0 * w, False)
    y = np.repeat(Y, w)
    exact = stats.multivariate_normal(np.zeros(len(y)), np.eye(len(y)) + 1.0).logpdf(y)
    np.testing.assert_allclose(weighed.log_evidence, exact, rtol=1e-9)
    args = Y, np.ones(6), True
    declared = declare(model, args, {})
    ones = log_joint_of(declared, first_trace(declared, args, {}), args, {})
    assert ones.latents == ("m", "z")


def test_the_bound_of_few_labels_is_that_of_all_their_combinations():
    """E_q[log p] - E_q[log q], label by label, for labels from one."""
    y = COUNTS[:3]
    fit = pg.fit(scaled_counts, pg.MeanField(), 0, y)
    g, q = fit.sites["rate"], np.asarray(fit.sites["c"].probs)
    a, b = float(g.concentration), float(g.rate)
    own = stats.gamma(a, scale=1.0 / b)

    def inner(rate, labels):
        prior = stats.gamma.logpdf(rate, 2.0) + len(y) * np.log(1 / 3)
        return prior + np.sum(stats.poisson.logpmf(y, labels * rate)) - own.logpdf(rate)

    def mean(labels):
        return own.expect(lambda rate: inner(rate, labels))

    total = -np.sum(q * np.log(q))
    for labels in itertools.product((1, 2, 3), repeat=len(y)):
        weight = np.prod([q[n, c - 1] for n, c in enumerate(labels)])
        total += weight * mean(np.array(labels))
    np.testing.assert_allclose(fit.log_evidence, total, rtol=1e-6)
