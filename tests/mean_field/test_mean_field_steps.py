"""Stochastic steps of mean field: blends of natural parameters, unbiased steps, whole batches as
coordinate ascent, streams, checkpoints and Ctrl-C.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conjugate_families import NAMES, families
from jax import random

import ppl_gp as pg
from models.linear_regression import linear_regression
from models.mixture import mixture
from ppl_gp.infer.probes import first_trace
from ppl_gp.mean_field import batches as stochastic_fit
from ppl_gp.mean_field import batches as stochastic_run
from ppl_gp.mean_field.family import blend
from ppl_gp.mean_field.log_joint import log_joint_of
from ppl_gp.mean_field.stochastic import (
    at_local_optimum,
    joined,
    of_rows,
    row_entropies,
    rows_bound,
    shared_bound,
    shared_step,
    split,
)
from ppl_gp.mean_field.structure import find_structure, start_of
from ppl_gp.mean_field.sweep import bound, sweep, updated
from ppl_gp.quick import quick_jit
from ppl_gp.reading.reading import declare

RNG = np.random.default_rng(11)
ROWS = np.concatenate([RNG.normal(-2, 0.7, (10, 2)), RNG.normal(2, 1.0, (14, 2))])[
    RNG.permutation(24)
]
X = RNG.normal(size=(24, 2))
Y = X @ [1.0, -2.0] + 0.4 * RNG.normal(size=24)


@pytest.mark.one_case
@pytest.mark.parametrize("name", NAMES)
def test_a_blend_is_of_natural_parameters(name):
    """log q of a blend is that blend of the two log q, up to a constant, anywhere."""
    rng = np.random.default_rng(4)
    old, new = families(rng)[name], families(rng)[name]
    z = jax.vmap(old.random_values)(random.split(random.key(1), 8))
    for rate in (0.0, 0.3, 1.0):
        mixed = blend(old, new, rate)
        a, b, found = (np.asarray(jax.vmap(q.log_prob)(z)) for q in (old, new, mixed))
        apart = found - (1.0 - rate) * a - rate * b
        np.testing.assert_allclose(apart, apart[0], rtol=1e-8, atol=1e-8 * np.abs(found).max())
    for end, rate in ((old, 0.0), (new, 1.0)):
        for x, y in zip(jax.tree.leaves(blend(old, new, rate)), jax.tree.leaves(end), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_a_category_that_cannot_be_stays_so():
    q = families(np.random.default_rng(0))["discrete"]
    sure = q.at_eta(np.array([[0.0, -np.inf, -np.inf], [-1.0, -np.inf, -0.5]]).clip(-1e300))
    for rate in (0.0, 0.5, 1.0):
        probs = np.exp(blend(sure, sure, rate).log_probs)
        np.testing.assert_allclose(probs[0], [1.0, 0.0, 0.0])


@pytest.mark.parametrize("name", ["gaussian", "gamma", "discrete", "normal-wishart"])
def test_rows_of_a_factor_add_up(name):
    q = families(np.random.default_rng(5))[name]
    np.testing.assert_allclose(jnp.sum(row_entropies(q, 0)), q.entropy(), rtol=1e-12)
    first = of_rows(q, 0, 1)
    assert first.batch == (1,)
    twice = joined([first, q], 0)
    assert twice.batch == (3,)
    for x, y in zip(jax.tree.leaves(twice), jax.tree.leaves(q), strict=True):
        np.testing.assert_array_equal(x, np.concatenate([y[:1], y]))


def looked_at(model, *args, **kwargs):
    """(The structure of rows, a start, the model's structure) on these arguments."""
    model = declare(model, args, kwargs)
    trace = first_trace(model, args, kwargs)
    structure = find_structure(log_joint_of(model, trace, args, kwargs), trace, None, True)
    return split(structure, trace), start_of({}, structure, trace, random.key(3)), structure


def weighted(parts, weights, **given):
    """With these weights of the rows, of other arguments."""
    return parts._replace(joint=parts.joint._replace(weights=weights, **given))


def deviating(total, y=None):
    """Rows with deviations of their own, under the logistic bound."""
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", total.shape[0]):
        x = numpyro.sample("x", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Binomial(total, logits=b + x), obs=y)


@pytest.mark.slow
def test_rows_under_the_logistic_bound_are_at_its_maximum():
    """One update of them is one step of EM: the bound is that at the q before."""
    total, y = np.full(3, 20), np.array([1, 10, 19])
    parts, q, _ = looked_at(deviating, total, y=y)
    local = [j for j, _ in parts.local]
    assert parts.joint.bounded and len(local) == 1

    @quick_jit
    def twice(parts, q):
        there = at_local_optimum(parts, q)
        return there, sweep(parts.joint, parts.terms, there, local)

    there, further = (jax.tree.leaves(q[local[0]]) for q in twice(parts, q))
    for a, b in zip(there, further, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


@quick_jit
def _targets(parts, q):
    """The maximum of each shared block given the others, of these rows."""
    q = at_local_optimum(parts, q)
    return [updated(parts.joint, parts.terms, q, j).eta() for j in parts.shared()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixture", "regression"])
def test_steps_are_unbiased(kind):
    """The mean of the targets of all batches, in natural parameters, is the target of all rows."""
    if kind == "mixture":
        model, of = mixture, lambda r: ((jnp.asarray(ROWS[r]), 2, 0.7), {})
    else:
        model, of = linear_regression, lambda r: ((jnp.asarray(X[r]),), {"y": jnp.asarray(Y[r])})
    args, kwargs = of(np.arange(24))
    parts, q, _ = looked_at(model, *args, **kwargs)
    whole = _targets(weighted(parts, jnp.ones(24)), q)
    batches = np.arange(24).reshape(4, 6)
    found = []
    for rows in batches:
        a, k = of(rows)
        local = [of_rows(q[j], axis, 6) for j, axis in parts.local]
        here = list(q)
        for (j, _), f in zip(parts.local, local, strict=True):
            here[j] = f
        found.append(_targets(weighted(parts, jnp.full(6, 4.0), args=a, kwargs=k), here))
    mean = jax.tree.map(lambda *x: np.mean(np.stack(x), 0), *found)
    for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)
    spread = jax.tree.map(lambda *x: np.std(np.stack(x), 0).max(), *found)
    assert max(jax.tree.leaves(spread)) > 0.1  # batches differ


@pytest.mark.slow
def test_all_rows_with_a_rate_of_one_are_coordinate_ascent():
    parts, q, structure = looked_at(mixture, jnp.asarray(ROWS), 2, 0.7)
    once, terms = weighted(parts, jnp.ones(24)), structure.terms
    ours = quick_jit(lambda q: at_local_optimum(parts, shared_step(once, q, jnp.asarray(1.0))))
    theirs = quick_jit(lambda q: sweep(structure.joint, terms, q))
    for _ in range(3):
        mine, q = ours(q), theirs(q)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(q), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)
    parted = shared_bound(parts, q) + rows_bound(parts, q)
    np.testing.assert_allclose(parted, bound(structure.joint, terms, q), rtol=1e-12)


@pytest.mark.slow
def test_a_fit_of_all_rows_is_that_without_batches():
    plain = pg.fit(mixture, pg.MeanField(max_steps=6, num_draws=5), 0, ROWS, 2, 0.7, throw=False)
    method = pg.MeanField(batch_size=24, natural_rate=1.0, max_steps=5, num_draws=5)
    steps = pg.fit(mixture, method, 0, ROWS, 2, 0.7)
    assert steps.result == "completed" and steps.factors == plain.factors
    np.testing.assert_allclose(steps.stats["bounds"], plain.stats["bounds"][:5], rtol=1e-9)
    np.testing.assert_allclose(steps.log_evidence, plain.stats["bounds"][5], rtol=1e-9)
    np.testing.assert_allclose(steps.sites["z"].probs, plain.sites["z"].probs, atol=1e-7)


def batches(num, rows=8):
    """Tuples of a mixture's or a regression's arguments, in turn."""
    return [
        {"X": X[i % 24 : i % 24 + rows], "y": Y[i % 24 : i % 24 + rows]}
        for i in range(0, num * rows, rows)
    ]


@pytest.mark.slow
def test_batches_of_a_regression_come_near_the_whole_and_resume(tmp_path, monkeypatch):
    """One fit by arrays, by a stream of the same rows, and in two halves."""
    whole = pg.fit(linear_regression, pg.MeanField(num_draws=5), 0, X, y=Y)
    options = {"num_draws": 5, "max_steps": 300}
    method = pg.MeanField(batch_size=8, **options)
    fit = pg.fit(linear_regression, method, 0, X, y=Y)
    assert fit.result == "completed" and len(fit.stats["bounds"]) == 300
    assert -0.024 < fit.log_evidence - whole.log_evidence <= 1e-9  # 1e-3 nats a datum
    np.testing.assert_allclose(fit.sites["weights"].mean, whole.sites["weights"].mean, atol=0.05)
    # the estimates of the last passes average to the bound
    assert abs(np.mean(fit.stats["bounds"][-60:]) - fit.log_evidence) < 1.0

    checkpoint = pg.Checkpoint(tmp_path, every=50)
    calls, real = [], stochastic_run._step

    def stopping(*args):
        calls.append(1)
        if len(calls) == 130:
            raise KeyboardInterrupt
        return real(*args)

    resumed = pg.MeanField(batch_size=8, checkpoint=checkpoint, **options)
    monkeypatch.setattr(stochastic_run, "_step", stopping)
    half = pg.fit(linear_regression, resumed, 0, X, y=Y)
    assert half.result == "interrupted" and len(half.stats["bounds"]) == 129
    np.testing.assert_array_equal(half.stats["bounds"], fit.stats["bounds"][:129])
    assert np.isfinite(half.log_evidence)
    monkeypatch.setattr(stochastic_run, "_step", real)
    again = pg.fit(linear_regression, resumed, 0, X, y=Y)
    np.testing.assert_array_equal(again.stats["bounds"], fit.stats["bounds"])
    for a, b in zip(jax.tree.leaves(again.blocks), jax.tree.leaves(fit.blocks), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_ctrl_c_while_the_bound_is_summed_keeps_the_steps(monkeypatch):
    """The sum over all data is of what would be said of q, which is whole before it."""

    def stopping(*args):
        raise KeyboardInterrupt

    method = pg.MeanField(batch_size=8, max_steps=20, natural_rate=0.2)
    whole = pg.fit(linear_regression, method, 0, X, y=Y)
    monkeypatch.setattr(stochastic_fit, "over_all_data", stopping)
    fit = pg.fit(linear_regression, method, 0, X, y=Y)
    assert fit.result == "interrupted" and fit.log_evidence is None
    np.testing.assert_array_equal(fit.predict(X).mean, whole.predict(X).mean)


@pytest.mark.slow
def test_a_stream_is_fitted_and_may_end():
    options = {"num_draws": 5, "max_steps": 300}
    stream = pg.Stream(batches(3), num_data=24)
    fit = pg.fit(linear_regression, pg.MeanField(**options), 0, stream)
    whole = pg.fit(linear_regression, pg.MeanField(num_draws=5), 0, X, y=Y)
    assert fit.result == "completed" and fit.stats["first_batch_only"]
    assert -0.024 < fit.log_evidence - whole.log_evidence <= 1e-9
    found = fit.predict(X[:3])
    np.testing.assert_allclose(found.mean, X[:3] @ fit.sites["weights"].mean, rtol=1e-8)
    once = pg.Stream(iter(batches(5)), num_data=24)
    ended = pg.fit(linear_regression, pg.MeanField(**options), 0, once, throw=False)
    assert ended.result == "stream_ended" and len(ended.stats["bounds"]) == 5
    assert ended.log_evidence is None

    def failing():
        yield from batches(2)
        raise OSError("shard 3 is gone")

    with pytest.raises(pg.FitError, match="batch 2 .*OSError: shard 3 is gone") as caught:
        broken = pg.Stream(failing(), num_data=24)
        pg.fit(linear_regression, pg.MeanField(**options), 0, broken)
    assert isinstance(caught.value.__cause__, OSError)
    bad = batches(3)
    bad[2] = {"X": np.full((8, 2), np.nan), "y": Y[:8]}
    stopped = pg.fit(
        linear_regression, pg.MeanField(**options), 0, pg.Stream(iter(bad), 24), throw=False
    )
    assert stopped.result == "nonfinite" and "batch 2" in stopped.stats["bad_batch"]
    assert len(stopped.stats["bounds"]) == 2


@pytest.mark.slow
def test_batches_of_a_mixture_come_near_the_whole():
    centres = RNG.integers(0, 2, 400)
    rows = np.array([[-1.0, -1.0], [1.0, 1.0]])[centres] + 0.3 * RNG.normal(size=(400, 2))
    whole = pg.fit(mixture, pg.MeanField(num_draws=5), 0, rows, 2, 0.7)
    # 60 rows a batch do not divide 400
    method = pg.MeanField(batch_size=60, max_steps=200, num_draws=5)
    fit = pg.fit(mixture, method, 0, rows, 2, 0.7)
    assert fit.sites["z"].probs.shape == (400, 2)
    assert -0.4 < fit.log_evidence - whole.log_evidence <= 1e-6  # 1e-3 nats a datum
    density = fit.log_density(rows[:5])
    np.testing.assert_allclose(density, whole.log_density(rows[:5]), atol=0.2)


def centred(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w * (X[:, 0] - jnp.mean(X[:, 0])), 1.0), obs=y)


def coupled(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def by_their_number(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0 / jnp.sqrt(X.shape[0])))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


@pytest.mark.slow
def test_rows_that_do_not_stand_alone_get_no_batches():
    method = pg.MeanField(batch_size=6)
    with pytest.raises(pg.NotPointwiseError, match="density of 'w' sees the number of rows"):
        pg.fit(by_their_number, method, 0, X, y=Y)
    with pytest.raises(pg.NotPointwiseError, match="density of 'y' sees other rows"):
        pg.fit(centred, method, 0, X, y=Y)
    with pytest.raises(pg.ModelError, match="holds all rows"):
        pg.fit(coupled, method, 0, X, y=Y)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"natural_rate": 1.5}, "natural_rate=1.5"),
        ({"forgetting": 0.5}, "forgetting=0.5"),
        ({"delay": -1.0}, "delay=-1.0"),
    ],
)
def test_bad_steps_are_named(options, match):
    with pytest.raises(pg.DataError, match=match):
        pg.MeanField(**options)


def test_rates_are_those_of_robbins_and_monro():
    method = pg.MeanField(delay=2.0, forgetting=0.75)
    np.testing.assert_allclose([method.rate(0), method.rate(9)], [3.0**-0.75, 12.0**-0.75])
    assert pg.MeanField(natural_rate=lambda t: 1.0 / (1 + t)).rate(3) == 0.25
    with pytest.raises(pg.DataError, match="at step 2"):
        pg.MeanField(natural_rate=lambda t: float(t)).rate(2)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (pg.MeanField(batch_size=6, restarts=2), "restarts=2"),
        (pg.MeanField(batch_size=6, init={"z": np.zeros(24, int)}), "'z'"),
    ],
)
def test_what_batches_cannot_have_is_named(method, match):
    with pytest.raises(pg.DataError, match=match):
        pg.fit(mixture, method, 0, ROWS, 2, 0.7)


RARE = np.zeros(40)
RARE[-4:] = 1.0


def _capped(c, mu):
    return jnp.where(c > 0, jnp.minimum(mu, 0.5), mu)


def _waved(c, mu):
    return mu + c * jnp.sin(mu)  # no step's course depends on c, which hides the sine where zero


def _counted(c, mu):
    return jnp.stack([mu, jnp.tanh(mu)])[c.astype(int)]


@pytest.mark.one_case
@pytest.mark.parametrize("mean", [_capped, _waved, _counted])
@pytest.mark.parametrize("how", ["once", "stream", "arrays"])
def test_every_row_is_held_to_the_proof(mean, how):
    """Rows whose density is not affine are seen in whichever batch they stand."""

    def model(c, y=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", c.shape[0]):
            numpyro.sample("y", dist.Normal(mean(c, mu), 1.0), obs=y)

    y = np.random.default_rng(1).normal(1.0, 1.0, 40)
    parts = [(RARE[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    batch_size, args, kwargs = {
        "once": (None, (pg.Stream(iter(parts), 40),), {}),
        "stream": (None, (pg.Stream(parts, 40),), {}),
        "arrays": (3, (RARE,), {"y": y}),
    }[how]
    method = pg.MeanField(batch_size=batch_size, max_steps=30, num_draws=2)
    with pytest.raises(pg.NotConjugateError, match="'mu' is not conjugate to 'y'"):
        pg.fit(model, method, 0, *args, **kwargs)


@pytest.mark.slow
def test_rows_that_decide_and_stay_conjugate_are_taken():
    def model(c, y=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", c.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.where(c > 0, 2.0 * mu, mu), 1.0), obs=y)

    y = np.random.default_rng(1).normal(1.0, 1.0, 40)
    method = pg.MeanField(batch_size=12, max_steps=300, num_draws=2)  # the last batch is smaller
    fit, whole = pg.fit(model, method, 0, RARE, y=y), pg.fit(model, pg.MeanField(), 0, RARE, y=y)
    assert -0.04 < fit.log_evidence - whole.log_evidence <= 1e-9  # 1e-3 nats a datum
