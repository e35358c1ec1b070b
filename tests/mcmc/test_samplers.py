"""What samplers are given and what they say of their draws: refusals, the density that is sampled,
the verdict, the threads.
"""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import small_fits
from numpyro import handlers
from numpyro.contrib.module import random_eqx_module
from numpyro.infer.util import log_density, potential_energy
from threadpoolctl import threadpool_info, threadpool_limits

import ppl_gp as pg
from ppl_gp.errors import DataError, ModelError
from ppl_gp.infer import chains as mcmc
from ppl_gp.infer.chains import Chains, Kernel, diagnose, run_chains
from ppl_gp.infer.mcmc.nuts import self_contained, whitened
from ppl_gp.settings import require_settings

X = np.linspace(-1.0, 1.0, 6)[:, None]
Y = np.array([0, 1, 1, 0, 1, 1])
SHORT = {"num_warmup": 5, "num_samples": 5, "num_chains": 1}
METHODS = {
    "NUTS()": pg.NUTS(**SHORT),
    "EllipticalSlice()": pg.EllipticalSlice(**SHORT),
    "SparseNUTS()": pg.SparseNUTS(num_inducing=3, **SHORT),
    "hyper=Sample()": pg.Laplace(hyper=pg.Sample(**SHORT)),
}


def model_of(kernel, likelihood):
    """A model with `kernel()` inside and `likelihood(f, y)` in the data's plate."""

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(kernel(), X))
        with numpyro.plate("data", X.shape[0]):
            likelihood(f, y)

    return model


def logistic(f, y):
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def sampled_variance():
    return pg.kernels.RBF(numpyro.sample("variance", dist.LogNormal(0.0, 0.5)), 1.0)


def param(constant):
    def kernel():
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        return pg.kernels.RBF(
            variance, numpyro.param("scale", constant, constraint=dist.constraints.positive)
        )

    return kernel


def subsampled(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("rows", X.shape[0], subsample_size=2) as rows:
        batch = X[rows]
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), batch))
    with numpyro.plate("data", X.shape[0], subsample_size=2):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=None if y is None else y[rows])


def discrete():
    return pg.kernels.RBF(1.0 + numpyro.sample("kind", dist.Bernoulli(0.5)), 1.0)


def refused(model, name, *words, error=ModelError):
    with pytest.raises(error) as caught:
        pg.fit(model, METHODS[name], 0, X, y=Y)
    for word in (name, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_what_has_no_density_is_refused(name):
    refused(model_of(param(1.0), logistic), name, "'scale'", "numpyro.param", "numpyro.sample")
    refused(model_of(param(jnp.ones(1)), logistic), name, "'scale'")
    refused(model_of(discrete, logistic), name, "'kind'", "discrete")


@pytest.mark.parametrize("name", ["NUTS()", "EllipticalSlice()", "SparseNUTS()"])
def test_plates_that_subsample_are_refused(name):
    refused(subsampled, name, "'rows'", "2 of 6", "subsample_size", "SVGP()")


@pytest.mark.parametrize("name", ["EllipticalSlice()", "SparseNUTS()"])
def test_priors_of_f_that_handlers_change_are_refused(name):
    def masked(X, y=None):
        with handlers.mask(mask=False):
            f = numpyro.sample("f", pg.GP(sampled_variance(), X))
        with numpyro.plate("data", X.shape[0]):
            logistic(f, y)

    refused(handlers.scale(model_of(sampled_variance, logistic), 0.2), name, "'f'", "scale")
    with pytest.raises(ModelError, match="mask takes the prior"):
        pg.fit(masked, METHODS[name], 0, X, y=Y)
    with pytest.raises(ModelError, match="mask takes the prior"):
        pg.fit(masked, METHODS["NUTS()"], 0, X, y=Y)


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_a_scaled_prior_keeps_its_density_in_whitened_coordinates(scale):
    """log p(v) = scale x (log of everything declared) + log |df/dv|, the normaliser of N(f)^scale
    with it.
    """
    model = handlers.scale(model_of(sampled_variance, logistic), scale)
    v, variance = jnp.linspace(-1.0, 1.5, 6), jnp.asarray(1.7)
    L = jnp.linalg.cholesky(pg.GP(pg.kernels.RBF(variance, 1.0), X).covariance_matrix)
    declared, _ = log_density(
        model, (jnp.asarray(X),), {"y": Y}, {"f": L @ v, "variance": variance}
    )
    jacobian = jnp.sum(jnp.log(jnp.diagonal(L)))
    values = {"f_base": v, "variance": variance}
    white, _ = log_density(
        whitened(self_contained(model), ("f",)), (jnp.asarray(X),), {"y": Y}, values
    )
    np.testing.assert_allclose(white, declared + jacobian, rtol=1e-9)


def test_settings_that_cannot_be_used_are_data_errors():
    for make in (pg.NUTS, pg.EllipticalSlice, pg.SparseNUTS):
        for setting in ({"num_samples": 0}, {"num_chains": -1}, {"target_accept_prob": 1.0}):
            with pytest.raises(DataError, match=f"{make.__name__}.{next(iter(setting))}"):
                make(**setting)


@pytest.mark.slow
def test_a_networks_param_beside_the_priors_of_its_weights_is_no_hindrance():
    """The param holds initial values, made in the model, that nothing depends on."""

    def kernel(X, y=None, prior=dist.Normal(0.0, 1.0)):  # noqa: B008
        net = random_eqx_module("net", eqx.nn.Linear(1, 1, key=jax.random.key(0)), prior=prior)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), jax.vmap(net)(X)))
        with numpyro.plate("data", X.shape[0]):
            logistic(f, y)

    fit = pg.fit(kernel, METHODS["NUTS()"], 0, X, y=Y, throw=False)
    assert {"net/weight", "net/bias"} == set(fit.hyper) and np.ptp(
        np.asarray(fit.hyper["net/weight"]), 0
    ).all()
    with pytest.raises(ModelError, match="net.params"):  # the bias has no prior
        pg.fit(kernel, METHODS["NUTS()"], 0, X, y=Y, prior={"weight": dist.Normal(0.0, 1.0)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NUTS()", "EllipticalSlice()"])
def test_missing_counts_and_labels_integrate_to_one(name):
    """The same key and the same density: the same draws as with those rows masked."""
    mask = np.arange(6) < 4

    def by_obs_mask(f, y):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y, obs_mask=mask)

    def by_handler(f, y):
        with handlers.mask(mask=mask):
            logistic(f, y)

    one, other = (
        pg.fit(model_of(sampled_variance, part), METHODS[name], 0, X, y=Y, throw=False)
        for part in (by_obs_mask, by_handler)
    )
    np.testing.assert_allclose(one.latent["f"].mean, other.latent["f"].mean, rtol=1e-6)
    np.testing.assert_allclose(one.hyper["variance"], other.hyper["variance"], rtol=1e-6)


def test_missing_values_that_another_site_reads_are_refused():
    def chained(f, y):
        filled = numpyro.sample(
            "y", dist.Normal(f, 1.0), obs=y.astype(float), obs_mask=np.arange(6) < 4
        )
        numpyro.sample("z", dist.Normal(filled, 1.0), obs=jnp.zeros(6))

    with pytest.raises(ModelError, match="obs_mask leaves open at site 'y'"):
        pg.fit(model_of(sampled_variance, chained), METHODS["NUTS()"], 0, X, y=Y)


def test_slices_see_factors_and_priors_that_depend_on_f():
    """y = t + noise, t ~ N(f_0, 1), and exp(-f_0^2 / 2) twice: f_0 is Gaussian, with f_1 of
    correlation exp(-1/2).
    """

    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        numpyro.factor("penalty", -(f[0] ** 2))
        t = numpyro.sample("t", dist.Normal(f[0], 1.0))
        numpyro.sample("y", dist.Normal(t, 0.5), obs=y)

    method = pg.EllipticalSlice(num_warmup=100, num_samples=1500, num_chains=1)
    fit = pg.fit(model, method, 0, np.array([0.0, 1.0]), y=np.asarray(3.0), throw=False)
    f = np.asarray(fit.latent["f"].mean)
    variance = 1.0 / (1.0 + 2.0 + 1.0 / 1.25)
    mean = variance * 3.0 / 1.25
    error = 6 * np.sqrt(variance / fit.stats["ess_by_site"]["f"])
    assert fit.stats["ess_by_site"]["f"] > 200 and error < 0.22
    assert abs(f[:, 0].mean() - mean) < error
    assert abs(f[:, 1].mean() - np.exp(-0.5) * mean) < 2 * error
    np.testing.assert_allclose(f[:, 0].var(), variance, rtol=0.3)


def bounded(X, y=None):
    """Length scales below a sampled bound, and data that say nothing."""
    top = numpyro.sample("top", dist.LogNormal(0.0, 0.5))
    scales = numpyro.sample("scales", dist.Uniform(0.0, top).expand([2]).to_event(1))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, scales), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 100.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EllipticalSlice()", "SparseNUTS()"])
def test_supports_that_depend_on_each_other(name):
    chain = {"num_warmup": 200, "num_samples": 800, "num_chains": 1}
    method = (
        pg.EllipticalSlice(**chain, num_slices=1) if name[0] == "E" else pg.SparseNUTS(2, **chain)
    )
    fit = pg.fit(
        bounded,
        method,
        0,
        np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]),
        y=np.zeros(3),
        throw=False,
    )
    share = np.asarray(fit.hyper["scales"]) / np.asarray(fit.hyper["top"])[:, None]
    assert share.min() > 0.0 and share.max() < 1.0 and fit.stats["ess"] > 60
    error = 5 / np.sqrt(fit.stats["ess"])
    assert np.all(np.abs(share.mean(0) - 0.5) < error * np.sqrt(1 / 12))
    assert abs(np.log(np.asarray(fit.hyper["top"])).mean()) < error * 0.5


def test_constrained_draws_are_those_of_the_options_given():
    def model(kind):
        numpyro.sample(
            "a", dist.LogNormal(0.0, 1.0) if kind == "positive" else dist.Uniform(0.0, 1.0)
        )

    kernel = Kernel(model)
    for kind in ("positive", "unit"):
        kernel.init(jax.random.key(0), 1, None, (kind,), {})
    z = {"a": jnp.asarray(0.3)}
    np.testing.assert_allclose(kernel.postprocess_fn(("positive",), {})(z)["a"], np.exp(0.3))
    np.testing.assert_allclose(kernel.postprocess_fn(("unit",), {})(z)["a"], 1 / (1 + np.exp(-0.3)))


@pytest.mark.slow
def test_a_second_length_of_warm_up_is_not_the_first():
    """NumPyro's kernel keeps it: adaptation would go on among the draws."""

    def fitted(model, num_warmup):
        method = pg.SparseNUTS(3, num_warmup=num_warmup, num_samples=25, num_chains=1)
        return np.asarray(pg.fit(model, method, 0, X, y=Y, throw=False).hyper["variance"])

    model = model_of(sampled_variance, logistic)
    assert len(fitted(model, 50)) == 25
    np.testing.assert_array_equal(
        fitted(model, 25), fitted(model_of(sampled_variance, logistic), 25)
    )


@pytest.mark.slow
def test_other_options_and_other_data_leave_nothing_behind():
    def fitted(model, link, y):
        fit = pg.fit(model, METHODS["NUTS()"], 0, X, y=y, throw=False, link=link)
        return np.asarray(fit.latent["f"].mean)

    def fresh(X, y=None, link="logit"):
        return small_fits.classifier(X, y, link)

    def used(X, y=None, link="logit"):
        return small_fits.classifier(X, y, link)

    fitted(used, "probit", 1 - Y)
    logit = fitted(used, "logit", Y)
    np.testing.assert_array_equal(logit, fitted(fresh, "logit", Y))
    assert not np.allclose(logit, fitted(used, "probit", Y))


def test_whitening_leaves_ordinary_models_as_they_are():
    plain = handlers.reparam(small_fits.classifier, config={"f": pg.Whiten()})
    z = {
        "f_base": jnp.linspace(-1.0, 1.0, 6),
        "lengthscale": jnp.asarray(0.1),
        "variance": jnp.asarray(-0.2),
    }
    ours, theirs = (
        potential_energy(m, (jnp.asarray(X),), {"y": Y}, z)
        for m in (whitened(self_contained(small_fits.classifier), ("f",)), plain)
    )
    assert float(ours) == float(theirs)


def noise(chains, draws, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(chains, draws, *shape))


def verdict(**values):
    draws = Chains(values, {"diverging": np.zeros(np.shape(next(iter(values.values())))[:2], bool)})
    return diagnose(draws, tuple(values))


def test_independent_draws_have_mixed():
    result, stats = verdict(a=noise(2, 200), b=noise(2, 200, 3, seed=1))
    assert result == "converged" and stats["r_hat"] < 1.02 and stats["ess"] > 250


def test_entries_that_a_support_holds_fixed_do_not_count():
    x = noise(2, 200, 2, 2)
    x[..., 0, 1] = 0.0
    assert verdict(a=x)[0] == "converged"
    np.testing.assert_allclose(
        verdict(a=x)[1]["ess"], verdict(a=x[..., [0, 1, 1], [0, 0, 1]])[1]["ess"]
    )


@pytest.mark.parametrize(
    "values",
    [
        noise(2, 3),  # halves of a chain have no variance
        np.ones((2, 200)),  # never moved
        np.concatenate([np.zeros((1, 200)), noise(1, 200)]),  # one chain of two never moved
        # its estimate of ESS is no number of draws
        np.where(np.arange(50) % 2, 1.0, -1.0)[None] + 1e-3 * noise(1, 50),
    ],
    ids=["short", "constant", "stuck", "alternating"],
)
def test_no_number_is_no_success(values):
    result, stats = verdict(good=noise(*values.shape, seed=5), bad=values)
    assert result == "not_mixed"
    assert np.isnan(stats["ess"]) and np.isnan(stats["ess_by_site"]["bad"])


def test_too_few_effective_draws_are_no_success():
    """An autoregression with a correlation of 0.97: about three effective draws of two hundred."""
    slow = noise(1, 4000)
    for i in range(1, slow.shape[1]):
        slow[:, i] = 0.97 * slow[:, i - 1] + np.sqrt(1 - 0.97**2) * slow[:, i]
    assert verdict(a=slow)[0] == "converged"
    windows = [verdict(a=slow[:, i : i + 200]) for i in range(0, 4000, 200)]
    assert all(w[1]["ess"] >= 10.0 and w[1]["r_hat"] < 1.05 for w in windows if w[0] == "converged")
    assert any(w[1]["r_hat"] < 1.05 and not w[1]["ess"] >= 10.0 for w in windows)


@pytest.mark.parametrize("config", [pg.NUTS, pg.EllipticalSlice, pg.SparseNUTS, pg.Sample])
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_warmup", 0, "a whole number, at least 1"),
        ("num_samples", 0, "a whole number, at least 1"),
        ("num_chains", -1, "a whole number, at least 1"),
        ("target_accept_prob", 1.0, "a number between 0 and 1"),
        ("target_accept_prob", float("nan"), "a number between 0 and 1"),
    ],
)
def test_chains_that_cannot_run_are_refused(config, name, value, told):
    with pytest.raises(pg.DataError, match=rf"{config.__name__}\({name}={value}\): give {told}"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (pg.NUTS, "max_tree_depth"),
        (pg.EllipticalSlice, "num_slices"),
        (pg.SparseNUTS, "max_tree_depth"),
        (pg.SparseNUTS, "num_inducing"),
    ],
)
def test_counts_of_one_sampler_are_looked_at_too(config, name):
    with pytest.raises(pg.DataError, match=rf"{config.__name__}\({name}=0\): give a whole number"):
        config(**{name: 0})


def test_a_fraction_of_a_draw_is_refused():
    # (the suite's type checks would refuse it in a constructor before)
    chains = {"num_warmup": 2, "num_samples": 2.5, "num_chains": 1, "target_accept_prob": 0.8}
    with pytest.raises(pg.DataError, match=r"num_samples=2\.5\): give a whole number"):
        require_settings(SimpleNamespace(**chains))


@pytest.mark.slow
def test_three_draws_are_not_converged():
    fit = pg.fit(small_fits.classifier, pg.NUTS(5, 3, 1), 0, X, y=Y, throw=False)
    assert fit.result == "not_mixed" and np.isnan(fit.stats["r_hat"]) and np.isnan(fit.stats["ess"])


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_blas_has_one_thread_in_a_run_and_its_own_number_after_it(end, monkeypatch):
    def threads():
        return {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}

    seen = []

    def looked(kernel, states, args, kwargs, num):
        seen.append(threads())
        if end is not None:
            raise end
        return states, {"z": {"a": np.zeros((1, num))}}

    monkeypatch.setattr(mcmc, "_init", lambda *_: None)
    monkeypatch.setattr(mcmc, "_chunk", looked)
    monkeypatch.setattr(mcmc, "_postprocess", lambda kernel, z, args, kwargs: z)
    config = pg.NUTS(num_warmup=1, num_samples=2, num_chains=1)
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        try:
            run_chains(None, config, jax.random.key(0), (), {}, progress=False, label="")
        except BaseException as error:  # KeyboardInterrupt is no Exception
            assert type(error) is end
        assert threads() == before == {2} and seen and all(s == {1} for s in seen)
