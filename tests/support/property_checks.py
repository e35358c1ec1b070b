"""Checks of a fitted `Problem` against NumPy: what each method that takes a model has to get right
on any of them.
"""

import functools

import numpy as np
import second_route as route
from generated_problem import JITTER, Problem
from model_generator import ROWS_SECOND, Spec

import ppl_gp as pg

METHODS = {"laplace": pg.Laplace, "ep": pg.EP, "vi": pg.VI}
# Laplace's mode is found to rounding; EP and VI stop at tolerances of their own; float32 inputs
# round.
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
    return pg.fit(
        problem.model, method, 0, *args, *more, y=y, **row_wise, **kwargs, **observed, **options
    )


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
    """M rows of the pool, the last of the trained ones and then new ones; those for a smaller M
    come first.
    """
    return np.arange(spec.num - 2, spec.num - 2 + M)


def numbers(spec) -> tuple[int, ...]:
    """The numbers of new rows to ask for: the spec's own, else one that is no size of the model,
    and each that is.
    """
    return spec.rows or (neutral(spec), *spec.sizes)


def neutral(spec) -> int:
    """A number of rows that is no size of the model."""
    return next(m for m in (4, 7, 5, 6, 8, 10) if m not in spec.sizes)


# The second route.


@functools.lru_cache(maxsize=1)
def second_posterior(spec: Spec) -> route.Gaussian:
    """q(f) and the log evidence of the spec's method, in NumPy."""
    return posterior_of(Problem(spec))


def posterior_of(problem: Problem) -> route.Gaussian:
    """q(f) and the log evidence of the method of the problem's spec at the problem's
    hyperparameters, in NumPy.
    """
    rows = np.arange(problem.spec.num)
    q = route.METHODS[problem.spec.method](
        prior_of(problem), np.zeros(len(rows)), problem.log_lik(rows)
    )
    return q._replace(log_evidence=q.log_evidence + problem.shared())


def prior_of(problem):
    """The prior covariance at the training rows, (N, N)."""
    rows = np.arange(problem.spec.num)
    return problem.kernel(rows, rows) + JITTER * np.eye(len(rows))


def inducing_posterior_of(problem):
    """The optimal q(u) of inducing variables at the training rows under a Gaussian likelihood
    (Titsias 2009, eq. 10), in NumPy: f enters as E[f | u] = k (k + jitter)^-1 u, which is u but for
    the jitter, and where rows lie close together that is seen.
    """
    rows = np.arange(problem.spec.num)
    log_lik, prior, zeros = problem.log_lik(rows), prior_of(problem), np.zeros(len(rows))
    level = route.slope(log_lik, zeros)
    precision = level - route.slope(log_lik, zeros + 1.0)  # of a quadratic: exact
    A = np.linalg.solve(prior, problem.kernel(rows, rows)).T
    S = np.linalg.inv(np.linalg.inv(prior) + A.T @ (precision[:, None] * A))
    return route.Gaussian(S @ A.T @ level, S, float("nan"))


def at_new_rows(problem, q, rows):
    """(mean, variance) of f at rows of the pool, given q at the training rows."""
    cross, zeros = (
        problem.kernel(np.asarray(rows), np.arange(problem.spec.num)),
        np.zeros(problem.spec.num),
    )
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
    """log p(y_n) for f_n ~ N(f_mean, f_variance), (rows,): every entry of row n under one
    integral.
    """
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
        assert isinstance(value, dict), (
            f"two sites are predicted by name, not as {type(value).__name__}"
        )
        return value["y"]
    assert not isinstance(value, dict), (
        f"one site is predicted as an array, not as a dictionary of {list(value)}"
    )
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
            assert found.mean is None, (
                "y is observed by a factor only, so that it has no distribution to predict"
            )
            continue
        mean, variance = integrated_moments(problem, rows, found.f_mean, found.f_variance)
        close(site_y(spec, found.mean), problem.to_site(mean), spec, f"mean at {M} rows")
        close(
            site_y(spec, found.variance), problem.to_site(variance), spec, f"variance at {M} rows"
        )
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
    nodes, weights = route.on_grid(
        np.asarray(found.f_mean, float), np.asarray(found.f_variance, float)
    )
    eta = (nodes + problem.offset(rows))[..., None, None]
    terms = [family.log_prob(np.full(shape, k), eta, problem.s, e) for k in range(family.outcomes)]
    expected = [problem.to_site(np.sum(weights[..., None, None] * np.exp(t), 0)) for t in terms]
    close(
        site_y(spec, found.probs),
        expected[1] if family.boolean else np.stack(expected, -1),
        spec,
        "probs",
    )


def check_log_densities(spec):
    """log p(y_n | data) integrates the product of row n's likelihoods over f; scales and penalties
    do not count.
    """
    problem, fit = fitted(spec)
    for M in numbers(spec):
        rows = rows_of(spec, M)
        found = predicted(problem, fit, rows)
        expected = integrated_density(problem, rows, found.f_mean, found.f_variance)
        close(scored(problem, fit, rows), expected, spec, f"log density at {M} rows")


def check_companions(spec):
    """A row's answers are the same among other rows, in another order and for other numbers of
    rows, to rounding.
    """
    problem, fit = fitted(spec)
    first, *others = numbers(spec)
    rows = rows_of(spec, first)
    reference = by_row(problem, fit, rows)
    other_companions = np.concatenate([rows[:1], np.arange(first - 1)])
    for again in (rows[::-1], other_companions, *(rows_of(spec, M) for M in others)):
        same_where_shared(reference, by_row(problem, fit, again))


def by_row(problem, fit, rows):
    """{row of the pool: {what: answer}}."""
    found, spec = predicted(problem, fit, rows), problem.spec
    values = {
        "f_mean": found.f_mean,
        "f_variance": found.f_variance,
        "log density": scored(problem, fit, rows),
    }
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
            np.testing.assert_allclose(
                b[row][what], a[row][what], rtol=rtol, atol=1e-8, err_msg=f"{what} of row {row}"
            )
