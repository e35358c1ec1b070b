"""Models of several Gaussian sites under one likelihood: local methods integrate their linear
predictor, against dense formulas.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from predictor_models import (
    NOISE,
    Rows,
    covariance,
    diagonal,
    drawn_terms,
    mean,
    model,
    rows_of,
)
from scipy.stats import multivariate_normal

import ppl_gp as pg

N, M, TAU = 14, 3, 0.7
SEEDS = [pytest.param(s, marks=[pytest.mark.slow] if s > 3 else []) for s in range(40)]


_NONE = dist.Delta(0.0)


class Dense:
    """The Gaussian answer by its formula."""

    def __init__(self, terms, rows: Rows, y):
        self.terms, self.rows = terms, rows
        self.S = self.prior(TAU) + NOISE**2 * np.eye(len(y))
        self.r = np.linalg.solve(self.S, y - mean(terms, rows))
        self.y = y

    def prior(self, tau):
        own = diagonal(self.terms, self.rows, tau)
        return covariance(self.terms, self.rows, self.rows, tau) + np.diag(own)

    def evidence(self, tau):
        S = self.prior(tau) + NOISE**2 * np.eye(len(self.y))
        return multivariate_normal(mean(self.terms, self.rows), S).logpdf(self.y)

    def given(self, part, new: Rows, own=0.0):
        """(mean without the prior's, variance) of what `part` of the terms adds at new rows."""
        C = covariance(part, new, self.rows, TAU)
        prior = np.diag(covariance(part, new, new, TAU)) + own
        return C @ self.r, prior - np.einsum("ij,ji->i", C, np.linalg.solve(self.S, C.T))


@pytest.mark.one_case
@pytest.mark.parametrize("seed", SEEDS)
def test_gaussian_answers_are_the_dense_formula(seed):
    terms, rows, new = drawn_terms(seed), rows_of(N, seed), rows_of(M, 1000 + seed)
    y = np.random.default_rng(seed).normal(size=N)
    dense = Dense(terms, rows, y)

    @jax.jit
    def evidence(tau):
        factors = pg.read(model, *rows, y=y, terms=terms, hyper={"tau": tau})
        return pg.log_evidence(pg.Laplace(), factors)[0]

    value, slope = jax.value_and_grad(evidence)(jnp.asarray(TAU))
    np.testing.assert_allclose(value, dense.evidence(TAU), rtol=1e-8)
    step = 1e-5
    numeric = (dense.evidence(TAU + step) - dense.evidence(TAU - step)) / (2 * step)
    np.testing.assert_allclose(slope, numeric, rtol=1e-5, atol=1e-6)

    fixed = pg.Laplace(hyper=pg.Fixed({"tau": TAU}))
    fit = pg.fit(model, fixed, 0, *rows, y=y, terms=terms)
    np.testing.assert_allclose(fit.log_evidence, value, rtol=1e-10)
    whole = dense.given(terms, new, diagonal(terms, new, TAU))
    parts = fit.components(*new)
    np.testing.assert_allclose(parts["total"].mean, mean(terms, new) + whole[0], atol=1e-8)
    np.testing.assert_allclose(parts["total"].variance, whole[1], atol=1e-8)
    found = fit.predict(*new)
    if set(terms) - {"f", "g", "offset"} or len(terms) - ("offset" in terms) > 1:
        np.testing.assert_allclose(found.f_mean, mean(terms, new) + whole[0], atol=1e-8)
        np.testing.assert_allclose(found.f_variance, whole[1], atol=1e-8)
    else:  # one GP is what `predict` is about, whatever is made of it
        weight, offset = -0.5 if "g" in terms else 1.0, parts.get("offset", _NONE).mean
        np.testing.assert_allclose(weight * found.f_mean + offset, parts["total"].mean, atol=1e-8)
    for name, wanted in {"units_f": "units"}.items() if "units" in terms else ():
        parts[wanted] = parts.pop(name)
    for term in set(terms) - {"offset", "own"}:
        m, v = dense.given((term,), new, diagonal((term,), new, TAU))
        centre = 0.5 if term == "level" else 0.0
        np.testing.assert_allclose(parts[term].mean, centre + m, atol=1e-8, err_msg=term)
        np.testing.assert_allclose(parts[term].variance, v, atol=1e-8, err_msg=term)
    adding = sum(np.asarray(p.mean) for k, p in parts.items() if k != "total")
    np.testing.assert_allclose(parts["total"].mean, adding, atol=1e-8)


def scaled(X, exposure, y=None):
    """Counts of one GP with a coefficient, and an offset, that is not collapsed."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X, mean=lambda x: 0.3 * x))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(scale * f + jnp.log(exposure))), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hyper", [pg.Fixed({"scale": 0.7}), pg.Sample(20, 30, 1)], ids=["fixed", "sampled"]
)
def test_components_of_one_gp_have_its_coefficient_and_offset(hyper):
    rng = np.random.default_rng(0)
    X, exposure, y = rng.normal(size=9), rng.uniform(1.0, 3.0, 9), rng.poisson(2.0, 9)
    fit = pg.fit(scaled, pg.Laplace(hyper=hyper), 0, X, exposure, y=y, throw=False)
    parts, found = fit.components(X[:4], exposure[:4]), fit.predict(X[:4], exposure[:4])
    np.testing.assert_allclose(parts["offset"].mean, np.log(exposure[:4]), atol=1e-12)
    added = parts["f"].mean + parts["offset"].mean
    np.testing.assert_allclose(parts["total"].mean, added, atol=1e-12)
    if isinstance(hyper, pg.Fixed):
        np.testing.assert_allclose(parts["f"].mean, 0.7 * found.f_mean, rtol=1e-10)
        np.testing.assert_allclose(parts["f"].variance, 0.49 * found.f_variance, rtol=1e-10)
        return
    scales, each = np.ravel(fit.hyper["scale"]), []
    for value in scales:
        at = pg.fit(scaled, pg.Laplace(hyper=pg.Fixed({"scale": value})), 0, X, exposure, y=y)
        one = at.predict(X[:4], exposure[:4])
        each.append((value * one.f_mean, value**2 * one.f_variance))
    mean, variance = (np.stack(x) for x in zip(*each, strict=True))
    np.testing.assert_allclose(parts["f"].mean, mean.mean(0), rtol=1e-6)
    total = variance.mean(0) + mean.var(0)
    np.testing.assert_allclose(parts["f"].variance, total, rtol=1e-6)


FEW = ("beta", "u", "level", "v", "offset")  # eight to sixteen unknowns


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, family",
    [
        (pg.Laplace(), "poisson"),
        pytest.param(pg.Laplace(), "normal", marks=pytest.mark.slow),
        pytest.param(pg.EP(), "logit", marks=pytest.mark.slow),
        pytest.param(pg.VI(), "poisson", marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_few_unknowns_cost_as_few_and_answer_as_the_matrix(method, family, monkeypatch):
    rows, new = rows_of(40, 5), rows_of(4, 6)
    rng = np.random.default_rng(5)
    counts, labels = rng.poisson(1.5, 40), rng.integers(0, 2, 40)
    y = {"normal": rng.normal(size=40), "poisson": counts, "logit": labels}[family]

    def answers():
        def evidence(tau):
            factors = pg.read(model, *rows, y=y, terms=FEW, family=family, hyper={"tau": tau})
            return pg.log_evidence(method, factors)[0]

        value, slope = jax.jit(jax.value_and_grad(evidence))(jnp.asarray(TAU))
        fixed = type(method)(hyper=pg.Fixed({"tau": TAU}))
        fit = pg.fit(model, fixed, 0, *rows, y=y, terms=FEW, family=family)
        found = fit.predict(*new)
        parts = [v for p in fit.components(*new).values() for v in (p.mean, p.variance)]
        effects = [v for p in fit.sites.values() for v in (p.mean, p.variance)]
        return value, slope, found.f_mean, found.f_variance, found.mean, *parts, *effects

    few = answers()
    for place in ("local.method", "kept", "infer.hyper.point"):
        module = importlib.import_module(f"ppl_gp.{place}")
        monkeypatch.setattr(module, "covariance_of", lambda prior: prior.covariance_matrix)
    jax.clear_caches()
    for a, b in zip(few, answers(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7)
    jax.clear_caches()


ALL = ("f", "h", "beta", "u", "level", "own", "offset")


@pytest.fixture(scope="module")
def poisson_fit():
    rows = rows_of(N, 11)
    y = np.random.default_rng(11).poisson(1.5, N)
    method = pg.Laplace(hyper=pg.Fixed({"tau": TAU}))
    return pg.fit(model, method, 0, *rows, y=y, terms=ALL, family="poisson")


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 3, N])
def test_a_row_is_answered_alike_whatever_stands_beside_it(poisson_fit, num):
    """Also where M is one, or the number of columns, or of training rows."""
    rows = rows_of(N, 21)
    y = np.random.default_rng(3).poisson(1.5, N)
    whole, scores = poisson_fit.predict(*rows), poisson_fit.log_density(rows[0], y, *rows[1:])
    part = [x[:num] for x in rows]
    found = poisson_fit.predict(*part)
    for name in ("f_mean", "f_variance", "mean", "variance"):
        wanted = getattr(whole, name)[:num]
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-9, err_msg=name)
    scored = poisson_fit.log_density(part[0], y[:num], *part[1:])
    np.testing.assert_allclose(scored, scores[:num], rtol=1e-9)
    for name, term in poisson_fit.components(*part).items():
        other = poisson_fit.components(*rows)[name]
        np.testing.assert_allclose(term.mean, other.mean[:num], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_a_saved_fit_answers_as_before(poisson_fit, tmp_path):
    rows = rows_of(3, 5)
    loaded = pg.load(poisson_fit.save(tmp_path / "fit.ppl"), model)
    found, wanted = loaded.predict(*rows), poisson_fit.predict(*rows)
    for name in ("f_mean", "f_variance", "mean", "variance"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-10)
    parts, again = poisson_fit.components(*rows), loaded.components(*rows)
    for name in parts:
        np.testing.assert_allclose(parts[name].mean, again[name].mean, rtol=1e-10)


@pytest.mark.slow
def test_what_is_integrated_is_chosen_and_told(poisson_fit):
    assert set(poisson_fit.sites) == {"beta", "u", "level"}
    assert set(poisson_fit.posterior) == {"f", "h"}
    rows, y = rows_of(N, 11), np.random.default_rng(11).poisson(1.5, N)
    told = pg.check(model, *rows, y=y, terms=ALL, family="poisson")
    line = next(i.message for i in told.items if i.name == "predictor")
    assert "'beta'" in line and "['tau'] are hyperparameters" in line
    few = pg.Laplace(hyper=pg.Fixed({"tau": TAU, "beta": np.zeros(3)}))
    held = pg.fit(model, few, 0, *rows, y=y, terms=ALL, family="poisson")
    assert set(held.hyper) == {"tau", "beta"} and "beta" not in held.sites
    for name, why in {"tau": "HalfNormal, is not Gaussian", "y": "is no latent site"}.items():
        with pytest.raises(pg.ModelError, match=f"cannot be integrated with the others: .*{why}"):
            pg.fit(model, pg.EP(integrate=(name,)), 0, *rows, y=y, terms=ALL, family="poisson")
    with pytest.raises(pg.DataError, match="integrate="):
        pg.fit(model, pg.EP(integrate="everything"), 0, *rows, y=y, terms=ALL, family="poisson")


def scales(X, y=None):
    """`b` spreads the noise, `c` is the length scale, `d` enters through its square."""
    b, c = (numpyro.sample(k, dist.Normal(0.0, 0.3)) for k in ("b", "c"))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0))
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, jnp.exp(c)), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + a + d**2, jnp.exp(b)), obs=y)


@pytest.mark.slow
def test_what_enters_in_another_way_stays_a_hyperparameter():
    x = np.linspace(-2.0, 2.0, 9)
    fit = pg.fit(scales, pg.Laplace(), 0, x, y=np.sin(x), throw=False)
    assert set(fit.hyper) == {"b", "c", "d"} and set(fit.sites) == {"a"}


def test_rows_that_are_mixed_are_refused():
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.cumsum(f) + b, 1.0), obs=y)

    x = np.linspace(-2.0, 2.0, 9)
    with pytest.raises(pg.NotPointwiseError, match="other rows"):
        pg.fit(model, pg.Laplace(), 0, x, y=np.sin(x))


def with_a_handler(handler):
    def model(X, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        with handler():
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b, 1.0), obs=y)

    return model


@pytest.mark.one_case
@pytest.mark.parametrize(
    "handler",
    [lambda: numpyro.handlers.scale(scale=0.5), lambda: numpyro.handlers.mask(mask=False)],
    ids=["scale", "mask"],
)
def test_a_prior_under_a_handler_is_not_taken_for_the_gaussian_that_it_wraps(handler):
    x = np.linspace(-2.0, 2.0, 6)
    fit = pg.fit(with_a_handler(handler), pg.Laplace(), 0, x, y=np.sin(x), throw=False)
    assert set(fit.hyper) == {"b"} and not fit.sites


def test_a_layer_below_is_not_left_at_its_mean():
    def model(X, y=None):
        h = numpyro.sample("h", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), h))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b, 1.0), obs=y)

    x = np.linspace(-2.0, 2.0, 6)
    with pytest.raises(pg.ModelError, match="fed by another GP"):
        pg.fit(model, pg.Laplace(), 0, x, y=np.sin(x))


@pytest.mark.slow
def test_repeated_places_alone():
    """f[place] of one GP, in another order and repeated: a GP at the rows' own places."""
    table, place = np.linspace(-2.0, 2.0, 5), np.array([3, 0, 3, 1, 4, 4, 2])
    y = np.random.default_rng(0).normal(size=7)

    def by_place(place, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), jnp.asarray(table)))
        with numpyro.plate("data", place.shape[0]):
            numpyro.sample("y", dist.Normal(f[place], 0.5), obs=y)

    fit = pg.fit(by_place, pg.Laplace(), 0, place, y=y)
    S = np.exp(-0.5 * (table[:, None] - table) ** 2) + 1e-8 * np.eye(5)
    exact = multivariate_normal(np.zeros(7), S[np.ix_(place, place)] + 0.25 * np.eye(7)).logpdf(y)
    np.testing.assert_allclose(fit.log_evidence, exact, rtol=1e-9)

    new = np.array([2, 0, 4])
    cross, noisy = S[np.ix_(new, place)], S[np.ix_(place, place)] + 0.25 * np.eye(7)
    mean = cross @ np.linalg.solve(noisy, y)
    variance = 1.0 - np.sum(cross * np.linalg.solve(noisy, cross.T).T, 1)
    found = fit.predict(new)
    np.testing.assert_allclose(found.f_mean, mean, atol=1e-7)
    np.testing.assert_allclose(found.f_variance, variance, atol=1e-7)
    nuts = pg.fit(by_place, pg.NUTS(num_warmup=300, num_samples=1500, num_chains=1), 0, place, y=y)
    np.testing.assert_allclose(nuts.predict(new).mean, mean, atol=4 * 0.6 / 1500**0.5 * 2)


@pytest.mark.slow
def test_a_level_that_the_model_does_not_have_is_named(poisson_fit):
    """JAX would take the nearest index inside."""
    rows = rows_of(4, 9)
    for name, entry in (("group", 4), ("place", 5), ("group", -5)):
        wrong = rows._replace(**{name: np.array([entry, 0, 1, 2])})
        with pytest.raises(pg.DataError, match=f"{name}.*a level that the model does not have"):
            poisson_fit.predict(*wrong)
        one = [x[:1] for x in wrong]
        with pytest.raises(pg.DataError, match="does not have"):
            poisson_fit.predict(*one)
    last = rows._replace(group=np.array([-1, 0, 1, 2]))  # Python's own meaning
    same = rows._replace(group=np.array([3, 0, 1, 2]))
    with pytest.warns(UserWarning, match="group.*-1 is the last level"):
        found = poisson_fit.predict(*last).f_mean
    np.testing.assert_allclose(found, poisson_fit.predict(*same).f_mean)
    train, y = rows_of(N, 11), np.random.default_rng(11).poisson(1.5, N)
    wrong = train._replace(group=train.group + 1)
    with pytest.raises(pg.DataError, match="a level that the model does not have"):
        pg.fit(model, pg.Laplace(), 0, *wrong, y=y, terms=ALL, family="poisson")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", "everything", "obs_mask"])
def test_rows_that_a_mask_leaves_out_do_not_count(kind):
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=8), rng.poisson(2.0, 8)
    seen = np.arange(8) % 3 != 0 if kind != "everything" else np.ones(8, bool)

    def masked(x, y=None, seen=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(0.5, 1.0), x))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        rate = jnp.exp(f + slope * x)
        with numpyro.plate("data", x.shape[0]):
            if kind == "obs_mask":
                numpyro.sample("y", dist.Poisson(rate), obs=y, obs_mask=seen)
            else:
                with numpyro.handlers.mask(mask=True if kind == "everything" else seen):
                    numpyro.sample("y", dist.Poisson(rate), obs=y)

    def whole(x, y=None):
        masked(x, y, jnp.ones(len(x), bool))

    one = pg.fit(masked, pg.Laplace(), 0, x, y=y, seen=seen)
    rows = pg.fit(whole, pg.Laplace(), 0, x[seen], y=y[seen])
    np.testing.assert_allclose(one.log_evidence, rows.log_evidence, atol=1e-7)
    np.testing.assert_allclose(one.sites["slope"].mean, rows.sites["slope"].mean, atol=1e-6)
    new = np.array([0.3, -1.0, 2.0])
    kwargs = {"seen": None} if kind == "obs_mask" else {"seen": np.ones(3, bool)}
    np.testing.assert_allclose(one.predict(new, **kwargs).mean, rows.predict(new).mean, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num", [6, 7, 8])
def test_a_table_of_places_may_have_as_many_rows_as_there_are_data(num):
    rng = np.random.default_rng(1)
    x, idx, table = rng.normal(size=7), rng.integers(0, num, 7), np.linspace(-2.0, 2.0, num)
    y = rng.normal(size=7)

    def model(x, idx, table, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.5, 0.8), table, jitter=1e-8))
        b = numpyro.sample("b", dist.Normal(0, 2))  # integers, as people write them
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f[idx] + b * x, 0.5), obs=y)

    fit = pg.fit(model, pg.Laplace(hyper=pg.Fixed({})), 0, x, idx, table, y=y)
    K = 1.5 * np.exp(-0.5 * (table[:, None] - table) ** 2 / 0.64) + 1e-8 * np.eye(num)
    S = K[np.ix_(idx, idx)] + 4.0 * np.outer(x, x) + 0.25 * np.eye(7)
    exact = multivariate_normal(np.zeros(7), S).logpdf(y)
    np.testing.assert_allclose(fit.log_evidence, exact, rtol=1e-9)
    here = fit.predict(x[:3], idx[:3]).f_mean
    np.testing.assert_allclose(
        here, ((S - 0.25 * np.eye(7)) @ np.linalg.solve(S, y))[:3], atol=1e-7
    )


def levels(x, group, centre, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
    with numpyro.plate("groups", centre.shape[0]):
        u = numpyro.sample("u", dist.Normal(centre, 1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group], 0.5), obs=y)


@pytest.mark.slow
def test_a_prior_mean_that_the_data_have_told_about_is_not_changed_afterwards():
    rng = np.random.default_rng(2)
    x, group, centre = rng.normal(size=8), np.arange(8) % 4, rng.normal(size=4)
    fit = pg.fit(levels, pg.Laplace(hyper=pg.Fixed({})), 0, x, group, centre, y=rng.normal(size=8))
    new, which = np.array([0.2, 1.0]), np.array([1, 3])
    same = fit.predict(new, which, centre).f_mean
    np.testing.assert_allclose(same, fit.predict(new, which).f_mean, rtol=1e-12)
    with pytest.raises(
        pg.DataError, match=r"argument 'centre' is not that of training: entry \[0\]"
    ):
        fit.predict(new, which, centre + 1.0)
    with pytest.raises(pg.DataError, match="argument 'centre' is not that of training"):
        fit.components(new, which, centre=centre + 1.0)


def test_distributions_with_properties_that_numpyro_cannot_compute():
    rng = np.random.default_rng(3)
    x, group, y = rng.normal(size=6), np.arange(6) % 3, rng.normal(size=6)

    def model(x, group, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
        low = dist.LowRankMultivariateNormal(jnp.zeros(3), 0.5 * jnp.ones((3, 1)), jnp.full(3, 0.6))
        u = numpyro.sample("u", low)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f + u[group], 0.5), obs=y)

    assert pg.fit(model, pg.Laplace(), 0, x, group, y=y).result == "converged"
    with pytest.raises(pg.DataError, match="no integers.*astype"):
        pg.fit(model, pg.Laplace(), 0, x, group * 1.0, y=y)
