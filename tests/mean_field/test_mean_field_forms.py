"""Terms of labelled rows by sufficient statistics: the sums over nodes, and none where rows have
none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from labelled_rows import looked_at

from ppl_gp.mean_field import forms
from ppl_gp.mean_field.sweep import bound, updated
from ppl_gp.quick import quick_jit

RNG = np.random.default_rng(6)
X = RNG.normal(size=(40, 2)) * [1.0, 30.0] + [0.0, 200.0]
ON = (RNG.random((40, 2)) < 0.4).astype(float)
COUNTS = RNG.poisson(3.0, (40, 2)).astype(float)
sample = numpyro.sample


def normal_wishart(z_of, X):
    with numpyro.plate("components", 2):
        W = sample("W", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
        m = sample("m", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=W))
    z_of(lambda z: dist.MultivariateNormal(m[z], precision_matrix=W[z]))


def wishart(z_of, X):
    with numpyro.plate("components", 2):
        W = sample("W", dist.InverseWishart(5.0, scale_matrix=jnp.eye(2)))
    z_of(lambda z: dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=W[z]))


def normal_gamma(z_of, X):
    with numpyro.plate("components", 2):
        tau = sample("tau", dist.Gamma(2.0, 1.0))
        slope = sample("slope", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)))
    mean = lambda z: (slope[z] * X[:, 0])[:, None]  # noqa: E731
    z_of(lambda z: dist.Normal(mean(z), 1.0 / jnp.sqrt(tau[z])[:, None]).expand([len(X), 2]))


def gaussian(z_of, X):
    with numpyro.plate("components", 2):
        m = sample("m", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    z_of(lambda z: dist.Normal(m[z], 0.7))


def gamma(z_of, X):
    tau = sample("tau", dist.Gamma(2.0, 1.0))
    scales = jnp.array([1.0, 3.0])
    z_of(lambda z: dist.Normal(0.0, (scales[z] / jnp.sqrt(tau))[:, None]).expand([len(X), 2]))


def beta(z_of, X):
    with numpyro.plate("components", 2, dim=-2), numpyro.plate("columns", 2, dim=-1):
        p = sample("p", dist.Beta(2.0, 2.0))
    z_of(lambda z: dist.Bernoulli(p[z]))


def poisson(z_of, X):
    with numpyro.plate("components", 2):
        rate = sample("rate", dist.Gamma(2.0, 1.0))
    z_of(lambda z: dist.Poisson(rate[z][:, None] * jnp.ones(2)))


CASES = [
    (normal_wishart, X),
    (wishart, X),
    (normal_gamma, X),
    (gamma, X),
    (beta, ON),
]
SLOW = [pytest.param(*case, id=case[0].__name__, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("kind", "X"), [pytest.param(gaussian, X, id="gaussian"), *SLOW])
def test_forms_are_the_sums_over_nodes(kind, X, monkeypatch):
    monkeypatch.setattr(forms, "worth", lambda *_: True)
    monkeypatch.setattr(forms, "_FEW", 0)
    structure, trace, q = looked_at(kind, X)
    quick = forms.with_forms(structure, trace)
    found = {t.site: t.form for t in quick.terms}
    without = {"share"} | ({"tau"} if kind is gamma else set())  # blocks of one element
    assert {k for k, form in found.items() if form is None} == without
    assert found["z"].rows.shape == (40, 1)  # the same of every row
    joint = structure.joint

    @quick_jit
    def both(terms, q):
        return [updated(joint, terms, q, j).eta() for j in range(len(q))], bound(joint, terms, q)

    (etas, value), (wanted, nodes) = both(quick.terms, q), both(structure.terms, q)
    np.testing.assert_allclose(value, nodes, rtol=1e-9)
    for a, b in zip(jax.tree.leaves(etas), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * np.abs(b).max())


@pytest.mark.slow
def test_rows_without_sufficient_statistics_keep_their_nodes(monkeypatch):
    """log y! is no product of entries; a batch of few evaluations is not looked at."""
    structure, trace, _ = looked_at(poisson, COUNTS)
    assert all(t.form is None for t in forms.with_forms(structure, trace).terms)
    monkeypatch.setattr(forms, "worth", lambda *_: True)
    found = {t.site: t.form for t in forms.with_forms(structure, trace).terms}
    assert found["x"] is None and found["z"] is not None and found["rate"] is None
    jax.clear_caches()
