"""`read` and the probe: any observed NumPyro site is the likelihood, and what does not fit is a
typed error.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import ppl_gp as pg
from ppl_gp import kernels
from ppl_gp.errors import DataError, ModelError, NotPointwiseError
from ppl_gp.infer.probes import first_trace, probe
from ppl_gp.reading.refusals import require_dtype

N = 6
X = np.random.default_rng(0).normal(size=(N, 2))
Y = np.array([1, 0, 0, 1, 1, 0])
F = jnp.linspace(-2.0, 2.0, N)
BERNOULLI = dist.Bernoulli(logits=F).log_prob(Y)


def _gp(name="f", scale=1.0):
    return numpyro.sample(name, pg.GP(kernels.RBF(scale, 1.0), X))


def _model(likelihood):
    """A model whose likelihood is `likelihood(f, y)`."""

    def model(X, y=None):
        likelihood(_gp(), y)

    return model


def _log_lik(likelihood, y=Y, hyper=None):
    return pg.read(_model(likelihood), X, y=y, hyper=hyper or {}).log_lik


def _plate():
    return numpyro.plate("data", N)


def _bernoulli(f, y, name="y"):
    with _plate():
        numpyro.sample(name, dist.Bernoulli(logits=f), obs=y)


def test_reads_the_prior_and_the_likelihood():
    factors = pg.read(_model(_bernoulli), X, y=Y)
    np.testing.assert_allclose(factors.log_lik(F), BERNOULLI, rtol=1e-12)
    assert list(factors.priors) == ["f"] and factors.prior.event_shape == (N,)
    np.testing.assert_allclose(
        factors.prior.covariance_matrix, kernels.RBF(1.0, 1.0)(X, X), atol=1e-7
    )
    assert float(factors.log_lik.shared()) == 0.0
    probe(factors.log_lik)


def test_a_site_without_a_plate():
    def likelihood(f, y):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    np.testing.assert_allclose(_log_lik(likelihood)(F), BERNOULLI, rtol=1e-12)


def test_to_event_keeps_the_data_apart():
    def likelihood(f, y):
        numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)

    np.testing.assert_allclose(_log_lik(likelihood)(F), BERNOULLI, rtol=1e-12)
    probe(_log_lik(likelihood))


MASK = np.array([True, True, False, True, False, True])


@pytest.mark.parametrize("where", ["handler", "distribution"])
def test_masks(where):
    def likelihood(f, y):
        if where == "handler":
            with _plate(), handlers.mask(mask=MASK):
                numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        else:
            with _plate():
                numpyro.sample("y", dist.Bernoulli(logits=f).mask(MASK), obs=y)

    np.testing.assert_allclose(_log_lik(likelihood)(F), np.where(MASK, BERNOULLI, 0.0), rtol=1e-12)


def test_scales_and_subsample_plates():
    def scaled(f, y):
        with _plate(), handlers.scale(scale=2.5):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    def batch(f, y):
        with numpyro.plate("data", 10 * N, subsample_size=N):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    np.testing.assert_allclose(_log_lik(scaled)(F), 2.5 * BERNOULLI, rtol=1e-12)
    np.testing.assert_allclose(_log_lik(batch)(F), 10.0 * BERNOULLI, rtol=1e-12)


def test_obs_mask_drops_the_missing_rows():
    def likelihood(f, y):
        with _plate():
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y, obs_mask=MASK)

    log_lik = _log_lik(likelihood)
    np.testing.assert_allclose(log_lik(F), np.where(MASK, BERNOULLI, 0.0), rtol=1e-12)
    probe(log_lik)


def test_several_observed_sites_add_up():
    def likelihood(f, y):
        _bernoulli(f, y)
        with _plate():
            numpyro.sample("z", dist.Normal(f, 0.5), obs=0.1 * y)

    expected = BERNOULLI + dist.Normal(F, 0.5).log_prob(0.1 * Y)
    np.testing.assert_allclose(_log_lik(likelihood)(F), expected, rtol=1e-12)


def test_several_observations_of_each_datum_add_up():
    Z = np.random.default_rng(1).normal(size=(3, N))

    def repeated(f, y):
        with numpyro.plate("repeats", 3, dim=-2), _plate():
            numpyro.sample("z", dist.Normal(f, 0.5), obs=Z)

    def vector(f, y):
        with _plate():
            numpyro.sample("z", dist.Normal(f[:, None], 0.5).expand([N, 3]).to_event(1), obs=Z.T)

    expected = dist.Normal(F, 0.5).log_prob(Z).sum(0)
    for likelihood in (repeated, vector):
        np.testing.assert_allclose(_log_lik(likelihood)(F), expected, rtol=1e-12)
        probe(_log_lik(likelihood))


def test_a_factor_is_part_of_the_likelihood():
    def likelihood(f, y):
        _bernoulli(f, y)
        with _plate():
            numpyro.factor("penalty", -(f**4))

    np.testing.assert_allclose(_log_lik(likelihood)(F), BERNOULLI - F**4, rtol=1e-12)
    probe(_log_lik(likelihood))


def test_observed_hyperparameters_and_scalar_factors_are_shared():
    def likelihood(f, y):
        a = numpyro.sample("a", dist.LogNormal())
        numpyro.sample("measured", dist.Normal(a, 0.1), obs=0.7)
        numpyro.factor("soft", -(a**2))
        _bernoulli(f, y)

    log_lik = _log_lik(likelihood, hyper={"a": jnp.asarray(0.8)})
    np.testing.assert_allclose(
        log_lik.shared(), dist.Normal(0.8, 0.1).log_prob(0.7) - 0.64, rtol=1e-12
    )
    np.testing.assert_allclose(log_lik(F), BERNOULLI, rtol=1e-12)


def test_observations_that_do_not_depend_on_f_are_allowed():
    def likelihood(f, y):
        _bernoulli(f, y)
        with _plate():
            numpyro.sample("other", dist.Normal(), obs=0.3 * y)

    expected = BERNOULLI + dist.Normal().log_prob(0.3 * Y)
    np.testing.assert_allclose(_log_lik(likelihood)(F), expected, rtol=1e-12)


def test_param_sites_are_hyperparameters():
    def likelihood(f, y):
        a = numpyro.param("a", jnp.asarray(0.5), constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(a * f, 1.0), obs=y)

    np.testing.assert_allclose(
        _log_lik(likelihood)(F), dist.Normal(0.5 * F).log_prob(Y), rtol=1e-12
    )
    given = _log_lik(likelihood, hyper={"a": jnp.asarray(2.0)})
    np.testing.assert_allclose(given(F), dist.Normal(2.0 * F).log_prob(Y), rtol=1e-12)


def test_hyperparameters_are_differentiable_leaves():
    def likelihood(f, y):
        a = numpyro.sample("a", dist.LogNormal())
        numpyro.sample("y", dist.Normal(a * f, 1.0), obs=y)

    def total(a):
        return jnp.sum(_log_lik(likelihood, hyper={"a": a})(F))

    expected = jax.grad(lambda a: jnp.sum(dist.Normal(a * F).log_prob(Y)))(0.9)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(0.9), expected, rtol=1e-12)


def test_reading_leaks_nothing_to_outer_handlers():
    with handlers.trace() as outer, handlers.seed(rng_seed=0):
        pg.read(_model(_bernoulli), X, y=Y)
    assert not outer


def test_condition_and_substitute_on_the_model_are_seen():
    def likelihood(f, y):
        a = numpyro.sample("a", dist.LogNormal())
        numpyro.sample("y", dist.Normal(a * f, 1.0), obs=y)

    conditioned = handlers.condition(_model(likelihood), {"a": jnp.asarray(1.5)})
    factors = pg.read(conditioned, X, y=Y)
    np.testing.assert_allclose(factors.log_lik(F), dist.Normal(1.5 * F).log_prob(Y), rtol=1e-12)
    np.testing.assert_allclose(factors.log_lik.shared(), dist.LogNormal().log_prob(1.5), rtol=1e-12)


# What does not fit


def _error(model, kind, *parts, hyper=None, **kwargs):
    with pytest.raises(kind) as caught:
        factors = pg.read(model, X, hyper=hyper or {}, **({"y": Y} | kwargs))
        probe(factors.log_lik)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_no_gp():
    def model(X, y=None):
        _bernoulli(X[:, 0], y)

    _error(model, ModelError, "no GP site")


def test_a_gp_that_is_observed_itself():
    def model(X, y=None):
        numpyro.sample("z", pg.GP(kernels.RBF(1.0, 1.0), X), obs=None if y is None else y * 1.0)

    _error(model, ModelError, "GP site 'z' is observed itself", "dist.Normal(f, 0.001), obs=y")
    for method in (pg.NUTS(1, 1), pg.SVGP(num_inducing=2, max_steps=1), pg.EllipticalSlice(1, 1)):
        with pytest.raises(ModelError, match="'z' is observed itself"):
            pg.fit(model, method, 0, X, y=Y)


def test_two_functions_and_a_gp_fed_by_a_gp_are_told_apart():
    def two(X, y=None):
        f, g = _gp("f"), _gp("g")
        with _plate():
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    def deep(X, y=None):
        h = _gp("h")
        _bernoulli(numpyro.sample("f", pg.GP(kernels.RBF(1.0, 1.0), h)), y)

    _error(two, ModelError, "several latent functions", "'f'", "'g'", "pg.check(model, ...) lists")
    _error(deep, ModelError, "fed by another GP", "'h'", "pg.check(model, ...) lists")


def test_an_expanded_gp():
    def model(X, y=None):
        with numpyro.plate("classes", 3):
            f = numpyro.sample("f", pg.GP(kernels.RBF(1.0, 1.0), X))
        with _plate():
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    _error(model, ModelError, "several latent functions", "(3, 6)")


def test_local_latents():
    def likelihood(f, y):
        with _plate():
            noise = numpyro.sample("noise", dist.Gamma(2.0, 2.0))
            numpyro.sample("y", dist.Bernoulli(logits=f + noise), obs=y)

    _error(_model(likelihood), ModelError, "'noise'", "pg.check(model, ...) lists")


def test_a_missing_hyperparameter():
    def likelihood(f, y):
        a = numpyro.sample("a", dist.LogNormal())
        numpyro.sample("y", dist.Normal(a * f, 1.0), obs=y)

    _error(_model(likelihood), ModelError, "'a'")


def test_nothing_observed():
    _error(_model(_bernoulli), ModelError, "observes nothing", "y=", y=None)


def _swap_pair(f):
    return f.at[2].set(f[2] + 1e-3 * f[4])


COUPLED = {
    "reversed": lambda f: f[::-1],
    "cumulative": jnp.cumsum,
    "one_pair": _swap_pair,
    "centred": lambda f: f - jnp.mean(f),
}


@pytest.mark.parametrize("how", COUPLED)
def test_a_likelihood_that_couples_data(how):
    _error(
        _model(lambda f, y: _bernoulli(COUPLED[how](f), y)),
        NotPointwiseError,
        "'y'",
        "pg.check(model, ...) lists",
    )


def test_a_scalar_site_that_sees_all_of_f():
    def likelihood(f, y):
        _bernoulli(f, y)
        numpyro.sample("total", dist.Normal(jnp.sum(f), 1.0), obs=0.5)

    def penalty(f, y):
        _bernoulli(f, y)
        numpyro.factor("smooth", -jnp.sum(jnp.diff(f) ** 2))

    _error(_model(likelihood), NotPointwiseError, "'total'")
    _error(_model(penalty), NotPointwiseError, "'smooth'")


def test_a_multivariate_observation():
    def likelihood(f, y):
        numpyro.sample("y", dist.MultivariateNormal(f, jnp.eye(N) + 0.5), obs=y)

    _error(_model(likelihood), NotPointwiseError, "'y'")


def test_not_finite_at_ordinary_values_of_f():
    _error(_model(lambda f, y: numpyro.factor("y", jnp.log(f - 100.0))), DataError, "not finite")


def test_observed_values_are_checked_against_shape_and_support():
    for y, part in ((Y[:, None], "(N, 1)"), (2 * Y - 1, "0 and 1"), (Y[:4], "shape (4,)")):
        with pytest.raises(DataError, match=re.escape(part)):
            first_trace(_model(_bernoulli), (X,), {"y": y})
    # A value outside the support that a mask hides is nobody's business.
    hidden = np.where(MASK, Y, -1)

    def likelihood(f, y):
        with _plate(), handlers.mask(mask=MASK):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    first_trace(_model(likelihood), (X,), {"y": hidden})


def test_a_support_that_moves_with_f_is_not_judged_at_one_f():
    y = np.where(np.arange(len(X)) % 2, 1.5, 0.4)  # beyond the support at f = 0

    def likelihood(f, y):
        numpyro.sample("y", dist.Uniform(0.0, jnp.exp(f)), obs=y)

    first_trace(_model(likelihood), (X,), {"y": y})
    with pytest.raises(DataError, match="not finite at random values of f"):
        pg.fit(_model(likelihood), pg.EP(), 0, X, y=y)
    sampler = pg.EllipticalSlice(num_warmup=300, num_samples=20, num_chains=1)
    fit = pg.fit(_model(likelihood), sampler, 0, X, y=y, throw=False)
    assert np.all(np.exp(fit.latent["f"].mean) > y)  # draws are where y is possible


def test_a_support_that_moves_is_judged_at_f_where_nothing_else_would():
    """Without NumPyro's validation a density ignores its support."""
    y = np.full(len(X), 1.5)

    def likelihood(f, y):
        numpyro.sample("y", dist.Uniform(0.0, jnp.exp(f), validate_args=False), obs=y)

    with pytest.raises(DataError, match="outside the support"):
        first_trace(_model(likelihood), (X,), {"y": y})


def _three(f, y):
    with _plate():
        numpyro.sample("y", dist.Categorical(logits=jnp.stack([f, 0.0 * f, -f], -1)), obs=y)


def _proportions(f, y):
    with _plate():
        numpyro.sample("y", dist.Beta(5.0 * jnp.exp(f), 5.0), obs=y)


METHODS = (pg.Laplace(), pg.NUTS(5, 5, 1), pg.SVGP(3, max_steps=2))


@pytest.mark.parametrize("likelihood", [_three, _proportions])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_observations_of_a_dtype_that_the_density_does_not_take(likelihood, method):
    y = Y.astype(float if likelihood is _three else int)
    told = r"'y' observes y of dtype (int|float)64.*astype\((int|float)\)"
    with pytest.raises(DataError, match=told):
        pg.fit(_model(likelihood), method, 0, X, y=y)
    assert re.search(told, str(pg.check(_model(likelihood), X, y=y)))


@pytest.mark.parametrize("likelihood, y", [(_three, Y), (_proportions, 0.1 + 0.8 * Y)])
def test_new_observations_are_of_the_dtype_that_the_density_takes(likelihood, y):
    fit = pg.fit(_model(likelihood), pg.Laplace(), 0, X, y=y)
    other = np.ones(N, float if likelihood is _three else int)
    with pytest.raises(DataError, match=r"y_new of dtype .*astype"):
        fit.log_density(X, other)


def test_dtypes_that_densities_take_are_left_alone():
    for family in (dist.Poisson(jnp.exp(F)), dist.Normal(F, 1.0), dist.Bernoulli(logits=F)):
        for y in (Y, Y.astype(float)):
            site = {"type": "sample", "is_observed": True, "fn": family, "value": jnp.asarray(y)}
            assert require_dtype("y", site, "y") is None  # it raises for another dtype


@pytest.mark.parametrize("units", [2, 3])
def test_a_weight_of_each_unit_stays_with_it_where_the_rows_are_an_event(units):
    """As many units as rows, too: there a weight of a unit would pass for one of a row."""
    rows, w = 3, jnp.arange(1.0, 1.0 + units)
    y = jnp.asarray(np.random.default_rng(0).normal(size=(units, rows)))

    def model(X, w, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("units", w.shape[0]), handlers.scale(scale=w):
            loc = jnp.broadcast_to(f, (w.shape[0], X.shape[0]))
            numpyro.sample("y", dist.Normal(loc, 0.5).to_event(1), obs=y)

    f = jnp.linspace(-1.0, 1.0, rows)
    found = pg.read(model, jnp.arange(1.0 * rows), w, y=y, hyper={}).log_lik(f)
    np.testing.assert_allclose(found, w @ dist.Normal(f, 0.5).log_prob(y), rtol=1e-12)


def test_counts_that_obs_mask_leaves_out_couple_no_rows():
    """What it draws for them ends when all rows have, and Poisson counts were refused by that."""

    def model(X, seen, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y, obs_mask=seen)

    X, seen = np.linspace(0.0, 3.0, 12), np.arange(12) % 3 > 0
    held = pg.Laplace(hyper=pg.Fixed({}))
    found = pg.fit(model, held, 0, X, seen, y=np.ones(12))
    alone = pg.fit(model, held, 0, X[seen], np.ones(8, bool), y=np.ones(8))
    assert found.log_evidence == pytest.approx(alone.log_evidence, abs=1e-6)
