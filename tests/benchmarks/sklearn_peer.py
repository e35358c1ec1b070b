"""Laplace against scikit-learn's GaussianProcessClassifier: the same kernel, data, start and
criterion (no priors).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

import ppl_gp as pg
from tests.benchmarks.common import Row, evidence_and_gradient, flat, ratio, seconds, two_moons_like


class Size(NamedTuple):
    """Numbers of data, and timings of each evidence (whole fits are timed once)."""

    data: tuple[int, ...]
    repeats: int


FULL, TOY = Size((500, 1000, 2000), 3), Size((20,), 1)


def _peer(X, y, optimizer):
    kernel = ConstantKernel(1.0, (1e-5, 1e5)) * RBF(1.0, (1e-5, 1e5))
    return GaussianProcessClassifier(kernel, optimizer=optimizer).fit(X, y)


def _evidence(n, repeats):
    X, y = two_moons_like(n)
    peer, theta = _peer(X, y, None), np.log([4.0, 1.0])
    ours = evidence_and_gradient(pg.Laplace(), X, y)
    theirs, mine = (
        peer.log_marginal_likelihood(theta, eval_gradient=True)[0],
        float(ours(jnp.asarray(theta))[0][0]),
    )
    assert abs(theirs - mine) < 1e-3 * abs(mine), (theirs, mine)
    a, b = seconds(
        lambda: ours(jnp.asarray(theta)),
        lambda: peer.log_marginal_likelihood(theta, True),
        repeats=repeats,
    )
    what, value = f"Laplace evidence and gradient against scikit-learn, n = {n}", ratio(b, a)
    return Row(what, f"{value:.1f} x faster", "at least 2 x", value, "x faster")


def _fit(n, repeats):
    X, y = two_moons_like(n)
    method = pg.Laplace(hyper=pg.MAP(init={"variance": 1.0, "lengthscale": 1.0}))
    key, found = jax.random.key(0), {}

    def ours():
        fit = pg.fit(flat, method, key, X, y=y)
        found["ours"] = fit.log_evidence
        return fit.latent

    def theirs():
        found["theirs"] = _peer(X, y, "fmin_l_bfgs_b").log_marginal_likelihood_value_

    a, b = seconds(ours, theirs, repeats=repeats)
    gap, value = found["ours"] - found["theirs"], ratio(b, a)
    figure = f"{value:.1f} x faster (log evidence {gap:+.4f} nats to theirs)"
    return Row(
        f"Laplace, whole MAP fit against scikit-learn, n = {n}",
        figure,
        "at least 3 x",
        value,
        "x faster",
    )


def rows(size: Size = FULL) -> Iterator[Row]:
    """Ratios for each number of data."""
    yield from (_evidence(n, size.repeats) for n in size.data)
    yield from (_fit(n, 1) for n in size.data)
