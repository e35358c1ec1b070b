"""Checks of a fitted `Problem` against NumPy: what each method that takes a model has to get right on any of them."""

import functools

import numpy as np
import second_route as route
from generated_problem import JITTER, Problem
from model_generator import ROWS_SECOND, Spec

import ppl_gp as pg

METHODS = {"laplace": pg.Laplace, "ep": pg.EP, "vi": pg.VI}
# Laplace's mode is found to rounding; EP and VI stop at tolerances of their own; float32 inputs round.
TOLERANCE = {"laplace": 1e-5, "ep": 2e-4, "vi": 2e-4, "float32": 2e-3}


@functools.lru_cache(maxsize=1)
def fitted(spec: Spec):
    """(problem, fit) at the problem's own hyperparameters; one at a time is kept."""
    problem = Problem(spec)
    return problem, fit_of(problem, METHODS[spec.method](hyper=pg.Fixed(problem.hyper)))


def fit_of(problem: Problem, method, **options):
    """The problem's model fitted to its first N rows."""
    rows = np.arange(problem.spec.num)
    args, row_wise = problem.arguments(rows)
    more, kwargs = problem.remembered()
    y, observed = problem.observations(rows)
    return pg.fit(problem.model, method, 0, *args, *more, y=y, **row_wise, **kwargs, **observed, **options)


def predicted(problem, fit, rows):
    """`fit.predict` at rows of the pool."""
    args, kwargs = problem.arguments(rows)
    return fit.predict(*args, **kwargs)


def scored(problem, fit, rows, y=None):
    """`fit.log_density` of the pool's observations, or of entries y (rows, R, P), as NumPy."""
    (X, *args), kwargs = problem.arguments(rows)
    observed, more = problem.observations(rows)
    observed = observed if y is None else problem.to_site(y)
    return np.asarray(fit.log_density(X, observed, *args, **kwargs, **more))


# Which rows.


def rows_of(spec: Spec, M: int) -> np.ndarray:
    """M rows of the pool, the last of the trained ones and then new ones; those for a smaller M come first."""
    return np.arange(spec.num - 2, spec.num - 2 + M)


def numbers(spec) -> tuple[int, ...]:
    """The numbers of new rows to ask for: the spec's own, else one that is no size of the model and every size that is."""
    neutral = next(m for m in (4, 7, 5, 6, 8, 10) if m not in spec.sizes)
    return spec.rows or (neutral, *spec.sizes)


# The second route.


@functools.lru_cache(maxsize=1)
def second_posterior(spec: Spec) -> route.Gaussian:
    """q(f) and the log evidence of the spec's method, in NumPy."""
    return posterior_of(Problem(spec))


def posterior_of(problem: Problem) -> route.Gaussian:
    """q(f) and the log evidence of the method of the problem's spec at the problem's hyperparameters, in NumPy."""
    rows = np.arange(problem.spec.num)
    q = route.METHODS[problem.spec.method](prior_of(problem), np.zeros(len(rows)), problem.log_lik(rows))
    return q._replace(log_evidence=q.log_evidence + problem.shared())


def prior_of(problem):
    """The prior covariance at the training rows, (N, N)."""
    rows = np.arange(problem.spec.num)
    return problem.kernel(rows, rows) + JITTER * np.eye(len(rows))


def at_new_rows(problem, q, rows):
    """(mean, variance) of f at rows of the pool, given q at the training rows."""
    cross, zeros = problem.kernel(np.asarray(rows), np.arange(problem.spec.num)), np.zeros(problem.spec.num)
    own = np.full(len(rows), problem.variance + JITTER)
    return route.at_new_rows(q, prior_of(problem), zeros, cross, own, np.zeros(len(rows)))


def integrated_moments(problem, rows, f_mean, f_variance):
    """(mean, variance) of y's entries, (rows, R, P), for f_n ~ N(f_mean, f_variance)."""
    nodes, weights = route.on_grid(np.asarray(f_mean, float), np.asarray(f_variance, float))
    first, second = problem.moments(rows)(nodes)
    weights = weights[..., None, None]
    mean = np.sum(weights * first, 0)
    return mean, np.sum(weights * (second + (first - mean) ** 2), 0)


def integrated_density(problem, rows, f_mean, f_variance):
    """log p(y_n) for f_n ~ N(f_mean, f_variance), (rows,): every entry of row n under one integral."""
    log_lik = problem.log_lik(rows, training=False)
    return route.log_expected(log_lik, np.asarray(f_mean, float), np.asarray(f_variance, float))


# The properties.


def close(a, b, spec, what):
    """Assert that arrays agree to the spec's tolerance, shapes included."""
    assert a is not None, f"{what} is None"
    a, b = np.asarray(a, float), np.asarray(b, float)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    tolerance = TOLERANCE["float32" if spec.inputs == "float32" else spec.method]
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)


def site_y(spec, value):
    """The part of site y in a prediction that may hold two sites."""
    if spec.second in ("keyword", "dict", "tuple"):
        assert isinstance(value, dict), f"two sites are predicted by name, not as {type(value).__name__}"
        return value["y"]
    assert not isinstance(value, dict), f"one site is predicted as an array, not as a dictionary of {list(value)}"
    return value


def check_posterior(spec):
    """Log evidence, and f at new rows, are those of the second route."""
    problem, fit = fitted(spec)
    q = second_posterior(spec)
    close(fit.log_evidence, q.log_evidence, spec, "log evidence")
    for M in numbers(spec):
        found = predicted(problem, fit, rows_of(spec, M))
        mean, variance = at_new_rows(problem, q, rows_of(spec, M))
        close(found.f_mean, mean, spec, f"f_mean at {M} rows")
        close(found.f_variance, variance, spec, f"f_variance at {M} rows")


def check_predictions(spec):
    """Mean, variance and probabilities of y integrate the likelihood over f on a fine grid."""
    problem, fit = fitted(spec)
    for M in numbers(spec):
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        if spec.factor == "observing":
            assert found.mean is None, "y is observed by a factor only, so that it has no distribution to predict"
            continue
        mean, variance = integrated_moments(problem, rows, found.f_mean, found.f_variance)
        close(site_y(spec, found.mean), problem.to_site(mean), spec, f"mean at {M} rows")
        close(site_y(spec, found.variance), problem.to_site(variance), spec, f"variance at {M} rows")
        check_probabilities(problem, found, rows)


def check_probabilities(problem, found, rows):
    """p(y = k) of every outcome, each entry for itself, whatever a mask says."""
    spec, family = problem.spec, problem.family
    if family.outcomes is None:
        assert found.probs is None or site_y(spec, found.probs) is None
        return
    if spec.family == "binomial" and spec.exposure != "none":
        return  # totals are an argument: no set of outcomes is common to all rows
    shape, e = (len(rows), problem.R, problem.P), problem.e[rows][:, None, None]
    nodes, weights = route.on_grid(np.asarray(found.f_mean, float), np.asarray(found.f_variance, float))
    eta = (nodes + problem.offset(rows))[..., None, None]
    terms = [family.log_prob(np.full(shape, k), eta, problem.s, e) for k in range(family.outcomes)]
    expected = [problem.to_site(np.sum(weights[..., None, None] * np.exp(t), 0)) for t in terms]
    close(site_y(spec, found.probs), expected[1] if family.boolean else np.stack(expected, -1), spec, "probs")


def check_log_densities(spec):
    """log p(y_n | data) integrates the product of row n's likelihoods over f; scales and penalties do not count."""
    problem, fit = fitted(spec)
    for M in numbers(spec):
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        expected = integrated_density(problem, rows, found.f_mean, found.f_variance)
        close(scored(problem, fit, rows), expected, spec, f"log density at {M} rows")


def check_companions(spec):
    """A row's answers are the same among other rows, in another order and for other numbers of rows, to rounding."""
    problem, fit = fitted(spec)
    first, *others = numbers(spec)
    rows = rows_of(spec, first)
    reference = by_row(problem, fit, rows)
    for again in (rows[::-1], np.concatenate([rows[:1], np.arange(first - 1)]), *(rows_of(spec, M) for M in others)):
        same_where_shared(reference, by_row(problem, fit, again))


def by_row(problem, fit, rows):
    """{row of the pool: {what: answer}}."""
    found, spec = predicted(problem, fit, rows), problem.spec
    values = {"f_mean": found.f_mean, "f_variance": found.f_variance, "log density": scored(problem, fit, rows)}
    for what in ("mean", "variance", "probs"):
        value = getattr(found, what)
        value = None if value is None else site_y(spec, value)
        if value is not None:
            values[what] = np.moveaxis(np.asarray(value), int(spec.layout in ROWS_SECOND), 0)
    return {int(r): {k: np.asarray(v)[i] for k, v in values.items()} for i, r in enumerate(rows)}


def same_where_shared(a, b, rtol=1e-6):
    """Assert that two results of `by_row` agree at the rows that both have."""
    for row in a.keys() & b.keys():
        assert a[row].keys() == b[row].keys()
        for what in a[row]:
            np.testing.assert_allclose(b[row][what], a[row][what], rtol=rtol, atol=1e-8, err_msg=f"{what} of row {row}")


def check_mode(spec, restarts):
    """MAP's evidence is the second route's at MAP's hyperparameters, its slope there vanishes, and restarts do not lose."""
    problem = Problem(spec)
    values = []
    for num in (1, restarts):
        fit = fit_of(problem, METHODS[spec.method](hyper=pg.MAP(restarts=num)))
        at_mode = {k: np.asarray(v, float) for k, v in fit.hyper.items()}
        close(fit.log_evidence, posterior_of(problem.at(at_mode)).log_evidence, spec, "log evidence at the mode")
        slopes = slopes_at(problem, at_mode)
        assert np.max(np.abs(slopes)) < 0.01, f"slopes of log evidence + log prior, {slopes}"
        values.append(log_posterior(problem, at_mode))
    assert values[1] > values[0] - 1e-4


def log_posterior(problem, hyper):
    """log evidence + log declared priors, by the second route, nats."""
    there = problem.at(hyper)
    return posterior_of(there).log_evidence + there.log_prior()


def slopes_at(problem, hyper, step=1e-4):
    """d log posterior / d log(site), or / d site where it may be negative, by central differences; a list over entries."""
    found = []
    for name, value in hyper.items():
        for i in range(value.size):
            moved = [_moved(value, i, sign * step, name == "b") for sign in (1, -1)]
            high, low = (log_posterior(problem, {**hyper, name: m}) for m in moved)
            found.append((high - low) / (2 * step))
    return found


def _moved(value, i, step, additive):
    flat = np.array(value, float).ravel()
    flat[i] = flat[i] + step if additive else flat[i] * np.exp(step)
    return flat.reshape(np.shape(value))


def check_mixture(spec, method):
    """Draws' answers: at each draw f* is N(K* K^-1 f, ...); moments of the mixture, and its log density by logsumexp."""
    problem = Problem(spec)
    fit = fit_of(problem, method, throw=False)
    tree = fit.to_datatree().posterior
    draws = {k: np.asarray(tree[k]).reshape(-1, *tree[k].shape[2:]) for k in ("f", *problem.hyper)}
    for M in spec.rows:
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        parts = [_at_draw(problem, {k: v[i] for k, v in draws.items()}, rows) for i in range(len(draws["f"]))]
        mean, variance, density, first, second = (np.stack(p) for p in zip(*parts, strict=True))
        same = dict(rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.f_mean, mean.mean(0), **same)
        np.testing.assert_allclose(found.f_variance, variance.mean(0) + mean.var(0), **same)
        np.testing.assert_allclose(site_y(spec, found.mean), problem.to_site(first.mean(0)), **same)
        np.testing.assert_allclose(site_y(spec, found.variance), problem.to_site(second.mean(0) + first.var(0)), **same)
        expected = np.log(np.mean(np.exp(density), 0))
        np.testing.assert_allclose(scored(problem, fit, rows), expected, **same)


def _at_draw(problem, draw, rows):
    there = problem.at(draw)
    point = route.Gaussian(draw["f"], np.zeros((problem.spec.num,) * 2), 0.0)
    mean, variance = at_new_rows(there, point, rows)
    first, second = integrated_moments(there, rows, mean, variance)
    return mean, variance, integrated_density(there, rows, mean, variance), first, second


def check_sparse(problem, fit, q, tolerance=1e-4):
    """A sparse fit that can be exact: f is that of q, y and log densities integrate the likelihood over it."""
    for M in numbers(problem.spec):
        rows, same = rows_of(problem.spec, M), dict(rtol=tolerance, atol=tolerance)
        found = predicted(problem, fit, rows)
        mean, variance = at_new_rows(problem, q, rows)
        np.testing.assert_allclose(found.f_mean, mean, **same)
        np.testing.assert_allclose(found.f_variance, variance, **same)
        first, second = integrated_moments(problem, rows, mean, variance)
        np.testing.assert_allclose(found.mean, problem.to_site(first), **same)
        np.testing.assert_allclose(found.variance, problem.to_site(second), **same)
        expected = integrated_density(problem, rows, mean, variance)
        np.testing.assert_allclose(scored(problem, fit, rows), expected, **same)
