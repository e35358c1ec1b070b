"""Checks of a fitted `Problem` against NumPy: what each method that takes a model has to get right on any of them."""

import functools

import numpy as np
import second_route as route
from model_generator import JITTER, VARIANCE, Problem, Spec

import ppl_gp as pg

METHODS = {"laplace": pg.Laplace, "ep": pg.EP, "vi": pg.VI}


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


@functools.lru_cache(maxsize=1)
def second_posterior(spec: Spec) -> route.Gaussian:
    """q(f) and the log evidence of the spec's method at the training rows, in NumPy."""
    problem, rows = Problem(spec), np.arange(spec.num)
    K = problem.kernel(rows, rows) + JITTER * np.eye(spec.num)
    q = route.METHODS[spec.method](K, np.zeros(spec.num), problem.log_lik(rows))
    return q._replace(log_evidence=q.log_evidence + problem.shared())


def second_moments(spec: Spec, rows):
    """(mean, variance) of f at rows of the pool, in NumPy."""
    problem, train = Problem(spec), np.arange(spec.num)
    K = problem.kernel(train, train) + JITTER * np.eye(spec.num)
    cross, zeros = problem.kernel(np.asarray(rows), train), np.zeros(spec.num)
    own = np.full(len(rows), VARIANCE + JITTER)
    return route.at_new_rows(second_posterior(spec), K, zeros, cross, own, np.zeros(len(rows)))


def rows_of(spec: Spec, M: int) -> np.ndarray:
    """M rows of the pool, new ones and trained ones by turns; those for a smaller M come first."""
    start = spec.num - 3
    return np.arange(start, start + M)


def neutral(spec: Spec) -> int:
    """A number of rows that is no size of the model."""
    return next(m for m in (4, 7, 5, 6, 8, 10) if m not in spec.sizes)


def tolerance(spec: Spec) -> float:
    """Laplace's mode is exact; EP and VI stop at a tolerance of their own; float32 inputs round."""
    return 2e-3 if spec.inputs == "float32" else {"laplace": 1e-5}.get(spec.method, 2e-4)


def close(a, b, spec, what):
    """Assert that arrays agree to the spec's tolerance, shapes included."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    np.testing.assert_allclose(a, b, rtol=tolerance(spec), atol=tolerance(spec), err_msg=what)


def site_y(spec, value):
    """The entry of site y where a prediction holds several sites."""
    return value["y"] if spec.second in ("keyword", "dict", "tuple") else value


def check_posterior(spec):
    """Log evidence, and f at new rows, are those of the second route."""
    problem, fit = fitted(spec)
    close(fit.log_evidence, second_posterior(spec).log_evidence, spec, "log evidence")
    for M in numbers(spec):
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        mean, variance = second_moments(spec, rows)
        close(found.f_mean, mean, spec, f"f_mean at {M} rows")
        close(found.f_variance, variance, spec, f"f_variance at {M} rows")


def check_predictions(spec):
    """Mean, variance and probabilities of y integrate the likelihood over f on a fine grid."""
    problem, fit = fitted(spec)
    for M in numbers(spec):
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        if spec.factor == "observing":
            assert found.mean is None
            continue
        mean, variance = integrated_moments(problem, rows, found.f_mean, found.f_variance)
        close(site_y(spec, found.mean), problem.to_site(mean), spec, f"mean at {M} rows")
        close(site_y(spec, found.variance), problem.to_site(variance), spec, f"variance at {M} rows")
        check_probabilities(problem, spec, rows, found)


def integrated_moments(problem, rows, f_mean, f_variance):
    """(mean, variance) of y's entries, (rows, R, P), for f_n ~ N(f_mean, f_variance)."""
    nodes, weights = route.on_grid(np.asarray(f_mean), np.asarray(f_variance))
    first, second = problem.moments(rows)(nodes)
    weights = weights[..., None, None]
    mean = np.sum(weights * first, 0)
    return mean, np.sum(weights * (second + (first - mean) ** 2), 0)


def check_probabilities(problem, spec, rows, found):
    """p(y = k) of every outcome, each entry for itself, whatever a mask says."""
    family, probs = problem.family, site_y(spec, found.probs) if found.probs is not None else None
    if family.outcomes is None:
        assert probs is None
        return
    if spec.family == "binomial" and spec.exposure != "none":
        return  # totals differ by row: no common set of outcomes
    shape = (len(rows), problem.R, problem.P)
    nodes, weights = route.on_grid(np.asarray(found.f_mean), np.asarray(found.f_variance))
    eta, e = (nodes + problem.offset(rows))[..., None, None], problem.e[rows][:, None, None]
    terms = [family.log_prob(np.full(shape, k), eta, problem.s, e) for k in range(family.outcomes)]
    expected = [np.sum(weights[..., None, None] * np.exp(t), 0) for t in terms]
    if family.boolean:
        close(probs, problem.to_site(expected[1]), spec, "probs")
    else:
        close(probs, np.stack([problem.to_site(p) for p in expected], -1), spec, "probs")


def check_log_densities(spec):
    """log p(y_n | data) integrates the product of row n's likelihoods over f, scales and penalties left out."""
    problem, fit = fitted(spec)
    for M in numbers(spec):
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        log_lik = problem.log_lik(rows, training=False)
        expected = route.log_expected(log_lik, np.asarray(found.f_mean), np.asarray(found.f_variance))
        close(scored(problem, fit, rows), expected, spec, f"log density at {M} rows")


def numbers(spec) -> tuple[int, ...]:
    """The numbers of new rows to ask for."""
    return spec.rows or (neutral(spec), *spec.sizes)


def check_companions(spec):
    """A row's answers are the same among other rows, in another order and for other numbers of rows, to rounding."""
    problem, fit = fitted(spec)
    M = numbers(spec)[0]
    rows = rows_of(spec, M)
    reference = _by_row(problem, fit, rows)
    for other in (rows[::-1], np.concatenate([rows[:1], np.arange(M - 1)])):
        _same_where_shared(reference, _by_row(problem, fit, other))
    for M in numbers(spec)[1:]:
        _same_where_shared(reference, _by_row(problem, fit, rows_of(spec, M)))


def _by_row(problem, fit, rows):
    """{row: {what: answer}}."""
    found, spec = predicted(problem, fit, rows), problem.spec
    values = {"f_mean": found.f_mean, "f_variance": found.f_variance, "log_density": scored(problem, fit, rows)}
    if found.mean is not None:
        moved = problem.to_site(np.broadcast_to(np.arange(len(rows))[:, None, None], (len(rows), problem.R, problem.P)))
        axis = next(i for i in range(moved.ndim) if len(rows) == moved.shape[i] and np.ptp(moved, i).max() == len(rows) - 1) if len(rows) > 1 else None
        for what in ("mean", "variance", "probs"):
            value = getattr(found, what)
            if value is not None and axis is not None and site_y(spec, value) is not None:
                values[what] = np.moveaxis(np.asarray(site_y(spec, value)), axis, 0)
    return {int(r): {k: np.asarray(v)[i] for k, v in values.items()} for i, r in enumerate(rows)}


def _same_where_shared(a, b):
    shared = set(a) & set(b)
    assert shared
    for row in shared:
        for what in a[row].keys() & b[row].keys():
            np.testing.assert_allclose(b[row][what], a[row][what], rtol=1e-6, atol=1e-8, err_msg=f"{what} of row {row}")
