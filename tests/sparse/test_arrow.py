"""q(u) with an arrow for its precision: `SVGP` beside a grouping factor of many levels."""

from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg
import ppl_gp.sparse.parts as arrow_parts
from ppl_gp.infer.batches import as_batch
from ppl_gp.infer.svgp.fit import make_fit
from ppl_gp.infer.svgp.look import look_at
from ppl_gp.infer.svgp.prepare import prepare
from ppl_gp.infer.svgp.step import Reached, blend_all, step
from ppl_gp.numerics.arrow import Arrow, joined
from ppl_gp.results import parts
from ppl_gp.sparse.families import DiagonalRoot, NaturalGaussian
from ppl_gp.sparse.parts import (
    ArrowGaussian,
    ArrowVariables,
    LevelColumns,
    LevelRoot,
    PartsVariables,
)
from ppl_gp.sparse.process import explained, explained_jointly, gram, squares

V, U, START, ROWS = 4, 7, 2, 9  # the levels stand among the others
N, GROUPS = 60, 20


def _arrow(seed: int, size: float = 1.0) -> Arrow:
    """A random one, positive definite for a small `size` of its coupling."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(V, V))
    across = size * rng.normal(size=(U, V))
    block, own = A @ A.T + U * np.eye(V), rng.uniform(2, 4, U)
    return Arrow(jnp.asarray(block), jnp.asarray(across), jnp.asarray(own), START)


def _written(a: Arrow):
    """As an array."""
    levels = joined(jnp.diag(a.own), a.across, START, 1)
    others = joined(a.across.T, a.block, START, 1)
    return joined(levels, others, START)


def _columns(seed: int) -> LevelColumns:
    rng = np.random.default_rng(seed)
    few, index = jnp.asarray(rng.normal(size=(V, ROWS))), jnp.asarray(rng.integers(0, U, ROWS))
    return LevelColumns(few, index, jnp.asarray(rng.normal(size=ROWS)), U, START)


def _close(a, b, tol=1e-12):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tol, atol=tol), a, b)


def test_the_algebra_is_that_of_the_matrix():
    a, b = _arrow(0, 0.5), jnp.asarray(np.random.default_rng(1).normal(size=V + U))
    dense, found = _written(a), a.factored()
    S = jnp.linalg.inv(dense)
    pattern = found.inverse
    assert a.shape == dense.shape and a.ndim == 2
    _close(a @ b, dense @ b)
    _close(found.solve(b), S @ b)
    _close(found.half_log_det(), 0.5 * jnp.linalg.slogdet(dense)[1])
    _close(_written(pattern), jnp.where(_written(_arrow(0)) != 0, S, 0.0))
    covariance = pattern.covariance()
    _close(covariance.half_log_det(), -found.half_log_det())
    R = covariance.colour(jnp.eye(V + U))  # a row a draw
    _close(R.T @ R, S)


def test_a_matrix_that_is_not_positive_definite_is_seen():
    a = _arrow(0, 0.5)
    low = Arrow(a.block, a.across, a.own.at[3].set(-1.0), START)
    wide = Arrow(a.block, 10.0 * a.across, a.own, START)
    for bad in (low, wide):
        assert not ArrowGaussian(jnp.zeros(V + U), bad.plus_diagonal(-1.0)).is_proper()
    assert ArrowGaussian(jnp.zeros(V + U), a.plus_diagonal(-1.0)).is_proper()


def test_half_of_a_precision_is_that_of_some_unknowns():
    found = _arrow(0, 0.5).factored()
    S = jnp.linalg.inv(_written(_arrow(0, 0.5)))
    for start, size in ((0, 2), (START, U), (START + U, 2)):
        some = slice(start, start + size)
        half = found.half_of(start, size)
        _close(half.T @ half, S[some, some])


def test_columns_are_those_of_the_array():
    columns, a = _columns(2), _arrow(3, 0.5)
    A = columns.array()
    P = a.factored().inverse.times(-1.0).plus_diagonal(1.0)
    whole = jnp.eye(V + U) - jnp.linalg.inv(_written(a))
    m = jnp.asarray(np.random.default_rng(4).normal(size=(V + U)))
    root = LevelRoot(DiagonalRoot(jnp.full(V, 2.0)), U, START)
    _close(m @ columns, m @ A)
    _close((gram(columns), squares(columns)), (A.T @ A, jnp.sum(A**2, 0)))
    _close(root.whiten(columns).array(), root.whiten(A))
    _close(root.whiten(root.color(A)), A)
    _close(explained_jointly(columns, m, P), A.T @ whole @ A)
    for form in (columns, A):
        W = root.whiten(A)
        _close(explained(root, form, m, P), (m @ W, jnp.sum(W * (whole @ W), 0)))


def test_a_natural_step_is_that_of_the_dense_form():
    rng = np.random.default_rng(5)
    nat1, other = (jnp.asarray(rng.normal(size=V + U)) for _ in range(2))
    nat2 = _arrow(6, 0.5)
    arrow, dense = ArrowGaussian(nat1, nat2), NaturalGaussian(nat1, _written(nat2))
    columns, root = _columns(7), LevelRoot(DiagonalRoot(jnp.ones(V)), U, START)

    def gradient(sites, C, q):
        def value(nudge):
            m, P = q.mean + nudge.mean, q.reduction + nudge.reduction
            mean, square = explained(root, C, m, P)
            return jnp.sum(jnp.sin(mean) - 0.1 * jnp.exp(-square))

        return jax.grad(value)(sites.nudge())

    found = []
    for sites, C in ((arrow, columns), (dense, columns.array())):
        q = sites.whitened()
        target = sites.target(q, gradient(sites, C, q), 0.7)
        gain = sites.expected_gain(q, target, 0.7)
        moved, halved = blend_all({"f": sites}, {"f": target}, 0.3)
        narrow = sites.narrowed(0.3)
        found.append((q.mean, q.kl, gain, moved["f"].nat1, halved, narrow.nat1, target.nat1))
        found[-1] += tuple(
            _written(s.nat2) if s.nat2 is not None and isinstance(s.nat2, Arrow) else s.nat2
            for s in (target, moved["f"], narrow)
        )
    # dense, an entry of the gradient outside of the arrow is zero
    _close(*found)


def _data(num: int = N, groups: int = GROUPS):
    rng = np.random.default_rng(0)
    X, W = np.sort(rng.uniform(0, 6, num)), rng.normal(size=(num, 2))
    group = rng.integers(0, groups, num)
    eta = np.sin(X) + W @ [0.5, -0.3] + 0.6 * rng.normal(size=groups)[group]
    return X, W, group, eta, rng


def model(X, W, group, y=None, binary=True, groups=GROUPS):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("groups", groups):
        u = numpyro.sample("u", dist.Normal(0.2, sd))
    eta = f + W @ beta + u[group]
    with numpyro.plate("data", X.shape[0]):
        shown = dist.Bernoulli(logits=eta) if binary else dist.Normal(eta, 0.3)
        numpyro.sample("y", shown, obs=y)


def _both(monkeypatch, ask):
    """What `ask` says with a q(u) of either form: (arrow, dense)."""
    found = []
    for least, kind in ((GROUPS, ArrowVariables), (10**9, PartsVariables)):
        monkeypatch.setattr(arrow_parts, "MIN_LEVELS", least)
        fit = ask()
        (kept,) = fit.latent.values()
        assert type(kept.inducing) is kind
        found.append(fit)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 20])
def test_a_run_is_that_of_the_dense_form(monkeypatch, batch_size, tmp_path):
    X, W, group, eta, rng = _data()
    y = (rng.uniform(size=N) < 1 / (1 + np.exp(-eta))).astype(float)
    method = pg.SVGP(num_inducing=8, max_steps=8, batch_size=batch_size)
    with pytest.warns(UserWarning) if batch_size is None else nullcontext():
        fits = _both(monkeypatch, lambda: pg.fit(model, method, 0, X, W, group, y=y, throw=False))
    arrow, dense = fits
    _close(arrow.stats["bounds"], dense.stats["bounds"], 1e-9)
    _close(arrow.log_evidence, dense.log_evidence, 1e-9)
    _close(arrow.hyper, dense.hyper, 1e-9)
    if batch_size is None:
        _close(arrow.stats["q_gap"], dense.stats["q_gap"], 1e-9)
    (p,), (q,) = (f.latent.values() for f in fits)
    _close(p.mean, q.mean, 1e-9)
    if batch_size is None:
        _answers_agree(arrow, dense)
        _is_saved_to_the_last_bit(arrow, tmp_path)


def _moments(of: dict):
    return {k: (d.mean, d.variance) for k, d in of.items()}


def _answers_agree(arrow, dense):
    X, W, group, *_ = _data()
    new = (X[:7] + 0.1, W[:7], group[:7])
    _close(*(_moments(f.sites) for f in (arrow, dense)), 1e-9)
    _close(*(_moments(f.components(*new)) for f in (arrow, dense)), 1e-9)
    for name in ("f_mean", "f_variance"):
        _close(*(getattr(f.predict(*new), name) for f in (arrow, dense)), 1e-9)
    for joint in (False, True):
        p, q = (f.posterior(np.linspace(0.0, 6.0, 5), joint=joint) for f in (arrow, dense))
        _close((p.mean, p.variance), (q.mean, q.variance), 1e-9)
    assert arrow.sites["u"].batch_shape == (GROUPS,)


def _is_saved_to_the_last_bit(fit, tmp_path):
    X, W, group, *_ = _data()
    back = pg.load(fit.save(tmp_path / "fit.zip"), model)
    assert type(next(iter(back.latent.values())).inducing) is ArrowVariables
    here, there = (jax.tree.leaves(f.latent) for f in (fit, back))
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a, b)
    _close(*(_moments(f.components(X[:3], W[:3], group[:3])) for f in (fit, back)), 1e-12)


@pytest.mark.slow
def test_gaussian_noise_and_inducing_points_at_the_data_are_exact(monkeypatch):
    """The bound is the dense formula's evidence; marginals, and the covariance of joint draws."""
    monkeypatch.setattr(arrow_parts, "MIN_LEVELS", GROUPS)
    X, W, group, eta, rng = _data(30)
    y, fixed = eta + 0.3 * rng.normal(size=30), pg.Fixed({"sd": 0.7})
    method = pg.SVGP(hyper=fixed, inducing=X, train_inducing=False, max_steps=12)
    exact = pg.fit(model, pg.Laplace(hyper=fixed), 0, X, W, group, y=y, binary=False)
    sparse = pg.fit(model, method, 0, X, W, group, y=y, binary=False)
    (kept,) = sparse.latent.values()
    assert isinstance(kept.inducing, ArrowVariables)
    np.testing.assert_allclose(sparse.log_evidence, exact.log_evidence, atol=1e-5)
    _close(*(_moments(f.sites) for f in (sparse, exact)), 1e-5)
    _draws_agree(sparse, exact)


def _draws_agree(sparse, exact):
    """4000 joint draws of all sites: their covariance is that of the dense formula's draws."""
    found = []
    for fit in (sparse, exact):
        drawn = fit.to_datatree(num_draws=4000).posterior
        columns = [np.asarray(drawn[k])[0] for k in ("u", "beta", "f")]
        found.append(np.cov(np.concatenate(columns, 1).T))
    assert np.abs(found[0] - found[1]).max() < 6.0 * np.abs(found[1]).max() / np.sqrt(4000)


def _two_levels(X, group, other, y=None):
    """Each row sees two groups."""
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("groups", GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, 0.7))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + u[group] - u[other], 0.3), obs=y)


@pytest.mark.slow
def test_rows_that_see_two_levels_take_the_dense_form(monkeypatch):
    monkeypatch.setattr(arrow_parts, "MIN_LEVELS", GROUPS)
    X, _, group, eta, rng = _data(30)
    method = pg.SVGP(num_inducing=5, train_inducing=False, max_steps=3)
    fit = pg.fit(_two_levels, method, 0, X, group, group[::-1].copy(), y=eta, throw=False)
    (kept,) = fit.latent.values()
    assert type(kept.inducing) is PartsVariables and set(fit.sites) == {"u"}


def _sizes(jaxpr):
    """Of all arrays of a jaxpr and of those within it."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from _sizes(inner)


def _largest(function, *args) -> int:
    jaxpr, *_ = eqx.filter_make_jaxpr(function)(*args)
    return max(_sizes(jaxpr.jaxpr))


def _many(num: int, groups: int):
    X, W, group, eta, rng = _data(num, groups)
    return X, W, group, (rng.logistic(size=num) < eta).astype(float)


@pytest.mark.slow
def test_a_step_and_its_answers_make_no_square_of_many_levels():
    num, groups = 230, arrow_parts.MIN_LEVELS
    X, W, group, y = _many(num, groups)
    method = pg.SVGP(num_inducing=5, inducing="subset", batch_size=50)
    given = {"y": y, "groups": groups}
    subject = look_at(method, model, (X, W, group), given, 0)
    begun = prepare(method, subject, jax.random.key(0), 0)
    batch = as_batch(subject.first, jax.random.key(1))
    assert _largest(step, begun.problem, begun.state, batch) < groups**2 / 4
    ended = Reached(begun.state, np.zeros(1), pg.Result.completed)
    fit = make_fit(begun, ended, None, {}, jax.random.key(2))
    answers = lambda draws: parts._effects(fit.model, draws, fit.args, fit.kwargs)  # noqa: E731
    assert _largest(answers, fit.draws) < groups**2 / 4
    found = fit.sites["u"]
    _close(
        (found.mean, found.variance),
        (jnp.full(groups, 0.2), jnp.full(groups, fit.hyper["sd"] ** 2)),
    )


def _grouped(W, group, y=None, groups=GROUPS):
    """No GP."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", groups):
        u = numpyro.sample("u", dist.Normal(level, 0.7))
    with numpyro.plate("data", W.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=W @ beta + u[group]), obs=y)


@pytest.mark.slow
def test_sites_of_many_levels_by_a_local_method_make_no_square():
    """Effects about a level that is integrated too, against the inverse of the joint Hessian."""
    num, groups = 230, 200
    _, W, group, y = _many(num, groups)
    fit = pg.fit(_grouped, pg.Laplace(), 0, W, group, y=y, groups=groups)
    answers = lambda draws: parts._effects(fit.model, draws, fit.args, fit.kwargs)  # noqa: E731
    assert _largest(answers, fit.draws) < groups**2 / 4
    F = np.c_[W * 2.0, np.ones(num), 0.7 * (group[:, None] == np.arange(groups))]
    w = np.zeros(3 + groups)
    for _ in range(30):
        p = 1.0 / (1.0 + np.exp(-F @ w))
        S = np.linalg.inv(np.eye(len(w)) + F.T @ ((p * (1 - p))[:, None] * F))
        w = w + S @ (F.T @ (y - p) - w)
    D = np.c_[np.zeros((groups, 2)), np.ones(groups), 0.7 * np.eye(groups)]
    _close(fit.sites["u"].mean, D @ w, 1e-6)
    _close(fit.sites["u"].variance, np.sum((D @ S) * D, 1), 1e-6)
    _close(fit.sites["level"].variance, S[2, 2], 1e-6)
    assert fit.components(W[:3], group[:3], groups=groups)["u"].mean.shape == (3,)
