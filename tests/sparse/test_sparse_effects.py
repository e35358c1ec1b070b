"""`SVGP` integrates effects beside a GP: one q(u) of inducing variables and effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import ppl_gp as pg
from ppl_gp.infer.svgp.look import look_at

N, GROUPS = 40, 5


def data():
    rng = np.random.default_rng(0)
    X, W = np.sort(rng.uniform(0, 6, N)), rng.normal(size=(N, 2))
    group = rng.integers(0, GROUPS, N)
    eta = np.sin(X) + W @ [0.5, -0.3] + 0.6 * rng.normal(size=GROUPS)[group]
    return X, W, group, eta, rng


def model(X, W, group, y=None, counts=False):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.2, sd))
    eta = f + W @ beta + u[group]
    with numpyro.plate("data", X.shape[0]):
        shown = dist.Poisson(jnp.exp(eta)) if counts else dist.Normal(eta, 0.3)
        numpyro.sample("y", shown, obs=y)


FIXED = pg.Fixed({"sd": 0.7})


@pytest.fixture(scope="module")
def fits():
    """(by Laplace, by SVGP with inducing points at the data), Gaussian noise."""
    X, W, group, eta, rng = data()
    y = eta + 0.3 * rng.normal(size=N)
    method = pg.SVGP(hyper=FIXED, inducing=X, train_inducing=False, max_steps=40)
    exact = pg.fit(model, pg.Laplace(hyper=FIXED), 0, X, W, group, y=y)
    return exact, pg.fit(model, method, 0, X, W, group, y=y)


@pytest.mark.slow
def test_effects_are_integrated_under_a_guide_of_the_hyperparameters_too():
    """The bound is below log int p(y | sd) p(sd) d sd, by a grid of exact evidences, by 1.1 nats:
    one q of whitened effects serves all spreads.
    """
    X, W, group, eta, rng = data()
    y = eta + 0.3 * rng.normal(size=N)
    method = pg.SVGP(hyper=AutoNormal, inducing=X, train_inducing=False, max_steps=1500)
    fit = pg.fit(model, method, 0, X, W, group, y=y, throw=False)
    assert set(fit.sites) == {"beta", "u"}
    assert "sd" in fit.hyper and not {"beta", "u"} & set(fit.hyper)

    def evidence(sd):
        factors = pg.read(model, X, W, group, y=y, hyper={"sd": sd})
        return pg.log_evidence(pg.Laplace(), factors)[0]

    sd = jnp.linspace(0.005, 4.0, 400)
    log_p = jax.jit(jax.vmap(evidence))(sd) + dist.HalfNormal(1.0).log_prob(sd)
    exact = float(jax.nn.logsumexp(log_p) + jnp.log(sd[1] - sd[0]))
    assert exact - 1.5 < fit.log_evidence < exact


@pytest.mark.parametrize("guide", [AutoNormal, functools.partial(AutoNormal, init_scale=0.01)])
def test_an_autoguide_with_options_leaves_effects_to_be_integrated(guide):
    X, W, group, eta, _ = data()
    method = pg.SVGP(hyper=guide, num_inducing=6)
    subject = look_at(method, model, (X, W, group), {"y": eta}, 0)
    assert subject.names == ("sd",)


def _at_new_rows(fit, ask):
    X, W, group, *_ = data()
    return ask(fit)(X[:7] + 0.1, W[:7], group[:7])


@pytest.mark.slow
def test_gaussian_noise_and_inducing_points_at_the_data_are_exact(fits):
    """The bound is the evidence, and predictions are those of the dense formula, up to jitter."""
    exact, sparse = fits
    assert exact.log_evidence - 1e-4 < sparse.log_evidence < exact.log_evidence + 1e-9
    p, q = (_at_new_rows(f, lambda f: f.predict) for f in fits)
    np.testing.assert_allclose(q.f_mean, p.f_mean, atol=1e-6)
    np.testing.assert_allclose(q.f_variance, p.f_variance, atol=1e-6)


@pytest.mark.slow
def test_answers_by_part_are_those_of_the_dense_formula(fits):
    exact, sparse = fits
    assert set(exact.sites) == set(sparse.sites) == {"beta", "u"}
    here, there = (_at_new_rows(f, lambda f: f.components) for f in fits)
    assert set(here) == set(there) == {"f", "beta", "u", "total"}
    pairs = [(exact.sites[k], sparse.sites[k]) for k in exact.sites]
    pairs += [(here[k], there[k]) for k in here]
    new = np.linspace(0.5, 5.5, 5)  # beyond the data jitter counts for more
    pairs.append((exact.posterior(new), sparse.posterior(new)))
    for p, q in pairs:
        np.testing.assert_allclose(q.mean, p.mean, atol=1e-6)
        np.testing.assert_allclose(q.variance, p.variance, atol=1e-6)


@pytest.mark.slow
def test_a_saved_fit_answers_by_part(fits, tmp_path):
    _, sparse = fits
    back = pg.load(sparse.save(tmp_path / "fit.zip"), model)
    here, there = (_at_new_rows(f, lambda f: f.components) for f in (sparse, back))
    for k in here:
        np.testing.assert_allclose(there[k].mean, here[k].mean, atol=1e-12)
    np.testing.assert_allclose(back.sites["u"].mean, sparse.sites["u"].mean, atol=1e-12)


@pytest.mark.slow
def test_a_wide_prior_predictive_does_not_stall_the_hyperparameters():
    X, W, group, eta, rng = data()
    y = rng.poisson(np.exp(0.5 * np.sin(X)))  # no groups
    truth = pg.fit(model, pg.VI(), 0, X, W, group, y=y, counts=True)
    method = pg.SVGP(num_inducing=20, train_inducing=False, max_steps=600)
    sparse = pg.fit(model, method, 0, X, W, group, y=y, counts=True)
    assert sparse.log_evidence > truth.log_evidence - 0.1


def test_a_level_that_the_model_does_not_have_is_refused():
    X, W, group, eta, _ = data()
    group[3] = GROUPS
    method = pg.SVGP(hyper=FIXED, num_inducing=10, batch_size=10, max_steps=5)
    with pytest.raises(pg.DataError, match="level"):
        pg.fit(model, method, 0, X, W, group, y=eta)


def test_a_function_in_another_order_than_its_inputs_is_refused():
    """Of the row's weights alone it could not be told from f; all data stand in one batch."""
    X, _, group, eta, _ = data()

    def reversed_rows(X, group, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("groups", GROUPS):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[::-1] + u[group], 0.3), obs=y)

    with pytest.raises(
        pg.NotPointwiseError, match=r"other rows than its own \(test_sparse_effects.py, line"
    ):
        pg.fit(reversed_rows, pg.SVGP(num_inducing=5, max_steps=2), 0, X, group, y=eta)


@pytest.mark.slow
def test_inducing_variables_of_a_fit_can_be_given_again(fits):
    X, W, group, eta, _ = data()
    _, sparse = fits
    method = pg.SVGP(hyper=FIXED, inducing=sparse.inducing, train_inducing=False, max_steps=40)
    again = pg.fit(model, method, 0, X, W, group, y=eta)
    np.testing.assert_allclose(again.inducing.Z, X)


def _own(X, group, y=None):
    """Three classes, a level and effects of groups in the first, and one of each row there."""
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    first = numpyro.sample("level", dist.Normal(0.0, 1.0)) + f[0]
    if group is not None:
        with numpyro.plate("groups", GROUPS):
            first = first + numpyro.sample("u", dist.Normal(0.0, 1.0))[group]
    with numpyro.plate("data", X.shape[0]):
        first = first + numpyro.sample("e", dist.Normal(0.0, 0.5))
        logits = jnp.stack([first, f[1], f[2]], -1)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def _classes(X, group, y=None):
    """Three classes, an effect of each group in each."""
    spread = numpyro.sample("spread", dist.LogNormal(-1.0, 0.3))
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([3, GROUPS]).to_event(2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=(f + spread * v[:, group]).T), obs=y)


@pytest.mark.slow
def test_a_single_value_that_is_not_integrated_is_told():
    X, *_, rng = data()
    with pytest.warns(UserWarning, match=r"SVGP\(\) takes \['level'\] as hyperparameters"):
        method = pg.SVGP(num_inducing=8, max_steps=2)
        fit = pg.fit(_own, method, 0, X, None, y=rng.integers(0, 3, N), throw=False)
    assert set(fit.hyper) == {"level"} and not fit.sites


def test_effects_that_would_be_maximised_are_refused():
    X, _, group, _, rng = data()
    y = rng.integers(0, 3, N)
    several = r"maximise \['u'\].*\['e'\] are per datum, which sees several.*AutoNormal"
    with pytest.raises(pg.ModelError, match=several):
        pg.fit(_own, pg.SVGP(num_inducing=8, max_steps=2), 0, X, group, y=y)


def test_a_q_of_each_datum_that_is_asked_for_is_not_integrated_away():
    X, W, group, eta, rng = data()

    def rows(X, group, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("groups", GROUPS):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            e = numpyro.sample("e", dist.Normal(0.0, 0.5))
            numpyro.sample("y", dist.Poisson(jnp.exp(f + u[group] + e)), obs=y)

    method = pg.SVGP(num_inducing=8, max_steps=2, layers=pg.Layers(latents=pg.Free()))
    with pytest.raises(pg.ModelError, match=r"maximise \['u'\].*\['e'\].*as Layers"):
        pg.fit(rows, method, 0, X, group, y=rng.poisson(np.exp(eta)))


@pytest.mark.slow
def test_what_the_refusal_names_fits():
    """Laplace's method, and a guide."""
    X, _, group, _, rng = data()
    y = rng.integers(0, 3, N)
    local = pg.fit(_own, pg.Laplace(), 0, X, group, y=y)
    assert local.result == "converged" and local.sites["u"].mean.shape == (GROUPS,)
    guided = pg.SVGP(hyper=AutoNormal, num_inducing=6, max_steps=30)
    with pytest.warns(UserWarning, match="as hyperparameters"):
        fit = pg.fit(_own, guided, 0, X, group, y=y, throw=False)
    assert fit.hyper["u"].shape[1:] == (GROUPS,)
    assert fit.predict(X[:2], group[:2]).probs.shape == (2, 3)


@pytest.mark.slow
def test_effects_are_held_by_numpy_arrays():
    X, _, group, _, rng = data()
    held = pg.Fixed({"spread": 0.4, "v": np.zeros((3, GROUPS))})
    fixed = pg.SVGP(hyper=held, num_inducing=6, max_steps=5)
    fit = pg.fit(_classes, fixed, 0, X, group, y=rng.integers(0, 3, N), throw=False)
    assert np.isfinite(fit.log_evidence) and set(fit.hyper) == {"spread", "v"}


@pytest.mark.parametrize(
    "options, match",
    [
        ({"inducing": {"f": np.linspace(0, 6, 5), "u": np.zeros(5)}}, r"entries for \['u'\]"),
    ],
)
def test_options_that_no_effect_takes_are_refused(options, match):
    X, W, group, eta, _ = data()
    with pytest.raises(pg.DataError, match=match):
        pg.fit(model, pg.SVGP(hyper=FIXED, max_steps=2, **options), 0, X, W, group, y=eta)
