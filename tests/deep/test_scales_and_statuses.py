"""What is accepted has to count: `numpyro.handlers.scale` wherever it may stand, and how a run
ended. Each test fails under an edit of the package that the suite once let through.
"""

from inspect import unwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import test_latent
from labelled_rows import looked_at
from numpyro import handlers

import ppl_gp as pg
from ppl_gp.deep.bound import terms
from ppl_gp.errors import FitError, Result
from ppl_gp.infer.hyper import map as search
from ppl_gp.infer.hyper.restarts import is_flat
from ppl_gp.infer.svgp import step as training
from ppl_gp.mean_field import forms as rows_form
from ppl_gp.results.compare.table import verdict
from ppl_gp.sparse.bound import Batch, Variational
from ppl_gp.sparse.expectation import Expectation
from ppl_gp.sparse.families import FullGaussian
from ppl_gp.sparse.inducing import Points

X = np.linspace(0.0, 7.0, 8)[:, None]
# of a narrow Student t about sin(x), with two outliers
OUTLYING = np.array([0.33, 0.87, -1.18, -0.49, -1.09, -0.95, 2.7, 0.58])


def robust(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 5.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(2.0, f, 0.1), obs=y)


def test_an_improper_cavity_at_the_end_is_a_status_and_raises():
    """Its site is left alone, so that the moments that do match are not those of all sites."""
    with pytest.raises(FitError, match="negative_cavity") as caught:
        pg.fit(robust, pg.EP(hyper=pg.Fixed({})), 0, X, y=OUTLYING)
    assert caught.value.fit.result is Result.negative_cavity
    assert "power" in str(caught.value) and caught.value.help.endswith("#negative_cavity")


def logistic(X, y=None, scale=1.0, repeats=1):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(4.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]), handlers.scale(scale=scale):
        each = dist.Bernoulli(logits=f[:, None] * jnp.ones(repeats)).to_event(1)
        numpyro.sample("y", each, obs=y)


def test_a_scale_is_as_many_rows_under_the_local_bound():
    """Evidence and marginals of every row three times."""
    y = np.array([0, 1, 1, 0, 1, 1, 0, 0])[:, None]
    method = pg.LocalBound(hyper=pg.Fixed({}))
    scaled = pg.fit(logistic, method, 0, X, y=y, scale=3.0)
    rows = pg.fit(logistic, method, 0, X, y=np.repeat(y, 3, 1), repeats=3)
    np.testing.assert_allclose(scaled.log_evidence, rows.log_evidence, rtol=1e-9)
    for name in ("mean", "variance"):
        a, b = (getattr(fit.latent["f"], name) for fit in (scaled, rows))
        np.testing.assert_allclose(a, b, rtol=1e-7)


def annealed(X, y=None, scale=1.0):
    """One latent input in a scaled site."""
    kernel = pg.kernels.RBF(1.2, test_latent.HYPER["lengthscale"])
    with numpyro.plate("data", X.shape[0]), handlers.scale(scale=scale):
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(kernel, jnp.stack([X[:, 0], h], 1)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def test_a_scale_around_a_latent_weighs_its_divergence():
    """With common draws the bounds differ by the KL of h alone, which has a closed form."""
    q = FullGaussian(test_latent.LOC, test_latent.SCALE)
    variational = Variational({"f": Points(test_latent.Z)}, {"f": q}, {"h": test_latent.FREE})

    @jax.jit
    def bound(scale):
        kwargs = {"y": test_latent.Y, "scale": scale}
        batch = Batch((test_latent.X,), kwargs, jnp.ones(5), jax.random.key(1))
        found = [
            terms(annealed, Expectation(), pg.Layers(), test_latent.OF, {}, variational, batch)
        ]
        return found[0].bound

    packed = np.asarray(test_latent.FREE.packed)
    m, log_s = packed[:, 0], packed[:, 1]
    kl = np.sum(0.5 * (np.exp(2 * log_s) + m**2 - 1) - log_s)
    np.testing.assert_allclose(bound(1.0) - bound(5.0), 4.0 * kl, rtol=1e-9)
    assert kl > 0.5


def ended(loss, slope, done):
    nothing, sites = jnp.zeros(1), SimpleNamespace(nat1=jnp.zeros((1, 1)))
    run = search.Run(
        {}, {}, None, sites, nothing, *(jnp.asarray([x]) for x in (loss, slope)), nothing, done
    )
    return search._result(run, 0, bool(is_flat(slope, loss, 1)))


def test_a_search_that_stopped_on_a_slope_has_not_converged():
    """Whatever its solver says of itself."""
    done = jnp.asarray([True])
    assert ended(3.0, 1e-6, done) is Result.converged
    assert ended(3.0, 1.0, done) is Result.max_steps
    assert ended(3.0, 1e-6, ~done) is Result.max_steps
    assert ended(search.UNUSABLE, 0.0, done) is Result.nonfinite


ROW = {
    "method": "ep",
    "result": "converged",
    "log_evidence": -10.3,
    "truth": -10.0,
    "khat": None,
    "mean_distance": None,
}


@pytest.mark.parametrize("truth_se, trusted", [(0.2, True), (0.11, True), (0.05, False)])
def test_a_gap_within_three_standard_errors_is_no_gap(truth_se, trusted):
    said = verdict({**ROW, "truth_se": truth_se}, None, None)
    assert "0.30 nats below" in said
    assert ("right within" in said) is trusted
    assert ("is off by a factor of 1.35" in said) is not trusted  # exp(0.3)


def test_the_optimiser_begins_anew_at_the_end_of_the_warm_up():
    """What it has seen before is forgotten then, and not one step later."""
    free = {"scale": jnp.asarray(0.3)}
    variational = Variational({"f": jnp.asarray([1.0, 2.0])}, {"f": jnp.asarray([0.5])})
    spec = jax.tree.map(lambda _: True, (free, variational))
    gradient = jax.tree.map(lambda x: x + 0.7, (free, variational))
    units, optimiser = {"f": jnp.ones(2)}, optax.adam(0.1)
    problem = SimpleNamespace(
        warm_up=3, noisy=True, units=units, optax=lambda step: optimiser, num_data=10.0
    )
    dirty = jax.tree.map(lambda x: 5.0 * x - 2.0, gradient)
    clean = optimiser.init((free, variational))
    _, used = optimiser.update(dirty, clean, (free, variational))

    def trained(step, seen):
        state = SimpleNamespace(
            free=free,
            variational=variational,
            optimiser=seen,
            step=jnp.asarray(step),
            shrink=jnp.ones(()),
        )
        found = unwrap(training._optimised)(problem, state, spec, gradient)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(found[:2])])

    np.testing.assert_array_equal(trained(3, used), trained(3, clean))
    assert np.all(trained(4, used) != trained(4, clean))
    # hyperparameters and inducing variables wait, q(u) does not
    before = np.concatenate([np.ravel(x) for x in jax.tree.leaves((free, variational))])
    assert list(trained(2, used) == before) == [True, True, True, False]


def normals(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    precision = numpyro.sample("precision", dist.Gamma(1.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0 / jnp.sqrt(precision)), obs=y)


def test_sweeps_are_counted_and_no_more_than_were_asked_for():
    y = np.array([1.0, 2.5, -0.3, 4.0])
    fit = pg.fit(normals, pg.MeanField(max_steps=2), 0, y, throw=False)
    assert fit.result is Result.max_steps
    assert fit.stats["steps"] == len(fit.stats["bounds"]) == 2


def test_a_row_that_was_not_looked_at_is_held_to_the_form_of_the_others():
    """Statistics of rows are solved for at some rows; one row of another density among the rest
    keeps the nodes.
    """
    x = np.random.default_rng(4).normal(size=(60, 1))

    def kind(z_of, X):
        with numpyro.plate("components", 2):
            tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
        odd = jnp.where(X > 3.5, jnp.sin(40.0 * X), 0.0)
        z_of(lambda z: dist.Normal(odd, 1.0 / jnp.sqrt(tau[z])[:, None]))

    structure, _, _ = looked_at(kind, x)
    of = {s: q for q in structure.blocks for s in q.sites}

    def form(x):
        joint = structure.joint._replace(args=(jnp.asarray(x),))
        return rows_form.sufficient(joint, "x", -1, of["z"], of["tau"])

    rng = np.random.default_rng(0)  # as the rows are chosen
    chosen = set(rng.choice(60, 2 * 3 + rows_form.MORE, replace=False).tolist())
    alone = next(n for n in range(60) if n not in chosen)
    odd = x.copy()
    odd[alone] = 4.0
    assert form(x) is not None and form(odd) is None
