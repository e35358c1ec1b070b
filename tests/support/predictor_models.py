"""Random models of several Gaussian sites under one likelihood, each with its dense formula in
NumPy.

A term is what a model adds to its predictor, together with its covariance between rows and other
rows. A model is a sum of terms; which ones is a set of names, so that all models are one function.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import ppl_gp as pg

GROUPS, PLACES, COLUMNS = 4, 5, 3
TABLE = np.random.default_rng(7).uniform(-2.0, 2.0, (PLACES, 2))
L = np.array([[0.8, 0.0], [-0.3, 0.5]])  # of an intercept and a slope, in every group
NOISE, JITTER = 0.4, 1e-8


class Rows(NamedTuple):
    """Arguments of a model."""

    X: np.ndarray
    W: np.ndarray
    group: np.ndarray
    place: np.ndarray
    offset: np.ndarray


def rows_of(num: int, seed: int) -> Rows:
    """Rows; columns of W of rank two, some rows twice."""
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(num, COLUMNS))
    W[:, 2] = W[:, 0] - 2.0 * W[:, 1]
    group, place = rng.integers(0, GROUPS, num), rng.integers(0, PLACES, num)
    found = Rows(rng.uniform(-2.0, 2.0, (num, 2)), W, group, place, rng.normal(size=num))
    return Rows(*(np.concatenate([x[:-2], x[:2]]) for x in found))


def rbf(A, B, variance, length):
    A, B = (np.reshape(x, (len(x), -1)) for x in (A, B))
    square = np.sum((A[:, None] - B[None]) ** 2, -1)
    return variance * np.exp(-0.5 * square / length**2)


def _same(a, b):
    return (a[:, None] == b[None]).astype(float)


def _slopes(r, s):
    C, ones = L @ L.T, np.ones
    left, right = np.stack([ones(len(r.X)), r.X[:, 0]], 1), np.stack([ones(len(s.X)), s.X[:, 0]], 1)
    return _same(r.group, s.group) * (left @ C @ right.T)


# {term: covariance between rows r and s, at spread tau}
COVARIANCE = {
    "f": lambda r, s, tau: rbf(r.X[:, :1], s.X[:, :1], 1.3, 0.7),
    "g": lambda r, s, tau: 0.25 * rbf(r.X[:, 1:], s.X[:, 1:], tau**2, 1.1),
    "units": lambda r, s, tau: (r.W[:, :2] @ s.W[:, :2].T) * rbf(r.X, s.X, 0.6, 1.5),
    "h": lambda r, s, tau: (rbf(TABLE, TABLE, 0.9, 1.2) + 9e-9 * np.eye(PLACES))[
        np.ix_(r.place, s.place)
    ],
    "beta": lambda r, s, tau: 4.0 * r.W @ s.W.T,
    "u": lambda r, s, tau: tau**2 * _same(r.group, s.group),
    "level": lambda r, s, tau: np.full((len(r.X), len(s.X)), 2.25),
    "v": lambda r, s, tau: _slopes(r, s),
}
TERMS = (*COVARIANCE, "own", "offset")


def diagonal(terms, rows: Rows, tau) -> np.ndarray:
    """Variances that a row shares with no other."""
    jitter = {"f": 1.3, "g": 0.25 * tau**2, "units": 0.6 * np.sum(rows.W[:, :2] ** 2, 1)}
    own = sum((JITTER * jitter[k] for k in terms if k in jitter), np.zeros(len(rows.X)))
    return own + (0.09 if "own" in terms else 0.0)


def covariance(terms, r: Rows, s: Rows, tau) -> np.ndarray:
    """Of the predictors, without `diagonal`."""
    zero = np.zeros((len(r.X), len(s.X)))
    return sum((COVARIANCE[k](r, s, tau) for k in terms if k in COVARIANCE), zero)


def mean(terms, rows: Rows) -> np.ndarray:
    """Of the predictor under the prior."""
    level = 0.5 if "level" in terms else 0.0
    return level + (rows.offset if "offset" in terms else np.zeros(len(rows.X)))


def model(X, W, group, place, offset, y=None, terms=TERMS, family="normal"):
    """eta is the sum of the terms."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    eta, rbf = jnp.zeros(X.shape[0]), pg.kernels.RBF
    if "f" in terms:
        eta = eta + numpyro.sample("f", pg.GP(rbf(1.3, 0.7), X[:, 0]))
    if "g" in terms:
        eta = eta - 0.5 * numpyro.sample("g", pg.GP(rbf(tau**2, 1.1), X[:, 1:]))
    if "units" in terms:
        with numpyro.plate("units", 2):
            units = numpyro.sample("units_f", pg.GP(rbf(0.6, 1.5), X))
        eta = eta + jnp.sum(W[:, :2].T * units, 0)
    if "h" in terms:
        eta = eta + numpyro.sample("h", pg.GP(rbf(0.9, 1.2), jnp.asarray(TABLE)))[place]
    if "beta" in terms:
        eta = eta + W @ numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([COLUMNS]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.5, 1.5)) if "level" in terms else 0.0
    with numpyro.plate("groups", GROUPS):
        if "u" in terms:
            eta = eta + numpyro.sample("u", dist.Normal(level, tau))[group]
        elif "level" in terms:
            eta = eta + level
        if "v" in terms:
            scale_tril = jnp.asarray(L)
            v = numpyro.sample("v", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale_tril))
            eta = eta + v[group, 0] + v[group, 1] * X[:, 0]
    with numpyro.plate("data", X.shape[0]):
        if "own" in terms:
            eta = eta + numpyro.sample("own", dist.Normal(0.0, 0.3))
        if "offset" in terms:
            eta = eta + offset
        kinds = {
            "normal": lambda: dist.Normal(eta, NOISE),
            "poisson": lambda: dist.Poisson(jnp.exp(eta)),
            "logit": lambda: dist.Bernoulli(logits=eta),
        }
        numpyro.sample("y", kinds[family](), obs=y)


def drawn_terms(seed: int) -> tuple[str, ...]:
    """Some of the terms, and among them one with a covariance."""
    rng = np.random.default_rng(seed)
    chosen = [k for k in TERMS if rng.random() < 0.45]
    return tuple(chosen if set(chosen) & set(COVARIANCE) else [*chosen, "u"])
