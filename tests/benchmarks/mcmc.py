"""Effective samples a second: our NUTS against a hand-written NumPyro model, and Laplace's `Sample`
against joint NUTS.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer import NUTS as NumPyroNUTS

import ppl_gp as pg
from tests.benchmarks.common import Row, binary, two_moons_like


class Size(NamedTuple):
    """Draws of every chain, and the data of the two comparisons."""

    warmup: int
    samples: int
    joint: int
    marginal: int


FULL, TOY = Size(150, 300, 100, 300), Size(10, 20, 20, 20)


def hand_written(X, y):
    """What a NumPyro user writes without this package: whitened f, squared distances by hand."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    squared = jnp.sum((X[:, None] - X[None]) ** 2, -1)
    K = variance * (jnp.exp(-0.5 * squared / lengthscale**2) + 1e-8 * jnp.eye(X.shape[0]))
    v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([X.shape[0]]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(K) @ v)
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def _hyper_ess(values):
    return min(
        float(effective_sample_size(np.asarray(values[k]).reshape(1, -1)))
        for k in ("variance", "lengthscale")
    )


def _ours(method, X, y):
    """Hyperparameter ESS a second of sampling, compiled and warm."""
    key = jax.random.key(1)
    pg.fit(binary, method, key, X, y=y, throw=False)
    fit = pg.fit(binary, method, key, X, y=y, throw=False)
    return _hyper_ess(fit.hyper) / fit.stats["seconds"]


def _by_hand(size, X, y):
    draws = {"num_warmup": size.warmup, "num_samples": size.samples}
    mcmc = MCMC(NumPyroNUTS(hand_written), **draws, progress_bar=False, jit_model_args=True)
    X, y = jnp.asarray(X), jnp.asarray(y)
    mcmc.run(jax.random.key(1), X, y)
    start = time.perf_counter()
    mcmc.run(jax.random.key(1), X, y)
    values = jax.block_until_ready(mcmc.get_samples())
    return _hyper_ess(values) / (time.perf_counter() - start)


def rows(size: Size = FULL) -> Iterator[Row]:
    """Two ratios of effective samples a second."""
    draws = size.warmup, size.samples, 1
    joint = pg.NUTS(*draws)
    X, y = two_moons_like(size.joint)
    ratio = _ours(joint, X, y) / _by_hand(size, X, y)
    what = (
        f"NUTS: effective samples a second against a hand-written NumPyro model, n = {size.joint}"
    )
    yield Row(what, f"{ratio:.2f} x", "at least 1 x", ratio, "x")
    X, y = two_moons_like(size.marginal)
    gain = _ours(pg.Laplace(hyper=pg.Sample(*draws)), X, y) / _ours(joint, X, y)
    what = (
        "Sample() under Laplace against joint NUTS: hyperparameter ESS a second, n = "
        f"{size.marginal}"
    )
    yield Row(what, f"{gain:.1f} x", "at least 5 x", gain, "x")
