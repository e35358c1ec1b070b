"""Checks of what a method adds: the mode over hyperparameters, mixtures over draws, sparse
posteriors.
"""

import numpy as np
import property_checks as check
import second_route as route
from generated_problem import Problem

import ppl_gp as pg


def check_mode(spec, restarts):
    """MAP's evidence is the second route's at its hyperparameters, no slope is left there, and
    restarts do not lose. Effects count as hyperparameters here: `test_predictor.py` integrates.
    """
    problem = Problem(spec)
    values = []
    for num in (1, restarts):
        method = check.METHODS[spec.method](hyper=pg.MAP(restarts=num), integrate=())
        fit = check.fit_of(problem, method)
        at_mode = {k: np.asarray(v, float) for k, v in fit.hyper.items()}
        assert set(at_mode) == set(problem.hyper)
        expected = check.posterior_of(problem.at(at_mode)).log_evidence
        check.close(fit.log_evidence, expected, spec, "log evidence at the mode")
        slopes = slopes_at(problem, at_mode)
        assert np.max(np.abs(slopes)) < 0.01, f"slopes of log evidence + log prior, {slopes}"
        values.append(log_posterior(problem, at_mode))
    assert values[1] > values[0] - 1e-4


def log_posterior(problem, hyper):
    """log evidence + log declared priors, by the second route, nats."""
    there = problem.at(hyper)
    return check.posterior_of(there).log_evidence + there.log_prior()


def slopes_at(problem, hyper, step=1e-4):
    """d log posterior / d log(entry), of effects / d entry, of every entry of every site, by
    central differences.
    """
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
    """At each draw f* is N(K* K^-1 f, ...): moments of the mixture over draws, and its log
    density.
    """
    problem = Problem(spec)
    fit = check.fit_of(problem, method, throw=False)
    tree = fit.to_datatree().posterior
    draws = {k: np.asarray(tree[k]).reshape(-1, *tree[k].shape[2:]) for k in ("f", *problem.hyper)}
    for M in spec.rows:
        rows = check.rows_of(spec, M)
        found = check.predicted(problem, fit, rows)
        parts = [
            _at_draw(problem, {k: v[i] for k, v in draws.items()}, rows)
            for i in range(len(draws["f"]))
        ]
        mean, variance, density, first, second = (np.stack(p) for p in zip(*parts, strict=True))
        same = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(found.f_mean, mean.mean(0), **same)
        np.testing.assert_allclose(found.f_variance, variance.mean(0) + mean.var(0), **same)
        np.testing.assert_allclose(
            check.site_y(spec, found.mean), problem.to_site(first.mean(0)), **same
        )
        total = problem.to_site(second.mean(0) + first.var(0))
        np.testing.assert_allclose(check.site_y(spec, found.variance), total, **same)
        expected = np.log(np.mean(np.exp(density), 0))
        np.testing.assert_allclose(check.scored(problem, fit, rows), expected, **same)


def _at_draw(problem, draw, rows):
    there = problem.at(draw)
    point = route.Gaussian(draw["f"], np.zeros((problem.spec.num,) * 2), 0.0)
    mean, variance = check.at_new_rows(there, point, rows)
    first, second = check.integrated_moments(there, rows, mean, variance)
    return mean, variance, check.integrated_density(there, rows, mean, variance), first, second


def check_sparse(problem, fit, q, tolerance=1e-6):
    """A sparse fit whose optimum is known: f is that of q(u), y and log densities integrate the
    likelihood over it.
    """
    for M in check.numbers(problem.spec):
        rows, same = check.rows_of(problem.spec, M), {"rtol": tolerance, "atol": tolerance}
        found = check.predicted(problem, fit, rows)
        mean, variance = check.at_new_rows(problem, q, rows)
        np.testing.assert_allclose(found.f_mean, mean, **same)
        np.testing.assert_allclose(found.f_variance, variance, **same)
        first, second = check.integrated_moments(problem, rows, mean, variance)
        np.testing.assert_allclose(found.mean, problem.to_site(first), **same)
        np.testing.assert_allclose(found.variance, problem.to_site(second), **same)
        expected = check.integrated_density(problem, rows, mean, variance)
        np.testing.assert_allclose(check.scored(problem, fit, rows), expected, **same)
