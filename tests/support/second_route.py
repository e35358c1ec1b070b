"""Laplace, EP and VI in NumPy for small N: dense matrices, derivatives by complex steps, integrals
on fine grids.

Nothing of the library is used. `log_lik` maps f (..., N), real or complex, to log p(y_n | f_n)
(..., N), nats.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

GRID = np.linspace(-12.0, 12.0, 2401)


class Gaussian(NamedTuple):
    """q(f) as N(mean, covariance), and the log evidence that comes with it, nats."""

    mean: np.ndarray
    covariance: np.ndarray
    log_evidence: float


def slope(log_lik, f):
    """d log p / d f by a complex step, to rounding."""
    return np.imag(log_lik(f + 1e-30j)) / 1e-30


def curvature(log_lik, f, step=1e-4):
    """d^2 log p / d f^2 by central differences of the exact slope, fourth order."""
    far, near = (slope(log_lik, f + k * step) - slope(log_lik, f - k * step) for k in (2, 1))
    return (8 * near - far) / (12 * step)


def laplace(K, mean, log_lik) -> Gaussian:
    """The Gaussian at the mode: BFGS in whitened coordinates, then Newton steps to rounding."""
    L = np.linalg.cholesky(K)

    def negative(v):
        f = mean + L @ v
        return 0.5 * v @ v - np.sum(log_lik(f)), v - L.T @ slope(log_lik, f)

    v = minimize(negative, np.zeros(len(mean)), jac=True, method="BFGS", options={"gtol": 1e-7}).x
    for _ in range(5):
        v = v - np.linalg.solve(_whitened_precision(L, log_lik, mean + L @ v), negative(v)[1])
    f = mean + L @ v
    B = _whitened_precision(L, log_lik, f)
    log_z = np.sum(log_lik(f)) - 0.5 * v @ v - 0.5 * np.linalg.slogdet(B)[1]
    return Gaussian(f, L @ np.linalg.solve(B, L.T), log_z)


def _whitened_precision(L, log_lik, f):
    return np.eye(len(f)) - L.T @ (curvature(log_lik, f)[:, None] * L)


def ep(K, mean, log_lik, sweeps=400, damping=0.5) -> Gaussian:
    """Parallel expectation propagation (Rasmussen & Williams 3.6), its tilted moments on a grid."""
    nu, tau = np.zeros(len(mean)), np.zeros(len(mean))
    for _ in range(sweeps):
        q = _with_sites(K, mean, nu, tau)
        v = 1 / (1 / np.diag(q.covariance) - tau)
        m = v * (q.mean / np.diag(q.covariance) - nu)
        log_norm, first, second = tilted(log_lik, m, v)
        new_tau, new_nu = 1 / second - 1 / v, first / second - m / v
        change = np.max(np.abs(new_tau - tau)) + np.max(np.abs(new_nu - nu))
        if change < 1e-10:
            break
        tau, nu = tau + damping * (new_tau - tau), nu + damping * (new_nu - nu)
    assert change < 1e-6, "the second route's EP did not converge"
    return q._replace(log_evidence=q.log_evidence + np.sum(log_norm - _site_mass(m, v, nu, tau)))


def vi(K, mean, log_lik, steps=400, damping=0.5) -> Gaussian:
    """The Gaussian that maximises the evidence lower bound: Opper & Archambeau's fixed point,
    damped.
    """
    nu, tau = np.zeros(len(mean)), np.zeros(len(mean))
    for _ in range(steps):
        q = _with_sites(K, mean, nu, tau)
        sd = np.sqrt(np.diag(q.covariance))
        first = expected(lambda f: slope(log_lik, f), q.mean, sd**2)  # noqa: B023 - used at once
        second = expected(lambda f: (f - q.mean) / sd**2 * slope(log_lik, f), q.mean, sd**2)  # noqa: B023 - used at once
        new_tau, new_nu = -second, first - second * q.mean
        change = np.max(np.abs(new_tau - tau)) + np.max(np.abs(new_nu - nu))
        if change < 1e-10:
            break
        tau, nu = tau + damping * (new_tau - tau), nu + damping * (new_nu - nu)
    assert change < 1e-6, "the second route's VI did not converge"
    log_ratio = np.linalg.slogdet(K)[1] - np.linalg.slogdet(q.covariance)[1]
    solved = np.linalg.solve(K, np.column_stack([q.covariance, q.mean - mean]))
    kl = 0.5 * (np.trace(solved[:, :-1]) + (q.mean - mean) @ solved[:, -1] - len(mean) + log_ratio)
    return q._replace(log_evidence=np.sum(expected(log_lik, q.mean, sd**2)) - kl)


def _with_sites(K, mean, nu, tau) -> Gaussian:
    """N(f; mean, K) prod exp(nu f - tau f^2 / 2), with the log of its integral."""
    B = np.eye(len(mean)) + K * tau
    covariance = np.linalg.solve(B, K)
    covariance = 0.5 * (covariance + covariance.T)
    centred = nu - tau * mean
    log_mass = nu @ mean - 0.5 * mean @ (tau * mean) + 0.5 * centred @ covariance @ centred
    return Gaussian(
        mean + covariance @ centred, covariance, log_mass - 0.5 * np.linalg.slogdet(B)[1]
    )


def _site_mass(m, v, nu, tau):
    """log of the integral of N(f; m, v) exp(nu f - tau f^2 / 2), one dimension each."""
    return (m * nu + 0.5 * nu**2 * v - 0.5 * tau * m**2) / (1 + tau * v) - 0.5 * np.log1p(tau * v)


def on_grid(m, v):
    """(nodes (G, N), weights (G, 1)) of N(m, v)."""
    weights = np.exp(-0.5 * GRID**2)
    return m + np.sqrt(v) * GRID[:, None], (weights / weights.sum())[:, None]


def expected(g, m, v):
    """E[g(f)] under independent f_n ~ N(m_n, v_n), (N,)."""
    nodes, weights = on_grid(m, v)
    return np.sum(np.where(weights > 0, weights * g(nodes), 0.0), 0)


def log_expected(log_g, m, v):
    """log E[exp log_g(f)], (N,), nats."""
    nodes, weights = on_grid(m, v)
    values = log_g(nodes)
    top = values.max(0)
    return top + np.log(np.sum(weights * np.exp(values - top), 0))


def tilted(log_lik, m, v):
    """(log Z, mean, variance) of N(f; m, v) p(y | f), (N,) each."""
    nodes, weights = on_grid(m, v)
    log_w = np.log(weights) + log_lik(nodes)
    log_z = log_w.max(0) + np.log(np.sum(np.exp(log_w - log_w.max(0)), 0))
    p = np.exp(log_w - log_z)
    mean = np.sum(p * nodes, 0)
    return log_z, mean, np.sum(p * (nodes - mean) ** 2, 0)


def at_new_rows(q: Gaussian, K, mean, K_cross, k_new, mean_new):
    """(mean, variance) of f at M new rows, from q at the training rows. K_cross (M, N), k_new
    (M,).
    """
    A = cho_solve(cho_factor(K), K_cross.T).T
    return mean_new + A @ (q.mean - mean), k_new + np.sum((A @ (q.covariance - K)) * A, 1)


METHODS = {"laplace": laplace, "ep": ep, "vi": vi}
