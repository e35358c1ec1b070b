"""Laplace against scikit-learn's GaussianProcessClassifier: the same kernel, data, start and criterion (no priors)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

import ppl_gp as pg
from tests.benchmarks.common import Row, evidence_and_gradient, flat, ratio, seconds, two_moons_like

SIZES = (500, 1000, 2000)


def _peer(X, y, optimizer):
    kernel = ConstantKernel(1.0, (1e-5, 1e5)) * RBF(1.0, (1e-5, 1e5))
    return GaussianProcessClassifier(kernel, optimizer=optimizer).fit(X, y)


def _evidence(n, repeats):
    X, y = two_moons_like(n)
    peer, theta = _peer(X, y, None), np.log([4.0, 1.0])
    ours = evidence_and_gradient(pg.Laplace(), X, y)
    theirs, mine = peer.log_marginal_likelihood(theta, eval_gradient=True)[0], float(ours(jnp.asarray(theta))[0][0])
    assert abs(theirs - mine) < 1e-3 * abs(mine), (theirs, mine)
    a, b = seconds(lambda: ours(jnp.asarray(theta)), lambda: peer.log_marginal_likelihood(theta, True), repeats=repeats)
    return Row(
        f"Laplace evidence and gradient against scikit-learn, n = {n}", f"{ratio(b, a):.1f} x faster", "at least 2 x"
    )


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
    gap = found["ours"] - found["theirs"]
    return Row(
        f"Laplace, whole MAP fit against scikit-learn, n = {n}",
        f"{ratio(b, a):.1f} x faster (log evidence {gap:+.4f} nats to theirs)",
        "at least 3 x",
    )


def rows(repeats: int = 3) -> Iterator[Row]:
    """Ratios for each size."""
    yield from (_evidence(n, repeats) for n in SIZES)
    yield from (_fit(n, 1) for n in SIZES)
